"""What the command line can do over the journal and with agents' folders can be done over HTTP, by those who may."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from halter.core.events import SessionStarted, WakePosted
from halter.core.ids import inbox_stream, session_stream
from halter.operations.actor import ROLES
from halter.runtime.feed import watch_growth
from tests.server.conftest import House

AGENT = """\
name: mine
model: scripted
script: replies.yaml
schedules: [{name: daily, cron: "0 9 * * *", prompt: Look around.}]
"""
REPLIES = "- text: Done.\n" * 9

DEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "/journal/verify": ("admin", {}),
    "/journal/erase": ("admin", {"confirmed": True, "sessions": ["mine-1"]}),
    "/agents/mine/messages": ("operator", {"text": "Write a poem.", "front_door": False}),
    "/triggers/mine/daily/run": ("operator", {}),
    "/proposals/mine-memory/promote": ("admin", {"confirmed": True}),
}


@pytest.fixture
def served(house: House, tmp_path: Path) -> House:
    """A server that has the folder of `mine` at hand."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "agent.yaml").write_text(AGENT)
    (folder / "replies.yaml").write_text(REPLIES)
    house.folders["mine"] = folder
    return house


async def answered(house: House, who: str, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
    async with house.client(who) as client:
        answer = await (client.get(f"/api{path}") if body is None else client.post(f"/api{path}", json=body))
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.text


async def ended(house: House, session: str) -> Any:
    async for _ in watch_growth(house.app.store, house.app.clock):
        row = await answered(house, "viewer", f"/sessions/{session}")
        if row["ended_at"] is not None:
            return row
    return None


@pytest.mark.parametrize("path", DEEDS)
async def test_it_is_refused_below_its_role_and_to_those_who_do_not_see_all_that_it_is_about(
    served: House, path: str
) -> None:
    needed, body = DEEDS[path]
    before = await served.office.heads()
    await answered(served, "", path, body, 401)
    for role in ROLES[: ROLES.index(needed)]:  # type: ignore[arg-type] It is one of them.
        assert needed in (await answered(served, role, path, body, 403))["error"]
    if path.startswith("/journal"):
        await answered(served, "admin-of-mine", path, body, 403)
    else:
        await answered(served, "admin-of-mine", path.replace("mine", "theirs"), body, 404)
    for extra in ({"by": "ann"}, {"role": "admin"}, {"agent": "theirs"}):
        await answered(served, "admin", path, {**body, **extra}, 422)
    assert await served.office.heads() == before


async def test_a_journal_is_verified_and_made_anew(served: House) -> None:
    result = await answered(served, "admin", "/journal/verify", {"rebuild": True})
    assert result["events"] > 10
    assert result["rebuilt"] is (not [each for each in result["findings"] if each["kind"] != "row"])


async def test_nothing_is_erased_that_was_not_confirmed_or_still_runs(served: House) -> None:
    before = await served.office.heads()
    for body in ({}, {"sessions": ["mine-1"]}, {"confirmed": False, "sessions": ["mine-1"]}, {"confirmed": True}):
        await answered(served, "admin", "/journal/erase", body, 422)
    result = await answered(served, "admin", "/journal/erase", {"confirmed": True, "sessions": ["mine-1"]})
    assert (result["erased"], [each["session"] for each in result["refused"]]) == ([], ["mine-1"])
    assert await served.office.heads() == before
    gone = await answered(served, "admin", "/journal/erase", {"confirmed": True, "messages": True, "reason": "asked"})
    assert gone["refused"] == []


async def test_a_session_is_exported_as_lines_that_bring_their_receipt(served: House) -> None:
    text = await answered(served, "viewer-of-mine", "/sessions/mine-1/journal?children=true")
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    assert lines[0]["sessions"] == ["mine-1"]
    assert any("receipt" in line for line in lines)


async def test_an_agent_is_given_something_to_do_in_the_name_of_the_token(served: House) -> None:
    result = await answered(served, "operator-of-mine", "/agents/mine/messages", {"text": "Write a poem."})
    assert (result["answered"], result["route"]) == (False, None)
    row = await ended(served, result["subject"])
    assert (row["state"], row["agent"]) == ("COMPLETED", "mine")
    first = (await served.app.store.read(session_stream(result["subject"]), 0))[0]
    assert b'"operator-of-mine"' in first.facts


async def test_who_sees_every_agent_is_answered_at_the_front_door(served: House) -> None:
    body = {"text": "what is 2 + 2?", "kind": "chat"}
    result = await answered(served, "operator", "/agents/mine/messages", body)
    assert (result["answered"], result["text"]) == (True, result["sentence"])
    assert "4" in result["text"]
    route = await answered(served, "viewer-of-mine", "/agents/mine/route?text=what+is+2+%2B+2%3F")
    assert route == result["route"]


async def test_who_sees_one_agent_cannot_halt_the_others_at_its_front_door(served: House) -> None:
    result = await answered(served, "operator-of-mine", "/agents/mine/messages", {"text": "halt everything"})
    assert result["answered"] is False
    halts = await answered(served, "viewer", "/halts")
    assert "fleet" not in [row["scope"] for row in halts]


async def test_a_chat_continues_and_reaches_its_own_agent_alone(served: House) -> None:
    first = await answered(
        served, "operator", "/agents/mine/messages", {"text": "Hello you.", "kind": "chat", "front_door": False}
    )
    body = {"text": "And you?", "kind": "chat", "front_door": False, "session": "theirs-1"}
    await answered(served, "operator-of-mine", "/agents/mine/messages", body, 404)
    assert first["subject"]


async def test_a_trigger_runs_now_and_one_that_is_not_there_does_not(served: House) -> None:
    result = await answered(served, "operator", "/triggers/mine/daily/run", {})
    assert (await ended(served, result["subject"]))["state"] == "COMPLETED"
    await answered(served, "operator", "/triggers/mine/nothing/run", {}, 409)
    await answered(served, "operator", "/triggers/theirs/daily/run", {}, 404)


async def test_a_proposal_is_promoted_once_it_is_confirmed(served: House) -> None:
    path = "/proposals/mine-memory/promote"
    await answered(served, "admin", path, {"confirmed": False}, 422)
    assert not (served.folders["mine"] / "AGENTS.md").exists()
    result = await answered(served, "admin", path, {"confirmed": True})
    assert (result["subject"], result["status"]) == ("mine-memory", "promoted")
    assert "(mine-memory)" in (served.folders["mine"] / "AGENTS.md").read_text()


CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b8-01"


async def test_a_session_keeps_the_traceparent_of_the_request_that_started_it_and_of_those_that_wake_it(
    served: House,
) -> None:
    body = {"text": "Hello you.", "kind": "chat", "front_door": False}
    async with served.client("operator", traceparent=CALLER) as client:
        session = (await client.post("/api/agents/mine/messages", json=body)).json()["subject"]
    async with served.client("operator", traceparent=OTHER) as client:
        assert (await client.post(f"/api/sessions/{session}/messages", json={"text": "Go on."})).status_code == 200
    for headers in ({"traceparent": "00-nonsense"}, {}):
        async with served.client("operator", **headers) as client:
            await client.post(f"/api/sessions/{session}/messages", json={"text": "Go on."})
    first = (await served.app.store.read(session_stream(session)))[0].event
    assert isinstance(first, SessionStarted)
    assert first.traceparent == CALLER
    posted = [stored.event for stored in await served.app.store.read(inbox_stream(session))]
    assert [each.traceparent for each in posted if isinstance(each, WakePosted)][-3:] == [OTHER, "", ""]
