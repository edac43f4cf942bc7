"""How people write amounts, times and names, and what is read from it."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit
from zoneinfo import available_timezones

import msgspec

from halter.core.clock import SECOND
from halter.core.durations import parse_duration
from halter.core.errors import ConfigError
from halter.core.mind import REFLEX, SCRIPTED
from halter.core.money import DOLLAR, dollars
from halter.core.usage import ModelName

LARGEST: Final = 2**53
"""Whole numbers up to this one are the same in every store, every JSON reader and on every screen."""
NONE: Final = "none"

_RATE: Final = r"([0-9]{1,9})\s*/\s*(?:hour|h)"
_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?"
_HOST: Final = r"\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9])?|\[?[0-9a-f:.]+\]?"
_REFERABLE: Final = r"[A-Za-z_][A-Za-z0-9_.-]{0,127}"
_REFERENCE: Final = rf"\$\{{secret:{_REFERABLE}\}}"
_URL: Final = r"https?://[^\s@?#]+"
_ADDRESS: Final = r"(?:https?|wss?)://[^\s@/?#{}]+(?:[/?][^\s#{}]*)?"
_HEADER_NAME: Final = r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}"
_HEADER: Final = r"[\x20-\x7e]*"
_DAY_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_PATH_INTO: Final = r"(?:(?:[^.\[\]]+|\[[0-9]{1,9}\])(?:\.[^.\[\]]+|\[[0-9]{1,9}\])*)?"
_BARE_MODEL: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}"
_ALONE: Final = MappingProxyType({SCRIPTED: f"{SCRIPTED}:script", REFLEX: f"{REFLEX}:rules"})
_ONE_MODEL: Final = rf"{SCRIPTED}|{REFLEX}|[^\s:/*]+[:/][^\s*](?:[^*]*[^\s*])?"
SMALLEST_WINDOW: Final = 1000
LARGEST_WINDOW: Final = 100_000_000
_MONEY: Final = {"type": "number", "minimum": 0}
_TIME: Final = {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}


class Unfit(ValueError):
    """A value that cannot be read as what it stands for. Its words, if it has any, say what to write instead."""


class Word(msgspec.Struct, frozen=True):
    """A form of writing: how it is read, what it is, and its JSON Schema. `read` raises Unfit.

    What stands where a `secret` thing belongs may be the secret itself: no sentence quotes it.
    """

    read: Callable[[Any], Any]
    expected: str
    schema: Mapping[str, Any]
    secret: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _duration(value: Any) -> int:
    if isinstance(value, str):
        try:
            micros = parse_duration(value)
        except ConfigError:
            raise Unfit from None
    elif _is_number(value):
        micros = round(value * SECOND)
    else:
        raise Unfit
    if not 0 <= micros <= LARGEST:
        raise Unfit
    return micros


def _dollars(value: Any) -> int:
    if not _is_number(value) or not 0 <= value <= LARGEST // DOLLAR:
        raise Unfit
    return dollars(value)


def _rate(value: Any) -> int:
    found = re.fullmatch(_RATE, value) if isinstance(value, str) else None
    if found is None:
        raise Unfit
    return int(found[1])


def _or_none(read: Callable[[Any], int]) -> Callable[[Any], int | None]:
    return lambda value: None if value == NONE else read(value)


def _matching(pattern: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise Unfit
        return value

    return read


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _zone(value: Any) -> str:
    if not isinstance(value, str) or value not in _zones():
        raise Unfit
    return value


def _host(value: Any) -> str:
    return _matching(_HOST)(value.lower() if isinstance(value, str) else value)


def _models(value: Any) -> str:
    """Read a model or a pattern of models."""
    if value == "*":
        return value
    model = _named(value)
    if "*" in model[:-1]:
        raise Unfit
    return model


def _model(value: Any) -> str:
    """Read exactly one model."""
    model = _named(value)
    if "*" in model:
        raise Unfit
    return model


def _named(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise Unfit
    try:
        return _ALONE.get(value) or str(ModelName.parse(value))
    except ValueError:
        raise Unfit(_with_provider(value)) from None


def _with_provider(value: str) -> str:
    """Say how to write a model of which only the name was given."""
    if not re.fullmatch(_BARE_MODEL, value):
        return ""
    return f"write its provider before it, as in openai:{value} or ollama:{value}"


def _window(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Unfit
    if value != 0 and not SMALLEST_WINDOW <= value <= LARGEST_WINDOW:
        raise Unfit
    return value


def _url(value: Any) -> str:
    """Read an address of the web. What could hold a password, or be lost on the way, has no place in it."""
    return _usable(_matching(_URL)(value)).rstrip("/")


def _usable(address: str) -> str:
    try:
        parts = urlsplit(address)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise Unfit from None
    if not usable or not address.isprintable():
        raise Unfit
    return address


def _address(value: Any) -> str:
    """Read an address that is asked again and again: all of it counts, also what follows a `?`."""
    return _usable(_matching(_ADDRESS)(value))


def _header(value: Any) -> str:
    """Read the value of a header. A reference that is none would be sent as it stands."""
    text = _matching(_HEADER)(value)
    if "${" in re.sub(_REFERENCE, "", text):
        raise Unfit
    return text


def _text(pattern: str) -> Mapping[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def _unless_none(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"anyOf": [schema, {"const": NONE}]}


WORDS: Final[Mapping[str, Word]] = MappingProxyType(
    {
        "duration": Word(_duration, "a duration, as in 30s, 15m or 1h30m", _TIME),
        "lasting": Word(_or_none(_duration), "a duration, as in 90d, or none", _TIME),
        "dollars": Word(
            _or_none(_dollars), "a number of dollars, as in 0.50, or none for no cap", _unless_none(_MONEY)
        ),
        "rate": Word(_or_none(_rate), "a rate, as in 20/hour, or none", _unless_none(_text(_RATE))),
        "zone": Word(_zone, "a time zone, as in Europe/Berlin", {"type": "string"}),
        "name": Word(_matching(_NAME), "a name of up to 64 letters, digits, - and _", _text(_NAME)),
        "host": Word(_host, "a host, as in api.example.com, *.example.com or * for all", {"type": "string"}),
        "models": Word(_models, "a model, as in anthropic:claude-sonnet-4-5 or anthropic:*", {"type": "string"}),
        "model": Word(
            _model,
            "one model, as in anthropic:claude-sonnet-4-5, or one of the words scripted and reflex",
            _text(_ONE_MODEL),
        ),
        "window": Word(
            _window,
            f"0 for the model's own window, or a number of tokens from {SMALLEST_WINDOW} to {LARGEST_WINDOW}",
            {"anyOf": [{"const": 0}, {"type": "integer", "minimum": SMALLEST_WINDOW, "maximum": LARGEST_WINDOW}]},
        ),
        "url": Word(
            _url,
            "an address, as in https://api.example.com/v1, without a password, a ? or a # in it",
            _text(_URL),
            secret=True,
        ),
        "reference": Word(
            _matching(_REFERENCE),
            "a reference, as in ${secret:OPENAI}, to a key that stands in HALTER_SECRET_OPENAI",
            _text(_REFERENCE),
            secret=True,
        ),
        "address": Word(
            _address,
            "an address, as in https://api.example.com/prices or wss://api.example.com/feed, "
            "without a password, a secret or a # in it",
            _text(_ADDRESS),
            secret=True,
        ),
        "header_name": Word(_matching(_HEADER_NAME), "the name of a header, as in Authorization", _text(_HEADER_NAME)),
        "header": Word(
            _header,
            "text on one line, without accents; a key is best written as in Bearer ${secret:API_KEY}",
            _text(_HEADER),
            secret=True,
        ),
        "day_time": Word(_matching(_DAY_TIME), "a time of day from 00:00 to 23:59, as in 08:00", _text(_DAY_TIME)),
        "path_into": Word(
            _matching(_PATH_INTO), "the way into a reading, as in quotes.AAPL or items[0].price", _text(_PATH_INTO)
        ),
        "secret": Word(
            _matching(_REFERABLE), "the name of a secret, made of letters, digits, _, . and -", _text(_REFERABLE)
        ),
    }
)
