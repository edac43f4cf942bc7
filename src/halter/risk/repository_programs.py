"""The risk of programs that change repositories."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from halter.risk.commands import Command
from halter.risk.places import path_risk
from halter.risk.programs import Judge, JudgeFinding, NestedCommand, has_flag, list_operands, list_option_values

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
