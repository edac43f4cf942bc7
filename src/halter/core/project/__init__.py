"""The projection of events to rows, shared by all stores and by rebuilds.

Streams are read in no guaranteed order. So each change is to a column that only one stream writes, or to a sum, or is
decided by rank (see `BudgetRow.with_cap`). A trigger's rows follow its own stream. Every column of the other rows
follows one class of streams: the session's, the fleet's, or the outbox's. If several sessions propose the same
precedent, the first by time and name provides the text, and the number of proposals is a sum.
"""

from collections.abc import Callable
from typing import Any, Final, get_args

from halter.core.events import (
    AnyEvent,
    ArtifactEvent,
    CallSettled,
    CallStarted,
    ChannelEvent,
    DecisionEvent,
    EffectEvent,
    FleetEvent,
    HoldMade,
    HoldReleased,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionEvent,
    SessionStarted,
    TaskEvent,
    TriggerEvent,
    TurnEnded,
    TurnStarted,
)
from halter.core.project.artifacts import key_of_artifact, project_artifact_event
from halter.core.project.decisions import project_decision_event
from halter.core.project.effects import (
    project_call_settled,
    project_call_started,
    project_effect_event,
    project_request_settled,
    project_request_started,
)
from halter.core.project.fleet import project_fleet_event
from halter.core.project.holds import project_hold_made, project_hold_released
from halter.core.project.projection import EventPosition, MutableRows
from halter.core.project.sessions import (
    project_session_ended,
    project_session_event,
    project_session_started,
    project_turn_started,
)
from halter.core.project.triggers import list_trigger_rows, project_trigger_event
from halter.core.vocabulary import RowKey


def project_event(event: AnyEvent, position: EventPosition, rows: MutableRows) -> None:
    """Apply an event to the rows."""
    PROJECTIONS.get(type(event), project_session_event)(event, position, rows)


def _project_nothing(event: ChannelEvent | TaskEvent | TurnEnded, position: EventPosition, rows: MutableRows) -> None:
    """Change nothing: channels are folded from their streams, and what a session works on changes no row."""


PROJECTIONS: Final[dict[type[Any], Callable[[Any, EventPosition, MutableRows], None]]] = {
    **dict.fromkeys(get_args(SessionEvent), project_session_event),
    **dict.fromkeys(get_args(EffectEvent), project_effect_event),
    **dict.fromkeys(get_args(DecisionEvent), project_decision_event),
    **dict.fromkeys(get_args(FleetEvent), project_fleet_event),
    **dict.fromkeys(get_args(ArtifactEvent), project_artifact_event),
    **dict.fromkeys(get_args(TriggerEvent), project_trigger_event),
    **dict.fromkeys((*get_args(TaskEvent), *get_args(ChannelEvent)), _project_nothing),
    # The events of every step, without the match of their kind.
    SessionStarted: project_session_started,
    SessionEnded: project_session_ended,
    TurnStarted: project_turn_started,
    TurnEnded: _project_nothing,
    RequestStarted: project_request_started,
    RequestSettled: project_request_settled,
    CallStarted: project_call_started,
    CallSettled: project_call_settled,
    HoldMade: project_hold_made,
    HoldReleased: project_hold_released,
}


def rows_of_event(event: object) -> tuple[RowKey, ...]:
    """List the rows that a trigger or artifact event changes, for a write to declare."""
    if isinstance(event, TriggerEvent):
        return list_trigger_rows(event)
    if isinstance(event, ArtifactEvent):
        return (key_of_artifact(event),)
    return ()
