"""Sources of the live terminal: an open store or a server. Both offer the operations of the registry."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from halter.core.errors import NotDone, StoreUnavailable
from halter.net.client import SERVER_ERROR, HttpClient, HttpRequest, make_json_request
from halter.net.failures import HttpFailure
from halter.operations.actor import Actor, Operation
from halter.operations.registry import OPERATIONS

BY_NAME: Final[Mapping[str, Operation]] = {each.name: each for each in OPERATIONS}
UNAUTHORIZED: Final = 401
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MAX_WAIT_SECONDS: Final = 60
_HEADER_WORD: Final = re.compile(r"[!-~]+")


class OperationSource(Protocol):
    async def call(self, name: str, **parameters: Any) -> Any:
        """Run an operation by name. Raises NotDone if it is refused, StoreUnavailable without an answer."""
        ...


class StoreSource:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    async def call(self, name: str, **parameters: Any) -> Any:
        return await BY_NAME[name].run(self._actor, **parameters)


def check_server(url: str, token: str) -> None:
    """Reject an invalid address, an unencrypted one on another machine, and a malformed token.

    The HTTP library would put a malformed token into its error.
    """
    if not _HEADER_WORD.fullmatch(token):
        raise NotDone("The token contains an invalid character. Copy it again from `halter tokens add`.", "wrong")
    scheme, host = _split_address(url) if _HEADER_WORD.fullmatch(url) else ("", "")
    if scheme not in ("http", "https") or not host:
        raise NotDone(f"Invalid server address {url!r}. Use one like https://halter.example.", "wrong")
    if scheme == "http" and not _is_loopback(host):
        sentence = f"{url} would receive the token unencrypted. Use https://, or a tunnel to a port of this machine."
        raise NotDone(sentence, "wrong")


def _split_address(url: str) -> tuple[str, str]:
    """Return the scheme and the host; two empty strings if the address is invalid."""
    try:
        url_parts = urlsplit(url)
        usable = url_parts.port != 0
    except ValueError:
        return "", ""
    return (url_parts.scheme, url_parts.hostname or "") if usable else ("", "")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


class ServerSource:
    """A server's HTTP API, with the rights of a token."""

    def __init__(self, url: str, token: str, client: HttpClient) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._client = client

    async def call(self, name: str, **parameters: Any) -> Any:
        operation = BY_NAME[name]
        path, remaining = _fill_path(operation, parameters)
        url = f"{self._url}/api{path}"
        if operation.writes:
            request = make_json_request("POST", url, remaining, self._headers)
        else:
            query = urlencode({name: _format_query_value(value) for name, value in remaining.items()}, doseq=True)
            request = HttpRequest("GET", f"{url}?{query}", self._headers)
        try:
            answer = await self._client.fetch(request, max_bytes=MAX_ANSWER_BYTES, max_wait=MAX_WAIT_SECONDS)
        except HttpFailure as failure:
            raise StoreUnavailable(f"{self._url} does not answer: {failure.reason}.") from None
        if answer.is_success:
            return _decode(answer.body, operation.result, self._url)
        if answer.status == UNAUTHORIZED:
            raise NotDone(f"{self._url} does not know this token. Check `halter tokens` there.", "forbidden")
        text = _read_refusal(answer.body) or f"{self._url} answered with status {answer.status}."
        if answer.status >= SERVER_ERROR:
            raise StoreUnavailable(text)
        raise NotDone(text, "refused")


def _format_query_value(value: Any) -> Any:
    """Write booleans and null as the API reads them."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return ""
        case _:
            return value


def _fill_path(operation: Operation, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Put parameters into the path; return the path and the parameters for the query or the body."""
    path = operation.path
    for name in operation.path_parameters:
        value = quote(str(values[name]), safe="")
        path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
    return path, {name: value for name, value in values.items() if name not in operation.path_parameters}


def _decode(content: bytes, kind: Any, url: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreUnavailable(f"{url} gave an answer that this version of Halter cannot read: {error}.") from None


def _read_refusal(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Refusal).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
