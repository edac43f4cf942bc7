"""Before an agent runs it is said what it can spend: by the clock alone, and whatever happens."""

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from halter.autonomy.triggers import Forecast, forecast_bounds
from halter.config.agent_files import read_agent
from halter.config.resolve import resolve_agent
from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import SessionStarted
from halter.core.money import DOLLAR, Cap, Caps, micros_to_usd
from halter.core.ports import Query
from halter.core.rows import SpendRow
from halter.runtime.forecast import SpendingForecast, find_clockwork, forecast_spending
from halter.runtime.trigger_runner import make_trigger
from halter.spec.triggers import AnyTrigger, Schedule, Watch, trigger_id
from halter.state import lifecycle
from halter.testing.world import VIRTUAL_START, World
from tests.story.autonomous import Fleet
from tests.story.fronts import Front, front

WIDE = Caps(agent=(Cap(None),), fleet=(Cap(None),))
EVERY_HOUR = Schedule(name="hourly", every=HOUR)
PRICES = "models: {scripted:script: {price: {input: 1, output: 200}}}\n"
NAP = """\
- text: I looked.
  calls: [{tool: yield, arguments: {mode: sleep, sleep: 1s}}]
  usage: {input_tokens: 400, output_tokens: 60}
"""


async def foreseen(
    desk: Front, caps: Caps, triggers: Sequence[AnyTrigger] = (), *, autonomous: bool = False
) -> SpendingForecast:
    agent = desk.context.definition
    tasks = replace(
        agent.tasks,
        schedules=tuple(each for each in triggers if isinstance(each, Schedule)),
        watches=tuple(each for each in triggers if isinstance(each, Watch)),
    )
    autonomy = replace(agent.pacing.autonomy, enabled=autonomous)
    pacing = replace(agent.pacing, autonomy=autonomy)
    agent = replace(agent, policy=replace(agent.policy, caps=caps), tasks=tasks, pacing=pacing)
    return await forecast_spending(desk.world.store, agent, agent.source_folder or desk.home, {}, desk.world.now)


async def test_an_agent_without_a_gate_is_forecast_at_what_its_caps_leave_and_spends_no_more(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    folder = fleet.agent("watch", "model: scripted\nscript: script.yaml\n", script_yaml=NAP * 9)
    fleet.start(folder)
    await world.advance(MINUTE // 3)
    spent = sum(row.usd for row in await world.journal.ask(Query("all_spends", SpendRow)))
    assert spent == 111_600
    assert [text for _, text in fleet.told[1:3]] == [
        (
            "Unattended, it spends at most $5.00 in the next 12 hours and at most $150.00 in thirty days: "
            "its own turns, bounded by every cap."
        ),
        "Messages, webhooks and watched folders cannot raise that: it is all that its caps leave.",
    ]


async def test_the_forecast_of_thirty_days_is_bounded_by_the_cap_of_each_day(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        caps = Caps(session=Cap(DOLLAR // 2), agent=(Cap(DOLLAR // 20, "day"),))
        spending_forecast = await foreseen(desk, caps, [EVERY_HOUR])
        assert spending_forecast.month == Forecast(30 * DOLLAR // 20, 30 * DOLLAR // 20)


async def test_watched_folders_cost_nothing_by_the_clock_alone(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        unbounded = await foreseen(desk, WIDE, [Watch(name="w")])
        assert (unbounded.night, unbounded.month) == (Forecast(0, None), Forecast(0, None))
        assert unbounded.describe() == [
            "Unattended, it spends nothing: it takes no autonomous turns and has no schedules.",
            "Messages, webhooks and watched folders can add any amount, because no cap bounds it.",
        ]
        bounded = await foreseen(desk, Caps(), [Watch(name="w")])
        assert bounded.night == Forecast(0, 5 * DOLLAR)
        assert bounded.describe()[1] == (
            "Messages, webhooks and watched folders can raise that to at most $5.00 and at most $150.00, "
            "what its caps leave."
        )


async def test_what_a_person_confirmed_counts_as_well(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await desk.answer("every 2 hours check the mail")
        await desk.answer("approve")
        assert (await foreseen(desk, WIDE)).night == Forecast(6 * DOLLAR, None)


async def begin_runs(world: World, trigger: AnyTrigger, count: int) -> None:
    """Start runs of a trigger that do not end."""
    identity = trigger_id("desk", trigger.name)
    await world.store.commit(make_trigger(identity, "desk", trigger, "ada"))
    for number in range(count):
        event = SessionStarted(
            session=f"run-{number}", agent="desk", kind="task", started_by=identity, trigger=identity
        )
        await world.store.commit(lifecycle.start_session(event))


@pytest.mark.parametrize(
    "trigger",
    [Watch(name="w", max_cost_usd=DOLLAR // 20), Watch(name="w", max_cost_usd_per_day=15 * DOLLAR // 100)],
    ids=["a cap of each run", "a cap of all runs of a day"],
)
async def test_what_is_under_way_spends_at_most_what_the_caps_of_its_trigger_leave(
    world: World, tmp_path: Path, trigger: Watch
) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        await begin_runs(world, trigger, 3)
        spending_forecast = await foreseen(desk, Caps(session=Cap(DOLLAR)), [trigger])
        assert spending_forecast.night.clock == 15 * DOLLAR // 100
        assert "its running sessions" in spending_forecast.causes


async def test_a_session_is_renewed_only_where_another_cap_bounds_the_agent(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path)
        assert (await foreseen(desk, WIDE, [EVERY_HOUR], autonomous=True)).night.clock == 13 * DOLLAR
        assert (await foreseen(desk, Caps(), [EVERY_HOUR], autonomous=True)).night.clock == 5 * DOLLAR


async def test_an_agent_whose_models_and_tools_have_no_price_spends_nothing(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    fleet.start(fleet.agent("watch", "model: scripted\nscript: script.yaml\n", script_yaml=NAP))
    await world.advance(MINUTE // 60)
    assert fleet.told[1] == ("watch", "It spends nothing: its models have no price.")


USD = st.sampled_from((DOLLAR // 20, DOLLAR // 8, DOLLAR // 3))
HALF_AN_HOUR_BEFORE_FEBRUARY = VIRTUAL_START + 31 * DAY - HOUR // 2


class Life(msgspec.Struct, frozen=True):
    """What is drawn of an agent: its caps in micro-dollars, the rest of its file, and what its model answers."""

    session: int
    hour: int | None
    day: int | None
    fleet_day: int | None
    spec: str
    script: str

    def limits(self) -> str:
        amounts = {"": self.session, "_per_hour": self.hour, "_per_day": self.day}
        return ", ".join(f"max_cost_usd{per}: {written(usd)}" for per, usd in amounts.items())


def written(micros: int | None) -> str:
    return "none" if micros is None else str(micros_to_usd(micros))


@st.composite
def lives(draw: st.DrawFn) -> Life:
    texts = draw(st.lists(st.sampled_from(("4m", "7m", "20m")), max_size=2))
    own = draw(st.booleans()) or not texts
    text = draw(st.sampled_from(("", ", max_cost_usd: 0.06", ", max_cost_usd_per_hour: 0.1", ", overlap: queue")))
    pace = draw(st.sampled_from(("", ", gate: {on: change, max_skips: 2}", ", max_consecutive_turns: 3")))
    schedules = "".join(f"  - {{name: s{n}, every: {each}, prompt: Look.{text}}}\n" for n, each in enumerate(texts))
    autonomy = f"autonomy: {{enabled: {str(own).lower()}{pace}}}\n"
    sleeps = draw(st.lists(st.sampled_from((0, 1, 45, 300)), min_size=1, max_size=3))
    return Life(
        session=draw(USD),
        hour=draw(st.none() | USD),
        day=draw(st.none() | USD),
        fleet_day=draw(st.none() | USD),
        spec=f"{autonomy}schedules:\n{schedules}" if texts else autonomy,
        script="".join(reply(sleep) for sleep in sleeps) * 120,
    )


def reply(sleep: int) -> str:
    mode = f"{{mode: sleep, sleep: {sleep}}}" if sleep else "{mode: continue}"
    usage = "{input_tokens: 300, output_tokens: 90}"
    return f"- text: I looked.\n  calls: [{{tool: yield, arguments: {mode}}}]\n  usage: {usage}\n"


# A life takes a while: what fails is shown as it was drawn.
@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(life=lives(), on_cap=st.sampled_from(("wrap_up", "stop")))
def test_by_the_clock_alone_nobody_spends_more_than_was_forecast_and_no_forecast_passes_a_cap(
    life: Life, on_cap: str
) -> None:
    start, until = HALF_AN_HOUR_BEFORE_FEBRUARY, HALF_AN_HOUR_BEFORE_FEBRUARY + HOUR
    with tempfile.TemporaryDirectory() as home, World(start=start, orderly=True, lease=30 * MINUTE) as world:
        fleet = Fleet(
            world, Path(home), f"{PRICES}limits: {{max_cost_usd_per_day: {written(life.fleet_day)}}}\n", sturdy=True
        )
        limits = f"limits: {{{life.limits()}, max_output_tokens: 100, min_output_tokens: 100, on_cap: {on_cap}}}\n"
        spec = f"model: scripted\nscript: script.yaml\n{limits}{life.spec}"
        folder = fleet.agent("watch", spec, script_yaml=life.script)

        async def live() -> tuple[Forecast, int]:
            agent = resolve_agent(fleet.app.fleet, read_agent(folder), folder)
            work = await find_clockwork(world.journal, agent, folder, {}, start)
            fleet.start(folder)
            await world.advance(HOUR)
            spends = await world.journal.ask(Query("all_spends", SpendRow))
            return forecast_bounds(work, {}, start, until), sum(row.usd for row in spends)

        forecast, spent = world.run(live())
    # The hour, the day and the month all change once in that span.
    caps = [2 * cap for cap in (life.hour, life.day, life.fleet_day) if cap is not None]
    assert spent > 0
    assert forecast.clock is None or spent <= forecast.clock
    assert forecast.total == min(caps, default=None)
    assert forecast.total is None or (forecast.clock is not None and forecast.clock <= forecast.total)
