"""What sessions left behind, and what a person makes of it."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from halter.app import keeping
from halter.app.desk.desk import MOST_NAMES, Desk, readable, refused
from halter.app.desk.operation import Done, Limit, Name, Reason
from halter.app.keeping import Left
from halter.core.left import Kept

Among = Literal["findings", "proposals"]
LeftName = Annotated[Name, Meta(description="Its id.", extra={"metavar": "ID"})]
Verdict = Annotated[Literal["kept", "dismissed"], Meta(description="What becomes of it.")]
OfSession = Annotated[Name, Meta(description="Only those of this session.", extra={"metavar": "SESSION"})]


async def findings(desk: Desk, session: OfSession = "", limit: Limit = keeping.NEWEST) -> Sequence[Left]:
    """List what sessions found, the newest first."""
    store = desk.app.store
    if session and desk.short_ids:
        session = (await desk.session(session)).session
    if session:
        found = await keeping.findings_of(store, session)
    else:
        found = [left for name in desk.who.agents or ("",) for left in await keeping.findings(store, name, limit)]
    seen = [left for left in found if desk.who.sees(left.agent)]
    return sorted(seen, key=lambda left: left.at, reverse=True)[:limit]


async def proposals(desk: Desk) -> Sequence[Left]:
    """List what sessions propose to be kept, the newest first."""
    return [left for left in await keeping.proposals(desk.app.store) if desk.who.sees(left.agent)]


async def left_meant(desk: Desk, wanted: str, among: Among) -> Left:
    """Find the finding or the proposal that an id names."""
    if among == "findings":
        named = await keeping.findings_named(desk.app.store, readable(wanted, "an id"), MOST_NAMES + 1)
        found: Sequence[Left] = [left for left in named if desk.who.sees(left.agent)]
    else:
        found = await proposals(desk)
    return desk.meant([(left.id, left) for left in found], wanted, among.removesuffix("s"), f"halter {among}")


class Settled(Done, frozen=True):
    """What became of a finding or a proposal."""

    status: str


async def settle(desk: Desk, wanted: str, status: Kept, among: Among, reason: str = "") -> Settled:
    """Decide what becomes of a finding or a proposal."""
    desk.demand("approver", "decide what is kept")
    left = await left_meant(desk, wanted, among)
    if not await keeping.settle(desk.app, left, status, reason, by=desk.who.name):
        refused(f"{left.id} was decided by somebody else at this very moment.")
    return Settled(left.id, f"{left.id} is {status}.", status)


async def settle_finding(desk: Desk, finding: LeftName, status: Verdict, reason: Reason = "") -> Settled:
    """Keep or dismiss what a session found."""
    return await settle(desk, finding, status, "findings", reason)


async def settle_proposal(desk: Desk, proposal: LeftName, status: Verdict, reason: Reason = "") -> Settled:
    """Keep or dismiss what a session proposes."""
    return await settle(desk, proposal, status, "proposals", reason)
