"""Who works on what, in memory: the workers, what is on offer, and which sessions can be had."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halter.core.ids import SessionId, WorkerId
from halter.core.ports import Agents, Offered, Ticket
from halter.core.rows import FREE, SessionRow


class MemoryLeasing:
    """What is known of workers and tickets. It decides over the rows that it is given, and changes none."""

    def __init__(self, now: Callable[[], int], lease: int) -> None:
        self._now = now
        self._lease = lease
        self._alive: dict[WorkerId, int] = {}
        self._lapsed: dict[WorkerId, int] = {}
        self._about: dict[WorkerId, str] = {}
        self._tickets: dict[str, tuple[int, int]] = {}

    def renew(self, worker: WorkerId, about: str = "") -> int:
        """Let a worker live on, and tell the time."""
        now = self._now()
        if self._alive.get(worker, now) < now:
            self._lapsed[worker] = now
        self._alive[worker] = now + self._lease
        if about:
            self._about[worker] = about
        return now

    def leave(self, worker: WorkerId) -> None:
        """Let a worker's leases be over."""
        if worker in self._alive:
            self._alive[worker] = 0

    def lapsed(self, worker: WorkerId, now: int) -> bool:
        """Tell whether a worker's leases had run out lately."""
        return self._lapsed.get(worker, 0) + self._lease >= now

    def workers(self) -> Sequence[Mapping[str, Any]]:
        """List everybody who works, or did."""
        alive = sorted(self._alive.items())
        return [{"worker": name, "alive_until": until, "about": self._about.get(name, "")} for name, until in alive]

    def next_lapse(self, rows: Sequence[SessionRow], worker: str, now: int) -> int | None:
        """Tell when the leases of another worker run out that has any."""
        owners = {row.owner for row in rows} - {FREE, worker}
        return min((until for name, until in self._alive.items() if name in owners and until >= now), default=None)

    def may_have(self, row: SessionRow, only: SessionId | Ticket, worker: WorkerId, now: int) -> bool:
        """Tell whether a session that is named can be taken; a ticket is good for one attempt."""
        if isinstance(only, Ticket):
            self._tickets.pop(row.session, None)
            if row.generation != only.generation:
                return False
        begun = row.started_at > 0 and row.ended_at is None
        return begun and (row.owner == FREE or self._orphaned(row, worker, now))

    def claimable(
        self, rows: Sequence[SessionRow], agents: Agents | None, worker: WorkerId, now: int
    ) -> list[SessionRow]:
        """Find what is orphaned, then what is due; tasks of agents that have a limit come last, each up to it."""
        wanted = rows if agents is None else [row for row in rows if row.agent in agents and row.unattended]
        due = [row for row in wanted if row.owner == FREE and row.due_at is not None and row.due_at <= now]
        due.sort(key=lambda row: (row.due_at, row.session))
        rooms = Counter({agent: most for agent, most in (agents or {}).items() if most is not None})
        limited = {row.session for row in due if row.agent in rooms and row.kind != "autonomous"}
        taken = (row for row in rows if row.kind != "autonomous" and (row.owner != FREE or self.on_offer(row)))
        rooms.subtract(row.agent for row in taken if row.agent in rooms)
        found = [row for row in wanted if self._orphaned(row, worker, now)]
        found += [row for row in due if row.session not in limited]
        for row in due:
            if row.session in limited and rooms[row.agent] > 0 and not self.on_offer(row):
                rooms[row.agent] -= 1
                found.append(row)
        return found

    def offer(self, rows: Sequence[SessionRow], agents: Agents, limit: int) -> Offered:
        """Find what can be had and is not on offer already."""
        now = self._now()
        self._tickets = {session: kept for session, kept in self._tickets.items() if kept[1] >= now - self._lease}
        left = max(0, limit - len(self._tickets))
        found = [row for row in self.claimable(rows, agents, WorkerId(""), now) if not self.on_offer(row)][:left]
        tickets = tuple(Ticket(SessionId(row.session), row.agent, row.generation) for row in found)
        return Offered(tickets, more=len(tickets) == left)

    def offered(self, tickets: Sequence[Ticket]) -> None:
        """Know what is on offer from now on."""
        self._tickets |= {ticket.session: (ticket.generation, self._now()) for ticket in tickets}

    def on_offer(self, row: SessionRow) -> bool:
        """Tell whether a session is on offer as it stands."""
        return self._tickets.get(row.session, (None, 0))[0] == row.generation

    def _orphaned(self, row: SessionRow, worker: WorkerId, now: int) -> bool:
        return row.owner not in (FREE, worker) and self._alive.get(WorkerId(row.owner), now) < now
