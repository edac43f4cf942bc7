-- name: claim_orphans
-- Sessions whose owner's lease ran out go to the first worker that asks; where agents are named, only their
-- unattended ones.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker
    WHERE s.owner <> '' AND w.alive_until < :now AND w.worker <> :worker AND s.format <= :format
        AND (:agents IS NULL OR s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    LIMIT :limit
)
RETURNING session, generation;

-- name: claim_due
-- Sessions without an owner whose time has come, the longest due first; of agents that have a limit, only those
-- that it does not count.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format
        AND (:agents IS NULL OR kind = 'autonomous' AND agent IN (SELECT value FROM json_each(:limited))
             OR agent IN (SELECT value FROM json_each(:agents)) AND (kind = 'autonomous' OR trigger <> '' OR parent <> ''))
    ORDER BY due_at LIMIT :limit
)
RETURNING session, generation;

-- name: claim_tasks
-- The tasks of one agent that are due.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format AND agent = :agent
        AND kind <> 'autonomous' AND (trigger <> '' OR parent <> '')
    ORDER BY due_at LIMIT :limit
)
RETURNING session, generation;

-- name: claim_one
-- A session that is claimed by name, whether it is due or not, unless it has an owner or is over. Who has a
-- ticket gets it only as it was when it was offered.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session = :session AND format <= :format AND started_at > 0 AND ended_at IS NULL AND :limit > 0
    AND (:generation IS NULL OR generation = :generation) AND (
    owner = '' OR owner IN (SELECT worker FROM workers WHERE alive_until < :now AND worker <> :worker)
)
RETURNING session, generation;

-- name: rooms
-- How many more tasks of each agent may be awake: those that are owned count, and those that are on offer. A plain
-- `agent` would have all of its sessions walked, here and in the offers below.
SELECT a.value, m.value - (
    SELECT COUNT(*) FROM sessions s WHERE s.owner <> '' AND +s.agent = a.value AND s.kind <> 'autonomous'
) - (
    SELECT COUNT(*) FROM tickets t CROSS JOIN sessions s ON s.session = t.session AND s.generation = t.generation
    WHERE s.owner = '' AND +s.agent = a.value AND s.kind <> 'autonomous'
) FROM json_each(:agents) a JOIN json_each(:most) m ON m.key = a.key;

-- name: offer_orphans
-- Sessions whose owner's lease ran out and that are not on offer.
SELECT s.session, s.generation, s.agent FROM sessions s JOIN workers w ON s.owner = w.worker
WHERE s.owner <> '' AND w.alive_until < :now AND s.format <= :format
    AND +s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
LIMIT :limit;

-- name: offer_due
-- Sessions without an owner whose time has come and that are not on offer, the longest due first.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format
    AND (s.kind = 'autonomous' AND +s.agent IN (SELECT value FROM json_each(:limited))
         OR +s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offer_tasks
-- The tasks of one agent that are due and not on offer.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format AND s.agent = :agent
    AND s.kind <> 'autonomous' AND (s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offered
-- What is on offer from now on.
INSERT INTO tickets (session, generation, at)
SELECT s.value, g.value, :at FROM json_each(:sessions) s JOIN json_each(:generations) g ON g.key = s.key WHERE true
ON CONFLICT (session) DO UPDATE SET generation = excluded.generation, at = excluded.at;

-- name: drop_tickets
-- What was not taken for as long as a lease lasts is offered again: its ticket may be lost.
DELETE FROM tickets WHERE at < :before;

-- name: count_tickets
-- How many wait to be used.
SELECT COUNT(*) FROM tickets;

-- name: use_up
-- A ticket is good for one attempt.
DELETE FROM tickets WHERE session = :session;

-- name: renew
-- A worker lives on: one row renews all its leases. When it noticed that they had run out is kept, and told for as long
-- as a lease lasts: an answer may be lost.
INSERT INTO workers (worker, alive_until, lapsed) VALUES (:worker, :now + :lease, 0)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < :now THEN :now ELSE workers.lapsed END, alive_until = excluded.alive_until
RETURNING lapsed + :lease >= :now;

-- name: about
-- What a worker says of itself.
UPDATE workers SET about = :about WHERE worker = :worker;

-- name: forget_workers
-- Those that have been gone for a day and left nothing behind.
DELETE FROM workers WHERE alive_until < :now - 86400000000 AND worker <> :worker
    AND worker NOT IN (SELECT owner FROM sessions WHERE owner <> '');

-- name: name_owners
-- An owner that was forgotten while it was suspended may have begun a session since: named again, it can be found dead.
INSERT INTO workers (worker, alive_until, lapsed) SELECT DISTINCT owner, :now + :lease, 0 FROM sessions WHERE owner <> ''
ON CONFLICT (worker) DO NOTHING;

-- name: leave
-- A worker ends in good order: its leases are over at once.
UPDATE workers SET alive_until = 0 WHERE worker = :worker;

-- name: release
-- A worker gives one session back.
UPDATE sessions SET owner = '' WHERE session = :session AND owner = :worker AND generation = :generation;

-- name: owned
-- What a worker still owns.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '';

-- name: snapshot
-- The newest hot state of a session that is still the worker's own, for failover and for screens elsewhere.
INSERT INTO snapshots (session, at, data)
SELECT session, :at, :data FROM sessions WHERE session = :session AND owner = :worker
ON CONFLICT (session) DO UPDATE SET at = excluded.at, data = excluded.data;

-- name: read
-- Events of a stream, in order.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE stream = :stream AND seq > :after ORDER BY seq LIMIT :limit;

-- name: by_key
-- Events that an earlier write of this key appended.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE key = :key ORDER BY position;

-- name: erase_bodies
-- The bodies and their salts go; the digests stay and keep the chain whole.
UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq <= :through;

-- name: erase_blobs
-- Blobs that only erased events name; those of this erasure and of all that were recorded before it.
WITH named AS (
    SELECT DISTINCT blob FROM events WHERE stream = :stream AND seq <= :through AND blob IS NOT NULL
), erased AS (
    SELECT json_extract(CAST(facts AS TEXT), '$.stream') AS stream,
           MAX(json_extract(CAST(facts AS TEXT), '$.through')) AS through
    FROM events WHERE stream = 'fleet' AND kind = 'bodies_erased' GROUP BY 1
)
DELETE FROM blobs WHERE digest IN (SELECT blob FROM named) AND digest NOT IN (
    SELECT kept.blob FROM events kept LEFT JOIN erased ON erased.stream = kept.stream
    WHERE kept.blob IN (SELECT blob FROM named) AND kept.seq > COALESCE(erased.through, 0)
) AND digest NOT IN (SELECT definition FROM sessions);

-- name: sweep_blobs
-- Blobs that were not put for a while and that nothing names: no session as its definition, and no event unless it
-- is erased.
WITH erased AS (
    SELECT json_extract(CAST(facts AS TEXT), '$.stream') AS stream,
           MAX(json_extract(CAST(facts AS TEXT), '$.through')) AS through
    FROM events WHERE stream = 'fleet' AND kind = 'bodies_erased' GROUP BY 1
)
DELETE FROM blobs WHERE put_at < :before AND digest NOT IN (SELECT definition FROM sessions) AND digest NOT IN (
    SELECT kept.blob FROM events kept LEFT JOIN erased ON erased.stream = kept.stream
    WHERE kept.blob IS NOT NULL AND kept.seq > COALESCE(erased.through, 0)
);

-- name: erase_snapshot
-- What an erased session last saw is no body, but it is as private.
DELETE FROM snapshots WHERE session = :session;

-- name: put
-- A blob, once; that it was put again is noted by the hour, so that most often nothing has to be written.
INSERT INTO blobs (digest, data, put_at) VALUES (:digest, :data, :at)
ON CONFLICT (digest) DO UPDATE SET put_at = excluded.put_at WHERE excluded.put_at >= blobs.put_at + 3600000000;

-- name: has_blob
-- Whether a blob is there.
SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = :digest);

-- name: get
-- A blob.
SELECT data FROM blobs WHERE digest = :digest;

-- name: grown
-- Which streams other processes have made longer. A plain `stream` would have all events walked in its order.
SELECT stream, MAX(seq) AS head, MAX(position) AS position FROM events WHERE position > :position GROUP BY +stream;

-- name: hide_document
-- A document is gone, even if some of its chunks are left.
DELETE FROM library WHERE document = :document;

-- name: drop_words
-- The words of some of a document's chunks.
DELETE FROM chunk_words WHERE rowid IN (SELECT id FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: drop_chunks
-- The same chunks, after their words.
DELETE FROM chunks WHERE id IN (SELECT id FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: add_chunk
-- One piece of a document, unless another process has just written it.
INSERT INTO chunks (document, number, start, "end", text) VALUES (:document, :number, :start, :end, :text)
ON CONFLICT (document, number) DO NOTHING;

-- name: add_words
-- The words of a chunk, under its id.
INSERT INTO chunk_words (rowid, words) VALUES (:id, :words);

-- name: merge_words
-- The index keeps what was deleted until its parts are merged.
INSERT INTO chunk_words (chunk_words) VALUES ('optimize');

-- name: show_document
-- A document is there if all of its chunks are.
INSERT INTO library (document)
SELECT :document WHERE (SELECT COUNT(*) FROM chunks WHERE document = :document) = :count
ON CONFLICT (document) DO NOTHING;

-- name: search
-- The chunks of some documents that fit, the best first.
SELECT c.document, c.number, c.start, c."end", c.text, -bm25(chunk_words) AS fit
FROM chunk_words JOIN chunks c ON c.id = chunk_words.rowid
WHERE chunk_words MATCH :query AND c.document IN (SELECT document FROM library JOIN json_each(:documents) ON document = value)
ORDER BY fit DESC, c.document, c.number LIMIT :limit;

-- name: indexed
-- Which of these documents are there.
SELECT document FROM library JOIN json_each(:documents) ON document = value;

-- name: chunks
-- A document's chunks, in order.
SELECT document, number, start, "end", text FROM chunks JOIN library USING (document)
WHERE document = :document ORDER BY number;
