"""What waits for a person, and how each kind of it is put before them."""

from collections.abc import Sequence

import msgspec

from halter.app import App
from halter.cli.command import WRONG_USE, fail
from halter.core.durations import shown_duration
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


async def waiting(app: App) -> list[Waiting]:
    """List what a person can still decide, the longest waiting first."""
    now = app.clock.now()
    return [one for one in await app.store.ask(Query("open_decisions", Waiting)) if one.expires_at > now]


def meant(open_ones: Sequence[Waiting], decision: str) -> Waiting:
    """Find the one decision whose id begins as was typed; say so if there is none, or more than one."""
    found = [one for one in open_ones if one.decision.startswith(decision)]
    exact = [one for one in found if one.decision == decision]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        return fail(f"No open decision begins with {decision!r}: look at `halter inbox`.", WRONG_USE)
    return fail(f"{decision!r} could be any of {', '.join(one.decision for one in found)}.", WRONG_USE)


def as_object(one: Waiting) -> dict[str, object]:
    """Write a decision for programs."""
    names = ("decision", "about", "session", "agent", "subject", "name", "level", "risk", "asked_at", "expires_at")
    return {
        **{name: getattr(one, name) for name in names},
        "digest": one.digest,
        "reasons": one.reasons,
        "shown": one.shown,
    }


def as_facts(one: Waiting, now: int) -> list[tuple[str, str]]:
    """Write a decision for people: what it is about, and what a yes or a no does."""
    what, shown, yes, no = _words(one)
    return [
        ("decision", one.decision),
        ("what", what),
        ("why", "; ".join(one.reasons)),
        ("shown", shown),
        ("agent", f"{one.agent}, session {one.session}" if one.session else one.agent),
        (
            "waits",
            f"{shown_duration(max(0, now - one.asked_at))}, for at most {shown_duration(one.expires_at - now)} more",
        ),
        ("yes", yes),
        ("no", no),
    ]


def _words(one: Waiting) -> tuple[str, str, str, str]:
    """Say what a decision is about, what its maker is shown, and what a yes and a no mean and how to type them."""
    yes, no = f"halter approve {one.decision}", f"halter deny {one.decision}"
    match one.about:
        case "unknown_call":
            what = f"{one.name} was begun, and then the process died: was it done?"
            return what, "", f"It was done, and is not done again: {yes}", f"It was not done, and is tried anew: {no}"
        case "cap_raise":
            what = f"{one.name} needs more money than the cap of {one.subject} leaves."
            return what, one.shown, f"Set a higher cap, in dollars: {yes} --cap AMOUNT", f"The session ends: {no}"
        case "changed_tool":
            what = f"{one.name} is new or has changed since somebody agreed to it."
            return what, one.shown, f"It may be used as it is now: {yes}", f"It stays out of use: {no}"
        case "schedule":
            what = f"May {one.agent} do this by itself, at these times?"
            return what, one.shown, f"It is planned exactly so: {yes}", f"Nothing is planned: {no}"
        case "proposal":
            what = f"Shall this {one.name} be kept for later sessions of {one.agent}?"
            return what, one.shown, f"It is kept: {yes}", f"It is dismissed: {no}"
        case _:
            danger = f"{one.level}, risk {one.risk}" if one.risk else one.level
            what = f"May {one.name} be called? ({danger})"
            return what, one.shown.removeprefix(f"{one.name} "), f"Exactly this, once: {yes}", f"No: {no}"
