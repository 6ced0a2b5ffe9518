"""Whether a failure of the store's disk is merely a lack of room."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from isles.proto.errors import StoreError, StoreFullError

FULL_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
ROOM_BYTES: Final = 1 << 20
"""With less than this free SQLite fails in ways of its own, such as for want of its shared memory."""


def store_error(text: str, cause: OSError | sqlite3.Error, folder: Path) -> StoreError:
    """The error that ends a broker, whose `text` names the place: of its own kind if the disk is full."""
    if is_full(cause, folder):
        return StoreFullError(
            f"the disk under {folder} is full ({cause}): nothing that was acknowledged is lost; make room, then start "
            "this broker again"
        )
    return StoreError(text)


def is_full(cause: OSError | sqlite3.Error, folder: Path) -> bool:
    """Whether there was no room."""
    if isinstance(cause, OSError) and cause.errno in FULL_ERRORS:
        return True
    if isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return True
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < ROOM_BYTES
