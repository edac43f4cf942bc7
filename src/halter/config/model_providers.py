"""The models that an agent names, and the providers of both files, of which the fleet's are the bound."""

from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from msgspec import UNSET
from msgspec.structs import asdict, replace

from halter.config.decode import format_key_path, value_or_default
from halter.config.merge import FilePair
from halter.config.sections import (
    list_paced_models,
)
from halter.config.yaml_reader import KeyPath, SourceMap
from halter.core.text import join_names, suggest_nearest
from halter.core.tools import find_secret_names
from halter.core.usage import ModelName
from halter.policy.order import is_covered
from halter.spec.agent import AgentSpec
from halter.spec.models import (
    CLOUD_HOSTS,
    KNOWN_PROVIDERS,
    REFLEX,
    SCRIPTED,
    UNKNOWN_PROVIDER,
    CloudName,
    Provider,
    ProviderSpec,
    choose_wire,
)

_LOCAL_PROVIDERS: Final = frozenset((SCRIPTED, REFLEX))


def build_provider(name: str, specs: tuple[ProviderSpec, ProviderSpec], source_map: SourceMap) -> Provider:
    """Build a provider: each key from the agent's file, else the fleet's, else the default."""
    path: KeyPath = ("providers", name)
    if name in _LOCAL_PROVIDERS:
        raise source_map.error_at(path, f"`{name}` is built in and has no endpoint; remove it.")
    agent_spec, fleet_spec = specs
    agent_values = {key: value for key, value in asdict(agent_spec).items() if value is not UNSET}
    spec = replace(fleet_spec, **agent_values)
    base_url = value_or_default(spec.base_url, KNOWN_PROVIDERS.get(name, UNKNOWN_PROVIDER).base_url)
    if not base_url:
        sentence = f"`base_url` is missing from `{format_key_path(path)}`, which is not a known provider; write it"
        raise source_map.error_at(path, f"{sentence}, as in http://localhost:8000/v1.")
    api_key = value_or_default(spec.api_key, "")
    if spec.credentials is not UNSET:
        by_fleet = UNSET not in (fleet_spec.base_url, fleet_spec.credentials)
        _check_cloud(spec.credentials, base_url, api_key, (*path, "credentials"), source_map, by_fleet=by_fleet)
    return Provider(
        wire=choose_wire(name, base_url) if spec.wire is UNSET else spec.wire,
        base_url=base_url,
        api_key=api_key,
        credentials=None if spec.credentials is UNSET else spec.credentials,
        bills_errors=spec.bills_errors is True,
        prompt_cache=spec.prompt_cache is not False,
        vision=spec.vision is not False,
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


def check_provider(files: FilePair, name: str, spec: ProviderSpec) -> None:
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


def list_models(spec: AgentSpec) -> Iterator[tuple[KeyPath, str]]:
    if spec.model is not UNSET:
        yield ("model",), spec.model
    yield from ((("fallback_models", index), model) for index, model in enumerate(spec.fallback_models))
    yield from ((("model_for", purpose), model) for purpose, model in spec.model_for.items())
    yield from list_paced_models(spec)
    yield from ((("review", "judges", index), model) for index, model in enumerate(spec.review.judges))


def check_models(files: FilePair, providers: Mapping[str, Provider]) -> None:
    spec, source_map = files.agent.spec, files.agent.source_map
    if spec.fallback_models and spec.model is UNSET:
        raise source_map.error_at(("fallback_models",), "`fallback_models` requires a `model`; write it.")
    provider_names = sorted({*KNOWN_PROVIDERS, *_LOCAL_PROVIDERS, *providers})
    for path, model in list_models(spec):
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
