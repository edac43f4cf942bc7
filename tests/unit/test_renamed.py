"""The public names of 1.0 that have new ones: the old ones work, and each warns its caller."""

import ast
import importlib
import linecache
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import halter
from halter import Agent, Guard
from halter.core.ids import inbox_stream
from halter.core.messages import Prompt, ToolCall, make_user_message
from halter.core.tools import Permit
from halter.guard.halts import halt
from halter.models.scripted import Scripted, say
from halter.testing.fakes import ManualClock
from halter.testing.models import FunctionModel, TestModel
from halter.testing.world import World

SOURCES = Path(halter.__file__).parent
NEW_NAMES = dict(halter._RENAMED)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
NAMES_OF_1_0 = {
    "AnswerDoubted": "UntrustedLinksFound",
    "CapMet": "PausedAtCap",
    "PersonAsked": "DecisionRequested",
    "SessionOver": "SessionAlreadyEnded",
    "SessionTaken": "SessionInUse",
}
ATTRIBUTES_OF_1_0 = {
    ("AgentProgram", "near_budget", "is_near_budget"),
    ("BlockingSession", "near_budget", "is_near_budget"),
    ("FunctionModel", "asked", "requests"),
    ("GuardedSession", "near_budget", "is_near_budget"),
    ("GuardedSession", "until_halted", "wait_until_halted"),
    ("Result", "over", "has_ended"),
    ("Scripted", "asked", "requests"),
    ("World", "say", "send_message"),
}


@contextmanager
def expect_warning(old: str, new: str) -> Generator[None]:
    """Require exactly one warning, which names the new name and points to the line that uses the old one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert str(warning.message) == f"{old} is now called {new}; the old name works until 2.0."
    assert warning.filename == __file__
    assert f".{old.rpartition('.')[2]}" in linecache.getline(__file__, warning.lineno)


def list_renamed_attributes() -> Iterator[tuple[str, str, str]]:
    """List every attribute that the package has under a former name."""
    for file in SOURCES.rglob("*.py"):
        text = file.read_text("utf-8")
        if "RenamedAttribute(" not in text:
            continue
        for definition in ast.walk(ast.parse(text)):
            if isinstance(definition, ast.ClassDef):
                for statement in definition.body:
                    match statement:
                        case ast.Assign(
                            [ast.Name(old)], ast.Call(ast.Name("RenamedAttribute"), [ast.Constant(str(new))])
                        ):
                            yield definition.name, old, new
                        case _:
                            pass


def make_guard(folder: Path) -> Guard:
    return Guard(str(folder / "guard.db"), agent="desk", environ={"HOME": str(folder)})


def make_agent(folder: Path, model: Any) -> Agent:
    return Agent("desk", model=model, store=str(folder / "runs.db"), environ={"HOME": str(folder)})


def test_every_former_name_has_a_test() -> None:
    assert NEW_NAMES == NAMES_OF_1_0
    assert set(list_renamed_attributes()) == ATTRIBUTES_OF_1_0


@pytest.mark.parametrize(("old", "new"), NAMES_OF_1_0.items())
def test_a_former_name_of_the_package_is_the_same_class_and_warns_once(old: str, new: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        former_class = getattr(halter, old)
    (warning,) = caught
    assert former_class is getattr(halter, new)
    assert warning.category is DeprecationWarning
    assert str(warning.message) == f"halter.{old} is now called halter.{new}; the old name works until 2.0."
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "former_class = getattr(halter, old)"


def test_a_program_that_imports_former_names_is_warned_once_for_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter is Python's own, as a program has it: one warning for each place, however often it runs."""
    program = tmp_path / "program_of_1_0.py"
    program.write_text("".join(f"from halter import {old}\n" for old in NAMES_OF_1_0), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        module = importlib.import_module("program_of_1_0")
    assert [(warning.filename, warning.lineno, str(warning.message)) for warning in caught] == [
        (str(program), line, f"halter.{old} is now called halter.{new}; the old name works until 2.0.")
        for line, (old, new) in enumerate(NAMES_OF_1_0.items(), 1)
    ]
    for old, new in NAMES_OF_1_0.items():
        assert getattr(module, old) is getattr(halter, new)


def test_former_names_are_not_listed() -> None:
    assert not NAMES_OF_1_0.keys() & {*halter.__all__, *dir(halter)}
    assert set(NAMES_OF_1_0.values()) <= set(halter.__all__)


@pytest.mark.parametrize("name", ["Nothing", "personasked", "UNKNOWN", "near_budget", "_Renamed"])
def test_an_unknown_name_of_the_package_is_an_attribute_error_without_a_warning(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'halter' has no attribute '{name}'$"):
        getattr(halter, name)
    assert not hasattr(halter, name)


def test_an_unknown_name_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program_with_a_mistake.py").write_text("from halter import PersonAskd\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    with pytest.raises(ImportError, match="cannot import name 'PersonAskd' from 'halter'"):
        importlib.import_module("program_with_a_mistake")


async def test_say_of_a_world_sends_a_message(world: World) -> None:
    session = await world.start()
    with expect_warning("World.say", "send_message"):
        sending = world.say(session, "Hello.", sender="mara")
    await sending
    (former,) = await world.events(inbox_stream(session))
    await world.send_message(session, "Hello.", sender="mara")
    (_, current) = await world.events(inbox_stream(session))
    assert (type(former.event), former.body) == (type(current.event), b"Hello.")
    assert (former.event.sender, current.event.sender) == ("mara", "mara")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "model",
    [
        FunctionModel(lambda _: "Hello."),
        TestModel("Hello."),
        Scripted([say("Hello.")], ManualClock()),
    ],
    ids=lambda model: type(model).__name__,
)
async def test_asked_of_a_model_has_its_requests(model: Any) -> None:
    prompt = Prompt(messages=(make_user_message("Are you there?"),))
    await model.ask(prompt, Permit("r/0", 0, {}))
    with expect_warning(f"{type(model).__name__}.asked", "requests"):
        requests = model.asked
    assert requests is model.requests
    assert requests == [prompt]


@pytest.mark.parametrize("keep_open", [True, False])
async def test_over_of_a_result_is_whether_its_session_has_ended(tmp_path: Path, *, keep_open: bool) -> None:
    reply = ToolCall("", "ask_user", '{"question": "Which desk?"}') if keep_open else "Yes."
    async with make_agent(tmp_path, FunctionModel(lambda _: reply)) as agent:
        result = await agent.run("Are you there?")
    with expect_warning(f"{type(result).__name__}.over", "has_ended"):
        over = result.over
    assert over is result.has_ended is not keep_open


async def test_near_budget_of_an_agent_a_guard_and_a_session_is_what_it_was(tmp_path: Path) -> None:
    async with make_agent(tmp_path, FunctionModel(lambda _: "Hello.")) as agent:
        with expect_warning("Agent.near_budget", "is_near_budget"):
            answer = agent.near_budget()
        assert await answer is False
    guard = Guard(str(tmp_path / "guard.db"), agent="desk", environ={"HOME": str(tmp_path)}, max_cost_usd=1)

    @guard.tool(level="SAFE", cost=0.90)
    async def pay() -> str:
        return "paid"

    async with guard:
        with expect_warning("Guard.near_budget", "is_near_budget"):
            answer = guard.near_budget()
        assert await answer is False
        async with guard.session("Pay.") as session:
            await session.call(pay)
            with expect_warning("GuardedSession.near_budget", "is_near_budget"):
                answer = session.near_budget()
            assert await answer is True


def test_near_budget_of_a_blocking_session_is_what_it_was(tmp_path: Path) -> None:
    with make_guard(tmp_path).blocking() as desk, desk.session("Look.") as session:
        with expect_warning("BlockingSession.near_budget", "is_near_budget"):
            answer = session.near_budget()
        assert answer is False


async def test_until_halted_of_a_session_waits_for_a_halt(tmp_path: Path) -> None:
    async with make_guard(tmp_path) as guard, guard.session("Wait.") as session:
        with expect_warning("GuardedSession.until_halted", "wait_until_halted"):
            waiting = session.until_halted()
        await guard._open_context().store.commit(halt("fleet", "ada", "halt"))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        refused = await waiting
    assert refused.outcome == "external_halt"


@pytest.mark.parametrize("holder", [Agent, Guard, World, FunctionModel, Scripted])
def test_an_unknown_attribute_is_an_attribute_error_without_a_warning(holder: type) -> None:
    with pytest.raises(AttributeError, match="no attribute 'near_budgets'"):
        holder.near_budgets  # type: ignore[attr-defined]  # noqa: B018


def test_a_retry_takes_its_reason_under_the_name_of_1_0() -> None:
    assert str(halter.Retry(why="Rain is never negative.")) == "Retry: Rain is never negative."
