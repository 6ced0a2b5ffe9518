"""A stop during a wait is no error, whichever process waits and whatever for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.ops import main
from isles.proto.config import Config
from isles.proto.logs import ListLogger
from isles.proto.transport.zmq_transport import ZmqClient

NOBODY = "tcp://127.0.0.1:1"

Configure = Callable[..., Config]
Serve = Callable[..., int]


def check_stop(serve: Serve, role: str, config: Config, num_looks: int) -> None:
    log = ListLogger()
    assert serve(role, config, num_looks, log) == 0
    assert [event for level, event, _ in log.records if level == "error"] == []


@pytest.mark.parametrize("num_looks", [0, 2])
@pytest.mark.parametrize("role", ["worker", "outer", "evaluator"])
def test_a_process_that_waits_for_its_broker_is_stopped_with_0(
    role: str, num_looks: int, configure: Configure, serve: Serve
) -> None:
    check_stop(serve, role, configure(NOBODY), num_looks)


@pytest.mark.parametrize(
    ("role", "num_looks"),
    [("outer", 1), ("outer", 4), ("evaluator", 1), ("evaluator", 3), *(("worker", number) for number in range(14))],
)
def test_a_process_that_waits_for_the_run_or_for_anything_of_it_is_stopped_with_0(
    role: str, num_looks: int, address: str, configure: Configure, serve: Serve
) -> None:
    check_stop(serve, role, configure(address), num_looks)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["history"],
        ["replay"],
        ["export", "--output", "model.safetensors"],
        ["init", "--from", "weights.safetensors"],
    ],
)
def test_a_command_that_waits_for_the_broker_is_interrupted_in_one_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(*_: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(ZmqClient, "poll", press_ctrl_c)
    assert main.run([*arguments, "--broker", NOBODY]) == main.EXIT_INTERRUPTED
    assert capsys.readouterr().err.split("\n") == ["", "isles: interrupted", ""]
