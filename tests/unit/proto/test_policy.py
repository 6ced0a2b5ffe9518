"""What the log says is done with a model's tensors."""

from __future__ import annotations

from isles.proto.events import EVENTS
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.policy import policy


def test_the_policy_counts_what_is_done_and_names_the_first_buffers() -> None:
    specs = [
        TensorSpec("w", (2, 3), "float32", "parameter"),
        TensorSpec("e", (4,), "float32", "embedding"),
        TensorSpec("f", (9,), "int8", "frozen"),
        *(TensorSpec(f"mean{number}", (9,), "float32", "buffer_average") for number in range(4)),
        TensorSpec("steps", (), "int64", "buffer_maximum"),
    ]
    assert policy(Manifest.build(specs, {"t": "e"}, 1)) == {
        "num_parameters": 10,
        "num_frozen": 1,
        "num_tied": 1,
        "num_averaged": 4,
        "averaged": "mean0, mean1, mean2, ...",
        "num_maximum": 1,
        "maximum": "steps",
        "num_skipped": 0,
    }


def test_the_event_has_at_least_the_fields_it_promises() -> None:
    fields = policy(Manifest.build([TensorSpec("w", (1,), "float32", "parameter")], {}, 1))
    assert set(EVENTS["model.described"]) <= set(fields)
