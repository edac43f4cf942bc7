"""What can be asked of the API without changing anything."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from fastapi import Depends, Query
from starlette.responses import StreamingResponse

from halter.app.desk import Desk, Who, auditing, left, looking, money, rules, steering, triggers, waiting
from halter.app.desk import policy as policies
from halter.app.desk import workers as working
from halter.app.desk.always import as_object_with_rules
from halter.app.desk.auditing import Wanted
from halter.app.keeping import Left
from halter.app.objects import as_object
from halter.app.planned import Plan
from halter.app.report import Report
from halter.core.clock import DAY
from halter.core.rows import HaltRow, RuleRow, SessionRow
from halter.server.answers import Name, Words, desk_of, encoded
from halter.state.audit import AuditEntry, entry
from halter.state.receipt import Receipt
from halter.state.receipt_lines import TurnLine

LATEST: Final = 1 << 53
"""No moment and no number that anybody means is larger."""
MOST: Final = 1000

AtDesk = Annotated[Desk, Depends(desk_of)]
Moment = Annotated[int, Query(ge=0, le=LATEST, description="Microseconds since 1970")]
Most = Annotated[int, Query(ge=1, le=MOST)]


class Home(msgspec.Struct, frozen=True):
    """All that somebody wants to see first. `report` is about the last day."""

    who: Who
    needs_you: Sequence[dict[str, Any]]
    halts: Sequence[HaltRow]
    fleet: Sequence[looking.AgentLine]
    budgets: money.Budgets
    report: Report


async def whoami(desk: AtDesk) -> Who:
    """Tell who you are here, what you may do, and which agents you see (all, where none is named)."""
    return desk.who


async def home(desk: AtDesk) -> Home:
    """Tell what needs you, what is halted, how the fleet stands, what was spent, and what the last day brought."""
    return Home(
        desk.who,
        await decisions(desk),
        await steering.halts_now(desk),
        await looking.fleet(desk),
        await money.budgets(desk),
        await looking.report(desk, max(0, desk.app.clock.now() - DAY)),
    )


async def fleet(desk: AtDesk) -> Sequence[looking.AgentLine]:
    """Tell how every agent stands."""
    return await looking.fleet(desk)


async def workers(desk: AtDesk, *, everything: bool = False) -> Sequence[working.Worker]:
    """List the processes that run agents and those that died within the hour, or all that are known."""
    return await working.workers(desk, everything=everything)


async def sessions(desk: AtDesk, agent: Name = "", limit: Most = 50) -> Sequence[SessionRow]:
    """List sessions, the newest first."""
    return await looking.sessions(desk, agent, limit)


async def session(desk: AtDesk, session: Name) -> SessionRow:
    """Tell where a session stands."""
    return await desk.session(session)


async def events(
    desk: AtDesk,
    session: Name,
    *,
    after: Annotated[int, Query(ge=0, le=LATEST)] = 0,
    limit: Most = MOST,
    inbox: bool = False,
) -> Sequence[dict[str, Any]]:
    """Read the events of a session in their order, or what came into its inbox; page on by the last `seq`."""
    return [as_object(stored) for stored in await looking.events(desk, session, after, limit, inbox=inbox)]


async def receipt(desk: AtDesk, session: Name) -> Receipt:
    """Make the receipt of a session."""
    return await looking.receipt(desk, session)


async def turns(desk: AtDesk, session: Name) -> Sequence[TurnLine]:
    """List the turns of a session."""
    return (await looking.receipt(desk, session)).turns


async def hot_state(desk: AtDesk, session: Name) -> looking.HotState:
    """Tell what a session knew when that was last kept."""
    return await looking.hot_state(desk, session)


async def decisions(desk: AtDesk) -> Sequence[dict[str, Any]]:
    """List what waits for a person, the longest waiting first."""
    return [as_object_with_rules(one) for one in await waiting.waiting(desk)]


async def halts(desk: AtDesk) -> Sequence[HaltRow]:
    """List what is halted."""
    return await steering.halts_now(desk)


async def budgets(desk: AtDesk, *, everything: bool = False) -> money.Budgets:
    """List every cap that counts now, or that ever did, with what is spent and held against it."""
    return await money.budgets(desk, everything=everything)


async def policy(desk: AtDesk) -> policies.StorePolicy:
    """Tell the policy that binds every process on the store, who adopted it, and when. No digest: there is none."""
    return await policies.show(desk)


async def spending(
    desk: AtDesk, since: Moment, until: Moment, parts: Annotated[int, Query(ge=1, le=1000)] = 48
) -> Sequence[looking.Part]:
    """Tell what each agent spent between two moments, in equal parts of that time."""
    return await looking.spending(desk, since, until, parts)


async def plans(desk: AtDesk, agent: Name = "") -> Sequence[Plan]:
    """List schedules, watches and webhooks."""
    return await triggers.plans(desk, agent)


async def findings(desk: AtDesk, session: Name = "", limit: Most = 50) -> Sequence[Left]:
    """List what sessions found, the newest first."""
    return await left.findings(desk, session, limit)


async def proposals(desk: AtDesk) -> Sequence[Left]:
    """List what sessions propose to be kept, the newest first."""
    return await left.proposals(desk)


async def always(desk: AtDesk) -> Sequence[RuleRow]:
    """List the rules by which somebody said "always", also those that are over."""
    return await rules.rules(desk)


async def report(desk: AtDesk, since: Moment = 0) -> Report:
    """Tell what happened since a moment (without one, in the last day), and what needs somebody."""
    return await looking.report(desk, since or max(0, desk.app.clock.now() - DAY))


def _wanted(
    since: Moment = 0,
    until: Moment | None = None,
    agent: Name = "",
    tool: Name = "",
    outcome: Name = "",
    session: Name = "",
    text: Words = "",
) -> Wanted:
    return Wanted(since=since, until=until, agent=agent, tool=tool, outcome=outcome, session=session, text=text)


AuditWanted = Annotated[Wanted, Depends(_wanted)]


async def audit(desk: AtDesk, wanted: AuditWanted, limit: Most = 100) -> Sequence[AuditEntry]:
    """Search the audit, the newest first; page on with `until`."""
    found: list[AuditEntry] = []
    async with aclosing(auditing.newest(desk, wanted)) as rows:
        async for row in rows:
            found.append(entry(row))
            if len(found) == limit:
                break
    return found


async def export_audit(desk: AtDesk, wanted: AuditWanted) -> StreamingResponse:
    """Export the audit, the oldest first: one JSON object to a line."""
    headers = {"Content-Disposition": 'attachment; filename="halter-audit.jsonl"'}
    return StreamingResponse(_lines(desk, wanted), 200, headers, "application/x-ndjson")


async def _lines(desk: Desk, wanted: Wanted) -> AsyncGenerator[bytes]:
    async with aclosing(auditing.audit(desk, wanted)) as rows:
        async for row in rows:
            yield encoded(entry(row)) + b"\n"
