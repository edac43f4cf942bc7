"""What sessions left behind, and what a person makes of it."""

from collections.abc import Sequence
from typing import Literal

from halter.app import keeping
from halter.app.desk.desk import MOST_NAMES, Desk, meant, readable, refused
from halter.app.keeping import Left
from halter.core.left import Kept

Among = Literal["findings", "proposals"]


async def findings(desk: Desk, session: str = "", limit: int = keeping.NEWEST) -> Sequence[Left]:
    """List what sessions found, or one of them, the newest first."""
    store = desk.app.store
    if session:
        found = await keeping.findings_of(store, session)
    else:
        found = [left for name in desk.who.agents or ("",) for left in await keeping.findings(store, name, limit)]
    seen = [left for left in found if desk.who.sees(left.agent)]
    return sorted(seen, key=lambda left: left.at, reverse=True)[:limit]


async def proposals(desk: Desk) -> Sequence[Left]:
    """List what sessions propose to be kept, the newest first."""
    return [left for left in await keeping.proposals(desk.app.store) if desk.who.sees(left.agent)]


async def left_meant(desk: Desk, wanted: str, among: Among, *, whole: bool = False) -> Left:
    """Find what an id names by its beginning."""
    if among == "findings":
        named = await keeping.findings_named(desk.app.store, readable(wanted, "an id"), MOST_NAMES + 1)
        found: Sequence[Left] = [left for left in named if desk.who.sees(left.agent)]
    else:
        found = await proposals(desk)
    none = f"None of them {'is called' if whole else 'begins with'} {wanted!r}: look at halter {among}."
    return meant([(left.id, left) for left in found], wanted, none, whole=whole)


async def settle(desk: Desk, wanted: str, status: Kept, among: Among, reason: str = "", *, whole: bool = True) -> str:
    """Let a person say what becomes of something; name it."""
    desk.demand("approver", "decide what is kept")
    left = await left_meant(desk, wanted, among, whole=whole)
    if not await keeping.settle(desk.app, left, status, reason, by=desk.who.name):
        refused(f"{left.id} was decided by somebody else at this very moment.")
    return left.id
