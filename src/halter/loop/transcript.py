"""The messages of a session, and those that are sent to its model.

A history only grows, and a cut only moves forward. Each request therefore extends the previous one, and the provider's
cache stays valid.
"""

from collections.abc import Sequence
from typing import Final

from halter.core.messages import (
    MESSAGE_OVERHEAD,
    Message,
    Text,
    bound_message_tokens,
    count_audio_tokens,
)
from halter.loop.history_cut import (
    Cut,
    Fits,
    HistoryShape,
    TooLarge,
    build_history_view,
    can_start,
    find_unanswered,
    fit_history,
    shorten_results,
)
from halter.loop.text_calls import to_text_message


def measure_message(message: Message) -> int:
    """Bound the tokens of a message, computed once and cached."""
    cache = vars(message)
    if "size" not in cache:
        cache["size"] = bound_message_tokens(message)
    return cache["size"]


MAX_RESULT_LENGTH: Final = 16_000
"""Maximum length of a result for a model, in characters; `read_output` reads the rest."""


class Transcript:
    """The messages of a session, and those to send, which are cached so that a step processes only new messages."""

    __slots__ = ("_as_text", "audio", "cut", "marker", "messages", "sent", "size", "task", "turn")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.cut: Cut | None = None
        self.marker: Text | None = None
        self.task = 0
        self.turn = 0
        self.sent = self.messages
        """The messages to send, without the ending of each request. Only the last one can still change.

        This is the list `messages` itself, as long as all of them are sent unchanged.
        """
        self._as_text: tuple[Message, ...] = ()
        self.size = 0
        """Upper bound of the tokens of the messages to send."""
        self.audio = 0
        """Upper bound of the audio tokens among them."""

    def open_turn(self, message: Message) -> None:
        self.turn = len(self.messages)
        self.add(message)

    def add(self, message: Message) -> None:
        """Add a message. Consecutive messages to the model are merged."""
        size = bound_message_tokens(message)
        if size > MAX_RESULT_LENGTH:
            message = shorten_results(message, MAX_RESULT_LENGTH)
            size = bound_message_tokens(message)
        for part in message.parts:
            if type(part) is Text and part.tokens:
                self.audio += count_audio_tokens((Message(message.role, (part,)),))
        sent_messages, is_shared = self.sent, self.sent is self.messages
        if message.role == "user" and sent_messages and sent_messages[-1].role == "user":
            sent_messages = self.sent = sent_messages.copy() if is_shared else sent_messages
            sent_messages[-1] = Message("user", (*sent_messages[-1].parts, *message.parts))
            self.size -= MESSAGE_OVERHEAD
        elif not is_shared:
            sent_messages.append(message)
        self.messages.append(message)
        self.size += size

    def to_text(self) -> list[Message]:
        """Render the messages to send for a model that receives calls and results as text."""
        new_messages = self.sent[len(self._as_text) :]
        self._as_text += tuple(map(to_text_message, new_messages[:-1]))
        return [*self._as_text, *map(to_text_message, new_messages[-1:])]

    def fit(self, window: int, tokens: Sequence[int], marker: int) -> Cut | Fits | TooLarge:
        """Fit the messages to a window, given the tokens of each message.

        A cut may drop an unanswered message of an earlier turn, and a task that alone exceeds the window.
        """
        newest_index = max(find_unanswered(self.messages), self.turn)
        task = self.task if tokens[self.task] <= window else self.turn
        starts = [can_start(message) for message in self.messages]
        shape = HistoryShape(
            sizes=tokens, can_start=starts, task_index=task, turn_index=self.turn, newest_index=newest_index
        )
        return fit_history(shape, window, self.cut, marker=marker)

    def cut_at(self, cut: Cut, marker: Text | None) -> None:
        self.cut, self.marker, self._as_text = cut, marker, ()
        self.sent = list(build_history_view(self.messages, cut, marker))
        self.size = sum(map(measure_message, self.sent))
        self.audio = count_audio_tokens(self.sent)
