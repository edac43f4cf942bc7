"""The state of a turn: everything on which its next step depends.

It is folded from the session's events, so a process that reads them after a crash makes the same decision.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.core.clock import HOUR, MAX_DURATION, MINUTE, SECOND, parse_duration
from halter.core.errors import ConfigError
from halter.core.events.sessions import YieldRequest
from halter.core.messages import StopReason, ToolCall, ToolResult
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd
from halter.loop.repetition import MAX_PERIOD, StepPrint, fingerprint_step
from halter.loop.runtime_messages import REPEATED_CALLS

ASK_USER: Final = "ask_user"
FINAL_ANSWER: Final = "final_answer"
HAND_OFF: Final = "hand_off_to_"
"""Prefix of the tools that hand the conversation over: their answer is the turn's answer."""
YIELD: Final = "yield"
"""A call of `ask_user`, `final_answer` or `yield` ends the turn if its outcome is `ok`."""
_TURN_ENDING_TOOLS: Final = frozenset((ASK_USER, FINAL_ANSWER, YIELD))
TROUBLED_ENDS: Final[frozenset[TurnEnd]] = frozenset(("max_steps", "timed_out", "repetition", "model_error"))
"""Ends of a bad turn. After each, an autonomous session backs off, and at last ends and waits for a person."""
_WAITING_ENDS: Final = frozenset(("yielded", "asked")) | TROUBLED_ENDS
"""Ends of a turn after which a pause is a sleep, a wait or a backoff, not idle time."""
OVERFLOW_ERROR: Final = "ContextOverflow"
"""Prefix of the error for a prompt that is too long for its model."""


class FailedAttempt(msgspec.Struct, frozen=True, gc=False):
    error: str
    may_retry: bool = False
    retry_after: int | None = None
    needs_person: bool = False
    is_charged: bool = False

    @property
    def overflow(self) -> bool:
        return self.error.startswith(OVERFLOW_ERROR)


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of a turn, and the state that a session carries from one turn to the next.

    Messages: `inbox_seen` is the inbox position up to which the model has seen messages, `inbox_cleared` the one up to
    which a finished turn has shown notifications.

    Steps: `attempt_count` counts the requests of this step, made or refused, and numbers the next one; `failures` are
    those that failed. `calls` are the calls without a result. `fingerprints` are those of the newest steps, as far
    back as a cycle can reach, and `fingerprint_count` counts all. `is_cycle_possible` says that the newest step equals
    an earlier one, `repetition` why its calls were refused if they repeat too often.

    Time: `work_time` is the working time in microseconds up to `clock_started_at`, which is None while the session is
    parked. `idle_time` is the time awake without effect; an `is_active` turn is not idle. A session that a guardrail
    has held back (`is_held_back`) is asleep, not idle.

    In a row: `trouble_count` counts bad turns, `pause_count` turns without a yield, `skip_count` turns that the gate
    skipped, `sleepless_turn_count` turns without a sleep between them.

    Cache: `answered_at` is the time of the newest answer, `longest_interval` the longest time between two answers of
    this turn that a cache of an hour survives, and `previous_interval` that of the turn before.

    End: `is_settled` says that the session has parked or ended because of the turn's end. `trouble` says why no model
    answered when the session last parked inside a turn, and `troubled_at` since when; both last until a model answers.
    """

    number: int = 0
    is_over: bool = True
    inbox_seen: int = 0
    steps: int = 0
    attempt_count: int = 0
    failures: tuple[FailedAttempt, ...] = ()
    work_time: int = 0
    clock_started_at: int | None = None
    last_event_at: int = 0
    stop: StopReason | None = None
    spoke: bool = False
    calls: tuple[ToolCall, ...] = ()
    cut: bool = False
    fingerprints: tuple[StepPrint, ...] = ()
    fingerprint_count: int = 0
    is_cycle_possible: bool = False
    repetition: str = ""
    hinted_at: int = 0
    recoveries: int = 0
    nudges: int = 0
    expected: int = 0
    overflows: int = 0
    warned: bool = False
    wrapping: bool = False
    halted: bool = False
    capped: bool = False
    refusal: str = ""
    overrun: bool = False
    has_asked: bool = False
    has_answered: bool = False
    has_handed_off: bool = False
    yielded: YieldRequest | None = None
    why: TurnEnd | None = None
    sentence: str = ""
    trouble_count: int = 0
    pause_count: int = 0
    is_settled: bool = True
    resumed: bool = False
    inbox_cleared: int = 0
    skip_count: int = 0
    sleepless_turn_count: int = 0
    idle_time: int = 0
    is_active: bool = False
    is_held_back: bool = False
    trouble: str = ""
    troubled_at: int = 0
    answered_at: int = 0
    longest_interval: int = 0
    previous_interval: int = 0

    @property
    def has_ending_call(self) -> bool:
        """Whether a call of the newest step ends the turn."""
        return self.has_asked or self.has_answered or self.has_handed_off or self.yielded is not None

    def make_next(self, number: int, inbox_seen: int, at: int, *, quiet: bool = False) -> "Turn":
        return Turn(
            number=number,
            is_over=False,
            inbox_seen=inbox_seen,
            clock_started_at=at,
            last_event_at=at,
            warned=self.warned,
            trouble_count=self.trouble_count,
            pause_count=self.pause_count,
            inbox_cleared=self.inbox_cleared,
            sleepless_turn_count=self.sleepless_turn_count,
            idle_time=self.idle_time,
            is_active=not quiet,
            trouble=self.trouble,
            troubled_at=self.troubled_at,
            answered_at=self.answered_at,
            previous_interval=self.longest_interval,
        )

    def with_skip(self, skip_count: int, at: int) -> "Turn":
        return msgspec.structs.replace(
            self, skip_count=skip_count, sleepless_turn_count=0, is_held_back=True, last_event_at=at
        )

    def with_guardrail(self, at: int) -> "Turn":
        return msgspec.structs.replace(self, sleepless_turn_count=0, is_held_back=True, last_event_at=at)

    def with_reply(self, stop: StopReason, calls: tuple[ToolCall, ...], at: int, *, spoke: bool) -> "Turn":
        """Apply a model's reply, which resets the attempts of the step."""
        return msgspec.structs.replace(
            self,
            steps=self.steps + 1,
            attempt_count=0,
            failures=(),
            overflows=0,
            stop=stop,
            spoke=spoke,
            calls=calls,
            cut=False,
            last_event_at=at,
            answered_at=at,
            longest_interval=max(self.longest_interval, find_cached_interval(self.answered_at, at)),
        )

    def with_attempt(self, attempt: int, at: int) -> "Turn":
        """Apply an attempt without an outcome: its process stopped."""
        return msgspec.structs.replace(self, attempt_count=attempt + 1, last_event_at=at)

    def with_failure(self, attempt: int, failure: FailedAttempt, at: int) -> "Turn":
        return msgspec.structs.replace(
            self, attempt_count=attempt + 1, failures=(*self.failures, failure), last_event_at=at
        )

    def with_refusal(self, attempt: int, outcome: Outcome, sentence: str, at: int) -> "Turn":
        """Apply a refused request. Unless a halt or a cap refused it, a fallback model may be tried."""
        if outcome not in ("external_halt", "cost_cap_reached"):
            return self.with_failure(attempt, FailedAttempt(sentence, needs_person=outcome == "disabled"), at)
        return msgspec.structs.replace(
            self,
            attempt_count=attempt + 1,
            halted=self.halted or outcome == "external_halt",
            capped=self.capped or outcome == "cost_cap_reached",
            refusal=sentence,
            last_event_at=at,
        )

    def without_cap(self) -> "Turn":
        """Undo the refusal by a cap: the request is retried, or was admitted. A wrap-up is not undone."""
        return self if self.wrapping else msgspec.structs.replace(self, capped=False, refusal="")

    def with_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult], at: int) -> "Turn":
        """Apply the results of a step's calls. Of several yields, the last one counts."""
        is_active, has_tried_answer, has_refusal, yield_request = self.is_active, False, False, None
        has_asked = has_answered = has_handed_off = False
        repetition = ""
        for result in results:
            tool, is_ok = result.tool, result.outcome == "ok"
            if not is_ok:
                has_refusal = True
                if result.outcome == "rate_limited":
                    repetition = repetition or result.text.partition(REPEATED_CALLS)[2]
            if tool not in _TURN_ENDING_TOOLS:
                is_active = True
                if is_ok and tool.startswith(HAND_OFF):
                    has_handed_off = True
            elif tool == FINAL_ANSWER:
                has_tried_answer, has_answered = True, has_answered or is_ok
            elif tool == YIELD:
                yield_request = (
                    parse_yield({each.id: each.arguments for each in calls}[result.id]) if is_ok else yield_request
                )
            else:
                has_asked = has_asked or is_ok
        fingerprint, newest_fingerprints = fingerprint_step(calls, results), self.fingerprints[-MAX_PERIOD:]
        is_repeat, is_cut_off = fingerprint in newest_fingerprints, self.stop == "max_tokens"
        turn = msgspec.structs.replace(
            self,
            calls=(),
            stop=self.stop if is_cut_off or self.wrapping else None,
            cut=is_cut_off,
            # A step that equals none of the newest ones breaks every cycle, so older steps do not matter.
            fingerprints=(*(self.fingerprints if is_repeat else newest_fingerprints), fingerprint),
            fingerprint_count=self.fingerprint_count + 1,
            is_cycle_possible=is_repeat,
            repetition=repetition,
            expected=self.expected + (has_tried_answer and not has_answered),
            is_active=is_active,
            has_asked=has_asked,
            has_answered=has_answered,
            has_handed_off=has_handed_off,
            yielded=yield_request,
            last_event_at=at,
        )
        return turn.with_stop(results) if has_refusal else turn

    def with_stop(self, results: Sequence[ToolResult]) -> "Turn":
        """Apply the refusals of a halt or a cap. Of several caps, the first one counts."""
        is_halted, is_capped, refusal = self.halted, self.capped, self.refusal
        for result in results:
            if result.outcome == "external_halt":
                is_halted = True
            elif result.outcome == "cost_cap_reached":
                is_capped, refusal = True, refusal or result.text
        return msgspec.structs.replace(self, halted=is_halted, capped=is_capped, refusal=refusal)

    def with_message(self, reason: MessageReason, at: int) -> "Turn":
        """Apply a message of the runtime; each reason has its own limit."""
        turn = msgspec.structs.replace(self, stop=None, last_event_at=at)
        match reason:
            case "max_tokens_recovery" | "cut_call":
                return msgspec.structs.replace(turn, recoveries=self.recoveries + 1)
            case "repetition":
                return msgspec.structs.replace(turn, hinted_at=self.fingerprint_count)
            case "empty_answer":
                return msgspec.structs.replace(turn, nudges=self.nudges + 1)
            case "output_expected":
                return msgspec.structs.replace(turn, expected=self.expected + 1)
            case "near_budget":
                return msgspec.structs.replace(turn, warned=True)
            case "staged":
                return msgspec.structs.replace(
                    turn, has_asked=False, has_answered=False, has_handed_off=False, yielded=None
                )
            case "wrap_up":
                return msgspec.structs.replace(turn, wrapping=True, failures=(), refusal="")

    def with_cut(self, at: int) -> "Turn":
        """Apply a cut, which dropped older messages because the prompt was too long."""
        if not self.failures or not self.failures[-1].overflow:
            return msgspec.structs.replace(self, last_event_at=at)
        return msgspec.structs.replace(
            self, failures=self.failures[:-1], overflows=self.overflows + 1, last_event_at=at
        )

    def with_final_overflow(self) -> "Turn":
        """Make an overflow final: the history cannot be cut further."""
        *earlier_failures, last_failure = self.failures
        failure = FailedAttempt(f"The history cannot be cut further. {last_failure.error}")
        return msgspec.structs.replace(self, failures=(*earlier_failures, failure))

    def reopen(self, at: int) -> "Turn":
        return msgspec.structs.replace(
            self, is_settled=True, resumed=True, trouble_count=0, pause_count=0, last_event_at=at
        )

    def with_end(
        self, reason: TurnEnd, sentence: str, yield_request: YieldRequest | None, at: int, min_sleep: int = SECOND
    ) -> "Turn":
        """Apply the end of the turn. A sleep of at most `min_sleep` does not count as sleep."""
        has_slept = yield_request is not None and yield_request.mode == "sleep" and yield_request.sleep > min_sleep
        return msgspec.structs.replace(
            self,
            is_over=True,
            is_settled=False,
            why=reason,
            sentence=sentence,
            yielded=yield_request,
            work_time=self.time_worked(at),
            clock_started_at=None,
            trouble_count=self.trouble_count + 1 if reason in TROUBLED_ENDS else 0,
            pause_count=0 if reason in ("yielded", "asked") else self.pause_count + 1,
            inbox_cleared=self.inbox_cleared if reason in TROUBLED_ENDS else self.inbox_seen,
            sleepless_turn_count=0 if has_slept else self.sleepless_turn_count + 1,
            idle_time=0 if self.is_active else self.idle_time + self.time_worked(at),
            last_event_at=at,
        )

    def pause(self, at: int, trouble: str = "") -> "Turn":
        """Stop the clock: sleep, and waiting for a person, are not work. After a `trouble` all models are retried."""
        turn = msgspec.structs.replace(
            self, work_time=self.time_worked(at), clock_started_at=None, is_settled=self.is_over, last_event_at=at
        )
        if not trouble:
            return turn
        troubled_at = self.troubled_at if trouble == self.trouble else at
        return msgspec.structs.replace(turn, failures=(), trouble=trouble, troubled_at=troubled_at)

    def with_recovery(self, at: int) -> "Turn":
        """Apply a recovery: a model has answered after a trouble."""
        return msgspec.structs.replace(self.resume(at, takeover=False), trouble="", troubled_at=0)

    def without_wait(self, duration: int) -> "Turn":
        """Subtract time that the turn spent waiting."""
        return msgspec.structs.replace(
            self, clock_started_at=None if self.clock_started_at is None else self.clock_started_at + duration
        )

    def resume(self, at: int, *, takeover: bool) -> "Turn":
        """Start the clock. Time without an owner does not count as work."""
        work_time = self.time_worked(self.last_event_at) if takeover else self.time_worked(at)
        # A pause that neither the model nor a limit chose is idle time.
        pause_duration = (
            at - self.last_event_at if self.is_over and self.why not in _WAITING_ENDS and not self.is_held_back else 0
        )
        idle = self.idle_time + (0 if takeover else max(0, pause_duration))
        return msgspec.structs.replace(
            self, work_time=work_time, idle_time=idle, clock_started_at=None if self.is_over else at, last_event_at=at
        )

    def time_worked(self, now: int) -> int:
        resumed_at = self.clock_started_at
        return self.work_time if resumed_at is None or now <= resumed_at else self.work_time + now - resumed_at


CACHE_LIFETIME: Final = 5 * MINUTE
"""The time after which a provider forgets the beginning of a prompt, unless it is asked to keep it for an hour."""
LONG_CACHE_LIFETIME: Final = HOUR


def find_cached_interval(answered_at: int, now: int) -> int:
    """Find the time since an answer; 0 if there was none, or if no cache lasts that long."""
    interval = now - answered_at if answered_at else 0
    return interval if interval <= LONG_CACHE_LIFETIME else 0


def needs_long_cache(turn: Turn, now: int, min_sleep: int) -> bool:
    """Decide whether to have the beginning of a prompt cached for an hour, which costs more than for minutes.

    It is worth it if a request comes more than five minutes after the one before, and within the hour. That is expected
    of a session in which that happened in this turn or the one before, and at first of one that never sleeps for less.
    """
    if turn.number <= 1 and CACHE_LIFETIME < min_sleep <= LONG_CACHE_LIFETIME:
        return True
    interval = find_cached_interval(turn.answered_at, now)
    return max(interval, turn.longest_interval, turn.previous_interval) > CACHE_LIFETIME


def parse_sleep_seconds(sleep: float | str) -> float | None:
    """Parse a sleep as a model writes it: seconds, or a duration such as `15m`; None if it is neither."""
    try:
        seconds = parse_duration(sleep) / SECOND if isinstance(sleep, str) else sleep
    except ConfigError:
        return None
    return min(seconds, MAX_DURATION / SECOND) if seconds >= 0 else None


class _YieldArguments(msgspec.Struct, frozen=True):
    mode: str = "continue"
    sleep: float | str = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""


def parse_yield(arguments: str) -> YieldRequest:
    """Parse the arguments of `yield`, which the tool has validated. Invalid ones count as an empty yield."""
    try:
        yield_arguments = msgspec.json.decode(arguments or "{}", type=_YieldArguments, strict=False)
    except (msgspec.DecodeError, ValueError):
        yield_arguments = _YieldArguments()
    mode = yield_arguments.mode if yield_arguments.mode in ("sleep", "shutdown") else "continue"
    return YieldRequest(
        mode,
        round((parse_sleep_seconds(yield_arguments.sleep) or 0) * SECOND),
        yield_arguments.wake_early_if,
        yield_arguments.reason,
    )
