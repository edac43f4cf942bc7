"""A session with an agent in a terminal: its messages, and what is shown of them."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from halter.cli.command import (
    find_session_by_prefix,
)
from halter.cli.output import answer_json, answer_line, escape_text, print_sentence, warn
from halter.cli.run.play import show_step
from halter.core.errors import ConfigError
from halter.core.events.effects import CostCapReached
from halter.core.ids import SessionId, can_decide, session_stream
from halter.core.messages import StreamChunk, ToolCall
from halter.core.money import format_compared, format_micros, format_usd, to_unit_amount
from halter.core.text import clean, shorten
from halter.core.vocabulary import SessionKind, State
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.loop.observer import LoopObserver
from halter.operations.agents import is_waiting_for_answer, speaking_with
from halter.operations.queries import read_all_events
from halter.present.moments import format_moment
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.message_router import ForwardedMessage, SubSessionObserver, handle_message, send_message
from halter.runtime.runtime import Runtime
from halter.runtime.session_origin import read_initial_messages
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session, is_session_near_budget, post_message, reopen_agent_session
from halter.runtime.telemetry.tracer import trace_process
from halter.tasks.conversation import build_result

MAX_CALL_TEXT = 100


class Screen:
    """Prints one session: the model's text on stdout, everything else on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._line_open = False
        self.streamed = ""

    def listen(self, chunk: StreamChunk) -> None:
        """Print a chunk of an answer; if the attempt failed, print that the answer starts again."""
        if chunk.discard and self.streamed:
            self.end_line()
            self.show_note("  again    the answer above was interrupted and starts again below.")
            self.streamed = ""
        if chunk.text and not self.quiet:
            sys.stdout.write(escape_text(chunk.text).plain)
            sys.stdout.flush()
            self._line_open = not chunk.text.endswith("\n")
        self.streamed += chunk.text

    def show_text(self, text: str, cost: int) -> None:
        if text and not self.streamed and not self.quiet:
            print_sentence(text, at_once=True)
        self.end_line()
        self.streamed = ""
        if cost:
            self.show_note(f"  {format_micros(cost)}")

    def show_warning(self, sentence: str) -> None:
        self.end_line()
        warn(f"  {clean(sentence)}")

    def show_result(self, call: ToolCall, answer: Answer) -> None:
        cost = f" {format_usd(answer.cost_usd)}" if answer.cost_usd else ""
        first_line = shorten(clean(answer.text).strip().partition("\n")[0], MAX_CALL_TEXT)
        arguments = shorten(clean(call.arguments), 60)
        self.show_note(f"  {answer.outcome:<8} {call.tool} {arguments}{cost}  {first_line}")

    def show_waiting(self, approval: ApprovalRequired, state: State) -> None:
        self.end_line()
        awaited, cap_option = ("a budget", " --cap AMOUNT") if state == "WAITING_FOR_BUDGET" else ("approval", "")
        command = f"halter approve {approval.decision}{cap_option}"
        warn(f"  waits    for {awaited}. Review it with halter inbox, then: {command}")

    def show_sleeping(self, cap: CostCapReached, until: int) -> None:
        """Print which cap is reached, until when the session sleeps, and how to raise the cap."""
        self.end_line()
        amounts = (to_unit_amount(each, cap.unit) for each in (cap.spent, cap.cap))
        spent_text, cap_text = format_compared(cap.unit, *amounts)
        period = cap.window.partition("/")[0]
        remedy = f"halter budget raise {cap.scope} AMOUNT" if cap.unit == "usd" else "raise token_budget_per_hour"
        warn(
            f"  paused   until {format_moment(until)}: {cap.scope} has spent {spent_text} of {cap_text} for this "
            f"{period}. To continue now: {remedy}"
        )

    def make_sub_observer(self) -> LoopObserver:
        """Make an observer of a sub-session, which prints its calls and costs, and no text."""
        return LoopObserver(on_text=self._cost, on_result=self.show_result, on_cap=self.show_sleeping)

    def _cost(self, _: str, cost: int) -> None:
        if cost:
            self.show_note(f"  {format_micros(cost)}")

    def end_line(self) -> None:
        if self._line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._line_open = False

    def show_note(self, sentence: str) -> None:
        if not self.quiet:
            self.end_line()
            warn(sentence, "dim")


class FrontDoorAnswer(msgspec.Struct, frozen=True):
    """An answer of the front door, without a session's turn."""

    route: str
    strategy: str | None
    why: str
    ok: bool
    text: str
    session: str


async def pass_front_door(
    context: AgentRuntime,
    session: SessionId,
    text: str,
    kind: SessionKind,
    screen: Screen,
    on_wait: Callable[[ApprovalRequired, State], None],
    on_start: Callable[[], None] = lambda: None,
    *,
    routes: bool,
    is_answer: bool,
    typed_ahead: bool = False,
) -> FrontDoorAnswer | None:
    """Answer a message at the front door, or send it to the session and return None.

    A message that was typed before its prompt was shown (`typed_ahead`) approves nothing shown in the meantime.
    """

    def on_step(step: Any, answer: Any) -> None:
        if not screen.quiet:
            show_step(step, answer)

    is_posted = False
    if routes:
        observer = SubSessionObserver(screen.make_sub_observer(), on_wait, on_step, on_start)
        outcome = await handle_message(
            context, session, text, kind=kind, is_answer=is_answer, showing=observer, typed_ahead=typed_ahead
        )
        if not isinstance(outcome, ForwardedMessage):
            route = outcome.routed
            return FrontDoorAnswer(route.route, route.strategy, route.why, outcome.ok, outcome.answer, outcome.session)
        is_posted = outcome.is_posted
    if not is_posted:
        await send_message(context, session, text, kind)
    on_start()
    return None


def show_front_door_answer(answer: FrontDoorAnswer, *, as_json: bool, alone: bool = False) -> None:
    if as_json:
        (answer_json if alone else answer_line)(answer)
    elif answer.ok:
        print_sentence(answer.text, at_once=True)
    else:
        warn(answer.text)


async def run_task(
    app: Runtime,
    folder: Path,
    text: str,
    files: Sequence[Path],
    resume: str,
    resume_hint: str,
    *,
    routes: bool,
    quiet: bool,
) -> Any:
    """Give an agent a task, or resume one, and return its result. `resume_hint` is shown if it is interrupted."""
    screen = Screen(quiet=quiet)
    async with open_agent_context(app, folder) as context:
        session = await resume_session(app, context, resume) if resume else SessionId(app.ids.make())
        is_answer = bool(resume) and await is_waiting_for_answer(app, session)
        if files and resume:
            await post_message(context, session, text, files)
        elif files:
            await _begin_with_files(context, session, text, files)
        elif text.strip():
            answer = await pass_front_door(
                context, session, text, "task", screen, screen.show_waiting, routes=routes, is_answer=is_answer
            )
            if answer is not None:
                return answer
        screen.show_note(f"Session {session}")
        try:
            return await attend_with_screen(context, session, screen)
        except asyncio.CancelledError:
            screen.end_line()
            warn(f"{resume_hint} {session}")
            raise


async def _begin_with_files(context: AgentRuntime, session: SessionId, text: str, files: Sequence[Path]) -> None:
    """Start a session with files. Only the model can answer it, so the front door is skipped."""
    history = await read_initial_messages(context, (), files)
    await begin_session(context, text, "task", session, history=history)


@asynccontextmanager
async def open_agent_context(app: Runtime, folder: Path) -> AsyncGenerator[AgentRuntime]:
    async with trace_process(app, warn), speaking_with(app, folder, warn) as context:
        yield context


async def resume_session(app: Runtime, context: AgentRuntime, prefix: str) -> SessionId:
    row = await find_session_by_prefix(app, prefix)
    if row.ended_at is not None and not can_decide(app.settings.person):
        raise ConfigError("Only a person can reopen an ended session; this command runs inside an agent.")
    await reopen_agent_session(context, row.session)
    return SessionId(row.session)


async def attend_with_screen(
    context: AgentRuntime,
    session: SessionId,
    screen: Screen,
    on_wait: Any = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Any:
    observer = LoopObserver(
        screen.listen, screen.show_text, screen.show_result, screen.show_warning, screen.show_sleeping
    )
    outcome, loop = await attend_session(
        context, session, observer=observer, waits=on_wait or screen.show_waiting, interrupted=is_interrupted
    )
    screen.end_line()
    is_near_budget = await is_session_near_budget(context, session)
    events = await read_all_events(context.app, session_stream(session))
    return build_result(outcome, loop.turn.why, session, loop.messages, lambda: events, near_budget=is_near_budget)


def print_run_result(result: Any, agent: Path, *, as_json: bool) -> None:
    if isinstance(result, FrontDoorAnswer):
        show_front_door_answer(result, as_json=as_json, alone=True)
        return
    if as_json:
        answer_json(to_json_object(result))
        return
    if result.question:
        print_sentence(f"? {result.question}")
        warn(f'Answer with: halter run {quote(str(agent))} --resume {result.session} "your answer"', "dim")
    elif not result.ok:
        warn(describe_failure(result))
    warn(f"{result.state}, {format_usd(result.cost_usd)}. Receipt: halter show {result.session} --receipt", "dim")


def describe_failure(result: Any) -> str:
    reason = result.terminal_reason or "the turn ended early"
    sentence = result.sentence.removeprefix(f"[{reason}] ")
    cap_hint = f" To continue, raise the cap: halter budget raise session:{result.session} AMOUNT"
    return f"{result.state}: {sentence or f'{reason}.'}{cap_hint if reason == 'cost_cap_reached' else ''}"


def to_json_object(result: Any) -> dict[str, Any]:
    return {
        "session": result.session,
        "state": result.state,
        "terminal_reason": result.terminal_reason,
        "ok": result.ok,
        "text": result.text,
        "question": result.question,
        "sentence": result.sentence,
        "cost_usd": result.cost_usd,
        "usage": msgspec.to_builtins(result.usage),
        "steps": sum(line.purpose == "turn" for line in result.receipt.requests),
        "calls": len(result.receipt.calls),
    }
