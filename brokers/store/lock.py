"""One broker process per store folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from isles.brokers.store.fullness import store_error
from isles.proto.errors import StoreLockedError


class StoreLock:
    """Holds a store folder until `release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing. Raises StoreLockedError if another process holds it, StoreError else."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"the store folder {folder} cannot be used ({error}): choose another or mend it"
            raise store_error(text, error, folder) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreLockedError(
                f"another broker is using the store folder {folder}: stop it, or give this one a folder of its own"
            ) from error
        except OSError as error:
            self.release()
            text = f"the store folder {folder} cannot be locked ({error}): put it on a file system that has locks"
            raise store_error(text, error, folder) from error

    def release(self) -> None:
        """Gives the folder back; idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
