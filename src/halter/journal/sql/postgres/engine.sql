-- name: configure
-- Settings of every connection: the schema of this store, and durable commits even if the server's default is not.
SELECT set_config('search_path', quote_ident(:schema), false),
       set_config('synchronous_commit',
                  CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
                  false);

-- name: configure_writer
-- Settings of a writer. If it stops in the middle of a transaction, its locks are released after a timeout. It looks
-- rows up only by their keys, so one generic plan is enough. The planner, which meets the tables while they are empty,
-- must not choose to scan them, or to sort all due rows to take the first. No setting prevents it from starting a join
-- with the table instead of the keys, once it has counted the rows of a small one: hence LATERAL with OFFSET, and ANY.
SELECT set_config('idle_in_transaction_session_timeout', :lock_timeout, false), set_config('lock_timeout', :lock_timeout, false),
       set_config('enable_seqscan', 'off', false), set_config('enable_hashjoin', 'off', false),
       set_config('enable_mergejoin', 'off', false), set_config('enable_bitmapscan', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false), set_config('jit', 'off', false);

-- name: configure_reader
-- Settings of a reader, which changes nothing.
SELECT set_config('default_transaction_read_only', 'on', false);

-- name: begin
-- Begin a transaction. Each statement sees what is committed when it starts, so a read after a lock is current.
BEGIN ISOLATION LEVEL READ COMMITTED;

-- name: commit
-- Commit. The changes are durable when this returns.
COMMIT;

-- name: rollback
-- Roll back.
ROLLBACK;

-- name: now
-- The store's time, which all workers use instead of their own clocks.
SELECT microseconds();

-- name: encoding
-- The encoding of the database. Only UTF8 can represent any text.
SELECT current_setting('server_encoding');

-- name: lock_migration
-- If several processes start together, one migrates and the others wait.
SELECT pg_advisory_xact_lock(hashtextextended('halter ' || :schema, 0));

-- name: schema_exists
-- True if the schema exists.
SELECT to_regnamespace(quote_ident(:schema)) IS NOT NULL;

-- name: create_meta
-- Create the table of the store's id and schema version.
CREATE TABLE IF NOT EXISTS meta (name TEXT COLLATE "C" PRIMARY KEY, value TEXT NOT NULL);

-- name: has_tables
-- True if the schema has a table of Halter. Other programs may share it.
SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = :schema AND tablename IN ('events', 'streams', 'sessions'));

-- name: save_meta
-- Save the store's id or schema version.
INSERT INTO meta (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: claim_orphans
-- Claim sessions whose owner's lease expired. An owner that is renewing keeps them: its row is locked and skipped.
WITH orphans AS MATERIALIZED (
    SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker
    WHERE s.owner <> '' AND w.alive_until < :now AND w.worker <> :worker AND s.format <= :format
        AND (:agents::text[] IS NULL OR s.agent = ANY(:agents::text[]) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    LIMIT :limit
    FOR UPDATE OF s SKIP LOCKED FOR SHARE OF w SKIP LOCKED
)
UPDATE sessions s SET owner = :worker, generation = s.generation + 1
WHERE s.session = ANY(ARRAY(SELECT session FROM orphans))
RETURNING s.session, s.generation;

-- name: claim_due
-- Claim due sessions without an owner, the longest due first; for agents with a limit, only sessions that do not count.
WITH due AS MATERIALIZED (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format
        AND (:agents::text[] IS NULL OR kind = 'autonomous' AND agent = ANY(:limited::text[])
             OR agent = ANY(:agents::text[]) AND (kind = 'autonomous' OR trigger <> '' OR parent <> ''))
    ORDER BY due_at LIMIT :limit
    FOR UPDATE SKIP LOCKED
)
UPDATE sessions s SET owner = :worker, generation = s.generation + 1
WHERE s.session = ANY(ARRAY(SELECT session FROM due))
RETURNING s.session, s.generation;

-- name: claim_ready
-- Claim orphaned and due sessions in one statement, if no agent has a limit.
WITH orphans AS MATERIALIZED (
    SELECT s.session FROM sessions s JOIN workers w ON s.owner = w.worker
    WHERE s.owner <> '' AND w.alive_until < (SELECT microseconds()) AND w.worker <> :worker AND s.format <= :format
        AND (:agents::text[] IS NULL OR s.agent = ANY(:agents::text[]) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    LIMIT :limit
    FOR UPDATE OF s SKIP LOCKED FOR SHARE OF w SKIP LOCKED
), due AS MATERIALIZED (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= (SELECT microseconds()) AND format <= :format
        AND (:agents::text[] IS NULL OR agent = ANY(:agents::text[]) AND (kind = 'autonomous' OR trigger <> '' OR parent <> ''))
    ORDER BY due_at LIMIT :limit - (SELECT COUNT(*) FROM orphans)
    FOR UPDATE SKIP LOCKED
)
UPDATE sessions s SET owner = :worker, generation = s.generation + 1
WHERE s.session = ANY(ARRAY(SELECT session FROM orphans UNION ALL SELECT session FROM due))
RETURNING s.session, s.generation;

-- name: claim_tasks
-- Claim due tasks of one agent.
WITH due AS MATERIALIZED (
    SELECT session FROM sessions
    WHERE owner = '' AND due_at <= :now AND format <= :format AND agent = :agent
        AND kind <> 'autonomous' AND (trigger <> '' OR parent <> '')
    ORDER BY due_at LIMIT :limit
    FOR UPDATE SKIP LOCKED
)
UPDATE sessions s SET owner = :worker, generation = s.generation + 1
WHERE s.session = ANY(ARRAY(SELECT session FROM due))
RETURNING s.session, s.generation;

-- name: claim_one
-- Claim one session, due or not, unless it has an owner or has ended. An owner that is renewing keeps it. With a
-- ticket, its generation must be unchanged. A plain `ended_at` would read all open sessions.
WITH dead AS MATERIALIZED (
    SELECT worker FROM workers WHERE alive_until < :now AND worker <> :worker
    AND worker = (SELECT owner FROM sessions WHERE session = :session) FOR SHARE SKIP LOCKED
)
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session = :session AND format <= :format AND started_at > 0 AND COALESCE(ended_at, 0) = 0 AND :limit > 0
    AND (:generation::bigint IS NULL OR generation = :generation)
    AND (owner = '' OR owner IN (SELECT worker FROM dead))
RETURNING session, generation;

-- name: lock_claims
-- Serialize claims and offers that count before they claim.
SELECT pg_advisory_xact_lock(hashtextextended('halter claims ' || :schema, 0));

-- name: try_lock_claims
-- Only one process offers at a time.
SELECT pg_try_advisory_xact_lock(hashtextextended('halter claims ' || :schema, 0));

-- name: free_slots
-- How many more tasks of each agent may run: tasks with an owner or a ticket count.
SELECT a.agent, a.most - (
    SELECT COUNT(*) FROM sessions s WHERE s.owner <> '' AND s.agent = a.agent AND s.kind <> 'autonomous'
) - (
    SELECT COUNT(*) FROM tickets t CROSS JOIN LATERAL (
        SELECT FROM sessions s WHERE s.session = t.session AND s.generation = t.generation
        AND s.owner = '' AND s.agent = a.agent AND s.kind <> 'autonomous' OFFSET 0
    ) AS on_offer
) FROM unnest(:agents, :most) AS a (agent, most);

-- name: offer_orphans
-- Sessions whose owner's lease expired and that have no ticket. They are found by owner, since an agent has too many.
SELECT s.session, s.generation, s.agent FROM sessions s JOIN workers w ON s.owner = w.worker
WHERE s.owner <> '' AND w.alive_until < :now AND s.format <= :format AND s.agent || '' = ANY(:agents::text[])
    AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
LIMIT :limit;

-- name: offer_due
-- Due sessions without an owner and without a ticket, the longest due first.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format
    AND (s.kind = 'autonomous' AND s.agent = ANY(:limited::text[])
         OR s.agent = ANY(:agents::text[]) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offer_tasks
-- Due tasks of one agent without a ticket.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format AND s.agent = :agent
    AND s.kind <> 'autonomous' AND (s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: save_tickets
-- Save tickets for sessions that are being offered.
INSERT INTO tickets (session, generation, at)
SELECT v.session, v.generation, :at FROM unnest(:sessions, :generations) AS v (session, generation) ORDER BY v.session
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
INSERT INTO workers (worker, alive_until, lapsed) VALUES (:worker, microseconds() + :lease, 0)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < microseconds() THEN microseconds() ELSE workers.lapsed END,
    alive_until = microseconds() + :lease
RETURNING alive_until - :lease AS now, lapsed + :lease >= alive_until - :lease;

-- name: renew_before_claim
-- Renew the leases of a worker if half of their duration has passed. Otherwise its heartbeat has just done so, and
-- nothing is written.
INSERT INTO workers (worker, alive_until, lapsed) SELECT :worker, microseconds() + :lease, 0
WHERE NOT EXISTS (SELECT FROM workers WHERE worker = :worker AND alive_until > microseconds() + :lease / 2)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < microseconds() THEN microseconds() ELSE workers.lapsed END,
    alive_until = microseconds() + :lease;

-- name: save_about
-- Save a worker's description of itself, and drop workers that ended a day ago and own no session. A worker that was
-- dropped while it was suspended may have claimed a session since: such owners are added again.
WITH gone AS (
    DELETE FROM workers w WHERE alive_until < :now - 86400000000 AND worker <> :worker
        AND NOT EXISTS (SELECT FROM sessions s WHERE s.owner = w.worker)
), unknown AS (
    INSERT INTO workers (worker, alive_until, lapsed)
    SELECT DISTINCT owner, :now + :lease, 0 FROM sessions WHERE owner <> '' ORDER BY owner ON CONFLICT (worker) DO NOTHING
)
UPDATE workers SET about = :about WHERE worker = :worker;

-- name: leave
-- A worker ends normally: its leases expire immediately.
UPDATE workers SET alive_until = 0 WHERE worker = :worker;

-- name: release
-- Release the lease of one session.
UPDATE sessions SET owner = '' WHERE session = :session AND owner = :worker AND generation = :generation;

-- name: owned
-- The sessions that a worker owns.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '';

-- name: save_snapshots
-- Save the hot states of sessions that the worker still owns, for failover and other processes.
INSERT INTO snapshots (session, at, data)
SELECT s.session, :at, v.data FROM unnest(:sessions, :data) AS v (session, data)
CROSS JOIN LATERAL (SELECT own.session FROM sessions own WHERE own.session = v.session AND own.owner = :worker OFFSET 0) s
ORDER BY s.session
ON CONFLICT (session) DO UPDATE SET at = excluded.at, data = excluded.data;

-- name: read
-- The events of a stream after one, in order.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE stream = :stream AND seq > :after ORDER BY seq LIMIT :limit;

-- name: by_keys
-- The events of earlier writes with these keys.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE key = ANY(:keys) ORDER BY position;

-- name: erase_bodies
-- Delete bodies and their salts. The digests stay, so the chain remains valid.
UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq <= :through;

-- name: lock_blobs
-- A writer that refers to an existing blob waits here for one that deletes blobs, and vice versa.
LOCK TABLE blobs IN EXCLUSIVE MODE;

-- name: erase_blobs
-- Delete blobs to which only erased events refer, by this erasure or an earlier one.
WITH named AS (
    SELECT DISTINCT blob FROM events WHERE stream = :stream AND seq <= :through AND blob IS NOT NULL
), erased AS (
    SELECT convert_from(facts, 'UTF8')::json ->> 'stream' AS stream,
           MAX((convert_from(facts, 'UTF8')::json ->> 'through')::bigint) AS through
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
    SELECT convert_from(facts, 'UTF8')::json ->> 'stream' AS stream,
           MAX((convert_from(facts, 'UTF8')::json ->> 'through')::bigint) AS through
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
INSERT INTO blobs (digest, data, put_at) VALUES (:digest, :data, microseconds())
ON CONFLICT (digest) DO UPDATE SET put_at = excluded.put_at WHERE excluded.put_at >= blobs.put_at + 3600000000;

-- name: missing_blobs
-- Which of these blobs do not exist. The others are locked until the end of the transaction.
WITH kept AS MATERIALIZED (SELECT digest FROM blobs WHERE digest = ANY(:digests) FOR KEY SHARE)
SELECT wanted FROM unnest(:digests) AS wanted WHERE wanted NOT IN (SELECT digest FROM kept);

-- name: find_blob
-- One blob.
SELECT data FROM blobs WHERE digest = :digest;

-- name: disable_idle_timeout
-- Allow this transaction to be idle while its rows are computed.
SELECT set_config('idle_in_transaction_session_timeout', '0', true);

-- name: lock_tables
-- Block writers, but not readers. Every write locks its stream first, so this order cannot deadlock with any.
LOCK TABLE streams, sessions, budgets, holds, spends, events IN EXCLUSIVE MODE;

-- name: begin_snapshot
-- Begin a snapshot of the store.
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;

-- name: hide_document
-- Hide a document, even if it still has chunks.
DELETE FROM library WHERE document = :document;

-- name: drop_chunks
-- Delete some of a document's chunks and their words.
DELETE FROM chunks WHERE document = :document
AND number IN (SELECT number FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: add_chunks
-- Add chunks of a document, unless another process has added them.
INSERT INTO chunks (document, number, start, "end", text, words)
SELECT :document, v.number, v.start, v.stop, v.text, v.words::tsvector
FROM unnest(:numbers, :starts, :ends, :texts, :words) AS v (number, start, stop, text, words) ORDER BY v.number
ON CONFLICT (document, number) DO NOTHING;

-- name: show_document
-- Make a document visible if all of its chunks are saved.
INSERT INTO library (document)
SELECT :document WHERE (SELECT COUNT(*) FROM chunks WHERE document = :document) = :count
ON CONFLICT (document) DO NOTHING;

-- name: search
-- The matching chunks of some documents, the best first.
SELECT document, number, start, "end", text, ts_rank(words, :query::tsquery)::float8 AS fit
FROM chunks JOIN library USING (document) WHERE words @@ :query::tsquery AND document = ANY(:documents)
ORDER BY fit DESC, document, number LIMIT :limit;

-- name: indexed
-- Which of these documents are visible.
SELECT document FROM library WHERE document = ANY(:documents);

-- name: chunks
-- A document's chunks, in order.
SELECT document, number, start, "end", text FROM chunks JOIN library USING (document)
WHERE document = :document ORDER BY number;
