"""The forms in which a file writes a value, and what a mapping in a file is.

A field has the name of its key, and its default is the key's default. `written` in a type's metadata names the form in
which the file writes the value; `config.decode` parses it. Amounts are micro-dollars and times are microseconds here;
in files they are dollars, and seconds or `30m`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

Duration = Annotated[int, Meta(extra={"written": "duration"})]
"""Microseconds, written as `30m` or as a number of seconds."""
OptionalDuration = Annotated[int | None, Meta(extra={"written": "lasting"})]
"""Microseconds, or None for `none`."""
Dollars = Annotated[int | None, Meta(extra={"written": "dollars"})]
"""Micro-dollars, written as a number of dollars, or None for `none`."""
RateValue = Annotated[int | None, Meta(extra={"written": "rate"})]
"""Attempts per hour, written as `20/hour`, or None for `none`."""
Window = Annotated[int, Meta(extra={"written": "window"})]
"""Tokens of a context window, or 0 for the model's own; a window too small to work with is rejected."""
Zone = Annotated[str, Meta(extra={"written": "zone"})]
Name = Annotated[str, Meta(extra={"written": "name"})]
Host = Annotated[str, Meta(extra={"written": "host"})]
"""A host name, `*.example.com` for all hosts below a domain, or `*` for all."""
ModelPattern = Annotated[str, Meta(extra={"written": "models"})]
"""A `provider:model`; a `*` at the end matches any suffix."""
OneModel = Annotated[str, Meta(extra={"written": "model"})]
"""A `provider:model`. `scripted` and `reflex`, which need no network, need no provider."""
Url = Annotated[str, Meta(extra={"written": "url"})]
"""The URL of an endpoint, without a password."""
Address = Annotated[str, Meta(extra={"written": "address"})]
"""A URL to read from or listen to; it may have a query, but no password."""
HeaderName = Annotated[str, Meta(extra={"written": "header_name"})]
HeaderValue = Annotated[str, Meta(extra={"written": "header"})]
"""The value of an HTTP header. It may be a key, so no message quotes it."""
DayTime = Annotated[str, Meta(extra={"written": "day_time"})]
"""A time of day, written as `08:00`."""
PathInto = Annotated[str, Meta(extra={"written": "path_into"})]
"""A path into a JSON value, as in `quotes.AAPL` or `items[0].x`; empty for the whole value."""
SecretName = Annotated[str, Meta(extra={"written": "secret"})]
ArgumentUseText = Annotated[str, Meta(extra={"written": "use"})]
"""The role of an argument and the kind of thing it names, as in `destination:address`."""
SecretReference = Annotated[str, Meta(extra={"written": "reference"})]
"""A `${secret:NAME}`, the only way to write a key."""
MailAddress = Annotated[str, Meta(min_length=1, extra={"written": "mail"})]
FilePattern = Annotated[str, Meta(min_length=1, extra={"written": "pattern"})]
"""A pattern of the files in a folder, which does not lead out of it."""
NonEmptyText = Annotated[str, Meta(min_length=1)]


class UnusableKey(ValueError):
    """Values that exclude each other: the key below the mapping, if one is to be changed, and the rest of a sentence.

    The sentence continues after the key, as in "is 0; write a duration".
    """

    def __init__(self, sentence: str, *keys: str | int) -> None:
        super().__init__(sentence)
        self.keys = keys


def within(low: float, high: float | None, sentence: str) -> dict[str, Any]:
    """Return metadata for a number above `low` and up to `high`. The sentence says why; it may quote the `{value}`."""
    return {"range": (low, high, sentence)}


BY_KEY: Final = "told_by"
"""The tag field of kinds that a file tells apart by a key that only one of them has, which is their tag."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in a file.

    `ALIASES` maps the other names of keys to their names, `FORMER_VALUES` the former values of a key to the present
    ones. Both are understood for ever and not shown.

    A value in a `HIDDEN` mapping may be a key by mistake, so no message quotes it.

    `CHOICES` are keys of which exactly one is written, with the sentence if there is none.

    The kinds of a mapping are subclasses with different tags. `KIND` describes the tag. `NO_KIND` is the sentence if no
    key says which kind it is, `MISSING` that for a `{key}` which the `{kind}` needs, and `FOREIGN` that for a key of
    the kind `{owner}`; `FOREIGN_KEYS` has its exceptions.
    """

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    HIDDEN: ClassVar[bool] = False
    CHOICES: ClassVar[Mapping[tuple[str, ...], str]] = MappingProxyType({})
    NO_KIND: ClassVar[str] = ""
    KIND: ClassVar[str] = ""
    MISSING: ClassVar[str] = ""
    FOREIGN: ClassVar[str] = ""
    FOREIGN_KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def require_fit(self) -> None:
        """Raise UnusableKey for values that exclude each other."""
