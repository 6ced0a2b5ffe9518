"""Settings of workers and evaluators, the names of learners, and the choice of a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from isles.proto.errors import ConfigError, UsageError
from isles.proto.transport.address import DEFAULT_BROKER
from isles.workers.claim import claim_learner, host_name
from isles.workers.device import choose_device
from isles.workers.settings import EvaluatorSettings, WorkerSettings


@pytest.mark.parametrize("model", [WorkerSettings, EvaluatorSettings])
def test_every_setting_has_a_default_and_says_what_it_is(model: type[WorkerSettings | EvaluatorSettings]) -> None:
    model()
    for name, field in model.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name
        if name.endswith("_seconds"):
            assert "second" in field.description, name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"broker": "http://somewhere"}, "write tcp://HOST:PORT"),
        ({"id": "Not A Name"}, "is no name"),
        ({"regoin": "us"}, "Extra inputs"),
        ({"step_seconds": -1}, "greater than or equal to 0"),
        ({"step_seconds": float("inf")}, "finite"),
        ({"checkpoint_seconds": 0}, "greater than 0"),
        ({"device": "tpu"}, "'auto', 'cpu', 'cuda' or 'mps'"),
    ],
)
def test_a_wrong_setting_of_a_worker_is_refused_with_what_is_right(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        WorkerSettings.model_validate(settings)


def test_an_evaluator_waits_for_a_run_at_least_as_long_as_for_its_broker() -> None:
    with pytest.raises(ValidationError, match="raise the first or lower the second"):
        EvaluatorSettings(record_timeout_seconds=1.0)


def test_an_evaluator_needs_a_name() -> None:
    with pytest.raises(ValidationError, match="needs a name"):
        EvaluatorSettings(id="")


def test_the_cpu_is_always_there_and_auto_finds_something() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in {"cpu", "cuda", "mps"}


def test_a_device_that_this_machine_lacks_is_refused_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = cuda.*only cpu"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("node7", "node7"),
        ("Ada's MacBook.local", "ada-s-macbook.local"),
        ("-x-", "x"),
        ("", "worker"),
        ("日本", "worker"),
        ("h" * 80, "h" * 48),
    ],
)
def test_any_host_name_becomes_a_legal_name(host: str, name: str) -> None:
    assert host_name(host) == name


def test_workers_without_names_on_one_machine_are_numbered_and_find_their_numbers_again(tmp_path: Path) -> None:
    with claim_learner("", tmp_path, host="node7") as first, claim_learner("", tmp_path, host="node7") as second:
        assert (first.name, second.name) == ("node7", "node7-2")
        assert first.folder == tmp_path / "node7"
        first.close()
        with claim_learner("", tmp_path, host="node7") as again:
            assert again.name == "node7"


def test_a_name_that_another_process_trains_under_is_refused(tmp_path: Path) -> None:
    with claim_learner("us-0", tmp_path, host="node7"):
        with pytest.raises(UsageError, match=r"another process.*--id"):
            claim_learner("us-0", tmp_path, host="node7")
        claim_learner("us-0", tmp_path / "elsewhere", host="node7").close()


def test_without_a_checkpoint_folder_every_start_is_a_new_learner() -> None:
    first, second = (claim_learner("", None, host="node7") for _ in range(2))
    assert first.name != second.name
    assert first.folder is None
    assert claim_learner("us-0", None, host="node7").name == "us-0"


def test_a_checkpoint_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be written"):
        claim_learner("us-0", tmp_path / "file", host="node7")


# -------------------------------------------------------------------------------------------------------------- relays

RELAY = "tcp://10.0.0.5:7700"


@pytest.mark.parametrize("model", [WorkerSettings, EvaluatorSettings])
@pytest.mark.parametrize(
    ("given", "broker", "relay"),
    [
        ({}, DEFAULT_BROKER, None),
        ({"broker": "tcp://home:7700"}, "tcp://home:7700", None),
        ({"relay": RELAY}, None, RELAY),
        ({"relay": RELAY, "broker": "tcp://home:7700"}, "tcp://home:7700", RELAY),
        ({"relay": RELAY, "broker": DEFAULT_BROKER}, DEFAULT_BROKER, RELAY),
    ],
)
def test_with_a_relay_the_home_broker_is_dialled_only_if_it_was_named(
    model: type[WorkerSettings | EvaluatorSettings], given: dict[str, str], broker: str | None, relay: str | None
) -> None:
    settings = model(**given)
    assert (settings.route.broker, settings.route.relay) == (broker, relay)
    assert settings.address == (relay or broker)


@pytest.mark.parametrize("model", [WorkerSettings, EvaluatorSettings])
def test_whose_relay_is_away_asks_the_home_broker_before_it_gives_up(
    model: type[WorkerSettings | EvaluatorSettings],
) -> None:
    hasty = {"join_timeout_seconds": 15.0, "relay_timeout_seconds": 15.0}
    with pytest.raises(ValidationError, match="would give up before it asks the home broker"):
        model(relay=RELAY, broker="tcp://home:7700", **hasty)
    model(relay=RELAY, **hasty)
    model(broker="tcp://home:7700", **hasty)
