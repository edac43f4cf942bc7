"""What went wrong with a provider, as the retry policy has to know it.

    nothing was sent                         unavailable   not billed
    408, 409, 425, 429, 5xx                  unavailable   not billed
    3xx: the address leads elsewhere         rejected      not billed
    too long: 413, or as a provider words it overflow      not billed
    quota or credit used up, other 4xx       rejected      not billed
    a connection lost, an answer cut off     unavailable   billed
    an answer that nobody can read           unavailable   billed

An error status is billed after all where an answer had begun, where it reports a usage, or where the configuration says
that this provider `bills_errors`: then any but 429 and 529, by which a provider refuses to begin.

A sentence quotes what the provider said, shortened, and never the key, an address or a header.
"""

import re
from typing import TYPE_CHECKING, Any, Final

from halter.core.clock import SECOND
from halter.core.errors import ContextOverflow, ModelError, ModelRejected, ModelUnavailable
from halter.core.text import clean, shorten
from halter.core.usage import ModelName

if TYPE_CHECKING:
    from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError

    from halter.models.wire_exchange import Exchange

QUOTED: Final = 300
"""How many characters of a provider's own words are kept."""

LONGEST_WAIT: Final = 24 * 3600 * SECOND
"""More than that nobody can mean, whatever a header says."""

_TOO_LARGE: Final = 413
_MAY_PASS: Final = frozenset((408, 409, 425, 429))
_NOT_SERVED: Final = frozenset((503, 529))
_NOT_BEGUN: Final = frozenset((429, 529))
_SERVER_ERRORS: Final = 500
_SPACE: Final = re.compile(r"\s+")
_KINDS: Final = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}


def failures() -> tuple[type[Exception], ...]:
    """Name everything that the wires' library raises of its own, or lets through from a library below it.

    It reads some answers without a look at their shape: what that raises is an answer that nobody can read.
    """
    import httpx2
    from pydantic_ai.exceptions import AgentRunError, UserError

    unreadable = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    return (AgentRunError, UserError, httpx2.HTTPError, httpx2.StreamError, *unreadable)


def failure(
    error: Exception, name: ModelName, key: str, seen: "Exchange", *, begun: bool = False, bills_errors: bool = False
) -> ModelError:
    """Say what an error of the library means. `begun` says that an answer had begun to come."""
    import httpx2
    from pydantic_ai.exceptions import ModelAPIError, ModelConnectionError, ModelHTTPError, UserError

    if seen.led_elsewhere:
        sentence = f"Redirected: {name} is elsewhere, as its address says; write the address it leads to as `base_url`"
        return ModelRejected(sentence, billed=False)
    match error:
        case ModelHTTPError():
            return _status(error, name, key, seen, begun=begun or error.in_stream, bills_errors=bills_errors)
        case ModelConnectionError() | httpx2.HTTPError() | httpx2.StreamError() if not seen.sent:
            return ModelUnavailable(f"ConnectionFailed: nobody answers for {name}: {_quoted(error, key)}", billed=False)
        case ModelConnectionError() | httpx2.HTTPError() | httpx2.StreamError():
            if begun:
                return cut(name, seen)
            return _unfinished(f"ConnectionLost: {name} gave no answer: {_quoted(error, key)}", seen)
        case ModelAPIError(in_stream=True):
            return _unfinished(f"ProviderError: {name} broke off: {_said(error, key)}", seen)
        case UserError():
            return ModelRejected(f"Unsendable: {name} cannot be asked this: {_quoted(error, key)}", billed=False)
        case _:
            return _unfinished(f"BadAnswer: {name} sent what cannot be read: {_quoted(error, key)}", seen)


def cut(name: ModelName, seen: "Exchange") -> ModelUnavailable:
    """Say that an answer stopped in the middle, whether its connection broke or was closed politely."""
    return _unfinished(f"CutStream: the answer of {name} ended before it was finished", seen)


def _unfinished(sentence: str, seen: "Exchange") -> ModelUnavailable:
    # A report of no output at all says nothing of an answer that had begun.
    final = seen.final and seen.usage is not None and seen.usage.output_tokens > 0
    return ModelUnavailable(sentence, billed=seen.sent, usage=seen.usage, final=final)


def _status(
    error: "ModelHTTPError", name: ModelName, key: str, seen: "Exchange", *, begun: bool, bills_errors: bool
) -> ModelError:
    from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelQuotaExceededError

    status, said = error.status_code, f"{name} answered {error.status_code}: {_said(error, key)}"
    usage, final = seen.usage, seen.final
    billed = begun or usage is not None or (bills_errors and status not in _NOT_BEGUN)
    if isinstance(error, ModelContextWindowExceededError) or status == _TOO_LARGE:
        return ContextOverflow(f"ContextOverflow: {said}", billed=billed, usage=usage, final=final)
    if isinstance(error, ModelQuotaExceededError):
        return ModelRejected(f"QuotaExceeded: {said}", billed=billed, usage=usage, final=final)
    if status in _MAY_PASS or status >= _SERVER_ERRORS:
        wait = _micros(error.retry_after)
        told = f"{_passing(status)}: {said}"
        return ModelUnavailable(told, billed=billed, usage=usage, final=final, retry_after=wait)
    return ModelRejected(f"{_KINDS.get(status, 'Rejected')}: {said}", billed=billed, usage=usage, final=final)


def _passing(status: int) -> str:
    """Name a failure that may pass."""
    if status == 429:  # noqa: PLR2004 - the status that everybody knows by its number
        return "RateLimited"
    if status in _NOT_SERVED:
        return "Overloaded"
    return "ServerError" if status >= _SERVER_ERRORS else "Conflict"


def _micros(seconds: float | None) -> int | None:
    if seconds is None or not seconds >= 0:
        return None
    return round(min(seconds * SECOND, LONGEST_WAIT))


def _said(error: "ModelAPIError", key: str) -> str:
    """Find the provider's own words in the body of its answer."""
    return _tidy(_message(error.body), key) or "nothing more"


def _message(body: Any) -> str:
    match body:
        case str():
            return body
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"error": str(message)}:
            return message
        case _:
            return ""


def _quoted(error: Exception, key: str) -> str:
    return _tidy(str(error), key) or type(error).__name__


def _tidy(text: str, key: str) -> str:
    hidden = text.replace(key, "***") if key else text
    return shorten(_SPACE.sub(" ", clean(hidden)).strip(), QUOTED)
