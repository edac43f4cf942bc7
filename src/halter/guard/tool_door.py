"""The tool door: the only way to run a tool.

    1. prepare   without a lock          the tool, its arguments, level, risk, price, rules, a person's edits
    2. admit     one short transaction   the checks in the order of `judge`, and the hold
    3. run       no transaction          the tool, with a permit and a deadline; a halt cancels it
    4. settle    one transaction         the outcome and its true cost

A tool needs a permit, and only this module makes permits for tools. After a crash, `Recovery` settles every call in
doubt: no effect happens twice, and none is forgotten.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import ToolError
from halter.core.events import CallRefused, CallStarted
from halter.core.messages import FileReader, Text
from halter.core.ports import BLOB_THRESHOLD, Committed, Lease, Store, Stored
from halter.core.text import decode_body, encode_body
from halter.core.tools import EffectStatus, Failed, JournalEffect, Output, Permit, Tool, Unstoppable
from halter.core.vocabulary import Outcome
from halter.guard.call_answer import Answer, ApprovalRequired, read_settled_answer
from halter.guard.call_intent import CallIntent, find_decided, read_call_admission, read_call_refusal
from halter.guard.call_preparer import CallPreparer, ToolExecution
from halter.guard.call_request import CallRequest
from halter.guard.effect import STARTED_BY_EARLIER_OWNER, Door, RunningEffect
from halter.guard.halts import BudgetBusy, CancelledEffect, EffectStopped, HaltWatch
from halter.guard.judge import decide_call
from halter.guard.ledger import BUDGET_WAIT, ActualResult, Ledger, Settlement
from halter.guard.prepare import Call, PreparedCall, SessionContext
from halter.guard.record_mask import mask_effect, mask_request, offload_arguments
from halter.guard.simulation import NotSimulated, Simulated, Simulator, add_prediction, should_simulate
from halter.guard.tool_result import make_failure, read_cancelled_tool, read_files_result, read_tool_failure
from halter.guard.verdict import Allow, Deny
from halter.redaction.answer_stream import WholeTextMask
from halter.redaction.redact import Redact
from halter.redaction.secrets import GivenSecrets, Secrets
from halter.state.session import InFlight, track_call
from halter.system.prints import MaskedPrints, PrintMask

NO_SECRETS: Final = GivenSecrets({})
ADMITTED_BEFORE: Final = "This call was already admitted, and an intent allows one effect. Make a new call."
_DECIDED: Final = (CallStarted, CallRefused)


class _RunningCall(RunningEffect):
    """A call that runs now, with its permit."""

    execution: ToolExecution
    permit: Permit

    @property
    def can_have_taken_effect(self) -> bool:
        """True if a stop may have come after a change: the call began, and does more than read."""
        return self.execution.tool.spec.effect != "read" and self.permit.may_have_acted


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
        self.preparer = CallPreparer(store, clock, ledger, self._halts, secrets, redact)
        self._read_files = read_files
        self._redact = redact
        self._print_mask = print_mask or partial(WholeTextMask, redact)
        self._max_wait = max_wait
        self._simulator = simulator

    async def call(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and run it if the checks admit it.

        To retry a call that was refused, or that waited for a decision, pass the next `attempt` number.
        """
        prepared = await self.preparer.prepare(context, call, tools.get(call.tool), attempt)
        if isinstance(prepared, ApprovalRequired):
            return prepared
        execution = self.preparer.make_execution(context, prepared.tool, prepared.arguments, call)
        if prepared.rule is not None and prepared.rule.simulate != "never" and not attempt:
            return await self._predict_and_call(lease, context, call, prepared, execution)
        return await self.admit_and_run(lease, prepared.request, execution, attempt, call)

    async def _predict_and_call(
        self,
        lease: Lease,
        context: SessionContext,
        call: Call,
        prepared: PreparedCall,
        execution: ToolExecution | None,
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Simulate a call first, for the model and the person who decides. The checks are the same without it."""
        prediction: Simulated | NotSimulated | None = None
        request = prepared.request
        if self._simulator is not None and should_simulate(prepared):
            prediction = await self._simulator.simulate(lease, context, prepared, call.describe_situation())
            request = add_prediction(request.at(self._clock.now()), prediction)
        answer = await self.admit_and_run(lease, request, execution, 0, call)
        if not isinstance(prediction, Simulated) or prediction.is_cached or isinstance(answer, BudgetBusy):
            return answer
        return msgspec.structs.replace(answer, simulation=prediction.text)

    async def admit_and_run(
        self,
        lease: Lease,
        request: CallRequest,
        execution: ToolExecution | None,
        attempt: int = 0,
        call: Call | None = None,
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Admit or refuse a call, and run it if admitted. The journal has the outcome when this method returns.

        A request without an `execution` has a flaw, and the judge refuses it. The provenance check of the session's
        `call` receives the decision.
        """
        masked_request = mask_request(request, self._redact)
        if attempt or len(masked_request.arguments) > BLOB_THRESHOLD:
            masked_request = await self._complete(masked_request, attempt)
        intent = CallIntent(lease, masked_request, attempt)
        must_return = bool if call is None else call.must_return
        committed = await self._ledger.commit_intent(intent, self._max_wait, request.now, must_return)
        if committed is None:
            return BudgetBusy(request.call)
        stored = find_decided(committed)
        event = stored.event
        if call is not None and call.provenance_check is not None and isinstance(event, _DECIDED):
            call.provenance_check.apply(event, intent.request.arguments)
        if not isinstance(event, CallStarted):
            return read_call_refusal(committed)
        flight = track_call(event, stored, intent.request.accounts)
        if committed.is_repeated:
            earlier_answer = await self.find_earlier_answer(lease, flight, committed)
            if earlier_answer is not None:
                return earlier_answer
        if execution is None:
            raise AssertionError(f"{request.call} was admitted without a tool: the judge let a flaw pass.")
        return await self.carry_out(self._permit_call(lease, flight, execution))

    async def admit(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> InFlight | Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and commit its intent; another process then performs the effect.

        `settle` records the outcome. An intent admits one effect: later attempts of the same call are refused.
        """
        prepared = await self.preparer.prepare(context, call, tools.get(call.tool), attempt)
        if isinstance(prepared, ApprovalRequired):
            return prepared
        masked_request = await offload_arguments(self._store, mask_request(prepared.request, self._redact))
        committed = await self._ledger.commit_intent(CallIntent(lease, masked_request, attempt), self._max_wait)
        if committed is None:
            return BudgetBusy(call.id)
        if committed.is_repeated and isinstance(find_decided(committed).event, CallStarted):
            return Answer(call.id, "approval_denied", ADMITTED_BEFORE)
        return read_call_admission(committed)

    async def settle(self, lease: Lease, flight: InFlight, outcome: Outcome, text: str) -> Answer:
        """Record the outcome of an effect of another process, with secrets masked."""
        result = make_failure(outcome, text, self._redact)
        if outcome == "ok":
            result = ActualResult("ok", body=encode_body(self._redact(text)))
        # The journal has the time of its start, which a clock that was set back may not have reached.
        time_since = max(0, self._clock.now() - flight.since)
        effect = RunningEffect(lease, flight, self._read_monotonic() - time_since, (), 0, can_defer=False)
        return self.make_answer(effect, *await self.record_outcome(effect, result))

    async def _complete(self, request: CallRequest, attempt: int) -> CallRequest:
        """Store large arguments, and find what an earlier question about the call holds."""
        if len(request.arguments) > BLOB_THRESHOLD:
            request = await offload_arguments(self._store, request)
        if attempt and request.legs and request.approval is not None and request.question_hold is None:
            hold = await self.preparer.find_question_hold(request.session, request.approval.decision)
            request = msgspec.structs.replace(request, question_hold=hold)
        return request

    def _permit_call(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> _RunningCall:
        timeout = execution.timeout
        permit = Permit(flight.id, self._clock.now() + timeout, execution.secrets, execution.is_near_budget)
        return _RunningCall(
            lease,
            flight,
            self._read_monotonic(),
            execution.scopes,
            timeout,
            execution.can_defer,
            execution,
            permit,
        )

    async def start(self, effect: _RunningCall) -> tuple[Output, Sequence[Text]]:
        """Run the tool, with secrets masked in what it prints, and read the files that it gives."""
        execution = effect.execution
        with MaskedPrints(self._print_mask):
            output = await execution.tool.run(execution.arguments, effect.permit)
            parts = await self._read_files(output.files) if output.files and self._read_files else ()
        return output, parts

    def read_value(self, effect: _RunningCall, value: tuple[Output, Sequence[Text]]) -> ActualResult:
        output, parts = value
        effects: tuple[JournalEffect, ...] = ()
        if output.happened:
            effects = tuple([mask_effect(each, self._redact) for each in output.happened])
        if output.files:
            return read_files_result(output, parts, effect.flight.id, effects, self._redact)
        return ActualResult("ok", output.cost_micros, body=encode_body(self._redact(output.text)), happened=effects)

    def read_failure(self, effect: _RunningCall, error: Exception) -> ActualResult:
        return read_tool_failure(
            error, effect.flight.name, self._redact, can_have_taken_effect=effect.can_have_taken_effect
        )

    def read_cancel(self, effect: _RunningCall, cancelled: CancelledEffect, *, is_left: bool) -> ActualResult | None:
        if is_left:
            return None
        return read_cancelled_tool(cancelled, self._redact, can_have_taken_effect=effect.can_have_taken_effect)

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

    async def run_read_only(self, lease: Lease, request: CallRequest, execution: ToolExecution | None) -> Answer:
        """Make a call that only reads and costs nothing. It passes the same checks, but writes no event.

        A sensor reads for as long as its session lives; its caller records the readings that matter.
        """
        verdict = decide_call(request, await self._halts.rows(scope for _, scope in request.halts))
        if isinstance(verdict, Deny):
            return Answer(request.call, verdict.outcome, self._redact(verdict.sentence))
        if execution is None or not isinstance(verdict, Allow):
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
            result = make_failure(outcome, f"{halt.scope} was halted.", self._redact)
            effect = RunningEffect(lease, flight, self._read_monotonic(), (), 0, can_defer=False)
            return self.make_answer(effect, *await self.record_outcome(effect, result))
        return await self.carry_out(self._permit_call(lease, flight, execution))

    async def probe_outcome(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> EffectStatus:
        """Ask the tool's probe whether the effect happened; a probe that fails or times out returns `unknown`."""
        probe = self._permit_call(lease, flight, execution)
        try:
            async with asyncio.timeout(probe.timeout / SECOND):
                with MaskedPrints(self._print_mask):
                    return await execution.tool.check(execution.arguments, probe.permit)
        except (ToolError, TimeoutError):
            return "unknown"
