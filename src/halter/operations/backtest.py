"""Try a policy on the past: what it would have decided, and the tightest one that would have let everything pass."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from halter.config.agent_files import AgentFile, parse_agent, read_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.policy import parse_stored_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import Document, load_bytes
from halter.core.errors import NotDone
from halter.core.money import Cap, Usd, format_micros, micros_to_usd
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.core.spec import Phase, ResolvedPolicy, ToolRule
from halter.operations.desk import Actor, Agent, Dollars, Moment, Name, fail_invalid
from halter.operations.money import amount_of
from halter.runtime.backtest import BacktestLine, PolicyChange, backtest, read_policy
from halter.runtime.recorded_use import RecordedUse, measure_use
from halter.runtime.runtime import DEFAULT_FLEET, read_stored_policy

PolicyText = Annotated[
    str, Meta(max_length=8000, description="The policy to test: the text of an agent.yaml or of a halter.yaml.")
]
SessionCap = Annotated[
    Dollars, Meta(description="Test the recorded policy with this cap of a session.", extra={"metavar": "USD"})
]
Revision = Annotated[
    Name,
    Meta(
        description="Test an earlier policy of the agent: its digest, or its beginning.", extra={"metavar": "REVISION"}
    ),
]
CENT: Final = 10_000
MOST_SESSIONS: Final = 10_000
Since = Annotated[Moment, Meta(description="Only sessions begun since, in microseconds since 1970.")]


class BacktestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What another policy would have decided over an agent's recorded sessions.

    `lines` lists at most 10,000 decisions, the looser ones first; `differing` and `loosened` count all. `changed`
    counts by what became of a call or a request then and now; `after` counts changes in sessions that had gone another
    way before. `unjudged` counts what could not be judged, by reason; `unnamed` the calls of tools that no
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
    """Judge an agent's recorded calls and requests again under another policy. Nothing acts.

    Without a policy, a cap or a revision, the agent's folder as it is now is tested.
    """
    actor.require_agent(agent)
    if sum(map(bool, (policy, cap, against))) > 1:
        fail_invalid("Name one of a policy, a cap and an earlier revision.")
    what, change, fleet = await _choose_change(actor, agent, policy, cap, against)
    found = await actor.app.store.study(lambda view: backtest(view, agent, change, since=since, replaces_fleet=fleet))
    if not found.sessions:
        raise _make_no_sessions_error(agent)
    return BacktestResult(
        agent=agent,
        policy=what,
        sessions=found.sessions,
        decisions=found.decisions,
        differing=found.differing,
        loosened=found.loosened,
        changed=found.changed,
        after=found.after,
        sessions_diverged=found.diverged,
        sessions_stopped=found.stopped,
        not_spent_usd=micros_to_usd(found.not_spent),
        unjudged=found.unjudged,
        unnamed=found.unnamed,
        notes=found.notes,
        lines=found.lines,
    )


def _make_no_sessions_error(agent: str) -> NotDone:
    return NotDone(f"No session of {agent!r} is recorded, or none since then: look at `halter sessions`.", "missing")


async def _choose_change(
    actor: Actor, agent: str, policy: str, cap: str, against: str
) -> tuple[str, PolicyChange, bool]:
    """The policy under test, in words and as a function; and whether it replaces that of the store."""
    if cap:
        amount = amount_of(cap)
        limit = "no cap" if amount is None else f"a cap of {format_micros(amount)}"
        return f"the recorded policy, with {limit} of a session", lambda recorded: _apply_cap(recorded, amount), False
    if against:
        digest, earlier = await _find_revision(actor, agent, against)
        return f"revision {digest[:12]}", lambda _: earlier, False
    document = load_bytes(policy.encode(), "the policy") if policy else None
    if document is not None and not _names_agent(document):
        resolved = resolve_policy(parse_fleet(document), _read_folder(actor, agent))
        return "the given halter.yaml", lambda _: resolved, True
    file = _read_folder(actor, agent) if document is None else parse_agent(document)
    if file.spec.name != agent:
        fail_invalid(f"The policy is that of {file.spec.name!r}, and {agent!r} is asked about.")
    resolved = resolve_policy(await _read_fleet(actor), file)
    return ("the agent's folder" if document is None else "the given agent.yaml"), lambda _: resolved, False


def _apply_cap(recorded: ResolvedPolicy, amount: int | None) -> ResolvedPolicy:
    caps = msgspec.structs.replace(recorded.caps, session=Cap(amount, recorded.caps.session.per))
    return msgspec.structs.replace(recorded, caps=caps)


def _names_agent(document: Document) -> bool:
    value: Any = document.value
    return isinstance(value, dict) and "name" in value


async def _read_fleet(actor: Actor) -> FleetConfig:
    row = await read_stored_policy(actor.app.store)
    return DEFAULT_FLEET if row is None else parse_stored_fleet(row.policy)


def _read_folder(actor: Actor, agent: str) -> AgentFile:
    folder = None if actor.agents is None else actor.agents.folders.get(agent)
    if folder is None:
        fail_invalid(f"Say what to test: an agent.yaml, a cap or a revision; or name the folder of {agent}.")
    return read_agent(folder)


async def _find_revision(actor: Actor, agent: str, beginning: str) -> tuple[str, ResolvedPolicy]:
    params = {"agent": agent, "limit": MOST_SESSIONS}
    rows = await actor.app.store.ask(Query("sessions_of_agent", SessionRow, params))
    known = sorted({row.definition for row in rows if row.definition})
    found = [digest for digest in known if digest.startswith(beginning)]
    if len(found) != 1:
        shown = ", ".join(digest[:12] for digest in known) or "none"
        raise NotDone(f"No one revision of {agent} begins with {beginning!r}: there are {shown}.", "missing")
    kept = await actor.app.store.study(lambda view: read_policy(view, found[0]))
    if kept is None:
        raise NotDone(f"Revision {found[0][:12]} cannot be read: another version of Halter kept it.", "missing")
    return found[0], kept.policy


class SuggestedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest policy under which nothing that ran would have been refused, as lines for an agent.yaml.

    `refused` counts what it would have refused all the same, by the backtest of it.
    """

    agent: str
    sessions: int
    decisions: int
    refused: int
    text: str


async def suggest_policy(actor: Actor, agent: Agent, *, since: Since = 0) -> SuggestedPolicy:
    """Suggest the tightest policy that would have let pass everything that an agent's recorded sessions did."""
    actor.require_agent(agent)
    use = await actor.app.store.study(lambda view: measure_use(view, agent, since=since))
    if not use.sessions:
        raise _make_no_sessions_error(agent)
    found = await actor.app.store.study(
        lambda view: backtest(view, agent, lambda recorded: _tighten(recorded, use), since=since)
    )
    return SuggestedPolicy(
        agent=agent, sessions=use.sessions, decisions=found.decisions, refused=found.refused, text=_write_yaml(use)
    )


def _round_up(usd: int, reserve: float = 0.0) -> int:
    """To whole cents, with the part that a session keeps for its last words on top."""
    return math.ceil(usd / (1 - min(reserve, 0.9)) / CENT) * CENT


def _tighten(recorded: ResolvedPolicy, use: RecordedUse) -> ResolvedPolicy:
    caps = msgspec.structs.replace(
        recorded.caps,
        session=Cap(_round_up(use.session_usd, recorded.reserve_cost_fraction), recorded.caps.session.per),
        agent=(Cap(_round_up(use.day_usd), "day"),),
    )
    own = recorded.policies[-1]
    rules = {
        tool: msgspec.structs.replace(own.tools.get(tool, ToolRule()), rate=attempts)
        for tool, attempts in use.attempts.items()
    }
    phases = tuple(Phase(each.name, use.tools.get(each.name, ())) for each in recorded.phases)
    policy = msgspec.structs.replace(own, tools={**own.tools, **rules})
    return msgspec.structs.replace(
        recorded,
        caps=caps,
        phases=phases,
        policies=(*recorded.policies[:-1], policy),
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
