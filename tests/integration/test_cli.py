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
from safetensors.torch import save_file

from isles.ops.main import COMMANDS
from isles.ops.options import SHORT_FLAGS
from isles.ops.settings import section_models
from isles.proto.config import flag_name
from isles.workers.task import load_task

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
        ("init", "init", ("sync", "task")),
        ("change", "change", ("sync",)),
    ],
)
def test_the_help_of_a_command_explains_every_setting(
    command: str, own: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    text = " ".join(isles(command, "--help", cwd=tmp_path).stdout.split())
    for section in (own, *others):
        for name, field in section_models()[section].model_fields.items() if section in section_models() else ():
            flag = SHORT_FLAGS.get(f"{section}.{name}") or flag_name(f"{section}.{name}", own)
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
        (["broker", "--set", "sync.quorum=2"], {}, "takes no setting of the section sync, only of broker, log"),
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
        (["up", "--task", "foo"], {}, "task = 'foo' names no task: write `gpt` or `module:function`"),
        (["up", "--task", "nomod:fn"], {}, "task nomod:fn: there is no module nomod"),
        (["worker", "--task", "nomod:fn"], {}, "task nomod:fn: there is no module nomod"),
        (["export", "--output", "x"], {}, "give either --broker or --run-dir"),
        (["export", "--output", "x", "--run-dir", "none"], {}, "none is no run folder"),
        (["sample"], {}, "there is no file runs/demo/model.safetensors"),
        (["history"], {}, "name either a run folder or a broker"),
        (["history", "none"], {}, "none is no run folder: it has no store"),
        (["history", "none", "--last", "0"], {}, "Invalid value for '--last'"),
        (["replay"], {}, "name either a run folder or a broker"),
        (["replay", "none"], {}, "none is no run folder: it has no store"),
        (["change", "--set", "sync.quorum=3"], {}, "Missing option '--store'"),
        (["change", "--store", "none"], {}, "none is no store with a run"),
        (["change", "--store", "none", "--set", "run.seed=3"], {}, "run.seed cannot be changed"),
        (["change", "--store", "none", "--set", "sync.qourum=1"], {}, "there is no setting sync.qourum"),
        (["init", "--run-dir", "x"], {}, "Missing option '--from'"),
        (["init", "--from", "none"], {}, "give either --run-dir or --broker"),
        (["init", "--from", "none", "--run-dir", "x"], {}, "there is no file none"),
        (["status", "--timeout", "soon"], {}, "Invalid value for '--timeout'"),
        (["history", "--timeout", "0", "x"], {}, "is no number of seconds above 0"),
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


def test_a_run_is_started_once_at_a_running_broker_and_its_beginning_is_listed(
    broker: tuple[subprocess.Popen[bytes], str], tmp_path: Path
) -> None:
    _, address = broker
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    settings = {"corpus": str(tmp_path / "corpus"), "layers": 1, "width": 16, "heads": 1, "context": 16}
    save_file(load_task("gpt", settings).build_model(5).state_dict(), tmp_path / "weights.safetensors")
    flags = [f"--task.{name}={value}" for name, value in settings.items()]
    init = ("init", "--from", "weights.safetensors", "--broker", address, *flags, "--run.id=given", "--rounds=3")
    started = isles(*init, cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("started the run given from weights.safetensors: ")
    again = isles(*init, cwd=tmp_path)
    assert again.returncode == 3
    assert "has a run already" in complaint(again)
    history = json.loads(isles("history", "--broker", address, "--json", cwd=tmp_path).stdout)
    assert [[one["version"] for one in part["versions"]] for part in history["fragments"]] == [[0]] * 4
    replayed = isles("replay", "--broker", address, cwd=tmp_path)
    assert (replayed.returncode, replayed.stdout.count("nothing to recompute after version 0")) == (0, 4)
    wide = isles("history", str(tmp_path), cwd=tmp_path)  # the folder has a store that this broker is running on
    assert "fragment 3" in wide.stdout


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
