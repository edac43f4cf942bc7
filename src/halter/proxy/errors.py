"""Refusals as each client obeys them.

Every client was measured with every status. One that must stop gets what ends it at the first try; one that may come
back is told when. A stream is never just closed, since clients take a clean end for a whole answer.

    reason       Anthropic's dialect                       OpenAI's dialects
    cap          402 billing_error, terminal               400 halter_cap_reached, terminal
    halted       429 rate_limit_error, terminal            400 halter_halted, terminal
    refused      429 rate_limit_error, terminal            400 halter_refused, terminal
    wait         429 rate_limit_error with retry-after     the same
    unknown_key  401, terminal                             the same
    in a stream  an `error` event: billing_error           an `error` chunk; `response.failed` with invalid_prompt

LiteLLM, which aider and OpenHands ask with, tries again after 402 and 429, and knows the kind of an error in a stream
only by words in its sentence. It gets 400 in every dialect, and those words.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from halter.core.clock import SECOND
from halter.guard.halts import BudgetBusy, RateLimited
from halter.guard.model_door import AnsweredRequest, FailedRequest, RefusedRequest, RequestOutcome
from halter.proxy.dialect import DialectName

Reason = Literal[
    "cap",
    "halted",
    "refused",
    "wait",
    "unknown_key",
    "unreadable",
    "too_large",
    "not_found",
    "provider_failed",
    "store_away",
]

LONGEST_RETRY_AFTER: Final = 30
"""Seconds. Clients sleep as long as they are told, some for weeks."""

Headers = list[tuple[bytes, bytes]]
_ENCODE: Final = msgspec.json.Encoder().encode
_ANTHROPIC: Final[Mapping[Reason, tuple[int, str]]] = MappingProxyType(
    {
        "cap": (402, "billing_error"),
        "halted": (429, "rate_limit_error"),
        "refused": (429, "rate_limit_error"),
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
    ("cap", "halted", "refused", "unknown_key", "unreadable", "too_large", "not_found")
)
"""What the client must not try again."""


_LITELLM_STOPS_AT_MESSAGES: Final = "Client error '400 Bad Request'"
_LITELLM_STOPS_AT_CHAT: Final = "invalid_request_error"
"""Words that LiteLLM looks for in the sentence of an error in a stream, and takes as final."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not answered, in a sentence for the person at the client. `wait` is in seconds."""

    reason: Reason
    sentence: str
    wait: int = 0


def asks_by_litellm(headers: Headers) -> bool:
    return any(name == b"user-agent" and value.startswith(b"litellm/") for name, value in headers)


def render_refusal(dialect: DialectName, refusal: Refusal, *, by_litellm: bool = False) -> tuple[int, Headers, bytes]:
    """Status, headers and body of a refusal."""
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
        headers.append((b"retry-after", b"%d" % max(1, min(refusal.wait, LONGEST_RETRY_AFTER))))
    return status, headers, data


def render_in_stream(dialect: DialectName, refusal: Refusal, events: int = 0, *, by_litellm: bool = False) -> bytes:
    """The event that ends a stream which had begun."""
    stops = refusal.reason in TERMINAL
    match dialect:
        case "messages":
            kind = "billing_error" if stops else _ANTHROPIC[refusal.reason][1]
            words = f" ({_LITELLM_STOPS_AT_MESSAGES})" if stops and by_litellm else ""
            error = {"type": "error", "error": {"type": kind, "message": refusal.sentence + words}}
            return b"event: error\ndata: %s\n\n" % _ENCODE(error)
        case "chat":
            # Here LiteLLM asks with the SDK of OpenAI, and cannot be told from other programs.
            _, kind, code = _OPENAI[refusal.reason]
            words = f" ({_LITELLM_STOPS_AT_CHAT})" if stops else ""
            told = {"error": {"message": refusal.sentence + words, "type": kind, "code": code, "param": None}}
            return b"data: %s\n\n" % _ENCODE(told)
        case "responses":
            # Of all codes, this is the one that Codex shows and does not try again.
            code = "invalid_prompt" if stops else "server_error"
            failed: dict[str, object] = {
                "type": "response.failed",
                "sequence_number": events,
                "response": {
                    "id": "resp_halter",
                    "object": "response",
                    "created_at": 0,
                    "status": "failed",
                    "error": {"code": code, "message": refusal.sentence},
                    "output": (),
                },
            }
            return b"event: response.failed\ndata: %s\n\n" % _ENCODE(failed)


def explain_outcome(outcome: RequestOutcome, now: int) -> Refusal | None:
    """What the client is told, unless it has its answer."""
    match outcome:
        case AnsweredRequest():
            return None
        case RefusedRequest(outcome="cost_cap_reached"):
            return Refusal("cap", f"Halter: {outcome.sentence}")
        case RefusedRequest(outcome="external_halt"):
            return Refusal("halted", f"Halter: {outcome.sentence}")
        case RefusedRequest():
            return Refusal("refused", f"Halter: {outcome.sentence}")
        case FailedRequest(outcome="external_halt"):
            return Refusal("halted", f"Halter: {outcome.error}")
        case FailedRequest():
            return Refusal("provider_failed", f"Halter: {outcome.error}")
        case BudgetBusy():
            return Refusal("wait", "Halter: other requests hold what is left of the budget. Try again.", wait=5)
        case RateLimited():
            seconds = -(-(outcome.until - now) // SECOND)
            return Refusal("wait", f"Halter: the rate of this model is used up for {seconds} s.", wait=seconds)
