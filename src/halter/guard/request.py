"""The one door to a model.

    asking = everything that can be known without a lock     the model, its price, the tokens of what is sent
    admitted = one short transaction                         R5 halt -> R6 the model and its price -> R4 the hold
    reply = the model, with a permit and a deadline          no transaction open; a halt cancels it
    settled = one more transaction                           the answer and its true cost

A request that comes too late in a minute for the rate of its model waits for the next one, and whoever asks is told.

Nothing is tried twice here. Each attempt has an id and a hold of its own, and what it came to is a value that says
whether another attempt makes sense.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.clock import MINUTE, Clock
from halter.core.errors import ModelError, ModelUnavailable
from halter.core.events import (
    CostCapReached,
    GuardrailTriggered,
    OverrunIncurred,
    RequestRefused,
    RequestSettled,
    RequestStarted,
)
from halter.core.here import stays_here
from halter.core.ids import StreamId, session_stream
from halter.core.limits import accounts
from halter.core.messages import Hear, Model, Prompt, Reply
from halter.core.money import Charge, believable
from halter.core.ports import Committed, Lease, Store, Write, kept, said
from halter.core.rates import paces_of
from halter.core.text import to_body
from halter.core.tools import Permit
from halter.core.usage import PriceTable, Rates, Unpriced, Usage
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.anonymize import Anonymized, anonymized
from halter.guard.ask import Standing
from halter.guard.flight import ERROR_KEPT, Halted, RateUsedUp, Redact, StillHeld, outcome_of, to_its_end, unless_halted
from halter.guard.halts import HaltWatch
from halter.guard.mask import Masks, masked, masked_reply
from halter.guard.purse import Purse, Truth, charged
from halter.guard.rehydrate import rehydrated_reply
from halter.guard.voice import HeldBack, Listen, Rehydrated, StreamMask, Voice
from halter.guard.weigh import Asking, rows_of, weigh
from halter.state.session import InFlight, request_in_flight

TIMEOUT: Final = 10 * MINUTE
UNANSWERED: Final = "Nobody knows whether the model answered."

_NO_SECRETS: Final = MappingProxyType[str, str]({})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One model invocation as it is asked for.

    One that is `optional` can be done without: it does not wait for money, and no session ends because of its refusal.
    `record` is what the journal keeps of it, where the rest of the prompt stands there already. `input_tokens` bounds
    what is sent, where that is known better than by its length. `listen` is told the answer as it comes; one that
    `discards` takes back what an earlier attempt said. With a `nonce`, the answer may hold calls that are written as
    text. If whoever asks `goes_on` with the session at once, and tells nobody before, what the request came to may be
    written down with what follows.
    """

    id: str
    prompt: Prompt
    purpose: Purpose = "turn"
    timeout: int = TIMEOUT
    optional: bool = False
    record: str | None = None
    input_tokens: int | None = None
    listen: Listen | None = None
    discards: bool = False
    nonce: str = ""
    goes_on: bool = False


class Answered(msgspec.Struct, frozen=True):
    """The model answered. `max_output_tokens` is the most that it was allowed to write."""

    request: str
    reply: Reply
    cost_usd: int = 0
    max_output_tokens: int = 0
    overrun: bool = False
    tokens: int = 0


class RefusedRequest(msgspec.Struct, frozen=True):
    """A brake refused the request, and the refusal is recorded. After a change, the next attempt may pass."""

    request: str
    outcome: Outcome
    sentence: str
    cap: CostCapReached | None = None


class FailedRequest(msgspec.Struct, frozen=True):
    """The model was asked and gave no answer. `retry_after` is what the provider asks to wait, in microseconds."""

    request: str
    outcome: Outcome
    error: str
    cost_usd: int = 0
    may_retry: bool = False
    retry_after: int | None = None
    tokens: int = 0


RequestOutcome = Answered | RefusedRequest | StillHeld | RateUsedUp | FailedRequest


class Admitted(msgspec.Struct, frozen=True):
    """The intent is committed and its money is held: the model may be asked now."""

    flight: InFlight
    max_output_tokens: int


class _Flying(msgspec.Struct, frozen=True):
    """A request on its way, and what it takes to settle it: its price, and what its placeholders stand for."""

    lease: Lease
    admitted: Admitted
    rates: Rates | Unpriced
    began: int
    permit: Permit
    values: Mapping[str, str]
    nonce: str
    goes_on: bool


class Report(msgspec.Struct, frozen=True):
    """What a provider said was used. Unless it is final, only its input is known: the answer may have gone on."""

    usage: Usage | None
    final: bool = True


class ModelDoor:
    """Guards every request of the sessions of one process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        purse: Purse,
        prices: PriceTable,
        *,
        redact: Redact,
        stream_mask: Callable[[], StreamMask] | None = None,
        halts: HaltWatch | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._purse = purse
        self._prices = prices
        self._stream_mask = stream_mask or partial(HeldBack, redact)
        self._redact = redact
        self._masks = Masks(redact)
        self._patience = purse.patience
        self._halts = halts or HaltWatch(store, clock)

    async def guarded_request(
        self, lease: Lease, standing: Standing, request: Request, model: Model, attempt: int = 0, waited: int = 0
    ) -> RequestOutcome:
        """Let a request through, or refuse it; whatever happens is in the journal when this returns."""
        prompt = self._masks.prompt(lease, request.prompt)
        hidden = hiding(standing, prompt, model)
        asking = await self._asking(standing, request, prompt, hidden, model, attempt)
        admitted = await self._admit(lease, asking, waited)
        if not isinstance(admitted, Admitted):
            return admitted
        began, goes_on = self._clock.now(), request.goes_on
        permit = Permit(admitted.flight.id, began + request.timeout, _NO_SECRETS)
        flying = _Flying(lease, admitted, asking.rates, began, permit, hidden.values, request.nonce, goes_on)
        sent = msgspec.structs.replace(hidden.prompt, max_output_tokens=admitted.max_output_tokens)
        return await self._spoken(flying, request, lambda hear: model.ask(sent, permit, hear), asking.scopes)

    async def _spoken(
        self,
        flying: _Flying,
        request: Request,
        ask: Callable[[Hear | None], Coroutine[Any, Any, Reply]],
        scopes: tuple[str, ...],
    ) -> Answered | FailedRequest:
        """Wait for the answer, and let whoever listens have its words as they come; they are always told its end."""
        if request.listen is None:
            return await self._answer(flying, asyncio.create_task(ask(None)), scopes, request.timeout)
        mask = Rehydrated(self._stream_mask(), flying.values) if flying.values else self._stream_mask()
        voice = Voice(flying.admitted.flight.id, request.listen, mask, discards=request.discards)
        whole = False
        try:
            answer = await self._answer(flying, asyncio.create_task(ask(voice.hear)), scopes, request.timeout)
            whole = isinstance(answer, Answered)
            return answer
        finally:
            voice.finish(whole=whole)

    async def _asking(
        self, standing: Standing, request: Request, prompt: Prompt, hidden: Anonymized, model: Model, attempt: int
    ) -> Asking:
        """Look at a request from all sides, and put away what it says, which is more than what it sends."""
        policy = standing.policy
        record = msgspec.json.encode(prompt) if request.record is None else to_body(self._redact(request.record))
        body, blob = await kept(self._store, record)
        return Asking(
            request=f"{request.id}/{attempt}",
            model=str(model.name),
            purpose=request.purpose,
            spender=standing.spender(),
            caps=standing.caps(),
            now=self._clock.now(),
            rates=self._prices.find(model.name, model.base_url),
            input_tokens=bound_of(request, hidden, model),
            max_output_tokens=prompt.max_output_tokens,
            min_output_tokens=policy.min_output_tokens,
            scopes=standing.scopes(),
            kept=standing.kept(),
            flaw=flaw_of(standing, str(model.name)),
            optional=request.optional,
            observe=policy.observe,
            body=body,
            blob=blob,
            anonymized=hidden.counts,
            paces=paces_of(standing.rates, str(model.name)),
        )

    async def _admit(self, lease: Lease, asking: Asking, waited: int) -> Admitted | RequestOutcome:
        """Decide in one short transaction, again and again while other holds are in the way.

        Each wait for a rate leads to a decision of its own, and is read over again by whoever goes on after a crash.
        """
        stream, now_asking = session_stream(lease.session), asking

        def intent(now: int) -> Write:
            nonlocal now_asking
            now_asking = asking.at(now)
            key = f"{asking.request}/asked" + (f"/{waited}" if waited else "")
            return Write(stream, key, partial(weigh, now_asking), rows_of(now_asking), lease)

        while True:
            committed = await self._purse.commit_intent(intent, 0 if asking.optional else self._patience)
            if committed is None:
                return StillHeld(asking.request)
            answer = admission(committed)
            if isinstance(answer, GuardrailTriggered):
                until = answer.until or 0
                if not committed.repeated or until > self._clock.now():
                    return RateUsedUp(asking.request, until, waited)
                waited += 1
                continue
            if isinstance(answer, Admitted):
                before = await self._settled_before(stream, answer, committed, lease) if committed.repeated else None
                return before or _with_accounts(answer, now_asking)
            return answer

    async def _settled_before(
        self, stream: StreamId, admitted: Admitted, committed: Committed, lease: Lease
    ) -> Answered | FailedRequest | None:
        """Find what became of a request that was made before: a paid answer is kept, and nobody is asked twice."""
        stored = await outcome_of(self._store, stream, admitted.flight)
        if stored is not None and isinstance(stored.event, RequestSettled):
            return told(stored.event, await said(self._store, stored), admitted.max_output_tokens)
        if any(event.generation != lease.generation for event in committed.events):
            error = "An earlier owner of this session began it; nobody knows how it went."
            return FailedRequest(admitted.flight.id, "unknown", error, may_retry=True)
        return None

    async def _answer(
        self, flying: _Flying, acting: asyncio.Future[Reply], scopes: tuple[str, ...], allowed: int
    ) -> Answered | FailedRequest:
        """Wait for the model and settle what it came to: also when it was halted, timed out or cancelled."""
        try:
            reply = await unless_halted(self._halts, scopes, acting, allowed)
        except asyncio.CancelledError:
            stopped = self._cut(flying, acting, "cancelled", "CancelledError: the session was cancelled")
            await to_its_end(self._failed(flying, stopped))
            raise
        except TimeoutError:
            late = f"TimeoutError: {flying.admitted.flight.name} took longer than it may"
            truth = msgspec.structs.replace(self._cut(flying, acting, "timeout", late), may_retry=True)
            return await self._failed(flying, truth)
        except Halted as word:
            return await self._failed(flying, self._cut(flying, acting, "external_halt", str(word)))
        except ModelError as error:
            return await self._failed(flying, self._refused(flying, error))
        meant = rehydrated_reply(believed(reply), flying.values, flying.nonce)
        return await self._answered(flying, masked_reply(meant, self._redact))

    async def _answered(self, flying: _Flying, reply: Reply) -> Answered:
        truth = _cost(flying, Report(reply.usage), Truth("ok", body=msgspec.json.encode(reply)))
        flight = flying.admitted.flight
        settled = await self._purse.settle(flying.lease, flight, truth, goes_on=flying.goes_on)
        overrun = any(isinstance(stored.event, OverrunIncurred) for stored in settled.events)
        usd, tokens = charged(flight, truth)
        return Answered(flight.id, reply, usd, flying.admitted.max_output_tokens, overrun, tokens)

    async def _failed(self, flying: _Flying, truth: Truth) -> FailedRequest:
        flight = flying.admitted.flight
        await self._purse.settle(flying.lease, flight, truth)
        usd, tokens = charged(flight, truth)
        return FailedRequest(flight.id, truth.outcome, truth.error, usd, truth.may_retry, truth.retry_after, tokens)

    def _cut(self, flying: _Flying, acting: asyncio.Future[Reply], outcome: Outcome, error: str) -> Truth:
        """Tell what a request came to that was stopped: nothing if it was never sent, or else at most its hold."""
        truth = Truth(outcome, error=masked(error, self._redact)[:ERROR_KEPT])
        if flying.permit.unsent:
            return msgspec.structs.replace(truth, usd=0, tokens=0)
        return _cost(flying, reported(acting), truth)

    def _refused(self, flying: _Flying, error: ModelError) -> Truth:
        """Tell what a failure cost: nothing where nobody was charged."""
        truth = Truth(
            "error",
            error=masked(str(error), self._redact)[:ERROR_KEPT],
            may_retry=isinstance(error, ModelUnavailable),
            retry_after=error.retry_after,
        )
        if not error.billed:
            return msgspec.structs.replace(truth, usd=0, tokens=0)
        return _cost(flying, Report(error.usage, final=error.final), truth)


def hiding(standing: Standing, prompt: Prompt, model: Model) -> Anonymized:
    """Take out of a prompt what its model is not told; one on this machine is told everything."""
    if standing.anonymize is None or stays_here(model.name, model.base_url):
        return Anonymized(prompt, {}, {})
    return anonymized(prompt, standing.anonymize.salt or standing.session, standing.anonymize.names)


def bound_of(request: Request, hidden: Anonymized, model: Model) -> int:
    """Bound the tokens of what is sent: placeholders may be longer than what they stand for."""
    return model.count(hidden.prompt) if request.input_tokens is None else request.input_tokens + hidden.growth


def flaw_of(standing: Standing, model: str) -> tuple[Outcome, str] | None:
    """R6 for the model itself: the policy allows it."""
    policy = standing.policy
    if policy.allows_model(model):
        return None
    allowed = ", ".join(policy.allowed_models or ()) or "none"
    sentence = f"{model} may not be asked by {standing.agent}: `allowed_models` has {allowed}."
    return ("disabled", sentence)


def reported(acting: asyncio.Future[Reply]) -> Report:
    """Tell what a request that was stopped had reported by then."""
    if not acting.done() or acting.cancelled():
        return Report(None)
    failure = acting.exception()
    if failure is None:
        return Report(acting.result().usage)
    return Report(failure.usage, final=failure.final) if isinstance(failure, ModelError) else Report(None)


def believed(reply: Reply) -> Reply:
    """Leave a report out that counts more tokens than anybody could: no store could keep it."""
    return reply if _sane(reply.usage) else msgspec.structs.replace(reply, usage=None)


def _sane(usage: Usage | None) -> bool:
    return usage is not None and believable(usage.input_tokens + usage.output_tokens)


def _cost(flying: _Flying, report: Report, truth: Truth) -> Truth:
    """Price what was used. Without a report, or with one that nobody can believe, nothing truer is known."""
    usage = report.usage
    if usage is None or not _sane(usage):
        return truth
    if not report.final:
        usage = _at_its_longest(usage, flying.admitted.max_output_tokens)
    rates = flying.rates
    usd = None if isinstance(rates, Unpriced) else rates.cost(usage, flying.began)
    return msgspec.structs.replace(truth, usd=usd, tokens=usage.uncached, usage=usage)


def _at_its_longest(usage: Usage, max_output_tokens: int) -> Usage:
    """Count an answer that was cut off as the longest one: hidden reasoning is billed, and reported only at the end."""
    return msgspec.structs.replace(usage, output_tokens=max(usage.output_tokens, max_output_tokens))


def _with_accounts(admitted: Admitted, asking: Asking) -> Admitted:
    where = accounts(asking.caps, asking.spender, asking.now)
    return msgspec.structs.replace(admitted, flight=msgspec.structs.replace(admitted.flight, accounts=where))


def told(settled: RequestSettled, body: bytes, max_output_tokens: int) -> Answered | FailedRequest:
    """Tell once more what became of a request."""
    charge = settled.charge or Charge()
    cost, tokens = charge.usd, charge.tokens
    if settled.outcome == "ok" and body:
        reply = msgspec.json.decode(body, type=Reply)
        return Answered(settled.request, reply, cost, max_output_tokens, bool(charge.overruns), tokens)
    if settled.outcome == "ok":
        error = "Erased: what the model answered was erased"
        return FailedRequest(settled.request, "error", error, cost, tokens=tokens)
    may_retry = settled.may_retry or settled.outcome == "unknown"
    error = settled.error or UNANSWERED
    return FailedRequest(settled.request, settled.outcome, error, cost, may_retry, settled.retry_after, tokens)


def admission(committed: Committed) -> Admitted | RefusedRequest | GuardrailTriggered:
    """Read the decision off what was written."""
    cap: CostCapReached | None = None
    for stored in committed.events:
        match stored.event:
            case RequestStarted() as started:
                return Admitted(request_in_flight(started, stored), started.max_output_tokens)
            case CostCapReached() as reached:
                cap = reached
            case GuardrailTriggered() as waits:
                return waits
            case RequestRefused() as refused:
                return RefusedRequest(refused.request, refused.outcome, refused.sentence, cap)
            case _:
                pass
    raise AssertionError("A request was decided, and what was written says neither how nor when to ask again.")
