"""The settings that point each client at the proxy, and a request that checks them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

import msgspec

from halter.core.errors import ConfigError
from halter.core.text import join_names
from halter.external.dialect import CHAT, MESSAGES, RESPONSES, WireDialect

ClientName = Literal["claude", "codex", "aider", "opencode", "openhands", "llm", "langchain"]
CLIENTS: Final[tuple[ClientName, ...]] = get_args(ClientName)


class ClientSetup(msgspec.Struct, frozen=True):
    """A client: its dialect, a model for the check, and the lines that point it at the proxy.

    In the lines, {root} is the proxy's address, {base} the same with /v1, {key} a virtual key and {model} a model.
    """

    dialect: WireDialect
    model: str
    lines: str
    file: str = ""
    """The file for the lines; empty for environment variables."""


_CODEX: Final = """\
model = "{model}"
model_provider = "halter"
web_search = "disabled"

[model_providers.halter]
name = "Halter"
base_url = "{base}"
env_key = "HALTER_KEY"
wire_api = "responses"
"""

_OPENCODE: Final = """\
{{
  "$schema": "https://opencode.ai/config.json",
  "model": "halter/{model}",
  "provider": {{
    "halter": {{
      "npm": "@ai-sdk/openai-compatible",
      "options": {{"baseURL": "{base}", "apiKey": "{key}"}},
      "models": {{"{model}": {{}}}}
    }}
  }}
}}
"""

_OPENHANDS: Final = """\
export LLM_MODEL=openai/{model}
export LLM_BASE_URL={base}
export LLM_API_KEY={key}
# In a program: LLM(model="openai/{model}", base_url="{base}", api_key="{key}")
"""

CHAT_TOOL_MODEL: Final = "gpt-5.5"
"""The newest model of OpenAI that calls functions over Chat Completions while it reasons."""

SETUPS: Final[Mapping[ClientName, ClientSetup]] = MappingProxyType(
    {
        "claude": ClientSetup(
            MESSAGES, "claude-haiku-5-5", "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n"
        ),
        "codex": ClientSetup(RESPONSES, "gpt-6-sol", _CODEX, "$CODEX_HOME/config.toml; then: export HALTER_KEY={key}"),
        "aider": ClientSetup(
            CHAT,
            "gpt-6-sol",
            "export OPENAI_API_BASE={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
        "opencode": ClientSetup(CHAT, CHAT_TOOL_MODEL, _OPENCODE, "opencode.json"),
        "openhands": ClientSetup(CHAT, CHAT_TOOL_MODEL, _OPENHANDS),
        "llm": ClientSetup(
            CHAT,
            "gpt-6-luna",
            "export OPENAI_BASE_URL={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
        "langchain": ClientSetup(
            CHAT,
            CHAT_TOOL_MODEL,
            "export OPENAI_BASE_URL={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
    }
)


def find_client(name: str) -> ClientSetup:
    for client in CLIENTS:
        if client == name:
            return SETUPS[client]
    raise ConfigError(f"Unknown client {name!r}. Use one of {join_names(CLIENTS)}.")


def render_setup(setup: ClientSetup, root: str, key: str, model: str = "") -> tuple[str, str]:
    """Render the lines for a client, and the name of their file, if any."""
    values = {"root": root, "base": f"{root}/v1", "key": key, "model": model or setup.model}
    return setup.lines.format(**values), setup.file.format(**values)


def make_check_body(setup: ClientSetup, model: str = "") -> bytes:
    """Make the smallest request of a client's dialect."""
    prompt = "Answer with the word ok."
    body: dict[str, object] = {"model": model or setup.model}
    if setup.dialect is RESPONSES:
        body |= {"input": prompt, "max_output_tokens": 256, "store": False}
    else:
        limit = "max_tokens" if setup.dialect is MESSAGES else "max_completion_tokens"
        body |= {"messages": [{"role": "user", "content": prompt}], limit: 256}
    return msgspec.json.encode(body)
