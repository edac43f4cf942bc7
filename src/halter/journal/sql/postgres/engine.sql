-- name: ready
-- How every connection works: in the schema of this store, and durably even where the server's default is not.
SELECT set_config('search_path', quote_ident(:schema), false),
       set_config('synchronous_commit',
                  CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
                  false);

-- name: ready_to_write
-- A writer that is stopped in the middle of a transaction must not keep its locks for ever. And it looks rows up by
-- their keys only, so one plan is good for ever; the planner, which meets the tables while they are empty, must not
-- settle for one that reads them whole, or that sorts all that is due to take the first. No setting keeps it from
-- beginning a join with the table, and not with what is looked up in it, once it has counted the rows of a small one:
-- hence LATERAL with OFFSET, and ANY.
SELECT set_config('idle_in_transaction_session_timeout', :patience, false), set_config('lock_timeout', :patience, false),
       set_config('enable_seqscan', 'off', false), set_config('enable_hashjoin', 'off', false),
       set_config('enable_mergejoin', 'off', false), set_config('enable_bitmapscan', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false), set_config('jit', 'off', false);

-- name: ready_to_read
-- Questions change nothing.
SELECT set_config('default_transaction_read_only', 'on', false);

-- name: begin
-- Each statement sees what is committed when it starts; so what is read after a lock is current.
BEGIN ISOLATION LEVEL READ COMMITTED;

-- name: commit
-- Durable when this is answered.
COMMIT;

-- name: rollback
-- As if nothing had been asked.
ROLLBACK;

-- name: now
-- The store's time. All workers follow it, not their own clocks.
SELECT microseconds();

-- name: encoding
-- Only one encoding can hold any text.
SELECT current_setting('server_encoding');

-- name: migrating
-- Of several processes that start together, one migrates and the others wait.
SELECT pg_advisory_xact_lock(hashtextextended('halter ' || :schema, 0));

-- name: schema_exists
-- Whether there is a schema of this name.
SELECT to_regnamespace(quote_ident(:schema)) IS NOT NULL;

-- name: meta
-- What the store says of itself.
CREATE TABLE IF NOT EXISTS meta (name TEXT COLLATE "C" PRIMARY KEY, value TEXT NOT NULL);

-- name: has_tables
-- Whether a table of ours is there; others may share the schema.
SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = :schema AND tablename IN ('events', 'streams', 'sessions'));

-- name: remember
-- A word of the store about itself.
INSERT INTO meta (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: claim_orphans
-- Sessions whose owner's lease ran out go to the first worker that asks. An owner that renews at this very moment keeps them:
-- its row is locked and so passed over.
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
-- Sessions without an owner whose time has come, the longest due first; of agents that have a limit, only those
-- that it does not count.
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
-- Orphans and due sessions in one statement, where no agent has a limit.
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
-- The tasks of one agent that are due.
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
-- A session that is claimed by name, whether it is due or not, unless it has an owner or is over. An owner that
-- renews at this very moment keeps it. Who has a ticket gets it only as it was when it was offered. A plain `ended_at`
-- would have all open sessions read.
WITH dead AS MATERIALIZED (
    SELECT worker FROM workers WHERE alive_until < :now AND worker <> :worker
    AND worker = (SELECT owner FROM sessions WHERE session = :session) FOR SHARE SKIP LOCKED
)
UPDATE sessions SET owner = :worker, generation = generation + 1
WHERE session = :session AND format <= :format AND started_at > 0 AND COALESCE(ended_at, 0) = 0 AND :limit > 0
    AND (:generation::bigint IS NULL OR generation = :generation)
    AND (owner = '' OR owner IN (SELECT worker FROM dead))
RETURNING session, generation;

-- name: one_at_a_time
-- Counting before taking is done by one at a time.
SELECT pg_advisory_xact_lock(hashtextextended('halter claims ' || :schema, 0));

-- name: unless_another
-- One process offers at a time.
SELECT pg_try_advisory_xact_lock(hashtextextended('halter claims ' || :schema, 0));

-- name: rooms
-- How many more tasks of each agent may be awake: those that are owned count, and those that are on offer.
SELECT a.agent, a.most - (
    SELECT COUNT(*) FROM sessions s WHERE s.owner <> '' AND s.agent = a.agent AND s.kind <> 'autonomous'
) - (
    SELECT COUNT(*) FROM tickets t CROSS JOIN LATERAL (
        SELECT FROM sessions s WHERE s.session = t.session AND s.generation = t.generation
        AND s.owner = '' AND s.agent = a.agent AND s.kind <> 'autonomous' OFFSET 0
    ) AS on_offer
) FROM unnest(:agents, :most) AS a (agent, most);

-- name: offer_orphans
-- Sessions whose owner's lease ran out and that are not on offer. They are found by their owner: an agent's are too many.
SELECT s.session, s.generation, s.agent FROM sessions s JOIN workers w ON s.owner = w.worker
WHERE s.owner <> '' AND w.alive_until < :now AND s.format <= :format AND s.agent || '' = ANY(:agents::text[])
    AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
LIMIT :limit;

-- name: offer_due
-- Sessions without an owner whose time has come and that are not on offer, the longest due first.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format
    AND (s.kind = 'autonomous' AND s.agent = ANY(:limited::text[])
         OR s.agent = ANY(:agents::text[]) AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> ''))
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offer_tasks
-- The tasks of one agent that are due and not on offer.
SELECT s.session, s.generation, s.agent FROM sessions s
WHERE s.owner = '' AND s.due_at <= :now AND s.format <= :format AND s.agent = :agent
    AND s.kind <> 'autonomous' AND (s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT FROM tickets t WHERE t.session = s.session AND t.generation = s.generation)
ORDER BY s.due_at LIMIT :limit;

-- name: offered
-- What is on offer from now on.
INSERT INTO tickets (session, generation, at)
SELECT v.session, v.generation, :at FROM unnest(:sessions, :generations) AS v (session, generation) ORDER BY v.session
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
INSERT INTO workers (worker, alive_until, lapsed) VALUES (:worker, microseconds() + :lease, 0)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < microseconds() THEN microseconds() ELSE workers.lapsed END,
    alive_until = microseconds() + :lease
RETURNING alive_until - :lease AS now, lapsed + :lease >= alive_until - :lease;

-- name: renew_before_claim
-- A worker whose lease is half over lives on; else its heartbeat has just seen to that, and nothing need be written.
INSERT INTO workers (worker, alive_until, lapsed) SELECT :worker, microseconds() + :lease, 0
WHERE NOT EXISTS (SELECT FROM workers WHERE worker = :worker AND alive_until > microseconds() + :lease / 2)
ON CONFLICT (worker) DO UPDATE SET
    lapsed = CASE WHEN workers.alive_until < microseconds() THEN microseconds() ELSE workers.lapsed END,
    alive_until = microseconds() + :lease;

-- name: about
-- What a worker says of itself; those that have been gone for a day and left nothing behind are forgotten. One that was
-- forgotten while it was suspended may have begun a session since: named again, it can be found dead.
WITH gone AS (
    DELETE FROM workers w WHERE alive_until < :now - 86400000000 AND worker <> :worker
        AND NOT EXISTS (SELECT FROM sessions s WHERE s.owner = w.worker)
), unknown AS (
    INSERT INTO workers (worker, alive_until, lapsed)
    SELECT DISTINCT owner, :now + :lease, 0 FROM sessions WHERE owner <> '' ORDER BY owner ON CONFLICT (worker) DO NOTHING
)
UPDATE workers SET about = :about WHERE worker = :worker;

-- name: leave
-- A worker ends in good order: its leases are over at once.
UPDATE workers SET alive_until = 0 WHERE worker = :worker;

-- name: release
-- A worker gives one session back.
UPDATE sessions SET owner = '' WHERE session = :session AND owner = :worker AND generation = :generation;

-- name: owned
-- What a worker still owns.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '';

-- name: snapshots
-- The newest hot states of sessions that are still the worker's own, for failover and for screens elsewhere.
INSERT INTO snapshots (session, at, data)
SELECT s.session, :at, v.data FROM unnest(:sessions, :data) AS v (session, data)
CROSS JOIN LATERAL (SELECT own.session FROM sessions own WHERE own.session = v.session AND own.owner = :worker OFFSET 0) s
ORDER BY s.session
ON CONFLICT (session) DO UPDATE SET at = excluded.at, data = excluded.data;

-- name: read
-- Events of a stream, in order.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE stream = :stream AND seq > :after ORDER BY seq LIMIT :limit;

-- name: by_keys
-- Events that earlier writes of these keys appended.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash
FROM events WHERE key = ANY(:keys) ORDER BY position;

-- name: erase_bodies
-- The bodies and their salts go; the digests stay and keep the chain whole.
UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream AND seq <= :through;

-- name: keep_blobs
-- A writer that names an existing blob waits here for one that removes blobs, and the other way round.
LOCK TABLE blobs IN EXCLUSIVE MODE;

-- name: erase_blobs
-- Blobs that only erased events name; those of this erasure and of all that were recorded before it.
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
-- Blobs that were not put for a while and that nothing names: no session as its definition, and no event unless it
-- is erased.
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
-- What an erased session last saw is no body, but it is as private.
DELETE FROM snapshots WHERE session = :session;

-- name: put
-- A blob, once; that it was put again is noted by the hour, so that most often nothing has to be written.
INSERT INTO blobs (digest, data, put_at) VALUES (:digest, :data, microseconds())
ON CONFLICT (digest) DO UPDATE SET put_at = excluded.put_at WHERE excluded.put_at >= blobs.put_at + 3600000000;

-- name: missing_blobs
-- Which of these are not there; those that are stay until the transaction is over.
WITH kept AS MATERIALIZED (SELECT digest FROM blobs WHERE digest = ANY(:digests) FOR KEY SHARE)
SELECT wanted FROM unnest(:digests) AS wanted WHERE wanted NOT IN (SELECT digest FROM kept);

-- name: get
-- A blob.
SELECT data FROM blobs WHERE digest = :digest;

-- name: take_time
-- This one transaction may stand still for as long as its rows take to be made.
SELECT set_config('idle_in_transaction_session_timeout', '0', true);

-- name: keep_out
-- Readers go on, writers wait. Every write locks its stream first, so this order meets none of them half-way.
LOCK TABLE streams, sessions, budgets, holds, spends, events IN EXCLUSIVE MODE;

-- name: look
-- One moment of the store, for as long as it is looked at.
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;

-- name: hide_document
-- A document is gone, even if some of its chunks are left.
DELETE FROM library WHERE document = :document;

-- name: drop_chunks
-- Some of a document's chunks and their words.
DELETE FROM chunks WHERE document = :document
AND number IN (SELECT number FROM chunks WHERE document = :document ORDER BY number LIMIT :limit);

-- name: add_chunks
-- Pieces of a document, unless another process has just written them.
INSERT INTO chunks (document, number, start, "end", text, words)
SELECT :document, v.number, v.start, v.stop, v.text, v.words::tsvector
FROM unnest(:numbers, :starts, :ends, :texts, :words) AS v (number, start, stop, text, words) ORDER BY v.number
ON CONFLICT (document, number) DO NOTHING;

-- name: show_document
-- A document is there if all of its chunks are.
INSERT INTO library (document)
SELECT :document WHERE (SELECT COUNT(*) FROM chunks WHERE document = :document) = :count
ON CONFLICT (document) DO NOTHING;

-- name: search
-- The chunks of some documents that fit, the best first.
SELECT document, number, start, "end", text, ts_rank(words, :query::tsquery)::float8 AS fit
FROM chunks JOIN library USING (document) WHERE words @@ :query::tsquery AND document = ANY(:documents)
ORDER BY fit DESC, document, number LIMIT :limit;

-- name: indexed
-- Which of these documents are there.
SELECT document FROM library WHERE document = ANY(:documents);

-- name: chunks
-- A document's chunks, in order.
SELECT document, number, start, "end", text FROM chunks JOIN library USING (document)
WHERE document = :document ORDER BY number;
