"""The ports of tools, tool servers and sensors: descriptions, validators, and actions that require a permit."""

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
from halter.core.ids import Digest
from halter.core.provenance import ArgumentRole, ArgumentUse, Declaration, Reach, Reads, guess_declaration
from halter.core.text import make_word_set
from halter.core.vocabulary import Event, RowKey

Level = Literal["SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED"]
LEVELS: Final[tuple[Level, ...]] = ("SAFE", "MONITORED", "CONTROLLED", "RESTRICTED", "PRIVILEGED")

Effect = Literal["read", "write"]
"""`read` for a tool that only reads, `write` for one that changes something outside."""

EffectStatus = Literal["done", "not_done", "unknown"]
"""The answer of a tool's probe (`check`) about a call in doubt."""

DEFAULT_TOOL_TIMEOUT: Final = 60 * SECOND
DEFAULT_SERVER_START: Final = 60 * SECOND

AGENT_VARIABLE: Final = "HALTER_AGENT"
"""Marks a program that an agent started; its value decides nothing."""

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")


ProviderToolName = Literal["web_search", "code_execution"]


class ProviderTool(msgspec.Struct, frozen=True):
    """A tool that the provider runs during a request, at most `max_uses` times. The guard sees none of its calls."""

    name: ProviderToolName
    max_uses: int


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a tool for the guard and the model.

    `schema` is the JSON Schema of the arguments, as JSON. `cost` is held for each call, in micro-dollars, or learned
    from past calls. With `egress`, the arguments choose where data goes. `digest` covers everything that a person
    approved: a tool of an MCP server whose digest changes is quarantined. `declaration` describes the provenance of its
    values; an absent one is guessed.
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
    bare_spec = msgspec.structs.replace(spec, digest="")
    digest = hashlib.sha256(msgspec.json.encode(bare_spec, order="sorted")).hexdigest()
    return msgspec.structs.replace(bare_spec, digest=digest)


def find_declaration(spec: ToolSpec) -> Declaration:
    """Return a tool's declaration, or a strict guess if it has none."""
    if spec.declaration is not UNSET:
        return spec.declaration
    return guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")


class DeclaredParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a declaration that a decorator or a file sets; `arguments` has uses as `destination:address`."""

    reads: Reads | UnsetType = UNSET
    reach: Reach | UnsetType = UNSET
    arguments: Mapping[str, str] | UnsetType = UNSET
    mints: Mapping[str, str] | UnsetType = UNSET
    lists: Mapping[str, str] | UnsetType = UNSET
    asks: tuple[str, ...] | UnsetType = UNSET


def refine_declaration(base: Declaration, refinement: DeclaredParts) -> Declaration:
    """Replace guessed or previously declared parts of a declaration by the given parts."""
    declared_parts = {
        name: value for name in refinement.__struct_fields__ if (value := getattr(refinement, name)) is not UNSET
    }
    if not declared_parts:
        return base
    declared_names = {name for name in declared_parts if name != "arguments"}
    if refinement.arguments is not UNSET:
        declared_names |= {f"arguments.{name}" for name in refinement.arguments}
        declared_parts["arguments"] = {
            **base.arguments,
            **{name: parse_argument_use(text) for name, text in refinement.arguments.items()},
        }
    guessed_names = tuple(name for name in base.guessed if name not in declared_names)
    return msgspec.structs.replace(base, **declared_parts, guessed=guessed_names)


def parse_argument_use(text: str) -> ArgumentUse:
    """Parse `destination:address`. Raises ValueError for an unknown role."""
    role, _, kind = text.partition(":")
    if role not in get_args(ArgumentRole):
        raise ValueError(f"{text!r} is not an argument use. Write one of {', '.join(get_args(ArgumentRole))}.")
    return ArgumentUse(cast("ArgumentRole", role), kind)


class Valid(msgspec.Struct, frozen=True):
    """Valid arguments: as values for the tool, and as canonical JSON for digests and journals.

    `writes` are the digests of files that the call will write, so that no watch treats an agent's own output as new.
    """

    values: Mapping[str, Any]
    canonical: bytes
    writes: tuple[str, ...] = ()


class Invalid(msgspec.Struct, frozen=True):
    """Invalid arguments, and a sentence for the model."""

    sentence: str


class JournalEffect(msgspec.Struct, frozen=True):
    """An event that a call causes. It is committed with the settlement, so a crash before that is harmless.

    It goes to the session's own stream, unless `stream` names another one. It is dropped if the row `unless` exists.
    A large body is a `blob`.
    """

    event: Event
    body: bytes | None = None
    blob: Digest | None = None
    stream: str = ""
    unless: RowKey | None = None


_OFFICE: Final = "application/vnd.openxmlformats-officedocument"
OFFICE_TYPES: Final[Mapping[str, str]] = {
    ".docx": f"{_OFFICE}.wordprocessingml.document",
    ".xlsx": f"{_OFFICE}.spreadsheetml.sheet",
    ".pptx": f"{_OFFICE}.presentationml.presentation",
}
"""The media types of the Office documents whose text can be read, by suffix."""


class File(msgspec.Struct, frozen=True):
    """A file for a model.

    `pages` bounds a PDF whose pages cannot be counted, `seconds` audio whose length cannot be measured. If the number
    is too low, the excess is an overrun.
    """

    data: bytes = b""
    media_type: str = ""
    name: str = "file"
    pages: int = 0
    seconds: float = 0


class Output(msgspec.Struct, frozen=True, gc=False):
    """The result of a call: text for the model, and its true cost in micro-dollars (1,000,000 a dollar) if known.

    `happened` are events to commit with the settlement. `files` follow the text: pictures as pictures.
    """

    text: str
    cost_micros: int | None = None
    happened: tuple[JournalEffect, ...] = ()
    files: tuple[File, ...] = ()


class Failed(ToolError):
    """A tool's own failure, as `Kind: message`, with its partial output."""

    def __init__(self, kind: str, message: str, partial: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.partial = partial


class Retry(Failed):
    """Raised by a tool or an answer validator: the model receives the reason, and may try again."""

    def __init__(self, why: str) -> None:
        super().__init__("Retry", why)

    def __reduce__(self) -> tuple[type["Retry"], tuple[str]]:
        """Support pickling: a plain tool raises it in a separate process."""
        return type(self), (str(self).removeprefix("Retry: "),)


class Unstoppable(ToolError):
    """A call could not be stopped in time; its outcome is unknown."""


class NearBudget:
    """A parameter of this type is not an argument: `await near_budget()` returns whether a cap of the session is near.

    The caps of the session, its trigger, its agent and the fleet count, each with its spent and held amounts.
    """

    __slots__ = ("_is_near",)

    def __init__(self, is_near: Callable[[], Awaitable[bool]]) -> None:
        self._is_near = is_near

    async def __call__(self) -> bool:
        return await self._is_near()


async def has_no_caps() -> bool:
    return False


class Permit:
    """The right to run one call or one request, once. Only the guard makes permits.

    It carries the secrets, so that no argument, journal or model ever contains them. A tool or model sets `unsent` if
    it is stopped before anything was sent: only then does the guard know that it cost nothing.
    """

    __slots__ = ("_secrets", "_used_up", "deadline", "id", "near_budget", "unsent")
    _secrets: Mapping[str, str]

    # Not `__init__`, which could be called again on a used permit.
    def __new__(
        cls,
        effect_id: str,
        deadline: int,
        secrets: Mapping[str, str],
        near_budget: Callable[[], Awaitable[bool]] = has_no_caps,
    ) -> Self:
        permit = object.__new__(cls)
        permit.id = effect_id
        permit.deadline = deadline
        permit.near_budget = near_budget
        permit.unsent = False
        permit._secrets = secrets
        permit._used_up = False
        return permit

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Reject copies and pickles, which would make two permits of one."""
        raise TypeError(f"The permit for {self.id} cannot be copied: a permit is valid for one effect.")

    def use(self) -> None:
        """Use up the permit. A second use is a bug, and raises RuntimeError."""
        if self._used_up:
            raise RuntimeError(f"The permit for {self.id} was used before: a permit is valid for one effect.")
        self._used_up = True

    @property
    def may_have_acted(self) -> bool:
        """True if the effect began, so that a stop may have come after it."""
        return self._used_up and not self.unsent

    def reveal(self, name: str) -> str:
        """Return a secret that the arguments refer to as `${secret:NAME}`."""
        return self._secrets[name]


T = TypeVar("T")


class PermitGate(Generic[T]):
    """A holder of a function that returns it only for a permit.

    The function is in a closure and not in an attribute, so neither a caller nor a subclass can bypass the guard.
    Objects of any other type than `Permit` are rejected.
    """

    __slots__ = ("_give",)

    def __init__(self, value: T) -> None:
        def give(permit: Permit) -> T:
            if type(permit) is not Permit:
                raise TypeError(f"A {type(permit).__name__} is not a permit: only the guard makes permits.")
            permit.use()
            return value

        self._give = give

    def open(self, permit: Permit) -> T:
        return self._give(permit)


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Validate the text of a model's arguments, which may not be JSON. Never raises."""
        ...

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Execute a call. Raises Failed, Unstoppable or TimeoutError. Cancellation stops everything it started."""
        ...

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Probe the outcome of an earlier call with the same arguments and the permit's id as its key."""
        ...


DOLLAR: Final = ord("$")
"""The first byte of each reference to a secret. A search for one byte is the fastest way to exclude references."""


def find_secret_names(canonical: bytes) -> frozenset[str]:
    """Return the names of all secrets that arguments refer to as `${secret:NAME}`."""
    if DOLLAR not in canonical or canonical.find(b"${") < 0:
        return frozenset()
    return frozenset(_SECRET.findall(canonical.decode()))


def substitute_secrets(value: Any, reveal: Callable[[str], str]) -> Any:
    """Insert secrets into every text of a JSON value; the secrets themselves are not expanded again."""
    match value:
        case str():
            return _SECRET.sub(lambda match: reveal(match[1]), value)
        case list():
            return [substitute_secrets(item, reveal) for item in cast("list[Any]", value)]
        case dict():
            return {key: substitute_secrets(item, reveal) for key, item in cast("dict[str, Any]", value).items()}
        case _:
            return value


ToolFamily = Literal["shell", "reader", "writer", "web", "planner", "sender", "mcp", "other"]
TOOLS_BY_FAMILY: Final[Mapping[ToolFamily, frozenset[str]]] = {
    "shell": make_word_set("Bash Shell run_shell_command"),
    "reader": make_word_set(
        "Read Glob Grep LS NotebookRead BashOutput TaskOutput Search SemanticSearch ReadLints read_file "
        "read_many_files list_directory glob search_file_content grep_search view_image ListMcpResourcesTool "
        "ReadMcpResourceTool"
    ),
    "writer": make_word_set(
        "Write Edit MultiEdit NotebookEdit StrReplace Delete TabWrite write_file replace apply_patch EditNotebook"
    ),
    "web": make_word_set("WebFetch WebSearch web_fetch google_web_search web_search"),
    "planner": make_word_set(
        "TodoWrite TodoRead TaskCreate TaskUpdate TaskGet TaskList ExitPlanMode EnterPlanMode AskUserQuestion "
        "AskQuestion ToolSearch Skill Task Agent SlashCommand update_plan write_todos KillShell TaskStop"
    ),
    "sender": make_word_set("SendUserFile RemoteTrigger Workflow Artifact ShareOnboardingGuide Config"),
}
"""The tools that other programs bring along: coding agents whose hooks ask Halter. Policies have rules for them too."""

SERVER_SEPARATOR: Final = "__"
"""Separates the name of a server from the name of its tool, at its first occurrence."""

Transport = Literal["stdio", "http", "sse"]

PinnedDigests = Mapping[str, str]
"""The pinned digest of each tool of a server, by the tool's full name."""


@dataclass(frozen=True)
class ToolServer:
    """A tool server: a program to start, or a URL.

    `cwd` is the program's working folder; `start_timeout` is the time limit until it has listed its tools,
    `call_timeout` that of each call. Values of `env` and `headers` may refer to secrets as `${secret:NAME}`. Fields
    that may contain a key are omitted from the repr. A server with an `omission` is not started; `notes` say what of
    its entry has no effect.
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
    call_timeout: int | None = None
    omission: str = ""
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What of the server's entry has no effect, or why the whole server is left out."""
        return (f"The server {self.name} is omitted: {self.omission}",) if self.omission else self.notes


class PinCheck(NamedTuple):
    """The usable tools, the tools that changed since they were pinned, and the tools that were never pinned."""

    usable: tuple[ToolSpec, ...]
    changed: tuple[ToolSpec, ...]
    new: tuple[ToolSpec, ...]


def check_pins(specs: Iterable[ToolSpec], pins: PinnedDigests) -> PinCheck:
    """Compare tools with their pins; changed or new tools wait for a decision.

    All tools of a new server are usable: trust in the server covers them. The caller pins the usable tools. Tools
    without a server are always usable.
    """
    pinned_servers = {name.partition(SERVER_SEPARATOR)[0] for name in pins}
    usable_specs: list[ToolSpec] = []
    changed_specs: list[ToolSpec] = []
    new_specs: list[ToolSpec] = []
    for spec in specs:
        if not spec.server or spec.server not in pinned_servers or pins.get(spec.name) == spec.digest:
            usable_specs.append(spec)
        elif spec.name in pins:
            changed_specs.append(spec)
        else:
            new_specs.append(spec)
    return PinCheck(tuple(usable_specs), tuple(changed_specs), tuple(new_specs))


Health = Literal["starting", "ok", "failing"]

MAX_READING_BYTES = 1_000_000
"""Maximum size of a reading in bytes. A larger one is a failure."""


class Reading(msgspec.Struct, frozen=True):
    """A JSON value, when it was read, and its size in bytes.

    `look` is what the sensor has seen with it, as JSON. It is saved when the reading was handled; the sensor continues
    there after a restart.
    """

    value: Any
    at: int
    size: int = 0
    look: Any = None


class SensorFailed(HalterError):
    pass


class Sensor(Protocol):
    """A background reader. Its caller handles failures."""

    @property
    def name(self) -> str: ...

    @property
    def retry_after(self) -> int | None:
        """The wait before the next read that the source requests, in microseconds."""
        ...

    def readings(self) -> AsyncIterator[Reading]:
        """Yield readings until the source closes. Raises SensorFailed; a new iteration continues after a failure."""
        ...


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """A sensor's health. `dropped` counts readings that arrived too fast."""

    sensor: str
    health: Health = "starting"
    since: int = 0
    failures: int = 0
    sentence: str = ""
    read_at: int | None = None
    dropped: int = 0
