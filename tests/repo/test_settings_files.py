"""Every settings file and variable in the tree is understood by the models that own the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isles.ops.settings import section_models
from isles.proto.config import Stated, resolve, variable_name
from isles.proto.errors import ConfigError

OTHER_TOML_FILES = {"cases.toml", "event_texts.toml", "pyproject.toml"}
"""TOML that holds no settings."""

VARIABLE = re.compile(r"^\s*-?\s*(ISLES_[A-Z_]+)\s*[:=]\s*(.*?)\s*(?:#.*)?$", re.MULTILINE)


def settings_files(text_files: list[Path]) -> list[Path]:
    return [path for path in text_files if path.suffix == ".toml" and path.name not in OTHER_TOML_FILES]


def compose_variables(root: Path) -> dict[str, dict[str, str]]:
    """Service -> its ISLES_* variables, read without a YAML library from the file's two-space indentation."""
    text = (root / "docker-compose.yml").read_text(encoding="utf-8")
    services = re.split(r"^  ([a-z-]+):$", text.split("\nservices:\n")[1].split("\nnetworks:\n")[0], flags=re.MULTILINE)
    bodies = dict(zip(services[1::2], services[2::2], strict=True))
    return {name: {key: value.strip("\"'") for key, value in VARIABLE.findall(body)} for name, body in bodies.items()}


def test_every_settings_file_is_valid(text_files: list[Path]) -> None:
    for path in settings_files(text_files):
        assert resolve(section_models(), file=path).sections, path


def test_every_variable_of_the_compose_file_is_a_valid_setting(root: Path) -> None:
    services = compose_variables(root)
    assert services.pop("keys") == {}
    assert set(services) == {"broker", "outer", "worker-us", "worker-eu", "evaluator"}
    for name, variables in services.items():
        assert variables, name
        assert resolve(section_models(), environment=variables).stated, name


def test_every_setting_is_documented(root: Path) -> None:
    silent = [
        f"{section}.{name}"
        for section, model in section_models().items()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_every_setting_can_be_a_variable() -> None:
    keys = [f"{section}.{name}" for section, model in section_models().items() for name in model.model_fields]
    assert len({variable_name(key) for key in keys}) == len(keys)


def test_every_default_survives_the_file_that_is_written_for_it(tmp_path: Path) -> None:
    config = resolve(section_models())
    file = tmp_path / "resolved.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert resolve(section_models(), file=file).sections == config.sections


def test_an_unknown_key_is_nowhere_accepted() -> None:
    for section in section_models():
        with pytest.raises(ConfigError, match="no_such_setting"):
            resolve(section_models(), flags=[Stated(f"{section}.no_such_setting", "1", "a test")])
