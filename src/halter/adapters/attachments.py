"""A framework's request as the guard holds it: its attachments (pictures, sound, files), and the limit of its answer.

**Attachments.** Each adapter passes a request as JSON. Only the contents of messages are searched: the arguments of a
call are text for the model, whatever their keys are. A picture has a fixed bound in every position. The data of a
picture in a user message does not count as text. In other messages both the bound and the data count, because a
framework may send a tool's result as text. Any other attachment may fill the model's whole window.

**Limits.** What the framework's own settings say is sent and held as it is. Otherwise, the `max_output_tokens` of the
adapter is sent and held. Without either, no limit is sent, and the model's longest answer is held. Only if the caps
leave less, a lower limit is sent. An answer that this cut is reported with a warning.
"""

import re
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.messages import AUDIO_PREFIX, Text
from halter.core.usage import ModelName
from halter.external.dialect import DEFAULT_CONTEXT_WINDOW, DEFAULT_MAX_OUTPUT
from halter.external.effects import ModelResult
from halter.external.guard import GuardedSession
from halter.models.input_files import IMAGE_TOKENS, IMAGE_TYPES
from halter.models.sellers import find_listed_window

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


LIMIT_NAMES: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens", "num_predict", "max_new_tokens")
"""The names under which frameworks and providers limit an answer."""
_SETTINGS_WITHIN: Final = ("extra_body", "extra_args", "model_kwargs")
"""The settings that a framework passes on to its provider unread."""


class FrameworkRequest(msgspec.Struct, frozen=True):
    """A framework's request: its model, everything that is sent, and the limits that the framework knows of."""

    model: str
    sent_json: str
    own_limit: int | None = None
    longest: int | None = None


AskWithin = Callable[[int | None], Awaitable[ModelResult[Any]]]
"""Makes a request with at most this number of output tokens; None leaves the framework's settings unchanged."""


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a framework's value if it is a mapping, and an empty mapping otherwise."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


class AnswerCut(UserWarning):
    """The caps left room for a shorter answer than the model wrote, so it was cut."""


class OutputLimit(msgspec.Struct, frozen=True):
    """The limit of an answer: the framework's own, else the adapter's, else the longest that the framework knows of."""

    own: int | None
    of_adapter: int | None = None
    longest: int | None = None

    def find_maximum(self, model: str) -> int:
        if limit := self.own or self.of_adapter:
            return limit
        return min(self.longest or DEFAULT_MAX_OUTPUT, _find_window(model))

    def find_change(self, granted: int, maximum: int) -> int | None:
        """Return the limit to send; None if the framework's own settings already say so."""
        is_unlimited = self.of_adapter is None and self.longest is None
        return None if granted == maximum and (self.own or is_unlimited) else granted


async def ask_model(
    session: GuardedSession, request: FrameworkRequest, ask: AskWithin, max_output_tokens: int | None
) -> Any:
    """Make a framework's request under the guard. `max_output_tokens` limits an answer that has no limit of its own."""
    model, limit = request.model, OutputLimit(request.own_limit, max_output_tokens, request.longest)
    text, kinds = split_attachments(request.sent_json)
    window = _find_window(model) if kinds else 0
    attachments = tuple(_bound(kind, window) for kind in kinds)
    maximum, cut_at = limit.find_maximum(model), 0

    async def ask_within(granted: int) -> ModelResult[Any]:
        nonlocal cut_at
        result = await ask(limit.find_change(granted, maximum))
        is_cut = granted < maximum and result.usage is not None and result.usage.output_tokens >= granted
        cut_at = granted if is_cut else 0
        return result

    answer = await session.ask(model, text, ask_within, max_output_tokens=maximum, attached=attachments)
    if cut_at:
        warnings.warn(_describe_cut(model, cut_at, maximum), AnswerCut, stacklevel=2)
    return answer


def _describe_cut(model: str, cut_at: int, maximum: int) -> str:
    return (
        f"An answer of {model} was cut at {cut_at:,} tokens: the caps left no room for {maximum:,}, its limit. "
        "Raise the cap (max_cost_usd), or set the model's own limit (max_tokens) to what an answer needs."
    )


def find_limit(settings: Mapping[str, Any]) -> int | None:
    """Find the limit of an answer in a framework's settings. Of several, the provider may use the highest."""
    return max(_list_limits(settings), default=None)


def _list_limits(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if name in LIMIT_NAMES and isinstance(value, int) and value > 0:
            yield value
        elif name in _SETTINGS_WITHIN:
            yield from _list_limits(as_mapping(value))


def lower_limit(settings: Mapping[str, Any], limit: int | None, name: str = LIMIT_NAMES[0]) -> dict[str, Any]:
    """Copy settings with a lower limit, which is added as `name` if they have none. None changes nothing."""
    if limit is None:
        return {**settings}
    lowered = lower_limits(settings, limit)
    return lowered if any(_list_limits(lowered)) else {**lowered, name: limit}


def lower_limits(settings: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Copy settings with a lower limit wherever they have one."""
    lowered = {**settings}
    for name, value in settings.items():
        if name in LIMIT_NAMES and isinstance(value, int):
            lowered[name] = min(value, limit) if value > 0 else limit
        elif name in _SETTINGS_WITHIN and isinstance(value, Mapping):
            lowered[name] = lower_limits(cast("Mapping[str, Any]", value), limit)
    return lowered


def _find_window(model: str) -> int:
    return find_listed_window(ModelName.parse(model)) or DEFAULT_CONTEXT_WINDOW


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
