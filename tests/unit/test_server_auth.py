"""Who is let in: one pure decision, tried with all that hostile pages and programs can send."""

import hashlib
import hmac

import pytest
from msgspec.structs import replace

from halter.core.clock import HOUR, SECOND
from halter.server.auth import (
    LOGIN_LIFETIME,
    Allowed,
    AuthRejected,
    IncomingRequest,
    Login,
    Token,
    authorize_request,
    digest_login_key,
    digest_token_fields,
    digest_token_secret,
    find_cookies,
    make_secret,
    make_server_names,
    make_token,
)

NOW = 1_800_000_000 * SECOND
SECRET = make_secret(lambda size: b"a" * size)
OTHER_SECRET = make_secret(lambda size: b"b" * size)
GONE_SECRET = make_secret(lambda size: b"c" * size)
ADA = make_token(SECRET, "ada", "admin", NOW)
BOB = make_token(OTHER_SECRET, "bob.b", "viewer", NOW, ["desk"])
GONE = make_token(GONE_SECRET, "gone", "admin", NOW)
DOOR = make_server_names("127.0.0.1", 8765, ["halter.example", "desk.example:9443"])
HOST = ("host", "127.0.0.1:8765")
OWN = ("origin", "http://127.0.0.1:8765")
BEARER = ("authorization", f"Bearer {SECRET}")
HTML = ("accept", "text/html,application/xhtml+xml")
LOGINS: dict[str, Login] = {}


def key_of(token: Token, at: int = NOW) -> str:
    """Log somebody in, and return the key that their browser has."""
    key = f"{token.name.replace('.', '-')}-{at}".ljust(43, "x")
    login = Login(digest_login_key(key), token.name, digest_token_fields(token), at + LOGIN_LIFETIME)
    LOGINS[login.digest] = login
    return key


def login_of(token: Token) -> Login:
    return LOGINS[digest_login_key(key_of(token))]


def cookie(token: Token, at: int = NOW, name: str = "halter_8765") -> tuple[str, str]:
    return "cookie", f"{name}={key_of(token, at)}"


COOKIE = cookie(ADA)


def forged(token: Token) -> str:
    """Sign a cookie with the digest of a token, which stands in the tokens' file."""
    ends = (NOW + LOGIN_LIFETIME) // SECOND
    body = f"halter cookie 1\n{token.name}\n{ends}".encode()
    return f"{token.name}.{ends}.{hmac.new(bytes.fromhex(token.digest), body, hashlib.sha256).hexdigest()}"


def ask(*headers: tuple[str, str], kind: str = "http", method: str = "GET", path: str = "/api/home", query: str = ""):  # noqa: ANN201
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    incoming_request = IncomingRequest(
        "websocket" if kind == "websocket" else "http", method, path, query.encode(), raw
    )
    return authorize_request(incoming_request, DOOR, [ADA, BOB], LOGINS, NOW)


WS = {"kind": "websocket", "path": "/api/ws"}
UI = {"kind": "websocket", "path": "/_nicegui_ws/socket.io/"}
POST = {"method": "POST", "path": "/api/halts"}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8765", "127.0.0.1", "127.0.0.1:8766", "127.0.0.1:80", "localhost",
        "localhost:1", "localhost.:8765", "localhost.evil.example:8765", "127.0.0.1.evil.example:8765",
        "evil.example#127.0.0.1:8765", "127.0.0.1:8765@evil.example", "user@127.0.0.1:8765", "0.0.0.0:8765",
        "[::]:8765", "[::1]", "::1:8765", "127.1:8765", "2130706433:8765", "0x7f.1:8765", "127.0.0.2:8765", "",
        "127.0.0.1:8765, evil.example", "127.0.0.1:8765/", "http://127.0.0.1:8765", "127.0.0.1:08765",
        "halter.example:1", "desk.example", "desk.example:8765", "sub.halter.example", "halter.example.evil",
        "127.0.0.1:8765\x00",
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", [{}, POST, WS, UI, {"path": "/login"}, {"path": "/hooks/desk/in", "method": "POST"}])
def test_who_asks_for_another_host_is_refused_whatever_they_bring(host: str, way: dict[str, str]) -> None:
    answer = ask(("host", host), BEARER, **way)
    assert isinstance(answer, AuthRejected)
    assert answer.status == 421


@pytest.mark.parametrize("hosts", [(), (HOST, HOST), (HOST, ("host", "evil.example")), (("host", "evil"), HOST)])
def test_a_request_without_one_host_is_refused(hosts: tuple[tuple[str, str], ...]) -> None:
    answer = ask(*hosts, BEARER)
    assert isinstance(answer, AuthRejected)
    assert answer.status == 400


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8765", "localhost:8765", "LOCALHOST:8765", "[::1]:8765", "halter.example", "halter.example:8765",
     "desk.example:9443"],
)  # fmt: skip
def test_the_names_of_the_server_itself_are_good(host: str) -> None:
    assert ask(("host", host), BEARER) == Allowed(ADA)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "https://evil.example", "null", "NULL", "", "http://localhost", "http://localhost:8766",
        "http://127.0.0.1:8765.evil.example", "http://evil.example/127.0.0.1:8765", "file://", "file://127.0.0.1:8765",
        "chrome-extension://abcdef", "ws://127.0.0.1:8765", "javascript://127.0.0.1:8765", "127.0.0.1:8765",
        "http://127.0.0.1:8765/", "http://127.0.0.1:8765@evil.example", "http://user@127.0.0.1:8765",
        "http://127.0.0.1:8765 http://evil.example", "http://0.0.0.0:8765", "data:", "about:blank",
    ],
)  # fmt: skip
@pytest.mark.parametrize("proof", [BEARER, COOKIE])
@pytest.mark.parametrize("way", [{}, POST, WS, UI])
def test_what_comes_from_a_foreign_page_is_refused(origin: str, proof: tuple[str, str], way: dict[str, str]) -> None:
    answer = ask(HOST, ("origin", origin), proof, **way)
    assert isinstance(answer, AuthRejected)
    assert answer.status == 403


def test_two_origins_are_none() -> None:
    assert isinstance(ask(HOST, OWN, OWN, BEARER), AuthRejected)
    assert isinstance(ask(HOST, OWN, ("origin", "http://evil.example"), BEARER), AuthRejected)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE", "anything"])
@pytest.mark.parametrize("way", [{}, POST, WS, UI, {"path": "/"}, {"path": "/_nicegui/3/static/x.js"}])
def test_what_a_browser_says_is_asked_by_another_page_is_refused(site: str, way: dict[str, str]) -> None:
    """To a browser every port of this machine is the same site, and its pages are sent our cookie."""
    assert isinstance(ask(HOST, ("sec-fetch-site", site), COOKIE, **way), AuthRejected)


def test_a_person_may_follow_a_link_to_a_page_but_not_to_an_answer_of_the_api() -> None:
    link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    assert isinstance(ask(HOST, COOKIE, *link, path="/fleet"), Allowed)
    assert isinstance(ask(HOST, COOKIE, *link), AuthRejected)
    assert isinstance(ask(HOST, COOKIE, *link, path="/logout", method="POST"), AuthRejected)
    frame = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")]
    assert isinstance(ask(HOST, COOKIE, *frame, path="/fleet"), AuthRejected)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", SECRET)],
        [("authorization", f"Basic {SECRET}")],
        [("authorization", f"Token {SECRET}")],
        [("authorization", f"Bearer {SECRET}x")],
        [("authorization", f"Bearer {SECRET[:-1]}")],
        [("authorization", f"Bearer {SECRET.upper()}")],
        [("authorization", f"Bearer {GONE_SECRET}")],
        [("authorization", f"Bearer {digest_token_secret(SECRET)}")],
        [("authorization", f"Bearer {ADA.name}")],
        [("authorization", f"Bearer {SECRET}, Bearer {OTHER_SECRET}")],
        [("authorization", f"Bearer {SECRET}\x00")],
        [("authorization", "Bearer halter_" + "é" * 43)],
        [BEARER, BEARER],
        [BEARER, ("authorization", f"Bearer {GONE_SECRET}")],
        [("x-authorization", f"Bearer {SECRET}")],
        [("x-forwarded-user", "ada")],
        [("halter.token", SECRET)],
        [("cookie", f"halter_8765={SECRET}")],
        [("cookie", "halter_8765=")],
        [("cookie", "halter_8765=ada")],
        [("cookie", f"halter_8765={forged(ADA)}")],
        [("cookie", f"halter_8765={ADA.digest}")],
        [("cookie", f"halter_8765={digest_token_fields(ADA)}")],
        [("cookie", f"halter_8765={login_of(ADA).digest}")],
        [("cookie", f"halter_8765={'é' * 43}")],
        [("cookie", f"halter_8765={'0' * 43}")],
        [("cookie", f"halter_8765={key_of(ADA)[:-1]}")],
        [("cookie", f"halter_8765={key_of(ADA)}x")],
        [("cookie", f"halter_8765={key_of(ADA).upper()}")],
        [cookie(GONE)],
        [cookie(ADA, NOW - LOGIN_LIFETIME)],
        [cookie(ADA, NOW - 30 * 24 * HOUR)],
        [cookie(ADA, name="halter_8766")],
        [cookie(ADA, name="Halter_8765")],
        [COOKIE, COOKIE],
        [COOKIE, cookie(BOB)],
        [("cookie", f"halter_8765={key_of(ADA)}; halter_8765=x")],
        [BEARER, cookie(BOB)],
        [BEARER, cookie(GONE)],
        [COOKIE, ("authorization", f"Bearer {OTHER_SECRET}")],
        [COOKIE, ("authorization", f"Bearer {GONE_SECRET}")],
        [COOKIE, ("authorization", "Basic YWRhOmFkYQ==")],
    ],
)
@pytest.mark.parametrize("way", [{}, WS, UI, {"path": "/", "method": "GET"}, {**POST}, {"path": "/_nicegui/x"}])
def test_who_does_not_say_clearly_who_they_are_is_refused(headers: list[tuple[str, str]], way: dict[str, str]) -> None:
    answer = ask(HOST, OWN, *headers, **way)
    assert isinstance(answer, AuthRejected)
    assert answer.status in {400, 401}


@pytest.mark.parametrize("query", [f"token={SECRET}", f"access_token={SECRET}", f"a=1&TOKEN={SECRET}"])
@pytest.mark.parametrize("way", [{}, WS, POST, {"path": "/"}])
def test_a_token_in_an_address_is_never_taken(query: str, way: dict[str, str]) -> None:
    answer = ask(HOST, OWN, query=query, **way)
    assert isinstance(answer, AuthRejected)
    assert "end up in logs" in answer.sentence


@pytest.mark.parametrize(
    ("headers", "way"),
    [
        ([COOKIE], POST),
        ([COOKIE], {"method": "DELETE"}),
        ([COOKIE], {"method": "PUT"}),
        ([COOKIE], {"method": "PATCH"}),
        ([COOKIE, BEARER], POST),
        ([COOKIE, ("referer", "http://127.0.0.1:8765/")], POST),
        ([COOKIE, ("sec-fetch-site", "none")], POST),
        ([COOKIE], WS),
        ([COOKIE], UI),
        ([COOKIE, ("sec-fetch-site", "same-origin")], WS),
        ([COOKIE], {"method": "POST", "path": "/logout"}),
        ([], {"method": "POST", "path": "/login"}),
        ([("sec-fetch-site", "none")], {"method": "POST", "path": "/login"}),
        ([("cookie", "halter_8765=stale")], {"method": "POST", "path": "/login"}),
        ([BEARER], {"method": "POST", "path": "/login"}),
        ([BEARER], {"method": "POST", "path": "/logout"}),
    ],
)
def test_where_a_browser_could_speak_for_a_person_unasked_a_page_of_ours_must_ask(
    headers: list[tuple[str, str]], way: dict[str, str]
) -> None:
    answer = ask(HOST, *headers, **way)
    assert isinstance(answer, AuthRejected)
    assert answer.status == 403
    assert not isinstance(
        ask(HOST, OWN, *[each for each in headers if each[0] != "sec-fetch-site"], **way), AuthRejected
    )


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PROPFIND", "get", ""])
def test_a_way_of_asking_that_nobody_needs_is_refused(method: str) -> None:
    assert isinstance(ask(HOST, BEARER, method=method), AuthRejected)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/login/../api/home", "GET"), ("/login/", "GET"), ("/login/other.js", "GET"), ("/LOGIN", "GET"),
        ("/healthz/x", "GET"), ("/healthz", "POST"), ("/readyz", "POST"), ("/metrics", "GET"),
        ("/hooks/desk/in", "GET"), ("/hooks/desk", "POST"),
        ("/hooks/desk/in/more", "POST"), ("/hooks//in", "POST"), ("/hooks/../api/halts", "POST"), ("/hooks/", "POST"),
        ("//login", "GET"), ("/login", "PUT"), ("/login", "HEAD"), ("/api/login", "POST"), ("/api/openapi.json", "GET"),
        ("/docs", "GET"),
        ("/logout", "POST"), ("/hooks/a/b\n", "POST"), ("", "GET"), ("/api", "GET"), ("/_nicegui/login", "GET"),
    ],
)  # fmt: skip
def test_only_a_few_exact_paths_are_open_to_nobody_in_particular(path: str, method: str) -> None:
    answer = ask(HOST, OWN, path=path, method=method)
    assert isinstance(answer, AuthRejected)
    assert answer.status == 401


@pytest.mark.parametrize(
    "path", ["/login", "/login/login.js", "/login/login.css", "/login/icon.svg", "/healthz", "/readyz"]
)
@pytest.mark.parametrize("more", [[], [("cookie", "halter_8765=stale")], [("authorization", "Bearer nonsense")]])
def test_the_login_and_the_sign_of_life_are_open_even_to_a_stale_cookie(path: str, more: list[tuple[str, str]]) -> None:
    assert ask(HOST, *more, path=path) == Allowed()


def test_a_delivery_brings_a_token_of_its_own() -> None:
    own = ("authorization", "Bearer a-token-of-the-webhook")
    assert ask(HOST, own, path="/hooks/desk/in", method="POST") == Allowed()
    assert isinstance(ask(HOST, ("origin", "http://evil.example"), own, path="/hooks/a/b", method="POST"), AuthRejected)


def test_people_are_shown_the_way_in_and_programs_are_told() -> None:
    for path, to_login in (("/", True), ("/session/desk-1", True), ("/api/home", False), ("/metrics", False)):
        answer = ask(HOST, HTML, path=path)
        assert isinstance(answer, AuthRejected)
        assert (answer.status, answer.to_login) == (401, to_login)
    answer = ask(HOST, HTML, OWN, path="/", kind="websocket")
    assert isinstance(answer, AuthRejected)
    assert not answer.to_login


def test_who_is_let_in_is_named() -> None:
    ada = Allowed(ADA, login_of(ADA))
    assert ask(HOST, BEARER) == Allowed(ADA)
    assert ask(HOST, ("authorization", f"bearer {OTHER_SECRET}")) == Allowed(BOB)
    assert ask(HOST, COOKIE) == ask(HOST, COOKIE, BEARER) == ada
    assert ask(HOST, cookie(BOB)) == Allowed(BOB, login_of(BOB))
    assert ask(HOST, ("cookie", "a=b"), COOKIE, ("cookie", "c=d; halter_1=x")) == ada
    assert ask(HOST, COOKIE, OWN, **POST) == ada
    assert ask(HOST, COOKIE, ("sec-fetch-site", "same-origin"), **POST) == ada
    assert ask(HOST, BEARER, **POST) == ask(HOST, BEARER, **WS) == Allowed(ADA)
    assert ask(HOST, COOKIE, OWN, **WS) == ask(HOST, COOKIE, ("origin", "https://halter.example"), **UI)


def test_a_cookie_dies_with_its_token_or_any_change_of_it_even_if_the_name_is_given_again() -> None:
    again = [make_token(GONE_SECRET, "ada", "admin", NOW)]
    incoming_request = IncomingRequest(
        "http", "GET", "/api/home", b"", [(b"host", HOST[1].encode()), (b"cookie", COOKIE[1].encode())]
    )
    assert authorize_request(incoming_request, DOOR, [ADA], LOGINS, NOW) == Allowed(ADA, login_of(ADA))
    for tokens in (again, [], [replace(ADA, role="viewer")], [replace(ADA, agents=("desk",))]):
        assert isinstance(authorize_request(incoming_request, DOOR, tokens, LOGINS, NOW), AuthRejected)


def test_an_address_for_all_addresses_is_no_name_of_the_server() -> None:
    for host in ("0.0.0.0", "::", ""):  # noqa: S104 It is what must not become a name.
        assert make_server_names(host, 8765).hosts == {"localhost:8765", "127.0.0.1:8765", "[::1]:8765"}
    assert "[fe80::1]:8765" in make_server_names("fe80::1", 8765).hosts
    assert {"localhost", "localhost:80"} <= make_server_names("127.0.0.1", 80).hosts


def test_cookies_are_found_by_their_whole_name() -> None:
    assert find_cookies(["a=1; halter_1=x; b=2", "halter_1=y"], "halter_1") == ["x", "y"]
    assert find_cookies(["xhalter_1=x; halter_12=y; halter_1 =z"], "halter_1") == []
