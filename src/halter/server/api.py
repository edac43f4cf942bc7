"""The HTTP API: every operation of the registry, for programs. Its description is at `/api/v1/openapi.json`.

Within a version, operations, parameters that may be left out, and members of answers may be added. None is removed,
renamed, given another type or meaning, or required where it was not. Paths without a version mean version 1 for ever.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import JSONResponse, Response, StreamingResponse

from halter import __version__
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.errors import ConfigError, explain_extra
from halter.core.public_json import declare_decimal_numbers
from halter.core.text import clean
from halter.operations.actor import CLEANED, Operation, fail_invalid
from halter.operations.registry import OPERATIONS, READS, WRITES
from halter.runtime.webhooks import (
    UNKNOWN_SENDER,
    Delivery,
    HookAccepted,
    HookChallenged,
    HookRejected,
    WebhookReceiver,
)
from halter.server.auth import API, VERSIONED_API
from halter.server.listener import listen, serve_asgi
from halter.server.middleware import STREAM_PATH, TOO_MANY_REQUESTS, VERSION_KEY, Attempts, ServerLimits, locate_scope
from halter.server.responses import ERRORS, HIDDEN_ROUTE, JSON, Error, add_errors, encode_answer, make_request_desk
from halter.server.stream import add_streams
from halter.state.trace_context import serve_caller

LINES: Final = "application/x-ndjson"
READ: Final = tuple((each.path, each.run, each.result) for each in READS)
DO: Final = tuple((each.path, each.run, each.result) for each in WRITES)
_REF: Final = "#/components/schemas/{name}"
_BOOLS: Final = {"yes": "true", "on": "true", "y": "true", "t": "true", "no": "false", "off": "false"}


def make_api() -> FastAPI:
    """Make the API: routes, streams and error responses."""
    api = FastAPI(title="Halter", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_errors(api)
    _add_routes(api)
    add_streams(api)
    _add_description(api)
    return api


def description(*, versioned: bool = False) -> dict[str, Any]:
    """Return the OpenAPI description without a server, with versioned paths or those without."""
    return _build_document(make_api(), versioned=versioned)


def _build_document(api: FastAPI, *, versioned: bool) -> dict[str, Any]:
    document = api.openapi()
    if not versioned:
        return document
    return {
        **document,
        "paths": {VERSIONED_API + path.removeprefix(API): each for path, each in document["paths"].items()},
    }


def _add_description(api: FastAPI) -> None:
    async def respond_description(request: Request) -> Response:
        return JSONResponse(_build_document(api, versioned=VERSION_KEY in request.scope))

    api.get(f"{API}/openapi.json", **HIDDEN_ROUTE)(respond_description)


@cache
def _make_schemas() -> tuple[Sequence[Any], Mapping[str, Any], Mapping[str, Any]]:
    """Make the schemas of results, of their parts and of parameters. Cached: they take most of an API's start."""
    kinds = [*(each.result for each in OPERATIONS), Error]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    _, inputs = msgspec.json.schema_components([each.parameters for each in OPERATIONS], ref_template=_REF)
    typed_schemas = {name: _add_types(each) for name, each in inputs.items()}
    return declare_decimal_numbers(list(schemas)), declare_decimal_numbers(components), typed_schemas


def _add_routes(api: FastAPI) -> None:
    schemas, components, inputs = _make_schemas()
    for operation, schema in zip(OPERATIONS, schemas, strict=False):
        answer = {"description": "Done", "content": {LINES if operation.lines else JSON: {"schema": schema}}}
        parameters_schema = inputs[operation.parameters.__name__]
        api.add_api_route(
            f"/api{operation.path}",
            _handler(operation),
            methods=["POST" if operation.writes else "GET"],
            response_model=None,
            operation_id=operation.name,
            summary=operation.summary,
            responses={200: answer, **ERRORS},
            openapi_extra={
                "security": [{"token": []}],
                "x-role": operation.role,
                "x-command": operation.command,
                **_build_parameters(operation, parameters_schema),
            },
        )
    parameter_names = {operation.parameters.__name__ for operation in OPERATIONS}
    api.openapi = _make_openapi(
        api, {**{name: each for name, each in inputs.items() if name not in parameter_names}, **components}
    )


def _add_types(schema: dict[str, Any]) -> dict[str, Any]:
    fields = schema.get("properties", {})
    typed_fields = {name: {"type": "string", **field} if "enum" in field else field for name, field in fields.items()}
    return {**schema, "properties": typed_fields}


def _build_parameters(operation: Operation, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Describe parameters: those in the path, and the rest in the query or, for a write, in the body."""
    fields, required_names = schema.get("properties", {}), schema.get("required", ())
    parameters = [
        {
            "name": name,
            "in": "path" if name in operation.path_parameters else "query",
            "required": name in required_names,
        }
        | ({"description": text} if (text := field.get("description")) else {})
        | {"schema": field}
        for name, field in fields.items()
        if name in operation.path_parameters or not operation.writes
    ]
    if not operation.writes:
        return {"parameters": parameters}
    body_fields = {name: field for name, field in fields.items() if name not in operation.path_parameters}
    body = {
        "type": "object",
        "properties": body_fields,
        "required": [name for name in body_fields if name in required_names],
        "additionalProperties": False,
    }
    return {
        "parameters": parameters,
        "requestBody": {"required": bool(body["required"]), "content": {JSON: {"schema": body}}},
    }


def _handler(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        actor = make_request_desk(request)
        actor.require_role(operation.role, operation.summary[:1].lower() + operation.summary[1:])
        parameters = msgspec.structs.asdict(await _parameters(operation, request))
        if operation.lines:
            rows = operation.run(actor, **parameters)
            first_row = await anext(rows, None)
            headers = {"Content-Disposition": f'attachment; filename="{operation.lines}"'}
            return StreamingResponse(_lines(first_row, rows), 200, headers, LINES)
        return Response(encode_answer(await operation.run(actor, **parameters)), media_type=JSON)

    return handle


async def _lines(first_row: object, remaining: AsyncGenerator[object]) -> AsyncGenerator[bytes]:
    """Yield the first row, which was read before the response so that an error gets its status, then the others."""
    async with aclosing(remaining) as rows:
        if first_row is not None:
            yield encode_answer(first_row) + b"\n"
        async for row in rows:
            yield encode_answer(row) + b"\n"


async def _parameters(operation: Operation, request: Request) -> msgspec.Struct:
    """Parse the parameters of an operation. A body may not repeat a parameter of the path."""
    names = operation.parameters.__struct_fields__
    if operation.writes:
        values = await _body(request)
        if operation.path_parameters & values.keys():
            names = ", ".join(sorted(operation.path_parameters & values.keys()))
            fail_invalid(f"{names} belongs in the path, not in the body.")
    else:
        values = {name: text for name, text in request.query_params.items() if name in names}
        for field in msgspec.structs.fields(operation.parameters):
            if field.name in values and _is_bool(field.type):
                values[field.name] = _BOOLS.get(values[field.name].lower(), values[field.name])
    try:
        parameters = msgspec.convert({**values, **request.path_params}, operation.parameters, strict=operation.writes)
    except (msgspec.ValidationError, RecursionError) as error:
        fail_invalid(f"{error}.")
    _require_storable_text(parameters)
    return parameters


def _is_bool(kind: Any) -> bool:
    return getattr(kind, "__origin__", kind) is bool


async def _body(request: Request) -> dict[str, Any]:
    data = await request.body()
    if not data:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        fail_invalid("The body must be JSON, with the header `Content-Type: application/json`.")
    try:
        return msgspec.convert(json.loads(data), dict[str, Any] | None) or {}
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        fail_invalid(f"The body is not a JSON object: {error}.")


def _require_storable_text(parameters: msgspec.Struct) -> None:
    """Reject characters that a store cannot hold, except in fields that are cleaned later."""
    for field in msgspec.structs.fields(parameters):
        value = getattr(parameters, field.name)
        if isinstance(value, msgspec.Struct):
            _require_storable_text(value)
        elif isinstance(value, str) and clean(value) != value and not _is_cleaned(field.type):
            fail_invalid(f"{field.name} contains invalid characters.")


def _is_cleaned(kind: Any) -> bool:
    metadata = getattr(kind, "__metadata__", ())
    return any(isinstance(each, msgspec.Meta) and CLEANED in (each.extra or ()) for each in metadata)


def _make_openapi(api: FastAPI, components: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = get_openapi(title=api.title, version=api.version, description=__doc__, routes=api.routes)
            sections = document.setdefault("components", {})
            sections["schemas"] = {**sections.get("schemas", {}), **components}
            sections["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            # FastAPI describes a stream by `itemSchema`, which only OpenAPI 3.2 knows.
            document["paths"][STREAM_PATH]["get"]["responses"]["200"]["content"] = {EVENTS: {"schema": _STREAM_SCHEMA}}
            api.openapi_schema = document
        return api.openapi_schema

    return openapi


EVENTS: Final = "text/event-stream"
_STREAM_SCHEMA: Final = {
    "type": "string",
    "description": "Server-sent events, each with `event`, `data` (JSON) and mostly an `id`.",
}
HOST: Final = "127.0.0.1"
PORT: Final = 8765
UPLOAD_TIMEOUT: Final = 30 * SECOND
"""Longest time for a body to arrive."""


def make_hooks_api(hooks: WebhookReceiver, clock: Clock) -> "FastAPI":
    """Make a server for webhook deliveries only."""
    from fastapi import FastAPI

    api = FastAPI(title="Halter webhooks", docs_url=None, redoc_url=None, openapi_url=None)
    add_hooks(api, lambda: hooks, clock, Attempts(ServerLimits().failures))
    return api


def add_hooks(api: "FastAPI", find: Callable[[], WebhookReceiver], clock: Clock, attempts: Attempts) -> None:
    """Add `POST /hooks/AGENT/NAME`. Wrong tokens and signatures are counted in `attempts`."""
    from fastapi import Request

    async def receive(agent: str, name: str, request: Request) -> JSONResponse:
        hooks, headers = find(), dict(request.headers)
        origin, credential, now = locate_scope(request.scope), hooks.name_credential(agent, name, headers), clock.now()
        if wait := attempts.find_delay(origin, credential, now):
            return JSONResponse({"error": TOO_MANY_REQUESTS}, 429, {"Retry-After": str(max(1, -(-wait // SECOND)))})
        limit = hooks.max_bytes(agent, name, headers)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT / SECOND):
                body = await _hook_body(request, limit + 1) if limit else b""
        except TimeoutError:
            return JSONResponse({"error": "The body took too long to arrive."}, 408, {"Connection": "close"})
        with serve_caller(request.headers.getlist("traceparent")):
            answer = await hooks.receive(agent, name, Delivery(headers, body))
        if isinstance(answer, HookRejected) and answer.status == UNKNOWN_SENDER.status:
            attempts.count_failure(origin, credential, now)
        elif len(body) <= limit:
            attempts.right(origin, credential)
        match answer:
            case HookAccepted(session, repeated):
                return JSONResponse({"session": session, "repeated": repeated}, 200 if repeated else 202)
            case HookChallenged(challenge):
                return JSONResponse({"challenge": challenge})
            case HookRejected(status, sentence, retry_after):
                wait = None if retry_after is None else {"Retry-After": str(max(1, retry_after // SECOND))}
                return JSONResponse({"error": sentence}, status, wait)

    # FastAPI cannot resolve the annotations of a nested function by name.
    receive.__annotations__ = {"agent": str, "name": str, "request": Request, "return": JSONResponse}
    api.post("/hooks/{agent}/{name}", **HIDDEN_ROUTE)(receive)


async def _hook_body(request: Any, limit: int) -> bytes:
    """Read a body up to `limit` bytes."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) >= limit:
            break
    return body[:limit]


async def serve_hooks(hooks: WebhookReceiver, host: str = HOST, port: int = PORT) -> None:
    """Serve deliveries until cancelled. Raises ConfigError without the extra `server`, or if the port is taken."""
    try:
        api = make_hooks_api(hooks, SystemClock())
    except ImportError:
        raise ConfigError(explain_extra("server", "A webhook")) from None
    await serve_asgi(api, listen(host, port))
