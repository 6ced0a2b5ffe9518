"""The names of all log events, each with the fields that it always has.

A log line is one event: `event` is a name from here (a noun and what happened to it), `process` and `id` say who says
it, the other fields are facts. People grep for these names and dashboards count them: they are part of the interface.
"""

from __future__ import annotations

from typing import Final

EVENTS: Final[dict[str, tuple[str, ...]]] = {
    # every process
    "process.started": ("version", "settings"),
    "process.loaded": ("seconds",),
    "timeouts.checked": ("seconds",),
    "timeouts.doubtful": ("text",),
    "process.stopped": ("reason",),
    "process.failed": ("error", "text"),
    "message.refused": ("code", "text"),
    "broker.joined": ("address", "run"),
    "broker.lost": ("address", "silent_seconds"),
    "way.changed": ("address", "silent_seconds"),
    "messages.dropped": ("unsent", "unread", "hints"),
    "blob.unavailable": ("digest", "text"),
    # broker
    "broker.started": ("address", "store", "incarnation"),
    "client.joined": ("role", "id", "incarnation", "region"),
    "client.refused": ("role", "id", "code", "text"),
    "client.left": ("role", "id"),
    "client.revoked": ("role", "id", "key"),
    "keys.changed": ("num_keys", "num_names"),
    "keys.unreadable": ("text",),
    "connections.cut": ("stranger", "surplus", "overfull"),
    "learner.expired": ("learner", "silent_seconds"),
    "run.initialised": ("run", "learner", "num_fragments", "num_parameters"),
    "contribution.accepted": ("learner", "fragment", "number", "incarnation", "base_version", "tokens", "bytes"),
    "contribution.expired": ("learner", "fragment", "number", "incarnation", "base_version", "head"),
    "contribution.rejected": ("learner", "fragment", "number", "incarnation", "reason"),
    "contribution.damaged": ("learner", "fragment", "number", "incarnation", "text"),
    "learner.quarantined": ("learner", "num_rejected", "seconds", "reason"),
    "learner.pardoned": ("learner", "operator"),
    "round.committed": ("fragment", "version", "participants", "fraction", "tokens", "epoch"),
    "version.checkpointed": ("fragment", "version", "bytes"),
    "commit.stale": ("fragment", "base_version", "head", "text"),
    "outer.leased": ("outer", "fragments", "epoch"),
    "outer.fenced": ("outer", "fragment", "epoch"),
    "shards.leased": ("learner", "num_shards"),
    "figure.reported": ("reporter", "name", "value"),
    "store.swept": ("num_blobs", "bytes"),
    "store.full": ("bytes", "limit_bytes"),
    "store.filling": ("limit", "bytes", "limit_bytes", "text"),
    "store.relieved": ("limit", "bytes", "limit_bytes"),
    "round.alone": ("fragment", "version", "learner", "num_others", "text"),
    "round.shared": ("fragment", "version", "num_rounds"),
    "learner.alone": ("learner", "num_cycles", "text"),
    "learner.accompanied": ("learner",),
    "learner.outdated": ("learner", "num_expired", "versions_behind", "text"),
    "learner.caught_up": ("learner",),
    "run.duplicated": ("role", "id", "run", "store", "text"),
    "blob.corrupt": ("digest", "text"),
    # outer
    "outer.standing_by": ("fragments",),
    "state.recovered": ("fragment", "version", "checkpoint", "num_versions", "seconds"),
    "recovery.failed": ("fragment", "reason"),
    "checkpoint.stored": ("fragment", "version", "bytes", "seconds"),
    "round.opened": ("fragment", "version", "learner"),
    "round.merged": ("fragment", "version", "participants", "live", "fraction", "waited_seconds", "grace_seconds"),
    "contribution.clipped": ("fragment", "version", "learner", "factor"),
    "round.abandoned": ("fragment", "version", "reason"),
    "learners.missing": ("live", "required", "text"),
    "learners.complete": ("live", "required"),
    # worker
    "learner.joined": ("learner", "region", "versions", "progress"),
    "model.described": ("num_parameters", "num_frozen", "num_tied", "num_averaged", "num_maximum", "num_skipped"),
    "learner.reset": ("learner", "fragment", "reason", "tokens"),
    "learner.progressed": ("learner", "steps", "tokens", "loss", "learning_rate", "progress", "versions"),
    "step.skipped": ("learner", "steps", "loss", "norm"),
    "contribution.sent": ("learner", "fragment", "number", "base_version", "tokens", "bytes"),
    "contribution.merged": ("learner", "fragment", "number", "version"),
    "version.applied": ("learner", "fragment", "version", "base_version"),
    "checkpoint.written": ("learner", "path", "seconds"),
    "checkpoint.failed": ("learner", "path", "text"),
    "checkpoint.damaged": ("learner", "path", "text"),
    "learner.drained": ("learner", "steps", "tokens"),
    # evaluator
    "loss.evaluated": ("value", "versions", "tokens"),
    # up, change
    "run.changed": ("settings_epoch", "changes"),
    "child.started": ("child", "pid"),
    "child.died": ("child", "code", "restart_seconds"),
    "child.killed": ("child",),
    "run.stopping": ("status", "text"),
    "run.finished": ("status", "summary"),
    # up, chaos
    "fault.injected": ("fault", "kind", "targets"),
    "fault.ended": ("fault", "kind", "targets"),
    "fault.skipped": ("fault", "kind", "text"),
    "run.checked": ("is_kept", "broken"),
}
