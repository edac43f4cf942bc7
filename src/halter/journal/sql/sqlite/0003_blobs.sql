-- When a blob was last put: one that no event names may still be named soon, and is kept for a while.

ALTER TABLE blobs ADD COLUMN put_at INTEGER NOT NULL DEFAULT 0;
