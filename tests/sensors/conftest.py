"""Servers with bad manners, a clock that does not wait, and somebody who listens."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from halter.autonomy.resident import SupervisedSensor
from halter.core.tools import HealthReport, Reading, Sensor

PATIENCE = 30
"""Seconds after which a test gives up."""

Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each connection with the next of its answers, the last one again and again, and notes what it is asked.

    An answer is bytes, after which the connection is closed in good order, or a function that does as it likes.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: list[Answer] = []
        self.port = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/feed"

    def header(self, request: int, name: str) -> str | None:
        """Say what a header of a request was."""
        lines = (line.partition(":") for line in self.asked[request].splitlines()[1:])
        return next((value.strip() for key, _, value in lines if key.lower() == name), None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        writer.close()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    new_server = Server()
    listening = await asyncio.start_server(new_server.serve, "127.0.0.1", 0)
    new_server.port = listening.sockets[0].getsockname()[1]
    yield new_server
    listening.close()
    await new_server.end()


class Hasty:
    """A clock that notes how long it was to sleep, and does not."""

    def __init__(self) -> None:
        self.slept: list[int] = []

    def now(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, duration: int) -> None:
        self.slept.append(duration)
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Hasty:
    return Hasty()


class Listener:
    """Runs a sensor, and waits until it has read or said something."""

    def __init__(self, sensor: Sensor, clock: Hasty) -> None:
        self.taken: list[Any] = []
        self.told: list[HealthReport] = []
        self.sensing = SupervisedSensor(sensor, clock, random.Random(0), self._take, self._changed)
        self._news = asyncio.Event()

    async def _take(self, reading: Reading) -> None:
        self.taken.append(reading.value)
        self._news.set()

    async def _changed(self, report: HealthReport) -> None:
        self.told.append(report)
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def until_read(self, count: int) -> list[Any]:
        await self.until(lambda: len(self.taken) >= count)
        return self.taken

    async def until_told(self, *health: str) -> HealthReport:
        """Wait until these were told, one after the other, whatever was told in between."""

        def was_told() -> bool:
            texts = iter(report.health for report in self.told)
            return all(each in texts for each in health)

        await self.until(was_told)
        return self.told[-1]


Listen = Callable[[Sensor], Any]


@pytest.fixture
def listen(clock: Hasty) -> Listen:
    @asynccontextmanager
    async def listening(sensor: Sensor) -> AsyncIterator[Listener]:
        listener = Listener(sensor, clock)
        task = asyncio.create_task(listener.sensing.run())
        try:
            yield listener
        finally:
            task.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(task, return_exceptions=True)

    return listening


async def _read(sensor: Sensor, count: int | None = None) -> list[Any]:
    results: list[Any] = []
    async with asyncio.timeout(PATIENCE):
        async for reading in sensor.readings():
            results.append(reading.value)
            if len(results) == count:
                break
    return results


@pytest.fixture
def read() -> Callable[..., Awaitable[list[Any]]]:
    """Read one stream to its end."""
    return _read
