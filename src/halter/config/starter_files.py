"""The files of a new agent."""

import json
import re
from collections.abc import Mapping
from typing import Final

from halter.config.agent_files import AGENT_FILE
from halter.config.guidance import INSTRUCTIONS
from halter.config.roots import TOOLS_FILE
from halter.core.usage import ModelName
from halter.spec.models import KNOWN_PROVIDERS, REFLEX, SCRIPTED, UNKNOWN_PROVIDER

REPLIES_FILE: Final = "replies.yaml"
_AGENT_TEMPLATE: Final = """\
# The agent's name, its model and its limits.
# List all keys with `halter schema`. Errors name the file and line.
name: {name}
{model}
mode: SEMI  # risky calls need your approval; with ASSIST, most calls do
policy:
  provenance: ask  # calls with values from untrusted content need your approval

limits:
  max_cost_usd: 0.25  # per session; no call may exceed it
  max_cost_usd_per_day: 1.00  # all sessions of a day
  max_steps: 20  # per turn
"""
_REFLEX_MODEL_LINES: Final = """\
model: reflex  # rules, without network or cost; replace it with a model, for example openai:gpt-6-luna

reflex:  # the first rule whose condition (`when`) holds answers; this one has none
  - say: Hello. I answer by rules. Set a model in agent.yaml.
"""
_SCRIPTED_MODEL_LINES: Final = """\
model: scripted  # plays the replies of a script, each once; for tests
script: replies.yaml
"""
_REPLIES_TEMPLATE: Final = """\
- text: Let me count.
  calls: [{tool: days_between, arguments: {first: "2026-01-01", last: "2026-12-31"}}]
- text: Hello. The year has 364 days after its first.
"""
_INSTRUCTIONS_TEMPLATE: Final = """\
# {name}

You are {name}, an agent that runs unattended.

- Report what you did and what you did not do.
- Use your tools instead of guessing.
- When you have finished or cannot continue, say so in one sentence.
"""
_TOOLS_TEMPLATE: Final = '''\
"""Tools of this agent: plain typed functions. The guard decides which calls may run."""

from datetime import date

from halter import tool


@tool(level="SAFE", effect="read", reads="nothing")
def days_between(first: str, last: str) -> str:
    """Count the days from one date to another, both written as 2026-11-15."""
    return str((date.fromisoformat(last) - date.fromisoformat(first)).days)
'''


def render_starter_files(name: str, model: str) -> Mapping[str, str]:
    """Return the files of a new agent by name. Without a model, it uses rules."""
    files = {
        AGENT_FILE: _AGENT_TEMPLATE.format(name=_quote_if_needed(name), model=_model_lines(model)),
        INSTRUCTIONS: _INSTRUCTIONS_TEMPLATE.format(name=name),
        TOOLS_FILE: _TOOLS_TEMPLATE,
    }
    return files | ({REPLIES_FILE: _REPLIES_TEMPLATE} if _provider(model) == SCRIPTED else {})


def find_key_variable(model: str) -> str:
    return next(iter(KNOWN_PROVIDERS.get(_provider(model), UNKNOWN_PROVIDER).keys), "")


def _provider(model: str) -> str:
    return ModelName.parse(model).provider if model else REFLEX


def _model_lines(model: str) -> str:
    match _provider(model):
        case "reflex":
            return _REFLEX_MODEL_LINES
        case "scripted":
            return _SCRIPTED_MODEL_LINES
        case provider:
            return f"model: {_quote_if_needed(model)}\n{_provider_lines(provider)}"


def _provider_lines(provider: str) -> str:
    if KNOWN_PROVIDERS.get(provider, UNKNOWN_PROVIDER).base_url:
        return ""
    comment = "URL of the endpoint; set the model's price in halter.yaml, under `models`"
    return f"providers:\n  {_quote_if_needed(provider)}:\n    base_url: http://localhost:8000/v1  # {comment}\n"


def _quote_if_needed(text: str) -> str:
    """Quote text only if YAML would read it as another type."""
    is_plain = re.fullmatch(r"[A-Za-z][\w.:/@+-]*\w", text, re.ASCII) and text.lower() not in {"true", "false", "null"}
    return text if is_plain else json.dumps(text, ensure_ascii=False)
