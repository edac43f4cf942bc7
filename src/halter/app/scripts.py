"""A message that names a playbook: its inputs are read out of the message, and it is played."""

import re
from typing import Final

import msgspec

from halter.app import playing
from halter.app.agent_context import AgentContext
from halter.brain.route import Script
from halter.brain.session_runtime import Waits
from halter.core.text import listed
from halter.work.playbooks import Tell

_GIVEN: Final = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_-]*)(?:=|:\s?)"
    r"(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<bare>[^\s,;]+))"
)


class Played(msgspec.Struct, frozen=True):
    """What a playbook came to; without a session it was not begun."""

    session: str
    sentence: str
    ok: bool


def inputs_in(rest: str, names: tuple[str, ...]) -> dict[str, str]:
    """Read the inputs that a message gives, as `name=value`; a value with spaces stands in quotes."""
    found: dict[str, str] = {}
    for given in _GIVEN.finditer(rest):
        if given["name"] in names:
            values = (given["double"], given["single"], given["bare"])
            found[given["name"]] = next(value for value in values if value is not None)
    return found


async def play(speaking: AgentContext, said: Script, tell: Tell, waits: Waits) -> Played:
    """Play a playbook of the agent from beginning to end."""
    playbook = speaking.agent.playbooks[said.playbook]
    inputs = inputs_in(said.rest, playbook.inputs)
    missing = [name for name in playbook.inputs if name not in inputs]
    if missing:
        how = f"say it as in: run {said.playbook} with {missing[0]}=VALUE"
        return Played("", f"{said.playbook} needs {listed(missing)}: {how}", ok=False)
    session = await playing.begin(speaking.app, speaking.agent, playbook, inputs)
    ended = await playing.go_on(speaking.app, speaking.agent, session, tell, waits)
    sentence = f"{said.playbook} (session {session}): {ended.state}, {ended.terminal_reason}. {ended.sentence}".strip()
    return Played(session, sentence, ended.state == "COMPLETED")
