"""What keys leave in the index for ever is bounded for each of them: starts of processes, and figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage
from isles.proto.keys import AllowList
from isles.proto.messages import HEADER_BYTES_MAX, AskStatus, Done, Error, Message, Report, Status, Welcome, pack

NUM_STARTS = 3


@pytest.fixture
def settings() -> RoutingSettings:
    return RoutingSettings(chunk_bytes=4096, starts_per_key_max=NUM_STARTS, figures_bytes_per_key_max=2000)


@pytest.fixture
def stage(settings: RoutingSettings, allow: Callable[..., AllowList]) -> Stage:
    """A broker with keys whose run has not begun."""
    return Stage(settings, allowed=allow("soa", z=("eval", "operator")))


def text_of(answer: Message, code: str) -> str:
    assert isinstance(answer, Error), answer
    assert answer.code == code
    return answer.text


@pytest.mark.parametrize(("letter", "role"), [("s", "worker"), ("o", "outer"), ("a", "evaluator")])
@pytest.mark.parametrize("is_one_name", [True, False])
def test_the_starts_that_a_key_may_have_are_counted_whatever_they_are_called(
    stage: Stage, letter: str, role: str, is_one_name: bool
) -> None:
    def start(number: int, key: str = letter * 40) -> tuple[Member, Message]:
        name = "one" if is_one_name else f"name-{number}"
        member = stage.member(role, name, f"{number:016x}", key=key)  # type: ignore[arg-type]
        return member, member.join()

    for number in range(NUM_STARTS):
        last, answer = start(number)
        assert isinstance(answer, Welcome)
    for restart in (lambda: None, stage.restart):
        restart()
        text = text_of(start(NUM_STARTS)[1], "denied")
        assert f"had {NUM_STARTS} starts of processes in this run (broker.starts_per_key_max)" in text
        assert isinstance(last.join(), Welcome), "whoever is here already says HELLO as often as it likes"
    if role == "evaluator":
        assert isinstance(start(NUM_STARTS, "z" * 40)[1], Welcome), "another key has its own"


def test_operators_leave_nothing_and_are_not_counted(stage: Stage) -> None:
    for number in range(3 * NUM_STARTS):
        assert isinstance(stage.member("operator", "me", f"{number:016x}", key="a" * 40).join(), Welcome)


def test_without_keys_all_together_are_counted(settings: RoutingSettings) -> None:
    stage = Stage(settings)
    for number in range(NUM_STARTS):
        assert isinstance(stage.member("worker", f"us-{number}").join(), Welcome)
    assert "all processes together" in text_of(stage.member("worker", "us-9").join(), "denied")


def report_until_refused(evaluator: Member) -> tuple[int, str]:
    for number in range(100):
        answer = evaluator.ask(Report(name="loss", value=number / 7, versions={0: number}))
        if not isinstance(answer, Done):
            return number, text_of(answer, "too-large")
    pytest.fail("it is never refused")


def test_the_figures_that_a_key_may_report_are_bounded(stage: Stage, initialise: Callable[[Member], object]) -> None:
    founder = stage.member("operator", "founder", key="a" * 40)
    founder.join()
    initialise(founder)
    first = stage.member("evaluator", "first", key="a" * 40)
    first.join()
    num_taken, text = report_until_refused(first)
    assert num_taken > 10
    assert "the key admin has reported 2000 bytes of figures (broker.figures_bytes_per_key_max)" in text
    assert report_until_refused(founder)[0] == 0, "it is of the key, not of the process"
    second = stage.member("evaluator", "second", key="z" * 40)
    second.join()
    assert isinstance(second.ask(Report(name="loss", value=1.0)), Done)
    stage.restart()
    first.join()
    assert report_until_refused(first)[0] == 0
    status = first.ask(AskStatus())
    assert isinstance(status, Status)
    assert len(status.reports) == num_taken + 1, "nothing that was taken is lost"


def test_a_status_fits_a_message_however_long_the_figures_are(
    allow: Callable[..., AllowList], initialise: Callable[[Member], object]
) -> None:
    stage = Stage(RoutingSettings(chunk_bytes=4096), allowed=allow("a"))
    founder = stage.member("operator", "founder", key="a" * 40)
    founder.join()
    initialise(founder)
    for number in range(90):
        long = Report(name="loss", value=1.0, versions=dict.fromkeys(range(4000), 10**12 + number))
        assert isinstance(founder.ask(long), Done)
    seen: list[int] = []
    while len(seen) < 90:
        status = founder.ask(AskStatus(reports_after=seen[-1] if seen else 0))
        assert isinstance(status, Status)
        assert len(pack(status)) < HEADER_BYTES_MAX // 2
        assert status.reports, "each answer brings some"
        seen += [report.seq for report in status.reports]
    assert seen == list(range(1, 91))
