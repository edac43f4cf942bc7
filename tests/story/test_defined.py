"""An agent's definition is put into the store once, again where it may have been swept away, and for another agent."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from halter.core.ids import Digest
from halter.core.ports import Store
from halter.runtime.agent_runtime import DEFINITION_TTL
from halter.testing.fakes import StoreProxy
from halter.testing.world import World
from tests.story.fronts import front


class Counted(StoreProxy):
    """A store that counts what is put into it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.puts = 0

    async def put(self, data: bytes) -> Digest:
        self.puts += 1
        return await super().put(data)

    def patient(self, *_: object) -> "Counted":
        """Count also what is put by those who would wait for the store."""
        return self


async def test_a_definition_is_put_away_once_an_hour_and_for_each_agent(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        context = (await front(stack, world, tmp_path)).context
        store: Any = Counted(world.store)
        context = replace(context, app=replace(context.app, store=store))
        names = [await context.store_definition()]
        await world.advance(DEFINITION_TTL - 1)
        names.append(await context.store_definition())
        await world.advance(1)
        names.append(await context.store_definition())
        assert (len(set(names)), store.puts) == (1, 2)
        await replace(context, definition=replace(context.definition)).store_definition()
        assert store.puts == 3
        assert await store.get(names[0])
