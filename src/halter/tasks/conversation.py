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
from halter.loop.session_runtime import SessionRuntime, find_final_text
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
    def has_ended(self) -> bool:
        return self.state in END_STATES


class Inbox(msgspec.Struct, frozen=True, gc=False):
    """What has reached a session: what is said to it, and alerts that no finished turn has shown.

    It was `called` if something has come since its last turn that wakes it; `names` are those of all that came.
    """

    messages: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    called: bool = False
    names: frozenset[str] = frozenset()

    @property
    def pending(self) -> bool:
        return bool(self.messages or self.notes) or self.called

    @property
    def spoken(self) -> bool:
        """Whether a person wrote to the session, or in a chat beside it."""
        return bool(self.messages) or self.personal

    @property
    def personal(self) -> bool:
        return any(part.origin == "person" for part in (*self.messages, *self.notes))


class StillInDoubt(HalterError):
    """A session that should end holds something in doubt: the next owner settles it."""

    def __init__(self, session: str) -> None:
        super().__init__(f"Session {session} cannot end: something of it is still under way, or in doubt.")


class OpenTurn(msgspec.Struct, frozen=True, gc=False):
    """A turn begins, with these words. It is `quiet` if nothing new gave rise to it."""

    parts: tuple[Text, ...]
    hot: HotStateCapture | None = None
    quiet: bool = False


class TurnPolicy(Protocol):
    """When a session takes its turns."""

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        """Decide whether a session that has nothing under way takes a turn."""
        ...

    def show(self, notes: Sequence[Text]) -> None: ...

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        """Let a turn that an earlier owner had opened see these alerts, and what is true by now."""
        ...

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        """Decide what really becomes of a session whose turn is over."""
        ...


class AttendedTurnPolicy:
    """The pace of a chat: a turn for each message."""

    def __init__(self, loop: TurnLoop) -> None:
        self._loop = loop

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        """Open a turn with what was said, or with a word to go on."""
        if inbox.messages:
            return OpenTurn(inbox.messages)
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(decide.MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """There are none."""

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        """There is nothing that could have changed."""

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        return step


class Conversation:
    """One session, from where it stands to its next rest or its end.

    A session that is resident rests in the same hands, and is gone on with by attending it again. `begun` are all of
    its events, if this process has just begun it: then neither those nor its inbox are read before the first turn.
    `start` is what begins it, where the first commit is to carry that.
    """

    __slots__ = (
        "_clock",
        "_first_events",
        "_inbox_seen",
        "_is_resumed",
        "_pace",
        "_resident",
        "_start",
        "_task",
        "loop",
        "runtime",
    )

    def __init__(
        self,
        runtime: SessionRuntime,
        loop: TurnLoop,
        clock: Clock,
        pace: TurnPolicy | None = None,
        *,
        resident: bool = False,
        begun: tuple[Stored, ...] = (),
        start: Write | None = None,
    ) -> None:
        self.runtime = runtime
        self.loop = loop
        self._clock = clock
        self._pace = pace or AttendedTurnPolicy(loop)
        self._resident = resident
        self._is_resumed = False
        self._task: Stored | None = None
        """Its first event, until the first turn has told it."""
        self._first_events = begun
        self._start = start
        self._inbox_seen = 0

    async def run_until_parked(self, row: SessionRow | None = None) -> Conclusion:
        """Gives the session its turns until it rests or ends; what was done is recorded even if it is stopped.

        `row` is the session's, if it was just read under its lease.
        """
        await self._resume(row)
        try:
            while True:
                turn = self.loop.turn
                if turn.over and turn.settled:
                    came = await self._next_turn()
                else:
                    came = await self._follow_turn(await self.loop.run_turn())
                if came is not None:
                    return came
        finally:
            await self.runtime.flush_deferred()

    async def release(self, error: BaseException) -> None:
        """Gives the session back as it is. A store that cannot be reached takes nothing back: its leases run out."""
        if not isinstance(error, StoreUnavailable):
            await self.runtime.release()

    async def conclude(self, came: Conclusion) -> Result[Any]:
        """Returns the result of the session, as it has come to."""
        runtime = self.runtime
        near, read_events = await runtime.is_near_budget(), await runtime.read_later()
        return build_result(came, self.loop, runtime.lease.session, read_events, near_budget=near)

    async def interrupt(self) -> Conclusion | None:
        """Ends the open turn after its task was cancelled, and waits for the next message.

        Returns None if an effect is still in doubt: then the turn is gone on with.
        """
        self.runtime.inbox_head = None
        await self.runtime.ensure_running()
        if not await self.loop.interrupt(INTERRUPTED):
            return None
        await self.runtime.withdraw_questions(INTERRUPTED)
        came: Conclusion | None = None
        while came is None:
            await self._news()
            came = await self._park(Park("WAITING_FOR_INPUT"))
        return came

    async def _resume(self, row: SessionRow | None) -> None:
        """Loads the session's events from the journal, or keeps those from before the rest."""
        if self._is_resumed:
            await self.runtime.resume_parked(row)
            self.loop.resume_clock()
            return
        events = await self.runtime.resume(row, self._first_events)
        self._is_resumed, self._task, self._first_events = True, events[0], ()
        await self.loop.recall(events)
        if self._start is not None:
            self.runtime.defer(self._start)
            self._start = None
        if not self.loop.turn.over:
            await self._pace.continue_turn((await self._news(self.loop.turn.heard)).notes)

    async def _next_turn(self) -> Conclusion | None:
        """Opens the next turn, if it is time; the last one is recorded first, if there was one."""
        if self.loop.turn.number:
            await self.runtime.flush_deferred()
        inbox = await self._news()
        match await self._pace.decide_before_turn(inbox):
            case OpenTurn(parts, hot, quiet):
                self._pace.show(inbox.notes)
                await self.loop.open(Message("user", parts), self._inbox_seen, hot, quiet=quiet)
                self._task = None
                return None
            case Park("WAITING_FOR_INPUT") as park:
                return await self._end_cancelled() or await self._park(park)
            case Park() as park:
                return await self._park(park)
            case End() as end:
                return await self._end(end)

    async def _follow_turn(self, turn: Turn | WaitOut) -> Conclusion | None:
        """Does what follows from the end of a turn; one that must wait goes on after a rest."""
        self.runtime.inbox_head = None
        if isinstance(turn, WaitOut):
            return await self._wait_out(turn)
        match await self._pace.decide_after_turn(decide_after_turn(turn, self.loop.rules)):
            case End("COMPLETED") if await self._is_spoken_to():
                return await self._next_turn()
            case End() as end:
                return await self._end(end)
            case Park() as park:
                return await self._park_after_turn(park)
            case NextTurn():
                return await self._next_turn()

    async def _wait_out(self, wait: WaitOut) -> Conclusion | None:
        """Rests inside of the turn. What came meanwhile is heard in the next one."""
        await self._news()
        park = Park("SLEEPING", wait.sleep, (), wait.trouble, wait.sentence)
        await self._pace.decide_after_turn(park)
        return await self._park(park)

    async def _is_spoken_to(self) -> bool:
        """Whether a person wrote since the turn began. What comes to a task is seen by its end, under the lock."""
        if self._inbox_seen == self.loop.turn.heard and self.loop.rules.kind == "task":
            return False
        return (await self._news()).spoken

    async def _end(self, end: End) -> Conclusion | None:
        """Ends the session, unless a message arrives at this very moment."""
        while not await self.runtime.end(
            end.state, end.terminal_reason, self._inbox_seen if end.state == "COMPLETED" else None, self.loop.messages
        ):
            seen, inbox = self._inbox_seen, await self._news()
            if self._inbox_seen == seen:
                raise StillInDoubt(self.runtime.lease.session)
            if end.state == "COMPLETED" and inbox.spoken:
                return await self._next_turn()
        return Conclusion(end.state, end.terminal_reason, self.loop.turn.sentence)

    async def _end_cancelled(self) -> Conclusion | None:
        halt = await self.runtime.find_halt()
        if halt is None or not halt.cancels:
            return None
        await self.runtime.end("CANCELLED", "cancelled", messages=self.loop.messages)
        return Conclusion("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _park_after_turn(self, park: Park) -> Conclusion | None:
        """Parks the session after a turn, unless what it waits for came during the turn.

        Where the turn has cleared all that was seen, the park itself finds out whether there is more to be read.
        """
        if self.loop.turn.cleared == self._inbox_seen and (came := await self._park(park, unless_news=True)):
            return came
        inbox = await self._news()
        if inbox.messages or inbox.called or inbox.names & frozenset(park.wake_on):
            return await self._next_turn()
        return await self._park(park)

    async def _park(self, park: Park, *, unless_news: bool = False) -> Conclusion | None:
        """Parks the session, unless something arrived at this very moment."""
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self.runtime.park(
            park.state,
            self._inbox_seen,
            wake_at,
            park.wake_on,
            resident=self._resident,
            trouble=park.trouble,
            sentence=park.sentence,
            unless_news=unless_news,
        ):
            return None
        self.loop.pause_clock(park.trouble)
        return Conclusion(park.state, "", park.sentence or self.loop.turn.sentence, wake_at, park.wake_on)

    async def _news(self, through: int | None = None) -> Inbox:
        """Reads the messages since the last turn, and the alerts since the last finished one.

        Right after the session's row was read, the row says whether there are any.
        """
        turn = self.loop.turn
        head, self.runtime.inbox_head = self.runtime.inbox_head, None
        inbox = () if head is not None and head <= turn.cleared else await self.runtime.inbox(turn.cleared)
        if through is None:
            self._inbox_seen = inbox[-1].seq if inbox else max(self._inbox_seen, turn.heard)
        given = await self._read_given_context()
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
                case DecisionMade() if stored.seq > self.runtime.parked_at_seq:
                    called = True
                case _:
                    pass
        return Inbox(tuple(said), tuple(notes), called, frozenset(names))

    async def _read_given_context(self) -> tuple[Text, ...]:
        if self.loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return ()
        text = from_body(await self.runtime.read_body(self._task))
        event = self._task.event
        return (Text(text, event.origin, event.trusted, source=event.follows),) if text.strip() else ()

    async def _text(self, stored: Stored, event: WakePosted) -> Sequence[Text]:
        text = from_body(await self.runtime.read_body(stored))
        return [Text(text, event.origin, event.trusted, source=event.sender)] if text.strip() else []


def build_result(
    came: Conclusion, loop: TurnLoop, session: str, read_events: Callable[[], Sequence[Stored]], *, near_budget: bool
) -> Result[Any]:
    turn, messages = loop.turn, loop.messages
    text = find_final_text(messages)
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


class PhasePolicy:
    """The pace of a task: a turn for each phase, with the tools that are `offered` there."""

    __slots__ = ("_loop", "_offered", "_phases", "_review", "_runtime")

    def __init__(
        self,
        runtime: SessionRuntime,
        loop: TurnLoop,
        phases: Sequence[Phase],
        offered: Sequence[tuple[ToolSpec, ...]],
        review: ReviewPhase,
    ) -> None:
        self._runtime = runtime
        self._loop = loop
        self._phases = phases
        self._offered = offered
        self._review = review

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        """Opens a turn with a message, with the phase that begins, or with a word to go on; not during a halt."""
        self._apply_phase()
        halt = await self._runtime.find_halt()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._loop.turn.number and (over := await self._advance_phase()) is not None:
            return over
        if inbox.messages:
            return OpenTurn((*inbox.messages, *self._announce_phase()) if self._is_phase_start() else inbox.messages)
        if self._is_phase_start():
            return OpenTurn(self._announce_phase())
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(decide.MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """A task has no alerts."""

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        self._apply_phase()

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        """Moves on when a phase has had its turn; the last one ends the session."""
        if not isinstance(step, End) or step.state != "COMPLETED":
            return step
        self._apply_phase()
        if not self._is_phase_start() and not await self._has_entered():
            return await self._review() or step
        return await self._advance_phase() or NextTurn()

    async def _advance_phase(self) -> End | None:
        """Runs the review in its phase; after an interruption it starts again."""
        while self._is_phase_start() and self._current_phase().name == REVIEW_PHASE:
            stopped = await self._review(phase=True)
            if stopped is not None:
                return stopped
            if not await self._has_entered():
                return End("COMPLETED", "completed")
        return None

    async def _has_entered(self) -> bool:
        number = self._number() + 1
        if number >= len(self._phases):
            return False
        await self._loop.enter(self._phases[number].name, number)
        self._apply_phase()
        return True

    def _number(self) -> int:
        return 0 if self._loop.phase is None else self._loop.phase.number

    def _current_phase(self) -> Phase:
        return self._phases[self._phase_index()]

    def _phase_index(self) -> int:
        entered = self._loop.phase
        return 0 if entered is None else min(entered.number, len(self._phases) - 1)

    def _is_phase_start(self) -> bool:
        entered = self._loop.phase
        return (0 if entered is None else entered.turn) == self._loop.turn.number

    def _apply_phase(self) -> None:
        place = self._phase_index()
        phase = self._phases[place]
        if self._runtime.context.phase is not phase:
            self._runtime.context = msgspec.structs.replace(self._runtime.context, phase=phase)
        self._loop.offer(self._offered[place])

    def _announce_phase(self) -> tuple[Text, ...]:
        """Announces the phase; a task with a single phase needs no words."""
        if len(self._phases) == 1:
            return ()
        phase, number = self._current_phase(), self._number() + 1
        tools = "all of your tools" if phase.grants is None else join_names(phase.grants) or "no tools"
        text = f"Phase {number} of {len(self._phases)} begins: {phase.name}. In it you may use {tools}."
        return (Text(f"{text} End your turn when your part of it is done.", "config", reason="phase"),)
