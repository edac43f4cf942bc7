"""The comparison of pages with what is printed is itself to be trusted: what differs is found."""

from pathlib import Path

import pytest

from halter.core.errors import ConfigError
from tests.docs.pages import Block
from tests.docs.reading import Reader, commands_of
from tests.docs.shown import Ids, difference
from tests.docs.terminal import Terminal

ONE, TWO, THREE = (f"01{letter * 24}" for letter in "abc")


def differs(text: str, output: str, ids: Ids | None = None, *, to_the_end: bool = True) -> bool:
    lines = iter(output.splitlines())
    return difference(text.splitlines(), lines, Ids() if ids is None else ids, to_the_end=to_the_end) != ""


@pytest.mark.parametrize(
    ("wanted", "printed"),
    [
        ("COMPLETED, $0.01.", "COMPLETED, $0.01."),
        ("waits …, for at most 1d", "waits 3s, for at most 1d"),
        ("first\n…\nlast", "first\nlast"),
        ("first\n…\nlast", "first\nsecond\nthird\nlast"),
        ("first\n…", "first\nsecond\n"),
        ("│ cost  │ 1 │", "│ cost      │ 1 │"),
        ("at 17:19:26 on 2026-11-15", "at 08:00:00 on 2030-01-01"),
        (f"session {ONE}\nreceipt {ONE}", f"session {TWO}\nreceipt {TWO}"),
    ],
)
def test_what_may_differ_is_let_pass(wanted: str, printed: str) -> None:
    assert not differs(wanted, printed)


@pytest.mark.parametrize(
    ("wanted", "printed"),
    [
        ("COMPLETED, $0.01.", "COMPLETED, $0.02."),
        ("first\nlast", "first\nsecond\nlast"),
        ("first", "first\nsecond"),
        ("first\nsecond", "first"),
        ("first\n…\nlast", "first\nsecond"),
        (f"session {ONE}\nreceipt {ONE}", f"session {TWO}\nreceipt {THREE}"),
        ("at 17:19:26", "at noon"),
        ("a.c", "abc"),
    ],
)
def test_what_may_not_differ_is_found(wanted: str, printed: str) -> None:
    assert differs(wanted, printed)


def test_an_id_of_a_page_stands_for_the_one_that_was_given() -> None:
    ids = Ids()
    assert not differs(f"session {ONE}", f"session {TWO}", ids)
    assert ids.put_into(f"halter show {ONE} --receipt") == f"halter show {TWO} --receipt"
    assert ids.put_into(f"halter show {THREE} --receipt") == f"halter show {THREE} --receipt"


def block(text: str, *notes: str, language: str = "console") -> Block:
    return Block("page.md", 1, language, text, notes)


def test_commands_are_taken_out_of_a_block_with_what_is_shown_below_them() -> None:
    text = "$ halter one \\\n    two    # why\nsaid\n\n$ halter three\n"
    assert list(commands_of(block(text))) == [("halter one     two", "said\n\n"), ("halter three", "")]
    listed = "halter one   # first\n# a word\nhalter two \\\n  three\n"
    assert [command for command, _ in commands_of(block(listed, language="sh"))] == ["halter one", "halter two   three"]


@pytest.mark.parametrize(
    "wrong",
    [
        block("$ halter --version\nhalter 99\n"),
        block("$ halter nonsense\n"),
        block("$ halter --version\n", "leaves with 3"),
        block("name: x\nmodle: reflex\n", language="yaml"),
        block("limits: {max_cost_usd: much}\n", language="yaml"),
        block("raise SystemExit(1)\n", language="python"),
        block("{", language="json"),
    ],
    ids=["output", "command", "code", "key", "value", "program", "json"],
)
def test_a_page_that_is_wrong_is_found_out(wrong: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(Terminal(tmp_path), tmp_path)
    with pytest.raises((AssertionError, ConfigError, ValueError, SystemExit)):
        reader.tries(wrong)
