"""The receipt of a session: a pure function of its events.

It says what the session did, saw and spent, and why it ended; anyone who has the events can make it again.
"""

from collections.abc import Iterable

import msgspec

from halter.core.events import (
    CallSettled,
    CallStarted,
    CostCapReached,
    Outcome,
    OverrunIncurred,
    Purpose,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionKind,
    SessionParked,
    SessionStarted,
    SessionWoken,
    State,
    Unknown,
)
from halter.core.money import Charge, Leg
from halter.core.ports import Stored
from halter.core.usage import Usage


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call or request: what was held for it and what it cost. Without an outcome it is in doubt."""

    id: str
    name: str
    purpose: Purpose
    started_at: int
    held_usd: int = 0
    cost_usd: int = 0
    outcome: Outcome | None = None
    settled_at: int | None = None
    usage: Usage | None = None


class Brake(msgspec.Struct, frozen=True):
    """One time that a brake refused something."""

    code: str
    at: int
    refused: str
    name: str
    scope: str
    window: str


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a session leaves in a person's hand. Amounts are micro-dollars, times microseconds."""

    session: str = ""
    agent: str = ""
    kind: SessionKind = "task"
    started_by: str = ""
    trigger: str = ""
    parent: str = ""
    definition: str = ""
    state: State = "RUNNING"
    terminal_reason: str = ""
    started_at: int = 0
    ended_at: int | None = None
    wakes: int = 0
    cost_usd: int = 0
    held_usd: int = 0
    calls: tuple[Line, ...] = ()
    requests: tuple[Line, ...] = ()
    brakes: tuple[Brake, ...] = ()
    overruns: tuple[OverrunIncurred, ...] = ()
    in_doubt: tuple[str, ...] = ()
    events: int = 0
    erased: int = 0
    unknown: int = 0
    hash: str = ""


def receipt(events: Iterable[Stored]) -> Receipt:
    """Make the receipt of a session from its own stream."""
    made = Receipt()
    calls: dict[str, Line] = {}
    requests: dict[str, Line] = {}
    for stored in events:
        made = _head(made, stored)
        match stored.event:
            case CallStarted(call=call, tool=tool, purpose=purpose, legs=legs):
                calls[call] = Line(call, tool, purpose, stored.at, _usd(legs))
            case CallSettled(call=call, outcome=outcome, charge=charge):
                calls[call] = _settled(calls[call], stored, outcome, charge, None)
            case RequestStarted(request=request, model=model, purpose=purpose, legs=legs):
                requests[request] = Line(request, model, purpose, stored.at, _usd(legs))
            case RequestSettled(request=request, outcome=outcome, charge=charge, usage=usage):
                requests[request] = _settled(requests[request], stored, outcome, charge, usage)
            case _:
                made = _other(made, stored)
    lines = [*calls.values(), *requests.values()]
    return msgspec.structs.replace(
        made,
        calls=tuple(calls.values()),
        requests=tuple(requests.values()),
        cost_usd=sum(line.cost_usd for line in lines),
        held_usd=sum(line.held_usd for line in lines),
        in_doubt=tuple(line.id for line in lines if line.outcome is None),
    )


def _head(made: Receipt, stored: Stored) -> Receipt:
    return msgspec.structs.replace(made, events=stored.seq, erased=made.erased + stored.erased, hash=stored.hash.hex())


def _other(made: Receipt, stored: Stored) -> Receipt:
    event = stored.event
    match event:
        case SessionStarted():
            return msgspec.structs.replace(
                made,
                session=event.session,
                agent=event.agent,
                kind=event.kind,
                started_by=event.started_by,
                trigger=event.trigger,
                parent=event.parent,
                definition=event.definition,
                started_at=stored.at,
            )
        case SessionWoken():
            return msgspec.structs.replace(made, state="RUNNING", wakes=made.wakes + 1)
        case SessionParked():
            return msgspec.structs.replace(made, state=event.state)
        case SessionEnded():
            return msgspec.structs.replace(
                made, state=event.state, terminal_reason=event.terminal_reason, ended_at=stored.at
            )
        case CostCapReached():
            brake = Brake(event.KIND, stored.at, event.refused, event.name, event.scope, event.window)
            return msgspec.structs.replace(made, brakes=(*made.brakes, brake))
        case RequestRefused():
            return _request_refused(made, stored.at, event)
        case OverrunIncurred():
            return msgspec.structs.replace(made, overruns=(*made.overruns, event))
        case Unknown():
            return msgspec.structs.replace(made, unknown=made.unknown + 1)
        case _:
            return made


def _request_refused(made: Receipt, at: int, event: RequestRefused) -> Receipt:
    """Show a refusal as a brake; one by a cap is shown already, with the cap that it met."""
    if any(brake.refused == event.request for brake in made.brakes[-1:]):
        return made
    brake = Brake(event.outcome, at, event.request, event.model, "", "")
    return msgspec.structs.replace(made, brakes=(*made.brakes, brake))


def _settled(line: Line, stored: Stored, outcome: Outcome, charge: Charge | None, usage: Usage | None) -> Line:
    return msgspec.structs.replace(
        line, outcome=outcome, settled_at=stored.at, usage=usage, cost_usd=charge.usd if charge else 0
    )


def _usd(legs: tuple[Leg, ...]) -> int:
    return max((leg.amount for leg in legs if leg.unit == "usd"), default=0)
