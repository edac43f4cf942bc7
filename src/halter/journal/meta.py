"""What a store says of itself: which migrations have run on it, and its id."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from halter.core.errors import StoreUnusable

_ID: Final = re.compile("[A-Za-z0-9]{1,64}")
_NUMBER: Final = re.compile("[0-9]{1,9}")
_REMEDY: Final = "Somebody changed it by hand: restore the store from a backup, or name another one."


def words(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn the answer to the query `meta` into what is said under each name."""
    return {row["name"]: row["value"] for row in rows}


def schema_version(said: Mapping[str, Any], known: int, where: str, *, tables: bool) -> int:
    """Tell the last migration that has run: 0 on a store without tables. One that is not ours to use is refused."""
    written = said.get("schema")
    if written is None and not tables:
        return 0
    if not isinstance(written, str) or not _NUMBER.fullmatch(written) or int(written) == 0:
        raise StoreUnusable(f"The store {where} must say which schema it has, and says {_quoted(written)}. {_REMEDY}")
    version = int(written)
    if version > known:
        raise StoreUnusable(
            f"The store {where} has schema {version}, and this program knows only {known}. "
            "Nothing was touched; use the newer Halter, or another store."
        )
    return version


def store_id(said: Mapping[str, Any], where: str) -> str:
    """Tell the id of a store, which is a part of the name of its checkpoints' file: so it must be a plain word."""
    found = said.get("store")
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise StoreUnusable(f"The store {where} must say which id it has, and says {_quoted(found)}. {_REMEDY}")
    return found


def _quoted(said: Any) -> str:
    return "nothing" if said is None else repr(said)[:80]
