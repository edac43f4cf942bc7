"""An outage of a provider is weather: the agent waits for as long as it lasts, for nothing, and goes on by itself."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.errors import ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.events import FindingReviewed, NotificationQueued, SessionParked, TurnStarted
from halter.core.ids import OUTBOX
from halter.core.messages import Prompt, Reply, TextListener
from halter.core.notifications import parse_notification
from halter.core.ports import Query, read_body
from halter.core.rows import ItemRow, OutageRow, SpendRow
from halter.core.tools import Permit
from halter.core.usage import Usage
from halter.guard.halts import halt, resume
from halter.models.scripted import Scripted, ScriptLine, call, say
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import read_inbox
from halter.operations.queries import report
from halter.runtime.switches import turn_off, turn_on
from halter.state.lifecycle import post_message
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet
from tests.story.tasks import DONE, PRICED, REVIEW, SCRIPT, WORK, Office, all_is_well, paper, watch
from tests.story.test_reviews import FINDS_AT_ONCE, TELLS

WATCH = """
model: scripted
script: script.yaml
autonomy: {enabled: true}
"""
SENSES = """
sensors:
  - {name: clock, type: poll, interval: 300, source: {tool: tick}}
"""
TICKS = """
from halter import tool

ticks = 0

@tool(level="SAFE", effect="read")
async def tick() -> int:
    '''Count.'''
    global ticks
    ticks += 1
    return ticks
"""
NAP = call("yield", mode="sleep", sleep="10m")
NAPS = [replace(NAP, reply=replace(NAP.reply, usage=Usage(100, 50)))] * 1000
AWAY = ModelUnavailable("ConnectionFailed: cannot reach scripted:script", billed=False)
WRONG_KEY = ModelUnusable("Unauthorized: scripted:script answered 401: wrong key", billed=False)


class Weather(Scripted):
    """A model whose provider fails between two moments, in one way."""

    def __init__(self, world: World, lines: Sequence[ScriptLine] = NAPS) -> None:
        super().__init__(lines, world.clock)
        self.world = world
        self.storm: tuple[int, int, ModelError] | None = None
        self.tried: list[int] = []
        self.answered: list[int] = []

    def fails(self, after: int, lasts: int, error: ModelError = AWAY) -> None:
        self.storm = (self.world.now + after, self.world.now + after + lasts, error)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        if self.storm is not None and self.storm[0] <= self.world.now < self.storm[1]:
            permit.use()
            self.tried.append(self.world.now)
            raise self.storm[2]
        self.answered.append(self.world.now)
        return await super().ask(prompt, permit, on_text)


class Stormy:
    """An agent that naps for ten minutes at a time, and its weather."""

    def __init__(self, world: World, home: Path, text: str = "", tools: str = "") -> None:
        self.world = world
        self.fleet = Fleet(world, home, PRICED)
        self.folder = self.fleet.agent("watcher", WATCH + text, tools, script_yaml="- {text: unused}\n")
        self.weather = Weather(world)

    def start(self) -> None:
        self.fleet.start(self.folder, given={"scripted:script": self.weather})

    async def list_subjects(self) -> list[str]:
        return await subjects(self.world)

    async def outage(self) -> OutageRow:
        (row,) = await self.world.journal.ask(Query("all_outages", OutageRow))
        return row

    async def needs(self) -> list[str]:
        """What the inbox and the report show, which is the same."""
        desk = Actor(self.fleet.app, Principal("ada"))
        inbox = await read_inbox(desk)
        assert inbox.decisions == []
        lines = [need.line for need in inbox.needs]
        assert list((await report(desk)).needs_you) == lines
        return lines

    async def read_spending(self) -> int:
        return sum(row.usd for row in await self.world.journal.ask(Query("all_spends", SpendRow)))


async def subjects(world: World) -> list[str]:
    events = [stored for stored in await world.events(OUTBOX) if isinstance(stored.event, NotificationQueued)]
    return [parse_notification(await read_body(world.journal, stored)).subject for stored in events]


@pytest.fixture(params=["alone", "with sensors"])
def stormy(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Stormy:
    return Stormy(world, tmp_path, *((SENSES, TICKS) if request.param == "with sensors" else ()))


BEGAN, OVER = "watcher: no model answers", "watcher: the wait for its model has ended"


@CALM
async def test_an_outage_of_six_hours_costs_nothing_and_ends_no_agent(stormy: Stormy, world: World) -> None:
    stormy.start()
    await world.advance(MINUTE)
    stormy.weather.fails(0, 6 * HOUR)
    spent = await stormy.read_spending()
    await world.advance(6 * HOUR)
    assert (await stormy.fleet.row("watcher-1")).state == "SLEEPING"
    assert len(stormy.weather.tried) < 60
    assert await stormy.needs() == [], "there is nothing that a person could do"
    assert await stormy.read_spending() == spent
    assert await stormy.list_subjects() == [BEGAN]
    await world.advance(15 * MINUTE)
    back = stormy.weather.answered[-1]
    assert world.now - back <= 15 * MINUTE
    await world.advance(HOUR)
    assert len(stormy.weather.answered) > 4
    assert await stormy.list_subjects() == [BEGAN, OVER]
    (only,) = await stormy.fleet.sessions("watcher")
    assert (only.state, only.session) == ("SLEEPING", "watcher-1")


@CALM
async def test_pauses_grow_with_the_outage_and_never_beyond_what_the_file_says(world: World, tmp_path: Path) -> None:
    stormy = Stormy(world, tmp_path, "limits: {outage_backoff: 5m}\n")
    stormy.weather.fails(0, 6 * HOUR)
    stormy.start()
    await world.advance(5 * HOUR)
    # The turn's own retries come first.
    tried = stormy.weather.tried[3:]
    pauses = [later - sooner for sooner, later in pairwise(tried)]
    assert pauses[0] < 6 * SECOND
    assert all(pause <= max(6 * SECOND, at - tried[0] + SECOND) for at, pause in zip(tried, pauses, strict=False))
    assert 2 * MINUTE < max(pauses) < 5 * MINUTE + 2 * SECOND
    assert len([pause for pause in pauses if pause > MINUTE]) > 40


async def test_the_turn_that_waited_is_the_one_that_continues(world: World, tmp_path: Path) -> None:
    """What was said in it is not said again, and the model hears nothing of the weather."""
    stormy = Stormy(world, tmp_path)
    stormy.start()
    await world.advance(MINUTE)
    stormy.weather.fails(0, HOUR)
    await world.advance(3 * HOUR)
    turns = [stored for stored in await stormy.fleet.events("watcher-1") if isinstance(stored.event, TurnStarted)]
    assert len(turns) == len(stormy.weather.answered)
    assert "cannot reach" not in str(stormy.weather.requests[-1].messages)


async def test_a_crash_in_the_middle_of_an_outage_keeps_its_backoff(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, 6 * HOUR)
    stormy.start()
    await world.advance(3 * HOUR)
    began = (await stormy.outage()).began_at
    before = len(stormy.weather.tried)
    due = (await stormy.fleet.row("watcher-1")).wake_at
    assert due is not None
    await world.restart()
    stormy.start()
    await world.advance(due - world.now - SECOND)
    assert len(stormy.weather.tried) == before
    await world.advance(MINUTE)
    assert len(stormy.weather.tried) == before + 1
    after = (await stormy.fleet.row("watcher-1")).wake_at
    assert after is not None
    assert after - world.now > 5 * MINUTE
    assert (await stormy.outage()).began_at == began
    await world.advance(4 * HOUR)
    assert len(stormy.weather.answered) > 2
    assert await stormy.list_subjects() == [BEGAN, OVER]


async def test_sensors_read_on_during_an_outage(world: World, tmp_path: Path) -> None:
    stormy = Stormy(world, tmp_path, SENSES, TICKS)
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(30 * MINUTE)
    before = len([name for _, name, _ in stormy.fleet.pulses if name == "autonomy:sensor_updated"])
    await world.advance(20 * MINUTE)
    after = len([name for _, name, _ in stormy.fleet.pulses if name == "autonomy:sensor_updated"])
    assert 3 <= after - before <= 5


async def test_rules_answer_where_they_stand_in_for_a_model_that_is_away(world: World, tmp_path: Path) -> None:
    rules = "fallback_models: [reflex]\nreflex: [{call: {tool: yield, arguments: {mode: sleep, sleep: 10m}}}]\n"
    stormy = Stormy(world, tmp_path, rules)
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(50 * MINUTE)
    assert await stormy.list_subjects() == []
    assert len(stormy.weather.tried) >= 5 * 4


@CALM
async def test_a_message_is_a_reason_to_try_again(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(50 * MINUTE)
    before = len(stormy.weather.tried)
    await world.journal.commit(post_message("watcher-1", "m", b"Are you there?", "ada"))
    await world.advance(SECOND)
    assert len(stormy.weather.tried) == before + 1
    await world.advance(30 * MINUTE)
    assert "Are you there?" in str(stormy.weather.requests[-1].messages)


@CALM
async def test_what_came_during_an_outage_is_heard_right_after_the_turn_that_waited(
    world: World, tmp_path: Path
) -> None:
    stormy = Stormy(world, tmp_path)
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(50 * MINUTE)
    await world.journal.commit(post_message("watcher-1", "m", b"Are you there?", "ada"))
    await world.advance(2 * HOUR)
    results = ["Are you there?" in str(prompt.messages) for prompt in stormy.weather.requests[:2]]
    waited, next_turn = stormy.weather.answered[:2]
    assert results == [False, True]
    assert next_turn - waited < MINUTE


@CALM
async def test_a_halt_ends_what_waits_and_lifting_it_lets_it_wait_on(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, 2 * HOUR)
    stormy.start()
    await world.advance(HOUR)
    await world.journal.commit(halt("agent:watcher", "ada", "h", "stop"))
    await world.advance(MINUTE)
    assert (await stormy.fleet.row("watcher-1")).state == "HALTED"
    await world.journal.commit(resume("agent:watcher", "ada", "r"))
    await world.advance(3 * HOUR)
    assert (await stormy.fleet.row("watcher-1")).state == "SLEEPING"
    assert stormy.weather.answered


async def test_a_wrong_key_waits_for_a_person_and_the_next_start_tries_it(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, 100 * HOUR, WRONG_KEY)
    stormy.start()
    await world.advance(2 * HOUR)
    assert (await stormy.fleet.row("watcher-1")).state == "SLEEPING"
    assert await stormy.list_subjects() == ["watcher needs you: its model cannot be used"]
    row = await stormy.outage()
    assert (row.trouble, row.sentence, row.ended_at) == ("needs_person", str(WRONG_KEY), None)
    (need,) = await stormy.needs()
    assert need.startswith(f"watcher-1 cannot use its model: {WRONG_KEY} Fix the API key")
    await world.restart()
    stormy.weather.storm = None
    stormy.start()
    await world.advance(20 * SECOND)
    assert stormy.weather.answered
    assert (await stormy.outage()).ended_at is not None
    assert await stormy.needs() == []
    assert len(await stormy.list_subjects()) == 2


@CALM
async def test_what_a_person_mends_elsewhere_is_found_without_a_word(stormy: Stormy, world: World) -> None:
    """An account that has credit again needs no restart."""
    stormy.weather.fails(0, 3 * HOUR, WRONG_KEY)
    stormy.start()
    await world.advance(3 * HOUR + 16 * MINUTE)
    assert stormy.weather.answered


@CALM
async def test_switching_it_on_tries_at_once(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, 3 * HOUR, WRONG_KEY)
    stormy.start()
    await world.advance(2 * HOUR)
    stormy.weather.storm = None
    await turn_on(stormy.fleet.app, "watcher")
    await world.advance(SECOND)
    assert stormy.weather.answered


@CALM
async def test_what_is_switched_off_in_an_outage_is_off(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(30 * MINUTE)
    await turn_off(stormy.fleet.app, "watcher")
    await world.advance(2 * HOUR)
    assert (await stormy.fleet.row("watcher-1")).state == "HALTED"
    assert stormy.weather.answered == []


async def test_a_request_that_is_wrong_in_itself_is_no_outage(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, 3 * HOUR, ModelRejected("Rejected: scripted:script answered 400: no", billed=False))
    stormy.start()
    await world.advance(90 * MINUTE)
    row = await stormy.fleet.row("watcher-1")
    assert (row.state, row.terminal_reason) == ("ERROR", "model_error")
    (stopped,) = await stormy.needs()
    assert stopped.startswith("watcher is unhealthy: the last session of watcher brought no new effect")
    assert (
        "watcher-1 ended ERROR (model error). Nothing starts there until a person runs `halter on watcher`." in stopped
    )
    stormy.weather.storm = None
    await turn_on(stormy.fleet.app, "watcher")
    await world.advance(MINUTE)
    assert await stormy.needs() == []


@CALM
async def test_a_document_waits_through_an_outage_and_is_then_worked_on(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path, PRICED)
    folder = office.reviewer(watch(), head=WORK)
    weather = Weather(world, [say("That is done.")] * 10)
    weather.fails(0, 40 * MINUTE)
    for number in range(3):
        office.drop(f"{number}.txt", f"paper {number}")
    office.start(folder, given={"scripted:script": weather})
    await world.advance(20 * MINUTE)
    assert [item.quarantined_at for item in await items(world)] == [None] * 3
    assert all(row.ended_at is None for row in await office.runs())
    assert await subjects(world) == ["clerk: no model answers"]
    await world.advance(40 * MINUTE)
    assert await office.states() == {"COMPLETED": 3}
    assert [item.attempts for item in await items(world)] == [1] * 3
    assert await subjects(world) == ["clerk: no model answers", "clerk: the wait for its model has ended"]


async def items(world: World) -> Sequence[ItemRow]:
    return await world.journal.ask(Query("items_of", ItemRow, {"trigger": "clerk/papers"}))


@CALM
async def test_what_the_journal_says_of_the_wait_is_what_the_loop_goes_by(stormy: Stormy, world: World) -> None:
    stormy.weather.fails(0, HOUR)
    stormy.start()
    await world.advance(HOUR // 2)
    session_parkeds = [
        each.event for each in await stormy.fleet.events("watcher-1") if isinstance(each.event, SessionParked)
    ]
    assert {(each.trouble, each.sentence) for each in session_parkeds} == {("outage", str(AWAY))}


SUMMARIZE = "---\nname: summarize\ndescription: Says it in a sentence.\n---\nSay it in one sentence.\n"


@CALM
async def test_a_skill_that_a_schedule_runs_waits_through_an_outage(world: World, tmp_path: Path) -> None:
    """A step of a playbook asks a model that does not answer; the playbook goes on where it waited."""
    office = Office(world, tmp_path, PRICED, sturdy=True)
    folder = office.reviewer("schedules: [{name: tick, playbook: steps.yaml, every: 10m}]\n", head=WORK)
    (folder / ".agents" / "skills" / "summarize").mkdir(parents=True)
    (folder / ".agents" / "skills" / "summarize" / "SKILL.md").write_text(SUMMARIZE)
    (folder / "steps.yaml").write_text("- {call: run_skill, arguments: {skill: summarize, input: It rains.}}\n")
    weather = Weather(world, [say("Rain.", Usage(100, 50))] * 9)
    weather.fails(10 * MINUTE, 20 * MINUTE)
    office.start(folder, given={"scripted:script": weather})
    await world.advance(29 * MINUTE)
    (row,) = await office.runs()
    assert row.ended_at is None
    assert await subjects(world) == ["clerk: no model answers"]
    assert sum(each.usd for each in await world.journal.ask(Query("all_spends", SpendRow))) == 0
    await world.advance(20 * MINUTE)
    row = (await office.runs())[0]
    assert row.state == "COMPLETED"
    assert await office.calls(row.session) == [("run_skill", "ok")]
    assert await subjects(world) == ["clerk: no model answers", "clerk: the wait for its model has ended"]


OPINION = call("answer", release=True, reason="It says so.")
RELEASES = replace(OPINION, reply=replace(OPINION.reply, usage=Usage(100, 50)))
ONE_JUDGE = "review: {judges: ['scripted:b']}\n"


@CALM
@pytest.mark.parametrize("error", [AWAY, WRONG_KEY], ids=["outage", "wrong key"])
@pytest.mark.parametrize("head", [REVIEW, WORK], ids=["a phase of its own", "before a notice"])
async def test_a_review_waits_through_an_outage_of_its_judge_and_then_happens(
    world: World, tmp_path: Path, head: str, error: ModelError
) -> None:
    office = Office(world, tmp_path, PRICED + '  "scripted:b": {price: {input: 10, output: 10}}\n')
    once = FINDS_AT_ONCE + TELLS + DONE
    folder = office.reviewer(f"{ONE_JUDGE}{watch()}", SCRIPT if head == REVIEW else once, head=head)
    judge = Weather(world, [RELEASES] * 9)
    judge.fails(0, 40 * MINUTE, error)
    office.drop("a.txt", paper(1))
    office.start(folder, given={"scripted:b": judge})
    await world.advance(20 * MINUTE)
    (row,) = await office.runs()
    assert (row.ended_at, await verdicts(office)) == (None, [])
    assert len(await subjects(world)) == 1
    await world.advance(40 * MINUTE)
    assert (await verdicts(office), await office.states()) == (["released"], {"COMPLETED": 1})
    assert judge.answered
    bodies = [
        await read_body(world.journal, stored)
        for stored in await office.events("clerk.papers-1")
        if isinstance(stored.event, NotificationQueued)
    ]
    assert [b"not reviewed" in each for each in bodies] == [False]
    await all_is_well(world)


async def test_a_judge_who_is_away_is_not_waited_for_where_another_one_answers(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path, PRICED + '  "scripted:b": {price: {input: 10, output: 10}}\n')
    two = "review: {judges: ['scripted:b', 'scripted:script']}\n"
    folder = office.reviewer(f"{two}{watch()}")
    judge = Weather(world, [RELEASES] * 9)
    judge.fails(0, 40 * MINUTE)
    office.drop("a.txt", paper(1))
    office.start(folder, given={"scripted:b": judge})
    await world.advance(5 * MINUTE)
    assert (await verdicts(office), await office.states()) == (["released"], {"COMPLETED": 1})
    assert judge.answered == []


async def verdicts(office: Office) -> list[str]:
    events = [stored.event for stored in await office.events("clerk.papers-1")]
    return [event.verdict for event in events if isinstance(event, FindingReviewed)]
