"""The worst night: each incident runs twice under one virtual clock, in a plain loop and in Halter.

Halter's side is the runtime of `halter up`; its requests and costs are read from its journal. The plain loops are
typical and not careless: they retry, check a budget and keep a history. Their gaps show only at night: a failed item
is retried forever, since each run has its own budget; a heartbeat sends requests although nothing has changed; and
parallel runs all check the budget before any of them spends.

The same scripted model serves both sides, at a real price. Tokens are counted from the actual prompts and replies, at
four bytes each, without a cache.
"""

import asyncio
import random
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from halter.core.clock import DAY, HOUR, MINUTE, SECOND, Clock
from halter.core.errors import ConfigError
from halter.core.events import (
    ItemQuarantined,
    OverrunIncurred,
    RequestRefused,
    RequestSettled,
    TurnSkipped,
    TurnStarted,
)
from halter.core.messages import (
    Message,
    Model,
    Part,
    Prompt,
    Reply,
    Text,
    TextListener,
    ToolCall,
    ToolResult,
    bound_prompt_tokens,
    make_user_message,
)
from halter.core.money import DOLLAR, ZERO_USD, Usd, micros_to_usd
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow, SpendRow
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName, ModelPrices, Unpriced, Usage
from halter.core.vocabulary import State
from halter.journal.checkpoints import Checkpointer
from halter.journal.sqlite import LEASE_DURATION
from halter.models.prices import Prices
from halter.runtime.feed import read_stream_heads
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.runtime.switches import turn_off
from halter.settings import Settings
from halter.testing.world import VIRTUAL_START, World, quiet_mode

MODEL: Final = ModelName("anthropic", "claude-sonnet-4-5")
BYTES_PER_TOKEN: Final = 4
ANSWER_TIME: Final = 8 * SECOND
"""The duration of an answer."""

ReplyScript = Callable[[Prompt], Reply]
"""The model's reply to a prompt, the same for both sides."""


def find_price() -> ModelPrices:
    """Find the model's price in the table that caps use."""
    prices = Prices().find(MODEL)
    if isinstance(prices, Unpriced):
        raise ConfigError(prices.sentence)
    return prices


class DemoProvider:
    """The provider of one side, which counts its requests and costs."""

    def __init__(self, script: ReplyScript, rates: ModelPrices, clock: Clock) -> None:
        self.requests = 0
        self.usd = 0
        self._script = script
        self._rates = rates
        self._clock = clock

    async def serve(self, prompt: Prompt) -> Reply:
        await self._clock.sleep(ANSWER_TIME)
        reply = self._script(prompt)
        usage = Usage(
            count_prompt_tokens(prompt), count_prompt_tokens(Prompt(messages=(Message("assistant", reply.parts),)))
        )
        self.requests += 1
        self.usd += self.cost(usage)
        return msgspec.structs.replace(reply, usage=usage)

    def cost(self, usage: Usage) -> int:
        return self._rates.cost(usage, self._clock.now())


class ServedModel:
    """The provider as a model for Halter's guard."""

    base_url: None = None

    def __init__(self, provider: DemoProvider) -> None:
        self.name = MODEL
        self._provider = provider

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        return await self._provider.serve(prompt)


def count_prompt_tokens(prompt: Prompt) -> int:
    return -(-bound_prompt_tokens(prompt) // BYTES_PER_TOKEN)


def make_text_reply(text: str) -> Reply:
    return Reply((Text(text, "model", trusted=False),))


def make_call_reply(tool: str, arguments: Mapping[str, object], text: str = "") -> Reply:
    parts = (Text(text, "model", trusted=False),) if text else ()
    return Reply((*parts, ToolCall("1", tool, msgspec.json.encode(arguments).decode())), "calls")


_INVOICE: Final = re.compile(r"invoice-\d+")
_REPORT: Final = re.compile(r"report-(\d+)")
MAX_FINDINGS_PER_REPORT: Final = 8
"""A report has fewer findings than this, and some have none."""


def reply_as_bookkeeper(prompt: Prompt) -> Reply:
    """Book an invoice as soon as its scan can be read; until then, try again."""
    invoice = next(match[0] for part in _parts(prompt) if (match := _INVOICE.search(_words(part))))
    results = [part.outcome for part in _parts(prompt) if isinstance(part, ToolResult)]
    if results and results[-1] == "ok":
        return make_text_reply(f"The scan agrees with {invoice}, so I booked it.")
    text = (
        f"The scan of {invoice} is not there yet, so I try again." if results else f"I compare {invoice} and its scan."
    )
    return make_call_reply("read_file", {"path": f"scans/{invoice}.txt"}, text)


def reply_as_watchman(prompt: Prompt) -> Reply:
    """Reply that nothing has to be done."""
    if any(tool.name == "yield" for tool in prompt.tools):
        return make_call_reply("yield", {"mode": "sleep", "sleep": "1m", "reason": "nothing needs me"}, "All is well.")
    return make_text_reply("All is well.")


def reply_as_analyst(prompt: Prompt) -> Reply:
    """Emit one finding after another, then write the report."""
    report = next(int(match[1]) for part in _parts(prompt) if (match := _REPORT.search(_words(part))))
    emitted_count = sum(isinstance(part, ToolResult) for part in _parts(prompt))
    if emitted_count < report % MAX_FINDINGS_PER_REPORT:
        finding = {"title": f"Region {emitted_count + 1}", "severity": "info", "text": _prose(40)}
        return make_call_reply("emit_finding", finding, "I put down what I found.")
    return make_text_reply(_prose(60))


def _prose(sentences: int) -> str:
    line = "The figures of branch {} are in line with those of the quarter before, and need no correction. "
    return "".join(line.format(number) for number in range(1, sentences + 1))


def _parts(prompt: Prompt) -> list[Part]:
    return [part for message in prompt.messages for part in message.parts]


def _words(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text


MAX_RETRIES: Final = 3
PLAIN_RUN_BUDGET: Final = DOLLAR // 2
"""The budget of one run."""
PLAIN_BUDGET: Final = DOLLAR
"""The budget that parallel runs share."""
PLAIN_RETRY_PAUSE: Final = 30 * SECOND
MAX_HISTORY: Final = 40
"""Number of messages of a history that are sent after the first: twenty calls with their results."""

TOOLS: Final = (
    ToolSpec(
        name="read_file",
        description="Read a file as text.",
        schema=b'{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}',
    ),
    ToolSpec(
        name="emit_finding",
        description="Put down something that was found.",
        schema=b'{"type":"object","properties":{"title":{"type":"string"},"severity":{"type":"string"},'
        b'"text":{"type":"string"}},"required":["title","severity"]}',
    ),
)


class PlainLoop:
    """A plain loop: ask the model, make the calls, and send it the results."""

    def __init__(self, provider: DemoProvider, clock: Clock, instructions: str, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self._provider = provider
        self._instructions = instructions

    async def run(self, history: list[Message]) -> tuple[bool, int]:
        """Send requests until an answer, too many failures or the budget; return whether it is done, and its cost."""
        spent_micros = failures = 0
        while failures < MAX_RETRIES and spent_micros < PLAIN_RUN_BUDGET:
            reply = await self.ask(history)
            spent_micros += self._provider.cost(reply.usage) if reply.usage else 0
            history.append(Message("assistant", reply.parts))
            if not reply.calls:
                return True, spent_micros
            results = tuple(_run_call(self.folder, call) for call in reply.calls)
            failures += any(result.outcome != "ok" for result in results)
            history.append(Message("user", results))
        return False, spent_micros

    async def ask(self, history: Sequence[Message]) -> Reply:
        messages = (*history[:1], *history[1:][-MAX_HISTORY:])
        return await self._provider.serve(Prompt(system=self._instructions, messages=messages, tools=TOOLS))


def _run_call(folder: Path, call: ToolCall) -> ToolResult:
    arguments = msgspec.json.decode(call.arguments, type=dict[str, str])
    if call.tool == "emit_finding":
        return ToolResult(call.id, call.tool, "ok", "Recorded.")
    try:
        return ToolResult(call.id, call.tool, "ok", (folder / arguments["path"]).read_text("utf-8"))
    except OSError as error:
        return ToolResult(call.id, call.tool, "error", f"{arguments['path']}: {error.strerror}")


def _read_as_message(file: Path) -> Message:
    return make_user_message(f"The document is {file.name}.\n{file.read_text('utf-8')}")


async def book_invoices(loop: PlainLoop) -> None:
    """Book every invoice in the folder; retry those that could not be booked after half a minute."""
    waiting = {file: [_read_as_message(file)] for file in sorted((loop.folder / "inbox").iterdir())}
    while waiting:
        for file, history in list(waiting.items()):
            is_done, _ = await loop.run(history)
            if is_done:
                del waiting[file]
        await loop.clock.sleep(PLAIN_RETRY_PAUSE)


async def poll_for_work(loop: PlainLoop) -> None:
    """Send a request every minute, to find whether anything has to be done."""
    while True:
        started_at = loop.clock.now()
        status = (loop.folder / "status.json").read_text("utf-8")
        await loop.ask([make_user_message(f"It is time to look around. The status is {status}")])
        await loop.clock.sleep(started_at + MINUTE - loop.clock.now())


async def write_reports(loop: PlainLoop) -> None:
    """Write all reports in parallel, each only if the shared budget is not spent yet."""
    spent_micros = 0

    async def report(file: Path) -> None:
        nonlocal spent_micros
        if spent_micros < PLAIN_BUDGET:
            _, cost = await loop.run([_read_as_message(file)])
            spent_micros += cost

    async with asyncio.TaskGroup() as runs:
        for file in sorted((loop.folder / "inbox").iterdir()):
            runs.create_task(report(file))


DESK_FOLDER: Final = "desk"
"""The folder of the agent's documents, apart from its own files."""

SHARED: Final = f"""
model: {MODEL}
tools:
  files: {{root: {DESK_FOLDER}}}"""

BOOKKEEPER: Final = f"""name: bookkeeper{SHARED}
watches:
  - name: invoices
    path: desk/inbox
    prompt: An invoice has come in. Compare it with its scan, and book it.
    max_attempts: 3
"""

WATCHMAN: Final = f"""name: watchman{SHARED}
autonomy:
  enabled: true
  idle_timeout: 0
  gate: {{on: change}}
sensors:
  - name: status
    type: poll
    interval: 1m
    jitter: 0
    source: {{tool: read_file, arguments: {{path: status.json}}}}
"""

ANALYST: Final = f"""name: analyst
model: {MODEL}
verbs: [emit_finding]
watches:
  - name: reports
    path: desk/inbox
    prompt: Write the report that is asked for.
    max_parallel: 20
    max_cost_usd_per_day: 1.00
"""

INVOICES: Final = 6
STUCK_INVOICE: Final = 4
"""The invoice whose scan never arrives."""
REPORTS: Final = 20
QUEUE_CHANGES: Final = ((3 * HOUR, 41), (3 * HOUR + 20 * MINUTE, 2))
"""Times at which the queue of the idle heartbeat changes, and its new length."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. Its `duration` passes in steps of `frame_interval`; `change_world` runs during it."""

    name: str
    title: str
    happens: str
    agent: str
    handbook: int
    script: ReplyScript
    furnish: Callable[[Path], None]
    without: Callable[[PlainLoop], Coroutine[Any, Any, None]]
    change_world: Callable[[Path, Clock], Coroutine[Any, Any, None]]
    duration: int = 8 * HOUR
    frame_interval: int = 4 * MINUTE


def write_handbook(rules: int) -> str:
    """Write instructions of a realistic length."""
    rule = "{}. What concerns account {} is checked against the ledger first, and told to the owner if it differs.\n"
    return "# Handbook\n\n" + "".join(rule.format(number, 4000 + 7 * number) for number in range(1, rules + 1))


def _invoices(folder: Path) -> None:
    for number in range(1, INVOICES + 1):
        lines = "".join(f"{line} pieces of item {1000 * number + line}, at 12.50 each\n" for line in range(1, 150))
        _write(folder / "inbox" / f"invoice-{number}.txt", f"Invoice {number}\n{lines}")
        if number != STUCK_INVOICE:
            _write(folder / "scans" / f"invoice-{number}.txt", f"Invoice {number}, scanned\n{lines}")


def _queue(folder: Path, waiting: int = 2) -> None:
    _write(folder / "status.json", msgspec.json.encode({"waiting": waiting, "failed": 0}).decode())


def _requests(folder: Path) -> None:
    for number in range(1, REPORTS + 1):
        _write(folder / "inbox" / f"report-{number:02}.txt", f"Please write report {number}.")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


async def _do_nothing(_folder: Path, _clock: Clock) -> None:
    """No-op."""


async def _fill_queue(folder: Path, clock: Clock) -> None:
    began_at = clock.now()
    for delay, waiting in QUEUE_CHANGES:
        await clock.sleep(began_at + delay - clock.now())
        _queue(folder, waiting)


SCENES: Final = (
    Scene(
        name="stuck_item",
        title="A stuck item",
        happens="One of 6 invoices has no scan and is retried all night.",
        agent=BOOKKEEPER,
        handbook=120,
        script=reply_as_bookkeeper,
        furnish=_invoices,
        without=book_invoices,
        change_world=_do_nothing,
    ),
    Scene(
        name="idle_heartbeat",
        title="An idle heartbeat",
        happens="An agent wakes every minute although almost nothing changes.",
        agent=WATCHMAN,
        handbook=120,
        script=reply_as_watchman,
        furnish=_queue,
        without=poll_for_work,
        change_world=_fill_queue,
    ),
    Scene(
        name="parallel_runs",
        title="One cap, 20 runs",
        happens="20 reports run in parallel under one cap of $1.00.",
        agent=ANALYST,
        handbook=300,
        script=reply_as_analyst,
        furnish=_requests,
        without=write_reports,
        change_world=_do_nothing,
        duration=10 * MINUTE,
        frame_interval=5 * SECOND,
    ),
)


NIGHT_START: Final = VIRTUAL_START + 22 * HOUR
LEASE: Final = 30 * MINUTE
"""No process crashes in the simulated night, so a long lease with few heartbeats suffices."""


class Bill(msgspec.Struct, frozen=True):
    requests: int = 0
    cost_usd: Usd = ZERO_USD


class Frame(msgspec.Struct, frozen=True):
    """A moment of an incident: the time, its progress as a share, and both bills so far."""

    at: int
    share: float
    without: Bill
    within: Bill


WatchFrame = Callable[[Frame], None]
"""Called at each frame of an incident."""


class PlayedIncident(msgspec.Struct, frozen=True):
    """A finished incident: both bills, and Halter's journal."""

    scene: Scene
    without: Bill
    within: Bill
    events: Sequence[Stored]
    sessions: Sequence[SessionRow]


class NightRecord(msgspec.Struct, frozen=True):
    """The store for the night of Halter's side, dated as if the night had just passed."""

    store: Path
    now: int
    person: str

    def start(self, scene: Scene) -> int:
        """Compute the start of an incident: a long one is in the last complete night, a short one just before now.

        A short one that would cross midnight is in the night, too, since its cap is for one day.
        """
        recent_start = self.now - scene.duration - MINUTE
        if scene.duration < HOUR and recent_start // DAY == self.now // DAY:
            return recent_start
        evening_start = self.now - self.now % DAY - 2 * HOUR
        return evening_start if evening_start + scene.duration <= self.now else evening_start - DAY


def play_incident(scene: Scene, watch: WatchFrame, record: NightRecord | None = None) -> PlayedIncident:
    """Run an incident on both sides. The figures are the same every time, recorded or not."""
    start, store = (NIGHT_START, None) if record is None else (record.start(scene), record.store)
    lease = LEASE if scene.duration > HOUR else LEASE_DURATION
    # In one store, each incident needs distinct ids.
    seed = 0 if record is None else 1 + [other_scene.name for other_scene in SCENES].index(scene.name)
    with (
        TemporaryDirectory(prefix="halter-night-") as home,
        World(seed, path=store, orderly=True, threads=False, start=start, lease=lease) as world,
    ):
        person = "demo" if record is None else record.person
        return world.run(_play_incident(scene, world, Path(home), watch, person))


async def _play_incident(scene: Scene, world: World, home: Path, watch: WatchFrame, person: str) -> PlayedIncident:
    rates, baseline = find_price(), await _read_baseline(world)
    plain_provider, halter_provider = (DemoProvider(scene.script, rates, world.clock) for _ in range(2))
    documents = _lay_out_scene(scene, home / "without") / DESK_FOLDER
    plain_loop = PlainLoop(plain_provider, world.clock, write_handbook(scene.handbook), documents)
    app, folder = _make_runtime(world, home, person), _lay_out_scene(scene, home / "with")
    for coroutine in (
        scene.without(plain_loop),
        _make_supervisor(world, app, ServedModel(halter_provider)).run([folder]),
        *(scene.change_world(path, world.clock) for path in (documents, folder / DESK_FOLDER)),
    ):
        world.spawn(coroutine)
    ends_at = world.now + scene.duration
    while world.now < ends_at:
        await world.advance(scene.frame_interval)
        share = 1 - (ends_at - world.now) / scene.duration
        bill = _subtract(await _read_bill(world), baseline.bill)
        watch(Frame(world.now, share, Bill(plain_provider.requests, micros_to_usd(plain_provider.usd)), bill))
    events = await _events(world, baseline)
    rows = await world.journal.ask(Query("all_sessions", SessionRow))
    sessions = [row for row in rows if row.session not in baseline.sessions]
    plain_bill = Bill(plain_provider.requests, micros_to_usd(plain_provider.usd))
    await _switch_off_rest(world, app, sessions)
    return PlayedIncident(scene, plain_bill, sum_bill(events), events, sessions)


class _Baseline(msgspec.Struct, frozen=True):
    """The state of the store before an incident."""

    heads: Mapping[str, int]
    sessions: frozenset[str]
    bill: Bill


async def _read_baseline(world: World) -> _Baseline:
    sessions = await world.journal.ask(Query("all_sessions", SessionRow))
    return _Baseline(
        dict(await read_stream_heads(world.journal)),
        frozenset(row.session for row in sessions),
        await _read_bill(world),
    )


async def _switch_off_rest(world: World, app: Runtime, sessions: Sequence[SessionRow]) -> None:
    """Switch off autonomous agents after all figures are read: no process runs them after the night."""
    for agent in {row.agent for row in sessions if row.kind == "autonomous"}:
        await turn_off(app, agent, "the night has ended")
    await world.advance(MINUTE)


def _lay_out_scene(scene: Scene, folder: Path) -> Path:
    folder.mkdir()
    (folder / "agent.yaml").write_text(scene.agent, "utf-8")
    (folder / "AGENTS.md").write_text(write_handbook(scene.handbook), "utf-8")
    scene.furnish(folder / DESK_FOLDER)
    return folder


def _make_runtime(world: World, home: Path, person: str) -> Runtime:
    """Make the runtime on the world's journal, apart from the user's files."""
    key = home / "signing.key"
    settings = Settings("memory:", home / "checkpoints", key, person, home / "trust.json")
    checkpointer = Checkpointer(settings.checkpoints, key, "demo", world.clock.now)
    policy = use_local_policy(settings)
    return Runtime(settings, world.clock, world.ids, world.journal, checkpointer, world.ledger, {}, policy=policy)


def _make_supervisor(world: World, app: Runtime, model: Model) -> Supervisor:
    models = {str(model.name): model}
    rng, mode = random.Random(world.seed), quiet_mode(world.lease)
    return Supervisor(app, lambda _, __: None, rng=rng, model_overrides=models, mode=mode)


async def _read_bill(world: World) -> Bill:
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    return Bill(sum(spend.input_tokens > 0 for spend in spends), micros_to_usd(sum(spend.usd for spend in spends)))


def _subtract(bill: Bill, earlier: Bill) -> Bill:
    return Bill(bill.requests - earlier.requests, bill.cost_usd - earlier.cost_usd)


async def _events(world: World, baseline: _Baseline) -> Sequence[Stored]:
    return [
        stored_event
        for stream, _ in sorted(await read_stream_heads(world.journal))
        for stored_event in await world.events(stream)
        if stored_event.seq > baseline.heads.get(stream, 0)
    ]


def sum_bill(events: Sequence[Stored]) -> Bill:
    """Sum the requests and costs in a journal."""
    settlements = [stored_event.event for stored_event in events if isinstance(stored_event.event, RequestSettled)]
    return Bill(
        len(settlements), micros_to_usd(sum(event.charge.usd for event in settlements if event.charge is not None))
    )


T = TypeVar("T")


class Incident(msgspec.Struct, frozen=True, rename={"within": "with"}):
    """The report of an incident: both bills, what stopped it in Halter, and the number of events by kind."""

    name: str
    title: str
    happens: str
    without: Bill
    within: Bill
    stopped_by: str
    events: Mapping[str, int]


class Night(msgspec.Struct, frozen=True, rename={"within": "with"}):
    """The report of the night: the model, each incident, and both totals."""

    model: str
    incidents: Sequence[Incident]
    without: Bill
    within: Bill
    overruns: int
    """How often Halter exceeded a cap."""


def summarize_incident(incident: PlayedIncident) -> Incident:
    scene, kinds = incident.scene, [stored_event.kind for stored_event in incident.events]
    return Incident(
        scene.name,
        scene.title,
        scene.happens,
        incident.without,
        incident.within,
        _BRAKES[scene.name](incident),
        {kind: kinds.count(kind) for kind in sorted(set(kinds))},
    )


def sum_night(incidents: Sequence[Incident]) -> Night:
    plain_total, halter_total = _sum([each.without for each in incidents]), _sum([each.within for each in incidents])
    overruns = sum(each.events.get(OverrunIncurred.KIND, 0) for each in incidents)
    return Night(str(MODEL), incidents, plain_total, halter_total, overruns)


def format_cents(usd: Decimal) -> str:
    return f"${usd:,.2f}"


def _sum(bills: Sequence[Bill]) -> Bill:
    return Bill(sum(bill.requests for bill in bills), sum((bill.cost_usd for bill in bills), ZERO_USD))


def _describe_stuck(incident: PlayedIncident) -> str:
    attempts = sum(event.attempts for event in _events_of_kind(incident, ItemQuarantined))
    return (
        f"Repeated steps end an attempt. After {attempts} attempts the invoice was quarantined; "
        f"the other {_count_in_state(incident, 'COMPLETED')} are booked."
    )


def _describe_idle(incident: PlayedIncident) -> str:
    skip_count, turn_count = len(_events_of_kind(incident, TurnSkipped)), len(_events_of_kind(incident, TurnStarted))
    return f"The gate: {skip_count} of {skip_count + turn_count} wakes found no change and sent no request."


def _describe_parallel(incident: PlayedIncident) -> str:
    refusal_count = len(_events_of_kind(incident, RequestRefused))
    return (
        f"Money is reserved before it is spent: {refusal_count} requests did not fit under the cap. "
        f"{_count_in_state(incident, 'COMPLETED')} reports are "
        f"done, {_count_in_state(incident, 'SLEEPING')} wait for the next day's budget."
    )


def _events_of_kind(incident: PlayedIncident, kind: type[T]) -> list[T]:
    return [stored_event.event for stored_event in incident.events if isinstance(stored_event.event, kind)]


def _count_in_state(incident: PlayedIncident, state: State) -> int:
    return sum(row.state == state for row in incident.sessions)


_BRAKES: Final[Mapping[str, Callable[[PlayedIncident], str]]] = MappingProxyType(
    {"stuck_item": _describe_stuck, "idle_heartbeat": _describe_idle, "parallel_runs": _describe_parallel}
)
