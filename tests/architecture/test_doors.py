"""There are two doors and no other: only the guard makes permits, and whoever plants a bypass is found."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "halter"
DOORS = {Path("guard/chokepoint.py"), Path("guard/request.py")}
DEFINITION = Path("core/tools.py")


def makers_of_permits(root: Path) -> set[Path]:
    """Find the modules that do anything with the class of permits but name it as a type."""
    return {
        path.relative_to(root)
        for path in root.rglob("*.py")
        if path.relative_to(root) != DEFINITION and any(uses(ast.parse(path.read_text("utf-8"))))
    }


def uses(tree: ast.AST) -> Iterator[ast.AST]:
    names = {"Permit"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "Permit" and alias.asname
    }
    types = {id(part) for annotation in annotations(tree) for part in ast.walk(annotation)}
    for node in ast.walk(tree):
        if id(node) not in types and named(node) in names:
            yield node


def named(node: ast.AST) -> object:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=name):
            return name
        case _:
            return None


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            yield node.returns
        elif isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation


def test_only_the_doors_make_permits() -> None:
    assert makers_of_permits(SOURCE) == DOORS


BYPASSES = {
    "calls it": "from halter.core.tools import Permit\nPermit('x', 0, {})\n",
    "renames it": "from halter.core.tools import Permit as Pass\nmade = Pass('x', 0, {})\n",
    "reaches through the module": "from halter.core import tools\ntools.Permit('x', 0, {})\n",
    "looks it up by name": "from halter.core import tools\ngetattr(tools, 'Permit')('x', 0, {})\n",
    "inherits from it": "from halter.core.tools import Permit\nclass Mine(Permit): pass\n",
    "hands it on": "from halter.core.tools import Permit\nmakers = [Permit]\n",
}


@pytest.mark.parametrize("layer", ["core", "tools", "models", "state", "guard", "brain", "work", "app", "cli"])
@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_bypass_planted_in_any_layer_is_found(tmp_path: Path, layer: str, bypass: str) -> None:
    planted = tmp_path / layer / "planted.py"
    planted.parent.mkdir()
    planted.write_text(BYPASSES[bypass])
    assert makers_of_permits(tmp_path) == {Path(layer) / "planted.py"}


def test_naming_a_permit_as_a_type_is_no_bypass(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "from halter.core.tools import Permit\nasync def run(permit: Permit) -> None:\n    permit.use()\n"
    )
    assert makers_of_permits(tmp_path) == set()


def askers_of_models(root: Path) -> set[Path]:
    """Find the modules that ask a model. Stores and engines are asked too, but never with a permit."""
    return {
        path.relative_to(root)
        for path in root.rglob("*.py")
        if any(map(asks_a_model, ast.walk(ast.parse(path.read_text("utf-8")))))
    }


def asks_a_model(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="ask", value=receiver) if any("model" in name.lower() for name in names_in(receiver)):
            return True
        case ast.Call(func=ast.Attribute(attr="ask"), args=args, keywords=keywords):
            given = [name for each in (*args, *(word.value for word in keywords)) for name in names_in(each)]
            return any("permit" in name.lower() for name in (*given, *(word.arg or "" for word in keywords)))
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="ask"), *_]):
            return True
        case _:
            return False


def names_in(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) if isinstance(name := named(node), str)]


def test_only_the_door_to_models_asks_a_model() -> None:
    assert askers_of_models(SOURCE) == {Path("guard/request.py")}


ASKERS = {
    "asks directly": "async def think(model, prompt, permit):\n    return await model.ask(prompt, permit)\n",
    "keeps the model": "class Mind:\n    async def think(self, x):\n        return await self._model.ask(x)\n",
    "gives it another name": "async def think(brain, prompt, permit):\n    return await brain.ask(prompt, permit)\n",
    "names the parameter": "async def think(brain, right):\n    return await brain.ask({}, permit=right)\n",
    "hands the method on": "def thinker(models):\n    return models[0].ask\n",
    "looks the method up": "def thinker(brain):\n    return getattr(brain, 'ask')\n",
}


@pytest.mark.parametrize("layer", ["models", "guard", "brain", "work", "autonomy", "app", "cli"])
@pytest.mark.parametrize("asker", ASKERS)
def test_a_direct_question_to_a_model_planted_in_any_layer_is_found(tmp_path: Path, layer: str, asker: str) -> None:
    planted = tmp_path / layer / "planted.py"
    planted.parent.mkdir()
    planted.write_text(ASKERS[asker])
    assert askers_of_models(tmp_path) == {Path(layer) / "planted.py"}


def test_a_question_to_a_store_is_no_question_to_a_model(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text("async def look(store, query):\n    return await store.ask(query)\n")
    assert askers_of_models(tmp_path) == set()
