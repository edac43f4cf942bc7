"""Every route, by everybody: what each may see and do, and what they are told otherwise."""

import base64
import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from jsonschema import Draft202012Validator

from halter.core.events import SessionParked, WakePosted
from halter.core.ids import StreamId, inbox_stream, session_stream
from halter.operations.actor import ROLES
from halter.operations.registry import FLEET_WIDE, LOCAL_AGENTS
from halter.server.api import DO, READ, description
from tests.server.conftest import House

READS = {
    "/whoami": "", "/home": "", "/status": "", "/top": "", "/fleet": "", "/workers": "",
    "/sessions": "", "/sessions/{session}": "/sessions/{agent}-1",
    "/sessions/{session}/events": "/sessions/{agent}-1/events",
    "/sessions/{session}/receipt": "/sessions/{agent}-1/receipt",
    "/sessions/{session}/turns": "/sessions/{agent}-1/turns",
    "/sessions/{session}/hot-state": "/sessions/{agent}-1/hot-state",
    "/inbox": "", "/needs": "", "/notices": "", "/decisions": "", "/halts": "", "/budgets": "", "/policy": "",
    "/prices": "",
    "/agents/{agent}/backtest": "/agents/{agent}/backtest?cap=5", "/agents/{agent}/policy": "/agents/{agent}/policy",
    "/spending": "/spending?since=0&until=9000000000000000",
    "/triggers": "", "/findings": "", "/proposals": "", "/rules": "", "/audit": "/audit?until=9000000000000000",
    "/audit/export": "", "/report": "/report?since=1",
    "/sessions/{session}/journal": "/sessions/{agent}-1/journal",
}  # fmt: skip
DEEDS: dict[str, tuple[str, str, Any]] = {
    "/decisions/{decision:path}/approve": ("approver", "/decisions/{agent}-asks/approve", {"reason": "fine"}),
    "/sessions/{session}/approve": (
        "approver",
        "/sessions/{agent}-1/approve",
        {"shown": [{"decision": "{agent}-asks", "digest": "d"}]},
    ),
    "/decisions/{decision:path}/deny": ("approver", "/decisions/{agent}-asks/deny", None),
    "/halts": ("approver", "", {"scope": "agent:{agent}", "reason": "stop"}),
    "/halts/resume": ("operator", "", {"scope": "trigger:{agent}/hook", "over_seconds": 0}),
    "/sessions/{session}/cancel": ("operator", "/sessions/{agent}-1/cancel", {"reason": "enough"}),
    "/sessions/{session}/messages": ("operator", "/sessions/{agent}-1/messages", {"text": "Go on."}),
    "/sessions/{session}/answer": ("operator", "/sessions/{agent}-1/answer", {"text": "The first."}),
    "/sessions/{session}/fork": ("operator", "/sessions/{agent}-1/fork", {"text": "Try again."}),
    "/agents/{agent}/switch": ("operator", "/agents/{agent}/switch", {"on": False}),
    "/budgets/cap": ("operator", "", {"direction": "raise", "scope": "agent:{agent}", "cap": "0.095"}),
    "/triggers/{agent}/{name}/retry": ("operator", "/triggers/{agent}/hook/retry", {"item": "{agent}.md"}),
    "/triggers/{agent}/{name}/end": ("operator", "/triggers/{agent}/hook/end", None),
    "/findings/{finding}/settle": ("approver", "/findings/{agent}-found/settle", {"status": "kept"}),
    "/proposals/{proposal}/settle": ("approver", "/proposals/{agent}-memory/settle", {"status": "dismissed"}),
    "/rules/{rule}/end": ("operator", "/rules/{agent}-rule/end", {"reason": "no more"}),
}


def read_path(path: str, agent: str) -> str:
    return f"/api{(READS[path] or path).replace('{agent}', agent)}"


def deed(path: str, agent: str) -> tuple[str, dict[str, Any]]:
    _, text, body = DEEDS[path]
    return f"/api{(text or path).replace('{agent}', agent)}", json.loads(
        json.dumps({} if body is None else {"json": body}).replace("{agent}", agent)
    )


def test_this_matrix_knows_every_route() -> None:
    assert [path for path, _, _ in READ] == list(READS)
    assert [path for path, _, _ in DO] == list(DEEDS)


async def test_every_role_may_look_at_everything_and_nobody_else_at_anything(house: House) -> None:
    async with house.client() as nobody:
        for path in READS:
            answer = await nobody.get(read_path(path, "mine"))
            assert (answer.status_code, list(answer.json())) == (401, ["error"]), path
    for role in ROLES:
        async with house.client(role) as client:
            for path in READS:
                answer = await client.get(read_path(path, "mine"))
                assert answer.status_code == 200, (role, path, answer.text)
                assert answer.headers["cache-control"] == "no-store"


async def test_who_sees_one_agent_is_shown_nothing_of_another(house: House) -> None:
    async with house.client("admin-of-mine") as client, house.client("viewer") as all_seeing:
        for path, output in READS.items():
            theirs = await client.get(read_path(path, "theirs"))
            if "{agent}" in output:
                response = await client.get(read_path(path, "nobody-there"))
                assert (theirs.status_code, response.status_code) == (404, 404), path
                assert theirs.text.replace("theirs", "?") == response.text.replace("nobody-there", "?")
                seen = await all_seeing.get(read_path(path, "theirs"))
                assert seen.status_code == 200, (path, seen.text)
            else:
                assert theirs.status_code == 200
                assert "theirs" not in theirs.text, path


def amounts(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Walk to every amount of an answer; what events hold is the journal's own."""
    match value:
        case {"unit": "usd", **row}:
            yield from ((key, row[key]) for key in ("cap", "spent", "held", "overrun") if row.get(key) is not None)
        case dict():
            for key, each in cast("dict[str, Any]", value).items():
                yield from () if key == "facts" else amounts(each, name if name.endswith("_usd") else key)
        case list():
            for each in cast("list[Any]", value):
                yield from amounts(each, name)
        case int() | float() if name.endswith("_usd"):
            yield name, value
        case _:
            pass


async def test_every_amount_over_the_api_is_dollars(house: House) -> None:
    found: dict[str, set[float]] = {}
    async with house.client("viewer") as client:
        for path in READS:
            text = (await client.get(read_path(path, "mine"))).text
            answer = [json.loads(line) for line in text.splitlines()]
            for name, amount in amounts(answer):
                found.setdefault(name, set()).add(amount)
    # Both agents spent 700 micro-dollars each, under caps of 50,000, of 90,000 and, for the fleet, of 200,000.
    assert {max(each) for each in found.values()} <= {0, 0.0007, 0.001, 0.0014, 0.002, 0.09, 0.2}
    assert {"cost_usd", "spent_usd", "burn_usd", "cap_usd", "spent_today_usd", "cap_today_usd", "cap", "spent"} <= {
        *found
    }


def test_the_description_says_that_amounts_are_numbers() -> None:
    result = description()["components"]["schemas"]
    properties = [
        (name, key, each) for name, part in result.items() for key, each in part.get("properties", {}).items()
    ]
    money = [(name, key, json.dumps(each)) for name, key, each in properties if key.endswith("_usd")]
    assert len(money) >= 20
    for name, key, text in money:
        assert '"number"' in text, (name, key)
        assert '"integer"' not in text, (name, key)
        assert '"decimal"' not in text, (name, key)
    assert all(key not in ("usd", "cost") for _, key, _ in properties)


@pytest.mark.parametrize("path", DEEDS)
async def test_what_takes_a_role_is_refused_below_it_and_done_with_it_in_the_name_of_the_token(
    house: House, path: str
) -> None:
    needed, (output, body) = DEEDS[path][0], deed(path, "mine")
    if path.endswith("/answer"):
        parked = SessionParked(state="WAITING_FOR_INPUT")
        await house.office.write(session_stream("mine-1"), parked, owner="mine-1")
    before = await house.office.heads()
    async with house.client() as nobody:
        assert (await nobody.post(output, **body)).status_code == 401
    for role in ROLES[: ROLES.index(needed)]:
        for name in (role, f"{role}-of-mine"):
            async with house.client(name) as client:
                answer = await client.post(output, **body)
                assert answer.status_code == 403, (name, answer.text)
                assert needed in answer.json()["error"]
    async with house.client("admin-of-mine") as client:
        other, other_body = deed(path, "theirs")
        assert (await client.post(other, **other_body)).status_code == 404
    assert await house.office.heads() == before
    async with house.client(f"{needed}-of-mine") as client:
        answer = await client.post(output, **body)
        assert answer.status_code == 200, answer.text
    after = await house.office.heads()
    grown = [StreamId(stream) for stream, head in after.items() if head > before.get(stream, 0)]
    facts = [each.facts for stream in grown for each in await house.app.store.read(stream, before.get(stream, 0))]
    assert any(f'"{needed}-of-mine"'.encode() in each for each in facts)


EXTRAS: tuple[dict[str, Any], ...] = (
    {"by": "ann"},
    {"role": "admin"},
    {"who": {"role": "admin"}},
    {"read_only": False},
    {"agents": []},
)


async def test_no_body_says_who_asks_or_switches_a_check_off(house: House) -> None:
    before = await house.office.heads()
    async with house.client("viewer") as viewer, house.client("admin") as admin:
        for path in DEEDS:
            text, body = deed(path, "mine")
            for extra in EXTRAS:
                fields = {**body.get("json", {}), **extra}
                assert (await viewer.post(text, json=fields)).status_code in {403, 422}, (path, extra)
                assert (await admin.post(text, json=fields)).status_code == 422, (path, extra)
    assert await house.office.heads() == before


UNDONE: list[tuple[str, str, Any, int]] = [
    ("GET", "/api/sessions?limit=0", None, 422),
    ("GET", "/api/sessions?limit=1001", None, 422),
    ("GET", "/api/sessions?limit=x", None, 422),
    ("GET", "/api/sessions?agent=%00", None, 422),
    ("GET", f"/api/sessions?agent={'x' * 301}", None, 422),
    ("GET", "/api/sessions/mine-1/events?after=-1", None, 422),
    ("GET", f"/api/sessions/mine-1/events?after={10**30}", None, 422),
    ("GET", "/api/sessions/%00", None, 422),
    ("GET", "/api/sessions/mine", None, 404),
    ("GET", "/api/sessions/mine-1%2Fin", None, 404),
    ("GET", "/api/spending?since=5&until=5", None, 422),
    ("GET", f"/api/report?since={10**20}", None, 422),
    ("GET", "/api/nothing", None, 404),
    ("GET", "/api", None, 404),
    ("GET", "/api/", None, 404),
    ("DELETE", "/api/sessions/mine-1", None, 404),
    ("GET", "/api/stream?session=nope", None, 404),
    ("GET", "/api/stream?after=nonsense", None, 422),
    ("POST", "/api/decisions/mine/approve", {}, 404),
    ("POST", "/api/decisions//approve", {}, 404),
    ("POST", "/api/decisions/mine-asks/approve", {"digest": "another"}, 409),
    ("POST", "/api/sessions/mine-1/approve", {}, 422),
    ("POST", "/api/sessions/mine-1/approve", {"shown": []}, 422),
    ("POST", "/api/sessions/mine-1/approve", {"shown": [{"decision": "mine-asks"}]}, 422),
    ("POST", "/api/sessions/mine-1/approve", {"shown": [{"decision": "mine-asks", "digest": "another"}]}, 409),
    ("POST", "/api/sessions/theirs-1/approve", {"shown": [{"decision": "mine-asks", "digest": "d"}]}, 422),
    ("POST", "/api/decisions/mine-asks/approve", {"cap": "2.50"}, 422),
    ("POST", "/api/decisions/mine-asks/approve", {"cap": 2}, 422),
    ("POST", "/api/decisions/mine-asks/approve", {"edit": "{}"}, 422),
    ("POST", "/api/decisions/mine-asks/approve", {"always": {"scope": "all"}}, 422),
    ("POST", "/api/decisions/mine-asks/approve", {"always": {"seconds": 0}}, 422),
    ("POST", "/api/halts", {}, 422),
    ("POST", "/api/halts", [], 422),
    ("POST", "/api/halts", {"scope": "flea"}, 404),
    ("POST", "/api/halts", {"scope": "fleet\x00"}, 422),
    ("POST", "/api/halts", {"scope": "fleet", "reason": "x" * 2001}, 422),
    ("POST", "/api/halts/resume", {"scope": "fleet"}, 409),
    ("POST", "/api/halts/resume", {"scope": "fleet", "over_seconds": -1}, 422),
    ("POST", "/api/halts/resume", {"scope": "fleet", "over_seconds": "1"}, 422),
    ("POST", "/api/agents/nobody/switch", {"on": True}, 404),
    ("POST", "/api/agents/mine/switch", {"on": "yes"}, 422),
    ("POST", "/api/sessions/mine-1/messages", {"text": " "}, 422),
    ("POST", "/api/sessions/mine-1/messages", {"text": "Go on.", "files": [{"data": "?", "media_type": "x"}]}, 422),
    ("POST", "/api/sessions/mine-1/messages", {"text": "Go on.", "files": [{"data": "", "media_type": "x/y"}]}, 422),
    ("POST", "/api/budgets/cap", {"direction": "raise", "scope": "agent:mine", "cap": "much"}, 422),
    ("POST", "/api/budgets/cap", {"direction": "raise", "scope": "agent:mine", "cap": "0.01"}, 422),
    ("POST", "/api/budgets/cap", {"direction": "raise", "scope": "agent:nobody", "cap": "1"}, 404),
    ("POST", "/api/triggers/mine/nothing/end", {}, 404),
    ("POST", "/api/triggers/mine/hook/retry", {"item": ""}, 422),
    ("POST", "/api/findings/mine/settle", {"status": "kept"}, 404),
    ("POST", "/api/findings/mine-found/settle", {"status": "promoted"}, 422),
    ("POST", "/api/rules/mine/end", {}, 404),
]


async def test_what_cannot_be_done_is_a_sentence_with_a_status(house: House) -> None:
    before = await house.office.heads()
    async with house.client("admin") as client:
        for method, path, body, status in UNDONE:
            answer = await client.request(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code == status, (method, path, answer.text)
            assert list(answer.json()) == ["error"]
            assert answer.json()["error"].strip()
    assert await house.office.heads() == before


async def test_a_message_brings_its_files(house: House) -> None:
    file = {"data": base64.b64encode(b"a,b").decode(), "media_type": "text/csv", "name": "t.csv"}
    async with house.client("operator") as client:
        answer = await client.post("/api/sessions/mine-1/messages", json={"text": "Compare.", "files": [file]})
        assert answer.status_code == 200, answer.text
        documents = (await client.get("/api/openapi.json")).json()
    (files, message) = (await house.app.store.read(inbox_stream("mine-1"), 0, 99))[-2:]
    assert (files.kind, message.kind) == ("files_given", "wake_posted")
    assert b"[t.csv, text/csv, 3 bytes]" in (files.body or b"")
    assert "files" in str(documents["paths"]["/api/sessions/{session}/messages"])


async def test_a_body_that_is_no_json_or_says_to_be_something_else_is_refused(house: House) -> None:
    bodies = [b"{", b"\xff", b'{"scope": NaN}', b'{"scope":"fleet"}' + b"x", b"[" * 50_000]
    async with house.client("admin") as client:
        for body in bodies:
            answer = await client.post("/api/halts", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in {400, 422}, (body[:20], answer.text)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = await client.post("/api/halts", content=b'{"scope":"fleet"}', headers={"Content-Type": kind})
            assert answer.status_code in {400, 422}, kind
        edit = b'{"edit": {"n": NaN}}'
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/api/decisions/mine-asks/approve", content=edit, headers=headers)
        assert answer.status_code == 422


async def test_the_audit_is_searched_and_exported_line_by_line(house: House) -> None:
    async with house.client("viewer") as client:
        payload = (await client.get("/api/audit?until=9000000000000000&text=OF-MINE")).json()
        assert [row["tool"] for row in payload] == ["tool-of-mine"]
        answer = await client.get("/api/audit/export")
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [msgspec.json.decode(line) for line in answer.text.splitlines()]
        assert sorted(line["tool"] for line in lines) == ["tool-of-mine", "tool-of-theirs"]


async def test_the_description_names_every_route_and_each_error(house: House) -> None:
    async with house.client("viewer") as client:
        described = (await client.get("/api/openapi.json")).json()
    paths = described["paths"]
    texts = [each.path for each in (*FLEET_WIDE, *LOCAL_AGENTS)]
    assert {f"/api{path}".replace(":path", "") for path in (*READS, *DEEDS, *texts)} | {"/api/stream"} == set(paths)
    for path, ways in paths.items():
        for result in ways.values():
            assert result["summary"], path
            assert {"401", "403", "404", "409", "413", "422", "429", "503"} <= set(result["responses"]), path
    text = json.dumps(described)
    refs = {output.partition('"')[0] for output in text.split("#/components/schemas/")[1:]}
    assert refs <= set(described["components"]["schemas"])


def test_the_description_is_valid_by_the_definition_of_its_version() -> None:
    from schemathesis.specs.openapi.definitions import OPENAPI_31

    document = description()
    assert document["openapi"].startswith("3.1.")
    assert list(Draft202012Validator(OPENAPI_31).iter_errors(document)) == []


async def test_a_head_of_what_can_be_read_is_answered_as_a_get_without_its_body(house: House) -> None:
    async with house.client("viewer") as client:
        for path in (*(read_path(path, "mine") for path in READS), "/api/openapi.json", "/healthz", "/metrics"):
            head, answer = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == answer.headers["content-type"]
        stream = await client.head("/api/stream")
        assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (await client.head("/api/nothing")).status_code == 404
    async with house.client() as nobody:
        assert (await nobody.head("/api/sessions")).status_code == 401
        assert (await nobody.head("/api/stream")).status_code == 401


async def test_every_path_is_understood_with_the_version_and_without_it(house: House) -> None:
    async with house.client("viewer") as client, house.client() as nobody:
        for path in READS:
            plain, versioned = read_path(path, "mine"), read_path(path, "mine").replace("/api/", "/api/v1/")
            answer = await client.get(versioned)
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), path
            assert answer.headers["content-type"] == (await client.get(plain)).headers["content-type"]
            assert (await nobody.get(versioned)).status_code == 401
        for method, path, body, status in UNDONE:
            text = path.replace("/api/", "/api/v1/", 1)
            answer = await client.request(method, text, **({} if body is None else {"json": body}))
            assert answer.status_code in {status, 403}, (method, text, answer.text)
        answer = await client.get("/api/v2/whoami")
        assert (answer.status_code, answer.json()) == (404, {"error": "There is no v2 of this API. Use /api/v1."})


async def test_the_description_of_the_version_is_valid_and_has_its_paths(house: House) -> None:
    async with house.client("viewer") as client:
        versioned = (await client.get("/api/v1/openapi.json")).json()
        plain = (await client.get("/api/openapi.json")).json()
    assert versioned == json.loads(json.dumps(description(versioned=True)))
    assert {path.replace("/api/v1/", "/api/") for path in versioned["paths"]} == {*plain["paths"]}
    assert all(path.startswith("/api/v1/") for path in versioned["paths"])
    from schemathesis.specs.openapi.definitions import OPENAPI_31

    assert list(Draft202012Validator(OPENAPI_31).iter_errors(versioned)) == []


async def test_a_cookie_alone_changes_nothing_through_a_versioned_path_either(house: House) -> None:
    async with house.client() as browser:
        entered = await browser.post(
            "/login", data={"token": house.secrets["admin"]}, headers={"Origin": house.base}, follow_redirects=False
        )
        assert entered.status_code == 303
        before = await house.office.heads()
        answer = await browser.post("/api/v1/halts", json={"scope": "fleet"})
        assert answer.status_code == 403
        foreign = await browser.post(
            "/api/v1/halts", json={"scope": "fleet"}, headers={"Origin": "http://evil.example"}
        )
        assert foreign.status_code == 403
        assert await house.office.heads() == before
        ours = await browser.post("/api/v1/halts", json={"scope": "fleet"}, headers={"Origin": house.base})
        assert ours.status_code == 200


async def test_a_stream_is_followed_through_a_versioned_path(house: House) -> None:
    async with house.client("viewer") as client, client.stream("GET", "/api/v1/stream") as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_a_question_is_answered_once_in_the_name_of_the_token(house: House) -> None:
    parked = SessionParked(state="WAITING_FOR_INPUT")
    await house.office.write(session_stream("mine-1"), parked, owner="mine-1")
    async with house.client("operator") as client:
        (need,) = [each for each in (await client.get("/api/v1/inbox")).json() if each["kind"] == "question"]
        path = f"/api/v1/sessions/{need['session']}/answer"
        assert (await client.post(path, json={"text": " "})).status_code == 422
        assert (await client.post(path, json={"text": "The first."})).status_code == 200
        again = await client.post(path, json={"text": "The second."})
        assert (again.status_code, [*again.json()]) == (409, ["error"])
    (posted,) = await house.app.store.read(inbox_stream("mine-1"))
    assert isinstance(posted.event, WakePosted)
    assert posted.event.sender == "operator"
