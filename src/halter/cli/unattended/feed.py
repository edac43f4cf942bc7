"""What a command that runs agents prints: lines for people, JSON lines for programs."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from halter.cli.output import render_sentence, warn
from halter.cli.terminal import Printer
from halter.core.clock import Clock
from halter.core.ids import parse_session_id
from halter.core.public_json import encode_public_lines
from halter.core.text import format_count, join_names
from halter.present.event_lines import EventLines
from halter.present.events import WARNING_STYLE, StyledLine
from halter.runtime.feed import Bus, FeedEvent, FeedGap, FeedItem, LiveUpdate, serialize_feed_item
from halter.runtime.runtime import Runtime

HOW_TO_STOP: Final = "Stop with Ctrl-C; the next start continues."
RESTART_HINT: Final = "Start it again. Its sessions continue; halted ones end."


def make_bus(app: Runtime) -> Bus:
    return Bus(app.patient(), app.clock)


class FeedPrinter:
    """Prints what happens: lines for people, JSON lines for programs."""

    def __init__(self, printer: Printer, clock: Clock, *, as_json: bool) -> None:
        self._printer = printer
        self._clock = clock
        self._as_json = as_json
        self._view = EventLines()

    def report(self, agent: str, sentence: str) -> None:
        """Print a sentence about an agent; without an agent, about an unusable folder or store."""
        now = self._clock.now()
        if self._as_json:
            self._print_json([{"name": "told", "at": now, "agent": agent, "sentence": sentence}])
        elif agent:
            self._print_line(StyledLine(self._view.format_line(now, agent, sentence)))
        else:
            warn(sentence, "red")

    async def follow(self, batches: AsyncGenerator[Sequence[FeedItem]]) -> None:
        """Print batches of items in order, no faster than they can be written."""
        async with aclosing(batches):
            async for items in batches:
                if self._as_json:
                    self._print_json(map(serialize_feed_item, items))
                else:
                    for item in items:
                        self._show(item)
                if self._printer.is_full:
                    await self._printer.wait_for_space()

    def _show(self, item: FeedItem) -> None:
        """Print an event; live text and readings are left out, as too many."""
        match item:
            case FeedEvent():
                self._print_line(self._view.line(item.stored))
            case FeedGap() if item.events:
                sessions = sorted({parse_session_id(stream) or stream for stream in item.lost})
                count = format_count(item.events, "event")
                self._print_line(
                    StyledLine(f"{count} of {join_names(sessions)} missed. See halter show.", WARNING_STYLE)
                )
            case FeedGap() | LiveUpdate():
                pass

    def _print_json(self, values: Iterable[Mapping[str, Any]]) -> None:
        self._printer.write(encode_public_lines(values).decode())

    def _print_line(self, line: StyledLine | None) -> None:
        if line is not None:
            self._printer.write(render_sentence(line.text, line.style))
