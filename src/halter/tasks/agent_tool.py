"""The tool with which a model asks another agent, or hands the conversation over to it."""

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self

import msgspec

from halter.core.clock import HOUR
from halter.core.tools import Failed, add_spec_digest
from halter.loop.turn import HAND_OFF
from halter.tasks.task_tools import READS_ANYONE, Verb

ASK: Final = "ask_"
ASK_TIMEOUT: Final = HOUR
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")

RunTask = Callable[[str, str], Awaitable[str]]
"""Runs a task for the call with an id; returns the agent's answer."""
OpenAgent = Callable[[Any], AbstractAsyncContextManager[Any]]


class _Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: str

    def __post_init__(self) -> None:
        if not self.task.strip():
            raise ValueError("`task` is empty: say what the other agent should do")


async def _run_nowhere(_: str, __: str) -> str:
    raise Failed("NoSession", "another agent can be asked only inside a session")


class AgentTool(Verb):
    """Asks another agent in a sub-session, with at most `max_cost` micro-dollars of its session's remaining budget.

    The other agent's calls pass the guard under its own policy, and its answer is untrusted. With `hands_off`, it takes
    over the conversation, and its answer ends the turn.
    """

    def __init__(
        self,
        agent: str,
        description: str = "",
        *,
        max_cost: int | None = None,
        hands_off: bool = False,
        open: OpenAgent | None = None,  # noqa: A002 The verb for what it does.
        run: RunTask = _run_nowhere,
    ) -> None:
        self.agent, self.max_cost, self.hands_off, self.open = agent, max_cost, hands_off, open
        self._description = description

        async def act(arguments: _Task, call: str) -> str:
            return await run(arguments.task, call)

        name = f"{HAND_OFF if hands_off else ASK}{_NO_NAME.sub('_', agent)}"[:64]
        opening = "Hand the conversation over to" if hands_off else "Ask"
        closing = "Its answer ends your turn." if hands_off else "It knows only what you tell it, and answers once."
        full_description = " ".join(
            sentence for sentence in (f"{opening} the agent {agent}.", description.strip(), closing) if sentence
        )
        super().__init__(name, full_description, _Task, act, timeout=ASK_TIMEOUT, declaration=READS_ANYONE)
        self._spec = add_spec_digest(msgspec.structs.replace(self._spec, effect="write"))

    def bind(self, run: RunTask) -> Self:
        """Return the same tool, bound to one session."""
        return type(self)(
            self.agent, self._description, max_cost=self.max_cost, hands_off=self.hands_off, open=self.open, run=run
        )
