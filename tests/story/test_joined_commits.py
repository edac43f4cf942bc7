"""What a step came to is committed with what the next one intends: fewer commits, and every promise as before."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal

import pytest

from halter.core.clock import Clock
from halter.core.events import CallSettled, RequestSettled, TurnEnded
from halter.core.ids import session_stream
from halter.core.messages import Prompt, Reply, TextListener
from halter.core.ports import Stored
from halter.core.tools import Permit
from halter.core.usage import ModelName, Price, Usage
from halter.loop.decide import End, NextTurn, Park, SessionStep
from halter.loop.loop import TurnLoop
from halter.loop.observer import LiveContext, LoopObserver
from halter.loop.session_runtime import SessionRuntime
from halter.models.scripted import Scripted, ScriptLine
from halter.tasks.conversation import AttendedTurnPolicy, Inbox, OpenTurn, TurnPolicy
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.story.loops import Story, calls, says


def script(steps: int) -> list[ScriptLine]:
    return [*(calls(("look", {"at": f"{step}"})) for step in range(steps)), says("Done.")]


async def commits_of(world: World, steps: int) -> int:
    story = Story(world, script(steps), kind="task")
    before = world.store.commits
    assert (await story.run("Look around.")).state == "COMPLETED"
    return world.store.commits - before


def test_a_step_takes_two_commits() -> None:
    numbers: list[int] = []
    for steps in (2, 5):
        with World(1) as world:
            numbers.append(world.run(commits_of(world, steps)))
    assert numbers[1] - numbers[0] == 2 * 3


class Curious(Scripted):
    """A model that looks at something before it answers."""

    def __init__(self, lines: Sequence[ScriptLine], clock: Clock, look: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(lines, clock, ModelName("scripted", "script"))
        self._look = look

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        await self._look("model")
        return await super().ask(prompt, permit, on_text)


async def durable(world: World) -> Sequence[object]:
    return [stored.event for stored in await world.journal.read(session_stream("s"))]


async def test_what_came_before_is_durable_before_a_tool_or_a_model_acts(world: World) -> None:
    seen: list[tuple[str, int, int]] = []

    async def note(who: str) -> None:
        events = await durable(world)
        answers = sum(isinstance(event, RequestSettled) for event in events)
        seen.append((who, answers, sum(isinstance(event, CallSettled) for event in events)))

    async def peek() -> str:
        await note("tool")
        return f"look {len(seen)}"

    story = Story(world, kind="task")
    story.extra = [tool(peek, level="SAFE", effect="read")]
    story.models = [Curious([calls("peek"), calls("peek"), says("Done.")], world.clock, note)]
    await story.run("Look around.")
    assert seen == [("model", 0, 0), ("tool", 1, 0), ("model", 1, 1), ("tool", 2, 1), ("model", 2, 2)]


def count_events(events: Sequence[Stored], kind: type[object]) -> int:
    return sum(isinstance(each.event, kind) for each in events)


async def test_an_observer_sees_nothing_that_is_not_durable(world: World) -> None:
    texts: list[str] = []

    def heard(kind: type[object]) -> Callable[[object, object], None]:
        return lambda _, __: texts.append(f"{kind.__name__} {count_events(world.store.written, kind)}")

    story = Story(world, script(2), kind="task")
    story.watching = LoopObserver(on_text=heard(RequestSettled), on_result=heard(CallSettled))
    await story.run("Look around.")
    assert texts == ["RequestSettled 1", "CallSettled 1", "RequestSettled 2", "CallSettled 2", "RequestSettled 3"]


@pytest.mark.parametrize("failure", [asyncio.CancelledError, RuntimeError])
async def test_an_outcome_is_written_down_also_when_nothing_follows(world: World, failure: type[BaseException]) -> None:
    looks = iter(range(10))

    def volatile() -> str:
        if next(looks) == 1:
            raise failure
        return ""

    story = Story(world, script(2), kind="task")
    story.senses = LiveContext(read_volatile=volatile)
    with pytest.raises(failure):
        await story.run("Look around.")
    assert count_events(await world.journal.read(session_stream("s")), CallSettled) == 1


class Noting(AttendedTurnPolicy):
    """A pace that notes what is durable when it is asked for the next turn."""

    def __init__(self, loop: TurnLoop, world: World) -> None:
        super().__init__(loop)
        self._world = world
        self.seen: list[int] = []

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        self.seen.append(sum(isinstance(event, TurnEnded) for event in await durable(self._world)))
        return await super().decide_before_turn(inbox)

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        return NextTurn() if len(self.seen) < 3 else step


async def test_what_a_turn_came_to_is_durable_before_anybody_looks_whether_there_is_to_be_another(world: World) -> None:
    paces: list[Noting] = []

    class Restless(Story):
        def pace(self, running: SessionRuntime, loop: TurnLoop) -> TurnPolicy:
            paces.append(Noting(loop, self.world))
            return paces[-1]

    story = Restless(world, [says("One."), says("Two.")])
    await story.begin()
    await world.send_message("s", "Go on.")
    await story.attend()
    assert paces[0].seen == [0, 1]


async def test_the_end_of_a_turn_is_durable_before_what_works_beside_the_session_is_stopped(world: World) -> None:
    numbers: list[int] = []

    class Watched(Story):
        def pace(self, running: SessionRuntime, loop: TurnLoop) -> TurnPolicy:
            running.ending = self.stops
            return AttendedTurnPolicy(loop)

        async def stops(self) -> None:
            numbers.append(sum(isinstance(event, TurnEnded) for event in await durable(self.world)))

    await Watched(world, script(1), kind="task").run("Look around.")
    assert numbers == [1]


async def test_a_cost_beyond_its_hold_is_known_before_the_session_continues(world: World) -> None:
    story = Story(world, [calls("look", usage=Usage(10, 10_000_000)), calls("look"), says("Done.")], kind="task")
    story.price = Price(Decimal(10), Decimal(10))
    ending = await story.run("Look around.")
    assert (ending.state, ending.terminal_reason) == ("BUDGET_EXCEEDED", "overrun")
    assert story.desk.done == {"look": 1}
