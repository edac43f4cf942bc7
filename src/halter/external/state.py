"""The journal of an external session: its effects in flight, and the questions to a person about its calls."""

from collections import Counter
from collections.abc import Sequence

from halter.core.events import CallRefused, CallStarted, DecisionAsked, SessionStarted
from halter.core.ids import session_stream
from halter.core.ports import Store, Stored, read_stream
from halter.guard.guard import GuardRuntime
from halter.state.session import Session, fold


class ExternalState:
    """A fold of the events of one session.

    A question is bound to a tool and to the digest of its arguments, not to the program's id of a call.
    """

    def __init__(self) -> None:
        self.session = Session()
        self.started_by = ""
        self.questions: dict[str, tuple[str, str]] = {}
        """By pending decision, the tool and the digest of the arguments that it is about."""
        self.call_counts = Counter[str]()
        """By the start of their ids, the numbers of calls that were admitted or refused."""

    def apply_all(self, events: Sequence[Stored]) -> None:
        for stored in events:
            self.apply(stored)

    def apply(self, stored: Stored) -> None:
        self.session = fold(self.session, stored)
        match stored.event:
            case SessionStarted(started_by=started_by):
                self.started_by = started_by
            case DecisionAsked(about="approval") as event:
                self.questions[event.decision] = (event.name, event.same)
            case CallStarted(call=call, decision=decision) | CallRefused(call=call, decision=decision):
                self.call_counts[call.rpartition(".")[0]] += 1
                self.questions.pop(decision, None)
            case _:
                pass

    async def read(self, store: Store, session: str) -> None:
        """Fold the events of the session that are new."""
        new_events = await read_stream(store, session_stream(session), self.session.head)
        # Several calls of one session read at the same time.
        self.apply_all([stored for stored in new_events if stored.seq > self.session.head])

    async def has_open_question(self, guard: GuardRuntime, now: int) -> bool:
        """Return whether the answer to a question, given or not, can still admit the program's call."""
        rows = [await guard.decision(decision) for decision in self.questions]
        return any(row is not None and now < row.expires_at for row in rows)

    async def is_waiting(self, guard: GuardRuntime, now: int) -> bool:
        """Return whether only a person's decision can move the session on."""
        doubts = [await guard.decision(f"{flight}/unknown") for flight in self.session.in_flight]
        if doubts:
            return all(row is not None and not row.verdict and now < row.expires_at for row in doubts)
        return await self.has_open_question(guard, now)
