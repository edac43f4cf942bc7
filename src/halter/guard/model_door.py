"""The model door: the only way to ask a model.

    1. prepare   without a lock          the model, its price, the tokens of the prompt
    2. admit     one short transaction   R5 halt -> R6 the model and its price -> R4 hold
    3. ask       no transaction          the model, with a permit and a deadline; a halt cancels it
    4. settle    one transaction         the reply and its true cost

A request beyond the rate limit of its model waits for the next minute. The door does not retry: each attempt has its
own id and hold, and its outcome says whether a retry may succeed.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from halter.core.clock import MINUTE, Clock
from halter.core.errors import ModelError, ModelUnavailable, ModelUnusable
from halter.core.events import CostCapReached, GuardrailTriggered, RequestRefused, RequestSettled, RequestStarted
from halter.core.ids import Digest
from halter.core.messages import Model, Prompt, Reply, StreamChunk, Text, count_audio_tokens
from halter.core.money import MAX_AMOUNT, Charge, list_accounts
from halter.core.ports import BLOB_THRESHOLD, Committed, Lease, Store, Write, offload_body, read_body
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
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.halts import (
    MAX_ERROR_LENGTH,
    BudgetBusy,
    EffectStopped,
    HaltWatch,
    RateLimited,
    find_outcome,
    read_cancelled_effect,
    run_shielded,
)
from halter.guard.judge_request import ModelAttempt, judge_attempt, list_request_rows
from halter.guard.ledger import ActualResult, Ledger
from halter.guard.prepare import RequestTerms, SessionContext
from halter.redaction.anonymize import AnonymizedPrompt, StreamRehydrator, anonymize_prompt, rehydrate_reply
from halter.redaction.redact import PromptMasker, Redact, mask_text
from halter.state.session import InFlight, track_request

ChunkListener = Callable[[StreamChunk], None]


class StreamMask(Protocol):
    """Masks secrets in streamed text. It may hold a chunk back until the chunk is known to be safe."""

    def feed(self, chunk: str) -> str: ...

    def finish(self) -> str: ...


class WholeTextMask:
    """Masks a text as a whole, at its end, and passes nothing on before."""

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._pieces: list[str] = []

    def feed(self, chunk: str) -> str:
        self._pieces.append(chunk)
        return ""

    def finish(self) -> str:
        return self._redact("".join(self._pieces))


class RehydratingMask:
    """Replaces placeholders with their values, before secrets are masked."""

    def __init__(self, mask: StreamMask, values: Mapping[str, str]) -> None:
        self._mask = mask
        self._rehydrator = StreamRehydrator(values)

    def feed(self, chunk: str) -> str:
        return self._mask.feed(self._rehydrator.feed(chunk))

    def finish(self) -> str:
        return self._mask.feed(self._rehydrator.finish()) + self._mask.finish()


class AnswerStream:
    """Passes one attempt's text to a listener. A listener that raises is dropped; the request continues."""

    def __init__(self, request: str, listen: ChunkListener, mask: StreamMask, *, discards: bool) -> None:
        self._request = request
        self._on_chunk: ChunkListener | None = listen
        self._mask = mask
        self.texts: list[str] = []
        if discards:
            self._send_chunk(StreamChunk(request, discard=True))

    def on_text(self, text: str) -> None:
        self._emit(self._mask.feed(text))

    def finish(self, *, whole: bool) -> None:
        """End the stream. Drop the text held back from a failed answer, which will be discarded."""
        if whole:
            self._emit(self._mask.finish())
        self._send_chunk(StreamChunk(self._request, finished=True))
        self._on_chunk = None

    def _emit(self, text: str) -> None:
        if text:
            self.texts.append(text)
            self._send_chunk(StreamChunk(self._request, text))

    def _send_chunk(self, chunk: StreamChunk) -> None:
        if self._on_chunk is None:
            return
        try:
            self._on_chunk(chunk)
        except Exception:  # noqa: BLE001 The listener is foreign code: its errors must not end the request.
            self._on_chunk = None


MODEL_REQUEST_TIMEOUT: Final = 10 * MINUTE
OUTCOME_UNKNOWN: Final = "It is unknown whether the model answered."

_NO_SECRETS: Final = MappingProxyType[str, str]({})
_NO_VALUES: Final = MappingProxyType[str, str]({})
_ENCODE: Final = msgspec.json.Encoder().encode


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a prompt that the journal does not have already."""

    volatile: str = ""
    nonce: str = ""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model request.

    An `optional` request does not wait for money, and its refusal ends no session. The journal stores `record` in place
    of the prompt, if it has the rest already. `input_tokens` is a tighter bound than the prompt's length, and includes
    `audio_tokens`. `on_chunk` receives the answer as it streams; `discards_previous` withdraws the text of an earlier
    attempt. With a `nonce`, the answer may contain calls written as text. With `can_defer`, the caller continues the
    session immediately, so the settlement may be deferred to its next commit. `prices` are this request's, if they
    differ from its model's. `min_output_tokens` is the smallest output limit that its provider accepts. With
    `written_by_client`, an answer by another model without a price settles at its hold. `traceparent` is the client's
    span, of which the request is a part.
    """

    id: str
    prompt: Prompt
    purpose: Purpose = "turn"
    timeout: int = MODEL_REQUEST_TIMEOUT
    optional: bool = False
    record: RequestRecord | None = None
    input_tokens: int | None = None
    audio_tokens: int = 0
    on_chunk: ChunkListener | None = None
    discards_previous: bool = False
    nonce: str = ""
    can_defer: bool = False
    prices: ModelPrices | Unpriced | None = None
    min_output_tokens: int = 0
    written_by_client: bool = False
    traceparent: str = ""


class AnsweredRequest(msgspec.Struct, frozen=True, gc=False):
    """The model's answer. A repeated one comes from the journal, and the session has already paid for it."""

    request: str
    reply: Reply
    cost_usd: int = 0
    max_output_tokens: int = 0
    overrun: bool = False
    tokens: int = 0
    repeated: bool = False


class RefusedRequest(msgspec.Struct, frozen=True):
    """The guard refused the request; the refusal is recorded."""

    request: str
    outcome: Outcome
    sentence: str
    cap: CostCapReached | None = None


class FailedRequest(msgspec.Struct, frozen=True):
    """The model gave no answer. `retry_after` is the provider's requested wait, in microseconds.

    If `needs_person` is set, retries fail until a person has fixed something.
    """

    request: str
    outcome: Outcome
    error: str
    cost_usd: int = 0
    may_retry: bool = False
    retry_after: int | None = None
    tokens: int = 0
    needs_person: bool = False
    repeated: bool = False


RequestOutcome = AnsweredRequest | RefusedRequest | BudgetBusy | RateLimited | FailedRequest


class _RequestInFlight(msgspec.Struct, frozen=True):
    """A request in flight: its model and price, its permit, and the values of its placeholders."""

    lease: Lease
    flight: InFlight
    request: ModelRequest
    model: Model
    sent: Prompt
    rates: ModelPrices | Unpriced
    began: int
    permit: Permit
    values: Mapping[str, str]


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


class ModelDoor:
    """Admits or refuses a request, asks the model, and settles the cost: the only way to ask a model."""

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
        self._store = store
        self._clock = clock
        self._ledger = ledger
        self._prices = prices
        self._stream_mask = stream_mask or partial(WholeTextMask, redact)
        self._redact = redact
        self._masks = PromptMasker(redact)
        self._max_wait = ledger.hold_timeout
        self._halts = halts or HaltWatch(store, clock)
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
        in_flight = await self._admit(lease, context, request, model, attempt, waited)
        if not isinstance(in_flight, _RequestInFlight):
            return in_flight
        if self.prompts.recorder_count:
            self.prompts.add(in_flight.flight.id, in_flight.sent)
        # Thousands of requests may wait here: the steps before and after have their own frames, to save memory.
        stream = None if request.on_chunk is None else self._open_stream(in_flight, request.on_chunk)
        answer: AnsweredRequest | FailedRequest | None = None
        try:
            effect = self._halts.watch(context.scopes, request.timeout, in_flight.flight.name)
            try:
                try:
                    reply = effect.leftover = await model.ask(
                        in_flight.sent, in_flight.permit, stream and stream.on_text
                    )
                except BaseException as error:
                    effect.end(error)
                    raise
                effect.end()
            except (asyncio.CancelledError, EffectStopped, TimeoutError, ModelError) as error:
                answer = await self._fail(in_flight, error, stream)
            else:
                answer = await self._accept_reply(in_flight, reply)
            return answer
        finally:
            if stream is not None:
                stream.finish(whole=isinstance(answer, AnsweredRequest))

    def _open_stream(self, in_flight: _RequestInFlight, listen: ChunkListener) -> AnswerStream:
        """Stream the answer to a listener, which always receives its end."""
        mask = RehydratingMask(self._stream_mask(), in_flight.values) if in_flight.values else self._stream_mask()
        return AnswerStream(in_flight.flight.id, listen, mask, discards=in_flight.request.discards_previous)

    async def _admit(
        self, lease: Lease, context: SessionContext, request: ModelRequest, model: Model, attempt: int, waited: int
    ) -> _RequestInFlight | RequestOutcome:
        """Decide in one short transaction, and again while other holds use the budget.

        After a wait for the rate limit, the decision has a key of its own, so that a crash does not repeat the wait.
        This is a separate function, so that the data of the decision is freed while the model answers.
        """
        now = self._clock.now()
        terms = context.terms_of_model(model, self._prices, now)
        prompt = choose_cache(self._masks.prompt(lease, request.prompt), terms)
        anonymized_prompt = None if context.anonymize is None else hide_personal_data(context, prompt, terms)
        # Masked before it is encoded: JSON would escape characters of a secret.
        request_record = request.record
        if (
            request_record is not None
            and request_record.volatile
            and (text := mask_text(request_record.volatile, self._redact)) is not request_record.volatile
        ):
            request_record = RequestRecord(text, request_record.nonce)
        body = _ENCODE(prompt if request_record is None else request_record)
        stored_body = (body, None) if len(body) <= BLOB_THRESHOLD else await offload_body(self._store, body)
        model_attempt = _make_attempt(
            context, terms, request, prompt, anonymized_prompt, f"{request.id}/{attempt}", now, stored_body
        )
        max_wait = 0 if model_attempt.optional else self._max_wait
        while True:
            intent = _RequestIntent(lease, model_attempt, waited)
            committed = await self._ledger.commit_intent(intent, max_wait, now)
            if committed is None:
                return BudgetBusy(model_attempt.request)
            stored = committed.events[0]
            event = stored.event
            if isinstance(event, RequestStarted):
                break
            answer = read_request_refusal(committed)
            if isinstance(answer, RefusedRequest):
                return answer
            retry_at = answer.until or 0
            if not committed.is_repeated or retry_at > self._clock.now():
                return RateLimited(model_attempt.request, retry_at, waited)
            waited, now = waited + 1, 0
        # A cost without a hold is charged to the accounts that would have held it.
        accounts = (
            () if event.legs else list_accounts(model_attempt.caps, model_attempt.spender, intent.attempt_record.now)
        )
        limit = event.max_output_tokens
        flight = track_request(event, stored, accounts)
        if committed.is_repeated and (
            earlier_outcome := await self._find_earlier_outcome(flight, limit, committed, lease)
        ):
            return earlier_outcome
        values, sent_prompt = (
            (_NO_VALUES, prompt) if anonymized_prompt is None else (anonymized_prompt.values, anonymized_prompt.prompt)
        )
        if sent_prompt.max_output_tokens != limit:
            sent_prompt = msgspec.structs.replace(sent_prompt, max_output_tokens=limit)
        started_at = self._clock.now()
        permit = Permit(flight.id, started_at + request.timeout, _NO_SECRETS)
        return _RequestInFlight(
            lease, flight, request, model, sent_prompt, model_attempt.rates, started_at, permit, values
        )

    async def _find_earlier_outcome(
        self, flight: InFlight, max_output_tokens: int, committed: Committed, lease: Lease
    ) -> AnsweredRequest | FailedRequest | None:
        """Find the outcome of an earlier identical request, so that a paid answer is reused."""
        stored = await find_outcome(self._store, lease.stream, flight)
        if stored is not None and isinstance(stored.event, RequestSettled):
            answer = restore_request_outcome(stored.event, await read_body(self._store, stored), max_output_tokens)
            return msgspec.structs.replace(answer, repeated=True)
        if any(event.generation != lease.generation for event in committed.events):
            error = "An earlier owner of this session started it; its outcome is unknown."
            return FailedRequest(flight.id, "unknown", error, may_retry=True)
        return None

    async def _fail(
        self,
        in_flight: _RequestInFlight,
        error: asyncio.CancelledError | EffectStopped | TimeoutError | ModelError,
        stream: AnswerStream | None,
    ) -> FailedRequest:
        """Settle a request that failed, was halted, timed out or was cancelled. A cancel is raised again.

        The streamed text of a cancelled answer is recorded, because the person who interrupted it has read it.
        """
        match error:
            case asyncio.CancelledError():
                leftover = read_cancelled_effect(error).leftover
                # The next owner of a session that this process leaves makes the request again.
                outcome: Outcome = "unknown" if self._halts.departures.includes(in_flight.lease) else "cancelled"
                cancelled_result = self._cut(in_flight, leftover, outcome, "CancelledError: the session was cancelled")
                if stream is not None and stream.texts:
                    text = Text(mask_text("".join(stream.texts), self._redact), "model", trusted=False)
                    cancelled_result = msgspec.structs.replace(cancelled_result, body=_ENCODE(Reply((text,))))
                await run_shielded(self._make_failure(in_flight, cancelled_result))
                raise error
            case EffectStopped():
                result = self._cut(in_flight, error.leftover, error.outcome, str(error))
                result = msgspec.structs.replace(result, may_retry=error.outcome == "timeout")
            case TimeoutError():
                message = f"TimeoutError: {in_flight.flight.name} exceeded its deadline"
                result = msgspec.structs.replace(self._cut(in_flight, error, "timeout", message), may_retry=True)
            case ModelError():
                result = self._make_refusal(in_flight, error)
        return await self._make_failure(in_flight, result)

    async def _accept_reply(self, in_flight: _RequestInFlight, reply: Reply) -> AnsweredRequest:
        """Mask an answer and settle its cost."""
        usage, usd, tokens = reply.usage, None, None
        if usage is not None and usage.input_tokens + usage.output_tokens > MAX_AMOUNT:
            # No store can record such a report.
            usage, reply = None, msgspec.structs.replace(reply, usage=None)
        if in_flight.values:
            reply = rehydrate_reply(reply, in_flight.values, in_flight.request.nonce)
        parts = self._masks.parts(reply.parts)
        if parts is not reply.parts:
            reply = msgspec.structs.replace(reply, parts=parts)
        if usage is not None:
            # Without a usage report or a price, the hold is charged.
            usage = find_unpriced_answer(usage, in_flight.request, in_flight.model, self._prices)
            reply = msgspec.structs.replace(reply, usage=usage) if usage is not reply.usage else reply
            tokens, usd = usage.uncached, self._compute_cost(in_flight, usage)
        lease, flight = in_flight.lease, in_flight.flight
        result = ActualResult("ok", usd, tokens, usage, _ENCODE(reply))
        settlement = self._ledger.defer_settlement(lease, flight, result) if in_flight.request.can_defer else None
        if settlement is None:
            settlement = await self._ledger.settle(lease, flight, result)
        limit = in_flight.sent.max_output_tokens
        return AnsweredRequest(flight.id, reply, settlement.usd, limit, settlement.overrun, settlement.tokens)

    async def _make_failure(self, in_flight: _RequestInFlight, result: ActualResult) -> FailedRequest:
        settlement = await self._ledger.settle(in_flight.lease, in_flight.flight, result)
        return FailedRequest(
            in_flight.flight.id,
            result.outcome,
            result.error,
            settlement.usd,
            result.may_retry,
            result.retry_after,
            settlement.tokens,
            result.needs_person,
        )

    def _cut(self, in_flight: _RequestInFlight, leftover: object, outcome: Outcome, error: str) -> ActualResult:
        """Make the result of a stopped request. It is free if it was never sent, and else costs at most its hold."""
        result = ActualResult(outcome, error=mask_text(error, self._redact)[:MAX_ERROR_LENGTH])
        if in_flight.permit.unsent:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return self._price_usage(in_flight, read_usage_report(leftover), result)

    def _make_refusal(self, in_flight: _RequestInFlight, error: ModelError) -> ActualResult:
        result = ActualResult(
            "error",
            error=mask_text(str(error), self._redact)[:MAX_ERROR_LENGTH],
            may_retry=isinstance(error, ModelUnavailable),
            needs_person=isinstance(error, ModelUnusable),
            retry_after=error.retry_after,
        )
        if not error.billed:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return self._price_usage(in_flight, UsageReport(error.usage, final=error.final), result)

    def _price_usage(self, in_flight: _RequestInFlight, report: UsageReport, result: ActualResult) -> ActualResult:
        """Add the usage and its price to a result. Without a plausible report, the hold is charged."""
        usage = report.usage
        if usage is None or usage.input_tokens + usage.output_tokens > MAX_AMOUNT:
            return result
        usage = find_unpriced_answer(usage, in_flight.request, in_flight.model, self._prices)
        if not report.final:
            # A cut-off answer counts as the longest possible: hidden reasoning is billed, but only reported at the end.
            limit = max(usage.output_tokens, in_flight.sent.max_output_tokens)
            usage = in_flight.request.prompt.extras.bound_usage(msgspec.structs.replace(usage, output_tokens=limit))
        usd = self._compute_cost(in_flight, usage)
        return msgspec.structs.replace(result, usd=usd, tokens=usage.uncached, usage=usage)

    def _compute_cost(self, in_flight: _RequestInFlight, usage: Usage) -> int | None:
        if isinstance(in_flight.rates, Unpriced):
            return None
        model = in_flight.model
        return compute_cost(usage, in_flight.rates, self._prices, model.name, model.base_url, in_flight.began)


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


def restore_request_outcome(
    event: RequestSettled, body: bytes, max_output_tokens: int
) -> AnsweredRequest | FailedRequest:
    charge = event.charge or Charge()
    cost, tokens = charge.usd, charge.tokens
    if event.outcome == "ok" and body:
        reply = msgspec.json.decode(body, type=Reply)
        return AnsweredRequest(event.request, reply, cost, max_output_tokens, bool(charge.overruns), tokens)
    if event.outcome == "ok":
        error = "Erased: the model's answer was erased"
        return FailedRequest(event.request, "error", error, cost, tokens=tokens)
    may_retry = event.may_retry or event.outcome == "unknown"
    error = event.error or OUTCOME_UNKNOWN
    return FailedRequest(
        event.request, event.outcome, error, cost, may_retry, event.retry_after, tokens, event.needs_person
    )


def read_request_refusal(committed: Committed) -> RefusedRequest | GuardrailTriggered:
    cap: CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case CostCapReached() as reached:
                cap = reached
            case GuardrailTriggered() as guardrail:
                return guardrail
            case RequestRefused() as refused:
                return RefusedRequest(refused.request, refused.outcome, refused.sentence, cap)
            case _:
                pass
    raise AssertionError("The commit that decided a request has no refusal, rate wait or intent.")
