"""A secret that is split over chunks is caught as if it had come whole."""

import base64
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.redaction.redact import Redactor
from halter.redaction.stream_redactor import StreamRedactor

SECRET = "open sesame/4+2"
REDACTOR = Redactor({"MINE": SECRET})
DASHES = "-" * 5
KEYS = [
    SECRET,
    base64.b64encode(f"x{SECRET}y".encode()).decode(),
    SECRET.encode().hex(),
    "gh" + "p_" + "a1B2" * 9,
    "password = 'correct-horse'",
    "Authorization: Basic " + "QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
    f"{DASHES}BEGIN PRIVATE {'KEY'}{DASHES}\n" + ("A" * 64 + "\n") * 40 + f"{DASHES}END PRIVATE KEY{DASHES}",
    "ey" + "JhbGciOiJIUzI1NiJ9" + ".ey" + "J" + "a" * 900 + "." + "b" * 43,
    "postgres://ann:open-sesame@db/x",
    f'PRIVATE_KEY="{DASHES}BEGIN RSA PRIVATE {"KEY"}{DASHES}\n'
    + ("B7x/" * 16 + "\n") * 30
    + f'{DASHES}END RSA PRIVATE KEY{DASHES}"',
    "sshpass -p 'k7Xq2mmW9z' ssh root@10.0.0.7",
    "curl -sS -X POST --max-time 10 -H 'Accept: application/json' -u ada:k7Xq2mmW9z https://example.com",
    "curl " + "-H 'Accept: text/plain' " * 9 + "-u ada:open-sesame https://example.com",
    "machine git.example.com login robot password k7Xq2mmW9z",
    'passphrase = "' + "correct horse battery staple " * 8 + '"',
    "the admin password is k7Xq2mmW9z, please change it",
    "Cookie: theme=dark; sessionid=94mij6ict6flzz0p9hlowxue6w0gf6qg; lang=de",
    "seed phrase: " + "meadow ribbon timber " * 8,
    "token = response.json()",
]
WORDS = st.sampled_from(["word", "x=1,", "\n", "🌍", "https://example.com/a", "a" * 300, "\ud800"])


@given(st.lists(st.sampled_from(KEYS) | WORDS, max_size=40), st.integers(0, 2**32), st.integers(1, 400))
def test_chunks_come_out_as_the_whole_text_would(words: list[str], seed: int, longest: int) -> None:
    text = " ".join(words)
    cut = random.Random(seed)
    stream = StreamRedactor(REDACTOR)
    texts: list[str] = []
    at = 0
    while at < len(text):
        size = cut.randint(1, longest)
        texts.append(stream.feed(text[at : at + size]))
        at += size
    texts.append(stream.finish())
    assert "".join(texts) == REDACTOR.redact(text)


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_that_comes_letter_by_letter_is_caught(key: str) -> None:
    stream = StreamRedactor(REDACTOR)
    text = "word " * 100 + key + " word" * 100
    output = "".join(stream.feed(letter) for letter in text) + stream.finish()
    assert output == REDACTOR.redact(text)


PROSE = [
    *[
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
        "it's",
        "no",
        "trouble.",
        "a",
        "b",
        "open",
        "ses",
    ]
]
VALUES = [
    SECRET,
    "correct horse battery",
    "deadbeefcafe",
    "über geheim es",
    'it\'s a "se\\cret" & 100% x',
    "fox said: nothing",
]
SPELLINGS: list[Callable[[str], str]] = [
    str,
    str.upper,
    lambda value: value[::-1],
    lambda value: value[:-1],
    "\n    ".join,
    lambda value: " ".join(f"{byte:02x}" for byte in value.encode()),
    lambda value: "\n".join(map("".join, batched(base64.b64encode(value.encode()).decode(), 3))),
    lambda value: "".join(f"%2525{byte:02x}" for byte in value.encode()),
    lambda value: "\n".join(f"%2525{byte:02x}" for byte in value.encode()),
    lambda value: "".join(f"\\u{ord(letter):04x}" for letter in value),
]


def batched(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("value", VALUES)
def test_a_known_value_in_prose_is_caught_in_every_spelling(value: str, spell: Callable[[str], str]) -> None:
    redactor, chance = Redactor({"MINE": value}), random.Random(value)
    for longest in (1, 1, 3, 8, 8, 40):
        before, after = (" ".join(chance.choices(PROSE, k=chance.randint(0, 90))) for _ in range(2))
        text = before + chance.choice(["", " ", "\n"]) + spell(value) + chance.choice(["", " ", "\n"]) + after
        stream = StreamRedactor(redactor)
        output = "".join(map(stream.feed, batched(text, longest))) + stream.finish()
        assert output == redactor.redact(text)


def test_prose_is_held_back_by_its_last_words_only() -> None:
    stream, text = StreamRedactor(REDACTOR), "It went well, and nothing else is to be said about it. " * 40
    behind = 0
    for sent, letter in enumerate(text, 1):
        behind -= len(stream.feed(letter))
        behind += 1
        assert behind <= 100, text[:sent][-behind:]


def test_what_is_certain_does_not_wait_for_the_end() -> None:
    stream = StreamRedactor(REDACTOR)
    assert len(stream.feed("word " * 1000)) > 4000


def test_a_stream_without_any_blank_is_let_go_in_time() -> None:
    stream = StreamRedactor(REDACTOR)
    released = sum(len(stream.feed("a" * 10_000)) for _ in range(100))
    assert released > 500_000


ROWS = "".join(f"| user{number} | {word} summer rain |\n" for number, word in enumerate(["green", "blue", "warm"] * 40))


@pytest.mark.parametrize("size", [1, 7, 64, 500])
@pytest.mark.parametrize(
    "text",
    [
        f"Users:\n\n| user | password |\n|---|---|\n{ROWS}\nThat was all, and more text follows here.\n" * 2,
        "db:\n  password: correct horse battery staple\n  user: ada\n" * 20,
        "| a | b |\nno table | at all\n" * 60,
        f"{'words and ' * 100}\npassword | user\n--- | ---\nhunter two | ada\n",
    ],
)
def test_a_table_or_a_phrase_in_chunks_is_hidden_as_in_one_piece(text: str, size: int) -> None:
    redactor = Redactor({})
    stream = StreamRedactor(redactor)
    chunks = [stream.feed(text[at : at + size]) for at in range(0, len(text), size)]
    shown = "".join([*chunks, stream.finish()])
    assert shown == redactor.redact(text)
    assert "summer" not in shown
    assert "hunter" not in shown
    assert "staple" not in shown


def test_text_without_a_table_is_not_held_back_until_its_line_ends() -> None:
    stream = StreamRedactor(Redactor({}))
    assert len("".join(stream.feed("word ") for _ in range(1000))) > 3000
