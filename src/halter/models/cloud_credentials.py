"""Credentials of a cloud that are found where its own tools find them, and become the headers of each request.

Google's are exchanged for a token that lives an hour, AWS signs every request. Both are made anew while a model is
used, so neither is a key that a file could name. They go to the cloud's own hosts, or where the fleet's file says.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, quote, urlsplit

from halter.core.agent_spec import CloudName
from halter.core.errors import ConfigError, ModelUnusable
from halter.core.text import clean, shorten

if TYPE_CHECKING:
    import httpx2

FindKey = Callable[[str], str | None]
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_REGION: Final = re.compile(r"bedrock[a-z-]*\.([a-z0-9-]+)\.")
_KEY_HEADERS: Final = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
_MISSING: Final[Mapping[CloudName, str]] = MappingProxyType(
    {
        "google": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        "aws": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or configure a profile or a role",
    }
)


class CloudCredentials(Protocol):
    async def renew(self) -> None:
        """Find the credentials, or renew them. Raises ModelUnusable where there are none."""
        ...

    def sign(self, request: "httpx2.Request") -> None:
        """Put them into a request, in place of any key."""
        ...


def make_cloud_credentials(
    cloud: CloudName, url: str, find: FindKey, installed: Callable[[str], bool]
) -> CloudCredentials:
    if cloud == "google":
        return GoogleCredentials()
    known = bool(find("AWS_ACCESS_KEY_ID") and find("AWS_SECRET_ACCESS_KEY"))
    if not (known or installed("botocore")):
        raise ConfigError(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and profiles and roles of AWS are read by "
            "botocore, which is not installed: set them, or install it with `pip install botocore`."
        )
    host = urlsplit(url).hostname or ""
    named = _REGION.match(host)
    region = named[1] if named else find("AWS_REGION") or find("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(f"The region of AWS at {host} is not known: set AWS_REGION.")
    return AwsCredentials(region, "bedrock-mantle" if "mantle" in host else "bedrock", find)


def _explain(cloud: CloudName, error: Exception | str) -> ModelUnusable:
    text = shorten(clean(" ".join(str(error).split())), 200)
    return ModelUnusable(f"NoCredentials: there are none of {cloud} here ({text}): {_MISSING[cloud]}", billed=False)


class GoogleCredentials:
    """Google's default credentials, as a token."""

    def __init__(self) -> None:
        self._found: Any = None

    async def renew(self) -> None:
        if self._found is None or not self._found.valid:
            await asyncio.to_thread(self._renew)

    def _renew(self) -> None:
        auth: Any = import_module("google.auth")
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request

        try:
            if self._found is None:
                self._found, _ = auth.default(scopes=[_SCOPE])
            if not self._found.valid:
                self._found.refresh(Request())
        except GoogleAuthError as error:
            raise _explain("google", error) from None

    def sign(self, request: "httpx2.Request") -> None:
        _drop_keys(request)
        request.headers["authorization"] = f"Bearer {self._found.token}"


class AwsKeys(NamedTuple):
    access: str
    secret: str
    token: str = ""


class AwsCredentials:
    """AWS credentials: those of the environment, else what botocore finds."""

    def __init__(
        self, region: str, service: str, find: FindKey, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.region = region
        self.service = service
        self._find = find
        self._now = now
        self._session: Any = None
        self._keys = AwsKeys("", "")

    async def renew(self) -> None:
        access, secret = self._find("AWS_ACCESS_KEY_ID"), self._find("AWS_SECRET_ACCESS_KEY")
        if access and secret:
            self._keys = AwsKeys(access, secret, self._find("AWS_SESSION_TOKEN") or "")
        else:
            self._keys = await asyncio.to_thread(self._ask_botocore)

    def _ask_botocore(self) -> AwsKeys:
        # Imported by name: it need not be installed.
        errors: Any = import_module("botocore.exceptions")
        try:
            self._session = self._session or import_module("botocore.session").Session()
            found = self._session.get_credentials()
            frozen = None if found is None else found.get_frozen_credentials()
        except errors.BotoCoreError as error:
            raise _explain("aws", error) from None
        if frozen is None:
            raise _explain("aws", "no place of its chain has any")
        return AwsKeys(frozen.access_key, frozen.secret_key, frozen.token or "")

    def sign(self, request: "httpx2.Request") -> None:
        _drop_keys(request)
        at = self._now().strftime("%Y%m%dT%H%M%SZ")
        request.headers["x-amz-date"] = at
        if self._keys.token:
            request.headers["x-amz-security-token"] = self._keys.token
        signed = {"host": request.headers["host"], "x-amz-date": at}
        if self._keys.token:
            signed["x-amz-security-token"] = self._keys.token
        scope = (at[:8], self.region, self.service, "aws4_request")
        canonical = make_canonical_request(request.method, str(request.url), signed, request.content)
        signature = sign_request(self._keys.secret, at, scope, canonical)
        where = f"Credential={self._keys.access}/{'/'.join(scope)}, SignedHeaders={';'.join(sorted(signed))}"
        request.headers["authorization"] = f"AWS4-HMAC-SHA256 {where}, Signature={signature}"


def make_canonical_request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> str:
    """A request as Signature Version 4 writes it down; its path is escaped once more than it was sent."""
    parts = urlsplit(url)
    pairs = sorted((quote(key, "-_.~"), quote(value, "-_.~")) for key, value in parse_qsl(parts.query))
    query = "&".join(f"{key}={value}" for key, value in pairs)
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    path, names, digest = quote(parts.path or "/", "/-_.~"), ";".join(sorted(headers)), hashlib.sha256(body).hexdigest()
    return f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"


def sign_request(secret: str, at: str, scope: tuple[str, ...], canonical: str) -> str:
    key = f"AWS4{secret}".encode()
    for each in scope:
        key = hmac.digest(key, each.encode(), "sha256")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    sentence = f"AWS4-HMAC-SHA256\n{at}\n{'/'.join(scope)}\n{digest}"
    return hmac.new(key, sentence.encode(), "sha256").hexdigest()


def _drop_keys(request: "httpx2.Request") -> None:
    for name in _KEY_HEADERS:
        request.headers.pop(name, None)
