-- What starts sessions, and what sessions leave behind.

CREATE TABLE triggers (
    trigger       TEXT PRIMARY KEY,
    agent         TEXT NOT NULL,
    type          TEXT NOT NULL,
    digest        TEXT NOT NULL,
    made_by       TEXT NOT NULL,
    made_at       INTEGER NOT NULL,
    made_seq      INTEGER NOT NULL,
    ended_at      INTEGER,
    ticked_at     INTEGER NOT NULL,
    queued_at     INTEGER,
    runs          INTEGER NOT NULL,
    session       TEXT NOT NULL,
    ran_at        INTEGER NOT NULL,
    delayed       TEXT NOT NULL,
    delayed_until INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE items (
    trigger        TEXT NOT NULL,
    item           TEXT NOT NULL,
    name           TEXT NOT NULL,
    size           INTEGER NOT NULL,
    seen_at        INTEGER NOT NULL,
    ignored        INTEGER NOT NULL,
    attempts       INTEGER NOT NULL,
    session        TEXT NOT NULL,
    quarantined_at INTEGER,
    sentence       TEXT NOT NULL,
    PRIMARY KEY (trigger, item)
) STRICT, WITHOUT ROWID;

CREATE TABLE outputs (
    agent  TEXT NOT NULL,
    digest TEXT NOT NULL,
    at     INTEGER NOT NULL,
    PRIMARY KEY (agent, digest)
) STRICT, WITHOUT ROWID;

CREATE TABLE findings (
    finding      TEXT PRIMARY KEY,
    session      TEXT NOT NULL,
    agent        TEXT NOT NULL,
    severity     TEXT NOT NULL,
    support      TEXT NOT NULL,
    document     TEXT NOT NULL,
    name         TEXT NOT NULL,
    emitted_at   INTEGER NOT NULL,
    emitted_seq  INTEGER NOT NULL,
    review       TEXT NOT NULL,
    reviewed_seq INTEGER NOT NULL,
    status       TEXT NOT NULL,
    "by"         TEXT NOT NULL,
    decided_at   INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX findings_session ON findings (session);
CREATE INDEX findings_emitted ON findings (emitted_at);

CREATE TABLE memories (
    memory       TEXT PRIMARY KEY,
    session      TEXT NOT NULL,
    agent        TEXT NOT NULL,
    proposed_at  INTEGER NOT NULL,
    proposed_seq INTEGER NOT NULL,
    status       TEXT NOT NULL,
    "by"         TEXT NOT NULL,
    decided_at   INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX memories_agent ON memories (agent, status);

CREATE TABLE precedents (
    precedent      TEXT PRIMARY KEY,
    agent          TEXT NOT NULL,
    kind           TEXT NOT NULL,
    observed_count INTEGER NOT NULL,
    first_at       INTEGER NOT NULL,
    last_at        INTEGER NOT NULL,
    session        TEXT NOT NULL,
    proposed_seq   INTEGER NOT NULL,
    status         TEXT NOT NULL,
    "by"           TEXT NOT NULL,
    decided_at     INTEGER
) STRICT, WITHOUT ROWID;
-- The same case of the same agent is one row, whoever meets it at the same time.
CREATE UNIQUE INDEX precedents_live ON precedents (agent, kind, precedent) WHERE status <> 'dismissed';

CREATE TABLE notifications (
    notification TEXT PRIMARY KEY,
    channel      TEXT NOT NULL,
    agent        TEXT NOT NULL,
    about        TEXT NOT NULL,
    stream       TEXT NOT NULL,
    queued_at    INTEGER NOT NULL,
    queued_seq   INTEGER NOT NULL,
    attempts     INTEGER NOT NULL,
    sent_at      INTEGER,
    next_at      INTEGER,
    gave_up      INTEGER NOT NULL,
    error        TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX notifications_waiting ON notifications (next_at) WHERE sent_at IS NULL AND gave_up = 0;
CREATE INDEX notifications_about ON notifications (about);
CREATE INDEX notifications_queued ON notifications (queued_at);

CREATE INDEX sessions_trigger ON sessions (trigger, started_at) WHERE trigger <> '';
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
