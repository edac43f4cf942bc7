"""A rate holds for any number of calls at once, in any number of processes, also for those that fail.

Run as a program, this file is one of the processes: it opens the store, waits for a word, and makes its calls at once.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, Clock, SystemClock
from halter.core.events import RuleMade, SessionStarted
from halter.core.ids import FLEET, SessionId, SortableIds, WorkerId
from halter.core.ports import Committed, Draft, Lease, Query, Rows, Store, Write
from halter.core.rows import AuditRow, RateRow, RuleRow
from halter.core.vocabulary import R
from halter.guard.approvals import SameArguments, encode_matcher
from halter.guard.call_answer import Answer
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import Call, SessionContext
from halter.journal.open import open_store
from halter.models.prices import Prices
from halter.redaction.redact import Redactor
from halter.redaction.secrets import GivenSecrets
from halter.spec.agent import Phase
from halter.state import lifecycle
from halter.testing.world import World
from halter.tools.function_tool import FunctionTool, tool

ARGUMENTS = b'{"target":"web"}'
LIMIT = 20
PROCESSES = 4


def deploying(act: Callable[[], Awaitable[None]]) -> FunctionTool:
    async def deploy(target: str) -> str:
        """Deploy something."""
        await act()
        return target

    return tool(deploy, level="PRIVILEGED")


def make_rule(at: int) -> Write:
    """Let a person say "always" to exactly this call."""
    rule = RuleMade(
        rule="r",
        tool="deploy",
        scope="fleet",
        owner="",
        matcher=encode_matcher(SameArguments(sha256(ARGUMENTS).hexdigest())),
        keys=("target",),
        by="ada",
        expires_at=at + DAY,
    )
    return Write(FLEET, "rule", lambda _: [Draft(rule)], [(RuleRow, "r")])


def make_session_start(session: str) -> Write:
    return lifecycle.start_session(SessionStarted(session=session, agent="desk", kind="task", started_by="ada"))


async def all_at_once(store: Store, clock: Clock, lease: Lease, deploy: FunctionTool, count: int) -> list[str]:
    """Make that many calls together, and tell their outcomes."""
    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk\n", "agent.yaml")))
    session_context = SessionContext(lease.session, "desk", Phase("work", None), policy, str(policy.digest()))
    guard = GuardRuntime(
        store, clock, redact=Redactor({}).redact, secrets=GivenSecrets({}), prices=Prices(policy.prices)
    )
    calls = [Call(f"{lease.session}.{number}", "deploy", ARGUMENTS) for number in range(count)]
    answers = await asyncio.gather(*(guard.call(lease, session_context, call, {"deploy": deploy}) for call in calls))
    return [answer.outcome if isinstance(answer, Answer) else type(answer).__name__ for answer in answers]


async def in_world(world: World, store: Store, count: int, *, fails: bool = False) -> tuple[Mapping[str, int], int]:
    """Make calls in one process of virtual time; return their outcomes, and how often something was really done."""
    acts: list[int] = []

    async def act() -> None:
        acts.append(world.now)
        await asyncio.sleep(0)
        if fails:
            raise OSError("it broke")

    await world.store.commit(make_rule(world.now))
    await world.store.commit(make_session_start("s"))
    (lease,) = await world.store.claim(WorkerId("w"), 1)
    return Counter(await all_at_once(store, world.clock, lease, deploying(act), count)), len(acts)


async def test_of_sixty_privileged_calls_that_a_rule_agrees_to_exactly_twenty_run(world: World) -> None:
    outcomes, acts = await in_world(world, world.store, 60)
    assert (outcomes, acts) == ({"ok": LIMIT, "rate_limited": 40}, LIMIT)
    rows = await world.store.ask(Query("all_audit", AuditRow))
    assert Counter(row.decided_by for row in rows) == {"ada, always, by rule r": LIMIT, "": 40}


async def test_of_two_hundred_that_fail_exactly_twenty_are_tried(world: World) -> None:
    outcomes, acts = await in_world(world, world.store, 200, fails=True)
    assert (outcomes, acts) == ({"error": LIMIT, "rate_limited": 180}, LIMIT)


class Stale:
    """Locked rows, but with the rates as they were before the lock."""

    def __init__(self, rows: Rows, rates: Mapping[Any, RateRow | None]) -> None:
        self._rows = rows
        self._rates = rates
        self.now = rows.now

    def get(self, kind: type[R], *key: Any) -> Any:
        return self._rates[key] if kind is RateRow else self._rows.get(kind, *key)

    def find(self, keys: Any) -> Any:
        return [self.get(*key) for key in keys]


class Careless:
    """A store that looks at rates before the transaction in which they are decided about."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, write: Write) -> Committed:
        keys = [key[1:] for key in write.reads if key[0] is RateRow]
        if not keys:
            return await self._store.commit(write)
        values: dict[Any, RateRow | None] = {}

        def look(rows: Rows) -> Sequence[Draft]:
            values.update({key: rows.get(RateRow, *key) for key in keys})
            return []

        await self._store.commit(replace(write, key=f"{write.key}/look", decide=look))
        await asyncio.sleep(0)
        return await self._store.commit(replace(write, decide=lambda rows: write.decide(Stale(rows, values))))


async def test_a_rate_that_is_checked_outside_of_the_transaction_does_not_hold(world: World) -> None:
    careless: Any = Careless(world.store)
    outcomes, acts = await in_world(world, careless, 60)
    assert outcomes["ok"] == acts > LIMIT


async def one_process(url: str, session: str, count: int, effects: str, fails: str) -> None:
    """Be one of the processes: say when all is ready, wait for a word, make the calls, and tell their outcomes."""
    clock = SystemClock()

    async def act() -> None:
        file = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"x")
        os.close(file)
        if fails:
            raise OSError("it broke")

    store = open_store(url, clock=clock, ids=SortableIds(clock.now))
    (lease,) = await store.claim(WorkerId(session), 1, SessionId(session))
    print("ready", flush=True)  # noqa: T201 This is how it talks to the test.
    await asyncio.to_thread(sys.stdin.readline)
    outcomes = await all_at_once(store, clock, lease, deploying(act), count)
    print(json.dumps(outcomes))  # noqa: T201 As above.
    await store.close()


async def in_processes(url: str, count: int, effects: Path, *, fails: bool) -> Counter[str]:
    """Let several processes make so many calls together, all at once."""
    clock = SystemClock()
    from tests.processes import warm_command  # The processes run this file, and do not know the other tests.

    store = open_store(url, clock=clock, ids=SortableIds(clock.now))
    await store.commit(make_rule(clock.now()))
    names = [f"s{number}" for number in range(PROCESSES)]
    for name in names:
        await store.commit(make_session_start(name))
    await store.close()
    words = [str(count // PROCESSES), str(effects), "fails" if fails else ""]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    running = [
        await asyncio.create_subprocess_exec(
            *warm_command("python", __file__, url, name, *words, imports=["pytest", "halter.testing.world"]), **pipes
        )
        for name in names
    ]
    for each in running:
        assert each.stdout is not None
        assert await each.stdout.readline() == b"ready\n"
    results = await asyncio.gather(*(each.communicate(b"go\n") for each in running))
    return Counter(outcome for body, _ in results for outcome in json.loads(body))


@pytest.mark.parametrize(
    ("kind", "count", "fails"),
    [
        ("sqlite", 60, False),
        pytest.param("sqlite", 200, True, marks=pytest.mark.soak),
        pytest.param("postgres", 60, False, marks=[pytest.mark.postgres, pytest.mark.soak]),
        pytest.param("postgres", 200, True, marks=pytest.mark.postgres),
    ],
)
async def test_a_rate_holds_over_four_processes(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, count: int, *, fails: bool
) -> None:
    url = str(tmp_path / "store.db") if kind == "sqlite" else request.getfixturevalue("postgres_schema_url")
    effects = tmp_path / "effects"
    outcomes = await in_processes(url, count, effects, fails=fails)
    assert outcomes == {"error" if fails else "ok": LIMIT, "rate_limited": count - LIMIT}
    assert effects.stat().st_size == LIMIT


if __name__ == "__main__":
    _, url, session, count, effects, fails = sys.argv
    asyncio.run(one_process(url, session, int(count), effects, fails))
