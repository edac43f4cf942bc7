"""Who is logged in: a browser holds a random key, the server knows its digest, whose it is, and when it ends.

The list is kept in a file beside the tokens, so a login outlives a restart and its end does too. Neither that file nor
the tokens' own gives a key away. A login is bound to the whole record of its token: a token that is removed, or given
another role or other agents, ends its logins.
"""

import asyncio
import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from halter.core.clock import HOUR
from halter.core.errors import ConfigError
from halter.server.private_file import PrivateFile
from halter.server.tokens import Token

LOGIN_LASTS: Final = 12 * HOUR
MOST_OF_A_TOKEN: Final = 50
"""So many logins a token may have at once; the oldest ends first."""
_KEY: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_BYTES: Final = 32


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a login."""

    digest: str
    token: str
    bound_to: str
    until: int


def digest_of_key(key: str) -> str:
    """Name the key in a browser's cookie without giving it away."""
    return hashlib.sha256(b"halter login\n" + key.encode("utf-8", "replace")).hexdigest()


def binding_of(token: Token) -> str:
    """Name a token with everything that is said of it."""
    return hashlib.sha256(msgspec.json.encode(token)).hexdigest()


def find_login(key: str, logins: Mapping[str, Login], tokens: Sequence[Token], now: int) -> tuple[Token, Login] | None:
    """Find out whose login a key stands for, if it has not ended."""
    login = logins.get(digest_of_key(key)) if _KEY.fullmatch(key) else None
    if login is None or login.until <= now:
        return None
    for token in tokens:
        if token.name == login.token and binding_of(token) == login.bound_to:
            return token, login
    return None


class Logins:
    """The logins of one tokens file, shared by all servers that read it. Without a file they live in this process."""

    def __init__(self, path: Path | None = None, randomly: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._file = None if path is None else PrivateFile(path)
        self._randomly = randomly
        self._state: tuple[int, ...] | None = None
        self._kept: Mapping[str, Login] = {}
        self._ended: dict[str, int] = {}
        self._writing = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set, and replaced, whenever a login ends here: open streams look again."""

    def current(self) -> Mapping[str, Login]:
        """Return all logins by their digests; those in a file that cannot be read or trusted do not count."""
        if self._file is not None and (state := self._file.state()) != self._state:
            self._kept, self._state = self._without_ended(_read(self._file)), state
        return self._kept

    async def begin(self, token: Token, now: int) -> str:
        """Log somebody in; return the key for the browser. Raises ConfigError where it cannot be kept."""
        key = base64.urlsafe_b64encode(self._randomly(_BYTES)).decode().rstrip("=")
        login = Login(digest_of_key(key), token.name, binding_of(token), now + LOGIN_LASTS)
        await self._change(lambda logins: begun(logins, login, now))
        return key

    async def end(self, key: str, now: int) -> None:
        """Log somebody out, at once. Raises ConfigError where that would not outlive a restart."""
        gone = self.current().get(digest_of_key(key))
        if gone is None:
            return
        self._ended = {digest: until for digest, until in self._ended.items() if until > now}
        self._ended[gone.digest] = gone.until
        self._kept = self._without_ended(self._kept)
        self.changed.set()
        self.changed = asyncio.Event()
        await self._change(lambda logins: [login for login in logins if login.digest != gone.digest])

    def _without_ended(self, logins: Mapping[str, Login]) -> Mapping[str, Login]:
        return {digest: login for digest, login in logins.items() if digest not in self._ended}

    async def _change(self, change: Callable[[Sequence[Login]], Sequence[Login]]) -> None:
        async with self._writing:
            if self._file is None:
                self._kept = _by_digest(change(tuple(self._kept.values())))
            else:
                # A disk may take its time, and agents must not wait for it.
                await asyncio.to_thread(_rewrite, self._file, change)


def begun(logins: Sequence[Login], login: Login, now: int) -> Sequence[Login]:
    """Add a login, without those that have ended and the oldest ones of a token that has too many."""
    others = [each for each in logins if each.until > now]
    own = sorted((each for each in others if each.token == login.token), key=lambda each: each.until)
    too_many = {each.digest for each in own[: max(0, len(own) - MOST_OF_A_TOKEN + 1)]}
    return [*(each for each in others if each.digest not in too_many), login]


def _rewrite(file: PrivateFile, change: Callable[[Sequence[Login]], Sequence[Login]]) -> None:
    with file.alone():
        file.write({"logins": change(tuple(_read(file).values()))})


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    logins: tuple[Login, ...]


def _read(file: PrivateFile) -> Mapping[str, Login]:
    """Read the list. One that is damaged or open to others is as good as none: all log in again."""
    try:
        data = file.read()
        return {} if data is None else _by_digest(msgspec.json.decode(data, type=_Content).logins)
    except (ConfigError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _by_digest(logins: Sequence[Login]) -> Mapping[str, Login]:
    return {login.digest: login for login in logins}
