"""A history that has to fit into its model's window: what is left out, what is said in its place, what it costs."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.brain import words
from halter.brain.context import MARKER, Cut, Fits, TooLarge, all_trusted, left_out, marker_for
from halter.brain.decide import Rules
from halter.brain.meter import Meter, Size, size
from halter.brain.recall import Recalled
from halter.brain.session_runtime import SessionRuntime
from halter.core.clock import SECOND, Clock
from halter.core.events import ContextCut
from halter.core.messages import Message, Model, Prompt, Text, ToolCall, ToolResult, user
from halter.core.mind import Mind
from halter.core.tools import ToolSpec
from halter.guard.request import Answered, Request

SUMMARY_TOKENS: Final = 1024
SUMMARY_TIMEOUT: Final = 120 * SECOND
SMALLER: Final = 0.5
"""How much of what was sent is sent after a model has said that it was too long for it."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """All that a loop thinks with. The models are the agent's own, then its fallbacks.

    `window` is the smallest number of tokens that any of them takes. `offered` are the tools that it is told of.
    """

    mind: Mind
    rules: Rules
    models: tuple[Model, ...]
    offered: tuple[ToolSpec, ...]
    window: int
    summarizer: Model | None = None


class Window:
    """Keeps what is sent within what a model takes."""

    def __init__(
        self, recalled: Recalled, running: SessionRuntime, clock: Clock, thinking: Thinking, fixed: int
    ) -> None:
        self._recalled = recalled
        self._running = running
        self._clock = clock
        self._thinking = thinking
        self._mind = thinking.mind
        self._session = running.lease.session
        self._fixed = fixed
        self._meter = Meter()
        self._most: int | None = None
        self._ending = 0

    def begins_with(self, fixed: int) -> None:
        """Know how many tokens all requests begin with from now on."""
        self._fixed = fixed

    def bound(self, model: Model, sent: Size) -> int:
        """Bound the tokens of a prompt."""
        return self._meter.bound(str(model.name), sent)

    def learn(self, model: Model, sent: Size, reported: int) -> None:
        """Take in how many tokens a prompt really had."""
        self._meter = self._meter.learned(str(model.name), sent, reported)

    async def shrink(self) -> bool:
        """Leave out more, since the model takes less than was thought; tell whether anything was left out."""
        model = self._thinking.models[0]
        sent = self._meter.estimate(str(model.name), self._recalled.transcript.size)
        self._most = int(SMALLER * min(sent, self._room(model)))
        before = self._recalled.transcript.cut
        too_large = await self.make_room(model, self._ending)
        return not too_large and self._recalled.transcript.cut != before

    async def make_room(self, model: Model, ending: int) -> str:
        """Cut the history if it has outgrown the window, beside an ending of so many bytes; say so if nothing helps."""
        self._ending = ending
        name, transcript = str(model.name), self._recalled.transcript
        room = self._room(model)
        if self._meter.estimate(name, transcript.size) <= room:
            return ""
        tokens = [self._meter.estimate(name, size(message)) for message in transcript.messages]
        marker = SUMMARY_TOKENS if self._mind.context_strategy == "summarize" else MARKER
        match transcript.fit(room, tokens, marker):
            case Cut() as cut:
                await self._cut(cut)
                return ""
            case Fits():
                return ""
            case TooLarge() as found:
                return _sentence(found)

    def _room(self, model: Model) -> int:
        """Tell how many tokens there are for messages."""
        room = self._thinking.window - self._mind.max_output_tokens
        room -= self._meter.estimate(str(model.name), self._fixed + self._ending) + MARKER
        return room if self._most is None else min(room, self._most)

    async def _cut(self, cut: Cut) -> None:
        transcript, strategy = self._recalled.transcript, self._mind.context_strategy
        dropped = left_out(transcript.messages, cut, transcript.cut)
        summary = await self._summary(dropped, cut) if strategy == "summarize" else ""
        marker = marker_for(cut, strategy, summary, trusted=all_trusted(dropped))
        event = ContextCut(
            turn=self._recalled.turn.number,
            through=cut.through,
            pinned=cut.pinned,
            strategy=self._mind.context_strategy,
        )
        await self._running.write(f"{self._session}/cut/{self._place(cut)}", event, msgspec.json.encode(marker))
        transcript.cut_at(cut, marker)
        self._recalled.turn = self._recalled.turn.shrunk(self._clock.now())

    def _place(self, cut: Cut) -> str:
        """Name a cut: a later one at the same place may keep less, and an erased history counts its places anew."""
        turn = self._recalled.turn
        return "_".join(map(str, (turn.number, turn.steps, cut.through, *cut.pinned)))

    async def _summary(self, dropped: Sequence[Message], cut: Cut) -> str:
        """Let a model say in short what is left out; without an answer it is only said that something is."""
        model = self._thinking.summarizer or self._thinking.models[0]
        before = self._recalled.transcript.marker
        text = "\n".join([*([before.text] if before else []), *map(_as_lines, dropped)])
        most = max(1000, self._thinking.window - 4 * SUMMARY_TOKENS)
        prompt = Prompt(
            system=words.SUMMARIZE,
            messages=(user(text[-most:], "agent", trusted=False),),
            max_output_tokens=SUMMARY_TOKENS,
        )
        request = Request(
            id=f"{self._session}.summary.{self._place(cut)}",
            prompt=prompt,
            purpose="summary",
            timeout=SUMMARY_TIMEOUT,
            optional=True,
            record="{}",
        )
        answer = await self._running.request(request, model)
        if not isinstance(answer, Answered):
            return ""
        if answer.overrun:
            self._recalled.turn = msgspec.structs.replace(self._recalled.turn, overrun=True)
        return answer.reply.text.strip()


def _sentence(found: TooLarge) -> str:
    return (
        f"TooLarge: what the model has to be told has about {found.least:,} tokens, and there is room for "
        f"{max(found.window, 0):,}. Say it in fewer words, or give the agent a model with a larger context_window."
    )


def _as_lines(message: Message) -> str:
    """Write a message down as plain lines."""
    return "\n".join(_line(part) for part in message.parts)


def _line(part: Text | ToolCall | ToolResult) -> str:
    match part:
        case Text(text=text, origin=origin):
            return f"{origin}: {text}"
        case ToolCall(tool=tool, arguments=arguments):
            return f"call: {tool} {arguments}"
        case ToolResult(tool=tool, outcome=outcome, text=text):
            return f"result of {tool} ({outcome}): {text}"
