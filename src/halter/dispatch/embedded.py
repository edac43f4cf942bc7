"""Sessions that this process claims for itself when they are due.

A session that sleeps without sensors is only a row: nothing here knows of it until it is due.
"""

from collections.abc import Callable
from typing import Final

from halter.brain.together import until
from halter.core.ports import Agents
from halter.dispatch.due import maybe_due, next_look
from halter.dispatch.sessions import Sessions

TOGETHER: Final = 200
"""How many sessions are awake at once. Those that stay here while they sleep are not counted."""


class Embedded:
    """Runs the sessions of some agents in this process."""

    def __init__(self, sessions: Sessions, agents: Callable[[], Agents], together: int = TOGETHER) -> None:
        self._sessions = sessions
        self._agents = agents
        self._together = together

    async def run(self) -> None:
        """Claim what is due until cancelled; whatever is under way is then stopped in good order."""
        sessions = self._sessions
        try:
            async with maybe_due(sessions.store, sessions.news):
                while True:
                    room, agents = sessions.room(self._together), self._agents()
                    for lease in await sessions.store.claim(sessions.worker, room, agents=agents) if room > 0 else ():
                        sessions.take(lease)
                    await sessions.watch()
                    polling = sessions.polling_interval
                    look = await next_look(sessions.store, sessions.clock, sessions.worker, polling)
                    await until(sessions.news, look)
        finally:
            await sessions.stop()
