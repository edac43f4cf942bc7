"""What a file says, as text. Whatever is wrong with it is an answer too, and never an error.

What has to be parsed is parsed by a process of its own, with little memory and a deadline: a hostile file can waste a
minute of it, and nothing else. Its environment is empty, so that it holds no secrets either.
"""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.folders import in_words
from halter.core.library import DocumentKind, Extracted, Unreadable
from halter.core.text import clean
from halter.documents.decoded import decoded

SECONDS: Final = 60.0
MOST_MEMORY: Final = 1 << 30
MOST_TEXT: Final = 10_000_000
"""So many characters a document may have: some four thousand pages."""

_TEXT: Final = ".txt .text .log .csv .tsv .json .jsonl .yaml .yml .toml .ini .cfg .conf .xml .rst .tex .srt .eml .vtt"
KINDS: Final[Mapping[str, DocumentKind]] = MappingProxyType(
    {
        **dict.fromkeys(_TEXT.split(), "text"),
        **dict.fromkeys((".md", ".markdown"), "markdown"),
        **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
        ".pdf": "pdf",
    }
)
_MAIN: Final = "from halter.documents.extract import main; main()"


class _Limits(msgspec.Struct, frozen=True):
    """What the process is told before the bytes: how to read them, and what it may use."""

    kind: DocumentKind
    memory: int
    seconds: int
    most: int


def kind_of(name: str) -> DocumentKind | None:
    """Tell what a file is by its name; None for what cannot be read."""
    return KINDS.get(PurePosixPath(name).suffix.lower())


async def extract(
    name: str, data: bytes, *, seconds: float = SECONDS, memory: int = MOST_MEMORY, most: int = MOST_TEXT
) -> Extracted | Unreadable:
    """Read a file's bytes as what its name says that it is."""
    shown = clean(PurePosixPath(name).name) or "The file"
    kind = kind_of(name)
    if kind is None:
        known = ", ".join(sorted(KINDS))
        return Unreadable(f"{shown} is of a kind that cannot be read: what can is {known}.")
    if not data:
        return Unreadable(f"{shown} is empty: nothing was written to it, or not yet.")
    if kind in ("html", "pdf"):
        limits = _Limits(kind, memory, max(1, round(seconds)), most)
        try:
            found = await _apart(limits, data, seconds)
        except OSError as error:
            found = Unreadable(f"cannot be read at present, since no program can be started: {in_words(error)}.")
    else:
        found = _whole(decoded(data), kind, most)
    return Unreadable(f"{shown} {found.sentence}") if isinstance(found, Unreadable) else found


def _whole(text: str | None, kind: DocumentKind, most: int) -> Extracted | Unreadable:
    if text is None:
        return Unreadable("holds bytes that are no text: give it the ending of what it is, or leave it out.")
    if len(text) > most:
        return Unreadable(f"holds {len(text):,} characters, and a document may have {most:,}: split it.")
    if not text.strip():
        return Unreadable("holds no text, only blanks.")
    return Extracted(text, kind)


async def _apart(limits: _Limits, data: bytes, seconds: float) -> Extracted | Unreadable:
    """Let another process read; it is gone when this returns, however it does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _MAIN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            answer, _ = await process.communicate(msgspec.json.encode(limits) + b"\n" + data)
    except TimeoutError:
        return Unreadable(f"takes more than {seconds:g} seconds to read, and was given up: split it, or leave it out.")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        return msgspec.json.decode(answer, type=Extracted | Unreadable)
    except msgspec.DecodeError:
        return _lost(process.returncode or 0, limits)


def _lost(code: int, limits: _Limits) -> Unreadable:
    """Say why a process left no answer."""
    if code == -signal.SIGXCPU:
        return Unreadable(f"takes more than {limits.seconds} seconds to read, and was given up: split it.")
    return _too_much(limits)


def _too_much(limits: _Limits) -> Unreadable:
    return Unreadable(
        f"needs more than {limits.memory // (1 << 20):,} MB of memory to be read, or made the reader crash: "
        "split it, or leave it out."
    )


def main() -> None:
    """Read one file from standard input, and answer on standard output; first of all, give up what is not needed."""
    limits = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Limits)
    # Before anything of the file is looked at: what is given up here cannot be had again.
    for what, most in (
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, limits.seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    try:
        answer = msgspec.json.encode(_parsed(limits, sys.stdin.buffer.read()))
    except (MemoryError, RecursionError):
        answer = msgspec.json.encode(_too_much(limits))
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    os._exit(0)


def _parsed(limits: _Limits, data: bytes) -> Extracted | Unreadable:
    if limits.kind == "pdf":
        from halter.documents.pdf import pdf_text

        return pdf_text(data, limits.most)
    from halter.documents.html import html_text

    return _whole(html_text(data), limits.kind, limits.most)
