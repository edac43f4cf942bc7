"""How a tool's end reads: its output, failure or stop as the outcome that is recorded, with secrets masked."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.core.events import FilesGiven
from halter.core.messages import Text
from halter.core.text import encode_body
from halter.core.tools import Failed, JournalEffect, Output, Unstoppable
from halter.core.vocabulary import Outcome
from halter.guard.effect import MAX_ERROR_LENGTH
from halter.guard.halts import CancelledEffect, EffectStopped
from halter.guard.ledger import ActualResult
from halter.redaction.redact import Redact

MAYBE_DONE: Final = "It is unknown whether the call took effect."


def read_files_result(
    output: Output, parts: Sequence[Text], call: str, effects: tuple[JournalEffect, ...], redact: Redact
) -> ActualResult:
    """Read the result of a call with files. Its text names each one, also those that the model cannot see."""
    lines = [part.text for part in parts] or [f"[{file.name}, not shown]" for file in output.files]
    text = redact("\n".join([output.text, *lines] if output.text else lines))
    files = tuple(
        msgspec.structs.replace(part, text=redact(part.text), origin="tool", source=redact(part.source))
        for part in parts
        if part.media
    )
    if files:
        effects = (*effects, JournalEffect(FilesGiven(call=call), msgspec.json.encode(files)))
    return ActualResult("ok", output.cost_micros, body=encode_body(text), happened=effects, files=files)


def read_tool_failure(error: Exception, tool: str, redact: Redact, *, can_have_taken_effect: bool) -> ActualResult:
    match error:
        case EffectStopped():
            is_unsure = error.outcome == "external_halt" and can_have_taken_effect
            result = make_failure(error.outcome, str(error), redact)
            return read_stopped_tool(error.leftover, result, is_unsure=is_unsure)
        case TimeoutError():
            return make_failure("timeout", f"TimeoutError: {tool} exceeded its deadline", redact)
        case Failed():
            return make_failure("error", str(error), redact, error.partial)
        case _:
            return make_failure("unknown", str(error), redact)


def read_cancelled_tool(cancelled: CancelledEffect, redact: Redact, *, can_have_taken_effect: bool) -> ActualResult:
    result = make_failure("cancelled", "CancelledError: the session was cancelled.", redact)
    is_unsure = cancelled.is_cancelled_twice or can_have_taken_effect
    return read_stopped_tool(cancelled.leftover, result, is_unsure=is_unsure)


def read_stopped_tool(leftover: object, result: ActualResult, *, is_unsure: bool) -> ActualResult:
    """Read the result of a stopped tool: `unknown` if it may have taken effect, or did not stop."""
    if not is_unsure and not isinstance(leftover, Unstoppable):
        return result
    return msgspec.structs.replace(result, outcome="unknown", error=f"{result.error} {MAYBE_DONE}")


def make_failure(outcome: Outcome, error: str, redact: Redact, partial: str = "") -> ActualResult:
    body = encode_body(redact(partial)) if partial else None
    return ActualResult(outcome, body=body, error=redact(error)[:MAX_ERROR_LENGTH])
