"""The bodies of events as text: what people, models and tools said, and a session as a conversation."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    FilesGiven,
    FindingEmitted,
    GuardrailTriggered,
    HistoryGiven,
    NotificationQueued,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    TurnStarted,
    Unknown,
)
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult
from halter.core.ports import Stored
from halter.core.text import decode_body, shorten
from halter.present.events import append_reason, format_charge, parse_content, summarize_event
from halter.present.moments import format_moment


def describe_event(event: AnyEvent | Unknown, body: bytes) -> str:
    """Render the body of an event: the text and calls of messages and replies, the parts of findings and notices."""
    try:
        match event:
            case TurnStarted():
                return _parts(msgspec.json.decode(body, type=Message).parts)
            case FilesGiven():
                return _parts(msgspec.json.decode(body, type=list[Text]))
            case HistoryGiven():
                messages = msgspec.json.decode(body, type=list[Message])
                return "\n".join(text for message in messages if (text := _parts(message.parts)))
            case RequestSettled(outcome="ok"):
                return _parts(msgspec.json.decode(body, type=Reply).parts)
            case RequestStarted():
                return ""
            case FindingEmitted() | NotificationQueued():
                content = parse_content(body)
                parts = (content.heading, content.text, f'"{content.quote}"' if content.quote else "")
                return "\n".join(part for part in parts if part) or decode_body(body)
            case _:
                return decode_body(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return decode_body(body)


def describe_stored_event(stored_event: Stored) -> str:
    if stored_event.erased:
        return "(erased)"
    if stored_event.blob:
        return f"(blob {stored_event.blob[:12]}…)"
    return describe_event(stored_event.event, stored_event.body or b"")


MAX_ENTRY_LENGTH: Final = 2000
"""Maximum number of characters of one text in a conversation."""


def build_conversation(events: Sequence[Stored]) -> list[tuple[str, str]]:
    """Render a session as a conversation: the model's input and answers, and each call with its outcome."""
    settlement_by_call = {each.event.call: each for each in events if isinstance(each.event, CallSettled)}
    lines: list[tuple[str, str]] = []
    last_day = ""
    for stored_event in events:
        speaker, text = _render_entry(stored_event, settlement_by_call)
        if not text:
            continue
        day, _, hour = format_moment(stored_event.at).partition(" ")
        if day != last_day:
            last_day = day
            lines.append(("date", day))
        lines.append((hour, f"{speaker}: {text}"))
    return lines


def _render_entry(stored_event: Stored, settled: Mapping[str, Stored]) -> tuple[str, str]:
    event = stored_event.event
    match event:
        case TurnStarted():
            return "asked", shorten(describe_stored_event(stored_event), MAX_ENTRY_LENGTH)
        case RequestSettled(outcome="ok"):
            return "answer", shorten(_read_reply_text(stored_event), MAX_ENTRY_LENGTH)
        case CallStarted():
            return f"call {event.tool}", _pair(describe_stored_event(stored_event), settled.get(event.call))
        case CallRefused():
            arguments = shorten(describe_stored_event(stored_event), MAX_ENTRY_LENGTH)
            return f"call {event.tool}", f"{arguments}\n→ {event.outcome}: {event.sentence}".lstrip()
        case DecisionAsked() | DecisionMade() | CostCapReached() | GuardrailTriggered() | SessionEnded():
            return stored_event.kind.replace("_", " "), summarize_event(stored_event).text
        case _:
            return "", ""


def _read_reply_text(stored_event: Stored) -> str:
    """Return the text of a reply; its calls are shown where they start."""
    if stored_event.erased or stored_event.blob:
        return describe_stored_event(stored_event)
    try:
        return msgspec.json.decode(stored_event.body or b"", type=Reply).text
    except (msgspec.DecodeError, ValueError, RecursionError):
        return describe_stored_event(stored_event)


def _pair(arguments: str, end: Stored | None) -> str:
    call_text = shorten(arguments, MAX_ENTRY_LENGTH)
    if end is None or not isinstance(end.event, CallSettled):
        return f"{call_text}\n→ running, or outcome unknown".lstrip()
    outcome = f"{end.event.outcome}{format_charge(end.event.charge)}"
    text = end.event.error or describe_stored_event(end)
    return f"{call_text}\n→ {outcome}{append_reason(shorten(text, MAX_ENTRY_LENGTH))}".lstrip()


def _parts(parts: Sequence[Text | ToolCall | ToolResult]) -> str:
    texts = [f"{part.tool} {part.arguments}" if isinstance(part, ToolCall) else part.text for part in parts]
    return "\n".join(text for text in texts if text)
