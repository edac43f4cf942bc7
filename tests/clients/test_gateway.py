"""Real MCP clients through the gateway to real MCP servers, offline: Inspector in both protocols, Claude Code, Codex.

`make clients` installs all of them into a folder and runs this.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients.providers import Provider, calls, text
from tests.processes import Halter

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

BINARIES = Path(os.environ.get("HALTER_CLIENTS", Path(__file__).parents[2] / ".clients")) / "node_modules" / ".bin"
ERAS = ("legacy", "modern")
WRITE = "files__write_file"
CODEX = """model_provider = "fake"
[model_providers.fake]
name = "fake"
base_url = "{url}/v1"
env_key = "HALTER_KEY"
wire_api = "responses"
[mcp_servers.guarded]
command = "{program}"
args = {arguments}
env = {{ HOME = "{home}", HALTER_PERSON = "ada", PATH = "{path}" }}
startup_timeout_sec = 60
required = true
"""


class GatewayPlace:
    """A home with a gateway before two servers from npm."""

    def __init__(self, home: Path) -> None:
        self.home, self.files = home, home / "files"
        self.files.mkdir()
        (self.files / "a.txt").write_text("hello")
        self.environ = {"PATH": f"{BINARIES}:{os.environ['PATH']}", "HOME": str(home), "HALTER_PERSON": "ada"}
        servers = {
            "everything": {"command": str(BINARIES / "mcp-server-everything"), "args": ["stdio"]},
            "files": {"command": str(BINARIES / "mcp-server-filesystem"), "args": [str(self.files)]},
        }
        (home / "servers.json").write_text(json.dumps({"mcpServers": servers}))
        (home / "desk").mkdir()
        self.policy("gateway: {wait: 1s}\n")
        where = ["--agent", str(home / "desk"), "--config", str(home / "servers.json"), "--store", str(home / "s.db")]
        self.gateway = [sys.executable, "-m", "halter", "gateway", *where]

    def policy(self, more: str) -> None:
        (self.home / "desk" / "agent.yaml").write_text(f"name: desk\n{more}")

    def halter(self, *words: str) -> str:
        where = ["--store", str(self.home / "s.db")]
        with Halter([*words, *where], env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL) as program:
            out, err = program.communicate()
        return (out + err).decode()

    def run(self, words: list[str], environ: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=150,
            check=False,
        )
        return done.stdout.decode() or done.stderr.decode()

    def inspect(self, era: str, method: str, *words: str) -> Any:
        start = self.home / "gateway.sh"
        start.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in self.gateway) + "\n")
        start.chmod(0o755)
        how = ["--protocol-era", era, "--method", method, *words, "--format", "json", "-q"]
        said = json.loads(self.run(["mcp-inspector", "--cli", str(start), *how]))
        return said.get("result", said)

    def call(self, era: str, tool: str, **arguments: Any) -> Any:
        given = [word for key, value in arguments.items() for word in ("--tool-arg", f"{key}={value}")]
        return self.inspect(era, "tools/call", "--tool-name", tool, *given)

    def approve_all(self) -> None:
        for asked in json.loads(self.halter("inbox", "--json")):
            self.halter("approve", asked["decision"])

    def claude(self, provider: Provider, prompt: str) -> Any:
        servers = {"guarded": {"command": self.gateway[0], "args": self.gateway[1:], "env": self.environ}}
        (self.home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        environ = {
            "ANTHROPIC_BASE_URL": provider.url,
            "ANTHROPIC_API_KEY": "none",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "MCP_TIMEOUT": "60000",
        }
        words = ["claude", "-p", prompt, "--output-format", "json", "--allowedTools", "mcp__guarded"]
        words += ["--mcp-config", str(self.home / "mcp.json"), "--strict-mcp-config"]
        return json.loads(self.run(words, environ))

    def codex(self, provider: Provider) -> str:
        (self.home / ".codex").mkdir(exist_ok=True)
        config = CODEX.format(
            url=provider.url,
            program=self.gateway[0],
            arguments=json.dumps(self.gateway[1:]),
            home=self.home,
            path=self.environ["PATH"],
        )
        (self.home / ".codex" / "config.toml").write_text(config)
        options = ["--skip-git-repo-check", "-m", "fake-model", "--dangerously-bypass-approvals-and-sandbox"]
        return self.run(["codex", "exec", *options, "go"], {"HALTER_KEY": "none"})

    def calls(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for row in json.loads(self.halter("sessions", "--json")):
            receipt = json.loads(self.halter("receipt", row["session"], "--json"))
            found += [(line["name"], line["outcome"]) for line in receipt["calls"]]
        return found


@pytest.fixture
def place() -> Iterator[GatewayPlace]:
    for program in ("mcp-inspector", "mcp-server-everything", "mcp-server-filesystem"):
        if not (BINARIES / program).exists():
            pytest.fail(f"{program} is not in {BINARIES}: run `make clients`.")
    with tempfile.TemporaryDirectory(prefix="h-") as home:
        yield GatewayPlace(Path(home))


@pytest.mark.parametrize("era", ERAS)
def test_inspector_lists_and_calls_the_tools_of_both_servers(place: GatewayPlace, era: str) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    names = [tool["name"] for tool in place.inspect(era, "tools/list")["tools"]]
    assert {"everything__echo", "files__read_text_file", WRITE, "halter__wait"} <= {*names}
    assert place.call(era, "everything__get-sum", a=2, b=3)["content"][0]["text"] == "The sum of 2 and 3 is 5."
    image = place.call(era, "everything__get-tiny-image")["content"][1]
    assert (image["type"], image["data"][:4]) == ("image", "iVBO")
    read = place.call(era, "files__read_text_file", path=place.files / "a.txt")
    assert read["structuredContent"] == {"content": "hello"}
    done = place.call(era, "everything__trigger-long-running-operation", duration=1, steps=2)
    assert "completed" in done["content"][0]["text"]
    assert {outcome for _, outcome in place.calls()} == {"ok"}


@pytest.mark.parametrize("era", ERAS)
def test_inspector_writes_only_what_a_person_has_approved(place: GatewayPlace, era: str) -> None:
    path = place.files / "b.txt"
    pending = place.call(era, WRITE, path=path, content="new")
    assert pending["isError"]
    assert "pending decision" in pending["content"][0]["text"]
    assert not path.exists()
    place.approve_all()
    assert place.call(era, WRITE, path=path, content="other")["isError"]
    assert not path.exists()
    assert not place.call(era, WRITE, path=path, content="new").get("isError")
    assert path.read_text() == "new"


@pytest.mark.parametrize("era", ERAS)
def test_twenty_calls_of_inspector_at_once_meet_a_cap_exactly(place: GatewayPlace, era: str) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    place.policy("limits: {max_cost_usd: 0.5}\ngateway: {prices: {everything__echo: 0.1}}\n")
    load = ["--load", "--load-concurrency", "20", "--load-requests", "20"]
    words = ["--tool-name", "everything__echo", "--tool-arg", "message=hi", *load]
    said = place.inspect(era, "tools/call", *words)
    assert (said["ok"], said["toolErrors"], said["errors"]) == (5, 15, 0)


def test_claude_code_calls_through_the_gateway_and_waits_for_a_person(place: GatewayPlace) -> None:
    path = place.files / "c.txt"
    read = ("t1", "mcp__guarded__files__read_text_file", {"path": str(place.files / "a.txt")})
    write = ("t2", f"mcp__guarded__{WRITE}", {"path": str(path), "content": "by claude"})
    with Provider([calls(read), calls(write), text("done")]) as provider:
        assert place.claude(provider, "go")["result"] == "done"
        said = json.dumps(provider.asked[-1]["messages"])
        assert "hello" in said
        assert "pending decision" in said
    assert not path.exists()
    place.approve_all()
    with Provider([calls(write), text("done")]) as provider:
        assert place.claude(provider, "again")["result"] == "done"
    assert path.read_text() == "by claude"


def test_codex_calls_through_the_gateway(place: GatewayPlace) -> None:
    path = place.files / "d.txt"
    write = ("t1", f"mcp__guarded/{WRITE}", {"path": str(path), "content": "by codex"})
    for _ in range(2):
        with Provider([calls(write), text("done")]) as provider:
            said = place.codex(provider)
            assert "done" in said, said
        place.approve_all()
    assert path.read_text() == "by codex"
