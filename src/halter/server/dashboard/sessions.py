"""Sessions: all of them, the newest first."""

from collections.abc import Callable

from halter.app.desk import looking
from halter.app.words.moments import moment
from halter.core.rows import SessionRow
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, box, button, cell, link, part, table, words
from halter.server.dashboard.room import Refresh, Room

COLUMNS = ("session", "agent", "kind", "state", "began", "ended", "next wake", "trigger")
PAGE = 50


async def sessions(room: Room) -> Refresh:
    """Put the page together."""
    shown = [PAGE]
    with part("Sessions", card=True):
        lines = Kept[SessionRow](table("Sessions", COLUMNS), lambda row: _row(room, row))
        none = words("", "h-none")
        older = button("Older", lambda: None)

    async def refresh(_: Grown) -> None:
        rows = await looking.sessions(room.desk, limit=shown[0] + 1)
        lines.show({row.session: row for row in rows[: shown[0]]})
        older.set_visibility(len(rows) > shown[0])
        none.say("" if rows else "There is no session yet.")

    async def more() -> None:
        shown[0] += PAGE
        await refresh(Grown())

    older.on_click(more)
    await refresh(Grown())
    return refresh


def _row(room: Room, row: SessionRow) -> Callable[[SessionRow], None]:
    with box("tr"):
        with box("td"):
            link(row.session, f"/session/{row.session}")
        cell(row.agent)
        cell(row.kind)
        state = cell()
        cell(moment(row.started_at, room.now), "h-short")
        ended, wake = cell("", "h-short"), cell("", "h-short")
        cell(row.trigger)

    def show(row: SessionRow) -> None:
        state.say(f"{row.state} {row.terminal_reason}".strip())
        ended.say(moment(row.ended_at, room.now) if row.ended_at else "")
        wake.say(moment(row.due_at, room.now) if row.due_at else "")

    show(row)
    return show
