"""The commands `broker`, `outer`, `worker` and `evaluate`: settings in, one process's loop, exit code out."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from isles.ops.libraries import missing_library, require
from isles.ops.options import load_config, set_option, setting_options, settings_command, shared_options
from isles.ops.settings import LogSettings
from isles.outer.settings import OuterSettings
from isles.proto.config import Config, RunSettings, Stated
from isles.proto.errors import IslesError
from isles.proto.logs import Logger, make_logger
from isles.workers.finding import check_task

PARENT_GRACE_SECONDS: Final = 5.0
"""A process whose supervisor died gets this long to stop: nobody would kill it later."""
NAME_TOKEN_BYTES: Final = 8
"""Random bytes for the name of a process that was given none."""


@dataclass(frozen=True)
class _Process:
    """What is particular to one process command."""

    role: str
    section: str
    others: tuple[tuple[str, str], ...]
    """Further sections that it takes as dotted flags, each with the heading of its options."""
    text: str
    serve: Callable[[Config, Logger, threading.Event], int]


def _serve_broker(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    from isles.brokers.broker import serve
    from isles.brokers.settings import BrokerSettings

    return serve(config.section("broker", BrokerSettings), logger=logger, should_stop=should_stop)


def _serve_outer(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    from isles.outer.outer import serve
    from isles.outer.settings import OuterSettings

    require("numpy", "zstandard")  # it loads them only once there is a run
    _say_loaded(logger)
    return serve(config.section("outer", OuterSettings), logger=logger, should_stop=should_stop)


def _serve_worker(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    check_task(config.section("run", RunSettings).task)
    from isles.workers.trainer import serve

    # Every optimizer of torch imports it when it is made, which takes as long as torch itself: it belongs to loading.
    importlib.import_module("torch._dynamo")
    _say_loaded(logger)
    return serve(config, logger=logger, should_stop=should_stop)


def _serve_evaluator(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    check_task(config.section("run", RunSettings).task)
    from isles.workers.evaluator import serve

    _say_loaded(logger)
    return serve(config, logger=logger, should_stop=should_stop)


def _say_loaded(logger: Logger) -> None:
    """Tells the time of the libraries, which is most of a restart, from what comes after it."""
    logger.info("process.loaded", seconds=round(time.process_time(), 3))


RUN_HEADING: Final = "The run (used by the first worker; later ones must agree with what they state)"
PROCESSES: Final[dict[str, _Process]] = {
    "broker": _Process(
        "broker",
        "broker",
        (),
        "Route, store and acknowledge: the one process of a run that listens.\n\n"
        "Everything that was acknowledged survives its death. It needs no tensor library.",
        _serve_broker,
    ),
    "outer": _Process(
        "outer",
        "outer",
        (),
        "Merge contributions into new versions of the global parameters.\n\n"
        "It keeps nothing of its own; a second one stands by and takes over when the first is gone.",
        _serve_outer,
    ),
    "worker": _Process(
        "worker",
        "worker",
        (("run", RUN_HEADING), ("sync", "Synchronisation"), ("task", "The task gpt")),
        "Train: one learner, which waits for nobody.\n\n"
        "The address of the broker is enough: everything else is taken over from the run. The first worker of a run "
        "starts it with the settings below.",
        _serve_worker,
    ),
    "evaluate": _Process(
        "evaluator",
        "evaluator",
        (("run", RUN_HEADING), ("task", "The task gpt")),
        "Validate the global parameters while they change, and report the loss to the broker.",
        _serve_evaluator,
    ),
}


def build(name: str) -> click.Command:
    """The command of that name."""
    process = PROCESSES[name]
    own = process.section
    parameters: list[click.Parameter] = setting_options(own, f"The {process.role}", own=own)
    for section, heading in process.others:
        parameters += setting_options(section, heading, own=own)
    parameters += [*shared_options(), set_option()]
    parameters.append(click.Option(["--exit-with-parent"], is_flag=True, hidden=True))

    def run(
        *, stated: Sequence[Stated], config_file: Path | None, assignments: Sequence[str], exit_with_parent: bool
    ) -> int:
        known = [own, "log", *(section for section, _ in process.others)]
        config = load_config(known, file=config_file, stated=stated, assignments=assignments)
        if exit_with_parent:
            _exit_with_parent()
        return _run(process, config)

    example = f"{own}.{'store' if own == 'broker' else 'broker'}"
    return settings_command(name, process.text, parameters, run, example=example)


def _run(process: _Process, config: Config) -> int:
    """One process from its first log line to its last. Raises what `serve` raises, after logging it."""
    config = _named(config)
    settings = config.sections[process.section]
    log = config.section("log", LogSettings)
    name = str(getattr(settings, "id", "") or process.role)
    logger = make_logger(process.role, name, file=log.file, level=log.level)
    should_stop = _stop_on_signals()
    logger.info("process.started", version=version("isles"), settings=settings.model_dump(mode="json"))
    try:
        code = process.serve(config, logger, should_stop)
    except IslesError as error:
        logger.error("process.failed", error=type(error).__name__, text=str(error))
        raise
    except Exception as error:
        if (missing := missing_library(error)) is not None:
            logger.error("process.failed", error=type(missing).__name__, text=str(missing))
            raise missing from error
        logger.error("process.failed", error=type(error).__name__, text=str(error), exc_info=error)
        error.is_logged = True  # type: ignore[attr-defined]
        raise
    logger.info("process.stopped", reason="stopped by a signal" if should_stop.is_set() else "done", code=code)
    return code


def _named(config: Config) -> Config:
    """The same with a name for an outer that was given none, so that every line of its log tells it from another."""
    settings = config.sections.get("outer")
    if not isinstance(settings, OuterSettings):
        return config
    settings = settings.named(socket.gethostname(), secrets.token_hex(NAME_TOKEN_BYTES))
    return replace(config, sections={**config.sections, "outer": settings})


def _stop_on_signals() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; the next one of them has its usual effect."""
    should_stop = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        should_stop.set()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return should_stop


def _exit_with_parent() -> None:
    """Ends this process when its standard input is closed: its supervisor holds the other end and never writes."""

    def watch() -> None:
        descriptor = sys.stdin.fileno()
        while os.read(descriptor, 4096):
            pass
        killer: Any = threading.Timer(PARENT_GRACE_SECONDS, os._exit, [1])
        killer.daemon = True
        killer.start()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
