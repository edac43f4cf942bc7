-- The ground floor: the journal, the rows that are projected from it, and who works on what.

CREATE TABLE events (
    position   INTEGER PRIMARY KEY,
    stream     TEXT    NOT NULL,
    seq        INTEGER NOT NULL,
    kind       TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    key        TEXT    NOT NULL,
    blob       TEXT,
    facts      BLOB    NOT NULL,
    body       BLOB,
    salt       BLOB,
    digest     BLOB    NOT NULL,
    hash       BLOB    NOT NULL,
    UNIQUE (stream, seq)
) STRICT;
CREATE INDEX events_key ON events (key);
CREATE INDEX events_blob ON events (blob) WHERE blob IS NOT NULL;

CREATE TABLE streams (
    stream TEXT PRIMARY KEY,
    head   INTEGER NOT NULL,
    hash   BLOB    NOT NULL,
    at     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE sessions (
    session         TEXT PRIMARY KEY,
    agent           TEXT    NOT NULL,
    kind            TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    trigger         TEXT    NOT NULL,
    parent          TEXT    NOT NULL,
    definition      TEXT    NOT NULL,
    format          INTEGER NOT NULL,
    started_at      INTEGER NOT NULL,
    ended_at        INTEGER,
    terminal_reason TEXT    NOT NULL,
    wake_at         INTEGER,
    wake_on         TEXT    NOT NULL,
    inbox_seen      INTEGER NOT NULL,
    inbox_head      INTEGER NOT NULL,
    inbox_wake      INTEGER NOT NULL,
    inbox_wake_at   INTEGER NOT NULL,
    due_at          INTEGER,
    owner           TEXT    NOT NULL,
    generation      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_due ON sessions (due_at) WHERE owner = '' AND due_at IS NOT NULL;
CREATE INDEX sessions_owner ON sessions (owner) WHERE owner <> '';

CREATE TABLE budgets (
    scope    TEXT    NOT NULL,
    "window" TEXT    NOT NULL,
    unit     TEXT    NOT NULL,
    cap      INTEGER,
    cap_at   INTEGER NOT NULL,
    cap_by   TEXT    NOT NULL,
    spent    INTEGER NOT NULL CHECK (spent >= 0),
    held     INTEGER NOT NULL CHECK (held >= 0),
    overrun  INTEGER NOT NULL CHECK (overrun >= 0),
    PRIMARY KEY (scope, "window", unit),
    CHECK (cap IS NULL OR spent + held <= cap + overrun)
) STRICT, WITHOUT ROWID;

CREATE TABLE holds (
    hold    TEXT PRIMARY KEY,
    session TEXT    NOT NULL,
    at      INTEGER NOT NULL,
    purpose TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    legs    BLOB    NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE spends (
    at                 INTEGER NOT NULL,
    hold               TEXT    NOT NULL,
    agent              TEXT    NOT NULL,
    session            TEXT    NOT NULL,
    trigger            TEXT    NOT NULL,
    name               TEXT    NOT NULL,
    purpose            TEXT    NOT NULL,
    usd                INTEGER NOT NULL,
    held_usd           INTEGER NOT NULL,
    input_tokens       INTEGER NOT NULL,
    output_tokens      INTEGER NOT NULL,
    cache_read_tokens  INTEGER NOT NULL,
    cache_write_tokens INTEGER NOT NULL,
    PRIMARY KEY (at, hold)
) STRICT, WITHOUT ROWID;
CREATE INDEX spends_name ON spends (name, purpose, at, usd);

CREATE TABLE blobs (
    digest TEXT PRIMARY KEY,
    data   BLOB NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE workers (
    worker      TEXT PRIMARY KEY,
    alive_until INTEGER NOT NULL,
    lapsed      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE snapshots (
    session TEXT PRIMARY KEY,
    at      INTEGER NOT NULL,
    data    BLOB    NOT NULL
) STRICT, WITHOUT ROWID;
