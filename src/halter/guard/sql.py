"""How risky statements of SQL are, by their words and not by what stands in strings and comments."""

import re
from collections.abc import Iterator, Sequence
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


_OBJECTS: Final = frozenset(
    {
        *("TABLE", "DATABASE", "SCHEMA", "INDEX", "VIEW", "USER", "ROLE", "SEQUENCE", "FUNCTION", "TRIGGER", "TYPE"),
        *("MATERIALIZED", "EXTENSION", "PROCEDURE", "COLLECTION", "KEYSPACE", "TABLESPACE", "COLUMN", "OWNED"),
    }
)
_CLAUSES: Final = frozenset({"WHERE", "USING", "RETURNING", "LIMIT", "ORDER"})
_INSERTING: Final = frozenset({"VALUES", "SELECT", "DEFAULT"})
_BEGINS: Final = re.compile(
    r"\b(?:drop|alter|create|truncate|delete|update|insert|replace|grant|revoke)\b", re.IGNORECASE
)


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


def is_statement(text: str) -> bool:
    """Tell by its grammar a text that changes a database from prose, as in "Delete from the list what is old"."""
    return bool(_BEGINS.search(text)) and any(_changes(words, text) for words in statements(text))


def _changes(words: Sequence[str], text: str) -> bool:
    match words:
        case ["DROP" | "ALTER" | "CREATE", kind, _, *_]:
            return kind in _OBJECTS
        case ["TRUNCATE", "TABLE", _, *_] | ["TRUNCATE", _]:
            return True
        case ["DELETE", "FROM", _, *rest]:
            return _ends_well(rest)
        case ["UPDATE", _, *rest]:
            return "=" in text and ("SET" in rest[:2] or (rest[:1] == ["AS"] and "SET" in rest[2:3]))
        case ["INSERT" | "REPLACE", "INTO", _, *rest]:
            return not _INSERTING.isdisjoint(rest)
        case ["GRANT" | "REVOKE", *rest]:
            return "ON" in rest and not {"TO", "FROM"}.isdisjoint(rest)
        case ["WITH" | "EXPLAIN", *rest]:
            return not _CHANGING.isdisjoint(rest) and "SELECT" in words
        case _:
            return False


def _ends_well(rest: Sequence[str]) -> bool:
    """Tell what may follow the table of a DELETE: nothing, another name for it, or a clause."""
    return not rest or len(rest) == 1 or not {rest[0], rest[1], rest[2] if rest[2:] else ""}.isdisjoint(_CLAUSES)


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
