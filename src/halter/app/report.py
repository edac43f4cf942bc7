"""What happened lately, in all agents together: a fold of rows, in which no model has a word."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from halter.app.budgets import current_budgets
from halter.core.codec import decode
from halter.core.events import ItemQuarantined, RunsDelayed, RunSkipped, RunStarted
from halter.core.money import NOTHING, BudgetRow, Usd, usd
from halter.core.ports import Query, Store
from halter.core.rows import DecisionRow, HaltRow, SessionRow
from halter.core.task_rows import FindingRow, ItemRow, NotificationRow

NEARLY: Final = 80
"""From so many percent of a cap on, a person is told."""


LISTED: Final = 50
"""More lines than these are counted, not listed."""


class Happened(msgspec.Struct, frozen=True):
    """An event of a trigger."""

    stream: str
    at: int
    kind: str
    version: int
    facts: bytes


class Spent(msgspec.Struct, frozen=True):
    """What was spent on one thing, by one agent, for one purpose, in micro-dollars as the store has it."""

    agent: str
    purpose: str
    name: str
    spends: int
    usd: int


class Proposals(msgspec.Struct, frozen=True):
    """How much waits to be kept or dismissed."""

    findings: int = 0
    memories: int = 0
    precedents: int = 0


class Waiting(msgspec.Struct, frozen=True):
    """A decision that waits for a person."""

    decision: str
    about: str
    session: str
    agent: str
    name: str
    asked_at: int
    expires_at: int


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """All the rows that a report is made of."""

    since: int
    until: int
    sessions: Sequence[SessionRow] = ()
    happened: Sequence[Happened] = ()
    left: Sequence[ItemRow] = ()
    findings: Sequence[FindingRow] = ()
    proposals: Proposals = Proposals()
    spent: Sequence[Spent] = ()
    budgets: Sequence[BudgetRow] = ()
    waiting: Sequence[Waiting] = ()
    decided: Sequence[DecisionRow] = ()
    halts: Sequence[HaltRow] = ()
    undelivered: Sequence[NotificationRow] = ()


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent did. Sessions that are over are counted by how they ended, the others by where they stand.

    `skipped` counts times of schedules by the reason why nothing was started, `delayed` says what waits and why.
    `findings` counts by severity, and there by what the review said.
    """

    agent: str
    began: int = 0
    ended: Mapping[str, int] = {}
    under_way: Mapping[str, int] = {}
    runs: int = 0
    skipped: Mapping[str, int] = {}
    delayed: tuple[str, ...] = ()
    quarantined: int = 0
    findings: Mapping[str, Mapping[str, int]] = {}
    spent_usd: Usd = NOTHING


class CapLine(msgspec.Struct, frozen=True):
    """What stands against a cap that counts now."""

    scope: str
    window: str
    cap_usd: Usd | None
    spent_usd: Usd
    held_usd: Usd

    @property
    def percent(self) -> int:
        """Tell how much of the cap is spent or held."""
        return 0 if not self.cap_usd else int(100 * (self.spent_usd + self.held_usd) // self.cap_usd)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two moments, and what needs a person now. Amounts are dollars.

    Of `decided` the newest are listed.
    """

    since: int
    until: int
    agents: tuple[AgentReport, ...] = ()
    spent_usd: Usd = NOTHING
    spent_by_purpose_usd: Mapping[str, Usd] = {}
    caps: tuple[CapLine, ...] = ()
    decided: tuple[DecisionRow, ...] = ()
    decided_count: int = 0
    waiting: tuple[Waiting, ...] = ()
    halts: tuple[HaltRow, ...] = ()
    undelivered: tuple[NotificationRow, ...] = ()
    ended_badly: tuple[str, ...] = ()
    needs_you: tuple[str, ...] = ()


async def gather(store: Store, since: int, until: int) -> Gathered:
    """Ask for all that a report is made of."""
    params: Mapping[str, Any] = {"since": since}
    (proposals,) = await store.ask(Query("proposals_open", Proposals))
    return Gathered(
        since=since,
        until=until,
        sessions=await store.ask(Query("sessions_since", SessionRow, params)),
        happened=await store.ask(Query("triggered_since", Happened, params)),
        left=await store.ask(Query("items_left", ItemRow)),
        findings=await store.ask(Query("findings_since", FindingRow, params)),
        proposals=proposals,
        spent=await store.ask(Query("spent_by_purpose", Spent, params)),
        budgets=await current_budgets(store, until),
        waiting=await store.ask(Query("open_decisions", Waiting, {"now": until})),
        decided=await store.ask(Query("decided_since", DecisionRow, params)),
        halts=await store.ask(Query("all_halts", HaltRow)),
        undelivered=await store.ask(Query("undelivered", NotificationRow, params)),
    )


def report(found: Gathered) -> Report:
    """Make the report. The same rows make the same one."""
    spent: Counter[str] = Counter()
    for line in found.spent:
        spent[line.purpose] += line.usd
    caps = tuple(_caps(found.budgets, found.until))
    waiting = tuple(one for one in found.waiting if one.expires_at > found.until)
    return Report(
        since=found.since,
        until=found.until,
        agents=tuple(_agents(found)),
        spent_usd=usd(spent.total()),
        spent_by_purpose_usd={purpose: usd(micros) for purpose, micros in spent.most_common()},
        caps=caps,
        decided=tuple(found.decided[-LISTED:]),
        decided_count=len(found.decided),
        waiting=waiting,
        halts=tuple(row for row in found.halts if row.halted or row.at >= found.since),
        undelivered=tuple(found.undelivered),
        ended_badly=tuple(_listed(list(_badly(found)))),
        needs_you=tuple(_listed(list(_needs_you(found, waiting, caps)))),
    )


def _listed(sentences: Sequence[str]) -> Iterable[str]:
    yield from sentences[:LISTED]
    if len(sentences) > LISTED:
        yield f"and {len(sentences) - LISTED:,} more."


def _agents(found: Gathered) -> Iterable[AgentReport]:
    sessions, runs = _by_agent(found), _runs(found.happened)
    findings: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in found.findings:
        findings[row.agent][row.severity][row.review or "not looked at"] += 1
    spent: Counter[str] = Counter()
    for line in found.spent:
        spent[line.agent] += line.usd
    for name in sorted({*sessions, *runs, *findings, *spent}):
        made = _sessions(sessions.get(name, ()), found.since)
        yield msgspec.structs.replace(
            runs.get(name, AgentReport(agent=name)),
            **made,
            findings={severity: dict(counts) for severity, counts in findings.get(name, {}).items()},
            spent_usd=usd(spent[name]),
        )


def _by_agent(found: Gathered) -> Mapping[str, Sequence[SessionRow]]:
    """Sort sessions by agent. A chat that somebody left open long ago is nothing that happened lately."""
    rows: dict[str, list[SessionRow]] = defaultdict(list)
    for row in found.sessions:
        if row.unattended or row.ended_at is not None or row.started_at >= found.since:
            rows[row.agent].append(row)
    return rows


def _sessions(rows: Sequence[SessionRow], since: int) -> dict[str, Any]:
    over = Counter(f"{row.state}, {row.terminal_reason}" for row in rows if row.ended_at is not None)
    under_way = Counter[str](row.state for row in rows if row.ended_at is None)
    return {
        "began": sum(row.started_at >= since for row in rows),
        "ended": dict(over.most_common()),
        "under_way": dict(under_way.most_common()),
    }


def _runs(happened: Sequence[Happened]) -> Mapping[str, AgentReport]:
    """Tell what triggers did, by agent."""
    made: dict[str, AgentReport] = {}
    for each in happened:
        agent = each.stream.removeprefix("trigger:").partition("/")[0]
        made[agent] = _ran(made.get(agent, AgentReport(agent=agent)), each)
    return made


def _ran(so_far: AgentReport, each: Happened) -> AgentReport:
    match decode(each.kind, each.version, each.facts):
        case RunStarted():
            return msgspec.structs.replace(so_far, runs=so_far.runs + 1)
        case RunSkipped() as event:
            skipped = {**so_far.skipped, event.why: so_far.skipped.get(event.why, 0) + event.count}
            return msgspec.structs.replace(so_far, skipped=skipped)
        case RunsDelayed() as event:
            words = f"{event.trigger} ({event.why}): {event.sentence}"
            return msgspec.structs.replace(so_far, delayed=tuple(dict.fromkeys((*so_far.delayed, words))))
        case ItemQuarantined():
            return msgspec.structs.replace(so_far, quarantined=so_far.quarantined + 1)
        case _:
            return so_far


def _caps(budgets: Sequence[BudgetRow], now: int) -> Iterable[CapLine]:
    """List the caps that count now. Those of single sessions are told where these are."""
    for row in budgets:
        end = row.ends_at
        if row.unit == "usd" and not row.scope.startswith("session:") and (end is None or end > now):
            cap = None if row.cap is None else usd(row.cap)
            yield CapLine(row.scope, row.window, cap, usd(row.spent), usd(row.held))


def _badly(found: Gathered) -> Iterable[str]:
    for row in found.sessions:
        if row.ended_at is not None and row.ended_at >= found.since and row.state != "COMPLETED":
            yield f"{row.session}: {row.state}, {row.terminal_reason}{_followed(row, found.sessions)}"


def _followed(row: SessionRow, sessions: Sequence[SessionRow]) -> str:
    """Name the session that went on where one had used up its cap."""
    if row.kind != "autonomous" or row.state != "BUDGET_EXCEEDED":
        return ""
    later = [one for one in sessions if (one.agent, one.kind) == (row.agent, row.kind)]
    after = [one for one in later if one.started_at >= (row.ended_at or 0) and one.session != row.session]
    return f"; {min(after, key=lambda one: one.started_at).session} went on" if after else ""


def _needs_you(found: Gathered, waiting: Sequence[Waiting], caps: Sequence[CapLine]) -> Iterable[str]:
    """Say what waits for a person, and how it goes on."""
    for one in waiting:
        more = " --cap AMOUNT" if one.about == "cap_raise" else ""
        yield f"{one.agent}: {one.about} of {one.name}: halter approve {one.decision}{more}"
    for row in found.sessions:
        yield from _of_a_session(row)
    for item in found.left:
        yield f"{item.trigger}: {item.name} is left to you after {item.attempts} attempts: {item.sentence}"
    for halt in found.halts:
        if halt.halted and not halt.cancels:
            yield f"{halt.scope} was halted by {halt.by}: halter resume {halt.scope}"
    for told in found.undelivered:
        if told.gave_up:
            yield f"{told.agent}: nobody could be told over {told.channel}: {told.error}"
    for cap in caps:
        if cap.percent >= NEARLY:
            yield f"{cap.percent} % of the cap of {cap.scope} ({cap.window or 'its life'}) are spent or held."
    kinds = (("finding", found.proposals.findings), ("memory", found.proposals.memories))
    for kind, count in (*kinds, ("precedent", found.proposals.precedents)):
        if count:
            yield f"To be kept or dismissed, {kind}: {count}."


def _of_a_session(row: SessionRow) -> Iterable[str]:
    if row.ended_at is not None or not row.unattended:
        return
    if row.state == "WAITING_FOR_INPUT":
        yield f"{row.session} waits for a word: halter chat"
    elif row.state == "PAUSED":
        yield f"{row.session} is paused: halter on {row.agent}, or a message, lets it go on."
