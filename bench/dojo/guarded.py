"""The whole guard for one task of AgentDojo: journal, ledger, checks and decisions."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SECOND
from halter.core.ids import WorkerId
from halter.core.messages import Text, ToolCall, ToolResult
from halter.core.provenance import Declaration
from halter.core.tools import EffectStatus, Invalid, Output, Permit, PermitGate, Tool, ToolSpec, Valid
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import Call, SessionContext
from halter.models.prices import Prices
from halter.provenance.check import ProvenanceCheck
from halter.redaction.secrets import GivenSecrets
from halter.testing.world import World

Execute = Callable[[str, Mapping[str, Any]], str]
Decide = Callable[[], bool]


class SuiteTool:
    """A tool of a suite behind the guard's door."""

    def __init__(self, name: str, declaration: Declaration, execute: Execute) -> None:
        reads = declaration.reach == "none"
        self.spec = ToolSpec(
            name=name,
            description="",
            schema=b"{}",
            level="SAFE",
            effect="read" if reads else "write",
            declaration=declaration,
        )
        self._execute = PermitGate(execute)

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return Valid(msgspec.json.decode(arguments), arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        return Output(self._execute.open(permit)(self.spec.name, arguments.values))

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return "unknown"


class GuardedTask:
    """A session in memory and in virtual time that makes its calls through the guard."""

    def __init__(self, task: str, declarations: Mapping[str, Declaration], execute: Execute, *, lock: bool) -> None:
        settings = f"name: clerk\npolicy: {{provenance: ask, lock_after_denial: {str(lock).lower()}}}\n"
        self._policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(settings.encode(), "agent.yaml")))
        self._world = World(orderly=True, threads=False)
        self._tools: dict[str, Tool] = {
            name: SuiteTool(name, declaration, execute) for name, declaration in declarations.items()
        }
        self.brake = ProvenanceCheck("ask", self._policy, {name: tool.spec for name, tool in self._tools.items()})
        self.brake.add_text(Text(task, "person", trusted=True))
        self._made = 0
        self._world.run(self._begin())

    async def _begin(self) -> None:
        world = self._world
        await world.start("s", agent="clerk")
        lease = await acquire_lease(world.store, world.clock, WorkerId("bench"), await world.start("s"), SECOND)
        assert lease is not None  # noqa: S101 - no one else is there
        self._lease = lease
        self._guard = GuardRuntime(
            world.store, world.clock, redact=str, secrets=GivenSecrets({}), prices=Prices({}), simulates=None
        )

    def call(self, tool: str, arguments: Mapping[str, Any], agrees: Decide) -> str:
        """Make a call, with a decision if the guard asks; return the result as a model sees it."""
        return self._world.run(self._call(tool, arguments, agrees))

    async def _call(self, tool: str, arguments: Mapping[str, Any], agrees: Decide) -> str:
        policy, body = self._policy, msgspec.json.encode(arguments)
        self._made += 1
        context = SessionContext("s", "clerk", policy.phases[0], policy, str(policy.digest()))
        call = Call(f"s.c{self._made}", tool, body, provenance_check=self.brake)
        for attempt in range(3):
            answer = await self._guard.call(self._lease, context, call, self._tools, attempt)
            match answer:
                case Answer(outcome=outcome, text=text):
                    tool_call = ToolCall(call.id, tool, body.decode())
                    self.brake.observe(tool_call, ToolResult(call.id, tool, outcome, text))
                    return text
                case ApprovalRequired():
                    (decision,) = await list_pending_decisions(self._world.journal)
                    verdict = "approve" if agrees() else "deny"
                    await self._world.store.commit(answer_decision(decision, verdict, "ada", self._world.ids.make()))
                case _:
                    raise AssertionError("Nothing here is held.")
        raise AssertionError(f"{tool} was answered and is asked about again.")

    def close(self) -> None:
        self._world.close()
