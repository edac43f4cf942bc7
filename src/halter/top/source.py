"""Where the live terminal looks and acts: an open store, or a server. Both offer the operations of the registry."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Final, Protocol
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from halter.core.errors import NotDone, StoreUnavailable
from halter.operations.desk import Actor, Operation
from halter.operations.registry import OPERATIONS

BY_NAME: Final[Mapping[str, Operation]] = {each.name: each for each in OPERATIONS}
UNAUTHORIZED: Final = 401
SERVER_ERROR: Final = 500
_HEADER_WORD: Final = re.compile(r"[!-~]+")


class OperationSource(Protocol):
    async def call(self, name: str, **given: Any) -> Any:
        """Run an operation by its name. Raises NotDone where it is refused, StoreUnavailable without an answer."""
        ...


class StoreSource:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    async def call(self, name: str, **given: Any) -> Any:
        return await BY_NAME[name].run(self._actor, **given)


def check_server(url: str, token: str) -> None:
    """Refuse an address that is none, one at which others could read the token, and a token that is none.

    A library would name the token in its error.
    """
    if not _HEADER_WORD.fullmatch(token):
        raise NotDone("The token holds a character that no token has: copy it anew from `halter tokens add`.", "wrong")
    scheme, host = _split_address(url) if _HEADER_WORD.fullmatch(url) else ("", "")
    if scheme not in ("http", "https") or not host:
        raise NotDone(f"{url!r} is no address of a server: write one like https://halter.example.", "wrong")
    if scheme == "http" and not _is_loopback(host):
        sentence = f"{url} would get the token unencrypted: write https://, or make a tunnel to a port of this machine."
        raise NotDone(sentence, "wrong")


def _split_address(url: str) -> tuple[str, str]:
    """Returns the scheme and the host; two empty words where the host or the port is none."""
    try:
        parts = urlsplit(url)
        usable = parts.port != 0
    except ValueError:
        return "", ""
    return (parts.scheme, parts.hostname or "") if usable else ("", "")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


class ServerSource:
    """A server's HTTP API, with the rights of a token."""

    def __init__(self, url: str, token: str, client: httpx2.AsyncClient) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._client = client

    async def call(self, name: str, **given: Any) -> Any:
        operation = BY_NAME[name]
        path, rest = _fill_path(operation, given)
        sent: dict[str, Any] = {"json": rest} if operation.writes else {"params": rest}
        method = "POST" if operation.writes else "GET"
        try:
            answer = await self._client.request(method, f"{self._url}/api{path}", headers=self._headers, **sent)
        except httpx2.HTTPError as error:
            raise StoreUnavailable(f"{self._url} does not answer: {error or type(error).__name__}.") from None
        if answer.is_success:
            return _decode(answer.content, operation.result, self._url)
        if answer.status_code == UNAUTHORIZED:
            raise NotDone(f"{self._url} does not know this token: look at `halter tokens` there.", "forbidden")
        text = _read_refusal(answer.content) or f"{self._url} answered with status {answer.status_code}."
        if answer.status_code >= SERVER_ERROR:
            raise StoreUnavailable(text)
        raise NotDone(text, "refused")


def _fill_path(operation: Operation, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Put parameters into the path; the rest goes into the query or the body."""
    path = operation.path
    for name in operation.path_parameters:
        value = quote(str(values[name]), safe="")
        path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
    return path, {name: value for name, value in values.items() if name not in operation.path_parameters}


def _decode(content: bytes, kind: Any, url: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreUnavailable(f"{url} answers as no Halter of this version does: {error}.") from None


def _read_refusal(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Refusal).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
