-- Which agents may run by themselves.

CREATE TABLE agents (
    agent       TEXT COLLATE "C" PRIMARY KEY,
    switched_on BIGINT NOT NULL,
    at          BIGINT NOT NULL,
    "by"        TEXT COLLATE "C" NOT NULL,
    reason      TEXT COLLATE "C" NOT NULL
);
