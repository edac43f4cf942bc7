"""The keys of a policy: approvals, rates, simulation and disabled tools."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from halter.core.provenance import Reach, Reads
from halter.core.tools import (
    LEVELS,
    DeclaredParts,
    Level,
)
from halter.core.usage import UnknownPrice
from halter.spec.autonomy import ActiveHours
from halter.spec.forms import (
    ArgumentUseText,
    Duration,
    RateValue,
    Spec,
    UnusableKey,
)
from halter.spec.limits import DECLARED, LOWER

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

    def require_fit(self) -> None:
        if self.start == self.end:
            raise UnusableKey(f"starts and ends at {self.start}, so no hour is quiet; change one of them.")


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
