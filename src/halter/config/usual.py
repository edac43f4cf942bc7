"""The providers that need no description in a file: what each speaks, where it is, and which variable holds its key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.mind import WireFormat


class Usual(msgspec.Struct, frozen=True):
    """What is known of a provider. A local server needs no key; one without an address must be told where it is."""

    base_url: str = ""
    key: str = ""
    wire: WireFormat = "openai"


_GOOGLE: Final = Usual("https://generativelanguage.googleapis.com", "GEMINI_API_KEY", "google")

USUAL: Final[Mapping[str, Usual]] = MappingProxyType(
    {
        "openai": Usual("https://api.openai.com/v1", "OPENAI_API_KEY"),
        "anthropic": Usual("https://api.anthropic.com", "ANTHROPIC_API_KEY", "anthropic"),
        "google": _GOOGLE,
        "gemini": _GOOGLE,
        "openrouter": Usual("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
        "groq": Usual("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
        "mistral": Usual("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
        "deepseek": Usual("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
        "together": Usual("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
        "ollama": Usual("http://localhost:11434/v1"),
        "llamacpp": Usual("http://localhost:8080/v1"),
        "vllm": Usual("http://localhost:8000/v1"),
        "lmstudio": Usual("http://localhost:1234/v1"),
        "llamafarm": Usual(),
    }
)
NOBODY: Final = Usual()
"""What is known of a provider that nobody knows."""
