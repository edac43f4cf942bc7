"""Images, PDFs, audio and texts that a person, a program or a tool passes to a model.

The content of a file is never trusted. The maximum number of tokens is held before a file is sent, and the true number
is settled. The length of audio is taken from the file where that is reliable: from the samples of a WAV, and from the
frames of an MP3. For other audio, the program states it.
"""

import math
import mimetypes
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from halter.core.errors import ConfigError
from halter.core.messages import AUDIO_PREFIX, Message, Text
from halter.core.tools import OFFICE_TYPES, File
from halter.core.usage import ModelName
from halter.models.wires.table import WIRES
from halter.spec.models import WireFormat

IMAGE_TYPES: Final = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp"))
PDF: Final = "application/pdf"
TEXT_TYPES: Final = frozenset(("application/json", "application/xml", "application/yaml", "application/x-yaml"))
IMAGE_TOKENS: Final = 16_000
"""More than any large provider counts for one image at its highest resolution."""
PAGE_TOKENS: Final = 5_000
"""More than a printed page of a PDF takes as text and image together; hidden text can take more."""
WAV: Final = "audio/wav"
MP3: Final = "audio/mpeg"
AUDIO_TYPES: Final = MappingProxyType(
    {
        **dict.fromkeys(("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"), WAV),
        **dict.fromkeys(("audio/mpeg", "audio/mp3"), MP3),
        **dict.fromkeys(("audio/flac", "audio/x-flac"), "audio/flac"),
        **dict.fromkeys(("audio/aiff", "audio/x-aiff"), "audio/aiff"),
        **dict.fromkeys(("audio/aac", "audio/x-aac"), "audio/aac"),
        "audio/ogg": "audio/ogg",
    }
)
"""Media types of audio, with the names that the wires use."""
SECOND_TOKENS: Final = 50
"""More than any large provider counts for a second of audio."""
MAX_INPUT_FILE_BYTES: Final = 20 * 1024 * 1024
MAX_TOTAL_BYTES: Final = 30 * 1024 * 1024
MAX_PICTURE_BYTES: Final = 3_900_000
"""What the strictest large provider takes, after base64."""
MAX_PICTURE_SIDE: Final = 8_000
"""The pixels of a side that the strictest large provider takes."""
_ANNOTATED_NAME: Final = re.compile(r"(.+)#(pages|seconds)=(\d{1,6})")
_GAP: Final = rb"(?:[\s\0]|%[^\r\n]*[\r\n])*"
_PAGE: Final = re.compile(rb"/Type" + _GAP + rb"/Page(?![A-Za-z])")
_KIDS: Final = re.compile(rb"/Kids" + _GAP + rb"(?:\[([^\]]*)|\d)")
_LINK: Final = re.compile(rb"(\d+)[\s\0]+\d+[\s\0]+R")
_ESCAPED: Final = re.compile(rb"#([0-9A-Fa-f]{2})")
_HIDES_PAGES: Final = b"/ObjStm"


def make_files_message(files: Iterable[File | str | Path]) -> Message:
    """Make a message of files. Raises ConfigError for a file that cannot be sent to a model."""
    return Message("user", tuple(make_file_part(file) for file in open_files(files)))


def open_files(files: Iterable[File | str | Path]) -> tuple[File, ...]:
    """Read the files that are named by their paths. Raises ConfigError if they are too large together."""
    contents = tuple(each if isinstance(each, File) else _read(Path(each)) for each in files)
    total = sum(len(each.data) for each in contents)
    if total > MAX_TOTAL_BYTES:
        raise ConfigError(f"The files have {total:,} bytes in total; the limit is {MAX_TOTAL_BYTES:,}.")
    return contents


def _read(path: Path) -> File:
    """Read a file. `#pages=N` or `#seconds=N` after its path sets that field, unless a file has that very name."""
    annotations: dict[str, Any] = {}
    match = _ANNOTATED_NAME.fullmatch(path.name)
    if match is not None and not path.exists():
        path, annotations = path.with_name(match[1]), {match[2]: int(match[3])}
    media_type = OFFICE_TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or "text/plain"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INPUT_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    return File(data, media_type, path.name, **annotations)


def read_media_type(file: File) -> str:
    return file.media_type.partition(";")[0].strip().lower()


def describe_file(file: File) -> str:
    return f"[{file.name}, {read_media_type(file)}, {len(file.data):,} bytes]"


def make_text_part(file: File, text: str) -> Text:
    return Text(f"{describe_file(file)}\n{text}", "document", trusted=False, source=file.name)


def make_file_part(file: File) -> Text:
    if len(file.data) > MAX_INPUT_FILE_BYTES:
        raise ConfigError(f"{file.name} exceeds the limit of {MAX_INPUT_FILE_BYTES:,} bytes for one file.")
    kind, label = read_media_type(file), describe_file(file)
    if kind in IMAGE_TYPES:
        return _attach(file, kind, label, IMAGE_TOKENS)
    if kind == PDF:
        return _attach(file, kind, label, PAGE_TOKENS * _count_pages(file))
    if kind in AUDIO_TYPES:
        return _attach(file, AUDIO_TYPES[kind], label, math.ceil(SECOND_TOKENS * _measure_seconds(file)))
    if (kind.startswith("text/") or kind in TEXT_TYPES) and b"\0" not in file.data:
        return make_text_part(file, file.data.decode("utf-8", "replace"))
    raise ConfigError(
        f"{file.name} has the unsupported type {kind}. Use PNG, JPEG, GIF, WebP, PDF, DOCX, XLSX, PPTX, WAV, MP3, "
        "FLAC, OGG, AIFF, AAC or text."
    )


def _attach(file: File, kind: str, label: str, tokens: int) -> Text:
    return Text(label, "document", trusted=False, source=file.name, media=kind, data=file.data, tokens=tokens)


def _count_pages(file: File) -> int:
    """Count the pages of a PDF without parsing it. Raises ConfigError if pages are compressed or shown twice."""
    if file.pages > 0:
        return file.pages
    # Names can contain hexadecimal escapes.
    data = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), file.data)
    lists = [(each, _LINK.findall(each)) for each in _KIDS.findall(data)]
    links = [link for _, each in lists for link in each]
    # A node in two lists is shown twice, with everything below it.
    is_ambiguous = len(links) > len({*links}) or any(not each or b"%" in each for each, _ in lists)
    page_count = max(len(_PAGE.findall(data)), len(links))
    if _HIDES_PAGES in data or is_ambiguous or not page_count:
        raise ConfigError(
            f"Cannot count the pages of {file.name}, so its cost is not bounded. State their number, as in "
            f"{file.name}#pages=12, or in Python File(data, {PDF!r}, {file.name!r}, pages=12)."
        )
    return page_count


_PNG: Final = b"\x89PNG\r\n\x1a\n"
_GIF: Final = (b"GIF87a", b"GIF89a")
_JPEG: Final = b"\xff\xd8"
_MARKER: Final = re.compile(rb"\xff([^\0\xff])")
"""A marker of a JPEG. Readers skip what stands before one: any number of its first byte, and what is damaged."""
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG that its size follows."""
_ALONE: Final = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers of a JPEG that no length follows."""
_MAX_SEGMENTS: Final = 10_000
"""Far more than any JPEG has before its size."""


def explain_unseen(data: bytes) -> str:
    """Describe why a provider rejects a picture, which would end the session that has it. Empty if it takes it."""
    if len(data) > MAX_PICTURE_BYTES:
        return f"it has more than {MAX_PICTURE_BYTES:,} bytes. Make it smaller."
    size = _measure_picture(data)
    if max(size) > MAX_PICTURE_SIDE:
        return f"it is larger than {MAX_PICTURE_SIDE:,} pixels. Make it smaller, or cut it."
    return "" if all(size) else "it is damaged, or is not a picture."


def _measure_picture(data: bytes) -> tuple[int, int]:
    """Read the width and height of a picture. (0, 0) if they cannot be read."""
    if data.startswith(_PNG):
        return _unpack_size(">II", data, 16)
    if data.startswith(_GIF):
        return _unpack_size("<HH", data, 6)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _measure_webp(data)
    return _measure_jpeg(data) if data.startswith(_JPEG) else (0, 0)


def _unpack_size(layout: str, data: bytes, at: int) -> tuple[int, int]:
    if at + struct.calcsize(layout) > len(data):
        return 0, 0
    width, height = struct.unpack_from(layout, data, at)
    return width, height


def _measure_jpeg(data: bytes) -> tuple[int, int]:
    """Read the size of a JPEG as its readers do, which also take a segment whose length is too small."""
    at = len(_JPEG)
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None:
            break
        at = marker.end()
        if marker[1][0] in _FRAMES:
            height, width = _unpack_size(">HH", data, at + 3)
            return width, height
        if marker[1][0] not in _ALONE:
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return 0, 0


def _measure_webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8X" if len(data) >= 30:  # noqa: PLR2004 The bytes before the pixels.
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L" if len(data) >= 25:  # noqa: PLR2004
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = _unpack_size("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case _:
            return 0, 0


def explain_unheard(message: Message, model: ModelName, wire: WireFormat) -> str:
    """Describe why a model does not take the audio in a message. Empty if it does."""
    audio_parts = [part for part in message.parts if isinstance(part, Text) and part.media.startswith(AUDIO_PREFIX)]
    unsupported_part = next((part for part in audio_parts if part.media not in (WAV, MP3)), None)
    protocol = WIRES[wire]
    if audio_parts and protocol.audio == "none":
        audio = audio_parts[0]
        other_wire = ""
        if protocol.audio_wire is not None:
            other_wire = f", or set `providers.{model.provider}.wire` to `{protocol.audio_wire}`"
        return (
            f"{model} takes no audio over the wire {wire}, but {audio.source} is {audio.media}. "
            f"Use a model that takes audio{other_wire}."
        )
    if unsupported_part is not None and protocol.audio == "wav_and_mp3":
        return (
            f"{model} takes audio as WAV or MP3, but {unsupported_part.source} is {unsupported_part.media}. Convert it."
        )
    return ""


def _measure_seconds(file: File) -> float:
    if file.seconds > 0:
        return file.seconds
    kind = AUDIO_TYPES[file.media_type.partition(";")[0].strip().lower()]
    seconds = {WAV: _measure_wav, MP3: _measure_mp3}.get(kind, _measure_nothing)(file.data)
    if not seconds:
        raise ConfigError(
            f"Cannot measure the length of {file.name}, so its cost is not bounded. State its seconds, as in "
            f"{file.name}#seconds=90, or in Python File(data, {kind!r}, {file.name!r}, seconds=90)."
        )
    return seconds


def _measure_nothing(data: bytes) -> float:  # noqa: ARG001 The length that such a file states is not reliable.
    return 0


_PLAIN_SAMPLES: Final = frozenset((1, 3, 0xFFFE))
"""Formats of a WAV whose samples all have the same size: integers, floats, and the extensible format of both."""


def _measure_wav(data: bytes) -> float:
    """Measure the seconds of uncompressed audio: all bytes of the file, at the rate of its one format."""
    formats: list[bytes] = []
    at = 12
    while data[:4] == b"RIFF" and data[8:12] == b"WAVE" and at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            formats.append(data[at + 8 : at + 24])
        at += 8 + size + size % 2
    if len(formats) != 1 or len(formats[0]) < 16:  # noqa: PLR2004 The bytes of a format.
        return 0
    kind, channels, rate, byte_rate, frame, bits = struct.unpack("<HHIIHH", formats[0])
    # If these differ, a decoder may use any of them.
    per_second = min(rate * channels * bits // 8, rate * frame, byte_rate)
    return len(data) / per_second if kind in _PLAIN_SAMPLES and per_second else 0


_KBITS: Final = MappingProxyType(
    {
        (3, 3): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
        (3, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
        (3, 1): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
        (2, 3): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
        (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    }
)
"""Kilobits per second, by the bits of the MPEG version and its layer."""
_RATES: Final = MappingProxyType({3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)})


def _measure_mp3(data: bytes) -> float:
    """Measure the seconds of all frames. Returns 0 if there is data between them, where a decoder may find others."""
    at, end, seconds = _skip_tag(data), len(data), 0.0
    if data[-128:-125] == b"TAG":
        end -= 128
    while at + 4 <= end:
        size, length = _read_frame(data[at : at + 4])
        if not size:
            return 0
        at, seconds = at + size, seconds + length
    return seconds if at >= end else 0


def _skip_tag(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < 10:  # noqa: PLR2004 The bytes before a tag.
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | (byte & 0x7F)
    return 10 + size + (10 if data[5] & 0x10 else 0)


def _read_frame(header: bytes) -> tuple[int, float]:
    """Read the bytes and seconds of a frame. Returns (0, 0) for an invalid one, or one without a stated length."""
    bits = int.from_bytes(header, "big")
    version, layer, bit_rate, rate = bits >> 19 & 3, bits >> 17 & 3, bits >> 12 & 15, bits >> 10 & 3
    if bits >> 21 != 0x7FF or version == 1 or not layer or bit_rate in (0, 15) or rate == 3:  # noqa: PLR2004
        return 0, 0.0
    per_second = _KBITS[3 if version == 3 else 2, layer if version == 3 or layer == 3 else 2][bit_rate - 1] * 1000  # noqa: PLR2004
    hertz, padding = _RATES[version][rate], bits >> 9 & 1
    if layer == 3:  # noqa: PLR2004 The first of the three layers, whose slots have four bytes.
        return (12 * per_second // hertz + padding) * 4, 384 / hertz
    samples = 576 if layer == 1 and version != 3 else 1152  # noqa: PLR2004
    return samples // 8 * per_second // hertz + padding, samples / hertz
