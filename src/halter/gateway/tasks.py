"""Long calls as tasks, for clients that support the protocol's tasks extension and poll their status.

Such a client gets a task immediately where other clients wait: when a person has to decide, and when the server itself
has made a task of the call. The task lasts until the call ends. The call keeps its hold, and only this client's session
can see the task. The gateway never shows a server's own task: the client sees the gateway's task.
"""

import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, MISSING_REQUIRED_CLIENT_CAPABILITY, InputResponses, RequestParams
from pydantic import Field

from halter.core.clock import SECOND
from halter.gateway.calls import ClientCall, Context, speaks_modern
from halter.tools.mcp_session import TASKS_EXTENSION

MAX_TASKS: Final = 100
POLL_INTERVAL_MS: Final = 2000
UNKNOWN_TASK: Final = "Halter: this session has no such task."

Render = Callable[[ClientCall], dict[str, Any]]


class TaskRequestParams(RequestParams):
    task_id: str = Field(alias="taskId")


class UpdateTaskRequestParams(TaskRequestParams):
    input_responses: InputResponses = Field(alias="inputResponses")


def knows_tasks(context: Context) -> bool:
    capabilities = context.session.client_capabilities
    extensions = capabilities.extensions if capabilities is not None else None
    return speaks_modern(context) and TASKS_EXTENSION in (extensions or {})


def require_tasks(context: Context) -> None:
    """Raise MCPError unless the client declares in this request that it supports tasks."""
    if not knows_tasks(context):
        data: dict[str, Any] = {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
        raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, f"Halter: {context.method} needs {TASKS_EXTENSION}.", data)


class SessionTasks:
    """The tasks of one client's session, by unguessable ids."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._tasks: dict[str, tuple[ClientCall, int]] = {}

    def add(self, call: ClientCall) -> dict[str, Any]:
        """Make a task of a call, and describe it for its client."""
        for key, (existing, _) in [*self._tasks.items()]:
            if len(self._tasks) >= MAX_TASKS and existing.task is not None and existing.task.done():
                del self._tasks[key]
        if len(self._tasks) >= MAX_TASKS:
            raise MCPError(INTERNAL_ERROR, f"Halter: too many tasks ({MAX_TASKS} are running). Try again later.")
        key = secrets.token_urlsafe(32)
        self._tasks[key] = (call, self._now())
        return {**self._make_task_object(key, "working", call), "resultType": "task"}

    def get(self, key: str, render: Render) -> dict[str, Any]:
        call, _ = self._find(key)
        task = call.task
        if task is None or not task.done():
            if input_requests := call.list_input_requests():
                return {**self._make_task_object(key, "input_required", call), "inputRequests": input_requests}
            return self._make_task_object(key, "working", call)
        if task.cancelled():
            return self._make_task_object(key, "cancelled", call)
        if error := task.exception():
            error_fields = {"code": INTERNAL_ERROR, "message": f"Halter: {error}"}
            return {**self._make_task_object(key, "failed", call), "error": error_fields}
        return {**self._make_task_object(key, "completed", call), "result": render(call)}

    def update(self, key: str, responses: Mapping[str, Any]) -> None:
        call, _ = self._find(key)
        call.apply_responses(responses)

    async def cancel(self, key: str) -> None:
        call, _ = self._find(key)
        await call.cancel()

    def _find(self, key: str) -> tuple[ClientCall, int]:
        if key not in self._tasks:
            raise MCPError(INVALID_PARAMS, UNKNOWN_TASK)
        return self._tasks[key]

    def _make_task_object(self, key: str, status: str, call: ClientCall) -> dict[str, Any]:
        message = _explain(call) if status == "working" else ""
        return {
            "taskId": key,
            "status": status,
            **({"statusMessage": message} if message else {}),
            "createdAt": _format(self._tasks[key][1]),
            "lastUpdatedAt": _format(self._now()),
            "ttlMs": None,
            "pollIntervalMs": POLL_INTERVAL_MS,
            "resultType": "complete",
        }


def _explain(call: ClientCall) -> str:
    if call.waits_for:
        return f"Waiting for a person to decide {call.waits_for}."
    return f"The server {call.server} says: {call.status}" if call.status else ""


def _format(moment: int) -> str:
    return datetime.fromtimestamp(moment / SECOND, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
