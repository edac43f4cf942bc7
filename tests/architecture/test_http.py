"""Requests to other machines leave from `halter.net`: nothing else imports an HTTP library or builds its client."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LIBRARIES = frozenset(
    {"aiohttp", "httpcore2", "httpx", "httpx2", "http.client", "requests", "urllib.request", "urllib3"}
)
BUILDERS = frozenset(
    {"AsyncClient", "AsyncHTTPTransport", "Client", "ClientSession", "HTTPTransport", "create_ssl_context", "urlopen"}
)
HANDED_OVER = {
    "halter/external/sdk_clients.py": "its transports are put into the clients of OpenAI's and Anthropic's SDKs",
    "halter/tools/mcp_transport.py": "the SDK of MCP gets a client; the names are for the type check alone",
}


ELSEWHERE = ("halter/net/", "halter/demo/night-watch/", "halter_drills/")
"""The room itself, the tools of a demonstrated agent, and clients that attack from outside."""


def list_http_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0, names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case _:
                modules = []
        yield from (module for module in modules if is_http_library(module))


def is_http_library(module: str) -> bool:
    return any(module == library or module.startswith(f"{library}.") for library in LIBRARIES)


def list_built_clients(tree: ast.AST) -> Iterator[str]:
    """List the clients of an HTTP library that a module builds, by their names there."""
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and is_http_library(node.module or "")
    ]
    imported_names = {alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=library), attr=name)) if is_http_library(library):
                yield from {name} & BUILDERS
            case ast.Call(func=ast.Name(id=name)) if name in imported_names:
                yield from {name} & BUILDERS
            case _:
                pass


def find_violations(source: Path) -> list[str]:
    violations: list[str] = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        if name.startswith(ELSEWHERE):
            continue
        imports = [] if name in HANDED_OVER else sorted(set(list_http_imports(tree)))
        violations += [f"{name} imports {module}" for module in imports]
        violations += [f"{name} builds {client}" for client in list_built_clients(tree)]
    return violations


def test_only_net_imports_an_http_library_and_builds_its_clients() -> None:
    assert find_violations(SOURCE) == []


def test_every_exception_still_imports_one() -> None:
    idle = [name for name in HANDED_OVER if not list(list_http_imports(ast.parse((SOURCE / name).read_text("utf-8"))))]
    assert idle == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("halter/tools/wrong.py", "def go():\n    import httpx2\n", "imports httpx2"),
        ("halter/proxy/wrong.py", "from aiohttp import ClientSession\n", "imports aiohttp"),
        ("halter/core/wrong.py", "from urllib import request\n", "imports urllib.request"),
        ("halter/external/sdk_clients.py", "import httpx2\nclient = httpx2.AsyncClient()\n", "builds AsyncClient"),
    ],
)
def test_a_client_beside_net_is_found(tmp_path: Path, name: str, text: str, found: str) -> None:
    wrong = tmp_path / name
    wrong.parent.mkdir(parents=True)
    wrong.write_text(text)
    assert any(violation.startswith(f"{name} {found}") for violation in find_violations(tmp_path))
