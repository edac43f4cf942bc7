"""The guard as a Python object: the same door, the same journal, and no agent needed."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halter
from halter import Guard, NearBudget, Output, SessionAlreadyEnded
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import SortableIds
from halter.core.money import BudgetRow, micros_to_usd
from halter.core.ports import Query
from halter.core.usage import ModelName
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.call_answer import ApprovalRequired
from halter.guard.halts import halt
from halter.journal.open import open_store
from halter.models.scripted import Scripted, say
from tests.processes import live_at

SPENDERS = Path(__file__).parent / "programs" / "spenders.py"
DOLLAR = 1_000_000


def guard_in(folder: Path, **more: Any) -> Guard:
    return Guard(str(folder / "guard.db"), agent="desk", environ={"HOME": str(folder)}, **more)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


async def test_a_call_goes_through_the_door_and_leaves_a_receipt(tmp_path: Path) -> None:
    guard = guard_in(tmp_path, max_cost_usd=0.50)

    @guard.tool(level="CONTROLLED", cost="0.10")
    async def send(to: str) -> Output:
        """Send a letter."""
        return Output(f"sent to {to}", 70_000)

    async with guard:
        async with guard.session("answer the mail") as session:
            answer = await session.call(send, to="ada")
        assert (answer.outcome, answer.text, answer.cost_usd) == ("ok", "sent to ada", micros_to_usd(70_000))
        (receipt,) = await guard.receipts()
        assert (receipt.state, receipt.terminal_reason, receipt.cost_usd) == (
            "COMPLETED",
            "completed",
            micros_to_usd(70_000),
        )
        report = await guard.report()
        assert (report.sessions, report.running, report.cost_by_name_usd) == (1, 0, {"send": micros_to_usd(70_000)})


@pytest.mark.parametrize("scope", ["session", "agent", "fleet"])
async def test_a_program_can_read_that_any_cap_of_its_session_is_near(tmp_path: Path, scope: str) -> None:
    caps = {
        "session": {"max_cost_usd": 1},
        "agent": {"policy": {"limits": {"max_cost_usd_per_day": 1}}, "max_cost_usd": 50},
        "fleet": {"fleet": {"limits": {"max_cost_usd_per_day": 1}}, "max_cost_usd": 50},
    }
    guard = guard_in(tmp_path, **caps[scope])

    @guard.tool(level="SAFE", cost=0.45)
    async def pay() -> str:
        """Pay."""
        return "paid"

    async with guard:
        assert not await guard.is_near_budget()
        async with guard.session("pay twice") as session:
            await session.call(pay)
            assert not await session.is_near_budget()
            await session.call(pay)
            assert await session.is_near_budget()
            assert await guard.is_near_budget(session.id)
        async with guard.session("what comes after") as session:
            assert await session.is_near_budget() is (scope != "session")
        assert await guard.is_near_budget() is (scope != "session")


async def test_a_tool_can_read_that_the_budget_is_near_with_what_is_held(tmp_path: Path) -> None:
    guard, results = guard_in(tmp_path, max_cost_usd=1), list[bool]()

    @guard.tool(level="SAFE", cost=0.45)
    async def pay(near_budget: NearBudget, what: str = "") -> str:
        """Pay."""
        results.append(await near_budget())
        return "stopped early" if results[-1] else f"paid {what}"

    assert b"near_budget" not in pay.spec.schema
    async with guard, guard.session("pay twice") as session:
        answers = [(await session.call(pay, what="rent")).text, (await session.call(pay)).text]
    assert (results, answers) == ([False, True], ["paid rent", "stopped early"])


@pytest.mark.parametrize(
    ("limits", "near"),
    [
        ({}, False),
        ({"reserve_cost_fraction": 0.59}, False),
        ({"reserve_cost_fraction": 0.6}, True),
        ({"reserve_cost_fraction": 0, "on_cap": "stop"}, False),
    ],
)
@pytest.mark.parametrize("scope", ["session", "agent", "fleet"])
async def test_a_budget_is_near_when_only_the_configured_reserve_of_its_cap_is_left(
    tmp_path: Path, scope: str, limits: dict[str, Any], *, near: bool
) -> None:
    caps = {
        "session": {"policy": {"limits": limits}, "max_cost_usd": 1},
        "agent": {"policy": {"limits": {"max_cost_usd_per_day": 1, **limits}}, "max_cost_usd": 50},
        "fleet": {"fleet": {"limits": {"max_cost_usd_per_day": 1}}, "policy": {"limits": limits}, "max_cost_usd": 50},
    }
    guard, results = guard_in(tmp_path, **caps[scope]), list[bool]()

    @guard.tool(level="SAFE", cost=0.40)
    async def pay(near_budget: NearBudget) -> str:
        """Pay."""
        results.append(await near_budget())
        return "paid"

    async with guard, guard.session("pay") as session:
        await session.call(pay)
        assert (results, await session.is_near_budget(), await guard.is_near_budget(session.id)) == ([near], near, near)


async def test_a_call_whose_window_is_used_up_is_refused_at_once(tmp_path: Path) -> None:
    guard = guard_in(tmp_path, policy={"limits": {"max_cost_usd_per_day": 0.5}}, max_cost_usd=1)

    @guard.tool(level="SAFE", cost=0.40)
    async def pay() -> str:
        """Pay."""
        return "paid"

    async with guard, asyncio.timeout(30):
        async with guard.session("pay twice") as session:
            answers = [await session.call(pay), await session.call(pay)]
        (receipt,) = await guard.receipts()
    assert [answer.outcome for answer in answers] == ["ok", "cost_cap_reached"]
    assert (receipt.state, receipt.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")


def test_a_plain_function_that_takes_near_budget_is_rejected() -> None:
    def pay(near_budget: NearBudget) -> str:
        """Pay."""
        raise AssertionError

    with pytest.raises(ConfigError, match=r"which needs an async function\. Define it with `async def`"):
        halter.tool(pay)


async def test_one_call_has_a_session_of_its_own(tmp_path: Path) -> None:
    guard = guard_in(tmp_path)

    @guard.tool(level="SAFE")
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async with guard:
        assert (await guard.call("add", a=1, b=2)).text == "3"
        assert (await guard.call("add", a="x", b=2)).outcome == "invalid_arguments"
        assert (await guard.call("subtract", a=1)).outcome == "unknown_tool"
        assert len(await guard.receipts()) == 3


async def test_a_session_at_its_cap_ends_as_that(tmp_path: Path) -> None:
    guard = guard_in(tmp_path, max_cost_usd=0.001)

    @guard.tool(level="SAFE", cost="0.005")
    async def pay() -> str:
        """Pay."""
        raise AssertionError("It must not run.")

    async with guard:
        assert (await guard.call(pay)).outcome == "cost_cap_reached"
        (receipt,) = await guard.receipts()
        assert (receipt.state, receipt.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")


async def test_a_block_that_raises_ends_its_session_as_an_error(tmp_path: Path) -> None:
    guard = guard_in(tmp_path)
    async with guard:
        with pytest.raises(ZeroDivisionError):
            async with guard.session("divide"):
                raise ZeroDivisionError
        (receipt,) = await guard.receipts()
        assert (receipt.state, receipt.terminal_reason) == ("ERROR", "error")


class Noon:
    """A clock that stands still: whatever is asked is asked in one minute."""

    def now(self) -> int:
        return 1_767_268_800_000_000

    async def sleep(self, duration: int) -> None:
        await asyncio.sleep(duration / 1_000_000)


async def test_predictions_of_a_program_keep_to_the_rate_of_their_model(tmp_path: Path) -> None:
    model = Scripted([say("It will be gone."), say("That too.")], Noon(), ModelName("ollama", "small"))
    fleet = {"rates": {"ollama:*": {"requests_per_minute": 1}}, "policy": {"simulate": "asked"}}
    guard = guard_in(tmp_path, fleet=fleet, simulates=model, clock=Noon())

    @guard.tool(level="RESTRICTED")
    async def wipe(path: str) -> str:
        """Wipe."""
        return path

    async with guard, guard.session("wipe") as session:
        results = [await session.attempt(name, wipe, path=name) for name in ("a", "b")]
    assert [bool(each.simulation) for each in results if isinstance(each, ApprovalRequired)] == [True, False]
    assert len(model.requests) == 1


async def test_a_program_can_ask_without_waiting_and_try_again_after_the_decision(tmp_path: Path) -> None:
    guard = guard_in(tmp_path)
    acts: list[str] = []

    @guard.tool(level="RESTRICTED")
    async def wipe(path: str) -> str:
        """Wipe."""
        acts.append(path)
        return "wiped"

    clock = SystemClock()
    person = open_store(str(tmp_path / "guard.db"), clock=clock, ids=SortableIds(clock.now))
    async with guard, guard.session("wipe") as session:
        first = await session.attempt("1", wipe, path="a")
        assert isinstance(first, ApprovalRequired)
        assert isinstance(await session.attempt("1", wipe, path="a"), ApprovalRequired)
        (waiting,) = await list_pending_decisions(person)
        await person.commit(answer_decision(waiting, "approve", "ada", "yes"))
        second = await session.attempt("1", wipe, path="a")
        assert not isinstance(second, ApprovalRequired)
        result = await session.attempt("1", wipe, path="a")
        assert second == result
        assert acts == ["a"]
        await person.commit(halt("fleet", "ada", "halt"))
        assert (await session.call(wipe, path="b")).outcome == "external_halt"
    await person.close()
    async with guard_in(tmp_path) as looking:
        (receipt,) = await looking.receipts()
        assert (receipt.state, receipt.terminal_reason) == ("HALTED", "external_halt")


async def test_secrets_reach_the_tool_and_nothing_else(tmp_path: Path) -> None:
    guard = guard_in(tmp_path, secrets={"KEY": "correct-horse-battery"}, policy={"secrets": ["KEY"]})
    texts: list[str] = []

    @guard.tool(level="CONTROLLED")
    async def use(key: str) -> str:
        """Use a key."""
        texts.append(key)
        return f"used {key}"

    async with guard:
        answer = await guard.call(use, key="${secret:KEY}")
    assert texts == ["correct-horse-battery"]
    assert "battery" not in answer.text
    assert b"correct-horse-battery" not in (tmp_path / "guard.db").read_bytes()


async def test_mistakes_are_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`limts` is not a key"):
        async with guard_in(tmp_path, policy={"limts": {}}):
            pass
    with pytest.raises(ConfigError, match="not open"):
        await guard_in(tmp_path).report()
    guard = guard_in(tmp_path)
    async with guard:
        with pytest.raises(ConfigError, match="already open"):
            guard.tool(lambda: "late")
        async with guard.session(id="one"):
            pass
        with pytest.raises(SessionAlreadyEnded, match="has ended"):
            async with guard.session(id="one"):
                pass


def test_what_is_public_can_be_imported_and_nothing_else() -> None:
    assert all(getattr(halter, name) is not None for name in halter.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = halter.Nonsense  # pyright: ignore[reportAttributeAccessIssue] it is not there


def read_fleet_budgets(store: Path) -> list[BudgetRow]:
    clock = SystemClock()
    journal_store = open_store(str(store), clock=clock, ids=SortableIds(clock.now))

    async def ask() -> list[BudgetRow]:
        rows = await journal_store.ask(Query("budgets", BudgetRow))
        await journal_store.close()
        return [row for row in rows if row.scope == "fleet"]

    return asyncio.run(ask())


@pytest.mark.timeout(90)
def test_twenty_spenders_that_are_killed_and_started_again_never_pass_a_dollar(tmp_path: Path) -> None:
    store = tmp_path / "spenders.db"
    command = [sys.executable, str(SPENDERS), str(store)]
    environ = live_at(tmp_path)
    for calls in (1, 7, 13, 0):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as program:
            assert program.stdout is not None
            assert all(program.stdout.readline() == b"spending\n" for _ in range(calls))
            if calls:
                program.send_signal(signal.SIGKILL)
            _, body = program.communicate(timeout=60)
            assert program.returncode == (-signal.SIGKILL if calls else 0), body.decode()
        for row in read_fleet_budgets(store):
            assert row.spent + row.held <= DOLLAR
            assert row.overrun == 0
    (row,) = read_fleet_budgets(store)
    assert 0.9 * DOLLAR < row.spent <= DOLLAR
    assert row.held == 0
