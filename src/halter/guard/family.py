r"""What a family of secrets is, and how one is described.

Every pattern is for RE2, over bytes, and keeps three rules, from which linear time and idempotence follow:
it accepts as soon as it may and then only grows, so that no search looks far beyond its match; it never asks for
what comes after the match; and it asks for what comes before only by `edge` and `behind`. The first two characters
are known (`heads`), so that a match is assigned to its family without trying them all.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from halter.guard.linear import compiled
from halter.guard.literals import SAMPLE

NONE: Final = -1
NEAR: Final = 8
FIRST: Final = r"[^\s\"'<>,;&\\`|(){}\[]"
"""What a value may begin with that stands after its name."""

BEHIND: Final = 256
"""So much before an announcement may say what it means."""


class Candidate(NamedTuple):
    """Where a secret may be: it is announced at `place` and begins at `start`. Only `free` to `end` counts."""

    data: bytes
    free: int
    place: int
    start: int
    end: int

    def before(self) -> bytes:
        """Return what stands before the announcement on its line."""
        return self.data[max(self.free, self.place - BEHIND) : self.place].rpartition(b"\n")[2]

    def lead(self) -> bytes:
        """Return the announcement."""
        return self.data[self.place : self.start]

    def peek(self, pattern: bytes) -> bytes:
        """Read as much of a value as is looked at: a text may be full of names, with one endless value behind each."""
        stop = compiled(pattern).match(self.data, self.start, min(self.end, self.start + SAMPLE))
        return self.data[self.start : max(stop, self.start)]

    def all(self, pattern: bytes) -> int:
        """Tell where a value ends."""
        return compiled(pattern).match(self.data, self.start, self.end)


Check = Callable[[bytes], bool]
Read = Callable[[Candidate], int]
"""Tells where a secret ends, or -1 if there is none. It looks at no more than `literals.SAMPLE` bytes to decide."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of secret.

    `lead` announces it and stays visible. `whole` is the secret, and `near` its beginning: as much of it as one
    automaton for all families can look for without growing large. With `edge`, no word may touch it before; `behind`
    says what must stand there, and `reach` which bytes before it belong to it. `check` has the last word on what was
    found; `read` finds the end of a secret that no pattern describes. A `roomy` lead has room for a secret of its own.
    """

    name: str
    heads: tuple[bytes, ...]
    lead: str = ""
    near: str
    whole: str = ""
    edge: bool = False
    fold: bool = False
    roomy: bool = False
    behind: str = ""
    reach: frozenset[int] = frozenset()
    check: Check | None = None
    read: Read | None = None


def prefixed(
    name: str,
    heads: str,
    rest: str,
    *,
    edge: bool = False,
    reach: frozenset[int] = frozenset(),
    check: Check | None = None,
) -> Family:
    """Describe tokens that begin with one of several words, as most do."""
    words = tuple(heads.split(" "))
    quoted = "|".join(re.escape(word) for word in words)
    near = f"{rest[: rest.index(']') + 1]}{{{NEAR}}}" if rest.startswith("[") else ""
    return Family(
        name=name,
        heads=tuple(word.encode() for word in words),
        near=f"(?:{quoted}){near}",
        whole=f"(?:{quoted}){rest}",
        edge=edge,
        reach=reach,
        check=check,
    )


def announced(name: str, heads: str, lead: str, near: str, whole: str, check: Check | None = None) -> Family:
    """Describe values of a known form that are announced as what they are."""
    known = tuple(head.encode() for head in heads.split(" "))
    return Family(name=name, heads=known, lead=lead, near=near, whole=whole, fold=True, check=check)


def told(
    name: str,
    heads: tuple[bytes, ...],
    lead: str,
    read: Read,
    *,
    near: str = FIRST,
    roomy: bool = False,
    reach: frozenset[int] = frozenset(),
) -> Family:
    """Describe values of any form: only a function can tell where they end and whether they are secret."""
    return Family(name=name, heads=heads, lead=lead, near=near, fold=bool(lead), read=read, roomy=roomy, reach=reach)
