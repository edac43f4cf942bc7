"""The command lines of `.mcp.json`: which files of an agent's folder they name, and whether they could load data.

An argument counts as something to work on, and not to load, only where it is certain what is run: after the script, the
module or the package of a program that is known to run such. Of any other program nobody can say it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import msgspec

from halter.config.mcp import MCP_FILE
from halter.core.protected import lies_in
from halter.core.servers import Server

DATA: Final = "data"
"""A folder of this name in an agent's own holds what its code writes: no code may be loaded from it."""

_WORDS: Final = re.compile(r"""[\s=:,;'"&|()<>@]+""")
_DOTTED: Final = re.compile(r"[A-Za-z_][\w.]*(?::[\w.]+)?")
_MODULE: Final = frozenset({"-m", "--module"})


class _Runner(msgspec.Struct, frozen=True):
    """A program that runs what its first plain word names, and gives it all further words.

    `flags` have no value, and the value of `valued` is not what is run. After one of `ends` the next word is run. With
    `letters`, flags of one letter may be joined. A `verb` has to come first.
    """

    flags: frozenset[str] = frozenset()
    valued: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    letters: str = ""
    verb: str = ""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PYTHON: Final = _Runner(valued=_words("-X -W"), ends=_words("-m -c"), letters="bBdEIOPqsSuvx")
_PACKAGE: Final = _Runner(
    flags=_words("-y --yes -q --quiet --no-install --offline --isolated --prefer-offline"),
    valued=_words("-p --package --from --with --python --registry"),
)
_SHELL: Final = _Runner(flags=_words("--norc --noprofile --login"), ends=_words("-c"), letters="aefuxlv")
_NODE: Final = _Runner(flags=_words("--no-warnings --enable-source-maps --experimental-strip-types --trace-warnings"))
_OF_UV: Final = _Runner(
    flags=_words("-q --quiet --frozen --locked --no-sync --no-project --isolated --offline --no-dev"),
    valued=_words("-p --python --with --extra --group"),
    ends=_words("-m --module"),
    verb="run",
)
_OF_DENO: Final = _Runner(flags=_words("-A -q --allow-all --quiet --no-lock --no-check --no-prompt"), verb="run")
_RUNNERS: Final[Mapping[str, _Runner]] = {
    **dict.fromkeys(("python", "pypy"), _PYTHON),
    **dict.fromkeys(("npx", "bunx", "pnpx", "uvx"), _PACKAGE),
    **dict.fromkeys(("sh", "bash", "dash", "zsh"), _SHELL),
    **dict.fromkeys(("node", "nodejs", "tsx", "ts-node", "nodemon", "jiti"), _NODE),
    **dict.fromkeys(("ruby", "perl"), _Runner(letters="w")),
    "uv": _OF_UV,
    "deno": _OF_DENO,
    "bun": msgspec.structs.replace(_OF_DENO, flags=frozenset()),
}
_LOADERS: Final = _words(
    "runpy pdb trace timeit profile cProfile unittest pytest uvicorn gunicorn hypercorn streamlit flask celery"
)
"""Modules and programs that load what their arguments name."""


def loads_from_data(server: Server, places: Iterable[Path], environ: Mapping[str, str]) -> str:
    """Name the word of a command line by which it could load something from a folder of data, or nothing.

    Such a folder may hold what an agent wrote. So no command line may name it, or run in it, or search it. Only the
    agent's own `data` may be given to a program to work on, after the word that says what the program is to run.
    """
    cwd, kept = Path(server.cwd), tuple(places)
    line = (server.command, *server.args)
    begins = _work_begins(line, cwd)
    texts = [(text, at >= begins) for at, text in enumerate(line)]
    texts += [(text, False) for text in (server.cwd, *server.env.values(), environ.get("PATH", ""))]
    modules = [name for before, name in pairwise(line) if before in _MODULE or ":" in name]
    texts += [(name.partition(":")[0].replace(".", "/"), False) for name in modules if _DOTTED.fullmatch(name)]
    for text, works in texts:
        for word in _paths_in(text):
            found = [place for place in kept if lies_in(cwd / word, place)]
            if any(place.name != DATA or not works or not (cwd / word).is_dir() for place in found):
                return word
    return ""


def _paths_in(text: str) -> Iterator[str]:
    """List all in a text that may be meant as a path, also behind the letter of an option."""
    for word in (text, *_WORDS.split(text)):
        if word and "\0" not in word:
            yield word
            if word.startswith("-") and len(word) > len("-x"):
                yield word[2:]


def _work_begins(line: Sequence[str], cwd: Path) -> int:
    """Find the place in a command line behind which everything is only given to what is run."""
    at = 0
    while at < len(line):
        name = os.path.basename(line[at])  # noqa: PTH119, it may be no path.
        runner = _RUNNERS.get(re.sub(r"[\d.]+$", "", name))
        if runner is None:
            break
        run = _what_is_run(runner, line, at + 1)
        if line[run - 1] in runner.ends:
            return len(line) if line[run : run + 1] and line[run].partition(".")[0] in _LOADERS else run + 1
        at = run
    else:
        return len(line)
    if name in _LOADERS:
        return len(line)
    if at:
        return at + 1
    # A program of the agent's own: it may have words of its own for what it runs.
    own = "/" in line[0] and lies_in(cwd / line[0], cwd)
    plain = [number for number, text in enumerate(line[1:], 1) if not text.startswith("-")]
    return plain[0] + 1 if own and plain else len(line)


def _what_is_run(runner: _Runner, line: Sequence[str], at: int) -> int:
    """Step over a runner's own words; the end of the line where one of them is not known."""
    if runner.verb:
        if line[at : at + 1] != (runner.verb,):
            return len(line)
        at += 1
    while at < len(line) and line[at].startswith("-"):
        word = line[at]
        joined = not word.startswith("--") and set(word[1:]) <= set(runner.letters)
        if word in runner.ends:
            return at + 1
        if word in runner.valued:
            at += 1
        elif word == "--":
            return at + 1
        elif not joined and word not in runner.flags and "=" not in word:
            return len(line)
        at += 1
    return at


def named_by_servers(folder: Path) -> Iterator[Path]:
    """List the paths that a command line of an agent's `.mcp.json` may mean, whether there is anything or not."""
    try:
        read = msgspec.json.decode((folder / MCP_FILE).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for server in read.mcpServers.values():
        cwd = folder / _cwd(server)
        yield from (cwd / word for text in _texts(server) for word in _paths_in(text))


class _File(msgspec.Struct, frozen=True):
    """As much of the file as is looked at before it is read properly."""

    mcpServers: dict[str, object] = {}  # noqa: N815, the name of the key.


def _cwd(server: object) -> str:
    match server:
        case {"cwd": str(cwd)}:
            return cwd
        case _:
            return "."


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in cast("dict[str, object]", value).values():
                yield from _texts(each)
        case list():
            for each in cast("list[object]", value):
                yield from _texts(each)
        case _:
            return
