"""What every row of a store's tables has in common."""

from typing import Any, ClassVar, TypeVar

import msgspec

RowKey = tuple["type[Row]", tuple[Any, ...]]


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row of a table: its fields are the columns, the first ones its key.

    It holds plain values only, so it can be no part of a cycle, and no collector has to look at it.
    """

    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]
    APPEND_ONLY: ClassVar[bool] = False

    def key(self) -> RowKey:
        """Tell where this row stands."""
        return (type(self), tuple(getattr(self, name) for name in self.KEY))


R = TypeVar("R", bound=Row)


def lock_order(key: RowKey) -> tuple[str, tuple[Any, ...]]:
    """Sort keys by this before locking: one order everywhere means no deadlock."""
    return (key[0].TABLE, key[1])
