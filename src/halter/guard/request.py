"""One model request, and how it ends: answered, refused, failed, or told to wait."""

from typing import Final

import msgspec

from halter.core.clock import MINUTE
from halter.core.events import CostCapReached, GuardrailTriggered, RequestRefused, RequestSettled
from halter.core.messages import Prompt, Reply
from halter.core.money import Charge
from halter.core.ports import Committed
from halter.core.usage import ModelPrices, Unpriced
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.halts import BudgetBusy, RateLimited
from halter.redaction.answer_stream import ChunkListener

MODEL_REQUEST_TIMEOUT: Final = 10 * MINUTE
OUTCOME_UNKNOWN: Final = "It is unknown whether the model answered."


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
