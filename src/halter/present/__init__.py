"""Sentences, facts and tables shared by the CLI, the dashboard, notices and reports."""
