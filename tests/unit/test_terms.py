"""What is worked out once for a session decides as what is worked out anew: the same calls and requests, to the letter.

The plain side of each comparison is written here a second time, as slowly and as simply as it can be said.
"""

import random
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import msgspec
import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE, QUARTER, window_end
from halter.core.events import AnyEvent, CostCapReached, RequestRefused, RequestStarted
from halter.core.ids import FLEET
from halter.core.messages import Prompt, Reply, TextListener, bound_prompt_tokens
from halter.core.money import BudgetRow, Cap, CapReached, Caps, Leg, list_accounts, make_legs
from halter.core.project.holds import budget_key
from halter.core.rates import RateLimit, find_rate_limits
from halter.core.rows import FleetPolicyRow, HaltRow
from halter.core.tools import Invalid, Permit, find_secret_names
from halter.core.usage import FREE_PRICE, ModelName, ModelPrices, Price, Unpriced
from halter.core.vocabulary import Row
from halter.guard.budget import describe_cap_reached
from halter.guard.call_request import CallRequest
from halter.guard.halts import explain_halt, list_halt_rows
from halter.guard.judge_request import ModelAttempt, compile_hold_terms, judge_attempt, list_request_rows
from halter.guard.prepare import Call, SessionContext, find_model_flaw, prepare_call
from halter.models.tariffs import compile_stated_price
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.levels import (
    audit_of_policy,
    find_attempt_rate,
    find_declared_level,
    needs_approval,
    needs_risk_assessment,
)
from halter.policy.store_policy import lower_caps_to_policy
from halter.spec.agent import Phase
from halter.tools.function_tool import FunctionTool, tool

NOON = 1_767_268_800_000_000
SCALES = [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)]
FLEETS = ("{}", "mode: FULL", "mode: ASSIST", "policy: {levels: {SAFE: {rate: 3/hour}, CONTROLLED: {approval: never}}}")
AGENTS = (
    "name: desk\n",
    "name: desk\npolicy: {disabled: [look]}\n",
    "name: desk\npolicy: {tools: {look: {level: RESTRICTED}, deed: {rate: 2/hour, approval: always}}}\n",
    "name: desk\nsecrets: [KEY]\nallowed_models: ['test:paid']\n",
)
RATES = {"test:paid": RateLimit(requests=2, tokens=5000), "test:*": RateLimit(requests=3)}


@tool(level="RESTRICTED")
async def deed(order: int, note: str = "") -> str:
    """Do it."""
    return f"{order}{note}"


@tool(level="SAFE", effect="read")
async def look(order: int) -> str:
    """Look at it."""
    return str(order)


@tool(level="CONTROLLED", cost="0.0002")
async def jot(order: int, text: str = "") -> str:
    """Write it down."""
    return f"{order}{text}"


TOOLS: Sequence[FunctionTool | None] = (deed, look, jot, None)
ARGUMENTS = (b'{"order": 7}', b'{"order": 7, "note": "${secret:KEY}"}', b'{"order": "seven"}', b"not json", b"{}")
PRICES: dict[str, ModelPrices | Unpriced] = {
    "paid": compile_stated_price(Price(Decimal(1), Decimal(1)), margin=Decimal(0)),
    "dear": compile_stated_price(Price(Decimal(3), Decimal(15))),
    "free": compile_stated_price(FREE_PRICE),
    "new": Unpriced(ModelName("test", "new"), "it is new"),
}


class Named:
    """A model that is only named."""

    base_url: None = None

    def __init__(self, model: str) -> None:
        self.name = ModelName("test", model)

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        raise NotImplementedError


class Table:
    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        assert base_url is None
        return PRICES[model.model]


MODELS = tuple(Named(name) for name in PRICES)


class Laid:
    """Rows as a case lays them out; one that was not declared must not be read."""

    def __init__(self, rows: Sequence[Row], now: int, declared: Sequence[Any]) -> None:
        self.now = now
        self._rows = {row.key(): row for row in rows}
        self._declared = set(declared)

    def get(self, kind: type[Any], *key: Any) -> Any:
        assert (kind, *key) in self._declared
        return self._rows.get((kind, *key))

    def find(self, keys: Any) -> Any:
        return [self.get(*key) for key in keys]


@cache
def resolve_texts(fleet: str, agent: str) -> ResolvedPolicy:
    text = f"allowed_secrets: [KEY]\n{'' if fleet == '{}' else fleet}\n"
    return resolve_policy(
        parse_fleet(load_bytes(text.encode(), "halter.yaml")), parse_agent(load_bytes(agent.encode(), "agent.yaml"))
    )


def draw_caps(draw: random.Random) -> Caps:
    def some(per: tuple[Any, ...]) -> tuple[Cap, ...]:
        return tuple(Cap(draw.choice((None, 300, 1500, 5000)), draw.choice(per)) for _ in range(draw.randrange(3)))

    return Caps(
        Cap(draw.choice((None, 900, 4000))),
        some(("", "hour")),
        some(("day", "hour")),
        some(("day", "month")),
        token_budget=draw.choice((None, None, 800, 3000)),
        zone=draw.choice(("UTC", "Asia/Kathmandu", "America/St_Johns")),
    )


def some_context(draw: random.Random) -> SessionContext:
    policy = msgspec.structs.replace(
        resolve_texts(draw.choice(FLEETS), draw.choice(AGENTS)), caps=draw_caps(draw), observe=draw.random() < 0.2
    )
    return SessionContext(
        "s",
        "desk",
        Phase("work", draw.choice((None, None, ("look",), ("deed", "jot")))),
        policy,
        str(policy.digest()),
        trigger=draw.choice(("", "nightly")),
        quarantined_tools=draw.choice((frozenset[str](), frozenset[str](), frozenset(("deed",)))),
        secrets=frozenset(policy.secrets),
        reserve_usd=draw.choice((0, 100)),
        reserve_tokens=draw.choice((0, 50)),
        tokens_per_hour=draw.choice((None, None, 2000)),
        rate_limits=draw.choice(({}, {}, RATES)),
    )


class Contexts:
    """Contexts that live for many cases, as sessions do, while time goes on by jumps of all sizes."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self.now = NOON
        self._kept = [some_context(self.draw) for _ in range(12)]

    def one(self) -> SessionContext:
        self.now += self.draw.choice((0, 1, 1000, MINUTE, QUARTER - 1, QUARTER, HOUR, DAY))
        place = self.draw.randrange(len(self._kept))
        if self.draw.random() < 0.02:
            self._kept[place] = some_context(self.draw)
        return self._kept[place]


def plain_request_of_call(where: SessionContext, call: Call, using: FunctionTool, now: int, usd: int) -> CallRequest:
    """Prepare a valid call of a known tool, with nothing known from before."""
    policy, spec, valid = where.policy, using.spec, using.validate(call.arguments)
    assert not isinstance(valid, Invalid)
    rule = policy.rule(spec.name, find_declared_level(spec))
    flaw: Any = None
    unfit = bool(find_secret_names(valid.canonical) - where.secrets)
    if not where.phase.grants_tool(spec.name):
        flaw = "tool_not_granted"
    if spec.name in where.quarantined_tools:
        flaw = "quarantined"
    if spec.name in policy.disabled:
        flaw = "disabled"
    if unfit and (flaw is None or policy.observe):
        flaw = "invalid_arguments"
    call_request = prepare_call(msgspec.structs.replace(where), call, using, now, usd).request
    assert (call_request.flaw and call_request.flaw[0]) == flaw
    assert (call_request.approval is not None) == needs_approval(rule, policy.mode, call_request.risk)
    assert (call_request.level, call_request.audit) == (rule.level, audit_of_policy(rule))
    assert call_request.rate == find_attempt_rate(rule)
    assert (call_request.risk is None) == (not needs_risk_assessment(rule))
    assert call_request.legs == make_legs(where.caps, where.spender, now, usd=usd)
    assert call_request.accounts == list_accounts(policy.caps, where.spender, now)
    assert (call_request.call, call_request.tool, call_request.arguments, call_request.now) == (
        call.id,
        spec.name,
        valid.canonical,
        now,
    )
    assert (call_request.session, call_request.agent, call_request.reserve) == (
        where.session,
        where.agent,
        where.reserve,
    )
    assert call_request.halts == list_halt_rows(where.scopes)
    assert (call_request.effect, call_request.idempotent, call_request.egress) == (
        spec.effect,
        spec.idempotent,
        spec.egress,
    )
    assert (call_request.phase, call_request.observe, call_request.purpose) == (
        where.phase.name,
        policy.observe,
        call.purpose,
    )
    return call_request


@pytest.mark.parametrize("cases", SCALES)
def test_a_call_is_prepared_as_if_its_session_had_just_begun(cases: int) -> None:
    contexts = Contexts("calls")
    draw = contexts.draw
    for number in range(cases // 2):
        where, using = contexts.one(), draw.choice(TOOLS)
        name = using.spec.name if using else "nosuch"
        call = Call(f"s.{number}", name, draw.choice(ARGUMENTS), timeout=draw.choice((None, 5)))
        usd = draw.choice((0, 0, 200))
        warm = prepare_call(where, call, using, contexts.now, usd)
        cold = prepare_call(msgspec.structs.replace(where), call, using, contexts.now, usd)
        assert warm == cold
        assert warm.arguments is not None or warm.request.legs == ()
        if warm.arguments is not None and using is not None and number % 8 == 0:
            assert plain_request_of_call(where, call, using, contexts.now, usd) == warm.request


def draw_rows(draw: random.Random, legs: Sequence[Leg], now: int) -> list[Row]:
    rows: list[Row] = []
    for leg in legs:
        if draw.random() < 0.6:
            by = draw.choice(("", "", "ada"))
            cap = draw.choice((None, 700, 2500)) if by else leg.cap
            text, held = draw.choice((0, 0, 350, 1400)), draw.choice((0, 0, 300))
            rows.append(BudgetRow(leg.scope, leg.window, leg.unit, cap, 0, by, text, held))
    if draw.random() < 0.2:
        ramp, halted = draw.choice((0, MINUTE)), int(draw.random() < 0.5)
        rows.append(HaltRow(draw.choice(("fleet", "agent:desk", "session:s")), halted, now - 1, "ada", "", ramp))
    if draw.random() < 0.3:
        caps = draw.choice((None, 400)), draw.choice((None, 900))
        rows.append(FleetPolicyRow(FLEET, 1, "{}", "d", 0, "ada", *caps))
    return rows


def plain_decision(model_attempt: ModelAttempt, rows: Laid) -> list[AnyEvent]:
    """Decide about a request that has no rate, one account after the other, with nothing known from before."""
    halt = explain_halt(rows.find(model_attempt.halts), model_attempt.spender.session, rows.now)
    if halt:
        return [refused(model_attempt, "external_halt", halt)]
    policy = rows.get(FleetPolicyRow, FLEET) if model_attempt.caps.fleet else None
    caps = lower_caps_to_policy(model_attempt.caps, policy)
    everywhere = make_legs(caps, model_attempt.spender, model_attempt.now, usd=1, tokens=1)
    waived: list[Any] = []
    reasons = [model_attempt.flaw] if model_attempt.flaw else []
    if isinstance(model_attempt.rates, Unpriced) and left_of(model_attempt, everywhere, rows, "usd") is not None:
        reasons.append(("disabled", model_attempt.rates.sentence))
    for reason in reasons:
        if not model_attempt.observe:
            return [refused(model_attempt, *reason)]
        waived.append(reason[0])
    if any(end <= rows.now for leg in everywhere if (end := window_end(leg.window)) is not None):
        return []
    most, least = model_attempt.max_output_tokens, min(model_attempt.min_output_tokens, model_attempt.max_output_tokens)
    tokens, usd = (left_of(model_attempt, everywhere, rows, unit) for unit in ("tokens", "usd"))
    if tokens is not None:
        most = max(least, min(most, tokens - model_attempt.input_tokens))
    if model_attempt.observe:
        tried = first_obstacle(
            model_attempt,
            make_legs(caps, model_attempt.spender, model_attempt.now, **bound(model_attempt, most, least, usd)),
            rows,
        )
        waived += ["cost_cap_reached"] if isinstance(tried, CapReached) else []
        most, usd = model_attempt.max_output_tokens, None
    amounts = bound(model_attempt, most, least, usd)
    legs = make_legs(caps, model_attempt.spender, model_attempt.now, **amounts)
    legs = tuple(msgspec.structs.replace(leg, cap=None) for leg in legs) if model_attempt.observe else legs
    obstacle = first_obstacle(model_attempt, legs, rows)
    if obstacle == "wait":
        return []
    if isinstance(obstacle, CapReached):
        request_refused = refused(model_attempt, "cost_cap_reached", describe_cap_reached(obstacle))
        reached = CostCapReached.refusing(model_attempt.request, model_attempt.model, obstacle)
        return [request_refused] if model_attempt.optional else [reached, request_refused]
    output = amounts["tokens"] - model_attempt.input_tokens
    return [
        RequestStarted(
            request=model_attempt.request,
            model=model_attempt.model,
            purpose=model_attempt.purpose,
            legs=legs,
            max_output_tokens=output,
            observed=tuple(waived),
        )
    ]


def refused(model_attempt: ModelAttempt, outcome: Any, sentence: str) -> RequestRefused:
    return RequestRefused(
        request=model_attempt.request,
        model=model_attempt.model,
        purpose=model_attempt.purpose,
        outcome=outcome,
        sentence=sentence,
    )


def budget_of(model_attempt: ModelAttempt, leg: Leg, rows: Laid) -> tuple[int | None, BudgetRow]:
    """The cap of an account and what stands against it; of a person's cap the last words are kept back."""
    row = rows.get(BudgetRow, leg.scope, leg.window, leg.unit) or BudgetRow(leg.scope, leg.window, leg.unit)
    kept = model_attempt.reserve.usd if leg.unit == "usd" else model_attempt.reserve.tokens
    if (
        (leg.scope, leg.window) == (f"session:{model_attempt.reserve.session}", "")
        and kept
        and row.cap_by
        and row.cap is not None
    ):
        row = msgspec.structs.replace(row, cap=max(0, row.cap - kept))
    return (row.cap if row.cap_by else leg.cap), row


def left_of(model_attempt: ModelAttempt, legs: Sequence[Leg], rows: Laid, unit: str) -> int | None:
    caps = [budget_of(model_attempt, leg, rows) for leg in legs if leg.unit == unit]
    return min((cap - row.spent for cap, row in caps if cap is not None), default=None)


def bound(model_attempt: ModelAttempt, most: int, least: int, number: int | None) -> dict[str, int]:
    if isinstance(model_attempt.rates, Unpriced):
        return {"usd": 0, "tokens": model_attempt.input_tokens + most}
    for output in (
        most,
        model_attempt.rates.max_output_that_fits(model_attempt.input_tokens, number or 0, model_attempt.now, most),
        least,
    ):
        usd = model_attempt.rates.bound(model_attempt.input_tokens, output, model_attempt.now)
        if number is None or (usd <= number and output >= min(least, most)):
            break
    return {"usd": usd, "tokens": model_attempt.input_tokens + output}


def first_obstacle(model_attempt: ModelAttempt, legs: Sequence[Leg], rows: Laid) -> Any:
    waits: Any = None
    for leg in legs:
        cap, row = budget_of(model_attempt, leg, rows)
        if cap is not None and leg.amount > cap - row.spent:
            return CapReached(leg, cap, row)
        if cap is not None and leg.amount > cap - row.spent - row.held:
            waits = "wait"
    return waits


@pytest.mark.parametrize("cases", SCALES)
def test_a_request_is_decided_as_if_its_session_had_just_begun(cases: int) -> None:
    contexts, table = Contexts("requests"), Table()
    draw, texts = contexts.draw, set[str]()
    for number in range(cases // 2):
        where, model = contexts.one(), draw.choice(MODELS)
        terms = where.terms_of_model(model, table, contexts.now)
        hold = compile_hold_terms(where.caps, where.spender, contexts.now // QUARTER)
        hold = msgspec.structs.replace(hold, keys=tuple(map(budget_key, hold.legs)) if terms.hold.keys else ())
        cold = msgspec.structs.replace(where).terms_of_model(model, table, contexts.now)
        assert terms == msgspec.structs.replace(cold, hold=hold, halts=where.halts if hold.keys else ())
        texts.add("known" if hold.keys else "new")
        soon = contexts.now + draw.choice((0, QUARTER, DAY))
        whole = make_legs(where.caps_with_reserve, where.spender, soon, usd=1, tokens=1)
        keys, caps = where.find_caps(soon)
        assert ([*keys], [*caps]) == ([*map(budget_key, whole)], [leg.cap for leg in whole])
        fields: dict[str, Any] = {
            "request": f"r{number}/0",
            "model": str(model.name),
            "purpose": "turn",
            "spender": where.spender,
            "caps": where.caps,
            "now": contexts.now,
            "rates": table.find(model.name, model.base_url),
            "input_tokens": draw.choice((10, 100, 900)),
            "max_output_tokens": draw.choice((20, 500, 3000)),
            "min_output_tokens": draw.choice((1, 256)),
            "halts": list_halt_rows(where.scopes),
            "reserve": where.reserve,
            "flaw": find_model_flaw(where, str(model.name)),
            "optional": draw.random() < 0.2,
            "observe": where.policy.observe,
        }
        paces = find_rate_limits(where.rate_limits, str(model.name))
        own = ("request", "now", "input_tokens", "max_output_tokens", "min_output_tokens", "optional")
        its = {"spender": terms.spender, "reserve": terms.reserve, "terms": terms.hold, "halts": where.halts}
        warm = msgspec.structs.replace(terms.base, **its, **{name: fields[name] for name in own})
        assert warm == ModelAttempt(**fields, paces=paces, terms=hold)
        later = contexts.now + draw.choice((0, 0, 0, 5, HOUR, DAY))
        rows = Laid(draw_rows(draw, warm.hold.legs, contexts.now), later, list_request_rows(warm))
        decided = [draft.event for draft in judge_attempt(warm, rows)]
        assert decided == [draft.event for draft in judge_attempt(msgspec.structs.replace(warm, terms=None), rows)]
        if not paces:
            assert decided == plain_decision(ModelAttempt(**fields), rows)
        texts.add(decided[0].KIND if decided else "")
    assert texts >= {"", "known", "new", "request_started", "request_refused", "cost_cap_reached"}


class Raised:
    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        return PRICES["dear"]


def make_budget(spent: int = 0, held: int = 0, cap: int | None = None, by: str = "") -> BudgetRow:
    return BudgetRow("fleet", "", "usd", cap, 0, by, spent, held)


@pytest.mark.parametrize(
    ("configured", "row", "near"),
    [
        (100, None, False),
        (100, make_budget(spent=79), False),
        (100, make_budget(spent=80), True),
        (100, make_budget(spent=40, held=40), True),
        (None, make_budget(spent=10**9), False),
        (0, None, True),
        (100, make_budget(spent=50, cap=60, by="mara"), True),
        (100, make_budget(spent=90, cap=None, by="mara"), False),
        (100, make_budget(spent=50, cap=60), False),
    ],
)
@pytest.mark.parametrize("scope", ["session", "agent", "fleet"])
def test_a_budget_is_near_the_cap_in_force_with_what_is_held(
    scope: str, configured: int | None, row: BudgetRow | None, *, near: bool
) -> None:
    own, day = (configured, None) if scope == "session" else (10**9, configured)
    caps = Caps(
        Cap(own),
        agent=(Cap(day if scope == "agent" else None, "day"),),
        fleet=(Cap(day if scope == "fleet" else None, "day"),),
    )
    policy = resolve_texts("{}", "name: desk\nlimits: {reserve_cost_fraction: 0.2, on_cap: stop}\n")
    policy = msgspec.structs.replace(policy, caps=caps)
    context = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()))
    keys, is_near_cap = context.prepare_cap_check(20 * DAY)
    assert is_near_cap([row if key[1].startswith(scope) and key[3] == "usd" else None for key in keys]) is near


def test_sessions_of_an_agent_share_only_what_is_computed_from_the_same() -> None:
    caps = Caps(trigger=(Cap(800, "day"),))
    policy = msgspec.structs.replace(resolve_texts("{}", AGENTS[3]), allowed_models=(), caps=caps)
    where = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()), reserve_usd=5)
    table = Table()
    first = where.terms_of_model(MODELS[0], table, NOON)
    request_terms = msgspec.structs.replace(where, session="t").terms_of_model(MODELS[0], table, NOON)
    assert request_terms.base is first.base
    assert (request_terms.spender.session, request_terms.reserve.session, request_terms.hold.legs[0].scope) == (
        "t",
        "t",
        "session:t",
    )
    for session_context, model, prices, now in (
        (msgspec.structs.replace(where, reserve_usd=0), MODELS[0], table, NOON),
        (msgspec.structs.replace(where, agent="till"), MODELS[0], table, NOON),
        (msgspec.structs.replace(where, trigger="nightly"), MODELS[0], table, NOON),
        (msgspec.structs.replace(where, caller_caps=(("agent:till", Cap(5, "day")),)), MODELS[0], table, NOON),
        (msgspec.structs.replace(where, rate_limits=RATES), MODELS[0], table, NOON),
        (where, MODELS[1], table, NOON),
        (where, MODELS[0], Raised(), NOON),
        (where, MODELS[0], table, NOON + HOUR),
    ):
        assert msgspec.structs.replace(where).terms_of_model(MODELS[0], table, NOON) == first
        alone = msgspec.structs.replace(session_context, policy=msgspec.structs.replace(policy))
        changed = msgspec.structs.replace(session_context).terms_of_model(model, prices, now)
        assert (first.base, first.hold) != (changed.base, changed.hold)
        assert changed == alone.terms_of_model(model, prices, now)


def test_sessions_of_an_agent_share_only_the_terms_of_tools_that_are_computed_from_the_same() -> None:
    caps = Caps(trigger=(Cap(800, "day"),), agent=(Cap(900, "hour"),))
    policy = msgspec.structs.replace(resolve_texts("{}", AGENTS[0]), caps=caps)
    where = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()), reserve_usd=5)
    first = where.terms_of_tool(jot.spec, NOON)
    tool_terms = msgspec.structs.replace(where, session="t").terms_of_tool(jot.spec, NOON)
    assert tool_terms.base.accounts[1] is first.base.accounts[1]
    assert (tool_terms.base.session, tool_terms.base.reserve.session) == ("t", "t")
    assert (tool_terms.base.legs[0].scope, tool_terms.base.accounts[0].scope) == ("session:t", "session:t")
    assert tool_terms.base.halts == list_halt_rows(("session:t", "agent:desk", "fleet"))
    dear = msgspec.structs.replace(jot.spec, cost=300)
    for session_context, spec, now in (
        (msgspec.structs.replace(where, reserve_usd=0), jot.spec, NOON),
        (msgspec.structs.replace(where, agent="till"), jot.spec, NOON),
        (msgspec.structs.replace(where, trigger="nightly"), jot.spec, NOON),
        (msgspec.structs.replace(where, caller_caps=(("agent:till", Cap(5, "day")),)), jot.spec, NOON),
        (msgspec.structs.replace(where, phase=Phase("work", ("look",))), jot.spec, NOON),
        (msgspec.structs.replace(where, quarantined_tools=frozenset(("jot",))), jot.spec, NOON),
        (where, dear, NOON),
        (where, jot.spec, NOON + HOUR),
    ):
        assert msgspec.structs.replace(where).terms_of_tool(jot.spec, NOON) == first
        alone = msgspec.structs.replace(session_context, policy=msgspec.structs.replace(policy))
        changed = msgspec.structs.replace(session_context).terms_of_tool(spec, now)
        assert first != changed
        assert changed == alone.terms_of_tool(spec, now)


def test_a_changed_context_keeps_nothing_that_was_computed_before() -> None:
    policy, named, now = resolve_texts("{}", AGENTS[3]), MODELS[0], NOON
    where = SessionContext("s", "desk", Phase("work", None), policy, str(policy.digest()), reserve_usd=5)
    before = where.terms_of_model(named, Table(), now), where.terms_of_tool(look.spec, now)
    assert (before[0].base.flaw, before[1].flaw) == (None, None)
    assert before == (where.terms_of_model(named, Table(), now), where.terms_of_tool(look.spec, now))
    barred = msgspec.structs.replace(policy, allowed_models=(), disabled=("look",))
    session_context = msgspec.structs.replace(where, session="t", policy=barred, reserve_usd=0)
    request, call = session_context.terms_of_model(named, Table(), now), session_context.terms_of_tool(look.spec, now)
    assert request.base.flaw is not None
    assert call.flaw is not None
    assert session_context.scopes == ("session:t", "agent:desk", "fleet")
    assert call.base.halts == session_context.halts == list_halt_rows(session_context.scopes)
    assert session_context.caps == policy.caps != where.caps
