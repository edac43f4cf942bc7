"""Programs that control a machine, its services, containers, clouds, databases and packages.

Most of them are data: `reach.txt` states what each verb of a program reaches, and a reach has a level. A program has a
function of its own only if its arguments decide too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cache
from typing import Final

import msgspec

from halter.core.text import expand_names, make_word_set
from halter.core.vocabulary import RiskLevel
from halter.risk.commands import Command
from halter.risk.interpreters import source_risk
from halter.risk.places import is_root, path_risk, sql_risk
from halter.risk.program_names import read_entries
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    find_deleting_word,
    find_reaching_word,
    has_flag,
    list_operands,
    list_option_values,
)

_REACHES: Final[Mapping[str, tuple[RiskLevel, str]]] = {
    "reads": ("LOW", "reads"),
    "folder": ("MEDIUM", "builds or changes what is in the folder"),
    "script": ("MEDIUM", "runs commands defined in the folder"),
    "changes": ("MEDIUM", "changes an external system"),
    "code": ("HIGH", "fetches code and runs it"),
    "machine": ("HIGH", "changes the machine"),
    "identity": ("HIGH", "changes who may do what"),
    "secrets": ("HIGH", "reads or changes secrets"),
    "network": ("HIGH", "changes what can be reached from the network"),
    "service": ("HIGH", "changes what runs for others"),
    "publication": ("HIGH", "publishes"),
    "message": ("HIGH", "sends a message"),
    "money": ("HIGH", "spends or moves money"),
    "deletion": ("HIGH", "deletes data"),
    "destruction": ("CRITICAL", "cannot be undone"),
    "policy": ("CRITICAL", "is reserved for people"),
}
"""What a command can reach, from nothing to the policy of Halter itself, with its level."""

_REACH_ORDER: Final = tuple(_REACHES)
_OPTION_WEIGHT: Final[Mapping[RiskLevel, int]] = {"LOW": 2, "MEDIUM": 2, "HIGH": 10, "CRITICAL": 10}
"""The weight of an option beside that of a word, 2: one that makes a command dangerous counts more than any verb."""
_LOCAL: Final = frozenset({"reads", "folder", "script"})
_ABOUT_ITSELF: Final = frozenset({"--version", "--help", "-version", "-V", "version", "help"})
_MAX_VERBS: Final = 40
_ANY_VERB: Final = "**"
_END: Final = "$"
_GLOB: Final = frozenset("*[")


class _Pattern(msgspec.Struct, frozen=True):
    """A sequence of words, each with its test, and the options that a command must have.

    The sequence may start anywhere if `is_anywhere`, and must be all of the words if `is_whole`.
    """

    reach: str
    rank: int
    words: tuple[Callable[[str], object], ...]
    options: tuple[str, ...]
    weight: int
    is_anywhere: bool
    is_whole: bool

    def find_end(self, operands: Sequence[str]) -> int:
        """Return the number of operands up to the end of a match, or -1."""
        count = len(self.words)
        if self.is_whole and count != len(operands):
            return -1
        for start in range(len(operands) - count + 1 if self.is_anywhere else count <= len(operands)):
            if all(test(word) for test, word in zip(self.words, operands[start:], strict=False)):
                return start + count
        return -1

    def find_scattered(self, operands: Sequence[str]) -> bool:
        """Return true if the words occur in this order, with any others between them."""
        remaining = iter(operands)
        return all(any(test(word) for word in remaining) for test in self.words)

    def describe(self, operands: Sequence[str]) -> str:
        return " ".join((*operands, *(option.partition("=")[0] for option in self.options)))

    def has_options(self, words: Sequence[str]) -> bool:
        is_trusted = _REACHES[self.reach][0] not in {"LOW", "MEDIUM"}
        return all(_has_option(words, option, is_trusted=is_trusted) for option in self.options)


class _ProgramReach(msgspec.Struct, frozen=True):
    """What a program reaches, by its patterns, and the options that may precede its verb.

    `by_word` are the patterns that begin with a certain word, `others` those that begin with any.
    """

    patterns: tuple[_Pattern, ...]
    by_word: Mapping[str, tuple[_Pattern, ...]]
    others: tuple[_Pattern, ...]
    options: Mapping[str, bool]
    otherwise: str

    def list_candidates(self, operands: Sequence[str]) -> Iterator[_Pattern]:
        """Yield the patterns that may match from the first operand, or from any."""
        for word in dict.fromkeys(operands):
            yield from self.by_word.get(word, ())
        yield from self.others


def _has_option(words: Sequence[str], option: str, *, is_trusted: bool) -> bool:
    """Return true if an option is present. One that makes a command harmless has to be certain: once, and no value."""
    name, equals, value = option.partition("=")
    if is_trusted and equals:
        test = _make_test(value)
        return any(test(each) for each in list_option_values(words, name))
    if is_trusted:
        return has_flag(words, name[1:] if len(name) == len("-x") else "", name)
    mentions = [index for index, word in enumerate(words) if name.lstrip("-") in word and word.startswith("-")]
    if len(mentions) != 1 or words[mentions[0]] != option or "--" in words[: mentions[0]]:
        return False
    previous, following = ("", *words)[mentions[0]], (*words, "")[mentions[0] + 1]
    return (not previous.startswith("-") or "=" in previous) and following not in {"false", "0"}


@cache
def _make_test(text: str) -> Callable[[str], object]:
    """Make a test of one word from its alternatives."""
    alternatives = text.split("/")
    if not set(text) & _GLOB:
        return frozenset(alternatives).__contains__
    return re.compile("|".join(map(translate, alternatives))).match


def _weigh_word(word: str) -> int:
    return 0 if word == "*" else 1 if set(word) & _GLOB else 2


def _parse_pattern(reach: str, text: str) -> _Pattern:
    words = text.split()
    verbs = [word for word in words if not word.startswith("-") and word not in {_ANY_VERB, _END}]
    options = tuple(word for word in words if word.startswith("-"))
    is_local = _REACHES[reach][0] in {"LOW", "MEDIUM"}
    return _Pattern(
        reach=reach,
        rank=_REACH_ORDER.index(reach),
        words=tuple(_make_test(word) for word in verbs),
        options=options,
        weight=sum(map(_weigh_word, verbs))
        + len(options) * _OPTION_WEIGHT[_REACHES[reach][0]]
        + (words[-1:] == [_END]),
        is_anywhere=words[:1] == [_ANY_VERB],
        is_whole=words[-1:] == [_END] or (is_local and not verbs and words[:1] != [_ANY_VERB]),
    )


def _parse_program(entry: str) -> _ProgramReach:
    head, *rows = entry.splitlines()
    options = {word.rstrip(":"): word.endswith(":") for word in head.partition("|")[2].split()}
    texts_by_reach = {reach.strip(): texts for reach, _, texts in (row.partition(":") for row in rows)}
    otherwise = texts_by_reach.pop("otherwise", "changes").strip()
    patterns, others, by_word = list[_Pattern](), list[_Pattern](), dict[str, list[_Pattern]]()
    for reach, texts in texts_by_reach.items():
        for text in filter(None, map(str.strip, texts.split(","))):
            pattern = _parse_pattern(reach, text)
            patterns.append(pattern)
            first = next((word for word in text.split() if word[0] != "-" and word not in {_ANY_VERB, _END}), "*")
            if set(first) & _GLOB:
                others.append(pattern)
            else:
                for word in first.split("/"):
                    by_word.setdefault(word, []).append(pattern)
    return _ProgramReach(
        tuple(patterns), {word: tuple(group) for word, group in by_word.items()}, tuple(others), options, otherwise
    )


_ENTRIES: Final[Mapping[str, str]] = expand_names(
    {entry.split("\n")[0].partition("|")[0]: entry for entry in read_entries("reach")}
)


@cache
def _get_program(name: str) -> _ProgramReach:
    return _parse_program(_ENTRIES[name])


def _find_operands(program: _ProgramReach, words: Sequence[str]) -> tuple[list[str], int]:
    """Find the first operands, and how many of them precede an option that is unknown and may take a value."""
    operands, certain_count, skips = list[str](), -1, False
    for word in words:
        if skips:
            skips = False
        elif word[:1] != "-" or word in {"-", "--"}:
            operands += [word] if word != "--" else []
        else:
            kind = program.options.get(word)
            skips = bool(kind)
            if kind is None and "=" not in word and program.options.get(word[:2]) is None and certain_count < 0:
                certain_count = len(operands)
        if len(operands) == _MAX_VERBS:
            break
    return operands, certain_count if certain_count >= 0 else len(operands)


def _find_reach(program: _ProgramReach, words: Sequence[str]) -> tuple[str, str]:
    """Find what a command reaches, and the words that say so.

    The most words decide, then the further reach. After an unknown option it is unclear which word is the verb: then
    the words may be anywhere, and nothing is known to be harmless.
    """
    operands, certain_count = _find_operands(program, words)
    is_certain = certain_count == len(operands)
    best, best_rank = (program.otherwise, ""), (-1, -1)
    for pattern in program.list_candidates(operands):
        rank = (pattern.weight, pattern.rank)
        end = pattern.find_end(operands) if rank > best_rank else -1
        if 0 <= end <= certain_count and pattern.has_options(words):
            best, best_rank = (pattern.reach, pattern.describe(operands[:end])), rank
    if is_certain or best_rank[0] > 0:
        return best
    return _find_doubtful_reach(program, operands, words)


def _find_doubtful_reach(program: _ProgramReach, operands: Sequence[str], words: Sequence[str]) -> tuple[str, str]:
    """Find the furthest reach whose words occur anywhere."""
    reaches = [
        pattern.reach
        for pattern in program.patterns
        if pattern.words and pattern.find_scattered(operands) and pattern.has_options(words)
    ]
    reach = max((program.otherwise, *reaches), key=_REACH_ORDER.index)
    return ("changes" if reach == "reads" else reach), "" if reach == program.otherwise else " ".join(operands)


def _judge_reach(command: Command) -> Iterator[JudgeFinding]:
    """Judge a program of the table by what its verb reaches."""
    words = (*command.argv[1:], *(f"{name}={value}" for name, value in command.sets))
    if len(words) == 1 and words[0] in _ABOUT_ITSELF:
        return
    reach, text = _find_reach(_get_program(command.program), words)
    level, sentence = _REACHES[reach]
    if level != "LOW":
        yield level, " ".join(filter(None, (command.program, text, sentence)))
    if reach == "script":
        script_words = words[: words.index("--")] if "--" in words else words
        if verb := find_deleting_word(script_words) or find_reaching_word(script_words):
            yield "HIGH", f"{command.program} {verb} may delete data, publish or change rights"
    if reach not in _LOCAL:
        if {"cp", "copy", "copyto", "mv", "move", "sync"} & set(words):
            yield from path_risk(list_operands(words)[-1], "write")
        if not text and (verb := find_deleting_word(words)):
            yield "HIGH", f"{command.program} {verb} may delete data"


def _shutdown(command: Command) -> Iterator[JudgeFinding]:
    if not has_flag(command.argv[1:], "c", "--help", "--version"):
        yield "CRITICAL", f"{command.program} stops the machine"


_SHOW_WORDS: Final = frozenset({"-a", "-l", "a", "addr", "address", "link", "r", "route", "-br"})


def _admin(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    only_shows = command.program in {"mount", "sysctl", "ip", "ifconfig", "route", "swapon", "timedatectl", "nmcli"}
    if not (only_shows and len(words) <= len("ab") and set(words) <= {*_SHOW_WORDS, "show", "status"}):
        yield "HIGH", f"{command.program} changes the machine"


def _kill(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    if "-l" in words[:1] or "-L" in words[:1]:
        return
    targets = [word for word in list_operands(words) if word.isdigit()]
    # The first word may be a signal; as a process, -1 means all.
    hits_everything = (
        "-1" in words[1:] or list(words) == ["-1"] or "1" in targets or has_flag(words, "u", "--user", "--euid")
    )
    if any("halter" in word.lower() for word in words):
        yield "CRITICAL", "kills Halter itself"
    yield "CRITICAL" if hits_everything else "MEDIUM", "kills processes"


def _clock(command: Command) -> Iterator[JudgeFinding]:
    if has_flag(command.argv[1:], "s", "--set") or any(re.fullmatch(r"\d{8,12}", word) for word in command.argv[1:]):
        yield "HIGH", "sets the machine's clock"


def _hostname(command: Command) -> Iterator[JudgeFinding]:
    if list_operands(command.argv[1:])[-1:] and not has_flag(command.argv[1:], "fdiIsA"):
        yield "HIGH", "renames the machine"


def _crontab(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    if "-l" in words:
        return
    yield "HIGH", "changes scheduled commands"
    for line in (command.input or "").splitlines()[:100]:
        yield MentionedWords(tuple(line.split()))


def _at_or_batch(command: Command) -> Iterator[JudgeFinding]:
    """Judge `at` and `batch`, which run what they read."""
    if has_flag(command.argv[1:], "lcV"):
        return
    yield "HIGH", "schedules a command"
    yield from source_risk(command, [])
    yield NestedCommand(command.input or "")


_UNIT_SHOWING_VERBS: Final = make_word_set(
    "status show cat list-units list-timers list-unit-files is-active is-enabled is-failed help"
)
_UNIT_CHANGING_VERBS: Final = make_word_set(
    "stop disable mask kill enable link edit set-default revert import-environment"
)


def _systemctl(command: Command) -> Iterator[JudgeFinding]:
    words = list_operands(command.argv[1:])
    verb = words[0] if words else "list-units"
    if verb in {"poweroff", "reboot", "halt", "kexec", "soft-reboot", "rescue", "emergency", "isolate"}:
        yield "CRITICAL", f"systemctl {verb} stops the machine"
    elif verb in _UNIT_CHANGING_VERBS:
        yield "HIGH", f"systemctl {verb} changes a service"
    elif verb not in _UNIT_SHOWING_VERBS:
        yield "MEDIUM", f"systemctl {verb} changes a service"


_MOUNT: Final = re.compile(r"(?:src|source)=([^,]*)")


def _container(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    mounts = [value.partition(":")[0] for value in list_option_values(words, "-v", "--volume")]
    mounts += [match[1] for value in list_option_values(words, "--mount") if (match := _MOUNT.search(value))]
    for source in mounts:
        if is_root(source) or source.endswith("docker.sock"):
            yield "CRITICAL", f"a container can access {source}"
    if has_flag(words, "", "--privileged") or "host" in (
        *list_option_values(words, "--pid"),
        *list_option_values(words, "--userns"),
    ):
        yield "CRITICAL", "a container has access to the whole machine"
    if has_flag(words, "", "--cap-add", "--device", "--security-opt"):
        yield "HIGH", "a container has extra privileges"
    yield from _judge_reach(command)


def _with_lines(*options: str) -> Judge:
    """Make a judge of a program of the table that also runs the values of some options."""

    def judge(command: Command) -> Iterator[JudgeFinding]:
        for line in list_option_values(command.argv[1:], *options):
            yield NestedCommand(line)
        yield from _judge_reach(command)

    return judge


_SHELL_OF_CLIENT: Final = re.compile(
    r"(?:\\!|^\s*\.(?:shell|system)|^\s*system|^\s*!|(?:\\(?:o|g|copy)|\.(?:once|output|import))[^\n|]*\|)\s*(.*)"
    r"|(?i:\bprogram)\s+'([^']*)'",
    re.MULTILINE,
)
_WRITTEN_BY_CLIENT: Final = re.compile(
    r"(?i:\bwritefile\s*\(\s*|\binto\s+(?:out|dump)file\s+|\bcopy\b[^;]*\bto\s+)'([^']*)'"
)
_LOADED_BY_CLIENT: Final = re.compile(r"(?i:\bload_extension\s*\(|^\s*\.load\b|^\s*load\s+')", re.MULTILINE)


def _database(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    texts = [word for word in words if " " in word or ";" in word] + [command.input or ""]
    for text in texts:
        statement = text.partition("=")[2] if text.startswith("--") else text
        statement = statement[2:] if re.match(r"-[a-z]\S", statement) else statement
        yield from sql_risk(statement)
        for match in _SHELL_OF_CLIENT.finditer(statement):
            yield "HIGH", f"{command.program} runs a program"
            yield NestedCommand(match[1] or match[2] or "")
        for match in _WRITTEN_BY_CLIENT.finditer(statement):
            yield from path_risk(match[1], "write")
        if _LOADED_BY_CLIENT.search(statement):
            yield "HIGH", f"{command.program} loads a library"
    for path in list_operands(words)[:1] if command.program in {"sqlite3", "duckdb"} else ():
        yield from (finding for finding in path_risk(path, "write") if finding[0] == "CRITICAL")
    if command.is_fed and command.input is None:
        yield "HIGH", f"{command.program} runs statements that were not inspected"
    if any(True for _ in list_option_values(words, "-f", "--file")):
        yield "MEDIUM", f"{command.program} runs a file that was not inspected"


_REDIS_READS: Final = make_word_set("GET MGET KEYS SCAN INFO TTL TYPE EXISTS LRANGE HGETALL HGET SMEMBERS PING")
_REDIS_CHANGES: Final = make_word_set(
    "DEL UNLINK CONFIG EVAL DEBUG SLAVEOF REPLICAOF MODULE SETUSER DELUSER FAILOVER RESTORE MIGRATE SCRIPT FUNCTION"
)
_REDIS_DESTROYERS: Final = frozenset({"FLUSHALL", "FLUSHDB", "SHUTDOWN"})


def _redis(command: Command) -> Iterator[JudgeFinding]:
    words = {word.upper() for word in (*command.argv[1:], *(command.input or "").split())}
    if words & _REDIS_DESTROYERS:
        yield "CRITICAL", "empties or stops a whole database"
    elif not command.is_fed and list_operands(command.argv[1:])[:1] and words & _REDIS_READS:
        return
    elif words & _REDIS_CHANGES:
        yield "HIGH", "changes a database"
    else:
        yield "MEDIUM", "queries a database"


def _database_admin(command: Command) -> Iterator[JudgeFinding]:
    if command.program == "mysqladmin" and "drop" not in command.argv:
        yield "HIGH" if {"shutdown", "password"} & set(command.argv) else "MEDIUM", "administers a database server"
    else:
        yield "CRITICAL", f"{command.program} deletes a whole database"


_INSTALLED_TOOLS: Final = make_word_set(
    "tsc eslint prettier jest vitest mocha ava tap c8 nyc webpack vite rollup esbuild swc babel next nuxt astro remix "
    "svelte-check svelte-kit stylelint turbo nx playwright cypress biome oxlint knip depcheck vue-tsc ng tailwindcss "
    "postcss sass storybook typedoc api-extractor tsup tsd xo standard ts-prune madge size-limit lint-staged "
    "commitlint prisma drizzle-kit graphql-codegen openapi-typescript msw karma wdio axe lighthouse markdownlint cspell"
)
"""Development tools of a JavaScript project: `npx` runs the project's own."""


def _fetching_runner(command: Command) -> Iterator[JudgeFinding]:
    """Judge npx and similar programs; what they run is judged separately."""
    words = command.argv[1:]
    is_local = "exec" in words if command.program in {"pnpm", "yarn"} else has_flag(words, "", "--no", "--no-install")
    may_fetch = has_flag(words, "yp", "--yes", "--package", "--call") or "dlx" in words
    if not may_fetch and (is_local or command.inner in _INSTALLED_TOOLS):
        yield "MEDIUM", f"{command.program} runs a program of the project"
    else:
        yield "HIGH", f"{command.program} fetches a program and runs it"


_HOOKLESS_OPTIONS: Final = make_word_set(
    "--bare --safe-mode --setting-sources --settings --managed-settings --dangerously-bypass-hook-trust --profile -c "
    "--config --dangerously-skip-permissions --dangerously-bypass-approvals-and-sandbox --yolo -f --force"
)


def _agent(command: Command) -> Iterator[JudgeFinding]:
    """Judge a command that starts an agent: some options bypass its hooks and permissions."""
    if any(word.partition("=")[0] in _HOOKLESS_OPTIONS for word in command.argv[1:]):
        yield "HIGH", f"{command.program} may run without its hooks"
    else:
        yield "MEDIUM", f"{command.program} runs an agent"


def _history(command: Command) -> Iterator[JudgeFinding]:
    if has_flag(command.argv[1:], "cd"):
        yield "HIGH", "deletes history or logs"


def _journal(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    if any(word.startswith(("--vacuum", "--rotate", "--flush")) for word in words) or (
        command.program == "dmesg" and has_flag(words, "cC", "--clear", "--read-clear")
    ):
        yield "HIGH", "deletes history or logs"


def _terminal(command: Command) -> Iterator[JudgeFinding]:
    """Judge tmux and screen: their words are typed or run."""
    yield "MEDIUM", f"{command.program} runs commands in the background"
    yield MentionedWords(tuple(word for word in command.argv[1:] if word not in {"kill-server", "C-m", "Enter"}))


SERVICE_JUDGES: Final[Mapping[str, Judge]] = dict.fromkeys(_ENTRIES, _judge_reach) | expand_names(
    {
        "shutdown reboot poweroff halt init telinit kexec": _shutdown,
        (
            "useradd userdel usermod groupadd groupdel groupmod passwd chpasswd visudo chsh chage vipw iptables "
            "ip6tables nft ufw firewall-cmd mount umount swapoff swapon insmod rmmod modprobe sysctl ip ifconfig "
            "route tc setenforce update-grub grub-install efibootmgr update-alternatives dpkg-reconfigure timedatectl "
            "hwclock nmcli netplan losetup tune2fs fsck setcap auditctl"
        ): _admin,
        "kill pkill killall xkill skill killall5": _kill,
        "docker podman nerdctl docker-compose podman-compose buildah": _container,
        "aws gcloud az doctl hcloud heroku flyctl fly": _with_lines("--command", "--parameters", "-C"),
        "psql mysql mariadb sqlite3 sqlcmd cqlsh duckdb clickhouse-client": _database,
        "dropdb dropuser mysqladmin": _database_admin,
        "npm pnpm yarn": _with_lines("--script-shell", "--node-options"),
        "go": _with_lines("-exec", "-toolexec"),
        "npx bunx uvx": _fetching_runner,
        "at batch": _at_or_batch,
        "journalctl dmesg": _journal,
        "tmux screen byobu": _terminal,
        "crontab": _crontab,
        "systemctl": _systemctl,
        "redis-cli": _redis,
        "claude codex gemini cursor-agent": _agent,
        "history": _history,
        "date": _clock,
        "hostname": _hostname,
    }
)

WRAPPER_JUDGES: Final[Mapping[str, Judge]] = expand_names(
    {"docker podman nerdctl docker-compose": _container, "npx bunx uvx npm pnpm yarn pipx": _fetching_runner}
)


def wrapper_output_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge the files that a wrapper writes itself."""
    if command.program == "script":
        for path in list_operands(command.argv[1:]):
            yield from path_risk(path, "write")
    if command.program in {"strace", "ltrace", "time"}:
        for path in list_option_values(command.argv[1:], "-o", "--output"):
            yield from path_risk(path, "write")
