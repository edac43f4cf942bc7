"""A store as an unlucky process sees it: slow, away, losing answers; and the process may die at any commit."""

import random
from dataclasses import dataclass
from typing import Literal, NoReturn

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnavailable
from halter.core.ports import Committed, Store, Write
from halter.testing.crash import Crashed
from halter.testing.relay import Relay

Fault = Literal["", "away", "lost", "crash before", "crash after"]


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each misfortune befalls a commit, and how long the way to the store takes at most."""

    away: float = 0.0
    lost: float = 0.0
    crash: float = 0.0
    slow: int = SECOND // 100


class FaultyStore(Relay):
    """Puts faults, drawn by chance, between one process and a store. The store itself stays whole, as a disk does."""

    def __init__(self, store: Store, chance: random.Random, clock: Clock, faults: Faults) -> None:
        super().__init__(store)
        self._chance = chance
        self._clock = clock
        self._faults = faults
        self._dead = False

    async def way(self) -> None:
        """Take a while, and let nobody pass who is dead."""
        await self._clock.sleep(self._chance.randrange(self._faults.slow))
        if self._dead:
            self._die()

    async def commit(self, write: Write) -> Committed:
        """Commit, unless a fault comes first; after some faults it is committed and nobody hears of it."""
        await self.way()
        fault = self._drawn()
        if fault == "crash before":
            self._die()
        if fault == "away":
            raise StoreUnavailable("The store was away for a moment, as the drill wanted it; try again.")
        committed = await self._store.commit(write)
        if fault == "crash after":
            self._die()
        await self.way()
        if fault == "lost":
            raise StoreUnavailable("The store's answer was lost, as the drill wanted it; try again.")
        return committed

    async def close(self) -> None:
        """Leave the store open: it belongs to the other processes too."""

    def _drawn(self) -> Fault:
        draw = self._chance.random()
        half = self._faults.crash / 2
        shares: tuple[tuple[Fault, float], ...] = (
            ("crash before", half),
            ("crash after", half),
            ("lost", self._faults.lost),
            ("away", self._faults.away),
        )
        for fault, share in shares:
            if draw < share:
                return fault
            draw -= share
        return ""

    def _die(self) -> NoReturn:
        self._dead = True
        raise Crashed
