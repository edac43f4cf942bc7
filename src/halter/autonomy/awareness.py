"""What a session knows right now: its hot state, the alerts of this turn, and how its sensors do."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from halter.autonomy.hotstate import HotState
from halter.brain.loop import Senses
from halter.core.clock import Clock
from halter.core.messages import Text
from halter.core.sensing import HealthReport

NOTIFICATIONS: Final = "notifications"
"""The name under which a model that works by rules finds the alerts of its turn."""


class Awareness:
    """One session's senses."""

    def __init__(self, hot: HotState, clock: Clock) -> None:
        self.hot = hot
        self._clock = clock
        self._notes: tuple[str, ...] = ()
        self._health: dict[str, HealthReport] = {}

    def show(self, notes: Sequence[Text]) -> None:
        """Let the turn see these alerts."""
        self._notes = tuple(note.text for note in notes)

    def hear(self, report: HealthReport) -> None:
        """Know how a sensor does."""
        self._health[report.sensor] = report

    def senses(self) -> Senses:
        """Give a loop what it needs to tell a model all this."""
        return Senses(self._volatile, self._facts)

    def _volatile(self) -> str:
        return self.hot.rendered(self._clock.now(), notes=self._notes, health=tuple(self._health.values()))

    def _facts(self) -> Mapping[str, Any]:
        return {NOTIFICATIONS: list(self._notes), **self.hot.values()}
