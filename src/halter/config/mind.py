"""How an agent thinks: what both files say of it, and what stands in the files beside the agent's.

None of it is part of the policy: another model or other instructions leave every decision of a person as it was. What
an agent's file asks for is bounded by the fleet's as everything else is: its models, its secrets, its hosts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from msgspec import UNSET

from halter.config.agent import Agent
from halter.config.beside import Unreadable, read_beside, text_of
from halter.config.both import Both, either
from halter.config.fleet import Fleet
from halter.config.load import KeyPath, Places, load_bytes
from halter.config.pacing import paced_models, read_pacing
from halter.config.resolve import MIN_OUTPUT_TOKENS
from halter.config.shape import dotted
from halter.config.tasks import judging_models, read_tasks
from halter.config.usual import NOBODY, USUAL
from halter.core.bounds import Limits, ModelRate
from halter.core.errors import ConfigError
from halter.core.mind import REFLEX, SCRIPTED, Mind, Provider, WireFormat
from halter.core.pacing import Pacing
from halter.core.rates import Rate
from halter.core.spec import AgentSpec, ProviderSpec, covered
from halter.core.tasks import Tasks
from halter.core.text import listed, nearest, shorten, told
from halter.core.tools import secret_names
from halter.core.usage import ModelName

INSTRUCTIONS: Final = "AGENTS.md"

_HERE: Final = frozenset((SCRIPTED, REFLEX))
_OF_LIMITS: Final = (
    "max_output_tokens",
    "max_retries",
    "context_window",
    "context_strategy",
    "streaming",
    "max_tokens_recoveries",
    "max_repeated_tool_steps",
)

Where = Callable[[KeyPath], str]
"""Names the file and the line in which a value stands."""


@dataclass(frozen=True, slots=True)
class Read:
    """How an agent thinks and paces itself, and what its tasks are.

    Where the replies and the rules stand is kept for sentences about them.
    """

    mind: Mind
    script: Where
    reflex: Where
    pacing: Pacing = field(default_factory=Pacing)
    tasks: Tasks = field(default_factory=Tasks)

    def models(self) -> Iterator[str]:
        """List all models that the agent may ask."""
        yield from (
            name for name in (self.mind.model, *self.mind.fallback_models, *self.mind.model_for.values()) if name
        )
        yield from self.pacing.models()
        yield from self.tasks.review.judges


def resolve_mind(fleet: Fleet, agent: Agent, folder: Path | None) -> Mind:
    """Put together how an agent thinks, or raise a ConfigError that says what to change."""
    return read_mind(fleet, agent, folder).mind


def read_mind(fleet: Fleet, agent: Agent, folder: Path | None) -> Read:
    """Do what `resolve_mind` does, and keep where replies and rules stand.

    An agent of a program has no folder: nothing beside it says what to do, and the files that it names are those here.
    """
    both, spec = Both(fleet, agent), agent.spec
    providers = _providers(both)
    _check_models(both, providers)
    script, script_at = _script(agent, folder or Path())
    reflex, reflex_at = _reflex(agent, folder or Path())
    mind = Mind(
        model=either(spec.model, ""),
        fallback_models=spec.fallback_models,
        model_for=dict(spec.model_for),
        providers=providers,
        instructions=_instructions(spec, folder),
        tool_calls=spec.tool_calls,
        temperature=either(spec.temperature, None),
        script=script,
        reflex=reflex,
        rates=rates_of(fleet),
        **_limits(both),
    )
    return Read(mind, script_at, reflex_at, read_pacing(fleet, agent), read_tasks(fleet, agent, folder))


def rates_of(fleet: Fleet) -> dict[str, Rate]:
    """Tell how fast models may be asked: that is the fleet's word alone, as it is shared by all agents."""
    return {name: _rate(said) for name, said in fleet.spec.rates.items()}


def _rate(said: ModelRate) -> Rate:
    return Rate(either(said.requests_per_minute, None), either(said.tokens_per_minute, None))


def _limits(both: Both) -> dict[str, Any]:
    """Take the limits that somebody wrote; the others are at the defaults of a mind."""
    limits = both.limits()
    _check_output(both, limits)
    return {key: word for key in _OF_LIMITS if (word := getattr(limits, key)) is not UNSET}


def _check_output(both: Both, limits: Limits) -> None:
    """Refuse lengths that leave no room for an answer."""
    most = either(limits.max_output_tokens, Mind().max_output_tokens)
    least = either(limits.min_output_tokens, MIN_OUTPUT_TOKENS)
    window = either(limits.context_window, 0)
    if most < least:
        sentence = f"no answer can be both: at most {most} tokens (`max_output_tokens`) and at least {least}"
        raise _said(both, "max_output_tokens", f"{sentence} (`min_output_tokens`); change one of them.")
    if window and window <= most:
        sentence = f"a window of {window} tokens has no room beside an answer of up to {most}"
        raise _said(both, "context_window", f"{sentence}; raise it, or lower `max_output_tokens`.")


def _said(both: Both, key: str, sentence: str) -> ConfigError:
    """Speak of a limit where it was written: by the agent, or else by the fleet."""
    if ("limits", key) in both.agent.places.lines:
        return both.agent.places.wrong(("limits", key), sentence)
    if ("agents", "limits", key) in both.fleet.places.lines:
        return both.fleet.places.wrong(("agents", "limits", key), sentence)
    return both.agent.places.wrong(("limits",), sentence)


def _providers(both: Both) -> dict[str, Provider]:
    """Put the providers of both files together: an agent may add its own, and lead no known one elsewhere."""
    ours, theirs = both.fleet.spec.providers, both.agent.spec.providers
    for name, spec in theirs.items():
        _check_provider(both, name, spec)
    found: dict[str, Provider] = {}
    for name in (*ours, *(name for name in theirs if name not in ours)):
        file = both.agent if name in theirs else both.fleet
        said = (theirs.get(name, ProviderSpec()), ours.get(name, ProviderSpec()))
        found[name] = _provider(name, said, file.places)
    return found


def _provider(name: str, said: tuple[ProviderSpec, ProviderSpec], places: Places) -> Provider:
    """Take of each key the agent's word, else the fleet's, else what is usual."""
    path: KeyPath = ("providers", name)
    if name in _HERE:
        raise places.wrong(path, f"`{name}` is no provider that could be reached elsewhere; remove it.")
    theirs, ours = said
    usual = USUAL.get(name, NOBODY)
    base_url = either(theirs.base_url, either(ours.base_url, usual.base_url))
    if not base_url:
        sentence = f"`base_url` is missing from `{dotted(path)}`, whose address nobody knows; write it"
        raise places.wrong(path, f"{sentence}, as in http://localhost:8000/v1.")
    wire: WireFormat = either(theirs.wire, either(ours.wire, usual.wire))
    key, bills = either(theirs.api_key, either(ours.api_key, "")), either(theirs.bills_errors, ours.bills_errors)
    return Provider(wire=wire, base_url=base_url, api_key=key, bills_errors=bills is True)


def _check_provider(both: Both, name: str, asked: ProviderSpec) -> None:
    """Refuse an address, a key or a price of errors that the fleet does not leave to its agents."""
    fleet, path = both.fleet.spec, ("providers", name)
    if asked.bills_errors is False and fleet.providers.get(name, ProviderSpec()).bills_errors is True:
        raise both.looser((*path, "bills_errors"), "false", (*path, "bills_errors"), "true")
    if asked.base_url is not UNSET:
        _check_address(both, name, asked.base_url)
    if asked.api_key is not UNSET and fleet.allowed_secrets is not UNSET:
        for secret in secret_names(asked.api_key.encode()):
            if not covered(secret, fleet.allowed_secrets):
                allowed = listed(fleet.allowed_secrets) or "nothing"
                raise both.looser((*path, "api_key"), f"`{secret}`", ("allowed_secrets",), allowed)


def _check_address(both: Both, name: str, base_url: str) -> None:
    fleet, path = both.fleet.spec, ("providers", name, "base_url")
    if name in fleet.providers:
        there = either(fleet.providers[name].base_url, USUAL.get(name, NOBODY).base_url)
        if there != base_url:
            raise both.looser(path, f"`{base_url}`", ("providers", name), f"`{there}`")
    both.reached(path, base_url)


def _named(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    """List all models that an agent's file names, with the way to each."""
    if spec.model is not UNSET:
        yield ("model",), spec.model
    yield from ((("fallback_models", index), model) for index, model in enumerate(spec.fallback_models))
    yield from ((("model_for", purpose), model) for purpose, model in spec.model_for.items())
    yield from paced_models(spec)
    yield from judging_models(spec)


def _check_models(both: Both, providers: Mapping[str, Provider]) -> None:
    spec, places = both.agent.spec, both.agent.places
    if spec.fallback_models and spec.model is UNSET:
        raise places.wrong(
            ("fallback_models",), "`fallback_models` stand in for a `model`, which is missing; write it."
        )
    known = sorted({*USUAL, *_HERE, *providers})
    for path, model in _named(spec):
        provider = ModelName.parse(model).provider
        if provider not in known:
            hint = nearest(provider, known, "the known ones")
            sentence = f"`{dotted(path)}` is of a provider `{provider}` that nobody knows: write it under `providers`"
            raise places.wrong(path, f"{sentence}; {hint}")
        _check_allowed(both, path, model)


def _check_allowed(both: Both, path: KeyPath, model: str) -> None:
    allowed = both.models()
    if allowed is None or covered(model, allowed):
        return
    if both.agent.spec.allowed_models is UNSET:
        raise both.looser(path, f"`{model}`", ("allowed_models",), listed(allowed) or "nothing")
    there = both.agent.places.at(("allowed_models",))
    sentence = f"`{dotted(path)}` is `{model}`, which is not among the `allowed_models` of {there}"
    raise both.agent.places.wrong(path, f"{sentence}; add it there, or name another model.")


def _instructions(spec: AgentSpec, folder: Path | None) -> str:
    """Put what the agent's file says before what stands in `AGENTS.md`."""
    if folder is None:
        return spec.instructions.strip()
    try:
        data = read_beside(folder, INSTRUCTIONS)
        text = "" if data is None else text_of(data)
    except Unreadable as why:
        raise ConfigError(f"{folder / INSTRUCTIONS} {why}.") from None
    return "\n\n".join(part for part in (spec.instructions.strip(), text.strip()) if part)


def _script(agent: Agent, folder: Path) -> tuple[tuple[Any, ...], Where]:
    """Read the replies of a model that is scripted."""
    name = agent.spec.script
    if name is UNSET:
        _demand_none(agent, SCRIPTED, "script", "write `script:` with the name of a file of replies")
        return (), agent.places.at
    return _list_in(agent, folder, "script", name)


def _reflex(agent: Agent, folder: Path) -> tuple[tuple[Any, ...], Where]:
    """Read the rules of a model that works by rules, from the agent's file or from one of their own."""
    rules = agent.spec.reflex
    if rules is UNSET:
        _demand_none(agent, REFLEX, "reflex", "write `reflex:` with a list of rules, or with the name of their file")
        return (), agent.places.at
    if isinstance(rules, str):
        return _list_in(agent, folder, "reflex", rules)
    if not rules:
        raise agent.places.wrong(("reflex",), "`reflex` has no rules; write at least one.")
    return rules, lambda path: agent.places.at(("reflex", *path))


def _demand_none(agent: Agent, provider: str, key: str, remedy: str) -> None:
    """Refuse a model that would have nothing to say."""
    for path, model in _named(agent.spec):
        if ModelName.parse(model).provider == provider:
            sentence = f"`{dotted(path)}` is `{provider}`, but there is no `{key}`"
            raise agent.places.wrong(path, f"{sentence}; {remedy}.")


def _list_in(agent: Agent, folder: Path, key: str, name: str) -> tuple[tuple[Any, ...], Where]:
    """Read a YAML file that holds a list."""
    try:
        data = read_beside(folder, name)
    except Unreadable as why:
        raise _unusable(agent, key, name, str(why)) from None
    if data is None:
        raise _unusable(agent, key, name, "is missing")
    document = load_bytes(data, str(folder / name))
    items: Any = document.value
    if not isinstance(items, list) or not items:
        what = "a list of replies" if key == "script" else "a list of rules"
        raise document.places.wrong((), f"this must be {what}, but it is {told(items or None)}.")
    return tuple(cast("list[Any]", items)), document.places.at


def _unusable(agent: Agent, key: str, name: str, why: str) -> ConfigError:
    sentence = f"`{key}` names `{shorten(name)}`, which {why}; name a file in the agent's folder."
    return agent.places.wrong((key,), sentence)
