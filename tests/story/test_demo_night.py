"""The worst night: what a plain loop pays, what Halter pays, and that both are worked out and not made up."""

import functools
from contextlib import closing
from html import unescape
from pathlib import Path

import msgspec
import pytest

from halter.cli.output import encode_json_line
from halter.cli.run.demo_night import print_conclusion
from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import CostCapReached, ItemQuarantined, RequestSettled
from halter.core.messages import Prompt, make_user_message
from halter.core.money import DOLLAR, micros_to_usd
from halter.core.usage import Usage
from halter.demo.folder import DemoFolder, record_night
from halter.demo.incidents import (
    INVOICES,
    MODEL,
    NIGHT_START,
    REPORTS,
    SCENES,
    Bill,
    Frame,
    Incident,
    NightRecord,
    PlayedIncident,
    Scene,
    count_prompt_tokens,
    find_price,
    format_cents,
    play_incident,
    sum_night,
    summarize_incident,
    write_handbook,
)
from halter.journal.sqlite_connection import open_read_only

NAMES = [scene.name for scene in SCENES]
STUCK, IDLE, PARALLEL = SCENES


@functools.cache
def once(name: str) -> tuple[PlayedIncident, list[Frame]]:
    """Live through an incident, once for all tests."""
    frames: list[Frame] = []
    (scene,) = [scene for scene in SCENES if scene.name == name]
    return play_incident(scene, frames.append), frames


@pytest.mark.parametrize("name", NAMES)
def test_halter_asks_less_and_pays_less_than_a_plain_loop(name: str) -> None:
    played_incident, _ = once(name)
    assert 0 < played_incident.within.requests < played_incident.without.requests
    assert 0 < 4 * played_incident.within.cost_usd < played_incident.without.cost_usd


@pytest.mark.parametrize("name", NAMES)
def test_the_bills_grow_from_frame_to_frame_up_to_what_is_told_at_the_end(name: str) -> None:
    played_incident, frames = once(name)
    assert [frame.share for frame in frames] == sorted(frame.share for frame in frames)
    assert frames[-1].share == 1
    for side in ("without", "within"):
        bills = [(bill.cost_usd, bill.requests) for bill in (getattr(frame, side) for frame in frames)]
        assert bills == sorted(bills)
        assert frames[-1].at == NIGHT_START + played_incident.scene.duration
        assert getattr(frames[-1], side) == getattr(played_incident, side)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_in_the_journal_was_paid_at_the_real_price(name: str) -> None:
    played_incident, _ = once(name)
    rates = find_price()
    settled = [stored.event for stored in played_incident.events if isinstance(stored.event, RequestSettled)]
    assert {event.outcome for event in settled} == {"ok"}
    for event in settled:
        assert event.usage is not None
        assert event.charge is not None
        assert event.charge.usd == rates.cost(event.usage, NIGHT_START)


def test_the_same_figures_come_out_every_time() -> None:
    first, _ = once(PARALLEL.name)
    played_incident = play_incident(PARALLEL, lambda _: None)
    assert summarize_incident(played_incident) == summarize_incident(first)
    assert [(event.stream, event.at, event.kind) for event in played_incident.events] == [
        (event.stream, event.at, event.kind) for event in first.events
    ]


def short(scene: Scene) -> Scene:
    return msgspec.structs.replace(scene, duration=28 * MINUTE)


def test_the_night_that_is_kept_has_the_same_figures_and_lies_before_now(tmp_path: Path) -> None:
    demo_folder, now = DemoFolder(tmp_path / "demo"), NIGHT_START + 100 * DAY - 10 * HOUR
    with record_night(demo_folder, "ada", now) as record:
        assert record is not None
        idle, parallel = (play_incident(scene, lambda _: None, record) for scene in (short(IDLE), PARALLEL))
        assert not demo_folder.store.exists()
    assert parallel.within == once(PARALLEL.name)[0].within
    assert parallel.without == once(PARALLEL.name)[0].without
    assert idle.within == play_incident(short(IDLE), lambda _: None).within
    assert {event.at < now for event in (*idle.events, *parallel.events)} == {True}
    with closing(open_read_only(str(demo_folder.store))) as store:
        agents = store.execute(
            "SELECT agent, count(*), sum(ended_at IS NULL AND due_at < ?) FROM sessions GROUP BY 1", (now,)
        )
        assert agents.fetchall() == [("analyst", REPORTS, 0), ("watchman", 1, 0)]
    assert [file.name for file in demo_folder.root.iterdir()] == ["halter.db"]


def test_a_night_that_was_interrupted_is_not_kept_and_a_store_that_is_there_is_left_alone(tmp_path: Path) -> None:
    demo_folder = DemoFolder(tmp_path / "demo")
    with pytest.raises(KeyboardInterrupt), record_night(demo_folder, "ada", NIGHT_START + DAY):
        raise KeyboardInterrupt
    assert list(demo_folder.root.iterdir()) == []
    demo_folder.store.write_text("something else")
    with record_night(demo_folder, "ada", NIGHT_START + DAY) as record:
        assert record is None
    assert demo_folder.store.read_text() == "something else"


@pytest.mark.parametrize("hour", range(24))
def test_a_night_that_is_kept_is_over_and_a_short_incident_stays_within_one_day(hour: int) -> None:
    now = NIGHT_START - 22 * HOUR + 100 * DAY + hour * HOUR + MINUTE
    record = NightRecord(Path("unused.db"), now, "ada")
    for scene in SCENES:
        start = record.start(scene)
        assert now - 2 * DAY < start
        assert start + scene.duration <= now
    assert record.start(PARALLEL) // DAY == (record.start(PARALLEL) + PARALLEL.duration) // DAY
    assert record.start(STUCK) % DAY == 22 * HOUR


def test_what_cannot_be_done_is_tried_three_times_and_then_left_to_a_person_while_the_rest_is_done() -> None:
    played_incident, _ = once(STUCK.name)
    (quarantined,) = [stored.event for stored in played_incident.events if isinstance(stored.event, ItemQuarantined)]
    assert quarantined.attempts == 3
    assert quarantined.sentence.startswith("invoice-4.txt was tried 3 times")
    assert [row.state for row in played_incident.sessions].count("COMPLETED") == INVOICES - 1
    assert any(
        stored.stream == "outbox" and b"was quarantined" in (stored.body or b"") for stored in played_incident.events
    )


def test_an_idle_agent_thinks_only_when_something_has_changed() -> None:
    played_incident, _ = once(IDLE.name)
    at = [event.at - NIGHT_START for event in played_incident.events if event.kind == "turn_started"]
    assert len(at) == played_incident.within.requests
    assert [moment // HOUR for moment in at[-2:]] == [3, 3]
    assert played_incident.without.requests == 8 * 60


def test_twenty_runs_beside_each_other_never_spend_more_than_their_one_cap() -> None:
    played_incident, frames = once(PARALLEL.name)
    assert all(frame.within.cost_usd <= 1 for frame in frames)
    assert played_incident.without.cost_usd > 3
    assert len(played_incident.sessions) == REPORTS
    (cap,) = {stored.event.cap for stored in played_incident.events if isinstance(stored.event, CostCapReached)}
    assert cap == DOLLAR


def test_nobody_who_waits_for_money_loses_what_was_done() -> None:
    played_incident, _ = once(PARALLEL.name)
    assert {row.state for row in played_incident.sessions} == {"COMPLETED", "SLEEPING"}


def test_tokens_are_counted_from_what_is_sent() -> None:
    short, long = (Prompt(system=write_handbook(rules), messages=(make_user_message("hello"),)) for rules in (1, 100))
    assert count_prompt_tokens(short) < count_prompt_tokens(long)
    assert 0.2 * len(long.system) < count_prompt_tokens(long) < 0.3 * len(long.system)
    assert find_price().cost(Usage(1_000_000 // 10, 0), NIGHT_START) == 3 * DOLLAR // 10


def test_programs_get_the_figures_under_plain_names() -> None:
    incidents = [summarize_incident(once(name)[0]) for name in NAMES]
    read = msgspec.json.decode(encode_json_line(sum_night(incidents)))
    assert read["model"] == str(MODEL)
    assert list(read) == ["model", "incidents", "without", "with", "overruns"]
    assert read["overruns"] == 0
    assert [each["name"] for each in read["incidents"]] == NAMES
    for side in ("without", "with"):
        assert read[side]["cost_usd"] == pytest.approx(sum(each[side]["cost_usd"] for each in read["incidents"]))
        assert read[side]["requests"] == sum(each[side]["requests"] for each in read["incidents"])


def test_what_stopped_it_is_read_from_the_journal_and_not_typed_in() -> None:
    played_incident, _ = once(IDLE.name)
    skipped = [event for event in played_incident.events if event.kind == "turn_skipped"]
    assert f"{len(skipped)} of {len(skipped) + 4} wakes" in summarize_incident(played_incident).stopped_by
    fewer = msgspec.structs.replace(
        played_incident, events=[event for event in played_incident.events if event not in skipped[:10]]
    )
    assert f"{len(skipped) - 10} of" in summarize_incident(fewer).stopped_by


def test_amounts_are_written_to_the_cent() -> None:
    assert [format_cents(micros_to_usd(micros)) for micros in (0, 340_000, 29_671_332, 1_234_567_890)] == [
        "$0.00",
        "$0.34",
        "$29.67",
        "$1,234.57",
    ]
    assert isinstance(summarize_incident(once(IDLE.name)[0]), Incident)
    assert isinstance(once(IDLE.name)[0].within, Bill)


def test_the_pages_about_the_demo_show_what_it_really_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    print_conclusion(sum_night([summarize_incident(once(name)[0]) for name in NAMES]))
    output = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    docs = Path(__file__).parents[2] / "docs"
    assert f"```text\n{output}\n```" in (docs / "demo.md").read_text("utf-8")
    picture = (docs / "pictures" / "terminal.svg").read_text("utf-8")
    assert all(line in unescape(picture) for line in output.splitlines()[-1:]), "make pictures"
