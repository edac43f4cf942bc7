"""Where a history that outgrows its model's window is cut, and what is sent in place of the dropped messages.

A cut drops all messages before an index, except the task and the message that opened the turn, and lasts until the
window is full again. A cut never separates a call from its result.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec

from halter.core.messages import Message, Part, Text, ToolResult
from halter.spec.models import ContextStrategy

TARGET_FILL: Final = 0.6
"""Fraction of the window that is filled after a cut. The rest is for growth until the next cut."""
MARKER_TOKENS: Final = 128
"""Upper bound of the tokens of a marker without a summary."""


class HistoryShape(msgspec.Struct, frozen=True, kw_only=True):
    """The input for a cut.

    `sizes` are the tokens of each message, and `can_start` says for each if a shortened history may begin with it.
    `task_index` is the task, `turn_index` the message that opened the turn, `newest_index` the first unanswered
    message, from which on nothing is dropped.
    """

    sizes: Sequence[int]
    can_start: Sequence[bool]
    task_index: int
    turn_index: int
    newest_index: int


class Cut(msgspec.Struct, frozen=True):
    """A cut drops the messages before `tail_start`, except the pinned ones."""

    tail_start: int
    pinned: tuple[int, ...]

    @property
    def dropped(self) -> int:
        return self.tail_start - len(self.pinned)


class Fits(msgspec.Struct, frozen=True):
    pass


class TooLarge(msgspec.Struct, frozen=True):
    """Even the shortest possible history does not fit the window."""

    min_tokens: int
    window: int


def can_start(message: Message) -> bool:
    """Return whether a shortened history may begin with a message. A message with results cannot."""
    if message.role != "assistant":
        for part in message.parts:
            if isinstance(part, ToolResult):
                return False
    return True


def find_unanswered(history: Sequence[Message]) -> int:
    """Find the index of the first unanswered message. Results count from their calls on."""
    index = len(history)
    while index and history[index - 1].role == "user":
        index -= 1
    if index and (index == len(history) or not all(map(can_start, history[index:]))):
        index -= 1
    return index


def fit_history(
    history: HistoryShape, window: int, cut: Cut | None = None, *, marker: int = 0, target: float = TARGET_FILL
) -> Cut | Fits | TooLarge:
    """Decide where to cut a history that does not fit with its current cut.

    `window` is the space for messages, and `marker` the size of the text that replaces dropped ones, both in tokens. A
    cut drops as little as possible to reach the fraction `target` of the window. If the messages that must stay are
    larger than that, the cut fills half of the remaining space.
    """
    total = _total(history, cut, marker)
    if total <= window:
        return Fits()
    cut_points = _list_cut_places(history, 0 if cut is None else cut.tail_start, marker)
    minimum = min([total, *(kept_tokens for _, kept_tokens in cut_points)])
    if minimum > window:
        return TooLarge(minimum, window)
    goal = int(target * window)
    goal = goal if minimum <= goal else (minimum + window) // 2
    tail_start = next(index for index, kept_tokens in cut_points if kept_tokens <= goal)
    return Cut(tail_start, _list_pinned(history, tail_start))


def _total(history: HistoryShape, cut: Cut | None, marker: int) -> int:
    if cut is None:
        return sum(history.sizes)
    return marker + sum(history.sizes[index] for index in cut.pinned) + sum(history.sizes[cut.tail_start :])


def _list_cut_places(history: HistoryShape, first_index: int, marker: int) -> list[tuple[int, int]]:
    """List the possible cuts by index, with the tokens that remain after each. The first one keeps the most."""
    cut_points: list[tuple[int, int]] = []
    tail_tokens = sum(history.sizes[history.newest_index :])
    for index in range(history.newest_index, first_index - 1, -1):
        if index < history.newest_index:
            tail_tokens += history.sizes[index]
        if history.can_start[index]:
            pinned_tokens = sum(history.sizes[pinned_index] for pinned_index in _list_pinned(history, index))
            cut_points.append((index, marker + pinned_tokens + tail_tokens))
    return cut_points[::-1]


def _list_pinned(history: HistoryShape, tail_start: int) -> tuple[int, ...]:
    return tuple(index for index in sorted({history.task_index, history.turn_index}) if index < tail_start)


def list_dropped_messages(history: Sequence[Message], cut: Cut, previous_cut: Cut | None = None) -> tuple[Message, ...]:
    """List the messages that a cut drops, without those that a previous cut has dropped."""
    unpinned = () if previous_cut is None else tuple(index for index in previous_cut.pinned if index not in cut.pinned)
    first_index = 0 if previous_cut is None else previous_cut.tail_start
    return tuple(
        history[index] for index in (*unpinned, *range(first_index, cut.tail_start)) if index not in cut.pinned
    )


def are_all_trusted(messages: Sequence[Message]) -> bool:
    """Return whether all messages come from trusted sources. A model's own text does not."""
    return all(isinstance(part, (Text, ToolResult)) and part.trusted for each in messages for part in each.parts)


def make_marker(cut: Cut, strategy: ContextStrategy, summary: str = "", *, trusted: bool = False) -> Text | None:
    """Make the text that replaces dropped messages; None for a sliding window."""
    match strategy:
        case "sliding_window":
            return None
        case "summarize" if summary:
            return Text(f"{marker_text(cut.dropped)} A summary of them:\n{summary}", "model", trusted, "summarized")
        case "compact" | "summarize":
            return Text(marker_text(cut.dropped), "config", reason="compacted")


def marker_text(count: int) -> str:
    return f"[{count} earlier {'message is' if count == 1 else 'messages are'} left out here.]"


def build_history_view(
    history: Sequence[Message], cut: Cut | None = None, marker: Text | None = None
) -> tuple[Message, ...]:
    """Build the messages to send: the task, the marker, the turn's first message, and all messages from the cut on.

    Consecutive messages to the model are merged, because providers require alternating roles.
    """
    if cut is None:
        return _merge_messages(history)
    pinned_messages = [_drop_orphan_results(history[index]) for index in cut.pinned]
    marker_messages = [] if marker is None else [Message("user", (marker,))]
    return _merge_messages([*pinned_messages[:1], *marker_messages, *pinned_messages[1:], *history[cut.tail_start :]])


def _drop_orphan_results(message: Message) -> Message:
    """Remove the results of a message whose calls are dropped, and their files."""
    if can_start(message):
        return message
    return Message(message.role, tuple(part for part in message.parts if not _is_from_call(part)))


def _is_from_call(part: Part) -> bool:
    return isinstance(part, ToolResult) or (isinstance(part, Text) and part.origin == "tool")


def _merge_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    merged_messages: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        neighbours = tuple(group)
        if role == "assistant" or len(neighbours) == 1:
            merged_messages.extend(neighbours)
        else:
            merged_messages.append(Message("user", tuple(part for message in neighbours for part in message.parts)))
    return tuple(merged_messages)


def shorten_results(message: Message, limit: int) -> Message:
    """Shorten results longer than `limit` characters to their beginning and end."""
    if all(not isinstance(part, ToolResult) or len(part.text) <= limit for part in message.parts):
        return message
    cache, key = vars(message), f"shortened {limit}"
    if key not in cache:
        parts = tuple(_shorten_result(part, limit) if isinstance(part, ToolResult) else part for part in message.parts)
        cache[key] = message if parts == message.parts else Message(message.role, parts)
    return cache[key]


def _shorten_result(result: ToolResult, limit: int) -> ToolResult:
    """Remove the middle of a result, unless the note about it would be as long."""
    length = len(result.text)
    if length <= limit:
        return result
    excerpt_length = max(0, limit - len(_describe_gap(result.id, length, length)))
    head_length, tail_length = excerpt_length - excerpt_length // 3, excerpt_length // 3
    gap = _describe_gap(result.id, length - head_length - tail_length, head_length)
    text = f"{result.text[:head_length]}{gap}{result.text[length - tail_length :]}"
    return msgspec.structs.replace(result, text=text) if len(text) < length else result


def _describe_gap(call: str, remaining: int, offset: int) -> str:
    return f'\n[{remaining} characters are left out here; read_output(call="{call}", offset={offset}) shows them.]\n'
