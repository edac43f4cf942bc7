"""SQL lives in `.sql` files, each query named and described there; this reads them."""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from halter.core.row import Row

_NAMED: Final = re.compile(r"^-- name: (\w+)\n((?:--[^\n]*\n)*)(.*?);\s*$", re.MULTILINE | re.DOTALL)
_PARAMETER: Final = re.compile(r"(?<!:):([a-z_]+)")


@cache
def load(name: str) -> Mapping[str, str]:
    """Read the named queries of one file."""
    text = files("halter.journal.sql").joinpath(name).read_text("utf-8")
    return {found[1]: found[3].strip() for found in _NAMED.finditer(text)}


@cache
def migrations(dialect: str) -> tuple[tuple[int, str], ...]:
    """List the numbered migrations of a dialect, oldest first."""
    folder = files("halter.journal.sql").joinpath(dialect)
    names = sorted(entry.name for entry in folder.iterdir() if re.match(r"\d{4}_", entry.name))
    return tuple((int(name[:4]), folder.joinpath(name).read_text("utf-8")) for name in names)


def statements(script: str) -> Iterator[str]:
    """Split a migration at its semicolons."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def for_psycopg(sql: str) -> str:
    """Write named parameters (`:name`) the way psycopg reads them."""
    return _PARAMETER.sub(r"%(\1)s", sql)


class RowStatements(msgspec.Struct, frozen=True):
    """The mechanical statements of a table whose columns are the fields of its row type."""

    select: str
    insert: str
    update: str
    delete: str
    clear: str


@cache
def row_statements(row: type[Row]) -> RowStatements:
    """Derive the statements with `?` parameters; updates take the values first, then the key."""
    columns = [f'"{field.name}"' for field in msgspec.structs.fields(row)]
    key = " AND ".join(f'"{name}" = ?' for name in row.KEY)
    values = columns[len(row.KEY) :]
    return RowStatements(
        select=f"SELECT {', '.join(columns)} FROM {row.TABLE} WHERE {key}",
        insert=f"INSERT INTO {row.TABLE} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})",
        update=f"UPDATE {row.TABLE} SET {', '.join(f'{column} = ?' for column in values)} WHERE {key}",
        delete=f"DELETE FROM {row.TABLE} WHERE {key}",
        clear=f"DELETE FROM {row.TABLE}",
    )
