-- Which agents may run by themselves.

CREATE TABLE agents (
    agent       TEXT PRIMARY KEY,
    switched_on INTEGER NOT NULL,
    at          INTEGER NOT NULL,
    "by"        TEXT NOT NULL,
    reason      TEXT NOT NULL
) STRICT, WITHOUT ROWID;
