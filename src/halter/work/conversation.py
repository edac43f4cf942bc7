"""A session and its turns: what opens one, and what becomes of the session after it.

A chat waits for the next message, a task ends, an autonomous session sleeps and wakes. Everything that decides this is
in the journal, so whoever takes the session up next goes on where it stands.
"""

from collections.abc import Sequence

import msgspec

from halter.brain import words
from halter.brain.decide import Again, End, Park, after_turn
from halter.brain.loop import Loop
from halter.brain.running import Running
from halter.brain.turn import TROUBLE
from halter.core.clock import Clock
from halter.core.events import SessionStarted, WakePosted
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

    @property
    def over(self) -> bool:
        """Tell whether the session is over."""
        return self.state in ENDS


class Conversation:
    """One session in somebody's hands, from where it stands to its next rest or its end."""

    def __init__(self, running: Running, loop: Loop, clock: Clock) -> None:
        self._running = running
        self._loop = loop
        self._clock = clock
        self._task: Stored | None = None
        self._seen = 0

    async def attend(self) -> Came:
        """Give the session its turns until it rests or ends."""
        events = await self._running.take_up()
        self._task = events[0]
        await self._loop.recall(events)
        while True:
            if self._loop.turn.over and self._loop.turn.settled and not await self._opened():
                came = await self._cancelled() or await self._rested(Park("WAITING_FOR_INPUT"))
            else:
                came = await self._turn()
            if came is not None:
                return came

    async def _turn(self) -> Came | None:
        """Finish the turn that is open, and do what follows from its end."""
        turn = await self._loop.go_on()
        match after_turn(turn, self._loop.rules):
            case End("COMPLETED") if await self._opened_by_news():
                return None
            case End(state, reason):
                await self._running.end(state, reason)
                return Came(state, reason, turn.sentence)
            case Park() as park:
                return await self._rested(park)
            case Again():
                await self._opened()
                return None

    async def _cancelled(self) -> Came | None:
        """End a session that was cancelled while it had nothing to do."""
        halt = await self._running.halted()
        if halt is None or not halt.cancels:
            return None
        await self._running.end("CANCELLED", "cancelled")
        return Came("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _rested(self, park: Park) -> Came | None:
        """Let the session rest, unless somebody has said something meanwhile: then that opens the next turn."""
        if await self._opened_by_news():
            return None
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self._running.park(park.state, self._seen, wake_at, park.wake_on):
            return None
        return Came(park.state, "", self._loop.turn.sentence, wake_at)

    async def _opened(self) -> bool:
        """Open a turn with what there is to say; tell whether there was anything."""
        if await self._opened_by_news():
            return True
        if self._loop.rules.kind == "autonomous":
            observe = Text(words.OBSERVE, "config", reason="observe")
            await self._loop.open(Message("user", (*self._trouble(), observe)), self._seen)
            return True
        if not self._loop.turn.resumed or self._loop.turn.why in ("ended", "asked", "yielded"):
            return False
        await self._loop.open(Message("user", (Text(words.GO_ON, "config", reason="resumed"),)), self._seen)
        return True

    async def _opened_by_news(self) -> bool:
        inbox = await self._running.inbox(self._loop.turn.heard)
        self._seen = inbox[-1].seq if inbox else max(self._seen, self._loop.turn.heard)
        parts = [*await self._given(), *await self._said(inbox)]
        if not parts:
            return False
        await self._loop.open(Message("user", (*self._trouble(), *parts)), self._seen)
        return True

    def _trouble(self) -> list[Text]:
        """An agent that nobody watches is told what stopped its last turn. The words may be a provider's."""
        turn = self._loop.turn
        if self._loop.rules.kind != "autonomous" or turn.why not in TROUBLE:
            return []
        return [Text(words.stopped(turn.sentence), "config", trusted=False, reason="trouble")]

    async def _given(self) -> list[Text]:
        """The task opens the first turn."""
        if self._loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return []
        text = from_body(await self._running.said(self._task))
        return [Text(text, self._task.event.origin, self._task.event.trusted)] if text.strip() else []

    async def _said(self, inbox: Sequence[Stored]) -> list[Text]:
        found: list[Text] = []
        for stored in inbox:
            event = stored.event
            if isinstance(event, WakePosted) and (text := from_body(await self._running.said(stored))).strip():
                found.append(Text(text, event.origin, event.trusted))
        return found
