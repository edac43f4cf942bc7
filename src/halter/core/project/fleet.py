"""The rows of the fleet: its halts, caps, switches, policy and prices, and the people who come to its server."""

from typing import Final

from halter.core.events import (
    AgentSwitched,
    BodiesErased,
    CapChanged,
    FleetEvent,
    FleetPolicyAdopted,
    HaltLifted,
    HaltRequested,
    PricesChanged,
)
from halter.core.ids import StreamId
from halter.core.money import Account
from halter.core.project.holds import budget_row
from halter.core.project.projection import EraseBodies, EventPosition, MutableRows
from halter.core.rows import AgentRow, AuditRow, FleetPolicyRow, HaltRow, PinRow
from halter.core.vocabulary import Note, Visit

PRICES_PIN: Final = "prices"
"""The pin of the fetched prices, which belongs to no agent."""


def project_fleet_event(event: FleetEvent, position: EventPosition, rows: MutableRows) -> None:
    at = position.at
    match event:
        case CapChanged():
            row = budget_row(rows, Account(event.scope, event.window, event.unit))
            rows.save(row.with_cap(event.cap, at, event.by).with_amounts(overrun=event.overrun))
        case HaltRequested():
            rows.save(HaltRow(event.scope, 1, at, event.by, event.reason, 0, int(event.cancels)))
        case HaltLifted():
            rows.save(HaltRow(event.scope, 0, at, event.by, event.reason, event.ramp))
        case PricesChanged():
            rows.save(PinRow("", PRICES_PIN, event.prices, event.by, at))
        case BodiesErased():
            rows.erase(EraseBodies(StreamId(event.stream), event.through))
        case AgentSwitched():
            rows.save(AgentRow(event.agent, int(event.on), at, event.by, event.reason))
        case FleetPolicyAdopted():
            caps = (event.day_cap, event.month_cap)
            rows.save(FleetPolicyRow(position.stream, position.seq, event.policy, event.digest, at, event.by, *caps))
        case Visit():
            rows.save(_audit_visit(event, position))
        case Note():
            pass


def _audit_visit(event: Visit, position: EventPosition) -> AuditRow:
    visit = event.audited
    return AuditRow(
        call=event.id,
        session="",
        agent="",
        tool=visit.tool,
        capability_level=visit.role,
        risk_level="",
        decision="",
        decided_by=visit.person,
        outcome=visit.outcome,
        cost_usd=0,
        duration_ms=0,
        created_at=position.at,
        shows_result=0,
        asked_seq=position.seq,
        settled_seq=position.seq,
    )
