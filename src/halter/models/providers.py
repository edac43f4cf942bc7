"""From the name of a model to the model: which provider is meant, where it is, and with which key.

A provider that an agent's files describe is reached as they say, and with the key that they name: what the environment
holds for a provider of that name was given for the provider's own address and goes nowhere else.
"""

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import msgspec

from halter.core.errors import ConfigError, needs
from halter.core.here import on_this_machine, stays_here
from halter.core.mind import Provider, WireFormat
from halter.core.text import listed, shorten
from halter.core.usage import ModelName
from halter.models.prices import window
from halter.models.wire import Wire
from halter.models.wire_exchange import Terms

Key = Callable[[str], str | None]
"""Looks a secret or a variable of the environment up by its name."""

LOCAL_WINDOW: Final = 32_000
USUAL_WINDOW: Final = 128_000

_SECRET: Final = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_.-]*)\}")
_LIBRARIES: Final = MappingProxyType({"openai": "openai", "anthropic": "anthropic", "google": "google.genai"})


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that needs no description: its usual address, and the variables that hold its key or move it."""

    url: str = ""
    wire: WireFormat = "openai"
    keys: tuple[str, ...] = ()
    url_from: str = ""
    local: bool = False


_GOOGLE: Final = Known(
    url="https://generativelanguage.googleapis.com", wire="google", keys=("GEMINI_API_KEY", "GOOGLE_API_KEY")
)

KNOWN: Final = MappingProxyType(
    {
        "openai": Known(url="https://api.openai.com/v1", keys=("OPENAI_API_KEY",), url_from="OPENAI_BASE_URL"),
        "anthropic": Known(
            url="https://api.anthropic.com",
            wire="anthropic",
            keys=("ANTHROPIC_API_KEY",),
            url_from="ANTHROPIC_BASE_URL",
        ),
        "google": _GOOGLE,
        "gemini": _GOOGLE,
        "openrouter": Known(url="https://openrouter.ai/api/v1", keys=("OPENROUTER_API_KEY",)),
        "groq": Known(url="https://api.groq.com/openai/v1", keys=("GROQ_API_KEY",)),
        "mistral": Known(url="https://api.mistral.ai/v1", keys=("MISTRAL_API_KEY",)),
        "deepseek": Known(url="https://api.deepseek.com/v1", keys=("DEEPSEEK_API_KEY",)),
        "together": Known(url="https://api.together.xyz/v1", keys=("TOGETHER_API_KEY",)),
        "ollama": Known(url="http://localhost:11434/v1", url_from="OLLAMA_BASE_URL", local=True),
        "llamacpp": Known(url="http://localhost:8080/v1", url_from="LLAMACPP_BASE_URL", local=True),
        "vllm": Known(url="http://localhost:8000/v1", url_from="VLLM_BASE_URL", local=True),
        "lmstudio": Known(url="http://localhost:1234/v1", url_from="LMSTUDIO_BASE_URL", local=True),
        "llamafarm": Known(url_from="LLAMAFARM_BASE_URL", local=True),
    }
)


class Place(msgspec.Struct, frozen=True):
    """Where a model is reached, and whether that is its provider's usual address."""

    wire: WireFormat
    url: str
    usual: bool


def is_installed(library: str) -> bool:
    """Tell whether a library can be imported, without importing it."""
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:
        return False


def model_from(
    name: str,
    providers: Mapping[str, Provider],
    key: Key,
    *,
    temperature: float | None = None,
    installed: Callable[[str], bool] = is_installed,
) -> Wire:
    """Make the model that `provider:model` names, or raise a ConfigError that says what to write or to set."""
    parsed = _parsed(name)
    described = providers.get(parsed.provider)
    place, secret = _known(parsed, key) if described is None else _described(parsed, described, key)
    if not (installed("pydantic_ai") and installed(_LIBRARIES[place.wire])):
        raise ConfigError(needs("models", str(parsed)))
    base_url = None if place.usual else place.url
    terms = Terms(bills_errors=described is not None and described.bills_errors)
    return Wire(parsed, place.wire, place.url, secret, base_url=base_url, temperature=temperature, terms=terms)


def window_of(name: ModelName, base_url: str | None = None) -> int:
    """Tell how many tokens a model can take in: as the bundled table has it, or else a cautious guess."""
    known = KNOWN.get(name.provider)
    own = on_this_machine(base_url) or (known is not None and known.local)
    if own and stays_here(name, base_url):
        return LOCAL_WINDOW
    return window(name, base_url) or (LOCAL_WINDOW if own else USUAL_WINDOW)


def _parsed(name: str) -> ModelName:
    try:
        return ModelName.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _described(name: ModelName, provider: Provider, key: Key) -> tuple[Place, str]:
    where = f"`providers.{name.provider}`"
    return Place(provider.wire, _address(provider.base_url, where), usual=False), _own_key(name, provider, key)


def _own_key(name: ModelName, provider: Provider, key: Key) -> str:
    if not provider.api_key:
        return ""
    found = _SECRET.fullmatch(provider.api_key)
    if found is None:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` is no name of a secret: "
            "keep the key out of the file and write `api_key: ${secret:NAME}`."
        )
    secret = key(found[1])
    if not secret:
        raise ConfigError(
            f"`providers.{name.provider}.api_key` names the secret {found[1]}, which nobody has set: set it, "
            f"or take the line away if {name.provider} needs no key."
        )
    return secret


def _known(name: ModelName, key: Key) -> tuple[Place, str]:
    known = KNOWN.get(name.provider)
    if known is None:
        raise ConfigError(
            f"Nobody knows the provider {shorten(name.provider)!r} of {shorten(str(name))!r}: {_describe(name)} "
            f"Known without that are {listed(KNOWN)}."
        )
    moved = key(known.url_from) if known.url_from else None
    if not (moved or known.url):
        raise ConfigError(f"{name} has no address: set {known.url_from}, or {_describe(name)}")
    url = _address(_versioned(moved, known), known.url_from) if moved else known.url
    # A local server always has its address: whether it runs on this machine is seen by that.
    return Place(known.wire, url, usual=not (moved or known.local)), _given_key(name, known, url, key)


def _given_key(name: ModelName, known: Known, url: str, key: Key) -> str:
    for variable in known.keys:
        if secret := key(variable):
            return secret
    if known.keys and not on_this_machine(url):
        raise ConfigError(f"{name} needs a key: set {' or '.join(known.keys)}, or {_describe(name, known.wire)}")
    return ""


def _describe(name: ModelName, wire: WireFormat = "openai") -> str:
    """Say how a provider is described in an agent's file."""
    block = f"{{wire: {wire}, base_url: https://…, api_key: '${{secret:NAME}}'}}"
    return f"describe it in the agent's file as `providers: {{{shorten(name.provider)}: {block}}}`."


def _versioned(url: str, known: Known) -> str:
    """Complete an address of a local server that was written without its path, as its own tools write it."""
    bare = known.local and urlsplit(url).path in {"", "/"}
    return f"{url.rstrip('/')}/v1" if bare else url


def _address(url: str, where: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        # The address itself is not repeated: it might contain a password.
        raise ConfigError(f"The address in {where} cannot be used: write it like https://host/v1.")
    return url
