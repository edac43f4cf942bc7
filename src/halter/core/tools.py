"""What a tool is to everybody who does not write it: a description, a validator, and an action behind a permit.

Servers whose tools an agent may use: how each one is reached, and which of its tools a person agreed to.

What a sensor is to everybody who does not read the world: a name, and readings as they come.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, NamedTuple, NoReturn, Protocol, SupportsIndex, TypeVar, cast

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import HalterError, ToolError
from halter.core.vocabulary import Event, RowKey

Level = Literal["SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED"]
LEVELS: Final[tuple[Level, ...]] = ("SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED")

Effect = Literal["read", "write"]
"""Whether a tool only looks, or changes something outside."""

EffectStatus = Literal["done", "not_done", "unknown"]
"""What a tool's own `check` says of a call whose answer was lost."""

DEFAULT_TOOL_TIMEOUT: Final = 60 * SECOND

AGENT_VARIABLE: Final = "HALTER_AGENT"
"""The variable by which a program knows that an agent started it: what it says decides nothing."""

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the guard and a model know of a tool.

    `schema` is the JSON Schema of the arguments, as JSON. `cost` is held for each call, in micro-dollars, or learned
    from the calls before. `egress` says that the arguments choose where data goes. `digest` covers all that a person
    agreed to: a tool of an MCP server whose digest changes is quarantined.
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


def add_spec_digest(spec: ToolSpec) -> ToolSpec:
    """Give a spec the digest of everything else in it."""
    bare = msgspec.structs.replace(spec, digest="")
    digest = hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()
    return msgspec.structs.replace(bare, digest=digest)


class Valid(msgspec.Struct, frozen=True):
    """Arguments that fit: as values for the tool, and as canonical JSON for digests and journals.

    `writes` are the digests of what files will hold by it: no watch takes an agent's own output for something new.
    """

    values: Mapping[str, Any]
    canonical: bytes
    writes: tuple[str, ...] = ()


class Invalid(msgspec.Struct, frozen=True):
    """Arguments that do not fit, and a sentence for the model that can send better ones."""

    sentence: str


class JournalEffect(msgspec.Struct, frozen=True):
    """Something that a call makes happen in the journal, in the commit that settles it: a crash before is harmless.

    It stands in the session's own stream, or in another one. If the row that `unless` names is there, it does not.
    """

    event: Event
    body: bytes | None = None
    stream: str = ""
    unless: RowKey | None = None


class Output(msgspec.Struct, frozen=True):
    """What a call gave: text for the model, and its true cost in micro-dollars (1,000,000 a dollar) if it is known.

    `happened` is written down with it.
    """

    text: str
    cost_micros: int | None = None
    happened: tuple[JournalEffect, ...] = ()


class Failed(ToolError):
    """A tool's own failure, as `Kind: message`; what it had put out until then is kept."""

    def __init__(self, kind: str, message: str, partial: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.partial = partial


class Unstoppable(ToolError):
    """A call that could not be stopped in time: nobody knows what became of it."""


class Permit:
    """The right to run one call or one request, once. Only the guard makes permits; whatever acts asks for one.

    Secrets travel in it, so that no argument, journal or model ever holds them. Whatever acts sets `unsent` when it is
    stopped before anything was sent: only then does the guard know that it cost nothing.
    """

    __slots__ = ("_secrets", "_used_up", "deadline", "id", "unsent")

    def __init__(self, permitted: str, deadline: int, secrets: Mapping[str, str]) -> None:
        if hasattr(self, "_used_up"):
            raise TypeError(f"The permit for {self.id} is made already: each one is good for one act.")
        self.id = permitted
        self.deadline = deadline
        self.unsent = False
        self._secrets = secrets
        self._used_up = False

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled, by which one permit would become two."""
        raise TypeError(f"The permit for {self.id} cannot be copied: each one is good for one act.")

    def use(self) -> None:
        """Take the permit up: a second time is a mistake that must not go unseen."""
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
        """Use the permit, and return what is kept."""
        return self._give(permit)


class Tool(Protocol):
    """Something that acts."""

    @property
    def spec(self) -> ToolSpec:
        """What is known of it."""
        ...

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check arguments as a model wrote them: JSON text that may be anything. Never raises."""
        ...

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Act. Raises Failed, Unstoppable or TimeoutError; cancelling it stops what it started."""
        ...

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Find out what became of an earlier call with the same arguments and the permit's id as its key."""
        ...


def find_secret_names(canonical: bytes) -> frozenset[str]:
    """Return the names of all secrets that arguments refer to as `${secret:NAME}`."""
    if b"${" not in canonical:
        return frozenset()
    return frozenset(_SECRET.findall(canonical.decode()))


def substitute_secrets(value: Any, reveal: Callable[[str], str]) -> Any:
    """Put secrets into every text of a JSON value; what a secret itself contains is not looked at again."""
    match value:
        case str():
            return _SECRET.sub(lambda found: reveal(found[1]), value)
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
    """One server of tools: a program to start, or an address to ask.

    `cwd` is where the program runs. Texts of `env` and `headers` may refer to secrets as `${secret:NAME}`. What may
    hold a key is left out when a server is printed.
    """

    name: str
    transport: Transport = "stdio"
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: str = ""
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


class PinCheck(NamedTuple):
    """Tools that may be used, tools that are not what was agreed to, and tools that nobody has agreed to yet."""

    usable: tuple[ToolSpec, ...]
    changed: tuple[ToolSpec, ...]
    new: tuple[ToolSpec, ...]


def check_pins(specs: Iterable[ToolSpec], pins: PinnedDigests) -> PinCheck:
    """Sort tools by what a person agreed to; those that are changed or new wait for a decision.

    All tools of a server that is seen for the first time are usable: whoever trusted it trusted them. The caller pins
    what is usable. A tool that belongs to no server is none of this function's business.
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
"""So many bytes a single reading may have. What is larger is a failure, and is not kept."""


class Reading(msgspec.Struct, frozen=True):
    """What was read: a JSON value, when, and how many bytes it was, by which those who keep it bound what they keep."""

    value: Any
    at: int
    size: int = 0


class SensorFailed(HalterError):
    """A source could not be read: a sentence for whoever looks at the sensor's health."""


class Sensor(Protocol):
    """A background reader. Whoever runs it deals with its failures; it only reads."""

    @property
    def name(self) -> str:
        """The sensor's name."""
        ...

    @property
    def retry_after(self) -> int | None:
        """How long its source asks to be left alone before it is read again, in microseconds."""
        ...

    def readings(self) -> AsyncIterator[Reading]:
        """Read until the source closes in good order. Raises SensorFailed; begun again, it goes on where it was."""
        ...


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a sensor does. `dropped` counts readings that came too fast to be looked at."""

    sensor: str
    health: Health = "starting"
    since: int = 0
    failures: int = 0
    sentence: str = ""
    read_at: int | None = None
    dropped: int = 0
