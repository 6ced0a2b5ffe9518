"""`isles pardon`: ends the quarantine of a learner, before its time is over."""

from __future__ import annotations

from pathlib import Path

import click

from isles.ops.options import Patience
from isles.ops.reach import find_reach, key_option
from isles.proto.errors import UsageError
from isles.proto.transport.address import DEFAULT_BROKER


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name)
    @click.argument("learner", metavar="LEARNER")
    @click.option("--broker", default=None, metavar="ADDRESS", help=f"Whom to tell.  [default: {DEFAULT_BROKER}]")
    @click.option(
        "--run-dir",
        default=None,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Tell the broker of the `isles up` that is running in this folder.",
    )
    @click.option(
        "--timeout", default=5.0, type=Patience(), show_default=True, metavar="SECONDS", help="How long to wait."
    )
    def pardon(learner: str, broker: str | None, key: Path | None, run_dir: Path | None, timeout: float) -> int:
        """Take contributions of LEARNER again, which was put in quarantine.

        A broker does that with a learner whose contributions were rejected several times in a row
        (`broker.quarantine_rejections`), for a while (`broker.quarantine_seconds`). Find out first why they were: the
        sentence with which its worker ended says so, and so does the log event `learner.quarantined`.
        """
        from isles.proto.ids import is_name
        from isles.proto.messages import Done, Error, Pardon

        if not is_name(learner):
            raise UsageError(f"{learner!r:.80} is no name of a learner: `isles status` lists them")
        reach = find_reach(broker, key, run_dir)
        connection = reach.connect("pardon")
        try:
            connection.wait_for_welcome(timeout, address=reach.address)
            answer = connection.ask_and_wait(Pardon(learner=learner), timeout, address=reach.address)
        finally:
            connection.close()
        if not isinstance(answer, Done):
            text = answer.text if isinstance(answer, Error) else f"it answered {type(answer).__name__}"
            raise UsageError(f"the broker at {reach.address} cannot pardon {learner}: {text}")
        click.echo(f"learner {learner} is welcome again: start its worker, if it has ended")
        return 0

    pardon.params.insert(2, key_option())
    return pardon
