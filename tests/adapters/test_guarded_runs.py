"""The sessions of a conversation: a run goes on with the one that is not over, however many are.

And what every adapter is tested for.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from halter import adapters
from halter.adapters.guarded_runs import NO_TOOLS, GuardedRuns, find_first_open, read_task_text
from halter.core.clock import SECOND
from halter.core.errors import LeaseLost
from halter.core.events import CallSettled, CallStarted, RequestSettled, RequestStarted
from halter.core.ids import session_stream
from halter.core.ports import Committed, Stored, Write, matters_always, read_stream
from halter.core.tools import ToolSpec
from halter.core.usage import Usage
from halter.external.effects import ModelResult
from halter.external.guard import GuardedSession
from halter.journal.store import JournalStore
from halter.loop.session_runtime import wait_for_change, watch_changes
from tests.adapters.conftest import Desk
from tests.adapters.killed_program import FRAMEWORKS


@pytest.mark.parametrize("over", [0, 1, 2, 3, 4, 7, 8, 9, 1000])
async def test_the_first_session_that_is_not_over_is_found_in_few_looks(over: int) -> None:
    looks: list[int] = []

    async def has_ended(number: int) -> bool:
        looks.append(number)
        return number < over

    assert await find_first_open(has_ended) == over
    assert len(looks) <= 2 * over.bit_length() + 1


async def test_each_run_of_a_conversation_begins_where_the_last_one_ended(desk: Desk) -> None:
    runs = GuardedRuns(desk.guard(), NO_TOOLS)
    names: list[str] = []
    for _ in range(4):
        async with runs.session("Pay.", "one") as session:
            names.append(session.id)
    assert names == ["one.0", "one.1", "one.2", "one.3"]


PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg"


class Part:
    """A part of a message, as a framework has it: with a text, or with bytes."""

    def __init__(self, text: str = "", content: object = "") -> None:
        self.text, self.content, self.data = text, content, b"iVBORw0KGgo"


@pytest.mark.parametrize(
    "content",
    [
        "What is this?",
        [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is this?"}],
        {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, {"image_url": PICTURE}]},
        ["What is this?", Part()],
        Part(content=[Part("What is this?"), {"type": "image", "base64": PICTURE}]),
    ],
)
def test_the_task_of_a_run_is_what_was_written_without_pictures_and_files(content: object) -> None:
    assert read_task_text(content) == "What is this?"
    assert read_task_text([Part(), {"type": "image", "base64": PICTURE}, 7, None]) == ""


PROMISES = (
    r"def test_parallel_\w+_on_one_cap_never_pass_it",
    r"for \w+ in range\(20\)",
    r"def test_a_halt_ends_a_\w+_within_its_request",
    r"def test_(what_goes_round_the_guard_is_refused|a_tool_that_the_provider_runs_is_named)",
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_adapter_is_tested_for_caps_halts_and_what_goes_round_it(framework: str) -> None:
    tested = (Path(__file__).parent / f"test_{framework}.py").read_text()
    assert [promise for promise in PROMISES if re.search(promise, tested) is None] == []


def test_every_adapter_is_tested_for_a_kill() -> None:
    folder = Path(adapters.__file__).parent
    guarding = {
        each.stem
        for each in folder.glob("*.py")
        if re.search(r"^def (guard|create_agent)\(", each.read_text(), re.MULTILINE)
    }
    assert guarding == {*FRAMEWORKS}


LOOK = ToolSpec(name="look", description="", schema=b"{}", level="SAFE", effect="read")
PAY = ToolSpec(name="pay", description="", schema=b"{}", level="CONTROLLED", effect="write")
Settled = CallSettled | RequestSettled


async def read_events(desk: Desk, session: str) -> list[Stored]:
    """Read what is durable, as another process does."""
    store = desk.store()
    events = await read_stream(store, session_stream(session))
    await store.close()
    return events


async def list_settled(desk: Desk, session: str) -> list[str]:
    return [stored.event.outcome for stored in await read_events(desk, session) if isinstance(stored.event, Settled)]


async def wait_until_settled(desk: Desk, session: str, count: int) -> None:
    store = desk.store()
    async with watch_changes(store, matters_always) as change_event:
        while len(await list_settled(desk, session)) < count:
            await wait_for_change(change_event, SECOND // 20)
    await store.close()


async def answer(_: int) -> ModelResult[str]:
    return ModelResult("hello", "hello", Usage(10, 10))


async def do_nothing(_: Mapping[str, Any]) -> str:
    return "done"


@asynccontextmanager
async def open_session(desk: Desk) -> AsyncGenerator[GuardedSession]:
    async with GuardedRuns(desk.guard(), NO_TOOLS).session("Look around.", "one") as session:
        yield session


async def test_what_a_step_came_to_is_committed_with_what_the_next_one_intends(desk: Desk) -> None:
    async with open_session(desk) as session:
        for _ in range(3):
            await session.ask("function:desk", "[]", answer)
            await session.act(LOOK, {}, do_nothing)
    events = await read_events(desk, "one.0")
    commits = [{type(stored.event) for stored in events if stored.at == at} for at in sorted({e.at for e in events})]
    assert commits.count({RequestSettled, CallStarted}) == 3
    assert commits.count({CallSettled, RequestStarted}) == 2


async def test_what_came_before_is_durable_before_a_tool_or_a_model_acts(desk: Desk) -> None:
    seen: list[list[str]] = []

    async def look(_: Mapping[str, Any]) -> str:
        seen.append(await list_settled(desk, session.id))
        return "done"

    async def ask(_: int) -> ModelResult[str]:
        seen.append(await list_settled(desk, session.id))
        return await answer(_)

    async with open_session(desk) as session:
        for _ in range(2):
            await session.ask("function:desk", "[]", ask)
            await session.act(LOOK, {}, look)
    assert seen == [["ok"] * count for count in range(4)]


async def test_a_call_that_changes_something_is_settled_when_it_returns(desk: Desk) -> None:
    async with open_session(desk) as session:
        await session.ask("function:desk", "[]", answer)
        await session.act(PAY, {}, do_nothing)
        assert await list_settled(desk, session.id) == ["ok", "ok"]


async def test_an_outcome_is_settled_also_while_nothing_follows(desk: Desk) -> None:
    async with open_session(desk) as session:
        await session.ask("function:desk", "[]", answer)
        await wait_until_settled(desk, session.id, 1)
        await session.act(LOOK, {}, do_nothing)
        await wait_until_settled(desk, session.id, 2)
        assert (await session.receipt()).requests[0].outcome == "ok"


async def test_an_outcome_precedes_the_next_intent_also_while_the_store_is_slow_to_take_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit after 50 ms waits, as it does while the store is unavailable. It is repeated by what follows."""
    commit, is_waiting, may_go_on = JournalStore.commit, asyncio.Event(), asyncio.Event()
    seen: list[list[str]] = []

    async def commit_late(store: JournalStore, write: Write) -> Committed:
        if "/settled/" in write.key and not is_waiting.is_set():
            is_waiting.set()
            await may_go_on.wait()
        return await commit(store, write)

    async def look(_: Mapping[str, Any]) -> str:
        seen.append(await list_settled(desk, session.id))
        return "done"

    monkeypatch.setattr(JournalStore, "commit", commit_late)
    async with open_session(desk) as session:
        await session.ask("function:desk", "[]", answer)
        await is_waiting.wait()
        await session.act(LOOK, {}, look)
        may_go_on.set()
    assert seen == [["ok"]]
    assert await list_settled(desk, "one.0") == ["ok", "ok"]
    await desk.expect_receipt("COMPLETED", ["look"], 1)


@pytest.mark.parametrize("failure", [asyncio.CancelledError, RuntimeError])
async def test_an_outcome_is_settled_also_if_the_run_is_broken_off(desk: Desk, failure: type[BaseException]) -> None:
    async def break_off() -> None:
        async with open_session(desk) as session:
            await session.ask("function:desk", "[]", answer)
            raise failure

    with pytest.raises(failure):
        await break_off()
    assert await list_settled(desk, "one.0") == ["ok"]


async def test_a_cancelled_run_is_cancelled_also_if_another_process_has_taken_its_session(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(_: JournalStore, __: Write) -> Committed:
        raise LeaseLost("Another process has taken the session.")

    async def break_off() -> None:
        async with open_session(desk) as session:
            await session.ask("function:desk", "[]", answer)
            monkeypatch.setattr(JournalStore, "commit", lose)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await break_off()


async def test_the_money_of_a_deferred_settlement_is_free_for_the_next_request(desk: Desk) -> None:
    """Each request may cost 80 cents of the dollar, and costs next to nothing."""
    async with open_session(desk) as session:
        for _ in range(4):
            assert await session.ask("function:desk", "[]", answer, max_output_tokens=80_000) == "hello"
