"""What codecs are called, and that equal codecs have equal names."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from isles.proto.agreement import SyncSettings
from isles.proto.codec.table import codec_named, step_codec
from isles.proto.codec_names import CodecName, canonical_name, step_hundredths
from isles.proto.config import allowed_values
from isles.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("fp32", "fp32"),
        ("int4", "int4"),
        ("step1", "step1"),
        ("step1.0", "step1"),
        ("step1.50", "step1.5"),
        ("step1.500000", "step1.5"),
        ("step0.5", "step0.5"),
        ("step0.51", "step0.51"),
        ("step2.50", "step2.5"),
    ],
)
def test_a_codec_has_one_name_however_it_is_written(given: str, canonical: str) -> None:
    assert canonical_name(given) == canonical
    assert codec_named(given) is codec_named(canonical)
    assert codec_named(given).name == canonical


def test_every_member_of_the_family_is_found_by_its_name() -> None:
    for hundredths in range(50, 251):
        codec = step_codec(hundredths)
        assert codec_named(codec.name) is codec
        assert step_hundredths(codec.name) == hundredths


@pytest.mark.parametrize(
    "name",
    [
        "", "int3", "step", "step0.49", "step2.51", "step1.555", "step1.", "step.5", "step01.5", "step-1", "step+1",
        "step1,5", "step1e0", "step١", "STEP1", " step1", "step1\n", "step1.5 ", "stepnan", "step9999999999",
        "step1." + "0" * 100, "fp16", "isles.proto.codec",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set one of fp32, bf16, int8, int4, or step and a number from 0.5 to 2.5"):
        codec_named(name)


def test_a_name_of_any_length_is_refused_in_one_short_sentence() -> None:
    with pytest.raises(ValueError, match="there is no codec") as caught:
        canonical_name("step" * 10_000)
    assert len(str(caught.value)) < 300


def test_equal_settings_have_equal_digests_however_a_codec_is_written() -> None:
    first, second = SyncSettings(codec_up="step1.50"), SyncSettings(codec_up="step1.5")
    assert first == second
    assert first.digest == second.digest
    assert first.codec_up == "step1.5"
    assert first.digest != SyncSettings(codec_up="step1.51").digest


def test_settings_with_a_codec_that_does_not_exist_say_what_there_is() -> None:
    with pytest.raises(ValidationError, match="there is no codec 'step3'; set one of"):
        SyncSettings(codec_down="step3")


def test_the_schema_and_the_reference_name_every_codec() -> None:
    schema = TypeAdapter(CodecName).json_schema()
    assert schema["anyOf"][0]["enum"] == ["fp32", "bf16", "int8", "int4"]
    assert allowed_values(SyncSettings, "codec_up") == (
        "one of fp32, bf16, int8, int4, or step and a number from 0.5 to 2.5 in steps of 0.01, such as step1.5"
    )
