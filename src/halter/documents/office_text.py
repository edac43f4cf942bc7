"""The text of Office documents."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from io import BytesIO
from typing import IO, Any, Final, Literal
from xml.parsers import expat
from zipfile import ZipFile

from halter.core.errors import explain_missing_module
from halter.core.ports import DocumentKind, Extracted, UnreadableFile
from halter.core.text import clean
from halter.documents.pdf_text import TOO_LONG, WITHOUT_TEXT

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
        return flaw or join_parts(kind, readers[kind](BytesIO(data)), limit)
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


def join_parts(kind: DocumentKind, document_parts: DocumentParts, limit: int) -> Extracted | UnreadableFile:
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
