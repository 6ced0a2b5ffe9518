"""What codecs are called in settings and messages. Needs no tensor library, so that whoever reads a name can check it.

Four names are fixed. The others make up a family, `step<S>`: S is the step of a uniform quantiser in standard
deviations of the values, from 0.5 to 2.5 in steps of 0.01, written as briefly as it goes.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema

FIXED_NAMES: Final = ("fp32", "bf16", "int8", "int4")

STEP_HUNDREDTHS_MIN: Final = 50
"""S = 0.5 takes 3 bits a value; what needs to be finer has int4 and int8."""

STEP_HUNDREDTHS_MAX: Final = 250
"""S = 2.5 takes 0.4 bits a value and keeps three tenths of the energy of Gaussian values in each contribution."""

_FAMILY_TEXT: Final = "step and a number from 0.5 to 2.5 in steps of 0.01, such as step1.5"

NAMES_TEXT: Final = f"{', '.join(FIXED_NAMES)}, or {_FAMILY_TEXT}"
"""What there is, for a sentence that refuses something else."""

_STEP: Final = re.compile(r"step([0-9])(?:\.([0-9]{1,8}))?")


def step_hundredths(name: str) -> int | None:
    """100 S of a name `step<S>`, whichever way S is written; None if that is not a name of the family."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    digits = (match[2] or "").rstrip("0")
    if len(digits) > 2:
        return None
    hundredths = 100 * int(match[1]) + int(digits.ljust(2, "0"))
    return hundredths if STEP_HUNDREDTHS_MIN <= hundredths <= STEP_HUNDREDTHS_MAX else None


def step_name(hundredths: int) -> str:
    """The canonical name of the step codec with S = `hundredths` / 100: `step1`, `step1.5`, `step1.25`."""
    return f"step{hundredths / 100:.2f}".rstrip("0").rstrip(".")


def canonical_name(name: str) -> str:
    """The one name of the codec that `name` means. Raises ValueError if there is none."""
    if name in FIXED_NAMES:
        return name
    hundredths = step_hundredths(name)
    if hundredths is None:
        raise ValueError(f"there is no codec {name[:64]!r}; set one of {NAMES_TEXT}")
    return step_name(hundredths)


CodecName = Annotated[
    str,
    AfterValidator(canonical_name),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(FIXED_NAMES)},
                {
                    "type": "string",
                    "title": "step<S>",
                    "description": _FAMILY_TEXT,
                    "pattern": r"^step[0-2](\.[0-9]{1,8})?$",
                },
            ]
        }
    ),
]
"""A name of a codec, made canonical, so that equal settings have equal digests."""
