"""What the drills on the journal try, when nobody asks for less."""

import asyncio
from collections import Counter

import pytest

from halter_drills.disk import Image
from halter_drills.kill import count_commits, deaths
from halter_drills.powercut import MAX_BLANK_SHARE, Recording, draw_images, record
from halter_drills.tamper import TAMPERINGS


def test_a_process_is_killed_before_and_after_every_commit_and_200_times_at_least() -> None:
    commits = asyncio.run(count_commits())
    chosen = deaths(commits, seed=1)
    for how in ("before", "after"):
        assert sorted(death.commit for death in chosen if death.how == how) == list(range(1, commits + 1))
    assert any(death.how == "inside" for death in chosen)
    assert len(chosen) >= 200


def test_kills_inside_a_commit_come_to_every_commit_with_more_seeds() -> None:
    inside = {death.commit for seed in range(3) for death in deaths(30, seed) if death.how == "inside"}
    assert inside == set(range(1, 31))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("powercut") / "drill.db")


def test_every_commit_of_the_recorded_session_was_acknowledged(recording: Recording) -> None:
    assert [state.label for state in recording.states] == list(recording.promises)


def test_power_is_cut_within_every_commit_and_every_checkpoint(recording: Recording) -> None:
    images = Counter[int]()
    moments, blank = Counter[str](), 0
    for image in draw_images(recording.log, None):
        images[image.written] += 1
        moments[image.moment] += 1
        blank += image.blank
    assert all(images[number] > 1 for number in range(len(recording.states)))
    assert moments["overwriting the wal"] > 1000
    assert moments["writing the db"] > 100
    assert moments["before the wal sync"] > len(recording.states)
    assert blank < MAX_BLANK_SHARE * moments.total()


def test_as_many_images_are_drawn_as_are_wanted_from_all_of_the_log(recording: Recording) -> None:
    images: list[Image] = list(draw_images(recording.log, 50))
    assert len(images) == 50
    half = len(recording.log.operations) // 2
    assert 15 <= sum(image.point < half for image in images) <= 35


def test_every_kind_of_tampering_says_what_it_does_in_words_of_its_own() -> None:
    assert len({tampering.words for tampering in TAMPERINGS}) == len(TAMPERINGS)
