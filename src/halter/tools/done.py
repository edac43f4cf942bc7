"""What a call comes to in a process of its own. Only texts and numbers cross the border, never an object."""

import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec

from halter.core.text import from_body, to_body
from halter.core.tools import Failed, Output, Unstoppable
from halter.tools.group import Ended
from halter.tools.result import bounded, to_output

ANSWER_MORE: Final = 1000
"""How many characters of an answer may be something else than the output itself."""


class Done(msgspec.Struct, frozen=True):
    """What came of a call: a text and perhaps a cost, a failure, or a doubt. Texts are bytes, since any is possible."""

    text: bytes = b""
    cost: int | None = None
    kind: bytes = b""
    message: bytes = b""
    partial: bytes = b""
    doubt: bytes = b""


def perform(call: Callable[[], Any], max_output: int) -> bytes:
    """Call a function that raises nothing but `Failed` and `Unstoppable`, and write down what came of it."""
    return msgspec.msgpack.encode(_performed(call, max_output))


def _performed(call: Callable[[], Any], max_output: int) -> Done:
    try:
        output = to_output(call(), max_output)
    except Failed as failed:
        kind, _, message = str(failed).partition(": ")
        said, partial = bounded(message, max_output), bounded(failed.partial, max_output)
        return Done(kind=to_body(kind), message=to_body(said), partial=to_body(partial))
    except Unstoppable as doubt:
        return Done(doubt=to_body(str(doubt)))
    if output.happened:
        return Done(kind=b"NotCarried", message=b"events can be written down by an async tool only.")
    return Done(to_body(output.text), output.cost_micros)


def read_answer(ended: Ended) -> Output:
    """Read what a process answered. What it printed is kept where it failed."""
    try:
        done = msgspec.msgpack.decode(ended.answer, type=Done)
    except msgspec.DecodeError:
        raise Failed("Crashed", f"the tool's process ended without an answer: {_why(ended.code)}", ended.text) from None
    if done.doubt:
        raise Unstoppable(from_body(done.doubt))
    if done.kind:
        raise Failed(from_body(done.kind), from_body(done.message), ended.text + from_body(done.partial))
    return Output(from_body(done.text), done.cost)


def _why(code: int) -> str:
    return f"signal {signal.Signals(-code).name}." if code < 0 else f"exit code {code}."
