"""The processes that run the agents: on which machine each is, how it is, and what it has."""

from collections.abc import Awaitable, Callable

from halter.app.desk.workers import Worker
from halter.app.desk.workers import workers as known
from halter.app.words.moments import moment
from halter.app.words.workers import MOODS, NOBODY, agents_of, busy, heard, named, note
from halter.server.dashboard.parts import Kept, box, cell, chip, part, table, words
from halter.server.dashboard.room import Room

COLUMNS = ("process", "is", "awake", "agents", "last heard", "since", "version")


def workers(room: Room) -> Callable[[], Awaitable[None]]:
    """Begin the part of a page that shows them, and return what keeps it up to date."""
    with part("Workers", card=True):
        lines = Kept[Worker](table("Workers", COLUMNS), lambda one: _row(room, one))
        none = words("", "h-none")

    async def refresh() -> None:
        found = await known(room.desk)
        # How it is comes with its key: the word and its colour are then put there together.
        lines.show({(one.worker, one.health): one for one in found})
        none.say("" if any(one.alive for one in found) else NOBODY)

    return refresh


def _row(room: Room, one: Worker) -> Callable[[Worker], None]:
    with box("tr"):
        cell(named(one), "h-what")
        with box("td"):
            chip(one.health, MOODS[one.health])
            said = words("", "h-text h-note")
        awake, agents, last = cell("", "h-short"), cell(), cell("", "h-short")
        cell(moment(one.since, room.now), "h-short")
        cell(one.version, "h-short")

    def show(one: Worker) -> None:
        told = note(one, room.now)
        said.say(told)
        said.set_visibility(bool(told))
        awake.say(busy(one))
        agents.say(agents_of(one))
        last.say(heard(one, room.now))

    show(one)
    return show
