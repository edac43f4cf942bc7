"""The tool door: the only way to run a tool.

    1. prepare   without a lock          the tool, its arguments, level, risk, price, rules, a person's edits
    2. admit     one short transaction   R5 halt -> R6 grants -> money -> approval -> R4 hold
    3. run       no transaction          the tool, with a permit and a deadline; a halt cancels it
    4. settle    one transaction         the outcome and its true cost

`call` prepares, `admit_and_run` admits, and the body of an effect (`Door.carry_out`) runs and settles. A tool needs
a permit, and only this module makes permits. After a crash, `Recovery` settles every call in doubt: no effect happens
twice, and none is forgotten. A simulation informs the model and the person who decides. It is not a security control:
the call passes the same checks with or without it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import ToolError
from halter.core.events import CallRefused, CallStarted, DecisionAsked, FilesGiven
from halter.core.messages import FileReader, Text
from halter.core.ports import BLOB_THRESHOLD, Committed, Draft, Lease, Rows, Store, Stored, Write, offload_body
from halter.core.rows import AuditRow
from halter.core.text import clean, decode_body, encode_body
from halter.core.tools import EffectStatus, Failed, JournalEffect, Output, Permit, Tool, Unstoppable
from halter.core.vocabulary import Outcome
from halter.guard.answer_stream import WholeTextMask
from halter.guard.call_answer import (
    Answer,
    ApprovalRequired,
    find_decided,
    read_call_admission,
    read_call_refusal,
    read_settled_answer,
)
from halter.guard.call_preparer import CallPreparer, ToolExecution
from halter.guard.effect import MAX_ERROR_LENGTH, STARTED_BY_EARLIER_OWNER, Door, RunningEffect
from halter.guard.halts import BudgetBusy, CancelledEffect, EffectStopped, HaltWatch
from halter.guard.judge import CallRequest, judge_asked_call, judge_call, list_call_rows
from halter.guard.ledger import BUDGET_WAIT, ActualResult, Ledger, Settlement
from halter.guard.prepare import Call, SessionContext
from halter.guard.provenance_check import ProvenanceCheck
from halter.guard.record_mask import mask_effect, mask_request
from halter.guard.simulation import Simulated, Simulator, add_prediction, should_simulate
from halter.redaction.redact import Redact
from halter.redaction.secrets import GivenSecrets, Secrets
from halter.state.session import InFlight, track_call
from halter.system.prints import MaskedPrints, PrintMask

NO_SECRETS: Final = GivenSecrets({})
ADMITTED_BEFORE: Final = "This call was already admitted, and an intent allows one effect. Make a new call."
MAYBE_DONE: Final = "It is unknown whether the call took effect."
_DECIDED: Final = (CallStarted, CallRefused)


class _CallIntent(msgspec.Struct, gc=False):
    """The intent of a call: makes the write that admits or refuses it. Each attempt is judged at its own time."""

    lease: Lease
    call_request: CallRequest
    attempt: int

    def write(self, now: int, deferred: Write | None = None) -> Write:
        request = self.call_request
        if now != request.now:
            request = self.call_request = request.at(now)
        judge = judge_call if request.question_hold is None else judge_asked_call
        key, decide = f"{request.call}/asked/{self.attempt}", partial(judge, request)
        return Write(self.lease.stream, key, decide, list_call_rows(request), self.lease, (), deferred)


class _RunningCall(RunningEffect):
    """A call that runs now, with its permit."""

    execution: ToolExecution
    permit: Permit

    @property
    def can_have_taken_effect(self) -> bool:
        """True if a stop may have come after a change: the call began, and does more than read."""
        return self.execution.tool.spec.effect != "read" and self.permit.may_have_acted


class _PreparedRead(NamedTuple):
    """A sensor's call: prepared once, then repeated."""

    context: SessionContext
    tool: Tool | None
    request: CallRequest
    execution: ToolExecution | None


class ToolDoor(Door[_RunningCall, tuple[Output, Sequence[Text]], Answer]):
    """Prepares a call, admits or refuses it, runs the tool, and settles the cost: the only way to run a tool."""

    failures = (EffectStopped, TimeoutError, Unstoppable, Failed)

    def __init__(  # noqa: PLR0913 A call needs each of these, and most have a default.
        self,
        store: Store,
        clock: Clock,
        ledger: Ledger,
        *,
        redact: Redact,
        max_wait: int = BUDGET_WAIT,
        halts: HaltWatch | None = None,
        print_mask: Callable[[], PrintMask] | None = None,
        secrets: Secrets = NO_SECRETS,
        simulator: Simulator | None = None,
        read_files: FileReader | None = None,
    ) -> None:
        super().__init__(store, clock, ledger, halts)
        self.preparer = CallPreparer(store, clock, ledger, self._halts, secrets)
        self._read_files = read_files
        self._redact = redact
        self._print_mask = print_mask or partial(WholeTextMask, redact)
        self._max_wait = max_wait
        self._simulator = simulator
        self._prepared_reads: dict[tuple[str, bytes, int | None], _PreparedRead] = {}

    async def call(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and run it if the checks admit it.

        To retry a call that was refused, or that waited for a decision, pass the next `attempt` number.
        """
        if attempt or call.decision:
            decided_call = await self.preparer.apply_decision(context, call)
            if isinstance(decided_call, ApprovalRequired):
                return decided_call
            call = decided_call
        if call.tool not in tools:
            call = msgspec.structs.replace(call, tool=self._redact(clean(call.tool)))
        prepared = await self.preparer.prepare(context, call, tools.get(call.tool))
        request, prediction, now = prepared.request, None, prepared.request.now
        can_simulate = prepared.rule is not None and prepared.rule.simulate != "never"
        if can_simulate and self._simulator is not None and not attempt and should_simulate(prepared):
            prediction, now = await self._simulator.simulate(lease, context, prepared, call.describe_situation()), 0
            request = add_prediction(request, prediction)
        execution = self.preparer.make_execution(context, prepared.tool, prepared.arguments, call)
        answer = await self.admit_and_run(
            lease, request, execution, attempt, call.provenance_check, now, call.must_return
        )
        if not isinstance(prediction, Simulated) or prediction.is_cached or isinstance(answer, BudgetBusy):
            return answer
        return msgspec.structs.replace(answer, simulation=prediction.text)

    async def admit_and_run(
        self,
        lease: Lease,
        request: CallRequest,
        execution: ToolExecution | None,
        attempt: int = 0,
        provenance_check: ProvenanceCheck | None = None,
        now: int = 0,
        must_return: Callable[[], bool] = bool,
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Admit or refuse a call, and run it if admitted. The journal has the outcome when this method returns.

        A request without an `execution` has a flaw, and the judge refuses it. The session's provenance check, if given,
        receives the decision. `now` is the current time, if the caller has just read it. `must_return` ends a wait for
        money.
        """
        masked_request = mask_request(request, self._redact)
        if len(masked_request.arguments) > BLOB_THRESHOLD:
            masked_request = await self._offload_arguments(masked_request)
        if attempt and request.legs and request.approval is not None and request.question_hold is None:
            hold = await self.preparer.find_question_hold(request.session, request.approval.decision)
            masked_request = msgspec.structs.replace(masked_request, question_hold=hold)
        intent = _CallIntent(lease, masked_request, attempt)
        committed = await self._ledger.commit_intent(intent, self._max_wait, now, must_return)
        if committed is None:
            return BudgetBusy(request.call)
        stored = find_decided(committed)
        event = stored.event
        if provenance_check is not None and isinstance(event, _DECIDED):
            provenance_check.apply(event, intent.call_request.arguments)
        if not isinstance(event, CallStarted):
            return read_call_refusal(committed)
        flight = track_call(event, stored, intent.call_request.accounts)
        if committed.is_repeated:
            earlier_answer = await self.find_earlier_answer(lease, flight, committed)
            if earlier_answer is not None:
                return earlier_answer
        if execution is None:
            raise AssertionError(f"{request.call} was admitted without a tool: the judge let a flaw pass.")
        return await self.carry_out(self._permit_call(lease, flight, execution))

    async def _offload_arguments(self, request: CallRequest) -> CallRequest:
        _, blob = await offload_body(self._store, request.arguments)
        return msgspec.structs.replace(request, blob=blob)

    def _permit_call(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> _RunningCall:
        scopes, timeout, can_defer = execution.scopes, execution.timeout, execution.can_defer
        permit = Permit(flight.id, self._clock.now() + timeout, execution.secrets, execution.is_near_budget)
        return _RunningCall(lease, flight, read_monotonic(self._clock), scopes, timeout, can_defer, execution, permit)

    async def start(self, effect: _RunningCall) -> tuple[Output, Sequence[Text]]:
        """Run the tool, with secrets masked in what it prints, and read the files that it gives."""
        execution = effect.execution
        with MaskedPrints(self._print_mask):
            output = await execution.tool.run(execution.arguments, effect.permit)
            parts = await self._read_files(output.files) if output.files and self._read_files else ()
        return output, parts

    def read_value(self, effect: _RunningCall, value: tuple[Output, Sequence[Text]]) -> ActualResult:
        output, parts = value
        effects = tuple([mask_effect(each, self._redact) for each in output.happened]) if output.happened else ()
        if output.files:
            return self._add_files(output, parts, effect.flight.id, effects)
        return ActualResult("ok", output.cost_micros, body=encode_body(self._redact(output.text)), happened=effects)

    def _add_files(
        self, output: Output, parts: Sequence[Text], call: str, effects: tuple[JournalEffect, ...]
    ) -> ActualResult:
        """Make the result of a call with files. Its text names each one, also those that the model cannot see."""
        lines = [part.text for part in parts] or [f"[{file.name}, not shown]" for file in output.files]
        text = self._redact("\n".join([output.text, *lines] if output.text else lines))
        files = tuple(
            msgspec.structs.replace(part, text=self._redact(part.text), origin="tool", source=self._redact(part.source))
            for part in parts
            if part.media
        )
        if files:
            effects = (*effects, JournalEffect(FilesGiven(call=call), msgspec.json.encode(files)))
        return ActualResult("ok", output.cost_micros, body=encode_body(text), happened=effects, files=files)

    def read_failure(self, effect: _RunningCall, error: Exception) -> ActualResult:
        match error:
            case EffectStopped():
                is_unsure = error.outcome == "external_halt" and effect.can_have_taken_effect
                result = self._make_failure(error.outcome, str(error))
                return _result_after_stop(error.leftover, result, is_unsure=is_unsure)
            case TimeoutError():
                return self._make_failure("timeout", f"TimeoutError: {effect.flight.name} exceeded its deadline")
            case Failed():
                return self._make_failure("error", str(error), error.partial)
            case _:
                return self._make_failure("unknown", str(error))

    def read_cancel(self, effect: _RunningCall, cancelled: CancelledEffect, *, is_left: bool) -> ActualResult | None:
        if is_left:
            return None
        result = self._make_failure("cancelled", "CancelledError: the session was cancelled.")
        is_unsure = cancelled.is_cancelled_twice or effect.can_have_taken_effect
        return _result_after_stop(cancelled.leftover, result, is_unsure=is_unsure)

    def _make_failure(self, outcome: Outcome, error: str, partial: str = "") -> ActualResult:
        body = encode_body(self._redact(partial)) if partial else None
        return ActualResult(outcome, body=body, error=self._redact(error)[:MAX_ERROR_LENGTH])

    def make_answer(self, effect: RunningEffect, result: ActualResult, settlement: Settlement) -> Answer:
        text = decode_body(result.body or b"")
        return Answer(
            call=effect.flight.id,
            outcome=result.outcome,
            text=result.error or text,
            cost_micros=settlement.usd,
            duration_ms=result.duration_ms,
            overrun=settlement.overrun,
            partial=text if result.error else "",
            files=result.files,
        )

    async def restore_answer(self, lease: Lease, settled: Stored, committed: Committed) -> Answer:
        return await read_settled_answer(self._store, lease.stream, settled)

    def answer_in_doubt(self, flight: InFlight) -> Answer:
        return Answer(flight.id, "unknown", STARTED_BY_EARLIER_OWNER)

    async def admit(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> InFlight | Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and commit its intent; another process then performs the effect.

        `settle` records the outcome. An intent admits one effect: later attempts of the same call are refused.
        """
        if attempt or call.decision:
            decided_call = await self.preparer.apply_decision(context, call)
            if isinstance(decided_call, ApprovalRequired):
                return decided_call
            call = decided_call
        prepared = await self.preparer.prepare(context, call, tools.get(call.tool))
        intent = _CallIntent(
            lease, await self._offload_arguments(mask_request(prepared.request, self._redact)), attempt
        )
        committed = await self._ledger.commit_intent(intent, self._max_wait)
        if committed is None:
            return BudgetBusy(call.id)
        if committed.is_repeated and isinstance(find_decided(committed).event, CallStarted):
            return Answer(call.id, "approval_denied", ADMITTED_BEFORE)
        return read_call_admission(committed)

    async def settle(self, lease: Lease, flight: InFlight, outcome: Outcome, text: str) -> Answer:
        """Record the outcome of an effect of another process, with secrets masked."""
        result = self._make_failure(outcome, text)
        if outcome == "ok":
            result = ActualResult("ok", body=encode_body(self._redact(text)))
        effect = RunningEffect(lease, flight, flight.since, (), 0, can_defer=False)
        return self.make_answer(effect, *await self.record_outcome(effect, result))

    async def ask(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int
    ) -> ApprovalRequired | None:
        """Ask a person about a call without making it. Returns the pending question; None if there is none."""
        decided_call = await self.preparer.apply_decision(context, call)
        if isinstance(decided_call, ApprovalRequired):
            return decided_call
        if decided_call.has_decision:
            return None
        prepared = await self.preparer.prepare(context, call, tools.get(call.tool))
        request = await self._offload_arguments(mask_request(prepared.request, self._redact))
        write = _CallIntent(lease, request, attempt).write(request.now)

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
        request = (await self.preparer.prepare(context, call, tool)).request
        return request.flaw is None and not request.untrusted_reason

    async def refuse(self, lease: Lease, calls: Sequence[Call], outcome: Outcome, sentence: str) -> Sequence[Answer]:
        """Refuse calls without checking them, all in one write."""
        sentence = self._redact(sentence)
        drafts = [
            Draft(
                CallRefused(
                    call=call.id, tool=self._redact(clean(call.tool))[:200], outcome=outcome, sentence=sentence
                ),
                encode_body(self._redact(decode_body(call.arguments[:BLOB_THRESHOLD]))),
            )
            for call in calls
        ]
        stream, rows = lease.stream, [(AuditRow, call.id) for call in calls]
        await self._ledger.commit(Write(stream, f"{calls[0].id}/refused", lambda _: drafts, rows, lease))
        return [Answer(call.id, outcome, sentence) for call in calls]

    async def call_read_only(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool]
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Make a sensor's call. A call that does more than read goes through `call`."""
        tool, cache_key = tools.get(call.tool), (call.tool, call.arguments, call.timeout)
        cached = self._prepared_reads.get(cache_key)
        if cached is None or cached.context is not context or cached.tool is not tool:
            prepared = await self.preparer.prepare(context, call, tool)
            if not prepared.request.is_pure_read:
                return await self.call(lease, context, call, tools)
            execution = self.preparer.make_execution(context, prepared.tool, prepared.arguments, call)
            cached = self._prepared_reads[cache_key] = _PreparedRead(context, tool, prepared.request, execution)
        request = msgspec.structs.replace(cached.request, call=call.id, now=self._clock.now())
        return await self.judge_read_only(lease, request, cached.execution)

    async def judge_read_only(self, lease: Lease, request: CallRequest, execution: ToolExecution | None) -> Answer:
        """Make a call that only reads and costs nothing. It passes the same checks, but writes no event.

        A sensor reads for as long as its session lives; its caller records the readings that matter.
        """
        (draft,) = judge_call(request, await self._halts.rows(scope for _, scope in request.halts))
        if isinstance(draft.event, CallRefused):
            return Answer(request.call, draft.event.outcome, self._redact(draft.event.sentence))
        if execution is None or not isinstance(draft.event, CallStarted):
            raise AssertionError(f"{request.call} is not a pure read: it needs an approval, a hold or a known tool.")
        flight = InFlight(request.call, request.tool, request.purpose, (), request.now, is_call=True, effect="read")
        result = await self.run_unrecorded(self._permit_call(lease, flight, execution))
        return Answer(request.call, result.outcome, result.error or decode_body(result.body or b""))

    async def rerun(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> Answer:
        """Repeat a call whose outcome was lost in a crash. The call must be safe to repeat."""
        halt = await self._halts.find(execution.scopes)
        if halt is not None:
            # A read has changed nothing; a write may have taken effect before the crash.
            outcome: Outcome = "external_halt" if flight.effect == "read" else "unknown"
            result = self._make_failure(outcome, f"{halt.scope} was halted.")
            effect = RunningEffect(lease, flight, read_monotonic(self._clock), (), 0, can_defer=False)
            return self.make_answer(effect, *await self.record_outcome(effect, result))
        return await self.carry_out(self._permit_call(lease, flight, execution))

    async def probe_outcome(self, flight: InFlight, execution: ToolExecution) -> EffectStatus:
        """Ask the tool's probe whether the effect happened; a probe that fails or times out returns `unknown`."""
        timeout = execution.timeout
        permit = Permit(flight.id, self._clock.now() + timeout, execution.secrets, execution.is_near_budget)
        try:
            async with asyncio.timeout(timeout / SECOND):
                with MaskedPrints(self._print_mask):
                    return await execution.tool.check(execution.arguments, permit)
        except (ToolError, TimeoutError):
            return "unknown"


def _result_after_stop(leftover: object, result: ActualResult, *, is_unsure: bool = False) -> ActualResult:
    """Make the result of a stopped tool: `unknown` if it may have taken effect, or did not stop."""
    if not (is_unsure or isinstance(leftover, Unstoppable)):
        return result
    return msgspec.structs.replace(result, outcome="unknown", error=f"{result.error} {MAYBE_DONE}")
