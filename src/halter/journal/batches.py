"""Any number of rows in one statement: each column travels to PostgreSQL as one array.

So a batch of writes costs a few round trips, however many rows it touches.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from psycopg import Connection
from psycopg.adapt import Dumper
from psycopg.pq import Format

from halter.core.ports import Stored
from halter.core.row import Row

_HEAD: Final = struct.Struct("!5i").pack
_SIZE: Final = struct.Struct("!i").pack
_NULL: Final = _SIZE(-1)
_EIGHT: Final = _SIZE(8)


class Texts(tuple[str | None, ...]):
    """A column of text."""

    __slots__ = ()


class Integers(tuple[int | None, ...]):
    """A column of integers of 64 bits."""

    __slots__ = ()


class Bytes(tuple[bytes | None, ...]):
    """A column of bytes."""

    __slots__ = ()


Column = Texts | Integers | Bytes


class _TextsDumper(Dumper):
    format = Format.BINARY
    oid = 1009

    def dump(self, obj: Texts) -> bytes:
        return _array(25, _sized([None if text is None else text.encode() for text in obj]))


class _IntegersDumper(Dumper):
    format = Format.BINARY
    oid = 1016

    def dump(self, obj: Integers) -> bytes:
        return _array(20, [_NULL if number is None else _EIGHT + number.to_bytes(8, signed=True) for number in obj])


class _BytesDumper(Dumper):
    format = Format.BINARY
    oid = 1001

    def dump(self, obj: Bytes) -> bytes:
        return _array(17, _sized(obj))


def _array(element: int, items: Sequence[bytes]) -> bytes:
    """Write an array in PostgreSQL's binary form: of one dimension, possibly with NULLs, counted from 1."""
    return b"".join((_HEAD(1, 1, element, len(items), 1), *items))


def _sized(items: Iterable[bytes | None]) -> list[bytes]:
    return [_NULL if item is None else _SIZE(len(item)) + item for item in items]


def teach(connection: Connection[Any]) -> None:
    """Let a connection send columns. Its own way for lists looks at every value, and is several times slower."""
    connection.adapters.register_dumper(Texts, _TextsDumper)
    connection.adapters.register_dumper(Integers, _IntegersDumper)
    connection.adapters.register_dumper(Bytes, _BytesDumper)


class Statements(msgspec.Struct, frozen=True):
    """The mechanical statements of a table: `insert` and `update` take all columns, `lock` and `delete` the key's."""

    kinds: tuple[type[Column], ...]
    lock: bytes
    insert: bytes
    update: bytes
    delete: bytes


@cache
def statements(row: type[Row]) -> Statements:
    """Derive the statements of a table whose columns are the fields of its row type."""
    fields = msgspec.structs.fields(row)
    names = [f'"{field.name}"' for field in fields]
    key, values = names[: len(row.KEY)], names[len(row.KEY) :]
    same = " AND ".join(f"kept.{name} = given.{name}" for name in key)
    kept = ", ".join(f"kept.{name}" for name in names)
    order = ", ".join(f"kept.{name}" for name in key)
    changed = ", ".join(f"{name} = given.{name}" for name in values)
    lock = f"SELECT {kept} FROM {_given(key)} JOIN {row.TABLE} kept ON {same} ORDER BY {order} FOR UPDATE OF kept"
    return Statements(
        kinds=tuple(_kind(field.type) for field in fields),
        lock=lock.encode(),
        insert=_insert(row.TABLE, names),
        update=f"UPDATE {row.TABLE} kept SET {changed} FROM {_given(names)} WHERE {same}".encode(),
        delete=f"DELETE FROM {row.TABLE} kept USING {_given(key)} WHERE {same}".encode(),
    )


class Append(msgspec.Struct, frozen=True):
    """The statement that appends events and tells of them: it takes the events, a channel and the hints for it."""

    kinds: tuple[type[Column], ...]
    insert: bytes


@cache
def append() -> Append:
    """Derive the statement from an event's fields; what they mean in Python is not kept."""
    fields = [field for field in msgspec.structs.fields(Stored) if field.name != "event"]
    insert = _insert("events", [f'"{field.name}"' for field in fields])
    tell = b"SELECT pg_notify(%b, hint) FROM unnest(%b) AS hint"
    return Append(tuple(_kind(field.type) for field in fields), b"WITH appended AS (" + insert + b") " + tell)


def columns(kinds: Sequence[type[Column]], rows: Iterable[Sequence[Any]]) -> list[Column]:
    """Turn rows, or the keys of rows, into columns."""
    return [kind(values) for kind, values in zip(kinds, zip(*rows, strict=True), strict=False)]


def _insert(table: str, names: Sequence[str]) -> bytes:
    return f"INSERT INTO {table} ({', '.join(names)}) SELECT * FROM {_given(names)}".encode()


def _given(names: Sequence[str]) -> str:
    return f"unnest({', '.join('%b' for _ in names)}) AS given ({', '.join(names)})"


_KINDS: Final[dict[type[msgspec.inspect.Type], type[Column]]] = {
    msgspec.inspect.StrType: Texts,
    msgspec.inspect.LiteralType: Texts,
    msgspec.inspect.IntType: Integers,
    msgspec.inspect.BytesType: Bytes,
}


def _kind(annotation: Any) -> type[Column]:
    info = msgspec.inspect.type_info(annotation)
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return next(_KINDS[type(member)] for member in members if type(member) in _KINDS)
