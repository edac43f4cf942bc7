"""The sessions of a conversation: a run goes on with the one that is not over, however many are."""

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any

import pytest

from halter.adapters.guarded_runs import NO_TOOLS, GuardedRuns, find_first_open, iterate_in_thread, read_task_text
from halter.core.clock import SECOND
from halter.core.errors import LeaseLost, StoreUnusable
from halter.core.events import CallSettled, CallStarted, RequestSettled, RequestStarted
from halter.core.ids import session_stream
from halter.core.ports import Committed, Stored, Write, matters_always, read_stream
from halter.core.tools import ToolSpec
from halter.core.usage import Usage
from halter.external.effects import DecisionPending, EffectRefused, ModelResult
from halter.external.guard import GuardedSession
from halter.guard.halts import cancel, halt, resume
from halter.journal.store import JournalStore
from halter.loop.concurrency import cancel_and_wait, wait_for_change, watch_changes
from tests.adapters.conftest import Desk


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


async def test_the_guard_is_closed_after_the_last_run_also_if_one_is_cancelled_twice_while_others_begin(
    desk: Desk,
) -> None:
    guard = desk.guard()
    runs = GuardedRuns(guard, NO_TOOLS)

    async def run() -> None:
        async with runs.session("Look around."):
            pass

    first, *others = [asyncio.create_task(run()) for _ in range(30)]
    while not guard.is_open:  # noqa: ASYNC110  It is cancelled in this very moment.
        await asyncio.sleep(0)
    while not first.done():
        first.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*others)
    assert first.cancelled()
    assert not guard.is_open


def test_an_interrupt_between_the_last_item_and_the_end_ends_the_iteration() -> None:
    """The iterating thread has the last item, and waits for the end, when Ctrl-C comes."""
    main_thread, is_interrupted = threading.get_ident(), threading.Event()

    def interrupt(*_: object) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def interrupt_iteration() -> None:
        names: list[str] = []
        while "stream" not in names:
            frame = sys._current_frames()[main_thread]  # noqa: SLF001  The function's documented name.
            names = [entry.name for entry in traceback.extract_stack(frame)]
        signal.pthread_kill(main_thread, signal.SIGINT)
        is_interrupted.wait()

    async def make_items() -> AsyncGenerator[int]:
        yield 1
        asyncio.get_running_loop().call_soon(interrupt_iteration)

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(iterate_in_thread(make_items))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "halter guard" not in [thread.name for thread in threading.enumerate()]


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


async def test_an_outcome_is_settled_although_its_commit_failed_and_nothing_follows(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, failures = JournalStore.commit, [RuntimeError("slip"), StoreUnusable("gone"), OSError("full")]

    async def commit_at_last(store: JournalStore, write: Write) -> Committed:
        if "/settled/" in write.key and failures:
            raise failures.pop()
        return await commit(store, write)

    monkeypatch.setattr(JournalStore, "commit", commit_at_last)
    async with open_session(desk) as session:
        await session.ask("function:desk", "[]", answer)
        await wait_until_settled(desk, session.id, 1)
    await desk.expect_receipt("COMPLETED", [], 1)


async def test_a_report_and_receipts_include_what_was_returned_before_them(desk: Desk) -> None:
    async with desk.guard() as guard, GuardedRuns(guard, NO_TOOLS).session("Look around.", "one") as session:
        await session.ask("function:desk", "[]", answer)
        assert (await guard.report()).cost_by_name_usd == {"function:desk": Decimal("0.00011")}
        await session.act(LOOK, {}, do_nothing)
        (receipt,) = await guard.receipts()
    assert [(line.name, line.outcome) for line in receipt.calls] == [("look", "ok")]
    assert [line.outcome for line in receipt.requests] == ["ok"]


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


SEND = ToolSpec(name="send", description="", schema=b"{}", level="PRIVILEGED", effect="write")
COSTLY = ToolSpec(name="rent", description="", schema=b"{}", level="CONTROLLED", effect="write", cost=100_000)


async def pay(desk: Desk, session: GuardedSession, amount: int = 7, name: str = "c1", spec: ToolSpec = PAY) -> Any:
    """Make the call as a framework does that has the id `name` for it."""

    async def act(arguments: Mapping[str, Any]) -> str:
        desk.paid.append(arguments["amount"])
        return f"paid {arguments['amount']}"

    return await session.act(spec, {"amount": amount}, act, name=name)


def break_off(failure: type[BaseException] | None) -> None:
    if failure is not None:
        raise failure("the database of checkpoints is away")


@asynccontextmanager
async def run_of(desk: Desk, failure: type[BaseException] | None = None) -> AsyncGenerator[GuardedSession]:
    """Run in the conversation `one`, as a new process does; the run ends with the failure."""
    try:
        async with open_session(desk) as session:
            yield session
            break_off(failure)
    except BaseException as error:
        if type(error) is not failure:
            raise


async def list_ends(desk: Desk) -> list[tuple[str, str]]:
    async with desk.guard() as guarded:
        return [(receipt.session, receipt.state) for receipt in await guarded.receipts()]


@pytest.mark.parametrize("failure", [OSError, asyncio.CancelledError, KeyboardInterrupt])
async def test_a_settled_call_is_not_made_again_after_its_run_was_broken_off(
    desk: Desk, failure: type[BaseException]
) -> None:
    async with run_of(desk, failure) as session:
        await pay(desk, session)
    async with run_of(desk) as session:
        assert (session.id, await pay(desk, session)) == ("one.0", "paid 7")
    assert desk.paid == [7]
    assert await list_ends(desk) == [("one.0", "COMPLETED")]


async def test_a_settled_call_is_not_made_again_after_many_errors(desk: Desk) -> None:
    for _ in range(3):
        async with run_of(desk, OSError) as session:
            assert await pay(desk, session) == "paid 7"
        assert await list_ends(desk) == [("one.0", "ERROR")]
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
    assert desk.paid == [7]


async def test_a_run_that_an_error_ended_and_that_nobody_continues_is_over_and_holds_nothing(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        await pay(desk, session, spec=COSTLY)
    async with desk.guard() as guarded:
        report = await guarded.report()
        (receipt,) = await guarded.receipts()
    assert (report.running, report.needs_you, receipt.state, receipt.terminal_reason) == (0, (), "ERROR", "error")
    assert [budget.held for budget in report.budgets if budget.held] == []


async def test_a_new_call_with_the_same_arguments_is_made_after_an_error(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        await pay(desk, session)
    async with run_of(desk) as session:
        await pay(desk, session)
        await pay(desk, session, name="c2")
    assert desk.paid == [7, 7]


async def test_a_later_run_makes_its_calls_also_if_their_ids_and_arguments_occurred_before(desk: Desk) -> None:
    for _ in range(2):
        async with run_of(desk) as session:
            await pay(desk, session)
    assert desk.paid == [7, 7]
    assert [state for _, state in await list_ends(desk)] == ["COMPLETED", "COMPLETED"]


async def test_an_id_that_a_model_uses_for_another_call_does_not_hide_that_call(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        assert await pay(desk, session) == "paid 7"
    async with run_of(desk, OSError) as session:
        assert await pay(desk, session, 9) == "paid 9"
        assert await pay(desk, session, 9) == "paid 9"
        assert await pay(desk, session, 9, spec=LOOK) == "paid 9"
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
        assert await pay(desk, session, 9) == "paid 9"
    assert desk.paid == [7, 9, 9]


async def test_a_call_that_raised_is_made_again_when_the_framework_repeats_it(desk: Desk) -> None:
    async def fail(_: Mapping[str, Any]) -> str:
        raise ValueError("the bank is closed")

    async with run_of(desk, ValueError) as session:
        await session.act(PAY, {"amount": 7}, fail, name="c1")
    async with run_of(desk, OSError) as session:
        assert await pay(desk, session) == "paid 7"
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
    assert desk.paid == [7]


async def test_a_read_that_was_cancelled_is_made_again(desk: Desk) -> None:
    has_begun = asyncio.Event()

    async def hang(_: Mapping[str, Any]) -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return "never"

    async with run_of(desk, OSError) as session:
        call = asyncio.create_task(session.act(LOOK, {"amount": 7}, hang, name="c1"))
        await has_begun.wait()
        await cancel_and_wait(call)
    async with run_of(desk) as session:
        assert await pay(desk, session, spec=LOOK) == "paid 7"


async def test_a_call_that_was_stopped_by_another_ones_error_stays_unknown(desk: Desk) -> None:
    has_begun = asyncio.Event()

    async def hang(_: Mapping[str, Any]) -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return "never"

    async with run_of(desk, OSError) as session:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                await pay(desk, session)
                group.create_task(session.act(PAY, {"amount": 9}, hang, name="c2"))
                await has_begun.wait()
                break_off(OSError)
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
        with pytest.raises(EffectRefused, match="unknown"):
            await pay(desk, session, 9, name="c2")
    assert desk.paid == [7]


@pytest.mark.parametrize(("spec", "state"), [(PAY, "ERROR"), (COSTLY, "RUNNING")])
async def test_a_person_is_asked_about_a_call_that_had_no_outcome_when_an_error_ended_its_run(
    desk: Desk, spec: ToolSpec, state: str
) -> None:
    has_begun = asyncio.Event()

    async def hang(_: Mapping[str, Any]) -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return "never"

    async with run_of(desk, OSError) as session:
        call = asyncio.create_task(session.act(spec, {"amount": 7}, hang, name="c1"))
        await has_begun.wait()
    assert await list_ends(desk) == [("one.0", state)]

    async def repeat() -> Any:
        async with run_of(desk) as session:
            return await pay(desk, session, spec=spec)

    next_run = asyncio.create_task(repeat())
    await desk.wait_for_question()
    await desk.decide("approve")
    assert "had been done" in await next_run
    assert desk.paid == []
    with suppress(Exception):  # Its process has ended.
        await cancel_and_wait(call)


async def test_an_approval_outlives_an_error_and_is_used_once(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        with pytest.raises(DecisionPending):
            await pay(desk, session, spec=SEND)
    assert await list_ends(desk) == [("one.0", "WAITING_FOR_APPROVAL")]
    await desk.decide("approve")
    async with run_of(desk, OSError):
        pass
    assert await list_ends(desk) == [("one.0", "ERROR")]
    for failure in (OSError, OSError, None):
        async with run_of(desk, failure) as session:
            assert await pay(desk, session, spec=SEND) == "paid 7"
    assert desk.paid == [7]
    assert await list_ends(desk) == [("one.0", "COMPLETED")]


async def test_a_question_that_a_run_waits_for_outlives_the_error_of_another_call(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        call = asyncio.create_task(session.act(SEND, {"amount": 7}, do_nothing, name="c1", wait=True))
        await desk.wait_for_question()
        await cancel_and_wait(call)
    await desk.decide("approve")
    async with run_of(desk) as session:
        assert await pay(desk, session, spec=SEND) == "paid 7"
    assert desk.paid == [7]


async def test_a_run_that_ends_with_its_question_waits_for_the_answer(desk: Desk) -> None:
    async with run_of(desk, DecisionPending) as session:
        await pay(desk, session, spec=SEND)
    await desk.decide("approve")
    async with run_of(desk) as session:
        assert await pay(desk, session, spec=SEND) == "paid 7"


async def test_a_denial_outlives_an_error(desk: Desk) -> None:
    async with run_of(desk, OSError) as session:
        with pytest.raises(DecisionPending):
            await pay(desk, session, spec=SEND)
    await desk.decide("deny")
    for failure in (OSError, None):
        async with run_of(desk, failure) as session:
            with pytest.raises(EffectRefused, match="ada denied"):
                await pay(desk, session, spec=SEND)
    assert desk.paid == []


async def test_the_error_of_a_run_without_a_conversation_reaches_its_caller_while_a_call_waits(desk: Desk) -> None:
    async def run() -> None:
        async with GuardedRuns(desk.guard(), NO_TOOLS).session("Look around.") as session:
            call = asyncio.create_task(session.act(SEND, {"amount": 7}, do_nothing, name="c1", wait=True))
            await desk.wait_for_question()
            await cancel_and_wait(call)
            break_off(OSError)

    with pytest.raises(OSError, match="away"):
        await run()
    assert [state for _, state in await list_ends(desk)] == ["ERROR"]


async def test_a_settled_call_is_not_made_again_after_a_halt(desk: Desk) -> None:
    store = desk.store()
    async with run_of(desk, EffectRefused) as session:
        await pay(desk, session)
        await store.commit(halt("agent:desk", "ada", "h1"))
        await pay(desk, session, 9, name="c2")
    assert await list_ends(desk) == [("one.0", "HALTED")]
    await store.commit(resume("agent:desk", "ada", "h2"))
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
        assert await pay(desk, session, 9, name="c2") == "paid 9"
    assert desk.paid == [7, 9]
    await store.close()


async def test_a_call_that_cost_more_than_its_cap_is_not_made_again_after_an_error(desk: Desk) -> None:
    async def ask_dearly(_: int) -> ModelResult[str]:
        return ModelResult("hello", "hello", Usage(10, 200_000))

    async with run_of(desk, OSError) as session:
        await pay(desk, session)
        await session.ask("function:desk", "[]", ask_dearly)
    async with run_of(desk) as session:
        assert await pay(desk, session) == "paid 7"
        with pytest.raises(EffectRefused):
            await session.ask("function:desk", "[]", answer)
    assert desk.paid == [7]
    assert await list_ends(desk) == [("one.0", "BUDGET_EXCEEDED")]


async def test_a_run_continues_at_once_what_was_cancelled_in_a_guard_that_stays_open(desk: Desk) -> None:
    async with desk.guard() as guarded:
        runs = GuardedRuns(guarded, NO_TOOLS)
        with suppress(asyncio.CancelledError):
            async with runs.session("Pay.", "one") as session:
                await pay(desk, session)
                break_off(asyncio.CancelledError)
        async with runs.session("Pay.", "one") as session:
            assert (session.id, await pay(desk, session)) == ("one.0", "paid 7")
    assert desk.paid == [7]


async def test_a_session_that_a_person_cancelled_is_not_reopened(desk: Desk) -> None:
    store = desk.store()
    async with run_of(desk, EffectRefused) as session:
        await store.commit(cancel(session.id, "ada", "h1"))
        await pay(desk, session)
    async with run_of(desk) as session:
        assert session.id == "one.1"
    assert await list_ends(desk) == [("one.1", "COMPLETED"), ("one.0", "CANCELLED")]
    await store.close()
