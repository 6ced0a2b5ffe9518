"""What is said when a store folder cannot be had."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from isles.brokers.store.lock import StoreLock
from isles.proto.errors import StoreError, StoreLockedError


def test_a_folder_that_cannot_be_locked_is_not_blamed_on_another_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StoreError, match=r"cannot be locked \(.*No locks available\): put it on a file system"
    ) as found:
        StoreLock(tmp_path)
    assert not isinstance(found.value, StoreLockedError)


def test_a_folder_that_another_broker_holds_is_free_once_it_is_given_back(tmp_path: Path) -> None:
    with StoreLock(tmp_path), pytest.raises(StoreLockedError, match="another broker is using the store folder"):
        StoreLock(tmp_path)
    StoreLock(tmp_path).release()
