"""What a person can do, a program can do in their name: the inbox, decisions, answers, halts, budgets."""

import asyncio
import inspect
from decimal import Decimal
from pathlib import Path

import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used

from halter import Agent, Store
from halter.core.errors import ConfigError, NotDone
from halter.operations.store_access import BlockingStore
from halter.runtime.needs import Need


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def open_store(bench: Bench) -> Store:
    return Store(bench.file, environ={"HOME": str(bench.folder)}, clock=bench.clock)


def make_payer(bench: Bench) -> tuple[Agent, list[int]]:
    agent, paid = bench.agent(calls(("pay", {"order": 7})), says("Paid."), policy={"mode": "ASSIST"}), list[int]()

    @agent.tool(level="RESTRICTED", effect="write", isolate=False)
    def pay(order: int) -> str:
        """Pay for an order."""
        paid.append(order)
        return "paid"

    return agent, paid


async def wait_for_decision(store: Store) -> Need:
    while True:
        for need in await store.inbox():
            if need.decision:
                return need


async def test_a_program_approves_in_a_persons_name_what_was_shown(bench: Bench) -> None:
    agent, paid = make_payer(bench)
    async with open_store(bench) as store:
        run = asyncio.create_task(agent.run("Pay for order 7."))
        need = await wait_for_decision(store)
        assert (need.kind, need.agent, need.shown) == ("approval", "desk", '{"order":7}')
        with pytest.raises(NotDone, match="has changed since it was shown"):
            await store.approve(need.decision, "another digest", by="eve")
        assert "Approved" in (await store.approve(need.decision, need.digest, by="  ada ")).sentence
        assert (await run).text == "Paid."
        assert paid == [7]
        assert await store.inbox() == []
        receipt = await store.receipt((await store.sessions("desk"))[0].session)
        assert [decision.by for decision in receipt.decisions] == ["ada"]


async def test_a_denial_and_changed_arguments_keep_the_name_and_the_reason(bench: Bench) -> None:
    agent, paid = make_payer(bench)
    async with open_store(bench) as store:
        run = asyncio.create_task(agent.run("Pay for order 7."))
        need = await wait_for_decision(store)
        await store.approve(need.decision, need.digest, by="ada", edit={"order": 8})
        await run
        assert paid == [8]
        agent, paid = make_payer(bench)
        run = asyncio.create_task(agent.run("Pay for order 7."))
        need = await wait_for_decision(store)
        await store.deny(need.decision, by="bob", reason="It was paid yesterday.")
        session = (await run).session
        assert paid == []
        (decision,) = (await store.receipt(session)).decisions
        assert (decision.verdict, decision.by, decision.reason) == ("deny", "bob", "It was paid yesterday.")


async def test_a_program_answers_the_question_of_a_session(bench: Bench) -> None:
    agent = bench.agent(calls(("ask_user", {"question": "Which?"})), says("Done."))
    asked = await agent.run("Tidy up.")
    async with open_store(bench) as store:
        (need,) = await store.inbox()
        assert (need.kind, need.session) == ("question", asked.session)
        await store.answer(need.session, "The left one.", by="ada")
        with pytest.raises(NotDone, match="already answered"):
            await store.answer(need.session, "The right one.", by="bob")
    assert (await agent.resume(asked.session)).text == "Done."


async def test_a_program_halts_resumes_and_changes_caps(bench: Bench) -> None:
    dear = says("Done.", usage=used(1000, 100))
    agent = bench.agent(dear, dear, fleet=PRICED, limits={"max_cost_usd_per_day": 1})
    async with open_store(bench) as store:
        await agent.run("Go.")
        await store.halt("desk", by="ada", reason="Look first.")
        assert (await agent.run("Go.")).terminal_reason == "external_halt"
        await store.resume("desk", by="ada")
        assert (await agent.run("Go.")).ok
        caps = {(line.scope, line.window.partition("/")[0]): line.cap for line in await store.budget()}
        assert caps["agent:desk", "day"] == 1
        await store.set_cap("lower", "agent:desk", "0.5", by="ada")
        caps = {(line.scope, line.window.partition("/")[0]): line.cap for line in await store.budget()}
        assert caps["agent:desk", "day"] == Decimal("0.5")


@pytest.mark.parametrize("name", ["", "  ", "\u200b"])
async def test_who_decides_has_to_be_named(bench: Bench, name: str) -> None:
    async with open_store(bench) as store:
        with pytest.raises(ConfigError, match="Name the person who decides"):
            await store.halt("fleet", by=name)


async def test_an_agent_cannot_decide_in_its_own_name(bench: Bench) -> None:
    async with open_store(bench) as store:
        with pytest.raises(NotDone, match="Only a person can approve anything"):
            await store.approve("desk-1.1", "digest", by="agent:desk")


def test_a_program_that_is_not_async_does_the_same(bench: Bench) -> None:
    agent = bench.agent(calls(("ask_user", {"question": "Which?"})), says("Done."), fleet=PRICED)
    session = agent.run_sync("Tidy up.").session
    with open_store(bench).blocking() as store:
        assert [need.session for need in store.inbox()] == [session]
        store.answer(session, "The left one.", by="ada")
        store.halt("fleet", by="ada")
        store.resume("fleet", by="ada", over_seconds=0)
        assert store.receipt(session).session == session
        assert [row.session for row in store.sessions()] == [session]
        assert isinstance(store.budget(), list)
    with pytest.raises(ConfigError, match="The store is not open"):
        store.inbox()


def test_the_blocking_store_has_every_method_of_the_store() -> None:
    def list_methods(owner: type) -> dict[str, inspect.Signature]:
        public = {name: function for name, function in vars(owner).items() if not name.startswith("_")}
        return {name: inspect.signature(function) for name, function in public.items() if callable(function)}

    own = list_methods(Store)
    del own["blocking"]
    assert list_methods(BlockingStore) == own
