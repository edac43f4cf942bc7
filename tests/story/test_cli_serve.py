"""`halter serve` and `tokens` as a person types them, in processes of their own."""

import json
import re
import signal
import socket
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest

from tests.story.test_cli_talk import Person
from tests.story.test_cli_up import RUNS, SLEEPS


class Serve:
    """A server in a process of its own, and what it shows."""

    begun: ClassVar[list["Serve"]] = []

    def __init__(self, person: Person, *words: str) -> None:
        self.program = person.begins("serve", "--listen", "127.0.0.1:0", *words, stdin=subprocess.DEVNULL)
        self.begun.append(self)

    def until(self, text: str) -> str:
        assert self.program.stdout is not None
        while text not in (line := self.program.stdout.readline().decode()):
            assert line, self.program.communicate()[1]
        return line

    def ends(self) -> tuple[int, str]:
        self.program.send_signal(signal.SIGINT)
        _, body = self.program.communicate(timeout=30)
        assert b"Traceback" not in body, body.decode()
        return self.program.returncode, body.decode()


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[Person]:
    person = Person(tmp_path)
    person.writes(SLEEPS * 9, RUNS)
    yield person
    while Serve.begun:
        # Whatever failed, no program outlives its test.
        with Serve.begun.pop().program as program:
            program.kill()


def get(url: str, path: str, token: str = "", **more: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx2.request(more.pop("method", "GET"), url + path, headers=headers, timeout=60, **more)


def test_the_first_start_shows_a_token_once_and_runs_agents_beside_the_api(ada: Person) -> None:
    serve = Serve(ada, str(ada.agent))
    url = serve.until("are at http").split()[-1]
    token = re.sub(r".*#token=", "", serve.until("#token=")).strip()
    serve.until("sleeps")
    assert get(url, "/api/whoami").status_code == 401
    assert get(url, "/api/whoami", token).json() == {"name": "ada", "role": "admin", "agents": []}
    (session,) = get(url, "/api/sessions", token).json()
    assert (session["session"], session["state"]) == ("desk-1", "SLEEPING")
    response = get(url, "/api/halts", token, method="POST", json={"scope": "fleet", "reason": "enough"})
    assert response.status_code == 200
    serve.until("halt")
    assert serve.ends() == (130, "")
    file = ada.home / "config" / "halter" / "tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in file.read_text()
    again = Serve(ada, "--json")
    payload = json.loads(again.until("serving"))
    assert set(payload) == {"name", "at", "url"}
    assert get(payload["url"], "/api/whoami", token).status_code == 200
    assert again.ends() == (130, "")


def test_a_lost_token_is_replaced_while_the_server_runs(ada: Person) -> None:
    serve = Serve(ada, str(ada.agent), "--json")
    first = json.loads(serve.until("serving"))
    lost = first["login_url"].partition("#token=")[2]
    result = ada.looks("tokens", "add", "ann", "--role", "viewer", "--agent", "desk")
    assert (result["role"], result["agents"]) == ("viewer", ["desk"])
    assert get(first["url"], "/api/whoami", result["token"]).json()["name"] == "ann"
    assert get(first["url"], "/api/halts", result["token"], method="POST", json={"scope": "fleet"}).status_code == 403
    assert ada.types("tokens", "remove", "ada")[0] == 0
    assert get(first["url"], "/api/whoami", lost).status_code == 401
    assert [each["name"] for each in ada.looks("tokens")] == ["ann"]
    serve.ends()


def test_a_home_in_which_nothing_has_run_is_served(ada: Person) -> None:
    serve = Serve(ada)
    url = serve.until("are at http").split()[-1]
    token = re.sub(r".*#token=", "", serve.until("#token=")).strip()
    assert get(url, "/api/sessions", token).json() == []
    serve.ends()


def test_what_is_wrong_is_a_sentence(ada: Person) -> None:
    code, _, text = ada.types("serve", "--store", str(ada.home / "typo.db"))
    assert (code, "There is no store" in text) == (3, True)
    store = ada.home / "s.db"
    serve = Serve(ada, str(ada.agent), "--store", str(store))
    serve.until("sleeps")
    serve.ends()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, text = ada.types("serve", "--store", str(store), "--listen", f"127.0.0.1:{port}")
        assert (code, f"Cannot listen on 127.0.0.1:{port}: the port is in use." in text) == (3, True)
    code, _, text = ada.types("serve", "--store", str(store), "--listen", "0.0.0.0:0")
    assert (code, "--beyond-this-machine" in text) == (3, True)
    for wrong in (["--listen", "8765"], ["--listen", "x:99999"], ["--host", "a b"], ["--host", "http://x"]):
        assert ada.types("serve", "--store", str(store), *wrong)[0] == 2
    (ada.home / "config" / "halter" / "tokens.json").chmod(0o644)
    code, _, text = ada.types("serve", "--store", str(store), "--listen", "127.0.0.1:0")
    assert (code, "Run chmod 600 on it and create new tokens." in text) == (3, True)
    with sqlite3.connect(store) as file:
        file.execute("UPDATE meta SET value = '9999' WHERE name = 'schema'")
    file.close()
    code, output, text = ada.types("serve", "--store", str(store))
    assert (code, output, "newer" in text) == (3, "", True), text


def test_an_agent_opens_no_server_and_makes_no_token(ada: Person) -> None:
    ada.environ["HALTER_AGENT"] = "desk"
    store = ["--store", str(ada.home / "s.db")]
    for words in (
        ["tokens", "add", "x", "--role", "admin"],
        ["tokens", "remove", "x"],
        ["serve", str(ada.agent), *store],
    ):
        code, _, text = ada.types(*words)
        assert (code, "this command runs inside an agent (agent:desk)" in text) == (1, True), words
    assert not (ada.home / "config" / "halter" / "tokens.json").exists()
