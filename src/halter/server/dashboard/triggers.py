"""Triggers: schedules, watches and webhooks; when each runs next, what waits there, and what was left to people."""

from collections.abc import Callable

from halter.app.desk import triggers as desk_triggers
from halter.app.planned import Plan
from halter.app.words.moments import moment
from halter.autonomy.triggers import Item
from halter.server.dashboard.asking import REASON, Given, ask
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, box, button, cell, lead, link, part, table, words
from halter.server.dashboard.room import Refresh, Room

COLUMNS = ("trigger", "type", "when", "next", "last", "runs", "waits", "task", "end")
LEFT = ("document", "trigger", "attempts", "why", "again")


async def triggers(room: Room) -> Refresh:
    """Put the page together."""
    with part("Triggers", card=True):
        lines = Kept[Plan](table("Triggers", COLUMNS, ("runs",)), lambda plan: _row(room, plan))
        none = words("", "h-none")
    with part("Documents left to you", card=True):
        left = Kept[tuple[Plan, Item]](
            table("Documents left to you", LEFT, ("attempts",)), lambda one: _left(room, one)
        )
        nothing = words("", "h-none")

    async def refresh(_: Grown) -> None:
        plans = await desk_triggers.plans(room.desk)
        lines.show({plan.trigger: plan for plan in plans})
        none.say("" if plans else "No agent has a schedule, a watch or a webhook.")
        items = {(plan.trigger, item.item): (plan, item) for plan in plans for item in plan.quarantined}
        left.show(items)
        nothing.say("" if items else "No document was left to you.")

    await refresh(Grown())
    return refresh


def _row(room: Room, plan: Plan) -> Callable[[Plan], None]:
    with box("tr"):
        cell(plan.trigger, "h-what")
        cell(plan.type)
        cell(plan.when)
        following, last = cell("", "h-short"), box("td")
        with last:
            session = link("", "")
        runs, waits = cell("", "h-num"), cell()
        cell(plan.prompt)
        with box("td"):
            if room.may("operator") and not plan.of_a_file:
                button("End…", lambda: _end(room, plan), "plain", f"End {plan.trigger}")

    def show(plan: Plan) -> None:
        following.say(moment(plan.next_at, room.now) if plan.next_at else "")
        last_at = moment(plan.last_at, room.now) if plan.last_at else "never"
        lead(session, last_at, f"/session/{plan.session}" if plan.session else "/sessions")
        runs.say(str(plan.runs))
        waiting = f"{plan.waiting} waiting" if plan.waiting else ""
        waits.say(" ".join(each for each in (waiting, plan.delayed) if each))

    show(plan)
    return show


def _left(room: Room, one: tuple[Plan, Item]) -> Callable[[tuple[Plan, Item]], None]:
    plan, item = one
    with box("tr"):
        cell(item.name, "h-what")
        cell(plan.trigger)
        cell(str(item.attempts), "h-num")
        cell(item.terminal_reason or "")
        with box("td"):
            if room.may("operator"):
                button("Retry", lambda: _retry(room, plan, item), "plain", f"Retry {item.name}")
    return lambda _: None


async def _retry(room: Room, plan: Plan, item: Item) -> None:
    async def do() -> str:
        return (await desk_triggers.retry(room.desk, plan.trigger, item.item)).sentence

    await room.does(do())


def _end(room: Room, plan: Plan) -> None:
    async def do(given: Given) -> str:
        await desk_triggers.end(room.desk, plan.trigger, given["reason"])
        return f"{plan.trigger} starts nothing any more."

    ask(room, f"End {plan.trigger}?", "It starts nothing any more.", (REASON,), "End it", do, "stop")
