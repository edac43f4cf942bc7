"""The worst night: each incident runs twice under one virtual clock, in a plain loop and in Halter.

Halter's side is the runtime of `halter up`, and its requests and costs are read from its journal. The plain loops are
written as they often are, and not badly: they retry, check a budget and keep a history. What they lack shows only at
night: a failed item is retried forever, since each run has its own budget; a heartbeat asks although nothing has
changed; and parallel runs all check the budget before any of them spends.

The same scripted model serves both sides, at a real price. Tokens are counted from what is really sent and said, at
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
from halter.runtime.feed import read_stream_heads
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor, turn_off
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
    from halter.models.providers import Prices

    prices = Prices().find(MODEL)
    if isinstance(prices, Unpriced):
        raise ConfigError(prices.sentence)
    return prices


class DemoProvider:
    """Serves one side, and counts its requests and costs."""

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
    """The provider as a model that Halter asks through its guard."""

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
    words = (Text(text, "model", trusted=False),) if text else ()
    return Reply((*words, ToolCall("1", tool, msgspec.json.encode(arguments).decode())), "calls")


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
    words = (
        f"The scan of {invoice} is not there yet, so I try again." if results else f"I compare {invoice} and its scan."
    )
    return make_call_reply("read_file", {"path": f"scans/{invoice}.txt"}, words)


def reply_as_watchman(prompt: Prompt) -> Reply:
    """Find that nothing has to be done."""
    if any(tool.name == "yield" for tool in prompt.tools):
        return make_call_reply("yield", {"mode": "sleep", "sleep": "1m", "reason": "nothing needs me"}, "All is well.")
    return make_text_reply("All is well.")


def reply_as_analyst(prompt: Prompt) -> Reply:
    """Emit one finding after another, then write the report."""
    report = next(int(match[1]) for part in _parts(prompt) if (match := _REPORT.search(_words(part))))
    emitted = sum(isinstance(part, ToolResult) for part in _parts(prompt))
    if emitted < report % MAX_FINDINGS_PER_REPORT:
        finding = {"title": f"Region {emitted + 1}", "severity": "info", "text": _prose(40)}
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
"""Messages kept of a history, beside the first: twenty calls with their results."""

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
        """Ask until there is an answer, or too many failures or costs; return whether it is done, and its cost."""
        spent = failures = 0
        while failures < MAX_RETRIES and spent < PLAIN_RUN_BUDGET:
            reply = await self.ask(history)
            spent += self._provider.cost(reply.usage) if reply.usage else 0
            history.append(Message("assistant", reply.parts))
            if not reply.calls:
                return True, spent
            results = tuple(_run_call(self.folder, call) for call in reply.calls)
            failures += any(result.outcome != "ok" for result in results)
            history.append(Message("user", results))
        return False, spent

    async def ask(self, history: Sequence[Message]) -> Reply:
        kept = (*history[:1], *history[1:][-MAX_HISTORY:])
        return await self._provider.serve(Prompt(system=self._instructions, messages=kept, tools=TOOLS))


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
            done, _ = await loop.run(history)
            if done:
                del waiting[file]
        await loop.clock.sleep(PLAIN_RETRY_PAUSE)


async def poll_for_work(loop: PlainLoop) -> None:
    """Ask every minute whether anything has to be done."""
    while True:
        begun = loop.clock.now()
        status = (loop.folder / "status.json").read_text("utf-8")
        await loop.ask([make_user_message(f"It is time to look around. The status is {status}")])
        await loop.clock.sleep(begun + MINUTE - loop.clock.now())


async def write_reports(loop: PlainLoop) -> None:
    """Write all reports in parallel, each only if the shared budget is not spent yet."""
    spent = 0

    async def report(file: Path) -> None:
        nonlocal spent
        if spent < PLAIN_BUDGET:
            _, cost = await loop.run([_read_as_message(file)])
            spent += cost

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
    source: {{tool: read_file, params: {{path: status.json}}}}
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
"""When the queue of the idle heartbeat fills and empties, and its length then."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. Its `span` passes in steps of `frame`; `meanwhile` changes the world during it."""

    name: str
    title: str
    happens: str
    agent: str
    handbook: int
    script: ReplyScript
    furnish: Callable[[Path], None]
    without: Callable[[PlainLoop], Coroutine[Any, Any, None]]
    meanwhile: Callable[[Path, Clock], Coroutine[Any, Any, None]]
    span: int = 8 * HOUR
    frame: int = 4 * MINUTE


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
    began = clock.now()
    for after, waiting in QUEUE_CHANGES:
        await clock.sleep(began + after - clock.now())
        _queue(folder, waiting)


SCENES: Final = (
    Scene(
        name="stuck_item",
        title="A stuck item",
        happens="One of 6 invoices lacks its scan, and is tried again all night.",
        agent=BOOKKEEPER,
        handbook=120,
        script=reply_as_bookkeeper,
        furnish=_invoices,
        without=book_invoices,
        meanwhile=_do_nothing,
    ),
    Scene(
        name="idle_heartbeat",
        title="An idle heartbeat",
        happens="An agent wakes every minute, although hardly anything changes.",
        agent=WATCHMAN,
        handbook=120,
        script=reply_as_watchman,
        furnish=_queue,
        without=poll_for_work,
        meanwhile=_fill_queue,
    ),
    Scene(
        name="parallel_runs",
        title="One cap, 20 runs",
        happens="20 reports are written at once, for at most $1.00 in all.",
        agent=ANALYST,
        handbook=300,
        script=reply_as_analyst,
        furnish=_requests,
        without=write_reports,
        meanwhile=_do_nothing,
        span=10 * MINUTE,
        frame=5 * SECOND,
    ),
)


NIGHT_START: Final = VIRTUAL_START + 22 * HOUR
LEASE: Final = 30 * MINUTE
"""No process crashes in a whole night, so few heartbeats and looks at folders will do."""


class Bill(msgspec.Struct, frozen=True):
    requests: int = 0
    cost_usd: Usd = ZERO_USD


class Frame(msgspec.Struct, frozen=True):
    """A moment of an incident: the time, the share that has passed, and both bills so far."""

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
    """The store that keeps the night of Halter's side, as if the night had just passed."""

    store: Path
    now: int
    person: str

    def start(self, scene: Scene) -> int:
        """Place a long incident in the last night that is over, and a short one just before now.

        A short one that would cross midnight belongs to the night, too: its cap is that of one day.
        """
        lately = self.now - scene.span - MINUTE
        if scene.span < HOUR and lately // DAY == self.now // DAY:
            return lately
        evening = self.now - self.now % DAY - 2 * HOUR
        return evening if evening + scene.span <= self.now else evening - DAY


def play_incident(scene: Scene, watch: WatchFrame, record: NightRecord | None = None) -> PlayedIncident:
    """Run an incident on both sides. The figures are the same every time, recorded or not."""
    start, store = (NIGHT_START, None) if record is None else (record.start(scene), record.store)
    lease = LEASE if scene.span > HOUR else LEASE_DURATION
    # In one store, each incident needs ids of its own.
    seed = 0 if record is None else 1 + [each.name for each in SCENES].index(scene.name)
    with (
        TemporaryDirectory(prefix="halter-night-") as home,
        World(seed, path=store, orderly=True, threads=False, start=start, lease=lease) as world,
    ):
        person = "demo" if record is None else record.person
        return world.run(_play_incident(scene, world, Path(home), watch, person))


async def _play_incident(scene: Scene, world: World, home: Path, watch: WatchFrame, person: str) -> PlayedIncident:
    rates, before = find_price(), await _take_stock(world)
    without, within = (DemoProvider(scene.script, rates, world.clock) for _ in range(2))
    desk = _lay_out_scene(scene, home / "without") / DESK_FOLDER
    plain = PlainLoop(without, world.clock, write_handbook(scene.handbook), desk)
    app, folder = _make_runtime(world, home, person), _lay_out_scene(scene, home / "with")
    for each in (
        scene.without(plain),
        _make_supervisor(world, app, ServedModel(within)).run([folder]),
        *(scene.meanwhile(path, world.clock) for path in (desk, folder / DESK_FOLDER)),
    ):
        world.spawn(each)
    until = world.now + scene.span
    while world.now < until:
        await world.advance(scene.frame)
        share = 1 - (until - world.now) / scene.span
        bill = _subtract(await _read_bill(world), before.bill)
        watch(Frame(world.now, share, Bill(without.requests, micros_to_usd(without.usd)), bill))
    events = await _events(world, before)
    rows = await world.journal.ask(Query("all_sessions", SessionRow))
    sessions = [row for row in rows if row.session not in before.sessions]
    paid = Bill(without.requests, micros_to_usd(without.usd))
    await _switch_off_rest(world, app, sessions)
    return PlayedIncident(scene, paid, sum_bill(events), events, sessions)


class _Before(msgspec.Struct, frozen=True):
    """What the store held before an incident."""

    heads: Mapping[str, int]
    sessions: frozenset[str]
    bill: Bill


async def _take_stock(world: World) -> _Before:
    sessions = await world.journal.ask(Query("all_sessions", SessionRow))
    return _Before(
        dict(await read_stream_heads(world.journal)),
        frozenset(row.session for row in sessions),
        await _read_bill(world),
    )


async def _switch_off_rest(world: World, app: Runtime, sessions: Sequence[SessionRow]) -> None:
    """Switch off what would run on, once all figures are read: no process runs it after the night."""
    for agent in {row.agent for row in sessions if row.kind == "autonomous"}:
        await turn_off(app, agent, "the night is over")
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
    given = {str(model.name): model}
    rng, mode = random.Random(world.seed), quiet_mode(world.lease)
    return Supervisor(app, lambda _, __: None, rng=rng, given=given, mode=mode)


async def _read_bill(world: World) -> Bill:
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    return Bill(sum(spend.input_tokens > 0 for spend in spends), micros_to_usd(sum(spend.usd for spend in spends)))


def _subtract(bill: Bill, before: Bill) -> Bill:
    return Bill(bill.requests - before.requests, bill.cost_usd - before.cost_usd)


async def _events(world: World, before: _Before) -> Sequence[Stored]:
    return [
        stored
        for stream, _ in sorted(await read_stream_heads(world.journal))
        for stored in await world.events(stream)
        if stored.seq > before.heads.get(stream, 0)
    ]


def sum_bill(events: Sequence[Stored]) -> Bill:
    """Sum the requests and costs in a journal."""
    settled = [stored.event for stored in events if isinstance(stored.event, RequestSettled)]
    return Bill(len(settled), micros_to_usd(sum(event.charge.usd for event in settled if event.charge is not None)))


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


def summarize_incident(played: PlayedIncident) -> Incident:
    scene, kinds = played.scene, [stored.kind for stored in played.events]
    return Incident(
        scene.name,
        scene.title,
        scene.happens,
        played.without,
        played.within,
        _BRAKES[scene.name](played),
        {kind: kinds.count(kind) for kind in sorted(set(kinds))},
    )


def sum_night(incidents: Sequence[Incident]) -> Night:
    without, within = _sum([each.without for each in incidents]), _sum([each.within for each in incidents])
    overruns = sum(each.events.get(OverrunIncurred.KIND, 0) for each in incidents)
    return Night(str(MODEL), incidents, without, within, overruns)


def format_cents(usd: Decimal) -> str:
    return f"${usd:,.2f}"


def _sum(bills: Sequence[Bill]) -> Bill:
    return Bill(sum(bill.requests for bill in bills), sum((bill.cost_usd for bill in bills), ZERO_USD))


def _describe_stuck(played: PlayedIncident) -> str:
    attempts = sum(event.attempts for event in _events_of_kind(played, ItemQuarantined))
    return (
        f"Steps that bring nothing new end a run. After {attempts} of them the invoice was left to a person; "
        f"the other {_count_in_state(played, 'COMPLETED')} are booked."
    )


def _describe_idle(played: PlayedIncident) -> str:
    skipped, taken = len(_events_of_kind(played, TurnSkipped)), len(_events_of_kind(played, TurnStarted))
    return f"The gate: {skipped} of {skipped + taken} wakes found nothing changed, and no model was asked."


def _describe_parallel(played: PlayedIncident) -> str:
    refused = len(_events_of_kind(played, RequestRefused))
    return (
        f"Money is held before it is spent, and {refused} requests did not fit. "
        f"{_count_in_state(played, 'COMPLETED')} reports are "
        f"done, {_count_in_state(played, 'SLEEPING')} sleep until the next day's budget."
    )


def _events_of_kind(played: PlayedIncident, kind: type[T]) -> list[T]:
    return [stored.event for stored in played.events if isinstance(stored.event, kind)]


def _count_in_state(played: PlayedIncident, state: State) -> int:
    return sum(row.state == state for row in played.sessions)


_BRAKES: Final[Mapping[str, Callable[[PlayedIncident], str]]] = MappingProxyType(
    {"stuck_item": _describe_stuck, "idle_heartbeat": _describe_idle, "parallel_runs": _describe_parallel}
)
