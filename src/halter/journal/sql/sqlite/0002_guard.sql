-- The guard: halts, rates, decisions and the audit.

CREATE TABLE halts (
    scope  TEXT PRIMARY KEY,
    halted INTEGER NOT NULL,
    at     INTEGER NOT NULL,
    "by"   TEXT    NOT NULL,
    reason TEXT    NOT NULL,
    ramp    INTEGER NOT NULL,
    cancels INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE rates (
    agent    TEXT    NOT NULL,
    tool     TEXT    NOT NULL,
    slice    INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    PRIMARY KEY (agent, tool, slice)
) STRICT, WITHOUT ROWID;

CREATE TABLE decisions (
    decision       TEXT PRIMARY KEY,
    about          TEXT    NOT NULL,
    session        TEXT    NOT NULL,
    agent          TEXT    NOT NULL,
    subject        TEXT    NOT NULL,
    name           TEXT    NOT NULL,
    digest         TEXT    NOT NULL,
    level          TEXT    NOT NULL,
    risk           TEXT    NOT NULL,
    asked_at       INTEGER NOT NULL,
    expires_at     INTEGER NOT NULL,
    verdict        TEXT    NOT NULL,
    "by"           TEXT    NOT NULL,
    decided_digest TEXT    NOT NULL,
    decided_at     INTEGER,
    used_at        INTEGER,
    same           TEXT NOT NULL,
    keys           TEXT NOT NULL,
    asked_seq      INTEGER NOT NULL,
    decided_seq    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX decisions_open ON decisions (asked_at) WHERE verdict = '';

CREATE TABLE rules (
    rule       TEXT PRIMARY KEY,
    tool       TEXT NOT NULL,
    scope      TEXT NOT NULL,
    owner      TEXT NOT NULL,
    matcher    TEXT NOT NULL,
    keys       TEXT NOT NULL,
    "by"       TEXT NOT NULL,
    made_at    INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at   INTEGER,
    ended_by   TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE pins (
    agent  TEXT NOT NULL,
    tool   TEXT NOT NULL,
    digest TEXT NOT NULL,
    "by"   TEXT NOT NULL,
    at     INTEGER NOT NULL,
    PRIMARY KEY (agent, tool)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
    call             TEXT PRIMARY KEY,
    session          TEXT    NOT NULL,
    agent            TEXT    NOT NULL,
    tool             TEXT    NOT NULL,
    capability_level TEXT    NOT NULL,
    risk_level       TEXT    NOT NULL,
    decision         TEXT    NOT NULL,
    decided_by       TEXT    NOT NULL,
    outcome          TEXT    NOT NULL,
    cost_usd         INTEGER NOT NULL,
    duration_ms      INTEGER NOT NULL,
    created_at       INTEGER NOT NULL,
    shows_result     INTEGER NOT NULL,
    asked_seq        INTEGER NOT NULL,
    settled_seq      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX audit_created ON audit (created_at);
