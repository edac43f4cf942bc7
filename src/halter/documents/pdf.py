"""The text of a PDF. It may be anything, so this runs in a process that may be lost."""

from io import BytesIO
from typing import TYPE_CHECKING, Final

from halter.core.library import Extracted, Unreadable
from halter.core.text import clean

if TYPE_CHECKING:
    from pypdf import PdfReader

BETWEEN: Final = "\n\n"

DAMAGED: Final = "is damaged, or is no PDF: open it with another program and save it anew, or leave it out."
PROTECTED: Final = "is protected by a password: save a copy without one."
WITHOUT_TEXT: Final = "holds no text, only pictures perhaps: run it through text recognition first."
TOO_LONG: Final = "holds more text than a document may have: split it, or leave it out."


def pdf_text(data: bytes, most: int) -> Extracted | Unreadable:
    """Read all pages. The sentences follow the name of the file."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(BytesIO(data))
        # Many are protected against printing only, and are read without a password.
        if reader.is_encrypted and not reader.decrypt(""):
            return Unreadable(PROTECTED)
        return _pages(reader, most)
    except (FileNotDecryptedError, DependencyError):
        return Unreadable(PROTECTED)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  A parser of hostile files fails in every way there is; all of them mean this.
        return Unreadable(DAMAGED)


def _pages(reader: "PdfReader", most: int) -> Extracted | Unreadable:
    pages: list[int] = []
    parts: list[str] = []
    length = 0
    for page in reader.pages:
        text = clean(page.extract_text()).strip()
        pages.append(length)
        parts.append(text)
        length += len(text) + len(BETWEEN)
        if length > most:
            return Unreadable(TOO_LONG)
    whole = BETWEEN.join(parts)
    return Extracted(whole, "pdf", tuple(pages)) if whole.strip() else Unreadable(WITHOUT_TEXT)
