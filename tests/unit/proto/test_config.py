"""Settings come from four layers, and whatever is wrong with one is said in one sentence that names the place."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isles.proto.agreement import SyncSettings
from isles.proto.config import (
    DEFAULT_TOKENS,
    FORMER_SETTINGS,
    Config,
    FreeSettings,
    RunSettings,
    Stated,
    allowed_values,
    flag_name,
    from_assignment,
    resolve,
    toml_value,
    variable_name,
)
from isles.proto.errors import ConfigError
from isles.proto.ids import Name


class KilnSettings(BaseModel):
    """A component with a field of each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shelves: Annotated[int, Field(ge=1, le=12)] = Field(default=3, description="shelves of the kiln")
    degrees: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(default=900.5, description="heat, in degrees")
    is_gas: bool = Field(default=False, description="whether it burns gas")
    glaze: Literal["clear", "celadon"] = Field(default="clear", description="last coat")
    folder: Path | None = Field(default=None, description="where the notes are")
    name: Name = Field(default="kiln", description="of the kiln")
    label: str = Field(default="", description="on the door")

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str) -> str:
        if "#" in label:
            raise ValueError("a label has no #: leave it out")
        return label

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_gas and self.degrees > 1300:
            raise ValueError("kiln.degrees is above 1300, which gas cannot reach: lower it")
        return self


MODELS = {"kiln": KilnSettings, "sync": SyncSettings, "run": RunSettings}

Write = Callable[[str], Path]


def kiln(config: Config) -> KilnSettings:
    return config.section("kiln", KilnSettings)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def flag(key: str, value: str) -> Stated:
    return Stated(key, value, f"the flag {flag_name(key, 'kiln')}")


def complaint(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(MODELS, **sources)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------------------------------------------------- the layers


def test_without_any_source_everything_has_its_default() -> None:
    config = resolve(MODELS)
    assert kiln(config) == KilnSettings()
    assert config.stated == {}


def test_flags_win_over_variables_over_the_file_over_what_was_there_earlier(write: Write) -> None:
    earlier = [
        Stated("kiln.shelves", 1, "earlier", is_text=False),
        Stated("kiln.label", "old", "earlier", is_text=False),
    ]
    file = write('[kiln]\nshelves = 2\nglaze = "celadon"\nname = "file"')
    environment = {"ISLES_KILN__SHELVES": "4", "ISLES_KILN__NAME": "variable"}
    config = resolve(MODELS, earlier=earlier, file=file, environment=environment, flags=[flag("kiln.name", "flag")])
    made = kiln(config)
    assert (made.label, made.glaze, made.shelves, made.name) == ("old", "celadon", 4, "flag")


def test_what_is_stated_anywhere_wins_over_a_preset_that_is_stated_anywhere(write: Write) -> None:
    file = write("[sync]\nouter_momentum = 0.25\n")
    environment = {"ISLES_SYNC__INTERVAL_STEPS": "12"}
    config = resolve(MODELS, file=file, environment=environment, flags=[flag("sync.preset", "diloco")])
    sync = config.section("sync", SyncSettings)
    assert (sync.preset, sync.num_fragments, sync.outer_momentum, sync.interval_steps) == ("diloco", 1, 0.25, 12)
    assert config.stated_in("sync") == {"preset": "diloco", "outer_momentum": 0.25, "interval_steps": 12}


def test_a_preset_survives_the_file_that_is_written_for_it_whatever_was_stated_with_it(write: Write) -> None:
    flags = [flag("sync.preset", "streaming"), flag("sync.num_fragments", "7")]
    config = resolve(MODELS, flags=flags)
    again = resolve(MODELS, file=write(config.to_toml()))
    assert again.sections["sync"] == config.sections["sync"]


def test_the_source_that_won_is_remembered_for_each_setting_that_was_stated(write: Write) -> None:
    file = write("[kiln]\nshelves = 2\ndegrees = 1000")
    config = resolve(MODELS, file=file, flags=[flag("kiln.shelves", "3")])
    assert {key: one.source for key, one in config.stated.items()} == {
        "kiln.shelves": "the flag --shelves",
        "kiln.degrees": str(file),
    }
    assert config.stated_in("kiln") == {"shelves": 3, "degrees": 1000.0}


def test_a_setting_stated_with_its_default_counts_as_stated() -> None:
    assert resolve(MODELS, flags=[flag("kiln.shelves", "3")]).stated_in("kiln") == {"shelves": 3}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("kiln.shelves", "7", 7),
        ("kiln.degrees", "1e3", 1000.0),
        ("kiln.is_gas", "true", True),
        ("kiln.is_gas", "no", False),
        ("kiln.glaze", "celadon", "celadon"),
        ("kiln.folder", "a/b", Path("a/b")),
        ("kiln.label", "42", "42"),
    ],
)
def test_texts_of_variables_and_flags_become_values_of_the_right_type(key: str, text: str, value: object) -> None:
    by_flag = resolve(MODELS, flags=[flag(key, text)])
    by_variable = resolve(MODELS, environment={variable_name(key): text})
    name = key.partition(".")[2]
    assert getattr(kiln(by_flag), name) == getattr(kiln(by_variable), name) == value


def test_only_the_sections_that_a_process_knows_are_validated() -> None:
    config = resolve(MODELS, known=["kiln"], environment={"ISLES_SYNC__QUORUM": "none"})
    assert set(config.sections) == {"kiln"}
    assert config.stated == {}


def test_a_free_section_takes_any_key_and_reads_numbers_as_numbers() -> None:
    models = MODELS | {"task": FreeSettings}
    given_flags = [
        from_assignment("task.depth=3"),
        from_assignment("task.rate=0.5"),
        from_assignment("task.word=red fox"),
    ]
    config = resolve(models, environment={"ISLES_TASK__FAST": "true"}, flags=given_flags)
    assert config.stated_in("task") == {"fast": True, "depth": 3, "rate": 0.5, "word": "red fox"}


def test_other_variables_than_ours_are_nobodys_business() -> None:
    resolve(MODELS, environment={"PATH": "x", "isles_kiln__shelves": "99", "ISLESKILN": "1"})


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([("kiln.shelves", "x")], "the flag --shelves: kiln.shelves = 'x' must be a whole number from 1 to 12"),
        ([("kiln.shelves", "13")], "the flag --shelves: kiln.shelves = '13' must be a whole number from 1 to 12"),
        ([("kiln.degrees", "0")], "the flag --degrees: kiln.degrees = '0' must be a number above 0"),
        ([("kiln.degrees", "nan")], "the flag --degrees: kiln.degrees = 'nan' must be finite"),
        ([("kiln.is_gas", "maybe")], "the flag --is-gas: kiln.is_gas = 'maybe' must be true or false"),
        ([("kiln.glaze", "mud")], "the flag --glaze: kiln.glaze = 'mud' must be one of clear, celadon"),
        ([("kiln.label", "#1")], "the flag --label: kiln.label = '#1': a label has no #: leave it out"),
        ([("sync.quorum", "0")], "the flag --sync.quorum: sync.quorum = '0' must be a whole number from 1 to 100000"),
        (
            [("kiln.is_gas", "true"), ("kiln.degrees", "1400")],
            "kiln.degrees is above 1300, which gas cannot reach: lower it (from the flag --degrees)",
        ),
        (
            [("kiln.shelvs", "1")],
            "the flag --shelvs: there is no setting kiln.shelvs; did you mean shelves?",
        ),
        ([("oven.x", "1")], "the flag --oven.x: there is no section oven; the sections are kiln, sync, run"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(flags: list[tuple[str, str]], sentence: str) -> None:
    assert complaint(flags=[flag(*pair) for pair in flags]) == sentence


def test_a_name_is_described_in_words_rather_than_by_a_pattern() -> None:
    text = complaint(flags=[flag("kiln.name", "Über")])
    assert "must be up to 64 lower-case letters" in text


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "ISLES_KILN__SHELVES",
            "many",
            "the variable ISLES_KILN__SHELVES: kiln.shelves = 'many' must be a whole number from 1 to 12",
        ),
        (
            "ISLES_KILN__SHELVSE",
            "3",
            "the variable ISLES_KILN__SHELVSE sets nothing that exists: did you mean ISLES_KILN__SHELVES?",
        ),
        (
            "ISLES_KILN_SHELVES",
            "3",
            "the variable ISLES_KILN_SHELVES sets nothing that exists: did you mean ISLES_KILN__SHELVES?",
        ),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_allowed(variable: str, value: str, sentence: str) -> None:
    assert complaint(environment={variable: value}) == sentence


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[kiln]\nshelves = 99", "settings.toml: kiln.shelves = 99 must be a whole number from 1 to 12"),
        ('[kiln]\nshelves = "3"', "settings.toml: kiln.shelves = '3' must be a whole number from 1 to 12"),
        ("[kiln]\nshelves = true", "settings.toml: kiln.shelves = True must be a whole number from 1 to 12"),
        ("[kiln]\nis_gas = 1", "settings.toml: kiln.is_gas = 1 must be true or false"),
        ("[kiln]\nlabel = 3", "settings.toml: kiln.label = 3 must be a text"),
        ("[kiln]\nshelf = 3", "settings.toml: there is no setting kiln.shelf; did you mean shelves?"),
        ("[kilns]\nshelves = 3", "settings.toml: there is no section [kilns]; did you mean kiln?"),
        ("kiln = 3", "settings.toml: kiln is a section: write [kiln] and its settings below it"),
        ("[kiln", "settings.toml is no TOML file: "),
        ("x = 1\nx = 2", "settings.toml is no TOML file: "),
    ],
)
def test_a_wrong_file_is_named_with_what_is_allowed(write: Write, text: str, part: str) -> None:
    assert part in complaint(file=write(text))


@pytest.mark.parametrize("key", sorted(FORMER_SETTINGS))
def test_a_setting_that_earlier_releases_had_stops_no_file_and_nothing_else_may_state_it(
    write: Write, key: str
) -> None:
    section, _, name = key.partition(".")
    models = {section: KilnSettings}
    config = resolve(models, file=write(f"[{section}]\n{name} = true\nshelves = 3\n"))
    assert config.stated_in(section) == {"shelves": 3}
    with pytest.raises(ConfigError, match=f"no setting {key}"):
        resolve(models, flags=[flag(key, "true")])


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    text = complaint(file=tmp_path / "none.toml")
    assert "none.toml cannot be read: No such file" in text


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is no TOML file" in complaint(file=path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"#" * (2 << 20))
    assert "is no settings file" in complaint(file=path)


@pytest.mark.parametrize("text", ["quorum=3", "sync.quorum", "=", ""])
def test_an_assignment_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section\.key=value"):
        from_assignment(text)


def test_dashes_in_the_key_of_an_assignment_are_underscores_and_the_value_is_untouched() -> None:
    assert from_assignment("task.my-key=a=b-c") == Stated("task.my_key", "a=b-c", "--set task.my-key=a=b-c")


# ------------------------------------------------------------------------------------------------------------- the run


def test_a_run_has_a_budget_even_if_nobody_gave_one() -> None:
    assert RunSettings().budget.tokens == DEFAULT_TOKENS
    assert RunSettings(tokens=5).budget.tokens == 5
    assert RunSettings(rounds=7).budget.rounds == 7


def test_two_budgets_are_refused() -> None:
    text = complaint(flags=[from_assignment("run.tokens=1"), from_assignment("run.rounds=1")])
    assert text.startswith("run.tokens and run.rounds are two budgets for one run")


# ---------------------------------------------------------------------------------------------------- names and writing


def test_a_setting_has_one_name_for_each_source() -> None:
    assert variable_name("kiln.is_gas") == "ISLES_KILN__IS_GAS"
    assert flag_name("kiln.is_gas", "kiln") == "--is-gas"
    assert flag_name("kiln.is_gas", "sync") == "--kiln.is-gas"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shelves", "a whole number from 1 to 12"),
        ("degrees", "a number above 0"),
        ("is_gas", "true or false"),
        ("glaze", "one of clear, celadon"),
        ("folder", "a path"),
        ("label", "a text"),
    ],
)
def test_what_a_setting_may_be_is_told_in_words(name: str, text: str) -> None:
    assert allowed_values(KilnSettings, name) == text


def test_a_bound_that_only_the_wire_needs_is_not_told() -> None:
    assert allowed_values(RunSettings, "seed") == "a whole number of at least 0"


def test_the_written_configuration_gives_the_same_one_again(write: Write) -> None:
    first = resolve(
        MODELS, flags=[flag("kiln.degrees", "1250.25"), flag("kiln.label", 'a "b" \\ ü 🏺'), flag("run.rounds", "9")]
    )
    again = resolve(MODELS, file=write(first.to_toml()))
    assert again.sections == first.sections


def test_the_written_configuration_explains_each_setting_and_names_those_that_are_not_set() -> None:
    text = resolve(MODELS, known=["kiln"]).to_toml()
    assert text.startswith("[kiln]\n# shelves of the kiln\nshelves = 3\n")
    assert "# folder is not set: where the notes are\n" in text


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(string.printable)), max_size=40))
def test_any_text_survives_being_written(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"value = {toml_value(text)}")["value"] == text


@given(
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.lists(st.integers(0, 9)))
)
def test_any_value_survives_being_written(value: object) -> None:
    import tomllib

    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_what_no_setting_can_be_is_not_written() -> None:
    with pytest.raises(TypeError):
        toml_value({"a": 1})
