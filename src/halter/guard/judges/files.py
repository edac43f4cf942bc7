"""Programs that write, move and delete files and whole disks."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from halter.guard.commands import EXECUTES, UNKNOWN, Command, found_roots
from halter.guard.judges.found import Found, Judge, Runs, has, is_path, operands, values_of
from halter.guard.places import is_root, normal, path_risk
from halter.guard.program_names import program_of


def _placed(command: Command, paths: Sequence[str]) -> list[str]:
    """Write paths as they are seen from where the line went before."""
    if not command.folder:
        return list(paths)
    return [path if path.startswith(("/", "~", "$")) else posixpath.join(command.folder, path) for path in paths]


def _rm(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    recursive = has(words, "rR", "--recursive")
    named = _placed(command, operands(words))
    if UNKNOWN in named and any(map(is_root, named)):
        yield "CRITICAL", "rm of whatever is found in a home or a system"
    for given in operands(words):
        [path] = _placed(command, [given])
        where = normal(path)
        if is_root(path):
            yield "CRITICAL" if recursive else "HIGH", f"rm of {path}"
        elif given == UNKNOWN:
            yield "HIGH", "rm of whatever it is given"
        elif recursive and (where.startswith(("/", "~", "..", "$", "?", "[")) or _is_everything(where)):
            yield "HIGH", f"rm of everything in {path}"
        else:
            yield "MEDIUM", f"rm of {path}"
        yield from path_risk(path, "write")


def _is_everything(path: str) -> bool:
    """Tell a pattern that leaves nothing out, as `*`, and the folder itself."""
    return path == ".git" or not path.partition("/")[0].strip("*?.")


def _shred(command: Command) -> Iterator[Found]:
    yield "HIGH", "what is overwritten cannot be restored"
    yield from _rm(command)


def _rights(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    recursive = has(words, "R", "--recursive")
    mode, *paths = operands(words) or [""]
    if has(words, "", "--reference"):
        paths = [mode, *paths]
    paths = _placed(command, paths)
    if recursive:
        yield "CRITICAL" if any(map(is_root, paths)) else "HIGH", "rights of whole folders change"
    elif mode.lstrip("0") in {"777", "666"} or "s" in mode or re.fullmatch("0*[2-7][0-7]{3}", mode):
        yield "HIGH", f"the mode {mode} gives rights to everybody"
    else:
        yield "MEDIUM", "rights of files change"
    for path in paths:
        yield from path_risk(path, "write")


def _dd(command: Command) -> Iterator[Found]:
    for word in command.argv[1:]:
        if word.startswith("of="):
            yield "HIGH", "dd writes over what it is given"
            yield from path_risk(word.removeprefix("of="), "write")
    yield "MEDIUM", "dd copies whole files and disks"


def _writer(command: Command) -> Iterator[Found]:
    for path in _placed(command, operands(command.argv[1:])):
        yield from path_risk(path, "write")


def _truncate(command: Command) -> Iterator[Found]:
    yield "MEDIUM", "files are cut"
    yield from _writer(command)


def _patch(command: Command) -> Iterator[Found]:
    yield "MEDIUM", "files are changed as another file says"
    yield from _writer(command)


def _copier(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    *sources, target = _placed(command, operands(words)) or [""]
    for folder in values_of(words, "-t", "--target-directory"):
        sources, target = [*sources, target], folder
    for path in sources:
        yield from path_risk(path, "read")
        if is_path(path) or target.endswith("/"):
            yield from path_risk(posixpath.join(target, posixpath.basename(path)), "write")
    yield from path_risk(target, "write")
    if any(word == "/dev/null" for word in sources):
        yield "MEDIUM", f"{target} is emptied"


def _mover(command: Command) -> Iterator[Found]:
    yield from _copier(command)
    *sources, target = _placed(command, operands(command.argv[1:])) or [""]
    if any(is_root(path) for path in sources):
        yield "CRITICAL", "a home or a system is moved"
    if normal(target).startswith("/dev/"):
        yield "HIGH", f"what is moved to {target} is lost"
    for path in sources:
        yield from path_risk(path, "write")


def _rsync(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    for line in values_of(words, "-e", "--rsh", "--rsync-path"):
        yield Runs(line)
    *_, target = operands(words) or [""]
    if any(word.startswith(("--del", "--remove-source-files")) for word in words):
        yield "CRITICAL" if is_root(target) else "HIGH", "rsync deletes what the other side does not have"
    yield "MEDIUM", "rsync writes over files"
    yield from path_risk(target, "write")


_DELETERS: Final = frozenset({"rm", "unlink", "shred", "srm", "wipe", "truncate"})


def _find(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    roots = _placed(command, found_roots(command.argv))
    executed = {program_of(words[at + 1]) for at, word in enumerate(words[:-1]) if word in EXECUTES}
    if "-delete" in words or executed & _DELETERS:
        yield "CRITICAL" if any(map(is_root, roots)) else "HIGH", "find deletes what it finds"
    for path in values_of(words, "-fprint", "-fprint0", "-fprintf", "-fls"):
        yield from path_risk(path, "write")


def _fd(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    for at, word in enumerate(words):
        if word in {"-x", "-X", "--exec", "--exec-batch"} and words[at + 1 :]:
            inner = words[at + 1 :]
            yield Runs(tuple("." if each == "{}" else each for each in inner) + (() if "{}" in inner else (".",)))
            return


def _unpacked(folder: str) -> Iterator[Found]:
    """Judge a folder whose files an archive may write over."""
    if is_root(folder):
        yield "HIGH", f"files are unpacked over those of {folder}"
    yield from path_risk(posixpath.join(folder, "file"), "write")


_TAR_RUNS: Final = ("--to-command", "--use-compress-program", "--info-script", "--new-volume-script", "--rsh-command")


def _tar(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    for line in (*values_of(words, *_TAR_RUNS), *values_of(words, "-I", "-F")):
        yield "HIGH", "tar runs a program"
        yield Runs(line)
    for action in values_of(words, "--checkpoint-action"):
        if action.startswith("exec="):
            yield "HIGH", "tar runs a program"
            yield Runs(action.removeprefix("exec="))
    flags = words[0] if words and not words[0].startswith("-") else ""
    if "x" in flags or has(words, "x", "--extract", "--get"):
        yield "MEDIUM", "files are unpacked over others"
        for path in operands(words):
            yield from path_risk(path, "write")
        for folder in values_of(words, "-C", "--directory"):
            yield from _unpacked(folder)
        if has(words, "P", "--absolute-names") or "P" in flags:
            yield "HIGH", "files are unpacked to where the archive says"
    if has(words, "", "--remove-files", "--delete"):
        yield "HIGH", "files are deleted"
    for path in values_of(words, "-f", "--file"):
        if has(words, "cru", "--create", "--append") or set("cru") & set(flags):
            yield from path_risk(path, "write")


def _zip(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    for line in values_of(words, "-TT", "--unzip-command"):
        yield "HIGH", "zip runs a program"
        yield Runs(line)
    if has(words, "m", "--move"):
        yield "HIGH", "files are deleted"
    yield "MEDIUM", "an archive is written"


def _unpacker(command: Command) -> Iterator[Found]:
    words = command.argv[1:]
    if has(words, "ltvZ", "--list"):
        return
    yield "MEDIUM", "files are unpacked over others"
    for path in operands(words):
        yield from path_risk(path, "write")
    for folder in values_of(words, "-d", "-o"):
        yield from _unpacked(folder)


def _disk(command: Command) -> Iterator[Found]:
    looks = has(command.argv[1:], "lL", "--list", "--help", "--version") or "list" in command.argv[1:2]
    yield ("MEDIUM" if looks else "CRITICAL"), f"{command.program} changes whole disks"


def _pool(command: Command) -> Iterator[Found]:
    verb = " ".join(operands(command.argv[1:])[:2])
    if verb.startswith(("list", "get", "status", "iostat", "history", "subvolume list", "filesystem show")):
        return
    destroys = any(word in {"destroy", "delete", "rollback", "labelclear", "format"} for word in verb.split())
    yield "CRITICAL" if destroys else "HIGH", f"{command.program} {verb} changes whole disks"


FILES: Final[Mapping[str, Judge]] = {
    **dict.fromkeys(("rm", "rmdir", "unlink", "srm"), _rm),
    **dict.fromkeys(("shred", "wipe"), _shred),
    **dict.fromkeys(("chmod", "chown", "chgrp", "chattr", "setfacl"), _rights),
    **dict.fromkeys(("tee", "touch", "mkdir", "mkfifo", "mknod", "sponge", "split", "csplit"), _writer),
    **dict.fromkeys(("cp", "ln", "install", "link"), _copier),
    **dict.fromkeys(("unzip", "7z", "7za", "cpio", "unrar", "bsdtar"), _unpacker),
    **dict.fromkeys(
        (
            *("fdisk", "sfdisk", "cfdisk", "gdisk", "sgdisk", "parted", "wipefs", "mkswap", "cryptsetup", "lvremove"),
            *("vgremove", "pvremove", "blkdiscard", "mdadm", "badblocks", "hdparm", "nvme", "dmsetup", "debugfs"),
        ),
        _disk,
    ),
    **dict.fromkeys(("zpool", "zfs", "btrfs"), _pool),
    "patch": _patch,
    "truncate": _truncate,
    "fallocate": _truncate,
    "dd": _dd,
    "mv": _mover,
    "rename": _mover,
    "rsync": _rsync,
    "find": _find,
    "fd": _fd,
    "fdfind": _fd,
    "tar": _tar,
    "gtar": _tar,
    "zip": _zip,
}
