"""The provenance check of an external session: a program's own loop, or an agent behind a gateway.

The journal of such a session has the task, the calls and their results, and the check uses only these. Other text that
the model has read is unknown, and a value from it counts as untrusted.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from halter.core.events import CallRefused, CallSettled, CallStarted
from halter.core.messages import Text, ToolCall, ToolResult
from halter.core.ports import Stored
from halter.core.text import decode_body
from halter.core.tools import Tool, ToolSpec
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call
from halter.policy.evaluation import ResolvedPolicy
from halter.provenance.check import ProvenanceCheck
from halter.spec.policy import ProvenanceMode


class ExternalProvenanceCheck:
    """Folds the calls of one session, both as they are made and from its journal."""

    def __init__(self, provenance_check: ProvenanceCheck) -> None:
        self.provenance_check = provenance_check
        self._calls: dict[str, ToolCall] = {}
        self._lock = asyncio.Lock()

    def add_task(self, task: str) -> None:
        """Add the task from a person, or from the program that acts for them."""
        if task:
            self.provenance_check.add_text(Text(task, "person"))

    def order(self, tool: str) -> AbstractAsyncContextManager[None]:
        """Return the lock to hold while a call is judged and made. It does nothing if no call affects the next one."""
        return self._lock if self.provenance_check.keeps_order(tool) else nullcontext()

    def observe(self, call: Call, answer: Answer) -> None:
        """Add the answer of a call."""
        result = ToolResult(call.id, call.tool, answer.outcome, answer.text)
        self.provenance_check.observe(ToolCall(call.id, call.tool, decode_body(call.arguments)), result)

    def recall(self, stored: Stored, body: bytes) -> None:
        """Fold an event of another process. Erased text makes the check stricter."""
        is_erased = not body and (stored.erased or stored.blob is not None)
        match stored.event:
            case CallStarted() | CallRefused() as event:
                self._calls[event.call] = ToolCall(event.call, event.tool, "" if is_erased else decode_body(body))
                self.provenance_check.apply(event, None if is_erased else body)
            case CallSettled() as settlement:
                call = self._calls.pop(settlement.call, None)
                if call is None:
                    return
                if is_erased:
                    self.provenance_check.observe_erased(call)
                else:
                    result = ToolResult(call.id, call.tool, settlement.outcome, settlement.error or decode_body(body))
                    self.provenance_check.observe(call, result)
            case _:
                pass


def make_external_check(
    mode: ProvenanceMode | None, policy: ResolvedPolicy, tools: Mapping[str, Tool]
) -> ExternalProvenanceCheck | None:
    """Make the provenance check of a session; None if it is off. Tools may be added to `tools` later."""
    if mode is None or mode == "off":
        return None
    return ExternalProvenanceCheck(ProvenanceCheck(mode, policy, _Specs(tools)))


class _Specs(Mapping[str, ToolSpec]):
    """A live view of the specs of tools."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools

    def __getitem__(self, name: str) -> ToolSpec:
        return self._tools[name].spec

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
