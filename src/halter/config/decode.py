"""Decodes plain values into frozen structs, and builds JSON Schemas of the same structs.

The types of the structs define what a file may contain. They are walked together with the values, so that an error has
its whole key path, also inside mappings with free keys.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit
from zoneinfo import available_timezones

import msgspec
from msgspec import UNSET, UnsetType, inspect

from halter.config.yaml_reader import Document, KeyPath, Mistake, SourceMap
from halter.core.clock import DAY_TIME_PATTERN, SECOND, format_duration, parse_duration
from halter.core.errors import ConfigError
from halter.core.money import DOLLAR, usd_to_micros
from halter.core.text import describe_value, join_names, shorten, suggest_nearest
from halter.core.usage import ModelName
from halter.spec.agent import AgentSpec
from halter.spec.fleet import FleetSpec
from halter.spec.forms import BY_KEY, Spec, UnusableKey
from halter.spec.models import REFLEX, SCRIPTED

MAX_SAFE_INTEGER: Final = 2**53
"""The largest integer that every store and JSON parser represents exactly."""
NONE_WORD: Final = "none"

_RATE: Final = r"([0-9]{1,9})\s*/\s*(?:hour|h)"
_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?"
_HOST: Final = r"\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9])?|\[?[0-9a-f:.]+\]?"
_REFERABLE: Final = r"[A-Za-z_][A-Za-z0-9_.-]{0,127}"
_REFERENCE: Final = rf"\$\{{secret:{_REFERABLE}\}}"
_URL: Final = r"https?://[^\s@?#]+"
_ADDRESS: Final = r"(?:https?|wss?)://[^\s@/?#{}]+(?:[/?][^\s#{}]*)?"
_MAIL_ADDRESS: Final = r"[^\s@,;<>\"]+@[^\s@,;<>\"]+"
_TEXT: Final = {"type": "string", "minLength": 1}
_HEADER_NAME: Final = r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}"
_HEADER: Final = r"[\x20-\x7e]*"
_PATH_INTO: Final = r"(?:(?:[^.\[\]]+|\[[0-9]{1,9}\])(?:\.[^.\[\]]+|\[[0-9]{1,9}\])*)?"
_ARGUMENT_USE: Final = r"(?:destination|target|amount|content|detail)(?::[a-z][a-z0-9_-]{0,31})?"
_BARE_MODEL: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}"
_MODEL_BY_WORD: Final = MappingProxyType({SCRIPTED: f"{SCRIPTED}:script", REFLEX: f"{REFLEX}:rules"})
_ONE_MODEL: Final = rf"{SCRIPTED}|{REFLEX}|[^\s:/*]+[:/][^\s*](?:[^*]*[^\s*])?"
MAX_PLACES: Final = 2
MIN_CONTEXT_WINDOW: Final = 1000
MAX_CONTEXT_WINDOW: Final = 100_000_000
_MONEY: Final = {"type": "number", "minimum": 0}
_TIME: Final = {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}


class UnfitValue(ValueError):
    """A value does not have its scalar form. The message, if any, is the fix."""


class ScalarForm(msgspec.Struct, frozen=True):
    """The form in which a scalar is written: its parser (raises UnfitValue), description and JSON Schema.

    The value of a form that `is_secret` may be the secret itself, so no message quotes it.
    """

    read: Callable[[Any], Any]
    expected: str
    schema: Mapping[str, Any]
    is_secret: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _duration(value: Any) -> int:
    if isinstance(value, str):
        try:
            micros = parse_duration(value)
        except ConfigError:
            raise UnfitValue from None
    elif _is_number(value):
        micros = round(value * SECOND)
    else:
        raise UnfitValue
    if not 0 <= micros <= MAX_SAFE_INTEGER:
        raise UnfitValue
    return micros


def _dollars(value: Any) -> int:
    """Parse an amount, which is a number in a file and may be a Decimal in a program."""
    exact = isinstance(value, Decimal) and value.is_finite()
    if not (exact or _is_number(value)) or not 0 <= value <= MAX_SAFE_INTEGER // DOLLAR:
        raise UnfitValue
    return usd_to_micros(value)


def _rate(value: Any) -> int:
    match = re.fullmatch(_RATE, value) if isinstance(value, str) else None
    if match is None:
        raise UnfitValue
    return int(match[1])


def _or_none(read: Callable[[Any], int]) -> Callable[[Any], int | None]:
    return lambda value: None if value == NONE_WORD else read(value)


def _make_pattern_reader(pattern: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise UnfitValue
        return value

    return read


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _zone(value: Any) -> str:
    if not isinstance(value, str) or value not in _zones():
        raise UnfitValue
    return value


def _host(value: Any) -> str:
    return _make_pattern_reader(_HOST)(value.lower() if isinstance(value, str) else value)


def _models(value: Any) -> str:
    if value == "*":
        return value
    model = _read_model_name(value)
    if "*" in model[:-1]:
        raise UnfitValue
    return model


def _model(value: Any) -> str:
    model = _read_model_name(value)
    if "*" in model:
        raise UnfitValue
    return model


def _read_model_name(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise UnfitValue
    try:
        return _MODEL_BY_WORD.get(value) or str(ModelName.parse(value))
    except ValueError:
        raise UnfitValue(_require_provider(value)) from None


def _require_provider(value: str) -> str:
    if not re.fullmatch(_BARE_MODEL, value):
        return ""
    return f"add the provider, as in openai:{value} or ollama:{value}"


def _window(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnfitValue
    if value != 0 and not MIN_CONTEXT_WINDOW <= value <= MAX_CONTEXT_WINDOW:
        raise UnfitValue
    return value


def _url(value: Any) -> str:
    """Parse a base URL. Credentials, queries and fragments are rejected."""
    return _require_usable(_make_pattern_reader(_URL)(value)).rstrip("/")


def _require_usable(address: str) -> str:
    try:
        url_parts = urlsplit(address)
        is_usable = bool(url_parts.hostname) and url_parts.port != 0
    except ValueError:
        raise UnfitValue from None
    if not is_usable or not address.isprintable():
        raise UnfitValue
    return address


def _address(value: Any) -> str:
    """Parse the URL of a sensor or a webhook, including its query."""
    return _require_usable(_make_pattern_reader(_ADDRESS)(value))


def _header(value: Any) -> str:
    """Parse the value of a header. A malformed reference is rejected, since it would be sent literally."""
    text = _make_pattern_reader(_HEADER)(value)
    if "${" in re.sub(_REFERENCE, "", text):
        raise UnfitValue
    return text


def _mail_address(value: Any) -> str:
    address = _require_text(value)
    if not re.fullmatch(_MAIL_ADDRESS, address) or not address.isprintable():
        raise UnusableKey("is not an e-mail address; write one address, as in ada@example.com.")
    return address


def _file_pattern(value: Any) -> str:
    pattern = _require_text(value)
    parts = pattern.split("/")
    if parts[0] in {"", "~"} or ".." in parts or "\0" in pattern:
        sentence = f"is `{shorten(pattern)}`, which leads out of its folder"
        raise UnusableKey(f"{sentence}; write it relative to the folder, as in *.pdf or **/*.md.")
    return pattern


def _require_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UnfitValue
    return value


def _text(pattern: str) -> Mapping[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def _unless_none(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"anyOf": [schema, {"const": NONE_WORD}]}


def _pattern_form(pattern: str, expected: str, *, secret: bool = False) -> ScalarForm:
    return ScalarForm(_make_pattern_reader(pattern), expected, _text(pattern), secret)


SCALAR_FORMS: Final[Mapping[str, ScalarForm]] = MappingProxyType(
    {
        "duration": ScalarForm(_duration, "a duration, as in 30s, 15m or 1h30m", _TIME),
        "lasting": ScalarForm(_or_none(_duration), "a duration, as in 90d, or none", _TIME),
        "dollars": ScalarForm(
            _or_none(_dollars), "a number of dollars, as in 0.50, or none for no cap", _unless_none(_MONEY)
        ),
        "rate": ScalarForm(_or_none(_rate), "a rate, as in 20/hour, or none", _unless_none(_text(_RATE))),
        "zone": ScalarForm(_zone, "a time zone, as in Europe/Berlin", {"type": "string"}),
        "name": _pattern_form(_NAME, "a name of up to 64 letters, digits, - and _"),
        "host": ScalarForm(_host, "a host, as in api.example.com, *.example.com or * for all", {"type": "string"}),
        "models": ScalarForm(_models, "a model, as in anthropic:claude-sonnet-5-5 or anthropic:*", {"type": "string"}),
        "model": ScalarForm(
            _model,
            "one model, as in anthropic:claude-sonnet-5-5, or scripted or reflex",
            _text(_ONE_MODEL),
        ),
        "window": ScalarForm(
            _window,
            f"0 for the model's own window, or a number of tokens from {MIN_CONTEXT_WINDOW} to {MAX_CONTEXT_WINDOW}",
            {
                "anyOf": [
                    {"const": 0},
                    {"type": "integer", "minimum": MIN_CONTEXT_WINDOW, "maximum": MAX_CONTEXT_WINDOW},
                ]
            },
        ),
        "url": ScalarForm(
            _url,
            "a URL, as in https://api.example.com/v1, without a password, a query or a fragment",
            _text(_URL),
            is_secret=True,
        ),
        "reference": _pattern_form(
            _REFERENCE,
            "a reference to a secret, as in ${secret:OPENAI} for the key in HALTER_SECRET_OPENAI",
            secret=True,
        ),
        "address": ScalarForm(
            _address,
            "a URL, as in https://api.example.com/prices or wss://api.example.com/feed, "
            "without a password, a secret or a fragment",
            _text(_ADDRESS),
            is_secret=True,
        ),
        "header_name": _pattern_form(_HEADER_NAME, "the name of a header, as in Authorization"),
        "header": ScalarForm(
            _header,
            "one line of ASCII text; write a key as in Bearer ${secret:API_KEY}",
            _text(_HEADER),
            is_secret=True,
        ),
        "day_time": _pattern_form(DAY_TIME_PATTERN, "a time of day from 00:00 to 23:59, as in 08:00"),
        "path_into": _pattern_form(_PATH_INTO, "a path into a reading, as in quotes.AAPL or items[0].price"),
        "use": _pattern_form(
            _ARGUMENT_USE,
            "destination, target, amount, content or detail, with an optional kind, as in destination:address",
        ),
        "mail": ScalarForm(_mail_address, "an e-mail address, as in ada@example.com", _TEXT),
        "pattern": ScalarForm(_file_pattern, "a pattern of files, as in *.pdf or **/*.md", _TEXT),
        "secret": _pattern_form(_REFERABLE, "the name of a secret, with letters, digits, _, . and -"),
    }
)


T = TypeVar("T")


_describe_type = cache(inspect.type_info)


def decode_document(document: Document, kind: type[T]) -> T:
    return cast("T", _Reader(document.source_map).read(_describe_type(kind), document.value, ()))


def name_written_form(kind: inspect.Type) -> str:
    extra: Any = getattr(kind, "extra", None)
    return extra["written"] if extra and "written" in extra else ""


def is_hidden(kind: inspect.Type) -> bool:
    """Return true if the value could be a key by mistake, so that no message quotes it."""
    extra: Any = getattr(kind, "extra", None)
    return bool(extra and extra.get("hidden")) or (isinstance(kind, inspect.StructType) and find_spec(kind).HIDDEN)


def is_deprecated(kind: inspect.Type) -> bool:
    """True if the key is a former name, which is understood and not shown."""
    extra: Any = getattr(kind, "extra", None)
    return bool(extra and extra.get("deprecated"))


def find_spec(kind: inspect.StructType) -> type[Spec]:
    """Return what the class of a mapping says of its keys; a class that says nothing has the defaults."""
    return kind.cls if issubclass(kind.cls, Spec) else Spec


def format_key_path(path: KeyPath) -> str:
    """Format a key path, as in `policy.tools.shell.rate` or `allowed_hosts[2]`; indexes start at 1."""
    text = "".join(f"[{step + 1}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def make_mistake(path: KeyPath, sentence: str) -> Mistake:
    return path, f"`{format_key_path(path)}` {sentence}"


def value_or_default(value: T | UnsetType, default: T) -> T:
    return default if value is UNSET else value


class _Reader:
    def __init__(self, source_map: SourceMap) -> None:
        self._source_map = source_map

    def read(self, kind: inspect.Type, value: Any, path: KeyPath) -> Any:
        if form := name_written_form(kind):
            return self._require_range(kind, self._read_word(form, value, path), path)
        match kind:
            case inspect.Metadata():
                if is_hidden(kind):
                    self._mapping(value, path, hidden=True)
                return self._require_range(kind, self.read(kind.type, value, path), path)
            case inspect.StructType():
                return self._struct(kind, self._mapping(value, path, hidden=is_hidden(kind)), path)
            case inspect.DictType():
                return self._free(kind, self._mapping(value, path), path)
            case inspect.VarTupleType():
                if not isinstance(value, list):
                    raise self._make_error(value, "a list, as in [one, two]", path)
                items = cast("list[Any]", value)
                return tuple(self.read(kind.item_type, item, (*path, index)) for index, item in enumerate(items))
            case inspect.UnionType():
                kinds = _list_kinds(kind)
                is_kind = kinds and (isinstance(value, dict) or len(kinds) == len(kind.types))
                member = self._choose_kind(kinds, value, path) if is_kind else _member(kind, value)
                return self.read(member, value, path)
            case inspect.LiteralType():
                if value not in kind.values:
                    sentence = f"`{format_key_path(path)}` is {describe_value(value)}, which is not one of its values"
                    hint = suggest_nearest(str(value), [str(form) for form in kind.values], "they")
                    raise self._source_map.error_at(path, f"{sentence}; {hint}")
                return value
            case inspect.AnyType():
                return value
            case _:
                return self._leaf(kind, value, path)

    def _make_error(self, value: Any, expected: str, path: KeyPath, *, hidden: bool = False) -> Exception:
        if hidden and value is not None:
            sentence = f"`{format_key_path(path)}` must be {expected}. The value is not shown, as it may be a secret."
            return self._source_map.error_at(path, sentence)
        subject = f"`{format_key_path(path)}` is" if path else "the file is"
        return self._source_map.error_at(path, f"{subject} {describe_value(value)}, but must be {expected}.")

    def _read_word(self, form: str, value: Any, path: KeyPath) -> Any:
        try:
            return SCALAR_FORMS[form].read(value)
        except UnusableKey as error:
            raise self._source_map.error_at(*make_mistake(path, str(error))) from None
        except UnfitValue as error:
            hint = f"; {error}" if str(error) else ""
            raise self._make_error(
                value, f"{SCALAR_FORMS[form].expected}{hint}", path, hidden=SCALAR_FORMS[form].is_secret
            ) from None

    def _mapping(self, value: Any, path: KeyPath, *, hidden: bool = False) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._make_error(value, "a mapping, with a `key: value` on each line", path, hidden=hidden)
        return cast("dict[str, Any]", value)

    def _require_range(self, kind: inspect.Type, value: Any, path: KeyPath) -> Any:
        """Return a number that is within the range of its key, if any."""
        extra: Any = getattr(kind, "extra", None)
        if not extra or "range" not in extra or value is None:
            return value
        low, high, sentence = extra["range"]
        if low < value and (high is None or value <= high):
            return value
        is_time = name_written_form(kind) == "duration"
        text = format_duration(value) if is_time and value else f"{value:g}"
        raise self._source_map.error_at(*make_mistake(path, sentence.format(value=text)))

    def _choose_kind(self, kinds: Sequence[inspect.StructType], value: Any, path: KeyPath) -> inspect.StructType:
        """Choose the kind of a mapping: by the word under its tag field, or by the key that only this kind has."""
        mapping, spec = self._mapping(value, path, hidden=is_hidden(kinds[0])), find_spec(kinds[0])
        key_by_name = {spec.ALIASES.get(key, key): key for key in mapping}
        kind_by_tag = {str(kind.tag): kind for kind in kinds}
        if (tag_field := str(kinds[0].tag_field)) == BY_KEY:
            names = [name for name in kind_by_tag if name in key_by_name]
            known_names = {name for kind in kinds for name in _list_keys(kind)}
            for name, key in key_by_name.items() if not names else ():
                if name not in known_names:
                    self._require_no_effect(kinds, name, mapping[key], (*path, key))
            self._require_one(names, key_by_name, spec.NO_KIND, path)
            return kind_by_tag[names[0]]
        if tag_field not in mapping:
            raise self._missing(kinds[0], tag_field, path)
        word = mapping[tag_field]
        former_values = spec.FORMER_VALUES.get(tag_field, {})
        word = former_values.get(word, word) if isinstance(word, str) else word
        return kind_by_tag[self.read(inspect.LiteralType(tuple(sorted(kind_by_tag))), word, (*path, tag_field))]

    def _require_one(self, names: Sequence[str], key_by_name: Mapping[str, str], sentence: str, path: KeyPath) -> None:
        """Require that one of several keys is written."""
        if not names:
            raise self._source_map.error_at(*make_mistake(path, sentence))
        if len(names) > 1:
            _, sentence = make_mistake(path, f"has both `{names[0]}` and `{names[1]}`; keep one of them.")
            raise self._source_map.error_at((*path, key_by_name[names[1]]), sentence)

    def _struct(self, kind: inspect.StructType, value: dict[str, Any], path: KeyPath) -> Any:
        fields = {field.encode_name: field for field in kind.fields}
        key_by_name = self._own_names(kind, value, path)
        values: dict[str, Any] = {}
        for name, key in key_by_name.items():
            if name in fields:
                written = self._replace_former_value(kind, name, value[key], (*path, key))
                values[fields[name].name] = self.read(fields[name].type, written, (*path, key))
            elif name == kind.tag_field != BY_KEY:
                self._replace_former_value(kind, name, value[key], (*path, key))
            else:
                self._require_no_effect([kind], name, value[key], (*path, key))
        for name, field in fields.items():
            if field.required and name not in key_by_name:
                raise self._missing(kind, name, path)
        try:
            result = kind.cls(**values)
        except ValueError as error:
            raise self._source_map.error_at(path, str(error)) from None
        if isinstance(result, Spec):
            for names, sentence in result.CHOICES.items():
                written_names = [name for name in names if str(values.get(name, "")).strip()]
                self._require_one(written_names, key_by_name, sentence, path)
            try:
                result.require_fit()
            except UnusableKey as error:
                raise self._source_map.error_at(*make_mistake((*path, *error.keys), str(error))) from None
        return result

    def _missing(self, kind: inspect.StructType, name: str, path: KeyPath) -> Exception:
        if (sentence := find_spec(kind).MISSING) and name != kind.tag_field:
            return self._source_map.error_at(*make_mistake(path, sentence.format(kind=kind.tag, key=name)))
        location = f"`{format_key_path(path)}`" if path else self._source_map.file
        return self._source_map.error_at(path, f"`{name}` is missing from {location}; write it.")

    def _require_no_effect(self, kinds: Sequence[inspect.StructType], name: str, value: Any, path: KeyPath) -> None:
        """Require that a key which a mapping does not have has its default in the kinds that have it."""
        kind = kinds[0]
        for other in _list_other_kinds(kind):
            field = next((field for field in other.fields if field.encode_name == name), None)
            if field is None:
                continue
            try:
                has_effect = self.read(field.type, value, path) != read_default(field)
            except ConfigError:
                has_effect = True
            if has_effect:
                own_names = [field.encode_name for field in kind.fields if field.encode_name != "name"]
                sentence = find_spec(kind).FOREIGN_KEYS.get(name, find_spec(kind).FOREIGN)
                words = {"kind": kind.tag, "owner": other.tag, "keys": join_names(own_names)}
                raise self._source_map.error_at(*make_mistake(path, sentence.format(**words)))
            return
        places = _list_places(kinds, name)
        if places:
            hint = f"write it under {' or '.join(f'`{place}`' for place in places)}."
        else:
            keys = dict.fromkeys(key for each in kinds for key in _list_keys(each))
            hint = suggest_nearest(name, [*keys], "its keys")
        raise self._unknown(name, hint, path)

    def _own_names(self, kind: inspect.StructType, value: dict[str, Any], path: KeyPath) -> dict[str, str]:
        """Map the names of the fields to the keys in the file."""
        aliases = find_spec(kind).ALIASES
        names: dict[str, str] = {}
        for key in value:
            name = aliases.get(key, key)
            if name in names:
                raise self._source_map.error_at(
                    (*path, key), f"`{key}` and `{names[name]}` are two names of one key; keep one of them."
                )
            names[name] = key
            if name != key:
                self._source_map.rename(path, key, name)
        return names

    def _replace_former_value(self, kind: inspect.StructType, name: str, value: Any, path: KeyPath) -> Any:
        former_values = find_spec(kind).FORMER_VALUES.get(name, {})
        if not isinstance(value, str) or value not in former_values:
            return value
        self._source_map.former_names.append(
            f"{self._source_map.at(path)}: `{name}: {value}` is now written `{name}: {former_values[value]}`."
        )
        return former_values[value]

    def _unknown(self, key: str, hint: str, path: KeyPath) -> Exception:
        location = f"`{format_key_path(path[:-1])}`" if len(path) > 1 else self._source_map.file
        return self._source_map.error_at(path, f"`{key}` is not a key of {location}; {hint}")

    def _free(self, kind: inspect.DictType, value: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        if kind.min_length and len(value) < kind.min_length:
            raise self._make_error(None, "a mapping with at least one key", path)
        return {
            self._free_key(kind.key_type, key, path): self.read(kind.value_type, item, (*path, key))
            for key, item in value.items()
        }

    def _free_key(self, kind: inspect.Type, key: str, path: KeyPath) -> str:
        if isinstance(kind, inspect.LiteralType) and key not in kind.values:
            raise self._unknown(key, suggest_nearest(key, [*map(str, kind.values)], "its keys"), (*path, key))
        return self.read(kind, key, (*path, key))

    def _leaf(self, kind: inspect.Type, value: Any, path: KeyPath) -> Any:
        match kind, value:
            case inspect.BoolType(), bool():
                return value
            case inspect.StrType(), str() if len(value) >= (kind.min_length or 0):
                return value
            case inspect.IntType(), int() if not isinstance(value, bool) and _is_in_range(kind, value):
                return value
            case inspect.FloatType(), int() | float() if not isinstance(value, bool) and _is_in_range(kind, value):
                return float(value)
            case inspect.DecimalType(), int() | float() if not isinstance(value, bool):
                return Decimal(str(value))
            case _:
                raise self._make_error(value, _describe_expected(kind), path)


def _is_in_range(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    low = -MAX_SAFE_INTEGER if kind.ge is None else kind.ge
    high = MAX_SAFE_INTEGER if kind.le is None else kind.le
    return low <= value <= high


def _describe_expected(kind: inspect.Type) -> str:
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
    lower_bound_text = f" from {kind.ge} up" if kind.ge is not None else ""
    return f" from {kind.ge} to {kind.le}" if kind.le is not None else lower_bound_text


def _member(kind: inspect.UnionType, value: Any) -> inspect.Type:
    """Choose the member of a union by the type of the value; messages name the first member."""
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return next((member for member in members if _looks_like(member, value)), members[0])


def _list_kinds(kind: inspect.UnionType) -> list[inspect.StructType]:
    """List the members of a union that are told apart by their tags."""
    structs = [member for member in kind.types if isinstance(member, inspect.StructType)]
    return structs if len(structs) > 1 else []


def _list_other_kinds(kind: inspect.StructType) -> Iterator[inspect.StructType]:
    """List the other kinds of a mapping, those nearest in its family first."""
    for base in kind.cls.__mro__[1:]:
        if not issubclass(base, Spec) or base.__struct_config__.tag_field is None:
            return
        for other in _list_subclasses(base):
            if other is not kind.cls and other.__struct_config__.tag != other.__name__:
                yield cast("inspect.StructType", _describe_type(other))


def _list_subclasses(base: type[Spec]) -> Iterator[type[Spec]]:
    for each in base.__subclasses__():
        yield each
        yield from _list_subclasses(each)


def _list_keys(kind: inspect.StructType) -> Iterator[str]:
    """List the keys of a mapping that are shown."""
    if kind.tag_field and kind.tag_field != BY_KEY:
        yield kind.tag_field
    yield from (field.encode_name for field in kind.fields if not is_deprecated(field.type))


def _list_places(kinds: Sequence[inspect.StructType], name: str) -> list[str]:
    """List the keys of a mapping under which another key belongs; none if these are many."""
    fields = {field.encode_name: field for kind in kinds for field in kind.fields}
    places = [(key, *each) for key, field in fields.items() for each in _list_nested(field.type)]
    found = [(key, in_list) for key, nested, in_list in places if name in _list_keys(nested)]
    direct = dict.fromkeys(key for key, in_list in found if not in_list) or dict.fromkeys(key for key, _ in found)
    return [*direct] if len(direct) <= MAX_PLACES else []


def _list_nested(kind: inspect.Type) -> Iterator[tuple[inspect.StructType, bool]]:
    """List the mappings that a value can be, or of which it can be a list."""
    match kind:
        case inspect.Metadata():
            if not is_deprecated(kind):
                yield from _list_nested(kind.type)
        case inspect.UnionType():
            for member in kind.types:
                yield from _list_nested(member)
        case inspect.VarTupleType():
            yield from ((nested, True) for nested, _ in _list_nested(kind.item_type))
        case inspect.StructType():
            yield kind, False
        case _:
            return


def read_default(field: inspect.Field) -> Any:
    """Return the default of a key; NODEFAULT if it has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


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


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def fleet_schema() -> dict[str, Any]:
    return _make_titled_schema("halter.yaml", FleetSpec)


def agent_schema() -> dict[str, Any]:
    return _make_titled_schema("agent.yaml", AgentSpec)


def _make_titled_schema(title: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$schema": DIALECT, "title": title, **_schema(inspect.type_info(kind))}


def _schema(kind: inspect.Type) -> dict[str, Any]:
    if form := name_written_form(kind):
        return {
            **SCALAR_FORMS[form].schema,
            "description": _read_description(kind) or f"Write {SCALAR_FORMS[form].expected}.",
        }
    match kind:
        case inspect.Metadata():
            description = _read_description(kind)
            return {**_schema(kind.type), **({"description": description} if description else {})}
        case inspect.StructType():
            return _struct(kind)
        case inspect.DictType():
            minimum = {"minProperties": kind.min_length} if kind.min_length else {}
            return {
                "type": "object",
                "additionalProperties": _schema(kind.value_type),
                **_keys(kind.key_type),
                **minimum,
            }
        case inspect.VarTupleType():
            return {"type": "array", "items": _schema(kind.item_type)}
        case inspect.UnionType():
            return {"anyOf": [_schema(member) for member in kind.types if not isinstance(member, inspect.NoneType)]}
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.AnyType():
            return {}
        case _:
            return _leaf(kind)


def _read_description(kind: inspect.Type) -> str:
    extra: Any = getattr(kind, "extra_json_schema", None)
    return extra["description"] if extra and "description" in extra else ""


def _struct(kind: inspect.StructType) -> dict[str, Any]:
    properties = {
        field.encode_name: {**_schema(field.type), **({"deprecated": True} if is_deprecated(field.type) else {})}
        for field in kind.fields
    }
    for name, former_values in find_spec(kind).FORMER_VALUES.items():
        if name == kind.tag_field:
            continue
        values = {"enum": properties[name].pop("enum")}
        properties[name]["anyOf"] = [values, {"enum": [*former_values], "deprecated": True}]
    aliases = {
        alias: {**properties[name], "deprecated": True}
        for alias, name in find_spec(kind).ALIASES.items()
        if name in properties
    }
    if kind.tag is not None and kind.tag_field != BY_KEY:
        former_words = find_spec(kind).FORMER_VALUES.get(str(kind.tag_field), {})
        words = [kind.tag, *(former for former, word in former_words.items() if word == kind.tag)]
        properties = {str(kind.tag_field): {"enum": words, "description": find_spec(kind).KIND}, **properties}
    required_names = [name for name in properties if name == kind.tag_field]
    required_names += [field.encode_name for field in kind.fields if field.required]
    return {
        "type": "object",
        "description": (kind.cls.__doc__ or "").partition("\n")[0],
        "properties": properties | aliases,
        "additionalProperties": False,
        **({"required": required_names} if required_names else {}),
    }


def _keys(kind: inspect.Type) -> Mapping[str, Any]:
    is_plain = isinstance(kind, inspect.StrType)
    return {} if is_plain else {"propertyNames": _schema(kind)}


def _leaf(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType() | inspect.FloatType():
            bounds = {"minimum": kind.ge, "maximum": kind.le}
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            return {"type": name, **{key: bound for key, bound in bounds.items() if bound is not None}}
        case inspect.DecimalType():
            return {"type": "number", "minimum": 0}
        case inspect.StrType():
            return {"type": "string", **({"minLength": kind.min_length} if kind.min_length else {})}
        case _:
            raise TypeError(f"{kind} cannot be written in YAML: give the key another type.")
