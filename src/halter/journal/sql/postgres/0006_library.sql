-- The text of documents, in pieces, and the words by which they are found. The words come cut apart and folded, so no
-- dictionary of the server has a say in them.

CREATE TABLE chunks (
    document TEXT COLLATE "C" NOT NULL,
    number   BIGINT NOT NULL,
    start    BIGINT NOT NULL,
    "end"    BIGINT NOT NULL,
    text     TEXT COLLATE "C" NOT NULL,
    words    TSVECTOR NOT NULL,
    PRIMARY KEY (document, number)
);
CREATE INDEX chunks_words ON chunks USING GIN (words);

-- The documents all of whose chunks are there: large ones are written in several transactions, and seen when all is done.
CREATE TABLE library (
    document TEXT COLLATE "C" PRIMARY KEY
);
