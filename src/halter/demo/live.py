"""The agent that watches this machine, for as long as somebody wants to see it."""

from halter.app.up import Up
from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.demo.place import Place
from halter.demo.scenery import Scenery


async def live(up: Up, place: Place, clock: Clock) -> None:
    """Run the agent among all that it watches, until cancelled."""
    try:
        async with Scenery(place.agent, clock).around():
            await up.run([place.agent])
    except* OSError as errors:
        first = errors.exceptions[0]
        raise ConfigError(f"What the demo's agent watches could not be made in {place.agent}: {first}.") from None
