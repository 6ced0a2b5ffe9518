from __future__ import annotations

import os
from pathlib import Path

import pytest

from isles.proto.errors import UsageError
from isles.workers.data import corpus as corpus_module
from isles.workers.data.corpus import is_held_out, library_paths, load_corpus, standard_library, text_paths


def write(root: Path, path: str, text: bytes | str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two hundred files of a hundred bytes: enough for the hash to hold some out."""
    for number in range(200):
        write(tmp_path, f"part{number % 7}/{number:03}.txt", f"{number:03} ".ljust(100, "x"))
    return tmp_path


def test_whole_files_are_held_out_and_each_byte_is_in_one_part(folder: Path) -> None:
    corpus = load_corpus(folder)
    training, validation = bytes(corpus.training.numpy()), bytes(corpus.validation.numpy())
    for path in text_paths(folder):
        text = (folder / path).read_bytes()
        assert (text in validation) == is_held_out(path)
        assert (text in training) != is_held_out(path)
    assert len(training) + len(validation) == 200 * 100
    assert corpus.num_files == 200


def test_the_text_follows_sorted_paths(folder: Path) -> None:
    expected = b"".join((folder / path).read_bytes() for path in sorted(text_paths(folder)) if not is_held_out(path))
    assert bytes(load_corpus(folder).training.numpy()) == expected


def test_about_one_file_in_twenty_is_held_out() -> None:
    assert 400 < sum(is_held_out(f"some/path/{number}.py") for number in range(10_000)) < 600


def test_the_digest_repeats_and_sees_bytes_names_and_moves(folder: Path, tmp_path: Path) -> None:
    first = load_corpus(folder).sha256
    assert load_corpus(folder).sha256 == first
    digests = {first}
    write(folder, "part0/000.txt", "other".ljust(100, "x"))
    digests.add(load_corpus(folder).sha256)
    (folder / "part1/001.txt").rename(folder / "part1/001b.txt")
    digests.add(load_corpus(folder).sha256)
    assert len(digests) == 3


def test_the_digest_does_not_depend_on_where_the_folder_is(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("elsewhere")
    for path in text_paths(folder):
        write(copy, path, (folder / path).read_bytes())
    assert load_corpus(copy).sha256 == load_corpus(folder).sha256


def test_hidden_binary_and_empty_files_and_pipes_are_passed_over(folder: Path) -> None:
    expected = load_corpus(folder).sha256
    write(folder, ".hidden", "secret")
    write(folder, ".git/config", "secret")
    write(folder, "image.bin", b"GIF\0\0")
    write(folder, "empty.txt", "")
    (folder / "broken").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    assert load_corpus(folder).sha256 == expected


def test_one_large_file_is_split_at_its_last_twentieth(tmp_path: Path) -> None:
    text = bytes(range(1, 201)) * 10
    write(tmp_path, "book.txt", text)
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.training.numpy()) == text[:1900]
    assert bytes(corpus.validation.numpy()) == text[1900:]


@pytest.mark.parametrize("name", ["missing", "file.txt"])
def test_a_corpus_that_is_no_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "file.txt", "text")
    with pytest.raises(UsageError, match=f"{name} is no folder"):
        load_corpus(tmp_path / name)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "image.bin", b"\0" * 100)
    with pytest.raises(UsageError, match="no text was found"):
        load_corpus(tmp_path)


def test_a_corpus_above_the_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "CORPUS_BYTES_MAX", 5000)
    with pytest.raises(UsageError, match="name a smaller folder"):
        load_corpus(folder)
    monkeypatch.setattr(corpus_module, "CORPUS_FILES_MAX", 100)
    with pytest.raises(UsageError, match="200 files"):
        load_corpus(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_a_file_that_cannot_be_read_is_refused_by_name(folder: Path) -> None:
    (folder / "part0/000.txt").chmod(0)
    with pytest.raises(UsageError, match=r"000\.txt could not be read"):
        load_corpus(folder)


def test_tests_caches_and_files_of_this_machine_are_no_part_of_the_library(tmp_path: Path) -> None:
    kept = ["ast.py", "email/__init__.py", "unittest/case.py"]
    left_out = [
        "test/test_ast.py", "sqlite3/test/dump.py", "ctypes/tests/x.py", "idlelib/idle_test/x.py", "__pycache__/ast.py",
        "site-packages/numpy/x.py", "pydoc_data/topics.py", "_sysconfigdata__linux_.py", "config-3.11/python-config.py",
        "sitecustomize.py", "ast.pyc", "LICENSE.txt",
    ]  # fmt: skip
    for path in kept + left_out:
        write(tmp_path, path, "pass\n")
    assert library_paths(tmp_path) == kept


def test_the_standard_library_is_a_corpus_of_some_megabytes() -> None:
    paths = library_paths(standard_library())
    assert "asyncio/tasks.py" in paths
    assert "argparse.py" in paths
    corpus = load_corpus()
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.validation) / (len(corpus.training) + len(corpus.validation)) < 0.2
    assert len(corpus.sha256) == 64
