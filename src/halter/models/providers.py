"""A model by its name: its provider, its address and its key.

A provider in an agent's files is reached at the address given there, with the key referenced there: a key in the
environment belongs to the provider's own address and is sent nowhere else.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

import msgspec

from halter.core.errors import ConfigError, explain_extra
from halter.core.text import join_names, shorten
from halter.core.usage import (
    ModelName,
    is_local_address,
    runs_locally,
)
from halter.models.cloud_credentials import FindKey, make_cloud_credentials
from halter.models.exchange import ExchangeTerms
from halter.models.sellers import find_listed_window
from halter.models.wire import NO_HABITS, ModelHabits, WireModel
from halter.models.wires.table import WIRES
from halter.spec.models import KNOWN_PROVIDERS, KnownProvider, Provider, WireFormat, choose_wire

LOCAL_WINDOW: Final = 32_000
DEFAULT_WINDOW: Final = 128_000

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")


class Endpoint(msgspec.Struct, frozen=True):
    wire: WireFormat
    url: str
    usual: bool


def is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def make_model(
    name: str,
    providers: Mapping[str, Provider],
    key: FindKey,
    habits: ModelHabits = NO_HABITS,
    *,
    installed: Callable[[str], bool] = is_installed,
) -> WireModel:
    model_name = _parse_model_name(name)
    provider = providers.get(model_name.provider)
    endpoint, secret = find_endpoint(model_name, providers, key)
    if not (installed("pydantic_ai") and installed(WIRES[endpoint.wire].library)):
        raise ConfigError(explain_extra("models", str(model_name)))
    base_url = None if endpoint.usual else endpoint.url
    terms = ExchangeTerms()
    if provider is not None:
        cloud = provider.credentials
        terms = ExchangeTerms(
            bills_errors=provider.bills_errors,
            prompt_cache=provider.prompt_cache,
            vision=provider.vision,
            credentials=cloud and make_cloud_credentials(cloud, endpoint.url, key, installed),
        )
    return WireModel(model_name, endpoint.wire, endpoint.url, secret, base_url=base_url, habits=habits, terms=terms)


def find_endpoint(name: ModelName, providers: Mapping[str, Provider], find_key: FindKey) -> tuple["Endpoint", str]:
    """Find the address of a model, and its key. Raises ConfigError if either is missing."""
    provider = providers.get(name.provider)
    return (
        _resolve_known_provider(name, find_key)
        if provider is None
        else _resolve_described_provider(name, provider, find_key)
    )


@lru_cache(maxsize=256)
def estimate_window(name: ModelName, base_url: str | None = None) -> int:
    """Estimate the context window of a model: from the bundled table, or else a conservative default."""
    provider = KNOWN_PROVIDERS.get(name.provider)
    is_own = is_local_address(base_url) or (provider is not None and provider.local)
    if is_own and runs_locally(name, base_url):
        return LOCAL_WINDOW
    return find_listed_window(name, base_url) or (LOCAL_WINDOW if is_own else DEFAULT_WINDOW)


def _parse_model_name(name: str) -> ModelName:
    try:
        return ModelName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resolve_described_provider(name: ModelName, provider: Provider, find_key: FindKey) -> tuple[Endpoint, str]:
    location = f"`providers.{name.provider}`"
    return Endpoint(provider.wire, _address(provider.base_url, location), usual=False), _find_declared_key(
        name, provider, find_key
    )


def _find_declared_key(name: ModelName, provider: Provider, find_key: FindKey) -> str:
    if not provider.api_key:
        return ""
    match = _SECRET.fullmatch(provider.api_key)
    if match is None:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` must refer to a secret. "
            "Keep the key out of the file and write `api_key: ${secret:NAME}`."
        )
    secret = find_key(match[1])
    if not secret:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` refers to the secret {match[1]}, which is not set. Set it, "
            f"or remove the line if {name.provider} needs no key."
        )
    return secret


def _resolve_known_provider(name: ModelName, find_key: FindKey) -> tuple[Endpoint, str]:
    provider = KNOWN_PROVIDERS.get(name.provider)
    if provider is None:
        raise ConfigError(
            f"Unknown provider {shorten(name.provider)!r} of {shorten(str(name))!r}: {_describe(name)} "
            f"Known providers: {join_names(KNOWN_PROVIDERS)}."
        )
    url_override = find_key(provider.url_from) if provider.url_from else None
    if not (url_override or provider.base_url):
        raise ConfigError(f"{name} has no address. Set {provider.url_from}, or {_describe(name)}")
    url = _address(_complete_url(url_override, provider), provider.url_from) if url_override else provider.base_url
    # A local server always keeps its address, which shows whether it runs on this machine.
    wire = choose_wire(name.provider, url, name.model)
    return Endpoint(wire, url, usual=not (url_override or provider.local)), _find_key_in_variables(
        name, provider, url, find_key
    )


def _find_key_in_variables(name: ModelName, provider: KnownProvider, url: str, find_key: FindKey) -> str:
    for variable in provider.keys:
        if secret := find_key(variable):
            return secret
    if provider.keys and not is_local_address(url):
        variables = " or ".join(provider.keys)
        raise ConfigError(
            f"{variables} is not set, and {name} needs a key. Set it, or {_describe(name, provider.wire)}"
        )
    return ""


def _describe(name: ModelName, wire: WireFormat = "openai") -> str:
    block = f"{{wire: {wire}, base_url: https://…, api_key: '${{secret:NAME}}'}}"
    return f"add it to the agent's file as `providers: {{{shorten(name.provider)}: {block}}}`."


def _complete_url(url: str, provider: KnownProvider) -> str:
    """Complete the address of a local server that has no path."""
    lacks_path = provider.local and urlsplit(url).path in {"", "/"}
    return f"{url.rstrip('/')}/v1" if lacks_path else url


def _address(url: str, location: str) -> str:
    try:
        url_parts = urlsplit(url)
        is_usable = url_parts.scheme in {"http", "https"} and bool(url_parts.hostname)
        _ = url_parts.port
    except ValueError:
        is_usable = False
    if not is_usable:
        # The address itself is not quoted, since it might contain a password.
        raise ConfigError(f"Invalid address in {location}. Write it like https://host/v1.")
    return url
