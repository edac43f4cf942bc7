"""Prepare a call for the judge: everything that can be known before a row is locked.

Everything that depends only on the session's context is compiled once, as the terms of a tool or of a model. The terms
are compiled again when the context or a window changes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec.structs import force_setattr

from halter.core import money
from halter.core.clock import QUARTER
from halter.core.ids import key_scope, session_stream
from halter.core.messages import AnonymizationPolicy, Model
from halter.core.money import BudgetRow, Cap, Caps, ScopedCap, Spender, list_accounts, make_legs
from halter.core.project.holds import BudgetKey, budget_key
from halter.core.provenance import Flaw
from halter.core.rates import RateLimit, find_rate_limits
from halter.core.rows import HaltRow, RuleRow
from halter.core.text import clean, encode_body
from halter.core.tools import DOLLAR, Invalid, Tool, ToolSpec, Valid, find_secret_names
from halter.core.usage import ModelPrices, PriceTable, Unpriced, runs_locally
from halter.core.vocabulary import ActionLimit, Outcome, Purpose
from halter.guard.approvals import decode_rule, digest_approval, matches_rule, pins_places
from halter.guard.budget import Reserve
from halter.guard.call_request import CallRequest, RequiredApproval
from halter.guard.halts import HaltKeys, list_halt_rows
from halter.guard.judge_request import HoldTerms, ModelAttempt, compile_hold_terms
from halter.policy.evaluation import ResolvedPolicy, ToolPolicy
from halter.policy.levels import (
    audit_of_policy,
    find_attempt_rate,
    find_tool_policy,
    level_asks,
    needs_approval,
    needs_risk_assessment,
)
from halter.provenance.check import ProvenanceCheck, describe_flaw, explain_flaws, strip_flaws
from halter.redaction.anonymize import find_placeholders
from halter.redaction.secrets import describe_missing_secrets
from halter.spec.agent import Phase

if TYPE_CHECKING:
    from halter.risk.risk import Risk

NO_CAPS: Final = Caps()


class Call(msgspec.Struct, frozen=True):
    """One tool call as requested; its id is also its idempotency key and the id of its hold.

    `edited_arguments` are a person's, in place of the model's. `timeout` shortens the tool's own timeout. With
    `can_defer` the caller continues the session immediately, so the settlement may be deferred to its next commit.
    `describe_situation` returns what the agent was asked and what it is doing, for a simulation.

    `decision` is the id of the question about an earlier call with the same arguments, whose answer counts for this
    one. `has_decision` says that a person was asked about the call: their answer counts, whatever has changed since.
    `provenance_check` is the session's, for a call of its model. `staging` is `allowed` if the question may wait for
    the end of the turn, and `due` at that end. A call does not wait for money while its step `must_return` to a
    person's answers.
    """

    id: str
    tool: str
    arguments: bytes
    purpose: Purpose = "turn"
    parallel_group: str = ""
    edited_arguments: bytes | None = None
    timeout: int | None = None
    can_defer: bool = False
    describe_situation: Callable[[], str] = str
    decision: str = ""
    provenance_check: ProvenanceCheck | None = None
    has_decision: bool = False
    staging: Literal["", "allowed", "due"] = ""
    must_return: Callable[[], bool] = bool

    @property
    def approval(self) -> str:
        """The id of the decision about this call, if it needs one."""
        return self.decision or f"{self.id}/approval"


class SessionContext(msgspec.Struct, frozen=True):
    """A session's agent, phase and policy.

    `secrets` are the names of those granted and set; `quarantined_tools` wait for a person. `reserve_usd` and
    `reserve_tokens` are reserved for the wrap-up. `tokens_per_hour` limits an autonomous session. `anonymize` says what
    is hidden from its models. `rate_limits` bind all sessions together. `caller_caps` are the caps of the agents whose
    call started the session. `action_limits` are the actions per minute of the session and of those it works for. `key`
    is the proxy's key by which the session came in.
    """

    session: str
    agent: str
    phase: Phase
    policy: ResolvedPolicy
    policy_digest: str
    trigger: str = ""
    quarantined_tools: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()
    reserve_usd: int = 0
    reserve_tokens: int = 0
    tokens_per_hour: int | None = None
    anonymize: AnonymizationPolicy | None = None
    rate_limits: Mapping[str, RateLimit] = {}
    caller_caps: tuple[ScopedCap, ...] = ()
    action_limits: tuple[ActionLimit, ...] = ()
    key: str = ""
    # Derived once, because many steps use the same context.
    caps: Caps = NO_CAPS
    scopes: tuple[str, ...] = ()
    _request: "RequestTerms | None" = None
    _calls: "dict[str, ToolTerms] | None" = None

    def __post_init__(self) -> None:
        """Derive the fields that depend on the context alone. A changed copy derives them anew."""
        force_setattr(self, "caps", self.caps_with_reserve.minus(self.reserve_usd, self.reserve_tokens))
        upper_scopes = _list_upper_scopes(self.trigger, self.agent, self.key)
        force_setattr(self, "scopes", (session_stream(self.session), *upper_scopes))
        force_setattr(self, "_request", None)
        force_setattr(self, "_calls", None)

    @property
    def halts(self) -> HaltKeys:
        """The halt rows of the session's scopes. Sessions share those above them."""
        return ((HaltRow, self.scopes[0]), *_list_upper_halts(self.trigger, self.agent, self.key))

    @property
    def reserve(self) -> Reserve:
        return Reserve(self.session, self.reserve_usd, self.reserve_tokens)

    @property
    def spender(self) -> Spender:
        return Spender(self.session, self.agent, self.trigger, self.caller_caps)

    @property
    def caps_with_reserve(self) -> Caps:
        """The caps including the reserve for the wrap-up."""
        if self.tokens_per_hour is None:
            return self.policy.caps
        return msgspec.structs.replace(self.policy.caps, tokens_per_hour=self.tokens_per_hour)

    def terms_of_tool(self, spec: ToolSpec, now: int) -> "ToolTerms":
        """Return the terms of a tool, compiled once per quarter of an hour."""
        terms = None if self._calls is None else self._calls.get(spec.name)
        if terms is None or terms.spec is not spec or terms.quarter != now // QUARTER:
            terms = compile_tool_terms(self, spec, now // QUARTER)
            force_setattr(self, "_calls", {**(self._calls or {}), spec.name: terms})
        return terms

    def terms_of_model(self, model: Model, prices: PriceTable, now: int) -> "RequestTerms":
        """Return the terms of a model, compiled once per quarter of an hour, and again when its prices change."""
        terms, rates = self._request, prices.find(model.name, model.base_url)
        if (
            terms is None
            or terms.model is not model
            or terms.quarter != now // QUARTER
            or terms.base.rates is not rates
        ):
            terms = compile_request_terms(self, model, rates, now // QUARTER)
            force_setattr(self, "_request", terms)
        elif not terms.hold.keys:
            force_setattr(terms.hold, "keys", tuple(map(budget_key, terms.hold.legs)))
            force_setattr(terms, "halts", self.halts)
        return terms

    def find_caps(self, now: int) -> tuple[Sequence[BudgetKey], Sequence[int | None]]:
        """Find the rows of the session's accounts, and their caps including the reserve."""
        terms = self._request
        if terms is None or terms.quarter != now // QUARTER:
            legs = make_legs(self.caps_with_reserve, self.spender, now, usd=1, tokens=1)
            return [*map(budget_key, legs)], [leg.cap for leg in legs]
        return terms.hold.keys or [*map(budget_key, terms.hold.legs)], terms.caps

    def prepare_cap_check(self, now: int) -> tuple[Sequence[BudgetKey], Callable[[Sequence[BudgetRow | None]], bool]]:
        """Find the rows of the session's accounts, and return them with the check of whether any is near its cap."""
        keys, caps = self.find_caps(now)
        return keys, partial(self._is_near_cap, keys, caps)

    def _is_near_cap(
        self, keys: Sequence[BudgetKey], caps: Sequence[int | None], budgets: Sequence[BudgetRow | None]
    ) -> bool:
        """Return whether no more than the margin remains of any cap in force, given the configured caps.

        Holds count as spent, and the session's reserve for its wrap-up does not remain.
        """
        margin, stream = self.policy.cap_margin, self.scopes[0]
        for (_, scope, _, unit), configured_cap, budget in zip(keys, caps, budgets, strict=True):
            cap = configured_cap if budget is None else budget.binding(configured_cap)
            if cap is None:
                continue
            used = 0 if budget is None else budget.spent + budget.held
            if scope == stream:
                used += self.reserve_usd if unit == "usd" else self.reserve_tokens
            if margin.contains(unit, cap, cap - used):
                return True
        return False

    def narrow(self, usd: int, spent_usd: int) -> "SessionContext":
        """Return the context with a lower cap: after `spent_usd`, at most `usd` more."""
        caps = self.policy.caps
        session_cap, limit = caps.session.max_cost_usd, spent_usd + usd + self.reserve_usd
        cap = Cap(limit if session_cap is None else min(session_cap, limit), caps.session.per)
        policy = msgspec.structs.replace(self.policy, caps=msgspec.structs.replace(caps, session=cap))
        return msgspec.structs.replace(self, policy=policy)


@lru_cache(maxsize=256)
def _list_upper_scopes(trigger: str, agent: str, key: str) -> tuple[str, ...]:
    """List the scopes above a session, shared by all sessions of an agent."""
    own_scopes = [f"trigger:{trigger}"] if trigger else []
    own_scopes += [key_scope(agent, key)] if key else []
    return (*own_scopes, f"agent:{agent}", "fleet")


@lru_cache(maxsize=256)
def _list_upper_halts(trigger: str, agent: str, key: str) -> HaltKeys:
    return list_halt_rows(_list_upper_scopes(trigger, agent, key))


class ToolTerms(msgspec.Struct, frozen=True, gc=False):
    """The fields that all calls of one tool by a session share, until its context or a window changes.

    `usd` is the declared maximum cost of a call. `needs_approval` says that a call needs one even at the lowest risk.
    `base` is a request without the fields of a particular call.
    """

    spec: ToolSpec
    quarter: int
    rule: ToolPolicy
    usd: int
    flaw: tuple[Outcome, str] | None
    assessed: bool
    needs_approval: bool
    base: CallRequest


def compile_tool_terms(context: SessionContext, spec: ToolSpec, quarter: int) -> ToolTerms:
    policy, caps, phase, quarantined = context.policy, context.caps, context.phase, context.quarantined_tools
    cache_key = (quarter, context.agent, context.trigger, context.caller_caps, caps, phase, quarantined)
    # Cached on the policy, for all sessions of the agent, like the terms of a model.
    cache_entry: tuple[object, dict[str, ToolTerms]] | None = vars(policy).get("tool_terms")
    if cache_entry is None or cache_entry[0] != cache_key:
        cache_entry = vars(policy)["tool_terms"] = (cache_key, dict[str, ToolTerms]())
    terms = cache_entry[1].get(spec.name)
    if terms is None or terms.spec is not spec:
        terms = cache_entry[1][spec.name] = _compile_shared_terms(context, spec, quarter)
    base, stream = terms.base, context.scopes[0]
    legs, accounts = money.assign_legs(base.legs, stream), money.assign_legs(base.accounts, stream)
    base = msgspec.structs.replace(
        base,
        legs=legs,
        accounts=accounts,
        session=context.session,
        halts=context.halts,
        reserve=context.reserve,
        action_limits=context.action_limits if spec.effect == "write" else (),
    )
    return msgspec.structs.replace(terms, base=base)


def _compile_shared_terms(context: SessionContext, spec: ToolSpec, quarter: int) -> ToolTerms:
    policy, spender = context.policy, msgspec.structs.replace(context.spender, session="")
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
        legs=make_legs(context.caps, spender, quarter * QUARTER, usd=usd),
        accounts=list_accounts(policy.caps, spender, quarter * QUARTER),
        observe=policy.observe,
    )
    asks = needs_approval(rule, policy.mode, None)
    return ToolTerms(spec, quarter, rule, usd, base.flaw, needs_risk_assessment(rule), asks, base)


class RequestTerms(msgspec.Struct, frozen=True):
    """The fields that all requests of a session to one model share, until its context or a window changes.

    `base` is an attempt without the fields of a particular request or session. An `is_local` model runs on this
    machine, so nothing is hidden from it. `caps` are those of the hold's legs, including the reserve. `halts` are
    cached together with the hold's keys.
    """

    model: Model
    quarter: int
    base: ModelAttempt
    is_local: bool
    spender: Spender
    reserve: Reserve
    hold: HoldTerms
    caps: tuple[int | None, ...]
    halts: HaltKeys = ()


def compile_request_terms(
    context: SessionContext, model: Model, rates: ModelPrices | Unpriced, quarter: int
) -> RequestTerms:
    policy, caps, spender = context.policy, context.caps, context.spender
    cache_key = (model, rates, quarter, context.agent, context.trigger, context.caller_caps, caps, context.rate_limits)
    # Cached on the policy, for all sessions of the agent.
    cache_entry: tuple[object, RequestTerms] | None = vars(policy).get("request_terms")
    if cache_entry is None or cache_entry[0] != cache_key:
        name = str(model.name)
        base = ModelAttempt(
            request="",
            model=name,
            spender=Spender("", context.agent),
            caps=caps,
            now=quarter * QUARTER,
            rates=rates,
            input_tokens=0,
            max_output_tokens=0,
            min_output_tokens=policy.min_output_tokens,
            flaw=find_model_flaw(context, name),
            observe=policy.observe,
            paces=find_rate_limits(context.rate_limits, name),
        )
        unassigned_spender = msgspec.structs.replace(spender, session="")
        hold, local = compile_hold_terms(caps, unassigned_spender, quarter), runs_locally(model.name, model.base_url)
        caps_with_reserve = tuple(
            [leg.cap for leg in compile_hold_terms(context.caps_with_reserve, unassigned_spender, quarter).legs]
        )
        terms = RequestTerms(model, quarter, base, local, unassigned_spender, context.reserve, hold, caps_with_reserve)
        cache_entry = vars(policy)["request_terms"] = (cache_key, terms)
    terms = cache_entry[1]
    return msgspec.structs.replace(
        terms, spender=spender, reserve=context.reserve, hold=terms.hold.for_stream(context.scopes[0])
    )


def find_model_flaw(context: SessionContext, model: str) -> tuple[Outcome, str] | None:
    policy = context.policy
    if policy.allows_model(model):
        return None
    allowed_models = ", ".join(policy.allowed_models or ()) or "none"
    return ("disabled", f"{model} is not allowed for {context.agent}: `allowed_models` is {allowed_models}.")


class PreparedCall(msgspec.Struct, frozen=True):
    request: CallRequest
    tool: Tool | None
    arguments: Valid | None
    rule: ToolPolicy | None = None
    has_decision: bool = False


def prepare_call(
    context: SessionContext, call: Call, tool: Tool | None, now: int, usd: int, rules: Sequence[RuleRow] = ()
) -> PreparedCall:
    """Prepare a call; `usd` is its maximum cost, `rules` are the standing approvals."""
    if tool is None:
        flaw: tuple[Outcome, str] = ("unknown_tool", f"There is no tool {clean(call.tool)[:80]!r}.")
        request = _make_unknown_request(context, call, now, flaw)
        return PreparedCall(request, None, None, has_decision=call.has_decision)
    terms = context.terms_of_tool(tool.spec, now)
    model_arguments = tool.validate(call.arguments)
    if not isinstance(model_arguments, Valid):
        return _prepare_invalid(context, terms, call, tool, model_arguments, now)
    arguments = model_arguments if call.edited_arguments is None else tool.validate(call.edited_arguments)
    if not isinstance(arguments, Valid):
        return _prepare_invalid(context, terms, call, tool, arguments, now)
    risk = _assess(terms.spec, arguments) if terms.assessed else None
    level, approval, check = risk.level if risk else None, None, call.provenance_check
    flaws = () if check is None else check.judge(call.tool, model_arguments.canonical)
    is_enforced, untrusted_reason, is_staged = bool(flaws) and check is not None and check.mode != "observe", "", False
    if terms.needs_approval or level == "CRITICAL" or is_enforced or call.has_decision:
        enforced_flaws = flaws if is_enforced else ()
        ignores_rules = level == "CRITICAL" or terms.rule.approvers > 1
        rule_id = "" if ignores_rules else _find_agreed_rule(rules, context, terms.spec, arguments, now, enforced_flaws)
        approval = _make_required_approval(context, call, model_arguments, arguments, risk, rule_id)
        approval = msgspec.structs.replace(
            approval,
            approvers=max(1, terms.rule.approvers),
            mode=context.policy.mode if level_asks(terms.rule, context.policy.mode) else "",
            always=terms.rule.approval == "always",
        )
        if is_enforced and check is not None and not rule_id:
            untrusted_reason = "" if call.has_decision else _explain_refusal(check, flaws)
            is_only_reason = not (untrusted_reason or terms.needs_approval or level == "CRITICAL" or call.has_decision)
            is_staged = is_only_reason and call.staging == "allowed" and check.can_wait(call.tool)
            untrusted_reason = STAGED if is_staged else untrusted_reason
            approval = _add_flaws(context, approval, check, call.tool, flaws)
    argument_flaw = _find_missing_secret(context, arguments) if DOLLAR in arguments.canonical else None
    if argument_flaw is None and context.anonymize is not None:
        argument_flaw = _find_unknown_placeholder(arguments)
    overrides: dict[str, Any] = {}
    if level is not None:
        overrides["risk"] = level
    if approval is not None:
        overrides["approval"] = approval
    if usd != terms.usd:
        overrides["legs"] = make_legs(context.caps, context.spender, now, usd=usd)
    if arguments.writes:
        overrides["writes"] = arguments.writes
    if argument_flaw is not None:
        overrides["flaw"] = _pick_flaw(context, terms, argument_flaw)
    if flaws:
        overrides |= {"flaws": strip_flaws(flaws), "untrusted_reason": untrusted_reason, "is_staged": is_staged}
    request = _fill_request(terms, call, arguments.canonical, now, overrides)
    return PreparedCall(request, tool, arguments, terms.rule, call.has_decision)


STAGED: Final = (
    "A person decides about this call, together with similar ones, before your next call that may depend on it or at "
    "the end of the turn; it is made if they approve it. Continue with what does not need its result."
)


def _explain_refusal(check: ProvenanceCheck, flaws: Sequence[Flaw]) -> str:
    """Describe why a flawed call is refused without a question; empty if a person will be asked."""
    reasons = "; ".join(describe_flaw(flaw) for flaw in flaws)
    if check.mode == "strict":
        return f"Blocked by policy: a value comes from untrusted content ({reasons})."
    if check.locked:
        return f"A person denied a similar call earlier in this session; no new question is asked ({reasons})."
    return ""


def _add_flaws(
    context: SessionContext, approval: RequiredApproval, check: ProvenanceCheck, tool: str, flaws: Sequence[Flaw]
) -> RequiredApproval:
    """Add the flaws of a call to its question."""
    question = explain_flaws(context.agent, tool, flaws, check)
    return msgspec.structs.replace(
        approval,
        display_body=approval.display_body + b"\n" + encode_body(question),
        reasons=(*approval.reasons, *map(describe_flaw, flaws)),
    )


def _pick_flaw(context: SessionContext, terms: ToolTerms, argument_flaw: tuple[Outcome, str]) -> tuple[Outcome, str]:
    """Choose the flaw to report: the policy's if it has one, but in observe mode the one that cannot be waived."""
    return argument_flaw if context.policy.observe else terms.flaw or argument_flaw


def _prepare_invalid(
    context: SessionContext, terms: ToolTerms, call: Call, tool: Tool, invalid: Invalid, now: int
) -> PreparedCall:
    overrides = {"flaw": _pick_flaw(context, terms, ("invalid_arguments", invalid.sentence)), "legs": ()}
    request = _fill_request(terms, call, call.arguments, now, overrides)
    return PreparedCall(request, tool, None, terms.rule, call.has_decision)


def _assess(spec: ToolSpec, arguments: Valid) -> "Risk":
    # Imported late: its tables take as long to import as the rest of the guard, and few tools need them.
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
    """Find the rule that approves a call. For a flawed call it must have a condition for each flawed argument."""
    for row in rules:
        rule = decode_rule(row)
        matches = row.live(now) and matches_rule(rule, spec, arguments, context.session, context.agent, now)
        if matches and (not flaws or pins_places(rule, flaws)):
            return row.rule
    return ""


def find_tool_flaw(context: SessionContext, spec: ToolSpec) -> tuple[Outcome, str] | None:
    """Check the tool itself: it must be enabled, and granted in this phase."""
    if spec.name in context.policy.disabled:
        return ("disabled", f"{spec.name} is disabled.")
    if spec.name in context.quarantined_tools:
        return ("quarantined", f"{spec.name} changed since it was approved; it waits for a decision.")
    if not context.phase.grants_tool(spec.name):
        return ("tool_not_granted", f"{spec.name} is not granted in the phase {context.phase.name}.")
    return None


def _fill_request(terms: ToolTerms, call: Call, arguments: bytes, now: int, overrides: dict[str, Any]) -> CallRequest:
    """Fill the terms of a tool with the fields of one call."""
    if call.tool != terms.spec.name:
        overrides["tool"] = clean(call.tool)[:200]
    request = msgspec.structs.replace(
        terms.base, call=call.id, arguments=arguments, now=now, purpose=call.purpose, parallel_group=call.parallel_group
    )
    return msgspec.structs.replace(request, **overrides) if overrides else request


def _make_unknown_request(context: SessionContext, call: Call, now: int, flaw: tuple[Outcome, str]) -> CallRequest:
    """Make the request for an unknown tool, which counts as one that writes."""
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
        reserve=context.reserve,
        parallel_group=call.parallel_group,
        observe=context.policy.observe,
    )


def _find_missing_secret(context: SessionContext, arguments: Valid) -> tuple[Outcome, str] | None:
    """Find a secret in the arguments that is not granted to the agent or not set."""
    missing_names = sorted(find_secret_names(arguments.canonical) - context.secrets)
    return ("invalid_arguments", describe_missing_secrets(missing_names)) if missing_names else None


def _find_unknown_placeholder(arguments: Valid) -> tuple[Outcome, str] | None:
    """Find a placeholder without a known value: the tool would use the placeholder itself."""
    placeholders = find_placeholders(arguments.canonical.decode())
    if not placeholders:
        return None
    return ("invalid_arguments", f"The value of {placeholders[0]} is unknown: request it again.")


def _make_required_approval(
    context: SessionContext, call: Call, model_arguments: Valid, arguments: Valid, risk: "Risk | None", rule_id: str
) -> RequiredApproval:
    digest = digest_approval(call.tool, model_arguments.canonical, context.session, context.policy_digest)
    return RequiredApproval(
        decision=call.approval,
        digest=digest,
        display_body=b"%s %s" % (call.tool.encode(), arguments.canonical),
        reasons=risk.reasons if risk else (),
        rule=rule_id,
        terms=context.policy.question_terms,
        edited_digest="" if call.edited_arguments is None else sha256(call.edited_arguments).hexdigest(),
        arguments_digest=sha256(arguments.canonical).hexdigest(),
        argument_keys=tuple(arguments.values),
    )
