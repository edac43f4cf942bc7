"""On a restored older copy of the store, nothing runs until a person accepts the loss.

An agent spends its cap, a person denies a call and halts the fleet. The store is copied at every moment in between,
also in the middle of a call. Each copy is restored without the checkpoints, and work starts again: another payment is
tried, each pending decision is approved, and its session resumed. The tools record their effects in a file, and the
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

from halter.config.definition import AgentDefinition
from halter.core.errors import StoreUnusable
from halter.core.ids import SessionId
from halter.core.money import Cap, Caps, format_exact_micros, usd_to_micros
from halter.guard.approvals import list_pending_decisions
from halter.guard.call_answer import ApprovalRequired
from halter.journal.verify import verify_store
from halter.operations import control, decisions, journal
from halter.operations.actor import Actor, Principal
from halter.runtime.agent_runtime import AgentRuntime, make_agent_runtime
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_start import begin_playbook, resume_playbook
from halter.settings import Settings
from halter.spec.playbook import Playbook, Step
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
    """One copy: its moment, method and number of events, and a function that restores it."""

    moment: str
    manner: str
    events: int
    restore: Callable[[], None]


def copies_of(workspace: Workspace, moment: str, folder: Path) -> list[Copy]:
    """Copy a store with every method for its kind. Nothing may write to the store meanwhile."""
    if workspace.kind == "postgresql":
        return [_dump(workspace, moment)]
    copies: list[Copy] = []
    for number, (manner, copy) in enumerate(_MANNERS.items()):
        target = folder / str(number)
        target.mkdir(parents=True)
        copy(sqlite_file(workspace.url), target)
        copies.append(Copy(moment, manner, _count_events(target / _NAME), _make_file_restore(workspace, target)))
    return copies


_NAME: Final = "drill.db"


def _copy_with_sqlite(store: Path, folder: Path) -> None:
    with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(folder / _NAME)) as target:
        source.backup(target)


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
    """Count the events of a copy in a second copy, since reading would checkpoint the WAL."""
    scratch = copy.parent / "looked"
    scratch.mkdir()
    for file in copy.parent.glob(f"{_NAME}*"):
        shutil.copy(file, scratch)
    with closing(sqlite3.connect(scratch / _NAME)) as database:
        try:
            ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()
        except sqlite3.OperationalError:
            events = 0  # Without its WAL, a new store has no tables yet.
    shutil.rmtree(scratch)
    return int(events)


def _make_file_restore(workspace: Workspace, folder: Path) -> Callable[[], None]:
    def restore() -> None:
        workspace.fresh()
        for file in folder.iterdir():
            shutil.copy(file, sqlite_file(workspace.url).with_name(file.name))

    return restore


def _dump(workspace: Workspace, moment: str) -> Copy:
    """Copy every table, as a dump does."""
    rows_by_table: dict[str, bytes] = {}
    with closing(connection(workspace.url)) as database:
        for (table,) in database.execute(_TABLES).fetchall():
            with cast("Any", database).cursor().copy(f'COPY "{table}" TO STDOUT (FORMAT BINARY)'.encode()) as data:
                rows_by_table[table] = b"".join(bytes(chunk) for chunk in data)
        ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()

    def restore() -> None:
        with closing(connection(workspace.url)) as database, cast("Any", database).transaction():
            tables = ", ".join([f'"{table}"' for table in rows_by_table])
            database.execute(f"TRUNCATE {tables}".encode())
            for table, rows in rows_by_table.items():
                with (
                    cast("Any", database).cursor().copy(f'COPY "{table}" FROM STDIN (FORMAT BINARY)'.encode()) as writer
                ):
                    writer.write(rows)

    return Copy(moment, "as a dump", int(events), restore)


ROUNDS: Final = 2
PRICE: Final = usd_to_micros("0.06")
CAP: Final = 2 * PRICE
MAX_READS: Final = 2
PAYMENT_TIMEOUT_SECONDS: Final = 2
DENIED: Final = 3
"""The order whose call a person denies."""

ShopTool = Literal["inspect", "pay", "wire"]


class AnswerRequired(Exception):
    """A session waits for another answer, which nobody gives."""


@dataclass(slots=True)
class RestoreShop(EffectFile):
    """The outside world of the agent. `meanwhile` is called in the middle of a payment."""

    meanwhile: Callable[[], object] = field(default=str)

    def agent(self, app: Runtime) -> AgentRuntime:
        """Make an agent that can inspect freely, pay up to its cap, and wire with approval."""

        async def inspect(order: int) -> str:
            return self.record("inspect", order)

        async def pay(order: int) -> str:
            self.meanwhile()
            return self.record("pay", order)

        async def wire(order: int) -> str:
            return self.record("wire", order)

        tools = (
            tool(inspect, effect="read", level="SAFE"),
            tool(pay, cost=PRICE / usd_to_micros(1), level="SAFE"),
            tool(wire, level="RESTRICTED"),
        )
        policy = msgspec.structs.replace(
            policy_of(), caps=Caps(session=Cap(None), agent=(Cap(CAP, "month"),), fleet=())
        )
        tools_by_name = {each.spec.name: each for each in tools}
        return make_agent_runtime(app, AgentDefinition(policy=policy), tools_by_name, NO_SECRETS)


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
            setting.progress(number, rounds, "running the agent")
            folder = workspace.folder / f"round-{number}"
            folder.mkdir()
            shop = RestoreShop(folder / "effects")
            shop.file.touch()
            restored_store = RestoredStore(workspace, folder, shop, setting.teeth)
            workspace.fresh()
            copies = asyncio.run(_spend_and_deny(restored_store, random.Random(number)))
            complete_count = max(copy.events for copy in copies)
            shutil.copytree(restored_store.checkpoints, folder / "kept")
            for copy in (*reversed(copies), Copy("at the end", "deleted", 0, workspace.fresh)):
                cases += 1
                refusals += copy.events < complete_count
                violations += asyncio.run(_try_copy(restored_store, copy, missing=copy.events < complete_count))
        setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "older": refusals, "newest": cases - refusals}
    return result(DRILL.name, workspace.kind, cases, violations, counts)


async def _spend_and_deny(restored_store: RestoredStore, rng: random.Random) -> list[Copy]:
    """Spend the cap, deny a call, halt the fleet, and copy the store after each. The last copies are complete."""
    shop, copies = restored_store.shop, list[Copy]()

    def copy_store(moment: str) -> None:
        copies.extend(copies_of(restored_store.workspace, moment, restored_store.folder / "copies" / str(len(copies))))

    async with open_runtime(restored_store.settings, lease=NO_LEASE) as app:
        agent = shop.agent(app)
        await _looks(agent, rng)
        copy_store("before anything was spent")
        await _play(agent, "pay", 1)
        await _looks(agent, rng)
        copy_store("after the first payment")
        shop.meanwhile = lambda: copy_store("in the middle of the second payment")
        await _play(agent, "pay", 2)
        shop.meanwhile = str
        copy_store("after the second payment")
        await _deny(agent, lambda: copy_store("while the question waited"))
        await _looks(agent, rng)
        copy_store("after the call was denied")
        await control.halt(Actor(app, Principal(PERSON)), "fleet", "the drill")
        copy_store("after the fleet was halted")
    if sum(each.tool == "pay" for each in shop.effects()) != CAP // PRICE:
        raise DrillBroken("The drill's payments did not run, so the drill proves nothing.")
    return copies


async def _looks(agent: AgentRuntime, rng: random.Random) -> None:
    for _ in range(rng.randint(0, MAX_READS)):
        await _play(agent, "inspect", 0)


async def _play(agent: AgentRuntime, tool_name: ShopTool, order: int) -> None:
    await resume_playbook(agent, await begin_playbook(agent, _playbook(tool_name, order), {}), unseen)


async def _deny(agent: AgentRuntime, on_question: Callable[[], None]) -> None:
    session = await begin_playbook(agent, _playbook("wire", DENIED), {})
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def waits(approval: ApprovalRequired, _: object) -> None:
        if not waiting.done():
            waiting.set_result(approval.decision)

    async with asyncio.TaskGroup() as group:
        group.create_task(resume_playbook(agent, session, unseen, waits))
        decision = await waiting
        on_question()
        await decisions.deny(Actor(agent.app, Principal(PERSON)), decision)


def _playbook(tool_name: ShopTool, order: int) -> Playbook:
    return Playbook((Step(tool_name, msgspec.json.encode({"order": order})),), "the drill")


async def _try_copy(restored_store: RestoredStore, copy: Copy, *, missing: bool) -> list[str]:
    """Restore a copy, restart, and return the violations."""
    shutil.rmtree(restored_store.checkpoints)
    shutil.copytree(restored_store.folder / "kept", restored_store.checkpoints)
    copy.restore()
    where = f"A copy made {copy.moment}, {copy.manner}:"
    checkpoints_before, effect_count = restored_store.read_checkpoints(), len(restored_store.shop.effects())
    is_refused = await _start_again(restored_store)
    wrong = [f"{where} {each}" for each in _find_wrongly_done(restored_store.shop.effects()[effect_count:])]
    if is_refused is not missing and not restored_store.blind:
        wrong.append(f"{where} {'refused, although nothing is missing' if is_refused else 'not refused'}.")
    if missing and restored_store.read_checkpoints() != checkpoints_before:
        wrong.append(f"{where} new checkpoints were written.")
    if is_refused and missing:
        wrong += [f"{where} {each}" for each in await _accept(restored_store, is_new_store=copy.manner == "deleted")]
    return wrong


async def _start_again(restored_store: RestoredStore) -> bool:
    """Restart on the copy; return True if the store was refused."""

    def raise_answer_required(*_: object) -> None:
        raise AnswerRequired

    try:
        async with open_runtime(restored_store.settings, lease=NO_LEASE, allow_older_copy=restored_store.blind) as app:
            agent = restored_store.shop.agent(app)
            for decision in await list_pending_decisions(app.store, app.clock.now()):
                await decisions.approve(Actor(app, Principal("bob")), decision.decision, decisions.ApprovalTerms())
                with suppress(AnswerRequired):
                    await resume_playbook(agent, SessionId(decision.session), unseen, raise_answer_required)
            for tool_name in ("inspect", "pay"):
                # A payment in flight in the copy may hold the remaining money.
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAYMENT_TIMEOUT_SECONDS):
                        await _play(agent, tool_name, 4)
    except StoreUnusable:
        return True
    return False


def _find_wrongly_done(effects: Sequence[ToolEffect]) -> list[str]:
    """Check that nothing ran: the cap was spent, a call was denied, and the fleet was halted."""
    wrong: list[str] = []
    if payment_count := sum(each.tool == "pay" for each in effects):
        spent, cap = map(format_exact_micros, (CAP + PRICE * payment_count, CAP))
        wrong.append(f"{spent} was spent under a cap of {cap}.")
    if ToolEffect("wire", DENIED) in effects:
        wrong.append(f"wire {DENIED} ran, although a person denied it.")
    return [*wrong, *(f"{each.tool} {each.order} ran, although the fleet was halted." for each in effects)]


async def _accept(restored_store: RestoredStore, *, is_new_store: bool) -> list[str]:
    """Accept the copy as a person: work continues, and verification finds nothing."""
    async with open_runtime(restored_store.settings, lease=NO_LEASE, allow_older_copy=True) as app:
        if app.older_copy is None:
            return ["it was refused, but there was nothing to accept."]
        missing = app.older_copy.describe_missing()
        await journal.accept(Actor(app, Principal(PERSON)), "the drill")
    wrong = (
        []
        if is_new_store or any(char.isdigit() for char in missing)
        else [f"the message does not count the missing data: {missing}"]
    )
    effect_count = len(restored_store.shop.effects())
    try:
        async with open_runtime(restored_store.settings, lease=NO_LEASE) as app:
            await _play(restored_store.shop.agent(app), "inspect", 5)
            report = await verify_store(app.store, restored_store.checkpoints)
    except StoreUnusable as error:
        return [*wrong, f"refused after a person accepted it: {error}"]
    if len(restored_store.shop.effects()) != effect_count + 1:
        wrong.append("nothing ran after a person accepted it.")
    return [*wrong, *(f"after a person accepted it: {each.sentence}" for each in report.findings)]


DRILL: Final = Drill(
    "restore",
    "On an older copy of the store, nothing runs until a person accepts the loss.",
    run,
)
