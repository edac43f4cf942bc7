-- name: claim_orphans
-- Claim sessions whose owner's lease expired; with `:agents`, only their unattended ones.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker
    WHERE s.owner <> '' AND w.alive_until < :now AND w.worker <> :worker AND s.format <= :format
        AND (:agents IS NULL OR s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    LIMIT :limit
)
RETURNING session, generation;

-- name: claim_due
-- Claim due sessions without an owner, the longest due first; for agents with a limit, only sessions that do not count.
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
-- Claim due tasks of one agent.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session IN (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format AND agent = :agent
        AND kind <> 'autonomous' AND (trigger <> '' OR parent <> '')
    ORDER BY due_at LIMIT :limit
)
RETURNING session, generation;

-- name: claim_one
-- Claim one session, due or not, unless it has an owner or has ended. With a ticket, its generation must be unchanged.
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session = :session AND format <= :format AND started_at > 0 AND ended_at IS NULL AND :limit > 0
    AND (:generation IS NULL OR generation = :generation) AND (
    owner = '' OR owner IN (SELECT worker FROM workers WHERE alive_until < :now AND worker <> :worker)
)
RETURNING session, generation;

-- name: free_slots
-- How many more tasks of each agent may run: tasks with an owner or a ticket count. A plain `agent` would scan all of
-- its sessions, here and in the offers below.
SELECT a.value, m.value - (
    SELECT COUNT(*) FROM sessions s WHERE s.owner <> '' AND +s.agent = a.value AND s.kind <> 'autonomous'
) - (
    SELECT COUNT(*) FROM tickets t CROSS JOIN sessions s ON s.session = t.session AND s.generation = t.generation
    WHERE s.owner = '' AND +s.agent = a.value AND s.kind <> 'autonomous'
) FROM json_each(:agents) a JOIN json_each(:most) m ON m.key = a.key;

-- name: offer_orphans
-- Sessions whose owner's lease expired and that have no ticket.
SELECT s.session, s.generation, s.agent FROM sessions s JOIN workers w ON s.owner = w.worker
WHERE s.owner <> '' AND w.alive_until < :now AND s.format <= :format
    AND +s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
LIMIT :limit;

-- name: offer_due
-- Due sessions without an owner and without a ticket, the longest due first.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format
    AND (s.kind = 'autonomous' AND +s.agent IN (SELECT value FROM json_each(:limited))
         OR +s.agent IN (SELECT value FROM json_each(:agents)) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offer_tasks
-- Due tasks of one agent without a ticket.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format AND s.agent = :agent
    AND s.kind <> 'autonomous' AND (s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT 1 FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: save_tickets
-- Save tickets for sessions that are being offered.
INSERT INTO tickets (session, generation, at)
SELECT s.value, g.value, :at FROM json_each(:sessions) s JOIN json_each(:generations) g ON g.key = s.key WHERE true
ON CONFLICT (session) DO UPDATE SET generation = excluded.generation, at = excluded.at;

-- name: drop_tickets
-- Drop tickets older than a lease, so that their sessions are offered again: the ticket may be lost.
DELETE FROM tickets WHERE at < :before;

-- name: count_tickets
-- The number of tickets.
SELECT COUNT(*) FROM tickets;

-- name: drop_ticket
-- Drop a ticket after its one attempt.
DELETE FROM tickets WHERE session = :session;

-- name: renew
-- Renew all leases of a worker in one row. `lapsed` is when it last renewed expired leases; this is reported for as
-- long as a lease, since an answer may be lost.
INSERT INTO workers (worker, alive_until, lapsed) VALUES (:worker, :now + :lease, 0)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < :now THEN :now ELSE workers.lapsed END, alive_until = excluded.alive_until
RETURNING lapsed + :lease >= :now;

-- name: save_about
-- Save a worker's description of itself.
UPDATE workers SET about = :about WHERE worker = :worker;

-- name: forget_workers
-- Drop workers that ended a day ago and own no session.
DELETE FROM workers WHERE alive_until < :now - 86400000000 AND worker <> :worker
    AND worker NOT IN (SELECT owner FROM sessions WHERE owner <> '');

-- name: restore_owners
-- Add owners without a row again: a worker that was dropped while it was suspended may have claimed a session since.
INSERT INTO workers (worker, alive_until, lapsed) SELECT DISTINCT owner, :now + :lease, 0 FROM sessions WHERE owner <> ''
ON CONFLICT (worker) DO NOTHING;

-- name: leave
-- A worker ends normally: its leases expire immediately.
UPDATE workers SET alive_until = 0 WHERE worker = :worker;

-- name: release
-- Release the lease of one session.
UPDATE sessions SET owner = '' WHERE session = :session AND owner = :worker AND generation = :generation;

-- name: owned
-- The sessions that a worker owns.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '';

-- name: save_snapshot
-- Save the hot state of a session that the worker still owns, for failover and other processes.
INSERT INTO snapshots (session, at, data)
SELECT session, :at, :data FROM sessions WHERE session = :session AND owner = :worker
ON CONFLICT (session) DO UPDATE SET at = excluded.at, data = excluded.data;

-- name: read
-- The events of a stream after one, in order.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE stream = :stream AND seq > :after ORDER BY seq LIMIT :limit;

-- name: by_key
-- The events of an earlier write with this key.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE key = :key ORDER BY position;

-- name: erase_bodies
-- Delete bodies and their salts. The digests stay, so the chain remains valid.
UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq <= :through;

-- name: erase_blobs
-- Delete blobs to which only erased events refer, by this erasure or an earlier one.
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
-- Delete blobs that were not saved recently and are unreferenced: not the definition of a session, nor the blob of an
-- unerased event.
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
-- Delete the hot-state snapshot of an erased session. It is not a body, but as private.
DELETE FROM snapshots WHERE session = :session;

-- name: save_blob
-- Save a blob. If it exists, its time is updated at most once per hour, so that usually nothing is written.
INSERT INTO blobs (digest, data, put_at) VALUES (:digest, :data, :at)
ON CONFLICT (digest) DO UPDATE SET put_at = excluded.put_at WHERE excluded.put_at >= blobs.put_at + 3600000000;

-- name: has_blob
-- 1 if a blob exists, else 0.
SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = :digest);

-- name: find_blob
-- One blob.
SELECT data FROM blobs WHERE digest = :digest;

-- name: grown_streams
-- The streams that other processes extended. A plain `stream` would scan all events in its order.
SELECT stream, MAX(seq) AS head, MAX(position) AS position FROM events WHERE position > :position GROUP BY +stream;

-- name: hide_document
-- Hide a document, even if it still has chunks.
DELETE FROM library WHERE document = :document;

-- name: drop_words
-- Delete the words of some of a document's chunks.
DELETE FROM chunk_words WHERE rowid IN (SELECT id FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: drop_chunks
-- Delete the same chunks, after their words.
DELETE FROM chunks WHERE id IN (SELECT id FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: add_chunk
-- Add a chunk of a document, unless another process has added it.
INSERT INTO chunks (document, number, start, "end", text) VALUES (:document, :number, :start, :end, :text)
ON CONFLICT (document, number) DO NOTHING;

-- name: add_words
-- Add the words of a chunk, under its id.
INSERT INTO chunk_words (rowid, words) VALUES (:id, :words);

-- name: merge_words
-- Merge the parts of the index: until then it contains deleted words.
INSERT INTO chunk_words (chunk_words) VALUES ('optimize');

-- name: show_document
-- Make a document visible if all of its chunks are saved.
INSERT INTO library (document)
SELECT :document WHERE (SELECT COUNT(*) FROM chunks WHERE document = :document) = :count
ON CONFLICT (document) DO NOTHING;

-- name: search
-- The matching chunks of some documents, the best first.
SELECT c.document, c.number, c.start, c."end", c.text, -bm25(chunk_words) AS fit
FROM chunk_words JOIN chunks c ON c.id = chunk_words.rowid
WHERE chunk_words MATCH :query AND c.document IN (SELECT document FROM library JOIN json_each(:documents) ON document = value)
ORDER BY fit DESC, c.document, c.number LIMIT :limit;

-- name: indexed
-- Which of these documents are visible.
SELECT document FROM library JOIN json_each(:documents) ON document = value;

-- name: chunks
-- A document's chunks, in order.
SELECT document, number, start, "end", text FROM chunks JOIN library USING (document)
WHERE document = :document ORDER BY number;
