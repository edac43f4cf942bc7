"""The pages that are made of measurements: they stand whoever failed, name who is ahead, and add up."""

import json
from typing import Any

import pytest

from bench import beside, sizing, tables
from bench.measure import DOCS, RESULTS
from bench.sizing import Costs, Fleet

NOTES: dict[str, Any] = {
    "measured": "2036-01-01",
    "rounds": 1,
    "versions": {"halter": "1", "agno": "2", "agent-framework": "3"},
    "missing": {},
}


def make_row(name: str, workload: str, **values: float) -> dict[str, Any]:
    return {"name": name, "workload": workload, "values": values, "spread": {}, "note": "a file", "failed": ""}


def make_failed_row(name: str, workload: str) -> dict[str, Any]:
    return make_row(name, workload) | {"note": "", "failed": "it broke"}


def page(*rows: dict[str, Any], **notes: Any) -> str:
    return "\n".join(beside.told({"notes": NOTES | notes, "rows": list(rows)}))


def test_the_table_stands_where_only_we_were_measured() -> None:
    text = page(make_row("halter", "cpu", ms_per_step=0.05), make_row("halter", "durable", runs_per_second=100))
    assert "| a step, CPU ms | 0.2 | 0.05 | yes |" in text
    assert "Where others are ahead" not in text
    assert "against the best that syncs" not in text


def test_the_table_stands_where_a_peer_failed_or_could_not_be_installed_and_says_so() -> None:
    text = page(
        make_row("halter", "cpu", ms_per_step=1), make_failed_row("agno", "cpu"), missing={"langgraph": "no network"}
    )
    assert "- agno, cpu: failed: it broke" in text
    assert "- langgraph: no network" in text


def test_the_table_stands_where_we_failed() -> None:
    text = page(make_failed_row("halter", "cpu"), make_row("agno", "cpu", ms_per_step=1))
    assert "- halter, cpu: failed: it broke" in text


def test_who_is_ahead_is_named_row_by_row_the_best_first() -> None:
    text = page(
        make_row("halter", "cpu", ms_per_step=0.5),
        make_row("agno", "cpu", ms_per_step=0.4),
        make_row("agent-framework", "cpu", ms_per_step=0.3),
        make_row("halter", "durable", runs_per_second=20, cpu_ms_per_run=1),
        make_row("agno", "durable", runs_per_second=10, cpu_ms_per_run=2),
        make_row("agent-framework", "durable", runs_per_second=30, cpu_ms_per_run=3),
    )
    assert "- CPU ms a step: agent-framework 0.30, agno 0.40; Halter 0.50." in text
    assert "- runs a second: agent-framework 30.0 (which never syncs); Halter 20.0." in text
    assert "- CPU ms a run" not in text
    assert "| durable runs, against the best that syncs | 5× | 2.0× | no |" in text


def test_more_steps_a_second_reach_an_aim_and_are_ahead() -> None:
    text = page(
        make_row("halter", "durable_crowd", steps_per_cpu_second=2600, steps_per_second=2000),
        make_row("agno", "durable_crowd", steps_per_cpu_second=200, steps_per_second=2100),
    )
    assert "| 1,000 durable runs at once, steps a CPU second | 2500 | 2,600 | yes |" in text
    assert "- 1,000 at once: steps a second: agno 2,100; Halter 2,000." in text
    assert "- 1,000 at once: steps a CPU second" not in text


def test_nobody_is_said_to_be_ahead_who_is_not() -> None:
    text = page(make_row("halter", "cpu", ms_per_step=0.1), make_row("agno", "cpu", ms_per_step=0.4))
    assert "Nowhere in these tables." in text


COSTS = Costs(
    worker_wake=10,
    worker_step=2,
    server_wake=5,
    server_step=1,
    history=20,
    log=5_000,
    kept=2_000,
    sleeper=1_500,
    rows=4,
    memory=100,
    connection=3,
    connections=8,
    offers=1_000,
)


def test_a_wake_and_a_step_are_told_apart_by_turns_of_one_step_and_of_five() -> None:
    # 12 ms for a wake and one step, 20 ms for a wake and five: 4 ms for each of five.
    assert sizing.parted(12, 4) == (10, 2)


def test_where_noise_hides_a_wake_it_is_counted_to_the_steps() -> None:
    assert sizing.parted(2, 4) == (0, 4)


def test_the_needs_of_a_fleet_add_up() -> None:
    values = dict(zip(sizing.ROWS, sizing.needs(Fleet(36_000, 3_600, 5), COSTS), strict=True))
    # 10 wakes and 50 steps a second: 10 × 10 ms + 50 × 2 ms, and 10 × 5 ms + 50 × 1 ms.
    assert values["wakes a second"] == "10.0"
    assert values["steps a second"] == "50"
    assert values["CPU of workers, cores busy"] == "0.2"
    assert values["CPU of PostgreSQL, cores busy"] == "0.1"
    assert values["workers, each with a core"] == "2"
    assert values["connections"] == "16"
    assert values["sleepers on disk"] == "54.0 MB"
    assert values["kept on disk a day"] == "8.6 GB"
    assert values["of what can be offered"] == "1.0 %"


def test_a_larger_fleet_gets_as_many_workers_as_leave_room() -> None:
    values = dict(zip(sizing.ROWS, sizing.needs(Fleet(1_000_000, 600, 5), COSTS), strict=True))
    # 1,667 wakes a second at 20 ms each are 33.3 cores; at 60 % of a core each, 56 workers.
    assert values["workers, each with a core"] == "56"


@pytest.mark.parametrize("name", sorted(tables.pages()))
def test_a_page_says_what_was_measured_and_nothing_else(name: str) -> None:
    assert (DOCS / name).read_text() == tables.pages()[name]


def test_results_name_what_they_were_measured_on() -> None:
    for path in RESULTS.glob("*.json"):
        assert json.loads(path.read_text())["machine"]["cores"]
