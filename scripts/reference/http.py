"""The page about the HTTP API, from its OpenAPI description."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

from scripts.reference.sheet import code, head, table

METHODS: Final = ("get", "post", "put", "patch", "delete")


def page() -> str:
    """Describe every path, or nothing where there is no API."""
    if find_spec("halter.server.api") is None:
        return ""
    from halter.server import api

    described: dict[str, Any] = api.openapi()
    first = head(
        "The HTTP API",
        "`halter.server.api`",
        "`halter serve` offers it beside the dashboard, with its own description at `/openapi.json`.",
    )
    return "\n".join((first, *(_path(path, ways) for path, ways in described["paths"].items())))


def _path(path: str, ways: dict[str, Any]) -> str:
    return "\n".join(part for method in METHODS if method in ways for part in _way(method, path, ways[method]))


def _way(method: str, path: str, way: dict[str, Any]) -> Iterator[str]:
    yield f"## {method.upper()} {path}\n\n{way.get('description') or way.get('summary', '')}\n"
    rows = [
        (code(each["name"]), each["in"], "yes" if each.get("required") else "no", each.get("description", ""))
        for each in way.get("parameters", [])
    ]
    if rows:
        yield table(("parameter", "in", "needed", "meaning"), rows)
    answers = [(status, answer.get("description", "")) for status, answer in way.get("responses", {}).items()]
    yield table(("answer", "meaning"), answers)
