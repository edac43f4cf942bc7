"""The injection brake of a session whose prompts are elsewhere: a program's own loop, or an agent behind a gateway.

Of such a session the journal has the task, the calls and their results, and the brake judges by these. What else a
model was shown is unknown: a value from there is one that no trusted place has said.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from halter.core import events as ev
from halter.core.messages import Text, ToolCall, ToolResult
from halter.core.ports import Stored
from halter.core.spec import ProvenanceMode, ResolvedPolicy
from halter.core.text import from_body
from halter.core.tools import Tool, ToolSpec
from halter.guard.brake import SessionBrake
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer


class CallBrake:
    """Folds the calls of one session, as they are made and from its journal."""

    def __init__(self, brake: SessionBrake) -> None:
        self.brake = brake
        self._calls: dict[str, ToolCall] = {}
        self._lock = asyncio.Lock()

    def add_task(self, task: str) -> None:
        """A person, or the program that speaks for them, said what is to be done."""
        if task:
            self.brake.add_text(Text(task, "person"))

    def order(self, tool: str) -> AbstractAsyncContextManager[None]:
        """Held while a call is judged and made, where each act counts when the next one is judged."""
        return self._lock if self.brake.keeps_order(tool) else nullcontext()

    def observe(self, call: Call, answer: Answer) -> None:
        """A call was answered; its own program, or its model, now knows what it returned."""
        said = ToolResult(call.id, call.tool, answer.outcome, answer.text)
        self.brake.observe(ToolCall(call.id, call.tool, from_body(call.arguments)), said)

    def recall(self, stored: Stored, body: bytes) -> None:
        """Fold an event that another process wrote. What is erased makes the brake stricter."""
        erased = not body and (stored.erased or stored.blob is not None)
        match stored.event:
            case ev.CallStarted() | ev.CallRefused() as decided:
                self._calls[decided.call] = ToolCall(decided.call, decided.tool, "" if erased else from_body(body))
                self.brake.apply(decided, None if erased else body)
            case ev.CallSettled() as settled:
                call = self._calls.pop(settled.call, None)
                if call is None:
                    return
                if erased:
                    self.brake.observe_erased(call)
                else:
                    said = ToolResult(call.id, call.tool, settled.outcome, settled.error or from_body(body))
                    self.brake.observe(call, said)
            case _:
                pass


def make_call_brake(mode: ProvenanceMode | None, policy: ResolvedPolicy, tools: Mapping[str, Tool]) -> CallBrake | None:
    """Make the brake of a session, where there is to be one. Its tools may grow."""
    if mode is None or mode == "off":
        return None
    return CallBrake(SessionBrake(mode, policy, _Specs(tools)))


class _Specs(Mapping[str, ToolSpec]):
    """The specs of tools, as they are at each moment."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools

    def __getitem__(self, name: str) -> ToolSpec:
        return self._tools[name].spec

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
