"""What an MCP server answers, as text for a model: each thing once, pictures and sounds only named."""

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast

from halter.core.text import clean
from halter.tools.process import MAX_OUTPUT, bytes_to_text


def render_contents(contents: Sequence[Any], structured: Any) -> str:
    """Join all parts of an answer into one text, each thing once.

    Most servers say the same as text and as structured content. What the other form says in full is left out.
    """
    from mcp_types import TextContent

    parts = [_part(content) for content in contents]
    texts = [content.text for content in contents if isinstance(content, TextContent)]
    if structured is None or _says_all(texts, structured):
        return "\n".join(parts)
    told = {value for value in _walk_scalars(structured) if isinstance(value, str)}
    kept = [part for part, content in zip(parts, contents, strict=True) if getattr(content, "text", None) not in told]
    return "\n".join([*kept, json.dumps(structured, ensure_ascii=False)])


def _part(content: Any) -> str:
    """Images and audio are only named: text models cannot use them and would pay for them."""
    from mcp_types import AudioContent, EmbeddedResource, ImageContent, ResourceLink, TextContent

    match content:
        case TextContent():
            return content.text
        case ImageContent():
            return f"[an image, {_one_line(content.mime_type)}, {_size(content.data)}, which text cannot show]"
        case AudioContent():
            return f"[a sound, {_one_line(content.mime_type)}, {_size(content.data)}, which text cannot show]"
        case ResourceLink():
            described = f": {content.description}" if content.description else ""
            return f"[a resource, {_one_line(content.uri)}]{described}"
        case EmbeddedResource():
            return f"[a resource, {_one_line(content.resource.uri)}]\n{_resource(content.resource)}"
        case _:
            return "[a part of a kind that is not understood]"


def _resource(resource: Any) -> str:
    from mcp_types import TextResourceContents

    if isinstance(resource, TextResourceContents):
        return resource.text
    try:
        return bytes_to_text(base64.b64decode(resource.blob), MAX_OUTPUT)
    except (binascii.Error, ValueError):
        return "[data that is not base64]"


def _says_all(said: Sequence[str], structured: Any) -> bool:
    """Whether texts contain all of a value: as its JSON, or each of its words and numbers.

    Servers wrap a value that is no object, often as `result`; of a list, each item may be a text of its own.
    """
    wrapped: Any = structured
    if isinstance(structured, dict) and len(cast("dict[str, Any]", structured)) == 1:
        (wrapped,) = cast("dict[str, Any]", structured).values()
    read = [_read_json(text) for text in said]
    if structured in read or wrapped in read or wrapped in (read, list(said)):
        return True
    whole = "\n".join(said)
    words = set(_WORDS.findall(whole))
    return bool(whole) and all(_is_said(value, whole, words) for value in _walk_scalars(structured))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _walk_scalars(value: Any) -> Iterator[Any]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += cast("dict[str, Any]", each).values()
        elif isinstance(each, list):
            left += cast("list[Any]", each)
        else:
            yield each


_WORDS: Final = re.compile(r"[\w.+-]*\w")


def _is_said(value: Any, whole: str, words: AbstractSet[str]) -> bool:
    """A word or number must stand alone: a 12 does not say 1."""
    if value is None:
        return True
    if isinstance(value, str) and _WORDS.fullmatch(value) is None:
        return value in whole
    return (value if isinstance(value, str) else json.dumps(value)) in words


def _size(data: str) -> str:
    return f"about {len(data) * 3 // 4:,} bytes"


def _one_line(text: object) -> str:
    return clean(" ".join(str(text).split()))[:200]
