"""What the HTTP client promises over each of its transports: bounds, deadlines, and errors that give nothing away."""

import asyncio
import gzip
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from halter.net.aiohttp_transport import AiohttpTransport
from halter.net.client import HttpClient, HttpRequest, HttpTransport, make_json_request
from halter.net.failures import HttpFailure
from halter.net.httpx_transport import HttpxTransport

MakeTransport = Callable[[str], HttpTransport]


class Site:
    """A server that answers every request with the same bytes, and then hangs up or stays silent."""

    def __init__(self) -> None:
        self.answer = b""
        self.is_silent = False
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            writer.write(self.answer)
            if self.is_silent:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def page(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def serve_site() -> AsyncGenerator[Site]:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    async with server:
        site.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve_site() as served:
        yield served


@pytest.fixture(params=[lambda _: HttpxTransport(), lambda url: AiohttpTransport(url, 10)], ids=["httpx2", "aiohttp"])
async def client(request: pytest.FixtureRequest, site: Site) -> AsyncIterator[HttpClient]:
    make: MakeTransport = request.param
    async with HttpClient(make(site.url)) as opened:
        yield opened


async def fetch(client: HttpClient, url: str, max_bytes: int = 1000, max_wait: float = 30) -> bytes:
    return (await client.fetch(HttpRequest("GET", url), max_bytes=max_bytes, max_wait=max_wait)).body


async def test_a_request_and_its_answer_arrive_as_they_are(site: Site, client: HttpClient) -> None:
    site.answer = page(b"[1]", "201 Created", "X-Two: a", "X-Two: b")
    sent: list[bool] = []
    request = HttpRequest("GET", f"{site.url}/a%2Fb?c=%20d", [(b"x-key", b"secret")], on_sent=lambda: sent.append(True))
    answer = await client.fetch(request, max_bytes=3, max_wait=30)
    assert (answer.status, answer.headers["x-two"], answer.body) == (201, "a, b", b"[1]")
    assert sent == [True]
    assert site.requests[0].startswith(b"GET /a%2Fb?c=%20d HTTP/1.1\r\n")
    assert b"\r\nx-key: secret\r\n" in site.requests[0]


async def test_no_redirect_is_followed_unless_that_is_asked_for(site: Site, client: HttpClient) -> None:
    site.answer = page(b"", "302 Found", "location: /elsewhere")
    answer = await client.fetch(make_json_request("POST", site.url, {}), max_bytes=10, max_wait=30)
    assert (answer.status, len(site.requests)) == (302, 1)


async def test_an_answer_is_read_up_to_its_cap_and_no_further(site: Site, client: HttpClient) -> None:
    site.answer = page(b"x" * 1001)
    with pytest.raises(HttpFailure, match="answered with more than 1,000 bytes") as failed:
        await fetch(client, site.url)
    assert failed.value.kind == "TooLarge"
    assert await fetch(client, site.url, 1001) == b"x" * 1001


async def test_a_compressed_answer_is_not_unpacked(site: Site, client: HttpClient) -> None:
    site.answer = page(gzip.compress(b"x" * 1000), "200 OK", "content-encoding: gzip")
    with pytest.raises(HttpFailure, match="compressed"):
        await fetch(client, site.url)


async def test_an_answer_without_an_end_meets_its_deadline(site: Site, client: HttpClient) -> None:
    site.answer, site.is_silent = page(b"half and half")[:-4], True
    with pytest.raises(HttpFailure, match="no complete answer within") as failed:
        await fetch(client, site.url, max_wait=0.2)
    assert failed.value.is_timeout


async def test_a_lost_answer_may_have_been_acted_upon(site: Site, client: HttpClient) -> None:
    for answer in (b"", page(b"half and half")[:-4]):
        site.answer = answer
        with pytest.raises(HttpFailure) as failed:
            await fetch(client, site.url)
        assert failed.value.is_sent


async def test_a_server_that_does_not_listen_is_named_without_what_may_be_secret(client: HttpClient) -> None:
    async with serve_site() as gone:
        address = gone.url.removeprefix("http://")
    with pytest.raises(HttpFailure) as failed:
        await fetch(client, f"http://{address}/bot1:secret/x?key=secret")
    assert str(failed.value) == f"Cannot reach http://{address} (connection refused)."
    assert not failed.value.is_sent


async def test_lines_are_read_across_pieces_and_bounded(site: Site) -> None:
    site.answer = page(b"one\ntwo\n" + b"x" * 100)
    async with HttpClient(HttpxTransport()) as client, client.open(HttpRequest("GET", site.url)) as response:
        assert [line async for line in response.lines(100)] == [b"one", b"two", b"x" * 100]
    async with HttpClient(HttpxTransport()) as client, client.open(HttpRequest("GET", site.url)) as response:
        with pytest.raises(HttpFailure, match="line of more than 99 bytes"):
            assert [line async for line in response.lines(99)]
