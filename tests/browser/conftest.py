"""A real browser before a real house. What a page complains of, or asks of another host, is a failure."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.house import House, Line, line, script
from tests.browser.payloads import PAYLOADS

SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
TRIPWIRE = "window.__xss = 0; for (const name of ['alert', 'confirm', 'prompt']) window[name] = () => window.__xss++;"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has the house."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Skip loudly where there is no browser; where everything is required, fail."""
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail("There is no chromium: install the system's packages of scripts/system-packages.")
        pytest.skip("There is no chromium, so no page was looked at.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=SWITCHES)
        yield browser
        browser.close()


def pay(to: str) -> Line:
    return line(f"pay {to}", "I pay as the invoice says.", "pay", to=to, amount=5)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    hostile = "\n".join(PAYLOADS)
    desk = script(
        line("good evening", "A good evening to you."),
        *map(pay, ("bob", "dora", "erin", "fred")),
        line("read the page", hostile, "read_page", name="page.txt"),
        *(line("find it all", payload, "emit_finding", title=payload, severity="high") for payload in PAYLOADS),
        line("tell somebody", "I do.", "notify", text=hostile, subject=PAYLOADS[0]),
        line("remember it", "I do.", "propose_memory", text=hostile),
    )
    with House(tmp_path_factory.mktemp("house"), {"desk": desk, "page.txt": hostile}) as house:
        yield house


class Visitor:
    """Somebody with a browser of their own, and what it complained of."""

    def __init__(self, house: House, context: Any) -> None:
        self.house = house
        self.page = context.new_page()
        self.page.set_default_timeout(10_000)
        self.page.add_init_script(TRIPWIRE)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda said: self._complain(said) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("websocket", lambda socket: self._asked(socket.url))

    def _complain(self, said: Any) -> None:
        self.complaints.append(f"{said.text} ({said.location})")

    def _asked(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme in {"http", "https", "ws", "wss"}:
            self.hosts.add(rest.partition("/")[0])

    def goes(self, path: str) -> Any:
        """Open a page, and wait until it is live."""
        self.page.goto(f"{self.house.url}{path}", wait_until="commit")
        self.page.wait_for_function("() => window.socket && window.socket.connected")
        return self.page

    def tripped(self) -> int:
        return int(self.page.evaluate("window.__xss"))

    def leaves(self) -> None:
        """Go, and have been content."""
        self.page.close()
        assert self.complaints == []
        assert self.hosts <= {self.house.url.removeprefix("http://")}


Comes = Callable[..., Visitor]


@pytest.fixture(scope="module")
def browsers(house: House, chromium: Any) -> Iterator[Callable[..., Any]]:
    """Give each role a browser of its own, which keeps what it has fetched."""
    known: dict[tuple[str, str], Any] = {}

    def browser(role: str, scheme: str) -> Any:
        if (role, scheme) not in known:
            context = chromium.new_context(color_scheme=scheme, accept_downloads=True)
            context.add_cookies([{"name": "role", "value": role, "url": house.url}])
            known[role, scheme] = context
        return known[role, scheme]

    yield browser
    for context in known.values():
        context.close()


@pytest.fixture
def comes(house: House, browsers: Callable[..., Any]) -> Iterator[Comes]:
    """Let somebody come with a role; afterwards their pages must have been content."""
    visitors: list[Visitor] = []

    def come(role: str = "admin", *, scheme: str = "light") -> Visitor:
        visitors.append(Visitor(house, browsers(role, scheme)))
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.leaves()
