"""An older copy of the store is put back: nothing runs on it until a person accepts what is missing.

An agent spends its day's cap, a person denies a call and halts the fleet. Copies of the store are made at every moment
in between, also in the middle of a call. Each is put back, while the folder of checkpoints stays, and the work is
started again: another payment is tried, whatever question is open is answered with yes, and its session gone on with.
What ran is counted outside, in a file that the tools themselves write; neither the store nor its checkpoints are asked.
"""

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from halter.app.agent import Assembled
from halter.app.desk import Desk, Who, decisions, steering, stores
from halter.app.opened import App, open_app
from halter.app.playing import begin, go_on
from halter.core.errors import StoreUnusable
from halter.core.ids import SessionId
from halter.core.limits import Cap, Caps
from halter.core.money import dollars, shown
from halter.core.playbook import Playbook, Step
from halter.guard.approvals import needs_you
from halter.guard.chokepoint import Answer, NeedsPerson
from halter.journal.verify import verify
from halter.settings import Settings
from halter.tools.tool import tool
from halter_drills.agents import NO_SECRETS, PERSON, policy_of
from halter_drills.broken import DrillBroken
from halter_drills.copies import Copy, copies_of, remove_store
from halter_drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter_drills.lanes import NO_LEASE

ROUNDS: Final = 2
PRICE: Final = dollars("0.06")
CAP: Final = 2 * PRICE
MOST_LOOKS: Final = 2
PATIENCE: Final = 2
"""Seconds."""
DENIED: Final = 3
"""The order whose call a person denies."""

What = Literal["look", "pay", "wire"]


class AskedAgain(Exception):
    """A session waits for one more answer: nobody is there to give it."""


class Effect(msgspec.Struct, frozen=True):
    """One thing that a tool did to the outside world."""

    tool: What
    order: int


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Shop:
    """The outside world: a file that counts what was done. In the middle of a payment, `meanwhile` happens."""

    file: Path
    meanwhile: Callable[[], None] = field(default=_nothing)

    def effects(self) -> list[Effect]:
        """Read the count."""
        return [msgspec.json.decode(line, type=Effect) for line in self.file.read_bytes().splitlines()]

    def agent(self) -> Assembled:
        """Make the agent: it may look for nothing, pay up to its cap, and wire what a person agrees to."""

        async def look(order: int) -> str:
            return self._did("look", order)

        async def pay(order: int) -> str:
            self.meanwhile()
            return self._did("pay", order)

        async def wire(order: int) -> str:
            return self._did("wire", order)

        made = (
            tool(look, effect="read", level="SAFE"),
            tool(pay, cost=PRICE / dollars(1), level="SAFE"),
            tool(wire, level="RESTRICTED"),
        )
        policy = msgspec.structs.replace(
            policy_of(), caps=Caps(session=Cap(None), agent=(Cap(CAP, "month"),), fleet=())
        )
        return Assembled(policy=policy, tools={each.spec.name: each for each in made}, secrets=NO_SECRETS)

    def _did(self, what: What, order: int) -> str:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(Effect(what, order)) + b"\n")
        return "done"


@dataclass(frozen=True, slots=True)
class Place:
    """A store with its checkpoints, the outside world, and whether the look at the start is left out."""

    ground: Ground
    folder: Path
    shop: Shop
    blind: bool = False

    @property
    def settings(self) -> Settings:
        """Keep the checkpoints outside of the store."""
        return Settings(self.ground.url, self.checkpoints, self.folder / "signing.key", PERSON, self.folder / "trust")

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def known(self) -> dict[str, bytes]:
        """Read all that the checkpoints say."""
        return {str(path): path.read_bytes() for path in self.checkpoints.rglob("*") if path.is_file()}


def run(setting: Setting) -> Result:
    """Live through some days, each with other copies, and put every copy back."""
    rounds, violations, cases = setting.seeds or ROUNDS, list[str](), 0
    refusals = 0
    with own_store(setting) as ground:
        for number in range(rounds):
            setting.progress(number, rounds, "living")
            folder = ground.folder / f"round-{number}"
            folder.mkdir()
            shop = Shop(folder / "effects")
            shop.file.touch()
            place = Place(ground, folder, shop, setting.teeth)
            ground.fresh()
            copies = asyncio.run(_lived(place, random.Random(number)))
            whole = max(copy.events for copy in copies)
            shutil.copytree(place.checkpoints, folder / "kept")
            for copy in (*reversed(copies), Copy("at the end", "deleted", 0, lambda: remove_store(ground))):
                cases += 1
                refusals += copy.events < whole
                violations += asyncio.run(_tried(place, copy, missing=copy.events < whole))
        setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "older": refusals, "newest": cases - refusals}
    return result(DRILL.name, ground.kind, cases, violations, counts)


async def _lived(place: Place, chance: random.Random) -> list[Copy]:
    """Spend the cap, deny a call and halt the fleet, and make copies on the way; the last ones have everything."""
    shop, made, agent = place.shop, list[Copy](), place.shop.agent()

    def copied(moment: str) -> None:
        made.extend(copies_of(place.ground, moment, place.folder / "copies" / str(len(made))))

    async with open_app(place.settings, lease=NO_LEASE) as app:
        await _looks(app, agent, chance)
        copied("before anything was spent")
        await _played(app, agent, "pay", 1)
        await _looks(app, agent, chance)
        copied("after the first payment")
        shop.meanwhile = lambda: copied("in the middle of the second payment")
        await _played(app, agent, "pay", 2)
        shop.meanwhile = _nothing
        copied("after the second payment")
        await _denied(app, agent, lambda: copied("while the question waited"))
        await _looks(app, agent, chance)
        copied("after the call was denied")
        await steering.halt(Desk(app, Who(PERSON)), "fleet", "the drill")
        copied("after the fleet was halted")
    if sum(each.tool == "pay" for each in shop.effects()) != CAP // PRICE:
        raise DrillBroken("The payments of the drill were not made, so that nothing could be paid twice.")
    return made


async def _looks(app: App, agent: Assembled, chance: random.Random) -> None:
    for _ in range(chance.randint(0, MOST_LOOKS)):
        await _played(app, agent, "look", 0)


async def _played(app: App, agent: Assembled, what: What, order: int) -> None:
    await go_on(app, agent, await begin(app, agent, _playbook(what, order), {}), _unseen)


async def _denied(app: App, agent: Assembled, asked: Callable[[], None]) -> None:
    """Ask for a call, and let a person say no."""
    session = await begin(app, agent, _playbook("wire", DENIED), {})
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def waits(needed: NeedsPerson, _: object) -> None:
        if not waiting.done():
            waiting.set_result(needed.decision)

    async with asyncio.TaskGroup() as group:
        group.create_task(go_on(app, agent, session, _unseen, waits))
        decision = await waiting
        asked()
        await decisions.deny(Desk(app, Who(PERSON)), decision)


def _playbook(what: What, order: int) -> Playbook:
    return Playbook((Step(what, msgspec.json.encode({"order": order})),), "the drill")


def _unseen(_: Step, __: Answer) -> None:
    """Show no step to anybody."""


async def _tried(place: Place, copy: Copy, *, missing: bool) -> list[str]:
    """Put a copy back, start again, and say what was done that must not be."""
    shutil.rmtree(place.checkpoints)
    shutil.copytree(place.folder / "kept", place.checkpoints)
    copy.put_back()
    told = f"A copy made {copy.moment}, {copy.manner}:"
    known, before = place.known(), len(place.shop.effects())
    refused = await _started_again(place)
    wrong = [f"{told} {each}" for each in _done_wrongly(place.shop.effects()[before:])]
    if refused is not missing and not place.blind:
        wrong.append(f"{told} {'nothing is missing, and it was refused' if refused else 'it was not refused'}.")
    if missing and place.known() != known:
        wrong.append(f"{told} checkpoints were written of it.")
    if refused and missing:
        wrong += [f"{told} {each}" for each in await _accepted(place, anew=copy.manner == "deleted")]
    return wrong


async def _started_again(place: Place) -> bool:
    """Start again as if nothing had happened; tell whether the store was refused."""
    agent = place.shop.agent()
    try:
        async with open_app(place.settings, lease=NO_LEASE, despite_doubt=place.blind) as app:
            for asked in await needs_you(app.store, app.clock.now()):
                await decisions.approve(Desk(app, Who("bob")), asked.decision, decisions.Answer())
                with suppress(AskedAgain):
                    await go_on(app, agent, SessionId(asked.session), _unseen, _asked_again)
            for what in ("look", "pay"):
                # A payment that the copy knows to be under way may keep the others waiting for their money.
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE):
                        await _played(app, agent, what, 4)
    except StoreUnusable:
        return True
    return False


def _asked_again(_: NeedsPerson, __: object) -> None:
    raise AskedAgain


def _done_wrongly(since: Sequence[Effect]) -> list[str]:
    """Hold what ran against what people said and what the cap was: it was used up, and everything was halted."""
    wrong: list[str] = []
    if paid := sum(each.tool == "pay" for each in since):
        wrong.append(f"{shown(CAP + PRICE * paid)} were spent under a cap of {shown(CAP)}.")
    if Effect("wire", DENIED) in since:
        wrong.append(f"wire {DENIED} was denied, and ran.")
    return [*wrong, *(f"{each.tool} {each.order} ran though the fleet was halted." for each in since)]


async def _accepted(place: Place, *, anew: bool) -> list[str]:
    """Let a person accept the copy: work goes on, and nothing is found altered."""
    async with open_app(place.settings, lease=NO_LEASE, despite_doubt=True) as app:
        if app.doubt is None:
            return ["it was refused, and there was nothing to accept."]
        lacks = app.doubt.lacks()
        await stores.accept(Desk(app, Who(PERSON)), "the drill")
    wrong = [] if anew or any(char.isdigit() for char in lacks) else [f"it was not said what is missing: {lacks}"]
    before, agent = len(place.shop.effects()), place.shop.agent()
    try:
        async with open_app(place.settings, lease=NO_LEASE) as app:
            await _played(app, agent, "look", 5)
            report = await verify(app.store, place.checkpoints)
    except StoreUnusable as error:
        return [*wrong, f"a person accepted it, and it was refused: {error}"]
    if len(place.shop.effects()) != before + 1:
        wrong.append("a person accepted it, and nothing ran.")
    return [*wrong, *(f"a person accepted it, and still: {each.sentence}" for each in report.findings)]


DRILL: Final = Drill(
    "restore",
    "On an older copy of the store nothing runs until a person accepts what is missing.",
    run,
)
