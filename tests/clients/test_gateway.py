"""Real MCP clients through the gateway to real MCP servers, offline: Inspector in both protocols, Claude Code, Codex.

The servers are two of the elder protocol, and one that speaks the newer one alone.

`make clients` installs all of them into a folder and runs this.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.clients.providers import Provider, calls, text
from tests.processes import Halter

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

BINARIES = Path(os.environ.get("HALTER_CLIENTS", Path(__file__).parents[2] / ".clients")) / "node_modules" / ".bin"
TASK_SERVER = Path(__file__).parents[1] / "gateway" / "servers" / "modern.py"
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
env = {{ HOME = "{home}", HALTER_PERSON = "ada", PATH = "{path}" }}
startup_timeout_sec = 60
tool_timeout_sec = {timeout}
required = true
"""
RED = {"hookSpecificOutput": {"hookEventName": "Elicitation", "action": "accept", "content": {"colour": "red"}}}
SHORT = 4
"""Seconds after which a client gives a call up."""
LONG = 120
Run = Callable[..., str]


class GatewayPlace:
    """A home with a gateway before three servers; what passes between client and gateway is written down."""

    def __init__(self, home: Path) -> None:
        self.home, self.files = home, home / "files"
        self.files.mkdir()
        (self.files / "a.txt").write_text("hello")
        self.environ = {"PATH": f"{BINARIES}:{os.environ['PATH']}", "HOME": str(home), "HALTER_PERSON": "ada"}
        self.notes = home / "notes"
        modern = [str(Path(__file__).parent / "servers" / "modern.mjs"), str(BINARIES.parent), str(self.notes)]
        servers = {
            "modern": {"command": str(BINARIES / "node"), "args": modern},
            "everything": {"command": str(BINARIES / "mcp-server-everything"), "args": ["stdio"]},
            "files": {"command": str(BINARIES / "mcp-server-filesystem"), "args": [str(self.files)]},
        }
        self._servers: dict[str, Any] = {"mcpServers": servers}
        (home / "servers.json").write_text(json.dumps(self._servers))
        (home / "desk").mkdir()
        self.policy("gateway: {wait: 1s}\n")
        where = ["--agent", str(home / "desk"), "--config", str(home / "servers.json"), "--store", str(home / "s.db")]
        command = [sys.executable, "-m", "halter", "gateway", *where]
        start = home / "gateway.sh"
        start.write_text(f"#!/bin/sh\ntee -a {home / 'heard'} | {shlex.join(command)} | tee -a {home / 'said'}\n")
        start.chmod(0o755)
        self.gateway = str(start)
        self.typed = ["mcpdo", "--catalog", str(home / "catalog.json"), "--format", "json"]
        nothing = subprocess.DEVNULL
        self.quiet: Any = {"env": self.environ, "cwd": home, "stdin": nothing, "stdout": nothing, "stderr": nothing}

    def add_server(self, name: str, command: str, *args: str) -> None:
        self._servers["mcpServers"][name] = {"command": command, "args": args}
        (self.home / "servers.json").write_text(json.dumps(self._servers))

    def noted(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []

    def list_sent(self, method: str) -> list[Any]:
        """What the gateway sent to its client by itself."""
        results = map(json.loads, (self.home / "said").read_text().splitlines())
        return [each["params"] for each in results if each.get("method") == method]

    def policy(self, text: str) -> None:
        (self.home / "desk" / "agent.yaml").write_text(f"name: desk\n{text}")

    def halter(self, *words: str) -> str:
        where = ["--store", str(self.home / "s.db")]
        with Halter([*words, *where], env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL) as program:
            body, err = program.communicate()
        return (body + err).decode()

    def run(self, words: list[str], environ: Mapping[str, str] | None = None) -> str:
        process = subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=150,
            check=False,
        )
        return process.stdout.decode() or process.stderr.decode()

    def inspect(self, era: str, method: str, *words: str) -> Any:
        how = [
            "--connect-timeout",
            "60000",
            "--protocol-era",
            era,
            "--method",
            method,
            *words,
            "--format",
            "json",
            "-q",
        ]
        payload = json.loads(self.run(["mcp-inspector", "--cli", self.gateway, *how]))
        return payload.get("result", payload)

    def call(self, era: str, tool: str, **arguments: Any) -> Any:
        texts = [word for key, value in arguments.items() for word in ("--tool-arg", f"{key}={value}")]
        return self.inspect(era, "tools/call", "--tool-name", tool, *texts)

    def approve_all(self) -> None:
        for load in json.loads(self.halter("inbox", "--json")):
            self.halter("approve", load["decision"])

    @contextmanager
    def connected(self, era: str, seconds: int = LONG) -> Generator[Callable[..., Any]]:
        """Inspector's connection that outlives its commands; yields what types one."""
        entry: dict[str, Any] = {"command": self.gateway, "args": [], "requestTimeout": seconds * 1000}
        (self.home / "catalog.json").write_text(json.dumps({"mcpServers": {"guarded": entry}}))

        def type_words(*words: str) -> Any:
            text = self.run([*self.typed, *words])
            return json.loads(text[text.index("{") :])

        type_words("connect", "guarded", "--era", era, "--connect-timeout", "60000")
        try:
            yield partial(type_words, "--connection", "guarded")
        finally:
            type_words("disconnect", "guarded")
            type_words("daemon", "stop")

    @contextmanager
    def approving(self) -> Generator[None]:
        """A person who answers while a call is held."""

        def wait() -> None:
            while '"decision"' not in (text := self.halter("inbox", "--json")):
                time.sleep(2)
            self.halter("approve", json.loads(text)[0]["decision"])

        person = Thread(target=wait, daemon=True)
        person.start()
        yield
        person.join(LONG)

    def claude(self, provider: Provider, prompt: str, **more: str) -> Any:
        servers = {"guarded": {"command": self.gateway, "env": self.environ}}
        hook = {"type": "command", "command": f"echo '{json.dumps(RED)}'"}
        settings = {"hooks": {"Elicitation": [{"hooks": [hook]}]}}
        (self.home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        environ = {
            "ANTHROPIC_BASE_URL": provider.url,
            "ANTHROPIC_API_KEY": "none",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "MCP_TIMEOUT": "60000",
            **more,
        }
        words = ["claude", "-p", prompt, "--output-format", "json", "--allowedTools", "mcp__guarded"]
        words += ["--settings", json.dumps(settings)]
        words += ["--mcp-config", str(self.home / "mcp.json"), "--strict-mcp-config"]
        return json.loads(self.run(words, environ))

    def codex(self, provider: Provider, timeout: int = LONG) -> str:
        (self.home / ".codex").mkdir(exist_ok=True)
        config = CODEX.format(
            url=provider.url,
            program=self.gateway,
            timeout=timeout,
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


def run_claude(gateway_place: GatewayPlace, *made: tuple[str, Mapping[str, Any]], **more: str) -> str:
    """Have Claude Code make calls one after the other; return what its model was told of them."""
    steps = [calls((f"t{index}", f"mcp__guarded__{tool}", fields)) for index, (tool, fields) in enumerate(made)]
    with Provider([*steps, text("done")]) as provider:
        assert gateway_place.claude(provider, "go", **more)["result"] == "done"
        return json.dumps(provider.requests[-1]["messages"])


def run_codex(gateway_place: GatewayPlace, *made: tuple[str, Mapping[str, Any]], timeout: int = LONG) -> str:
    """Have Codex make calls one after the other; return what its model was told of them."""
    steps = [calls((f"t{index}", f"mcp__guarded/{tool}", fields)) for index, (tool, fields) in enumerate(made)]
    with Provider([*steps, text("done")]) as provider:
        output = gateway_place.codex(provider, timeout)
        assert "done" in output, output
        return json.dumps(provider.requests[-1]["input"])


RELAYED = (("modern__steps", {"what": "x"}), ("modern__ask", {"question": "Which?"}), ("modern__slow", {"what": "y"}))
NOT_MADE = "The call was not made: a person has to approve it"
ANSWERS: Mapping[Run, str] = {run_claude: "accept", run_codex: "decline"}
PROGRAMS = pytest.mark.parametrize("run", ANSWERS)


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
    result = place.call(era, "everything__trigger-long-running-operation", duration=1, steps=2)
    assert "completed" in result["content"][0]["text"]
    assert {outcome for _, outcome in place.calls()} == {"ok"}


def test_inspector_writes_only_what_a_person_has_approved(place: GatewayPlace) -> None:
    path, era = place.files / "b.txt", "legacy"
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
    result = place.inspect(era, "tools/call", *words)
    assert (result["ok"], result["toolErrors"], result["errors"]) == (5, 15, 0)


def test_claude_code_calls_through_the_gateway_and_waits_for_a_person(place: GatewayPlace) -> None:
    path = place.files / "c.txt"
    read = ("t1", "mcp__guarded__files__read_text_file", {"path": str(place.files / "a.txt")})
    write = ("t2", f"mcp__guarded__{WRITE}", {"path": str(path), "content": "by claude"})
    with Provider([calls(read), calls(write), text("done")]) as provider:
        assert place.claude(provider, "go")["result"] == "done"
        output = json.dumps(provider.requests[-1]["messages"])
        assert "hello" in output
        assert "pending decision" in output
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
            output = place.codex(provider)
            assert "done" in output, output
        place.approve_all()
    assert path.read_text() == "by codex"


@pytest.mark.parametrize("era", ERAS)
def test_inspector_is_asked_by_servers_of_both_protocols(place: GatewayPlace, era: str) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    with place.connected(era) as do:
        result = do("tools/call", "modern__ask", "question:=Which?")["elicitationPending"]
        assert result["message"] == "The server modern asks: Which?"
        reply = do("elicitation/respond", result["elicitationId"], "colour:=red")
        assert reply["content"][0]["text"] == "they like red"
        result = do("tools/call", "everything__trigger-elicitation-request")["elicitationPending"]
        assert result["message"].startswith("The server everything asks: ")
        reply = do("elicitation/respond", result["elicitationId"], '{"name": "Ada", "check": true}')
        assert "Name: Ada" in reply["content"][1]["text"]


@pytest.mark.parametrize("era", ERAS)
def test_inspector_hears_progress_and_what_it_gives_up_is_cancelled(place: GatewayPlace, era: str) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    with place.connected(era, SHORT) as do:
        result = do("tools/call", "modern__steps", "what:=x", "--tool-metadata", "progressToken=p1")
        assert result["content"][0]["text"] == "x arrived"
        assert [each["progress"] for each in place.list_sent("notifications/progress")] == [1, 2]
        assert "timed out" in json.dumps(do("tools/call", "modern__slow", "what:=y"))
    assert place.noted() == ["steps x true", "began y", "stopped y"]
    assert ("modern__slow", "unknown") in place.calls()


@pytest.mark.parametrize("era", ERAS)
def test_inspector_is_refused_a_changed_tool_until_a_person_agrees(place: GatewayPlace, era: str) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    with place.connected(era) as do:
        assert do("tools/call", "modern__act", "what:=x")["content"][0]["text"] == "did x"
        do("tools/call", "modern__change")
        assert do("tools/call", "modern__act", "what:=y")["error"]["code"] == "tool_not_found"
        assert "modern__act" not in [tool["name"] for tool in do("tools/list")["tools"]]
        place.approve_all()
        assert do("tools/call", "modern__act", "what:=z")["content"][0]["text"] == "did z"
    assert place.noted() == ["act x", "act z"]


@pytest.mark.parametrize("era", ERAS)
def test_a_call_of_inspector_that_a_person_approves_while_it_waits_is_made(place: GatewayPlace, era: str) -> None:
    place.policy("gateway: {wait: 2m}\n")
    path = place.files / "e.txt"
    with place.approving():
        result = place.call(era, WRITE, path=path, content="new")
        assert "Successfully wrote" in json.dumps(result), result
    assert path.read_text() == "new"
    # In the newer protocol it knows tasks, and asks how its own stands.
    assert ('"resultType":"task"' in (place.home / "said").read_text()) == (era == "modern")


@pytest.mark.parametrize("era", ERAS)
def test_inspector_is_sent_to_the_decision_s_page_and_a_person_answers_while_it_waits(
    place: GatewayPlace, era: str
) -> None:
    page = "https://halter.example"
    place.policy(f"gateway: {{wait: 2m, dashboard: '{page}'}}\n")
    path = place.files / "i.txt"
    with place.connected(era) as do:
        result = do("tools/call", WRITE, f"path:={path}", "content:=new")["elicitationPending"]
        assert (result["mode"], result["url"].startswith(f"{page}/decision/")) == ("url", True)
        with place.approving():
            reply = do("elicitation/respond", result["elicitationId"], "--done")
        assert "Successfully wrote" in json.dumps(reply), reply


@pytest.mark.parametrize("era", ERAS)
def test_inspector_calls_a_server_that_makes_tasks_of_calls(place: GatewayPlace, era: str) -> None:
    """In the newer protocol it gets tasks of the gateway's own, and answers their questions."""
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    place.add_server("tasks", sys.executable, str(TASK_SERVER), str(place.notes))
    with place.connected(era) as do:
        values = {"what": "j", "ends": "completed", "asks": ["a"], "lies": {}}
        result = do("tools/call", "tasks__job", json.dumps(values))["elicitationPending"]
        assert result["message"] == "The server tasks asks: Which?"
        reply = do("elicitation/respond", result["elicitationId"], "colour:=red")
        assert reply["content"][0]["text"] == "j is done red"
    assert [line.split(" {")[0] for line in place.noted()] == ["begin j", "tasks/update j"]
    assert ('"tasks/update"' in (place.home / "heard").read_text()) == (era == "modern")


def test_a_server_of_others_asks_the_agent_s_model_and_inspector_follows_its_resource(place: GatewayPlace) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    usage = {"input_tokens": 10, "output_tokens": 5}
    script = [{"text": "of the sea", "usage": usage, "repeat": True}]
    (place.home / "desk" / "script.yaml").write_text(json.dumps(script))
    place.policy("model: scripted\nscript: script.yaml\ngateway: {sampling: true}\n")
    uri = "demo://resource/dynamic/text/1"
    with place.connected("legacy") as do:
        result = do("tools/call", "everything__trigger-sampling-request", "prompt:=what?")
        assert "of the sea" in json.dumps(result), result
        # The command goes on until it is stopped.
        following = subprocess.Popen(
            [*place.typed, "--connection", "guarded", "resources/subscribe", uri], **place.quiet
        )
        try:
            do("tools/call", "everything__toggle-subscriber-updates")
            while not (results := place.list_sent("notifications/resources/updated")):
                time.sleep(0.2)
        finally:
            following.terminate()
            following.wait()
        assert results[0]["uri"] == uri
        # Its server logs under its own name.
        assert {each["logger"] for each in place.list_sent("notifications/message")} == {"everything"}


def test_claude_code_is_asked_hears_progress_cancels_and_is_answered_while_it_waits(place: GatewayPlace) -> None:
    path = place.files / "f.txt"
    place.policy("gateway: {wait: 2m}\n")
    with place.approving():
        run_claude(place, (WRITE, {"path": str(path), "content": "by claude"}))
    assert path.read_text() == "by claude"
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    text = run_claude(place, *RELAYED, MCP_TOOL_TIMEOUT=f"{SHORT}000")
    assert "they like red" in text
    assert "timed out" in text
    assert [each["progress"] for each in place.list_sent("notifications/progress")] == [1, 2]
    assert place.noted() == ["steps x true", "began y", "stopped y"]


def test_codex_is_asked_hears_progress_and_cancels(place: GatewayPlace) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    text = run_codex(place, *RELAYED, timeout=SHORT)
    # It has nobody there, and says no to every form.
    assert "they said decline" in text
    assert [each["progress"] for each in place.list_sent("notifications/progress")] == [1, 2]
    assert place.noted() == ["steps x true", "began y", "stopped y"]


@PROGRAMS
def test_programs_are_refused_a_changed_tool_until_a_person_agrees(place: GatewayPlace, run: Run) -> None:
    (place.home / "halter.yaml").write_text("mode: FULL\n")
    act = "modern__act"
    assert "did x" in run(place, (act, {"what": "x"}), ("modern__change", {}), (act, {"what": "y"}))
    assert place.noted() == ["act x"]
    # A later session is not told of it either.
    assert "did y" not in run(place, (act, {"what": "y"}))
    assert place.noted() == ["act x"]
    place.approve_all()
    assert "did z" in run(place, (act, {"what": "z"}))
    assert place.noted() == ["act x", "act z"]


@PROGRAMS
def test_programs_are_sent_to_the_decision_s_page_and_a_person_answers_while_they_wait(
    place: GatewayPlace, run: Run
) -> None:
    page = "https://halter.example"
    place.policy(f"gateway: {{wait: 2m, dashboard: '{page}'}}\n")
    approved, open_still = place.files / "g.txt", place.files / "h.txt"
    with place.approving():
        text = run(place, (WRITE, {"path": str(approved), "content": "new"}))
    assert NOT_MADE not in text
    assert "Successfully wrote" in text
    assert approved.read_text() == "new"
    # What the program answers by itself decides nothing: Claude Code's hook agrees, and Codex declines.
    place.policy(f"gateway: {{wait: 3s, dashboard: '{page}'}}\n")
    assert NOT_MADE in run(place, (WRITE, {"path": str(open_still), "content": "new"}))
    assert not open_still.exists()
    output = (place.home / "said").read_text()
    assert output.count('"mode":"url"') == output.count(f'"url":"{page}/decision/') == 2
    assert (place.home / "heard").read_text().count(f'"action":"{ANSWERS[run]}"') == 2
