"""Commands of earlier versions: each does what its present form does, and no help, page or sentence shows it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from halter.cli.commands import build_command_tree, load_all_commands
from tests.story.clerks import environment, furnish

ROOT = Path(__file__).parents[2]

SAME = {
    "schedules": "triggers",
    "schedules clerk --json": "triggers clerk --json",
    "schedules list --json": "triggers list --json",
    "schedules run clerk/nosuch": "triggers run clerk/nosuch",
    "schedules run nosuch": "triggers run nosuch",
    "schedules cancel clerk/nightly": "triggers cancel clerk/nightly",
    "schedules cancel clerk/weekly": "triggers cancel clerk/weekly",
    "schedules retry clerk/letters 0123": "triggers retry clerk/letters 0123",
    "findings keep clerk-1.f1": "findings accept clerk-1.f1",
    "findings keep clerk-1.f1 --json": "findings accept clerk-1.f1 --json",
    "proposals keep clerk-1.m1 --reason so": "proposals accept clerk-1.m1 --reason so",
    "top --once": "status --live --once",
    "top --once --json": "status --live --once --json",
    "top --json": "status --live --json",
    "top": "status --live",
    "receipt clerk-2": "show clerk-2 --receipt",
    "receipt clerk-2 --json": "show clerk-2 --receipt --json",
    "receipt clerk-2 --html receipt.html": "show clerk-2 --receipt --html receipt.html",
    "receipt --verify nosuch": "show --receipt --verify nosuch",
    "receipt nosuch": "show nosuch --receipt",
    "tail clerk-2 --after 2": "show clerk-2 --follow --after 2",
    "tail clerk-2 --json": "show clerk-2 --follow --json",
    "tail nosuch": "show nosuch --follow",
    "tail --after 3": "show --follow --after 3",
}

FORMER = re.compile(r"halter (schedules|top|tail|receipt)\b|\b(findings|proposals) keep\b")
DESCRIBES_FORMER_NAMES = {"docs/support.md"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A furnished home. A command may change it, so each of two gets a copy at the same place."""
    path = tmp_path / "home"
    path.mkdir()
    furnish(path)
    shutil.copytree(path, tmp_path / "kept")
    monkeypatch.chdir(path)
    return path


def type_in_copy(home: Path, line: str) -> Result:
    shutil.rmtree(home)
    shutil.copytree(home.with_name("kept"), home)
    return CliRunner().invoke(build_command_tree(), shlex.split(line), env=environment(home))


def mask_moments(text: str) -> str:
    """Mask what differs between two runs: moments, durations, and the columns that are as wide as these."""
    text = re.sub(r"\d{16}", "MOMENT", text)
    text = re.sub(r"[\u2500-\u257f ]+", " ", text)
    return re.sub(r"\d\d:\d\d(:\d\d)?|\b\d+(ms|s|m|h)(\d+m)?\b", "TIME", text)


@pytest.mark.parametrize("former", SAME)
def test_a_former_command_does_exactly_what_the_present_one_does(home: Path, former: str) -> None:
    results = [type_in_copy(home, line) for line in (former, SAME[former])]
    answers = [(result.exit_code, mask_moments(result.stdout), mask_moments(result.stderr)) for result in results]
    assert answers[0] == answers[1]
    assert not re.search("No such (command|option)", results[0].output)
    assert "unexpected extra argument" not in results[0].output


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("status --once", "--once and --server require --live."),
        ("status --server http://127.0.0.1:1", "--once and --server require --live."),
        ("show", "Pass a session. See `halter sessions`."),
        ("show clerk-2 --receipt --follow", "--receipt, --follow and --events cannot be combined. Pass one of them."),
        ("show clerk-2 --follow --events", "--receipt, --follow and --events cannot be combined. Pass one of them."),
        ("show clerk-2 --after 2", "--after requires --follow."),
        ("show clerk-2 --html x.html", "--html, --verify and --journal require --receipt."),
        ("show clerk-2 --receipt --at 2", "--at cannot be combined with --receipt or --follow."),
    ],
)
def test_an_option_of_another_view_is_refused_with_a_sentence(home: Path, line: str, sentence: str) -> None:
    result = type_in_copy(home, line)
    assert (result.exit_code, " ".join(result.stderr.split())) == (2, sentence)


def test_resume_of_an_agent_that_is_off_switches_it_on_and_says_so(home: Path) -> None:
    answers = [
        CliRunner().invoke(build_command_tree(), shlex.split(line), env=environment(home)).output
        for line in ("off clerk", "resume clerk", "off clerk", "on clerk", "off clerk", "halt clerk", "resume clerk")
    ]
    assert answers[1] == "clerk is on: it runs where `halter up` has its folder.\n"
    assert answers[3].endswith(answers[1])
    assert "still off. Switch it on with: halter on clerk" in " ".join(answers[6].split())


def list_help_texts(group: TyperGroup, path: tuple[str, ...] = ()) -> list[str]:
    texts = [CliRunner().invoke(build_command_tree(), [*path, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout]
    for name, command in group.commands.items():
        if not command.hidden and isinstance(command, TyperGroup):
            texts += list_help_texts(command, (*path, name))
        elif not command.hidden:
            texts.append(
                CliRunner()
                .invoke(build_command_tree(), [*path, name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
                .stdout
            )
    return texts


def test_no_help_shows_a_former_command() -> None:
    shown = [match[0] for text in list_help_texts(load_all_commands()) for match in FORMER.finditer(text)]
    assert shown == []
    root = CliRunner().invoke(build_command_tree(), ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    assert not re.search(r"^│ (schedules|top|tail|receipt) ", root, re.MULTILINE)


def test_no_page_and_no_sentence_of_the_code_shows_a_former_command() -> None:
    folders = ("docs", "examples", "deploy", "src", "scripts")
    paths = [ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*")))]
    texts = {".md", ".py", ".yaml", ".yml", ".js", ".txt", ".html", ".toml", ".service", ".css"}
    shown = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path.suffix in texts and str(path.relative_to(ROOT)) not in DESCRIBES_FORMER_NAMES
        for match in FORMER.finditer(path.read_text("utf-8"))
    ]
    assert shown == []
