"""The money of one session: what it has spent, what its own caps leave, and whether one is near."""

from typing import NamedTuple

from halter.core.clock import Clock
from halter.core.events import CostCapReached
from halter.core.money import BudgetRow
from halter.core.ports import Lease, Query, Store
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.loop.session_journal import SessionJournal


class CapByPerson(NamedTuple):
    """A cap that a person set in place of the policy's; None is no cap."""

    usd: int | None


class RemainingBudget(NamedTuple):
    """What a session's own caps leave; None where no cap binds it."""

    usd: int | None
    tokens: int | None


class SessionBudget(SessionJournal):
    """Counts what a session spends against its own caps."""

    __slots__ = ("_cap_by_person", "_is_near", "context", "overrun", "spent_tokens", "spent_usd")

    def __init__(self, store: Store, clock: Clock, guard: GuardRuntime, lease: Lease, context: SessionContext) -> None:
        super().__init__(store, clock, guard, lease)
        self.context = context
        self.spent_usd = self.spent_tokens = 0
        self.overrun = False
        """True if a request or call outside of a turn exceeded a cap."""
        self._cap_by_person: CapByPerson | None = None
        self._is_near: bool | None = None

    def remaining_budget(self) -> RemainingBudget:
        caps = self.context.caps
        cap, budget = caps.session.max_cost_usd, caps.token_budget
        if self._cap_by_person is not None:
            cap = self._cap_by_person.usd
            cap = None if cap is None else cap - self.context.reserve_usd
        return RemainingBudget(
            None if cap is None else cap - self.spent_usd,
            None if budget is None else budget - self.spent_tokens,
        )

    def is_near_own_cap(self) -> bool:
        """Return whether the session is near a cap of its own."""
        policy, remaining = self.context.policy, self.remaining_budget()
        margin, cap, budget = policy.cap_margin, policy.caps.session.max_cost_usd, policy.caps.token_budget
        if self._cap_by_person is not None:
            cap = self._cap_by_person.usd
        if cap is not None and remaining.usd is not None and margin.contains("usd", cap, remaining.usd):
            return True
        if budget is None or remaining.tokens is None:
            return False
        return margin.contains("tokens", budget, remaining.tokens)

    async def is_near_budget(self) -> bool:
        """Return whether the session is near a cap, or was near one at its end."""
        return await self._guard.is_near_budget(self.context) if self._is_near is None else self._is_near

    async def _read_cap(self) -> None:
        params = {"scope": self.lease.stream, "window": "", "unit": "usd"}
        rows = await self.store.ask(Query("budget", BudgetRow, params))
        self._set_cap(rows[0] if rows else None)

    def _set_cap(self, row: BudgetRow | None) -> None:
        """Use the row's cap if a person has set it; otherwise the policy's cap applies."""
        self._cap_by_person = CapByPerson(row.cap) if row is not None and row.cap_by else None

    async def _is_raised(self, cap: CostCapReached) -> bool:
        params = {"scope": cap.scope, "window": cap.window, "unit": cap.unit}
        rows = await self.store.ask(Query("budget", BudgetRow, params))
        return any(row.cap_by and (row.cap is None or row.cap > cap.cap) for row in rows)
