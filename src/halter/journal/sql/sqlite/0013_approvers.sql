-- Decisions that two people must agree to: how many, and who agreed first.

ALTER TABLE decisions ADD COLUMN approvers INTEGER NOT NULL DEFAULT 1;
ALTER TABLE decisions ADD COLUMN first_by TEXT NOT NULL DEFAULT '';
