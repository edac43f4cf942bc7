"""Every operation on a store, in the order of the reference.

The HTTP API serves each under its `path`. A CLI command uses the function directly (`cli/command.py`), so that it does
not load all operations.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from halter.core.rows import HaltRow
from halter.operations import (
    agents,
    artifacts,
    backtest,
    control,
    decisions,
    fleet,
    forks,
    journal,
    messages,
    money,
    queries,
    rules,
    status,
    top,
)
from halter.operations.actor import Actor, Operation, Principal, Role
from halter.operations.report import Report
from halter.runtime.needs import Need


class Home(msgspec.Struct, frozen=True):
    """The overview for an operator. `report` covers the last day."""

    who: Principal
    needs_you: Sequence[Need]
    halts: Sequence[HaltRow]
    fleet: Sequence[queries.AgentLine]
    budgets: money.Budgets
    report: Report


async def whoami(actor: Actor) -> Principal:
    """Show your name, your role and the agents that you see (all, if none is listed)."""
    return actor.principal


async def show_home(actor: Actor) -> Home:
    """Show what needs you, halts, the fleet, budgets, and a report of the last day."""
    return Home(
        actor.principal,
        await queries.read_needs(actor),
        await control.halts_now(actor),
        await queries.fleet(actor),
        await money.budgets(actor),
        await queries.report(actor),
    )


READS: Final = (
    Operation(name="whoami", path="/whoami", run=whoami),
    Operation(name="home", path="/home", run=show_home),
    Operation(name="status", command="status", path="/status", run=status.read_status),
    Operation(name="top", command="status --live", path="/top", run=top.top),
    Operation(name="fleet", path="/fleet", run=queries.fleet),
    Operation(name="workers", path="/workers", run=fleet.workers),
    Operation(name="sessions", command="sessions", path="/sessions", run=queries.sessions),
    Operation(name="session", path="/sessions/{session}", run=queries.session),
    Operation(name="events", command="show", path="/sessions/{session}/events", run=queries.event_objects),
    Operation(name="receipt", command="show --receipt", path="/sessions/{session}/receipt", run=queries.receipt),
    Operation(name="turns", path="/sessions/{session}/turns", run=queries.turns),
    Operation(name="hot-state", path="/sessions/{session}/hot-state", run=queries.hot_state),
    Operation(name="inbox", command="inbox", path="/inbox", run=queries.read_needs),
    Operation(name="needs", command="inbox", path="/needs", run=queries.read_needs),
    Operation(name="notices", command="inbox", path="/notices", run=queries.read_notices),
    Operation(name="decisions", path="/decisions", run=decisions.open_decisions),
    Operation(name="halts", path="/halts", run=control.halts_now),
    Operation(name="budgets", command="budget show", path="/budgets", run=money.budgets),
    Operation(name="policy", command="policy show", path="/policy", run=money.show),
    Operation(name="prices", command="prices show", path="/prices", run=money.read_prices),
    Operation(
        name="backtest",
        command="policy backtest",
        path="/agents/{agent}/backtest",
        run=backtest.backtest_policy,
    ),
    Operation(
        name="suggest-policy", command="policy suggest", path="/agents/{agent}/policy", run=backtest.suggest_policy
    ),
    Operation(name="spending", path="/spending", run=queries.spending),
    Operation(name="triggers", command="triggers list", path="/triggers", run=fleet.plans),
    Operation(name="findings", command="findings list", path="/findings", run=artifacts.findings),
    Operation(name="proposals", command="proposals list", path="/proposals", run=artifacts.proposals),
    Operation(name="rules", command="rules", path="/rules", run=rules.rules),
    Operation(name="audit", command="audit", path="/audit", run=queries.audit_page, takes=queries.AuditPage),
    Operation(
        name="export-audit",
        command="audit",
        path="/audit/export",
        run=queries.audit_lines,
        takes=queries.AuditFilter,
        lines="halter-audit.jsonl",
    ),
    Operation(name="report", command="report", path="/report", run=queries.report),
    Operation(
        name="export",
        command="export",
        path="/sessions/{session}/journal",
        run=journal.export,
        lines="halter-session.jsonl",
    ),
)


def _write(name: str, path: str, run: Any, role: Role, command: str) -> Operation:
    return Operation(name=name, path=path, run=run, role=role, command=command, writes=True)


WRITES: Final = (
    _write("approve", "/decisions/{decision:path}/approve", decisions.approve_with, "approver", "approve"),
    _write("approve-together", "/sessions/{session}/approve", decisions.approve_together, "approver", "approve"),
    _write("deny", "/decisions/{decision:path}/deny", decisions.deny, "approver", "deny"),
    _write("halt", "/halts", control.halt, "approver", "halt"),
    _write("resume", "/halts/resume", control.resume, "operator", "resume"),
    _write("cancel", "/sessions/{session}/cancel", control.cancel, "operator", "cancel"),
    _write("tell", "/sessions/{session}/messages", messages.send_message, "operator", "tell"),
    _write("answer", "/sessions/{session}/answer", messages.answer, "operator", "tell"),
    _write("fork", "/sessions/{session}/fork", forks.fork, "operator", "fork"),
    _write("switch", "/agents/{agent}/switch", control.switch, "operator", "on"),
    _write("set-cap", "/budgets/cap", money.set_cap, "operator", "budget raise"),
    _write("retry", "/triggers/{agent}/{name}/retry", fleet.retry_item, "operator", "triggers retry"),
    _write("end-trigger", "/triggers/{agent}/{name}/end", fleet.end_trigger, "operator", "triggers cancel"),
    _write("settle-finding", "/findings/{finding}/settle", artifacts.settle_finding, "approver", "findings accept"),
    _write(
        "settle-proposal", "/proposals/{proposal}/settle", artifacts.settle_proposal, "approver", "proposals accept"
    ),
    _write("end-rule", "/rules/{rule}/end", rules.end, "operator", "rules end"),
)

FLEET_WIDE: Final = (
    _write("verify", "/journal/verify", journal.verify, "admin", "verify"),
    _write("erase", "/journal/erase", journal.erase, "admin", "erase"),
    _write("accept-prices", "/prices/accept", money.accept_prices, "admin", "prices accept"),
)
"""Operations that require access to every agent."""

LOCAL_AGENTS: Final = (
    Operation(name="route", command="route", path="/agents/{agent}/route", run=agents.route_message),
    _write("say", "/agents/{agent}/messages", agents.give_message, "operator", "run"),
    _write("run-trigger", "/triggers/{agent}/{name}/run", agents.run_trigger, "operator", "triggers run"),
    _write("promote", "/proposals/{proposal}/promote", agents.promote, "admin", "proposals promote"),
)
"""Operations on agents whose folders the server was started with."""

OPERATIONS: Final[tuple[Operation, ...]] = (*READS, *WRITES, *FLEET_WIDE, *LOCAL_AGENTS)
