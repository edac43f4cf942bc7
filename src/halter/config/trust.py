"""Code in an agent's folder runs only after a person trusted its digest.

The digest covers every file that a command line could load from the folder: an interpreter reads a script of any name,
and modules, packages and settings beside it. Only the declarations that Halter itself reads are left out, unless a
command line or a link names one, and the data folders, from which no command line may load anything. Compiled Python
counts too: a process that loads trusted code must not write bytecode beside it.

An argument of a server in `.mcp.json` counts as data only where the program is known: after the script, module or
package of a known runner. Any argument of another program may be code.
"""

import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from halter.config.agent_files import AGENT_FILE, INSTRUCTIONS, list_texts, read_agent
from halter.config.mcp_file import MCP_FILE
from halter.config.roots import TOOLS_FILE, list_named_files, list_readable_places, list_tool_roots
from halter.core.errors import ConfigError
from halter.core.folders import is_path_within
from halter.core.ids import Digest
from halter.core.text import expand_names, join_names, word_set
from halter.core.tools import ToolServer

DATA_FOLDER: Final = "data"
"""An agent's own data: no code may be loaded from this folder."""

_WORDS: Final = re.compile(r"""[\s=:,;'"&|()<>@]+""")
_DOTTED: Final = re.compile(r"[A-Za-z_][\w.]*(?::[\w.]+)?")
_MODULE: Final = frozenset({"-m", "--module"})


class _Runner(msgspec.Struct, frozen=True):
    """A program that runs what its first plain word names and passes the other words on.

    `flags` take no value; the value of `valued` is not run. The word after one of `ends` is run. With `letters`,
    one-letter flags may be joined. A `verb` must come first.
    """

    flags: frozenset[str] = frozenset()
    valued: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    letters: str = ""
    verb: str = ""


_PYTHON: Final = _Runner(valued=word_set("-X -W"), ends=word_set("-m -c"), letters="bBdEIOPqsSuvx")
_PACKAGE: Final = _Runner(
    flags=word_set("-y --yes -q --quiet --no-install --offline --isolated --prefer-offline"),
    valued=word_set("-p --package --from --with --python --registry"),
)
_SHELL: Final = _Runner(flags=word_set("--norc --noprofile --login"), ends=word_set("-c"), letters="aefuxlv")
_NODE: Final = _Runner(flags=word_set("--no-warnings --enable-source-maps --experimental-strip-types --trace-warnings"))
_OF_UV: Final = _Runner(
    flags=word_set("-q --quiet --frozen --locked --no-sync --no-project --isolated --offline --no-dev"),
    valued=word_set("-p --python --with --extra --group"),
    ends=word_set("-m --module"),
    verb="run",
)
_OF_DENO: Final = _Runner(flags=word_set("-A -q --allow-all --quiet --no-lock --no-check --no-prompt"), verb="run")
_RUNNERS: Final[Mapping[str, _Runner]] = expand_names(
    {
        "python pypy": _PYTHON,
        "npx bunx pnpx uvx": _PACKAGE,
        "sh bash dash zsh": _SHELL,
        "node nodejs tsx ts-node nodemon jiti": _NODE,
        "ruby perl": _Runner(letters="w"),
        "uv": _OF_UV,
        "deno": _OF_DENO,
        "bun": msgspec.structs.replace(_OF_DENO, flags=frozenset()),
    }
)
_LOADERS: Final = word_set(
    "runpy pdb trace timeit profile cProfile unittest pytest uvicorn gunicorn hypercorn streamlit flask celery"
)
"""Modules and programs that load what their arguments name."""


def find_data_load(server: ToolServer, paths: Iterable[Path], environ: Mapping[str, str]) -> str:
    """Find the word by which a command line could load something from a data folder; empty if none.

    The agent may have written there, so no command line may name, search or run in it. Only the agent's own `data` may
    be an argument, after the word that names what is run.
    """
    cwd, kept = Path(server.cwd), tuple(paths)
    line = (server.command, *server.args)
    begins = _find_work_start(line, cwd)
    texts = [(text, at >= begins) for at, text in enumerate(line)]
    texts += [(text, False) for text in (server.cwd, *server.env.values(), environ.get("PATH", ""))]
    modules = [name for before, name in pairwise(line) if before in _MODULE or ":" in name]
    texts += [(name.partition(":")[0].replace(".", "/"), False) for name in modules if _DOTTED.fullmatch(name)]
    for text, works in texts:
        for word in _paths_in(text):
            found = [path for path in kept if is_path_within(cwd / word, path)]
            if any(path.name != DATA_FOLDER or not works or not (cwd / word).is_dir() for path in found):
                return word
    return ""


def _paths_in(text: str) -> Iterator[str]:
    """List everything in a text that may be a path, also behind the letter of an option."""
    for word in (text, *_WORDS.split(text)):
        if word and "\0" not in word:
            yield word
            if word.startswith("-") and len(word) > len("-x"):
                yield word[2:]


def _find_work_start(line: Sequence[str], cwd: Path) -> int:
    """Find the index behind which all words are arguments of what is run."""
    at = 0
    while at < len(line):
        name = os.path.basename(line[at])  # noqa: PTH119, it may be no path.
        runner = _RUNNERS.get(re.sub(r"[\d.]+$", "", name))
        if runner is None:
            break
        run = _skip_runner_words(runner, line, at + 1)
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
    own = "/" in line[0] and is_path_within(cwd / line[0], cwd)
    plain = [number for number, text in enumerate(line[1:], 1) if not text.startswith("-")]
    return plain[0] + 1 if own and plain else len(line)


def _skip_runner_words(runner: _Runner, line: Sequence[str], at: int) -> int:
    """Skip a runner's own options; the end of the line if one is unknown."""
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


def list_server_paths(folder: Path) -> Iterator[Path]:
    """List the paths that command lines in `.mcp.json` may mean, existing or not."""
    try:
        read = msgspec.json.decode((folder / MCP_FILE).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for server in read.mcpServers.values():
        cwd = folder / _cwd(server)
        yield from (cwd / word for _, text in list_texts(server, ()) for word in _paths_in(text))


class _File(msgspec.Struct, frozen=True):
    mcpServers: dict[str, object] = {}  # noqa: N815, the name of the key.


def _cwd(server: object) -> str:
    match server:
        case {"cwd": str(cwd)}:
            return cwd
        case _:
            return "."


MAX_BYTES: Final = 2_000_000_000
MAX_FILES: Final = 200_000
SETTLED_NANOSECONDS: Final = 2_000_000_000
"""A file this old with the same stamp is unchanged: a later change has another time."""
MAX_FILES_NAMED: Final = 5
MAX_FILES_LISTED: Final = 2_000
"""For larger folders the content of each file is not kept."""
_PORTION: Final = 1 << 20
_OF_GIT: Final = frozenset(("config", "hooks"))
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def digest_folder(folder: Path, left_out: Iterable[Path] = ()) -> Digest:
    return AgentCode(folder, left_out).digest()


def holds_code(folder: Path) -> bool:
    return bool(AgentCode(folder).contents())


def list_data_places(folder: Path) -> tuple[Path, ...]:
    """List an agent's data folders inside its own: tool roots, documents, and `data`."""
    try:
        spec = read_agent(folder).spec
    except ConfigError:
        return (folder / DATA_FOLDER,)
    names = [
        DATA_FOLDER,
        *(name for _, name in list_tool_roots(spec)),
        *(name for _, name, _ in list_readable_places(spec)),
    ]
    places = [Path(os.path.realpath(folder / name)) for name in names]
    own = Path(os.path.realpath(folder))
    return tuple(path for path in places if path != own and path.is_relative_to(own))


class AgentCode:
    """The files of a folder from which code could be loaded. Unchanged files are not read again."""

    def __init__(self, folder: Path, left_out: Iterable[Path] = ()) -> None:
        self.folder = folder
        self._left_out = tuple(Path(os.path.realpath(path)) for path in left_out)
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}

    def digest(self) -> Digest:
        return digest_contents(self.contents())

    def contents(self) -> dict[str, str]:
        folder = self.folder
        if folder.is_symlink() or not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: name the agent's folder itself.")
        own, found, remaining = Path(os.path.realpath(folder)), dict[str, str](), MAX_BYTES
        inside = (place for place in self._left_out if place != own and place.is_relative_to(own))
        places = (*list_data_places(folder), *inside)
        declared = _list_declarations(folder)
        for path in _walk_files(own, frozenset(map(str, places))):
            name = path.relative_to(own).as_posix()
            about = os.lstat(path)
            remaining -= about.st_size
            if remaining < 0 or len(found) >= MAX_FILES:
                raise ConfigError(f"{folder} holds too much code to check: keep an agent's folder small.")
            if name not in declared and not stat.S_ISSOCK(about.st_mode):
                found[name] = self._cover_named_file(path, about, own, places)
        return found | self._cover_named_files(own, found, places)

    def _cover_named_files(self, own: Path, found: Mapping[str, str], places: tuple[Path, ...]) -> dict[str, str]:
        """Cover files that only a command line or a link names: a declaration, or a file below .git.

        Data folders are left out: no command line and no link may lead there.
        """
        links = (own / name for name, content in found.items() if content.startswith("link "))
        named = {Path(os.path.realpath(place)) for place in (*links, *list_server_paths(own)) if "\0" not in str(place)}
        inside = {path.relative_to(own).as_posix(): path for path in named if path.is_relative_to(own)}
        return {
            name: self._cover_named_file(path, os.lstat(path), own, places)
            for name, path in inside.items()
            if name not in found and os.path.isfile(path) and not any(map(path.is_relative_to, places))  # noqa: PTH113, a word may be no path.
        }

    def _cover_named_file(self, path: Path, about: os.stat_result, own: Path, places: tuple[Path, ...]) -> str:
        if stat.S_ISLNK(about.st_mode):
            return self._cover_link_target(path, own, places)
        if not stat.S_ISREG(about.st_mode):
            return f"special {stat.S_IFMT(about.st_mode):o}"
        runs = "x" if about.st_mode & stat.S_IXUSR else "-"
        return f"{runs}{self._content(path, os.O_NOFOLLOW)}"

    def _cover_link_target(self, path: Path, own: Path, places: tuple[Path, ...]) -> str:
        """Cover a link's target: inside the folder it is listed itself, outside it is read."""
        target = Path(os.path.realpath(path))
        if any(target.is_relative_to(place) for place in places):
            raise ConfigError(f"{path} is a link to where data lies: put the file itself into the agent's folder.")
        named = f"link {os.readlink(path)}"  # noqa: PTH115, as the lines around it.
        if target.is_relative_to(own) or not target.exists():
            return named
        if target.is_dir():
            raise ConfigError(f"{path} is a link that leads out to a folder: put the folder itself there.")
        return f"{named} {self._content(target, 0)}" if target.is_file() else named

    def _content(self, path: Path, flags: int) -> str:
        """Read a file without blocking on a pipe; an unchanged file is not read again."""
        try:
            known = self._digests.get(str(path))
            if known is not None and known[0] == _stamp(os.lstat(path)):
                return known[1]
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
            try:
                about = os.fstat(file)
                digest = hashlib.sha256()
                while portion := os.read(file, _PORTION):
                    digest.update(portion)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        if time.time_ns() - about.st_ctime_ns > SETTLED_NANOSECONDS:
            self._digests[str(path)] = (_stamp(about), digest.hexdigest())
        return digest.hexdigest()


def _stamp(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def digest_contents(contents: Mapping[str, str]) -> Digest:
    digest = hashlib.sha256(b"halter folder 2\n")
    for name, content in sorted(contents.items()):
        written = name.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%s%d:%s" % (len(written), written, len(content), content.encode("utf-8", "surrogateescape")))
    return Digest(digest.hexdigest())


def describe_changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name the files that differ from the trusted ones; empty where these were not kept."""
    if not before:
        return ""
    kinds = {
        "changed": [name for name in now if name in before and before[name] != shorten_digest(now[name])],
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    return "; ".join(f"{kind}: {_name_few(names)}" for kind, names in kinds.items() if names)


def shorten_digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _name_few(names: list[str]) -> str:
    more = f" and {len(names) - MAX_FILES_NAMED} more" if len(names) > MAX_FILES_NAMED else ""
    return f"{join_names(sorted(names)[:MAX_FILES_NAMED])}{more}"


def _list_declarations(folder: Path) -> frozenset[str]:
    """List the files that Halter reads as declarations: they are never run."""
    try:
        named = [os.path.normpath(name) for name in list_named_files(read_agent(folder).spec)]
    except ConfigError:
        named = []
    below = [*folder.glob("playbooks/*.yaml"), *folder.glob(".agents/skills/*/SKILL.md")]
    declared = {AGENT_FILE, INSTRUCTIONS, *named, *(path.relative_to(folder).as_posix() for path in below)}
    return frozenset(declared - {TOOLS_FILE, MCP_FILE})


def _walk_files(folder: Path, left_out: frozenset[str]) -> Iterator[Path]:
    """Yield all files and links that are not left out. Links are not followed."""
    for parent, folders, files in os.walk(folder, onerror=_raise_unreadable):
        links = [name for name in folders if os.path.islink(f"{parent}/{name}")]  # noqa: PTH114, thousands of them.
        git = parent == f"{folder}/.git"
        kept = [name for name in folders if name not in links and f"{parent}/{name}" not in left_out]
        folders[:] = [name for name in kept if not git or name in _OF_GIT]
        for name in (*links, *files):
            if f"{parent}/{name}" not in left_out and (not git or name in _OF_GIT):
                yield Path(parent, name)


def _raise_unreadable(error: OSError) -> None:
    raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from error


class TrustEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who trusted which code, and when; `files` tells later what has changed."""

    digest: str
    by: str
    at: int
    files: dict[str, str] = {}


class TrustFile:
    """The trusted folders, in a file that only its owner may read and write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_trusted(self, folder: Path, digest: str) -> bool:
        found = self.folders().get(_key(folder))
        return found is not None and found.digest == digest

    def describe_change(self, folder: Path, contents: Mapping[str, str]) -> str:
        found = self.folders().get(_key(folder))
        return "" if found is None else describe_changed_files(found.files, contents)

    def trust(self, folder: Path, digest: str, by: str, at: int, contents: Mapping[str, str] | None = None) -> None:
        kept = {name: shorten_digest(content) for name, content in (contents or {}).items()}
        self._write(
            {**self.folders(), _key(folder): TrustEntry(digest, by, at, kept if len(kept) <= MAX_FILES_LISTED else {})}
        )

    def distrust(self, folder: Path) -> None:
        self._write({key: found for key, found in self.folders().items() if key != _key(folder)})

    def folders(self) -> Mapping[str, TrustEntry]:
        try:
            if self._path.stat().st_mode & _OTHERS_MAY_WRITE:
                raise ConfigError(f"Others may write to {self._path}: look through it, then run chmod 600 on it.")
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror or error}.") from error
        try:
            return msgspec.json.decode(data, type=dict[str, TrustEntry])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is damaged ({error}): remove it, and trust each folder again.") from None

    def _write(self, folders: Mapping[str, TrustEntry]) -> None:
        """Replace the file atomically."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = msgspec.json.format(msgspec.json.encode(folders, order="sorted"))
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".trust-", delete=False) as file:
                written = Path(file.name)
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    written.replace(self._path)
                except OSError:
                    written.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror or error}.") from error


def _key(folder: Path) -> str:
    return str(folder.resolve())
