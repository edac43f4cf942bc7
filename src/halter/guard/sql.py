"""How risky statements of SQL are, by their words and not by what stands in strings and comments."""

import re
from collections.abc import Iterator
from typing import Final

from halter.guard.places import Finding

_PART: Final = re.compile(r"--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?|'(?:[^']|'')*'?|\"[^\"]*\"?|\w+|;|[^\s\w]")
_VERBS: Final = frozenset(
    {
        *("SELECT", "WITH", "INSERT", "UPDATE", "DELETE", "DROP", "TRUNCATE", "ALTER", "CREATE", "GRANT", "REVOKE"),
        *("MERGE", "REPLACE", "COPY", "VACUUM", "EXPLAIN", "SHOW", "PRAGMA", "BEGIN", "SET", "CALL", "DO", "EXEC"),
    }
)
_CHANGING: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "CREATE", "COPY", "CALL", "DO", "EXEC"})


def statements(text: str) -> list[list[str]]:
    """Split SQL into statements, each a list of words in capitals."""
    found: list[list[str]] = [[]]
    for part in _PART.findall(text):
        if part == ";":
            found.append([])
        elif part[0].isalnum() or part[0] == "_":
            found[-1].append(part.upper())
    return [words for words in found if words]


def looks_like_sql(text: str) -> bool:
    """Tell SQL from the other things that people put into a field called `query`."""
    parts = statements(text)
    return bool(parts) and all(words[0] in _VERBS for words in parts) and any(len(words) > 1 for words in parts)


def sql_risk(text: str) -> Iterator[Finding]:
    """Judge what is executed in a database."""
    for words in statements(text):
        present = set(words)
        verb = words[0]
        if verb in {"DROP", "TRUNCATE"}:
            yield "CRITICAL", f"{verb} deletes whole tables"
        elif "DELETE" in present and "WHERE" not in present and verb in {"DELETE", "WITH", "EXPLAIN"}:
            yield "CRITICAL", "DELETE without WHERE deletes every row"
        elif verb in {"ALTER", "GRANT", "REVOKE"}:
            yield "HIGH", f"{verb} changes tables or rights"
        elif "UPDATE" in present and "WHERE" not in present and verb in {"UPDATE", "WITH"}:
            yield "HIGH", "UPDATE without WHERE changes every row"
        elif verb in _CHANGING or (verb == "WITH" and present & _CHANGING):
            yield "MEDIUM", f"{verb} changes rows"
