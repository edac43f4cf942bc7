"""The login in a real browser: what it sends along is not what a program would."""

import os
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright

from halter.server.auth import LOGIN
from halter.server.login import make_login_url
from scripts.page_pictures import find_browser
from tests.server.conftest import House

BROWSER = find_browser()
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    if BROWSER is None:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail("There is no browser.")
        pytest.skip("There is no browser.")
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=BROWSER, args=ARGS)
        yield await browser.new_page()
        await browser.close()


async def test_a_person_logs_in_by_the_address_that_was_shown_and_by_hand(house: House, page: Page) -> None:
    texts: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: texts.append(request.url))
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    await page.goto(make_login_url(house.base, house.secrets["admin"]))
    await page.wait_for_url(f"{house.base}/")
    (cookie,) = await page.context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (f"halter_{house.port}", True, "Strict")
    await page.go_back()
    assert house.secrets["admin"] not in page.url
    assert not [url for url in texts if house.secrets["admin"] in url.partition("#")[0]]
    assert all(url.startswith((house.base, "data:")) for url in texts)
    assert not [text for text in wrong if "Content Security Policy" in text]
    await page.context.clear_cookies()
    await page.goto(house.base)
    assert page.url == f"{house.base}{LOGIN}"
    await page.fill("#token", "halter_nonsense")
    await page.keyboard.press("Enter")
    await page.get_by_text("Invalid token").wait_for()
    await page.fill("#token", house.secrets["viewer"])
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"{house.base}/")


async def test_a_page_of_another_port_gets_nothing_with_the_cookie_of_a_person(house: House, page: Page) -> None:
    """Cookies know no ports: to a browser, every server of this machine is the same site."""
    await page.goto(make_login_url(house.base, house.secrets["admin"]))
    await page.wait_for_url(f"{house.base}/")
    before = await house.office.heads()
    await page.route("http://127.0.0.1:9/**", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
    await page.goto("http://127.0.0.1:9/")
    result = await page.evaluate(
        """async (base) => {
            const tries = [
                fetch(base + "/api/home", {credentials: "include"}).then((r) => r.text()),
                fetch(base + "/api/home", {credentials: "include", mode: "no-cors"}).then((r) => r.text()),
                fetch(base + "/api/halts", {method: "POST", credentials: "include", mode: "no-cors",
                    headers: {"Content-Type": "text/plain"}, body: '{"scope": "fleet"}'}).then((r) => r.text()),
                new Promise((done) => {
                    const socket = new WebSocket(base.replace("http", "ws") + "/api/ws");
                    socket.onopen = () => done("open"); socket.onerror = () => done(""); }),
                new Promise((done) => {
                    const frame = document.createElement("iframe"); frame.src = base + "/";
                    frame.onload = () => { try { done(frame.contentDocument.body.innerText) } catch { done("") } };
                    document.body.append(frame); }),
            ];
            return (await Promise.allSettled(tries)).map((each) => each.value || "");
        }""",
        house.base,
    )
    assert result == [""] * 5
    await page.evaluate(
        """(base) => {
            const form = document.createElement("form"); form.method = "post"; form.action = base + "/logout";
            document.body.append(form); form.submit(); }""",
        house.base,
    )
    await page.wait_for_url(f"{house.base}/logout")
    assert await house.office.heads() == before
    assert [each["name"] for each in await page.context.cookies()] == [f"halter_{house.port}"]
