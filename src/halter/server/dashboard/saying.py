"""What was said in a session: to the model, by it, and by tools. All of it is text and nothing but text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halter.app.words.moments import hour
from halter.app.words.told import in_words
from halter.core.events import (
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    FindingEmitted,
    MessageAdded,
    NotificationQueued,
    RequestSettled,
    SessionStarted,
    TurnStarted,
)
from halter.core.ports import Stored, said
from halter.server.dashboard.parts import Kept, box, words
from halter.server.dashboard.room import Room


@dataclass(frozen=True, slots=True)
class Said:
    """Some words, and whose they are."""

    at: int
    by: str
    text: str


class Saying:
    """The part of a session's page that shows it. What was read once is not read again."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._known: dict[int, Said | None] = {}
        self._shown = Kept[Said](box("div"), _said, "Nothing was said yet.")

    async def show(self, events: Sequence[Stored]) -> None:
        """Show what these events say, the newest last."""
        tools = {stored.event.call: stored.event.tool for stored in events if isinstance(stored.event, CallStarted)}
        for stored in events:
            if stored.seq not in self._known:
                self._known[stored.seq] = await self._words(stored, tools)
        kept = {stored.seq: self._known[stored.seq] for stored in events}
        self._known = kept
        self._shown.show({seq: one for seq, one in kept.items() if one is not None})

    async def _words(self, stored: Stored, tools: dict[str, str]) -> Said | None:
        by = _speaker(stored, tools)
        if not by:
            return None
        text = in_words(stored.event, await said(self._room.app.store, stored))
        return Said(stored.at, by, text or ("(erased)" if stored.erased else "")) if text or stored.erased else None


def _speaker(stored: Stored, tools: dict[str, str]) -> str:
    """Name whose words an event holds, if they are part of what was said."""
    match stored.event:
        case SessionStarted():
            return "task"
        case TurnStarted():
            return f"to the model, turn {stored.event.turn}"
        case MessageAdded():
            return f"to the model, because of {stored.event.reason}"
        case ContextGiven() | ContextCut():
            return "to the model, from before"
        case RequestSettled():
            return "model"
        case CallSettled():
            return f"tool {tools.get(stored.event.call, stored.event.call)}"
        case FindingEmitted():
            return f"finding, {stored.event.severity}"
        case NotificationQueued():
            return f"notification over {stored.event.channel}"
        case _:
            return ""


def _said(one: Said) -> Callable[[Said], None]:
    with box("div", "h-said"):
        words(f"{hour(one.at)} {one.by}", "h-from")
        words(one.text)
    return lambda _: None
