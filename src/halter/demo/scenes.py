"""The incidents of the worst night: what lies in the folder, who works there, and how that is done without Halter."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.clock import HOUR, MINUTE, SECOND, Clock
from halter.demo import plain, scripts
from halter.demo.provider import MODEL, Script

DESK: Final = "desk"
"""Where the files lie that an agent works on, apart from those that it is made of."""

SHARED: Final = f"""
model: {MODEL}
tools:
  files: {{root: {DESK}}}"""

BOOKKEEPER: Final = f"""name: bookkeeper{SHARED}
watches:
  - name: invoices
    path: desk/inbox
    prompt: An invoice has come in. Compare it with its scan, and book it.
    max_attempts: 3
"""

WATCHMAN: Final = f"""name: watchman{SHARED}
autonomy:
  enabled: true
  idle_timeout: 0
  gate: {{on: change}}
sensors:
  - name: status
    type: poll
    interval: 1m
    jitter: 0
    source: {{tool: read_file, params: {{path: status.json}}}}
"""

ANALYST: Final = f"""name: analyst
model: {MODEL}
verbs: [emit_finding]
watches:
  - name: reports
    path: desk/inbox
    prompt: Write the report that is asked for.
    max_parallel: 20
    max_cost_usd_per_day: 1.00
"""

INVOICES: Final = 6
STUCK: Final = 4
"""The invoice whose scan never comes."""
REPORTS: Final = 20
CHANGES: Final = ((3 * HOUR, 41), (3 * HOUR + 20 * MINUTE, 2))
"""When the queue of the heartbeat's night fills and empties, and how many then wait in it."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. In `frame`s of time its `span` passes; `meanwhile` is what happens in the world while it does."""

    name: str
    title: str
    happens: str
    agent: str
    handbook: int
    script: Script
    furnish: Callable[[Path], None]
    without: Callable[[plain.Loop], Coroutine[Any, Any, None]]
    meanwhile: Callable[[Path, Clock], Coroutine[Any, Any, None]]
    span: int = 8 * HOUR
    frame: int = 4 * MINUTE


def handbook(rules: int) -> str:
    """Write the instructions of an agent, as long as such things are."""
    rule = "{}. What concerns account {} is checked against the ledger first, and told to the owner if it differs.\n"
    return "# Handbook\n\n" + "".join(rule.format(number, 4000 + 7 * number) for number in range(1, rules + 1))


def _invoices(folder: Path) -> None:
    for number in range(1, INVOICES + 1):
        lines = "".join(f"{line} pieces of item {1000 * number + line}, at 12.50 each\n" for line in range(1, 150))
        _write(folder / "inbox" / f"invoice-{number}.txt", f"Invoice {number}\n{lines}")
        if number != STUCK:
            _write(folder / "scans" / f"invoice-{number}.txt", f"Invoice {number}, scanned\n{lines}")


def _queue(folder: Path, waiting: int = 2) -> None:
    _write(folder / "status.json", msgspec.json.encode({"waiting": waiting, "failed": 0}).decode())


def _requests(folder: Path) -> None:
    for number in range(1, REPORTS + 1):
        _write(folder / "inbox" / f"report-{number:02}.txt", f"Please write report {number}.")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


async def _nothing(_folder: Path, _clock: Clock) -> None:
    """Let nothing happen."""


async def _fills(folder: Path, clock: Clock) -> None:
    """Let the queue fill once in the night, and empty again."""
    began = clock.now()
    for after, waiting in CHANGES:
        await clock.sleep(began + after - clock.now())
        _queue(folder, waiting)


SCENES: Final = (
    Scene(
        name="stuck_item",
        title="A stuck item",
        happens="One of 6 invoices lacks its scan, and is tried again all night.",
        agent=BOOKKEEPER,
        handbook=120,
        script=scripts.bookkeeper,
        furnish=_invoices,
        without=plain.book_all,
        meanwhile=_nothing,
    ),
    Scene(
        name="idle_heartbeat",
        title="An idle heartbeat",
        happens="An agent wakes every minute, although hardly anything changes.",
        agent=WATCHMAN,
        handbook=120,
        script=scripts.watchman,
        furnish=_queue,
        without=plain.look_around,
        meanwhile=_fills,
    ),
    Scene(
        name="parallel_runs",
        title="One cap, 20 runs",
        happens="20 reports are written at once, for at most $1.00 in all.",
        agent=ANALYST,
        handbook=300,
        script=scripts.analyst,
        furnish=_requests,
        without=plain.report_all,
        meanwhile=_nothing,
        span=10 * MINUTE,
        frame=5 * SECOND,
    ),
)
