"""The tool door: the only way to run a tool.

    1. prepare   without a lock          the tool, its arguments, level, risk, price, rules, a person's edits
    2. admit     one short transaction   R5 halt -> R6 grants -> money -> approval -> R4 hold
    3. run       no transaction          the tool, with a permit and a deadline; a halt cancels it
    4. settle    one transaction         the outcome and its true cost

A tool needs a permit, and only this module makes permits. After a crash, `Recovery` settles every call in doubt: no
effect happens twice, and none is forgotten. A simulation informs the model and the person who decides. It is not a
security control: the call passes the same checks with or without it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from halter.core.clock import SECOND, Clock, read_monotonic
from halter.core.errors import ToolError
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    FilesGiven,
    HoldReleased,
)
from halter.core.ids import inbox_stream
from halter.core.messages import FileReader, Text
from halter.core.money import micros_to_usd
from halter.core.ports import (
    BLOB_THRESHOLD,
    Committed,
    Draft,
    Lease,
    Query,
    Rows,
    Store,
    Stored,
    Write,
    offload_body,
    read_body,
)
from halter.core.processes import MaskedPrints, PrintMask
from halter.core.rows import AuditRow, DecisionRow, HaltRow, HoldRow
from halter.core.text import clean, decode_body, encode_body
from halter.core.tools import (
    DOLLAR,
    EffectStatus,
    Failed,
    JournalEffect,
    Output,
    Permit,
    Tool,
    Unstoppable,
    Valid,
    find_secret_names,
)
from halter.core.vocabulary import Outcome
from halter.guard.approvals import read_rules
from halter.guard.halts import (
    MAX_ERROR_LENGTH,
    BudgetBusy,
    EffectStopped,
    HaltWatch,
    find_outcome,
    read_cancelled_effect,
    run_shielded,
)
from halter.guard.judge import CallRequest, RequiredApproval, judge_asked_call, judge_call, list_call_rows
from halter.guard.ledger import BUDGET_WAIT, ActualResult, Ledger
from halter.guard.model_door import WholeTextMask
from halter.guard.prepare import Call, PreparedCall, SessionContext, prepare_call
from halter.guard.provenance_check import ProvenanceCheck
from halter.guard.simulation import Simulated, Simulator, should_simulate
from halter.redaction.redact import Redact
from halter.redaction.secrets import GivenSecrets, Secrets
from halter.state.session import InFlight, track_call

MILLISECOND: Final = SECOND // 1000
NO_SECRETS: Final = GivenSecrets({})
ADMITTED_BEFORE: Final = "This call was already admitted, and an intent allows one effect. Make a new call."
NO_VALUES: Final[Mapping[str, str]] = MappingProxyType({})
MAX_SETTLING_EVENTS: Final = 50
"""Maximum events of one settlement that are searched for the files of its call."""
_DECIDED: Final = (CallStarted, CallRefused)
HIDDEN_REASONS: Final = ("the arguments contain a secret, so the reasons are hidden",)


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a call, and the text for the model.

    `cap` is the cap that refused the call. After an `overrun` the session must stop. `partial` is the output before a
    failure. `simulation` is a model's prediction of the call; the `text` does not contain it. A `staged` call waits for
    a decision at the end of the turn. The `text` names the `files`.
    """

    call: str
    outcome: Outcome
    text: str
    cost_micros: int = 0
    duration_ms: int = 0
    cap: CostCapReached | None = None
    overrun: bool = False
    simulation: str = ""
    partial: str = ""
    staged: bool = False
    files: tuple[Text, ...] = ()

    @property
    def cost_usd(self) -> Decimal:
        return micros_to_usd(self.cost_micros)


class ApprovalRequired(msgspec.Struct, frozen=True):
    """A call that waits for a decision. After the decision the same call passes all checks again.

    `tool` is set when the decision has just been asked for.
    """

    call: str
    decision: str
    simulation: str = ""
    tool: str = ""


class ToolExecution(msgspec.Struct, frozen=True):
    """A validated tool call, ready to run: the tool, its arguments and secrets, and the scopes whose halt stops it.

    With `can_defer` the settlement may be deferred to the session's next commit. The tool asks `is_near_budget`, which
    uses the `ledger` and the `context`.
    """

    tool: Tool
    arguments: Valid
    secrets: Mapping[str, str]
    scopes: tuple[str, ...]
    timeout: int
    can_defer: bool = False
    ledger: Ledger | None = None
    context: SessionContext | None = None

    async def is_near_budget(self) -> bool:
        if self.ledger is None or self.context is None:
            return False
        return await self.ledger.is_near_budget(self.context.prepare_cap_check)


class _PreparedRead(NamedTuple):
    """A sensor's call: prepared once, then repeated."""

    context: SessionContext
    tool: Tool | None
    request: CallRequest
    execution: ToolExecution | None


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


class ToolDoor:
    """Prepares a call, admits or refuses it, runs the tool, and settles the cost: the only way to run a tool."""

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
        self._store = store
        self._read_files = read_files
        self._clock = clock
        self._ledger = ledger
        self._redact = redact
        self._print_mask = print_mask or partial(WholeTextMask, redact)
        self._max_wait = max_wait
        self._halts = halts or HaltWatch(store, clock)
        self._secrets = secrets
        self._simulator = simulator
        self._acting: dict[str, asyncio.Event | None] = {}
        self._read_only_answers: dict[tuple[str, bytes, int | None], _PreparedRead] = {}

    async def call(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and run it if the checks admit it.

        To retry a call that was refused, or that waited for a decision, pass the next `attempt` number.
        """
        if attempt or call.decision:
            decided_call = await self._apply_decision(context, call)
            if isinstance(decided_call, ApprovalRequired):
                return decided_call
            call = decided_call
        if call.tool not in tools:
            call = msgspec.structs.replace(call, tool=self._redact(clean(call.tool)))
        prepared = await self._prepare(context, call, tools.get(call.tool))
        request, prediction, now = prepared.request, None, prepared.request.now
        can_simulate = prepared.rule is not None and prepared.rule.simulate != "never"
        if can_simulate and self._simulator is not None and not attempt and should_simulate(prepared):
            prediction, now = await self._simulator.simulate(lease, context, prepared, call.describe_situation()), 0
            if isinstance(prediction, Simulated) and (approval := request.approval) is not None:
                # The digest does not cover the prediction: an approval is of the call alone.
                approval = msgspec.structs.replace(
                    approval, display_body=approval.display_body + b"\n" + encode_body(prediction.text)
                )
                request = msgspec.structs.replace(request, approval=approval)
        execution = self.make_execution(context, prepared.tool, prepared.arguments, call)
        answer = await self.guarded_tool_call(
            lease, request, execution, attempt, call.provenance_check, now, call.must_return
        )
        if prediction is None:
            return answer
        if not isinstance(prediction, Simulated) or prediction.is_cached or isinstance(answer, BudgetBusy):
            return answer
        return msgspec.structs.replace(answer, simulation=prediction.text)

    async def admit(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> InFlight | Answer | ApprovalRequired | BudgetBusy:
        """Check one call, and commit its intent; another process then performs the effect.

        `settle` records the outcome. An intent admits one effect: later attempts of the same call are refused.
        """
        if attempt or call.decision:
            decided_call = await self._apply_decision(context, call)
            if isinstance(decided_call, ApprovalRequired):
                return decided_call
            call = decided_call
        prepared = await self._prepare(context, call, tools.get(call.tool))
        intent = _CallIntent(lease, await self._offload_arguments(self._mask_request(prepared.request)), attempt)
        committed = await self._ledger.commit_intent(intent, self._max_wait)
        if committed is None:
            return BudgetBusy(call.id)
        if committed.is_repeated and isinstance(_find_decided(committed).event, CallStarted):
            return Answer(call.id, "approval_denied", ADMITTED_BEFORE)
        return read_call_admission(committed)

    async def ask(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool], attempt: int
    ) -> ApprovalRequired | None:
        """Ask a person about a call without making it. Returns the pending question; None if there is none."""
        decided_call = await self._apply_decision(context, call)
        if isinstance(decided_call, ApprovalRequired):
            return decided_call
        if decided_call.has_decision:
            return None
        prepared = await self._prepare(context, call, tools.get(call.tool))
        request = await self._offload_arguments(self._mask_request(prepared.request))
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
        request = (await self._prepare(context, call, tool)).request
        return request.flaw is None and not request.untrusted_reason

    async def settle(self, lease: Lease, flight: InFlight, outcome: Outcome, text: str) -> Answer:
        """Record the outcome of an effect of another process, with secrets masked."""
        result = self._make_failure(outcome, text)
        if outcome == "ok":
            result = ActualResult("ok", body=encode_body(self._redact(text)))
        return await self._settle(lease, flight, result, flight.since)

    async def _apply_decision(self, context: SessionContext, call: Call) -> Call | ApprovalRequired:
        """Return the call with a person's edited arguments, or ApprovalRequired while its decision is pending."""
        decision = await self.decision(call.approval)
        if decision is not None and await self._is_pending(decision, context):
            return ApprovalRequired(call.id, decision.decision)
        if decision is None:
            return call
        edited_arguments = await self._read_edited_arguments(context, decision)
        return msgspec.structs.replace(call, edited_arguments=edited_arguments, has_decision=True)

    async def _find_question_hold(self, session: str, decision: str) -> HoldRow | None:
        holds = await self._store.ask(Query("hold", HoldRow, {"hold": decision}))
        return next((hold for hold in holds if hold.session == session), None)

    async def call_read_only(
        self, lease: Lease, context: SessionContext, call: Call, tools: Mapping[str, Tool]
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Make a sensor's call. A call that does more than read goes through `call`."""
        tool, cache_key = tools.get(call.tool), (call.tool, call.arguments, call.timeout)
        cached = self._read_only_answers.get(cache_key)
        if cached is None or cached.context is not context or cached.tool is not tool:
            prepared = await self._prepare(context, call, tool)
            if not prepared.request.is_pure_read:
                return await self.call(lease, context, call, tools)
            execution = self.make_execution(context, prepared.tool, prepared.arguments, call)
            cached = self._read_only_answers[cache_key] = _PreparedRead(context, tool, prepared.request, execution)
        request = msgspec.structs.replace(cached.request, call=call.id, now=self._clock.now())
        return await self.judge_read_only(request, cached.execution)

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

    async def guarded_tool_call(
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
        masked_request = self._mask_request(request)
        if len(masked_request.arguments) > BLOB_THRESHOLD:
            masked_request = await self._offload_arguments(masked_request)
        if attempt and request.legs and request.approval is not None and request.question_hold is None:
            hold = await self._find_question_hold(request.session, request.approval.decision)
            masked_request = msgspec.structs.replace(masked_request, question_hold=hold)
        intent = _CallIntent(lease, masked_request, attempt)
        committed = await self._ledger.commit_intent(intent, self._max_wait, now, must_return)
        if committed is None:
            return BudgetBusy(request.call)
        stored = _find_decided(committed)
        event = stored.event
        if provenance_check is not None and isinstance(event, _DECIDED):
            provenance_check.apply(event, intent.call_request.arguments)
        if not isinstance(event, CallStarted):
            return read_call_refusal(committed)
        flight = track_call(event, stored, intent.call_request.accounts)
        earlier_answer = await self._find_earlier_outcome(lease, committed, flight) if committed.is_repeated else None
        if earlier_answer is not None:
            return earlier_answer
        if execution is None:
            raise AssertionError(f"{request.call} was admitted without a tool: the judge let a flaw pass.")
        return await self._act(lease, flight, execution)

    async def _offload_arguments(self, request: CallRequest) -> CallRequest:
        _, blob = await offload_body(self._store, request.arguments)
        return msgspec.structs.replace(request, blob=blob)

    async def judge_read_only(self, request: CallRequest, execution: ToolExecution | None) -> Answer:
        """Make a call that only reads and costs nothing. It passes the same checks, but writes no event.

        A sensor reads for as long as its session lives; its caller records the readings that matter.
        """
        (draft,) = judge_call(request, await self._halts.rows(scope for _, scope in request.halts))
        if isinstance(draft.event, CallRefused):
            return Answer(request.call, draft.event.outcome, self._redact(draft.event.sentence))
        if execution is None or not isinstance(draft.event, CallStarted):
            raise AssertionError(f"{request.call} is not a pure read: it needs an approval, a hold or a known tool.")
        result = await self._run(
            execution,
            Permit(request.call, request.now + execution.timeout, execution.secrets, execution.is_near_budget),
            request.tool,
        )
        return Answer(request.call, result.outcome, result.error or decode_body(result.body or b""))

    async def decision(self, decision: str) -> DecisionRow | None:
        return next(iter(await self._store.ask(Query("decision", DecisionRow, {"decision": decision}))), None)

    async def find_halt(self, context: SessionContext) -> HaltRow | None:
        return await self._halts.find(context.scopes)

    async def rerun(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> Answer:
        """Repeat a call whose outcome was lost in a crash. The call must be safe to repeat."""
        halt = await self._halts.find(execution.scopes)
        if halt is not None:
            # A read has changed nothing; a write may have taken effect before the crash.
            outcome: Outcome = "external_halt" if flight.effect == "read" else "unknown"
            result = self._make_failure(outcome, f"{halt.scope} was halted.")
            return await self._settle(lease, flight, result, read_monotonic(self._clock))
        return await self._act(lease, flight, execution)

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

    async def _prepare(self, context: SessionContext, call: Call, tool: Tool | None) -> PreparedCall:
        now, usd, hold = self._clock.now(), 0, None
        if call.has_decision and (tool is None or tool.spec.cost):
            hold = await self._find_question_hold(context.session, call.approval)
        if tool is not None:
            cost = tool.spec.cost
            usd = await self._forecast_cost(tool.spec.name, hold) if cost == "learned" else cost
        prepared = prepare_call(context, call, tool, now, usd)
        if (approval := prepared.request.approval) is not None and (
            rules := await read_rules(
                self._store, call.tool, approval.arguments_digest, context.session, context.agent, now
            )
        ):
            prepared = prepare_call(context, call, tool, now, usd, rules)
        if hold is None:
            return prepared
        request = msgspec.structs.replace(prepared.request, question_hold=hold)
        return msgspec.structs.replace(prepared, request=request)

    async def _forecast_cost(self, name: str, hold: HoldRow | None) -> int:
        """Forecast the maximum cost of a call; a person who was asked has agreed to what the question holds."""
        if hold is None:
            return (await self._ledger.forecast(name)).bound
        return max([leg.amount for leg in hold.decode_legs() if leg.unit == "usd"], default=0)

    async def _is_pending(self, decision: DecisionRow, context: SessionContext) -> bool:
        """Return whether a decision is pending. It is not after it expired, nor during a halt."""
        is_undecided = not decision.verdict and self._clock.now() < decision.expires_at
        return is_undecided and await self.find_halt(context) is None

    async def _read_edited_arguments(self, context: SessionContext, decision: DecisionRow) -> bytes | None:
        """Read the arguments that a person entered in place of the model's; None if the decision is not an edit."""
        if decision.verdict != "edit":
            return None
        (stored,) = await self._store.read(inbox_stream(context.session), decision.decided_seq - 1, 1)
        return await read_body(self._store, stored)

    def make_execution(
        self, context: SessionContext, tool: Tool | None, arguments: Valid | None, call: Call | None = None
    ) -> ToolExecution | None:
        """Make the execution of a call, with only the secrets to which its arguments refer.

        Returns None if there is no tool, the arguments are invalid, or a secret is not granted.
        """
        if tool is None or arguments is None:
            return None
        secrets = NO_VALUES
        if DOLLAR in arguments.canonical:
            names = find_secret_names(arguments.canonical)
            if not names <= context.secrets:
                return None
            secrets = dict(zip(names, map(self._secrets.value, names), strict=True))
        timeout, can_defer = tool.spec.timeout, False
        if call is not None:
            timeout, can_defer = timeout if call.timeout is None else min(timeout, call.timeout), call.can_defer
        return ToolExecution(tool, arguments, secrets, context.scopes, timeout, can_defer, self._ledger, context)

    async def _find_earlier_outcome(self, lease: Lease, committed: Committed, flight: InFlight) -> Answer | None:
        """Find the outcome of a call that was admitted earlier.

        Returns None if this process committed the intent, but lost the reply to that commit: then the tool must run.
        """
        stored = await find_outcome(self._store, lease.stream, flight)
        if stored is None and flight.id in self._acting:
            done_event = self._acting[flight.id] = self._acting[flight.id] or asyncio.Event()
            await done_event.wait()
            stored = await find_outcome(self._store, lease.stream, flight)
        if stored is not None and isinstance(stored.event, CallSettled):
            answer = restore_call_answer(stored.event, await read_body(self._store, stored))
            files = await self._find_files(lease, stored, flight.id)
            return msgspec.structs.replace(answer, files=files) if files else answer
        if committed.events[0].generation != lease.generation:
            return Answer(flight.id, "unknown", "An earlier owner of this session started it; its outcome is unknown.")
        return None

    async def _find_files(self, lease: Lease, settled: Stored, call: str) -> tuple[Text, ...]:
        """Find the files of an earlier call. They were committed with its settlement."""
        for stored in await self._store.read(lease.stream, settled.seq, MAX_SETTLING_EVENTS):
            if isinstance(stored.event, FilesGiven) and stored.event.call == call:
                return restore_files(await read_body(self._store, stored))
        return ()

    async def _act(self, lease: Lease, flight: InFlight, execution: ToolExecution) -> Answer:
        """Run the tool, and settle its cost even if the run is halted, times out or is cancelled.

        A concurrent attempt of the same call waits for this outcome.
        """
        self._acting[flight.id] = None
        started_at = read_monotonic(self._clock)
        permit = Permit(flight.id, self._clock.now() + execution.timeout, execution.secrets, execution.is_near_budget)
        try:
            try:
                result = await self._run(execution, permit, flight.name)
            except asyncio.CancelledError as stop:
                if not self._halts.departures.includes(lease):
                    effect = read_cancelled_effect(stop)
                    is_unsure = effect.is_cancelled_twice or _can_have_taken_effect(execution, permit)
                    result = self._make_failure("cancelled", "CancelledError: the session was cancelled.")
                    result = _result_after_stop(effect.leftover, result, is_unsure=is_unsure)
                    await run_shielded(self._settle(lease, flight, result, started_at))
                raise
            return await self._settle(lease, flight, result, started_at, execution)
        finally:
            done_event = self._acting.pop(flight.id)
            if done_event is not None:
                done_event.set()

    async def _run(self, execution: ToolExecution, permit: Permit, name: str) -> ActualResult:
        """Run a tool, with secrets masked in what it prints. Returns every outcome as a value, except a cancel."""
        try:
            with MaskedPrints(self._print_mask):
                effect = self._halts.watch(execution.scopes, execution.timeout, name)
                try:
                    output = effect.leftover = await execution.tool.run(execution.arguments, permit)
                    parts = await self._read_files(output.files) if output.files and self._read_files else ()
                except BaseException as error:
                    effect.end(error)
                    raise
                effect.end()
        except EffectStopped as stop:
            is_unsure = stop.outcome == "external_halt" and _can_have_taken_effect(execution, permit)
            return _result_after_stop(stop.leftover, self._make_failure(stop.outcome, str(stop)), is_unsure=is_unsure)
        except TimeoutError:
            return self._make_failure("timeout", f"TimeoutError: {name} exceeded its deadline")
        except Unstoppable as unstoppable:
            return self._make_failure("unknown", str(unstoppable))
        except Failed as failure:
            return self._make_failure("error", str(failure), failure.partial)
        effects = tuple(map(self._mask_effect, output.happened)) if output.happened else ()
        if output.files:
            return self._add_files(output, parts, permit.id, effects)
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

    def _mask_effect(self, effect: JournalEffect) -> JournalEffect:
        return effect if effect.body is None else msgspec.structs.replace(effect, body=self._mask(effect.body))

    def _make_failure(self, outcome: Outcome, error: str, partial: str = "") -> ActualResult:
        body = encode_body(self._redact(partial)) if partial else None
        return ActualResult(outcome, body=body, error=self._redact(error)[:MAX_ERROR_LENGTH])

    async def _settle(
        self,
        lease: Lease,
        flight: InFlight,
        result: ActualResult,
        started_at: int,
        execution: ToolExecution | None = None,
    ) -> Answer:
        duration_ms = (read_monotonic(self._clock) - started_at) // MILLISECOND
        if duration_ms or flight.audited:
            result = msgspec.structs.replace(result, duration_ms=duration_ms, audited=flight.audited)
        can_defer = execution is not None and execution.can_defer
        settlement = self._ledger.defer_settlement(lease, flight, result) if can_defer else None
        if settlement is None:
            settlement = await self._ledger.settle(lease, flight, result)
        text = decode_body(result.body or b"")
        return Answer(
            call=flight.id,
            outcome=result.outcome,
            text=result.error or text,
            cost_micros=settlement.usd,
            duration_ms=duration_ms,
            overrun=settlement.overrun,
            partial=text if result.error else "",
            files=result.files,
        )

    def _mask_request(self, request: CallRequest) -> CallRequest:
        """Mask secrets in everything that is recorded or shown. The digests cover the original."""
        text, tool = decode_body(request.arguments), self._redact(request.tool)
        masked_text = self._redact(text)
        if masked_text is text and tool == request.tool and request.flaw is None and request.approval is None:
            return request
        arguments = request.arguments if masked_text is text else encode_body(masked_text)
        flaw = request.flaw and (request.flaw[0], self._redact(request.flaw[1]))
        approval = request.approval and self._mask_approval(
            request.approval, has_masked_arguments=arguments != request.arguments
        )
        return msgspec.structs.replace(request, tool=tool, arguments=arguments, flaw=flaw, approval=approval)

    def _mask_approval(self, approval: RequiredApproval, *, has_masked_arguments: bool) -> RequiredApproval:
        """Mask the text for a person. Reasons may quote arguments in a form in which secrets are not recognised."""
        reasons = (
            HIDDEN_REASONS if has_masked_arguments and approval.reasons else tuple(map(self._redact, approval.reasons))
        )
        keys = tuple(map(self._redact, approval.argument_keys))
        return msgspec.structs.replace(
            approval, display_body=self._mask(approval.display_body), reasons=reasons, argument_keys=keys
        )

    def _mask(self, body: bytes) -> bytes:
        text = decode_body(body)
        masked_text = self._redact(text)
        return body if masked_text is text else encode_body(masked_text)


def _can_have_taken_effect(execution: ToolExecution, permit: Permit) -> bool:
    """Return whether a stopped call may have changed something: it began, and does more than read."""
    return execution.tool.spec.effect != "read" and permit.may_have_acted


def _result_after_stop(leftover: object, result: ActualResult, *, is_unsure: bool = False) -> ActualResult:
    """Make the result of a stopped tool: `unknown` if it may have taken effect, or did not stop."""
    if not (is_unsure or isinstance(leftover, Unstoppable)):
        return result
    return msgspec.structs.replace(result, outcome="unknown", error=f"{result.error} {MAYBE_DONE}")


MAYBE_DONE: Final = "It is unknown whether the call took effect."


def restore_files(body: bytes) -> tuple[Text, ...]:
    return msgspec.json.decode(body, type=tuple[Text, ...]) if body else ()


def restore_call_answer(event: CallSettled, body: bytes) -> Answer:
    cost, text = event.cost_micros, decode_body(body)
    partial = text if event.error else ""
    duration_ms = event.duration_ms
    return Answer(event.call, event.outcome, event.error or text, cost, duration_ms, partial=partial)


def read_call_admission(committed: Committed) -> InFlight | Answer | ApprovalRequired:
    stored = _find_decided(committed)
    event = stored.event
    return track_call(event, stored) if isinstance(event, CallStarted) else read_call_refusal(committed)


def _find_decided(committed: Committed) -> Stored:
    """Return the first event of a decision, after the release of what its question held."""
    first = committed.events[0]
    return committed.events[1] if isinstance(first.event, HoldReleased) else first


def read_call_refusal(committed: Committed) -> Answer | ApprovalRequired:
    cap: CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case CostCapReached() as reached:
                cap = reached
            case CallRefused() as refused:
                return Answer(refused.call, refused.outcome, refused.sentence, cap=cap, staged=refused.staged)
            case DecisionAsked() as question:
                return ApprovalRequired(question.subject, question.decision, tool=question.name)
            case _:
                pass
    raise AssertionError("The commit that decided a call has no refusal, question or intent.")
