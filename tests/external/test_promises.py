"""What every adapter promises, tested with an agent of each framework.

A promise that has no meaning in a framework is skipped, with the reason that its driver has in `LACKS`.
"""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from halter import adapters
from halter.external.effects import EffectRefused
from halter.guard.halts import halt
from tests.adapters.conftest import Desk
from tests.external.driver import Call, Driver, Mind
from tests.external.drivers import DRIVERS, load_driver

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::halter.adapters.attachments.AnswerCut"),
    pytest.mark.filterwarnings("ignore:.*EXPERIMENTAL:UserWarning"),
]
ROOT = Path(__file__).parents[2]
NEEDS: dict[str, tuple[str, ...]] = {}
"""What a framework must have for a test, by the name of the test."""


SHARED: Final = {"__init__", "attachments", "guarded_runs"}
"""The modules that all adapters use."""


@pytest.fixture(params=DRIVERS)
def framework(request: pytest.FixtureRequest) -> type[Driver]:
    """The driver of one framework, unless it lacks one of the things that the test `needs`."""
    driver = load_driver(request.param)
    for promise in NEEDS.get(request.function.__name__, ()):
        if promise in driver.LACKS:
            pytest.skip(f"{request.param}: {driver.LACKS[promise]}")
    return driver


Test = TypeVar("Test", bound=Callable[..., Any])


def needs(*promises: str) -> Callable[[Test], Test]:
    """Skip a test for the frameworks that lack one of these."""

    def note(test: Test) -> Test:
        NEEDS[test.__name__] = promises
        return test

    return note


def count_requests(framework: type[Driver], requests: int) -> int:
    """Return the requests that a receipt has: none where another program makes them."""
    return 0 if "requests" in framework.LACKS else requests


async def read_receipt(desk: Desk) -> Any:
    async with desk.guard() as guarded:
        (receipt,) = await guarded.receipts()
    return receipt


async def expect_receipt(desk: Desk, framework: type[Driver], calls: list[str], requests: int) -> None:
    receipt = await read_receipt(desk)
    assert (receipt.state, [line.name.rpartition("__")[2] for line in receipt.calls]) == ("COMPLETED", calls)
    assert [line.outcome for line in receipt.requests] == ["ok"] * count_requests(framework, requests)


def test_every_adapter_has_a_driver() -> None:
    modules = {each.stem for each in Path(adapters.__file__).parent.glob("*.py")}
    guarding = {
        name for name in modules if "guard: Guard" in (Path(adapters.__file__).parent / f"{name}.py").read_text()
    }
    assert guarding - {"guarded_runs"} <= {*DRIVERS}


@pytest.mark.parametrize("name", [each for each in DRIVERS if each != "bare_guard"])
def test_every_adapter_is_tested_for_what_goes_round_it(name: str) -> None:
    tested = (ROOT / f"tests/adapters/test_{name}.py").read_text()
    assert re.search(r"def test_(what_goes_round_the_guard_is_refused|a_tool_that_the_provider_runs_is_named)", tested)


async def test_a_run_is_a_session_with_its_calls_its_requests_and_what_they_cost(
    desk: Desk, framework: type[Driver]
) -> None:
    assert "paid 7" in await framework(desk).run()
    assert desk.paid == [7]
    await expect_receipt(desk, framework, ["pay"], requests=2)
    assert (await desk.read_spending() > 0) == ("requests" not in framework.LACKS)


@needs("run_blocking")
def test_a_program_that_is_not_async_runs_it_too(desk: Desk, framework: type[Driver]) -> None:
    assert "paid 7" in framework(desk).run_blocking()
    assert desk.paid == [7]
    asyncio.run(expect_receipt(desk, framework, ["pay"], requests=2))


@needs("stream")
async def test_a_stream_is_a_session_too(desk: Desk, framework: type[Driver]) -> None:
    assert "paid 7" in "".join([chunk async for chunk in framework(desk).read()])
    assert desk.paid == [7]
    await expect_receipt(desk, framework, ["pay"], requests=2)


@needs("stream")
async def test_a_reader_that_stops_ends_the_run(desk: Desk, framework: type[Driver]) -> None:
    """The model hangs after the first call, so the run cannot end in another way."""
    mind = Mind(("pay", {"amount": 7}), ("pay", {"amount": 9}), hangs_after=1)
    async with aclosing(framework(desk, mind).read()) as chunks:
        read = asyncio.ensure_future(read_until(chunks, mind))
        await asyncio.to_thread(mind.reached.wait, 60)
        read.cancel()
        await asyncio.wait([read])
    mind.over.set()
    receipt = await read_receipt(desk)
    assert [line.outcome for line in receipt.requests] == ["ok", "cancelled"][: count_requests(framework, 2)]
    assert desk.paid == [7]


async def read_until(chunks: Any, mind: Mind) -> None:
    async for _ in chunks:
        if mind.reached.is_set():
            return


@needs("stream", "pulled_stream")
async def test_no_call_is_made_before_its_reader_asks_for_more(desk: Desk, framework: type[Driver]) -> None:
    async with aclosing(framework(desk).read()) as chunks:
        await anext(chunks)
        for _ in range(50):
            await asyncio.sleep(0)
        assert desk.paid == []
    assert (desk.paid, (await read_receipt(desk)).calls) == ([], ())


async def test_a_refused_call_is_reported_to_the_model_and_does_not_run(desk: Desk, framework: type[Driver]) -> None:
    desk.policy = {"policy": {"disabled": ["pay", "mcp__till__pay"]}}
    assert "disabled" in await framework(desk).run()
    assert desk.paid == []


@needs("cap")
async def test_parallel_runs_on_one_cap_never_pass_it(desk: Desk, framework: type[Driver]) -> None:
    """Twenty runs of eighty cents each, all at once, on one dollar a day."""
    desk.policy = {"limits": {"max_cost_usd_per_day": 1}}
    drivers = [framework(desk, Mind(output=39_000), max_output_tokens=40_000) for _ in range(20)]
    results = await asyncio.gather(*(driver.run() for driver in drivers), return_exceptions=True)
    refused = [each for each in results if isinstance(each, EffectRefused)]
    assert {each.outcome for each in refused} == {"cost_cap_reached"}
    assert len(refused) >= 18
    assert Decimal("0.5") < await desk.read_spending() <= 1


@needs("limit")
async def test_a_run_that_meets_its_cap_ends_with_the_reason_and_asks_no_model(
    desk: Desk, framework: type[Driver]
) -> None:
    mind = Mind()
    with pytest.raises(EffectRefused, match="may cost") as refused:
        await framework(desk, mind, cap=0.000001).run()
    assert (refused.value.outcome, mind.limits, desk.paid) == ("cost_cap_reached", [], [])


@needs("limit")
async def test_an_answer_is_never_longer_than_what_fits_the_cap(desk: Desk, framework: type[Driver]) -> None:
    mind = Mind()
    await framework(desk, mind, cap=0.03, max_output_tokens=40_000).run()
    assert mind.limits[0] is not None
    assert 0 < mind.limits[0] < 40_000


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_halt_ends_a_run_within_its_request(desk: Desk, framework: type[Driver], *, is_streamed: bool) -> None:
    if is_streamed and "stream" in framework.LACKS:
        pytest.skip(framework.LACKS["stream"])
    mind = Mind(hangs_after=0)
    driver = framework(desk, mind)
    run = asyncio.ensure_future(read_all(driver) if is_streamed else driver.run())
    await asyncio.to_thread(mind.reached.wait, 60)
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    with pytest.raises(EffectRefused) as refused:
        await run
    await store.close()
    assert refused.value.outcome == "external_halt"
    mind.over.set()
    receipt = await read_receipt(desk)
    assert (desk.paid, receipt.state, receipt.calls) == ([], "HALTED", ())


async def read_all(driver: Driver) -> str:
    return "".join([chunk async for chunk in driver.read()])


async def test_a_halt_refuses_the_next_run(desk: Desk, framework: type[Driver]) -> None:
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    await store.close()
    mind = Mind()
    with pytest.raises(EffectRefused) as refused:
        await framework(desk, mind).run()
    assert (refused.value.outcome, desk.paid) == ("external_halt", [])


async def test_a_call_waits_for_a_person_and_is_made_once_after_a_yes(desk: Desk, framework: type[Driver]) -> None:
    state = await framework(desk, level="PRIVILEGED").ask()
    assert desk.paid == []
    await desk.decide("approve")
    # A new agent and a new guard go on, as a new process would.
    assert "paid 7" in await framework(desk, level="PRIVILEGED").resume(state)
    assert desk.paid == [7]
    receipt = await read_receipt(desk)
    assert (receipt.state, [line.outcome for line in receipt.calls]) == ("COMPLETED", ["ok"])


async def test_a_call_that_a_person_denied_is_not_made(desk: Desk, framework: type[Driver]) -> None:
    state = await framework(desk, level="PRIVILEGED").ask()
    await desk.decide("deny")
    assert "denied" in await framework(desk, level="PRIVILEGED").resume(state)
    assert desk.paid == []


@needs("own_approval")
async def test_approving_in_the_framework_alone_is_not_enough(desk: Desk, framework: type[Driver]) -> None:
    state = await framework(desk, level="PRIVILEGED").ask()
    saved = framework(desk).save(state)
    # Some frameworks ask again, and others raise.
    with suppress(Exception):
        await framework(desk, level="PRIVILEGED").resume(state)
    assert desk.paid == []
    await desk.decide("approve")
    driver = framework(desk, level="PRIVILEGED")
    assert "paid 7" in await driver.resume(driver.load(saved))
    assert desk.paid == [7]


def run_program(name: str, folder: Path, way: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "tests.external.killed_program", name, str(folder), way]
    process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    return process.returncode, process.stdout.strip() or process.stderr


def find_name(framework: type[Driver]) -> str:
    return framework.__module__.rpartition(".")[2].removesuffix("_driver")


async def test_a_question_outlives_kill_9_and_the_call_is_made_once_after_a_yes(
    desk: Desk, framework: type[Driver], tmp_path: Path
) -> None:
    name = find_name(framework)
    code, text = run_program(name, tmp_path, "at-a-question")
    assert code == -signal.SIGKILL, text
    assert not (tmp_path / "paid.txt").exists()
    await desk.decide("approve")
    code, text = run_program(name, tmp_path, "at-a-question")
    assert (code, "paid 7" in text) == (0, True), text
    assert (tmp_path / "paid.txt").read_text() == "7\n"


@needs("repeat")
async def test_a_call_that_was_made_before_kill_9_is_not_made_again_and_the_next_one_is_made_once(
    desk: Desk, framework: type[Driver], tmp_path: Path
) -> None:
    name = find_name(framework)
    code, text = run_program(name, tmp_path, "after-a-call")
    assert (code, (tmp_path / "paid.txt").read_text()) == (-signal.SIGKILL, "7\n"), text
    code, text = run_program(name, tmp_path, "after-a-call")
    assert (code, "paid 9" in text) == (0, True), text
    assert (tmp_path / "paid.txt").read_text() == "7\n9\n"
    receipt = await read_receipt(desk)
    assert (receipt.state, [line.outcome for line in receipt.calls]) == ("COMPLETED", ["ok", "ok"])


@needs("repeat", "reopen")
async def test_a_call_is_not_made_again_when_its_run_is_repeated_after_an_error(
    desk: Desk, framework: type[Driver]
) -> None:
    def be_away(result_count: int) -> None:
        if result_count == 1:
            raise ConnectionError("the provider is away")

    mind = Mind(on_results=be_away)
    with pytest.raises(ConnectionError, match="away"):
        await framework(desk, mind, max_output_tokens=100).run("one")
    assert "paid 7" in await framework(desk, max_output_tokens=100).run("one")
    assert desk.paid == [7]
    assert (await read_receipt(desk)).state == "COMPLETED"
    # A later run of the conversation is a new one.
    assert "paid 7" in await framework(desk).run("one")
    assert desk.paid == [7, 7]


@needs("run_structured")
async def test_a_structured_answer_is_held_and_settled_like_any_other(desk: Desk, framework: type[Driver]) -> None:
    order = await framework(desk, Mind(is_structured=True)).run_structured()
    assert (order.amount, desk.paid) == (7, [7])
    await expect_receipt(desk, framework, ["pay"], requests=2)


@needs("hand_off")
async def test_an_agent_that_is_handed_off_to_is_in_the_same_session(desk: Desk, framework: type[Driver]) -> None:
    mind = Mind()
    assert "paid 7" in await framework(desk, mind).hand_off()
    assert desk.paid == [7]
    await expect_receipt(desk, framework, ["pay"], requests=len(mind.limits))


MAIL_CALL: Final[Call] = ("read_mail", {})
THANKS: Final[Call] = ("send_mail", {"to": "bob@example.org"})
INVOICE: Final[Call] = ("send_mail", {"to": "eve@example.net"})


async def test_a_value_that_only_others_wrote_is_put_before_a_person(desk: Desk, framework: type[Driver]) -> None:
    desk.policy = {"policy": {"provenance": "ask"}}
    await framework(desk, Mind(MAIL_CALL, THANKS)).run()
    assert len(desk.paid) == 1
    state = await framework(desk, Mind(MAIL_CALL, INVOICE)).ask()
    assert len(desk.paid) == 1
    await desk.decide("deny")
    await framework(desk, Mind(MAIL_CALL, INVOICE)).resume(state)
    assert len(desk.paid) == 1
