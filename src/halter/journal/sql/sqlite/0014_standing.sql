-- What stands now, found without what is over: rules by what they agree to, open runs of a trigger, open sub-sessions.
-- Of what a rule agrees to a beginning is enough: it may be longer than an entry of an index.

CREATE INDEX rules_standing ON rules (tool, owner, substr(matcher, 1, 100)) WHERE ended_at IS NULL;
CREATE INDEX sessions_open_runs ON sessions (trigger) WHERE ended_at IS NULL AND trigger <> '';
CREATE INDEX sessions_open_children ON sessions (parent) WHERE ended_at IS NULL AND parent <> '';
