"""An agent that runs by itself in this process: its session begun, attended, and resident while its sensors read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from halter.app.agent_context import AgentContext
from halter.app.attending import Attending, attending
from halter.app.playing import go_on_with, plays
from halter.app.sensors import Sensors, fetchers
from halter.app.succession import handed_over
from halter.app.talking import Before, begin, row_of
from halter.autonomy.resident import Resident, Watched
from halter.autonomy.restarts import MOST, WITHIN
from halter.autonomy.upkeep import RESTS
from halter.brain.loop import Watching
from halter.core.events import SessionWoken, TurnEnded
from halter.core.ids import SessionId
from halter.core.messages import StreamChunk
from halter.core.ports import Lease, Stored
from halter.core.rows import SessionRow
from halter.core.tools import TIMEOUT
from halter.dispatch.sessions import quarantine
from halter.guard.request import TIMEOUT as REQUEST_TIMEOUT
from halter.state.session import InFlight
from halter.work.conversation import Came

REMEMBERED: Final = 50
"""So many sessions that rest elsewhere are remembered as they were left."""
POISON: Final = 2 * MOST
"""So many processes that died over a session, without a turn coming to its end, are too many."""

Pulse = Callable[[str, str, Mapping[str, Any]], None]
"""Somebody who wants to know what happens at this moment: in which session, under which name, with which values."""


def nobody(_: str, __: str, ___: Mapping[str, Any]) -> None:
    """Do not care."""


class Living:
    """One agent that runs by itself."""

    def __init__(self, speaking: AgentContext, folder: Path, pulse: Pulse = nobody) -> None:
        self.speaking = speaking
        self.snapshots: dict[SessionId, Callable[[], bytes]] = {}
        self._folder = folder
        self._pulse = pulse
        self._resident = bool(speaking.agent.pacing.sensors)
        self._resting: dict[SessionId, tuple[int, Attending]] = {}

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.speaking.agent.policy.name

    @property
    def version(self) -> str:
        """Name the agent's files, as they were read."""
        return self.speaking.agent.folder

    @property
    def concurrency(self) -> int | None:
        """How many of its tasks may be awake at once, on all machines together; None is any number."""
        return self.speaking.agent.tasks.concurrency

    @property
    def autonomous(self) -> bool:
        """Tell whether the agent runs by itself, beside what is triggered."""
        return self.speaking.agent.pacing.autonomy.enabled

    @property
    def idle_halt(self) -> int:
        """How long one of its sessions may run and do nothing."""
        return self.speaking.agent.tasks.idle_halt

    def allowed(self, flight: InFlight) -> int:
        """Tell how long something that a session has under way may take: a call its tool's time, a request its own.

        A verb may take longer than that, by what it does inside; and that is under way by itself.
        """
        if not flight.is_call:
            return REQUEST_TIMEOUT
        tool = self.speaking.agent.tools.get(flight.name)
        return TIMEOUT if tool is None else tool.spec.timeout

    async def begin(self, number: int, follows: str = "", because: str = "") -> SessionId:
        """Begin the agent's session of that number; one that was begun before stays as it is.

        One that `follows` another by itself is told so, and what the other one said last.
        """
        session = f"{self.name}-{number}"
        if not follows:
            return await begin(self.speaking, "", "autonomous", session)
        text = await handed_over(self.speaking.store, follows, because)
        return await begin(self.speaking, text, "autonomous", session, Before(follows, because))

    async def attend(
        self,
        lease: Lease,
        stays: Callable[[SessionId], None] = lambda _: None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a session from where it stands to its next rest; one with sensors stays until it is over.

        `waits` is told when a person has to decide something.
        """
        made = self._remembered(lease)
        if made is not None:
            await self._visited(made, lease)
            return
        row = await row_of(self.speaking, lease.session)
        if await plays(self.speaking, row):
            await go_on_with(self.speaking, lease)
            return
        watching = Watching(listen=lambda chunk: self._heard(lease.session, chunk))
        resident = self._resident and row.kind == "autonomous"
        sensed = fetchers(self.speaking) if resident else None
        made = await attending(self.speaking, row, lease, watching=watching, sensed=sensed, waits=lambda _, __: waits())
        if lease.generation > POISON and await self._kills(made, lease):
            return
        if not resident:
            await self._visited(made, lease)
            return
        stays(lease.session)
        self.snapshots[lease.session] = made.aware.hot.snapshot
        try:
            await self._inhabited(made, row, lease)
        finally:
            self.snapshots.pop(lease.session, None)

    async def _visited(self, made: Attending, lease: Lease) -> None:
        """Take a session to its next rest, and remember it for a while: the next to wake may have been here before."""
        if (await made.conversation.attend()).over:
            return
        self._resting[lease.session] = (lease.generation, made)
        while len(self._resting) > REMEMBERED:
            self._resting.pop(next(iter(self._resting)))

    def _remembered(self, lease: Lease) -> Attending | None:
        """Find a session as it was left here, if nobody else has had it since: its history need not be read again."""
        generation, made = self._resting.pop(lease.session, (0, None))
        if made is None or generation != lease.generation - 1:
            return None
        made.running.lease = lease
        return made

    def _heard(self, session: str, chunk: StreamChunk) -> None:
        self._pulse(session, "text", {"request": chunk.request, "text": chunk.text, "finished": chunk.finished})

    async def _inhabited(self, made: Attending, row: SessionRow, lease: Lease) -> Came:
        """Let the session live with its sensors. One that is found asleep sleeps on, with its sensors awake."""
        sensors = Sensors(self.speaking, made.running, self._folder)
        watched = [Watched(sensor, sensors.signals(sensor)) for sensor in made.terms.pacing.sensors]
        resident = Resident(
            made.conversation,
            made.running,
            made.loop,
            made.aware,
            watched,
            sensors.runs,
            lambda name, values: self._pulse(lease.session, name, values),
        )
        return await resident.live(await self._asleep(made, row))

    async def _asleep(self, made: Attending, row: SessionRow) -> Came | None:
        """Find a session resting that nothing has woken."""
        if row.state not in RESTS or (row.due_at is not None and row.due_at <= self.speaking.app.clock.now()):
            return None
        await made.running.look_back()
        return Came(row.state, wake_at=row.wake_at, wake_on=tuple(row.wake_on.split()))

    async def _kills(self, made: Attending, lease: Lease) -> bool:
        """Leave a session to a person over which one process after the other died."""
        now = self.speaking.app.clock.now()
        deaths = died(await made.running.look_back(), now)
        if deaths < POISON:
            return False
        error = f"{deaths} processes that worked on it died in a row."
        return await quarantine(self.speaking.store, lease, deaths, error, now)


def died(events: Sequence[Stored], now: int) -> int:
    """Count how often a session was taken over lately since a turn of it last came to its end."""
    count = 0
    for stored in events:
        match stored.event:
            case TurnEnded():
                count = 0
            case SessionWoken(cause="takeover") if stored.at > now - WITHIN:
                count += 1
            case _:
                pass
    return count
