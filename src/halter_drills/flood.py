"""A runaway model, for a day: it cannot take more turns, tokens, money or actions than it may.

Each case is a day in virtual time, of an agent that runs by itself on a store of its own. Its model never yields, calls
without end, sleeps for no time or for a year, or listens to nothing. Afterwards the store is read with plain SQL, and
held against what the world outside has counted.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final

import msgspec

from halter.autonomy.awareness import Awareness
from halter.autonomy.hotstate import HotState
from halter.autonomy.pace import Paced, Terms
from halter.brain.decide import Rules
from halter.brain.loop import Loop
from halter.brain.session_runtime import SessionRuntime
from halter.brain.window import Thinking
from halter.core.clock import DAY, MINUTE, SECOND
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.limits import Cap, Caps
from halter.core.mind import Mind
from halter.core.money import DOLLAR
from halter.core.pacing import Autonomy, Pacing
from halter.core.ports import Lease, Store
from halter.core.usage import Price
from halter.guard.gatehouse import Gatehouse
from halter.guard.secrets import GivenSecrets
from halter.models.prices import Prices
from halter.state.life import start
from halter.testing.seedloop import START, SeedLoop
from halter.work.conversation import Conversation
from halter.work.verbs import verbs
from halter_drills.agents import PERSON, policy_of, standing_of
from halter_drills.checker import check, found_at
from halter_drills.children import Pipe, children
from halter_drills.drill import Drill, Ground, Result, Setting, connection, own_store, result, unseen
from halter_drills.examine import in_memory
from halter_drills.flood_bounds import Left, Promised, passed
from halter_drills.runaways import BEHAVIOURS, NAME, Outside, Runaway

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


@dataclass(frozen=True, slots=True)
class Case:
    """One runaway: how it behaves, what its tokens cost, and the seed of its chance."""

    behaviour: str
    price: str
    seed: int
    teeth: bool

    def __str__(self) -> str:
        return f"Number {self.seed}, a model that {self.behaviour}, at ${self.price} a million tokens,"

    @property
    def promised(self) -> Promised:
        """What holds for it."""
        return Promised(LIMITS, SESSION_CAP, DAY_CAP, float(self.price))


def cases(seeds: int | None, *, teeth: bool) -> list[Case]:
    """List every behaviour at every price, or as many as are wanted, each with a number of its own."""
    every = [(behaviour, price) for price in PRICES for behaviour in BEHAVIOURS]
    wanted = len(every) if seeds is None else seeds
    return [Case(*every[number % len(every)], number, teeth) for number in range(wanted)]


class Agent:
    """An agent whose model runs away, as any process would run it."""

    def __init__(self, case: Case, store: Store, clock: SeedLoop) -> None:
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
        self._doors = Gatehouse(store, clock, redact=str, secrets=GivenSecrets({}), prices=prices)

    async def live(self, lease: Lease) -> None:
        """Give the session its turns until it is over, and let it sleep between them in the same hands."""
        verbs_of = {verb.spec.name: verb for verb in verbs(self._store, SESSION, "autonomous")}
        tools = {**self.outside.tools(), **verbs_of}
        hourly = self._limits.token_budget_per_hour or None
        standing = msgspec.structs.replace(standing_of(SESSION, self._policy), tokens_per_hour=hourly)
        running = SessionRuntime(self._store, self._clock, self._doors, lease, standing, tools)
        thinking = Thinking(
            mind=Mind(model=str(NAME), instructions="Watch."),
            rules=self._rules(),
            models=(self._model,),
            offered=tuple(each.spec for each in tools.values()),
            window=WINDOW,
        )
        aware = Awareness(HotState({}), self._clock)
        loop = Loop(running, self._clock, thinking, self._chance, aware.senses())
        pace = Paced(running, loop, self._clock, Terms(pacing=Pacing(autonomy=self._limits)), aware)
        conversation = Conversation(running, loop, self._clock, pace, resident=True)
        while not (came := await conversation.attend()).over:
            await running.until_woken(came.wake_at)

    def _rules(self) -> Rules:
        return Rules(
            kind="autonomous",
            on_cap="stop",
            min_sleep=self._limits.min_sleep,
            max_sleep=self._limits.max_sleep,
            max_actions_per_minute=self._limits.max_actions_per_minute,
        )


async def lived(agent: Agent, store: Store, span: int) -> None:
    """Let the session live for so long, or until it is over."""
    event = SessionStarted(session=SESSION, agent="flood", kind="autonomous", started_by=PERSON)
    await store.commit(start(event))
    (lease,) = await store.claim(WORKER, 1, SESSION)
    with suppress(TimeoutError):
        async with asyncio.timeout(span / SECOND):
            await agent.live(lease)


def flooded(ground: Ground, case: Case) -> tuple[list[str], Counter[str]]:
    """Let one model run away for a day, and say what it passed."""
    ground.fresh()
    clock = SeedLoop(case.seed, START)
    span = SHORT if case.teeth else DAY
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        store = ground.open(clock=clock, lease=2 * DAY, inline=True)
        agent = Agent(case, store, clock)
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


def unguarded(case: Case, triggered: Sequence[dict[str, str]]) -> Iterator[str]:
    """Check that what held a cheap model back is in the journal; a dear one may have come to its cap before."""
    expected = EXPECTED.get(case.behaviour)
    names = {facts["guardrail"] for facts in triggered}
    if expected is not None and case.price == PRICES[0] and expected not in names:
        yield f"was held back by {', '.join(sorted(names)) or 'nothing'}, and not by {expected}."


def left(ground: Ground) -> Left:
    """Read with plain SQL what a flood has left behind."""
    stream = session_stream(SESSION)
    with closing(connection(ground.url)) as database:
        (row,) = database.execute("SELECT state, wake_at, ended_at FROM sessions").fetchall()
        days = database.execute("SELECT at, usd FROM spends").fetchall()
    by_day: Counter[int] = Counter()
    for at, usd in days:
        by_day[at // DAY] += usd
    events = [event for event in found_at(ground.url).events if event.stream == stream]
    return Left(events, row[0], row[1], row[2] is not None, by_day.total(), max(by_day.values(), default=0))


def run(setting: Setting) -> Result:
    """Let every model run away, on as many processors as there are."""
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


def _lane(pipe: Pipe, setting: Setting, planned: Sequence[Case]) -> None:
    with own_store(setting) as ground:
        for case in planned:
            pipe.send(flooded(ground, case))


DRILL: Final = Drill(
    "flood",
    "A runaway model is held back: it takes no more turns, tokens, money and actions than it may.",
    run,
    stores=("sqlite",),  # PostgreSQL keeps its own time, and a day there takes a day.
)
