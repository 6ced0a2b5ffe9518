"""What the documentation says exists, and what it tells a person to type can be typed."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

from isles.ops import start
from isles.ops.chaos.options import read_file
from isles.ops.goodput.scenario import Scenario
from isles.ops.main import isles
from isles.ops.options import stated_flags
from isles.ops.plan.settings import PlanSettings
from isles.ops.run_folder import RunFolder, State
from isles.ops.settings import section_models
from isles.proto.config import Stated, from_assignment, resolve, variable_name
from isles.proto.events import EVENTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WRITTEN = [path for path in PAGES if path.parent.name != "reference"]
"""Pages that a person wrote."""

OTHER_WORDS = {"aggregator", "coordinator", "experiment", "hub", "master", "replica", "replicas"}
"""Words for things that already have a name here."""

LEARNER_ATTRIBUTES = {"progress", "shards"}
"""What a guide calls `learner.<this>` is an attribute of a Learner, no event."""

COMMAND_SETTINGS = {"goodput": Scenario, "plan": PlanSettings}
"""Settings that have flags and stand in no file."""

FILE_ENDINGS = {"json", "safetensors"}
"""What a guide calls `state.<this>` is a file, no event."""


class Snippet(NamedTuple):
    """A fenced block."""

    place: str
    language: str
    text: str


def snippets_of(path: Path) -> Iterator[Snippet]:
    """All fenced blocks of a page, those of lists included."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        yield Snippet(f"{path.relative_to(ROOT)}:{line}", match[2], textwrap.dedent(match[3]))


SNIPPETS = [snippet for path in PAGES for snippet in snippets_of(path)]


def named(language: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language == language]


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(language: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of the shell blocks with its place, as words; continued lines joined, prompts and comments gone."""
    for snippet in named(language):
        for line in snippet.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield snippet.place, [word for word in words if word != "&"]


# ---------------------------------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def generator(root: Path) -> ModuleType:
    """docs/generate.py, which is no package."""
    spec = spec_from_file_location("generate", root / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_says_what_the_code_says(generator: ModuleType) -> None:
    unlike = [
        name
        for name, render in generator.PAGES.items()
        if (generator.REFERENCE / name).read_text(encoding="utf-8") != render()
    ]
    assert unlike == [], "run `make docs`"


def test_the_reference_has_no_page_that_nothing_writes(generator: ModuleType) -> None:
    assert {path.name for path in generator.REFERENCE.iterdir()} == set(generator.PAGES)


# -------------------------------------------------------------------------------------------------------------- links


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(match[1]) for match in re.finditer(r"^#+ (.+)$", prose(path), re.MULTILINE)}


def links(path: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(path)) + re.findall(r'(?:src|href)="([^"]+)"', prose(path))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        path = todo.pop()
        if path in seen or path.suffix != ".md":
            continue
        seen.add(path)
        todo += [(path.parent / link.partition("#")[0]).resolve() for link in links(path) if not link.startswith("#")]
    assert [str(path.relative_to(ROOT)) for path in PAGES if path not in seen] == []


# ----------------------------------------------------------------------------------------------- names of what exists


def code_words() -> Iterator[tuple[str, str]]:
    """Everything between single backticks, with its page."""
    for path in WRITTEN:
        for word in re.findall(r"`([^`\n]+)`", prose(path)):
            yield str(path.relative_to(ROOT)), word


def test_every_setting_in_the_prose_exists() -> None:
    models = section_models()
    wrong = []
    for page, word in code_words():
        match = re.match(r"([a-z]+)\.([a-z_]+)\b(?!\.|/)", word)
        if match is None or match[1] not in models or word in EVENTS or match[0].endswith((".py", ".toml")):
            continue
        if match[2] not in models[match[1]].model_fields:
            wrong.append(f"{page}: {word}")
    assert wrong == []


def test_every_variable_in_the_docs_exists() -> None:
    known = {variable_name(f"{name}.{key}") for name, model in section_models().items() for key in model.model_fields}
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*PAGES, ROOT / "docker-compose.yml"])
    assert set(re.findall(r"\bISLES_[A-Z]+__[A-Z_]+\b", text)) - known == set()


def test_every_event_in_the_prose_exists() -> None:
    nouns = {name.partition(".")[0] for name in EVENTS} - set(section_models())
    words = [(page, word) for page, word in code_words() if re.fullmatch(r"[a-z]+\.[a-z_]+", word)]
    events = [(page, word) for page, word in words if word.partition(".")[2] not in FILE_ENDINGS]
    wrong = [one for one in events if one[1].partition(".")[0] in nouns and one[1] not in EVENTS]
    assert [one for one in wrong if one[1].removeprefix("learner.") not in LEARNER_ATTRIBUTES] == []


def test_every_file_in_the_docs_exists() -> None:
    folders = "proto|brokers|outer|workers|ops|tests|docs|benchmarks|examples"
    mentioned = [(page, word) for page, word in code_words() if re.fullmatch(rf"(?:{folders})/[\w./-]*", word)]
    assert [(page, word) for page, word in mentioned if not (ROOT / word).exists()] == []


def test_the_docs_use_the_words_of_the_glossary() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(sorted(OTHER_WORDS))})\b", re.IGNORECASE)
    assert [(path.name, match) for path in WRITTEN for match in pattern.findall(prose(path))] == []


# ------------------------------------------------------------------------------------------------------------ snippets


def test_there_are_snippets_to_check() -> None:
    assert {"sh", "python", "toml", "text"} <= {snippet.language for snippet in SNIPPETS}


def test_every_block_has_a_language_or_is_a_picture() -> None:
    known = {"", "sh", "python", "toml", "json", "text", "yaml"}
    assert [snippet.place for snippet in SNIPPETS if snippet.language not in known] == []


@pytest.mark.parametrize("snippet", named("python"), ids=lambda snippet: snippet.place)
def test_every_python_snippet_is_python(snippet: Snippet) -> None:
    ast.parse(snippet.text)


@pytest.mark.parametrize("snippet", named("toml"), ids=lambda snippet: snippet.place)
def test_every_settings_file_and_every_plan_in_the_docs_is_accepted(snippet: Snippet, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(snippet.text, encoding="utf-8")
    if "[[fault]]" in snippet.text:
        assert read_file(file).fault
        return
    has_own_task = ":" in str(tomllib.loads(snippet.text).get("run", {}).get("task", ""))
    resolve(section_models(has_own_task=has_own_task), file=file)


def typed(words: list[str]) -> list[Stated]:
    """Parses an `isles` command line as the command itself does; returns the settings in it."""
    top = click.Context(isles, info_name="isles")
    if words[1:2] in (["--help"], ["--version"]):
        return []
    command = isles.get_command(top, words[1])
    assert command is not None, words[1]
    if "--help" in words:
        return []
    context, rest = top, list(words[2:])
    while isinstance(command, click.Group) and rest and (found := command.get_command(context, rest[0])) is not None:
        command, rest = found, rest[1:]
    context = command.make_context(words[1], rest, parent=top)
    assignments = [from_assignment(text) for text in context.params.get("assignments") or ()]
    return [*stated_flags(command.params, context.params), *assignments]


def test_every_isles_command_in_the_docs_is_accepted() -> None:
    for place, words in commands("sh"):
        if words[0] != "isles":
            continue
        try:
            stated = typed(words)
        except click.ClickException as error:
            pytest.fail(f"{place}: {shlex.join(words)}: {error.format_message()}")
        tasks = [one.value for one in stated if one.key == "run.task"]
        models = section_models(has_own_task=bool(tasks) and tasks[-1] != "gpt") | COMMAND_SETTINGS
        resolve(models, flags=stated)


def test_every_kill_in_the_docs_hits_one_process_of_the_demo() -> None:
    children = start.commands(RunFolder(Path("runs/demo")), resolve(section_models()), State())
    lines = [" ".join(["isles", *arguments]) for _, arguments in children.values()]
    patterns = [(place, words[words.index("-f") + 1]) for place, words in commands("sh") if words[0] == "pkill"]
    assert patterns
    assert [one for one in patterns if sum(re.search(one[1], line) is not None for line in lines) != 1] == []


def test_every_make_target_in_the_docs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))
    variables = set(re.findall(r"\b([A-Z]+_?[A-Z]+)\b", makefile))
    for place, words in commands("sh"):
        if words[0] == "make":
            names = {word.partition("=")[0] for word in words[1:]}
            assert names <= targets | variables, place


def test_every_compose_service_in_the_docs_exists() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    services = set(re.findall(r"^  ([a-z-]+):$", compose, re.MULTILINE))
    for place, words in commands("sh"):
        if words[:2] == ["docker", "compose"]:
            scaled = {words[i + 1].partition("=")[0] for i, word in enumerate(words) if word == "--scale"}
            has_names = words[2] in {"logs", "restart", "stop", "start", "kill", "exec"}
            plain = [word for word in words[3:] if not word.startswith("-")] if has_names else []
            assert scaled | set(plain[:1]) <= services, place


def bare(text: str) -> str:
    """Code without comments, white space and trailing commas, so that its layout does not matter."""
    return re.sub(r"\s+", "", re.sub(r"  #.*", "", text)).replace(",)", ")")


def test_the_loop_in_the_docs_is_the_tested_example() -> None:
    example = bare((ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8"))
    for path in (ROOT / "README.md", ROOT / "docs" / "guides" / "own-loop.md"):
        loops = [snippet for snippet in snippets_of(path) if snippet.text.startswith("learner = Learner(")]
        assert loops, path.name
        for snippet in loops:
            assert [part for part in snippet.text.split("...") if bare(part) not in example] == [], snippet.place
