"""The page about presets says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from isles.proto.agreement import SyncSettings
from isles.proto.presets import PRESETS, QUORUM_MAX, Preset


def written_table(page: str) -> list[list[str]]:
    """Cells of the table whose first column is `setting`, marks removed."""
    lines = page[page.index("| setting |") :].splitlines()
    table = [line for line in lines[: lines.index("")] if not line.startswith("|---")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def as_written(value: object) -> str:
    if value == QUORUM_MAX:
        return "all"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_table_of_presets_has_every_value_that_a_preset_sets(root: Path) -> None:
    page = (root / "docs" / "concepts" / "presets.md").read_text(encoding="utf-8")
    header, *rows = written_table(page)
    names: tuple[Preset, ...] = get_args(Preset)
    assert header == ["setting", *names]
    settings = {preset: SyncSettings.model_validate({"preset": preset}) for preset in names}
    wanted = [
        [name, *(as_written(getattr(settings[preset], name)) for preset in names)]
        for name in SyncSettings.model_fields
        if any(name in values for values in PRESETS.values())
    ]
    assert rows == wanted


def test_the_page_of_presets_describes_each_of_them(root: Path) -> None:
    page = (root / "docs" / "concepts" / "presets.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `([a-z-]+)` \| [A-Za-z]", page, re.MULTILINE))
    assert set(PRESETS) <= described
