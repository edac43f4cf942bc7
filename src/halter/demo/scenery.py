"""What there is to watch: a service that goes down now and then, its log, and a file that nobody needs any more."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from halter.brain.together import together
from halter.core.clock import DAY, MINUTE, SECOND, Clock
from halter.core.errors import ConfigError

DOWN: Final = (12 * SECOND, 27 * SECOND)
"""When the service is down, in each of its rounds."""
ROUND: Final = 4 * MINUTE
LEFTOVER_AFTER: Final = 33 * SECOND
LEFTOVER: Final = "leftover.tmp"
AGAIN: Final = 7 * MINUTE
"""So long after a file comes the next one: by then nobody is asked about the last any more."""
TIMES: Final = 9
"""So often in all: whoever comes within the hour finds a question, and nobody is asked all night."""
UNSEEN: Final = 10 * SECOND
"""So long the file is gone before it comes again, so that it is seen to be new."""
AGE: Final = 40 * DAY
LOG_EVERY: Final = 10 * SECOND
LOG_BYTES: Final = 64_000
"""A log that is longer begins anew."""


def is_down(elapsed: int) -> bool:
    """Tell whether the service is down, so long after the demo began."""
    first, last = DOWN
    return first <= elapsed % ROUND < last


class Scenery:
    """Everything around the agent, in the agent's own folder and on this machine alone."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._began = clock.now()

    async def around(self, agent: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Be there while an agent runs: the service from the beginning on, the rest as time goes by."""
        async with await self._serving():
            await together([agent, self._log, self._leave])

    async def _serving(self) -> asyncio.Server:
        """Serve on any free port of this machine, and write down which."""
        try:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            (self._folder / "logs" / "service.port").write_text(str(server.sockets[0].getsockname()[1]), "utf-8")
        except OSError as error:
            raise ConfigError(f"The service that the demo's agent watches could not be started: {error}.") from error
        return server

    @property
    def _down(self) -> bool:
        return is_down(self._clock.now() - self._began)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            status = b"503 Service Unavailable" if self._down else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            await writer.drain()
        writer.close()

    async def _log(self) -> None:
        """Write a line now and then; while the service is down, into the log of errors. A full disk stops no demo."""
        while True:
            name, words = ("errors.log", "503") if self._down else ("service.log", "200")
            with suppress(OSError):
                _append(self._folder / "logs" / name, f"{self._clock.now() // SECOND} GET / {words}\n")
            await self._clock.sleep(LOG_EVERY)

    async def _leave(self) -> None:
        """Leave an old file behind, as programs do, and again for who was not there when the agent asked about it."""
        file = self._folder / "temp" / LEFTOVER
        if _made_before(file, self._clock.now() - AGAIN):
            _remove(file)
        await self._clock.sleep(LEFTOVER_AFTER)
        for _ in range(TIMES):
            _leave_old(file, self._clock.now() - AGE)
            await self._clock.sleep(AGAIN - UNSEEN)
            _remove(file)
            await self._clock.sleep(UNSEEN)


def _made_before(file: Path, moment: int) -> bool:
    with suppress(OSError):
        return file.stat().st_ctime * SECOND < moment
    return False


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _leave_old(file: Path, moment: int) -> None:
    with suppress(OSError):
        if not file.exists():
            file.write_text("The demo made this file, and made it look old. Nobody needs it.\n", "utf-8")
            os.utime(file, (moment / SECOND, moment / SECOND))


def _append(file: Path, line: str) -> None:
    size = file.stat().st_size if file.exists() else 0
    with file.open("a" if size < LOG_BYTES else "w", encoding="utf-8") as log:
        log.write(line)
