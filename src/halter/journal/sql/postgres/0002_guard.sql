-- The guard: halts, rates, decisions and the audit.

CREATE TABLE halts (
    scope  TEXT COLLATE "C" PRIMARY KEY,
    halted BIGINT NOT NULL,
    at     BIGINT NOT NULL,
    "by"   TEXT COLLATE "C"    NOT NULL,
    reason TEXT COLLATE "C"    NOT NULL,
    ramp    BIGINT NOT NULL,
    cancels BIGINT NOT NULL
);

CREATE TABLE rates (
    agent    TEXT COLLATE "C"    NOT NULL,
    tool     TEXT COLLATE "C"    NOT NULL,
    slice    BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (agent, tool, slice)
);

CREATE TABLE decisions (
    decision       TEXT COLLATE "C" PRIMARY KEY,
    about          TEXT COLLATE "C"    NOT NULL,
    session        TEXT COLLATE "C"    NOT NULL,
    agent          TEXT COLLATE "C"    NOT NULL,
    subject        TEXT COLLATE "C"    NOT NULL,
    name           TEXT COLLATE "C"    NOT NULL,
    digest         TEXT COLLATE "C"    NOT NULL,
    level          TEXT COLLATE "C"    NOT NULL,
    risk           TEXT COLLATE "C"    NOT NULL,
    asked_at       BIGINT NOT NULL,
    expires_at     BIGINT NOT NULL,
    verdict        TEXT COLLATE "C"    NOT NULL,
    "by"           TEXT COLLATE "C"    NOT NULL,
    decided_digest TEXT COLLATE "C"    NOT NULL,
    decided_at     BIGINT,
    used_at        BIGINT,
    same           TEXT COLLATE "C" NOT NULL,
    keys           TEXT COLLATE "C" NOT NULL,
    asked_seq      BIGINT NOT NULL,
    decided_seq    BIGINT NOT NULL
);
CREATE INDEX decisions_open ON decisions (asked_at) WHERE verdict = '';

CREATE TABLE rules (
    rule       TEXT COLLATE "C" PRIMARY KEY,
    tool       TEXT COLLATE "C" NOT NULL,
    scope      TEXT COLLATE "C" NOT NULL,
    owner      TEXT COLLATE "C" NOT NULL,
    matcher    TEXT COLLATE "C" NOT NULL,
    keys       TEXT COLLATE "C" NOT NULL,
    "by"       TEXT COLLATE "C" NOT NULL,
    made_at    BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    ended_at   BIGINT,
    ended_by   TEXT COLLATE "C" NOT NULL
);

CREATE TABLE pins (
    agent  TEXT COLLATE "C" NOT NULL,
    tool   TEXT COLLATE "C" NOT NULL,
    digest TEXT COLLATE "C" NOT NULL,
    "by"   TEXT COLLATE "C" NOT NULL,
    at     BIGINT NOT NULL,
    PRIMARY KEY (agent, tool)
);

CREATE TABLE audit (
    call             TEXT COLLATE "C" PRIMARY KEY,
    session          TEXT COLLATE "C"    NOT NULL,
    agent            TEXT COLLATE "C"    NOT NULL,
    tool             TEXT COLLATE "C"    NOT NULL,
    capability_level TEXT COLLATE "C"    NOT NULL,
    risk_level       TEXT COLLATE "C"    NOT NULL,
    decision         TEXT COLLATE "C"    NOT NULL,
    decided_by       TEXT COLLATE "C"    NOT NULL,
    outcome          TEXT COLLATE "C"    NOT NULL,
    cost_usd         BIGINT NOT NULL,
    duration_ms      BIGINT NOT NULL,
    created_at       BIGINT NOT NULL,
    shows_result     BIGINT NOT NULL,
    asked_seq        BIGINT NOT NULL,
    settled_seq      BIGINT NOT NULL
);
CREATE INDEX audit_created ON audit (created_at);
