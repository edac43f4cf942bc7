"""A runaway model, for a day: it cannot take more turns, tokens, money or actions than it may.

Each case is a day in virtual time, of an agent that runs by itself on a store of its own. Its model never yields, calls
without end, sleeps for no time or for a year, or listens to nothing. Afterwards the store is read with plain SQL, and
held against what the world outside has counted.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

import msgspec

from halter.autonomy.hot_state import Awareness, HotState
from halter.autonomy.pace import AutonomousPace, PaceTerms
from halter.core.agent_spec import Autonomy, BrainSpec, Pacing
from halter.core.clock import DAY, HOUR, MINUTE, SECOND, Clock
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.messages import Prompt, Reply, Text, TextListener, ToolCall, bound_prompt_tokens
from halter.core.money import DOLLAR, Cap, Caps
from halter.core.ports import Lease, Store
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName, Price, Usage
from halter.guard.guard import GuardRuntime
from halter.loop.decide import TurnLimits
from halter.loop.loop import TurnLoop
from halter.loop.prompt import LoopSettings
from halter.loop.session_runtime import SessionRuntime
from halter.models.providers import Prices
from halter.redaction.secrets import GivenSecrets
from halter.state.lifecycle import start_session
from halter.tasks.conversation import Conversation
from halter.tasks.task_tools import make_verbs
from halter.testing.world import VIRTUAL_START, SeedLoop
from halter.tools.function_tool import tool
from halter_drills.checker import RecordedEvent, check, found_at
from halter_drills.children import Pipe, children
from halter_drills.drill import Drill, DrillResult, Ground, Setting, connection, in_memory, own_store, result, unseen
from halter_drills.workload import PERSON, policy_of, standing_of

# Models that run away, each in its own way, and the world outside that counts what they do.

NAME: Final = ModelName("scripted", "runaway")
TAKES: Final = SECOND
"""How long an answer takes."""
WRITES: Final = 300
"""How many tokens an answer has, if it may have so many."""
ENDLESS: Final = 1_000_000
READS: Final = 1200
"""How many tokens its prompt is said to have, which is less than it could have."""
YEAR: Final = 365 * 24 * 3600
FLOOD: Final = 60
"""More calls than one step may ask for."""


@dataclass(slots=True)
class Outside:
    """What really happened: when something was sent, and when a model was asked and how many tokens that took."""

    clock: Clock
    sent: list[int] = field(default_factory=list[int])
    asked: list[tuple[int, Usage]] = field(default_factory=list[tuple[int, Usage]])

    def tools(self) -> Mapping[str, Tool]:
        """Make the tools of an agent that floods: one that anybody may use, and one that a person must allow."""
        made = (tool(self.send, level="SAFE"), tool(self.wipe, level="RESTRICTED"))
        return {each.spec.name: each for each in made}

    async def send(self, text: str = "") -> str:
        """Send something."""
        self.sent.append(self.clock.now())
        return f"sent {text}"

    async def wipe(self) -> str:
        """Wipe everything, which nobody ever allows."""
        raise AssertionError("A call ran that nobody had allowed.")


Behaves = Callable[[int, random.Random], Reply]
"""Answers, given how many answers there were, whatever it is told."""


class Runaway:
    """A model that does not listen."""

    base_url: None = None

    def __init__(self, behaviour: str, outside: Outside, chance: random.Random) -> None:
        self.name = NAME
        self._behaves = BEHAVIOURS[behaviour]
        self._writes = WRITES if behaviour not in WORDY else ENDLESS
        self._outside = outside
        self._chance = chance

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: TextListener | None = None) -> Reply:
        permit.use()
        usage = Usage(READS, min(self._writes, prompt.max_output_tokens))
        self._outside.asked.append((self._outside.clock.now(), usage))
        await self._outside.clock.sleep(TAKES)
        reply = self._behaves(len(self._outside.asked), self._chance)
        return msgspec.structs.replace(reply, usage=usage)


def _says(text: str) -> Reply:
    return Reply((Text(text, "model", trusted=False),))


def _calls(*asked: tuple[str, Any]) -> Reply:
    made = (
        ToolCall(f"m{number}", name, given if isinstance(given, str) else msgspec.json.encode(given).decode())
        for number, (name, given) in enumerate(asked)
    )
    return Reply(tuple(made), "calls")


def _yields(mode: str, sleep: float = 0) -> tuple[str, Any]:
    return ("yield", {"mode": mode, "sleep": sleep})


def _deaf(number: int, chance: random.Random) -> Reply:
    """Do one wrong thing after the other, whatever was refused before."""
    sends = [("send", {"text": f"{number}.{each}"}) for each in range(chance.randrange(1, 15))]
    return chance.choice(
        (
            _calls(*sends, _yields("continue")),
            _calls(*sends),
            _calls(*(("send", {"text": f"{number}.{each}"}) for each in range(FLOOD))),
            _calls(("no_such_tool", {}), _yields("continue")),
            _calls(("send", '{"text": '), _yields("continue")),
            _calls(("wipe", {}), _yields("continue")),
            _calls(("yield", {"mode": "for ever"})),
            _calls(("yield", {"mode": "sleep", "sleep": -5})),
            _calls(("yield", {"mode": "sleep", "sleep": 1, "wake_early_if": ["everything"]})),
            _calls(_yields("sleep", 0)),
            _says("I am shutting down now. yield(mode='shutdown')"),
            Reply(()),
        )
    )


BEHAVIOURS: Final[Mapping[str, Behaves]] = {
    "never yields": lambda number, _: _says(f"I am on it, number {number}."),
    "makes the same call again and again": lambda _, __: _calls(("send", {"text": "again"})),
    "makes one call after the other": lambda number, _: _calls(("send", {"text": f"{number}"})),
    "acts and goes on at once": lambda number, _: _calls(
        *(("send", {"text": f"{number}.{each}"}) for each in range(3)), _yields("continue")
    ),
    "sleeps for no time": lambda _, __: _calls(_yields("sleep", 0)),
    "sleeps for a year": lambda _, __: _calls(_yields("sleep", YEAR)),
    "does not listen": _deaf,
}
"""Every way to run away, by what it is called in a sentence."""

WORDY: Final = frozenset(("acts and goes on at once",))
"""Those that write as much as they may."""


# What a runaway model must not pass: checked by plain SQL and by what the world outside has counted.


class Promised(msgspec.Struct, frozen=True):
    """The limits of a flood; caps in micro-dollars, a price in micro-dollars for each token."""

    limits: Autonomy
    session_cap: int
    day_cap: int
    price: float


class SessionRemains(msgspec.Struct, frozen=True):
    """What a flood has left behind: its session's events and row, and what was spent by it."""

    events: Sequence[RecordedEvent]
    state: str
    wake_at: int | None
    over: bool
    spent: int
    spent_in_a_day: int


def passed(promised: Promised, left: SessionRemains, outside: Outside) -> Iterator[str]:
    limits = promised.limits
    yield from too_many_turns(left.events, limits)
    yield from too_many_tokens(outside, limits.token_budget_per_hour)
    yield from too_much_money(promised, left, outside)
    yield from too_many_actions(outside.sent, limits.max_actions_per_minute)
    yield from wrong_sleeps(left.events, limits)
    yield from not_at_rest(left, outside.clock.now())


def too_many_turns(events: Sequence[RecordedEvent], limits: Autonomy) -> Iterator[str]:
    """Check that in no hour there were more turns than it may take without a sleep."""
    began = [event.at for event in events if event.kind == "turn_started"]
    most = most_within(began, HOUR)
    if most > limits.max_consecutive_turns:
        yield f"took {most} turns within an hour, and may take {limits.max_consecutive_turns} without a sleep."


def too_many_tokens(outside: Outside, budget: int) -> Iterator[str]:
    """Check hour by hour how many tokens the model was really asked for."""
    used: Counter[int] = Counter()
    for at, usage in outside.asked:
        used[at // HOUR] += usage.input_tokens + usage.output_tokens
    for hour, tokens in used.items():
        if tokens > budget:
            yield f"used {tokens} tokens in hour {hour}, and may use {budget}."


def too_much_money(promised: Promised, left: SessionRemains, outside: Outside) -> Iterator[str]:
    """Check what was spent against the caps, and against what the model really asked for."""
    if left.spent > promised.session_cap:
        yield f"spent {left.spent} of {promised.session_cap} micro-dollars."
    if left.spent_in_a_day > promised.day_cap:
        yield f"spent {left.spent_in_a_day} in a day, of {promised.day_cap} micro-dollars."
    yield from wrong_charges(promised.price, left.events, outside)


def wrong_charges(price: float, events: Sequence[RecordedEvent], outside: Outside) -> Iterator[str]:
    """Check what each answer was charged against what its model really used, rounded up to a micro-dollar."""
    requests = [event.facts["request"] for event in events if event.kind == "request_started"]
    used = dict(zip(requests, (usage for _, usage in outside.asked), strict=False))
    for event in events:
        facts = event.facts
        if event.kind == "request_settled" and facts["outcome"] == "ok":
            usage = used[facts["request"]]
            bill, charged = (usage.input_tokens + usage.output_tokens) * price, facts["charge"].get("usd", 0)
            if not bill <= charged < bill + 1:
                yield f"was charged {charged} micro-dollars for {facts['request']}, which cost {bill:g}."


def too_many_actions(sent: Sequence[int], most: int) -> Iterator[str]:
    """Check that in no minute more was really done than may be."""
    found = most_within(sent, MINUTE)
    if found > most:
        yield f"acted {found} times within a minute, and may do so {most} times."


def wrong_sleeps(events: Sequence[RecordedEvent], limits: Autonomy) -> Iterator[str]:
    """Check every sleep between turns; one in the middle of a turn, for money or a person, has its own end."""
    wrong = [slept for slept in _sleeps(events) if not limits.min_sleep <= slept <= limits.max_sleep]
    if wrong:
        shown = f"{min(wrong) / SECOND:g} to {max(wrong) / SECOND:g} s"
        yield f"was let sleep for too short or too long a time {len(wrong)} times: {shown}."


def _sleeps(events: Sequence[RecordedEvent]) -> Iterator[int]:
    in_turn = False
    for event in events:
        match event.kind:
            case "turn_started" | "turn_ended":
                in_turn = event.kind == "turn_started"
            case "session_parked" if not in_turn and event.facts["state"] == "SLEEPING":
                yield event.facts["wake_at"] - event.at
            case _:
                pass


def not_at_rest(left: SessionRemains, now: int) -> Iterator[str]:
    """Check that it is over, with its reason, or waits for a moment that is to come."""
    ends = [event.facts for event in left.events if event.kind == "session_ended"]
    if left.over and not (len(ends) == 1 and ends[0]["terminal_reason"]):
        yield "is over, and nobody knows why."
    if not left.over and (left.wake_at is None or left.wake_at < now):
        yield f"is {left.state} at the end of the day, and nothing will wake it."


def most_within(moments: Sequence[int], span: int) -> int:
    """Tell how many of these moments, which are in order, lie within one span of time at most."""
    first = most = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - span:
            first += 1
        most = max(most, last - first + 1)
    return most


SESSION: Final = SessionId("flood-1")
WORKER: Final = WorkerId("flood")
WINDOW: Final = 20_000
SESSION_CAP: Final = DOLLAR
DAY_CAP: Final = DOLLAR // 2
PRICES: Final = ("0.2", "10")
"""Dollars for a million tokens: cheap enough to go on all day, and dear enough to come to a cap."""

LIMITS: Final = Autonomy(enabled=True)
NONE: Final = Autonomy(
    enabled=True,
    min_sleep=0,
    max_sleep=10_000 * DAY,
    max_consecutive_turns=1_000_000,
    token_budget_per_hour=0,
    max_actions_per_minute=0,
    idle_timeout=0,
)
"""What holds with teeth: nothing."""
SHORT: Final = 10 * MINUTE
"""With teeth a day would have no end."""

EXPECTED: Final = {
    "never yields": "idle_timeout",
    "makes one call after the other": "max_actions_per_minute",
    "acts and goes on at once": "token_budget_per_hour",
    "sleeps for no time": "max_consecutive_turns",
}
"""The guardrail that each must have come to, if it costs little enough; others come to an end by themselves."""


class FloodCase(msgspec.Struct, frozen=True):
    """One runaway: how it behaves, what its tokens cost, and the seed of its chance."""

    behaviour: str
    price: str
    seed: int
    teeth: bool

    def __str__(self) -> str:
        return f"Number {self.seed}, a model that {self.behaviour}, at ${self.price} a million tokens,"

    @property
    def promised(self) -> Promised:
        return Promised(LIMITS, SESSION_CAP, DAY_CAP, float(self.price))


def cases(seeds: int | None, *, teeth: bool) -> list[FloodCase]:
    """List every behaviour at every price, or as many as are wanted, each with a number of its own."""
    every = [(behaviour, price) for price in PRICES for behaviour in BEHAVIOURS]
    wanted = len(every) if seeds is None else seeds
    return [FloodCase(*every[number % len(every)], number, teeth) for number in range(wanted)]


class FloodAgent:
    """An agent whose model runs away, as any process would run it."""

    def __init__(self, case: FloodCase, store: Store, clock: SeedLoop) -> None:
        self._store = store
        self._clock = clock
        self._limits = NONE if case.teeth else LIMITS
        self._chance = random.Random(case.seed)
        self.outside = Outside(clock)
        self._model = Runaway(case.behaviour, self.outside, self._chance)
        caps = Caps(session=Cap(SESSION_CAP), agent=(Cap(DAY_CAP, "day"),), fleet=())
        self._policy = msgspec.structs.replace(policy_of("flood"), caps=caps)
        price = Price(Decimal(case.price), Decimal(case.price))
        prices = Prices({str(NAME): price})
        self._doors = GuardRuntime(store, clock, redact=str, secrets=GivenSecrets({}), prices=prices)

    async def live(self, lease: Lease) -> None:
        """Give the session its turns until it is over, and let it sleep between them in the same hands."""
        verbs_of = {verb.spec.name: verb for verb in make_verbs(self._store, SESSION, "autonomous")}
        tools = {**self.outside.tools(), **verbs_of}
        hourly = self._limits.token_budget_per_hour or None
        standing = msgspec.structs.replace(standing_of(SESSION, self._policy), tokens_per_hour=hourly)
        running = SessionRuntime(self._store, self._clock, self._doors, lease, standing, tools)
        thinking = LoopSettings(
            mind=BrainSpec(model=str(NAME), instructions="Watch."),
            rules=self._rules(),
            models=(self._model,),
            offered=tuple(each.spec for each in tools.values()),
            window=WINDOW,
        )
        aware = Awareness(HotState({}), self._clock)
        loop = TurnLoop(running, self._clock, thinking, self._chance, aware.senses())
        pace = AutonomousPace(running, loop, self._clock, PaceTerms(pacing=Pacing(autonomy=self._limits)), aware)
        conversation = Conversation(running, loop, self._clock, pace, resident=True)
        while not (came := await conversation.attend()).over:
            await running.until_woken(came.wake_at)

    def _rules(self) -> TurnLimits:
        return TurnLimits(
            kind="autonomous",
            on_cap="stop",
            min_sleep=self._limits.min_sleep,
            max_sleep=self._limits.max_sleep,
            max_actions_per_minute=self._limits.max_actions_per_minute,
        )


async def lived(agent: FloodAgent, store: Store, span: int) -> None:
    event = SessionStarted(session=SESSION, agent="flood", kind="autonomous", started_by=PERSON)
    await store.commit(start_session(event))
    (lease,) = await store.claim(WORKER, 1, SESSION)
    with suppress(TimeoutError):
        async with asyncio.timeout(span / SECOND):
            await agent.live(lease)


def flooded(ground: Ground, case: FloodCase) -> tuple[list[str], Counter[str]]:
    """Let one model run away for a day, and say what it passed."""
    ground.fresh()
    clock = SeedLoop(case.seed, VIRTUAL_START)
    span = SHORT if case.teeth else DAY
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        store = ground.open(clock=clock, lease=2 * DAY, inline=True)
        agent = FloodAgent(case, store, clock)
        runner.run(lived(agent, store, span))
        runner.run(store.close())
        found = found_at(ground.url)
        wrong = list(passed(case.promised, left(ground), agent.outside))
        outside = agent.outside
    wrong += [] if case.teeth else unguarded(case, [event.facts for event in found.events if event.kind == GUARDRAIL])
    books = check(found, finished=False)
    counts = Counter(event.kind for event in found.events if event.kind in COUNTED)
    counts["actions"] = len(outside.sent)
    return [f"{case} {what}" for what in wrong] + books, counts


GUARDRAIL: Final = "guardrail_triggered"
COUNTED: Final = ("turn_started", "request_started", "call_started", "call_refused", GUARDRAIL, "session_ended")


def unguarded(case: FloodCase, triggered: Sequence[dict[str, str]]) -> Iterator[str]:
    """Check that what held a cheap model back is in the journal; a dear one may have come to its cap before."""
    expected = EXPECTED.get(case.behaviour)
    names = {facts["guardrail"] for facts in triggered}
    if expected is not None and case.price == PRICES[0] and expected not in names:
        yield f"was held back by {', '.join(sorted(names)) or 'nothing'}, and not by {expected}."


def left(ground: Ground) -> SessionRemains:
    stream = session_stream(SESSION)
    with closing(connection(ground.url)) as database:
        (row,) = database.execute("SELECT state, wake_at, ended_at FROM sessions").fetchall()
        days = database.execute("SELECT at, usd FROM spends").fetchall()
    by_day: Counter[int] = Counter()
    for at, usd in days:
        by_day[at // DAY] += usd
    events = [event for event in found_at(ground.url).events if event.stream == stream]
    return SessionRemains(events, row[0], row[1], row[2] is not None, by_day.total(), max(by_day.values(), default=0))


def run(setting: Setting) -> DrillResult:
    planned = cases(setting.seeds, teeth=setting.teeth)
    setting = in_memory(setting)
    violations: list[str] = []
    counts: Counter[str] = Counter()
    done = 0
    with children(__name__) as started:
        lanes = os.cpu_count() or 1
        for first in range(min(lanes, len(planned))):
            started.start(_lane, replace(setting, progress=unseen), planned[first::lanes])
        for _, (wrong, counted) in started.words():
            violations += wrong
            counts += counted
            done += 1
            setting.progress(done, len(planned), f"{counts['turn_started']} turns, {counts[GUARDRAIL]} held back")
    return result(DRILL.name, "sqlite", len(planned), violations, {"behaviours": len(BEHAVIOURS), **counts})


def _lane(pipe: Pipe, setting: Setting, planned: Sequence[FloodCase]) -> None:
    with own_store(setting) as ground:
        for case in planned:
            pipe.send(flooded(ground, case))


DRILL: Final = Drill(
    "flood",
    "A runaway model is held back: it takes no more turns, tokens, money and actions than it may.",
    run,
    stores=("sqlite",),  # PostgreSQL keeps its own time, and a day there takes a day.
)
