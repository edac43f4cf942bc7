"""A sensor's calls: each is prepared once and then repeated, and a pure read writes no event."""

from collections.abc import Mapping

import msgspec

from halter.core.clock import Clock
from halter.core.ports import Lease
from halter.core.tools import Tool
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_preparer import ToolExecution
from halter.guard.call_request import CallRequest
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call, SessionContext
from halter.guard.tool_door import ToolDoor


class _PreparedRead(msgspec.Struct, frozen=True):
    context: SessionContext
    tool: Tool | None
    request: CallRequest
    execution: ToolExecution | None


class SensorReads:
    """Makes the calls of sensors through the tool door."""

    def __init__(self, door: ToolDoor, clock: Clock) -> None:
        self._tool_door = door
        self._clock = clock
        self._prepared: dict[tuple[str, bytes, int | None], _PreparedRead] = {}

    async def call(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool]
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Make a sensor's call. A call that does more than read is made and recorded like any other."""
        tool, key = tools.get(call.tool), (call.tool, call.arguments, call.timeout)
        read = self._prepared.get(key)
        if read is None or read.context is not context or read.tool is not tool:
            preparer = self._tool_door.preparer
            prepared = await preparer.prepare(context, call, tool)
            if isinstance(prepared, ApprovalRequired) or not prepared.request.is_pure_read:
                return await self._tool_door.call(lease, context, call, tools)
            execution = preparer.make_execution(context, prepared.tool, prepared.arguments, call)
            read = self._prepared[key] = _PreparedRead(context, tool, prepared.request, execution)
        request = msgspec.structs.replace(read.request, call=call.id, now=self._clock.now())
        return await self._tool_door.run_read_only(lease, request, read.execution)
