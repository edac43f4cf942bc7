-- The policy that binds every process on the store.

CREATE TABLE fleet_policy (
    scope  TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    policy TEXT NOT NULL,
    digest TEXT NOT NULL,
    at     INTEGER NOT NULL,
    "by"   TEXT NOT NULL,
    day_cap   INTEGER,
    month_cap INTEGER
) STRICT, WITHOUT ROWID;
