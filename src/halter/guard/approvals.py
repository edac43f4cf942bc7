"""Decisions: one durable queue of what a person must say yes or no to."""

from collections.abc import Sequence

import msgspec

from halter.core.events import DecisionMade, Verdict
from halter.core.ids import inbox_stream
from halter.core.ports import Draft, Query, Rows, Store, Write
from halter.core.rows import DecisionRow


class Open(msgspec.Struct, frozen=True):
    """A decision that waits for somebody, with what they are shown."""

    decision: str
    about: str
    session: str
    agent: str
    subject: str
    name: str
    digest: str
    level: str
    risk: str
    asked_at: int
    expires_at: int
    body: bytes | None


async def needs_you(store: Store) -> Sequence[Open]:
    """List what waits for a person, the longest waiting first."""
    return await store.ask(Query("open_decisions", Open))


def decide(asked: Open, verdict: Verdict, by: str, key: str, *, edited: tuple[bytes, str] | None = None) -> Write:
    """Answer a decision, once, before it expires. The answer is bound to the digest of what the person was shown.

    `edited` is other arguments and their digest. The session wakes by it.
    """
    body, digest = edited or (None, asked.digest)
    event = DecisionMade(decision=asked.decision, verdict=verdict, by=by, digest=digest)

    def judged(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, asked.decision)
        if row is None or row.verdict or rows.now >= row.expires_at or row.digest != asked.digest:
            return []
        return [Draft(event, body)]

    return Write(inbox_stream(asked.session), key, judged, [(DecisionRow, (asked.decision,))])
