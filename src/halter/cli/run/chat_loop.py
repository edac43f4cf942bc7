"""`halter chat`, line by line."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halter.cli.output import answer_line, print_sentence, warn
from halter.cli.run.conversation import (
    Screen,
    attend_with_screen,
    describe_failure,
    open_agent_context,
    pass_front_door,
    resume_session,
    show_front_door_answer,
    to_json_object,
)
from halter.cli.terminal import LineReader
from halter.core.events import ApprovalGiven
from halter.core.ids import SessionId, can_decide
from halter.core.text import escape_hidden
from halter.core.vocabulary import State, Verdict
from halter.guard.approvals import answer_decision
from halter.guard.call_answer import ApprovalRequired
from halter.operations.actor import Actor, Principal
from halter.operations.agents import is_waiting_for_answer
from halter.operations.decisions import get_open_decision
from halter.present.tables import describe_next_due
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.runtime import Runtime
from halter.runtime.session_builder import find_autonomous_session
from halter.runtime.session_start import resume_delegation

MAX_PATIENT_INTERRUPTS: Final = 2
"""After more Ctrl-C than this in one answer, the chat ends without waiting for the answer to stop."""
LEAVE_COMMANDS: Final = frozenset(("/quit", "/exit", "/q"))
TYPED_ANSWERS: Final[Mapping[str, Verdict]] = {"y": "approve", "yes": "approve", "n": "deny", "no": "deny"}


async def chat_by_line(
    app: Runtime, folder: Path, resume: str, resume_hint: str, *, routes: bool, as_json: bool
) -> None:
    """Chat line by line. A session starts with the first line."""
    async with open_agent_context(app, folder) as context, LineReader(prompt="" if as_json else "you> ") as line_reader:
        session = await resume_session(app, context, resume) if resume else SessionId(app.ids.make())
        chat_state = ChatState(
            has_session=bool(resume), has_open_question=bool(resume) and await is_waiting_for_answer(app, session)
        )
        if not as_json:
            print_sentence(f"Session {session}, with {context.policy.name}. Ctrl-D or /quit leaves.", at_once=True)
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
    context: AgentRuntime,
    session: SessionId,
    line: str,
    line_reader: LineReader,
    chat_state: ChatState,
    *,
    routes: bool,
    as_json: bool,
) -> None:
    screen = Screen(quiet=as_json)
    prompt = KeyboardPrompt(app, line_reader, screen)
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
        result = await attend_with_screen(context, session, screen, prompt.ask, lambda: bool(chat_state.interrupts))
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
    app: Runtime, context: AgentRuntime, session: SessionId, line_reader: LineReader, *, as_json: bool
) -> None:
    """Resume the sub-sessions that were running."""
    screen = Screen(quiet=as_json)
    prompt = KeyboardPrompt(app, line_reader, screen)
    try:
        async with aclosing(resume_delegation(context, session, screen.make_sub_observer(), prompt.ask)) as results:
            async for result in results:
                screen.show_note(f"Session {result.session}, a sub-session of this one:")
                if not as_json:
                    print_sentence(result.text, at_once=True)
    finally:
        await prompt.end()


async def _report_running(app: Runtime, context: AgentRuntime) -> None:
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
        answer_line(to_json_object(result))
    elif result.question:
        print_sentence(f"? {result.question}", at_once=True)
    elif not result.ok and result.state == "WAITING_FOR_INPUT" and not result.terminal_reason:
        warn(f"  {result.sentence}")
    elif not result.ok:
        warn(f"  {describe_failure(result)}")


class KeyboardPrompt:
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
