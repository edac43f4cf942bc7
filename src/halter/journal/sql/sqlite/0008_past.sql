-- A long past: what is looked at every day is found without a walk through all that ever was.

CREATE INDEX sessions_started ON sessions (started_at, session);
CREATE INDEX sessions_agent ON sessions (agent, started_at, session);
CREATE INDEX sessions_agent_ended ON sessions (agent, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX sessions_open ON sessions (agent) WHERE ended_at IS NULL;
CREATE INDEX sessions_parent ON sessions (parent) WHERE parent <> '';
CREATE INDEX budgets_window ON budgets ("window", scope);
CREATE INDEX halts_standing ON halts (scope) WHERE halted = 1 AND cancels = 0;
CREATE INDEX decisions_decided ON decisions (decided_at) WHERE decided_at IS NOT NULL;
CREATE INDEX decisions_waiting ON decisions (expires_at) WHERE verdict = '';
DROP INDEX decisions_open;
CREATE INDEX decisions_of_servers ON decisions (agent) WHERE about IN ('changed_tool', 'changed_server');
CREATE INDEX items_left ON items (quarantined_at) WHERE quarantined_at IS NOT NULL;
CREATE INDEX items_session ON items (session) WHERE session <> '';
CREATE INDEX findings_undecided ON findings (finding) WHERE status = '';
CREATE INDEX notifications_unsent ON notifications (queued_at) WHERE sent_at IS NULL;
CREATE INDEX events_of_triggers ON events (at) WHERE stream >= 'trigger:' AND stream < 'trigger;';
