-- What starts sessions, and what sessions leave behind.

CREATE TABLE triggers (
    trigger       TEXT COLLATE "C" PRIMARY KEY,
    agent         TEXT COLLATE "C" NOT NULL,
    type          TEXT COLLATE "C" NOT NULL,
    digest        TEXT COLLATE "C" NOT NULL,
    made_by       TEXT COLLATE "C" NOT NULL,
    made_at       BIGINT NOT NULL,
    made_seq      BIGINT NOT NULL,
    ended_at      BIGINT,
    ticked_at     BIGINT NOT NULL,
    queued_at     BIGINT,
    runs          BIGINT NOT NULL,
    session       TEXT COLLATE "C" NOT NULL,
    ran_at        BIGINT NOT NULL,
    delayed       TEXT COLLATE "C" NOT NULL,
    delayed_until BIGINT
);

CREATE TABLE items (
    trigger        TEXT COLLATE "C" NOT NULL,
    item           TEXT COLLATE "C" NOT NULL,
    name           TEXT COLLATE "C" NOT NULL,
    size           BIGINT NOT NULL,
    seen_at        BIGINT NOT NULL,
    ignored        BIGINT NOT NULL,
    attempts       BIGINT NOT NULL,
    session        TEXT COLLATE "C" NOT NULL,
    quarantined_at BIGINT,
    sentence       TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (trigger, item)
);

CREATE TABLE outputs (
    agent  TEXT COLLATE "C" NOT NULL,
    digest TEXT COLLATE "C" NOT NULL,
    at     BIGINT NOT NULL,
    PRIMARY KEY (agent, digest)
);

CREATE TABLE findings (
    finding      TEXT COLLATE "C" PRIMARY KEY,
    session      TEXT COLLATE "C" NOT NULL,
    agent        TEXT COLLATE "C" NOT NULL,
    severity     TEXT COLLATE "C" NOT NULL,
    support      TEXT COLLATE "C" NOT NULL,
    document     TEXT COLLATE "C" NOT NULL,
    name         TEXT COLLATE "C" NOT NULL,
    emitted_at   BIGINT NOT NULL,
    emitted_seq  BIGINT NOT NULL,
    review       TEXT COLLATE "C" NOT NULL,
    reviewed_seq BIGINT NOT NULL,
    status       TEXT COLLATE "C" NOT NULL,
    "by"         TEXT COLLATE "C" NOT NULL,
    decided_at   BIGINT
);
CREATE INDEX findings_session ON findings (session);
CREATE INDEX findings_emitted ON findings (emitted_at);

CREATE TABLE memories (
    memory       TEXT COLLATE "C" PRIMARY KEY,
    session      TEXT COLLATE "C" NOT NULL,
    agent        TEXT COLLATE "C" NOT NULL,
    proposed_at  BIGINT NOT NULL,
    proposed_seq BIGINT NOT NULL,
    status       TEXT COLLATE "C" NOT NULL,
    "by"         TEXT COLLATE "C" NOT NULL,
    decided_at   BIGINT
);
CREATE INDEX memories_agent ON memories (agent, status);

CREATE TABLE precedents (
    precedent      TEXT COLLATE "C" PRIMARY KEY,
    agent          TEXT COLLATE "C" NOT NULL,
    kind           TEXT COLLATE "C" NOT NULL,
    observed_count BIGINT NOT NULL,
    first_at       BIGINT NOT NULL,
    last_at        BIGINT NOT NULL,
    session        TEXT COLLATE "C" NOT NULL,
    proposed_seq   BIGINT NOT NULL,
    status         TEXT COLLATE "C" NOT NULL,
    "by"           TEXT COLLATE "C" NOT NULL,
    decided_at     BIGINT
);
-- The same case of the same agent is one row, whoever meets it at the same time.
CREATE UNIQUE INDEX precedents_live ON precedents (agent, kind, precedent) WHERE status <> 'dismissed';

CREATE TABLE notifications (
    notification TEXT COLLATE "C" PRIMARY KEY,
    channel      TEXT COLLATE "C" NOT NULL,
    agent        TEXT COLLATE "C" NOT NULL,
    about        TEXT COLLATE "C" NOT NULL,
    stream       TEXT COLLATE "C" NOT NULL,
    queued_at    BIGINT NOT NULL,
    queued_seq   BIGINT NOT NULL,
    attempts     BIGINT NOT NULL,
    sent_at      BIGINT,
    next_at      BIGINT,
    gave_up      BIGINT NOT NULL,
    error        TEXT COLLATE "C" NOT NULL
);
CREATE INDEX notifications_waiting ON notifications (next_at) WHERE sent_at IS NULL AND gave_up = 0;
CREATE INDEX notifications_about ON notifications (about);
CREATE INDEX notifications_queued ON notifications (queued_at);

CREATE INDEX sessions_trigger ON sessions (trigger, started_at) WHERE trigger <> '';
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
