"""Where a person types, and what of it counts: an answer is what was typed after its question was shown."""

import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Final, Protocol

from halter.cli.command import WRONG_USE, fail

NOT_TAKEN: Final = "What was typed before this question does not answer it."
_CHUNK: Final = 4096


class Keyboard(Protocol):
    """Somewhere lines are typed. `by_hand` says that a person does that."""

    by_hand: bool

    def waits(self) -> bool:
        """Tell whether a whole line was typed that nobody has read yet."""
        ...

    def drop(self) -> None:
        """Forget whatever was typed and not read."""
        ...

    def line(self, prompt: str) -> str | None:
        """Show a prompt and read a line; None at the end of input."""
        ...


class StandardInput:
    """The standard input: a terminal, whose lines may be corrected while they are typed, or a pipe."""

    def __init__(self) -> None:
        self.by_hand = sys.stdin.isatty()
        if self.by_hand:
            with suppress(ImportError):
                # `input` lets a line be edited once this module is there.
                import_module("readline")

    def waits(self) -> bool:
        """Tell whether a whole line was typed that nobody has read yet."""
        return self.by_hand and is_readable(sys.stdin.fileno())

    def drop(self) -> None:
        """Forget whatever was typed and not read."""
        if self.by_hand:
            forget_typed(sys.stdin.fileno())

    def line(self, prompt: str) -> str | None:
        """Show a prompt and read a line; None at the end of input."""
        try:
            if self.by_hand:
                return input(prompt)
            line = sys.stdin.readline()
        except (EOFError, ValueError, OSError):
            return None
        return line.rstrip("\n") if line else None


class TerminalDevice:
    """A terminal by its file number, as it is: nothing is edited but by the terminal itself."""

    def __init__(self, number: int) -> None:
        self.by_hand = os.isatty(number)
        self._number = number

    def waits(self) -> bool:
        """Tell whether a whole line was typed that nobody has read yet."""
        return is_readable(self._number)

    def drop(self) -> None:
        """Forget whatever was typed and not read."""
        forget_typed(self._number)

    def line(self, prompt: str) -> str | None:
        """Show a prompt and read a line; None at the end of input."""
        os.write(self._number, prompt.encode())
        typed = b""
        while not typed.endswith(b"\n"):
            piece = os.read(self._number, _CHUNK)
            if not piece:
                return None
            typed += piece
        return typed.decode("utf-8", "replace").rstrip("\n")


def is_readable(number: int) -> bool:
    """Tell whether a read would not wait."""
    try:
        return bool(select.select([number], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def forget_typed(number: int) -> None:
    """Empty the queue of a terminal: whole lines, and one that was only begun."""
    import termios

    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(number, termios.TCIFLUSH)


def ask_freshly(keyboard: Keyboard, question: str) -> str | None:
    """Ask a question whose answer must be typed after it was shown; what was typed before is dropped, and that said."""
    early = keyboard.waits()
    keyboard.drop()
    return keyboard.line(f"{NOT_TAKEN}\n{question}" if early else question)


def confirm(question: str, make: Callable[[], Keyboard] = StandardInput) -> bool:
    """Ask a person for a yes; nothing else is one. Where no person types, nobody is asked."""
    keyboard = make()
    if not keyboard.by_hand:
        fail("Nobody can be asked here: add --yes, if you have looked at it.", WRONG_USE)
    while (line := ask_freshly(keyboard, f"{question} [y/N]: ")) is not None:
        match line.strip().lower():
            case "y" | "yes":
                return True
            case "" | "n" | "no":
                return False
            case _:
                pass
    return False
