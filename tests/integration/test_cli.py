"""The command line in processes of its own: help for everything, one sentence for every mistake, quick to start."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.ops.main import COMMANDS
from isles.ops.settings import section_models

ISLES = Path(sys.executable).with_name("isles")
CPU_SECONDS_MAX = 0.3


def isles(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
    return subprocess.run(
        [ISLES, *arguments],
        cwd=cwd,
        env=environment | {"COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error."""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("isles: ")


def cpu_seconds(*command: object) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_little_cpu_time() -> None:
    assert min(cpu_seconds(ISLES, "--help") for _ in range(3)) < CPU_SECONDS_MAX


def test_help_imports_nothing_of_weight() -> None:
    program = (
        "import sys\nfrom isles.ops.main import run\ncode = run(['--help'])\n"
        "heavy = {'pydantic', 'torch', 'numpy', 'zmq', 'structlog', 'rich', 'msgpack'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_a_command_needs_no_tensor_library(command: str) -> None:
    program = (
        f"import sys\nfrom isles.ops.main import run\ncode = run(['{command}', '--help'])\n"
        "heavy = {'torch', 'numpy', 'zmq', 'structlog'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "own", "others"),
    [
        ("broker", "broker", ()),
        ("outer", "outer", ()),
        ("worker", "worker", ("sync", "task")),
        ("evaluate", "evaluator", ("task",)),
        ("up", "up", ("sync", "task")),
    ],
)
def test_the_help_of_a_command_explains_every_setting(
    command: str, own: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    text = " ".join(isles(command, "--help", cwd=tmp_path).stdout.split())
    for section in (own, *others):
        for name, field in section_models()[section].model_fields.items():
            flag = f"--{name if section == own else f'{section}.{name}'}".replace("_", "-")
            if f"{section}.{name}" == "sync.is_deterministic":
                flag = "--deterministic"
            assert f" {flag} " in text, flag
            assert field.description
            assert field.description[1:30] in text


def test_every_command_is_listed_and_called_without_arguments_shows_help(tmp_path: Path) -> None:
    shown = isles("--help", cwd=tmp_path).stdout
    assert all(f"  {name} " in shown for name in COMMANDS)
    bare = isles(cwd=tmp_path)
    assert bare.returncode == 2
    assert "Commands:" in bare.stderr


def test_the_version_is_told(tmp_path: Path) -> None:
    assert isles("--version", cwd=tmp_path).stdout.startswith("isles 0.")


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["bogus"], {}, "No such command 'bogus'"),
        (["worker", "--treads", "3"], {}, "No such option '--treads'"),
        (["worker", "--threads", "x"], {}, "the flag --threads: worker.threads = 'x' must be a whole number from 0 to"),
        (["worker", "--device", "abacus"], {}, "must be one of auto, cpu, cuda, mps"),
        (["worker", "--broker", "localhost"], {}, "is no broker address"),
        (["worker", "--config", "none.toml"], {}, "none.toml cannot be read: No such file"),
        (["worker"], {"ISLES_WORKER__THREDS": "3"}, "did you mean ISLES_WORKER__THREADS?"),
        (["broker"], {"ISLES_WORKERS__X": "3"}, "the variable ISLES_WORKERS__X sets nothing that exists"),
        (["broker", "--port", "70000"], {}, "the flag --port: broker.port = '70000' must be a whole number from 0"),
        (["outer"], {"ISLES_OUTER__BROKER": "x"}, "the variable ISLES_OUTER__BROKER: outer.broker = 'x'"),
        (["worker", "--tokens", "5", "--rounds", "5"], {}, "run.tokens and run.rounds are two budgets"),
        (["worker", "--task.width", "7"], {}, "task.width = 7 does not split into task.heads"),
        (["up", "--workers", "us"], {}, "write it as region=count,region=count"),
        (["up", "--workers", "us=0"], {}, "one machine takes from 1 to"),
        (["up", "--workers", "us=1,us=1"], {}, "names the region us twice"),
        (["up", "--set", "sync.qourum=1"], {}, "there is no setting sync.qourum; did you mean quorum?"),
        (["up", "--set", "sync.quorum"], {}, "write it as section.key=value"),
        (["up", "--set", "worker.us-7.step_seconds=1"], {}, "there is no worker us-7; this run has us-0, us-1"),
        (
            ["up", "--set", "worker.us-0.step_seconds=-1"],
            {},
            "worker.step_seconds = '-1' must be a number of at least 0",
        ),
        (["up", "--set", "worker.us-0.pace=1"], {}, "there is no setting worker.pace"),
        (["export", "--output", "x"], {}, "give either --broker or --run-dir"),
        (["export", "--output", "x", "--run-dir", "none"], {}, "none is no run folder"),
        (["sample"], {}, "there is no file runs/demo/model.safetensors"),
        (["status", "--timeout", "soon"], {}, "Invalid value for '--timeout'"),
    ],
)
def test_a_mistake_of_the_person_at_the_keyboard_is_one_sentence_and_exit_code_2(
    arguments: list[str], variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    result = isles(*arguments, cwd=tmp_path, **variables)
    assert sentence in complaint(result)
    assert result.returncode == 2
    assert result.stdout == ""


def test_a_broker_that_does_not_answer_is_exit_code_5(tmp_path: Path) -> None:
    result = isles("status", "--broker", "tcp://127.0.0.1:1", "--timeout", "0.3", cwd=tmp_path)
    assert result.returncode == 5
    assert "no broker answered at tcp://127.0.0.1:1 within 0.3 s" in complaint(result)


def test_a_file_that_is_no_model_is_refused_by_sample(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    result = isles("sample", "--model", str(path), cwd=tmp_path)
    assert result.returncode == 2
    assert "is no safetensors file that isles wrote" in complaint(result)


# ------------------------------------------------------------------------------------------------------ a real process


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A broker process and its address."""
    command = [ISLES, "broker", "--store", tmp_path / "store", "--port", "0", "--log-file", tmp_path / "broker.jsonl"]
    with subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE) as process:
        try:
            yield process, wait_for_address(process, tmp_path / "store" / "address")
        finally:
            process.kill()


def wait_for_address(process: subprocess.Popen[bytes], path: Path) -> str:
    for _ in range(600):
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    pytest.fail(f"the broker ended with {process.returncode} and wrote no address")


def test_status_shows_an_answering_broker_and_exits_with_0(
    broker: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    _, address = broker
    shown = isles("status", "--broker", address, cwd=tmp_path)
    assert (shown.returncode, "has no run yet" in shown.stdout) == (0, True), shown.stderr
    answer = json.loads(isles("status", "--broker", address, "--json", cwd=tmp_path).stdout)
    assert answer["run"] == ""
    assert answer["totals"]["rounds_committed"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_stop_ends_with_0_and_says_so(
    broker: tuple[subprocess.Popen[bytes], str], tmp_path: Path, number: signal.Signals
) -> None:
    process, _ = broker
    process.send_signal(number)
    assert process.wait(30) == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "broker.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("process.started", "process.stopped")


def test_a_second_broker_on_one_store_is_refused_in_one_sentence(
    broker: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    result = isles("broker", "--store", str(tmp_path / "store"), "--port", "0", cwd=tmp_path)
    assert result.returncode == 2
    assert "store" in complaint(result)


def test_a_process_ends_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "broker.jsonl"
    command = [ISLES, "broker", "--store", tmp_path / "store", "--port", "0", "--log-file", log, "--exit-with-parent"]
    with subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE) as process:
        wait_for_address(process, tmp_path / "store" / "address")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
