"""The allow-list on the disk: read at the start, and again whenever it has changed while a broker runs.

A list that cannot be read changes nothing: whom the last good one lets in is let in, and nobody else. That is said at
once, and again and again until somebody mends it, since a revocation may wait behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from isles.proto.key_files import ALLOW_LIST_FILE, read_allow_list
from isles.proto.keys import AllowList

REMIND_SECONDS: Final = 60.0
"""Between two complaints about one fault: it stays in sight and does not drown the rest."""


class AllowListFile:
    """The allow-list of a key folder."""

    def __init__(self, folder: Path) -> None:
        """Reads it. Raises ConfigError, one sentence, if it cannot be used."""
        self._folder = folder
        self._stamp = self._read_stamp()
        self.allowed = read_allow_list(folder)
        """The last good one."""
        self._complained_at: float | None = None

    def lets_in(self, public: str) -> bool:
        """Whether a public key (z85) is in the list."""
        return self.allowed.find(public) is not None

    def look(self) -> AllowList | None:
        """The list, if it has changed; None if not. Raises ConfigError if it cannot be read as it is now."""
        stamp = self._read_stamp()
        if stamp is not None and stamp == self._stamp:
            return None
        found = read_allow_list(self._folder)
        self._stamp, self._complained_at = stamp, None
        is_same, self.allowed = found == self.allowed, found
        return None if is_same else found

    def should_complain(self, now: float) -> bool:
        """Whether to say (again) that it cannot be read; True counts as said. `now` in monotonic seconds."""
        if self._complained_at is not None and now - self._complained_at < REMIND_SECONDS:
            return False
        self._complained_at = now
        return True

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = (self._folder / ALLOW_LIST_FILE).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
