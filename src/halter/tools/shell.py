"""The shell tool: runs programs as lists of arguments, without a shell unless the list names one, in bubblewrap.

In the sandbox one folder is writable, the system is readable, and nothing else is visible. Before the first command, a
probe inside the same sandbox tests that what is forbidden is impossible.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, TypedDict, Unpack

from halter.core.errors import ConfigError
from halter.core.options import reject_unknown_options
from halter.core.tools import AGENT_VARIABLE, Failed
from halter.spec.skills import SkillScript
from halter.system.paths import FileIdentity, identity_of
from halter.system.protected_paths import NO_PROTECTED_PATHS, ProtectedPaths, contains_agent_file
from halter.tools.files import split_path
from halter.tools.function_tool import FunctionTool, tool
from halter.tools.process import PROGRAM_FOLDERS, ProcessExit, ProcessSpec, run_group
from halter.tools.trusted_code import TrustCheck

_SYSTEM_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES: Final = ("alternatives", "group", "ld.so.cache", "localtime", "nsswitch.conf", "passwd", "ssl")
_NETWORK_ETC_FILES: Final = ("hosts", "resolv.conf")

_SKILL_FILE: Final = "SKILL.md"

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


_ROOT_CHECK: Final = """
[ "$(stat -c %d:%i -- "$1")" = "$2" ] || { echo "The root was replaced by another folder; nothing was run."; exit 1; }
shift 2; exec "$@"
"""
"""Checks inside the sandbox, before the command, that the root is the one that was checked outside."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one process, and on the number of processes.

    The kernel does not count the processes of root: for root, a control group does.
    """

    cpu_seconds: int = 300
    memory: int = 2 << 30
    file_size: int = 1 << 30
    processes: int = 256

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Put the limits in front of a command. They are inherited and cannot be raised."""
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
    """Runs commands below one folder; without `is_enclosed`, with limits but without a sandbox.

    A root that is not `writable` contains the program itself and is read-only.
    """

    root: Path
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    is_enclosed: bool = True
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
            raise ConfigError(f"{self.root} cannot be the root of the shell tool. Use a separate folder.")

    @property
    def _remedy(self) -> str:
        alternative = "; set `sandbox: false` to run commands without a sandbox" if self.writable else ""
        return f"Nothing was run{alternative}."

    def protect(self, paths: ProtectedPaths) -> None:
        self.protected = self.protected.union(paths)

    async def run(
        self, argv: Sequence[str], folder: Path, stdin: bytes = b"", *, source: Path | None = None
    ) -> ProcessExit:
        """Run a command. In the sandbox, the content of `source` is shown in the place of the root's own."""
        if self.is_enclosed:
            await self.verify()
        return await self._run(argv, folder, stdin, source)

    async def verify(self) -> None:
        """Test the sandbox from inside. Raises Failed if something forbidden is possible."""
        async with self._verifying:
            if not self._is_verified:
                if shutil.which("bwrap") is None:
                    raise Failed(
                        "NoSandbox",
                        f"bubblewrap is not installed (on Debian: apt-get install bubblewrap). {self._remedy}",
                    )
                with tempfile.TemporaryDirectory(
                    dir=_find_folder_outside(self.root), prefix="halter-canary-"
                ) as canary:
                    network, writable = ("yes" if allowed else "no" for allowed in (self.network, self.writable))
                    parameters = [str(self.root), canary, str(self.limits.memory), network, writable]
                    probe_exit = await self._run(["/bin/sh", "-c", _PROBE, "probe", *parameters], self.root, b"")
                if probe_exit.text.strip() != "verified":
                    raise Failed(
                        "NoSandbox", f"the sandbox is not effective: {probe_exit.text.strip()[:150]}. {self._remedy}"
                    )
                self._is_verified = True

    async def _run(self, argv: Sequence[str], folder: Path, stdin: bytes, source: Path | None = None) -> ProcessExit:
        device, inode = await asyncio.to_thread(self._identify_folder, source)
        command = self.limits.wrap(argv)
        if self.is_enclosed:
            source_bind = [] if source is None else ["--ro-bind", str(source), str(self.root)]
            root_check = ["/bin/sh", "-c", _ROOT_CHECK, "same", str(self.root), f"{device}:{inode}"]
            command = [*self._walls(folder), *source_bind, "--", *root_check, *command]
        variables = {**self.environment, AGENT_VARIABLE: "shell"}
        environment = {"PATH": ":".join(PROGRAM_FOLDERS), "HOME": "/tmp", "LANG": "C.UTF-8", **variables}  # noqa: S108 The sandbox has its own folder of this name.
        group = self._make_group()
        try:
            argv = command if group is None else start_in_group(group, command)
            return await run_group(ProcessSpec(argv, folder, environment, stdin, max_output=self.max_output))
        finally:
            if group is not None:
                await asyncio.to_thread(remove_pids_group, group)

    def _make_group(self) -> Path | None:
        """Make a group that limits the processes of a command; None for a user whose processes the kernel counts.

        Raises Failed if a sandboxed command would have no limit.
        """
        if is_counted_by_kernel():
            return None
        try:
            return make_pids_group(self.limits.processes, self._find_group(), self._remedy)
        except Failed:
            if self.is_enclosed:
                raise
            return None

    def _find_group(self) -> Path | None:
        return find_own_pids_group()

    def _identify_folder(self, source: Path | None = None) -> FileIdentity:
        """Return the identity of what is shown as the root. Raises Failed if commands would reach protected files."""
        try:
            fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Failed(
                type(error).__name__, f"the root of the shell tool cannot be used: {error.strerror}."
            ) from error
        try:
            sight = self.protected.take_snapshot(read_only=not self.writable)
            readable_paths = (*self.readable, *(_list_visible_paths(network=self.network) if self.is_enclosed else ()))
            reach = sight.judge_root(fd) or sight.search_folder(fd) or self.protected.find_reach(readable_paths)
            if reach or (self.writable and contains_agent_file(fd)):
                raise Failed("Protected", "a command could reach protected files; nothing was run.")
            return identity_of(fd) if source is None else (source.stat().st_dev, source.stat().st_ino)
        finally:
            os.close(fd)

    def _walls(self, folder: Path) -> list[str]:
        scratch = ["--size", str(self.limits.file_size), "--tmpfs"]
        return [
            *("bwrap", "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *(["--share-net"] if self.network else []),
            *_make_system_binds(),
            *_make_bind_arguments(_list_etc_files(network=self.network)),
            # Root outside also owns the kernel's settings inside, so they must be read-only.
            *("--proc", "/proc", "--remount-ro", "/proc"),
            *("--dev", "/dev", *scratch, "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108 As above.
            *(*scratch, "/tmp"),  # noqa: S108 As above.
            *_make_bind_arguments(self.readable),
            *("--bind" if self.writable else "--ro-bind", str(self.root), str(self.root)),
            *("--remount-ro", "/", "--chdir", str(folder)),
        ]


def _find_folder_outside(root: Path) -> Path | None:
    """Find a folder outside the root; None for the system's temporary folder."""
    usual = Path(tempfile.gettempdir()).resolve()
    return root.parent if usual.is_relative_to(root) else None


def _make_system_binds() -> list[str]:
    """Make the arguments that bind the system's programs: links on newer systems, folders on older ones."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_FOLDERS:
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def _list_etc_files(*, network: bool) -> list[Path]:
    return [Path("/etc") / name for name in (*_ETC_FILES, *(_NETWORK_ETC_FILES if network else ()))]


def _list_visible_paths(*, network: bool) -> list[Path]:
    system = (Path("/") / name for name in _SYSTEM_FOLDERS)
    return [Path("/usr"), *(path for path in system if not path.is_symlink()), *_list_etc_files(network=network)]


def _make_bind_arguments(paths: Iterable[Path]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", str(path), str(path))]


class ShellOptions(TypedDict, total=False):
    """Options of the shell tool. `readable` are further visible folders; `environment` is all that commands inherit."""

    sandbox: bool
    network: bool
    limits: SandboxLimits
    readable: Sequence[Path]
    environment: Mapping[str, str]
    max_output: int
    timeout: float | str


def make_shell_tool(root: str | Path, **options: Unpack[ShellOptions]) -> FunctionTool:
    """Make a tool that runs commands below a folder, in a sandbox unless that is disabled."""
    reject_unknown_options(options, ShellOptions.__optional_keys__, "the shell tool")
    is_sandboxed = options.get("sandbox", True)
    network = options.get("network", False)
    sandbox = Sandbox(
        Path(root),
        options.get("limits", SandboxLimits()),
        is_enclosed=is_sandboxed,
        network=network,
        readable=options.get("readable", ()),
        environment=options.get("environment", {}),
        max_output=options.get("max_output", 1_000_000),
    )

    async def run_command(argv: list[str], folder: str = ".", stdin: str = "") -> str:
        """Run a program below the root. `argv` is the program and its arguments; no shell expands them.

        The result is its output; the last line shows an exit code other than 0.
        """
        path = sandbox.root.joinpath(*split_path(folder))
        return _format_exit(await sandbox.run(_check_argv(argv), path, stdin.encode("utf-8", "surrogatepass")))

    return tool(
        run_command,
        level="RESTRICTED" if is_sandboxed else "PRIVILEGED",
        effect="write",
        egress=network or not is_sandboxed,
        timeout=options.get("timeout", 60),
        reads="anyone",
        reach="others" if network or not is_sandboxed else "own",
        arguments={"argv": "target:code", "folder": "target:file", "stdin": "target:code"},
    ).at(sandbox)


def make_script_tool(
    name: str, script: SkillScript, folder: Path, protected: ProtectedPaths, require_trust: TrustCheck
) -> FunctionTool:
    """Make a tool that runs a script of a skill in the skill's folder, which is read-only and all that it sees.

    It has no network, and a private `/tmp` while it runs. `require_trust` is called before each run and raises unless
    a person trusts the current version of the script.
    """
    sandbox = Sandbox(folder, writable=False, protected=protected)

    async def run_script(arguments: Sequence[str] = (), stdin: str = "") -> str:
        argv = _check_argv([*script.argv(sandbox.root), *arguments])
        with tempfile.TemporaryDirectory(prefix="halter-script-") as copy:
            # Checking trust reads the agent's folder, which may be large.
            await asyncio.to_thread(_copy_trusted_skill, require_trust, sandbox.root, Path(copy))
            process_exit = await sandbox.run(
                argv, sandbox.root, stdin.encode("utf-8", "surrogatepass"), source=Path(copy)
            )
        return _format_exit(process_exit)

    run_script.__doc__ = (
        f"{script.description.strip()}\n\n`arguments` and `stdin` are passed to the script unchanged. "
        "The result is its output; the last line shows an exit code other than 0."
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


def _copy_trusted_skill(require_trust: TrustCheck, folder: Path, destination: Path) -> None:
    """Copy a skill's folder: the trusted files, read once, and its text, which is not run."""
    files = require_trust()
    try:
        files.copy_below(folder, destination)
        for name in (_SKILL_FILE, *(os.path.relpath(path, folder) for path in files.data_folders)):
            if not name.startswith("..") and not (destination / name).exists():
                if (folder / name).is_dir():
                    shutil.copytree(folder / name, destination / name, symlinks=True)
                else:
                    shutil.copyfile(folder / name, destination / name)
    except ConfigError as error:
        raise Failed("NotTrusted", str(error)) from error
    except OSError as error:
        raise Failed(type(error).__name__, f"the skill in {folder} cannot be copied: {error.strerror}.") from error


def _format_exit(process_exit: ProcessExit) -> str:
    if process_exit.code == 0:
        return process_exit.text
    line_end = "" if process_exit.text.endswith("\n") or not process_exit.text else "\n"
    return f"{process_exit.text}{line_end}[exit code {process_exit.code}]"


def _check_argv(argv: list[str]) -> list[str]:
    if not argv or not argv[0]:
        raise Failed("BadCommand", "argv is empty. Its first element must name the program.")
    if any("\0" in argument for argument in argv):
        raise Failed("BadCommand", "an argument cannot contain a NUL character.")
    return argv


_JOIN: Final = 'echo $$ > "$1" || exit 125; shift; exec "$@"'
"""Joins the group, so that all that the command starts belongs to it; does not run the command otherwise."""
_REMOVAL_ATTEMPTS: Final = 50
_REMOVAL_INTERVAL: Final = 0.02
"""Seconds until a group is tried again whose killed processes have not been reaped."""
_NUMBERS: Final = count()
_CONTROLLER: Final = "pids"
_LIMIT_FILE: Final = "pids.max"


def is_counted_by_kernel(user: int | None = None, mapping: str | None = None) -> bool:
    """Return whether the kernel applies RLIMIT_NPROC to a user: to all but the machine's own root."""
    user = os.getuid() if user is None else user
    mapping = Path("/proc/self/uid_map").read_text("ascii") if mapping is None else mapping
    for line in mapping.splitlines():
        inside, outside, length = map(int, line.split())
        if inside <= user < inside + length:
            return outside + user - inside != 0
    return True


def find_own_pids_group(groups: str | None = None, mounts: str | None = None) -> Path | None:
    """Find the folder of this process's control group that counts processes, of either version."""
    groups = Path("/proc/self/cgroup").read_text("utf-8") if groups is None else groups
    mounts = Path("/proc/self/mountinfo").read_text("utf-8") if mounts is None else mounts
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups.splitlines())}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup" and _CONTROLLER in options.split(","):
            path = next((path for names, path in paths.items() if _CONTROLLER in names.split(",")), None)
        else:
            path = paths.get("") if kind == "cgroup2" else None
        if path is not None and Path(path).is_relative_to(root):
            group = Path(place) / os.path.relpath(path, root)
            if kind == "cgroup" or _has_controller(group):
                return group
    return None


def _has_controller(group: Path) -> bool:
    try:
        return _CONTROLLER in (group / "cgroup.controllers").read_text("ascii").split()
    except OSError:
        return False


def make_pids_group(limit: int, own_group: Path | None, remedy: str = "Nothing was run.") -> Path:
    """Make a control group below `own_group` with at most `limit` processes. Raises Failed if none can be made."""
    if own_group is None:
        raise _make_failure("no control group counts processes here", remedy)
    group = own_group / f"halter-{os.getpid()}-{next(_NUMBERS)}"
    try:
        group.mkdir()
    except OSError as error:
        raise _make_failure(f"{group} cannot be made: {error.strerror}", remedy) from error
    try:
        if not (group / _LIMIT_FILE).exists():
            # Of the second version: beside the processes of its parent it can only be a group of threads.
            (own_group / "cgroup.subtree_control").write_text(f"+{_CONTROLLER}", "ascii")
            (group / "cgroup.type").write_text("threaded", "ascii")
        (group / _LIMIT_FILE).write_text(str(limit), "ascii")
    except OSError as error:
        remove_pids_group(group)
        raise _make_failure(f"{group} takes no limit: {error.strerror}", remedy) from error
    return group


def start_in_group(group: Path, command: Sequence[str]) -> list[str]:
    """Put in front of a command what lets it join a group first; if it cannot, it does not run."""
    return ["/bin/sh", "-c", _JOIN, "join", str(group / "cgroup.procs"), *command]


def remove_pids_group(group: Path) -> None:
    """Remove a group once its processes have been reaped."""
    for _ in range(_REMOVAL_ATTEMPTS):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(_REMOVAL_INTERVAL)


def _make_failure(reason: str, remedy: str) -> Failed:
    return Failed(
        "NoProcessLimit",
        f"the kernel does not limit how many processes root starts, and {reason}. Run Halter as another user. {remedy}",
    )
