"""Files that tools return: pictures reach the model as pictures, are held, kept as blobs, and sent again later."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used

from halter import File
from halter.core.ids import SortableIds, session_stream
from halter.core.messages import Message, Text, ToolResult
from halter.journal.open import open_store
from halter.journal.retention import erase_session_bodies
from halter.models.input_files import IMAGE_TOKENS, PAGE_TOKENS
from halter.present.bodies import describe_event
from halter.tools.function_tool import tool


def png(width: int = 40, height: int = 30, size: int = 76_808) -> bytes:
    """Make the head of a picture, with nothing in it."""
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return head.ljust(size, b"\1")


def jpeg(width: int, height: int) -> bytes:
    sides = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return b"\xff\xd8\xff\xe0\0\4xx\xff\xc2\0\x11\x08" + sides + bytes(40)


def webp(kind: bytes, at: int, more: int = 0) -> bytes:
    """Make the head of a picture that is 9,001 pixels wide, as its chunk says after `at` bytes."""
    chunk = bytes(at) + (9_001 | more).to_bytes(4, "little")
    return b"RIFF\0\0\0\0WEBP" + kind + b"\0\0\0\0" + chunk + bytes(20)


FILLED = b"\xff\xd8\xff\xe0\0\4xx\xff" + jpeg(9_000, 20)[8:]
ZERO_LENGTH = b"\xff\xd8\xff\xfe\0\0" + jpeg(9_000, 20)[2:]
EXIF = b"\xff\xd8\xff\xe1\1\0" + jpeg(40, 30).ljust(254, b"\0") + jpeg(9_000, 20)[2:]
"""A picture with a small one in its first segment."""
UNMEASURED = (
    png()[:23],
    png(width=0),
    png(height=0),
    jpeg(40, 30)[:16],
    jpeg(0, 30),
    jpeg(40, 0),
    b"\xff\xd8" + b"\xff\xd0" * 1_000_000,
    b"\xff\xd8" + b"\xff" * 1_000_000,
    b"GIF89a\1\0\1",
    b"GIF89a\0\0\1\0",
    webp(b"VP8 ", 6)[:29],
    webp(b"VP8L", 1)[:24],
    webp(b"VP8X", 4)[:29],
    webp(b"ALPH", 4),
)
"""Pictures whose size is cut off, zero, or nowhere."""
PNG = png()
PAPER = b"%PDF-1.4\n" + b"<< /Type /Page >>\n" * 3 + b"<< /Type /Pages /Count 3 >>"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pictures_of(message: Message) -> list[tuple[str, bytes]]:
    return [(part.media, part.data) for part in message.parts if isinstance(part, Text) and part.media]


def result_of(message: Message) -> str:
    return next(part.text for part in message.parts if isinstance(part, ToolResult))


class Displayed:
    """What notebooks show as a picture: an image of Pillow, for example."""

    def _repr_png_(self) -> bytes:
        return PNG


class Binary:
    """The binary content of Pydantic AI."""

    data, media_type = PNG, "image/png"


class Returned:
    """The tool return of Pydantic AI."""

    return_value, content = "plotted", ["as a chart", Binary()]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (PNG, "[file 1.png, image/png, 76,808 bytes]"),
        (File(PNG, "image/png", "chart.png"), "[chart.png, image/png, 76,808 bytes]"),
        (["Here it is.", File(PNG, "image/png", "a.png")], "Here it is.\n[a.png, image/png, 76,808 bytes]"),
        (("Here it is.", PNG), "Here it is.\n[file 2.png, image/png, 76,808 bytes]"),
        ({"rows": 3, "chart": PNG}, '{"rows":3,"chart":"chart.png"}\n[chart.png, image/png, 76,808 bytes]'),
        (
            {"charts": [{"january": PNG}]},
            '{"charts":[{"january":"january.png"}]}\n[january.png, image/png, 76,808 bytes]',
        ),
        (Displayed(), "[file 1.png, image/png, 76,808 bytes]"),
        (Binary(), "[file 1.png, image/png, 76,808 bytes]"),
        (Returned(), "plotted\nas a chart\n[file 3.png, image/png, 76,808 bytes]"),
    ],
    ids=["bytes", "file", "list", "tuple", "mapping", "deep", "displayed", "binary", "tool return"],
)
@pytest.mark.parametrize("place", ["async", "fork"])
async def test_a_picture_of_a_tool_reaches_the_model_as_a_picture(
    bench: Bench, result: Any, text: str, place: str
) -> None:
    agent = bench.agent(calls("plot"), says("A cat."), fleet=PRICED)

    async def plot_here() -> Any:
        """Plot."""
        return result

    def plot_elsewhere() -> Any:
        """Plot."""
        return result

    agent.tool(plot_here if place == "async" else plot_elsewhere, name="plot", level="SAFE")
    assert (await agent.run("Plot it.")).text == "A cat."
    message = bench.models[0].requests[-1].messages[-1]
    assert (result_of(message), pictures_of(message)) == (text, [("image/png", PNG)])


async def test_the_most_that_a_picture_of_a_tool_may_cost_is_held(bench: Bench) -> None:
    agent = bench.agent(calls("plot"), says("A cat.", usage=used(1500, 10)), fleet=PRICED)

    @agent.tool(level="SAFE")
    async def plot() -> bytes:
        """Plot."""
        return PNG

    result = await agent.run("Plot it.")
    assert result.receipt.requests[-1].held_usd >= IMAGE_TOKENS / 1_000_000


async def test_a_picture_of_a_tool_is_a_blob_that_is_sent_again_and_erased_with_its_session(bench: Bench) -> None:
    agent = bench.agent(calls("plot"), says("A cat."), says("A grey one."))

    @agent.tool(level="SAFE")
    async def plot() -> bytes:
        """Plot."""
        return PNG

    result = await agent.run("Plot it.")
    again = await agent.run("Which colour?", session=result.session)
    assert again.text == "A grey one."
    assert [pictures_of(each) for each in bench.models[0].requests[-1].messages if pictures_of(each)] == [
        [("image/png", PNG)]
    ]
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    stored = next(
        each for each in await store.read(session_stream(result.session), 0, 99) if each.kind == "files_given"
    )
    assert stored.blob is not None
    assert describe_event(stored.event, await store.get(stored.blob)) == "[file 1.png, image/png, 76,808 bytes]"
    await erase_session_bodies(store, [result.session], "ada")
    with pytest.raises(KeyError):
        await store.get(stored.blob)
    await store.close()


async def test_another_process_sends_the_picture_of_a_tool_as_well(bench: Bench) -> None:
    @tool(level="SAFE")
    async def plot() -> bytes:
        """Plot."""
        return PNG

    first = bench.agent(calls("plot"), says("A cat."), tools=[plot])
    session = (await first.run("Plot it.")).session
    second = bench.agent(says("A grey one."), tools=[plot])
    await second.run("Which colour?", session=session)
    sent = [each for message in bench.models[-1].requests[-1].messages for each in pictures_of(message)]
    assert sent == [("image/png", PNG)]
    fork = bench.agent(says("A large one."), tools=[plot])
    await fork.fork(session, "Which size?")
    sent = [each for message in bench.models[-1].requests[-1].messages for each in pictures_of(message)]
    assert sent == [("image/png", PNG)]


def make_docx(text: str) -> bytes:
    import docx

    document, stream = docx.Document(), io.BytesIO()
    document.add_paragraph(text)
    document.save(stream)
    return stream.getvalue()


def make_xlsx(text: str) -> bytes:
    import openpyxl

    book, stream = openpyxl.Workbook(), io.BytesIO()
    book.active["A1"] = text
    book.save(stream)
    return stream.getvalue()


def make_pptx(text: str) -> bytes:
    import pptx

    slides, stream = pptx.Presentation(), io.BytesIO()
    slides.slides.add_slide(slides.slide_layouts[0]).shapes.title.text = text
    slides.save(stream)
    return stream.getvalue()


OFFICE = {"docx": make_docx, "xlsx": make_xlsx, "pptx": make_pptx}


@pytest.mark.parametrize("kind", OFFICE)
async def test_read_file_shows_pictures_as_pictures_and_documents_as_text(bench: Bench, kind: str) -> None:
    from halter.tools.files import make_file_tools

    root = bench.folder / "root"
    root.mkdir()
    (root / "cat.png").write_bytes(PNG)
    (root / "paper.pdf").write_bytes(PAPER)
    (root / f"letter.{kind}").write_bytes(OFFICE[kind]("The fee is 40 euros."))
    asked = [("read_file", {"path": name}) for name in ("cat.png", "paper.pdf", f"letter.{kind}")]
    agent = bench.agent(calls(*asked), says("Done."), tools=make_file_tools(root))
    assert (await agent.run("Read them.")).text == "Done."
    message = bench.models[0].requests[-1].messages[-1]
    assert pictures_of(message) == [("image/png", PNG), ("application/pdf", PAPER)]
    assert [part.tokens for part in message.parts if isinstance(part, Text) and part.media] == [
        IMAGE_TOKENS,
        3 * PAGE_TOKENS,
    ]
    *_, letter = [part.text for part in message.parts if isinstance(part, ToolResult)]
    assert "The fee is 40 euros." in letter


@pytest.mark.parametrize("kind", OFFICE)
async def test_a_document_of_an_office_is_given_as_text(bench: Bench, kind: str) -> None:
    (bench.folder / f"letter.{kind}").write_bytes(OFFICE[kind]("The fee is 40 euros."))
    agent = bench.agent(says("40 euros."))
    await agent.run("What is the fee?", files=[bench.folder / f"letter.{kind}"])
    parts = [part for message in bench.models[0].requests[-1].messages for part in message.parts]
    (text,) = [part.text for part in parts if isinstance(part, Text) and "40" in part.text]
    assert text.startswith(f"[letter.{kind}, application/vnd.openxmlformats")
    assert "The fee is 40 euros." in text


def bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("word/document.xml", b" " * 300_000_000)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (File(b"PK\3\4nothing", "", "a.docx"), "a.docx is damaged"),
        (File(bomb(), "", "a.docx"), "unpacks to too much data"),
        (File(b"\xd0\xcf\x11\xe0" + bytes(99), "", "a.xlsx"), "password"),
    ],
    ids=["damaged", "bomb", "locked"],
)
async def test_a_document_that_cannot_be_read_is_a_sentence(bench: Bench, file: File, why: str) -> None:
    from halter.core.errors import ConfigError

    with pytest.raises(ConfigError, match=why):
        await bench.agent(says("Hm.")).run("What is it?", files=[file])
    assert bench.facts("session_started") == []
    agent = bench.agent(calls("find"), says("Hm."))

    @agent.tool(level="SAFE")
    async def find() -> File:
        """Find."""
        return file

    await agent.run("What is it?")
    text = result_of(bench.models[-1].requests[-1].messages[-1])
    assert text.startswith(f"[{file.name}, ")
    assert why in text


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([File(b"RIFF", "audio/wav", "a.wav")], "[a.wav, audio/wav, 4 bytes] is not shown: Audio in a result"),
        (
            [File(b"\0", "video/mp4", "a.mp4")],
            "[a.mp4, video/mp4, 1 bytes] is not shown: a.mp4 has the unsupported type",
        ),
        ([File(png(size=4_000_000), "image/png", "a.png")], "is not shown: it has more than 3,900,000 bytes. Make it"),
        ([File(png(height=9_000), "image/png", "a.png")], "is not shown: it is larger than 8,000 pixels."),
        ([File(jpeg(9_000, 20), "image/jpeg", "a.jpg")], "is not shown: it is larger than 8,000 pixels."),
        ([File(FILLED, "image/jpeg", "a.jpg")], "is not shown: it is larger than 8,000 pixels."),
        ([File(b"GIF89a\x29\x23\x14\0", "image/gif", "a.gif")], "is not shown: it is larger than 8,000 pixels."),
        ([File(webp(b"VP8 ", 6), "image/webp", "a.webp")], "is not shown: it is larger than 8,000 pixels."),
        ([File(webp(b"VP8L", 1, 20 << 14), "image/webp", "a.webp")], "is not shown: it is larger than 8,000 pixels."),
        ([File(webp(b"VP8X", 4), "image/webp", "a.webp")], "is not shown: it is larger than 8,000 pixels."),
        ([File(ZERO_LENGTH, "image/jpeg", "a.jpg")], "is not shown: it is larger than 8,000 pixels."),
        ([File(EXIF, "image/jpeg", "a.jpg")], "is not shown: it is larger than 8,000 pixels."),
        ([File(b"<html>", "image/png", "a.png")], "is not shown: it is damaged, or is not a picture."),
        *(([File(data, "image/png", "a")], "is not shown: it is damaged, or is not a picture.") for data in UNMEASURED),
        ([File(PNG, "image/png", f"{number}.png") for number in range(21)], "is not shown: A result shows at most 20"),
    ],
    ids=[
        "audio",
        "video",
        "large",
        "tall",
        "wide",
        "filled",
        "gif",
        "lossy",
        "lossless",
        "extended",
        "zero length",
        "exif",
        "damaged",
        *(f"unmeasured {number}" for number in range(len(UNMEASURED))),
        "many",
    ],
)
async def test_a_file_of_a_tool_that_no_model_takes_is_a_sentence(bench: Bench, files: list[File], why: str) -> None:
    agent = bench.agent(calls("find"), says("Hm."), limits={"context_window": 1_000_000})

    @agent.tool(level="SAFE")
    async def find() -> list[File]:
        """Find."""
        return files

    await agent.run("What is it?")
    message = bench.models[-1].requests[-1].messages[-1]
    assert why in result_of(message)
    assert len(pictures_of(message)) == (20 if len(files) == 21 else 0)


async def test_a_picture_under_the_name_of_another_type_is_sent_as_what_it_is(bench: Bench) -> None:
    agent = bench.agent(calls("find"), says("Hm."))

    @agent.tool(level="SAFE")
    async def find() -> File:
        """Find."""
        return File(jpeg(40, 30), "image/png", "a.png")

    await agent.run("What is it?")
    assert [kind for kind, _ in pictures_of(bench.models[-1].requests[-1].messages[-1])] == ["image/jpeg"]
