"""What a crash left in doubt: each call is repeated, probed, or put to a person."""

from typing import Final

import msgspec

from halter.core.clock import DAY
from halter.core.ports import Lease, Store, read_body
from halter.core.text import decode_body, encode_body, shorten
from halter.core.tools import EffectStatus
from halter.guard.approvals import Question, ask_question
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_preparer import ToolExecution
from halter.guard.ledger import ActualResult, Ledger
from halter.guard.tool_door import ToolDoor
from halter.policy.evaluation import QuestionTerms
from halter.state.session import InFlight

DOUBT_EXPIRY: Final = 365 * DAY
"""How long a person can settle a call in doubt; until then its hold remains."""
MAX_DOUBT_TEXT_LENGTH: Final = 10_000
"""Maximum length of the text about a call in doubt, in characters."""


class CallInDoubt(msgspec.Struct, frozen=True):
    """A call with an intent and without a settlement, after a crash."""

    flight: InFlight
    act: ToolExecution | None
    terms: QuestionTerms = QuestionTerms()


class Recovery:
    """Settles calls in doubt after a crash, or asks a person about them."""

    def __init__(self, store: Store, ledger: Ledger, door: ToolDoor) -> None:
        self._store = store
        self._ledger = ledger
        self._tool_door = door

    async def resolve(self, lease: Lease, doubt: CallInDoubt) -> Answer | ApprovalRequired:
        """Settle a call in doubt: repeat it if that is harmless, else ask the tool's probe, else a person."""
        flight, execution = doubt.flight, doubt.act
        if not flight.is_call:
            await self._ledger.settle(lease, flight, ActualResult("unknown"))
            return Answer(flight.id, "unknown", "It is unknown whether the model answered.", flight.max_charge().usd)
        if execution is None:
            return await self._ask(lease, flight, doubt.terms)
        if flight.is_repeatable:
            return await self._tool_door.rerun(lease, flight, execution)
        status: EffectStatus = "unknown"
        if execution.tool.spec.checked:
            status = await self._tool_door.probe_outcome(lease, flight, execution)
        match status:
            case "done":
                return await self._settle(
                    lease, flight, ActualResult("ok", body=encode_body(DONE_BEFORE_CRASH), audited=flight.audited)
                )
            case "not_done":
                return await self._tool_door.rerun(lease, flight, execution)
            case "unknown":
                return await self._ask(lease, flight, doubt.terms)

    async def settle_by_person(self, lease: Lease, flight: InFlight, *, happened: bool) -> Answer:
        """Settle a call as a person decided: it happened, or it did not happen and cost nothing."""
        result = (
            ActualResult("ok", body=encode_body(DONE_BEFORE_CRASH))
            if happened
            else ActualResult("error", usd=0, tokens=0, error=NOT_DONE_BEFORE_CRASH)
        )
        return await self._settle(lease, flight, msgspec.structs.replace(result, audited=flight.audited))

    async def _settle(self, lease: Lease, flight: InFlight, result: ActualResult) -> Answer:
        await self._ledger.settle(lease, flight, result)
        return Answer(flight.id, result.outcome, result.error or DONE_BEFORE_CRASH)

    async def _ask(self, lease: Lease, flight: InFlight, terms: QuestionTerms) -> ApprovalRequired:
        """Ask a person about a call in doubt. Approval means that it happened."""
        stored = await self._store.read(lease.stream, flight.seq - 1, 1) if flight.seq else ()
        arguments = [decode_body(await read_body(self._store, each)) for each in stored]
        question = Question(
            decision=f"{flight.id}/unknown",
            about="unknown_call",
            subject=flight.id,
            name=flight.name,
            digest=flight.id,
            expires_in=DOUBT_EXPIRY,
            terms=terms,
            display_text=shorten(" ".join((flight.name, *arguments)), MAX_DOUBT_TEXT_LENGTH),
        )
        await self._store.commit(ask_question(question, lease))
        return ApprovalRequired(flight.id, question.decision)


DONE_BEFORE_CRASH: Final = "[It had been done before the crash.]"
NOT_DONE_BEFORE_CRASH: Final = "NotDone: it had not been done before the crash"
