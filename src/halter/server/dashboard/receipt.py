"""A receipt, as `halter receipt` shows it."""

from halter.app.desk import looking
from halter.app.words.receipt import sheet_of
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import box, link, part, sheet
from halter.server.dashboard.room import Refresh, Room


async def receipt(room: Room, name: str) -> Refresh:
    """Put the page together. It shows the receipt as it was when the page was opened."""
    made = await looking.receipt(room.desk, name)
    with part(f"Receipt of {made.session}", card=True):
        with box("div", "h-row"):
            link("Session", f"/session/{made.session}")
            link("Export with its journal", f"/download/session/{made.session}").props["download"] = ""
        sheet(sheet_of(made))

    async def refresh(_: Grown) -> None:
        pass

    return refresh
