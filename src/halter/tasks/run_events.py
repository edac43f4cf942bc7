"""The events of a run, in order, for a program that watches it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from halter.core.events import CostCapReached
from halter.core.messages import StreamChunk, ToolCall
from halter.core.money import micros_to_usd
from halter.core.vocabulary import Outcome, State
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.loop.concurrency import cancel_and_wait
from halter.loop.observer import LoopObserver
from halter.loop.session_waits import WaitListener

T = TypeVar("T")
R = TypeVar("R")


class ModelAnswered(msgspec.Struct, frozen=True):
    """A model answered a request. `spent_usd` is the cost of the run so far."""

    text: str
    cost_usd: Decimal
    spent_usd: Decimal


class CallBegan(msgspec.Struct, frozen=True):
    """The model asks for a call, which the guard has not checked yet. Its JSON arguments may be anything."""

    call: str
    tool: str
    arguments: str


class CallEnded(msgspec.Struct, frozen=True):
    """A call has its outcome, which may be a refusal."""

    call: str
    tool: str
    outcome: Outcome
    text: str
    cost_usd: Decimal
    spent_usd: Decimal


class DecisionRequested(msgspec.Struct, frozen=True):
    """The run waits for a decision of a person. Answer it with `halter approve`, the dashboard or the HTTP API."""

    decision: str
    call: str
    state: State


class PausedAtCap(msgspec.Struct, frozen=True):
    """The run sleeps until the window of a cap ends; `until` is in microseconds since 1970."""

    scope: str
    window: str
    until: int


class UntrustedLinksFound(msgspec.Struct, frozen=True):
    """The answer has links or addresses from no trusted source."""

    sentence: str


RunEvent = StreamChunk | ModelAnswered | CallBegan | CallEnded | DecisionRequested | PausedAtCap | UntrustedLinksFound


class RunEvents:
    """Collects the events of a run, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[RunEvent | None] = asyncio.Queue()
        self._cost = 0

    def observe(self) -> LoopObserver:
        return LoopObserver(
            on_chunk=self.queue.put_nowait,
            on_text=self._on_text,
            on_result=self._on_result,
            on_warning=lambda sentence: self.queue.put_nowait(UntrustedLinksFound(sentence)),
            on_cap=self._on_cap,
            on_calls=self._on_calls,
        )

    def wait_with(self, listener: WaitListener) -> WaitListener:
        def on_wait(approval: ApprovalRequired, state: State) -> None:
            listener(approval, state)
            self.queue.put_nowait(DecisionRequested(approval.decision, approval.call, state))

        return on_wait

    def _on_text(self, text: str, cost: int) -> None:
        self._cost += cost
        self.queue.put_nowait(ModelAnswered(text, micros_to_usd(cost), micros_to_usd(self._cost)))

    def _on_calls(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self.queue.put_nowait(CallBegan(call.id, call.tool, call.arguments))

    def _on_result(self, call: ToolCall, answer: Answer) -> None:
        self._cost += answer.cost_micros
        spent_usd = micros_to_usd(self._cost)
        self.queue.put_nowait(CallEnded(call.id, call.tool, answer.outcome, answer.text, answer.cost_usd, spent_usd))

    def _on_cap(self, cap: CostCapReached, until: int) -> None:
        self.queue.put_nowait(PausedAtCap(cap.scope, cap.window, until))


async def stream_queue(queue: "asyncio.Queue[T | None]", run: Callable[[], Awaitable[R]]) -> AsyncGenerator[T | R]:
    """Run a function; yield the items that it queues, then its result. Closing the generator cancels the run."""

    async def wait_until_done() -> R:
        try:
            return await run()
        finally:
            queue.put_nowait(None)

    running: asyncio.Task[Any] = asyncio.create_task(wait_until_done())
    try:
        while (item := await queue.get()) is not None:
            yield item
        yield await running
    finally:
        await cancel_and_wait(running)
