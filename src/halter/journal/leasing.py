"""Who works on what, in SQL: the same moves for every database, with statements of its own under the same names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Agents, Lease, Offered, Put, Ticket

Ask = Callable[[str, Mapping[str, Any]], Sequence[tuple[Any, ...]]]
"""Runs a named statement in the open transaction."""


@dataclass(frozen=True, slots=True)
class Leasing:
    """Claims and offers in one transaction. `names` and `numbers` write lists as the database reads them."""

    ask: Ask
    names: Callable[[Iterable[str]], Any]
    numbers: Callable[[Iterable[int]], Any]
    now: int
    lease: int
    program_format: int

    def claim(self, worker: WorkerId, limit: int, agents: Agents | None) -> Sequence[Lease]:
        """Take orphaned sessions first, then due ones."""
        return [Lease(SessionId(row[0]), worker, row[1]) for row in self._found("claim", limit, agents, worker)]

    def claim_one(self, worker: WorkerId, limit: int, only: SessionId | Ticket) -> Sequence[Lease]:
        """Take the session that is named; by a ticket, only if nobody has had it since, and the ticket is used up."""
        session, generation = (only.session, only.generation) if isinstance(only, Ticket) else (only, None)
        params = {"worker": worker, "now": self.now, "format": self.program_format, "limit": limit}
        taken = self.ask("claim_one", params | {"session": session, "generation": generation})
        if generation is not None:
            self.ask("use_up", {"session": session})
        return [Lease(SessionId(row[0]), worker, row[1]) for row in taken]

    def offer(self, limit: int, agents: Agents, put: Put, connection: object) -> Offered:
        """Hand out tickets for what could be claimed and is not on offer already."""
        self.ask("drop_tickets", {"before": self.now - self.lease})
        ((waiting,),) = self.ask("count_tickets", {})
        left = max(0, limit - waiting)
        found = self._found("offer", left, agents, WorkerId("")) if left else ()
        tickets = tuple(Ticket(SessionId(session), agent, generation) for session, generation, agent in found)
        if tickets:
            offered = {"sessions": self.names(ticket.session for ticket in tickets)}
            offered["generations"] = self.numbers(ticket.generation for ticket in tickets)
            self.ask("offered", offered | {"at": self.now})
            put(connection, tickets)
        return Offered(tickets, more=len(tickets) == left)

    def _found(self, verb: str, limit: int, agents: Agents | None, worker: WorkerId) -> list[tuple[Any, ...]]:
        """Find what is orphaned and what is due. Tasks of agents that have a limit come last, each up to its limit."""
        unlimited = None if agents is None else [agent for agent, most in agents.items() if most is None]
        limited = {agent: most for agent, most in (agents or {}).items() if most is not None}
        params = {"worker": worker, "now": self.now, "format": self.program_format}
        mine = {"agents": None if agents is None else self.names(agents)}
        found = list(self.ask(f"{verb}_orphans", params | mine | {"limit": limit}))
        free = {"agents": None if unlimited is None else self.names(unlimited), "limited": self.names(limited)}
        found += self.ask(f"{verb}_due", params | free | {"limit": limit - len(found)})
        for agent, room in self._rooms(limited):
            left = min(room, limit - len(found))
            found += self.ask(f"{verb}_tasks", params | {"agent": agent, "limit": left}) if left > 0 else ()
        return found

    def _rooms(self, limited: Mapping[str, int]) -> Sequence[tuple[Any, ...]]:
        """Tell how many more tasks of these agents may be awake."""
        if not limited:
            return ()
        return self.ask("rooms", {"agents": self.names(limited), "most": self.numbers(limited.values())})
