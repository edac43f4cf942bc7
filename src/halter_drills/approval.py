"""An approval is good for one call, as it was shown, by a person, in time: whatever else is tried with it never runs.

Every attempt goes through the real doors on a real store. What ran is counted outside, in a file that the tools
themselves write; the journal is not asked.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from halter.cli.keyboard import TerminalDevice
from halter.core.clock import SystemClock
from halter.core.ids import WorkerId
from halter.core.ports import Committed, Decide, Query, Rows, Store, Write
from halter.core.row import R
from halter.core.rows import DecisionRow, RuleRow
from halter.guard.conditions import Anything
from halter.guard.judge import Approval, Asked, edit_digest, judge
from halter.guard.rules import Each, written
from halter.testing.relay import Relay
from halter_drills.agents import begun, doors, policy_of
from halter_drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter_drills.examine import in_memory
from halter_drills.forgeries import FORGED, HONEST, Act, Desk, till

T = TypeVar("T")

ROUNDS: Final = 3
EFFECTS: Final = "effects"
WORKER: Final = WorkerId("drill")
ACTS: Final[Sequence[Act]] = (*HONEST, *FORGED)


class Agreeable:
    """Rows in which every decision is about whatever is asked, and says yes to it."""

    def __init__(self, rows: Rows, need: Approval) -> None:
        self._rows = rows
        self._need = need

    @property
    def now(self) -> int:
        """The store's time."""
        return self._rows.now

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row as it is; of a decision, one that agrees."""
        row = self._rows.get(kind, *key)
        return cast("R", self._agreeing(row)) if isinstance(row, DecisionRow) else row

    def _agreeing(self, row: DecisionRow) -> DecisionRow:
        need = self._need
        agreed = edit_digest(need.digest, need.edited) if row.verdict == "edit" or need.edited else need.digest
        return msgspec.structs.replace(row, digest=need.digest, decided_digest=agreed)


class Gullible(Relay):
    """A store behind which every digest is as it should be and every rule fits: as if nobody compared anything."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        """Answer; a rule is shown as one that fits whatever arguments there are."""
        rows = await self._store.ask(query)
        return [cast("T", _loosened(row)) if isinstance(row, RuleRow) else row for row in rows]

    async def commit(self, write: Write) -> Committed:
        """Show the judge rows that agree with what it asks about."""
        asked = _judged(write)
        if asked is not None and (need := asked.approval) is not None:
            write = msgspec.structs.replace(write, decide=_gullibly(asked, need))
        return await self._store.commit(write)


class Hasty(TerminalDevice):
    """A terminal at which what was typed before a question counts as its answer."""

    def drop(self) -> None:
        """Keep what was typed."""


def _loosened(row: RuleRow) -> RuleRow:
    anything = Each(tuple(Anything(key) for key in ("desk", "order", "amount")))
    return msgspec.structs.replace(row, matcher=written(anything))


def _gullibly(asked: Asked, need: Approval) -> Decide:
    return lambda rows: judge(asked, Agreeable(rows, need))


def _judged(write: Write) -> Asked | None:
    """Tell what the judge is asked in a write, if it is the judge who decides."""
    decide = write.decide
    return decide.args[0] if isinstance(decide, partial) and decide.func is judge else None


def run(setting: Setting) -> Result:
    """Try everything, each act with a session of its own and all of them side by side, as many rounds as are wanted."""
    rounds = setting.seeds or ROUNDS
    violations: list[str] = []
    with own_store(in_memory(setting)) as ground:
        for number in range(rounds):
            setting.progress(number, rounds, f"{len(ACTS)} approvals are used and misused")
            effects = ground.folder / f"{EFFECTS}-{number}"
            effects.touch()
            asyncio.run(_round(ground, effects, number, teeth=setting.teeth))
            violations += amiss(effects.read_text().splitlines(), number)
        setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "honest": len(HONEST), "forged": len(FORGED)}
    return result(DRILL.name, ground.kind, rounds * len(ACTS), violations, counts)


async def _round(ground: Ground, effects: Path, number: int, *, teeth: bool) -> None:
    real = ground.open()
    try:
        store: Store = Gullible(real) if teeth else real
        keyboard = Hasty if teeth else TerminalDevice
        desks = [await _desk(ground, store, effects, f"{number}-{act.__name__}", keyboard) for act in ACTS]
        async with asyncio.TaskGroup() as trying:
            for act, desk in zip(ACTS, desks, strict=True):
                trying.create_task(_tried(act, desk))
    finally:
        await real.close()


async def _tried(act: Act, desk: Desk) -> None:
    await act(desk)


async def _desk(ground: Ground, store: Store, effects: Path, session: str, keyboard: type[TerminalDevice]) -> Desk:
    policy, clock = policy_of(), SystemClock()
    return Desk(
        name=session,
        ground=ground,
        store=store,
        clock=clock,
        gatehouse=doors(store, clock),
        tools=till(effects),
        lease=await begun(store, WORKER, session, policy),
        policy=policy,
        beside=await begun(store, WORKER, f"{session}-beside", policy),
        keyboard=keyboard,
    )


def amiss(effects: Sequence[str], number: int = 0) -> list[str]:
    """Compare what ran in a round with what should have run, by the outside count alone."""
    ran = Counter(effects)
    honest = {f"{number}-{act.__name__}\tpay\t{order}": act for act, order in HONEST.items()}
    wrong = [f"{_told(act)} It ran {ran[line]} times." for line, act in honest.items() if ran[line] != 1]
    for line in ran.keys() - honest.keys():
        name, what, order = line.split("\t")
        act = next(act for act in ACTS if f"{number}-{act.__name__}" == name)
        wrong.append(f"{_told(act)} All the same, {what} ran for {order}.")
    return sorted(wrong)


def _told(act: Act) -> str:
    return act.__doc__ or act.__name__


DRILL: Final = Drill(
    "approval", "An approval is good for one call as it was shown, by a person, in time; no other call runs by it.", run
)
