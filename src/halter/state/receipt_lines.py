"""The lines of a receipt."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from halter.core.events.tasks import ReviewOutcome, Severity, Support
from halter.core.money import ZERO_USD, Amount, Unit, Usd
from halter.core.provenance import Flaw
from halter.core.usage import Usage
from halter.core.vocabulary import Guardrail, Origin, Outcome, Purpose, WakeCause

CheckName = Literal["halt", "grants", "budget"]
CHECKS: Final[tuple[CheckName, ...]] = ("halt", "grants", "budget")


class ReceiptLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call or request with its hold and cost. Without an outcome it is in doubt.

    `observed` are refusals in observe mode. With `egress`, its arguments chose where data goes. `flaws` are its
    untrusted values. `anonymized` counts, by kind, the values hidden from its model.
    """

    id: str
    name: str
    purpose: Purpose
    started_at: int
    held_usd: Usd = ZERO_USD
    cost_usd: Usd = ZERO_USD
    outcome: Outcome | None = None
    settled_at: int | None = None
    usage: Usage | None = None
    level: str = ""
    risk: str = ""
    effect: str = ""
    egress: bool = False
    phase: str = ""
    parallel_group: str = ""
    observed: tuple[Outcome, ...] = ()
    decision: str = ""
    decided_by: str = ""
    duration_ms: int = 0
    error: str = ""
    flaws: tuple[Flaw, ...] = ()
    anonymized: Mapping[str, int] = {}


class Brake(msgspec.Struct, frozen=True):
    code: str
    at: int
    refused: str
    name: str
    scope: str
    window: str
    brake: CheckName = "budget"
    sentence: str = ""
    level: str = ""
    risk: str = ""
    phase: str = ""
    decision: str = ""
    decided_by: str = ""


class Decision(msgspec.Struct, frozen=True):
    """A decision and its answer. `used`: a call was made with the answer."""

    decision: str
    about: str
    name: str
    subject: str
    asked_at: int
    verdict: str = ""
    by: str = ""
    decided_at: int | None = None
    reason: str = ""
    used: bool = False


class TurnLine(msgspec.Struct, frozen=True):
    """One turn: its steps, and why it ended; without a reason it is still running."""

    turn: int
    started_at: int
    ended_at: int | None = None
    steps: int = 0
    why: str = ""
    sentence: str = ""


class InboundLine(msgspec.Struct, frozen=True):
    """An inbox message, with its origin and trust."""

    cause: WakeCause
    origin: Origin
    sender: str
    at: int
    trusted: bool = False


class ModelLine(msgspec.Struct, frozen=True):
    """All requests to one model. `input_tokens` includes tokens read from or written to a cache."""

    model: str
    requests: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    held_usd: Usd = ZERO_USD
    cost_usd: Usd = ZERO_USD
    cache_write_1h_tokens: int = 0
    web_searches: int = 0
    audio_tokens: int = 0
    audio_cached_tokens: int = 0
    code_executions: int = 0


class OverrunLine(msgspec.Struct, frozen=True):
    hold: str
    scope: str
    window: str
    unit: Unit
    amount: Amount


class ChildLine(msgspec.Struct, frozen=True):
    """A sub-session. `cost_usd` is what it spent, if a call started it; the call's cost includes it."""

    session: str
    ended_at: int
    cost_usd: Usd = ZERO_USD


class PhaseLine(msgspec.Struct, frozen=True):
    """One phase with its start and end; the last one ends with the session."""

    phase: str
    number: int
    entered_at: int
    left_at: int | None = None


class DocumentLine(msgspec.Struct, frozen=True):
    """A document that the session read; `document` is the digest of its content."""

    document: str
    name: str
    collection: str
    read_at: int
    times: int = 1


class FindingLine(msgspec.Struct, frozen=True):
    """A finding, its support by the source, and its review, if any."""

    finding: str
    severity: Severity
    support: Support
    emitted_at: int
    document: str = ""
    name: str = ""
    by: str = ""
    review: ReviewOutcome | None = None
    judges: tuple[str, ...] = ()
    reviewed_at: int | None = None


class JudgesLine(msgspec.Struct, frozen=True):
    """The number of judges that reviewed findings, and why there were fewer than wanted."""

    wanted: int
    chosen: int
    items: int
    most_usd: Usd
    cap_usd: Usd | None
    sentence: str
    at: int


class ProposalLine(msgspec.Struct, frozen=True):
    proposal: str
    at: int
    kind: str = ""


class NotificationLine(msgspec.Struct, frozen=True):
    """A queued notification. The store knows whether it was delivered; the session does not."""

    notification: str
    channel: str
    about: str
    queued_at: int


class GuardrailLine(msgspec.Struct, frozen=True):
    """A limit that delayed the session; repeated waits for one model rate are one line."""

    guardrail: Guardrail
    at: int
    sentence: str
    turn: int = 0
    until: int | None = None
    times: int = 1


class RouteLine(msgspec.Struct, frozen=True):
    route: str
    strategy: str
    why: str
    at: int
