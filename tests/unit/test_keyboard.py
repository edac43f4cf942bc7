"""What is typed counts from the moment its question is shown: at a real terminal, read beside everything else."""

import asyncio
import os
import pty
from collections.abc import Iterator

import pytest

from halter.cli.terminal import EARLY_INPUT_NOTICE, LineReader, TerminalDevice, confirm


class Terminal:
    """The two ends of a terminal: the person's, and the program's."""

    def __init__(self) -> None:
        self.person, self.program = pty.openpty()
        self.keyboard = TerminalDevice(self.program)
        self._seen = ""

    def types(self, text: str) -> None:
        os.write(self.person, text.encode())

    async def shows(self, text: str) -> None:
        """Wait until the person sees a text."""
        while text not in self._seen:
            self._seen += (await asyncio.to_thread(os.read, self.person, 1000)).decode()
        self._seen = self._seen.partition(text)[2]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    os.close(made.person)
    os.close(made.program)


async def test_a_question_is_answered_by_what_is_typed_after_it(terminal: Terminal) -> None:
    async with LineReader("you> ", terminal.keyboard) as lines:
        terminal.types("y\nyes\ny")
        asking = asyncio.create_task(lines.ask("approve? "))
        await terminal.shows(EARLY_INPUT_NOTICE)
        await terminal.shows("approve? ")
        terminal.types("n\n")
        assert (await asking, lines.ahead) == ("n", False)


async def test_a_message_may_be_typed_ahead_and_is_known_to_have_been(terminal: Terminal) -> None:
    async with LineReader("you> ", terminal.keyboard) as lines:
        terminal.types("one\n")
        each = aiter(lines)
        assert (await anext(each), lines.ahead) == ("one", True)
        waiting = asyncio.ensure_future(anext(each))
        await terminal.shows("you> ")
        await terminal.shows("you> ")
        terminal.types("two\n")
        assert (await waiting, lines.ahead) == ("two", False)


async def test_what_answers_a_question_that_is_settled_answers_no_other(terminal: Terminal) -> None:
    async with LineReader("you> ", terminal.keyboard) as lines:
        first = asyncio.create_task(lines.ask("pay? "))
        await terminal.shows("pay? ")
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(lines.ask("wipe? "))
        await asyncio.sleep(0)
        terminal.types("y\n")
        await terminal.shows(EARLY_INPUT_NOTICE)
        await terminal.shows("wipe? ")
        terminal.types("n\n")
        assert await second == "n"


async def test_the_end_of_input_answers_nothing(terminal: Terminal) -> None:
    async with LineReader("you> ", terminal.keyboard) as lines:
        asking = asyncio.create_task(lines.ask("approve? "))
        await terminal.shows("approve? ")
        terminal.types("\x04")
        assert await asking is None
        assert await lines.ask("approve? ") is None


@pytest.mark.parametrize(
    ("typed", "meant"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False), ("\x04", False)]
)
async def test_only_a_yes_is_a_yes(terminal: Terminal, typed: str, meant: bool) -> None:  # noqa: FBT001 It is a case.
    terminal.types("y\n")
    asking = asyncio.create_task(asyncio.to_thread(confirm, "Erase?", lambda: terminal.keyboard))
    await terminal.shows(EARLY_INPUT_NOTICE)
    await terminal.shows("Erase? [y/N]: ")
    terminal.types("ja\n")
    await terminal.shows("Erase? [y/N]: ")
    terminal.types(typed)
    assert await asking is meant
