"""The audit as people and sinks read it: one row per call, with the start of its input and output.

A row is delivered when its call has an outcome. A call that was refused and then allowed on a retry is delivered twice:
as refused, and with its final outcome.
"""

from typing import Any, Final

import msgspec

from halter.core.events import CallRefused, CallSettled, PersonSignedOn, SignOnRefused
from halter.core.ids import Digest
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Store, Stored
from halter.core.text import clean, from_body

SUMMARY_LENGTH: Final = 200


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An audit row with its summaries; erased text is empty here too."""

    tool: str
    input_summary: str
    output_summary: str
    capability_level: str
    risk_level: str
    decision: str
    decided_by: str
    outcome: str
    cost_usd: Usd
    duration_ms: int
    session: str
    call: str
    agent: str
    created_at: int


class AuditRecord(msgspec.Struct, frozen=True):
    """A row as the store returns it: cost in micro-dollars, with the bodies of its two events."""

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
    input_blob: Digest | None = None
    output_blob: Digest | None = None


def find_concluded_call(stored: Stored) -> str | None:
    """The row of the audit that an event concludes."""
    match stored.event:
        case PersonSignedOn(id=call) | SignOnRefused(id=call):
            return call
        case CallSettled(call=call, audited=True) | CallRefused(call=call):
            return call
        case _:
            return None


def restore_audit_record(found: AuditRecord, stored: Stored) -> AuditRecord:
    """Restore the row as one event left it; only a refusal can be followed by another outcome."""
    event = stored.event
    if found.settled_seq == stored.seq or not isinstance(event, CallRefused):
        return found
    return msgspec.structs.replace(
        found,
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome=event.outcome,
        cost_usd=0,
        duration_ms=0,
        created_at=stored.at,
        shows_result=0,
        asked_seq=stored.seq,
        settled_seq=stored.seq,
        input=stored.body,
        input_blob=stored.blob,
        output=None,
        output_blob=None,
    )


async def load_audit_bodies(store: Store, found: AuditRecord) -> AuditRecord:
    """Fetch bodies too large to be stored in the events."""
    body = found.input or await _read_blob(store, found.input_blob)
    gave = found.output or await _read_blob(store, found.output_blob if found.shows_result else None)
    return msgspec.structs.replace(found, input=body, output=gave)


async def _read_blob(store: Store, digest: Digest | None) -> bytes | None:
    try:
        return None if digest is None else await store.get(digest)
    except KeyError:
        return None


def make_audit_entry(found: AuditRecord) -> AuditEntry:
    shared = set(AuditEntry.__struct_fields__).intersection(AuditRecord.__struct_fields__)
    facts: dict[str, Any] = {name: getattr(found, name) for name in shared} | {
        "input_summary": summarize_body(found.input),
        "output_summary": summarize_body(found.output) if found.shows_result else "",
        "cost_usd": micros_to_usd(found.cost_usd),
    }
    return AuditEntry(**facts)


def summarize_body(body: bytes | None) -> str:
    """Show the start of a body on one line; it was redacted before it was written, so no secret is cut in half."""
    if body is None:
        return ""
    text = " ".join(clean(from_body(body[: 4 * SUMMARY_LENGTH])).split())
    return text if len(text) <= SUMMARY_LENGTH else text[: SUMMARY_LENGTH - 1] + "…"
