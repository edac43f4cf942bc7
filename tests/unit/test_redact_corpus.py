"""Secrets are found and harmless text is left alone, measured on texts of many kinds: see `python -m bench.corpus`."""

import random

import pytest

from bench import corpus
from halter.redaction.redact import Redactor
from halter.redaction.stream_redactor import StreamRedactor

REDACTOR = Redactor({})
SEEDS = (1, 2, 3)


def list_samples(kind: str, seed: int = 1) -> list[corpus.Sample]:
    return [sample for text in corpus.PARTS for sample in corpus.samples(kind, text, seed)]


def test_the_corpus_is_large_enough_to_say_something() -> None:
    assert len(list_samples("found")) >= 400
    assert len({sample.family for sample in list_samples("found")}) >= 120
    assert all(sample.secrets for sample in list_samples("found"))
    assert len(list_samples("harmless")) >= 400
    assert not any(sample.secrets for sample in list_samples("harmless"))


@pytest.mark.parametrize("seed", SEEDS)
def test_at_least_98_of_100_secrets_are_hidden_to_the_last_characters(seed: int) -> None:
    missed = [sample for sample in list_samples("found", seed) if corpus.left(sample, REDACTOR.redact(sample.text))]
    assert len(missed) <= 0.02 * len(list_samples("found")), [sample.text for sample in missed]


@pytest.mark.parametrize("seed", SEEDS)
def test_at_most_1_of_100_harmless_texts_is_touched(seed: int) -> None:
    touched = [sample for sample in list_samples("harmless", seed) if REDACTOR.redact(sample.text) != sample.text]
    assert len(touched) <= 0.01 * len(list_samples("harmless")), [REDACTOR.redact(sample.text) for sample in touched]


def test_code_that_only_speaks_of_secrets_can_be_written_back_as_it_was() -> None:
    code = "\n".join(sample.text for sample in list_samples("harmless") if sample.family == "python")
    assert REDACTOR.redact(code) == code


def test_what_was_hidden_is_not_hidden_again() -> None:
    for sample in (*list_samples("found"), *list_samples("harmless")):
        once = REDACTOR.redact(sample.text)
        assert REDACTOR.redact(once) == once


@pytest.mark.parametrize("longest", [3, 40, 700])
def test_the_corpus_is_redacted_alike_in_chunks_of_any_size(longest: int) -> None:
    chance = random.Random(longest)
    text = "\n\n".join(
        sample.text for sample in chance.sample((*list_samples("found"), *list_samples("harmless")), 300)
    )
    stream = StreamRedactor(REDACTOR)
    texts: list[str] = []
    at = 0
    while at < len(text):
        size = chance.randint(1, longest)
        texts.append(stream.feed(text[at : at + size]))
        at += size
    assert "".join((*texts, stream.finish())) == REDACTOR.redact(text)


def test_the_corpus_is_redacted_alike_inside_a_streamed_answer() -> None:
    chance = random.Random(4)
    prose = [
        "The",
        "fox",
        "said:",
        "nothing",
        "was",
        "found",
        "in",
        "3",
        "of",
        "20",
        "files",
        "(about",
        "$19.90),",
        "and",
        "it",
        "is",
        "no",
        "trouble.",
    ]
    for sample in chance.sample((*list_samples("found"), *list_samples("harmless")), 400):
        before, after = (" ".join(chance.choices(prose, k=chance.randint(0, 120))) for _ in range(2))
        text = f"{before}{chance.choice(['', ' ', chr(10)])}{sample.text}{chance.choice(['', ' ', chr(10)])}{after}"
        stream, size = StreamRedactor(REDACTOR), chance.choice([1, 4, 30])
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert "".join((*map(stream.feed, chunks), stream.finish())) == REDACTOR.redact(text)
