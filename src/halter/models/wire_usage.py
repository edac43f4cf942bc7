"""What a provider says was used, read off the bytes of its answer.

A request that was cut off is charged by what was reported until then, so it matters which report is the final one:

    openai      `usage` in any chunk; final with or after the chunk that has a `finish_reason`
    anthropic   `message_start`, with all input and hardly any output; final in the `message_delta` with a `stop_reason`
    google      `usageMetadata` in any chunk; final with or after the chunk that has a `finishReason`

Reports of one answer are cumulative on all three wires, so the largest count of each sort is kept; of cached input,
which costs less, the last one. The report of an answer in one piece is final, and so is one in the body of an error.
What cannot be read or believed is no report, and spoils those before it: nobody knows what it took back or added. The
request then settles at its hold.

Reasoning counts as output, once. Anthropic counts it within the output, Google beside the candidates. Some servers of
OpenAI's protocol count it within `completion_tokens`, others beside them: then it is in `total_tokens`, or there is
more of it than of `completion_tokens`.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.mind import WireFormat
from halter.core.usage import Usage

_DATA: Final = b"data:"
_OPENS_JSON: Final = (b"{", b"[")
_NAMES_A_REPORT: Final = b"usage"


class Reading(msgspec.Struct, frozen=True):
    """What one event, or a whole answer, says: its counts, if it has any, and whether the answer is finished.

    `output` is None where a report leaves it out: then it cannot be the final one. `cache_read` is None where a report
    leaves that out.
    """

    input: int = 0
    output: int | None = None
    cache_read: int | None = None
    cache_write: int = 0
    finished: bool = False


class Meter:
    """Reads the answer to one request as it comes, whether it is a stream of events or one piece of JSON."""

    def __init__(self, wire: WireFormat) -> None:
        self.final = False
        self._read = _READERS[wire]
        self._counts = Reading()
        self._finished = False
        self._spoiled = False
        self._streams: bool | None = None
        self._rest = bytearray()

    @property
    def usage(self) -> Usage | None:
        """The largest counts that were reported. A report without input, or one that contradicts itself, is none."""
        counts = self._counts
        if not counts.input or self._spoiled:
            return None
        try:
            return Usage(counts.input, counts.output or 0, counts.cache_read or 0, counts.cache_write)
        except ValueError:
            return None

    def feed(self, piece: bytes) -> None:
        """Take in what came next."""
        if self._streams is None and (begin := piece.lstrip()):
            self._streams = not begin.startswith(_OPENS_JSON)
        if not self._streams:
            self._rest += piece
            return
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
        if end < 0:
            self._rest += piece
            return
        whole, self._rest = bytes(self._rest) + piece[:end], bytearray(piece[end + 1 :])
        for line in whole.splitlines():
            self._take_line(line)

    def close(self) -> None:
        """Take in what is left at the end of an answer that was not cut off."""
        rest, self._rest = bytes(self._rest), bytearray()
        if self._streams:
            self._take_line(rest)
        elif rest:
            self._finished = True
            self._take(rest)

    def _take_line(self, line: bytes) -> None:
        if line.startswith(_DATA):
            self._take(line[len(_DATA) :])

    def _take(self, body: bytes) -> None:
        try:
            said = self._read(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self._spoil(_NAMES_A_REPORT in body)
            return
        self._finished = self._finished or said.finished
        self._spoil(min(said.input, said.output or 0, said.cache_read or 0, said.cache_write) < 0)
        # What was written is not unwritten: a final count below an earlier one is wrong.
        self._spoil(self._finished and said.output is not None and said.output < (self._counts.output or 0))
        self.final = not self._spoiled and (self.final or (self._finished and said.output is not None))
        self._counts = _largest(self._counts, said)

    def _spoil(self, spoils: bool) -> None:  # noqa: FBT001, it is all that this says.
        self._spoiled = self._spoiled or spoils
        self.final = self.final and not self._spoiled


def _largest(before: Reading, said: Reading) -> Reading:
    return Reading(
        max(before.input, said.input),
        max(before.output or 0, said.output or 0),
        before.cache_read if said.cache_read is None else said.cache_read,
        max(before.cache_write, said.cache_write),
    )


def _first(*counts: int | None) -> int | None:
    """Take the first count that is more than none, else none where one was told."""
    return next((count for count in counts if count), next((count for count in counts if count is not None), None))


class _ChatInput(msgspec.Struct):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _ChatOutput(msgspec.Struct):
    reasoning_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    """OpenAI's report, and where other servers of its protocol put what it has a place for."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _ChatInput | None = None
    completion_tokens_details: _ChatOutput | None = None
    reasoning_tokens: int | None = None
    citation_tokens: int | None = None
    prompt_cache_hit_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _ChatChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    usage: _ChatUsage | None = None
    choices: Sequence[_ChatChoice] | None = None


def _chat_reading(said: _Chat) -> Reading:
    finished = any(choice.finish_reason for choice in said.choices or ())
    usage = said.usage
    if usage is None:
        return Reading(finished=finished)
    cached, reasoned = usage.prompt_tokens_details or _ChatInput(), usage.completion_tokens_details or _ChatOutput()
    read = _first(cached.cached_tokens, usage.prompt_cache_hit_tokens, usage.cache_read_input_tokens)
    write = cached.cache_write_tokens or usage.cache_creation_input_tokens or 0
    reasoning = reasoned.reasoning_tokens or usage.reasoning_tokens or 0
    return Reading(usage.prompt_tokens or 0, _chat_output(usage, reasoning), read, write, finished)


def _chat_output(usage: _ChatUsage, reasoning: int) -> int | None:
    """Count all output: also what a server reports beside the completion."""
    if usage.completion_tokens is None and usage.total_tokens is None:
        return None
    said = usage.completion_tokens or 0
    beside = (usage.total_tokens or 0) - (usage.prompt_tokens or 0) - said
    apart = max(beside, reasoning if reasoning > said else 0, 0)
    return said + apart + (usage.citation_tokens or 0)


class _MessageUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _MessageUsage | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _MessageEvent(msgspec.Struct):
    """An event of Anthropic's stream, or its whole answer: each has the report in a place of its own."""

    usage: _MessageUsage | None = None
    stop_reason: str | None = None
    message: _Message | str | None = None
    delta: _MessageDelta | None = None


def _message_reading(said: _MessageEvent) -> Reading:
    finished = bool(said.stop_reason or (said.delta and said.delta.stop_reason))
    usage = said.usage or (said.message.usage if isinstance(said.message, _Message) else None)
    if usage is None:
        return Reading(finished=finished)
    read, write = usage.cache_read_input_tokens, usage.cache_creation_input_tokens or 0
    return Reading((usage.input_tokens or 0) + (read or 0) + write, usage.output_tokens, read, write, finished)


class _Metadata(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None
    cached_content_token_count: int | None = None
    total_token_count: int | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    finish_reason: str | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Generated(msgspec.Struct, rename="camel"):
    usage_metadata: _Metadata | None = None
    candidates: Sequence[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None


def _generated_reading(said: _Generated) -> Reading:
    blocked = bool(said.prompt_feedback and said.prompt_feedback.block_reason)
    finished = blocked or any(candidate.finish_reason for candidate in said.candidates or ())
    usage = said.usage_metadata
    if usage is None:
        return Reading(finished=finished)
    read = (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0)
    written = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    counted = usage.candidates_token_count is not None or usage.total_token_count is not None
    output = max(written, (usage.total_token_count or 0) - read) if counted else None
    return Reading(read, output, usage.cached_content_token_count, 0, finished)


def _reader(shape: Any, reading: Callable[[Any], Reading]) -> Callable[[bytes], Reading]:
    decode = msgspec.json.Decoder(shape).decode
    return lambda body: reading(decode(body))


_READERS: Final = MappingProxyType[WireFormat, Callable[[bytes], Reading]](
    {
        "openai": _reader(_Chat, _chat_reading),
        "anthropic": _reader(_MessageEvent, _message_reading),
        "google": _reader(_Generated, _generated_reading),
    }
)
