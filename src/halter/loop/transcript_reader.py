"""The messages of a session up to one of its events, with which another session starts."""

from collections.abc import Iterable, Sequence

import msgspec

from halter.core.errors import ConfigError
from halter.core.events import CallRefused, HistoryGiven
from halter.core.messages import Message, Part, Text, ToolCall, ToolResult
from halter.core.ports import Store, Stored, read_body
from halter.loop.history import SessionHistory, is_erased
from halter.loop.transcript import Transcript


class Past(msgspec.Struct, frozen=True):
    """The messages of a session up to an event.

    `has_denial`: a person denied a call with untrusted values. `has_erased_text`: some of the text is erased.
    """

    messages: tuple[Message, ...]
    has_denial: bool = False
    has_erased_text: bool = False


class _WholeTranscript(Transcript):
    """A transcript that does not shorten results. The session that starts with it shortens them."""

    def add(self, message: Message) -> None:
        self.messages.append(message)


async def read_past(session: str, events: Sequence[Stored], store: Store) -> Past:
    """Fold events into messages, as the session's loop does. An unfinished last step is left out."""
    history, erased_events = SessionHistory(session), list[Stored]()
    history.transcript = _WholeTranscript()

    async def read_event_body(stored: Stored) -> bytes:
        body = await read_body(store, stored)
        if is_erased(stored, body):
            erased_events.append(stored)
        return body

    await history.apply(events, read_event_body)
    history.flush(events[-1].at if events else 0)
    has_denied_call = any(_is_denial(stored) for stored in events)
    return Past(tuple(_drop_open_step(history.transcript.messages)), has_denied_call, bool(erased_events))


def _is_denial(stored: Stored) -> bool:
    match stored.event:
        case CallRefused(outcome="approval_denied", decision=decision, flaws=flaws):
            return bool(decision and flaws)
        case HistoryGiven(denied=denied):
            return denied
        case _:
            return False


def has_denial(messages: Iterable[Message]) -> bool:
    """Return whether a person denied a call of a history, before the call or at the end of its turn.

    The messages do not say whether that call had untrusted values, so any denial counts.
    """
    return any(_tells_denial(part) for message in messages for part in message.parts)


def _tells_denial(part: Part) -> bool:
    match part:
        case ToolResult():
            return part.outcome == "approval_denied"
        case Text():
            return part.reason == "staged" and "approval_denied" in part.text
        case ToolCall():
            return False


def _drop_open_step(messages: Sequence[Message]) -> Sequence[Message]:
    last_message = messages[-1] if messages else None
    has_open_calls = last_message is not None and any(isinstance(part, ToolCall) for part in last_message.parts)
    return messages[:-1] if has_open_calls else messages


def number_calls(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Give the calls new ids, which no call of the new session has.

    Raises ConfigError for a call without a result, or a result without a call: no provider accepts such a history.
    """
    names: dict[str, str] = {}
    renumbered: list[Message] = []
    count, open_calls = 0, set[str]()
    for message in messages:
        parts = list[Part]()
        for part in message.parts:
            match part:
                case ToolCall():
                    names[part.id], count = f"h{count}", count + 1
                    open_calls.add(part.id)
                    parts.append(msgspec.structs.replace(part, id=names[part.id]))
                case ToolResult() if part.id in open_calls:
                    open_calls.remove(part.id)
                    parts.append(msgspec.structs.replace(part, id=names[part.id]))
                case ToolResult():
                    raise ConfigError(f"The history has a result of {part.tool} without its call ({part.id!r}).")
                case Text():
                    parts.append(part)
        renumbered.append(msgspec.structs.replace(message, parts=tuple(parts)))
    if open_calls:
        raise ConfigError(f"The history has a call without its result ({', '.join(sorted(open_calls))}).")
    return tuple(renumbered)
