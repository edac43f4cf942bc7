"""A session: its turns, calls and brakes over time, what happens, what it knows, what was said, what it may be told."""

from collections.abc import Callable, Sequence

from nicegui.element import Element

from halter.app.desk import looking, steering
from halter.app.words.moments import hour, moment
from halter.app.words.told import told
from halter.core.events import Unknown
from halter.core.ids import session_stream
from halter.core.ports import Stored
from halter.core.rows import SessionRow
from halter.server.dashboard.asking import REASON, Field, Given, ask
from halter.server.dashboard.charts import timeline
from halter.server.dashboard.knowing import Knowing
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, box, button, facts, link, part, words
from halter.server.dashboard.plot import Plot
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.saying import Saying
from halter.server.dashboard.spans import LANES, spans_of

TAIL = 400
"""So many of the newest events are drawn and searched for words; the receipt and the export tell of all of them."""
LISTED = 100
"""So many of them stand in the list: each line takes its time to make, in which no agent gets on."""


async def session(room: Room, name: str) -> Refresh:
    """Put the page together."""
    row = await room.desk.session(name)
    with part("Session", card=True):
        head = box("div")
        _buttons(room, row)
    with part("Turns, calls and brakes", card=True):
        plot = Plot("Turns, requests, calls and brakes over time", "Nothing happened yet.")
    with box("div", "h-two"):
        with part("What happens", card=True):
            lines = Kept[Stored](box("ol", "h-events", "Events", tabindex="0"), _event, "Nothing happened yet.")
        with part("What it knows", card=True):
            knowing = Knowing(room, row.session)
    with part("What was said", card=True):
        saying = Saying(room)

    async def refresh(grown: Grown) -> None:
        await knowing.show()
        if not grown.of(session_stream(row.session)):
            return
        events = await looking.newest_events(room.desk, row.session, TAIL)
        _show_head(room, head, await room.desk.session(row.session))
        plot.show(timeline(spans_of(events, room.now), LANES), empty=not spans_of(events, room.now))
        lines.show({stored.seq: stored for stored in reversed(events[-LISTED:])})
        await saying.show(events)
        await knowing.show_history(events)

    await refresh(Grown(everything=True))
    return refresh


def _show_head(room: Room, head: Element, row: SessionRow) -> None:
    head.clear()
    with head:
        facts(_facts(room, row))


def _facts(room: Room, row: SessionRow) -> Sequence[tuple[str, str]]:
    return [
        ("agent", f"{row.agent} ({row.kind})"),
        ("state", f"{row.state} {row.terminal_reason}".strip()),
        ("began", moment(row.started_at, room.now)),
        ("ended", moment(row.ended_at, room.now) if row.ended_at else ""),
        ("next wake", moment(row.due_at, room.now) if row.due_at else ""),
        ("trigger", row.trigger),
        ("part of", row.parent),
    ]


def _event(stored: Stored) -> Callable[[Stored], None]:
    kind = stored.event.kind if isinstance(stored.event, Unknown) else stored.event.KIND
    with box("li"):
        words(hour(stored.at), "h-at")
        words(kind.replace("_", " "), "h-kind")
        words(told(stored.event))
    return lambda _: None


def _buttons(room: Room, row: SessionRow) -> None:
    with box("div", "h-row").style("margin-top: 0.7rem"):
        link("Receipt", f"/receipt/{row.session}")
        link("Export", f"/download/session/{row.session}").props["download"] = ""
        if room.may("operator") and row.ended_at is None:
            button("Message…", lambda: _message(room, row))
            button("Cancel session…", lambda: _cancel(room, row), "stop")


def _message(room: Room, row: SessionRow) -> None:
    async def do(given: Given) -> str:
        await steering.tell(room.desk, row.session, given["text"])
        return f"{row.session} is told, and wakes."

    text = Field("text", "Your words", "", "text")
    ask(room, f"Say something to {row.session}?", "It sees your words in its next turn.", (text,), "Say it", do)


def _cancel(room: Room, row: SessionRow) -> None:
    async def do(given: Given) -> str:
        came = await steering.cancel(room.desk, row.session, given["reason"])
        return f"Session {came.session} is cancelled. {came.sentence}"

    says = "It ends for good: what it has in flight is stopped, and nothing of it starts again."
    ask(room, f"Cancel {row.session}?", says, (REASON,), "Cancel the session", do, "stop")
