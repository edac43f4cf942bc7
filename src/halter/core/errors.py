"""The errors of Halter, as one tree.

```
HalterError
├── NotDone                  the caller: the request was not carried out; says why, and what to do instead
├── ConfigError              the operator: names file, line, key, and the fix
├── ModelError               the retry policy
│   ├── ModelUnavailable         retryable
│   └── ModelRejected            never the same request again
│       ├── ModelUnusable            a person must act: wrong key, unknown model, no credit
│       └── ContextOverflow          a shorter history may be accepted
├── ToolError                the model receives it and may try another way
└── StoreError               the write had no effect; the session waits or stops
    ├── StoreUnavailable         retryable: the same write with the same key is harmless
    ├── StoreUnusable            a person must act: wrong URL, newer schema, corrupt file, read-only folder
    ├── LeaseLost                another owner has this session: stop immediately
    ├── BlobMissing              an event names a blob that does not exist: put it again, then repeat the write
    ├── UndeclaredRow            a write touched a row that it had not declared: a bug in the program
    └── RowRefused               a database constraint refused a row: a bug in the program, or an edited row
```

Refusals (a cap, a halt, a missing grant) are not here: they are values, and events.
A message is a sentence for the person who can act. It says what happened, where, and what to do.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, Literal

from halter.core.usage import Usage
from halter_agents import DISTRIBUTION


class HalterError(Exception):
    """Root of all errors that Halter raises on purpose."""


class NotDone(HalterError):
    """A person's request was not carried out, and nothing has changed. `why` is the reason, for programs."""

    def __init__(self, sentence: str, reason: "NotDoneWhy") -> None:
        super().__init__(sentence)
        self.why: NotDoneWhy = reason


NotDoneWhy = Literal["wrong", "missing", "refused", "forbidden"]
"""Malformed; not found, or not visible to the caller; impossible in the present state; not permitted."""


class ConfigError(HalterError):
    pass


class ModelError(HalterError):
    """A request failed, or its answer is unusable: `Kind: message`.

    `billed` is False only if nothing was charged. `usage` is the last report before the failure; unless it is `final`,
    more output may have been charged. `retry_after` is the wait that the provider requests, in microseconds.
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
    """The provider will not serve this account or model until a person changes the configuration or the account."""


class ContextOverflow(ModelRejected):
    """The request is too long for its model; a shorter history may be accepted."""


class ToolError(HalterError):
    pass


class StoreError(HalterError):
    """The store could not execute an operation; it had no effect."""


class StoreUnavailable(StoreError):
    pass


class StoreUnusable(StoreError):
    """The store is unusable until the operator acts."""


class LeaseLost(StoreError):
    """Another owner has the session: stop."""


class BlobMissing(StoreError):
    """A write named a blob that was never put, or has been erased; put it again."""


class UndeclaredRow(StoreError):
    """A `decide` function or a projection touched a row that its write had not declared."""


class RowRefused(StoreError):
    """A database constraint, such as the one on caps, refused a change."""


Extra = Literal["autonomy", "documents", "models", "mcp", "notify", "oidc", "postgres", "server", "telemetry", "top"]

_EXTRAS: Final[Mapping[Extra, tuple[str, tuple[str, ...]]]] = {
    "autonomy": ("A condition, a watched folder or a stream", ("cel", "watchfiles", "websockets")),
    "documents": ("A PDF or Office document", ("docx", "openpyxl", "pptx", "pypdf", "defusedxml", "lxml")),
    "models": ("A model of a provider", ("pydantic_ai", "anthropic", "google", "openai")),
    "mcp": ("An MCP server", ("mcp", "jsonschema", "referencing")),
    "notify": ("A channel of the type `email` or `apprise`", ("aiosmtplib", "apprise")),
    "oidc": ("Sign-on by a provider", ("joserfc",)),
    "postgres": ("A PostgreSQL store", ("procrastinate", "psycopg", "psycopg_pool")),
    "server": ("The server", ("fastapi", "nicegui", "starlette", "uvicorn")),
    "telemetry": ("Tracing", ("opentelemetry",)),
    "top": ("The live terminal", ("textual",)),
}
"""The feature that needs each extra, and the modules that the extra installs."""


def explain_extra(extra: Extra, subject: str = "") -> str:
    return f"{subject or _EXTRAS[extra][0]} needs the extra `{extra}`: {render_install_command(extra)}"


def render_install_command(extra: Extra) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_module(module: str, extra: Extra, subject: str) -> None:
    """Raise ConfigError, which names the extra, if the module is not installed."""
    if find_spec(module) is None:
        raise ConfigError(explain_extra(extra, subject))


def explain_missing_module(error: ModuleNotFoundError) -> str | None:
    """Name the extra that provides a missing module; None if no extra does, and the installation is broken."""
    module = (error.name or "").partition(".")[0]
    return next((explain_extra(extra) for extra, (_, modules) in _EXTRAS.items() if module in modules), None)
