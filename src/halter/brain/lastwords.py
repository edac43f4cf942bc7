"""What a model said last, as one answer."""

from collections.abc import Sequence

from halter.core.messages import Message, Text


def last_words(messages: Sequence[Message]) -> str:
    """Find what the model said last; an answer that was cut off and gone on with is one answer."""
    said: list[str] = []
    for message in reversed(messages):
        if message.role == "assistant":
            said.append("".join(part.text for part in message.parts if isinstance(part, Text)))
        elif not _goes_on(message) if said else _is_news(message):
            break
    return "".join(reversed(said))


def _is_news(message: Message) -> bool:
    """Tell whether somebody said something that the model has not answered."""
    return any(isinstance(part, Text) and not part.reason for part in message.parts)


def _goes_on(message: Message) -> bool:
    return all(isinstance(part, Text) and part.reason == "max_tokens_recovery" for part in message.parts)
