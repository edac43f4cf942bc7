"""Who called which tool, with what outcome, and who agreed to it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from halter.app.desk.desk import Desk
from halter.app.desk.operation import Agent, Limit, Moment, Name, Session, Words
from halter.core.ports import Query
from halter.core.text import LAST
from halter.state.audit import AuditEntry, AuditFound, entry, with_words

PAGE: Final = 100
"""So many rows are read at once: between pages others get on, so that a long search holds up nobody, nor a halt."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows of the audit are wanted."""

    since: Moment = 0
    until: Moment | None = None
    agent: Agent = ""
    tool: Annotated[Name, Meta(description="Only this tool.")] = ""
    outcome: Annotated[Name, Meta(description="Only this outcome.")] = ""
    session: Session = ""
    text: Annotated[Words, Meta(description="Words in what was said, in any case.")] = ""

    def fits(self, row: AuditFound) -> bool:
        """Tell whether a row is one of those that are asked for by name."""
        return all(wanted in ("", getattr(row, name)) for name, wanted in self.named().items())

    def named(self) -> dict[str, str]:
        """What the store is asked for by name."""
        return {"agent": self.agent, "tool": self.tool, "outcome": self.outcome, "session": self.session}

    def says(self, row: AuditEntry) -> bool:
        """Tell whether the words are in it."""
        said = f"{row.tool} {row.input_summary} {row.output_summary} {row.decided_by}".casefold()
        return self.text.casefold() in said


class AuditPage(Wanted, frozen=True, kw_only=True):
    """Which rows of the audit are wanted, and how many."""

    limit: Limit = 100


async def audit_page(desk: Desk, limit: int = 100, **wanted: Any) -> Sequence[AuditEntry]:
    """Search the audit, the newest first; page on with `until`."""
    found: list[AuditEntry] = []
    async with aclosing(newest(desk, Wanted(**wanted))) as rows:
        async for row in rows:
            found.append(entry(row))
            if len(found) == limit:
                break
    return found


async def audit_lines(desk: Desk, **wanted: Any) -> AsyncGenerator[AuditEntry]:
    """Export the audit, the oldest first: one JSON object to a line."""
    async with aclosing(audit(desk, Wanted(**wanted))) as rows:
        async for row in rows:
            yield entry(row)


async def audit(desk: Desk, wanted: Wanted) -> AsyncGenerator[AuditFound]:
    """Read the audit from a moment on, whether or not its calls have come to an outcome; the oldest first."""
    cursor: dict[str, Any] = {**wanted.named(), "since": wanted.since, "call": "", "limit": PAGE}
    while page := await desk.app.store.ask(Query("audit_since", AuditFound, cursor)):
        for row in page:
            if wanted.until is not None and row.created_at > wanted.until:
                return
            if (found := await _found(desk, wanted, row)) is not None:
                yield found
        cursor = {**cursor, "since": page[-1].created_at, "call": page[-1].call}


async def newest(desk: Desk, wanted: Wanted) -> AsyncGenerator[AuditFound]:
    """Read the audit back from a moment, the newest first."""
    until = desk.app.clock.now() if wanted.until is None else wanted.until
    cursor: dict[str, Any] = {**wanted.named(), "until": until, "call": LAST, "limit": PAGE}
    while page := await desk.app.store.ask(Query("audit_until", AuditFound, cursor)):
        for row in page:
            if row.created_at < wanted.since:
                return
            if (found := await _found(desk, wanted, row)) is not None:
                yield found
        cursor = {**cursor, "until": page[-1].created_at, "call": page[-1].call}


async def _found(desk: Desk, wanted: Wanted, row: AuditFound) -> AuditFound | None:
    if not desk.who.sees(row.agent):
        return None
    said = await with_words(desk.app.store, row)
    return said if wanted.says(entry(said)) else None
