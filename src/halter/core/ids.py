"""Names of things: streams, scopes and identifiers that sort by the time they were made."""

import hashlib
import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NewType, Protocol

StreamId = NewType("StreamId", str)
SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
Digest = NewType("Digest", str)

FLEET = StreamId("fleet")
OUTBOX = StreamId("outbox")
"""The stream of sent notifications, and of the runtime's own."""
AGENT_PREFIX = "agent:"
"""Prefix of an agent's name as an actor."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = tuple([first + second for first in _ALPHABET for second in _ALPHABET])
_RANDOM_BITS = 80


class Ids(Protocol):
    """A source of identifiers."""

    def make(self) -> str: ...


class SortableIds:
    """128 bits: 48 of milliseconds, then 80 that are random and count up within one millisecond.

    Written as 26 characters that sort as the numbers do, so that rows made together lie together.
    """

    def __init__(self, now: Callable[[], int], random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._now = now
        self._random_bits = random_bits
        self._last = 0

    def make(self) -> str:
        fresh = (self._now() // 1000) << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        self._last = fresh if fresh > self._last else self._last + 1
        return _encode_base32(self._last)


def _encode_base32(number: int) -> str:
    pairs = _PAIRS
    found = [pairs[number >> 120]]
    for shift in (90, 60, 30, 0):
        # Thirty bits at a time: so much is one digit of Python's own.
        part = number >> shift & 0x3FFF_FFFF
        found += (pairs[part >> 20], pairs[part >> 10 & 1023], pairs[part & 1023])
    return "".join(found)


_CHANNEL: Final = "channel:"
PERSON_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""What a person, a token or a key may be called."""


def may_decide(by: str) -> bool:
    """Whether a name can be a person's: an agent's own token decides nothing."""
    return by != "" and not by.startswith(AGENT_PREFIX)


def name_signed_on_person(label: str, issuer: str, subject: str) -> str:
    """What a provider's account is called: what follows the tilde is the account, which no token's name contains."""
    account = hashlib.sha256(f"halter account\n{issuer}\n{subject}".encode("utf-8", "replace")).hexdigest()
    return f"{label}~{account[:16]}"


def person_of(name: str) -> str:
    """The person that a name stands for: `ada.phone` and `ada` are both Ada; an address is a person's whole.

    Of a provider's account only what follows the tilde counts: people may change how they are shown.
    """
    if "~" in name:
        return name[name.rindex("~") :].casefold()
    return (name if "@" in name else name.partition(".")[0]).casefold()


def are_one_person(first: str, second: str) -> bool:
    """Whether two names may stand for one person: `ada@example.com` is Ada, too, where another name is `ada`.

    How a provider's account is shown says nothing: beside what is none, it may be the same person's.
    """
    if "~" in first or "~" in second:
        return not ("~" in first and "~" in second) or person_of(first) == person_of(second)
    if ("@" in first) == ("@" in second):
        return person_of(first) == person_of(second)
    address, name = (first, second) if "@" in first else (second, first)
    return f"{name}.".casefold().startswith(f"{address.partition('@')[0]}.".casefold())


def make_worker_id(name: str, ids: Ids) -> WorkerId:
    """Name a worker, anew for each process: a restarted one is not the one that died.

    Leases belong to workers. Under its old name a process would keep alive sessions that no worker runs; under a new
    one they are orphans when their leases run out, and another worker claims them.
    """
    return WorkerId(f"{name}.{ids.make()}")


@lru_cache(maxsize=8192)
def session_stream(session: str) -> StreamId:
    """The stream of a session: written only by the owner of its lease."""
    return StreamId(f"session:{session}")


def inbox_stream(session: str) -> StreamId:
    """The inbox of a session: any process may post there."""
    return StreamId(f"session:{session}/in")


def trigger_stream(trigger: str) -> StreamId:
    return StreamId(f"trigger:{trigger}")


def channel_stream(channel: str) -> StreamId:
    return StreamId(f"{_CHANNEL}{channel}")


def is_channel(stream: str) -> bool:
    return stream.startswith(_CHANNEL)


def session_of(stream: StreamId) -> SessionId | None:
    """The session of a stream (its own or its inbox), if any."""
    if not stream.startswith("session:"):
        return None
    return SessionId(stream.removeprefix("session:").removesuffix("/in"))


def is_inbox(stream: StreamId) -> bool:
    return stream.startswith("session:") and stream.endswith("/in")
