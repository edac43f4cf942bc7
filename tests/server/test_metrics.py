"""What a monitoring system asks a server: whether it is alive, whether it is ready, and how much was done."""

from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from halter.core.errors import StoreUnavailable
from halter.core.events.effects import CallRefused, RequestSettled, RequestStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.money import Charge
from halter.core.ports import Draft, Write
from halter.core.rows import AuditRow, HoldRow
from halter.core.usage import Usage
from halter.dispatch.heartbeat import renew_leases
from tests.server.conftest import QUICK, House, make_office
from tests.server.fickle import Fickle

ASKS = RequestStarted(request="r9", model="openai:gpt-5-mini", purpose="turn")
ANSWERS = RequestSettled(request="r9", outcome="ok", usage=Usage(120, 30), charge=Charge(usd=1_250))
REFUSED = CallRefused(call="c9", tool="send", outcome="tool_not_granted", sentence="No.")


async def scrape(house: House, name: str) -> dict[str, str]:
    """Read the samples by their names and labels."""
    async with house.client(name) as client:
        answer = await client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = (line for line in answer.text.splitlines() if not line.startswith("#"))
    return dict(line.rsplit(" ", 1) for line in lines)


async def do(house: House, session: str, *events: Any) -> None:
    for event in events:
        stream = session_stream(session)
        key, reads = house.app.ids.make(), [(HoldRow, "r9"), (AuditRow, "c9")]
        await house.app.store.commit(Write(stream, key, lambda _, e=event: [Draft(e)], reads))


async def wait_for(house: House, sample: str) -> dict[str, str]:
    while sample not in (samples := await scrape(house, "viewer")):
        pass
    return samples


AT_MINE = 'gen_ai_operation_name="chat",gen_ai_request_model="gpt-5-mini",gen_ai_agent_name="mine"'
LABELS = (
    'gen_ai_operation_name="chat",gen_ai_provider_name="openai",gen_ai_request_model="gpt-5-mini",'
    'gen_ai_agent_name="mine"'
)


async def test_what_is_done_is_counted_in_the_names_of_the_conventions(house: House) -> None:
    await wait_for(house, 'halter_decisions_waiting{halter_decision_about="approval",gen_ai_agent_name="mine"}')
    await do(house, "mine-1", ASKS, ANSWERS, REFUSED)
    refusals = (
        'halter_refusals_total{gen_ai_operation_name="execute_tool",gen_ai_tool_name="send",gen_ai_agent_name="mine",'
        'halter_outcome="tool_not_granted"}'
    )
    samples = await wait_for(house, refusals)
    assert samples[refusals] == "1"
    assert samples[f"halter_spend_USD_total{{{AT_MINE}}}"] == "0.00125"
    tokens = f'gen_ai_client_token_usage_bucket{{{LABELS},gen_ai_token_type="input",le="256"}}'
    assert samples[tokens] == "1"
    assert samples[tokens.replace("256", "64")] == "0"
    assert samples[f'gen_ai_client_token_usage_sum{{{LABELS},gen_ai_token_type="output"}}'] == "30"
    assert samples[f"gen_ai_client_operation_duration_seconds_count{{{LABELS}}}"] == "1"
    cap = 'halter_budget_cap_USD{halter_scope="agent:mine",halter_window="day",gen_ai_agent_name="mine"}'
    assert float(samples[cap]) > 0


async def test_who_sees_one_agent_gets_its_metrics_only_and_nobody_else_any(house: House) -> None:
    await scrape(house, "viewer")
    await do(house, "theirs-1", ASKS, ANSWERS)
    everything = await wait_for(house, f"halter_spend_USD_total{{{AT_MINE.replace('mine', 'theirs')}}}")
    own = await scrape(house, "viewer-of-mine")
    assert any("theirs" in sample for sample in everything)
    assert any('halter_scope="fleet"' in sample for sample in everything)
    assert own
    assert all('gen_ai_agent_name="mine"' in sample for sample in own)
    async with house.client() as client:
        answer = await client.get("/metrics", headers={"Accept": "text/html"})
        assert (answer.status_code, [*answer.json()]) == (401, ["error"])


async def test_a_server_is_ready_while_its_store_answers_and_alive_all_the_time(tmp_path: Path) -> None:
    office = await make_office(tmp_path)
    store = Fickle(office.app.store)
    office.app = replace(office.app, store=cast("Any", store))
    house = House(office, tmp_path, QUICK)
    try:
        async with house.client() as client:
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.text) == (200, "ready\n")
            store.trouble = StoreUnavailable("The store at db.internal cannot be reached.")
            await house.app.clock.sleep(10**6)
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.text) == (503, "The store does not answer.\n")
            assert (await client.get("/healthz")).status_code == 200
            store.trouble = None
            await house.app.clock.sleep(10**6)
            assert (await client.get("/readyz")).status_code == 200
    finally:
        await house.end()
        await office.ground.store.close()


async def test_a_server_that_runs_agents_is_not_ready_once_its_leases_have_expired(house: House) -> None:
    app, store = house.app, house.app.store
    async with house.client() as client:
        with app.liveness.works_as("serve-1"):
            assert (await client.get("/readyz")).text == "The leases of this process have expired.\n"
            async with renew_leases(store, app.clock, WorkerId("serve-1"), 10**5):
                await app.clock.sleep(10**6)
                assert (await client.get("/readyz")).text == "ready\n"
        await app.clock.sleep(10**6)
        assert (await client.get("/readyz")).text == "ready\n"
