"""What one request sends: what never changes first, then the history, then what is true only now.

A provider keeps the beginning of a prompt that it has seen before. So nothing that changes may stand before anything
that does not.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from halter.brain.meter import Size
from halter.brain.textcalls import as_text, explained, tagged
from halter.brain.transcript import Transcript
from halter.core.counting import most_tokens
from halter.core.messages import Message, Prompt, Text
from halter.core.mind import Mind
from halter.core.tools import ToolSpec

Facts = Callable[[], Mapping[str, Any]]
"""Tells what is known right now, by name."""
Volatile = Callable[[], str]
"""Says what is known right now."""


class Stable(msgspec.Struct, frozen=True):
    """What all requests of a session begin with, and how many tokens it has at most."""

    system: str
    tools: tuple[ToolSpec, ...]
    size: int
    digest: str


def stable(mind: Mind, offered: Sequence[ToolSpec], given: str = "") -> Stable:
    """Put together what never changes: the instructions, what people kept, and the tools, always in the same order."""
    tools = tuple(sorted(offered, key=lambda spec: spec.name))
    as_words = explained(tools) if mind.tool_calls == "text" else ""
    system = "\n\n".join(part for part in (mind.instructions, given, as_words) if part)
    tools = () if mind.tool_calls == "text" else tools
    prompt = Prompt(system=system, messages=(), tools=tools)
    return Stable(system, tools, most_tokens(prompt), sha256(msgspec.json.encode(prompt)).hexdigest())


class Made(msgspec.Struct, frozen=True):
    """A prompt, and how large it is."""

    prompt: Prompt
    size: Size


def made(
    start: Stable, transcript: Transcript, mind: Mind, volatile: str, nonce: str, *, last_words: bool = False
) -> Made:
    """Make a prompt. Last words are asked for without tools, and the history then shows calls as text."""
    messages = transcript.sent
    if mind.tool_calls == "text" or last_words:
        messages = tuple(map(as_text, messages))
    ending = "\n\n".join(part for part in (volatile, tagged(nonce) if nonce and not last_words else "") if part)
    prompt = Prompt(
        system=start.system,
        messages=with_ending(messages, ending),
        tools=() if last_words else start.tools,
        max_output_tokens=mind.max_output_tokens,
    )
    cut = transcript.cut.through if transcript.cut else 0
    prefix = f"{start.digest}/{cut}/{'last' if last_words else ''}"
    return Made(prompt, Size(prefix, start.size + transcript.size, len(ending.encode("utf-8", "surrogatepass")) + 64))


def with_ending(messages: Sequence[Message], ending: str) -> tuple[Message, ...]:
    """Add what is true only now: to the last thing that the model is told, or as a message of its own."""
    if not ending:
        return tuple(messages)
    part = Text(ending, "config", reason="volatile")
    if messages and messages[-1].role == "user":
        return (*messages[:-1], Message("user", (*messages[-1].parts, part)))
    return (*messages, Message("user", (part,)))
