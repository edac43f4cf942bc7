"""A model that needs no network: it says what a script tells it to say, as slowly and as badly as the script likes.

A script is a list of replies. Each is used once, in order; one with a `when` is passed over until the last message of
the user contains that text.

    - text: I will look at the log.
      calls: [{tool: read_file, arguments: {path: app.log}}]
      usage: {input_tokens: 900, output_tokens: 40}
      takes: 2s
    - fails: {kind: RateLimited, message: try again later, unavailable: true, billed: false, retry_after: 30s}
    - when: how much
      text: It was seven.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.counting import most_tokens
from halter.core.durations import parse_duration
from halter.core.errors import ConfigError, ModelError, ModelRejected, ModelUnavailable
from halter.core.messages import Hear, Prompt, Reply, Stop, Text, ToolCall, ToolResult
from halter.core.tools import Permit
from halter.core.usage import ModelName, Usage

SCRIPTED: Final = ModelName("scripted", "script")

KeyPath = tuple[str | int, ...]
"""The way to a value from the top of its file: keys of mappings and places in lists."""
Where = Callable[[KeyPath], str]
"""Names the file and the line in which a value stands."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a model fails. Unless it is only unavailable, the same request is never answered."""

    kind: str = "ModelError"
    message: str = "the script says so"
    billed: bool = True
    retry_after: int | None = None
    unavailable: bool = False

    def error(self, usage: Usage | None = None) -> ModelError:
        """Make the error that a provider's wire would raise."""
        sort = ModelUnavailable if self.unavailable else ModelRejected
        return sort(f"{self.kind}: {self.message}", billed=self.billed, usage=usage, retry_after=self.retry_after)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of a script: what is said or how it fails, after how long, and to whom."""

    reply: Reply
    fails: Failure | None = None
    takes: int = 0
    when: str = ""


def say(text: str, usage: Usage | None = None, *, takes: int = 0, when: str = "") -> Line:
    """Make a line that only says something."""
    return Line(reply=Reply((Text(text, "model", trusted=False),), "end", usage), takes=takes, when=when)


class Scripted:
    """Answers from a script. `asked` are the prompts that it was sent, in order."""

    base_url: None = None

    def __init__(self, lines: Sequence[Line], clock: Clock, name: ModelName = SCRIPTED) -> None:
        self.name = name
        self.asked: list[Prompt] = []
        self._lines = list(lines)
        self._length = len(lines)
        self._clock = clock

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return most_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Say the next line that fits."""
        permit.use()
        self.asked.append(prompt)
        line = self._next(_last_said(prompt))
        if line.takes:
            await self._clock.sleep(line.takes)
        if hear is not None and line.reply.text:
            hear(line.reply.text)
        if line.fails is not None:
            raise line.fails.error(line.reply.usage)
        return line.reply

    def _next(self, said: str) -> Line:
        for index, line in enumerate(self._lines):
            if line.when in said:
                return self._lines.pop(index)
        raise ModelRejected(self._run_out(said), billed=False)

    def _run_out(self, said: str) -> str:
        if not self._lines:
            return f"ScriptRanOut: all {self._length} replies of the script have been given; write another one"
        return f"ScriptRanOut: none of the {len(self._lines)} replies left is for {said[:80]!r}; see their `when`"


def _last_said(prompt: Prompt) -> str:
    """Put together what the user, or a tool in the user's turn, said last."""
    last = next((message for message in reversed(prompt.messages) if message.role == "user"), None)
    parts = () if last is None else last.parts
    return "\n".join(part.text for part in parts if isinstance(part, (Text, ToolResult)))


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call as a script writes it: arguments as a mapping, or as the text that a careless model would send."""

    tool: str
    arguments: dict[str, Any] | str = {}


class _Fails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str = "ModelError"
    message: str = "the script says so"
    billed: bool = True
    retry_after: str | float | None = None
    unavailable: bool = False


class _Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reply as a script writes it."""

    text: str = ""
    calls: tuple[_Call, ...] = ()
    stop: Stop | None = None
    usage: _Usage | None = None
    fails: _Fails | None = None
    takes: str | float = 0
    when: str = ""


_KEYS: Final = ", ".join(f"`{key}`" for key in _Written.__struct_fields__)
_PLACE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_STEP: Final = re.compile(r"\[(\d+)\]|\.(\w+)")


def scripted_from(value: Any, where: Where, clock: Clock, name: ModelName = SCRIPTED) -> Scripted:
    """Make a model of what a script's file says, or raise a ConfigError that names the line to change."""
    if not isinstance(value, list):
        raise ConfigError(f"{where(())}: a script is a list of replies, each with some of {_KEYS}.")
    lines = [_line(each, index, where) for index, each in enumerate(cast("list[Any]", value))]
    return Scripted(lines, clock, name)


def _line(value: Any, index: int, where: Where) -> Line:
    try:
        written = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        what, path = understood(str(error))
        raise ConfigError(f"{where((index, *path))}: {what}. A reply is made of {_KEYS}.") from None
    calls = tuple(
        ToolCall(f"{index}.{number}", call.tool, _arguments(call)) for number, call in enumerate(written.calls)
    )
    words = (Text(written.text, "model", trusted=False),) if written.text else ()
    fails = written.fails
    return Line(
        reply=Reply(
            (*words, *calls),
            written.stop or ("calls" if calls else "end"),
            _used(written.usage, where((index, "usage"))),
        ),
        fails=None if fails is None else _failure(fails, lambda key: where((index, "fails", key))),
        takes=_micros(written.takes, where((index, "takes"))),
        when=written.when,
    )


def understood(error: str) -> tuple[str, KeyPath]:
    """Take a validator's sentence apart: what is wrong, and the way to it."""
    found = _PLACE.match(error)
    if found is None:
        return error, ()
    steps = [int(place) if place else key for place, key in _STEP.findall(found["path"] or "")]
    return found["what"], (*steps, *_UNKNOWN.findall(found["what"]))


def _used(written: _Usage | None, place: str) -> Usage | None:
    if written is None:
        return None
    used = (written.input_tokens, written.output_tokens, written.cache_read_tokens, written.cache_write_tokens)
    try:
        return Usage(*used)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _arguments(call: _Call) -> str:
    return call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()


def _failure(fails: _Fails, where: Callable[[str], str]) -> Failure:
    return Failure(
        kind=fails.kind,
        message=fails.message,
        billed=fails.billed,
        retry_after=None if fails.retry_after is None else _micros(fails.retry_after, where("retry_after")),
        unavailable=fails.unavailable,
    )


def _micros(written: str | float, place: str) -> int:
    """Read a duration, or a number of seconds."""
    if isinstance(written, str):
        try:
            return parse_duration(written)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    if not 0 <= written < 10**9:
        raise ConfigError(f"{place}: {written} is no number of seconds that can pass; write it like 2s.")
    return round(written * SECOND)
