r"""A model without network: it answers from a script, as slowly and as badly as the script says.

A script is a list of replies. Each is used once, in order, unless it says `repeat: true`. One with a `when` is skipped
until the last message of the user contains that text, one with an `unless` while any message does. `finds` is a
pattern that some message must match; its named groups can be used in the reply, as `${name}`.

    - text: I will look at the log.
      calls: [{tool: read_file, arguments: {path: app.log}}]
      usage: {input_tokens: 900, output_tokens: 40}
      takes: 2s
    - fails: {kind: RateLimited, message: try again later, unavailable: true, billed: false, retry_after: 30s}
    - when: how much
      text: It was seven.
    - repeat: true
      finds: The document is (?P<name>[^\\n]+)\\.
      calls: [{tool: retrieve_chunks, arguments: {file: "${name}"}}]
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.clock import SECOND, Clock, parse_duration
from halter.core.errors import ConfigError, ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.messages import (
    Prompt,
    Reply,
    StopReason,
    Text,
    TextListener,
    ToolCall,
    ToolResult,
    bound_prompt_tokens,
)
from halter.core.text import clean
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage

SCRIPTED: Final = ModelName("scripted", "script")

KeyPath = tuple[str | int, ...]
LocateKey = Callable[[KeyPath], str]


class ScriptedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """How a model fails. Unless it is only unavailable, or needs a person, the same request is never answered."""

    kind: str = "ModelError"
    message: str = "the script says so"
    billed: bool = True
    retry_after: int | None = None
    unavailable: bool = False
    needs_person: bool = False

    def error(self, usage: Usage | None = None) -> ModelError:
        sort = ModelUnavailable if self.unavailable else ModelUnusable if self.needs_person else ModelRejected
        text, wait = f"{self.kind}: {self.message}", self.retry_after
        return sort(text, billed=self.billed, usage=usage, final=True, retry_after=wait)


class ScriptLine(msgspec.Struct, frozen=True, kw_only=True):
    reply: Reply
    fails: ScriptedFailure | None = None
    takes: int = 0
    when: str = ""
    unless: str = ""
    finds: str = ""
    repeat: bool = False


def say(text: str, usage: Usage | None = None, *, takes: int = 0, when: str = "") -> ScriptLine:
    return ScriptLine(reply=Reply((Text(text, "model", trusted=False),), "end", usage), takes=takes, when=when)


def call(tool: str, /, **arguments: Any) -> ScriptLine:
    asked = ToolCall(tool, tool, msgspec.json.encode(arguments).decode())
    return ScriptLine(reply=Reply((asked,), "calls"))


class Scripted:
    """Answers from a script. `asked` are the prompts that it received, in order."""

    base_url: None = None

    def __init__(self, lines: Sequence[ScriptLine], clock: Clock, name: ModelName = SCRIPTED) -> None:
        self.name = name
        self.asked: list[Prompt] = []
        self._lines = list(lines)
        self._length = len(lines)
        self._clock = clock

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.asked.append(prompt)
        line = self._next(prompt)
        if line.takes:
            await self._clock.sleep(line.takes)
        if on_text is not None and line.reply.text:
            on_text(line.reply.text)
        if line.fails is not None:
            raise line.fails.error(line.reply.usage)
        return line.reply

    def _next(self, prompt: Prompt) -> ScriptLine:
        last = next((message for message in reversed(prompt.messages) if message.role == "user"), None)
        parts = () if last is None else last.parts
        text = "\n".join(part.text for part in parts if isinstance(part, (Text, ToolResult)))
        everything: str | None = None
        for index, line in enumerate(self._lines):
            if line.when not in text:
                continue
            if everything is None and (line.unless or line.finds):
                everything = "\n".join(_words(prompt))
            found = _match_line(line, everything or "")
            if found is not None:
                if not line.repeat:
                    self._lines.pop(index)
                return found
        raise ModelRejected(self._run_out(text), billed=False)

    def _run_out(self, text: str) -> str:
        if not self._lines:
            return f"ScriptRanOut: all {self._length} replies of the script have been given; write another one"
        return f"ScriptRanOut: none of the {len(self._lines)} replies left is for {text[:80]!r}; see their `when`"


def _match_line(line: ScriptLine, everything: str) -> ScriptLine | None:
    if line.unless and line.unless in everything:
        return None
    if not line.finds:
        return line
    found = _pattern(line.finds).search(everything)
    if found is None:
        return None
    words: Mapping[str, str] = {name: word or "" for name, word in found.groupdict().items()}
    return msgspec.structs.replace(line, reply=_fill_reply(line.reply, words))


def _words(prompt: Prompt) -> Iterator[str]:
    for message in prompt.messages:
        for part in message.parts:
            yield part.arguments if isinstance(part, ToolCall) else part.text


def _pattern(written: str) -> Any:
    """Compile a pattern that matches in linear time."""
    import re2  # pyright: ignore[reportMissingTypeStubs]

    return cast("Any", re2).compile(written)


def _fill_reply(reply: Reply, words: Mapping[str, str]) -> Reply:
    """Fill the found groups into a reply; into arguments as JSON text."""

    def put(text: str, spell: Callable[[str], str]) -> str:
        return _GROUP.sub(lambda match: spell(words[match[1]]) if match[1] in words else match[0], text)

    parts = tuple(
        msgspec.structs.replace(part, text=put(part.text, str))
        if isinstance(part, Text)
        else msgspec.structs.replace(part, arguments=put(part.arguments, _spell_as_json))
        for part in reply.parts
    )
    return msgspec.structs.replace(reply, parts=parts)


def _spell_as_json(word: str) -> str:
    return msgspec.json.encode(clean(word)).decode()[1:-1]


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a script: arguments as a mapping, or as the text that a careless model would send."""

    tool: str
    arguments: dict[str, Any] | str = {}


class _Fails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str = "ModelError"
    message: str = "the script says so"
    billed: bool = True
    retry_after: str | float | None = None
    unavailable: bool = False
    needs_person: bool = False


class _Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str = ""
    calls: tuple[_Call, ...] = ()
    stop: StopReason | None = None
    usage: _Usage | None = None
    fails: _Fails | None = None
    takes: str | float = 0
    when: str = ""
    unless: str = ""
    finds: str = ""
    repeat: bool = False


_KEYS: Final = ", ".join(f"`{key}`" for key in _Written.__struct_fields__)
_GROUP: Final = re.compile(r"\$\{(\w+)\}")
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_STEP: Final = re.compile(r"\[(\d+)\]|\.(\w+)")


def make_scripted_model(value: Any, where: LocateKey, clock: Clock, name: ModelName = SCRIPTED) -> Scripted:
    if not isinstance(value, list):
        raise ConfigError(f"{where(())}: a script is a list of replies, each with some of {_KEYS}.")
    lines = [_line(each, index, where) for index, each in enumerate(cast("list[Any]", value))]
    return Scripted(lines, clock, name)


def _line(value: Any, index: int, where: LocateKey) -> ScriptLine:
    try:
        written = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        what, path = split_validation_error(str(error))
        raise ConfigError(f"{where((index, *path))}: {what}. A reply is made of {_KEYS}.") from None
    calls = tuple(
        ToolCall(
            f"{index}.{number}",
            call.tool,
            call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode(),
        )
        for number, call in enumerate(written.calls)
    )
    words = (Text(written.text, "model", trusted=False),) if written.text else ()
    fails = written.fails
    return ScriptLine(
        reply=Reply(
            (*words, *calls),
            written.stop or ("calls" if calls else "end"),
            _parse_usage(written.usage, where((index, "usage"))),
        ),
        fails=None
        if fails is None
        else (
            ScriptedFailure(
                kind=fails.kind,
                message=fails.message,
                billed=fails.billed,
                retry_after=None
                if fails.retry_after is None
                else _micros(fails.retry_after, where((index, "fails", "retry_after"))),
                unavailable=fails.unavailable,
                needs_person=fails.needs_person,
            )
        ),
        takes=_micros(written.takes, where((index, "takes"))),
        when=written.when,
        unless=written.unless,
        finds=_check_pattern(written.finds, where((index, "finds"))),
        repeat=written.repeat,
    )


def _check_pattern(pattern: str, place: str) -> str:
    if not pattern:
        return ""
    import re2  # pyright: ignore[reportMissingTypeStubs]

    try:
        _pattern(pattern)
    except cast("Any", re2).error as error:
        raise ConfigError(f"{place}: `finds` is no pattern that can be read: {error}.") from None
    return pattern


def split_validation_error(error: str) -> tuple[str, KeyPath]:
    """Split a validator's message into what is wrong and the path to it."""
    match = _PLACE.match(error)
    if match is None:
        return error, ()
    steps = [int(place) if place else key for place, key in _STEP.findall(match["path"] or "")]
    return match["what"], (*steps, *_UNKNOWN.findall(match["what"]))


def _parse_usage(written: _Usage | None, place: str) -> Usage | None:
    if written is None:
        return None
    used = (written.input_tokens, written.output_tokens, written.cache_read_tokens, written.cache_write_tokens)
    try:
        return Usage(*used)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _micros(written: str | float, place: str) -> int:
    if isinstance(written, str):
        try:
            return parse_duration(written)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    if not 0 <= written < 10**9:
        raise ConfigError(f"{place}: {written} is not a duration; write it like 2s.")
    return round(written * SECOND)
