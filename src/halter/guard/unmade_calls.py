"""Calls that the guard decides about and does not make: those that wait for a person, and those that it refuses."""

from collections.abc import Mapping, Sequence

import msgspec

from halter.core.events import CallRefused, DecisionAsked
from halter.core.ports import BLOB_THRESHOLD, Draft, Lease, Rows, Store, Write
from halter.core.rows import AuditRow
from halter.core.text import clean, decode_body, encode_body
from halter.core.tools import Tool
from halter.core.vocabulary import Outcome
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_intent import CallIntent
from halter.guard.call_preparer import CallPreparer
from halter.guard.ledger import Ledger
from halter.guard.prepare import Call, SessionContext
from halter.guard.record_mask import mask_request, offload_arguments
from halter.redaction.redact import Redact


class UnmadeCalls:
    """Asks about calls, and refuses calls, without making them."""

    def __init__(self, store: Store, ledger: Ledger, preparer: CallPreparer, redact: Redact) -> None:
        self._store = store
        self._ledger = ledger
        self._preparer = preparer
        self._redact = redact

    async def ask(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int
    ) -> ApprovalRequired | None:
        """Ask a person about a call without making it. Returns the pending question; None if there is none."""
        prepared = await self._preparer.prepare(context, call, tools.get(call.tool), attempt=1)
        if isinstance(prepared, ApprovalRequired):
            return prepared
        if prepared.has_decision:
            return None
        request = await offload_arguments(self._store, mask_request(prepared.request, self._redact))
        write = CallIntent(lease, request, attempt).write(request.now)

        def decide(rows: Rows) -> Sequence[Draft]:
            # Only the question: an intent or a refusal is decided when it is the call's turn.
            drafts = write.decide(rows)
            return drafts if drafts and isinstance(drafts[0].event, DecisionAsked) else ()

        committed = await self._ledger.commit(msgspec.structs.replace(write, decide=decide))
        return ApprovalRequired(call.id, call.approval, tool=request.tool) if committed.events else None

    async def depends_on_staged(self, context: SessionContext, call: Call, tools: Mapping[str, Tool]) -> bool:
        """Return whether a call must wait for the staged calls before it.

        It need not if it reads and changes nothing, if it is staged itself, or if the guard refuses it anyway.
        """
        tool, check = tools.get(call.tool), call.provenance_check
        if tool is None or check is None or not check.has_dependencies(call.tool):
            return False
        prepared = await self._preparer.prepare(context, call, tool)
        if isinstance(prepared, ApprovalRequired):
            return False
        return prepared.request.flaw is None and not prepared.request.untrusted_reason

    async def refuse(self, lease: Lease, calls: Sequence[Call], outcome: Outcome, sentence: str) -> Sequence[Answer]:
        """Refuse calls without checking them, all in one write."""
        sentence = self._redact(sentence)
        drafts = [self._draft_refusal(call, outcome, sentence) for call in calls]
        rows = [(AuditRow, call.id) for call in calls]
        await self._ledger.commit(Write(lease.stream, f"{calls[0].id}/refused", lambda _: drafts, rows, lease))
        return [Answer(call.id, outcome, sentence) for call in calls]

    def _draft_refusal(self, call: Call, outcome: Outcome, sentence: str) -> Draft:
        tool = self._redact(clean(call.tool))[:200]
        arguments = self._redact(decode_body(call.arguments[:BLOB_THRESHOLD]))
        return Draft(CallRefused(call=call.id, tool=tool, outcome=outcome, sentence=sentence), encode_body(arguments))
