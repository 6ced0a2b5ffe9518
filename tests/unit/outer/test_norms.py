"""Which norms a payload can have come from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.norms import wrong_norm
from isles.proto.codec import CODEC_NAMES, decode, decode_with_scales, encode
from isles.proto.codec.table import codec_named
from isles.proto.manifest import TensorSlice

Vector = npt.NDArray[np.float32]
NAMES = (*CODEC_NAMES, "step0.5", "step1.1", "step1.5", "step2", "step2.5")
SLICES = (
    TensorSlice("large", 0, 300, (300,)),
    TensorSlice("scalar", 300, 301, ()),
    TensorSlice("small", 301, 340, (39,)),
    TensorSlice("last", 340, 700, (360,)),
)


def fault_of(vector: Vector, codec: str, factors: dict[str, float] | None = None) -> str:
    """The verdict on the true norms of a vector, some of them multiplied, beside what its payload decodes to."""
    norms = [
        float(np.linalg.norm(vector[one.start : one.stop].astype(np.float64))) * (factors or {}).get(one.name, 1.0)
        for one in SLICES
    ]
    decoded = decode_with_scales(encode(codec, vector), num_values=vector.size)
    return wrong_norm(norms, decoded, codec_named(codec), SLICES)


@given(
    seed=st.integers(0, 2**32),
    codec=st.sampled_from(NAMES),
    scales=st.lists(st.sampled_from([0.0, 1e-37, 1e-12, 1e-4, 1.0, 1e6]), min_size=4, max_size=4),
    is_heavy_tailed=st.booleans(),
)
def test_true_norms_pass_whatever_the_values_and_the_codec(
    seed: int, codec: str, scales: list[float], is_heavy_tailed: bool
) -> None:
    random = np.random.default_rng(seed)
    vector = random.standard_cauchy(700).clip(-1e6, 1e6) if is_heavy_tailed else random.standard_normal(700)
    for one, scale in zip(SLICES, scales, strict=True):
        vector[one.start : one.stop] *= scale
    assert fault_of(vector.astype(np.float32), codec) == ""


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("factor", [0.0, 10.0, 1e9])
def test_a_norm_that_no_codec_explains_names_its_tensor(codec: str, factor: float) -> None:
    vector = np.random.default_rng(1).standard_normal(700).astype(np.float32)
    fault = fault_of(vector, codec, {"last": factor})
    assert "tensor last" in fault
    assert codec in fault


@pytest.mark.parametrize(
    ("codec", "factor"),
    [("fp32", 1.0001), ("bf16", 1.01), ("int8", 1.1), ("int4", 2.0), ("step0.5", 1.3), ("step1.5", 1.5)],
)
def test_a_finer_codec_leaves_less_room_for_a_lie(codec: str, factor: float) -> None:
    vector = np.random.default_rng(1).standard_normal(700).astype(np.float32)
    assert "tensor large" in fault_of(vector, codec, {"large": factor})


def test_a_small_tensor_beside_large_values_may_have_vanished() -> None:
    vector = np.full(700, 1000.0, np.float32)
    vector[301:340] = 1.0
    assert not decode(encode("int4", vector), num_values=700)[301:340].any()
    assert fault_of(vector, "int4") == ""
