"""The end of a chaos run: everything is checked and measured, written to the run folder and told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from isles.ops.chaos.checker import Finding, check, is_kept
from isles.ops.chaos.facts import read_facts
from isles.ops.chaos.logbook import LogReader, unix_of
from isles.ops.chaos.measures import FaultRecord, Line, Measures, measure
from isles.ops.chaos.plan import Plan
from isles.ops.chaos.report import as_json
from isles.ops.run_folder import RunFolder, write_whole
from isles.proto.logs import Logger

REPORT_NAME: Final = "chaos.json"
CHECK_SECONDS: Final = 60.0
"""For an answer of a running broker."""


def conclude(
    folder: RunFolder,
    plan: Plan,
    faults: Sequence[FaultRecord],
    damaged: Sequence[str],
    logger: Logger,
    *,
    is_ended: bool,
) -> tuple[dict[str, Any], Measures, list[Finding]]:
    """Checks and measures a run folder, and writes `chaos.json` there: its content, and what it was made of.

    `is_ended` as `read_facts` has it.
    Raises UsageError if the folder has no run, UnreachableError if its broker does not answer.
    """
    known = [*damaged_before(folder), *damaged]
    findings = check(read_facts(folder.path, None, CHECK_SECONDS, damaged_on_purpose=known, is_ended=is_ended))
    measures = measure(read_logs(folder), faults)
    found = as_json(plan.model_dump(mode="json", exclude_defaults=True), faults, measures, findings, known)
    write_whole(folder.path / REPORT_NAME, json.dumps(found, indent=2) + "\n")
    broken = [one.promise for one in findings if one.verdict == "broken"]
    logger.info("run.checked", is_kept=is_kept(findings), broken=broken)
    return found, measures, findings


def read_logs(folder: RunFolder) -> dict[str, list[Line]]:
    """Process -> its lines in order, each with its time as `unix`."""
    return {
        path.stem: [{**line, "unix": unix_of(line)} for line in LogReader(path).read()]
        for path in sorted(folder.logs.glob("*.jsonl"))
    }


def damaged_before(folder: RunFolder) -> list[str]:
    """Digests of the blobs that earlier chaos runs have damaged."""
    return digests_in(folder.path / REPORT_NAME)


def digests_in(report: Path) -> list[str]:
    """Those that a report says were damaged on purpose; none if there is no such report."""
    try:
        found = json.loads(report.read_text(encoding="utf-8"))
        return [str(digest) for digest in found["damaged_on_purpose"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
