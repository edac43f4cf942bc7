"""A session's turns rebuilt from its events, and the history that its model is shown.

A history only grows, and a cut moves forward. A cut drops all messages before some place, except the task and the
message that opened the turn, and stays until the window is full again: so each request begins with the previous one,
and the provider's cache keeps working. A call is never separated from its result.

Tokens are bounded from above by bytes and learned from reports. Money is held by `bound`, which is never too low if the
provider reports truthfully; fitting the window uses `estimate`, which is closer but may be slightly wrong.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core import events as ev
from halter.core.agent_spec import ContextStrategy
from halter.core.clock import MINUTE, SECOND
from halter.core.messages import (
    MESSAGE_OVERHEAD,
    Message,
    Reply,
    Text,
    ToolCall,
    ToolResult,
    bound_message_tokens,
    count_audio_tokens,
    make_user_message,
)
from halter.core.ports import Stored
from halter.core.text import from_body, shorten
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd
from halter.guard.brake import SessionBrake
from halter.guard.model_door import RequestRecord
from halter.guard.tool_door import SIMULATION_LABEL, restore_call_answer
from halter.loop.decide import FailedAttempt, Turn
from halter.loop.text_calls import read_calls, to_text_message

TARGET_FILL: Final = 0.6
"""How much of the window a cut fills; the rest is room until the next cut."""
MARKER_TOKENS: Final = 128
"""Upper bound of the marker's tokens without a summary."""


class HistoryShape(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to cut a history.

    `sizes` are its messages in tokens, `starts` says for each whether the kept part may begin with it. `task` is the
    place of the task, `turn` of the message that opened the turn, `newest` of the first unanswered one: from there on
    nothing is dropped.
    """

    sizes: Sequence[int]
    starts: Sequence[bool]
    task: int
    turn: int
    newest: int


class Cut(msgspec.Struct, frozen=True):
    """Messages before `through` are dropped, except the pinned ones."""

    through: int
    pinned: tuple[int, ...]

    @property
    def dropped(self) -> int:
        return self.through - len(self.pinned)


class Fits(msgspec.Struct, frozen=True):
    pass


class TooLarge(msgspec.Struct, frozen=True):
    """Even the minimum, of `least` tokens, does not fit: shorten results, or end the turn."""

    least: int
    window: int


def can_start(message: Message) -> bool:
    """Whether the kept part may begin with a message: not with one that holds results."""
    if message.role != "assistant":
        for part in message.parts:
            if isinstance(part, ToolResult):
                return False
    return True


def find_unanswered(history: Sequence[Message]) -> int:
    """The first message that the model has yet to answer; results count from their calls on."""
    place = len(history)
    while place and history[place - 1].role == "user":
        place -= 1
    if place and (place == len(history) or not all(map(can_start, history[place:]))):
        place -= 1
    return place


def fit_history(
    history: HistoryShape, window: int, cut: Cut | None = None, *, marker: int = 0, target: float = TARGET_FILL
) -> Cut | Fits | TooLarge:
    """Decide whether a history fits with its current cut, and where to cut it if not.

    `window` is the room for messages, and `marker` the size of the text that replaces dropped ones, in tokens. As
    little is dropped as brings the rest down to `target` of the window. Where what must stay is larger, half of the
    room beside it is used.
    """
    total = _total(history, cut, marker)
    if total <= window:
        return Fits()
    places = _list_cut_places(history, 0 if cut is None else cut.through, marker)
    least = min([total, *(kept for _, kept in places)])
    if least > window:
        return TooLarge(least, window)
    goal = int(target * window)
    goal = goal if least <= goal else (least + window) // 2
    through = next(place for place, kept in places if kept <= goal)
    return Cut(through, _list_pinned(history, through))


def _total(history: HistoryShape, cut: Cut | None, marker: int) -> int:
    if cut is None:
        return sum(history.sizes)
    return marker + sum(history.sizes[place] for place in cut.pinned) + sum(history.sizes[cut.through :])


def _list_cut_places(history: HistoryShape, first: int, marker: int) -> list[tuple[int, int]]:
    """Where a cut may fall, and how much it would keep: the first keeps the most."""
    found: list[tuple[int, int]] = []
    tail = sum(history.sizes[history.newest :])
    for place in range(history.newest, first - 1, -1):
        if place < history.newest:
            tail += history.sizes[place]
        if history.starts[place]:
            pinned = sum(history.sizes[each] for each in _list_pinned(history, place))
            found.append((place, marker + pinned + tail))
    return found[::-1]


def _list_pinned(history: HistoryShape, through: int) -> tuple[int, ...]:
    return tuple(place for place in sorted({history.task, history.turn}) if place < through)


def list_left_out(history: Sequence[Message], cut: Cut, before: Cut | None = None) -> tuple[Message, ...]:
    """The messages that a cut drops, or only those that the cut before it had kept."""
    kept = () if before is None else tuple(place for place in before.pinned if place not in cut.pinned)
    first = 0 if before is None else before.through
    return tuple(history[place] for place in (*kept, *range(first, cut.through)) if place not in cut.pinned)


def are_all_trusted(messages: Sequence[Message]) -> bool:
    """Whether all messages came from trusted sources; a model's own text never does."""
    return all(isinstance(part, (Text, ToolResult)) and part.trusted for each in messages for part in each.parts)


def make_marker(cut: Cut, strategy: ContextStrategy, summary: str = "", *, trusted: bool = False) -> Text | None:
    """The text in place of dropped messages; a sliding window has none."""
    match strategy:
        case "sliding_window":
            return None
        case "summarize" if summary:
            return Text(f"{marker_text(cut.dropped)} A summary of them:\n{summary}", "model", trusted, "summarized")
        case "compact" | "summarize":
            return Text(marker_text(cut.dropped), "config", reason="compacted")


def marker_text(dropped: int) -> str:
    return f"[{dropped} earlier {'message is' if dropped == 1 else 'messages are'} left out here.]"


def build_history_view(
    history: Sequence[Message], cut: Cut | None = None, marker: Text | None = None
) -> tuple[Message, ...]:
    """What is sent: the task, the marker, the turn's first message, and everything from the cut on.

    Providers require alternating roles, so consecutive messages to the model are merged.
    """
    if cut is None:
        return _merge_messages(history)
    pinned = [_drop_orphan_results(history[place]) for place in cut.pinned]
    said = [] if marker is None else [Message("user", (marker,))]
    return _merge_messages([*pinned[:1], *said, *pinned[1:], *history[cut.through :]])


def _drop_orphan_results(message: Message) -> Message:
    """Drop results whose calls are dropped."""
    if can_start(message):
        return message
    return Message(message.role, tuple(part for part in message.parts if not isinstance(part, ToolResult)))


def _merge_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    merged: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        together = tuple(group)
        if role == "assistant" or len(together) == 1:
            merged.extend(together)
        else:
            merged.append(Message("user", tuple(part for message in together for part in message.parts)))
    return tuple(merged)


def shorten_results(message: Message, limit: int) -> Message:
    """Show only the beginning and the end of results longer than `limit` characters."""
    if all(not isinstance(part, ToolResult) or len(part.text) <= limit for part in message.parts):
        return message
    cache, key = vars(message), f"shortened {limit}"
    if key not in cache:
        parts = tuple(_shorten_result(part, limit) if isinstance(part, ToolResult) else part for part in message.parts)
        cache[key] = message if parts == message.parts else Message(message.role, parts)
    return cache[key]


def _shorten_result(result: ToolResult, limit: int) -> ToolResult:
    """Drop the middle, unless saying so would take as much room."""
    whole = len(result.text)
    if whole <= limit:
        return result
    capacity = max(0, limit - len(_describe_gap(result.id, whole, whole)))
    head, tail = capacity - capacity // 3, capacity // 3
    gap = _describe_gap(result.id, whole - head - tail, head)
    text = f"{result.text[:head]}{gap}{result.text[whole - tail :]}"
    return msgspec.structs.replace(result, text=text) if len(text) < whole else result


def _describe_gap(call: str, remaining: int, offset: int) -> str:
    return f'\n[{remaining} characters are left out here; read_output(call="{call}", offset={offset}) shows them.]\n'


SAFETY_MARGIN: Final = 1.15
"""How much denser than anything seen before the next text may be."""
LOWEST_TOKEN_RATIO: Final = 1 / 16
"""Reports of longer tokens, in bytes, are not believed."""


class PromptSize(msgspec.Struct, frozen=True, gc=False):
    """The size of a prompt, in bytes as an upper bound of tokens.

    `stable` is shared with the next prompt, `volatile` stands only at this one's end. `prefix` names the beginning of
    the stable part: system text, tools, and where the history is cut. Of two prompts with the same prefix the larger
    extends the smaller.
    """

    prefix: str
    stable: int
    volatile: int = 0

    @property
    def total(self) -> int:
        return self.stable + self.volatile


class ObservedUsage(msgspec.Struct, frozen=True, gc=False):
    """One model's reports: the last one, and the most tokens per byte."""

    last: PromptSize
    tokens: int
    ratio: float


class TokenMeter(msgspec.Struct, frozen=True, gc=False):
    """What is known of each model's tokens. An unknown model is assumed to use one token per byte."""

    seen: Mapping[str, ObservedUsage] = {}

    def with_usage(self, model: str, sent: PromptSize, reported: int) -> "TokenMeter":
        """Take in reported input tokens, unless they are impossible."""
        total = sent.stable + sent.volatile
        if not total * LOWEST_TOKEN_RATIO <= reported <= total or not total:
            return self
        ratio = reported / total
        known = self.seen.get(model)
        highest = ratio if known is None else max(known.ratio, ratio)
        return TokenMeter({**self.seen, model: ObservedUsage(sent, reported, highest)})

    def bound(self, model: str, size: PromptSize) -> int:
        """Bound a prompt: the tokens of the last one that it extends, plus one token per new byte."""
        known, total = self.seen.get(model), size.stable + size.volatile
        if known is None or known.last.prefix != size.prefix or known.last.stable > size.stable:
            return total
        return min(total, known.tokens + total - known.last.stable)

    def estimate(self, model: str, size: int) -> int:
        """Estimate tokens from bytes, assuming text no denser than before."""
        known = self.seen.get(model)
        ratio = 1.0 if known is None else min(1.0, known.ratio * SAFETY_MARGIN)
        return math.ceil(size * ratio)


def measure_message(message: Message) -> int:
    """Bound the tokens of a message; computed once."""
    cache = vars(message)
    if "size" not in cache:
        cache["size"] = bound_message_tokens(message)
    return cache["size"]


LONGEST_RESULT: Final = 16_000
"""Longest result shown to a model, in characters; the rest is readable with `read_output`."""

LONGEST_SITUATION: Final = 2_000
"""Longest part of a situation that a prediction is given, in characters."""

LONGEST_NAME: Final = 200
"""Longest tool name that is kept: a model may write anything."""


class Transcript:
    """The messages of a session. What is sent is kept between requests, so a step costs only what is new."""

    __slots__ = ("_as_text", "audio", "cut", "marker", "messages", "sent", "size", "task", "turn")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.cut: Cut | None = None
        self.marker: Text | None = None
        self.task = 0
        self.turn = 0
        self.sent = self.messages
        """What is sent, without the ending of each request. Of what is there only the last message may change.

        The messages themselves, as long as all of them are sent as they are.
        """
        self._as_text: tuple[Message, ...] = ()
        self.size = 0
        """Upper bound of the tokens of what is sent."""
        self.audio = 0
        """Upper bound of those that are sound."""

    def open_turn(self, message: Message) -> None:
        self.turn = len(self.messages)
        self.add(message)

    def add(self, message: Message) -> None:
        """Add a message; consecutive messages to the model are merged."""
        size = bound_message_tokens(message)
        if size > LONGEST_RESULT:
            message = shorten_results(message, LONGEST_RESULT)
            size = bound_message_tokens(message)
        for part in message.parts:
            if type(part) is Text and part.tokens:
                self.audio += count_audio_tokens((Message(message.role, (part,)),))
        sent, same = self.sent, self.sent is self.messages
        if message.role == "user" and sent and sent[-1].role == "user":
            sent = self.sent = sent.copy() if same else sent
            sent[-1] = Message("user", (*sent[-1].parts, *message.parts))
            self.size -= MESSAGE_OVERHEAD
        elif not same:
            sent.append(message)
        self.messages.append(message)
        self.size += size

    def to_text(self) -> list[Message]:
        """What is sent, for a model that knows calls and results only as text."""
        new = self.sent[len(self._as_text) :]
        self._as_text += tuple(map(to_text_message, new[:-1]))
        return [*self._as_text, *map(to_text_message, new[-1:])]

    def fit(self, window: int, tokens: Sequence[int], marker: int) -> Cut | Fits | TooLarge:
        """Whether what is sent fits a window, given the tokens of each message.

        A message of an earlier turn that was never answered may be dropped, and so may a task too large to be sent.
        """
        first = max(find_unanswered(self.messages), self.turn)
        task = self.task if tokens[self.task] <= window else self.turn
        starts = [can_start(message) for message in self.messages]
        shape = HistoryShape(sizes=tokens, starts=starts, task=task, turn=self.turn, newest=first)
        return fit_history(shape, window, self.cut, marker=marker)

    def cut_at(self, cut: Cut, marker: Text | None) -> None:
        self.cut, self.marker, self._as_text = cut, marker, ()
        self.sent = list(build_history_view(self.messages, cut, marker))
        self.size = sum(map(measure_message, self.sent))
        self.audio = count_audio_tokens(self.sent)


def call_id(session: str, call: ToolCall) -> str:
    """The id of a call in the whole store; stable across crashes."""
    return f"{session}.{call.id}"


_MODEL_CALL: Final = re.compile(r"(.*)\.c\d+_\d+_\d+(?:/.*)?", re.DOTALL)


def find_calling_session(call: str) -> str:
    """The session of a call of a model, or of one made inside of it, by its id in the whole store."""
    match = _MODEL_CALL.fullmatch(call)
    return "" if match is None else match[1]


def describe_prediction(call: ToolCall, simulation: str) -> Text:
    """What a model predicted for a call, as a part beside the result: no word of it came from the tool."""
    text = simulation.removeprefix(SIMULATION_LABEL)
    label = f"{SIMULATION_LABEL} of {call.tool} ({call.id}), made before the call and no part of its result:"
    return Text(f"{label}{text}", "model", trusted=False, reason="simulation")


def _join_text(message: Message) -> str:
    """What a person or a model said in a message, without what the runtime added."""
    return "\n".join(part.text for part in message.parts if isinstance(part, Text) and not part.reason)


ReadBody = Callable[[Stored], Awaitable[bytes]]


_NO_TURN: Final = Turn()
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class SessionHistory:
    """A session as its loop knows it, folded from events in order."""

    __slots__ = (
        "_cut_short",
        "_erased",
        "_min_sleep",
        "_nonces",
        "_unanswered",
        "actions",
        "brake",
        "context_text",
        "done",
        "hot",
        "phase",
        "predictions",
        "session",
        "staged",
        "transcript",
        "turn",
    )

    def __init__(self, session: str, min_sleep: int = SECOND, brake: SessionBrake | None = None) -> None:
        self.session = session
        self.brake = brake
        """Hears what the model is shown; None where the injection brake is off."""
        self._min_sleep = min_sleep
        self.turn = _NO_TURN
        self.transcript = Transcript()
        self.done: Mapping[str, ToolResult] = _NOTHING
        self._nonces: Mapping[str, str] = _NOTHING
        """Those of the requests under way."""
        self.predictions: Mapping[str, str] = _NOTHING
        """Predictions of the step's calls; the model is shown them beside the results."""
        self._cut_short = ""
        """What a cancelled answer had said; it is part of the history if the turn ends there."""
        self.hot = b""
        self.context_text = ""
        self.phase: ev.PhaseEntered | None = None
        self._erased: tuple[str, ...] = ()
        """Calls of the step whose results are erased."""
        self._unanswered: Mapping[str, ToolCall] = _NOTHING
        """Calls under way of a reply that is erased: what they were given is unknown."""
        self.staged: tuple[ToolCall, ...] = ()
        """Calls of the turn that wait for its end."""
        self.actions: tuple[int, ...] = ()
        """Start times, in the last minute, of calls that change something."""

    def open(self, number: int, heard: int, message: Message, at: int, *, quiet: bool = False) -> None:
        self.transcript.open_turn(message)
        self.staged = ()
        self.turn = self.turn.opened(number, heard, at, quiet=quiet)
        if self.brake is not None:
            for part in message.parts:
                if isinstance(part, Text):
                    self.brake.add_text(part)

    def end(self, why: TurnEnd, sentence: str, chosen: ev.YieldRequest | None, at: int) -> None:
        if why == "cancelled" and self._cut_short:
            self.transcript.add(Message("assistant", (Text(self._cut_short, "model", trusted=False),)))
        self.turn = self.turn.with_end(why, sentence, chosen, at, self._min_sleep)

    def add_wait(self, duration: int) -> None:
        self.turn = self.turn.without_wait(duration)

    def mark_acting(self, at: int) -> None:
        self.actions = (*(each for each in self.actions if abs(at - each) < MINUTE), at)

    def add(self, reason: MessageReason, text: str, at: int) -> None:
        self.transcript.add(make_user_message(text, "config", reason=reason))
        self.turn = self.turn.with_message(reason, at)
        if reason == "staged":
            self.staged = ()

    def add_reply(self, reply: Reply, nonce: str, at: int) -> None:
        parts = (*read_calls(reply.text, nonce).parts, *reply.calls) if nonce else reply.parts
        turn = self.turn
        said: tuple[Text, ...] = ()
        calls: tuple[ToolCall, ...] = ()
        for part in parts:
            if type(part) is ToolCall:
                # Ids of our own: a model's may be missing or repeated.
                name = f"c{turn.number}_{turn.steps}_{len(calls)}"
                calls += (ToolCall(name, part.tool[:LONGEST_NAME], part.arguments, part.group),)
            elif part.text.strip():
                said += (part,)
        if said or calls:
            self.transcript.add(Message("assistant", said + calls))
        self.done = _NOTHING
        self.turn = turn.thought(reply.stop, calls, at, spoke=bool(said))

    def add_result(self, call: ToolCall, outcome: Outcome, text: str, partial: str = "") -> None:
        """Keep a call's result until all of the step are there, as the model sees it.

        A refusal is shown with its code, a failure with the output before it.
        """
        said = text if outcome == "ok" else f"[{outcome}] {text}"
        if partial:
            said = "\n\n".join(part for part in (said, partial) if part)
        result = ToolResult(call.id, call.tool, outcome, said)
        self.done = {**self.done, call.id: result} if self.done else {call.id: result}

    def finish_step(self, at: int) -> None:
        calls = self.turn.calls
        results = (self.done[calls[0].id],) if len(calls) == 1 else tuple([self.done[call.id] for call in calls])
        self.transcript.add(Message("user", (*results, *self._predictions(calls)) if self.predictions else results))
        if (brake := self.brake) is not None:
            for place, call in enumerate(calls):
                if call.id in self._erased:
                    brake.observe_erased(call)
                else:
                    brake.observe(call, results[place])
            self._erased = ()
        self.done = _NOTHING
        self.turn = self.turn.with_results(calls, results, at)

    def _predictions(self, calls: Iterable[ToolCall]) -> list[Text]:
        foreseen = dict(self.predictions)
        said = [(call, foreseen.pop(call_id(self.session, call), "")) for call in calls]
        self.predictions = foreseen
        return [describe_prediction(call, text) for call, text in said if text]

    def situation(self) -> str:
        """What the agent was asked last, and what it said with the calls that it makes now."""
        *before, last = self.transcript.messages
        question = next((text for each in reversed(before) if each.role == "user" and (text := _join_text(each))), "")
        parts = (("The agent was asked", question), ("With the call it says", _join_text(last)))
        return "\n".join(f"{label}: {shorten(text, LONGEST_SITUATION)}" for label, text in parts if text)

    async def apply(self, events: Iterable[Stored], read: ReadBody) -> None:
        """Take in events of another process, or of an earlier life of this one."""
        for stored in events:
            await self._apply_event(stored, read)
        # A request refused by a cap may be retried; all other outcomes are final.
        if self.turn.capped and not self.turn.over:
            self.turn = self.turn.without_cap()
        if self.done:
            self.done = {call: result for call, result in self.done.items() if result.outcome != "cost_cap_reached"}

    async def _apply_event(self, stored: Stored, read: ReadBody) -> None:
        at, event = stored.at, stored.event
        match event:
            case ev.SessionStarted():
                pass
            case ev.CallStarted() | ev.CallSettled() | ev.CallRefused():
                await self._apply_call_event(event, stored, read)
            case ev.RequestStarted(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn, self._cut_short = self.turn.without_cap(), ""
                record = msgspec.json.decode(await read(stored) or b"{}", type=RequestRecord)
                self._nonces = {**self._nonces, event.request: record.nonce}
            case ev.RequestSettled():
                await self._apply_request_event(event, stored, read)
            case ev.RequestRefused(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn = self.turn.without_cap().with_refusal(
                    parse_attempt(event.request), event.outcome, event.sentence, at
                )
            case ev.TurnStarted():
                body = await read(stored)
                message = msgspec.json.decode(body or b'{"role":"user","parts":[]}', type=Message)
                self.open(event.turn, event.inbox_seen, message, at, quiet=event.quiet)
                if self.brake is not None and not body:
                    self.brake.mark_erased()
            case ev.HotStateSeen() | ev.GuardrailTriggered() | ev.TurnSkipped() | ev.PhaseEntered() | ev.ContextGiven():
                await self._apply_pace_event(event, stored, read)
            case ev.HistoryGiven():
                self._begin_with(event, await read(stored))
            case ev.MessageAdded():
                self.flush(at)
                self.add(event.reason, from_body(await read(stored)), at)
            case ev.ContextCut():
                self.flush(at)
                body = await read(stored)
                if body:
                    # Without one it was erased, and all that it left out with it.
                    self.transcript.cut_at(
                        Cut(event.through, event.pinned), msgspec.json.decode(body, type=Text | None)
                    )
                self.turn = self.turn.shrunk(at)
            case ev.OverrunIncurred():
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            case ev.TurnEnded():
                self.flush(at)
                self.end(event.why, event.sentence, event.yielded, at)
            case ev.SessionParked():
                self.turn = self.turn.pause(at, event.trouble)
            case ev.SessionWoken(recovered=True):
                self.turn = self.turn.with_recovery(at)
            case ev.SessionWoken():
                self.turn = self.turn.resume(at, takeover=event.cause == "takeover")
            case ev.SessionResumed():
                self.turn = self.turn.reopen(at)
            case _:
                pass

    def _begin_with(self, event: ev.HistoryGiven, body: bytes) -> None:
        messages = msgspec.json.decode(body or b"[]", type=list[Message])
        for message in messages:
            self.transcript.add(message)
        if self.brake is not None:
            self.brake.recall(messages, foreign=not event.session, denied=event.denied)
            if not body:
                self.brake.mark_erased()

    async def _apply_pace_event(
        self,
        event: ev.HotStateSeen | ev.GuardrailTriggered | ev.TurnSkipped | ev.PhaseEntered | ev.ContextGiven,
        stored: Stored,
        read: ReadBody,
    ) -> None:
        match event:
            case ev.PhaseEntered():
                self.phase = event
            case ev.ContextGiven():
                self.context_text = from_body(await read(stored))
                if self.brake is not None:
                    self.brake.trust(self.context_text, "kept memories")
            case ev.HotStateSeen():
                self.hot = await read(stored)
            case ev.GuardrailTriggered(until=int(), guardrail=name) if self.turn.over and name != "model_rate":
                self.turn = self.turn.held_back(stored.at)
            case ev.TurnSkipped():
                self.turn = self.turn.skipped(event.skips, stored.at)
            case _:
                pass

    async def _apply_call_event(
        self, event: ev.CallStarted | ev.CallSettled | ev.CallRefused, stored: Stored, read: ReadBody
    ) -> None:
        match event:
            case ev.CallStarted():
                call = event.call.removeprefix(f"{self.session}.")
                self.done = {each: result for each, result in self.done.items() if each != call}
                if event.effect == "write":
                    self.mark_acting(stored.at)
            case ev.CallSettled():
                body = await read(stored)
                answer = restore_call_answer(event, body)
                self._add_result(event.call, answer.outcome, answer.text, answer.partial)
                if is_erased(stored, body):
                    self._erased += (event.call.removeprefix(f"{self.session}."),)
                lost = self._unanswered.get(event.call)
                if lost is not None and self.brake is not None:
                    self.brake.observe_erased(lost)
                    self._unanswered = {call: lost for call, lost in self._unanswered.items() if call != event.call}
                return
            case ev.CallRefused():
                self._add_result(event.call, event.outcome, event.sentence)
                if event.staged:
                    self.staged += tuple(each for each in self.turn.calls if call_id(self.session, each) == event.call)
        # A call inside of another one is none of the model's.
        if self.brake is not None and self._is_models(event.call):
            body = await read(stored)
            self.brake.apply(event, None if is_erased(stored, body) else body)
            if isinstance(event, ev.CallStarted) and not self._is_known(event.call):
                self._unanswered = {**self._unanswered, event.call: ToolCall(event.call, event.tool, "")}

    async def _apply_request_event(self, event: ev.RequestSettled, stored: Stored, read: ReadBody) -> None:
        if event.request not in self._nonces:
            await self._foresee(event, stored, read)
            return
        nonce = self._nonces[event.request]
        self._nonces = {request: each for request, each in self._nonces.items() if request != event.request}
        attempt = parse_attempt(event.request)
        if event.outcome == "ok":
            body = await read(stored)
            reply = msgspec.json.decode(body, type=Reply) if body else Reply(())
            self.add_reply(reply, nonce, stored.at)
        elif event.outcome in ("cancelled", "unknown"):
            body = await read(stored)
            self._cut_short = msgspec.json.decode(body, type=Reply).text if body else ""
            self.turn = self.turn.with_attempt(attempt, stored.at)
        elif event.outcome == "external_halt":
            self.turn = self.turn.with_refusal(attempt, event.outcome, event.error, stored.at)
        else:
            failure = FailedAttempt(event.error, event.may_retry, event.retry_after, event.needs_person)
            self.turn = self.turn.with_failure(attempt, failure, stored.at)

    async def _foresee(self, event: ev.RequestSettled, stored: Stored, read: ReadBody) -> None:
        call, _, rest = event.request.rpartition("/simulation/")
        if call and rest and event.outcome == "ok" and (body := await read(stored)):
            reply = msgspec.json.decode(body, type=Reply)
            text = "" if reply.stop == "refused" else reply.text.strip()
            self.predictions = {**self.predictions, call: f"{SIMULATION_LABEL} {text}" if text else ""}

    def _add_result(self, call: str, outcome: Outcome, text: str, partial: str = "") -> None:
        for each in self.turn.calls:
            if call_id(self.session, each) == call:
                self.add_result(each, outcome, text, partial)

    def _is_models(self, call: str) -> bool:
        """Whether the model made the call, also where its reply is erased. Other writers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.c\d+_\d+_\d+", call) is not None

    def _is_known(self, call: str) -> bool:
        return any(call_id(self.session, each) == call for each in (*self.turn.calls, *self.staged))

    def _is_turns(self, request: str) -> bool:
        """Whether the turn loop made the request. Other writers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.t\d+_\d+/\d+", request) is not None

    def flush(self, at: int) -> None:
        """Any event after a step shows that all its calls had results."""
        if self.turn.calls and all(call.id in self.done for call in self.turn.calls):
            self.finish_step(at)


def is_erased(stored: Stored, body: bytes) -> bool:
    return not body and (stored.erased or stored.blob is not None)


def find_result(history: bytes, call: str) -> str | None:
    """The result of a call that a session began with, whole."""
    messages = msgspec.json.decode(history or b"[]", type=list[Message])
    parts = (part for message in messages for part in message.parts)
    return next((part.text for part in parts if isinstance(part, ToolResult) and part.id == call), None)


def parse_attempt(request: str) -> int:
    return int(request.rpartition("/")[2])
