"""What a framework's request shows a model beside text: pictures, sound and files, and how much they may cost.

A request is seen here as the JSON that its adapter made of it. Only what a message shows is looked at: the arguments of
a call are text for the model, however they name themselves. A picture has a bound of its own, wherever it lies. Of one
that the program itself has sent along, the data no longer counts as text; elsewhere both count, since a framework may
write what a tool returned out as text. All else that is no text may fill the model's whole window.
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
from halter.proxy.dialect import LARGEST_WINDOW
from halter.runtime.external import Ask
from halter.runtime.guard_api import GuardedSession

AttachmentKind = Literal["picture", "sound", "file"]
_SHOWN: Final = ("content", "contents", "parts", "output", "result", "items", "data", "function_response")
"""Where messages of the frameworks have what they show."""
_TYPES: Final = ("mime_type", "media_type")
_NESTED: Final = ("inline_data", "file_data", "source")
_KINDS: Final[dict[str, AttachmentKind]] = {
    **dict.fromkeys(("image", "image_url", "image-url", "input_image", "computer_screenshot"), "picture"),
    **dict.fromkeys(("audio", "audio_url", "audio-url", "input_audio"), "sound"),
    **dict.fromkeys(("file", "input_file", "hosted_file", "uploaded-file", "binary", "media", "data", "uri"), "file"),
    **dict.fromkeys(("video", "video_url", "video-url", "document", "document_url", "document-url"), "file"),
}
_MAY_ATTACH: Final = re.compile(rf'"(?:inline_data|file_data)":|:"(?:{"|".join(_KINDS)})"')
"""Most requests have nothing of this, and are not read."""
_DATA_ADDRESS: Final = re.compile(r"data:(image/\w+);base64,")


async def ask_model(session: GuardedSession, model: str, sent: str, ask: Ask[Any], most: int) -> Any:
    """Make a framework's request under the guard. `sent` is what is sent, as JSON; `most` bounds the answer."""
    text, kinds = split_attachments(sent)
    window = find_listed_window(ModelName.parse(model)) or LARGEST_WINDOW if kinds else 0
    attached = tuple(_bound(kind, window) for kind in kinds)
    return await session.ask(model, text, ask, max_output_tokens=most, attached=attached)


def _bound(kind: AttachmentKind, window: int) -> Text:
    media = f"{AUDIO_PREFIX}*" if kind == "sound" else ""
    return Text(f"[{kind}]", trusted=False, media=media, tokens=IMAGE_TOKENS if kind == "picture" else window)


def split_attachments(sent: str) -> tuple[str, list[AttachmentKind]]:
    """The text of a request, and what it shows beside it."""
    if _MAY_ATTACH.search(sent) is None:
        return sent, []
    request = msgspec.json.decode(sent)
    found = list(_find_attachments(request))
    return msgspec.json.encode(request).decode() if found else sent, found


def _find_attachments(node: Any, name: str = "type", *, of_user: bool = False) -> Iterator[AttachmentKind]:
    """Find what is shown, and take the data of the user's pictures out of the text; `name` is what tells its kind."""
    if isinstance(node, list):
        for each in cast("list[Any]", node):
            yield from _find_attachments(each, name, of_user=of_user)
    elif isinstance(node, dict):
        part = cast("dict[str, Any]", node)
        kind = _classify(part, name)
        if kind is not None:
            if kind == "picture" and of_user:
                _drop_data(part)
            yield kind
            return
        said = part.get("role") == "user" or part.get("type") == "human" or part.get("part_kind") == "user-prompt"
        # In a part of Pydantic AI's stands whatever a tool returned, which may have types of its own.
        inside = "kind" if "part_kind" in part else name
        for key in _SHOWN:
            yield from _find_attachments(part.get(key), inside, of_user=said)


def _classify(part: Mapping[str, Any], name: str) -> AttachmentKind | None:
    inner = [as_mapping(part.get(key)) for key in _NESTED if isinstance(part.get(key), dict)]
    named = part.get(name)
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None and ("inline_data" in part or "file_data" in part):
        kind = "file"
    media = next((said for each in (part, *inner) for key in _TYPES if isinstance(said := each.get(key), str)), "")
    if kind == "file" and media.startswith("image/"):
        return "picture"
    return "sound" if kind == "file" and media.startswith(AUDIO_PREFIX) else kind


def _drop_data(part: dict[str, Any]) -> None:
    """Leave out the data of a picture, where it is one of a kind that providers show."""
    inner: Any = next((part[key] for key in _NESTED if isinstance(part.get(key), dict)), part)
    typed = any(inner.get(key) in IMAGE_TYPES for key in _TYPES)
    for holder in (inner, part.get("image_url")):
        for key, value in [*as_mapping(holder).items()]:
            address = _DATA_ADDRESS.match(value) if isinstance(value, str) else None
            known = address[1] in IMAGE_TYPES if address else typed and key in ("data", "base64")
            if known and isinstance(value, str):
                cast("dict[str, Any]", holder)[key] = f"[{len(value)} letters]"
