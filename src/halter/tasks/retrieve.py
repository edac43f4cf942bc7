"""The verb with which a model reads documents: by name, by collection and time, or by words.

It finds only the documents that its session may read.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

import msgspec

from halter.core.clock import parse_duration
from halter.core.errors import ConfigError
from halter.core.events import DocumentRead
from halter.core.ports import Chunk, FoundChunk
from halter.core.text import clean, format_count, join_names, shorten
from halter.core.tools import Failed, JournalEffect, Output
from halter.tasks.task_tools import READS_ANYONE, Verb

RETRIEVE_CHUNKS: Final = "retrieve_chunks"
MAX_RESULT_LENGTH: Final = 8_000
"""Maximum number of characters that a call returns."""

MIN_PASSAGE_LENGTH: Final = 400
MAX_SEARCH_RESULTS: Final = 40
MAX_NAMES: Final = 20

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DocumentRef(msgspec.Struct, frozen=True):
    """A document of a session: file name, collection, content digest, time of arrival and size.

    `problem` describes why it cannot be read, if it cannot.
    """

    name: str
    collection: str
    document: str
    arrived_at: int
    size: int
    problem: str = ""


class DocumentSource(Protocol):
    """The documents that one session may read."""

    async def documents(self) -> Sequence[DocumentRef]: ...

    async def chunks(self, document: str) -> Sequence[Chunk]: ...

    async def search(self, documents: Sequence[str], query: str, limit: int) -> Sequence[FoundChunk]: ...


class RetrievedText(msgspec.Struct, frozen=True):
    """The text for the model, and the documents from which it comes."""

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
    """A part of a document's text, and the length of the whole text."""

    start: int
    text: str
    total: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def retrieve_chunks(documents: DocumentSource, now: Callable[[], int]) -> Verb:
    """Make the verb. The documents that it reads are recorded with the outcome of the call."""

    async def act(arguments: RetrieveArguments, _: str) -> Output:
        retrieved = await retrieve_documents(documents, arguments, now())
        events = (
            DocumentRead(document=each.document, name=each.name, collection=each.collection) for each in retrieved.read
        )
        return Output(retrieved.text, happened=tuple(JournalEffect(event) for event in events))

    description = (
        "Read documents: `file` reads one, from `offset` in characters on; `collection` reads those of a collection, "
        "from the document at `offset` on; `query` finds the passages with these words. `since` leaves out documents "
        "older than a time, such as 2026-01-31T09:00Z, or an age, such as 24h."
    )
    return Verb(RETRIEVE_CHUNKS, description, RetrieveArguments, act, find_arguments_flaw, declaration=READS_ANYONE)


def find_arguments_flaw(arguments: RetrieveArguments) -> str:
    if not (arguments.file or arguments.query or arguments.collection or arguments.since):
        return "Nothing to read: give a `file`, a `collection` or a `query`."
    if arguments.file and arguments.query:
        return "Give either a `file` or a `query`, not both."
    if arguments.offset < 0 or (arguments.query and arguments.offset):
        return "`offset` must be 0 or more, and requires a `file` or a `collection`."
    if arguments.since and _moment(arguments.since, 0) is None:
        since = clean(shorten(arguments.since))
        return f"Invalid `since` {since!r}: use a time such as 2026-01-31T09:00Z, or a duration such as 24h."
    return ""


def _moment(text: str, now: int) -> int | None:
    """Parse a time or an age. A time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        pass
    else:
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (zoned - _EPOCH) // timedelta(microseconds=1)
    try:
        return now - parse_duration(text)
    except ConfigError:
        return None


async def retrieve_documents(documents: DocumentSource, arguments: RetrieveArguments, now: int) -> RetrievedText:
    """Return the requested text. Raises Failed, with a sentence for the model, if it is missing or unreadable."""
    all_documents = await documents.documents()
    matching_documents = _filter_documents(all_documents, arguments, now)
    if arguments.file:
        return await _file(
            documents, _find_by_name(matching_documents, all_documents, arguments.file), arguments.offset
        )
    if arguments.query:
        return await _query(documents, matching_documents, arguments.query)
    return await _collection(documents, matching_documents, arguments.offset)


def _filter_documents(documents: Sequence[DocumentRef], arguments: RetrieveArguments, now: int) -> list[DocumentRef]:
    collections = {each.collection for each in documents}
    if arguments.collection and arguments.collection not in collections:
        raise Failed(
            "NoSuchCollection",
            f"unknown collection {_join_lines(arguments.collection)}; {_list_alternatives(collections)}",
        )
    oldest_at = _moment(arguments.since, now) if arguments.since else None
    in_collection = (each for each in documents if arguments.collection in ("", each.collection))
    return [each for each in in_collection if oldest_at is None or each.arrived_at >= oldest_at]


def _find_by_name(documents: Sequence[DocumentRef], all_documents: Sequence[DocumentRef], name: str) -> DocumentRef:
    matches = [each for each in documents if each.name == name]
    if not matches:
        alternatives = _list_alternatives(each.name for each in documents or all_documents)
        raise Failed("NoSuchDocument", f"{_join_lines(name)} is not one of your documents; {alternatives}")
    if len(matches) > 1:
        where = join_names(_join_lines(each.collection) for each in matches[:MAX_NAMES])
        raise Failed(
            "ManyDocuments", f"{_join_lines(name)} is in several collections: set `collection` to one of {where}"
        )
    if matches[0].problem:
        raise Failed("UnreadableDocument", clean(matches[0].problem))
    return matches[0]


async def _file(documents: DocumentSource, document: DocumentRef, offset: int) -> RetrievedText:
    passage = _passage(await documents.chunks(document.document), offset, MAX_RESULT_LENGTH)
    if passage.total == 0:
        raise Failed("NotYetRead", f"{_join_lines(document.name)} has not been read yet: try again later")
    if not passage.text:
        raise Failed("PastTheEnd", f"{_join_lines(document.name)} has only {passage.total} characters")
    return RetrievedText(_render_passage(document, passage), (document,))


async def _collection(source: DocumentSource, documents: Sequence[DocumentRef], offset: int) -> RetrievedText:
    """Read as many documents of a collection as fit into one result."""
    if not documents:
        return RetrievedText("No documents match.")
    ordered_documents = sorted(documents, key=lambda each: (each.arrived_at, each.name, each.collection))
    passages: list[str] = []
    read: list[DocumentRef] = []
    capacity, index = MAX_RESULT_LENGTH, offset
    while index < len(ordered_documents) and capacity >= MIN_PASSAGE_LENGTH:
        document = ordered_documents[index]
        passage = _passage(() if document.problem else await source.chunks(document.document), 0, capacity)
        passages.append(_render_passage(document, passage))
        read += [document] if passage.text else []
        capacity -= len(passages[-1])
        index += 1
    remaining = len(ordered_documents) - index
    if remaining > 0:
        follow = "follows" if remaining == 1 else "follow"
        passages.append(f"[{format_count(remaining, 'more document')} {follow}; continue at offset={index}.]")
    if not passages:
        count = len(ordered_documents)
        return RetrievedText(f"Only {format_count(count, 'document')} {'matches' if count == 1 else 'match'}.")
    return RetrievedText("\n\n".join(passages), tuple(read))


async def _query(source: DocumentSource, documents: Sequence[DocumentRef], words: str) -> RetrievedText:
    """Search for words, and render the passages, the best first. Files with equal content are one document."""
    readable = {each.document: each for each in reversed(documents) if not each.problem}
    chunks = await source.search(list(readable), words, MAX_SEARCH_RESULTS)
    passages: list[str] = []
    read: dict[str, DocumentRef] = {}
    capacity = MAX_RESULT_LENGTH
    for chunk in chunks:
        document = readable[chunk.document]
        passage = f"{_header(document, chunk.start, chunk.end)}\n{chunk.text}"
        if passages and len(passage) > capacity:
            break
        passages.append(passage[:MAX_RESULT_LENGTH])
        read[chunk.document] = document
        capacity -= len(passage)
    return RetrievedText(
        "\n\n".join([*passages, *_explain_rest(chunks, len(passages), documents)]), tuple(read.values())
    )


def _explain_rest(chunks: Sequence[FoundChunk], passage_count: int, documents: Sequence[DocumentRef]) -> Iterable[str]:
    """Yield notes about passages that are not shown, and about documents that could not be searched."""
    if not chunks:
        yield "None of your documents contains these words."
    elif passage_count < len(chunks):
        yield "[More passages match: add words, or read one of these documents with `file` and `offset`.]"
    unreadable = [each for each in documents if each.problem]
    if unreadable:
        names = join_names(_names(document.name for document in unreadable))
        yield f"[{format_count(len(unreadable), 'document')} could not be searched: {names}.]"


def _passage(chunks: Sequence[Chunk], offset: int, limit: int) -> _Passage:
    """Join overlapping chunks into the passage from an offset on."""
    texts: list[str] = []
    position, remaining = offset, limit
    for chunk in chunks:
        if remaining > 0 and chunk.start <= position < chunk.end:
            text = chunk.text[position - chunk.start :][:remaining]
            texts.append(text)
            position += len(text)
            remaining -= len(text)
    return _Passage(offset, "".join(texts), chunks[-1].end if chunks else 0)


def _render_passage(document: DocumentRef, passage: _Passage) -> str:
    if document.problem:
        return f"[{_join_lines(document.name)}: {clean(document.problem)}]"
    if passage.total == 0:
        return f"[{_join_lines(document.name)} has not been read yet.]"
    head = f"{_header(document, passage.start, passage.end)}\n{passage.text}"
    remaining = passage.total - passage.end
    name = _join_lines(document.name)
    continuation = f"\n[{remaining} characters of {name} follow; continue with `file` at offset={passage.end}.]"
    return head + continuation if remaining > 0 else head


def _header(document: DocumentRef, start: int, end: int) -> str:
    return f"{_join_lines(document.name)} [{start}\u2013{end}] {document.document[:16]}"


def _join_lines(name: str) -> str:
    """Render a name on one line, whatever it contains."""
    return clean(" ".join(name.split())) or "(nothing)"


def _names(names: Iterable[str]) -> list[str]:
    return sorted(map(_join_lines, names))[:MAX_NAMES]


def _list_alternatives(names: Iterable[str]) -> str:
    unique_names = sorted({_join_lines(name) for name in names if name})
    if not unique_names:
        return "none is available"
    more_text = f" and {len(unique_names) - MAX_NAMES} more" if len(unique_names) > MAX_NAMES else ""
    return f"available: {join_names(unique_names[:MAX_NAMES])}{more_text}"
