"""What a session has said and heard, as its model is shown it: a list that only grows, and a cut that moves forward."""

from collections.abc import Sequence
from typing import Final

from halter.brain.context import Cut, Fits, Shape, TooLarge, fit, may_start, newest, shortened, view
from halter.brain.meter import size
from halter.core.messages import Message, Text, ToolCall, ToolResult
from halter.core.vocabulary import Outcome

SHOWN: Final = 16_000
"""How many characters of one result a model is shown; the rest it can read with `read_output`."""

LONGEST_NAME: Final = 200
"""How many characters of a tool's name are kept: no tool has a longer one, and a model may write anything."""


class Transcript:
    """The messages of a session. What is sent is kept from request to request, so that a step costs what is new."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.cut: Cut | None = None
        self.task = 0
        self.turn = 0
        self._marker: Text | None = None
        self._starts: list[bool] = []
        self._sent: list[Message] = []
        self._size = 0

    @property
    def size(self) -> int:
        """How many tokens what is sent has at most."""
        return self._size

    @property
    def sent(self) -> tuple[Message, ...]:
        """What is sent, without what is added at the end of each request."""
        return tuple(self._sent)

    def opened(self, message: Message) -> None:
        """Add the message that opens a turn."""
        self.turn = len(self.messages)
        self.add(message)

    def add(self, message: Message) -> None:
        """Add a message; what the model is told in a row is told at once."""
        message = shortened(message, SHOWN)
        self.messages.append(message)
        self._starts.append(may_start(message))
        last = self._sent[-1] if self._sent else None
        if last is not None and last.role == message.role == "user":
            merged = Message("user", (*last.parts, *message.parts))
            self._size += size(merged) - size(last)
            self._sent[-1] = merged
        else:
            self._size += size(message)
            self._sent.append(message)

    def fit(self, window: int, tokens: Sequence[int], marker: int) -> Cut | Fits | TooLarge:
        """Decide whether what is sent fits a window, given how many tokens each message has.

        What an earlier turn was told and never answered may be left out, and so may a task that can never be sent.
        """
        first = max(newest(self.messages), self.turn)
        task = self.task if tokens[self.task] <= window else self.turn
        shape = Shape(sizes=tokens, starts=self._starts, task=task, turn=self.turn, newest=first)
        return fit(shape, window, self.cut, marker=marker)

    def cut_at(self, cut: Cut, marker: Text | None) -> None:
        """Leave out everything before a place, except what is pinned."""
        self.cut, self._marker = cut, marker
        self._sent = list(view(self.messages, cut, marker))
        self._size = sum(map(size, self._sent))

    @property
    def marker(self) -> Text | None:
        """What stands in place of the messages that are left out."""
        return self._marker


def named(calls: Sequence[ToolCall], turn: int, step: int) -> tuple[ToolCall, ...]:
    """Give calls names of our own: those of a model may be missing, or the same twice."""
    return tuple(
        ToolCall(f"c{turn}_{step}_{index}", call.tool[:LONGEST_NAME], call.arguments, call.group)
        for index, call in enumerate(calls)
    )


def call_id(session: str, call: ToolCall) -> str:
    """Tell the id of a call in the whole store; it is the same after a crash."""
    return f"{session}.{call.id}"


def result_of(call: ToolCall, outcome: Outcome, text: str, partial: str = "", simulation: str = "") -> ToolResult:
    """Say what became of a call as its model is told: a refusal with its code, a failure with what came before it."""
    said = text if outcome == "ok" else f"[{outcome}] {text}"
    parts = (said, partial, simulation)
    return ToolResult(call.id, call.tool, outcome, "\n\n".join(part for part in parts if part))
