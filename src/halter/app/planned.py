"""All that starts sessions, as it stands: when it runs next, what it last did, and what waits there."""

from collections.abc import Sequence

import msgspec

from halter.app.runs import FROM_FILE
from halter.app.triggered import read_made
from halter.autonomy.triggers import Item, schedule_next
from halter.core.ports import Query, Store
from halter.core.schedules import explained
from halter.core.task_rows import TriggerRow
from halter.core.tasks import Schedule, Watch, Webhook


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One trigger. `waiting` documents have not been done yet, those in `quarantined` are left to a person."""

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
    quarantined: tuple[Item, ...] = ()

    @property
    def name(self) -> str:
        """The name that its agent knows it by."""
        return self.trigger.partition("/")[2]

    @property
    def of_a_file(self) -> bool:
        """Tell whether it stands in its agent's file, and so comes back if it is only ended here."""
        return self.made_by == FROM_FILE


async def plans(store: Store, now: int, agent: str = "") -> Sequence[Plan]:
    """List the triggers of an agent, or of all of them, that are not over."""
    query = Query("triggers_of", TriggerRow, {"agent": agent}) if agent else Query("all_triggers", TriggerRow)
    return [await _plan(store, row, now) for row in await store.ask(query) if row.ended_at is None and row.made_seq]


async def _plan(store: Store, row: TriggerRow, now: int) -> Plan:
    made = await read_made(store, row)
    trigger = None if made is None else made.trigger()
    next_at, when = None, "(erased)"
    match trigger:
        case Schedule() if made is not None and made.timing is not None:
            next_at, when = schedule_next(trigger, made.timing, row, now), explained(made.timing)
        case Watch():
            place = trigger.collection if isinstance(trigger.collection, str) else trigger.path
            when = f"for each new or changed document of {place if isinstance(place, str) else 'its folder'}"
        case Webhook():
            when = "for each delivery"
        case _:
            pass
    items = await store.ask(Query("items_open", Item, {"trigger": row.trigger}))
    return Plan(
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
