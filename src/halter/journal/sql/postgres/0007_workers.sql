-- Many workers: what each says of itself, and which sessions were offered to them.

ALTER TABLE workers ADD COLUMN about TEXT COLLATE "C" NOT NULL DEFAULT '';

-- An offer that a crash forgets is made again, so it need not be durable.
CREATE UNLOGGED TABLE tickets (
    session    TEXT COLLATE "C" PRIMARY KEY,
    generation BIGINT NOT NULL,
    at         BIGINT NOT NULL
);
CREATE INDEX sessions_tasks_due ON sessions (agent, due_at) WHERE owner = '' AND due_at IS NOT NULL AND kind <> 'autonomous';
