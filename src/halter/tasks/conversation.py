"""A session and its turns: when a turn starts, and what the session does after it.

A turn policy decides both: a chat waits for the next message, a task ends, an autonomous session sleeps and wakes. All
inputs of a policy are in the journal, so the next owner of the session continues at the same point.

A task with phases runs them in order, each with the tools granted there. When the model ends its turn, the session
enters the next phase or ends. The review phase has no turn: judges review the findings.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import Clock
from halter.core.errors import HalterError, StoreUnavailable
from halter.core.events import CostCapReached, DecisionMade, FilesGiven, SessionStarted, WakePosted
from halter.core.messages import Message, Text
from halter.core.ports import Stored, Write
from halter.core.rows import SessionRow
from halter.core.text import decode_body, join_names
from halter.core.tools import ToolSpec
from halter.core.vocabulary import END_STATES, State, TurnEnd
from halter.guard.call_answer import restore_files
from halter.loop.decide import End, NextTurn, Park, SessionStep, WaitOut, decide_after_turn
from halter.loop.final_text import find_final_text
from halter.loop.loop import TurnLoop
from halter.loop.observer import HotStateCapture
from halter.loop.runtime_messages import MAY_CONTINUE
from halter.loop.session_runtime import SessionRuntime
from halter.loop.turn import ASK_USER, TROUBLED_ENDS, Turn
from halter.spec.agent import Phase
from halter.state.receipt import Receipt, make_receipt
from halter.tasks.result import GOOD_STATES, CompletedResult, ReachedCap, StoppedResult, find_accepted_call

INTERRUPTED: Final = "A person interrupted the answer."


class Conclusion(msgspec.Struct, frozen=True, gc=False):
    """The state of a session that has parked or ended. `sentence` describes what stopped it, if anything did."""

    state: State
    terminal_reason: str = ""
    sentence: str = ""
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.state in END_STATES


class Inbox(msgspec.Struct, frozen=True, gc=False):
    """A session's new input: `messages`, and `notes`, the alerts that no finished turn has shown.

    `has_waking_event`: a waking event has arrived since the last turn. `wake_names` are the names of all new events.
    """

    messages: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()
    has_waking_event: bool = False
    wake_names: frozenset[str] = frozenset()

    @property
    def pending(self) -> bool:
        return bool(self.messages or self.notes) or self.has_waking_event

    @property
    def spoken(self) -> bool:
        """True if the session has a message, or an alert from a person."""
        return bool(self.messages) or self.personal

    @property
    def personal(self) -> bool:
        return any(part.origin == "person" for part in (*self.messages, *self.notes))


EndChildren = Callable[[], Awaitable[bool]]
"""Ends the sub-sessions that no process runs any more; returns whether there were any."""


class StillInDoubt(HalterError):
    """A session cannot end because an effect is in doubt: the next owner settles it."""

    def __init__(self, session: str) -> None:
        super().__init__(f"Session {session} cannot end: a request or call is still in flight or in doubt.")


class OpenTurn(msgspec.Struct, frozen=True, gc=False):
    """Open a turn with these texts. It is `quiet` if nothing new caused it."""

    parts: tuple[Text, ...]
    hot: HotStateCapture | None = None
    quiet: bool = False


class TurnPolicy(Protocol):
    """Decides when a session takes its turns."""

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        """Decide whether a session without an open turn takes a turn, parks or ends."""
        ...

    def show(self, notes: Sequence[Text]) -> None: ...

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        """Continue a turn that an earlier owner opened, with these alerts and the current facts."""
        ...

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        """Decide what a session does after a turn; `step` is the default."""
        ...


class AttendedTurnPolicy:
    """The turn policy of a chat: a turn for each message."""

    def __init__(self, loop: TurnLoop) -> None:
        self._loop = loop

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        """Open a turn with the new messages, or with a prompt to continue after a stop."""
        if inbox.messages:
            return OpenTurn(inbox.messages)
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """A chat has no alerts."""

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        """A chat has no facts that could have changed."""

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        return step


class Conversation:
    """Runs one session from its current state until it parks or ends.

    A resident session keeps its lease while it is parked, and the next `run_until_parked` continues it. If this process
    has just started the session, pass all of its events as `start_events`: neither its stream nor its inbox is then
    read before the first turn. `start` is the write that starts the session, if it must be part of the first commit.
    A session whose sub-sessions hold a part of its cap cannot end: `end_children` ends them.
    """

    __slots__ = (
        "_clock",
        "_end_children",
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

    def __init__(  # noqa: PLR0913 Each is an independent option.
        self,
        runtime: SessionRuntime,
        loop: TurnLoop,
        clock: Clock,
        pace: TurnPolicy | None = None,
        *,
        resident: bool = False,
        start_events: tuple[Stored, ...] = (),
        start: Write | None = None,
        end_children: EndChildren | None = None,
    ) -> None:
        self.runtime = runtime
        self.loop = loop
        self._clock = clock
        self._end_children = end_children
        self._pace = pace or AttendedTurnPolicy(loop)
        self._resident = resident
        self._is_resumed = False
        self._task: Stored | None = None
        """The session's first event, until the first turn has used it."""
        self._first_events = start_events
        self._start = start
        self._inbox_seen = 0

    async def run_until_parked(self, row: SessionRow | None = None) -> Conclusion:
        """Run the session's turns until it parks or ends. Deferred writes are committed even if this is cancelled.

        `row` is the session's, if it was just read under its lease.
        """
        await self._resume(row)
        try:
            while True:
                turn = self.loop.turn
                if turn.is_over and turn.is_settled:
                    conclusion = await self._next_turn()
                else:
                    conclusion = await self._follow_turn(await self.loop.run_turn())
                if conclusion is not None:
                    return conclusion
        finally:
            await self.runtime.flush_deferred()

    async def release(self, error: BaseException) -> None:
        """Release the session's lease. If the store is unavailable, the lease expires instead."""
        if not isinstance(error, StoreUnavailable):
            await self.runtime.release()

    async def conclude(self, conclusion: Conclusion) -> CompletedResult[str] | StoppedResult:
        """Return the session's result for a conclusion."""
        runtime, loop = self.runtime, self.loop
        near_budget, read_events = await runtime.is_near_budget(), await runtime.read_later()
        return build_result(
            conclusion,
            loop.turn.why,
            runtime.lease.session,
            loop.messages,
            read_events,
            near_budget=near_budget,
            cap=runtime.reached_cap,
        )

    async def interrupt(self) -> Conclusion | None:
        """End the open turn after its task was cancelled, and park until the next message.

        Returns None if an effect is still in doubt: then the turn stays open.
        """
        self.runtime.inbox_head = None
        await self.runtime.ensure_running()
        if not await self.loop.interrupt(INTERRUPTED):
            return None
        await self.runtime.withdraw_questions(INTERRUPTED)
        conclusion: Conclusion | None = None
        while conclusion is None:
            await self._read_inbox()
            conclusion = await self._park(Park("WAITING_FOR_INPUT"))
        return conclusion

    async def _resume(self, row: SessionRow | None) -> None:
        """Load the session's events from the journal, or continue with the state from before the park."""
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
        if not self.loop.turn.is_over:
            await self._pace.continue_turn((await self._read_inbox(self.loop.turn.inbox_seen)).notes)

    async def _next_turn(self) -> Conclusion | None:
        """Open the next turn, or park or end the session. The end of the previous turn is committed first."""
        if self.loop.turn.number:
            await self.runtime.flush_deferred()
        inbox = await self._read_inbox()
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
        """Park or end the session after a turn, or start the next one. A turn that must wait continues after a park."""
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
        """Park inside the turn. Messages that arrive meanwhile are read in the next turn."""
        await self._read_inbox()
        park = Park("SLEEPING", wait.sleep, (), wait.trouble, wait.sentence)
        await self._pace.decide_after_turn(park)
        return await self._park(park)

    async def _is_spoken_to(self) -> bool:
        """Return whether a message has arrived since the turn began. The end of a task checks this under its lock."""
        if self._inbox_seen == self.loop.turn.inbox_seen and self.loop.rules.kind == "task":
            return False
        return (await self._read_inbox()).spoken

    async def _end(self, end: End) -> Conclusion | None:
        """End the session, unless a message arrives at the same moment."""
        while not await self.runtime.end(
            end.state, end.terminal_reason, self._inbox_seen if end.state == "COMPLETED" else None, self.loop.messages
        ):
            previous_inbox_seen, inbox = self._inbox_seen, await self._read_inbox()
            if self._inbox_seen == previous_inbox_seen:
                if self._end_children is not None and await self._end_children():
                    continue
                raise StillInDoubt(self.runtime.lease.session)
            if end.state == "COMPLETED" and inbox.spoken:
                return await self._next_turn()
        return Conclusion(end.state, end.terminal_reason, self.loop.turn.sentence)

    async def _end_cancelled(self) -> Conclusion | None:
        halt = await self.runtime.find_halt()
        if halt is None or not halt.cancels:
            return None
        await self._end(End("CANCELLED", "cancelled"))
        return Conclusion("CANCELLED", "cancelled", f"{halt.scope} was halted.")

    async def _park_after_turn(self, park: Park) -> Conclusion | None:
        """Park the session after a turn, unless the event that it waits for arrived during the turn.

        If the turn has shown all messages that were read, the park itself checks for newer ones.
        """
        if self.loop.turn.inbox_cleared == self._inbox_seen and (
            conclusion := await self._park(park, require_empty_inbox=True)
        ):
            return conclusion
        inbox = await self._read_inbox()
        if inbox.messages or inbox.has_waking_event or inbox.wake_names & frozenset(park.wake_on):
            return await self._next_turn()
        return await self._park(park)

    async def _park(self, park: Park, *, require_empty_inbox: bool = False) -> Conclusion | None:
        """Park the session, unless a message arrived at the same moment."""
        wake_at = None if park.sleep is None else self._clock.now() + park.sleep
        if not await self.runtime.park(
            park.state,
            self._inbox_seen,
            wake_at,
            park.wake_on,
            resident=self._resident,
            trouble=park.trouble,
            sentence=park.sentence,
            require_empty_inbox=require_empty_inbox,
        ):
            return None
        self.loop.pause_clock(park.trouble)
        return Conclusion(park.state, "", park.sentence or self.loop.turn.sentence, wake_at, park.wake_on)

    async def _read_inbox(self, until_seq: int | None = None) -> Inbox:
        """Read the messages since the last turn, and the alerts since the last finished one.

        If the session's row was just read, its inbox head shows if there are any.
        """
        turn = self.loop.turn
        head, self.runtime.inbox_head = self.runtime.inbox_head, None
        inbox = () if head is not None and head <= turn.inbox_cleared else await self.runtime.inbox(turn.inbox_cleared)
        if until_seq is None:
            self._inbox_seen = inbox[-1].seq if inbox else max(self._inbox_seen, turn.inbox_seen)
        start_texts = await self._read_start_message()
        if not inbox:
            return Inbox(start_texts)
        messages, alerts, has_waking_event, names = list(start_texts), list[Text](), False, set[str]()
        files: tuple[Text, ...] = ()
        for stored in inbox:
            if until_seq is not None and stored.seq > until_seq:
                break
            match stored.event:
                case WakePosted() as event:
                    is_new = stored.seq > turn.inbox_seen
                    if event.notifies or is_new:
                        (alerts if event.notifies else messages).extend((*await self._text(stored, event), *files))
                    has_waking_event = has_waking_event or (is_new and event.wakes)
                    names |= {event.name} if is_new else set()
                    files = ()
                case FilesGiven() if stored.seq > turn.inbox_seen:
                    files = restore_files(await self.runtime.read_body(stored))
                case DecisionMade() if stored.seq > self.runtime.parked_at_seq:
                    has_waking_event = True
                case _:
                    pass
        return Inbox(tuple(messages), tuple(alerts), has_waking_event, frozenset(names))

    async def _read_start_message(self) -> tuple[Text, ...]:
        if self.loop.turn.number or self._task is None or not isinstance(self._task.event, SessionStarted):
            return ()
        text = decode_body(await self.runtime.read_body(self._task))
        event = self._task.event
        return (Text(text, event.origin, event.trusted, source=event.follows),) if text.strip() else ()

    async def _text(self, stored: Stored, event: WakePosted) -> Sequence[Text]:
        text = decode_body(await self.runtime.read_body(stored))
        return [Text(text, event.origin, event.trusted, source=event.sender)] if text.strip() else []


def build_result(
    conclusion: Conclusion,
    turn_end: TurnEnd | None,
    session: str,
    messages: Sequence[Message],
    read_events: Callable[[], Sequence[Stored]],
    *,
    near_budget: bool,
    cap: CostCapReached | None = None,
) -> CompletedResult[str] | StoppedResult:
    """Build the result of a session that has parked or ended; its last turn ended as `turn_end` says."""
    text, reached_cap = find_final_text(messages), None
    if cap is not None and conclusion.terminal_reason == "cost_cap_reached":
        reached_cap = ReachedCap.of(cap)
    cap_sentence = "" if reached_cap is None else reached_cap.sentence
    fields: dict[str, Any] = {
        "session": session,
        "state": conclusion.state,
        "ok": conclusion.state in GOOD_STATES and turn_end not in (*TROUBLED_ENDS, "cancelled"),
        "text": text,
        "terminal_reason": conclusion.terminal_reason,
        "sentence": f"{cap_sentence} {conclusion.sentence}".strip(),
        "question": _find_question(messages) if turn_end == "asked" else "",
        "messages": tuple(messages),
        "near_budget": near_budget,
        "reached_cap": reached_cap,
        "build_receipt": partial(_read_receipt, read_events),
    }
    if fields["ok"] and turn_end != "asked":
        return CompletedResult(output=text, **fields)
    return StoppedResult(**fields)


def _read_receipt(read_events: Callable[[], Sequence[Stored]]) -> Receipt:
    return make_receipt(read_events())


def _find_question(messages: Sequence[Message]) -> str:
    arguments = find_accepted_call(messages, ASK_USER)
    return "" if arguments is None else str(msgspec.json.decode(arguments).get("question", ""))


REVIEW_PHASE: Final = "ethics_review"
"""The phase in which judges review the findings. Without it, they review a finding before it leaves the session."""


class ReviewPhase(Protocol):
    """Reviews the findings, also outside of the review phase if judges are configured. Returns an End or None."""

    async def __call__(self, *, phase: bool = False) -> End | None: ...


async def review_nothing(*, phase: bool = False) -> End | None:
    """Review nothing: no judges are configured."""


class PhasePolicy:
    """The turn policy of a task: a turn for each phase, with the tools of that phase."""

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
        """Open a turn with a message, a new phase, or a prompt to continue after a stop; end during a halt."""
        self._apply_phase()
        halt = await self._runtime.find_halt()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._loop.turn.number and (end := await self._advance_phase()) is not None:
            return end
        if inbox.messages:
            return OpenTurn((*inbox.messages, *self._announce_phase()) if self._is_phase_start() else inbox.messages)
        if self._is_phase_start():
            return OpenTurn(self._announce_phase())
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return OpenTurn((Text(MAY_CONTINUE, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """A task has no alerts."""

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        self._apply_phase()

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        """Enter the next phase after a phase's turn; after the last one the session ends."""
        if not isinstance(step, End) or step.state != "COMPLETED":
            return step
        self._apply_phase()
        if not self._is_phase_start() and not await self._has_entered():
            return await self._review() or step
        return await self._advance_phase() or NextTurn()

    async def _advance_phase(self) -> End | None:
        """Run the review if this is its phase. An interrupted review starts again."""
        while self._is_phase_start() and self._current_phase().name == REVIEW_PHASE:
            end = await self._review(phase=True)
            if end is not None:
                return end
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
        phase = self._loop.phase
        return 0 if phase is None else min(phase.number, len(self._phases) - 1)

    def _is_phase_start(self) -> bool:
        phase = self._loop.phase
        return (0 if phase is None else phase.turn) == self._loop.turn.number

    def _apply_phase(self) -> None:
        index = self._phase_index()
        phase = self._phases[index]
        if self._runtime.context.phase is not phase:
            self._runtime.context = msgspec.structs.replace(self._runtime.context, phase=phase)
        self._loop.offer(self._offered[index])

    def _announce_phase(self) -> tuple[Text, ...]:
        """Announce the phase; a task with a single phase needs no announcement."""
        if len(self._phases) == 1:
            return ()
        phase, number = self._current_phase(), self._number() + 1
        tools = "all of your tools" if phase.grants is None else join_names(phase.grants) or "no tools"
        text = f"Phase {number} of {len(self._phases)} begins: {phase.name}. In it you may use {tools}."
        return (Text(f"{text} End your turn when this phase is done.", "config", reason="phase"),)
