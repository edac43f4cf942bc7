"""Policy backtest: judge every recorded call and request again, under another policy.

The events of the whole store are folded in the order of their commits, through the real projections and the real
judges. What the new policy admits is folded as that policy holds it, with the costs that were recorded; what it refuses
costs nothing. Nothing acts, no clock is read, and no network is used.

A question is assumed to be answered as it was. A session that the new policy would have stopped at a cap goes no
further; one in which it would have refused a call, or admitted a refused one, would have gone another way: what follows
is judged, but counted apart.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from halter.core import events as ev
from halter.core.agent_spec import AnyTrigger, inherit_trigger_caps
from halter.core.codec import decode
from halter.core.ids import Digest, StreamId, session_of
from halter.core.money import ZERO_USD, Cap, Leg, Usd, micros_to_usd
from halter.core.ports import Draft, Stored
from halter.core.provenance import Flaw
from halter.core.rows import DecisionRow, RuleRow
from halter.core.spec import Phase, ProvenanceMode, ResolvedPolicy
from halter.core.tools import LEVELS, SERVER_SEPARATOR, Level, Tool, ToolSpec, Valid
from halter.core.usage import ModelName, ModelPrices, RequestExtras, Unpriced, Usage
from halter.core.vocabulary import Outcome, R, Row
from halter.guard.brake import ActiveMode, SessionBrake, choose_provenance_mode
from halter.guard.guard import REDACTION_MARK
from halter.guard.judge import judge_call
from halter.guard.judge_request import ModelAttempt, judge_attempt
from halter.guard.prepare import Call, SessionContext, find_model_flaw, prepare_call
from halter.journal.engine import StoreView
from halter.journal.rebuild import RowFold
from halter.models.providers import Prices
from halter.runtime.session_builder import TriggerRecord, grant_phase_tools

Standing = Literal["allowed", "asked", "refused"]
"""What becomes of a call or a request; one that waits for other holds is allowed."""

RANKS: Final[Mapping[Standing, int]] = {"refused": 0, "asked": 1, "allowed": 2}

FIXED: Final[frozenset[Outcome]] = frozenset(("unknown_tool", "invalid_arguments", "quarantined", "external_halt"))
"""Refusals that no policy decides."""

MAX_LINES: Final = 10_000
"""Changed decisions that are listed; all of them are counted."""

PAGE: Final = 5_000
MOST_INPUT_TOKENS: Final = 1 << 24
PRICE_PROBE: Final = 1_000_000
MASK: Final = REDACTION_MARK.encode()

ERASED: Final = "Its arguments were erased."
MASKED: Final = "Its arguments hold a masked secret."
NO_DEFINITION: Final = "The definition of its session was not kept, or by another version of Halter."
NO_PHASE: Final = "The policy has no such phase."


class BacktestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that the other policy would have made differently.

    `scope` is that of the cap it would have met, and `not_spent_usd` what its session spent from there on. With
    `after`, its session had gone another way before.
    """

    at: int
    session: str
    seq: int
    kind: Literal["call", "request"]
    name: str
    then: Standing
    now: Standing
    sentence: str = ""
    scope: str = ""
    not_spent_usd: Usd = ZERO_USD
    after: bool = False

    @property
    def loosened(self) -> bool:
        return RANKS[self.now] > RANKS[self.then]


class Backtest(msgspec.Struct, frozen=True, kw_only=True):
    """What another policy would have decided over the recorded sessions of an agent.

    `changed` counts decisions by `then → now`, `after` those in sessions that had gone another way before, `loosened`
    and `refused` all of them. Of `lines` there are at most so many, the looser ones before all others. `not_spent` is
    what was spent, in micro-dollars, on what the policy would not have admitted. `unjudged` counts by reason,
    `unnamed` the calls by tool that no rule of the policy names.
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
"""The policy under test, given the one that a session was recorded with."""


class RecordedPolicy(msgspec.Struct, frozen=True):
    """The policy that a session was recorded with; one without a model `plays` a playbook, and has no last words."""

    policy: ResolvedPolicy
    plays: bool


class _RecordedTool:
    """A tool as the journal knows it: its arguments were valid then, and it cannot be run."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    def validate(self, arguments: bytes) -> Valid:
        return Valid(msgspec.json.decode(arguments, type=dict[str, Any]), arguments)


class _RecordedBound:
    """The hold of a request whose model has no price any more: the same for an answer of any length."""

    def __init__(self, usd: int) -> None:
        self._usd = usd

    def cost(self, usage: Usage, at: int) -> int:
        return self._usd

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        return self._usd

    def max_output_that_fits(self, input_tokens: int, budget_micros: int, at: int, max_wait: int = 0) -> int:
        return max_wait if self._usd <= budget_micros else 0

    def covering(self, extras: RequestExtras) -> "_RecordedBound":
        return self


class _RecordedBrake(NamedTuple):
    """The injection brake as it judged then: the flaws that it found, under the mode of the policy under test."""

    mode: ActiveMode
    flaws: tuple[Flaw, ...]
    locked: bool
    task: str = ""

    def judge(self, tool: str, canonical: bytes) -> tuple[Flaw, ...]:
        return self.flaws


class _ShadowRows(RowFold):
    """The rows as the other policy makes them."""

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
        self, started: ev.SessionStarted, recorded: RecordedPolicy, policy: ResolvedPolicy, prices: Prices
    ) -> None:
        self.session, self.agent = started.session, started.agent
        self.recorded, self.plays, self.policy, self.prices = recorded.policy, recorded.plays, policy, prices
        self.trigger, self.grants = started.trigger, started.grants
        self.phase = recorded.policy.phases[0].name
        self.mode: ProvenanceMode = choose_provenance_mode(policy)
        self.last_words = self.diverged = self.is_stopped = self.locked = False
        self.not_spent = 0
        self._contexts: dict[tuple[str, bool, bool], SessionContext] = {}

    @cached_property
    def digest(self) -> str:
        return self.recorded.digest()

    def context(self, phase: str, *, own: bool) -> SessionContext | None:
        """The context of a phase; with `own` it also grants what the runtime itself grants."""
        key = (phase, own, self.last_words)
        if key not in self._contexts:
            found = next((each for each in self.policy.phases if each.name == phase), None)
            if found is None:
                return None
            self._contexts[key] = self._make_context(Phase(phase, None) if own else found)
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
            kept_usd=round(cap * policy.reserve_cost_fraction) if keeps else 0,
            kept_tokens=policy.reserve_tokens if keeps else 0,
        )

    def recorded_brake(self, flaws: tuple[Flaw, ...]) -> "_RecordedBrake | None":
        mode = self.mode
        return None if not flaws or mode == "off" else _RecordedBrake(mode, flaws, self.locked)

    def is_granted_by_runtime(self, tool: str, phase: str) -> bool:
        """Whether a call was admitted then that no grant of its phase named: the runtime grants its own verbs."""
        return not any(each.name == phase and each.grants_tool(tool) for each in self.recorded.phases)


class _Judgement(msgspec.Struct, frozen=True):
    now: Standing
    sentence: str = ""
    scope: str = ""
    intent: ev.AnyEvent | None = None


def backtest(
    view: StoreView,
    agent: str,
    change: PolicyChange,
    *,
    since: int = 0,
    replaces_fleet: bool = False,
    most_lines: int = MAX_LINES,
) -> Backtest:
    """Judge what an agent's sessions did since a moment again; `replaces_fleet` leaves the store's policy out."""
    test = _BacktestFold(view, agent, change, since, most_lines)
    for stored in read_in_order(view):
        if replaces_fleet and isinstance(stored.event, ev.FleetPolicyAdopted):
            continue
        test.apply(stored)
    return test.result()


def read_policy(view: StoreView, definition: str) -> RecordedPolicy | None:
    """Read the policy of a definition; None if it was not kept, or cannot be read by this version."""
    kept = view.get(Digest(definition)) if definition else None
    try:
        found = {} if kept is None else msgspec.json.decode(kept, type=dict[str, Any])
        policy = msgspec.convert(found.get("policy", found), ResolvedPolicy)
    except msgspec.MsgspecError:
        return None
    return RecordedPolicy(policy, plays="policy" not in found)


def read_in_order(view: StoreView) -> Iterator[Stored]:
    """Read all events in the order of their commits, with bodies where a judge needs them."""
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
    def __init__(self, view: StoreView, agent: str, change: PolicyChange, since: int, most_lines: int) -> None:
        self._view, self._agent, self._change, self._since = view, agent, change, since
        self._most_lines = most_lines
        self._rows = _ShadowRows()
        self._policies: dict[str, tuple[RecordedPolicy, ResolvedPolicy, Prices] | None] = {}
        self._triggers: dict[str, AnyTrigger] = {}
        self._sessions: dict[str, _Shadow] = {}
        self._tools: dict[ToolSpec, Tool] = {}
        self._judgements: dict[str, _Judgement] = {}
        self._caps: dict[str, ev.CostCapReached] = {}
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
            case ev.TriggerMade():
                self._learn_trigger(stored)
            case ev.SessionStarted() if event.agent == self._agent and stored.at >= self._since:
                self._begin(event)
            case _:
                pass
        shadow = self._sessions.get(session_of(StreamId(stored.stream)) or "")
        if shadow is None or not self._judge(shadow, stored):
            self._rows.apply(stored)

    def _learn_trigger(self, stored: Stored) -> None:
        if stored.body:
            trigger = cast("ev.TriggerMade", stored.event).trigger
            self._triggers[trigger] = msgspec.json.decode(stored.body, type=TriggerRecord).trigger()

    def _begin(self, started: ev.SessionStarted) -> None:
        self._event_count += 1
        if started.definition not in self._policies:
            kept = read_policy(self._view, started.definition)
            self._policies[started.definition] = kept and (kept, self._change(kept.policy), Prices(kept.policy.prices))
        known = self._policies[started.definition]
        if known is None:
            self._unjudged[NO_DEFINITION] += 1
            return
        recorded, policy, prices = known
        caps = policy.caps
        if started.trigger in self._triggers:
            caps = inherit_trigger_caps(caps, self._triggers[started.trigger])
        carved = next((leg.amount for leg in started.carved if leg.unit == "usd"), None)
        if started.bound and carved is not None:
            caps = msgspec.structs.replace(caps, session=Cap(carved))
        if caps is not policy.caps:
            policy = msgspec.structs.replace(policy, caps=caps)
        self._sessions[started.session] = _Shadow(started, recorded, policy, prices)

    def _judge(self, shadow: _Shadow, stored: Stored) -> bool:
        """Take an event of a session under test; True if it is folded, or must not be."""
        match stored.event:
            case ev.CostCapReached() as event:
                self._caps[event.refused] = event
            case ev.PhaseEntered() as event:
                shadow.phase = event.phase
            case ev.MessageAdded(reason="wrap_up"):
                shadow.last_words = True
            case ev.TurnStarted():
                shadow.last_words = False
            case ev.CallStarted() as event:
                return self._judge_started_call(shadow, stored, event)
            case ev.DecisionAsked(about="approval") as event:
                return self._judge_question(shadow, stored, event)
            case ev.CallRefused(staged=False) as event:
                self._judge_refused_call(shadow, stored, event)
            case ev.RequestStarted() as event:
                return self._judge_started_request(shadow, stored, event)
            case ev.RequestRefused() as event:
                self._judge_refused_request(shadow, stored, event)
            case ev.CallSettled(call=effect, charge=charge) | ev.RequestSettled(request=effect, charge=charge):
                if effect in self._costly and charge is not None:
                    self._costly[effect].not_spent += charge.usd
            case _:
                pass
        return False

    def _judge_started_call(self, shadow: _Shadow, stored: Stored, event: ev.CallStarted) -> bool:
        if self._has_stopped(shadow, event.call):
            return True
        before = self._judgements.get(event.call)
        if before is not None and before.now == "refused":
            self._costly[event.call] = shadow
            return True
        decided = self._rows.get(DecisionRow, event.decision) if event.decision else None
        if decided is not None and decided.verdict == "edit":
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
        own = shadow.is_granted_by_runtime(event.tool, phase)
        call = Call(
            event.call,
            event.tool,
            self._arguments(stored),
            event.purpose,
            event.parallel_group,
            brake=cast("SessionBrake | None", shadow.recorded_brake(event.flaws)),
            questioned=before is not None and before.now == "asked",
        )
        judgement = self._judge_call(shadow, call, spec, phase, event.digest, _sum_held_usd(event.legs), own=own)
        if judgement is None:
            return False
        if before is None:
            self._record(shadow, stored, "call", event.tool, "allowed", judgement)
        elif judgement.now == "refused":
            self._record(shadow, stored, "call", event.tool, "asked", judgement)
        return self._fold_policy_outcome(shadow, stored, event.call, judgement)

    def _judge_question(self, shadow: _Shadow, stored: Stored, event: ev.DecisionAsked) -> bool:
        if self._has_stopped(shadow, event.subject):
            return True
        level = event.level or "CONTROLLED"
        declared = self._find_declared_level(shadow, event.name, level)
        spec = ToolSpec(name=event.name, description="", schema=b"", level=declared)
        shown = self._arguments(stored).partition(b" ")[2].partition(b"\n")[0]
        call = Call(
            event.subject,
            event.name,
            shown,
            brake=cast("SessionBrake | None", shadow.recorded_brake(event.flaws)),
        )
        own = shadow.is_granted_by_runtime(event.name, shadow.phase)
        judgement = self._judge_call(shadow, call, spec, shadow.phase, event.digest, 0, own=own)
        if judgement is None:
            return False
        self._record(shadow, stored, "call", event.name, "asked", judgement)
        if judgement.now == "asked":
            return self._fold_policy_outcome(shadow, stored, event.subject, judgement)
        return True

    def _judge_refused_call(self, shadow: _Shadow, stored: Stored, event: ev.CallRefused) -> None:
        if shadow.is_stopped or event.outcome in FIXED:
            return
        before = self._judgements.get(event.call)
        if before is not None:
            # The question was answered with no, or not at all: without one the session goes another way.
            shadow.locked = shadow.locked or bool(event.flaws and event.decision and shadow.policy.locks)
            shadow.diverged = shadow.diverged or before.now == "allowed"
            return
        declared = self._find_declared_level(shadow, event.tool, event.level)
        spec = ToolSpec(name=event.tool, description="", schema=b"", level=declared)
        cap = self._caps.get(event.call)
        brake = cast("SessionBrake | None", shadow.recorded_brake(event.flaws))
        call = Call(event.call, event.tool, self._arguments(stored), brake=brake)
        usd = 0 if cap is None else cap.amount
        judgement = self._judge_call(shadow, call, spec, event.phase or shadow.phase, "", usd, own=False)
        if judgement is not None:
            self._record(shadow, stored, "call", event.tool, "refused", judgement)

    def _judge_call(
        self, shadow: _Shadow, call: Call, spec: ToolSpec, phase: str, digest: str, usd: int, *, own: bool
    ) -> _Judgement | None:
        if not any(call.tool in each.tools for each in shadow.policy.policies):
            self._unnamed[call.tool] += call.id not in self._judgements
        context = shadow.context(phase, own=own)
        if context is None or not call.arguments or MASK in call.arguments:
            why = NO_PHASE if context is None else ERASED if not call.arguments else MASKED
            self._unjudged[why] += 1
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

    def _judge_started_request(self, shadow: _Shadow, stored: Stored, event: ev.RequestStarted) -> bool:
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

    def _judge_refused_request(self, shadow: _Shadow, stored: Stored, event: ev.RequestRefused) -> None:
        cap = self._caps.get(event.request)
        if shadow.is_stopped or event.outcome in FIXED or (cap is not None and cap.unit != "usd"):
            return
        judgement = self._judge_request(shadow, event, 0 if cap is None else cap.amount, 1)
        if judgement is not None:
            self._record(shadow, stored, "request", event.model, "refused", judgement)

    def _judge_request(
        self, shadow: _Shadow, event: ev.RequestStarted | ev.RequestRefused, usd: int, output: int
    ) -> _Judgement | None:
        context = shadow.context(shadow.phase, own=True)
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
            kept=context.reserve,
            flaw=find_model_flaw(context, event.model),
            observe=shadow.policy.observe,
        )
        return _read_drafts(judge_attempt(attempt, self._rows))

    def _find_rates(self, prices: Prices, model: str, usd: int, output: int) -> tuple[ModelPrices, int]:
        """The prices of a model and the input that a hold was made for; the hold itself where prices have changed."""
        if not usd:
            return _RecordedBound(0), 0
        rates, at = prices.find(ModelName.parse(model)), self._rows.now
        if isinstance(rates, Unpriced):
            return _RecordedBound(usd), 0
        fewest, limit = _bracket_input(rates, usd, output, at)
        while fewest < limit:
            middle = (fewest + limit) // 2
            if rates.bound(middle, output, at) < usd:
                fewest = middle + 1
            else:
                limit = middle
        return (rates, fewest) if rates.bound(fewest, output, at) == usd else (_RecordedBound(usd), 0)

    def _has_stopped(self, shadow: _Shadow, effect: str) -> bool:
        """Whether the session would have ended before; what it did from there on is not spent."""
        if shadow.is_stopped:
            self._after += effect not in self._judgements
            self._costly[effect] = shadow
        return shadow.is_stopped

    def _fold_policy_outcome(self, shadow: _Shadow, stored: Stored, effect: str, judgement: _Judgement) -> bool:
        """Fold what the policy under test would have written; False folds what was recorded."""
        if judgement.now == "refused":
            self._costly[effect] = shadow
            return True
        if judgement.intent is None or isinstance(judgement.intent, ev.DecisionAsked) != (
            stored.kind == ev.DecisionAsked.KIND
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
        then: Standing,
        judgement: _Judgement,
    ) -> None:
        self._decisions += 1
        if judgement.now == then:
            return
        line = BacktestLine(
            at=stored.at,
            session=shadow.session,
            seq=stored.seq,
            kind=kind,
            name=name,
            then=then,
            now=judgement.now,
            sentence=judgement.sentence,
            scope=judgement.scope,
            after=shadow.diverged,
        )
        if shadow.diverged:
            self._after += 1
        else:
            self._changed[f"{then} → {judgement.now}"] += 1
        self._differing += 1
        self._loosened_count += line.loosened
        self._refused_count += judgement.now == "refused"
        lines = self._looser if line.loosened else self._stricter
        if len(lines) < self._most_lines:
            lines.append(line)
        shadow.diverged = shadow.diverged or "refused" in (then, judgement.now)

    def _find_declared_level(self, shadow: _Shadow, tool: str, level: Level) -> Level:
        """The lowest own level of a tool that the recorded policy turns into the recorded one."""
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
        """Say at the first cap that a session would have met what it did not spend from there on."""
        shadow = self._sessions[line.session]
        if not shadow.is_stopped or line.after or not line.scope:
            return line
        return msgspec.structs.replace(line, not_spent_usd=micros_to_usd(shadow.not_spent))

    def result(self) -> Backtest:
        lines = [self._price(line) for line in (*self._looser, *self._stricter)[: self._most_lines]]
        order = sorted(lines, key=lambda line: (not line.loosened, line.after, line.at))
        notes = [
            f"The own level of {tool} is not recorded, for the policy had raised it: the lowest is assumed."
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
    """Bounds of the input that a hold was made for; most prices are straight lines, which brings them close."""
    least, limit = rates.bound(0, output, at), rates.bound(PRICE_PROBE, output, at)
    if limit > least:
        guess = (usd - least) * PRICE_PROBE // (limit - least)
        low, high = max(0, guess - 2), guess + 2
        if (not low or rates.bound(low, output, at) < usd) and rates.bound(high, output, at) >= usd:
            return low, high
    return 0, MOST_INPUT_TOKENS


def _read_drafts(drafts: Sequence[Draft]) -> _Judgement:
    """Read what a judge decided; nothing written means that other holds must settle first."""
    scope = next(
        (
            f"{draft.event.scope} {draft.event.window}".strip()
            for draft in drafts
            if isinstance(draft.event, ev.CostCapReached)
        ),
        "",
    )
    last = drafts[-1].event if drafts else None
    match last:
        case ev.CallRefused() | ev.RequestRefused():
            return _Judgement("refused", last.sentence, scope)
        case ev.DecisionAsked():
            return _Judgement("asked", "; ".join(last.reasons) or f"{last.name} is {last.level}.", intent=last)
        case ev.CallStarted() | ev.RequestStarted():
            return _Judgement("allowed", intent=last)
        case _:
            return _Judgement("allowed")
