"""What a turn does next, and what a session does after a turn: two decisions without I/O, clock or chance of their own.

Before each step: a halt, a cancel, the time, the number of steps, in this order. The halt is looked for by the guard
itself, at the door of each request and call; what it found is known here by what became of them.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.brain import words
from halter.brain.repetition import Loop, stuck
from halter.brain.turn import Failure, Turn
from halter.core.clock import MINUTE, SECOND
from halter.core.messages import ToolCall
from halter.core.spec import OnCap
from halter.core.vocabulary import MessageReason, Outcome, SessionKind, State, TerminalReason, TurnEnd

MOST_CALLS: Final = 50
"""How many calls one step may ask for. More are not made, not even the first of them."""
NUDGES: Final = 1
"""How often a model that answers nothing is asked again."""
EXPECTED: Final = 3
"""How often a model is reminded of the form that its answer must have."""
OVERFLOWS: Final = 3
"""How often a history that its model finds too long is cut further."""
TROUBLES: Final = 3
"""After so many bad turns in a row an autonomous session gives up."""

BACK_OFF: Final = SECOND
LONGEST_BACK_OFF: Final = 30 * SECOND
LONGEST_RETRY_AFTER: Final = 60 * SECOND
"""What a provider asks to wait is waited for, up to this."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a turn. `models` is how many there are to ask, the fallbacks among them."""

    kind: SessionKind = "chat"
    timeout: int = 3600 * SECOND
    max_steps: int = 50
    max_retries: int = 3
    models: int = 1
    max_tokens_recoveries: int = 2
    max_repeated_tool_steps: int = 3
    on_cap: OnCap = "wrap_up"
    expects_output: bool = False
    min_sleep: int = SECOND
    max_sleep: int = 24 * 3600 * SECOND
    max_actions_per_minute: int = 0


class Think(msgspec.Struct, frozen=True):
    """Ask a model: the first, or the fallback of that number, after a pause."""

    model: int = 0
    after: int = 0


class Act(msgspec.Struct, frozen=True):
    """Make calls."""

    calls: tuple[ToolCall, ...]


class Refuse(msgspec.Struct, frozen=True):
    """Answer calls without making them: every call has a result, also one that is not made."""

    calls: tuple[ToolCall, ...]
    outcome: Outcome
    sentence: str


class Say(msgspec.Struct, frozen=True):
    """Tell the model something that no person is shown."""

    reason: MessageReason
    text: str


class Shrink(msgspec.Struct, frozen=True):
    """Leave out more of the history."""


class Finish(msgspec.Struct, frozen=True):
    """The turn is over."""

    why: TurnEnd
    sentence: str = ""


Step = Think | Act | Refuse | Say | Shrink | Finish


def next_step(turn: Turn, rules: Rules, now: int, *, near_budget: bool = False, chance: float = 1.0) -> Step:
    """Decide on the next step; `chance`, up to 1, spreads the retries of many."""
    late = rules.timeout > 0 and turn.time_worked(now) >= rules.timeout
    if turn.calls:
        return _with_calls(turn, late=late)
    if turn.halted:
        return Finish("external_halt", turn.refusal)
    stopped = _stopped_by_money(turn, rules) or _ended_by_the_model(turn, rules)
    if stopped is not None:
        return stopped
    if late:
        most = _counted(rules.timeout // SECOND, "second")
        return Finish("timed_out", f"The turn took longer than it may, which is {most}.")
    if turn.steps >= rules.max_steps:
        return Finish("max_steps", f"The turn took {_counted(turn.steps, 'step')}, which is the most that it may take.")
    return _going_on(turn, rules, near_budget=near_budget, chance=chance)


def allowed(actions: Sequence[int], now: int, most: int) -> int:
    """Tell how many calls may change something now, after those of the last minute; 0 stands for no limit."""
    if not most:
        return MOST_CALLS
    # What a clock that was set back has put far into the future is long over.
    return max(0, most - sum(abs(now - at) < MINUTE for at in actions))


def _counted(number: int, thing: str) -> str:
    return f"1 {thing}" if number == 1 else f"{number} {thing}s"


def _with_calls(turn: Turn, *, late: bool) -> Step:
    if turn.stop == "max_tokens":
        return Refuse(turn.calls, "invalid_arguments", words.CUT_CALL)
    if len(turn.calls) > MOST_CALLS:
        return Refuse(turn.calls, "rate_limited", words.too_many(len(turn.calls), MOST_CALLS))
    if turn.wrapping:
        return Refuse(turn.calls, "cost_cap_reached", words.NO_MORE_CALLS)
    if late:
        return Refuse(turn.calls, "cancelled", words.TIME_IS_UP)
    return Act(turn.calls)


def _stopped_by_money(turn: Turn, rules: Rules) -> Step | None:
    """A cap ends the turn, once its paid answers are kept and its calls have results; with last words, if so wished."""
    if turn.overrun:
        return Finish("overrun", "Something cost more than was held for it, and passed a cap.")
    if turn.wrapping:
        over = turn.stop is not None or bool(turn.failures) or turn.refusal != ""
        return Finish("cost_cap_reached", turn.refusal) if over else Think()
    if not turn.capped:
        return None
    return Say("wrap_up", words.WRAP_UP) if rules.on_cap == "wrap_up" else Finish("cost_cap_reached", turn.refusal)


def _ended_by_the_model(turn: Turn, rules: Rules) -> Step | None:
    if turn.yielded is not None:
        return Finish("yielded")
    if turn.asked:
        return Finish("asked")
    if turn.answered:
        return Finish("ended")
    if turn.expected > EXPECTED:
        return _no_output()
    return None if turn.stop is None else _after_words(turn, rules)


def _no_output() -> Finish:
    return Finish("model_error", f"The model gave no valid output, although it was asked again {EXPECTED} times.")


def _after_words(turn: Turn, rules: Rules) -> Step | None:
    """Decide what an answer without calls means."""
    if turn.stop == "max_tokens":
        if turn.recoveries >= rules.max_tokens_recoveries:
            return Finish("ended", "The answer was cut off at its longest.")
        return Say("cut_call", words.AGAIN) if turn.cut else Say("max_tokens_recovery", words.CONTINUE)
    if turn.stop == "refused":
        return Finish("model_error", "The model would not answer.")
    if rules.expects_output:
        if turn.expected >= EXPECTED:
            return _no_output()
        return Say("output_expected", words.OUTPUT_EXPECTED)
    if turn.spoke or (turn.prints and rules.kind == "autonomous"):
        return Finish("ended")
    return Say("empty_answer", words.EMPTY) if turn.nudges < NUDGES else Finish("model_error", words.SAID_NOTHING)


def _going_on(turn: Turn, rules: Rules, *, near_budget: bool, chance: float) -> Step:
    loop = stuck(turn.prints, rules.max_repeated_tool_steps)
    if loop is not None and len(turn.prints) > turn.hinted_at:
        return _in_circles(turn, loop)
    if turn.failures:
        return _after_failure(turn, rules, chance)
    if near_budget and not turn.warned:
        return Say("near_budget", words.NEAR_BUDGET)
    return Think()


def _in_circles(turn: Turn, loop: Loop) -> Step:
    return Finish("repetition", loop.sentence) if turn.hinted_at else Say("repetition", words.circles(loop.sentence))


def _after_failure(turn: Turn, rules: Rules, chance: float) -> Step:
    """Try again, try another model, or give up."""
    last = turn.failures[-1]
    if last.overflow and turn.overflows < OVERFLOWS:
        return Shrink()
    model = tries = 0
    for failure in turn.failures:
        tries += 1
        if not failure.may_retry or tries > rules.max_retries:
            model, tries = model + 1, 0
    if model >= rules.models:
        return Finish("model_error", last.error)
    return Think(model, back_off(last, tries, chance) if tries else 0)


def back_off(failure: Failure, tries: int, chance: float) -> int:
    """Tell how long to wait before the next attempt: longer each time, and not all at once after an outage."""
    own = min(LONGEST_BACK_OFF, BACK_OFF * 2 ** (tries - 1))
    asked = min(LONGEST_RETRY_AFTER, failure.retry_after or 0)
    return max(asked, round(own * (0.5 + chance / 2)))


class Park(msgspec.Struct, frozen=True):
    """The session rests, until something reaches it or for a while; signals of these names wake it before."""

    state: State
    sleep: int | None = None
    wake_on: tuple[str, ...] = ()


class End(msgspec.Struct, frozen=True):
    """The session is over."""

    state: State
    terminal_reason: TerminalReason


class Again(msgspec.Struct, frozen=True):
    """The session takes its next turn at once."""


After = Park | End | Again


def after_turn(turn: Turn, rules: Rules) -> After:
    """Decide what becomes of a session after a turn: the table of what stops a turn, by kind of session."""
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
            return _after_its_own_end(turn, rules)


def _after_its_own_end(turn: Turn, rules: Rules) -> After:
    match rules.kind:
        case "chat":
            return Park("WAITING_FOR_INPUT")
        case "task":
            return _task_end(turn.why)
        case "autonomous":
            return _after_autonomous(turn, rules)


def _task_end(why: TurnEnd | None) -> End:
    match why:
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


def _after_autonomous(turn: Turn, rules: Rules) -> After:
    """Go on as the model yielded; without a yield after a pause that doubles, and after trouble likewise."""
    chosen = turn.yielded
    if chosen is not None:
        if chosen.mode == "shutdown":
            return End("COMPLETED", "completed")
        if chosen.mode == "continue":
            return Again()
        return Park("SLEEPING", min(max(chosen.sleep, rules.min_sleep), rules.max_sleep), chosen.wake_early_if)
    if turn.troubles >= TROUBLES:
        reason = turn.why if turn.why in ("max_steps", "timed_out", "repetition", "model_error") else "error"
        return End("ERROR", reason)
    return Park("SLEEPING", min(rules.max_sleep, rules.min_sleep * 2 ** min(max(turn.pauses - 1, 0), 40)))
