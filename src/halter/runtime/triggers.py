"""The triggers of one agent: created from its file, started when due, by a webhook or by a person.

Each write is one commit: a run and its session begin together, and never twice.
"""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
from msgspec import UNSET

from halter.autonomy.pace import parse_active_hours
from halter.autonomy.triggers import (
    CapExhausted,
    DelayDocuments,
    QuarantineDocument,
    QueueRun,
    RunNow,
    SkipRuns,
    StartRun,
    TriggerConditions,
    WatchedDocument,
    check_cap_exhausted,
    decide_schedule,
    decide_watch,
    find_next_schedule_look,
)
from halter.core.agent_spec import AnyTrigger, Schedule, Watch, Webhook, inherit_trigger_caps, trigger_id
from halter.core.clock import DAY, SECOND, window_end
from halter.core.codec import decode
from halter.core.effect_events import SkipReason
from halter.core.errors import ConfigError, LeaseLost, StoreUnavailable
from halter.core.events import (
    SESSION_FORMAT,
    AnyEvent,
    ItemQuarantined,
    ItemSeen,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
    WakePosted,
)
from halter.core.folders import FileEntry
from halter.core.ids import FLEET, SessionId, inbox_stream, session_stream, trigger_stream
from halter.core.money import SAMPLES_KEPT, Leg, Spender, list_accounts
from halter.core.ports import Draft, Query, Rows, UnreadableFile, Write, offload_body
from halter.core.project import rows_of_event
from halter.core.rows import AgentRow, HaltRow, ItemRow, OutputRow, SessionRow, TriggerRow
from halter.core.schedules import Timing, parse_moment
from halter.core.text import clean, shorten, to_body, to_one_line
from halter.core.tools import find_secret_names
from halter.guard.halts import read_halts
from halter.guard.ledger import read_budget
from halter.loop.session_runtime import raise_if_cancelled
from halter.runtime.agent_context import AgentContext
from halter.runtime.documents import Library
from halter.runtime.session_builder import (
    TriggerRecord,
    classify_trigger,
    encode_trigger_record,
    find_trigger_row,
    read_trigger_record,
)
from halter.runtime.sessions import build_session_beginning, read_session_row
from halter.runtime.worker import AutonomousAgent
from halter.tasks.playbooks import Task, encode_task

FILE_ACTOR = "agent.yaml"
"""The actor of triggers that come from an agent's file."""


def digest_trigger(trigger: AnyTrigger) -> str:
    return sha256(encode_trigger_record(trigger)).hexdigest()


def make_trigger(
    identity: str, agent: str, trigger: AnyTrigger, by: str, timing: Timing | None = None, before: int = 0
) -> Write:
    """Creates a trigger, or replaces the one made at `before`."""
    body = encode_trigger_record(trigger, timing)
    event = TriggerMade(
        trigger=identity, agent=agent, type=classify_trigger(trigger), by=by, digest=digest_trigger(trigger)
    )

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, identity)
        return [Draft(event, body)] if (0 if row is None else row.made_seq) == before else []

    return Write(trigger_stream(identity), f"{identity}/made/{before}", decide, [(TriggerRow, identity)])


def end_trigger_row(row: TriggerRow, by: str, reason: str = "") -> Write:
    event = TriggerEnded(trigger=row.trigger, by=by, reason=reason)

    def decide(rows: Rows) -> Sequence[Draft]:
        now = rows.get(TriggerRow, row.trigger)
        return [Draft(event)] if now is not None and now.ended_at is None else []

    key = f"{row.trigger}/ended/{row.made_seq}"
    return Write(trigger_stream(row.trigger), key, decide, [(TriggerRow, row.trigger)])


def record_trigger_events(trigger: str, key: str, *events: AnyEvent) -> Write:
    rows = [row for event in events for row in rows_of_event(event)]
    return Write(trigger_stream(trigger), f"{trigger}/{key}", lambda _: [Draft(event) for event in events], rows)


def record_unstarted_run(key: str, event: RunSkipped | RunQueued) -> Write:
    """Records that a due time starts nothing, or not yet, unless another process has dealt with it."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        return [Draft(event)] if row is not None and _is_open(row, event.due_at) else []

    return Write(trigger_stream(event.trigger), f"{event.trigger}/{key}", decide, rows_of_event(event))


def _is_open(row: TriggerRow, due_at: int) -> bool:
    """Whether a due time is still undecided."""
    return due_at > row.ticked_at or due_at == row.queued_at


def record_delay(event: RunsDelayed, now: int) -> Write:
    """Records why a trigger's runs wait, unless that was recorded last."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        same = row is not None and (row.delayed, row.delayed_until) == (event.sentence, event.until)
        return [] if same else [Draft(event)]

    key = f"{event.trigger}/delay/{now}"
    return Write(trigger_stream(event.trigger), key, decide, rows_of_event(event))


class RunInput(msgspec.Struct, frozen=True):
    """What a session is given beside its trigger's prompt; it is not trusted."""

    text: str
    sender: str
    cause: str = "trigger"


async def start_run(
    context: AgentContext,
    row: TriggerRow,
    trigger: AnyTrigger,
    run: RunStarted,
    key: str,
    given: RunInput | None = None,
    before: str | None = None,
) -> Write:
    """Starts a run and its session in one commit; nothing if another run came first.

    `before` is the newest session of its document, which must not have changed.
    """
    session = f"{row.agent}.{trigger.name}-{row.runs + 1}"
    event, more = await build_session_beginning(context, "task", session)
    event = msgspec.structs.replace(
        event,
        trigger=row.trigger,
        started_by=run.by or f"trigger:{row.trigger}",
        origin="person" if run.by else "config",
        format=SESSION_FORMAT,
    )
    run = msgspec.structs.replace(run, session=session)
    redact = context.guard().redact
    task = await offload_body(context.store, _task(context, trigger, redact(trigger.prompt)))
    stream, inbox = session_stream(session), inbox_stream(session)
    words = [] if given is None else [await _draft_input(context, given, redact(given.text))]

    def decide(rows: Rows) -> Sequence[Draft]:
        now = rows.get(TriggerRow, row.trigger)
        item = rows.get(ItemRow, row.trigger, run.item) if before is not None else None
        if now is None or now.ended_at is not None or now.runs != row.runs:
            return []
        if item is not None and item.session != before:
            return []
        if run.cause == "schedule" and not _is_open(now, run.due_at):
            return []
        session_drafts = [Draft(event, *task), *more]
        return [
            Draft(run),
            *(msgspec.structs.replace(draft, stream=stream) for draft in session_drafts),
            *(msgspec.structs.replace(draft, stream=inbox) for draft in words),
        ]

    reads = [*rows_of_event(run), (TriggerRow, row.trigger)]
    return Write(trigger_stream(row.trigger), f"{row.trigger}/{key}", decide, reads, others=(stream, inbox))


def _task(context: AgentContext, trigger: AnyTrigger, prompt: str) -> bytes:
    if isinstance(trigger.playbook, str):
        return encode_task(Task(context.agent.playbooks[PurePosixPath(trigger.playbook).stem], trigger.inputs))
    return to_body(prompt)


async def _draft_input(context: AgentContext, given: RunInput, text: str) -> Draft:
    cause = "webhook" if given.cause == "webhook" else "trigger"
    event = WakePosted(cause=cause, origin="document", sender=given.sender)
    return Draft(event, *await offload_body(context.store, to_body(text)))


TriggerMessageListener = Callable[[str, str], None]

MAX_DOCUMENTS_PER_LOOK: Final = 20
"""Most documents indexed at once: thousands of them delay no other trigger."""


class _Cost(msgspec.Struct, frozen=True):
    usd: int


class _Run(msgspec.Struct, frozen=True):
    version: int
    facts: bytes


class AgentTriggers:
    """Runs the triggers of one agent."""

    def __init__(
        self,
        context: AgentContext,
        folder: Path,
        tell: TriggerMessageListener,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._store = context.store
        self._clock = context.app.clock
        self._name = context.agent.policy.name
        self._library = context.agent.library or Library(context.store, folder)
        self._report = tell
        self._on_quarantine = left
        self._records: dict[tuple[str, int], TriggerRecord | None] = {}
        self._stable: dict[tuple[str, str], tuple[FileEntry, int]] = {}
        self._last_reported: dict[str, str] = {}
        self._is_settled = False

    @property
    def watches(self) -> bool:
        return bool(self._context.agent.tasks.watches)

    async def find_halted(self, rows: Sequence[SessionRow]) -> Sequence[SessionRow]:
        """Return the sessions that are halted, by themselves or with their trigger, their agent or the fleet."""
        scopes = {row.session: (f"session:{row.session}", *_list_scopes(row)) for row in rows}
        halts = await read_halts(self._store, chain.from_iterable(scopes.values()))
        return [row for row in rows if any(scope in halts and halts[scope].halted for scope in scopes[row.session])]

    async def run_due(self, switch: AgentRow | None) -> int | None:
        """Does what is due; returns when to look again, if time decides that."""
        await self.settle()
        if switch is None or not switch.switched_on:
            return None
        rows = await self._rows()
        halts = await read_halts(self._store, chain.from_iterable(map(_list_scopes, rows)))
        moments = [await self._check_safely(row, switch, halts) for row in rows]
        return min((moment for moment in moments if moment is not None), default=None)

    async def find_delivery(self, identity: str, key: str) -> str:
        """Returns the session that a delivery started before; "" if it is new."""
        found = await self._store.ask(Query("run_by_key", _Run, {"key": key}))
        for row in found:
            event = decode(RunStarted.KIND, row.version, row.facts)
            if isinstance(event, RunStarted) and event.trigger == identity:
                return event.session
        return ""

    async def find_obstacle(self, identity: str, trigger: AnyTrigger) -> tuple[SkipReason, str, int | None] | None:
        """Returns what prevents a requested run, and until when; None if nothing does."""
        switches = await self._store.ask(Query("all_agents", AgentRow))
        switch = next((row for row in switches if row.agent == self._name), None)
        if switch is None or not switch.switched_on:
            return ("off", f"{self._name} is switched off: halter on {self._name}", None)
        row = TriggerRow(identity, agent=self._name)
        halted = _explain_halt(row, await read_halts(self._store, _list_scopes(row)))
        if halted:
            return ("halted", halted, None)
        empty, _ = await self._money(row, trigger)
        return None if empty is None else ("cost_cap_reached", empty.sentence, empty.until)

    async def _rows(self) -> Sequence[TriggerRow]:
        return await self._store.ask(Query("triggers_of", TriggerRow, {"agent": self._name}))

    async def settle(self) -> None:
        """Creates and ends triggers as the agent's file says, beside those that people confirmed.

        Done once per process: another process may have a newer file, and the two would alternate for ever.
        """
        if self._is_settled:
            return
        rows = {row.trigger: row for row in await self._rows()}
        named = {trigger_id(self._name, each.name): each for each in self._context.agent.tasks.triggers()}
        for identity, trigger in named.items():
            row = rows.get(identity)
            if row is None or row.digest != digest_trigger(trigger):
                await self._make(identity, trigger)
        for identity, row in rows.items():
            if identity not in named and row.made_by == FILE_ACTOR:
                await self._store.commit(end_trigger_row(row, FILE_ACTOR, "it stands in the agent's file no longer"))
        self._is_settled = True

    async def _make(self, identity: str, trigger: AnyTrigger) -> None:
        row = next(iter(await self._store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
        timing = resolve_timing(trigger, self._clock.now()) if isinstance(trigger, Schedule) else None
        before = 0 if row is None else row.made_seq
        if row is None and isinstance(trigger, Watch) and not trigger.existing:
            # First, so that an interrupted start is repeated as a whole.
            await self._index_watch(identity, trigger, ignored=True)
        await self._store.commit(make_trigger(identity, self._name, trigger, FILE_ACTOR, timing, before))

    async def _check_safely(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        """Checks one trigger. A failure is reported and stops no other one."""
        about = f"{row.trigger} breaks down"
        try:
            moment = await self._check(row, switch, halts)
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as error:  # noqa: BLE001  no failure here may stop another trigger
            raise_if_cancelled()
            sentence = self._context.guard().redact(clean(f"{type(error).__name__}: {error}"))
            self._report_once(about, f"{shorten(sentence, 300)} It is tried again.")
            return None
        self._report_once(about, "")
        return moment

    async def _check(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        record = await self._read_record(row)
        if record is None:
            self._report_once(
                row.trigger, "What was said of it was erased, so it starts nothing: cancel it, or make it anew."
            )
            return None
        trigger = record.trigger()
        match trigger:
            case Schedule() if record.timing is not None:
                return await self._schedule(
                    row, trigger, record.timing, await self._around(row, trigger, switch, halts)
                )
            case Watch():
                return await self._watch(row, trigger, switch, halts)
            case _:
                return None

    async def _read_record(self, row: TriggerRow) -> TriggerRecord | None:
        key = (row.trigger, row.made_seq)
        if key not in self._records:
            self._records[key] = await read_trigger_record(self._store, row)
        return self._records[key]

    async def _around(
        self, row: TriggerRow, trigger: AnyTrigger, switch: AgentRow, halts: Mapping[str, HaltRow]
    ) -> TriggerConditions:
        running = await self._store.ask(Query("open_runs", SessionRow, {"trigger": row.trigger}))
        empty, _ = await self._money(row, trigger)
        return TriggerConditions(
            now=self._clock.now(),
            on_since=switch.at,
            halted=_explain_halt(row, halts),
            empty=empty,
            running=len(running),
        )

    async def _money(self, row: TriggerRow, trigger: AnyTrigger) -> tuple[CapExhausted | None, int | None]:
        """Returns the cap that leaves nothing, if one does; and what the tightest cap leaves."""
        caps = inherit_trigger_caps(self._context.agent.policy.caps, trigger)
        legs = list_accounts(caps, Spender("", self._name, row.trigger), self._clock.now())
        least: int | None = None
        for leg in legs:
            left = None if leg.scope.startswith("session:") else await self._find_remaining(leg)
            if left is None:
                continue
            cap, unspent = left
            empty = check_cap_exhausted(unspent, cap, f"{leg.scope} {leg.window}".strip(), window_end(leg.window))
            if empty is not None:
                return empty, 0
            least = unspent if least is None else min(least, unspent)
        return None, least

    async def _find_remaining(self, leg: Leg) -> tuple[int, int] | None:
        row = await read_budget(self._store, leg.scope, leg.window)
        cap = row.binding(leg.cap)
        return None if cap is None else (cap, cap - row.spent - row.held)

    async def _schedule(
        self, row: TriggerRow, schedule: Schedule, timing: Timing, conditions: TriggerConditions
    ) -> int | None:
        hours = None if schedule.active_hours is UNSET else parse_active_hours(schedule.active_hours)
        for act in decide_schedule(schedule, timing, row, conditions, hours):
            await self._do(row, schedule, act)
        (row,) = await self._store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
        return find_next_schedule_look(schedule, timing, row, conditions.now)

    async def _do(self, row: TriggerRow, schedule: Schedule, act: RunNow | SkipRuns | QueueRun) -> None:
        identity = row.trigger
        match act:
            case RunNow(due_at):
                run = RunStarted(trigger=identity, session="", cause="schedule", due_at=due_at)
                await self._start(row, schedule, run)
            case SkipRuns(why, due_at, count, sentence):
                event = RunSkipped(trigger=identity, why=why, due_at=due_at, count=count, sentence=sentence)
                await self._store.commit(record_unstarted_run(f"skip/{due_at}", event))
            case QueueRun(due_at):
                event = RunQueued(trigger=identity, due_at=due_at)
                await self._store.commit(record_unstarted_run(f"queue/{due_at}", event))

    async def _start(
        self, row: TriggerRow, trigger: AnyTrigger, run: RunStarted, item: WatchedDocument | None = None
    ) -> None:
        (row,) = await self._store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
        key, given, before = f"tick/{run.due_at}", None, None
        if item is not None:
            # A document that a person retries has no session, as at first.
            key, before = f"item/{item.item}/{run.attempt}/{item.session}/{row.runs}", item.session
            given = RunInput(f"The document is {item.name}.", row.trigger)
        await self._store.commit(await start_run(self._context, row, trigger, run, key, given, before))

    async def _watch(self, row: TriggerRow, watch: Watch, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        settles = await self._index_watch(row.trigger, watch)
        items = await self._store.ask(Query("items_open", WatchedDocument, {"trigger": row.trigger}))
        if not any(not item.is_done and not item.open for item in items):
            return settles
        conditions = await self._around(row, watch, switch, halts)
        own = await read_halts(self._store, [f"session:{item.session}" for item in items if item.session])
        free, stopped = _split_halted(items, switch, own)
        found = decide_watch(watch, free, conditions, await self._count_affordable(row, watch, conditions.running))
        for act in (*found.acts, *(stopped if not found.acts else ())):
            await self._act(row, watch, act)
        moments = [at for at in (settles, found.until, conditions.empty and conditions.empty.until) if at is not None]
        return min(moments, default=None)

    async def _act(self, row: TriggerRow, watch: Watch, act: StartRun | QuarantineDocument | DelayDocuments) -> None:
        identity = row.trigger
        match act:
            case StartRun(item, attempt):
                run = RunStarted(trigger=identity, session="", cause="watch", item=item.item, attempt=attempt)
                await self._start(row, watch, run, item)
            case QuarantineDocument(item, sentence):
                event = ItemQuarantined(trigger=identity, item=item.item, attempts=item.attempts, sentence=sentence)
                await self._store.commit(
                    record_trigger_events(identity, f"quarantine/{item.item}/{item.session}", event)
                )
                self._on_quarantine()
            case DelayDocuments(why, waiting, sentence, until):
                if (sentence, until) != (row.delayed, row.delayed_until):
                    event = RunsDelayed(trigger=identity, why=why, waiting=waiting, sentence=sentence, until=until)
                    await self._store.commit(record_delay(event, self._clock.now()))

    async def _count_affordable(self, row: TriggerRow, watch: Watch, running: int) -> int | None:
        """Returns for how many sessions money is left, going by what they cost so far."""
        _, remaining = await self._money(row, watch)
        params = {"trigger": row.trigger, "since": self._clock.now() - 7 * DAY, "limit": SAMPLES_KEPT}
        costs = [cost.usd for cost in await self._store.ask(Query("trigger_costs", _Cost, params)) if cost.usd]
        if remaining is None or not costs:
            return None
        capacity = max(0, remaining * len(costs) // sum(costs) - running)
        # One may always start: the guard holds what it costs when it acts.
        return capacity if running else max(capacity, 1)

    async def _index_watch(self, identity: str, watch: Watch, *, ignored: bool = False) -> int | None:
        """Indexes the documents of a watch that no longer change; returns when the next one settles."""
        path, pattern = self._resolve_collection(watch)
        files = await self._library.files(path, pattern)
        if isinstance(files, UnreadableFile):
            self._report_once(identity, f"{files.sentence} It is looked for again and again.")
            return None
        self._report_once(identity, "")
        now, moments, taken = self._clock.now(), list[int](), 0
        for name, entry in sorted(files.items(), key=lambda found: (found[1].modified, found[0])):
            before, since = self._stable.get((identity, name), (None, 0))
            if before != entry:
                self._stable[identity, name] = (entry, now)
                since = now
            if not ignored and now - since < watch.debounce:
                moments.append(since + watch.debounce)
            elif before == entry and since == 0:
                continue
            elif taken == MAX_DOCUMENTS_PER_LOOK and not ignored:
                return now
            elif await self._index_document(identity, self._library.resolve(path) / name, name, entry, ignored=ignored):
                self._stable[identity, name] = (entry, 0)
                taken += 1
        return min(moments, default=None)

    def _resolve_collection(self, watch: Watch) -> tuple[str, str]:
        if watch.collection is not UNSET:
            collection = self._context.agent.tasks.collections[watch.collection]
            return collection.path, collection.pattern
        return ("." if watch.path is UNSET else watch.path), watch.pattern

    async def _index_document(self, identity: str, path: Path, name: str, entry: FileEntry, *, ignored: bool) -> bool:
        """Indexes one document, once per content; returns whether it is known now."""
        known = await self._library.index_file(path, entry, name)
        if not known.document:
            self._report_once(f"{identity} {to_one_line(name)}", to_one_line(known.problem))
            return False
        shown, problem = to_one_line(name), to_one_line(known.problem)
        await self._store.commit(
            self._record_document(identity, known.document, shown, entry, problem, ignored=ignored)
        )
        if problem:
            self._on_quarantine()
        return True

    def _record_document(
        self, identity: str, item: str, name: str, entry: FileEntry, problem: str, *, ignored: bool
    ) -> Write:
        """Records that a document was found; not one that the agent wrote, and none twice."""

        def decide(rows: Rows) -> Sequence[Draft]:
            if rows.get(ItemRow, identity, item) is not None:
                return []
            own = rows.get(OutputRow, self._name, item) is not None
            event = ItemSeen(trigger=identity, item=item, name=name, size=entry.size, ignored=ignored or own)
            if not problem or event.ignored:
                return [Draft(event)]
            return [
                Draft(event),
                Draft(ItemQuarantined(trigger=identity, item=item, attempts=0, sentence=problem)),
            ]

        rows = [(TriggerRow, identity), (ItemRow, identity, item), (OutputRow, self._name, item)]
        return Write(trigger_stream(identity), f"{identity}/seen/{item}", decide, rows)

    def _report_once(self, about: str, sentence: str) -> None:
        if self._last_reported.get(about, "") != sentence:
            self._last_reported[about] = sentence
            if sentence:
                self._report(self._name, f"{about}: {sentence}")


def _split_halted(
    items: Sequence[WatchedDocument], switch: AgentRow, halts: Mapping[str, HaltRow]
) -> tuple[Sequence[WatchedDocument], Sequence[DelayDocuments]]:
    """Splits off the documents whose own session a person halted since the agent was switched on."""

    def halt_of(item: WatchedDocument) -> HaltRow | None:
        halt = halts.get(f"session:{item.session}")
        ours = halt is not None and halt.halted and halt.at > switch.at and item.blameless
        return halt if ours else None

    held = [halt for item in items if (halt := halt_of(item)) is not None]
    delays = [DelayDocuments("halted", len(held), _name_halt_author(held[0]))] if held else []
    return [item for item in items if halt_of(item) is None], delays


def _name_halt_author(halt: HaltRow) -> str:
    return f"{halt.scope} was halted by {halt.by}: halter resume {halt.scope}"


def _list_scopes(row: TriggerRow | SessionRow) -> tuple[str, ...]:
    return (f"trigger:{row.trigger}", f"agent:{row.agent}", FLEET)


def _explain_halt(row: TriggerRow, halts: Mapping[str, HaltRow]) -> str:
    for scope in _list_scopes(row):
        halt = halts.get(scope)
        if halt is not None and halt.halted:
            return _name_halt_author(halt)
    return ""


def resolve_timing(schedule: Schedule, now: int) -> Timing:
    """Returns when a schedule of a file fires. The file was checked when it was read."""
    zone = "UTC" if schedule.timezone is UNSET else schedule.timezone
    if schedule.cron is not UNSET:
        return Timing(cron=schedule.cron, timezone=zone)
    if schedule.every is not UNSET:
        return Timing(every=schedule.every, timezone=zone, anchor=now)
    at = parse_moment("" if schedule.at is UNSET else schedule.at, zone)
    return Timing(at=at if isinstance(at, int) else None, timezone=zone)


MAX_DELIVERY_LENGTH = 256 * 1024


async def run_now(context: AgentContext, folder: Path, name: str, file: Path | None) -> SessionId:
    """Starts a run of a trigger: for a watch about a document, for a webhook with a file's text as its delivery."""
    store, agent = context.store, context.agent.policy.name
    await AgentTriggers(context, folder, lambda _, __: None).settle()
    row = await find_trigger_row(store, trigger_id(agent, name))
    record = None if row is None or row.ended_at is not None else await read_trigger_record(store, row)
    if row is None or record is None:
        raise ConfigError(f"{agent} has no trigger {name}: look at halter schedules {agent}.")
    trigger = record.trigger()
    item, given = await _build_run_input(context, folder, row, trigger, file)
    person = context.app.settings.person
    run = RunStarted(trigger=row.trigger, session="", cause="person", item=item, by=person)
    write = await start_run(context, row, trigger, run, f"person/{context.app.ids.make()}", given)
    for stored in (await store.commit(write)).events:
        if isinstance(stored.event, RunStarted):
            return SessionId(stored.event.session)
    raise ConfigError(f"Another run of {name} was started at this very moment: look at halter sessions.")


async def attend_run_here(context: AgentContext, folder: Path, session: SessionId) -> bool:
    """Runs a run until it rests or ends in this process; False where another process has it."""
    for lease in await context.store.claim(context.worker, 1, session):
        await AutonomousAgent(context, folder).run_session(lease, await read_session_row(context, session))
        return True
    return False


async def _build_run_input(
    context: AgentContext, folder: Path, row: TriggerRow, trigger: AnyTrigger, file: Path | None
) -> tuple[str, RunInput | None]:
    match trigger:
        case Schedule():
            if file is not None:
                raise ConfigError(f"{trigger.name} is a schedule, which runs without a file.")
            return "", None
        case Watch():
            if file is None:
                raise ConfigError(f"{trigger.name} is a watch, which runs for a document: name its file.")
            return await _index_given_document(context, folder, row, file), RunInput(
                f"The document is {file.name}.", row.trigger
            )
        case Webhook():
            text = "" if file is None else _read_delivery(file)
            return "", RunInput(text, context.app.settings.person, "webhook") if text else None


async def _index_given_document(context: AgentContext, folder: Path, row: TriggerRow, file: Path) -> str:
    """Indexes a document. The watch itself starts nothing for it."""
    library = context.agent.library or Library(context.store, folder)
    path, entry = _stat_document(file)
    known = await library.index_file(path, entry, file.name)
    if known.problem or not known.document:
        raise ConfigError(known.problem or f"{file} cannot be read.")
    event = ItemSeen(trigger=row.trigger, item=known.document, name=file.name, size=entry.size, ignored=True)
    await context.store.commit(record_trigger_events(row.trigger, f"seen/{known.document}", event))
    return known.document


def _stat_document(file: Path) -> tuple[Path, FileEntry]:
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    return file.resolve(), FileEntry(found.st_size, found.st_mtime_ns, found.st_ino)


def _read_delivery(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(MAX_DELIVERY_LENGTH)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None


MAX_START_ATTEMPTS: Final = 20
"""How often to retry where other runs start at the same moment."""
_DELIVERY: Final = re.compile(r"[\x21-\x7e]{1,200}")


class Delivery(msgspec.Struct, frozen=True):
    """A webhook delivery."""

    token: str
    delivery: str
    content_type: str
    body: bytes


class HookAccepted(msgspec.Struct, frozen=True):
    """The delivery started a session, now or when it came before."""

    session: str
    repeated: bool = False


class HookRejected(msgspec.Struct, frozen=True):
    """Nothing was started: the HTTP status and a sentence."""

    status: int
    sentence: str
    retry_after: int | None = None


class WebhookReceiver:
    """Receives deliveries for the webhooks of the agents of this process."""

    def __init__(self, agents: Mapping[str, AgentContext], triggers: Mapping[str, AgentTriggers]) -> None:
        self._agents = agents
        self._triggers = triggers

    def has_webhooks(self) -> bool:
        return any(context.agent.tasks.webhooks for context in self._agents.values())

    def max_bytes(self, agent: str, name: str, token: str) -> int:
        """Returns how long a body may be; 0 without a valid token, so that nothing is read."""
        hook, context = self._hook(agent, name), self._agents.get(agent)
        if hook is None or context is None or not _token_fits(context, hook, token):
            return 0
        return hook.max_bytes

    async def receive(self, agent: str, name: str, delivery: Delivery) -> HookAccepted | HookRejected:
        """Starts a session for a delivery. Without a valid token the answer says no more than that."""
        hook = self._hook(agent, name)
        context = self._agents.get(agent)
        if hook is None or context is None or not _token_fits(context, hook, delivery.token):
            return HookRejected(401, "There is no webhook for that token: send it as `Authorization: Bearer TOKEN`.")
        flaw = _find_delivery_flaw(hook, delivery)
        if flaw is not None:
            return flaw
        return await self._start_run(context, hook, delivery)

    def _hook(self, agent: str, name: str) -> Webhook | None:
        context = self._agents.get(agent)
        hooks = () if context is None else context.agent.tasks.webhooks
        return next((hook for hook in hooks if hook.name == name), None)

    async def _start_run(self, context: AgentContext, hook: Webhook, delivery: Delivery) -> HookAccepted | HookRejected:
        identity = trigger_id(context.agent.policy.name, hook.name)
        store, key = context.store, f"delivery/{delivery.delivery}"
        for _ in range(MAX_START_ATTEMPTS):
            row = await find_trigger_row(store, identity)
            if row is None or row.ended_at is not None:
                await store.commit(
                    make_trigger(
                        identity, context.agent.policy.name, hook, FILE_ACTOR, None, row.made_seq if row else 0
                    )
                )
                continue
            run = RunStarted(trigger=identity, session="", cause="webhook")
            words = RunInput(delivery.body.decode("utf-8", "replace"), f"webhook:{clean(delivery.delivery)}", "webhook")
            write = await start_run(context, row, hook, run, key, words)
            before = await self._find_obstacle(context, hook, identity, write.key)
            if before is not None:
                return before
            committed = await store.commit(write)
            for stored in committed.events:
                if isinstance(stored.event, RunStarted):
                    return HookAccepted(stored.event.session, committed.repeated)
        return HookRejected(503, "Too much comes at once: send it again in a moment.", SECOND)

    async def _find_obstacle(
        self, context: AgentContext, hook: Webhook, identity: str, key: str
    ) -> HookAccepted | HookRejected | None:
        """Returns what prevents a run. A repeated delivery gets its first answer."""
        seen = await self._triggers[context.agent.policy.name].find_delivery(identity, key)
        if seen:
            return HookAccepted(seen, repeated=True)
        against = await self._triggers[context.agent.policy.name].find_obstacle(identity, hook)
        if against is None:
            return None
        why, sentence, until = against
        now = context.app.clock.now()
        event = RunSkipped(trigger=identity, why=why, due_at=now, sentence=sentence)
        await context.store.commit(record_trigger_events(identity, f"skip/{key}/{now}", event))
        return HookRejected(429 if why == "cost_cap_reached" else 409, sentence, None if until is None else until - now)


def _token_fits(context: AgentContext, hook: Webhook, token: str) -> bool:
    names = find_secret_names(hook.token.encode())
    secrets = context.agent.secrets
    expected = [secrets.value(name) for name in names if name in secrets.names()]
    given = token.encode("utf-8", "replace")
    return any(hmac.compare_digest(given, each.encode()) for each in expected if each)


def _find_delivery_flaw(hook: Webhook, delivery: Delivery) -> HookRejected | None:
    if not _DELIVERY.fullmatch(delivery.delivery):
        return HookRejected(400, "Name the delivery, as in `Halter-Delivery: 42`: sent twice, it is taken once.")
    if len(delivery.body) > hook.max_bytes:
        return HookRejected(413, f"The body is longer than the {hook.max_bytes:,} bytes that are taken.")
    if not delivery.body.strip():
        return HookRejected(400, "The body is empty: there is nothing to work on.")
    try:
        delivery.body.decode()
    except UnicodeDecodeError:
        return HookRejected(400, "The body is no text: send JSON or text as UTF-8.")
    if "json" in delivery.content_type.lower():
        try:
            msgspec.json.decode(delivery.body)
        except (msgspec.DecodeError, RecursionError):
            return HookRejected(400, "The body says that it is JSON, and is not.")
    return None
