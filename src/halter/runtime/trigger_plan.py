"""What each trigger of an agent will do next, and what it did last."""

from collections.abc import Sequence

import msgspec

from halter.autonomy.triggers import WatchedDocument, find_next_schedule_look
from halter.core.agent_spec import Schedule, Watch, Webhook
from halter.core.ports import Query, Store
from halter.core.rows import TriggerRow
from halter.core.schedules import explain_timing
from halter.runtime.session_builder import read_trigger_record
from halter.runtime.triggers import FILE_ACTOR


class TriggerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger. `waiting` documents are not done yet; those in `quarantined` need a person."""

    trigger: str
    agent: str
    type: str
    when: str
    prompt: str
    made_by: str
    next_at: int | None = None
    last_at: int | None = None
    session: str = ""
    runs: int = 0
    delayed: str = ""
    waiting: int = 0
    quarantined: tuple[WatchedDocument, ...] = ()

    @property
    def name(self) -> str:
        return self.trigger.partition("/")[2]

    @property
    def of_a_file(self) -> bool:
        """Whether it stands in its agent's file, and would come back if it were ended here."""
        return self.made_by == FILE_ACTOR


async def plan_triggers(store: Store, now: int, agent: str = "") -> Sequence[TriggerPlan]:
    """List the triggers of an agent, or of all agents, that are not over."""
    query = Query("triggers_of", TriggerRow, {"agent": agent}) if agent else Query("all_triggers", TriggerRow)
    return [await _plan(store, row, now) for row in await store.ask(query) if row.ended_at is None and row.made_seq]


async def _plan(store: Store, row: TriggerRow, now: int) -> TriggerPlan:
    made = await read_trigger_record(store, row)
    trigger = None if made is None else made.trigger()
    next_at, when = None, "(erased)"
    match trigger:
        case Schedule() if made is not None and made.timing is not None:
            next_at, when = find_next_schedule_look(trigger, made.timing, row, now), explain_timing(made.timing)
        case Watch():
            place = trigger.collection if isinstance(trigger.collection, str) else trigger.path
            when = f"for each new or changed document of {place if isinstance(place, str) else 'its folder'}"
        case Webhook():
            when = "for each delivery"
        case _:
            pass
    items = await store.ask(Query("items_open", WatchedDocument, {"trigger": row.trigger}))
    return TriggerPlan(
        trigger=row.trigger,
        agent=row.agent,
        type=row.type,
        when=when,
        prompt="" if trigger is None else trigger.prompt,
        made_by=row.made_by,
        next_at=next_at,
        last_at=row.ran_at or None,
        session=row.session,
        runs=row.runs,
        delayed=row.delayed,
        waiting=sum(not item.done for item in items),
        quarantined=tuple(item for item in items if item.quarantined_at is not None),
    )
