"""The HTTP API: the same things as at the command line, for programs. Its description is at `/api/openapi.json`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from halter import __version__
from halter.app.desk import Who, looking, money, steering
from halter.app.desk.decisions import Said
from halter.app.desk.policy import StorePolicy
from halter.app.desk.workers import Worker
from halter.app.keeping import Left
from halter.app.planned import Plan
from halter.app.report import Report
from halter.core.public_json import with_numbers
from halter.core.rows import HaltRow, RuleRow, SessionRow
from halter.server import doing, reading
from halter.server.answers import ERRORS, JSON, Error, add_errors, answering
from halter.server.doing import Done
from halter.server.stream import add_streams
from halter.state.audit import AuditEntry
from halter.state.receipt import Receipt
from halter.state.receipt_lines import TurnLine

Handler = Callable[..., Awaitable[object]]
OBJECTS: Final = list[dict[str, Any]]
LINES: Final = "application/x-ndjson"

READ: Final[Sequence[tuple[str, Handler, Any]]] = (
    ("/whoami", reading.whoami, Who),
    ("/home", reading.home, reading.Home),
    ("/fleet", reading.fleet, list[looking.AgentLine]),
    ("/workers", reading.workers, list[Worker]),
    ("/sessions", reading.sessions, list[SessionRow]),
    ("/sessions/{session}", reading.session, SessionRow),
    ("/sessions/{session}/events", reading.events, OBJECTS),
    ("/sessions/{session}/receipt", reading.receipt, Receipt),
    ("/sessions/{session}/turns", reading.turns, list[TurnLine]),
    ("/sessions/{session}/hot-state", reading.hot_state, looking.HotState),
    ("/decisions", reading.decisions, OBJECTS),
    ("/halts", reading.halts, list[HaltRow]),
    ("/budgets", reading.budgets, money.Budgets),
    ("/policy", reading.policy, StorePolicy),
    ("/spending", reading.spending, list[looking.Part]),
    ("/triggers", reading.plans, list[Plan]),
    ("/findings", reading.findings, list[Left]),
    ("/proposals", reading.proposals, list[Left]),
    ("/rules", reading.always, list[RuleRow]),
    ("/audit", reading.audit, list[AuditEntry]),
    ("/audit/export", reading.export_audit, AuditEntry),
    ("/report", reading.report, Report),
)
DO: Final[Sequence[tuple[str, Handler, Any]]] = (
    ("/decisions/{decision:path}/approve", doing.approve, Said),
    ("/decisions/{decision:path}/deny", doing.deny, Said),
    ("/halts", doing.halt, Done),
    ("/halts/resume", doing.resume, Done),
    ("/sessions/{session}/cancel", doing.cancel, steering.Cancelled),
    ("/sessions/{session}/messages", doing.tell, Done),
    ("/agents/{agent}/switch", doing.switch, Done),
    ("/budgets/cap", doing.change_cap, Done),
    ("/triggers/{agent}/{name}/retry", doing.retry, Done),
    ("/triggers/{agent}/{name}/end", doing.end_trigger, Done),
    ("/findings/{finding}/settle", doing.settle_finding, Done),
    ("/proposals/{proposal}/settle", doing.settle_proposal, Done),
    ("/rules/{rule}/end", doing.end_rule, Done),
)
DOERS: Final = frozenset(handler for _, handler, _ in DO)
_REF: Final = "#/components/schemas/{name}"


def new_api() -> FastAPI:
    """Make the API: all routes, the streams, and how a no is said."""
    api = FastAPI(title="Halter", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")
    add_errors(api)
    _add_routes(api)
    add_streams(api)
    return api


def description() -> dict[str, Any]:
    """Describe the API as `/api/openapi.json` does, without a server."""
    return new_api().openapi()


def _add_routes(api: FastAPI) -> None:
    kinds = [kind for _, _, kind in (*READ, *DO)]
    schemas, components = msgspec.json.schema_components([*kinds, Error], ref_template=_REF)
    schemas, components = with_numbers(list(schemas)), with_numbers(components)
    for (path, handler, _), schema in zip((*READ, *DO), schemas, strict=False):
        kind = LINES if handler is reading.export_audit else JSON
        answer = {"description": "Done", "content": {kind: {"schema": schema}}}
        api.add_api_route(
            f"/api{path}",
            answering(handler),
            methods=["POST" if handler in DOERS else "GET"],
            response_model=None,
            summary=(handler.__doc__ or "").partition("\n")[0].rstrip("."),
            responses={200: answer, **ERRORS},
            openapi_extra={"security": [{"token": []}]},
        )
    api.openapi = _described(api, components)


def _described(api: FastAPI, components: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            made = get_openapi(title=api.title, version=api.version, description=__doc__, routes=api.routes)
            parts = made.setdefault("components", {})
            parts["schemas"] = {**parts.get("schemas", {}), **components}
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            api.openapi_schema = made
        return api.openapi_schema

    return openapi
