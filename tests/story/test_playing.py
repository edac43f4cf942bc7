"""Playbooks through the guard: what they wait for, what ends them, and what no crash makes them do twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.playbook_files import parse_playbook
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import LeaseLost
from halter.core.events import CallStarted, SessionParked, SessionStarted
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.core.money import Account
from halter.core.ports import Lease, Store
from halter.core.tools import Failed, Tool
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.guard.approvals import (
    PendingDecision,
    RuleWording,
    SameArguments,
    answer_decision,
    approve_always,
    approve_edited,
    end_rule,
    list_pending_decisions,
    raise_cap,
)
from halter.guard.guard import GuardRuntime
from halter.guard.halts import cancel, halt
from halter.guard.ledger import change_cap
from halter.guard.prepare import SessionContext
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.secrets import GivenSecrets
from halter.state import lifecycle
from halter.state.receipt import Receipt, make_receipt
from halter.tasks.playbooks import PlaybookOutcome, Task, encode_task, walk_playbook
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from halter.tools.function_tool import CallKey, tool
from tests.story.autonomous import CALM


def policy(text: str = "") -> ResolvedPolicy:
    return resolve_policy(FleetConfig(), parse_agent(load_bytes(f"name: desk\n{text}".encode(), "agent.yaml")))


def playbook(text: str) -> Task:
    return Task(parse_playbook(load_bytes(text.encode(), "play.yaml")))


class Desk:
    """An agent's tools, which count in the world outside what they really did."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.stuck = asyncio.Event()

    @property
    def tools(self) -> Mapping[str, Tool]:
        tools = (
            tool(self.look, level="SAFE", effect="read"),
            tool(self.put, level="SAFE", idempotent=True),
            tool(self.send, level="SAFE", name="send"),
            tool(self.pay, level="SAFE", cost="0.005"),
            tool(self.wipe, level="RESTRICTED"),
            tool(self.hang, level="SAFE", timeout=60),
            tool(self.fail, level="SAFE"),
        )
        return {each.spec.name: each for each in tools}

    async def look(self, at: str = "") -> str:
        self.done["look"] += 1
        return '{"price": 7}'

    async def put(self, key: CallKey, text: str = "") -> str:
        self.done["put"] += 1
        self.keys[key] += 1
        return "put"

    async def send(self, text: str = "") -> str:
        self.done[f"send {text}"] += 1
        return "sent"

    async def pay(self) -> str:
        self.done["pay"] += 1
        return "paid"

    async def wipe(self, path: str = "") -> str:
        self.done[f"wipe {path}"] += 1
        return "wiped"

    async def hang(self) -> str:
        self.stuck.set()
        await asyncio.Event().wait()
        return "never"

    async def fail(self) -> str:
        raise Failed("NoLuck", "it did not work")


class Play:
    """A playbook in a world, run by a process that starts again after each crash."""

    def __init__(self, task: Task, desk: Desk, agent: ResolvedPolicy | None = None) -> None:
        self.task = task
        self.desk = desk
        self.policy = agent or policy()
        self.ended: PlaybookOutcome | None = None

    async def begin(self, world: World) -> None:
        event = SessionStarted(session="s", agent="desk", kind="task", started_by="ada")
        await world.store.patient(world.clock).commit(lifecycle.start_session(event, encode_task(self.task)))

    async def run(self, world: World) -> None:
        await self.begin(world)
        async with self.hold_lease(world) as (store, lease):
            if lease is not None:
                self.ended = await walk_playbook(self.make_runtime(world, store, lease), store, self.task)

    @asynccontextmanager
    async def hold_lease(self, world: World) -> AsyncGenerator[tuple[Store, Lease | None]]:
        store = world.store.patient(world.clock)
        worker = make_worker_id("play", world.ids)
        async with renew_leases(store, world.clock, worker, world.lease - SECOND):
            yield store, await acquire_lease(store, world.clock, worker, SessionId("s"), 20 * SECOND)

    def make_runtime(self, world: World, store: Store, lease: Lease) -> SessionRuntime:
        guard = GuardRuntime(store, world.clock, redact=lambda text: text, secrets=GivenSecrets({}), prices=Prices({}))
        session_context = SessionContext("s", "desk", self.policy.phases[0], self.policy, str(self.policy.digest()))
        return SessionRuntime(store, world.clock, guard, lease, session_context, self.desk.tools)


async def load_receipt(world: World) -> Receipt:
    return make_receipt(await world.events(session_stream("s")))


async def wait_for_decision(world: World) -> PendingDecision:
    """Wait until something needs a person."""
    while not (waiting := await list_pending_decisions(world.journal)):
        await world.clock.sleep(SECOND)
    return waiting[0]


ALL_KINDS = """
- call: look
  as: price
- call: put
  arguments: {text: "at ${steps.price.json.price}"}
- call: send
  arguments: {text: one}
- call: send
  arguments: {text: two}
- call: look
"""


async def test_a_playbook_runs_to_its_end_with_results_that_refer_to_earlier_ones(world: World) -> None:
    play = Play(playbook('- {call: look, as: a}\n- {call: send, arguments: {text: "${steps.a.json.price}!"}}'), Desk())
    await play.run(world)
    assert play.ended == PlaybookOutcome("COMPLETED", "completed")
    assert play.desk.done == {"look": 1, "send 7!": 1}
    receipt = await load_receipt(world)
    assert (receipt.state, receipt.terminal_reason, [line.name for line in receipt.calls]) == (
        "COMPLETED",
        "completed",
        ["look", "send"],
    )


def test_a_crash_at_any_commit_does_no_plain_write_twice_and_asks_about_each_that_is_in_doubt() -> None:
    task = playbook(ALL_KINDS)
    plays: list[Play] = []

    async def program(world: World) -> None:
        play = plays[-1]
        answering = world.spawn(answer_truly(world, play))
        await play.run(world)
        answering.cancel()

    async def answer_truly(world: World, play: Play) -> None:
        """Say truly, as a person who looks would, whether it was done."""
        while True:
            waiting = await wait_for_decision(world)
            assert waiting.about == "unknown_call"
            done = play.desk.done["send one" if waiting.subject == "s.3" else "send two"] > 0
            verdict = "approve" if done else "deny"
            await world.store.patient(world.clock).commit(answer_decision(waiting, verdict, "ada", world.ids.make()))

    def new_world(crash: Crash | None) -> World:
        plays.append(Play(task, Desk()))
        return World(crash=crash)

    for world in crash_everywhere(program, new_world):
        play = plays[-1]
        receipt = world.run(load_receipt(world))
        assert (receipt.state, receipt.terminal_reason) == ("COMPLETED", "completed"), world
        assert play.desk.done["send one"] == play.desk.done["send two"] == 1
        assert len(play.desk.keys) == 1
        assert receipt.in_doubt == ()


async def test_a_step_that_fails_ends_the_playbook_and_says_where(world: World) -> None:
    play = Play(playbook("- call: fail\n- call: send"), Desk())
    await play.run(world)
    assert play.ended is not None
    assert (play.ended.state, play.ended.terminal_reason) == ("ERROR", "step_failed")
    assert "Step 1 (fail, line 1) ended with error: NoLuck: it did not work" in play.ended.sentence
    assert play.desk.done == {}


async def test_a_reference_that_leads_nowhere_is_a_sentence_and_not_a_call(world: World) -> None:
    play = Play(playbook('- {call: look, as: a}\n- {call: send, arguments: {text: "${steps.a.json.cost}"}}'), Desk())
    await play.run(world)
    assert play.ended is not None
    assert "no key `cost`, only `price`" in play.ended.sentence
    assert play.desk.done == {"look": 1}


@pytest.mark.parametrize(("scope", "reason"), [("session:s", "enough"), ("agent:desk", ""), ("fleet", "")])
async def test_a_halt_ends_a_stuck_call_and_its_session_within_a_second(world: World, scope: str, reason: str) -> None:
    play = Play(playbook("- call: hang\n- call: send"), Desk())
    running = asyncio.create_task(play.run(world))
    await play.desk.stuck.wait()
    halted_at = world.now
    await world.store.commit(halt(scope, "ada", "halt", reason))
    await running
    assert world.now - halted_at < SECOND
    assert play.ended is not None
    assert (play.ended.state, play.ended.terminal_reason) == ("HALTED", "external_halt")
    assert [line.outcome for line in (await load_receipt(world)).calls] == ["unknown"]


async def test_a_cancelled_session_is_distinguished_from_a_halted_one(world: World) -> None:
    play = Play(playbook("- call: hang"), Desk())
    running = asyncio.create_task(play.run(world))
    await play.desk.stuck.wait()
    await world.store.commit(cancel("s", "ada", "cancel", "not needed any more"))
    await running
    assert play.ended is not None
    assert (play.ended.state, play.ended.terminal_reason) == ("CANCELLED", "cancelled")


async def test_a_halt_ends_a_session_that_waits_for_a_person(world: World) -> None:
    play = Play(playbook("- call: wipe"), Desk())
    running = asyncio.create_task(play.run(world))
    await wait_for_decision(world)
    await world.store.commit(halt("fleet", "ada", "halt"))
    await running
    assert play.ended is not None
    assert play.ended.state == "HALTED"
    assert play.desk.done == {}


async def test_a_tenth_of_a_cent_stops_at_the_first_costed_call_with_everything_committed(world: World) -> None:
    play = Play(playbook("- call: look\n- call: pay"), Desk(), policy("limits: {max_cost_usd: 0.001}"))
    await play.run(world)
    receipt = await load_receipt(world)
    assert (receipt.state, receipt.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    assert [brake.code for brake in receipt.brakes if brake.code == "cost_cap_reached"]
    assert play.desk.done == {"look": 1}


@pytest.mark.parametrize("by", ["decision", "budget"])
async def test_a_session_that_asks_at_its_cap_survives_a_restart_and_resumes_when_it_is_raised(
    world: World, by: str
) -> None:
    tight = policy("limits: {max_cost_usd: 0.001, on_cap: ask}")
    play = Play(playbook("- call: look\n- call: pay"), Desk(), tight)
    world.spawn(play.run(world))
    waiting = await wait_for_decision(world)
    assert (waiting.about, waiting.subject) == ("cap_raise", "session:s")
    assert (await world.session("s")).state == "WAITING_FOR_BUDGET"
    await world.restart()
    await world.advance(HOUR)
    running = world.spawn(play.run(world))
    await world.advance(MINUTE)
    assert not running.done()
    account = Account("session:s", "", "usd")
    if by == "decision":
        await world.store.commit(raise_cap(await wait_for_decision(world), account, 10_000, "ada", "raise"))
    else:
        await world.store.commit(change_cap(account, 10_000, "ada", "raise"))
    await running
    receipt = await load_receipt(world)
    assert (receipt.state, receipt.terminal_reason) == ("COMPLETED", "completed")
    assert play.desk.done == {"look": 1, "pay": 1}


async def test_a_cap_that_nobody_raises_ends_the_session(world: World) -> None:
    tight = policy("limits: {max_cost_usd: 0.001, on_cap: ask}")
    play = Play(playbook("- call: pay"), Desk(), tight)
    running = asyncio.create_task(play.run(world))
    await world.store.commit(answer_decision(await wait_for_decision(world), "deny", "ada", "no"))
    await running
    assert (await load_receipt(world)).terminal_reason == "cost_cap_reached"


@CALM
async def test_at_the_cap_of_a_window_a_session_sleeps_until_the_window_rolls(world: World) -> None:
    daily = policy("limits: {max_cost_usd_per_day: 0.006}")
    play = Play(playbook("- call: pay\n- call: pay"), Desk(), daily)
    started_at = world.now
    await play.run(world)
    assert play.ended == PlaybookOutcome("COMPLETED", "completed")
    assert play.desk.done == {"pay": 2}
    assert world.now >= started_at + DAY - started_at % DAY
    parks = [event.event for event in await world.events(session_stream("s")) if isinstance(event.event, SessionParked)]
    assert [park.state for park in parks] == ["SLEEPING"]


async def play_with_answers(world: World, text: str, *answers: Any, agent: str = "") -> tuple[Play, Sequence[str]]:
    """Play, and answer what needs a person, one thing after the other."""
    play = Play(playbook(text), Desk(), policy(agent))
    running = asyncio.create_task(play.run(world))
    for answer in answers:
        await world.store.commit(answer(await wait_for_decision(world)))
        await world.advance(SECOND)
    await running
    calls = (await load_receipt(world)).calls
    return play, [line.outcome or "" for line in calls]


async def test_an_approved_call_runs_once_and_a_denied_one_not_at_all(world: World) -> None:
    text = "- {call: wipe, arguments: {path: a}}\n- {call: wipe, arguments: {path: b}}"
    play, outcomes = await play_with_answers(
        world,
        text,
        lambda one: answer_decision(one, "approve", "ada", "yes"),
        lambda one: answer_decision(one, "deny", "ada", "no"),
    )
    assert (play.desk.done, outcomes) == ({"wipe a": 1}, ["ok"])
    assert play.ended is not None
    assert "approval_denied: ada denied this call." in play.ended.sentence


async def test_an_edit_runs_with_the_arguments_that_the_person_wrote(world: World) -> None:
    play, outcomes = await play_with_answers(
        world,
        "- {call: wipe, arguments: {path: everything}}",
        lambda one: approve_edited(one, b'{"path": "a little"}', "ada", "edit"),
    )
    assert (play.desk.done, outcomes) == ({"wipe a little": 1}, ["ok"])


async def test_an_edit_that_does_not_fit_the_tool_is_refused(world: World) -> None:
    play, _ = await play_with_answers(
        world,
        "- {call: wipe, arguments: {path: a}}",
        lambda one: approve_edited(one, b'{"nonsense": 1}', "ada", "edit"),
    )
    assert play.desk.done == {}
    assert play.ended is not None
    assert "invalid_arguments" in play.ended.sentence


async def test_always_answers_the_same_call_again_until_it_is_taken_back(world: World) -> None:
    def approve_same(pending_decision: PendingDecision) -> Any:
        rule = RuleWording(
            id="r1", matcher=SameArguments(pending_decision.same), keys=("path",), scope="agent", expires_in=DAY
        )
        return approve_always(pending_decision, rule, "ada", "always")

    same, text = "- {call: wipe, arguments: {path: a}}\n", "- {call: wipe, arguments: {path: b}}\n"
    play, outcomes = await play_with_answers(
        world, same + same + text, approve_same, lambda one: answer_decision(one, "approve", "ada", "yes")
    )
    assert (play.desk.done, outcomes) == ({"wipe a": 2, "wipe b": 1}, ["ok", "ok", "ok"])
    started = [each.event for each in await world.events(session_stream("s")) if isinstance(each.event, CallStarted)]
    assert [one.decided_by for one in started] == ["ada", "ada, always, by rule r1", "ada"]
    assert len((await world.store.commit(end_rule("r1", "ada", "end"))).events) == 1
    assert (await world.store.commit(end_rule("r1", "ada", "end again"))).events == ()


async def test_an_approval_that_nobody_gives_in_time_expires_and_is_reported_as_expired(world: World) -> None:
    play = Play(playbook("- call: wipe"), Desk(), policy("policy: {approval_expiry: 1h}"))
    started_at = world.now
    await play.run(world)
    assert play.ended is not None
    assert "approval_expired" in play.ended.sentence
    assert HOUR <= world.now - started_at < HOUR + MINUTE


@pytest.mark.parametrize("by", ["agent:desk", ""])
async def test_an_agent_decides_nothing_ends_no_rule_and_raises_no_cap(world: World, by: str) -> None:
    play = Play(playbook("- call: wipe"), Desk())
    world.spawn(play.run(world))
    pending_decision = await wait_for_decision(world)
    rule = RuleWording(
        id="r1", matcher=SameArguments(pending_decision.same), keys=("path",), scope="agent", expires_in=DAY
    )
    for write in (
        answer_decision(pending_decision, "approve", by, "a"),
        approve_edited(pending_decision, b"{}", by, "b"),
        approve_always(pending_decision, rule, by, "c"),
        change_cap(Account("fleet", "", "usd"), None, by, "d"),
    ):
        assert (await world.store.commit(write)).events == ()
    assert play.desk.done == {}


async def test_a_process_whose_session_was_taken_over_can_write_nothing(world: World) -> None:
    play = Play(playbook("- call: hang"), Desk())
    running = asyncio.create_task(play.run(world))
    await play.desk.stuck.wait()
    beats = world.journal
    for _ in range(3):
        # Nobody beats for the first process any more: its heartbeat task is gone with its store.
        await world.advance(SECOND)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await world.advance(MINUTE)
    (lease,) = await beats.claim(make_worker_id("other", world.ids), 1, SessionId("s"))
    assert lease.generation == 2
    late = lifecycle.end_session(Lease(lease.session, lease.worker, 1), "COMPLETED", "completed")
    with pytest.raises(LeaseLost):
        await beats.commit(late)
