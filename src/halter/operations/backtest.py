"""Backtests of a policy on recorded sessions, and the tightest policy that would have allowed all they did."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from halter.config.agent_files import AgentFile, parse_agent, read_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.policy import parse_stored_fleet
from halter.config.resolve import resolve_policy
from halter.config.run_limits import narrow_policy
from halter.config.yaml_reader import Document, load_bytes
from halter.core.errors import NotDone
from halter.core.money import Cap, Usd, format_exact_micros, micros_to_usd
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.operations.actor import Actor, Agent, Dollars, Moment, Name, fail_invalid
from halter.operations.money import amount_of
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.backtest import BacktestLine, PolicyChange, RecordedUse, backtest, measure_use, read_policy
from halter.runtime.runtime import DEFAULT_FLEET, read_stored_policy
from halter.spec.agent import Phase
from halter.spec.limits import Limits
from halter.spec.policy import ToolRule

PolicyText = Annotated[
    str, Meta(max_length=8000, description="The policy to test: the text of an agent.yaml or of a halter.yaml.")
]
SessionCap = Annotated[
    Dollars, Meta(description="Test the recorded policy with this cap per session.", extra={"metavar": "USD"})
]
Revision = Annotated[
    Name,
    Meta(description="Test an earlier policy of the agent, by digest or prefix.", extra={"metavar": "REVISION"}),
]
CENT: Final = 10_000
MAX_SESSIONS: Final = 10_000
Since = Annotated[Moment, Meta(description="Only sessions started since, in microseconds since 1970.")]


class BacktestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of another policy over an agent's recorded sessions.

    `lines` lists at most 10,000 decisions, the looser ones first; `differing` and `loosened` count all. `changed`
    counts by the recorded and the new outcome of a call or a request; `after` counts changes in sessions that had
    already diverged. `unjudged` counts what could not be judged, by reason; `unnamed` counts calls of tools that no
    rule of the policy names.
    """

    agent: str
    policy: str
    sessions: int
    decisions: int
    differing: int
    loosened: int
    changed: Mapping[str, int]
    after: int
    sessions_diverged: int
    sessions_stopped: int
    not_spent_usd: Usd
    unjudged: Mapping[str, int]
    unnamed: Mapping[str, int]
    notes: Sequence[str]
    lines: Sequence[BacktestLine]


async def backtest_policy(
    actor: Actor,
    agent: Agent,
    *,
    since: Since = 0,
    policy: PolicyText = "",
    cap: SessionCap = "",
    against: Revision = "",
) -> BacktestResult:
    """Judge an agent's recorded calls and requests again under another policy. Nothing is executed.

    Without a policy, a cap or a revision, the current files of the agent's folder are tested.
    """
    actor.require_agent(agent)
    if sum(map(bool, (policy, cap, against))) > 1:
        fail_invalid("Give only one of policy, cap and revision.")
    policy_label, change, fleet = await _choose_change(actor, agent, policy, cap, against)
    result = await actor.app.store.study(lambda view: backtest(view, agent, change, since=since, replaces_fleet=fleet))
    if not result.sessions:
        raise _make_no_sessions_error(agent)
    return BacktestResult(
        agent=agent,
        policy=policy_label,
        sessions=result.sessions,
        decisions=result.decisions,
        differing=result.differing,
        loosened=result.loosened,
        changed=result.changed,
        after=result.after,
        sessions_diverged=result.diverged,
        sessions_stopped=result.stopped,
        not_spent_usd=micros_to_usd(result.not_spent),
        unjudged=result.unjudged,
        unnamed=result.unnamed,
        notes=result.notes,
        lines=result.lines,
    )


def _make_no_sessions_error(agent: str) -> NotDone:
    return NotDone(f"No session of {agent!r} is recorded, or none since then. See `halter sessions`.", "missing")


async def _choose_change(
    actor: Actor, agent: str, policy: str, cap: str, against: str
) -> tuple[str, PolicyChange, bool]:
    """Choose the policy under test: its label, a function of the recorded one, and whether it replaces the store's."""
    if cap:
        amount = amount_of(cap)
        cap_text = "no cap" if amount is None else f"a cap of {format_exact_micros(amount)}"
        return (
            f"the recorded policy, with {cap_text} per session",
            lambda recorded: _apply_cap(recorded, amount),
            False,
        )
    if against:
        digest, earlier = await _find_revision(actor, agent, against)
        return f"revision {digest[:12]}", lambda _: earlier, False
    document = load_bytes(policy.encode(), "the policy") if policy else None
    if document is not None and not _names_agent(document):
        resolved_policy = resolve_policy(parse_fleet(document), _read_folder(actor, agent))
        return "the given halter.yaml", lambda _: resolved_policy, True
    file = _read_folder(actor, agent) if document is None else parse_agent(document)
    if file.spec.name != agent:
        fail_invalid(f"The policy is for {file.spec.name!r}, not for {agent!r}.")
    resolved_policy = resolve_policy(await _read_fleet(actor), file)
    return ("the agent's folder" if document is None else "the given agent.yaml"), lambda _: resolved_policy, False


def _apply_cap(recorded_policy: ResolvedPolicy, amount: int | None) -> ResolvedPolicy:
    caps = msgspec.structs.replace(recorded_policy.caps, session=Cap(amount, recorded_policy.caps.session.per))
    return msgspec.structs.replace(recorded_policy, caps=caps)


def _names_agent(document: Document) -> bool:
    value: Any = document.value
    return isinstance(value, dict) and "name" in value


async def _read_fleet(actor: Actor) -> FleetConfig:
    row = await read_stored_policy(actor.app.store)
    return DEFAULT_FLEET if row is None else parse_stored_fleet(row.policy)


def _read_folder(actor: Actor, agent: str) -> AgentFile:
    folder = None if actor.agents is None else actor.agents.folders.get(agent)
    if folder is None:
        fail_invalid(f"Nothing to test: give a policy, a cap or a revision, or pass the folder of {agent}.")
    return read_agent(folder)


async def _find_revision(actor: Actor, agent: str, prefix: str) -> tuple[str, ResolvedPolicy]:
    params = {"agent": agent, "limit": MAX_SESSIONS}
    rows = await actor.app.store.ask(Query("sessions_of_agent", SessionRow, params))
    digests = sorted({row.definition for row in rows if row.definition})
    matches = [digest for digest in digests if digest.startswith(prefix)]
    if len(matches) != 1:
        revision_list = ", ".join(digest[:12] for digest in digests) or "none"
        raise NotDone(
            f"{prefix!r} does not match exactly one revision of {agent}. Revisions: {revision_list}.", "missing"
        )
    recorded_policy = await actor.app.store.study(lambda view: read_policy(view, matches[0]))
    if recorded_policy is None:
        raise NotDone(
            f"Revision {matches[0][:12]} cannot be read: it was written by another version of Halter.", "missing"
        )
    return matches[0], recorded_policy.policy


class SuggestedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest policy that would have allowed everything that ran, as lines for an agent.yaml.

    `refused` counts what a backtest of this policy refuses nevertheless.
    """

    agent: str
    sessions: int
    decisions: int
    refused: int
    text: str


async def suggest_policy(actor: Actor, agent: Agent, *, since: Since = 0) -> SuggestedPolicy:
    """Suggest the tightest policy that would have allowed everything that an agent's recorded sessions did."""
    actor.require_agent(agent)
    use = await actor.app.store.study(lambda view: measure_use(view, agent, since=since))
    if not use.sessions:
        raise _make_no_sessions_error(agent)
    result = await actor.app.store.study(
        lambda view: backtest(view, agent, lambda recorded: _tighten(recorded, use), since=since)
    )
    return SuggestedPolicy(
        agent=agent, sessions=use.sessions, decisions=result.decisions, refused=result.refused, text=_write_yaml(use)
    )


def _round_up(micros: int, reserve: float = 0.0) -> int:
    """Round up to whole cents, and add the reserve that a session keeps for its wrap-up."""
    return math.ceil(micros / (1 - min(reserve, 0.9)) / CENT) * CENT


def _tighten(recorded_policy: ResolvedPolicy, use: RecordedUse) -> ResolvedPolicy:
    session_usd = _round_up(use.session_usd, recorded_policy.reserve_cost_fraction)
    narrowed_caps = narrow_policy(recorded_policy, Limits(max_cost_usd=session_usd)).caps
    caps = msgspec.structs.replace(narrowed_caps, agent=(Cap(_round_up(use.day_usd), "day"),))
    own_policy = recorded_policy.policies[-1]
    rules = {
        tool: msgspec.structs.replace(own_policy.tools.get(tool, ToolRule()), rate=attempts)
        for tool, attempts in use.attempts.items()
    }
    phases = tuple(Phase(each.name, use.tools.get(each.name, ())) for each in recorded_policy.phases)
    policy = msgspec.structs.replace(own_policy, tools={**own_policy.tools, **rules})
    return msgspec.structs.replace(
        recorded_policy,
        caps=caps,
        phases=phases,
        policies=(*recorded_policy.policies[:-1], policy),
        allowed_models=use.models,
    )


def _write_yaml(use: RecordedUse) -> str:
    lines = [
        "limits:",
        f"  max_cost_usd: {micros_to_usd(_round_up(use.session_usd, use.reserve))}",
        f"  max_cost_usd_per_day: {micros_to_usd(_round_up(use.day_usd))}",
    ]
    if use.attempts:
        lines += ["policy:", "  tools:"]
        lines += [f"    {tool}: {{rate: {attempts}/hour}}" for tool, attempts in use.attempts.items()]
    if use.tools:
        lines += ["phases:", *(f"  {phase}: [{', '.join(tools)}]" for phase, tools in use.tools.items())]
    if use.models:
        lines += ["allowed_models:", *(f"  - {model}" for model in use.models)]
    return "\n".join(lines) + "\n"
