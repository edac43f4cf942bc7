"""Renders the contents of an MCP server's answer as text for a model, and finds its pictures and documents."""

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from mimetypes import guess_extension
from pathlib import PurePosixPath
from typing import Any, Final, cast
from urllib.parse import urlsplit

from halter.core.text import clean
from halter.core.tools import OFFICE_TYPES, File
from halter.tools.process import MAX_OUTPUT, bytes_to_text


def render_contents(contents: Sequence[Any], structured_content: Any) -> str:
    """Join all parts of an answer into one text, without repetition.

    Most servers send the same content as text and as structured content. A form that the other one contains in full is
    left out.
    """
    from mcp_types import TextContent

    parts = [_part(content) for content in contents]
    texts = [content.text for content in contents if isinstance(content, TextContent)]
    if structured_content is None or _contains_all(texts, structured_content):
        return "\n".join(filter(None, parts))
    structured_texts = {value for value in _walk_scalars(structured_content) if isinstance(value, str)}
    remaining = [
        part
        for part, content in zip(parts, contents, strict=True)
        if getattr(content, "text", None) not in structured_texts
    ]
    return "\n".join([*filter(None, remaining), json.dumps(structured_content, ensure_ascii=False)])


_DOCUMENT_TYPES: Final = frozenset(("application/pdf", *OFFICE_TYPES.values()))


def find_files(contents: Sequence[Any]) -> tuple[File, ...]:
    """Find the images and binary resources of an answer. Audio is only named."""
    from mcp_types import BlobResourceContents, EmbeddedResource, ImageContent

    files: list[File] = []
    for content in contents:
        match content:
            case ImageContent():
                encoded, kind, name = content.data, content.mime_type, ""
            case EmbeddedResource(resource=BlobResourceContents() as resource) if _is_document(resource):
                path = PurePosixPath(urlsplit(str(resource.uri)).path)
                encoded, kind, name = resource.blob, resource.mime_type or "", path.name
            case _:
                continue
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            continue
        kind = _one_line(kind)
        files.append(File(data, kind, _one_line(name) or f"file {len(files) + 1}{guess_extension(kind) or ''}"))
    return tuple(files)


def _is_document(resource: Any) -> bool:
    """Return whether a resource is a picture, a PDF or an Office document; other binary ones are shown as base64."""
    kind = getattr(resource, "mime_type", None) or ""
    return hasattr(resource, "blob") and (kind.startswith("image/") or kind in _DOCUMENT_TYPES)


def _part(content: Any) -> str:
    """Render one part. Audio is only named: few models can use it."""
    from mcp_types import AudioContent, EmbeddedResource, ImageContent, ResourceLink, TextContent

    match content:
        case TextContent():
            return content.text
        case ImageContent():
            return ""
        case AudioContent():
            return f"[audio, {_one_line(content.mime_type)}, {_size(content.data)}, not shown]"
        case ResourceLink():
            description = f": {content.description}" if content.description else ""
            return f"[resource, {_one_line(content.uri)}]{description}"
        case EmbeddedResource(resource=resource) if _is_document(resource):
            return f"[resource, {_one_line(resource.uri)}]"
        case EmbeddedResource():
            return f"[resource, {_one_line(content.resource.uri)}]\n{_resource(content.resource)}"
        case _:
            return "[content of an unknown type]"


def _resource(resource: Any) -> str:
    from mcp_types import TextResourceContents

    if isinstance(resource, TextResourceContents):
        return resource.text
    try:
        return bytes_to_text(base64.b64decode(resource.blob), MAX_OUTPUT)
    except (binascii.Error, ValueError):
        return "[invalid base64 data]"


def _contains_all(texts: Sequence[str], structured_content: Any) -> bool:
    """Return true if texts contain all of a value: as its JSON, or each of its words and numbers.

    Servers wrap a value that is not an object, often as `result`; each item of a list may be a separate text.
    """
    inner_value: Any = structured_content
    if isinstance(structured_content, dict) and len(cast("dict[str, Any]", structured_content)) == 1:
        (inner_value,) = cast("dict[str, Any]", structured_content).values()
    values = [_read_json(text) for text in texts]
    if structured_content in values or inner_value in values or inner_value in (values, list(texts)):
        return True
    joined_text = "\n".join(texts)
    words = set(_WORD_PATTERN.findall(joined_text))
    return bool(joined_text) and all(
        _is_contained(value, joined_text, words) for value in _walk_scalars(structured_content)
    )


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _walk_scalars(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += cast("dict[str, Any]", item).values()
        elif isinstance(item, list):
            pending += cast("list[Any]", item)
        else:
            yield item


_WORD_PATTERN: Final = re.compile(r"[\w.+-]*\w")


def _is_contained(value: Any, text: str, words: AbstractSet[str]) -> bool:
    """Return true if a text contains a value. A word or number must match whole: 12 does not contain 1."""
    if value is None:
        return True
    if isinstance(value, str) and _WORD_PATTERN.fullmatch(value) is None:
        return value in text
    return (value if isinstance(value, str) else json.dumps(value)) in words


def _size(data: str) -> str:
    return f"about {len(data) * 3 // 4:,} bytes"


def _one_line(text: object) -> str:
    return clean(" ".join(str(text).split()))[:200]
