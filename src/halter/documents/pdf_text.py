"""The text of PDFs."""

from io import BytesIO
from typing import TYPE_CHECKING, Final

from halter.core.ports import Extracted, UnreadableFile
from halter.core.text import clean

if TYPE_CHECKING:
    from pypdf import PdfReader

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
