"""Schedules: each of their times starts one session, or says why it does not."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import RunQueued, RunSkipped, RunStarted, TriggerEnded, TriggerMade
from halter.core.ids import trigger_stream
from halter.core.ports import Draft, Write
from halter.core.rows import TriggerRow
from halter.guard.halts import halt, resume
from halter.runtime.switches import turn_off, turn_on
from halter.runtime.trigger_runner import record_unstarted_run, start_run
from halter.testing.world import VIRTUAL_START, World
from tests.story.autonomous import CALM
from tests.story.tasks import Office, all_is_well

pytestmark = pytest.mark.both_dispatchers

HEAD = "model: scripted\nscript: script.yaml\nautonomy: {enabled: false}\n"
DONE = "- {repeat: true, text: That is done.}\n"
SLOW = "- {repeat: true, takes: 5m, text: That is done.}\n"


def schedule(text: str, name: str = "tick") -> str:
    return f"schedules: [{{name: {name}, prompt: Look around., {text}}}]\n"


def start_office(world: World, home: Path, text: str, script: str = DONE, fleet: str = "") -> Office:
    """Write an agent with a schedule, and start it."""
    office = Office(world, home, fleet, sturdy=True)
    office.reviewer(schedule(text), script, head=HEAD)
    office.start(home / "clerk")
    return office


def clock(at: int) -> str:
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%H:%M")


async def list_due_times(office: Office) -> list[str]:
    """List the times at which its runs were due."""
    return [clock(event.due_at) for event in await office.told_of(RunStarted, "tick")]


async def list_start_times(office: Office) -> list[str]:
    """List the times at which its sessions really started."""
    return [clock(row.started_at) for row in await office.runs()]


async def list_skipped(office: Office) -> list[tuple[str, str, int]]:
    """List the times that were skipped: when, why, and how many."""
    return [(clock(event.due_at), event.why, event.count) for event in await office.told_of(RunSkipped, "tick")]


@CALM
@pytest.mark.parametrize(
    ("night", "times"),
    [
        # An hour that is left out fires at the first moment after it.
        ("2026-03-29", ["29T01:00", "30T00:30"]),
        # An hour that comes twice fires the first time, and not again.
        ("2026-10-25", ["25T00:30", "26T01:30"]),
    ],
)
def test_a_cron_keeps_to_the_wall_clock_of_its_zone_when_clocks_are_changed(
    night: str, times: list[str], tmp_path: Path
) -> None:
    async def nights() -> None:
        office = Office(world, tmp_path, sturdy=True)
        office.reviewer(schedule('cron: "30 2 * * *", timezone: Europe/Berlin'), DONE, head=HEAD)
        for _ in range(2):
            process = office.start(tmp_path / "clerk")
            await world.advance(3 * HOUR)
            process.cancel()
            await world.clock.sleep(21 * HOUR)
        rows = await office.runs()
        assert [f"{datetime.fromtimestamp(row.started_at / SECOND, UTC):%dT%H:%M}" for row in rows] == times
        assert await list_skipped(office) == []

    start = round(datetime.fromisoformat(f"{night}T00:00+00:00").timestamp()) * SECOND
    with World(start=start, orderly=True, lease=30 * MINUTE) as world:
        world.run(nights())


async def test_an_interval_starts_a_session_each_time(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 15m")
    await world.advance(HOUR)
    assert await list_due_times(office) == await list_start_times(office) == ["00:15", "00:30", "00:45", "01:00"]
    assert await office.states() == {"COMPLETED": 4}
    assert await list_skipped(office) == []
    await all_is_well(world)


async def test_a_moment_starts_one_session_and_no_more(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "at: 2026-01-01 00:20")
    await world.advance(30 * MINUTE)
    assert await list_due_times(office) == ["00:20"]
    office.start(tmp_path / "clerk")
    await world.advance(10 * MINUTE)
    assert await list_due_times(office) == ["00:20"]


async def test_a_time_that_comes_while_the_run_before_it_works_is_skipped(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 2m", SLOW)
    await world.advance(10 * MINUTE)
    assert await list_due_times(office) == ["00:02", "00:08"]
    assert await list_skipped(office) == [("00:04", "overlap", 1), ("00:06", "overlap", 1), ("00:10", "overlap", 1)]
    (first, *_) = await office.told_of(RunSkipped, "tick")
    assert first.sentence == "clerk.tick-1 is still running."


async def test_a_time_that_comes_while_the_run_before_it_works_can_wait_for_it(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 2m, overlap: queue", SLOW)
    await world.advance(20 * MINUTE)
    assert [clock(event.due_at) for event in await office.told_of(RunQueued, "tick")][:2] == ["00:04", "00:08"]
    assert (await list_start_times(office))[:3] == ["00:02", "00:07", "00:12"]
    assert ("00:06", "overlap", 1) in await list_skipped(office)
    assert max(count_overlaps(await office.runs())) == 1


def count_overlaps(rows: Any) -> list[int]:
    """Count the sessions that were running when each one started."""
    return [
        sum(
            result.started_at <= row.started_at and (result.ended_at is None or result.ended_at > row.started_at)
            for result in rows
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("more", "started", "passed"),
    [
        ("", ["00:10", "02:10", "02:20"], [("02:09", "missed", 11)]),
        (", catch_up: never", ["00:10", "02:20"], [("02:09", "missed", 11), ("02:10", "missed", 1)]),
    ],
)
async def test_what_was_missed_while_nothing_ran_is_made_up_for_once_or_never(
    world: World, tmp_path: Path, more: str, started: list[str], passed: list[tuple[str, str, int]]
) -> None:
    office = Office(world, tmp_path)
    office.reviewer(schedule(f"every: 10m{more}"), DONE, head=HEAD)
    process = office.start(tmp_path / "clerk")
    await world.advance(15 * MINUTE)
    process.cancel()
    await world.clock.sleep(2 * HOUR)
    office.start(tmp_path / "clerk")
    await world.advance(5 * MINUTE + SECOND)
    assert await list_due_times(office) == started
    assert await list_skipped(office) == passed


async def test_nothing_is_started_while_the_agent_is_off_nor_made_up_for_afterwards(
    world: World, tmp_path: Path
) -> None:
    office = start_office(world, tmp_path, "every: 10m")
    await world.advance(15 * MINUTE)
    await turn_off(office.app, "clerk")
    await world.advance(HOUR)
    await turn_on(office.app, "clerk")
    await world.advance(10 * MINUTE)
    assert await list_due_times(office) == ["00:10", "01:20"]
    assert await list_skipped(office) == [("01:10", "off", 6)]


async def test_a_run_that_waited_when_the_agent_was_switched_off_is_not_made_up_for(
    world: World, tmp_path: Path
) -> None:
    office = start_office(world, tmp_path, "every: 2m, overlap: queue", SLOW)
    await world.advance(5 * MINUTE)
    await turn_off(office.app, "clerk")
    await world.advance(30 * SECOND)
    await turn_on(office.app, "clerk")
    await world.advance(2 * MINUTE)
    assert await list_due_times(office) == ["00:02", "00:06"]
    assert await list_skipped(office) == [("00:04", "off", 1)]
    assert (await office.trigger("tick")).queued_at is None


@pytest.mark.parametrize("scope", ["trigger:clerk/tick", "agent:clerk", "fleet"])
async def test_a_time_that_comes_during_a_halt_says_who_halted_it(world: World, tmp_path: Path, scope: str) -> None:
    office = start_office(world, tmp_path, "every: 10m")
    await world.advance(5 * MINUTE)
    await world.store.commit(halt(scope, "ada", "stop"))
    await world.advance(20 * MINUTE)
    await world.store.commit(resume(scope, "ada", "go on"))
    await world.advance(10 * MINUTE)
    assert await list_skipped(office) == [("00:10", "halted", 1), ("00:20", "halted", 1)]
    (first, _) = await office.told_of(RunSkipped, "tick")
    assert first.sentence == f"{scope} was halted by ada. Run: halter resume {scope}"
    assert await list_due_times(office) == ["00:30"]


@pytest.mark.parametrize("halted", ["tick", "tock"])
async def test_a_halt_of_one_trigger_lets_the_others_of_its_agent_run(
    world: World, tmp_path: Path, halted: str
) -> None:
    office = Office(world, tmp_path, sturdy=True)
    two = "schedules:\n" + "".join(f"  - {{name: {name}, prompt: Look., every: 10m}}\n" for name in ("tick", "tock"))
    office.reviewer(two, DONE, head=HEAD)
    office.start(tmp_path / "clerk")
    await world.store.commit(halt(f"trigger:clerk/{halted}", "ada", "stop"))
    await world.advance(25 * MINUTE)
    values = {name: len(await office.told_of(RunStarted, name)) for name in ("tick", "tock")}
    assert values == {"tick": 2, "tock": 2} | {halted: 0}


async def test_a_run_never_starts_sooner_after_another_than_the_file_says(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, 'cron: "10,20,30,40,50 * * * *", min_interval: 25m')
    await world.advance(HOUR)
    assert await list_due_times(office) == ["00:10", "00:40"]
    assert {why for _, why, _ in await list_skipped(office)} == {"too_soon"}


async def test_chance_delays_each_run_by_another_time_within_bounds(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 10m, jitter: 5m")
    await world.advance(80 * MINUTE)
    first = {event.due_at: row.started_at for event, row in await list_started_runs(office)}
    late = [result - due for due, result in first.items()]
    assert len(late) >= 7
    assert all(0 <= each <= 5 * MINUTE + SECOND for each in late)
    assert len(set(late)) > 3


async def list_started_runs(office: Office) -> list[tuple[Any, Any]]:
    rows = {row.session: row for row in await office.runs()}
    return [(event, rows[event.session]) for event in await office.told_of(RunStarted, "tick")]


async def test_a_restart_in_the_middle_of_the_delay_changes_nothing_of_it(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path)
    office.reviewer(schedule("at: 2026-01-01 00:30, jitter: 20m"), DONE, head=HEAD)
    process = office.start(tmp_path / "clerk")
    for _ in range(25):
        await world.advance(2 * MINUTE)
        process.cancel()
        process = office.start(tmp_path / "clerk")
    await world.advance(5 * MINUTE)
    ((event, row),) = await list_started_runs(office)
    assert clock(event.due_at) == "00:30"

    assert 30 * MINUTE <= row.started_at - VIRTUAL_START <= 50 * MINUTE + SECOND


async def test_a_heartbeat_beats_in_its_hours_only(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 30m, active_hours: {start: '01:15', end: '02:30', timezone: UTC}")
    await world.advance(3 * HOUR)
    assert await list_due_times(office) == ["01:30", "02:00"]
    passed = await list_skipped(office)
    assert {why for _, why, _ in passed} == {"active_hours"}
    assert [time for time, _, _ in passed] == ["00:30", "01:00", "02:30", "03:00"]


@CALM
async def test_a_time_for_which_no_money_is_left_says_so(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path, 'models: {"scripted:script": {price: {input: 0, output: 10}}}\n')
    script = "- {repeat: true, text: Done., usage: {input_tokens: 10, output_tokens: 500}}\n"
    office.reviewer(
        schedule("every: 10m, max_cost_usd_per_hour: 0.01"), script, head=f"{HEAD}limits: {{max_output_tokens: 500}}\n"
    )
    office.start(tmp_path / "clerk")
    await world.advance(70 * MINUTE)
    assert await list_due_times(office) == ["00:10", "00:20", "01:00", "01:10"]
    assert await list_skipped(office) == [(time, "cost_cap_reached", 1) for time in ("00:30", "00:40", "00:50")]
    (first, *_) = await office.told_of(RunSkipped, "tick")
    assert first.sentence == "The cap of trigger:clerk/tick hour/2026-01-01T00, $0.01, is spent or held."


@CALM
async def test_a_schedule_that_changes_in_the_file_keeps_its_new_times(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path)
    office.reviewer(schedule("every: 10m"), DONE, head=HEAD)
    process = office.start(tmp_path / "clerk")
    await world.advance(25 * MINUTE)
    process.cancel()
    office.reviewer(schedule("every: 30m"), DONE, head=HEAD)
    process = office.start(tmp_path / "clerk")
    await world.advance(65 * MINUTE)
    assert await list_due_times(office) == ["00:10", "00:20", "00:55", "01:25"]
    assert len(await office.told_of(TriggerMade, "tick")) == 2
    process.cancel()
    office.reviewer(schedule("every: 10m", "other"), DONE, head=HEAD)
    office.start(tmp_path / "clerk")
    await world.advance(HOUR)
    assert len(await list_due_times(office)) == 4
    (event,) = await office.told_of(TriggerEnded, "tick")
    assert event.reason == "removed from the agent's file"
    assert (await office.trigger("tick")).ended_at is not None


COUNTS = '''
from halter import tool


@tool(level="SAFE", effect="read")
async def count(start: int) -> str:
    """Count on."""
    return str(start + 1)
'''


@pytest.mark.parametrize("file", ["night.yaml", "night.yml"])
async def test_a_schedule_can_play_a_playbook_without_a_model(world: World, tmp_path: Path, file: str) -> None:
    office = Office(world, tmp_path)
    text = f"schedules: [{{name: tick, playbook: {file}, inputs: {{start: 3}}, every: 10m}}]\n"
    folder = office.reviewer(text, DONE, head=HEAD)
    (folder / file).write_text("- {call: count, arguments: {start: '${inputs.start}'}, as: one}\n")
    (folder / "tools.py").write_text(COUNTS)
    office.trust(folder)
    office.start(folder)
    await world.advance(25 * MINUTE)
    assert await office.states() == {"COMPLETED": 2}
    assert await office.calls("clerk.tick-1") == [("count", "ok")]
    assert office.prompts("clerk") == []
    await all_is_well(world)


@pytest.mark.parametrize("seed", range(4))
def test_two_processes_on_one_store_start_each_time_once(seed: int, tmp_path: Path) -> None:
    async def both() -> None:
        office, other = Office(world, tmp_path), Office(world, tmp_path)
        script = "- {repeat: true, takes: 30s, text: Done.}\n"
        office.reviewer(schedule("every: 2m, overlap: queue"), script, head=HEAD)
        office.start(tmp_path / "clerk")
        other.start(tmp_path / "clerk")
        await world.advance(11 * MINUTE)
        assert await list_due_times(office) == ["00:02", "00:04", "00:06", "00:08", "00:10"]
        assert await list_skipped(office) == []
        assert await office.states() == {"COMPLETED": 5}

    with World(seed) as world:
        world.run(both())


async def test_of_two_runs_that_are_started_at_the_same_moment_one_is(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 10m")
    await world.advance(MINUTE)
    assert office.up is not None
    context = office.up.agents["clerk"].context
    row, (tick,) = await office.trigger("tick"), context.definition.tasks.schedules
    writes = [
        await start_run(context, row, tick, RunStarted(trigger=row.trigger, session="", cause="person", by=who), who)
        for who in ("ada", "bob")
    ]
    committeds = [await world.journal.commit(write) for write in writes]
    assert [bool(each.events) for each in committeds] == [True, False]
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}


async def test_a_time_that_one_process_has_dealt_with_is_not_dealt_with_by_a_slower_one(
    world: World, tmp_path: Path
) -> None:
    office = start_office(world, tmp_path, "every: 10m, overlap: queue")
    await world.advance(11 * MINUTE)
    (run,) = await office.told_of(RunStarted, "tick")
    assert isinstance(run, RunStarted)
    late = [
        record_unstarted_run("queue/late", RunQueued(trigger="clerk/tick", due_at=run.due_at)),
        record_unstarted_run("skip/late", RunSkipped(trigger="clerk/tick", why="overlap", due_at=run.due_at)),
    ]
    assert [(await world.store.commit(write)).events for write in late] == [(), ()]
    await world.advance(20 * MINUTE)
    assert await list_due_times(office) == ["00:10", "00:20", "00:30"]
    assert await list_skipped(office) == []


async def test_a_time_that_was_skipped_is_not_started_by_a_slower_process(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 10m")
    await world.advance(MINUTE)
    row, due = await office.trigger("tick"), world.now + 9 * MINUTE
    skip = RunSkipped(trigger="clerk/tick", why="cost_cap_reached", due_at=due)
    assert (await world.store.commit(record_unstarted_run("skip/first", skip))).events
    assert office.up is not None
    context = office.up.agents["clerk"].context
    run = RunStarted(trigger="clerk/tick", session="", cause="schedule", due_at=due)
    trigger = context.definition.tasks.triggers()[0]
    late = await start_run(context, row, trigger, run, f"tick/{due}")
    assert (await world.store.commit(late)).events == ()
    assert await office.runs() == []


async def test_a_trigger_that_cannot_be_read_stops_no_other_one_of_its_agent(world: World, tmp_path: Path) -> None:
    office = start_office(world, tmp_path, "every: 10m")
    event = TriggerMade(trigger="clerk/a-later-one", agent="clerk", type="schedule", by="ada", digest="x")
    drafts = [Draft(event, b'{"type": "schedule", "spec": {"name": "a-later-one", "every": "sometimes"}}')]
    stream, rows = trigger_stream("clerk/a-later-one"), [(TriggerRow, "clerk/a-later-one")]
    await world.store.commit(Write(stream, "made", lambda _: drafts, rows))
    await world.advance(35 * MINUTE)
    assert await list_due_times(office) == ["00:10", "00:20", "00:30"]
    (text,) = [sentence for _, sentence in office.told if "a-later-one" in sentence]
    assert text.startswith("clerk/a-later-one failed: ValidationError: ")


async def test_of_two_processes_with_different_files_the_one_that_started_last_is_right(
    world: World, tmp_path: Path
) -> None:
    office = start_office(world, tmp_path, "every: 20m")
    await world.advance(MINUTE)
    other = Office(world, tmp_path, sturdy=True)
    other.reviewer(schedule("every: 10m"), DONE, head=HEAD)
    other.start(tmp_path / "clerk")
    await world.advance(HOUR)
    assert len(await office.told_of(TriggerMade, "tick")) == 2
    assert await list_due_times(office) == ["00:11", "00:21", "00:31", "00:41", "00:51", "01:01"]
