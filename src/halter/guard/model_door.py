"""The model door: the only way to ask a model.

    1. prepare   without a lock          the model, its price, the tokens of the prompt
    2. admit     one short transaction   halt -> the model and its price -> hold
    3. ask       no transaction          the model, with a permit and a deadline; a halt cancels it
    4. settle    one transaction         the reply and its true cost

The body of an effect (`Door.carry_out`) asks and settles. A request beyond the rate limit of its model waits for the
next minute. The door does not retry: each attempt has its own id and hold, and its outcome says whether a retry may
succeed.
"""

from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from halter.core.clock import Clock
from halter.core.errors import ModelError, ModelUnavailable, ModelUnusable
from halter.core.events import RequestSettled, RequestStarted
from halter.core.ids import Digest
from halter.core.messages import Model, Prompt, Reply, Text, count_audio_tokens
from halter.core.money import MAX_AMOUNT, list_accounts
from halter.core.ports import BLOB_THRESHOLD, Committed, Lease, Store, Stored, Write, offload_body, read_body
from halter.core.text import shorten, to_one_line
from halter.core.tools import Permit
from halter.core.usage import (
    ModelName,
    ModelPrices,
    PriceTable,
    RequestExtras,
    Unpriced,
    UnpricedFeature,
    Usage,
    compute_cost,
    runs_locally,
)
from halter.core.vocabulary import Outcome
from halter.guard.effect import MAX_ERROR_LENGTH, STARTED_BY_EARLIER_OWNER, Door, RunningEffect
from halter.guard.halts import BudgetBusy, CancelledEffect, EffectStopped, HaltWatch, RateLimited
from halter.guard.judge_request import ModelAttempt, judge_attempt, list_request_rows
from halter.guard.ledger import ActualResult, Ledger, Settlement
from halter.guard.prepare import RequestTerms, SessionContext
from halter.guard.request import (
    AnsweredRequest,
    FailedRequest,
    ModelRequest,
    RefusedRequest,
    RequestOutcome,
    RequestRecord,
    read_request_refusal,
    restore_request_outcome,
)
from halter.redaction.anonymize import AnonymizedPrompt, anonymize_prompt, rehydrate_reply
from halter.redaction.answer_stream import AnswerStream, ChunkListener, RehydratingMask, StreamMask, WholeTextMask
from halter.redaction.prompt_masker import PromptMasker, mask_text
from halter.redaction.redact import Redact
from halter.state.session import InFlight, track_request

_NO_SECRETS: Final = MappingProxyType[str, str]({})
_NO_VALUES: Final = MappingProxyType[str, str]({})
_ENCODE: Final = msgspec.json.Encoder().encode
_PreparedRequest = tuple[ModelAttempt, Prompt, Mapping[str, str]]


class _RequestIntent(msgspec.Struct):
    """The intent of a request: makes the write that admits or refuses it.

    `wait_count` counts its waits for the rate limit.
    """

    lease: Lease
    attempt_record: ModelAttempt
    wait_count: int

    def write(self, now: int, deferred: Write | None = None) -> Write:
        attempt = self.attempt_record
        if now != attempt.now:
            attempt = self.attempt_record = attempt.at(now)
        key = f"{attempt.request}/asked/{self.wait_count}" if self.wait_count else f"{attempt.request}/asked"
        reads, decide = list_request_rows(attempt), partial(judge_attempt, attempt)
        return Write(self.lease.stream, key, decide, reads, self.lease, (), deferred)


class _RunningRequest(RunningEffect):
    """A request that runs now: its model and price, its permit, and the values of its placeholders.

    `stream` passes the answer's text to a listener. `reply` is the answer, once it is complete and masked.
    """

    request: ModelRequest
    model: Model
    sent: Prompt
    rates: ModelPrices | Unpriced
    permit: Permit
    values: Mapping[str, str]
    stream: AnswerStream | None = None
    reply: Reply | None = None


class UsageReport(msgspec.Struct, frozen=True):
    """The reported usage. Unless it is final, only its input is certain."""

    usage: Usage | None
    final: bool = True


MAX_RECORDED_PROMPTS: Final = 1000


class PromptLog:
    """The prompts of requests, as they are sent: masked, and without the personal data that the policy hides.

    The journal has their parts, but not the whole. They are kept until their spans are made, only while traces include
    content, and only the newest ones.
    """

    def __init__(self) -> None:
        self.recorder_count = 0
        self._prompts: dict[str, Prompt] = {}

    @contextmanager
    def record(self) -> Generator[None]:
        """Record the prompts of requests that start inside the block."""
        self.recorder_count += 1
        try:
            yield
        finally:
            self.recorder_count -= 1

    def add(self, request: str, prompt: Prompt) -> None:
        self._prompts[request] = prompt
        if len(self._prompts) > MAX_RECORDED_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def pop(self, request: str) -> Prompt | None:
        """Remove and return the prompt of a request; None if it was not kept."""
        return self._prompts.pop(request, None)


class ModelDoor(Door[_RunningRequest, Reply, AnsweredRequest | FailedRequest]):
    """Admits or refuses a request, asks the model, and settles the cost: the only way to ask a model."""

    failures = (EffectStopped, TimeoutError, ModelError)

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ledger: Ledger,
        prices: PriceTable,
        *,
        redact: Redact,
        stream_mask: Callable[[], StreamMask] | None = None,
        halts: HaltWatch | None = None,
    ) -> None:
        super().__init__(store, clock, ledger, halts)
        self._prices = prices
        self._stream_mask = stream_mask or partial(WholeTextMask, redact)
        self._redact = redact
        self._masks = PromptMasker(redact)
        self._max_wait = ledger.hold_timeout
        self.prompts = PromptLog()

    async def request(
        self,
        lease: Lease,
        context: SessionContext,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        waited: int = 0,
    ) -> RequestOutcome:
        """Admit or refuse a request, and ask the model if admitted. The journal has the outcome on return."""
        # The data of the decision is not kept in a variable: thousands of requests may wait below.
        running = await self._admit(
            lease, context, request, model, await self._prepare(lease, context, request, model, attempt), waited
        )
        if not isinstance(running, _RunningRequest):
            return running
        if request.on_chunk is None:
            return await self.carry_out(running)
        return await self._stream_answer(running, request.on_chunk)

    async def _prepare(
        self, lease: Lease, context: SessionContext, request: ModelRequest, model: Model, attempt: int
    ) -> _PreparedRequest:
        """Make the judge's input, and the prompt as it is sent, with the values of its placeholders."""
        now = self._clock.now()
        terms = context.terms_of_model(model, self._prices, now)
        prompt = choose_cache(self._masks.prompt(lease, request.prompt), terms)
        anonymized_prompt = None if context.anonymize is None else hide_personal_data(context, prompt, terms)
        record = request.record
        if record is not None and record.volatile:
            record = self._mask_record(record)
        body = _ENCODE(prompt if record is None else record)
        stored_body = (body, None) if len(body) <= BLOB_THRESHOLD else await offload_body(self._store, body)
        model_attempt = _make_attempt(
            context, terms, request, prompt, anonymized_prompt, f"{request.id}/{attempt}", now, stored_body
        )
        values = _NO_VALUES
        if anonymized_prompt is not None:
            prompt, values = anonymized_prompt.prompt, anonymized_prompt.values
        return model_attempt, prompt, values

    def _mask_record(self, record: RequestRecord) -> RequestRecord:
        """Mask a record before it is encoded: JSON would escape characters of a secret."""
        text = mask_text(record.volatile, self._redact)
        return record if text is record.volatile else RequestRecord(text, record.nonce)

    async def _admit(
        self,
        lease: Lease,
        context: SessionContext,
        request: ModelRequest,
        model: Model,
        prepared: _PreparedRequest,
        waited: int,
    ) -> _RunningRequest | RequestOutcome:
        """Decide in one short transaction, and again while other holds use the budget.

        After a wait for the rate limit, the decision has a key of its own, so that a crash does not repeat the wait.
        This is a separate function, so that the data of the decision is freed while the model answers.
        """
        attempt, prompt, values = prepared
        now, max_wait = attempt.now, 0 if attempt.optional else self._max_wait
        while True:
            intent = _RequestIntent(lease, attempt, waited)
            committed = await self._ledger.commit_intent(intent, max_wait, now)
            if committed is None:
                return BudgetBusy(attempt.request)
            stored = committed.events[0]
            event = stored.event
            if isinstance(event, RequestStarted):
                break
            answer = read_request_refusal(committed)
            if isinstance(answer, RefusedRequest):
                return answer
            retry_at = answer.until or 0
            if not committed.is_repeated or retry_at > self._clock.now():
                return RateLimited(attempt.request, retry_at, waited)
            waited, now = waited + 1, 0
        # A cost without a hold is charged to the accounts that would have held it.
        accounts = () if event.legs else list_accounts(attempt.caps, attempt.spender, intent.attempt_record.now)
        flight = track_request(event, stored, accounts)
        if committed.is_repeated:
            earlier_outcome = await self.find_earlier_answer(lease, flight, committed)
            if earlier_outcome is not None:
                return earlier_outcome
        if prompt.max_output_tokens != event.max_output_tokens:
            prompt = msgspec.structs.replace(prompt, max_output_tokens=event.max_output_tokens)
        began, timeout, can_defer = self._clock.now(), request.timeout, request.can_defer
        permit = Permit(flight.id, began + timeout, _NO_SECRETS)
        return _RunningRequest(
            lease,
            flight,
            began,
            context.scopes,
            timeout,
            can_defer,
            request,
            model,
            prompt,
            attempt.rates,
            permit,
            values,
        )

    async def _stream_answer(self, running: _RunningRequest, listen: ChunkListener) -> AnsweredRequest | FailedRequest:
        """Carry out a request, and stream its answer to a listener, which always receives its end."""
        mask = RehydratingMask(self._stream_mask(), running.values) if running.values else self._stream_mask()
        stream = AnswerStream(running.flight.id, listen, mask, discards=running.request.discards_previous)
        running.stream, answer = stream, None
        try:
            answer = await self.carry_out(running)
            return answer
        finally:
            stream.finish(whole=isinstance(answer, AnsweredRequest))

    def start(self, effect: _RunningRequest) -> Coroutine[Any, Any, Reply]:
        if self.prompts.recorder_count:
            self.prompts.add(effect.flight.id, effect.sent)
        return effect.model.ask(effect.sent, effect.permit, effect.stream and effect.stream.on_text)

    def read_value(self, effect: _RunningRequest, value: Reply) -> ActualResult:
        """Mask an answer and compute its cost."""
        reply, usage, usd, tokens = value, value.usage, None, None
        if usage is not None and usage.input_tokens + usage.output_tokens > MAX_AMOUNT:
            # No store can record such a report.
            usage, reply = None, msgspec.structs.replace(reply, usage=None)
        if effect.values:
            reply = rehydrate_reply(reply, effect.values, effect.request.nonce)
        parts = self._masks.parts(reply.parts)
        if parts is not reply.parts:
            reply = msgspec.structs.replace(reply, parts=parts)
        if usage is not None:
            # Without a usage report or a price, the hold is charged.
            usage = find_unpriced_answer(usage, effect.request, effect.model, self._prices)
            reply = msgspec.structs.replace(reply, usage=usage) if usage is not reply.usage else reply
            tokens, usd = usage.uncached, self._compute_cost(effect, usage)
        effect.reply = reply
        return ActualResult("ok", usd, tokens, usage, _ENCODE(reply))

    def read_failure(self, effect: _RunningRequest, error: Exception) -> ActualResult:
        match error:
            case EffectStopped():
                result = self._cut(effect, error.leftover, error.outcome, str(error))
                return msgspec.structs.replace(result, may_retry=error.outcome == "timeout")
            case ModelError():
                return self._make_refusal(effect, error)
            case _:
                message = f"TimeoutError: {effect.flight.name} exceeded its deadline"
                return msgspec.structs.replace(self._cut(effect, error, "timeout", message), may_retry=True)

    def read_cancel(self, effect: _RunningRequest, cancelled: CancelledEffect, *, is_left: bool) -> ActualResult:
        """Read the outcome of a cancelled request. Its streamed text is recorded: the person has read it.

        The next owner of a session that this process leaves makes the request again.
        """
        outcome: Outcome = "unknown" if is_left else "cancelled"
        result = self._cut(effect, cancelled.leftover, outcome, "CancelledError: the session was cancelled")
        if effect.stream is None or not effect.stream.texts:
            return result
        text = Text(mask_text("".join(effect.stream.texts), self._redact), "model", trusted=False)
        return msgspec.structs.replace(result, body=_ENCODE(Reply((text,))))

    def _cut(self, effect: _RunningRequest, leftover: object, outcome: Outcome, error: str) -> ActualResult:
        """Make the result of a stopped request. It is free if it was never sent, and else costs at most its hold."""
        result = ActualResult(outcome, error=mask_text(error, self._redact)[:MAX_ERROR_LENGTH])
        if effect.permit.unsent:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return self._price_usage(effect, read_usage_report(leftover), result)

    def _make_refusal(self, effect: _RunningRequest, error: ModelError) -> ActualResult:
        result = ActualResult(
            "error",
            error=mask_text(str(error), self._redact)[:MAX_ERROR_LENGTH],
            may_retry=isinstance(error, ModelUnavailable),
            needs_person=isinstance(error, ModelUnusable),
            retry_after=error.retry_after,
        )
        if not error.billed:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return self._price_usage(effect, UsageReport(error.usage, final=error.final), result)

    def _price_usage(self, effect: _RunningRequest, report: UsageReport, result: ActualResult) -> ActualResult:
        """Add the usage and its price to a result. Without a plausible report, the hold is charged."""
        usage = report.usage
        if usage is None or usage.input_tokens + usage.output_tokens > MAX_AMOUNT:
            return result
        usage = find_unpriced_answer(usage, effect.request, effect.model, self._prices)
        if not report.final:
            # A cut-off answer counts as the longest possible: hidden reasoning is billed, but only reported at the end.
            limit = max(usage.output_tokens, effect.sent.max_output_tokens)
            usage = effect.request.prompt.extras.bound_usage(msgspec.structs.replace(usage, output_tokens=limit))
        usd = self._compute_cost(effect, usage)
        return msgspec.structs.replace(result, usd=usd, tokens=usage.uncached, usage=usage)

    def _compute_cost(self, effect: _RunningRequest, usage: Usage) -> int | None:
        if isinstance(effect.rates, Unpriced):
            return None
        model = effect.model
        return compute_cost(usage, effect.rates, self._prices, model.name, model.base_url, effect.started_at)

    def make_answer(
        self, effect: _RunningRequest, result: ActualResult, settlement: Settlement
    ) -> AnsweredRequest | FailedRequest:
        request, usd, tokens = effect.flight.id, settlement.usd, settlement.tokens
        if effect.reply is not None:
            limit = effect.sent.max_output_tokens
            return AnsweredRequest(request, effect.reply, usd, limit, settlement.overrun, tokens)
        return FailedRequest(
            request,
            result.outcome,
            result.error,
            usd,
            result.may_retry,
            result.retry_after,
            tokens,
            result.needs_person,
        )

    async def restore_answer(
        self, lease: Lease, settled: Stored, committed: Committed
    ) -> AnsweredRequest | FailedRequest:
        """Restore the outcome of an identical request, so that a paid answer is reused."""
        event, intent = cast("RequestSettled", settled.event), cast("RequestStarted", committed.events[0].event)
        outcome = restore_request_outcome(event, await read_body(self._store, settled), intent.max_output_tokens)
        return msgspec.structs.replace(outcome, repeated=True)

    def answer_in_doubt(self, flight: InFlight) -> FailedRequest:
        return FailedRequest(flight.id, "unknown", STARTED_BY_EARLIER_OWNER, may_retry=True)


def _make_attempt(  # noqa: PLR0913, PLR0917 An attempt needs each of these.
    context: SessionContext,
    terms: RequestTerms,
    request: ModelRequest,
    prompt: Prompt,
    anonymized_prompt: AnonymizedPrompt | None,
    attempt_id: str,
    now: int,
    stored_body: tuple[bytes | None, Digest | None],
) -> ModelAttempt:
    """Make the judge's input. Tokens are counted for the full prompt, not only for its new part."""
    audio_tokens = request.audio_tokens
    if request.input_tokens is None:
        tokens = terms.model.count(prompt if anonymized_prompt is None else anonymized_prompt.prompt)
        audio_tokens = count_audio_tokens(prompt.messages)
    else:
        # Placeholders may be longer than their values.
        tokens = request.input_tokens + (0 if anonymized_prompt is None else anonymized_prompt.growth)
    overrides: dict[str, Any] = {}
    if request.prices is not None:
        overrides["rates"] = request.prices
    elif audio_tokens or prompt.provider_tools or prompt.long_cache:
        extras = msgspec.structs.replace(prompt.extras, audio_tokens=audio_tokens)
        overrides["rates"], tokens = find_extra_rates(terms, extras), extras.bound_input(tokens)
    if request.min_output_tokens > terms.base.min_output_tokens:
        overrides["min_output_tokens"] = request.min_output_tokens
    if anonymized_prompt is not None:
        overrides["anonymized"] = anonymized_prompt.counts
    if request.traceparent:
        overrides["traceparent"] = request.traceparent
    attempt = msgspec.structs.replace(
        terms.base,
        request=attempt_id,
        purpose=request.purpose,
        spender=terms.spender,
        now=now,
        input_tokens=tokens,
        max_output_tokens=prompt.max_output_tokens,
        halts=terms.halts or context.halts,
        reserve=terms.reserve,
        optional=request.optional,
        body=stored_body[0],
        blob=stored_body[1],
        terms=terms.hold,
    )
    return msgspec.structs.replace(attempt, **overrides) if overrides else attempt


def choose_cache(prompt: Prompt, terms: RequestTerms) -> Prompt:
    """Cache a prompt for minutes if its model cannot cache it for an hour, or if the price of that is not known."""
    if not prompt.long_cache:
        return prompt
    is_priced = not isinstance(find_extra_rates(terms, RequestExtras(long_cache=True)), Unpriced)
    has_long_cache = is_priced and getattr(terms.model, "has_long_cache", False)
    return prompt if has_long_cache else msgspec.structs.replace(prompt, long_cache=False)


def find_extra_rates(terms: RequestTerms, extras: RequestExtras) -> ModelPrices | Unpriced:
    """Find the prices of a request with audio or with provider tools."""
    prices = terms.base.rates
    if isinstance(prices, Unpriced):
        return prices
    covering = prices.covering(extras)
    return UnpricedFeature(terms.model.name, covering) if isinstance(covering, str) else covering


def hide_personal_data(context: SessionContext, prompt: Prompt, terms: RequestTerms) -> AnonymizedPrompt | None:
    """Hide personal data from a model, if the policy requires it. A model on this machine sees everything."""
    if context.anonymize is None or terms.is_local:
        return None
    return anonymize_prompt(prompt, context.anonymize.salt or context.session, context.anonymize.names)


def read_usage_report(leftover: object) -> UsageReport:
    """Read the usage that a stopped request reported before its end."""
    if isinstance(leftover, Reply):
        return UsageReport(leftover.usage)
    return UsageReport(leftover.usage, final=leftover.final) if isinstance(leftover, ModelError) else UsageReport(None)


def find_unpriced_answer(usage: Usage, request: ModelRequest, model: Model, prices: PriceTable) -> Usage:
    """Mark a usage as unpriced if another model without a price answered a client. What runs here costs nothing."""
    if not (usage.answered_by or usage.unpriced):
        return usage
    if runs_locally(model.name, model.base_url):
        return msgspec.structs.replace(usage, answered_by="", unpriced="")
    if usage.unpriced or not request.written_by_client:
        return usage
    rates = prices.find(ModelName(model.name.provider, usage.answered_by), model.base_url)
    unpriced = f"model: {usage.answered_by}" if isinstance(rates, Unpriced) else ""
    return msgspec.structs.replace(usage, unpriced=shorten(to_one_line(unpriced), 100))
