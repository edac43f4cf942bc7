"""The rate of a model where several processes meet: each has connections of its own, and all ask at once."""

import asyncio
from collections import Counter

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import SystemClock
from halter.core.events import RequestStarted, SessionStarted
from halter.core.ids import SessionId, SortableIds, WorkerId, session_stream
from halter.core.messages import Prompt, make_user_message
from halter.core.ports import Lease
from halter.core.rates import RateLimit
from halter.core.usage import FREE_PRICE, ModelName
from halter.guard.halts import RateLimited
from halter.guard.ledger import Ledger
from halter.guard.model_door import AnsweredRequest, ModelDoor, ModelRequest, RequestOutcome
from halter.guard.prepare import SessionContext
from halter.journal.open import open_store
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.models.prices import Prices
from halter.models.scripted import Scripted, say
from halter.state import lifecycle
from tests.contract.conftest import Place

CLOCK = SystemClock()
NAME = ModelName("test", "free")
MOST = 5
PROCESSES = 4
SESSIONS = 10


async def _send_request(store: JournalStore, session: str) -> RequestOutcome:
    """Ask once, and take the first word of the door for an answer."""
    event = SessionStarted(session=session, agent="desk", kind="task", started_by="ada")
    await store.commit(lifecycle.start_session(event))
    (lease,) = await store.claim(WorkerId(session), 1, SessionId(session))
    return await _through_a_door(store, lease)


async def _through_a_door(store: JournalStore, lease: Lease) -> RequestOutcome:
    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk\n", "agent.yaml")))
    session_context = SessionContext(
        lease.session,
        "desk",
        policy.phases[0],
        policy,
        policy.digest(),
        rate_limits={"test:*": RateLimit(requests=MOST)},
    )
    door = ModelDoor(store, CLOCK, Ledger(store, CLOCK), Prices({str(NAME): FREE_PRICE}), redact=str)
    request = ModelRequest(id=f"{lease.session}.1", prompt=Prompt(messages=(make_user_message("Is it?"),)))
    return await door.request(lease, session_context, request, Scripted([say("Yes.")], CLOCK, NAME))


async def test_no_minute_has_more_requests_than_it_may_however_many_ask_at_once(shared_place: Place) -> None:
    stores = [open_store(shared_place.url, clock=CLOCK, ids=SortableIds(CLOCK.now)) for _ in range(PROCESSES)]
    names = [f"s{number}" for number in range(PROCESSES * SESSIONS)]
    results = await asyncio.gather(*(_send_request(stores[n % PROCESSES], name) for n, name in enumerate(names)))
    assert {type(answer) for answer in results} <= {AnsweredRequest, RateLimited}
    windows = Counter[str]()
    for name in names:
        for stored in await stores[0].read(session_stream(name)):
            if isinstance(stored.event, RequestStarted):
                windows[next(leg.window for leg in stored.event.legs if leg.unit == "requests")] += 1
    # A minute may pass meanwhile: each has what it may have, and at least one was used up.
    assert max(windows.values()) == MOST
    assert windows.total() == sum(isinstance(answer, AnsweredRequest) for answer in results)
    assert (await verify_store(stores[0])).ok
    for store in stores:
        await store.close()
