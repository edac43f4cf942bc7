"""The hash chain of a stream: what makes an edited, deleted, moved or repeated event visible.

Each hash covers a format tag, the hash before it, the header with the facts, and a salted digest of the body.
Erasing a body (and its salt) leaves the digest, so the chain still holds and nothing can be guessed from it.
"""

from hashlib import sha256
from typing import Final

import msgspec

FORMAT_TAG: Final = b"halter.event.1\n"
START: Final = bytes(32)
"""What the first event of a stream links to."""

SALT_BYTES: Final = 16

_ENCODE: Final = msgspec.json.Encoder().encode


def body_digest(salt: bytes, body: bytes) -> bytes:
    """Digest a body so that it cannot be guessed once its salt is gone."""
    return sha256(salt + body).digest()


Header = tuple[str, int, str, int, int, int, str, str | None]
"""Stream, sequence number, kind, version, time, generation, key of the write, digest of the blob."""


def link(previous: bytes, header: Header, facts: bytes, digest: bytes) -> bytes:
    """Work out the hash of an event from the one before it."""
    head = _ENCODE(header)
    sizes = b"%d %d %d\n" % (len(head), len(facts), len(digest))
    return sha256(b"".join((FORMAT_TAG, previous, sizes, head, facts, digest))).digest()
