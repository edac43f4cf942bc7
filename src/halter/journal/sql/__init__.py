"""SQL by dialect. Both dialects use `queries.sql`."""
