"""The requests of the three dialects: the fields that are read, and the few edits that are made.

A request is forwarded byte for byte. Only the fields that decide its cost are read: the model, the output limit, and
extras that cost money. There are three edits, each of single bytes:

    output limit    lowered to what fits the caps, or added if the client set none; a thinking budget with it
    usage           requested if a client of Chat Completions streams without it; its chunk is dropped from the answer
    secrets         masked if the key says so, in every string except those that a provider signed

No token is shorter than a byte, so the size of a body bounds its tokens. Content that a body only names, such as a
file, a URL or an earlier response, is bounded by the model's whole window.

Members and tools that are not known could cost what nobody held, and are refused. Known are those of the makers' SDKs
that cost nothing, or whose cost is read here; a provider that adds members of its own has a list of its own.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from halter.core.text import shorten
from halter.core.usage import ModelName, ModelPrices, RequestExtras, Unpriced, UnpricedFeature, runs_locally
from halter.models.prices import Prices
from halter.spec.models import WireFormat

DialectName = Literal["messages", "chat", "responses"]


class WireDialect(msgspec.Struct, frozen=True):
    """One protocol: its path below the base URL, how it reports a usage, and how it limits the output."""

    name: DialectName
    path: str
    usage: WireFormat
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
MAX_NAME_LENGTH: Final = 256
MAX_MEMBERS: Final = 200
"""What is read from a request is short, because the event loop works with it."""
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

    def list_stored_ids(self) -> tuple[str, ...]:
        """List the ids of the stored answers and conversations that the request reads."""
        values = [bytes(each) for each in (self.previous_response_id, self.conversation)]
        return tuple(_read_id(value) for value in values if value not in _EMPTY_VALUES)


_EMPTY_VALUES: Final = (b"", b"null", b'""')
_DECODE_HEAD: Final = msgspec.json.Decoder(RequestHead).decode


def _read_id(value: bytes) -> str:
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return value.decode("utf-8", "replace")


class Unreadable(Exception):
    """The body is not a valid request. The message is for the client."""


Span = tuple[int, int]
"""The start and the end of a part of a body."""
NO_SPAN: Final[Span] = (0, 0)


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
    stored_ids: tuple[str, ...] = ()
    """Ids of the answers and conversations from which the request continues."""
    input_size: int = 0
    """A bound on the input tokens without what the provider adds from elsewhere."""
    limit_span: Span = NO_SPAN
    budget_span: Span = NO_SPAN
    """Where the body has its output limit and its thinking budget."""
    usage_edit: tuple[Span, bytes] = (NO_SPAN, b"")
    """The edit that requests the usage, which a stream of Chat Completions reports only on request."""
    first_member_at: int = 0
    members: tuple[str, ...] = ()
    unknown_tools: tuple[str, ...] = ()

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
        size = self.input_size
        if self.names_content:
            return max(len(self.body) + ENVELOPE_TOKENS, window)
        if self.searches:
            size = RequestExtras(searches=self.searches).bound_input(size)
        return size * (2 if self.compacts else 1)

    def with_limit(self, tokens: int, window: int, *, new_name: bool = True) -> bytes:
        """Return the body to send, with a lower limit if the caps leave less, and with its usage requested."""
        edits: list[tuple[Span, bytes]] = [] if self.asks_usage else [self.usage_edit]
        if tokens < self.max_output(window):
            answer_limit = tokens // (self.answer_count * (2 if self.compacts else 1))
            edits += self._lower(answer_limit, new_name=new_name)
        return _edit(self.body, edits)

    def _lower(self, limit: int, *, new_name: bool) -> Iterator[tuple[Span, bytes]]:
        if self.max_output_tokens is None:
            name = self.dialect.limits[0] if new_name else self.dialect.limits[-1]
            yield _insert_member(self.body, self.first_member_at, b'"%s":%d' % (name.encode(), limit))
            return
        yield _replace_number(self.body, self.limit_span, limit, self.limit)
        if self.thinking_budget is not None and self.thinking_budget >= limit:
            yield _replace_number(self.body, self.budget_span, limit - 1, "budget_tokens")


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


def _bound_size(body: bytes, searchable: bytes) -> int:
    """Bound the input tokens by the size of a body, in which an image counts as one, not as its bytes."""
    size = len(body) + ENVELOPE_TOKENS
    if b"base64" in searchable:
        size += sum(IMAGE_TOKENS - len(image) for image in _find_images(body))
    return max(size, ENVELOPE_TOKENS)


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
    if max(map(len, (head.model, *head.list_stored_ids()))) > MAX_NAME_LENGTH:
        raise Unreadable(f"The name of a model or of a stored answer is longer than {MAX_NAME_LENGTH} characters.")
    limit = next((name for name in dialect.limits if getattr(head, name) is not None), "")
    searchable = _spell_out(body)
    searches = _count_searches(head, searchable)
    try:
        spans_by_name = _find_members(body)
    except ValueError as error:
        raise Unreadable(f"The request is not valid: {error}") from None
    if len(spans_by_name) > MAX_MEMBERS:
        raise Unreadable(f"The request has {len(spans_by_name):,} members. No provider knows more than {MAX_MEMBERS}.")
    thinking_span = spans_by_name.get("thinking", [NO_SPAN])[-1]
    budget_spans = _find_members(body[slice(*thinking_span)]).get("budget_tokens", [NO_SPAN])
    budget_start, budget_end = budget_spans[-1]
    tools = _list_tools(body, spans_by_name, searchable)
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
        unpriced_part=_find_unpriced(head, searchable, searches, limit, dialect, spans_by_name)
        or ("" if tools is not None else "it has the `type` of a tool more than once"),
        members=tuple(shorten(name, MAX_NAME_LENGTH) for name in spans_by_name),
        unknown_tools=tuple(islice(dict.fromkeys(_list_unknown_tools(tools or (), dialect)), MAX_MEMBERS)),
        input_size=_bound_size(body, searchable),
        limit_span=spans_by_name.get(limit, [NO_SPAN])[-1],
        budget_span=(thinking_span[0] + budget_start, thinking_span[0] + budget_end),
        usage_edit=_ask_for_usage(body, spans_by_name.get("stream_options", [NO_SPAN])[-1]),
        first_member_at=_find_first_member(body),
        stored_ids=head.list_stored_ids() if dialect is RESPONSES else (),
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


def _find_unpriced(
    head: RequestHead,
    body: bytes,
    searches: int | None,
    limit: str,
    dialect: WireDialect,
    spans_by_name: Mapping[str, Sequence[Span]],
) -> str:
    """Describe the part of a request that has no price, and that no hold can cover; empty if there is none."""
    if head.service_tier and head.service_tier not in _STANDARD_TIERS:
        return f"it uses the service tier {shorten(head.service_tier, 80)!r}, which has no listed price"
    if head.speed and head.speed != "standard":
        return f"it uses the speed {shorten(head.speed, 80)!r}, which has no listed price"
    if head.inference_geo and head.inference_geo != "global":
        return f"it uses the region {shorten(head.inference_geo, 80)!r}, which has no listed price"
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
        return f"it lets the provider run {shorten(tool, 80)}, whose cost has no bound"
    return _find_flaw_of_limit(head, limit, dialect, spans_by_name)


def _find_flaw_of_limit(
    head: RequestHead, limit: str, dialect: WireDialect, spans_by_name: Mapping[str, Sequence[Span]]
) -> str:
    """Describe a limit that is negative or ambiguous: the provider may read a different one of two duplicates."""
    if limit and getattr(head, limit) < 0:
        return f"its `{limit}` is negative"
    names = [name for name in dialect.limits if getattr(head, name) is not None]
    if len(names) > 1:
        return f"it has both `{names[0]}` and `{names[1]}`: remove one"
    for name, spans in spans_by_name.items():
        if len(spans) > 1:
            return f"it has `{shorten(name, 80)}` more than once"
    return ""


class _RepeatedType(Exception):
    """An object has a `type` more than once."""


def _reject_repeated_type(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if [name for name, _ in pairs].count("type") > 1:
        raise _RepeatedType
    return dict(pairs)


def _list_tools(
    body: bytes, spans_by_name: Mapping[str, Sequence[Span]], searchable: bytes
) -> Sequence[Mapping[str, Any]] | None:
    """List the tools of a request, also those that stand in its input; None if the type of one is ambiguous."""
    names = ["tools"] if b"additional_tools" not in searchable else ["tools", "input"]
    try:
        values = [
            (name, json.loads(body[slice(*span)], object_pairs_hook=_reject_repeated_type))
            for name in names
            for span in spans_by_name.get(name, ())
        ]
    except _RepeatedType:
        return None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"The request is not valid: {error}") from None
    pending: list[Any] = []
    for name, value in values:
        entries = _list_objects(value)
        pending += [value] if name == "tools" else [item.get("tools") for item in entries if _adds_tools(item)]
    tools: list[Mapping[str, Any]] = []
    while pending:
        for tool in _list_objects(pending.pop()):
            pending.append(tool.get("tools"))
            tools.append(tool)
    return tools


def _list_objects(value: Any) -> list[dict[str, Any]]:
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]


def _adds_tools(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "additional_tools"


def _list_unknown_tools(tools: Iterable[Mapping[str, Any]], dialect: WireDialect) -> Iterator[str]:
    for tool in tools:
        kind = tool.get("type")
        if kind is None and dialect is MESSAGES and "input_schema" in tool:
            continue
        if not isinstance(kind, str) or not is_known_tool(kind):
            yield shorten(str(kind or next(iter(tool), "an empty tool")), MAX_NAME_LENGTH)


_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
_OPENING: Final = frozenset((b"{", b"["))
_ENDING: Final = frozenset((b"}", b"]", b","))
_COLON: Final = re.compile(rb"\s*:\s*")


def _find_members(body: bytes) -> Mapping[str, list[Span]]:
    """Find the values of an object's members, by name; a name with several values is written several times."""
    spans_by_name: dict[str, list[Span]] = {}
    depth, name, start = 0, None, 0
    for token in _TOKEN.finditer(body):
        sign = token[0]
        if sign in _OPENING:
            depth += 1
        elif sign in _ENDING:
            if depth == 1 and name is not None:
                end = start + len(body[start : token.start()].rstrip())
                spans_by_name.setdefault(name, []).append((start, end))
                name = None
            depth -= sign != b","
        elif depth == 1 and name is None and (colon := _COLON.match(body, token.end())):
            name, start = str(json.loads(sign)), colon.end()
    return spans_by_name


def _list_members(body: bytes) -> list[list[str]]:
    """List the member names of every object, with duplicates; those of the outermost object come last."""
    members: list[list[str]] = []
    try:
        json.loads(body, object_pairs_hook=lambda pairs: members.append([key for key, _ in pairs]))
    except RecursionError as error:
        raise Unreadable(f"The request is not valid: {error}") from None
    return members


def _repeats(body: bytes, *names: str) -> bool:
    """Return True if any object has one of the members more than once."""
    return any(members.count(name) > 1 for members in _list_members(body) for name in names)


def _replace_number(body: bytes, span: Span, value: int, name: str) -> tuple[Span, bytes]:
    if not body[slice(*span)].isdigit():
        raise Unreadable(f"`{name}` of the request cannot be lowered. Write it as a plain number.")
    return span, b"%d" % value


def _find_first_member(body: bytes) -> int:
    opening = _OBJECT_START.match(body)
    if opening is None:
        raise Unreadable("The request is not a JSON object.")
    return opening.end()


def _insert_member(body: bytes, offset: int, member: bytes) -> tuple[Span, bytes]:
    """Insert a member before the first one of an object."""
    return (offset, offset), member + (b"" if body[offset : offset + 1] == b"}" else b",")


def _ask_for_usage(body: bytes, options_span: Span) -> tuple[Span, bytes]:
    """Make the edit that requests the usage. If the client turned the usage off, nothing is added: the hold counts."""
    start, end = options_span
    value = body[start:end]
    if options_span == NO_SPAN:
        return _insert_member(body, _find_first_member(body), b'"stream_options":{"include_usage":true}')
    if not value.startswith(b"{"):
        return options_span, b'{"include_usage":true}'
    if b"include_usage" in _spell_out(value):
        return NO_SPAN, b""
    offset = start + _find_first_member(value)
    return _insert_member(body, offset, b'"include_usage":true')


def _edit(body: bytes, edits: Iterable[tuple[Span, bytes]]) -> bytes:
    """Apply edits to parts of a body that do not overlap, with one copy of it."""
    view, pieces, position = memoryview(body), list[bytes | memoryview](), 0
    for (start, end), data in sorted(edits):
        pieces += [view[position:start], data]
        position = end
    return b"".join([*pieces, view[position:]]) if pieces else body


_MESSAGES_MEMBERS: Final = """
    model messages system max_tokens metadata stop_sequences stream tools tool_choice thinking output_config
    output_format cache_control diagnostics temperature top_p top_k service_tier speed inference_geo
    context_management container
"""
_CHAT_MEMBERS: Final = """
    model messages max_tokens max_completion_tokens n stream stream_options temperature top_p stop seed logit_bias
    logprobs top_logprobs presence_penalty frequency_penalty response_format tools tool_choice functions function_call
    parallel_tool_calls reasoning_effort verbosity metadata store user safety_identifier prompt_cache_key
    prompt_cache_retention service_tier web_search_options modalities
"""
_RESPONSES_MEMBERS: Final = """
    model input instructions max_output_tokens max_tool_calls stream stream_options temperature top_p top_logprobs
    reasoning text truncation include store tools tool_choice parallel_tool_calls metadata user safety_identifier
    prompt_cache_key prompt_cache_retention previous_response_id conversation prompt context_management service_tier
    background client_metadata
"""
_OPENROUTER_MEMBERS: Final = "usage reasoning include_reasoning transforms top_k top_a min_p repetition_penalty"

_MEMBERS: Final[Mapping[DialectName, frozenset[str]]] = MappingProxyType(
    {
        "messages": frozenset(_MESSAGES_MEMBERS.split()),
        "chat": frozenset(_CHAT_MEMBERS.split()),
        "responses": frozenset(_RESPONSES_MEMBERS.split()),
    }
)
_MEMBERS_BY_HOST: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"openrouter.ai": frozenset(_OPENROUTER_MEMBERS.split())}
)
_TOOL: Final = re.compile(
    r"function|custom|bash_\d+|text_editor_\d+|memory_\d+|computer_\d+|computer_toolset_\d+|local_shell|apply_patch"
    r"|namespace|tool_search(?:_tool)?(?:_bm25|_regex)?(?:_\d+)?|web_search(?:_preview)?(?:_\d[\d_]*)?"
)
"""The tools that run at the client, and the search, whose uses are counted."""


def list_known_members(dialect: DialectName, provider: str, base_url: str | None) -> frozenset[str]:
    host = urlsplit(base_url or "").hostname or ("openrouter.ai" if provider == "openrouter" else "")
    return _MEMBERS[dialect] | _MEMBERS_BY_HOST.get(host, frozenset())


def is_known_tool(tool_type: str) -> bool:
    return _TOOL.fullmatch(tool_type) is not None


def find_rates(
    call: ModelCall,
    model: ModelName,
    base_url: str | None,
    prices: Prices,
    allowed_members: Sequence[str] = (),
) -> ModelPrices | Unpriced | None:
    """Find the rates of a call that costs more than its model's plain tokens; None for a plain call."""
    if call.unpriced_part:
        return UnpricedFeature(model, call.unpriced_part)
    if unknown_part := _find_unknown(call, model, base_url, allowed_members):
        return UnpricedFeature(model, unknown_part)
    if not call.long_cache and not call.searches:
        return None
    rates = prices.find(model, base_url)
    if isinstance(rates, Unpriced):
        return rates
    extended_rates = rates.covering(RequestExtras(long_cache=call.long_cache, searches=call.searches))
    return UnpricedFeature(model, extended_rates) if isinstance(extended_rates, str) else extended_rates


def _find_unknown(call: ModelCall, model: ModelName, base_url: str | None, allowed_members: Sequence[str]) -> str:
    """Describe a part of a request that is not known, and so could cost anything; empty if there is none."""
    if runs_locally(model, base_url):
        return ""
    known_members = list_known_members(call.dialect.name, model.provider, base_url)
    unknown_names = [("member", name) for name in call.members if name not in known_members]
    for noun, unknown_name in (*unknown_names, *(("tool", tool) for tool in call.unknown_tools)):
        if unknown_name not in allowed_members:
            name = shorten(unknown_name, 80)
            return (
                f"its {noun} `{name}` is not known for {model.provider}. Remove it, or make a key of the proxy with "
                f"`--allow-member {name}` if its cost is bounded otherwise"
            )
    if model.provider == "openrouter" and model.model.endswith(":online"):
        return "the variant `:online` searches the web without a limit. Remove it"
    return ""
