"""The plan of the session that the drills work with: what it does, as data.

It holds every event kind there is, and every way in which money can be settled. Its amounts leave so much room
that the plan goes the same way when what a crash left in doubt was settled at its maximum.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from halter.core.events import WakePosted
from halter.core.ids import session_stream
from halter.core.limits import Cap, Caps
from halter.core.money import DOLLAR, dollars
from halter.core.usage import Usage
from halter.core.vocabulary import Cause, Purpose, State
from halter.guard.purse import Truth

AGENT: Final = "night-watch"
HELPER: Final = "reader"
TRIGGER: Final = "nightly"
MODEL: Final = "scripted:drill"
BLOB_BYTES: Final = 40_000
TURNS: Final = 6

PLENTY: Final = 1_000_000 * DOLLAR
"""A cap that any number of these sessions stays under: what is refused here is refused by a session's own cap."""

CAPS: Final = Caps(
    session=Cap(1 * DOLLAR),
    trigger=(Cap(PLENTY, "month"),),
    agent=(Cap(PLENTY, "day"), Cap(PLENTY, "hour")),
    fleet=(Cap(PLENTY, "day"), Cap(None, "month")),
    token_budget=500_000,
)
CARVED: Final = dollars("0.10")
HELPER_CAPS: Final = Caps(session=Cap(CARVED), agent=CAPS.agent, fleet=CAPS.fleet)


@dataclass(frozen=True, slots=True)
class Begin:
    """The session begins, with its task as the body and its definition as a blob."""

    id: str
    session: str
    task: bytes
    definition: bytes


@dataclass(frozen=True, slots=True)
class Delegate:
    """A sub-session begins, with a cap carved out of this one's."""

    id: str
    session: str
    child: str
    task: bytes


@dataclass(frozen=True, slots=True)
class Say:
    """Something arrives in the session's inbox."""

    id: str
    session: str
    event: WakePosted
    body: bytes


@dataclass(frozen=True, slots=True)
class Attach:
    """Something arrives in the session's inbox that is too large for a body."""

    id: str
    session: str
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Wake:
    """The session is taken up, with all that is in its inbox."""

    id: str
    session: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class Spend:
    """One call or request: what is held for it, and what it turns out to be and to cost."""

    id: str
    what: Literal["call", "request"]
    name: str
    truth: Truth
    usd: int
    tokens: int = 0
    purpose: Purpose = "turn"
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Act:
    """Calls or requests that are in flight together."""

    session: str
    together: tuple[Spend, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """The session rests: due again at once, or until something in its inbox wakes it."""

    id: str
    session: str
    state: State = "SLEEPING"
    due: bool = True
    wake_on: tuple[str, ...] = ()
    resident: bool = False


@dataclass(frozen=True, slots=True)
class SetCap:
    """A person changes the cap of a scope."""

    id: str
    scope: str
    cap: int


@dataclass(frozen=True, slots=True)
class Erase:
    """A person has the bodies of a session that is over erased."""

    id: str
    session: str


@dataclass(frozen=True, slots=True)
class End:
    """The session is over."""

    session: str
    state: State
    terminal_reason: str


Step = Begin | Delegate | Say | Attach | Wake | Act | Rest | SetCap | Erase | End


def child_of(session: str) -> str:
    """Name the sub-session of a session."""
    return f"{session}-helper"


def spends(steps: tuple[Step, ...]) -> Iterator[Spend]:
    """Yield every call and request of a plan."""
    for step in steps:
        if isinstance(step, Act):
            yield from step.together


def plan(session: str, blob_bytes: int = BLOB_BYTES) -> tuple[Step, ...]:
    """Lay out the whole life of a session, with ids that nobody else has."""
    return (
        Begin(f"{session}/start", session, b"Watch the night.", b'{"agent": "night-watch"}'),
        Wake(f"{session}/first", session, "trigger"),
        *(step for turn in range(1, TURNS + 1) for step in _turn(session, turn)),
        _attached(session, blob_bytes),
        Wake(f"{session}/attached", session, "webhook"),
        SetCap(f"{session}/raise", session_stream(session), 2 * DOLLAR),
        *_delegated(session),
        *_closing(session),
    )


def _turn(session: str, turn: int) -> Iterator[Step]:
    """One turn: think, act, think, rest, and be woken; each in a way of its own."""
    name = f"{session}/turn-{turn}"
    yield Act(session, (_request(f"{name}/think", "turn", turn),))
    yield Act(session, tuple(_call(f"{name}/act-{number}", turn + number) for number in range(1 + turn % 2)))
    yield Act(session, (_request(f"{name}/conclude", "gate" if turn % 2 else "judge", turn + 1),))
    match turn % 3:
        case 0:
            yield Rest(f"{name}/rest", session, resident=True)
            yield Wake(f"{name}/wake", session, "timer")
        case 1:
            yield Rest(f"{name}/rest", session, due=False, wake_on=("price_drop", "disk_full"))
            yield Say(f"{name}/other-signal", session, _signal("new_moon"), b"A signal nobody waits for.")
            yield Say(f"{name}/signal", session, _signal("price_drop"), b"\xff\x00 not text \xed\xa0\x80")
            yield Wake(f"{name}/wake", session, "signal")
        case _:
            yield Rest(f"{name}/rest", session, state="WAITING_FOR_INPUT")
            yield Say(f"{name}/message", session, _message("ada"), f"Good night {turn}, \u263d".encode())
            yield Wake(f"{name}/wake", session, "message")


def _delegated(session: str) -> Iterator[Step]:
    """A sub-session that spends beyond its cap, and is settled with its parent all the same."""
    child = child_of(session)
    yield Delegate(f"{child}/start", session, child, b"Read what was attached.")
    yield Rest(f"{session}/awaiting-helper", session, state="WAITING_FOR_TOOL", due=False)
    yield Wake(f"{child}/first", child, "trigger")
    yield Act(child, (_request(f"{child}/think", "turn", 1),))
    over = Truth("ok", usd=dollars("0.15"), tokens=0, body=b"It was a long document.")
    yield Act(child, (Spend(f"{child}/read", "call", "read_document", over, dollars("0.01")),))
    yield End(child, "BUDGET_EXCEEDED", "cost_cap_reached")
    yield Say(f"{child}/told", session, WakePosted(cause="child", origin="agent", sender=child), b"It is over.")
    yield Wake(f"{session}/helped", session, "child")


def _closing(session: str) -> Iterator[Step]:
    """What is refused, what costs nothing, what costs more than was held; and the end."""
    name = f"{session}/closing"
    yield Act(session, (Spend(f"{name}/too-dear", "call", "buy_house", Truth("ok"), 5 * DOLLAR),))
    yield Act(session, (Spend(f"{name}/free", "call", "look_around", Truth("ok", body=b"All is quiet."), 0),))
    released = Truth("error", usd=0, tokens=0)
    yield Act(session, (Spend(f"{name}/unbilled", "request", MODEL, released, dollars("0.02"), 2000),))
    over = Truth("ok", usd=dollars("0.03"), tokens=0)
    yield Act(session, (Spend(f"{name}/dearer", "call", "translate", over, dollars("0.02")),))
    yield SetCap(f"{session}/lower", session_stream(child_of(session)), dollars("0.05"))
    yield Erase(f"{session}/erase", child_of(session))
    yield End(session, "COMPLETED", "completed")


def _request(spend: str, purpose: Purpose, size: int) -> Spend:
    usage = Usage(1000 * size, 100 * size, 400 * size, 200 * size)
    truth = Truth("ok", usd=dollars("0.004") + size, tokens=usage.uncached, usage=usage, body=b"I think so. " * size)
    return Spend(spend, "request", MODEL, truth, dollars("0.01"), 2000 * size, purpose)


def _call(spend: str, size: int) -> Spend:
    truth = Truth("error" if size % 4 == 0 else "ok", usd=dollars("0.001") * size, tokens=0, body=b"\x00" * size)
    return Spend(spend, "call", "fetch_page", truth, dollars("0.02"), body=b'{"page": %d}' % size)


def _message(sender: str) -> WakePosted:
    return WakePosted(cause="message", origin="person", sender=sender, trusted=True)


def _signal(name: str) -> WakePosted:
    return WakePosted(cause="signal", origin="sensor", sender="drill", name=name)


def _attached(session: str, size: int) -> Attach:
    data = b"".join(b"%08d" % number for number in range(-(-size // 8)))[:size]
    return Attach(f"{session}/attach", session, "report.txt", data)
