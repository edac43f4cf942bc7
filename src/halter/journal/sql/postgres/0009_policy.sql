-- The policy that binds every process on the store.

CREATE TABLE fleet_policy (
    scope  TEXT COLLATE "C" PRIMARY KEY,
    number BIGINT NOT NULL,
    policy TEXT COLLATE "C" NOT NULL,
    digest TEXT COLLATE "C" NOT NULL,
    at     BIGINT NOT NULL,
    "by"   TEXT COLLATE "C" NOT NULL,
    day_cap   BIGINT,
    month_cap BIGINT
);
