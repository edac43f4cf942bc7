"""Documents of an agent's folders.

Read once per content, indexed in the store, and limited to what a session may see.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from halter.core.agent_spec import Collection
from halter.core.folders import FileEntry, FileRefusal, allow_all
from halter.core.ports import Chunk, Extracted, FoundChunk, Store, UnreadableFile
from halter.core.text import to_one_line
from halter.core.tools import Failed
from halter.tasks.retrieve import DocumentRef
from halter.tasks.review import is_quote_supported
from halter.tasks.task_tools import Finding, QuotedDocument

QUOTE_CONTEXT_LENGTH: Final = 600
"""Characters shown around a quote to its judge."""


class IndexedFile(msgspec.Struct, frozen=True):
    """A file as it was last read, and the document that came of it."""

    seen: FileEntry
    document: str
    problem: str = ""


class Library:
    """Reads and indexes files, once per content."""

    def __init__(self, store: Store, folder: Path, refuses: FileRefusal = allow_all) -> None:
        self._store = store
        self._folder = folder
        self._refuses = refuses
        self._indexed: dict[Path, IndexedFile] = {}
        self._taking = asyncio.Lock()

    def resolve(self, path: str) -> Path:
        return (self._folder / path).resolve()

    async def files(self, path: str, pattern: str) -> Mapping[str, FileEntry] | UnreadableFile:
        """Lists the files of a folder; hidden ones only if the pattern names them."""
        from halter.documents import scan_documents

        found = await asyncio.to_thread(scan_documents, self.resolve(path), pattern)
        if isinstance(found, UnreadableFile) or _is_hidden(pattern):
            return found
        return {name: entry for name, entry in found.items() if not _is_hidden(name)}

    async def index_collection(self, collection: str, path: str, pattern: str) -> Sequence[DocumentRef]:
        """Indexes what is new in a folder, and lists all of it. Raises Failed if the folder cannot be read."""
        files = await self.files(path, pattern)
        if isinstance(files, UnreadableFile):
            raise Failed("CollectionUnreadable", f"{collection}: {files.sentence}")
        found: list[DocumentRef] = []
        for name, entry in sorted(files.items()):
            known = await self.index_file(self.resolve(path) / name, entry, name)
            shown, problem = to_one_line(name), to_one_line(known.problem)
            found.append(DocumentRef(shown, collection, known.document, entry.modified // 1000, entry.size, problem))
        return found

    async def index_file(self, path: Path, entry: FileEntry, name: str) -> IndexedFile:
        """Reads and indexes a file, unless it is unchanged."""
        async with self._taking:
            known = self._indexed.get(path)
            if known is None or known.seen != entry or (known.problem and not known.document):
                known = self._indexed[path] = await self._index_changed_file(path, entry, name)
            return known

    async def _index_changed_file(self, path: Path, entry: FileEntry, name: str) -> IndexedFile:
        from halter.documents import digest_file, extract, read_document, split_into_chunks

        taken = await asyncio.to_thread(read_document, path, refuses=self._refuses)
        if isinstance(taken, UnreadableFile):
            digest = await asyncio.to_thread(digest_file, path, self._refuses)
            return IndexedFile(entry, "" if isinstance(digest, UnreadableFile) else digest, taken.sentence)
        if await self._store.indexed([taken.digest]):
            return IndexedFile(entry, taken.digest)
        text = await extract(name, taken.data)
        if not isinstance(text, Extracted):
            return IndexedFile(entry, taken.digest, text.sentence)
        spans = enumerate(split_into_chunks(text.text))
        chunks = [Chunk(taken.digest, number, start, end, text.text[start:end]) for number, (start, end) in spans]
        await self._store.index(taken.digest, chunks)
        return IndexedFile(entry, taken.digest)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


class SessionDocuments:
    """The documents that one session may see: those that its trigger names."""

    def __init__(
        self, library: Library, store: Store, collections: Mapping[str, Collection], own: Sequence[DocumentRef] = ()
    ) -> None:
        self._library = library
        self._store = store
        self._collections = collections
        self._own = own

    async def documents(self) -> Sequence[DocumentRef]:
        """Lists all documents: the session's own as they were when it started, the others as they are now."""
        found = list(self._own)
        places = {(own.name, own.collection) for own in found}
        contents = {(own.name, own.document) for own in found}
        for name, collection in self._collections.items():
            shelf = await self._library.index_collection(name, collection.path, collection.pattern)
            found += [
                each
                for each in shelf
                if (each.name, each.collection) not in places and (each.name, each.document) not in contents
            ]
        return found

    async def chunks(self, document: str) -> Sequence[Chunk]:
        return await self._store.chunks(document)

    async def search(self, documents: Sequence[str], words: str, limit: int) -> Sequence[FoundChunk]:
        return await self._store.search(documents, words, limit)

    async def text(self, document: str) -> str:
        text = ""
        for chunk in await self._store.chunks(document):
            text += chunk.text[len(text) - chunk.start :]
        return text

    async def check(self, finding: Finding) -> QuotedDocument:
        """Looks for a finding's quote in its document. Raises Failed for one that the session may not see."""
        if not finding.document:
            return QuotedDocument("unquoted")
        shelved = [each for each in await self.documents() if finding.document in (each.name, each.document)]
        if not shelved:
            raise Failed("NoSuchDocument", f"there is no document {finding.document[:200]!r} among yours")
        document = shelved[0]
        if not finding.quote.strip():
            return QuotedDocument("unquoted", document.document, document.name)
        stands = is_quote_supported(finding.quote, await self.text(document.document))
        return QuotedDocument("supported" if stands else "unsupported", document.document, document.name)

    async def read_context(self, document: str, quote: str) -> str:
        """Returns a quote with its surroundings; without a quote, the beginning of the document."""
        text = await self.text(document)
        at = text.find(quote) if quote else 0
        if at < 0:
            words = await self._store.search([document], quote, 1)
            at = words[0].start if words else 0
        return text[max(0, at - QUOTE_CONTEXT_LENGTH) : at + len(quote) + 2 * QUOTE_CONTEXT_LENGTH]
