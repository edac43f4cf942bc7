"""The answer to a call: its outcome and the text for the model, made from what the journal recorded."""

from decimal import Decimal
from typing import Final, cast

import msgspec

from halter.core.events import (
    CallSettled,
    CostCapReached,
    FilesGiven,
)
from halter.core.ids import StreamId
from halter.core.messages import Text
from halter.core.money import micros_to_usd
from halter.core.ports import Store, Stored, read_body
from halter.core.text import decode_body
from halter.core.vocabulary import Outcome

MAX_SETTLING_EVENTS: Final = 50
"""Maximum events of one settlement that are searched for the files of its call."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a call, and the text for the model.

    `cap` is the cap that refused the call. After an `overrun` the session must stop. `partial` is the output before a
    failure. `simulation` is a model's prediction of the call; the `text` does not contain it. A `staged` call waits for
    a decision at the end of the turn. The `text` names the `files`.
    """

    call: str
    outcome: Outcome
    text: str
    cost_micros: int = 0
    duration_ms: int = 0
    cap: CostCapReached | None = None
    overrun: bool = False
    simulation: str = ""
    partial: str = ""
    staged: bool = False
    files: tuple[Text, ...] = ()

    @property
    def cost_usd(self) -> Decimal:
        return micros_to_usd(self.cost_micros)


class ApprovalRequired(msgspec.Struct, frozen=True):
    """A call that waits for a decision. After the decision the same call passes all checks again.

    `tool` is set when the decision has just been asked for.
    """

    call: str
    decision: str
    simulation: str = ""
    tool: str = ""


async def read_settled_answer(store: Store, stream: StreamId, settled: Stored) -> Answer:
    """Read the answer of a call from its settlement. Its files were committed with it."""
    answer = restore_call_answer(cast("CallSettled", settled.event), await read_body(store, settled))
    for stored in await store.read(stream, settled.seq, MAX_SETTLING_EVENTS):
        if isinstance(stored.event, FilesGiven) and stored.event.call == answer.call:
            return msgspec.structs.replace(answer, files=restore_files(await read_body(store, stored)))
    return answer


def restore_files(body: bytes) -> tuple[Text, ...]:
    return msgspec.json.decode(body, type=tuple[Text, ...]) if body else ()


def restore_call_answer(event: CallSettled, body: bytes) -> Answer:
    cost, text = event.cost_micros, decode_body(body)
    partial = text if event.error else ""
    duration_ms = event.duration_ms
    return Answer(event.call, event.outcome, event.error or text, cost, duration_ms, partial=partial)
