"""Names of streams and people, and identifiers that sort by creation time."""

import hashlib
import re
import secrets
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NewType, Protocol

StreamId = NewType("StreamId", str)
SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
Digest = NewType("Digest", str)

FLEET = StreamId("fleet")
OUTBOX = StreamId("outbox")
"""The stream of sent notifications, and of those of the runtime itself."""
AGENT_PREFIX = "agent:"
"""Prefix of an agent's name as an actor."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = tuple([first + second for first in _ALPHABET for second in _ALPHABET])
_RANDOM_BITS = 80


class Ids(Protocol):
    """A source of identifiers."""

    def make(self) -> str: ...


class SortableIds:
    """A source of 128-bit ids: 48 bits of milliseconds, then 80 random bits that increase within a millisecond.

    An id has 26 characters that sort like the numbers, so that rows created together are stored together.
    """

    def __init__(self, now: Callable[[], int], random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._now = now
        self._random_bits = random_bits
        self._last = 0

    def make(self) -> str:
        candidate = (self._now() // 1000) << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        self._last = candidate if candidate > self._last else self._last + 1
        return _encode_base32(self._last)


def _encode_base32(number: int) -> str:
    pairs = _PAIRS
    digits = [pairs[number >> 120]]
    for shift in (90, 60, 30, 0):
        # Thirty bits at a time: one digit of Python's integers.
        bits = number >> shift & 0x3FFF_FFFF
        digits += (pairs[bits >> 20], pairs[bits >> 10 & 1023], pairs[bits & 1023])
    return "".join(digits)


_CHANNEL: Final = "channel:"
_BLANK_LETTERS: Final = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that count as letters or marks and show nothing."""
_BLANKS_AT_SEPARATOR: Final = re.compile(r" ?([.@~]) ?")
PERSON_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""The valid names of people, tokens and keys."""


def can_decide(by: str) -> bool:
    """Return whether a name can be a person's. The token of an agent cannot decide anything."""
    name = normalize_person(by)
    return name != "" and not name.startswith(AGENT_PREFIX)


def normalize_person(name: str) -> str:
    """Return a person's name in its one form: composed letters, single spaces, nothing invisible.

    Names enter through it, and names are compared in this form, since older events may have another.
    """
    if name.isascii() and name.isprintable() and " " not in name:
        return name
    visible = "".join(letter for letter in name if letter.isprintable() or letter.isspace())
    return " ".join(unicodedata.normalize("NFKC", _BLANK_LETTERS.sub("", visible)).split())


def name_signed_on_person(label: str, issuer: str, subject: str) -> str:
    """Name a provider's account: its label, a tilde and a digest of the account. No token's name contains a tilde."""
    account = hashlib.sha256(f"halter account\n{issuer}\n{subject}".encode("utf-8", "replace")).hexdigest()
    return f"{normalize_person(label)}~{account[:16]}"


def person_of(name: str) -> str:
    """Return the person of a name: `ada.phone` and `ada` are both `ada`; an address is one person.

    Of a provider's account only the part after the tilde counts, because people may change their label.
    """
    name = _normalize_to_compare(name)
    if "~" in name:
        return name[name.rindex("~") :].casefold()
    return (name if "@" in name else name.partition(".")[0]).casefold()


def _normalize_to_compare(name: str) -> str:
    return _BLANKS_AT_SEPARATOR.sub(r"\1", normalize_person(name))


def are_one_person(first: str, second: str) -> bool:
    """Return whether two names may stand for one person: `ada@example.com` and `ada` may.

    The label of a provider's account proves nothing, so such an account and any other name may be the same person.
    """
    first, second = _normalize_to_compare(first), _normalize_to_compare(second)
    if "~" in first or "~" in second:
        return not ("~" in first and "~" in second) or person_of(first) == person_of(second)
    if ("@" in first) == ("@" in second):
        return person_of(first) == person_of(second)
    address, name = (first, second) if "@" in first else (second, first)
    return f"{name}.".casefold().startswith(f"{address.partition('@')[0]}.".casefold())


def make_worker_id(name: str, ids: Ids) -> WorkerId:
    """Make a worker id that is unique to the process, so that a restarted worker differs from the dead one.

    Leases belong to workers. Under its old id, a restarted process would renew leases of sessions that it does not run.
    Under a new id, those leases expire, and another worker claims the sessions.
    """
    return WorkerId(f"{name}.{ids.make()}")


@lru_cache(maxsize=8192)
def session_stream(session: str) -> StreamId:
    """Return the stream of a session. Only the owner of its lease writes there."""
    return StreamId(f"session:{session}")


SUB_SESSION_SUFFIX: Final = ".agent"


def make_sub_session_id(call: str) -> SessionId:
    """Make the id of the sub-session that a call starts: the same for every attempt of the call."""
    return SessionId(f"{call}{SUB_SESSION_SUFFIX}")


def inbox_stream(session: str) -> StreamId:
    """Return the inbox stream of a session. Any process may post there."""
    return StreamId(f"session:{session}/in")


def trigger_stream(trigger: str) -> StreamId:
    return StreamId(f"trigger:{trigger}")


def key_scope(agent: str, key: str) -> str:
    """Return the scope of a key of the proxy: a halt there stops its clients, and no other session of its agent."""
    return f"key:{agent}/{key}"


def channel_stream(channel: str) -> StreamId:
    return StreamId(f"{_CHANNEL}{channel}")


def is_channel(stream: str) -> bool:
    return stream.startswith(_CHANNEL)


def parse_session_id(stream: StreamId) -> SessionId | None:
    """Return the session of a session stream or an inbox stream, or None."""
    if not stream.startswith("session:"):
        return None
    return SessionId(stream.removeprefix("session:").removesuffix("/in"))


def is_inbox(stream: StreamId) -> bool:
    return stream.startswith("session:") and stream.endswith("/in")
