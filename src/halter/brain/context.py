"""What of a history is sent once it outgrows the window of its model.

A cut leaves out all messages before some place, except the task and the message that opened the turn, and it stays
where it is until the window is full again: so each request begins with what the request before it said, and the
provider's cache goes on being of use. A call is never cut off from its result.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec

from halter.core.messages import Message, Text, ToolResult
from halter.core.mind import ContextStrategy

TARGET: Final = 0.6
"""How much of the window a cut fills: what is left is the time until the next one."""
MARKER: Final = 128
"""More tokens than it takes to say that messages are left out, without a summary."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All that has to be known of a history to cut it.

    `sizes` are its messages in tokens, `starts` says for each whether the part that is kept may begin with it. `task`
    is the place of the message that said what to do, `turn` of the one that opened the turn, and `newest` of the first
    one that the model has yet to answer: from there on nothing is left out.
    """

    sizes: Sequence[int]
    starts: Sequence[bool]
    task: int
    turn: int
    newest: int


class Cut(msgspec.Struct, frozen=True):
    """Messages before `through` are left out, except the pinned ones."""

    through: int
    pinned: tuple[int, ...]

    @property
    def dropped(self) -> int:
        """How many messages are left out."""
        return self.through - len(self.pinned)


class Fits(msgspec.Struct, frozen=True):
    """Nothing has to be cut, or nothing more."""


class TooLarge(msgspec.Struct, frozen=True):
    """Not even what must be sent fits: it has `least` tokens. Somebody shortens results, or ends the turn."""

    least: int
    window: int


def may_start(message: Message) -> bool:
    """Tell whether what is kept may begin with a message: with one that holds results it may not."""
    return message.role == "assistant" or not any(isinstance(part, ToolResult) for part in message.parts)


def newest(history: Sequence[Message]) -> int:
    """Find the first of the messages that the model has yet to answer; results count from their calls on."""
    place = len(history)
    while place and history[place - 1].role == "user":
        place -= 1
    if place and (place == len(history) or not all(map(may_start, history[place:]))):
        place -= 1
    return place


def shape(history: Sequence[Message], sizes: Sequence[int], *, task: int, turn: int) -> Shape:
    """Look at a whole history once; whoever lets it grow keeps the lists, and asks only for what is new."""
    starts = [may_start(message) for message in history]
    return Shape(sizes=sizes, starts=starts, task=task, turn=turn, newest=newest(history))


def fit(
    history: Shape, window: int, cut: Cut | None = None, *, marker: int = 0, target: float = TARGET
) -> Cut | Fits | TooLarge:
    """Decide whether a history still fits as it was cut before, and where to cut it if not.

    `window` is what there is for messages, and `marker` what will be said in place of those left out, in tokens. As
    little is left out as brings the rest down to `target` of the window. Where what must stay is larger than that, half
    of the room beside it is used.
    """
    total = _total(history, cut, marker)
    if total <= window:
        return Fits()
    places = _places(history, 0 if cut is None else cut.through, marker)
    least = min([total, *(kept for _, kept in places)])
    if least > window:
        return TooLarge(least, window)
    goal = int(target * window)
    goal = goal if least <= goal else (least + window) // 2
    through = next(place for place, kept in places if kept <= goal)
    return Cut(through, _pinned(history, through))


def _total(history: Shape, cut: Cut | None, marker: int) -> int:
    if cut is None:
        return sum(history.sizes)
    return marker + sum(history.sizes[place] for place in cut.pinned) + sum(history.sizes[cut.through :])


def _places(history: Shape, first: int, marker: int) -> list[tuple[int, int]]:
    """Tell where a cut may fall, and how much it would keep: the first keeps the most."""
    found: list[tuple[int, int]] = []
    tail = sum(history.sizes[history.newest :])
    for place in range(history.newest, first - 1, -1):
        if place < history.newest:
            tail += history.sizes[place]
        if history.starts[place]:
            pinned = sum(history.sizes[each] for each in _pinned(history, place))
            found.append((place, marker + pinned + tail))
    return found[::-1]


def _pinned(history: Shape, through: int) -> tuple[int, ...]:
    return tuple(place for place in sorted({history.task, history.turn}) if place < through)


def left_out(history: Sequence[Message], cut: Cut, before: Cut | None = None) -> tuple[Message, ...]:
    """Return the messages that a cut leaves out, or only those that the cut before it had kept."""
    kept = () if before is None else tuple(place for place in before.pinned if place not in cut.pinned)
    first = 0 if before is None else before.through
    return tuple(history[place] for place in (*kept, *range(first, cut.through)) if place not in cut.pinned)


def all_trusted(messages: Sequence[Message]) -> bool:
    """Tell whether everything in some messages came from places that are trusted; what a model wrote never does."""
    return all(isinstance(part, (Text, ToolResult)) and part.trusted for each in messages for part in each.parts)


def marker_for(cut: Cut, strategy: ContextStrategy, summary: str = "", *, trusted: bool = False) -> Text | None:
    """Say in place of what is left out that it is, or what it was about; a sliding window says nothing."""
    match strategy:
        case "sliding_window":
            return None
        case "summarize" if summary:
            return Text(f"{marker_text(cut.dropped)} A summary of them:\n{summary}", "model", trusted, "summarized")
        case "compact" | "summarize":
            return Text(marker_text(cut.dropped), "config", reason="compacted")


def marker_text(dropped: int) -> str:
    """Say how much is left out."""
    return f"[{dropped} earlier {'message is' if dropped == 1 else 'messages are'} left out here.]"


def view(history: Sequence[Message], cut: Cut | None = None, marker: Text | None = None) -> tuple[Message, ...]:
    """Put together what is sent: the task, the marker, what opened the turn, and everything from the cut on.

    Providers want the two sides to take turns, so messages to the model that follow each other become one.
    """
    if cut is None:
        return _merged(history)
    pinned = [_words(history[place]) for place in cut.pinned]
    said = [] if marker is None else [Message("user", (marker,))]
    return _merged([*pinned[:1], *said, *pinned[1:], *history[cut.through :]])


def _words(message: Message) -> Message:
    """Leave out the results in a message whose calls are left out."""
    if may_start(message):
        return message
    return Message(message.role, tuple(part for part in message.parts if not isinstance(part, ToolResult)))


def _merged(messages: Sequence[Message]) -> tuple[Message, ...]:
    merged: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        together = tuple(group)
        if role == "assistant" or len(together) == 1:
            merged.extend(together)
        else:
            merged.append(Message("user", tuple(part for message in together for part in message.parts)))
    return tuple(merged)


def shortened(message: Message, limit: int) -> Message:
    """Show only the beginning and the end of results that have more characters than `limit`."""
    cache, key = vars(message), f"shortened {limit}"
    if key not in cache:
        parts = tuple(_shortened(part, limit) if isinstance(part, ToolResult) else part for part in message.parts)
        cache[key] = message if parts == message.parts else Message(message.role, parts)
    return cache[key]


def _shortened(result: ToolResult, limit: int) -> ToolResult:
    """Leave out the middle, unless saying so would take as much room as it does."""
    whole = len(result.text)
    if whole <= limit:
        return result
    room = max(0, limit - len(_gap(result.id, whole, whole)))
    head, tail = room - room // 3, room // 3
    gap = _gap(result.id, whole - head - tail, head)
    text = f"{result.text[:head]}{gap}{result.text[whole - tail :]}"
    return msgspec.structs.replace(result, text=text) if len(text) < whole else result


def _gap(call: str, left: int, offset: int) -> str:
    return f'\n[{left} characters are left out here; read_output(call="{call}", offset={offset}) shows them.]\n'
