"""The keys of `agent.yaml` for models, pacing, triggers and tasks, as frozen values. Its policy keys are in `spec`.

A field has the name of its key, and its default is the key's default. `written` in a type's metadata names the form in
which the file writes the value. Amounts are micro-dollars and times are microseconds here; in files they are dollars,
and seconds or `30m`.

A playbook is a list of calls whose arguments may refer to inputs and to the results of earlier steps.
`${steps.NAME.text}` is the output of a step, `${steps.NAME.json…}` a part of that output parsed as JSON, and
`${inputs.NAME}` an input. A reference that is a whole argument keeps its type; a reference inside a text is inserted
into the text. The result of a reference is never expanded again, so a tool's output cannot refer to anything.
`${secret:NAME}` is left unchanged, since the guard inserts secrets. Only the playbook itself may name a secret. A
result that would bring a secret's name into an argument is refused: otherwise a web page could make the playbook send
secrets to it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import DAY, MINUTE, SECOND
from halter.core.money import Cap, Caps, RateLimit
from halter.core.provenance import Reach, Reads
from halter.core.text import describe_value, join_names, shorten
from halter.core.tools import Effect, Level, ProviderTool

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


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in a file.

    `ALIASES` maps the other names of keys to their names, `FORMER_VALUES` the former values of a key to the present
    ones. Both are understood for ever and not shown.

    A value in a `HIDDEN` mapping may be a key by mistake, so no message quotes it.
    """

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    HIDDEN: ClassVar[bool] = False


WireFormat = Literal["openai", "anthropic", "google", "responses"]
"""The protocol of an endpoint. Most other servers speak `openai` as well, few of them its successor `responses`."""

ContextStrategy = Literal["sliding_window", "compact", "summarize"]
"""The way to cut a history that exceeds the window: drop the older part, replace it by a marker, or summarize it."""

ThinkingEffort = Literal["off", "low", "medium", "high"]
"""The amount of thinking before a model answers."""
ToolCalls = Literal["native", "text"]
"""The form of a model's calls: by the provider's protocol, or as text for models without tool calls."""

ModelPurpose = Literal["summary", "simulation", "judge", "skill"]
"""The purposes that can have a model other than the agent's own."""

SCRIPTED: Final = "scripted"
REFLEX: Final = "reflex"
"""The two providers that need no network; as model names they need no provider."""


CloudName = Literal["google", "aws"]
CLOUD_HOSTS: Final[Mapping[CloudName, tuple[str, ...]]] = MappingProxyType(
    {"google": (".googleapis.com",), "aws": (".amazonaws.com", ".api.aws")}
)
"""The hosts to which a cloud's credentials may be sent, unless the fleet names another address."""


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint and how to authenticate there. `api_key` names a secret; a local server may need none.

    `credentials` uses the credentials of that cloud, as its own tools find them. With `bills_errors`, a response with
    an error status may be charged. Without `prompt_cache`, no request asks for a cache; without `vision`, its models
    get a sentence for each picture.
    """

    wire: WireFormat = "openai"
    base_url: str
    api_key: str = ""
    credentials: CloudName | None = None
    bills_errors: bool = False
    prompt_cache: bool = True
    vision: bool = True


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of a provider: its address, and the variables that hold its key or another address.

    A `local` server needs no key. Without a `base_url`, the file or the variable must give one.
    """

    base_url: str = ""
    wire: WireFormat = "openai"
    keys: tuple[str, ...] = ()
    url_from: str = ""
    local: bool = False


_GOOGLE: Final = KnownProvider(
    base_url="https://generativelanguage.googleapis.com", wire="google", keys=("GEMINI_API_KEY", "GOOGLE_API_KEY")
)
UNKNOWN_PROVIDER: Final = KnownProvider()
KNOWN_PROVIDERS: Final[Mapping[str, KnownProvider]] = MappingProxyType(
    {
        "openai": KnownProvider(
            base_url="https://api.openai.com/v1", keys=("OPENAI_API_KEY",), url_from="OPENAI_BASE_URL"
        ),
        "anthropic": KnownProvider(
            base_url="https://api.anthropic.com",
            wire="anthropic",
            keys=("ANTHROPIC_API_KEY",),
            url_from="ANTHROPIC_BASE_URL",
        ),
        "google": _GOOGLE,
        "gemini": _GOOGLE,
        "openrouter": KnownProvider(base_url="https://openrouter.ai/api/v1", keys=("OPENROUTER_API_KEY",)),
        "groq": KnownProvider(base_url="https://api.groq.com/openai/v1", keys=("GROQ_API_KEY",)),
        "mistral": KnownProvider(base_url="https://api.mistral.ai/v1", keys=("MISTRAL_API_KEY",)),
        "deepseek": KnownProvider(base_url="https://api.deepseek.com/v1", keys=("DEEPSEEK_API_KEY",)),
        "together": KnownProvider(base_url="https://api.together.xyz/v1", keys=("TOGETHER_API_KEY",)),
        "ollama": KnownProvider(base_url="http://localhost:11434/v1", url_from="OLLAMA_BASE_URL", local=True),
        "llamacpp": KnownProvider(base_url="http://localhost:8080/v1", url_from="LLAMACPP_BASE_URL", local=True),
        "vllm": KnownProvider(base_url="http://localhost:8000/v1", url_from="VLLM_BASE_URL", local=True),
        "lmstudio": KnownProvider(base_url="http://localhost:1234/v1", url_from="LMSTUDIO_BASE_URL", local=True),
        "llamafarm": KnownProvider(url_from="LLAMAFARM_BASE_URL", local=True),
    }
)


_RESPONSES_HOSTS: Final = (".api.openai.com", ".openai.azure.com")
_CHAT_ONLY: Final = re.compile(r".*-(?:audio|search-preview)(?:-|$)")
"""Models of OpenAI that only Chat Completions has."""


def choose_wire(provider: str, url: str, model: str = "") -> WireFormat:
    """Choose the protocol of an endpoint whose protocol is not configured.

    OpenAI's current models take tools while they reason only over `responses`, which few compatible servers speak. So
    it is chosen for OpenAI's and Azure's own addresses, and for a provider called `azure` at any address.
    """
    known_wire = KNOWN_PROVIDERS.get(provider, UNKNOWN_PROVIDER).wire
    if known_wire != "openai" or _CHAT_ONLY.match(model):
        return known_wire
    is_own = f".{urlsplit(url).hostname or ''}".endswith(_RESPONSES_HOSTS)
    return "responses" if is_own or provider == "azure" else known_wire


class BrainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an agent's definition that the loop needs; the rest is in `ResolvedPolicy`.

    Models are written `provider:model`. `context_window` is in tokens, 0 for the model's own. With `streaming` None,
    only a chat streams. `script` and `reflex` are the contents of their files: a list of replies, and a list of rules.
    `rates` bound the requests of all agents of the fleet to a model. `native_output` names the tool whose arguments
    are the model's answer, for providers that can enforce them.
    """

    model: str = ""
    fallback_models: tuple[str, ...] = ()
    model_for: Mapping[ModelPurpose, str] = {}
    providers: Mapping[str, Provider] = {}
    instructions: str = ""
    tool_calls: ToolCalls = "native"
    temperature: float | None = None
    thinking: ThinkingEffort | None = None
    native_output: str = ""
    provider_tools: tuple[ProviderTool, ...] = ()
    max_output_tokens: int = 4096
    max_retries: int = 3
    outage_backoff: int = 15 * MINUTE
    context_window: int = 0
    context_strategy: ContextStrategy = "compact"
    streaming: bool | None = None
    max_tokens_recoveries: int = 2
    max_repeated_tool_steps: int = 3
    script: tuple[Any, ...] = ()
    reflex: tuple[Any, ...] = ()
    rates: Mapping[str, RateLimit] = {}

    def canonical(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")


FieldType = Literal["any", "object", "array", "string", "number", "integer", "boolean"]
SensorType = Literal["poll", "files", "stream"]
StreamFormat = Literal["sse", "websocket"]

ALWAYS_WAKING_NAMES: Final = ("message", "decision")
"""Names that always wake a session, and may still be listed."""

NonEmptyText = Annotated[str, Meta(min_length=1)]


class Gate(Spec, frozen=True):
    """The cheap check before a full turn. All given conditions must hold; they are tested in this order."""

    on: Annotated[
        Literal["change", "always"],
        Meta(description="`change`: skip a turn if nothing has changed since the last; `always`: do not check."),
    ] = "change"
    expression: Annotated[str, Meta(description="A CEL expression over `hot`, `before`, `changed` and `skips`.")] = ""
    model: (
        Annotated[OneModel, Meta(description="A small model that judges whether the change is worth a turn.")]
        | UnsetType
    ) = UNSET
    prompt: Annotated[str, Meta(description="Instructions for that model.")] = ""
    max_skips: Annotated[int, Meta(ge=0, description="Take a turn after this many consecutive skips; 0 disables.")] = 0


class ActiveHours(Spec, frozen=True):
    """The hours in which an agent may be awake. An end before the start is on the next day."""

    start: Annotated[DayTime, Meta(description="Start of the hours, as in `08:00`.")]
    end: Annotated[DayTime, Meta(description="End of the hours, as in `23:00`.")]
    timezone: Annotated[Zone, Meta(description="Time zone of the times; by default the fleet's.")] | UnsetType = UNSET


class Autonomy(Spec, frozen=True):
    """The settings for unattended runs, and the limits that the agent cannot change."""

    enabled: Annotated[bool, Meta(description="Run the agent unattended.")] = False
    prompt: Annotated[str, Meta(description="First message of each turn; a standard text by default.")] = ""
    min_sleep: Annotated[Duration, Meta(description="Minimum sleep.")] = SECOND
    max_sleep: Annotated[Duration, Meta(description="Maximum sleep.")] = DAY
    max_consecutive_turns: Annotated[
        int, Meta(ge=1, description="Maximum number of turns without a sleep; then the agent must sleep.")
    ] = 50
    token_budget_per_hour: Annotated[
        int, Meta(ge=0, description="Maximum tokens per hour, without those read from a cache; 0 disables.")
    ] = 100_000
    max_actions_per_minute: Annotated[
        int, Meta(ge=0, description="Maximum calls with side effects in any minute; 0 disables.")
    ] = 10
    idle_timeout: Annotated[
        Duration, Meta(description="End the session after this long without activity; 0 disables.")
    ] = 10 * MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="Hours in which the agent may be awake.")] | UnsetType = UNSET
    gate: Annotated[Gate, Meta(description="Cheap check before a full turn.")] | UnsetType = UNSET
    precheck_model: Annotated[OneModel, Meta(description="Alias of `gate.model`.")] | UnsetType = UNSET


class HotField(Spec, frozen=True):
    """One fact that the model sees every turn."""

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"refresh_params": "refresh_arguments"})

    type: Annotated[FieldType, Meta(description="JSON type of the value.")] = "any"
    ttl: Annotated[Duration, Meta(description="Age after which the value is marked stale.")] | UnsetType = UNSET
    refresh_tool: (
        Annotated[
            NonEmptyText,
            Meta(description="Read-only tool whose result becomes the value, also when the agent calls it."),
        ]
        | UnsetType
    ) = UNSET
    refresh_arguments: Annotated[Mapping[str, Any], Meta(description="Arguments of `refresh_tool`.")] = {}
    path: Annotated[PathInto, Meta(description="Path of the value in the result, as in `account.cash`.")] = ""
    auto_refresh: Annotated[bool, Meta(description="Refresh a stale value before each turn.")] = False
    max_items: (
        Annotated[int, Meta(ge=1, description="Maximum number of items of an array; older ones are dropped.")]
        | UnsetType
    ) = UNSET
    description: Annotated[str, Meta(description="Short description for the model.")] = ""


class HotStateSpec(Spec, frozen=True):
    """The typed, ageing facts that the model sees every turn."""

    fields: Annotated[Mapping[Name, HotField], Meta(description="Facts, by name.")] = {}


class Update(Spec, frozen=True):
    """The field that receives a part of a reading."""

    field: Annotated[Name, Meta(description="Field to write.")]
    path: Annotated[
        PathInto,
        Meta(
            description="Path of the value in the reading, as in `quotes.AAPL` or `items[0]`. Default: the whole "
            "reading; if several updates have no path, the member with the field's name."
        ),
    ] = ""
    append: Annotated[bool, Meta(description="Append the value to an array.")] = False


class Detector(Spec, frozen=True):
    """Detects unusual numbers. The score is the distance from the mean, in standard deviations."""

    path: Annotated[PathInto, Meta(description="Path of the number in the reading.")] = ""
    half_life: Annotated[
        float, Meta(ge=1, description="Number of readings after which the weight of a reading is halved.")
    ] = 20
    warmup: Annotated[int, Meta(ge=2, description="Number of readings to learn from before the first score.")] = 20


class Signal(Spec, frozen=True):
    """A score of a reading, given by `expression`, `model` or `detector`. It fires at `threshold` and above."""

    name: Annotated[Name, Meta(description="Name of the signal.")]
    expression: (
        Annotated[NonEmptyText, Meta(description="A CEL expression over `value` and `hot`: true, false or a number.")]
        | UnsetType
    ) = UNSET
    model: Annotated[OneModel, Meta(description="A small model that gives a score from 0 to 1.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="Instructions for that model.")] = ""
    detector: Annotated[Detector, Meta(description="A built-in detector of unusual numbers.")] | UnsetType = UNSET
    threshold: (
        Annotated[float, Meta(description="Score at which the signal fires; by default 0.5, or 4 for a detector.")]
        | UnsetType
    ) = UNSET
    cooldown: Annotated[Duration, Meta(description="Time after firing in which the signal does not fire again.")] = (
        MINUTE
    )
    notify: Annotated[bool, Meta(description="Begin the next turn with an alert.")] = False
    filter: Annotated[bool, Meta(description="Write fields only when the signal fires.")] = False


class SensorSource(Spec, frozen=True):
    """The source of a sensor: a tool, a URL, or a file or folder."""

    HIDDEN: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"params": "arguments"})

    tool: Annotated[NonEmptyText, Meta(description="Read-only tool to call.")] | UnsetType = UNSET
    arguments: Annotated[Mapping[str, Any], Meta(description="Arguments of `tool`.")] = {}
    url: (
        Annotated[
            Address, Meta(description="URL: http(s):// for polling or server-sent events, ws(s):// for WebSocket.")
        ]
        | UnsetType
    ) = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    format: (
        Annotated[StreamFormat, Meta(description="Protocol of a stream; by default derived from the URL.")] | UnsetType
    ) = UNSET
    path: Annotated[NonEmptyText, Meta(description="File or folder, relative to the agent's folder.")] | UnsetType = (
        UNSET
    )
    pattern: Annotated[NonEmptyText, Meta(description="Pattern of the files in the folder, as in `*.log`.")] = "*"


class SensorSpec(Spec, frozen=True):
    """A background reader that updates the hot state."""

    FORMER_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({"type": {"watch": "files"}})

    name: Annotated[Name, Meta(description="Name of the sensor.")]
    type: Annotated[
        SensorType, Meta(description="`poll` reads at an interval, `files` follows files, `stream` listens.")
    ]
    source: Annotated[SensorSource, Meta(description="Source of the readings.")]
    interval: Annotated[Duration, Meta(description="Time between two polls.")] = MINUTE
    jitter: Annotated[float, Meta(ge=0, le=1, description="Maximum random delay, as a fraction of the interval.")] = 0.1
    timeout: Annotated[Duration, Meta(description="Time limit for one answer, or for opening a stream.")] = 30 * SECOND
    updates: Annotated[
        tuple[Update, ...], Meta(description="Fields to write; by default the field with the sensor's name.")
    ] = ()
    signals: Annotated[tuple[Signal, ...], Meta(description="Signals on its readings.")] = ()

    def list_updates(self) -> tuple[Update, ...]:
        """Return the updates with their paths.

        One update without a path gets the whole reading. If several replace a field, each gets the member of that name.
        """
        pathless_count = sum(not update.path and not update.append for update in self.updates)
        if pathless_count <= 1:
            return self.updates or (Update(field=self.name),)
        return tuple(
            update if update.path or update.append else msgspec.structs.replace(update, path=update.field)
            for update in self.updates
        )


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """The pacing of one agent, with its gate and time zone filled in."""

    autonomy: Autonomy = Autonomy()
    fields: Mapping[str, HotField] = {}
    """Every field, including those that only a sensor names."""
    sensors: tuple[SensorSpec, ...] = ()

    def names(self) -> Iterator[str]:
        yield from self.fields
        for sensor in self.sensors:
            yield sensor.name
            yield from (signal.name for signal in sensor.signals)
        yield from ALWAYS_WAKING_NAMES

    def models(self) -> Iterator[str]:
        gate = self.autonomy.gate
        if gate is not UNSET and gate.model is not UNSET:
            yield gate.model
        for sensor in self.sensors:
            yield from (signal.model for signal in sensor.signals if signal.model is not UNSET)


TriggerType = Literal["schedule", "watch", "webhook"]
Overlap = Literal["skip", "queue"]
CatchUp = Literal["once", "never"]
ChannelType = Literal["in_app", "email", "webhook", "apprise"]


class Trigger(Spec, frozen=True):
    """The keys that all triggers share: the name, the task of the session, and the caps."""

    name: Annotated[Name, Meta(description="Name of the trigger.")]
    prompt: Annotated[str, Meta(description="Task of the session.")] = ""
    playbook: (
        Annotated[NonEmptyText, Meta(description="Playbook in the agent's folder to run instead of a prompt.")]
        | UnsetType
    ) = UNSET
    inputs: Annotated[Mapping[str, Any], Meta(description="Inputs of that playbook.")] = {}
    collections: Annotated[tuple[Name, ...], Meta(description="Collections whose documents the session may read.")] = ()
    max_cost_usd: Annotated[Dollars, Meta(description="Maximum cost of one run.")] | UnsetType = UNSET
    max_cost_usd_per_hour: Annotated[Dollars, Meta(description="Maximum cost of all runs in an hour.")] | UnsetType = (
        UNSET
    )
    max_cost_usd_per_day: Annotated[Dollars, Meta(description="Maximum cost of all runs in a day.")] | UnsetType = UNSET

    def caps(self) -> tuple[Cap, ...]:
        window_caps: tuple[tuple[int | UnsetType | None, Literal["hour", "day"]], ...] = (
            (self.max_cost_usd_per_hour, "hour"),
            (self.max_cost_usd_per_day, "day"),
        )
        return tuple(Cap(usd, per) for usd, per in window_caps if usd is not UNSET)


class Schedule(Trigger, frozen=True):
    """Starts sessions by time, given by exactly one of `cron`, `every` and `at`."""

    cron: (
        Annotated[NonEmptyText, Meta(description="Cron expression with five fields, as in `0 9 * * 1-5`.")] | UnsetType
    ) = UNSET
    every: Annotated[Duration, Meta(description="Time between two runs, as in `15m`.")] | UnsetType = UNSET
    at: Annotated[NonEmptyText, Meta(description="Time of a single run, as in `2026-12-24 09:00`.")] | UnsetType = UNSET
    timezone: Annotated[Zone, Meta(description="Time zone of the times; by default the fleet's.")] | UnsetType = UNSET
    overlap: Annotated[
        Overlap, Meta(description="Handling of a run that is due while the previous one is still running.")
    ] = "skip"
    catch_up: Annotated[
        CatchUp, Meta(description="`once`: run once for missed times after downtime; `never`: skip them.")
    ] = "once"
    jitter: Annotated[Duration, Meta(description="Maximum random delay of a run.")] = 0
    min_interval: Annotated[Duration, Meta(description="Minimum time between the starts of two runs.")] = MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="Hours in which runs may start.")] | UnsetType = UNSET


class Watch(Trigger, frozen=True):
    """Starts a session for each new or changed document of a folder or a collection."""

    path: Annotated[NonEmptyText, Meta(description="Folder, relative to the agent's folder.")] | UnsetType = UNSET
    pattern: Annotated[NonEmptyText, Meta(description="Pattern of the files in the folder, as in `*.pdf`.")] = "*"
    collection: Annotated[Name, Meta(description="Collection to watch instead of a folder.")] | UnsetType = UNSET
    debounce: Annotated[Duration, Meta(description="Time that a document must be unchanged before it is read.")] = (
        2 * SECOND
    )
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts per document before it is quarantined.")] = 3
    max_parallel: Annotated[int, Meta(ge=1, description="Maximum number of documents processed concurrently.")] = 4
    existing: Annotated[bool, Meta(description="Treat documents that exist at the first start as new.")] = True


SchemeName = Literal["bearer", "github", "gitlab", "linear", "sentry", "shopify", "slack", "standard", "stripe"]
TIMED_SCHEMES: Final[frozenset[SchemeName]] = frozenset(("linear", "slack", "standard", "stripe"))
"""The schemes whose senders sign the time of a delivery."""


class Webhook(Trigger, frozen=True, kw_only=True):
    """Starts a session for each delivery by HTTP."""

    HIDDEN: ClassVar[bool] = True

    scheme: Annotated[
        SchemeName,
        Meta(description="Sender whose signature is checked; `bearer` for a token, `standard` for Standard Webhooks."),
    ] = "bearer"
    token: Annotated[
        SecretReference,
        Meta(description="Token that a delivery presents, or secret that signs it, as `${secret:NAME}`."),
    ]
    previous_token: (
        Annotated[SecretReference, Meta(description="Former token or secret, accepted as well while it is replaced.")]
        | UnsetType
    ) = UNSET
    tolerance: (
        Annotated[
            Duration,
            Meta(description="Maximum difference between a signed time and this machine's clock; `5m` by default."),
        ]
        | UnsetType
    ) = UNSET
    max_bytes: Annotated[int, Meta(ge=1, description="Maximum size of a request body, in bytes.")] = 256 * 1024


HEARTBEAT: Final = "heartbeat"
HEARTBEAT_PROMPT: Final = (
    "This is your heartbeat. Look at what you are responsible for, and do what needs to be done now. "
    "If there is nothing to do, say so in one sentence and stop."
)


def make_heartbeat(interval: int, hours: ActiveHours | UnsetType) -> Schedule:
    """Make the schedule that `heartbeat: 30m` abbreviates."""
    return Schedule(name=HEARTBEAT, prompt=HEARTBEAT_PROMPT, every=interval, active_hours=hours)


AnyTrigger = Schedule | Watch | Webhook


def inherit_trigger_caps(caps: Caps, trigger: AnyTrigger) -> Caps:
    """Add the caps of a trigger to those of its session: for one run, and for all runs together."""
    run_cap, session_cap = trigger.max_cost_usd, caps.session.max_cost_usd
    if run_cap is not UNSET and run_cap is not None:
        session_cap = run_cap if session_cap is None else min(session_cap, run_cap)
    return msgspec.structs.replace(caps, session=Cap(session_cap, caps.session.per), trigger=trigger.caps())


class Collection(Spec, frozen=True):
    """The documents in a folder that an agent may read."""

    path: Annotated[NonEmptyText, Meta(description="Folder, relative to the agent's folder.")]
    pattern: Annotated[NonEmptyText, Meta(description="Pattern of the files in the folder, as in `**/*.md`.")] = "*"
    description: Annotated[str, Meta(description="Short description of the contents for the model.")] = ""


class Review(Spec, frozen=True):
    """The review of findings before delivery. A judge is never the request that wrote the finding."""

    judges: Annotated[
        tuple[OneModel, ...], Meta(description="Models that judge; by default the agent's own model in a new request.")
    ] = ()
    instructions: Annotated[str, Meta(description="Additional instructions for the judges.")] = ""
    max_cost_per_message_usd: (
        Annotated[Dollars, Meta(description="Maximum cost of a review: above it one judge reviews, then none.")]
        | UnsetType
    ) = UNSET


class Channel(Spec, frozen=True):
    """One channel for notifications."""

    HIDDEN: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the channel.")]
    type: Annotated[ChannelType, Meta(description="Type of the channel.")]
    to: Annotated[tuple[NonEmptyText, ...], Meta(description="Recipients of an e-mail.")] = ()
    sender: Annotated[NonEmptyText, Meta(description="Sender of an e-mail.")] | UnsetType = UNSET
    host: Annotated[NonEmptyText, Meta(description="Host of the mail server.")] | UnsetType = UNSET
    port: (
        Annotated[
            int, Meta(ge=1, le=65535, description="Port of the mail server; by default 465, 587 or 25, by `security`.")
        ]
        | UnsetType
    ) = UNSET
    security: Annotated[
        Literal["tls", "starttls", "none"], Meta(description="Encryption of the connection to the mail server.")
    ] = "starttls"
    username: Annotated[NonEmptyText, Meta(description="User name for the mail server.")] | UnsetType = UNSET
    password: (
        Annotated[SecretReference, Meta(description="Password for the mail server, as `${secret:NAME}`.")] | UnsetType
    ) = UNSET
    url: Annotated[Address, Meta(description="URL of a webhook.")] | UnsetType = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of a webhook; write a key as `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    service: (
        Annotated[SecretReference, Meta(description="Apprise URL of a service, as `${secret:NAME}`.")] | UnsetType
    ) = UNSET


class Notify(Spec, frozen=True):
    """The notifications of an agent."""

    channels: Annotated[
        tuple[Channel, ...], Meta(description="Channels for notifications; by default the app only.")
    ] = ()
    on: Annotated[
        tuple[Literal["halted", "failed", "waiting", "quarantined"], ...],
        Meta(description="Conditions that the runtime reports, in addition to the agent's own notifications."),
    ] = ("halted", "failed", "waiting", "quarantined")


class Anonymize(Spec, frozen=True):
    """The values that are hidden from remote models."""

    enabled: (
        Annotated[bool, Meta(description="Hide personal data; by default on for `phases: review`, else off.")]
        | UnsetType
    ) = UNSET
    names: Annotated[tuple[NonEmptyText, ...], Meta(description="Names to hide, in addition to recognised data.")] = ()


VerbName = Literal[
    "retrieve_chunks", "run_skill", "run_playbook", "emit_finding", "propose_memory", "propose_precedent", "notify"
]
Verbs = tuple[VerbName, ...]
VERBS: Final[Verbs] = get_args(VerbName)


class SubAgent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent in a sibling folder that the model can call as a tool."""

    name: Annotated[Name, Meta(description="Name of an agent in a sibling folder.")]
    description: Annotated[str, Meta(description="Purpose of the agent, for the calling model.")] = ""
    max_cost_usd: (
        Annotated[Dollars, Meta(description="Maximum cost of one task; half of the remaining cap is always a bound.")]
        | UnsetType
    ) = UNSET
    hand_off: Annotated[bool, Meta(description="Pass the whole conversation; the answer ends the turn.")] = False


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one agent, with zones and defaults filled in.

    `verbs` are those of its sessions; `anonymize` is None if nothing is hidden. At most `concurrency` of its task
    sessions are awake at the same time, on all machines together; None means no bound.
    """

    schedules: tuple[Schedule, ...] = ()
    watches: tuple[Watch, ...] = ()
    webhooks: tuple[Webhook, ...] = ()
    collections: Mapping[str, Collection] = {}
    review: Review = Review()
    notify: Notify = Notify()
    anonymize: tuple[str, ...] | None = None
    verbs: Verbs = ()
    idle_halt: int = 5 * MINUTE
    concurrency: int | None = None

    def triggers(self) -> tuple[AnyTrigger, ...]:
        return (*self.schedules, *self.watches, *self.webhooks)

    def trigger(self, name: str) -> AnyTrigger | None:
        return next((each for each in self.triggers() if each.name == name), None)


SCRIPT_RUNNERS: Final[Mapping[str, str]] = {".py": "python3", ".sh": "sh"}
"""The interpreter of a script by suffix; other scripts must be executable."""


class SkillScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program in a skill's folder, named by its path there. It becomes a tool."""

    file: str
    description: str
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    reads: Reads = "anyone"
    reach: Reach = "own"
    timeout: str | float = 60

    def argv(self, folder: Path) -> list[str]:
        runner = SCRIPT_RUNNERS.get(Path(self.file).suffix)
        return [*([runner] if runner else ()), str(folder / self.file)]


class Skill(msgspec.Struct, frozen=True):
    """The contents of a SKILL.md. `scripts` are keyed by tool name; `folder` contains them."""

    name: str
    description: str
    instructions: str
    scripts: Mapping[str, SkillScript] = {}
    folder: str = ""


def trigger_id(agent: str, name: str) -> str:
    return f"{agent}/{name}"


REFERENCE_PATTERN: Final = re.compile(r"\$\{([^{}]*)\}")
_SECRET_REFERENCE: Final = re.compile(r"\$\{\s*secret\s*:", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,9}")


class Reference(msgspec.Struct, frozen=True):
    """A reference to an input, or to the text or JSON of an earlier step."""

    source: Literal["inputs", "text", "json"]
    name: str
    path: tuple[str, ...] = ()
    written: str = ""


class Step(msgspec.Struct, frozen=True):
    """One call. `arguments` is JSON as written, with its references."""

    call: str
    arguments: bytes
    name: str = ""
    line: int = 0

    @property
    def has_references(self) -> bool:
        """True if a part of the arguments is known only when the step runs."""
        return any(parse_reference(body) for body in REFERENCE_PATTERN.findall(self.arguments.decode()))


class Playbook(msgspec.Struct, frozen=True):
    """A list of calls to make in order; the cap applies to all of them together."""

    steps: tuple[Step, ...]
    file: str
    inputs: tuple[str, ...] = ()
    max_cost_usd: int | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.call for step in self.steps))


class Results(msgspec.Struct, frozen=True):
    """The values that references can name: the inputs, and the outputs of named steps."""

    inputs: Mapping[str, Any] = {}
    texts: Mapping[str, str] = {}

    def with_step(self, name: str, text: str) -> "Results":
        return Results(self.inputs, {**self.texts, name: text}) if name else self


class MissingReference(msgspec.Struct, frozen=True):
    """A reference without a value, described for the author of the playbook."""

    sentence: str


def parse_reference(body: str) -> Reference | None:
    match body.split("."):
        case ["inputs", name] if name:
            return Reference("inputs", name, (), body)
        case ["steps", name, "text"] if name:
            return Reference("text", name, (), body)
        case ["steps", name, "json", *path] if name and all(path):
            return Reference("json", name, tuple(path), body)
        case _:
            return None


class _UnresolvedReference(Exception):
    """Carries a sentence out of nested arguments; never leaves this module."""


def bind_arguments(step: Step, results: Results) -> bytes | MissingReference:
    """Insert inputs and earlier results into a step's arguments, as JSON for the guard."""
    try:
        return json.dumps(
            _fill_value(json.loads(step.arguments), lambda reference: _resolve_reference(reference, results)),
            separators=(",", ":"),
        ).encode()
    except _UnresolvedReference as error:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): {error}")
    except RecursionError:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): a result is nested too deeply.")


def _fill_value(value: Any, resolve: Callable[[Reference], Any]) -> Any:
    match value:
        case str():
            return _fill_text(value, resolve)
        case dict():
            return {key: _fill_value(item, resolve) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [_fill_value(item, resolve) for item in cast("list[Any]", value)]
        case _:
            return value


def _fill_text(text: str, resolve: Callable[[Reference], Any]) -> Any:
    whole_match = REFERENCE_PATTERN.fullmatch(text)
    reference = parse_reference(whole_match[1]) if whole_match else None
    value = resolve(reference) if reference else REFERENCE_PATTERN.sub(lambda match: _fill_match(match, resolve), text)
    if _count_secrets(value) > _count_secrets(text):
        raise _UnresolvedReference(
            f"`{shorten(text)}` would insert the name of a secret; only the playbook itself may name secrets."
        )
    return value


def _count_secrets(value: Any) -> int:
    return len(_SECRET_REFERENCE.findall(value if isinstance(value, str) else json.dumps(value)))


def _fill_match(match: re.Match[str], resolve: Callable[[Reference], Any]) -> str:
    reference = parse_reference(match[1])
    if reference is None:
        return match[0]
    value = resolve(reference)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resolve_reference(reference: Reference, results: Results) -> Any:
    if reference.source == "inputs":
        return _require_name(results.inputs, reference.name, reference.written, "the inputs")
    text = _require_name(results.texts, reference.name, reference.written, "the steps that gave a result")
    if reference.source == "text":
        return text
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise _UnresolvedReference(
            f"`${{{reference.written}}}` needs JSON, but the output of step `{reference.name}` is not JSON."
        ) from None
    for key in reference.path:
        value = _require_key(value, key, reference.written)
    return value


def _reject_constant(name: str) -> Any:
    """Reject NaN and Infinity, which Python parses and JSON does not have."""
    raise ValueError(name)


def _require_name(values: Mapping[str, Any], name: str, reference_text: str, noun: str) -> Any:
    value: Any | UnsetType = values.get(name, UNSET)
    if value is UNSET:
        raise _UnresolvedReference(
            f"`${{{reference_text}}}` does not exist; {noun} are {join_names(values) or 'none'}."
        )
    return value


def _require_key(value: Any, key: str, reference_text: str) -> Any:
    match value:
        case dict() if key in value:
            return cast("dict[str, Any]", value)[key]
        case dict():
            keys = list(cast("dict[str, Any]", value))[:10]
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: no key `{key}`, only {join_names(keys) or 'nothing'}."
            )
        case list() if _INDEX.fullmatch(key) and int(key) < len(cast("list[Any]", value)):
            return cast("list[Any]", value)[int(key)]
        case list():
            count = len(cast("list[Any]", value))
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: `{key}` is not an index of a list of {count} "
                "(counted from 0)."
            )
        case _:
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: no key can be read from {describe_value(value)}."
            )
