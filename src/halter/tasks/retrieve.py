"""The verb with which a model reads documents: by name, a collection since a time, or by words in them.

It finds only the documents that its session may see.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

import msgspec

from halter.core.clock import parse_duration
from halter.core.errors import ConfigError
from halter.core.events import DocumentRead
from halter.core.ports import Chunk, FoundChunk
from halter.core.text import clean, join_names, shorten
from halter.core.tools import Failed, JournalEffect, Output
from halter.tasks.task_tools import READS_ANYONE, Verb

RETRIEVE_CHUNKS: Final = "retrieve_chunks"
MOST_SHOWN: Final = 8_000
"""Most characters that one call returns."""

LEAST_SHOWN: Final = 400
MOST_PLACES: Final = 40
MOST_NAMES: Final = 20

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DocumentRef(msgspec.Struct, frozen=True):
    """A document of a session: file name, content digest, and when it came.

    `problem` says why it cannot be read.
    """

    name: str
    collection: str
    document: str
    taken_at: int
    size: int
    problem: str = ""


class DocumentSource(Protocol):
    """The documents that one session may see."""

    async def documents(self) -> Sequence[DocumentRef]: ...

    async def chunks(self, document: str) -> Sequence[Chunk]: ...

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[FoundChunk]: ...


class RetrievedText(msgspec.Struct, frozen=True):
    """The text for the model, and the documents it contains parts of."""

    text: str
    read: tuple[DocumentRef, ...] = ()


class RetrieveArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model's arguments. `collection` and `since` narrow the others."""

    file: str = ""
    collection: str = ""
    since: str = ""
    query: str = ""
    offset: int = 0


class _Passage(msgspec.Struct, frozen=True):
    """A part of a document's text, and the length of all of it."""

    start: int
    text: str
    total: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def retrieve_chunks(documents: DocumentSource, now: Callable[[], int]) -> Verb:
    """Makes the verb. The documents it read are recorded with its result."""

    async def act(wanted: RetrieveArguments, _: str) -> Output:
        found = await retrieve_documents(documents, wanted, now())
        read = (DocumentRead(document=each.document, name=each.name, collection=each.collection) for each in found.read)
        return Output(found.text, happened=tuple(JournalEffect(event) for event in read))

    about = (
        "Read documents: `file` names one, from `offset` in characters on; `collection` gives those of a collection, "
        "from the document at `offset` on; `query` finds the places where words occur. `since` leaves out what came "
        "before a time as in 2026-01-31T09:00Z, or longer ago than 24h."
    )
    return Verb(RETRIEVE_CHUNKS, about, RetrieveArguments, act, find_arguments_flaw, declaration=READS_ANYONE)


def find_arguments_flaw(wanted: RetrieveArguments) -> str:
    if not (wanted.file or wanted.query or wanted.collection or wanted.since):
        return "Say what to read: a `file`, a `collection`, or a `query`."
    if wanted.file and wanted.query:
        return "Name a `file` to read it, or a `query` to search for; not both at once."
    if wanted.offset < 0 or (wanted.query and wanted.offset):
        return "`offset` is a number from 0 up, and goes with a `file` or a `collection`."
    if wanted.since and _moment(wanted.since, 0) is None:
        return (
            f"`since` is a time as in 2026-01-31T09:00Z, or a duration as in 24h, not {clean(shorten(wanted.since))!r}."
        )
    return ""


def _moment(since: str, now: int) -> int | None:
    """Parses a time, or an age; a time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(since.strip())
    except ValueError:
        pass
    else:
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(microseconds=1)
    try:
        return now - parse_duration(since)
    except (ConfigError, OverflowError):
        return None


async def retrieve_documents(documents: DocumentSource, wanted: RetrieveArguments, now: int) -> RetrievedText:
    """Returns what is asked for. Raises Failed, with a sentence for the model, where it is missing or unreadable."""
    everything = await documents.documents()
    narrowed = _filter_documents(everything, wanted, now)
    if wanted.file:
        return await _file(documents, _find_by_name(narrowed, everything, wanted.file), wanted.offset)
    if wanted.query:
        return await _query(documents, narrowed, wanted.query)
    return await _collection(documents, narrowed, wanted.offset)


def _filter_documents(documents: Sequence[DocumentRef], wanted: RetrieveArguments, now: int) -> list[DocumentRef]:
    collections = {each.collection for each in documents}
    if wanted.collection and wanted.collection not in collections:
        raise Failed(
            "NoSuchCollection",
            f"there is no collection {_join_lines(wanted.collection)} here: {_list_alternatives(collections)}",
        )
    after = _moment(wanted.since, now) if wanted.since else None
    kept = (each for each in documents if wanted.collection in ("", each.collection))
    return [each for each in kept if after is None or each.taken_at >= after]


def _find_by_name(narrowed: Sequence[DocumentRef], everything: Sequence[DocumentRef], name: str) -> DocumentRef:
    found = [each for each in narrowed if each.name == name]
    if not found:
        those = _list_alternatives(each.name for each in narrowed or everything)
        raise Failed("NoSuchDocument", f"{_join_lines(name)} is not among your documents: {those}")
    if len(found) > 1:
        where = join_names(_join_lines(each.collection) for each in found[:MOST_NAMES])
        raise Failed(
            "ManyDocuments", f"{_join_lines(name)} is in several collections: name one of {where} as `collection`"
        )
    if found[0].problem:
        raise Failed("UnreadableDocument", clean(found[0].problem))
    return found[0]


async def _file(documents: DocumentSource, document: DocumentRef, offset: int) -> RetrievedText:
    passage = _passage(await documents.chunks(document.document), offset, MOST_SHOWN)
    if passage.total == 0:
        raise Failed("NotYetRead", f"{_join_lines(document.name)} has not been read yet: try again a little later")
    if not passage.text:
        raise Failed("PastTheEnd", f"{_join_lines(document.name)} has {passage.total} characters, and no more")
    return RetrievedText(_render_passage(document, passage), (document,))


async def _collection(shelves: DocumentSource, documents: Sequence[DocumentRef], offset: int) -> RetrievedText:
    """Reads documents one after another, as many as fit one call."""
    if not documents:
        return RetrievedText("There are no such documents.")
    ordered = sorted(documents, key=lambda each: (each.taken_at, each.name, each.collection))
    parts: list[str] = []
    read: list[DocumentRef] = []
    capacity, place = MOST_SHOWN, offset
    while place < len(ordered) and capacity >= LEAST_SHOWN:
        document = ordered[place]
        passage = _passage(() if document.problem else await shelves.chunks(document.document), 0, capacity)
        parts.append(_render_passage(document, passage))
        read += [document] if passage.text else []
        capacity -= len(parts[-1])
        place += 1
    remaining = len(ordered) - place
    parts += [f"[{remaining} more documents follow, from offset={place} on.]"] if remaining > 0 else []
    return RetrievedText("\n\n".join(parts) or f"There are only {len(ordered)} such documents.", tuple(read))


async def _query(shelves: DocumentSource, documents: Sequence[DocumentRef], words: str) -> RetrievedText:
    """Shows the places where words occur, the best first. Files with equal content are one document."""
    readable = {each.document: each for each in reversed(documents) if not each.problem}
    found = await shelves.search(list(readable), words, MOST_PLACES)
    parts: list[str] = []
    read: dict[str, DocumentRef] = {}
    capacity = MOST_SHOWN
    for place in found:
        document = readable[place.document]
        part = f"{_header(document, place.start, place.end)}\n{place.text}"
        if parts and len(part) > capacity:
            break
        parts.append(part[:MOST_SHOWN])
        read[place.document] = document
        capacity -= len(part)
    return RetrievedText("\n\n".join([*parts, *_explain_rest(found, len(parts), documents)]), tuple(read.values()))


def _explain_rest(found: Sequence[FoundChunk], shown: int, documents: Sequence[DocumentRef]) -> Iterable[str]:
    """Says what a search did not show, and where it could not look."""
    if not found:
        yield "These words occur in none of your documents."
    elif shown < len(found):
        yield "[More places fit: ask for more words, or read on in one of these documents with `file` and `offset`.]"
    problems = [each for each in documents if each.problem]
    if problems:
        yield (
            f"[{len(problems)} documents could not be searched: {join_names(_names(each.name for each in problems))}.]"
        )


def _passage(chunks: Sequence[Chunk], offset: int, limit: int) -> _Passage:
    """Joins overlapping chunks, from an offset on."""
    parts: list[str] = []
    place, remaining = offset, limit
    for chunk in chunks:
        if remaining > 0 and chunk.start <= place < chunk.end:
            part = chunk.text[place - chunk.start :][:remaining]
            parts.append(part)
            place += len(part)
            remaining -= len(part)
    return _Passage(offset, "".join(parts), chunks[-1].end if chunks else 0)


def _render_passage(document: DocumentRef, passage: _Passage) -> str:
    if document.problem:
        return f"[{_join_lines(document.name)}: {clean(document.problem)}]"
    if passage.total == 0:
        return f"[{_join_lines(document.name)} has not been read yet.]"
    head = f"{_header(document, passage.start, passage.end)}\n{passage.text}"
    remaining = passage.total - passage.end
    on = (
        f"\n[{remaining} characters of {_join_lines(document.name)} follow: read it as `file`, from "
        f"offset={passage.end} on.]"
    )
    return head + on if remaining > 0 else head


def _header(document: DocumentRef, start: int, end: int) -> str:
    return f"{_join_lines(document.name)} [{start}\u2013{end}] {document.document[:16]}"


def _join_lines(name: str) -> str:
    """File names may contain anything."""
    return clean(" ".join(name.split())) or "(nothing)"


def _names(names: Iterable[str]) -> list[str]:
    return sorted(map(_join_lines, names))[:MOST_NAMES]


def _list_alternatives(names: Iterable[str]) -> str:
    known = sorted({_join_lines(name) for name in names if name})
    if not known:
        return "there are none"
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return f"there are {join_names(known[:MOST_NAMES])}{more}"
