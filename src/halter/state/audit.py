"""The audit for people and sinks: one entry per call, with the start of its input and output.

An entry is delivered when its call has an outcome. A call that is refused and then allowed on a retry is delivered
twice: as refused, and with its final outcome.
"""

from typing import Any, Final

import msgspec

from halter.core.codec import decode
from halter.core.events import CallRefused, CallSettled, SessionStarted
from halter.core.ids import Digest
from halter.core.money import Usd, micros_to_usd
from halter.core.ports import Query, Store, Stored, read_content
from halter.core.text import clean, decode_body
from halter.core.vocabulary import Visit

SUMMARY_LENGTH: Final = 200
MAX_KNOWN_STARTERS: Final = 10_000


class Starter(msgspec.Struct, frozen=True):
    """Who or what started a session; for a sub-session, who or what started the session that it works for.

    `started_by` is a person, `key:NAME` or `trigger:AGENT/NAME`. `parent` is the session that asked for this one.
    """

    started_by: str = ""
    trigger: str = ""
    trigger_type: str = ""
    parent: str = ""
    parent_agent: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An audit row with the summaries of its texts; an erased text is empty.

    `started_by`, `trigger`, `trigger_type`, `parent` and `parent_agent` are those of a `Starter`. `error` says why a
    call was refused or failed.
    """

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
    started_by: str = ""
    trigger: str = ""
    trigger_type: str = ""
    parent: str = ""
    parent_agent: str = ""
    error: str = ""


class AuditRecord(msgspec.Struct, frozen=True):
    """An audit row from the store, with the bodies of its two events and the facts of the one that concludes it.

    The cost is in micro-dollars. `load` of an `AuditReader` fills in `error` and `starter`.
    """

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
    settled_kind: str | None = None
    settled_version: int | None = None
    settled_facts: bytes | None = None
    error: str = ""
    starter: Starter = Starter()


def find_concluded_call(stored_event: Stored) -> str | None:
    """Return the call or visit whose audit row an event concludes, or None."""
    match stored_event.event:
        case Visit(id=visit):
            return visit
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
        settled_facts=None,
        error=event.sentence,
    )


class _FirstEvent(msgspec.Struct, frozen=True):
    """The first event of a session, with the agent, the parent and the trigger of the session."""

    agent: str
    parent: str
    trigger: str
    trigger_type: str | None
    kind: str
    version: int
    facts: bytes


class AuditReader:
    """Loads what an audit row only names: large bodies, the error, and who or what started its session."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._starters: dict[str, Starter] = {}

    async def load(self, record: AuditRecord) -> AuditRecord:
        return msgspec.structs.replace(
            record,
            input=await read_content(self._store, record.input, record.input_blob),
            output=await read_content(self._store, record.output, record.output_blob if record.shows_result else None),
            error=record.error or _read_error(record),
            starter=await self.find_starter(record.session),
        )

    async def find_starter(self, session: str) -> Starter:
        """Find who or what started a session; "" for the session of a sign-on, which has none."""
        if not session:
            return Starter()
        if session not in self._starters:
            if len(self._starters) >= MAX_KNOWN_STARTERS:
                self._starters.clear()
            self._starters[session] = await self._read_starter(session)
        return self._starters[session]

    async def _read_starter(self, session: str) -> Starter:
        first_event = await self._read_first_event(session)
        if first_event is None:
            return Starter()
        parent = first_event.parent
        parent_event = await self._read_first_event(parent) if parent else None
        if parent_event is not None:
            return msgspec.structs.replace(
                await self.find_starter(parent), parent=parent, parent_agent=parent_event.agent
            )
        event = decode(first_event.kind, first_event.version, first_event.facts)
        started_by = event.started_by if isinstance(event, SessionStarted) else ""
        return Starter(started_by, first_event.trigger, first_event.trigger_type or "", parent)

    async def _read_first_event(self, session: str) -> _FirstEvent | None:
        rows = await self._store.ask(Query("start_of", _FirstEvent, {"session": session}))
        return rows[0] if rows else None


def _read_error(record: AuditRecord) -> str:
    """Read why a call failed or was refused from the event that concludes it; "" for one that succeeded."""
    if record.settled_facts is None or record.settled_kind is None or record.settled_version is None:
        return ""
    match decode(record.settled_kind, record.settled_version, record.settled_facts):
        case CallSettled(error=error) | CallRefused(sentence=error):
            return error
        case _:
            return ""


def make_audit_entry(record: AuditRecord) -> AuditEntry:
    shared_names = set(AuditEntry.__struct_fields__).intersection(AuditRecord.__struct_fields__)
    facts: dict[str, Any] = {name: getattr(record, name) for name in shared_names} | {
        "input_summary": summarize_body(record.input),
        "output_summary": summarize_body(record.output) if record.shows_result else "",
        "cost_usd": micros_to_usd(record.cost_usd),
        "error": " ".join(clean(record.error).split()),
    }
    return AuditEntry(**facts, **msgspec.structs.asdict(record.starter))


def describe_starter(entry: AuditEntry) -> str:
    """Describe who or what triggered a call: a person, a key, a trigger, and the agent that asked for it."""
    kind, _, name = entry.started_by.partition(":")
    trigger = f"{entry.trigger_type or 'trigger'} {entry.trigger.partition('/')[2] or entry.trigger}"
    match kind:
        case "trigger" if entry.trigger:
            starter = trigger
        case "key" if name:
            starter = f"key {name}"
        case _:
            starter = f"{entry.started_by} ({trigger})" if entry.trigger else entry.started_by
    return f"{starter}, through {entry.parent_agent or entry.parent}" if entry.parent else starter


def summarize_body(body: bytes | None) -> str:
    """Return the start of a body on one line. Bodies are redacted before they are written, so no secret is cut."""
    if body is None:
        return ""
    text = " ".join(clean(decode_body(body[: 4 * SUMMARY_LENGTH])).split())
    return text if len(text) <= SUMMARY_LENGTH else text[: SUMMARY_LENGTH - 1] + "…"
