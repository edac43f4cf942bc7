"""Authorization: one pure decision for every request and every WebSocket, before anything else handles it.

A page in a browser may send requests to this machine, and the browser adds our cookie. A valid credential is therefore
not enough: a request must name this server (Host), and come from one of its pages or from no page (Origin).

A token is shown once; only its digest is stored, in a file that only its owner may read. A browser gets a random login
key. The server stores its digest, token and end in a file next to the tokens file, so logins survive a restart.
A login is bound to the whole record of its token, so a removed or changed token ends its logins.
"""

import asyncio
import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qsl

import msgspec

from halter.core.clock import HOUR
from halter.core.errors import ConfigError
from halter.core.ids import PERSON_NAME, can_decide
from halter.core.vocabulary import SignOnRefusal
from halter.operations.actor import ROLES, Principal, Role
from halter.settings import find_logins_file

_OTHERS_MAY: Final = stat.S_IRWXG | stat.S_IRWXO


class PrivateFile:
    """A small JSON file that only its owner may read. Every method but `read_state` raises ConfigError on failure."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Return the content; None if there is no file."""
        try:
            if self.path.stat().st_mode & _OTHERS_MAY:
                raise ConfigError(f"Other users can read {self.path}. Run chmod 600 on it and create new tokens.")
            return self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def write(self, content: object) -> None:
        """Replace the file atomically; the temporary file is private from the start."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f".{self.path.name}-", delete=False) as file:
                _fill(Path(file.name), file.fileno(), msgspec.json.format(msgspec.json.encode(content)), self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}.") from error

    @contextmanager
    def lock(self) -> Generator[None]:
        """Lock the file's folder, so that concurrent changes are not lost."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}.") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def read_state(self) -> tuple[int, ...]:
        """Return a value that changes whenever the file does."""
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode)


def _fill(temporary: Path, file: int, data: bytes, path: Path) -> None:
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
        os.fsync(file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


NAME: Final = PERSON_NAME
PREFIX: Final = "halter_"
_TOKEN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_BYTES: Final = 32
LOST_TOKEN_ADVICE: Final = (
    "A token is shown once. If it is lost, create another: `halter tokens add NAME --role admin`."  # noqa: S105 It is a sentence.
)


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored token. Without agents it may see all of them."""

    name: str
    role: Role
    digest: str
    made_at: int
    agents: tuple[str, ...] = ()

    @property
    def principal(self) -> Principal:
        return Principal(self.name, self.role, self.agents)


def make_secret(randomly: Callable[[int], bytes] = secrets.token_bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(randomly(_BYTES)).decode().rstrip("=")


def digest_token_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def make_token(secret: str, name: str, role: str, made_at: int, agents: Sequence[str] = ()) -> Token:
    """Make a token's record. Raises ConfigError for an invalid name or role."""
    if not NAME.fullmatch(name) or not can_decide(name):
        raise ConfigError(
            f"Invalid token name {name!r}: use up to 64 lowercase letters, digits, dots, dashes or underscores."
        )
    for candidate in ROLES:
        if candidate == role:
            return Token(name, candidate, digest_token_secret(secret), made_at, tuple(agents))
    raise ConfigError(f"Unknown role {role!r}. Use one of {', '.join(ROLES)}.")


def suggest_token_name(person: str) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", person.lower()).strip("._-")[:64]
    return name or "owner"


def find_token(tokens: Sequence[Token], secret: str) -> Token | None:
    """Return the token of a secret. All comparisons take constant time, so that timing reveals nothing."""
    if not _TOKEN.fullmatch(secret):
        return None
    digest = digest_token_secret(secret)
    matching_tokens = [token for token in tokens if hmac.compare_digest(token.digest, digest)]
    return matching_tokens[0] if matching_tokens else None


class TokenFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PrivateFile(path)

    def tokens(self) -> tuple[Token, ...]:
        """Read all tokens. Raises ConfigError where the file cannot be trusted or read."""
        data = self._file.read()
        try:
            return () if data is None else _decode_tokens(data)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}). Remove it and create new tokens.") from None

    def add(self, token: Token) -> None:
        """Add a token. Raises ConfigError if the name is taken."""
        with self._file.lock():
            tokens = self.tokens()
            if any(each.name == token.name for each in tokens):
                raise ConfigError(
                    f"A token named {token.name} already exists. Remove it with `halter tokens remove {token.name}`."
                )
            self._file.write({"tokens": (*tokens, token)})

    def remove(self, name: str) -> bool:
        """Remove a token, which is invalid immediately; return whether it existed."""
        with self._file.lock():
            tokens = self.tokens()
            self._file.write({"tokens": [token for token in tokens if token.name != name]})
            return any(token.name == name for token in tokens)

    def read_state(self) -> tuple[int, ...]:
        return self._file.read_state()


class _StoredTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[Token, ...]


def _decode_tokens(data: bytes) -> tuple[Token, ...]:
    tokens = msgspec.json.decode(data, type=_StoredTokens).tokens
    for token in tokens:
        if not NAME.fullmatch(token.name) or not re.fullmatch(r"[0-9a-f]{64}", token.digest):
            raise ValueError(f"the token {token.name!r} was not made by Halter")
    return tokens


class Keyring:
    """The valid tokens: those of a file, which is read again when it changes, and `extra` ones.

    While the file cannot be read or trusted, its tokens are invalid, and `problem` has the reason.
    """

    def __init__(self, file: TokenFile | None = None, extra: Sequence[Token] = ()) -> None:
        self.problem = ""
        self._file = file
        self._extra = tuple(extra)
        self._state: tuple[int, ...] | None = None
        self._tokens: tuple[Token, ...] = ()

    @property
    def logins_file(self) -> Path | None:
        """The logins file next to the tokens file; None without a tokens file."""
        return None if self._file is None else find_logins_file(self._file.path)

    def tokens(self) -> tuple[Token, ...]:
        if self._file is not None and (state := self._file.read_state()) != self._state:
            self._tokens, self.problem = _read(self._file)
            self._state = state
        return (*self._extra, *self._tokens)

    def is_valid(self, token: Token) -> bool:
        return token in self.tokens()


def _read(file: TokenFile) -> tuple[tuple[Token, ...], str]:
    try:
        return file.tokens(), ""
    except ConfigError as error:
        return (), str(error)


def render_token(token: Token) -> Mapping[str, object]:
    """Return a token for display, without its digest."""
    return {"name": token.name, "role": token.role, "agents": token.agents, "made_at": token.made_at}


LOGIN_LIFETIME: Final = 12 * HOUR
MAX_LOGINS_PER_TOKEN: Final = 50
"""Maximum number of logins per token; the oldest ends first."""
_KEY: Final = re.compile(r"[A-Za-z0-9_-]{43}")


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    digest: str
    token: str
    bound_to: str
    until: int
    person: Token | None = None
    """The person whom a provider signed on; `bound_to` is then its configuration, and `token` the person's name."""


def digest_login_key(key: str) -> str:
    return hashlib.sha256(b"halter login\n" + key.encode("utf-8", "replace")).hexdigest()


def digest_token_fields(token: Token) -> str:
    return hashlib.sha256(msgspec.json.encode(token)).hexdigest()


def find_login(key: str, logins: Mapping[str, Login], tokens: Sequence[Token], now: int) -> tuple[Token, Login] | None:
    """Return the token and login of a key, if the login has not ended."""
    login = logins.get(digest_login_key(key)) if _KEY.fullmatch(key) else None
    if login is None or login.until <= now:
        return None
    if login.person is not None:
        return login.person, login
    for token in tokens:
        if token.name == login.token and digest_token_fields(token) == login.bound_to:
            return token, login
    return None


class Logins:
    """The logins of one tokens file, shared by all servers that read it. Without a file they are in memory only.

    Logins by a provider are valid only under the configuration `sign_on` that they were made under.
    """

    def __init__(
        self, path: Path | None = None, randomly: Callable[[int], bytes] = secrets.token_bytes, sign_on: str = ""
    ) -> None:
        self._sign_on = sign_on
        self._file = None if path is None else PrivateFile(path)
        self._randomly = randomly
        self._state: tuple[int, ...] | None = None
        self._logins: Mapping[str, Login] = {}
        self._ended_at: dict[str, int] = {}
        self._writing = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set and replaced whenever a login ends here, so that open streams check again."""

    def current(self) -> Mapping[str, Login]:
        """Return the logins by digest; a file that cannot be read or trusted counts as empty."""
        if self._file is not None and (state := self._file.read_state()) != self._state:
            self._logins, self._state = self._select_valid(_read_logins(self._file)), state
        return self._logins

    async def start_login(self, token: Token, now: int) -> str:
        """Start a login and return the key for the browser. Raises ConfigError where it cannot be saved."""
        return await self._begin(now, token.name, digest_token_fields(token), LOGIN_LIFETIME)

    async def begin_signed_on(self, person: Token, now: int, lifetime: int) -> str:
        """Start a login of a person whom a provider signed on, for at most `LOGIN_LIFETIME`."""
        return await self._begin(now, person.name, self._sign_on, min(lifetime, LOGIN_LIFETIME), person)

    async def _begin(self, now: int, name: str, bound_to: str, lifetime: int, person: Token | None = None) -> str:
        key = base64.urlsafe_b64encode(self._randomly(_BYTES)).decode().rstrip("=")
        login = Login(digest_login_key(key), name, bound_to, now + lifetime, person)
        await self._change(lambda logins: append_login(logins, login, now))
        return key

    async def end(self, key: str, now: int) -> Login | None:
        """End a login immediately, and return it; None if there is none.

        Raises ConfigError if that could not be saved and would not survive a restart.
        """
        ended_login = self.current().get(digest_login_key(key))
        if ended_login is None:
            return None
        self._ended_at = {digest: ends_at for digest, ends_at in self._ended_at.items() if ends_at > now}
        self._ended_at[ended_login.digest] = ended_login.until
        self._logins = self._select_valid(self._logins)
        self.changed.set()
        self.changed = asyncio.Event()
        await self._change(lambda logins: [login for login in logins if login.digest != ended_login.digest])
        return ended_login

    def _select_valid(self, logins: Mapping[str, Login]) -> Mapping[str, Login]:
        return {
            digest: login
            for digest, login in logins.items()
            if digest not in self._ended_at and (login.person is None or login.bound_to == self._sign_on)
        }

    async def _change(self, change: Callable[[Sequence[Login]], Sequence[Login]]) -> None:
        async with self._writing:
            if self._file is None:
                self._logins = _by_digest(change(tuple(self._logins.values())))
            else:
                # In a thread: agents must not wait for a slow disk.
                await asyncio.to_thread(_rewrite, self._file, change)


def append_login(logins: Sequence[Login], login: Login, now: int) -> Sequence[Login]:
    """Add a login; drop expired ones, and the oldest ones of a token that has too many."""
    valid_logins = [each for each in logins if each.until > now]
    own_logins = sorted((each for each in valid_logins if each.token == login.token), key=lambda each: each.until)
    dropped_digests = {each.digest for each in own_logins[: max(0, len(own_logins) - MAX_LOGINS_PER_TOKEN + 1)]}
    return [*(each for each in valid_logins if each.digest not in dropped_digests), login]


def _rewrite(file: PrivateFile, change: Callable[[Sequence[Login]], Sequence[Login]]) -> None:
    with file.lock():
        file.write({"logins": change(tuple(_read_logins(file).values()))})


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    logins: tuple[Login, ...]


def _read_logins(file: PrivateFile) -> Mapping[str, Login]:
    """Read the logins. A damaged or exposed file counts as empty, and people log in again."""
    try:
        data = file.read()
        return {} if data is None else _by_digest(msgspec.json.decode(data, type=_Content).logins)
    except (ConfigError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _by_digest(logins: Sequence[Login]) -> Mapping[str, Login]:
    return {login.digest: login for login in logins}


LOGIN: Final = "/login"
OIDC_LOGIN: Final = f"{LOGIN}/oidc"
OIDC_CALLBACK: Final = f"{OIDC_LOGIN}/callback"
LOGOUT: Final = "/logout"
HEALTH: Final = "/healthz"
READINESS: Final = "/readyz"
METRICS: Final = "/metrics"
API: Final = "/api"
API_VERSION: Final = 1
"""The version of the API. Within it, operations, parameters and members of answers are only added."""
VERSIONED_API: Final = f"{API}/v{API_VERSION}"
LOGIN_FILES: Final = frozenset(f"{LOGIN}/{name}" for name in ("login.js", "login.css", "icon.svg"))
_FREE_PAGES: Final = LOGIN_FILES | {LOGIN, OIDC_LOGIN, OIDC_CALLBACK, HEALTH, READINESS}
METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"))
_READS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_HOOK: Final = re.compile(r"/hooks/[^/\x00-\x20]+/[^/\x00-\x20]+")
_BEARER: Final = "bearer "
_WEB_PORTS: Final = frozenset((80, 443))
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")

NO_TOKEN: Final = "Authentication required: send a token as `Authorization: Bearer TOKEN`, or log in at /login."  # noqa: S105 It is a sentence.
TOKEN_IN_ADDRESS: Final = "Tokens in a URL end up in logs. Send the token as `Authorization: Bearer TOKEN`."  # noqa: S105 It is a sentence.
WRONG_TOKEN: Final = "Invalid token: it was removed, has expired, or never existed."  # noqa: S105 It is a sentence.
LOGIN_ENDED: Final = "This login has ended. Log in again at /login."
UNKNOWN_SERVER_NAME: Final = "Unknown host name. Use the address that the server printed, or start it with --host NAME."
FOREIGN_ORIGIN: Final = "Request refused: it came from a page of another origin."


class IncomingRequest(msgspec.Struct, frozen=True):
    """An incoming request; nothing in it is trusted."""

    kind: Literal["http", "websocket"]
    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    client: str = ""
    """The address of the connection's peer, independent of any header."""

    def list_values(self, name: str) -> list[str]:
        """Return every value of a header."""
        header = name.encode()
        return [value.decode("latin-1").strip() for key, value in self.headers if key.lower() == header]

    def find_value(self, name: str) -> str:
        """Return the first value of a header; only for headers that are not decisive alone."""
        return next(iter(self.list_values(name)), "")


class ServerNames(msgspec.Struct, frozen=True):
    """The host names of this server, and the name of its cookie."""

    hosts: frozenset[str]
    cookie: str


class Allowed(msgspec.Struct, frozen=True):
    """An allowed request, with its token unless none is needed; `login` is set if a cookie was used.

    `ends_at` is set if a proxy named the person: a stream must end then, and as with a cookie another page may have
    caused the request. `account` is the person's name at the proxy or provider.
    """

    token: Token | None = None
    login: Login | None = None
    until: int = 0
    account: str = ""


class AuthRejected(msgspec.Struct, frozen=True):
    """A rejected request, with an HTTP status and a sentence. `to_login` redirects a browser to the login page.

    `wrong` names the unknown credential. `why` is the reason to refuse a person whom a proxy or a provider named, and
    `account` their name there.
    """

    status: int
    sentence: str
    to_login: bool = False
    wrong: Literal["", "token", "cookie"] = ""
    why: SignOnRefusal | None = None
    account: str = ""


def make_server_names(host: str, port: int, names: Sequence[str] = ()) -> ServerNames:
    """Make the allowed host names: the listening address, this machine's own names, and the given ones.

    The unspecified address (0.0.0.0) is not among them.
    """
    own_names = [*_LOOPBACK, *([] if _is_everywhere(host) else [_bracket_host(host)])]
    hosts = {f"{name}:{port}" for name in own_names} | {name for name in own_names if port in _WEB_PORTS}
    for name in names:
        hosts |= {name} if _has_port(name) else {_bracket_host(name), f"{_bracket_host(name)}:{port}"}
    return ServerNames(frozenset(name.lower() for name in hosts), f"halter_{port}")


def _is_everywhere(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _bracket_host(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _has_port(name: str) -> bool:
    return re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", name) is not None


IdentifyByProxy = Callable[[IncomingRequest, int], Allowed | AuthRejected | None]
"""Identifies the person of a request, if a trusted proxy names one."""


def authorize_request(
    request: IncomingRequest,
    server_names: ServerNames,
    tokens: Sequence[Token],
    logins: Mapping[str, Login],
    now: int,
    by_proxy: IdentifyByProxy = lambda _, __: None,
) -> Allowed | AuthRejected:
    """Decide whether a request is allowed, and as whom."""
    rejection = _check_address(request, server_names)
    if rejection is not None:
        return rejection
    principal = _identify_caller(request, server_names, tokens, logins, now)
    if (
        not request.list_values("authorization")
        and not (isinstance(principal, Allowed) and principal.token)
        and not is_free(request)
    ):
        principal = by_proxy(request, now) or principal
    if isinstance(principal, AuthRejected) or principal.token is None:
        if not is_free(request):
            return _redirect_to_login(
                request,
                principal if isinstance(principal, AuthRejected) else AuthRejected(401, _explain_no_token(request)),
            )
        principal = Allowed()
    if not _is_ours(request) and _needs_origin(request, by_cookie=principal.login is not None or bool(principal.until)):
        return AuthRejected(403, FOREIGN_ORIGIN)
    return principal


def is_free(request: IncomingRequest) -> bool:
    """Return True if a request needs no token: login, health checks, and webhook deliveries, which have their own."""
    if request.kind != "http":
        return False
    if request.method == "POST":
        return request.path == LOGIN or _HOOK.fullmatch(request.path) is not None
    return request.method == "GET" and request.path in _FREE_PAGES


def _check_address(request: IncomingRequest, server_names: ServerNames) -> AuthRejected | None:
    hosts, origins = request.list_values("host"), request.list_values("origin")
    if len(hosts) != 1:
        return AuthRejected(400, "A request needs exactly one Host.")
    if hosts[0].lower() not in server_names.hosts:
        return AuthRejected(421, UNKNOWN_SERVER_NAME)
    if len(origins) > 1 or not all(_is_allowed(origin, server_names) for origin in origins):
        return AuthRejected(403, FOREIGN_ORIGIN)
    if request.kind == "http" and request.method not in METHODS:
        return AuthRejected(405, "Unknown HTTP method.")
    if not _is_ours_or_a_visit(request):
        return AuthRejected(403, FOREIGN_ORIGIN)
    return None


def _is_allowed(origin: str, server_names: ServerNames) -> bool:
    scheme, separator, host = origin.lower().partition("://")
    return bool(separator) and scheme in {"http", "https"} and host in server_names.hosts


def _is_ours_or_a_visit(request: IncomingRequest) -> bool:
    """Return True if the browser's headers say that our page sends the request, or that a person opens a page.

    Programs send no such headers. To a browser, other ports of this machine are the same site, so their pages get our
    cookie.
    """
    sites = request.list_values("sec-fetch-site")
    if len(sites) > 1:
        return False
    if not sites or sites[0] in {"same-origin", "none"}:
        return True
    is_visit = request.find_value("sec-fetch-mode") == "navigate" and request.find_value("sec-fetch-dest") == "document"
    return request.kind == "http" and request.method == "GET" and is_visit and not _is_under(API, request.path)


def _is_under(root: str, path: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _needs_origin(request: IncomingRequest, *, by_cookie: bool) -> bool:
    """Return True if the request must prove that our page sent it: if a browser adds its credential automatically."""
    if request.kind == "websocket":
        return by_cookie
    return request.method not in _READS and (by_cookie or request.path in {LOGIN, LOGOUT})


def _is_ours(request: IncomingRequest) -> bool:
    """Return True if our page sent the request; an Origin header was checked before."""
    return bool(request.list_values("origin")) or (
        request.kind == "http" and request.find_value("sec-fetch-site") == "same-origin"
    )


def _identify_caller(
    request: IncomingRequest, server_names: ServerNames, tokens: Sequence[Token], logins: Mapping[str, Login], now: int
) -> Allowed | AuthRejected:
    texts, cookies = (
        request.list_values("authorization"),
        find_cookies(request.list_values("cookie"), server_names.cookie),
    )
    if is_free(request) and _HOOK.fullmatch(request.path):
        # The webhook checks the token of a delivery.
        return Allowed()
    if len(texts) > 1 or len(cookies) > 1:
        return AuthRejected(400, "Send exactly one credential.")
    bearer = _find_bearer_token(texts[0], tokens) if texts else None
    login = find_login(cookies[0], logins, tokens, now) if cookies else None
    if texts and bearer is None:
        return AuthRejected(401, WRONG_TOKEN, wrong="token")
    if cookies and login is None:
        return AuthRejected(401, LOGIN_ENDED, wrong="cookie")
    if bearer is not None and login is not None and login[0] != bearer:
        return AuthRejected(401, "The token and the cookie belong to different people. Send only one of them.")
    return Allowed(bearer) if login is None else Allowed(*login)


def _find_bearer_token(text: str, tokens: Sequence[Token]) -> Token | None:
    return find_token(tokens, text[len(_BEARER) :]) if text.lower().startswith(_BEARER) else None


def _explain_no_token(request: IncomingRequest) -> str:
    names = {name.lower() for name, _ in parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)}
    return TOKEN_IN_ADDRESS if names & {"token", "access_token"} else NO_TOKEN


def _redirect_to_login(request: IncomingRequest, rejected: AuthRejected) -> AuthRejected:
    """Redirect people to the login page; programs get the error."""
    is_page = request.kind == "http" and request.method == "GET" and "text/html" in request.find_value("accept")
    is_for_programs = _is_under(API, request.path) or request.path == METRICS
    return msgspec.structs.replace(rejected, to_login=is_page and not is_for_programs)


def find_cookies(headers: Sequence[str], name: str) -> list[str]:
    """Return all values of a cookie; more than one means that another site set one."""
    pairs = [pair.strip().partition("=") for header in headers for pair in header.split(";")]
    return [value for key, _, value in pairs if key == name]


def read_authorization(request: IncomingRequest) -> str:
    """Return the Authorization header; "" without one, or if the path needs no token of the server."""
    return "" if is_free(request) else request.find_value("authorization")


def read_login_cookie(request: IncomingRequest, server_names: ServerNames) -> str:
    return "" if is_free(request) else next(iter(find_cookies(request.list_values("cookie"), server_names.cookie)), "")
