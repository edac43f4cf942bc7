"""The events of the journal.

The fields of an event are its facts: they are never erased, and projections are computed from them alone. The text of
people, models and tools is the body of the event, which can be erased without breaking the hash chain.

Kinds and versions are stable. A field is only ever added, with a default; every other change is a new version with an
upcaster. An event of an unknown kind can be shown and verified, but never folded.
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
    FilesGiven,
    FindingEmitted,
    FindingReviewed,
    HistoryGiven,
    HoldMade,
    HoldReleased,
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
    ActionLimit,
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

SESSION_FORMAT: Final = 8
"""The session format that this program supports. It increases when a new event changes the meaning of old ones."""


class SessionStarted(Event, frozen=True, kw_only=True):
    """A session started; the body is its task.

    The cap of a `bound` sub-session is the part carved out of its parent's cap. `folder` is the digest of the agent's
    folder at the start. `grants` bounds the tools of a sub-session, and its calls count against the `action_limits` of
    the sessions that it works for. A session that continues an ended session
    automatically `follows` it, and `because` gives the reason; its body is then the last answer of that session.
    `traceparent` is the span of the caller that started it.
    `model` and `limits` are those of a run that has its own; the limits have the form of `spec.Limits`.
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
    action_limits: tuple[ActionLimit, ...] = ()
    traceparent: str = ""
    model: str = ""
    limits: Mapping[str, int | float | str | bool | None] = {}


class SessionWoken(Event, frozen=True, kw_only=True):
    """A session woke, with its inbox read up to `inbox_seen`.

    With `recovered`, the session was already awake, and a model answered again after an outage.
    """

    KIND: ClassVar[str] = "session_woken"

    cause: WakeCause | Literal["takeover"]
    inbox_seen: int = 0
    format: int = 1
    recovered: bool = False


class SessionParked(Event, frozen=True, kw_only=True):
    """A session parked until a moment, until a message in its inbox wakes it, or until the first of both.

    A resident session keeps its owner while it is parked, because its sensors run there. With a `trouble` (a
    `ProviderTrouble`), it parked inside a turn because no model answered; `sentence` says why.
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
    """A session ended. The part carved out of its parent's cap is settled with the true cost."""

    KIND: ClassVar[str] = "session_ended"

    state: State
    terminal_reason: str
    charge: Charge | None = None


class SessionResumed(Event, frozen=True, kw_only=True):
    """A person reopened an ended session. It will end again, with another receipt.

    `traceparent` is the span of the caller that did so.
    """

    KIND: ClassVar[str] = "session_resumed"

    by: str
    format: int = 3
    traceparent: str = ""


class TurnStarted(Event, frozen=True, kw_only=True):
    """A turn started, with the inbox read up to `inbox_seen`.

    The body is the first message to the model, as JSON. A `quiet` turn has no new cause.
    """

    KIND: ClassVar[str] = "turn_started"

    turn: int
    inbox_seen: int = 0
    quiet: bool = False


class MessageAdded(Event, frozen=True, kw_only=True):
    """The runtime added a message to the model during a turn; the body is its text."""

    KIND: ClassVar[str] = "message_added"

    turn: int
    reason: MessageReason


class ContextCut(Event, frozen=True, kw_only=True):
    """The history exceeded the context window: of the messages before `through`, only the `pinned` ones remain.

    The body is the text that replaces the others.
    """

    KIND: ClassVar[str] = "context_cut"

    turn: int
    through: int
    pinned: tuple[int, ...]
    strategy: str


class YieldRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model's own end of a turn: continue, sleep for some microseconds, or shut down."""

    mode: YieldMode
    sleep: int = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""


class TurnEnded(Event, frozen=True, kw_only=True):
    """A turn ended. If the model did not end it, `sentence` gives the reason.

    The body lists the untrusted links in the answer, if any.
    """

    KIND: ClassVar[str] = "turn_ended"

    turn: int
    why: TurnEnd
    sentence: str = ""
    yielded: YieldRequest | None = None


class WakePosted(Event, frozen=True, kw_only=True):
    """A message arrived in a session's inbox; the body is its text.

    `wakes` is decided when it is posted, against the session's locked row. A message that `notifies` is shown as an
    alert at the start of the next turn, and is not part of the conversation. `traceparent` is the span of the caller
    that posted it.
    """

    KIND: ClassVar[str] = "wake_posted"

    cause: WakeCause
    origin: Origin
    sender: str
    trusted: bool = False
    wakes: bool = True
    name: str = ""
    notifies: bool = False
    traceparent: str = ""


class HotStateSeen(Event, frozen=True, kw_only=True):
    """A turn saw a changed hot state; the body is the values, as JSON."""

    KIND: ClassVar[str] = "hot_state_seen"

    turn: int
    digest: str


class TurnSkipped(Event, frozen=True, kw_only=True):
    """The gate skipped a turn, and the session keeps its chosen sleep. `skips` counts consecutive skips."""

    KIND: ClassVar[str] = "turn_skipped"

    stage: GateStage
    skips: int
    sentence: str = ""


class GuardrailTriggered(Event, frozen=True, kw_only=True):
    """A mechanical limit delayed or ended a session, mostly an unattended one.

    `until` is when the session may continue, if that depends on time.
    """

    KIND: ClassVar[str] = "guardrail_triggered"

    guardrail: Guardrail
    turn: int = 0
    sentence: str
    until: int | None = None


class SensorChanged(Event, frozen=True, kw_only=True):
    """A sensor started to fail, or recovered."""

    KIND: ClassVar[str] = "sensor_changed"

    sensor: str
    health: Health
    failures: int = 0
    sentence: str = ""


class AttendingFailed(Event, frozen=True, kw_only=True):
    """A worker failed while it ran a session. After too many `failures` in a row the session is quarantined."""

    KIND: ClassVar[str] = "attending_failed"

    failures: int
    error: str
    quarantined: bool = False


class AgentSwitched(Event, frozen=True, kw_only=True):
    """A person switched an agent on, to run unattended, or off."""

    KIND: ClassVar[str] = "agent_switched"

    agent: str
    on: bool
    by: str
    reason: str = ""


class HaltRequested(Event, frozen=True, kw_only=True):
    """A person or a limit halted a scope. With `cancels`, a person ended one session."""

    KIND: ClassVar[str] = "halt_requested"

    scope: str
    by: str
    reason: str = ""
    cancels: bool = False


class HaltLifted(Event, frozen=True, kw_only=True):
    """A halt was lifted. The sessions of the scope resume one after the other over `ramp` microseconds."""

    KIND: ClassVar[str] = "halt_lifted"

    scope: str
    by: str
    ramp: int = 0
    reason: str = ""


class DecisionAsked(Event, frozen=True, kw_only=True):
    """A decision is pending; the body is the text shown to people.

    `digest` binds the answer to the tool, the arguments, the session and the policy. A rule
    that approves exactly this call must match `same` and `keys`. `agent` is set only if no session asks. `mode` is set
    if the level of the call asks in it, `always` if the tool's rule asks about every call. `shown_at` is set if people
    see it only then, after their quiet hours.
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
    mode: str = ""
    always: bool = False
    shown_at: int = 0


class ApprovalGiven(Event, frozen=True, kw_only=True):
    """The first of two required approvers approved. The decision is pending until the second one does."""

    KIND: ClassVar[str] = "approval_given"

    decision: str
    by: str
    digest: str
    reason: str = ""


class DecisionMade(Event, frozen=True, kw_only=True):
    """A person decided; the body of an edit is the new arguments.

    `first_by` is the first approver, if two were required.
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
    """A decision was withdrawn: its subject is gone, or its session ended or continued without the answer."""

    KIND: ClassVar[str] = "decision_withdrawn"

    decision: str
    why: str


class RuleMade(Event, frozen=True, kw_only=True):
    """A person created a rule: matching calls of a tool are approved in its scope until the rule expires.

    `matcher` is JSON for the guard; `keys` are all arguments that a matching call may have.
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
    """A person ended a rule."""

    KIND: ClassVar[str] = "rule_ended"

    rule: str
    by: str
    reason: str = ""


class ToolPinned(Event, frozen=True, kw_only=True):
    """A tool of a server was pinned to its current digest. If the tool changes, a person must approve it again."""

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
    """A person applied a fleet file as the policy of the store. It binds every process on the store at least.

    `policy` is the contents of the file, as JSON. `digest` names it, and `replaces` names the previous policy, if any.
    `loosens` lists the keys in which it allows more than the previous one. `day_cap` and `month_cap` are the fleet's
    caps in micro-dollars, defaults included; every hold is checked against the current ones.
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


class PricesChanged(Event, frozen=True, kw_only=True):
    """A fetched price table was kept, or a person let it count as it is.

    `digest` names the file, and `prices` the blob of all that processes use from now on. New models and higher prices
    count at once; with `accepted`, lower prices and free models do too. The first models of each kind are named, and
    all are counted.
    """

    KIND: ClassVar[str] = "prices_changed"

    digest: str
    prices: str
    by: str
    source: str = ""
    accepted: bool = False
    added: tuple[str, ...] = ()
    added_count: int = 0
    raised: tuple[str, ...] = ()
    raised_count: int = 0
    waiting: tuple[str, ...] = ()
    waiting_count: int = 0
    reason: str = ""


class BodiesErased(Event, frozen=True, kw_only=True):
    """The bodies of a stream were erased up to a sequence number. Its facts and its hash chain remain."""

    KIND: ClassVar[str] = "bodies_erased"

    stream: str
    through: int
    by: str
    reason: str = ""


class StoreAccepted(Event, frozen=True, kw_only=True):
    """A person accepted a store that lacks events of its checkpoints: `events` of them, up to `known_at`.

    `lacks` describes what is missing.
    """

    KIND: ClassVar[str] = "store_accepted"

    by: str
    lacks: str
    events: int = 0
    known_at: int = 0
    reason: str = ""


class PersonSignedOn(Event, frozen=True, kw_only=True):
    """A person signed on `via` a provider or a proxy. `account` is their name there."""

    KIND: ClassVar[str] = "person_signed_on"

    id: str
    name: str
    role: str
    via: str
    account: str = ""
    agents: tuple[str, ...] = ()


class SignOnRefused(Event, frozen=True, kw_only=True):
    """A sign-on through a provider or a proxy was refused."""

    KIND: ClassVar[str] = "sign_on_refused"

    id: str
    via: str
    why: SignOnRefusal
    account: str = ""


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
    | AgentSwitched
    | RequestStarted
    | RequestSettled
    | RequestRefused
    | CallStarted
    | CallSettled
    | FilesGiven
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
    | HoldMade
    | HoldReleased
    | CapChanged
    | FleetPolicyAdopted
    | PricesChanged
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
"""The events of sessions, and of people's commands to sessions and to the fleet."""

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

AnyEvent = SessionEvent | ArtifactEvent | TriggerEvent | ChannelEvent

EVENTS_BY_KIND: Final[Mapping[str, type[AnyEvent]]] = {event.KIND: event for event in get_args(AnyEvent)}
