"""The page about events: each kind, its facts, and what it says."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import NODEFAULT

from halter.core import events
from scripts.reference.sheet import code, head, table, told

PLAIN: Final = {str: "text", int: "integer", bool: "`true`, `false`", float: "number"}

GROUPS: tuple[tuple[str, UnionType], ...] = (
    ("Sessions and their turns", events.SessionEvent),
    ("Requests and calls", events.EffectEvent),
    ("Decisions and rules", events.DecisionEvent),
    ("The fleet", events.FleetEvent),
    ("What sessions work on", events.TaskEvent),
    ("What sessions leave behind", events.ArtifactEvent),
    ("Triggers", events.TriggerEvent),
    ("Channels", events.ChannelEvent),
)


def page() -> str:
    """Describe every kind of event."""
    first = head(
        "Events",
        "`halter.core.events`",
        "Everything that happens is one of these events, in the past tense. The fields "
        "below are its *facts*, which stay. "
        "What was said is its *body*, which can be erased. `halter show --follow --json`, `halter "
        "export` and the API show them.",
        "Times are microseconds since 1970 by the store's clock; money is whole numbers of micro-dollars "
        "(1,000,000 are a dollar). Receipts, reports, budgets and the audit say dollars, under names that end in "
        "`_usd`.",
    )
    return "\n".join((first, *(_group(title, union) for title, union in GROUPS)))


def _group(title: str, union: UnionType) -> str:
    return "\n".join((f"## {title}\n", *(name_part for kind in get_args(union) for name_part in _event(kind))))


def _event(kind: Any) -> Iterator[str]:
    yield f"### {kind.KIND}\n\n{told(kind.__doc__)}\n"
    rows = [(code(field.encode_name), _type(field.type), _default(field)) for field in msgspec.structs.fields(kind)]
    if rows:
        yield table(("field", "is", "if not given"), rows)


def _type(kind: Any) -> str:
    """Write a type as people read it."""
    args = get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if get_origin(kind) is Literal:
        return ", ".join(code(word) for word in args)
    if get_origin(kind) is tuple:
        return f"list: {_type(args[0])}"
    if args:
        return " or ".join(_type(each) for each in args if each is not type(None))
    return str(getattr(kind, "__name__", kind))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "always there"
    default = field.default if field.default is not NODEFAULT else field.default_factory()  # type: ignore[operator]
    if isinstance(default, bool):
        return code(str(default).lower())
    return code(default) if default not in ("", (), None) else "empty"
