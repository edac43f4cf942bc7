"""Policy backtest: judges every recorded call and request again, under another policy; and the peaks of recorded use.

The events of the whole store are folded in commit order, through the real projections and the real judges. An effect
that the new policy admits is folded with the hold of that policy and with its recorded cost; one that it refuses costs
nothing. The backtest makes no calls, reads no clock and uses no network.

Each question is assumed to get its recorded answer. A session that the new policy would have stopped at a cap ends
there. A session in which the policy would have refused a recorded call, or admitted a refused one, diverges: the rest
of it is judged but counted separately.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from halter.core.clock import HOUR
from halter.core.codec import decode
from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    CostCapReached,
    DecisionAsked,
    FleetPolicyAdopted,
    MessageAdded,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionStarted,
    TriggerMade,
    TurnStarted,
)
from halter.core.ids import Digest, StreamId, parse_session_id
from halter.core.money import ZERO_USD, Cap, Leg, Usd, micros_to_usd
from halter.core.ports import Draft, Stored
from halter.core.project.holds import budget_row
from halter.core.provenance import Flaw
from halter.core.rows import DecisionRow, RuleRow
from halter.core.tools import LEVELS, SERVER_SEPARATOR, Level, Tool, ToolSpec, Valid
from halter.core.usage import ModelName, ModelPrices, RequestExtras, Unpriced, Usage
from halter.core.vocabulary import Outcome, R, Row
from halter.guard.guard import REDACTION_MARK
from halter.guard.judge import judge_call
from halter.guard.judge_request import ModelAttempt, judge_attempt
from halter.guard.prepare import Call, SessionContext, find_model_flaw, prepare_call
from halter.journal.engine import StoreView
from halter.journal.rebuild import RowFold
from halter.models.price_tables import make_prices
from halter.models.prices import Prices
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.levels import RATE_SLICES
from halter.policy.order import Ranked
from halter.provenance.check import ActiveMode, ProvenanceCheck, choose_provenance_mode
from halter.runtime.session_builder import grant_phase_tools
from halter.spec.agent import Phase
from halter.spec.policy import ProvenanceMode
from halter.spec.triggers import AnyTrigger, inherit_trigger_caps
from halter.state.trigger_records import TriggerRecord

Verdict = Literal["allowed", "asked", "refused"]
"""The verdict on a call or a request; one that waits for other holds counts as allowed."""

VERDICT_ORDER: Final = Ranked(("refused", "asked", "allowed"))

POLICY_INDEPENDENT_OUTCOMES: Final[frozenset[Outcome]] = frozenset(
    ("unknown_tool", "invalid_arguments", "quarantined", "external_halt")
)
"""Outcomes of refusals that do not depend on the policy."""

MAX_LINES: Final = 10_000
"""Maximum number of changed decisions that are listed; all of them are counted."""

PAGE: Final = 5_000
MAX_INPUT_TOKENS: Final = 1 << 24
PRICE_PROBE: Final = 1_000_000
MASK: Final = REDACTION_MARK.encode()

ERASED: Final = "Its arguments were erased."
MASKED: Final = "Its arguments contain a masked secret."
NO_DEFINITION: Final = "The definition of its session was not stored, or was stored by another version of Halter."
NO_PHASE: Final = "The policy has no such phase."


class BacktestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that the other policy would have made differently.

    `scope` is the scope of the cap that it would have reached, and `not_spent_usd` is what its session spent after
    that. `after` says that the session had diverged before.
    """

    at: int
    session: str
    seq: int
    kind: Literal["call", "request"]
    name: str
    then: Verdict
    now: Verdict
    sentence: str = ""
    scope: str = ""
    not_spent_usd: Usd = ZERO_USD
    after: bool = False

    @property
    def loosened(self) -> bool:
        return not VERDICT_ORDER.is_within(self.now, self.then)


class Backtest(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of another policy over the recorded sessions of an agent.

    `changed` counts decisions by `then → now`, and `after` counts those in sessions that had diverged before;
    `loosened` and `refused` count both. The number of `lines` is limited; looser decisions come first. `not_spent` is
    what effects cost, in micro-dollars, that the policy would not have admitted. `unjudged` counts by reason. `unnamed`
    counts, by tool, the calls that no rule of the policy names.
    """

    agent: str
    sessions: int
    decisions: int
    lines: tuple[BacktestLine, ...]
    differing: int
    loosened: int
    refused: int
    changed: Mapping[str, int]
    after: int
    diverged: int
    stopped: int
    not_spent: int
    unjudged: Mapping[str, int]
    unnamed: Mapping[str, int]
    notes: tuple[str, ...] = ()


PolicyChange = Callable[[ResolvedPolicy], ResolvedPolicy]
"""Returns the policy under test, given the policy that a session was recorded with."""


class RecordedPolicy(msgspec.Struct, frozen=True):
    """The policy that a session was recorded with. A session without a model runs a playbook and has no wrap-up."""

    policy: ResolvedPolicy
    plays: bool


class _RecordedTool:
    """A tool as recorded in the journal: its arguments were valid, and it cannot run."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    def validate(self, arguments: bytes) -> Valid:
        return Valid(msgspec.json.decode(arguments, type=dict[str, Any]), arguments)


class _RecordedBound:
    """The recorded hold of a request whose model has lost its price: the same for an answer of any length."""

    guess = ""

    def __init__(self, usd: int) -> None:
        self._usd = usd

    def cost(self, usage: Usage, at: int) -> int:
        return self._usd

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        return self._usd

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, limit: int = 0) -> int:
        return limit if self._usd <= budget_micros else 0

    def covering(self, extras: RequestExtras) -> "_RecordedBound":
        return self


class _RecordedBrake(NamedTuple):
    """The recorded flaws of the provenance check, under the mode of the policy under test."""

    mode: ActiveMode
    flaws: tuple[Flaw, ...]
    locked: bool
    task: str = ""

    def judge(self, tool: str, canonical: bytes) -> tuple[Flaw, ...]:
        return self.flaws


class _ShadowRows(RowFold):
    """The rows that result from the policy under test."""

    now = 0

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[str, RuleRow] = {}

    def save(self, row: Row) -> None:
        super().save(row)
        if isinstance(row, RuleRow):
            self.rules[row.rule] = row

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        return [self.get(*key) for key in keys]


class _Shadow:
    """One session under the policy under test."""

    def __init__(
        self, event: SessionStarted, recorded_policy: RecordedPolicy, policy: ResolvedPolicy, prices: Prices
    ) -> None:
        self.session, self.agent = event.session, event.agent
        self.recorded, self.plays, self.policy, self.prices = (
            recorded_policy.policy,
            recorded_policy.plays,
            policy,
            prices,
        )
        self.trigger, self.grants = event.trigger, event.grants
        self.phase = recorded_policy.policy.phases[0].name
        self.mode: ProvenanceMode = choose_provenance_mode(policy)
        self.last_words = self.diverged = self.is_stopped = self.locked = False
        self.not_spent = 0
        self._contexts: dict[tuple[str, bool, bool], SessionContext] = {}

    @cached_property
    def digest(self) -> str:
        return self.recorded.digest()

    def context(self, phase: str, *, has_runtime_grants: bool) -> SessionContext | None:
        """Return the context of a phase, or None. `has_runtime_grants` adds the tools that the runtime grants."""
        key = (phase, has_runtime_grants, self.last_words)
        if key not in self._contexts:
            named_phase = next((each for each in self.policy.phases if each.name == phase), None)
            if named_phase is None:
                return None
            self._contexts[key] = self._make_context(Phase(phase, None) if has_runtime_grants else named_phase)
        return self._contexts[key]

    def _make_context(self, phase: Phase) -> SessionContext:
        policy, keeps = self.policy, self.policy.on_cap == "wrap_up" and not (self.last_words or self.plays)
        cap = policy.caps.session.max_cost_usd or 0
        return SessionContext(
            session=self.session,
            agent=self.agent,
            phase=grant_phase_tools(phase, (), self.grants),
            policy=policy,
            policy_digest=self.digest,
            trigger=self.trigger,
            secrets=frozenset(policy.secrets),
            reserve_usd=round(cap * policy.reserve_cost_fraction) if keeps else 0,
            reserve_tokens=policy.reserve_tokens if keeps else 0,
        )

    def recorded_brake(self, flaws: tuple[Flaw, ...]) -> "_RecordedBrake | None":
        mode = self.mode
        return None if not flaws or mode == "off" else _RecordedBrake(mode, flaws, self.locked)

    def is_granted_by_runtime(self, tool: str, phase: str) -> bool:
        """Return true if the recorded phase does not grant a tool that was admitted: the runtime granted it."""
        return not any(each.name == phase and each.grants_tool(tool) for each in self.recorded.phases)


class _Judgement(msgspec.Struct, frozen=True):
    now: Verdict
    sentence: str = ""
    scope: str = ""
    intent: AnyEvent | None = None


def backtest(
    view: StoreView,
    agent: str,
    change: PolicyChange,
    *,
    since: int = 0,
    replaces_fleet: bool = False,
    max_lines: int = MAX_LINES,
) -> Backtest:
    """Judge an agent's sessions since a moment again. With `replaces_fleet`, the store's own policy is ignored."""
    test = _BacktestFold(view, agent, change, since, max_lines)
    for stored in read_in_order(view):
        if replaces_fleet and isinstance(stored.event, FleetPolicyAdopted):
            continue
        test.apply(stored)
    return test.result()


def read_policy(view: StoreView, definition: str) -> RecordedPolicy | None:
    """Read the policy of a definition; None if it is not stored or this version cannot read it."""
    encoded = view.get(Digest(definition)) if definition else None
    try:
        raw = {} if encoded is None else msgspec.json.decode(encoded, type=dict[str, Any])
        policy = msgspec.convert(raw.get("policy", raw), ResolvedPolicy)
    except msgspec.MsgspecError:
        return None
    return RecordedPolicy(policy, plays="policy" not in raw)


def read_in_order(view: StoreView) -> Iterator[Stored]:
    """Read all events in commit order, with bodies where a judge needs them."""
    position = 0
    while True:
        rows = view.rows("events_in_order", {"position": position, "limit": PAGE})
        for stream, seq, kind, version, at, generation, key, blob, facts, body, _ in rows:
            event = decode(kind, version, facts)
            yield Stored(stream, seq, kind, version, at, generation, key, blob, facts, body, None, b"", b"", event)
        if len(rows) < PAGE:
            return
        position = rows[-1][-1]


class _BacktestFold:
    def __init__(self, view: StoreView, agent: str, change: PolicyChange, since: int, max_lines: int) -> None:
        self._view, self._agent, self._change, self._since = view, agent, change, since
        self._max_lines = max_lines
        self._rows = _ShadowRows()
        self._policies: dict[str, tuple[RecordedPolicy, ResolvedPolicy, Prices] | None] = {}
        self._triggers: dict[str, AnyTrigger] = {}
        self._sessions: dict[str, _Shadow] = {}
        self._tools: dict[ToolSpec, Tool] = {}
        self._judgements: dict[str, _Judgement] = {}
        self._caps: dict[str, CostCapReached] = {}
        self._costly: dict[str, _Shadow] = {}
        self._looser: list[BacktestLine] = []
        self._stricter: list[BacktestLine] = []
        self._differing = self._loosened_count = self._refused_count = 0
        self._changed, self._unjudged, self._unnamed = Counter[str](), Counter[str](), Counter[str]()
        self._decisions = self._after = self._event_count = 0
        self._raised: set[str] = set()

    def apply(self, stored: Stored) -> None:
        self._rows.now = stored.at
        event = stored.event
        match event:
            case TriggerMade():
                self._learn_trigger(stored)
            case SessionStarted() if event.agent == self._agent and stored.at >= self._since:
                self._begin(event)
            case _:
                pass
        shadow = self._sessions.get(parse_session_id(StreamId(stored.stream)) or "")
        if shadow is None or not self._judge(shadow, stored):
            self._rows.apply(stored)

    def _learn_trigger(self, stored: Stored) -> None:
        if stored.body:
            trigger = cast("TriggerMade", stored.event).trigger
            self._triggers[trigger] = msgspec.json.decode(stored.body, type=TriggerRecord).trigger()

    def _begin(self, event: SessionStarted) -> None:
        self._event_count += 1
        if event.definition not in self._policies:
            stored_policy = read_policy(self._view, event.definition)
            self._policies[event.definition] = stored_policy and (
                stored_policy,
                self._change(stored_policy.policy),
                make_prices(stored_policy.policy),
            )
        policies = self._policies[event.definition]
        if policies is None:
            self._unjudged[NO_DEFINITION] += 1
            return
        recorded_policy, policy, prices = policies
        caps = policy.caps
        if event.trigger in self._triggers:
            caps = inherit_trigger_caps(caps, self._triggers[event.trigger])
        carved_cap = next((leg.amount for leg in event.carved if leg.unit == "usd"), None)
        if event.bound and carved_cap is not None:
            caps = msgspec.structs.replace(caps, session=Cap(carved_cap))
        if caps is not policy.caps:
            policy = msgspec.structs.replace(policy, caps=caps)
        self._sessions[event.session] = _Shadow(event, recorded_policy, policy, prices)

    def _judge(self, shadow: _Shadow, stored: Stored) -> bool:
        """Judge an event of a session under test. Return true if it is already folded or must not be folded."""
        match stored.event:
            case CostCapReached() as event:
                self._caps[event.refused] = event
            case PhaseEntered() as event:
                shadow.phase = event.phase
            case MessageAdded(reason="wrap_up"):
                shadow.last_words = True
            case TurnStarted():
                shadow.last_words = False
            case CallStarted() as event:
                return self._judge_started_call(shadow, stored, event)
            case DecisionAsked(about="approval") as event:
                return self._judge_question(shadow, stored, event)
            case CallRefused(staged=False) as event:
                self._judge_refused_call(shadow, stored, event)
            case RequestStarted() as event:
                return self._judge_started_request(shadow, stored, event)
            case RequestRefused() as event:
                self._judge_refused_request(shadow, stored, event)
            case CallSettled(call=effect, charge=charge) | RequestSettled(request=effect, charge=charge):
                if effect in self._costly and charge is not None:
                    self._costly[effect].not_spent += charge.usd
            case _:
                pass
        return False

    def _judge_started_call(self, shadow: _Shadow, stored: Stored, event: CallStarted) -> bool:
        if self._has_stopped(shadow, event.call):
            return True
        earlier_judgement = self._judgements.get(event.call)
        if earlier_judgement is not None and earlier_judgement.now == "refused":
            self._costly[event.call] = shadow
            return True
        decision = self._rows.get(DecisionRow, event.decision) if event.decision else None
        if decision is not None and decision.verdict == "edit":
            return False
        spec = ToolSpec(
            name=event.tool,
            description="",
            schema=b"",
            level=self._find_declared_level(shadow, event.tool, event.level),
            effect=event.effect,
            idempotent=event.idempotent,
            egress=event.egress,
            server=event.tool.partition(SERVER_SEPARATOR)[0] if SERVER_SEPARATOR in event.tool else "",
        )
        phase = event.phase or shadow.phase
        is_runtime_grant = shadow.is_granted_by_runtime(event.tool, phase)
        call = Call(
            event.call,
            event.tool,
            self._arguments(stored),
            event.purpose,
            event.parallel_group,
            provenance_check=cast("ProvenanceCheck | None", shadow.recorded_brake(event.flaws)),
            has_decision=earlier_judgement is not None and earlier_judgement.now == "asked",
        )
        judgement = self._judge_call(
            shadow, call, spec, phase, event.digest, _sum_held_usd(event.legs), own=is_runtime_grant
        )
        if judgement is None:
            return False
        if earlier_judgement is None:
            self._record(shadow, stored, "call", event.tool, "allowed", judgement)
        elif judgement.now == "refused":
            self._record(shadow, stored, "call", event.tool, "asked", judgement)
        return self._fold_policy_outcome(shadow, stored, event.call, judgement)

    def _judge_question(self, shadow: _Shadow, stored: Stored, event: DecisionAsked) -> bool:
        if self._has_stopped(shadow, event.subject):
            return True
        level = event.level or "CONTROLLED"
        declared_level = self._find_declared_level(shadow, event.name, level)
        spec = ToolSpec(name=event.name, description="", schema=b"", level=declared_level)
        arguments = self._arguments(stored).partition(b" ")[2].partition(b"\n")[0]
        call = Call(
            event.subject,
            event.name,
            arguments,
            provenance_check=cast("ProvenanceCheck | None", shadow.recorded_brake(event.flaws)),
        )
        is_runtime_grant = shadow.is_granted_by_runtime(event.name, shadow.phase)
        judgement = self._judge_call(shadow, call, spec, shadow.phase, event.digest, 0, own=is_runtime_grant)
        if judgement is None:
            return False
        self._record(shadow, stored, "call", event.name, "asked", judgement)
        if judgement.now == "asked":
            return self._fold_policy_outcome(shadow, stored, event.subject, judgement)
        return True

    def _judge_refused_call(self, shadow: _Shadow, stored: Stored, event: CallRefused) -> None:
        if shadow.is_stopped or event.outcome in POLICY_INDEPENDENT_OUTCOMES:
            return
        earlier_judgement = self._judgements.get(event.call)
        if earlier_judgement is not None:
            # The question was denied or expired. Without a question the session diverges.
            shadow.locked = shadow.locked or bool(event.flaws and event.decision and shadow.policy.locks)
            shadow.diverged = shadow.diverged or earlier_judgement.now == "allowed"
            return
        declared_level = self._find_declared_level(shadow, event.tool, event.level)
        spec = ToolSpec(name=event.tool, description="", schema=b"", level=declared_level)
        cap = self._caps.get(event.call)
        brake = cast("ProvenanceCheck | None", shadow.recorded_brake(event.flaws))
        call = Call(event.call, event.tool, self._arguments(stored), provenance_check=brake)
        usd = 0 if cap is None else cap.amount
        judgement = self._judge_call(shadow, call, spec, event.phase or shadow.phase, "", usd, own=False)
        if judgement is not None:
            self._record(shadow, stored, "call", event.tool, "refused", judgement)

    def _judge_call(
        self, shadow: _Shadow, call: Call, spec: ToolSpec, phase: str, digest: str, usd: int, *, own: bool
    ) -> _Judgement | None:
        if not any(call.tool in each.tools for each in shadow.policy.policies):
            self._unnamed[call.tool] += call.id not in self._judgements
        context = shadow.context(phase, has_runtime_grants=own)
        if context is None or not call.arguments or MASK in call.arguments:
            reason = NO_PHASE if context is None else ERASED if not call.arguments else MASKED
            self._unjudged[reason] += 1
            return None
        tool = self._tools.get(spec)
        if tool is None:
            tool = self._tools[spec] = cast("Tool", _RecordedTool(spec))
        request = prepare_call(context, call, tool, self._rows.now, usd, tuple(self._rows.rules.values())).request
        if request.approval is not None and digest:
            request = msgspec.structs.replace(
                request, approval=msgspec.structs.replace(request.approval, digest=digest)
            )
        judgement = _read_drafts(judge_call(request, self._rows))
        self._judgements[call.id] = judgement
        return judgement

    def _judge_started_request(self, shadow: _Shadow, stored: Stored, event: RequestStarted) -> bool:
        if self._has_stopped(shadow, event.request):
            return True
        usd = _sum_held_usd(event.legs)
        judgement = self._judge_request(shadow, event, usd, event.max_output_tokens)
        if judgement is None:
            return False
        self._record(shadow, stored, "request", event.model, "allowed", judgement)
        if judgement.now == "refused" and judgement.scope and event.purpose == "turn":
            shadow.is_stopped = True
        return self._fold_policy_outcome(shadow, stored, event.request, judgement)

    def _judge_refused_request(self, shadow: _Shadow, stored: Stored, event: RequestRefused) -> None:
        cap = self._caps.get(event.request)
        if shadow.is_stopped or event.outcome in POLICY_INDEPENDENT_OUTCOMES or (cap is not None and cap.unit != "usd"):
            return
        judgement = self._judge_request(shadow, event, 0 if cap is None else cap.amount, 1)
        if judgement is not None:
            self._record(shadow, stored, "request", event.model, "refused", judgement)

    def _judge_request(
        self, shadow: _Shadow, event: RequestStarted | RequestRefused, usd: int, output: int
    ) -> _Judgement | None:
        context = shadow.context(shadow.phase, has_runtime_grants=True)
        if context is None:
            self._unjudged[NO_PHASE] += 1
            return None
        rates, input_tokens = self._find_rates(shadow.prices, event.model, usd, output)
        attempt = ModelAttempt(
            request=event.request,
            model=event.model,
            purpose=event.purpose,
            spender=context.spender,
            caps=context.caps,
            now=self._rows.now,
            rates=rates,
            input_tokens=input_tokens,
            max_output_tokens=output,
            min_output_tokens=min(output, shadow.policy.min_output_tokens),
            halts=context.halts,
            reserve=context.reserve,
            flaw=find_model_flaw(context, event.model),
            observe=shadow.policy.observe,
        )
        return _read_drafts(judge_attempt(attempt, self._rows))

    def _find_rates(self, prices: Prices, model: str, usd: int, output: int) -> tuple[ModelPrices, int]:
        """Return a model's prices and the input tokens of a hold; if prices have changed, the hold itself and 0."""
        if not usd:
            return _RecordedBound(0), 0
        rates, at = prices.find(ModelName.parse(model)), self._rows.now
        if isinstance(rates, Unpriced):
            return _RecordedBound(usd), 0
        low, high = _bracket_input(rates, usd, output, at)
        while low < high:
            middle = (low + high) // 2
            if rates.bound(middle, output, at) < usd:
                low = middle + 1
            else:
                high = middle
        return (rates, low) if rates.bound(low, output, at) == usd else (_RecordedBound(usd), 0)

    def _has_stopped(self, shadow: _Shadow, effect: str) -> bool:
        """Return true if the session would have ended before this effect. Its cost then counts as not spent."""
        if shadow.is_stopped:
            self._after += effect not in self._judgements
            self._costly[effect] = shadow
        return shadow.is_stopped

    def _fold_policy_outcome(self, shadow: _Shadow, stored: Stored, effect: str, judgement: _Judgement) -> bool:
        """Fold what the policy under test would have written. Return false if the recorded event is to be folded."""
        if judgement.now == "refused":
            self._costly[effect] = shadow
            return True
        if judgement.intent is None or isinstance(judgement.intent, DecisionAsked) != (
            stored.kind == DecisionAsked.KIND
        ):
            return False
        self._rows.apply(msgspec.structs.replace(stored, event=judgement.intent))
        return True

    def _record(
        self,
        shadow: _Shadow,
        stored: Stored,
        kind: Literal["call", "request"],
        name: str,
        recorded_verdict: Verdict,
        judgement: _Judgement,
    ) -> None:
        self._decisions += 1
        if judgement.now == recorded_verdict:
            return
        line = BacktestLine(
            at=stored.at,
            session=shadow.session,
            seq=stored.seq,
            kind=kind,
            name=name,
            then=recorded_verdict,
            now=judgement.now,
            sentence=judgement.sentence,
            scope=judgement.scope,
            after=shadow.diverged,
        )
        if shadow.diverged:
            self._after += 1
        else:
            self._changed[f"{recorded_verdict} → {judgement.now}"] += 1
        self._differing += 1
        self._loosened_count += line.loosened
        self._refused_count += judgement.now == "refused"
        lines = self._looser if line.loosened else self._stricter
        if len(lines) < self._max_lines:
            lines.append(line)
        shadow.diverged = shadow.diverged or "refused" in (recorded_verdict, judgement.now)

    def _find_declared_level(self, shadow: _Shadow, tool: str, level: Level) -> Level:
        """Return the lowest declared level that the recorded policy turns into the recorded level of a tool."""
        for declared in LEVELS:
            if shadow.recorded.rule(tool, declared).level == level:
                if declared != level:
                    self._raised.add(tool)
                return declared
        return level

    def _arguments(self, stored: Stored) -> bytes:
        if stored.body is None and stored.blob is not None:
            return self._view.get(stored.blob) or b""
        return stored.body or b""

    def _price(self, line: BacktestLine) -> BacktestLine:
        """Set `not_spent_usd` on the line of the first cap that a session would have reached."""
        shadow = self._sessions[line.session]
        if not shadow.is_stopped or line.after or not line.scope:
            return line
        return msgspec.structs.replace(line, not_spent_usd=micros_to_usd(shadow.not_spent))

    def result(self) -> Backtest:
        lines = [self._price(line) for line in (*self._looser, *self._stricter)[: self._max_lines]]
        order = sorted(lines, key=lambda line: (not line.loosened, line.after, line.at))
        notes = [
            f"The declared level of {tool} is not recorded, because the policy raised it. The lowest is assumed."
            for tool in sorted(self._raised)
        ]
        return Backtest(
            agent=self._agent,
            sessions=self._event_count,
            decisions=self._decisions,
            lines=tuple(order),
            differing=self._differing,
            loosened=self._loosened_count,
            refused=self._refused_count,
            changed=dict(self._changed.most_common()),
            after=self._after,
            diverged=sum(each.diverged or each.is_stopped for each in self._sessions.values()),
            stopped=sum(each.is_stopped for each in self._sessions.values()),
            not_spent=sum(each.not_spent for each in self._sessions.values()),
            unjudged=dict(self._unjudged.most_common()),
            unnamed=dict(self._unnamed.most_common()),
            notes=tuple(notes),
        )


def _sum_held_usd(legs: Sequence[Leg]) -> int:
    return next((leg.amount for leg in legs if leg.unit == "usd"), 0)


def _bracket_input(rates: ModelPrices, usd: int, output: int, at: int) -> tuple[int, int]:
    """Return bounds of the input that a hold was made for. They are close, because most prices are linear."""
    base_usd, probe_usd = rates.bound(0, output, at), rates.bound(PRICE_PROBE, output, at)
    if probe_usd > base_usd:
        guess = (usd - base_usd) * PRICE_PROBE // (probe_usd - base_usd)
        low, high = max(0, guess - 2), guess + 2
        if (not low or rates.bound(low, output, at) < usd) and rates.bound(high, output, at) >= usd:
            return low, high
    return 0, MAX_INPUT_TOKENS


def _read_drafts(drafts: Sequence[Draft]) -> _Judgement:
    """Read the judgement from a judge's drafts. No drafts mean that other holds must settle first."""
    scope = next(
        (
            f"{draft.event.scope} {draft.event.window}".strip()
            for draft in drafts
            if isinstance(draft.event, CostCapReached)
        ),
        "",
    )
    event = drafts[-1].event if drafts else None
    match event:
        case CallRefused() | RequestRefused():
            return _Judgement("refused", event.sentence, scope)
        case DecisionAsked():
            return _Judgement("asked", "; ".join(event.reasons) or f"{event.name} is {event.level}.", intent=event)
        case CallStarted() | RequestStarted():
            return _Judgement("allowed", intent=event)
        case _:
            return _Judgement("allowed")


class RecordedUse(msgspec.Struct, frozen=True):
    """The peak use, in an agent's recorded sessions, of everything that a policy can bound.

    Amounts are in micro-dollars and include what was held at the time. `attempts` are the most attempts of a tool
    within an hour, counted as its rate limit counts them.
    """

    sessions: int
    session_usd: int
    day_usd: int
    tools: Mapping[str, tuple[str, ...]]
    attempts: Mapping[str, int]
    models: tuple[str, ...]
    reserve: float


def measure_use(view: StoreView, agent: str, *, since: int = 0) -> RecordedUse:
    """Measure the peaks of an agent's recorded sessions."""
    use = _UseFold(view, agent, since)
    for stored in read_in_order(view):
        use.apply(stored)
    return use.result()


class _UseFold:
    def __init__(self, view: StoreView, agent: str, since: int) -> None:
        self._view, self._agent, self._since = view, agent, since
        self._rows = RowFold()
        self._policies: dict[str, ResolvedPolicy | None] = {}
        self._phases: dict[str, str] = {}
        self._sessions: dict[str, ResolvedPolicy | None] = {}
        self._peaks = {"session": 0, "day": 0}
        self._tools: dict[str, set[str]] = {}
        self._slices: dict[str, Counter[int]] = {}
        self._models: set[str] = set()

    def apply(self, stored: Stored) -> None:
        self._rows.apply(stored)
        event, session = stored.event, parse_session_id(StreamId(stored.stream)) or ""
        if isinstance(event, SessionStarted) and event.agent == self._agent and stored.at >= self._since:
            self._begin(event)
        if session not in self._sessions:
            return
        match event:
            case PhaseEntered():
                self._phases[session] = event.phase
            case RequestStarted():
                self._models.add(event.model)
                self._weigh(event.legs)
            case CallStarted():
                self._weigh(event.legs)
                self._count_call(event, self._sessions[session], event.phase or self._phases[session], stored.at)
            case _:
                pass

    def _begin(self, event: SessionStarted) -> None:
        if event.definition not in self._policies:
            recorded_policy = read_policy(self._view, event.definition)
            self._policies[event.definition] = recorded_policy and recorded_policy.policy
        policy = self._sessions[event.session] = self._policies[event.definition]
        self._phases[event.session] = policy.phases[0].name if policy else "work"

    def _weigh(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            kind, window = leg.scope.partition(":")[0], leg.window.partition("/")[0]
            name = "session" if kind == "session" and not leg.window else window if kind == "agent" else ""
            if leg.unit == "usd" and name in self._peaks:
                row = budget_row(self._rows, leg)
                self._peaks[name] = max(self._peaks[name], row.spent + row.held)

    def _count_call(self, event: CallStarted, policy: ResolvedPolicy | None, phase: str, at: int) -> None:
        if policy is not None and not any(
            configured_phase.name == phase and configured_phase.grants_tool(event.tool)
            for configured_phase in policy.phases
        ):
            return
        self._tools.setdefault(phase, set()).add(event.tool)
        if event.purpose == "turn":
            self._slices.setdefault(event.tool, Counter())[at // (HOUR // RATE_SLICES)] += 1

    def result(self) -> RecordedUse:
        return RecordedUse(
            sessions=len(self._sessions),
            session_usd=self._peaks["session"],
            day_usd=self._peaks["day"],
            tools={phase: tuple(sorted(tools)) for phase, tools in self._tools.items()},
            attempts={tool: _count_peak_hour(slices) for tool, slices in sorted(self._slices.items())},
            models=tuple(sorted(self._models)),
            reserve=max((each.reserve_cost_fraction for each in self._policies.values() if each), default=0.0),
        )


def _count_peak_hour(slices: Mapping[int, int]) -> int:
    """Return the most attempts in any hour, summed over the slices that a rate limit counts together."""
    return max(
        sum(count for number, count in slices.items() if last_slice - RATE_SLICES <= number <= last_slice)
        for last_slice in slices
    )
