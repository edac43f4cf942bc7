"""What was said in a session up to one of its events, as messages for another session to begin with."""

from collections.abc import Iterable, Sequence

import msgspec

from halter.core import events as ev
from halter.core.errors import ConfigError
from halter.core.messages import Message, Part, Text, ToolCall, ToolResult
from halter.core.ports import Store, Stored, read_body
from halter.loop.history import SessionHistory, Transcript, is_erased


class Past(msgspec.Struct, frozen=True):
    """The messages up to an event.

    `denied`: a person denied a call whose values others had written. `erased`: some of it is gone.
    """

    messages: tuple[Message, ...]
    denied: bool = False
    erased: bool = False


class _WholeTranscript(Transcript):
    """Keeps results whole, however long: who begins with them shortens them anew."""

    def add(self, message: Message) -> None:
        self.messages.append(message)


async def read_past(session: str, events: Sequence[Stored], store: Store) -> Past:
    """Fold events into messages, as the session's own loop does. A step without all of its results is left out."""
    history, gone = SessionHistory(session), list[Stored]()
    history.transcript = _WholeTranscript()

    async def read_stored(stored: Stored) -> bytes:
        body = await read_body(store, stored)
        if is_erased(stored, body):
            gone.append(stored)
        return body

    await history.apply(events, read_stored)
    history.flush(events[-1].at if events else 0)
    denied = any(_is_denial(stored) for stored in events)
    return Past(number_calls(_drop_open_step(history.transcript.messages)), denied, bool(gone))


def _is_denial(stored: Stored) -> bool:
    match stored.event:
        case ev.CallRefused(outcome="approval_denied", decision=decision, flaws=flaws):
            return bool(decision and flaws)
        case ev.HistoryGiven(denied=denied):
            return denied
        case _:
            return False


def has_denial(messages: Iterable[Message]) -> bool:
    """Whether a person denied a call of a history, at once or at the end of a turn.

    What others had to do with that call is not said there: they may have.
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
    last = messages[-1] if messages else None
    waits = last is not None and any(isinstance(part, ToolCall) for part in last.parts)
    return messages[:-1] if waits else messages


def number_calls(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Give the calls new ids, which no call of the session that begins with them has.

    A call without a result, or a result without its call, is refused: no provider takes such a history.
    """
    names: dict[str, str] = {}
    numbered: list[Message] = []
    count, waiting = 0, set[str]()
    for message in messages:
        parts = list[Part]()
        for part in message.parts:
            match part:
                case ToolCall():
                    names[part.id], count = f"h{count}", count + 1
                    waiting.add(part.id)
                    parts.append(msgspec.structs.replace(part, id=names[part.id]))
                case ToolResult() if part.id in waiting:
                    waiting.remove(part.id)
                    parts.append(msgspec.structs.replace(part, id=names[part.id]))
                case ToolResult():
                    raise ConfigError(f"The history has a result of {part.tool} without its call ({part.id!r}).")
                case Text():
                    parts.append(part)
        numbered.append(Message(message.role, tuple(parts)))
    if waiting:
        raise ConfigError(f"The history has a call without its result ({', '.join(sorted(waiting))}).")
    return tuple(numbered)
