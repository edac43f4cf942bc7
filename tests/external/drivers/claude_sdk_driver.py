"""Claude Agent SDK: the SDK's own program, offline, with a provider on 127.0.0.1 that a mind speaks for."""
# pyright: basic, reportMissingImports=false

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, tool

from halter.adapters.claude_sdk import GuardedClaude, guard
from tests.clients.providers import Provider, Step, calls, text
from tests.external.driver import TASK, Driver, Mind

PREFIX = "mcp__till__"
TOOLS = ("pay", "read_mail", "send_mail")


class MindProvider(Provider):
    def __init__(self, mind: Mind) -> None:
        super().__init__([text("")])
        self._mind = mind

    def next(self, body: Mapping[str, Any]) -> Step:
        if not body.get("tools"):
            return text("A title")
        blocks = [block for message in body["messages"] for block in message["content"] if isinstance(block, dict)]
        results = [json.dumps(block["content"]) for block in blocks if block["type"] == "tool_result"]
        # A call that waits for a person ends the query: the model is told so, and makes it again.
        done = [each for each in results if "Repeat the same call after the decision" not in each]
        turn = self._mind.think_in_thread(done, body["max_tokens"])
        if turn.name:
            return calls((f"toolu_{len(results) + 1}", PREFIX + turn.name, turn.arguments))
        return text(turn.text)


class ClaudeSDK(Driver):
    package = "claude_agent_sdk"
    LACKS: ClassVar = {
        "limit": "Claude Code makes the model requests: `halter proxy` holds them.",
        "cap": "As above: tests/adapters/test_claude_sdk.py has the cap of calls.",
        "requests": "As above.",
        "run_blocking": "The SDK has event loops alone.",
        "pulled_stream": "Claude Code is a program of its own, and runs ahead of the reader of its messages.",
        "repeat": "Claude Code keeps the results of calls itself, and a repeated call is a new one.",
        "run_structured": "Claude Code makes the model requests.",
        "hand_off": "Subagents of Claude Code are its own: their calls pass the same hooks.",
    }

    def make_agent(self, provider: Provider) -> GuardedClaude:
        @tool("pay", "Pay an amount.", {"amount": int})
        async def pay(fields: dict[str, Any]) -> dict[str, Any]:
            return {"content": [{"type": "text", "text": self.pay(**fields)}]}

        @tool("read_mail", "Read the mail.", {})
        async def read_mail(fields: dict[str, Any]) -> dict[str, Any]:
            return {"content": [{"type": "text", "text": self.read_mail()}]}

        @tool("send_mail", "Send a mail.", {"to": str})
        async def send_mail(fields: dict[str, Any]) -> dict[str, Any]:
            return {"content": [{"type": "text", "text": self.send_mail(**fields)}]}

        home = self.desk.file.parent / "home"
        home.mkdir(exist_ok=True)
        quiet = ("DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
        environ = {"ANTHROPIC_BASE_URL": provider.url, "ANTHROPIC_API_KEY": "none", **dict.fromkeys(quiet, "1")}
        options = ClaudeAgentOptions(
            model="claude-haiku-5-5",
            tools=[],
            mcp_servers={"till": create_sdk_mcp_server("till", tools=[pay, read_mail, send_mail])},
            allowed_tools=[PREFIX + name for name in TOOLS],
            cwd=home,
            env={**environ, "HOME": str(home), "CLAUDE_CONFIG_DIR": str(home)},
        )
        tools = {PREFIX + name: options for name, options in self.tool_options.items()}
        return guard(options, guard=self.guard, tools=tools)

    async def query(self, prompt: str, **options: Any) -> ResultMessage:
        with MindProvider(self.mind) as provider:
            messages = [message async for message in self.make_agent(provider).query(prompt, **options)]
        (result,) = [message for message in messages if isinstance(message, ResultMessage)]
        return result

    async def run(self, conversation: str = "") -> str:
        return (await self.query(TASK)).result or ""

    async def read(self) -> AsyncGenerator[str]:
        with MindProvider(self.mind) as provider:
            async for message in self.make_agent(provider).query(TASK):
                yield str(message)

    async def ask(self) -> Any:
        return (await self.query(TASK)).session_id

    async def resume(self, state: Any) -> str:
        return (await self.query("Go on.", resume=state)).result or ""

    def save(self, state: Any) -> bytes:
        return state.encode()

    def load(self, saved: bytes) -> Any:
        return saved.decode()
