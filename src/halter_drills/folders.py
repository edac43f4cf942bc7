"""The part of the race that is about folders: one store, and processes whose own `halter.yaml` says other caps.

One process has been running since before there was a policy. All of them together spend what the store's policy allows.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from halter.app import App, open_app
from halter.app.policy import unbound
from halter.config.agent import agent_of
from halter.config.load import load_bytes
from halter.config.resolve import resolve
from halter.core.clock import SECOND, SystemClock
from halter.core.events import SessionStarted
from halter.core.ids import WorkerId
from halter.core.limits import Caps, Spender, legs
from halter.core.ports import Lease
from halter.core.windows import window_at
from halter.dispatch.tending import tended
from halter.guard.flight import StillHeld
from halter.guard.judge import Asked
from halter.guard.purse import Truth
from halter.settings import read_settings
from halter.state.life import start
from halter.state.session import InFlight
from halter_drills.careless import ObeysItsFolder
from halter_drills.children import Child, Children, Pipe
from halter_drills.drill import Ground
from halter_drills.till import Till

CAP: Final = 120_000
"""What the store's policy allows all agents together, in micro-dollars."""
OWN_CAP: Final = 40_000
"""What the stricter file allows its own process."""
COST: Final = 10_000
WANTED: Final = 8
"""How many calls each process would make."""
AGENT: Final = "clerk"
AGENT_FILE: Final = b"name: clerk\nlimits: {max_cost_usd: none, max_cost_usd_per_day: none}\n"
FOLDERS: Final[Mapping[str, str]] = {
    "early": "",
    "first": "limits: {max_cost_usd_per_day: 0.12}\n",
    "bare": "",
    "looser": "limits: {max_cost_usd_per_day: 500}\n",
    "unlimited": "limits: {max_cost_usd_per_day: none}\nmode: FULL\n",
    "stricter": "limits: {max_cost_usd_per_day: 0.04}\n",
}
"""The process of `early` starts before the one of `first`, whose file becomes the policy; the others start after it."""


def spend_in_folders(ground: Ground, started: Children, *, broken: bool) -> tuple[list[str], Counter[str]]:
    """Let a process spend in each folder at the same time, and check what they spent together."""
    since = SystemClock().now()
    asyncio.run(_begin(ground))
    spenders: dict[Child, str] = {}
    for name, file in FOLDERS.items():
        folder = ground.folder / name
        folder.mkdir()
        if file:
            (folder / "halter.yaml").write_text(file)
        child = started.start(_spender, ground, folder, broken)
        child.hear()
        spenders[child] = name
    for child in spenders:
        child.tell("go")
    spent: Counter[str] = Counter()
    for child, cost in started.words():
        spent[spenders[child]] += cost
    days = len({window_at("day", since), window_at("day", SystemClock().now())})
    return _wrong(spent, days), Counter({"folders": len(FOLDERS)})


def _wrong(spent: Counter[str], days: int) -> list[str]:
    found: list[str] = []
    if spent.total() > days * CAP:
        who = ", ".join(f"{name} {cost}" for name, cost in spent.items())
        found.append(f"Folders: {spent.total()} micro-dollars were spent, and the store's policy allows {CAP} ({who}).")
    if spent.total() < CAP:
        found.append(f"Folders: only {spent.total()} of {CAP} micro-dollars were spent, and all wanted more.")
    if spent["stricter"] > days * OWN_CAP:
        found.append(f"Folders: {spent['stricter']} were spent where the file in the folder allows {OWN_CAP}.")
    return found


async def _begin(ground: Ground) -> None:
    store = ground.open()
    try:
        for name in FOLDERS:
            await store.commit(start(SessionStarted(session=name, agent=AGENT, kind="task", started_by="the drill")))
    finally:
        await store.close()


def _spender(pipe: Pipe, ground: Ground, folder: Path, broken: bool) -> None:  # noqa: FBT001 It is passed to a process.
    os.chdir(folder)
    asyncio.run(_spend(pipe, ground, WorkerId(folder.name), broken=broken))


async def _spend(pipe: Pipe, ground: Ground, worker: WorkerId, *, broken: bool) -> None:
    """Start as any process does that runs agents, and spend as soon as all others have started."""
    settings = read_settings({"HALTER_PERSON": "the drill"}, ground.folder, ground.url)
    async with open_app(settings) as app, tended(app.store, app.clock, worker):
        pipe.send(0)
        await asyncio.to_thread(pipe.recv)
        fleet = unbound(settings).fleet if broken else app.fleet
        caps = resolve(fleet, agent_of(load_bytes(AGENT_FILE, "agent.yaml"))).caps
        till = (ObeysItsFolder if broken else Till)(app.store, app.clock)
        (lease,) = await app.store.claim(worker, 1)
        for number in range(WANTED):
            if not await _bought(app, till, lease, caps, f"{worker}.{number}"):
                return
            pipe.send(COST)


async def _bought(app: App, till: Till, lease: Lease, caps: Caps, call: str) -> bool:
    """Hold, act, settle; tell whether there was money for it."""
    while True:
        now = app.clock.now()
        held = legs(caps, Spender(lease.session, AGENT), now, usd=COST)
        asked = Asked(call=call, tool="buy", arguments=b"", session=lease.session, agent=AGENT, now=now, legs=held)
        match await till.admit(lease, asked):
            case InFlight() as flight:
                await app.clock.sleep(SECOND // 100)
                await till.settle(lease, flight, Truth("ok", usd=COST))
                return True
            case StillHeld():
                pass
            case _:
                return False
