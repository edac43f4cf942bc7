"""The example that reviews contracts, from the file that is dropped to the words that people are told."""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from halter.core.clock import MINUTE
from halter.core.ports import Query, read_body
from halter.core.rows import FindingRow, NotificationRow, PrecedentRow, SessionRow
from halter.guard.approvals import list_pending_decisions
from halter.testing.world import World
from tests.story.autonomous import Fleet
from tests.story.tasks import all_is_well

EXAMPLE = Path(__file__).parents[2] / "examples" / "document-review"
HARD = "Supply agreement with Mara Lindqvist.\nThe buyer's liability is unlimited in all cases.\nIt ends in May.\n"
HARDER = "Lease of a crane.\nThe lessee is liable without limit for damage.\n"
MILD = "A note on the canteen. Lunch is served at noon.\n"


async def rows(world: World, name: str, kind: Any) -> list[Any]:
    return list(await world.journal.ask(Query(name, kind)))


async def test_contracts_that_are_dropped_are_reviewed_and_people_are_told_what_stands_in_them(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path)
    folder = tmp_path / "document-review"
    shutil.copytree(EXAMPLE, folder)
    (folder / "inbox").mkdir(exist_ok=True)
    fleet.start(folder)
    for name, text in (("hard.txt", HARD), ("harder.md", HARDER), ("zz.txt", HARD), ("mild.txt", MILD)):
        (folder / "inbox" / name).write_text(text)
    await world.advance(2 * MINUTE)
    sessions = await rows(world, "all_sessions", SessionRow)
    assert [(row.state, row.kind) for row in sessions] == [("COMPLETED", "task")] * 3
    finding_rows = [
        row
        for session in sessions
        for row in await world.journal.ask(Query("findings_of", FindingRow, {"session": session.session}))
    ]
    assert [(row.severity, row.support, row.review) for row in finding_rows] == [("high", "supported", "released")] * 2
    (precedent,) = await rows(world, "all_precedents", PrecedentRow)
    assert (precedent.kind, precedent.observed_count) == ("liability", 2)
    assert [(each.about, each.subject) for each in await list_pending_decisions(world.journal)] == [
        ("proposal", precedent.precedent)
    ]
    letters = sorted([await letter(world, row) for row in await rows(world, "all_notifications", NotificationRow)])
    assert [subject for subject, _ in letters] == [
        "A contract needs you: hard.txt",
        "A contract needs you: harder.md",
        "Nothing to ask about: mild.txt",
    ]
    assert '"The buyer\'s liability is unlimited in all cases" (hard.txt, supported)' in letters[0][1]
    await all_is_well(world)


async def letter(world: World, row: NotificationRow) -> tuple[str, str]:
    """What people are told."""
    (event,) = await world.journal.read(row.stream, row.queued_seq - 1, 1)  # type: ignore[arg-type]
    words = msgspec.json.decode(await read_body(world.journal, event))
    return words["subject"], words["text"]
