"""Somebody before a page: who they are, what they may do, and how the page follows what happens."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from nicegui import Client, ui

from halter.app import App
from halter.app.desk import Desk, Role, Who
from halter.core.errors import HalterError
from halter.server.dashboard.legible import legible
from halter.server.dashboard.live import Grown, Live

Refresh = Callable[[Grown], Awaitable[None]]
"""Shows what has changed."""


@dataclass(frozen=True, slots=True)
class Room:
    """One page, open in one browser."""

    app: App
    who: Who
    live: Live
    client: Client

    @property
    def desk(self) -> Desk:
        """A desk for one thing that somebody looks at or does: what they may is decided there, each time anew."""
        return Desk(self.app, self.who)

    @property
    def now(self) -> int:
        """The time."""
        return self.app.clock.now()

    def may(self, role: Role) -> bool:
        """Tell whether there is any use in showing a button."""
        return self.who.may(role)

    def say(self, sentence: str, *, bad: bool = False) -> None:
        """Tell the person something, as text."""
        if not self.client.is_deleted:
            with self.client:
                ui.notify(
                    legible(sentence, 600),
                    type="negative" if bad else "positive",
                    multi_line=True,
                    close_button="OK",
                    timeout=12_000 if bad else 6_000,
                )

    async def does(self, doing: Awaitable[str]) -> bool:
        """Do what the person asked for, and tell them what came of it."""
        try:
            self.say(await doing)
        except HalterError as error:
            self.say(str(error), bad=True)
            return False
        return True

    def follow(self, refresh: Refresh, lost: Callable[[str], None]) -> None:
        """Refresh the page when something has changed, from when its browser is there until it is gone.

        `lost` is told the sentence while that fails, and nothing when it works again.
        """
        running: list[asyncio.Task[None]] = []
        client: Any = self.client

        def begin() -> None:
            if not running:
                following = self._following(refresh, lost)
                running.append(asyncio.get_running_loop().create_task(following, name="halter-page"))

        def end() -> None:
            for task in running:
                task.cancel()

        client.on_connect(begin)
        client.on_delete(end)

    async def _following(self, refresh: Refresh, lost: Callable[[str], None]) -> None:
        # What happened before the browser was there, or while it was away, was shown by nobody.
        missed = True
        async with aclosing(self.live.grown()) as grown:
            async for each in grown:
                if self.client.has_socket_connection:
                    await self._refreshed(refresh, lost, Grown(everything=True) if missed else each)
                missed = not self.client.has_socket_connection

    async def _refreshed(self, refresh: Refresh, lost: Callable[[str], None], grown: Grown) -> None:
        try:
            with self.client:
                await refresh(grown)
        except HalterError as error:
            lost(str(error))
        else:
            lost("")
