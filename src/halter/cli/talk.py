"""`halter run` and `chat`: an agent at work, and an agent to talk with."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final

import msgspec
import typer

from halter.app import App
from halter.app.desk import Desk, Who
from halter.app.desk.waiting import decision_meant
from halter.cli.answer import answer_json, answer_line, say, warn
from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, StoreOption, fail, with_app
from halter.cli.frontdoor import Done, Door, show_done
from halter.cli.lines import Lines
from halter.cli.look import next_due
from halter.cli.named import all_events, session_meant
from halter.cli.screen import Screen
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, may_decide, session_stream
from halter.core.money import shown_usd
from halter.core.vocabulary import State, Verdict
from halter.guard.approvals import decide
from halter.guard.chokepoint import NeedsPerson

AGENT_FILE: Final = "agent.yaml"
LEAVE: Final = frozenset(("/quit", "/exit", "/q"))
ANSWERS: Final[Mapping[str, Verdict]] = {"y": "approve", "yes": "approve", "n": "deny", "no": "deny"}

AgentArgument = Annotated[Path, typer.Argument(metavar="AGENT", help="An agent's folder.")]
NoRouteOption = Annotated[bool, typer.Option("--no-route", help="Go straight to the model, whatever is said.")]
ResumeOption = Annotated[
    str, typer.Option("--resume", metavar="SESSION", help="Go on with a session, whatever it stopped at.")
]


def run(
    agent: AgentArgument,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="What it is to do; - reads it here.")] = "",
    *,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an agent something to do, and wait until it is done. It survives a crash, and goes on with --resume.

    Its answer is printed, and what it does beside it. What needs no model is answered without one: halter route shows
    which way a message takes. Leaves with 1 if it did not come to its end as it should.
    """
    text = _text(message)
    if not text.strip() and not resume:
        fail('There is nothing to do: say it, as in halter run FOLDER "message".', WRONG_USE)
    screen = Screen(quiet=as_json)

    async def job(app: App) -> Any:
        async with speaking_with(app, folder_of(agent)) as speaking:
            session = await _again(app, speaking, resume) if resume else SessionId(app.ids.new())
            asked = bool(resume) and await _asked(app, session)
            door = Door(speaking, screen, screen.waits, routes=not no_route)
            done = await door.hear(session, text, "task", asked=asked) if text.strip() else None
            if done is not None:
                return done
            screen.beside(f"Session {session}")
            try:
                return await _attended(speaking, session, screen)
            except asyncio.CancelledError:
                screen.end_line()
                warn(f"It can go on where it stands: halter run {quote(str(agent))} --resume {session}")
                raise

    again = f"It goes on with: halter run {quote(str(agent))} --resume SESSION (halter sessions names it)."
    result = with_app(store, job, new=True, acts=True, following=True, runs=again)
    _tell(result, agent, as_json=as_json)
    if not result.ok:
        raise typer.Exit(NOT_FINE)


def chat(
    agent: AgentArgument,
    *,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Talk with an agent, line by line. It shows its calls, what they cost, and asks you where you have to decide.

    What needs no model is answered without one. Ctrl-D or /quit leaves; the talk can be gone on with later.
    """
    folder = folder_of(agent)

    async def job(app: App) -> None:
        await _chat(app, folder, resume, routes=not no_route, as_json=as_json)

    again = f"It goes on with: halter chat {quote(str(folder))} --resume SESSION (halter sessions names it)."
    with_app(store, job, new=True, acts=True, following=True, runs=again)


async def _chat(app: App, folder: Path, resume: str, *, routes: bool, as_json: bool) -> None:
    """Talk line by line. A session begins with its first line: who says nothing leaves nothing behind."""
    async with speaking_with(app, folder) as speaking, Lines(prompt="" if as_json else "you> ") as lines:
        session = await _again(app, speaking, resume) if resume else SessionId(app.ids.new())
        talk = Talk(begun=bool(resume), asked=bool(resume) and await _asked(app, session))
        if not as_json:
            say(f"Session {session}, with {speaking.agent.policy.name}. Ctrl-D or /quit leaves.", at_once=True)
            await _tell_of_what_runs(app, speaking)
        try:
            if resume:
                await _go_on_with_parts(app, speaking, session, lines, as_json=as_json)
            async for line in lines:
                if line.strip() in LEAVE:
                    break
                if line.strip():
                    await _said(app, speaking, session, line, lines, talk, routes=routes, as_json=as_json)
                    if talk.over:
                        return
        finally:
            if lines.asking:
                say("", at_once=True)
            if talk.begun and not as_json:
                warn(f"You can go on with it: halter chat {quote(str(folder))} --resume {session}", "dim")


@dataclass(slots=True)
class Talk:
    """Where a talk stands: whether its session has begun, whether the agent has asked something, whether it is over."""

    begun: bool = False
    asked: bool = False
    over: bool = False

    def begin(self) -> None:
        """Take note that there is something to go on with."""
        self.begun = True


async def _said(
    app: App,
    speaking: Any,
    session: SessionId,
    line: str,
    lines: Lines,
    talk: Talk,
    *,
    routes: bool,
    as_json: bool,
) -> None:
    """Let one line be answered: at the door, or by the agent."""
    screen = Screen(quiet=as_json)
    asking = _Asking(app, lines, screen)
    try:
        door = Door(speaking, screen, asking.waits, talk.begin, routes=routes)
        done = await door.hear(session, line, "chat", asked=talk.asked, ahead=lines.ahead)
        if done is not None:
            show_done(done, as_json=as_json)
            return
        result = await _attended(speaking, session, screen, asking.waits)
    finally:
        await asking.end()
    _show(result, as_json=as_json)
    talk.asked, talk.over = bool(result.question), result.over
    if talk.asked:
        lines.require_fresh()


async def _go_on_with_parts(app: App, speaking: Any, session: SessionId, lines: Lines, *, as_json: bool) -> None:
    """Take up what other agents were doing for the session when it was left."""
    from halter.app.delegating import go_on

    screen = Screen(quiet=as_json)
    asking = _Asking(app, lines, screen)
    try:
        async with aclosing(go_on(speaking, session, screen.beside_words(), asking.waits)) as parts:
            async for came in parts:
                screen.beside(f"Session {came.session}, a part of this one:")
                if not as_json:
                    say(came.words, at_once=True)
    finally:
        await asking.end()


async def _asked(app: App, session: SessionId) -> bool:
    from halter.app.desk.agents import asks

    return await asks(app, session)


async def _tell_of_what_runs(app: App, speaking: Any) -> None:
    """Say whether the agent runs by itself beside this talk."""
    from halter.app.attending import autonomous_of

    beside = await autonomous_of(speaking)
    if beside is not None and beside.ended_at is None:
        due = next_due(beside, app.clock.now())
        rest = f", next turn {due}" if due else ""
        told = f"{beside.agent} also runs by itself, in {beside.session} ({beside.state}{rest})."
        say(f"{told} What you say here reaches it; what it knows is shown here as it was kept last.", at_once=True)


def _show(result: Any, *, as_json: bool) -> None:
    if as_json:
        answer_line(_as_object(result))
    elif result.question:
        say(f"? {result.question}", at_once=True)
    elif not result.ok:
        warn(f"  {result.state}: {result.terminal_reason or 'the turn ended early'}. {result.sentence}")


class _Asking:
    """Puts decisions before whoever sits at the keyboard; they may as well be made elsewhere."""

    def __init__(self, app: App, lines: Lines, screen: Screen) -> None:
        self._app = app
        self._lines = lines
        self._screen = screen
        self._asking: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    def waits(self, asked: NeedsPerson, state: State) -> None:
        """Ask here, if there is a person; a cap is not raised by a plain yes."""
        if state == "WAITING_FOR_APPROVAL" and self._lines.by_hand and may_decide(self._app.settings.person):
            self._asking.append(asyncio.create_task(self._ask(asked)))
        else:
            self._screen.waits(asked, state)

    async def _ask(self, asked: NeedsPerson) -> None:
        async with self._turn:
            self._screen.end_line()
            found = await decision_meant(Desk(self._app, Who(self._app.settings.person)), asked.decision)
            for line in found.shown.splitlines():
                warn(f"  {line}")
            word: str | None = ""
            while word is not None and word not in ANSWERS:
                word = await self._lines.ask("  approve? [y/n] ")
                word = None if word is None else word.strip().lower()
            if word is None:
                self._screen.waits(asked, "WAITING_FOR_APPROVAL")
                return
            person = self._app.settings.person
            await self._app.store.commit(decide(found, ANSWERS[word], person, self._app.ids.new()))

    async def end(self) -> None:
        """Stop asking."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


@asynccontextmanager
async def speaking_with(app: App, folder: Path) -> AsyncGenerator[Any]:
    """Have an agent ready to talk."""
    from halter.app.desk import agents

    async with agents.speaking_with(app, folder, warn) as speaking:
        yield speaking


async def _again(app: App, speaking: Any, beginning: str) -> SessionId:
    from halter.app.talking import reopen

    row = await session_meant(app, beginning)
    if row.ended_at is not None and not may_decide(app.settings.person):
        raise ConfigError("Only a person lets a session go on that is over, and this was started by an agent.")
    await reopen(speaking, row.session)
    return SessionId(row.session)


async def _attended(speaking: Any, session: SessionId, screen: Screen, waits: Any = None) -> Any:
    from halter.app.result import result_of
    from halter.app.talking import attend
    from halter.brain.loop import Watching
    from halter.state.receipt import receipt

    watching = Watching(screen.listen, screen.said, screen.did)
    came, loop = await attend(speaking, session, watching=watching, waits=waits or screen.waits)
    screen.end_line()
    made = receipt(await all_events(speaking.app, session_stream(session)))
    return result_of(came, loop, made)


def _tell(result: Any, agent: Path, *, as_json: bool) -> None:
    if isinstance(result, Done):
        show_done(result, as_json=as_json, alone=True)
        return
    if as_json:
        answer_json(_as_object(result))
        return
    if result.question:
        say(f"? {result.question}")
        warn(f'Answer it: halter run {quote(str(agent))} --resume {result.session} "your answer"', "dim")
    elif not result.ok:
        warn(f"{result.state}: {result.terminal_reason or 'the turn ended early'}. {result.sentence}".strip())
    warn(f"{result.state}, {shown_usd(result.cost_usd)}. Its receipt: halter receipt {result.session}", "dim")


def _as_object(result: Any) -> dict[str, Any]:
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


def folder_of(agent: Path) -> Path:
    if not (agent / AGENT_FILE).is_file() and not agent.is_file():
        fail(f"There is no {AGENT_FILE} in {agent}: name an agent's folder, or make one with halter init.", WRONG_USE)
    return agent.parent if agent.is_file() else agent


def _text(message: str) -> str:
    return sys.stdin.read() if message == "-" else message
