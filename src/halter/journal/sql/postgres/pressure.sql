-- name: connections
-- The number of connections allowed for ordinary users, and of those in use by all programs.
SELECT current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint AS most,
    (SELECT COALESCE(SUM(numbackends), 0)::bigint FROM pg_stat_database) AS used;

-- name: has_queue
-- True if workers have ever shared a queue here.
SELECT to_regclass('procrastinate_jobs') IS NOT NULL;

-- name: queued
-- The length of each queue, and the age of its oldest job.
SELECT j.queue_name AS queue, COUNT(DISTINCT j.id) AS jobs,
    COALESCE(MAX(EXTRACT(EPOCH FROM clock_timestamp() - e.at) * 1000000), 0)::bigint AS age
FROM procrastinate_jobs j LEFT JOIN procrastinate_events e ON e.job_id = j.id AND e.type = 'deferred'
WHERE j.status = 'todo' GROUP BY j.queue_name ORDER BY j.queue_name;
