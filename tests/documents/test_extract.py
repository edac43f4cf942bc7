"""Every kind of file is read as text, and whatever is wrong with one is a sentence; the hostile ones do no harm."""

import asyncio
import os
import resource
import sys
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter

from halter.core.ports import Extracted, UnreadableFile
from halter.documents.extraction import KINDS_BY_SUFFIX, extract


def pdf(*pages: str, compressed: bool = False) -> bytes:
    """Write a plain PDF by hand, one line of text per page."""
    kids = " ".join(f"{3 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
    ]
    for number, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1")
        font = "/Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
        box = "/MediaBox [0 0 612 792]"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R {box} /Contents {4 + 2 * number} 0 R /Resources << {font} >> >>".encode()
        )
        objects.append(stream(content, compressed=compressed))
    return write_pdf(objects)


def stream(content: bytes, *, compressed: bool = False) -> bytes:
    data = zlib.compress(content, 9) if compressed else content
    how = b"/Filter /FlateDecode " if compressed else b""
    return b"<< " + how + f"/Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream"


def write_pdf(objects: list[bytes]) -> bytes:
    out = bytearray(b"%PDF-1.4\n")
    places: list[int] = []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + each + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def protected(data: bytes, password: str, algorithm: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(BytesIO(data)))
    writer.encrypt(password, "the owner's own", algorithm=algorithm)
    out = BytesIO()
    writer.write(out)
    return out.getvalue()


def make_endless_pdf() -> bytes:
    """Write a PDF whose one page takes a parser ages: millions of marks on it, from a file of a few kilobytes."""
    content = b"BT /F1 12 Tf " + b"(x) Tj 1 0 Td " * 3_000_000 + b"ET"
    font = b"/Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << " + font + b" >> >>"
    return write_pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>",
            page,
            stream(content, compressed=True),
        ]
    )


async def text_of(name: str, data: bytes) -> str:
    outcome = await extract(name, data)
    assert isinstance(outcome, Extracted), outcome
    return outcome.text


async def flaw_of(name: str, data: bytes, **limits: float) -> str:
    outcome = await extract(name, data, **limits)  # type: ignore[arg-type]
    assert isinstance(outcome, UnreadableFile), outcome
    return outcome.sentence


ENCODED = {
    "UTF-8": "Zażółć €".encode(),
    "UTF-8 with a mark": b"\xef\xbb\xbf" + "Zażółć €".encode(),
    "UTF-16 with a mark": "Zażółć €".encode("utf-16"),
    "UTF-16, the other way round": b"\xfe\xff" + "Zażółć €".encode("utf-16-be"),
    "UTF-32 with a mark": "Zażółć €".encode("utf-32"),
}


@pytest.mark.parametrize("encoding", ENCODED)
async def test_a_text_is_read_in_whatever_encoding(encoding: str) -> None:
    assert await text_of("a.txt", ENCODED[encoding]) == "Zażółć €"


async def test_old_code_pages_are_read() -> None:
    assert await text_of("a.txt", "“Fünf” € naïve".encode("cp1252")) == "“Fünf” € naïve"
    assert await text_of("a.txt", b"caf\xe9 \x81") == "caf\xe9 \x81"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
async def test_wide_letters_without_a_mark_are_read(encoding: str) -> None:
    assert await text_of("a.txt", "The rent is due.".encode(encoding)) == "The rent is due."


async def test_an_odd_nul_is_made_visible_and_keeps_every_place() -> None:
    assert await text_of("a.md", b"one\0two") == "one␀two"


async def test_half_a_character_does_not_hide_the_rest() -> None:
    assert await text_of("a.txt", b"\xff\xfea\0b\0\x00\xd8") == "ab�"


def test_what_can_be_read_is_named_by_its_ending() -> None:
    assert {".txt", ".md", ".html", ".pdf"} <= set(KINDS_BY_SUFFIX)


async def test_the_kind_follows_from_the_name_whatever_its_case() -> None:
    assert (await extract("docs/README.MD", b"# One")) == Extracted("# One", "markdown")


PAGE = """<!doctype html><html><head><title>The lease</title><style>p { color: red }</style>
<script>alert("<p>not this</p>")</script></head><body><h1>Rent &amp; rates</h1>
<p>The   rent
is &euro;500<br>a month.</p><ul><li>one</li><li>two</li></ul>
<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>
<pre>as   it
is</pre><!-- nor this --><noscript>nor that</noscript>end</body></html>"""


async def test_a_page_is_read_without_its_scripts_and_with_its_paragraphs() -> None:
    outcome = await extract("a.html", PAGE.encode())
    assert isinstance(outcome, Extracted)
    assert outcome.kind == "html"
    assert outcome.text == (
        "The lease\n\nRent & rates\n\nThe rent is €500\na month.\n\none\n\ntwo\n\na\tb\n\nc\td\n\nas   it\nis\n\nend"
    )


async def test_a_page_in_the_encoding_that_it_names_is_read() -> None:
    page = '<meta charset="iso-8859-2"><p>Zażółć gęślą jaźń</p>'.encode("iso-8859-2")
    assert await text_of("a.htm", page) == "Zażółć gęślą jaźń"
    assert await text_of("a.htm", b'<meta charset="no-such-thing"><p>caf\xe9</p>') == "café"


@pytest.mark.parametrize("page", [b"<p>one<script>", b"<p>one<!-- ", b"<p>one</p></div></div>", b"<p>one<a href='"])
async def test_a_page_that_is_cut_off_is_read_as_far_as_it_goes(page: bytes) -> None:
    assert (await text_of("a.html", page)).startswith("one")


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_pdf_is_read_page_by_page(compressed: bool) -> None:  # noqa: FBT001
    outcome = await extract("lease.pdf", pdf("The rent is due.", "It is paid late.", compressed=compressed))
    assert isinstance(outcome, Extracted)
    assert (outcome.kind, outcome.text) == ("pdf", "The rent is due.\n\nIt is paid late.")
    assert [outcome.text[start : start + 2] for start in outcome.pages] == ["Th", "It"]


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
async def test_a_pdf_with_a_password_is_reported_as_protected(algorithm: str) -> None:
    locked = protected(pdf("secret"), "made up", algorithm)
    assert await flaw_of("a.pdf", locked) == "a.pdf is protected by a password. Save a copy without one."
    assert await text_of("a.pdf", protected(pdf("secret"), "", algorithm)) == "secret"


BROKEN = {
    "nothing at all": ("a.pdf", b"", "a.pdf is empty"),
    "an empty text": ("a.txt", b"", "a.txt is empty"),
    "blanks": ("a.txt", b" \n\t ", "a.txt contains only white space."),
    "a page without text": ("a.html", b"<script>x</script>", "a.html contains only white space"),
    "a PDF without text": ("a.pdf", pdf(""), "a.pdf contains no text, perhaps only images. Run text"),
    "a PDF that is none": ("a.pdf", b"hello there", "a.pdf is damaged, or is not a PDF"),
    "half a PDF": ("a.pdf", pdf("one")[:200], "a.pdf is damaged, or is not a PDF"),
    "a PDF of noise": ("a.pdf", b"%PDF-1.7\n" + os.urandom(5000), "a.pdf is damaged, or is not a PDF"),
    "a picture": ("a.txt", bytes(range(256)) * 20, "a.txt contains bytes that are not text"),
    "a page of noise": ("a.html", bytes(range(256)) * 20, "a.html contains bytes that are not text"),
    "no ending": ("LICENSE", b"text", "LICENSE has an unsupported type. Supported types: .cfg"),
    "another ending": ("a.odt", b"PK", "a.odt has an unsupported type"),
    "no name": ("", b"text", "The file has an unsupported type"),
    "a name that is no text": ("\ud800.doc", b"text", "�.doc has an unsupported type"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_what_cannot_be_read_is_a_sentence(case: str) -> None:
    name, data, sentence = BROKEN[case]
    assert (await flaw_of(name, data)).startswith(sentence)


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.pdf"])
async def test_more_text_than_a_document_may_have_is_refused(name: str) -> None:
    data = pdf("many words", "many words", "many words") if name == "a.pdf" else b"<p>" + b"many words " * 3
    flaw = await flaw_of(name, data, limit=25)
    assert flaw.startswith((f"{name} exceeds the maximum text length.", f"{name} has "))
    assert "Split it" in flaw


async def test_a_pdf_that_never_ends_is_given_up_and_its_process_is_gone() -> None:
    before = children()
    assert "takes more than 0.5 seconds" in await flaw_of("a.pdf", make_endless_pdf(), seconds=0.5)
    assert children() == before


async def test_a_pdf_that_eats_memory_is_given_up() -> None:
    assert "MB of memory" in await flaw_of("a.pdf", make_endless_pdf(), memory=200 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


async def test_who_no_longer_wants_a_file_read_leaves_no_process_behind() -> None:
    before, hostile = children(), make_endless_pdf()
    reading = asyncio.create_task(extract("a.pdf", hostile))
    await wait_for_child(before)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert children() == before


async def wait_for_child(before: set[str]) -> str:
    """Wait until a process has been started, and return its number."""
    while not (texts := children() - before):  # noqa: ASYNC110  Nobody tells when another process begins.
        await asyncio.sleep(0)
    return texts.pop()


def children() -> set[str]:
    """List the processes that this one has started and that are not gone."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def environment(process: str) -> set[str]:
    entries = Path(f"/proc/{process}/environ").read_text().split("\0")
    return {entry.partition("=")[0] for entry in entries if entry}


async def test_the_program_itself_never_parses_a_pdf() -> None:
    """Whatever the parser does to its process, this one has not even loaded it for the purpose."""
    program = (
        "import asyncio, sys; from halter.documents.extraction import extract; "
        "found = asyncio.run(extract('a.pdf', sys.stdin.buffer.read())); "
        "print(found.text, 'pypdf' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    body, _ = await process.communicate(pdf("hello"))
    assert body.decode().split() == ["hello", "False"]


async def test_the_process_that_parses_holds_no_secret() -> None:
    """It is told where to find its modules and nothing else."""
    before, hostile = children(), make_endless_pdf()
    reading = asyncio.create_task(extract("a.pdf", hostile))
    names = environment(await wait_for_child(before))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert names <= {"PYTHONPATH"}
