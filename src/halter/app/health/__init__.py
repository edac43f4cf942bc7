"""Whether everything is there that a night without anybody watching needs: small checks, each with what to do."""
