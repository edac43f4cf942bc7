"""The keys of `halter.yaml`."""

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.core.clock import HOUR
from halter.core.usage import Price, is_encrypted_or_local
from halter.spec.channels import Notify
from halter.spec.forms import (
    Duration,
    HeaderName,
    Host,
    ModelPattern,
    Name,
    NonEmptyText,
    OptionalDuration,
    SecretName,
    SecretReference,
    Spec,
    UnusableKey,
    Url,
    Zone,
)
from halter.spec.limits import COVERED, LOCAL, AgentBounds, FleetLimits, ModelRate
from halter.spec.models import (
    ProviderSpec,
)
from halter.spec.policy import MODES, Mode, Policy, QuietHours


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

    def require_fit(self) -> None:
        for key in ("issuer", "url"):
            if not is_encrypted_or_local(getattr(self, key)):
                raise UnusableKey("is not encrypted; use a URL with https.", key)


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

    def require_fit(self) -> None:
        if not self.proxies and self.oidc is UNSET:
            raise UnusableKey("is empty, so no one could sign on; add an entry, or remove `sign_on`.", "proxies")
        if self.proxies and self.secret is UNSET:
            raise UnusableKey("requires `sign_on.secret` to authenticate the proxy; set it.", "proxies")
        for group, agents in self.agents.items():
            if group not in self.roles or not agents:
                sentence = "must name at least one agent, and the group must have a role in `roles`; fix the entry."
                raise UnusableKey(sentence, "agents", group)
        for index, proxy in enumerate(self.proxies):
            try:
                ip_network(proxy)
            except ValueError:
                sentence = "is not an address or a network; write one, as in 10.0.0.7 or 10.0.0.0/8."
                raise UnusableKey(sentence, "proxies", index) from None


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
