"""Models that run away, each in its own way, and the world outside that counts what they do."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.counting import most_tokens
from halter.core.messages import Hear, Prompt, Reply, Text, ToolCall
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName, Usage
from halter.tools.tool import tool

NAME: Final = ModelName("scripted", "runaway")
TAKES: Final = SECOND
"""How long an answer takes."""
WRITES: Final = 300
"""How many tokens an answer has, if it may have so many."""
ENDLESS: Final = 1_000_000
READS: Final = 1200
"""How many tokens its prompt is said to have, which is less than it could have."""
YEAR: Final = 365 * 24 * 3600
FLOOD: Final = 60
"""More calls than one step may ask for."""


@dataclass(slots=True)
class Outside:
    """What really happened: when something was sent, and when a model was asked and how many tokens that took."""

    clock: Clock
    sent: list[int] = field(default_factory=list[int])
    asked: list[tuple[int, Usage]] = field(default_factory=list[tuple[int, Usage]])

    def tools(self) -> Mapping[str, Tool]:
        """Make the tools of an agent that floods: one that anybody may use, and one that a person must allow."""
        made = (tool(self.send, level="SAFE"), tool(self.wipe, level="RESTRICTED"))
        return {each.spec.name: each for each in made}

    async def send(self, text: str = "") -> str:
        """Send something."""
        self.sent.append(self.clock.now())
        return f"sent {text}"

    async def wipe(self) -> str:
        """Wipe everything, which nobody ever allows."""
        raise AssertionError("A call ran that nobody had allowed.")


Behaves = Callable[[int, random.Random], Reply]
"""Answers, given how many answers there were, whatever it is told."""


class Runaway:
    """A model that does not listen."""

    base_url: None = None

    def __init__(self, behaviour: str, outside: Outside, chance: random.Random) -> None:
        self.name = NAME
        self._behaves = BEHAVIOURS[behaviour]
        self._writes = WRITES if behaviour not in WORDY else ENDLESS
        self._outside = outside
        self._chance = chance

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return most_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Take some time and some tokens, and do as it likes."""
        permit.use()
        usage = Usage(READS, min(self._writes, prompt.max_output_tokens))
        self._outside.asked.append((self._outside.clock.now(), usage))
        await self._outside.clock.sleep(TAKES)
        reply = self._behaves(len(self._outside.asked), self._chance)
        return msgspec.structs.replace(reply, usage=usage)


def _says(text: str) -> Reply:
    return Reply((Text(text, "model", trusted=False),))


def _calls(*asked: tuple[str, Any]) -> Reply:
    made = (
        ToolCall(f"m{number}", name, given if isinstance(given, str) else msgspec.json.encode(given).decode())
        for number, (name, given) in enumerate(asked)
    )
    return Reply(tuple(made), "calls")


def _yields(mode: str, sleep: float = 0) -> tuple[str, Any]:
    return ("yield", {"mode": mode, "sleep": sleep})


def _deaf(number: int, chance: random.Random) -> Reply:
    """Do one wrong thing after the other, whatever was refused before."""
    sends = [("send", {"text": f"{number}.{each}"}) for each in range(chance.randrange(1, 15))]
    return chance.choice(
        (
            _calls(*sends, _yields("continue")),
            _calls(*sends),
            _calls(*(("send", {"text": f"{number}.{each}"}) for each in range(FLOOD))),
            _calls(("no_such_tool", {}), _yields("continue")),
            _calls(("send", '{"text": '), _yields("continue")),
            _calls(("wipe", {}), _yields("continue")),
            _calls(("yield", {"mode": "for ever"})),
            _calls(("yield", {"mode": "sleep", "sleep": -5})),
            _calls(("yield", {"mode": "sleep", "sleep": 1, "wake_early_if": ["everything"]})),
            _calls(_yields("sleep", 0)),
            _says("I am shutting down now. yield(mode='shutdown')"),
            Reply(()),
        )
    )


BEHAVIOURS: Final[Mapping[str, Behaves]] = {
    "never yields": lambda number, _: _says(f"I am on it, number {number}."),
    "makes the same call again and again": lambda _, __: _calls(("send", {"text": "again"})),
    "makes one call after the other": lambda number, _: _calls(("send", {"text": f"{number}"})),
    "acts and goes on at once": lambda number, _: _calls(
        *(("send", {"text": f"{number}.{each}"}) for each in range(3)), _yields("continue")
    ),
    "sleeps for no time": lambda _, __: _calls(_yields("sleep", 0)),
    "sleeps for a year": lambda _, __: _calls(_yields("sleep", YEAR)),
    "does not listen": _deaf,
}
"""Every way to run away, by what it is called in a sentence."""

WORDY: Final = frozenset(("acts and goes on at once",))
"""Those that write as much as they may."""
