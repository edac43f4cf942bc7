"""A desk with a hooked program before it: a gate in virtual time, and events as Claude Code and Codex send them."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from halter.core.ids import make_worker_id, session_stream
from halter.core.ports import Stored, read_stream
from halter.core.vocabulary import Verdict
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.hooks.gate import HookGate
from halter.hooks.install import write_policy
from halter.hooks.protocol import HookReply
from halter.hooks.registry import HookedProgram, HookFolder
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state.receipt import Receipt, make_receipt
from halter.testing.world import World

PERSON = "ada"
AGENT = "claude-code"
SESSION = "0b9f"
SECRET = "sk-ant-api03-" + "a1b2c3d4e5" * 9 + "abc-AA"


def event(
    name: str, tool: str = "", arguments: Mapping[str, Any] | None = None, call: str = "toolu_1", **more: Any
) -> bytes:
    """One event as Claude Code sends it."""
    fields: dict[str, Any] = {
        "session_id": SESSION,
        "transcript_path": "/home/ada/.claude/projects/x.jsonl",
        "cwd": "/home/ada/project",
        "hook_event_name": name,
        "permission_mode": "default",
    }
    if tool:
        fields |= {"tool_name": tool, "tool_input": dict(arguments or {}), "tool_use_id": call}
    return json.dumps(fields | more).encode()


def bash(command: str, call: str = "toolu_1", **more: Any) -> bytes:
    return event("PreToolUse", "Bash", {"command": command, "description": f"Run {call}"}, call, **more)


def bash_done(command: str, call: str = "toolu_1", out: str = "", **more: Any) -> bytes:
    response = {"stdout": out, "stderr": "", "interrupted": False, "isImage": False}
    return event("PostToolUse", "Bash", {"command": command}, call, tool_response=response, **more)


def verdict(reply: HookReply) -> str:
    """What a reply to PreToolUse means to Claude Code; an exit code of 2 blocks."""
    if reply.code == 2:
        return "block"
    assert reply.code == 0
    return json.loads(reply.out).get("hookSpecificOutput", {}).get("permissionDecision", "")


def reason(reply: HookReply) -> str:
    return json.loads(reply.out)["hookSpecificOutput"]["permissionDecisionReason"]


class HookDesk:
    """A gate with its person. A new gate is what a restarted server has: only the journal."""

    def __init__(self, app: Runtime, folder: HookFolder) -> None:
        self.app = app
        self.folder = folder
        self.gate = self.restarted()

    def restarted(self) -> HookGate:
        self.gate = HookGate(self.app, make_worker_id("hooks", self.app.ids), self.folder)
        return self.gate

    async def ask(
        self, data: bytes, *, program: str = "claude", agent: str = AGENT, attended: bool = True
    ) -> HookReply:
        return await self.gate.reply(program, agent, data, attended=attended)

    async def waiting(self) -> list[PendingDecision]:
        return list(await list_pending_decisions(self.app.store, self.app.clock.now()))

    async def decide(self, answer: Verdict) -> None:
        (pending_decision,) = await self.waiting()
        await self.app.store.commit(answer_decision(pending_decision, answer, PERSON, self.app.ids.make()))

    async def events(self, session: str = f"{AGENT}-{SESSION}") -> list[Stored]:
        return await read_stream(self.app.store, session_stream(session))

    async def kinds(self) -> list[str]:
        return [stored.kind for stored in await self.events()]

    async def receipt(self) -> Receipt:
        return make_receipt(await self.events())


@asynccontextmanager
async def open_desk(
    world: World | None, home: Path, policy: str = "", fleet: str = "", **terms: Any
) -> AsyncGenerator[HookDesk]:
    """Open a desk: `policy` is added to the agent's file, `terms` to what was said when the hooks were installed."""
    environ = {"HALTER_PERSON": PERSON, "HALTER_HOOKS": str(home / "hooks")}
    if fleet:
        (home / "halter.yaml").write_text(fleet)
        environ["HALTER_FLEET"] = str(home / "halter.yaml")
    settings = read_settings(environ, home, "memory:")
    folder = HookFolder(home / "hooks")
    agent, program = terms.pop("agent", AGENT), terms.pop("program", "claude")
    path = write_policy(folder, agent, "Claude Code")
    with (path / "agent.yaml").open("a") as file:
        file.write(policy)
    folder.save(HookedProgram(agent=agent, program=program, folder=str(path), **{"wait_seconds": 0, **terms}))
    async with open_runtime(settings, None if world is None else world.clock, environ) as app:
        yield HookDesk(app, folder)
