"""The errors of the providers' library, translated for the retry policy.

    nothing was sent                         unavailable   not billed
    408, 409, 425, 429, 5xx                  unavailable   not billed
    3xx: a redirect                          rejected      not billed
    too long: 413, or a provider's message   overflow      not billed
    quota or credit used up, other 4xx       rejected      not billed
    a lost connection, a truncated answer    unavailable   billed
    an unreadable answer                     unavailable   billed

An error status is billed if an answer had started, if it reports a usage, or if the provider is configured with
`bills_errors`: then every status except 429 and 529, which a provider returns before it starts an answer.

An error quotes the provider's message or the beginning of an unreadable answer. It never contains the key or a header.
"""

import re
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from halter.core.clock import SECOND
from halter.core.errors import ContextOverflow, ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.text import clean, shorten
from halter.core.usage import ModelName
from halter.models.exchange import MAX_EXCERPT_BYTES, Exchange
from halter.net.failures import find_system_reason, is_unreadable, list_causes, list_sdk_errors

if TYPE_CHECKING:
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError

MAX_QUOTED_LENGTH: Final = 300

MAX_RETRY_AFTER: Final = 24 * 3600 * SECOND
"""The maximum accepted `retry-after`."""

_TOO_LARGE: Final = 413
_MAY_PASS: Final = frozenset((408, 409, 425, 429))
_NOT_SERVED: Final = frozenset((503, 529))
_NEVER_BILLED: Final = frozenset((429, 529))
_SERVER_ERRORS: Final = 500
_SPACE: Final = re.compile(r"\s+")
_NEEDS_PERSON: Final = {401: "Unauthorized", 402: "QuotaExceeded", 403: "Forbidden", 404: "NotFound"}
"""Statuses that a person has to resolve: a wrong key, missing credit or rights, an unknown model or address."""


def list_library_errors() -> tuple[type[Exception], ...]:
    """List every error that the library raises or passes on.

    It reads some answers without validating them; the errors that this raises mean an unreadable answer.
    """
    from pydantic_ai.exceptions import AgentRunError, UserError

    unreadable = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    return (AgentRunError, UserError, *list_sdk_errors(), *unreadable)


def translate_library_error(
    error: Exception,
    name: ModelName,
    key: str,
    exchange: Exchange,
    *,
    url: str = "",
    is_started: bool = False,
    bills_errors: bool = False,
) -> ModelError:
    from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError, UserError

    for cause in list_causes(error):
        if is_unreadable(cause):
            return _make_bad_answer_error(name, key, exchange, cause)
    if exchange.led_elsewhere:
        sentence = f"Redirected: {name} answered with a redirect; set `base_url` to the address it redirects to"
        return ModelUnusable(sentence, billed=False)
    is_connection_lost = isinstance(error, (ModelConnectionError, *list_sdk_errors()))
    match error:
        case ModelHTTPError():
            return _status(
                error, name, key, exchange, is_started=is_started or error.in_stream, bills_errors=bills_errors
            )
        case _ if is_connection_lost and not exchange.sent:
            return ModelUnavailable(f"ConnectionFailed: {_describe_unreachable(error, name, key, url)}", billed=False)
        case _ if is_connection_lost:
            if is_started:
                return make_cut_error(name, exchange)
            return _unfinished_error(f"ConnectionLost: {name} gave no answer: {_quote_error(error, key)}", exchange)
        case ModelAPIError(provider_error_code=str()):
            return _translate_reported_error(error, name, key, exchange)
        case ModelAPIError(in_stream=True):
            return _unfinished_error(f"ProviderError: {name} broke off: {_find_provider_message(error, key)}", exchange)
        case UserError() | NotImplementedError():
            return ModelRejected(
                f"Unsendable: {name} does not support this request: {_quote_error(error, key)}", billed=False
            )
        case _:
            return _make_bad_answer_error(name, key, exchange, error)


def _translate_reported_error(error: "ModelAPIError", name: ModelName, key: str, exchange: Exchange) -> ModelError:
    """Translate an error inside an answer whose status was a success."""
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelRequestRejectedError

    usage, final = exchange.usage, exchange.final
    text = f"{name} failed to answer: {_quote_error(error, key)}"
    if isinstance(error, ModelContextWindowExceededError):
        return ContextOverflow(f"ContextOverflow: {text}", billed=exchange.sent, usage=usage, final=final)
    if isinstance(error, ModelRequestRejectedError):
        return ModelRejected(f"Rejected: {text}", billed=exchange.sent, usage=usage, final=final)
    return _unfinished_error(f"ProviderError: {text}", exchange)


def _make_bad_answer_error(name: ModelName, key: str, exchange: Exchange, error: BaseException) -> ModelUnavailable:
    """Make the error of an unreadable answer, which quotes it.

    The quote is longer than what is recorded, so that the guard masks a secret before it shortens the sentence.
    """
    reason = _tidy(str(error).partition("\n")[0], key, MAX_EXCERPT_BYTES) or type(error).__name__
    excerpt = _tidy(exchange.excerpt.decode("utf-8", "replace"), key, MAX_EXCERPT_BYTES) or "it was empty"
    sentence = f"BadAnswer: {name} sent an answer that cannot be read ({reason.removesuffix('.')}): {excerpt}"
    return _unfinished_error(sentence, exchange)


def _describe_unreachable(error: Exception, name: ModelName, key: str, url: str) -> str:
    """Describe the address that cannot be reached, the reason, and where it is configured."""
    url_parts = urlsplit(url)
    host = url_parts.netloc.rpartition("@")[2]
    location = f"{url_parts.scheme}://{host}{url_parts.path}" if host else str(name)
    remedy = f"check the server, the network, and `providers.{name.provider}.base_url` in agent.yaml"
    return f"cannot reach {location} for {name} ({find_system_reason(error) or _quote_error(error, key)}): {remedy}"


def has_unreadable_reasoning(error: Exception) -> bool:
    """Return True if a provider rejected reasoning that it did not encrypt itself, or not for this account."""
    match getattr(error, "body", None):
        case {"code": "invalid_encrypted_content"} | {"error": {"code": "invalid_encrypted_content"}}:
            return True
        case _:
            return False


def make_cut_error(name: ModelName, exchange: Exchange) -> ModelUnavailable:
    """Make the error for an answer that ended before it was complete, even if the connection was closed cleanly."""
    return _unfinished_error(f"CutStream: the answer of {name} ended before it was complete", exchange)


def _unfinished_error(sentence: str, exchange: Exchange) -> ModelUnavailable:
    # A report without output does not count for an answer that had started.
    is_final = exchange.final and exchange.usage is not None and exchange.usage.output_tokens > 0
    return ModelUnavailable(sentence, billed=exchange.sent, usage=exchange.usage, final=is_final)


def _status(
    error: "ModelHTTPError", name: ModelName, key: str, exchange: Exchange, *, is_started: bool, bills_errors: bool
) -> ModelError:
    """Translate a status: an outage, a problem that a person has to fix, or an invalid request."""
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelQuotaExceededError

    status, text = error.status_code, f"{name} answered {error.status_code}: {_find_provider_message(error, key)}"
    usage, final = exchange.usage, exchange.final
    is_billed = is_started or usage is not None or (bills_errors and status not in _NEVER_BILLED)
    if isinstance(error, ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(f"ContextOverflow: {text}", billed=is_billed, usage=usage, final=final)
    if isinstance(error, ModelQuotaExceededError) or status in _NEEDS_PERSON:
        kind = _NEEDS_PERSON.get(status, "QuotaExceeded")
        return ModelUnusable(f"{kind}: {text}", billed=is_billed, usage=usage, final=final)
    if status in _MAY_PASS or status >= _SERVER_ERRORS:
        retry_after = _micros(error.retry_after)
        sentence = f"{_name_passing_failure(status)}: {text}"
        return ModelUnavailable(sentence, billed=is_billed, usage=usage, final=final, retry_after=retry_after)
    return ModelRejected(f"Rejected: {text}", billed=is_billed, usage=usage, final=final)


def _name_passing_failure(status: int) -> str:
    if status == 429:  # noqa: PLR2004 - a well-known status
        return "RateLimited"
    if status in _NOT_SERVED:
        return "Overloaded"
    return "ServerError" if status >= _SERVER_ERRORS else "Conflict"


def _micros(seconds: float | None) -> int | None:
    if seconds is None or not seconds >= 0:
        return None
    return round(min(seconds * SECOND, MAX_RETRY_AFTER))


def _find_provider_message(error: "ModelAPIError", key: str) -> str:
    return _tidy(_message(error.body), key) or "nothing more"


def _message(body: Any) -> str:
    match body:
        case str():
            return body
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"error": str(message)}:
            return message
        case _:
            return ""


def _quote_error(error: Exception, key: str) -> str:
    return _tidy(str(error), key) or type(error).__name__


def _tidy(text: str, key: str, limit: int = MAX_QUOTED_LENGTH) -> str:
    masked_text = text.replace(key, "***") if key else text
    return shorten(_SPACE.sub(" ", clean(masked_text)).strip(), limit)


class ErrorTranslator(Protocol):
    """Translates an error of the library. `is_started` is True if an answer had started."""

    def __call__(self, error: Exception, *, is_started: bool) -> ModelError: ...
