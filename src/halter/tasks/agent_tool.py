"""The tool with which a model asks another agent, or hands the conversation over to it."""

import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Self

import msgspec

from halter.core.clock import HOUR
from halter.core.tools import Failed, add_spec_digest
from halter.loop.decide import HAND_OFF
from halter.tasks.task_tools import READS_ANYONE, Verb

ASK: Final = "ask_"
LONGEST_ASKED: Final = HOUR
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")

RunTask = Callable[[str, str], Awaitable[str]]
"""Has the task done, by the id of the call; returns what the agent said."""
OpenAgent = Callable[[Any], AbstractAsyncContextManager[Any]]


class _Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: str

    def __post_init__(self) -> None:
        if not self.task.strip():
            raise ValueError("`task` is empty: say what the other agent is to do")


async def _run_nowhere(_: str, __: str) -> str:
    raise Failed("NoSession", "another agent can only be asked inside of a session")


class AgentTool(Verb):
    """Asks another agent by a sub-session, with at most `max_cost` micro-dollars of what its own session has left.

    What that agent does passes the guard under its own policy. What it says counts as written by others. One that
    `hands_off` gives it the whole conversation, and its answer ends the turn.
    """

    def __init__(
        self,
        agent: str,
        description: str = "",
        *,
        max_cost: int | None = None,
        hands_off: bool = False,
        open: OpenAgent | None = None,  # noqa: A002 It is what it does.
        run: RunTask = _run_nowhere,
    ) -> None:
        self.agent, self.max_cost, self.hands_off, self.open = agent, max_cost, hands_off, open
        self._about = description

        async def act(asked: _Task, call: str) -> str:
            return await run(asked.task, call)

        name = f"{HAND_OFF if hands_off else ASK}{_NO_NAME.sub('_', agent)}"[:64]
        deed = "Hand the conversation over to" if hands_off else "Ask"
        after = "Its answer ends your turn." if hands_off else "It knows only what you tell it, and answers once."
        about = " ".join(part for part in (f"{deed} the agent {agent}.", description.strip(), after) if part)
        super().__init__(name, about, _Task, act, timeout=LONGEST_ASKED, declaration=READS_ANYONE)
        self._spec = add_spec_digest(msgspec.structs.replace(self._spec, effect="write"))

    def bind(self, run: RunTask) -> Self:
        """Returns the same tool for one session."""
        return type(self)(
            self.agent, self._about, max_cost=self.max_cost, hands_off=self.hands_off, open=self.open, run=run
        )
