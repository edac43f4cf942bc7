"""The final text of a session: what its model said last."""

from collections.abc import Sequence
from typing import TypeGuard

from halter.core.messages import Message, Part, Text, ToolResult
from halter.loop.turn import HAND_OFF


def find_final_text(messages: Sequence[Message]) -> str:
    """Find the model's last text. An answer that was cut off and continued is one text.

    After a hand-off, it is the answer of the agent that took over the conversation.
    """
    if messages and (handed_over_texts := [part.text for part in messages[-1].parts if _is_hand_off_result(part)]):
        return handed_over_texts[-1]
    texts: list[str] = []
    for message in reversed(messages):
        if message.role == "assistant":
            texts.append("".join([part.text for part in message.parts if isinstance(part, Text)]))
        elif not _continues_turn(message) if texts else _is_unanswered(message):
            break
    return "".join(reversed(texts))


def _is_hand_off_result(part: Part) -> TypeGuard[ToolResult]:
    return isinstance(part, ToolResult) and part.outcome == "ok" and part.tool.startswith(HAND_OFF)


def _is_unanswered(message: Message) -> bool:
    return any(isinstance(part, Text) and not part.reason for part in message.parts)


def _continues_turn(message: Message) -> bool:
    return all(isinstance(part, Text) and part.reason == "max_tokens_recovery" for part in message.parts)
