"""The model and the limits of one run. The limits can only tighten those of its agent."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from msgspec import UNSET, Struct, to_builtins
from msgspec.structs import replace

from halter.config.decode import decode_document, format_key_path, value_or_default
from halter.config.yaml_reader import Document, SourceMap
from halter.core.events import SessionStarted
from halter.core.money import Cap
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.meet import tighten
from halter.spec.forms import OneModel, Spec
from halter.spec.limits import AgentBounds, Limits
from halter.spec.models import (
    BrainSpec,
)

MODEL_LIMITS: Final = (
    "max_output_tokens",
    "max_retries",
    "outage_backoff",
    "context_window",
    "context_strategy",
    "streaming",
    "max_tokens_recoveries",
    "max_repeated_tool_steps",
)
_POLICY_LIMITS: Final = (
    "on_cap",
    "max_steps",
    "timeout",
    "min_output_tokens",
    "reserve_tokens",
    "reserve_cost_fraction",
)
_WINDOW_CAPS: Final = ("max_cost_usd_per_hour", "max_cost_usd_per_day")


def list_limit_conflicts(max_output: int, min_output: int, window: int) -> Iterator[tuple[str, str]]:
    """List limits of an answer that exclude each other: the key to change, and a sentence."""
    if max_output < min_output:
        sentence = f"`max_output_tokens` ({max_output}) is less than `min_output_tokens` ({min_output})"
        yield "max_output_tokens", f"{sentence}; change one of them."
    if window and window <= max_output:
        sentence = f"context window of {window} tokens is too small for max_output_tokens {max_output}"
        yield "context_window", f"{sentence}; raise it, or lower `max_output_tokens`."


class RunSettings(Struct, frozen=True):
    """The model and the limits of a run that has its own. The journal keeps them, so that a resume has the same."""

    model: str = ""
    limits: Limits = Limits()

    @classmethod
    def of(cls, event: object) -> "RunSettings":
        """Return the settings with which a session has started."""
        if not isinstance(event, SessionStarted) or not (event.model or event.limits):
            return NO_RUN_SETTINGS
        known_limits = {key: value for key, value in event.limits.items() if key in Limits.__struct_fields__}
        return cls(event.model, Limits(**cast("dict[str, Any]", known_limits)))

    def record(self, event: SessionStarted) -> SessionStarted:
        """Return the start of a session with these settings."""
        if self == NO_RUN_SETTINGS:
            return event
        return replace(event, model=self.model, limits=to_builtins(self.limits))


NO_RUN_SETTINGS: Final = RunSettings()


class _ModelKey(Spec, frozen=True):
    model: OneModel


def parse_model(name: str, where: str) -> str:
    """Parse the name of a model, written as in an agent's file. `where` is named in messages."""
    return decode_document(Document({"model": name}, SourceMap(where)), _ModelKey).model


def parse_session_limits(limits: Mapping[str, Any], where: str) -> Limits:
    """Parse limits of single sessions, written as in an agent's file. `where` is named in messages."""
    document = Document({"limits": dict(limits)}, SourceMap(where))
    session_limits = decode_document(document, AgentBounds).limits
    for key in _WINDOW_CAPS:
        if getattr(session_limits, key) is not UNSET:
            sentence = f"`limits.{key}` counts for all runs of the agent; set it in the limits of the agent."
            raise document.source_map.error_at(("limits", key), sentence)
    return session_limits


def require_tighter(policy: ResolvedPolicy, settings: BrainSpec, limits: Limits) -> None:
    """Raise ConfigError if the limits of a run are looser than those of its agent, or exclude each other."""
    run, agent_limits = SourceMap("the run"), (_list_policy_limits(policy), _list_model_limits(settings))
    for difference in (each for bound in agent_limits for each in tighten(bound, limits, path=("limits",)).differences):
        if difference.how == "looser":
            raise run.error_at(
                difference.path,
                f"`{format_key_path(difference.path)}` is {difference.second_text} for this run, but the agent allows "
                f"only {difference.first_text}. Lower it, or raise the agent's own limit.",
            )
    narrowed = narrow_settings(settings, limits)
    min_output = narrow_policy(policy, limits).min_output_tokens
    for key, sentence in list_limit_conflicts(narrowed.max_output_tokens, min_output, narrowed.context_window):
        raise run.error_at(("limits", key), sentence)


def narrow_policy(policy: ResolvedPolicy, limits: Limits) -> ResolvedPolicy:
    """Return a policy with the lower of each limit of the policy and of a run; for a choice, the run's."""
    lower = tighten(_list_policy_limits(policy), limits).value
    session_cap = Cap(value_or_default(lower.max_cost_usd, None), policy.caps.session.per)
    caps = replace(policy.caps, session=session_cap, token_budget=lower.token_budget or None)
    return replace(policy, caps=caps, **{key: getattr(lower, key) for key in _POLICY_LIMITS})


def narrow_settings(settings: BrainSpec, limits: Limits) -> BrainSpec:
    """Return the settings of a model with the lower of each limit; for a choice, the run's."""
    lower = tighten(_list_model_limits(settings), limits).value
    return replace(settings, **{key: getattr(lower, key) for key in MODEL_LIMITS})


def _list_policy_limits(policy: ResolvedPolicy) -> Limits:
    """Return the limits of a policy as a file writes them."""
    session_cap, token_budget = policy.caps.session.max_cost_usd, policy.caps.token_budget or 0
    limits = {key: getattr(policy, key) for key in _POLICY_LIMITS}
    return Limits(max_cost_usd=session_cap, token_budget=token_budget, **limits)


def _list_model_limits(settings: BrainSpec) -> Limits:
    return Limits(**{key: getattr(settings, key) for key in MODEL_LIMITS})
