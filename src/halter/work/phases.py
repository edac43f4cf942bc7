"""The walk of a task session: one phase after the other, never back, each with the tools that are granted there.

Inside a phase the model works as it likes. When it ends its turn, the runtime moves the session on: to the next phase,
or to its end. Where others have to look at what was found, no turn is taken: they are asked instead.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from halter.brain import words
from halter.brain.decide import After, Again, End, Park
from halter.brain.loop import Loop
from halter.brain.session_runtime import SessionRuntime
from halter.core.messages import Text
from halter.core.spec import Phase
from halter.core.text import listed
from halter.core.tools import ToolSpec
from halter.work.conversation import News, Open

REVIEW: Final = "ethics_review"
"""The phase in which somebody else than the author looks at what was found."""

Offered = Callable[[Phase], tuple[ToolSpec, ...]]
"""Tells which tools a model is told of in a phase."""

Reviewing = Callable[[], Awaitable[End | None]]
"""Lets others look at what was found; tells if the session has to end over it."""


class Walk:
    """The pace of a task: a turn for each phase, as far as it gets."""

    def __init__(
        self, running: SessionRuntime, loop: Loop, phases: Sequence[Phase], offered: Offered, review: Reviewing
    ) -> None:
        self._running = running
        self._loop = loop
        self._phases = phases
        self._offered = offered
        self._review = review

    async def before(self, news: News) -> Open | Park | End:
        """Open a turn with what was said, with the phase that begins, or with a word to go on; not during a halt."""
        self._stand()
        halt = await self._running.halted()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._loop.turn.number and (over := await self._moved_on()) is not None:
            return over
        if news.said:
            return Open((*news.said, *self._announced()) if self._begins() else news.said)
        if self._begins():
            return Open(self._announced())
        turn = self._loop.turn
        if turn.resumed and turn.why not in ("ended", "asked", "yielded"):
            return Open((Text(words.GO_ON, "config", reason="resumed"),))
        return Park("WAITING_FOR_INPUT")

    def show(self, notes: Sequence[Text]) -> None:
        """There are none."""

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Stand in the phase that the turn was opened in."""
        self._stand()

    async def after(self, then: After) -> After:
        """Move on when a phase has had its turn; the last one ends the session."""
        if not isinstance(then, End) or then.state != "COMPLETED":
            return then
        self._stand()
        if not self._begins() and not await self._entered():
            return then
        return await self._moved_on() or Again()

    async def _moved_on(self) -> End | None:
        """Let others look at what was found where it is time for that; whoever was stopped meanwhile begins it anew."""
        while self._begins() and self._here().name == REVIEW:
            stopped = await self._review()
            if stopped is not None:
                return stopped
            if not await self._entered():
                return End("COMPLETED", "completed")
        return None

    async def _entered(self) -> bool:
        """Enter the next phase, if there is one."""
        number = self._number() + 1
        if number >= len(self._phases):
            return False
        await self._loop.enter(self._phases[number].name, number)
        self._stand()
        return True

    def _number(self) -> int:
        return 0 if self._loop.phase is None else self._loop.phase.number

    def _here(self) -> Phase:
        return self._phases[min(self._number(), len(self._phases) - 1)]

    def _begins(self) -> bool:
        """Tell whether the phase has had no turn yet."""
        entered = self._loop.phase
        return (0 if entered is None else entered.turn) == self._loop.turn.number

    def _stand(self) -> None:
        """Let the guard and the model know which phase it is."""
        phase = self._here()
        self._running.standing = msgspec.structs.replace(self._running.standing, phase=phase)
        self._loop.offer(self._offered(phase))

    def _announced(self) -> tuple[Text, ...]:
        """Say which phase begins; a walk of a single phase needs no words."""
        if len(self._phases) == 1:
            return ()
        phase, number = self._here(), self._number() + 1
        tools = "all of your tools" if phase.grants is None else listed(phase.grants) or "no tools"
        said = f"Phase {number} of {len(self._phases)} begins: {phase.name}. In it you may use {tools}."
        return (Text(f"{said} End your turn when your part of it is done.", "config", reason="phase"),)
