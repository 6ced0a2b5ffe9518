"""Fetching the results of a run before its broker stops: a last status, then the parameters as a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from isles.ops.children import ChildProcess
from isles.ops.reach import Reach
from isles.ops.run_folder import RunFolder
from isles.ops.supervision import Concluded
from isles.ops.watch import StatusWatch

STATUS_SECONDS: Final = 20.0
"""For a status that is newer than the last figure; a broker that was just restarted answers within it."""
HURRIED_SECONDS: Final = 3.0
"""The same for a run that has failed: perhaps because of the broker."""
EXPORT_SECONDS: Final = 300.0
"""For the export: 10 GB over loopback take under a minute."""
EXPORTER: Final = "export"


class Conclusion:
    """Under way from its making until `poll` returns something. The export is a process of its own: it needs torch."""

    def __init__(
        self,
        folder: RunFolder,
        watch: StatusWatch,
        reach: Reach,
        environment: Mapping[str, str],
        now: float,
        *,
        is_hurried: bool,
    ) -> None:
        self._folder = folder
        self._watch = watch
        self._reach = reach
        self._environment = environment
        self._began_at = now
        self._exporter: ChildProcess | None = None
        self._deadline = now + (HURRIED_SECONDS if is_hurried else STATUS_SECONDS)

    def poll(self, now: float) -> Concluded | None:
        """The outcome, when there is one."""
        if self._exporter is not None:
            return self._check_export(now)
        status = self._watch.status
        if status is None or self._watch.status_asked_at < self._began_at:
            if now < self._deadline:
                return None
            if status is None or not status.run:
                return Concluded("the run never began: the broker did not answer")
            return Concluded("the results could not be fetched: the broker does not answer any more")
        if not status.run:
            return Concluded("the run never began: no worker brought its parameters")
        arguments = ["export", *self._reach.flags, "--output", str(self._folder.model)]
        self._exporter = ChildProcess(
            [*arguments, "--timeout", f"{EXPORT_SECONDS:g}"],
            output=self._folder.errors(EXPORTER),
            environment=self._environment,
        )
        self._deadline = now + 1.2 * EXPORT_SECONDS
        return None

    def _check_export(self, now: float) -> Concluded | None:
        assert self._exporter is not None
        code = self._exporter.poll()
        if code is None and now < self._deadline:
            return None
        words = self._folder.last_words(EXPORTER)
        self.close()
        if code == 0:
            self._folder.errors(EXPORTER).unlink(missing_ok=True)
            return Concluded()
        return Concluded(f"the parameters could not be written: {words or 'isles export did not end in time'}")

    def close(self) -> None:
        """Leaves no process behind."""
        if self._exporter is not None:
            if self._exporter.poll() is None:
                self._exporter.kill()
            self._exporter.wait(1.0)
            self._exporter.close()
