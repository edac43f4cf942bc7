"""There are two doors and no other: only the guard makes permits, and whoever plants a bypass is found."""

import ast
import copy
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from halter.core.tools import Failed, Output, Permit, Tool, Valid
from halter.tasks.task_tools import ask_user
from halter.tools.files import make_file_tools
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.http import make_http_tools
from halter.tools.shell import make_shell_tool
from scripts.house import parse_module

SOURCE = Path(__file__).parents[2] / "src" / "halter"
DRILLS = SOURCE.with_name("halter_drills")
DOORS = {Path("guard/tool_door.py"), Path("guard/model_door.py")}
PROGRAM = Path("tools/isolated_program.py")
"""The program of an isolated tool's own process makes the permit of its one call, and cannot be imported."""
DEFINITION = Path("core/tools.py")


def makers_of_permits(root: Path) -> set[Path]:
    """Find the modules that do anything with the class of permits but name it as a type."""
    return {
        path.relative_to(root)
        for path in root.rglob("*.py")
        if path.relative_to(root) != DEFINITION and any(uses(parse_module(path)))
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
        if (id(node) not in types and named(node) in names) or takes_its_class(node):
            yield node


def takes_its_class(node: ast.AST) -> bool:
    """Tell whether the class of a permit is taken from a permit, or a permit is made anew from itself."""
    match node:
        case ast.Call(func=ast.Name(id="type"), args=[permit]):
            return any("permit" in name.lower() for name in names_in(permit))
        case ast.Attribute(attr="__class__" | "__init__" | "__new__" | "__setattr__" | "__setstate__", value=permit):
            return any("permit" in name.lower() for name in names_in(permit))
        case _:
            return False


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
    assert makers_of_permits(SOURCE) == DOORS | {PROGRAM}


def test_the_program_that_makes_a_permit_for_its_own_call_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="cannot be imported"):
        importlib.import_module("halter.tools.isolated_program")


BYPASSES = {
    "calls it": "from halter.core.tools import Permit\nPermit('x', 0, {})\n",
    "renames it": "from halter.core.tools import Permit as Pass\nmade = Pass('x', 0, {})\n",
    "reaches through the module": "from halter.core import tools\ntools.Permit('x', 0, {})\n",
    "looks it up by name": "from halter.core import tools\ngetattr(tools, 'Permit')('x', 0, {})\n",
    "inherits from it": "from halter.core.tools import Permit\nclass Mine(Permit): pass\n",
    "takes it from a permit": "def run(permit):\n    return type(permit)('x', 0, {})\n",
    "takes it from a permit by name": "def run(self):\n    return self._permit.__class__('x', 0, {})\n",
    "makes a permit anew": "def run(permit):\n    permit.__init__('x', 0, {})\n",
    "hands it on": "from halter.core.tools import Permit\nmakers = [Permit]\n",
}


@pytest.mark.parametrize("layer", ["core", "tools", "models", "state", "guard", "loop", "tasks", "runtime", "cli"])
@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_bypass_planted_in_any_layer_is_found(tmp_path: Path, layer: str, bypass: str) -> None:
    planted = tmp_path / layer / "planted.py"
    planted.parent.mkdir()
    planted.write_text(BYPASSES[bypass])
    assert makers_of_permits(tmp_path) == {Path(layer) / "planted.py"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_one_permit_never_becomes_two(copied: Callable[[Permit], object]) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(Permit("c1", 0, {}))


def test_a_permit_that_was_used_is_not_made_anew() -> None:
    permit = Permit("c1", 0, {})
    permit.use()
    Permit.__init__(permit, "c2", 0, {})  # pyright: ignore[reportCallIssue]
    assert permit.id == "c1"
    with pytest.raises(RuntimeError, match="was used before"):
        permit.use()


def test_naming_a_permit_as_a_type_is_no_bypass(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "from halter.core.tools import Permit\nasync def run(permit: Permit) -> None:\n    permit.use()\n"
    )
    assert makers_of_permits(tmp_path) == set()


def askers_of_models(root: Path) -> set[Path]:
    """Find the modules that ask a model. Stores and engines are asked too, but never with a permit."""
    return {
        path.relative_to(root) for path in root.rglob("*.py") if any(map(asks_a_model, ast.walk(parse_module(path))))
    }


def asks_a_model(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="ask", value=receiver) if any("model" in name.lower() for name in names_in(receiver)):
            return True
        case ast.Call(func=ast.Attribute(attr="ask"), args=args, keywords=keywords):
            texts = [name for each in (*args, *(word.value for word in keywords)) for name in names_in(each)]
            return any("permit" in name.lower() for name in (*texts, *(word.arg or "" for word in keywords)))
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="ask"), *_]):
            return True
        case _:
            return False


def names_in(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) if isinstance(name := named(node), str)]


def test_only_the_door_to_models_asks_a_model() -> None:
    assert askers_of_models(SOURCE) == {Path("guard/model_door.py")}


ASKERS = {
    "asks directly": "async def think(model, prompt, permit):\n    return await model.ask(prompt, permit)\n",
    "keeps the model": "class Mind:\n    async def think(self, x):\n        return await self._model.ask(x)\n",
    "gives it another name": "async def think(brain, prompt, permit):\n    return await brain.ask(prompt, permit)\n",
    "names the parameter": "async def think(brain, right):\n    return await brain.ask({}, permit=right)\n",
    "hands the method on": "def thinker(models):\n    return models[0].ask\n",
    "looks the method up": "def thinker(brain):\n    return getattr(brain, 'ask')\n",
}


@pytest.mark.parametrize("layer", ["models", "guard", "loop", "tasks", "autonomy", "runtime", "cli"])
@pytest.mark.parametrize("asker", ASKERS)
def test_a_direct_question_to_a_model_planted_in_any_layer_is_found(tmp_path: Path, layer: str, asker: str) -> None:
    planted = tmp_path / layer / "planted.py"
    planted.parent.mkdir()
    planted.write_text(ASKERS[asker])
    assert askers_of_models(tmp_path) == {Path(layer) / "planted.py"}


def test_a_question_to_a_store_is_no_question_to_a_model(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text("async def look(store, query):\n    return await store.ask(query)\n")
    assert askers_of_models(tmp_path) == set()


RESERVED = {
    "run_in_own_process": {Path("tools/function_tool.py"), PROGRAM},
    "run_isolated": {Path("tools/function_tool.py"), Path("tools/process.py")},
    "run_forked": {Path("tools/function_tool.py"), Path("tools/process.py")},
    "isolated_program": {Path("tools/process.py")},
    "send_request": {Path("tools/mcp_session.py")},
    "call_tool": set[Path](),
    "model_request": {Path("models/wire.py")},
    "model_request_stream": {Path("models/wire.py")},
    "open_wire_client": {Path("models/wire.py")},
    "_used_up": {DEFINITION},
    "_give": {DEFINITION},
    "__closure__": set[Path](),
    "cell_contents": set[Path](),
    "get_referents": set[Path](),
    "getclosurevars": {Path("adapters/openai_agents.py")},
}
"""What acts, or would open what only a permit opens, and the modules that may name it."""


def namers(root: Path, name: str) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*.py") if name in names_at(path)}


@cache
def names_at(path: Path) -> frozenset[str]:
    """Collect every name that a module uses."""
    return frozenset(name for node in ast.walk(parse_module(path)) for name in names_of(node))


def names_of(node: ast.AST) -> set[str]:
    """Say which names a piece of code uses, also as a dotted path or in a string."""
    match node:
        case ast.ImportFrom(module=module, names=names):
            return {*(module or "").split("."), *(alias.name for alias in names)}
        case ast.Import(names=names):
            return {text for alias in names for text in alias.name.split(".")}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case _:
            result = named(node)
            return set(result.split(".")) if isinstance(result, str) else set()


@pytest.mark.parametrize("name", RESERVED)
def test_what_acts_is_named_only_where_a_permit_opens_it(name: str) -> None:
    assert namers(SOURCE, name) == RESERVED[name]


def test_the_drills_go_through_the_doors() -> None:
    assert not makers_of_permits(DRILLS)
    assert not askers_of_models(DRILLS)
    assert not {name for name in RESERVED if namers(DRILLS, name)}


REACHES = {
    "run_in_own_process": "def go(tool, permit):\n    return tool.run_in_own_process(b'{}', permit)\n",
    "run_isolated": "from halter.tools.process import run_isolated as go\n",
    "run_forked": "from halter.tools import process\ngo = process.run_forked\n",
    "isolated_program": "import runpy\nrunpy.run_module('halter.tools.isolated_program')\n",
    "send_request": "async def go(server):\n    return await server._live.session.send_request({}, None)\n",
    "call_tool": "async def go(server):\n    return await server._live.session.call_tool('pay', {})\n",
    "model_request": "from pydantic_ai.direct import model_request\n",
    "model_request_stream": "import pydantic_ai.direct as d\ngo = d.model_request_stream\n",
    "open_wire_client": "from halter.models.wire import open_wire_client as go\n",
    "_used_up": "def again(permit):\n    permit._used_up = False\n",
    "_give": "def go(tool, permit):\n    return getattr(tool._function, '_give')(permit)\n",
    "__closure__": "def go(tool):\n    return tool._function._give.__closure__[0]\n",
    "cell_contents": "def go(cell):\n    return cell.cell_contents()\n",
    "get_referents": "import gc\ndef go(tool):\n    return gc.get_referents(tool)\n",
    "getclosurevars": "import inspect\ndef go(tool):\n    return inspect.getclosurevars(tool._function._give)\n",
}


@pytest.mark.parametrize("layer", ["core", "guard", "loop", "runtime", "cli"])
@pytest.mark.parametrize("name", RESERVED)
def test_a_way_around_a_permit_planted_in_any_layer_is_found(tmp_path: Path, layer: str, name: str) -> None:
    planted = tmp_path / layer / "planted.py"
    planted.parent.mkdir()
    planted.write_text(REACHES[name])
    assert namers(tmp_path, name) == {Path(layer) / "planted.py"}


acted: list[str] = []
"""What ran without a permit."""


def was_paid(order: int) -> None:
    """Find nothing out."""
    acted.append(f"asked about {order}")


@tool(check=was_paid, isolate=False)
def pay(order: int = 7) -> str:
    """Pay an order."""
    acted.append(f"paid {order}")
    return "paid"


@tool(isolate=True)
def pay_apart(order: int = 7) -> str:
    """Pay an order."""
    acted.append(f"paid {order}")
    return "paid"


@tool
async def pay_later(order: int = 7) -> str:
    """Pay an order."""
    acted.append(f"paid {order}")
    return "paid"


class Hasty(FunctionTool):
    """A subclass that tries what it inherits."""

    def hurry(self) -> Iterator[Callable[[], Any]]:
        """Reach for the function by every attribute that a tool has."""
        for name in dir(self):
            for given in ((), (b"{}",), (b"{}", "c1"), (Valid({}, b"{}"),), (Valid({}, b"{}"), None)):
                yield lambda name=name, given=given: getattr(self, name)(*given)


def everything_in(result: object, fields: dict[int, object] | None = None) -> list[object]:
    """Collect what can be reached from an object by its attributes and items."""
    fields = {} if fields is None else fields
    if id(result) not in fields and not inspect.ismodule(result):
        fields[id(result)] = result
        for part in parts_of(result):
            everything_in(part, fields)
    return list(fields.values())


def parts_of(result: object) -> Iterator[object]:
    yield from dict(getattr(result, "__dict__", MappingProxyType[str, Any]({}))).values()
    yield from (getattr(result, name, None) for name in getattr(type(result), "__slots__", ()))
    yield getattr(result, "__self__", None)
    yield getattr(result, "__func__", None)
    yield getattr(result, "__wrapped__", None)
    match result:
        case Mapping():
            yield from cast("Mapping[object, object]", result).values()
        case list() | tuple() | set():
            yield from cast("list[object]", result)
        case _:
            pass


def tools_at(folder: Path) -> tuple[Tool, ...]:
    shipped = (*make_file_tools(folder), *make_http_tools(["example.com"]), make_shell_tool(folder), ask_user())
    return (pay, pay_apart, pay_later, *shipped)


def test_no_attribute_of_a_tool_holds_the_function_that_it_was_made_of(tmp_path: Path) -> None:
    texts = {__name__, "halter.tools.files", "halter.tools.http", "halter.tools.shell", "halter.tasks.task_tools"}
    for each in tools_at(tmp_path):
        methods = {id(result) for kind in type(each).__mro__ for result in vars(kind).values()}
        loose = [
            result
            for result in everything_in(each)
            if inspect.isfunction(result) and result.__module__ in texts and id(result) not in methods
        ]
        assert [result for result in loose if result.__qualname__ not in HARMLESS] == [], each.spec.name


HARMLESS = {"Verb.<lambda>"}
"""Functions that check arguments and act on nothing."""


class Forged:
    """Something that looks like a permit."""

    id = "c1"
    deadline = 0

    def use(self) -> None:
        """Use nothing up."""

    def reveal(self, name: str) -> str:
        """Reveal a name."""
        return name


class Endless(Permit):
    """A permit that is never used up."""

    def use(self) -> None:
        """Use nothing up."""


@pytest.mark.parametrize("forged", [Forged(), Endless("c1", 0, {}), None])
async def test_what_only_looks_like_a_permit_opens_no_tool(forged: Any, tmp_path: Path) -> None:
    acted.clear()
    for each in tools_at(tmp_path):
        with pytest.raises(TypeError, match="is not a permit"):
            await each.run(Valid({"order": 7}, b'{"order":7}'), forged)
    with pytest.raises(TypeError, match="is not a permit"):
        await pay.check(Valid({"order": 7}, b'{"order":7}'), forged)
    with pytest.raises(TypeError, match="is not a permit"):
        pay_apart.run_in_own_process(b"{}", forged)
    assert acted == []


async def test_a_permit_opens_one_tool_once() -> None:
    acted.clear()
    permit = Permit("c1", 0, {})
    assert await pay.run(Valid({"order": 7}, b'{"order":7}'), permit) == Output("paid")
    for again in (pay.run, pay.check, pay_later.run):
        with pytest.raises(RuntimeError, match="used before"):
            await again(Valid({"order": 8}, b'{"order":8}'), permit)
    assert acted == ["paid 7"]


def test_nothing_that_a_subclass_inherits_calls_the_function() -> None:
    acted.clear()
    hasty = Hasty(lambda: acted.append("paid"), pay.spec, None, 1000)
    for attempt in hasty.hurry():
        try:
            result = attempt()
        except (TypeError, AttributeError, Failed):
            continue
        if inspect.iscoroutine(result):
            result.close()
    assert acted == []
