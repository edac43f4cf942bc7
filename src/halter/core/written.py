"""How people write things into files: what a mapping is read into, and the forms of writing that its values have.

`written` in a type's metadata names the form; what is read from each form stands with whoever reads the files.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

Duration = Annotated[int, Meta(extra={"written": "duration"})]
"""Microseconds, written as `30m` or as a number of seconds."""
Lasting = Annotated[int | None, Meta(extra={"written": "lasting"})]
"""Microseconds, or None for a written-out `none`."""
Dollars = Annotated[int | None, Meta(extra={"written": "dollars"})]
"""Micro-dollars, written as a number of dollars, or None for a written-out `none`."""
Rate = Annotated[int | None, Meta(extra={"written": "rate"})]
"""Attempts per hour, written as `20/hour`, or None for a written-out `none`."""
Window = Annotated[int, Meta(extra={"written": "window"})]
"""Tokens of a context, or 0 for as many as the model takes; too few to work with are refused."""
Zone = Annotated[str, Meta(extra={"written": "zone"})]
Name = Annotated[str, Meta(extra={"written": "name"})]
Host = Annotated[str, Meta(extra={"written": "host"})]
"""A host name, `*.example.com` for all hosts below a domain, or `*` for all."""
ModelPattern = Annotated[str, Meta(extra={"written": "models"})]
"""A `provider:model`, where `*` at the end stands for any rest."""
OneModel = Annotated[str, Meta(extra={"written": "model"})]
"""A `provider:model`; the two that need no network may stand as one word."""
Url = Annotated[str, Meta(extra={"written": "url"})]
"""An address of an endpoint, which must hold no password."""
Address = Annotated[str, Meta(extra={"written": "address"})]
"""An address that is read or listened to; it may have a query, and must hold no password."""
HeaderName = Annotated[str, Meta(extra={"written": "header_name"})]
HeaderValue = Annotated[str, Meta(extra={"written": "header"})]
"""The value of a header of HTTP, which may be a key: no sentence quotes it."""
DayTime = Annotated[str, Meta(extra={"written": "day_time"})]
"""A time of day, written as `08:00`."""
PathInto = Annotated[str, Meta(extra={"written": "path_into"})]
"""The way into a JSON value, as in `quotes.AAPL` or `items[0].x`; all of it, if empty."""
SecretName = Annotated[str, Meta(extra={"written": "secret"})]
SecretReference = Annotated[str, Meta(extra={"written": "reference"})]
"""A `${secret:NAME}`: the one way to write a key."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in a file. `ALSO` maps other names under which a key is understood to its own.

    What stands in place of a mapping that is `HIDDEN` may be a key by mistake: no sentence quotes it.
    """

    ALSO: ClassVar[Mapping[str, str]] = MappingProxyType({})
    HIDDEN: ClassVar[bool] = False
