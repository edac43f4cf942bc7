"""The audit says who or what triggered a call, and why a call failed."""

import asyncio
import json
from pathlib import Path

import pytest

from halter.core.events import CallRefused, CallSettled, CallStarted, SessionStarted, TriggerMade
from halter.core.ids import SessionId, WorkerId, session_stream, trigger_stream
from halter.core.ports import Draft, Write
from halter.core.project import rows_of_event
from halter.core.rows import AuditRow
from halter.core.vocabulary import Event
from halter.operations import queries
from halter.operations.actor import Actor, Principal
from halter.operations.queries import AuditFilter
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from halter.state.audit import describe_starter
from tests.story.test_cli_filters import environment, types

NIGHTLY = {"trigger": "desk/nightly", "origin": "config", "started_by": "trigger:desk/nightly"}
STARTS = {
    "person": {"started_by": "ada"},
    "token": {"started_by": "ci-token"},
    "key": {"started_by": "key:laptop", "kind": "proxied"},
    "scheduled": NIGHTLY,
    "child": {"started_by": "root", "parent": "scheduled", "agent": "clerk", "origin": "agent"},
    "grandchild": {"started_by": "root", "parent": "child", "agent": "typist", "origin": "agent"},
    "by-hand": {**NIGHTLY, "started_by": "bob", "origin": "person"},
    "dropped": {"trigger": "desk/hook", "origin": "config", "started_by": "trigger:desk/hook"},
    "renewed": {"started_by": "ada", "kind": "autonomous", "follows": "desk-1", "because": "Its cap ended it."},
}


async def commit(app: Runtime, session: str, key: str, event: Event, call: str) -> None:
    (lease,) = await app.store.claim(WorkerId(session), 1, SessionId(session))
    reads = [(AuditRow, call), *rows_of_event(event)]
    drafts = [Draft(event, b'{"to": "bob"}')]
    await app.store.commit(Write(session_stream(lease.session), key, lambda _: drafts, reads, lease=lease))
    await app.store.release(lease)


async def fill_store(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        made = TriggerMade(trigger="desk/nightly", agent="desk", type="schedule", by="ann", digest="d")
        await app.store.commit(Write(trigger_stream(made.trigger), "1", lambda _: [Draft(made)], rows_of_event(made)))
        for session, facts in STARTS.items():
            event = SessionStarted(**{"session": session, "agent": "desk", "kind": "task", **facts})
            await app.store.commit(lifecycle.start_session(event))
            call = f"{session}.1"
            await commit(app, session, "1", CallStarted(call=call, tool="send", audit="arguments"), call)
            settled = CallSettled(call=call, outcome="error", error="No such person: bob.\nAsk ann.", audited=True)
            await commit(app, session, "2", settled, call)
        refused = CallRefused(call="person.2", tool="send", outcome="rate_limited", sentence="Too often.")
        await commit(app, "person", "3", refused, "person.2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    asyncio.run(fill_store(tmp_path))
    return tmp_path


WHO = {
    "person": ("ada", "", "", "", ""),
    "token": ("ci-token", "", "", "", ""),
    "key": ("key:laptop", "", "", "", ""),
    "scheduled": ("trigger:desk/nightly", "desk/nightly", "schedule", "", ""),
    "child": ("trigger:desk/nightly", "desk/nightly", "schedule", "scheduled", "desk"),
    "grandchild": ("trigger:desk/nightly", "desk/nightly", "schedule", "child", "clerk"),
    "by-hand": ("bob", "desk/nightly", "schedule", "", ""),
    "dropped": ("trigger:desk/hook", "desk/hook", "", "", ""),
    "renewed": ("ada", "", "", "", ""),
}
TOLD = {
    "person": "ada",
    "token": "ci-token",
    "key": "key laptop",
    "scheduled": "schedule nightly",
    "child": "schedule nightly, through desk",
    "grandchild": "schedule nightly, through clerk",
    "by-hand": "bob (schedule nightly)",
    "dropped": "trigger hook",
    "renewed": "ada",
}


@pytest.mark.parametrize("command", ["audit --json", "audit --export -", "audit --export - --cursor sink"])
def test_each_call_in_the_audit_names_who_or_what_triggered_it(home: Path, command: str) -> None:
    output = types(home, command).stdout
    rows = json.loads(output) if command.endswith("--json") else [json.loads(line) for line in output.splitlines()]
    who = {
        row["session"]: tuple(row[name] for name in ("started_by", "trigger", "trigger_type", "parent", "parent_agent"))
        for row in rows
    }
    assert who == WHO


def test_a_failed_or_refused_call_has_its_error_in_the_audit(home: Path) -> None:
    rows = json.loads(types(home, "audit --json").stdout)
    assert {(row["call"], row["error"]) for row in rows if row["session"] == "person"} == {
        ("person.1", "No such person: bob. Ask ann."),
        ("person.2", "Too often."),
    }
    table = " ".join(types(home, "audit --outcome rate_limited").output.split())
    assert "Too often." in table
    assert "started by" in table


async def test_a_person_reads_and_finds_who_triggered_a_call(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        actor = Actor(app, Principal("bea", "viewer"))
        entries = await queries.audit_page(actor, tool="send")
        assert {entry.session: describe_starter(entry) for entry in entries} == TOLD
        assert [entry.call for entry in await queries.audit_page(actor, text="KEY:LAPTOP")] == ["key.1"]
        assert [entry.call for entry in await queries.audit_page(actor, text="too often")] == ["person.2"]
        lines = [entry async for entry in queries.audit_lines(actor, **AuditFilter(session="child").to_columns())]
        assert [(entry.parent, entry.parent_agent) for entry in lines] == [("scheduled", "desk")]
