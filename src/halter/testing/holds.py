"""Money held for an intent that no door asked for: for tests of the ledger, the stores and the projections."""

from collections.abc import Sequence
from functools import partial

import msgspec

from halter.core.events import CallStarted, CostCapReached, RequestStarted
from halter.core.ids import Digest, session_stream
from halter.core.limits import outdated, rolled
from halter.core.money import CapReached, Reserved, reserve
from halter.core.ports import Draft, Lease, Rows, Write
from halter.core.project import budget_row, rows_of_hold
from halter.core.rows import HoldRow
from halter.guard.flight import StillHeld
from halter.guard.policies import legs_within
from halter.guard.purse import Purse
from halter.state.session import InFlight, call_in_flight, request_in_flight

Intent = CallStarted | RequestStarted


class HoldTaken(msgspec.Struct, frozen=True):
    """The intent is committed and its money is held."""

    flight: InFlight


class HoldRefused(msgspec.Struct, frozen=True):
    """A cap is reached; the refusal is recorded."""

    event: CostCapReached


async def hold(
    purse: Purse, lease: Lease, intent: Intent, body: bytes | None = None, attempt: int = 0
) -> HoldTaken | HoldRefused | StillHeld:
    """Commit an intent with its hold, as a door does: it waits for other holds where that can make room."""

    def write(now: int) -> Write:
        asked = msgspec.structs.replace(intent, legs=rolled(intent.legs, now))
        key, rows = f"{intent_id(asked)}/held/{attempt}", rows_of_hold(intent_id(asked), asked.legs)
        return Write(session_stream(lease.session), key, partial(decide_hold, asked, body=body), rows, lease)

    committed = await purse.commit_intent(write, purse.patience)
    for stored in () if committed is None else committed.events:
        match stored.event:
            case CostCapReached() as refusal:
                return HoldRefused(refusal)
            case CallStarted() as held:
                return HoldTaken(call_in_flight(held, stored))
            case RequestStarted() as held:
                return HoldTaken(request_in_flight(held, stored))
            case _:
                pass
    return StillHeld(intent_id(intent))


def intent_id(intent: Intent) -> str:
    """Return the id of a call or a request, which is also the id of its hold."""
    return intent.call if isinstance(intent, CallStarted) else intent.request


def decide_hold(intent: Intent, rows: Rows, body: bytes | None = None, blob: Digest | None = None) -> Sequence[Draft]:
    """Decide on an intent: the intent with its hold, the refusal, or nothing where it must wait.

    Money of a window that is over is not held either: the next attempt asks for that of the window after it.
    """
    if intent.legs and rows.get(HoldRow, intent_id(intent)) is not None:
        raise ValueError(f"{intent_id(intent)} is held already: settle it, or repeat the attempt that held it.")
    if outdated(intent.legs, rows.now):
        return []
    verdict = reserve(legs_within(intent.legs, rows), lambda leg: budget_row(rows, leg))
    match verdict:
        case Reserved():
            return [Draft(msgspec.structs.replace(intent, legs=verdict.legs), body, blob)]
        case CapReached():
            name = intent.tool if isinstance(intent, CallStarted) else intent.model
            return [Draft(CostCapReached.refusing(intent_id(intent), name, verdict))]
        case _:
            return []
