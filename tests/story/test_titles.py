"""What sessions are called, what state they are shown in, and how a pipe gets it."""

from pathlib import Path

import pytest
from library_bench import PRICED, Bench
from loops import says

from halter.core.events import ItemSeen, RunStarted, SessionStarted
from halter.core.ids import SessionId, make_worker_id, trigger_stream
from halter.core.ports import Draft, Query, Write
from halter.core.project import rows_of_event
from halter.core.rows import SessionRow
from halter.dashboard.labels import label_session
from halter.operations import forks, queries, top
from halter.operations.actor import Actor, Principal
from halter.present.sheet import Listing
from halter.present.tables import build_sessions_sheet
from halter.runtime.runtime import open_runtime
from halter.settings import read_settings
from halter.spec.playbook import Playbook, Step
from halter.state import lifecycle
from halter.tasks.playbooks import Task, encode_task
from tests.story.test_cli_talk import Person


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


PLAYBOOK = Playbook((Step("look", b'{"at": "x"}'),), "playbooks/tidy.yaml", ("folder",))


@pytest.mark.parametrize(
    ("event", "task", "title"),
    [
        (
            SessionStarted(session="s-1", agent="desk", kind="task", started_by="ada"),
            encode_task(Task(PLAYBOOK, {"folder": "cache\nand more", "days": 3})),
            "playbooks/tidy.yaml: folder cache and more, days 3",
        ),
        (
            SessionStarted(session="s-1", agent="desk", kind="task", started_by="ada"),
            encode_task(Task(PLAYBOOK)),
            "playbooks/tidy.yaml",
        ),
        (
            SessionStarted(
                session="s-1",
                agent="desk",
                kind="autonomous",
                started_by="",
                follows="desk-4",
                because="Its cap ended it.",
            ),
            b"You continue where session desk-4 stopped. Its cap ended it. It has no final text.",
            "desk continues desk-4: Its cap ended it.",
        ),
        (
            SessionStarted(session="s-1", agent="desk", kind="chat", started_by="ada"),
            b'{"playbook": "is only a word of mine"}\nSecond line.',
            '{"playbook": "is only a word of mine"}',
        ),
    ],
)
async def test_a_title_is_for_people(tmp_path: Path, event: SessionStarted, task: bytes, title: str) -> None:
    async with open_runtime(read_settings({"USER": "ada"}, tmp_path, "memory:")) as app:
        await app.store.commit(lifecycle.start_session(event, task))
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": "s-1"}))
        assert await queries.session_title(Actor(app, Principal("ada", "viewer")), row) == title


async def test_a_run_of_a_watch_without_a_prompt_is_called_by_its_document(tmp_path: Path) -> None:
    started = SessionStarted(session="s-1", agent="desk", kind="task", started_by="trigger:desk/in", trigger="desk/in")
    seen = ItemSeen(trigger="desk/in", item="d1", name="bill 7.pdf")
    ran = RunStarted(trigger="desk/in", session="s-1", cause="watch", item="d1")
    async with open_runtime(read_settings({"USER": "ada"}, tmp_path, "memory:")) as app:
        await app.store.commit(lifecycle.start_session(started))
        for event in (seen, ran):
            write = Write(trigger_stream("desk/in"), event.KIND, lambda _, it=event: [Draft(it)], rows_of_event(event))
            await app.store.commit(write)
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": "s-1"}))
        assert await queries.session_title(Actor(app, Principal("ada", "viewer")), row) == "desk: bill 7.pdf"


def show_state(row: SessionRow) -> tuple[str, str]:
    """Return the state in the terminal's table and on the dashboard."""
    (listing,) = build_sessions_sheet([row], 0)
    assert isinstance(listing, Listing)
    return listing.rows[0][2], label_session(row).text


async def list_states(actor: Actor, session: str) -> set[str]:
    """List the states in which JSON shows a session: as one, in a list, in `top`, and in the report's counts."""
    (listed,) = [row for row in await queries.sessions(actor) if row.session == session]
    (line,) = [line for line in (await top.top(actor)).sessions if line.session == session]
    (counted,) = [state for agent in (await queries.report(actor)).agents for state in agent.under_way]
    return {(await queries.session(actor, session)).state, listed.state, line.state, counted}


async def list_in_state(actor: Actor, state: str) -> list[str]:
    return [row.session for row in await queries.sessions(actor, state=state)]


async def test_a_fork_that_nobody_runs_is_not_running(bench: Bench) -> None:
    agent = bench.agent(says("Hello."), says("Again."), fleet=PRICED)
    first = await agent.run("Hello.")
    async with open_runtime(read_settings({}, bench.folder, str(bench.file)), bench.clock) as app:
        ada = Actor(app, Principal("ada", "operator"))
        forked = await forks.fork(ada, first.session, text="And now?")
        assert show_state(await ada.session(forked.subject)) == ("NOT RUNNING", "Not running")
        assert await list_states(ada, forked.subject) == {"NOT_RUNNING"}
        assert await list_in_state(ada, "not running") == [forked.subject]
        assert await list_in_state(ada, "running") == []
        (lease,) = await app.store.claim(make_worker_id("test", app.ids), 1, SessionId(forked.subject))
        assert show_state(await ada.session(forked.subject)) == ("RUNNING", "Running")
        assert await list_states(ada, forked.subject) == {"RUNNING"}
        assert await list_in_state(ada, "not running") == []
        await app.store.release(lease)
    await agent.resume(forked.subject)
    async with open_runtime(read_settings({}, bench.folder, str(bench.file)), bench.clock) as app:
        ada = Actor(app, Principal("ada", "operator"))
        assert show_state(await ada.session(forked.subject))[0] == "COMPLETED"


@pytest.mark.parametrize("columns", ["", "60"])
def test_a_pipe_gets_every_row_on_one_line_unless_it_asks_for_columns(tmp_path: Path, columns: str) -> None:
    ada = Person(tmp_path)
    del ada.environ["COLUMNS"]
    ada.environ |= {"COLUMNS": columns} if columns else {}
    ada.writes('- calls: [{tool: wipe, arguments: {path: "' + "a long name " * 20 + '"}}]\n- text: Done.\n')
    with ada.begins("run", str(ada.agent), "Tidy up.") as program:
        while not (decisions := ada.looks("inbox")):
            pass
        output, command = ada.types("inbox")[1], f"halter approve {decisions[0]['decision']}"
        doctor = ada.types("doctor", str(ada.agent))[1]
        program.kill()
    if columns:
        assert max(map(len, doctor.splitlines())) <= int(columns)
    else:
        assert command in output
        assert sum(line.startswith("│") for line in doctor.splitlines()) == doctor.count("│") // 4
