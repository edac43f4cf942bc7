-- name: sessions
-- Sessions whose id matches, the newest first.
SELECT session, agent || ', ' || state FROM sessions WHERE session GLOB :like ORDER BY started_at DESC LIMIT :limit;

-- name: agents
-- Agents that were switched on or off, or had a session.
SELECT agent, '' FROM (SELECT agent FROM agents UNION SELECT agent FROM sessions)
WHERE agent GLOB :like ORDER BY agent LIMIT :limit;

-- name: decisions
-- Pending decisions, the newest first.
SELECT decision, about || ' ' || name FROM decisions
WHERE verdict = '' AND decision GLOB :like ORDER BY asked_at DESC LIMIT :limit;

-- name: triggers
-- Triggers that have not ended.
SELECT trigger, type FROM triggers WHERE ended_at IS NULL AND trigger GLOB :like ORDER BY trigger LIMIT :limit;

-- name: rules
-- Rules that have not ended.
SELECT rule, tool FROM rules WHERE ended_at IS NULL AND rule GLOB :like ORDER BY made_at DESC LIMIT :limit;

-- name: findings
-- Findings not yet accepted or dismissed.
SELECT finding, severity || ', ' || agent FROM findings
WHERE status = '' AND finding GLOB :like ORDER BY emitted_at DESC LIMIT :limit;

-- name: proposals
-- Proposals not yet accepted or dismissed.
SELECT id, agent FROM (
    SELECT memory AS id, agent, proposed_at AS at FROM memories WHERE status = ''
    UNION ALL SELECT precedent, agent, last_at FROM precedents WHERE status = ''
) WHERE id GLOB :like ORDER BY at DESC LIMIT :limit;
