"""Prepare a call for the judge: everything that can be known before a row is locked.

What follows from the session's context alone is worked out once, as the terms of a tool or of a model, and again when
the context or a window changes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import force_setattr

from halter.core import money
from halter.core.clock import QUARTER
from halter.core.ids import session_stream
from halter.core.messages import AnonymizationPolicy, Model
from halter.core.money import Cap, Caps, RateLimit, ScopedCap, Spender, find_rate_limits, list_accounts, make_legs
from halter.core.project import BudgetKey, budget_key
from halter.core.provenance import Flaw
from halter.core.rows import HaltRow, RuleRow
from halter.core.spec import Phase, ResolvedPolicy, ToolPolicy
from halter.core.text import clean, to_body
from halter.core.tools import DOLLAR, Invalid, Tool, ToolSpec, Valid, find_secret_names
from halter.core.usage import PriceTable, runs_locally
from halter.core.vocabulary import Outcome, Purpose
from halter.guard.approvals import digest_approval, matches_rule, pins_places, read_standing_rule
from halter.guard.brake import SessionBrake, describe_flaw, explain_flaws, strip_flaws
from halter.guard.judge import (
    CallRequest,
    HaltKeys,
    RequiredApproval,
    Reserve,
    audit_of_policy,
    find_attempt_rate,
    find_tool_policy,
    list_halt_rows,
    needs_approval,
    needs_risk_assessment,
)
from halter.guard.judge_request import HoldTerms, ModelAttempt, compile_hold_terms
from halter.redaction.anonymize import find_placeholders
from halter.redaction.secrets import describe_missing_secrets

if TYPE_CHECKING:
    from halter.risk.risk import Risk

NO_CAPS: Final = Caps()


class Call(msgspec.Struct, frozen=True):
    """One tool call as requested; its id is also its idempotency key and the id of its hold.

    `edited` are a person's arguments instead of the model's. `at_most` shortens the tool's own timeout. With `goes_on`
    the caller continues the session at once, so the outcome may be written with what follows. `situation` tells what
    the agent was asked and what it is doing; only a prediction reads it. `decision` names the question about an
    earlier call with the same arguments, whose answer counts for this one. A call of a model has the `brake` of its
    session. One that a person was asked about is `questioned`: their answer counts, no matter what has changed since.
    `stage` says whether the end of the turn may be waited for before a person is asked, or has come.
    """

    id: str
    tool: str
    arguments: bytes
    purpose: Purpose = "turn"
    parallel_group: str = ""
    edited: bytes | None = None
    at_most: int | None = None
    goes_on: bool = False
    situation: Callable[[], str] = str
    decision: str = ""
    brake: SessionBrake | None = None
    questioned: bool = False
    stage: Literal["", "may", "over"] = ""

    @property
    def approval(self) -> str:
        """The id of the decision that this call needs, where it needs one."""
        return self.decision or f"{self.id}/approval"


class SessionContext(msgspec.Struct, frozen=True):
    """Whose session it is, its phase, and its policy.

    `secrets` are granted and set; `quarantined` tools wait for a person. `kept_usd` and `kept_tokens` are reserved for
    its last words. `tokens_per_hour` limits an autonomous session. `anonymize` says what is hidden from its models,
    `rates` how fast all sessions together may call them. `askers` are the caps of the agents that had it begun.
    """

    session: str
    agent: str
    phase: Phase
    policy: ResolvedPolicy
    policy_digest: str
    trigger: str = ""
    quarantined: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()
    kept_usd: int = 0
    kept_tokens: int = 0
    tokens_per_hour: int | None = None
    anonymize: AnonymizationPolicy | None = None
    rates: Mapping[str, RateLimit] = {}
    askers: tuple[ScopedCap, ...] = ()
    # It stands like this for many steps: what each of them asks for is worked out once.
    caps: Caps = NO_CAPS
    scopes: tuple[str, ...] = ()
    _request: "RequestTerms | None" = None
    _calls: "dict[str, ToolTerms] | None" = None

    def __post_init__(self) -> None:
        """Work out what follows from the context alone. A changed copy keeps nothing of the one before it."""
        force_setattr(self, "caps", self.caps_with_reserve.minus(self.kept_usd, self.kept_tokens))
        force_setattr(self, "scopes", (session_stream(self.session), *_list_upper_scopes(self.trigger, self.agent)))
        force_setattr(self, "_request", None)
        force_setattr(self, "_calls", None)

    @property
    def halts(self) -> HaltKeys:
        """The rows that halt it; those above the session are shared."""
        return ((HaltRow, self.scopes[0]), *_list_upper_halts(self.trigger, self.agent))

    @property
    def reserve(self) -> Reserve:
        return Reserve(self.session, self.kept_usd, self.kept_tokens)

    @property
    def spender(self) -> Spender:
        return Spender(self.session, self.agent, self.trigger, self.askers)

    @property
    def caps_with_reserve(self) -> Caps:
        """The caps with what is reserved for last words."""
        if self.tokens_per_hour is None:
            return self.policy.caps
        return msgspec.structs.replace(self.policy.caps, tokens_per_hour=self.tokens_per_hour)

    def terms_of_tool(self, spec: ToolSpec, now: int) -> "ToolTerms":
        """What calls of a tool have in common here, worked out once for a quarter of an hour."""
        known = None if self._calls is None else self._calls.get(spec.name)
        if known is None or known.spec is not spec or known.quarter != now // QUARTER:
            known = compile_tool_terms(self, spec, now // QUARTER)
            force_setattr(self, "_calls", {**(self._calls or {}), spec.name: known})
        return known

    def terms_of_model(self, model: Model, prices: PriceTable, now: int) -> "RequestTerms":
        """What requests to a model have in common here, worked out once for a quarter of an hour."""
        known = self._request
        if known is None or known.model is not model or known.quarter != now // QUARTER:
            known = compile_request_terms(self, model, prices, now // QUARTER)
            force_setattr(self, "_request", known)
        elif not known.hold.keys:
            force_setattr(known.hold, "keys", tuple(map(budget_key, known.hold.legs)))
            force_setattr(known, "halts", self.halts)
        return known

    def find_caps(self, now: int) -> tuple[Sequence[BudgetKey], Sequence[int | None]]:
        """The rows of its accounts, and the caps of these with what is reserved for last words."""
        known = self._request
        if known is None or known.quarter != now // QUARTER:
            legs = make_legs(self.caps_with_reserve, self.spender, now, usd=1, tokens=1)
            return [*map(budget_key, legs)], [leg.cap for leg in legs]
        return known.hold.keys or [*map(budget_key, known.hold.legs)], known.caps

    def narrow(self, usd: int, spent: int) -> "SessionContext":
        """Narrow the context: after `spent`, spend at most `usd` more."""
        caps = self.policy.caps
        own, limit = caps.session.max_cost_usd, spent + usd + self.kept_usd
        cap = Cap(limit if own is None else min(own, limit), caps.session.per)
        policy = msgspec.structs.replace(self.policy, caps=msgspec.structs.replace(caps, session=cap))
        return msgspec.structs.replace(self, policy=policy)


@lru_cache(maxsize=256)
def _list_upper_scopes(trigger: str, agent: str) -> tuple[str, ...]:
    """The scopes above a session, shared by all sessions of an agent."""
    return (*((f"trigger:{trigger}",) if trigger else ()), f"agent:{agent}", "fleet")


@lru_cache(maxsize=256)
def _list_upper_halts(trigger: str, agent: str) -> HaltKeys:
    return list_halt_rows(_list_upper_scopes(trigger, agent))


class ToolTerms(msgspec.Struct, frozen=True, gc=False):
    """What a session's calls of one tool have in common while its context and the windows stay.

    `usd` is what its calls cost at most, if it is declared. `asks` says whether a person must agree even at the lowest
    risk. `base` is a call without what is its own.
    """

    spec: ToolSpec
    quarter: int
    rule: ToolPolicy
    usd: int
    flaw: tuple[Outcome, str] | None
    assessed: bool
    asks: bool
    base: CallRequest


def compile_tool_terms(context: SessionContext, spec: ToolSpec, quarter: int) -> ToolTerms:
    policy, caps, phase, left_out = context.policy, context.caps, context.phase, context.quarantined
    source = (quarter, context.agent, context.trigger, context.askers, caps, phase, left_out)
    # As with a request: cached with the policy, for all sessions of the agent.
    shared: tuple[object, dict[str, ToolTerms]] | None = vars(policy).get("tool_terms")
    if shared is None or shared[0] != source:
        shared = vars(policy)["tool_terms"] = (source, dict[str, ToolTerms]())
    terms = shared[1].get(spec.name)
    if terms is None or terms.spec is not spec:
        terms = shared[1][spec.name] = _compile_shared_terms(context, spec, quarter)
    base, stream = terms.base, context.scopes[0]
    legs, accounts = money.assign_legs(base.legs, stream), money.assign_legs(base.accounts, stream)
    own = {"session": context.session, "halts": context.halts, "kept": context.reserve}
    return msgspec.structs.replace(terms, base=msgspec.structs.replace(base, legs=legs, accounts=accounts, **own))


def _compile_shared_terms(context: SessionContext, spec: ToolSpec, quarter: int) -> ToolTerms:
    policy, nobody = context.policy, msgspec.structs.replace(context.spender, session="")
    rule = find_tool_policy(policy, spec)
    usd = 0 if spec.cost == "learned" else spec.cost
    base = CallRequest(
        call="",
        tool=clean(spec.name)[:200],
        arguments=b"",
        session="",
        agent=context.agent,
        now=quarter * QUARTER,
        flaw=find_tool_flaw(context, spec),
        phase=context.phase.name,
        level=rule.level,
        effect=spec.effect,
        idempotent=spec.idempotent,
        egress=spec.egress,
        audit=audit_of_policy(rule),
        rate=find_attempt_rate(rule),
        legs=make_legs(context.caps, nobody, quarter * QUARTER, usd=usd),
        accounts=list_accounts(policy.caps, nobody, quarter * QUARTER),
        observe=policy.observe,
    )
    asks = needs_approval(rule, policy.mode, None)
    return ToolTerms(spec, quarter, rule, usd, base.flaw, needs_risk_assessment(rule), asks, base)


class RequestTerms(msgspec.Struct, frozen=True):
    """What a session's requests to one model have in common while its context and the windows stay.

    `base` is an attempt without what is its own or its session's. From a `local` model nothing is hidden: what it is
    sent stays here. `caps` are those of its hold with what is kept for last words; `halts` are kept as its keys are.
    """

    model: Model
    quarter: int
    base: ModelAttempt
    local: bool
    spender: Spender
    kept: Reserve
    hold: HoldTerms
    caps: tuple[int | None, ...]
    halts: HaltKeys = ()


def compile_request_terms(context: SessionContext, model: Model, prices: PriceTable, quarter: int) -> RequestTerms:
    policy, caps, spender = context.policy, context.caps, context.spender
    source = (model, prices, quarter, context.agent, context.trigger, context.askers, caps, context.rates)
    # Cached with the policy that it follows from, for all sessions of the agent.
    shared: tuple[object, RequestTerms] | None = vars(policy).get("request_terms")
    if shared is None or shared[0] != source:
        name = str(model.name)
        base = ModelAttempt(
            request="",
            model=name,
            spender=Spender("", context.agent),
            caps=caps,
            now=quarter * QUARTER,
            rates=prices.find(model.name, model.base_url),
            input_tokens=0,
            max_output_tokens=0,
            min_output_tokens=policy.min_output_tokens,
            flaw=find_model_flaw(context, name),
            observe=policy.observe,
            paces=find_rate_limits(context.rates, name),
        )
        nobody = msgspec.structs.replace(spender, session="")
        hold, local = compile_hold_terms(caps, nobody, quarter), runs_locally(model.name, model.base_url)
        whole = tuple([leg.cap for leg in compile_hold_terms(context.caps_with_reserve, nobody, quarter).legs])
        terms = RequestTerms(model, quarter, base, local, nobody, context.reserve, hold, whole)
        shared = vars(policy)["request_terms"] = (source, terms)
    terms = shared[1]
    return msgspec.structs.replace(
        terms, spender=spender, kept=context.reserve, hold=terms.hold.for_stream(context.scopes[0])
    )


def find_model_flaw(context: SessionContext, model: str) -> tuple[Outcome, str] | None:
    policy = context.policy
    if policy.allows_model(model):
        return None
    allowed = ", ".join(policy.allowed_models or ()) or "none"
    return ("disabled", f"{model} may not be asked by {context.agent}: `allowed_models` has {allowed}.")


class PreparedCall(msgspec.Struct, frozen=True):
    request: CallRequest
    tool: Tool | None
    arguments: Valid | None
    rule: ToolPolicy | None = None


def prepare_call(
    context: SessionContext, call: Call, tool: Tool | None, now: int, usd: int, rules: Sequence[RuleRow] = ()
) -> PreparedCall:
    """Prepare a call; `usd` is its maximum cost, `rules` are the standing approvals."""
    if tool is None:
        flaw: tuple[Outcome, str] = ("unknown_tool", f"There is no tool {clean(call.tool)[:80]!r}.")
        return PreparedCall(_make_unknown_request(context, call, now, flaw), None, None)
    terms = context.terms_of_tool(tool.spec, now)
    meant = tool.validate(call.arguments)
    if not isinstance(meant, Valid):
        return _prepare_invalid(context, terms, call, tool, meant, now)
    arguments = meant if call.edited is None else tool.validate(call.edited)
    if not isinstance(arguments, Valid):
        return _prepare_invalid(context, terms, call, tool, arguments, now)
    risk = _assess(terms.spec, arguments) if terms.assessed else None
    level, approval, brake = risk.level if risk else None, None, call.brake
    flaws = () if brake is None else brake.judge(call.tool, meant.canonical)
    brakes, untrusted, staged = bool(flaws) and brake is not None and brake.mode != "observe", "", False
    if terms.asks or level == "CRITICAL" or brakes or call.questioned:
        narrow = flaws if brakes else ()
        unruled = level == "CRITICAL" or terms.rule.approvers > 1
        agreed = "" if unruled else _find_agreed_rule(rules, context, terms.spec, arguments, now, narrow)
        approval = _make_required_approval(context, call, meant, arguments, risk, agreed)
        if terms.rule.approvers > 1:
            approval = msgspec.structs.replace(approval, approvers=terms.rule.approvers)
        if brakes and brake is not None and not agreed:
            untrusted = "" if call.questioned else _explain_refusal(brake, flaws)
            alone = not (untrusted or terms.asks or level == "CRITICAL" or call.questioned)
            staged = alone and call.stage == "may" and brake.can_wait(call.tool)
            untrusted = STAGED if staged else untrusted
            approval = _add_flaws(context, approval, brake, call.tool, flaws)
    unfit = _find_missing_secret(context, arguments) if DOLLAR in arguments.canonical else None
    if unfit is None and context.anonymize is not None:
        unfit = _find_unknown_placeholder(arguments)
    own: dict[str, Any] = {}
    if level is not None:
        own["risk"] = level
    if approval is not None:
        own["approval"] = approval
    if usd != terms.usd:
        own["legs"] = make_legs(context.caps, context.spender, now, usd=usd)
    if arguments.writes:
        own["writes"] = arguments.writes
    if unfit is not None:
        own["flaw"] = _pick_flaw(context, terms, unfit)
    if flaws:
        own |= {"flaws": strip_flaws(flaws), "untrusted": untrusted, "staged": staged}
    return PreparedCall(_fill_request(terms, call, arguments.canonical, now, own), tool, arguments, terms.rule)


STAGED: Final = (
    "A person is asked about this call at the end of the turn, together with others like it, and it is made if they "
    "agree. Go on with what does not need it."
)


def _explain_refusal(brake: SessionBrake, flaws: Sequence[Flaw]) -> str:
    """Why a flawed call is refused instead of asked about, if it is."""
    found = "; ".join(describe_flaw(flaw) for flaw in flaws)
    if brake.mode == "strict":
        return f"The policy refuses a call with a value that no trusted place has said ({found})."
    if brake.locked:
        return f"A person denied an earlier call like it in this session, so they are not asked again ({found})."
    return ""


def _add_flaws(
    context: SessionContext, need: RequiredApproval, brake: SessionBrake, tool: str, flaws: Sequence[Flaw]
) -> RequiredApproval:
    """Put all flaws of a call into its one question."""
    question = explain_flaws(context.agent, tool, flaws, brake)
    return msgspec.structs.replace(
        need, shown=need.shown + b"\n" + to_body(question), reasons=(*need.reasons, *map(describe_flaw, flaws))
    )


def _pick_flaw(context: SessionContext, terms: ToolTerms, unfit: tuple[Outcome, str]) -> tuple[Outcome, str]:
    """Name what the policy forbids first; but observing waives that, and what cannot be run must not be waived."""
    return unfit if context.policy.observe else terms.flaw or unfit


def _prepare_invalid(
    context: SessionContext, terms: ToolTerms, call: Call, tool: Tool, invalid: Invalid, now: int
) -> PreparedCall:
    flawed = {"flaw": _pick_flaw(context, terms, ("invalid_arguments", invalid.sentence)), "legs": ()}
    return PreparedCall(_fill_request(terms, call, call.arguments, now, flawed), tool, None, terms.rule)


def _assess(spec: ToolSpec, arguments: Valid) -> "Risk":
    # Its tables of programs and shells take as long to import as the rest of the guard; many tools need none.
    from halter.risk.risk import assess_risk

    return assess_risk(spec, arguments)


def _find_agreed_rule(
    rules: Sequence[RuleRow],
    context: SessionContext,
    spec: ToolSpec,
    arguments: Valid,
    now: int,
    flaws: Sequence[Flaw] = (),
) -> str:
    """The rule that answers for a person; one for a flawed call must name the flawed places."""
    for row in rules:
        rule = read_standing_rule(row)
        matches = row.live(now) and matches_rule(rule, spec, arguments, context.session, context.agent, now)
        if matches and (not flaws or pins_places(rule, flaws)):
            return row.rule
    return ""


def find_tool_flaw(context: SessionContext, spec: ToolSpec) -> tuple[Outcome, str] | None:
    """R6 for the tool itself: enabled, and granted in this phase."""
    if spec.name in context.policy.disabled:
        return ("disabled", f"{spec.name} is disabled.")
    if spec.name in context.quarantined:
        return ("quarantined", f"{spec.name} has changed since a person agreed to it; it waits for them.")
    if not context.phase.grants_tool(spec.name):
        return ("tool_not_granted", f"{spec.name} is not granted in the phase {context.phase.name}.")
    return None


def _fill_request(terms: ToolTerms, call: Call, arguments: bytes, now: int, own: dict[str, Any]) -> CallRequest:
    """What calls of the tool have in common, with what is this one's own."""
    if call.tool != terms.spec.name:
        own["tool"] = clean(call.tool)[:200]
    request = msgspec.structs.replace(
        terms.base, call=call.id, arguments=arguments, now=now, purpose=call.purpose, parallel_group=call.parallel_group
    )
    return msgspec.structs.replace(request, **own) if own else request


def _make_unknown_request(context: SessionContext, call: Call, now: int, flaw: tuple[Outcome, str]) -> CallRequest:
    """Of an unknown tool nothing is known, so it counts as one that writes."""
    return CallRequest(
        call=call.id,
        tool=clean(call.tool)[:200],
        arguments=call.arguments,
        session=context.session,
        agent=context.agent,
        now=now,
        flaw=flaw,
        halts=context.halts,
        purpose=call.purpose,
        phase=context.phase.name,
        kept=context.reserve,
        parallel_group=call.parallel_group,
        observe=context.policy.observe,
    )


def _find_missing_secret(context: SessionContext, arguments: Valid) -> tuple[Outcome, str] | None:
    """Refuse a secret that the agent was not granted or that is not set."""
    unknown = sorted(find_secret_names(arguments.canonical) - context.secrets)
    return ("invalid_arguments", describe_missing_secrets(unknown)) if unknown else None


def _find_unknown_placeholder(arguments: Valid) -> tuple[Outcome, str] | None:
    """Refuse a placeholder that cannot be resolved: a tool would take it for the value itself."""
    left = find_placeholders(arguments.canonical.decode())
    if not left:
        return None
    return ("invalid_arguments", f"The value of {left[0]} is no longer known: ask again for the value.")


def _make_required_approval(
    context: SessionContext, call: Call, meant: Valid, arguments: Valid, risk: "Risk | None", agreed: str
) -> RequiredApproval:
    bound = digest_approval(call.tool, meant.canonical, context.session, context.policy_digest)
    return RequiredApproval(
        decision=call.approval,
        digest=bound,
        shown=b"%s %s" % (call.tool.encode(), arguments.canonical),
        reasons=risk.reasons if risk else (),
        rule=agreed,
        expires_in=context.policy.approval_expiry,
        edited="" if call.edited is None else sha256(call.edited).hexdigest(),
        same=sha256(arguments.canonical).hexdigest(),
        keys=tuple(arguments.values),
    )
