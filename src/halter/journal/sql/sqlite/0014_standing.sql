-- What stands now, found without what is over: rules by what they agree to, open runs of a trigger, open sub-sessions.

CREATE INDEX rules_standing ON rules (tool, owner, matcher) WHERE ended_at IS NULL;
CREATE INDEX sessions_open_runs ON sessions (trigger) WHERE ended_at IS NULL AND trigger <> '';
CREATE INDEX sessions_open_children ON sessions (parent) WHERE ended_at IS NULL AND parent <> '';
