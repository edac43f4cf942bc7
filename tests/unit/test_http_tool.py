"""The web tools: named hosts, public addresses, and no way around either."""

import asyncio
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from halter.core.errors import ConfigError
from halter.core.tools import Failed, Permit, Unstoppable, Valid
from halter.net.addresses import is_public, resolve_host
from halter.tools.function_tool import FunctionTool
from halter.tools.http import make_http_tools, matches_host

LOOPBACK = ("127.0.0.1/32",)
TRUSTING_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Site:
    """A server on this machine that notes what it is sent and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Callable[[str], bytes] = lambda _: page("hello")
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # Somebody connected and asked for nothing.
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        self.asked.append(head + body.decode())
        writer.write(self.answer(head.split()[1]))


def page(body: str | bytes, status: str = "200 OK", **headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def redirect(to: str) -> bytes:
    return page("", "302 Found", location=to)


@asynccontextmanager
async def serve_site(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        site.port = server.sockets[0].getsockname()[1]
        yield site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve_site() as served:
        yield served


class Names:
    """A resolver with answers of its own, one after the other for each name; what it does not know it asks for."""

    def __init__(self, **known: Sequence[Sequence[str]]) -> None:
        self.known = {name.replace("_", "."): list(answers) for name, answers in known.items()}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        answers = self.known.get(host)
        if answers is None:
            return await resolve_host(host, port)
        return answers.pop(0) if len(answers) > 1 else answers[0]


async def run_tool(subject: FunctionTool, **arguments: Any) -> str:
    valid = subject.validate(json.dumps(arguments).encode())
    assert isinstance(valid, Valid)
    return (await subject.run(valid, Permit("call-1", 0, {}))).text


async def fetch(url: str, hosts: Sequence[str] = ("*",), **options: Any) -> str:
    headers = options.pop("headers", {})
    get, _ = make_http_tools(hosts, **{"tls": TRUSTING_NOBODY, **options})
    return await run_tool(get, url=url, headers=headers)


async def post_body(url: str, body: str, **options: Any) -> str:
    _, post = make_http_tools(["*"], allow_addresses=LOOPBACK, tls=TRUSTING_NOBODY, **options)
    return await run_tool(post, url=url, body=body)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.1", "0.1.2.3", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1"),
        *("192.0.2.1", "192.88.99.1", "::", "::1", "fe80::1", "fc00::1", "fd00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::808:808"),
        *("2002:7f00:1::", "2002:808:808::", "2001::1", "100::1", "fec0::1", "3fff::1"),
        *("168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::168.63.129.16", "161.26.0.10", "166.9.48.12"),
        *("100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    ],
)
def test_addresses_that_lead_inside_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "localhost", "[::1]", "[::]"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "169.254.169.254", "10.0.0.1", "[fe80::1]"),
        *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "127。0。0。1"),
    ],
)
async def test_no_form_of_an_inner_address_is_asked(site: Site, host: str) -> None:
    with pytest.raises(Failed, match=r"ForbiddenAddress|UnknownHost|BadUrl"):
        await fetch(f"http://{host}:{site.port}/")
    assert site.asked == []


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:10.0.0.1"], ["168.63.129.16"], []]
)
async def test_a_name_with_one_inner_address_is_not_asked_at_any(site: Site, found: list[str]) -> None:
    with pytest.raises(Failed, match=r"ForbiddenAddress|UnknownHost"):
        await fetch(f"http://a.example:{site.port}/", resolve=Names(a_example=[found]))
    assert site.asked == []


async def test_a_name_is_resolved_once_and_the_checked_address_is_used(site: Site) -> None:
    names = Names(a_example=[["127.0.0.1"], ["10.0.0.1"]])
    answer = await fetch(f"http://a.example:{site.port}/x?y=1", resolve=names, allow_addresses=LOOPBACK)
    assert answer == "200 OK\n\nhello"
    assert names.known["a.example"] == [["10.0.0.1"]]
    assert site.asked[0].startswith("GET /x?y=1 HTTP/1.1\r\n")
    assert f"host: a.example:{site.port}\r\n" in site.asked[0].lower()


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("http://10.0.0.1/", "ForbiddenAddress"),
        ("http://169.254.169.254/latest/meta-data", "ForbiddenAddress"),
        ("http://[::ffff:a00:1]/", "ForbiddenAddress"),
        ("//167772161/", "ForbiddenAddress"),
        ("http://inner.example/", "ForbiddenAddress"),
        ("file:///etc/passwd", "BadUrl"),
        ("gopher://a.example/", "BadUrl"),
        ("http://b.elsewhere/", "HostNotAllowed"),
        ("http://user:word@a.example/", "BadUrl"),
        ("/again", "TooManyRedirects"),
    ],
)
async def test_each_redirect_is_looked_at_anew(site: Site, to: str, told: str) -> None:
    site.answer = lambda _: redirect(to)
    hosts = ["a.example", "inner.example", "10.0.0.1", "169.254.169.254", "::ffff:a00:1", "167772161"]
    names = Names(a_example=[["127.0.0.1"]], inner_example=[["192.168.0.1"]], b_elsewhere=[["93.184.216.34"]])
    with pytest.raises(Failed, match=told):
        await fetch(f"http://a.example:{site.port}/", hosts, resolve=names, allow_addresses=LOOPBACK)


async def test_headers_for_one_place_are_not_carried_to_another(site: Site) -> None:
    places = {"/": f"http://b.example:{site.port}/b", "/b": "/c"}
    site.answer = lambda path: redirect(places[path]) if path in places else page("there")
    names = Names(a_example=[["127.0.0.1"]], b_example=[["127.0.0.1"]])
    options: Any = {"resolve": names, "allow_addresses": LOOPBACK}
    answer = await fetch(f"http://a.example:{site.port}/", headers={"X-Key": "secret"}, **options)
    assert answer.endswith("there")
    assert ["secret" in each for each in site.asked] == [True, False, False]


@pytest.mark.parametrize(
    ("host", "pattern", "below"),
    [
        ("example.com", "example.com", True),
        ("api.example.com", "*.example.com", True),
        ("a.b.example.com", "*.example.com", True),
        ("example.com", "*.example.com", False),
        ("evilexample.com", "*.example.com", False),
        ("example.com.evil", "example.com", False),
        ("anything", "*", True),
    ],
)
def test_patterns_of_hosts_match_whole_names(host: str, pattern: str, *, below: bool) -> None:
    assert matches_host(host, pattern) is below


@pytest.mark.parametrize(
    "url",
    ["http://b.example/", "http://a.example.b.example/", "http://a.example@b.example/", "http://b.example#a.example"],
)
async def test_a_host_that_is_not_named_is_not_asked(url: str) -> None:
    with pytest.raises(Failed, match=r"HostNotAllowed|BadUrl"):
        await fetch(url, ["a.example"], resolve=Names(b_example=[["127.0.0.1"]]))


async def test_upper_case_and_a_final_dot_change_nothing(site: Site) -> None:
    names = Names(a_example=[["127.0.0.1"]], a_example_=[["127.0.0.1"]])
    for host in ("A.Example", "a.example."):
        url = f"http://{host}:{site.port}/"
        assert await fetch(url, ["a.Example."], resolve=names, allow_addresses=LOOPBACK) == "200 OK\n\nhello"


@pytest.mark.parametrize("url", ["", "a.example", "ftp://a.example/", "http://", "http://a\0b/", "http://[::1"])
async def test_what_is_not_a_url_is_reported(url: str) -> None:
    with pytest.raises(Failed, match="BadUrl"):
        await fetch(url)


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "Connection"])
async def test_headers_that_change_where_a_request_ends_are_refused(site: Site, name: str) -> None:
    with pytest.raises(Failed, match="BadHeader"):
        await fetch(f"http://127.0.0.1:{site.port}/", headers={name: "x"}, allow_addresses=LOOPBACK)
    with pytest.raises(Failed, match="BadRequest"):
        await fetch(f"http://127.0.0.1:{site.port}/", headers={"a": "b\r\nc: d"}, allow_addresses=LOOPBACK)
    assert site.asked == []


async def test_long_and_binary_answers_are_bounded(site: Site) -> None:
    url = f"http://127.0.0.1:{site.port}/"
    site.answer = lambda _: page("x" * 1_000_000)
    answer = await fetch(url, allow_addresses=LOOPBACK, max_bytes=1000)
    assert len(answer) < 1100
    assert answer.endswith("[response truncated]")
    site.answer = lambda _: page(b"\0\1", content_type="image/png")
    answer = await fetch(url, allow_addresses=LOOPBACK)
    assert answer == "200 OK\ncontent-type: image/png\n\n[2 bytes that are not text, in base64]\nAAE="
    site.answer = lambda _: page("é".encode("latin-1"), "404 Not Found", content_type="text/plain; charset=latin-1")
    assert (await fetch(url, allow_addresses=LOOPBACK)).endswith("\n\né")


async def test_a_post_carries_its_key_and_follows_no_redirect(site: Site) -> None:
    site.answer = lambda _: redirect("/elsewhere")
    answer = await post_body(f"http://127.0.0.1:{site.port}/", '{"a": 1}')
    assert answer.startswith("302 Found\nlocation: /elsewhere")
    assert len(site.asked) == 1
    assert site.asked[0].endswith('{"a": 1}')
    assert "idempotency-key: call-1" in site.asked[0].lower()


async def test_a_post_whose_answer_is_lost_is_neither_done_nor_failed(site: Site) -> None:
    site.answer = lambda _: b""
    with pytest.raises(Unstoppable, match="it is unknown whether the request took effect"):
        await post_body(f"http://127.0.0.1:{site.port}/", "{}")
    with pytest.raises(Failed):
        await fetch(f"http://127.0.0.1:{site.port}/", allow_addresses=LOOPBACK)


async def test_a_place_where_nobody_listens_is_a_failure(site: Site) -> None:
    async with serve_site() as gone:
        port = gone.port
    with pytest.raises(Failed, match=r"ConnectError: Cannot connect to a\.example: "):
        await post_body(f"http://a.example:{port}/", "{}", resolve=Names(a_example=[["127.0.0.1", "127.0.0.1"]]))


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return how a server shows a certificate for a name, and how a client trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate_builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    certificate_builder = certificate_builder.not_valid_before(now - timedelta(days=1)).not_valid_after(
        now + timedelta(days=1)
    )
    certificate_builder = certificate_builder.add_extension(
        x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
    )
    certificate_builder = certificate_builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    pem = certificate_builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "pem").write_bytes(pem + key.private_bytes(encoding, form, serialization.NoEncryption()))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "pem")
    return server, ssl.create_default_context(cadata=pem.decode())


async def test_a_certificate_must_be_that_of_the_name_and_not_of_the_address(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, "a.example")
    names = Names(a_example=[["127.0.0.1"]], b_example=[["127.0.0.1"]])
    async with serve_site(server) as safe:
        options: Any = {"resolve": names, "allow_addresses": LOOPBACK, "tls": client}
        assert await fetch(f"https://a.example:{safe.port}/", **options) == "200 OK\n\nhello"
        with pytest.raises(Failed, match=r"ConnectError: Cannot connect to b\.example: "):
            await fetch(f"https://b.example:{safe.port}/", **options)
    assert len(safe.asked) == 1


@pytest.mark.parametrize("hosts", [[], ["*example.com"], ["a.*.com"]])
def test_hosts_that_name_nothing_or_too_much_are_refused_at_once(hosts: list[str]) -> None:
    with pytest.raises(ConfigError):
        make_http_tools(hosts)


def test_web_tools_say_that_their_arguments_choose_where_data_goes() -> None:
    specs = [each.spec for each in make_http_tools(["*"])]
    assert [(spec.name, spec.effect, spec.egress) for spec in specs] == [
        ("http_get", "read", True),
        ("http_post", "write", True),
    ]
