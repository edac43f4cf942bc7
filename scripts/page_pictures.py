"""Screenshots of every page of the dashboard, in both themes, in desktop and phone size.

`make pictures` writes them to `.pictures`, which git ignores. The pages are those of `halter demo`: the recorded night,
and the live agent while it waits for approval.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / ".pictures"
SIZES: Final = {"desk": (1440, 900), "phone": (390, 844)}
PAGES: Final = {
    "home": "/",
    "fleet": "/fleet",
    "agent": "/agent/night-watch",
    "sessions": "/sessions",
    "session": "/session/watchman-1",
    "session-asks": "/session/night-watch-1",
    "receipt": "/receipt/watchman-1",
    "findings": "/findings",
    "triggers": "/triggers",
    "budgets": "/budgets",
    "audit": "/audit",
    "not-found": "/nowhere",
}
SCHEMES: Final = ("light", "dark")
PATIENCE_MS: Final = 120_000
SETTLE_MS: Final = 400


def find_browser() -> str | None:
    """Find a browser, preferably the headless one, which takes half the time."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@contextmanager
def _run_demo(state: str) -> Iterator[str]:
    """Run the demo, and yield the address that opens its dashboard."""
    halter = str(Path(sys.executable).with_name("halter"))
    environ = {**os.environ, "XDG_STATE_HOME": state}
    with subprocess.Popen(
        [halter, "demo", "--no-browser"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            matches = (re.search(r"http://\S+/login#token=\S+", line) for line in demo.stdout or ())
            yield next(address[0] for address in matches if address)
        finally:
            demo.send_signal(signal.SIGINT)


def _take(page: Any, base: str, names: Sequence[str], *, whole: bool) -> None:
    """Load each page once, and take a screenshot in every theme and size."""
    for name in names:
        page.goto(f"{base}{PAGES[name]}")
        page.wait_for_function("() => window.socket && window.socket.connected")
        page.wait_for_load_state("networkidle")
        for size, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                page.wait_for_function(f"() => document.body.classList.contains('body--{scheme}')")
                # Charts are redrawn for another width, with a delay.
                page.wait_for_timeout(SETTLE_MS)
                picture = FOLDER / f"{name}-{scheme}-{size}.png"
                page.screenshot(path=picture, animations="disabled", full_page=whole)


def main() -> None:
    """Take screenshots of the given pages, or of all."""
    from playwright.sync_api import sync_playwright

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=tuple(PAGES), help="pages to take (default: all)")
    parser.add_argument("--whole", action="store_true", help="take the full page instead of the first screen")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="halter-pictures-") as state,
        _run_demo(state) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        # The old file is found after half a minute.
        page.get_by_role("article", name="wants to delete leftover.tmp").wait_for()
        _take(page, address.partition("/login")[0], options.pages, whole=options.whole)
        browser.close()


if __name__ == "__main__":
    main()
