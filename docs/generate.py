"""Writes docs/reference/ out of the settings, messages, events, errors and commands themselves.

    python docs/generate.py            write what differs
    python docs/generate.py --check    name what differs, exit 1 if anything does

Whatever the code says about a thing is printed; only the sentences about log events stand in docs/event_texts.toml.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import annotated_types
import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from isles.ops.main import COMMANDS, isles
from isles.ops.options import SettingOption
from isles.ops.settings import SECTIONS, section_models
from isles.proto import agreement, errors, events, ids, messages
from isles.proto.config import allowed_values, variable_name

DOCS: Final = Path(__file__).resolve().parent
REFERENCE: Final = DOCS / "reference"
EVENT_TEXTS: Final = DOCS / "event_texts.toml"
NOTE: Final = "<!-- Written by `make docs`. Change the code it is made from, not this file. -->"

# ----------------------------------------------------------------------------------------------------------- markdown


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table, followed by an empty line; nothing if there are no rows."""
    names = list(head)
    body = ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    if not body:
        return []
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *body, ""]


def cell(text: str) -> str:
    """Text for one cell: a single line in which a bar stays a bar."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code, nothing if there is none."""
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) or not text else ".")


def page(title: str, introduction: str, lines: Iterable[str]) -> str:
    """A whole file."""
    return "\n".join([f"# {title}", "", NOTE, "", introduction.strip(), "", *lines]).rstrip() + "\n"


# ----------------------------------------------------------------------------------------------------------- settings

SETTINGS_TEXT: Final = """
Each process takes some of these sections. A value comes from the first of these places that has one: a flag, an
environment variable, a TOML file (`--config FILE`), the default. An unknown key is refused wherever it stands.

```toml
[sync]
interval_steps = 24
```

The same as a variable is `ISLES_SYNC__INTERVAL_STEPS=24`, as a flag `--sync.interval-steps 24`, and as
`--set sync.interval_steps=24`, which is the way to give a setting to a task of one's own. Flags of
`run`, and of a command's own section, are short: `--tokens 1000000`, and for `isles worker` also `--region us`.

Settings of `sync`, and the seed and budget of `run`, are part of the run record. The first worker writes it, the others
adopt it, and a process that was given another value is refused.
"""


def shown_default(model: type[BaseModel], name: str) -> str:
    """The default as a settings file would have it."""
    field = model.model_fields[name]
    default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return code(str(default).lower())
    return code(f'"{default}"' if isinstance(default, str | Path) else str(default))


def settings_page() -> str:
    """docs/reference/settings.md."""
    lines: list[str] = []
    for section, model in section_models().items():
        owner = SECTIONS[section][0].replace("isles.", "").replace(".", "/")
        lines += [f"## {section}", "", sentence(model.__doc__ or ""), "", f"Defined in `{owner}.py`.", ""]
        rows = [
            (
                code(name),
                shown_default(model, name),
                allowed_values(model, name),
                sentence(field.description or ""),
            )
            for name, field in model.model_fields.items()
        ]
        lines += table(("setting", "default", "allowed", "meaning"), rows)
        if section == "run":
            lines += [f"As a variable: {code(variable_name('run.seed'))}, and so on.", ""]
    return page("Settings", SETTINGS_TEXT, lines)


# ----------------------------------------------------------------------------------------------------------- messages

MESSAGES_TEXT: Final = """
The whole wire, from `proto/messages.py`. A message is the msgpack array `[tag, {field: value}]`; fields that have their
default are left out. Payload bytes follow `CHUNK` as a frame of their own. Every message also has `request`, the number
by which an answer names its question (0: nobody asked), and `session`, the token that a client got in its WELCOME.

Tags never change. A new field has a default, and an unknown field is ignored.
"""


def class_nodes(module: ModuleType) -> dict[str, ast.ClassDef]:
    """The syntax of every class of a module."""
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def texts_after(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Name -> the text that stands below its assignment, the way fields are documented here."""
    found: dict[str, str] = {}
    name = None
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if name is not None:
                found[name] = node.value.value
            name = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            name = None
    return found


def plain_type(node: ast.expr) -> str:
    """An annotation without the limits that stand in it."""

    class Strip(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            self.generic_visit(node)
            is_annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
            return node.slice.elts[0] if is_annotated and isinstance(node.slice, ast.Tuple) else node

    copy = ast.parse(ast.unparse(node), mode="eval")
    return ast.unparse(Strip().visit(copy).body).replace("'", '"')


def limits(model: type[BaseModel], name: str) -> str:
    """What stands in the annotation beside the type."""
    words = {
        annotated_types.Ge: "at least",
        annotated_types.Gt: "above",
        annotated_types.Le: "at most",
        annotated_types.Lt: "below",
        annotated_types.MaxLen: "length at most",
        annotated_types.MinLen: "length at least",
    }
    parts = []
    for one in model.model_fields[name].metadata:
        word = words.get(type(one))
        if word is not None:
            (value,) = (getattr(one, slot) for slot in type(one).__annotations__)
            parts.append(f"{word} {value}")
    return ", ".join(parts)


def field_rows(model: type[BaseModel], node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each field that a class itself has."""
    texts = texts_after(node.body)
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        name = statement.target.id
        if name not in model.model_fields:
            continue
        default = ast.unparse(statement.value).replace("'", '"') if statement.value is not None else ""
        has_own_limits = "Annotated" in ast.unparse(statement.annotation)
        notes = [sentence(texts.get(name, "")), sentence(limits(model, name)) if has_own_limits else ""]
        yield code(name), code(plain_type(statement.annotation)), code(default), " ".join(filter(None, notes))


def model_lines(model: type[BaseModel], node: ast.ClassDef) -> list[str]:
    """Text and fields of one class."""
    text = inspect.cleandoc(model.__doc__ or "")
    rows = table(("field", "type", "default", "meaning"), field_rows(model, node))
    return [*paragraphs(text), *(rows or ["No fields of its own.", ""])]


def paragraphs(text: str) -> Iterator[str]:
    """A docstring as Markdown; lines of the form `word: text` become a list."""
    for block in re.split(r"\n\s*\n", text):
        items = block.splitlines()
        if len(items) > 1 and all(re.match(r"[a-z]+: ", item) for item in items):
            yield from (f"- `{item.partition(': ')[0]}`: {item.partition(': ')[2]}" for item in items)
        else:
            yield " ".join(block.split())
        yield ""


def type_rows() -> Iterator[tuple[str, str, str]]:
    """The named types of `messages` and `ids`, with their definitions."""
    for module in (ids, agreement, messages):
        tree = ast.parse(inspect.getsource(module))
        texts = texts_after(tree.body)
        for node in tree.body:
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
                continue
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper() and name != "ErrorCode":
                yield code(name), code(ast.unparse(node.value).replace("'", '"')), sentence(texts.get(name, ""))


def messages_page() -> str:
    """docs/reference/messages.md."""
    nodes = class_nodes(messages)
    version = f"{messages.PROTOCOL_MAJOR}.{messages.PROTOCOL_MINOR}"
    lines = [f"Protocol version {version}.", "", "## Messages", ""]
    for tag, model in sorted(messages.MESSAGES.items()):
        lines += [f"### {tag} {model.__name__}", "", *model_lines(model, nodes[model.__name__])]
    lines += ["## Values in messages", ""]
    for name, node in nodes.items():
        model = getattr(messages, name)
        is_part = isinstance(model, type) and issubclass(model, messages.Part)
        if is_part and not issubclass(model, messages.Message) and model is not messages.Part:
            lines += [f"### {name}", "", *model_lines(model, node)]
    record = agreement.RunRecord
    lines += ["### RunRecord", "", *model_lines(record, class_nodes(agreement)["RunRecord"])]
    lines += ["## Types", "", *table(("name", "definition", "meaning"), type_rows())]
    return page("Messages", MESSAGES_TEXT, lines)


# ------------------------------------------------------------------------------------------------------------- events

EVENTS_TEXT: Final = """
A process logs one JSON object a line, or coloured text on a terminal. `event` is one of the names below and has the
fields listed with it. Every line also has `timestamp`, `level`, `process` and `id`. The names are stable: count them,
alert on them, `grep` for them.
"""


def event_groups() -> Iterator[tuple[str, list[str]]]:
    """Who logs what, from the comments between the entries of EVENTS."""
    heading = "every process"
    names: list[str] = []
    for line in inspect.getsource(events).splitlines():
        comment = re.match(r"    # (.+)", line)
        entry = re.match(r'    "([a-z_]+\.[a-z_]+)":', line)
        if comment:
            if names:
                yield heading, names
            heading, names = comment[1], []
        elif entry:
            names.append(entry[1])
    yield heading, names


def event_texts() -> dict[str, str]:
    """Event -> what it means; the file has exactly the events that exist."""
    texts: dict[str, str] = tomllib.loads(EVENT_TEXTS.read_text(encoding="utf-8"))["events"]
    unlike = sorted(set(texts) ^ set(events.EVENTS))
    if unlike:
        raise SystemExit(f"{EVENT_TEXTS.name}: add or remove the sentence of {', '.join(unlike)}")
    return texts


def events_page() -> str:
    """docs/reference/events.md."""
    texts = event_texts()
    lines: list[str] = []
    for heading, names in event_groups():
        lines += [f"## {heading}", ""]
        rows = [(code(name), ", ".join(map(code, events.EVENTS[name])), sentence(texts[name])) for name in names]
        lines += table(("event", "fields", "meaning"), rows)
    return page("Events", EVENTS_TEXT, lines)


# ------------------------------------------------------------------------------------------------------------- errors

ERRORS_TEXT: Final = """
Every error that isles raises on purpose is a class of `isles.proto.errors`. A command prints it as one sentence and
ends with its exit code. What a broker answers over the wire has a code of its own, below.
"""


def error_rows(root: type[Exception], depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """A class and those below it, indented."""
    exit_code = str(getattr(root, "exit_code", ""))
    yield "&nbsp;" * 4 * depth + code(root.__name__), exit_code, sentence(root.__doc__ or "")
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_rows(child, depth + 1)


def refusal_rows() -> Iterator[tuple[str, str, str]]:
    """The codes of ERROR with the comments beside them."""
    source = inspect.getsource(messages)
    block = source[source.index("ErrorCode = Literal[") : source.index("REFUSALS")]
    for name, text in re.findall(r'"([a-z-]+)",\s+# (.+)', block):
        yield code(name), "yes" if name in messages.REFUSALS else "no", sentence(text)


def errors_page() -> str:
    """docs/reference/errors.md."""
    lines = ["## Classes", "", *table(("class", "exit code", "meaning"), error_rows(errors.IslesError))]
    lines += ["## Codes of ERROR", "", *table(("code", "ends the client", "meaning"), refusal_rows())]
    exits = inspect.cleandoc(sys.modules[isles.callback.__module__].__doc__ or "").split("\n\n")[-1]
    lines += ["## Exit codes of commands", "", "```text", inspect.cleandoc(exits), "```", ""]
    return page("Errors", ERRORS_TEXT, lines)


# ----------------------------------------------------------------------------------------------------------- commands

COMMANDS_TEXT: Final = """
`isles COMMAND --help` prints the same. Options that are settings may also stand in a TOML file or in the environment;
see [Settings](settings.md).
"""


def option_groups(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Heading -> rows of flag and text, in the order of `--help`."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        heading = parameter.heading if isinstance(parameter, SettingOption) else "Options"
        record = parameter.get_help_record(context)
        if record is not None:
            groups.setdefault(heading, []).append((code(record[0]), record[1]))
    return dict(sorted(groups.items(), key=lambda item: item[0] == "Options"))


def command_lines(name: str, command: click.Command, parent: click.Context) -> list[str]:
    """The section of one command, followed by those of its own commands."""
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    heading, text = f"## {context.command_path}", inspect.cleandoc(command.help or "")
    lines = [heading, "", "```text", usage, "```", "", *paragraphs(text)]
    for group, rows in option_groups(command, context).items():
        lines += [f"**{group}**", "", *table(("option", "meaning"), rows)]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            lines += command_lines(child, found, context)
    return lines


def commands_page() -> str:
    """docs/reference/commands.md."""
    top = click.Context(isles, info_name="isles")
    lines = table(("command", "what it does"), ((f"[`{n}`](#isles-{n})", e.summary) for n, e in COMMANDS.items()))
    for name in COMMANDS:
        command = isles.get_command(top, name)
        assert command is not None
        lines += command_lines(name, command, top)
    return page("Commands", COMMANDS_TEXT, lines)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "messages.md": messages_page,
    "events.md": events_page,
    "errors.md": errors_page,
    "commands.md": commands_page,
}


def main(arguments: list[str]) -> int:
    """Writes or checks all pages; returns the exit code."""
    different = []
    for name, render in PAGES.items():
        path, text = REFERENCE / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            different.append(str(path.relative_to(DOCS.parent)))
            if "--check" not in arguments:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    did = "differs from the code; run `make docs`" if "--check" in arguments else "written"
    sys.stdout.writelines(f"{name}: {did}\n" for name in different)
    return 1 if different and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
