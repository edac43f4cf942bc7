"""The drill of many machines, in short: it finds nothing where nothing is wrong, and a fence that is gone."""

import json

import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter_drills.chaos import ROUND, SERVER_NOT_STOPPED, STOPPED, WORKERS, beginnings, plan_faults, rounds, run
from halter_drills.drill import Setting

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(400)]


@pytest.mark.soak
@pytest.mark.usefixtures("postgres_binaries")
def test_workers_that_are_killed_and_stopped_lose_nothing_and_do_nothing_twice() -> None:
    answer = CliRunner().invoke(build_command_tree(), ["drill", "chaos", "--seeds", "30", "--json"])
    result = json.loads(answer.stdout)
    assert result["detail"]["violations"] == []
    assert (answer.exit_code, result["drill"], result["store"], result["cases"]) == (0, "chaos", "postgresql", 30)
    happened = [result["detail"][text] for text in ("kills", "stops", "server_stopped")]
    assert happened == [1, 1, 1]
    assert result["detail"]["orphans"] > 0
    assert "chaos on postgresql" in answer.stderr


@pytest.mark.soak
def test_a_fence_that_is_gone_is_found(postgres_url: str) -> None:
    """Two workers have to meet at one session, which real processes do not do in every run."""
    texts: list[str] = []
    for _ in range(3):
        result = run(Setting(postgres_url, 20, teeth=True))
        assert result.detail["left_out"] == SERVER_NOT_STOPPED
        texts += result.detail["violations"]
        if any("was written by" in sentence or "for the second time" in sentence for sentence in texts):
            return
    pytest.fail(str(texts))


@pytest.mark.parametrize("seed", range(50))
def test_a_plan_leaves_one_worker_alone_at_any_moment(seed: int) -> None:
    plan = plan_faults(seed, rounds(300))
    assert [blow.at for blow in plan] == sorted(blow.at for blow in plan)
    for blow in plan:
        soon = {fault.worker_index for fault in plan if fault.what in ("kill", "stop") and 0 <= fault.at - blow.at < 5}
        stopped = {fault.worker_index for fault in plan if fault.what == "stop" and 0 <= blow.at - fault.at < STOPPED}
        assert len(soon | stopped) < WORKERS


def test_every_session_begins_while_something_happens() -> None:
    for sessions in (1, 7, 30, 300, 1000):
        moments = beginnings(sessions, rounds(sessions))
        assert len(moments) == sessions
        assert 0 < min(moments) <= max(moments) < rounds(sessions) * ROUND
