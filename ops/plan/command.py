"""`isles plan`: what a run takes of links, memory, disk and money."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from isles.ops.options import SettingOption, settings_command
from isles.ops.plan.settings import PlanSettings
from isles.proto.config import Stated, resolve
from isles.proto.errors import UsageError

SECTION: Final = "plan"
"""What its settings are called in sentences; they stand in no file."""
SIZES: Final = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}

GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "The model and its sites": (
        "sites", "step_seconds", "up_gbit", "down_gbit", "broker_gbit", "round_trip_seconds",
    ),
    "How it synchronises": (
        "interval_steps", "num_fragments", "overlap_steps", "codec_up", "codec_down", "bits_up", "bits_down",
        "apply_rule", "checkpoint_versions", "checkpoint_bytes", "state_cache_bytes", "payload_cache_bytes",
    ),
    "What is wanted, and what it costs": ("utilisation_max", "days", "egress_dollars_per_gb"),
    "Data parallel training": ("gradient_bits", "reduce_share"),
}  # fmt: skip
"""Heading -> settings of `PlanSettings`; parameters may be written as 5B."""

TEXT: Final = """Plan a run: bandwidth of every link and direction, H and P, memory, disk, the price of egress.

Nothing is started and nobody is asked: it is arithmetic, from the size of a model, the number of sites, what their
links carry and how the run synchronises. Beside it stand what data parallel training would need and what was published
for this method. Without options it plans the published case: 5 B parameters at 8 sites, steps of 1 s, 24 fragments.
"""


def build(name: str) -> click.Command:
    """The command."""
    own: list[click.Parameter] = [
        click.Option(["--parameters"], metavar="N", help="Values of the model, as in 350M or 5B.  [default: 5B]"),
        click.Option(["--json", "is_json"], is_flag=True, help="Print one JSON object instead of tables."),
        click.Option(
            ["--plot"], type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="Also draw it: a file that ends with .png or .svg.",
        ),
    ]  # fmt: skip
    options = [
        SettingOption(f"{SECTION}.{field}", PlanSettings, f"--{field.replace('_', '-')}", heading)
        for heading, fields in GROUPS.items()
        for field in fields
    ]
    return settings_command(name, TEXT, [*own, *options], _run, example="")


def _run(stated: Sequence[Stated], parameters: str | None, is_json: bool, plot: Path | None) -> int:
    from isles.ops.plan import report

    if plot is not None:
        from isles.ops.plotting import check_plot

        check_plot(plot)
    given = [*stated]
    if parameters is not None:
        given.append(Stated(f"{SECTION}.parameters", str(parse_size(parameters)), "the flag --parameters"))
    settings = resolve({SECTION: PlanSettings}, flags=given).section(SECTION, PlanSettings)
    if is_json:
        click.echo(report.as_json(settings))
    else:
        from isles.ops.wording import make_console

        console = make_console()
        for part in report.render(settings):
            console.print(part, soft_wrap=True)
    if plot is not None:
        from isles.ops.plan.plot import draw

        draw(plot, settings)
    return 0


def parse_size(text: str) -> int:
    """`5B`, `350M` or `123456` as a number. Raises UsageError that says how to write it."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kMBGT]?)\s*", text)
    if match is None:
        raise UsageError(f"--parameters {text:.40}: write it as 350M, 5B, 1.3T or a whole number")
    return round(float(match[1]) * SIZES[match[2]])
