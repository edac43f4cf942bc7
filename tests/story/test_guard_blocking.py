"""The guard in a program that is not async."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halter import Guard
from halter.core.errors import ConfigError


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    guard = Guard(tmp_path / "runs.db", agent="desk", max_cost_usd=0.1, person="ada", environ={})

    @guard.tool(level="SAFE", cost=0.02)
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    return guard


def test_a_session_ends_with_its_block_and_has_a_receipt(guard: Guard) -> None:
    with guard.blocking() as desk:
        with desk.session("Pay the bill.") as session:
            assert session.call("pay", amount=7).text == "paid 7"
            assert not session.is_near_budget()
        (receipt,) = desk.receipts()
    assert (receipt.state, [line.name for line in receipt.calls]) == ("COMPLETED", ["pay"])


def test_a_block_that_raises_ends_its_session_with_an_error(guard: Guard) -> None:
    with guard.blocking() as desk:
        with pytest.raises(ZeroDivisionError), desk.session() as session:
            session.call("pay", amount=1 // 0)
        (receipt,) = desk.receipts()
    assert receipt.state == "ERROR"


def test_threads_share_one_cap(guard: Guard) -> None:
    """Twenty threads, each with a call of two cents, on a session of ten."""
    with guard.blocking() as desk, desk.session() as session, ThreadPoolExecutor(20) as threads:
        calls = [threads.submit(session.call, "pay", amount=amount) for amount in range(20)]
        answers = [call.result() for call in calls]
        assert sum(answer.outcome == "ok" for answer in answers) == 5
        assert {answer.outcome for answer in answers} == {"ok", "cost_cap_reached"}


def test_a_guard_that_is_not_open_says_so(guard: Guard) -> None:
    with pytest.raises(ConfigError, match="not open"):
        guard.blocking().call("pay", amount=1)
