"""The page about the HTTP API, from its OpenAPI description."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from scripts.reference.sheet import code, head, table

METHODS: Final = ("get", "post", "put", "patch", "delete")

Described = Mapping[str, Any]


def page() -> str:
    """Render the page; empty if the API is not installed."""
    if find_spec("halter.server.api") is None:
        return ""
    api = _described()
    first = head(
        "The HTTP API",
        "`halter.server.api`",
        "`halter serve` offers it beside the dashboard; [how to reach it](../how-to/dashboard.md). Its own "
        "description, with every field of every answer, is at `/api/v1/openapi.json`.",
        "The version is in the path. [Within it](../api.md#the-promise-of-a-version), operations, optional parameters "
        "and members of answers are only added. Paths without a version, such as `/api/whoami`, mean version 1.",
        "Send a token as `Authorization: Bearer TOKEN`. What may not be done, or does not exist for you, is answered "
        'with a status and `{"error": "a sentence"}`. A key that is not listed here is refused.',
        "Amounts are dollars, under names that end in `_usd` or beside a `unit` that says so, exact to six decimals; "
        "times are microseconds since 1970. The facts of events are as the [journal](events.md) keeps them.",
    )
    operations = [
        (method, path, operation)
        for path, path_item in api["paths"].items()
        for method, operation in path_item.items()
        if method in METHODS
    ]
    return "\n".join(
        (first, *(_way(*each, api) for each in operations), _answers(operation for _, _, operation in operations))
    )


def _described() -> Described:
    """Load the OpenAPI description."""
    from halter.server.api import description

    return description(versioned=True)


def _way(method: str, path: str, operation: Described, api: Described) -> str:
    return "\n".join((f"## {method.upper()} {path}\n\n{_told(operation)}{_role(operation)}\n", *_taken(operation, api)))


def _told(operation: Described) -> str:
    return str(operation.get("description") or operation.get("summary") or "").strip().rstrip(".") + "."


def _role(operation: Described) -> str:
    role, command = operation.get("x-role", "viewer"), operation.get("x-command")
    role_text = "" if role == "viewer" else f" Needs the role `{role}`."
    return role_text + (f" On the command line: `halter {command}`." if command else "")


def _taken(operation: Described, api: Described) -> Iterator[str]:
    rows = [*_parameters(operation), *_body(operation, api)]
    if rows:
        yield table(("word", "where", "needed", "is", "meaning"), rows)


def _parameters(operation: Described) -> Iterator[tuple[str, ...]]:
    for each in operation.get("parameters", ()):
        is_required = "yes" if each.get("required") else "no"
        yield code(each["name"]), each["in"], is_required, _is(each.get("schema", {})), _meaning(each)


def _body(operation: Described, api: Described) -> Iterator[tuple[str, ...]]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body_schema = _found(schema, api)
    required_names = body_schema.get("required", ())
    for name, field in body_schema.get("properties", {}).items():
        yield code(name), "body", "yes" if name in required_names else "no", _is(field), _meaning(field)


def _meaning(field: Described) -> str:
    """Find the description of a field, or of its type."""
    candidates = (field, field.get("schema", {}), *field.get("schema", field).get("anyOf", ()))
    return next((each["description"] for each in candidates if "description" in each), "")


def _found(schema: Described, api: Described) -> Described:
    """Resolve a reference; of several alternatives, the first one that is a reference."""
    for each in (schema, *schema.get("anyOf", ())):
        if "$ref" in each:
            return api["components"]["schemas"][each["$ref"].rpartition("/")[2]]
    return schema


def _is(schema: Described) -> str:
    if "enum" in schema:
        return ", ".join(code(word) for word in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_is(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "items" in schema:
        return f"list: {_is(schema['items'])}"
    return str(schema.get("type", "anything"))


def _answers(operations: Iterable[Described]) -> str:
    """List all answers once."""
    descriptions = {
        status: answer.get("description", "")
        for operation in operations
        for status, answer in operation["responses"].items()
    }
    return f"## Answers\n\n{table(('status', 'meaning'), sorted(descriptions.items()))}"
