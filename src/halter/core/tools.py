"""What a tool is to everybody who does not write it: a description, a validator, and an action behind a permit."""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Literal, NoReturn, Protocol, SupportsIndex, TypeVar, cast

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import ToolError
from halter.core.event import Event
from halter.core.row import RowKey

Level = Literal["SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED"]
LEVELS: Final[tuple[Level, ...]] = ("SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED")

Effect = Literal["read", "write"]
"""Whether a tool only looks, or changes something outside."""

Happened = Literal["done", "not_done", "unknown"]
"""What a tool's own `check` says of a call whose answer was lost."""

TIMEOUT: Final = 60 * SECOND

STARTED_BY_AGENT: Final = "HALTER_AGENT"
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
    timeout: int = TIMEOUT
    isolate: bool = False
    checked: bool = False
    server: str = ""
    digest: str = ""


def sealed(spec: ToolSpec) -> ToolSpec:
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


class Happening(msgspec.Struct, frozen=True):
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
    happened: tuple[Happening, ...] = ()


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


class Locked(Generic[T]):
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

    async def check(self, arguments: Valid, permit: Permit) -> Happened:
        """Find out what became of an earlier call with the same arguments and the permit's id as its key."""
        ...


def secret_names(canonical: bytes) -> frozenset[str]:
    """Return the names of all secrets that arguments refer to as `${secret:NAME}`."""
    if b"${" not in canonical:
        return frozenset()
    return frozenset(_SECRET.findall(canonical.decode()))


def with_secrets(value: Any, reveal: Callable[[str], str]) -> Any:
    """Put secrets into every text of a JSON value; what a secret itself contains is not looked at again."""
    match value:
        case str():
            return _SECRET.sub(lambda found: reveal(found[1]), value)
        case list():
            return [with_secrets(each, reveal) for each in cast("list[Any]", value)]
        case dict():
            return {key: with_secrets(each, reveal) for key, each in cast("dict[str, Any]", value).items()}
        case _:
            return value
