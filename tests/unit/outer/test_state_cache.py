"""States in memory and on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.optimizer import FragmentState
from isles.outer.state_cache import Slot, StateCache
from isles.proto.errors import StoreError, UsageError


def state_of(seed: int, num_values: int = 10, *, has_optimizer: bool = True) -> FragmentState:
    random = np.random.default_rng(seed)
    vectors = [random.standard_normal(num_values).astype(np.float32) for _ in range(3)]
    return FragmentState(vectors[0], *(vectors[1:] if has_optimizer else (None, None)))


def assert_same(found: FragmentState, wanted: FragmentState) -> None:
    for name in ("parameters", "momentum", "remainder"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


def is_in_memory(slot: Slot) -> bool:
    return all(isinstance(part, np.ndarray) for part in slot.parts.values())


def test_what_fits_is_in_memory_and_the_rest_on_disk_and_both_come_back(tmp_path: Path) -> None:
    cache = StateCache(120, str(tmp_path / "scratch"))
    first, second = cache.put(state_of(1)), cache.put(state_of(2))
    assert (is_in_memory(first), is_in_memory(second)) == (True, False)
    assert (cache.bytes_in_memory, cache.bytes_on_disk) == (120, 120)
    assert_same(cache.read(first), state_of(1))
    assert_same(cache.read(second), state_of(2))
    cache.close()


def test_zeros_take_no_room_and_come_back_as_such() -> None:
    cache = StateCache(0)
    slot = cache.put(state_of(1, has_optimizer=False))
    assert cache.bytes_on_disk == 40
    assert_same(cache.read(slot), state_of(1, has_optimizer=False))
    cache.close()


def test_a_slot_lives_until_its_last_owner_drops_it() -> None:
    cache = StateCache(1000)
    slot = cache.share(cache.put(state_of(1)))
    cache.drop(slot)
    assert_same(cache.read(slot), state_of(1))
    cache.drop(slot)
    assert cache.bytes_in_memory == 0


def test_nothing_of_the_scratch_file_is_left_in_its_folder_not_even_by_a_process_that_is_killed(tmp_path: Path) -> None:
    cache = StateCache(0, str(tmp_path))
    cache.put(state_of(1))
    assert list(tmp_path.iterdir()) == []
    cache.close()


def test_the_scratch_file_does_not_grow_with_the_number_of_versions(tmp_path: Path) -> None:
    cache = StateCache(0, str(tmp_path))
    slot = cache.put(state_of(0))
    for version in range(1, 20):
        newer = cache.put(state_of(version))
        cache.drop(slot)
        slot = newer
    assert_same(cache.read(slot), state_of(19))
    assert cache._file_bytes == 2 * 120
    cache.close()


def test_a_full_disk_is_one_clear_sentence_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = StateCache(0, str(tmp_path))
    held = cache.put(state_of(1))
    num_writes = 0

    def write(*_: Any) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 40

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(UsageError, match=r"cannot write 120 bytes .* No space left on device; .*outer.scratch_dir"):
            cache.put(state_of(2))
    assert cache.bytes_on_disk == 120
    assert_same(cache.read(held), state_of(1))
    assert_same(cache.read(cache.put(state_of(3))), state_of(3))
    cache.close()


def test_a_scratch_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError, match="scratch"):
        StateCache(0, str(tmp_path / "file" / "inside")).put(state_of(1))


def test_a_disk_that_gives_back_other_bytes_is_noticed(tmp_path: Path) -> None:
    cache = StateCache(0, str(tmp_path))
    slot = cache.put(state_of(1))
    assert cache._file is not None
    os.pwrite(cache._file, b"x", 50)
    with pytest.raises(StoreError, match="other bytes"):
        cache.read(slot)
    os.truncate(cache._file, 60)
    with pytest.raises(StoreError, match="other bytes"):
        cache.read_part(slot, "remainder")
    cache.close()


@given(st.lists(st.tuples(st.sampled_from(["put", "share", "drop"]), st.integers(0, 9)), max_size=40))
def test_the_account_is_exact_whatever_is_put_shared_and_dropped(steps: list[tuple[str, int]]) -> None:
    cache = StateCache(300)
    live: list[tuple[Slot, int]] = []
    for number, (step, pick) in enumerate(steps):
        if step == "put":
            live.append((cache.put(state_of(number, 1 + pick)), number))
        elif live:
            slot, seed = live[pick % len(live)]
            if step == "share":
                live.append((cache.share(slot), seed))
            else:
                live.remove((slot, seed))
                cache.drop(slot)
        slots = {id(slot): slot for slot, _ in live}.values()
        assert cache.bytes_in_memory == sum(slot.num_bytes for slot in slots if is_in_memory(slot)) <= 300
        assert cache.bytes_on_disk == sum(slot.num_bytes for slot in slots if not is_in_memory(slot))
    for slot, seed in live:
        assert_same(cache.read(slot), state_of(seed, slot.num_bytes // 12))
    cache.close()
