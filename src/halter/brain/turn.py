"""Where a turn stands: everything that the next step is decided by, and nothing else.

It is made of the session's events, in whatever process they happened: what is told here is told in the same words
whether it has just been committed or is read again after a crash.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.brain.repetition import fingerprint
from halter.core.clock import SECOND
from halter.core.durations import parse_duration
from halter.core.errors import ConfigError
from halter.core.events import Yielded
from halter.core.messages import Reply, Stop, ToolCall, ToolResult
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd

ASK_USER: Final = "ask_user"
FINAL_ANSWER: Final = "final_answer"
YIELD: Final = "yield"
"""The tools that end a turn. Only a call of them that came out `ok` does; what a model says never does."""

TROUBLE: Final[frozenset[TurnEnd]] = frozenset(("max_steps", "timed_out", "repetition", "model_error"))
"""The ends of a turn that are nobody's wish. An autonomous session rests after one, and gives up after three."""

OVERFLOW: Final = "ContextOverflow"
"""The kind of an error that says: the prompt was too long for this model."""


class Failure(msgspec.Struct, frozen=True):
    """An attempt to ask a model that brought no answer."""

    error: str
    may_retry: bool = False
    retry_after: int | None = None

    @property
    def overflow(self) -> bool:
        """Tell whether less text would have helped."""
        return self.error.startswith(OVERFLOW)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn, and what a session remembers from one to the next.

    `heard` is how far the inbox was read to the model. `attempts` counts how often the request of this step was made or
    refused, which names the next attempt; `failures` are those of it that failed. `worked` are the microseconds spent
    before `since`, the moment it was last taken up; while it rests there is none. `calls` have no result yet. `prints`
    are the steps that made calls. `troubles` counts turns in a row that ended badly, `pauses` those without a yield.
    An end is `settled` when the session rests or is over because of it.

    What follows is for a session that runs by itself. Notifications up to `cleared` were shown by a turn that came to
    its end. `skips` counts turns in a row that its gate did not find worth it, `brisk` those without a sleep between.
    `idle` is how long it has been awake for nothing; this turn is not, if it is `active`. While it is `held` back, it
    is asleep, not idle.
    """

    number: int = 0
    over: bool = True
    heard: int = 0
    steps: int = 0
    attempts: int = 0
    failures: tuple[Failure, ...] = ()
    worked: int = 0
    since: int | None = None
    seen_at: int = 0
    stop: Stop | None = None
    spoke: bool = False
    calls: tuple[ToolCall, ...] = ()
    cut: bool = False
    prints: tuple[str, ...] = ()
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
    asked: bool = False
    answered: bool = False
    yielded: Yielded | None = None
    why: TurnEnd | None = None
    sentence: str = ""
    troubles: int = 0
    pauses: int = 0
    settled: bool = True
    resumed: bool = False
    cleared: int = 0
    skips: int = 0
    brisk: int = 0
    idle: int = 0
    active: bool = False
    held: bool = False

    def opened(self, number: int, heard: int, at: int, *, quiet: bool = False) -> "Turn":
        """Begin the next turn: what counts per turn begins anew."""
        return Turn(
            number=number,
            over=False,
            heard=heard,
            since=at,
            seen_at=at,
            warned=self.warned,
            troubles=self.troubles,
            pauses=self.pauses,
            cleared=self.cleared,
            brisk=self.brisk,
            idle=self.idle,
            active=not quiet,
        )

    def skipped(self, skips: int, at: int) -> "Turn":
        """Take in that the gate found nothing worth a turn."""
        return msgspec.structs.replace(self, skips=skips, brisk=0, held=True, seen_at=at)

    def held_back(self, at: int) -> "Turn":
        """Take in that a guardrail puts the session to sleep."""
        return msgspec.structs.replace(self, brisk=0, held=True, seen_at=at)

    def thought(self, reply: Reply, calls: tuple[ToolCall, ...], at: int) -> "Turn":
        """Take in an answer. What was tried to get it is of no more interest."""
        return msgspec.structs.replace(
            self,
            steps=self.steps + 1,
            attempts=0,
            failures=(),
            overflows=0,
            stop=reply.stop,
            spoke=bool(reply.text.strip()),
            calls=calls,
            cut=False,
            seen_at=at,
        )

    def tried(self, attempt: int, at: int) -> "Turn":
        """Take in an attempt that came to nothing and proves nothing: somebody stopped the process."""
        return msgspec.structs.replace(self, attempts=attempt + 1, seen_at=at)

    def failed(self, attempt: int, failure: Failure, at: int) -> "Turn":
        """Take in an attempt that failed."""
        return msgspec.structs.replace(self, attempts=attempt + 1, failures=(*self.failures, failure), seen_at=at)

    def refused(self, attempt: int, outcome: Outcome, sentence: str, at: int) -> "Turn":
        """Take in a brake that refused the request. What only this model may not do, another one may."""
        if outcome not in ("external_halt", "cost_cap_reached"):
            return self.failed(attempt, Failure(sentence), at)
        return msgspec.structs.replace(
            self,
            attempts=attempt + 1,
            halted=self.halted or outcome == "external_halt",
            capped=self.capped or outcome == "cost_cap_reached",
            refusal=sentence,
            seen_at=at,
        )

    def uncapped(self) -> "Turn":
        """Forget that a cap refused a request: it is made again, or was let through. Last words stay the last."""
        return self if self.wrapping else msgspec.structs.replace(self, capped=False, refusal="")

    def acted(self, calls: Sequence[ToolCall], results: Sequence[ToolResult], at: int) -> "Turn":
        """Take in the results of all calls of a step; of several yields the last one counts."""
        done = {result.id for result in results if result.outcome == "ok"}
        verbs = {call.tool: call for call in calls if call.id in done}
        capped = next((result.text for result in results if result.outcome == "cost_cap_reached"), "")
        return msgspec.structs.replace(
            self,
            calls=(),
            stop=self.stop if self.wrapping or self.stop == "max_tokens" else None,
            cut=self.stop == "max_tokens",
            capped=self.capped or capped != "",
            refusal=self.refusal or capped,
            prints=(*self.prints, fingerprint(calls, results)),
            halted=self.halted or any(result.outcome == "external_halt" for result in results),
            active=self.active or any(call.tool not in (ASK_USER, FINAL_ANSWER, YIELD) for call in calls),
            asked=ASK_USER in verbs,
            answered=FINAL_ANSWER in verbs,
            expected=self.expected + (FINAL_ANSWER not in verbs and any(call.tool == FINAL_ANSWER for call in calls)),
            yielded=yielded(verbs[YIELD].arguments) if YIELD in verbs else None,
            seen_at=at,
        )

    def told(self, reason: MessageReason, at: int) -> "Turn":
        """Take in what the runtime said to the model: each reason has a limit of its own."""
        told = msgspec.structs.replace(self, stop=None, seen_at=at)
        match reason:
            case "max_tokens_recovery" | "cut_call":
                return msgspec.structs.replace(told, recoveries=self.recoveries + 1)
            case "repetition":
                return msgspec.structs.replace(told, hinted_at=len(self.prints))
            case "empty_answer":
                return msgspec.structs.replace(told, nudges=self.nudges + 1)
            case "output_expected":
                return msgspec.structs.replace(told, expected=self.expected + 1)
            case "near_budget":
                return msgspec.structs.replace(told, warned=True)
            case "wrap_up":
                return msgspec.structs.replace(told, wrapping=True, failures=(), refusal="")

    def shrunk(self, at: int) -> "Turn":
        """Take in that older messages were left out because a model found the prompt too long."""
        if not self.failures or not self.failures[-1].overflow:
            return msgspec.structs.replace(self, seen_at=at)
        return msgspec.structs.replace(self, failures=self.failures[:-1], overflows=self.overflows + 1, seen_at=at)

    def hopeless(self) -> "Turn":
        """Take in that nothing more can be left out: what failed for being too long has failed for good."""
        *before, last = self.failures
        final = Failure(f"Nothing more can be left out. {last.error}")
        return msgspec.structs.replace(self, failures=(*before, final))

    def reopened(self, at: int) -> "Turn":
        """Take in that a person lets a session go on that was over."""
        return msgspec.structs.replace(self, settled=True, resumed=True, troubles=0, pauses=0, seen_at=at)

    def ended(self, why: TurnEnd, sentence: str, chosen: Yielded | None, at: int, min_sleep: int = SECOND) -> "Turn":
        """Take in the end of the turn. Who asks for no more than the shortest sleep has not slept."""
        slept = chosen is not None and chosen.mode == "sleep" and chosen.sleep > min_sleep
        return msgspec.structs.replace(
            self,
            over=True,
            settled=False,
            why=why,
            sentence=sentence,
            yielded=chosen,
            worked=self.time_worked(at),
            since=None,
            troubles=self.troubles + 1 if why in TROUBLE else 0,
            pauses=0 if why in ("yielded", "asked") else self.pauses + 1,
            cleared=self.cleared if why in TROUBLE else self.heard,
            brisk=0 if slept else self.brisk + 1,
            idle=0 if self.active else self.idle + self.time_worked(at),
            seen_at=at,
        )

    def rested(self, at: int) -> "Turn":
        """Stop the clock: nothing counts while a session sleeps or waits for a person."""
        return msgspec.structs.replace(self, worked=self.time_worked(at), since=None, settled=self.over, seen_at=at)

    def waited(self, duration: int) -> "Turn":
        """Leave out of the turn's time what somebody else took."""
        return msgspec.structs.replace(self, since=None if self.since is None else self.since + duration)

    def woken(self, at: int, *, takeover: bool) -> "Turn":
        """Let the clock run on; the time in which nobody owned the session does not count either."""
        worked = self.time_worked(self.seen_at) if takeover else self.time_worked(at)
        # A pause that nobody chose is no sleep.
        paused = at - self.seen_at if self.over and self.why not in ("yielded", "asked") and not self.held else 0
        idle = self.idle + (0 if takeover else max(0, paused))
        return msgspec.structs.replace(self, worked=worked, idle=idle, since=None if self.over else at, seen_at=at)

    def time_worked(self, now: int) -> int:
        """Tell for how long the turn has worked."""
        return self.worked if self.since is None else self.worked + max(0, now - self.since)


LONGEST_SLEEP: Final = 100 * 365 * 24 * 3600
"""Seconds: no sleep that anybody means is longer, and every store can keep it."""


def seconds(sleep: float | str) -> float | None:
    """Read a sleep as a model writes it: a number of seconds, or a duration as in `15m`; None if it is neither."""
    try:
        written = parse_duration(sleep) / SECOND if isinstance(sleep, str) else sleep
    except (ConfigError, OverflowError):
        return None
    return min(written, LONGEST_SLEEP) if written >= 0 else None


class _Yield(msgspec.Struct, frozen=True):
    mode: str = "continue"
    sleep: float | str = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""


def yielded(arguments: str) -> Yielded:
    """Read what a call of `yield` asked for. The tool has checked it; one that has not shuts nothing down."""
    try:
        read = msgspec.json.decode(arguments or "{}", type=_Yield, strict=False)
    except (msgspec.DecodeError, ValueError):
        read = _Yield()
    mode = read.mode if read.mode in ("sleep", "shutdown") else "continue"
    return Yielded(mode, round((seconds(read.sleep) or 0) * SECOND), read.wake_early_if, read.reason)
