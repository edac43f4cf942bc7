"""What tools, tool servers and sensors are to the rest: descriptions, validators, and actions behind a permit."""

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
    cast,
    get_args,
)

import msgspec
from msgspec import UNSET, UnsetType

from halter.core.clock import SECOND
from halter.core.errors import HalterError, ToolError
from halter.core.provenance import ArgumentRole, ArgumentUse, Declaration, Reach, Reads, guess_declaration
from halter.core.vocabulary import Event, RowKey

Level = Literal["SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED"]
LEVELS: Final[tuple[Level, ...]] = ("SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED")

Effect = Literal["read", "write"]
"""Whether a tool only reads, or changes something outside."""

EffectStatus = Literal["done", "not_done", "unknown"]
"""What a tool's own `check` says of a call whose answer was lost."""

DEFAULT_TOOL_TIMEOUT: Final = 60 * SECOND
DEFAULT_SERVER_START: Final = 60 * SECOND

AGENT_VARIABLE: Final = "HALTER_AGENT"
"""Marks a program that an agent started; its value decides nothing."""

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")


ProviderToolName = Literal["web_search", "code_execution"]


class ProviderTool(msgspec.Struct, frozen=True):
    """A tool that a model's provider runs during a request, at most so often: no guard sees its calls or results."""

    name: ProviderToolName
    max_uses: int


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the guard and a model know of a tool.

    `schema` is the JSON Schema of the arguments, as JSON. `cost` is held for each call, in micro-dollars, or learned
    from past calls. `egress`: the arguments choose where data goes. `digest` covers all that a person agreed to: a tool
    of an MCP server whose digest changes is quarantined. `declaration` is what it says of the provenance of its values;
    an absent one is guessed.
    """

    name: str
    description: str
    schema: bytes
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    idempotent: bool = False
    egress: bool = False
    cost: int | Literal["learned"] = 0
    timeout: int = DEFAULT_TOOL_TIMEOUT
    isolate: bool = False
    checked: bool = False
    server: str = ""
    digest: str = ""
    declaration: Declaration | UnsetType = UNSET


def add_spec_digest(spec: ToolSpec) -> ToolSpec:
    bare = msgspec.structs.replace(spec, digest="")
    digest = hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()
    return msgspec.structs.replace(bare, digest=digest)


def find_declaration(spec: ToolSpec) -> Declaration:
    """What a tool declares, or the strict guess."""
    if spec.declaration is not UNSET:
        return spec.declaration
    return guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")


class DeclaredParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decorator or a file says of a tool's provenance; an argument's use is written as `destination:address`."""

    reads: Reads | UnsetType = UNSET
    reach: Reach | UnsetType = UNSET
    arguments: Mapping[str, str] | UnsetType = UNSET
    mints: Mapping[str, str] | UnsetType = UNSET
    lists: Mapping[str, str] | UnsetType = UNSET
    asks: tuple[str, ...] | UnsetType = UNSET


def refine_declaration(base: Declaration, said: DeclaredParts) -> Declaration:
    """Put what is declared in the place of what was guessed, or declared before."""
    parts = {name: value for name in said.__struct_fields__ if (value := getattr(said, name)) is not UNSET}
    if not parts:
        return base
    told = {name for name in parts if name != "arguments"}
    if said.arguments is not UNSET:
        told |= {f"arguments.{name}" for name in said.arguments}
        parts["arguments"] = {
            **base.arguments,
            **{name: parse_argument_use(text) for name, text in said.arguments.items()},
        }
    guessed = tuple(name for name in base.guessed if name not in told)
    return msgspec.structs.replace(base, **parts, guessed=guessed)


def parse_argument_use(text: str) -> ArgumentUse:
    """Read `destination:address`. Raises ValueError for an unknown role."""
    role, _, kind = text.partition(":")
    if role not in get_args(ArgumentRole):
        raise ValueError(f"{text!r} is no use of an argument: write {', '.join(get_args(ArgumentRole))}")
    return ArgumentUse(cast("ArgumentRole", role), kind)


class Valid(msgspec.Struct, frozen=True):
    """Valid arguments: as values for the tool, and as canonical JSON for digests and journals.

    `writes` are the digests of files that it will write: no watch takes an agent's own output for something new.
    """

    values: Mapping[str, Any]
    canonical: bytes
    writes: tuple[str, ...] = ()


class Invalid(msgspec.Struct, frozen=True):
    """Invalid arguments, and a sentence for the model."""

    sentence: str


class JournalEffect(msgspec.Struct, frozen=True):
    """An event that a call causes, in the commit that settles it: a crash before is harmless.

    It goes to the session's own stream, or to another. If the row `unless` exists, it is dropped.
    """

    event: Event
    body: bytes | None = None
    stream: str = ""
    unless: RowKey | None = None


class Output(msgspec.Struct, frozen=True, gc=False):
    """The result of a call: text for the model, and its true cost in micro-dollars (1,000,000 a dollar) if known.

    `happened` is committed with it.
    """

    text: str
    cost_micros: int | None = None
    happened: tuple[JournalEffect, ...] = ()


class Failed(ToolError):
    """A tool's own failure, as `Kind: message`, with its output until then."""

    def __init__(self, kind: str, message: str, partial: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.partial = partial


class Retry(Failed):
    """Raised by a tool, or by a check of answers: the model is told why, and may try again."""

    def __init__(self, why: str) -> None:
        super().__init__("Retry", why)

    def __reduce__(self) -> tuple[type["Retry"], tuple[str]]:
        """A plain tool raises it in a process of its own."""
        return type(self), (str(self).removeprefix("Retry: "),)


class Unstoppable(ToolError):
    """A call that could not be stopped in time: its outcome is unknown."""


class NearBudget:
    """A parameter of this type is no argument: `await near_budget()` says whether a cap of the session is near.

    The session's own cap counts, and those of its trigger, its agent and the fleet, with all that is spent and held.
    """

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], Awaitable[bool]]) -> None:
        self._ask = ask

    async def __call__(self) -> bool:
        return await self._ask()


async def has_no_caps() -> bool:
    return False


class Permit:
    """The right to run one call or one request, once. Only the guard makes permits.

    Secrets travel in it, so that no argument, journal or model ever holds them. A tool or model sets `unsent` when it
    is stopped before anything was sent: only then does the guard know that it cost nothing.
    """

    __slots__ = ("_secrets", "_used_up", "deadline", "id", "near_budget", "unsent")
    _secrets: Mapping[str, str]

    # Not `__init__`, which could be called again on a permit that is used up.
    def __new__(
        cls,
        permitted: str,
        deadline: int,
        secrets: Mapping[str, str],
        near_budget: Callable[[], Awaitable[bool]] = has_no_caps,
    ) -> Self:
        permit = object.__new__(cls)
        permit.id = permitted
        permit.deadline = deadline
        permit.near_budget = near_budget
        permit.unsent = False
        permit._secrets = secrets
        permit._used_up = False
        return permit

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles, which would make two permits of one."""
        raise TypeError(f"The permit for {self.id} cannot be copied: each one is good for one act.")

    def use(self) -> None:
        """Consume the permit: a second use is a bug that must not go unseen."""
        if self._used_up:
            raise RuntimeError(f"The permit for {self.id} was used before: each one is good for one act.")
        self._used_up = True

    def reveal(self, name: str) -> str:
        """Return a secret that the arguments refer to as `${secret:NAME}`."""
        return self._secrets[name]


T = TypeVar("T")


class PermitGate(Generic[T]):
    """A function that only a permit gives out.

    No attribute holds it, so neither a caller nor a subclass reaches it past the guard. An object that only looks like
    a permit is none.
    """

    __slots__ = ("_give",)

    def __init__(self, kept: T) -> None:
        def give(permit: Permit) -> T:
            if type(permit) is not Permit:
                raise TypeError(f"A {type(permit).__name__} is no permit: only the guard makes those.")
            permit.use()
            return kept

        self._give = give

    def open(self, permit: Permit) -> T:
        return self._give(permit)


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Validate arguments as a model wrote them: JSON text that may be anything. Never raises."""
        ...

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Act. Raises Failed, Unstoppable or TimeoutError; cancelling stops what it started."""
        ...

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """The outcome of an earlier call with the same arguments and the permit's id as its key."""
        ...


DOLLAR: Final = ord("$")
"""What each reference to a secret begins with: arguments without it name none, and one byte is found at once."""


def find_secret_names(canonical: bytes) -> frozenset[str]:
    """The names of all secrets that arguments refer to as `${secret:NAME}`."""
    if DOLLAR not in canonical or canonical.find(b"${") < 0:
        return frozenset()
    return frozenset(_SECRET.findall(canonical.decode()))


def substitute_secrets(value: Any, reveal: Callable[[str], str]) -> Any:
    """Put secrets into every text of a JSON value; the secrets themselves are not expanded again."""
    match value:
        case str():
            return _SECRET.sub(lambda match: reveal(match[1]), value)
        case list():
            return [substitute_secrets(each, reveal) for each in cast("list[Any]", value)]
        case dict():
            return {key: substitute_secrets(each, reveal) for key, each in cast("dict[str, Any]", value).items()}
        case _:
            return value


SERVER_SEPARATOR: Final = "__"
"""Stands between the name of a server and that of its tool; the first one in a name counts."""

Transport = Literal["stdio", "http", "sse"]

PinnedDigests = Mapping[str, str]
"""The digest of each tool of a server as a person agreed to it, by the tool's full name."""


@dataclass(frozen=True)
class ToolServer:
    """A server of tools: a program to start, or an address.

    `cwd` is where the program runs; `start_timeout` is how long it may take until it has listed its tools. Texts of
    `env` and `headers` may refer to secrets as `${secret:NAME}`. What may hold a key is left out of its repr.
    """

    name: str
    transport: Transport = "stdio"
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: str = ""
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    start_timeout: int = DEFAULT_SERVER_START


class PinCheck(NamedTuple):
    """Usable tools, tools that changed since a person agreed to them, and tools never agreed to."""

    usable: tuple[ToolSpec, ...]
    changed: tuple[ToolSpec, ...]
    new: tuple[ToolSpec, ...]


def check_pins(specs: Iterable[ToolSpec], pins: PinnedDigests) -> PinCheck:
    """Compare tools with what a person agreed to; changed or new ones wait for a decision.

    All tools of a new server are usable: trusting the server covers them. The caller pins what is usable. Tools without
    a server are ignored.
    """
    known = {name.partition(SERVER_SEPARATOR)[0] for name in pins}
    usable: list[ToolSpec] = []
    changed: list[ToolSpec] = []
    new: list[ToolSpec] = []
    for spec in specs:
        if not spec.server or spec.server not in known or pins.get(spec.name) == spec.digest:
            usable.append(spec)
        elif spec.name in pins:
            changed.append(spec)
        else:
            new.append(spec)
    return PinCheck(tuple(usable), tuple(changed), tuple(new))


Health = Literal["starting", "ok", "failing"]

LARGEST_READING = 1_000_000
"""Largest reading in bytes. A larger one is a failure."""


class Reading(msgspec.Struct, frozen=True):
    """A JSON value, when it was read, and its size in bytes."""

    value: Any
    at: int
    size: int = 0


class SensorFailed(HalterError):
    pass


class Sensor(Protocol):
    """A background reader. The caller handles its failures."""

    @property
    def name(self) -> str: ...

    @property
    def retry_after(self) -> int | None:
        """How long its source asks to wait before the next read, in microseconds."""
        ...

    def readings(self) -> AsyncIterator[Reading]:
        """Read until the source closes. Raises SensorFailed; started again, it continues."""
        ...


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """A sensor's health. `dropped` counts readings that came too fast."""

    sensor: str
    health: Health = "starting"
    since: int = 0
    failures: int = 0
    sentence: str = ""
    read_at: int | None = None
    dropped: int = 0
