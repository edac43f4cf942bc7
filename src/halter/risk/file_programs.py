"""The risk of programs that change files."""

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Final

from halter.core.text import expand_names
from halter.risk.commands import EXEC_OPTIONS, UNKNOWN_WORDS, Command, list_find_roots
from halter.risk.places import is_root, normalize_path, path_risk
from halter.risk.program_names import program_of
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    NestedCommand,
    has_flag,
    is_path,
    list_operands,
    list_option_values,
    prepend_finding,
    resolve_paths,
)


def _rm(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    recursive = has_flag(words, "rR", "--recursive")
    targets = resolve_paths(command, list_operands(words))
    if UNKNOWN_WORDS in targets and any(map(is_root, targets)):
        yield "CRITICAL", "rm deletes everything found in a home or system folder"
    for operand in list_operands(words):
        [path] = resolve_paths(command, [operand])
        normalized_path = normalize_path(path)
        if is_root(path):
            yield "CRITICAL" if recursive else "HIGH", f"rm deletes {path}"
        elif operand == UNKNOWN_WORDS:
            yield "HIGH", "rm deletes unknown files"
        elif recursive and (
            normalized_path.startswith(("/", "~", "..", "$", "?", "["))
            or (normalized_path == ".git" or not normalized_path.partition("/")[0].strip("*?."))
        ):
            yield "HIGH", f"rm deletes everything in {path}"
        else:
            yield "MEDIUM", f"rm deletes {path}"
        yield from path_risk(path, "write")


def _rights(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    recursive = has_flag(words, "R", "--recursive")
    mode, *paths = list_operands(words) or [""]
    if has_flag(words, "", "--reference"):
        paths = [mode, *paths]
    paths = resolve_paths(command, paths)
    if recursive:
        yield "CRITICAL" if any(map(is_root, paths)) else "HIGH", "changes the permissions of whole folders"
    elif mode.lstrip("0") in {"777", "666"} or "s" in mode or re.fullmatch("0*[2-7][0-7]{3}", mode):
        yield "HIGH", f"the mode {mode} gives everyone access"
    else:
        yield "MEDIUM", "changes file permissions"
    for path in paths:
        yield from path_risk(path, "write")


def _dd(command: Command) -> Iterator[JudgeFinding]:
    for word in command.argv[1:]:
        if word.startswith("of="):
            yield "HIGH", "dd overwrites its target"
            yield from path_risk(word.removeprefix("of="), "write")
    yield "MEDIUM", "dd copies whole files and disks"


def _writer(command: Command) -> Iterator[JudgeFinding]:
    for path in resolve_paths(command, list_operands(command.argv[1:])):
        yield from path_risk(path, "write")


def _copier(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    *sources, target = resolve_paths(command, list_operands(words)) or [""]
    for folder in list_option_values(words, "-t", "--target-directory"):
        sources, target = [*sources, target], folder
    for path in sources:
        yield from path_risk(path, "read")
        if is_path(path) or target.endswith("/"):
            yield from path_risk(posixpath.join(target, posixpath.basename(path)), "write")
    yield from path_risk(target, "write")
    if any(word == "/dev/null" for word in sources):
        yield "MEDIUM", f"{target} is emptied"


def _mover(command: Command) -> Iterator[JudgeFinding]:
    yield from _copier(command)
    *sources, target = resolve_paths(command, list_operands(command.argv[1:])) or [""]
    if any(is_root(path) for path in sources):
        yield "CRITICAL", "moves a home or system folder"
    if normalize_path(target).startswith("/dev/"):
        yield "HIGH", f"files moved to {target} are lost"
    for path in sources:
        yield from path_risk(path, "write")


def _rsync(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for line in list_option_values(words, "-e", "--rsh", "--rsync-path"):
        yield NestedCommand(line)
    *_, target = list_operands(words) or [""]
    if any(word.startswith(("--del", "--remove-source-files")) for word in words):
        yield "CRITICAL" if is_root(target) else "HIGH", "rsync deletes files that the source does not have"
    if ":" in target.partition("/")[0] or target.startswith("rsync://"):
        yield "HIGH", "rsync sends files to another machine"
    yield "MEDIUM", "rsync overwrites files"
    yield from path_risk(target, "write")


_DELETERS: Final = frozenset({"rm", "unlink", "shred", "srm", "wipe", "truncate"})


def _find(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    roots = resolve_paths(command, list_find_roots(command.argv))
    executed_programs = {program_of(words[index + 1]) for index, word in enumerate(words[:-1]) if word in EXEC_OPTIONS}
    if "-delete" in words or executed_programs & _DELETERS:
        yield "CRITICAL" if any(map(is_root, roots)) else "HIGH", "find deletes every match"
    for path in list_option_values(words, "-fprint", "-fprint0", "-fprintf", "-fls"):
        yield from path_risk(path, "write")


def _fd(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for index, word in enumerate(words):
        if word in {"-x", "-X", "--exec", "--exec-batch"} and words[index + 1 :]:
            inner_words = words[index + 1 :]
            yield NestedCommand(
                tuple("." if argument == "{}" else argument for argument in inner_words)
                + (() if "{}" in inner_words else (".",))
            )
            return


def _archive_folder_risk(folder: str) -> Iterator[JudgeFinding]:
    """Judge a folder whose files an archive may overwrite."""
    if is_root(folder):
        yield "HIGH", f"unpacks files into {folder}, overwriting existing ones"
    yield from path_risk(posixpath.join(folder, "file"), "write")


_TAR_PROGRAM_OPTIONS: Final = (
    "--to-command",
    "--use-compress-program",
    "--info-script",
    "--new-volume-script",
    "--rsh-command",
)


def _tar(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for line in (*list_option_values(words, *_TAR_PROGRAM_OPTIONS), *list_option_values(words, "-I", "-F")):
        yield "HIGH", "tar runs a program"
        yield NestedCommand(line)
    for action in list_option_values(words, "--checkpoint-action"):
        if action.startswith("exec="):
            yield "HIGH", "tar runs a program"
            yield NestedCommand(action.removeprefix("exec="))
    flags = words[0] if words and not words[0].startswith("-") else ""
    if "x" in flags or has_flag(words, "x", "--extract", "--get"):
        yield "MEDIUM", "unpacks files over existing ones"
        for path in list_operands(words):
            yield from path_risk(path, "write")
        for folder in list_option_values(words, "-C", "--directory"):
            yield from _archive_folder_risk(folder)
        if has_flag(words, "P", "--absolute-names") or "P" in flags:
            yield "HIGH", "unpacks files to absolute paths"
    if has_flag(words, "", "--remove-files", "--delete"):
        yield "HIGH", "deletes files"
    if has_flag(words, "cru", "--create", "--append") or set("cru") & set(flags):
        for path in list_operands(words):
            yield from path_risk(path, "read")
        for path in list_option_values(words, "-f", "--file"):
            yield from path_risk(path, "write")


def _zip(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for line in list_option_values(words, "-TT", "--unzip-command"):
        yield "HIGH", "zip runs a program"
        yield NestedCommand(line)
    if has_flag(words, "m", "--move"):
        yield "HIGH", "deletes files"
    yield "MEDIUM", "writes an archive"


def _unpacker(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    if has_flag(words, "ltvZ", "--list"):
        return
    yield "MEDIUM", "unpacks files over existing ones"
    for path in list_operands(words):
        yield from path_risk(path, "write")
    for folder in list_option_values(words, "-d", "-o"):
        yield from _archive_folder_risk(folder)


def _disk(command: Command) -> Iterator[JudgeFinding]:
    only_lists = has_flag(command.argv[1:], "lL", "--list", "--help", "--version") or "list" in command.argv[1:2]
    yield ("MEDIUM" if only_lists else "CRITICAL"), f"{command.program} changes whole disks"


def _pool(command: Command) -> Iterator[JudgeFinding]:
    verb = " ".join(list_operands(command.argv[1:])[:2])
    if verb.startswith(("list", "get", "status", "iostat", "history", "subvolume list", "filesystem show")):
        return
    is_destructive = any(word in {"destroy", "delete", "rollback", "labelclear", "format"} for word in verb.split())
    yield "CRITICAL" if is_destructive else "HIGH", f"{command.program} {verb} changes whole disks"


FILE_JUDGES: Final[Mapping[str, Judge]] = expand_names(
    {
        "rm rmdir unlink srm": _rm,
        "shred wipe": prepend_finding("HIGH", "overwritten data cannot be restored", _rm),
        "chmod chown chgrp chattr setfacl": _rights,
        "tee touch mkdir mkfifo mknod sponge split csplit": _writer,
        "cp ln install link": _copier,
        "unzip 7z 7za cpio unrar bsdtar": _unpacker,
        (
            "fdisk sfdisk cfdisk gdisk sgdisk parted wipefs mkswap cryptsetup lvremove vgremove pvremove blkdiscard "
            "mdadm badblocks hdparm nvme dmsetup debugfs"
        ): _disk,
        "zpool zfs btrfs": _pool,
        "patch": prepend_finding("MEDIUM", "applies a patch to files", _writer),
        "truncate fallocate": prepend_finding("MEDIUM", "truncates files", _writer),
        "dd": _dd,
        "mv rename": _mover,
        "rsync": _rsync,
        "find": _find,
        "fd fdfind": _fd,
        "tar gtar": _tar,
        "zip": _zip,
    }
)
