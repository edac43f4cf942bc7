"""What a turn shows to those who watch it, and the current facts that it is shown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.core.events import CostCapReached
from halter.core.messages import StreamChunk, ToolCall
from halter.guard.call_answer import Answer

CapListener = Callable[[CostCapReached, int], None]
"""Called with the cap that a session has reached, and with the end of its window."""

ReadFacts = Callable[[], Mapping[str, Any]]
ReadVolatile = Callable[[], str]


def ignore(*_: object) -> None: ...


class LoopObserver(msgspec.Struct, frozen=True):
    """Optional callbacks of a turn.

    `on_chunk` receives an answer as it streams; `on_text` the model's text and its cost; `on_calls` the calls before
    they are made; `on_result` a call with its answer; `on_warning` a warning about an answer; `on_cap` a cap, before
    the session sleeps until its window ends.
    """

    on_chunk: Callable[[StreamChunk], None] | None = None
    on_text: Callable[[str, int], None] = ignore
    on_result: Callable[[ToolCall, Answer], None] = ignore
    on_warning: Callable[[str], None] = ignore
    on_cap: CapListener = ignore
    on_calls: Callable[[Sequence[ToolCall]], None] = ignore

    @property
    def reads_outcomes(self) -> bool:
        """True if a callback receives outcomes, which must be durable before it is called."""
        return self.on_text is not ignore or self.on_result is not ignore


class LiveContext(msgspec.Struct, frozen=True):
    """The current facts at a request: `read_volatile` returns them as text, `read_facts` for a rule-based model.

    `on_call` receives each call of the agent with its answer, which may change the facts.
    """

    read_volatile: ReadVolatile = str
    read_facts: ReadFacts = dict
    on_call: Callable[[ToolCall, Answer], None] | None = None


class HotStateCapture(msgspec.Struct, frozen=True):
    """The hot state at the start of a turn: its values as JSON, and their digest."""

    body: bytes
    digest: str


NO_LIVE_CONTEXT: Final = LiveContext()
NO_OBSERVER: Final = LoopObserver()
