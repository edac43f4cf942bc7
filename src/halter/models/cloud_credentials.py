"""Cloud credentials, found where the cloud's own tools find them, and added to the headers of each request.

Google's are exchanged for a token that is valid for an hour; AWS signs every request. Both are renewed while a model is
in use, so a file cannot contain them as a key. They are sent to the cloud's own hosts, or to an address in halter.yaml.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, quote, urlsplit

from halter.core.errors import ConfigError, ModelUnusable
from halter.core.text import clean, shorten
from halter.net.sdk_pool import SdkRequest
from halter.spec.models import CloudName

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
        """Find the credentials, or renew them. Raises ModelUnusable if there are none."""
        ...

    def sign(self, request: SdkRequest) -> None:
        """Add the credentials to a request, in place of any key."""
        ...


def make_cloud_credentials(
    cloud: CloudName, url: str, find_key: FindKey, installed: Callable[[str], bool]
) -> CloudCredentials:
    if cloud == "google":
        return GoogleCredentials()
    has_keys = bool(find_key("AWS_ACCESS_KEY_ID") and find_key("AWS_SECRET_ACCESS_KEY"))
    if not (has_keys or installed("botocore")):
        raise ConfigError(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and botocore, which reads profiles and roles of "
            "AWS, is not installed. Set the variables, or run `pip install botocore`."
        )
    host = urlsplit(url).hostname or ""
    match = _REGION.match(host)
    region = match[1] if match else find_key("AWS_REGION") or find_key("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(f"The AWS region of {host} is unknown. Set AWS_REGION.")
    return AwsCredentials(region, "bedrock-mantle" if "mantle" in host else "bedrock", find_key)


def _explain(cloud: CloudName, error: Exception | str) -> ModelUnusable:
    text = shorten(clean(" ".join(str(error).split())), 200)
    return ModelUnusable(f"NoCredentials: no credentials for {cloud} found ({text}): {_MISSING[cloud]}", billed=False)


class GoogleCredentials:
    """Google's application default credentials, as a token."""

    def __init__(self) -> None:
        self._credentials: Any = None

    async def renew(self) -> None:
        if self._credentials is None or not self._credentials.valid:
            await asyncio.to_thread(self._renew)

    def _renew(self) -> None:
        auth: Any = import_module("google.auth")
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request

        try:
            if self._credentials is None:
                self._credentials, _ = auth.default(scopes=[_SCOPE])
            if not self._credentials.valid:
                self._credentials.refresh(Request())
        except GoogleAuthError as error:
            raise _explain("google", error) from None

    def sign(self, request: SdkRequest) -> None:
        _drop_keys(request)
        request.headers["authorization"] = f"Bearer {self._credentials.token}"


class AwsKeys(NamedTuple):
    access: str
    secret: str
    token: str = ""


class AwsCredentials:
    """AWS credentials from the environment, or else from botocore."""

    def __init__(
        self, region: str, service: str, find_key: FindKey, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.region = region
        self.service = service
        self._find = find_key
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
        # Imported by name, since it is optional.
        errors: Any = import_module("botocore.exceptions")
        try:
            self._session = self._session or import_module("botocore.session").Session()
            credentials = self._session.get_credentials()
            frozen_credentials = None if credentials is None else credentials.get_frozen_credentials()
        except errors.BotoCoreError as error:
            raise _explain("aws", error) from None
        if frozen_credentials is None:
            raise _explain("aws", "no provider in its chain has any")
        return AwsKeys(frozen_credentials.access_key, frozen_credentials.secret_key, frozen_credentials.token or "")

    def sign(self, request: SdkRequest) -> None:
        _drop_keys(request)
        timestamp = self._now().strftime("%Y%m%dT%H%M%SZ")
        request.headers["x-amz-date"] = timestamp
        if self._keys.token:
            request.headers["x-amz-security-token"] = self._keys.token
        signed_headers = {"host": request.headers["host"], "x-amz-date": timestamp}
        if self._keys.token:
            signed_headers["x-amz-security-token"] = self._keys.token
        scope = (timestamp[:8], self.region, self.service, "aws4_request")
        canonical = make_canonical_request(request.method, str(request.url), signed_headers, request.content)
        signature = sign_request(self._keys.secret, timestamp, scope, canonical)
        credential = (
            f"Credential={self._keys.access}/{'/'.join(scope)}, SignedHeaders={';'.join(sorted(signed_headers))}"
        )
        request.headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, Signature={signature}"


def make_canonical_request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> str:
    """Make the canonical form of a request for Signature Version 4. Its path is escaped twice."""
    parts = urlsplit(url)
    pairs = sorted((quote(key, "-_.~"), quote(value, "-_.~")) for key, value in parse_qsl(parts.query))
    query = "&".join(f"{key}={value}" for key, value in pairs)
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    path, names, digest = quote(parts.path or "/", "/-_.~"), ";".join(sorted(headers)), hashlib.sha256(body).hexdigest()
    return f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"


def sign_request(secret: str, timestamp: str, scope: tuple[str, ...], canonical: str) -> str:
    key = f"AWS4{secret}".encode()
    for scope_part in scope:
        key = hmac.digest(key, scope_part.encode(), "sha256")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{timestamp}\n{'/'.join(scope)}\n{digest}"
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _drop_keys(request: SdkRequest) -> None:
    for name in _KEY_HEADERS:
        request.headers.pop(name, None)
