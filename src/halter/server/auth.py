"""Who is let in: one pure decision for every request and every WebSocket, before anything else looks at it.

A page that a browser shows may ask for anything on this machine, and the browser adds our cookie to it. So who asks is
not enough: a request must be meant for us (Host), and come from a page of ours or from no page at all (Origin).
"""

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Final, Literal
from urllib.parse import parse_qsl

import msgspec

from halter.server.logins import Login, find_login
from halter.server.tokens import Token, found

LOGIN: Final = "/login"
LOGOUT: Final = "/logout"
HEALTH: Final = "/healthz"
API: Final = "/api"
LOGIN_FILES: Final = frozenset(f"{LOGIN}/{name}" for name in ("login.js", "login.css", "icon.svg"))
METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"))
_READS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_HOOK: Final = re.compile(r"/hooks/[^/\x00-\x20]+/[^/\x00-\x20]+")
_BEARER: Final = "bearer "
_WEB_PORTS: Final = frozenset((80, 443))
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

NO_TOKEN: Final = "Say who you are: send a token as `Authorization: Bearer TOKEN`, or log in at /login."  # noqa: S105 It is a sentence.
IN_ADDRESS: Final = "A token in an address ends up in logs: send it as `Authorization: Bearer TOKEN`."
WRONG_TOKEN: Final = "This token opens nothing here: it was removed, ran out, or never was one."  # noqa: S105 It is a sentence.
ENDED: Final = "This login has ended: log in again at /login."
ELSEWHERE: Final = "This server does not go by that name: use the address that it showed, or start it with --host NAME."
FOREIGN: Final = "This came from a page of somebody else, and is not done."


class Asked(msgspec.Struct, frozen=True):
    """A request as it came in, before anything is believed of it."""

    kind: Literal["http", "websocket"]
    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()

    def all(self, name: str) -> list[str]:
        """Return every value of a header."""
        wanted = name.encode()
        return [value.decode("latin-1").strip() for key, value in self.headers if key.lower() == wanted]

    def first(self, name: str) -> str:
        """Return a header that decides nothing by itself."""
        return next(iter(self.all(name)), "")


class Door(msgspec.Struct, frozen=True):
    """Under which names this server may be asked, and what its cookie is called."""

    hosts: frozenset[str]
    cookie: str


class Allowed(msgspec.Struct, frozen=True):
    """Let in: with a token, or without one where none is needed; `login` is the one that a cookie stands for."""

    token: Token | None = None
    login: Login | None = None


class Rejected(msgspec.Struct, frozen=True):
    """Not let in: the status of HTTP that says why, and a sentence. A person may be shown the way to the login.

    `wrong` is what was shown and is known to nobody.
    """

    status: int
    sentence: str
    to_login: bool = False
    wrong: Literal["", "token", "cookie"] = ""


def door_of(host: str, port: int, names: Sequence[str] = ()) -> Door:
    """Make the list of names: where it listens, this machine's own names with that port, and those that were given.

    The address that stands for all addresses is no name by which anybody should ask.
    """
    own = [*_LOOPBACK, *([] if _is_everywhere(host) else [_bracketed(host)])]
    hosts = {f"{name}:{port}" for name in own} | {name for name in own if port in _WEB_PORTS}
    for name in names:
        hosts |= {name} if _has_port(name) else {_bracketed(name), f"{_bracketed(name)}:{port}"}
    return Door(frozenset(name.lower() for name in hosts), f"halter_{port}")


def _is_everywhere(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _has_port(name: str) -> bool:
    return re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", name) is not None


def judge(
    asked: Asked, door: Door, tokens: Sequence[Token], logins: Mapping[str, Login], now: int
) -> Allowed | Rejected:
    """Decide whether a request is let in, and as whom."""
    against = _against_address(asked, door)
    if against is not None:
        return against
    who = _who(asked, door, tokens, logins, now)
    if isinstance(who, Rejected) or who.token is None:
        if not is_free(asked):
            return _towards_login(asked, who if isinstance(who, Rejected) else Rejected(401, _nobody(asked)))
        who = Allowed()
    if not _is_ours(asked) and _needs_origin(asked, by_cookie=who.login is not None):
        return Rejected(403, FOREIGN)
    return who


def is_free(asked: Asked) -> bool:
    """Tell whether nobody has to say who they are: to log in, to see that it lives, to deliver (with other tokens)."""
    if asked.kind != "http":
        return False
    if asked.method == "POST":
        return asked.path == LOGIN or _HOOK.fullmatch(asked.path) is not None
    return asked.method == "GET" and (asked.path in {LOGIN, HEALTH} or asked.path in LOGIN_FILES)


def _against_address(asked: Asked, door: Door) -> Rejected | None:
    hosts, origins = asked.all("host"), asked.all("origin")
    if len(hosts) != 1:
        return Rejected(400, "A request needs exactly one Host.")
    if hosts[0].lower() not in door.hosts:
        return Rejected(421, ELSEWHERE)
    if len(origins) > 1 or not all(_is_allowed(origin, door) for origin in origins):
        return Rejected(403, FOREIGN)
    if asked.kind == "http" and asked.method not in METHODS:
        return Rejected(405, "This way of asking is not known here.")
    if not _is_ours_or_a_visit(asked):
        return Rejected(403, FOREIGN)
    return None


def _is_allowed(origin: str, door: Door) -> bool:
    scheme, separator, host = origin.lower().partition("://")
    return bool(separator) and scheme in {"http", "https"} and host in door.hosts


def _is_ours_or_a_visit(asked: Asked) -> bool:
    """Tell whether a browser says that a page of ours asks, or that a person goes to a page; programs say nothing.

    To a browser, other ports of this machine are the same site: their pages are sent our cookie.
    """
    sites = asked.all("sec-fetch-site")
    if len(sites) > 1:
        return False
    if not sites or sites[0] in {"same-origin", "none"}:
        return True
    visit = asked.first("sec-fetch-mode") == "navigate" and asked.first("sec-fetch-dest") == "document"
    return asked.kind == "http" and asked.method == "GET" and visit and not _is_under(API, asked.path)


def _is_under(root: str, path: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _needs_origin(asked: Asked, *, by_cookie: bool) -> bool:
    """Tell whether it must be shown that a page of ours asks: wherever a browser would speak for a person unasked."""
    if asked.kind == "websocket":
        return by_cookie
    return asked.method not in _READS and (by_cookie or asked.path in {LOGIN, LOGOUT})


def _is_ours(asked: Asked) -> bool:
    """Tell whether a page of ours asks; an Origin that is there was found good before."""
    return bool(asked.all("origin")) or (asked.kind == "http" and asked.first("sec-fetch-site") == "same-origin")


def _who(
    asked: Asked, door: Door, tokens: Sequence[Token], logins: Mapping[str, Login], now: int
) -> Allowed | Rejected:
    said, cookies = asked.all("authorization"), cookies_of(asked.all("cookie"), door.cookie)
    if is_free(asked) and _HOOK.fullmatch(asked.path):
        # A delivery brings a token of its own, which is looked at where it is delivered.
        return Allowed()
    if len(said) > 1 or len(cookies) > 1:
        return Rejected(400, "Say once who you are.")
    bearer = _by_bearer(said[0], tokens) if said else None
    login = find_login(cookies[0], logins, tokens, now) if cookies else None
    if said and bearer is None:
        return Rejected(401, WRONG_TOKEN, wrong="token")
    if cookies and login is None:
        return Rejected(401, ENDED, wrong="cookie")
    if bearer is not None and login is not None and login[0] != bearer:
        return Rejected(401, "The token and the cookie are not the same person's: send one of them.")
    return Allowed(bearer) if login is None else Allowed(*login)


def _by_bearer(said: str, tokens: Sequence[Token]) -> Token | None:
    return found(tokens, said[len(_BEARER) :]) if said.lower().startswith(_BEARER) else None


def _nobody(asked: Asked) -> str:
    names = {name.lower() for name, _ in parse_qsl(asked.query.decode("latin-1"), keep_blank_values=True)}
    return IN_ADDRESS if names & {"token", "access_token"} else NO_TOKEN


def _towards_login(asked: Asked, rejected: Rejected) -> Rejected:
    """Show people the way; programs are told what is wrong."""
    page = asked.kind == "http" and asked.method == "GET" and "text/html" in asked.first("accept")
    return msgspec.structs.replace(rejected, to_login=page and not _is_under(API, asked.path))


def cookies_of(headers: Sequence[str], name: str) -> list[str]:
    """Find all values of a cookie: more than one means that somebody else set one as well."""
    pairs = [pair.strip().partition("=") for header in headers for pair in header.split(";")]
    return [value for key, _, value in pairs if key == name]


def shown_token(asked: Asked) -> str:
    """Return what is shown as a token in a header; nothing where none is, or the path takes tokens of its own."""
    return "" if is_free(asked) else asked.first("authorization")


def shown_cookie(asked: Asked, door: Door) -> str:
    """Return what is shown as our cookie."""
    return "" if is_free(asked) else next(iter(cookies_of(asked.all("cookie"), door.cookie)), "")
