"""Checkpoints that were tampered with are found, and vouch for nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from halter.journal.checkpoint_log import CheckpointLog, read_checkpoint_log
from halter.journal.checkpoints import checkpoint_file, load_signing_key

if TYPE_CHECKING:
    from conftest import Desk


def flaws(chronicle: CheckpointLog) -> list[tuple[str, int]]:
    return [(finding.kind, finding.seq) for finding in chronicle.findings]


def three_lines(desk: "Desk") -> list[bytes]:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    for seq in (1, 2, 3):
        checkpointer.on_commit([desk.event("a", seq)])
    return desk.path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[1:], [("checkpoint_altered", 1)]),
        (lambda lines: [lines[0], lines[2]], [("checkpoint_altered", 2)]),
        (lambda lines: [lines[1], lines[0], lines[2]], [("checkpoint_altered", number) for number in (1, 2, 3)]),
        (lambda lines: [lines[0], lines[0], *lines[1:]], [("checkpoint_altered", 2)]),
        (lambda lines: [b"{}\n", *lines[1:]], [("checkpoint_altered", 1), ("checkpoint_altered", 2)]),
        (
            lambda lines: [lines[0].replace(b"{", b"{ ", 1), *lines[1:]],
            [("checkpoint_altered", 1), ("checkpoint_altered", 2)],
        ),
        (lambda lines: [*lines[:2], lines[2].replace(b'"a":[3', b'"a":[2')], [("checkpoint_altered", 3)]),
        (lambda lines: [*lines[:2], b"[" * 100_000 + b"\n"], [("checkpoint_altered", 3)]),
        (lambda lines: [*lines[:2], b"\xff\n"], [("checkpoint_altered", 3)]),
    ],
)
def test_a_changed_file_of_checkpoints_is_found(
    desk: "Desk", change: Callable[[list[bytes]], list[bytes]], expected: list[tuple[str, int]]
) -> None:
    desk.path.write_bytes(b"".join(change(three_lines(desk))))
    assert flaws(desk.read()) == expected


def test_a_line_after_a_missing_one_still_vouches_for_its_events(desk: "Desk") -> None:
    desk.path.write_bytes(three_lines(desk)[2])
    assert desk.read().find_covered("a") == 3


def test_an_append_works_after_a_line_that_was_damaged(desk: "Desk") -> None:
    lines = three_lines(desk)
    desk.path.write_bytes(b"".join([*lines[:2], b"damaged\n"]))
    desk.checkpointer().on_commit([desk.event("a", 4)])
    assert flaws(desk.read()) == [("checkpoint_altered", 3)]
    assert desk.read().find_covered("a") == 4


def test_checkpoints_of_another_store_vouch_for_nothing(desk: "Desk") -> None:
    three_lines(desk)
    desk.path.rename(checkpoint_file(desk.folder, "another"))
    chronicle = read_checkpoint_log(desk.folder, "another")
    assert flaws(chronicle) == [("checkpoint_altered", number) for number in (1, 2, 3)]
    assert chronicle.claims == {}


def test_checkpoints_with_a_key_that_is_not_trusted_vouch_for_nothing(desk: "Desk", tmp_path: Path) -> None:
    three_lines(desk)
    trusted = load_signing_key(tmp_path / "mine").public
    chronicle = read_checkpoint_log(desk.folder, desk.store_id, [trusted])
    assert flaws(chronicle) == [("checkpoint_key", number) for number in (1, 2, 3)]
    assert chronicle.claims == {}


def test_two_checkpoints_that_contradict_each_other_are_found(desk: "Desk") -> None:
    checkpointer = desk.checkpointer(events_per_checkpoint=1)
    checkpointer.on_commit([desk.event("a", 1)])
    checkpointer.on_commit([msgspec.structs.replace(desk.event("a", 1), hash=bytes(32))])
    assert flaws(desk.read()) == [("rewritten", 1)]
