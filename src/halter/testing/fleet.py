"""Agents of folders in a world: run as `halter up` would run them, in virtual time.

```python
async def test_a_night(world, tmp_path):
    fleet = Fleet(world, tmp_path)
    fleet.start("night-watch")
    await world.advance(8 * HOUR)
    assert (await fleet.receipt("night-watch-1")).cost_usd <= Decimal("0.05")
```
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast

from halter.app.agent import trust_of
from halter.app.opened import App
from halter.app.policy import unbound
from halter.app.up import Up
from halter.app.working import Manner, embedded
from halter.config.trust import folder_digest
from halter.core.clock import MINUTE, SECOND
from halter.core.ids import session_stream
from halter.core.vocabulary import Verdict
from halter.guard.approvals import Open, decide, needs_you
from halter.settings import read_settings
from halter.state.receipt import Receipt, receipt
from halter.testing.world import World

PERSON = "ada"
"""Who trusts the folders of a test, and decides in it."""
HEARTBEAT: Final = 14 * SECOND
"""Just before a lease runs out."""


def quiet_manner() -> Manner:
    """Dispatch with few idle ticks: in virtual time they are all that a quiet hour costs."""
    return replace(embedded(), heartbeat=HEARTBEAT, polling_interval=MINUTE)


class Fleet:
    """One process that runs agents in a world, and a person who answers them. `told` is what it says meanwhile.

    `home` is a folder of the test's own. The fleet's file is looked for there. Sensors that poll tools live in virtual
    time; those that watch folders or listen to the network wait for the real world, which does not hurry.
    """

    def __init__(self, world: World, home: str | PathLike[str]) -> None:
        self.world = world
        self.told: list[tuple[str, str]] = []
        place = Path(home)
        fleet = {"HALTER_FLEET": str(place / "halter.yaml")} if (place / "halter.yaml").exists() else {}
        self._environ = {"HALTER_TRUST": str(place / "trust.json"), "HALTER_PERSON": PERSON, **fleet}
        self._settings = read_settings(self._environ, place, "memory:")

    def start(self, *folders: str | PathLike[str]) -> asyncio.Task[None]:
        """Start the process, with the code of these agents' folders trusted as it is."""
        places = [Path(folder) for folder in folders]
        for place in places:
            trust_of(self._settings).trust(place, folder_digest(place), PERSON, self.world.now)
        up = Up(self._app(), self._hear, _ignore, random.Random(self.world.seed), manner=quiet_manner())
        return self.world.spawn(up.run(places))

    async def receipt(self, session: str) -> Receipt:
        """Tell what a session has done so far; those of an agent are called NAME-1, NAME-2 and so on."""
        return receipt(await self.world.events(session_stream(session)))

    async def waiting(self) -> Sequence[Open]:
        """List what waits for a person."""
        return await needs_you(self.world.journal)

    async def answer(self, asked: Open, verdict: Verdict) -> None:
        """Approve or deny something, as a person would."""
        await self.world.store.commit(decide(asked, verdict, PERSON, self.world.ids.new()))

    def _hear(self, agent: str, sentence: str) -> None:
        self.told.append((agent, sentence))

    def _app(self) -> App:
        """Put together what `halter up` opens, with the store, the clock and the ids of the world."""
        world = self.world
        store, nobody = cast("Any", world.store), cast("Any", None)
        policy = unbound(self._settings)
        return App(self._settings, world.clock, world.ids, store, nobody, world.purse, self._environ, policy=policy)


def _ignore(*_: object) -> None:
    """Nobody looks at what is only live."""
