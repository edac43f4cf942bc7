"""A task for later: what was understood is put before a person, and nothing of it exists before they agree."""

import re
from collections.abc import Sequence
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from halter.app.agent_context import AgentContext
from halter.app.forecasts import MONTH, balances_of, mean_cost, runs_of, shown_most, within_policy
from halter.app.runs import digest_of
from halter.app.triggered import made_of
from halter.autonomy.forecast import Clockwork, forecast, least
from halter.brain.route import Scheduled
from halter.core.money import shown
from halter.core.ports import Query
from halter.core.rows import DecisionRow
from halter.core.schedules import Timing, explained, next_after
from halter.core.task_rows import TriggerRow
from halter.core.tasks import Schedule, trigger_id
from halter.core.wall import shown_at, zone_of
from halter.guard.approvals import Planned, about_trigger, ask

NEXT: Final = 3
"""So many of its next times a person is shown."""
LONGEST: Final = 8_000
"""A longer task is no sentence that somebody typed."""
WORDS: Final = 4
"""Of so many words of the task its name is made."""


class Asked(msgspec.Struct, frozen=True):
    """What became of it: the decision that waits now, or none; and what the person is told."""

    decision: str
    sentence: str


async def propose(speaking: AgentContext, said: Scheduled) -> Asked:
    """Ask a person whether a task may be done at certain times."""
    against = _against(speaking, said)
    if against:
        return Asked("", against)
    agent, now = speaking.agent.policy.name, speaking.app.clock.now()
    name = await _free_name(speaking, said.prompt)
    schedule = Schedule(name=name, prompt=said.prompt, timezone=said.timing.timezone)
    planned = Planned(
        shown=words(agent, said, await _cost(speaking, schedule, said, now), now),
        trigger=trigger_id(agent, name),
        type="schedule",
        digest=digest_of(schedule),
        made=msgspec.Raw(made_of(schedule, said.timing)),
    )
    question = about_trigger(agent, planned, _lasts(speaking, said.timing, now))
    await speaking.store.commit(ask(question))
    how = f"Nothing is planned yet. Say approve, or: halter approve {question.decision}"
    return Asked(question.decision, f"{planned.shown}\n{how}")


def _against(speaking: AgentContext, said: Scheduled) -> str:
    """Say why it cannot be planned, if so."""
    if len(said.prompt) > LONGEST:
        return f"That is too long for a schedule: say it in at most {LONGEST:,} characters."
    if speaking.gatehouse().redacted(said.prompt) != said.prompt:
        return "That holds a secret in plain text, so it was not planned: write ${secret:NAME} instead."
    if next_after(said.timing, speaking.app.clock.now()) is None:
        return f"That is over: {explained(said.timing)} does not come again."
    return ""


def _lasts(speaking: AgentContext, timing: Timing, now: int) -> int:
    """Tell how long a yes may be waited for; after the moment that is meant, it would come too late."""
    most = speaking.agent.policy.approval_expiry
    return most if timing.at is None else min(most, timing.at - now)


async def _free_name(speaking: AgentContext, prompt: str) -> str:
    """Name it after its task, as nothing of the agent is or was called."""
    found = re.findall(r"[a-z0-9]+", prompt.lower())[:WORDS]
    name = "-".join(found)[:40].strip("-") or "task"
    number = 1
    while await _taken(speaking, name if number == 1 else f"{name}-{number}"):
        number += 1
    return name if number == 1 else f"{name}-{number}"


async def _taken(speaking: AgentContext, name: str) -> bool:
    identity = trigger_id(speaking.agent.policy.name, name)
    if speaking.agent.tasks.trigger(name) is not None:
        return True
    if await speaking.store.ask(Query("trigger", TriggerRow, {"trigger": identity})):
        return True
    return bool(await speaking.store.ask(Query("decision", DecisionRow, {"decision": f"schedule/{identity}"})))


async def _cost(speaking: AgentContext, schedule: Schedule, said: Scheduled, now: int) -> str:
    """Say what it costs at most, and what earlier tasks cost."""
    store = speaking.store
    policy = await within_policy(store, speaking.agent.policy)
    work = Clockwork(agent=policy.name, caps=policy.caps, schedules=(runs_of(policy, schedule, said.timing),))
    found = forecast(work, await balances_of(store, work, now), now, now + MONTH)
    run = least([policy.caps.session.max_cost_usd, found.most])
    monthly = f" and {shown_most(found.clock)} in thirty days" if said.recurring else ""
    mean = await mean_cost(store, policy.name, now)
    earlier = "" if mean is None else f"; its last {mean.samples} tasks cost {shown(mean.usd)} on average"
    return f"{shown_most(run)} a run{monthly}, bounded by every cap{earlier}"


def words(agent: str, said: Scheduled, cost: str, now: int) -> str:
    """Show what was understood, when it would run next, and what it will cost."""
    times = list(_next(said.timing, now))
    zone = said.timing.timezone
    lines = [
        f"{agent} would do this by itself: {said.prompt}",
        f"When: {explained(said.timing)}",
        f"Next: {', '.join(_written(at, zone) for at in times)}{'' if said.recurring else ', and not again'}",
        f"Cost: {cost}",
    ]
    return "\n".join(lines)


def _next(timing: Timing, now: int) -> Sequence[int]:
    found: list[int] = []
    after: int | None = now
    while len(found) < NEXT and (after := next_after(timing, after)) is not None:
        found.append(after)
    return found


def _written(at: int, zone: str) -> str:
    return f"{shown_at(at, zone_of(zone) or ZoneInfo('UTC')):%a %Y-%m-%d %H:%M}"
