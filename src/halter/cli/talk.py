"""`halter run`, `chat` and `route`: give an agent a task, talk with it, or see how a message is routed."""

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
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_line, answer_table, escape_text, print_sentence, warn
from halter.cli.play import show_step
from halter.cli.terminal import LineReader
from halter.core.clock import SystemClock
from halter.core.effect_events import CostCapReached
from halter.core.errors import ConfigError
from halter.core.events import ApprovalGiven
from halter.core.ids import SessionId, may_decide, session_stream
from halter.core.messages import StreamChunk, ToolCall
from halter.core.money import format_micros, format_unit_amount, format_usd, to_unit_amount
from halter.core.text import clean, escape_hidden, shorten
from halter.core.vocabulary import SessionKind, State, Verdict
from halter.guard.approvals import answer_decision
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.operations.decisions import decision_meant
from halter.operations.desk import Actor, Principal
from halter.operations.queries import read_all_events
from halter.present.events import format_moment
from halter.present.tables import describe_next_due
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.core.ports import Store
    from halter.core.provenance import Declaration
    from halter.core.tools import ProviderTool
    from halter.front_door.fast_paths import RoutingContext
    from halter.front_door.route import RoutingDecision
    from halter.loop.loop import LoopObserver

MAX_CALL_TEXT = 100


class Screen:
    """Shows one session: its words on stdout, everything else on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._line_open = False
        self.streamed = ""

    def listen(self, chunk: StreamChunk) -> None:
        """Show a chunk of an answer; if the attempt failed, say that the answer begins anew."""
        if chunk.discard and self.streamed:
            self.end_line()
            self.show_note("  again    the answer above was cut off; it follows anew.")
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
        first = shorten(clean(answer.text).strip().partition("\n")[0], MAX_CALL_TEXT)
        arguments = shorten(clean(call.arguments), 60)
        self.show_note(f"  {answer.outcome:<8} {call.tool} {arguments}{cost}  {first}")

    def show_waiting(self, approval: ApprovalRequired, state: State) -> None:
        self.end_line()
        more = " --cap AMOUNT" if state == "WAITING_FOR_BUDGET" else ""
        warn(f"  waits    for you. Look at it with halter inbox, then: halter approve {approval.decision}{more}")

    def show_sleeping(self, cap: CostCapReached, until: int) -> None:
        """Say at once which cap is met, until when the session sleeps, and how to raise it."""
        self.end_line()
        spent, most = (format_unit_amount(to_unit_amount(each, cap.unit), cap.unit) for each in (cap.spent, cap.cap))
        per = cap.window.partition("/")[0]
        more = f"halter budget raise {cap.scope} AMOUNT" if cap.unit == "usd" else "a higher token_budget_per_hour"
        warn(
            f"  sleeps   until {format_moment(until)}: {spent} of {most} is spent, the cap of {cap.scope} for "
            f"{'an' if per == 'hour' else 'a'} {per}. It goes on at once with: {more}"
        )

    def make_sub_observer(self) -> "LoopObserver":
        """Show a sub-session: its calls as they come, its words at the end."""
        from halter.loop.loop import LoopObserver

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
    """A message that was answered at the front door."""

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
    waits: Callable[[ApprovalRequired, State], None],
    began: Callable[[], None] = lambda: None,
    *,
    routes: bool,
    asked: bool,
    ahead: bool = False,
) -> FrontDoorAnswer | None:
    """Answer a message, or pass it on to the session; None if its agent has to answer.

    A message typed `ahead` agrees to nothing that was shown meanwhile.
    """
    from halter.runtime.front_door import ForwardedMessage, SubSessionObserver, handle_message, send_message

    def on_step(step: Any, answer: Any) -> None:
        if not screen.quiet:
            show_step(step, answer)

    told = False
    if routes:
        showing = SubSessionObserver(screen.make_sub_observer(), waits, on_step, began)
        done = await handle_message(context, session, text, kind=kind, answering=asked, showing=showing, ahead=ahead)
        if not isinstance(done, ForwardedMessage):
            route = done.routed
            return FrontDoorAnswer(route.route, route.strategy, route.why, done.ok, done.answer, done.session)
        told = done.told
    if not told:
        await send_message(context, session, text, kind)
    began()
    return None


def show_front_door_answer(done: FrontDoorAnswer, *, as_json: bool, alone: bool = False) -> None:
    if as_json:
        (answer_json if alone else answer_line)(done)
    elif done.ok:
        print_sentence(done.text, at_once=True)
    else:
        warn(done.text)


AGENT_FILE: Final = "agent.yaml"
MOST_PATIENT_INTERRUPTS: Final = 2
"""After so many Ctrl-C in one answer the chat ends without waiting for the answer to stop."""
LEAVE_COMMANDS: Final = frozenset(("/quit", "/exit", "/q"))
TYPED_ANSWERS: Final[Mapping[str, Verdict]] = {"y": "approve", "yes": "approve", "n": "deny", "no": "deny"}

AgentArgument = Annotated[Path, typer.Argument(metavar="AGENT", help="An agent's folder.")]
NoRouteOption = Annotated[bool, typer.Option("--no-route", help="Send every message to the model, without routing.")]
FileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="A picture, PDF, sound or text, more than once if need be; PATH#pages=9 or PATH#seconds=90 bounds it.",
    ),
]
ResumeOption = Annotated[str, typer.Option("--resume", metavar="SESSION", help="Continue a session.")]


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
    """Give an agent a task, and wait until it is done. It survives a crash, and continues with --resume.

    The answer is printed to stdout, progress to stderr. What needs no model is answered without one: halter route shows
    how a message is routed. Exits 1 if the run failed.
    """
    text = sys.stdin.read() if message == "-" else message
    if not text.strip() and not resume:
        fail('There is no task: give one, as in halter run FOLDER "message".', EXIT_USAGE)
    if file and resume:
        fail("A session that has begun takes no files: give them to a new one, without --resume.", EXIT_USAGE)
    screen = Screen(quiet=as_json)

    async def job(app: Runtime) -> Any:
        async with open_agent_context(app, resolve_agent_folder(agent)) as context:
            session = await _resume_session(app, context, resume) if resume else SessionId(app.ids.make())
            asked = bool(resume) and await _is_waiting_for_answer(app, session)
            if file:
                await _begin_with_files(context, session, text, file)
            elif text.strip():
                done = await pass_front_door(
                    context, session, text, "task", screen, screen.show_waiting, routes=not no_route, asked=asked
                )
                if done is not None:
                    return done
            screen.show_note(f"Session {session}")
            try:
                return await _attend_session(context, session, screen)
            except asyncio.CancelledError:
                screen.end_line()
                warn(f"Continue it with: halter run {quote(str(agent))} --resume {session}")
                raise

    again = f"Continue with: halter run {quote(str(agent))} --resume SESSION (halter sessions names it)."
    result = run_with_app(store, job, new=True, acts=True, following=True, runs=again)
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
    """Talk with an agent, line by line. It shows its calls and their cost, and asks you where you have to decide.

    What needs no model is answered without one. Ctrl-C ends the answer, at the prompt or a second time the chat. Ctrl-D
    or /quit leaves; --resume continues later.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> None:
        await _chat(app, folder, resume, routes=not no_route, as_json=as_json)

    again = f"Continue with: halter chat {quote(str(folder))} --resume SESSION (halter sessions names it)."
    run_with_app(store, job, new=True, acts=True, following=True, runs=again)


async def _chat(app: Runtime, folder: Path, resume: str, *, routes: bool, as_json: bool) -> None:
    """Talk line by line. A session begins with the first line."""
    async with open_agent_context(app, folder) as context, LineReader(prompt="" if as_json else "you> ") as lines:
        session = await _resume_session(app, context, resume) if resume else SessionId(app.ids.make())
        talk = ChatState(has_begun=bool(resume), has_asked=bool(resume) and await _is_waiting_for_answer(app, session))
        if not as_json:
            print_sentence(
                f"Session {session}, with {context.agent.policy.name}. Ctrl-D or /quit leaves.", at_once=True
            )
            await _report_running(app, context)
        try:
            if resume:
                await _resume_sub_sessions(app, context, session, lines, as_json=as_json)
            async for line in lines:
                if line.strip() in LEAVE_COMMANDS:
                    break
                if line.strip():
                    answering = _answer_line(app, context, session, line, lines, talk, routes=routes, as_json=as_json)
                    await _run_interruptible(answering, talk)
                    if talk.over:
                        return
                    if talk.interrupts > 1:
                        raise asyncio.CancelledError
        finally:
            if lines.asking:
                print_sentence("", at_once=True)
            if talk.has_begun and not (as_json or talk.over):
                warn(f"Continue it with: halter chat {quote(str(folder))} --resume {session}", "dim")


@dataclass(slots=True)
class ChatState:
    """Whether the session has begun, whether the agent has asked something, whether it is over.

    `interrupts` counts how often Ctrl-C was typed during the last answer.
    """

    has_begun: bool = False
    has_asked: bool = False
    over: bool = False
    interrupts: int = 0

    def start_answer(self) -> None:
        self.has_begun = True


async def _run_interruptible(answering: Coroutine[Any, Any, None], talk: ChatState) -> None:
    """Let Ctrl-C end an answer. A second one ends the chat once the first is done, a third one at once."""
    chat, answer = asyncio.current_task(), asyncio.ensure_future(answering)
    loop = asyncio.get_running_loop()
    talk.interrupts = 0

    def end_chat() -> None:
        if chat is not None and not chat.cancelling():
            chat.cancel()

    def interrupt() -> None:
        talk.interrupts += 1
        if talk.interrupts == 1:
            answer.cancel()
        elif talk.interrupts > MOST_PATIENT_INTERRUPTS:
            end_chat()

    heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if heeded:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await answer
    except asyncio.CancelledError:
        if not talk.interrupts or (chat is not None and chat.cancelling()):
            raise
        warn("  interrupted. What was begun is kept, and goes on with your next message.", "dim")
    finally:
        if heeded:
            loop.add_signal_handler(signal.SIGINT, end_chat)


async def _answer_line(
    app: Runtime,
    context: Any,
    session: SessionId,
    line: str,
    lines: LineReader,
    talk: ChatState,
    *,
    routes: bool,
    as_json: bool,
) -> None:
    screen = Screen(quiet=as_json)
    asking = _DecisionPrompt(app, lines, screen)
    try:
        done = await pass_front_door(
            context,
            session,
            line,
            "chat",
            screen,
            asking.ask,
            talk.start_answer,
            routes=routes,
            asked=talk.has_asked,
            ahead=lines.ahead,
        )
        if done is not None:
            show_front_door_answer(done, as_json=as_json)
            return
        result = await _attend_session(context, session, screen, asking.ask, lambda: bool(talk.interrupts))
    finally:
        await asking.end()
        if talk.interrupts and lines.asking:
            # The question that was not answered is gone: what is typed next is for the next prompt.
            lines.require_fresh()
    _show(result, as_json=as_json)
    talk.has_asked, talk.over = bool(result.question), result.over
    if talk.has_asked:
        lines.require_fresh()


async def _resume_sub_sessions(
    app: Runtime, context: Any, session: SessionId, lines: LineReader, *, as_json: bool
) -> None:
    """Resume the sub-sessions that were under way."""
    from halter.runtime.sub_sessions import resume_delegation

    screen = Screen(quiet=as_json)
    asking = _DecisionPrompt(app, lines, screen)
    try:
        async with aclosing(resume_delegation(context, session, screen.make_sub_observer(), asking.ask)) as parts:
            async for came in parts:
                screen.show_note(f"Session {came.session}, a part of this one:")
                if not as_json:
                    print_sentence(came.text, at_once=True)
    finally:
        await asking.end()


async def _begin_with_files(context: Any, session: SessionId, text: str, files: Sequence[Path]) -> None:
    """Begin a session with files. They are for the model, so nothing else answers."""
    from halter.runtime.sessions import begin_session, read_given_messages

    await begin_session(context, text, "task", session, history=read_given_messages(context, (), files))


async def _is_waiting_for_answer(app: Runtime, session: SessionId) -> bool:
    from halter.operations.agents import is_waiting_for_answer

    return await is_waiting_for_answer(app, session)


async def _report_running(app: Runtime, context: Any) -> None:
    from halter.runtime.session_builder import find_autonomous_session

    beside = await find_autonomous_session(context)
    if beside is not None and beside.ended_at is None:
        due = describe_next_due(beside, app.clock.now())
        rest = f", next turn {due}" if due else ""
        sentence = f"{beside.agent} also runs by itself, in {beside.session} ({beside.state}{rest})."
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
    """Asks the person at the keyboard for decisions; they may be made elsewhere, too."""

    def __init__(self, app: Runtime, lines: LineReader, screen: Screen) -> None:
        self._app = app
        self._lines = lines
        self._screen = screen
        self._asking: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    def ask(self, approval: ApprovalRequired, state: State) -> None:
        """Ask here, if there is a person; a plain yes does not raise a cap."""
        if state == "WAITING_FOR_APPROVAL" and self._lines.is_tty and may_decide(self._app.settings.person):
            self._asking.append(asyncio.create_task(self._ask(approval)))
        else:
            self._screen.show_waiting(approval, state)

    async def _ask(self, approval: ApprovalRequired) -> None:
        async with self._turn:
            self._screen.end_line()
            found = await decision_meant(Actor(self._app, Principal(self._app.settings.person)), approval.decision)
            for line in escape_hidden(found.display_text).splitlines():
                warn(f"  {line}")
            word: str | None = ""
            while word is not None and word not in TYPED_ANSWERS:
                word = await self._lines.ask("  approve? [y/n] ")
                word = None if word is None else word.strip().lower()
            if word is None:
                self._screen.show_waiting(approval, "WAITING_FOR_APPROVAL")
                return
            person = self._app.settings.person
            write = answer_decision(found, TYPED_ANSWERS[word], person, self._app.ids.make())
            if any(isinstance(each.event, ApprovalGiven) for each in (await self._app.store.commit(write)).events):
                warn("  Another person must agree, too.")

    async def end(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


@asynccontextmanager
async def open_agent_context(app: Runtime, folder: Path) -> AsyncGenerator[Any]:
    from halter.operations import agents
    from halter.runtime.telemetry import trace_process

    async with trace_process(app, warn), agents.speaking_with(app, folder, warn) as context:
        yield context


async def _resume_session(app: Runtime, context: Any, beginning: str) -> SessionId:
    from halter.runtime.sessions import reopen_agent_session

    row = await find_session_by_prefix(app, beginning)
    if row.ended_at is not None and not may_decide(app.settings.person):
        raise ConfigError("Only a person may reopen a session that is over, and this was started by an agent.")
    await reopen_agent_session(context, row.session)
    return SessionId(row.session)


async def _attend_session(
    context: Any,
    session: SessionId,
    screen: Screen,
    waits: Any = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Any:
    from halter.loop.loop import LoopObserver
    from halter.runtime.sessions import attend_session
    from halter.tasks.conversation import build_result

    observer = LoopObserver(
        screen.listen, screen.show_text, screen.show_result, screen.show_warning, screen.show_sleeping
    )
    came, loop = await attend_session(
        context, session, observer=observer, waits=waits or screen.show_waiting, interrupted=interrupted
    )
    screen.end_line()
    near = await context.guard().near_budget(context.agent.standing(session))
    events = await read_all_events(context.app, session_stream(session))
    return build_result(came, loop, session, lambda: events, near_budget=near)


def _print_result(result: Any, agent: Path, *, as_json: bool) -> None:
    if isinstance(result, FrontDoorAnswer):
        show_front_door_answer(result, as_json=as_json, alone=True)
        return
    if as_json:
        answer_json(_to_json_object(result))
        return
    if result.question:
        print_sentence(f"? {result.question}")
        warn(f'Answer it: halter run {quote(str(agent))} --resume {result.session} "your answer"', "dim")
    elif not result.ok:
        warn(_describe_failure(result))
    warn(f"{result.state}, {format_usd(result.cost_usd)}. Its receipt: halter receipt {result.session}", "dim")


def _describe_failure(result: Any) -> str:
    reason = result.terminal_reason or "the turn ended early"
    sentence = result.sentence.removeprefix(f"[{reason}] ")
    raised = f" To continue, raise it: halter budget raise session:{result.session} AMOUNT"
    return f"{result.state}: {sentence or f'{reason}.'}{raised if reason == 'cost_cap_reached' else ''}"


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
        fail(f"There is no {AGENT_FILE} in {agent}: name an agent's folder, or make one with halter init.", EXIT_USAGE)
    return agent.parent if agent.is_file() else agent


def route(
    agent: AgentArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a message to an agent would be routed, and why. Nothing is done or recorded.

    What needs no model, such as sums, dates and commands, is answered without one: this shows which rule applies.
    """
    folder = resolve_agent_folder(agent)
    name, found = report_errors(lambda: _route_text(folder, text, store))
    if as_json:
        answer_json({"route": found.route, "strategy": found.strategy, "why": found.why})
    else:
        print_sentence(f"{name}: {found.strategy or found.route}. {found.why}")


def _route_text(folder: Path, text: str, store: str | None) -> "tuple[str, RoutingDecision]":
    from halter.config.agent_files import read_agent
    from halter.config.merge import FleetConfig
    from halter.config.resolve import resolve_agent
    from halter.front_door.route import route_message as routed
    from halter.journal.open import store_file_exists
    from halter.runtime.front_door import build_surroundings, declares_tools
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    settings = read_cli_settings(store)
    file = read_local_fleet(settings)

    async def names(fleet: FleetConfig, store: "Store | None", now: int) -> "RoutingContext":
        agent = resolve_agent(fleet, read_agent(folder), folder)
        return await build_surroundings(agent, store, now, has_tools=declares_tools(agent, folder))

    async def job(app: Runtime) -> "RoutingContext":
        return await names((await resolve_effective_policy(app.store, file)).fleet, app.store, app.clock.now())

    if store_file_exists(settings.store):
        known = run_with_app(store, job, despite_doubt=True)
    else:
        known = asyncio.run(names(file or FleetConfig(), None, SystemClock().now()))
    return known.agent, routed(text, known)


def tools(agent: AgentArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show who writes what each tool of an agent returns, what it reaches, and what each argument decides.

    The injection brake goes by it. What is guessed is worth declaring: in the tool, or under policy.tools.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> "tuple[list[tuple[str, Declaration]], tuple[ProviderTool, ...]]":
        from halter.runtime.assemble import assemble_agent
        from halter.tasks.task_tools import list_verb_specs

        async with assemble_agent(app, folder, report=warn) as ready:
            specs = (*(each.spec for each in ready.tools.values()), *list_verb_specs())
            return [(spec.name, ready.policy.declaration(spec)) for spec in specs], ready.model_settings.provider_tools

    found, unseen = run_with_app(store, job, new=True, acts=True)
    if as_json:
        seen = [{"tool": name, "declaration": declaration} for name, declaration in found]
        answer_json([*seen, *({"tool": each.name, "provider": True, "max_uses": each.max_uses} for each in unseen)])
        return
    rows = [
        [name, each.reads, each.reach, ", ".join(_describe_uses(each)), ", ".join(each.guessed) or "nothing"]
        for name, each in found
    ]
    rows += [
        [each.name, "anyone", "others", f"run by the provider, unseen: {each.max_uses} a request", "nothing"]
        for each in unseen
    ]
    columns = ["tool", "reads", "reach", "arguments", "guessed"]
    answer_table(f"The tools of {folder.name}", columns, rows, long="arguments guessed")


def _describe_uses(declaration: "Declaration") -> list[str]:
    return [f"{name} {use.role}{f':{use.kind}' if use.kind else ''}" for name, use in declaration.arguments.items()]
