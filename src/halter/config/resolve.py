"""Resolves the fleet's and the agent's files into one agent, which can only tighten the fleet.

A cap that only one file sets applies; without one the default applies. So an agent may set a cap above the default, but
never above the fleet's. The mode and the approval rules are the fleet's even if its file does not set them: then SEMI
and the default table apply.

Decisions of a person are bound to `policy` only: a change of the model, the instructions or the tasks keeps them valid.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from halter.config.agent_files import AgentFile
from halter.config.decode import format_key_path, value_or_default
from halter.config.definition import AgentDefinition, LocateValue
from halter.config.folder_files import UnusableFile, decode_file_text, read_folder_file
from halter.config.guidance import INSTRUCTIONS, Guidance
from halter.config.merge import FilePair, FleetConfig
from halter.config.model_providers import build_provider, check_models, check_provider, list_models
from halter.config.playbook_files import read_playbook
from halter.config.roots import read_agent_guidance
from halter.config.run_limits import MODEL_LIMITS, list_limit_conflicts
from halter.config.sections import (
    CHANNELS_PATH,
    collect_hot_fields,
    compile_gate,
    compile_signals,
    list_pacing_mistakes,
    list_task_mistakes,
    list_triggers,
)
from halter.config.skill_files import list_skill_folders, read_skills
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE
from halter.core.errors import ConfigError
from halter.core.money import Cap, Caps
from halter.core.rates import RateLimit
from halter.core.text import describe_value, shorten
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
from halter.spec.agent import AgentSpec, Phase, PhasePlan
from halter.spec.autonomy import Autonomy, Gate, Pacing
from halter.spec.channels import EmailChannel, InAppChannel, Notify, WebhookChannel
from halter.spec.fleet import FleetSpec
from halter.spec.limits import Limits
from halter.spec.models import (
    REFLEX,
    SCRIPTED,
    BrainSpec,
    Provider,
    ProviderSpec,
)
from halter.spec.playbook import Playbook
from halter.spec.sensors import StreamSource, UrlSource
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


IN_APP_CHANNEL: Final = InAppChannel(name="in_app")


def resolve_agent(fleet: FleetConfig, agent: AgentFile, folder: Path | None) -> AgentDefinition:
    """Resolve an agent, or raise a ConfigError with the fix.

    An agent that is defined in a program has no folder and no `AGENTS.md`; files that it names are relative to the
    working directory.
    """
    files, base_folder = FilePair(fleet, agent), folder or Path()
    policy = resolve_policy(fleet, agent)
    fleet_providers, agent_providers = files.fleet.spec.providers, files.agent.spec.providers
    for name, spec in agent_providers.items():
        check_provider(files, name, spec)
    providers: dict[str, Provider] = {}
    for name in (*fleet_providers, *(name for name in agent_providers if name not in fleet_providers)):
        file = files.agent if name in agent_providers else files.fleet
        specs = (agent_providers.get(name, ProviderSpec()), fleet_providers.get(name, ProviderSpec()))
        providers[name] = build_provider(name, specs, file.source_map)
    check_models(files, providers)
    script, script_at = _script(agent, base_folder)
    reflex, reflex_at = _reflex(agent, base_folder)
    guidance = Guidance() if folder is None else read_agent_guidance(folder)
    instructions = "\n\n".join(filter(None, (_instructions(agent.spec, folder), guidance.text)))
    settings = _resolve_model_settings(files, providers, instructions)
    pacing, tasks = _pacing(files), _tasks(files, folder)
    return AgentDefinition(
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
    for key, sentence in list_limit_conflicts(max_output, min_output, window):
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
        **{key: value for key in MODEL_LIMITS if (value := getattr(limits, key)) is not UNSET},
    )


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
    for path, model in list_models(agent.spec):
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
        if isinstance(sensor.source, UrlSource | StreamSource):
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
        if isinstance(channel, WebhookChannel):
            files.check_host((*CHANNELS_PATH, index, "url"), channel.url)
        if isinstance(channel, EmailChannel):
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
