"""What `halter.yaml` and `agent.yaml` say, as frozen values, and what both come to for one agent.

A field is a key of the file, under the same name. UNSET means that the key is absent: the other file, or the default,
then applies. Human forms (`30m`, dollars, `none`, `20/hour`) are read into integers; their forms are in `agent_spec`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from halter.core.agent_spec import (
    ActiveHours,
    Anonymize,
    ArgumentUseText,
    Autonomy,
    CloudName,
    Collection,
    ContextStrategy,
    Dollars,
    Duration,
    HeaderName,
    Host,
    HotStateSpec,
    ModelPattern,
    ModelPurpose,
    Name,
    NonEmptyText,
    Notify,
    OneModel,
    OptionalDuration,
    RateValue,
    Review,
    Schedule,
    SecretName,
    SecretReference,
    SensorSpec,
    Spec,
    SubAgent,
    ThinkingEffort,
    ToolCalls,
    Url,
    Verbs,
    Watch,
    Webhook,
    Window,
    WireFormat,
    Zone,
)
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.ids import Digest
from halter.core.money import Caps
from halter.core.provenance import Declaration, Reach, Reads
from halter.core.tools import (
    LEVELS,
    DeclaredParts,
    Level,
    ProviderToolName,
    ToolSpec,
    find_declaration,
    refine_declaration,
)
from halter.core.usage import Price

OnCap = Literal["wrap_up", "stop", "ask"]

Recoveries = Annotated[
    int, Meta(ge=0, le=100, description="How often an answer that was cut off is gone on with; 0 for never.")
]
Repeats = Annotated[
    int, Meta(ge=1, le=1000, description="So many steps in a row may make the same calls with the same results.")
]
ReserveTokens = Annotated[int, Meta(ge=0, description="So many tokens before the budget's end, a warning is given.")]
ReserveCost = Annotated[float, Meta(ge=0, le=1, description="The part of the cap that is kept for wrapping up.")]


class Limits(Spec, frozen=True):
    """What a session and an agent may use at most."""

    ALSO: ClassVar[Mapping[str, str]] = MappingProxyType({"cost_limit": "max_cost_usd"})

    max_cost_usd: Annotated[Dollars, Meta(description="The most that one session may cost.")] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="The most that the agent may cost in an hour.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that the agent may cost in a day.")] | UnsetType
    ) = UNSET
    on_cap: Annotated[OnCap, Meta(description="What a session does at its cap.")] | UnsetType = UNSET
    token_budget: (
        Annotated[
            int, Meta(ge=0, description="The most tokens of one session, cached ones not counted; 0 for no budget.")
        ]
        | UnsetType
    ) = UNSET
    max_steps: Annotated[int, Meta(ge=1, description="The most steps of one turn.")] | UnsetType = UNSET
    timeout: Annotated[Duration, Meta(description="How long one turn may take; 0 for no timeout.")] | UnsetType = UNSET
    min_output_tokens: (
        Annotated[int, Meta(ge=1, description="The shortest answer that a request is still made for.")] | UnsetType
    ) = UNSET
    max_output_tokens: (
        Annotated[int, Meta(ge=1, le=1_000_000, description="The longest answer that is asked for, in tokens.")]
        | UnsetType
    ) = UNSET
    max_retries: (
        Annotated[int, Meta(ge=0, le=100, description="How often a request is repeated that failed for a while only.")]
        | UnsetType
    ) = UNSET
    outage_backoff: (
        Annotated[
            Duration,
            Meta(
                description="The longest pause between two tries while no model answers an agent that no person "
                "attends; 0 to end its turn instead."
            ),
        ]
        | UnsetType
    ) = UNSET
    context_window: (
        Annotated[Window, Meta(description="How many tokens a request may have; 0 for as many as the model takes.")]
        | UnsetType
    ) = UNSET
    context_strategy: (
        Annotated[ContextStrategy, Meta(description="What is left out when the history outgrows the window.")]
        | UnsetType
    ) = UNSET
    streaming: (
        Annotated[bool, Meta(description="Whether answers come word by word; in a chat they do, if not given.")]
        | UnsetType
    ) = UNSET
    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class Guardrails(Spec, frozen=True):
    """Another place for those of the limits that keep a turn in its lane."""

    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class FleetLimits(Spec, frozen=True):
    """What all agents together may use at most."""

    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="The most that all agents may cost in a day.")] | UnsetType
    ) = UNSET
    max_cost_usd_per_month: (
        Annotated[Dollars, Meta(description="The most that all agents may cost in a month.")] | UnsetType
    ) = UNSET


class ModelRate(Spec, frozen=True):
    """How fast a model may be asked, by all agents on all machines together."""

    requests_per_minute: (
        Annotated[int, Meta(ge=1, description="The most requests that are made in a minute.")] | UnsetType
    ) = UNSET
    tokens_per_minute: (
        Annotated[int, Meta(ge=1, description="The most tokens of a minute's requests, cached ones not counted.")]
        | UnsetType
    ) = UNSET


class AgentBounds(Spec, frozen=True):
    """What each agent may use at most."""

    limits: Limits = Limits()


Mode = Literal["ASSIST", "SEMI", "FULL"]
"""How much an agent may do without asking, the most careful first."""
MODES: Final[tuple[Mode, ...]] = ("ASSIST", "SEMI", "FULL")

ProvenanceMode = Literal["off", "observe", "ask", "strict"]
"""What happens to a call with a value that no trusted place has said, the laxest first."""
PROVENANCE_MODES: Final[tuple[ProvenanceMode, ...]] = ("off", "observe", "ask", "strict")

Approval = Literal["always", "never"]
Simulate = Literal["never", "asked", "always"]
SIMULATE_MODES: Final[tuple[Simulate, ...]] = ("never", "asked", "always")

DEFAULT_RATES: Final[Mapping[Level, int]] = MappingProxyType({"PRIVILEGED": 20})
"""Attempts per hour where no rate is set; the other levels have none."""
SIMULATED_LEVELS: Final[tuple[Level, ...]] = ("RESTRICTED", "PRIVILEGED")
"""The levels that `policy.simulate` switches predictions on for; without it no call is predicted."""
APPROVAL_EXPIRY: Final = 24 * HOUR


class LevelRule(Spec, frozen=True):
    """What differs from the usual for all tools of a level."""

    approval: Annotated[Approval, Meta(description="Whether a person is asked, in any mode.")] | UnsetType = UNSET
    rate: Annotated[RateValue, Meta(description="How often each tool may be tried in a sliding hour.")] | UnsetType = (
        UNSET
    )
    simulate: Annotated[Simulate, Meta(description="When a model predicts the outcome first.")] | UnsetType = UNSET
    approvers: (
        Annotated[int, Meta(ge=1, le=2, description="How many people must agree; 2 always asks, and takes no rule.")]
        | UnsetType
    ) = UNSET


class ToolRule(LevelRule, frozen=True):
    """What differs from the usual for one tool."""

    level: Annotated[Level, Meta(description="How dangerous the tool is taken to be.")] | UnsetType = UNSET
    reads: (
        Annotated[Reads, Meta(description="Who wrote what it returns: a curated place, you, your house, or anyone.")]
        | UnsetType
    ) = UNSET
    reach: (
        Annotated[Reach, Meta(description="What it changes: nothing, your own, what others see, or for good.")]
        | UnsetType
    ) = UNSET
    arguments: Annotated[Mapping[str, ArgumentUseText], Meta(description="What each argument decides.")] | UnsetType = (
        UNSET
    )
    mints: (
        Annotated[
            Mapping[str, str], Meta(description="Fields of its records that a look-up by a said name vouches for.")
        ]
        | UnsetType
    ) = UNSET
    lists: (
        Annotated[Mapping[str, str], Meta(description="Fields of its records that belong to the house, by kind.")]
        | UnsetType
    ) = UNSET
    asks: Annotated[tuple[str, ...], Meta(description="Words of a task that ask for this act.")] | UnsetType = UNSET

    @property
    def declared(self) -> DeclaredParts:
        return DeclaredParts(**{name: getattr(self, name) for name in DeclaredParts.__struct_fields__})


class Policy(Spec, frozen=True):
    """What needs a person, how often something may be tried, and what may not be used at all."""

    levels: Annotated[Mapping[Level, LevelRule], Meta(description="Rules for all tools of a level.")] = {}
    tools: Annotated[Mapping[str, ToolRule], Meta(description="Rules for single tools, by name.")] = {}
    simulate: (
        Annotated[
            Simulate, Meta(description="When a model predicts RESTRICTED and PRIVILEGED calls first; else never.")
        ]
        | UnsetType
    ) = UNSET
    provenance: (
        Annotated[
            ProvenanceMode,
            Meta(description="What happens to a call with a value that no trusted place has said."),
        ]
        | UnsetType
    ) = UNSET
    lock_after_denial: (
        Annotated[
            bool, Meta(description="Whether a denied question of provenance refuses all later ones of its session.")
        ]
        | UnsetType
    ) = UNSET
    disabled: Annotated[tuple[str, ...], Meta(description="Tools that no agent may use.")] = ()
    approval_expiry: Annotated[Duration, Meta(description="How long an approval may be waited for.")] | UnsetType = (
        UNSET
    )

    def usual_simulate(self, level: Level) -> Simulate:
        """When calls of a level are predicted, unless a rule for the level or the tool says otherwise."""
        return self.simulate if self.simulate is not UNSET and level in SIMULATED_LEVELS else "never"


class ModelSpec(Spec, frozen=True):
    """What is said of one model."""

    price: Annotated[Price | Literal["free"], Meta(description="Dollars per million tokens, or `free`.")]


class ProviderToolSpec(Spec, frozen=True):
    """How often a tool of the provider may be used; so much is held before each request."""

    max_uses: Annotated[int, Meta(ge=1, le=20, description="How often it may be used in one request.")]


class ProviderSpec(Spec, frozen=True):
    """Where the models of a provider are reached, and with which key."""

    HIDDEN: ClassVar[bool] = True

    wire: Annotated[WireFormat, Meta(description="The protocol that the endpoint speaks.")] | UnsetType = UNSET
    base_url: (
        Annotated[Url, Meta(description="The address of the endpoint; a known provider's own, if not given.")]
        | UnsetType
    ) = UNSET
    api_key: (
        Annotated[SecretReference, Meta(description="The key, as `${secret:NAME}` and never in plain text.")]
        | UnsetType
    ) = UNSET
    credentials: (
        Annotated[
            CloudName, Meta(description="Use a cloud's own credentials, as its tools find them, instead of a key.")
        ]
        | UnsetType
    ) = UNSET
    bills_errors: (
        Annotated[bool, Meta(description="Whether it may charge for an answer with an error status (4xx or 5xx).")]
        | UnsetType
    ) = UNSET
    prompt_cache: (
        Annotated[bool, Meta(description="`false` marks nothing for Anthropic's cache; others cache by themselves.")]
        | UnsetType
    ) = UNSET


class ShellBounds(Spec, frozen=True):
    """What the shell of any agent may do."""

    sandbox: Annotated[bool, Meta(description="`false` allows agents to run commands without a sandbox.")] = True
    network: Annotated[bool, Meta(description="Whether commands may reach the network.")] = False


class TelegramSpec(Spec, frozen=True):
    """A Telegram bot that people answer decisions with."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="The bot's token, as `${secret:NAME}`.")]
    url: Annotated[Url, Meta(description="The address of the Bot API.")] = "https://api.telegram.org"


class NtfySpec(Spec, frozen=True):
    """A server of ntfy that people answer decisions with."""

    HIDDEN: ClassVar[bool] = True

    url: Annotated[Url, Meta(description="The address of the server.")] = "https://ntfy.sh"
    token: Annotated[SecretReference, Meta(description="An access token, as `${secret:NAME}`.")] | UnsetType = UNSET


class SlackSpec(Spec, frozen=True):
    """A Slack app in Socket Mode that people answer decisions with."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="The bot's token (`xoxb-`), as `${secret:NAME}`.")]
    app_token: Annotated[SecretReference, Meta(description="The app's token (`xapp-`), as `${secret:NAME}`.")]
    url: Annotated[Url, Meta(description="The address of the Web API.")] = "https://slack.com/api"


class QuietHours(ActiveHours, frozen=True):
    """When messages of channels arrive without a sound. An end before the start is on the next day."""


class ChannelsSpec(Spec, frozen=True):
    """Where people answer decisions, beside the inbox. Who may is paired with `halter channels pair`."""

    telegram: Annotated[TelegramSpec, Meta(description="By a bot of your own in Telegram.")] | UnsetType = UNSET
    ntfy: Annotated[NtfySpec, Meta(description="By ntfy, with secret topics.")] | UnsetType = UNSET
    slack: Annotated[SlackSpec, Meta(description="By an app of your own in Slack.")] | UnsetType = UNSET
    quiet_hours: (
        Annotated[QuietHours, Meta(description="When questions arrive without a sound, where the platform can.")]
        | UnsetType
    ) = UNSET
    dashboard: (
        Annotated[Url, Meta(description="The dashboard's address, named where a question is too long for a message.")]
        | UnsetType
    ) = UNSET


class OidcSpec(Spec, frozen=True):
    """An OpenID Connect provider that people sign on with."""

    HIDDEN: ClassVar[bool] = True

    issuer: Annotated[Url, Meta(description="The provider's address, exactly as its ID tokens have it.")]
    client_id: Annotated[NonEmptyText, Meta(description="What the provider calls this server.")]
    url: Annotated[
        Url,
        Meta(description="The address of this server in a browser; the provider returns to `/login/oidc/callback`."),
    ]
    client_secret: (
        Annotated[SecretReference, Meta(description="The client's secret, as `${secret:NAME}`.")] | UnsetType
    ) = UNSET
    scopes: Annotated[tuple[NonEmptyText, ...], Meta(description="What is asked for, beside `openid`.")] = (
        "profile",
        "email",
    )
    groups_claim: Annotated[NonEmptyText, Meta(description="The claim of the ID token with the groups.")] = "groups"


class SignOnSpec(Spec, frozen=True):
    """Who may use the server without a token: by a proxy before it, or by a provider."""

    HIDDEN: ClassVar[bool] = True

    roles: Annotated[
        Mapping[NonEmptyText, Literal["viewer", "approver", "operator", "admin"]],
        Meta(min_length=1, description="The role of each group; the highest counts, and without one nobody is let in."),
    ]
    agents: Annotated[
        Mapping[NonEmptyText, tuple[Name, ...]],
        Meta(description="The agents that a group's role is for; all, if not given."),
    ] = {}
    people: Annotated[
        Mapping[NonEmptyText, Name],
        Meta(description="What a user is called here, as with tokens: by the proxy's user, or as `ISSUER#SUB`."),
    ] = {}
    proxies: Annotated[
        tuple[NonEmptyText, ...],
        Meta(description="The addresses of a proxy that names people, or networks as in `10.0.0.0/8`."),
    ] = ()
    secret: (
        Annotated[
            SecretReference,
            Meta(description="What the proxy sends as `X-Halter-Proxy`, as `${secret:NAME}`: an address is no proof."),
        ]
        | UnsetType
    ) = UNSET
    user_header: Annotated[HeaderName, Meta(description="The header that names the user.")] = "X-Forwarded-User"
    groups_header: Annotated[HeaderName, Meta(description="The header with the user's groups, by commas.")] = (
        "X-Forwarded-Groups"
    )
    lifetime: Annotated[Duration, Meta(description="How long a login by a provider, or an open page, lasts.")] = HOUR
    oidc: Annotated[OidcSpec, Meta(description="By an OpenID Connect provider.")] | UnsetType = UNSET


class FleetSpec(Spec, frozen=True):
    """`halter.yaml`: what holds for all agents on one store. An agent can only tighten it."""

    zone: Annotated[Zone, Meta(description="The time zone in which days and months of caps begin.")] = "UTC"
    mode: Annotated[Mode, Meta(description="How much agents may do without asking.")] = "SEMI"
    observe: Annotated[bool, Meta(description="Record what would have been refused, and let it pass.")] = False
    limits: Annotated[FleetLimits, Meta(description="The caps of the whole fleet.")] = FleetLimits()
    agents: Annotated[AgentBounds, Meta(description="The most that any agent may have.")] = AgentBounds()
    policy: Annotated[Policy, Meta(description="Rules for levels and tools.")] = Policy()
    allowed_models: (
        Annotated[tuple[ModelPattern, ...], Meta(description="The models that may be asked; all, if not given.")]
        | UnsetType
    ) = UNSET
    allowed_hosts: (
        Annotated[tuple[Host, ...], Meta(description="The hosts that may be reached; all public ones, if not given.")]
        | UnsetType
    ) = UNSET
    allowed_secrets: (
        Annotated[tuple[SecretName, ...], Meta(description="The secrets that agents may name; all, if not given.")]
        | UnsetType
    ) = UNSET
    models: Annotated[Mapping[ModelPattern, ModelSpec], Meta(description="Prices, by `provider:model`.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Where models are reached, by provider.")] = {}
    rates: Annotated[
        Mapping[ModelPattern, ModelRate],
        Meta(description="How fast models may be asked, by `provider:model`, or `provider:*` for all of a provider."),
    ] = {}
    shell: Annotated[ShellBounds, Meta(description="What the shell of any agent may do.")] = ShellBounds()
    retention: (
        Annotated[
            OptionalDuration, Meta(description="After how long the words of ended sessions are erased, or `none`.")
        ]
        | UnsetType
    ) = UNSET
    notify: Annotated[Notify, Meta(description="Whom all agents tell what, beside their own channels.")] = Notify()
    sign_on: Annotated[SignOnSpec, Meta(description="Who may use the server without a token.")] | UnsetType = UNSET
    channels: Annotated[ChannelsSpec, Meta(description="Where people answer decisions, as on a phone.")] = (
        ChannelsSpec()
    )


class FilesSpec(Spec, frozen=True):
    """The built-in tools that read and write files below a folder."""

    root: Annotated[str, Meta(min_length=1, description="The folder, seen from the agent's own.")]


class HttpSpec(Spec, frozen=True):
    """The built-in tools that fetch from the web."""

    hosts: (
        Annotated[tuple[Host, ...], Meta(description="The hosts that may be reached; the fleet's, if not given.")]
        | UnsetType
    ) = UNSET


class ShellSpec(Spec, frozen=True):
    """The built-in tool that runs commands."""

    root: Annotated[str, Meta(min_length=1, description="The folder that commands run in, seen from the agent's own.")]
    sandbox: Annotated[bool, Meta(description="`false` runs commands without a sandbox; the fleet must allow it.")] = (
        True
    )
    network: Annotated[bool, Meta(description="Whether commands may reach the network.")] = False


class ToolsSpec(Spec, frozen=True):
    """Which tools an agent has."""

    files: FilesSpec | UnsetType = UNSET
    http: HttpSpec | UnsetType = UNSET
    shell: ShellSpec | UnsetType = UNSET
    own: (
        Annotated[tuple[str, ...], Meta(description="Which tools of `tools.py` to use; all, if not given.")] | UnsetType
    ) = UNSET


Grants = tuple[str, ...] | Literal["all"]
PhasePlan = Annotated[Mapping[Name, Grants], Meta(min_length=1)] | Literal["work", "review"]
"""Phases as they are written out, or the name of a walk that is known: `work` is one phase with all tools."""
Rules = tuple[Mapping[str, Any], ...]


class GatewaySpec(Spec, frozen=True):
    """How the agent's calls pass `halter gateway`."""

    wait: Annotated[Duration, Meta(description="How long a call is held while a person is asked about it.")] = (
        50 * SECOND
    )
    timeout: Annotated[Duration, Meta(description="How long one call of a server's tool may take.")] = 10 * MINUTE
    dashboard: (
        Annotated[Url, Meta(description="Where the dashboard is; clients that can are sent to its page of a decision.")]
        | UnsetType
    ) = UNSET
    trust_client_elicitation: Annotated[
        bool, Meta(description="Whether a form that the client says was accepted counts as a person's decision.")
    ] = False
    sampling: Annotated[
        bool, Meta(description="Whether a server may ask the agent's model while it is called (sampling).")
    ] = False
    prices: Annotated[Mapping[str, Dollars], Meta(description="What each call of a tool costs, by its full name.")] = {}


class AgentSpec(Spec, frozen=True):
    """`agent.yaml`: one agent, what it may do and how it thinks."""

    name: Annotated[Name, Meta(description="The agent's name.")]
    mode: Annotated[Mode, Meta(description="How much the agent may do without asking.")] | UnsetType = UNSET
    observe: Annotated[bool, Meta(description="Record what would have been refused, and let it pass.")] | UnsetType = (
        UNSET
    )
    model: Annotated[OneModel, Meta(description="The model that thinks for it.")] | UnsetType = UNSET
    fallback_models: Annotated[
        tuple[OneModel, ...], Meta(description="Models to turn to, in order, when one does not answer.")
    ] = ()
    model_for: Annotated[Mapping[ModelPurpose, OneModel], Meta(description="Other models for single purposes.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Where models are reached, by provider.")] = {}
    instructions: Annotated[str, Meta(description="What the model is told first; `AGENTS.md` follows.")] = ""
    tool_calls: Annotated[ToolCalls, Meta(description="How the model asks for calls.")] = "native"
    thinking: (
        Annotated[
            ThinkingEffort,
            Meta(description="How much the model thinks before it answers (its own default, if not given)."),
        ]
        | UnsetType
    ) = UNSET
    temperature: (
        Annotated[float, Meta(ge=0, le=2, description="How freely the model chooses its words.")] | UnsetType
    ) = UNSET
    provider_tools: Annotated[
        Mapping[ProviderToolName, ProviderToolSpec],
        Meta(description="Tools that the model's provider runs itself, unseen by the guard."),
    ] = {}
    script: (
        Annotated[str, Meta(min_length=1, description="The file with the replies of the model `scripted`.")] | UnsetType
    ) = UNSET
    reflex: (
        Annotated[Rules | str, Meta(description="The rules of the model `reflex`, or the file that holds them.")]
        | UnsetType
    ) = UNSET
    limits: Annotated[Limits, Meta(description="Caps and other limits.")] = Limits()
    guardrails: Annotated[Guardrails, Meta(description="Another place for four of the limits.")] = Guardrails()
    policy: Annotated[Policy, Meta(description="Stricter rules for levels and tools.")] = Policy()
    tools: Annotated[ToolsSpec, Meta(description="Which tools the agent has.")] = ToolsSpec()
    phases: (
        Annotated[PhasePlan, Meta(description="The walk of a task session, with the tools of each phase.")] | UnsetType
    ) = UNSET
    allowed_models: (
        Annotated[
            tuple[ModelPattern, ...], Meta(description="The models that may be asked; the fleet's, if not given.")
        ]
        | UnsetType
    ) = UNSET
    secrets: Annotated[tuple[SecretName, ...], Meta(description="The secrets that calls may name.")] = ()
    autonomy: Annotated[Autonomy, Meta(description="How the agent runs by itself.")] = Autonomy()
    hot_state: Annotated[HotStateSpec, Meta(description="The facts that the model sees every turn.")] = HotStateSpec()
    sensors: Annotated[tuple[SensorSpec, ...], Meta(description="What keeps those facts fresh.")] = ()
    heartbeat: (
        Annotated[
            Duration,
            Meta(
                description="A session every so often, in the active hours, that looks around; a schedule in one line."
            ),
        ]
        | UnsetType
    ) = UNSET
    schedules: Annotated[tuple[Schedule, ...], Meta(description="What starts sessions at certain times.")] = ()
    watches: Annotated[tuple[Watch, ...], Meta(description="What starts sessions for new documents.")] = ()
    webhooks: Annotated[tuple[Webhook, ...], Meta(description="What starts sessions by HTTP.")] = ()
    collections: Annotated[Mapping[Name, Collection], Meta(description="Documents that may be read, by name.")] = {}
    agents: Annotated[
        tuple[SubAgent, ...], Meta(description="Agents in folders beside this one's whom its model can ask.")
    ] = ()
    verbs: Annotated[
        Verbs, Meta(description="What its sessions can do beside its tools; more follow from `phases` and documents.")
    ] = ()
    review: Annotated[Review, Meta(description="Who looks at findings before they are delivered.")] = Review()
    notify: Annotated[Notify, Meta(description="Whom the agent tells what.")] = Notify()
    anonymize: (
        Annotated[Anonymize | bool, Meta(description="What is hidden from models that run elsewhere.")] | UnsetType
    ) = UNSET
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="How many of its task sessions may be awake at once, on all machines; any number, "
                "if not given.",
            ),
        ]
        | UnsetType
    ) = UNSET
    gateway: Annotated[GatewaySpec, Meta(description="How its calls pass `halter gateway`.")] = GatewaySpec()
    idle_halt_minutes: Annotated[
        float, Meta(ge=0, le=100_000, description="So long a session may do nothing before it is paused; 0 for never.")
    ] = 5


class Phase(msgspec.Struct, frozen=True):
    """A part of a session's walk, and the tools that are granted there; None grants all that the agent has."""

    name: str
    grants: tuple[str, ...] | None

    def grants_tool(self, tool: str) -> bool:
        return self.grants is None or tool in self.grants


class ToolPolicy(msgspec.Struct, frozen=True):
    """What holds for one tool. Without an approval of its own, the mode and the level decide."""

    level: Level
    approval: Approval | None
    rate: int | None
    simulate: Simulate
    approvers: int = 1


class ResolvedPolicy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that the guard needs to judge what an agent does.

    No field has a default, so that the digest covers all of them. `policies` are the fleet's, of which there are two
    where a store's policy and a file hold together, and last the agent's: a rule for a tool in one must not hide a
    stricter one for its level in the other, so they are merged per tool, and cached in the `__dict__`, which is not
    part of the policy.
    """

    name: str
    mode: Mode
    observe: bool
    caps: Caps
    on_cap: OnCap
    max_steps: int
    timeout: int
    min_output_tokens: int
    reserve_tokens: int
    reserve_cost_fraction: float
    policies: tuple[Policy, ...]
    disabled: tuple[str, ...]
    approval_expiry: int
    tools: ToolsSpec
    phases: tuple[Phase, ...]
    allowed_models: tuple[str, ...] | None
    allowed_hosts: tuple[str, ...] | None
    secrets: tuple[str, ...]
    prices: Mapping[str, Price]

    def canonical(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> Digest:
        """Names this policy: a decision made under another one does not count."""
        return self._digest

    @cached_property
    def _digest(self) -> Digest:
        return Digest(hashlib.sha256(self.canonical()).hexdigest())

    @cached_property
    def reserve_usd(self) -> int:
        """What a session keeps back of its own cap for its last words."""
        cap = self.caps.session.max_cost_usd or 0
        return round(cap * self.reserve_cost_fraction) if self.on_cap == "wrap_up" else 0

    def rule(self, tool: str, declared: Level) -> ToolPolicy:
        """Merge what both files say of a tool with its declared level.

        An agent that declares a tool more dangerous must not get laxer rules by it: so the fleet's rules for the tool's
        own level count as well.
        """
        known: dict[tuple[str, Level], ToolPolicy] = vars(self).setdefault("rules", {})
        found = known.get((tool, declared))
        if found is None:
            found = known[tool, declared] = self._rule(tool, declared)
        return found

    def _rule(self, tool: str, declared: Level) -> ToolPolicy:
        *fleets, agent = self.policies
        return _merge_strictest([self._below(fleet, agent, tool, declared) for fleet in fleets])

    def _below(self, fleet: Policy, agent: Policy, tool: str, declared: Level) -> ToolPolicy:
        base = _find_level(fleet, tool, declared)
        level = LEVELS[max(LEVELS.index(base), LEVELS.index(_find_level(agent, tool, base)))]
        both: tuple[Level, Level] = (base, level)
        ours: list[tuple[Level, tuple[LevelRule, ...]]] = [
            (each, _find_level_rules(fleet, tool, each)) for each in both
        ]
        theirs = _find_level_rules(agent, tool, level)
        rates = [_first_value(cells, "rate", DEFAULT_RATES.get(each)) for each, cells in ours]
        simulates = [_first_value(cells, "simulate", fleet.usual_simulate(each)) for each, cells in ours]
        simulates += _collect_values(theirs, "simulate") or (agent.usual_simulate(level),)
        return ToolPolicy(
            level=level,
            approval=_merge_approval(
                [_first_value(cells, "approval") for _, cells in ours], _first_value(theirs, "approval")
            ),
            rate=min((rate for rate in (*rates, *_collect_values(theirs, "rate")) if rate is not None), default=None),
            simulate=max(simulates, key=SIMULATE_MODES.index),
            approvers=max([1, *_collect_values((*ours[0][1], *ours[1][1], *theirs), "approvers")]),
        )

    @property
    def provenance(self) -> ProvenanceMode | None:
        """The strictest mode that a policy sets; None leaves it to the kind of session."""
        said: list[ProvenanceMode] = [each.provenance for each in self.policies if each.provenance is not UNSET]
        return max(said, key=PROVENANCE_MODES.index, default=None)

    @property
    def locks(self) -> bool:
        said = [each.lock_after_denial for each in self.policies if each.lock_after_denial is not UNSET]
        return any(said) or not said

    def declaration(self, spec: ToolSpec) -> Declaration:
        """What a tool declares, as the agent's file corrects it, and the fleet's that one."""
        *fleets, agent = self.policies
        found = find_declaration(spec)
        for policy in (agent, *reversed(fleets)):
            rule = policy.tools.get(spec.name)
            found = found if rule is None else refine_declaration(found, rule.declared)
        return found

    def allows_model(self, model: str) -> bool:
        return self.allowed_models is None or is_covered(model, self.allowed_models)


def _merge_strictest(rules: Sequence[ToolPolicy]) -> ToolPolicy:
    """Of each key the strictest value."""
    return ToolPolicy(
        level=LEVELS[max(LEVELS.index(rule.level) for rule in rules)],
        approval=_merge_approval([rule.approval for rule in rules], None),
        rate=min((rule.rate for rule in rules if rule.rate is not None), default=None),
        simulate=SIMULATE_MODES[max(SIMULATE_MODES.index(rule.simulate) for rule in rules)],
        approvers=max(rule.approvers for rule in rules),
    )


def _find_level(policy: Policy, tool: str, otherwise: Level) -> Level:
    rule = policy.tools.get(tool)
    return otherwise if rule is None or rule.level is UNSET else rule.level


def _find_level_rules(policy: Policy, tool: str, level: Level) -> tuple[LevelRule, ...]:
    return tuple(rule for rule in (policy.tools.get(tool), policy.levels.get(level)) if rule is not None)


def _collect_values(rules: Iterable[LevelRule], key: str) -> tuple[Any, ...]:
    return tuple(word for rule in rules if (word := getattr(rule, key)) is not UNSET)


def _first_value(rules: Iterable[LevelRule], key: str, otherwise: Any = None) -> Any:
    return next(iter(_collect_values(rules, key)), otherwise)


def _merge_approval(ours: Sequence[Approval | None], theirs: Approval | None) -> Approval | None:
    """Ask always if either says so, never only if the fleet says so throughout."""
    if "always" in (*ours, theirs):
        return "always"
    return "never" if all(word == "never" for word in ours) else None


def is_covered(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name, or all that a pattern stands for, is among some patterns."""
    return any(_covers(pattern, name) for pattern in patterns)


def _covers(pattern: str, name: str) -> bool:
    """A `*` stands for any beginning or any end, and a pattern is covered as if its own `*` were a letter."""
    if pattern.startswith("*"):
        return name.endswith(pattern[1:]) and (len(name) > len(pattern) - 1)
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
