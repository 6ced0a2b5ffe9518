"""Logging: structlog, one JSON object a line where nobody watches, coloured text on a terminal.

`make_logger` returns a logger of this process; nothing is configured globally, so two processes in one interpreter
(a test, a notebook) do not mix. structlog is imported only when a logger is made: it costs as much as everything else
that `isles --help` does.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from isles.proto.errors import ConfigError


class Logger(Protocol):
    """What processes use of a structlog logger: the event's name first, then its fields."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


class SilentLogger:
    """Says nothing; the default where a library is used without a logger."""

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


class ListLogger:
    """Keeps `(level, event, fields)` in `records`; for tests."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.records.append(("debug", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        self.records.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.records.append(("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.records.append(("error", event, fields))

    def events(self) -> list[str]:
        """The names alone, in order."""
        return [event for _, event, _ in self.records]


class _Lines(io.TextIOBase):
    """Hands on what was written when it is flushed, a whole line in one call.

    A process must not end because nobody takes its log: a line that a full disk or a closed pipe refuses is lost.
    """

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._pending = ""

    def write(self, text: str) -> int:
        self._pending += text
        return len(text)

    def flush(self) -> None:
        pending, self._pending = self._pending, ""
        if pending:
            with contextlib.suppress(OSError):
                self._emit(pending)


def _appender(path: Path) -> Callable[[str], object]:
    """Opens the file for each line, so that nothing is left open and it may be moved away while the process runs."""

    def append(text: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append("")
    except OSError as error:
        raise ConfigError(f"the log file {path} cannot be written: {error.strerror or error}") from error
    return append


def _printer(stream: TextIO | None) -> Callable[[str], object]:
    """Writes to a stream at once; nowhere if the process was started without one."""

    def write(text: str) -> None:
        if stream is not None:
            stream.write(text)
            stream.flush()

    return write


def make_logger(process: str, name: str, *, file: Path | None = None, level: str = "info", **bound: Any) -> Logger:
    """A logger that appends JSON lines to `file` or, without one, writes to standard error.

    `process` is the role (`worker`), `name` this process's id; `level` is debug, info, warning or error. Raises
    ConfigError for a file that cannot be written.
    """
    import structlog

    stream: Any = _Lines(_printer(sys.stderr) if file is None else _appender(file))
    is_terminal = file is None and sys.stderr is not None and sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=True, pad_event_to=24)
        if is_terminal
        else structlog.processors.JSONRenderer(default=str)
    )
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_terminal else "iso", utc=not is_terminal)
    logger: Logger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info,
            _put_first_things_first,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        process=process,
        id=name,
        **bound,
    )
    return logger


def _put_first_things_first(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    first = ("timestamp", "level", "process", "id", "event")
    return {key: event[key] for key in first if key in event} | {k: v for k, v in event.items() if k not in first}
