"""The whole tree of commands: its help, its examples, its JSON, its codes, and what it costs to show it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from halter.cli.commands import COMMANDS, EXAMPLES, build_command_tree, load_all_commands
from halter.cli.exit_codes import EXIT_MEANINGS
from tests.processes import warm_command
from tests.story.clerks import environment, furnish

SPEC = {
    "Run": ["init", "run", "chat", "play", "demo"],
    "Run unattended": ["up", "worker", "serve", "proxy", "on", "off"],
    "Inspect": ["status", "sessions", "show", "report", "export"],
    "Control": ["inbox", "approve", "deny", "halt", "resume", "cancel", "budget"],
    "Plan": ["triggers", "route"],
    "Trust": ["audit", "verify", "erase", "drill", "doctor", "schema"],
}
FOLLOWING = {
    *("halter up clerk", "halter up clerk --json", "halter show --follow", "halter show clerk-1 --follow"),
    *("halter serve", "halter serve clerk --json"),
    *("halter proxy", "halter proxy --json"),
}
"""These run until somebody interrupts them."""

SHARED = set(EXAMPLES["worker"])
"""These need a PostgreSQL server, and have tests of their own."""

HOOKED = {line for name, lines in EXAMPLES.items() if name.startswith("hook") for line in lines}
"""These need Claude Code, and have tests in `tests/hooks`."""

LONG = set(EXAMPLES["demo"])
"""A night takes a while: the demo has tests of its own."""

MANY_CASES = {"halter drill race --seeds 5", "halter drill tamper --json"}
"""These are typed with fewer cases below, and in tests of the drills."""

BEFORE = {
    "halter resume fleet": "halter halt fleet",
    "halter resume fleet --over 5m": "halter halt fleet",
    "halter keys revoke desk": "halter keys new --agent desk",
    'halter channels unpair telegram ada --reason "lost the phone"': "halter channels pair telegram ada",
}
"""Only what was halted can be resumed, and only what was made revoked."""

SERVED = {
    *(*EXAMPLES["proxy check"], *EXAMPLES["gateway"]),
    *(*EXAMPLES["prices"][1:], *EXAMPLES["prices update"], *EXAMPLES["prices accept"]),
}
"""These need a proxy, MCP servers or a published price table, and have tests of their own."""

HEAVY = (
    "fastapi",
    "nicegui",
    "uvicorn",
    "starlette",
    "pydantic",
    "pydantic_ai",
    "psycopg",
    "httpx",
    "httpx2",
    "opentelemetry",
    "genai_prices",
    "nacl",
    "mcp",
    "asyncio",
    "halter.runtime",
    "halter.guard",
    "halter.journal",
)


TO_RUN = (
    *(name for name in HEAVY if name not in {"asyncio", "halter.runtime"}),
    *("halter.cli", "halter.config", "halter.loop", "halter.redaction", "halter.models", "halter.runtime.runtime"),
    *("typer", "rich", "yaml", "re2", "sqlite3", "cronsim", "tempfile", "difflib", "multiprocessing"),
)
"""What runs an agent, which a program that only describes one does not load."""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("clerk") / "home"
    home.mkdir()
    furnish(home)
    return home


@pytest.fixture
def home(furnished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home as it was furnished, at the very place that was trusted, whatever was done there before."""
    path = furnished.with_name("kept")
    if not path.exists():
        shutil.copytree(furnished, path)
    shutil.rmtree(furnished)
    shutil.copytree(path, furnished)
    monkeypatch.chdir(furnished)
    return furnished


def types(home: Path, line: str, given: str = "", **more: str) -> Result:
    return CliRunner().invoke(
        build_command_tree(), shlex.split(line)[1:], env={**environment(home), **more}, input=given
    )


def leaves(group: TyperGroup, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something and is shown, by its whole name."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if isinstance(command, TyperGroup):
            yield from leaves(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


ALL = dict(leaves(load_all_commands()))


def test_the_help_is_grouped_and_every_command_has_one_line_of_it() -> None:
    for panel, names in SPEC.items():
        assert set(names) <= set(COMMANDS[panel]), panel
        for name, (_, line) in COMMANDS[panel].items():
            assert len(line) <= 65, name
            assert line.endswith("."), name
    text = CliRunner().invoke(build_command_tree(), ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).stdout
    results = re.findall(r"^│ (\w+) +\S.*│$", text, re.MULTILINE)
    assert results == [name for commands in COMMANDS.values() for name in commands]


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_says_what_it_does_in_a_line_and_in_more_detail_and_shows_examples(name: str) -> None:
    line, _, outcome = (ALL[name].help or "").partition("\n\n")
    assert line.endswith(".")
    assert outcome
    result = CliRunner().invoke(build_command_tree(), [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert 1 <= len(EXAMPLES[name]) <= 3
    for example in EXAMPLES[name]:
        assert example in result.stdout
        assert example.startswith(f"halter {name.removesuffix(' list').split()[0]}")


def test_there_are_examples_of_nothing_else() -> None:
    groups = {name for commands in COMMANDS.values() for name in commands}
    assert set(EXAMPLES) <= set(ALL) | groups


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.soak if line in MANY_CASES else ())
        for line in sorted(
            {line for lines in EXAMPLES.values() for line in lines} - FOLLOWING - LONG - SHARED - HOOKED - SERVED
        )
    ],
    ids=lambda line: line[7:40],
)
def test_every_example_works(home: Path, line: str) -> None:
    text, _, target = line.partition(" > ")
    if line in BEFORE:
        types(home, BEFORE[line])
    result = types(home, text)
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    assert result.output
    if "--json" in text or target:
        json.loads(result.stdout)


@pytest.mark.parametrize("line", sorted(FOLLOWING))
def test_a_command_that_follows_runs_until_it_is_interrupted(home: Path, line: str) -> None:
    environ = {**os.environ, **environment(home), "ANTHROPIC_API_KEY": "sk-made-up"}
    # Another program may have the usual port here.
    anywhere = ["--listen", "127.0.0.1:0"] if "serve" in line or "proxy" in line else []
    command = warm_command("halter", *shlex.split(line)[1:], *anywhere)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, cwd=home, start_new_session=True, stdout=pipe, stderr=pipe) as program:
        assert program.stdout is not None
        if line != "halter show --follow":
            assert program.stdout.readline()
        else:
            types(home, "halter halt fleet")
            assert _wait_until_shown(program, home)
        program.send_signal(signal.SIGINT)
        _, body = program.communicate(timeout=30)
    assert (program.returncode, body) == (130, b"")


def _wait_until_shown(program: "subprocess.Popen[bytes]", home: Path) -> bool:
    """Cause events until one is shown: a follower shows only the events after its own start."""
    assert program.stdout is not None
    os.set_blocking(program.stdout.fileno(), False)
    for _ in range(100):
        types(home, "halter halt fleet")
        types(home, "halter resume fleet")
        if program.stdout.read():
            os.set_blocking(program.stdout.fileno(), True)
            return True
    return False


def test_every_argument_and_value_has_a_name_in_capitals() -> None:
    for name, command in ALL.items():
        for param in command.params:
            flag = getattr(param, "is_flag", False)
            assert flag or re.fullmatch(r"[A-Z]+([:/=][A-Z]+)?", param.metavar or ""), (name, param.opts)


def test_every_command_answers_in_json() -> None:
    without = {name for name, command in ALL.items() if "as_json" not in {param.name for param in command.params}}
    assert without == set()


ANSWERS = [
    *(
        "status",
        "status --live --once",
        "eval run clerk",
        "eval add clerk-2 clerk",
        "tell clerk-1 hello",
        "sessions",
        "show clerk-1",
        "show clerk-2 --receipt",
        "report",
        "findings",
        "findings list",
        "proposals list",
        "inbox",
        "channels list",
        "channels pair telegram ada",
    ),
    *("budget", "budget show", "rules", "triggers", "triggers list", "audit", "verify", "doctor", "schema agent"),
    *("schema fleet", "trust clerk", "on clerk", "off clerk", "halt fleet", "cancel clerk-1", "route clerk hello"),
    "tools clerk",
    "fork clerk-2 --at 2",
    *("run clerk hello", "play clerk/welcome.yaml --input who=Ada", "init other", "export clerk-2 --output x.jsonl"),
    *("approve clerk-1.1/approval", "deny clerk-1.1/approval", "budget raise fleet 30", "budget lower fleet 3"),
    *("rules end r1", "rules offer clerk-1.1/approval", "store", "store accept --yes"),
    *("prices", "prices show"),
    *("policy", "policy show", "policy apply fleet/halter.yaml --yes"),
    *("policy backtest --agent clerk --cap 1", "policy suggest --agent clerk"),
    "policy diff fleet/halter.yaml fleet/halter.yaml",
    *("findings accept clerk-1.f1", "findings dismiss clerk-1.f1", "proposals accept clerk-1.m1"),
    *("proposals dismiss clerk-1.m1", "proposals promote clerk-1.m1 clerk --yes", "erase --older-than 9d --yes"),
    *("triggers run clerk/nightly", "triggers cancel clerk/weekly", "drill tamper --seeds 1"),
    *("triggers retry clerk/letters 0123", "tokens list", "tokens add ada --role admin", "tokens remove carol"),
    *("proxy env claude", "keys list", "keys new --agent desk"),
]


@pytest.mark.parametrize("line", ANSWERS)
def test_an_answer_in_json_is_json_and_nothing_else(home: Path, line: str) -> None:
    result = types(home, f"halter {line} --json")
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    assert "\x1b" not in result.stdout


def test_every_command_that_answers_once_has_its_json_tested() -> None:
    texts = {name for name in ALL for line in ANSWERS if f"{line} ".startswith(f"{name} ")}
    hooks = {"hook install", "hook uninstall", "hook status", "hook serve"}
    proxied = {"proxy check", "keys revoke", "channels unpair", "prices update", "prices accept"}
    endless = {"up", "worker", "serve", "gateway", "chat", "demo", "resume"}
    assert set(ALL) - texts - hooks - proxied == endless


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("halter sessions", 0),
        ("halter resume fleet", 1),
        ("halter cancel clerk-2", 1),
        ("halter triggers cancel clerk/nightly", 2),
        ("halter show nosuch", 2),
        ("halter sessions --limit none", 2),
        ("halter nosuch", 2),
        ("halter halt flet", 2),
        ("halter sessions --store /dev/null/x", 3),
        ("halter sessions --store mysql://x", 3),
        ("halter export clerk-2 --output /nowhere/at/all", 3),
    ],
)
def test_exit_codes_tell_a_script_the_outcome(home: Path, line: str, code: int) -> None:
    result = types(home, line)
    assert result.exit_code == code, result.output
    assert code in EXIT_MEANINGS


def test_the_help_says_what_each_code_means() -> None:
    text = CliRunner().invoke(build_command_tree(), ["--help"], env={"COLUMNS": "100", "TERM": "dumb"}).stdout
    for code, meaning in EXIT_MEANINGS.items():
        assert f"{code}  {meaning}" in text


@pytest.mark.parametrize("program", ["import halter", "from halter.cli import main; main()"])
def test_neither_the_package_nor_the_help_loads_anything_heavy(program: str) -> None:
    output = f"import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {program}"
    process = subprocess.run([sys.executable, "-c", output, "--help"], capture_output=True, text=True, check=True)
    loaded = set(process.stderr.split())
    assert not [name for name in loaded if name in HEAVY or name.startswith(tuple(f"{heavy}." for heavy in HEAVY))]
    if "cli" not in program:
        assert not loaded & {"typer", "rich", "msgspec"}


def test_a_program_that_describes_its_agent_does_not_load_what_runs_it() -> None:
    program = """
from halter import Agent, tool

agent = Agent("desk", model="anthropic:claude-sonnet-4-5", store="memory:", instructions="You keep the desk.")

import json, sys
print(json.dumps(sorted(sys.modules)))
"""
    body = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True).stdout
    loaded = set(json.loads(body))
    assert "halter.runtime.agent" in loaded
    assert sorted(loaded & set(TO_RUN)) == []
