"""The keys of `halter.yaml` and `agent.yaml` as frozen values, and the policy that both resolve to for one agent.

A field has the name of its key. UNSET means that the key is absent: the other file, or the default, then applies.
Human forms (`30m`, dollars, `none`, `20/hour`) are parsed to integers; the forms are defined in `agent_spec`.
`order` in the metadata of a policy key says which of two values is the stricter; `halter.policy.order` has the kinds.
"""

from collections.abc import Mapping
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
from halter.core.provenance import Reach, Reads
from halter.core.tools import (
    LEVELS,
    DeclaredParts,
    Level,
    ProviderToolName,
)
from halter.core.usage import Price, UnknownPrice

# The kinds of order that many keys have.
LOWER: Final[dict[str, Any]] = {"order": "lower"}
LOWER_ABOVE_ZERO: Final[dict[str, Any]] = {"order": "lower", "unlimited": 0}
COVERED: Final[dict[str, Any]] = {"order": "covered"}
NO_LIMIT: Final[dict[str, Any]] = {"order": "free"}
DECLARED: Final[dict[str, Any]] = {"order": "declared"}
LOCAL: Final[dict[str, Any]] = {"order": "local"}

OnCap = Literal["wrap_up", "stop", "ask", "wait"]

Recoveries = Annotated[
    int,
    Meta(
        ge=0, le=100, description="Maximum number of continuations of a truncated answer; 0 disables.", extra=NO_LIMIT
    ),
]
Repeats = Annotated[
    int, Meta(ge=1, le=1000, description="Maximum number of consecutive identical steps.", extra=NO_LIMIT)
]
ReserveTokens = Annotated[
    int,
    Meta(ge=0, description="Tokens before the end of the budget at which the model is warned.", extra=NO_LIMIT),
]
ReserveCost = Annotated[
    float, Meta(ge=0, le=1, description="Fraction of the cap reserved for the wrap-up.", extra=NO_LIMIT)
]


class Limits(Spec, frozen=True):
    """The caps and limits of a session and an agent."""

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"cost_limit": "max_cost_usd"})

    max_cost_usd: Annotated[Dollars, Meta(description="Maximum cost of one session.", extra=LOWER)] | UnsetType = UNSET
    max_cost_usd_per_hour: (
        Annotated[Dollars, Meta(description="Maximum cost of the agent in an hour.", extra=LOWER)] | UnsetType
    ) = UNSET
    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="Maximum cost of the agent in a day.", extra=LOWER)] | UnsetType
    ) = UNSET
    on_cap: (
        Annotated[
            OnCap,
            Meta(
                description="Behaviour of a session at its cap; with `wait`, a program's run sleeps until a window "
                "opens.",
                extra=NO_LIMIT,
            ),
        ]
        | UnsetType
    ) = UNSET
    token_budget: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Maximum tokens of one session, without those read from a cache; 0 disables.",
                extra=LOWER_ABOVE_ZERO,
            ),
        ]
        | UnsetType
    ) = UNSET
    max_steps: Annotated[int, Meta(ge=1, description="Maximum number of steps in a turn.", extra=LOWER)] | UnsetType = (
        UNSET
    )
    timeout: (
        Annotated[Duration, Meta(description="Time limit of one turn; 0 disables.", extra=LOWER_ABOVE_ZERO)] | UnsetType
    ) = UNSET
    min_output_tokens: (
        Annotated[
            int,
            Meta(
                ge=1, description="Minimum answer length, in tokens, for which a request is still made.", extra=NO_LIMIT
            ),
        ]
        | UnsetType
    ) = UNSET
    max_output_tokens: (
        Annotated[int, Meta(ge=1, le=1_000_000, description="Maximum answer length, in tokens.", extra=LOWER)]
        | UnsetType
    ) = UNSET
    max_retries: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Maximum number of retries of a request after a temporary failure.",
                extra=LOWER,
            ),
        ]
        | UnsetType
    ) = UNSET
    outage_backoff: (
        Annotated[
            Duration,
            Meta(
                description="Maximum pause between two attempts of an unattended agent while no model answers; "
                "0 ends the turn instead.",
                extra=NO_LIMIT,
            ),
        ]
        | UnsetType
    ) = UNSET
    context_window: (
        Annotated[
            Window,
            Meta(description="Maximum tokens of a request; 0 for the model's own context window.", extra=NO_LIMIT),
        ]
        | UnsetType
    ) = UNSET
    context_strategy: (
        Annotated[
            ContextStrategy,
            Meta(description="How a history that exceeds the context window is cut.", extra=NO_LIMIT),
        ]
        | UnsetType
    ) = UNSET
    streaming: (
        Annotated[bool, Meta(description="Stream answers; by default only in a chat.", extra=NO_LIMIT)] | UnsetType
    ) = UNSET
    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class Guardrails(Spec, frozen=True):
    """An alias of four of the `limits`."""

    max_tokens_recoveries: Recoveries | UnsetType = UNSET
    max_repeated_tool_steps: Repeats | UnsetType = UNSET
    reserve_tokens: ReserveTokens | UnsetType = UNSET
    reserve_cost_fraction: ReserveCost | UnsetType = UNSET


class FleetLimits(Spec, frozen=True):
    """The caps of all agents together."""

    max_cost_usd_per_day: (
        Annotated[Dollars, Meta(description="Maximum cost of all agents in a day.", extra=LOWER)] | UnsetType
    ) = UNSET
    max_cost_usd_per_month: (
        Annotated[Dollars, Meta(description="Maximum cost of all agents in a month.", extra=LOWER)] | UnsetType
    ) = UNSET


class ModelRate(Spec, frozen=True):
    """The rate limit of a model, for all agents on all machines together."""

    requests_per_minute: (
        Annotated[int, Meta(ge=1, description="Maximum number of requests per minute.", extra=LOWER)] | UnsetType
    ) = UNSET
    tokens_per_minute: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Maximum tokens of the requests per minute, without those read from a cache.",
                extra=LOWER,
            ),
        ]
        | UnsetType
    ) = UNSET


class AgentBounds(Spec, frozen=True):
    """The bounds for the limits of each agent."""

    limits: Limits = Limits()


Mode = Literal["ASSIST", "SEMI", "FULL"]
"""How much an agent does without approval, from the most to the least restrictive mode."""
MODES: Final[tuple[Mode, ...]] = ("ASSIST", "SEMI", "FULL")

ProvenanceMode = Literal["off", "observe", "ask", "strict"]
"""The treatment of a call with a value from untrusted content, from the laxest to the strictest mode."""

Approval = Literal["always", "never"]
Simulate = Literal["never", "asked", "always"]
SIMULATE_MODES: Final[tuple[Simulate, ...]] = ("never", "asked", "always")


class LevelRule(Spec, frozen=True):
    """Overrides for all tools of a level."""

    approval: (
        Annotated[
            Approval,
            Meta(
                description="Require approval in every mode (`always`), or in no mode (`never`).",
                extra={"order": ("always", UNSET, "never"), "unset": "the mode's choice", "outranks": "both"},
            ),
        ]
        | UnsetType
    ) = UNSET
    rate: (
        Annotated[
            RateValue,
            Meta(
                description="Maximum attempts of each tool in a sliding hour.",
                extra={"order": "lower", "outranks": "fleet"},
            ),
        ]
        | UnsetType
    ) = UNSET
    simulate: (
        Annotated[
            Simulate,
            Meta(
                description="When a model predicts the outcome before the call.",
                extra={"order": SIMULATE_MODES[::-1], "outranks": "fleet"},
            ),
        ]
        | UnsetType
    ) = UNSET
    approvers: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=2,
                description="Number of people who must approve; 2 always asks and accepts no rule.",
                extra={"order": (2, 1)},
            ),
        ]
        | UnsetType
    ) = UNSET


class ToolRule(LevelRule, frozen=True):
    """Overrides for one tool."""

    level: (
        Annotated[
            Level,
            Meta(
                description="Level of the tool.",
                extra={"order": LEVELS[::-1], "unset": None, "bound": "{} or a more dangerous one"},
            ),
        ]
        | UnsetType
    ) = UNSET
    reads: (
        Annotated[
            Reads,
            Meta(
                description="Author of the results: a curated source, you, your organisation, or anyone.",
                extra=DECLARED,
            ),
        ]
        | UnsetType
    ) = UNSET
    reach: (
        Annotated[
            Reach,
            Meta(
                description="Effect of a call: on nothing, on your own things, visible to others, or irreversible.",
                extra=DECLARED,
            ),
        ]
        | UnsetType
    ) = UNSET
    arguments: (
        Annotated[Mapping[str, ArgumentUseText], Meta(description="Role of each argument.", extra=DECLARED)] | UnsetType
    ) = UNSET
    mints: (
        Annotated[
            Mapping[str, str],
            Meta(
                description="Fields that become trusted in a record found by a trusted name, by kind.", extra=DECLARED
            ),
        ]
        | UnsetType
    ) = UNSET
    lists: (
        Annotated[
            Mapping[str, str],
            Meta(description="Fields of its records that belong to your organisation, by kind.", extra=DECLARED),
        ]
        | UnsetType
    ) = UNSET
    asks: (
        Annotated[tuple[str, ...], Meta(description="Words in a task that request this call.", extra=DECLARED)]
        | UnsetType
    ) = UNSET

    @property
    def declared(self) -> DeclaredParts:
        return DeclaredParts(**{name: getattr(self, name) for name in DeclaredParts.__struct_fields__})


class QuietHours(ActiveHours, frozen=True):
    """The hours in which people are not disturbed. An end before the start is on the next day."""

    def __post_init__(self) -> None:
        if self.start == self.end:
            raise ValueError(f"`start` and `end` are both {self.start}, so no hour is quiet; change one of them.")


class Policy(Spec, frozen=True):
    """The rules for approvals, rates, simulation and disabled tools."""

    levels: Annotated[
        Mapping[Level, LevelRule],
        Meta(description="Rules for all tools of a level.", extra={"order": "each", "beside": True}),
    ] = {}
    tools: Annotated[
        Mapping[str, ToolRule],
        Meta(description="Rules for single tools, by name.", extra={"order": "each", "beside": True}),
    ] = {}
    simulate: (
        Annotated[
            Simulate,
            Meta(
                description="When a model predicts RESTRICTED and PRIVILEGED calls; never by default.",
                extra={"order": SIMULATE_MODES[::-1], "beside": True},
            ),
        ]
        | UnsetType
    ) = UNSET
    provenance: (
        Annotated[
            ProvenanceMode,
            Meta(
                description="Treatment of a call with a value from untrusted content.",
                extra={"order": ("strict", "ask", UNSET, "observe", "off")},
            ),
        ]
        | UnsetType
    ) = UNSET
    lock_after_denial: (
        Annotated[
            bool,
            Meta(
                description="After the first denial, refuse all later provenance questions of the session.",
                extra={"order": (True, UNSET, False)},
            ),
        ]
        | UnsetType
    ) = UNSET
    unknown_price: (
        Annotated[
            UnknownPrice,
            Meta(
                description="What happens to a model without a known price: `refuse`, or `dearest`, which holds and "
                "charges twice the highest price of its maker's current models.",
                extra={"order": ("refuse", UNSET, "dearest")},
            ),
        ]
        | UnsetType
    ) = UNSET
    disabled: Annotated[
        tuple[str, ...], Meta(description="Tools that must not be used.", extra={"order": "union"})
    ] = ()
    approval_expiry: (
        Annotated[Duration, Meta(description="Time after which a pending approval expires.", extra=LOWER)] | UnsetType
    ) = UNSET
    quiet_hours: (
        Annotated[
            QuietHours,
            Meta(
                description="Hours in which questions to people wait for the end of the hours, unless they expire "
                "before it.",
                extra={"order": "quiet", "beside": True},
            ),
        ]
        | UnsetType
    ) = UNSET


class ModelSpec(Spec, frozen=True):
    """The settings of one model."""

    price: Annotated[
        Price | Literal["free"], Meta(description="Dollars per million tokens, or `free`.", extra={"order": "price"})
    ]


class PricesSpec(Spec, frozen=True):
    """The updates of the price table by this machine's processes that run unattended, or by hand."""

    update: Annotated[
        Literal["daily", "never"], Meta(description="How often `halter up` and `halter proxy` fetch the price table.")
    ] = "never"
    url: (
        Annotated[Url, Meta(description="Address of the price table; by default that of genai-prices.")] | UnsetType
    ) = UNSET


class ProviderToolSpec(Spec, frozen=True):
    """A tool that the provider runs. Its maximum cost is held before each request."""

    max_uses: Annotated[int, Meta(ge=1, le=20, description="Maximum uses in one request.")]


class ProviderSpec(Spec, frozen=True):
    """The endpoint and the credentials of a provider."""

    HIDDEN: ClassVar[bool] = True

    wire: Annotated[WireFormat, Meta(description="Protocol of the endpoint.")] | UnsetType = UNSET
    base_url: Annotated[Url, Meta(description="URL of the endpoint; required for an unknown provider.")] | UnsetType = (
        UNSET
    )
    api_key: (
        Annotated[SecretReference, Meta(description="API key, as `${secret:NAME}`; plain text is rejected.")]
        | UnsetType
    ) = UNSET
    credentials: (
        Annotated[
            CloudName,
            Meta(description="Cloud whose own credentials are used instead of a key, as its tools find them."),
        ]
        | UnsetType
    ) = UNSET
    bills_errors: (
        Annotated[bool, Meta(description="The provider may charge for a response with an error status (4xx or 5xx).")]
        | UnsetType
    ) = UNSET
    prompt_cache: (
        Annotated[
            bool,
            Meta(
                description="`false` disables the prompt cache of Anthropic's models and of OpenAI's from gpt-5.6 on; "
                "others cache automatically."
            ),
        ]
        | UnsetType
    ) = UNSET
    vision: (
        Annotated[bool, Meta(description="`false` if its models see no pictures: they get a sentence for each.")]
        | UnsetType
    ) = UNSET


class ShellBounds(Spec, frozen=True):
    """The bounds for the shell of any agent."""

    sandbox: Annotated[
        bool,
        Meta(description="`false` allows agents to run commands without a sandbox.", extra={"order": (True, False)}),
    ] = True
    network: Annotated[bool, Meta(description="Allow commands to use the network.", extra={"order": (False, True)})] = (
        False
    )


class TelegramSpec(Spec, frozen=True):
    """A Telegram bot through which people answer decisions."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="Token of the bot, as `${secret:NAME}`.")]
    url: Annotated[Url, Meta(description="URL of the Bot API.")] = "https://api.telegram.org"


class NtfySpec(Spec, frozen=True):
    """An ntfy server through which people answer decisions."""

    HIDDEN: ClassVar[bool] = True

    url: Annotated[Url, Meta(description="URL of the server.")] = "https://ntfy.sh"
    token: Annotated[SecretReference, Meta(description="Access token, as `${secret:NAME}`.")] | UnsetType = UNSET


class SlackSpec(Spec, frozen=True):
    """A Slack app in Socket Mode through which people answer decisions."""

    HIDDEN: ClassVar[bool] = True

    token: Annotated[SecretReference, Meta(description="Token of the bot (`xoxb-`), as `${secret:NAME}`.")]
    app_token: Annotated[SecretReference, Meta(description="Token of the app (`xapp-`), as `${secret:NAME}`.")]
    url: Annotated[Url, Meta(description="URL of the Web API.")] = "https://slack.com/api"


class ChannelsSpec(Spec, frozen=True):
    """The channels through which people answer decisions. Pair approvers with `halter channels pair`."""

    telegram: Annotated[TelegramSpec, Meta(description="Your own bot in Telegram.")] | UnsetType = UNSET
    ntfy: Annotated[NtfySpec, Meta(description="ntfy with secret topics.")] | UnsetType = UNSET
    slack: Annotated[SlackSpec, Meta(description="Your own app in Slack.")] | UnsetType = UNSET
    quiet_hours: (
        Annotated[
            QuietHours,
            Meta(description="Hours in which questions arrive without a sound, if the platform supports it."),
        ]
        | UnsetType
    ) = UNSET
    dashboard: (
        Annotated[Url, Meta(description="URL of the dashboard, sent if a question is too long for a message.")]
        | UnsetType
    ) = UNSET


class OidcSpec(Spec, frozen=True):
    """An OpenID Connect provider for sign-on."""

    HIDDEN: ClassVar[bool] = True

    issuer: Annotated[Url, Meta(description="URL of the provider, exactly as in its ID tokens.")]
    client_id: Annotated[NonEmptyText, Meta(description="Client ID of this server at the provider.")]
    url: Annotated[
        Url,
        Meta(description="URL of this server in a browser; the provider redirects to `/login/oidc/callback`."),
    ]
    client_secret: Annotated[SecretReference, Meta(description="Client secret, as `${secret:NAME}`.")] | UnsetType = (
        UNSET
    )
    scopes: Annotated[tuple[NonEmptyText, ...], Meta(description="Scopes to request in addition to `openid`.")] = (
        "profile",
        "email",
    )
    groups_claim: Annotated[NonEmptyText, Meta(description="Claim of the ID token that contains the groups.")] = (
        "groups"
    )


class SignOnSpec(Spec, frozen=True):
    """Sign-on without a token: through an authenticating proxy, or an OpenID Connect provider."""

    HIDDEN: ClassVar[bool] = True

    roles: Annotated[
        Mapping[NonEmptyText, Literal["viewer", "approver", "operator", "admin"]],
        Meta(
            min_length=1,
            description="Role of each group; the highest applies. A person without a role is not admitted.",
        ),
    ]
    agents: Annotated[
        Mapping[NonEmptyText, tuple[Name, ...]],
        Meta(description="Agents to which a group's role applies; by default all."),
    ] = {}
    people: Annotated[
        Mapping[NonEmptyText, Name],
        Meta(description="Name of a user in Halter, by the proxy's user name or `ISSUER#SUB`."),
    ] = {}
    proxies: Annotated[
        tuple[NonEmptyText, ...],
        Meta(description="Addresses of the authenticating proxy, or networks as in `10.0.0.0/8`."),
    ] = ()
    secret: (
        Annotated[
            SecretReference,
            Meta(description="Secret that the proxy sends as `X-Halter-Proxy`, as `${secret:NAME}`."),
        ]
        | UnsetType
    ) = UNSET
    user_header: Annotated[HeaderName, Meta(description="Header with the user's name.")] = "X-Forwarded-User"
    groups_header: Annotated[HeaderName, Meta(description="Header with the user's groups, separated by commas.")] = (
        "X-Forwarded-Groups"
    )
    lifetime: Annotated[Duration, Meta(description="Lifetime of a login at the provider, and of an open page.")] = HOUR
    oidc: Annotated[OidcSpec, Meta(description="OpenID Connect provider.")] | UnsetType = UNSET


class FleetSpec(Spec, frozen=True):
    """`halter.yaml`: the rules for all agents on one store. An agent can only tighten them."""

    zone: Annotated[Zone, Meta(description="Time zone for the days and months of caps.", extra={"order": "fixed"})] = (
        "UTC"
    )
    mode: Annotated[Mode, Meta(description="How much agents do without approval.", extra={"order": MODES})] = "SEMI"
    observe: Annotated[
        bool, Meta(description="Record refusals instead of enforcing them.", extra={"order": (False, True)})
    ] = False
    limits: Annotated[FleetLimits, Meta(description="Caps of the fleet.")] = FleetLimits()
    agents: Annotated[AgentBounds, Meta(description="Bounds for each agent.")] = AgentBounds()
    policy: Annotated[Policy, Meta(description="Rules for levels and tools.")] = Policy()
    allowed_models: (
        Annotated[
            tuple[ModelPattern, ...],
            Meta(description="Models that may be used; by default all.", extra=COVERED),
        ]
        | UnsetType
    ) = UNSET
    allowed_hosts: (
        Annotated[
            tuple[Host, ...],
            Meta(description="Hosts that may be reached; by default all public ones.", extra=COVERED),
        ]
        | UnsetType
    ) = UNSET
    allowed_secrets: (
        Annotated[
            tuple[SecretName, ...],
            Meta(description="Secrets that agents may name; by default all.", extra=COVERED),
        ]
        | UnsetType
    ) = UNSET
    models: Annotated[
        Mapping[ModelPattern, ModelSpec], Meta(description="Prices, by `provider:model`.", extra={"order": "listed"})
    ] = {}
    providers: Annotated[
        Mapping[Name, ProviderSpec], Meta(description="Endpoints of models, by provider.", extra={"order": "kept"})
    ] = {}
    rates: Annotated[
        Mapping[ModelPattern, ModelRate],
        Meta(
            description="Rate limits, by `provider:model`, or `provider:*` for all models of a provider.",
            extra={"order": "each"},
        ),
    ] = {}
    prices: Annotated[PricesSpec, Meta(description="Updates of the price table.", extra=LOCAL)] = PricesSpec()
    shell: Annotated[ShellBounds, Meta(description="Bounds for the shell of any agent.")] = ShellBounds()
    retention: (
        Annotated[
            OptionalDuration,
            Meta(
                description="Time after which the texts of ended sessions are erased, or `none`.",
                extra={"order": "fixed"},
            ),
        ]
        | UnsetType
    ) = UNSET
    notify: Annotated[
        Notify,
        Meta(description="Notifications of all agents, in addition to their own channels.", extra=LOCAL),
    ] = Notify()
    sign_on: Annotated[SignOnSpec, Meta(description="Sign-on without a token.", extra=LOCAL)] | UnsetType = UNSET
    channels: Annotated[
        ChannelsSpec, Meta(description="Channels through which people answer decisions.", extra=LOCAL)
    ] = ChannelsSpec()


class FilesSpec(Spec, frozen=True):
    """The built-in tools that read and write files in a folder."""

    root: Annotated[str, Meta(min_length=1, description="Folder, relative to the agent's folder.")]


class HttpSpec(Spec, frozen=True):
    """The built-in tools that fetch from the web."""

    hosts: (
        Annotated[tuple[Host, ...], Meta(description="Hosts that may be reached; by default the fleet's.")] | UnsetType
    ) = UNSET


class ShellSpec(Spec, frozen=True):
    """The built-in tool that runs commands."""

    root: Annotated[str, Meta(min_length=1, description="Working folder of commands, relative to the agent's folder.")]
    sandbox: Annotated[bool, Meta(description="`false` runs commands without a sandbox, if the fleet allows it.")] = (
        True
    )
    network: Annotated[bool, Meta(description="Allow commands to use the network.")] = False


class ToolsSpec(Spec, frozen=True):
    """The tools of an agent."""

    files: FilesSpec | UnsetType = UNSET
    http: HttpSpec | UnsetType = UNSET
    shell: ShellSpec | UnsetType = UNSET
    own: Annotated[tuple[str, ...], Meta(description="Tools of `tools.py` to use; by default all.")] | UnsetType = UNSET


Grants = tuple[str, ...] | Literal["all"]
PhasePlan = Annotated[Mapping[Name, Grants], Meta(min_length=1)] | Literal["work", "review"]
"""Phases with their grants, or the name of a built-in plan: `work` is one phase with all tools."""
Rules = tuple[Mapping[str, Any], ...]


class GatewaySpec(Spec, frozen=True):
    """The settings for calls through `halter gateway`."""

    wait: Annotated[Duration, Meta(description="Time that a call waits for a person's decision.")] = 50 * SECOND
    timeout: Annotated[Duration, Meta(description="Time limit for a call of a server's tool.")] = 10 * MINUTE
    dashboard: (
        Annotated[
            Url, Meta(description="URL of the dashboard; clients that can open URLs are sent to the decision's page.")
        ]
        | UnsetType
    ) = UNSET
    trust_client_elicitation: Annotated[
        bool, Meta(description="Accept a form that the client reports as accepted as a person's decision.")
    ] = False
    sampling: Annotated[bool, Meta(description="Allow a server to use the agent's model during a call (sampling).")] = (
        False
    )
    prices: Annotated[
        Mapping[str, Dollars], Meta(description="Cost of each call of a tool, by the tool's full name.")
    ] = {}


class AgentSpec(Spec, frozen=True):
    """`agent.yaml`: one agent with its policy, models and triggers."""

    name: Annotated[Name, Meta(description="Name of the agent.")]
    mode: Annotated[Mode, Meta(description="How much the agent does without approval.")] | UnsetType = UNSET
    observe: Annotated[bool, Meta(description="Record refusals instead of enforcing them.")] | UnsetType = UNSET
    model: Annotated[OneModel, Meta(description="Model of the agent.")] | UnsetType = UNSET
    fallback_models: Annotated[
        tuple[OneModel, ...], Meta(description="Models to use, in order, if the model does not answer.")
    ] = ()
    model_for: Annotated[Mapping[ModelPurpose, OneModel], Meta(description="Other models for single purposes.")] = {}
    providers: Annotated[Mapping[Name, ProviderSpec], Meta(description="Endpoints of models, by provider.")] = {}
    instructions: Annotated[str, Meta(description="System prompt; `AGENTS.md` and `CLAUDE.md` follow.")] = ""
    tool_calls: Annotated[ToolCalls, Meta(description="How the model requests calls.")] = "native"
    thinking: (
        Annotated[
            ThinkingEffort,
            Meta(description="How much the model thinks before it answers; by default the model's own setting."),
        ]
        | UnsetType
    ) = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2, description="Sampling temperature.")] | UnsetType = UNSET
    provider_tools: Annotated[
        Mapping[ProviderToolName, ProviderToolSpec],
        Meta(description="Tools that the provider runs; the guard does not see their calls."),
    ] = {}
    script: (
        Annotated[str, Meta(min_length=1, description="File with the replies of the model `scripted`.")] | UnsetType
    ) = UNSET
    reflex: (
        Annotated[Rules | str, Meta(description="Rules of the model `reflex`, or the file that contains them.")]
        | UnsetType
    ) = UNSET
    limits: Annotated[Limits, Meta(description="Caps and other limits.")] = Limits()
    guardrails: Annotated[
        Guardrails, Meta(description="Former name of four of the `limits`.", extra={"deprecated": True})
    ] = Guardrails()
    policy: Annotated[Policy, Meta(description="Stricter rules for levels and tools.")] = Policy()
    tools: Annotated[ToolsSpec, Meta(description="Tools of the agent.")] = ToolsSpec()
    phases: (
        Annotated[PhasePlan, Meta(description="Phases of a task session, with the tools of each phase.")] | UnsetType
    ) = UNSET
    allowed_models: (
        Annotated[tuple[ModelPattern, ...], Meta(description="Models that may be used; by default the fleet's.")]
        | UnsetType
    ) = UNSET
    secrets: Annotated[tuple[SecretName, ...], Meta(description="Secrets that calls may name.")] = ()
    autonomy: Annotated[Autonomy, Meta(description="How the agent runs unattended.")] = Autonomy()
    hot_state: Annotated[HotStateSpec, Meta(description="Facts that the model sees every turn.")] = HotStateSpec()
    sensors: Annotated[tuple[SensorSpec, ...], Meta(description="Sensors that update the hot state.")] = ()
    heartbeat: (
        Annotated[
            Duration,
            Meta(description="Interval of a session that checks for work in the active hours; short for a schedule."),
        ]
        | UnsetType
    ) = UNSET
    schedules: Annotated[tuple[Schedule, ...], Meta(description="Schedules that start sessions by time.")] = ()
    watches: Annotated[tuple[Watch, ...], Meta(description="Watches that start sessions for new documents.")] = ()
    webhooks: Annotated[tuple[Webhook, ...], Meta(description="Webhooks that start sessions by HTTP.")] = ()
    collections: Annotated[
        Mapping[Name, Collection], Meta(description="Document collections that may be read, by name.")
    ] = {}
    agents: Annotated[tuple[SubAgent, ...], Meta(description="Agents in sibling folders that the model can call.")] = ()
    verbs: Annotated[Verbs, Meta(description="Built-in tools of its sessions; `phases` and documents add more.")] = ()
    review: Annotated[Review, Meta(description="Review of findings before delivery.")] = Review()
    notify: Annotated[Notify, Meta(description="Notifications of the agent.")] = Notify()
    anonymize: (
        Annotated[Anonymize | bool, Meta(description="Values that are hidden from remote models.")] | UnsetType
    ) = UNSET
    concurrency: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Maximum number of its task sessions awake at the same time, on all machines; "
                "by default unbounded.",
            ),
        ]
        | UnsetType
    ) = UNSET
    gateway: Annotated[GatewaySpec, Meta(description="Settings for calls through `halter gateway`.")] = GatewaySpec()
    idle_halt_minutes: Annotated[
        float,
        Meta(ge=0, le=100_000, description="Minutes without activity after which a session is paused; 0 disables."),
    ] = 5


class Phase(msgspec.Struct, frozen=True):
    """A phase of a session and the tools granted in it; None grants all tools of the agent."""

    name: str
    grants: tuple[str, ...] | None

    def grants_tool(self, tool: str) -> bool:
        return self.grants is None or tool in self.grants
