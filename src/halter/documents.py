"""The text of files: encodings, HTML, PDF, Office and mail; what cannot be read is a sentence. Functions block.

Parsing runs in a process with little memory, an empty environment and a deadline: a hostile file can waste a minute of
it and nothing else. Texts are split into chunks that a model can read one by one.
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
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default as mail_policy
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
from halter.core.folders import FileEntries, FileRefusal, allow_all, describe_os_error, scan_folder
from halter.core.ports import DocumentKind, Extracted, UnreadableFile
from halter.core.text import clean

if TYPE_CHECKING:
    from pypdf import PdfReader

# The longer mark first: the UTF-32 mark starts with the UTF-16 mark.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_LOOKED_AT: Final = 64 * 1024
_FEW: Final = 8
_ONE_IN: Final = 33


def decode_text(data: bytes, declared: str = "") -> str | None:
    """Decodes bytes as text that any store can keep; None if they are no text. `declared` is the declared charset."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _require_text(data[len(mark) :].decode(encoding, "replace"))
    for encoding in filter(None, (_detect_utf16(data), "utf-8", declared)):
        try:
            return _require_text(data.decode(encoding))
        except (UnicodeError, LookupError):
            continue
    return _require_text(_decode_legacy(data))


def _require_text(text: str) -> str | None:
    """Returns None for a text full of control characters; a few are made visible."""
    beginning = text[:_LOOKED_AT]
    strange = sum(1 for _ in _CONTROL.finditer(beginning))
    return None if strange > max(_FEW, len(beginning) // _ONE_IN) else clean(text)


def _detect_utf16(data: bytes) -> str:
    """Detects UTF-16 without a mark: in plain text nearly every other byte is zero."""
    beginning = data[:_LOOKED_AT]
    first, second = beginning[::2].count(0), beginning[1::2].count(0)
    if len(data) % 2 or max(first, second) * 4 < len(beginning) or min(first, second) * 20 > len(beginning):
        return ""
    return "utf-16-be" if first > second else "utf-16-le"


def _decode_legacy(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


EXTRACT_TIMEOUT_SECONDS: Final = 60.0
MOST_MEMORY: Final = 1 << 30
MOST_TEXT: Final = 10_000_000
"""Most characters of a document: about four thousand pages."""

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
    """Sent to the process before the bytes: the kind, and its limits."""

    kind: DocumentKind
    memory: int
    seconds: int
    most: int


def detect_document_kind(name: str) -> DocumentKind | None:
    """Returns the kind of a file by its name; None if it cannot be read."""
    return KINDS_BY_SUFFIX.get(PurePosixPath(name).suffix.lower())


async def extract(
    name: str,
    data: bytes,
    *,
    seconds: float = EXTRACT_TIMEOUT_SECONDS,
    memory: int = MOST_MEMORY,
    limit: int = MOST_TEXT,
) -> Extracted | UnreadableFile:
    """Extracts the text of a file, by the kind that its name says."""
    shown = clean(PurePosixPath(name).name) or "The file"
    kind = detect_document_kind(name)
    if kind is None:
        known = ", ".join(sorted(KINDS_BY_SUFFIX))
        return UnreadableFile(f"{shown} is of a kind that cannot be read: what can is {known}.")
    if not data:
        return UnreadableFile(f"{shown} is empty: nothing was written to it, or not yet.")
    if kind not in ("text", "markdown"):
        limits = _Limits(kind, memory, max(1, round(seconds)), limit)
        try:
            extracted = await _extract_in_process(limits, data, seconds)
        except OSError as error:
            extracted = UnreadableFile(
                f"cannot be read at present, since no program can be started: {describe_os_error(error)}."
            )
    else:
        extracted = _make_extracted(decode_text(data), kind, limit)
    return UnreadableFile(f"{shown} {extracted.sentence}") if isinstance(extracted, UnreadableFile) else extracted


def _make_extracted(text: str | None, kind: DocumentKind, limit: int) -> Extracted | UnreadableFile:
    if text is None:
        return UnreadableFile("holds bytes that are no text: give it the ending of what it is, or leave it out.")
    if len(text) > limit:
        return UnreadableFile(f"holds {len(text):,} characters, and a document may have {limit:,}: split it.")
    if not text.strip():
        return UnreadableFile("holds no text, only blanks.")
    return Extracted(text, kind)


async def _extract_in_process(limits: _Limits, data: bytes, seconds: float) -> Extracted | UnreadableFile:
    """Extracts in another process, which has ended when this returns."""
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
        return UnreadableFile(
            f"takes more than {seconds:g} seconds to read, and was given up: split it, or leave it out."
        )
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
        return UnreadableFile(f"takes more than {limits.seconds} seconds to read, and was given up: split it.")
    return _explain_too_large(limits)


def _explain_too_large(limits: _Limits) -> UnreadableFile:
    return UnreadableFile(
        f"needs more than {limits.memory // (1 << 20):,} MB of memory to be read, or made the reader crash: "
        "split it, or leave it out."
    )


def main() -> None:
    """Reads one file from stdin and answers on stdout, after dropping what it does not need."""
    limits = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Limits)
    # Before the file is read: these limits cannot be raised again.
    for what, limit in (
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    try:
        answer = msgspec.json.encode(_parse_document(limits.kind, sys.stdin.buffer.read(), limits.most))
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
    """Extracts the text of a page; None if the bytes are no text."""
    declared = _CHARSET.search(data[:4096])
    page = decode_text(data, declared[1].decode() if declared else "")
    if page is None:
        return None
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    """Collects text, and where a line or a paragraph ends."""

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
        kept: list[str] = []
        for line in lines:
            if line or (kept and kept[-1]):
                kept.append(line)
        return "\n".join(kept).strip("\n")

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._parts.append("\n\n")
        elif tag in _LINES:
            self._parts.append("\n")
        elif tag in _CELLS:
            self._parts.append("\t")


PAGE_SEPARATOR: Final = "\n\n"

PDF_DAMAGED: Final = "is damaged, or is no PDF: open it with another program and save it anew, or leave it out."
PDF_PROTECTED: Final = "is protected by a password: save a copy without one."
WITHOUT_TEXT: Final = "holds no text, only pictures perhaps: run it through text recognition first."
TOO_LONG: Final = "holds more text than a document may have: split it, or leave it out."


def extract_pdf_text(data: bytes, limit: int) -> Extracted | UnreadableFile:
    """Extracts all pages. Sentences continue the name of the file."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(BytesIO(data))
        # Many are only protected against printing and have an empty password.
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
    parts: list[str] = []
    length = 0
    for page in reader.pages:
        text = clean(page.extract_text()).strip()
        pages.append(length)
        parts.append(text)
        length += len(text) + len(PAGE_SEPARATOR)
        if length > limit:
            return UnreadableFile(TOO_LONG)
    whole = PAGE_SEPARATOR.join(parts)
    return Extracted(whole, "pdf", tuple(pages)) if whole.strip() else UnreadableFile(WITHOUT_TEXT)


OFFICE_DAMAGED: Final = "is damaged, or is not what its ending says: save it anew with its program, or leave it out."
OFFICE_LOCKED: Final = "has a password, or is of an older kind: save a copy without one, as docx, xlsx or pptx."
OFFICE_INFLATED: Final = "holds far more than its size tells, or too many parts: it is not unpacked."
OFFICE_DECLARES: Final = "declares entities, which no Office program writes: it is not read."
MOST_PARTS: Final = 10_000
MOST_UNPACKED: Final = 256 * 1024 * 1024
_OLDER: Final = b"\xd0\xcf\x11\xe0"
_XML_PORTION: Final = 1 << 16


class _Declared(Exception):
    """An XML part declares a document type."""


def extract_office_text(kind: Literal["docx", "xlsx", "pptx"], data: bytes, limit: int) -> Extracted | UnreadableFile:
    """Extracts all parts of a document, each sheet and slide under a line with its name."""
    if data.startswith(_OLDER):
        return UnreadableFile(OFFICE_LOCKED)
    readers = {"docx": _read_word, "xlsx": _read_workbook, "pptx": _read_slides}
    try:
        flaw = _check_package(data)
        return flaw or _join_parts(kind, readers[kind](BytesIO(data)), limit)
    except ModuleNotFoundError as missing:
        return UnreadableFile(f"cannot be read here. {explain_missing_module(missing) or missing}.")
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  A parser of hostile files may raise anything.
        return UnreadableFile(OFFICE_DAMAGED)


def _check_package(data: bytes) -> UnreadableFile | None:
    """Refuses what unpacks to too much. The sizes that a package states are those that its reader stops at."""
    with ZipFile(BytesIO(data)) as package:
        parts = package.infolist()
        if len(parts) > MOST_PARTS or sum(part.file_size for part in parts) > MOST_UNPACKED:
            return UnreadableFile(OFFICE_INFLATED)
        try:
            for part in parts:
                if part.filename.endswith((".xml", ".rels")):
                    with package.open(part) as opened:
                        _reject_declarations(opened)
        except _Declared:
            return UnreadableFile(OFFICE_DECLARES)
    return None


def _reject_declarations(part: IO[bytes]) -> None:
    """Looks at a part up to its first element: entities are declared before it."""
    parser, begun = expat.ParserCreate(), False

    def declared(*_: object) -> None:
        raise _Declared

    def begins(*_: object) -> None:
        nonlocal begun
        begun = True

    parser.StartDoctypeDeclHandler = declared
    parser.StartElementHandler = begins
    while not begun and (portion := part.read(_XML_PORTION)):
        parser.Parse(portion, False)  # noqa: FBT003


DocumentParts = Iterable[tuple[str, Iterable[str]]]
"""The parts of a document: a title, or none, and lines."""


def _join_parts(kind: DocumentKind, parts: DocumentParts, limit: int) -> Extracted | UnreadableFile:
    places: list[int] = []
    written: list[str] = []
    length, found = 0, False

    def add(line: str) -> None:
        nonlocal length
        written.append(line)
        length += len(line) + 1

    for title, lines in parts:
        if written:
            add("")
        places.append(length)
        if title:
            add(f"[{clean(title)}]")
        for line in lines:
            found = found or bool(line.strip())
            add(clean(line))
            if length > limit:
                return UnreadableFile(TOO_LONG)
    return Extracted("\n".join(written), kind, tuple(places)) if found else UnreadableFile(WITHOUT_TEXT)


def _read_word(file: BytesIO) -> DocumentParts:
    from docx import Document
    from docx.oxml import parse_xml

    document: Any = Document(file)
    yield "", _read_paragraphs(document.element.body)
    beside = ("header", "footer", "footnotes", "endnotes", "comments")
    for relation in document.part.rels.values():
        name = relation.reltype.rpartition("/")[2]
        if name in beside and not relation.is_external:
            lines = [line for line in _read_paragraphs(parse_xml(relation.target_part.blob)) if line.strip()]
            if lines:
                yield name.capitalize(), lines


_UNSAID: Final = frozenset(("pPr", "rPr", "tblPr", "Fallback", "delText", "instrText", "moveFrom"))
"""Settings, what a reader of older programs sees instead, what was deleted, and what was moved away."""


def _read_paragraphs(element: Any) -> Iterator[str]:
    """Reads what Word and PowerPoint name alike: paragraphs and tables, whose rows become lines."""
    for child in element:
        match _local_name(child):
            case "p":
                yield "".join(_read_runs(child))
            case "tbl":
                for row in child:
                    if _local_name(row) == "tr":
                        cells = (cell for cell in row if _local_name(cell) == "tc")
                        yield "\t".join(" ".join(filter(None, _read_paragraphs(cell))) for cell in cells)
            case name if name not in _UNSAID:
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
            case name if name not in _UNSAID:
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
        # The extent that a sheet states may be a million columns wide.
        sheet.reset_dimensions()
        hidden = "" if sheet.sheet_state == "visible" else ", hidden"
        yield f"Sheet {sheet.title}{hidden}", _read_rows(sheet)


def _read_rows(sheet: Any) -> Iterator[str]:
    for row in sheet.iter_rows(values_only=True):
        cells = ["" if cell is None else " ".join(str(cell).split()) for cell in row]
        if any(cells):
            yield "\t".join(cells).rstrip("\t")


_MAIL_HEADERS: Final = ("From", "To", "Cc", "Date", "Subject")
MOST_ENCLOSED: Final = 3
"""How deep mails in mails are read."""


def extract_mail_text(data: bytes, limit: int, depth: int = 0) -> Extracted | UnreadableFile:
    """Extracts the main headers, the text, and what is attached, if it can be read itself."""
    message = message_from_bytes(data, policy=mail_policy)
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
    for part in message.iter_attachments():
        yield _read_attachment(part, limit, depth)


def _decode_mail_part(part: Any) -> str:
    raw = part.get_payload(decode=True) or b""
    if part.get_content_type() == "text/html":
        return extract_html_text(raw) or ""
    return decode_text(raw, part.get_content_charset("")) or ""


def _read_attachment(part: Any, limit: int, depth: int) -> tuple[str, Iterable[str]]:
    enclosed = part.get_content_type() == "message/rfc822"
    data = part.get_payload(0).as_bytes() if enclosed else part.get_payload(decode=True) or b""
    name = PurePosixPath(part.get_filename() or ("mail.eml" if enclosed else part.get_content_type())).name
    kind = detect_document_kind(name)
    if kind is None or depth >= MOST_ENCLOSED:
        return f"Attachment {name}, {len(data):,} bytes, not read", ()
    extracted = _parse_document(kind, data, limit, depth + 1)
    if isinstance(extracted, UnreadableFile):
        return f"Attachment {name}, not read", (f"It {extracted.sentence}",)
    return f"Attachment {name}", extracted.text.splitlines()


MOST_BYTES: Final = 50 * 1024 * 1024
_PORTION: Final = 1 << 20


class DocumentBytes(msgspec.Struct, frozen=True):
    """The bytes of a file and their digest, which identifies the document."""

    data: bytes
    digest: str


class _FileProblem(Exception):
    """A problem with a file; becomes a value."""


def scan_documents(folder: Path, pattern: str) -> FileEntries | UnreadableFile:
    """Lists the files of a folder that match a pattern, without links that lead out of it."""
    found = scan_folder(folder, pattern)
    return found if isinstance(found, UnreadableFile) else found.files


def read_document(
    path: Path, limit: int = MOST_BYTES, refuses: FileRefusal = allow_all
) -> DocumentBytes | UnreadableFile:
    """Reads a whole file, unless it is too large, changes meanwhile, or is refused."""
    try:
        with _open_regular_file(path, refuses) as (file, size):
            if size > limit:
                return UnreadableFile(
                    f"{_name(path)} has {size:,} bytes, and a document may have {limit:,}: split it, or leave it out."
                )
            data = b"".join(_portions(file, limit + 1))
            digest = sha256(data).hexdigest()
            _reject_other_bytes(path, digest, _digest(file, limit + 1))
    except _FileProblem as trouble:
        return UnreadableFile(str(trouble))
    return DocumentBytes(data, digest)


def digest_file(path: Path, refuses: FileRefusal = allow_all) -> str | UnreadableFile:
    try:
        with _open_regular_file(path, refuses) as (file, size):
            digest = _digest(file, size + 1)
            _reject_other_bytes(path, digest, _digest(file, size + 1))
    except _FileProblem as trouble:
        return UnreadableFile(str(trouble))
    return digest


@contextmanager
def _open_regular_file(path: Path, refuses: FileRefusal) -> Generator[tuple[int, int]]:
    """Opens a regular file for reading. Raises if it changes until it is closed."""
    try:
        # Without O_NONBLOCK, opening a pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if refuses(path, file):
                raise _FileProblem(f"{_name(path)} leads to what an agent may not read.")
            before = os.fstat(file)
            _reject_other(path, before.st_mode)
            yield file, before.st_size
            after = os.fstat(file)
        finally:
            os.close(file)
    except (FileNotFoundError, NotADirectoryError):
        raise _FileProblem(f"{_name(path)} is not there, or not any more.") from None
    except (OSError, ValueError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else clean(str(error))
        raise _FileProblem(f"{_name(path)} cannot be read: {why}.") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _changed_error(path)


def _reject_other(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise _FileProblem(f"{_name(path)} is a folder: name a file in it.")
    if not stat.S_ISREG(mode):
        raise _FileProblem(f"{_name(path)} is no plain file.")


def _reject_other_bytes(path: Path, first: str, second: str) -> None:
    """Refuses a file that differs on a second read: its modification time is too coarse."""
    if first != second:
        raise _changed_error(path)


def _changed_error(path: Path) -> _FileProblem:
    return _FileProblem(f"{_name(path)} was changed while it was read: it is read again when it has come to rest.")


def _digest(file: int, limit: int) -> str:
    digest = sha256()
    for portion in _portions(file, limit):
        digest.update(portion)
    return digest.hexdigest()


def _portions(file: int, limit: int) -> Generator[bytes]:
    """Reads from the beginning; of a growing file no more than `most`."""
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
    """Splits a text into spans of at most `size` characters that overlap, cover all of it, and are not empty."""
    back = min(overlap, (size - 1) // 3)
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = _find_end(text, start, size)
        found.append((start, end))
        start = end if end == len(text) else _find_start(text, end - back, end)
    return tuple(found)


def _find_end(text: str, start: int, size: int) -> int:
    """Finds the end of a chunk, in the second half of its size: after a paragraph, a sentence or a word."""
    limit = start + size
    if limit >= len(text):
        return len(text)
    least = start + (size + 1) // 2
    for sign in (_PARAGRAPH, _SENTENCE, _SPACE):
        ends = [match.end() for match in sign.finditer(text, least, limit)]
        if ends:
            return ends[-1]
    return limit


def _find_start(text: str, least: int, end: int) -> int:
    """Finds the start of the next chunk within the overlap: at a sentence, or else a word."""
    for sign in (_SENTENCE, _SPACE):
        match = sign.search(text, least, end)
        if match and match.end() < end:
            return match.end()
    return least
