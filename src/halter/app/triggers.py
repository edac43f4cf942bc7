"""The triggers of one agent, looked after: what its file says comes to be, and what is due is started."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET

from halter.app import runs
from halter.app.agent_context import AgentContext
from halter.app.runs import FROM_FILE, Given
from halter.app.shelves import Library
from halter.app.triggered import Made, read_made
from halter.autonomy.hours import hours_of
from halter.autonomy.triggers import (
    Around,
    Delay,
    Empty,
    Item,
    Quarantine,
    Queue,
    Run,
    Skip,
    Start,
    empty_of,
    schedule_next,
    schedule_now,
    watch_now,
)
from halter.brain.together import demand_wanted
from halter.core.clock import DAY
from halter.core.codec import decode
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import ItemQuarantined, ItemSeen, RunQueued, RunsDelayed, RunSkipped, RunStarted
from halter.core.folders import Seen
from halter.core.ids import trigger_stream
from halter.core.library import Unreadable
from halter.core.limits import Spender, accounts
from halter.core.money import SAMPLES_KEPT, BudgetRow, Leg
from halter.core.ports import Draft, Query, Rows, Write
from halter.core.rows import AgentRow, HaltRow, SessionRow
from halter.core.schedules import Timing, parse_at
from halter.core.task_rows import ItemRow, OutputRow, TriggerRow
from halter.core.tasks import AnyTrigger, Schedule, Watch, caps_of, trigger_id
from halter.core.text import clean, one_line, shorten
from halter.core.triggered import SkipReason
from halter.core.windows import window_end

Tell = Callable[[str, str], None]

TOGETHER: Final = 20
"""So many documents are taken in at one look: who has thousands of them holds up no other trigger."""


class _Cost(msgspec.Struct, frozen=True):
    usd: int


class _Run(msgspec.Struct, frozen=True):
    version: int
    facts: bytes


class Triggers:
    """Looks after the triggers of one agent."""

    def __init__(
        self, speaking: AgentContext, folder: Path, tell: Tell, left: Callable[[], None] = lambda: None
    ) -> None:
        """`left` is told when something is left to people."""
        self._speaking = speaking
        self._store = speaking.store
        self._clock = speaking.app.clock
        self._name = speaking.agent.policy.name
        self._library = speaking.agent.library or Library(speaking.store, folder)
        self._tell = tell
        self._left_to_people = left
        self._made: dict[tuple[str, int], Made | None] = {}
        self._stable: dict[tuple[str, str], tuple[Seen, int]] = {}
        self._told: dict[str, str] = {}
        self._settled = False

    @property
    def watches(self) -> bool:
        """Tell whether folders have to be looked through."""
        return bool(self._speaking.agent.tasks.watches)

    def halted(self, row: SessionRow, halts: Mapping[str, HaltRow]) -> bool:
        """Tell whether a session is halted, be it with its trigger, its agent or all."""
        scopes = (f"session:{row.session}", f"trigger:{row.trigger}", f"agent:{row.agent}", "fleet")
        return any(scope in halts and halts[scope].halted for scope in scopes)

    async def look(self, switch: AgentRow | None, halts: Mapping[str, HaltRow]) -> int | None:
        """Do what is to be done now; tell when to look again, if time decides that."""
        await self.settle()
        if switch is None or not switch.switched_on:
            return None
        moments = [await self._unharmed(row, switch, halts) for row in await self._rows()]
        return min((moment for moment in moments if moment is not None), default=None)

    async def delivered(self, identity: str, key: str) -> str:
        """Find the session that a delivery started before; none, if it is new."""
        found = await self._store.ask(Query("run_by_key", _Run, {"key": key}))
        for row in found:
            event = decode(RunStarted.KIND, row.version, row.facts)
            if isinstance(event, RunStarted) and event.trigger == identity:
                return event.session
        return ""

    async def against(self, identity: str, trigger: AnyTrigger) -> tuple[SkipReason, str, int | None] | None:
        """Tell what stands against a run that somebody asks for, and until when."""
        switches = await self._store.ask(Query("all_agents", AgentRow))
        switch = next((row for row in switches if row.agent == self._name), None)
        if switch is None or not switch.switched_on:
            return ("off", f"{self._name} is switched off: halter on {self._name}", None)
        halts = {row.scope: row for row in await self._store.ask(Query("all_halts", HaltRow))}
        row = TriggerRow(identity, agent=self._name)
        halted = _halted(row, halts)
        if halted:
            return ("halted", halted, None)
        empty, _ = await self._money(row, trigger)
        return None if empty is None else ("cost_cap_reached", empty.sentence, empty.until)

    async def _rows(self) -> Sequence[TriggerRow]:
        return await self._store.ask(Query("triggers_of", TriggerRow, {"agent": self._name}))

    async def settle(self) -> None:
        """Let the triggers be those that the agent's file names, beside those that people confirmed.

        That is done once: another process may have read a newer file since, and then both would change them for ever.
        """
        if self._settled:
            return
        rows = {row.trigger: row for row in await self._rows()}
        named = {trigger_id(self._name, each.name): each for each in self._speaking.agent.tasks.triggers()}
        for identity, trigger in named.items():
            row = rows.get(identity)
            if row is None or row.digest != runs.digest_of(trigger):
                await self._make(identity, trigger)
        for identity, row in rows.items():
            if identity not in named and row.made_by == FROM_FILE:
                await self._store.commit(runs.end(row, FROM_FILE, "it stands in the agent's file no longer"))
        self._settled = True

    async def _make(self, identity: str, trigger: AnyTrigger) -> None:
        row = next(iter(await self._store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
        timing = timing_of(trigger, self._clock.now()) if isinstance(trigger, Schedule) else None
        before = 0 if row is None else row.made_seq
        if row is None and isinstance(trigger, Watch) and not trigger.existing:
            # First, so that a start that is cut short is made anew as a whole.
            await self._see(identity, trigger, ignored=True)
        await self._store.commit(runs.make(identity, self._name, trigger, FROM_FILE, timing, before))

    async def _unharmed(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        """Look at one trigger; what breaks down over it is told, and stops no other one."""
        about = f"{row.trigger} breaks down"
        try:
            moment = await self._look_at(row, switch, halts)
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, no other trigger may suffer from it
            demand_wanted()
            told = self._speaking.gatehouse().redacted(clean(f"{type(error).__name__}: {error}"))
            self._say(about, f"{shorten(told, 300)} It is tried again.")
            return None
        self._say(about, "")
        return moment

    async def _look_at(self, row: TriggerRow, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        made = await self._read(row)
        if made is None:
            self._say(row.trigger, "What was said of it was erased, so it starts nothing: cancel it, or make it anew.")
            return None
        trigger = made.trigger()
        match trigger:
            case Schedule() if made.timing is not None:
                return await self._schedule(row, trigger, made.timing, await self._around(row, trigger, switch, halts))
            case Watch():
                return await self._watch(row, trigger, switch, halts)
            case _:
                return None

    async def _read(self, row: TriggerRow) -> Made | None:
        key = (row.trigger, row.made_seq)
        if key not in self._made:
            self._made[key] = await read_made(self._store, row)
        return self._made[key]

    async def _around(
        self, row: TriggerRow, trigger: AnyTrigger, switch: AgentRow, halts: Mapping[str, HaltRow]
    ) -> Around:
        running = await self._store.ask(Query("open_runs", SessionRow, {"trigger": row.trigger}))
        empty, _ = await self._money(row, trigger)
        return Around(
            now=self._clock.now(),
            on_since=switch.at,
            halted=_halted(row, halts),
            empty=empty,
            running=len(running),
        )

    async def _money(self, row: TriggerRow, trigger: AnyTrigger) -> tuple[Empty | None, int | None]:
        """Tell which cap leaves nothing to begin with, if one does; and what the tightest one leaves."""
        caps = caps_of(self._speaking.agent.policy.caps, trigger)
        legs = accounts(caps, Spender("", self._name, row.trigger), self._clock.now())
        least: int | None = None
        for leg in legs:
            left = None if leg.scope.startswith("session:") else await self._left(leg)
            if left is None:
                continue
            cap, unspent = left
            empty = empty_of(unspent, cap, f"{leg.scope} {leg.window}".strip(), window_end(leg.window))
            if empty is not None:
                return empty, 0
            least = unspent if least is None else min(least, unspent)
        return None, least

    async def _left(self, leg: Leg) -> tuple[int, int] | None:
        params = {"scope": leg.scope, "window": leg.window, "unit": "usd"}
        found = next(iter(await self._store.ask(Query("budget", BudgetRow, params))), None)
        row = found or BudgetRow(leg.scope, leg.window, "usd")
        cap = row.binding(leg.cap)
        return None if cap is None else (cap, cap - row.spent - row.held)

    async def _schedule(self, row: TriggerRow, schedule: Schedule, timing: Timing, around: Around) -> int | None:
        hours = None if schedule.active_hours is UNSET else hours_of(schedule.active_hours)
        for act in schedule_now(schedule, timing, row, around, hours):
            await self._do(row, schedule, act)
        (row,) = await self._store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
        return schedule_next(schedule, timing, row, around.now)

    async def _do(self, row: TriggerRow, schedule: Schedule, act: Run | Skip | Queue) -> None:
        identity = row.trigger
        match act:
            case Run(due_at):
                run = RunStarted(trigger=identity, session="", cause="schedule", due_at=due_at)
                await self._start(row, schedule, run)
            case Skip(why, due_at, count, sentence):
                event = RunSkipped(trigger=identity, why=why, due_at=due_at, count=count, sentence=sentence)
                await self._store.commit(runs.pass_by(f"skip/{due_at}", event))
            case Queue(due_at):
                event = RunQueued(trigger=identity, due_at=due_at)
                await self._store.commit(runs.pass_by(f"queue/{due_at}", event))

    async def _start(self, row: TriggerRow, trigger: AnyTrigger, run: RunStarted, item: Item | None = None) -> None:
        (row,) = await self._store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
        key, given, before = f"tick/{run.due_at}", None, None
        if item is not None:
            # A document that a person lets be tried anew has no session, as at its very beginning.
            key, before = f"item/{item.item}/{run.attempt}/{item.session}/{row.runs}", item.session
            given = Given(f"The document is {item.name}.", row.trigger)
        await self._store.commit(await runs.start(self._speaking, row, trigger, run, key, given, before))

    async def _watch(self, row: TriggerRow, watch: Watch, switch: AgentRow, halts: Mapping[str, HaltRow]) -> int | None:
        settles = await self._see(row.trigger, watch)
        items = await self._store.ask(Query("items_open", Item, {"trigger": row.trigger}))
        if not any(not item.done and not item.open for item in items):
            return settles
        around = await self._around(row, watch, switch, halts)
        free, stopped = _stopped(items, switch, halts)
        found = watch_now(watch, free, around, await self._room(row, watch, around.running))
        for act in (*found.acts, *(stopped if not found.acts else ())):
            await self._act(row, watch, act)
        moments = [at for at in (settles, found.until, around.empty and around.empty.until) if at is not None]
        return min(moments, default=None)

    async def _act(self, row: TriggerRow, watch: Watch, act: Start | Quarantine | Delay) -> None:
        identity = row.trigger
        match act:
            case Start(item, attempt):
                run = RunStarted(trigger=identity, session="", cause="watch", item=item.item, attempt=attempt)
                await self._start(row, watch, run, item)
            case Quarantine(item, sentence):
                event = ItemQuarantined(trigger=identity, item=item.item, attempts=item.attempts, sentence=sentence)
                await self._store.commit(runs.tell(identity, f"quarantine/{item.item}/{item.session}", event))
                self._left_to_people()
            case Delay(why, waiting, sentence, until):
                if (sentence, until) != (row.delayed, row.delayed_until):
                    event = RunsDelayed(trigger=identity, why=why, waiting=waiting, sentence=sentence, until=until)
                    await self._store.commit(runs.delay(event, self._clock.now()))

    async def _room(self, row: TriggerRow, watch: Watch, running: int) -> int | None:
        """Tell for how many sessions money is left, going by what they have cost so far."""
        _, left = await self._money(row, watch)
        params = {"trigger": row.trigger, "since": self._clock.now() - 7 * DAY, "limit": SAMPLES_KEPT}
        costs = [cost.usd for cost in await self._store.ask(Query("trigger_costs", _Cost, params)) if cost.usd]
        if left is None or not costs:
            return None
        room = max(0, left * len(costs) // sum(costs) - running)
        # Who has nothing at work may always begin one: what it costs is held to the cent when it acts.
        return room if running else max(room, 1)

    async def _see(self, identity: str, watch: Watch, *, ignored: bool = False) -> int | None:
        """Take in the documents of a watch that have come to rest; tell when another one will have."""
        path, pattern = self._place(watch)
        files = await self._library.files(path, pattern)
        if isinstance(files, Unreadable):
            self._say(identity, f"{files.sentence} It is looked for again and again.")
            return None
        self._say(identity, "")
        now, moments, taken = self._clock.now(), list[int](), 0
        for name, seen in sorted(files.items(), key=lambda found: (found[1].modified, found[0])):
            before, since = self._stable.get((identity, name), (None, 0))
            if before != seen:
                self._stable[identity, name] = (seen, now)
                since = now
            if not ignored and now - since < watch.debounce:
                moments.append(since + watch.debounce)
            elif before == seen and since == 0:
                continue
            elif taken == TOGETHER and not ignored:
                return now
            elif await self._take(identity, self._library.place(path) / name, name, seen, ignored=ignored):
                self._stable[identity, name] = (seen, 0)
                taken += 1
        return min(moments, default=None)

    def _place(self, watch: Watch) -> tuple[str, str]:
        if watch.collection is not UNSET:
            collection = self._speaking.agent.tasks.collections[watch.collection]
            return collection.path, collection.pattern
        return ("." if watch.path is UNSET else watch.path), watch.pattern

    async def _take(self, identity: str, path: Path, name: str, seen: Seen, *, ignored: bool) -> bool:
        """Take one document in, once for each content; tell whether it is known now."""
        known = await self._library.take(path, seen, name)
        if not known.document:
            self._say(f"{identity} {one_line(name)}", one_line(known.problem))
            return False
        shown, problem = one_line(name), one_line(known.problem)
        await self._store.commit(self._seen(identity, known.document, shown, seen, problem, ignored=ignored))
        if problem:
            self._left_to_people()
        return True

    def _seen(self, identity: str, item: str, name: str, seen: Seen, problem: str, *, ignored: bool) -> Write:
        """Write down that a document was found; not one that the agent wrote itself, and none twice."""

        def decide(rows: Rows) -> Sequence[Draft]:
            if rows.get(ItemRow, identity, item) is not None:
                return []
            own = rows.get(OutputRow, self._name, item) is not None
            event = ItemSeen(trigger=identity, item=item, name=name, size=seen.size, ignored=ignored or own)
            if not problem or event.ignored:
                return [Draft(event)]
            return [
                Draft(event),
                Draft(ItemQuarantined(trigger=identity, item=item, attempts=0, sentence=problem)),
            ]

        rows = [(TriggerRow, (identity,)), (ItemRow, (identity, item)), (OutputRow, (self._name, item))]
        return Write(trigger_stream(identity), f"{identity}/seen/{item}", decide, rows)

    def _say(self, about: str, sentence: str) -> None:
        if self._told.get(about, "") != sentence:
            self._told[about] = sentence
            if sentence:
                self._tell(self._name, f"{about}: {sentence}")


def _stopped(
    items: Sequence[Item], switch: AgentRow, halts: Mapping[str, HaltRow]
) -> tuple[Sequence[Item], Sequence[Delay]]:
    """Part from the others the documents whose own session a person halted since the agent was switched on."""

    def halt_of(item: Item) -> HaltRow | None:
        halt = halts.get(f"session:{item.session}")
        ours = halt is not None and halt.halted and halt.at > switch.at and item.blameless
        return halt if ours else None

    held = [halt for item in items if (halt := halt_of(item)) is not None]
    delays = [Delay("halted", len(held), _who(held[0]))] if held else []
    return [item for item in items if halt_of(item) is None], delays


def _who(halt: HaltRow) -> str:
    return f"{halt.scope} was halted by {halt.by}: halter resume {halt.scope}"


def _halted(row: TriggerRow, halts: Mapping[str, HaltRow]) -> str:
    for scope in (f"trigger:{row.trigger}", f"agent:{row.agent}", "fleet"):
        halt = halts.get(scope)
        if halt is not None and halt.halted:
            return _who(halt)
    return ""


def timing_of(schedule: Schedule, now: int) -> Timing:
    """Tell when a schedule of a file fires. What it says was checked when the file was read."""
    zone = "UTC" if schedule.timezone is UNSET else schedule.timezone
    if schedule.cron is not UNSET:
        return Timing(cron=schedule.cron, timezone=zone)
    if schedule.every is not UNSET:
        return Timing(every=schedule.every, timezone=zone, anchor=now)
    at = parse_at("" if schedule.at is UNSET else schedule.at, zone)
    return Timing(at=at if isinstance(at, int) else None, timezone=zone)
