"""`halter up`, `on` and `off`: agents that run by themselves.

Agents that run by themselves, on the screen: a line for whatever a person would want to know of.

Triggers and tasks on the screen of `halter up`: what starts them, where they walk, and what they leave behind.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    demand_person,
    demand_readable_name,
    fail,
    make_desk,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import (
    PLAIN,
    URGENT_STYLE,
    WARNING_STYLE,
    StyledLine,
    answer_json,
    encode_json_line,
    render_sentence,
    say,
    warn,
)
from halter.cli.terminal import Printer
from halter.core.clock import SECOND, Clock, format_duration
from halter.core.errors import ConfigError
from halter.core.events import (
    ArtifactEvent,
    AttendingFailed,
    CallRefused,
    CallSettled,
    CallStarted,
    ContextGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    GuardrailTriggered,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OverrunIncurred,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RequestRefused,
    RequestSettled,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionWoken,
    TriggerEnded,
    TriggerEvent,
    TriggerMade,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
    YieldRequest,
)
from halter.core.ids import StreamId, session_of
from halter.core.messages import Reply, ToolCall
from halter.core.money import format_micros
from halter.core.ports import Stored
from halter.core.text import clean, format_count, from_body, join_names, shorten
from halter.loop.decide import ASK_USER, YIELD
from halter.present.events import find_title, format_hour, format_relative_moment
from halter.runtime.feed import Bus, FeedEvent, FeedGap, FeedItem, LiveUpdate, read_stream_heads, serialize_feed_item
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.control import Switched
    from halter.runtime.supervisor import Serve

URGENT_SEVERITIES: Final = frozenset(("high", "critical"))

TaskWalkEvent = PhaseEntered | ContextGiven | DocumentRead | JudgesChosen | MessageRouted


class DocumentNames:
    """Knows documents by the names under which they were found: later they are only told by their content."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def line(self, event: TriggerEvent, now: int) -> StyledLine | None:
        """Tell what a trigger did."""
        match event:
            case ItemSeen():
                self._names[event.item] = event.name
                return None if event.ignored else StyledLine(f"finds {event.name}")
            case ItemQuarantined():
                tried = f" after {format_count(event.attempts, 'attempt')}" if event.attempts else ""
                return StyledLine(
                    f"Needs you: {self._name(event.item)} is left to you{tried}: {event.sentence}", URGENT_STYLE
                )
            case ItemReleased():
                return StyledLine(f"{self._name(event.item)} is tried anew, says {event.by}")
            case _:
                return _run_line(event, self._of(event), now)

    def _name(self, item: str) -> str:
        return self._names.get(item, f"document {item[:12]}")

    def _of(self, event: TriggerEvent) -> str:
        return f" for {self._name(event.item)}" if isinstance(event, RunStarted) and event.item else ""


def _run_line(
    event: TriggerMade | TriggerEnded | RunStarted | RunSkipped | RunQueued | RunsDelayed, item: str, now: int
) -> StyledLine:
    match event:
        case TriggerMade():
            return StyledLine(f"is a {event.type} now, by {event.by}")
        case TriggerEnded():
            return StyledLine(f"starts nothing any more, by {event.by}{_format_reason(event.reason)}")
        case RunStarted():
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            by = event.by or event.cause
            return StyledLine(f"starts {event.session}{item}, by {by}{again}")
        case RunSkipped():
            times = f" {format_count(event.count, 'time')}" if event.count > 1 else ""
            return StyledLine(f"does not run{times} ({event.why}){_format_reason(event.sentence)}", WARNING_STYLE)
        case RunQueued():
            return StyledLine("waits for the run before it")
        case RunsDelayed():
            until = f" until {format_relative_moment(event.until, now)}" if event.until is not None else ""
            return StyledLine(
                f"keeps {event.waiting} waiting{until} ({event.why}){_format_reason(event.sentence)}", WARNING_STYLE
            )


def format_walk_event(event: TaskWalkEvent) -> StyledLine:
    """Tell where a task is."""
    match event:
        case PhaseEntered():
            return StyledLine(f"enters {event.phase}")
        case ContextGiven():
            memories = f"{len(event.memories)} {'memory' if len(event.memories) == 1 else 'memories'}"
            return StyledLine(f"is given {memories} and {format_count(len(event.precedents), 'precedent')}")
        case DocumentRead():
            return StyledLine(f"reads {event.name}")
        case JudgesChosen():
            fewer = event.chosen < event.wanted
            judges = (
                f"{event.chosen} of {format_count(event.wanted, 'judge')}"
                if fewer
                else format_count(event.chosen, "judge")
            )
            text = f"{judges} for {format_count(event.items, 'finding')}{_format_reason(event.sentence)}"
            return StyledLine(text, WARNING_STYLE if fewer else PLAIN)
        case MessageRouted():
            return StyledLine(f"takes it as {event.strategy or event.route}{_format_reason(event.why)}")


def format_artifact_event(event: ArtifactEvent, body: bytes) -> StyledLine:
    """Tell what a session leaves behind, and what becomes of it."""
    match event:
        case FindingEmitted():
            about = f" in {event.name}" if event.name else ""
            doubt = "" if event.support == "supported" else f", {event.support}"
            text = f"finds ({event.severity}{doubt}){about}: {find_title(body) or event.finding}"
            return StyledLine(text, WARNING_STYLE if event.severity in URGENT_SEVERITIES else PLAIN)
        case FindingReviewed():
            return _review_line(event)
        case MemoryProposed():
            return StyledLine(f"wants to remember: {from_body(body)}")
        case PrecedentProposed():
            return StyledLine(f"met a case ({event.kind}): {from_body(body)}")
        case ProposalDecided():
            return StyledLine(
                f"{event.by} {event.status} the {event.about} {event.proposal}{_format_reason(event.reason)}"
            )
        case NotificationQueued():
            return StyledLine(f"has something to tell over {event.channel}: {find_title(body)}".removesuffix(": "))
        case NotificationSent():
            return StyledLine(f"told {event.notification}")
        case NotificationFailed():
            again = "is tried again" if event.next_at is not None else "is given up"
            return StyledLine(f"could not tell {event.notification}, which {again}: {event.error}", WARNING_STYLE)


def _review_line(event: FindingReviewed) -> StyledLine:
    match event.verdict:
        case "released":
            return StyledLine(f"{event.finding} is released by its review")
        case "withheld":
            return StyledLine(f"{event.finding} is withheld by its review", WARNING_STYLE)
        case "not_reviewed":
            return StyledLine(f"{event.finding} was not reviewed", WARNING_STYLE)


def _format_reason(reason: str) -> str:
    return f": {reason}" if reason else ""


MAX_LINE_TEXT: Final = 200


class EventLines:
    """Makes lines of events. It knows what each session has spent since its last turn."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._asked: dict[str, str] = {}
        self._items = DocumentNames()
        self._widest = 0

    def line(self, stored: Stored) -> StyledLine | None:
        """Write an event on one line, if it is worth one."""
        session = session_of(stored.stream) or ""
        said = self._said(stored, session)
        if said is None:
            return None
        name = session or stored.stream.removeprefix("trigger:")
        return StyledLine(self.placed(stored.at, name, said.text), said.style)

    def placed(self, at: int, name: str, text: str) -> str:
        """Put the time and a name before some words."""
        self._widest = max(self._widest, len(name))
        return f"{format_hour(at)} {name:<{self._widest}} {shorten(' '.join(clean(text).split()), MAX_LINE_TEXT)}"

    def _said(self, stored: Stored, session: str) -> StyledLine | None:
        if isinstance(stored.event, TriggerEvent):
            return self._items.line(stored.event, stored.at)
        if isinstance(stored.event, ArtifactEvent):
            return format_artifact_event(stored.event, stored.body or b"")
        match stored.event:
            case PhaseEntered() | ContextGiven() | DocumentRead() | JudgesChosen() | MessageRouted() as event:
                return format_walk_event(event)
            case CallStarted() as event:
                self._calls[session] = self._calls.get(session, 0) + (event.tool != YIELD)
                return None
            case RequestSettled() | CallSettled() | CallRefused() | RequestRefused() as event:
                return self._of_work(session, event, stored.body or b"")
            case TurnStarted() | TurnEnded() | TurnSkipped() as event:
                return self._of_a_turn(session, event)
            case SessionParked() as event:
                return self._rests(session, event, stored.at)
            case SessionWoken() | SessionEnded() | SessionResumed() | WakePosted() as event:
                return _life_line(event, from_body(stored.body or b""))
            case GuardrailTriggered() | SensorChanged() | AttendingFailed() as event:
                return _trouble_line(session, event)
            case DecisionAsked() | DecisionMade() | CostCapReached() | OverrunIncurred() as event:
                return _decision_line(event)
            case _:
                return None

    def _of_work(
        self, session: str, event: RequestSettled | CallSettled | CallRefused | RequestRefused, body: bytes
    ) -> StyledLine | None:
        if isinstance(event, RequestSettled | CallSettled) and event.charge:
            self._spent[session] = self._spent.get(session, 0) + event.charge.usd
        match event:
            case RequestSettled(outcome="ok"):
                self._asked[session] = _question(body)
                return None
            case RequestSettled():
                return StyledLine(f"the model gave no answer: {event.error or event.outcome}", WARNING_STYLE)
            case CallSettled():
                return None
            case CallRefused():
                return StyledLine(f"{event.tool} was refused ({event.outcome}): {event.sentence}", WARNING_STYLE)
            case RequestRefused():
                return StyledLine(f"{event.model} was not asked ({event.outcome}): {event.sentence}", WARNING_STYLE)

    def _of_a_turn(self, session: str, event: TurnStarted | TurnEnded | TurnSkipped) -> StyledLine:
        match event:
            case TurnStarted():
                return StyledLine(f"turn {event.turn} begins")
            case TurnEnded():
                how = (
                    _describe_yield(event.yielded) if event.yielded else _describe_turn_end(event, task="." in session)
                )
                why = f": {how}" if how else ""
                return StyledLine(
                    f"turn {event.turn} ends{self._used(session)}{why}", WARNING_STYLE if event.sentence else PLAIN
                )
            case TurnSkipped():
                in_a_row = f", {event.skips} in a row" if event.skips > 1 else ""
                why = f": {event.sentence}" if event.sentence else ""
                return StyledLine(f"skips a turn{in_a_row}{self._used(session)}{why}")

    def _used(self, session: str) -> str:
        """Tell what was done and spent since the last time."""
        calls, spent = self._calls.pop(session, 0), self._spent.pop(session, 0)
        made = [format_count(calls, "call")] if calls else []
        return "".join(f", {part}" for part in (*made, format_micros(spent)))

    def _rests(self, session: str, event: SessionParked, now: int) -> StyledLine | None:
        match event.state:
            case "PAUSED" if event.wake_at is not None:
                ends = format_relative_moment(event.wake_at, now)
                return StyledLine(
                    f"Needs you: it is paused, and ends at {ends} without halter on {_agent(session)}", URGENT_STYLE
                )
            case "SLEEPING" if event.wake_at is not None:
                early = f", or by {', '.join(event.wake_on)}" if event.wake_on else ""
                length = format_duration(max(SECOND, event.wake_at - now + SECOND // 2))
                return StyledLine(f"sleeps {length}, until {format_relative_moment(event.wake_at, now)}{early}")
            case "SLEEPING":
                return StyledLine(f"sleeps until {', '.join(event.wake_on) or 'somebody says something'}")
            case "WAITING_FOR_INPUT":
                question = self._asked.pop(session, "")
                return StyledLine(
                    f"Needs you: {question or 'it waits for a word.'} Answer it with halter chat.", URGENT_STYLE
                )
            case "PAUSED":
                return StyledLine("rests until somebody says something")
            case _:
                return None


def _question(body: bytes) -> str:
    """Find what the model asks a person, if it does."""
    try:
        parts = msgspec.json.decode(body, type=Reply).parts
        asked = [part.arguments for part in parts if isinstance(part, ToolCall) and part.tool == ASK_USER]
        return msgspec.json.decode(asked[-1], type=_Asked).question if asked else ""
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""


class _Asked(msgspec.Struct, frozen=True):
    question: str = ""


def _describe_yield(yielded: YieldRequest) -> str:
    reason = f" ({yielded.reason})" if yielded.reason else ""
    match yielded.mode:
        case "continue":
            return f"on at once{reason}"
        case "sleep":
            return f"sleep {format_duration(yielded.sleep)}{reason}"
        case "shutdown":
            return f"shut down{reason}"


def _describe_turn_end(event: TurnEnded, *, task: bool) -> str:
    """Say why a turn ended. A task goes on to its next phase, and needs no word for that."""
    match event.why:
        case "ended" | "yielded":
            return event.sentence or ("" if task else "it said nothing of how to go on")
        case "asked":
            return "it asks you something"
        case _:
            return f"{event.why}. {event.sentence}".strip()


def _life_line(event: SessionWoken | SessionEnded | SessionResumed | WakePosted, said: str) -> StyledLine | None:
    match event:
        case SessionWoken(cause="takeover"):
            return StyledLine("is taken up where it stood")
        case SessionWoken():
            return StyledLine(f"wakes, by {event.cause}")
        case SessionEnded():
            return StyledLine(f"is over: {event.state}, {event.terminal_reason}")
        case SessionResumed():
            return StyledLine(f"may go on, says {event.by}")
        case WakePosted(notifies=True, origin="person"):
            return StyledLine(f"hears: {said}")
        case WakePosted(notifies=True):
            return StyledLine(f"alert: {said}", WARNING_STYLE)
        case WakePosted(cause="signal"):
            return StyledLine(
                f"{event.name} of {event.sender}" if event.name != event.sender else f"{event.name} has news"
            )
        case WakePosted(cause="message"):
            return StyledLine(f"hears from {event.sender}")
        case WakePosted():
            return None


def _agent(session: str) -> str:
    """Tell whose session it is, by its name: those of an agent itself are numbered, and those of its triggers too."""
    return session.rpartition("-")[0].partition(".")[0]


def _trouble_line(session: str, event: GuardrailTriggered | SensorChanged | AttendingFailed) -> StyledLine:
    match event:
        case GuardrailTriggered(guardrail="model_rate"):
            return StyledLine(event.sentence)
        case GuardrailTriggered():
            return StyledLine(f"guardrail {event.guardrail}: {event.sentence}", WARNING_STYLE)
        case SensorChanged(health="failing"):
            return StyledLine(f"sensor {event.sensor} fails: {event.sentence}", WARNING_STYLE)
        case SensorChanged():
            return StyledLine(f"sensor {event.sensor} reads")
        case AttendingFailed(quarantined=True):
            times = format_count(event.failures, "time")
            told = f"Needs you: it broke down {times}, and goes on with halter on {_agent(session)}"
            return StyledLine(f"{told}: {event.error}", URGENT_STYLE)
        case AttendingFailed():
            return StyledLine(f"broke down, and is tried again: {event.error}", WARNING_STYLE)


def _decision_line(event: DecisionAsked | DecisionMade | CostCapReached | OverrunIncurred) -> StyledLine:
    match event:
        case DecisionAsked():
            cap = " --cap AMOUNT" if event.about == "cap_raise" else ""
            return StyledLine(
                f"Needs you: halter approve {event.decision}{cap} ({event.about} of {event.name})", URGENT_STYLE
            )
        case DecisionMade():
            return StyledLine(f"{event.by} says {event.verdict}")
        case CostCapReached():
            where = f"{event.scope} {event.window}".strip()
            return StyledLine(f"{event.name} does not fit the cap of {where}", WARNING_STYLE)
        case OverrunIncurred():
            return StyledLine(f"the cap of {event.scope} was passed", WARNING_STYLE)


AGENT_FILE: Final = "agent.yaml"
HOW_TO_STOP: Final = "Ctrl-C stops this; the next start goes on where it stands."
RESTART_HINT: Final = "Start it again: what it ran goes on where it stands, and what was halted ends."

AgentsArgument = Annotated[list[Path], typer.Argument(metavar="AGENT…", help="The folders of the agents.")]
NamedArgument = Annotated[str, typer.Argument(metavar="AGENT", help="An agent's name, or its folder.")]


def up(
    agents: AgentsArgument,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where webhooks are taken, if an agent has any.")
    ] = "127.0.0.1:8765",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents by themselves, in this terminal, until you interrupt it. The next start goes on where it stands.

    A line tells of each turn, sleep, wake and alert, and of whatever needs you. In JSON each line is one of them.
    """
    host, port = parse_listen_address(listen)
    folders = resolve_agent_folders(agents)
    run_with_app(
        store,
        lambda app: _up(app, folders, host, port, as_json=as_json),
        new=True,
        acts=True,
        following=True,
        runs=RESTART_HINT,
    )


def resolve_agent_folders(agents: Sequence[Path]) -> list[Path]:
    """Name the folders of agents; an agent's file stands for its folder."""
    return [agent.parent if agent.is_file() else agent for agent in agents]


def parse_listen_address(listen: str, least: int = 1) -> tuple[str, int]:
    """Read an address to listen on."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not least <= int(port) < 1 << 16:
        fail(f"{listen!r} is no address to listen on: write it like 127.0.0.1:8765.", EXIT_USAGE)
    return host.strip("[]"), int(port)


async def _up(app: Runtime, folders: list[Path], host: str, port: int, *, as_json: bool) -> None:
    from halter.server.api import serve_hooks

    async with Printer() as printer:
        shows = make_feed_printer(printer, app.clock, as_json=as_json)
        if not as_json:
            printer.put(render_sentence(HOW_TO_STOP))
        await run_and_show(app, folders, make_bus(app), shows, lambda hooks: serve_hooks(hooks, host, port))


def make_bus(app: Runtime) -> Bus:
    """Make a bus that waits where the store is away."""
    return Bus(app.patient(), app.clock)


async def run_and_show(
    app: Runtime, folders: list[Path], bus: Bus, shows: "FeedPrinter", serve: "Serve", kind: str = "up"
) -> None:
    """Run agents until cancelled, and show what they do. `kind` is what this process is called where it is listed."""
    from halter.loop.session_runtime import run_together
    from halter.runtime.supervisor import FleetRunner, Supervisor
    from halter.runtime.telemetry import trace_agents
    from halter.runtime.worker import make_embedded_mode

    store = app.patient()
    seen = dict(await read_stream_heads(store))
    runs = FleetRunner(
        app, lambda app: Supervisor(app, shows.told, bus.pulse, serve=serve, manner=make_embedded_mode(kind))
    )

    def wanted(stream: StreamId) -> bool:
        name, _, number = (session_of(stream) or "").rpartition("-")
        agent = stream.removeprefix("trigger:").partition("/")[0] if stream.startswith("trigger:") else ""
        ours = number.isdecimal() and (runs.has(name) or runs.has(name.partition(".")[0]))
        return ours or runs.has(agent)

    acts = [lambda: runs.run(folders), lambda: print_feed(bus.listen(seen, wanted), shows)]
    with trace_agents(app, store, lambda told: shows.told("traces", told), runs.has, seen) as tracing:
        await run_together([*acts, *tracing])


class FeedPrinter(Protocol):
    """Shows what happens."""

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent, or about all of them."""
        ...

    def show(self, item: FeedItem) -> None:
        """Show a piece of news."""
        ...

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        ...


def make_feed_printer(printer: Printer, clock: Clock, *, as_json: bool) -> FeedPrinter:
    """Show things to a program, or to a person."""
    return JsonFeedPrinter(printer, clock) if as_json else LinePrinter(printer, clock)


async def print_feed(items: AsyncGenerator[FeedItem], shows: FeedPrinter) -> None:
    """Show one thing after the other, each when the one before it is written."""
    async with aclosing(items):
        async for item in items:
            shows.show(item)
            await shows.shown()


class JsonFeedPrinter:
    """Shows it to programs."""

    def __init__(self, printer: Printer, clock: Clock) -> None:
        self._printer = printer
        self._clock = clock

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent, or about all of them."""
        self._put({"name": "told", "at": self._clock.now(), "agent": agent, "sentence": sentence})

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        await self._printer.written()

    def show(self, item: FeedItem) -> None:
        """Show a piece of news."""
        self._put(serialize_feed_item(item))

    def _put(self, value: Mapping[str, Any]) -> None:
        self._printer.put(encode_json_line(value).decode())


class LinePrinter:
    """Shows it to people."""

    def __init__(self, printer: Printer, clock: Clock) -> None:
        self._printer = printer
        self._clock = clock
        self._view = EventLines()

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent; one without an agent is about a folder or a store that cannot be used."""
        if agent:
            self._put(StyledLine(self._view.placed(self._clock.now(), agent, sentence)))
        else:
            warn(sentence, "red")

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        await self._printer.written()

    def show(self, item: FeedItem) -> None:
        """Show a piece of news. Words and readings as they come would be too many."""
        match item:
            case FeedEvent():
                self._put(self._view.line(item.stored))
            case FeedGap() if item.events:
                sessions = sorted({session_of(stream) or stream for stream in item.lost})
                told = (
                    f"{format_count(item.events, 'event')} of {join_names(sessions)} passed unseen: "
                    "look at halter show."
                )
                self._put(StyledLine(told, WARNING_STYLE))
            case FeedGap() | LiveUpdate():
                pass

    def _put(self, line: StyledLine | None) -> None:
        if line is not None:
            self._printer.put(render_sentence(line.text, line.style))


def on(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent on: where `halter up` runs it, its next session begins at once.

    Of a folder it is said before what the agent spends at most in the next 12 hours and in thirty days: by the clock
    alone, and with messages, webhooks and watched folders.
    """

    async def job(app: Runtime) -> "tuple[Switched, Mapping[str, Decimal | None]]":
        from halter.operations.control import switch

        demand_person(app, "switch an agent on")
        name = await _resolve_agent_name(app, agent)
        costs = await _describe_costs(app, Path(agent), name, as_json=as_json)
        return await switch(make_desk(app), name, on=True, reason=reason), costs

    done, costs = run_with_app(store, job)
    if as_json:
        answer_json({"agent": done.subject, "on": True, "known": done.known, **costs})
        return
    _tell_switched(done)


async def _describe_costs(app: Runtime, folder: Path, name: str, *, as_json: bool) -> Mapping[str, Decimal | None]:
    """Say what an agent may cost before it is switched on, if its folder is named and can be read."""
    if not (folder / AGENT_FILE).is_file():
        return {}
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.runtime.forecast import describe_spending_limits, forecast_spending
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    policy = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    agent = resolve_agent(policy.fleet, read_agent(folder), folder)
    if agent.policy.name != name:
        return {}
    found = await forecast_spending(app.store, agent, folder, app.environ, app.clock.now())
    for sentence in () if as_json else (await describe_spending_limits(app, agent.policy), *found.told()):
        say(sentence, at_once=True)
    return found.amounts()


def off(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent off: its session is stopped within a second, and none begins until it is switched on.

    It works from anywhere that reaches the store, whichever process runs the agent, and also if its file is broken.
    """

    async def job(app: Runtime) -> "Switched":
        from halter.operations.control import switch

        return await switch(make_desk(app), await _resolve_agent_name(app, agent), on=False, reason=reason)

    done = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json({"agent": done.subject, "on": False, "known": done.known, "stopped": done.stopped})
        return
    _tell_switched(done)


def _tell_switched(done: "Switched") -> None:
    say(done.sentence)
    if not done.known:
        say(f"Nothing has run here as {done.subject} so far: check the name, if that surprises you.")


async def _resolve_agent_name(app: Runtime, agent: str) -> str:
    """Find out which agent is meant.

    A name that is known here is taken for that, whatever lies in a folder of the same name: an agent can be switched
    off though its file is broken.
    """
    demand_readable_name(agent, "an agent")
    from halter.operations.control import known_agents

    return agent if agent in await known_agents(make_desk(app)) else _name(agent)


def _name(agent: str) -> str:
    """Read the name in an agent's folder; without one, take what was typed for a name."""
    from halter.config.agent_files import read_agent

    folder = Path(agent)
    if folder.is_file() or (folder / AGENT_FILE).is_file():
        try:
            return read_agent(folder).spec.name
        except ConfigError as error:
            fail(str(error), EXIT_UNUSABLE)
    if not agent or "/" in agent:
        fail(f"There is no {AGENT_FILE} in {agent!r}: name an agent, or its folder.", EXIT_USAGE)
    return agent
