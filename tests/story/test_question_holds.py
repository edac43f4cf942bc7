"""A call that is put before a person holds its maximum cost while it waits, so that a yes is not refused for money."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import CallRefused, DecisionAsked, HoldMade
from halter.core.ids import WorkerId
from halter.core.money import Account, BudgetRow
from halter.core.ports import Committed, Draft, Lease, Query, Rows, Write
from halter.core.rows import HoldRow
from halter.guard.approvals import PendingDecision, answer_decision, approve_edited, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import BudgetBusy, halt
from halter.guard.ledger import change_cap
from halter.guard.prepare import Call, SessionContext
from halter.journal.verify import verify_store
from halter.models.prices import Prices
from halter.redaction.secrets import GivenSecrets
from halter.state.lifecycle import end_session, read_questions
from halter.testing.fakes import StoreProxy
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.story.loops import Story, calls, policy, says

DIME = 100_000
ASKED = "policy: {tools: {buy: {approval: always}}}"


def make_buyer(world: World, lines: Any, text: str = ASKED) -> Story:
    """A task whose agent can buy for at most $0.40 of the dollar that it may spend, if a person agrees."""
    story = Story(world, lines, kind="task", policy_yaml=text)

    async def buy(item: str = "") -> str:
        story.desk.done[f"buy {item}"] += 1
        return "bought"

    story.extra = [tool(buy, level="SAFE", cost="0.40")]
    return story


def buys(*items: str) -> Any:
    return calls(*[("buy", {"item": item}) for item in items])


async def wait_for_questions(world: World, count: int) -> list[PendingDecision]:
    while len(pending := list(await list_pending_decisions(world.journal))) < count:
        await world.clock.sleep(SECOND)
    return pending


async def read_held(world: World, scope: str = "session:s") -> tuple[int, int]:
    rows = await world.journal.ask(Query("budgets", BudgetRow))
    (row,) = [each for each in rows if each.scope == scope and each.unit == "usd"]
    return row.spent, row.held


async def test_what_is_asked_holds_its_money_and_what_does_not_fit_beside_it_is_not_asked(world: World) -> None:
    story = make_buyer(world, [buys("a", "b", "c"), says("Two of three.")])
    running = world.spawn(story.run("Buy three things."))
    pending = await wait_for_questions(world, 2)
    await world.advance(10 * SECOND)
    assert len(await list_pending_decisions(world.journal)) == 2
    assert await read_held(world) == (0, 8 * DIME)
    for number, question in enumerate(pending):
        await world.store.commit(answer_decision(question, "approve", "ada", f"yes {number}"))
    await running
    assert sum(story.desk.done.values()) == 2
    assert sorted(result.outcome for result in story.results()) == ["cost_cap_reached", "ok", "ok"]
    assert await read_held(world) == (8 * DIME, 0)
    events = [stored.event for stored in await story.events()]
    assert sum(isinstance(event, DecisionAsked) for event in events) == 2
    assert [event.outcome for event in events if isinstance(event, CallRefused)] == ["cost_cap_reached"]


async def check_books(world: World, spent: int, scope: str = "session:s") -> None:
    """Nothing is held any more, nothing is charged twice, and the events alone give the same tables."""
    assert await read_held(world, scope) == (spent, 0)
    assert await world.journal.ask(Query("holds", HoldRow)) == []
    assert (await verify_store(world.journal)).findings == ()


@pytest.mark.parametrize("way", ["deny", "expire", "halt", "cancel", "message"])
async def test_what_is_not_made_releases_its_money_once(world: World, way: str) -> None:
    story = make_buyer(world, [buys("a", "b"), says("Nothing bought."), says("As you like.")])
    running = world.spawn(story.run("Buy two things."))
    pending = await wait_for_questions(world, 2)
    assert await read_held(world) == (0, 8 * DIME)
    match way:
        case "deny":
            await world.store.commit(answer_decision(pending[0], "deny", "ada", "no"))
            assert await read_held(world) == (0, 4 * DIME)
            await world.store.commit(answer_decision(pending[1], "deny", "ada", "no too"))
            assert await read_held(world) == (0, 0)
        case "expire":
            await world.advance(2 * DAY)
        case "halt" | "cancel":
            await world.store.commit(halt("session:s", "ada", "halt", cancels=way == "cancel"))
        case _:
            story.interrupted = True
            running.cancel()
    await running
    assert story.desk.done == {}
    await check_books(world, 0)


async def approve_all(world: World, pending: list[PendingDecision]) -> None:
    for question in pending:
        await world.store.commit(answer_decision(question, "approve", "ada", f"{question.decision}/yes"))


async def test_a_cap_that_is_lowered_meanwhile_is_exact_and_no_yes_waits_for_another(world: World) -> None:
    story = make_buyer(world, [buys("a", "b"), says("One of two.")])
    running = world.spawn(story.run("Buy two things."))
    pending = await wait_for_questions(world, 2)
    await world.store.commit(change_cap(Account("session:s", "", "usd"), 6 * DIME, "ada", "less"))
    await approve_all(world, pending)
    await world.advance(MINUTE)
    assert running.done()
    assert sorted(result.outcome for result in story.results()) == ["cost_cap_reached", "ok"]
    await check_books(world, 4 * DIME)


async def test_a_cap_that_is_raised_meanwhile_lets_the_call_that_did_not_fit_be_asked_about(world: World) -> None:
    story = make_buyer(world, [buys("a", "b", "c"), says("All three.")])
    running = world.spawn(story.run("Buy three things."))
    await wait_for_questions(world, 2)
    await world.store.commit(change_cap(Account("session:s", "", "usd"), 20 * DIME, "ada", "more"))
    await approve_all(world, await wait_for_questions(world, 3))
    await running
    assert sum(story.desk.done.values()) == 3
    await check_books(world, 12 * DIME)


async def test_a_no_makes_room_for_the_call_that_did_not_fit(world: World) -> None:
    story = make_buyer(world, [buys("a", "b", "c"), says("Two of three.")])
    running = world.spawn(story.run("Buy three things."))
    first, second = await wait_for_questions(world, 2)
    await world.store.commit(answer_decision(first, "deny", "ada", "no"))
    (third,) = [each for each in await wait_for_questions(world, 2) if each.decision != second.decision]
    assert third.decision != first.decision
    await approve_all(world, [second, third])
    await running
    assert sum(story.desk.done.values()) == 2
    await check_books(world, 8 * DIME)


async def test_a_yes_takes_effect_although_another_call_waits_for_money(world: World) -> None:
    story = make_buyer(world, [buys("a", "b", "c"), says("Done.")])
    world.spawn(story.run("Buy three things."))
    pending = await wait_for_questions(world, 2)
    await world.advance(HOUR)
    assert (await world.session("s")).state == "WAITING_FOR_APPROVAL"
    await approve_all(world, pending[:1])
    await world.advance(5 * SECOND)
    assert sum(story.desk.done.values()) == 1


async def test_a_question_of_yesterday_held_in_yesterday_and_its_call_counts_today(world: World) -> None:
    text = f"{ASKED}\nlimits: {{max_cost_usd_per_day: 0.5}}"
    story = make_buyer(world, [buys("a"), says("Bought.")], text)
    await world.advance(12 * HOUR)
    running = world.spawn(story.run("Buy it."))
    pending = await wait_for_questions(world, 1)
    yesterday = await read_windows(world)
    await world.advance(DAY - world.now % DAY)
    await approve_all(world, pending)
    await running
    today = await read_windows(world)
    assert [(spent, held) for spent, held in yesterday.values()] == [(0, 4 * DIME)]
    assert sorted(today.values()) == [(0, 0), (4 * DIME, 0)]
    await check_books(world, 4 * DIME)


async def read_windows(world: World) -> dict[str, tuple[int, int]]:
    rows = await world.journal.ask(Query("budgets", BudgetRow))
    return {row.window: (row.spent, row.held) for row in rows if row.scope == "agent:desk"}


async def test_edited_arguments_take_over_the_hold(world: World) -> None:
    story = make_buyer(world, [buys("a", "b"), says("Bought.")])
    running = world.spawn(story.run("Buy two things."))
    first, second = await wait_for_questions(world, 2)
    await world.store.commit(approve_edited(first, b'{"item": "z"}', "ada", "edit"))
    await approve_all(world, [second])
    await running
    assert story.desk.done["buy z"] == 1
    await check_books(world, 8 * DIME)


async def test_a_call_that_costs_nothing_holds_nothing_while_it_waits(world: World) -> None:
    story = Story(world, [calls(("wipe", {"path": "a"})), says("Wiped.")], kind="task")
    running = world.spawn(story.run("Wipe it."))
    await approve_all(world, await wait_for_questions(world, 1))
    await running
    assert story.desk.done == {"wipe a": 1}
    assert not any(isinstance(stored.event, HoldMade) for stored in await story.events())


class Buyers:
    """Sessions of one agent that each buy once for at most $0.40, of the dollar that the agent may spend in a day."""

    def __init__(self, world: World, leases: Sequence[Lease], terms: str = "") -> None:
        self.world = world
        self.leases = leases
        limits = terms or "limits: {max_cost_usd_per_day: 1}"
        self.policy = policy(f"policy: {{approval_expiry: 1h, tools: {{buy: {{approval: always}}}}}}\n{limits}")
        self.guard = GuardRuntime(world.store, world.clock, redact=str, secrets=GivenSecrets({}), prices=Prices({}))
        self.bought = 0
        self.cost: Any = "0.40"

    async def buy(self, item: str = "") -> str:
        self.bought += 1
        return f"bought {item}"

    async def call(self, lease: Lease, attempt: int = 0) -> Answer | ApprovalRequired | BudgetBusy:
        terms, session = self.policy, lease.session
        context = SessionContext(session, "desk", terms.phases[0], terms, str(terms.digest()))
        tools = {"buy": tool(self.buy, level="SAFE", cost=self.cost)}
        return await self.guard.call(lease, context, Call(f"{session}.1", "buy", b'{"item": "a"}'), tools, attempt)

    async def call_all(self, attempt: int = 0) -> list[Answer | ApprovalRequired | BudgetBusy]:
        return await asyncio.gather(*(self.call(lease, attempt) for lease in self.leases))


async def make_buyers(world: World, count: int, terms: str = "") -> Buyers:
    for number in range(count):
        await world.start(f"s{number}", agent="desk")
    return Buyers(world, await world.store.claim(WorkerId("w"), count), terms)


def name_outcome(answer: object) -> str:
    return answer.outcome if isinstance(answer, Answer) else type(answer).__name__


async def test_sessions_that_race_for_the_cap_of_their_agent_are_asked_about_only_as_far_as_it_reaches(
    world: World,
) -> None:
    buyers = await make_buyers(world, 6)
    outcomes = Counter(map(name_outcome, await buyers.call_all()))
    assert outcomes == {"ApprovalRequired": 2, "BudgetBusy": 4}
    assert await read_held(world, "agent:desk") == (0, 8 * DIME)
    await world.store.commit(change_cap((await read_day(world)), 13 * DIME, "ada", "more"))
    outcomes = Counter(map(name_outcome, await buyers.call_all(1)))
    assert outcomes == {"ApprovalRequired": 3, "BudgetBusy": 3}
    await approve_all(world, list(await list_pending_decisions(world.journal)))
    outcomes = Counter(map(name_outcome, await buyers.call_all(2)))
    assert outcomes == {"ok": 3, "cost_cap_reached": 3}
    assert buyers.bought == 3
    await check_books(world, 12 * DIME, "agent:desk")


async def read_day(world: World) -> Account:
    rows = await world.journal.ask(Query("budgets", BudgetRow))
    (window,) = [row.window for row in rows if row.scope == "agent:desk"]
    return Account("agent:desk", window, "usd")


async def test_a_question_that_expired_without_its_session_gives_its_money_to_who_needs_it(world: World) -> None:
    buyers = await make_buyers(world, 2, "limits: {max_cost_usd_per_day: 0.5}")
    first, second = buyers.leases
    assert isinstance(await buyers.call(first), ApprovalRequired)
    assert isinstance(await buyers.call(second), BudgetBusy)
    await world.advance(HOUR)
    assert isinstance(await buyers.call(second, 1), ApprovalRequired)
    assert await read_held(world, "agent:desk") == (0, 4 * DIME)
    assert name_outcome(await buyers.call(first, 1)) == "approval_expired"
    assert await read_held(world, "agent:desk") == (0, 4 * DIME)
    assert (await verify_store(world.journal)).findings == ()


@pytest.mark.parametrize("verdict", ["", "approve", "deny"])
async def test_a_session_that_ends_before_its_call_is_made_releases_the_money(world: World, verdict: Any) -> None:
    buyers = await make_buyers(world, 1)
    (lease,) = buyers.leases
    assert isinstance(await buyers.call(lease), ApprovalRequired)
    (question,) = await list_pending_decisions(world.journal)
    if verdict:
        await world.store.commit(answer_decision(question, verdict, "ada", "answer"))
    questions = await read_questions(world.store, lease.session, world.now)
    assert (await world.store.commit(end_session(lease, "CANCELLED", "cancelled", asked=questions))).events
    await check_books(world, 0, "agent:desk")


async def test_a_call_whose_cost_was_learned_keeps_what_its_question_held(world: World) -> None:
    buyers = await make_buyers(world, 1)
    (lease,) = buyers.leases
    buyers.cost = "learned"
    assert isinstance(await buyers.call(lease), ApprovalRequired)
    _, held = await read_held(world, "agent:desk")
    await world.store.commit(change_cap(await read_day(world), held, "ada", "no more than this"))
    await approve_all(world, list(await list_pending_decisions(world.journal)))
    assert name_outcome(await buyers.call(lease, 1)) == "ok"
    assert (await read_held(world, "agent:desk"))[1] == 0


async def test_a_question_of_an_older_version_that_holds_nothing_is_answered_as_before(world: World) -> None:
    buyers = await make_buyers(world, 1)
    (lease,) = buyers.leases
    buyers.guard = GuardRuntime(
        _WithoutHolds(world.store), world.clock, redact=str, secrets=GivenSecrets({}), prices=Prices({})
    )
    assert isinstance(await buyers.call(lease), ApprovalRequired)
    assert await world.journal.ask(Query("holds", HoldRow)) == []
    buyers.guard = Buyers(world, ()).guard
    await approve_all(world, list(await list_pending_decisions(world.journal)))
    assert name_outcome(await buyers.call(lease, 1)) == "ok"
    await check_books(world, 4 * DIME, "agent:desk")


class _WithoutHolds(StoreProxy):
    """Writes what an older version wrote: a question holds nothing."""

    async def commit(self, write: Write) -> Committed:
        def decide(rows: Rows) -> Sequence[Draft]:
            return [draft for draft in write.decide(rows) if not isinstance(draft.event, HoldMade)]

        return await self._store.commit(msgspec.structs.replace(write, decide=decide))
