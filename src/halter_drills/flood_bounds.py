"""What a runaway model must not pass: checked by plain SQL and by what the world outside has counted.

Nothing here is shared with the guardrails themselves; only the numbers that were promised are given.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.pacing import Autonomy
from halter_drills.checker import Fact
from halter_drills.runaways import Outside


@dataclass(frozen=True, slots=True)
class Promised:
    """The limits of a flood; caps in micro-dollars, a price in micro-dollars for each token."""

    limits: Autonomy
    session_cap: int
    day_cap: int
    price: float


@dataclass(frozen=True, slots=True)
class Left:
    """What a flood has left behind: its session's events and row, and what was spent by it."""

    events: Sequence[Fact]
    state: str
    wake_at: int | None
    over: bool
    spent: int
    spent_in_a_day: int


def passed(promised: Promised, left: Left, outside: Outside) -> Iterator[str]:
    """Say in sentences which of its limits a runaway has passed."""
    limits = promised.limits
    yield from too_many_turns(left.events, limits)
    yield from too_many_tokens(outside, limits.token_budget_per_hour)
    yield from too_much_money(promised, left, outside)
    yield from too_many_actions(outside.sent, limits.max_actions_per_minute)
    yield from wrong_sleeps(left.events, limits)
    yield from not_at_rest(left, outside.clock.now())


def too_many_turns(events: Sequence[Fact], limits: Autonomy) -> Iterator[str]:
    """Check that in no hour there were more turns than it may take without a sleep."""
    began = [event.at for event in events if event.kind == "turn_started"]
    most = most_within(began, HOUR)
    if most > limits.max_consecutive_turns:
        yield f"took {most} turns within an hour, and may take {limits.max_consecutive_turns} without a sleep."


def too_many_tokens(outside: Outside, budget: int) -> Iterator[str]:
    """Check hour by hour how many tokens the model was really asked for."""
    used: Counter[int] = Counter()
    for at, usage in outside.asked:
        used[at // HOUR] += usage.input_tokens + usage.output_tokens
    for hour, tokens in used.items():
        if tokens > budget:
            yield f"used {tokens} tokens in hour {hour}, and may use {budget}."


def too_much_money(promised: Promised, left: Left, outside: Outside) -> Iterator[str]:
    """Check what was spent against the caps, and against what the model really asked for."""
    if left.spent > promised.session_cap:
        yield f"spent {left.spent} of {promised.session_cap} micro-dollars."
    if left.spent_in_a_day > promised.day_cap:
        yield f"spent {left.spent_in_a_day} in a day, of {promised.day_cap} micro-dollars."
    yield from wrong_charges(promised.price, left.events, outside)


def wrong_charges(price: float, events: Sequence[Fact], outside: Outside) -> Iterator[str]:
    """Check what each answer was charged against what its model really used, rounded up to a micro-dollar."""
    requests = [event.facts["request"] for event in events if event.kind == "request_started"]
    used = dict(zip(requests, (usage for _, usage in outside.asked), strict=False))
    for event in events:
        facts = event.facts
        if event.kind == "request_settled" and facts["outcome"] == "ok":
            usage = used[facts["request"]]
            bill, charged = (usage.input_tokens + usage.output_tokens) * price, facts["charge"].get("usd", 0)
            if not bill <= charged < bill + 1:
                yield f"was charged {charged} micro-dollars for {facts['request']}, which cost {bill:g}."


def too_many_actions(sent: Sequence[int], most: int) -> Iterator[str]:
    """Check that in no minute more was really done than may be."""
    found = most_within(sent, MINUTE)
    if found > most:
        yield f"acted {found} times within a minute, and may do so {most} times."


def wrong_sleeps(events: Sequence[Fact], limits: Autonomy) -> Iterator[str]:
    """Check every sleep between turns; one in the middle of a turn, for money or a person, has its own end."""
    wrong = [slept for slept in _sleeps(events) if not limits.min_sleep <= slept <= limits.max_sleep]
    if wrong:
        shown = f"{min(wrong) / SECOND:g} to {max(wrong) / SECOND:g} s"
        yield f"was let sleep for too short or too long a time {len(wrong)} times: {shown}."


def _sleeps(events: Sequence[Fact]) -> Iterator[int]:
    in_turn = False
    for event in events:
        match event.kind:
            case "turn_started" | "turn_ended":
                in_turn = event.kind == "turn_started"
            case "session_parked" if not in_turn and event.facts["state"] == "SLEEPING":
                yield event.facts["wake_at"] - event.at
            case _:
                pass


def not_at_rest(left: Left, now: int) -> Iterator[str]:
    """Check that it is over, with its reason, or waits for a moment that is to come."""
    ends = [event.facts for event in left.events if event.kind == "session_ended"]
    if left.over and not (len(ends) == 1 and ends[0]["terminal_reason"]):
        yield "is over, and nobody knows why."
    if not left.over and (left.wake_at is None or left.wake_at < now):
        yield f"is {left.state} at the end of the day, and nothing will wake it."


def most_within(moments: Sequence[int], span: int) -> int:
    """Tell how many of these moments, which are in order, lie within one span of time at most."""
    first = most = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - span:
            first += 1
        most = max(most, last - first + 1)
    return most
