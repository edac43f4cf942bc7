"""The live terminal over a store and over a server: what it shows, what its keys do, and what it never does."""

import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Input, Static, TextArea

from halter.core.errors import NotDone, StoreUnavailable
from halter.core.ports import Query
from halter.core.public_json import encode_public_json
from halter.core.rows import DecisionRow, HaltRow
from halter.net.client import HttpClient
from halter.net.httpx_transport import connect_directly
from halter.operations.actor import Role
from halter.operations.decisions import DecisionResult
from halter.top.app import TopApp
from halter.top.rows import describe_need, list_rows
from halter.top.source import OperationSource, ServerSource, StoreSource, check_server
from tests.server.conftest import House

SIZE = (80, 24)


@pytest.fixture
async def wire() -> AsyncIterator[HttpClient]:
    async with connect_directly() as client:
        yield client


@pytest.fixture
def source(house: House) -> OperationSource:
    return StoreSource(house.office.desk(name="admin"))


@pytest.fixture(params=["store", "server"])
def either(request: pytest.FixtureRequest, house: House, wire: HttpClient, source: OperationSource) -> OperationSource:
    return source if request.param == "store" else at(house, "admin", wire)


def at(house: House, role: Role, wire: HttpClient) -> OperationSource:
    return ServerSource(house.base, house.secrets[role], wire)


CELL = 12.2
"""How wide a picture of the screen draws a letter."""


def read_screen(app: TopApp) -> str:
    """What stands on the screen, line by line."""
    lines: dict[float, str] = {}
    for x, y, text in re.findall(r'<text[^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', app.export_screenshot()):
        before = lines.get(float(y), "").ljust(round(float(x) / CELL))
        lines[float(y)] = before + html.unescape(text).replace("\xa0", " ")
    return "\n".join(line.rstrip() for _, line in sorted(lines.items()))


async def verdict(house: House, decision: str) -> str:
    rows = await house.app.store.ask(Query("decision", DecisionRow, {"decision": decision}))
    return rows[0].verdict


async def finish(app: Any) -> None:
    """Let everything that was begun come to its end."""
    await app.workers.wait_for_complete()


async def settle(pilot: Any) -> None:
    """Let what was begun by a key come to its end."""
    for _ in range(4):
        if looks := [worker for worker in pilot.app.workers if worker.group == "look"]:
            await pilot.app.workers.wait_for_complete(looks)
        await pilot.pause()


async def press(pilot: Any, *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


@asynccontextmanager
async def open_top(source: Any, size: tuple[int, int] = SIZE) -> AsyncIterator[tuple[Any, Any]]:
    """Show a source, and let somebody press keys once it is shown."""
    app = TopApp(source, refresh_seconds=None)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        yield app, pilot


async def test_a_store_and_a_server_show_the_same(house: House, wire: HttpClient) -> None:
    at_store = await StoreSource(house.office.desk(name="admin")).call("top", session="mine-1")
    at_server = await at(house, "admin", wire).call("top", session="mine-1")
    results = [msgspec.json.decode(encode_public_json(view)) for view in (at_store, at_server)]
    for view in results:
        # The store's clock goes on from look to look.
        view["status"].pop("at")
    assert results[0] == results[1]
    assert {line["session"] for line in results[0]["sessions"]} == {"mine-1", "theirs-1"}
    assert [result["digest"] for result in results[0]["inbox"] if result["need"]["decision"] == "mine-asks"] == ["d"]
    assert results[0]["tail"] != []


async def test_it_shows_sessions_money_and_questions_on_a_small_screen(source: OperationSource) -> None:
    async with open_top(source) as (app, pilot):
        sessions = read_screen(app)
        await press(pilot, "2")
        inbox = read_screen(app)
        await press(pilot, "3")
        budgets = read_screen(app)
        await press(pilot, "4")
        workers = read_screen(app)
    assert "need you" in sessions
    assert re.search(r"mine-1 +running +\$0\.0007 +\.\.\.\.\. 1 %", sessions)
    assert "mine wants to look" in inbox
    assert "y: Exactly this call runs, once. n: It does not run." in inbox
    assert "agent:mine" in budgets
    assert "▊" not in inbox, "without colour, a scrollbar would look like a mistake"
    assert "host-of-mine" in workers
    assert all(len(line) <= SIZE[0] for screen in (sessions, inbox, budgets, workers) for line in screen.splitlines())


async def test_a_second_y_approves_what_was_shown(house: House, either: OperationSource) -> None:
    async with open_top(either) as (app, pilot):
        await press(pilot, "2", "y")
        assert await verdict(house, "mine-asks") == ""
        await press(pilot, "y")
        await finish(app)
        await settle(pilot)
    assert await verdict(house, "mine-asks") == "approve"
    assert await verdict(house, "theirs-asks") == ""


@pytest.mark.parametrize("key", ["y", "n", "h", "u"])
async def test_a_key_pressed_twice_at_once_asks_once_and_approves_nothing(
    house: House, source: OperationSource, key: str
) -> None:
    async with open_top(source) as (app, pilot):
        await press(pilot, "2")
        for _ in range(2):
            app.simulate_key(key)
        await settle(pilot)
        assert len(app.screen_stack) == 2
        await press(pilot, "escape")
        assert len(app.screen_stack) == 1
        await press(pilot, key)
        assert len(app.screen_stack) == 2
    assert await verdict(house, "mine-asks") == ""


async def test_without_colour_the_cursor_is_seen_and_a_question_stands_alone(
    source: OperationSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with open_top(source) as (app, pilot):
        table = app.query_one("#sessions-table", DataTable)
        assert table.get_component_rich_style("datatable--cursor").reverse
        assert not table.get_component_rich_style("datatable--header").reverse
        await pilot.press("2")
        await press(pilot, "y")
        question = read_screen(app)
    assert "y: Exactly this call runs, once. n: It does not run." in question
    assert "Needs you" not in question


async def test_a_session_that_has_held_nothing_yet_is_not_shown_without_a_cap(source: OperationSource) -> None:
    view = await source.call("top")
    line = msgspec.structs.replace(view.sessions[0], spent_usd=Decimal(0), held_usd=Decimal(0), cap_usd=None)
    rows = list_rows(msgspec.structs.replace(view, sessions=[line]))
    assert rows["sessions"][0][1][3] == ""


async def test_ctrl_c_ends_it_also_in_the_middle_of_a_question(source: OperationSource) -> None:
    async with open_top(source) as (app, pilot):
        await press(pilot, "h")
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert not app.is_running


async def test_a_question_that_changed_since_it_was_shown_is_not_approved(
    house: House, either: OperationSource
) -> None:
    result = await either.call("top")
    one = next(each for each in result.inbox if each.need.decision == "mine-asks")
    with pytest.raises(NotDone, match=r"has changed since it was shown\. Review it again\."):
        await either.call("approve", decision=one.need.decision, digest=f"{one.digest}-other")
    assert await verdict(house, "mine-asks") == ""


async def test_the_screen_approves_only_what_it_shows(house: House, source: OperationSource) -> None:
    class Outdated:
        """Shows every decision as it was before it changed."""

        async def call(self, name: str, **given: Any) -> Any:
            result = await source.call(name, **given)
            if name != "top":
                return result
            return msgspec.structs.replace(
                result, inbox=[msgspec.structs.replace(one, digest="before") for one in result.inbox if one.digest]
            )

    async with open_top(Outdated()) as (app, pilot):
        await press(pilot, "2", "y", "y")
        await finish(app)
    assert [await verdict(house, each) for each in ("mine-asks", "theirs-asks")] == ["", ""]


async def test_nobody_approves_a_question_before_its_end_was_on_the_screen(
    house: House, source: OperationSource
) -> None:
    async with open_top(source) as (app, pilot):
        await press(pilot, "2", "y")
        app.screen.query_one("#question Static", Static).update("\n".join(map(str, range(200))))
        await settle(pilot)
        await press(pilot, "y")
        assert await verdict(house, "mine-asks") == ""
        app.screen.query_one("#question", VerticalScroll).scroll_end(animate=False)
        await settle(pilot)
        await press(pilot, "y")
        await finish(app)
    assert await verdict(house, "mine-asks") == "approve"


async def test_n_denies_with_a_reason_and_escape_does_nothing(house: House, source: OperationSource) -> None:
    async with open_top(source) as (app, pilot):
        await press(pilot, "2", "n", "escape")
        assert await verdict(house, "mine-asks") == ""
        await press(pilot, "n")
        app.screen.query_one(Input).value = "not today"
        await press(pilot, "enter")
        await finish(app)
    assert await verdict(house, "mine-asks") == "deny"


async def test_a_halt_is_typed_and_an_invalid_scope_is_rejected(house: House, source: OperationSource) -> None:
    async with open_top(source) as (app, pilot):
        for scope in ("nowhere:at-all", "agent:mine"):
            await press(pilot, "h")
            app.screen.query_one(Input).value = scope
            await press(pilot, "enter")
            await finish(app)
            await settle(pilot)
        assert "HALTED: agent:mine" in read_screen(app)
    assert "agent:mine" in {row.scope for row in await house.app.store.ask(Query("halts_standing", HaltRow))}


async def test_a_viewer_looks_and_approves_nothing(house: House, wire: HttpClient) -> None:
    source = at(house, "viewer", wire)
    assert (await source.call("top")).sessions
    with pytest.raises(NotDone, match="The role approver is required"):
        await source.call("approve", decision="mine-asks", digest="d")
    assert await verdict(house, "mine-asks") == ""


async def test_a_wrong_token_and_a_server_that_is_gone_are_reported_in_a_sentence(
    house: House, wire: HttpClient
) -> None:
    with pytest.raises(NotDone, match="does not know this token"):
        await ServerSource(house.base, "halter_wrong", wire).call("top")
    source = at(house, "admin", wire)
    async with open_top(source) as (app, pilot):
        await house.end()
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await source.call("top")
        await press(pilot, "r")
        screen = read_screen(app)
    assert "NOT UP TO DATE" in screen
    assert "mine-1" in screen


async def test_what_an_agent_wrote_neither_steers_the_screen_nor_is_markup(source: OperationSource) -> None:
    view = await source.call("top")
    hostile = "\x1b[2J[bold red]pay[/] \u202e" + "x" * 20
    line = msgspec.structs.replace(view.sessions[0], why=hostile)
    view = msgspec.structs.replace(view, sessions=[line])

    class Fixed:
        async def call(self, name: str, **given: Any) -> Any:
            return view

    async with open_top(Fixed(), (160, 24)) as (app, _):
        screen = read_screen(app)
    assert "[bold red]pay[/]" in screen
    assert "\x1b" not in screen
    assert "\u202e" not in screen


async def test_a_question_hides_no_character_of_what_it_is_about(source: OperationSource) -> None:
    view = await source.call("top")
    result = next(each for each in view.inbox if each.need.decision == "mine-asks")
    need = msgspec.structs.replace(result.need, shown='{"path": "a\u200b\u3164b\u202e"}')
    assert '"a\\u200b\\u3164b\\u202e"' in describe_need(msgspec.structs.replace(result, need=need))


async def test_a_cell_that_grows_is_shown_whole_and_one_that_shrinks_moves_nothing(source: OperationSource) -> None:
    view = await source.call("top")
    whys = ["short", "a much longer reason than before", "short"]

    class Changing:
        async def call(self, name: str, **given: Any) -> Any:
            line = msgspec.structs.replace(view.sessions[0], why=whys[0] if len(whys) == 1 else whys.pop(0))
            return msgspec.structs.replace(view, sessions=[line])

    app = TopApp(Changing(), refresh_seconds=None, follow=3600)
    async with app.run_test(size=(160, 24)) as pilot:
        await settle(pilot)
        assert "short" in read_screen(app)
        app.action_refresh_view()
        await settle(pilot)
        assert "a much longer reason than before" in read_screen(app)
        app.action_refresh_view()
        await settle(pilot)
        assert "a much longer" not in read_screen(app)


async def test_a_key_that_is_held_down_reads_no_events_until_it_rests(source: OperationSource) -> None:
    view, texts = await source.call("top"), list[str]()

    class Counting:
        async def call(self, name: str, **given: Any) -> Any:
            texts.append(given["session"])
            return view

    app = TopApp(Counting(), refresh_seconds=None, follow=3600)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot)
        before = len(texts)
        for _ in range(6):
            await pilot.press("down", "up")
        await settle(pilot)
        assert len(texts) == before


async def test_the_cursor_stays_on_its_session_when_others_come(source: OperationSource) -> None:
    view = await source.call("top")
    first = view.sessions[0]
    results = [msgspec.structs.replace(first, session=f"s{number}") for number in range(1000)]

    class Growing:
        sessions = results

        async def call(self, name: str, **given: Any) -> Any:
            return msgspec.structs.replace(view, sessions=self.sessions)

    growing = Growing()
    async with open_top(growing) as (app, pilot):
        await press(pilot, "down", "down", "down")
        growing.sessions = [msgspec.structs.replace(first, session="new"), *results]
        await press(pilot, "r")
        table: Any = app.screen.query_one("#sessions-table")
        assert table.get_row_at(table.cursor_row)[0].plain == "s3"
    assert len(list_rows(await growing.call("top"))["sessions"]) == 1001


async def test_edited_arguments_are_approved_instead(source: OperationSource) -> None:
    view = await source.call("top")
    result = next(each for each in view.inbox if each.need.decision == "mine-asks")
    need = msgspec.structs.replace(result.need, shown='{"path": "a\u202e\x9b"}')
    done: list[tuple[str, dict[str, Any]]] = []

    class Noting:
        async def call(self, name: str, **fields: Any) -> Any:
            done.append((name, fields))
            if name == "approve":
                return DecisionResult("mine-asks", "Approved.")
            return msgspec.structs.replace(view, inbox=[msgspec.structs.replace(result, need=need)])

    async with open_top(Noting()) as (app, pilot):
        await press(pilot, "2")
        for text in ("no json", "[1]", '{"path": NaN}', '{"path": 1e999}', '{"path": "\\ud800"}', '{"path": "b"}'):
            await press(pilot, "e")
            assert '"a\\u202e\\u009b"' in app.screen.query_one(TextArea).text
            app.screen.query_one(TextArea).text = text
            await press(pilot, "ctrl+s")
    assert [fields for name, fields in done if name == "approve"] == [
        {"decision": "mine-asks", "digest": result.digest, "edit": {"path": "b"}}
    ]


@pytest.mark.parametrize(
    ("url", "token", "sentence"),
    [
        ("http://halter.example", "halter_x", "unencrypted"),
        ("http://10.0.0.5:8000", "halter_x", "unencrypted"),
        ("http://127.0.0.1.example", "halter_x", "unencrypted"),
        ("ftp://127.0.0.1", "halter_x", "Invalid server address"),
        ("halter.example", "halter_x", "Invalid server address"),
        ("https://[", "halter_x", "Invalid server address"),
        ("https://halter.example:99999", "halter_x", "Invalid server address"),
        ("https://\x00", "halter_x", "Invalid server address"),
        ("https://halter.example", "halter_x\n", "invalid character"),
        ("https://halter.example", "halter_ü", "invalid character"),
    ],
)
def test_no_token_is_sent_where_others_could_read_it_and_none_is_shown(url: str, token: str, sentence: str) -> None:
    with pytest.raises(NotDone, match=sentence) as no:
        check_server(url, token)
    assert "halter_" not in str(no.value)


@pytest.mark.parametrize(
    "url", ["https://halter.example", "http://localhost:8000", "http://127.0.0.1:1", "http://[::1]:1"]
)
def test_a_server_of_this_machine_needs_no_encryption(url: str) -> None:
    check_server(url, "halter_x")
