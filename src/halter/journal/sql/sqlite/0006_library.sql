-- The text of documents, in pieces, and the words by which they are found. The words come cut apart and folded, so the
-- tokenizer has only to part them at their spaces.

CREATE TABLE chunks (
    id       INTEGER PRIMARY KEY,
    document TEXT    NOT NULL,
    number   INTEGER NOT NULL,
    start    INTEGER NOT NULL,
    "end"    INTEGER NOT NULL,
    text     TEXT    NOT NULL,
    UNIQUE (document, number)
) STRICT;

CREATE VIRTUAL TABLE chunk_words USING fts5 (words, tokenize = 'ascii');

-- The documents all of whose chunks are there: large ones are written in several transactions, and seen when all is done.
CREATE TABLE library (
    document TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;
