"""The triggers of one agent, created from its file, and their runs: when due, by a webhook or by a person.

A run and its session start in one commit, so they start together, and never twice.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
from msgspec import UNSET

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
    find_next_schedule_check,
)
from halter.core.clock import DAY, window_end
from halter.core.codec import decode
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
from halter.core.events.triggers import SkipReason
from halter.core.forecast import MAX_SAMPLES
from halter.core.ids import FLEET, SessionId, inbox_stream, session_stream, trigger_stream
from halter.core.money import Leg, Spender, list_accounts
from halter.core.ports import Draft, Query, Rows, UnreadableFile, Write, offload_body
from halter.core.project import rows_of_event
from halter.core.rows import AgentRow, HaltRow, ItemRow, OutputRow, SessionRow, TriggerRow
from halter.core.schedules import Timing, parse_moment
from halter.core.text import clean, encode_body, shorten, to_one_line
from halter.guard.halts import read_halts
from halter.guard.ledger import read_budget
from halter.loop.concurrency import raise_if_cancelled
from halter.policy.hours import parse_active_hours
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.document_index import Library
from halter.runtime.needs import read_trigger_health
from halter.runtime.session_origin import build_session_beginning, read_session_row
from halter.runtime.worker import AutonomousAgent
from halter.spec.triggers import AnyTrigger, Schedule, Watch, Webhook, inherit_trigger_caps, trigger_id
from halter.state.trace_context import add_traceparent
from halter.state.trigger_records import (
    TriggerRecord,
    classify_trigger,
    encode_trigger_record,
    find_trigger_row,
    read_trigger_record,
)
from halter.system.folders import FileEntry
from halter.system.protected_paths import AGENT_FILE_NAME
from halter.tasks.playbooks import Task, encode_task

FILE_ACTOR = AGENT_FILE_NAME
"""The actor of triggers that an agent's file defines."""


def digest_trigger(trigger: AnyTrigger) -> str:
    return sha256(encode_trigger_record(trigger)).hexdigest()


def make_trigger(
    identity: str, agent: str, trigger: AnyTrigger, by: str, timing: Timing | None = None, previous_seq: int = 0
) -> Write:
    """Return the write that creates a trigger, or that replaces the version made at `previous_seq`."""
    body = encode_trigger_record(trigger, timing)
    event = TriggerMade(
        trigger=identity, agent=agent, type=classify_trigger(trigger), by=by, digest=digest_trigger(trigger)
    )

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, identity)
        return [Draft(event, body)] if (0 if row is None else row.made_seq) == previous_seq else []

    return Write(trigger_stream(identity), f"{identity}/made/{previous_seq}", decide, [(TriggerRow, identity)])


def end_trigger_row(row: TriggerRow, by: str, reason: str = "") -> Write:
    event = TriggerEnded(trigger=row.trigger, by=by, reason=reason)

    def decide(rows: Rows) -> Sequence[Draft]:
        current = rows.get(TriggerRow, row.trigger)
        return [Draft(event)] if current is not None and current.ended_at is None else []

    key = f"{row.trigger}/ended/{row.made_seq}"
    return Write(trigger_stream(row.trigger), key, decide, [(TriggerRow, row.trigger)])


def record_trigger_events(trigger: str, key: str, *events: AnyEvent) -> Write:
    rows = [row for event in events for row in rows_of_event(event)]
    return Write(trigger_stream(trigger), f"{trigger}/{key}", lambda _: [Draft(event) for event in events], rows)


def record_unstarted_run(key: str, event: RunSkipped | RunQueued) -> Write:
    """Record that a due time starts no run, or not yet, unless another process has decided it."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        return [Draft(event)] if row is not None and _is_open(row, event.due_at) else []

    return Write(trigger_stream(event.trigger), f"{event.trigger}/{key}", decide, rows_of_event(event))


def _is_open(row: TriggerRow, due_at: int) -> bool:
    """Return true if a due time is still undecided."""
    return due_at > row.ticked_at or due_at == row.queued_at


def record_delay(event: RunsDelayed, now: int) -> Write:
    """Record why a trigger's runs wait, unless the last record is the same."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        is_same = row is not None and (row.delayed, row.delayed_until) == (event.sentence, event.until)
        return [] if is_same else [Draft(event)]

    key = f"{event.trigger}/delay/{now}"
    return Write(trigger_stream(event.trigger), key, decide, rows_of_event(event))


class RunInput(msgspec.Struct, frozen=True):
    """The input of a session in addition to its trigger's prompt. It is not trusted."""

    text: str
    sender: str
    cause: str = "trigger"


async def start_run(
    agent: AgentRuntime,
    row: TriggerRow,
    trigger: AnyTrigger,
    run: RunStarted,
    key: str,
    run_input: RunInput | None = None,
    previous_session: str | None = None,
) -> Write:
    """Return the write that starts a run and its session in one commit; it writes nothing if another run came first.

    `previous_session` is the newest session of the run's document. The write requires that it has not changed.
    """
    session = f"{row.agent}.{trigger.name}-{row.runs + 1}"
    event, drafts = await build_session_beginning(agent, "task", session)
    event = msgspec.structs.replace(
        event,
        trigger=row.trigger,
        started_by=run.by or f"trigger:{row.trigger}",
        origin="person" if run.by else "config",
        format=SESSION_FORMAT,
    )
    event = add_traceparent(event)
    run = msgspec.structs.replace(run, session=session)
    redact = agent.guard().redact
    task = await offload_body(agent.store, _task(agent, trigger, redact(trigger.prompt)))
    stream, inbox = session_stream(session), inbox_stream(session)
    inputs = [] if run_input is None else [await _draft_input(agent, run_input, redact(run_input.text))]

    def decide(rows: Rows) -> Sequence[Draft]:
        current = rows.get(TriggerRow, row.trigger)
        item = rows.get(ItemRow, row.trigger, run.item) if previous_session is not None else None
        if current is None or current.ended_at is not None or current.runs != row.runs:
            return []
        if item is not None and item.session != previous_session:
            return []
        if run.cause == "schedule" and not _is_open(current, run.due_at):
            return []
        session_drafts = [Draft(event, *task), *drafts]
        return [
            Draft(run),
            *(msgspec.structs.replace(draft, stream=stream) for draft in session_drafts),
            *(msgspec.structs.replace(draft, stream=inbox) for draft in inputs),
        ]

    reads = [*rows_of_event(run), (TriggerRow, row.trigger)]
    return Write(trigger_stream(row.trigger), f"{row.trigger}/{key}", decide, reads, others=(stream, inbox))


def _task(agent: AgentRuntime, trigger: AnyTrigger, prompt: str) -> bytes:
    if isinstance(trigger.playbook, str):
        return encode_task(Task(agent.definition.playbooks[PurePosixPath(trigger.playbook).stem], trigger.inputs))
    return encode_body(prompt)


async def _draft_input(agent: AgentRuntime, run_input: RunInput, text: str) -> Draft:
    cause = "webhook" if run_input.cause == "webhook" else "trigger"
    event = WakePosted(cause=cause, origin="document", sender=run_input.sender)
    return Draft(event, *await offload_body(agent.store, encode_body(text)))


TriggerMessageListener = Callable[[str, str], None]

MAX_DOCUMENTS_PER_CHECK: Final = 20
"""Maximum number of documents indexed in one check, so that thousands of them delay no other trigger."""


class _Cost(msgspec.Struct, frozen=True):
    usd: int


class _Run(msgspec.Struct, frozen=True):
    version: int
    facts: bytes


class AgentTriggers:
    """Runs the triggers of one agent."""

    def __init__(
        self,
        agent: AgentRuntime,
        folder: Path,
        on_report: TriggerMessageListener,
        on_quarantine: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = agent
        self._store = agent.store
        self._clock = agent.app.clock
        self._name = agent.policy.name
        self._library = agent.library or Library(agent.store, folder)
        self._report = on_report
        self._on_quarantine = on_quarantine
        self._records: dict[tuple[str, int], TriggerRecord | None] = {}
        self._stable: dict[tuple[str, str], tuple[FileEntry, int]] = {}
        self._last_reported: dict[str, str] = {}
        self._is_settled = False

    @property
    def watches(self) -> bool:
        return bool(self._context.definition.tasks.watches)

    async def find_halted(self, rows: Sequence[SessionRow]) -> Sequence[SessionRow]:
        """Return the sessions that are halted, directly or through their trigger, agent or fleet."""
        scopes = {row.session: (f"session:{row.session}", *_list_scopes(row)) for row in rows}
        halts = await read_halts(self._store, chain.from_iterable(scopes.values()))
        return [row for row in rows if any(scope in halts and halts[scope].halted for scope in scopes[row.session])]

    async def run_due(self, switch: AgentRow | None) -> int | None:
        """Run what is due; return when to check again, or None if only an event can make something due."""
        await self.settle()
        if switch is None or not switch.switched_on:
            return None
        rows = await self._rows()
        halts = await read_halts(self._store, chain.from_iterable(map(_list_scopes, rows)))
        moments = [await self._check_safely(row, switch, halts) for row in rows]
        return min((moment for moment in moments if moment is not None), default=None)

    async def find_delivery(self, identity: str, key: str) -> str:
        """Return the session that an earlier copy of a delivery started; "" if the delivery is new."""
        rows = await self._store.ask(Query("run_by_key", _Run, {"key": key}))
        for row in rows:
            event = decode(RunStarted.KIND, row.version, row.facts)
            if isinstance(event, RunStarted) and event.trigger == identity:
                return event.session
        return ""

    async def find_obstacle(self, identity: str, trigger: AnyTrigger) -> tuple[SkipReason, str, int | None] | None:
        """Return the reason that prevents a requested run, and its end if known; None if nothing prevents it."""
        switches = await self._store.ask(Query("all_agents", AgentRow))
        switch = next((row for row in switches if row.agent == self._name), None)
        if switch is None or not switch.switched_on:
            return ("off", f"{self._name} is switched off. Run: halter on {self._name}", None)
        row = await find_trigger_row(self._store, identity) or TriggerRow(identity, agent=self._name)
        halt_text = _explain_halt(row, await read_halts(self._store, _list_scopes(row)))
        if halt_text:
            return ("halted", halt_text, None)
        exhausted_cap, _ = await self._money(row, trigger)
        if exhausted_cap is not None:
            return ("cost_cap_reached", exhausted_cap.sentence, exhausted_cap.ends_at)
        unhealthy = await read_trigger_health(self._store, row, switch.at)
        if unhealthy is None or not unhealthy.holds_back(self._clock.now()):
            return None
        return ("no_progress", unhealthy.line, unhealthy.until)

    async def _rows(self) -> Sequence[TriggerRow]:
        return await self._store.ask(Query("triggers_of", TriggerRow, {"agent": self._name}))

    async def settle(self) -> None:
        """Create and end triggers to match the agent's file. Triggers that people confirmed are not changed.

        This is done once per process: another process may have a newer file, and the two would overwrite each other.
        """
        if self._is_settled:
            return
        rows = {row.trigger: row for row in await self._rows()}
        triggers_by_id = {trigger_id(self._name, each.name): each for each in self._context.definition.tasks.triggers()}
        for identity, trigger in triggers_by_id.items():
            row = rows.get(identity)
            if row is None or row.digest != digest_trigger(trigger):
                await self._make(identity, trigger)
        for identity, row in rows.items():
            if identity not in triggers_by_id and row.made_by == FILE_ACTOR:
                await self._store.commit(end_trigger_row(row, FILE_ACTOR, "removed from the agent's file"))
        self._is_settled = True

    async def _make(self, identity: str, trigger: AnyTrigger) -> None:
        row = next(iter(await self._store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
        timing = resolve_timing(trigger, self._clock.now()) if isinstance(trigger, Schedule) else None
        previous_seq = 0 if row is None else row.made_seq
        if row is None and isinstance(trigger, Watch) and not trigger.existing:
            # Indexed before the trigger exists, so that an interrupted start is repeated as a whole.
            await self._index_watch(identity, trigger, ignored=True)
        await self._store.commit(make_trigger(identity, self._name, trigger, FILE_ACTOR, timing, previous_seq))

    async def _check_safely(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        """Check one trigger. A failure is reported and stops no other trigger."""
        subject = f"{row.trigger} failed"
        try:
            moment = await self._check(row, switch, halts)
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as error:  # noqa: BLE001  no failure here may stop another trigger
            raise_if_cancelled()
            sentence = self._context.guard().redact(clean(f"{type(error).__name__}: {error}"))
            self._report_once(subject, f"{shorten(sentence, 300)} Retrying.")
            return None
        self._report_once(subject, "")
        return moment

    async def _check(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        record = await self._read_record(row)
        if record is None:
            self._report_once(
                row.trigger, "Its definition was erased, so it starts no runs. Cancel it, or create it again."
            )
            return None
        trigger = record.trigger()
        match trigger:
            case Schedule() if record.timing is not None:
                return await self._schedule(
                    row, trigger, record.timing, await self._build_conditions(row, trigger, switch, halts)
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

    async def _build_conditions(
        self, row: TriggerRow, trigger: AnyTrigger, switch: AgentRow, halts: Mapping[str, HaltRow]
    ) -> TriggerConditions:
        running = await self._store.ask(Query("open_runs", SessionRow, {"trigger": row.trigger}))
        exhausted_cap, _ = await self._money(row, trigger)
        return TriggerConditions(
            now=self._clock.now(),
            on_since=switch.at,
            halt_reason=_explain_halt(row, halts),
            exhausted_cap=exhausted_cap,
            unhealthy=await read_trigger_health(self._store, row, switch.at),
            running=len(running),
        )

    async def _money(self, row: TriggerRow, trigger: AnyTrigger) -> tuple[CapExhausted | None, int | None]:
        """Return the exhausted cap, if there is one, and the amount that the tightest cap leaves."""
        caps = inherit_trigger_caps(self._context.policy.caps, trigger)
        legs = list_accounts(caps, Spender("", self._name, row.trigger), self._clock.now())
        smallest: int | None = None
        for leg in legs:
            remaining = None if leg.scope.startswith("session:") else await self._find_remaining(leg)
            if remaining is None:
                continue
            cap, unspent = remaining
            exhausted_cap = check_cap_exhausted(
                unspent, cap, f"{leg.scope} {leg.window}".strip(), window_end(leg.window)
            )
            if exhausted_cap is not None:
                return exhausted_cap, 0
            smallest = unspent if smallest is None else min(smallest, unspent)
        return None, smallest

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
        return find_next_schedule_check(schedule, timing, row, conditions.now)

    async def _do(self, row: TriggerRow, schedule: Schedule, act: RunNow | SkipRuns | QueueRun) -> None:
        identity = row.trigger
        match act:
            case RunNow(due_at):
                run = RunStarted(trigger=identity, session="", cause="schedule", due_at=due_at)
                await self._start(row, schedule, run)
            case SkipRuns(reason, due_at, count, sentence):
                event = RunSkipped(trigger=identity, why=reason, due_at=due_at, count=count, sentence=sentence)
                await self._store.commit(record_unstarted_run(f"skip/{due_at}", event))
            case QueueRun(due_at):
                event = RunQueued(trigger=identity, due_at=due_at)
                await self._store.commit(record_unstarted_run(f"queue/{due_at}", event))

    async def _start(
        self, row: TriggerRow, trigger: AnyTrigger, run: RunStarted, item: WatchedDocument | None = None
    ) -> None:
        (row,) = await self._store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
        key, run_input, previous_session = f"tick/{run.due_at}", None, None
        if item is not None:
            # A document that a person retries has no session, like a new one.
            key, previous_session = f"item/{item.item}/{run.attempt}/{item.session}/{row.runs}", item.session
            run_input = RunInput(f"The document is {item.name}.", row.trigger)
        await self._store.commit(await start_run(self._context, row, trigger, run, key, run_input, previous_session))

    async def _watch(self, row: TriggerRow, watch: Watch, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        settles_at = await self._index_watch(row.trigger, watch)
        items = await self._store.ask(Query("items_open", WatchedDocument, {"trigger": row.trigger}))
        if not any(not item.is_done and not item.open for item in items):
            return settles_at
        conditions = await self._build_conditions(row, watch, switch, halts)
        session_halts = await read_halts(self._store, [f"session:{item.session}" for item in items if item.session])
        free_items, delays = _split_halted(items, switch, session_halts)
        decision = decide_watch(
            watch, free_items, conditions, await self._count_affordable(row, watch, conditions.running)
        )
        for act in (*decision.acts, *(delays if not decision.acts else ())):
            await self._act(row, watch, act)
        moments = [
            at
            for at in (settles_at, decision.until, conditions.exhausted_cap and conditions.exhausted_cap.ends_at)
            if at is not None
        ]
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
            case DelayDocuments(reason, waiting, sentence, until):
                if (sentence, until) != (row.delayed, row.delayed_until):
                    event = RunsDelayed(trigger=identity, why=reason, waiting=waiting, sentence=sentence, until=until)
                    await self._store.commit(record_delay(event, self._clock.now()))

    async def _count_affordable(self, row: TriggerRow, watch: Watch, running: int) -> int | None:
        """Estimate how many more sessions the caps can pay, from the mean cost of earlier ones; None if unbounded."""
        _, remaining = await self._money(row, watch)
        params = {"trigger": row.trigger, "since": self._clock.now() - 7 * DAY, "limit": MAX_SAMPLES}
        costs = [cost.usd for cost in await self._store.ask(Query("trigger_costs", _Cost, params)) if cost.usd]
        if remaining is None or not costs:
            return None
        capacity = max(0, remaining * len(costs) // sum(costs) - running)
        # One run may always start: the guard checks its caps for each effect.
        return capacity if running else max(capacity, 1)

    async def _index_watch(self, identity: str, watch: Watch, *, ignored: bool = False) -> int | None:
        """Index the documents of a watch that have stopped changing; return when the next one is stable."""
        path, pattern = self._resolve_collection(watch)
        files = await self._library.files(path, pattern)
        if isinstance(files, UnreadableFile):
            self._report_once(identity, f"{files.sentence} Retrying.")
            return None
        self._report_once(identity, "")
        now, moments, indexed_count = self._clock.now(), list[int](), 0
        for name, entry in sorted(files.items(), key=lambda item: (item[1].modified, item[0])):
            previous, stable_since = self._stable.get((identity, name), (None, 0))
            if previous != entry:
                self._stable[identity, name] = (entry, now)
                stable_since = now
            if not ignored and now - stable_since < watch.debounce:
                moments.append(stable_since + watch.debounce)
            elif previous == entry and stable_since == 0:
                continue
            elif indexed_count == MAX_DOCUMENTS_PER_CHECK and not ignored:
                return now
            elif await self._index_document(identity, self._library.resolve(path) / name, name, entry, ignored=ignored):
                self._stable[identity, name] = (entry, 0)
                indexed_count += 1
        return min(moments, default=None)

    def _resolve_collection(self, watch: Watch) -> tuple[str, str]:
        if watch.collection is not UNSET:
            collection = self._context.definition.tasks.collections[watch.collection]
            return collection.path, collection.pattern
        return ("." if watch.path is UNSET else watch.path), watch.pattern

    async def _index_document(self, identity: str, path: Path, name: str, entry: FileEntry, *, ignored: bool) -> bool:
        """Index one document, once per content; return true if it is indexed now."""
        indexed_file = await self._library.index_file(path, entry, name)
        if not indexed_file.document:
            self._report_once(f"{identity} {to_one_line(name)}", to_one_line(indexed_file.problem))
            return False
        display_name, problem = to_one_line(name), to_one_line(indexed_file.problem)
        await self._store.commit(
            self._record_document(identity, indexed_file.document, display_name, entry, problem, ignored=ignored)
        )
        if problem:
            self._on_quarantine()
        return True

    def _record_document(
        self, identity: str, item: str, name: str, entry: FileEntry, problem: str, *, ignored: bool
    ) -> Write:
        """Return the write that records a new document once; the agent's own outputs are recorded as ignored."""

        def decide(rows: Rows) -> Sequence[Draft]:
            if rows.get(ItemRow, identity, item) is not None:
                return []
            is_own_output = rows.get(OutputRow, self._name, item) is not None
            event = ItemSeen(trigger=identity, item=item, name=name, size=entry.size, ignored=ignored or is_own_output)
            if not problem or event.ignored:
                return [Draft(event)]
            return [
                Draft(event),
                Draft(ItemQuarantined(trigger=identity, item=item, attempts=0, sentence=problem)),
            ]

        rows = [(TriggerRow, identity), (ItemRow, identity, item), (OutputRow, self._name, item)]
        return Write(trigger_stream(identity), f"{identity}/seen/{item}", decide, rows)

    def _report_once(self, subject: str, sentence: str) -> None:
        if self._last_reported.get(subject, "") != sentence:
            self._last_reported[subject] = sentence
            if sentence:
                self._report(self._name, f"{subject}: {sentence}")


def _split_halted(
    items: Sequence[WatchedDocument], switch: AgentRow, halts: Mapping[str, HaltRow]
) -> tuple[Sequence[WatchedDocument], Sequence[DelayDocuments]]:
    """Split off the documents whose own session a person has halted since the agent was switched on."""

    def halt_of(item: WatchedDocument) -> HaltRow | None:
        halt = halts.get(f"session:{item.session}")
        is_excluded = halt is not None and halt.halted and halt.at > switch.at and item.blameless
        return halt if is_excluded else None

    own_halts = [halt for item in items if (halt := halt_of(item)) is not None]
    delays = [DelayDocuments("halted", len(own_halts), _name_halt_author(own_halts[0]))] if own_halts else []
    return [item for item in items if halt_of(item) is None], delays


def _name_halt_author(halt: HaltRow) -> str:
    return f"{halt.scope} was halted by {halt.by}. Run: halter resume {halt.scope}"


def _list_scopes(row: TriggerRow | SessionRow) -> tuple[str, ...]:
    return (f"trigger:{row.trigger}", f"agent:{row.agent}", FLEET)


def _explain_halt(row: TriggerRow, halts: Mapping[str, HaltRow]) -> str:
    for scope in _list_scopes(row):
        halt = halts.get(scope)
        if halt is not None and halt.halted:
            return _name_halt_author(halt)
    return ""


def resolve_timing(schedule: Schedule, now: int) -> Timing:
    """Return the timing of a schedule in a file, which was validated when it was read."""
    zone = "UTC" if schedule.timezone is UNSET else schedule.timezone
    if schedule.cron is not UNSET:
        return Timing(cron=schedule.cron, timezone=zone)
    if schedule.every is not UNSET:
        return Timing(every=schedule.every, timezone=zone, anchor=now)
    at = parse_moment("" if schedule.at is UNSET else schedule.at, zone)
    return Timing(at=at if isinstance(at, int) else None, timezone=zone)


MAX_DELIVERY_LENGTH = 256 * 1024


async def run_now(agent: AgentRuntime, folder: Path, name: str, file: Path | None) -> SessionId:
    """Start a run of a trigger: for a watch with a document, for a webhook with a file as its delivery."""
    store = agent.store
    await AgentTriggers(agent, folder, lambda _, __: None).settle()
    row = await find_trigger_row(store, trigger_id(agent.name, name))
    record = None if row is None or row.ended_at is not None else await read_trigger_record(store, row)
    if row is None or record is None:
        raise ConfigError(f"{agent.name} has no trigger {name}. List its triggers with: halter triggers {agent.name}")
    trigger = record.trigger()
    item, run_input = await _build_run_input(agent, folder, row, trigger, file)
    person = agent.app.settings.person
    run = RunStarted(trigger=row.trigger, session="", cause="person", item=item, by=person)
    write = await start_run(agent, row, trigger, run, f"person/{agent.app.ids.make()}", run_input)
    for stored in (await store.commit(write)).events:
        if isinstance(stored.event, RunStarted):
            return SessionId(stored.event.session)
    raise ConfigError(f"Another run of {name} started at the same moment. See: halter sessions")


async def attend_run_here(agent: AgentRuntime, folder: Path, session: SessionId) -> bool:
    """Run a triggered session in this process until it parks or ends; return false if another process has it."""
    for lease in await agent.store.claim(agent.worker, 1, session):
        await AutonomousAgent(agent, folder).run_session(lease, await read_session_row(agent, session))
        return True
    return False


async def _build_run_input(
    agent: AgentRuntime, folder: Path, row: TriggerRow, trigger: AnyTrigger, file: Path | None
) -> tuple[str, RunInput | None]:
    match trigger:
        case Schedule():
            if file is not None:
                raise ConfigError(f"{trigger.name} is a schedule and takes no file.")
            return "", None
        case Watch():
            if file is None:
                raise ConfigError(f"{trigger.name} is a watch and runs for a document. Name its file.")
            return await _index_ignored_document(agent, folder, row, file), RunInput(
                f"The document is {file.name}.", row.trigger
            )
        case Webhook():
            text = "" if file is None else _read_delivery(file)
            return "", RunInput(text, agent.app.settings.person, "webhook") if text else None


async def _index_ignored_document(agent: AgentRuntime, folder: Path, row: TriggerRow, file: Path) -> str:
    """Index a document as ignored, so that the watch itself starts no run for it."""
    library = agent.library or Library(agent.store, folder)
    path, entry = _stat_document(file)
    indexed_file = await library.index_file(path, entry, file.name)
    if indexed_file.problem or not indexed_file.document:
        raise ConfigError(indexed_file.problem or f"{file} cannot be read.")
    event = ItemSeen(trigger=row.trigger, item=indexed_file.document, name=file.name, size=entry.size, ignored=True)
    await agent.store.commit(record_trigger_events(row.trigger, f"seen/{indexed_file.document}", event))
    return indexed_file.document


def _stat_document(file: Path) -> tuple[Path, FileEntry]:
    try:
        stat = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    return file.resolve(), FileEntry(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _read_delivery(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(MAX_DELIVERY_LENGTH)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
