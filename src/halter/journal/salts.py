"""Random salts of bodies, drawn many at a time."""

import os
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Final
from weakref import WeakSet

from halter.journal.apply import SALT_BYTES

SALTS_DRAWN: Final = 256
"""Number of salts drawn with one system call."""
_SALTS: Final = struct.Struct(f"{SALT_BYTES}s" * SALTS_DRAWN)


class _SaltPool:
    """Random salts for one writer, drawn from the system in batches. A forked process starts with none."""

    def __init__(self) -> None:
        self.drawn: list[bytes] = []
        _POOLS.add(self)

    def draw_batch(self) -> list[bytes]:
        self.drawn[:] = _SALTS.unpack(os.urandom(_SALTS.size))
        return self.drawn


_POOLS: Final = WeakSet[_SaltPool]()
os.register_at_fork(after_in_child=lambda: [pool.drawn.clear() for pool in _POOLS])


def draw_salts() -> Iterator[bytes]:
    """Return an endless iterator of salts. After a fork empties the current batch, it draws a new one."""
    return chain.from_iterable(iter(_SaltPool().draw_batch, None))
