"""Proposals: what a session proposes counts once for each time that it was met, and a person decides what is kept."""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from halter.core.clock import MINUTE
from halter.core.events import ContextGiven, DecisionAsked, PrecedentProposed, ProposalDecided
from halter.core.events.tasks import ProposalVerdict
from halter.core.ids import FLEET, SessionId, make_worker_id
from halter.core.ports import Draft, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import DecisionRow, MemoryRow, PrecedentRow
from halter.dispatch.heartbeat import renew_leases
from halter.guard.approvals import list_pending_decisions
from halter.guard.prepare import Call
from halter.journal.verify import verify_store
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.runtime import open_runtime
from halter.runtime.session_builder import build_live_session
from halter.runtime.session_origin import read_session_row
from halter.runtime.session_runner import run_agent_tool
from halter.runtime.session_start import begin_session
from halter.settings import Settings, read_settings
from halter.testing.world import World
from halter_drills.children import Pipe, children
from tests.story.tasks import ALL_VERBS, WORK, Office, all_is_well, watch

AGENT: Final = "name: clerk\nmodel: scripted\nscript: script.yaml\n" + ALL_VERBS + watch()
CASE: Final = {"kind": "Liability", "summary": "A supplier asks for liability without a limit."}
EACH: Final = 25


def make_settings(home: Path, url: str) -> Settings:
    return read_settings({"USER": "ada"}, home, url)


def propose_when_told(pipe: Pipe, home: Path, url: str, number: int) -> None:
    """Propose the same precedent in many sessions at the same time, after a message from the parent process."""
    pipe.send("ready")
    pipe.recv()
    pipe.send(asyncio.run(_propose_all(home, url, number)))


async def _propose_all(home: Path, url: str, number: int) -> list[str]:
    async with (
        open_runtime(make_settings(home, url)) as app,
        open_folder_agent(app, home / "clerk", make_worker_id(f"process-{number}", app.ids)) as context,
    ):
        worker = context.worker
        async with renew_leases(context.store, app.clock, worker):
            names = [await begin_session(context, "Look.", "task", f"s-{number}-{each}") for each in range(EACH)]
            return await asyncio.gather(*(_propose(context, session) for session in names))


async def _propose(context: AgentRuntime, session: SessionId) -> str:
    (lease,) = await context.store.claim(context.worker, 1, session)
    live_session = await build_live_session(
        context, await read_session_row(context, session), lease, call_agent=run_agent_tool
    )
    await live_session.runtime.resume()
    case = {**CASE, "summary": f"  {CASE['summary'].upper()} "} if session.endswith("7") else CASE
    answer = await live_session.runtime.call(Call(f"{session}.c1", "propose_precedent", msgspec.json.encode(case)))
    await live_session.runtime.end("COMPLETED", "completed")
    return answer.outcome


STORES: Final = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.mark.parametrize("kind", STORES)
def test_a_hundred_proposals_of_one_precedent_at_once_are_one_row_and_one_question(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "store.db") if kind == "sqlite" else request.getfixturevalue("postgres_schema_url")
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk" / "agent.yaml").write_text(AGENT)
    (tmp_path / "clerk" / "script.yaml").write_text("- {text: Done.}\n")
    asyncio.run(check_store(tmp_path, url, 0))
    with children(__name__) as started:
        four = [started.start(propose_when_told, tmp_path, url, number) for number in range(4)]
        assert [child.receive() for child in four] == ["ready"] * 4
        for child in four:
            child.send("go")
        assert [child.receive() for child in four] == [["ok"] * EACH] * 4
    asyncio.run(check_store(tmp_path, url, 4 * EACH))


async def check_store(home: Path, url: str, observed: int) -> None:
    async with open_runtime(make_settings(home, url)) as app:
        rows = await app.store.ask(Query("all_precedents", PrecedentRow))
        assert [row.observed_count for row in rows] == ([observed] if observed else [])
        pending_decisions = await list_pending_decisions(app.store)
        assert [(each.about, each.subject) for each in pending_decisions] == [
            ("proposal", row.precedent) for row in rows
        ]
        questions = await app.store.read(FLEET, limit=1000)
        assert sum(isinstance(question.event, DecisionAsked) for question in questions) == len(rows)
        assert (await verify_store(app.store)).findings == ()


PROPOSES = """
- when: The document is
  calls:
    - {tool: propose_precedent, arguments: {kind: liability, summary: No limit is asked for.}}
    - {tool: propose_memory, arguments: {text: The company signs nothing without a limit.}}
- {repeat: true, text: That is done.}
"""


async def decide_proposal(world: World, result: Any, proposal: str, status: ProposalVerdict) -> None:
    """Let a person say what becomes of a proposal."""
    event = ProposalDecided(proposal=proposal, about=result, status=status, by="ada")
    rows = rows_of_event(event)
    await world.journal.commit(Write(FLEET, f"{proposal}/{status}", lambda _: [Draft(event)], rows))


async def propose_in_first_session(world: World, home: Path) -> tuple[Office, str, str]:
    """Let a first session propose something."""
    office = Office(world, home)
    office.reviewer(watch(), PROPOSES, head=WORK)
    office.drop("a.txt", "the first words")
    office.start(home / "clerk")
    await world.advance(MINUTE)
    (precedent,) = await world.journal.ask(Query("all_precedents", PrecedentRow))
    (memory,) = await world.journal.ask(Query("all_memories", MemoryRow))
    return office, precedent.precedent, memory.memory


async def run_second_session(world: World, office: Office) -> tuple[str, list[ContextGiven]]:
    """Run a second session; return its system prompt and the contexts that its journal records."""
    office.drop("b.txt", "other words")
    before = len(office.prompts("clerk"))
    await world.advance(MINUTE)
    prompt = office.prompts("clerk")[before]
    output = "\n".join([prompt.system, *(part.text for message in prompt.messages for part in message.parts)])
    stored = await office.events("clerk.papers-2")
    return output, [each.event for each in stored if isinstance(each.event, ContextGiven)]


async def test_what_a_person_kept_is_shown_to_the_next_session_and_named_in_its_journal(
    world: World, tmp_path: Path
) -> None:
    office, precedent, memory = await propose_in_first_session(world, tmp_path)
    await decide_proposal(world, "precedent", precedent, "kept")
    await decide_proposal(world, "memory", memory, "kept")
    text, events = await run_second_session(world, office)
    assert f"liability: No limit is asked for. (seen 1 times, {precedent})" in text
    assert f"The company signs nothing without a limit. ({memory})" in text
    assert events == [ContextGiven(memories=(memory,), precedents=(precedent,))]
    await all_is_well(world)


@pytest.mark.parametrize("status", ["dismissed", ""])
async def test_what_nobody_kept_is_not_shown_to_anybody(world: World, tmp_path: Path, status: Any) -> None:
    office, precedent, memory = await propose_in_first_session(world, tmp_path)
    if status:
        await decide_proposal(world, "precedent", precedent, status)
        await decide_proposal(world, "memory", memory, status)
    text, events = await run_second_session(world, office)
    assert "No limit" not in text
    assert "signs nothing" not in text
    assert events == []


async def test_a_precedent_that_was_decided_on_counts_up_and_asks_nobody_again(world: World, tmp_path: Path) -> None:
    office = Office(world, tmp_path)
    script = PROPOSES.replace("- when: The document is\n", "- when: The document is\n  repeat: true\n")
    office.reviewer(watch(), script, head=WORK)
    office.drop("a.txt", "the first words")
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    (row,) = await world.journal.ask(Query("all_precedents", PrecedentRow))
    await decide_proposal(world, "precedent", row.precedent, "dismissed")
    for name in "bcd":
        office.drop(f"{name}.txt", f"the words of {name}")
    await world.advance(MINUTE)
    (precedent_row,) = await world.journal.ask(Query("all_precedents", PrecedentRow))
    assert (precedent_row.observed_count, precedent_row.status, precedent_row.session) == (4, "dismissed", row.session)
    assert len(await world.journal.ask(Query("all_decisions", DecisionRow))) == 2
    assert sum(isinstance(stored.event, PrecedentProposed) for stored in world.history) == 4
    assert sum(isinstance(stored.event, DecisionAsked) for stored in world.history) == 2
