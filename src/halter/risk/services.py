"""Programs that control a machine, its services, containers, clouds, databases and packages."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from halter.core.text import expand_names, make_word_set
from halter.risk.commands import Command
from halter.risk.interpreters import source_risk
from halter.risk.places import is_root, path_risk, sql_risk
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    has_flag,
    list_operands,
    list_option_values,
    make_verb_judge,
)


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
    yield from _judge_container_verbs(command)


_judge_container_verbs: Final = make_verb_judge(
    "prune rm rmi down kill push",
    low="ps images logs inspect version info diff top stats port history search events context ls",
)
_judge_kubernetes: Final = make_verb_judge(
    "delete drain cordon taint replace apply patch scale undo set edit",
    low="get describe logs version explain top api-resources api-versions cluster-info config diff",
)
_judge_cloud: Final = make_verb_judge(
    "rm rb delete terminate-instances remove destroy purge",
    "delete-bucket delete-db-instance delete-stack delete-table delete-user delete-cluster delete-vault deactivate",
    otherwise=False,
)
_READING_VERBS: Final = re.compile(
    r"(?:ls|list|get|describe|show|head|help|version|whoami|info|config|lsd|lsf|ps|logs)(?:-.*)?"
)


def _ssh_of_cloud(command: Command) -> Iterator[JudgeFinding]:
    for line in list_option_values(command.argv[1:], "--command", "--parameters"):
        yield NestedCommand(line)
    words = list_operands(command.argv[1:])
    if any(word.startswith("delete-") for word in words):
        yield "HIGH", "deletes a cloud resource"
    if command.program == "rclone" and words[:1] and words[0] in {"sync", "move", "moveto", "dedupe", "cleanup"}:
        yield "HIGH", f"rclone {words[0]} deletes files that the source does not have"
    only_reads = any(_READING_VERBS.fullmatch(word) for word in words[:4])
    if words[:1] == ["iam"] and not only_reads:
        yield "HIGH", "changes permissions in a cloud"
    if not only_reads:
        yield "MEDIUM", f"{command.program} changes an external system"
    yield from _judge_cloud(command)


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
_REDIS_DESTROYERS: Final = frozenset({"FLUSHALL", "FLUSHDB", "SHUTDOWN"})


def _redis(command: Command) -> Iterator[JudgeFinding]:
    words = {word.upper() for word in (*command.argv[1:], *(command.input or "").split())}
    if words & _REDIS_DESTROYERS:
        yield "CRITICAL", "empties or stops a whole database"
    elif not command.is_fed and list_operands(command.argv[1:])[:1] and words & _REDIS_READS:
        return
    elif words & {"DEL", "UNLINK", "CONFIG", "EVAL", "DEBUG", "SLAVEOF", "REPLICAOF", "MODULE"}:
        yield "HIGH", "changes a database"
    else:
        yield "MEDIUM", "queries a database"


def _database_admin(command: Command) -> Iterator[JudgeFinding]:
    if command.program == "mysqladmin" and "drop" not in command.argv:
        yield "HIGH" if {"shutdown", "password"} & set(command.argv) else "MEDIUM", "administers a database server"
    else:
        yield "CRITICAL", f"{command.program} deletes a whole database"


_INSTALL_VERBS: Final = make_word_set(
    "install i add ci update upgrade dist-upgrade full-upgrade get sync -S -U reinstall localinstall link -i "
    "--install create exec dlx x -Syu -Sy tool"
)
_REMOVE_VERBS: Final = make_word_set(
    "remove purge uninstall autoremove erase rm un -R -r -P --purge del delete rollback -Rns -Rs"
)
_PUBLISH_VERBS: Final = make_word_set("publish unpublish deprecate yank push upload login token owner")
_LIST_VERBS: Final = make_word_set(
    "list ls show search freeze check info outdated view help why config tree audit --version -V version status "
    "history -l -L -Q -Qi -qa -q -s policy depends"
)


def _packages(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    verb = next(iter(list_operands(words)), "") or (words[0] if words else "")
    if verb == "pip":
        verb = next(iter(list_operands(words)[1:]), "")
    if verb in _INSTALL_VERBS or (verb == "" and command.program == "yarn"):
        yield "HIGH", f"{command.program} fetches code and runs it"
    elif verb in _REMOVE_VERBS:
        yield "HIGH", f"{command.program} removes programs"
    elif verb in _PUBLISH_VERBS:
        yield "HIGH", f"{command.program} {verb} publishes a package"
    elif verb not in _LIST_VERBS:
        yield "MEDIUM", f"{command.program} runs commands defined in the folder"
    for line in list_option_values(words, "--script-shell", "--node-options"):
        yield "HIGH", f"an option sets the program that {command.program} runs"
        yield NestedCommand(line)


def _builder(command: Command) -> Iterator[JudgeFinding]:
    """Judge cargo, go and similar programs, which install third-party code and build local code."""
    words = command.argv[1:]
    verb = next(iter(list_operands(words)), "")
    is_remote = any("://" in word or "@" in word for word in words)
    if verb in {"install", "publish", "yank", "login"} or (is_remote and verb in {"run", "get", "generate"}):
        yield "HIGH", f"{command.program} {verb} fetches or publishes code"
    else:
        yield "MEDIUM", f"{command.program} runs commands defined in the folder"
    for line in list_option_values(words, "-exec", "-toolexec"):
        yield NestedCommand(line)


def _fetching_runner(command: Command) -> Iterator[JudgeFinding]:
    """Judge npx and similar programs; what they run is judged separately."""
    yield "HIGH", f"{command.program} fetches a program and runs it"


_RESERVED_VERBS: Final = make_word_set(
    "approve deny resume cancel trust on off erase budget rules tokens steer proposals halt init hook"
)


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


def _halter(command: Command) -> Iterator[JudgeFinding]:
    words = list_operands(command.argv[1:])
    verb = next((word for word in words[:3] if word in _RESERVED_VERBS), next(iter(words), ""))
    if verb in _RESERVED_VERBS:
        yield "CRITICAL", f"halter {verb} is reserved for people"
    else:
        yield "MEDIUM", f"runs halter {verb}"


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


def _forge(command: Command) -> Iterator[JudgeFinding]:
    words = list_operands(command.argv[1:])
    if "delete" in words[:3] or {"merge", "archive", "transfer", "rename"} & set(words[1:2]):
        yield "HIGH", f"{command.program} {' '.join(words[:2])} cannot be undone"
    elif {"secret", "variable", "workflow", "ssh-key", "gpg-key"} & set(words[:1]) and "list" not in words[1:2]:
        yield "HIGH", f"{command.program} {' '.join(words[:2])} changes automation or access"
    elif words[:1] == ["api"]:
        for method in list_option_values(command.argv[1:], "-X", "--method"):
            if method.upper() != "GET":
                yield "HIGH", f"{method.upper()} changes an external system"
        yield "MEDIUM", f"{command.program} calls the API"
    elif words[1:2] and words[1] not in {"list", "view", "status", "diff", "checks", "watch"}:
        yield "MEDIUM", f"{command.program} changes an external system"


SERVICE_JUDGES: Final[Mapping[str, Judge]] = expand_names(
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
        "kubectl oc k3s microk8s": _judge_kubernetes,
        "aws gcloud az gsutil doctl heroku flyctl fly s3cmd rclone": _ssh_of_cloud,
        "psql mysql mariadb sqlite3 sqlcmd cqlsh duckdb clickhouse-client": _database,
        "dropdb dropuser mysqladmin": _database_admin,
        (
            "pip pip3 pipx uv conda mamba micromamba poetry pdm npm pnpm yarn gem apt apt-get aptitude dnf yum zypper "
            "pacman apk brew port snap flatpak dpkg rpm easy_install composer luarocks opam nix-env helm twine"
        ): _packages,
        "cargo go mvn gradle dotnet swift zig stack cabal mix sbt": _builder,
        "terraform tofu pulumi terragrunt": make_verb_judge(
            "apply up taint import", "destroy", "plan show validate fmt output version"
        ),
        "npx bunx uvx": _fetching_runner,
        "at batch": _at_or_batch,
        "journalctl dmesg": _journal,
        "tmux screen byobu": _terminal,
        "gh glab hub": _forge,
        "crontab": _crontab,
        "systemctl": _systemctl,
        "service": make_verb_judge("stop"),
        "launchctl": make_verb_judge("load unload bootstrap bootout remove"),
        "redis-cli": _redis,
        "halter": _halter,
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
