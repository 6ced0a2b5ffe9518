"""The text that a run trains on, as bytes, split into training and validation text.

Two sources: the Python standard library's own source, which every machine that runs isles already has, or a folder of
text files. Files are read in sorted order and whole files are held out for validation, chosen by a hash of their
relative path, so every process of a run sees the same split without talking about it. The digest covers paths, bytes
and split: processes whose texts differ find out before they train together.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from isles.proto.errors import UsageError

HELD_OUT_SHARE: Final = 0.05
"""Share of the files, and roughly of the bytes, kept for validation."""

HELD_OUT_SHARE_MIN: Final = 0.01
HELD_OUT_SHARE_MAX: Final = 0.2
"""When whole files would hold out less or more than this, as with few large files, the end of each file is held out."""

CORPUS_BYTES_MAX: Final = 2 << 30
"""Largest corpus: every process holds it in memory, so more belongs into a task of one's own."""

CORPUS_FILES_MAX: Final = 200_000
"""Most files of a corpus; above it, somebody named a whole disk."""

SNIFFED_BYTES: Final = 8192
"""A file with a zero byte in its first 8 KiB is no text; the same rule decides in version control."""

LEFT_OUT_FOLDERS: Final = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)
"""Folders of the standard library's tree that are tests, caches, generated manuals, or not part of the library."""

LEFT_OUT_FILES: Final = frozenset({"sitecustomize.py", "usercustomize.py"})
LEFT_OUT_PREFIXES: Final = ("_sysconfigdata", "config-")
"""Written when this Python was built or installed: they differ between machines that have the same library."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text in two parts."""

    training: Tensor
    """uint8 (bytes,)"""
    validation: Tensor
    """uint8 (bytes,)"""
    sha256: str
    """Lower-case hexadecimal digest of every path, its bytes, and where the split is."""
    num_files: int


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the text of `folder`, or the standard library's when it is None; 12 MB take about 0.1 s.

    Raises:
        UsageError: the folder is missing, unreadable, empty, or larger than `CORPUS_BYTES_MAX`.
    """
    if folder is None:
        return _read(standard_library(), library_paths(standard_library()))
    if not folder.is_dir():
        raise UsageError(f"task.corpus = {folder} is no folder: name a folder of text files, or leave it out")
    return _read(folder, text_paths(folder))


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def library_paths(root: Path) -> list[str]:
    """Relative paths of the library's own source files, sorted, with `/` between the parts."""
    return sorted(
        path
        for path in _walk(root, LEFT_OUT_FOLDERS)
        if path.endswith(".py")
        and not path.startswith(LEFT_OUT_PREFIXES)
        and path.rpartition("/")[2] not in LEFT_OUT_FILES
    )


def text_paths(root: Path) -> list[str]:
    """Relative paths of all files below `root` that are not hidden, sorted, with `/` between the parts."""
    return sorted(_walk(root, frozenset()))


def is_held_out(path: str) -> bool:
    """Whether the file at this relative path is for validation: true for about 5 % of all paths."""
    return int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:8]) < HELD_OUT_SHARE * 2**64


def _walk(root: Path, left_out: frozenset[str]) -> Iterator[str]:
    """Relative paths of the files below `root`, in no particular order; hidden files and folders are passed over."""
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        relative = Path(folder).relative_to(root).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        yield from (f"{prefix}{name}" for name in files if not name.startswith("."))


def _refuse(error: OSError) -> None:
    """Stop at a folder that cannot be listed: to pass over it would train on another text than the others do."""
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> UsageError:
    return UsageError(f"{error.filename} could not be read ({error.strerror}): mend it or move it out of the corpus")


def _read(root: Path, paths: list[str]) -> Corpus:
    """Read the files, decide the split, and digest all of it."""
    if len(paths) > CORPUS_FILES_MAX:
        raise UsageError(f"{root} holds {len(paths)} files, more than {CORPUS_FILES_MAX}: name a smaller folder")
    texts: list[tuple[str, bytes]] = []
    room = CORPUS_BYTES_MAX
    for path in paths:
        text = _read_file(root / path, room)
        room -= len(text)
        if text and b"\0" not in text[:SNIFFED_BYTES]:
            texts.append((path, text))
    if not texts:
        raise UsageError(f"no text was found below {root}: name a folder of text files with task.corpus")
    held_out = sum(len(text) for path, text in texts if is_held_out(path))
    has_whole_files = HELD_OUT_SHARE_MIN <= held_out / sum(len(text) for _, text in texts) <= HELD_OUT_SHARE_MAX
    return _split(texts, has_whole_files=has_whole_files)


def _read_file(path: Path, room: int) -> bytes:
    """The bytes of a regular file no larger than `room`; nothing for pipes, devices and links that lead nowhere."""
    try:
        if not path.is_file():
            return b""
        if path.stat().st_size > room:
            raise UsageError(f"with {path} the corpus is above {CORPUS_BYTES_MAX >> 30} GiB: name a smaller folder")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error


def _split(texts: list[tuple[str, bytes]], *, has_whole_files: bool) -> Corpus:
    """Put each file into its part: whole, or cut where its last twentieth begins."""
    training, validation = bytearray(), bytearray()
    digest = hashlib.sha256()
    for path, text in texts:
        if has_whole_files:
            cut = 0 if is_held_out(path) else len(text)
        else:
            cut = len(text) - int(len(text) * HELD_OUT_SHARE)
        training += text[:cut]
        validation += text[cut:]
        # Lengths before contents: no two different corpora feed the digest the same bytes.
        name = path.encode("utf-8", "surrogateescape")
        digest.update(f"{len(name)} {len(text)} {cut}\n".encode() + name)
        digest.update(text)
    return Corpus(_tensor(training), _tensor(validation), digest.hexdigest(), len(texts))


def _tensor(data: bytearray) -> Tensor:
    """The bytes as a uint8 tensor that shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
