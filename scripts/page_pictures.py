"""Pictures of every page of the dashboard, in both themes, on a desk and on a phone, for people to look at.

`make pictures` leaves them in `.pictures`, which git ignores. The pages are those of `halter demo`: the worst night,
and the live agent while it asks.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
PATIENCE_MS: Final = 120_000


@contextmanager
def _run_demo(state: str) -> Iterator[str]:
    """Run the demo, and yield the address that opens its dashboard."""
    halter = str(Path(sys.executable).with_name("halter"))
    environ = {**os.environ, "XDG_STATE_HOME": state}
    with subprocess.Popen(
        [halter, "demo", "--no-browser"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        try:
            found = (re.search(r"http://\S+/login#token=\S+", line) for line in demo.stdout or ())
            yield next(address[0] for address in found if address)
        finally:
            demo.send_signal(signal.SIGINT)


def _take(browser: Any, address: str, scheme: str) -> None:
    base = address.partition("/login")[0]
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(address)
    # The old file is found after half a minute.
    page.get_by_role("article", name="wants to call delete_file").wait_for()
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for name, path in PAGES.items():
            page.goto(f"{base}{path}")
            page.wait_for_function("() => window.socket && window.socket.connected")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=FOLDER / f"{name}-{scheme}-{size}.png", animations="disabled")
    context.close()


def main() -> None:
    """Take all pictures anew."""
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="halter-pictures-") as state,
        _run_demo(state) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            _take(browser, address, scheme)
        browser.close()


if __name__ == "__main__":
    main()
