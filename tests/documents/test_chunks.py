"""A text is cut so that nothing of it is lost, and where a reader would cut it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.documents.chunks import CHUNK_OVERLAP, CHUNK_SIZE, split_into_chunks

TEXTS = st.text(st.sampled_from("ab .\n!\u3002合"), max_size=400)


@given(TEXTS, st.integers(1, 60), st.integers(0, 60))
def test_pieces_cover_all_of_a_text_and_none_is_empty(text: str, size: int, overlap: int) -> None:
    found = split_into_chunks(text, size, overlap)
    covered = 0
    for start, end in found:
        assert start < end <= start + size
        assert start <= covered < end
        covered = end
    assert covered == len(text)
    assert [start for start, _ in found] == sorted({start for start, _ in found})


@given(TEXTS)
def test_the_same_text_is_cut_the_same_way(text: str) -> None:
    assert split_into_chunks(text, 30, 5) == split_into_chunks(text, 30, 5)


def test_a_short_text_is_one_piece() -> None:
    assert split_into_chunks("The rent is due.") == ((0, 16),)
    assert split_into_chunks("") == ()


def test_a_piece_ends_with_a_paragraph_if_it_can() -> None:
    text = "\n\n".join(f"Paragraph {number}. " + "It says little. " * 20 for number in range(20))
    pieces = [text[start:end] for start, end in split_into_chunks(text)]
    assert all(output.endswith("\n\n") for output in pieces[:-1])


def test_a_piece_ends_with_a_sentence_and_the_next_begins_with_one() -> None:
    text = " ".join(f"Sentence number {number} of a text without paragraphs." for number in range(200))
    pieces = [text[start:end].strip() for start, end in split_into_chunks(text)]
    assert all(output.endswith(".") and output.startswith("Sentence") for output in pieces)


def test_pieces_share_a_little() -> None:
    text = " ".join(f"Sentence number {number} of a text without paragraphs." for number in range(200))
    found = split_into_chunks(text)
    shared = [before[1] - after[0] for before, after in pairwise(found)]
    assert all(0 < each <= CHUNK_OVERLAP for each in shared)


@pytest.mark.parametrize("text", ["x" * 10_000, "\n" * 10_000, "合" * 10_000, ". " * 5_000])
def test_a_text_without_a_place_to_cut_is_still_cut(text: str) -> None:
    found = split_into_chunks(text)
    assert found[-1][1] == len(text)
    assert max(end - start for start, end in found) <= CHUNK_SIZE


def test_a_long_text_takes_time_in_proportion() -> None:
    chance = random.Random(3)
    text = "".join(chance.choices("abc \n.", k=2_000_000))
    assert 1_500 < len(split_into_chunks(text)) < 6_000
