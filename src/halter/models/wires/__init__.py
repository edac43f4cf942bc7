"""The protocols of providers: one file each, and a row in the table."""
