"""What every store promises of documents: the same words find the same chunks, in the documents named and no others."""

import asyncio
import random
import string
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halter.core.ports import Chunk
from halter.core.words import split_words
from halter.journal.store import JournalStore

if TYPE_CHECKING:
    from conftest import Place


def pieces(document: str, *texts: str) -> list[Chunk]:
    chunks: list[Chunk] = []
    for number, text in enumerate(texts):
        start = chunks[-1].end if chunks else 0
        chunks.append(Chunk(document, number, start, start + len(text), text))
    return chunks


async def keep(store: JournalStore, **documents: str) -> list[str]:
    for name, text in documents.items():
        await store.index(name, pieces(name, text))
    return list(documents)


async def find(store: JournalStore, documents: list[str], query: str, limit: int = 100) -> set[str]:
    return {found_chunk.document for found_chunk in await store.search(documents, query, limit)}


async def test_a_document_comes_back_as_it_was_indexed(store: JournalStore) -> None:
    chunks = pieces("one", "The rent is due.", "It is paid late.", "日本語 and \U0001f600")
    await store.index("one", chunks)
    assert await store.chunks("one") == chunks
    assert await store.chunks("two") == []


async def test_a_chunk_is_found_with_its_place(store: JournalStore) -> None:
    await store.index("one", pieces("one", "The rent is due.", "It is paid late."))
    (found_chunk,) = await store.search(["one"], "paid late", 10)
    assert (found_chunk.document, found_chunk.number, found_chunk.start, found_chunk.end) == ("one", 1, 16, 32)
    assert found_chunk.text == "It is paid late."


async def test_indexing_again_changes_nothing(store: JournalStore) -> None:
    for text in ("apple", "apple", "pear"):
        await store.index("one", pieces("one", text, "fig"))
    assert [chunk.text for chunk in await store.chunks("one")] == ["apple", "fig"]
    assert len(await store.search(["one"], "fig", 10)) == 1


async def test_what_was_forgotten_can_be_indexed_otherwise(store: JournalStore) -> None:
    await store.index("one", pieces("one", "apple", "pear", "plum"))
    await store.forget("one")
    await store.index("one", pieces("one", "apple", "fig"))
    assert [chunk.text for chunk in await store.chunks("one")] == ["apple", "fig"]
    assert await store.search(["one"], "plum", 10) == []


async def test_a_document_without_text_is_still_there(store: JournalStore) -> None:
    await store.index("one", [])
    assert await store.find_indexed(["one", "two"]) == {"one"}
    assert await store.chunks("one") == []


def half_written(place: "Place") -> bool:
    return place.sql("SELECT COUNT(*) FROM chunks") != [(0,)]


async def test_a_document_that_is_half_written_is_not_there(shared_place: "Place") -> None:
    """Who dies in the middle leaves chunks behind that nobody sees, and that the next one who comes does not mind.

    That there is a middle at all shows that others can write meanwhile.
    """
    store = shared_place.open()
    chunks = pieces("one", *(f"apple number{number}" for number in range(5000)))
    writing = asyncio.create_task(store.index("one", chunks))
    while not half_written(shared_place):  # noqa: ASYNC110  Nobody tells when a transaction of others is over.
        await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await store.find_indexed(["one"]) == frozenset()
    assert await store.chunks("one") == []
    assert await store.search(["one"], "apple", 10) == []
    await store.index("one", pieces("one", "an apple", "a pear"))
    assert [chunk.text for chunk in await store.chunks("one")] == ["an apple", "a pear"]
    assert [found_chunk.number for found_chunk in await store.search(["one"], "apple", 10)] == [0]


async def test_a_document_that_is_forgotten_is_found_no_more(store: JournalStore) -> None:
    await keep(store, one="apple", two="apple")
    await store.forget("one")
    await store.forget("one")
    assert await store.chunks("one") == []
    assert await find(store, ["one", "two"], "apple") == {"two"}
    assert await store.find_indexed(["one", "two", "three"]) == {"two"}


async def test_only_the_documents_named_are_searched(store: JournalStore) -> None:
    await keep(store, mine="the secret of apples", yours="the secret of pears")
    assert await find(store, ["mine"], "secret") == {"mine"}
    assert await find(store, ["mine"], "pears") == set()
    assert await find(store, [], "secret") == set()


async def test_all_words_must_occur_or_else_any_of_them(store: JournalStore) -> None:
    names = await keep(store, both="apples and pears", apples="apples alone", neither="plums")
    assert await find(store, names, "pears apples") == {"both"}
    assert await find(store, names, "apples quinces") == {"both", "apples"}
    assert await find(store, names, "quinces") == set()


FORMS = {
    "capitals": ("The LANDLORD pays", "landlord"),
    "capitals asked": ("the landlord pays", "LANDLORD"),
    "accents": ("résumé of the café", "RESUME cafe"),
    "accents asked": ("the cafe", "café"),
    "accents of two kinds": ("cafe\u0301", "caf\u00e9"),
    "sharp s": ("Straße", "STRASSE"),
    "final sigma": ("ΟΔΥΣΣΕΥΣ", "οδυσσευς"),
    "ligatures": ("the \ufb01ling of\ufb01ce", "filing office"),
    "wide letters": ("\uff21\uff22\uff23", "abc"),
    "Cyrillic": ("Договор аренды", "ДОГОВОР"),
    "Chinese without spaces": ("本合同自签字之日起生效", "合同"),
    "Hindi": ("यह अनुबंध है", "अनुबंध"),
    "Arabic with its vowels": ("العَقْد", "العقد"),
    "letters younger than the databases' tables": ("\U0001e900\U0001e901", "\U0001e922\U0001e923"),
    "numbers": ("clause 12.3(a) of 2024-05-01", "12 2024"),
    "an address": ("write to jane.doe@example.com/inbox", "doe example"),
    "a path": ("see /var/log/app-server_2.log", "server 2 log"),
    "a hyphen": ("well-known", "known"),
    "a word without end": ("x" * 5000, "x" * 5000),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_word_is_found_in_whatever_form_it_is_written(store: JournalStore, form: str) -> None:
    text, query = FORMS[form]
    names = await keep(store, wanted=text, other="something else altogether")
    assert await find(store, names, query) == {"wanted"}


HOSTILE = [
    "",
    " ",
    "!!!",
    '"',
    "'",
    "''",
    '"unclosed',
    "'unclosed",
    "a OR",
    "AND",
    "NOT a",
    "NEAR(a b, 5)",
    "words:a",
    "a*",
    "^a",
    "a & | ! <-> b",
    "a:*",
    "(((",
    "\\",
    "%s %(query)s ? :query $1",
    "a\x00b",
    "\ud800",
    "\U0001f600",
    "-- ; DROP TABLE chunks",
    "a b " * 250_000,
    " ".join(f"w{number}" for number in range(50_000)),
    "\u0301" * 1000,
    "(" * 100_000,
]


@pytest.mark.parametrize("query", HOSTILE, ids=lambda query: ascii(query[:20]))
async def test_no_query_is_an_error(store: JournalStore, query: str) -> None:
    names = await keep(store, one="a plain text about w7 and near words", two="query")
    assert await find(store, names, query) <= {"one", "two"}
    assert await find(store, names, "plain") == {"one"}


async def test_any_chunk_can_be_indexed(store: JournalStore) -> None:
    hostile = ["half \ud800 pair", "NUL \x00 here", "' \\ : \" words", " ".join(map(str, range(40_000))), "\n\t \r"]
    await store.index("a\x00", pieces("a\x00", *hostile))
    assert [chunk.number for chunk in await store.chunks("a\x00")] == [0, 1, 2, 3, 4]
    assert [found_chunk.number for found_chunk in await store.search(["a\x00"], "pair", 10)] == [0]
    assert [found_chunk.number for found_chunk in await store.search(["a\x00"], "here NUL", 10)] == [1]


async def test_thousands_of_documents_are_searched_at_once(store: JournalStore) -> None:
    await keep(store, **{f"d{number}": f"lease number n{number}" for number in range(300)})
    names = [f"d{number}" for number in range(5000)]
    assert await find(store, names, "n250 lease") == {"d250"}
    assert await store.find_indexed(names) == {f"d{number}" for number in range(300)}
    assert len(await store.search(names, "lease", 7)) == 7


@pytest.mark.parametrize("limit", [0, -1, 1 << 70])
async def test_any_limit_is_understood(store: JournalStore, limit: int) -> None:
    names = await keep(store, one="apple", two="apple")
    assert len(await store.search(names, "apple", limit)) == (2 if limit > 0 else 0)


async def test_what_says_it_more_often_comes_first(store: JournalStore) -> None:
    names = await keep(
        store,
        seldom="A lease runs on for years, and nobody reads what it has to say of anything.",
        often="lease lease lease lease lease",
        never="rent",
    )
    found_chunks = await store.search(names, "lease", 10)
    assert [each.document for each in found_chunks] == ["often", "seldom"]
    assert found_chunks[0].rank > found_chunks[1].rank


async def test_every_store_finds_what_the_words_themselves_say(store: JournalStore) -> None:
    """The measure is one that no database had a part in: which words a text has."""
    chance = random.Random(11)
    letters = (
        string.ascii_letters + "äöüßéñçøåΣςжЖ" + " .,-_'\"/@:()&|!*\u00ad\u2019\ufb01合同ไทย\u0661\u0662²" + " " * 20
    )
    texts = {f"d{number}": "".join(chance.choices(letters, k=60)) for number in range(60)}
    names = await keep(store, **texts)
    for _ in range(60):
        word = chance.choice(split_words(texts[chance.choice(names)]))
        assert await find(store, names, word) == {name for name, text in texts.items() if word in split_words(text)}, (
            word
        )


async def test_others_see_what_was_indexed(shared_place: "Place") -> None:
    journal_store, two = shared_place.open(), shared_place.open()
    await keep(journal_store, lease="apple")
    assert await find(two, ["lease"], "apple") == {"lease"}
    assert await two.find_indexed(["lease"]) == {"lease"}


async def test_who_indexes_the_same_document_at_once_writes_the_same(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(3)]
    chunks = pieces("one", *(f"apple number{number}" for number in range(1500)))
    for _ in range(2):
        await asyncio.gather(*(store.index("one", chunks) for store in stores))
        assert await stores[0].chunks("one") == chunks
        assert [found_chunk.number for found_chunk in await stores[1].search(["one"], "number700", 10)] == [700]


def on_disk(place: "Place") -> bytes:
    return Path(place.url).read_bytes()


@pytest.mark.parametrize("shared_place", ["sqlite"], indirect=True)
async def test_forgotten_words_are_gone_from_the_file_when_it_is_scrubbed(shared_place: "Place") -> None:
    store = shared_place.open()
    await keep(store, lease="quintessential", other="apple")
    await store.scrub()
    assert b"quintess" in on_disk(shared_place)
    await store.forget("lease")
    assert await store.scrub()
    assert b"quintess" not in on_disk(shared_place)
    assert await find(store, ["other"], "apple") == {"other"}
