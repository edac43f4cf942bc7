"""The text of documents, extracted in a process with limits; a mail's attachments are documents too."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.ports import DocumentKind, Extracted, UnreadableFile
from halter.core.text import clean
from halter.documents.charset import decode_text
from halter.documents.html_text import extract_html_text
from halter.documents.office_text import DocumentParts, extract_office_text, join_parts
from halter.documents.pdf_text import extract_pdf_text
from halter.system.folders import describe_os_error

EXTRACT_TIMEOUT_SECONDS: Final = 60.0
MAX_MEMORY: Final = 1 << 30
MAX_TEXT_LENGTH: Final = 10_000_000
"""Maximum number of characters of a document: about four thousand pages."""

_TEXT: Final = ".txt .text .log .csv .tsv .json .jsonl .yaml .yml .toml .ini .cfg .conf .xml .rst .tex .srt .vtt"
KINDS_BY_SUFFIX: Final[Mapping[str, DocumentKind]] = MappingProxyType(
    {
        **dict.fromkeys(_TEXT.split(), "text"),
        **dict.fromkeys((".md", ".markdown"), "markdown"),
        **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
        **{f".{kind}": kind for kind in ("pdf", "docx", "xlsx", "pptx", "eml")},
    }
)
_MAIN: Final = "from halter.documents.extraction import main; main()"


class _Limits(msgspec.Struct, frozen=True):
    """The request to the process, sent before the bytes: the kind of the document, and the limits."""

    kind: DocumentKind
    memory: int
    seconds: int
    max_characters: int


def detect_document_kind(name: str) -> DocumentKind | None:
    """Return the kind of a file by its name; None if the kind is not supported."""
    return KINDS_BY_SUFFIX.get(PurePosixPath(name).suffix.lower())


async def extract(
    name: str,
    data: bytes,
    *,
    seconds: float = EXTRACT_TIMEOUT_SECONDS,
    memory: int = MAX_MEMORY,
    limit: int = MAX_TEXT_LENGTH,
) -> Extracted | UnreadableFile:
    """Extract the text of a file; its kind follows from its name."""
    display_name = clean(PurePosixPath(name).name) or "The file"
    kind = detect_document_kind(name)
    if kind is None:
        suffixes = ", ".join(sorted(KINDS_BY_SUFFIX))
        return UnreadableFile(f"{display_name} has an unsupported type. Supported types: {suffixes}.")
    if not data:
        return UnreadableFile(f"{display_name} is empty, or has not been written yet.")
    if kind not in ("text", "markdown"):
        limits = _Limits(kind, memory, max(1, round(seconds)), limit)
        try:
            outcome = await _extract_in_process(limits, data, seconds)
        except OSError as error:
            outcome = UnreadableFile(
                f"cannot be read now, because no process can be started: {describe_os_error(error)}."
            )
    else:
        outcome = _make_extracted(decode_text(data), kind, limit)
    return UnreadableFile(f"{display_name} {outcome.sentence}") if isinstance(outcome, UnreadableFile) else outcome


def _make_extracted(text: str | None, kind: DocumentKind, limit: int) -> Extracted | UnreadableFile:
    if text is None:
        return UnreadableFile("contains bytes that are not text. Give it the suffix of its type, or leave it out.")
    if len(text) > limit:
        return UnreadableFile(f"has {len(text):,} characters; the limit is {limit:,}. Split it.")
    if not text.strip():
        return UnreadableFile("contains only white space.")
    return Extracted(text, kind)


async def _extract_in_process(limits: _Limits, data: bytes, seconds: float) -> Extracted | UnreadableFile:
    """Extract in another process, which has ended when this function returns."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _MAIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            answer, _ = await process.communicate(msgspec.json.encode(limits) + b"\n" + data)
    except TimeoutError:
        return UnreadableFile(f"takes more than {seconds:g} seconds to read. Split it, or leave it out.")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        return msgspec.json.decode(answer, type=Extracted | UnreadableFile)
    except msgspec.DecodeError:
        return _explain_lost(process.returncode or 0, limits)


def _explain_lost(code: int, limits: _Limits) -> UnreadableFile:
    if code == -signal.SIGXCPU:
        return UnreadableFile(f"takes more than {limits.seconds} seconds to read. Split it, or leave it out.")
    return _explain_too_large(limits)


def _explain_too_large(limits: _Limits) -> UnreadableFile:
    return UnreadableFile(
        f"needs more than {limits.memory // (1 << 20):,} MB of memory to read, or crashed the reader. "
        "Split it, or leave it out."
    )


def main() -> None:
    """Read one file from stdin and answer on stdout, with limited resources."""
    limits = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Limits)
    # Set before the file is read; they cannot be raised again.
    for resource_id, limit in (
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_id, (limit, limit))
    try:
        answer = msgspec.json.encode(_parse_document(limits.kind, sys.stdin.buffer.read(), limits.max_characters))
    except (MemoryError, RecursionError):
        answer = msgspec.json.encode(_explain_too_large(limits))
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    os._exit(0)


def _parse_document(kind: DocumentKind, data: bytes, limit: int, depth: int = 0) -> Extracted | UnreadableFile:
    match kind:
        case "pdf":
            return extract_pdf_text(data, limit)
        case "docx" | "xlsx" | "pptx":
            return extract_office_text(kind, data, limit)
        case "eml":
            return extract_mail_text(data, limit, depth)
        case "html":
            return _make_extracted(extract_html_text(data), kind, limit)
        case "text" | "markdown":
            return _make_extracted(decode_text(data), kind, limit)


_MAIL_HEADERS: Final = ("From", "To", "Cc", "Date", "Subject")
MAX_MAIL_DEPTH: Final = 3
"""Maximum nesting of mails in mails."""


def extract_mail_text(data: bytes, limit: int, depth: int = 0) -> Extracted | UnreadableFile:
    """Extract the main headers, the text, and the readable attachments."""
    message = message_from_bytes(data, policy=policy.default)
    try:
        return join_parts("eml", _read_mail(message, limit, depth), limit)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  A parser of hostile files may raise anything.
        return _make_extracted(decode_text(data), "eml", limit)


def _read_mail(message: EmailMessage, limit: int, depth: int) -> DocumentParts:
    body = message.get_body(("plain", "html"))
    text = "" if body is None else _decode_mail_part(body)
    headers = (f"{name}: {' '.join(str(message[name]).split())}" for name in _MAIL_HEADERS if message[name] is not None)
    yield "", [*headers, "", *text.splitlines()]
    for attachment in message.iter_attachments():
        yield _read_attachment(attachment, limit, depth)


def _decode_mail_part(mail_part: Any) -> str:
    raw = mail_part.get_payload(decode=True) or b""
    if mail_part.get_content_type() == "text/html":
        return extract_html_text(raw) or ""
    return decode_text(raw, mail_part.get_content_charset("")) or ""


def _read_attachment(attachment: Any, limit: int, depth: int) -> tuple[str, Iterable[str]]:
    is_mail = attachment.get_content_type() == "message/rfc822"
    data = attachment.get_payload(0).as_bytes() if is_mail else attachment.get_payload(decode=True) or b""
    name = PurePosixPath(attachment.get_filename() or ("mail.eml" if is_mail else attachment.get_content_type())).name
    kind = detect_document_kind(name)
    if kind is None or depth >= MAX_MAIL_DEPTH:
        return f"Attachment {name}, {len(data):,} bytes, not read", ()
    outcome = _parse_document(kind, data, limit, depth + 1)
    if isinstance(outcome, UnreadableFile):
        return f"Attachment {name}, not read", (f"It {outcome.sentence}",)
    return f"Attachment {name}", outcome.text.splitlines()
