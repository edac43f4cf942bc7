"""The desk: what somebody may see and do, the same for every face."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, SECOND, SystemClock, window_at
from halter.core.errors import NotDone
from halter.core.events import (
    AgentSwitched,
    AnyEvent,
    CallSettled,
    CallStarted,
    DecisionAsked,
    FindingEmitted,
    HaltRequested,
    ItemQuarantined,
    ItemSeen,
    MemoryProposed,
    NotificationQueued,
    RuleMade,
    SensorChanged,
    TriggerMade,
    TurnStarted,
)
from halter.core.ids import FLEET, StreamId, WorkerId, inbox_stream, session_stream, trigger_stream
from halter.core.messages import make_user_message
from halter.core.money import Leg, micros_to_usd
from halter.core.ports import Draft, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import AgentRow, AuditRow, DecisionRow, HaltRow, RuleRow, StreamRow
from halter.dispatch.workers import WorkerInfo
from halter.guard.ledger import Ledger
from halter.operations import artifacts, control, decisions, fleet, messages, money, queries, rules
from halter.operations.actor import ROLES, Actor, Principal, Role
from halter.operations.decisions import ApprovalTerms, waiting
from halter.operations.fleet import workers
from halter.operations.queries import AuditFilter
from halter.runtime.runtime import Runtime
from halter.settings import Settings

TWO = ("mine", "theirs")
LATER = 4_000_000_000 * SECOND
MADE = msgspec.json.encode({"type": "webhook", "spec": {"name": "hook", "prompt": "Look.", "token": "${secret:T}"}})
HELLO = msgspec.json.encode(make_user_message("Hello."))
SAID = {TurnStarted: HELLO, TriggerMade: MADE, FindingEmitted: b'{"title": "A gap", "severity": "low"}'}


class Office:
    """Two agents that have left a row of every kind, and somebody who looks at them."""

    def __init__(self, scribe: Any) -> None:
        self.scribe, self.ground = scribe, scribe.ground
        ground = self.ground
        settings = Settings(ground.url, ground.folder, ground.key_path, "ann")
        # PostgreSQL keeps its own time.
        clock = SystemClock() if ground.url.startswith("postgresql:") else ground
        self.app = Runtime(settings, clock, ground, ground.store, ground.checkpointer, Ledger(ground.store, ground), {})

    def desk(self, role: Role = "admin", *agents: str, name: str = "bea") -> Actor:
        return Actor(self.app, Principal(name, role, agents))

    async def write(self, stream: StreamId, event: AnyEvent, *rows: Any, owner: str = "") -> None:
        lease = self.scribe.leases[owner] if owner else None
        drafts = [Draft(event, SAID.get(type(event), b"what was said"))]
        key = f"{event.KIND}/{self.ground.make()}"
        await self.ground.store.commit(Write(stream, key, lambda _: drafts, [*rows_of_event(event), *rows], lease))

    async def furnish(self) -> None:
        self.day = window_at("day", await self.ground.store.now())
        for agent in TWO:
            await self.live(agent)

    async def live(self, agent: str) -> None:
        session, trigger = f"{agent}-1", f"{agent}/hook"
        await self.scribe.start(session, agent=agent)
        await self.spend(agent, session)
        stream, call = session_stream(session), f"{session}.c1"
        await self.write(stream, TurnStarted(turn=1), owner=session)
        event = DecisionAsked(
            decision=f"{agent}-asks", about="approval", subject=call, name="look", digest="d", expires_at=LATER
        )
        await self.write(stream, event, (DecisionRow, event.decision), owner=session)
        call_started = CallStarted(call=call, tool=f"tool-of-{agent}", audit="full")
        await self.write(stream, call_started, (AuditRow, call), owner=session)
        await self.write(stream, CallSettled(call=call, outcome="ok", audited=True), (AuditRow, call), owner=session)
        finding_emitted = FindingEmitted(finding=f"{agent}-found", agent=agent, severity="low", support="unquoted")
        await self.write(stream, finding_emitted, owner=session)
        await self.write(stream, MemoryProposed(memory=f"{agent}-memory", agent=agent), owner=session)
        notification_queued = NotificationQueued(notification=f"{agent}-told", channel="in_app", agent=agent)
        await self.write(stream, notification_queued, owner=session)
        await self.write(stream, SensorChanged(sensor=f"{agent}-eye", health="failing", failures=3), owner=session)
        made = TriggerMade(trigger=trigger, agent=agent, type="webhook", by="ann", digest="d")
        await self.write(trigger_stream(trigger), made)
        await self.write(trigger_stream(trigger), ItemSeen(trigger=trigger, item=f"{agent}-item", name=f"{agent}.md"))
        item_quarantined = ItemQuarantined(
            trigger=trigger, item=f"{agent}-item", attempts=3, sentence="It cannot be read."
        )
        await self.write(trigger_stream(trigger), item_quarantined)
        rule = RuleMade(
            rule=f"{agent}-rule", tool="look", scope="agent", owner=agent, matcher="{}", keys=(), by="ann",
            expires_at=LATER,
        )  # fmt: skip
        await self.write(FLEET, rule, (RuleRow, rule.rule))
        await self.write(FLEET, HaltRequested(scope=f"trigger:{trigger}", by="ann"), (HaltRow, f"trigger:{trigger}"))
        await self.write(FLEET, AgentSwitched(agent=agent, on=True, by="ann"), (AgentRow, agent))
        worker_info = WorkerInfo(kind="worker", host=f"host-of-{agent}", pid=7, agents={agent: "1"})
        await self.ground.store.beat(WorkerId(f"worker-of-{agent}"), {}, worker_info.encode())

    async def spend(self, agent: str, session: str) -> None:
        legs = (
            Leg(session_stream(session), "", "usd", 50_000, 1_000),
            Leg(f"agent:{agent}", self.day, "usd", 90_000, 1_000),
            Leg("fleet", self.day, "usd", 200_000, 1_000),
        )
        self.scribe.legs = lambda *_: legs
        await self.scribe.hold(session, f"{session}-spent", 1_000)
        await self.scribe.settle(session, f"{session}-spent", 700)

    async def heads(self) -> Mapping[str, int]:
        return {row.stream: row.head for row in await self.ground.store.ask(Query("heads", StreamRow))}


@pytest.fixture
async def everywhere(scribe: Any) -> Office:
    """The same on every store: what is listed is asked of it."""
    made = Office(scribe)
    await made.furnish()
    return made


@pytest.fixture
async def office(make_scribe: Any, tmp_path: Path) -> AsyncGenerator[Office]:
    made = Office(make_scribe.on("memory:", tmp_path))
    await made.furnish()
    yield made
    await made.ground.store.close()


async def everything(desk: Actor) -> dict[str, Any]:
    """All that can be listed."""
    now = await desk.app.store.now()
    return {
        "sessions": await queries.sessions(desk),
        "fleet": await queries.fleet(desk),
        "report": await queries.report(desk, now - DAY),
        "told": await queries.read_notices(desk, 0),
        "spending": await queries.spending(desk, now - HOUR, now + HOUR, 2),
        "waiting": [waiting_decision.decision for waiting_decision in await waiting(desk)],
        "budgets": await money.budgets(desk, everything=True),
        "halts": await control.halts_now(desk),
        "workers": await workers(desk),
        "agents": sorted(await control.list_known_agents(desk)),
        "plans": await fleet.plans(desk),
        "findings": await artifacts.findings(desk),
        "proposals": await artifacts.proposals(desk),
        "rules": await rules.rules(desk),
        "audit": [row async for row in queries.audit(desk, AuditFilter())],
        "newest": [row async for row in queries.newest(desk, AuditFilter(until=LATER))],
    }


async def test_each_agent_shows_in_everything_that_is_listed(everywhere: Office) -> None:
    for name, result in (await everything(everywhere.desk("viewer"))).items():
        assert all(agent in msgspec.json.encode(result).decode() for agent in TWO), name


async def test_who_sees_one_agent_finds_nothing_of_another_in_anything_that_is_listed(everywhere: Office) -> None:
    for name, result in (await everything(everywhere.desk("admin", "mine"))).items():
        text = msgspec.json.encode(result).decode()
        assert "mine" in text, name
        assert "theirs" not in text, name


async def test_what_all_agents_spent_together_is_not_told_to_who_sees_only_some(office: Office) -> None:
    scopes = {row.scope for row in (await money.budgets(office.desk("admin", "mine"))).budgets}
    assert scopes == {"agent:mine", "session:mine-1"}
    assert not [cap for cap in (await queries.report(office.desk("admin", "mine"), 0)).caps if cap.scope == "fleet"]


READS: dict[str, Callable[[Actor], Awaitable[Any]]] = {
    "session": lambda desk: desk.session("theirs-1"),
    "by its beginning": lambda desk: replace(desk, short_ids=True).session("theirs"),
    "sessions": lambda desk: queries.sessions(desk, "theirs"),
    "events": lambda desk: queries.events(desk, "theirs-1"),
    "inbox": lambda desk: queries.events(desk, "theirs-1", inbox=True),
    "newest events": lambda desk: queries.newest_events(desk, "theirs-1"),
    "receipt": lambda desk: queries.receipt(desk, "theirs-1"),
    "hot state": lambda desk: queries.hot_state(desk, "theirs-1"),
    "history": lambda desk: queries.hot_state_history(desk, "theirs-1"),
    "sensors": lambda desk: queries.sensors(desk, "theirs-1"),
}

DEEDS: dict[str, tuple[Role, Callable[[Actor, str], Awaitable[Any]]]] = {
    "approve": ("approver", lambda desk, agent: decisions.approve(desk, f"{agent}-asks", ApprovalTerms())),
    "approve together": (
        "approver",
        lambda desk, agent: decisions.approve_together(
            desk, f"{agent}-1", shown=[decisions.ShownDecision(f"{agent}-asks", "d")]
        ),
    ),
    "deny": ("approver", lambda desk, agent: decisions.deny(desk, f"{agent}-asks")),
    "halt": ("approver", lambda desk, agent: control.halt(desk, f"agent:{agent}")),
    "halt a session": ("approver", lambda desk, agent: control.halt(desk, f"session:{agent}-1")),
    "keep": ("approver", lambda desk, agent: artifacts.settle(desk, f"{agent}-found", "kept", "findings")),
    "dismiss": ("approver", lambda desk, agent: artifacts.settle(desk, f"{agent}-memory", "dismissed", "proposals")),
    "resume": ("operator", lambda desk, agent: control.resume(desk, f"trigger:{agent}/hook")),
    "cancel": ("operator", lambda desk, agent: control.cancel(desk, f"{agent}-1", max_wait=0)),
    "switch on": ("operator", lambda desk, agent: control.switch(desk, agent, on=True)),
    "switch off": ("operator", lambda desk, agent: control.switch(desk, agent, on=False)),
    "tell": ("operator", lambda desk, agent: messages.send_message(desk, f"{agent}-1", "Go on.")),
    "raise": ("operator", lambda desk, agent: money.set_cap(desk, "raise", f"agent:{agent}", "0.095")),
    "lower": ("operator", lambda desk, agent: money.set_cap(desk, "lower", f"session:{agent}-1", "0.04")),
    "end a rule": ("operator", lambda desk, agent: rules.end(desk, f"{agent}-rule")),
    "end a trigger": ("operator", lambda desk, agent: fleet.end_trigger(desk, agent, "hook")),
    "retry": ("operator", lambda desk, agent: fleet.retry_item(desk, agent, "hook", f"{agent}.md")),
}


@pytest.mark.parametrize("read", READS)
async def test_what_is_not_yours_to_see_is_not_there(office: Office, read: str) -> None:
    with pytest.raises(NotDone) as no:
        await READS[read](office.desk("admin", "mine"))
    assert no.value.why == "missing"
    await READS[read](office.desk("viewer"))


@pytest.mark.parametrize("deed", DEEDS)
async def test_what_is_not_yours_to_see_cannot_be_changed(office: Office, deed: str) -> None:
    before = await office.heads()
    with pytest.raises(NotDone) as no:
        await DEEDS[deed][1](office.desk("admin", "mine"), "theirs")
    assert no.value.why == "missing"
    assert await office.heads() == before


@pytest.mark.parametrize("deed", DEEDS)
async def test_a_role_that_is_too_low_changes_nothing_and_one_that_is_enough_does(office: Office, deed: str) -> None:
    needed, act = DEEDS[deed]
    before = await office.heads()
    for role in ROLES[: ROLES.index(needed)]:
        with pytest.raises(NotDone, match=f"The role {needed} is required") as no:
            await act(office.desk(role), "mine")
        assert no.value.why == "forbidden"
    assert await office.heads() == before
    await act(office.desk(needed), "mine")
    assert await office.heads() != before


@pytest.mark.parametrize("deed", DEEDS)
async def test_an_agent_does_nothing_here_but_stop_things(office: Office, deed: str) -> None:
    act = DEEDS[deed][1]
    desk = office.desk(name="agent:mine")
    if deed.startswith("halt"):
        await act(desk, "mine")
        return
    before = await office.heads()
    with pytest.raises(NotDone, match="Only a person can") as no:
        await act(desk, "mine")
    assert no.value.why == "refused"
    assert await office.heads() == before


@pytest.mark.parametrize("deed", DEEDS)
async def test_the_name_of_who_did_it_stands_in_the_journal(office: Office, deed: str) -> None:
    before = await office.heads()
    await DEEDS[deed][1](office.desk(), "mine")
    results = [
        result
        for stream, head in (await office.heads()).items()
        if head > before.get(stream, 0)
        for result in await office.ground.store.read(StreamId(stream), before.get(stream, 0))
    ]
    assert any(b'"bea"' in result.facts for result in results)
    assert not any(b'"ann"' in result.facts for result in results)


async def test_a_cap_is_raised_also_on_a_day_on_which_nothing_was_spent_yet(office: Office) -> None:
    """Just after midnight only yesterday's window has a row."""
    await office.ground.sleep(DAY)
    today = window_at("day", office.ground.now())
    assert today != office.day
    desk = office.desk()
    for cap, window in ((30, ""), (31, today)):
        raised = await money.set_cap(desk, "raise", "fleet", str(cap), window)
        assert (raised.window, raised.cap_usd) == (today, Decimal(cap))
    assert (await money.set_cap(desk, "raise", "agent:mine", "9")).window == today


async def test_a_raise_on_a_new_day_is_none_if_more_is_configured(office: Office) -> None:
    await money.set_cap(office.desk(), "raise", "agent:mine", "7")
    await office.ground.sleep(DAY)
    with pytest.raises(NotDone, match=r"The cap of fleet is \$0.20; this amount would not raise it"):
        await money.set_cap(office.desk(), "raise", "fleet", "0.1")
    # What a person said of yesterday is no word on today.
    assert (await money.set_cap(office.desk(), "raise", "agent:mine", "5")).cap_usd == Decimal(5)


async def test_a_window_that_is_not_counted_gets_no_cap(office: Office) -> None:
    now = office.ground.now()
    for window in (window_at("hour", now), window_at("day", now, "Europe/Berlin"), "day/2062-01-01", "day/1999-01-01"):
        for scope in ("fleet", "session:mine-1"):
            with pytest.raises(NotDone, match=r"has these windows: .+\. Choose one with --window"):
                await money.set_cap(office.desk(), "raise", scope, "30", window)


@pytest.mark.parametrize("window", ["day/1999-01-01", "day/2062-01-01"])
async def test_where_nothing_was_spent_a_cap_is_given_to_a_window_of_now_alone(office: Office, window: str) -> None:
    today = window_at("day", office.ground.now())
    with pytest.raises(NotDone, match=f"{window} is not the current window, .* Use --window {today}"):
        await money.set_cap(office.desk(), "raise", "agent:another", "30", window)
    assert (await money.set_cap(office.desk(), "raise", "agent:another", "30", today)).window == today


async def test_a_cap_by_the_hour_and_by_the_day_is_named_by_the_windows_of_now(office: Office) -> None:
    office.scribe.legs = lambda *_: (Leg("agent:mine", window_at("hour", office.ground.now()), "usd", 90_000, 1_000),)
    await office.scribe.hold("mine-1", "hourly", 1_000)
    await office.scribe.settle("mine-1", "hourly", 700)
    await office.ground.sleep(DAY)
    now = office.ground.now()
    today, hour = window_at("day", now), window_at("hour", now)
    with pytest.raises(NotDone, match=f"has these windows: {today}, {hour}. Choose one with --window"):
        await money.set_cap(office.desk(), "raise", "agent:mine", "9")
    with pytest.raises(NotDone, match=f"has these windows: {today}, {hour}. Choose one with --window"):
        await money.set_cap(office.desk(), "raise", "agent:mine", "9", "day/2020-01-01")
    assert (await money.set_cap(office.desk(), "raise", "agent:mine", "9", hour)).window == hour


FOR_ALL: dict[str, Callable[[Actor], Awaitable[Any]]] = {
    "halt": lambda desk: control.halt(desk, "fleet"),
    "resume": lambda desk: control.resume(desk, "fleet"),
    "cap": lambda desk: money.set_cap(desk, "lower", "fleet", "0.1"),
    "always": lambda desk: decisions.approve(desk, "mine-asks", ApprovalTerms(always=True, scope="fleet")),
}


@pytest.mark.parametrize("deed", FOR_ALL)
async def test_who_sees_only_some_agents_has_no_word_on_all_of_them(office: Office, deed: str) -> None:
    before = await office.heads()
    with pytest.raises(NotDone, match="every agent") as no:
        await FOR_ALL[deed](office.desk("admin", "mine"))
    assert no.value.why == "forbidden"
    assert await office.heads() == before


async def test_a_halt_of_the_fleet_is_shown_to_everybody(office: Office) -> None:
    await control.halt(office.desk(), "fleet", "a test")
    assert "fleet" in {row.scope for row in await control.halts_now(office.desk("viewer", "mine"))}
    (line,) = await queries.fleet(office.desk("viewer", "mine"))
    assert line.halted == "fleet was halted by bea"


async def test_the_fleet_shows_the_state_of_each_agent(everywhere: Office) -> None:
    mine, _ = await queries.fleet(everywhere.desk("viewer"))
    assert (mine.agent, mine.on, mine.session, mine.under_way) == ("mine", True, "mine-1", 1)
    assert (mine.spent_today_usd, mine.cap_today_usd, mine.burn_usd) == (
        micros_to_usd(700),
        micros_to_usd(90_000),
        micros_to_usd(700),
    )
    assert mine.sensors == {"mine-eye": "failing"}


@pytest.mark.parametrize(("more", "ramp"), [(0, 2), (3, 5), (80, 60)])
async def test_a_small_fleet_comes_back_soon_and_a_large_one_over_a_minute(
    office: Office, more: int, ramp: int
) -> None:
    for number in range(more):
        await office.scribe.start(f"more-{number}", agent="mine")
    await office.scribe.start("over", agent="mine")
    await office.scribe.end("over")
    await control.halt(office.desk(), "fleet")
    assert (await control.resume(office.desk(), "fleet")).ramp == ramp * SECOND
    await control.halt(office.desk(), "agent:mine")
    assert (await control.resume(office.desk(), "agent:mine")).ramp == 0


async def test_a_fleet_comes_back_over_the_time_that_is_named(office: Office) -> None:
    await control.halt(office.desk(), "fleet")
    assert (await control.resume(office.desk(), "fleet", 0)).ramp == 0


@pytest.mark.parametrize("scope", ["", "agent:", "planet:earth", "agent:\ud800", "session:\x00"])
async def test_what_is_no_scope_is_called_so(office: Office, scope: str) -> None:
    with pytest.raises(NotDone) as no:
        await control.halt(office.desk(), scope)
    assert no.value.why == "wrong"


@pytest.mark.parametrize("name", ["flea", "session", "agent:flea", "session:flea", "trigger:flea", "mine/flea"])
async def test_a_name_that_is_not_known_is_missing_and_halts_nothing(office: Office, name: str) -> None:
    before = await control.halts_now(office.desk())
    with pytest.raises(NotDone) as no:
        await control.halt(office.desk(), name)
    assert no.value.why == "missing"
    assert await control.halts_now(office.desk()) == before


@pytest.mark.parametrize("text", ["", "  \n", "x" * 100_001])
async def test_an_empty_or_too_long_message_is_not_sent_to_a_session(office: Office, text: str) -> None:
    with pytest.raises(NotDone, match="A message needs 1 to 100,000 characters"):
        await messages.send_message(office.desk(), "mine-1", text)


async def test_a_secret_that_is_told_to_a_session_is_kept_by_no_journal(office: Office) -> None:
    runtime = msgspec.structs.replace(office.app, environ={"HALTER_SECRET_BANK": "made-up-but-long-4711"})
    await messages.send_message(Actor(runtime, Principal("bea")), "mine-1", "The word is made-up-but-long-4711.")
    (result,) = await office.ground.store.read(inbox_stream("mine-1"))
    assert result.body is not None
    assert b"The word is" in result.body
    assert b"4711" not in result.body


async def test_a_search_of_the_audit_finds_words_agents_tools_and_outcomes(everywhere: Office) -> None:
    desk = everywhere.desk("viewer")

    async def tools(**wanted: Any) -> list[str]:
        return [row.tool async for row in queries.newest(desk, AuditFilter(until=LATER, **wanted))]

    assert sorted(await tools()) == ["tool-of-mine", "tool-of-theirs"]
    assert await tools(agent="mine") == ["tool-of-mine"]
    assert await tools(tool="tool-of-theirs") == ["tool-of-theirs"]
    assert await tools(text="OF-MINE") == ["tool-of-mine"]
    assert await tools(outcome="failed") == []
    assert await tools(session="theirs-1") == ["tool-of-theirs"]
    assert await tools(since=LATER) == []
