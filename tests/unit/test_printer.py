"""The output of a process that runs agents: in order, many texts at a time, and never ahead of a stalled reader."""

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from io import FileIO

import pytest

from halter.cli.entrypoint import OutputLost
from halter.cli.terminal import MAX_PENDING_TEXTS, Printer

LINES = 4 * MAX_PENDING_TEXTS


@contextmanager
def read_stdout() -> Generator[FileIO]:
    """The other end of the standard output."""
    reads, writes = os.pipe()
    with FileIO(reads) as reader, os.fdopen(writes, "w") as output, redirect_stdout(output):
        yield reader


async def show(line: str, texts: list[str]) -> None:
    async with Printer() as printer:
        for _ in range(LINES):
            printer.write(line)
            texts.append(line)
            await printer.wait_for_space()


async def test_everything_is_written_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    async with Printer() as printer:
        for number in range(LINES):
            printer.write(f"{number}\n")
            await printer.wait_for_space()
    assert capfd.readouterr().out == "".join(f"{number}\n" for number in range(LINES))


async def test_a_stalled_reader_is_waited_for() -> None:
    line, texts = "a" * 10_000 + "\n", list[str]()
    with read_stdout() as reader:
        showing = asyncio.create_task(show(line, texts))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(texts) == MAX_PENDING_TEXTS
        left = len(line) * LINES
        while left:
            left -= len(await asyncio.to_thread(reader.read, 65_536))
        await showing
    assert len(texts) == LINES


async def test_output_that_is_read_no_more_ends_it() -> None:
    with read_stdout() as reader:
        reader.close()
        with pytest.raises(OutputLost):
            await show("one\n", [])
