"""Every drill finds nothing where nothing is wrong, and something where one part was broken on purpose."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from halter.cli.commands import build_command_tree
from halter.testing.postgres import throwaway_cluster
from halter_drills import DRILLS, find
from halter_drills.children import children
from halter_drills.drill import DrillBroken, Setting, own_store, translate_errors
from halter_drills.inject.attacks import load_attacks
from halter_drills.race import spend_in_folders
from halter_drills.zombie import TOGETHER

FEW = {
    "race": 1,
    "billing": 1,
    "kill": 6,
    "stop": 4,
    "powercut": 120,
    "tamper": 1,
    "zombie": 5,
    "halt": 10,
    "approval": 1,
    "secrets": 120,
    "flood": 2,
    "authority": 1,
    "restore": 1,
    "proxy": 1,
    "hook": 1,
    "inject": len(load_attacks()),
}
BITES = {
    "billing": r": billed \$.+, recorded \$",
    "race": r"\(call_started\) brings .+ to \d+ of \d+",
    "kill": r"was acknowledged and is lost",
    "stop": r"'CANCELLED', 'cancelled'|'ERROR', 'step_failed'",
    "powercut": r"has lost \d+ acknowledged commits?",
    "tamper": r"the facts.+was not found",
    "zombie": r"continued, and .+ was let through",
    "halt": r"still ran after|did not end|in flight until",
    "approval": r"Even so, \w+ ran for",
    "secrets": r"appears in",
    "flood": r"; the limit (without a sleep )?is|sleeps outside the limits",
    "authority": r"SKILL.md was changed",
    "restore": r"ran, although a person denied it",
    "proxy": r": billed \$.+, recorded \$",
    "hook": r": the tool ran",
    "inject": r"ran with a value of the attacker and without a decision",
}
"""What the checker of each drill finds where that part is broken which `--teeth` breaks."""
ON_SQLITE = [name for name in DRILLS if "sqlite" in find(name).stores]
"""All but the one of many machines, which has tests of its own."""
SOAK_ON_POSTGRES = [pytest.mark.postgres, pytest.mark.soak]
ON_ALL_STORES = [
    *(pytest.param(name, "sqlite", id=f"{name}-sqlite") for name in ON_SQLITE),
    *(
        pytest.param(name, "postgresql", id=f"{name}-postgresql", marks=SOAK_ON_POSTGRES)
        for name in ON_SQLITE
        if "postgresql" in find(name).stores
    ),
]


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Name a store that a drill must leave as it is."""
    if kind == "sqlite":
        yield f"sqlite://{tmp_path / 'halter.db'}"
        assert list(tmp_path.iterdir()) == []
        return
    server = request.getfixturevalue("postgres_url")
    yield server
    with psycopg.connect(server) as connection:
        tuple_rows = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'halter_drill%'"
        ).fetchall()
    assert tuple_rows == []


def halter(*arguments: str) -> Result:
    return CliRunner().invoke(build_command_tree(), ["drill", *arguments])


@pytest.mark.parametrize(("name", "kind"), ON_ALL_STORES)
def test_a_drill_finds_nothing_wrong_and_leaves_nothing_behind(name: str, kind: str, url: str) -> None:
    steps: list[tuple[int, int]] = []

    def hear(done: int, total: int, note: str) -> None:
        steps.append((done, total))

    result = find(name).run(Setting(url, FEW[name], progress=hear))
    assert (result.drill, result.store) == (name, kind)
    assert result.cases >= FEW[name]
    assert (result.violations, result.detail["violations"]) == (0, [])
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.postgres
@pytest.mark.soak
@pytest.mark.parametrize("name", ["race", "kill", "zombie"])
def test_a_drill_on_a_server_does_its_work_there(name: str, postgres_url: str) -> None:
    numbers: list[int] = []

    def look(done: int, total: int, note: str) -> None:
        with psycopg.connect(postgres_url) as server:
            query = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'halter_drill%'"
            counts = [
                server.execute(f"SELECT count(*) FROM {schema}.events".encode()).fetchone()
                for (schema,) in server.execute(query).fetchall()
            ]
        numbers.append(sum(count[0] for count in counts if count))

    find(name).run(Setting(postgres_url, 2, progress=look))
    assert max(numbers) > 0


@pytest.mark.postgres
@pytest.mark.parametrize("name", ["kill", *(pytest.param(name, marks=pytest.mark.soak) for name in ("race", "zombie"))])
def test_a_drill_is_given_its_server_on_the_command_line_and_says_what_it_found(name: str, postgres_url: str) -> None:
    fine = halter(name, "--store", postgres_url, "--seeds", "1", "--json")
    assert (fine.exit_code, json.loads(fine.stdout)["store"]) == (0, "postgresql"), fine.output


@pytest.mark.postgres
@pytest.mark.soak
@pytest.mark.parametrize("name", ["race", "kill", "zombie"])
def test_a_drill_with_teeth_is_given_its_server_on_the_command_line(name: str, postgres_url: str) -> None:
    broken = halter(name, "--store", postgres_url, "--seeds", str(FEW[name]), "--teeth", "--json")
    assert broken.exit_code == 0, broken.output
    assert json.loads(broken.stdout)["violations"] > 0


@pytest.mark.parametrize(("name", "kind"), ON_ALL_STORES)
def test_a_drill_with_teeth_finds_what_was_broken(name: str, kind: str, url: str) -> None:
    result = find(name).run(Setting(url, FEW[name], teeth=True))
    assert result.violations > 0
    violations = result.detail["violations"]
    assert any(re.search(BITES[name], sentence) for sentence in violations), violations


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=SOAK_ON_POSTGRES)])
def test_the_race_finds_processes_that_obey_the_file_in_their_own_folder(kind: str, url: str) -> None:
    values: dict[bool, list[str]] = {}
    for broken in (False, True):
        with own_store(Setting(url)) as ground, children("halter_drills.race") as started:
            assert ground.kind == kind
            values[broken], _ = spend_in_folders(ground, started, broken=broken)
    assert values[False] == []
    assert "the store's policy allows 120000" in values[True][0]


def test_zombies_that_are_let_through_do_not_stop_the_drill_from_going_on_with_the_next() -> None:
    result = find("zombie").run(Setting(seeds=TOGETHER + 1, teeth=True))
    assert result.cases == TOGETHER + 1
    assert all(re.search(BITES["zombie"], sentence) for sentence in result.detail["violations"])
    # Each of them is let through at least once, also the one of the second batch.
    assert result.violations > 10 * result.cases


def test_every_drill_is_known_to_bite_and_for_which_reason() -> None:
    # The one of many machines has a test of its own for this.
    assert {*BITES, "chaos"} == {*DRILLS}


def test_json_of_one_drill_has_exactly_the_promised_keys() -> None:
    answer = halter("kill", "--seeds", "2", "--json")
    assert answer.exit_code == 0
    result = json.loads(answer.stdout)
    assert list(result) == ["drill", "store", "cases", "violations", "detail"]
    assert (result["drill"], result["store"], result["cases"], result["violations"]) == ("kill", "sqlite", 2, 0)


@pytest.mark.soak
def test_json_of_all_drills_is_a_list_and_with_teeth_finding_violations_is_success(tmp_path: Path) -> None:
    answer = halter("all", "--store", str(tmp_path / "halter.db"), "--seeds", "2", "--teeth", "--json")
    assert answer.exit_code == 0
    results = json.loads(answer.stdout)
    assert [result["drill"] for result in results] == ON_SQLITE
    assert all(result["violations"] > 0 for result in results)
    assert "every drill found it" in answer.stderr
    assert f"drill 1 of {len(ON_SQLITE)}: {ON_SQLITE[0]} on sqlite" in answer.stderr


def test_people_get_a_table_and_a_sentence() -> None:
    answer = halter("kill", "--seeds", "2")
    assert answer.exit_code == 0
    assert "what it proves" in answer.stdout
    assert "2 cases, no violation." in answer.stdout


def test_an_unknown_drill_is_answered_with_those_that_exist() -> None:
    answer = halter("nope")
    assert answer.exit_code == 2
    assert answer.stderr == f"Unknown drill nope. Use one of {', '.join(DRILLS)}, or all.\n"


def test_a_drill_that_does_not_fit_the_store_says_so() -> None:
    answer = halter("powercut", "--store", "postgresql://nobody@127.0.0.1:1/none")
    assert answer.exit_code == 2
    assert answer.stderr == "The drill powercut runs on sqlite only. Choose another --store.\n"


def test_a_drill_of_many_machines_does_not_run_on_a_file(tmp_path: Path) -> None:
    answer = halter("chaos", "--store", str(tmp_path / "halter.db"))
    assert answer.exit_code == 2
    assert answer.stderr == "The drill chaos runs on postgresql only. Choose another --store.\n"


def test_a_store_that_cannot_be_used_is_a_sentence_without_a_password() -> None:
    answer = halter("race", "--store", "postgresql://ada:secret@127.0.0.1:1/none")
    assert answer.exit_code == 3
    assert answer.stderr.startswith("Cannot reach the PostgreSQL database at 127.0.0.1:1")
    assert "secret" not in answer.stderr


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    answer = halter("race", "--store", str(tmp_path / "missing" / "halter.db"))
    assert answer.exit_code == 3
    assert answer.stderr.startswith(f"Cannot create the drill's folder in {tmp_path / 'missing'} (")
    assert answer.stderr.endswith(f"Check that {tmp_path / 'missing'} exists and is writable.\n")
    assert not (tmp_path / "missing").exists()


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_binaries")
def test_a_server_that_restarts_ends_a_drill_in_a_sentence_and_its_schema_goes() -> None:
    with throwaway_cluster() as cluster, ThreadPoolExecutor(1) as thread_pool_executor:

        def restart(done: int, total: int, note: str) -> None:
            if done == 1:
                cluster.stop_hard()
                thread_pool_executor.submit(cluster.start)

        with pytest.raises(DrillBroken, match=r"^The drill ended early and proves nothing\."), translate_errors():
            find("tamper").run(Setting(cluster.url, 1, progress=restart))
        with psycopg.connect(cluster.url) as connection:
            tuple_rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'halter%'").fetchall()
    assert tuple_rows == []
