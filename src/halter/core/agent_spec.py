"""How an agent thinks, paces itself, is triggered and works, as its files say it. What it may do is in `spec`.

A field is a key of the file, under the same name, and its default is the one that holds. `written` in a type's metadata
names the form in which a value is written. Money is in micro-dollars and times are microseconds here; in files they are
dollars, and seconds or `30m`.

Playbooks are lists of calls whose arguments may refer to inputs and to the results of earlier steps.
`${steps.NAME.text}` is the output of a step, `${steps.NAME.json…}` a part of it read as JSON, `${inputs.NAME}` an
input. A reference that is a whole argument keeps its type; inside a text it is inserted. The result of a reference is
never expanded again: a tool's output cannot refer to anything. `${secret:NAME}` is left as it is, since the guard
inserts secrets. Only the playbook itself may name one: a result that would bring a secret's name into an argument is
refused, or a web page could have secrets sent to it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args

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
"""Microseconds, or None for a written-out `none`."""
Dollars = Annotated[int | None, Meta(extra={"written": "dollars"})]
"""Micro-dollars, written as a number of dollars, or None for a written-out `none`."""
RateValue = Annotated[int | None, Meta(extra={"written": "rate"})]
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
ArgumentUseText = Annotated[str, Meta(extra={"written": "use"})]
"""What an argument decides, and the kind of thing it names: `destination:address`."""
SecretReference = Annotated[str, Meta(extra={"written": "reference"})]
"""A `${secret:NAME}`: the one way to write a key."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in a file. `ALSO` maps alternative names of a key to its own.

    The value of a `HIDDEN` mapping may be a key by mistake: no sentence quotes it.
    """

    ALSO: ClassVar[Mapping[str, str]] = MappingProxyType({})
    HIDDEN: ClassVar[bool] = False


WireFormat = Literal["openai", "anthropic", "google"]
"""The protocol that an endpoint speaks. `openai` is also what most other servers speak."""

ContextStrategy = Literal["sliding_window", "compact", "summarize"]
"""What is dropped when a history outgrows the window: the older part, with or without a marker, or summarized."""

ThinkingEffort = Literal["off", "low", "medium", "high"]
"""How much a model thinks before it answers."""
ToolCalls = Literal["native", "text"]
"""How calls are requested: natively by the provider's protocol, or as text, for models without it."""

ModelPurpose = Literal["summary", "simulation", "judge", "skill"]
"""The purposes for which another model than the agent's own may be named."""

SCRIPTED: Final = "scripted"
REFLEX: Final = "reflex"
"""The two providers that need no network; as names of models they may stand alone."""


CloudName = Literal["google", "aws"]
CLOUD_HOSTS: Final[Mapping[CloudName, tuple[str, ...]]] = MappingProxyType(
    {"google": (".googleapis.com",), "aws": (".amazonaws.com", ".api.aws")}
)
"""Where credentials of a cloud may be sent, if the fleet does not name another address."""


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """How an endpoint is reached. `api_key` names a secret, as `${secret:NAME}`; a local server may need none.

    With `credentials`, those of that cloud are used as its own tools find them. `bills_errors` says that an answer with
    an error status may be charged for. Without `prompt_cache`, no request asks for a cache.
    """

    wire: WireFormat = "openai"
    base_url: str
    api_key: str = ""
    credentials: CloudName | None = None
    bills_errors: bool = False
    prompt_cache: bool = True


class KnownProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider with defaults: its address, and the variables that hold its key or move it.

    A local server needs no key. Without an address, the file or the variable must give one.
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


class BrainSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the loop needs to know of an agent, beside what the guard knows.

    Models are written `provider:model`. `context_window` is in tokens, 0 for the model's own; `streaming` is None where
    it is not set: then a chat streams and nothing else does. `script` and `reflex` are what their files hold, already
    read: a list of replies, and a list of rules. `rates` say how fast models may be asked, by all agents of the fleet.
    `native_output` names the tool whose arguments a model gives as its answer, where its provider can hold it to them.
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
SensorType = Literal["poll", "watch", "stream"]
StreamFormat = Literal["sse", "websocket"]

ALWAYS_WAKING_NAMES: Final = ("message", "decision")
"""Names that always wake a session, and may be listed all the same."""

NonEmptyText = Annotated[str, Meta(min_length=1)]


class Gate(Spec, frozen=True):
    """The cheap check before a full turn. All that is said must hold, in this order; without any of it, it is open."""

    on: Annotated[
        Literal["change", "always"],
        Meta(description="`change` skips a turn when nothing has changed since the last one; `always` asks on."),
    ] = "change"
    expression: Annotated[str, Meta(description="A CEL expression over `hot`, `before`, `changed` and `skips`.")] = ""
    model: Annotated[OneModel, Meta(description="A small model that is shown what changed.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="What that model is to look for.")] = ""
    max_skips: Annotated[int, Meta(ge=0, description="After so many skips in a row a turn is taken; 0 for never.")] = 0


class ActiveHours(Spec, frozen=True):
    """When an agent may be awake. An end before the start is on the next day."""

    start: Annotated[DayTime, Meta(description="When it begins, as in `08:00`.")]
    end: Annotated[DayTime, Meta(description="When it ends, as in `23:00`.")]
    timezone: Annotated[Zone, Meta(description="Whose clock that is; the fleet's, if not given.")] | UnsetType = UNSET


class Autonomy(Spec, frozen=True):
    """How an agent runs by itself, and the guardrails that it cannot move."""

    enabled: Annotated[bool, Meta(description="Whether the agent runs by itself.")] = False
    prompt: Annotated[str, Meta(description="What each turn begins with, if not the usual words.")] = ""
    min_sleep: Annotated[Duration, Meta(description="The shortest sleep.")] = SECOND
    max_sleep: Annotated[Duration, Meta(description="The longest sleep.")] = DAY
    max_consecutive_turns: Annotated[
        int, Meta(ge=1, description="So many turns without a sleep; then it is put to sleep.")
    ] = 50
    token_budget_per_hour: Annotated[
        int, Meta(ge=0, description="Tokens in an hour, cached ones not counted; 0 for no budget.")
    ] = 100_000
    max_actions_per_minute: Annotated[
        int, Meta(ge=0, description="Calls with side effects in any minute; 0 for no limit.")
    ] = 10
    idle_timeout: Annotated[
        Duration, Meta(description="Awake for so long without a call, a change or a message, it ends; 0 for never.")
    ] = 10 * MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="When it may be awake.")] | UnsetType = UNSET
    gate: Annotated[Gate, Meta(description="The cheap check before a full turn.")] | UnsetType = UNSET
    precheck_model: Annotated[OneModel, Meta(description="Another place for `gate.model`.")] | UnsetType = UNSET


class HotField(Spec, frozen=True):
    """One fact that the model sees every turn."""

    type: Annotated[FieldType, Meta(description="What its value must be.")] = "any"
    ttl: Annotated[Duration, Meta(description="After so long it is shown as stale.")] | UnsetType = UNSET
    refresh_tool: (
        Annotated[
            NonEmptyText,
            Meta(description="A tool that only looks, whose result is the value, also when the agent calls it."),
        ]
        | UnsetType
    ) = UNSET
    refresh_params: Annotated[Mapping[str, Any], Meta(description="What that tool is given.")] = {}
    path: Annotated[PathInto, Meta(description="The part of the result that is the value, as in `account.cash`.")] = ""
    auto_refresh: Annotated[bool, Meta(description="Whether a stale value is refreshed before each turn.")] = False
    max_items: Annotated[int, Meta(ge=1, description="An array keeps the newest so many.")] | UnsetType = UNSET
    description: Annotated[str, Meta(description="What it is, in a few words for the model.")] = ""


class HotStateSpec(Spec, frozen=True):
    """The typed facts with ages that the model sees every turn."""

    fields: Annotated[Mapping[Name, HotField], Meta(description="The facts, by name.")] = {}


class Update(Spec, frozen=True):
    """Where a part of a reading goes."""

    field: Annotated[Name, Meta(description="The field that is written.")]
    path: Annotated[PathInto, Meta(description="The part of the reading, as in `quotes.AAPL` or `items[0]`.")] = ""
    append: Annotated[bool, Meta(description="Whether it is added to an array.")] = False


class Detector(Spec, frozen=True):
    """Finds numbers that are far from what they usually are: how many deviations away is the score."""

    path: Annotated[PathInto, Meta(description="The number in the reading.")] = ""
    half_life: Annotated[float, Meta(ge=1, description="After so many readings, one counts half.")] = 20
    warmup: Annotated[int, Meta(ge=2, description="So many readings are only learned from.")] = 20


class Signal(Spec, frozen=True):
    """A score on a reading; from `threshold` on it fires. One of `expression`, `model` or `detector` gives it."""

    name: Annotated[Name, Meta(description="The signal's name.")]
    expression: (
        Annotated[NonEmptyText, Meta(description="A CEL expression over `value` and `hot`: true, false or a number.")]
        | UnsetType
    ) = UNSET
    model: Annotated[OneModel, Meta(description="A small model that gives a score from 0 to 1.")] | UnsetType = UNSET
    prompt: Annotated[str, Meta(description="What that model is to judge.")] = ""
    detector: Annotated[Detector, Meta(description="A built-in detector of unusual numbers.")] | UnsetType = UNSET
    threshold: (
        Annotated[float, Meta(description="From which score on it fires: 0.5, or 4 for a detector, if not given.")]
        | UnsetType
    ) = UNSET
    cooldown: Annotated[Duration, Meta(description="How long it is quiet after it fired.")] = MINUTE
    notify: Annotated[bool, Meta(description="Whether the next turn begins with an alert.")] = False
    filter: Annotated[bool, Meta(description="Whether fields are written only when it fires.")] = False


class SensorSource(Spec, frozen=True):
    """Where a sensor reads: a tool, an address, or a file or folder."""

    HIDDEN: ClassVar[bool] = True

    tool: Annotated[NonEmptyText, Meta(description="A tool that only looks.")] | UnsetType = UNSET
    params: Annotated[Mapping[str, Any], Meta(description="What that tool is given.")] = {}
    url: (
        Annotated[Address, Meta(description="An address: http(s):// to poll or for SSE, ws(s):// for WebSocket.")]
        | UnsetType
    ) = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of the request; a key is written `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    format: (
        Annotated[StreamFormat, Meta(description="What a stream speaks; told by its address, if not given.")]
        | UnsetType
    ) = UNSET
    path: Annotated[NonEmptyText, Meta(description="A file or folder, seen from the agent's own.")] | UnsetType = UNSET
    pattern: Annotated[NonEmptyText, Meta(description="Which files of a folder, as in `*.log`.")] = "*"


class SensorSpec(Spec, frozen=True):
    """A background reader that keeps hot state fresh."""

    name: Annotated[Name, Meta(description="The sensor's name.")]
    type: Annotated[SensorType, Meta(description="Whether it asks again and again, watches files, or listens.")]
    source: Annotated[SensorSource, Meta(description="Where it reads.")]
    interval: Annotated[Duration, Meta(description="How often it asks.")] = MINUTE
    jitter: Annotated[float, Meta(ge=0, le=1, description="The part of the interval that chance may add.")] = 0.1
    timeout: Annotated[Duration, Meta(description="How long one answer, or the beginning of a stream, may take.")] = (
        30 * SECOND
    )
    updates: Annotated[tuple[Update, ...], Meta(description="The fields it writes; one of its own name, if none.")] = ()
    signals: Annotated[tuple[Signal, ...], Meta(description="Scores on what it reads.")] = ()

    def list_updates(self) -> tuple[Update, ...]:
        return self.updates or (Update(field=self.name),)


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """The pacing of one agent. Its gate and its zone are filled in."""

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
    """What all that starts sessions has in common: its name, what the session is told, and what it may spend."""

    name: Annotated[Name, Meta(description="The trigger's name.")]
    prompt: Annotated[str, Meta(description="What the session is told.")] = ""
    playbook: (
        Annotated[NonEmptyText, Meta(description="A playbook of the agent's folder that is played instead.")]
        | UnsetType
    ) = UNSET
    inputs: Annotated[Mapping[str, Any], Meta(description="What that playbook is given.")] = {}
    collections: Annotated[
        tuple[Name, ...], Meta(description="The collections whose documents the session may read.")
    ] = ()
    max_cost_usd: Annotated[Dollars, Meta(description="The most that one run may spend.")] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="The most that all runs may spend in an hour.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that all runs may spend in a day.")] | UnsetType
    ) = UNSET

    def caps(self) -> tuple[Cap, ...]:
        both: tuple[tuple[int | UnsetType | None, Literal["hour", "day"]], ...] = (
            (self.max_cost_usd_per_hour, "hour"),
            (self.max_cost_usd_per_day, "day"),
        )
        return tuple(Cap(usd, per) for usd, per in both if usd is not UNSET)


class Schedule(Trigger, frozen=True):
    """Starts a session at certain times. One of `cron`, `every` and `at` says when."""

    cron: Annotated[NonEmptyText, Meta(description="Five fields, as in `0 9 * * 1-5`.")] | UnsetType = UNSET
    every: Annotated[Duration, Meta(description="The time between two runs, as in `15m`.")] | UnsetType = UNSET
    at: Annotated[NonEmptyText, Meta(description="One moment, as in `2026-12-24 09:00`.")] | UnsetType = UNSET
    timezone: Annotated[Zone, Meta(description="Whose clock that is; the fleet's, if not given.")] | UnsetType = UNSET
    overlap: Annotated[
        Overlap, Meta(description="What becomes of a run whose time comes while the one before it works.")
    ] = "skip"
    catch_up: Annotated[
        CatchUp, Meta(description="Whether what was missed while nothing ran is made up for, once.")
    ] = "once"
    jitter: Annotated[Duration, Meta(description="By how much chance may delay a run.")] = 0
    min_interval: Annotated[Duration, Meta(description="No run starts sooner than this after another.")] = MINUTE
    active_hours: Annotated[ActiveHours, Meta(description="When it may run.")] | UnsetType = UNSET


class Watch(Trigger, frozen=True):
    """Starts a session for each new or changed document of a folder, or of a collection."""

    path: Annotated[NonEmptyText, Meta(description="A folder, seen from the agent's own.")] | UnsetType = UNSET
    pattern: Annotated[NonEmptyText, Meta(description="Which files of it, as in `*.pdf`.")] = "*"
    collection: Annotated[Name, Meta(description="A collection, in place of a folder.")] | UnsetType = UNSET
    debounce: Annotated[Duration, Meta(description="A document is taken when it has not changed for so long.")] = (
        2 * SECOND
    )
    max_attempts: Annotated[
        int, Meta(ge=1, description="So often a document is tried; then it is left to a person.")
    ] = 3
    max_parallel: Annotated[int, Meta(ge=1, description="So many documents are worked on at once.")] = 4
    existing: Annotated[bool, Meta(description="Whether what lies there at the beginning counts as new.")] = True


class Webhook(Trigger, frozen=True, kw_only=True):
    """Starts a session for each delivery by HTTP."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="What a delivery must bring, as `${secret:NAME}`.")]
    max_bytes: Annotated[int, Meta(ge=1, description="The longest body that is taken.")] = 256 * 1024


HEARTBEAT: Final = "heartbeat"
HEARTBEAT_PROMPT: Final = (
    "This is your heartbeat. Look at what you are responsible for, and do what needs to be done now. "
    "If there is nothing to do, say so in one sentence and stop."
)


def make_heartbeat(interval: int, hours: ActiveHours | UnsetType) -> Schedule:
    """The schedule that `heartbeat: 30m` stands for."""
    return Schedule(name=HEARTBEAT, prompt=HEARTBEAT_PROMPT, every=interval, active_hours=hours)


AnyTrigger = Schedule | Watch | Webhook


def inherit_trigger_caps(caps: Caps, trigger: AnyTrigger) -> Caps:
    """Give a session the caps of its trigger: of one run, and of all runs together."""
    run, own = trigger.max_cost_usd, caps.session.max_cost_usd
    if run is not UNSET and run is not None:
        own = run if own is None else min(own, run)
    return msgspec.structs.replace(caps, session=Cap(own, caps.session.per), trigger=trigger.caps())


class Collection(Spec, frozen=True):
    """Documents that an agent may read: the files of a folder."""

    path: Annotated[NonEmptyText, Meta(description="The folder, seen from the agent's own.")]
    pattern: Annotated[NonEmptyText, Meta(description="Which files of it, as in `**/*.md`.")] = "*"
    description: Annotated[str, Meta(description="What it holds, in a few words for the model.")] = ""


class Review(Spec, frozen=True):
    """Who looks at findings before they are delivered. It is never the author's own request."""

    judges: Annotated[
        tuple[OneModel, ...], Meta(description="The models that judge; the agent's own, asked anew, if none is named.")
    ] = ()
    instructions: Annotated[str, Meta(description="What they are to look for, beside the usual.")] = ""
    max_cost_per_message_usd: (
        Annotated[Dollars, Meta(description="Above this, one judge is asked instead of all; above it too, none.")]
        | UnsetType
    ) = UNSET


class Channel(Spec, frozen=True):
    """One way to notify people."""

    HIDDEN: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="The channel's name.")]
    type: Annotated[ChannelType, Meta(description="How it is sent.")]
    to: Annotated[tuple[NonEmptyText, ...], Meta(description="Whom an e-mail goes to.")] = ()
    sender: Annotated[NonEmptyText, Meta(description="Whom an e-mail comes from.")] | UnsetType = UNSET
    host: Annotated[NonEmptyText, Meta(description="The mail server.")] | UnsetType = UNSET
    port: (
        Annotated[int, Meta(ge=1, le=65535, description="Its port; 465 or 587 or 25, by its security.")] | UnsetType
    ) = UNSET
    security: Annotated[
        Literal["tls", "starttls", "none"], Meta(description="How the connection to the mail server is kept private.")
    ] = "starttls"
    username: Annotated[NonEmptyText, Meta(description="Who logs in there.")] | UnsetType = UNSET
    password: Annotated[SecretReference, Meta(description="The password, as `${secret:NAME}`.")] | UnsetType = UNSET
    url: Annotated[Address, Meta(description="The address of a webhook.")] | UnsetType = UNSET
    headers: Annotated[
        Mapping[HeaderName, HeaderValue],
        Meta(description="Headers of a webhook; a key is written `${secret:NAME}`.", extra={"hidden": True}),
    ] = {}
    service: (
        Annotated[SecretReference, Meta(description="The apprise address of a service, as `${secret:NAME}`.")]
        | UnsetType
    ) = UNSET


class Notify(Spec, frozen=True):
    """Whom an agent tells what."""

    channels: Annotated[tuple[Channel, ...], Meta(description="The ways to tell; in the app, if none is named.")] = ()
    on: Annotated[
        tuple[Literal["halted", "failed", "waiting", "quarantined"], ...],
        Meta(description="What the runtime itself tells of, beside what the agent sends."),
    ] = ("halted", "failed", "waiting", "quarantined")


class Anonymize(Spec, frozen=True):
    """What is hidden from models that run elsewhere."""

    enabled: Annotated[bool, Meta(description="Whether it is; on for `phases: review`, off elsewhere.")] | UnsetType = (
        UNSET
    )
    names: Annotated[
        tuple[NonEmptyText, ...], Meta(description="Names that are hidden, beside what is recognised.")
    ] = ()


VerbName = Literal[
    "retrieve_chunks", "run_skill", "run_playbook", "emit_finding", "propose_memory", "propose_precedent", "notify"
]
Verbs = tuple[VerbName, ...]
VERBS: Final[Verbs] = get_args(VerbName)


class SubAgent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another agent, in a folder beside, whom the model can ask by a tool."""

    name: Annotated[Name, Meta(description="The name of an agent in a folder beside this one's.")]
    description: Annotated[str, Meta(description="What it is good for; its model is told this.")] = ""
    max_cost_usd: (
        Annotated[Dollars, Meta(description="The most that one task may cost; half of what is left bounds it anyway.")]
        | UnsetType
    ) = UNSET
    hand_off: Annotated[
        bool, Meta(description="Whether it gets the whole conversation, and its answer ends the turn.")
    ] = False


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one agent, with zones and defaults filled in.

    `verbs` are those that its sessions have; `anonymize` is None where nothing is hidden. At most `concurrency` of its
    task sessions are awake at once, on all machines together; None is any number.
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
"""What runs a script by its suffix; any other one runs by itself."""


class SkillScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that a skill brings along, by its path in the skill's folder. It becomes a tool."""

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
    """What a SKILL.md says. `scripts` are by the names of their tools; `folder` is where they lie."""

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
    """A place where a value from elsewhere goes: an input, or an earlier step's text or JSON."""

    source: Literal["inputs", "text", "json"]
    name: str
    path: tuple[str, ...] = ()
    written: str = ""


class Step(msgspec.Struct, frozen=True):
    """One call. `arguments` is JSON as it was written, with its references in it."""

    call: str
    arguments: bytes
    name: str = ""
    line: int = 0


class Playbook(msgspec.Struct, frozen=True):
    """A list of calls to be made one after the other; a cap is on all of them together."""

    steps: tuple[Step, ...]
    file: str
    inputs: tuple[str, ...] = ()
    max_cost_usd: int | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.call for step in self.steps))


class Results(msgspec.Struct, frozen=True):
    """What can be referred to: the inputs, and the outputs of named steps."""

    inputs: Mapping[str, Any] = {}
    texts: Mapping[str, str] = {}

    def with_step(self, name: str, text: str) -> "Results":
        return Results(self.inputs, {**self.texts, name: text}) if name else self


class MissingReference(msgspec.Struct, frozen=True):
    """A reference that leads nowhere, as a sentence for the author of the playbook."""

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
    """Put inputs and earlier results into a step's arguments, as JSON for the guard."""
    try:
        return json.dumps(
            _fill_value(json.loads(step.arguments), lambda found: _resolve_reference(found, results)),
            separators=(",", ":"),
        ).encode()
    except _UnresolvedReference as nowhere:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): {nowhere}")
    except RecursionError:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): a result is nested too deeply.")


def _fill_value(value: Any, look_up: Callable[[Reference], Any]) -> Any:
    match value:
        case str():
            return _fill_text(value, look_up)
        case dict():
            return {key: _fill_value(item, look_up) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [_fill_value(item, look_up) for item in cast("list[Any]", value)]
        case _:
            return value


def _fill_text(text: str, look_up: Callable[[Reference], Any]) -> Any:
    whole = REFERENCE_PATTERN.fullmatch(text)
    found = parse_reference(whole[1]) if whole else None
    filled = look_up(found) if found else REFERENCE_PATTERN.sub(lambda match: _fill_match(match, look_up), text)
    if _count_secrets(filled) > _count_secrets(text):
        raise _UnresolvedReference(
            f"`{shorten(text)}` would bring in the name of a secret; only the playbook may name one."
        )
    return filled


def _count_secrets(value: Any) -> int:
    return len(_SECRET_REFERENCE.findall(value if isinstance(value, str) else json.dumps(value)))


def _fill_match(match: re.Match[str], look_up: Callable[[Reference], Any]) -> str:
    found = parse_reference(match[1])
    if found is None:
        return match[0]
    value = look_up(found)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resolve_reference(found: Reference, results: Results) -> Any:
    if found.source == "inputs":
        return _require_name(results.inputs, found.name, found.written, "the inputs")
    text = _require_name(results.texts, found.name, found.written, "the steps that gave a result")
    if found.source == "text":
        return text
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise _UnresolvedReference(
            f"`${{{found.written}}}` needs JSON, but step `{found.name}` gave other text."
        ) from None
    for key in found.path:
        value = _require_key(value, key, found.written)
    return value


def _reject_constant(written: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(written)


def _require_name(known: Mapping[str, Any], name: str, written: str, place: str) -> Any:
    value: Any | UnsetType = known.get(name, UNSET)
    if value is UNSET:
        raise _UnresolvedReference(f"`${{{written}}}` is not there; {place} are {join_names(known) or 'none'}.")
    return value


def _require_key(value: Any, key: str, written: str) -> Any:
    match value:
        case dict() if key in value:
            return cast("dict[str, Any]", value)[key]
        case dict():
            some = list(cast("dict[str, Any]", value))[:10]
            raise _UnresolvedReference(
                f"`${{{written}}}` is not there: no `{key}`, only {join_names(some) or 'nothing'}."
            )
        case list() if _INDEX.fullmatch(key) and int(key) < len(cast("list[Any]", value)):
            return cast("list[Any]", value)[int(key)]
        case list():
            count = len(cast("list[Any]", value))
            raise _UnresolvedReference(
                f"`${{{written}}}` is not there: `{key}` is no place in a list of {count}, counted from 0."
            )
        case _:
            raise _UnresolvedReference(f"`${{{written}}}` is not there: nothing is inside of {describe_value(value)}.")
