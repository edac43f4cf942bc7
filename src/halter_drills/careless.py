"""Purses with a mistake in them, for the teeth of the race."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from halter.core.events import AnyEvent, CallStarted, CostCapReached
from halter.core.ids import session_stream
from halter.core.money import BudgetRow, CapReached, Leg, MustWait, reserve
from halter.core.ports import Draft, Lease, Query, Rows, Write
from halter.core.project import rows_of_hold
from halter.core.row import Row
from halter.core.rows import FleetPolicyRow
from halter.guard.chokepoint import Answer
from halter.guard.flight import StillHeld
from halter.guard.judge import Asked, cap_sentence, uncapped
from halter.guard.weigh import Asking
from halter.state.session import InFlight
from halter_drills.spenders import surely
from halter_drills.till import Refusal, Till

R = TypeVar("R", bound=Row)


class ObeysItsFolder(Till):
    """The mistake that the race must see in folders: a process goes by the caps that it has read itself."""

    def intent(self, lease: Lease, asked: Asked | Asking) -> Write:
        """Decide without a look at the store's policy."""
        write = super().intent(lease, asked)

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


class CheckThenSpend(Till):
    """The mistake that the race must see: it looks at the budget first, and spends in another transaction.

    Because the store's own constraint would stop it even so, it does not tell the store of any cap.
    """

    async def admit(self, lease: Lease, asked: Asked | Asking) -> InFlight | Refusal | StillHeld:
        """Decide on what the budgets were a moment ago."""
        if isinstance(asked, Asking):
            return await super().admit(lease, asked)
        found = await self._store.ask(Query("budgets", BudgetRow))
        rows = {(row.scope, row.window, row.unit): row for row in found}
        verdict = reserve(
            asked.legs,
            lambda leg: rows.get((leg.scope, leg.window, leg.unit)) or BudgetRow(leg.scope, leg.window, leg.unit),
        )
        if isinstance(verdict, MustWait):
            return StillHeld(asked.call)
        legs = uncapped(asked.legs)
        if isinstance(verdict, CapReached):
            refusal = CostCapReached.refusing(asked.call, asked.tool, verdict)
            await self._blindly(lease, asked.call, refusal, legs)
            return Answer(asked.call, "cost_cap_reached", cap_sentence(verdict), cap=refusal)
        await self._blindly(lease, asked.call, CallStarted(call=asked.call, tool=asked.tool, legs=legs), legs)
        return InFlight(asked.call, asked.tool, "turn", legs, self._clock.now(), is_call=True)

    async def _blindly(self, lease: Lease, call: str, event: AnyEvent, legs: tuple[Leg, ...]) -> None:
        """Commit what was decided before, whatever the rows say by now."""
        stream, reads = session_stream(lease.session), rows_of_hold(call, legs)
        write = Write(stream, f"{call}/held", lambda _: [Draft(event)], reads, lease)
        await surely(lambda: self._store.commit(write), self._clock)
