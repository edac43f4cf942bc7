"""Tokens: who may come through the server's door, under which name, and what they may do and see.

A token is shown once, when it is made; kept is only its digest, in a file that nobody else may read. A copy of that
file opens nothing: tokens are random, and what browsers are given has keys of its own (`logins`).
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from halter.app.desk import ROLES, Role, Who
from halter.core.errors import ConfigError
from halter.core.ids import may_decide
from halter.server.private_file import PrivateFile
from halter.settings import logins_beside

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
PREFIX: Final = "halter_"
_TOKEN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_BYTES: Final = 32
LOST: Final = "A token is shown once. If it is lost: `halter tokens add NAME --role admin` makes another."


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a token. Without agents, its owner sees all of them."""

    name: str
    role: Role
    digest: str
    made_at: int
    agents: tuple[str, ...] = ()

    @property
    def who(self) -> Who:
        """Whoever has it."""
        return Who(self.name, self.role, self.agents)


def new_secret(randomly: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Make a token that nobody can guess."""
    return PREFIX + base64.urlsafe_b64encode(randomly(_BYTES)).decode().rstrip("=")


def digest_of(secret: str) -> str:
    """Name a token without giving it away."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def token_of(secret: str, name: str, role: str, made_at: int, agents: Sequence[str] = ()) -> Token:
    """Describe a token, to be kept. Raises ConfigError for a name or a role that there cannot be."""
    if not NAME.fullmatch(name) or not may_decide(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a token: write small letters, digits, dots, dashes or underscores, "
            "up to 64 of them."
        )
    for known in ROLES:
        if known == role:
            return Token(name, known, digest_of(secret), made_at, tuple(agents))
    raise ConfigError(f"There is no role {role!r}: write one of {', '.join(ROLES)}.")


def name_for(person: str) -> str:
    """Make a name for a token out of a person's."""
    name = re.sub(r"[^a-z0-9._-]+", "-", person.lower()).strip("._-")[:64]
    return name or "owner"


def found(tokens: Sequence[Token], secret: str) -> Token | None:
    """Find whose token this is. All are compared, each in constant time, so the answer's delay tells nothing."""
    if not _TOKEN.fullmatch(secret):
        return None
    digest = digest_of(secret)
    fitting = [token for token in tokens if hmac.compare_digest(token.digest, digest)]
    return fitting[0] if fitting else None


class TokenFile:
    """The file that tokens are kept in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PrivateFile(path)

    def tokens(self) -> tuple[Token, ...]:
        """Read all of them. Raises ConfigError where the file cannot be trusted or read."""
        data = self._file.read()
        try:
            return () if data is None else _decoded(data)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{self.path} is damaged ({error}): remove it, and make new tokens.") from None

    def add(self, token: Token) -> None:
        """Keep one more. Raises ConfigError where the name is taken."""
        with self._file.alone():
            tokens = self.tokens()
            if any(each.name == token.name for each in tokens):
                raise ConfigError(
                    f"There is a token called {token.name} already: `halter tokens remove {token.name}` ends it."
                )
            self._file.write({"tokens": (*tokens, token)})

    def remove(self, name: str) -> bool:
        """Forget one, from this moment on; tell whether it was there."""
        with self._file.alone():
            tokens = self.tokens()
            self._file.write({"tokens": [token for token in tokens if token.name != name]})
            return any(token.name == name for token in tokens)

    def state(self) -> tuple[int, ...]:
        """Tell by which it is known whether the file was changed."""
        return self._file.state()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: tuple[Token, ...]


def _decoded(data: bytes) -> tuple[Token, ...]:
    tokens = msgspec.json.decode(data, type=_Kept).tokens
    for token in tokens:
        if not NAME.fullmatch(token.name) or not re.fullmatch(r"[0-9a-f]{64}", token.digest):
            raise ValueError(f"the token {token.name!r} is none that Halter made")
    return tokens


class Keyring:
    """The tokens that count at this moment: those of a file, read again when it changes, and some kept nowhere.

    While the file cannot be read or trusted, nobody comes in by it; `problem` says why.
    """

    def __init__(self, file: TokenFile | None = None, extra: Sequence[Token] = ()) -> None:
        self.problem = ""
        self._file = file
        self._extra = tuple(extra)
        self._state: tuple[int, ...] | None = None
        self._kept: tuple[Token, ...] = ()

    @property
    def logins_file(self) -> Path | None:
        """Where the logins of these tokens are kept: beside them, if they are in a file."""
        return None if self._file is None else logins_beside(self._file.path)

    def tokens(self) -> tuple[Token, ...]:
        """List those that count."""
        if self._file is not None and (state := self._file.state()) != self._state:
            self._kept, self.problem = _read(self._file)
            self._state = state
        return (*self._extra, *self._kept)

    def counts(self, token: Token) -> bool:
        """Tell whether a token still is what it was."""
        return token in self.tokens()


def _read(file: TokenFile) -> tuple[tuple[Token, ...], str]:
    try:
        return file.tokens(), ""
    except ConfigError as error:
        return (), str(error)


def shown(token: Token) -> Mapping[str, object]:
    """Show a token to those who look after them, without what it is recognised by."""
    return {"name": token.name, "role": token.role, "agents": token.agents, "made_at": token.made_at}
