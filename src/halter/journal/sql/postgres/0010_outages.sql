-- The sessions that no model answers, or that none answered before.

CREATE TABLE outages (
    session  TEXT COLLATE "C" PRIMARY KEY,
    agent    TEXT COLLATE "C" NOT NULL,
    trouble  TEXT COLLATE "C" NOT NULL,
    sentence TEXT COLLATE "C" NOT NULL,
    began_at BIGINT NOT NULL,
    ended_at BIGINT
);
CREATE INDEX outages_open ON outages (agent) WHERE ended_at IS NULL;
