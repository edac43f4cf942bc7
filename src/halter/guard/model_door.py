"""The one door to a model.

    attempt = everything known without a lock        the model, its price, the tokens of the prompt
    admitted = one short transaction                 R5 halt -> R6 the model and its price -> R4 the hold
    reply = the model, with a permit and a deadline  no transaction open; a halt cancels it
    settled = one more transaction                   the answer and its true cost

A request beyond the rate of its model waits for the next minute. Nothing is retried here: each attempt has its own id
and hold, and its outcome is a value that says whether another attempt makes sense.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

import msgspec

from halter.core import events as ev
from halter.core.clock import MINUTE, Clock
from halter.core.errors import ModelError, ModelUnavailable
from halter.core.ids import StreamId, session_stream
from halter.core.messages import Model, Prompt, Reply, StreamChunk, TextListener
from halter.core.money import Charge, find_rate_limits, is_plausible_amount, list_accounts
from halter.core.ports import Committed, Lease, Store, Write, offload_body, read_body
from halter.core.text import to_body
from halter.core.tools import Permit
from halter.core.usage import ModelPrices, PriceTable, Unpriced, Usage, runs_locally
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.halts import (
    LONGEST_ERROR,
    Halted,
    HaltWatch,
    RateUsedUp,
    StillHeld,
    find_outcome,
    run_shielded,
    wait_unless_halted,
)
from halter.guard.judge_request import RequestAttempt, judge_attempt, list_request_rows
from halter.guard.ledger import ActualResult, Ledger, compute_charged_amounts
from halter.guard.prepare import SessionContext
from halter.redaction.anonymize import AnonymizedPrompt, StreamRehydrator, anonymize_prompt, rehydrate_reply
from halter.redaction.redact import PromptMasker, Redact, mask_reply, mask_text
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
        self._listen: ChunkListener | None = listen
        self._mask = mask
        if discards:
            self._tell(StreamChunk(request, discard=True))

    def hear(self, text: str) -> None:
        self._say(self._mask.feed(text))

    def finish(self, *, whole: bool) -> None:
        """End the stream. Text held back from a failed answer is dropped: the answer will be discarded."""
        if whole:
            self._say(self._mask.finish())
        self._tell(StreamChunk(self._request, finished=True))
        self._listen = None

    def _say(self, text: str) -> None:
        if text:
            self._tell(StreamChunk(self._request, text))

    def _tell(self, chunk: StreamChunk) -> None:
        if self._listen is None:
            return
        try:
            self._listen(chunk)
        except Exception:  # noqa: BLE001 It is a stranger's code, and what it shows is no part of the work.
            self._listen = None


MODEL_REQUEST_TIMEOUT: Final = 10 * MINUTE
OUTCOME_UNKNOWN: Final = "It is unknown whether the model answered."

_NO_SECRETS: Final = MappingProxyType[str, str]({})


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model request.

    An `optional` one does not wait for money, and its refusal ends no session. `record` is what the journal stores,
    where the rest of the prompt is there already. `input_tokens` is a tighter bound than the prompt's length. `listen`
    receives the answer as it streams; `discards` withdraws the text of an earlier attempt. With a `nonce`, the answer
    may hold calls written as text. With `goes_on` the caller continues the session at once, so the outcome may be
    written with what follows.
    """

    id: str
    prompt: Prompt
    purpose: Purpose = "turn"
    timeout: int = MODEL_REQUEST_TIMEOUT
    optional: bool = False
    record: str | None = None
    input_tokens: int | None = None
    listen: ChunkListener | None = None
    discards: bool = False
    nonce: str = ""
    goes_on: bool = False


class AnsweredRequest(msgspec.Struct, frozen=True):
    request: str
    reply: Reply
    cost_usd: int = 0
    max_output_tokens: int = 0
    overrun: bool = False
    tokens: int = 0


class RefusedRequest(msgspec.Struct, frozen=True):
    """A brake refused the request, and the refusal is recorded."""

    request: str
    outcome: Outcome
    sentence: str
    cap: ev.CostCapReached | None = None


class FailedRequest(msgspec.Struct, frozen=True):
    """The model gave no answer. `retry_after` is the provider's requested wait, in microseconds."""

    request: str
    outcome: Outcome
    error: str
    cost_usd: int = 0
    may_retry: bool = False
    retry_after: int | None = None
    tokens: int = 0


RequestOutcome = AnsweredRequest | RefusedRequest | StillHeld | RateUsedUp | FailedRequest


class AdmittedRequest(msgspec.Struct, frozen=True):
    """The intent is committed and its money is held."""

    flight: InFlight
    max_output_tokens: int


class _RequestInFlight(msgspec.Struct, frozen=True):
    """A request in flight, with its price and the values of its placeholders."""

    lease: Lease
    admitted: AdmittedRequest
    rates: ModelPrices | Unpriced
    began: int
    permit: Permit
    values: Mapping[str, str]
    nonce: str
    goes_on: bool


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
        self._patience = ledger.patience
        self._halts = halts or HaltWatch(store, clock)

    async def guarded_request(
        self,
        lease: Lease,
        standing: SessionContext,
        request: ModelRequest,
        model: Model,
        attempt: int = 0,
        waited: int = 0,
    ) -> RequestOutcome:
        """Admit a request or refuse it; the outcome is in the journal when this returns."""
        prompt = self._masks.prompt(lease, request.prompt)
        hidden = anonymize_for_model(standing, prompt, model)
        asking = await self._asking(standing, request, prompt, hidden, model, attempt)
        admitted = await self._admit(lease, asking, waited)
        if not isinstance(admitted, AdmittedRequest):
            return admitted
        began, goes_on = self._clock.now(), request.goes_on
        permit = Permit(admitted.flight.id, began + request.timeout, _NO_SECRETS)
        flying = _RequestInFlight(lease, admitted, asking.rates, began, permit, hidden.values, request.nonce, goes_on)
        sent = msgspec.structs.replace(hidden.prompt, max_output_tokens=admitted.max_output_tokens)
        return await self._spoken(flying, request, lambda hear: model.ask(sent, permit, hear), asking.scopes)

    async def _spoken(
        self,
        flying: _RequestInFlight,
        request: ModelRequest,
        ask: Callable[[TextListener | None], Coroutine[Any, Any, Reply]],
        scopes: tuple[str, ...],
    ) -> AnsweredRequest | FailedRequest:
        """Wait for the answer and stream it to the listener, who always receives its end."""
        if request.listen is None:
            return await self._answer(flying, asyncio.create_task(ask(None)), scopes, request.timeout)
        mask = RehydratingMask(self._stream_mask(), flying.values) if flying.values else self._stream_mask()
        voice = AnswerStream(flying.admitted.flight.id, request.listen, mask, discards=request.discards)
        whole = False
        try:
            answer = await self._answer(flying, asyncio.create_task(ask(voice.hear)), scopes, request.timeout)
            whole = isinstance(answer, AnsweredRequest)
            return answer
        finally:
            voice.finish(whole=whole)

    async def _asking(
        self,
        standing: SessionContext,
        request: ModelRequest,
        prompt: Prompt,
        hidden: AnonymizedPrompt,
        model: Model,
        attempt: int,
    ) -> RequestAttempt:
        """Collect what the judge needs; the full prompt is recorded, not only what is sent."""
        policy = standing.policy
        record = msgspec.json.encode(prompt) if request.record is None else to_body(self._redact(request.record))
        body, blob = await offload_body(self._store, record)
        return RequestAttempt(
            request=f"{request.id}/{attempt}",
            model=str(model.name),
            purpose=request.purpose,
            spender=standing.spender,
            caps=standing.caps,
            now=self._clock.now(),
            rates=self._prices.find(model.name, model.base_url),
            # Placeholders may be longer than their values.
            input_tokens=(
                model.count(hidden.prompt) if request.input_tokens is None else request.input_tokens + hidden.growth
            ),
            max_output_tokens=prompt.max_output_tokens,
            min_output_tokens=policy.min_output_tokens,
            scopes=standing.scopes,
            kept=standing.kept,
            flaw=find_model_flaw(standing, str(model.name)),
            optional=request.optional,
            observe=policy.observe,
            body=body,
            blob=blob,
            anonymized=hidden.counts,
            paces=find_rate_limits(standing.rates, str(model.name)),
        )

    async def _admit(self, lease: Lease, asking: RequestAttempt, waited: int) -> AdmittedRequest | RequestOutcome:
        """Decide in one short transaction, again while other holds are in the way.

        Each wait for a rate is a decision of its own, which is read again after a crash.
        """
        stream, now_asking = session_stream(lease.session), asking

        def intent(now: int) -> Write:
            nonlocal now_asking
            now_asking = asking.at(now)
            key = f"{asking.request}/asked" + (f"/{waited}" if waited else "")
            return Write(stream, key, partial(judge_attempt, now_asking), list_request_rows(now_asking), lease)

        while True:
            committed = await self._ledger.commit_intent(intent, 0 if asking.optional else self._patience)
            if committed is None:
                return StillHeld(asking.request)
            answer = read_request_admission(committed)
            if isinstance(answer, ev.GuardrailTriggered):
                until = answer.until or 0
                if not committed.repeated or until > self._clock.now():
                    return RateUsedUp(asking.request, until, waited)
                waited += 1
                continue
            if isinstance(answer, AdmittedRequest):
                before = await self._settled_before(stream, answer, committed, lease) if committed.repeated else None
                return before or _with_accounts(answer, now_asking)
            return answer

    async def _settled_before(
        self, stream: StreamId, admitted: AdmittedRequest, committed: Committed, lease: Lease
    ) -> AnsweredRequest | FailedRequest | None:
        """The outcome of an earlier identical request: a paid answer is kept, and no model is asked twice."""
        stored = await find_outcome(self._store, stream, admitted.flight)
        if stored is not None and isinstance(stored.event, ev.RequestSettled):
            return restore_request_outcome(
                stored.event, await read_body(self._store, stored), admitted.max_output_tokens
            )
        if any(event.generation != lease.generation for event in committed.events):
            error = "An earlier owner of this session began it; its outcome is unknown."
            return FailedRequest(admitted.flight.id, "unknown", error, may_retry=True)
        return None

    async def _answer(
        self, flying: _RequestInFlight, acting: asyncio.Future[Reply], scopes: tuple[str, ...], allowed: int
    ) -> AnsweredRequest | FailedRequest:
        """Wait for the model and settle, also when halted, timed out or cancelled."""
        try:
            reply = await wait_unless_halted(self._halts, scopes, acting, allowed)
        except asyncio.CancelledError:
            stopped = self._cut(flying, acting, "cancelled", "CancelledError: the session was cancelled")
            await run_shielded(self._failed(flying, stopped))
            raise
        except TimeoutError:
            late = f"TimeoutError: {flying.admitted.flight.name} took longer than it may"
            truth = msgspec.structs.replace(self._cut(flying, acting, "timeout", late), may_retry=True)
            return await self._failed(flying, truth)
        except Halted as word:
            return await self._failed(flying, self._cut(flying, acting, "external_halt", str(word)))
        except ModelError as error:
            return await self._failed(flying, self._refused(flying, error))
        if not _is_plausible_usage(reply.usage):
            # No store could keep such a report.
            reply = msgspec.structs.replace(reply, usage=None)
        meant = rehydrate_reply(reply, flying.values, flying.nonce)
        return await self._answered(flying, mask_reply(meant, self._redact))

    async def _answered(self, flying: _RequestInFlight, reply: Reply) -> AnsweredRequest:
        truth = _price_usage(flying, UsageReport(reply.usage), ActualResult("ok", body=msgspec.json.encode(reply)))
        flight = flying.admitted.flight
        settled = await self._ledger.settle(flying.lease, flight, truth, goes_on=flying.goes_on)
        overrun = any(isinstance(stored.event, ev.OverrunIncurred) for stored in settled.events)
        usd, tokens = compute_charged_amounts(flight, truth)
        return AnsweredRequest(flight.id, reply, usd, flying.admitted.max_output_tokens, overrun, tokens)

    async def _failed(self, flying: _RequestInFlight, truth: ActualResult) -> FailedRequest:
        flight = flying.admitted.flight
        await self._ledger.settle(flying.lease, flight, truth)
        usd, tokens = compute_charged_amounts(flight, truth)
        return FailedRequest(flight.id, truth.outcome, truth.error, usd, truth.may_retry, truth.retry_after, tokens)

    def _cut(
        self, flying: _RequestInFlight, acting: asyncio.Future[Reply], outcome: Outcome, error: str
    ) -> ActualResult:
        """A stopped request costs nothing if it was never sent, otherwise at most its hold."""
        truth = ActualResult(outcome, error=mask_text(error, self._redact)[:LONGEST_ERROR])
        if flying.permit.unsent:
            return msgspec.structs.replace(truth, usd=0, tokens=0)
        return _price_usage(flying, read_usage_report(acting), truth)

    def _refused(self, flying: _RequestInFlight, error: ModelError) -> ActualResult:
        truth = ActualResult(
            "error",
            error=mask_text(str(error), self._redact)[:LONGEST_ERROR],
            may_retry=isinstance(error, ModelUnavailable),
            retry_after=error.retry_after,
        )
        if not error.billed:
            return msgspec.structs.replace(truth, usd=0, tokens=0)
        return _price_usage(flying, UsageReport(error.usage, final=error.final), truth)


def anonymize_for_model(standing: SessionContext, prompt: Prompt, model: Model) -> AnonymizedPrompt:
    """Hide personal data from a model; one on this machine sees everything."""
    if standing.anonymize is None or runs_locally(model.name, model.base_url):
        return AnonymizedPrompt(prompt, {}, {})
    return anonymize_prompt(prompt, standing.anonymize.salt or standing.session, standing.anonymize.names)


def find_model_flaw(standing: SessionContext, model: str) -> tuple[Outcome, str] | None:
    policy = standing.policy
    if policy.allows_model(model):
        return None
    allowed = ", ".join(policy.allowed_models or ()) or "none"
    sentence = f"{model} may not be asked by {standing.agent}: `allowed_models` has {allowed}."
    return ("disabled", sentence)


def read_usage_report(acting: asyncio.Future[Reply]) -> UsageReport:
    if not acting.done() or acting.cancelled():
        return UsageReport(None)
    failure = acting.exception()
    if failure is None:
        return UsageReport(acting.result().usage)
    return UsageReport(failure.usage, final=failure.final) if isinstance(failure, ModelError) else UsageReport(None)


def _is_plausible_usage(usage: Usage | None) -> bool:
    return usage is not None and is_plausible_amount(usage.input_tokens + usage.output_tokens)


def _price_usage(flying: _RequestInFlight, report: UsageReport, truth: ActualResult) -> ActualResult:
    """Price the usage. Without a plausible report nothing better than the hold is known."""
    usage = report.usage
    if usage is None or not _is_plausible_usage(usage):
        return truth
    if not report.final:
        # A cut-off answer counts as the longest possible: hidden reasoning is billed, and reported only at the end.
        most = max(usage.output_tokens, flying.admitted.max_output_tokens)
        usage = msgspec.structs.replace(usage, output_tokens=most)
    rates = flying.rates
    usd = None if isinstance(rates, Unpriced) else rates.cost(usage, flying.began)
    return msgspec.structs.replace(truth, usd=usd, tokens=usage.uncached, usage=usage)


def _with_accounts(admitted: AdmittedRequest, asking: RequestAttempt) -> AdmittedRequest:
    where = list_accounts(asking.caps, asking.spender, asking.now)
    return msgspec.structs.replace(admitted, flight=msgspec.structs.replace(admitted.flight, accounts=where))


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
    return FailedRequest(settled.request, settled.outcome, error, cost, may_retry, settled.retry_after, tokens)


def read_request_admission(committed: Committed) -> AdmittedRequest | RefusedRequest | ev.GuardrailTriggered:
    cap: ev.CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case ev.RequestStarted() as started:
                return AdmittedRequest(track_request(started, stored), started.max_output_tokens)
            case ev.CostCapReached() as reached:
                cap = reached
            case ev.GuardrailTriggered() as waits:
                return waits
            case ev.RequestRefused() as refused:
                return RefusedRequest(refused.request, refused.outcome, refused.sentence, cap)
            case _:
                pass
    raise AssertionError("A request was decided, and what was written says neither how nor when to ask again.")
