"""Trust in the code of an agent's folder: it runs only after a person trusted its digest.

The digest covers every file that a command line could load from the folder: an interpreter reads a script of any name,
and modules, packages and settings next to it. It omits only the declarations that Halter itself reads, unless a command
line or a link names one, and the data folders, from which no command line may load anything. It includes compiled
Python: a process that loads trusted code must not write bytecode next to it.

An argument of a server in `.mcp.json` counts as data only for a known program: after the script, module or package of a
known runner. Any argument of another program may be code.
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

from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.guidance import INSTRUCTIONS
from halter.config.mcp_file import MCP_FILE
from halter.config.playbook_files import list_texts
from halter.config.roots import DATA_FOLDER, TOOLS_FILE, list_data_places, list_named_files
from halter.core.errors import ConfigError
from halter.core.ids import Digest
from halter.core.text import expand_names, join_names, make_word_set
from halter.core.tools import ToolServer
from halter.system.paths import is_path_within

CASES_FILE: Final = "evals.yaml"
"""The eval cases of an agent: messages and expectations, from which nothing is loaded."""

_WORD_SEPARATORS: Final = re.compile(r"""[\s=:,;'"&|()<>@]+""")
_MODULE_NAME: Final = re.compile(r"[A-Za-z_][\w.]*(?::[\w.]+)?")
_MODULE_OPTIONS: Final = frozenset({"-m", "--module"})


class _Runner(msgspec.Struct, frozen=True):
    """A program that runs what its first positional word names and passes the other words on.

    `flag_options` take no value. `value_options` take a value that is not run. The word after one of `run_options` is
    run. One-letter flags in `flag_letters` may be joined. A `verb` must come first.
    """

    flag_options: frozenset[str] = frozenset()
    value_options: frozenset[str] = frozenset()
    run_options: frozenset[str] = frozenset()
    flag_letters: str = ""
    verb: str = ""


_PYTHON: Final = _Runner(
    value_options=make_word_set("-X -W"), run_options=make_word_set("-m -c"), flag_letters="bBdEIOPqsSuvx"
)
_PACKAGE: Final = _Runner(
    flag_options=make_word_set("-y --yes -q --quiet --no-install --offline --isolated --prefer-offline"),
    value_options=make_word_set("-p --package --from --with --python --registry"),
)
_SHELL: Final = _Runner(
    flag_options=make_word_set("--norc --noprofile --login"), run_options=make_word_set("-c"), flag_letters="aefuxlv"
)
_NODE: Final = _Runner(
    flag_options=make_word_set("--no-warnings --enable-source-maps --experimental-strip-types --trace-warnings")
)
_UV: Final = _Runner(
    flag_options=make_word_set("-q --quiet --frozen --locked --no-sync --no-project --isolated --offline --no-dev"),
    value_options=make_word_set("-p --python --with --extra --group"),
    run_options=make_word_set("-m --module"),
    verb="run",
)
_DENO: Final = _Runner(
    flag_options=make_word_set("-A -q --allow-all --quiet --no-lock --no-check --no-prompt"), verb="run"
)
_RUNNERS: Final[Mapping[str, _Runner]] = expand_names(
    {
        "python pypy": _PYTHON,
        "npx bunx pnpx uvx": _PACKAGE,
        "sh bash dash zsh": _SHELL,
        "node nodejs tsx ts-node nodemon jiti": _NODE,
        "ruby perl": _Runner(flag_letters="w"),
        "uv": _UV,
        "deno": _DENO,
        "bun": msgspec.structs.replace(_DENO, flag_options=frozenset()),
    }
)
_LOADERS: Final = make_word_set(
    "runpy pdb trace timeit profile cProfile unittest pytest uvicorn gunicorn hypercorn streamlit flask celery"
)
"""Modules and programs that load what their arguments name."""


def find_data_load(server: ToolServer, paths: Iterable[Path], environ: Mapping[str, str]) -> str:
    """Find a word by which a command line could load something from a data folder. Returns an empty string if none.

    The agent may have written to a data folder, so no command line may name, search or run in one. Only the agent's own
    `data` may be an argument, after the word that names what is run.
    """
    cwd, data_paths = Path(server.cwd), tuple(paths)
    line = (server.command, *server.args)
    first_argument = _find_work_start(line, cwd)
    texts = [(text, index >= first_argument) for index, text in enumerate(line)]
    texts += [(text, False) for text in (server.cwd, *server.env.values(), environ.get("PATH", ""))]
    modules = [name for flag, name in pairwise(line) if flag in _MODULE_OPTIONS or ":" in name]
    texts += [(name.partition(":")[0].replace(".", "/"), False) for name in modules if _MODULE_NAME.fullmatch(name)]
    for text, is_argument in texts:
        for word in _paths_in(text):
            data_folders = [path for path in data_paths if is_path_within(cwd / word, path)]
            if any(path.name != DATA_FOLDER or not is_argument or not (cwd / word).is_dir() for path in data_folders):
                return word
    return ""


def _paths_in(text: str) -> Iterator[str]:
    """Yield each part of a text that may be a path, also after the letter of an option."""
    for word in (text, *_WORD_SEPARATORS.split(text)):
        if word and "\0" not in word:
            yield word
            if word.startswith("-") and len(word) > len("-x"):
                yield word[2:]


def _find_work_start(line: Sequence[str], cwd: Path) -> int:
    """Return the index from which all words are arguments of what is run."""
    index = 0
    while index < len(line):
        name = os.path.basename(line[index])  # noqa: PTH119, it may not be a path.
        runner = _RUNNERS.get(re.sub(r"[\d.]+$", "", name))
        if runner is None:
            break
        next_index = _skip_runner_words(runner, line, index + 1)
        if line[next_index - 1] in runner.run_options:
            return (
                len(line)
                if line[next_index : next_index + 1] and line[next_index].partition(".")[0] in _LOADERS
                else next_index + 1
            )
        index = next_index
    else:
        return len(line)
    if name in _LOADERS:
        return len(line)
    if index:
        return index + 1
    # A program in the agent's folder may take subcommands of its own.
    is_own_program = "/" in line[0] and is_path_within(cwd / line[0], cwd)
    plain_words = [word_index for word_index, text in enumerate(line[1:], 1) if not text.startswith("-")]
    return plain_words[0] + 1 if is_own_program and plain_words else len(line)


def _skip_runner_words(runner: _Runner, line: Sequence[str], index: int) -> int:
    """Skip a runner's own options. Returns the end of the line if an option is unknown."""
    if runner.verb:
        if line[index : index + 1] != (runner.verb,):
            return len(line)
        index += 1
    while index < len(line) and line[index].startswith("-"):
        word = line[index]
        is_joined = not word.startswith("--") and set(word[1:]) <= set(runner.flag_letters)
        if word in runner.run_options:
            return index + 1
        if word in runner.value_options:
            index += 1
        elif word == "--":
            return index + 1
        elif not is_joined and word not in runner.flag_options and "=" not in word:
            return len(line)
        index += 1
    return index


def list_server_paths(folder: Path) -> Iterator[Path]:
    """Yield the paths that command lines in `.mcp.json` may refer to, existing or not."""
    try:
        mcp_file = msgspec.json.decode((folder / MCP_FILE).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for server in mcp_file.mcpServers.values():
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
"""Age from which a file with the same stamp counts as unchanged: a later change has another time."""
MAX_FILES_NAMED: Final = 5
MAX_FILES_LISTED: Final = 2_000
"""Maximum number of files whose digests are stored; for larger folders, none are."""
_CHUNK_SIZE: Final = 1 << 20
_MAX_LINKS: Final = 40
"""Links that are followed from one name, as many as the kernel follows."""
_OUTSIDE_LINK: Final = re.compile(r"link .* ([0-9a-f]{64})", re.DOTALL)
"""The content of a link to a file outside the folder, with the digest of its bytes."""
_TRUSTED_GIT_ENTRIES: Final = frozenset(("config", "hooks"))
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def digest_folder(folder: Path, excluded_paths: Iterable[Path] = ()) -> Digest:
    return AgentCode(folder, excluded_paths).digest()


def holds_code(folder: Path) -> bool:
    return bool(AgentCode(folder).contents())


class AgentCode:
    """The files of a folder from which code could be loaded. Unchanged files are not read again."""

    def __init__(self, folder: Path, excluded_paths: Iterable[Path] = ()) -> None:
        self.folder = folder
        self._excluded_paths = tuple(Path(os.path.realpath(path)) for path in excluded_paths)
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}

    def digest(self) -> Digest:
        return digest_contents(self.contents())

    def contents(self) -> dict[str, str]:
        folder = self.folder
        if folder.is_symlink() or not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder. Name the agent's folder itself.")
        root, content_by_name, remaining = Path(os.path.realpath(folder)), dict[str, str](), MAX_BYTES
        inner_excluded_paths = (
            excluded_path
            for excluded_path in self._excluded_paths
            if excluded_path != root and excluded_path.is_relative_to(root)
        )
        data_folders = (*list_data_places(folder), *inner_excluded_paths)
        declared_names = _list_declarations(folder)
        for path in _walk_files(root, frozenset(map(str, data_folders))):
            name = path.relative_to(root).as_posix()
            status = os.lstat(path)
            remaining -= status.st_size
            if remaining < 0 or len(content_by_name) >= MAX_FILES:
                raise ConfigError(
                    f"{folder} contains too much code to check. Move other files out of the agent's folder."
                )
            if name not in declared_names and not stat.S_ISSOCK(status.st_mode):
                content_by_name[name] = self._cover_named_file(path, status, root, data_folders)
        return content_by_name | self._cover_named_files(root, content_by_name, data_folders)

    def former_digest(self, current_contents: Mapping[str, str] | None = None) -> Digest:
        """Return the digest as of version 1.0.0, which also covered the eval cases.

        Who runs the code passes the contents that were read: what is read again may be something else.
        """
        root = Path(os.path.realpath(self.folder))
        contents = dict(self.contents() if current_contents is None else current_contents)
        path = root / CASES_FILE
        if CASES_FILE not in contents and os.path.lexists(path):
            contents[CASES_FILE] = self._cover_named_file(path, os.lstat(path), root, list_data_places(self.folder))
        return digest_contents(contents)

    def _cover_named_files(
        self, root: Path, content_by_name: Mapping[str, str], data_folders: tuple[Path, ...]
    ) -> dict[str, str]:
        """Cover files that only a command line or a link names, such as a declaration or a file below .git.

        Data folders are omitted: no command line and no link may lead there.
        """
        links = (root / name for name, content in content_by_name.items() if content.startswith("link "))
        paths = {
            Path(os.path.realpath(candidate))
            for candidate in (*links, *list_server_paths(root))
            if "\0" not in str(candidate)
        }
        path_by_name = {path.relative_to(root).as_posix(): path for path in paths if path.is_relative_to(root)}
        return {
            name: self._cover_named_file(path, os.lstat(path), root, data_folders)
            for name, path in path_by_name.items()
            if name not in content_by_name and os.path.isfile(path) and not any(map(path.is_relative_to, data_folders))  # noqa: PTH113, a word may not be a path.
        }

    def _cover_named_file(self, path: Path, status: os.stat_result, root: Path, data_folders: tuple[Path, ...]) -> str:
        if stat.S_ISLNK(status.st_mode):
            return self._cover_link_target(path, root, data_folders)
        if not stat.S_ISREG(status.st_mode):
            return f"special {stat.S_IFMT(status.st_mode):o}"
        executable_mark = "x" if status.st_mode & stat.S_IXUSR else "-"
        return f"{executable_mark}{self._content(path, os.O_NOFOLLOW)}"

    def _cover_link_target(self, path: Path, root: Path, data_folders: tuple[Path, ...]) -> str:
        """Cover a link. A target inside the folder is listed itself; a target outside is read."""
        target = Path(os.path.realpath(path))
        if any(target.is_relative_to(data_folder) for data_folder in data_folders):
            raise ConfigError(f"{path} links to a data folder. Put the file itself into the agent's folder.")
        content = f"link {os.readlink(path)}"  # noqa: PTH115, as the lines around it.
        if target.is_relative_to(root) or not target.exists():
            return content
        if target.is_dir():
            raise ConfigError(f"{path} links to a folder outside the agent's folder. Put the folder itself there.")
        return f"{content} {self._content(target, 0)}" if target.is_file() else content

    def _content(self, path: Path, flags: int) -> str:
        """Read a file without blocking on a pipe; an unchanged file is not read again."""
        try:
            cached_digest = self._digests.get(str(path))
            if cached_digest is not None and cached_digest[0] == _stamp(os.lstat(path)):
                return cached_digest[1]
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
            try:
                status = os.fstat(file)
                digest = hashlib.sha256()
                while portion := os.read(file, _CHUNK_SIZE):
                    digest.update(portion)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        if time.time_ns() - status.st_ctime_ns > SETTLED_NANOSECONDS:
            self._digests[str(path)] = (_stamp(status), digest.hexdigest())
        return digest.hexdigest()


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest_contents(contents: Mapping[str, str]) -> Digest:
    digest = hashlib.sha256(b"halter folder 2\n")
    for name, content in sorted(contents.items()):
        encoded_name = name.encode("utf-8", "surrogateescape")
        digest.update(
            b"%d:%s%d:%s" % (len(encoded_name), encoded_name, len(content), content.encode("utf-8", "surrogateescape"))
        )
    return Digest(digest.hexdigest())


def resolve_digests(root: Path, contents: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each file's bytes by its name; for a link, that of its target.

    A link that leads to no file, but perhaps to a folder, keeps its content.
    """
    digest_by_name: dict[str, str] = {}
    for name in contents:
        content = _follow_links(root, contents, name)
        if outside_link := _OUTSIDE_LINK.fullmatch(content):
            digest_by_name[name] = outside_link[1]
        elif content.startswith("link "):
            digest_by_name[name] = contents[name]
        elif not content.startswith("special "):
            digest_by_name[name] = content[1:]
    return digest_by_name


def _follow_links(root: Path, contents: Mapping[str, str], name: str) -> str:
    """Return the content that a name leads to, as it was recorded: links are not read again."""
    for _ in range(_MAX_LINKS):
        target = root / Path(name).parent / contents[name].removeprefix("link ")
        target_name = os.path.relpath(target, root)
        if not contents[name].startswith("link ") or target_name not in contents:
            break
        name = target_name
    return contents[name]


def describe_changed_files(trusted_files: Mapping[str, str], current_files: Mapping[str, str]) -> str:
    """Describe which files differ from the trusted ones. Returns an empty string if those were not stored."""
    if not trusted_files:
        return ""
    kinds = {
        "changed": [
            name
            for name in current_files
            if name in trusted_files and trusted_files[name] != shorten_digest(current_files[name])
        ],
        "new": [name for name in current_files if name not in trusted_files],
        "gone": [name for name in trusted_files if name not in current_files],
    }
    return "; ".join(f"{kind}: {_name_few(names)}" for kind, names in kinds.items() if names)


def shorten_digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _name_few(names: list[str]) -> str:
    rest_note = f" and {len(names) - MAX_FILES_NAMED} more" if len(names) > MAX_FILES_NAMED else ""
    return f"{join_names(sorted(names)[:MAX_FILES_NAMED])}{rest_note}"


def _list_declarations(folder: Path) -> frozenset[str]:
    """Return the files that Halter reads as declarations, which are never run."""
    try:
        named_files = [os.path.normpath(name) for name in list_named_files(read_agent(folder).spec)]
    except ConfigError:
        named_files = []
    declaration_files = [*folder.glob("playbooks/*.yaml"), *folder.glob(".agents/skills/*/SKILL.md")]
    declared_names = {
        AGENT_FILE,
        INSTRUCTIONS,
        CASES_FILE,
        *named_files,
        *(path.relative_to(folder).as_posix() for path in declaration_files),
    }
    return frozenset(declared_names - {TOOLS_FILE, MCP_FILE})


def _walk_files(folder: Path, excluded_paths: frozenset[str]) -> Iterator[Path]:
    """Yield all files and links except those in `excluded_paths`. Links are not followed."""
    for parent, folders, files in os.walk(folder, onerror=_raise_unreadable):
        links = [name for name in folders if os.path.islink(f"{parent}/{name}")]  # noqa: PTH114, thousands of them.
        is_git_folder = parent == f"{folder}/.git"
        entered_folders = [name for name in folders if name not in links and f"{parent}/{name}" not in excluded_paths]
        folders[:] = [name for name in entered_folders if not is_git_folder or name in _TRUSTED_GIT_ENTRIES]
        for name in (*links, *files):
            if f"{parent}/{name}" not in excluded_paths and (not is_git_folder or name in _TRUSTED_GIT_ENTRIES):
                yield Path(parent, name)


def _raise_unreadable(error: OSError) -> None:
    raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from error


class TrustEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trusted digest, with who trusted it and when; `files` is used to describe later changes."""

    digest: str
    by: str
    at: int
    files: dict[str, str] = {}


class TrustFile:
    """The file of trusted folders, which only its owner may read and write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_trusted(self, folder: Path, digest: str) -> bool:
        entry = self.folders().get(_key(folder))
        return entry is not None and entry.digest == digest

    def describe_change(self, folder: Path, contents: Mapping[str, str]) -> str:
        entry = self.folders().get(_key(folder))
        return "" if entry is None else describe_changed_files(entry.files, contents)

    def trust(self, folder: Path, digest: str, by: str, at: int, contents: Mapping[str, str] | None = None) -> None:
        short_digests = {name: shorten_digest(content) for name, content in (contents or {}).items()}
        self._write(
            {
                **self.folders(),
                _key(folder): TrustEntry(
                    digest, by, at, short_digests if len(short_digests) <= MAX_FILES_LISTED else {}
                ),
            }
        )

    def distrust(self, folder: Path) -> None:
        self._write({key: entry for key, entry in self.folders().items() if key != _key(folder)})

    def folders(self) -> Mapping[str, TrustEntry]:
        try:
            if self._path.stat().st_mode & _OTHERS_MAY_WRITE:
                raise ConfigError(
                    f"Other users can write to {self._path}. Check its content, then run chmod 600 on it."
                )
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror or error}.") from error
        try:
            return msgspec.json.decode(data, type=dict[str, TrustEntry])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is damaged ({error}). Remove it, and trust each folder again.") from None

    def _write(self, folders: Mapping[str, TrustEntry]) -> None:
        """Replace the file atomically."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = msgspec.json.format(msgspec.json.encode(folders, order="sorted"))
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".trust-", delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(self._path)
                except OSError:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror or error}.") from error


def _key(folder: Path) -> str:
    return str(folder.resolve())
