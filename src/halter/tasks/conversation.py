"""A session and its turns: what opens one, and what becomes of the session after it.

A chat waits for the next message, a task ends, an autonomous session sleeps and wakes: that is its pace, and is decided
elsewhere. Everything that decides it is in the journal, so whoever takes the session up next goes on where it stands.

The walk of a task session: one phase after the other, never back, each with the tools that are granted there.

Inside a phase the model works as it likes. When it ends its turn, the runtime moves the session on: to the next phase,
or to its end. Where others have to look at what was found, no turn is taken: they are asked instead.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from halter.core.clock import Clock
from halter.core.errors import HalterError
from halter.core.events import DecisionMade, SessionStarted, WakePosted
from halter.core.messages import Message, Text
from halter.core.ports import Stored
from halter.core.spec import Phase
from halter.core.text import from_body, join_names
from halter.core.tools import ToolSpec
from halter.core.vocabulary import END_STATES, State
from halter.loop import decide
from halter.loop.decide import End, NextTurn, Park, SessionStep, decide_after_turn
from halter.loop.loop import HotStateCapture, TurnLoop
from halter.loop.session_runtime import SessionRuntime, find_last_words


class Conclusion(msgspec.Struct, frozen=True):
    """Where a session has come to: it rests or is over; `sentence` says what stopped it, if something did."""

    state: State
    terminal_reason: str = ""
    sentence: str = ""
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Tell whether the session is over."""
        return self.state in END_STATES


class Inbox(msgspec.Struct, frozen=True):
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


class OpenTurn(msgspec.Struct, frozen=True):
    """A turn begins, with these words. It is `quiet` if nothing new gave rise to it."""

    parts: tuple[Text, ...]
    hot: HotStateCapture | None = None
    quiet: bool = False


class Pace(Protocol):
    """When a session takes its turns."""

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Decide whether a session that has nothing under way takes a turn."""
        ...

    def show(self, notes: Sequence[Text]) -> None:
        """Let the turn that is open see these alerts."""
        ...

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Let a turn that an earlier owner had opened see these alerts, and what is true by now."""
        ...

    async def after(self, then: SessionStep) -> SessionStep:
        """Decide what really becomes of a session whose turn is over."""
        ...


class AttendedPace:
    """The pace of a session that somebody sits before: it takes a turn when there is something to say to it."""

    def __init__(self, loop: TurnLoop) -> None:
        self._loop = loop

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Open a turn with what was said, or with a word to go on."""
        if news.said:
            return OpenTurn(news.said)
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(decide.MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """There are none."""

    async def go_on(self, notes: Sequence[Text]) -> None:
        """There is nothing that could have changed."""

    async def after(self, then: SessionStep) -> SessionStep:
        """Leave it at that."""
        return then


class Conversation:
    """One session in somebody's hands, from where it stands to its next rest or its end.

    A session that is resident rests in the same hands, and is gone on with by attending it again.
    """

    def __init__(
        self, running: SessionRuntime, loop: TurnLoop, clock: Clock, pace: Pace | None = None, *, resident: bool = False
    ) -> None:
        self._running = running
        self._loop = loop
        self._clock = clock
        self._pace = pace or AttendedPace(loop)
        self._resident = resident
        self._task: Stored | None = None
        self._seen = 0

    async def attend(self) -> Conclusion:
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

    async def _next_turn(self) -> Conclusion | None:
        """Open the next turn, if it is time for one. Before others look around for it, the last one is written down."""
        await self._running.settle_up()
        news = await self._news()
        match await self._pace.before(news):
            case OpenTurn(parts, hot, quiet):
                self._pace.show(news.notes)
                await self._loop.open(Message("user", parts), self._seen, hot, quiet=quiet)
                return None
            case Park("WAITING_FOR_INPUT") as park:
                return await self._cancelled() or await self._rested(park)
            case Park() as park:
                return await self._rested(park)
            case End() as end:
                return await self._ended(end)

    async def _turn(self) -> Conclusion | None:
        """Finish the turn that is open, and do what follows from its end."""
        turn = await self._loop.go_on()
        match await self._pace.after(decide_after_turn(turn, self._loop.rules)):
            case End("COMPLETED") if (await self._news()).spoken:
                return await self._next_turn()
            case End() as end:
                return await self._ended(end)
            case Park() as park:
                return await self._rested_after(park)
            case NextTurn():
                return await self._next_turn()

    async def _ended(self, end: End) -> Conclusion | None:
        """End the session. Of its own accord it does not while somebody speaks to it, at this very moment."""
        said = find_last_words(self._loop.messages)
        while not await self._running.end(
            end.state, end.terminal_reason, self._seen if end.state == "COMPLETED" else None, said
        ):
            seen, news = self._seen, await self._news()
            if self._seen == seen:
                raise StillInDoubt(self._running.lease.session)
            if end.state == "COMPLETED" and news.spoken:
                return await self._next_turn()
        return Conclusion(end.state, end.terminal_reason, self._loop.turn.sentence)

    async def _cancelled(self) -> Conclusion | None:
        """End a session that was cancelled while it had nothing to do."""
        halt = await self._running.halted()
        if halt is None or not halt.cancels:
            return None
        await self._running.end("CANCELLED", "cancelled", last_words=find_last_words(self._loop.messages))
        return Conclusion("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _rested_after(self, park: Park) -> Conclusion | None:
        """Let the session rest after a turn, unless what it waits for has come while the turn was under way."""
        news = await self._news()
        if news.said or news.called or news.names & frozenset(park.wake_on):
            return await self._next_turn()
        return await self._rested(park)

    async def _rested(self, park: Park) -> Conclusion | None:
        """Let the session rest, unless something has come at this very moment."""
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self._running.park(park.state, self._seen, wake_at, park.wake_on, resident=self._resident):
            return None
        self._loop.rest()
        return Conclusion(park.state, "", self._loop.turn.sentence, wake_at, park.wake_on)

    async def _news(self, through: int | None = None) -> Inbox:
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
        return Inbox(tuple(said), tuple(notes), called, frozenset(names))

    async def _given(self) -> Sequence[Text]:
        """The task opens the first turn."""
        if self._loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return []
        text = from_body(await self._running.said(self._task))
        return [Text(text, self._task.event.origin, self._task.event.trusted)] if text.strip() else []

    async def _text(self, stored: Stored, event: WakePosted) -> Sequence[Text]:
        text = from_body(await self._running.said(stored))
        return [Text(text, event.origin, event.trusted)] if text.strip() else []


REVIEW_PHASE: Final = "ethics_review"
"""The phase in which somebody else than the author looks at what was found."""

OfferTools = Callable[[Phase], tuple[ToolSpec, ...]]
"""Tells which tools a model is told of in a phase."""

ReviewPhase = Callable[[], Awaitable[End | None]]
"""Lets others look at what was found; tells if the session has to end over it."""


class PhaseWalk:
    """The pace of a task: a turn for each phase, as far as it gets."""

    def __init__(
        self, running: SessionRuntime, loop: TurnLoop, phases: Sequence[Phase], offered: OfferTools, review: ReviewPhase
    ) -> None:
        self._running = running
        self._loop = loop
        self._phases = phases
        self._offered = offered
        self._review = review

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Open a turn with what was said, with the phase that begins, or with a word to go on; not during a halt."""
        self._stand()
        halt = await self._running.halted()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._loop.turn.number and (over := await self._moved_on()) is not None:
            return over
        if news.said:
            return OpenTurn((*news.said, *self._announced()) if self._begins() else news.said)
        if self._begins():
            return OpenTurn(self._announced())
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(decide.MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """There are none."""

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Stand in the phase that the turn was opened in."""
        self._stand()

    async def after(self, then: SessionStep) -> SessionStep:
        """Move on when a phase has had its turn; the last one ends the session."""
        if not isinstance(then, End) or then.state != "COMPLETED":
            return then
        self._stand()
        if not self._begins() and not await self._entered():
            return then
        return await self._moved_on() or NextTurn()

    async def _moved_on(self) -> End | None:
        """Let others look at what was found where it is time for that; whoever was stopped meanwhile begins it anew."""
        while self._begins() and self._here().name == REVIEW_PHASE:
            stopped = await self._review()
            if stopped is not None:
                return stopped
            if not await self._entered():
                return End("COMPLETED", "completed")
        return None

    async def _entered(self) -> bool:
        """Enter the next phase, if there is one."""
        number = self._number() + 1
        if number >= len(self._phases):
            return False
        await self._loop.enter(self._phases[number].name, number)
        self._stand()
        return True

    def _number(self) -> int:
        return 0 if self._loop.phase is None else self._loop.phase.number

    def _here(self) -> Phase:
        return self._phases[min(self._number(), len(self._phases) - 1)]

    def _begins(self) -> bool:
        """Tell whether the phase has had no turn yet."""
        entered = self._loop.phase
        return (0 if entered is None else entered.turn) == self._loop.turn.number

    def _stand(self) -> None:
        """Let the guard and the model know which phase it is."""
        phase = self._here()
        self._running.standing = msgspec.structs.replace(self._running.standing, phase=phase)
        self._loop.offer(self._offered(phase))

    def _announced(self) -> tuple[Text, ...]:
        """Say which phase begins; a walk of a single phase needs no words."""
        if len(self._phases) == 1:
            return ()
        phase, number = self._here(), self._number() + 1
        tools = "all of your tools" if phase.grants is None else join_names(phase.grants) or "no tools"
        said = f"Phase {number} of {len(self._phases)} begins: {phase.name}. In it you may use {tools}."
        return (Text(f"{said} End your turn when your part of it is done.", "config", reason="phase"),)
