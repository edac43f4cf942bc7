"""Everything that can happen, in the past tense.

An event's fields are its facts: they are never erased, and projections are made of them alone. What people,
models and tools said travels beside the event as its body, which can be erased without breaking the chain.

Kinds and versions are stable for ever. A field is only ever added, with a default; anything else is a new
version with an upcaster. An unknown kind can be shown and verified, never folded.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal, get_args

import msgspec

from halter.core.channel_events import (
    ApproverPaired,
    ApproverRemoved,
    ChannelTaken,
    DecisionShown,
    MessageClosed,
    PairingOffered,
    RepliesRead,
)
from halter.core.effect_events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextGiven,
    CostCapReached,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    HistoryGiven,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OverrunIncurred,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
)
from halter.core.money import Charge, Leg, Unit
from halter.core.provenance import Flaw
from halter.core.tools import Health, Level
from halter.core.vocabulary import (
    DecisionKind,
    Event,
    GateStage,
    Guardrail,
    MessageReason,
    Origin,
    RiskLevel,
    RuleScope,
    SessionKind,
    SignOnRefusal,
    State,
    TurnEnd,
    Verdict,
    WakeCause,
    YieldMode,
)

SESSION_FORMAT: Final = 7
"""What a program must understand to take a session. It rises when a new event changes the meaning of old ones."""


class SessionStarted(Event, frozen=True, kw_only=True):
    """A session came to be; its body is the task it was given.

    A sub-session that is `bound` has what was carved out of its parent's cap as its own cap. `folder` is the digest of
    the agent's folder as it was then; `grants` are the tools that a sub-session may use at most. A session that began
    by itself after another one `follows` that one, and `because` says why; its body is what the other one said last.
    """

    KIND: ClassVar[str] = "session_started"

    session: str
    agent: str
    kind: SessionKind
    started_by: str
    origin: Origin = "person"
    trusted: bool = True
    trigger: str = ""
    parent: str = ""
    definition: str = ""
    format: int = 1
    carved: tuple[Leg, ...] = ()
    bound: bool = False
    folder: str = ""
    grants: tuple[str, ...] | None = None
    follows: str = ""
    because: str = ""


class SessionWoken(Event, frozen=True, kw_only=True):
    """A session was taken up again, with its inbox read as far as `inbox_seen`.

    One that `recovered` was awake: its model answered, after a time in which none had.
    """

    KIND: ClassVar[str] = "session_woken"

    cause: WakeCause | Literal["takeover"]
    inbox_seen: int = 0
    format: int = 1
    recovered: bool = False


class SessionParked(Event, frozen=True, kw_only=True):
    """A session rests until a moment, until something in its inbox wakes it, or both.

    A resident session keeps its owner while it rests, because its sensors run there. With a `trouble` (one of
    `ProviderTrouble`) it rests inside of a turn because no model answered, as `sentence` says.
    """

    KIND: ClassVar[str] = "session_parked"

    state: State
    inbox_seen: int = 0
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()
    resident: bool = False
    trouble: str = ""
    sentence: str = ""


class SessionEnded(Event, frozen=True, kw_only=True):
    """A session is over; what was carved out of its parent's cap is settled with what it really spent."""

    KIND: ClassVar[str] = "session_ended"

    state: State
    terminal_reason: str
    charge: Charge | None = None


class SessionResumed(Event, frozen=True, kw_only=True):
    """A session that was over goes on, because a person said so; it will end once more, with a further receipt."""

    KIND: ClassVar[str] = "session_resumed"

    by: str
    format: int = 3


class TurnStarted(Event, frozen=True, kw_only=True):
    """A session was given a turn, with its inbox read as far as `inbox_seen`.

    Its body is what the model is told first, as the JSON of a message. A turn is `quiet` that nothing new gave rise to.
    """

    KIND: ClassVar[str] = "turn_started"

    turn: int
    inbox_seen: int = 0
    quiet: bool = False


class MessageAdded(Event, frozen=True, kw_only=True):
    """The runtime told the model something in the middle of a turn, for a reason; its body is the text."""

    KIND: ClassVar[str] = "message_added"

    turn: int
    reason: MessageReason


class ContextCut(Event, frozen=True, kw_only=True):
    """The history outgrew the window: of the messages before `through` only the `pinned` ones are still shown.

    Its body is what stands in place of the others.
    """

    KIND: ClassVar[str] = "context_cut"

    turn: int
    through: int
    pinned: tuple[int, ...]
    strategy: str


class YieldRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model wants to go on after its turn: at once, after a sleep in microseconds, or not at all."""

    mode: YieldMode
    sleep: int = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""


class TurnEnded(Event, frozen=True, kw_only=True):
    """A turn is over; `sentence` says to a person what stopped it, where that was not the model itself.

    Its body names the links of the answer that no trusted place said, if there are any.
    """

    KIND: ClassVar[str] = "turn_ended"

    turn: int
    why: TurnEnd
    sentence: str = ""
    yielded: YieldRequest | None = None


class WakePosted(Event, frozen=True, kw_only=True):
    """Something arrived in a session's inbox; its body is what was said.

    Whether it wakes the session is decided where it is posted, against the session's locked row. What `notifies`
    stands at the top of the next turn and is no part of what is said there.
    """

    KIND: ClassVar[str] = "wake_posted"

    cause: WakeCause
    origin: Origin
    sender: str
    trusted: bool = False
    wakes: bool = True
    name: str = ""
    notifies: bool = False


class HotStateSeen(Event, frozen=True, kw_only=True):
    """What a turn saw of the hot state, where that was not the same as before; its body is the values, as JSON."""

    KIND: ClassVar[str] = "hot_state_seen"

    turn: int
    digest: str


class TurnSkipped(Event, frozen=True, kw_only=True):
    """The gate found no turn worth its cost: the session sleeps on as it had chosen. `skips` are those in a row."""

    KIND: ClassVar[str] = "turn_skipped"

    stage: GateStage
    skips: int
    sentence: str = ""


class GuardrailTriggered(Event, frozen=True, kw_only=True):
    """A mechanical rule held a session back, mostly one that runs by itself.

    `until` is when it may go on, if time decides that.
    """

    KIND: ClassVar[str] = "guardrail_triggered"

    guardrail: Guardrail
    turn: int = 0
    sentence: str
    until: int | None = None


class SensorChanged(Event, frozen=True, kw_only=True):
    """A sensor that could read no longer can, or can again."""

    KIND: ClassVar[str] = "sensor_changed"

    sensor: str
    health: Health
    failures: int = 0
    sentence: str = ""


class AttendingFailed(Event, frozen=True, kw_only=True):
    """The worker of a session failed over it; after `failures` in a row it is left to a person."""

    KIND: ClassVar[str] = "attending_failed"

    failures: int
    error: str
    quarantined: bool = False


class AgentSwitched(Event, frozen=True, kw_only=True):
    """A person switched an agent on, to run by itself, or off."""

    KIND: ClassVar[str] = "agent_switched"

    agent: str
    on: bool
    by: str
    reason: str = ""


class HaltRequested(Event, frozen=True, kw_only=True):
    """A person, or a guardrail, stops everything in a scope; one that cancels ends a single session for good."""

    KIND: ClassVar[str] = "halt_requested"

    scope: str
    by: str
    reason: str = ""
    cancels: bool = False


class HaltLifted(Event, frozen=True, kw_only=True):
    """A scope may act again; its sessions are let go one after the other over `ramp` microseconds."""

    KIND: ClassVar[str] = "halt_lifted"

    scope: str
    by: str
    ramp: int = 0
    reason: str = ""


class DecisionAsked(Event, frozen=True, kw_only=True):
    """Something waits for a person; its body is what they are shown.

    `digest` binds the answer to the tool, the arguments, the session and the policy that were asked about. `same` and
    `keys` tell what a rule would have to match to answer the very same call; `agent` is told where no session asks.
    """

    KIND: ClassVar[str] = "decision_asked"

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_at: int
    level: Level | None = None
    risk: RiskLevel | None = None
    reasons: tuple[str, ...] = ()
    same: str = ""
    keys: tuple[str, ...] = ()
    agent: str = ""
    flaws: tuple[Flaw, ...] = ()
    approvers: int = 1


class ApprovalGiven(Event, frozen=True, kw_only=True):
    """The first of two people agreed to what was shown; nothing is decided before the other one does."""

    KIND: ClassVar[str] = "approval_given"

    decision: str
    by: str
    digest: str
    reason: str = ""


class DecisionMade(Event, frozen=True, kw_only=True):
    """A person decided; the body of an edit is the arguments that they want instead.

    `first_by` is who agreed before them, where two had to.
    """

    KIND: ClassVar[str] = "decision_made"

    decision: str
    verdict: Verdict
    by: str
    digest: str
    reason: str = ""
    first_by: str = ""

    @property
    def people(self) -> str:
        return f"{self.first_by} and {self.by}" if self.first_by else self.by


class DecisionWithdrawn(Event, frozen=True, kw_only=True):
    """A question needs no answer any more: what it was about is gone, or the session that asked is over."""

    KIND: ClassVar[str] = "decision_withdrawn"

    decision: str
    why: str


class RuleMade(Event, frozen=True, kw_only=True):
    """A person said "always": calls of a tool that match are agreed to in their scope, until the rule expires.

    `matcher` is JSON that the guard understands; `keys` are all the arguments that a call may have.
    """

    KIND: ClassVar[str] = "rule_made"

    rule: str
    tool: str
    scope: RuleScope
    owner: str
    matcher: str
    keys: tuple[str, ...]
    by: str
    expires_at: int


class RuleEnded(Event, frozen=True, kw_only=True):
    """A person took an "always" back."""

    KIND: ClassVar[str] = "rule_ended"

    rule: str
    by: str
    reason: str = ""


class ToolPinned(Event, frozen=True, kw_only=True):
    """A server's tool may be used as it is now: when it changes, a person is asked first."""

    KIND: ClassVar[str] = "tool_pinned"

    agent: str
    tool: str
    digest: str
    by: str


class CapChanged(Event, frozen=True, kw_only=True):
    """A person set the cap of a scope, for one window or for the scope's whole life."""

    KIND: ClassVar[str] = "cap_changed"

    scope: str
    window: str
    unit: Unit
    cap: int | None
    by: str
    overrun: int = 0
    reason: str = ""


class FleetPolicyAdopted(Event, frozen=True, kw_only=True):
    """A person made a fleet's file the policy of the store: no process on the store is bound by less.

    `policy` is what the file says, as JSON. `digest` names it, and `replaces` names the policy before it, if there was
    one. `loosens` lists the keys in which it allows more than that one. `day_cap` and `month_cap` are what all agents
    together may spend, in micro-dollars, the default included: every hold is checked against them as they stand.
    """

    KIND: ClassVar[str] = "fleet_policy_adopted"

    policy: str
    digest: str
    by: str
    day_cap: int | None = None
    month_cap: int | None = None
    replaces: str = ""
    loosens: tuple[str, ...] = ()
    reason: str = ""


class BodiesErased(Event, frozen=True, kw_only=True):
    """The bodies of a stream were erased up to a sequence number; its facts and its chain stand."""

    KIND: ClassVar[str] = "bodies_erased"

    stream: str
    through: int
    by: str
    reason: str = ""


class StoreAccepted(Event, frozen=True, kw_only=True):
    """A person goes on with a store that lacks what its checkpoints knew: `events` of them, until `known_at`.

    `lacks` says in words what is missing.
    """

    KIND: ClassVar[str] = "store_accepted"

    by: str
    lacks: str
    events: int = 0
    known_at: int = 0
    reason: str = ""


class PersonSignedOn(Event, frozen=True, kw_only=True):
    """A person was let in whom a provider or a proxy named, `via` it. `account` is what they are called there."""

    KIND: ClassVar[str] = "person_signed_on"

    id: str
    name: str
    role: str
    via: str
    account: str = ""
    agents: tuple[str, ...] = ()


class SignOnRefused(Event, frozen=True, kw_only=True):
    """A person was not let in whom a provider or a proxy named, or would not name."""

    KIND: ClassVar[str] = "sign_on_refused"

    id: str
    via: str
    why: SignOnRefusal
    account: str = ""


class Unknown(msgspec.Struct, frozen=True):
    """An event of a kind or version that this program does not know: shown and verified, never folded."""

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
    | AgentSwitched
    | RequestStarted
    | RequestSettled
    | RequestRefused
    | CallStarted
    | CallSettled
    | CallRefused
    | HaltRequested
    | HaltLifted
    | DecisionAsked
    | ApprovalGiven
    | DecisionMade
    | DecisionWithdrawn
    | RuleMade
    | RuleEnded
    | ToolPinned
    | CostCapReached
    | OverrunIncurred
    | CapChanged
    | FleetPolicyAdopted
    | BodiesErased
    | StoreAccepted
    | PersonSignedOn
    | SignOnRefused
    | PhaseEntered
    | ContextGiven
    | HistoryGiven
    | DocumentRead
    | JudgesChosen
    | MessageRouted
)
"""What happens in sessions, and what people say to them and to the fleet."""

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
"""What sessions leave behind, and what becomes of it."""

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
"""What starts sessions."""

ChannelEvent = (
    ChannelTaken | PairingOffered | ApproverPaired | ApproverRemoved | DecisionShown | MessageClosed | RepliesRead
)
"""What is put to people, and answered by them, over a channel."""

AnyEvent = SessionEvent | ArtifactEvent | TriggerEvent | ChannelEvent

EVENTS_BY_KIND: Final[Mapping[str, type[AnyEvent]]] = {event.KIND: event for event in get_args(AnyEvent)}
