"""`halter demo` as a newcomer types it, in processes of their own."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from halter.core.errors import ConfigError
from halter.demo.folder import has_display
from halter.server.listener import PORT, bind
from tests.story.test_cli_talk import Person, until
from tests.story.test_cli_up import Up


class Demo(Up):
    """The demo in a process of its own, without its night."""

    command = ("demo", "--skip-night", "--no-browser")


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[Person]:
    yield Person(tmp_path)
    while Demo.begun:
        # Whatever failed, no program outlives its test.
        with Demo.begun.pop().program as program:
            program.kill()


def demo_of(person: Person) -> Path:
    return person.home / "state" / "halter" / "demo"


@pytest.mark.soak
def test_programs_get_the_figures_of_the_night_and_nothing_else(ada: Person) -> None:
    code, text, output = ada.types("demo", "--json")
    assert (code, output) == (0, "")
    night = json.loads(text)
    assert night["without"]["cost_usd"] > 10 * night["with"]["cost_usd"]
    (parallel,) = [each for each in night["incidents"] if each["name"] == "parallel_runs"]
    assert parallel["with"]["cost_usd"] <= 1 < parallel["without"]["cost_usd"]
    assert not demo_of(ada).exists()


def test_an_interrupted_night_leaves_in_order_with_a_sentence(ada: Person) -> None:
    with ada.begins("demo", "--night-only") as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(b"Let agents work while you sleep.")
        assert program.stdout.readline() == b"\n"
        assert program.stdout.readline().startswith(b"The worst night comes first")
        program.send_signal(signal.SIGINT)
        _, body = program.communicate(timeout=30)
    assert program.returncode == 130
    assert body == b"Interrupted. The simulated night leaves nothing behind.\n"


INTERRUPTED_WHILE_A_LOOP_IS_MADE = """
import os, signal, sys

def interrupt(frame, event, _):
    if event == "call" and frame.f_code.co_name == "_make_self_pipe":
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(interrupt)
from halter.cli import main
sys.argv = ["halter", "demo", "--night-only"]
main()
"""


def test_an_interrupt_while_an_event_loop_is_made_leaves_the_same_sentence(ada: Person) -> None:
    """A loop that was never whole cannot be closed, and Python would print its traceback when it frees it."""
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_A_LOOP_IS_MADE], env=ada.environ, capture_output=True, check=False
    )
    assert process.returncode == 130
    assert process.stderr == b"Interrupted. The simulated night leaves nothing behind.\n"


@pytest.mark.parametrize("other", ["--night-only", "--json"])
def test_flags_that_leave_nothing_to_show_are_a_sentence(ada: Person, other: str) -> None:
    code, text, output = ada.types("demo", "--skip-night", other)
    assert (code, text) == (2, "")
    assert output == "--skip-night cannot be combined with --night-only or --json.\n"


def test_an_interrupt_ends_the_live_agent_in_order_and_the_next_start_resumes_it(ada: Person) -> None:
    first = Demo(ada)
    first.until("night-watch-1 sleeps")
    assert first.ends() == (0, "")
    assert first.seen[-1] == "night-watch is stopped. Continue with `halter demo --skip-night`."
    assert "night-watch It may spend at most $0.25 a session and $1.00 a day" in "\n".join(first.read_lines())
    second = Demo(ada)
    second.until("night-watch-1 resumes (SLEEPING).")
    assert second.ends(signal.SIGTERM)[0] == 0
    assert not any("starts." in line for line in second.read_lines())
    (row,) = ada.looks("sessions", "--store", str(demo_of(ada) / "halter.db"))
    assert row["session"] == "night-watch-1"


def test_the_demo_touches_nothing_outside_of_its_own_folder(ada: Person) -> None:
    live = Demo(ada)
    live.until("night-watch-1 sleeps")
    live.ends()
    files = [path for path in ada.home.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if not path.is_relative_to(demo_of(ada))] == []


def test_with_a_key_in_the_environment_it_names_the_model_before_it_starts(ada: Person) -> None:
    ada.environ["ANTHROPIC_API_KEY"] = "sk-made-up"
    ada.environ["ANTHROPIC_BASE_URL"] = "http://127.0.0.1:9"
    live = Demo(ada)
    live.until("night-watch-1 starts.")
    live.ends()
    texts = live.read_lines()
    model_line = texts.index("It decides with anthropic:claude-haiku-5-5, whose key is in your environment.")
    assert model_line < next(place for place, line in enumerate(texts) if "at most $0.25 a session" in line)
    assert not any("sk-made-up" in line for line in live.seen)


def test_a_home_that_cannot_be_written_is_a_sentence(ada: Person) -> None:
    (ada.home / "full").write_text("")
    ada.environ["XDG_STATE_HOME"] = str(ada.home / "full")
    code, text, output = ada.types("demo", "--skip-night")
    assert (code, text) == (3, "")
    assert "(Not a directory). Set XDG_STATE_HOME to a folder that you can write to." in output


def test_changed_code_is_a_sentence_with_the_command_that_trusts_it(ada: Person) -> None:
    first = Demo(ada)
    first.until("night-watch-1 sleeps")
    first.ends()
    with (demo_of(ada) / "night-watch" / "tools.py").open("a") as file:
        file.write("# mine\n")
    code, _, text = ada.types("demo", "--skip-night")
    assert code == 3
    assert f"HALTER_TRUST={demo_of(ada)}/trust.json halter trust {demo_of(ada)}/night-watch" in text
    ada.environ["HALTER_TRUST"] = str(demo_of(ada) / "trust.json")
    assert ada.types("trust", str(demo_of(ada) / "night-watch"), given=b"y\n")[0] == 0
    second = Demo(ada)
    second.until("-1 resumes (")
    second.ends()


def login(live: Demo) -> tuple[str, str]:
    """Read the dashboard's address and its token off the screen."""
    base, _, secret = live.until("/login#token=").strip().partition("/login#token=")
    return base, secret


def read_status_code(url: str, secret: str) -> int:
    """Send a request to a server, and return the status code of the answer."""
    host = urlsplit(url)
    connection = HTTPConnection(str(host.hostname), host.port, timeout=30)
    try:
        connection.request("GET", host.path, headers={"Authorization": f"Bearer {secret}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_address_on_the_screen_opens_the_dashboard_and_its_token_is_kept_nowhere(ada: Person) -> None:
    live = Demo(ada)
    base, secret = login(live)
    live.until("night-watch-1 sleeps")
    assert read_status_code(f"{base}/api/home", secret) == 200
    assert read_status_code(f"{base}/api/home", "halter_made-up") == 401
    live.ends()
    paths = [file for file in ada.home.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
    assert paths == []
    second = Demo(ada)
    assert login(second)[1] != secret
    second.ends()


def hold_port(port: int) -> socket.socket:
    """Take this very port, as soon as no other test has it."""
    listeners: list[socket.socket] = []

    def can_bind() -> bool:
        with suppress(ConfigError):
            listeners.append(bind(port=port))
        return bool(listeners)

    until(can_bind)
    return listeners[0]


def test_where_the_usual_port_is_in_use_the_next_free_one_is_taken_and_shown(ada: Person) -> None:
    with hold_port(PORT), hold_port(PORT + 1):
        live = Demo(ada)
        base, secret = login(live)
        port = urlsplit(base).port
        assert port is not None
        assert port > PORT + 1
        assert any(line.startswith(f"Port {PORT} is in use; the dashboard is on port {port}.") for line in live.seen)
        assert read_status_code(f"{base}/api/home", secret) == 200
        live.ends()


@pytest.mark.parametrize(
    ("environ", "platform", "shows"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ""}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_a_browser_is_opened_only_where_it_could_show_itself(
    environ: dict[str, str], platform: str, *, shows: bool
) -> None:
    assert has_display(environ, platform) is shows
