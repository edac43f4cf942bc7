"""The worst night: each incident lived through twice under one clock, by a plain loop and by Halter.

Time is virtual, the rest is not: the runtime is the one that `halter up` runs, with its triggers, its guard and its
journal. What Halter's side did and paid is read from its journal, and the plain loop's from its provider.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from halter.app.follow import heads
from halter.app.opened import App
from halter.app.policy import unbound
from halter.app.up import Up
from halter.core.clock import HOUR
from halter.core.events import RequestSettled
from halter.core.messages import Model
from halter.core.money import NOTHING, Usd, usd
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow, SpendRow
from halter.demo.plain import Loop
from halter.demo.provider import Provider, Served, price
from halter.demo.scenes import DESK, Scene, handbook
from halter.journal.checkpoints import Checkpointer
from halter.settings import Settings
from halter.testing.seedloop import START
from halter.testing.world import World

EVENING: Final = START + 22 * HOUR


class Bill(msgspec.Struct, frozen=True):
    """What was asked for, and what it came to."""

    requests: int = 0
    cost_usd: Usd = NOTHING


class Frame(msgspec.Struct, frozen=True):
    """A moment of an incident: the time, the part of it that has passed, and both bills so far."""

    at: int
    share: float
    without: Bill
    within: Bill


Watch = Callable[[Frame], None]
"""Somebody who watches an incident go by."""


class Lived(msgspec.Struct, frozen=True):
    """An incident that is over: both bills, and what Halter's journal holds of it."""

    scene: Scene
    without: Bill
    within: Bill
    events: Sequence[Stored]
    sessions: Sequence[SessionRow]


def lived(scene: Scene, watch: Watch) -> Lived:
    """Live through an incident. The same numbers come out every time."""
    with TemporaryDirectory(prefix="halter-night-") as home, World(orderly=True, threads=False, start=EVENING) as world:
        return world.run(_lived(scene, world, Path(home), watch))


async def _lived(scene: Scene, world: World, home: Path, watch: Watch) -> Lived:
    rates = price()
    without, within = (Provider(scene.script, rates, world.clock) for _ in range(2))
    desk = _furnished(scene, home / "without") / DESK
    plain = Loop(without, world.clock, handbook(scene.handbook), desk)
    halter, folder = _up(world, home, Served(within)), _furnished(scene, home / "with")
    for each in (
        scene.without(plain),
        halter.run([folder]),
        *(scene.meanwhile(place, world.clock) for place in (desk, folder / DESK)),
    ):
        world.spawn(each)
    until = world.now + scene.span
    while world.now < until:
        await world.advance(scene.frame)
        share = 1 - (until - world.now) / scene.span
        watch(Frame(world.now, share, Bill(without.requests, usd(without.usd)), await _spent(world)))
    events = await _events(world)
    sessions = await world.journal.ask(Query("all_sessions", SessionRow))
    return Lived(scene, Bill(without.requests, usd(without.usd)), billed(events), events, sessions)


def _furnished(scene: Scene, folder: Path) -> Path:
    folder.mkdir()
    (folder / "agent.yaml").write_text(scene.agent, "utf-8")
    (folder / "AGENTS.md").write_text(handbook(scene.handbook), "utf-8")
    scene.furnish(folder / DESK)
    return folder


def _up(world: World, home: Path, model: Model) -> Up:
    """Make the runtime, on a journal in memory, with nothing of the user's in reach."""
    key = home / "signing.key"
    settings = Settings("memory:", home / "checkpoints", key, "demo", home / "trust.json")
    checkpointer = Checkpointer(settings.checkpoints, key, "demo", world.clock.now)
    app = App(settings, world.clock, world.ids, world.journal, checkpointer, world.purse, {}, policy=unbound(settings))
    return Up(app, lambda _, __: None, chance=random.Random(world.seed), given={str(model.name): model})


async def _spent(world: World) -> Bill:
    spends = await world.journal.ask(Query("all_spends", SpendRow))
    return Bill(sum(spend.input_tokens > 0 for spend in spends), usd(sum(spend.usd for spend in spends)))


async def _events(world: World) -> Sequence[Stored]:
    return [stored for stream, _ in sorted(await heads(world.journal)) for stored in await world.events(stream)]


def billed(events: Sequence[Stored]) -> Bill:
    """Add up what a journal says was asked and paid."""
    settled = [stored.event for stored in events if isinstance(stored.event, RequestSettled)]
    return Bill(len(settled), usd(sum(event.charge.usd for event in settled if event.charge is not None)))
