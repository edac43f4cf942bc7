"""SQL, by dialect; `queries.sql` is read by both."""
