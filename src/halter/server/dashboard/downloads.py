"""What can be taken along: the audit as JSON lines, and a session with its journal and its receipt."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from halter import __version__
from halter.app import App
from halter.app.desk import Desk
from halter.app.desk.auditing import Wanted
from halter.app.desk.auditing import audit as audit_of
from halter.app.proof import as_written
from halter.core.errors import HalterError, NotDone
from halter.core.public_json import public_json
from halter.server.dashboard.audit import wanted_of
from halter.server.dashboard.legible import file_name
from halter.server.entrance import WHO
from halter.state.audit import entry

LINES = "application/x-ndjson"
STATUS = {"wrong": 422, "missing": 404, "refused": 409, "forbidden": 403}


def downloads(api: FastAPI, app: App) -> None:
    """Add the two ways to take something along."""

    async def audit(request: Request) -> Response:
        desk = Desk(app, request.scope[WHO])
        try:
            wanted = wanted_of(dict(request.query_params), app.clock.now())
        except HalterError as error:
            return _refused(error)
        return StreamingResponse(_audit(desk, wanted), media_type=LINES, headers=_as_file("audit.jsonl"))

    async def session(name: str, request: Request) -> Response:
        desk = Desk(app, request.scope[WHO])
        try:
            row = await desk.session(name)
        except HalterError as error:
            return _refused(error)
        lines = await app.store.study(lambda view: _journal(view, [row.session], app.clock.now()))
        return Response(lines, media_type=LINES, headers=_as_file(f"{file_name(row.session)}.jsonl"))

    api.get("/download/audit", include_in_schema=False, response_model=None)(audit)
    api.get("/download/session/{name}", include_in_schema=False, response_model=None)(session)


def _as_file(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"', "X-Content-Type-Options": "nosniff"}


def _refused(error: HalterError) -> Response:
    status = STATUS[error.why] if isinstance(error, NotDone) else 422
    return JSONResponse({"error": str(error)}, status)


async def _audit(desk: Desk, wanted: Wanted) -> AsyncIterator[bytes]:
    async with aclosing(audit_of(desk, wanted)) as entries:
        async for each in entries:
            yield public_json(entry(each)) + b"\n"


def _journal(view: Any, sessions: Sequence[str], now: int) -> bytes:
    from halter.journal.exported import export

    lines = export(view, sessions, as_written, version=__version__, now=now)
    return b"".join(public_json(line) + b"\n" for line, _ in lines)
