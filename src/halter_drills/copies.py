"""Copies of a drill's own store, made past all of Halter's code, and put back as an operator would."""

import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from halter_drills.drill import Ground, connection, sqlite_file

_TABLES: Final = (
    "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() ORDER BY table_name"
)


class Copy(msgspec.Struct, frozen=True):
    """One copy: when it was made and how, how many events it holds, and what puts it back."""

    moment: str
    manner: str
    events: int
    put_back: Callable[[], None]


def copies_of(ground: Ground, moment: str, folder: Path) -> list[Copy]:
    """Copy a store in every manner that there is for its kind. Nothing may write to it meanwhile."""
    if ground.kind == "postgresql":
        return [_dumped(ground, moment)]
    made: list[Copy] = []
    for number, (manner, copy) in enumerate(_MANNERS.items()):
        place = folder / str(number)
        place.mkdir(parents=True)
        copy(sqlite_file(ground.url), place)
        made.append(Copy(moment, manner, _held(place / _NAME), _puts_files(ground, place)))
    return made


def remove_store(ground: Ground) -> None:
    """Let the store be gone."""
    ground.fresh()


_NAME: Final = "drill.db"


def _by_sqlite(store: Path, place: Path) -> None:
    with closing(sqlite3.connect(store)) as one, closing(sqlite3.connect(place / _NAME)) as other:
        one.backup(other)


def _with_log(store: Path, place: Path) -> None:
    for name in (_NAME, f"{_NAME}-wal"):
        if store.with_name(name).exists():
            shutil.copy(store.with_name(name), place / name)


def _without_log(store: Path, place: Path) -> None:
    shutil.copy(store, place / _NAME)


_MANNERS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "by SQLite": _by_sqlite,
    "as files, with -wal": _with_log,
    "as a file, without -wal": _without_log,
}


def _held(copy: Path) -> int:
    """Count the events of a copy, on another copy: looking at it would tidy up its log."""
    looked = copy.parent / "looked"
    looked.mkdir()
    for file in copy.parent.glob(f"{_NAME}*"):
        shutil.copy(file, looked)
    with closing(sqlite3.connect(looked / _NAME)) as database:
        try:
            ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()
        except sqlite3.OperationalError:
            events = 0  # Without its log, a young store has no tables yet.
    shutil.rmtree(looked)
    return int(events)


def _puts_files(ground: Ground, place: Path) -> Callable[[], None]:
    def put_back() -> None:
        ground.fresh()
        for file in place.iterdir():
            shutil.copy(file, sqlite_file(ground.url).with_name(file.name))

    return put_back


def _dumped(ground: Ground, moment: str) -> Copy:
    """Keep what every table holds, as a dump does."""
    kept: dict[str, bytes] = {}
    with closing(connection(ground.url)) as database:
        for (table,) in database.execute(_TABLES).fetchall():
            with cast("Any", database).cursor().copy(f'COPY "{table}" TO STDOUT (FORMAT BINARY)'.encode()) as data:
                kept[table] = b"".join(bytes(part) for part in data)
        ((events,),) = database.execute("SELECT COUNT(*) FROM events").fetchall()

    def put_back() -> None:
        with closing(connection(ground.url)) as database, cast("Any", database).transaction():
            named = ", ".join([f'"{table}"' for table in kept])
            database.execute(f"TRUNCATE {named}".encode())
            for table, rows in kept.items():
                with cast("Any", database).cursor().copy(f'COPY "{table}" FROM STDIN (FORMAT BINARY)'.encode()) as into:
                    into.write(rows)

    return Copy(moment, "as a dump", int(events), put_back)
