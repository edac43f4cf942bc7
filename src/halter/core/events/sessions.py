"""The events of a session: its start and end, its turns, its messages and its sleep."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from halter.core.money import Charge, Leg
from halter.core.tools import Health
from halter.core.vocabulary import (
    ActionLimit,
    Event,
    GateStage,
    Guardrail,
    MessageReason,
    Note,
    Origin,
    RowEvent,
    SessionKind,
    State,
    TurnEnd,
    WakeCause,
    YieldMode,
)


class SessionStarted(Event, frozen=True, kw_only=True):
    """A session started; the body is its task.

    The cap of a `bound` sub-session is the part carved out of its parent's cap. `folder` is the digest of the agent's
    folder at the start. `grants` bounds the tools of a sub-session, and its calls count against the `action_limits` of
    the sessions that it works for. A session that continues an ended session
    automatically `follows` it, and `because` gives the reason; its body is then the last answer of that session.
    `traceparent` is the span of the caller that started it.
    `model` and `limits` are those of a run that has its own; the limits have the form of `spec.Limits`.
    """

    KIND = "session_started"

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

    KIND = "session_woken"

    cause: WakeCause | Literal["takeover"]
    inbox_seen: int = 0
    format: int = 1
    recovered: bool = False


class SessionParked(Event, frozen=True, kw_only=True):
    """A session parked until a moment, until a message in its inbox wakes it, or until the first of both.

    A resident session keeps its owner while it is parked, because its sensors run there. With a `trouble` (a
    `ProviderTrouble`), it parked inside a turn because no model answered; `sentence` says why.
    """

    KIND = "session_parked"

    state: State
    inbox_seen: int = 0
    wake_at: int | None = None
    wake_on: tuple[str, ...] = ()
    resident: bool = False
    trouble: str = ""
    sentence: str = ""


class SessionEnded(Event, frozen=True, kw_only=True):
    """A session ended. The part carved out of its parent's cap is settled with the true cost."""

    KIND = "session_ended"
    IMMEDIATE = True

    state: State
    terminal_reason: str
    charge: Charge | None = None


class SessionResumed(Event, frozen=True, kw_only=True):
    """A person reopened an ended session. It will end again, with another receipt.

    `traceparent` is the span of the caller that did so.
    """

    KIND = "session_resumed"

    by: str
    format: int = 3
    traceparent: str = ""


class TurnStarted(Event, frozen=True, kw_only=True):
    """A turn started, with the inbox read up to `inbox_seen`.

    The body is the first message to the model, as JSON. A `quiet` turn has no new cause.
    """

    KIND = "turn_started"

    turn: int
    inbox_seen: int = 0
    quiet: bool = False


class MessageAdded(Note, frozen=True, kw_only=True):
    """The runtime added a message to the model during a turn; the body is its text."""

    KIND = "message_added"

    turn: int
    reason: MessageReason


class ContextCut(Note, frozen=True, kw_only=True):
    """The history exceeded the context window: of the messages before `through`, only the `pinned` ones remain.

    The body is the text that replaces the others.
    """

    KIND = "context_cut"

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


class TurnEnded(Note, frozen=True, kw_only=True):
    """A turn ended. If the model did not end it, `sentence` gives the reason.

    The body lists the untrusted links in the answer, if any.
    """

    KIND = "turn_ended"

    turn: int
    why: TurnEnd
    sentence: str = ""
    yielded: YieldRequest | None = None


class WakePosted(RowEvent, frozen=True, kw_only=True):
    """A message arrived in a session's inbox; the body is its text.

    `wakes` is decided when it is posted, against the session's locked row. A message that `notifies` is shown as an
    alert at the start of the next turn, and is not part of the conversation. `traceparent` is the span of the caller
    that posted it.
    """

    KIND = "wake_posted"

    cause: WakeCause
    origin: Origin
    sender: str
    trusted: bool = False
    wakes: bool = True
    name: str = ""
    notifies: bool = False
    traceparent: str = ""


class HotStateSeen(Note, frozen=True, kw_only=True):
    """A turn saw a changed hot state; the body is the values, as JSON."""

    KIND = "hot_state_seen"

    turn: int
    digest: str


class TurnSkipped(Note, frozen=True, kw_only=True):
    """The gate skipped a turn, and the session keeps its chosen sleep. `skips` counts consecutive skips."""

    KIND = "turn_skipped"

    stage: GateStage
    skips: int
    sentence: str = ""


class GuardrailTriggered(Note, frozen=True, kw_only=True):
    """A mechanical limit delayed or ended a session, mostly an unattended one.

    `until` is when the session may continue, if that depends on time.
    """

    KIND = "guardrail_triggered"

    guardrail: Guardrail
    turn: int = 0
    sentence: str
    until: int | None = None


class SensorChanged(Note, frozen=True, kw_only=True):
    """A sensor started to fail, or recovered."""

    KIND = "sensor_changed"

    sensor: str
    health: Health
    failures: int = 0
    sentence: str = ""


class AttendingFailed(Note, frozen=True, kw_only=True):
    """A worker failed while it ran a session. After too many `failures` in a row the session is quarantined."""

    KIND = "attending_failed"

    failures: int
    error: str
    quarantined: bool = False
