"""What a run came to, for the program that asked for it."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Generic, TypeVar

import msgspec

from halter.brain.lastwords import last_words
from halter.brain.loop import Loop
from halter.brain.turn import ASK_USER, FINAL_ANSWER, TROUBLE
from halter.core.errors import HalterError
from halter.core.messages import Message, ToolCall, ToolResult
from halter.core.usage import Usage
from halter.core.vocabulary import ENDS, State
from halter.state.receipt import Receipt
from halter.work.conversation import Came

T = TypeVar("T")

FINE: frozenset[State] = frozenset(("COMPLETED", "WAITING_FOR_INPUT", "SLEEPING"))


class RunFailed(HalterError):
    """A run did not come to what it was asked for; its message says why."""

    def __init__(self, result: "Result[Any]") -> None:
        why = result.terminal_reason or "turn not finished"
        super().__init__(f"Session {result.session} is {result.state} ({why}). {result.sentence}".strip())
        self.result = result


class Result(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What a run came to. `cost_usd` is in dollars, and counts the whole session.

    `ok` says that the model finished as it was meant to, or asks a person for something. `sentence` says what stopped
    it otherwise. `output` is the answer in the form that was asked for, None if there is none; or else its text.
    """

    session: str
    state: State
    ok: bool
    text: str
    output: T
    terminal_reason: str = ""
    sentence: str = ""
    question: str = ""
    usage: Usage = Usage()
    cost_usd: Decimal = Decimal(0)
    receipt: Receipt = Receipt()
    messages: tuple[Message, ...] = ()
    near_budget: bool = False

    @property
    def over(self) -> bool:
        """Tell whether the session is over; if not, it can be gone on with."""
        return self.state in ENDS

    def raise_for_state(self) -> "Result[T]":
        """Raise RunFailed unless all is well; return the result itself, so that it can be gone on with at once."""
        if not self.ok:
            raise RunFailed(self)
        return self


def result_of(came: Came, loop: Loop, receipt: Receipt) -> Result[Any]:
    """Put together what a run came to; its output is its text."""
    turn, messages = loop.turn, loop.messages
    text = last_words(messages)
    return Result(
        session=receipt.session,
        state=came.state,
        ok=came.state in FINE and turn.why not in TROUBLE,
        text=text,
        output=text,
        terminal_reason=came.terminal_reason,
        sentence=came.sentence,
        question=_question(messages) if turn.why == "asked" else "",
        usage=_used(receipt),
        cost_usd=receipt.cost_usd,
        receipt=receipt,
        messages=tuple(messages),
        near_budget=loop.near_budget(),
    )


def final_answer(messages: Sequence[Message]) -> str | None:
    """Find the arguments of the answer that was accepted, as JSON."""
    return _accepted(messages, FINAL_ANSWER)


def _question(messages: Sequence[Message]) -> str:
    arguments = _accepted(messages, ASK_USER)
    return "" if arguments is None else str(msgspec.json.decode(arguments).get("question", ""))


def _accepted(messages: Sequence[Message], tool: str) -> str | None:
    parts = [part for message in messages for part in message.parts]
    accepted = {part.id for part in parts if isinstance(part, ToolResult) and part.outcome == "ok"}
    found = [part for part in parts if isinstance(part, ToolCall) and part.tool == tool and part.id in accepted]
    return found[-1].arguments if found else None


def _used(receipt: Receipt) -> Usage:
    """Add up the tokens of all requests: for people; money is added up request by request."""
    used = [line.usage for line in receipt.requests if line.usage is not None]
    return Usage(
        sum(each.input_tokens for each in used),
        sum(each.output_tokens for each in used),
        sum(each.cache_read_tokens for each in used),
        sum(each.cache_write_tokens for each in used),
    )
