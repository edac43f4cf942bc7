"""Pages of the fleet: agents, workers, triggers, findings and proposals."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

from nicegui import ui

from halter.autonomy.triggers import WatchedDocument
from halter.core.errors import NotDone
from halter.core.events.tasks import ProposalVerdict, describe_verdict
from halter.core.money import format_share, format_usd
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
from halter.dashboard.widgets import (
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
from halter.operations import agents, artifacts, control, fleet, queries
from halter.operations.artifacts import Artifact
from halter.operations.decisions import waiting
from halter.operations.fleet import WorkerView
from halter.operations.queries import AgentLine
from halter.present.moments import format_relative_moment
from halter.present.report import HEALTH_MOODS, NO_WORKERS, describe_load, describe_worker_condition, name_worker
from halter.runtime.forecast import TriggerPlan

WORKER_COLUMNS = ("process", "health", "awake", "agents", "last heartbeat", "since", "version")


def build_workers_section(page: OpenPage) -> Callable[[], Awaitable[None]]:
    """Add the section of the workers, and return its refresh function."""
    with add_section("Workers", card=True):
        lines = KeyedList[WorkerView](add_table("Workers", WORKER_COLUMNS), lambda worker: _worker_row(page, worker))
        empty_label = add_text("", "h-none")

    async def refresh() -> None:
        workers = await fleet.workers(page.actor)
        # The health is part of the key: the label and its colour change together.
        lines.show({(worker.worker, worker.health): worker for worker in workers})
        empty_label.show_text("" if any(worker.alive for worker in workers) else NO_WORKERS)

    return refresh


def _worker_row(page: OpenPage, worker: WorkerView) -> Callable[[WorkerView], None]:
    with add_box("tr"):
        add_cell(name_worker(worker), "h-what")
        with add_box("td"):
            add_chip(worker.health.capitalize(), HEALTH_MOODS[worker.health])
            condition = add_text("", "h-text h-note")
        awake, agent_versions = add_cell("", "h-short"), add_cell()
        with add_box("td", "h-short"):
            last_heartbeat = page.add_moment(None)
        add_cell(format_relative_moment(worker.since, page.now), "h-short")
        add_cell(worker.version, "h-short")

    def show(worker: WorkerView) -> None:
        sentence = describe_worker_condition(worker, page.now)
        condition.show_text(sentence)
        condition.set_visibility(bool(sentence))
        awake.show_text(describe_load(worker))
        agent_versions.show_text(
            "\n".join(f"{name} {shorten_id(version)}".strip() for name, version in worker.agents.items())
        )
        page.set_moment(last_heartbeat, worker.heard_at)

    show(worker)
    return show


FLEET_COLUMNS = ("agent", "health", "session", "spent today", "unattended", "")


async def build_fleet_page(page: OpenPage) -> RefreshPage:
    with add_section("Agents", card=True):
        lines = KeyedList[AgentLine](add_table("Agents", FLEET_COLUMNS), lambda line: _row(page, line))
        empty_label = add_text("", "h-none")
    show_workers = build_workers_section(page)

    async def refresh(_: FeedChanges) -> None:
        agent_lines = await queries.fleet(page.actor)
        lines.show({line.agent: line for line in agent_lines})
        empty_label.show_text("" if agent_lines else "No agent was switched on or had a session here yet.")
        await show_workers()

    await refresh(FeedChanges())
    return refresh


def _row(page: OpenPage, line: AgentLine) -> Callable[[AgentLine], None]:
    current, scope = [line], f"agent:{line.agent}"
    with add_box("tr"):
        with add_box("td"):
            add_link(line.agent, f"/agent/{line.agent}").classes("h-what")
        with add_box("td"):
            health, reason = add_chip(""), add_text("", "h-text h-dim h-small h-note")
        with add_box("td"):
            session, wake = add_link("", ""), add_text("", "h-text h-dim h-small")
        with add_box("td"):
            spent_label = add_text("", "h-short")
            meter = add_meter(f"spent today by {line.agent}", 0)
            burn = add_text("", "h-text h-dim h-small")
        with add_box("td"):
            switch = _switch(page, line, current)
        with add_box("td"):
            if page.has_role("approver"):
                add_button("Halt…", lambda: ask_to_halt(page, line.agent), "plain", f"Halt {line.agent}")
            resume_button = add_button("Resume…", lambda: ask_to_resume(page, scope), "plain", f"Resume {line.agent}")

    def show(line: AgentLine) -> None:
        _show_switch(switch, on=bool(line.on))
        set_link(session, line.session, f"/session/{line.session}")
        session.set_visibility(bool(line.session))
        set_chip(health, label_health(line))
        reason.show_text(explain_health(line))
        resume_button.set_visibility(page.has_role("operator") and line.halted.startswith(f"{scope} "))
        burn.show_text(f"{format_usd(line.burn_usd)} in the last hour" if line.burn_usd else "")
        _show_spent(spent_label, line)
        set_meter(meter, float(line.spent_today_usd / line.cap_today_usd) if line.cap_today_usd else 0)
        wake.show_text(_format_wake(page, line))

    def update(line: AgentLine) -> None:
        wake.show_text(_format_wake(page, line))
        if line != current[0]:
            current[0] = line
            show(line)

    show(line)
    return update


def _switch(page: OpenPage, line: AgentLine, current: Sequence[AgentLine]) -> ui.button:
    """Return a switch that shows the stored state; a click asks to change it to the opposite."""
    switch = add_button("", lambda: ask_to_switch(page, current[0]), "switch", f"{line.agent} runs unattended")
    switch.props["role"] = "switch"
    switch.set_enabled(page.has_role("operator"))
    return switch


def _show_switch(switch: ui.button, *, on: bool) -> None:
    switch.set_text("On" if on else "Off")
    switch.props["aria-checked"] = "true" if on else "false"
    switch.update()


def _show_spent(label: TextLabel, line: AgentLine) -> None:
    cap = line.cap_today_usd
    label.show_text(format_share(line.spent_today_usd, cap))


def _format_wake(page: OpenPage, line: AgentLine) -> str:
    """Describe when an agent wakes, and what wakes it earlier."""
    if not line.session:
        return "no active session"
    sources = line.wake_on if line.wake_on != "[]" else ""
    wake_time = "" if line.due_at is None else f"wakes {format_wake(line.due_at, page.now)}"
    return f"{wake_time or 'wakes'}{' or' if wake_time else ''} by {sources}" if sources else wake_time


TRIGGER_COLUMNS = ("trigger", "when", "state", "next run", "last run", "runs", "")
QUARANTINE_COLUMNS = ("document", "trigger", "attempts", "why", "")


class TriggerView(NamedTuple):
    """A trigger, and its halt if a person paused it."""

    plan: TriggerPlan
    paused: HaltRow | None


async def build_triggers_page(page: OpenPage) -> RefreshPage:
    agent_names = sorted(page.agents.folders) if page.agents else []
    if page.has_role("operator"):
        with add_box("div", "h-row"):
            add_button("New schedule…", lambda: _ask_new(page, agent_names), "go", icon="plus")
    with add_section("Triggers", card=True):
        lines = KeyedList[TriggerView](
            add_table("Triggers", TRIGGER_COLUMNS, ("runs",)), lambda trigger: _trigger_row(page, trigger)
        )
        empty_label = add_text("", "h-none")
    with add_section("Quarantined documents", card=True):
        quarantine = KeyedList[tuple[TriggerPlan, WatchedDocument]](
            add_table("Quarantined documents", QUARANTINE_COLUMNS, ("attempts",)),
            lambda one: _build_quarantine_row(page, one),
        )
        no_quarantine_label = add_text("", "h-none")

    async def refresh(_: FeedChanges) -> None:
        plans = await fleet.plans(page.actor)
        halts = {row.scope: row for row in await control.halts_now(page.actor)}
        lines.show({plan.trigger: TriggerView(plan, halts.get(f"trigger:{plan.trigger}")) for plan in plans})
        empty_label.show_text("" if plans else "No agent has a schedule, a watch or a webhook.")
        items = {(plan.trigger, item.item): (plan, item) for plan in plans for item in plan.quarantined}
        quarantine.show(items)
        no_quarantine_label.show_text("" if items else "No document is quarantined.")

    await refresh(FeedChanges())
    return refresh


def _trigger_row(page: OpenPage, trigger: TriggerView) -> Callable[[TriggerView], None]:
    plan = trigger.plan
    scope = f"trigger:{plan.trigger}"
    with add_box("tr"):
        with add_box("td"):
            with add_box("div", "h-row"):
                add_text(plan.trigger, "h-what", "span")
                add_chip(plan.type)
            add_text(plan.prompt, "h-text h-dim h-small h-note")
        add_cell(plan.when)
        with add_box("td"):
            state, reason = add_chip(""), add_text("", "h-text h-dim h-small")
        with add_box("td", "h-short"):
            next_run = page.add_moment(None)
        with add_box("td", "h-short"):
            session_link = add_link("", "")
        runs = add_cell("", "h-num")
        with add_box("td"), add_box("div", "h-row"):
            if page.has_role("operator") and plan.type == "schedule":
                add_button("Run now", lambda: _run_now(page, plan), "plain", f"Run now: {plan.trigger}", "play")
            pause_button = add_button("Pause…", lambda: _pause(page, plan), "plain", f"Pause {plan.trigger}", "pause")
            resume_button = add_button(
                "Resume…", lambda: ask_to_resume(page, scope), "plain", f"Resume {plan.trigger}", "play"
            )
            if page.has_role("operator") and not plan.is_from_file:
                add_button("End…", lambda: _end(page, plan), "plain", f"End {plan.trigger}")

    def show(trigger: TriggerView) -> None:
        plan, halt = trigger
        set_chip(state, _label_trigger(trigger))
        reason.show_text(_explain_trigger(trigger))
        pause_button.set_visibility(page.has_role("approver") and halt is None)
        resume_button.set_visibility(page.has_role("operator") and halt is not None)
        page.set_moment(next_run, plan.next_at if halt is None else None)
        last_at = format_age(plan.last_at, page.now) if plan.last_at else "never"
        set_link(session_link, last_at, f"/session/{plan.session}" if plan.session else "/sessions")
        runs.show_text(f"{plan.runs:,}")

    show(trigger)
    return show


def _label_trigger(trigger: TriggerView) -> Label:
    if trigger.paused is not None:
        return Label("Paused", "look")
    return Label("Delayed", "look") if trigger.plan.delayed else Label("Ready", "good")


def _explain_trigger(trigger: TriggerView) -> str:
    if trigger.paused is not None:
        return f"by {trigger.paused.by}{f': {trigger.paused.reason}' if trigger.paused.reason else ''}"
    documents = f"{trigger.plan.waiting} waiting" if trigger.plan.waiting else ""
    return ". ".join(each for each in (documents, trigger.plan.delayed) if each)


async def _run_now(page: OpenPage, plan: TriggerPlan) -> None:
    async def do() -> str:
        return (await agents.run_trigger(page.actor, plan.agent, plan.name)).sentence

    await page.perform(do())


def _pause(page: OpenPage, plan: TriggerPlan) -> None:
    async def do(values: FormValues) -> str:
        await control.halt(page.actor, f"trigger:{plan.trigger}", values["reason"])
        return f"{plan.trigger} is paused."

    message = "Stops the sessions that it started. It starts nothing until you resume it."
    open_dialog(page, f"Pause {plan.trigger}?", message, (REASON,), "Pause", do, "stop")


def _ask_new(page: OpenPage, agent_names: Sequence[str]) -> None:
    """Ask for a task and its times. Home shows the resulting schedule, where a person confirms it."""

    async def do(values: FormValues) -> str:
        text = f"{values['when'].strip()}, {values['task'].strip()}"
        route = await agents.route_message(page.actor, values["agent"], text)
        if route.strategy != "SCHEDULED_TASK":
            raise NotDone(f"{values['when']!r} cannot be read as times. {NEW_EXAMPLE}", "wrong")
        earlier_ids = {decision.decision for decision in await waiting(page.actor)}
        answer = await agents.give_message(page.actor, values["agent"], text)
        if earlier_ids >= {decision.decision for decision in await waiting(page.actor)}:
            raise NotDone(answer.text, "wrong")
        return "Not scheduled yet: confirm it on Home, which shows its next times and its cost."

    if not agent_names:
        page.show_message("This server has no agent folder. Start it with `halter serve FOLDER`.", bad=True)
        return
    fields = (
        FormField("task", "Task, in your own words", "", "text"),
        FormField("when", "When, such as: every weekday at 8:30"),
        FormField("agent", "Agent", agent_names[0], "choice", tuple(agent_names)),
    )
    message = "You confirm it on Home, which shows its next times and its estimated cost."
    open_dialog(page, "New schedule", message, fields, "Create", do, "go")


NEW_EXAMPLE = "Examples: every day at 7, every monday at 9:00, every 30 minutes."


def _build_quarantine_row(
    page: OpenPage, entry: tuple[TriggerPlan, WatchedDocument]
) -> Callable[[tuple[TriggerPlan, WatchedDocument]], None]:
    plan, item = entry
    with add_box("tr"):
        add_cell(item.name, "h-what")
        add_cell(plan.trigger)
        add_cell(str(item.attempts), "h-num")
        add_cell(explain_reason(item.terminal_reason or ""))
        with add_box("td"):
            if page.has_role("operator"):
                add_button("Retry", lambda: _retry(page, plan, item), "plain", f"Retry {item.name}")
    return lambda _: None


async def _retry(page: OpenPage, plan: TriggerPlan, item: WatchedDocument) -> None:
    async def do() -> str:
        return (await fleet.retry_item(page.actor, plan.agent, plan.name, item.item)).sentence

    await page.perform(do())


def _end(page: OpenPage, plan: TriggerPlan) -> None:
    async def do(values: FormValues) -> str:
        await fleet.end_trigger(page.actor, plan.agent, plan.name, values["reason"])
        return f"Ended {plan.trigger}."

    open_dialog(page, f"End {plan.trigger}?", "It starts no more sessions.", (REASON,), "End", do, "stop")


Among = Literal["findings", "proposals"]
URGENT_SEVERITIES = ("high", "critical")
MAX_FINDINGS = 100


async def build_findings_page(page: OpenPage) -> RefreshPage:
    with add_box("div", "h-filters", "Filter the findings", role="search"):
        filter_select: Any = ui.select(list(FINDING_FILTERS), value=FINDING_FILTERS[0], label="Show").props(
            "outlined dense"
        )
        if page.has_role("approver"):
            add_button("Dismiss all shown…", lambda: _dismiss_all(page, visible_artifacts))
    visible_artifacts: list[Artifact] = []
    with add_section("Findings"):
        groups = KeyedList[FindingGroup](
            add_box("div", "h-stack"), lambda group: _build_group(page, group), "No matching findings."
        )
    with add_section("Proposals"):
        proposal_cards = KeyedList[Artifact](
            add_box("div", "h-cards"),
            lambda artifact: _card(page, artifact, "proposals"),
            "No proposals.",
        )

    async def refresh(changes: FeedChanges) -> None:
        if changes.has_commits:
            rows = await artifacts.findings(page.actor, limit=MAX_FINDINGS)
            visible_artifacts[:] = sorted(
                filter(lambda artifact: _is_match(artifact, str(filter_select.value)), rows), key=_urgency
            )
            groups.show({group.key: group for group in group_findings(visible_artifacts)})
            proposal_cards.show(
                {artifact.id: artifact for artifact in (await artifacts.proposals(page.actor))[:MAX_FINDINGS]}
            )

    async def refresh_page() -> None:
        await refresh(FeedChanges(everything=True))

    filter_select.on_value_change(refresh_page)
    await refresh_page()
    return refresh


class FindingGroup(NamedTuple):
    """The findings of one agent with one severity, the newest first."""

    severity: str
    agent: str
    findings: tuple[Artifact, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.severity, self.agent


def group_findings(findings: Sequence[Artifact]) -> list[FindingGroup]:
    """Group findings that are sorted by severity."""
    groups: dict[tuple[str, str], list[Artifact]] = {}
    for artifact in findings:
        groups.setdefault((artifact.severity, artifact.agent), []).append(artifact)
    return [FindingGroup(severity, agent, tuple(group)) for (severity, agent), group in groups.items()]


def _build_group(page: OpenPage, group: FindingGroup) -> Callable[[FindingGroup], None]:
    urgent = group.severity in URGENT_SEVERITIES
    with add_fold("h-group") as fold:
        add_chip(group.severity.capitalize() or "Finding", SEVERITY_MOODS.get(group.severity, "dim"))
        add_text(group.agent, "h-what", "span")
        count = add_text("", "h-dim h-small", "span")
    # Urgent findings start unfolded; a long list of minor ones starts folded.
    if urgent or len(group.findings) <= MAX_OPEN_GROUP:
        fold.props["open"] = True
    with fold:
        cards = KeyedList[Artifact](add_box("div", "h-cards"), lambda artifact: _card(page, artifact, "findings"))

    def show(group: FindingGroup) -> None:
        count.show_text(format_count(len(group.findings), "finding"))
        cards.show({artifact.id: artifact for artifact in group.findings})

    show(group)
    return show


MAX_OPEN_GROUP = 6
FINDING_FILTERS = ("Undecided", "High and critical", "All")


def _is_match(artifact: Artifact, query: str) -> bool:
    if query == "High and critical":
        return artifact.severity in URGENT_SEVERITIES
    return query == "All" or not artifact.status


def _urgency(artifact: Artifact) -> tuple[int, int]:
    """Sort by severity, the newest first among equals."""
    return SEVERITIES.index(artifact.severity) if artifact.severity in SEVERITIES else len(SEVERITIES), -artifact.at


def _dismiss_all(page: OpenPage, artifacts: Sequence[Artifact]) -> None:
    undecided_artifacts = [artifact for artifact in artifacts if not artifact.status]

    async def do(values: FormValues) -> str:
        for artifact in undecided_artifacts:
            await _settle_and_describe(page, artifact, "dismissed", "findings", values["reason"])
        return f"{format_count(len(undecided_artifacts), 'finding')} dismissed."

    message = f"Future sessions will not see these {format_count(len(undecided_artifacts), 'finding')}."
    open_dialog(page, "Dismiss all shown?", message, (REASON,), "Dismiss all", do, "stop")


def _card(page: OpenPage, artifact: Artifact, among: Among) -> Callable[[Artifact], None]:
    title, _, body = artifact.text.removeprefix(f"[{artifact.severity}] ").partition("\n")
    with add_box("article", "h-card h-stack", f"{artifact.about} {artifact.id}"):
        with add_box("div", "h-row h-small"):
            if artifact.severity:
                add_chip(artifact.severity.capitalize(), SEVERITY_MOODS.get(artifact.severity, "dim"))
            else:
                add_chip(artifact.about.capitalize())
            status = add_chip(_status(artifact))
            page.add_moment(artifact.at, "h-dim")
        add_text(title, "h-title")
        _add_rest(body.strip())
        add_text("; ".join(_list_details(artifact)), "h-dim h-text h-small")
        with add_box("div", "h-row h-small"):
            add_link(f"Session {shorten_id(artifact.session)}", f"/session/{artifact.session}")
            add_id(artifact.id)
        buttons = add_box("div", "h-row")
        with buttons:
            if page.has_role("approver"):
                add_button("Accept", lambda: _settle(page, artifact, "kept", among), "yes", f"Accept {artifact.id}")
                add_button("Dismiss…", lambda: _dismiss(page, artifact, among), "plain", f"Dismiss {artifact.id}")
    buttons.set_visibility(not artifact.status)

    def show(artifact: Artifact) -> None:
        status.show_text(_status(artifact))
        buttons.set_visibility(not artifact.status)

    return show


LONG_FINDING = 280


def _add_rest(text: str) -> None:
    """Show a text, folded if it is long."""
    if len(text) <= LONG_FINDING:
        if text:
            add_text(text).style("white-space: pre-wrap")
        return
    with add_fold() as fold:
        add_text(f"{make_single_line(text, LONG_FINDING // 2)[: LONG_FINDING // 2]}…", "h-text h-small", "span")
    with fold:
        add_text(text).style("white-space: pre-wrap")


def _status(artifact: Artifact) -> str:
    return f"{describe_verdict(artifact.status)} by {artifact.by}" if artifact.status else "undecided"


def _list_details(artifact: Artifact) -> list[str]:
    count_text = f"seen {artifact.observed_count} times" if artifact.observed_count > 1 else ""
    return [
        detail
        for detail in (artifact.agent, artifact.support, artifact.review and f"review: {artifact.review}", count_text)
        if detail
    ]


async def _settle(page: OpenPage, artifact: Artifact, status: ProposalVerdict, among: Among) -> None:
    await page.perform(_settle_and_describe(page, artifact, status, among, ""))


async def _settle_and_describe(
    page: OpenPage, artifact: Artifact, status: ProposalVerdict, among: Among, reason: str
) -> str:
    return (await artifacts.settle(page.actor, artifact.id, status, among, reason)).sentence


def _dismiss(page: OpenPage, artifact: Artifact, among: Among) -> None:
    async def do(values: FormValues) -> str:
        return await _settle_and_describe(page, artifact, "dismissed", among, values["reason"])

    open_dialog(page, f"Dismiss {artifact.id}?", "Future sessions will not see it.", (REASON,), "Dismiss", do, "stop")
