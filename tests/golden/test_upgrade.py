"""A rolling upgrade: what an earlier version left in flight is taken up and brought to its end by this one."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import SESSION_FORMAT, CallSettled, CallStarted, RequestSettled, RequestStarted, SessionEnded
from halter.core.ids import WorkerId
from halter.core.money import BudgetRow
from halter.core.ports import Query, Stored
from halter.core.rows import HoldRow, SessionRow
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.journal.rebuild import IntegrityFinding
from halter.journal.verify import verify_store
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import post_message
from halter.testing.world import World
from tests.golden import make, midway
from tests.story.autonomous import Fleet

HERE = Path(__file__).parent
THIS = "this version"
VERSIONS = [*sorted(path.parent.name for path in HERE.glob("*/store.db")), THIS]
MORNING = make.START + 2 * DAY
"""A time at which every lease of the earlier version has run out."""

RULES = """
model: reflex
reflex:
  - when: message.contains("enough")
    yield: {mode: shutdown, reason: it is enough}
  - yield: {mode: sleep, sleep: 1h, reason: nothing to do}
autonomy: {enabled: true, idle_timeout: 0}
"""
ANSWERS = """
model: reflex
reflex: [{say: There is nothing.}]
schedules: [{name: once, prompt: Look., at: "2120-01-01T00:00:00Z"}]
autonomy: {enabled: false}
"""
TOOLS = '''
from pathlib import Path

from halter import tool

DONE = Path(__file__).parent / "done"


def note(what: str) -> str:
    with DONE.open("a") as file:
        file.write(f"{what}\\n")
    return "done"


@tool(level="SAFE", cost="0.02")
async def fetch_page(page: int) -> str:
    """Fetch a page."""
    return note("fetch_page")


@tool(level="SAFE", effect="read", cost="0.25")
async def look() -> str:
    """Look around."""
    return note("look")


@tool(level="SAFE", idempotent=True, cost="0.25")
async def file() -> str:
    """File something, once."""
    return note("file")


@tool(level="SAFE", cost="0.25")
async def send() -> str:
    """Send something."""
    return note("send")
'''


@dataclass(frozen=True)
class Upgrade:
    """What stood in a store of an earlier version, and what this version's process made of it."""

    version: str
    before: dict[str, SessionRow]
    written: Mapping[str, Sequence[Stored]]
    after: dict[str, SessionRow]
    events: Mapping[str, Sequence[Stored]]
    answered: Sequence[str]
    done: dict[str, Counter[str]]
    held: Sequence[HoldRow]
    spent: dict[str, int]
    findings: Sequence[IntegrityFinding]

    @property
    def left(self) -> set[str]:
        """The sessions that were not over."""
        return {session for session, row in self.before.items() if row.ended_at is None}

    @property
    def midway(self) -> bool:
        """Whether the version was one that left sessions in the middle of their turns, which earlier ones had not."""
        return midway.CALLING in self.before


@pytest.fixture(scope="module", params=VERSIONS)
def upgrade(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Upgrade:
    home = tmp_path_factory.mktemp("home")
    if request.param == THIS:
        asyncio.run(make.write(home))
    else:
        shutil.copy(HERE / request.param / "store.db", home)
    with World(7, path=home / "store.db", start=MORNING) as world:
        return world.run(upgraded(world, Fleet(world, home, sturdy=True), request.param))


async def upgraded(world: World, fleet: Fleet, version: str) -> Upgrade:
    """Run all agents, answer what they ask, talk with those who listen, and send the others home."""
    before = await rows(world)
    values = {session: await fleet.events(session) for session in before}
    watches = [fleet.agent(name, RULES, TOOLS) for name in ("night-watch", "watch", midway.AGENT)]
    fleet.start(*watches, *(fleet.agent(name, ANSWERS) for name in ("reader", "desk")))
    await world.advance(MINUTE)
    texts = await everything_answered(world)
    for session in before:
        if before[session].kind == "autonomous":
            await world.send_message(session, "It is enough.")
    await talk(fleet, before)
    await world.advance(2 * HOUR)
    budgets = await world.journal.ask(Query("budgets", BudgetRow))
    return Upgrade(
        version=version,
        before=before,
        written=values,
        after=await rows(world),
        events={session: await fleet.events(session) for session in before},
        answered=texts,
        done={folder.name: done(folder) for folder in watches},
        held=await world.journal.ask(Query("holds", HoldRow)),
        spent={row.scope: row.spent for row in budgets if row.unit == "usd" and not row.window},
        findings=(await verify_store(world.journal)).findings,
    )


async def rows(world: World) -> dict[str, SessionRow]:
    return {row.session: row for row in await world.journal.ask(Query("all_sessions", SessionRow))}


async def everything_answered(world: World) -> Sequence[str]:
    """Be a person who says that whatever they are asked about was done."""
    texts: list[str] = []
    while pending_decisions := await list_pending_decisions(world.journal):
        for pending_decision in pending_decisions:
            texts.append(pending_decision.subject)
            await world.journal.commit(answer_decision(pending_decision, "approve", "ada", world.ids.make()))
        await world.advance(MINUTE)
    return texts


async def talk(fleet: Fleet, before: dict[str, SessionRow]) -> None:
    """Go on with a talk, from a process of one's own, where the version had any."""
    assert fleet.up is not None
    context = msgspec.structs.replace(fleet.up.agents["desk"].context, worker=WorkerId("talk"))
    if "talking" in before:
        await post_message(context, "talking", "Are you there?")
        await attend_session(context, "talking")


def done(folder: Path) -> Counter[str]:
    """Count in the world outside what was really done."""
    file = folder / "done"
    return Counter(file.read_text().split()) if file.exists() else Counter()


def test_a_store_that_is_made_today_holds_one_of_everything_that_can_be_in_flight(upgrade: Upgrade) -> None:
    """Earlier versions left no session in the middle of a turn, and none that waits for a person."""
    if upgrade.midway:
        rows = [upgrade.before[name] for name in (midway.ASLEEP, midway.CALLING, midway.ASKING, midway.SPOKEN_TO)]
        assert [row.state for row in rows] == ["SLEEPING", "RUNNING", "WAITING_FOR_APPROVAL", "SLEEPING"]
        assert [row.inbox_wake - row.inbox_seen for row in rows] == [0, 0, 0, 1]
    assert upgrade.midway or upgrade.version in ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0")


def test_every_session_that_was_in_flight_comes_to_its_end_under_this_version(upgrade: Upgrade) -> None:
    assert {"in-doubt", "delegating", "delegating-helper"} <= upgrade.left
    ends = {name: (upgrade.after[name].state, upgrade.after[name].terminal_reason) for name in upgrade.left}
    # Its agent had been switched off, and nobody but a person ends a talk.
    switched_off, talked = ends.pop("watch-1", None), ends.pop("talking", None)
    assert set(ends.values()) == {("COMPLETED", "completed")}, ends
    assert switched_off in (None, ("HALTED", "external_halt"))
    assert talked in (None, ("WAITING_FOR_INPUT", ""))
    assert {upgrade.after[name].format for name in upgrade.left} == {SESSION_FORMAT}


def test_an_upgraded_store_has_no_finding_and_what_stood_there_before_still_does(upgrade: Upgrade) -> None:
    assert upgrade.findings == ()
    for session, earlier in upgrade.written.items():
        assert upgrade.events[session][: len(earlier)] == earlier, session


def test_nothing_that_an_earlier_version_began_is_done_twice_and_people_are_asked_about_it(upgrade: Upgrade) -> None:
    in_doubt = {"in-doubt/turn-1/act-0", "in-doubt/turn-1/act-1", "delegating-helper/read"}
    texts = {f"{midway.CALLING}.c1_0_2", f"{midway.ASKING}.c1_0_0"} if upgrade.midway else set[str]()
    assert sorted(upgrade.answered) == sorted(in_doubt | texts)
    repeated = Counter({"look": 1, "file": 1}) if upgrade.midway else Counter[str]()
    assert upgrade.done == {"night-watch": Counter(), "watch": Counter(), midway.AGENT: repeated}
    for session, events in upgrade.events.items():
        counts, settled = Counter(map(find_started, events)), Counter(map(find_settled, events))
        del counts[""], settled[""]
        assert counts == settled, session
        assert set(counts.values()) <= {1}, session


def find_started(stored: Stored) -> str:
    """Return the call or request that an event starts, or an empty text."""
    match stored.event:
        case CallStarted(call=name) | RequestStarted(request=name):
            return name
        case _:
            return ""


def find_settled(stored: Stored) -> str:
    """Return the call or request that an event settles, or an empty text."""
    match stored.event:
        case CallSettled(call=name) | RequestSettled(request=name):
            return name
        case _:
            return ""


def test_the_money_of_an_earlier_version_adds_up_and_no_hold_is_left(upgrade: Upgrade) -> None:
    assert upgrade.held == []
    for session, events in upgrade.events.items():
        own = sum(read_charge(event) for event in events if find_settled(event))
        children = [name for name, row in upgrade.after.items() if row.parent == session]
        lent = sum(read_charge(event) for name in children for event in upgrade.events[name][-1:])
        assert upgrade.spent.get(f"session:{session}", 0) == own + lent, session
    # A person says that both were done: each costs what was held for it, and no more.
    doubts = [event for event in upgrade.events["in-doubt"] if find_settled(event).startswith("in-doubt/turn-1/act")]
    assert [read_charge(event) for event in doubts] == [20_000, 20_000]


def read_charge(stored: Stored) -> int:
    """Return the cost that an event charges, or 0."""
    match stored.event:
        case CallSettled(charge=charge) | RequestSettled(charge=charge) | SessionEnded(charge=charge):
            return charge.usd if charge else 0
        case _:
            return 0
