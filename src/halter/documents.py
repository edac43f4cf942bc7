"""The text of documents: plain text, HTML, PDF, Office and mail. An unreadable file is a sentence, not an error.

Parsing runs in a process with little memory, an empty environment and a deadline: a hostile file can waste a minute of
that process, and nothing else. Texts are split into chunks that a model can read one by one. All functions except
`extract_text` block.
"""

import asyncio
import codecs
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email import message_from_bytes, policy
from email.message import EmailMessage
from hashlib import sha256
from html.parser import HTMLParser
from importlib import import_module
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Final, Literal
from xml.parsers import expat
from zipfile import ZipFile

import msgspec

from halter.core.errors import explain_missing_module
from halter.core.ports import DocumentKind, Extracted, UnreadableFile
from halter.core.text import clean
from halter.system.folders import FileEntries, FileRefusal, allow_all, describe_os_error, scan_folder

if TYPE_CHECKING:
    from pypdf import PdfReader

# Longer marks first: the UTF-32 mark starts with the UTF-16 mark.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_INSPECTED_LENGTH: Final = 64 * 1024
_MIN_ALLOWED_CONTROLS: Final = 8
_CHARACTERS_PER_CONTROL: Final = 33


def decode_text(data: bytes, charset: str = "") -> str | None:
    """Decode bytes to text that every store can hold; None if they are not text. `charset` is a declared charset."""
    for byte_order_mark, encoding in _MARKS:
        if data.startswith(byte_order_mark):
            return _require_text(data[len(byte_order_mark) :].decode(encoding, "replace"))
    for encoding in filter(None, (_detect_utf16(data), "utf-8", charset)):
        try:
            return _require_text(data.decode(encoding))
        except (UnicodeError, LookupError):
            continue
    return _require_text(_decode_legacy(data))


def _require_text(text: str) -> str | None:
    """Make a few control characters visible; return None for a text with many of them."""
    beginning = text[:_INSPECTED_LENGTH]
    control_count = sum(1 for _ in _CONTROL.finditer(beginning))
    return (
        None if control_count > max(_MIN_ALLOWED_CONTROLS, len(beginning) // _CHARACTERS_PER_CONTROL) else clean(text)
    )


def _detect_utf16(data: bytes) -> str:
    """Detect UTF-16 without a byte order mark: in plain text nearly every second byte is zero."""
    beginning = data[:_INSPECTED_LENGTH]
    even_zeros, odd_zeros = beginning[::2].count(0), beginning[1::2].count(0)
    if (
        len(data) % 2
        or max(even_zeros, odd_zeros) * 4 < len(beginning)
        or min(even_zeros, odd_zeros) * 20 > len(beginning)
    ):
        return ""
    return "utf-16-be" if even_zeros > odd_zeros else "utf-16-le"


def _decode_legacy(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


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
_MAIN: Final = "from halter.documents import main; main()"


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


_SILENT: Final = frozenset({"script", "style", "template", "noscript", "svg", "iframe", "object"})
_BLOCKS: Final = frozenset(
    {
        *("address", "article", "aside", "blockquote", "dd", "details", "dialog", "div", "dl"),
        *("dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3"),
        *("h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p"),
        *("pre", "section", "summary", "table", "title", "ul"),
    }
)
_LINES: Final = frozenset({"br", "li", "tr", "option", "caption"})
_CELLS: Final = frozenset({"td", "th"})
_CHARSET: Final = re.compile(rb"<meta[^>]{0,200}charset=[\"' ]{0,2}([A-Za-z0-9_-]{1,40})", re.IGNORECASE)
_SPACES: Final = re.compile(r"[ \t\f\r\n]+")


def extract_html_text(data: bytes) -> str | None:
    """Extract the text of a page; None if the bytes are not text."""
    charset = _CHARSET.search(data[:4096])
    page = decode_text(data, charset[1].decode() if charset else "")
    if page is None:
        return None
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    """A parser that collects text with the ends of its lines and paragraphs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._silent: list[str] = []
        self._as_written = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent.append(tag)
        self._as_written += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "pre":
            self._as_written = max(0, self._as_written - 1)
        if tag not in _CELLS:
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._parts.append(data if self._as_written else _SPACES.sub(" ", data))

    def text(self) -> str:
        lines = (line.strip(" \t\r") for line in "".join(self._parts).split("\n"))
        collapsed_lines: list[str] = []
        for line in lines:
            if line or (collapsed_lines and collapsed_lines[-1]):
                collapsed_lines.append(line)
        return "\n".join(collapsed_lines).strip("\n")

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag in _LINES:
            self._parts.append("\n")
        elif tag in _CELLS:
            self._parts.append("\t")


PAGE_SEPARATOR: Final = "\n\n"

PDF_DAMAGED: Final = "is damaged, or is not a PDF. Open it in another program and save it again, or leave it out."
PDF_PROTECTED: Final = "is protected by a password. Save a copy without one."
WITHOUT_TEXT: Final = "contains no text, perhaps only images. Run text recognition (OCR) first."
TOO_LONG: Final = "exceeds the maximum text length. Split it, or leave it out."


def extract_pdf_text(data: bytes, limit: int) -> Extracted | UnreadableFile:
    """Extract all pages. The sentence of an unreadable file continues its name."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(BytesIO(data))
        # Many files are only protected against printing, with an empty password.
        if reader.is_encrypted and not reader.decrypt(""):
            return UnreadableFile(PDF_PROTECTED)
        return _pages(reader, limit)
    except (FileNotDecryptedError, DependencyError):
        return UnreadableFile(PDF_PROTECTED)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  A parser of hostile files may raise anything.
        return UnreadableFile(PDF_DAMAGED)


def _pages(reader: "PdfReader", limit: int) -> Extracted | UnreadableFile:
    pages: list[int] = []
    texts: list[str] = []
    length = 0
    for page in reader.pages:
        page_text = clean(page.extract_text()).strip()
        pages.append(length)
        texts.append(page_text)
        length += len(page_text) + len(PAGE_SEPARATOR)
        if length > limit:
            return UnreadableFile(TOO_LONG)
    document_text = PAGE_SEPARATOR.join(texts)
    return Extracted(document_text, "pdf", tuple(pages)) if document_text.strip() else UnreadableFile(WITHOUT_TEXT)


OFFICE_DAMAGED: Final = "is damaged, or does not match its suffix. Save it again in its program, or leave it out."
OFFICE_LOCKED: Final = "has a password, or an older format. Save a copy without a password as docx, xlsx or pptx."
OFFICE_INFLATED: Final = "unpacks to too much data or too many parts; it was not read."
OFFICE_DECLARES: Final = "declares entities, which no Office program writes; it was not read."
MAX_PACKAGE_PARTS: Final = 10_000
MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
_OLE_SIGNATURE: Final = b"\xd0\xcf\x11\xe0"
_XML_PORTION: Final = 1 << 16


class _Declared(Exception):
    """An XML part declares a document type, which can define entities."""


def extract_office_text(kind: Literal["docx", "xlsx", "pptx"], data: bytes, limit: int) -> Extracted | UnreadableFile:
    """Extract all parts of a document, each sheet and slide after a line with its name."""
    if data.startswith(_OLE_SIGNATURE):
        return UnreadableFile(OFFICE_LOCKED)
    readers = {"docx": _read_word, "xlsx": _read_workbook, "pptx": _read_slides}
    try:
        flaw = _check_package(data)
        return flaw or _join_parts(kind, readers[kind](BytesIO(data)), limit)
    except ModuleNotFoundError as error:
        return UnreadableFile(f"cannot be read here. {explain_missing_module(error) or error}.")
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  A parser of hostile files may raise anything.
        return UnreadableFile(OFFICE_DAMAGED)


def _check_package(data: bytes) -> UnreadableFile | None:
    """Find a flaw of a package, such as too much unpacked data. The reader enforces the stated sizes."""
    with ZipFile(BytesIO(data)) as package:
        entries = package.infolist()
        if len(entries) > MAX_PACKAGE_PARTS or sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
            return UnreadableFile(OFFICE_INFLATED)
        try:
            for entry in entries:
                if entry.filename.endswith((".xml", ".rels")):
                    with package.open(entry) as file:
                        _reject_declarations(file)
        except _Declared:
            return UnreadableFile(OFFICE_DECLARES)
    return None


def _reject_declarations(file: IO[bytes]) -> None:
    """Reject a part with a document type. Only the start up to the first element is parsed; entities precede it."""
    parser, has_element = expat.ParserCreate(), False

    def on_doctype(*_: object) -> None:
        raise _Declared

    def on_element(*_: object) -> None:
        nonlocal has_element
        has_element = True

    parser.StartDoctypeDeclHandler = on_doctype
    parser.StartElementHandler = on_element
    while not has_element and (portion := file.read(_XML_PORTION)):
        parser.Parse(portion, False)  # noqa: FBT003


DocumentParts = Iterable[tuple[str, Iterable[str]]]
"""The parts of a document: a title, which may be empty, and lines."""


def _join_parts(kind: DocumentKind, document_parts: DocumentParts, limit: int) -> Extracted | UnreadableFile:
    offsets: list[int] = []
    lines_so_far: list[str] = []
    length, has_text = 0, False

    def add(line: str) -> None:
        nonlocal length
        lines_so_far.append(line)
        length += len(line) + 1

    for title, lines in document_parts:
        if lines_so_far:
            add("")
        offsets.append(length)
        if title:
            add(f"[{clean(title)}]")
        for line in lines:
            has_text = has_text or bool(line.strip())
            add(clean(line))
            if length > limit:
                return UnreadableFile(TOO_LONG)
    return Extracted("\n".join(lines_so_far), kind, tuple(offsets)) if has_text else UnreadableFile(WITHOUT_TEXT)


def _read_word(file: BytesIO) -> DocumentParts:
    from docx import Document
    from docx.oxml import parse_xml

    document: Any = Document(file)
    yield "", _read_paragraphs(document.element.body)
    part_names = ("header", "footer", "footnotes", "endnotes", "comments")
    for relation in document.part.rels.values():
        name = relation.reltype.rpartition("/")[2]
        if name in part_names and not relation.is_external:
            lines = [line for line in _read_paragraphs(parse_xml(relation.target_part.blob)) if line.strip()]
            if lines:
                yield name.capitalize(), lines


_SKIPPED_ELEMENTS: Final = frozenset(("pPr", "rPr", "tblPr", "Fallback", "delText", "instrText", "moveFrom"))
"""Elements without text of their own: settings, fallbacks for older programs, and deleted or moved text."""


def _read_paragraphs(element: Any) -> Iterator[str]:
    """Read paragraphs and tables of Word and PowerPoint, which share element names. A table row becomes a line."""
    for child in element:
        match _local_name(child):
            case "p":
                yield "".join(_read_runs(child))
            case "tbl":
                for row in child:
                    if _local_name(row) == "tr":
                        cells = (cell for cell in row if _local_name(cell) == "tc")
                        yield "\t".join(" ".join(filter(None, _read_paragraphs(cell))) for cell in cells)
            case name if name not in _SKIPPED_ELEMENTS:
                yield from _read_paragraphs(child)
            case _:
                pass


def _read_runs(element: Any) -> Iterator[str]:
    for child in element:
        match _local_name(child):
            case "t":
                yield child.text or ""
            case "tab":
                yield "\t"
            case "br" | "cr":
                yield "\n"
            case name if name not in _SKIPPED_ELEMENTS:
                yield from _read_runs(child)
            case _:
                pass


def _local_name(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else "Fallback"


def _read_slides(file: BytesIO) -> DocumentParts:
    from pptx import Presentation

    for number, slide in enumerate(Presentation(file).slides, 1):
        yield f"Slide {number}", filter(str.strip, _read_paragraphs(slide.element))
        if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame) and notes.text.strip():
            yield f"Notes of slide {number}", notes.text.splitlines()


def _read_workbook(file: BytesIO) -> DocumentParts:
    openpyxl: Any = import_module("openpyxl")
    for sheet in openpyxl.load_workbook(file, read_only=True, data_only=True, keep_links=False).worksheets:
        # The stated extent of a sheet may be a million columns wide.
        sheet.reset_dimensions()
        hidden_note = "" if sheet.sheet_state == "visible" else ", hidden"
        yield f"Sheet {sheet.title}{hidden_note}", _read_rows(sheet)


def _read_rows(sheet: Any) -> Iterator[str]:
    for row in sheet.iter_rows(values_only=True):
        cells = ["" if cell is None else " ".join(str(cell).split()) for cell in row]
        if any(cells):
            yield "\t".join(cells).rstrip("\t")


_MAIL_HEADERS: Final = ("From", "To", "Cc", "Date", "Subject")
MAX_MAIL_DEPTH: Final = 3
"""Maximum nesting of mails in mails."""


def extract_mail_text(data: bytes, limit: int, depth: int = 0) -> Extracted | UnreadableFile:
    """Extract the main headers, the text, and the readable attachments."""
    message = message_from_bytes(data, policy=policy.default)
    try:
        return _join_parts("eml", _read_mail(message, limit, depth), limit)
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


MAX_DOCUMENT_BYTES: Final = 50 * 1024 * 1024
_PORTION: Final = 1 << 20


class DocumentBytes(msgspec.Struct, frozen=True):
    """The bytes of a file and their digest, which identifies the document."""

    data: bytes
    digest: str


class _FileProblem(Exception):
    """A problem with a file, converted to `UnreadableFile`."""


def scan_documents(folder: Path, pattern: str) -> FileEntries | UnreadableFile:
    """List the files of a folder that match a pattern, without links that lead out of it."""
    listing = scan_folder(folder, pattern)
    return listing if isinstance(listing, UnreadableFile) else listing.files


def read_document(
    path: Path, limit: int = MAX_DOCUMENT_BYTES, refuses: FileRefusal = allow_all
) -> DocumentBytes | UnreadableFile:
    """Read a whole file, unless it is too large, changes meanwhile, or is refused."""
    try:
        with _open_regular_file(path, refuses) as (file, size):
            if size > limit:
                return UnreadableFile(
                    f"{_name(path)} has {size:,} bytes; the limit is {limit:,}. Split it, or leave it out."
                )
            data = b"".join(_portions(file, limit + 1))
            digest = sha256(data).hexdigest()
            _reject_other_bytes(path, digest, _digest(file, limit + 1))
    except _FileProblem as error:
        return UnreadableFile(str(error))
    return DocumentBytes(data, digest)


def digest_file(path: Path, refuses: FileRefusal = allow_all) -> str | UnreadableFile:
    try:
        with _open_regular_file(path, refuses) as (file, size):
            digest = _digest(file, size + 1)
            _reject_other_bytes(path, digest, _digest(file, size + 1))
    except _FileProblem as error:
        return UnreadableFile(str(error))
    return digest


@contextmanager
def _open_regular_file(path: Path, refuses: FileRefusal) -> Generator[tuple[int, int]]:
    """Open a regular file and yield its descriptor and size. Raises if the file changes before it is closed."""
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if refuses(path, file):
                raise _FileProblem(f"{_name(path)} leads to a file that the agent may not read.")
            old_status = os.fstat(file)
            _reject_other(path, old_status.st_mode)
            yield file, old_status.st_size
            new_status = os.fstat(file)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise _FileProblem(f"{_name(path)} does not exist, or was removed.") from None
    except (OSError, ValueError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else clean(str(error))
        raise _FileProblem(f"{_name(path)} cannot be read: {reason}.") from None
    if (old_status.st_size, old_status.st_mtime_ns) != (new_status.st_size, new_status.st_mtime_ns):
        raise _changed_error(path)


def _reject_other(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise _FileProblem(f"{_name(path)} is a folder: name a file in it.")
    if not stat.S_ISREG(mode):
        raise _FileProblem(f"{_name(path)} is not a regular file.")


def _reject_other_bytes(path: Path, first_digest: str, second_digest: str) -> None:
    """Reject a file that differs on a second read, since modification times are too coarse to detect every change."""
    if first_digest != second_digest:
        raise _changed_error(path)


def _changed_error(path: Path) -> _FileProblem:
    return _FileProblem(f"{_name(path)} changed while it was read. It is read again when it stops changing.")


def _digest(file: int, limit: int) -> str:
    digest = sha256()
    for portion in _portions(file, limit):
        digest.update(portion)
    return digest.hexdigest()


def _portions(file: int, limit: int) -> Generator[bytes]:
    """Read a file from the start in portions, up to `limit` bytes even if it grows."""
    os.lseek(file, 0, os.SEEK_SET)
    while limit > 0 and (portion := os.read(file, min(_PORTION, limit))):
        limit -= len(portion)
        yield portion


def _name(path: Path) -> str:
    return clean(path.name)


CHUNK_SIZE: Final = 1200
CHUNK_OVERLAP: Final = 150

_PARAGRAPH: Final = re.compile(r"\n[ \t\r]?\n")
_SENTENCE: Final = re.compile(r"[.!?\u2026][\"')\]\u201d\u2019\u00bb]?(?=\s)|[\u3002\uff01\uff1f]|\n")
_SPACE: Final = re.compile(r"\s")


def split_into_chunks(text: str, size: int = CHUNK_SIZE, overlap: int = CHUNK_OVERLAP) -> tuple[tuple[int, int], ...]:
    """Split a text into overlapping, non-empty spans of at most `size` characters that cover the whole text."""
    overlap_size = min(overlap, (size - 1) // 3)
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = _find_end(text, start, size)
        spans.append((start, end))
        start = end if end == len(text) else _find_start(text, end - overlap_size, end)
    return tuple(spans)


def _find_end(text: str, start: int, size: int) -> int:
    """Find the end of a chunk in the second half of its size: after a paragraph, a sentence or a word."""
    limit = start + size
    if limit >= len(text):
        return len(text)
    earliest = start + (size + 1) // 2
    for pattern in (_PARAGRAPH, _SENTENCE, _SPACE):
        ends = [match.end() for match in pattern.finditer(text, earliest, limit)]
        if ends:
            return ends[-1]
    return limit


def _find_start(text: str, earliest: int, end: int) -> int:
    """Find the start of the next chunk within the overlap: at a sentence, or else at a word."""
    for pattern in (_SENTENCE, _SPACE):
        match = pattern.search(text, earliest, end)
        if match and match.end() < end:
            return match.end()
    return earliest
