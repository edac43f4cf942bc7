-- name: claim_orphans
-- Sessions whose owner's lease ran out go to whoever asks first.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker
    WHERE s.owner <> '' AND w.alive_until < :now AND w.worker <> :worker AND s.format <= :format
    LIMIT :limit
)
RETURNING session, generation;

-- name: claim_due
-- Sessions that nobody owns and whose time has come, the longest due first.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format
    ORDER BY due_at LIMIT :limit
)
RETURNING session, generation;

-- name: alive_until
-- How long a worker's leases were good for.
SELECT alive_until FROM workers WHERE worker = :worker;

-- name: renew
-- A worker lives on: one row renews all its leases.
INSERT INTO workers (worker, alive_until) VALUES (:worker, :until)
ON CONFLICT (worker) DO UPDATE SET alive_until = excluded.alive_until;

-- name: owned
-- What a worker still owns.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '';

-- name: snapshot
-- The newest hot state of a session, for failover and for screens elsewhere.
INSERT INTO snapshots (session, at, data) VALUES (:session, :at, :data)
ON CONFLICT (session) DO UPDATE SET at = excluded.at, data = excluded.data;

-- name: read
-- Events of a stream, in order.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE stream = :stream AND seq > :after ORDER BY seq LIMIT :limit;

-- name: by_key
-- Events that an earlier write of this key appended.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE key = :key ORDER BY position;

-- name: append
-- One event.
INSERT INTO events (stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: erase_bodies
-- The bodies and their salts go; the digests stay and keep the chain whole.
UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq <= :through;

-- name: erase_blobs
-- Blobs that only erased events name.
DELETE FROM blobs WHERE digest IN (
    SELECT blob FROM events WHERE stream = :stream AND seq <= :through AND blob IS NOT NULL
) AND digest NOT IN (
    SELECT blob FROM events WHERE blob IS NOT NULL AND NOT (stream = :stream AND seq <= :through)
      AND blob IN (SELECT blob FROM events WHERE stream = :stream AND seq <= :through AND blob IS NOT NULL)
);

-- name: put
-- A blob, once.
INSERT INTO blobs (digest, data) VALUES (:digest, :data) ON CONFLICT (digest) DO NOTHING;

-- name: get
-- A blob.
SELECT data FROM blobs WHERE digest = :digest;

-- name: grown
-- Which streams other processes have made longer.
SELECT stream, MAX(seq) AS head, MAX(position) AS position FROM events WHERE position > :position GROUP BY stream;
