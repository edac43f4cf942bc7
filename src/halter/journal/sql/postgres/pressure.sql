-- name: connections
-- How many connections there are for programs like this one, and how many are in use by anybody.
SELECT current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint AS most,
    (SELECT COALESCE(SUM(numbackends), 0)::bigint FROM pg_stat_database) AS used;

-- name: has_queue
-- Whether workers ever shared a queue here.
SELECT to_regclass('procrastinate_jobs') IS NOT NULL;

-- name: queued
-- What waits in each queue, and for how long the oldest has.
SELECT j.queue_name AS queue, COUNT(DISTINCT j.id) AS jobs,
    COALESCE(MAX(EXTRACT(EPOCH FROM clock_timestamp() - e.at) * 1000000), 0)::bigint AS age
FROM procrastinate_jobs j LEFT JOIN procrastinate_events e ON e.job_id = j.id AND e.type = 'deferred'
WHERE j.status = 'todo' GROUP BY j.queue_name ORDER BY j.queue_name;
