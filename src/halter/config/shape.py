"""Plain values into frozen structs: every key known, every type right, and a sentence with a line where not.

The types of the structs say what a file may hold. They are walked beside the values, so that a mistake is known by its
whole path, also inside mappings with free keys.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar, cast

from msgspec import UNSET, UnsetType, inspect

from halter.config.load import Document, KeyPath, Places, Wrong
from halter.config.words import LARGEST, WORDS, Unfit
from halter.core.text import nearest, told

T = TypeVar("T")


def shaped(document: Document, kind: type[T]) -> T:
    """Read a document as a struct, or raise a ConfigError that says what to change."""
    return cast("T", _Reader(document.places).read(inspect.type_info(kind), document.value, ()))


def written_as(kind: inspect.Type) -> str:
    """Tell the form of writing that a type is read from, if it has one of its own."""
    extra: Any = getattr(kind, "extra", None)
    return extra["written"] if extra and "written" in extra else ""


def is_hidden(kind: inspect.Type) -> bool:
    """Tell whether what stands in place of a mapping may be a key by mistake, so that no sentence quotes it."""
    extra: Any = getattr(kind, "extra", None)
    return bool(extra and extra.get("hidden")) or bool(getattr(getattr(kind, "cls", None), "HIDDEN", False))


def other_names(kind: inspect.StructType) -> Mapping[str, str]:
    """List the other names under which the keys of a struct are understood."""
    return getattr(kind.cls, "ALSO", {})


def dotted(path: KeyPath) -> str:
    """Write a path as people read it: `policy.tools.shell.rate`, `allowed_hosts[2]`."""
    words = "".join(f"[{step + 1}]" if isinstance(step, int) else f".{step}" for step in path)
    return words.removeprefix(".")


def about(path: KeyPath, sentence: str) -> Wrong:
    """Begin a sentence with the key that it is about."""
    return path, f"`{dotted(path)}` {sentence}"


def either(word: T | UnsetType, otherwise: T) -> T:
    """Take what was written, or something else where nothing was."""
    return otherwise if word is UNSET else word


class _Reader:
    def __init__(self, places: Places) -> None:
        self._places = places

    def read(self, kind: inspect.Type, value: Any, path: KeyPath) -> Any:
        if word := written_as(kind):
            return self._word(word, value, path)
        match kind:
            case inspect.Metadata():
                if is_hidden(kind):
                    self._mapping(value, path, hidden=True)
                return self.read(kind.type, value, path)
            case inspect.StructType():
                return self._struct(kind, self._mapping(value, path, hidden=is_hidden(kind)), path)
            case inspect.DictType():
                return self._free(kind, self._mapping(value, path), path)
            case inspect.VarTupleType():
                return self._items(kind, value, path)
            case inspect.UnionType():
                return self.read(_member(kind, value), value, path)
            case inspect.LiteralType():
                return self._choice(kind.values, value, path)
            case inspect.AnyType():
                return value
            case _:
                return self._leaf(kind, value, path)

    def _wrong(self, value: Any, expected: str, path: KeyPath, *, hidden: bool = False) -> Exception:
        if hidden and value is not None:
            sentence = f"`{dotted(path)}` must be {expected}; what stands there is something else."
            return self._places.wrong(path, sentence)
        subject = f"`{dotted(path)}` is" if path else "the file is"
        return self._places.wrong(path, f"{subject} {told(value)}, but must be {expected}.")

    def _word(self, word: str, value: Any, path: KeyPath) -> Any:
        try:
            return WORDS[word].read(value)
        except Unfit as unfit:
            hint = f"; {unfit}" if str(unfit) else ""
            raise self._wrong(value, f"{WORDS[word].expected}{hint}", path, hidden=WORDS[word].secret) from None

    def _mapping(self, value: Any, path: KeyPath, *, hidden: bool = False) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(value, "a mapping, with a `key: value` on each line", path, hidden=hidden)
        return cast("dict[str, Any]", value)

    def _struct(self, kind: inspect.StructType, value: dict[str, Any], path: KeyPath) -> Any:
        fields = {field.encode_name: field for field in kind.fields}
        written = self._own_names(kind, value, path)
        read: dict[str, Any] = {}
        for name, key in written.items():
            if name not in fields:
                raise self._unknown(key, list(fields), path)
            read[fields[name].name] = self.read(fields[name].type, value[key], (*path, key))
        for name, field in fields.items():
            if field.required and name not in written:
                place = f"`{dotted(path)}`" if path else self._places.file
                raise self._places.wrong(path, f"`{name}` is missing from {place}; write it.")
        try:
            return kind.cls(**read)
        except ValueError as error:
            raise self._places.wrong(path, str(error)) from None

    def _own_names(self, kind: inspect.StructType, value: dict[str, Any], path: KeyPath) -> dict[str, str]:
        """Map the keys' own names to those they were written under."""
        also = other_names(kind)
        names: dict[str, str] = {}
        for key in value:
            name = also.get(key, key)
            if name in names:
                raise self._places.wrong(
                    (*path, key), f"`{key}` and `{names[name]}` are two names of one key; keep one of them."
                )
            names[name] = key
        return names

    def _unknown(self, key: str, known: Sequence[str], path: KeyPath) -> Exception:
        place = f"`{dotted(path)}`" if path else self._places.file
        sentence = f"`{key}` is not a key of {place}; {nearest(key, known, 'its keys')}"
        return self._places.wrong((*path, key), sentence)

    def _free(self, kind: inspect.DictType, value: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        if kind.min_length and len(value) < kind.min_length:
            raise self._wrong(None, "a mapping with at least one key", path)
        return {
            self._free_key(kind.key_type, key, path): self.read(kind.value_type, item, (*path, key))
            for key, item in value.items()
        }

    def _free_key(self, kind: inspect.Type, key: str, path: KeyPath) -> str:
        if isinstance(kind, inspect.LiteralType) and key not in kind.values:
            raise self._unknown(key, [str(name) for name in kind.values], path)
        return self.read(kind, key, (*path, key))

    def _items(self, kind: inspect.VarTupleType, value: Any, path: KeyPath) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise self._wrong(value, "a list, as in [one, two]", path)
        items = cast("list[Any]", value)
        return tuple(self.read(kind.item_type, item, (*path, index)) for index, item in enumerate(items))

    def _choice(self, values: Sequence[Any], value: Any, path: KeyPath) -> Any:
        if value not in values:
            sentence = f"`{dotted(path)}` is {told(value)}, which is none of its words"
            raise self._places.wrong(path, f"{sentence}; {nearest(str(value), values, 'they')}")
        return value

    def _leaf(self, kind: inspect.Type, value: Any, path: KeyPath) -> Any:
        match kind, value:
            case inspect.BoolType(), bool():
                return value
            case inspect.StrType(), str() if len(value) >= (kind.min_length or 0):
                return value
            case inspect.IntType(), int() if not isinstance(value, bool) and _within(kind, value):
                return value
            case inspect.FloatType(), int() | float() if not isinstance(value, bool) and _within(kind, value):
                return float(value)
            case inspect.DecimalType(), int() | float() if not isinstance(value, bool):
                return Decimal(str(value))
            case _:
                raise self._wrong(value, _expected(kind), path)


def _within(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    least = -LARGEST if kind.ge is None else kind.ge
    most = LARGEST if kind.le is None else kind.le
    return least <= value <= most


def _expected(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(kind)
        case inspect.FloatType() | inspect.DecimalType():
            return "a number" + (_bounds(kind) if isinstance(kind, inspect.FloatType) else "")
        case inspect.StrType() if kind.min_length:
            return "text that is not empty; put quotes around it if it looks like something else"
        case _:
            return "text; put quotes around it if it looks like something else"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    least = f" from {kind.ge} up" if kind.ge is not None else ""
    return f" from {kind.ge} to {kind.le}" if kind.le is not None else least


def _member(kind: inspect.UnionType, value: Any) -> inspect.Type:
    """Choose the member of a union that what was written looks like; the first is what sentences speak of."""
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return next((member for member in members if _looks_like(member, value)), members[0])


def _looks_like(member: inspect.Type, value: Any) -> bool:
    match value:
        case bool():
            return isinstance(member, inspect.BoolType)
        case str():
            return isinstance(member, inspect.LiteralType | inspect.StrType)
        case list():
            return isinstance(member, inspect.VarTupleType)
        case _:
            return False
