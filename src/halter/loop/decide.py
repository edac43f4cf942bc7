"""Two pure decisions: the next step of a turn, and the next step of a session after a turn.

Before each step the limits are checked in this order: halt, cancel, time, number of steps. The guard detects halts at
each request and call; this module reads them from the outcomes.
"""

from collections.abc import Sequence
from typing import Final, final

import msgspec

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.messages import ToolCall
from halter.core.vocabulary import (
    MessageReason,
    Outcome,
    ProviderTrouble,
    SessionKind,
    State,
    TerminalReason,
    TurnEnd,
)
from halter.loop.repetition import RepeatedSteps, find_repetition, is_step_of
from halter.loop.runtime_messages import (
    CONTINUE_ANSWER,
    CUT_CALL,
    CUT_INSIDE_CALL,
    EMPTY_ANSWER,
    NEAR_BUDGET,
    NO_MORE_CALLS,
    OUTPUT_EXPECTED,
    REPEATED_CALLS,
    REPEATED_EMPTY_ANSWER,
    TIME_IS_UP,
    WRAP_UP,
    describe_too_many_calls,
)
from halter.loop.turn import FailedAttempt, Turn
from halter.spec.limits import OnCap

BACKOFFS: Final = (5 * MINUTE, HOUR)
"""Delays after the first, the second attempt in a row without progress. After one more, a person must act."""


def find_backoff(attempt_count: int) -> int | None:
    """Return the delay after so many attempts in a row without progress; None if only a person starts the next.

    An attempt is a turn of an autonomous session, or a session that a trigger or the end of another one started.
    """
    return BACKOFFS[attempt_count - 1] if attempt_count <= len(BACKOFFS) else None


def describe_charged_failures(failures: Sequence[FailedAttempt], refusal: str) -> str:
    request_text = _format_times(len(failures), "request")
    verb = "was" if len(failures) == 1 else "were"
    charged = f"{request_text} without a usable answer {verb} charged, so no further one fits: {refusal}"
    return f"{failures[-1].error.removesuffix('.')}. {charged}"


MAX_CALLS: Final = 50
"""Maximum number of calls of a step. If a step asks for more, none is made."""
MAX_NUDGES: Final = 1
"""Maximum number of reminders after an empty answer."""
MAX_OUTPUT_REMINDERS: Final = 3
"""Maximum number of reminders of the required output form."""
MAX_OVERFLOWS: Final = 3
"""Maximum number of further cuts of a history that is too long for its model."""

FIRST_BACKOFF: Final = SECOND
MAX_BACKOFF: Final = 30 * SECOND
MAX_RETRY_AFTER: Final = 60 * SECOND
"""Longest `retry-after` of a provider that Halter obeys."""
FIRST_OUTAGE_BACKOFF: Final = 5 * SECOND
"""Shortest pause between two attempts during an outage of all models."""


class TurnLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a turn. `model_count` includes the fallbacks.

    While no model answers, an unattended session waits at most `outage_backoff` between two attempts. If that is 0, the
    turn ends instead.
    """

    kind: SessionKind = "chat"
    timeout: int = 3600 * SECOND
    max_steps: int = 50
    max_retries: int = 3
    outage_backoff: int = 0
    model_count: int = 1
    max_tokens_recoveries: int = 2
    max_repeated_tool_steps: int = 3
    on_cap: OnCap = "wrap_up"
    expects_output: bool = False
    min_sleep: int = SECOND
    max_sleep: int = 24 * 3600 * SECOND
    max_actions_per_minute: int = 0


@final
class Think(msgspec.Struct, frozen=True, gc=False):
    """Send a request to a model after a delay. Model 0 is the agent's own; the others are its fallbacks."""

    model: int = 0
    after: int = 0


ASK_MODEL: Final = Think()


@final
class Act(msgspec.Struct, frozen=True, gc=False):
    calls: tuple[ToolCall, ...]


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Refuse calls without making them, so that every call has a result."""

    calls: tuple[ToolCall, ...]
    outcome: Outcome
    sentence: str


class AddMessage(msgspec.Struct, frozen=True, gc=False):
    """Add a message of the runtime for the model, which people do not see."""

    reason: MessageReason
    text: str


class Shrink(msgspec.Struct, frozen=True, gc=False):
    """Drop more of the history, because the prompt is too long for its model."""


class Finish(msgspec.Struct, frozen=True, gc=False):
    why: TurnEnd
    sentence: str = ""


@final
class WaitOut(msgspec.Struct, frozen=True, gc=False):
    """Park inside the turn while no model answers, until `sleep` has passed or a person has fixed something."""

    trouble: ProviderTrouble
    sentence: str
    sleep: int


Step = Think | Act | Refuse | AddMessage | Shrink | WaitOut | Finish


def decide_next_step(
    turn: Turn, limits: TurnLimits, now: int, work_time: int, *, near_budget: bool = False, jitter: float = 1.0
) -> Step:
    """Decide on the next step of a turn, after `work_time` microseconds of work.

    `jitter`, from 0 to 1, spreads the retries of many sessions.
    """
    is_late = 0 < limits.timeout <= work_time
    if turn.calls:
        return _step_with_calls(turn, limits, is_late=is_late)
    if turn.halted:
        return Finish("external_halt", turn.refusal)
    if turn.overrun or turn.wrapping or turn.capped:
        return _step_without_money(turn, limits)
    if turn.yielded is not None:
        return Finish("yielded")
    if turn.has_asked:
        return Finish("asked")
    # Another agent's answer has no output form: if one is required, the model itself must answer.
    if turn.has_answered or (turn.has_handed_off and not limits.expects_output):
        return Finish("ended")
    if turn.expected > MAX_OUTPUT_REMINDERS:
        return _finish_without_output()
    if turn.stop is not None:
        return _decide_after_text(turn, limits)
    if is_late:
        limit_text = _format_times(limits.timeout // SECOND, "second")
        return Finish("timed_out", f"The turn exceeded its limit of {limit_text}.")
    if turn.steps >= limits.max_steps:
        return Finish("max_steps", f"The turn reached its limit of {_format_times(turn.steps, 'step')}.")
    if turn.repetition:
        return Finish("repetition", turn.repetition)
    repetition = _find_turn_repetition(turn, limits)
    if repetition is not None and turn.fingerprint_count > turn.hinted_at:
        hint = f"{repetition.sentence} Repeating them changes nothing. Do something else, or say what stops you."
        return Finish("repetition", repetition.sentence) if turn.hinted_at else AddMessage("repetition", hint)
    if turn.failures:
        return _decide_after_failure(turn, limits, now, jitter)
    return AddMessage("near_budget", NEAR_BUDGET) if near_budget and not turn.warned else ASK_MODEL


def _format_times(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _find_turn_repetition(turn: Turn, limits: TurnLimits) -> RepeatedSteps | None:
    return find_repetition(turn.fingerprints, limits.max_repeated_tool_steps) if turn.is_cycle_possible else None


def _find_continued_repetition(turn: Turn, limits: TurnLimits) -> RepeatedSteps | None:
    """Find the repetition that the calls of a turn would continue."""
    if not turn.fingerprints:
        return None
    if limits.max_repeated_tool_steps == 1 and is_step_of(turn.calls, turn.fingerprints[-1]):
        return RepeatedSteps(1, 1)
    repetition = _find_turn_repetition(turn, limits)
    is_continued = repetition is not None and is_step_of(turn.calls, turn.fingerprints[-repetition.period])
    return repetition if is_continued else None


def _step_with_calls(turn: Turn, limits: TurnLimits, *, is_late: bool) -> Step:
    if turn.stop == "max_tokens":
        return Refuse(turn.calls, "invalid_arguments", CUT_CALL)
    if len(turn.calls) > MAX_CALLS:
        return Refuse(turn.calls, "rate_limited", describe_too_many_calls(len(turn.calls), MAX_CALLS))
    if turn.wrapping:
        return Refuse(turn.calls, "cost_cap_reached", NO_MORE_CALLS)
    if is_late:
        return Refuse(turn.calls, "cancelled", TIME_IS_UP)
    repetition = _find_continued_repetition(turn, limits)
    if repetition is not None:
        return Refuse(turn.calls, "rate_limited", f"{REPEATED_CALLS}{repetition.sentence}")
    return Act(turn.calls)


def _step_without_money(turn: Turn, limits: TurnLimits) -> Step:
    """Decide after a cap was reached: wrap up, or end the turn."""
    if turn.overrun:
        return Finish("overrun", "A request or call cost more than its hold and exceeded a cap.")
    if turn.wrapping:
        is_done = turn.stop is not None or bool(turn.failures) or turn.refusal != ""
        return Finish("cost_cap_reached", turn.refusal) if is_done else ASK_MODEL
    charged_failures = [failure for failure in turn.failures if failure.is_charged]
    if charged_failures:
        return Finish("model_error", describe_charged_failures(charged_failures, turn.refusal))
    return AddMessage("wrap_up", WRAP_UP) if limits.on_cap == "wrap_up" else Finish("cost_cap_reached", turn.refusal)


def _finish_without_output() -> Finish:
    return Finish("model_error", f"The model gave no valid output after {MAX_OUTPUT_REMINDERS} reminders.")


def _decide_after_text(turn: Turn, limits: TurnLimits) -> Step:
    if turn.stop == "max_tokens":
        if turn.recoveries >= limits.max_tokens_recoveries:
            return Finish("ended", "The answer was cut off at max_output_tokens.")
        return (
            AddMessage("cut_call", CUT_INSIDE_CALL) if turn.cut else AddMessage("max_tokens_recovery", CONTINUE_ANSWER)
        )
    if turn.stop == "refused":
        return Finish("model_error", "The model refused to answer.")
    if limits.expects_output:
        if turn.expected >= MAX_OUTPUT_REMINDERS:
            return _finish_without_output()
        return AddMessage("output_expected", OUTPUT_EXPECTED)
    if turn.spoke or (turn.fingerprints and limits.kind == "autonomous"):
        return Finish("ended")
    return (
        AddMessage("empty_answer", EMPTY_ANSWER)
        if turn.nudges < MAX_NUDGES
        else Finish("model_error", REPEATED_EMPTY_ANSWER)
    )


def _decide_after_failure(turn: Turn, limits: TurnLimits, now: int, jitter: float) -> Step:
    last_failure = turn.failures[-1]
    if last_failure.overflow and turn.overflows < MAX_OVERFLOWS:
        return Shrink()
    # During an outage each model is asked once.
    retries = 0 if turn.trouble else limits.max_retries
    model_index = attempt_count = 0
    for failure in turn.failures:
        attempt_count += 1
        if not failure.may_retry or attempt_count > retries:
            model_index, attempt_count = model_index + 1, 0
    if model_index >= limits.model_count:
        return _decide_when_all_failed(turn, limits, now, jitter)
    return Think(model_index, compute_backoff(last_failure, attempt_count, jitter) if attempt_count else 0)


def _decide_when_all_failed(turn: Turn, limits: TurnLimits, now: int, jitter: float) -> WaitOut | Finish:
    """Wait if time or a person can fix at least one model's failure; otherwise end the turn."""
    temporary_failures = [failure for failure in turn.failures if failure.may_retry]
    fixable_failures = [failure for failure in turn.failures if failure.needs_person]
    if not limits.outage_backoff or not (temporary_failures or fixable_failures):
        return Finish("model_error", turn.failures[-1].error)
    requested_wait = max(failure.retry_after or 0 for failure in turn.failures)
    sleep = compute_outage_backoff(
        now - turn.troubled_at if turn.trouble else 0, requested_wait, limits.outage_backoff, jitter
    )
    if temporary_failures:
        return WaitOut("outage", temporary_failures[-1].error, sleep)
    return WaitOut("needs_person", fixable_failures[-1].error, sleep)


def compute_outage_backoff(outage_duration: int, requested_wait: int, max_wait: int, jitter: float) -> int:
    """Compute the backoff: about the duration of the outage, or the provider's wait if longer, up to `max_wait`."""
    backoff = max(FIRST_OUTAGE_BACKOFF, round(outage_duration * (0.5 + jitter / 2)))
    return min(max_wait, max(requested_wait, backoff))


def compute_backoff(failure: FailedAttempt, attempt_count: int, jitter: float) -> int:
    """Compute the backoff: exponential with jitter, or the provider's `retry-after` if longer."""
    backoff = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** (attempt_count - 1))
    requested_wait = min(MAX_RETRY_AFTER, failure.retry_after or 0)
    return max(requested_wait, round(backoff * (0.5 + jitter / 2)))


class Park(msgspec.Struct, frozen=True, gc=False):
    """Park the session until a wake, until `sleep` has passed, or until a signal in `wake_on`.

    `trouble` and its sentence say why the session cannot continue.
    """

    state: State
    sleep: int | None = None
    wake_on: tuple[str, ...] = ()
    trouble: str = ""
    sentence: str = ""


class End(msgspec.Struct, frozen=True, gc=False):
    state: State
    terminal_reason: TerminalReason


class NextTurn(msgspec.Struct, frozen=True, gc=False):
    pass


SessionStep = Park | End | NextTurn


def decide_after_turn(turn: Turn, limits: TurnLimits) -> SessionStep:
    """Decide whether a session parks, ends or takes another turn."""
    match turn.why:
        case "external_halt":
            return End("HALTED", "external_halt")
        case "cancelled":
            return End("CANCELLED", "cancelled")
        case "cost_cap_reached":
            return End("BUDGET_EXCEEDED", "cost_cap_reached")
        case "overrun":
            return End("BUDGET_EXCEEDED", "overrun")
        case "asked":
            return Park("WAITING_FOR_INPUT")
        case "ended" | "yielded" | "max_steps" | "timed_out" | "repetition" | "model_error" | None:
            return _decide_after_end(turn, limits)


def _decide_after_end(turn: Turn, limits: TurnLimits) -> SessionStep:
    match limits.kind:
        case "chat":
            return Park("WAITING_FOR_INPUT")
        case "task" | "hooked" | "proxied" | "gated":
            # Another program takes the turns of a hooked, proxied or gated session: none ends here.
            return _task_end(turn.why)
        case "autonomous":
            return _decide_after_autonomous_turn(turn, limits)


def _task_end(reason: TurnEnd | None) -> End:
    match reason:
        case "max_steps":
            return End("MAX_STEPS", "max_steps")
        case "timed_out":
            return End("TIMED_OUT", "timed_out")
        case "repetition":
            return End("ERROR", "repetition")
        case "model_error":
            return End("ERROR", "model_error")
        case _:
            return End("COMPLETED", "completed")


def _decide_after_autonomous_turn(turn: Turn, limits: TurnLimits) -> SessionStep:
    """Follow the model's yield. Without one, sleep twice as long each time; after bad turns in a row, back off."""
    yield_request = turn.yielded
    if yield_request is not None:
        if yield_request.mode == "shutdown":
            return End("COMPLETED", "completed")
        if yield_request.mode == "continue":
            return NextTurn()
        return Park(
            "SLEEPING", min(max(yield_request.sleep, limits.min_sleep), limits.max_sleep), yield_request.wake_early_if
        )
    if turn.trouble_count:
        backoff = find_backoff(turn.trouble_count)
        reason = turn.why if turn.why in ("max_steps", "timed_out", "repetition", "model_error") else "error"
        return End("ERROR", reason) if backoff is None else Park("SLEEPING", max(backoff, limits.min_sleep))
    return Park("SLEEPING", min(limits.max_sleep, limits.min_sleep * 2 ** min(max(turn.pause_count - 1, 0), 40)))
