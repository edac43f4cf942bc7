"""`halter run`, `chat`, `route` and `tools`: run a task, chat, show how a message is routed, show tools."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    find_session_by_prefix,
    format_store_option,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_line, answer_table, escape_text, print_sentence, warn
from halter.cli.play import show_step
from halter.cli.terminal import LineReader
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.events import ApprovalGiven
from halter.core.events.effects import CostCapReached
from halter.core.ids import SessionId, can_decide, session_stream
from halter.core.messages import StreamChunk, ToolCall
from halter.core.money import format_compared, format_micros, format_usd, to_unit_amount
from halter.core.text import clean, escape_hidden, shorten
from halter.core.vocabulary import SessionKind, State, Verdict
from halter.guard.approvals import answer_decision
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import get_open_decision
from halter.operations.queries import read_all_events
from halter.present.moments import format_moment
from halter.present.tables import describe_next_due
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.core.ports import Store
    from halter.core.provenance import Declaration
    from halter.core.tools import ProviderTool
    from halter.front_door.fast_paths import RoutingContext
    from halter.front_door.route import RoutingDecision
    from halter.loop.observer import LoopObserver

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

    def make_sub_observer(self) -> "LoopObserver":
        """Make an observer of a sub-session, which prints its calls and costs, and no text."""
        from halter.loop.observer import LoopObserver

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
    context: Any,
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
    from halter.runtime.message_router import ForwardedMessage, SubSessionObserver, handle_message, send_message

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


AGENT_FILE: Final = "agent.yaml"
MAX_PATIENT_INTERRUPTS: Final = 2
"""After more Ctrl-C than this in one answer, the chat ends without waiting for the answer to stop."""
LEAVE_COMMANDS: Final = frozenset(("/quit", "/exit", "/q"))
TYPED_ANSWERS: Final[Mapping[str, Verdict]] = {"y": "approve", "yes": "approve", "n": "deny", "no": "deny"}

AgentArgument = Annotated[Path, typer.Argument(metavar="AGENT", help="Agent folder.")]
NoRouteOption = Annotated[bool, typer.Option("--no-route", help="Send every message to the model, without routing.")]
FileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="Picture, PDF, document, sound or text. PATH#pages=9 or PATH#seconds=90 limits it. Repeatable.",
    ),
]
ResumeOption = Annotated[str, typer.Option("--resume", metavar="SESSION", help="Resume a session.")]


def run(
    agent: AgentArgument,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The task; - reads stdin.")] = "",
    *,
    file: FileOption = None,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an agent a task and wait for the result. The run survives a crash, and continues with --resume.

    The answer is printed to stdout, progress to stderr. A message that needs no model is answered without one: halter
    route shows how a message is routed. Exits 1 if the run failed.
    """
    text = sys.stdin.read() if message == "-" else message
    if not text.strip() and not resume:
        fail('No task. Pass one, as in halter run FOLDER "message".', EXIT_USAGE)
    if file and not text.strip():
        fail("--file needs a message. Say what the files are for.", EXIT_USAGE)
    screen = Screen(quiet=as_json)

    async def job(app: Runtime) -> Any:
        async with open_agent_context(app, resolve_agent_folder(agent)) as context:
            session = await _resume_session(app, context, resume) if resume else SessionId(app.ids.make())
            answering = bool(resume) and await _is_waiting_for_answer(app, session)
            if file and resume:
                await _post_with_files(context, session, text, file)
            elif file:
                await _begin_with_files(context, session, text, file)
            elif text.strip():
                answer = await pass_front_door(
                    context,
                    session,
                    text,
                    "task",
                    screen,
                    screen.show_waiting,
                    routes=not no_route,
                    is_answer=answering,
                )
                if answer is not None:
                    return answer
            screen.show_note(f"Session {session}")
            try:
                return await _attend_session(context, session, screen)
            except asyncio.CancelledError:
                screen.end_line()
                warn(f"{resume_hint} {session}")
                raise

    resume_hint = f"Continue with: halter run {quote(str(agent))}{format_store_option(store)} --resume"
    restart_hint = f"{resume_hint} SESSION (see halter sessions)."
    result = run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=restart_hint)
    _print_result(result, agent, as_json=as_json)
    if not result.ok:
        raise typer.Exit(EXIT_FAILED)


def chat(
    agent: AgentArgument,
    *,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with an agent in the terminal. Calls and their cost are shown, and you are asked for decisions.

    A message that needs no model is answered without one. Ctrl-C stops the answer; at the prompt or a second time, it
    ends the chat. Ctrl-D or /quit leaves; --resume continues later.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> None:
        await _chat(app, folder, resume, resume_hint, routes=not no_route, as_json=as_json)

    resume_hint = f"Continue with: halter chat {quote(str(folder))}{format_store_option(store)} --resume"
    restart_hint = f"{resume_hint} SESSION (see halter sessions)."
    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=restart_hint)


async def _chat(app: Runtime, folder: Path, resume: str, resume_hint: str, *, routes: bool, as_json: bool) -> None:
    """Chat line by line. A session starts with the first line."""
    async with open_agent_context(app, folder) as context, LineReader(prompt="" if as_json else "you> ") as line_reader:
        session = await _resume_session(app, context, resume) if resume else SessionId(app.ids.make())
        chat_state = ChatState(
            has_session=bool(resume), has_open_question=bool(resume) and await _is_waiting_for_answer(app, session)
        )
        if not as_json:
            print_sentence(
                f"Session {session}, with {context.agent.policy.name}. Ctrl-D or /quit leaves.", at_once=True
            )
            await _report_running(app, context)
        try:
            if resume:
                await _resume_sub_sessions(app, context, session, line_reader, as_json=as_json)
            async for line in line_reader:
                if line.strip() in LEAVE_COMMANDS:
                    break
                if line.strip():
                    answering = _answer_line(
                        app, context, session, line, line_reader, chat_state, routes=routes, as_json=as_json
                    )
                    await _run_interruptible(answering, chat_state)
                    if chat_state.has_ended:
                        return
                    if chat_state.interrupts > 1:
                        raise asyncio.CancelledError
        finally:
            if line_reader.asking:
                print_sentence("", at_once=True)
            if chat_state.has_session and not (as_json or chat_state.has_ended):
                warn(f"{resume_hint} {session}", "dim")


@dataclass(slots=True)
class ChatState:
    """The state of a chat.

    `interrupts` counts the Ctrl-C typed during the last answer.
    """

    has_session: bool = False
    has_open_question: bool = False
    has_ended: bool = False
    interrupts: int = 0

    def start_answer(self) -> None:
        self.has_session = True


async def _run_interruptible(answering: Coroutine[Any, Any, None], chat_state: ChatState) -> None:
    """Let Ctrl-C stop an answer. A second one ends the chat after the answer has stopped, a third one immediately."""
    chat_task, answer_task = asyncio.current_task(), asyncio.ensure_future(answering)
    loop = asyncio.get_running_loop()
    chat_state.interrupts = 0

    def end_chat() -> None:
        if chat_task is not None and not chat_task.cancelling():
            chat_task.cancel()

    def interrupt() -> None:
        chat_state.interrupts += 1
        if chat_state.interrupts == 1:
            answer_task.cancel()
        elif chat_state.interrupts > MAX_PATIENT_INTERRUPTS:
            end_chat()

    handles_sigint = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if handles_sigint:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await answer_task
    except asyncio.CancelledError:
        if not chat_state.interrupts or (chat_task is not None and chat_task.cancelling()):
            raise
        warn("  Interrupted. Send a message to continue.", "dim")
    finally:
        if handles_sigint:
            loop.add_signal_handler(signal.SIGINT, end_chat)


async def _answer_line(
    app: Runtime,
    context: Any,
    session: SessionId,
    line: str,
    line_reader: LineReader,
    chat_state: ChatState,
    *,
    routes: bool,
    as_json: bool,
) -> None:
    screen = Screen(quiet=as_json)
    prompt = _DecisionPrompt(app, line_reader, screen)
    try:
        answer = await pass_front_door(
            context,
            session,
            line,
            "chat",
            screen,
            prompt.ask,
            chat_state.start_answer,
            routes=routes,
            is_answer=chat_state.has_open_question,
            typed_ahead=line_reader.ahead,
        )
        if answer is not None:
            show_front_door_answer(answer, as_json=as_json)
            return
        result = await _attend_session(context, session, screen, prompt.ask, lambda: bool(chat_state.interrupts))
    finally:
        await prompt.end()
        if chat_state.interrupts and line_reader.asking:
            # The unanswered question is gone: the next line answers the next prompt.
            line_reader.require_fresh()
    _show(result, as_json=as_json)
    chat_state.has_open_question, chat_state.has_ended = bool(result.question), result.has_ended
    if chat_state.has_open_question:
        line_reader.require_fresh()


async def _resume_sub_sessions(
    app: Runtime, context: Any, session: SessionId, line_reader: LineReader, *, as_json: bool
) -> None:
    """Resume the sub-sessions that were running."""
    from halter.runtime.session_start import resume_delegation

    screen = Screen(quiet=as_json)
    prompt = _DecisionPrompt(app, line_reader, screen)
    try:
        async with aclosing(resume_delegation(context, session, screen.make_sub_observer(), prompt.ask)) as results:
            async for result in results:
                screen.show_note(f"Session {result.session}, a sub-session of this one:")
                if not as_json:
                    print_sentence(result.text, at_once=True)
    finally:
        await prompt.end()


async def _begin_with_files(context: Any, session: SessionId, text: str, files: Sequence[Path]) -> None:
    """Start a session with files. Only the model can answer it, so the front door is skipped."""
    from halter.runtime.session_origin import read_initial_messages
    from halter.runtime.session_start import begin_session

    history = await read_initial_messages(context, (), files)
    await begin_session(context, text, "task", session, history=history)


async def _post_with_files(context: Any, session: SessionId, text: str, files: Sequence[Path]) -> None:
    from halter.runtime.session_start import post_message

    await post_message(context, session, text, files)


async def _is_waiting_for_answer(app: Runtime, session: SessionId) -> bool:
    from halter.operations.agents import is_waiting_for_answer

    return await is_waiting_for_answer(app, session)


async def _report_running(app: Runtime, context: Any) -> None:
    from halter.runtime.session_builder import find_autonomous_session

    autonomous = await find_autonomous_session(context)
    if autonomous is not None and autonomous.ended_at is None:
        next_due = describe_next_due(autonomous, app.clock.now())
        due_note = f", next turn {next_due}" if next_due else ""
        sentence = f"{autonomous.agent} also runs unattended, in {autonomous.session} ({autonomous.state}{due_note})."
        print_sentence(
            f"{sentence} Your messages here reach it; this chat sees its hot state as last saved.", at_once=True
        )


def _show(result: Any, *, as_json: bool) -> None:
    if as_json:
        answer_line(_to_json_object(result))
    elif result.question:
        print_sentence(f"? {result.question}", at_once=True)
    elif not result.ok and result.state == "WAITING_FOR_INPUT" and not result.terminal_reason:
        warn(f"  {result.sentence}")
    elif not result.ok:
        warn(f"  {_describe_failure(result)}")


class _DecisionPrompt:
    """Asks the person at the keyboard for decisions, which can also be answered elsewhere."""

    def __init__(self, app: Runtime, lines: LineReader, screen: Screen) -> None:
        self._app = app
        self._lines = lines
        self._screen = screen
        self._asking: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    def ask(self, approval: ApprovalRequired, state: State) -> None:
        """Ask here if a person is at the terminal; a cap cannot be raised by a plain yes."""
        if state == "WAITING_FOR_APPROVAL" and self._lines.is_tty and can_decide(self._app.settings.person):
            self._asking.append(asyncio.create_task(self._ask(approval)))
        else:
            self._screen.show_waiting(approval, state)

    async def _ask(self, approval: ApprovalRequired) -> None:
        async with self._turn:
            self._screen.end_line()
            decision = await get_open_decision(
                Actor(self._app, Principal(self._app.settings.person)), approval.decision
            )
            for line in escape_hidden(decision.display_text).splitlines():
                warn(f"  {line}")
            reply: str | None = ""
            while reply is not None and reply not in TYPED_ANSWERS:
                reply = await self._lines.ask("  approve? [y/n] ")
                reply = None if reply is None else reply.strip().lower()
            if reply is None:
                self._screen.show_waiting(approval, "WAITING_FOR_APPROVAL")
                return
            person = self._app.settings.person
            write = answer_decision(decision, TYPED_ANSWERS[reply], person, self._app.ids.make())
            if any(isinstance(stored.event, ApprovalGiven) for stored in (await self._app.store.commit(write)).events):
                warn("  This decision needs another approver.")

    async def end(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


@asynccontextmanager
async def open_agent_context(app: Runtime, folder: Path) -> AsyncGenerator[Any]:
    from halter.operations import agents
    from halter.runtime.telemetry.tracer import trace_process

    async with trace_process(app, warn), agents.speaking_with(app, folder, warn) as context:
        yield context


async def _resume_session(app: Runtime, context: Any, prefix: str) -> SessionId:
    from halter.runtime.session_start import reopen_agent_session

    row = await find_session_by_prefix(app, prefix)
    if row.ended_at is not None and not can_decide(app.settings.person):
        raise ConfigError("Only a person can reopen an ended session; this command runs inside an agent.")
    await reopen_agent_session(context, row.session)
    return SessionId(row.session)


async def _attend_session(
    context: Any,
    session: SessionId,
    screen: Screen,
    on_wait: Any = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Any:
    from halter.loop.observer import LoopObserver
    from halter.runtime.session_runner import attend_session
    from halter.runtime.session_start import is_session_near_budget
    from halter.tasks.conversation import build_result

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


def _print_result(result: Any, agent: Path, *, as_json: bool) -> None:
    if isinstance(result, FrontDoorAnswer):
        show_front_door_answer(result, as_json=as_json, alone=True)
        return
    if as_json:
        answer_json(_to_json_object(result))
        return
    if result.question:
        print_sentence(f"? {result.question}")
        warn(f'Answer with: halter run {quote(str(agent))} --resume {result.session} "your answer"', "dim")
    elif not result.ok:
        warn(_describe_failure(result))
    warn(f"{result.state}, {format_usd(result.cost_usd)}. Receipt: halter show {result.session} --receipt", "dim")


def _describe_failure(result: Any) -> str:
    reason = result.terminal_reason or "the turn ended early"
    sentence = result.sentence.removeprefix(f"[{reason}] ")
    cap_hint = f" To continue, raise the cap: halter budget raise session:{result.session} AMOUNT"
    return f"{result.state}: {sentence or f'{reason}.'}{cap_hint if reason == 'cost_cap_reached' else ''}"


def _to_json_object(result: Any) -> dict[str, Any]:
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


def resolve_agent_folder(agent: Path) -> Path:
    if not (agent / AGENT_FILE).is_file() and not agent.is_file():
        fail(f"No {AGENT_FILE} found in {agent}. Pass an agent folder, or make one with halter init.", EXIT_USAGE)
    return agent.parent if agent.is_file() else agent


def route(
    agent: AgentArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a message to an agent would be routed, and why. Nothing is executed or recorded.

    Sums, dates, commands and other messages that need no model are answered without one; this shows which rule applies.
    """
    folder = resolve_agent_folder(agent)
    name, decision = report_errors(lambda: _route_text(folder, text, store))
    if as_json:
        answer_json({"route": decision.route, "strategy": decision.strategy, "why": decision.why})
    else:
        print_sentence(f"{name}: {decision.strategy or decision.route}. {decision.why}")


def _route_text(folder: Path, text: str, store: str | None) -> "tuple[str, RoutingDecision]":
    from halter.config.agent_files import read_agent
    from halter.config.merge import FleetConfig
    from halter.config.resolve import resolve_agent
    from halter.front_door.route import route_message
    from halter.journal.open import store_file_exists
    from halter.runtime.message_router import build_surroundings, declares_tools
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    settings = read_cli_settings(store)
    file = read_local_fleet(settings)

    async def names(fleet: FleetConfig, store: "Store | None", now: int) -> "RoutingContext":
        agent = resolve_agent(fleet, read_agent(folder), folder)
        return await build_surroundings(agent, store, now, has_tools=declares_tools(agent, folder))

    async def job(app: Runtime) -> "RoutingContext":
        return await names((await resolve_effective_policy(app.store, file)).fleet, app.store, app.clock.now())

    if store_file_exists(settings.store):
        surroundings = run_with_app(store, job, despite_doubt=True)
    else:
        surroundings = asyncio.run(names(file or FleetConfig(), None, SystemClock().now()))
    return surroundings.agent, route_message(text, surroundings)


def tools(agent: AgentArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the declared and inferred properties of each tool: who writes its results, its reach, its arguments.

    The provenance check uses these properties. Declare inferred ones in the tool or under policy.tools.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> "tuple[list[tuple[str, Declaration]], tuple[ProviderTool, ...]]":
        from halter.runtime.assembly.assembled_agent import assemble_agent
        from halter.tasks.task_tools import list_verb_specs

        async with assemble_agent(app, folder, report=warn) as assembled_agent:
            specs = (*(each.spec for each in assembled_agent.tools.values()), *list_verb_specs())
            return [
                (spec.name, assembled_agent.policy.declaration(spec)) for spec in specs
            ], assembled_agent.model_settings.provider_tools

    declarations, provider_tools = run_with_app(store, job, new=True, runs_agents=True)
    if as_json:
        entries = [{"tool": name, "declaration": declaration} for name, declaration in declarations]
        answer_json(
            [*entries, *({"tool": each.name, "provider": True, "max_uses": each.max_uses} for each in provider_tools)]
        )
        return
    rows = [
        [name, each.reads, each.reach, ", ".join(_describe_uses(each)), ", ".join(each.guessed) or "nothing"]
        for name, each in declarations
    ]
    rows += [
        [
            each.name,
            "anyone",
            "others",
            f"run by the provider, not seen by the guard: {each.max_uses} per request",
            "nothing",
        ]
        for each in provider_tools
    ]
    columns = ["tool", "reads", "reach", "arguments", "inferred"]
    answer_table(f"Tools of {folder.name}", columns, rows, long="arguments inferred")


def _describe_uses(declaration: "Declaration") -> list[str]:
    return [f"{name} {use.role}{f':{use.kind}' if use.kind else ''}" for name, use in declaration.arguments.items()]
