"""What a sensor is to everybody who does not read the world: a name, and readings as they come."""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from halter.core.errors import HalterError

Health = Literal["starting", "ok", "failing"]

LARGEST_READING = 1_000_000
"""So many bytes a single reading may have. What is larger is a failure, and is not kept."""


class Reading(msgspec.Struct, frozen=True):
    """What was read: a JSON value, when, and how many bytes it was, by which those who keep it bound what they keep."""

    value: Any
    at: int
    size: int = 0


class SensorFailed(HalterError):
    """A source could not be read: a sentence for whoever looks at the sensor's health."""


class Sensor(Protocol):
    """A background reader. Whoever runs it deals with its failures; it only reads."""

    @property
    def name(self) -> str:
        """The sensor's name."""
        ...

    @property
    def retry_after(self) -> int | None:
        """How long its source asks to be left alone before it is read again, in microseconds."""
        ...

    def readings(self) -> AsyncIterator[Reading]:
        """Read until the source closes in good order. Raises SensorFailed; begun again, it goes on where it was."""
        ...


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a sensor does. `dropped` counts readings that came too fast to be looked at."""

    sensor: str
    health: Health = "starting"
    since: int = 0
    failures: int = 0
    sentence: str = ""
    read_at: int | None = None
    dropped: int = 0
