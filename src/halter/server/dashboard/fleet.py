"""The fleet: every agent, whether it runs by itself, what its session does, what it burns, and who runs it."""

from collections.abc import Callable

from nicegui import ui

from halter.app.desk import looking, steering
from halter.app.desk.looking import AgentLine
from halter.app.words.moments import moment
from halter.core.durations import shown_duration
from halter.core.money import shown_usd
from halter.server.dashboard.asking import REASON, Given, ask
from halter.server.dashboard.frame import resume
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, Words, box, button, cell, fill, lead, link, meter, part, table, words
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.workers import workers

COLUMNS = ("agent", "runs by itself", "session", "state", "burns", "spent today", "next wake", "sensors", "stop")


async def fleet(room: Room) -> Refresh:
    """Put the page together."""
    with part("Agents", card=True):
        lines = Kept[AgentLine](table("Agents", COLUMNS, ("burns",)), lambda line: _row(room, line))
        none = words("", "h-none")
    show_workers = workers(room)

    async def refresh(_: Grown) -> None:
        found = await looking.fleet(room.desk)
        lines.show({line.agent: line for line in found})
        none.say("" if found else "No agent was switched on or had a session here yet.")
        await show_workers()

    await refresh(Grown())
    return refresh


def _row(room: Room, line: AgentLine) -> Callable[[AgentLine], None]:
    seen, scope = [line], f"agent:{line.agent}"
    with box("tr"):
        cell(line.agent, "h-what")
        with box("td"):
            switch = _switch(room, line, lambda: bool(seen[0].on))
        with box("td"):
            session = link("", "")
        state = cell()
        burn = cell("", "h-num")
        with box("td"):
            spent = words("")
            drawn = meter(f"spent today by {line.agent}", 0)
        wake, sensors = cell(), cell()
        with box("td"):
            if room.may("approver"):
                button("Halt…", lambda: _halt(room, line.agent), "plain", f"Halt {line.agent}")
            again = button("Resume…", lambda: resume(room, scope), "plain", f"Resume {line.agent}")

    def show(line: AgentLine) -> None:
        _show_switch(switch, on=bool(line.on))
        lead(session, line.session or "none", f"/session/{line.session}" if line.session else "/sessions")
        state.say(_state(line))
        again.set_visibility(room.may("operator") and line.halted.startswith(f"{scope} "))
        burn.say(f"{shown_usd(line.burn_usd)}/h")
        _show_spent(spent, line)
        fill(drawn, float(line.spent_today_usd / line.cap_today_usd) if line.cap_today_usd else 0)
        wake.say(_wake(room, line))
        sensors.say(_sensors(line))

    def later(line: AgentLine) -> None:
        wake.say(_wake(room, line))
        if line != seen[0]:
            seen[0] = line
            show(line)

    show(line)
    return later


def _switch(room: Room, line: AgentLine, is_on: Callable[[], bool]) -> ui.button:
    """A switch that shows only what is written down. What a person wants is the other of what they saw."""

    async def turn() -> None:
        await room.does(_turned(room, line.agent, on=not is_on()))

    switch = button("", turn, "switch", f"{line.agent} runs by itself")
    switch.props["role"] = "switch"
    switch.set_enabled(room.may("operator"))
    return switch


def _show_switch(switch: ui.button, *, on: bool) -> None:
    switch.set_text("On" if on else "Off")
    switch.props["aria-checked"] = "true" if on else "false"
    switch.update()


async def _turned(room: Room, agent: str, *, on: bool) -> str:
    stopped = (await steering.switch(room.desk, agent, on=on, reason="on the dashboard")).stopped
    ended = f" Stopped: {', '.join(stopped)}." if stopped else ""
    return f"{agent} is switched {'on' if on else 'off'}.{ended}"


def _halt(room: Room, agent: str) -> None:
    async def do(given: Given) -> str:
        await steering.halt(room.desk, f"agent:{agent}", given["reason"])
        return f"{agent} is halted."

    says = "Its sessions stop within a second, and nothing of it starts until somebody resumes it."
    ask(room, f"Halt {agent}?", says, (REASON,), "Halt it", do, "stop")


def _state(line: AgentLine) -> str:
    more = f" (and {line.under_way - 1} more)" if line.under_way > 1 else ""
    halted = f"HALTED: {line.halted}. " if line.halted else ""
    return f"{halted}{line.state or 'nothing under way'}{more}"


def _show_spent(spent: Words, line: AgentLine) -> None:
    """A cap stands in the store from the first cent on that is held against it."""
    cap = "" if line.cap_today_usd is None else f" of {shown_usd(line.cap_today_usd)}"
    spent.say(f"{shown_usd(line.spent_today_usd)}{cap}")


def _wake(room: Room, line: AgentLine) -> str:
    early = f"or by {line.wake_on}" if line.wake_on and line.wake_on != "[]" else ""
    if line.due_at is None:
        return early
    ahead = line.due_at - room.now
    when = f"in {shown_duration(ahead)}, " if ahead > 0 else ""
    return f"{when}{moment(line.due_at, room.now)} {early}".strip()


def _sensors(line: AgentLine) -> str:
    return ", ".join(f"{name}: {health}" for name, health in line.sensors.items())
