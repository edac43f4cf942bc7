"""What the garbage collector does not follow is part of no cycle: one through it would never be freed.

So structs without `gc` hold values alone, down to the last of their parts: no function, task, exception or object that
could lead back to them.
"""

import importlib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Union

import msgspec
import pytest

import halter
from halter.core.vocabulary import Row

VALUES: Final = (str, int, float, bool, bytes, type(None), msgspec.UnsetType, ...)
CONTAINERS: Final = (Union, types.UnionType, tuple, frozenset, Mapping)
DECODED: Final = frozenset(("Prompt.facts", "Declaration.defaults", "Leaf.value"))
KEYS: Final = frozenset(("HoldTerms.keys", "InFlight.rows", "JournalEffect.unless"))
EVENTS: Final = frozenset(("JournalEffect.event",))
"""Fields of any type, by what they hold: what was decoded from JSON, the keys of rows, an event."""

SOURCE: Final = Path(halter.__path__[0])


def list_structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from list_structs(each)


def find_other_parts(kind: Any, text: str, results: set[Any]) -> Iterator[str]:
    """The places below a type where something else than a value may be."""
    origin = typing.get_origin(kind)
    if kind in VALUES or origin in (Literal, type):
        return
    if isinstance(kind, typing.NewType):
        yield from find_other_parts(kind.__supertype__, text, results)
    elif origin is Annotated:
        yield from find_other_parts(typing.get_args(kind)[0], text, results)
    elif origin in CONTAINERS:
        for result in typing.get_args(kind):
            yield from find_other_parts(result, text, results)
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in results:
            results.add(kind)
            hints = typing.get_type_hints(kind, localns={"Row": Row}, include_extras=True)
            for name in kind.__struct_fields__:
                yield from find_other_parts(hints[name], f"{kind.__name__}.{name}", results)
    elif text not in DECODED | KEYS | EVENTS:
        yield f"{text}: {kind}"


def find_unfit(structs: Iterable[type[msgspec.Struct]]) -> dict[str, list[str]]:
    values = {each.__name__: list(find_other_parts(each, each.__name__, set())) for each in structs}
    return {name: others for name, others in values.items() if others}


def test_what_is_not_collected_holds_values_alone() -> None:
    files = [file for file in SOURCE.rglob("*.py") if "gc=False" in file.read_text("utf-8")]
    assert len(files) > 10
    for file in files:
        importlib.import_module(".".join(("halter", *file.relative_to(SOURCE).with_suffix("").parts)))
    own = {each for each in list_structs(msgspec.Struct) if each.__module__.startswith("halter.")}
    assert find_unfit(each for each in own if not each.__struct_config__.gc) == {}


class _Listener(msgspec.Struct):
    hear: types.FunctionType


class _Holder(msgspec.Struct, gc=False):
    KIND: ClassVar[str] = "holder"
    parts: tuple[str | _Listener, ...]


@pytest.mark.parametrize("kind", [Any, list[str], dict[str, str], BaseException, object])
def test_what_can_lead_back_is_found(kind: Any) -> None:
    made = msgspec.defstruct("Made", [("part", kind)], gc=False)
    assert find_unfit([made]) == {"Made": [f"Made.part: {kind}"]}


def test_what_can_lead_back_from_a_part_is_found() -> None:
    assert find_unfit([_Holder]) == {"_Holder": [f"_Listener.hear: {types.FunctionType}"]}
