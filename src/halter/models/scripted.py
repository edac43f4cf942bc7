r"""A model without network: it answers from a script, which can also delay or fail its replies.

A script is a list of replies. Each is used once, in order, unless it has `repeat: true`. A reply with `when` is skipped
until the last message of the user contains that text; one with `unless` is skipped while any message contains it.
`finds` is a pattern that some message must match; its named groups can be used in the reply, as `${name}`.

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
from halter.core.renamed import RenamedAttribute
from halter.core.text import clean
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage

SCRIPTED: Final = ModelName("scripted", "script")

KeyPath = tuple[str | int, ...]
LocateKey = Callable[[KeyPath], str]


class ScriptedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of a model. Unless it is `unavailable` or `needs_person`, the request is rejected and never retried."""

    kind: str = "ModelError"
    message: str = "the script says so"
    billed: bool = True
    retry_after: int | None = None
    unavailable: bool = False
    needs_person: bool = False

    def error(self, usage: Usage | None = None) -> ModelError:
        error_type = ModelUnavailable if self.unavailable else ModelUnusable if self.needs_person else ModelRejected
        text, wait = f"{self.kind}: {self.message}", self.retry_after
        return error_type(text, billed=self.billed, usage=usage, final=True, retry_after=wait)


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
    tool_call = ToolCall(tool, tool, msgspec.json.encode(arguments).decode())
    return ScriptLine(reply=Reply((tool_call,), "calls"))


class Scripted:
    """A model that answers from a script. `requests` has the prompts that it received, in order."""

    base_url: None = None
    asked = RenamedAttribute("requests")

    def __init__(self, lines: Sequence[ScriptLine], clock: Clock, name: ModelName = SCRIPTED) -> None:
        self.name = name
        self.requests: list[Prompt] = []
        self._lines = list(lines)
        self._length = len(lines)
        self._clock = clock

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        line = self._next(prompt)
        if line.takes:
            await self._clock.sleep(line.takes)
        if on_text is not None and line.reply.text:
            on_text(line.reply.text)
        if line.fails is not None:
            raise line.fails.error(line.reply.usage)
        return line.reply

    def _next(self, prompt: Prompt) -> ScriptLine:
        last_message = next((message for message in reversed(prompt.messages) if message.role == "user"), None)
        parts = () if last_message is None else last_message.parts
        text = "\n".join(part.text for part in parts if isinstance(part, (Text, ToolResult)))
        all_text: str | None = None
        for index, line in enumerate(self._lines):
            if line.when not in text:
                continue
            if all_text is None and (line.unless or line.finds):
                all_text = "\n".join(_words(prompt))
            matching = _match_line(line, all_text or "")
            if matching is not None:
                if not line.repeat:
                    self._lines.pop(index)
                return matching
        raise ModelRejected(self._run_out(text), billed=False)

    def _run_out(self, text: str) -> str:
        if not self._lines:
            return f"ScriptRanOut: all {self._length} replies of the script are used; add another one"
        return f"ScriptRanOut: none of the {len(self._lines)} remaining replies fits {text[:80]!r}; check their `when`"


def _match_line(line: ScriptLine, all_text: str) -> ScriptLine | None:
    if line.unless and line.unless in all_text:
        return None
    if not line.finds:
        return line
    match = _pattern(line.finds).search(all_text)
    if match is None:
        return None
    groups: Mapping[str, str] = {name: word or "" for name, word in match.groupdict().items()}
    return msgspec.structs.replace(line, reply=_fill_reply(line.reply, groups))


def _words(prompt: Prompt) -> Iterator[str]:
    for message in prompt.messages:
        for part in message.parts:
            yield part.arguments if isinstance(part, ToolCall) else part.text


def _pattern(pattern: str) -> Any:
    """Compile a pattern that matches in linear time."""
    import re2  # pyright: ignore[reportMissingTypeStubs]

    return cast("Any", re2).compile(pattern)


def _fill_reply(reply: Reply, groups: Mapping[str, str]) -> Reply:
    """Fill the matched groups into a reply; in arguments, as JSON text."""

    def fill_groups(text: str, encode: Callable[[str], str]) -> str:
        return _GROUP.sub(lambda match: encode(groups[match[1]]) if match[1] in groups else match[0], text)

    parts = tuple(
        msgspec.structs.replace(part, text=fill_groups(part.text, str))
        if isinstance(part, Text)
        else msgspec.structs.replace(part, arguments=fill_groups(part.arguments, _spell_as_json))
        for part in reply.parts
    )
    return msgspec.structs.replace(reply, parts=parts)


def _spell_as_json(text: str) -> str:
    return msgspec.json.encode(clean(text)).decode()[1:-1]


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a script. Its arguments are a mapping, or any text, which may be invalid as a model's can be."""

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
_LOCATED_ERROR: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_STEP: Final = re.compile(r"\[(\d+)\]|\.(\w+)")


def make_scripted_model(value: Any, locate: LocateKey, clock: Clock, name: ModelName = SCRIPTED) -> Scripted:
    if not isinstance(value, list):
        raise ConfigError(f"{locate(())}: a script must be a list of replies with some of {_KEYS}.")
    lines = [_line(each, index, locate) for index, each in enumerate(cast("list[Any]", value))]
    return Scripted(lines, clock, name)


def _line(value: Any, index: int, locate: LocateKey) -> ScriptLine:
    try:
        fields = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        problem, path = split_validation_error(str(error))
        raise ConfigError(f"{locate((index, *path))}: {problem}. A reply has the keys {_KEYS}.") from None
    calls = tuple(
        ToolCall(
            f"{index}.{number}",
            call.tool,
            call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode(),
        )
        for number, call in enumerate(fields.calls)
    )
    texts = (Text(fields.text, "model", trusted=False),) if fields.text else ()
    fails = fields.fails
    return ScriptLine(
        reply=Reply(
            (*texts, *calls),
            fields.stop or ("calls" if calls else "end"),
            _parse_usage(fields.usage, locate((index, "usage"))),
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
                else _micros(fails.retry_after, locate((index, "fails", "retry_after"))),
                unavailable=fails.unavailable,
                needs_person=fails.needs_person,
            )
        ),
        takes=_micros(fields.takes, locate((index, "takes"))),
        when=fields.when,
        unless=fields.unless,
        finds=_check_pattern(fields.finds, locate((index, "finds"))),
        repeat=fields.repeat,
    )


def _check_pattern(pattern: str, location: str) -> str:
    if not pattern:
        return ""
    import re2  # pyright: ignore[reportMissingTypeStubs]

    try:
        _pattern(pattern)
    except cast("Any", re2).error as error:
        raise ConfigError(f"{location}: `finds` is not a valid pattern: {error}.") from None
    return pattern


def split_validation_error(error: str) -> tuple[str, KeyPath]:
    """Split a validator's message into the problem and its path."""
    match = _LOCATED_ERROR.match(error)
    if match is None:
        return error, ()
    steps = [int(index) if index else key for index, key in _STEP.findall(match["path"] or "")]
    return match["what"], (*steps, *_UNKNOWN.findall(match["what"]))


def _parse_usage(fields: _Usage | None, location: str) -> Usage | None:
    if fields is None:
        return None
    counts = (fields.input_tokens, fields.output_tokens, fields.cache_read_tokens, fields.cache_write_tokens)
    try:
        return Usage(*counts)
    except ValueError as error:
        raise ConfigError(f"{location}: {error}") from None


def _micros(value: str | float, location: str) -> int:
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except ConfigError as error:
            raise ConfigError(f"{location}: {error}") from None
    if not 0 <= value < 10**9:
        raise ConfigError(f"{location}: {value} is not a duration; write it like 2s.")
    return round(value * SECOND)
