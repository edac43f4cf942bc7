"""The agent of the chaos drill: its sessions sleep, work, or spend until their cap, and what they do is counted.

Each payment is a plain write: it adds the key of its call to a file, which is the outside world's own count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from halter.config.trust import Trust, folder_digest
from halter.core.events import SessionStarted
from halter.core.ports import Write
from halter.state.life import start
from halter_drills.agents import PERSON

Errand = Literal["sleeps", "works", "spends"]

AGENT: Final = "courier"
TRIGGER: Final = f"{AGENT}/errands"
CONFIG: Final = "config"
EFFECTS: Final = "effects"

_ERRANDS: Final[tuple[Errand, ...]] = ("sleeps", "works", "sleeps", "works", "spends")
_ENDS: Final[Mapping[Errand, str]] = {"sleeps": "COMPLETED", "works": "COMPLETED", "spends": "BUDGET_EXCEEDED"}

_AGENT_YAML: Final = f"""\
name: {AGENT}
model: scripted
script: script.yaml
autonomy: {{enabled: false, token_budget_per_hour: 0, max_actions_per_minute: 0, idle_timeout: 0}}
limits: {{max_cost_usd: 0.40, max_cost_usd_per_day: 10000, max_output_tokens: 300, on_cap: stop}}
schedules:
  - {{name: errands, cron: "0 0 1 1 *", prompt: Happy new year.}}
"""
_FLEET_YAML: Final = """\
models:
  "scripted:script": {price: {input: 1, output: 1}}
limits: {max_cost_usd_per_day: 10000}
"""
_USED: Final = "usage: {input_tokens: 100, output_tokens: 50}, repeat: true"
_SCRIPT_YAML: Final = f"""\
- {{finds: Spend all, calls: [{{tool: pay, arguments: {{part: more}}}}], {_USED}}}
- {{finds: Work through, unless: part-1, calls: [{{tool: pay, arguments: {{part: part-1}}}}], {_USED}}}
- {{finds: Work through, unless: part-2, calls: [{{tool: pay, arguments: {{part: part-2}}}}], {_USED}}}
- {{finds: Work through, text: That is done., {_USED}}}
- unless: part-1
  calls: [{{tool: pay, arguments: {{part: part-1}}}}, {{tool: yield, arguments: {{mode: sleep, sleep: 1s}}}}]
  repeat: true
- unless: part-2
  calls: [{{tool: pay, arguments: {{part: part-2}}}}, {{tool: yield, arguments: {{mode: sleep, sleep: 2s}}}}]
  repeat: true
- unless: part-3
  calls: [{{tool: pay, arguments: {{part: part-3}}}}, {{tool: yield, arguments: {{mode: shutdown}}}}]
  repeat: true
- {{calls: [{{tool: yield, arguments: {{mode: shutdown}}}}], {_USED}}}
"""
_TOOLS_PY: Final = '''\
import asyncio
import os

from halter import CallKey, tool


@tool(level="CONTROLLED", effect="write", cost=0.05)
async def pay(part: str, key: CallKey) -> str:
    """Pay for a part."""
    await asyncio.sleep(0.3)
    file = os.open({effects!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, key.encode() + b"\\n")
    finally:
        os.close(file)
    await asyncio.sleep(0.2)
    return f"Paid as {{key}}."
'''


def made(home: Path) -> Path:
    """Write the agent's folder, the fleet's file and the trust of a person who has read both."""
    folder = home / AGENT
    folder.mkdir()
    (home / EFFECTS).touch()
    (home / "halter.yaml").write_text(_FLEET_YAML)
    (folder / "agent.yaml").write_text(_AGENT_YAML)
    (folder / "script.yaml").write_text(_SCRIPT_YAML)
    (folder / "tools.py").write_text(_TOOLS_PY.format(effects=str(home / EFFECTS)))
    trusted = home / CONFIG / "halter"
    trusted.mkdir(parents=True)
    Trust(trusted / "trust.json").trust(folder, folder_digest(folder), PERSON, 0)
    return folder


def sessions(count: int) -> Iterator[tuple[str, Errand]]:
    """Name so many sessions, each with what it does."""
    for number in range(count):
        errand = _ERRANDS[number % len(_ERRANDS)]
        yield f"{AGENT}.{errand}-{number + 1}", errand


def begun(session: str, errand: Errand) -> Write:
    """Begin a session: one that sleeps runs by itself, the others are tasks of a trigger."""
    own = errand == "sleeps"
    event = SessionStarted(
        session=session,
        agent=AGENT,
        kind="autonomous" if own else "task",
        started_by=PERSON if own else f"trigger:{TRIGGER}",
        trigger="" if own else TRIGGER,
    )
    return start(event, None if own else {"works": b"Work through it.", "spends": b"Spend all you have."}[errand])


def expected_end(errand: Errand) -> str:
    """Tell how a session has to end."""
    return _ENDS[errand]


def paid(home: Path) -> Counter[str]:
    """Read the outside world's count: how often each call had its effect."""
    return Counter((home / EFFECTS).read_text().split("\n")[:-1])
