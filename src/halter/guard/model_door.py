"""The one door to a model.

    attempt = everything known without a lock        the model, its price, the tokens of the prompt
    admitted = one short transaction                 R5 halt -> R6 the model and its price -> R4 the hold
    reply = the model, with a permit and a deadline  no transaction open; a halt cancels it
    settled = one more transaction                   the answer and its true cost

A request beyond the rate of its model waits for the next minute. Nothing is retried here: each attempt has its own id
and hold, and its outcome is a value that says whether another attempt makes sense.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from halter.core import events as ev
from halter.core.clock import MINUTE, Clock
from halter.core.errors import ModelError, ModelUnavailable, ModelUnusable
from halter.core.ids import Digest
from halter.core.messages import Model, Prompt, Reply, StreamChunk, Text, count_audio_tokens
from halter.core.money import LARGEST_AMOUNT, Charge, list_accounts
from halter.core.ports import BLOB_THRESHOLD, Committed, Lease, Store, Write, offload_body, read_body
from halter.core.rows import HaltRow
from halter.core.tools import Permit
from halter.core.usage import ModelPrices, PriceTable, RequestExtras, Unpriced, UnpricedFeature, Usage
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.halts import (
    LONGEST_ERROR,
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
    """Masks secrets in streamed text; may hold a piece back until it is certain."""

    def feed(self, chunk: str) -> str: ...

    def finish(self) -> str: ...


class WholeTextMask:
    """Masks a text as a whole, at its end: nothing is passed on before."""

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
    """Passes one attempt's text to a listener. A listener that raises is dropped; the request goes on."""

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
        """End the stream. Text held back from a failed answer is dropped: the answer will be discarded."""
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
        except Exception:  # noqa: BLE001 It is a stranger's code, and what it shows is no part of the work.
            self._on_chunk = None


MODEL_REQUEST_TIMEOUT: Final = 10 * MINUTE
OUTCOME_UNKNOWN: Final = "It is unknown whether the model answered."

_NO_SECRETS: Final = MappingProxyType[str, str]({})
_NO_VALUES: Final = MappingProxyType[str, str]({})
_ENCODE: Final = msgspec.json.Encoder().encode


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the journal keeps of a request: the part of the prompt that is not in it already."""

    volatile: str = ""
    nonce: str = ""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model request.

    An `optional` one does not wait for money, and its refusal ends no session. `record` is what the journal stores,
    where the rest of the prompt is there already. `input_tokens` is a tighter bound than the prompt's length, and comes
    with the `audio_tokens` among them. `listen` receives the answer as it streams; `discards` withdraws the text of an
    earlier attempt. With a `nonce`, the answer may hold calls written as text. With `goes_on` the caller continues the
    session at once, so the outcome may be written with what follows. `rates` are what this request costs, where that is
    not what its model usually does; `min_output_tokens` is the shortest answer that its provider accepts as a limit.
    """

    id: str
    prompt: Prompt
    purpose: Purpose = "turn"
    timeout: int = MODEL_REQUEST_TIMEOUT
    optional: bool = False
    record: RequestRecord | None = None
    input_tokens: int | None = None
    audio_tokens: int = 0
    listen: ChunkListener | None = None
    discards: bool = False
    nonce: str = ""
    goes_on: bool = False
    rates: ModelPrices | Unpriced | None = None
    min_output_tokens: int = 0


class AnsweredRequest(msgspec.Struct, frozen=True, gc=False):
    """The model's answer. One that is `repeated` comes from the journal, and the session has paid for it already."""

    request: str
    reply: Reply
    cost_usd: int = 0
    max_output_tokens: int = 0
    overrun: bool = False
    tokens: int = 0
    repeated: bool = False


class RefusedRequest(msgspec.Struct, frozen=True):
    """A brake refused the request, and the refusal is recorded."""

    request: str
    outcome: Outcome
    sentence: str
    cap: ev.CostCapReached | None = None


class FailedRequest(msgspec.Struct, frozen=True):
    """The model gave no answer. `retry_after` is the provider's requested wait, in microseconds.

    One that `needs_person` is not answered before a person has changed something.
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
    """A request in flight: its price, its permit, and the values of its placeholders."""

    lease: Lease
    flight: InFlight
    request: ModelRequest
    sent: Prompt
    rates: ModelPrices | Unpriced
    began: int
    permit: Permit
    values: Mapping[str, str]


class _RequestIntent(msgspec.Struct):
    """The write that admits a request or refuses it; `waited` counts its waits for a rate."""

    lease: Lease
    attempt_record: ModelAttempt
    waited: int

    def write(self, now: int, first: Write | None = None) -> Write:
        attempt = self.attempt_record
        if now != attempt.now:
            attempt = self.attempt_record = attempt.at(now)
        key = f"{attempt.request}/asked/{self.waited}" if self.waited else f"{attempt.request}/asked"
        reads, decide = list_request_rows(attempt), partial(judge_attempt, attempt)
        return Write(self.lease.stream, key, decide, reads, self.lease, (), first)


class UsageReport(msgspec.Struct, frozen=True):
    """The reported usage. Unless final, only the input is known: the answer may have gone on."""

    usage: Usage | None
    final: bool = True


class ModelDoor:
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
        self._patience = ledger.hold_timeout
        self._halts = halts or HaltWatch(store, clock)

    async def request(
        self,
        lease: Lease,
        context: SessionContext,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        waited: int = 0,
    ) -> RequestOutcome:
        """Admit a request or refuse it; the outcome is in the journal when this returns."""
        flying = await self._admit(lease, context, request, model, attempt, waited)
        if not isinstance(flying, _RequestInFlight):
            return flying
        # Thousands of requests may wait here: what is done before and after has frames of its own.
        voice = None if request.listen is None else self._open_stream(flying, request.listen)
        answer: AnsweredRequest | FailedRequest | None = None
        try:
            watched = self._halts.watch(context.scopes, request.timeout, flying.flight.name)
            try:
                try:
                    reply = watched.leftover = await model.ask(flying.sent, flying.permit, voice and voice.on_text)
                except BaseException as error:
                    watched.end(error)
                    raise
                watched.end()
            except (asyncio.CancelledError, EffectStopped, TimeoutError, ModelError) as error:
                answer = await self._fail(flying, error, voice)
            else:
                answer = await self._accept_reply(flying, reply)
            return answer
        finally:
            if voice is not None:
                voice.finish(whole=isinstance(answer, AnsweredRequest))

    async def find_halt(self, scopes: Sequence[str]) -> HaltRow | None:
        return await self._halts.find(scopes)

    def _open_stream(self, flying: _RequestInFlight, listen: ChunkListener) -> AnswerStream:
        """Stream the answer to a listener, who always receives its end."""
        mask = RehydratingMask(self._stream_mask(), flying.values) if flying.values else self._stream_mask()
        return AnswerStream(flying.flight.id, listen, mask, discards=flying.request.discards)

    async def _admit(
        self, lease: Lease, context: SessionContext, request: ModelRequest, model: Model, attempt: int, waited: int
    ) -> _RequestInFlight | RequestOutcome:
        """Decide in one short transaction, again while other holds are in the way.

        Each wait for a rate is a decision of its own, which is read again after a crash. What only the decision needs
        is gone with this frame while the model answers.
        """
        now = self._clock.now()
        terms = context.terms_of_model(model, self._prices, now)
        prompt = self._masks.prompt(lease, request.prompt)
        hidden = None if context.anonymize is None else hide_personal_data(context, prompt, terms)
        # Masked before it is encoded: inside JSON a secret would be spelled otherwise.
        kept = request.record
        if kept is not None and kept.volatile and (text := mask_text(kept.volatile, self._redact)) is not kept.volatile:
            kept = RequestRecord(text, kept.nonce)
        body = _ENCODE(prompt if kept is None else kept)
        record = (body, None) if len(body) <= BLOB_THRESHOLD else await offload_body(self._store, body)
        asking = _make_attempt(context, terms, request, prompt, hidden, f"{request.id}/{attempt}", now, record)
        max_wait = 0 if asking.optional else self._patience
        while True:
            intent = _RequestIntent(lease, asking, waited)
            committed = await self._ledger.commit_intent(intent, max_wait, now)
            if committed is None:
                return BudgetBusy(asking.request)
            stored = committed.events[0]
            started = stored.event
            if isinstance(started, ev.RequestStarted):
                break
            answer = read_request_refusal(committed)
            if isinstance(answer, RefusedRequest):
                return answer
            until = answer.until or 0
            if not committed.repeated or until > self._clock.now():
                return RateLimited(asking.request, until, waited)
            waited, now = waited + 1, 0
        # A cost for which nothing was held counts where it would have been held.
        where = () if started.legs else list_accounts(asking.caps, asking.spender, intent.attempt_record.now)
        limit = started.max_output_tokens
        flight = track_request(started, stored, where)
        if committed.repeated and (before := await self._find_earlier_outcome(flight, limit, committed, lease)):
            return before
        values, sent = (_NO_VALUES, prompt) if hidden is None else (hidden.values, hidden.prompt)
        if sent.max_output_tokens != limit:
            sent = msgspec.structs.replace(sent, max_output_tokens=limit)
        began = self._clock.now()
        permit = Permit(flight.id, began + request.timeout, _NO_SECRETS)
        return _RequestInFlight(lease, flight, request, sent, asking.rates, began, permit, values)

    async def _find_earlier_outcome(
        self, flight: InFlight, max_output_tokens: int, committed: Committed, lease: Lease
    ) -> AnsweredRequest | FailedRequest | None:
        """The outcome of an earlier identical request: a paid answer is kept, and no model is asked twice."""
        stored = await find_outcome(self._store, lease.stream, flight)
        if stored is not None and isinstance(stored.event, ev.RequestSettled):
            answer = restore_request_outcome(stored.event, await read_body(self._store, stored), max_output_tokens)
            return msgspec.structs.replace(answer, repeated=True)
        if any(event.generation != lease.generation for event in committed.events):
            error = "An earlier owner of this session began it; its outcome is unknown."
            return FailedRequest(flight.id, "unknown", error, may_retry=True)
        return None

    async def _fail(
        self,
        flying: _RequestInFlight,
        error: asyncio.CancelledError | EffectStopped | TimeoutError | ModelError,
        voice: AnswerStream | None,
    ) -> FailedRequest:
        """Settle a request that failed, was halted or timed out, or was cancelled, which is raised again.

        What was heard of a cancelled answer is kept with it: a person who interrupts an answer has read that much.
        """
        match error:
            case asyncio.CancelledError():
                left = read_cancelled_effect(error).leftover
                stopped = self._cut(flying, left, "cancelled", "CancelledError: the session was cancelled")
                if voice is not None and voice.texts:
                    text = Text(mask_text("".join(voice.texts), self._redact), "model", trusted=False)
                    stopped = msgspec.structs.replace(stopped, body=_ENCODE(Reply((text,))))
                await run_shielded(self._make_failure(flying, stopped))
                raise error
            case EffectStopped():
                result = self._cut(flying, error.leftover, error.outcome, str(error))
                result = msgspec.structs.replace(result, may_retry=error.outcome == "timeout")
            case TimeoutError():
                late = f"TimeoutError: {flying.flight.name} took longer than it may"
                result = msgspec.structs.replace(self._cut(flying, error, "timeout", late), may_retry=True)
            case ModelError():
                result = self._make_refusal(flying, error)
        return await self._make_failure(flying, result)

    async def _accept_reply(self, flying: _RequestInFlight, reply: Reply) -> AnsweredRequest:
        """Mask an answer and settle its cost."""
        usage, usd, tokens = reply.usage, None, None
        if usage is not None and usage.input_tokens + usage.output_tokens > LARGEST_AMOUNT:
            # No store could keep such a report.
            usage, reply = None, msgspec.structs.replace(reply, usage=None)
        if flying.values:
            reply = rehydrate_reply(reply, flying.values, flying.request.nonce)
        parts = self._masks.parts(reply.parts)
        if parts is not reply.parts:
            reply = msgspec.structs.replace(reply, parts=parts)
        if usage is not None:
            # What has no usage, or no price, is charged at its hold.
            tokens, rates = usage.uncached, flying.rates
            usd = None if isinstance(rates, Unpriced) else rates.cost(usage, flying.began)
        lease, flight = flying.lease, flying.flight
        result = ActualResult("ok", usd, tokens, usage, _ENCODE(reply))
        settled = self._ledger.defer_settlement(lease, flight, result) if flying.request.goes_on else None
        if settled is None:
            settled = await self._ledger.settle(lease, flight, result)
        limit = flying.sent.max_output_tokens
        return AnsweredRequest(flight.id, reply, settled.usd, limit, settled.overrun, settled.tokens)

    async def _make_failure(self, flying: _RequestInFlight, result: ActualResult) -> FailedRequest:
        settled = await self._ledger.settle(flying.lease, flying.flight, result)
        return FailedRequest(
            flying.flight.id,
            result.outcome,
            result.error,
            settled.usd,
            result.may_retry,
            result.retry_after,
            settled.tokens,
            result.needs_person,
        )

    def _cut(self, flying: _RequestInFlight, left: object, outcome: Outcome, error: str) -> ActualResult:
        """A stopped request costs nothing if it was never sent, otherwise at most its hold."""
        result = ActualResult(outcome, error=mask_text(error, self._redact)[:LONGEST_ERROR])
        if flying.permit.unsent:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return _price_usage(flying, read_usage_report(left), result)

    def _make_refusal(self, flying: _RequestInFlight, error: ModelError) -> ActualResult:
        result = ActualResult(
            "error",
            error=mask_text(str(error), self._redact)[:LONGEST_ERROR],
            may_retry=isinstance(error, ModelUnavailable),
            needs_person=isinstance(error, ModelUnusable),
            retry_after=error.retry_after,
        )
        if not error.billed:
            return msgspec.structs.replace(result, usd=0, tokens=0)
        return _price_usage(flying, UsageReport(error.usage, final=error.final), result)


def _make_attempt(  # noqa: PLR0913, PLR0917 Each is a part of it.
    context: SessionContext,
    terms: RequestTerms,
    request: ModelRequest,
    prompt: Prompt,
    hidden: AnonymizedPrompt | None,
    name: str,
    now: int,
    record: tuple[bytes | None, Digest | None],
) -> ModelAttempt:
    """Collect what the judge needs; the full prompt is counted, not only what is sent."""
    audio = request.audio_tokens
    if request.input_tokens is None:
        tokens = terms.model.count(prompt if hidden is None else hidden.prompt)
        audio = count_audio_tokens(prompt.messages)
    else:
        # Placeholders may be longer than their values.
        tokens = request.input_tokens + (0 if hidden is None else hidden.growth)
    own: dict[str, Any] = {}
    if request.rates is not None:
        own["rates"] = request.rates
    elif audio or prompt.provider_tools:
        extras = msgspec.structs.replace(prompt.extras, audio_tokens=audio)
        own["rates"], tokens = find_extra_rates(terms, extras), extras.bound_input(tokens)
    if request.min_output_tokens > terms.base.min_output_tokens:
        own["min_output_tokens"] = request.min_output_tokens
    if hidden is not None:
        own["anonymized"] = hidden.counts
    attempt = msgspec.structs.replace(
        terms.base,
        request=name,
        purpose=request.purpose,
        spender=terms.spender,
        now=now,
        input_tokens=tokens,
        max_output_tokens=prompt.max_output_tokens,
        halts=terms.halts or context.halts,
        kept=terms.kept,
        optional=request.optional,
        body=record[0],
        blob=record[1],
        terms=terms.hold,
    )
    return msgspec.structs.replace(attempt, **own) if own else attempt


def find_extra_rates(terms: RequestTerms, extras: RequestExtras) -> ModelPrices | Unpriced:
    """What a request with sound, or with tools of the provider, costs."""
    rates = terms.base.rates
    if isinstance(rates, Unpriced):
        return rates
    covering = rates.covering(extras)
    return UnpricedFeature(terms.model.name, covering) if isinstance(covering, str) else covering


def hide_personal_data(context: SessionContext, prompt: Prompt, terms: RequestTerms) -> AnonymizedPrompt | None:
    """Hide personal data from a model, if the policy says so; one on this machine sees everything."""
    if context.anonymize is None or terms.local:
        return None
    return anonymize_prompt(prompt, context.anonymize.salt or context.session, context.anonymize.names)


def read_usage_report(left: object) -> UsageReport:
    """What a stopped request reported before its end."""
    if isinstance(left, Reply):
        return UsageReport(left.usage)
    return UsageReport(left.usage, final=left.final) if isinstance(left, ModelError) else UsageReport(None)


def _price_usage(flying: _RequestInFlight, report: UsageReport, result: ActualResult) -> ActualResult:
    """Price the usage. Without a plausible report nothing better than the hold is known."""
    usage = report.usage
    if usage is None or usage.input_tokens + usage.output_tokens > LARGEST_AMOUNT:
        return result
    if not report.final:
        # A cut-off answer counts as the longest possible: hidden reasoning is billed, and reported only at the end.
        limit = max(usage.output_tokens, flying.sent.max_output_tokens)
        usage = flying.request.prompt.extras.bound_usage(msgspec.structs.replace(usage, output_tokens=limit))
    rates = flying.rates
    usd = None if isinstance(rates, Unpriced) else rates.cost(usage, flying.began)
    return msgspec.structs.replace(result, usd=usd, tokens=usage.uncached, usage=usage)


def restore_request_outcome(
    settled: ev.RequestSettled, body: bytes, max_output_tokens: int
) -> AnsweredRequest | FailedRequest:
    charge = settled.charge or Charge()
    cost, tokens = charge.usd, charge.tokens
    if settled.outcome == "ok" and body:
        reply = msgspec.json.decode(body, type=Reply)
        return AnsweredRequest(settled.request, reply, cost, max_output_tokens, bool(charge.overruns), tokens)
    if settled.outcome == "ok":
        error = "Erased: what the model answered was erased"
        return FailedRequest(settled.request, "error", error, cost, tokens=tokens)
    may_retry = settled.may_retry or settled.outcome == "unknown"
    error = settled.error or OUTCOME_UNKNOWN
    return FailedRequest(
        settled.request, settled.outcome, error, cost, may_retry, settled.retry_after, tokens, settled.needs_person
    )


def read_request_refusal(committed: Committed) -> RefusedRequest | ev.GuardrailTriggered:
    cap: ev.CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case ev.CostCapReached() as reached:
                cap = reached
            case ev.GuardrailTriggered() as waits:
                return waits
            case ev.RequestRefused() as refused:
                return RefusedRequest(refused.request, refused.outcome, refused.sentence, cap)
            case _:
                pass
    raise AssertionError("A request was decided, and what was written says neither how nor when to ask again.")
