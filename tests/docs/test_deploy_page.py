"""What the page about many machines says, tried out: the backup and its restore, an upgrade, the units and compose."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import yaml

from halter.core.clock import SystemClock, parse_duration
from halter.core.errors import StoreUnusable
from halter.core.events import SessionStarted
from halter.core.ids import SortableIds
from halter.journal.open import open_store
from halter.state import lifecycle
from halter.testing.postgres import find_postgres_binaries, throwaway_cluster
from tests.docs.pages import ROOT, Page
from tests.docs.terminal import Terminal

DEPLOY = ROOT / "deploy"
PAGE = Page("docs/how-to/deploy.md")
DESK = "name: desk\nmodel: reflex\nreflex:\n  - say: Good morning.\n"
UNITS = sorted(DEPLOY.glob("*.service"))
HARMFUL = (
    *("RestrictNamespaces", "SystemCallFilter"),
    *("ProtectKernelTunables", "ProtectKernelLogs", "ProtectProc", "ProcSubset"),
)
"""With these, nobody can make a namespace of their own, or mount a `/proc` there."""
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


class Host:
    """A host with a terminal and PostgreSQL's programs, and a server that holds its store."""

    def __init__(self, home: Path, server: str) -> None:
        (home / "desk").mkdir(parents=True)
        (home / "desk" / "agent.yaml").write_text(DESK)
        self.terminal = Terminal(home)
        split_result = urlsplit(server)
        self.terminal.environ |= {
            "PGHOST": split_result.hostname or "",
            "PGPORT": str(split_result.port),
            "PGUSER": split_result.username or "",
            "DATABASE": "postgres",
            "HALTER_STORE": "postgresql:///postgres?schema=halter",
            "PATH": f"{find_postgres_binaries()}:{self.terminal.environ['PATH']}",
        }

    def does(self, command: str) -> str:
        text, left = self.terminal.types(command)
        assert left == 0, f"{command}\n{text}"
        return text


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_binaries: None) -> Iterator[Host]:
    monkeypatch.chdir(tmp_path)
    with throwaway_cluster() as cluster:
        yield Host(tmp_path, cluster.url)


def backup() -> list[str]:
    """The commands of the page, one to a line."""
    (block,) = (block for block in PAGE.blocks if "pg_dump" in block.text)
    return block.text.splitlines()


@pytest.mark.postgres
@pytest.mark.timeout(120)
def test_what_was_dumped_and_restored_as_the_page_says_is_found_to_be_whole(host: Host) -> None:
    host.does("halter run desk hello")
    text = "".join(host.does(line) for line in backup())
    assert "Nothing was altered" in text


@pytest.mark.postgres
@pytest.mark.timeout(120)
def test_what_a_backup_lacks_is_told_by_the_checkpoints_that_were_kept_elsewhere(host: Host) -> None:
    host.does("halter run desk hello")
    *dump_and_restore, verify = backup()
    host.does(dump_and_restore[0])
    host.does("halter run desk hello")
    for line in dump_and_restore[1:]:
        host.does(line)
    text, left = host.terminal.types(verify)
    assert left == 1
    assert "│ dropped " in text
    text, left = host.terminal.types(verify.replace("verify", "run desk hello"))
    assert (left, "is older than its checkpoints" in text) == (3, True)
    host.does(verify.replace("verify", "halt fleet --reason restored"))
    host.does(verify.replace("verify", "store accept --reason restored --yes"))
    text = host.does(verify)
    assert "a person accepted the store" in text
    assert "Nothing was altered" in text
    host.does(verify.replace("verify", "resume fleet"))
    host.does(verify.replace("verify", "run desk hello"))


@pytest.mark.postgres
async def test_who_runs_while_a_newer_version_migrates_goes_on_and_who_starts_after_that_refuses(
    postgres_schema_url: str,
) -> None:
    clock = SystemClock()
    ids = SortableIds(clock.now)
    running = open_store(postgres_schema_url, clock=clock, ids=ids)
    with psycopg.connect(postgres_schema_url.partition("?")[0], autocommit=True) as newer:
        schema = postgres_schema_url.partition("schema=")[2]
        newer.execute(f"UPDATE {schema}.meta SET value = '9999' WHERE name = 'schema'".encode())
        newer.execute(f"ALTER TABLE {schema}.sessions ADD COLUMN something TEXT NOT NULL DEFAULT ''".encode())
    event = SessionStarted(session="one", agent="desk", kind="chat", started_by="ada")
    assert len((await running.commit(lifecycle.start_session(event))).events) == 1
    await running.close()
    with pytest.raises(
        StoreUnusable,
        match=r"has schema version 9999, but this version of Halter supports up to \d+\. Nothing was changed",
    ):
        open_store(postgres_schema_url, clock=clock, ids=ids)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_the_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("There is no systemd-analyze on this machine.")
    path = tmp_path / unit.name.replace("@.", "@1.")
    path.write_text(unit.read_text().replace("/opt/halter/bin/halter", "/bin/true"))
    process = subprocess.run([analyze, "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (process.stdout + process.stderr, process.returncode) == ("", 0)


def commands() -> Iterator[tuple[str, list[str]]]:
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
        yield unit.name, line.split()
    for name in ("worker", "server"):
        yield f"compose.yaml: {name}", COMPOSE["services"][name]["command"]
    (line,) = re.findall(r"^CMD (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    yield "Dockerfile", yaml.safe_load(line)


@pytest.mark.parametrize(("where", "command"), list(commands()), ids=[where for where, _ in commands()])
def test_what_is_started_can_be_typed(where: str, command: list[str], tmp_path: Path) -> None:
    _, verb, *options = command
    text, left = Terminal(tmp_path).types(f"halter {verb} --help")
    assert left == 0
    assert [option for option in options if option.startswith("--") and option not in text] == [], where


def seconds(text: str) -> int:
    return parse_duration(text if text[-1].isalpha() else f"{text}s")


def test_a_worker_has_longer_to_end_than_it_drains() -> None:
    unit = (DEPLOY / "halter-worker@.service").read_text()
    (drain,), (stop,) = re.findall(r"--drain (\S+)", unit), re.findall(r"^TimeoutStopSec=(\S+)$", unit, re.MULTILINE)
    assert seconds(stop) > seconds(drain)
    worker = COMPOSE["services"]["worker"]
    assert seconds(worker["stop_grace_period"]) > seconds(worker["command"][-1])


def test_no_setting_of_a_worker_s_unit_keeps_bubblewrap_from_making_its_sandbox() -> None:
    unit = (DEPLOY / "halter-worker@.service").read_text()
    harmful = {name for name in re.findall(r"^(\w+)=", unit, re.MULTILINE) if name in HARMFUL}
    assert harmful == set()
    assert all(f"`{name}`" in PAGE.text for name in HARMFUL)


def test_compose_can_be_read_and_names_only_what_it_has() -> None:
    services, volumes = COMPOSE["services"], set(COMPOSE["volumes"])
    mounted = {mount.partition(":")[0] for each in services.values() for mount in each["volumes"]}
    assert {name for name in mounted if not name.startswith(".")} == volumes
    assert set(services["worker"]["depends_on"]) <= set(services)


def test_the_image_is_made_of_what_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_connections_that_compose_allows_are_enough_for_what_the_page_scales_to() -> None:
    (result,) = re.findall(r"max_connections=(\d+)", " ".join(COMPOSE["services"]["database"]["command"]))
    (workers,) = re.findall(r"--scale worker=(\d+)", PAGE.text)
    assert int(result) >= 8 * int(workers) + 4 + 20


def test_the_secrets_that_are_shown_are_made_up() -> None:
    results = re.findall(r"^(?:PGPASSWORD|\w+_API_KEY|HALTER_SECRET_\w+)=(.+)$", PAGE.text, re.MULTILINE)
    assert [value for value in results if not value.startswith("made-up-")] == []
    assert results
    assert os.sep not in "".join(results)
