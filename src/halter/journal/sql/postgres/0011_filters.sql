-- Looking back by state, outcome and agent. States of sessions that are not over change often, and are few: they have no index.

CREATE INDEX sessions_state ON sessions (state, started_at, session) WHERE ended_at IS NOT NULL;
CREATE INDEX sessions_agent_state ON sessions (agent, state, started_at, session) WHERE ended_at IS NOT NULL;
CREATE INDEX audit_agent ON audit (agent, created_at, call);
CREATE INDEX audit_outcome ON audit (outcome, created_at, call) WHERE outcome NOT IN ('', 'ok');
