"""Figures of commands: readable files where matplotlib is, and one sentence where it is not."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from isles.ops import plotting
from isles.ops.main import run

FLEETS = ["simulate", "goodput", "--chips", "20k,40k", "--learners", "2", "--days", "1"]


def test_where_matplotlib_is_missing_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert run(["plan", "--plot", str(tmp_path / "plan.png")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        (
            "isles: --plot needs matplotlib, which is not installed here: install isles with its extra, as in "
            "`pip install 'isles[plot]'`, or leave --plot out"
        )
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*FLEETS, "--compare"], {"decoupled, M = 2", "data parallel, elastic", "20 k", "× published"}),
        ([*FLEETS, "--vary", "quorum=1,2"], {"Goodput", "Participation", "quorum"}),
        (["plan"], {"Bandwidth", "What H changes", "data parallel", "198"}),
    ],
)
def test_a_figure_names_what_it_shows(
    command: list[str], words: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    assert run([*command, "--plot", str(path)]) == 0
    texts = {element.text.strip() for element in ET.parse(path).iter() if element.text and element.text.strip()}
    assert words <= texts
    assert capsys.readouterr().out


def test_a_png_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert run(["plan", "--json", "--plot", str(path)]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
