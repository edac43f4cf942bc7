"""How every page looks and reads: in both themes, on a phone, and for somebody who does not see it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visitor
from tests.browser.house import House
from tests.browser.test_dashboard import PAGES
from tests.npm import NpmMissing, install_locked

HERE = Path(__file__).parent

# One worker has the house, and the browser before it.


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, house: House, browsers: Any) -> Iterator[Any]:
    """Each page is opened once, and looked at from all sides."""
    visitor = Visitor(house, browsers("admin", "light"))
    yield visitor.open(request.param)
    visitor.close()


@pytest.fixture(scope="package")
def axe() -> str:
    """The script of axe; where it cannot be had, skip loudly, or fail if everything is required."""
    try:
        return (
            install_locked(HERE, HERE.parents[1] / ".axe", "The tests with axe") / "axe-core" / "axe.min.js"
        ).read_text()
    except NpmMissing as missing:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(missing))
        pytest.skip(str(missing))


def find_faults(page: Any, scheme: str, script: str) -> Any:
    """What is wrong with a page in a theme. It may be drawn anew at that moment: what is wrong is so at each look."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(f"() => document.body.classList.contains('body--{scheme}')")
    result = page.evaluate(script)
    for _ in range(LOOKS - 1):
        result = result and page.evaluate(script)
    return result


LOOKS = 4


def test_axe_finds_nothing_serious(page: Any, axe: str) -> None:
    page.evaluate(axe)
    # What a theme changes is colours, and those of both have a test of their own, which is stricter.
    assert find_faults(page, "light", SERIOUS) == []


SERIOUS = """async () => (await axe.run(document, {
        resultTypes: ['violations'], preload: false, iframes: false, selectors: false})).violations
    .filter(found => ['serious', 'critical'].includes(found.impact))
    .map(found => [found.id, found.nodes.slice(0, 3).map(node => node.html.slice(0, 200))])"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(page: Any, scheme: str) -> None:
    assert find_faults(page, scheme, CONTRASTS) == []


def test_on_a_phone_no_page_has_to_be_pushed_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    expect(page.get_by_role("navigation", name="Pages")).to_be_in_viewport()
    expect(page.get_by_role("button", name="HALT ALL")).to_be_in_viewport()
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_page_has_landmarks_and_its_tables_have_headers(page: Any) -> None:
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
    for table in page.get_by_role("table").all():
        assert table.get_by_role("columnheader").count() > 0
    assert page.evaluate(NAMELESS) == 0
    assert page.locator("html").get_attribute("lang") == "en-US"


NAMELESS = "[...document.querySelectorAll('button')].filter(b => !b.innerText && !b.ariaLabel).length"

CONTRASTS = """() => {
    const parse = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    const ground = e => { for (; e; e = e.parentElement) {
        const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > .99) return c; }
        return [255, 255, 255]; };
    const bad = [];
    for (const e of document.querySelectorAll('body *')) {
        const words = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!words || !e.checkVisibility() || ['SCRIPT', 'STYLE', 'text', 'tspan'].includes(e.tagName)) continue;
        if (e.closest('.nicegui-error-popup, .q-icon, [disabled], #esm-fallback')) continue;
        const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.push([e.tagName, e.className, e.textContent.slice(0, 40), ratio.toFixed(2)]);
    }
    return bad;
}"""
