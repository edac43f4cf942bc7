-- The sessions that no model answers, or that none answered before.

CREATE TABLE outages (
    session  TEXT PRIMARY KEY,
    agent    TEXT NOT NULL,
    trouble  TEXT NOT NULL,
    sentence TEXT NOT NULL,
    began_at INTEGER NOT NULL,
    ended_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX outages_open ON outages (agent) WHERE ended_at IS NULL;
