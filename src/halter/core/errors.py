"""Everything that can go wrong with the world, as one tree.

```
HalterError
├── NotDone                  the caller: it was not done, why, and what to do instead
├── ConfigError              the operator: names file, line, key, and the fix
├── ModelError               the retry policy
│   ├── ModelUnavailable         retryable
│   └── ModelRejected            never the same request again
│       ├── ModelUnusable            a person must act: wrong key, unknown model, no credit
│       └── ContextOverflow          a shorter one may do
├── ToolError                the model is told and may try another way
└── StoreError               what is not written did not happen; the session waits or stops
    ├── StoreUnavailable         retryable: the same write with the same key is harmless
    ├── StoreUnusable            a person must act: wrong URL, newer schema, corrupt file, read-only folder
    ├── LeaseLost                another owner has this session: stop at once
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
    """What a person asked for was not done, and nothing has changed; `why` is the kind of refusal for programs."""

    def __init__(self, sentence: str, why: "NotDoneWhy") -> None:
        super().__init__(sentence)
        self.why: NotDoneWhy = why


NotDoneWhy = Literal["wrong", "missing", "refused", "forbidden"]
"""It cannot be read; it is not there, or not theirs to see; it cannot be done as things stand; they may not."""


class ConfigError(HalterError):
    pass


class ModelError(HalterError):
    """A model could not be asked, or its answer could not be used: `Kind: message`.

    `billed` is False only where nothing was charged. `usage` is what was reported before the failure; unless that was
    the `final` report, more output may have been charged. `retry_after` is the provider's requested wait, in
    microseconds.
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
    """The provider may answer the same request later."""


class ModelRejected(ModelError):
    """The provider will never accept this request."""


class ModelUnusable(ModelRejected):
    """The provider will not serve this account or model until a person changes something."""


class ContextOverflow(ModelRejected):
    """The request is too long for its model: with less history it may be accepted."""


class ToolError(HalterError):
    pass


class StoreError(HalterError):
    """The journal could not do what was asked; nothing of it happened."""


class StoreUnavailable(StoreError):
    pass


class StoreUnusable(StoreError):
    """The store will not work until the operator changes something."""


class LeaseLost(StoreError):
    """The session has another owner now: stop."""


class BlobMissing(StoreError):
    """A write named a blob that was never put, or was erased meanwhile; put it again."""


class UndeclaredRow(StoreError):
    """A decision or a projection touched a row that its write had not declared."""


class RowRefused(StoreError):
    """A database constraint, such as the one on caps, refused a change."""


Extra = Literal["documents", "models", "mcp", "notify", "oidc", "postgres", "server", "telemetry", "top"]

_USES: Final[Mapping[Extra, tuple[str, tuple[str, ...]]]] = {
    "documents": ("An Office document", ("docx", "openpyxl", "pptx", "defusedxml", "lxml")),
    "models": ("A model of a provider", ("pydantic_ai", "anthropic", "google", "openai")),
    "mcp": ("An MCP server", ("mcp", "jsonschema", "referencing")),
    "notify": ("A channel of the type `apprise`", ("apprise",)),
    "oidc": ("Sign-on by a provider", ("joserfc",)),
    "postgres": ("A PostgreSQL store", ("procrastinate", "psycopg", "psycopg_pool")),
    "server": ("The server", ("fastapi", "nicegui", "starlette", "uvicorn")),
    "telemetry": ("Tracing", ("opentelemetry",)),
    "top": ("The live terminal", ("textual",)),
}
"""What needs each extra, and the modules that come with it."""


def explain_extra(extra: Extra, what: str = "") -> str:
    return f"{what or _USES[extra][0]} needs the extra `{extra}`: pip install 'halter[{extra}]'"


def explain_missing_module(missing: ModuleNotFoundError) -> str | None:
    """The extra that provides a missing module; None if the installation is broken."""
    library = (missing.name or "").partition(".")[0]
    return next((explain_extra(extra) for extra, (_, libraries) in _USES.items() if library in libraries), None)
