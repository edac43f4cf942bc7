"""Office files and mails are read as text with their parts named; the hostile ones do no harm."""

import sys
from collections.abc import Callable
from email.message import EmailMessage
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from docx import Document
from openpyxl import Workbook
from pptx import Presentation

from halter.core.ports import Extracted, UnreadableFile
from halter.documents.extraction import extract
from halter.documents.office_text import MAX_PACKAGE_PARTS, MAX_UNPACKED_BYTES, extract_office_text


async def text_of(name: str, data: bytes) -> str:
    outcome = await extract(name, data)
    assert isinstance(outcome, Extracted), outcome
    return outcome.text


async def flaw_of(name: str, data: bytes) -> str:
    outcome = await extract(name, data)
    assert isinstance(outcome, UnreadableFile), outcome
    return outcome.sentence


def docx() -> bytes:
    document = Document()
    document.add_heading("The lease", 1)
    document.add_paragraph("The rent is due.")
    table = document.add_table(2, 2)
    for place, text in (((0, 0), "month"), ((0, 1), "rent"), ((1, 0), "May"), ((1, 1), "500")):
        table.cell(*place).text = text
    document.add_paragraph("It is paid late.")
    document.sections[0].footer.paragraphs[0].text = "Draft"
    stream = BytesIO()
    document.save(stream)
    return stream.getvalue()


def xlsx() -> bytes:
    book = Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.title = "Rent"
    for row in (["month", "rent"], [None, None], ["May", 500.5]):
        sheet.append(row)
    hidden = book.create_sheet("Notes")
    hidden["B2"] = "two\nlines"
    hidden.sheet_state = "hidden"
    stream = BytesIO()
    book.save(stream)
    return stream.getvalue()


def pptx() -> bytes:
    slides = Presentation()
    first = slides.slides.add_slide(slides.slide_layouts[1])
    first.shapes.title.text = "The plan"
    first.placeholders[1].text = "One\nTwo"
    first.notes_slide.notes_text_frame.text = "Speak slowly."
    second = slides.slides.add_slide(slides.slide_layouts[5])
    second.shapes.title.text = "Figures"
    table = second.shapes.add_table(1, 2, 0, 0, 100, 100).table
    table.cell(0, 0).text, table.cell(0, 1).text = "May", "500"
    stream = BytesIO()
    slides.save(stream)
    return stream.getvalue()


MADE: dict[str, Callable[[], bytes]] = {"a.docx": docx, "a.xlsx": xlsx, "a.pptx": pptx}
TEXTS = {
    "a.docx": "The lease\nThe rent is due.\nmonth\trent\nMay\t500\nIt is paid late.\n\n[Footer]\nDraft",
    "a.xlsx": "[Sheet Rent]\nmonth\trent\nMay\t500.5\n\n[Sheet Notes, hidden]\n\ttwo lines",
    "a.pptx": "[Slide 1]\nThe plan\nOne\nTwo\n\n[Notes of slide 1]\nSpeak slowly.\n\n[Slide 2]\nFigures\nMay\t500",
}


@pytest.mark.parametrize("name", MADE)
async def test_an_office_file_is_read_with_its_parts_named(name: str) -> None:
    outcome = await extract(name, MADE[name]())
    assert isinstance(outcome, Extracted)
    assert (outcome.text, outcome.kind) == (TEXTS[name], name[2:])
    assert all(start == 0 or outcome.text[start - 1] == "\n" for start in outcome.pages)


def change_part(data: bytes, text: str, change: Callable[[bytes], bytes]) -> bytes:
    stream = BytesIO()
    with ZipFile(BytesIO(data)) as old, ZipFile(stream, "w", ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name == text else old.read(name))
    return stream.getvalue()


async def test_what_was_deleted_or_moved_away_is_not_said() -> None:
    inserted = b"<w:ins w:id='1'><w:r><w:t>kept</w:t></w:r></w:ins>"
    text = b"<w:del w:id='2'><w:r><w:delText>gone</w:delText></w:r></w:del>"
    text += b"<w:moveFrom w:id='3'><w:r><w:t>moved</w:t></w:r></w:moveFrom>"
    body = change_part(
        docx(), "word/document.xml", lambda part: part.replace(b"</w:p>", inserted + text + b"</w:p>", 1)
    )
    assert (await text_of("a.docx", body)).startswith("The leasekept\nThe rent")


MAIN_PARTS = {"a.docx": "word/document.xml", "a.xlsx": "xl/workbook.xml", "a.pptx": "ppt/presentation.xml"}
ENTITY = b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/hostname">]>'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("name", MADE)
async def test_declared_entities_are_refused(name: str, encoding: str) -> None:
    def declare(content: bytes) -> bytes:
        root = content.partition(b"?>")[2] or content
        return ("<?xml version='1.0'?>" + ENTITY.decode() + root.decode()).encode(encoding)

    body = change_part(MADE[name](), MAIN_PARTS[name], declare)
    assert (await flaw_of(name, body)).startswith(f"{name} declares entities")


async def test_what_unpacks_to_too_much_is_not_unpacked() -> None:
    bomb = BytesIO()
    with ZipFile(bomb, "w", ZIP_DEFLATED, compresslevel=9) as package, package.open("word/document.xml", "w") as io:
        for _ in range(MAX_UNPACKED_BYTES // (1 << 24) + 1):
            io.write(bytes(1 << 24))
    assert len(bomb.getvalue()) < 1 << 20
    assert "unpacks to too much data" in await flaw_of("a.docx", bomb.getvalue())


def test_too_many_parts_are_refused() -> None:
    stream = BytesIO()
    with ZipFile(stream, "w") as package:
        for number in range(MAX_PACKAGE_PARTS + 1):
            package.writestr(f"{number}.xml", b"")
    outcome = extract_office_text("docx", stream.getvalue(), 100)
    assert isinstance(outcome, UnreadableFile)
    assert "too many parts" in outcome.sentence


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"PK", "is damaged, or does not match its suffix"),
        (b"\xd0\xcf\x11\xe0" + bytes(100), "has a password, or an older format"),
        (docx()[:-200], "is damaged"),
        (xlsx(), "is damaged"),
    ],
)
def test_what_is_no_document_is_a_sentence(data: bytes, sentence: str) -> None:
    outcome = extract_office_text("docx", data, 10_000)
    assert isinstance(outcome, UnreadableFile)
    assert outcome.sentence.startswith(sentence)


def test_more_text_than_a_document_may_have_is_refused() -> None:
    outcome = extract_office_text("xlsx", xlsx(), 20)
    assert isinstance(outcome, UnreadableFile)
    assert outcome.sentence == "exceeds the maximum text length. Split it, or leave it out."


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docx", None)
    outcome = extract_office_text("docx", docx(), 10_000)
    assert isinstance(outcome, UnreadableFile)
    assert "pip install 'halter-agents[documents]'" in outcome.sentence


def mail() -> EmailMessage:
    message = EmailMessage()
    message["From"] = "Ada <ada@example.com>"
    message["To"] = "bob@example.com"
    message["Subject"] = "Die Miete für Mai"
    message.set_content("Dear Bob,\nthe rent is attached.\n")
    message.add_alternative("<p>Dear Bob, in colours</p>", subtype="html")
    message.add_attachment(xlsx(), maintype="application", subtype="octet-stream", filename="rent.xlsx")
    message.add_attachment(b"\0\1", maintype="image", subtype="png", filename="logo.png")
    return message


async def test_a_mail_is_read_with_what_is_attached() -> None:
    assert await text_of("a.eml", mail().as_bytes()) == "\n".join(
        [
            "From: Ada <ada@example.com>",
            "To: bob@example.com",
            "Subject: Die Miete für Mai",
            "",
            "Dear Bob,",
            "the rent is attached.",
            "",
            "[Attachment rent.xlsx]",
            TEXTS["a.xlsx"],
            "",
            "[Attachment logo.png, 2 bytes, not read]",
        ]
    )


async def test_a_mail_of_html_alone_and_one_in_another_are_read() -> None:
    inner = EmailMessage()
    inner["Subject"] = "Inner"
    inner.set_content("<p>Only <b>this</b></p>", subtype="html")
    outer = mail()
    outer.add_attachment(inner)
    assert "[Attachment mail.eml]\nSubject: Inner\n\nOnly this" in await text_of("a.eml", outer.as_bytes())


async def test_mails_in_mails_are_read_only_so_deep() -> None:
    message = mail()
    for _ in range(6):
        outer = EmailMessage()
        outer["Subject"] = "Outer"
        outer.set_content("See below.")
        outer.add_attachment(message)
        message = outer
    text = await text_of("a.eml", message.as_bytes())
    assert text.count("See below.") == 4
    assert "not read]" in text


@pytest.mark.parametrize(
    "data", [b"no header at all", b"From: x\r\nContent-Type: text/plain; charset=no-such\r\n\r\nno header at all"]
)
async def test_a_mail_that_is_hardly_one_is_read_as_far_as_it_goes(data: bytes) -> None:
    assert "no header at all" in await text_of("a.eml", data)
