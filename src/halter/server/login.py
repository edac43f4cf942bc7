"""Logging in and out: a token is exchanged for a cookie, by a page of our own that needs nothing from elsewhere."""

from collections.abc import Awaitable, Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from starlette.responses import Response

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError
from halter.server.auth import LOGIN, LOGOUT, Door, cookies_of
from halter.server.entrance import TOO_MUCH, Checks, place_in
from halter.server.logins import LOGIN_LASTS
from halter.server.tokens import found

PAGES: Final = Path(__file__).parent / "pages"
WRONG: Final = "This token opens nothing here: it was removed, or never was one."
HOME: Final = "/"
LONGEST_FORM: Final = 1000


def login_url(base: str, secret: str) -> str:
    """Write the address that logs somebody in. The token stands where no browser sends it, and no server logs it."""
    return f"{base}{LOGIN}#token={secret}"


def add_login(api: FastAPI, door: Door, checks: Checks, clock: Clock) -> None:
    """Add the page, what it needs, and what it asks for."""
    page = (PAGES / "login.html").read_text("utf-8")

    def shown(problem: str, status: int, wait: int = 0) -> Response:
        headers = {"Retry-After": str(max(1, wait // SECOND))} if wait else None
        return Response(page.replace("<!--problem-->", escape(problem)), status, headers, "text/html")

    async def show() -> Response:
        return shown("", 200)

    async def enter(request: Request) -> Response:
        now, place, secret = clock.now(), place_in(request.scope), _token_in(await request.body())
        if wait := checks.tokens_tried.wait(place, secret, now):
            return shown(TOO_MUCH, 429, wait)
        token = found(checks.keys.tokens(), secret)
        if token is None:
            checks.tokens_tried.wrong(place, secret, now)
            return shown(checks.keys.problem or WRONG, 401)
        checks.tokens_tried.right(place, secret)
        try:
            await end(request)
            key = await checks.logins.begin(token, now)
        except ConfigError as error:
            return shown(f"You cannot be logged in: {error}", 503)
        checks.cookies_tried.right(place, key)
        cookie = f"{door.cookie}={key}; Max-Age={LOGIN_LASTS // SECOND}; {_attributes(request)}"
        return Response(status_code=303, headers={"Location": HOME, "Set-Cookie": cookie})

    async def leave(request: Request) -> Response:
        cookie = f"{door.cookie}=; Max-Age=0; {_attributes(request)}"
        try:
            await end(request)
        except ConfigError as error:
            problem = f"You are logged out until this server starts again, but not for good: {error}"
            return Response(problem, 503, {"Set-Cookie": cookie}, "text/plain")
        return Response(status_code=303, headers={"Location": LOGIN, "Set-Cookie": cookie})

    async def end(request: Request) -> None:
        for key in cookies_of(request.headers.getlist("cookie"), door.cookie):
            await checks.logins.end(key, clock.now())

    options: Mapping[str, Any] = {"response_model": None, "include_in_schema": False}
    api.get(LOGIN, **options)(show)
    api.post(LOGIN, **options)(enter)
    api.post(LOGOUT, **options)(leave)
    for name, kind in (("login.js", "text/javascript"), ("login.css", "text/css"), ("icon.svg", "image/svg+xml")):
        api.get(f"{LOGIN}/{name}", **options)(_file(name, kind))


def _file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (PAGES / name).read_bytes()

    async def read() -> Response:
        return Response(content, media_type=kind)

    return read


def _token_in(body: bytes) -> str:
    try:
        fields = parse_qsl(body[:LONGEST_FORM].decode("utf-8", "replace"), max_num_fields=4)
    except ValueError:
        return ""
    return dict(fields).get("token", "").strip()


def _attributes(request: Request) -> str:
    """Say who may see the cookie: no script, no other site, and where a browser came by TLS, nothing but TLS."""
    secure = "; Secure" if request.headers.get("origin", "").startswith("https:") else ""
    return f"Path=/; HttpOnly; SameSite=Strict{secure}"
