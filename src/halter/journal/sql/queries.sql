-- Read-only queries that both dialects understand.

-- name: streams
-- Every stream with a head or an event: one without the other is a sign of tampering.
SELECT stream FROM streams UNION SELECT DISTINCT stream FROM events ORDER BY stream;

-- name: sessions
-- The sessions that started since a time, the newest first.
SELECT * FROM sessions WHERE started_at >= :since ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: session
-- One session.
SELECT * FROM sessions WHERE session = :session;

-- name: sessions_named
-- The sessions whose id begins with a text: from that text to the first text after all with this prefix.
SELECT * FROM sessions WHERE session >= :from AND session < :to AND started_at > 0 AND (:agent = '' OR agent = :agent)
ORDER BY session LIMIT :limit;

-- name: sessions_called
-- The sessions whose id begins with a text, ignoring case.
SELECT * FROM sessions WHERE substr(lower(session), 1, length(:beginning)) = :beginning ORDER BY session LIMIT 2;

-- name: agents_seen
-- Every agent that ever had a session, with one index lookup for each.
WITH RECURSIVE seen(agent) AS (
    SELECT MIN(agent) FROM sessions
    UNION ALL
    SELECT (SELECT MIN(s.agent) FROM sessions s WHERE s.agent > seen.agent) FROM seen WHERE seen.agent IS NOT NULL
)
SELECT agent FROM seen WHERE agent IS NOT NULL;

-- name: sessions_under_way
-- Every session that has not ended, the newest first.
SELECT * FROM sessions WHERE ended_at IS NULL AND +started_at > 0 ORDER BY +started_at DESC, session DESC;

-- name: sessions_that_return
-- How many sessions a halt of the whole fleet affects, up to a limit.
SELECT COUNT(*) AS sessions FROM (
    SELECT session FROM sessions WHERE ended_at IS NULL
    UNION ALL SELECT session FROM sessions WHERE ended_at IS NOT NULL AND state = 'HALTED' LIMIT :limit
) AS kept_back;

-- name: ran_as
-- One session of a trigger or of an agent, if there is any.
SELECT session FROM sessions WHERE trigger = :trigger AND trigger <> '' OR agent = :agent LIMIT 1;

-- name: ended_before
-- The sessions that ended before a time, for retention.
SELECT * FROM sessions WHERE ended_at IS NOT NULL AND ended_at < :before ORDER BY ended_at;

-- name: budgets
-- Every account, in use now or before.
SELECT * FROM budgets ORDER BY scope, "window", unit;

-- name: budgets_of
-- The accounts of one scope, in use now or before.
SELECT * FROM budgets WHERE scope = :scope ORDER BY "window", unit;

-- name: budgets_now
-- The accounts that matter now: of recent windows, of sessions that have not ended, and of those that ended last. A
-- slash sorts before a zero, so `hour0` comes after every hour.
SELECT * FROM budgets WHERE "window" >= :hour AND "window" < 'hour0'
UNION ALL SELECT * FROM budgets WHERE "window" >= :day AND "window" < 'day0'
UNION ALL SELECT * FROM budgets WHERE "window" >= :month AND "window" < 'month0'
UNION ALL SELECT * FROM budgets WHERE "window" = 'minute'
UNION ALL SELECT * FROM budgets WHERE "window" = '' AND scope < 'session:'
UNION ALL SELECT * FROM budgets WHERE "window" = '' AND scope >= 'session;'
UNION ALL SELECT b.* FROM sessions s JOIN budgets b ON b.scope = 'session:' || s.session AND b."window" = ''
    WHERE s.ended_at IS NULL
UNION ALL SELECT b.* FROM (
    SELECT session FROM sessions WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT :ended
) newest JOIN budgets b ON b.scope = 'session:' || newest.session AND b."window" = '';

-- name: holds
-- Every hold, the oldest first.
SELECT * FROM holds ORDER BY at, hold;

-- name: hold
-- One hold.
SELECT * FROM holds WHERE hold = :hold;

-- name: holds_of
-- The holds of one session.
SELECT * FROM holds WHERE session = :session ORDER BY at, hold;

-- name: newest_costs
-- The newest settled costs of a tool, or of a model for one purpose.
SELECT usd FROM spends WHERE name = :name AND purpose = :purpose AND at >= :since ORDER BY at DESC LIMIT :limit;

-- name: spent_by_purpose
-- The spending since a time, by agent, purpose and name.
SELECT agent, purpose, name, COUNT(*) AS spends, CAST(SUM(usd) AS BIGINT) AS usd,
       CAST(SUM(input_tokens) AS BIGINT) AS input_tokens, CAST(SUM(output_tokens) AS BIGINT) AS output_tokens,
       CAST(SUM(cache_read_tokens) AS BIGINT) AS cache_read_tokens
FROM spends WHERE at >= :since GROUP BY agent, purpose, name ORDER BY SUM(usd) DESC;

-- name: spent_by_name
-- The spending of an agent since its start, by name.
SELECT name, CAST(SUM(usd) AS BIGINT) AS usd FROM spends WHERE agent = :agent GROUP BY name ORDER BY name;

-- name: head
-- The head of one stream.
SELECT * FROM streams WHERE stream = :stream;

-- name: heads
-- The head of every stream.
SELECT * FROM streams ORDER BY stream;

-- name: extent
-- The number of streams, their total length, and the time of the newest event.
SELECT COUNT(*) AS streams, CAST(COALESCE(SUM(head), 0) AS BIGINT) AS length, COALESCE(MAX(at), 0) AS at FROM streams;

-- name: all_sessions
-- Every session row.
SELECT * FROM sessions ORDER BY session;

-- name: all_budgets
-- Every budget row.
SELECT * FROM budgets ORDER BY scope, "window", unit;

-- name: all_holds
-- Every hold.
SELECT * FROM holds ORDER BY hold;

-- name: all_halts
-- Every scope that is or was halted.
SELECT * FROM halts ORDER BY scope;

-- name: halts_of
-- The halts of some scopes, also lifted ones. Every cancelled session leaves a halt, so no session reads all of them.
SELECT * FROM halts WHERE scope IN (SELECT value FROM json_each(:scopes)) ORDER BY scope;

-- name: halted_of_worker
-- A halt that applies to a session of this worker.
SELECT halts.scope FROM sessions JOIN halts ON halts.halted = 1 AND halts.scope IN (
    'fleet', 'agent:' || sessions.agent, 'trigger:' || sessions.trigger, 'session:' || sessions.session)
WHERE sessions.owner = :worker AND sessions.owner <> '' AND sessions.ended_at IS NULL
ORDER BY halts.scope LIMIT 1;

-- name: halts_standing
-- The halts in force that can be lifted.
SELECT * FROM halts WHERE halted = 1 AND cancels = 0 ORDER BY scope;

-- name: halts_since
-- The halts in force that can be lifted, and those set or lifted since a time. ORDER BY would scan an index.
SELECT * FROM halts WHERE halted = 1 AND cancels = 0
UNION ALL SELECT * FROM halts WHERE at >= :since AND NOT (halted = 1 AND cancels = 0);

-- name: all_rates
-- Every slot of every rate.
SELECT * FROM rates ORDER BY agent, tool, slice;

-- name: all_decisions
-- Every decision.
SELECT * FROM decisions ORDER BY decision;

-- name: all_audit
-- Every audit row.
SELECT * FROM audit ORDER BY call;

-- name: asked_about_servers
-- Every decision about the servers of an agent, for this version or an earlier one.
SELECT * FROM decisions WHERE agent = :agent AND about IN ('changed_tool', 'changed_server') ORDER BY asked_at, decision;

-- name: waiting_about_servers
-- The pending decisions about the servers of an agent.
SELECT * FROM decisions
WHERE verdict = '' AND agent = :agent AND about IN ('changed_tool', 'changed_server') ORDER BY asked_at, decision;

-- name: open_decisions
-- The pending decisions, the oldest first, except those of ended sessions. One that was asked in quiet hours is listed
-- when they have ended, and without `now`. Its time is not that of its event; that of a process whose clock is ahead is.
-- The text of a proposal is that of the session that made it, and is erased with it. `said` is the reply of the model that made the call: the last one before
-- its first attempt, since a call may wait for the end of its turn before a person is asked. A plain `k.stream` would
-- scan the session from its beginning.
SELECT d.*, e.body, e.facts, w.body AS proposed, p.kind, r.body AS said, h.legs FROM decisions d
LEFT JOIN holds h ON h.hold = d.decision
LEFT JOIN events e
    ON e.stream = CASE d.session WHEN '' THEN 'fleet' ELSE 'session:' || d.session END AND e.seq = d.asked_seq
LEFT JOIN sessions s ON s.session = d.session
LEFT JOIN memories m ON d.about = 'proposal' AND m.memory = d.subject
LEFT JOIN precedents p ON d.about = 'proposal' AND p.precedent = d.subject
LEFT JOIN events w
    ON w.stream = 'session:' || COALESCE(m.session, p.session) AND w.seq = COALESCE(m.proposed_seq, p.proposed_seq)
LEFT JOIN events r ON d.session <> '' AND r.stream = 'session:' || d.session AND r.seq = (
    SELECT x.seq FROM events x
    WHERE x.stream = 'session:' || d.session AND x.kind = 'request_settled' AND x.seq < COALESCE((
        SELECT MIN(k.seq) FROM events k WHERE k.key = d.subject || '/asked/0' AND k.stream || '' = 'session:' || d.session
    ), d.asked_seq)
    ORDER BY x.seq DESC LIMIT 1
)
WHERE d.verdict = '' AND d.expires_at > :now AND d.about <> '' AND s.ended_at IS NULL
    AND (:now = 0 OR d.asked_at <= :now OR d.asked_at = e.at)
ORDER BY d.asked_at, d.decision;

-- name: open_questions
-- The sessions that wait for an answer and are no chats, each with its last call.
SELECT s.session, s.agent, e.version, e.facts, e.body FROM sessions s
LEFT JOIN events e ON e.stream = 'session:' || s.session AND e.seq = (
    SELECT x.seq FROM events x WHERE x.stream = 'session:' || s.session AND x.kind = 'call_started'
    ORDER BY x.seq DESC LIMIT 1
)
WHERE s.state = 'WAITING_FOR_INPUT' AND s.ended_at IS NULL AND +s.started_at > 0
    AND (s.kind IN ('autonomous', 'task') OR s.trigger <> '' OR s.parent <> '')
ORDER BY s.agent, s.session;

-- name: budget
-- One account.
SELECT * FROM budgets WHERE scope = :scope AND "window" = :window AND unit = :unit;

-- name: questions_of
-- The pending decisions of a session, and those that still hold money. ORDER BY would scan another index.
SELECT d.decision, h.legs FROM decisions d LEFT JOIN holds h ON h.hold = d.decision
WHERE d.verdict = '' AND d.expires_at > :now AND d.session = :session
UNION SELECT d.decision, h.legs FROM holds h JOIN decisions d ON d.decision = h.hold WHERE h.session = :session;

-- name: expired_holds
-- What expired decisions still hold.
SELECT h.* FROM holds h JOIN decisions d ON d.decision = h.hold WHERE d.expires_at <= :now ORDER BY h.hold;

-- name: decision
-- One decision, in any state.
SELECT * FROM decisions WHERE decision = :decision;

-- name: all_rules
-- Every rule.
SELECT * FROM rules ORDER BY rule;

-- name: rules_of
-- The rules that may approve a call of a tool, for its session, its agent or every agent: those that match exactly its
-- arguments, and all others except the many that match by `same`. Of a `same` matcher, the first hundred characters are
-- everything.
SELECT * FROM rules WHERE tool = :tool AND owner IN (:session, :agent, '') AND ended_at IS NULL AND expires_at > :now
    AND substr(matcher, 1, 100) = :same
UNION ALL
SELECT * FROM rules WHERE tool = :tool AND owner IN (:session, :agent, '') AND ended_at IS NULL AND expires_at > :now
    AND substr(matcher, 1, 100) < '{"by":"same",'
UNION ALL
SELECT * FROM rules WHERE tool = :tool AND owner IN (:session, :agent, '') AND ended_at IS NULL AND expires_at > :now
    AND substr(matcher, 1, 100) >= '{"by":"same"-'
ORDER BY rule;

-- name: all_pins
-- The versions of MCP tools that each agent may use.
SELECT * FROM pins ORDER BY agent, tool;

-- name: all_agents
-- Every agent that was switched on or off.
SELECT * FROM agents ORDER BY agent;

-- name: all_fleet_policy
-- The policy that binds every process on the store.
SELECT * FROM fleet_policy ORDER BY scope;

-- name: snapshot
-- The latest hot-state snapshot of a session.
SELECT at, data FROM snapshots WHERE session = :session;

-- name: next_look
-- When the next session without an owner is due, and when the leases of the next other worker with sessions expire.
SELECT (SELECT MIN(due_at) FROM sessions WHERE owner = '' AND due_at > :now) AS due_at,
    (SELECT MIN(w.alive_until) FROM workers w WHERE w.alive_until >= :now AND w.worker <> :worker
        AND EXISTS (SELECT 1 FROM sessions s WHERE s.owner = w.worker AND s.owner <> '')) AS lapses_at;

-- name: owned_by
-- The sessions of a worker.
SELECT session, generation FROM sessions WHERE owner = :worker AND owner <> '' ORDER BY session;

-- name: all_workers
-- Every worker, including those that ended recently.
SELECT worker, alive_until, about FROM workers ORDER BY worker;

-- name: late
-- The overdue sessions of each agent: due before a time without an owner, or with an owner whose lease expired before
-- it. Their number, and since when.
SELECT s.agent, COUNT(*) AS sessions, MIN(CASE s.owner WHEN '' THEN s.due_at ELSE NULLIF(w.alive_until, 0) END) AS since
FROM sessions s LEFT JOIN workers w ON w.worker = s.owner
WHERE s.ended_at IS NULL AND (s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND (s.owner = '' AND s.due_at < :before OR s.owner <> '' AND w.alive_until < :before)
GROUP BY s.agent ORDER BY s.agent;

-- name: sessions_of
-- The sessions of one agent and kind, the newest first.
SELECT * FROM sessions WHERE agent = :agent AND kind = :kind ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: all_triggers
-- Every trigger row.
SELECT * FROM triggers ORDER BY trigger;

-- name: all_items
-- Every item row.
SELECT * FROM items ORDER BY trigger, item;

-- name: all_outputs
-- Every output row.
SELECT * FROM outputs ORDER BY agent, digest;

-- name: all_findings
-- Every finding row.
SELECT * FROM findings ORDER BY finding;

-- name: all_memories
-- Every memory row.
SELECT * FROM memories ORDER BY memory;

-- name: all_precedents
-- Every precedent row.
SELECT * FROM precedents ORDER BY precedent;

-- name: all_notifications
-- Every notification row.
SELECT * FROM notifications ORDER BY notification;

-- name: triggers_of
-- The triggers of one agent.
SELECT * FROM triggers WHERE agent = :agent AND ended_at IS NULL ORDER BY trigger;

-- name: trigger
-- One trigger.
SELECT * FROM triggers WHERE trigger = :trigger;

-- name: items_of
-- The documents of a watch, each with the state of its newest session.
SELECT i.*, s.state, s.ended_at, s.terminal_reason FROM items i LEFT JOIN sessions s ON s.session = i.session
WHERE i.trigger = :trigger ORDER BY i.seen_at, i.name, i.item;

-- name: items_open
-- The documents of a watch that are not completed, each with the state of its newest session.
SELECT i.*, s.state, s.ended_at, s.terminal_reason FROM items i LEFT JOIN sessions s ON s.session = i.session
WHERE i.trigger = :trigger AND i.ignored = 0 AND (i.quarantined_at IS NOT NULL OR s.state IS NULL OR s.state <> 'COMPLETED')
ORDER BY i.seen_at, i.name, i.item;

-- name: items_of_session
-- The documents of a session.
SELECT * FROM items WHERE session = :session AND session <> '' ORDER BY seen_at, name, item;

-- name: open_runs
-- The sessions of a trigger that have not ended. A plain `started_at` would scan those that have, in order.
SELECT * FROM sessions WHERE trigger = :trigger AND trigger <> '' AND ended_at IS NULL AND +started_at > 0
ORDER BY +started_at, session;

-- name: open_tasks
-- The triggered sessions of an agent that have not ended; the plus as in `open_runs`.
SELECT * FROM sessions WHERE agent = :agent AND trigger <> '' AND ended_at IS NULL AND +started_at > 0
ORDER BY +started_at, session;

-- name: untold_ends
-- The unattended sessions that ended badly and were not reported yet.
SELECT session, agent, state, terminal_reason, ended_at FROM sessions s
WHERE ended_at >= :since AND state NOT IN ('COMPLETED', 'CANCELLED')
    AND (kind = 'autonomous' OR trigger <> '' OR parent <> '')
    AND NOT EXISTS (
        SELECT 1 FROM notifications n WHERE n.about = 'ended:' || s.session || ':' || CAST(s.ended_at AS TEXT)
    )
ORDER BY ended_at, session;

-- name: untold_waits
-- The things that unattended sessions wait for and that were not reported yet.
SELECT 'waiting:' || d.decision AS about, d.session, d.agent, d.about AS what, d.name FROM decisions d
LEFT JOIN sessions s ON s.session = d.session
LEFT JOIN events e
    ON e.stream = CASE d.session WHEN '' THEN 'fleet' ELSE 'session:' || d.session END AND e.seq = d.asked_seq
WHERE d.verdict = '' AND d.about NOT IN ('', 'proposal') AND d.expires_at > :now AND s.ended_at IS NULL
    AND (d.asked_at <= :now OR d.asked_at = e.at)
    AND (d.session = '' OR s.kind = 'autonomous' OR s.trigger <> '' OR s.parent <> '')
    AND NOT EXISTS (SELECT 1 FROM notifications n WHERE n.about = 'waiting:' || d.decision)
UNION ALL
SELECT 'asks:' || session || ':' || CAST(generation AS TEXT), session, agent, 'question', '' FROM sessions s
WHERE state IN ('WAITING_FOR_INPUT', 'PAUSED') AND ended_at IS NULL AND owner = ''
    AND (kind = 'autonomous' OR trigger <> '' OR parent <> '')
    AND NOT EXISTS (
        SELECT 1 FROM notifications n WHERE n.about = 'asks:' || s.session || ':' || CAST(s.generation AS TEXT)
    )
ORDER BY about;

-- name: untold_items
-- The quarantined documents that were not reported yet.
SELECT i.trigger, i.item, t.agent, i.name, i.sentence, i.quarantined_at FROM items i JOIN triggers t ON t.trigger = i.trigger
WHERE i.quarantined_at >= :since AND i.ignored = 0
    AND NOT EXISTS (
        SELECT 1 FROM notifications n
        WHERE n.about = 'quarantined:' || i.trigger || ':' || i.item || ':' || CAST(i.quarantined_at AS TEXT)
    )
ORDER BY i.quarantined_at, i.item;

-- name: open_outages
-- The sessions whose model is unavailable, the longest first.
SELECT o.* FROM outages o JOIN sessions s ON s.session = o.session
WHERE o.ended_at IS NULL AND s.ended_at IS NULL ORDER BY o.began_at, o.session;

-- name: attempts_of
-- The newest ended sessions of a trigger, without those that a person stopped, each with the document of a watch whose
-- newest session it is.
SELECT s.*, COALESCE((SELECT MIN(i.item) FROM items i WHERE i.session = s.session AND i.session <> ''), '') AS item
FROM sessions s
WHERE s.trigger = :trigger AND s.trigger <> '' AND s.started_at > 0 AND s.ended_at IS NOT NULL
    AND s.state NOT IN ('HALTED', 'CANCELLED')
ORDER BY s.started_at DESC, s.session DESC LIMIT :limit;

-- name: progress_of
-- The newest turns, calls and caps of a session, with the arguments of its calls.
SELECT kind, version, facts, body, blob FROM events
WHERE stream = :stream
    AND kind IN ('turn_ended', 'call_started', 'call_settled', 'cost_cap_reached', 'decision_asked')
ORDER BY seq DESC LIMIT :limit;

-- name: newest_attempts
-- The newest session of each trigger and of each autonomous agent that is on, if it did not complete.
SELECT s.* FROM triggers t JOIN agents a ON a.agent = t.agent JOIN sessions s ON s.session = t.session
WHERE a.switched_on = 1 AND t.ended_at IS NULL AND s.state <> 'COMPLETED'
UNION ALL
SELECT s.* FROM agents a JOIN sessions s ON s.session = (
    SELECT l.session FROM sessions l WHERE l.agent = a.agent AND l.kind = 'autonomous' AND l.started_at > 0
    ORDER BY l.started_at DESC, l.session DESC LIMIT 1
)
WHERE a.switched_on = 1 AND s.state <> 'COMPLETED';

-- name: all_outages
-- Every session whose model was ever unavailable.
SELECT * FROM outages ORDER BY session;

-- name: outage_notices
-- The notifications about outages and their ends since a time.
SELECT agent, about, queued_at FROM notifications
WHERE queued_at >= :since AND (about LIKE 'outage:%' OR about LIKE 'outage_over:%') ORDER BY queued_at, notification;

-- name: run_by_key
-- The run that a write with this key started.
SELECT version, facts FROM events WHERE key = :key AND kind = 'run_started';

-- name: open_of
-- The sessions of one agent that have not ended, the newest first; the plus as in `open_runs`.
SELECT * FROM sessions WHERE agent = :agent AND ended_at IS NULL AND +started_at > 0
ORDER BY +started_at DESC, session DESC LIMIT :limit;

-- name: ended_of
-- The ended sessions of one agent, the newest first.
SELECT * FROM sessions WHERE agent = :agent AND ended_at IS NOT NULL
ORDER BY ended_at DESC, session DESC LIMIT :limit;

-- name: open_children
-- The sub-sessions of a session that have not ended.
SELECT * FROM sessions WHERE parent = :session AND parent <> '' AND ended_at IS NULL AND +started_at > 0
ORDER BY +started_at, session;

-- name: task_costs
-- The costs of an agent's newest ended tasks.
SELECT CAST(COALESCE(b.spent, 0) AS BIGINT) AS usd FROM sessions s
LEFT JOIN budgets b ON b.scope = 'session:' || s.session AND b."window" = '' AND b.unit = 'usd'
WHERE s.agent = :agent AND s.kind = 'task' AND s.started_at >= :since AND s.ended_at IS NOT NULL
ORDER BY s.started_at DESC, s.session DESC LIMIT :limit;

-- name: told_in_app
-- The notifications in the app since a time with their texts, the newest first.
SELECT n.notification, n.agent, n.about, n.queued_at, n.stream, e.body, e.blob FROM notifications n
LEFT JOIN events e ON e.stream = n.stream AND e.seq = n.queued_seq
WHERE n.channel = 'in_app' AND n.queued_at >= :since ORDER BY n.queued_at DESC, n.notification LIMIT :limit;

-- name: trigger_costs
-- The costs of the newest ended sessions of a trigger.
SELECT CAST(COALESCE(b.spent, 0) AS BIGINT) AS usd FROM sessions s
LEFT JOIN budgets b ON b.scope = 'session:' || s.session AND b."window" = '' AND b.unit = 'usd'
WHERE s.trigger = :trigger AND s.trigger <> '' AND s.started_at >= :since AND s.ended_at IS NOT NULL
ORDER BY s.started_at DESC LIMIT :limit;

-- name: kept_context
-- The accepted memories of an agent, the oldest first, then its accepted precedents, the most frequent first, with
-- their texts.
SELECT k.id, k.kind, k.observed_count, k.is_case, e.body, e.blob FROM (
    SELECT memory AS id, '' AS kind, 0 AS observed_count, 0 AS is_case, proposed_at AS place, 0 AS since,
           session, proposed_seq
    FROM memories WHERE agent = :agent AND status = 'kept'
    UNION ALL
    SELECT precedent, kind, observed_count, 1, -observed_count, first_at, session, proposed_seq
    FROM precedents WHERE agent = :agent AND status = 'kept'
) k
LEFT JOIN events e ON e.stream = 'session:' || k.session AND e.seq = k.proposed_seq
ORDER BY k.is_case, k.place, k.since, k.id;

-- name: findings_of
-- The findings of a session in order, with their texts.
SELECT f.*, e.body, e.blob FROM findings f
LEFT JOIN events e ON e.stream = 'session:' || f.session AND e.seq = f.emitted_seq
WHERE f.session = :session ORDER BY f.emitted_seq;

-- name: findings_said
-- The findings of all sessions with their texts, the newest first.
SELECT f.*, e.body, e.blob FROM findings f
LEFT JOIN events e ON e.stream = 'session:' || f.session AND e.seq = f.emitted_seq
WHERE f.emitted_at > 0 AND (:agent = '' OR f.agent = :agent) ORDER BY f.emitted_at DESC, f.finding LIMIT :limit;

-- name: finding_named
-- The findings whose id begins with a text, with their texts.
SELECT f.*, e.body, e.blob FROM findings f
LEFT JOIN events e ON e.stream = 'session:' || f.session AND e.seq = f.emitted_seq
WHERE f.finding >= :from AND f.finding < :to AND f.emitted_at > 0 ORDER BY f.finding LIMIT :limit;

-- name: memories_said
-- The proposed memories with their texts, the newest first.
SELECT m.*, e.body, e.blob FROM memories m
LEFT JOIN events e ON e.stream = 'session:' || m.session AND e.seq = m.proposed_seq
WHERE m.proposed_at > 0 ORDER BY m.proposed_at DESC, m.memory LIMIT :limit;

-- name: precedents_said
-- The precedents with their texts, those observed last first.
SELECT p.*, e.body, e.blob FROM precedents p
LEFT JOIN events e ON e.stream = 'session:' || p.session AND e.seq = p.proposed_seq
WHERE p.observed_count > 0 ORDER BY p.last_at DESC, p.precedent LIMIT :limit;

-- name: notifications_due
-- The notifications to send now, the oldest first. The plus avoids the index by time, which contains every notification
-- ever sent.
SELECT n.*, e.body, e.blob FROM notifications n
LEFT JOIN events e ON e.stream = n.stream AND e.seq = n.queued_seq
WHERE +n.queued_at > 0 AND n.sent_at IS NULL AND n.gave_up = 0 AND (n.next_at IS NULL OR n.next_at <= :now)
ORDER BY +n.queued_at, n.notification LIMIT :limit;

-- name: notification
-- One notification.
SELECT * FROM notifications WHERE notification = :notification;

-- name: next_notification
-- When the next failed notification is retried.
SELECT MIN(next_at) AS next_at FROM notifications WHERE sent_at IS NULL AND gave_up = 0 AND next_at > :now;

-- name: audit_since
-- The audit after a time and a call, in pages, with the bodies that are not erased.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE (a.created_at, a.call) > (:since, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at, a.call LIMIT :limit;

-- name: audit_of
-- The audit of one call, with the bodies that are not erased.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE a.call = :call;

-- name: start_of
-- The first event of a session, with the type of its trigger.
SELECT s.agent, s.parent, s.trigger, t.type AS trigger_type, e.kind, e.version, e.facts
FROM sessions s JOIN events e ON e.stream = 'session:' || s.session AND e.seq = 1
LEFT JOIN triggers t ON t.trigger = s.trigger
WHERE s.session = :session;

-- name: all_spends
-- Every spend.
SELECT * FROM spends ORDER BY hold;

-- name: events_of
-- The stored events of one stream after a position in it, including those with the same number.
SELECT stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, hash, position
FROM events WHERE stream = :stream AND seq >= :seq AND (seq > :seq OR position > :position)
ORDER BY seq, position LIMIT :limit;

-- name: events_in_order
-- All events in the order of their commits after a position, with bodies only of calls, decisions and triggers.
SELECT stream, seq, kind, version, at, generation, key, blob, facts,
    CASE WHEN kind IN ('call_started', 'call_refused', 'decision_asked', 'trigger_made') THEN body END, position
FROM events WHERE position > :position ORDER BY position LIMIT :limit;

-- name: any_event
-- One event, if there is any.
SELECT seq FROM events LIMIT 1;

-- name: hash_of
-- The hash of one event.
SELECT hash FROM events WHERE stream = :stream AND seq = :seq;

-- name: same_hash
-- The positions of all events with this hash.
SELECT stream, seq FROM events WHERE hash = :hash ORDER BY stream, seq LIMIT :limit;

-- name: erasures
-- The events that record which bodies were erased on purpose.
SELECT version, facts FROM events WHERE stream = 'fleet' AND kind = 'bodies_erased' ORDER BY seq;

-- name: counts
-- The sizes of the tables.
SELECT (SELECT COUNT(*) FROM events) AS events, (SELECT COUNT(*) FROM streams) AS streams,
       (SELECT COUNT(*) FROM sessions) AS sessions, (SELECT COUNT(*) FROM holds) AS holds,
       (SELECT COUNT(*) FROM blobs) AS blobs;

-- name: meta
-- The id and the schema version of the store.
SELECT name, value FROM meta ORDER BY name;

-- name: children_of
-- The sub-sessions of a session, the oldest first.
SELECT * FROM sessions WHERE parent = :session AND parent <> '' ORDER BY started_at, session;

-- name: sessions_since
-- The sessions that started or ended since a time, or have not ended. The plus avoids the index by time.
SELECT * FROM sessions WHERE ended_at IS NULL AND +started_at > 0
UNION SELECT * FROM sessions WHERE ended_at >= :since AND +started_at > 0
UNION SELECT * FROM sessions WHERE started_at >= :since AND started_at > 0
ORDER BY started_at, session;

-- name: ends_since
-- The number of sessions that ended alike since a time, and the last of each. The empty text avoids the index by agent.
SELECT g.*, (
    SELECT MAX(s.session) FROM sessions s WHERE s.agent = g.agent AND s.ended_at = g.at AND s.terminal_reason = g.terminal_reason
) AS session FROM (
    SELECT MIN(agent) AS agent, state, terminal_reason, COUNT(*) AS count, MAX(ended_at) AS at FROM sessions
    WHERE ended_at >= :since GROUP BY agent || '', state, terminal_reason
) g ORDER BY g.at DESC LIMIT :limit;

-- name: answers_since
-- How often the same person gave the same answer to an agent since a time, and the last answer of each.
SELECT g.*, (
    SELECT MAX(d.session) FROM decisions d WHERE d.decided_at = g.at AND d.agent = g.agent AND d.name = g.name
) AS session FROM (
    SELECT "by", agent, name, CASE verdict WHEN 'deny' THEN 1 ELSE 0 END AS denied, COUNT(*) AS count,
           MAX(decided_at) AS at FROM decisions
    WHERE decided_at IS NOT NULL AND decided_at >= :since AND about <> '' GROUP BY 1, 2, 3, 4
) g ORDER BY g.at DESC LIMIT :limit;

-- name: halts_told
-- The halts in force that can be lifted, and those lifted since a time. ORDER BY would scan an index.
SELECT * FROM halts WHERE halted = 1 AND cancels = 0
UNION ALL SELECT * FROM halts WHERE at >= :since AND halted = 0 AND cancels = 0;

-- name: triggered_since
-- The events of triggers since a time, each stream in order.
SELECT stream, at, kind, version, facts FROM events
WHERE stream >= 'trigger:' AND stream < 'trigger;' AND at >= :since ORDER BY stream, seq;

-- name: items_left
-- The quarantined documents.
SELECT * FROM items WHERE quarantined_at IS NOT NULL ORDER BY quarantined_at, "trigger", item;

-- name: findings_since
-- The findings since a time.
SELECT * FROM findings WHERE emitted_at >= :since ORDER BY emitted_at, finding;

-- name: proposals_open
-- The number of undecided findings and proposals.
SELECT (SELECT COUNT(*) FROM findings WHERE +emitted_at > 0 AND status = '' AND review <> 'withheld') AS findings,
       (SELECT COUNT(*) FROM memories WHERE proposed_at > 0 AND status = '') AS memories,
       (SELECT COUNT(*) FROM precedents WHERE first_at > 0 AND status = '') AS precedents;

-- name: findings_undecided
-- The number of undecided findings of each agent and severity.
SELECT agent, severity, COUNT(*) AS count FROM findings WHERE +emitted_at > 0 AND status = '' AND review <> 'withheld'
GROUP BY agent, severity;

-- name: decided_since
-- The decisions that people made since a time.
SELECT * FROM decisions WHERE decided_at IS NOT NULL AND decided_at >= :since AND about <> ''
ORDER BY decided_at, decision;

-- name: undelivered
-- The notifications that could not be sent, and are retried or were given up.
SELECT * FROM notifications WHERE sent_at IS NULL AND queued_at > 0 AND attempts > 0 AND (gave_up = 0 OR queued_at >= :since)
ORDER BY queued_at, notification;

-- name: audit_until
-- The audit before a time and a call, the newest first, in pages, with the bodies that are not erased.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE (a.created_at, a.call) < (:until, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at DESC, a.call DESC LIMIT :limit;

-- name: spent_in_parts
-- The spending of each agent between two times, in equal intervals.
SELECT (at - :since) / :part AS part, agent, CAST(SUM(usd) AS BIGINT) AS usd FROM spends
WHERE at >= :since AND at < :until GROUP BY 1, 2 ORDER BY 1, 2;

-- name: events_of_kind
-- The newest events of one kind in a stream.
SELECT seq, at, version, facts, body FROM events WHERE stream = :stream AND kind = :kind ORDER BY seq DESC LIMIT :limit;

-- name: work_done
-- The number of turns, calls and refusals of a stream after an event, by kind.
SELECT kind, COUNT(*) AS count, MAX(seq) AS seq FROM events
WHERE stream = :stream AND seq > :after AND kind IN ('turn_started', 'call_started', 'call_refused', 'request_refused')
GROUP BY kind;

-- name: work_events
-- The newest turns, requests, calls and refusals of a stream after an event.
SELECT kind, at, version, facts FROM events
WHERE stream = :stream AND seq > :after AND kind IN (
    'turn_started', 'turn_ended', 'request_started', 'request_settled', 'request_refused', 'call_started',
    'call_settled', 'call_refused', 'cost_cap_reached', 'guardrail_triggered')
ORDER BY seq DESC LIMIT :limit;

-- name: sessions_of_agent
-- The sessions of one agent, the newest first.
SELECT * FROM sessions WHERE agent = :agent AND started_at > 0 ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: sessions_of_agent_since
-- The sessions of one agent that started since a time, the newest first.
SELECT * FROM sessions WHERE agent = :agent AND started_at >= :since ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: sessions_in_state
-- The sessions in one state that have not ended, the newest first. The plus avoids the index by time.
SELECT * FROM sessions
WHERE ended_at IS NULL AND (:agent = '' OR agent = :agent) AND state = :state AND +started_at >= :since
ORDER BY +started_at DESC, session DESC LIMIT :limit;

-- name: sessions_ended
-- The sessions that ended in one state, the newest first.
SELECT * FROM sessions WHERE ended_at IS NOT NULL AND state = :state AND started_at >= :since
ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: sessions_of_agent_ended
-- The sessions of one agent that ended in one state, the newest first.
SELECT * FROM sessions WHERE ended_at IS NOT NULL AND agent = :agent AND state = :state AND started_at >= :since
ORDER BY started_at DESC, session DESC LIMIT :limit;

-- name: audit_of_agent_since
-- As audit_since, by the index of agents.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE a.agent = :agent AND (a.created_at, a.call) > (:since, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at, a.call LIMIT :limit;

-- name: audit_of_agent_until
-- As audit_until, by the index of agents.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE a.agent = :agent AND (a.created_at, a.call) < (:until, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at DESC, a.call DESC LIMIT :limit;

-- name: audit_of_outcome_since
-- As audit_since, by the index of outcomes other than ok.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE a.outcome = :outcome AND a.outcome NOT IN ('', 'ok') AND (a.created_at, a.call) > (:since, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at, a.call LIMIT :limit;

-- name: audit_of_outcome_until
-- As audit_until, by the index of outcomes other than ok.
SELECT a.*, asked.body AS input, asked.blob AS input_blob, settled.body AS output, settled.blob AS output_blob,
    settled.kind AS settled_kind, settled.version AS settled_version, settled.facts AS settled_facts
FROM audit a
LEFT JOIN events asked ON asked.stream = 'session:' || a.session AND asked.seq = a.asked_seq
LEFT JOIN events settled ON settled.stream = 'session:' || a.session AND settled.seq = a.settled_seq
WHERE a.outcome = :outcome AND a.outcome NOT IN ('', 'ok') AND (a.created_at, a.call) < (:until, :call)
    AND (:agent = '' OR a.agent = :agent) AND (:tool = '' OR a.tool = :tool)
    AND (:outcome = '' OR a.outcome = :outcome) AND (:session = '' OR a.session = :session)
ORDER BY a.created_at DESC, a.call DESC LIMIT :limit;
