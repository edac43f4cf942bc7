"""Attachments of a framework's request (pictures, sound and files), and the bound on their tokens.

Each adapter passes a request as JSON. Only the contents of messages are searched: the arguments of a call are text for
the model, whatever their keys are. A picture has a fixed bound in every position. The data of a picture in a user
message does not count as text. In other messages both the bound and the data count, because a framework may send a
tool's result as text. Any other attachment may fill the model's whole window.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, cast

import msgspec

from halter.adapters.guarded_runs import as_mapping
from halter.core.messages import AUDIO_PREFIX, Text
from halter.core.usage import ModelName
from halter.models.input_files import IMAGE_TOKENS, IMAGE_TYPES
from halter.models.providers import find_listed_window
from halter.proxy.dialect import DEFAULT_CONTEXT_WINDOW
from halter.runtime.external_effects import Ask
from halter.runtime.guard_api import GuardedSession

AttachmentKind = Literal["picture", "sound", "file"]
_CONTENT_KEYS: Final = ("content", "contents", "parts", "output", "result", "items", "data", "function_response")
"""The keys under which the frameworks' messages have their contents."""
_MEDIA_TYPE_KEYS: Final = ("mime_type", "media_type")
_NESTED_KEYS: Final = ("inline_data", "file_data", "source")
_KIND_BY_TYPE: Final[dict[str, AttachmentKind]] = {
    **dict.fromkeys(("image", "image_url", "image-url", "input_image", "computer_screenshot"), "picture"),
    **dict.fromkeys(("audio", "audio_url", "audio-url", "input_audio"), "sound"),
    **dict.fromkeys(("file", "input_file", "hosted_file", "uploaded-file", "binary", "media", "data", "uri"), "file"),
    **dict.fromkeys(("video", "video_url", "video-url", "document", "document_url", "document-url"), "file"),
}
_ATTACHMENT_HINT: Final = re.compile(rf'"(?:inline_data|file_data)":|:"(?:{"|".join(_KIND_BY_TYPE)})"')
"""Most requests do not match, and are not parsed."""
_DATA_URL: Final = re.compile(r"data:(image/\w+);base64,")


async def ask_model(
    session: GuardedSession, model: str, request_json: str, ask: Ask[Any], max_output_tokens: int
) -> Any:
    """Make a framework's request under the guard. `request_json` is the request as it is sent."""
    text, kinds = split_attachments(request_json)
    window = find_listed_window(ModelName.parse(model)) or DEFAULT_CONTEXT_WINDOW if kinds else 0
    attachments = tuple(_bound(kind, window) for kind in kinds)
    return await session.ask(model, text, ask, max_output_tokens=max_output_tokens, attached=attachments)


def _bound(kind: AttachmentKind, window: int) -> Text:
    media = f"{AUDIO_PREFIX}*" if kind == "sound" else ""
    return Text(f"[{kind}]", trusted=False, media=media, tokens=IMAGE_TOKENS if kind == "picture" else window)


def split_attachments(request_json: str) -> tuple[str, list[AttachmentKind]]:
    """Split a request into its text and the kinds of its attachments."""
    if _ATTACHMENT_HINT.search(request_json) is None:
        return request_json, []
    request = msgspec.json.decode(request_json)
    kinds = list(_find_attachments(request))
    return msgspec.json.encode(request).decode() if kinds else request_json, kinds


def _find_attachments(node: Any, type_key: str = "type", *, of_user: bool = False) -> Iterator[AttachmentKind]:
    """Yield the attachments, and drop the data of the user's pictures. `type_key` is the key that tells the kind."""
    if isinstance(node, list):
        for item in cast("list[Any]", node):
            yield from _find_attachments(item, type_key, of_user=of_user)
    elif isinstance(node, dict):
        content = cast("dict[str, Any]", node)
        kind = _classify(content, type_key)
        if kind is not None:
            if kind == "picture" and of_user:
                _drop_data(content)
            yield kind
            return
        is_user_message = (
            content.get("role") == "user" or content.get("type") == "human" or content.get("part_kind") == "user-prompt"
        )
        # A part of Pydantic AI contains a tool's result, which may have its own `type` keys.
        nested_type_key = "kind" if "part_kind" in content else type_key
        for key in _CONTENT_KEYS:
            yield from _find_attachments(content.get(key), nested_type_key, of_user=is_user_message)


def _classify(content: Mapping[str, Any], type_key: str) -> AttachmentKind | None:
    inner = [as_mapping(content.get(key)) for key in _NESTED_KEYS if isinstance(content.get(key), dict)]
    type_name = content.get(type_key)
    kind = _KIND_BY_TYPE.get(type_name) if isinstance(type_name, str) else None
    if kind is None and ("inline_data" in content or "file_data" in content):
        kind = "file"
    media = next(
        (value for each in (content, *inner) for key in _MEDIA_TYPE_KEYS if isinstance(value := each.get(key), str)), ""
    )
    if kind == "file" and media.startswith("image/"):
        return "picture"
    return "sound" if kind == "file" and media.startswith(AUDIO_PREFIX) else kind


def _drop_data(content: dict[str, Any]) -> None:
    """Drop the data of a picture of a type that providers accept."""
    inner: Any = next((content[key] for key in _NESTED_KEYS if isinstance(content.get(key), dict)), content)
    has_image_type = any(inner.get(key) in IMAGE_TYPES for key in _MEDIA_TYPE_KEYS)
    for container in (inner, content.get("image_url")):
        for key, value in [*as_mapping(container).items()]:
            address = _DATA_URL.match(value) if isinstance(value, str) else None
            is_image_data = address[1] in IMAGE_TYPES if address else has_image_type and key in ("data", "base64")
            if is_image_data and isinstance(value, str):
                cast("dict[str, Any]", container)[key] = f"[{len(value)} letters]"
