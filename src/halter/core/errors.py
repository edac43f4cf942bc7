"""Everything that can go wrong with the world, as one tree.

```
HalterError
├── NotDone                  whoever asked: it was not done, why, and what to do instead
├── ConfigError              the operator: names file, line, key, and the fix
├── ModelError               the retry policy
│   ├── ModelUnavailable         retryable
│   └── ModelRejected            never the same request again
│       └── ContextOverflow          a shorter one may do
├── ToolError                the model is told and may try another way
└── StoreError               what is not written did not happen; the session waits or stops
    ├── StoreUnavailable         retryable: the same write with the same key is harmless
    ├── StoreUnusable            a person must act: wrong URL, newer schema, corrupt file, read-only folder
    ├── LeaseLost                somebody else owns this session: stop at once
    ├── BlobMissing              an event would name a blob that is not there: put it again, then repeat the write
    ├── UndeclaredRow            a write touched a row that it had not asked for: a mistake in the program
    └── RowRefused               the database's own rules refused a row: a mistake in the program, or an edited row
```

Refusals (a cap, a halt, a missing grant) are not here: they are values, and events.
A message is a sentence for the person who can act: what, where, what to do.
"""

from collections.abc import Mapping
from typing import Final, Literal

from halter.core.usage import Usage


class HalterError(Exception):
    """Root of all errors that Halter raises on purpose."""


class NotDone(HalterError):
    """What a person asked for was not done, and nothing has changed; `why` tells programs what kind of no it is."""

    def __init__(self, sentence: str, why: "NotDoneWhy") -> None:
        super().__init__(sentence)
        self.why: NotDoneWhy = why


NotDoneWhy = Literal["wrong", "missing", "refused", "forbidden"]
"""It cannot be read; it is not there, or not theirs to see; it cannot be done as things stand; they may not."""


class ConfigError(HalterError):
    """A setting or a file that the operator wrote cannot be used as it stands."""


class ModelError(HalterError):
    """A model could not be asked, or its answer could not be used: `Kind: message`.

    `billed` is False only where nothing was charged. `usage` is what was reported until it failed; unless that was the
    `final` report, more output may have been charged than it counts. `retry_after` is what the provider asks to wait,
    in microseconds.
    """

    def __init__(
        self,
        message: str,
        *,
        billed: bool = True,
        usage: Usage | None = None,
        final: bool = False,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.billed = billed
        self.usage = usage
        self.final = final
        self.retry_after = retry_after


class ModelUnavailable(ModelError):
    """The provider may well answer the same request later."""


class ModelRejected(ModelError):
    """The provider will never accept this request."""


class ContextOverflow(ModelRejected):
    """The request is too long for its model: with less of the history it may be accepted."""


class ToolError(HalterError):
    """A tool failed in a way that its caller should hear about."""


class StoreError(HalterError):
    """The journal could not do what was asked; nothing of it happened."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or written to right now."""


class StoreUnusable(StoreError):
    """The store will not work until a person changes something."""


class LeaseLost(StoreError):
    """The session belongs to another owner now; whoever sees this must stop."""


class BlobMissing(StoreError):
    """A write would have named a blob that was never put, or was erased meanwhile; whoever has it must put it again."""


class UndeclaredRow(StoreError):
    """A decision or a projection touched a row that its write had not declared."""


class RowRefused(StoreError):
    """The database's own rules, such as the one on caps, refused what a write would have changed."""


Extra = Literal["models", "mcp", "notify", "postgres", "server", "telemetry"]

_USES: Final[Mapping[Extra, tuple[str, tuple[str, ...]]]] = {
    "models": ("A model of a provider", ("pydantic_ai", "anthropic", "google", "openai")),
    "mcp": ("An MCP server", ("mcp", "jsonschema", "referencing")),
    "notify": ("A channel of the type `apprise`", ("apprise",)),
    "postgres": ("A PostgreSQL store", ("procrastinate", "psycopg", "psycopg_pool")),
    "server": ("The server", ("fastapi", "nicegui", "starlette", "uvicorn")),
    "telemetry": ("Tracing", ("opentelemetry",)),
}
"""What needs each extra, and the modules that come with it."""


def explain_extra(extra: Extra, what: str = "") -> str:
    """Say how to install an extra, for `what` or for what usually needs it."""
    return f"{what or _USES[extra][0]} needs the extra `{extra}`: pip install 'halter[{extra}]'"


def explain_missing_module(missing: ModuleNotFoundError) -> str | None:
    """Say which extra brings a missing module; None if none does, and the installation is broken."""
    library = (missing.name or "").partition(".")[0]
    return next((explain_extra(extra) for extra, (_, libraries) in _USES.items() if library in libraries), None)
