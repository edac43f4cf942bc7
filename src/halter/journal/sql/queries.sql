-- Read-only questions that both dialects understand.

-- name: streams
-- Every stream that has a head or an event: one without the other is a sign of tampering.
SELECT stream FROM streams UNION SELECT DISTINCT stream FROM events ORDER BY stream;

-- name: sessions
-- All sessions, newest first.
SELECT * FROM sessions ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: session
-- One session.
SELECT * FROM sessions WHERE session = :session;

-- name: ended_before
-- Sessions that ended before a time, for retention.
SELECT * FROM sessions WHERE ended_at IS NOT NULL AND ended_at < :before ORDER BY ended_at;

-- name: budgets
-- What stands against every cap; those with the most recent windows last.
SELECT * FROM budgets ORDER BY scope, "window", unit;

-- name: holds
-- What is held, the oldest first.
SELECT * FROM holds ORDER BY at, hold;

-- name: holds_of
-- What one session holds.
SELECT * FROM holds WHERE session = :session ORDER BY at, hold;

-- name: newest_costs
-- The newest settled costs of a tool, or of a model for one purpose.
SELECT usd FROM spends WHERE name = :name AND purpose = :purpose AND at >= :since ORDER BY at DESC LIMIT :limit;

-- name: spent_by_purpose
-- What was spent since a time, told apart by agent, purpose and name.
SELECT agent, purpose, name, COUNT(*) AS spends, SUM(usd) AS usd,
       SUM(input_tokens) AS input_tokens, SUM(output_tokens) AS output_tokens,
       SUM(cache_read_tokens) AS cache_read_tokens
FROM spends WHERE at >= :since GROUP BY agent, purpose, name ORDER BY SUM(usd) DESC;

-- name: heads
-- Where every stream stands.
SELECT * FROM streams ORDER BY stream;

-- name: all_sessions
-- Every session row.
SELECT * FROM sessions ORDER BY session;

-- name: all_spends
-- Every spend.
SELECT * FROM spends ORDER BY hold;

-- name: counts
-- How much there is.
SELECT (SELECT COUNT(*) FROM events) AS events, (SELECT COUNT(*) FROM streams) AS streams,
       (SELECT COUNT(*) FROM sessions) AS sessions, (SELECT COUNT(*) FROM holds) AS holds,
       (SELECT COUNT(*) FROM blobs) AS blobs;

-- name: meta
-- What the store says of itself.
SELECT name, value FROM meta ORDER BY name;
