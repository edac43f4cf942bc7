-- The ground floor: the journal, the rows that are projected from it, and who works on what.
-- Texts are compared byte by byte, as SQLite does it, whatever the language of the database.

CREATE FUNCTION microseconds() RETURNS BIGINT VOLATILE LANGUAGE SQL
    RETURN (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

CREATE TABLE events (
    position   BIGINT GENERATED ALWAYS AS IDENTITY,
    stream     TEXT COLLATE "C" NOT NULL,
    seq        BIGINT NOT NULL,
    kind       TEXT COLLATE "C" NOT NULL,
    version    BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    key        TEXT COLLATE "C" NOT NULL,
    blob       TEXT COLLATE "C",
    facts      BYTEA  NOT NULL,
    body       BYTEA,
    salt       BYTEA,
    digest     BYTEA  NOT NULL,
    hash       BYTEA  NOT NULL,
    PRIMARY KEY (stream, seq)
);
CREATE INDEX events_key ON events (key);
CREATE INDEX events_blob ON events (blob) WHERE blob IS NOT NULL;

-- The rows of streams and budgets are written anew by every step. Room on their pages keeps the indexes out of it.
CREATE TABLE streams (
    stream TEXT COLLATE "C" PRIMARY KEY,
    head   BIGINT NOT NULL,
    hash   BYTEA  NOT NULL,
    at     BIGINT NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE sessions (
    session         TEXT COLLATE "C" PRIMARY KEY,
    agent           TEXT COLLATE "C" NOT NULL,
    kind            TEXT COLLATE "C" NOT NULL,
    state           TEXT COLLATE "C" NOT NULL,
    trigger         TEXT COLLATE "C" NOT NULL,
    parent          TEXT COLLATE "C" NOT NULL,
    definition      TEXT COLLATE "C" NOT NULL,
    format          BIGINT NOT NULL,
    started_at      BIGINT NOT NULL,
    ended_at        BIGINT,
    terminal_reason TEXT COLLATE "C" NOT NULL,
    wake_at         BIGINT,
    wake_on         TEXT COLLATE "C" NOT NULL,
    inbox_seen      BIGINT NOT NULL,
    inbox_head      BIGINT NOT NULL,
    inbox_wake      BIGINT NOT NULL,
    inbox_wake_at   BIGINT NOT NULL,
    due_at          BIGINT,
    owner           TEXT COLLATE "C" NOT NULL,
    generation      BIGINT NOT NULL
);
CREATE INDEX sessions_due ON sessions (due_at) WHERE owner = '' AND due_at IS NOT NULL;
CREATE INDEX sessions_owner ON sessions (owner) WHERE owner <> '';

CREATE TABLE budgets (
    scope    TEXT COLLATE "C" NOT NULL,
    "window" TEXT COLLATE "C" NOT NULL,
    unit     TEXT COLLATE "C" NOT NULL,
    cap      BIGINT,
    cap_at   BIGINT NOT NULL,
    cap_by   TEXT COLLATE "C" NOT NULL,
    spent    BIGINT NOT NULL CHECK (spent >= 0),
    held     BIGINT NOT NULL CHECK (held >= 0),
    overrun  BIGINT NOT NULL CHECK (overrun >= 0),
    PRIMARY KEY (scope, "window", unit),
    CHECK (cap IS NULL OR spent + held <= cap + overrun)
) WITH (fillfactor = 50);

CREATE TABLE holds (
    hold    TEXT COLLATE "C" PRIMARY KEY,
    session TEXT COLLATE "C" NOT NULL,
    at      BIGINT NOT NULL,
    purpose TEXT COLLATE "C" NOT NULL,
    name    TEXT COLLATE "C" NOT NULL,
    legs    BYTEA  NOT NULL
);

CREATE TABLE spends (
    at                 BIGINT NOT NULL,
    hold               TEXT COLLATE "C" NOT NULL,
    agent              TEXT COLLATE "C" NOT NULL,
    session            TEXT COLLATE "C" NOT NULL,
    trigger            TEXT COLLATE "C" NOT NULL,
    name               TEXT COLLATE "C" NOT NULL,
    purpose            TEXT COLLATE "C" NOT NULL,
    usd                BIGINT NOT NULL,
    held_usd           BIGINT NOT NULL,
    input_tokens       BIGINT NOT NULL,
    output_tokens      BIGINT NOT NULL,
    cache_read_tokens  BIGINT NOT NULL,
    cache_write_tokens BIGINT NOT NULL,
    PRIMARY KEY (at, hold)
);
CREATE INDEX spends_name ON spends (name, purpose, at, usd);

CREATE TABLE blobs (
    digest TEXT COLLATE "C" PRIMARY KEY,
    data   BYTEA NOT NULL
);

CREATE TABLE workers (
    worker      TEXT COLLATE "C" PRIMARY KEY,
    alive_until BIGINT NOT NULL,
    lapsed      BIGINT NOT NULL
);

CREATE TABLE snapshots (
    session TEXT COLLATE "C" PRIMARY KEY,
    at      BIGINT NOT NULL,
    data    BYTEA  NOT NULL
);
