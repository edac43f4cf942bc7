"""The pages and routes of logging in: with a token, or with a sign-on provider."""

from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path
from typing import Final, Literal, cast
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from starlette.responses import Response

from halter.core.clock import SECOND, Clock
from halter.core.errors import ConfigError, StoreUnavailable
from halter.server.auth import (
    LOGIN,
    LOGIN_LIFETIME,
    LOGOUT,
    OIDC_CALLBACK,
    OIDC_LOGIN,
    Allowed,
    AuthRejected,
    ServerNames,
    Token,
    find_cookies,
    find_token,
)
from halter.server.middleware import TOO_MANY_REQUESTS, AuthState, ClientOrigin, locate_scope
from halter.server.oidc import PENDING_LOGIN_LIFETIME, OidcSignOn
from halter.server.responses import HIDDEN_ROUTE
from halter.server.sign_on import SignOnLog

PAGES: Final = Path(__file__).parent / "pages"
LOGIN_WRONG_TOKEN: Final = "Invalid token: it was removed or never existed."  # noqa: S105 It is a sentence.
HOME: Final = "/"
NO_PROVIDER: Final = "No sign-on provider is configured. Log in with a token."
SIGNED_ON_PAGE: Final = (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={HOME}">'
    f'<title>Halter: logged in</title></head><body><p><a href="{HOME}">You are logged in.</a></p></body></html>'
)
"""A page, since after a redirect from the provider a browser would withhold our `SameSite=Strict` cookie."""
MAX_FORM_BYTES: Final = 1000


def make_login_url(base: str, secret: str) -> str:
    """Make the URL that logs in. The token is in the fragment, which no browser sends and no server logs."""
    return f"{base}{LOGIN}#token={secret}"


def add_login(
    api: FastAPI,
    server_names: ServerNames,
    auth_state: AuthState,
    clock: Clock,
    sign_ons: SignOnLog,
    oidc: OidcSignOn | None,
) -> None:
    """Add the login page, its files, and its routes."""
    page = (PAGES / "login.html").read_text("utf-8").replace("<!--sign-on-->", _link_to_provider(oidc))

    def render_login(problem: str, status: int, wait: int = 0) -> Response:
        headers = {"Retry-After": str(max(1, wait // SECOND))} if wait else None
        return Response(page.replace("<!--problem-->", escape(problem)), status, headers, "text/html")

    async def show() -> Response:
        return render_login("", 200)

    async def enter(request: Request) -> Response:
        now, origin, secret = clock.now(), locate_scope(request.scope), _token_in(await request.body())
        if wait := auth_state.tokens_tried.find_delay(origin, secret, now):
            return render_login(TOO_MANY_REQUESTS, 429, wait)
        token = find_token(auth_state.keys.tokens(), secret)
        if token is None:
            auth_state.tokens_tried.count_failure(origin, secret, now)
            return render_login(auth_state.keys.problem or LOGIN_WRONG_TOKEN, 401)
        auth_state.tokens_tried.right(origin, secret)
        try:
            await end(request)
            key = await auth_state.logins.start_login(token, now)
            await sign_ons.record_token(token)
        except ConfigError as error:
            return render_login(f"Cannot log in: {error}", 503)
        auth_state.cookies_tried.right(origin, key)
        attributes = _attributes(secure=_is_by_tls(request))
        cookie = f"{server_names.cookie}={key}; Max-Age={LOGIN_LIFETIME // SECOND}; {attributes}"
        return Response(status_code=303, headers={"Location": HOME, "Set-Cookie": cookie})

    async def leave(request: Request) -> Response:
        cookie = f"{server_names.cookie}=; Max-Age=0; {_attributes(secure=_is_by_tls(request))}"
        try:
            await end(request)
        except ConfigError as error:
            problem = f"Logged out only until this server restarts, because the logout could not be saved: {error}"
            return Response(problem, 503, {"Set-Cookie": cookie}, "text/plain")
        return Response(status_code=303, headers={"Location": LOGIN, "Set-Cookie": cookie})

    async def end(request: Request) -> None:
        for key in find_cookies(request.headers.getlist("cookie"), server_names.cookie):
            login = await auth_state.logins.end(key, clock.now())
            if login is not None and login.until > clock.now():
                await sign_ons.record_logout(login.token)

    api.get(LOGIN, **HIDDEN_ROUTE)(show)
    api.post(LOGIN, **HIDDEN_ROUTE)(enter)
    api.post(LOGOUT, **HIDDEN_ROUTE)(leave)
    for name, kind in (("login.js", "text/javascript"), ("login.css", "text/css"), ("icon.svg", "image/svg+xml")):
        api.get(f"{LOGIN}/{name}", **HIDDEN_ROUTE)(_file(name, kind))
    _add_oidc(api, server_names, auth_state, clock, sign_ons, oidc, render_login)


def _add_oidc(
    api: FastAPI,
    server_names: ServerNames,
    auth_state: AuthState,
    clock: Clock,
    sign_ons: SignOnLog,
    oidc: OidcSignOn | None,
    render_login: Callable[[str, int, int], Response],
) -> None:
    """Add the routes to a provider and back; without a provider they answer 404."""
    secure = oidc is not None and oidc.is_secure
    # With this prefix, a browser accepts the cookie from this host only.
    cookie_name = f"{'__Host-' if secure else ''}{server_names.cookie}_oidc"
    attributes = _attributes(secure=secure, site="Lax")

    async def begin() -> Response:
        login = AuthRejected(404, NO_PROVIDER) if oidc is None else await oidc.start_login(clock.now())
        if isinstance(login, AuthRejected):
            return render_login(login.sentence, login.status, 0)
        cookie = f"{cookie_name}={login.key}; Max-Age={PENDING_LOGIN_LIFETIME // SECOND}; {attributes}"
        return Response(status_code=303, headers={"Location": login.location, "Set-Cookie": cookie})

    async def finish(request: Request) -> Response:
        if oidc is None:
            return render_login(NO_PROVIDER, 404, 0)
        now, origin, query = clock.now(), locate_scope(request.scope), request.scope.get("query_string", b"")
        credential = query.decode("latin-1")
        if wait := auth_state.tokens_tried.find_delay(origin, credential, now):
            return render_login(TOO_MANY_REQUESTS, 429, wait)
        verdict = await oidc.finish(find_cookies(request.headers.getlist("cookie"), cookie_name), query, now)
        if isinstance(verdict, AuthRejected):
            auth_state.tokens_tried.count_failure(origin, credential, now)
        response = await enter(verdict, origin, oidc)
        response.headers.append("Set-Cookie", f"{cookie_name}=; Max-Age=0; {attributes}")
        return response

    async def enter(verdict: Allowed | AuthRejected, origin: ClientOrigin, oidc: OidcSignOn) -> Response:
        try:
            await sign_ons.record_login(verdict, oidc.provider_name)
            if isinstance(verdict, AuthRejected):
                return render_login(verdict.sentence, verdict.status, 0)
            key = await auth_state.logins.begin_signed_on(cast("Token", verdict.token), clock.now(), oidc.lifetime)
        except (ConfigError, StoreUnavailable) as error:
            return render_login(f"Cannot log in: {error}", 503, 0)
        auth_state.cookies_tried.right(origin, key)
        cookie = f"{server_names.cookie}={key}; Max-Age={oidc.lifetime // SECOND}; {_attributes(secure=secure)}"
        return Response(SIGNED_ON_PAGE, 200, {"Set-Cookie": cookie}, "text/html")

    api.get(OIDC_LOGIN, **HIDDEN_ROUTE)(begin)
    api.get(OIDC_CALLBACK, **HIDDEN_ROUTE)(finish)


def _link_to_provider(oidc: OidcSignOn | None) -> str:
    return "" if oidc is None else f'<p><a href="{OIDC_LOGIN}">Log in with {escape(oidc.provider_name)}</a></p>'


def _file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (PAGES / name).read_bytes()

    async def read() -> Response:
        return Response(content, media_type=kind)

    return read


def _token_in(body: bytes) -> str:
    try:
        fields = parse_qsl(body[:MAX_FORM_BYTES].decode("utf-8", "replace"), max_num_fields=4)
    except ValueError:
        return ""
    return dict(fields).get("token", "").strip()


def _is_by_tls(request: Request) -> bool:
    return request.headers.get("origin", "").startswith("https:")


def _attributes(*, secure: bool, site: Literal["Strict", "Lax"] = "Strict") -> str:
    """Format the cookie's attributes: no access by scripts or other sites, and only TLS if the browser used TLS."""
    return f"Path=/; HttpOnly; SameSite={site}{'; Secure' if secure else ''}"
