"""Credentials of a cloud: found where its tools find them, in every request, and sent nowhere else."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from library_bench import Bench

from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, ModelUnusable
from halter.models.cloud_credentials import (
    AwsCredentials,
    GoogleCredentials,
    make_canonical_request,
    make_cloud_credentials,
    sign_request,
)

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
PRICE = {"price": {"input": 1, "output": 10}}


class TokenServer:
    """Exchanges what a service account signed for a token."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.port = 0
        self.status = "200 OK"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        self.asked.append(await reader.readexactly(int(length[1]) if length else 0))
        values = {"access_token": f"ya29.made-up-{len(self.asked)}", "expires_in": 3600, "token_type": "Bearer"}
        body = json.dumps(values if self.status == "200 OK" else {"error": "invalid_grant"}).encode()
        kind = "content-type: application/json\r\nconnection: close"
        writer.write(f"HTTP/1.1 {self.status}\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@pytest.fixture
async def tokens() -> AsyncIterator[TokenServer]:
    token_server = TokenServer()
    server = await asyncio.start_server(token_server.serve, "127.0.0.1", 0)
    token_server.port = server.sockets[0].getsockname()[1]
    async with server:
        yield token_server


@pytest.fixture
def account(tmp_path: Path, tokens: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service account whose tokens are made on this machine."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    values = {
        "type": "service_account",
        "client_email": "desk@example.iam.gserviceaccount.com",
        "private_key": pem,
        "token_uri": f"http://127.0.0.1:{tokens.port}/token",
        "project_id": "example",
    }
    (tmp_path / "account.json").write_text(json.dumps(values))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))


async def ask(folder: Path, provider: Any, cloud: str, wire: str, path: str, **environ: str) -> Any:
    """Ask a model whose provider the fleet describes, on this machine."""
    values = {"wire": wire, "base_url": f"http://127.0.0.1:{provider.port}{path}", "credentials": cloud}
    bench = Bench(folder)
    agent = bench.agent(
        model="cloud:big",
        fleet={"providers": {"cloud": values}, "models": {"cloud:big": PRICE}},
        clock=SystemClock(),
        environ={"HOME": str(folder), **environ},
        limits={"max_retries": 0},
    )
    result = await agent.run("Are you there?")
    bench.balanced(result)
    return result


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("wire", "path", "path_suffix"),
    [
        ("google", "/v1/projects/p/locations/l/publishers/google", "/models/big:generateContent"),
        ("openai", "/v1/chat/completions/", ""),
    ],
)
async def test_a_request_to_google_has_a_token_of_its_default_credentials(
    tmp_path: Path, provider: Any, tokens: TokenServer, wire: str, path: str, path_suffix: str
) -> None:
    provider.says("Yes.")
    path = "/v1" if wire == "openai" else path
    result = await ask(tmp_path, provider, "google", wire, path)
    assert (result.text, len(tokens.asked)) == ("Yes.", 1)
    (request,) = provider.asked
    assert request.headers["authorization"] == "Bearer ya29.made-up-1"
    assert "x-goog-api-key" not in request.headers
    if wire == "google":
        assert request.path == path + path_suffix
    journal = (tmp_path / "runs.db").read_bytes()
    assert b"ya29.made-up" not in journal


@pytest.mark.usefixtures("account")
async def test_without_a_token_a_person_is_told_what_to_do_and_nothing_is_paid(
    tmp_path: Path, provider: Any, tokens: TokenServer
) -> None:
    tokens.status = "400 Bad Request"
    with pytest.raises(ModelUnusable, match=r"NoCredentials: no credentials for google found .*gcloud auth"):
        await GoogleCredentials().renew()
    result = await ask(tmp_path, provider, "google", "openai", "/v1")
    assert (result.ok, result.cost_usd, provider.asked) == (False, 0, [])
    assert "gcloud auth application-default login" in result.sentence


@pytest.mark.parametrize("token", ["", "a-session-token"])
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
async def test_a_request_to_aws_is_signed_as_it_leaves(tmp_path: Path, provider: Any, wire: str, token: str) -> None:
    provider.says("Yes.")
    environ = {**KEYS, "AWS_REGION": "us-west-2", **({"AWS_SESSION_TOKEN": token} if token else {})}
    result = await ask(tmp_path, provider, "aws", wire, "/v1" if wire == "openai" else "", **environ)
    assert result.text == "Yes."
    (request,) = provider.asked
    assert "x-api-key" not in request.headers
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/(\d{8})/us-west-2/bedrock/aws4_request, SignedHeaders=([a-z;-]+), "
        r"Signature=([0-9a-f]{64})",
        request.headers["authorization"],
    )
    assert match is not None
    names = match[2].split(";")
    assert names == ["host", "x-amz-date", *(["x-amz-security-token"] if token else [])]
    signed = {name: request.headers[name] for name in names}
    canonical = make_canonical_request("POST", f"http://h{request.path}", signed, request.raw)
    scope = (match[1], "us-west-2", "bedrock", "aws4_request")
    assert sign_request(KEYS["AWS_SECRET_ACCESS_KEY"], signed["x-amz-date"], scope, canonical) == match[3]


def test_a_signature_is_that_of_the_published_example() -> None:
    """The example of AWS for a request to IAM, in its description of Signature Version 4."""
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8",
        "host": "iam.amazonaws.com",
        "x-amz-date": "20150830T123600Z",
    }
    url = "https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08"
    canonical = make_canonical_request("GET", url, headers, b"")
    scope = ("20150830", "us-east-1", "iam", "aws4_request")
    signature = sign_request(KEYS["AWS_SECRET_ACCESS_KEY"], "20150830T123600Z", scope, canonical)
    assert signature == "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"


@pytest.mark.parametrize(
    ("url", "environ", "why"),
    [
        ("https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1", {}, "of AWS, is not installed"),
        ("http://127.0.0.1:9/v1", KEYS, "The AWS region of 127.0.0.1 is unknown. Set AWS_REGION"),
    ],
)
def test_what_is_missing_is_said_before_anything_begins(url: str, environ: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_cloud_credentials("aws", url, environ.get, lambda _: False)


def test_the_address_says_region_and_service() -> None:
    url = "https://bedrock-mantle.eu-west-1.api.aws/anthropic"
    cloud_credentials = make_cloud_credentials("aws", url, KEYS.get, lambda _: False)
    assert isinstance(cloud_credentials, AwsCredentials)
    assert (cloud_credentials.region, cloud_credentials.service) == ("eu-west-1", "bedrock-mantle")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ({"base_url": "https://evil.example/v1", "credentials": "google"}, "credentials go only to"),
        ({"base_url": "http://us-aiplatform.googleapis.com/v1", "credentials": "google"}, "over https"),
        ({"base_url": "https://evilgoogleapis.com/v1", "credentials": "google"}, "credentials go only to"),
        ({"base_url": "https://x.googleapis.com", "credentials": "google", "api_key": "${secret:K}"}, "keep one"),
        ({"base_url": "https://x.example", "credentials": "azure"}, "credentials"),
    ],
    ids=["elsewhere", "in the clear", "a name like it", "both", "unknown"],
)
async def test_an_agents_file_sends_them_nowhere_else(tmp_path: Path, place: Any, why: str) -> None:
    """The attack: an agent's file that names an address of its own for the token of a whole cloud."""
    agent = Bench(tmp_path).agent(model="cloud:big", providers={"cloud": place}, fleet={"models": {"cloud:big": PRICE}})
    with pytest.raises(ConfigError, match=why):
        await agent.run("Are you there?")


async def test_an_agent_gives_no_credentials_to_an_address_that_the_fleet_meant_without(tmp_path: Path) -> None:
    fleet = {"providers": {"cloud": {"base_url": "http://127.0.0.1:9/v1"}}, "models": {"cloud:big": PRICE}}
    agent = Bench(tmp_path).agent(model="cloud:big", providers={"cloud": {"credentials": "google"}}, fleet=fleet)
    with pytest.raises(ConfigError, match="credentials go only to"):
        await agent.run("Are you there?")
