"""Whatever is typed, and wherever the answer goes: a sentence and one of the documented codes, never a traceback."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halter.cli.command import add_connect_timeout
from halter.cli.commands import build_command_tree
from halter.core.errors import ConfigError
from halter.core.events import SessionStarted
from halter.core.text import format_count
from halter.runtime.runtime import open_runtime
from halter.settings import name_user, read_settings
from halter.state import lifecycle

DOCUMENTED = {0, 1, 2, 3}
NO_TEXT = ["\x00", "\udcff", "a\x00b"]
ODD_NAMES = [*NO_TEXT, "", " ", "a/in", "../..", "x" * 10_000, "☃", "%", "[red]", "'; DROP TABLE events; --"]
ODD_DURATIONS = ["", "5", "-1d", "99999999999999d", "9" * 400 + "d", "1e9d", "∞", "\udcff"]
ODD_AMOUNTS = ["", "-1", "nan", "inf", "1e400", "9" * 5000, "\udcff", "$"]
ODD_NUMBERS = ["0", "-1", "99999999999999999999", "9" * 5000, "x", "1.5"]
ODD_WINDOWS = ["day", "day/", "day/2026-13-45", "year/2026", "month/2026-11@Nowhere/Land", "day/9999-12-31", "\udcff"]
ODD_STORES = [
    "",
    " ",
    "/",
    "/dev/null",
    "/dev/full",
    "mysql://x",
    "sqlite://",
    "sqlite:",
    "postgresql://",
    "postgresql://[::1/x",
    "postgresql://h:99999/x",
    "postgresql://h/x?schema=../..",
    "postgresql://h/x?nonsense=1",
    "postgresql://u:secret@127.0.0.1:1/x",
    "~nobody-of-that-name/x.db",
    "\udcff",
]
ON_A_STORE = [
    *(("show", name) for name in ODD_NAMES),
    *(("receipt", name) for name in ODD_NAMES),
    *(("approve", name) for name in ODD_NAMES),
    *(("deny", name) for name in ODD_NAMES),
    *(("cancel", name) for name in ODD_NAMES if name),
    *(("rules", "end", name) for name in ODD_NAMES),
    *(("tail", name) for name in ODD_NAMES if name),
    *(("tail", "nosuch", "--after", text) for text in ODD_NUMBERS),
    *(("approve", "x", "--edit", name) for name in ODD_NAMES if name),
    *(("approve", "x", "--always", "--match", name, "--scope", name) for name in ODD_NAMES),
    *(("approve", "x", "--always", "--for", text) for text in ODD_DURATIONS),
    *(("approve", "x", "--cap", text) for text in ODD_AMOUNTS),
    *(("audit", "--export", "out.jsonl", "--cursor", name) for name in ODD_NAMES),
    *(("audit", "--export", name) for name in ODD_NAMES),
    ("audit", "--cursor", "sink"),
    ("audit", "--export", "-", "--cursor", "sink", "--since", "1d"),
    ("tail", "--after", "3"),
    ("rules", "--json", "end", "x"),
    *(("erase", "--yes", "--session", name) for name in ODD_NAMES),
    *(("halt", f"{kind}{name}") for kind in ("", "agent:", "session:") for name in ODD_NAMES),
    *(("resume", f"{kind}{name}") for kind in ("", "agent:") for name in ODD_NAMES),
    *(("budget", "raise", f"agent:{name}", "3") for name in ODD_NAMES),
    *(("halt", "fleet", "--reason", name) for name in ODD_NAMES),
    *(("audit", "--tool", name, "--outcome", name) for name in ODD_NAMES),
    *(("erase", "--yes", "--older-than", text) for text in ODD_DURATIONS),
    *(("audit", "--since", text) for text in ODD_DURATIONS),
    *(("resume", "fleet", "--over", text) for text in ODD_DURATIONS),
    *(("budget", "raise", "fleet", text) for text in ODD_AMOUNTS),
    *(("budget", "lower", "fleet", text) for text in ODD_AMOUNTS),
    *(("budget", "raise", "fleet", "3", "--window", text) for text in ODD_WINDOWS),
    *(("sessions", "--limit", text) for text in ODD_NUMBERS),
    *(("drill", "kill", "--seeds", text) for text in ODD_NUMBERS),
    *(("drill", name) for name in ODD_NAMES),
]
COMMANDS = [
    ("sessions",),
    ("show", "x"),
    ("receipt", "x"),
    ("inbox",),
    ("approve", "x"),
    ("deny", "x"),
    ("halt", "fleet"),
    ("resume", "fleet"),
    ("budget",),
    ("budget", "show"),
    ("budget", "raise", "fleet", "3"),
    ("budget", "lower", "fleet", "3"),
    ("tail",),
    ("cancel", "x"),
    ("rules",),
    ("rules", "end", "x"),
    ("audit",),
    ("audit", "--export", "-"),
    ("audit", "--export", "-", "--cursor", "sink"),
    ("verify",),
    ("verify", "--rebuild"),
    ("erase", "--older-than", "3d", "--yes"),
    ("doctor",),
]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd names of files are relative to a folder that may fill up."""
    folder = tmp_path.with_name(f"{tmp_path.name}-here")
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "200",
    }


@pytest.fixture
def halter(environment: dict[str, str]) -> Callable[..., Result]:
    runner = CliRunner()
    return lambda *words: runner.invoke(build_command_tree(), list(words), env=environment)


@pytest.fixture
def store_file(environment: dict[str, str], tmp_path: Path) -> Path:
    """A store with one session."""
    settings = read_settings(environment, tmp_path)

    async def fill() -> None:
        async with open_runtime(settings) as app:
            event = SessionStarted(session="began", agent="watch", kind="task", started_by="ada")
            await app.store.commit(lifecycle.start_session(event))

    asyncio.run(fill())
    return Path(settings.store)


def require_sentence(words: tuple[str, ...], answer: Result) -> None:
    text = f"{[word[:60] for word in words]}: {answer.exit_code} {answer.output[-500:]} {answer.exception!r}"
    assert answer.exception is None or isinstance(answer.exception, SystemExit), text
    assert answer.exit_code in DOCUMENTED, text
    assert "Traceback" not in answer.output, text
    assert answer.output, text
    assert "secret" not in answer.output.replace("secrets", ""), text


def test_whatever_is_typed_is_answered_in_a_sentence(halter: Callable[..., Result], store_file: Path) -> None:
    for words in ON_A_STORE:
        require_sentence(words, halter(*words))


@pytest.mark.parametrize("store", ODD_STORES)
def test_a_store_that_cannot_be_one_is_answered_in_a_sentence(halter: Callable[..., Result], store: str) -> None:
    for command in COMMANDS:
        words = (*command, "--store", store)
        answer = halter(*words)
        require_sentence(words, answer)
        assert answer.exit_code in {2, 3}, words


@pytest.mark.parametrize("variable", ["HALTER_CHECKPOINTS", "HALTER_SIGNING_KEY", "HALTER_PERSON"])
@pytest.mark.parametrize("value", ["/", "/dev/null", "/dev/null/x", "\udcff"])
def test_a_setting_that_cannot_be_used_is_answered_in_a_sentence(
    halter: Callable[..., Result], store_file: Path, environment: dict[str, str], variable: str, value: str
) -> None:
    environment[variable] = value
    for words in (("verify",), ("doctor",), ("halt", "fleet"), ("budget", "raise", "fleet", "99")):
        require_sentence(words, halter(*words))


def test_a_public_key_that_cannot_be_read_is_answered_in_a_sentence(
    halter: Callable[..., Result], store_file: Path, tmp_path: Path
) -> None:
    public = tmp_path / "config" / "halter" / "signing.key.pub"
    public.unlink()
    public.mkdir()
    answer = halter("verify")
    assert answer.exit_code == 3
    assert "Cannot read the public key of" in answer.stderr


@pytest.mark.parametrize("store", [store for store in ODD_STORES if store not in {" ", "/", "/dev/null", "/dev/full"}])
def test_a_drill_beside_a_store_that_cannot_be_one_is_answered_in_a_sentence(
    halter: Callable[..., Result], store: str
) -> None:
    words = ("drill", "restore", "--seeds", "1", "--store", store)
    require_sentence(words, halter(*words))


def test_help_shows_no_types_of_the_program(halter: Callable[..., Result]) -> None:
    for command in (*COMMANDS, ("drill",)):
        names = [word for word in command[:2] if word in {"budget", "show", "raise", "lower"}]
        text = halter(*(names if "budget" in names else command[:1]), "--help").stdout
        assert "Usage:" in text
        assert not {"<bool>", "<int", "<list[str]>"} & set(text.split())


def run_command(
    words: tuple[str, ...], home: Path, output: int | None = subprocess.PIPE, **environ: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command as a process of its own."""
    path = os.environ["PATH"]
    return subprocess.run(
        [sys.executable, "-m", "halter", *words],
        stdout=output,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={"PATH": path, "HOME": str(home), **environ},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [("--help",), ("sessions",), ("sessions", "--json")])
def test_an_answer_that_cannot_be_written_is_a_sentence(
    store_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("wb") as full:
        process = run_command(words, tmp_path, full.fileno(), HALTER_STORE=str(store_file))
    assert process.returncode == 3
    assert b"could not be written (No space left on device)" in process.stderr
    assert process.stderr.count(b"\n") == 1


@pytest.mark.parametrize("words", [("--help",), ("sessions",), ("sessions", "--json")])
def test_a_reader_who_has_gone_is_no_reason_to_complain(
    store_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = run_command(words, tmp_path, writer, HALTER_STORE=str(store_file))
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize("words", [("--help",), ("drill", "--help"), ("sessions",), ("receipt", "began")])
def test_any_text_can_be_shown_where_only_ascii_can(store_file: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    process = run_command(words, tmp_path, HALTER_STORE=str(store_file), PYTHONIOENCODING="ascii")
    assert (process.returncode, process.stderr) == (0, b"")
    assert process.stdout.isascii()


def test_a_program_without_any_stream_still_answers_with_its_code(store_file: Path, tmp_path: Path) -> None:
    closed = f'exec "$0" -m halter show nosuch --store {store_file} <&- >&- 2>&-'
    process = subprocess.run(
        ["/bin/sh", "-c", closed, sys.executable], env={"HOME": str(tmp_path)}, timeout=60, check=False
    )
    assert process.returncode == 2


def test_without_a_home_folder_the_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^No home folder found\. Set HALTER_STORE or HOME\.$"):
        read_settings({"HALTER_PERSON": "ada"}, None)
    with pytest.raises(ConfigError, match=r"^No home folder found\. Set HALTER_CHECKPOINTS or HOME\.$"):
        read_settings({"HALTER_PERSON": "ada"}, None, "here.db")
    everything = {"HALTER_CHECKPOINTS": "/c", "HALTER_SIGNING_KEY": "/k", "HALTER_STORE": "postgresql://u@h/d"}
    assert read_settings(everything, None).store == "postgresql://u@h/d"


def test_a_user_without_a_name_is_called_by_the_number() -> None:
    assert name_user(os.getuid())
    assert name_user(2**31 - 5) == "uid 2147483643"


@pytest.mark.parametrize(
    ("url", "bounded"),
    [
        ("postgresql://u@h/d", "postgresql://u@h/d?connect_timeout=5"),
        ("postgres://u@h/d?schema=s", "postgres://u@h/d?schema=s&connect_timeout=5"),
        ("postgresql://u@h/d?connect_timeout=60", "postgresql://u@h/d?connect_timeout=60"),
        ("halter.db", "halter.db"),
    ],
)
def test_a_person_waits_only_seconds_for_a_server(url: str, bounded: str) -> None:
    assert add_connect_timeout(url) == bounded


def test_a_number_and_its_noun_agree() -> None:
    assert [format_count(number, "case") for number in (0, 1, 2, 3000)] == [
        "0 cases",
        "1 case",
        "2 cases",
        "3,000 cases",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_drill_that_a_signal_ends_cleans_up_and_says_so(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    """The signal goes to the whole group, as from a terminal, and more than once.

    Whoever runs the tests may have said to ignore these signals, which a process hands down: `env` takes it back. The
    name of the folder is short, since that of a socket in it must be.
    """
    tmp_path = tmp_path_factory.mktemp("d")
    command = ["env", "--default-signal", sys.executable, "-m", "halter", "drill", "race", "--seeds", "4"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, start_new_session=True
    ) as drill:
        assert drill.stdout is not None
        assert b"race on sqlite" in drill.stdout.readline()
        for _ in range(3):
            os.killpg(drill.pid, number)
        _, body = drill.communicate(timeout=60)
    assert drill.returncode == 130
    assert body == b"Interrupted. The drill has removed its own store and changed no other.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_drill_says_which_folder_has_too_long_a_name_for_its_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "halter", "drill", "race", "--seeds", "2"]
    drill = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert drill.returncode == 3
    assert drill.stderr == (
        f"The path of the temporary folder {folder} is too long for a socket. Set TMPDIR to a shorter path.\n"
    )
    assert list(folder.iterdir()) == []
