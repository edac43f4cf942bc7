"""What starts sessions, and a person's word about it."""

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta

from halter.app import planned, runs
from halter.app.desk.desk import Desk, refused, wrong
from halter.app.desk.operation import Agent, Done, Name, Reason
from halter.app.planned import Plan
from halter.core.errors import NotDone
from halter.core.events import ItemReleased
from halter.core.ports import Query
from halter.core.task_rows import ItemRow, TriggerRow

SHORT: Final = 16
"""So much of a document's digest is shown, and names it."""

OfAgent = Annotated[Name, Meta(description="Only those of this agent.", extra={"metavar": "AGENT"})]
TriggerName = Annotated[Name, Meta(description="A trigger's name, which its agent knows it by.")]
ItemName = Annotated[Name, Meta(min_length=1, description="A document, by its name or the beginning of its digest.")]


async def plans(desk: Desk, agent: OfAgent = "") -> Sequence[Plan]:
    """List schedules, watches and webhooks: when they run next, what they last did, and what waits there."""
    found = await planned.plans(desk.app.store, desk.app.clock.now(), agent)
    return [plan for plan in found if desk.who.sees(plan.agent)]


async def end(desk: Desk, trigger: str, reason: str = "") -> Done:
    """Let a trigger start nothing any more. One that stands in an agent's file is removed there."""
    desk.demand("operator", "end a trigger")
    row = await _trigger(desk, trigger)
    if row.made_by == runs.FROM_FILE:
        refused(f"{trigger} stands in agent.yaml, and would come back: remove it there.")
    committed = await desk.app.store.commit(runs.end(row, desk.who.name, reason))
    if row.ended_at is not None or not committed.events:
        refused(f"{trigger} is over already.")
    return Done(trigger, f"{trigger} is cancelled: it starts nothing any more.")


async def retry(desk: Desk, trigger: str, item: str) -> Done:
    """Let a document be tried anew that was left to people."""
    desk.demand("operator", "let a document be tried anew")
    row = await _item(desk, trigger, item)
    event = ItemReleased(trigger=trigger, item=row.item, by=desk.who.name)
    await desk.app.store.commit(runs.tell(trigger, f"released/{desk.app.ids.new()}", event))
    return Done(trigger, f"{row.name} is tried anew by {trigger}.")


async def end_trigger(desk: Desk, agent: Agent, name: TriggerName, reason: Reason = "") -> Done:
    """Let a trigger start nothing any more."""
    return await end(desk, f"{agent}/{name}", reason)


async def retry_item(desk: Desk, agent: Agent, name: TriggerName, item: ItemName) -> Done:
    """Let a document be tried anew that was left to people."""
    return await retry(desk, f"{agent}/{name}", item)


async def _trigger(desk: Desk, trigger: str) -> TriggerRow:
    rows = await desk.app.store.ask(Query("all_triggers", TriggerRow))
    known = [row for row in rows if row.made_seq and desk.who.sees(row.agent)]
    for row in known:
        if row.trigger == trigger:
            return row
    names = ", ".join(row.trigger for row in known if row.ended_at is None) or "none"
    raise NotDone(f"There is no trigger {trigger!r}; there are: {names}.", "missing")


async def _item(desk: Desk, trigger: str, item: str) -> ItemRow:
    await _trigger(desk, trigger)
    rows = await desk.app.store.ask(Query("items_open", ItemRow, {"trigger": trigger}))
    held = [row for row in rows if row.quarantined_at is not None]
    found = [row for row in held if row.name == item or row.item.startswith(item)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{row.name} ({row.item[:SHORT]})" for row in held) or "nothing"
    if not found:
        raise NotDone(f"No document left to you is called {item!r}: {trigger} left you {names}.", "missing")
    return wrong(f"Several documents left to you are called {item!r}: {trigger} left you {names}.")
