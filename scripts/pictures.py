"""The moving pictures of the README: a run in a terminal, and the dashboard while an agent asks and is answered.

`make pictures` makes them: a browser test leaves the pages in `docs/pictures`, then this records `halter demo` in a
terminal of its own. The terminal becomes an SVG that CSS moves, the pages an animated PNG.
"""

import os
import pty
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
COLUMNS: Final = 100
COMMAND: Final = ("halter", "demo", "--night-only")

WIDE, HIGH, EDGE = 8.4, 16.5, 16.0
"""The size of a character, and the space around the text."""

STEPS: Final = 36
STEP, HOLD = 0.25, 7.0
"""How many screens of a run are shown, for how many seconds each, and for how long the last one."""

PAGES: Final = {"home": 3.5, "session": 3.0, "approved": 3.0}
"""The pages of the dashboard in their order, and for how many seconds each is shown."""

KEPT: Final = frozenset({"dashboard", "phone", "session"})
"""The pictures of pages that the documentation shows; the others are frames."""

_CODES: Final = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

Cell = tuple[str, str]
"""A character, and the class of its colour."""

Screen = tuple[tuple[Cell, ...], ...]

_CLASSES: Final[Mapping[str, str]] = {"1": "b", "31": "r", "32": "g"}


def record(command: Sequence[str], columns: int) -> Iterator[str]:
    """Run a command in a terminal, and yield what it writes as it comes."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES="50")
        os.execvp(command[0], list(command))  # noqa: S606  There is no shell in between, which is all that this asks.
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # The terminal ends with the program.
            part = b""
        if not part:
            break
        yield part.decode("utf-8", "replace")
    os.waitpid(child, 0)


def screens(parts: Iterator[str]) -> Iterator[Screen]:
    """Show what stands on the screen after each part: text, colours, and lines that are written anew."""
    lines: list[list[Cell]] = [[]]
    row = column = 0
    style = ""
    for part in parts:
        for codes, letter, feed, text in _CODES.findall(part):
            match letter or feed:
                case "\n":
                    row += 1
                    lines += [[]] * (row - len(lines) + 1)
                case "\r":
                    column = 0
                case "A":
                    row = max(0, row - int(codes or 1))
                case "K":
                    lines[row] = []
                case "m":
                    style = " ".join(_CLASSES[code] for code in codes.split(";") if code in _CLASSES)
                case _:
                    written = [(character, style) for character in text]
                    before = lines[row] + [(" ", "")] * (column - len(lines[row]))
                    lines[row] = before[:column] + written + before[column + len(written) :]
                    column += len(written)
        yield tuple(tuple(line) for line in lines)


@dataclass(frozen=True)
class Shown:
    """A line on the screen, from one moment to another."""

    row: int
    line: tuple[Cell, ...]
    start: float
    end: float


def chosen(found: Sequence[Screen]) -> Sequence[tuple[Screen, float]]:
    """Choose evenly from the screens of a run, and hold the last one."""
    different = [screen for screen, _ in groupby(found)]
    places = sorted({round(step * (len(different) - 1) / STEPS) for step in range(STEPS + 1)})
    picked = [different[place] for place in places]
    return [*((screen, STEP) for screen in picked[:-1]), (picked[-1], HOLD)]


def lines_of(timed: Sequence[tuple[Screen, float]]) -> Iterator[Shown]:
    """Follow each line from when it appears until another one stands in its place."""
    for row in range(max(len(screen) for screen, _ in timed)):
        at = 0.0
        in_row = ((screen[row] if row < len(screen) else (), lasts) for screen, lasts in timed)
        for line, same in groupby(in_row, key=lambda each: each[0]):
            start, at = at, at + sum(lasts for _, lasts in same)
            if any(character != " " for character, _ in line):
                yield Shown(row, line, start, at)


def picture(timed: Sequence[tuple[Screen, float]], title: str) -> str:
    """Draw a run as an SVG. Where motion is not wanted, it shows the end."""
    whole = sum(lasts for _, lasts in timed)
    shown = list(lines_of(timed))
    rows = 2 + max(each.row for each in shown)
    wide, high = COLUMNS * WIDE + 2 * EDGE, rows * HIGH + 2 * EDGE
    spans = sorted({(each.start, each.end) for each in shown} - {(0.0, whole)})
    frames = "".join(
        f"@keyframes k{number}{{{_keyframes(start / whole, end / whole)}}}" for number, (start, end) in enumerate(spans)
    )
    rules = "".join(
        f".k{number}{{animation:k{number} {whole:g}s step-end infinite;"
        f"visibility:{'visible' if end == whole else 'hidden'}}}"
        for number, (_, end) in enumerate(spans)
    )
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9;"
        "white-space:pre}.b{font-weight:bold}.r{fill:#ff7b72}.g{fill:#7ee787}.p{fill:#8b949e}"
        f"{rules}{frames}@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}"
    )
    numbers = {span: f' class="k{number}"' for number, span in enumerate(spans)}
    body = "".join(f"<g{numbers.get((each.start, each.end), '')}>{''.join(_runs(each))}</g>" for each in shown)
    prompt = _text(0, 0, f"$ {title}", "p")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}" '
        f'role="img" aria-label="{escape(title)}"><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{prompt}{body}</svg>\n'
    )


def _keyframes(start: float, end: float) -> str:
    first = "0%{visibility:hidden}" if start else ""
    last = f"{end:.2%}{{visibility:hidden}}" if end < 1 else ""
    return f"{first}{start:.2%}{{visibility:visible}}{last}"


def _runs(shown: Shown) -> Iterator[str]:
    """Draw a line in pieces of one colour; each is as wide as its characters, whatever font there is."""
    column = 0
    for style, cells in groupby(shown.line, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        if text.strip():
            lead = len(text) - len(text.lstrip(" "))
            yield _text(column + lead, shown.row + 1, text.strip(" "), style)
        column += len(text)


def _text(column: int, row: int, text: str, style: str) -> str:
    named = f' class="{style}"' if style else ""
    x, y, length = EDGE + column * WIDE, EDGE + (row + 0.75) * HIGH, len(text) * WIDE
    return f'<text x="{x:g}" y="{y:g}" textLength="{length:g}"{named}>{escape(text)}</text>'


def animated(frames: Sequence[tuple[bytes, float]]) -> bytes:
    """Put pictures of one size and kind together as an animated PNG, each for its seconds."""
    made, number = [], 0
    for place, (data, seconds) in enumerate(frames):
        parts = [*_chunks(data)]
        head = next(body for name, body in parts if name == b"IHDR")
        if not place:
            made = [(b"IHDR", head), (b"acTL", struct.pack(">II", len(frames), 0))]
        if head != made[0][1]:
            raise ValueError(f"Picture {place + 1} has another size or kind than the first.")
        wide, high = struct.unpack(">II", head[:8])
        made.append((b"fcTL", struct.pack(">IIIIIHHBB", number, wide, high, 0, 0, round(seconds * 100), 100, 0, 0)))
        number += 1
        for body in (body for name, body in parts if name == b"IDAT"):
            made.append((b"fdAT", struct.pack(">I", number) + body) if place else (b"IDAT", body))
            number += 1 if place else 0
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in [*made, (b"IEND", b"")])


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4])
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        at += 12 + length


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def main() -> None:
    """Write both pictures, and remove the pages that are only frames of one."""
    pages = {name: FOLDER / f"{name}.png" for name in PAGES}
    if all(page.exists() for page in pages.values()):
        frames = [(pages[name].read_bytes(), seconds) for name, seconds in PAGES.items()]
        (FOLDER / "dashboard.png").write_bytes(animated(frames))
    for page in FOLDER.glob("*.png"):
        if page.stem not in KEPT:
            page.unlink()
    timed = chosen(list(screens(record((str(Path(sys.executable).with_name("halter")), *COMMAND[1:]), COLUMNS))))
    (FOLDER / "terminal.svg").write_text(picture(timed, "halter demo"), "utf-8")


if __name__ == "__main__":
    main()
