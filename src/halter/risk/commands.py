"""Parses a command line into all commands that it runs, as words, without their wrappers.

A wrapper runs another program. The table lists its options: `-u:` takes a value, `-i?` only an attached one, `-c!` a
line for a shell. If an option is unknown, every word that names a dangerous program counts as if it were run.
"""

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from halter.core.text import expand_names, make_word_set
from halter.risk.places import is_root
from halter.risk.shell_syntax import (
    SHELLS,
    CommandInput,
    MalformedShell,
    SimpleCommand,
    TooComplex,
    parse_shell_line,
    program_of,
)

OptionKind = Literal["", ":", "?", "!"]


class Wrapper(msgspec.Struct, frozen=True):
    """A program that runs other programs.

    It takes `skips` words before the command. `joins`: a shell reads its words as one line. `permutes`: its options may
    also follow its own words. `only_lines`: it runs only the lines in its options. With an option in `looks` it runs
    nothing.
    """

    options: Mapping[str, OptionKind]
    skips: int = 0
    joins: bool = False
    permutes: bool = False
    only_lines: bool = False
    looks: frozenset[str] = frozenset()


class WrappedCommand(msgspec.Struct, frozen=True):
    """The command that a wrapper runs, as words, and lines for a shell. It is `sure` if all options were known."""

    argv: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    joins: bool = False
    sure: bool = True


_WRAPPER_TABLE: Final = """
sudo = -AbBEeHikKlnPsSvV -CDghpRrTtUu: --user: --group: --host: --prompt: --chdir: --chroot: --close-from: --role:
    --type: --other-user: --command-timeout: --preserve-env? --login --shell --stdin --non-interactive --background
    --set-home --askpass --bell --reset-timestamp --remove-timestamp --preserve-groups --list --validate
doas = -nsL -uCa:
run0 = -u: -g: -D: --user: --group: --unit: --property: --slice: --chdir: --setenv: --nice: --pty --pipe
gosu [skips=1] =
su [permutes only_lines] = -lmpPfT -c! --command! -C! --session-command! -gGsw: --group: --supp-group: --shell:
    --login --pty --whitelist-environment: --preserve-environment --fast
runuser [permutes] = -lmpPfT -c! --command! --session-command! -ugGsw: --user: --group: --supp-group: --shell: --login
    --pty --preserve-environment --fast
sg [permutes only_lines] = -c!
pkexec = --user: --disable-internal-agent --keep-cwd
env = -i0v -u: -C: -S! -a: --unset: --chdir: --split-string! --ignore-environment --null --debug --argv0:
    --block-signal? --default-signal? --ignore-signal? --list-signal-handling
nohup, eatmydata, catchsegv, linux32, linux64, i386, torsocks, tsocks, builtin, ifne, busybox, toybox, noglob =
dbus-run-session, rye run, pyenv exec, rbenv exec, asdf exec =
command [looks=-v,-V] = -pvV
exec = -cl -a:
time = -apqv -f: -o: --format: --output: --append --portability --verbose --quiet
nice = -0123456789 -n: --adjustment:
ionice [looks=-p,-P,-u] = -t -c: -n: -p: -P: -u: --class: --classdata: --pid: --pgid: --uid: --ignore
chrt [skips=1 looks=-p,-m] = -abdfimoprRv -T: -P: -D: --all-tasks --batch --deadline --fifo --idle --max --other --pid
    --rr --reset-on-fork --verbose --sched-runtime: --sched-period: --sched-deadline:
taskset [skips=1 looks=-p,--pid] = -acp --all-tasks --cpu-list --pid
timeout [skips=1] = -fpv -k: -s: --kill-after: --signal: --foreground --preserve-status --verbose
stdbuf = -i: -o: -e: --input: --output: --error:
setsid = -cfw --ctty --fork --wait
chronic = -ev
unbuffer = -p
fakeroot = -lsbi: -u --lib: --faked: --unknown-is-real
faketime [skips=1] = -fm -p: --exclude-monotonic --date-prog:
proxychains, proxychains4 = -q -f:
sshpass = -ev -p: -f: -d: -P:
xvfb-run = -al -e: -f: -n: -p: -s: -w: --auto-servernum --server-args: --server-num: --error-file: --auth-file: --wait:
chroot [skips=1] = --userspec: --groups: --skip-chdir
unshare = -muinpUCTfrc -S: -G: -R: -w: --mount? --uts? --ipc? --net? --pid? --user? --cgroup? --time? --fork
    --kill-child? --map-root-user --map-current-user --map-auto --mount-proc? --propagation: --setgroups: --root: --wd:
    --setuid: --setgid: --map-user: --map-group: --map-users: --map-groups: --keep-caps
nsenter = -aFZec -m? -u? -i? -n? -p? -U? -C? -T? -r? -w? -t: -S: -G: -W: --all --target: --mount? --uts? --ipc? --net?
    --pid? --user? --cgroup? --time? --root? --wd? --setuid: --setgid: --no-fork --preserve-credentials
systemd-run = -tPSGqrd -u: -p: -E: -H: -M: --unit: --property: --setenv: --slice: --uid: --gid: --nice: --host:
    --machine: --working-directory: --description: --on-active: --on-boot: --on-startup: --on-unit-active:
    --on-calendar: --on-unit-inactive: --timer-property: --path-property: --socket-property: --service-type: --user
    --system --scope --pty --pipe --wait --collect --no-block --shell --same-dir --remain-after-exit --quiet
    --send-sighup --no-ask-password --slice-inherit
systemd-inhibit = --what: --who: --why: --mode: --list --no-pager
xargs = -0oprtx -e? -i? -l? -a: -d: -E: -I: -L: -n: -P: -s: --null --arg-file: --delimiter: --eof? --replace?
    --max-lines? --max-args: --max-procs: --max-chars: --open-tty --interactive --no-run-if-empty --verbose --exit
    --process-slot-var: --show-limits
parallel [joins] = -kqmXvtu0 -j: -P: -I: -N: -n: -L: -a: -S: -d: -C: -s: --jobs: --max-procs: --colsep: --joblog:
    --results: --delay: --timeout: --retries: --halt: --arg-file: --delimiter: --max-args: --max-replace-args:
    --max-chars: --sshlogin: --tag --bar --eta --progress --dry-run --dryrun --will-cite --keep-order --null --verbose
    --xargs --line-buffer --ungroup --group --no-notice --pipe --linebuffer --resume --shuf --link --quote --silent
watch [joins] = -bcCefgprtwx -d? -n: -q: -s: --interval: --differences? --equexit: --shotsdir: --beep --color
    --no-color --errexit --follow --chgexit --precise --no-rerun --no-title --no-wrap --exec
strace = -cCdDfFhiknqrtTvVwxyzZ -a: -b: -e: -E: -I: -o: -O: -p: -P: -s: -S: -u: -U: -X: --follow-forks --output:
    --trace: --attach: --summary --summary-only --string-limit: --env: --user: --quiet? --decode-fds? --timestamps?
    --syscall-times? --relative-timestamps? --output-separately --instruction-pointer --seccomp-bpf
ltrace = -cCfhiLrStTbV -a: -A: -D: -e: -F: -l: -n: -o: -p: -s: -u: -w: -x: --output:
flock [skips=1 permutes] = -sxenuoFv -w: -E: -c! --command! --shared --exclusive --nonblock --nb --unlock --close
    --no-fork --verbose --timeout: --wait: --conflict-exit-code:
script [permutes only_lines] = -aefqh -t? -c! --command! -E: -I: -O: -B: -o: -T: -m: --append --return --flush --force
    --quiet --echo: --log-in: --log-out: --log-io: --log-timing: --logging-format: --output-limit: --timing?
ssh [skips=1 joins permutes] = -46AaCfGgKkMNnqsTtVvXxYy -BbcDEeFIiJLlmOopQRSWw:
docker run, docker exec, docker create [skips=1] = -ditPqT --rm --init --privileged --read-only --detach --interactive
    --tty --publish-all --no-healthcheck --quiet --oom-kill-disable --no-deps --build --service-ports --use-aliases
    --remove-orphans --no-TTY -acehlmpuvwHf: --attach: --add-host: --cap-add: --cap-drop: --cgroupns: --cidfile: --cpus:
    --cpu-shares: --cpuset-cpus: --device: --dns: --entrypoint: --env: --env-file: --expose: --gpus: --group-add:
    --hostname: --index: --ip: --ipc: --label: --link: --log-driver: --log-opt: --mac-address: --memory: --memory-swap:
    --mount: --name: --net: --network: --network-alias: --pid: --pids-limit: --platform: --publish: --pull: --restart:
    --runtime: --security-opt: --shm-size: --stop-signal: --stop-timeout: --sysctl: --tmpfs: --ulimit: --user: --userns:
    --uts: --volume: --volumes-from: --workdir: --detach-keys: --context: --host: --config: --log-level: --file:
    --project-name: --profile: --project-directory: --ansi:
kubectl exec, kubectl run, kubectl debug [skips=1 permutes] = -itq -n: -c: -f: -l: --stdin --tty --quiet --rm --attach
    --command --namespace: --container: --context: --cluster: --kubeconfig: --filename: --image: --env: --labels:
    --restart: --pod-running-timeout: --user: --server: --token: --overrides: --target: --profile: --share-processes
    --copy-to: --as: --as-group: --leave-stdin-open
npx, bunx, npm exec, npm x, pnpm exec, pnpm dlx, yarn exec, yarn dlx = -y -q -p: --yes --no --no-install --quiet
    --package: -c! --call! --workspace: -w: --prefix: --silent --offline
uv run = -qvns -p: -w: -C: -i: --with: --with-requirements: --with-editable: --python: --project: --directory: --extra:
    --group: --only-group: --no-group: --env-file: --package: --index: --index-url: --no-project --isolated --locked
    --frozen --no-sync --all-extras --all-groups --no-dev --dev --offline --quiet --verbose --exact --active
uvx = -qv -p: --from: --with: --python: --quiet --isolated --offline
poetry run = -qnv -C: -P: --quiet --no-interaction --directory: --project:
pipenv run = -qv --quiet
pdm run = -s -p: --project: --site-packages
pipx run = -q --spec: --python: --pip-args: --no-cache --quiet
bundle exec = --keep-file-descriptors --gemfile:
mise exec = -c!
direnv exec [skips=1] =
conda run = -v -n: -p: --name: --prefix: --cwd: --no-capture-output --live-stream
vagrant ssh [permutes only_lines] = -c! --command! -p --plain
lxc exec [skips=1 permutes] = -tTn --mode: --env: --user: --group: --cwd:
"""


def _parse_table(table: str) -> Mapping[str, Wrapper]:
    wrapper_by_name: dict[str, Wrapper] = {}
    for entry in table.replace("\n    ", " ").strip().splitlines():
        head, _, options = entry.partition(" =")
        names, _, traits = head.partition(" [")
        wrapper = Wrapper(_parse_options(options), **_parse_traits(traits.rstrip("]")))
        wrapper_by_name.update(dict.fromkeys(names.split(", "), wrapper))
    return wrapper_by_name


def _parse_options(text: str) -> Mapping[str, OptionKind]:
    kinds: dict[str, OptionKind] = {}
    for word in text.split():
        kind: OptionKind = ":" if word[-1] == ":" else "?" if word[-1] == "?" else "!" if word[-1] == "!" else ""
        name = word.rstrip(":?!")
        names = [name] if name.startswith("--") else [f"-{letter}" for letter in name[1:]]
        kinds.update(dict.fromkeys(names, kind))
    return kinds


def _parse_traits(text: str) -> dict[str, Any]:
    """Parse `skips=1 joins looks=-p,-P`: numbers, sets and flags of a Wrapper."""
    traits = (word.partition("=") for word in text.split())
    return {
        name: int(value) if value.isdigit() else frozenset(value.split(",")) if equals else True
        for name, equals, value in traits
    }


_WRAPPERS: Final = _parse_table(_WRAPPER_TABLE)

_ALIASES: Final[Mapping[str, str]] = expand_names(
    {
        "podman nerdctl docker-compose podman-compose buildah": "docker",
        "oc k3s microk8s": "kubectl",
        "slogin autossh mosh": "ssh",
        "sem env_parallel": "parallel",
        "mamba micromamba": "conda",
        "gtimeout": "timeout",
        "gnice": "nice",
        "genv": "env",
        "gxargs": "xargs",
        "incus": "lxc",
    }
)
_GROUP_WORDS: Final = frozenset({"compose", "container", "kubectl"})
"""Words before the verb, as in `docker compose exec`."""

_SUBCOMMAND_PROGRAMS: Final = frozenset(name.split()[0] for name in _WRAPPERS if " " in name)
WRAPPER_NAMES: Final = frozenset(name for name in _WRAPPERS if " " not in name) | _SUBCOMMAND_PROGRAMS | _ALIASES.keys()


def unwrap_command(argv: Sequence[str]) -> WrappedCommand | None:
    """Find what a wrapper runs. Returns None for a command that runs only itself."""
    program = program_of(argv[0])
    program = _ALIASES.get(program, program)
    index = 1
    if program in _SUBCOMMAND_PROGRAMS:
        verb_match = _find_verb(program, argv)
        if verb_match is None:
            return None
        wrapper, index = verb_match
    elif program in _WRAPPERS:
        wrapper = _WRAPPERS[program]
    else:
        return None
    return _OptionWalk(wrapper, program, argv, index).result()


def _find_verb(program: str, argv: Sequence[str]) -> tuple[Wrapper, int] | None:
    takes_value = {
        name
        for key, wrapper in _WRAPPERS.items()
        if key.startswith(program)
        for name, kind in wrapper.options.items()
        if kind in {":", "!"}
    }
    index = 1
    while index < len(argv):
        word = argv[index]
        if word.startswith("-") and len(word) > 1:
            index += 2 if word in takes_value else 1
        elif word in _GROUP_WORDS:
            index += 1
        else:
            wrapper = _WRAPPERS.get(f"{program} {word}")
            return (wrapper, index + 1) if wrapper else None
    return None


class _OptionWalk:
    def __init__(self, wrapper: Wrapper, program: str, argv: Sequence[str], at: int) -> None:
        self._wrapper = wrapper
        self._program = program
        self._argv = argv
        self._at = at
        self._skips = wrapper.skips
        self._lines: list[str] = []
        self._entry: list[str] = []
        self._sure = True
        self._looks = False

    def result(self) -> WrappedCommand | None:
        while self._at < len(self._argv) and self._step(self._argv[self._at]):
            pass
        own_words, remaining = tuple(self._argv[: self._at]), tuple(self._argv[self._at :])
        if self._looks:
            return None
        if self._program == "env" and self._lines:
            return WrappedCommand((), (f"{self._lines[0]} {shlex.join(remaining)}",), own_words, sure=self._sure)
        inner = () if self._wrapper.only_lines else (*self._entry, *remaining)
        return WrappedCommand(inner, tuple(self._lines), own_words, joins=self._wrapper.joins, sure=self._sure)

    def _step(self, word: str) -> bool:
        """Consume one word. Returns true if more of the wrapper's own words may follow."""
        if word == "--":
            self._at += 1 if self._wrapper.only_lines else 1 + self._skips
            return self._wrapper.only_lines
        if word.startswith("-"):
            self._option(word)
            return True
        if self._program in {"env", "sudo", "doas"} and "=" in word[1:]:
            self._at += 1
            return True
        if self._wrapper.only_lines:
            self._at += 1
            return True
        if not self._skips:
            return False
        self._at += 1
        self._skips -= 1
        return self._skips > 0 or self._wrapper.permutes

    def _option(self, word: str) -> None:
        self._at += 1
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            matching = [option for option in self._wrapper.options if option.startswith(name)]
            option_name = name if name in self._wrapper.options else matching[0] if matching else ""
            self._consume(option_name, value if equals else None)
            return
        for index, letter in enumerate(word[1:], 2):
            kind = self._wrapper.options.get(f"-{letter}")
            if kind != "":
                self._consume(f"-{letter}", word[index:] or None)
                return
            self._consume(f"-{letter}", None)

    def _consume(self, name: str, value: str | None) -> None:
        kind = self._wrapper.options.get(name)
        self._sure = self._sure and kind is not None
        self._looks = self._looks or name in self._wrapper.looks
        if kind not in {":", "!"}:
            return
        if value is None:
            value = self._argv[self._at] if self._at < len(self._argv) else ""
            self._at += 1
        if kind == "!" or value.startswith(("|", "!")):
            self._lines.append(value.lstrip("|!"))
        elif name == "--entrypoint":
            self._entry = [value]
        elif self._program == "ssh" and name == "-o" and "command" in value.lower():
            self._lines.append(value.replace("=", " ", 1).partition(" ")[2])


MAX_COMMAND_DEPTH: Final = 12

UNKNOWN_WORDS: Final = "$*"
"""Stands for words that are known only at run time."""

_SHELL_CHARACTERS: Final = frozenset("`$\n\r;&|<>(){}!#\0")
EXEC_OPTIONS: Final = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_CD_PROGRAMS: Final = frozenset({"cd", "pushd", "chdir"})
_SHELL_OPENERS: Final = make_word_set("ssh su sudo doas runuser script pkexec sg chroot unshare nsenter parallel sem")
_VALUED_SHELL_OPTIONS: Final = frozenset({"--rcfile", "--init-file", "--init-command"})
_MAX_WORDS: Final = 1000
_MAX_JOINED_LENGTH: Final = 4096
_BUDGET_PER_CHARACTER: Final = 16
_BUDGET_PER_WORD: Final = 6
_MIN_BUDGET: Final = 20_000


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One program with its arguments and its context in the line.

    `wrappers` are the programs around it. A command that `wraps` is such a program itself, with only its own words.
    `feed`, `file_inputs` and `word_inputs` are the sources of its input, its files and its words. `folder` is the
    line's working directory. It is not `sure` if some options were unknown. `inner` is the program that a wrapper runs.
    """

    argv: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    wraps: bool = False
    sets: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    text: str | None = None
    feed: CommandInput | None = None
    word_inputs: tuple[CommandInput, ...] = ()
    file_inputs: tuple[CommandInput, ...] = ()
    folder: str = ""
    sure: bool = True
    recursive: bool = False
    inner: str = ""

    @property
    def program(self) -> str:
        return program_of(self.argv[0]) if self.argv else ""

    @property
    def input(self) -> str | None:
        return self.text if self.text is not None else self.feed.text if self.feed else None

    @property
    def is_fed(self) -> bool:
        """True if its standard input comes from the line, and not from a terminal."""
        return self.feed is not None or self.text is not None or bool(self.reads)


class UnreadableCommand(msgspec.Struct, frozen=True):
    """A command line that cannot be parsed; it `is_obfuscated` if that looks intentional."""

    text: str
    is_obfuscated: bool = False


ParsedCommand = Command | UnreadableCommand


class ParseBudget:
    """The budget for parsing one line, which bounds lines nested in lines."""

    def __init__(self, length: int) -> None:
        self._remaining = _BUDGET_PER_CHARACTER * length + _MIN_BUDGET

    def spend(self, length: int) -> bool:
        self._remaining -= length + 10
        return self._remaining >= 0


def make_parse_budget(line_or_words: str | Sequence[str]) -> ParseBudget:
    return ParseBudget(
        len(line_or_words) if isinstance(line_or_words, str) else sum(len(word) + 1 for word in line_or_words)
    )


def parse_commands(
    line_or_words: str | Sequence[str], text: str | None = None, budget: ParseBudget | None = None, depth: int = 0
) -> tuple[ParsedCommand, ...]:
    """Parse a line for a shell, or one command as a list of words; `text` is its standard input."""
    parser = _CommandParser(budget or make_parse_budget(line_or_words))
    if isinstance(line_or_words, str):
        return tuple(parser.line(line_or_words, depth, source=Command(argv=(), text=text)))
    return tuple(parser.command(Command(argv=tuple(line_or_words), text=text), depth)) if line_or_words else ()


def parse_plain_command(line_or_words: str | Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of a line that is certainly a single command, else None.

    A line with any character that has a meaning to a shell, even a quoted one, is not plain: then a person is asked.
    """
    if isinstance(line_or_words, str) and not _SHELL_CHARACTERS.isdisjoint(line_or_words):
        return None
    commands = parse_commands(line_or_words)
    if len(commands) != 1 or not isinstance(commands[0], Command) or commands[0].wrappers or commands[0].sets:
        return None
    words = shlex.split(line_or_words) if isinstance(line_or_words, str) else line_or_words
    return commands[0].argv if commands[0].argv == tuple(words) else None


class _CommandParser:
    def __init__(self, budget: ParseBudget) -> None:
        self._budget = budget

    def line(
        self, line: str, depth: int, parameters: Mapping[str, str] | None = None, source: Command | None = None
    ) -> Iterator[ParsedCommand]:
        """Parse a line. Its commands read the input of `source`, unless the line redirects them."""
        if depth > MAX_COMMAND_DEPTH or not self._budget.spend(len(line)):
            yield UnreadableCommand(line, is_obfuscated=True)
            return
        try:
            commands = parse_shell_line(line, parameters)
        except (MalformedShell, TooComplex) as error:
            yield UnreadableCommand(line, is_obfuscated=isinstance(error, TooComplex))
            return
        folder = ""
        for simple_command in commands:
            for words in dict.fromkeys((simple_command.words, simple_command.resolved_words or simple_command.words)):
                yield from self.command(_make_command(simple_command, words, folder, source), depth)
            if not simple_command.is_inner:
                folder = _follow_cd(folder, simple_command.resolved_words)

    def command(self, command: Command, depth: int) -> Iterator[ParsedCommand]:
        if not command.argv:
            if command.writes or command.sets:
                yield command
            return
        if depth > MAX_COMMAND_DEPTH or not self._budget.spend(_BUDGET_PER_WORD * len(command.argv)):
            yield UnreadableCommand(shlex.join(command.argv[:10]), is_obfuscated=True)
            return
        program = command.program
        if program in SHELLS:
            yield from self._shell(command, depth)
        elif program == "eval":
            yield command
            yield from self._parse_nested(command, self.line(" ".join(command.argv[1:]), depth + 1))
        elif program == "find":
            yield command
            for argv in _list_find_commands(command.argv):
                yield from self._parse_nested(
                    command, self.command(msgspec.structs.replace(command, argv=argv), depth + 1)
                )
        elif (inner := unwrap_command(command.argv)) is not None:
            yield from self._wrapper(command, inner, depth)
        else:
            yield command

    def _shell(self, command: Command, depth: int) -> Iterator[ParsedCommand]:
        """Parse what a shell runs: the line after `-c`, or its input."""
        code, arguments = split_shell_code(command.argv)
        yield command
        if code is not None:
            parameters = {
                "@": " ".join(arguments[1:]),
                "*": " ".join(arguments[1:]),
                **{str(position): word for position, word in enumerate(arguments)},
            }
            yield from self._parse_nested(command, self.line(code, depth + 1, parameters, command))
            return
        inputs = (
            [feed.text for feed in command.file_inputs] if {*arguments[:1], *command.reads} & {"/dev/fd/63"} else []
        )
        sources = inputs or [command.input]
        for text in sources:
            if text is not None:
                yield from self._parse_nested(command, self.line(text, depth + 1))

    def _wrapper(self, command: Command, inner: WrappedCommand, depth: int) -> Iterator[ParsedCommand]:
        program = command.program
        if not inner.argv and not inner.lines:
            yield command
            if program in _SHELL_OPENERS and command.is_fed:
                yield from self._parse_nested(
                    command, self.command(msgspec.structs.replace(command, argv=("sh",)), depth + 1)
                )
            return
        inner_program = program_of(inner.argv[0]) if inner.argv else ""
        yield msgspec.structs.replace(command, argv=inner.own, wraps=True, inner=inner_program)
        if not inner.sure:
            yield msgspec.structs.replace(command, sure=False)
        lines = list(inner.lines)
        argv = inner.argv
        if program in {"xargs", "gxargs"}:
            argv, *others = _list_xargs_commands(inner, command)
            lines += [shlex.join(words) for words in others]
        elif program in {"parallel", "sem", "env_parallel"}:
            lines, argv = [*lines, *_list_parallel_lines(inner.argv, command)], ()
        elif inner.joins and argv:
            lines, argv = [*lines, " ".join(argv)], ()
        for line in lines:
            yield from self._parse_nested(command, self.line(line, depth + 1, source=command))
        if argv:
            inner_command = msgspec.structs.replace(command, argv=argv, sets=(), writes=())
            yield from self._parse_nested(command, self.command(inner_command, depth + 1))

    def _parse_nested(self, outer: Command, commands: Iterator[ParsedCommand]) -> Iterator[ParsedCommand]:
        for command in commands:
            if isinstance(command, UnreadableCommand):
                yield command
            else:
                yield msgspec.structs.replace(command, wrappers=(outer.program, *command.wrappers))


def split_shell_code(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a shell's arguments: the line after `-c`, if any, and the other words."""
    index, is_code, reads_input = 1, False, False
    while index < len(argv) and argv[index][:1] in {"-", "+"} and len(argv[index]) > 1:
        word = argv[index]
        index += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--command":
                return (value if equals else argv[index] if index < len(argv) else ""), []
            index += name in _VALUED_SHELL_OPTIONS and not equals
        else:
            is_code = is_code or "c" in word
            reads_input = reads_input or "s" in word
            index += word.count("o") + word.count("O")
    remaining = list(argv[index:])
    if is_code:
        return (remaining[0] if remaining else ""), remaining[1:]
    return None, [] if reads_input else remaining


def _make_command(simple: SimpleCommand, words: Sequence[str], folder: str, source: Command | None) -> Command:
    inherits = simple.feed is None and simple.text is None and not simple.reads and source is not None
    input_owner = source if inherits and source is not None else simple
    unknown_feed = source.feed if source and UNKNOWN_WORDS in words else None
    return Command(
        argv=tuple(words),
        sets=simple.sets,
        writes=simple.writes,
        reads=input_owner.reads,
        text=input_owner.text,
        feed=input_owner.feed,
        word_inputs=(*simple.word_inputs, unknown_feed) if unknown_feed else simple.word_inputs,
        file_inputs=simple.file_inputs,
        folder=folder or (source.folder if source else ""),
        recursive=simple.recursive,
    )


def _follow_cd(folder: str, words: Sequence[str]) -> str:
    if not words or words[0] not in _CD_PROGRAMS:
        return folder
    target = next((word for word in words[1:] if not word.startswith("-")), "~")
    return posixpath.join(folder, target)


def _list_find_commands(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each command that `find` runs, with the searched folders in place of `{}`."""
    roots = list_find_roots(argv)
    index = 1
    while index < len(argv):
        index += 1
        if argv[index - 1] not in EXEC_OPTIONS:
            continue
        words: list[str] = []
        while (
            index < len(argv)
            and argv[index] not in {";", "\\;"}
            and not (argv[index] == "+" and words[-1:] == list(roots)[-1:])
        ):
            words += roots if argv[index] == "{}" else [argv[index].replace("{}", roots[0])]
            index += 1
        if words:
            yield tuple(words)


def list_find_roots(argv: Sequence[str]) -> tuple[str, ...]:
    roots: list[str] = []
    for word in argv[1:]:
        if word in {"-H", "-L", "-P"}:
            continue
        if word.startswith(("-", "(", "!")) or word == ",":
            break
        roots.append(word)
    return sample_words(roots) or (".",)


def sample_words(words: Sequence[str], limit: int = 16) -> tuple[str, ...]:
    """Keep some of many words, and always those that name system or home folders."""
    if len(words) <= limit:
        return tuple(words)
    return (*words[:limit], *islice(filter(is_root, words[limit:]), limit))


def _list_xargs_commands(inner: WrappedCommand, command: Command) -> Iterator[tuple[str, ...]]:
    """Yield the commands of `xargs` with its input as words and as one word, or a marker if it is unknown."""
    values = _list_input_words(command)
    placeholder = ""
    for index, word in enumerate(inner.own):
        if word.startswith("-I"):
            placeholder = word[2:] or (inner.own[index + 1] if index + 1 < len(inner.own) else "")
        elif word.startswith(("-i", "--replace")):
            placeholder = word.removeprefix("-i").removeprefix("--replace").removeprefix("=") or "{}"
    argv = inner.argv or ("echo",)
    if not placeholder:
        yield (*argv, *values)
        return
    sample = sample_words(values)
    joined_words = " ".join(sample)[:_MAX_JOINED_LENGTH]
    yield tuple(
        piece
        for word in argv
        for piece in (sample if word == placeholder else (word.replace(placeholder, joined_words),))
    )
    if placeholder in argv:
        yield tuple(joined_words if word == placeholder else word.replace(placeholder, joined_words) for word in argv)


def _list_input_words(command: Command) -> tuple[str, ...]:
    input_text = command.input
    if input_text is not None:
        return sample_words(input_text.replace("\0", " ").split(), _MAX_WORDS)
    roots = command.feed.roots if command.feed else ()
    return (UNKNOWN_WORDS, *roots)


def _list_parallel_lines(argv: Sequence[str], command: Command) -> Iterator[str]:
    separator_at = next((index for index, word in enumerate(argv) if word.startswith(":::")), len(argv))
    line, values = " ".join(argv[:separator_at]), [word for word in argv[separator_at:] if not word.startswith(":::")]
    values = sample_words(values, _MAX_WORDS) or _list_input_words(command)
    if not line:
        yield "\n".join(values if argv[separator_at:] else [command.input or UNKNOWN_WORDS])
    elif "{" in line:
        joined_words = " ".join(sample_words(values))[:_MAX_JOINED_LENGTH]
        for placeholder in ("{}", "{.}", "{/}", "{//}", "{/.}", "{1}", "{2}"):
            line = line.replace(placeholder, joined_words)
        yield line
    else:
        yield f"{line} {' '.join(values)}"
