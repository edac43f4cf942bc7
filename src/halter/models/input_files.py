"""Pictures, PDFs and texts that a program gives a model with its first message.

What stands in a file was written by others: its part of the message is never trusted. The most tokens that it may take
are held before it is sent, and the true number is settled. Audio has prices of its own, which are not known: it is
refused.
"""

import mimetypes
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.messages import Message, Text

IMAGE_TYPES: Final = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp"))
PDF: Final = "application/pdf"
TEXT_TYPES: Final = frozenset(("application/json", "application/xml", "application/yaml", "application/x-yaml"))
IMAGE_TOKENS: Final = 16_000
"""More than any of the large providers counts for one picture, at its highest resolution."""
PAGE_TOKENS: Final = 5_000
"""More than a printed page of a PDF takes, read as text and seen as a picture; hidden text may take more."""
LARGEST_FILE: Final = 20 * 1024 * 1024
LARGEST_IN_ALL: Final = 30 * 1024 * 1024
_GAP: Final = rb"(?:[\s\0]|%[^\r\n]*[\r\n])*"
_PAGE: Final = re.compile(rb"/Type" + _GAP + rb"/Page(?![A-Za-z])")
_KIDS: Final = re.compile(rb"/Kids" + _GAP + rb"(?:\[([^\]]*)|\d)")
_LINK: Final = re.compile(rb"(\d+)[\s\0]+\d+[\s\0]+R")
_ESCAPED: Final = re.compile(rb"#([0-9A-Fa-f]{2})")
_HIDES_PAGES: Final = b"/ObjStm"


class File(msgspec.Struct, frozen=True):
    """A file for a model. `pages` bounds a PDF whose pages cannot be counted; a wrong number is an overrun."""

    data: bytes
    media_type: str
    name: str = "file"
    pages: int = 0


def make_files_message(files: Iterable[File | str | Path]) -> Message:
    """Make a message of files. Raises ConfigError for one that no model may be given."""
    read = [each if isinstance(each, File) else _read(Path(each)) for each in files]
    whole = sum(len(each.data) for each in read)
    if whole > LARGEST_IN_ALL:
        raise ConfigError(f"The files have {whole:,} bytes together, and may have {LARGEST_IN_ALL:,}.")
    return Message("user", tuple(_make_part(each) for each in read))


def _read(path: Path) -> File:
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    return File(data, kind, path.name)


def _make_part(file: File) -> Text:
    if len(file.data) > LARGEST_FILE:
        raise ConfigError(f"{file.name} has more than {LARGEST_FILE:,} bytes, which is the most for one file.")
    kind = file.media_type.partition(";")[0].strip().lower()
    label = f"[{file.name}, {kind}, {len(file.data):,} bytes]"
    if kind in IMAGE_TYPES:
        return _attach(file, kind, label, IMAGE_TOKENS)
    if kind == PDF:
        return _attach(file, kind, label, PAGE_TOKENS * _count_pages(file))
    if kind.startswith("text/") or kind in TEXT_TYPES:
        words = file.data.decode("utf-8", "replace")
        return Text(f"{label}\n{words}", "document", trusted=False, source=file.name)
    raise ConfigError(
        f"{file.name} is {kind}, which cannot be given to a model here: give a PNG, JPEG, GIF, WebP, PDF or text."
    )


def _attach(file: File, kind: str, label: str, tokens: int) -> Text:
    return Text(label, "document", trusted=False, source=file.name, media=kind, data=file.data, tokens=tokens)


def _count_pages(file: File) -> int:
    """Count the pages of a PDF without parsing it: what is compressed, or shown again, cannot be counted."""
    if file.pages > 0:
        return file.pages
    # A name may be written in numbers.
    data = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), file.data)
    lists = [(each, _LINK.findall(each)) for each in _KIDS.findall(data)]
    unclear = any(not each or b"%" in each or len(links) > len({*links}) for each, links in lists)
    found = max(len(_PAGE.findall(data)), len({link for _, links in lists for link in links}))
    if _HIDES_PAGES in data or unclear or not found:
        raise ConfigError(
            f"The pages of {file.name} cannot be counted, so its cost is not bounded: say how many there are, as in "
            f"File(data, {PDF!r}, {file.name!r}, pages=12)."
        )
    return found
