"""The audit as people read it: one row a call, with the beginning of what was said."""

import msgspec

from halter.core.text import clean, from_body

SUMMARY = 200


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An audit row with its summaries; what was erased is empty here too."""

    tool: str
    input_summary: str
    output_summary: str
    capability_level: str
    risk_level: str
    decision: str
    decided_by: str
    outcome: str
    cost_usd: int
    duration_ms: int
    session: str
    call: str
    agent: str
    created_at: int


class AuditFound(msgspec.Struct, frozen=True):
    """A row as the store answers it, with the bodies of its two events."""

    call: str
    session: str
    agent: str
    tool: str
    capability_level: str
    risk_level: str
    decision: str
    decided_by: str
    outcome: str
    cost_usd: int
    duration_ms: int
    created_at: int
    shows_result: int
    asked_seq: int
    settled_seq: int
    input: bytes | None
    output: bytes | None


def entry(found: AuditFound) -> AuditEntry:
    """Write a row as people read it."""
    return AuditEntry(
        tool=found.tool,
        input_summary=summary(found.input),
        output_summary=summary(found.output) if found.shows_result else "",
        capability_level=found.capability_level,
        risk_level=found.risk_level,
        decision=found.decision,
        decided_by=found.decided_by,
        outcome=found.outcome,
        cost_usd=found.cost_usd,
        duration_ms=found.duration_ms,
        session=found.session,
        call=found.call,
        agent=found.agent,
        created_at=found.created_at,
    )


def summary(body: bytes | None) -> str:
    """Show the beginning of a body on one line; it was redacted before it was written, so nothing can be cut open."""
    if body is None:
        return ""
    text = " ".join(clean(from_body(body[: 4 * SUMMARY])).split())
    return text if len(text) <= SUMMARY else text[: SUMMARY - 1] + "…"
