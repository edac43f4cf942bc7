"""Helpers to read the words of a command, and the judges of file programs, network programs and git."""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from halter.core.text import expand_names, make_word_set
from halter.core.vocabulary import RiskLevel
from halter.risk.commands import EXEC_OPTIONS, UNKNOWN_WORDS, Command, list_find_roots
from halter.risk.places import RiskFinding, host_risk, is_root, normalize_path, path_risk, url_risk
from halter.risk.program_names import program_of


class NestedCommand(msgspec.Struct, frozen=True):
    """Another command that a command runs: a line for a shell, or words."""

    line_or_words: str | tuple[str, ...]


class MentionedWords(msgspec.Struct, frozen=True):
    """Words that may contain a command: each that names a dangerous program counts as if it were run."""

    words: tuple[str, ...]


JudgeFinding = RiskFinding | NestedCommand | MentionedWords

_DELETING: Final = make_word_set(
    "delete del destroy drop purge wipe erase remove rm nuke prune undefine uninstall unregister unregistervm "
    "terminate truncate flush flushall flushdb fresh reset decommission forget"
)
_REACHING: Final = make_word_set(
    "publish unpublish deploy redeploy undeploy grant revoke createsuperuser changepassword"
)
_DELETING_OPTIONS: Final = re.compile(r"--?(?:delete|destroy|purge|remove|wipe|erase|drop)(?:-[\w-]+)?(?:=.*)?")
_VERB_SEPARATORS: Final = re.compile(r"[:_-]")
_NAME_OPTIONS: Final = frozenset({"-k", "-m", "-t", "--name"})
"""Options whose value is a name, not a verb."""
_NAMING_VERBS: Final = frozenset({"install", "add", "get", "search", "show", "info", "help", "describe", "explain"})
"""Verbs whose object is only named, as in `help delete`."""
_MAX_VERBS: Final = 5
_MAX_VERB_LENGTH: Final = 40
Judge = Callable[[Command], Iterator[JudgeFinding]]


def list_operands(words: Sequence[str]) -> list[str]:
    separator_at = words.index("--") if "--" in words else len(words)
    return [word for word in words[:separator_at] if not word.startswith("-")] + list(words[separator_at + 1 :])


def has_flag(words: Sequence[str], letters: str, *names: str) -> bool:
    """Return true if a flag is present, also joined as in `-rf` or abbreviated as in `--recurs`."""
    for word in words:
        if word == "--":
            return False
        name = word.split("=")[0]
        if name.startswith("--"):
            if any(flag_name.startswith(name) for flag_name in names):
                return True
        elif word[:1] == "-" and (set(letters) & set(word[1:]) or word in names):
            return True
    return False


def list_option_values(words: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the values of options: the next word, the text after an equals sign, or after a single letter."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        following = words[index + 1] if index + 1 < len(words) else ""
        for option in names:
            if option.startswith("--"):
                if len(name) > len("--") and option.startswith(name):
                    yield value if equals else following
                    break
            elif word == option:
                yield following
                break
            elif len(option) == len("-x") and word.startswith(option) and not word.startswith("--"):
                yield word[len(option) :].removeprefix("=")
                break


def find_deleting_word(words: Sequence[str]) -> str:
    """Find a verb that deletes: `destroy`, `db:drop`, `--purge`."""
    return _find_verb(words, _DELETING) or next((word for word in words if _DELETING_OPTIONS.fullmatch(word)), "")


def find_reaching_word(words: Sequence[str]) -> str:
    """Find a verb that publishes or changes rights: `publish`, `deploy:prod`, `grant`."""
    return _find_verb(words, _REACHING)


def _find_verb(words: Sequence[str], verbs: frozenset[str]) -> str:
    candidates = [
        word
        for index, word in enumerate(words)
        if not word.startswith("-") and not _NAME_OPTIONS & set(words[index - 1 : index])
    ]
    for previous, word in zip(("", *candidates), candidates[:_MAX_VERBS], strict=False):
        if len(word) > _MAX_VERB_LENGTH or set(word) & set("/= ") or previous in _NAMING_VERBS:
            continue
        # The part before a dot is a file name, unless a verb follows the dot.
        if verbs & set(_VERB_SEPARATORS.split(word.lower().rpartition(".")[2])):
            return word
    return ""


def name_script(path: str) -> str:
    """Return the name of a script without its folder and ending: `deploy` of `./bin/deploy.sh`."""
    return posixpath.basename(path).partition(".")[0]


def is_path(word: str) -> bool:
    return " " not in word and ("/" in word or word.startswith((".", "~", "$HOME", "${HOME}")))


def _prepend_finding(level: RiskLevel, reason: str, judge: Judge) -> Judge:
    return lambda command: chain([(level, reason)], judge(command))


def _resolve_paths(command: Command, paths: Sequence[str]) -> list[str]:
    """Resolve paths against the line's working directory."""
    if not command.folder:
        return list(paths)
    return [path if path.startswith(("/", "~", "$")) else posixpath.join(command.folder, path) for path in paths]


def _rm(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    recursive = has_flag(words, "rR", "--recursive")
    targets = _resolve_paths(command, list_operands(words))
    if UNKNOWN_WORDS in targets and any(map(is_root, targets)):
        yield "CRITICAL", "rm deletes everything found in a home or system folder"
    for operand in list_operands(words):
        [path] = _resolve_paths(command, [operand])
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
    paths = _resolve_paths(command, paths)
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
    for path in _resolve_paths(command, list_operands(command.argv[1:])):
        yield from path_risk(path, "write")


def _copier(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    *sources, target = _resolve_paths(command, list_operands(words)) or [""]
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
    *sources, target = _resolve_paths(command, list_operands(command.argv[1:])) or [""]
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
    roots = _resolve_paths(command, list_find_roots(command.argv))
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
        "shred wipe": _prepend_finding("HIGH", "overwritten data cannot be restored", _rm),
        "chmod chown chgrp chattr setfacl": _rights,
        "tee touch mkdir mkfifo mknod sponge split csplit": _writer,
        "cp ln install link": _copier,
        "unzip 7z 7za cpio unrar bsdtar": _unpacker,
        (
            "fdisk sfdisk cfdisk gdisk sgdisk parted wipefs mkswap cryptsetup lvremove vgremove pvremove blkdiscard "
            "mdadm badblocks hdparm nvme dmsetup debugfs"
        ): _disk,
        "zpool zfs btrfs": _pool,
        "patch": _prepend_finding("MEDIUM", "applies a patch to files", _writer),
        "truncate fallocate": _prepend_finding("MEDIUM", "truncates files", _writer),
        "dd": _dd,
        "mv rename": _mover,
        "rsync": _rsync,
        "find": _find,
        "fd fdfind": _fd,
        "tar gtar": _tar,
        "zip": _zip,
    }
)


_DELETING_METHODS: Final = frozenset({"DELETE", "PURGE"})
_CHANGING: Final = frozenset({"PUT", "PATCH", "POST"})
_SENDING_OPTIONS: Final = (
    *("--data", "--data-raw", "--data-binary", "--data-urlencode", "--json", "--form", "--form-string"),
    *("--upload-file", "--post-file", "--post-data", "--body-file", "--body-data"),
)


def method_risk(method: str) -> Iterator[JudgeFinding]:
    if method.upper() in _DELETING_METHODS:
        yield "HIGH", f"{method.upper()} deletes external data"
    elif method.upper() in _CHANGING:
        yield "MEDIUM", f"{method.upper()} changes an external system"


def _fetch(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    sends_data = has_flag(words, "dFT", *_SENDING_OPTIONS)
    yield "HIGH" if sends_data else "MEDIUM", "sends data to a host" if sends_data else "fetches data"
    for method in list_option_values(words, "-X", "--request", "--method"):
        yield from method_risk(method)
    for path in list_option_values(
        words, "-o", "--output", "-O", "--output-document", "-P", "--directory-prefix", "-D"
    ):
        yield from path_risk(path, "write")
    for line in list_option_values(words, "--use-askpass"):
        yield NestedCommand(line)
    if has_flag(words, "K", "--config"):
        yield "HIGH", "reads its options from a file"
    for word in list_operands(words):
        yield from _address_risk(word)


def _address_risk(word: str) -> Iterator[JudgeFinding]:
    """Judge a possible address: a URL, or a host without a scheme."""
    if "://" in word:
        yield from url_risk(word)
        return
    host = word.partition("/")[0].partition("?")[0].rsplit("@", maxsplit=1)[-1]
    host = host.partition(":")[0] if host.count(":") == 1 else host.strip("[]")
    if host and (host[0].isdigit() or host == "localhost" or host.startswith("metadata") or ":" in host):
        yield from (finding for finding in host_risk(host.lower()) if finding[0] != "MEDIUM")


def _httpie(command: Command) -> Iterator[JudgeFinding]:
    words = list_operands(command.argv[1:])
    yield "MEDIUM", "fetches data"
    if words:
        yield from method_risk(words[0])
    sends_data = any("=" in word and "==" not in word for word in words[1:])
    if sends_data:
        yield "HIGH", "sends data to a host"
    for word in words:
        yield from _address_risk(word)


def _remote_copy(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for line in list_option_values(words, "-S"):
        yield NestedCommand(line)
    for option in list_option_values(words, "-o"):
        if "command" in option.lower():
            yield NestedCommand(option.replace("=", " ", 1).partition(" ")[2])
    *sources, target = list_operands(words) or [""]
    yield "HIGH" if ":" in target else "MEDIUM", "sends files to another machine" if ":" in target else "fetches files"
    yield from path_risk(target, "write")
    for path in sources:
        yield from path_risk(path, "read")


def _listener(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    yield "HIGH", f"{command.program} opens a network connection"
    for line in list_option_values(words, "-e", "-c", "--exec", "--sh-exec"):
        yield "CRITICAL", "connects a program to the other end of a connection"
        yield NestedCommand(line)
    for word in words:
        kind, _, line = word.partition(":")
        if kind.upper() in {"EXEC", "SYSTEM", "SHELL"}:
            yield "CRITICAL", "connects a program to the other end of a connection"
            yield NestedCommand(line.partition(",")[0])


def _ssh(command: Command) -> Iterator[JudgeFinding]:
    """Judge a remote login; what runs there is judged separately."""
    yield "MEDIUM", "runs commands on another machine"
    if command.is_fed:
        yield "HIGH", "sends data to another machine"
    if has_flag(command.argv[1:], "RLD"):
        yield "HIGH", "opens a tunnel"


def _mail(command: Command) -> Iterator[JudgeFinding]:
    yield "HIGH", "sends a message"
    for path in (*list_option_values(command.argv[1:], "-a", "--attach"), *command.reads):
        yield from path_risk(path, "read")


NETWORK_JUDGES: Final[Mapping[str, Judge]] = expand_names(
    {
        "curl wget aria2c axel fetch": _fetch,
        "http https xh xhs": _httpie,
        "scp sftp": _remote_copy,
        "nc ncat netcat socat telnet": _listener,
        "mail mailx mutt sendmail msmtp swaks": _mail,
        "ssh slogin autossh mosh": _ssh,
    }
)


_VALUED_OPTIONS: Final = frozenset(
    {"-c", "-C", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"}
)
_PROGRAM_SETTINGS: Final = re.compile(
    r"alias\..*|pager\..*|core\.(?:pager|editor|sshcommand|askpass|fsmonitor|gitproxy|alternaterefscommand)"
    r"|(?:sequence|gpg|gpg\..*)\.(?:editor|program|defaultkeycommand)|diff\.external|diff\..*\.(?:command|textconv)"
    r"|merge\..*\.driver|filter\..*|credential\.helper|credential\..*\.helper|.*tool\..*\.(?:cmd|path)"
    r"|interactive\.difffilter|trailer\..*\.(?:command|cmd)|browser\..*\.cmd|man\..*\.cmd|web\.browser"
    r"|uploadpack\.packobjectshook|remote\..*\.(?:uploadpack|receivepack|proxy|vcs)|submodule\..*\.update"
    r"|sendemail\..*cmd|instaweb\.httpd|receive\.procreceiverefs|hook\..*\.command"
)
_LOCATION_SETTINGS: Final = re.compile(
    r"core\.(?:hookspath|worktree)|include\.path|includeif\..*\.path|init\.templatedir|protocol\.ext\.allow|url\..*"
)
_READING_VERBS: Final = frozenset(
    {
        *(
            "status",
            "log",
            "diff",
            "show",
            "blame",
            "grep",
            "ls-files",
            "ls-tree",
            "ls-remote",
            "rev-parse",
            "rev-list",
        ),
        *("describe", "shortlog", "cat-file", "name-rev", "merge-base", "for-each-ref", "show-ref", "count-objects"),
        *("whatchanged", "cherry", "range-diff", "var", "version", "help", "check-ignore", "fsck", "verify-commit", ""),
    }
)


_LISTING_WORDS: Final = frozenset({"-v", "--verbose", "show", "get-url", "status", "summary", "log", "view"})


def setting_risk(key: str, value: str) -> Iterator[JudgeFinding]:
    """Judge a git setting: many name a program that git runs."""
    name = key.lower()
    if _PROGRAM_SETTINGS.fullmatch(name):
        yield "HIGH", f"{key} makes git run a program"
        yield NestedCommand(value.removeprefix("!"))
    elif _LOCATION_SETTINGS.fullmatch(name):
        yield "HIGH", f"{key} changes where git finds programs"


def _git(command: Command) -> Iterator[JudgeFinding]:
    remaining = list(command.argv[1:])
    while remaining and remaining[0].startswith("-"):
        option, *remaining = remaining
        value = ""
        if option in _VALUED_OPTIONS and remaining and "=" not in option:
            value, *remaining = remaining
        if option == "-c":
            yield from setting_risk(*_split_setting(value))
        elif option.startswith(("--exec-path=", "--config-env")) or (option == "--exec-path" and value):
            yield "HIGH", "changes where git finds programs"
    verb, words = (remaining[0], remaining[1:]) if remaining else ("", [])
    yield from _nested_commands(verb, words)
    yield from _change_risk(verb, words)


def _split_setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _nested_commands(verb: str, words: Sequence[str]) -> Iterator[JudgeFinding]:
    match verb, words:
        case "bisect", ["run", *inner]:
            yield NestedCommand(tuple(inner))
        case "submodule", [*_, "foreach", line] | [*_, "foreach", "--recursive", line]:
            yield NestedCommand(line)
        case "submodule", [*_] if "foreach" in words:
            yield NestedCommand(tuple(word for word in words[words.index("foreach") + 1 :] if not word.startswith("-")))
        case "config", _:
            keys = [word for word in words if not word.startswith("-") and word not in {"set", "add", "get", "unset"}]
            if len(keys) > 1:
                yield from setting_risk(keys[0], keys[1])
        case _:
            pass
    options = {
        "rebase": ("-x", "--exec"),
        "filter-branch": ("--tree-filter", "--index-filter", "--msg-filter", "--env-filter", "--commit-filter"),
        "difftool": ("-x", "--extcmd"),
        "grep": ("-O", "--open-files-in-pager"),
        "clone": ("-u", "--upload-pack"),
        "archive": ("--exec",),
        "send-email": ("--to-cmd", "--cc-cmd", "--smtp-server"),
    }
    for line in list_option_values(words, *options.get(verb, ("--upload-pack", "--receive-pack"))):
        yield "HIGH", f"git {verb} runs a program"
        yield NestedCommand(line)
    if verb in {"clone", "init"}:
        for setting in list_option_values(words, "-c", "--config") if verb == "clone" else ():
            yield from setting_risk(*_split_setting(setting))
        for _ in list_option_values(words, "--template"):
            yield "HIGH", "copies hooks from a template"
    for word in list_operands(words):
        if word.startswith("ext::"):
            yield "HIGH", "git runs a program as a remote"
            yield NestedCommand(word.removeprefix("ext::"))


def _change_risk(verb: str, words: Sequence[str]) -> Iterator[JudgeFinding]:
    if verb in {"checkout", "restore", "mv", "rm"}:
        for path in list_operands(words):
            yield from path_risk(path, "write")
    match verb:
        case "push":
            is_forced = (
                has_flag(words, "f", "--force", "--force-with-lease", "--mirror", "--delete", "--prune")
                or "-d" in words
            )
            is_forced = is_forced or any(word.startswith(("+", ":")) for word in words)
            yield "HIGH" if is_forced else "MEDIUM", "git push --force or --delete" if is_forced else "git push"
            if any("://" in word or re.match(r"[\w.-]+@[\w.-]+:", word) for word in list_operands(words)[:1]):
                yield "HIGH", "git push publishes to an address that is no remote of the repository"
        case "remote" if words[:1] and words[0] in {"set-url", "remove", "rm"}:
            yield "HIGH", f"git remote {words[0]} changes where commits are published"
        case "send-email" | "daemon" | "instaweb" | "credential" | "credential-store" | "http-backend":
            yield "HIGH", f"git {verb} sends mail, serves files or reads passwords"
        case "reset" | "checkout" | "switch" | "restore" if has_flag(
            words, "f", "--hard", "--force", "--discard-changes"
        ):
            yield "HIGH", f"git {verb} discards changes"
        case "checkout" | "restore" if {"--", "."} & set(words) and not has_flag(words, "bS", "--staged"):
            yield "HIGH", f"git {verb} discards changes"
        case "clean" if has_flag(words, "f", "--force"):
            yield "HIGH", "git clean deletes untracked files"
        case "branch" | "tag" if has_flag(words, "Dd", "--delete"):
            yield "HIGH" if has_flag(words, "D", "--force") else "MEDIUM", f"git {verb} deletes a {verb}"
        case "filter-branch" | "filter-repo" | "update-ref" | "replace":
            yield "HIGH", f"git {verb} rewrites history"
        case "reflog" if words[:1] and words[0] in {"expire", "delete"}:
            yield "HIGH", "git reflog deletes recoverable commits"
        case "gc" | "prune":
            yield (
                "HIGH" if verb == "prune" or has_flag(words, "", "--prune") else "MEDIUM",
                f"git {verb} deletes objects",
            )
        case "stash" if words[:1] and words[0] in {"drop", "clear"}:
            yield "HIGH", f"git stash {words[0]} discards changes"
        case "worktree" if "remove" in words and has_flag(words, "f", "--force"):
            yield "HIGH", "git worktree remove discards changes"
        case "rm":
            yield "HIGH" if has_flag(words, "rf", "--force") else "MEDIUM", "git rm deletes files"
        case "remote" | "submodule" | "bisect" if set(words[:1]) <= _LISTING_WORDS:
            return
        case "submodule" | "apply" if has_flag(words, "f", "--force", "--all", "--unsafe-paths"):
            yield "HIGH", f"git {verb} discards changes, or writes anywhere"
        case "remote" | "submodule" | "apply" | "am" | "bisect" | "lfs" | "svn" | "p4":
            yield "MEDIUM", f"git {verb} changes an external system"
        case _ if verb in _READING_VERBS:
            for path in list_option_values(words, "--output"):
                yield from path_risk(path, "write")
        case _:
            return


def _hg(command: Command) -> Iterator[JudgeFinding]:
    for setting in list_option_values(command.argv[1:], "--config"):
        yield "HIGH", "settings of hg can run programs"
        yield NestedCommand(_split_setting(setting)[1].removeprefix("!"))
    is_risky = {"strip", "purge", "rollback"} & set(command.argv[1:])
    yield "HIGH" if is_risky else "MEDIUM", "hg rewrites history" if is_risky else "runs hg"


REPOSITORY_JUDGES: Final[Mapping[str, Judge]] = {"git": _git, "hg": _hg}
