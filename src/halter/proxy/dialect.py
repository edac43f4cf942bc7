"""The requests of the three dialects: the fields that are read, and the few edits that are made.

A request is forwarded byte for byte. Only the fields that decide its cost are read: the model, the output limit, and
extras that cost money. There are three edits, each of single bytes:

    output limit    lowered to what fits the caps, or added if the client set none; a thinking budget with it
    usage           requested if a client of Chat Completions streams without it; its chunk is dropped from the answer
    secrets         masked if the key says so, in every string except those that a provider signed

No token is shorter than a byte, so the size of a body bounds its tokens. Content that a body only names, such as a
file, a URL or an earlier response, is bounded by the model's whole window.
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

DEFAULT_MAX_OUTPUT: Final = 128_000
"""The output limit of a request without one, unless the model's window is smaller."""
DEFAULT_CONTEXT_WINDOW: Final = 1_000_000
"""The window of a model that is not in the price list."""
MIN_THINKING_BUDGET: Final = 1024
ENVELOPE_TOKENS: Final = 1024
"""Tokens that a provider may add to a request, for its tools and around its messages."""
IMAGE_TOKENS: Final = 20_000
"""An upper bound: no provider counts more for one image."""

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
"""All alternatives begin with a quote, so that the search only stops at quotes."""
_PDF: Final = b"data:application/pdf"
_ESCAPED_LETTER: Final = re.compile(rb"\\\\|\\u00([2-7][0-9a-fA-F])|\\/")
_SEARCH_TOOL: Final = re.compile(rb'"type"\s*:\s*"web_search(?:_preview)?(?:_\d[^"]*)?"')
_MAX_USES: Final = re.compile(rb'"max_uses"\s*:')
_PROVIDER_TOOL: Final = re.compile(
    rb'"type"\s*:\s*"(web_fetch_\d+|code_execution_\d+|mcp_toolset|file_search|code_interpreter|image_generation|'
    rb'computer_use_preview|mcp)"|"(mcp_servers)"\s*:\s*\[\s*\{'
)
_AUDIO: Final = re.compile(rb'"type"\s*:\s*"(input_audio|audio)"')
_STANDARD_TIERS: Final = frozenset(("auto", "default", "standard", "standard_only", "flex"))
_OBJECT_START: Final = re.compile(rb"\s*\{\s*")
_STREAM_OPTIONS_START: Final = re.compile(rb'"stream_options"\s*:\s*\{\s*')


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
    """The fields that are read from a body of any dialect; the rest is forwarded unread."""

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
        """Return True if the request uses content that the provider stores. Keys in a tool's schema do not count."""
        return any(
            bytes(each) not in _EMPTY_VALUES for each in (self.previous_response_id, self.conversation, self.prompt)
        )


_EMPTY_VALUES: Final = (b"", b"null", b'""')
_PAID_FIELDS: Final = (
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
    """The body is not a valid request. The message is for the client."""


class ModelCall(msgspec.Struct, frozen=True):
    """One request that costs money. `answer_count` multiplies its output; `unpriced_part` has no price."""

    dialect: WireDialect
    body: bytes
    model: str
    streams: bool
    max_output_tokens: int | None
    limit: str = ""
    answer_count: int = 1
    thinking_budget: int | None = None
    asks_usage: bool = True
    long_cache: bool = False
    searches: int = 0
    compacts: bool = False
    names_content: bool = False
    unpriced_part: str = ""

    def max_output(self, window: int) -> int:
        """Return the maximum output over all answers, in tokens."""
        longest = min(DEFAULT_MAX_OUTPUT, window)
        limit = longest if self.max_output_tokens is None else self.max_output_tokens
        return limit * self.answer_count * (2 if self.compacts else 1)

    def min_output(self) -> int:
        """Return the lowest output limit that the provider accepts, over all answers."""
        thinks = self.thinking_budget is not None
        return (MIN_THINKING_BUDGET + 256 if thinks else 1) * self.answer_count * (2 if self.compacts else 1)

    def bound_input(self, window: int) -> int:
        """Return an upper bound on the input tokens of the request."""
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
        """Return the body to send, with a lower limit if the caps leave less, and with its usage requested."""
        body = self.body
        if tokens < self.max_output(window):
            answer_limit = tokens // (self.answer_count * (2 if self.compacts else 1))
            body = self._lower(body, answer_limit, new_name=new_name)
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
    """Mask secrets in the strings of a request; every other byte is unchanged. Raises Unreadable.

    The same secret always gets the same mark, so a provider's prompt cache stays valid. Strings that a provider signed
    are not changed, because the provider refuses a changed block. Files and pictures are not changed either.
    """
    try:
        signed_texts = frozenset(_find_signed(msgspec.json.decode(body)))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable(f"The request is not valid: {error}") from None

    def mask(match: re.Match[bytes]) -> bytes:
        literal = match[0]
        if _DATA.fullmatch(literal):
            return literal
        text = json.loads(literal)
        masked_text = text if text in signed_texts else redact(text)
        return literal if masked_text == text else json.dumps(masked_text).encode()

    return _STRING.sub(mask, body)


def _find_signed(node: Any, *, is_inside: bool = False) -> Iterator[str]:
    if isinstance(node, str):
        if is_inside:
            yield node
    elif isinstance(node, list):
        for item in cast("list[Any]", node):
            yield from _find_signed(item, is_inside=is_inside)
    elif isinstance(node, dict):
        members = cast("dict[str, Any]", node)
        is_signed = is_inside or members.get("type") in _SIGNED_BLOCKS
        for name, value in members.items():
            yield from _find_signed(value, is_inside=is_signed or name in _SIGNED_MEMBERS)


def _find_images(body: bytes) -> Iterator[str]:
    """Yield the data of images for the model. The arguments of a call are text, whatever their keys are."""
    try:
        request = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    pending: list[Any] = [request.get("messages"), request.get("input")]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += cast("list[Any]", node)
        elif isinstance(node, dict):
            content = cast("dict[str, Any]", node)
            pending += [each for name in ("content", "output") if isinstance(each := content.get(name), list)]
            if content.get("type") == "image" and isinstance(source := content.get("source"), dict):
                yield str(cast("dict[str, Any]", source).get("data") or "")
            elif content.get("type") in {"image_url", "input_image"}:
                url = content.get("image_url")
                yield str(cast("dict[str, Any]", url).get("url") if isinstance(url, dict) else url or "")


def read_call(dialect: WireDialect, body: bytes) -> ModelCall:
    """Read the fields that decide the cost of a request. Raises Unreadable."""
    try:
        head = _DECODE_HEAD(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Unreadable(f"The request is not valid: {error}") from None
    if not head.model:
        raise Unreadable("The request has no `model`.")
    limit = next((name for name in dialect.limits if getattr(head, name) is not None), "")
    searchable = _spell_out(body)
    searches = _count_searches(head, searchable)
    return ModelCall(
        dialect=dialect,
        body=body,
        model=head.model,
        streams=bool(head.stream),
        max_output_tokens=getattr(head, limit) if limit else None,
        limit=limit,
        answer_count=max(1, head.n or 1) if dialect is CHAT else 1,
        thinking_budget=head.thinking.budget_tokens if head.thinking else None,
        asks_usage=not (dialect is CHAT and head.stream)
        or bool(head.stream_options and head.stream_options.include_usage),
        long_cache=_LONG_CACHE.search(searchable) is not None,
        searches=searches or 0,
        compacts=b'"compact' in _spell_out(bytes(head.context_management)),
        names_content=head.names_content() or _PDF in searchable or _NAMED_CONTENT.search(searchable) is not None,
        unpriced_part=_find_unpriced(head, searchable, searches, limit, dialect),
    )


def _spell_out(body: bytes) -> bytes:
    """Decode escaped letters, so that a body can be searched. Escaped quotes and backslashes are not decoded."""
    if b"\\u" not in body and b"\\/" not in body:
        return body

    def escape(match: re.Match[bytes]) -> bytes:
        letter = bytes.fromhex(match[1].decode()) if match[1] else match[0][1:]
        return match[0] if letter in b'"\\' else letter

    return _ESCAPED_LETTER.sub(escape, body)


def _count_searches(head: RequestHead, body: bytes) -> int | None:
    """Return the maximum number of searches at the provider; None without a limit."""
    if _SEARCH_TOOL.search(body) is None and bytes(head.web_search_options) in {b"", b"null"}:
        return 0
    if isinstance(head.max_tool_calls, int):
        return head.max_tool_calls
    limits = [tool.max_uses for tool in head.tools or () if (tool.type or "").startswith("web_search")]
    set_limits = [limit for limit in limits if limit is not None]
    if len(_MAX_USES.findall(body)) > len(set_limits) and _repeats(body, "max_uses", "type", "tools"):
        # The provider may read a different one of the duplicates.
        return None
    return sum(set_limits) if limits and len(set_limits) == len(limits) else None


def _find_unpriced(head: RequestHead, body: bytes, searches: int | None, limit: str, dialect: WireDialect) -> str:
    """Describe the part of a request that has no price, and that no hold can cover; empty if there is none."""
    if head.service_tier and head.service_tier not in _STANDARD_TIERS:
        return f"it uses the service tier {head.service_tier!r}, which has no listed price"
    if head.speed and head.speed != "standard":
        return f"it uses the speed {head.speed!r}, which has no listed price"
    if head.inference_geo and head.inference_geo != "global":
        return f"it uses the region {head.inference_geo!r}, which has no listed price"
    if head.background:
        return "it runs in the background, so its cost is not reported"
    if any(kind != "text" for kind in head.modalities or ()) or _AUDIO.search(body) is not None:
        return "it has audio, which has no listed price"
    if searches is None:
        return (
            "it can search the web without a limit: set `max_uses` of the tool or `max_tool_calls`, or remove the tool"
        )
    if (match := _PROVIDER_TOOL.search(body)) is not None:
        tool = (match[1] or match[2]).decode()
        return f"it lets the provider run {tool}, whose cost has no bound"
    return _find_flaw_of_limit(head, body, limit, dialect)


def _find_flaw_of_limit(head: RequestHead, body: bytes, limit: str, dialect: WireDialect) -> str:
    """Describe a limit that is negative or ambiguous: the provider may read a different one of two duplicates."""
    if limit and getattr(head, limit) < 0:
        return f"its `{limit}` is negative"
    names = [name for name in dialect.limits if getattr(head, name) is not None]
    if len(names) > 1:
        return f"it has both `{names[0]}` and `{names[1]}`: remove one"
    stored_names = ("previous_response_id", "conversation", "prompt") if dialect is RESPONSES else ()
    paid_names = [
        name for name in _PAID_FIELDS if getattr(head, name) is not UNSET and getattr(head, name) is not _ABSENT
    ]
    for name in (*dialect.limits, "n", "model", *stored_names, *paid_names):
        quoted_name = b'"%s"' % name.encode()
        if (
            body.count(quoted_name) > 1
            and len(re.findall(rb"%s\s*:" % quoted_name, body)) > 1
            and _is_written_twice(body, name)
        ):
            return f"it has `{name}` more than once"
    return ""


def _list_members(body: bytes) -> list[list[str]]:
    """List the member names of every object, with duplicates; those of the outermost object come last."""
    members: list[list[str]] = []
    try:
        json.loads(body, object_pairs_hook=lambda pairs: members.append([key for key, _ in pairs]))
    except RecursionError as error:
        raise Unreadable(f"The request is not valid: {error}") from None
    return members


def _is_written_twice(body: bytes, name: str) -> bool:
    return _list_members(body)[-1].count(name) > 1


def _repeats(body: bytes, *names: str) -> bool:
    """Return True if any object has one of the members more than once."""
    return any(members.count(name) > 1 for members in _list_members(body) for name in names)


def replace_number(body: bytes, name: str, value: int, read: Callable[[RequestHead], int | None]) -> bytes:
    """Replace the digits of one number, and check with the parsed head that it was the right one."""
    for match in re.finditer(rb'"%s"\s*:\s*(\d+)' % name.encode(), body):
        new_body = b"%s%d%s" % (body[: match.start(1)], value, body[match.end(1) :])
        if read(_DECODE_HEAD(new_body)) == value:
            return new_body
    raise Unreadable(f"`{name}` of the request cannot be lowered. Write it as a plain number.")


def insert_member(body: bytes, member: bytes) -> bytes:
    """Insert a member at the start of an object."""
    opening = _OBJECT_START.match(body)
    if opening is None:
        raise Unreadable("The request is not a JSON object.")
    offset = opening.end()
    return b"%s%s%s%s" % (body[:offset], member, b"" if body[offset : offset + 1] == b"}" else b",", body[offset:])


def ask_for_usage(body: bytes) -> bytes:
    """Request the usage, which a stream of Chat Completions reports only on request."""
    for match in _STREAM_OPTIONS_START.finditer(body):
        remainder = body[match.end() :]
        member = b'"include_usage":true' + (b"" if remainder.startswith(b"}") else b",")
        new_body = body[: match.end()] + member + remainder
        head = _DECODE_HEAD(new_body)
        if head.stream_options is not None and head.stream_options.include_usage:
            return new_body
    if _DECODE_HEAD(body).stream_options is not None:
        # The client turned the usage off, so the request settles at its hold.
        return body
    return insert_member(body, b'"stream_options":{"include_usage":true}')


def find_rates(
    call: ModelCall, model: ModelName, base_url: str | None, prices: Prices
) -> ModelPrices | Unpriced | None:
    """Find the rates of a call that costs more than its model's plain tokens; None for a plain call."""
    if call.unpriced_part:
        return UnpricedFeature(model, call.unpriced_part)
    if not call.long_cache and not call.searches:
        return None
    rates = prices.find(model, base_url)
    if isinstance(rates, Unpriced):
        return rates
    extended_rates = rates.covering(RequestExtras(long_cache=call.long_cache, searches=call.searches))
    return UnpricedFeature(model, extended_rates) if isinstance(extended_rates, str) else extended_rates
