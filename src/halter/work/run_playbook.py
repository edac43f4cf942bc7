"""`run_playbook`: a model lets a list of steps be done, each through the guard as if it had asked for it itself."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from halter.core.clock import DAY
from halter.core.money import shown
from halter.core.playbook import MissingReference, Playbook, Results, bound
from halter.core.text import clean, listed, shorten
from halter.core.tools import Failed
from halter.guard.ask import Call
from halter.guard.chokepoint import Answer
from halter.work.verbs import Verb

RUN_PLAYBOOK: Final = "run_playbook"
LONGEST: Final = 7 * DAY
"""A step may wait for a person, and they have a day to answer."""


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    playbook: str
    inputs: Mapping[str, Any] = {}


MakeCall = Callable[[Call, int | None], Awaitable[Answer]]
"""Takes a call to the guard, with what it may spend at most, and waits for whatever it has to wait for."""
Spent = Callable[[str], Awaitable[int]]
"""Tells what all that was done inside of a call has cost so far, whichever process did it."""


def run_playbook(playbooks: Mapping[str, Playbook], make: MakeCall, spent: Spent) -> Verb:
    """Make the verb that plays a playbook. The steps carry the cost; together they stay below the playbook's cap."""
    under_way: dict[str, str] = {}

    async def act(asked: _Asked, call: str) -> str:
        if any(call.startswith(f"{outer}/") for outer, name in under_way.items() if name == asked.playbook):
            raise Failed("PlaysItself", f"{asked.playbook} is being played already: it would never come to its end")
        under_way[call] = asked.playbook
        try:
            return await played(asked, call)
        finally:
            del under_way[call]

    async def played(asked: _Asked, call: str) -> str:
        playbook = playbooks[asked.playbook]
        results, told = Results(asked.inputs), list[str]()
        for number, step in enumerate(playbook.steps, 1):
            arguments = bound(step, results)
            if isinstance(arguments, MissingReference):
                raise Failed("StepFailed", arguments.sentence, "\n".join(told))
            cap = playbook.max_cost_usd
            left = None if cap is None else cap - await spent(call)
            if cap is not None and left is not None and left <= 0:
                raise Failed("CostCapReached", f"step {number} was not begun: {shown(cap)} is spent", "\n".join(told))
            answer = await make(Call(f"{call}/{number}", step.call, arguments), left)
            told.append(f"{number}. {step.call}: {answer.outcome}\n{answer.text}")
            if answer.outcome != "ok":
                raise Failed("StepFailed", f"step {number} ({step.call}): {answer.outcome}", "\n".join(told))
            results = results.with_step(step.name, answer.text)
        return "\n".join(told)

    def flaw(asked: _Asked) -> str:
        playbook = playbooks.get(asked.playbook)
        if playbook is None:
            return f"There is no playbook {shorten(clean(asked.playbook))!r}: there is {listed(playbooks) or 'none'}."
        missing = [name for name in playbook.inputs if name not in asked.inputs]
        return f"{asked.playbook} needs {listed(missing)} in `inputs`." if missing else ""

    known = " ".join(_described(name, each) for name, each in playbooks.items())
    about = f"Let the steps of a playbook be done. {known}".strip()
    return Verb(RUN_PLAYBOOK, about, _Asked, act, flaw, timeout=LONGEST)


def _described(name: str, playbook: Playbook) -> str:
    takes = f" takes {listed(playbook.inputs)} and" if playbook.inputs else ""
    most = "" if playbook.max_cost_usd is None else f", for at most {shown(playbook.max_cost_usd)}"
    return f"{name}{takes} calls {listed(playbook.tools)}{most}."
