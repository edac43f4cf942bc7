"""What every event is: frozen, flat, with a stable kind and a version."""

from typing import ClassVar

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One thing that happened."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
