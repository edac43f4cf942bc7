"""The demo as a newcomer sees it: the address on the screen opens the dashboard, where its agent asks and is answered.

The pictures of the documentation are taken here. `make pictures` keeps them; any other run takes them and lets them go.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from halter.core.clock import DAY, SECOND, SystemClock
from halter.demo.folder import LEFTOVER, RULES_MODEL, DemoFolder, lay_out_files
from tests.story.test_cli_demo import Demo, demo_of
from tests.story.test_cli_talk import Person, until

# One worker has the house, and the browser before it.
PATIENCE = 60_000


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Person, Demo]]:
    """A demo that finds an old file as soon as it begins."""
    ada = Person(tmp_path)
    demo_folder, now = DemoFolder(demo_of(ada)), SystemClock().now()
    lay_out_files(demo_folder, RULES_MODEL, "ada", now)
    old = demo_folder.agent / "temp" / LEFTOVER
    old.write_text("Nobody needs it.\n")
    os.utime(old, ((now - 40 * DAY) // SECOND,) * 2)
    demo = Demo(ada)
    yield ada, demo
    with demo.program as program:
        program.kill()
    Demo.begun.clear()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    text = os.environ.get("HALTER_PICTURES")
    folder = Path(text) if text else tmp_path / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_newcomer_opens_the_dashboard_sees_what_is_asked_and_answers_it(
    live: tuple[Person, Demo], chromium: Any, pictures: Path
) -> None:
    ada, demo = live
    address = demo.until("/login#token=").strip()
    base = address.partition("/login")[0]
    complaints: list[str] = []
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(base) else None)

    page.goto(address)
    result = page.get_by_role("article", name="wants to delete leftover.tmp")
    expect(result).to_be_visible(timeout=PATIENCE)
    page.screenshot(path=pictures / "home.png")
    for name in ("fleet", "session/night-watch-1", "budgets"):
        page.goto(f"{base}/{name}")
        expect(page.get_by_role("main")).to_contain_text(re.compile("night-watch|cap", re.IGNORECASE), timeout=PATIENCE)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=pictures / f"{name.partition('/')[0]}.png")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{base}/")
    expect(result).to_be_visible(timeout=PATIENCE)
    page.screenshot(path=pictures / "phone.png")

    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("button", name="Approve").click()
    expect(result).to_have_count(0, timeout=PATIENCE)
    expect(page.get_by_text(re.compile("Approved: delete_file"))).to_be_visible(timeout=PATIENCE)
    page.screenshot(path=pictures / "approved.png", animations="disabled")
    until(lambda: not (demo_of(ada) / "night-watch" / "temp" / LEFTOVER).exists())
    assert complaints == []
    assert all(picture.stat().st_size > 10_000 for picture in pictures.iterdir())
    context.close()
    assert demo.ends()[0] == 0
