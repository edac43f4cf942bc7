"""The pages about configuration files: every key, its type and its default."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import NODEFAULT, UNSET, inspect

from halter.config.agent_files import parse_agent
from halter.config.decode import SCALAR_FORMS, find_spec, is_deprecated, name_written_form, read_default
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import format_duration
from halter.core.money import Caps
from halter.runtime.session_builder import MAX_AUTONOMOUS_WINDOW
from halter.spec.agent import AgentSpec
from halter.spec.fleet import FleetSpec
from halter.spec.forms import BY_KEY
from halter.spec.limits import Limits
from scripts.reference.sheet import NOTHING, code, head, table

Row = tuple[str, str, str, str]

FREE: Final = {"levels": "LEVEL", "tools": "TOOL", "fields": "FIELD", "models": "MODEL"}
"""Placeholders for user-defined names; the default is NAME."""

SHORT: Final = {
    "duration": "duration",
    "lasting": "duration or `none`",
    "dollars": "dollars or `none`",
    "rate": "rate or `none`",
    "zone": "time zone",
    "host": "host",
    "models": "model or pattern",
    "model": "model",
    "window": "integer",
    "reference": "`${secret:NAME}`",
    "day_time": "time of day",
    "path_into": "path into JSON",
    "secret": "name of a secret",
    "header_name": "name of a header",
    "header": "text",
    "mail": "e-mail address",
}

FORMS: Final = "How amounts, times and names are written:"


def agent_page() -> str:
    """Describe `agent.yaml`."""
    first = head(
        "agent.yaml",
        "`halter.spec`",
        "Every key of an agent's file. [An agent's file](../agents.md) explains them; "
        "`halter schema` prints the same as a "
        "JSON Schema, for editors. `[]` stands for each item of a list, a word in capitals for a name that you give.",
        "A wrong key or value is a sentence that names the file, the line, the key and "
        "the fix. Nothing unknown is ignored.",
    )
    return first + "\n" + _keys(AgentSpec, _in_force()) + "\n" + _forms()


def fleet_page() -> str:
    """Describe `halter.yaml`."""
    first = head(
        "halter.yaml",
        "`halter.spec`",
        "Every key of the fleet's file, which bounds all agents on one store: an agent "
        "can only tighten it. It is looked "
        "for here, then in `~/.config/halter`, or where `HALTER_FLEET` says. `halter "
        "schema fleet` prints a JSON Schema.",
        "The first file that is used on a store becomes the store's policy, which binds every process on it: "
        "see [Give an agent a budget](../how-to/budget.md#the-store-keeps-it).",
        "`agents.limits` are the most that any agent may have; without them, an agent's own defaults hold.",
    )
    return first + "\n" + _keys(FleetSpec, _of_fleet()) + "\n" + _forms()


def _keys(kind: type[msgspec.Struct], defaults: Mapping[str, str]) -> str:
    rows = _rows([cast("inspect.StructType", inspect.type_info(kind))], "", defaults)
    return table(("key", "is", "if not given", "meaning"), ((code(key), *rest) for key, *rest in rows))


def _forms() -> str:
    rows = ((SHORT.get(name, name), word.expected) for name, word in SCALAR_FORMS.items())
    return f"{FORMS}\n\n" + table(("form", "write"), rows)


def _rows(kinds: Sequence[inspect.StructType], path: str, defaults: Mapping[str, str]) -> Iterator[Row]:
    """List the keys of a mapping, with nested keys in place; a key of only some of its kinds says of which."""
    tags = [str(kind.tag) for kind in kinds]
    tag_field = kinds[0].tag_field or BY_KEY
    if tag_field != BY_KEY:
        yield path + tag_field, ", ".join(map(code, tags)), "needed", find_spec(kinds[0]).KIND
    for name in dict.fromkeys(field.encode_name for kind in kinds for field in kind.fields):
        having = {str(kind.tag): field for kind in kinds for field in kind.fields if field.encode_name == name}
        fields = [field for field in having.values() if not is_deprecated(field.type)]
        below = [each for field in fields for each in _below(field.type, path + name)]
        if below:
            below_kinds = {kind.cls: kind for kind, _ in below}
            yield from _rows([*below_kinds.values()], below[0][1], defaults)
        elif fields:
            meaning = " ".join(dict.fromkeys(_meaning(field.type) for field in fields))
            owners = [code(tag if tag_field == BY_KEY else f"{tag_field}: {tag}") for tag in having]
            note = f" Only with {' or '.join(owners)}." if name not in tags and len(having) < len(kinds) else ""
            shown = defaults.get(path + name) or _default(fields[0])
            if tag_field == BY_KEY and name in tags and len(having) < len(kinds):
                shown += f", or {' or '.join(code(tag) for tag in dict.fromkeys(tags) if tag != name)}"
            yield path + name, _is(fields[0].type), shown, meaning + note


def _below(kind: inspect.Type, path: str) -> list[tuple[inspect.StructType, str]]:
    """Find the mappings below a key, and the prefixes of their keys."""
    match _bare(kind):
        case inspect.StructType() as struct:
            return [(struct, f"{path}.")]
        case inspect.VarTupleType() as items:
            return _below(items.item_type, f"{path}[]")
        case inspect.DictType() as free:
            return _below(free.value_type, f"{path}.{FREE.get(path.rpartition('.')[2], 'NAME')}")
        case inspect.UnionType() as union:
            return [found for member in union.types for found in _below(member, path)]
        case _:
            return []


def _bare(kind: inspect.Type) -> inspect.Type:
    """Remove metadata and None from a type."""
    match kind:
        case inspect.Metadata():
            return _bare(kind.type)
        case inspect.UnionType():
            other_types = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
            return _bare(other_types[0]) if len(other_types) == 1 else inspect.UnionType(tuple(other_types))
        case _:
            return kind


def _said(kind: inspect.Type) -> Iterator[inspect.Metadata]:
    match kind:
        case inspect.Metadata():
            yield kind
            yield from _said(kind.type)
        case inspect.UnionType():
            for member in kind.types:
                yield from _said(member)
        case _:
            return


def _meaning(kind: inspect.Type) -> str:
    for metadata in _said(kind):
        extra = cast("dict[str, Any]", cast("Any", metadata).extra_json_schema or {})
        if "description" in extra:
            return str(extra["description"])
    return ""


def _is(kind: inspect.Type) -> str:
    """Describe the type of a key in a few words."""
    for metadata in _said(kind):
        if form := name_written_form(metadata):
            return SHORT.get(form, form)
    match _bare(kind):
        case inspect.LiteralType() as words:
            return ", ".join(code(word) for word in words.values)
        case inspect.VarTupleType() as items:
            return f"list: {_is(items.item_type)}"
        case inspect.DictType() as free:
            return f"mapping {_named(free.key_type)}: {_is(free.value_type)}".replace(" :", ":")
        case inspect.UnionType() as union:
            return " or ".join(dict.fromkeys(_is(member) for member in union.types))
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.IntType() | inspect.FloatType() as number:
            return _number(number)
        case inspect.StrType():
            return "text"
        case inspect.DecimalType():
            return "number"
        case inspect.StructType():
            return "mapping"
        case _:
            return "anything"


def _named(kind: inspect.Type) -> str:
    """Describe the allowed keys of a mapping, if they are fixed."""
    words = _bare(kind)
    return f"of {', '.join(code(word) for word in words.values)}" if isinstance(words, inspect.LiteralType) else ""


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    name = "integer" if isinstance(kind, inspect.IntType) else "number"
    match kind.ge, kind.le:
        case None, None:
            return name
        case least, None:
            return f"{name}, at least {least}"
        case least, most:
            return f"{name} from {least} to {most}"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "needed"
    default = read_default(field)
    return NOTHING if default in (NODEFAULT, UNSET) else _shown(default, _form(field.type))


def _form(kind: inspect.Type) -> str:
    return next((form for metadata in _said(kind) if (form := name_written_form(metadata))), "")


def _shown(value: Any, form: str) -> str:
    match value:
        case bool():
            return code(str(value).lower())
        case int() if form in {"duration", "lasting"}:
            return format_duration(value)
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
        case str():
            return code(value) if value else "none"
        case tuple() | dict():
            return ", ".join(code(str(each)) for each in cast("Iterable[Any]", value)) or "none"
        case _:
            return NOTHING


def _in_force() -> Mapping[str, str]:
    """Compute the settings of an agent that defines only its name."""
    agent = parse_agent(load_bytes(b"name: x\n", "agent.yaml"))
    policy, mind = (
        resolve_policy(FleetConfig(), agent),
        resolve_agent(FleetConfig(), agent, Path("nowhere")).model_settings,
    )
    defaults = {"mode": code(policy.mode), "observe": code(str(policy.observe).lower()), "phases": "`work`"}
    for key in Limits.__struct_fields__:
        value = getattr(policy, key, getattr(mind, key, None))
        if value is not None:
            defaults[f"limits.{key}"] = _shown(value, "duration" if key in ("timeout", "outage_backoff") else "")
    defaults["limits.context_window"] += f"; {MAX_AUTONOMOUS_WINDOW} for an agent that runs by itself"
    return {**defaults, **_caps(policy.caps), "policy.approval_expiry": format_duration(policy.approval_expiry)}


def _caps(caps: Caps) -> Mapping[str, str]:
    return {
        "limits.max_cost_usd": _dollars(caps.session.max_cost_usd),
        **{f"limits.max_cost_usd_per_{cap.per}": _dollars(cap.max_cost_usd) for cap in caps.agent},
        "limits.token_budget": "0",
    }


def _of_fleet() -> Mapping[str, str]:
    defaults = {f"limits.max_cost_usd_per_{cap.per}": _dollars(cap.max_cost_usd) for cap in Caps().fleet}
    return defaults | {"policy.approval_expiry": _in_force()["policy.approval_expiry"]}


def _dollars(cap: int | None) -> str:
    return "none" if cap is None else f"{cap / 1_000_000:.2f}"
