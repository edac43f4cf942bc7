"""An agent of the drills' own: its policy, the doors that its sessions go through, and how a session begins."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from halter.core.clock import HOUR, Clock
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.limits import Cap, Caps
from halter.core.messages import Model
from halter.core.money import DOLLAR
from halter.core.ports import Lease, Store
from halter.core.spec import Phase, Policy, Resolved, ToolRule, ToolsSpec
from halter.guard.ask import Standing
from halter.guard.gatehouse import Gatehouse
from halter.guard.secrets import GivenSecrets
from halter.models.prices import Prices
from halter.state.life import start
from halter_drills.broken import DrillBroken

PERSON: Final = "ada"
"""The person of the drills: whoever halts, resumes and decides."""

NO_RULES: Final = MappingProxyType[str, ToolRule]({})
NO_SECRETS: Final = GivenSecrets({})


def policy_of(
    name: str = "drill",
    *,
    expiry: int = HOUR,
    rules: Mapping[str, ToolRule] = NO_RULES,
    secrets: tuple[str, ...] = (),
    cap: int = DOLLAR,
) -> Resolved:
    """Write down the policy of an agent that has all its tools in one phase; `rules` are the fleet's for its tools."""
    return Resolved(
        name=name,
        mode="SEMI",
        observe=False,
        caps=Caps(session=Cap(cap), agent=(), fleet=()),
        on_cap="stop",
        max_steps=50,
        timeout=0,
        min_output_tokens=256,
        reserve_tokens=0,
        reserve_cost_fraction=0,
        policies=(Policy(tools=dict(rules)), Policy()),
        disabled=(),
        approval_expiry=expiry,
        tools=ToolsSpec(),
        phases=(Phase("all", None),),
        allowed_models=None,
        allowed_hosts=None,
        secrets=secrets,
        prices={},
    )


def standing_of(session: str, policy: Resolved, trigger: str = "") -> Standing:
    """Tell where a session stands under a policy."""
    return Standing(
        session=session,
        agent=policy.name,
        phase=policy.phases[0],
        policy=policy,
        policy_digest=policy.digest(),
        trigger=trigger,
        secrets=frozenset(policy.secrets),
    )


def doors(
    store: Store,
    clock: Clock,
    *,
    redact: Callable[[str], str] = str,
    secrets: GivenSecrets = NO_SECRETS,
    simulates: Model | None = None,
) -> Gatehouse:
    """Make the real doors."""
    return Gatehouse(store, clock, redact=redact, secrets=secrets, prices=Prices(), simulates=simulates)


async def begun(store: Store, worker: WorkerId, session: str, policy: Resolved, trigger: str = "") -> Lease:
    """Begin a session and take it."""
    event = SessionStarted(session=session, agent=policy.name, kind="task", started_by=PERSON, trigger=trigger)
    await store.commit(start(event))
    leases = await store.claim(worker, 1, SessionId(session))
    if not leases:
        raise DrillBroken(f"The session {session} of the drill could not be claimed, though nobody else knows it.")
    return leases[0]
