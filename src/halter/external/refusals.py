"""Refusals in the form that each client obeys.

Every client was tested with every status. A client that must stop gets a status that it does not retry; a client that
may retry gets the delay. A stream is never just closed, because clients treat a clean end as a complete answer.

    reason       Anthropic's dialect                       OpenAI's dialects
    cap          402 billing_error, terminal               400 halter_cap_reached, terminal
    halted       429 rate_limit_error, terminal            400 halter_halted, terminal
    refused      429 rate_limit_error, terminal            400 halter_refused, terminal
    unpriced     400 invalid_request_error, terminal       400 halter_unpriced, terminal
    wait         429 rate_limit_error with retry-after     the same
    unknown_key  401, terminal                             the same
    in a stream  an `error` event: billing_error           an `error` chunk; `response.failed` with invalid_prompt

LiteLLM, which aider and OpenHands use, retries after 402 and 429, and recognises the kind of an error in a stream only
by words in its message. It gets 400 in every dialect, and those words.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from halter.core.clock import SECOND
from halter.core.usage import ModelPrices, Unpriced
from halter.external.dialect import DialectName
from halter.guard.halts import BudgetBusy, RateLimited
from halter.guard.request import AnsweredRequest, FailedRequest, RefusedRequest, RequestOutcome

Reason = Literal[
    "cap",
    "halted",
    "refused",
    "unpriced",
    "wait",
    "unknown_key",
    "unreadable",
    "too_large",
    "not_found",
    "provider_failed",
    "store_away",
]

MAX_RETRY_AFTER: Final = 30
"""Seconds. Clients sleep as long as the header says, some for weeks."""

Headers = list[tuple[bytes, bytes]]
_ENCODE: Final = msgspec.json.Encoder().encode
_ANTHROPIC: Final[Mapping[Reason, tuple[int, str]]] = MappingProxyType(
    {
        "cap": (402, "billing_error"),
        "halted": (429, "rate_limit_error"),
        "refused": (429, "rate_limit_error"),
        "unpriced": (400, "invalid_request_error"),
        "wait": (429, "rate_limit_error"),
        "unknown_key": (401, "authentication_error"),
        "unreadable": (400, "invalid_request_error"),
        "too_large": (413, "request_too_large"),
        "not_found": (404, "not_found_error"),
        "provider_failed": (502, "api_error"),
        "store_away": (529, "overloaded_error"),
    }
)
_OPENAI: Final[Mapping[Reason, tuple[int, str, str]]] = MappingProxyType(
    {
        "cap": (400, "invalid_request_error", "halter_cap_reached"),
        "halted": (400, "invalid_request_error", "halter_halted"),
        "refused": (400, "invalid_request_error", "halter_refused"),
        "unpriced": (400, "invalid_request_error", "halter_unpriced"),
        "wait": (429, "rate_limit_error", "halter_wait"),
        "unknown_key": (401, "invalid_request_error", "invalid_api_key"),
        "unreadable": (400, "invalid_request_error", "invalid_request"),
        "too_large": (413, "invalid_request_error", "request_too_large"),
        "not_found": (404, "invalid_request_error", "not_found"),
        "provider_failed": (502, "server_error", "provider_failed"),
        "store_away": (503, "server_error", "store_away"),
    }
)
TERMINAL: Final[frozenset[Reason]] = frozenset(
    ("cap", "halted", "refused", "unpriced", "unknown_key", "unreadable", "too_large", "not_found")
)
"""The reasons after which the client must not retry."""


_LITELLM_FINAL_MESSAGES: Final = "Client error '400 Bad Request'"
_LITELLM_FINAL_CHAT: Final = "invalid_request_error"
"""Words in the message of an error in a stream that LiteLLM treats as final."""


class Refusal(msgspec.Struct, frozen=True):
    """The reason why a request has no answer, with a sentence for the person at the client."""

    reason: Reason
    sentence: str
    wait: int = 0


def asks_by_litellm(headers: Headers) -> bool:
    return any(name == b"user-agent" and value.startswith(b"litellm/") for name, value in headers)


def render_refusal(dialect: DialectName, refusal: Refusal, *, by_litellm: bool = False) -> tuple[int, Headers, bytes]:
    """Render the status, the headers and the body of a refusal."""
    body: object
    if dialect == "messages":
        stops = by_litellm and refusal.reason in TERMINAL
        status, kind = _ANTHROPIC["unreadable" if stops else refusal.reason]
        body = {"type": "error", "error": {"type": kind, "message": refusal.sentence}}
    else:
        status, kind, code = _OPENAI[refusal.reason]
        body = {"error": {"message": refusal.sentence, "type": kind, "code": code, "param": None}}
    data = _ENCODE(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    if refusal.reason in TERMINAL:
        headers.append((b"x-should-retry", b"false"))
    elif refusal.reason == "wait":
        headers.append((b"retry-after", b"%d" % max(1, min(refusal.wait, MAX_RETRY_AFTER))))
    return status, headers, data


def render_in_stream(
    dialect: DialectName, refusal: Refusal, event_count: int = 0, *, by_litellm: bool = False
) -> bytes:
    """Render the event that ends a started stream."""
    stops = refusal.reason in TERMINAL
    match dialect:
        case "messages":
            kind = "billing_error" if stops else _ANTHROPIC[refusal.reason][1]
            suffix = f" ({_LITELLM_FINAL_MESSAGES})" if stops and by_litellm else ""
            error = {"type": "error", "error": {"type": kind, "message": refusal.sentence + suffix}}
            return b"event: error\ndata: %s\n\n" % _ENCODE(error)
        case "chat":
            # Here LiteLLM uses OpenAI's SDK, and cannot be distinguished from other programs.
            _, kind, code = _OPENAI[refusal.reason]
            suffix = f" ({_LITELLM_FINAL_CHAT})" if stops else ""
            chunk = {"error": {"message": refusal.sentence + suffix, "type": kind, "code": code, "param": None}}
            return b"data: %s\n\n" % _ENCODE(chunk)
        case "responses":
            # Of all codes, this is the only one that Codex shows and does not retry.
            code = "invalid_prompt" if stops else "server_error"
            event: dict[str, object] = {
                "type": "response.failed",
                "sequence_number": event_count,
                "response": {
                    "id": "resp_halter",
                    "object": "response",
                    "created_at": 0,
                    "status": "failed",
                    "error": {"code": code, "message": refusal.sentence},
                    "output": (),
                },
            }
            return b"event: response.failed\ndata: %s\n\n" % _ENCODE(event)


def explain_outcome(outcome: RequestOutcome, now: int, rates: ModelPrices | Unpriced | None = None) -> Refusal | None:
    """Return the refusal for the client; None if the request was answered. `rates` are those of the request."""
    match outcome:
        case AnsweredRequest():
            return None
        case RefusedRequest(outcome="cost_cap_reached"):
            return Refusal("cap", f"Halter: {outcome.sentence}")
        case RefusedRequest(outcome="external_halt"):
            return Refusal("halted", f"Halter: {outcome.sentence}")
        case RefusedRequest() if isinstance(rates, Unpriced) and outcome.sentence == rates.sentence:
            return Refusal("unpriced", f"Halter: {outcome.sentence}")
        case RefusedRequest():
            return Refusal("refused", f"Halter: {outcome.sentence}")
        case FailedRequest(outcome="external_halt"):
            return Refusal("halted", f"Halter: {outcome.error}")
        case FailedRequest():
            return Refusal("provider_failed", f"Halter: {outcome.error}")
        case BudgetBusy():
            return Refusal("wait", "Halter: other requests hold the rest of the budget. Try again.", wait=5)
        case RateLimited():
            seconds = -(-(outcome.retry_at - now) // SECOND)
            return Refusal("wait", f"Halter: rate limit of this model reached. Try again in {seconds} s.", wait=seconds)
