"""The real Claude Code and Codex with Halter's hooks, offline: what is not admitted does not run.

`make clients` installs both into a folder and runs this.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.providers import Provider, calls, text
from tests.processes import Halter

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

BINARIES = Path(os.environ.get("HALTER_CLIENTS", Path(__file__).parents[2] / ".clients")) / "node_modules" / ".bin"
SECRET = "sk-ant-api03-" + "a1b2c3d4e5" * 9 + "abc-AA"
FORCE = "git push --force; echo bad > bad.txt"
A_DAY_LATER = """
import sys, time
now = time.time_ns
time.time_ns = lambda: now() + 86_400_000_000_000
from halter.cli import main
sys.exit(main())
"""
CODEX = """model_provider = "fake"
[model_providers.fake]
name = "fake"
base_url = "{url}/v1"
env_key = "HALTER_KEY"
wire_api = "responses"
"""


class Desk:
    """A home with a project, the hooks of one program, and a server that answers them."""

    def __init__(self, home: Path, program: str) -> None:
        self.home, self.project, self.program = home, home / "project", program
        self.project.mkdir()
        self.environ = {
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "HOME": str(home),
            "HALTER_PERSON": "ada",
            "HALTER_HOOKS": f"{home}/hooks",
        }
        self.server: Halter | None = None
        code, text = self.halter("hook", "install", "--for", program, "--wait", "0s")
        assert code == 0, text

    def begin(self) -> None:
        self.server = Halter(["hook", "serve"], env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL)
        assert self.server.stdout is not None
        assert b"Answering hooks at" in self.server.stdout.readline()

    @contextmanager
    def a_day_later(self) -> Generator[None]:
        """A server whose clock is a day ahead, in the place of the one before."""
        self.end()
        words = [sys.executable, "-c", A_DAY_LATER, "hook", "serve"]
        with subprocess.Popen(words, env=self.environ, cwd=self.home, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert b"Answering hooks at" in server.stdout.readline()
                yield
            finally:
                server.kill()

    def end(self) -> None:
        if self.server is not None:
            with self.server as server:
                server.kill()
            self.server = None

    def halter(self, *words: str) -> tuple[int, str]:
        with Halter(words, env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL) as program:
            body, err = program.communicate()
        return program.wait(), (body + err).decode()

    def shown(self, *words: str) -> Any:
        return json.loads(self.halter(*words, "--json")[1])

    def runs(self, words: Sequence[str], environ: Mapping[str, str]) -> str:
        process = subprocess.run(
            words,
            env={**self.environ, **environ},
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return process.stdout.decode()

    def claude(self, provider: Provider, *words: str, allowed: str = "Bash") -> dict[str, Any]:
        environ = {
            "ANTHROPIC_BASE_URL": provider.url,
            "ANTHROPIC_API_KEY": "none",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        words = ("claude", "-p", *words, "--output-format", "json", "--allowedTools", allowed)
        return json.loads(self.runs(words, environ))

    def codex(self, provider: Provider) -> str:
        (self.home / ".codex" / "config.toml").write_text(CODEX.format(url=provider.url))
        options = ["--skip-git-repo-check", "-m", "fake-model", "--dangerously-bypass-approvals-and-sandbox"]
        words = ["codex", "exec", *options, "--dangerously-bypass-hook-trust", "go"]
        return self.runs(words, {"HALTER_KEY": "none"})

    def settings(self) -> Path:
        name = {"claude": ".claude/settings.json", "codex": ".codex/hooks.json"}[self.program]
        return self.home / name

    def replace_command(self, command: str) -> None:
        """Put something else in the place of the hook's program, inside of what the installation wrote."""
        payload = json.loads(self.settings().read_text())
        for groups in payload["hooks"].values():
            for handler in groups[0]["hooks"]:
                handler["command"] = command + handler["command"][handler["command"].index(" || {") :]
        self.settings().write_text(json.dumps(payload))

    def files(self) -> set[str]:
        return {path.name for path in self.project.iterdir() if path.suffix == ".txt"}


@pytest.fixture(params=["claude", "codex"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    if not (BINARIES / request.param).exists():
        pytest.fail(f"{request.param} is not in {BINARIES}: run `make clients`.")
    with tempfile.TemporaryDirectory(prefix="h-") as home:
        made = Desk(Path(home), request.param)
        yield made
        made.end()


def shell(desk: Desk, key: str, command: str) -> tuple[str, str, dict[str, str]]:
    """A call of a shell command, in the words of the program's model."""
    if desk.program == "claude":
        return (key, "Bash", {"command": command, "description": "Do it"})
    return (key, "exec_command", {"cmd": command})


def go(desk: Desk, provider: Provider) -> None:
    if desk.program == "claude":
        desk.claude(provider, "go")
    else:
        desk.codex(provider)


def test_a_harmless_call_runs_and_a_risky_one_waits_for_a_person(desk: Desk) -> None:
    desk.begin()
    steps = [calls(shell(desk, "toolu_1", "echo made > made.txt")), calls(shell(desk, "toolu_2", FORCE)), text("done")]
    with Provider(steps) as provider:
        go(desk, provider)
    assert desk.files() == {"made.txt"}
    (result,) = desk.shown("inbox")
    assert result["name"] == "Bash"
    (session,) = desk.shown("sessions")
    assert (session["kind"], session["state"]) == ("hooked", "WAITING_FOR_APPROVAL")


ATTACKS = {
    "no server": None,
    "killed": "kill -9 $$",
    "exits 1": "false",
    "prints garbage and fails": "echo garbage; exit 1",
    "is gone": "/gone/program",
    "says no sentence": "sh -c 'exit 2'",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hook_under_attack_lets_no_tool_run(desk: Desk, attack: str) -> None:
    command = ATTACKS[attack]
    if command is not None:
        desk.replace_command(f"sh -c {command!r}" if command.startswith(("kill", "echo")) else command)
    with Provider([calls(shell(desk, "toolu_1", "echo made > made.txt")), text("done")]) as provider:
        go(desk, provider)
        assert len(provider.requests) >= 2
    assert desk.files() == set()


@pytest.mark.parametrize("desk", ["claude"], indirect=True)
def test_a_deferred_call_that_is_approved_a_day_later_runs_once_when_it_is_resumed(desk: Desk) -> None:
    (policy,) = (desk.home / "hooks").rglob("agent.yaml")
    policy.write_text(policy.read_text() + "policy: {approval_expiry: 3d}\n")
    desk.begin()
    count = "echo once >> once.txt; git push --force"
    with Provider([calls(shell(desk, "toolu_1", count)), text("done")]) as provider:
        fields = desk.claude(provider, "go")
        assert (fields["stop_reason"], fields["deferred_tool_use"]["id"]) == ("tool_deferred", "toolu_1")
        (result,) = desk.shown("inbox")
        with desk.a_day_later():
            words = [sys.executable, "-c", A_DAY_LATER, "approve", result["decision"]]
            subprocess.run(words, env=desk.environ, cwd=desk.home, check=True, capture_output=True, timeout=60)
            for _ in range(2):
                desk.claude(provider, "go on", "--resume", fields["session_id"], allowed="Read")
    assert (desk.project / "once.txt").read_text() == "once\n"


@pytest.mark.parametrize("desk", ["claude"], indirect=True)
def test_the_model_never_sees_a_secret_that_a_tool_printed(desk: Desk) -> None:
    (desk.project / "key.txt").write_text(SECRET)
    desk.begin()
    with Provider(
        [calls(("toolu_1", "Bash", {"command": "cat key.txt", "description": "x"})), text("done")]
    ) as provider:
        desk.claude(provider, "go")
        output = json.dumps(provider.requests)
    assert SECRET not in output
    assert "[redacted:anthropic]" in output


@pytest.mark.parametrize("desk", ["claude"], indirect=True)
def test_a_halt_ends_the_turn(desk: Desk) -> None:
    desk.begin()
    desk.halter("halt", "fleet")
    with Provider([calls(shell(desk, "toolu_1", "echo made > made.txt")), text("done")]) as provider:
        desk.claude(provider, "go")
        fields = [body for body in provider.requests if body.get("tools")]
    assert (len(fields), desk.files()) == (1, set())


@pytest.mark.parametrize("desk", ["claude"], indirect=True)
def test_of_two_risky_calls_in_one_step_none_runs_before_a_person_decides(desk: Desk) -> None:
    desk.begin()
    step = calls(shell(desk, "toolu_1", FORCE), shell(desk, "toolu_2", "echo worse > worse.txt; cat ~/.ssh/id_rsa"))
    with Provider([step, text("done")]) as provider:
        desk.claude(provider, "go")
    assert (desk.files(), len(desk.shown("inbox"))) == (set(), 2)
