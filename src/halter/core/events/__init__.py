"""The events of the journal.

The fields of an event are its facts: they are never erased, and projections are computed from them alone. The text of
people, models and tools is the body of the event, which can be erased without breaking the hash chain.

Kinds and versions are stable. A field is only ever added, with a default; every other change is a new version with an
upcaster. An event of an unknown kind can be shown and verified, but never folded.
"""

from collections.abc import Mapping
from typing import Final, get_args

import msgspec

from halter.core.events.channels import (
    ApproverPaired,
    ApproverRemoved,
    ChannelTaken,
    DecisionShown,
    MessageClosed,
    PairingOffered,
    RepliesRead,
)
from halter.core.events.decisions import (
    ApprovalGiven,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    RuleEnded,
    RuleMade,
    ToolPinned,
)
from halter.core.events.effects import (
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    FilesGiven,
    HoldMade,
    HoldReleased,
    OverrunIncurred,
    RequestRefused,
    RequestSettled,
    RequestStarted,
)
from halter.core.events.fleet import (
    AgentSwitched,
    BodiesErased,
    CapChanged,
    FleetPolicyAdopted,
    HaltLifted,
    HaltRequested,
    PersonSignedOff,
    PersonSignedOn,
    PricesChanged,
    SignOnRefused,
    StoreAccepted,
)
from halter.core.events.sessions import (
    AttendingFailed,
    ContextCut,
    GuardrailTriggered,
    HotStateSeen,
    MessageAdded,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.core.events.tasks import (
    ContextGiven,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    HistoryGiven,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
)
from halter.core.events.triggers import (
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
)

SESSION_FORMAT: Final = 8
"""The session format that this program supports. It increases when a new event changes the meaning of old ones."""


class Unknown(msgspec.Struct, frozen=True):
    """An event of a kind or version that this program cannot read. It is shown and verified, never folded."""

    kind: str
    version: int
    facts: bytes


SessionEvent = (
    SessionStarted
    | SessionWoken
    | SessionParked
    | SessionEnded
    | SessionResumed
    | TurnStarted
    | MessageAdded
    | ContextCut
    | TurnEnded
    | WakePosted
    | HotStateSeen
    | TurnSkipped
    | GuardrailTriggered
    | SensorChanged
    | AttendingFailed
)
"""The events of a session."""

EffectEvent = (
    RequestStarted
    | RequestSettled
    | RequestRefused
    | CallStarted
    | CallSettled
    | FilesGiven
    | CallRefused
    | HoldMade
    | HoldReleased
    | CostCapReached
    | OverrunIncurred
)
"""The events of requests and calls."""

DecisionEvent = DecisionAsked | ApprovalGiven | DecisionMade | DecisionWithdrawn | RuleMade | RuleEnded | ToolPinned
"""The events of decisions."""

FleetEvent = (
    AgentSwitched
    | HaltRequested
    | HaltLifted
    | CapChanged
    | FleetPolicyAdopted
    | PricesChanged
    | BodiesErased
    | StoreAccepted
    | PersonSignedOn
    | PersonSignedOff
    | SignOnRefused
)
"""The events of the fleet."""

TaskEvent = PhaseEntered | ContextGiven | HistoryGiven | DocumentRead | JudgesChosen | MessageRouted
"""The events of what a session works on."""

ArtifactEvent = (
    FindingEmitted
    | FindingReviewed
    | MemoryProposed
    | PrecedentProposed
    | ProposalDecided
    | NotificationQueued
    | NotificationSent
    | NotificationFailed
)
"""The events of findings, proposals and notifications."""

TriggerEvent = (
    TriggerMade
    | TriggerEnded
    | RunStarted
    | RunSkipped
    | RunQueued
    | RunsDelayed
    | ItemSeen
    | ItemQuarantined
    | ItemReleased
)
"""The events of triggers."""

ChannelEvent = (
    ChannelTaken | PairingOffered | ApproverPaired | ApproverRemoved | DecisionShown | MessageClosed | RepliesRead
)
"""The events of channels."""

AnyEvent = (
    SessionEvent | EffectEvent | DecisionEvent | FleetEvent | TaskEvent | ArtifactEvent | TriggerEvent | ChannelEvent
)

EVENTS_BY_KIND: Final[Mapping[str, type[AnyEvent]]] = {event.KIND: event for event in get_args(AnyEvent)}
