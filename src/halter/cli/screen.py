"""A session on the screen while it works: its words as they come, its calls, what they cost, and what waits for you."""

import sys
from typing import TYPE_CHECKING

from halter.cli.answer import harmless, say, warn
from halter.core.messages import StreamChunk, ToolCall
from halter.core.money import shown, shown_usd
from halter.core.text import clean, shorten
from halter.core.vocabulary import State
from halter.guard.chokepoint import Answer, NeedsPerson

if TYPE_CHECKING:
    from halter.brain.loop import Watching

WIDEST = 100


class Screen:
    """Shows one session. Words are the answer, and go where answers go; all else is said beside them."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._line_open = False
        self.streamed = ""

    def listen(self, chunk: StreamChunk) -> None:
        """Show a piece of an answer; what turns out to belong to a failed attempt is taken back in words."""
        if chunk.discard and self.streamed:
            self.end_line()
            self.beside("  again    the answer above was cut off, and is given anew.")
            self.streamed = ""
        if chunk.text and not self.quiet:
            sys.stdout.write(harmless(chunk.text).plain)
            sys.stdout.flush()
            self._line_open = not chunk.text.endswith("\n")
        self.streamed += chunk.text

    def said(self, text: str, cost: int) -> None:
        """Show what the model said, if it was not shown as it came, and what it cost."""
        if text and not self.streamed and not self.quiet:
            say(text, at_once=True)
        self.end_line()
        self.streamed = ""
        if cost:
            self.beside(f"  {shown(cost)}")

    def did(self, call: ToolCall, answer: Answer) -> None:
        """Show what became of a call."""
        cost = f" {shown_usd(answer.cost_usd)}" if answer.cost_usd else ""
        first = shorten(clean(answer.text).strip().partition("\n")[0], WIDEST)
        arguments = shorten(clean(call.arguments), 60)
        self.beside(f"  {answer.outcome:<8} {call.tool} {arguments}{cost}  {first}")

    def waits(self, asked: NeedsPerson, state: State) -> None:
        """Say that a person has to decide, and how."""
        self.end_line()
        more = " --cap AMOUNT" if state == "WAITING_FOR_BUDGET" else ""
        warn(f"  waits    for you. Look at it with halter inbox, then: halter approve {asked.decision}{more}")

    def beside_words(self) -> "Watching":
        """Show another session that works for this one: its calls as they come, its words when all is done."""
        from halter.brain.loop import Watching

        return Watching(said=self._cost, did=self.did)

    def _cost(self, _: str, cost: int) -> None:
        if cost:
            self.beside(f"  {shown(cost)}")

    def end_line(self) -> None:
        """Begin a new line where one is begun."""
        if self._line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._line_open = False

    def beside(self, sentence: str) -> None:
        """Say something beside the answer."""
        if not self.quiet:
            self.end_line()
            warn(sentence, "dim")
