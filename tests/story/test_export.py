"""A session's journal in a file, and a receipt that is checked against it with no store at hand."""

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.money import Caps, Spender, make_legs
from halter.core.ports import offload_body
from halter.guard.ledger import ActualResult
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import read_settings
from halter.state import lifecycle
from halter.testing.fakes import HoldTaken, hold

Halter = Callable[..., Result]
Lines = list[dict[str, Any]]
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
        "COLUMNS": "200",
    }


@pytest.fixture
def halter(environment: dict[str, str], tmp_path: Path) -> Halter:
    """The commands, on a store in which `clerk-1` did something and ended, with a sub-session."""
    asyncio.run(_fill(environment, tmp_path))
    runner = CliRunner()
    return lambda *words: runner.invoke(build_command_tree(), list(words), env=environment)


async def _fill(environment: dict[str, str], home: Path) -> None:
    async with open_runtime(read_settings(environment, home)) as app:
        await _session(app, "clerk-1", "")
        await _session(app, "clerk-1.child", "clerk-1")


async def _session(app: Runtime, name: str, parent: str) -> None:
    definition = await app.store.put(b'{"policy": {}}')
    start = SessionStarted(
        session=name, agent="clerk", kind="task", started_by=HOSTILE, parent=parent, definition=definition
    )
    await app.store.commit(lifecycle.start_session(start, *await offload_body(app.store, b"read all of this " * 5000)))
    await app.store.commit(lifecycle.post_message(name, f"{name}/said", b"and this", "ada"))
    await app.store.commit(lifecycle.post_message(name, f"{name}/said/2", b"and that", "ada"))
    (lease,) = await app.store.claim(WorkerId(name), 1, SessionId(name))
    for number in (1, 2):
        call_legs = make_legs(Caps(), Spender(name, "clerk"), app.clock.now(), usd=1000)
        call = CallStarted(call=f"{name}.{number}", tool="look", legs=call_legs)
        answer = await hold(app.ledger, lease, call, b'{"at": "canary"}')
        assert isinstance(answer, HoldTaken)
        await app.ledger.settle(lease, answer.flight, ActualResult("ok", usd=500, body=HOSTILE.encode()))
    assert (await app.store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))).events


@pytest.fixture
def files(halter: Halter, tmp_path: Path) -> tuple[Path, Path]:
    """A receipt and an export."""
    receipt, journal = tmp_path / "receipt.json", tmp_path / "journal.jsonl"
    result = halter("export", "clerk-1", "--output", str(journal))
    assert result.exit_code == 0, result.output
    receipt_result = halter("receipt", "clerk-1", "--json")
    receipt.write_text(receipt_result.stdout)
    return receipt, journal


def check(halter: Halter, files: tuple[Path, Path]) -> Result:
    receipt, journal = files
    return halter("receipt", "--verify", str(receipt), "--journal", str(journal))


def edit_lines(path: Path, edit: Callable[[Lines], Lines | None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = edit(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def events(lines: Lines) -> Lines:
    return [line for line in lines if line["line"] == "event"]


def test_a_receipt_is_checked_offline_with_the_store_gone(
    halter: Halter, files: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "state" / "halter" / "halter.db").unlink()
    result = check(halter, files)
    assert result.exit_code == 0, result.output
    assert "matches its journal" in result.stdout
    assert "checkpoints" in result.stdout


def test_an_export_brings_its_receipt_along(halter: Halter, files: tuple[Path, Path]) -> None:
    assert check(halter, (files[1], files[1])).exit_code == 0
    edit_lines(files[1], lambda lines: lines[1]["receipt"].update(cost_usd=1))
    assert check(halter, (files[1], files[1])).exit_code == 1


def test_only_its_owner_may_read_an_export_even_where_the_file_was_there_before(halter: Halter, tmp_path: Path) -> None:
    path = tmp_path / "open.jsonl"
    path.write_text("something")
    path.chmod(0o644)
    assert halter("export", "clerk-1", "--output", str(path)).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_export_holds_large_bodies_and_what_defines_the_session(files: tuple[Path, Path]) -> None:
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    blobs = {line["digest"] for line in lines if line["line"] == "blob"}
    start = json.loads(events(lines)[0]["facts"])
    assert blobs == {events(lines)[0]["blob"], start["definition"]}


def test_sub_sessions_are_exported_if_that_is_asked_for(halter: Halter, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    assert halter("export", "clerk-1", "--children", "--output", str(path)).exit_code == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["sessions"] == ["clerk-1", "clerk-1.child"]
    assert {line["stream"] for line in events(lines)} == {
        f"session:{name}{inbox}" for name in ("clerk-1", "clerk-1.child") for inbox in ("", "/in")
    }


def _facts(lines: Lines) -> None:
    event = events(lines)[1]
    event["facts"] = event["facts"].replace("look", "send")


def _time(lines: Lines) -> None:
    events(lines)[2]["at"] += 1


def _body(lines: Lines) -> None:
    events(lines)[2]["body"] = "aGFybWxlc3M="


def _hash(lines: Lines) -> None:
    events(lines)[2]["hash"] = "00" * 32


def _removed(lines: Lines) -> None:
    lines.remove(events(lines)[2])


def _last_removed(lines: Lines) -> None:
    lines.remove([event for event in events(lines) if event["stream"] == "session:clerk-1"][-1])


def _last_removed_everywhere(lines: Lines) -> None:
    _last_removed(lines)
    lines[0]["streams"]["session:clerk-1"] -= 1


def _inbox_cut_everywhere(lines: Lines) -> None:
    lines.remove([event for event in events(lines) if event["stream"].endswith("/in")][-1])
    lines[0]["streams"]["session:clerk-1/in"] -= 1


def _inbox_gone(lines: Lines) -> Lines:
    del lines[0]["streams"]["session:clerk-1/in"]
    return [line for line in lines if not line.get("stream", "").endswith("/in")]


def _removed_and_renumbered(lines: Lines) -> None:
    fields = events(lines)[2]
    lines.remove(fields)
    for event in events(lines):
        if event["stream"] == fields["stream"] and event["seq"] > fields["seq"]:
            event["seq"] -= 1
    lines[0]["streams"][fields["stream"]] -= 1


def _swapped_lines(lines: Lines) -> None:
    first, second = (lines.index(event) for event in events(lines)[2:4])
    lines[first], lines[second] = lines[second], lines[first]


def _swapped_places(lines: Lines) -> None:
    fields, payload = events(lines)[2:4]
    fields["seq"], payload["seq"] = payload["seq"], fields["seq"]
    _swapped_lines(lines)


def _repeated(lines: Lines) -> None:
    lines.append(events(lines)[2])


def _added(lines: Lines) -> None:
    last = [event for event in events(lines) if event["stream"] == "session:clerk-1"][-1]
    lines.append({**last, "seq": last["seq"] + 1})
    lines[0]["streams"]["session:clerk-1"] += 1


def _foreign(lines: Lines) -> None:
    lines.append({**events(lines)[0], "stream": "session:other"})


def _blob(lines: Lines) -> None:
    next(line for line in lines if line["line"] == "blob")["data"] = "aGFybWxlc3M="


def _blob_added(lines: Lines) -> None:
    lines.append(
        {"line": "blob", "digest": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "data": ""}
    )


def _no_line(lines: Lines) -> None:
    lines.append({"line": "nonsense"})


def _no_header(lines: Lines) -> None:
    lines.pop(0)


TAMPERINGS: list[tuple[Callable[[Lines], Lines | None], str]] = [
    (_facts, "Event 2 of session:clerk-1 does not match"),
    (_time, "Event 3 of session:clerk-1 does not match"),
    (_body, "The body of event 3 of session:clerk-1 does not match its digest"),
    (_hash, "of session:clerk-1 does not match"),
    (_removed, "Event 3 of session:clerk-1 is missing"),
    (_last_removed, "Event 6 of session:clerk-1 is missing"),
    (_last_removed_everywhere, "for hash; the events give"),
    (_inbox_cut_everywhere, "for inbox_hash; the events give"),
    (_inbox_gone, "for inbox_hash; the events give"),
    (_removed_and_renumbered, "session:clerk-1"),
    (_swapped_lines, "the lines were reordered"),
    (_swapped_places, "the order was changed"),
    (_repeated, "session:clerk-1 has a second event 3 ('call_settled')"),
    (_added, "Event 7 of session:clerk-1 was copied from event 6"),
    (_foreign, "The export has events of session:other"),
    (_blob, "was changed: it does not match its digest"),
    (_blob_added, "it was added"),
    (_no_line, "is not a valid line of an export"),
    (_no_header, "The first line, which describes the export, is missing"),
]


@pytest.mark.parametrize(("tamper", "sentence"), TAMPERINGS, ids=[each[0].__name__ for each in TAMPERINGS])
def test_whatever_is_done_to_an_export_is_named(
    halter: Halter, files: tuple[Path, Path], tamper: Callable[[Lines], Lines | None], sentence: str
) -> None:
    edit_lines(files[1], tamper)
    result = check(halter, files)
    assert result.exit_code == 1, result.output
    assert sentence in result.stdout


def test_every_single_field_of_every_event_is_held_by_the_chain(files: tuple[Path, Path]) -> None:
    from halter.journal.export import check_export as examine

    text = files[1].read_bytes().splitlines(keepends=True)
    assert examine(text).findings == ()
    for place, line in enumerate(text):
        event = json.loads(line)
        if event["line"] != "event":
            continue
        for field, value in event.items():
            values = {**event, field: value + 1 if isinstance(value, int) else f"{value}00"}
            bodies = [*text[:place], json.dumps(values).encode(), *text[place + 1 :]]
            assert examine(bodies).findings, (event["seq"], field)


def test_every_field_of_a_receipt_is_compared(halter: Halter, files: tuple[Path, Path]) -> None:
    from halter.journal.export import check_export as examine
    from halter.runtime.proof import prove_receipt

    journal = examine(files[1].read_bytes().splitlines(keepends=True))
    payload = json.loads(files[0].read_text())
    assert prove_receipt(payload, journal).ok
    for field in payload:
        if field != "session":
            assert not prove_receipt({**payload, field: "altered"}, journal).ok, field
            assert not prove_receipt({key: value for key, value in payload.items() if key != field}, journal).ok, field
    assert not prove_receipt({**payload, "more": 1}, journal).ok
    assert not prove_receipt({**payload, "trusted": 1}, journal).ok


def test_an_edited_receipt_is_reported_with_what_was_edited(halter: Halter, files: tuple[Path, Path]) -> None:
    payload = json.loads(files[0].read_text())
    payload["calls"][1]["cost_usd"] = 0
    files[0].write_text(json.dumps(payload))
    result = check(halter, files)
    assert result.exit_code == 1
    assert "The receipt has 0 for calls[2].cost_usd; the events give 0.0005." in result.stdout


def test_a_receipt_that_says_one_thing_twice_is_refused(halter: Halter, files: tuple[Path, Path]) -> None:
    files[0].write_text(files[0].read_text().replace('"cost_usd":', '"cost_usd": 0, "cost_usd":', 1))
    result = check(halter, files)
    assert result.exit_code != 0
    assert "a key occurs twice" in result.stderr


def test_erased_bodies_are_reported_and_break_nothing(halter: Halter, files: tuple[Path, Path]) -> None:
    assert halter("erase", "--session", "clerk-1", "--yes").exit_code == 0
    assert halter("export", "clerk-1", "--output", str(files[1])).exit_code == 0
    result = check(halter, files)
    assert result.exit_code == 0, result.output
    assert "bodies were erased" in result.stdout
    assert b"canary" not in files[1].read_bytes()


@pytest.mark.parametrize("words", [("--journal", "j"), ("clerk-1", "--verify", "a"), ()])
def test_half_a_question_is_answered_with_how_to_ask(halter: Halter, words: tuple[str, ...]) -> None:
    result = halter("receipt", *words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_an_export_is_checked_against_the_receipt_that_it_brings_along(
    halter: Halter, files: tuple[Path, Path]
) -> None:
    receipt, journal = files
    assert halter("receipt", "--verify", str(journal)).exit_code == 0
    alone = halter("receipt", "--verify", str(receipt))
    assert alone.exit_code == 3
    assert "--journal EXPORT" in alone.stderr


def test_a_missing_file_is_reported_in_a_sentence(halter: Halter, tmp_path: Path) -> None:
    result = halter("receipt", "--verify", str(tmp_path / "none"), "--journal", str(tmp_path / "none"))
    assert result.exit_code not in (0, 1)
    assert "Cannot read" in result.stderr


def test_a_page_of_a_receipt_holds_text_and_never_anything_that_a_browser_would_run(
    halter: Halter, tmp_path: Path
) -> None:
    path = tmp_path / "receipt.html"
    assert halter("receipt", "clerk-1", "--html", str(path)).exit_code == 0
    page = path.read_text()
    assert "&lt;script&gt;alert" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
