"""Resolves the fleet's and the agent's files into one agent, which can only tighten the fleet.

A cap that only one file sets applies; without one the default applies. So an agent may set a cap above the default, but
never above the fleet's. The mode and the approval rules are the fleet's even if its file does not set them: then SEMI
and the default table apply.

Decisions of a person are bound to `policy` only: a change of the model, the instructions or the tasks keeps them valid.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from halter.config.agent_files import (
    INSTRUCTIONS,
    AgentFile,
    Guidance,
    UnusableFile,
    decode_file_text,
    list_skill_folders,
    read_folder_file,
    read_playbook,
    read_skills,
)
from halter.config.decode import decode_document, format_key_path, value_or_default
from halter.config.merge import FilePair, FleetConfig
from halter.config.roots import list_guidance_files, read_agent_guidance
from halter.config.sections import (
    CHANNELS_PATH,
    collect_hot_fields,
    compile_gate,
    compile_signals,
    list_paced_models,
    list_pacing_mistakes,
    list_task_mistakes,
    list_triggers,
)
from halter.config.yaml_reader import MAX_BYTES, Document, KeyPath, SourceMap, load_bytes
from halter.core.clock import MINUTE
from halter.core.errors import ConfigError
from halter.core.money import Cap, Caps, RateLimit
from halter.core.text import describe_value, join_names, shorten, suggest_nearest
from halter.core.tools import TOOLS_BY_FAMILY, ToolSpec, find_secret_names
from halter.core.usage import FREE_PRICE, ModelName
from halter.policy.defaults import (
    AGENT_DAY_CAP,
    FLEET_DAY_CAP,
    MAX_STEPS,
    MIN_OUTPUT_TOKENS,
    RESERVE_COST_FRACTION,
    RESERVE_TOKENS,
    SESSION_CAP,
    TIMEOUT,
)
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.meet import tighten
from halter.policy.order import is_covered
from halter.spec.agent import AgentSpec, Phase, PhasePlan
from halter.spec.autonomy import Autonomy, Gate, Pacing
from halter.spec.channels import Channel, Notify
from halter.spec.fleet import FleetSpec
from halter.spec.forms import OneModel, Spec
from halter.spec.limits import AgentBounds, Limits
from halter.spec.models import (
    CLOUD_HOSTS,
    KNOWN_PROVIDERS,
    REFLEX,
    SCRIPTED,
    UNKNOWN_PROVIDER,
    BrainSpec,
    CloudName,
    Provider,
    ProviderSpec,
    WireFormat,
    choose_wire,
)
from halter.spec.playbook import Playbook
from halter.spec.sensors import SensorSource
from halter.spec.skills import Skill
from halter.spec.tasks import VERBS, Anonymize, Tasks, Verbs
from halter.spec.triggers import Schedule

WORK_PHASES: Final = (Phase("work", None),)
REVIEW_PHASES: Final = (
    Phase("intake", ("retrieve_chunks",)),
    Phase("analysis", ("retrieve_chunks", "run_skill", "run_playbook", "propose_precedent")),
    Phase("drafting", ("run_skill", "emit_finding", "propose_memory", "propose_precedent")),
    Phase("ethics_review", ("emit_finding",)),
    Phase("delivery", ("notify",)),
)

IN_APP_CHANNEL: Final = Channel(name="in_app", type="in_app")

_LOCAL_PROVIDERS: Final = frozenset((SCRIPTED, REFLEX))
_MODEL_LIMITS: Final = (
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

LocateValue = Callable[[KeyPath], str]


class ResolvedAgent(Struct, frozen=True, kw_only=True):
    """The checked configuration of an agent and its fleet, with every default filled in.

    `source_folder` is the agent's folder; an agent that is defined in a program has none. `notes` say what of its files
    is left out. `locate_script` and `locate_reflex` locate replies and rules for error messages.
    """

    policy: ResolvedPolicy
    model_settings: BrainSpec = field(default_factory=BrainSpec)
    pacing: Pacing = field(default_factory=Pacing)
    tasks: Tasks = field(default_factory=Tasks)
    skills: Mapping[str, Skill] = {}
    playbooks: Mapping[str, Playbook] = {}
    source_folder: Path | None = None
    notes: tuple[str, ...] = ()
    locate_script: LocateValue = lambda _: "the agent"
    locate_reflex: LocateValue = lambda _: "the agent"

    def models(self) -> Iterator[str]:
        settings = self.model_settings
        yield from (name for name in (settings.model, *settings.fallback_models, *settings.model_for.values()) if name)
        yield from self.pacing.models()
        yield from self.tasks.review.judges

    def parts(self) -> dict[str, Any]:
        """Return the fields by name, for a subclass that adds fields."""
        return {name: getattr(self, name) for name in ResolvedAgent.__struct_fields__}


def resolve_agent(fleet: FleetConfig, agent: AgentFile, folder: Path | None) -> ResolvedAgent:
    """Resolve an agent, or raise a ConfigError with the fix.

    An agent that is defined in a program has no folder and no `AGENTS.md`; files that it names are relative to the
    working directory.
    """
    files, base_folder = FilePair(fleet, agent), folder or Path()
    policy = resolve_policy(fleet, agent)
    fleet_providers, agent_providers = files.fleet.spec.providers, files.agent.spec.providers
    for name, spec in agent_providers.items():
        _check_provider(files, name, spec)
    providers: dict[str, Provider] = {}
    for name in (*fleet_providers, *(name for name in agent_providers if name not in fleet_providers)):
        file = files.agent if name in agent_providers else files.fleet
        specs = (agent_providers.get(name, ProviderSpec()), fleet_providers.get(name, ProviderSpec()))
        providers[name] = _provider(name, specs, file.source_map)
    _check_models(files, providers)
    script, script_at = _script(agent, base_folder)
    reflex, reflex_at = _reflex(agent, base_folder)
    guidance = Guidance() if folder is None else read_agent_guidance(folder)
    instructions = "\n\n".join(filter(None, (_instructions(agent.spec, folder), guidance.text)))
    settings = _resolve_model_settings(files, providers, instructions)
    pacing, tasks = _pacing(files), _tasks(files, folder)
    return ResolvedAgent(
        policy=policy,
        model_settings=replace(settings, script=script, reflex=reflex),
        pacing=pacing,
        tasks=tasks,
        skills={} if folder is None else read_skills(folder),
        playbooks={} if folder is None else _playbooks(folder, tasks),
        source_folder=folder,
        notes=guidance.notes,
        locate_script=script_at,
        locate_reflex=reflex_at,
    )


def resolve_policy(fleet: FleetConfig, agent: AgentFile) -> ResolvedPolicy:
    files = FilePair(fleet, agent)
    fleet_spec, agent_spec = fleet.spec, agent.spec
    limits = files.limits()
    return ResolvedPolicy(
        name=agent_spec.name,
        mode=files.mode(),
        observe=files.observe(),
        caps=_caps(limits, fleet_spec),
        on_cap=value_or_default(limits.on_cap, "wrap_up"),
        max_steps=value_or_default(limits.max_steps, MAX_STEPS),
        timeout=value_or_default(limits.timeout, TIMEOUT),
        min_output_tokens=value_or_default(limits.min_output_tokens, MIN_OUTPUT_TOKENS),
        reserve_tokens=value_or_default(limits.reserve_tokens, RESERVE_TOKENS),
        reserve_cost_fraction=value_or_default(limits.reserve_cost_fraction, RESERVE_COST_FRACTION),
        policies=files.policies(),
        disabled=files.list_disabled(),
        approval_expiry=files.expiry(),
        tools=files.tools(),
        phases=resolve_phases(agent_spec.phases),
        allowed_models=files.models(),
        allowed_hosts=files.hosts(),
        secrets=files.secrets(),
        prices={
            model: (FREE_PRICE if isinstance(spec.price, str) else spec.price)
            for model, spec in fleet_spec.models.items()
        },
    )


def check_named_tools(resolved: ResolvedPolicy, agent: AgentFile, tools: Iterable[ToolSpec]) -> None:
    """Check the tool rules of an agent's file once its tools are known.

    Raises a ConfigError for an unknown tool, and for a rule that is looser than the rule that applies to the tool.
    """
    tools_by_name = {tool.name: tool for tool in tools}
    for path, name in list_named_tools(agent):
        if name not in tools_by_name:
            raise agent.source_map.error_at(
                path, f"there is no tool `{name}`; {suggest_nearest(name, sorted(tools_by_name), 'the tools')}"
            )
    for name, rule in agent.spec.policy.tools.items():
        effective = resolved.rule(name, tools_by_name[name].level).as_rule()
        path = ("policy", "tools", name)
        for difference in tighten(effective, rule, path=path).differences:
            if difference.how == "looser":
                raise agent.source_map.error_at(
                    difference.path,
                    f"`{format_key_path(difference.path)}` is {difference.second_text}, but {difference.first_text} "
                    "applies to this tool; an agent can only tighten it.",
                )


def check_reflex_tools(agent: "ResolvedAgent", tools: Iterable[str]) -> None:
    """Raise ConfigError, with its line, for a rule of a reflex that calls a tool which the agent does not have."""
    tool_names = sorted({*tools, *VERBS})
    for index, rule in enumerate(agent.model_settings.reflex):
        for path, name in _list_called_tools(rule):
            if name not in tool_names:
                location = agent.locate_reflex((index, *path))
                raise ConfigError(
                    f"{location}: there is no tool `{name}`; {suggest_nearest(name, tool_names, 'the tools')}"
                )


def _list_called_tools(rule: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield the tools that a rule calls; its form is checked when the model is made."""
    if not isinstance(rule, dict):
        return
    fields = cast("dict[str, Any]", rule)
    calls = fields.get("calls")
    numbered_calls = enumerate(cast("list[Any]", calls)) if isinstance(calls, list) else ()
    paths: list[tuple[KeyPath, Any]] = [(("call", "tool"), fields.get("call"))]
    paths += [(("calls", number, "tool"), call) for number, call in numbered_calls]
    for path, call in paths:
        name = cast("dict[str, Any]", call).get("tool") if isinstance(call, dict) else None
        if isinstance(name, str):
            yield path, name


_OTHER_PROGRAMS_TOOL: Final = re.compile(r"mcp__|MCP:")


def list_unknown_tool_rules(fleet: FleetConfig, list_known_tools: Callable[[], Iterable[str]]) -> tuple[str, ...]:
    """List warnings about fleet rules for tools that no agent has: a rule with a typo protects nothing.

    They are no errors: a rule may be for the tool of an agent elsewhere. Programs whose calls Halter only judges have
    tools of their own. Knowing all tools is slow, so they are listed only if there are rules.
    """
    policy = fleet.spec.policy
    tool_paths: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in policy.tools]
    tool_paths += [(("policy", "disabled", index), name) for index, name in enumerate(policy.disabled)]
    others = frozenset[str]().union(*TOOLS_BY_FAMILY.values())
    tool_paths = [each for each in tool_paths if each[1] not in others and not _OTHER_PROGRAMS_TOOL.match(each[1])]
    tool_names = sorted({*list_known_tools()}) if tool_paths else []
    return tuple(
        f"{fleet.source_map.at(path)}: no agent here has a tool `{name}`; "
        f"{suggest_nearest(name, tool_names, 'the tools')}"
        for path, name in tool_paths
        if name not in tool_names
    )


def list_named_tools(agent: AgentFile) -> list[tuple[KeyPath, str]]:
    spec = agent.spec
    tool_paths: list[tuple[KeyPath, str]] = [(("policy", "tools", name), name) for name in spec.policy.tools]
    tool_paths += [(("policy", "disabled", index), name) for index, name in enumerate(spec.policy.disabled)]
    tool_paths += [(("tools", "own", index), name) for index, name in enumerate(value_or_default(spec.tools.own, ()))]
    if not isinstance(spec.phases, str):
        for phase in resolve_phases(spec.phases):
            tool_paths += [(("phases", phase.name, index), name) for index, name in enumerate(phase.grants or ())]
    return [(path, name) for path, name in tool_paths if path[0] != "phases" or name not in VERBS]


def _caps(limits: Limits, fleet: FleetSpec) -> Caps:
    hourly, monthly = limits.max_cost_usd_per_hour, fleet.limits.max_cost_usd_per_month
    return Caps(
        session=Cap(value_or_default(limits.max_cost_usd, SESSION_CAP)),
        agent=(
            Cap(value_or_default(limits.max_cost_usd_per_day, AGENT_DAY_CAP), "day"),
            *(() if hourly is UNSET else (Cap(hourly, "hour"),)),
        ),
        fleet=(
            Cap(value_or_default(fleet.limits.max_cost_usd_per_day, FLEET_DAY_CAP), "day"),
            *(() if monthly is UNSET else (Cap(monthly, "month"),)),
        ),
        token_budget=value_or_default(limits.token_budget, 0) or None,
        zone=fleet.zone,
    )


def resolve_phases(phases: "PhasePlan | UnsetType") -> tuple[Phase, ...]:
    if phases == "review":
        return REVIEW_PHASES
    if phases is UNSET or isinstance(phases, str):
        return WORK_PHASES
    return tuple(Phase(name, None if isinstance(grants, str) else grants) for name, grants in phases.items())


def _resolve_model_settings(files: FilePair, providers: Mapping[str, Provider], instructions: str) -> BrainSpec:
    spec, limits = files.agent.spec, files.limits()
    max_output = value_or_default(limits.max_output_tokens, BrainSpec().max_output_tokens)
    min_output = value_or_default(limits.min_output_tokens, MIN_OUTPUT_TOKENS)
    window = value_or_default(limits.context_window, 0)
    for key, sentence in _list_limit_conflicts(max_output, min_output, window):
        raise _limit_error(files, key, sentence)
    return BrainSpec(
        model=value_or_default(spec.model, ""),
        fallback_models=spec.fallback_models,
        model_for=dict(spec.model_for),
        providers=providers,
        instructions=instructions,
        tool_calls=spec.tool_calls,
        temperature=value_or_default(spec.temperature, None),
        thinking=value_or_default(spec.thinking, None),
        provider_tools=files.provider_tools(),
        rates=read_model_rates(files.fleet),
        **{key: value for key in _MODEL_LIMITS if (value := getattr(limits, key)) is not UNSET},
    )


def _list_limit_conflicts(max_output: int, min_output: int, window: int) -> Iterator[tuple[str, str]]:
    """List limits of an answer that exclude each other: the key to change, and a sentence."""
    if max_output < min_output:
        sentence = f"`max_output_tokens` ({max_output}) is less than `min_output_tokens` ({min_output})"
        yield "max_output_tokens", f"{sentence}; change one of them."
    if window and window <= max_output:
        sentence = f"context window of {window} tokens is too small for max_output_tokens {max_output}"
        yield "context_window", f"{sentence}; raise it, or lower `max_output_tokens`."


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
    for key, sentence in _list_limit_conflicts(narrowed.max_output_tokens, min_output, narrowed.context_window):
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
    return replace(settings, **{key: getattr(lower, key) for key in _MODEL_LIMITS})


def _list_policy_limits(policy: ResolvedPolicy) -> Limits:
    """Return the limits of a policy as a file writes them."""
    session_cap, token_budget = policy.caps.session.max_cost_usd, policy.caps.token_budget or 0
    limits = {key: getattr(policy, key) for key in _POLICY_LIMITS}
    return Limits(max_cost_usd=session_cap, token_budget=token_budget, **limits)


def _list_model_limits(settings: BrainSpec) -> Limits:
    return Limits(**{key: getattr(settings, key) for key in _MODEL_LIMITS})


def _playbooks(folder: Path, tasks: Tasks) -> Mapping[str, Playbook]:
    files = [*sorted((folder / "playbooks").glob("*.yaml"))]
    files += [folder / trigger.playbook for trigger in tasks.triggers() if trigger.playbook is not UNSET]
    file_by_name: dict[str, Path] = {}
    for file in dict.fromkeys(files):
        existing = file_by_name.setdefault(file.stem, file)
        if existing != file:
            raise ConfigError(f"{file} and {existing} are both playbooks called {file.stem}; rename one of them.")
    return {name: read_playbook(file, str(file.relative_to(folder))) for name, file in file_by_name.items()}


def read_model_rates(fleet: FleetConfig) -> dict[str, RateLimit]:
    """Return the rate limits of models. Only the fleet sets them, since all agents share them."""
    return {
        name: RateLimit(
            value_or_default(rate.requests_per_minute, None), value_or_default(rate.tokens_per_minute, None)
        )
        for name, rate in fleet.spec.rates.items()
    }


def _limit_error(files: FilePair, key: str, sentence: str) -> ConfigError:
    """Return an error at the line of a limit: in the agent's file, else in the fleet's."""
    if ("limits", key) in files.agent.source_map.lines:
        return files.agent.source_map.error_at(("limits", key), sentence)
    if ("agents", "limits", key) in files.fleet.source_map.lines:
        return files.fleet.source_map.error_at(("agents", "limits", key), sentence)
    return files.agent.source_map.error_at(("limits",), sentence)


def _provider(name: str, specs: tuple[ProviderSpec, ProviderSpec], source_map: SourceMap) -> Provider:
    """Build a provider: each key from the agent's file, else the fleet's, else the default."""
    path: KeyPath = ("providers", name)
    if name in _LOCAL_PROVIDERS:
        raise source_map.error_at(path, f"`{name}` is built in and has no endpoint; remove it.")
    agent_spec, fleet_spec = specs
    known_provider = KNOWN_PROVIDERS.get(name, UNKNOWN_PROVIDER)
    base_url = value_or_default(agent_spec.base_url, value_or_default(fleet_spec.base_url, known_provider.base_url))
    if not base_url:
        sentence = f"`base_url` is missing from `{format_key_path(path)}`, which is not a known provider; write it"
        raise source_map.error_at(path, f"{sentence}, as in http://localhost:8000/v1.")
    wire: WireFormat = value_or_default(agent_spec.wire, value_or_default(fleet_spec.wire, choose_wire(name, base_url)))
    key, bills_errors = (
        value_or_default(agent_spec.api_key, value_or_default(fleet_spec.api_key, "")),
        value_or_default(agent_spec.bills_errors, fleet_spec.bills_errors),
    )
    cache = value_or_default(agent_spec.prompt_cache, value_or_default(fleet_spec.prompt_cache, True))  # noqa: FBT003
    vision = value_or_default(agent_spec.vision, value_or_default(fleet_spec.vision, True))  # noqa: FBT003
    credentials = fleet_spec.credentials if agent_spec.credentials is UNSET else agent_spec.credentials
    cloud: CloudName | None = None if credentials is UNSET else credentials
    if cloud is not None:
        by_fleet = UNSET not in (fleet_spec.base_url, fleet_spec.credentials)
        _check_cloud(cloud, base_url, key, (*path, "credentials"), source_map, by_fleet=by_fleet)
    return Provider(
        wire=wire,
        base_url=base_url,
        api_key=key,
        credentials=cloud,
        bills_errors=bills_errors is True,
        prompt_cache=cache,
        vision=vision,
    )


def _check_cloud(cloud: CloudName, url: str, key: str, path: KeyPath, source_map: SourceMap, *, by_fleet: bool) -> None:
    """Require a host of the cloud itself for its credentials, unless the fleet sets the URL."""
    if key:
        sentence = f"`{format_key_path(path)}` and `api_key` are both set; keep one of them."
        raise source_map.error_at(path, sentence)
    host = urlsplit(url).hostname or ""
    if not by_fleet and not (url.startswith("https://") and host.endswith(CLOUD_HOSTS[cloud])):
        hosts = join_names([f"*{suffix}" for suffix in CLOUD_HOSTS[cloud]])
        sentence = f"`{format_key_path(path)}` is `{cloud}`, whose credentials go only to {hosts} over https; use"
        raise source_map.error_at(path, f"{sentence} such a URL, or define the provider in halter.yaml.")


def _check_provider(files: FilePair, name: str, spec: ProviderSpec) -> None:
    """Reject a URL, a key or a billing rule that the fleet does not allow."""
    fleet, path = files.fleet.spec, ("providers", name)
    if spec.bills_errors is False and fleet.providers.get(name, ProviderSpec()).bills_errors is True:
        raise files.looser((*path, "bills_errors"), "false", (*path, "bills_errors"), "true")
    if spec.base_url is not UNSET:
        _check_address(files, name, spec.base_url)
    if spec.api_key is not UNSET and fleet.allowed_secrets is not UNSET:
        for secret in find_secret_names(spec.api_key.encode()):
            if not is_covered(secret, fleet.allowed_secrets):
                allowed_names = join_names(fleet.allowed_secrets) or "nothing"
                raise files.looser((*path, "api_key"), f"`{secret}`", ("allowed_secrets",), allowed_names)


def _check_address(files: FilePair, name: str, base_url: str) -> None:
    fleet, path = files.fleet.spec, ("providers", name, "base_url")
    if name in fleet.providers:
        fleet_url = value_or_default(
            fleet.providers[name].base_url, KNOWN_PROVIDERS.get(name, UNKNOWN_PROVIDER).base_url
        )
        if fleet_url != base_url:
            raise files.looser(path, f"`{base_url}`", ("providers", name), f"`{fleet_url}`")
    files.check_host(path, base_url)


def _list_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    if spec.model is not UNSET:
        yield ("model",), spec.model
    yield from ((("fallback_models", index), model) for index, model in enumerate(spec.fallback_models))
    yield from ((("model_for", purpose), model) for purpose, model in spec.model_for.items())
    yield from list_paced_models(spec)
    yield from ((("review", "judges", index), model) for index, model in enumerate(spec.review.judges))


def _check_models(files: FilePair, providers: Mapping[str, Provider]) -> None:
    spec, source_map = files.agent.spec, files.agent.source_map
    if spec.fallback_models and spec.model is UNSET:
        raise source_map.error_at(("fallback_models",), "`fallback_models` requires a `model`; write it.")
    provider_names = sorted({*KNOWN_PROVIDERS, *_LOCAL_PROVIDERS, *providers})
    for path, model in _list_models(spec):
        provider = ModelName.parse(model).provider
        if provider not in provider_names:
            hint = suggest_nearest(provider, provider_names, "the known ones")
            sentence = f"`{format_key_path(path)}` has the unknown provider `{provider}`; define it under `providers`"
            raise source_map.error_at(path, f"{sentence}; {hint}")
        _check_allowed(files, path, model)


def _check_allowed(files: FilePair, path: KeyPath, model: str) -> None:
    allowed_models = files.models()
    if allowed_models is None or is_covered(model, allowed_models):
        return
    if files.agent.spec.allowed_models is UNSET:
        raise files.looser(path, f"`{model}`", ("allowed_models",), join_names(allowed_models) or "nothing")
    location = files.agent.source_map.at(("allowed_models",))
    sentence = f"`{format_key_path(path)}` is `{model}`, which is not in the `allowed_models` of {location}"
    raise files.agent.source_map.error_at(path, f"{sentence}; add it there, or name another model.")


def _instructions(spec: AgentSpec, folder: Path | None) -> str:
    if folder is None:
        return spec.instructions.strip()
    try:
        data = read_folder_file(folder, INSTRUCTIONS)
        text = "" if data is None else decode_file_text(data)
    except UnusableFile as error:
        raise ConfigError(f"{folder / INSTRUCTIONS} {error}.") from None
    return "\n\n".join(text_part for text_part in (spec.instructions.strip(), text.strip()) if text_part)


def _script(agent: AgentFile, folder: Path) -> tuple[tuple[Any, ...], LocateValue]:
    name = agent.spec.script
    if name is UNSET:
        _reject_empty_model(agent, SCRIPTED, "script", "write `script:` with the name of a file that contains replies")
        return (), agent.source_map.at
    return _read_list(agent, folder, "script", name)


def _reflex(agent: AgentFile, folder: Path) -> tuple[tuple[Any, ...], LocateValue]:
    rules = agent.spec.reflex
    if rules is UNSET:
        _reject_empty_model(
            agent,
            REFLEX,
            "reflex",
            "write `reflex:` with a list of rules, or with the name of a file that contains them",
        )
        return (), agent.source_map.at
    if isinstance(rules, str):
        return _read_list(agent, folder, "reflex", rules)
    if not rules:
        raise agent.source_map.error_at(("reflex",), "`reflex` has no rules; write at least one.")
    return rules, lambda path: agent.source_map.at(("reflex", *path))


def _reject_empty_model(agent: AgentFile, provider: str, key: str, remedy: str) -> None:
    for path, model in _list_models(agent.spec):
        if ModelName.parse(model).provider == provider:
            sentence = f"`{format_key_path(path)}` is `{provider}`, but there is no `{key}`"
            raise agent.source_map.error_at(path, f"{sentence}; {remedy}.")


def _read_list(agent: AgentFile, folder: Path, key: str, name: str) -> tuple[tuple[Any, ...], LocateValue]:
    try:
        data = read_folder_file(folder, name)
    except UnusableFile as error:
        raise _unusable_file_error(agent, key, name, str(error)) from None
    if data is None:
        raise _unusable_file_error(agent, key, name, "is missing")
    document = load_bytes(data, str(folder / name))
    items: Any = document.value
    if not isinstance(items, list) or not items:
        expected_kind = "a list of replies" if key == "script" else "a list of rules"
        raise document.source_map.error_at(
            (), f"this must be {expected_kind}, but it is {describe_value(items or None)}."
        )
    return tuple(cast("list[Any]", items)), document.source_map.at


def _unusable_file_error(agent: AgentFile, key: str, name: str, reason: str) -> ConfigError:
    sentence = f"`{key}` names `{shorten(name)}`, which {reason}; name a file in the agent's folder."
    return agent.source_map.error_at((key,), sentence)


def _pacing(files: FilePair) -> Pacing:
    spec, source_map = files.agent.spec, files.agent.source_map
    for path, sentence in list_pacing_mistakes(spec):
        raise source_map.error_at(path, sentence)
    for index, sensor in enumerate(spec.sensors):
        if sensor.source.url is not UNSET:
            files.check_host(("sensors", index, "source", "url"), sensor.source.url)
    pacing = Pacing(
        autonomy=_autonomy(spec.autonomy, files.fleet.spec.zone), fields=collect_hot_fields(spec), sensors=spec.sensors
    )
    compile_gate(pacing, source_map.at(("autonomy", "gate", "expression")))
    for index, sensor in enumerate(spec.sensors):
        compile_signals(sensor, lambda path, at=index: source_map.at(("sensors", at, *path)))
    return pacing


def _autonomy(autonomy: Autonomy, zone: str) -> Autonomy:
    """Fill in the fleet's time zone, and move `precheck_model` into the gate."""
    gate, hours = autonomy.gate, autonomy.active_hours
    if autonomy.precheck_model is not UNSET:
        gate = replace(value_or_default(gate, Gate()), model=autonomy.precheck_model)
    if hours is not UNSET:
        hours = replace(hours, timezone=value_or_default(hours.timezone, zone))
    return replace(autonomy, gate=gate, active_hours=hours, precheck_model=UNSET)


def _tasks(files: FilePair, folder: Path | None) -> Tasks:
    spec, zone = files.agent.spec, files.fleet.spec.zone
    for path, sentence in list_task_mistakes(spec, folder, zone):
        raise files.agent.source_map.error_at(path, sentence)
    for index, channel in enumerate(files.agent.spec.notify.channels):
        if channel.url is not UNSET:
            files.check_host((*CHANNELS_PATH, index, "url"), channel.url)
        if channel.host is not UNSET:
            files.check_host((*CHANNELS_PATH, index, "host"), f"smtp://{channel.host}")
    return Tasks(
        schedules=tuple(
            _schedule(trigger, zone) for _, trigger in list_triggers(spec) if isinstance(trigger, Schedule)
        ),
        watches=spec.watches,
        webhooks=spec.webhooks,
        collections=dict(spec.collections),
        review=spec.review,
        notify=_notify(files.fleet, files.agent),
        anonymize=_find_anonymized_names(spec),
        verbs=_verbs(spec, folder),
        idle_halt=round(spec.idle_halt_minutes * MINUTE),
        concurrency=value_or_default(spec.concurrency, None),
    )


def _schedule(schedule: Schedule, zone: str) -> Schedule:
    zone, hours = value_or_default(schedule.timezone, zone), schedule.active_hours
    if hours is not UNSET:
        hours = replace(hours, timezone=value_or_default(hours.timezone, zone))
    return replace(schedule, timezone=zone, active_hours=hours)


def _notify(fleet: FleetConfig, agent: AgentFile) -> Notify:
    """Join the channels of both files; `on` is the agent's if it sets it, else the fleet's."""
    fleet_notify, agent_notify, default = fleet.spec.notify, agent.spec.notify, Notify()
    fleet_names = {channel.name for channel in fleet_notify.channels}
    for index, channel in enumerate(agent_notify.channels):
        if channel.name in fleet_names:
            path = (*CHANNELS_PATH, index, "name")
            sentence = (
                f"`{format_key_path(path)}` is `{channel.name}`, which is also a channel in "
                f"{fleet.source_map.at(CHANNELS_PATH)}"
            )
            raise agent.source_map.error_at(path, f"{sentence}; choose another name.")
    agent_sets_on = ("notify", "on") in agent.source_map.lines or agent_notify.on != default.on
    return Notify(
        channels=(*fleet_notify.channels, *agent_notify.channels) or (IN_APP_CHANNEL,),
        on=agent_notify.on if agent_sets_on else fleet_notify.on,
    )


def _find_anonymized_names(spec: AgentSpec) -> tuple[str, ...] | None:
    anonymize = spec.anonymize
    if isinstance(anonymize, bool):
        return () if anonymize else None
    anonymize = value_or_default(anonymize, Anonymize())
    return anonymize.names if value_or_default(anonymize.enabled, spec.phases == "review") else None


def _verbs(spec: AgentSpec, folder: Path | None) -> Verbs:
    phases = resolve_phases(spec.phases)
    names = {*spec.verbs, *(name for phase in phases for name in phase.grants or ())}
    if spec.collections or spec.watches:
        names.add("retrieve_chunks")
    # Skills in the folder need not be listed in `verbs`.
    if folder is not None and list_skill_folders(folder) and any(phase.grants is None for phase in phases):
        names.add("run_skill")
    return tuple(verb for verb in VERBS if verb in names)


KeyedSpec = TypeVar("KeyedSpec", SensorSource, Channel)

HIDDEN_VALUE: Final = "…"

_DECLARATION_FOLDERS: Final = ("playbooks", ".agents", ".claude/skills")


def definition_digest(folder: Path, excluded_paths: Iterable[Path] = ()) -> str:
    """Digest an agent's files: those in its folder, its playbooks and its skills.

    Other folders contain data. A file that is too large for a definition counts by its size. `excluded_paths` are
    never opened: a process that closes a file of its open SQLite store loses the locks of that store.
    """
    digest = hashlib.sha256(b"halter definition 1\n")
    excluded_ids = set(map(_identify, excluded_paths)) - {None}
    files = {path for path in _files(folder) if _identify(path) not in excluded_ids}
    for path in sorted(files, key=lambda file: file.as_posix()):
        name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        content = _content(path)
        digest.update(b"%d:%s%d:%s" % (len(name), name, len(content), content))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if path.is_file())
    for name in _DECLARATION_FOLDERS:
        yield from (path for path in (folder / name).rglob("*") if path.is_file())
    yield from (folder / name for name in list_guidance_files(folder))


def _identify(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, whichever link leads to it. Returns None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        return path.read_bytes() if size <= MAX_BYTES else b"%d bytes" % size
    except OSError:
        return b"unreadable"


def redact_definition(agent: ResolvedAgent) -> Mapping[str, Any]:
    """Return what a store records of an agent, without plain keys and personal names."""
    pacing, tasks = _define_pacing(agent.pacing), _define_tasks(agent.tasks)
    return {"policy": agent.policy, "mind": agent.model_settings, "pacing": pacing, "tasks": tasks}


def _define_pacing(pacing: Pacing) -> Pacing:
    sensors = (replace(sensor, source=_strip_keys(sensor.source)) for sensor in pacing.sensors)
    return replace(pacing, sensors=tuple(sensors))


def _define_tasks(tasks: Tasks) -> Tasks:
    channels = tuple(_strip_keys(channel) for channel in tasks.notify.channels)
    hidden_names = None if tasks.anonymize is None else (HIDDEN_VALUE,) * len(tasks.anonymize)
    return replace(tasks, notify=replace(tasks.notify, channels=channels), anonymize=hidden_names)


def _strip_keys(spec: KeyedSpec) -> KeyedSpec:
    """Return a copy with only the secret references of each header, and the URL without its query."""
    headers = {
        name: " ".join(f"${{secret:{secret}}}" for secret in sorted(find_secret_names(value.encode()))) or HIDDEN_VALUE
        for name, value in spec.headers.items()
    }
    return replace(spec, headers=headers, url=_strip_query(spec.url))


def _strip_query(url: str | UnsetType) -> str | UnsetType:
    if url is UNSET:
        return url
    url_parts = urlsplit(url)
    return urlunsplit(url_parts._replace(query=HIDDEN_VALUE)) if url_parts.query else url
