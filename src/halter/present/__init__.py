"""Facts in words and tables, the same for CLI, dashboard, notices and reports."""
