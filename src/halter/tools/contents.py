"""What a tool of an MCP server gave, as text for a model."""

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from halter.core.text import clean
from halter.tools.result import MAX_OUTPUT, bytes_to_text


def text_of(contents: Sequence[Any], structured: Any) -> str:
    """Put all parts of an answer into one text; structured content is added unless a part says the same."""
    from mcp_types import TextContent

    parts = [_part(content) for content in contents]
    said = [content.text for content in contents if isinstance(content, TextContent)]
    if structured is not None and not any(_says(text, structured) for text in said):
        parts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(parts)


def _part(content: Any) -> str:
    """Models that read text have no use for pictures and sounds, and would pay for every letter of them."""
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


def _says(text: str, structured: Any) -> bool:
    """Tell whether a text says all of a value. Servers wrap a value that is no object into one, as its `result`."""
    match structured:
        case {"result": wrapped, **others} if not others:
            meant = (structured, wrapped)
        case _:
            meant = (structured,)
    try:
        return text in meant or json.loads(text) in meant
    except (ValueError, RecursionError):
        return False


def _size(data: str) -> str:
    return f"about {len(data) * 3 // 4:,} bytes"


def _one_line(text: object) -> str:
    return clean(" ".join(str(text).split()))[:200]
