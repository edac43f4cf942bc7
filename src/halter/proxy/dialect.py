"""The requests of the three dialects: what is read of them, and the little that is ever changed.

A request is passed on byte for byte. Of its body only what decides about money is read: the model, the most output, and
what costs extra. Three changes are made, each as an edit of single bytes:

    the most output     lowered to what fits the caps, or written where the client set none; a thinking budget with it
    the usage           asked for where a client of Chat Completions streams without it; its chunk is dropped again
    secrets             masked where the key says so, in every string but those that a provider signed

No token is shorter than a byte, so the size of a body bounds its tokens. What a body only names, such as a file, a URL
or an earlier response, is bounded by the model's whole window.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.core.usage import ModelName, ModelPrices, RequestExtras, Unpriced, UnpricedFeature
from halter.models.providers import Prices
from halter.models.wire_format import UsageFormat

DialectName = Literal["messages", "chat", "responses"]


class WireDialect(msgspec.Struct, frozen=True):
    """One protocol: its path below the base URL, how it reports a usage, and how it limits the output."""

    name: DialectName
    path: str
    usage: UsageFormat
    limits: tuple[str, ...]

    @property
    def anthropic(self) -> bool:
        return self.name == "messages"


MESSAGES: Final = WireDialect("messages", "/messages", "anthropic", ("max_tokens",))
CHAT: Final = WireDialect("chat", "/chat/completions", "openai", ("max_completion_tokens", "max_tokens"))
RESPONSES: Final = WireDialect("responses", "/responses", "responses", ("max_output_tokens",))
DIALECTS: Final = (MESSAGES, CHAT, RESPONSES)

LONGEST_OUTPUT: Final = 128_000
"""The most output of a request that sets no limit, where the model's window is not smaller."""
LARGEST_WINDOW: Final = 1_000_000
"""The window of a model whose own is not listed."""
MIN_THINKING_BUDGET: Final = 1024
ENVELOPE_TOKENS: Final = 1024
"""What a provider may add to a request, for its tools and around its messages."""
IMAGE_TOKENS: Final = 20_000
"""More than any provider counts for one image."""

_LONG_CACHE: Final = re.compile(rb'"ttl"\s*:\s*"1h"')
_NAMED_CONTENT: Final = re.compile(
    rb"""
    "(?: type"\s*:\s*"(?:url|file|input_file|document_url|container_upload|item_reference)"
    | (?:file_id|file_url)"\s*:\s*"
    | [a-z]+_url"\s*:\s*(?:\{[^{}]*?"url"\s*:\s*)?"\s*(?i:https?):
    | media_type"\s*:\s*"application/pdf" )
    """,
    re.VERBOSE,
)
"""All begin with a quote, so that only quotes are looked at."""
_PDF: Final = b"data:application/pdf"
_NUMBERED_LETTER: Final = re.compile(rb"\\\\|\\u00([2-7][0-9a-fA-F])|\\/")
_SEARCHES: Final = re.compile(rb'"type"\s*:\s*"web_search(?:_preview)?(?:_\d[^"]*)?"')
_MAX_USES: Final = re.compile(rb'"max_uses"\s*:')
_RUNS_AT_PROVIDER: Final = re.compile(
    rb'"type"\s*:\s*"(web_fetch_\d+|code_execution_\d+|mcp_toolset|file_search|code_interpreter|image_generation|'
    rb'computer_use_preview|mcp)"|"(mcp_servers)"\s*:\s*\[\s*\{'
)
_AUDIO: Final = re.compile(rb'"type"\s*:\s*"(input_audio|audio)"')
_USUAL_TIERS: Final = frozenset(("auto", "default", "standard", "standard_only", "flex"))
_OPENS_OBJECT: Final = re.compile(rb"\s*\{\s*")
_OPTIONS: Final = re.compile(rb'"stream_options"\s*:\s*\{\s*')


class _Thinking(msgspec.Struct):
    type: str = ""
    budget_tokens: int | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ServerTool(msgspec.Struct):
    type: str | None = None
    max_uses: int | None = None


_ABSENT: Final = msgspec.Raw()


class RequestHead(msgspec.Struct):
    """What is read of a body of any dialect; all else is passed on unread."""

    model: str = ""
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    thinking: _Thinking | None = None
    stream_options: _StreamOptions | None = None
    service_tier: str | UnsetType | None = UNSET
    speed: str | UnsetType | None = UNSET
    inference_geo: str | UnsetType | None = UNSET
    background: bool | UnsetType | None = UNSET
    modalities: Sequence[str] | UnsetType | None = UNSET
    tools: Sequence[_ServerTool] | UnsetType | None = UNSET
    max_tool_calls: int | UnsetType | None = UNSET
    web_search_options: msgspec.Raw = _ABSENT
    context_management: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT

    def names_content(self) -> bool:
        """Whether it goes on from what the provider keeps. Inside of a tool's schema, the same words mean nothing."""
        return any(bytes(each) not in _NOTHING for each in (self.previous_response_id, self.conversation, self.prompt))


_NOTHING: Final = (b"", b"null", b'""')
_PAID_EXTRA: Final = (
    "service_tier",
    "speed",
    "inference_geo",
    "background",
    "modalities",
    "tools",
    "max_tool_calls",
    "web_search_options",
    "context_management",
)
_DECODE_HEAD: Final = msgspec.json.Decoder(RequestHead).decode


class Unreadable(Exception):
    """The body cannot be read as a request. The message is for the client."""


class ModelCall(msgspec.Struct, frozen=True):
    """One request that costs money. `answers` multiply its output; `unpriced` says what has no price, if anything."""

    dialect: WireDialect
    body: bytes
    model: str
    streams: bool
    max_output_tokens: int | None
    limit: str = ""
    answers: int = 1
    thinking_budget: int | None = None
    asks_usage: bool = True
    long_cache: bool = False
    searches: int = 0
    compacts: bool = False
    names_content: bool = False
    unpriced: str = ""

    def max_output(self, window: int) -> int:
        """The most that the answer can have, over all its parts."""
        longest = min(LONGEST_OUTPUT, window)
        limit = longest if self.max_output_tokens is None else self.max_output_tokens
        return limit * self.answers * (2 if self.compacts else 1)

    def min_output(self) -> int:
        """The lowest limit that the provider accepts, over all answers."""
        thinks = self.thinking_budget is not None
        return (MIN_THINKING_BUDGET + 256 if thinks else 1) * self.answers * (2 if self.compacts else 1)

    def bound_input(self, window: int) -> int:
        """The most tokens that the request can be counted as."""
        body = self.body
        size = len(body) + ENVELOPE_TOKENS
        if self.names_content:
            return max(size, window)
        if b"base64" in _spell_out(body):
            size += sum(IMAGE_TOKENS - len(image) for image in _find_images(body))
        size = max(size, ENVELOPE_TOKENS)
        if self.searches:
            size = RequestExtras(searches=self.searches).bound_input(size)
        return size * (2 if self.compacts else 1)

    def with_limit(self, tokens: int, window: int, *, new_name: bool = True) -> bytes:
        """The body to send: with its limit lowered where the caps leave less, and with its usage asked for."""
        body = self.body
        if tokens < self.max_output(window):
            each = tokens // (self.answers * (2 if self.compacts else 1))
            body = self._lower(body, each, new_name=new_name)
        return body if self.asks_usage else ask_for_usage(body)

    def _lower(self, body: bytes, limit: int, *, new_name: bool) -> bytes:
        if self.max_output_tokens is None:
            name = self.dialect.limits[0] if new_name else self.dialect.limits[-1]
            return insert_member(body, b'"%s":%d' % (name.encode(), limit))
        body = replace_number(body, self.limit, limit, lambda head: getattr(head, self.limit))
        budget = self.thinking_budget
        if budget is None or budget < limit:
            return body
        return replace_number(
            body, "budget_tokens", limit - 1, lambda head: head.thinking.budget_tokens if head.thinking else None
        )


_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_DATA: Final = re.compile(rb'"(?:data:[\w/+.-]+;base64,)?[A-Za-z0-9+/=_-]{2000,}"')
_SIGNED_BLOCKS: Final = frozenset(("thinking", "redacted_thinking", "compaction", "reasoning"))
_SIGNED_MEMBERS: Final = frozenset(("signature", "encrypted_content"))


def mask_body(body: bytes, redact: Callable[[str], str]) -> bytes:
    """Mask secrets in the strings of a request; every other byte stays. Raises Unreadable.

    The same secret gets the same mark each time, so a provider's prompt cache holds. What a provider signed stays
    whole, because a changed block is refused, and so do files and pictures.
    """
    try:
        signed = frozenset(_find_signed(msgspec.json.decode(body)))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable(f"The request cannot be read: {error}") from None

    def mask(match: re.Match[bytes]) -> bytes:
        literal = match[0]
        if _DATA.fullmatch(literal):
            return literal
        text = json.loads(literal)
        masked = text if text in signed else redact(text)
        return literal if masked == text else json.dumps(masked).encode()

    return _STRING.sub(mask, body)


def _find_signed(node: Any, *, inside: bool = False) -> Iterator[str]:
    if isinstance(node, str):
        if inside:
            yield node
    elif isinstance(node, list):
        for each in cast("list[Any]", node):
            yield from _find_signed(each, inside=inside)
    elif isinstance(node, dict):
        members = cast("dict[str, Any]", node)
        signed = inside or members.get("type") in _SIGNED_BLOCKS
        for name, value in members.items():
            yield from _find_signed(value, inside=signed or name in _SIGNED_MEMBERS)


def _find_images(body: bytes) -> Iterator[str]:
    """The data of images that are shown to the model. What a call was given is text for it, however it is named."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    left: list[Any] = [asked.get("messages"), asked.get("input")]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += cast("list[Any]", node)
        elif isinstance(node, dict):
            part = cast("dict[str, Any]", node)
            left += [each for name in ("content", "output") if isinstance(each := part.get(name), list)]
            if part.get("type") == "image" and isinstance(source := part.get("source"), dict):
                yield str(cast("dict[str, Any]", source).get("data") or "")
            elif part.get("type") in {"image_url", "input_image"}:
                url = part.get("image_url")
                yield str(cast("dict[str, Any]", url).get("url") if isinstance(url, dict) else url or "")


def read_call(dialect: WireDialect, body: bytes) -> ModelCall:
    """Read what decides about money. Raises Unreadable."""
    try:
        head = _DECODE_HEAD(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable(f"The request cannot be read: {error}") from None
    if not head.model:
        raise Unreadable("The request names no model.")
    limit = next((name for name in dialect.limits if getattr(head, name) is not None), "")
    plain = _spell_out(body)
    searches = _count_searches(head, plain)
    return ModelCall(
        dialect=dialect,
        body=body,
        model=head.model,
        streams=bool(head.stream),
        max_output_tokens=getattr(head, limit) if limit else None,
        limit=limit,
        answers=max(1, head.n or 1) if dialect is CHAT else 1,
        thinking_budget=head.thinking.budget_tokens if head.thinking else None,
        asks_usage=not (dialect is CHAT and head.stream)
        or bool(head.stream_options and head.stream_options.include_usage),
        long_cache=_LONG_CACHE.search(plain) is not None,
        searches=searches or 0,
        compacts=b'"compact' in _spell_out(bytes(head.context_management)),
        names_content=head.names_content() or _PDF in plain or _NAMED_CONTENT.search(plain) is not None,
        unpriced=_find_unpriced(head, plain, searches, limit, dialect),
    )


def _spell_out(body: bytes) -> bytes:
    """A body to search in. JSON may write a letter as its number; quotes and backslashes stay as they are written."""
    if b"\\u" not in body and b"\\/" not in body:
        return body

    def escape(match: re.Match[bytes]) -> bytes:
        letter = bytes.fromhex(match[1].decode()) if match[1] else match[0][1:]
        return match[0] if letter in b'"\\' else letter

    return _NUMBERED_LETTER.sub(escape, body)


def _count_searches(head: RequestHead, body: bytes) -> int | None:
    """How often the provider may search; None where that has no limit."""
    if _SEARCHES.search(body) is None and bytes(head.web_search_options) in {b"", b"null"}:
        return 0
    if isinstance(head.max_tool_calls, int):
        return head.max_tool_calls
    limits = [tool.max_uses for tool in head.tools or () if (tool.type or "").startswith("web_search")]
    known = [limit for limit in limits if limit is not None]
    if len(_MAX_USES.findall(body)) > len(known) and _repeats(body, "max_uses", "type", "tools"):
        # The provider may read another one of them.
        return None
    return sum(known) if limits and len(known) == len(limits) else None


def _find_unpriced(head: RequestHead, body: bytes, searches: int | None, limit: str, dialect: WireDialect) -> str:
    """Say what of a request has no price, so that no hold could cover it."""
    if head.service_tier and head.service_tier not in _USUAL_TIERS:
        return f"it asks for the service tier {head.service_tier!r}, and what that costs is not listed"
    if head.speed and head.speed != "standard":
        return f"it asks for the speed {head.speed!r}, and what that costs is not listed"
    if head.inference_geo and head.inference_geo != "global":
        return f"it asks to be answered in {head.inference_geo!r}, and what that costs is not listed"
    if head.background:
        return "it is answered in the background, so its cost is never reported here"
    if any(kind != "text" for kind in head.modalities or ()) or _AUDIO.search(body) is not None:
        return "it has audio, and what that costs is not listed"
    if searches is None:
        return (
            "it may search the web without a limit: set `max_uses` of the tool, or `max_tool_calls`, or switch it off"
        )
    if (match := _RUNS_AT_PROVIDER.search(body)) is not None:
        tool = (match[1] or match[2]).decode()
        return f"it lets the provider run {tool}, and what that costs has no bound"
    return _find_flaw_of_limit(head, body, limit, dialect)


def _find_flaw_of_limit(head: RequestHead, body: bytes, limit: str, dialect: WireDialect) -> str:
    """What is written twice could be read otherwise by the provider. What the head has not is not written at all."""
    if limit and getattr(head, limit) < 0:
        return f"its `{limit}` is below zero"
    names = [name for name in dialect.limits if getattr(head, name) is not None]
    if len(names) > 1:
        return f"it has both `{names[0]}` and `{names[1]}`: keep one"
    stored = ("previous_response_id", "conversation", "prompt") if dialect is RESPONSES else ()
    extra = [name for name in _PAID_EXTRA if getattr(head, name) is not UNSET and getattr(head, name) is not _ABSENT]
    for name in (*dialect.limits, "n", "model", *stored, *extra):
        quoted = b'"%s"' % name.encode()
        if body.count(quoted) > 1 and len(re.findall(rb"%s\s*:" % quoted, body)) > 1 and _is_written_twice(body, name):
            return f"it has `{name}` more than once"
    return ""


def _list_members(body: bytes) -> list[list[str]]:
    """The names of the members of every object as they are written; those of the whole body come last."""
    members: list[list[str]] = []
    try:
        json.loads(body, object_pairs_hook=lambda pairs: members.append([key for key, _ in pairs]))
    except RecursionError as error:
        raise Unreadable(f"The request cannot be read: {error}") from None
    return members


def _is_written_twice(body: bytes, name: str) -> bool:
    return _list_members(body)[-1].count(name) > 1


def _repeats(body: bytes, *names: str) -> bool:
    """Whether any object has one of the members more than once."""
    return any(members.count(name) > 1 for members in _list_members(body) for name in names)


def replace_number(body: bytes, name: str, value: int, read: Callable[[RequestHead], int | None]) -> bytes:
    """Replace the digits of one number. What the head then says proves that it was the right one."""
    for match in re.finditer(rb'"%s"\s*:\s*(\d+)' % name.encode(), body):
        edited = b"%s%d%s" % (body[: match.start(1)], value, body[match.end(1) :])
        if read(_DECODE_HEAD(edited)) == value:
            return edited
    raise Unreadable(f"The request writes its `{name}` in a way that cannot be lowered: write it as a plain number.")


def insert_member(body: bytes, member: bytes) -> bytes:
    """Put a member first in an object."""
    opening = _OPENS_OBJECT.match(body)
    if opening is None:
        raise Unreadable("The request is no JSON object.")
    at = opening.end()
    return b"%s%s%s%s" % (body[:at], member, b"" if body[at : at + 1] == b"}" else b",", body[at:])


def ask_for_usage(body: bytes) -> bytes:
    """Ask for the report that a stream of Chat Completions has only on request."""
    for match in _OPTIONS.finditer(body):
        rest = body[match.end() :]
        member = b'"include_usage":true' + (b"" if rest.startswith(b"}") else b",")
        edited = body[: match.end()] + member + rest
        head = _DECODE_HEAD(edited)
        if head.stream_options is not None and head.stream_options.include_usage:
            return edited
    if _DECODE_HEAD(body).stream_options is not None:
        # It says that it wants none: then the request settles at its hold.
        return body
    return insert_member(body, b'"stream_options":{"include_usage":true}')


def find_rates(
    call: ModelCall, model: ModelName, base_url: str | None, prices: Prices
) -> ModelPrices | Unpriced | None:
    """What a call costs, where it asks for more than its model's plain tokens."""
    if call.unpriced:
        return UnpricedFeature(model, call.unpriced)
    if not call.long_cache and not call.searches:
        return None
    rates = prices.find(model, base_url)
    if isinstance(rates, Unpriced):
        return rates
    found = rates.covering(RequestExtras(long_cache=call.long_cache, searches=call.searches))
    return UnpricedFeature(model, found) if isinstance(found, str) else found
