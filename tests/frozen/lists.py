"""What other programs, files and stores rely on, as lines of text that are read from the code itself.

A line is a path, or a path and one fact about it: `halter run --store`, `halter run --store: takes a value`. A file has
the facts about a path side by side. `python tests/frozen/lists.py FOLDER` writes the files; `tests/frozen/0.7.0` was
made from the code of that version.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_origin

import msgspec

import halter

Schema = Mapping[str, Any]

NEEDED: Final = "needed"
"""Said of input that the caller must give."""

CODE: Final = Path(next(iter(halter.__path__)))
METHODS: Final = ("get", "post", "put", "patch", "delete")
UNDESCRIBED: Final = (
    *(
        "/",
        "/fleet",
        "/agent/{name}",
        "/sessions",
        "/session/{name}",
        "/decision/{name:path}",
        "/receipt/{name}",
        "/audit",
        "/budgets",
        "/triggers",
        "/findings",
    ),
    *("/manifest.webmanifest", "/touch-icon.png", "/favicon.ico", "/{rest:path}"),
    *("/download/audit", "/download/session/{name}", "/login", "/logout", "/healthz", "/hooks/{agent}/{name}"),
)
"""The pages of the dashboard, and other paths that are no part of the API's description."""


def shape(schema: Schema, within: Schema, path: str, texts: tuple[str, ...] = ()) -> Iterator[str]:
    """List what a JSON Schema allows: each key by its path, with its types, its words and its default.

    References are followed, since the names of components are no part of the data.
    """
    if reference := schema.get("$ref"):
        if reference not in texts:
            yield from shape(_component(within, reference), within, path, (*texts, reference))
        return
    for each in schema.get("allOf", ()):
        yield from shape(each, within, path, texts)
    yield from _kinds((*schema.get("anyOf", ()), *schema.get("oneOf", ())), within, path, texts)
    for word in schema.get("enum", [schema["const"]] if "const" in schema else []):
        yield f"{path}: {json.dumps(word)}"
    kinds = schema.get("type", ())
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in {"object", "array", "null"}:
            yield f"{path}: {kind}"
    if schema.get("default") not in (None, [], {}):
        yield f"{path}: without it {json.dumps(schema['default'])}"
    for name, below in schema.get("properties", {}).items():
        text = f"{path}.{name}"
        yield text
        yield from shape(below, within, text, texts)
        if name in schema.get("required", ()):
            yield f"{text}: {NEEDED}"
    for key, sign in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(below := schema.get(key), dict):
            yield from shape(cast("Schema", below), within, path + sign, texts)


def _kinds(schemas: Sequence[Schema], within: Schema, path: str, texts: tuple[str, ...]) -> Iterator[str]:
    """List what several kinds allow. A key is needed if it is needed in each kind that has keys."""
    kinds = [[*shape(each, within, path, texts)] for each in schemas]
    with_keys = [kind for kind in kinds if any(line.startswith(f"{path}.") for line in kind)]
    for line in dict.fromkeys(line for kind in kinds for line in kind):
        if not line.endswith(f": {NEEDED}") or all(line in kind for kind in with_keys):
            yield line


def _component(within: Schema, reference: str) -> Schema:
    result: Any = within
    for step in reference.removeprefix("#/").split("/"):
        result = result[step]
    return result


def events() -> Iterator[str]:
    """List every kind of event, its versions, and its facts as they stand in JSON.

    Facts are written without their defaults, so a default is part of every event that was written before.
    """
    from halter.core.events import EVENTS_BY_KIND

    for kind, event in EVENTS_BY_KIND.items():
        yield kind
        yield from (f"{kind}: version {version}" for version in range(1, event.VERSION + 1))
        described = msgspec.json.schema(event)
        yield from shape(described, described, kind)


def keys() -> Iterator[str]:
    """List the keys of the files that people write, as `halter schema` prints them."""
    from halter.config.decode import agent_schema, fleet_schema

    for name, described in (("agent.yaml", agent_schema()), ("halter.yaml", fleet_schema())):
        yield from shape(described, described, name)


def schema() -> Iterator[str]:
    """List the statements of every migration in their order, without comments."""
    for store in ("sqlite", "postgres"):
        for file in sorted((CODE / "journal" / "sql" / store).glob("[0-9]*.sql")):
            text = re.sub(r"--[^\n]*", "", file.read_text("utf-8"))
            for number, statement in enumerate(filter(str.strip, text.split(";")), 1):
                yield f"{store} {file.name[:4]}.{number:02}: {' '.join(statement.split())}"


def commands() -> Iterator[str]:
    """List the commands with their options and arguments, and the exit codes."""
    import typer

    from halter.cli import exit_codes
    from halter.cli.commands import build_command_tree

    yield from _commands(typer.main.get_command(build_command_tree()), "halter")
    yield from (f"exit code {code}" for code in exit_codes.EXIT_MEANINGS)


def _commands(command: Any, path: str) -> Iterator[str]:
    yield path
    text = 0
    for each in command.params:
        if each.param_type_name == "argument":
            text += 1
            texts = [f"{path} [{text}]"]
        else:
            texts = [f"{path} {word}" for word in (*each.opts, *each.secondary_opts)]
        for name in texts:
            yield name
            yield from (f"{name}: {fact}" for fact in _facts(each))
    for name, below in getattr(command, "commands", {}).items():
        # Most commands are loaded when they are typed.
        load = getattr(below, "load", None) or getattr(below, "loaded", None)
        yield from _commands(load() if load else below, f"{path} {name}")


def _facts(parameter: Any) -> Iterator[str]:
    if parameter.required:
        yield NEEDED
    if parameter.nargs == -1 or parameter.multiple:
        yield "many"
    if not getattr(parameter, "is_flag", False):
        yield "takes a value"
        yield from _words(parameter.type_descriptor.annotation)


def _words(annotation: Any) -> Iterator[str]:
    """Find the words that may stand there, if they are a closed set."""
    if get_origin(annotation) is Literal:
        yield from map(json.dumps, get_args(annotation))
        return
    for result in get_args(annotation):
        yield from _words(result)


def routes() -> Iterator[str]:
    """List the routes of the API: what each takes and answers."""
    from halter.server.api import description

    described = description()
    for path, ways in described["paths"].items():
        for method in METHODS:
            if method in ways:
                yield from _route(ways[method], described, f"{method.upper()} {path}")
    text = "".join(_sources())
    yield from (path for path in UNDESCRIBED if f'"{path}"' in text)


def api() -> Iterator[str]:
    """List the operations of the versioned API: what each is called, takes, needs and answers."""
    from halter.server.api import description

    described = description(versioned=True)
    for path, ways in described["paths"].items():
        for method in METHODS:
            if method in ways:
                yield from _operation(ways[method], described, f"{method.upper()} {path}")


def _operation(way: Schema, described: Schema, path: str) -> Iterator[str]:
    yield from _route(way, described, path)
    yield f"{path}: is called {way['operationId']}"
    yield f"{path}: for {way.get('x-role', 'viewer')}"
    for content in way["responses"]["200"].get("content", {}).values():
        for line in shape(content.get("schema", {}), described, f"{path} answer"):
            if line.endswith(f": {NEEDED}"):
                yield f"{line.removesuffix(NEEDED)}always there"


def _route(way: Schema, described: Schema, path: str) -> Iterator[str]:
    yield path
    for each in way.get("parameters", ()):
        text = f"{path} {each['in']} {each['name']}"
        yield text
        yield from shape(each.get("schema", {}), described, text)
        if each.get("required"):
            yield f"{text}: {NEEDED}"
    for content in way.get("requestBody", {}).get("content", {}).values():
        yield from shape(content.get("schema", {}), described, f"{path} body")
    for status, answer in way["responses"].items():
        yield f"{path}: {status}"
        for kind, content in answer.get("content", {}).items() if status == "200" else ():
            yield f"{path} answer: {kind}"
            yield from filter(_answered, shape(content.get("schema", {}), described, f"{path} answer"))


def _answered(line: str) -> bool:
    """Only input is needed, or is something without being there."""
    fact = line.partition(": ")[2]
    return fact != NEEDED and not fact.startswith("without it")


def drills() -> Iterator[str]:
    from halter_drills import DRILLS

    yield from DRILLS


def library() -> Iterator[str]:
    """List what a program can import from `halter`, and the variables of the environment that are read."""
    yield from (f"halter.{name}" for name in (*halter.__all__, *getattr(halter, "_RENAMED", ())))
    for text in _sources():
        yield from re.findall(r'"(HALTER_[A-Z_]+)"', text)


def _sources() -> Iterator[str]:
    return (file.read_text("utf-8") for file in CODE.rglob("*.py"))


LISTS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "events": events,
    "keys": keys,
    "schema": schema,
    "commands": commands,
    "routes": routes,
    "drills": drills,
    "library": library,
}


@cache
def now(title: str) -> Sequence[str]:
    """List what the code has now."""
    return tuple(LISTS[title]())


def read(file: Path) -> Iterator[str]:
    """Read the lines of a file, one for each path and one for each fact."""
    for line in file.read_text("utf-8").splitlines():
        path, _, facts = line.partition(": ")
        yield path
        yield from (f"{path}: {fact}" for fact in facts.split(" | ") if fact)


def write(file: Path, lines: Iterable[str]) -> None:
    """Write a file in which a path has one line."""
    values: dict[str, list[str]] = {}
    for line in lines:
        path, _, fact = line.partition(": ")
        facts = values.setdefault(path, [])
        if fact and fact not in facts:
            facts.append(fact)
    texts = (f"{path}: {' | '.join(facts)}" if facts else path for path, facts in sorted(values.items()))
    file.write_text("".join(f"{line}\n" for line in texts), "utf-8")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for title, lines in LISTS.items():
        write(folder / f"{title}.txt", lines())
