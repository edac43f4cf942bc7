"""What the API's routes share: who asks, of which store, how answers are written, and how a no is."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, StringConstraints
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response

from halter.app import App
from halter.app.desk import Desk
from halter.app.desk.agents import AgentFolders
from halter.core.errors import ConfigError, NotDone, NotDoneWhy, StoreError, StoreUnavailable
from halter.core.public_json import public_builtins, public_json
from halter.core.text import clean
from halter.server.entrance import BROKEN, WHO
from halter.server.feed import Feed

JSON: Final = "application/json"
AGAIN: Final = "2"
"""After so many seconds a store that was away may be asked again."""

STATUS: Final[Mapping[NotDoneWhy, int]] = {"wrong": 422, "missing": 404, "refused": 409, "forbidden": 403}


def _storable(text: str) -> str:
    if clean(text) != text:
        raise ValueError("it holds characters that are no text")
    return text


Name = Annotated[str, StringConstraints(max_length=300), AfterValidator(_storable)]


@dataclass(frozen=True, slots=True)
class Site:
    """What is behind the door."""

    app: App
    feed: Feed
    agents: AgentFolders = field(default_factory=AgentFolders)


def site_of(asking: HTTPConnection) -> Site:
    """Find what a request is about."""
    return asking.app.state.site


def desk_of(asking: HTTPConnection) -> Desk:
    """Sit whoever asks at a desk; the door has found out who that is."""
    site = site_of(asking)
    return Desk(site.app, asking.scope[WHO], agents=site.agents)


class Error(msgspec.Struct, frozen=True):
    """Why something was not done, in a sentence."""

    error: str


_MEANINGS: Final[Mapping[int, str]] = {
    400: "The request is broken",
    401: "Nobody is known by this token",
    403: "It takes a higher role, or comes from a foreign page",
    404: "It is not there, or not yours to see",
    405: "It is not asked for in this way",
    408: "The body was too long in coming",
    409: "It cannot be done as things stand",
    413: "The body is too long",
    421: "The server does not go by that name",
    422: "It cannot be read as it was written",
    429: "That was too much for a minute",
    500: "A mistake of Halter's own",
    503: "The store cannot be reached",
}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, words in _MEANINGS.items()
}


def encoded(value: object) -> bytes:
    """Write an answer; amounts are dollars, times integers of microseconds."""
    try:
        return public_json(value)
    except UnicodeEncodeError:
        # Somebody's text holds half a character, which JSON has no way to say.
        return public_json(_cleaned(public_builtins(value)))


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(str(key)): _cleaned(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [_cleaned(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def add_errors(api: FastAPI) -> None:
    """Let every no be a sentence with a status."""
    handlers: Sequence[tuple[Any, Callable[[Any], Response]]] = (
        (NotDone, lambda error: _no(STATUS[error.why], str(error))),
        (StoreUnavailable, lambda error: _no(503, str(error), {"Retry-After": AGAIN})),
        (StoreError, lambda error: _no(503, str(error))),
        (ConfigError, lambda error: _no(409, str(error))),
        (RequestValidationError, lambda error: _no(422, _unread(error))),
        (HTTPException, lambda error: _no(error.status_code, _plain(error), error.headers)),
        (Exception, lambda _: _no(500, BROKEN)),
    )
    for kind, make in handlers:
        api.add_exception_handler(kind, _handler(make))


def _handler(make: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_: Request, error: Exception) -> Response:
        return make(error)

    return handle


def _no(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(Error(clean(sentence))), status, headers, JSON)


def _unread(error: RequestValidationError) -> str:
    """Say which part cannot be read, and why."""
    found: list[str] = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"])
        found.append(f"{place}: {each['msg']}")
    return "; ".join(found[:10]) or "It cannot be read."


def _plain(error: HTTPException) -> str:
    match error.status_code:
        case 404:
            return "There is no such thing here."
        case 405:
            return "This is not asked for in this way."
        case _:
            return error.detail
