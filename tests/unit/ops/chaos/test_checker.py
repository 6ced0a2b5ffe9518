"""The checker finds each thing that can be broken, and nothing in a run that kept its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from isles.ops.chaos.checker import (
    Facts,
    HeldFact,
    ReplayFact,
    RowFact,
    VersionFact,
    check,
    is_kept,
)
from isles.ops.chaos.report import render_findings
from isles.proto.ids import ContributionId

FIRST, SECOND, THIRD, LAST = (ContributionId("us-0", 0, "aaaaaaaa", number) for number in (1, 2, 3, 4))
OTHER = ContributionId("eu-0", 0, "bbbbbbbb", 1)


def kept() -> Facts:
    """A small run that did everything right: a merge of one, one of two, one rejection, one still pending."""
    return Facts(
        versions={
            0: (
                VersionFact(0, 0, 0),
                VersionFact(1, 1, 10, ((FIRST, 10),), (0,)),
                VersionFact(2, 3, 35, ((OTHER, 5), (SECOND, 20)), (0, 1)),
            )
        },
        rows=(RowFact(LAST, "pending"), RowFact(OTHER, "merged", 2)),
        accepted=(FIRST, OTHER, SECOND, THIRD, LAST),
        rejected=(THIRD,),
        commits=((0, 1, 1), (0, 2, 3)),
        held=(
            HeldFact("us-0", 1, 0, 0),
            HeldFact("us-0", 1, 0, 1),
            HeldFact("us-0", 2, 0, 0, is_joining=True),
            HeldFact("us-0", 2, 0, 2),
        ),
        starts={"us-0": 2, "broker": 1},
        num_up_starts=1,
        restarts_counted={"us-0": 1},
        has_ended_in_order=True,
        tokens_merged=35.0,
        num_averaged=1,
        replayed=(ReplayFact(0, 1, 2),),
    )


def verdicts(facts: Facts) -> dict[str, str]:
    return {one.promise: one.verdict for one in check(facts)}


def broken(facts: Facts) -> list[str]:
    found = [one.text for one in check(facts) if one.verdict == "broken"]
    assert is_kept(check(facts)) == (not found)
    return found


def version(facts: Facts, number: int, new: VersionFact | None) -> Facts:
    versions = list(facts.versions[0])
    versions[number : number + 1] = [] if new is None else [new]
    return replace(facts, versions={0: versions})


def test_a_run_that_lost_nothing_keeps_all_promises() -> None:
    assert set(verdicts(kept()).values()) == {"holds"}
    assert len(verdicts(kept())) == 10


def held(facts: Facts, *more: HeldFact) -> Facts:
    return replace(facts, held=(*facts.held, *more))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: version(facts, 1, None), "version 1 is missing"),
        (
            lambda facts: version(facts, 2, replace(facts.versions[0][2], epoch=0)),
            "version 2 has epoch 0 after 1",
        ),
        (lambda facts: replace(facts, commits=((0, 2, 3), (0, 1, 1))), "version 1 was committed after 2"),
        (lambda facts: replace(facts, commits=((0, 3, 3),)), "version 3 was announced and is not in the store"),
        (lambda facts: replace(facts, commits=((0, 2, 2),)), "another epoch"),
        (
            lambda facts: version(facts, 2, VersionFact(2, 3, 20, ((FIRST, 10),))),
            f"{FIRST} is in 2 recipes",
        ),
        (lambda facts: replace(facts, rejected=()), f"{THIRD} was accepted and then lost"),
        (lambda facts: replace(facts, rejected=(THIRD, FIRST)), f"{FIRST} was rejected, and is in a recipe"),
        (lambda facts: replace(facts, accepted=(FIRST, FIRST)), f"{FIRST} was accepted 2 times"),
        (lambda facts: replace(facts, rows=(RowFact(OTHER, "merged", 1),), accepted=()), "the recipes say 2"),
        (lambda facts: replace(facts, rows=(RowFact(OTHER, "pending"),), accepted=()), "it is in version 2"),
        (
            lambda facts: version(facts, 2, replace(facts.versions[0][2], tokens_total=34)),
            "counts 34 tokens, its recipes 35",
        ),
        (lambda facts: replace(facts, tokens_merged=40.0), "the summary counts 40"),
        (lambda facts: held(facts, HeldFact("us-0", 2, 0, 1)), "us-0: fragment 0: version 1 after 2"),
        (lambda facts: held(facts, HeldFact("us-0", 2, 0, 1, is_joining=True)), "version 1 after 2"),
        (lambda facts: held(facts, HeldFact("us-0", 3, 0, 1)), "version 1 after 2"),
        (lambda facts: held(facts, HeldFact("us-0", 3, 0, 0, is_joining=True), HeldFact("us-0", 3, 0, 1)), "1 after 2"),
        (
            lambda facts: version(facts, 3, VersionFact(3, 3, 40, ((THIRD, 5),), (0,))),
            "us-0: fragment 0: what is in version 3 is based on 0, after 1",
        ),
        (lambda facts: version(facts, 3, VersionFact(3, 3, 40, ((THIRD, 5),), (3,))), "version 3 is based on 3"),
        (lambda facts: replace(facts, restarts_counted={}), "us-0 was started again 1 times, and 0 were counted"),
        (lambda facts: replace(facts, replayed=(ReplayFact(0, 1, 1, "it differs"),)), "it differs"),
    ],
)
def test_each_broken_promise_is_found_and_named(change: Callable[[Facts], Facts], words: str) -> None:
    assert any(words in text for text in broken(change(kept())))


def test_what_cannot_be_read_is_unknown_and_not_broken() -> None:
    blind = Facts(
        versions=kept().versions, missing={"the broker's log": "no log", "the tape": "no numpy", "rows": "running"}
    )
    found = {one.promise: one for one in check(blind)}
    assert is_kept(found.values())
    assert found["rounds that were announced exist"].text == "no log"
    assert found["the tape replays bit by bit"].text == "no numpy"
    assert found["rows agree with recipes"].verdict == "unknown"
    assert found["no learner applies an older version after a newer one"].verdict == "holds", "recipes have the bases"


def test_what_learners_held_is_unknown_only_where_nothing_was_merged_and_no_log_is_there() -> None:
    promise = "no learner applies an older version after a newer one"
    young = Facts(versions={0: (VersionFact(0, 0, 0),)})
    assert verdicts(young)[promise] == "unknown"
    assert verdicts(held(young, HeldFact("us-0", 1, 0, 0)))[promise] == "holds"


def test_a_checkpoint_of_a_learner_that_comes_back_may_be_old_until_it_has_joined() -> None:
    back = (HeldFact("us-0", 3, 0, 0, is_joining=True), HeldFact("us-0", 3, 0, 1, is_joining=True))
    assert broken(held(kept(), *back, HeldFact("us-0", 3, 0, 2))) == []
    again = HeldFact("us-0", 3, 0, 0, is_joining=True)
    assert broken(held(kept(), *back, again)) == ["us-0: fragment 0: version 0 after 1"]


def test_a_learner_of_a_deterministic_run_goes_through_the_versions_after_its_checkpoint_once_more() -> None:
    assert broken(replace(held(kept(), HeldFact("us-0", 3, 0, 1)), is_deterministic=True)) == []


def test_learners_are_told_apart_and_so_are_fragments() -> None:
    assert broken(held(kept(), HeldFact("eu-0", 1, 0, 0), HeldFact("us-0", 2, 1, 0))) == []


def test_of_a_running_broker_the_newest_contribution_of_each_learner_may_be_pending() -> None:
    assert broken(replace(kept(), rows=None)) == []
    lost = replace(kept(), rows=None, accepted=(FIRST, SECOND, THIRD, ContributionId("us-0", 0, "aaaaaaaa", 9), LAST))
    assert any("accepted and then lost" in text for text in broken(lost))


def test_of_a_run_that_goes_on_what_was_settled_after_its_log_was_read_is_not_lost() -> None:
    later = ContributionId("us-0", 0, "aaaaaaaa", 5)
    again = ContributionId("us-0", 0, "dddddddd", 1)
    for newest in (later, again):
        facts = replace(kept(), rows=(RowFact(newest, "pending"),), is_going_on=True)
        assert broken(facts) == []
        (told,) = [one for one in check(facts) if "every accepted" in one.promise]
        assert told.text.endswith("3 merged, 1 rejected, 0 pending, 1 settled since the log was read")
        assert any("accepted and then lost" in text for text in broken(replace(facts, is_going_on=False)))
    older = replace(kept(), rows=(RowFact(THIRD, "rejected"),), is_going_on=True)
    assert broken(older) == [f"{LAST} was accepted and then lost"], "a row never goes back"
    not_the_newest = replace(kept(), rows=(RowFact(later, "pending"),), rejected=(), is_going_on=True)
    assert broken(not_the_newest) == [f"{THIRD} was accepted and then lost"]


def test_of_a_run_that_goes_on_it_is_said_what_only_its_end_tells() -> None:
    facts = replace(kept(), is_going_on=True, has_ended_in_order=False, tokens_merged=None)
    assert set(verdicts(facts).values()) == {"holds"}
    assert [one.at_end for one in check(facts) if one.at_end] == [
        "what becomes of the pending ones",
        "whether the summary counts as many tokens",
        "whether all restarts were counted, which is written down now and then",
    ]
    assert [one.at_end for one in check(kept()) if one.at_end] == []
    *_, note = render_findings(check(facts))
    assert "Only the end of the run tells what becomes of the pending ones; whether the summary" in str(note)
    assert len(render_findings(check(kept()))) == 1


def test_a_killed_supervisor_may_have_counted_fewer_restarts_than_there_were() -> None:
    assert broken(replace(kept(), restarts_counted={}, has_ended_in_order=False)) == []


def test_a_blob_that_was_damaged_on_purpose_explains_a_tape_that_ends_there() -> None:
    text = "blob 0123456789ab in the store is damaged"
    facts = replace(kept(), replayed=(ReplayFact(0, 1, 1, text),))
    assert broken(facts) == [f"fragment 0: {text}"]
    explained = replace(facts, damaged_on_purpose=("0123456789ab" + "0" * 52,))
    assert broken(explained) == []
    (told,) = [one.text for one in check(explained) if "tape" in one.promise]
    assert told == "1 versions recomputed; fragment 0 only up to 1, as blob 0123456789ab was damaged on purpose"


def test_a_running_broker_that_lets_go_of_versions_before_they_are_reached_breaks_no_promise() -> None:
    text = "the run moves on faster than this machine recomputes"
    facts = replace(kept(), replayed=(ReplayFact(0, 3, 2, text, is_outrun=True), ReplayFact(1, 1, 4)))
    assert broken(facts) == []
    (told,) = [one.text for one in check(facts) if "tape" in one.promise]
    assert told == f"4 versions recomputed; fragment 0 only up to 2: {text}"


def test_only_a_few_examples_of_many_faults_are_told() -> None:
    facts = replace(kept(), accepted=tuple(ContributionId("eu-9", 0, "cccccccc", n) for n in range(50)))
    assert any("and 47 more" in text for text in broken(facts))
