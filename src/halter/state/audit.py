"""The audit for people and sinks: one entry per call, with the start of its input and output.

An entry is delivered when its call has an outcome. A call that is refused and then allowed on a retry is delivered
twice: as refused, and with its final outcome.
"""

from typing import Any, Final

import msgspec

from halter.core.events import CallRefused, CallSettled, PersonSignedOn, SignOnRefused
from halter.core.ids import Digest
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Store, Stored
from halter.core.text import clean, decode_body

SUMMARY_LENGTH: Final = 200


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An audit row with the summaries of its texts; an erased text is empty."""

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
    """An audit row from the store, with the bodies of its two events. The cost is in micro-dollars."""

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


def find_concluded_call(stored_event: Stored) -> str | None:
    """Return the call whose audit row an event concludes, or None."""
    match stored_event.event:
        case PersonSignedOn(id=call) | SignOnRefused(id=call):
            return call
        case CallSettled(call=call, audited=True) | CallRefused(call=call):
            return call
        case _:
            return None


def restore_audit_record(record: AuditRecord, stored_event: Stored) -> AuditRecord:
    """Restore the row as of an event. Only a refusal can be followed by another outcome."""
    event = stored_event.event
    if record.settled_seq == stored_event.seq or not isinstance(event, CallRefused):
        return record
    return msgspec.structs.replace(
        record,
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome=event.outcome,
        cost_usd=0,
        duration_ms=0,
        created_at=stored_event.at,
        shows_result=0,
        asked_seq=stored_event.seq,
        settled_seq=stored_event.seq,
        input=stored_event.body,
        input_blob=stored_event.blob,
        output=None,
        output_blob=None,
    )


async def load_audit_bodies(store: Store, record: AuditRecord) -> AuditRecord:
    """Load the bodies that are stored as blobs."""
    input_body = record.input or await _read_blob(store, record.input_blob)
    output_body = record.output or await _read_blob(store, record.output_blob if record.shows_result else None)
    return msgspec.structs.replace(record, input=input_body, output=output_body)


async def _read_blob(store: Store, digest: Digest | None) -> bytes | None:
    try:
        return None if digest is None else await store.get(digest)
    except KeyError:
        return None


def make_audit_entry(record: AuditRecord) -> AuditEntry:
    shared_names = set(AuditEntry.__struct_fields__).intersection(AuditRecord.__struct_fields__)
    facts: dict[str, Any] = {name: getattr(record, name) for name in shared_names} | {
        "input_summary": summarize_body(record.input),
        "output_summary": summarize_body(record.output) if record.shows_result else "",
        "cost_usd": micros_to_usd(record.cost_usd),
    }
    return AuditEntry(**facts)


def summarize_body(body: bytes | None) -> str:
    """Return the start of a body on one line. Bodies are redacted before they are written, so no secret is cut."""
    if body is None:
        return ""
    text = " ".join(clean(decode_body(body[: 4 * SUMMARY_LENGTH])).split())
    return text if len(text) <= SUMMARY_LENGTH else text[: SUMMARY_LENGTH - 1] + "…"
