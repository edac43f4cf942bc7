"""The pictures of the documentation: a run in a terminal, the dashboard during an approval, and when a person is asked.

Run by `make pictures`: a browser test writes the pages to `docs/pictures`, then this script records `halter demo` in a
terminal. The terminal becomes an SVG that CSS animates, the pages an animated PNG. `python -m scripts.pictures levels`
draws only the levels, modes and risks, from the guard's own table.
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
from typing import Final, get_args

from halter.core.tools import Level
from halter.core.vocabulary import RiskLevel
from halter.policy.levels import LEVEL_TABLE
from halter.spec.policy import MODES, Mode

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
COLUMNS: Final = 100
COMMAND: Final = ("halter", "demo", "--night-only")

WIDE, HIGH, EDGE = 8.4, 16.5, 16.0
"""The size of a character, and the space around the text."""

STEPS: Final = 36
STEP, HOLD = 0.25, 7.0
"""Number of screens of a run, seconds per screen, and seconds of the last one."""

PAGES: Final = {"home": 3.5, "session": 3.0, "approved": 3.0}
"""The pages of the dashboard in order, and the seconds per page."""

KEPT: Final = frozenset({"dashboard", "phone", "session"})
"""The pictures of pages that the documentation shows; the others are frames."""

_CODES: Final = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

Cell = tuple[str, str]
"""A character, and the class of its colour."""

Screen = tuple[tuple[Cell, ...], ...]

_CLASSES: Final[Mapping[str, str]] = {"1": "b", "31": "r", "32": "g"}


def record(command: Sequence[str], columns: int) -> Iterator[str]:
    """Run a command in a terminal, and yield its output as it is written."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES="50")
        os.execvp(command[0], list(command))  # noqa: S606  No shell is involved.
    while True:
        try:
            chunk = os.read(terminal, 65_536)
        except OSError:  # The terminal ends with the program.
            chunk = b""
        if not chunk:
            break
        yield chunk.decode("utf-8", "replace")
    os.waitpid(child, 0)


def screens(chunks: Iterator[str]) -> Iterator[Screen]:
    """Yield the screen after each chunk: text, colours, and overwritten lines."""
    lines: list[list[Cell]] = [[]]
    row = column = 0
    style = ""
    for chunk in chunks:
        for codes, letter, feed, text in _CODES.findall(chunk):
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
                    cells = [(character, style) for character in text]
                    before = lines[row] + [(" ", "")] * (column - len(lines[row]))
                    lines[row] = before[:column] + cells + before[column + len(cells) :]
                    column += len(cells)
        yield tuple(tuple(line) for line in lines)


@dataclass(frozen=True)
class Shown:
    """A line on the screen, with its start and end time."""

    row: int
    line: tuple[Cell, ...]
    start: float
    end: float


def chosen(all_screens: Sequence[Screen]) -> Sequence[tuple[Screen, float]]:
    """Choose evenly spaced screens of a run, and show the last one longer."""
    different = [screen for screen, _ in groupby(all_screens)]
    indexes = sorted({round(step * (len(different) - 1) / STEPS) for step in range(STEPS + 1)})
    picked_screens = [different[index] for index in indexes]
    return [*((screen, STEP) for screen in picked_screens[:-1]), (picked_screens[-1], HOLD)]


def lines_of(timed_screens: Sequence[tuple[Screen, float]]) -> Iterator[Shown]:
    """List each line with the time from its appearance until its replacement."""
    for row in range(max(len(screen) for screen, _ in timed_screens)):
        at = 0.0
        in_row = ((screen[row] if row < len(screen) else (), lasts) for screen, lasts in timed_screens)
        for line, same in groupby(in_row, key=lambda each: each[0]):
            start, at = at, at + sum(lasts for _, lasts in same)
            if any(character != " " for character, _ in line):
                yield Shown(row, line, start, at)


def picture(timed_screens: Sequence[tuple[Screen, float]], title: str) -> str:
    """Draw a run as an SVG. With reduced motion, it shows the last screen."""
    whole = sum(lasts for _, lasts in timed_screens)
    shown_lines = list(lines_of(timed_screens))
    rows = 2 + max(each.row for each in shown_lines)
    wide, high = COLUMNS * WIDE + 2 * EDGE, rows * HIGH + 2 * EDGE
    spans = sorted({(each.start, each.end) for each in shown_lines} - {(0.0, whole)})
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
    body = "".join(f"<g{numbers.get((each.start, each.end), '')}>{''.join(_runs(each))}</g>" for each in shown_lines)
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


def _runs(shown_line: Shown) -> Iterator[str]:
    """Draw a line in runs of one colour, each as wide as its characters in any font."""
    column = 0
    for style, cells in groupby(shown_line.line, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        if text.strip():
            lead = len(text) - len(text.lstrip(" "))
            yield _text(column + lead, shown_line.row + 1, text.strip(" "), style)
        column += len(text)


def _text(column: int, row: int, text: str, style: str) -> str:
    class_attribute = f' class="{style}"' if style else ""
    x, y, length = EDGE + column * WIDE, EDGE + (row + 0.75) * HIGH, len(text) * WIDE
    return f'<text x="{x:g}" y="{y:g}" textLength="{length:g}"{class_attribute}>{escape(text)}</text>'


LEVEL_TEXTS: Final[Mapping[Level, str]] = {
    "SAFE": "reads what anyone may see",
    "MONITORED": "reads; its arguments are audited",
    "CONTROLLED": "changes something (default)",
    "RESTRICTED": "hard to undo, or seen by others",
    "PRIVILEGED": "rights, money, production",
}
MODE_TEXTS: Final[Mapping[Mode, str]] = {"ASSIST": "little", "SEMI": "the usual (default)", "FULL": "almost all"}
RISK_TEXTS: Final[Mapping[RiskLevel, str]] = {
    "LOW": "it only reads",
    "MEDIUM": "in its own folder",
    "HIGH": "it reaches further",
    "CRITICAL": "cannot be undone",
}

LIGHT: Final[Mapping[str, str]] = {
    "ground": "#ffffff",
    "text": "#1f2328",
    "dim": "#59636e",
    "runs": "#dafbe1",
    "asks": "#fff1c2",
    "always": "#ffdcd7",
}
DARK: Final[Mapping[str, str]] = {
    "ground": "#0d1117",
    "text": "#e6edf3",
    "dim": "#9da7b1",
    "runs": "#12361f",
    "asks": "#4d3800",
    "always": "#5c1a16",
}
"""The colours of the drawing, by role. Each of its texts is read on its own ground, in a light and a dark page."""


def draw_levels() -> str:
    """Draw the levels, the modes and the risks of calls, and where a person is asked, as an SVG."""
    label = "Levels of tools, modes of agents and risks of calls, and when a person is asked"
    schemes = (f"{{{''.join(f'--{role}:{colour};' for role, colour in scheme.items())}}}" for scheme in (LIGHT, DARK))
    light, dark = schemes
    style = (
        f"svg{light}@media (prefers-color-scheme:dark){{svg{dark}}}"
        "text{font:14px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:var(--text)}"
        ".b{font-weight:bold}.d{fill:var(--dim);font-size:12px}.c{text-anchor:middle}"
        + "".join(f".{role}{{fill:var(--{role})}}" for role in ("ground", "runs", "asks", "always"))
    )
    body = "".join((*_draw_grid(), *_draw_risks(), *_draw_legend()))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="880" height="434" viewBox="0 0 880 434" '
        f'role="img" aria-label="{label}"><style>{style}</style>'
        f'<rect width="880" height="434" rx="8" class="ground"/>{body}</svg>\n'
    )


def _draw_grid() -> Iterator[str]:
    """Draw a row for each level and a column for each mode; the cells say whether a call runs or a person is asked."""
    yield _write(24, 36, "LEVEL", "b") + _write(78, 36, "of the tool: how dangerous it is", "d")
    yield _write(278, 36, "MODE", "b") + _write(330, 36, "of the agent: how much it does alone", "d")
    for column, mode in enumerate(MODES):
        middle = 335 + 120 * column
        yield _write(middle, 62, mode, "b c") + _write(middle, 78, MODE_TEXTS[mode], "d c")
    for row, (level, defaults) in enumerate(LEVEL_TABLE.items()):
        top = 90 + 50 * row
        yield _write(24, top + 19, level, "b") + _write(24, top + 35, LEVEL_TEXTS[level], "d")
        for column, mode in enumerate(MODES):
            word = "asks" if mode in defaults.asks else "runs"
            yield _draw_box(278 + 120 * column, top, 114, word, "asks you" if word == "asks" else "runs")


def _draw_risks() -> Iterator[str]:
    yield _write(668, 36, "RISK", "b") + _write(712, 36, "of one call: its arguments", "d")
    for row, risk in enumerate(get_args(RiskLevel)):
        top = 90 + 50 * row
        word = "always" if risk == "CRITICAL" else ""
        yield _write(668, top + 19, risk, "b") + _write(668, top + 35, RISK_TEXTS[risk], "d")
        yield _draw_box(782, top, 78, word, "always" if word else "is shown")


def _draw_legend() -> Iterator[str]:
    lines = (
        "A rule of the policy outranks the level: it asks always or never, or asks two people.",
        "Risk is assessed where a tool is RESTRICTED or PRIVILEGED. A CRITICAL call always asks, whatever a rule says.",
        "The provenance check asks about a value from untrusted content. The inbox names what made the guard ask.",
    )
    for row, line in enumerate(lines):
        yield _write(24, 366 + 22 * row, line, "d")


def _draw_box(x: int, y: int, width: int, role: str, text: str) -> str:
    box = f'<rect x="{x}" y="{y}" width="{width}" height="42" rx="6" class="{role}"/>' if role else ""
    return box + _write(x + width // 2, y + 26, text, "c" if role else "d c")


def _write(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>'


def animated(frames: Sequence[tuple[bytes, float]]) -> bytes:
    """Combine pictures of the same size and format into an animated PNG."""
    png_chunks, number = [], 0
    for index, (data, seconds) in enumerate(frames):
        frame_chunks = [*_chunks(data)]
        head = next(body for name, body in frame_chunks if name == b"IHDR")
        if not index:
            png_chunks = [(b"IHDR", head), (b"acTL", struct.pack(">II", len(frames), 0))]
        if head != png_chunks[0][1]:
            raise ValueError(f"Picture {index + 1} differs from the first one in size or format.")
        wide, high = struct.unpack(">II", head[:8])
        png_chunks.append(
            (b"fcTL", struct.pack(">IIIIIHHBB", number, wide, high, 0, 0, round(seconds * 100), 100, 0, 0))
        )
        number += 1
        for body in (body for name, body in frame_chunks if name == b"IDAT"):
            png_chunks.append((b"fdAT", struct.pack(">I", number) + body) if index else (b"IDAT", body))
            number += 1 if index else 0
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in [*png_chunks, (b"IEND", b"")])


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4])
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        at += 12 + length


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def main() -> None:
    """Write the pictures, and remove the pages that are only frames of one."""
    (FOLDER / "levels.svg").write_text(draw_levels(), "utf-8")
    if sys.argv[1:] == ["levels"]:
        return
    pages = {name: FOLDER / f"{name}.png" for name in PAGES}
    if all(page.exists() for page in pages.values()):
        frames = [(pages[name].read_bytes(), seconds) for name, seconds in PAGES.items()]
        (FOLDER / "dashboard.png").write_bytes(animated(frames))
    for page in FOLDER.glob("*.png"):
        if page.stem not in KEPT:
            page.unlink()
    timed_screens = chosen(
        list(screens(record((str(Path(sys.executable).with_name("halter")), *COMMAND[1:]), COLUMNS)))
    )
    (FOLDER / "terminal.svg").write_text(picture(timed_screens, "halter demo"), "utf-8")


if __name__ == "__main__":
    main()
