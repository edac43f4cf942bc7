"""The folders of agents that a process was given, and the background work started with them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class AgentFolders:
    """The folders of agents by name, and the background work started with them."""

    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    report: Callable[[str], None] = lambda _: None
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the background work. Its sessions keep their state."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def start(self, job: Coroutine[Any, Any, None], result_future: asyncio.Future[T]) -> T:
        """Run a job in the background and wait until `result_future` is set. Later failures go to `report`."""
        task = asyncio.create_task(job)
        self._running.add(task)
        task.add_done_callback(lambda task: self._on_end(task, was_started=result_future.done()))
        await asyncio.wait([task, result_future], return_when=asyncio.FIRST_COMPLETED)
        if not result_future.done():
            task.result()
        return result_future.result()

    def _on_end(self, task: asyncio.Task[None], *, was_started: bool) -> None:
        self._running.discard(task)
        if was_started and not task.cancelled() and (error := task.exception()) is not None:
            self.report(str(error))
