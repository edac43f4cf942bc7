"""A session and its turns: what opens one, and what becomes of the session after it.

A chat waits for the next message, a task ends, an autonomous session sleeps and wakes: that is its pace, and is decided
elsewhere. Everything that decides it is in the journal, so whoever takes the session up next goes on where it stands.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from halter.brain import words
from halter.brain.decide import After, Again, End, Park, after_turn
from halter.brain.lastwords import last_words
from halter.brain.loop import Hot, Loop
from halter.brain.session_runtime import SessionRuntime
from halter.core.clock import Clock
from halter.core.errors import HalterError
from halter.core.events import DecisionMade, SessionStarted, WakePosted
from halter.core.messages import Message, Text
from halter.core.ports import Stored
from halter.core.text import from_body
from halter.core.vocabulary import ENDS, State


class Came(msgspec.Struct, frozen=True):
    """Where a session has come to: it rests or is over; `sentence` says what stopped it, if something did."""

    state: State
    terminal_reason: str = ""
    sentence: str = ""
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Tell whether the session is over."""
        return self.state in ENDS


class News(msgspec.Struct, frozen=True):
    """What has reached a session: what is said to it, and alerts that no finished turn has shown.

    It was `called` if something has come since its last turn that wakes it; `names` are those of all that came.
    """

    said: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    called: bool = False
    names: frozenset[str] = frozenset()

    @property
    def pending(self) -> bool:
        """Tell whether there is anything."""
        return bool(self.said or self.notes) or self.called

    @property
    def spoken(self) -> bool:
        """Tell whether somebody spoke to the session, be it in a chat beside it."""
        return bool(self.said) or self.personal

    @property
    def personal(self) -> bool:
        """Tell whether a person is among those who said something."""
        return any(part.origin == "person" for part in (*self.said, *self.notes))


class StillInDoubt(HalterError):
    """A session that was to end holds something whose outcome nobody knows: whoever takes it up anew clears that."""

    def __init__(self, session: str) -> None:
        super().__init__(f"Session {session} cannot end: something of it is still under way, or in doubt.")


class Open(msgspec.Struct, frozen=True):
    """A turn begins, with these words. It is `quiet` if nothing new gave rise to it."""

    parts: tuple[Text, ...]
    hot: Hot | None = None
    quiet: bool = False


class Pace(Protocol):
    """When a session takes its turns."""

    async def before(self, news: News) -> Open | Park | End:
        """Decide whether a session that has nothing under way takes a turn."""
        ...

    def show(self, notes: Sequence[Text]) -> None:
        """Let the turn that is open see these alerts."""
        ...

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Let a turn that an earlier owner had opened see these alerts, and what is true by now."""
        ...

    async def after(self, then: After) -> After:
        """Decide what really becomes of a session whose turn is over."""
        ...


class Attended:
    """The pace of a session that somebody sits before: it takes a turn when there is something to say to it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    async def before(self, news: News) -> Open | Park | End:
        """Open a turn with what was said, or with a word to go on."""
        if news.said:
            return Open(news.said)
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return Open((Text(words.GO_ON, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """There are none."""

    async def go_on(self, notes: Sequence[Text]) -> None:
        """There is nothing that could have changed."""

    async def after(self, then: After) -> After:
        """Leave it at that."""
        return then


class Conversation:
    """One session in somebody's hands, from where it stands to its next rest or its end.

    A session that is resident rests in the same hands, and is gone on with by attending it again.
    """

    def __init__(
        self, running: SessionRuntime, loop: Loop, clock: Clock, pace: Pace | None = None, *, resident: bool = False
    ) -> None:
        self._running = running
        self._loop = loop
        self._clock = clock
        self._pace = pace or Attended(loop)
        self._resident = resident
        self._task: Stored | None = None
        self._seen = 0

    async def attend(self) -> Came:
        """Give the session its turns until it rests or ends; whatever stops it, what was done is written down."""
        await self._take_up()
        try:
            while True:
                turn = self._loop.turn
                came = await (self._next_turn() if turn.over and turn.settled else self._turn())
                if came is not None:
                    return came
        finally:
            await self._running.settle_up()

    async def _take_up(self) -> None:
        """Know all that happened: from the journal, or still from before the rest."""
        if self._task is not None:
            await self._running.wake()
            self._loop.wake()
            return
        events = await self._running.take_up()
        self._task = events[0]
        await self._loop.recall(events)
        if not self._loop.turn.over:
            await self._pace.go_on((await self._news(self._loop.turn.heard)).notes)

    async def _next_turn(self) -> Came | None:
        """Open the next turn, if it is time for one. Before others look around for it, the last one is written down."""
        await self._running.settle_up()
        news = await self._news()
        match await self._pace.before(news):
            case Open(parts, hot, quiet):
                self._pace.show(news.notes)
                await self._loop.open(Message("user", parts), self._seen, hot, quiet=quiet)
                return None
            case Park("WAITING_FOR_INPUT") as park:
                return await self._cancelled() or await self._rested(park)
            case Park() as park:
                return await self._rested(park)
            case End() as end:
                return await self._ended(end)

    async def _turn(self) -> Came | None:
        """Finish the turn that is open, and do what follows from its end."""
        turn = await self._loop.go_on()
        match await self._pace.after(after_turn(turn, self._loop.rules)):
            case End("COMPLETED") if (await self._news()).spoken:
                return await self._next_turn()
            case End() as end:
                return await self._ended(end)
            case Park() as park:
                return await self._rested_after(park)
            case Again():
                return await self._next_turn()

    async def _ended(self, end: End) -> Came | None:
        """End the session. Of its own accord it does not while somebody speaks to it, at this very moment."""
        said = last_words(self._loop.messages)
        while not await self._running.end(
            end.state, end.terminal_reason, self._seen if end.state == "COMPLETED" else None, said
        ):
            seen, news = self._seen, await self._news()
            if self._seen == seen:
                raise StillInDoubt(self._running.lease.session)
            if end.state == "COMPLETED" and news.spoken:
                return await self._next_turn()
        return Came(end.state, end.terminal_reason, self._loop.turn.sentence)

    async def _cancelled(self) -> Came | None:
        """End a session that was cancelled while it had nothing to do."""
        halt = await self._running.halted()
        if halt is None or not halt.cancels:
            return None
        await self._running.end("CANCELLED", "cancelled", last_words=last_words(self._loop.messages))
        return Came("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _rested_after(self, park: Park) -> Came | None:
        """Let the session rest after a turn, unless what it waits for has come while the turn was under way."""
        news = await self._news()
        if news.said or news.called or news.names & frozenset(park.wake_on):
            return await self._next_turn()
        return await self._rested(park)

    async def _rested(self, park: Park) -> Came | None:
        """Let the session rest, unless something has come at this very moment."""
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self._running.park(park.state, self._seen, wake_at, park.wake_on, resident=self._resident):
            return None
        self._loop.rest()
        return Came(park.state, "", self._loop.turn.sentence, wake_at, park.wake_on)

    async def _news(self, through: int | None = None) -> News:
        """Read what has reached the session: words since its last turn, alerts since the last that came to its end."""
        turn = self._loop.turn
        inbox = await self._running.inbox(turn.cleared)
        if through is None:
            self._seen = inbox[-1].seq if inbox else max(self._seen, turn.heard)
        said, notes = list(await self._given()), list[Text]()
        called, names = False, set[str]()
        for stored in inbox:
            if through is not None and stored.seq > through:
                break
            match stored.event:
                case WakePosted() as event:
                    fresh = stored.seq > turn.heard
                    if event.notifies or fresh:
                        (notes if event.notifies else said).extend(await self._text(stored, event))
                    called = called or (fresh and event.wakes)
                    names |= {event.name} if fresh else set()
                case DecisionMade() if stored.seq > self._running.rested_at:
                    called = True
                case _:
                    pass
        return News(tuple(said), tuple(notes), called, frozenset(names))

    async def _given(self) -> Sequence[Text]:
        """The task opens the first turn."""
        if self._loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return []
        text = from_body(await self._running.said(self._task))
        return [Text(text, self._task.event.origin, self._task.event.trusted)] if text.strip() else []

    async def _text(self, stored: Stored, event: WakePosted) -> Sequence[Text]:
        text = from_body(await self._running.said(stored))
        return [Text(text, event.origin, event.trusted)] if text.strip() else []
