"""Purses with a mistake in them, for the teeth of the race."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from halter.core.clock import Clock
from halter.core.events import AnyEvent, CallStarted, CostCapReached
from halter.core.ids import Digest, session_stream
from halter.core.money import BudgetRow, CapReached, Leg, MustWait, reserve
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.project import rows_of_hold
from halter.core.row import Row
from halter.core.rows import FleetPolicyRow
from halter.guard.purse import PATIENCE, Held, Intent, Purse, Refused, StillHeld, intent_id
from halter.state.session import InFlight
from halter_drills.spenders import surely

R = TypeVar("R", bound=Row)


class ObeysItsFolder(Purse):
    """The mistake that the race must see in folders: a process goes by the caps that it has read itself."""

    def _intending(self, lease: Lease, intent: Intent, body: tuple[bytes | None, Digest | None], attempt: int) -> Write:
        write = super()._intending(lease, intent, body, attempt)

        def decide(rows: Rows) -> Sequence[Draft]:
            return write.decide(_WithoutPolicy(rows))

        return msgspec.structs.replace(write, decide=decide)


class _WithoutPolicy:
    """The locked rows, without the one of the store's policy."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def now(self) -> int:
        """The store's time."""
        return self._rows.now

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row, and none for the policy."""
        return None if kind is FleetPolicyRow else self._rows.get(kind, *key)


class CheckThenSpend(Purse):
    """The mistake that the race must see: it looks at the budget first, and spends in another transaction.

    Because the store's own constraint would stop it even so, it does not tell the store of any cap.
    """

    def __init__(self, store: Store, clock: Clock, patience: int = PATIENCE) -> None:
        super().__init__(store, clock, patience)
        self._looked_at = store
        self._time = clock

    async def hold(
        self, lease: Lease, intent: Intent, body: bytes | None = None, attempt: int = 0
    ) -> Held | Refused | StillHeld:
        """Decide on what the budgets were a moment ago."""
        found = await self._looked_at.ask(Query("budgets", BudgetRow))
        rows = {(row.scope, row.window, row.unit): row for row in found}
        verdict = reserve(
            intent.legs,
            lambda leg: rows.get((leg.scope, leg.window, leg.unit)) or BudgetRow(leg.scope, leg.window, leg.unit),
        )
        if isinstance(verdict, MustWait):
            return StillHeld(intent.legs)
        uncapped = tuple(Leg(leg.scope, leg.window, leg.unit, None, leg.amount) for leg in intent.legs)
        call = intent_id(intent)
        if isinstance(verdict, CapReached):
            refusal = CostCapReached.refusing(call, "work", verdict)
            await self._blindly(lease, call, refusal, uncapped)
            return Refused(refusal)
        await self._blindly(lease, call, CallStarted(call=call, tool="work", legs=uncapped), uncapped)
        return Held(InFlight(call, "work", "turn", uncapped, self._time.now(), is_call=True))

    async def _blindly(self, lease: Lease, call: str, event: AnyEvent, legs: tuple[Leg, ...]) -> None:
        """Commit what was decided before, whatever the rows say by now."""
        stream, reads = session_stream(lease.session), rows_of_hold(call, legs)
        write = Write(stream, f"{call}/held", lambda _: [Draft(event)], reads, lease)
        await surely(lambda: self._looked_at.commit(write), self._time)
