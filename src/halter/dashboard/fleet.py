"""Pages of the fleet: agents, workers, triggers, findings and proposals."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

from nicegui import ui

from halter.autonomy.triggers import WatchedDocument
from halter.core.effect_events import ProposalVerdict as Settled
from halter.core.errors import NotDone
from halter.core.rows import HaltRow
from halter.core.text import format_count
from halter.dashboard.agent import ask_to_halt, ask_to_switch
from halter.dashboard.labels import (
    SEVERITIES,
    SEVERITY_MOODS,
    Label,
    explain_health,
    explain_reason,
    format_age,
    format_money,
    format_share,
    format_wake,
    label_health,
    shorten_id,
)
from halter.dashboard.page import (
    REASON,
    FeedChanges,
    FormField,
    FormValues,
    OpenPage,
    RefreshPage,
    ask_to_resume,
    open_dialog,
)
from halter.dashboard.parts import (
    KeyedList,
    TextLabel,
    add_box,
    add_button,
    add_cell,
    add_chip,
    add_fold,
    add_id,
    add_link,
    add_meter,
    add_section,
    add_table,
    add_text,
    make_single_line,
    set_chip,
    set_link,
    set_meter,
)
from halter.operations import agents, artifacts, control, queries
from halter.operations import fleet as desk_triggers
from halter.operations.artifacts import Artifact
from halter.operations.decisions import waiting
from halter.operations.fleet import WorkerView
from halter.operations.fleet import workers as known
from halter.operations.queries import AgentLine
from halter.present.events import format_relative_moment
from halter.present.report import (
    HEALTH_MOODS,
    NO_WORKERS,
    describe_load,
    describe_worker_condition,
    name_worker,
)
from halter.runtime.forecast import TriggerPlan

WORKER_COLUMNS = ("process", "health", "awake", "agents", "last heard", "since", "version")


def build_workers_section(room: OpenPage) -> Callable[[], Awaitable[None]]:
    """Adds the section of the workers, and returns its refresh function."""
    with add_section("Workers", card=True):
        lines = KeyedList[WorkerView](add_table("Workers", WORKER_COLUMNS), lambda one: _worker_row(room, one))
        none = add_text("", "h-none")

    async def refresh() -> None:
        found = await known(room.desk)
        # The state is part of the key: word and colour change together.
        lines.show({(one.worker, one.health): one for one in found})
        none.say("" if any(one.alive for one in found) else NO_WORKERS)

    return refresh


def _worker_row(room: OpenPage, one: WorkerView) -> Callable[[WorkerView], None]:
    with add_box("tr"):
        add_cell(name_worker(one), "h-what")
        with add_box("td"):
            add_chip(one.health.capitalize(), HEALTH_MOODS[one.health])
            said = add_text("", "h-text h-note")
        awake, agents = add_cell("", "h-short"), add_cell()
        with add_box("td", "h-short"):
            last = room.add_moment(None)
        add_cell(format_relative_moment(one.since, room.now), "h-short")
        add_cell(one.version, "h-short")

    def show(one: WorkerView) -> None:
        told = describe_worker_condition(one, room.now)
        said.say(told)
        said.set_visibility(bool(told))
        awake.say(describe_load(one))
        agents.say("\n".join(f"{name} {shorten_id(version)}".strip() for name, version in one.agents.items()))
        room.set_moment(last, one.heard_at)

    show(one)
    return show


FLEET_COLUMNS = ("agent", "health", "session", "spent today", "runs by itself", "")


async def build_fleet_page(room: OpenPage) -> RefreshPage:
    with add_section("Agents", card=True):
        lines = KeyedList[AgentLine](add_table("Agents", FLEET_COLUMNS), lambda line: _row(room, line))
        none = add_text("", "h-none")
    show_workers = build_workers_section(room)

    async def refresh(_: FeedChanges) -> None:
        found = await queries.fleet(room.desk)
        lines.show({line.agent: line for line in found})
        none.say("" if found else "No agent was switched on or had a session here yet.")
        await show_workers()

    await refresh(FeedChanges())
    return refresh


def _row(room: OpenPage, line: AgentLine) -> Callable[[AgentLine], None]:
    seen, scope = [line], f"agent:{line.agent}"
    with add_box("tr"):
        with add_box("td"):
            add_link(line.agent, f"/agent/{line.agent}").classes("h-what")
        with add_box("td"):
            health, why = add_chip(""), add_text("", "h-text h-dim h-small h-note")
        with add_box("td"):
            session, wake = add_link("", ""), add_text("", "h-text h-dim h-small")
        with add_box("td"):
            spent = add_text("", "h-short")
            drawn = add_meter(f"spent today by {line.agent}", 0)
            burn = add_text("", "h-text h-dim h-small")
        with add_box("td"):
            switch = _switch(room, line, seen)
        with add_box("td"):
            if room.may("approver"):
                add_button("Halt…", lambda: ask_to_halt(room, line.agent), "plain", f"Halt {line.agent}")
            again = add_button("Resume…", lambda: ask_to_resume(room, scope), "plain", f"Resume {line.agent}")

    def show(line: AgentLine) -> None:
        _show_switch(switch, on=bool(line.on))
        set_link(session, line.session, f"/session/{line.session}")
        session.set_visibility(bool(line.session))
        set_chip(health, label_health(line))
        why.say(explain_health(line))
        again.set_visibility(room.may("operator") and line.halted.startswith(f"{scope} "))
        burn.say(f"{format_money(line.burn_usd)} in the last hour" if line.burn_usd else "")
        _show_spent(spent, line)
        set_meter(drawn, float(line.spent_today_usd / line.cap_today_usd) if line.cap_today_usd else 0)
        wake.say(_wake(room, line))

    def later(line: AgentLine) -> None:
        wake.say(_wake(room, line))
        if line != seen[0]:
            seen[0] = line
            show(line)

    show(line)
    return later


def _switch(room: OpenPage, line: AgentLine, seen: Sequence[AgentLine]) -> ui.button:
    """A switch that shows the stored state; a click asks for the opposite of what was shown."""
    switch = add_button("", lambda: ask_to_switch(room, seen[0]), "switch", f"{line.agent} runs by itself")
    switch.props["role"] = "switch"
    switch.set_enabled(room.may("operator"))
    return switch


def _show_switch(switch: ui.button, *, on: bool) -> None:
    switch.set_text("On" if on else "Off")
    switch.props["aria-checked"] = "true" if on else "false"
    switch.update()


def _show_spent(spent: TextLabel, line: AgentLine) -> None:
    cap = line.cap_today_usd
    spent.say(format_money(line.spent_today_usd) if cap is None else format_share(line.spent_today_usd, cap))


def _wake(room: OpenPage, line: AgentLine) -> str:
    """Says when an agent wakes, and what would wake it earlier."""
    if not line.session:
        return "no session under way"
    early = line.wake_on if line.wake_on != "[]" else ""
    at = "" if line.due_at is None else f"wakes {format_wake(line.due_at, room.now)}"
    return f"{at or 'wakes'}{' or' if at else ''} by {early}" if early else at


TRIGGER_COLUMNS = ("trigger", "when", "state", "next run", "last run", "runs", "")
QUARANTINE_COLUMNS = ("document", "trigger", "attempts", "why", "")


class TriggerView(NamedTuple):
    """A trigger, and the halt that a person put on it."""

    plan: TriggerPlan
    paused: HaltRow | None


async def build_triggers_page(room: OpenPage) -> RefreshPage:
    at_hand = sorted(room.agents.folders) if room.agents else []
    if room.may("operator"):
        with add_box("div", "h-row"):
            add_button("New schedule…", lambda: _ask_new(room, at_hand), "go", icon="plus")
    with add_section("Triggers", card=True):
        lines = KeyedList[TriggerView](
            add_table("Triggers", TRIGGER_COLUMNS, ("runs",)), lambda one: _trigger_row(room, one)
        )
        none = add_text("", "h-none")
    with add_section("Documents left to you", card=True):
        left = KeyedList[tuple[TriggerPlan, WatchedDocument]](
            add_table("Documents left to you", QUARANTINE_COLUMNS, ("attempts",)),
            lambda one: _build_quarantine_row(room, one),
        )
        nothing = add_text("", "h-none")

    async def refresh(_: FeedChanges) -> None:
        plans = await desk_triggers.plans(room.desk)
        halts = {row.scope: row for row in await control.halts_now(room.desk)}
        lines.show({plan.trigger: TriggerView(plan, halts.get(f"trigger:{plan.trigger}")) for plan in plans})
        none.say("" if plans else "No agent has a schedule, a watch or a webhook.")
        items = {(plan.trigger, item.item): (plan, item) for plan in plans for item in plan.quarantined}
        left.show(items)
        nothing.say("" if items else "No document was left to you.")

    await refresh(FeedChanges())
    return refresh


def _trigger_row(room: OpenPage, one: TriggerView) -> Callable[[TriggerView], None]:
    plan = one.plan
    scope = f"trigger:{plan.trigger}"
    with add_box("tr"):
        with add_box("td"):
            with add_box("div", "h-row"):
                add_text(plan.trigger, "h-what", "span")
                add_chip(plan.type)
            add_text(plan.prompt, "h-text h-dim h-small h-note")
        add_cell(plan.when)
        with add_box("td"):
            state, why = add_chip(""), add_text("", "h-text h-dim h-small")
        with add_box("td", "h-short"):
            following = room.add_moment(None)
        with add_box("td", "h-short"):
            session = add_link("", "")
        runs = add_cell("", "h-num")
        with add_box("td"), add_box("div", "h-row"):
            if room.may("operator") and plan.type == "schedule":
                add_button("Run now", lambda: _run_now(room, plan), "plain", f"Run now: {plan.trigger}", "play")
            pause = add_button("Pause…", lambda: _pause(room, plan), "plain", f"Pause {plan.trigger}", "pause")
            again = add_button("Resume…", lambda: ask_to_resume(room, scope), "plain", f"Resume {plan.trigger}", "play")
            if room.may("operator") and not plan.of_a_file:
                add_button("End…", lambda: _end(room, plan), "plain", f"End {plan.trigger}")

    def show(one: TriggerView) -> None:
        plan, halt = one
        set_chip(state, _label_trigger(one))
        why.say(_explain_trigger(one))
        pause.set_visibility(room.may("approver") and halt is None)
        again.set_visibility(room.may("operator") and halt is not None)
        room.set_moment(following, plan.next_at if halt is None else None)
        last_at = format_age(plan.last_at, room.now) if plan.last_at else "never"
        set_link(session, last_at, f"/session/{plan.session}" if plan.session else "/sessions")
        runs.say(f"{plan.runs:,}")

    show(one)
    return show


def _label_trigger(one: TriggerView) -> Label:
    if one.paused is not None:
        return Label("Paused", "look")
    return Label("Held up", "look") if one.plan.delayed else Label("Ready", "good")


def _explain_trigger(one: TriggerView) -> str:
    if one.paused is not None:
        return f"by {one.paused.by}{f': {one.paused.reason}' if one.paused.reason else ''}"
    documents = f"{one.plan.waiting} waiting" if one.plan.waiting else ""
    return ". ".join(each for each in (documents, one.plan.delayed) if each)


async def _run_now(room: OpenPage, plan: TriggerPlan) -> None:
    async def do() -> str:
        return (await agents.run_trigger(room.desk, plan.agent, plan.name)).sentence

    await room.does(do())


def _pause(room: OpenPage, plan: TriggerPlan) -> None:
    async def do(given: FormValues) -> str:
        await control.halt(room.desk, f"trigger:{plan.trigger}", given["reason"])
        return f"{plan.trigger} is paused."

    says = "It starts nothing until it is resumed, and what it started is stopped."
    open_dialog(room, f"Pause {plan.trigger}?", says, (REASON,), "Pause it", do, "stop")


def _ask_new(room: OpenPage, at_hand: Sequence[str]) -> None:
    """Asks for a task and its times. What was understood is shown on Home, where a person confirms it."""

    async def do(given: FormValues) -> str:
        words = f"{given['when'].strip()}, {given['task'].strip()}"
        route = await agents.route_message(room.desk, given["agent"], words)
        if route.strategy != "SCHEDULED_TASK":
            raise NotDone(f"{given['when']!r} is not understood as times. {NEW_EXAMPLE}", "wrong")
        before = {one.decision for one in await waiting(room.desk)}
        heard = await agents.say(room.desk, given["agent"], words)
        if before >= {one.decision for one in await waiting(room.desk)}:
            raise NotDone(heard.text, "wrong")
        return "It is not planned yet: confirm it on Home, where its next times and its cost are shown."

    if not at_hand:
        room.say("This server has no folder of an agent: start it with `halter serve FOLDER`.", bad=True)
        return
    fields = (
        FormField("task", "What is to be done, as you would say it", "", "text"),
        FormField("when", "When, as in: every weekday at 8:30"),
        FormField("agent", "By which agent", at_hand[0], "choice", tuple(at_hand)),
    )
    says = "You see its next times and what it may cost before it counts."
    open_dialog(room, "A new schedule", says, fields, "Plan it", do, "go")


NEW_EXAMPLE = "Write it like: every day at 7, every monday at 9:00, every 30 minutes."


def _build_quarantine_row(
    room: OpenPage, one: tuple[TriggerPlan, WatchedDocument]
) -> Callable[[tuple[TriggerPlan, WatchedDocument]], None]:
    plan, item = one
    with add_box("tr"):
        add_cell(item.name, "h-what")
        add_cell(plan.trigger)
        add_cell(str(item.attempts), "h-num")
        add_cell(explain_reason(item.terminal_reason or ""))
        with add_box("td"):
            if room.may("operator"):
                add_button("Retry", lambda: _retry(room, plan, item), "plain", f"Retry {item.name}")
    return lambda _: None


async def _retry(room: OpenPage, plan: TriggerPlan, item: WatchedDocument) -> None:
    async def do() -> str:
        return (await desk_triggers.retry_item(room.desk, plan.agent, plan.name, item.item)).sentence

    await room.does(do())


def _end(room: OpenPage, plan: TriggerPlan) -> None:
    async def do(given: FormValues) -> str:
        await desk_triggers.end_trigger(room.desk, plan.agent, plan.name, given["reason"])
        return f"{plan.trigger} starts nothing any more."

    open_dialog(room, f"End {plan.trigger}?", "It starts nothing any more.", (REASON,), "End it", do, "stop")


Among = Literal["findings", "proposals"]
URGENT_SEVERITIES = ("high", "critical")
MAX_FINDINGS = 100


async def build_findings_page(room: OpenPage) -> RefreshPage:
    with add_box("div", "h-filters", "Filter the findings", role="search"):
        wanted: Any = ui.select(list(FINDING_FILTERS), value=FINDING_FILTERS[0], label="Show").props("outlined dense")
        if room.may("approver"):
            add_button("Dismiss all shown…", lambda: _dismiss_all(room, listed))
    listed: list[Artifact] = []
    with add_section("Findings"):
        groups = KeyedList[FindingGroup](
            add_box("div", "h-stack"), lambda group: _build_group(room, group), "There are no such findings."
        )
    with add_section("Proposals"):
        proposed = KeyedList[Artifact](
            add_box("div", "h-cards"), lambda one: _card(room, one, "proposals"), "Nothing is proposed to be kept."
        )

    async def refresh(grown: FeedChanges) -> None:
        if grown.written:
            rows = await artifacts.findings(room.desk, limit=MAX_FINDINGS)
            listed[:] = sorted(filter(lambda one: _is_wanted(one, str(wanted.value)), rows), key=_urgency)
            groups.show({group.key: group for group in group_findings(listed)})
            proposed.show({one.id: one for one in (await artifacts.proposals(room.desk))[:MAX_FINDINGS]})

    async def again() -> None:
        await refresh(FeedChanges(everything=True))

    wanted.on_value_change(again)
    await again()
    return refresh


class FindingGroup(NamedTuple):
    """The findings of one agent with one severity, the newest first."""

    severity: str
    agent: str
    found: tuple[Artifact, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.severity, self.agent


def group_findings(listed: Sequence[Artifact]) -> list[FindingGroup]:
    """Groups findings that are sorted by severity."""
    groups: dict[tuple[str, str], list[Artifact]] = {}
    for one in listed:
        groups.setdefault((one.severity, one.agent), []).append(one)
    return [FindingGroup(severity, agent, tuple(found)) for (severity, agent), found in groups.items()]


def _build_group(room: OpenPage, group: FindingGroup) -> Callable[[FindingGroup], None]:
    urgent = group.severity in URGENT_SEVERITIES
    with add_fold("h-group") as fold:
        add_chip(group.severity.capitalize() or "Finding", SEVERITY_MOODS.get(group.severity, "dim"))
        add_text(group.agent, "h-what", "span")
        count = add_text("", "h-dim h-small", "span")
    # What is urgent stands open; a long list of small things does not push it away.
    if urgent or len(group.found) <= MAX_OPEN_GROUP:
        fold.props["open"] = True
    with fold:
        cards = KeyedList[Artifact](add_box("div", "h-cards"), lambda one: _card(room, one, "findings"))

    def show(group: FindingGroup) -> None:
        count.say(format_count(len(group.found), "finding"))
        cards.show({one.id: one for one in group.found})

    show(group)
    return show


MAX_OPEN_GROUP = 6
FINDING_FILTERS = ("Undecided", "High and critical", "All")


def _is_wanted(one: Artifact, wanted: str) -> bool:
    if wanted == "High and critical":
        return one.severity in URGENT_SEVERITIES
    return wanted == "All" or not one.status


def _urgency(one: Artifact) -> tuple[int, int]:
    """Sorts by severity, the newest first among equals."""
    return SEVERITIES.index(one.severity) if one.severity in SEVERITIES else len(SEVERITIES), -one.at


def _dismiss_all(room: OpenPage, listed: Sequence[Artifact]) -> None:
    undecided = [one for one in listed if not one.status]

    async def do(given: FormValues) -> str:
        for one in undecided:
            await _settle_and_describe(room, one, "dismissed", "findings", given["reason"])
        return f"{format_count(len(undecided), 'finding')} dismissed."

    says = f"Later sessions are not told of these {format_count(len(undecided), 'finding')}."
    open_dialog(room, "Dismiss all that are shown?", says, (REASON,), "Dismiss them", do, "stop")


def _card(room: OpenPage, one: Artifact, among: Among) -> Callable[[Artifact], None]:
    title, _, rest = one.text.removeprefix(f"[{one.severity}] ").partition("\n")
    with add_box("article", "h-card h-stack", f"{one.about} {one.id}"):
        with add_box("div", "h-row h-small"):
            if one.severity:
                add_chip(one.severity.capitalize(), SEVERITY_MOODS.get(one.severity, "dim"))
            else:
                add_chip(one.about.capitalize())
            status = add_chip(_status(one))
            room.add_moment(one.at, "h-dim")
        add_text(title, "h-title")
        _add_rest(rest.strip())
        add_text("; ".join(_more(one)), "h-dim h-text h-small")
        with add_box("div", "h-row h-small"):
            add_link(f"Session {shorten_id(one.session)}", f"/session/{one.session}")
            add_id(one.id)
        buttons = add_box("div", "h-row")
        with buttons:
            if room.may("approver"):
                add_button("Keep", lambda: _settle(room, one, "kept", among), "yes", f"Keep {one.id}")
                add_button("Dismiss…", lambda: _dismiss(room, one, among), "plain", f"Dismiss {one.id}")
    buttons.set_visibility(not one.status)

    def show(one: Artifact) -> None:
        status.say(_status(one))
        buttons.set_visibility(not one.status)

    return show


LONG_FINDING = 280


def _add_rest(text: str) -> None:
    """Shows a text, and folds one that is long."""
    if len(text) <= LONG_FINDING:
        if text:
            add_text(text).style("white-space: pre-wrap")
        return
    with add_fold() as fold:
        add_text(f"{make_single_line(text, LONG_FINDING // 2)[: LONG_FINDING // 2]}…", "h-text h-small", "span")
    with fold:
        add_text(text).style("white-space: pre-wrap")


def _status(one: Artifact) -> str:
    return f"{one.status} by {one.by}" if one.status else "to be kept or dismissed"


def _more(one: Artifact) -> list[str]:
    seen = f"seen {one.observed_count} times" if one.observed_count > 1 else ""
    return [each for each in (one.agent, one.support, one.review and f"review: {one.review}", seen) if each]


async def _settle(room: OpenPage, one: Artifact, status: Settled, among: Among) -> None:
    await room.does(_settle_and_describe(room, one, status, among, ""))


async def _settle_and_describe(room: OpenPage, one: Artifact, status: Settled, among: Among, reason: str) -> str:
    return (await artifacts.settle(room.desk, one.id, status, among, reason)).sentence


def _dismiss(room: OpenPage, one: Artifact, among: Among) -> None:
    async def do(given: FormValues) -> str:
        return await _settle_and_describe(room, one, "dismissed", among, given["reason"])

    open_dialog(room, f"Dismiss {one.id}?", "Later sessions are not told of it.", (REASON,), "Dismiss", do, "stop")
