"""git: what throws work away, what rewrites history, and the many ways in which it runs other programs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from halter.guard.commands import Command
from halter.guard.judges.found import Found, Judge, Runs, has, operands, values_of
from halter.guard.places import path_risk

_VALUED: Final = frozenset({"-c", "-C", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"})
_RUNNING: Final = re.compile(
    r"alias\..*|pager\..*|core\.(?:pager|editor|sshcommand|askpass|fsmonitor|gitproxy|alternaterefscommand)"
    r"|(?:sequence|gpg|gpg\..*)\.(?:editor|program|defaultkeycommand)|diff\.external|diff\..*\.(?:command|textconv)"
    r"|merge\..*\.driver|filter\..*|credential\.helper|credential\..*\.helper|.*tool\..*\.(?:cmd|path)"
    r"|interactive\.difffilter|trailer\..*\.(?:command|cmd)|browser\..*\.cmd|man\..*\.cmd|web\.browser"
    r"|uploadpack\.packobjectshook|remote\..*\.(?:uploadpack|receivepack|proxy|vcs)|submodule\..*\.update"
    r"|sendemail\..*cmd|instaweb\.httpd|receive\.procreceiverefs|hook\..*\.command"
)
_LEADING: Final = re.compile(
    r"core\.(?:hookspath|worktree)|include\.path|includeif\..*\.path|init\.templatedir|protocol\.ext\.allow|url\..*"
)
_READING: Final = frozenset(
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


_LOOKING: Final = frozenset({"-v", "--verbose", "show", "get-url", "status", "summary", "log", "view"})


def setting_risk(key: str, value: str) -> Iterator[Found]:
    """Judge a setting of git: many name a program, and git runs it."""
    name = key.lower()
    if _RUNNING.fullmatch(name):
        yield "HIGH", f"git is told to run a program by {key}"
        yield Runs(value.removeprefix("!"))
    elif _LEADING.fullmatch(name):
        yield "HIGH", f"git is told by {key} where to find programs"


def _git(command: Command) -> Iterator[Found]:
    rest = list(command.argv[1:])
    while rest and rest[0].startswith("-"):
        option, *rest = rest
        value = ""
        if option in _VALUED and rest and "=" not in option:
            value, *rest = rest
        if option == "-c":
            yield from setting_risk(*_setting(value))
        elif option.startswith(("--exec-path=", "--config-env")) or (option == "--exec-path" and value):
            yield "HIGH", "git is told where to find programs"
    verb, words = (rest[0], rest[1:]) if rest else ("", [])
    yield from _running(verb, words)
    yield from _changing(verb, words)


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _running(verb: str, words: Sequence[str]) -> Iterator[Found]:
    """Find what a verb of git runs besides git."""
    match verb, words:
        case "bisect", ["run", *inner]:
            yield Runs(tuple(inner))
        case "submodule", [*_, "foreach", line] | [*_, "foreach", "--recursive", line]:
            yield Runs(line)
        case "submodule", [*_] if "foreach" in words:
            yield Runs(tuple(word for word in words[words.index("foreach") + 1 :] if not word.startswith("-")))
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
    for line in values_of(words, *options.get(verb, ("--upload-pack", "--receive-pack"))):
        yield "HIGH", f"git {verb} runs a program"
        yield Runs(line)
    if verb in {"clone", "init"}:
        for setting in values_of(words, "-c", "--config") if verb == "clone" else ():
            yield from setting_risk(*_setting(setting))
        for _ in values_of(words, "--template"):
            yield "HIGH", "hooks are taken from elsewhere"
    for word in operands(words):
        if word.startswith("ext::"):
            yield "HIGH", "git runs a program in place of a host"
            yield Runs(word.removeprefix("ext::"))


def _changing(verb: str, words: Sequence[str]) -> Iterator[Found]:
    if verb in {"checkout", "restore", "mv", "rm"}:
        for path in operands(words):
            yield from path_risk(path, "write")
    match verb:
        case "push":
            forced = (
                has(words, "f", "--force", "--force-with-lease", "--mirror", "--delete", "--prune") or "-d" in words
            )
            forced = forced or any(word.startswith(("+", ":")) for word in words)
            yield "HIGH" if forced else "MEDIUM", "git push --force or --delete" if forced else "git push"
        case "reset" | "checkout" | "switch" | "restore" if has(words, "f", "--hard", "--force", "--discard-changes"):
            yield "HIGH", f"git {verb} throws changes away"
        case "checkout" | "restore" if {"--", "."} & set(words) and not has(words, "bS", "--staged"):
            yield "HIGH", f"git {verb} throws changes away"
        case "clean" if has(words, "f", "--force"):
            yield "HIGH", "git clean deletes files that git does not know"
        case "branch" | "tag" if has(words, "Dd", "--delete"):
            yield "HIGH" if has(words, "D", "--force") else "MEDIUM", f"git {verb} deletes"
        case "filter-branch" | "filter-repo" | "update-ref" | "replace":
            yield "HIGH", f"git {verb} rewrites history"
        case "reflog" if words[:1] and words[0] in {"expire", "delete"}:
            yield "HIGH", "git reflog forgets what could be restored"
        case "gc" | "prune":
            yield "HIGH" if verb == "prune" or has(words, "", "--prune") else "MEDIUM", f"git {verb} deletes objects"
        case "stash" if words[:1] and words[0] in {"drop", "clear"}:
            yield "HIGH", f"git stash {words[0]} throws changes away"
        case "worktree" if "remove" in words and has(words, "f", "--force"):
            yield "HIGH", "git worktree remove throws changes away"
        case "rm":
            yield "HIGH" if has(words, "rf", "--force") else "MEDIUM", "git rm deletes files"
        case "remote" | "submodule" | "bisect" if set(words[:1]) <= _LOOKING:
            return
        case "submodule" | "apply" if has(words, "f", "--force", "--all", "--unsafe-paths"):
            yield "HIGH", f"git {verb} throws changes away, or writes anywhere"
        case "remote" | "submodule" | "apply" | "am" | "bisect" | "lfs" | "daemon" | "svn" | "p4" | "credential":
            yield "MEDIUM", f"git {verb} changes something outside"
        case _ if verb in _READING:
            for path in values_of(words, "--output"):
                yield from path_risk(path, "write")
        case _:
            return


def _hg(command: Command) -> Iterator[Found]:
    for setting in values_of(command.argv[1:], "--config"):
        yield "HIGH", "hg is given settings that can run programs"
        yield Runs(_setting(setting)[1].removeprefix("!"))
    risky = {"strip", "purge", "rollback"} & set(command.argv[1:])
    yield "HIGH" if risky else "MEDIUM", "hg changes history" if risky else "hg"


REPOSITORY: Final[Mapping[str, Judge]] = {"git": _git, "hg": _hg}
