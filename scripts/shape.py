"""Measure what grows with features: tokens, classes, helpers with one caller, imports inside functions, circles.

Measured by reading alone, so that an earlier version can be shown beside this one.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("halter", "halter_drills")
_LAYOUT = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


@dataclass(frozen=True)
class Shape:
    """The size of a tree of sources, and how its modules depend on one another."""

    files: int
    tokens: int
    code_lines: int
    classes: int
    helpers: int
    """Private functions of modules that are named in one other place."""
    deferred_imports: int
    """Imports of the package itself inside functions; a face has them, so that a command loads only what it needs."""
    deferred_outside_faces: int
    circles: tuple[tuple[str, ...], ...]
    """Modules that import one another, imports inside functions and for types counted."""
    tokens_by_room: Mapping[str, int]


def measure_shape(source: Path) -> Shape:
    """Measure the sources below a folder."""
    paths = {_name_module(path, source): path for path in sorted(source.rglob("*.py"))}
    sources = {name: path.read_text("utf-8") for name, path in paths.items()}
    trees = {name: ast.parse(text) for name, text in sources.items()}
    tokens = {name: count_tokens(text) for name, text in sources.items()}
    deferred = [name for name, tree in trees.items() for _ in _list_deferred_imports(tree)]
    rooms = Counter[str]()
    for name, count in tokens.items():
        rooms[".".join(name.split(".")[:2]) if name.startswith("halter.") else name.split(".")[0]] += count
    return Shape(
        files=len(paths),
        tokens=sum(tokens.values()),
        code_lines=sum(count_code_lines(sources[name], tree) for name, tree in trees.items()),
        classes=sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree)),
        helpers=sum(map(count_helpers, trees.values())),
        deferred_imports=len(deferred),
        deferred_outside_faces=sum(not name.startswith("halter.cli") for name in deferred),
        circles=list_circles(source),
        tokens_by_room=dict(sorted(rooms.items())),
    )


def list_circles(source: Path) -> tuple[tuple[str, ...], ...]:
    """List the circles below a folder, without the start of the command, which runs before the package."""
    paths = {_name_module(path, source): path for path in source.rglob("*.py")}
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in paths.items() if name.split(".")[0] in PACKAGES}
    return tuple(find_circles({name: set(_list_imports(name, trees)) for name in trees}))


def _name_module(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def count_tokens(source: str) -> int:
    """Count the tokens of a source, without comments and layout."""
    return sum(token.type not in _LAYOUT for token in tokenize.generate_tokens(io.StringIO(source).readline))


def count_code_lines(source: str, tree: ast.Module) -> int:
    """Count the lines that are neither blank nor a comment, an import or a docstring."""
    lines = {n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and _is_text(node.value)):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def count_helpers(tree: ast.Module) -> int:
    """Count the private functions that one other place of the module names."""
    names = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute):
            names[node.attr] += 1
    functions = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(name.startswith("_") and names[name] == 1 for name in functions)


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module is not None and node.module.split(".")[0] in PACKAGES
    return isinstance(node, ast.Import) and any(each.name.split(".")[0] in PACKAGES for each in node.names)


def _list_deferred_imports(tree: ast.Module) -> Iterator[ast.AST]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    seen = set[int]()
    for function in functions:
        for node in ast.walk(function):
            if _is_own(node) and id(node) not in seen:
                seen.add(id(node))
                yield node


def _list_imports(name: str, trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """List the modules of the package that a module imports, wherever the import stands."""
    for node in ast.walk(trees[name]):
        targets: Sequence[str] = ()
        if isinstance(node, ast.Import):
            targets = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = [f"{node.module}.{each.name}" for each in node.names]
        for target in targets:
            module = target
            while module and module not in trees:
                module = module.rpartition(".")[0]
            if module and module != name:
                yield module


def find_circles(imports: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Find the groups of modules of which each imports every other one, directly or through others."""
    reached = {name: _reach(name, imports) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return sorted(groups)


def _reach(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached, open_names = set[str](), [start]
    while open_names:
        for name in imports[open_names.pop()] - reached:
            reached.add(name)
            open_names.append(name)
    return reached
