"""What waits for a person, and how each kind of it is put before them."""

import msgspec

from halter.app.desk.desk import Desk
from halter.core.ports import Query
from halter.guard.approvals import Open


class Waiting(Open, frozen=True):
    """A decision that waits, with the facts of the question."""

    facts: bytes | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the risk is what it is."""
        return msgspec.json.decode(self.facts, type=_Asked).reasons if self.facts else ()


class _Asked(msgspec.Struct, frozen=True):
    reasons: tuple[str, ...] = ()


class Put(msgspec.Struct, frozen=True):
    """How a decision is put before a person: what it is about, what they are shown, what a yes and a no do."""

    what: str
    shown: str
    yes: str
    no: str


async def waiting(desk: Desk) -> list[Waiting]:
    """List what a person can still decide, the longest waiting first."""
    now = desk.app.clock.now()
    rows = await desk.app.store.ask(Query("open_decisions", Waiting, {"now": now}))
    return [one for one in rows if desk.who.sees(one.agent)]


async def decision_meant(desk: Desk, decision: str) -> Waiting:
    """Find the open decision that an id names."""
    return desk.meant([(one.decision, one) for one in await waiting(desk)], decision, "open decision", "halter inbox")


def as_object(one: Waiting) -> dict[str, object]:
    """Write a decision for programs."""
    names = ("decision", "about", "session", "agent", "subject", "name", "level", "risk", "asked_at", "expires_at")
    return {
        **{name: getattr(one, name) for name in names},
        "digest": one.digest,
        "reasons": one.reasons,
        "shown": one.shown,
    }


def put(one: Waiting) -> Put:
    """Put a decision before a person."""
    match one.about:
        case "unknown_call":
            what = f"{one.name} was begun, and then the process died: was it done?"
            return Put(what, "", "It was done, and is not done again", "It was not done, and is tried anew")
        case "cap_raise":
            what = f"{one.name} needs more money than the cap of {one.subject} leaves."
            return Put(what, one.shown, "Set a higher cap, in dollars", "The session ends")
        case "changed_tool":
            what = f"{one.name} is new or has changed since somebody agreed to it."
            return Put(what, one.shown, "It may be used as it is now", "It stays out of use")
        case "changed_server":
            what = f"The server {one.name} of {one.agent} offers tools that nobody has agreed to."
            return Put(what, one.shown, "These may be used as they are now", "These stay out of use")
        case "schedule":
            what = f"May {one.agent} do this by itself, at these times?"
            return Put(what, one.shown, "It is planned exactly so", "Nothing is planned")
        case "proposal":
            what = f"Shall this {one.name} be kept for later sessions of {one.agent}?"
            return Put(what, one.shown, "It is kept", "It is dismissed")
        case _:
            danger = f"{one.level}, risk {one.risk}" if one.risk else one.level
            what = f"May {one.name} be called? ({danger})"
            return Put(what, one.shown.removeprefix(f"{one.name} "), "Exactly this, once", "No")
