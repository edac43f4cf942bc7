"""Which models are on this machine: they cost nothing, and what they are sent goes nowhere."""

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from halter.core.usage import ModelName

_HERE: Final = frozenset(("scripted", "reflex", "ollama"))
"""Providers that are in this process, or on this machine unless an address says otherwise."""
_SOCKETS: Final = frozenset(("unix", "http+unix"))


def stays_here(model: ModelName, base_url: str | None) -> bool:
    """Tell whether what a model is sent stays on this machine."""
    return model.provider in _HERE if base_url is None else on_this_machine(base_url)


def on_this_machine(base_url: str | None) -> bool:
    """Tell whether an address leads to this machine and nowhere else."""
    try:
        parts = urlsplit(base_url or "")
        host = parts.hostname or ""
        return parts.scheme in _SOCKETS or host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
