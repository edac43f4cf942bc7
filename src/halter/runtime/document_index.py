"""Documents of an agent's folders, and files of messages and of tools.

Each content of a folder is read once and indexed in the store. A session sees only the documents that it may see.

Of a file in a message or a result, a model takes pictures and PDFs as they are. Of an Office document it gets the text,
which a process with little memory extracts. What cannot be read is an error for a person who passes it, and a sentence
for a model whose tool returned it.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.events import FilesGiven
from halter.core.messages import AUDIO_PREFIX, Message, Text
from halter.core.ports import Chunk, Draft, Extracted, FoundChunk, Store, UnreadableFile, offload_body
from halter.core.text import to_one_line
from halter.core.tools import OFFICE_TYPES, Failed, File
from halter.redaction.prompt_masker import mask_message
from halter.redaction.redact import Redact
from halter.spec.tasks import Collection
from halter.system.folders import FileEntry, FileRefusal, allow_all
from halter.tasks.retrieve import DocumentRef
from halter.tasks.review import is_quote_supported
from halter.tasks.task_tools import Finding, QuotedDocument
from halter.tools.process import detect_media_type

QUOTE_CONTEXT_LENGTH: Final = 600
"""Characters shown around a quote to its judge."""


class IndexedFile(msgspec.Struct, frozen=True):
    """A file as it was last read, and the digest of its document."""

    entry: FileEntry
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
        """List the files of a folder, hidden ones only if the pattern names them."""
        from halter.documents.files import scan_documents

        entries = await asyncio.to_thread(scan_documents, self.resolve(path), pattern)
        if isinstance(entries, UnreadableFile) or _is_hidden(pattern):
            return entries
        return {name: entry for name, entry in entries.items() if not _is_hidden(name)}

    async def index_collection(self, collection: str, path: str, pattern: str) -> Sequence[DocumentRef]:
        """Index the new files of a folder and list all of its documents. Raises Failed if the folder cannot be read."""
        files = await self.files(path, pattern)
        if isinstance(files, UnreadableFile):
            raise Failed("CollectionUnreadable", f"{collection}: {files.sentence}")
        refs: list[DocumentRef] = []
        for name, entry in sorted(files.items()):
            indexed_file = await self.index_file(self.resolve(path) / name, entry, name)
            display_name, problem = to_one_line(name), to_one_line(indexed_file.problem)
            refs.append(
                DocumentRef(
                    display_name, collection, indexed_file.document, entry.modified // 1000, entry.size, problem
                )
            )
        return refs

    async def index_file(self, path: Path, entry: FileEntry, name: str) -> IndexedFile:
        """Read and index a file unless it is unchanged."""
        async with self._taking:
            indexed_file = self._indexed.get(path)
            if (
                indexed_file is None
                or indexed_file.entry != entry
                or (indexed_file.problem and not indexed_file.document)
            ):
                indexed_file = self._indexed[path] = await self._index_changed_file(path, entry, name)
            return indexed_file

    async def _index_changed_file(self, path: Path, entry: FileEntry, name: str) -> IndexedFile:
        from halter.documents.chunks import split_into_chunks
        from halter.documents.extraction import extract
        from halter.documents.files import digest_file, read_document

        content = await asyncio.to_thread(read_document, path, refuses=self._refuses)
        if isinstance(content, UnreadableFile):
            digest = await asyncio.to_thread(digest_file, path, self._refuses)
            return IndexedFile(entry, "" if isinstance(digest, UnreadableFile) else digest, content.sentence)
        if await self._store.find_indexed([content.digest]):
            return IndexedFile(entry, content.digest)
        text = await extract(name, content.data)
        if not isinstance(text, Extracted):
            return IndexedFile(entry, content.digest, text.sentence)
        spans = enumerate(split_into_chunks(text.text))
        chunks = [Chunk(content.digest, number, start, end, text.text[start:end]) for number, (start, end) in spans]
        await self._store.index(content.digest, chunks)
        return IndexedFile(entry, content.digest)


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


class SessionDocuments:
    """The documents that one session may see: those that its trigger names."""

    def __init__(
        self,
        library: Library,
        store: Store,
        collections: Mapping[str, Collection],
        own_documents: Sequence[DocumentRef] = (),
    ) -> None:
        self._library = library
        self._store = store
        self._collections = collections
        self._own_documents = own_documents

    async def documents(self) -> Sequence[DocumentRef]:
        """List all documents: the session's own as of its start, and the current ones of its collections."""
        refs = list(self._own_documents)
        own_names = {(own.name, own.collection) for own in refs}
        own_contents = {(own.name, own.document) for own in refs}
        for name, collection in self._collections.items():
            collection_refs = await self._library.index_collection(name, collection.path, collection.pattern)
            refs += [
                document
                for document in collection_refs
                if (document.name, document.collection) not in own_names
                and (document.name, document.document) not in own_contents
            ]
        return refs

    async def chunks(self, document: str) -> Sequence[Chunk]:
        return await self._store.chunks(document)

    async def search(self, documents: Sequence[str], query: str, limit: int) -> Sequence[FoundChunk]:
        return await self._store.search(documents, query, limit)

    async def text(self, document: str) -> str:
        text = ""
        for chunk in await self._store.chunks(document):
            text += chunk.text[len(text) - chunk.start :]
        return text

    async def check(self, finding: Finding) -> QuotedDocument:
        """Check a finding's quote against its document. Raises Failed for a document that the session may not see."""
        if not finding.document:
            return QuotedDocument("unquoted")
        matches = [each for each in await self.documents() if finding.document in (each.name, each.document)]
        if not matches:
            raise Failed("NoSuchDocument", f"there is no document {finding.document[:200]!r} among yours")
        document = matches[0]
        if not finding.quote.strip():
            return QuotedDocument("unquoted", document.document, document.name)
        is_supported = is_quote_supported(finding.quote, await self.text(document.document))
        return QuotedDocument("supported" if is_supported else "unsupported", document.document, document.name)

    async def read_context(self, document: str, quote: str) -> str:
        """Return a quote with the text around it; without a quote, the beginning of the document."""
        text = await self.text(document)
        position = text.find(quote) if quote else 0
        if position < 0:
            chunks = await self._store.search([document], quote, 1)
            position = chunks[0].start if chunks else 0
        return text[max(0, position - QUOTE_CONTEXT_LENGTH) : position + len(quote) + 2 * QUOTE_CONTEXT_LENGTH]


MAX_RESULT_FILES: Final = 20
"""Maximum files of one result that a model sees."""
MAX_DOCUMENT_LENGTH: Final = 1_000_000
"""Maximum characters of a document: more than the context of most models."""
_SUFFIXES: Final = MappingProxyType({media_type: suffix for suffix, media_type in OFFICE_TYPES.items()})


async def read_message_files(files: Iterable[File | str | Path]) -> Message:
    """Read the files of a message. Raises ConfigError for one that cannot be sent to a model."""
    from halter.models.input_files import MAX_INPUT_FILE_BYTES, make_file_part, open_files

    parts: list[Text] = []
    for file in open_files(files):
        is_office = find_office_suffix(file) and len(file.data) <= MAX_INPUT_FILE_BYTES
        part = await _extract_text(file) if is_office else make_file_part(file)
        if isinstance(part, UnreadableFile):
            raise ConfigError(part.sentence)
        parts.append(part)
    return Message("user", tuple(parts))


async def draft_files(store: Store, message: Message, redact: Redact) -> tuple[Draft, ...]:
    """Draft the event with the files of a message that is posted to a session."""
    body = msgspec.json.encode(mask_message(message, redact).parts)
    return (Draft(FilesGiven(), *await offload_body(store, body)),)


async def read_result_files(files: Sequence[File]) -> tuple[Text, ...]:
    """Read the files that a tool returned. One that a model cannot take is a sentence instead."""
    from halter.models.input_files import MAX_TOTAL_BYTES

    parts: list[Text] = []
    total = 0
    for number, file in enumerate(files, 1):
        total += len(file.data)
        if number > MAX_RESULT_FILES or total > MAX_TOTAL_BYTES:
            limits = f"{MAX_RESULT_FILES} files and {MAX_TOTAL_BYTES:,} bytes"
            parts.append(_omit(file, f"A result shows at most {limits}."))
        else:
            parts.append(await _read_result_file(file))
    return tuple(parts)


async def _read_result_file(file: File) -> Text:
    from halter.models.input_files import IMAGE_TYPES, PDF, explain_unseen, make_file_part, read_media_type

    if find_office_suffix(file):
        part = await _extract_text(file)
        return _omit(file, part.sentence) if isinstance(part, UnreadableFile) else part
    if read_media_type(file).startswith(AUDIO_PREFIX):
        return _omit(file, "Audio in a result is not supported.")
    if read_media_type(file) in IMAGE_TYPES:
        # Providers reject a picture of another type than it says, and with it every later request of the session.
        kind = detect_media_type(file.data[:16])
        objection = explain_unseen(file.data) if kind in IMAGE_TYPES else "it is damaged, or is not a picture."
        if objection:
            return _omit(file, objection)
        file = msgspec.structs.replace(file, media_type=kind)
    try:
        return make_file_part(file)
    except ConfigError as error:
        # Most PDFs compress the list of their pages, so their cost as a file is unknown. Their text has no such cost.
        part = await _extract_text(file, ".pdf") if read_media_type(file) == PDF else UnreadableFile(str(error))
        return _omit(file, part.sentence) if isinstance(part, UnreadableFile) else part


def _omit(file: File, sentence: str) -> Text:
    from halter.models.input_files import describe_file

    return Text(f"{describe_file(file)} is not shown: {sentence}", "document", trusted=False, source=file.name)


def find_office_suffix(file: File) -> str:
    """Find the suffix of an Office document by its media type or its name; empty for any other file."""
    from halter.models.input_files import read_media_type

    suffix = Path(file.name).suffix.lower()
    return _SUFFIXES.get(read_media_type(file)) or (suffix if suffix in OFFICE_TYPES else "")


async def _extract_text(file: File, suffix: str = "") -> Text | UnreadableFile:
    from halter.documents.extraction import extract
    from halter.models.input_files import make_text_part

    suffix = suffix or find_office_suffix(file)
    name = file.name if file.name.lower().endswith(suffix) else f"{file.name}{suffix}"
    outcome = await extract(name, file.data, limit=MAX_DOCUMENT_LENGTH)
    return outcome if isinstance(outcome, UnreadableFile) else make_text_part(file, outcome.text)
