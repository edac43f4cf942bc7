-- Many workers: what each says of itself, and which sessions were offered to them.

ALTER TABLE workers ADD COLUMN about TEXT NOT NULL DEFAULT '';

CREATE TABLE tickets (
    session    TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    at         INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX sessions_tasks_due ON sessions (agent, due_at) WHERE owner = '' AND due_at IS NOT NULL AND kind <> 'autonomous';
