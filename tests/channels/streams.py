"""An ASGI application as a transport of the HTTP client: answers arrive piece by piece, with no socket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from httpx2 import AsyncBaseTransport, AsyncByteStream, AsyncClient, Request, Response

from halter.net.client import HttpClient
from halter.net.httpx_transport import HttpxTransport


class _Body(AsyncByteStream):
    def __init__(self, pieces: "asyncio.Queue[bytes | None]", task: "asyncio.Task[None]") -> None:
        self._pieces, self._task = pieces, task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (body := await self._pieces.get()) is not None:
            yield body

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def make_client(transport: AsyncBaseTransport) -> HttpClient:
    return HttpClient(HttpxTransport(pool=AsyncClient(transport=transport)))


class StreamedApp(AsyncBaseTransport):
    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: Request) -> Response:
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        content = await request.aread()

        bodies = [content]

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                future.set_result(message)
                return
            pieces.put_nowait(message.get("body", b""))
            if not message.get("more_body"):
                pieces.put_nowait(None)

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "query_string": request.url.query,
            "headers": [(key.lower(), value) for key, value in request.headers.raw],
        }
        task = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            start = await future
        except BaseException:
            task.cancel()
            raise
        return Response(start["status"], headers=start["headers"], stream=_Body(pieces, task))
