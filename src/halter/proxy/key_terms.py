"""What a virtual key may do: its own limits, resolved with the fleet's policy."""

from collections.abc import Mapping

import msgspec

from halter.config.merge import FleetConfig
from halter.config.resolve import read_model_rates, resolve_agent
from halter.core.money import DOLLAR, format_exact_micros
from halter.guard.prepare import SessionContext
from halter.policy.evaluation import ResolvedPolicy
from halter.proxy.keys import VirtualKey
from halter.runtime.agent import parse_agent_options
from halter.runtime.runtime import Runtime
from halter.spec.models import Provider


class KeyTerms(msgspec.Struct, frozen=True):
    """A key's policy, resolved with the fleet's policy, and the providers of the fleet."""

    key: VirtualKey
    policy: ResolvedPolicy
    digest: str
    providers: Mapping[str, Provider]

    def make_context(self, app: Runtime, session: str) -> SessionContext:
        return SessionContext(
            session=session,
            agent=self.policy.name,
            phase=self.policy.phases[0],
            policy=self.policy,
            policy_digest=self.digest,
            tokens_per_hour=self.key.limits.tokens_per_hour,
            rate_limits=read_model_rates(app.fleet),
            key=self.key.name,
        )


def resolve_key(fleet: FleetConfig, key: VirtualKey) -> KeyTerms:
    """Resolve a key like an agent's file with the same limits. Raises ConfigError if the fleet allows less."""
    has_session_cap = fleet.spec.agents.limits.max_cost_usd is not msgspec.UNSET
    file = parse_agent_options(
        key.agent, {"policy": key.agent_keys(session_capped=has_session_cap)}, f"the key {key.name}", {}, {}
    )
    agent = resolve_agent(fleet, file, None)
    return KeyTerms(key, agent.policy, agent.policy.digest(), agent.model_settings.providers)


def describe_lower_cap(terms: KeyTerms) -> str:
    """Describe a cap of the fleet that is lower than a cap of a key, and so binds first; empty if there is none."""
    limits, caps = terms.key.limits, terms.policy.caps
    amounts = [each for each in (limits.max_cost_usd_per_hour, limits.max_cost_usd_per_day) if each is not None]
    for cap in caps.fleet:
        if cap.max_cost_usd is not None and amounts and cap.max_cost_usd < max(amounts) * DOLLAR:
            return (
                f"The fleet's cap of {format_exact_micros(cap.max_cost_usd)} a {cap.per} is lower, and binds all "
                "agents together. See `halter policy`."
            )
    return ""
