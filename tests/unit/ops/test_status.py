"""What `isles status` prints: tables for a person, plain values for a program."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from isles.ops import main
from isles.ops.reach import running_broker
from isles.ops.run_folder import RunFolder, State
from isles.ops.status import as_json, render
from isles.proto.errors import UsageError
from isles.proto.messages import (
    LearnerInfo,
    LeaseInfo,
    RelayFacts,
    RelayInfo,
    ReportInfo,
    Status,
    Totals,
    VersionInfo,
)


@pytest.fixture
def status() -> Status:
    """Two learners in two regions, one of them gone; two fragments, one leased."""
    learners = tuple(
        LearnerInfo(
            learner=f"{region}-0", region=region, incarnation="cd" * 8, is_live=region == "us", last_seen_unix=seen,
            steps=40, tokens=123_456, tokens_per_second=321.0, step_seconds=0.5, num_shards=16,
        )
        for region, seen in (("us", 998.0), ("eu", 900.0))
    )  # fmt: skip
    fragments = tuple(
        VersionInfo(fragment=n, version=n + 3, parameters_sha256="0" * 64, tokens_total=5000, committed_unix=940.0)
        for n in range(2)
    )
    return Status(
        run="demo", broker_incarnation="ab" * 8, uptime_seconds=75, progress=0.5, num_parameters=1000,
        learners=learners, fragments=fragments, num_pending={1: 2},
        leases=(
            LeaseInfo(fragment=0, holder="outer", epoch=4, expires_seconds=2.0),
            LeaseInfo(fragment=1, holder="other", epoch=5, expires_seconds=-2.0),
        ),
        reports=(ReportInfo(seq=1, name="validation_loss", value=2.5, versions={0: 3}, reporter="e", unix=990.0),),
        totals=Totals(rounds_committed=7, tokens_merged=5000, tokens_produced=6000, merged=14),
    )  # fmt: skip


def text_of(status: Status, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in render(status, 1000.0, "tcp://127.0.0.1:7700"):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_name_every_learner_fragment_lease_and_figure(status: Status) -> None:
    text = text_of(status)
    for part in (
        "run demo", "50.0 % done", "1 of 2 learners live", "2 pending", "us-0", "eu-0", "live", "gone", "2.0 s",
        "1 min 40 s", "outer", "other, expired", "validation_loss 2.5000", "1 min 00 s",
    ):  # fmt: skip
        assert part in text, part


def test_the_tables_fit_eighty_columns_without_loss(status: Status) -> None:
    text = text_of(status)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize(("epoch", "text"), [(1, "settings were changed once;"), (2, "changed 2 times;")])
def test_changes_of_the_settings_are_told(epoch: int, text: str, status: Status) -> None:
    assert "settings were changed" not in text_of(status)
    assert text in text_of(status.model_copy(update={"settings_epoch": epoch}))


@pytest.fixture
def relayed(status: Status) -> Status:
    """The same with a relay that has much to hand over, and one that has gone."""
    facts = RelayFacts(
        region="us", num_clients=12, num_waiting=34, waiting_bytes=2 << 30, waiting_bytes_max=4 << 30,
        cache_bytes=5_000_000_000, round_trip_seconds=0.0817,
    )  # fmt: skip
    relays = (
        RelayInfo(relay="relay-us", is_live=True, last_seen_unix=999.0, facts=facts),
        RelayInfo(relay="relay-eu", is_live=False, last_seen_unix=500.0, facts=RelayFacts(region="eu")),
    )
    return status.model_copy(update={"relays": relays})


def test_relays_are_shown_with_their_link_their_backlog_and_their_cache(relayed: Status) -> None:
    text = text_of(relayed)
    for part in ("relay-us", "82 ms", "34, 2.15 GB", "5 GB", "1.0 s", "relay-eu", "8 min 20 s"):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_without_relays_there_is_no_table_of_them(status: Status) -> None:
    assert "relay" not in text_of(status)


def test_the_plain_values_name_the_relays(relayed: Status) -> None:
    found = json.loads(json.dumps(as_json(relayed, 1000.0)))["relays"]
    assert [(one["relay"], one["region"], one["is_live"], one["num_waiting"]) for one in found] == [
        ("relay-us", "us", True, 34),
        ("relay-eu", "eu", False, 0),
    ]
    assert found[1]["last_seen_seconds"] == 500.0


def test_a_broker_without_a_run_says_so(status: Status) -> None:
    assert "has no run yet" in text_of(status.model_copy(update={"run": ""}))


def test_the_plain_values_group_learners_by_region_with_their_ages(status: Status) -> None:
    found = json.loads(json.dumps(as_json(status, 1000.0)))
    assert found["regions"]["eu"][0]["last_seen_seconds"] == 100.0
    assert found["regions"]["us"][0]["is_live"] is True
    assert [fragment["version"] for fragment in found["fragments"]] == [3, 4]
    assert [fragment["num_pending"] for fragment in found["fragments"]] == [0, 2]
    assert found["leases"][0] == {"fragment": 0, "holder": "outer", "epoch": 4, "expires_seconds": 2.0}
    assert found["reports"][0]["value"] == 2.5
    assert found["totals"]["merged"] == 14


def test_the_newest_figures_are_asked_for(
    status: Status, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker tells so many at a time; the oldest ones would be those of the beginning of the run."""
    asked: list[bool] = []

    class Watch:
        def wait(self, _timeout: float, *, address: str) -> Status:
            return status.model_copy(update={"run": address[:1]})

        def close(self) -> None: ...

    def watch(_reach: object, *, wants_newest: bool = False) -> Watch:
        asked.append(wants_newest)
        return Watch()

    monkeypatch.setattr("isles.ops.watch.watch", watch)
    assert main.run(["status", "--broker", "tcp://127.0.0.1:7700", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reports"][0]["value"] == 2.5
    assert asked == [True]


def test_the_broker_of_a_run_folder_is_asked_only_while_it_runs(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write_state(State("tcp://127.0.0.1:1,2,3"))
        assert running_broker(tmp_path) == "tcp://127.0.0.1:1,2,3"
    with pytest.raises(UsageError, match="no `isles up` is running"):
        running_broker(tmp_path)
