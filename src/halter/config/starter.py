"""The files of a new agent: few, short, and at work as they stand."""

import json
import re
from collections.abc import Mapping
from typing import Final

from halter.config.agent import AGENT_FILE, INSTRUCTIONS
from halter.config.usual import NOBODY, USUAL
from halter.core.mind import REFLEX, SCRIPTED
from halter.core.usage import ModelName

TOOLS_FILE: Final = "tools.py"
REPLIES_FILE: Final = "replies.yaml"

_AGENT: Final = """\
# Who this agent is, what thinks for it, and how far it may go.
# All keys: `halter schema`. A wrong one is a sentence with its line.
name: {name}
{model}
mode: SEMI  # you are asked before risky calls; with ASSIST before most

limits:
  max_cost_usd: 0.25  # of one session; it stops before it would cost more
  max_cost_usd_per_day: 1.00  # of all its sessions in a day
  max_steps: 20  # of one turn
"""

_RULES: Final = """\
model: reflex  # needs no network and costs nothing; for a real one write, for example, openai:gpt-5-mini

reflex:  # the first rule that holds decides
  - when: message.contains("hello")
    say: Hello. I work by rules; look into agent.yaml and give me a model.
  - say: None of my rules is about that.
"""

_SCRIPT: Final = """\
model: scripted  # says what its script says, each reply once: for tests
script: replies.yaml
"""

_REPLIES: Final = """\
- text: Let me count.
  calls: [{tool: days_between, arguments: {first: "2026-01-01", last: "2026-12-31"}}]
- text: Hello. The year has 364 days after its first.
"""

_INSTRUCTIONS: Final = """\
# {name}

You are {name}, an agent that works by itself.

- Say what you did, and what you did not do.
- Use your tools rather than guess.
- When you are finished, or cannot go on, say so in one sentence.
"""

_TOOLS: Final = '''\
"""Tools of this agent: plain typed functions. What they may do is decided by the guard."""

from datetime import date

from halter import tool


@tool(level="SAFE", effect="read")
def days_between(first: str, last: str) -> str:
    """Count the days from one date to another, both written as 2026-11-15."""
    return str((date.fromisoformat(last) - date.fromisoformat(first)).days)
'''


def starter(name: str, model: str) -> Mapping[str, str]:
    """Write the files of an agent, by name; without a model, it works by rules."""
    files = {
        AGENT_FILE: _AGENT.format(name=_plain(name), model=_thinks(model)),
        INSTRUCTIONS: _INSTRUCTIONS.format(name=name),
        TOOLS_FILE: _TOOLS,
    }
    return files | ({REPLIES_FILE: _REPLIES} if _provider(model) == SCRIPTED else {})


def key_for(model: str) -> str:
    """Name the variable in which a new agent's key is looked for, if its model needs one."""
    return USUAL.get(_provider(model), NOBODY).key


def _provider(model: str) -> str:
    return ModelName.parse(model).provider if model else REFLEX


def _thinks(model: str) -> str:
    match _provider(model):
        case "reflex":
            return _RULES
        case "scripted":
            return _SCRIPT
        case provider:
            return f"model: {_plain(model)}\n{_reached(provider)}"


def _reached(provider: str) -> str:
    """Write where a provider is reached, if nobody knows that."""
    if USUAL.get(provider, NOBODY).base_url:
        return ""
    comment = "where it is reached; what it costs is said in halter.yaml, under `models`"
    return f"providers:\n  {_plain(provider)}:\n    base_url: http://localhost:8000/v1  # {comment}\n"


def _plain(text: str) -> str:
    """Write text without quotes where YAML takes it as it is meant."""
    plain = re.fullmatch(r"[A-Za-z][\w.:/@+-]*\w", text, re.ASCII) and text.lower() not in {"true", "false", "null"}
    return text if plain else json.dumps(text, ensure_ascii=False)
