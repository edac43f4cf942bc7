"""A cap that was removed from its file or policy is not shown any more, though a hold of today was bound by it."""

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.money import DOLLAR, Cap, Caps, Spender, make_legs
from halter.guard.ledger import ActualResult
from halter.operations.actor import Actor, Principal
from halter.operations.money import list_budgets
from halter.operations.queries import read_needs
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.trigger_runner import make_trigger
from halter.settings import read_settings
from halter.spec.triggers import Watch
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold
from tests.story.clerks import environment

DAY_CAP = Caps(session=Cap(None), agent=(Cap(DOLLAR, "day"),), fleet=())
NO_CAP = Caps(session=Cap(None), agent=(Cap(None, "day"),), fleet=())


async def begin_session(app: Runtime, session: str, caps: Caps) -> None:
    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: shop", "agent.yaml")))
    encoded = msgspec.Raw(msgspec.structs.replace(policy, caps=caps).canonical())
    definition = await app.store.put(msgspec.json.encode({"policy": encoded}))
    event = SessionStarted(session=session, agent="shop", kind="task", started_by="ada", definition=definition)
    await app.store.commit(lifecycle.start_session(event))


async def spend(app: Runtime, session: str, caps: Caps, trigger: str = "") -> None:
    (lease,) = await app.store.claim(WorkerId(f"{session} worker"), 1, SessionId(session))
    legs = make_legs(caps, Spender(session, "shop", trigger), app.clock.now(), usd=9 * DOLLAR // 10)
    held = await hold(app.ledger, lease, CallStarted(call=f"{session}.1", tool="pay", legs=legs))
    assert isinstance(held, HoldTaken)
    await app.ledger.settle(lease, held.flight, ActualResult("ok", usd=9 * DOLLAR // 10))


async def read_caps(app: Runtime, scope: str) -> list[Decimal | None]:
    return [row.cap for row in await list_budgets(Actor(app, Principal("ada"))) if row.scope == scope]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


async def test_a_cap_that_an_agent_no_longer_has_is_not_shown_once_a_session_starts_without_it(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        await begin_session(app, "shop-1", DAY_CAP)
        await spend(app, "shop-1", DAY_CAP)
        assert await read_caps(app, "agent:shop") == [Decimal(1)]
        assert [need.kind for need in await read_needs(Actor(app, Principal("ada")))] == ["budget"]
        await begin_session(app, "shop-2", NO_CAP)
        assert await read_caps(app, "agent:shop") == [None]
        assert await read_needs(Actor(app, Principal("ada"))) == []


async def test_a_cap_that_binds_again_is_shown_again(home: Path) -> None:
    environ = environment(home)
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        await begin_session(app, "shop-1", NO_CAP)
        # The session was resumed with a file that has a cap.
        await spend(app, "shop-1", DAY_CAP)
        assert await read_caps(app, "agent:shop") == [Decimal(1)]


async def test_a_cap_that_a_trigger_no_longer_has_is_not_shown(home: Path) -> None:
    environ, watch = environment(home), Watch(name="w", max_cost_usd_per_day=DOLLAR)
    caps = msgspec.structs.replace(NO_CAP, trigger=watch.caps())
    async with open_runtime(read_settings(environ, home), environ=environ) as app:
        made = await app.store.commit(make_trigger("shop/w", "shop", watch, "agent.yaml"))
        await begin_session(app, "shop-1", caps)
        await spend(app, "shop-1", caps, "shop/w")
        assert await read_caps(app, "trigger:shop/w") == [Decimal(1)]
        newer = make_trigger("shop/w", "shop", Watch(name="w"), "agent.yaml", previous_seq=made.events[0].seq)
        assert (await app.store.commit(newer)).events
        assert await read_caps(app, "trigger:shop/w") == [None]
