"""YAML and JSON files into frozen values; every error names file, line, key and fix."""
