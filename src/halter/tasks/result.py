"""The result of an agent's run."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import msgspec

from halter.core.clock import SECOND, window_end
from halter.core.errors import ConfigError, HalterError
from halter.core.events import CostCapReached
from halter.core.messages import Message, ToolCall, ToolResult
from halter.core.money import Amount, Unit, format_unit_amount, to_unit_amount
from halter.core.renamed import RenamedAttribute
from halter.core.usage import Usage
from halter.core.vocabulary import END_STATES, State
from halter.state.receipt import Receipt

if TYPE_CHECKING:
    from halter.core.rows import SessionRow

T = TypeVar("T")

GOOD_STATES: frozenset[State] = frozenset(("COMPLETED", "WAITING_FOR_INPUT", "SLEEPING"))


class RunFailed(HalterError):
    """The run failed; the message says why."""

    def __init__(self, result: "Result[Any]") -> None:
        reason = result.terminal_reason or "turn not finished"
        super().__init__(f"Session {result.session} is {result.state} ({reason}). {result.sentence}".strip())
        self.result = result


class EndedBefore(ConfigError):
    """The session that was to run has ended before; its result can be read."""

    def __init__(self, row: "SessionRow") -> None:
        super().__init__(
            f"Session {row.session} has ended ({row.state}: {row.terminal_reason}). Resume it to continue."
        )
        self.row = row


class ReachedCap(msgspec.Struct, frozen=True):
    """The cap of a window that ended a run. The window opens at `opens_at`, in microseconds."""

    scope: str
    window: str
    unit: Unit
    cap: Amount
    opens_at: int

    @classmethod
    def of(cls, event: CostCapReached) -> Self | None:
        """Return the cap of a window that refused an effect; None if the effect does not fit the next window either."""
        opens_at = window_end(event.window)
        if opens_at is None or event.amount > event.cap:
            return None
        return cls(event.scope, event.window, event.unit, to_unit_amount(event.cap, event.unit), opens_at)

    @property
    def sentence(self) -> str:
        opening = datetime.fromtimestamp(self.opens_at // SECOND, UTC)
        cap = f"{format_unit_amount(self.cap, self.unit)}, {self.window.replace('/', ' ')}"
        return f"The cap of {self.scope} ({cap}) is used up until {opening:%Y-%m-%d %H:%M} UTC."


class Result(msgspec.Struct, Generic[T], frozen=True, kw_only=True, dict=True):
    """The result of a run: a `CompletedResult` with the answer, or a `StoppedResult` without one.

    `ok`: the model finished, or asks a person for something; otherwise `sentence` describes what stopped it.
    `cost_usd` is in dollars and counts the whole session. `near_budget`: a cap of the session, its agent or the fleet
    is used up except for its reserve. `reached_cap`: the cap that ended the run, if it opens again.
    """

    session: str
    state: State
    ok: bool
    text: str
    output: T | None
    terminal_reason: str = ""
    sentence: str = ""
    question: str = ""
    messages: tuple[Message, ...] = ()
    near_budget: bool = False
    reached_cap: ReachedCap | None = None
    build_receipt: Callable[[], Receipt] = Receipt

    @cached_property
    def receipt(self) -> Receipt:
        """The calls and costs of the session, up to the end of the run.

        Its events are read on first access, at the latest when the store is closed.
        """
        return self.build_receipt()

    @property
    def cost_usd(self) -> Decimal:
        return self.receipt.cost_usd

    @property
    def usage(self) -> Usage:
        """The tokens of all requests."""
        used = [line.usage for line in self.receipt.requests if line.usage is not None]
        return Usage(
            sum(each.input_tokens for each in used),
            sum(each.output_tokens for each in used),
            sum(each.cache_read_tokens for each in used),
            sum(each.cache_write_tokens for each in used),
            sum(each.cache_write_1h_tokens for each in used),
            sum(each.web_searches for each in used),
            sum(each.audio_tokens for each in used),
            sum(each.audio_cached_tokens for each in used),
            sum(each.code_executions for each in used),
        )

    @property
    def has_ended(self) -> bool:
        """True if the session has ended. If not, it can be resumed."""
        return self.state in END_STATES

    over = RenamedAttribute("has_ended")

    def raise_for_state(self) -> Self:
        """Raise RunFailed unless `ok`; return the result itself."""
        if not self.ok:
            raise RunFailed(self)
        return self

    def require_output(self) -> T:
        """Return the answer. Raises RunFailed if the run has none: it was stopped, or waits for a person."""
        raise RunFailed(self)


class CompletedResult(Result[T], frozen=True, kw_only=True, dict=True):
    """The result of a run that has an answer: `output`, as `output_type`; without one, the text."""

    output: T

    def require_output(self) -> T:
        """Return the answer."""
        return self.output


class StoppedResult(Result[Any], frozen=True, kw_only=True, dict=True):
    """The result of a run without an answer: something stopped it, or it waits for a person or for a time."""

    output: None = None

    def require_output(self) -> NoReturn:
        """Raise RunFailed: there is no answer."""
        raise RunFailed(self)


async def read_answer(
    result: Result[Any], tool: str, read: Callable[[str], Awaitable[T]]
) -> CompletedResult[T] | StoppedResult:
    """Read the answer of a result from the accepted call of a tool; without one, the result has no answer."""
    arguments = find_accepted_call(result.messages[-2:], tool) if isinstance(result, CompletedResult) else None
    fields = {name: getattr(result, name) for name in result.__struct_fields__ if name != "output"}
    if arguments is None:
        return StoppedResult(**fields)
    return CompletedResult(**fields, output=await read(arguments))


def find_accepted_call(messages: Sequence[Message], tool: str) -> str | None:
    parts = [part for message in messages for part in message.parts]
    accepted = {part.id for part in parts if isinstance(part, ToolResult) and part.outcome == "ok"}
    calls = [part for part in parts if isinstance(part, ToolCall) and part.tool == tool and part.id in accepted]
    return calls[-1].arguments if calls else None
