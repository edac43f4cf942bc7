"""`halter doctor`: each thing that can be wrong is named among all that is well, with what to do."""

import asyncio
import json
import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.clock import DAY, SystemClock
from halter.operations.doctor import machine
from halter.operations.doctor.check import combine_checks, fail_check, pass_check, warn_check
from halter.operations.doctor.store import check_disk
from halter.runtime.runtime import open_runtime
from halter.settings import Settings, read_settings

GOLDEN = Path(__file__).parents[1] / "golden" / "0.5.0" / "store.db"
KEY = "made-up-key-4711"


class Doctor:
    """A machine with a store of its own, and folders of agents beside it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "HALTER_PERSON": "ada",
            "COLUMNS": "80",
        }
        asyncio.run(self._begin())

    async def _begin(self) -> None:
        async with open_runtime(read_settings(self.environ, self.home)):
            pass

    @property
    def store(self) -> Path:
        return self.home / "state" / "halter" / "halter.db"

    def agent(self, name: str, text: str) -> str:
        folder = self.home / name
        folder.mkdir()
        (folder / "agent.yaml").write_text(f"name: {name}\n{text}")
        return str(folder)

    def looks(self, *words: str) -> dict[str, Any]:
        """Have everything looked at; tell the code, and each finding by its name."""
        result = CliRunner().invoke(build_command_tree(), ["doctor", *words, "--json"], env=self.environ)
        assert KEY not in result.output
        values = {check["name"]: (check["verdict"], check["finding"]) for check in json.loads(result.stdout)}
        return {"code": result.exit_code, "beside": result.stderr, **values}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def test_a_broken_agent_is_named_among_good_ones_and_the_others_are_looked_at(doctor: Doctor) -> None:
    good = doctor.agent("good", "model: reflex\nreflex: [{say: hi}]\n")
    broken = doctor.agent("broken", "modle: x\n")
    fields = doctor.looks(good, broken, str(doctor.home / "nowhere"))
    assert fields["code"] == 1
    assert fields["good"][0] == "ok"
    assert fields["good models"] == ("ok", "reflex:rules needs no key and is free.")
    assert "line 2: `modle` is not a key" in fields[broken][1]
    assert "nowhere" in fields[str(doctor.home / "nowhere")][1]


def test_a_store_of_a_newer_version_is_a_sentence_and_all_else_is_looked_at(doctor: Doctor) -> None:
    newer = doctor.home / "newer.db"
    shutil.copy(GOLDEN, newer)
    with closing(sqlite3.connect(newer)) as connection, connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    fields = doctor.looks("--store", str(newer))
    assert fields["code"] == 3
    assert "has schema version 99, but this version of Halter supports up to" in fields["store"][1]
    assert "Use the newer Halter" in fields["beside"]
    assert {"fleet", "prices", "sandbox", "port"} <= set(fields)


def test_a_damaged_file_is_found(doctor: Doctor) -> None:
    with sqlite3.connect(doctor.store) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'budgets'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    with doctor.store.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * 64)
    fields = doctor.looks()
    assert (fields["code"], fields["file"][0]) == (1, "problem")
    assert "is damaged" in fields["file"][1]
    assert "restore a backup" in fields["file"][1]


def test_a_broken_file_of_the_fleet_is_named(doctor: Doctor) -> None:
    file = doctor.home / "halter.yaml"
    file.write_text("caps: much\n")
    doctor.environ["HALTER_FLEET"] = str(file)
    fields = doctor.looks()
    assert (fields["code"], fields["fleet"][0]) == (1, "problem")
    assert "halter.yaml line 1" in fields["fleet"][1]


class ModelServer:
    """A provider that lists its models to who has the key, and notes what it is asked."""

    def __init__(self, status: int = 0) -> None:
        self.requests: list[tuple[str, str]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.headers.get("Authorization") or self.headers.get("x-api-key") or ""
                requests.append((self.path, key))
                self.send_response(status or (200 if KEY in key else 401))
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(status: int = 0) -> Iterator[ModelServer]:
    server = ModelServer(status)
    try:
        yield server
    finally:
        server.close()


def make_writer(doctor: Doctor, url: str) -> str:
    provider = f'{{base_url: {url}, api_key: "${{secret:OPENAI_API_KEY}}"}}'
    return doctor.agent("writer", f"model: openai:gpt-5-mini\nproviders: {{openai: {provider}}}\n")


def test_a_key_that_is_missing_is_asked_for_and_one_that_is_there_is_never_shown(doctor: Doctor) -> None:
    with serving() as server:
        folder = make_writer(doctor, f"{server.url}/v1")
        assert "OPENAI_API_KEY, which is not set" in doctor.looks(folder)["writer models"][1]
        assert server.requests == []
        doctor.environ["OPENAI_API_KEY"] = KEY
        text = "openai:gpt-5-mini has a price; its key is set (OPENAI_API_KEY); its provider answers."
        assert doctor.looks(folder)["writer models"] == ("ok", text)
        assert server.requests == [("/v1/models", f"Bearer {KEY}")]


def test_a_key_that_the_provider_refuses_is_a_problem_before_any_agent_runs(doctor: Doctor) -> None:
    doctor.environ["OPENAI_API_KEY"] = "another-key-0815"
    with serving() as server:
        fields = doctor.looks(make_writer(doctor, f"{server.url}/v1"))
    assert fields["code"] == 1
    sentence = "The provider of openai:gpt-5-mini refuses the key (HTTP 401). Check `OPENAI_API_KEY`."
    assert fields["writer models"] == ("problem", sentence)


@pytest.mark.parametrize("status", [0, 503])
def test_a_provider_that_does_not_answer_is_a_warning(doctor: Doctor, status: int) -> None:
    doctor.environ["OPENAI_API_KEY"] = KEY
    with serving(status) as server:
        folder = make_writer(doctor, f"{server.url}/v1")
        if status:
            assert "HTTP 503" in doctor.looks(folder)["writer models"][1]
    verdict, sentence = doctor.looks(folder)["writer models"]
    assert (verdict, "cannot be reached" in sentence) == ("warning", True)


def test_an_address_without_a_list_of_models_is_no_problem(doctor: Doctor) -> None:
    doctor.environ["OPENAI_API_KEY"] = KEY
    with serving(404) as server:
        assert doctor.looks(make_writer(doctor, server.url))["writer models"][0] == "ok"


def test_an_agent_that_its_triggers_start_is_said_to_run_unattended_in_each_finding(doctor: Doctor) -> None:
    fields = doctor.looks(doctor.agent("beat", "model: reflex\nheartbeat: 30m\nreflex: [{say: hi}]\n"))
    assert fields["beat"] == ("ok", "Not autonomous, with 0 sensors. Runs unattended, started by `heartbeat`.")
    assert fields["beat provenance"][1].startswith("Runs unattended with provenance in observe mode")


def test_a_clock_that_is_behind_what_the_store_has_recorded_is_a_problem(doctor: Doctor) -> None:
    folder = doctor.agent("good", "model: reflex\nreflex: [{say: hi}]\n")
    assert CliRunner().invoke(build_command_tree(), ["run", folder, "Hello."], env=doctor.environ).exit_code == 0
    assert doctor.looks()["clock"][0] == "ok"
    with closing(sqlite3.connect(doctor.store)) as connection, connection:
        connection.execute("UPDATE streams SET at = at + ?", (6 * 365 * DAY,))
    fields = doctor.looks()
    assert (fields["code"], fields["clock"][0]) == (1, "problem")
    assert "but the newest event of this store is of 20" in fields["clock"][1]


def test_a_model_without_a_price_is_named_with_what_to_write(doctor: Doctor) -> None:
    doctor.environ["OPENAI_API_KEY"] = KEY
    folder = doctor.agent("writer", "model: openai:gpt-unheard-of\n")
    fields = doctor.looks(folder)
    assert fields["code"] == 1
    assert "The price of openai:gpt-unheard-of is not known" in fields["writer models"][1]
    assert "price: free" in fields["writer models"][1]


def test_a_secret_that_nobody_has_set_is_named_by_its_variable(doctor: Doctor) -> None:
    folder = doctor.agent("writer", "secrets: [MAIL, SMS]\n")
    doctor.environ["HALTER_SECRET_MAIL"] = KEY
    fields = doctor.looks(folder)
    assert fields["writer secrets"][0] == "problem"
    assert "HALTER_SECRET_SMS" in fields["writer secrets"][1]
    assert "HALTER_SECRET_MAIL" not in fields["writer secrets"][1]
    doctor.environ["HALTER_SECRET_SMS"] = KEY
    assert doctor.looks(folder)["writer secrets"] == ("ok", "All secrets are set: MAIL, SMS.")


def test_code_that_nobody_trusted_is_named(doctor: Doctor) -> None:
    folder = doctor.agent("writer", "")
    (Path(folder) / "tools.py").write_text("raise SystemExit('this must never run')\n")
    fields = doctor.looks(folder)
    assert (fields["code"], fields["writer code"][0]) == (1, "problem")
    assert f"halter trust {folder}" in fields["writer code"][1]


@contextmanager
def listening() -> Iterator[int]:
    """Listen on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_sensors_are_tried_as_far_as_that_does_nothing(doctor: Doctor) -> None:
    (doctor.home / "log").mkdir()
    with listening() as port, socket.create_server(("127.0.0.1", 0)) as closing:
        ret_address = closing.getsockname()[1]
        closing.close()
        folder = doctor.agent(
            "watch",
            "sensors:\n"
            f"  - {{name: web, type: poll, source: {{url: 'http://127.0.0.1:{port}/x'}}}}\n"
            f"  - {{name: gone, type: poll, source: {{url: 'http://127.0.0.1:{ret_address}/x'}}}}\n"
            "  - {name: logs, type: watch, source: {path: ../log, pattern: '*.log'}}\n"
            "  - {name: later, type: watch, source: {path: ../later/, pattern: '*.log'}}\n",
        )
        fields = doctor.looks(folder)
    assert fields["watch sensors"][0] == "warning", fields
    result = fields["watch sensors"][1]
    assert f"gone cannot reach 127.0.0.1:{ret_address} (" in result
    assert "later watches" in result
    assert "which does not exist" in result
    assert "web" not in result
    assert "logs" not in result


@pytest.mark.parametrize(("more", "verdict"), [("", "warning"), ("policy: {provenance: ask}\n", None)])
def test_an_agent_that_runs_unattended_and_only_observes_is_a_warning(
    doctor: Doctor, more: str, verdict: str | None
) -> None:
    fields = doctor.looks(doctor.agent("alone", f"autonomy: {{enabled: true}}\n{more}"))
    assert fields.get("alone provenance", (None,))[0] == verdict


def test_an_agent_with_tools_of_a_server_is_told_how_its_calls_are_judged(doctor: Doctor) -> None:
    folder = doctor.agent("served", "policy: {provenance: off}\n")
    assert "served provenance" not in doctor.looks(folder)
    Path(folder, ".mcp.json").write_text('{"mcpServers": {}}')
    assert doctor.looks(folder)["served provenance"][0] == "warning"


def test_what_is_left_out_of_the_files_of_other_programs_is_a_warning(doctor: Doctor) -> None:
    folder = doctor.agent("served", "policy: {provenance: ask}\n")
    Path(folder, ".mcp.json").write_text('{"mcpServers": {"web": {"url": "https://a/", "oauth": {}}}}')
    Path(folder, "CLAUDE.md").write_text("@../other.md")
    verdict, text, *_ = doctor.looks(folder)["served files"]
    assert verdict == "warning"
    assert "CLAUDE.md: @../other.md is not imported: " in text
    assert "The server web is omitted: " in text
    assert "`mcpServers.web.oauth` is not supported; put a token into `headers`" in text


async def test_a_port_is_free_taken_by_another_program_or_ours() -> None:
    async def halter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalter is here\n")
        writer.close()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        writer.close()

    for answers, verdict, words in (
        (halter, "ok", "Halter already serves"),
        (other, "warning", "is used by another program. Start Halter with --listen"),
    ):
        async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
            number = server.sockets[0].getsockname()[1]
            check = await machine.check_port("127.0.0.1", number)
        assert (check.verdict, words in check.finding) == (verdict, True)
    assert "is free" in (await machine.check_port("127.0.0.1", number)).finding


def test_a_list_of_tokens_that_others_may_read_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    settings = Settings("memory:", tmp_path, tmp_path, "ada", tokens=file)
    assert machine.check_tokens(settings) is None
    file.write_text("[]")
    file.chmod(0o644)
    check = machine.check_tokens(settings)
    assert check is not None
    assert (check.verdict, f"Other users can read {file}. Run chmod 600 {file}." in check.finding) == ("problem", True)
    file.chmod(0o600)
    check = machine.check_tokens(settings)
    assert check is not None
    assert check.verdict == "ok"


def test_a_table_of_prices_that_is_half_a_year_old_is_a_warning() -> None:
    now = SystemClock().now()
    assert machine.check_prices(now).verdict in {"ok", "warning"}
    old = machine.check_prices(now + 200 * DAY)
    assert (old.verdict, "Update it with pip install -U genai-prices" in old.finding) == ("warning", True)


def test_the_disk_is_looked_at_where_the_journal_grows(tmp_path: Path) -> None:
    assert "GiB" in check_disk(tmp_path).finding
    assert check_disk(tmp_path / "nowhere").verdict == "warning"


def test_several_findings_about_one_thing_get_the_worst_verdict() -> None:
    assert combine_checks("x", [pass_check("a", "A."), warn_check("b", "B."), fail_check("c", "C.")]) == fail_check(
        "x", "B. C."
    )
    assert combine_checks("x", [pass_check("a", "A."), warn_check("b", "B.")]) == warn_check("x", "B.")
    assert combine_checks("x", [pass_check("a", "A."), pass_check("b", "B.")]) == pass_check("x", "A. B.")


@pytest.mark.parametrize("root", [".", "..", "/", "../config"])
def test_a_root_from_which_an_agent_could_change_what_it_may_do_is_a_problem(doctor: Doctor, root: str) -> None:
    folder = doctor.agent("clerk", f"tools: {{files: {{root: {root}}}}}\n")
    fields = doctor.looks(folder)
    assert (fields["code"], fields["clerk roots"][0]) == (1, "problem")
    assert f"agent.yaml line 2: `tools.files.root` is `{root}`, which contains" in fields["clerk roots"][1]
