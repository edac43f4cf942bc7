"""How risky a command is, by the program it runs and by its words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from halter.guard.commands import INTERPRETERS, RAISING, SHELLS, Command
from halter.guard.places import Finding, is_root, normal, path_risk, url_risk
from halter.guard.sql import sql_risk

Judge = Callable[[Sequence[str]], Iterator[Finding]]

_FETCHERS: Final = frozenset({"curl", "wget", "fetch", "http", "aria2c"})
_READERS: Final = frozenset(
    {
        *(
            "ls",
            "cat",
            "grep",
            "egrep",
            "fgrep",
            "rg",
            "ag",
            "head",
            "tail",
            "wc",
            "echo",
            "printf",
            "pwd",
            "whoami",
            "id",
        ),
        *("date", "diff", "cmp", "sort", "uniq", "cut", "tr", "stat", "file", "du", "df", "ps", "env", "which", "type"),
        *("test", "[", "true", "false", "jq", "basename", "dirname", "realpath", "readlink", "tree", "less", "more"),
        *("md5sum", "sha256sum", "sleep", "uname", "hostname", "cd", "seq", "column", "nl", "od", "xxd", "strings"),
        *("uptime", "free", "printenv", "yes", "expr", "comm", "join", "paste", "fold"),
    }
)
_ENDING: Final = frozenset({"shutdown", "reboot", "poweroff", "halt", "init", "telinit"})
_DISKS: Final = frozenset(
    {"fdisk", "parted", "wipefs", "sgdisk", "mkswap", "cryptsetup", "lvremove", "vgremove", "zpool"}
)
_ADMIN: Final = frozenset(
    {
        "useradd",
        "userdel",
        "usermod",
        "passwd",
        "visudo",
        "iptables",
        "nft",
        "ufw",
        "mount",
        "umount",
        "insmod",
        "nc",
        "ncat",
        "socat",
    }
)
_CODE: Final = frozenset({"-c", "-e", "-r", "-E", "--eval"})


def command_risk(command: Command) -> Iterator[Finding]:
    """Judge one command: its program, its wrappers, where its input comes from and its output goes."""
    program, words = command.program, command.argv[1:]
    raised = RAISING.intersection(command.wrappers)
    if raised or program in RAISING:
        yield "HIGH", f"{program} runs with all rights"
    if command.piped_from in _FETCHERS and program in INTERPRETERS:
        yield "CRITICAL", f"{program} runs what {command.piped_from} fetched"
    elif command.piped_from and program in SHELLS:
        yield "HIGH", f"{program} runs what {command.piped_from} writes"
    for path in command.writes:
        yield from path_risk(path, "write")
    if program:
        yield from _program_risk(program, words)


def _program_risk(program: str, words: Sequence[str]) -> Iterator[Finding]:
    if program in _PROGRAMS:
        yield from _PROGRAMS[program](words)
    elif program in _READERS:
        for path in _operands(words):
            yield from path_risk(path, "read") if _is_path(path) else ()
    elif program in _ENDING:
        yield "CRITICAL", f"{program} stops the machine"
    elif program.startswith("mkfs") or program in _DISKS:
        yield "CRITICAL", f"{program} changes whole disks"
    elif program in _ADMIN:
        yield "HIGH", f"{program} changes the machine"
    elif program in INTERPRETERS:
        inline = any(word in _CODE for word in words)
        yield "HIGH" if inline else "MEDIUM", f"{program} runs code that was not looked at"
    else:
        yield "HIGH" if "$" in program else "MEDIUM", f"{program} is not known"


def _operands(words: Sequence[str]) -> list[str]:
    after = words.index("--") if "--" in words else len(words)
    return [word for word in words[:after] if not word.startswith("-")] + list(words[after + 1 :])


def _is_path(word: str) -> bool:
    """Tell a word that names a file from a pattern or a sentence."""
    return " " not in word and ("/" in word or word.startswith((".", "~", "$HOME", "${HOME}")))


def _has(words: Sequence[str], letters: str, *names: str) -> bool:
    """Tell whether a flag is there, also among joined ones as in `-rf`."""
    for word in words:
        if word == "--":
            return False
        if word.split("=")[0] in names or (word[:1] == "-" and word[:2] != "--" and set(letters) & set(word[1:])):
            return True
    return False


def _rm(words: Sequence[str]) -> Iterator[Finding]:
    recursive = _has(words, "rR", "--recursive")
    for path in _operands(words):
        if is_root(path):
            yield "CRITICAL" if recursive else "HIGH", f"rm of {path}"
        elif recursive and (normal(path).startswith(("/", "~", "..", "*", "$")) or normal(path) == "."):
            yield "HIGH", f"rm of everything in {path}"
        else:
            yield "MEDIUM", f"rm of {path}"
        yield from path_risk(path, "write")


def _rights(words: Sequence[str]) -> Iterator[Finding]:
    recursive = _has(words, "R", "--recursive")
    mode, *paths = _operands(words) or [""]
    if recursive:
        yield "CRITICAL" if any(map(is_root, paths)) else "HIGH", "rights of whole folders change"
    elif mode.lstrip("0") in {"777", "666"} or "s" in mode:
        yield "HIGH", f"the mode {mode} gives rights to everybody"
    else:
        yield "MEDIUM", "rights of files change"
    for path in paths:
        yield from path_risk(path, "write")


def _dd(words: Sequence[str]) -> Iterator[Finding]:
    target = next((word[len("of=") :] for word in words if word.startswith("of=")), "")
    yield (
        "CRITICAL" if target.startswith("/dev/") and target != "/dev/null" else "HIGH",
        "dd writes over what it is given",
    )


def _git(words: Sequence[str]) -> Iterator[Finding]:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        if rest[0] in {"-c", "--exec-path"}:
            yield "MEDIUM", "git is given settings that can run programs"
        rest = rest[2:] if rest[0] in {"-c", "-C", "--git-dir", "--work-tree"} else rest[1:]
    verb, flags = (rest[0], rest[1:]) if rest else ("", [])
    match verb:
        case "push":
            forced = _has(flags, "f", "--force", "--force-with-lease", "--mirror", "--delete") or "-d" in flags
            forced = forced or any(word.startswith(("+", ":")) for word in flags)
            yield "HIGH" if forced else "MEDIUM", "git push --force or --delete" if forced else "git push"
        case "reset" | "checkout" | "switch" | "restore" if _has(flags, "f", "--hard", "--force"):
            yield "HIGH", f"git {verb} throws changes away"
        case "clean" if _has(flags, "f", "--force"):
            yield "HIGH", "git clean deletes files that git does not know"
        case "branch" | "tag" if _has(flags, "Dd", "--delete"):
            yield "HIGH" if _has(flags, "D", "--force") else "MEDIUM", f"git {verb} deletes"
        case "filter-branch" | "filter-repo" | "update-ref" | "gc" | "reflog":
            yield "HIGH", f"git {verb} rewrites history"
        case _:
            return


def _fetch(words: Sequence[str]) -> Iterator[Finding]:
    sends = _has(
        words, "dFT", "--data", "--data-raw", "--data-binary", "--form", "--upload-file", "--post-file", "--post-data"
    )
    yield "HIGH" if sends else "MEDIUM", "data is sent to a host" if sends else "something is fetched"
    for word in _operands(words):
        if "://" in word:
            yield from url_risk(word)


def _writer(words: Sequence[str]) -> Iterator[Finding]:
    for path in _operands(words):
        yield from path_risk(path, "write")


def _copier(words: Sequence[str]) -> Iterator[Finding]:
    *sources, target = _operands(words) or [""]
    for path in sources:
        yield from path_risk(path, "read")
    yield from path_risk(target, "write")


def _mover(words: Sequence[str]) -> Iterator[Finding]:
    yield from _writer(words)
    if any(is_root(path) for path in _operands(words)):
        yield "CRITICAL", "a home or a system is moved"


def _find(words: Sequence[str]) -> Iterator[Finding]:
    if "-delete" in words:
        roots = [word for word in words if not word.startswith("-")][:1]
        yield "CRITICAL" if any(map(is_root, roots)) else "HIGH", "find deletes what it finds"


def _sed(words: Sequence[str]) -> Iterator[Finding]:
    if _has(words, "i", "--in-place"):
        yield from _writer(_operands(words)[1:])


def _kill(words: Sequence[str]) -> Iterator[Finding]:
    yield "CRITICAL" if list(words[-1:]) in (["-1"], ["1"]) else "MEDIUM", "processes are ended"


def _database(words: Sequence[str]) -> Iterator[Finding]:
    for word in words:
        if " " in word:
            yield from sql_risk(word)


def _crontab(words: Sequence[str]) -> Iterator[Finding]:
    yield "HIGH" if "-r" in words else "MEDIUM", "schedules change"


def _verbs(high: str = "", critical: str = "") -> Judge:
    """Judge a program by those of its words that are known to be dangerous."""

    def judge(words: Sequence[str]) -> Iterator[Finding]:
        for word in critical.split():
            if word in words:
                yield "CRITICAL", f"{word} cannot be taken back"
        for word in high.split():
            if word in words:
                yield "HIGH", f"{word} changes or deletes a lot"
        yield "MEDIUM", "something outside changes"

    return judge


_PROGRAMS: Final[Mapping[str, Judge]] = {
    **dict.fromkeys(("rm", "rmdir", "unlink", "shred"), _rm),
    **dict.fromkeys(("chmod", "chown", "chgrp"), _rights),
    **dict.fromkeys(("tee", "touch", "mkdir", "truncate"), _writer),
    **dict.fromkeys(("cp", "ln", "install"), _copier),
    **dict.fromkeys(("curl", "wget"), _fetch),
    **dict.fromkeys(("psql", "mysql", "sqlite3"), _database),
    "mv": _mover,
    "dd": _dd,
    "git": _git,
    "find": _find,
    "sed": _sed,
    "kill": _kill,
    "crontab": _crontab,
    "docker": _verbs("prune", "--privileged"),
    "kubectl": _verbs("delete drain"),
    "terraform": _verbs("apply", "destroy"),
    "aws": _verbs("rm rb"),
    "npm": _verbs("publish"),
    "systemctl": _verbs("stop disable mask", "poweroff reboot halt"),
}
