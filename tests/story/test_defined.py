"""An agent's definition is put into the store once, again where it may have been swept away, and for another agent."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from halter.app.defined import GOOD_FOR, Defined
from halter.core.ids import Digest
from halter.core.ports import Store
from halter.testing.relay import Relay
from halter.testing.world import World
from tests.story.fronts import front


class Counted(Relay):
    """A store that counts what is put into it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.puts = 0

    async def put(self, data: bytes) -> Digest:
        self.puts += 1
        return await super().put(data)


async def test_a_definition_is_put_away_once_an_hour_and_for_each_agent(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        agent = (await front(stack, world, tmp_path)).speaking.agent
        defined, store = Defined(), Counted(world.store)
        names = [await defined.of(agent, store, later) for later in (0, GOOD_FOR - 1, GOOD_FOR)]
        assert (len(set(names)), store.puts) == (1, 2)
        await defined.of(replace(agent), store, GOOD_FOR)
        assert store.puts == 3
        assert await store.get(names[0])
