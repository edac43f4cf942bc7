"""Agents of folders that run by themselves in a world: as `halter up` would run them, in virtual time."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from halter.config.trust import digest_folder
from halter.core.clock import MINUTE
from halter.core.events import (
    AnyEvent,
    GuardrailTriggered,
    SessionEnded,
    SessionParked,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Unknown,
)
from halter.core.ids import inbox_stream, session_stream
from halter.core.messages import Model, Prompt
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.guard.halts import Departures
from halter.models.scripted import Scripted
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.runtime.worker import PulseListener
from halter.settings import read_settings
from halter.testing.world import VIRTUAL_START, World
from tests.story.dispatching import mode_of

CALM = pytest.mark.world(lease=30 * MINUTE)
"""Where no process dies, long leases spare a quiet day six thousand heartbeats."""


class Fleet:
    """One process that runs agents, and the disk that it leaves behind."""

    def __init__(self, world: World, home: Path, fleet: str = "", *, sturdy: bool = False) -> None:
        """One that is sturdy cannot be crashed, and lives faster."""
        self.world = world
        self.sturdy = sturdy
        self.home = home
        self.told: list[tuple[str, str]] = []
        self.pulses: list[tuple[str, str, Mapping[str, Any]]] = []
        environ = {"HALTER_TRUST": str(home / "trust.json"), "USER": "ada"}
        if fleet:
            (home / "halter.yaml").write_text(fleet)
            environ["HALTER_FLEET"] = str(home / "halter.yaml")
        self.environ = environ
        self.settings = read_settings(environ, home, "memory:")
        self.up: Supervisor | None = None
        self.departures = Departures()

    def agent(self, name: str, output: str, tools: str = "", **files: str) -> Path:
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        (folder / "agent.yaml").write_text(
            f"name: {name}\nautonomy: {{enabled: true}}\n{output}"
            if "autonomy:" not in output
            else f"name: {name}\n{output}"
        )
        for file, text in files.items():
            (folder / file.replace("_yaml", ".yaml")).write_text(text)
        if tools:
            (folder / "tools.py").write_text(tools)
            self.trust(folder)
        return folder

    def trust(self, folder: Path) -> None:
        open_trust(self.settings).trust(folder, digest_folder(folder), "ada", self.world.now)

    @property
    def app(self) -> Runtime:
        store = cast("Any", self.world.journal if self.sturdy else self.world.store)
        world, policy = self.world, use_local_policy(self.settings)
        return Runtime(
            self.settings,
            world.clock,
            world.ids,
            store,
            cast("Any", None),
            world.ledger,
            self.environ,
            policy=policy,
            departures=self.departures,
        )

    def start(
        self, *folders: Path, pulse: PulseListener | None = None, given: Mapping[str, Model] | None = None
    ) -> asyncio.Task[None]:
        """Start the process; models that are given replace those of the agents' files."""

        def tell(agent: str, sentence: str) -> None:
            self.told.append((agent, sentence))

        def note(session: str, sensor: str, fields: Mapping[str, Any]) -> None:
            self.pulses.append((session, sensor, fields))

        self.up = Supervisor(
            self.app,
            tell,
            pulse or note,
            random.Random(self.world.seed),
            model_overrides=given,
            mode=mode_of(self.world),
        )
        return self.world.spawn(self.up.run(folders))

    async def row(self, session: str) -> SessionRow:
        (row,) = await self.world.journal.ask(Query("session", SessionRow, {"session": session}))
        return row

    async def events(self, session: str) -> list[Stored]:
        return await self.world.events(session_stream(session))

    async def inbox(self, session: str) -> list[Stored]:
        return await self.world.events(inbox_stream(session))

    async def sessions(self, agent: str) -> list[SessionRow]:
        rows = await self.world.journal.ask(Query("all_sessions", SessionRow))
        return [row for row in rows if row.agent == agent]

    def prompts(self, agent: str) -> list[Prompt]:
        """What the agent's own model was asked, in this process."""
        assert self.up is not None
        model = self.up.agents[agent].context.models.get("scripted:script")
        assert isinstance(model, Scripted)
        return model.requests

    async def kinds(self, session: str) -> list[str]:
        return [event.kind for event in await self.events(session)]


def moment(at: int, start: int = VIRTUAL_START) -> str:
    """A time since the beginning, as it is read."""
    seconds = (at - start) // 1_000_000
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def rhythm(events: list[Stored], start: int = VIRTUAL_START) -> list[str]:
    """The turns, sleeps, wakes, skips and guardrails of a session, and its end, in words."""
    found = ((stored.at, _said(stored.event, start)) for stored in events)
    return [f"{moment(at, start)} {text}" for at, text in found if text]


def _said(event: AnyEvent | Unknown, start: int) -> str:
    match event:
        case TurnStarted():
            return f"turn {event.turn}"
        case TurnEnded():
            return f"{event.why}" + (f" {event.yielded.mode}" if event.yielded else "")
        case TurnSkipped():
            return f"skipped by {event.stage}"
        case SessionParked():
            return f"{event.state} until {moment(event.wake_at, start)}" if event.wake_at else event.state
        case SessionWoken():
            return f"woken by {event.cause}"
        case GuardrailTriggered():
            return f"held back by {event.guardrail}"
        case SessionEnded():
            return f"{event.state}, {event.terminal_reason}"
        case _:
            return ""
