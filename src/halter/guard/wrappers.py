"""Programs that run another program: which options of theirs take a value, and where the other program begins.

An option is written as in a manual: `-u:` takes a value, `-i?` only one that is attached to it, `-c!` a line for a
shell. A program whose options are not all known here is not taken at its word: then every word that names a dangerous
program counts as if it were run.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypedDict

import msgspec

from halter.guard.program_names import program_of

Kind = Literal["", ":", "?", "!"]


class Wrapper(msgspec.Struct, frozen=True):
    """How one program runs others.

    It takes `skips` words of its own before the command. `joins` them: a shell reads its words as one line. `permutes`:
    its options may also stand behind its own words. `only_lines`: it runs nothing but what an option gives it. After an
    option in `looks` it runs nothing.
    """

    options: Mapping[str, Kind]
    skips: int = 0
    joins: bool = False
    permutes: bool = False
    only_lines: bool = False
    looks: frozenset[str] = frozenset()


class Wrapped(msgspec.Struct, frozen=True):
    """What a wrapper runs: a command as words, lines for a shell, and whether all of its options were known."""

    argv: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    joins: bool = False
    sure: bool = True


_TABLE: Final = """
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
npx, bunx, npm exec, npm x, pnpm exec, pnpm dlx, yarn exec, yarn dlx = -y -q -p: --yes --no --quiet --package: -c!
    --call! --workspace: -w: --prefix: --silent --offline
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


def _wrappers(table: str) -> Mapping[str, Wrapper]:
    found: dict[str, Wrapper] = {}
    for entry in table.replace("\n    ", " ").strip().splitlines():
        head, _, options = entry.partition(" =")
        names, _, traits = head.partition(" [")
        wrapper = Wrapper(_options(options), **_traits(traits.rstrip("]")))
        found.update(dict.fromkeys(names.split(", "), wrapper))
    return found


def _options(text: str) -> Mapping[str, Kind]:
    kinds: dict[str, Kind] = {}
    for word in text.split():
        kind: Kind = ":" if word[-1] == ":" else "?" if word[-1] == "?" else "!" if word[-1] == "!" else ""
        name = word.rstrip(":?!")
        names = [name] if name.startswith("--") else [f"-{letter}" for letter in name[1:]]
        kinds.update(dict.fromkeys(names, kind))
    return kinds


class _Traits(TypedDict, total=False):
    skips: int
    joins: bool
    permutes: bool
    only_lines: bool
    looks: frozenset[str]


def _traits(text: str) -> _Traits:
    traits: _Traits = {}
    for word in text.split():
        name, _, value = word.partition("=")
        match name:
            case "skips":
                traits["skips"] = int(value)
            case "looks":
                traits["looks"] = frozenset(value.split(","))
            case "joins" | "permutes" | "only_lines":
                traits[name] = True
            case _:
                raise ValueError(word)
    return traits


_WRAPPERS: Final = _wrappers(_TABLE)

_SAME: Final[Mapping[str, str]] = {
    **dict.fromkeys(("podman", "nerdctl", "docker-compose", "podman-compose", "buildah"), "docker"),
    **dict.fromkeys(("oc", "k3s", "microk8s"), "kubectl"),
    **dict.fromkeys(("slogin", "autossh", "mosh"), "ssh"),
    **dict.fromkeys(("sem", "env_parallel"), "parallel"),
    **dict.fromkeys(("mamba", "micromamba"), "conda"),
    "gtimeout": "timeout",
    "gnice": "nice",
    "genv": "env",
    "gxargs": "xargs",
    "incus": "lxc",
}
_GROUPS: Final = frozenset({"compose", "container", "kubectl"})
"""Words that only lead on to the verb, as in `docker compose exec`."""

_VERBS: Final = frozenset(name.split()[0] for name in _WRAPPERS if " " in name)
NAMES: Final = frozenset(name for name in _WRAPPERS if " " not in name) | _VERBS | _SAME.keys()


def wrapped(argv: Sequence[str]) -> Wrapped | None:
    """Find what a command runs, or None if it is known to run nothing but itself."""
    program = program_of(argv[0])
    program = _SAME.get(program, program)
    at = 1
    if program in _VERBS:
        found = _verb(program, argv)
        if found is None:
            return None
        wrapper, at = found
    elif program in _WRAPPERS:
        wrapper = _WRAPPERS[program]
    else:
        return None
    return _Walk(wrapper, program, argv, at).result()


def _verb(program: str, argv: Sequence[str]) -> tuple[Wrapper, int] | None:
    """Find the verb of a program that has several, behind the options that it takes before it."""
    takes_value = {
        name
        for key, wrapper in _WRAPPERS.items()
        if key.startswith(program)
        for name, kind in wrapper.options.items()
        if kind in {":", "!"}
    }
    at = 1
    while at < len(argv):
        word = argv[at]
        if word.startswith("-") and len(word) > 1:
            at += 2 if word in takes_value else 1
        elif word in _GROUPS:
            at += 1
        else:
            wrapper = _WRAPPERS.get(f"{program} {word}")
            return (wrapper, at + 1) if wrapper else None
    return None


class _Walk:
    """One walk over a wrapper's own words."""

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

    def result(self) -> Wrapped | None:
        """Walk to the command that is run, and tell it."""
        while self._at < len(self._argv) and self._step(self._argv[self._at]):
            pass
        own, rest = tuple(self._argv[: self._at]), tuple(self._argv[self._at :])
        if self._looks:
            return None
        if self._program == "env" and self._lines:
            return Wrapped((), (f"{self._lines[0]} {shlex.join(rest)}",), own, sure=self._sure)
        inner = () if self._wrapper.only_lines else (*self._entry, *rest)
        return Wrapped(inner, tuple(self._lines), own, joins=self._wrapper.joins, sure=self._sure)

    def _step(self, word: str) -> bool:
        """Take one word, and tell whether the wrapper's own words go on after it."""
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
            known = [option for option in self._wrapper.options if option.startswith(name)]
            best = name if name in self._wrapper.options else known[0] if known else ""
            self._take(best, value if equals else None)
            return
        for index, letter in enumerate(word[1:], 2):
            kind = self._wrapper.options.get(f"-{letter}")
            if kind != "":
                self._take(f"-{letter}", word[index:] or None)
                return
            self._take(f"-{letter}", None)

    def _take(self, name: str, attached: str | None) -> None:
        """Take an option, with its value if it has one, attached to it or as the next word."""
        kind = self._wrapper.options.get(name)
        self._sure = self._sure and kind is not None
        self._looks = self._looks or name in self._wrapper.looks
        if kind not in {":", "!"}:
            return
        if attached is None:
            attached = self._argv[self._at] if self._at < len(self._argv) else ""
            self._at += 1
        if kind == "!" or attached.startswith(("|", "!")):
            self._lines.append(attached.lstrip("|!"))
        elif name == "--entrypoint":
            self._entry = [attached]
        elif self._program == "ssh" and name == "-o" and "command" in attached.lower():
            self._lines.append(attached.replace("=", " ", 1).partition(" ")[2])
