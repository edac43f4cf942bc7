"""From what people write in YAML to frozen values, with sentences that name file, line, key and fix."""
