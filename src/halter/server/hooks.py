"""Webhooks over HTTP: a small server that takes deliveries and starts sessions. It needs the extra `server`."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from halter.app.hooks import Accepted, Delivery, Hooks
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.errors import ConfigError, needs
from halter.server.attempts import Attempts
from halter.server.entrance import TOO_MUCH, place_in
from halter.server.limits import Limits
from halter.server.running import listen, run

if TYPE_CHECKING:
    from fastapi import FastAPI

HOST: Final = "127.0.0.1"
PORT: Final = 8765
BEARER: Final = "bearer "
DELIVERY: Final = "halter-delivery"
UPLOAD: Final = 30 * SECOND
"""How long a body may be in coming."""


def hooks_api(hooks: Hooks, clock: Clock) -> "FastAPI":
    """Make a server for deliveries and nothing else."""
    from fastapi import FastAPI

    api = FastAPI(title="Halter webhooks", docs_url=None, redoc_url=None, openapi_url=None)
    add_hooks(api, lambda: hooks, clock, Attempts(Limits().failures))
    return api


def add_hooks(api: "FastAPI", find: Callable[[], Hooks], clock: Clock, tried: Attempts) -> None:
    """Add the door for deliveries: `POST /hooks/AGENT/NAME`, with a token and the name of the delivery.

    Wrong tokens are counted in `tried`.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def receive(agent: str, name: str, request: Request) -> JSONResponse:
        hooks, said = find(), request.headers.get("authorization", "")
        token = said[len(BEARER) :].strip() if said.lower().startswith(BEARER) else ""
        place, shown, now = place_in(request.scope), f"{agent}/{name} {token}", clock.now()
        if wait := tried.wait(place, shown, now):
            return JSONResponse({"error": TOO_MUCH}, 429, {"Retry-After": str(max(1, -(-wait // SECOND)))})
        most = hooks.most_bytes(agent, name, token)
        if most:
            tried.right(place, shown)
        else:
            tried.wrong(place, shown, now)
        try:
            async with asyncio.timeout(UPLOAD / SECOND):
                body = await _body(request, most + 1) if most else b""
        except TimeoutError:
            return JSONResponse({"error": "The body was too long in coming."}, 408, {"Connection": "close"})
        content = request.headers.get("content-type", "")
        delivery = Delivery(token, request.headers.get(DELIVERY, ""), content, body)
        answer = await hooks.receive(agent, name, delivery)
        if isinstance(answer, Accepted):
            status = 200 if answer.repeated else 202
            return JSONResponse({"session": answer.session, "repeated": answer.repeated}, status)
        wait = None if answer.retry_after is None else {"Retry-After": str(max(1, answer.retry_after // SECOND))}
        return JSONResponse({"error": answer.sentence}, answer.status, wait)

    # Annotations of a function inside of another cannot be looked up by name.
    receive.__annotations__ = {"agent": str, "name": str, "request": Request, "return": JSONResponse}
    api.post("/hooks/{agent}/{name}", response_model=None, include_in_schema=False)(receive)


async def _body(request: Any, most: int) -> bytes:
    """Read a body, and of one that is too long no more than it takes to know that."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) >= most:
            break
    return body[:most]


async def serve(hooks: Hooks, host: str = HOST, port: int = PORT) -> None:
    """Take deliveries until cancelled. Raises ConfigError where the server cannot be had, or the port is taken."""
    try:
        api = hooks_api(hooks, SystemClock())
    except ImportError:
        raise ConfigError(needs("server", "A webhook")) from None
    await run(api, listen(host, port))
