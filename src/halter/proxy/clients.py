"""What each client needs to be pointed at the proxy, and one request that shows that it is."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

import msgspec

from halter.core.errors import ConfigError
from halter.core.text import join_names
from halter.proxy.dialect import CHAT, MESSAGES, RESPONSES, WireDialect

ClientName = Literal["claude", "codex", "aider", "opencode", "openhands", "llm", "langchain"]
CLIENTS: Final[tuple[ClientName, ...]] = get_args(ClientName)


class ClientSetup(msgspec.Struct, frozen=True):
    """A client: the dialect that it speaks, a model to try it with, and the lines that point it here.

    In the lines, {root} is the proxy's address, {base} the same with /v1, {key} a virtual key and {model} a model.
    """

    dialect: WireDialect
    model: str
    lines: str
    file: str = ""
    """Where the lines belong, if not into the environment."""


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

SETUPS: Final[Mapping[ClientName, ClientSetup]] = MappingProxyType(
    {
        "claude": ClientSetup(
            MESSAGES, "claude-haiku-5-5", "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n"
        ),
        "codex": ClientSetup(RESPONSES, "gpt-5", _CODEX, "$CODEX_HOME/config.toml; then: export HALTER_KEY={key}"),
        "aider": ClientSetup(
            CHAT,
            "gpt-5",
            "export OPENAI_API_BASE={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
        "opencode": ClientSetup(CHAT, "gpt-5", _OPENCODE, "opencode.json"),
        "openhands": ClientSetup(CHAT, "gpt-5", _OPENHANDS),
        "llm": ClientSetup(
            CHAT,
            "gpt-4o-mini",
            "export OPENAI_BASE_URL={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
        "langchain": ClientSetup(
            CHAT,
            "gpt-5",
            "export OPENAI_BASE_URL={base}\nexport OPENAI_API_KEY={key}\n"
            "export ANTHROPIC_BASE_URL={root}\nexport ANTHROPIC_API_KEY={key}\n",
        ),
    }
)


def find_client(name: str) -> ClientSetup:
    for known in CLIENTS:
        if known == name:
            return SETUPS[known]
    raise ConfigError(f"There is no client {name!r} that is known here: write one of {join_names(CLIENTS)}.")


def render_setup(setup: ClientSetup, root: str, key: str, model: str = "") -> tuple[str, str]:
    """The lines for a client, and the file that they belong into, if any."""
    words = {"root": root, "base": f"{root}/v1", "key": key, "model": model or setup.model}
    return setup.lines.format(**words), setup.file.format(**words)


def make_check_body(setup: ClientSetup, model: str = "") -> bytes:
    """The smallest request of a client's dialect."""
    said = "Answer with the word ok."
    asked: dict[str, object] = {"model": model or setup.model}
    if setup.dialect is RESPONSES:
        asked |= {"input": said, "max_output_tokens": 256, "store": False}
    else:
        limit = "max_tokens" if setup.dialect is MESSAGES else "max_completion_tokens"
        asked |= {"messages": [{"role": "user", "content": said}], limit: 256}
    return msgspec.json.encode(asked)
