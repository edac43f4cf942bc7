"""Which models run on this machine: they cost nothing unless they are priced, and what they are sent goes nowhere.

An address tells where a request goes first, not where it ends: a gateway on this machine passes it on to a provider
that bills. So a model runs here only if its provider is one that runs models itself, if that is reached at an address
of this machine, and if the model is none that only its maker runs.
"""

import re
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from halter.core.usage import ModelName

_IN_PROCESS: Final = frozenset(("scripted", "reflex"))
_ENGINES: Final = frozenset(("ollama", "llamacpp", "vllm", "lmstudio"))
"""Servers that run models themselves; on this machine, unless an address says otherwise."""
_ELSEWHERE: Final = re.compile(
    r"""
    .*[:-]cloud                              # what Ollama passes on to a service of its own
    | (?:.*[/.])?(?:                         # what only its maker runs, also as `us.anthropic.claude-…`
        chatgpt- | claude- | codex- | computer-use- | gemini- | gpt-?[3-9](?!all) | grok-(?:[3-9]|code|beta|vision)
        | mistral-medium | nova-(?:lite|micro|premier|pro) | o[134](?:-|$) | qwen[23.5]*-(?:max|plus|turbo)
        | sonar(?:-|$) | text-embedding-(?:3|ada)
    ).*
    """,
    re.VERBOSE,
)
_SOCKETS: Final = frozenset(("unix", "http+unix"))


def stays_here(model: ModelName, base_url: str | None) -> bool:
    """Tell whether a model runs on this machine, and so what it is sent stays here."""
    if model.provider in _IN_PROCESS:
        return base_url is None
    reached_here = base_url is None or on_this_machine(base_url)
    return model.provider in _ENGINES and reached_here and _ELSEWHERE.fullmatch(model.model.lower()) is None


def on_this_machine(base_url: str | None) -> bool:
    """Tell whether an address is one of this machine. What answers there may still pass a request on."""
    try:
        parts = urlsplit(base_url or "")
        host = parts.hostname or ""
        return parts.scheme in _SOCKETS or host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
