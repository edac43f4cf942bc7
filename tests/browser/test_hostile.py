"""Whatever a model, a tool, a file or a person writes is text on a page; and nobody speaks for another's page."""

import gc
import re
from typing import Any

import httpx2
import pytest
from playwright.sync_api import expect

from halter.core.ids import WorkerId
from halter.dispatch.workers import WorkerInfo
from halter.operations import artifacts, control, fleet
from tests.browser.conftest import Visit
from tests.browser.house import House
from tests.browser.payloads import PAYLOADS
from tests.browser.test_dashboard import OF_ALL, dialog, press

# One worker has the house, and the browser before it.
IMAGE = PAYLOADS[2]


@pytest.fixture(scope="module")
def hostile(house: House) -> House:
    """Let everybody have said everything."""
    # The page comes last: what stands in it is asked about when it is said again.
    for words in (*["find it all"] * 5, "tell somebody", "remember it", "read the page"):
        house.send(words)
        house.wait_until(lambda: house.is_idle("desk-1"))
    found = [person for person in house.run(artifacts.findings(house.desk)) if person.severity == "high"]
    assert len(found) == len(PAYLOADS) >= 40
    house.wait_until(lambda: bool(_left(house)))
    worker_info = WorkerInfo(
        kind=IMAGE, host=IMAGE, version=IMAGE, agents=dict.fromkeys(PAYLOADS, IMAGE), problem=IMAGE
    )
    house.run(house.app.store.beat(WorkerId(IMAGE), {}, worker_info.encode()))
    return house


def _left(house: House) -> tuple[Any, ...]:
    return tuple(item for plan in house.run(fleet.plans(house.desk)) for item in plan.quarantined)


READ = {
    "/findings": ("Findings", "Proposals"),
    "/session/desk-1": ("Transcript",),
    "/triggers": ("Quarantined documents",),
    "/fleet": ("Workers",),
}
"""Where hostile words stand, and are read as they were written."""


def test_nothing_that_is_shown_is_ever_run_and_it_is_read_as_it_was_written(hostile: House, visit: Visit) -> None:
    visitor = visit("admin")
    failed = _left(hostile)[0]
    for path in (*OF_ALL, "/session/desk-1", "/receipt/desk-1", f"/session/{failed.session}"):
        page = visitor.open(path)
        # Documents that fail hold back those after them, so not every name is among the quarantined ones.
        words = failed.name if path == "/triggers" else IMAGE
        for text in READ.get(path, ()):
            expect(page.get_by_role("region", name=text)).to_contain_text(words)
        assert page.evaluate(ODD) == [], path
        assert visitor.tripped() == 0, path


def test_a_hostile_reason_stands_in_the_banner_and_in_the_report_as_text(hostile: House, visit: Visit) -> None:
    visitor = visit("admin")
    page = visitor.open("/")
    press(page, "HALT ALL")
    dialog(page).get_by_label("Reason").fill(IMAGE)
    press(dialog(page), "Halt everything")
    expect(page.get_by_text(f"by ada: {IMAGE}")).to_be_visible()
    hostile.run(control.resume(hostile.desk, "fleet", 0, PAYLOADS[0]))
    expect(page.get_by_role("region", name="Last night")).to_contain_text(PAYLOADS[0])
    assert visitor.tripped() == 0


def test_nobody_joins_the_page_of_another_person(visit: Visit) -> None:
    admin, viewer = visit("admin").open("/"), visit("viewer").open("/")
    # Even with all that the other's browser says when it joins.
    result = admin.evaluate("window.socket.io.opts.query")
    assert viewer.evaluate(JOIN, result) == "refused"
    assert admin.evaluate(JOIN, result) == "joined"


def test_nobody_presses_a_button_on_the_page_of_another_person(visit: Visit) -> None:
    admin, viewer = visit("admin").open("/"), visit("viewer").open("/")
    press_of = admin.evaluate(PRESS_OF, "HALT ALL")
    viewer.evaluate("said => window.socket.emit('event', said)", press_of)
    viewer.evaluate(HEARD)
    expect(dialog(admin)).to_have_count(0)
    admin.evaluate("said => window.socket.emit('event', said)", press_of)
    expect(dialog(admin)).to_contain_text(re.compile(r"Stops \d+ active sessions?, \d+ of them running now"))


def test_nothing_that_a_browser_says_reaches_the_terminal_of_who_runs_the_server(
    house: House, visit: Visit, caplog: pytest.LogCaptureFixture
) -> None:
    viewer = visit("viewer").open("/")
    page = viewer.evaluate("window.clientId")
    for results in NONSENSE:
        fields = [{**field, "client_id": page} if isinstance(field, dict) else field for field in results[1:]]
        viewer.evaluate("message => window.socket.emit(...message)", [*results[:1], *fields])
    viewer.evaluate(HEARD)
    with _speaking_as(house, "viewer") as client:
        assert client.get("/nowhere%1b%5b31m%0aNEEDS%20YOU").status_code == httpx2.codes.NOT_FOUND
    gc.collect()
    # What is logged this far up is written to the terminal where nobody else takes it.
    assert caplog.records == []
    assert house.reports == []


def test_a_page_is_joined_by_a_websocket_and_in_no_other_way(house: House) -> None:
    with _speaking_as(house, "viewer") as client:
        answer = client.get("/_nicegui_ws/socket.io/?EIO=4&transport=polling")
    assert answer.status_code == httpx2.codes.BAD_REQUEST
    assert "sid" not in answer.text


def _speaking_as(house: House, name: str) -> httpx2.Client:
    return httpx2.Client(base_url=house.url, headers={"Authorization": f"Bearer {house.secrets[name]}"})


NONSENSE: tuple[tuple[Any, ...], ...] = (
    ("log", {"level": "error", "message": "\x1b[31mNEEDS YOU: run this"}),
    ("log", {"level": "none", "message": ""}),
    ("event", {"id": 3, "listener_id": "none", "args": ["{"]}),
    ("event", {}),
    ("event",),
    ("event", "words"),
    ("event", {}, {}),
    ("ack", {}),
    ("javascript_response", {}),
    ("handshake", [1]),
    ("handshake",),
)

ODD = """() => [...document.querySelectorAll('#app *')].map(e => e.tagName)
    .filter(name => /^(SCRIPT|IFRAME|OBJECT|EMBED|MARQUEE|IMG|VIDEO|AUDIO|BASE|META|LINK|STYLE)$/i.test(name))"""

JOIN = """said => new Promise(done => {
    const query = {...said, implicit_handshake: true};
    const path = '/_nicegui_ws/socket.io';
    const other = io(location.origin, {path, query, transports: ['websocket'], forceNew: true, reconnection: false});
    other.on('connect', () => { done('joined'); other.close(); });
    other.on('connect_error', () => { done('refused'); other.close(); });
})"""

HEARD = """() => new Promise(done => window.socket.emit('handshake', {client_id: 'nobody'}, done))"""
"""The server answers in order: once this was answered, it has heard all that was said before."""

PRESS_OF = """text => {
    const button = [...document.querySelectorAll('button')].find(b => b.innerText === text);
    const id = Number(button.id.slice(1));
    const click = mounted_app.elements[id].events.find(e => e.type === 'click');
    return {id, client_id: window.clientId, listener_id: click.listener_id, args: []};
}"""
