"""A made-up model at a real price: a script answers, and a provider counts the tokens and writes the bill.

The same provider serves a plain loop and Halter. Tokens are counted from what is really sent and said, at four bytes
each, which is usual for English; nothing is taken from a cache on either side.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.counting import most_tokens
from halter.core.errors import ConfigError
from halter.core.messages import Hear, Message, Prompt, Reply, Text, ToolCall
from halter.core.tools import Permit
from halter.core.usage import ModelName, Rates, Unpriced, Usage

MODEL: Final = ModelName("anthropic", "claude-sonnet-4-5")
BYTES: Final = 4
"""So many bytes are a token."""
TAKES: Final = 8 * SECOND
"""How long an answer takes."""

Script = Callable[[Prompt], Reply]
"""What the model says to a prompt: the same to everybody who sends it."""


def price() -> Rates:
    """Find what the model costs, in the table that every cap is kept with."""
    from halter.models.prices import Prices

    found = Prices().find(MODEL)
    if isinstance(found, Unpriced):
        raise ConfigError(found.sentence)
    return found


class Provider:
    """Serves one customer, and counts what it serves."""

    def __init__(self, script: Script, rates: Rates, clock: Clock) -> None:
        self.requests = 0
        self.usd = 0
        self._script = script
        self._rates = rates
        self._clock = clock

    async def serve(self, prompt: Prompt) -> Reply:
        """Answer, after a while, and charge for it."""
        await self._clock.sleep(TAKES)
        reply = self._script(prompt)
        usage = Usage(tokens(prompt), tokens(Prompt(messages=(Message("assistant", reply.parts),))))
        self.requests += 1
        self.usd += self.cost(usage)
        return msgspec.structs.replace(reply, usage=usage)

    def cost(self, usage: Usage) -> int:
        """Tell what so many tokens cost."""
        return self._rates.cost(usage, self._clock.now())


class Served:
    """The same model as Halter asks it: at the guard's door, with a permit."""

    base_url: None = None

    def __init__(self, provider: Provider) -> None:
        self.name = MODEL
        self._provider = provider

    def count(self, prompt: Prompt) -> int:
        """Bound from above how many input tokens a prompt has."""
        return most_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, hear: Hear | None = None) -> Reply:
        """Answer."""
        permit.use()
        return await self._provider.serve(prompt)


def tokens(prompt: Prompt) -> int:
    """Count the tokens of a prompt."""
    return -(-most_tokens(prompt) // BYTES)


def says(text: str) -> Reply:
    """Only say something."""
    return Reply((Text(text, "model", trusted=False),))


def calls(tool: str, arguments: Mapping[str, object], text: str = "") -> Reply:
    """Ask for a call."""
    words = (Text(text, "model", trusted=False),) if text else ()
    return Reply((*words, ToolCall("1", tool, msgspec.json.encode(arguments).decode())), "calls")
