"""A session and its turns: what opens one, and what becomes of the session after it.

A chat waits for the next message, a task ends, an autonomous session sleeps and wakes: that is its pace, and is decided
elsewhere. Everything that decides it is in the journal, so the next owner of the session goes on where it stands.

A task with phases takes one after the other, never back, each with the tools granted there. When the model ends its
turn, the session moves to the next phase or to its end. In the review phase judges are asked instead of a turn.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import Clock
from halter.core.errors import HalterError, StoreUnavailable
from halter.core.events import DecisionMade, SessionStarted, WakePosted
from halter.core.messages import Message, Text
from halter.core.ports import Stored, Write
from halter.core.rows import SessionRow
from halter.core.spec import Phase
from halter.core.text import from_body, join_names
from halter.core.tools import ToolSpec
from halter.core.vocabulary import END_STATES, State
from halter.loop import decide
from halter.loop.decide import End, NextTurn, Park, SessionStep, Turn, WaitOut, decide_after_turn
from halter.loop.loop import HotStateCapture, TurnLoop
from halter.loop.session_runtime import SessionRuntime, find_last_words
from halter.state.receipt import Receipt, make_receipt
from halter.tasks.result import GOOD_STATES, Result, find_accepted_call

INTERRUPTED: Final = "A person interrupted the answer."


class Conclusion(msgspec.Struct, frozen=True, gc=False):
    """Where a session has come to: it rests or is over; `sentence` says what stopped it, if something did."""

    state: State
    terminal_reason: str = ""
    sentence: str = ""
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        return self.state in END_STATES


class Inbox(msgspec.Struct, frozen=True, gc=False):
    """What has reached a session: what is said to it, and alerts that no finished turn has shown.

    It was `called` if something has come since its last turn that wakes it; `names` are those of all that came.
    """

    said: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    called: bool = False
    names: frozenset[str] = frozenset()

    @property
    def pending(self) -> bool:
        return bool(self.said or self.notes) or self.called

    @property
    def spoken(self) -> bool:
        """Whether a person wrote to the session, or in a chat beside it."""
        return bool(self.said) or self.personal

    @property
    def personal(self) -> bool:
        return any(part.origin == "person" for part in (*self.said, *self.notes))


class StillInDoubt(HalterError):
    """A session that should end holds something in doubt: the next owner settles it."""

    def __init__(self, session: str) -> None:
        super().__init__(f"Session {session} cannot end: something of it is still under way, or in doubt.")


class OpenTurn(msgspec.Struct, frozen=True, gc=False):
    """A turn begins, with these words. It is `quiet` if nothing new gave rise to it."""

    parts: tuple[Text, ...]
    hot: HotStateCapture | None = None
    quiet: bool = False


class Pace(Protocol):
    """When a session takes its turns."""

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Decide whether a session that has nothing under way takes a turn."""
        ...

    def show(self, notes: Sequence[Text]) -> None: ...

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Let a turn that an earlier owner had opened see these alerts, and what is true by now."""
        ...

    async def after(self, then: SessionStep) -> SessionStep:
        """Decide what really becomes of a session whose turn is over."""
        ...


class AttendedPace:
    """The pace of a chat: a turn for each message."""

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
        return then


class Conversation:
    """One session, from where it stands to its next rest or its end.

    A session that is resident rests in the same hands, and is gone on with by attending it again. `begun` are all of
    its events, if this process has just begun it: then neither those nor its inbox are read before the first turn.
    `start` is what begins it, where the first commit is to carry that.
    """

    __slots__ = ("_begun", "_clock", "_pace", "_resident", "_seen", "_start", "_taken_up", "_task", "loop", "running")

    def __init__(
        self,
        running: SessionRuntime,
        loop: TurnLoop,
        clock: Clock,
        pace: Pace | None = None,
        *,
        resident: bool = False,
        begun: tuple[Stored, ...] = (),
        start: Write | None = None,
    ) -> None:
        self.running = running
        self.loop = loop
        self._clock = clock
        self._pace = pace or AttendedPace(loop)
        self._resident = resident
        self._taken_up = False
        self._task: Stored | None = None
        """Its first event, until the first turn has told it."""
        self._begun = begun
        self._start = start
        self._seen = 0

    async def attend(self, row: SessionRow | None = None) -> Conclusion:
        """Gives the session its turns until it rests or ends; what was done is recorded even if it is stopped.

        `row` is the session's, if it was just read under its lease.
        """
        await self._take_up(row)
        try:
            while True:
                turn = self.loop.turn
                if turn.over and turn.settled:
                    came = await self._next_turn()
                else:
                    came = await self._follow_turn(await self.loop.go_on())
                if came is not None:
                    return came
        finally:
            await self.running.settle_up()

    async def give_back(self, error: BaseException) -> None:
        """Gives the session back as it is. A store that cannot be reached takes nothing back: its leases run out."""
        if not isinstance(error, StoreUnavailable):
            await self.running.release()

    async def conclude(self, came: Conclusion) -> Result[Any]:
        """Returns the result of the session, as it has come to."""
        running = self.running
        near, read_events = await running.near_budget(), await running.read_later()
        return build_result(came, self.loop, running.lease.session, read_events, near_budget=near)

    async def interrupt(self) -> Conclusion | None:
        """Ends the open turn after its task was cancelled, and waits for the next message.

        Returns None if an effect is still in doubt: then the turn is gone on with.
        """
        self.running.inbox_head = None
        await self.running.ensure_running()
        if not await self.loop.interrupt(INTERRUPTED):
            return None
        await self.running.withdraw_questions(INTERRUPTED)
        came: Conclusion | None = None
        while came is None:
            await self._news()
            came = await self._rested(Park("WAITING_FOR_INPUT"))
        return came

    async def _take_up(self, row: SessionRow | None) -> None:
        """Loads the session's events from the journal, or keeps those from before the rest."""
        if self._taken_up:
            await self.running.wake(row)
            self.loop.wake()
            return
        events = await self.running.take_up(row, self._begun)
        self._taken_up, self._task, self._begun = True, events[0], ()
        await self.loop.recall(events)
        if self._start is not None:
            self.running.put_off(self._start)
            self._start = None
        if not self.loop.turn.over:
            await self._pace.go_on((await self._news(self.loop.turn.heard)).notes)

    async def _next_turn(self) -> Conclusion | None:
        """Opens the next turn, if it is time; the last one is recorded first, if there was one."""
        if self.loop.turn.number:
            await self.running.settle_up()
        news = await self._news()
        match await self._pace.before(news):
            case OpenTurn(parts, hot, quiet):
                self._pace.show(news.notes)
                await self.loop.open(Message("user", parts), self._seen, hot, quiet=quiet)
                self._task = None
                return None
            case Park("WAITING_FOR_INPUT") as park:
                return await self._cancelled() or await self._rested(park)
            case Park() as park:
                return await self._rested(park)
            case End() as end:
                return await self._ended(end)

    async def _follow_turn(self, turn: Turn | WaitOut) -> Conclusion | None:
        """Does what follows from the end of a turn; one that must wait goes on after a rest."""
        self.running.inbox_head = None
        if isinstance(turn, WaitOut):
            return await self._wait_out(turn)
        match await self._pace.after(decide_after_turn(turn, self.loop.rules)):
            case End("COMPLETED") if await self._is_spoken_to():
                return await self._next_turn()
            case End() as end:
                return await self._ended(end)
            case Park() as park:
                return await self._rested_after(park)
            case NextTurn():
                return await self._next_turn()

    async def _wait_out(self, wait: WaitOut) -> Conclusion | None:
        """Rests inside of the turn. What came meanwhile is heard in the next one."""
        await self._news()
        park = Park("SLEEPING", wait.sleep, (), wait.trouble, wait.sentence)
        await self._pace.after(park)
        return await self._rested(park)

    async def _is_spoken_to(self) -> bool:
        """Whether a person wrote since the turn began. What comes to a task is seen by its end, under the lock."""
        if self._seen == self.loop.turn.heard and self.loop.rules.kind == "task":
            return False
        return (await self._news()).spoken

    async def _ended(self, end: End) -> Conclusion | None:
        """Ends the session, unless a message arrives at this very moment."""
        while not await self.running.end(
            end.state, end.terminal_reason, self._seen if end.state == "COMPLETED" else None, self.loop.messages
        ):
            seen, news = self._seen, await self._news()
            if self._seen == seen:
                raise StillInDoubt(self.running.lease.session)
            if end.state == "COMPLETED" and news.spoken:
                return await self._next_turn()
        return Conclusion(end.state, end.terminal_reason, self.loop.turn.sentence)

    async def _cancelled(self) -> Conclusion | None:
        halt = await self.running.halted()
        if halt is None or not halt.cancels:
            return None
        await self.running.end("CANCELLED", "cancelled", messages=self.loop.messages)
        return Conclusion("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _rested_after(self, park: Park) -> Conclusion | None:
        """Parks the session after a turn, unless what it waits for came during the turn.

        Where the turn has cleared all that was seen, the park itself finds out whether there is more to be read.
        """
        if self.loop.turn.cleared == self._seen and (came := await self._rested(park, unless_news=True)):
            return came
        news = await self._news()
        if news.said or news.called or news.names & frozenset(park.wake_on):
            return await self._next_turn()
        return await self._rested(park)

    async def _rested(self, park: Park, *, unless_news: bool = False) -> Conclusion | None:
        """Parks the session, unless something arrived at this very moment."""
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self.running.park(
            park.state,
            self._seen,
            wake_at,
            park.wake_on,
            resident=self._resident,
            trouble=park.trouble,
            sentence=park.sentence,
            unless_news=unless_news,
        ):
            return None
        self.loop.rest(park.trouble)
        return Conclusion(park.state, "", park.sentence or self.loop.turn.sentence, wake_at, park.wake_on)

    async def _news(self, through: int | None = None) -> Inbox:
        """Reads the messages since the last turn, and the alerts since the last finished one.

        Right after the session's row was read, the row says whether there are any.
        """
        turn = self.loop.turn
        head, self.running.inbox_head = self.running.inbox_head, None
        inbox = () if head is not None and head <= turn.cleared else await self.running.inbox(turn.cleared)
        if through is None:
            self._seen = inbox[-1].seq if inbox else max(self._seen, turn.heard)
        given = await self._given()
        if not inbox:
            return Inbox(given)
        said, notes, called, names = list(given), list[Text](), False, set[str]()
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
                case DecisionMade() if stored.seq > self.running.rested_at:
                    called = True
                case _:
                    pass
        return Inbox(tuple(said), tuple(notes), called, frozenset(names))

    async def _given(self) -> tuple[Text, ...]:
        if self.loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return ()
        text = from_body(await self.running.said(self._task))
        event = self._task.event
        return (Text(text, event.origin, event.trusted, source=event.follows),) if text.strip() else ()

    async def _text(self, stored: Stored, event: WakePosted) -> Sequence[Text]:
        text = from_body(await self.running.said(stored))
        return [Text(text, event.origin, event.trusted, source=event.sender)] if text.strip() else []


def build_result(
    came: Conclusion, loop: TurnLoop, session: str, read_events: Callable[[], Sequence[Stored]], *, near_budget: bool
) -> Result[Any]:
    turn, messages = loop.turn, loop.messages
    text = find_last_words(messages)
    return Result(
        session=session,
        state=came.state,
        ok=came.state in GOOD_STATES and turn.why not in (*decide.TROUBLED_ENDS, "cancelled"),
        text=text,
        output=text,
        terminal_reason=came.terminal_reason,
        sentence=came.sentence,
        question=_find_question(messages) if turn.why == "asked" else "",
        messages=tuple(messages),
        near_budget=near_budget,
        build_receipt=partial(_read_receipt, read_events),
    )


def _read_receipt(read_events: Callable[[], Sequence[Stored]]) -> Receipt:
    return make_receipt(read_events())


def _find_question(messages: Sequence[Message]) -> str:
    arguments = find_accepted_call(messages, decide.ASK_USER)
    return "" if arguments is None else str(msgspec.json.decode(arguments).get("question", ""))


REVIEW_PHASE: Final = "ethics_review"
"""The phase in which judges review the findings. Without it, named judges do so before a finding leaves the session."""


class ReviewPhase(Protocol):
    """Reviews the findings, also without a phase for it if judges are named; returns the session's end, if it ends."""

    async def __call__(self, *, phase: bool = False) -> End | None: ...


async def review_nothing(*, phase: bool = False) -> End | None:
    """Where no judges are named, nothing is reviewed."""


class PhaseWalk:
    """The pace of a task: a turn for each phase, with the tools that are `offered` there."""

    __slots__ = ("_loop", "_offered", "_phases", "_review", "_running")

    def __init__(
        self,
        running: SessionRuntime,
        loop: TurnLoop,
        phases: Sequence[Phase],
        offered: Sequence[tuple[ToolSpec, ...]],
        review: ReviewPhase,
    ) -> None:
        self._running = running
        self._loop = loop
        self._phases = phases
        self._offered = offered
        self._review = review

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Opens a turn with a message, with the phase that begins, or with a word to go on; not during a halt."""
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
        """A task has no alerts."""

    async def go_on(self, notes: Sequence[Text]) -> None:
        self._stand()

    async def after(self, then: SessionStep) -> SessionStep:
        """Moves on when a phase has had its turn; the last one ends the session."""
        if not isinstance(then, End) or then.state != "COMPLETED":
            return then
        self._stand()
        if not self._begins() and not await self._entered():
            return await self._review() or then
        return await self._moved_on() or NextTurn()

    async def _moved_on(self) -> End | None:
        """Runs the review in its phase; after an interruption it starts again."""
        while self._begins() and self._here().name == REVIEW_PHASE:
            stopped = await self._review(phase=True)
            if stopped is not None:
                return stopped
            if not await self._entered():
                return End("COMPLETED", "completed")
        return None

    async def _entered(self) -> bool:
        number = self._number() + 1
        if number >= len(self._phases):
            return False
        await self._loop.enter(self._phases[number].name, number)
        self._stand()
        return True

    def _number(self) -> int:
        return 0 if self._loop.phase is None else self._loop.phase.number

    def _here(self) -> Phase:
        return self._phases[self._place()]

    def _place(self) -> int:
        entered = self._loop.phase
        return 0 if entered is None else min(entered.number, len(self._phases) - 1)

    def _begins(self) -> bool:
        entered = self._loop.phase
        return (0 if entered is None else entered.turn) == self._loop.turn.number

    def _stand(self) -> None:
        place = self._place()
        phase = self._phases[place]
        if self._running.standing.phase is not phase:
            self._running.standing = msgspec.structs.replace(self._running.standing, phase=phase)
        self._loop.offer(self._offered[place])

    def _announced(self) -> tuple[Text, ...]:
        """Announces the phase; a task with a single phase needs no words."""
        if len(self._phases) == 1:
            return ()
        phase, number = self._here(), self._number() + 1
        tools = "all of your tools" if phase.grants is None else join_names(phase.grants) or "no tools"
        said = f"Phase {number} of {len(self._phases)} begins: {phase.name}. In it you may use {tools}."
        return (Text(f"{said} End your turn when your part of it is done.", "config", reason="phase"),)
