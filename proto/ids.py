"""Names and numbers that identify things, and the rules that a name from a peer must pass."""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

from pydantic import Field, StringConstraints

NAME_LENGTH_MAX: Final = 64
"""Longest name of a run, learner or region: fits a log line and a metric label."""

NAME_PATTERN: Final = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$"
"""Lower case, digits, dot, dash and underscore, no leading or trailing mark: safe in a path, a label and a shell."""

DIGEST_PATTERN: Final = r"^[0-9a-f]{64}$"
TOKEN_PATTERN: Final = r"^[0-9a-f]{8,64}$"

FRAGMENTS_MAX: Final = 4096
"""Most fragments of a run; the published runs use 24."""

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name that a person or a process gave: run, learner, outer, region."""

NameOrNone = Annotated[str, StringConstraints(pattern=rf"^$|{NAME_PATTERN}")]
"""A name, or empty where there is none yet."""

Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]
"""Lower-case hexadecimal SHA-256 of some bytes."""

Token = Annotated[str, StringConstraints(pattern=TOKEN_PATTERN)]
"""Random lower-case hexadecimal: an incarnation, a session, a commit id."""

FragmentId = Annotated[int, Field(ge=0, lt=FRAGMENTS_MAX)]

Version = Annotated[int, Field(ge=0, lt=2**53)]
"""Number of committed outer steps of one fragment."""


class ContributionId(NamedTuple):
    """Names one payload for ever; the number is drawn by the training thread and grows within an incarnation."""

    learner: Name
    fragment: FragmentId
    incarnation: Token
    number: Annotated[int, Field(ge=0, lt=2**53)]

    def __str__(self) -> str:
        return f"{self.learner}/{self.fragment}/{self.incarnation[:8]}/{self.number}"


def is_name(text: str) -> bool:
    """Whether `text` may name a run, a learner or a region."""
    return re.fullmatch(NAME_PATTERN, text) is not None
