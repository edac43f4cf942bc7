"""Programs as lists of arguments, without a shell unless the list names one, in a bubblewrap sandbox.

In the sandbox one folder is writable, the system is readable, and the rest does not exist. Before the first command, a
probe inside the same sandbox tries what must not be possible.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict, Unpack

from halter.core.agent_spec import SkillScript
from halter.core.errors import ConfigError
from halter.core.folders import NO_PROTECTED_PATHS, FileIdentity, ProtectedPaths, contains_agent_file, identity_of
from halter.core.text import reject_unknown_options
from halter.core.tools import AGENT_VARIABLE, Failed
from halter.tools.files import split_path
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.process import PROGRAM_FOLDERS, ProcessExit, ProcessSpec, run_group

_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC: Final = ("alternatives", "group", "ld.so.cache", "localtime", "nsswitch.conf", "passwd", "ssl")
_ETC_OF_NETWORK: Final = ("hosts", "resolv.conf")

_PROBE: Final = r"""
fail() { echo "$1"; exit 1; }
writable() { ( : > "$1" ) 2>/dev/null; }
root=$1 canary=$2 memory=$3 network=$4
writable /dev/null || fail "/dev/null cannot be written"
if [ "$5" = yes ]; then
    writable "$root/.halter-probe" && rm "$root/.halter-probe" || fail "the root cannot be written"
else
    writable "$root/.halter-probe" && { rm "$root/.halter-probe"; fail "the root can be written"; }
fi
for place in / /usr /usr/bin /etc /dev /home /root /var "$canary"; do
    [ "$place" = "$root" ] || ! writable "$place/.halter-probe" && continue
    rm "$place/.halter-probe"; fail "$place can be written"
done
( : >> /proc/sys/kernel/core_pattern ) 2>/dev/null && fail "the kernel's settings can be written"
[ ! -e "$canary" ] || fail "files outside of the root can be seen"
dd if=/dev/null of=/dev/null bs="$memory" count=1 2>/dev/null && fail "the memory limit does not apply"
[ "$network" = yes ] || ! sed 1,2d /proc/net/dev | grep -qv '^ *lo:' || fail "the network can be reached"
echo verified
"""


_SAME: Final = """
[ "$(stat -c %d:%i -- "$1")" = "$2" ] || { echo "The root was exchanged for another folder: nothing was run."; exit 1; }
shift 2; exec "$@"
"""
"""Runs inside the sandbox before the command: its root is the one that was checked outside."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one process, and how many there may be.

    The kernel does not count the processes of root, so the last limit holds for other users only.
    """

    cpu_seconds: int = 300
    memory: int = 2 << 30
    file_size: int = 1 << 30
    processes: int = 256

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Put the limits in front of a command: they are inherited, and cannot be raised again."""
        return [
            "/usr/bin/prlimit",
            f"--cpu={self.cpu_seconds}",
            f"--as={self.memory}",
            f"--fsize={self.file_size}",
            f"--nproc={self.processes}",
            "--core=0",
            "--",
            *argv,
        ]


@dataclass
class Sandbox:
    """Runs commands below one folder; with `enclosed=False`, limited but not sandboxed.

    A root that is not `writable` holds the program itself, and is only read.
    """

    root: Path
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    enclosed: bool = True
    network: bool = False
    writable: bool = True
    readable: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    max_output: int = 1_000_000
    protected: ProtectedPaths = NO_PROTECTED_PATHS
    _is_verified: bool = field(default=False, init=False)
    _verifying: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        if not self.root.is_dir() or self.root == Path("/"):
            raise ConfigError(f"{self.root} cannot be the root of the shell tool: name a folder of its own for it.")

    @property
    def _remedy(self) -> str:
        other = "; `sandbox: false` in the configuration would run commands without one" if self.writable else ""
        return f"Nothing was run{other}."

    def protect(self, paths: ProtectedPaths) -> None:
        self.protected = self.protected.union(paths)

    async def run(self, argv: Sequence[str], folder: Path, stdin: bytes = b"") -> ProcessExit:
        if self.enclosed:
            await self.verify()
        return await self._run(argv, folder, stdin)

    async def verify(self) -> None:
        """Try from inside what must not be possible; raises Failed with what was possible."""
        async with self._verifying:
            if not self._is_verified:
                if shutil.which("bwrap") is None:
                    raise Failed(
                        "NoSandbox",
                        f"bubblewrap is not installed (on Debian: apt-get install bubblewrap). {self._remedy}",
                    )
                with tempfile.TemporaryDirectory(dir=_find_place_outside(self.root), prefix="halter-canary-") as canary:
                    network, writable = ("yes" if each else "no" for each in (self.network, self.writable))
                    parameters = [str(self.root), canary, str(self.limits.memory), network, writable]
                    ended = await self._run(["/bin/sh", "-c", _PROBE, "probe", *parameters], self.root, b"")
                if ended.text.strip() != "verified":
                    raise Failed("NoSandbox", f"the sandbox does not hold: {ended.text.strip()[:150]}. {self._remedy}")
                self._is_verified = True

    async def _run(self, argv: Sequence[str], folder: Path, stdin: bytes) -> ProcessExit:
        device, inode = await asyncio.to_thread(self._identify_folder)
        command = self.limits.wrap(argv)
        if self.enclosed:
            same = ["/bin/sh", "-c", _SAME, "same", str(self.root), f"{device}:{inode}"]
            command = [*self._walls(folder), "--", *same, *command]
        known = {**self.environment, AGENT_VARIABLE: "shell"}
        environment = {"PATH": ":".join(PROGRAM_FOLDERS), "HOME": "/tmp", "LANG": "C.UTF-8", **known}  # noqa: S108 The sandbox has a folder of this name for itself.
        return await run_group(ProcessSpec(command, folder, environment, stdin, max_output=self.max_output))

    def _identify_folder(self) -> FileIdentity:
        """The current identity of the root; raises Failed if commands would reach protected files."""
        try:
            fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Failed(
                type(error).__name__, f"the root of the shell tool cannot be used: {error.strerror}."
            ) from error
        try:
            sight = self.protected.sight(reads=not self.writable)
            shown = (*self.readable, *(_list_shown_paths(network=self.network) if self.enclosed else ()))
            reached = sight.judge_root(fd) or sight.search_folder(fd) or self.protected.find_reach(shown)
            if reached or (self.writable and contains_agent_file(fd)):
                raise Failed("Protected", "a command would reach what no tool may reach: nothing was run.")
            return identity_of(fd)
        finally:
            os.close(fd)

    def _walls(self, folder: Path) -> list[str]:
        scratch = ["--size", str(self.limits.file_size), "--tmpfs"]
        return [
            *("bwrap", "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *(["--share-net"] if self.network else []),
            *_make_system_binds(),
            *_make_bind_arguments(_list_etc_files(network=self.network)),
            # Root outside is the owner of the kernel's settings inside, too, so that they must not be writable at all.
            *("--proc", "/proc", "--remount-ro", "/proc"),
            *("--dev", "/dev", *scratch, "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108 As above.
            *(*scratch, "/tmp"),  # noqa: S108 As above.
            *_make_bind_arguments(self.readable),
            *("--bind" if self.writable else "--ro-bind", str(self.root), str(self.root)),
            *("--remount-ro", "/", "--chdir", str(folder)),
        ]


def _find_place_outside(root: Path) -> Path | None:
    """Choose a place for a folder outside of the root."""
    usual = Path(tempfile.gettempdir()).resolve()
    return root.parent if usual.is_relative_to(root) else None


def _make_system_binds() -> list[str]:
    """Bind the system's programs, which are links on newer systems and folders on older ones."""
    shown = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            shown += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            shown += ["--ro-bind", str(path), str(path)]
    return shown


def _list_etc_files(*, network: bool) -> list[Path]:
    return [Path("/etc") / name for name in (*_ETC, *(_ETC_OF_NETWORK if network else ()))]


def _list_shown_paths(*, network: bool) -> list[Path]:
    system = (Path("/") / name for name in _SYSTEM)
    return [Path("/usr"), *(path for path in system if not path.is_symlink()), *_list_etc_files(network=network)]


def _make_bind_arguments(paths: Iterable[Path]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", str(path), str(path))]


TrustCheck = Callable[[], None]
"""Raises if a person has not trusted a program as it is now."""


class ShellOptions(TypedDict, total=False):
    """How commands run. `readable` are further visible folders; `environment` is all that they inherit."""

    sandbox: bool
    network: bool
    limits: SandboxLimits
    readable: Sequence[Path]
    environment: Mapping[str, str]
    max_output: int
    timeout: float | str


def make_shell_tool(root: str | Path, **options: Unpack[ShellOptions]) -> FunctionTool:
    """A tool that runs commands below a folder, sandboxed unless the configuration says otherwise."""
    reject_unknown_options(options, ShellOptions.__optional_keys__, "the shell tool")
    enclosed = options.get("sandbox", True)
    network = options.get("network", False)
    sandbox = Sandbox(
        Path(root),
        options.get("limits", SandboxLimits()),
        enclosed=enclosed,
        network=network,
        readable=options.get("readable", ()),
        environment=options.get("environment", {}),
        max_output=options.get("max_output", 1_000_000),
    )

    async def run_command(argv: list[str], folder: str = ".", stdin: str = "") -> str:
        """Run a program below the root. `argv` is the program and its arguments; no shell expands them.

        The answer is what it put out; an exit code other than 0 stands in the last line.
        """
        path = sandbox.root.joinpath(*split_path(folder))
        return _tell_exit(await sandbox.run(_check_argv(argv), path, stdin.encode("utf-8", "surrogatepass")))

    return tool(
        run_command,
        level="RESTRICTED" if enclosed else "PRIVILEGED",
        effect="write",
        egress=network or not enclosed,
        timeout=options.get("timeout", 60),
        reads="anyone",
        reach="others" if network or not enclosed else "own",
        arguments={"argv": "target:code", "folder": "target:file", "stdin": "target:code"},
    ).at(sandbox)


def make_script_tool(
    name: str, script: SkillScript, folder: Path, protected: ProtectedPaths, starts: TrustCheck
) -> FunctionTool:
    """A tool that runs a skill's own script in its folder, which is all that it sees and only read.

    It has no network, and `/tmp` for itself while it runs. `starts` is called before each run; it raises if a person
    has not trusted the script as it is now.
    """
    sandbox = Sandbox(folder, writable=False, protected=protected)

    async def run_script(arguments: Sequence[str] = (), stdin: str = "") -> str:
        # It reads the agent's folder, which may be large.
        await asyncio.to_thread(starts)
        words = _check_argv([*script.argv(sandbox.root), *arguments])
        return _tell_exit(await sandbox.run(words, sandbox.root, stdin.encode("utf-8", "surrogatepass")))

    run_script.__doc__ = (
        f"{script.description.strip()}\n\n`arguments` and `stdin` are given to a script as they are. "
        "The answer is what it put out; an exit code other than 0 stands in the last line."
    )
    return tool(
        run_script,
        name=name,
        level=script.level,
        effect=script.effect,
        timeout=script.timeout,
        reads=script.reads,
        reach=script.reach,
        arguments={"arguments": "target:code", "stdin": "target:code"},
    )


def _tell_exit(ended: ProcessExit) -> str:
    if ended.code == 0:
        return ended.text
    line_end = "" if ended.text.endswith("\n") or not ended.text else "\n"
    return f"{ended.text}{line_end}[exit code {ended.code}]"


def _check_argv(argv: list[str]) -> list[str]:
    if not argv or not argv[0]:
        raise Failed("BadCommand", "argv is empty: its first element names the program.")
    if any("\0" in argument for argument in argv):
        raise Failed("BadCommand", "an argument cannot hold a NUL character.")
    return argv
