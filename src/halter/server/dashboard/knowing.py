"""What a session knows: its hot state with ages, how that went, and how its sensors are."""

import json
from collections.abc import Callable, Sequence

from halter.app.desk import looking
from halter.app.desk.looking import Fact
from halter.core.durations import shown_duration
from halter.core.events import SensorChanged
from halter.core.ports import Stored
from halter.server.dashboard.charts import history, timeline
from halter.server.dashboard.parts import Kept, box, cell, table, words
from halter.server.dashboard.plot import Plot
from halter.server.dashboard.room import Room
from halter.server.dashboard.spans import healths_of, numbers_of


class Knowing:
    """The part of a session's page that shows it."""

    def __init__(self, room: Room, session: str) -> None:
        self._room = room
        self._session = session
        self._none = words("", "h-none")
        self._facts = Kept[tuple[str, Fact]](table("Hot state", ("fact", "value", "age", "by")), self._fact)
        self._history = Plot("How the numbers of the hot state went", "")
        self._healths = Plot("Health of the sensors over time", "")
        self._sensors = Kept[SensorChanged](box("ul", "h-list", "Sensors"), _sensor)

    async def show(self) -> None:
        """Show what it knows now."""
        state = await looking.hot_state(self._room.desk, self._session)
        self._none.say("" if state.facts else "It has no hot state.")
        self._facts.show({name: (name, fact) for name, fact in state.facts.items()})

    async def show_history(self, events: Sequence[Stored]) -> None:
        """Show how that went."""
        numbers = numbers_of(await looking.hot_state_history(self._room.desk, self._session))
        self._history.show(history(numbers), empty=not numbers)
        found = await looking.sensors(self._room.desk, self._session)
        self._sensors.show({(name, event.health): event for name, event in found.items()})
        healths = healths_of(events, self._room.now)
        lanes = sorted({span.lane for span in healths})
        self._healths.show(timeline(healths, lanes), empty=not healths, lanes=len(lanes))

    def _fact(self, named: tuple[str, Fact]) -> Callable[[tuple[str, Fact]], None]:
        with box("tr"):
            cell(named[0], "h-what")
            value, age, by = cell(), cell("", "h-short"), cell()

        def show(named: tuple[str, Fact]) -> None:
            fact = named[1]
            value.say(_written(fact))
            age.say(shown_duration(max(0, self._room.now - fact.at)) or "0s")
            by.say(fact.by)

        show(named)
        return show


def _written(fact: Fact) -> str:
    return fact.value if isinstance(fact.value, str) else json.dumps(fact.value, ensure_ascii=False)


def _sensor(event: SensorChanged) -> Callable[[SensorChanged], None]:
    with box("li", "h-row"):
        words(event.sensor, "h-what")
        words(f"{event.health} {event.sentence}".strip(), "h-good" if event.health == "ok" else "h-bad")
    return lambda _: None
