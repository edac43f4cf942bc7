"""The dashboard: what a person looks at, decides and stops in a browser."""
