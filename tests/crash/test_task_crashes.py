"""A review from its document to its notification, with a crash at any commit of it.

It walks all five phases, uses a skill and a playbook, finds something, is judged, proposes something and tells people.
Whatever crashes, it goes on: each phase has its turn once, nothing is left behind twice, and the money adds up.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import SECOND
from halter.core.events import PhaseEntered, TurnStarted
from halter.core.ports import Query
from halter.core.rows import DecisionRow, FindingRow, NotificationRow, PrecedentRow, SessionRow
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.story.tasks import (
    DONE,
    FINDS,
    JUDGES,
    NOTIFIES,
    PRICED,
    READS,
    REVIEW,
    UNBRAKED,
    USED,
    Office,
    all_is_well,
    paper,
    watch,
)

ANALYSES = f"""
- when: "begins: analysis"
  repeat: true
  {USED}
  calls:
    - {{tool: run_skill, arguments: {{skill: check, input: By this skill.}}}}
    - {{tool: run_playbook, arguments: {{playbook: steps, inputs: {{name: 0.txt}}}}}}
    - {{tool: propose_precedent, arguments: {{kind: liability, summary: No limit is asked for.}}}}
- when: By this skill.
  repeat: true
  {USED}
  text: By the skill.
"""
SKILL = "---\nname: check\ndescription: Checks.\n---\nCheck it.\n"
STEPS = """
- {call: retrieve_chunks, arguments: {file: "${inputs.name}"}, as: text}
- {call: retrieve_chunks, arguments: {query: limit}}
"""
EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])


def make_office(home: Path, number: int, world: World, *, takes: str = "0s") -> Office:
    home = home / f"{number}"
    home.mkdir()
    office = Office(world, home, PRICED)
    script = (READS + ANALYSES + FINDS + JUDGES + NOTIFIES + DONE).replace(USED, f"{USED}\n  takes: {takes}")
    folder = office.reviewer(watch("debounce: 0s"), script, head=REVIEW + UNBRAKED)
    (folder / ".agents" / "skills" / "check").mkdir(parents=True)
    (folder / ".agents" / "skills" / "check" / "SKILL.md").write_text(SKILL)
    (folder / "playbooks").mkdir()
    (folder / "playbooks" / "steps.yaml").write_text(STEPS)
    office.drop("0.txt", paper(0))
    return office


def everywhere(home: Path, every: int) -> Any:
    """Review a document again and again, each time with another crash."""
    offices: list[Office] = []
    numbers = itertools.count()

    async def program(world: World) -> None:
        office = offices[-1]
        process = office.start(office.home / "clerk")
        while not (rows := await office.runs()) or rows[-1].ended_at is None:
            await world.clock.sleep(SECOND)
        process.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash, orderly=True)
        offices.append(make_office(home, next(numbers), world))
        return world

    for world in crash_everywhere(program, new_world, every=every):
        yield world, offices[-1]


async def check_outcome(world: World, office: Office) -> None:
    """Check what holds after every crash."""
    (row,) = await world.journal.ask(Query("all_sessions", SessionRow))
    assert (row.state, row.terminal_reason) == ("COMPLETED", "completed")
    events = [stored.event for stored in await office.events(row.session)]
    entered = [event for event in events if isinstance(event, PhaseEntered)]
    assert [(event.number, event.phase) for event in entered] == list(
        enumerate(["intake", "analysis", "drafting", "ethics_review", "delivery"])
    )
    assert [event.turn for event in events if isinstance(event, TurnStarted)] == [1, 2, 3, 4]
    for name, kind in (("findings_of", FindingRow), ("all_precedents", PrecedentRow), ("all_decisions", DecisionRow)):
        assert len(await world.journal.ask(Query(name, kind, {"session": row.session}))) == 1, name
    (finding,) = await world.journal.ask(Query("findings_of", FindingRow, {"session": row.session}))
    assert (finding.support, finding.review) == ("supported", "released")
    (precedent,) = await world.journal.ask(Query("all_precedents", PrecedentRow))
    assert precedent.observed_count == 1
    assert len(await world.journal.ask(Query("all_notifications", NotificationRow))) == 1
    calls = Counter(tool for tool, outcome in await office.calls(row.session) if outcome == "ok")
    assert calls == {
        "retrieve_chunks": 3,
        "run_skill": 1,
        "run_playbook": 1,
        "propose_precedent": 1,
        "emit_finding": 1,
        "notify": 1,
    }
    (item,) = await office.items()
    assert (item.attempts, item.session) == (1, row.session)
    await all_is_well(world)


@EVERY
def test_a_review_resumes_after_a_crash_at_any_commit(every: int, tmp_path: Path) -> None:
    lives = 0
    for world, office in everywhere(tmp_path, every):
        world.run(check_outcome(world, office))
        lives += 1
    assert lives * every > 90
