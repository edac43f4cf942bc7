"""An older copy of the store is restored: nothing runs on it until a person accepts what is missing.

An agent spends its cap, a person denies a call and halts the fleet. The store is copied at every moment in between,
also in the middle of a call. Each copy is restored, while the checkpoints stay, and work starts again: another payment
is tried, each pending decision is approved, and its session resumed. The tools count their effects in a file, and the
drill judges by that file alone.
"""

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.agent_spec import Playbook, Step
from halter.core.errors import StoreUnusable
from halter.core.ids import SessionId
from halter.core.money import Cap, Caps, format_micros, usd_to_micros
from halter.guard.approvals import list_pending_decisions
from halter.guard.tool_door import ApprovalRequired
from halter.journal.verify import verify
from halter.operations import control, decisions
from halter.operations.desk import Actor, Principal
from halter.runtime.assemble import AssembledAgent
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.sessions import begin_playbook, resume_playbook
from halter.settings import Settings
from halter.tools.function_tool import tool
from halter_drills.drill import (
    Drill,
    DrillBroken,
    DrillResult,
    Setting,
    Workspace,
    connection,
    own_store,
    result,
    sqlite_file,
    unseen,
)
from halter_drills.faults import NO_LEASE
from halter_drills.workload import NO_SECRETS, PERSON, EffectFile, ToolEffect, policy_of

_TABLES: Final = (
    "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() ORDER BY table_name"
)


class Copy(msgspec.Struct, frozen=True):
    """One copy: when and how it was made, how many events it has, and a function that restores it."""

    moment: str
    manner: str
    events: int
    put_back: Callable[[], None]


def copies_of(workspace: Workspace, moment: str, folder: Path) -> list[Copy]:
    """Copy a store in every way there is for its kind. Nothing may write to it meanwhile."""
    if workspace.kind == "postgresql":
        return [_dump(workspace, moment)]
    made: list[Copy] = []
    for number, (manner, copy) in enumerate(_MANNERS.items()):
        place = folder / str(number)
        place.mkdir(parents=True)
        copy(sqlite_file(workspace.url), place)
        made.append(Copy(moment, manner, _count_events(place / _NAME), _puts_files(workspace, place)))
    return made


_NAME: Final = "drill.db"


def _copy_with_sqlite(store: Path, folder: Path) -> None:
    with closing(sqlite3.connect(store)) as one, closing(sqlite3.connect(folder / _NAME)) as other:
        one.backup(other)


def _copy_with_log(store: Path, folder: Path) -> None:
    for name in (_NAME, f"{_NAME}-wal"):
        if store.with_name(name).exists():
            shutil.copy(store.with_name(name), folder / name)


_MANNERS: Final[Mapping[str, Callable[[Path, Path], object]]] = {
    "by SQLite": _copy_with_sqlite,
    "as files, with -wal": _copy_with_log,
    "as a file, without -wal": lambda store, folder: shutil.copy(store, folder / _NAME),
}


def _count_events(copy: Path) -> int:
    """Count the events of a copy, on another copy: reading it would checkpoint its log."""
    looked = copy.parent / "looked"
    looked.mkdir()
    for file in copy.parent.glob(f"{_NAME}*"):
        shutil.copy(file, looked)
    with closing(sqlite3.connect(looked / _NAME)) as database:
        try:
            ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()
        except sqlite3.OperationalError:
            events = 0  # Without its log, a new store has no tables yet.
    shutil.rmtree(looked)
    return int(events)


def _puts_files(workspace: Workspace, folder: Path) -> Callable[[], None]:
    def put_back() -> None:
        workspace.fresh()
        for file in folder.iterdir():
            shutil.copy(file, sqlite_file(workspace.url).with_name(file.name))

    return put_back


def _dump(workspace: Workspace, moment: str) -> Copy:
    """Copy every table, as a dump does."""
    kept: dict[str, bytes] = {}
    with closing(connection(workspace.url)) as database:
        for (table,) in database.execute(_TABLES).fetchall():
            with cast("Any", database).cursor().copy(f'COPY "{table}" TO STDOUT (FORMAT BINARY)'.encode()) as data:
                kept[table] = b"".join(bytes(part) for part in data)
        ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()

    def put_back() -> None:
        with closing(connection(workspace.url)) as database, cast("Any", database).transaction():
            named = ", ".join([f'"{table}"' for table in kept])
            database.execute(f"TRUNCATE {named}".encode())
            for table, rows in kept.items():
                with cast("Any", database).cursor().copy(f'COPY "{table}" FROM STDIN (FORMAT BINARY)'.encode()) as into:
                    into.write(rows)

    return Copy(moment, "as a dump", int(events), put_back)


ROUNDS: Final = 2
PRICE: Final = usd_to_micros("0.06")
CAP: Final = 2 * PRICE
MOST_LOOKS: Final = 2
PATIENCE: Final = 2
"""Seconds."""
DENIED: Final = 3
"""The order whose call a person denies."""

What = Literal["look", "pay", "wire"]


class AskedAgain(Exception):
    """A session waits for one more answer, which does not come."""


@dataclass(slots=True)
class RestoreShop(EffectFile):
    """What the agent acts on. `meanwhile` is called in the middle of a payment."""

    meanwhile: Callable[[], object] = field(default=str)

    def agent(self) -> AssembledAgent:
        """Make an agent that may look freely, pay up to its cap, and wire with approval."""

        async def look(order: int) -> str:
            return self.record("look", order)

        async def pay(order: int) -> str:
            self.meanwhile()
            return self.record("pay", order)

        async def wire(order: int) -> str:
            return self.record("wire", order)

        made = (
            tool(look, effect="read", level="SAFE"),
            tool(pay, cost=PRICE / usd_to_micros(1), level="SAFE"),
            tool(wire, level="RESTRICTED"),
        )
        policy = msgspec.structs.replace(
            policy_of(), caps=Caps(session=Cap(None), agent=(Cap(CAP, "month"),), fleet=())
        )
        return AssembledAgent(policy=policy, tools={each.spec.name: each for each in made}, secrets=NO_SECRETS)


class RestoredStore(msgspec.Struct, frozen=True):
    """A store with its checkpoints and the outside world. `blind` skips the check at the start: the teeth."""

    workspace: Workspace
    folder: Path
    shop: RestoreShop
    blind: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(
            self.workspace.url, self.checkpoints, self.folder / "signing.key", PERSON, self.folder / "trust"
        )

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def read_checkpoints(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.checkpoints.rglob("*") if path.is_file()}


def run(setting: Setting) -> DrillResult:
    rounds, violations, cases = setting.seeds or ROUNDS, list[str](), 0
    refusals = 0
    with own_store(setting) as workspace:
        for number in range(rounds):
            setting.progress(number, rounds, "living")
            folder = workspace.folder / f"round-{number}"
            folder.mkdir()
            shop = RestoreShop(folder / "effects")
            shop.file.touch()
            place = RestoredStore(workspace, folder, shop, setting.teeth)
            workspace.fresh()
            copies = asyncio.run(_spend_and_deny(place, random.Random(number)))
            whole = max(copy.events for copy in copies)
            shutil.copytree(place.checkpoints, folder / "kept")
            for copy in (*reversed(copies), Copy("at the end", "deleted", 0, workspace.fresh)):
                cases += 1
                refusals += copy.events < whole
                violations += asyncio.run(_try_copy(place, copy, missing=copy.events < whole))
        setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "older": refusals, "newest": cases - refusals}
    return result(DRILL.name, workspace.kind, cases, violations, counts)


async def _spend_and_deny(place: RestoredStore, rng: random.Random) -> list[Copy]:
    """Spend the cap, deny a call, halt the fleet, and make copies on the way; the last ones are complete."""
    shop, made, agent = place.shop, list[Copy](), place.shop.agent()

    def copy_store(moment: str) -> None:
        made.extend(copies_of(place.workspace, moment, place.folder / "copies" / str(len(made))))

    async with open_runtime(place.settings, lease=NO_LEASE) as app:
        await _looks(app, agent, rng)
        copy_store("before anything was spent")
        await _play(app, agent, "pay", 1)
        await _looks(app, agent, rng)
        copy_store("after the first payment")
        shop.meanwhile = lambda: copy_store("in the middle of the second payment")
        await _play(app, agent, "pay", 2)
        shop.meanwhile = str
        copy_store("after the second payment")
        await _deny(app, agent, lambda: copy_store("while the question waited"))
        await _looks(app, agent, rng)
        copy_store("after the call was denied")
        await control.halt(Actor(app, Principal(PERSON)), "fleet", "the drill")
        copy_store("after the fleet was halted")
    if sum(each.tool == "pay" for each in shop.effects()) != CAP // PRICE:
        raise DrillBroken("The payments of the drill were not made, so nothing could be paid twice.")
    return made


async def _looks(app: Runtime, agent: AssembledAgent, rng: random.Random) -> None:
    for _ in range(rng.randint(0, MOST_LOOKS)):
        await _play(app, agent, "look", 0)


async def _play(app: Runtime, agent: AssembledAgent, what: What, order: int) -> None:
    await resume_playbook(app, agent, await begin_playbook(app, agent, _playbook(what, order), {}), unseen)


async def _deny(app: Runtime, agent: AssembledAgent, asked: Callable[[], None]) -> None:
    session = await begin_playbook(app, agent, _playbook("wire", DENIED), {})
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def waits(needed: ApprovalRequired, _: object) -> None:
        if not waiting.done():
            waiting.set_result(needed.decision)

    async with asyncio.TaskGroup() as group:
        group.create_task(resume_playbook(app, agent, session, unseen, waits))
        decision = await waiting
        asked()
        await decisions.deny(Actor(app, Principal(PERSON)), decision)


def _playbook(what: What, order: int) -> Playbook:
    return Playbook((Step(what, msgspec.json.encode({"order": order})),), "the drill")


async def _try_copy(place: RestoredStore, copy: Copy, *, missing: bool) -> list[str]:
    """Restore a copy, start again, and list what must not have happened."""
    shutil.rmtree(place.checkpoints)
    shutil.copytree(place.folder / "kept", place.checkpoints)
    copy.put_back()
    where = f"A copy made {copy.moment}, {copy.manner}:"
    known, before = place.read_checkpoints(), len(place.shop.effects())
    refused = await _start_again(place)
    wrong = [f"{where} {each}" for each in _find_wrongly_done(place.shop.effects()[before:])]
    if refused is not missing and not place.blind:
        wrong.append(f"{where} {'nothing is missing, and it was refused' if refused else 'it was not refused'}.")
    if missing and place.read_checkpoints() != known:
        wrong.append(f"{where} checkpoints were written for it.")
    if refused and missing:
        wrong += [f"{where} {each}" for each in await _accept(place, anew=copy.manner == "deleted")]
    return wrong


async def _start_again(place: RestoredStore) -> bool:
    """Start again as if nothing had happened; return whether the store was refused."""
    agent = place.shop.agent()

    def asked_again(*_: object) -> None:
        raise AskedAgain

    try:
        async with open_runtime(place.settings, lease=NO_LEASE, despite_doubt=place.blind) as app:
            for decision in await list_pending_decisions(app.store, app.clock.now()):
                await decisions.approve(Actor(app, Principal("bob")), decision.decision, decisions.ApprovalTerms())
                with suppress(AskedAgain):
                    await resume_playbook(app, agent, SessionId(decision.session), unseen, asked_again)
            for what in ("look", "pay"):
                # A payment that is under way in the copy may hold the money of the others.
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE):
                        await _play(app, agent, what, 4)
    except StoreUnusable:
        return True
    return False


def _find_wrongly_done(since: Sequence[ToolEffect]) -> list[str]:
    """List what must not have run: the cap was used up, a call was denied, and the fleet was halted."""
    wrong: list[str] = []
    if paid := sum(each.tool == "pay" for each in since):
        wrong.append(f"{format_micros(CAP + PRICE * paid)} were spent under a cap of {format_micros(CAP)}.")
    if ToolEffect("wire", DENIED) in since:
        wrong.append(f"wire {DENIED} was denied, and ran.")
    return [*wrong, *(f"{each.tool} {each.order} ran though the fleet was halted." for each in since)]


async def _accept(place: RestoredStore, *, anew: bool) -> list[str]:
    """Accept the copy as a person: work continues, and verification finds nothing."""
    async with open_runtime(place.settings, lease=NO_LEASE, despite_doubt=True) as app:
        if app.doubt is None:
            return ["it was refused, and there was nothing to accept."]
        lacks = app.doubt.describe_missing()
        await control.accept(Actor(app, Principal(PERSON)), "the drill")
    wrong = [] if anew or any(char.isdigit() for char in lacks) else [f"it was not said what is missing: {lacks}"]
    before, agent = len(place.shop.effects()), place.shop.agent()
    try:
        async with open_runtime(place.settings, lease=NO_LEASE) as app:
            await _play(app, agent, "look", 5)
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
