"""After a crash: what was begun and has no outcome. No effect happens twice, and nothing in doubt is forgotten."""

from typing import Final

import msgspec

from halter.core.clock import DAY
from halter.core.ports import Lease, Store
from halter.core.text import to_body
from halter.guard.approvals import Question, ask
from halter.guard.chokepoint import Act, Answer, Door, NeedsPerson
from halter.guard.purse import Purse, Truth
from halter.state.session import InFlight

WAITS: Final = 365 * DAY
"""How long a person may take to say what became of a call: its hold stays until then."""


class Doubt(msgspec.Struct, frozen=True):
    """A call in doubt, with what it takes to repeat it, if that is known."""

    flight: InFlight
    act: Act | None


class Recovery:
    """Brings every call that a crash left in doubt to an outcome, or before a person."""

    def __init__(self, store: Store, purse: Purse, door: Door) -> None:
        self._store = store
        self._purse = purse
        self._door = door

    async def resolve(self, lease: Lease, doubt: Doubt) -> Answer | NeedsPerson:
        """Repeat what may be repeated, ask the tool's own check, or else a person."""
        flight, act = doubt.flight, doubt.act
        if not flight.is_call:
            await self._purse.settle(lease, flight, Truth("unknown"))
            return Answer(flight.id, "unknown", "Nobody knows whether the model answered.", flight.most().usd)
        if act is None:
            return await self._ask(lease, flight)
        if flight.may_repeat:
            return await self._door.again(lease, flight, act)
        match await self._door.happened(flight, act) if act.tool.spec.checked else "unknown":
            case "done":
                return await self._settle(lease, flight, Truth("ok", body=to_body(DONE), audited=flight.audited))
            case "not_done":
                return await self._door.again(lease, flight, act)
            case "unknown":
                return await self._ask(lease, flight)

    async def said(self, lease: Lease, flight: InFlight, *, happened: bool) -> Answer:
        """Settle a call as a person says: it was done, or it was not and cost nothing."""
        truth = Truth("ok", body=to_body(DONE)) if happened else Truth("error", usd=0, tokens=0, error=NOT_DONE)
        return await self._settle(lease, flight, msgspec.structs.replace(truth, audited=flight.audited))

    async def _settle(self, lease: Lease, flight: InFlight, truth: Truth) -> Answer:
        await self._purse.settle(lease, flight, truth)
        return Answer(flight.id, truth.outcome, truth.error or DONE)

    async def _ask(self, lease: Lease, flight: InFlight) -> NeedsPerson:
        """Put a call in doubt before a person: yes means that it was done."""
        question = Question(
            decision=f"{flight.id}/unknown",
            about="unknown_call",
            subject=flight.id,
            name=flight.name,
            digest=flight.id,
            expires_in=WAITS,
            shown=f"{flight.name} was begun and nobody knows whether it was done. Was it?",
        )
        await self._store.commit(ask(question, lease))
        return NeedsPerson(flight.id, question.decision)


DONE: Final = "[It had been done before the crash.]"
NOT_DONE: Final = "NotDone: it had not been done before the crash"
