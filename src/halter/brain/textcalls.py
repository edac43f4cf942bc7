"""Calls written as text, for models that know no other way: `<skill k7f2>read_file(path="app.log")</skill>`.

The opening tag carries a word that is new in every request. So what a model quotes, from a page that it fetched or from
its own older answers, is text and never runs: only a tag with this request's word counts. Calls in a `<parallel>` block
are made together, all others one after the other.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from halter.brain.literals import Malformed, Token, name_at, read_call, tokens_until
from halter.core.messages import Message, Part, Text, ToolCall, ToolResult
from halter.core.text import from_body
from halter.core.tools import ToolSpec

MOST_CALLS: Final = 64
"""How many calls one answer may ask for; what comes after is answered as one that cannot be read."""
MOST_TOKENS: Final = 100_000
"""How many names, values and signs one call may have."""
SHOWN: Final = 4000
"""How many characters are kept of what cannot be read; the words of the answer hold it all."""

_CLOSING: Final = "</skill>"
_BLOCK: Final = "<parallel>"
_BLOCK_END: Final = "</parallel>"


class Read(msgspec.Struct, frozen=True):
    """What an answer holds: all its words as they were written, then the calls in them.

    `cut` says that the answer ends inside a call, as far as anybody can tell: so it does when a model runs out of
    tokens, and when a quote is never closed.
    """

    parts: tuple[Text | ToolCall, ...]
    cut: bool = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that it asks for, in order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def read_calls(text: str, nonce: str) -> Read:
    """Find the calls in a model's answer; any text will do.

    A call that carries the nonce but cannot be read is a call all the same, with arguments that no tool accepts, so
    that the model is told. Where nobody can say how far such a call goes, nothing after it is read.
    """
    if not text:
        return Read(())
    words = Text(text, "model", trusted=False)
    if not nonce:
        return Read((words,))
    calls, cut = _calls(text, f"<skill {nonce}>")
    return Read((words, *calls), cut)


def _calls(text: str, opening: str) -> tuple[list[ToolCall], bool]:
    calls: list[ToolCall] = []
    place, block = 0, None
    while (start := text.find(opening, place)) >= 0:
        calls, block = _blocks(text, place, start, calls, block)
        inside = start + len(opening)
        found = tokens_until(_CLOSING, text, inside, MOST_TOKENS) if len(calls) < MOST_CALLS else None
        end = len(text) if found is None else found[1]
        calls.append(_call(found and found[0], text[inside:end], calls))
        if found is None:
            return calls, len(calls) <= MOST_CALLS
        place = end
    calls, _ = _blocks(text, place, len(text), calls, block)
    return calls, False


def _blocks(
    text: str, start: int, end: int, calls: list[ToolCall], block: int | None
) -> tuple[list[ToolCall], int | None]:
    """Look for the borders of blocks between two calls; `block` is the first call of one that is open.

    Only a block that is closed makes its calls one group: one after the other is what does no harm.
    """
    opened, closed = text.rfind(_BLOCK, start, end), text.find(_BLOCK_END, start, end)
    if block is not None and closed >= 0:
        calls = [*calls[:block], *(_grouped(call, calls[block].group) for call in calls[block:])]
        block = None
    if opened >= 0 and text.find(_BLOCK_END, opened, end) < 0:
        block = len(calls)
    return calls, block


def _grouped(call: ToolCall, group: int) -> ToolCall:
    return msgspec.structs.replace(call, group=group)


def _call(tokens: list[Token] | None, raw: str, before: Sequence[ToolCall]) -> ToolCall:
    name = f"text{len(before)}"
    group = before[-1].group + 1 if before else 0
    try:
        if tokens is not None:
            tool, arguments = read_call(tokens)
            return ToolCall(name, tool, _json(arguments), group)
    except Malformed:
        pass
    # No JSON begins like this, so no tool takes it for arguments.
    return ToolCall(name, name_at(raw, 0), f"<skill>{raw[:SHOWN]}", group)


def _json(arguments: dict[str, Any]) -> str:
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return written if written.isascii() or _encodable(written) else json.dumps(arguments)
    except ValueError as error:
        raise Malformed(str(error)) from None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def explained(tools: Sequence[ToolSpec]) -> str:
    """Tell a model which tools it has and how it calls them: the same words for every request."""
    if not tools:
        return ""
    return "\n\n".join((_HOW, *map(_tool, tools)))


_HOW: Final = """\
You can call tools. Write a call as one tag with the tool's name and its arguments by name:
<skill KEY>name(text="some words", count=3, items=[1, {"a": None}])</skill>
In place of KEY stands this request's key, which you are told at the end of what you are sent. A tag without it, or \
with an older one, is only text. Values are Python literals. Calls are made one after the other in the order in which \
you write them; those that do not depend on each other can be made together:
<parallel>
<skill KEY>first(a=1)</skill>
<skill KEY>second(b="x")</skill>
</parallel>
After your calls end your answer: you are sent their results. An answer without a call ends your turn.

Your tools, each with the JSON Schema of its arguments:"""


def _tool(spec: ToolSpec) -> str:
    return f"{spec.name}: {spec.description}\n{from_body(spec.schema)}"


def tagged(nonce: str) -> str:
    """Tell this request's key, for the end of the prompt."""
    return f"In this answer a call begins with <skill {nonce}> and ends with </skill>."


def as_text(message: Message) -> Message:
    """Show a message to a model that knows calls and results only as text."""
    cache = vars(message)
    if "as_text" not in cache:
        cache["as_text"] = Message(message.role, _as_text(message.parts))
    return cache["as_text"]


def _as_text(parts: Sequence[Part]) -> tuple[Text, ...]:
    """Drop calls, since they stand in the words beside them, unless another model made them in another way."""
    written = any(isinstance(part, Text) for part in parts)
    return tuple(
        part if isinstance(part, Text) else _told(part)
        for part in parts
        if not (written and isinstance(part, ToolCall))
    )


def _told(part: ToolCall | ToolResult) -> Text:
    match part:
        case ToolCall(tool=tool, arguments=arguments):
            return Text(f"I called {tool} with {arguments}.", "model", trusted=False)
        case ToolResult(tool=tool, outcome=outcome, text=text, origin=origin, trusted=trusted):
            return Text(f"Result of {tool} ({outcome}): {text}", origin, trusted)
