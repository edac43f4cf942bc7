"""The page about the HTTP API, from its OpenAPI description."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from scripts.reference.sheet import code, head, table

METHODS: Final = ("get", "post", "put", "patch", "delete")

Described = Mapping[str, Any]


def page() -> str:
    """Describe every path, or nothing where there is no API."""
    if find_spec("halter.server.api") is None:
        return ""
    described = _described()
    first = head(
        "The HTTP API",
        "`halter.server.api`",
        "`halter serve` offers it beside the dashboard; [how to reach it](../how-to/dashboard.md). Its own "
        "description, with every field of every answer, is at `/api/openapi.json`.",
        "Send a token as `Authorization: Bearer TOKEN`. What may not be done, or does not exist for you, is answered "
        'with a status and `{"error": "a sentence"}`. A key that is not listed here is refused.',
        "Amounts are dollars, under names that end in `_usd` or beside a `unit` that says so, exact to six decimals; "
        "times are microseconds since 1970. The facts of events are as the [journal](events.md) keeps them.",
    )
    known = [
        (method, path, way)
        for path, ways in described["paths"].items()
        for method, way in ways.items()
        if method in METHODS
    ]
    return "\n".join((first, *(_way(*each, described) for each in known), _answers(way for _, _, way in known)))


def _described() -> Described:
    """Let the API describe itself."""
    from halter.server.api import description

    return description()


def _way(method: str, path: str, way: Described, described: Described) -> str:
    return "\n".join((f"## {method.upper()} {path}\n\n{_told(way)}{_role(way)}\n", *_taken(way, described)))


def _told(way: Described) -> str:
    return str(way.get("description") or way.get("summary") or "").strip().rstrip(".") + "."


def _role(way: Described) -> str:
    role, command = way.get("x-role", "viewer"), way.get("x-command")
    needs = "" if role == "viewer" else f" Needs the role `{role}`."
    return needs + (f" On the command line: `halter {command}`." if command else "")


def _taken(way: Described, described: Described) -> Iterator[str]:
    rows = [*_parameters(way), *_body(way, described)]
    if rows:
        yield table(("word", "where", "needed", "is", "meaning"), rows)


def _parameters(way: Described) -> Iterator[tuple[str, ...]]:
    for each in way.get("parameters", ()):
        needed = "yes" if each.get("required") else "no"
        yield code(each["name"]), each["in"], needed, _is(each.get("schema", {})), _meaning(each)


def _body(way: Described, described: Described) -> Iterator[tuple[str, ...]]:
    schema = way.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    found = _found(schema, described)
    needed = found.get("required", ())
    for name, field in found.get("properties", {}).items():
        yield code(name), "body", "yes" if name in needed else "no", _is(field), _meaning(field)


def _meaning(field: Described) -> str:
    """Find what a field says of itself, or of what stands there unless it is left out."""
    known = (field, field.get("schema", {}), *field.get("schema", field).get("anyOf", ()))
    return next((each["description"] for each in known if "description" in each), "")


def _found(schema: Described, described: Described) -> Described:
    """Follow a reference to what it names; of several things that may stand there, take the first that is one."""
    for each in (schema, *schema.get("anyOf", ())):
        if "$ref" in each:
            return described["components"]["schemas"][each["$ref"].rpartition("/")[2]]
    return schema


def _is(schema: Described) -> str:
    if "enum" in schema:
        return ", ".join(code(word) for word in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_is(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "items" in schema:
        return f"list: {_is(schema['items'])}"
    return str(schema.get("type", "anything"))


def _answers(ways: Iterable[Described]) -> str:
    """List what may be answered, once for all."""
    told = {status: answer.get("description", "") for way in ways for status, answer in way["responses"].items()}
    return f"## Answers\n\n{table(('status', 'meaning'), sorted(told.items()))}"
