"""A session's turns, rebuilt from its events, and the history that is sent to its model.

A history only grows, and a cut only moves forward. A cut drops all messages before an index, except the task and the
message that opened the turn, and lasts until the window is full again. Each request therefore extends the previous one,
and the provider's cache stays valid. A cut never separates a call from its result.

Tokens are bounded from above by bytes, and learned from usage reports. Holds use `bound_tokens`, which is never too low
if the provider reports truthfully. To fit the window, `estimate_tokens` is used, which is closer but may be wrong.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    FilesGiven,
    GuardrailTriggered,
    HistoryGiven,
    HotStateSeen,
    MessageAdded,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.messages import (
    MESSAGE_OVERHEAD,
    Message,
    Part,
    Reply,
    Text,
    ToolCall,
    ToolResult,
    bound_message_tokens,
    count_audio_tokens,
    make_user_message,
)
from halter.core.ports import Stored
from halter.core.text import decode_body, shorten
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd
from halter.guard.call_answer import restore_call_answer, restore_files
from halter.guard.request import RequestRecord
from halter.guard.simulation import SIMULATION_LABEL
from halter.loop.decide import FailedAttempt, Turn
from halter.loop.text_calls import read_calls, to_text_message
from halter.provenance.check import ProvenanceCheck
from halter.spec.models import ContextStrategy

TARGET_FILL: Final = 0.6
"""Fraction of the window that is filled after a cut. The rest is for growth until the next cut."""
MARKER_TOKENS: Final = 128
"""Upper bound of the tokens of a marker without a summary."""


class HistoryShape(msgspec.Struct, frozen=True, kw_only=True):
    """The input for a cut.

    `sizes` are the tokens of each message, and `can_start` says for each if a shortened history may begin with it.
    `task_index` is the task, `turn_index` the message that opened the turn, `newest_index` the first unanswered
    message, from which on nothing is dropped.
    """

    sizes: Sequence[int]
    can_start: Sequence[bool]
    task_index: int
    turn_index: int
    newest_index: int


class Cut(msgspec.Struct, frozen=True):
    """A cut drops the messages before `tail_start`, except the pinned ones."""

    tail_start: int
    pinned: tuple[int, ...]

    @property
    def dropped(self) -> int:
        return self.tail_start - len(self.pinned)


class Fits(msgspec.Struct, frozen=True):
    pass


class TooLarge(msgspec.Struct, frozen=True):
    """Even the shortest possible history does not fit the window."""

    min_tokens: int
    window: int


def can_start(message: Message) -> bool:
    """Return whether a shortened history may begin with a message. A message with results cannot."""
    if message.role != "assistant":
        for part in message.parts:
            if isinstance(part, ToolResult):
                return False
    return True


def find_unanswered(history: Sequence[Message]) -> int:
    """Find the index of the first unanswered message. Results count from their calls on."""
    index = len(history)
    while index and history[index - 1].role == "user":
        index -= 1
    if index and (index == len(history) or not all(map(can_start, history[index:]))):
        index -= 1
    return index


def fit_history(
    history: HistoryShape, window: int, cut: Cut | None = None, *, marker: int = 0, target: float = TARGET_FILL
) -> Cut | Fits | TooLarge:
    """Decide where to cut a history that does not fit with its current cut.

    `window` is the space for messages, and `marker` the size of the text that replaces dropped ones, both in tokens. A
    cut drops as little as possible to reach the fraction `target` of the window. If the messages that must stay are
    larger than that, the cut fills half of the remaining space.
    """
    total = _total(history, cut, marker)
    if total <= window:
        return Fits()
    cut_points = _list_cut_places(history, 0 if cut is None else cut.tail_start, marker)
    minimum = min([total, *(kept_tokens for _, kept_tokens in cut_points)])
    if minimum > window:
        return TooLarge(minimum, window)
    goal = int(target * window)
    goal = goal if minimum <= goal else (minimum + window) // 2
    tail_start = next(index for index, kept_tokens in cut_points if kept_tokens <= goal)
    return Cut(tail_start, _list_pinned(history, tail_start))


def _total(history: HistoryShape, cut: Cut | None, marker: int) -> int:
    if cut is None:
        return sum(history.sizes)
    return marker + sum(history.sizes[index] for index in cut.pinned) + sum(history.sizes[cut.tail_start :])


def _list_cut_places(history: HistoryShape, first_index: int, marker: int) -> list[tuple[int, int]]:
    """List the possible cuts by index, with the tokens that remain after each. The first one keeps the most."""
    cut_points: list[tuple[int, int]] = []
    tail_tokens = sum(history.sizes[history.newest_index :])
    for index in range(history.newest_index, first_index - 1, -1):
        if index < history.newest_index:
            tail_tokens += history.sizes[index]
        if history.can_start[index]:
            pinned_tokens = sum(history.sizes[pinned_index] for pinned_index in _list_pinned(history, index))
            cut_points.append((index, marker + pinned_tokens + tail_tokens))
    return cut_points[::-1]


def _list_pinned(history: HistoryShape, tail_start: int) -> tuple[int, ...]:
    return tuple(index for index in sorted({history.task_index, history.turn_index}) if index < tail_start)


def list_dropped_messages(history: Sequence[Message], cut: Cut, previous_cut: Cut | None = None) -> tuple[Message, ...]:
    """List the messages that a cut drops, without those that a previous cut has dropped."""
    unpinned = () if previous_cut is None else tuple(index for index in previous_cut.pinned if index not in cut.pinned)
    first_index = 0 if previous_cut is None else previous_cut.tail_start
    return tuple(
        history[index] for index in (*unpinned, *range(first_index, cut.tail_start)) if index not in cut.pinned
    )


def are_all_trusted(messages: Sequence[Message]) -> bool:
    """Return whether all messages come from trusted sources. A model's own text does not."""
    return all(isinstance(part, (Text, ToolResult)) and part.trusted for each in messages for part in each.parts)


def make_marker(cut: Cut, strategy: ContextStrategy, summary: str = "", *, trusted: bool = False) -> Text | None:
    """Make the text that replaces dropped messages; None for a sliding window."""
    match strategy:
        case "sliding_window":
            return None
        case "summarize" if summary:
            return Text(f"{marker_text(cut.dropped)} A summary of them:\n{summary}", "model", trusted, "summarized")
        case "compact" | "summarize":
            return Text(marker_text(cut.dropped), "config", reason="compacted")


def marker_text(count: int) -> str:
    return f"[{count} earlier {'message is' if count == 1 else 'messages are'} left out here.]"


def build_history_view(
    history: Sequence[Message], cut: Cut | None = None, marker: Text | None = None
) -> tuple[Message, ...]:
    """Build the messages to send: the task, the marker, the turn's first message, and all messages from the cut on.

    Consecutive messages to the model are merged, because providers require alternating roles.
    """
    if cut is None:
        return _merge_messages(history)
    pinned_messages = [_drop_orphan_results(history[index]) for index in cut.pinned]
    marker_messages = [] if marker is None else [Message("user", (marker,))]
    return _merge_messages([*pinned_messages[:1], *marker_messages, *pinned_messages[1:], *history[cut.tail_start :]])


def _drop_orphan_results(message: Message) -> Message:
    """Remove the results of a message whose calls are dropped, and their files."""
    if can_start(message):
        return message
    return Message(message.role, tuple(part for part in message.parts if not _is_from_call(part)))


def _is_from_call(part: Part) -> bool:
    return isinstance(part, ToolResult) or (isinstance(part, Text) and part.origin == "tool")


def _merge_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    merged_messages: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        neighbours = tuple(group)
        if role == "assistant" or len(neighbours) == 1:
            merged_messages.extend(neighbours)
        else:
            merged_messages.append(Message("user", tuple(part for message in neighbours for part in message.parts)))
    return tuple(merged_messages)


def shorten_results(message: Message, limit: int) -> Message:
    """Shorten results longer than `limit` characters to their beginning and end."""
    if all(not isinstance(part, ToolResult) or len(part.text) <= limit for part in message.parts):
        return message
    cache, key = vars(message), f"shortened {limit}"
    if key not in cache:
        parts = tuple(_shorten_result(part, limit) if isinstance(part, ToolResult) else part for part in message.parts)
        cache[key] = message if parts == message.parts else Message(message.role, parts)
    return cache[key]


def _shorten_result(result: ToolResult, limit: int) -> ToolResult:
    """Remove the middle of a result, unless the note about it would be as long."""
    length = len(result.text)
    if length <= limit:
        return result
    excerpt_length = max(0, limit - len(_describe_gap(result.id, length, length)))
    head_length, tail_length = excerpt_length - excerpt_length // 3, excerpt_length // 3
    gap = _describe_gap(result.id, length - head_length - tail_length, head_length)
    text = f"{result.text[:head_length]}{gap}{result.text[length - tail_length :]}"
    return msgspec.structs.replace(result, text=text) if len(text) < length else result


def _describe_gap(call: str, remaining: int, offset: int) -> str:
    return f'\n[{remaining} characters are left out here; read_output(call="{call}", offset={offset}) shows them.]\n'


SAFETY_MARGIN: Final = 1.15
"""Factor by which the next text may have more tokens per byte than any text so far."""
MIN_TOKEN_RATIO: Final = 1 / 16
"""Minimum number of tokens per byte. A report below this is ignored."""


class PromptSize(msgspec.Struct, frozen=True, gc=False):
    """The size of a prompt in bytes, which bound its tokens.

    The next prompt has the `stable` part too; the `volatile` part is only at the end of this one. `prefix` identifies
    the beginning of the stable part: system text, tools and cut. Of two prompts with the same prefix, the larger one
    extends the smaller one.
    """

    prefix: str
    stable: int
    volatile: int = 0

    @property
    def total(self) -> int:
        return self.stable + self.volatile


class ObservedUsage(msgspec.Struct, frozen=True, gc=False):
    """The usage reports of one model: the last one, and the highest number of tokens per byte."""

    last: PromptSize
    tokens: int
    ratio: float


class TokenMeter(msgspec.Struct, frozen=True, gc=False):
    """The reported token usage of each model. Without a report, a model counts as using one token per byte."""

    usage_by_model: Mapping[str, ObservedUsage] = {}

    def with_usage(self, model: str, size: PromptSize, reported_tokens: int) -> "TokenMeter":
        """Add a report of input tokens, unless it is implausible."""
        total = size.stable + size.volatile
        if not total * MIN_TOKEN_RATIO <= reported_tokens <= total or not total:
            return self
        ratio = reported_tokens / total
        usage = self.usage_by_model.get(model)
        highest = ratio if usage is None else max(usage.ratio, ratio)
        return TokenMeter({**self.usage_by_model, model: ObservedUsage(size, reported_tokens, highest)})

    def bound_tokens(self, model: str, size: PromptSize) -> int:
        """Bound a prompt's tokens: those of the last prompt, if this one extends it, plus one per new byte."""
        usage, total = self.usage_by_model.get(model), size.stable + size.volatile
        if usage is None or usage.last.prefix != size.prefix or usage.last.stable > size.stable:
            return total
        return min(total, usage.tokens + total - usage.last.stable)

    def estimate_tokens(self, model: str, size: int) -> int:
        """Estimate tokens from bytes, assuming text no denser than before."""
        usage = self.usage_by_model.get(model)
        ratio = 1.0 if usage is None else min(1.0, usage.ratio * SAFETY_MARGIN)
        return math.ceil(size * ratio)


def measure_message(message: Message) -> int:
    """Bound the tokens of a message, computed once and cached."""
    cache = vars(message)
    if "size" not in cache:
        cache["size"] = bound_message_tokens(message)
    return cache["size"]


MAX_RESULT_LENGTH: Final = 16_000
"""Maximum length of a result for a model, in characters; `read_output` reads the rest."""

MAX_SITUATION_LENGTH: Final = 2_000
"""Maximum length of a part of a situation, which a simulation receives, in characters."""

MAX_TOOL_NAME_LENGTH: Final = 200
"""Maximum length of a recorded tool name, since a model may write anything."""


class Transcript:
    """The messages of a session, and those to send, which are cached so that a step processes only new messages."""

    __slots__ = ("_as_text", "audio", "cut", "marker", "messages", "sent", "size", "task", "turn")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.cut: Cut | None = None
        self.marker: Text | None = None
        self.task = 0
        self.turn = 0
        self.sent = self.messages
        """The messages to send, without the ending of each request. Only the last one can still change.

        This is the list `messages` itself, as long as all of them are sent unchanged.
        """
        self._as_text: tuple[Message, ...] = ()
        self.size = 0
        """Upper bound of the tokens of the messages to send."""
        self.audio = 0
        """Upper bound of the audio tokens among them."""

    def open_turn(self, message: Message) -> None:
        self.turn = len(self.messages)
        self.add(message)

    def add(self, message: Message) -> None:
        """Add a message. Consecutive messages to the model are merged."""
        size = bound_message_tokens(message)
        if size > MAX_RESULT_LENGTH:
            message = shorten_results(message, MAX_RESULT_LENGTH)
            size = bound_message_tokens(message)
        for part in message.parts:
            if type(part) is Text and part.tokens:
                self.audio += count_audio_tokens((Message(message.role, (part,)),))
        sent_messages, is_shared = self.sent, self.sent is self.messages
        if message.role == "user" and sent_messages and sent_messages[-1].role == "user":
            sent_messages = self.sent = sent_messages.copy() if is_shared else sent_messages
            sent_messages[-1] = Message("user", (*sent_messages[-1].parts, *message.parts))
            self.size -= MESSAGE_OVERHEAD
        elif not is_shared:
            sent_messages.append(message)
        self.messages.append(message)
        self.size += size

    def to_text(self) -> list[Message]:
        """Render the messages to send for a model that receives calls and results as text."""
        new_messages = self.sent[len(self._as_text) :]
        self._as_text += tuple(map(to_text_message, new_messages[:-1]))
        return [*self._as_text, *map(to_text_message, new_messages[-1:])]

    def fit(self, window: int, tokens: Sequence[int], marker: int) -> Cut | Fits | TooLarge:
        """Fit the messages to a window, given the tokens of each message.

        A cut may drop an unanswered message of an earlier turn, and a task that alone exceeds the window.
        """
        newest_index = max(find_unanswered(self.messages), self.turn)
        task = self.task if tokens[self.task] <= window else self.turn
        starts = [can_start(message) for message in self.messages]
        shape = HistoryShape(
            sizes=tokens, can_start=starts, task_index=task, turn_index=self.turn, newest_index=newest_index
        )
        return fit_history(shape, window, self.cut, marker=marker)

    def cut_at(self, cut: Cut, marker: Text | None) -> None:
        self.cut, self.marker, self._as_text = cut, marker, ()
        self.sent = list(build_history_view(self.messages, cut, marker))
        self.size = sum(map(measure_message, self.sent))
        self.audio = count_audio_tokens(self.sent)


def call_id(session: str, call: ToolCall) -> str:
    """Make the id of a call, unique in the store and stable across crashes."""
    return f"{session}.{call.id}"


_MODEL_CALL: Final = re.compile(r"(.*)\.c\d+_\d+_\d+(?:/.*)?", re.DOTALL)


def find_calling_session(call: str) -> str:
    """Find the session of a model's call, or of a call inside it, from the call's id in the store."""
    match = _MODEL_CALL.fullmatch(call)
    return "" if match is None else match[1]


def make_prediction_text(call: ToolCall, simulation: str) -> Text:
    """Make the part of a prediction, separate from the result because its text does not come from the tool."""
    text = simulation.removeprefix(SIMULATION_LABEL)
    label = f"{SIMULATION_LABEL} of {call.tool} ({call.id}), made before the call and no part of its result:"
    return Text(f"{label}{text}", "model", trusted=False, reason="simulation")


def _join_text(message: Message) -> str:
    """Join the texts of a message, without the parts that the runtime added."""
    texts = [part for part in message.parts if isinstance(part, Text) and not part.reason and part.origin != "tool"]
    return "\n".join(part.text for part in texts)


ReadBody = Callable[[Stored], Awaitable[bytes]]


_NO_TURN: Final = Turn()
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class SessionHistory:
    """The state of a session's loop, folded from the session's events in order."""

    __slots__ = (
        "_cut_short",
        "_erased",
        "_min_sleep",
        "_nonces",
        "_unanswered",
        "context_text",
        "decided",
        "done",
        "files",
        "hot",
        "phase",
        "predictions",
        "provenance_check",
        "session",
        "staged",
        "transcript",
        "turn",
    )

    def __init__(self, session: str, min_sleep: int = SECOND, provenance_check: ProvenanceCheck | None = None) -> None:
        self.session = session
        self.provenance_check = provenance_check
        """Receives all text that the model sees; None if the provenance check is off."""
        self._min_sleep = min_sleep
        self.turn = _NO_TURN
        self.transcript = Transcript()
        self.done: Mapping[str, ToolResult] = _NOTHING
        self.files: Mapping[str, tuple[Text, ...]] = _NOTHING
        """The files of the step's results, by call."""
        self._nonces: Mapping[str, str] = _NOTHING
        """The nonces of requests in flight."""
        self.predictions: Mapping[str, str] = _NOTHING
        """Predictions of the step's calls, which the model sees with the results."""
        self._cut_short = ""
        """The text of a cancelled answer, which becomes part of the history if the turn ends there."""
        self.hot = b""
        self.context_text = ""
        self.phase: PhaseEntered | None = None
        self._erased: tuple[str, ...] = ()
        """Calls of the step whose results are erased."""
        self._unanswered: Mapping[str, ToolCall] = _NOTHING
        """Calls in flight whose reply is erased: their arguments are unknown."""
        self.staged: tuple[ToolCall, ...] = ()
        """Calls of the turn that wait for a person, in their order."""
        self.decided: tuple[ToolResult, ...] = ()
        """Outcomes of staged calls that the model has not been told."""

    def open(self, number: int, inbox_seen: int, message: Message, at: int, *, quiet: bool = False) -> None:
        self.transcript.open_turn(message)
        self.staged = self.decided = ()
        self.turn = self.turn.make_next(number, inbox_seen, at, quiet=quiet)
        if self.provenance_check is not None:
            for part in message.parts:
                if isinstance(part, Text):
                    self.provenance_check.add_text(part)

    def end(self, reason: TurnEnd, sentence: str, yield_request: YieldRequest | None, at: int) -> None:
        if reason == "cancelled" and self._cut_short:
            self.transcript.add(Message("assistant", (Text(self._cut_short, "model", trusted=False),)))
        self.turn = self.turn.with_end(reason, sentence, yield_request, at, self._min_sleep)

    def add_wait(self, duration: int) -> None:
        self.turn = self.turn.without_wait(duration)

    def add(self, reason: MessageReason, text: str, at: int) -> None:
        self.transcript.add(make_user_message(text, "config", reason=reason))
        self.turn = self.turn.with_message(reason, at)
        if reason == "staged":
            self.staged = self.decided = ()

    def add_reply(self, reply: Reply, nonce: str, at: int) -> None:
        parts = (*read_calls(reply.text, nonce).parts, *reply.calls) if nonce else reply.parts
        turn = self.turn
        texts: tuple[Text, ...] = ()
        calls: tuple[ToolCall, ...] = ()
        for part in parts:
            if type(part) is ToolCall:
                # The runtime assigns the ids: those of a model may be missing or repeated.
                name = f"c{turn.number}_{turn.steps}_{len(calls)}"
                calls += (ToolCall(name, part.tool[:MAX_TOOL_NAME_LENGTH], part.arguments, part.group),)
            elif part.text.strip():
                texts += (part,)
        if texts or calls:
            # Reasoning belongs to calls of the protocol, and refers to none that are written as text.
            self.transcript.add(Message("assistant", texts + calls, None if nonce else reply.reasoning))
        self.done = _NOTHING
        self.turn = turn.with_reply(reply.stop, calls, at, spoke=bool(texts))

    def add_result(
        self, call: ToolCall, outcome: Outcome, text: str, partial: str = "", files: tuple[Text, ...] = ()
    ) -> None:
        """Add a call's result to the step, as the model will see it.

        A refusal has its code, and a failure the output before it.
        """
        if files:
            self.files = {**self.files, call.id: files}
        result_text = text if outcome == "ok" else f"[{outcome}] {text}"
        if partial:
            result_text = "\n\n".join(part for part in (result_text, partial) if part)
        result = ToolResult(call.id, call.tool, outcome, result_text)
        self.done = {**self.done, call.id: result} if self.done else {call.id: result}

    def settle_staged(
        self, call: ToolCall, outcome: Outcome, text: str, partial: str = "", files: tuple[Text, ...] = ()
    ) -> None:
        """Add the outcome of a staged call. In its own step it is the call's result."""
        self.staged = tuple(each for each in self.staged if each.id != call.id)
        self.decided += (ToolResult(call.id, call.tool, outcome, text),)
        if any(each.id == call.id for each in self.turn.calls):
            self.add_result(call, outcome, text, partial, files)

    def find_unmade_call(self) -> ToolResult | None:
        """Find a call before the next one on which that may depend, and which was not made.

        That is a staged call without success, or a call of the step that a person did not approve.
        """
        failed = (result for result in self.decided if result.outcome != "ok")
        unapproved = (
            result for result in self.done.values() if result.outcome in ("approval_denied", "approval_expired")
        )
        return next(chain(failed, unapproved), None)

    def finish_step(self, at: int) -> None:
        calls = self.turn.calls
        self.decided = tuple(result for result in self.decided if result.id not in self.done)
        results = (self.done[calls[0].id],) if len(calls) == 1 else tuple([self.done[call.id] for call in calls])
        parts = self._add_files(results) if self.files else results
        self.transcript.add(Message("user", (*parts, *self._predictions(calls)) if self.predictions else parts))
        if (check := self.provenance_check) is not None:
            for index, call in enumerate(calls):
                if call.id in self._erased:
                    check.observe_erased(call)
                else:
                    check.observe(call, results[index])
            self._erased = ()
        self.done = _NOTHING
        self.turn = self.turn.with_results(calls, results, at)

    def _add_files(self, results: Iterable[ToolResult]) -> tuple[Part, ...]:
        """Place the files of each result after it."""
        files, self.files = self.files, _NOTHING
        return tuple(part for result in results for part in (result, *files.get(result.id, ())))

    def _predictions(self, calls: Iterable[ToolCall]) -> list[Text]:
        predictions = dict(self.predictions)
        predicted_calls = [(call, predictions.pop(call_id(self.session, call), "")) for call in calls]
        self.predictions = predictions
        return [make_prediction_text(call, text) for call, text in predicted_calls if text]

    def situation(self) -> str:
        """Describe the last question to the agent, and the text of its current step."""
        *earlier, latest = self.transcript.messages
        question = next((text for each in reversed(earlier) if each.role == "user" and (text := _join_text(each))), "")
        labelled_texts = (("The agent was asked", question), ("With the call it says", _join_text(latest)))
        return "\n".join(f"{label}: {shorten(text, MAX_SITUATION_LENGTH)}" for label, text in labelled_texts if text)

    async def apply(self, events: Iterable[Stored], read_body: ReadBody) -> None:
        """Fold events of another process, or of an earlier run."""
        for stored in events:
            await self._apply_event(stored, read_body)
        # A request that a cap refused may be retried. All other outcomes are final.
        if self.turn.capped and not self.turn.is_over:
            self.turn = self.turn.without_cap()
        if self.done:
            self.done = {call: result for call, result in self.done.items() if result.outcome != "cost_cap_reached"}

    async def _apply_event(self, stored: Stored, read_body: ReadBody) -> None:
        at, event = stored.at, stored.event
        match event:
            case SessionStarted():
                pass
            case CallStarted() | CallSettled() | CallRefused() | FilesGiven():
                await self._apply_call_event(event, stored, read_body)
            case RequestStarted(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn, self._cut_short = self.turn.without_cap(), ""
                record = msgspec.json.decode(await read_body(stored) or b"{}", type=RequestRecord)
                self._nonces = {**self._nonces, event.request: record.nonce}
            case RequestSettled():
                await self._apply_request_event(event, stored, read_body)
            case RequestRefused(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn = self.turn.without_cap().with_refusal(
                    parse_attempt(event.request), event.outcome, event.sentence, at
                )
            case TurnStarted():
                body = await read_body(stored)
                message = msgspec.json.decode(body or b'{"role":"user","parts":[]}', type=Message)
                self.open(event.turn, event.inbox_seen, message, at, quiet=event.quiet)
                if self.provenance_check is not None and not body:
                    self.provenance_check.mark_erased()
            case HotStateSeen() | GuardrailTriggered() | TurnSkipped() | PhaseEntered() | ContextGiven():
                await self._apply_pace_event(event, stored, read_body)
            case HistoryGiven():
                self._begin_with(event, await read_body(stored))
            case MessageAdded():
                self.flush(at)
                self.add(event.reason, decode_body(await read_body(stored)), at)
            case ContextCut():
                self.flush(at)
                body = await read_body(stored)
                if body:
                    # An erased cut changes nothing, because the messages that it dropped are erased too.
                    self.transcript.cut_at(
                        Cut(event.through, event.pinned), msgspec.json.decode(body, type=Text | None)
                    )
                self.turn = self.turn.with_cut(at)
            case OverrunIncurred():
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            case TurnEnded():
                self.flush(at)
                self.end(event.why, event.sentence, event.yielded, at)
            case SessionParked():
                self.turn = self.turn.pause(at, event.trouble)
            case SessionWoken(recovered=True):
                self.turn = self.turn.with_recovery(at)
            case SessionWoken():
                self.turn = self.turn.resume(at, takeover=event.cause == "takeover")
            case SessionResumed():
                self.turn = self.turn.reopen(at)
            case _:
                pass

    def _begin_with(self, event: HistoryGiven, body: bytes) -> None:
        messages = msgspec.json.decode(body or b"[]", type=list[Message])
        for message in messages:
            self.transcript.add(message)
        if self.provenance_check is not None:
            self.provenance_check.recall(messages, foreign=not event.session, denied=event.denied)
            if not body:
                self.provenance_check.mark_erased()

    async def _apply_pace_event(
        self,
        event: HotStateSeen | GuardrailTriggered | TurnSkipped | PhaseEntered | ContextGiven,
        stored: Stored,
        read_body: ReadBody,
    ) -> None:
        match event:
            case PhaseEntered():
                self.phase = event
            case ContextGiven():
                self.context_text = decode_body(await read_body(stored))
                if self.provenance_check is not None:
                    self.provenance_check.trust(self.context_text, "kept memories")
            case HotStateSeen():
                self.hot = await read_body(stored)
            case GuardrailTriggered(until=int(), guardrail=name) if self.turn.is_over and name != "model_rate":
                self.turn = self.turn.with_guardrail(stored.at)
            case TurnSkipped():
                self.turn = self.turn.with_skip(event.skips, stored.at)
            case _:
                pass

    async def _apply_call_event(
        self, event: CallStarted | CallSettled | CallRefused | FilesGiven, stored: Stored, read_body: ReadBody
    ) -> None:
        match event:
            case FilesGiven():
                if any(call_id(self.session, call) == event.call for call in self.turn.calls):
                    call = event.call.removeprefix(f"{self.session}.")
                    self.files = {**self.files, call: restore_files(await read_body(stored))}
                return
            case CallStarted():
                call = event.call.removeprefix(f"{self.session}.")
                self.done = {each: result for each, result in self.done.items() if each != call}
            case CallSettled():
                body = await read_body(stored)
                answer = restore_call_answer(event, body)
                self._add_result(event.call, answer.outcome, answer.text, answer.partial)
                if is_erased(stored, body):
                    self._erased += (event.call.removeprefix(f"{self.session}."),)
                erased_call = self._unanswered.get(event.call)
                if erased_call is not None and self.provenance_check is not None:
                    self.provenance_check.observe_erased(erased_call)
                    self._unanswered = {
                        call: erased_call for call, erased_call in self._unanswered.items() if call != event.call
                    }
                return
            case CallRefused():
                self._add_result(event.call, event.outcome, event.sentence)
                if event.staged:
                    self.staged += tuple(each for each in self.turn.calls if call_id(self.session, each) == event.call)
        # Only calls of the model itself, not calls inside other calls.
        if self.provenance_check is not None and self._is_models(event.call):
            body = await read_body(stored)
            self.provenance_check.apply(event, None if is_erased(stored, body) else body)
            if isinstance(event, CallStarted) and not self._has_call(event.call):
                self._unanswered = {**self._unanswered, event.call: ToolCall(event.call, event.tool, "")}

    async def _apply_request_event(self, event: RequestSettled, stored: Stored, read_body: ReadBody) -> None:
        if event.request not in self._nonces:
            await self._foresee(event, stored, read_body)
            return
        nonce = self._nonces[event.request]
        self._nonces = {request: each for request, each in self._nonces.items() if request != event.request}
        attempt = parse_attempt(event.request)
        if event.outcome == "ok":
            body = await read_body(stored)
            reply = msgspec.json.decode(body, type=Reply) if body else Reply(())
            self.add_reply(reply, nonce, stored.at)
        elif event.outcome in ("cancelled", "unknown"):
            body = await read_body(stored)
            self._cut_short = msgspec.json.decode(body, type=Reply).text if body else ""
            self.turn = self.turn.with_attempt(attempt, stored.at)
        elif event.outcome == "external_halt":
            self.turn = self.turn.with_refusal(attempt, event.outcome, event.error, stored.at)
        else:
            is_charged = event.charge is not None and bool(event.charge.usd or event.charge.tokens)
            failure = FailedAttempt(event.error, event.may_retry, event.retry_after, event.needs_person, is_charged)
            self.turn = self.turn.with_failure(attempt, failure, stored.at)

    async def _foresee(self, event: RequestSettled, stored: Stored, read_body: ReadBody) -> None:
        call, _, simulation = event.request.rpartition("/simulation/")
        if call and simulation and event.outcome == "ok" and (body := await read_body(stored)):
            reply = msgspec.json.decode(body, type=Reply)
            text = "" if reply.stop == "refused" else reply.text.strip()
            self.predictions = {**self.predictions, call: f"{SIMULATION_LABEL} {text}" if text else ""}

    def _add_result(self, call: str, outcome: Outcome, text: str, partial: str = "") -> None:
        for tool_call in self.staged:
            if call_id(self.session, tool_call) == call:
                self.settle_staged(tool_call, outcome, text, partial)
                return
        for tool_call in self.turn.calls:
            if call_id(self.session, tool_call) == call:
                self.add_result(tool_call, outcome, text, partial)

    def _is_models(self, call: str) -> bool:
        """Return whether the model made a call, even if its reply is erased. Other callers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.c\d+_\d+_\d+", call) is not None

    def _has_call(self, call: str) -> bool:
        return any(call_id(self.session, each) == call for each in (*self.turn.calls, *self.staged))

    def _is_turns(self, request: str) -> bool:
        """Return whether the turn loop made a request. Other callers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.t\d+_\d+/\d+", request) is not None

    def flush(self, at: int) -> None:
        """Finish the step if all its calls have results."""
        if self.turn.calls and all(call.id in self.done for call in self.turn.calls):
            self.finish_step(at)


def is_erased(stored: Stored, body: bytes) -> bool:
    return not body and (stored.erased or stored.blob is not None)


def find_result(body: bytes, call: str) -> str | None:
    """Find the full result of a call in the history with which a session started."""
    messages = msgspec.json.decode(body or b"[]", type=list[Message])
    parts = (part for message in messages for part in message.parts)
    return next((part.text for part in parts if isinstance(part, ToolResult) and part.id == call), None)


def parse_attempt(request: str) -> int:
    return int(request.rpartition("/")[2])
