"""The page of one agent: health, policy, sessions, sensors, and the controls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from halter.core.clock import DAY, format_duration
from halter.core.errors import NotDone
from halter.core.events import SensorChanged
from halter.core.money import ZERO_USD, Cap, format_exact_micros, format_usd
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.core.tools import ProviderTool
from halter.dashboard.labels import (
    MODES,
    Label,
    explain_end,
    explain_health,
    format_age,
    format_span,
    format_value,
    format_wake,
    label_health,
    label_sensor,
    label_session,
)
from halter.dashboard.page import (
    REASON,
    FeedChanges,
    FormField,
    FormValues,
    OpenPage,
    RefreshPage,
    ask_to_resume,
    ask_to_switch_on,
    open_dialog,
)
from halter.dashboard.session import MAX_TITLE, describe_value, find_number_series, list_values
from halter.dashboard.sessions import MAX_RUN_BARS, make_run_bar
from halter.dashboard.widgets import (
    KeyedList,
    RunBars,
    TextLabel,
    add_box,
    add_button,
    add_chip,
    add_facts,
    add_fold,
    add_icon,
    add_link,
    add_meter,
    add_preformatted,
    add_section,
    add_spark,
    add_stat,
    add_text,
    make_legible,
    set_chip,
    set_meter,
    set_spark,
)
from halter.operations import agents, control, fleet, messages, queries
from halter.operations.backtest import backtest_policy
from halter.operations.definition import RecordedDefinition, read_definition
from halter.operations.queries import AgentLine, FactView
from halter.present.sheet import list_lines
from halter.present.tables import build_backtest_sheet
from halter.runtime.forecast import TriggerPlan

HISTORY_DAYS = 14
MAX_RECENT_SESSIONS = 10


async def build_agent_page(page: OpenPage, name: str) -> RefreshPage:
    line = await _find_line(page, name)
    head = AgentHead(page, line)
    with add_box("div", "h-wide"):
        with add_box("div", "h-col"):
            with add_section("Sessions", card=True):
                bars = RunBars("The newest sessions, by outcome")
                sessions = KeyedList[SessionRow](
                    add_box("ul", "h-list h-lines"), lambda row: _build_session(page, row), "No sessions yet."
                )
                add_link("All sessions", f"/sessions?agent={name}")
            with add_section("Sensors and hot state", card=True):
                sensors = KeyedList[SensedFact](
                    add_box("ul", "h-list h-lines"), lambda one: _build_sensed(page, one), "No sensors."
                )
        with add_box("div", "h-col"):
            with add_section("Triggers", card=True):
                triggers = KeyedList[TriggerPlan](
                    add_box("ul", "h-list h-lines"),
                    lambda plan: _build_trigger(page, plan),
                    "No triggers.",
                )
            with add_section("Definition", card=True):
                _build_definition(page, await read_definition(page.actor, name))
                backtest = add_preformatted("")
                backtest.set_visibility(False)
                add_button("Backtest a policy…", lambda: _ask_policy(page, name, backtest), "plain")

    async def refresh(changes: FeedChanges) -> None:
        line = await _find_line(page, name)
        await head.show(line, everything=changes.has_commits)
        if not changes.has_changes:
            return
        rows = await queries.sessions(page.actor, name, limit=MAX_RUN_BARS)
        bars.show([make_run_bar(row, page.now) for row in reversed(rows)] if len(rows) > 1 else [])
        sessions.show({(row.session, row.state): row for row in rows[:MAX_RECENT_SESSIONS]})
        sensors.show({one.key: one for one in await _read_senses(page, line)})
        triggers.show({plan.trigger: plan for plan in await fleet.plans(page.actor, name)})

    await refresh(FeedChanges(everything=True))
    return refresh


async def _find_line(page: OpenPage, name: str) -> AgentLine:
    for line in await queries.fleet(page.actor):
        if line.agent == name:
            return line
    raise NotDone(
        f"There is no agent {name!r}: no agent of that name was switched on or had a session here.", "missing"
    )


class AgentHead:
    """The head of an agent's page: its health, its spending, and the controls."""

    def __init__(self, page: OpenPage, line: AgentLine) -> None:
        self._page = page
        self._line = line
        with add_section("Now", card=True):
            with add_box("div", "h-row h-apart"):
                with add_box("div", "h-row"):
                    self._health = add_chip("")
                    self._reason_label = add_text("")
                self._build_actions()
            with add_box("div", "h-stats").style("margin-top: 1rem"):
                with add_box("div"):
                    self._spent_stat = add_stat("Spent today")
                    self._meter = add_meter(f"Spent today by {line.agent}", 0)
                self._burn = add_stat("Last hour")
                self._wake_stat = add_stat("Next wake")
                with add_box("div"):
                    self._history_stat = add_stat(f"Last {HISTORY_DAYS} days")
                    self._spark = add_spark(f"Spent by {line.agent} on each of the last {HISTORY_DAYS} days", ())

    def _build_actions(self) -> None:
        page, name = self._page, self._line.agent
        with add_box("div", "h-row"):
            if page.has_role("operator"):
                add_button("Start a session…", lambda: ask_to_start(page, name), "go", icon="plus")
                self._message = add_button("Message…", lambda: _ask_message(page, self._line), icon="chat")
                self._switch = add_button("", lambda: ask_to_switch(page, self._line))
            if page.has_role("approver"):
                self._halt = add_button("Halt…", lambda: ask_to_halt(page, name), "plain", f"Halt {name}")
            self._resume = add_button("Resume…", lambda: ask_to_resume(page, f"agent:{name}"))

    async def show(self, line: AgentLine, *, everything: bool) -> None:
        self._line = line
        set_chip(self._health, label_health(line))
        self._reason_label.show_text(explain_health(line))
        self._wake_stat[0].show_text("none" if line.due_at is None else format_wake(line.due_at, self._page.now))
        self._wake_stat[1].show_text(f"or by {line.wake_on}" if line.wake_on and line.wake_on != "[]" else "")
        if everything:
            self._show_money(line)
            await self._show_days(line)
            self._show_actions(line)

    def _show_money(self, line: AgentLine) -> None:
        cap = line.cap_today_usd
        self._spent_stat[0].show_text(format_usd(line.spent_today_usd))
        self._spent_stat[1].show_text("no cap" if cap is None else f"of {format_usd(cap)}")
        set_meter(self._meter, float(line.spent_today_usd / cap) if cap else 0)
        self._burn[0].show_text(format_usd(line.burn_usd))
        self._burn[1].show_text(f"{format_count(line.under_way, 'active session')}")

    async def _show_days(self, line: AgentLine) -> None:
        days = await read_days(self._page, line.agent)
        self._history_stat[0].show_text(format_usd(sum(days, ZERO_USD)))
        set_spark(self._spark, [float(day) for day in days])

    def _show_actions(self, line: AgentLine) -> None:
        mine = line.halted.startswith(f"agent:{line.agent} ")
        self._resume.set_visibility(self._page.has_role("operator") and mine)
        if self._page.has_role("approver"):
            self._halt.set_visibility(not mine)
        if self._page.has_role("operator"):
            self._message.set_visibility(bool(line.session))
            self._switch.set_text("Switch off…" if line.on else "Switch on…")


async def read_days(page: OpenPage, agent: str) -> Sequence[Decimal]:
    """Read what an agent spent on each of the last days, the oldest first."""
    ends_at = page.now - page.now % DAY + DAY
    slices = await queries.spending(page.actor, ends_at - HISTORY_DAYS * DAY, ends_at, HISTORY_DAYS)
    spent_by_day = {slice_.part: slice_.spent_usd for slice_ in slices if slice_.agent == agent}
    return [spent_by_day.get(day, ZERO_USD) for day in range(HISTORY_DAYS)]


def ask_to_start(page: OpenPage, agent: str) -> None:
    """Ask for a task and start a session with it. The server needs the agent's folder for that."""

    async def do(values: FormValues) -> str:
        return (await agents.give_message(page.actor, agent, values["task"])).sentence

    message = "The agent works unattended within its caps and asks for approval where its policy requires it."
    task = FormField("task", "Task", "", "text")
    open_dialog(page, f"Start a session of {agent}?", message, (task,), "Start", do, "go")


def _ask_message(page: OpenPage, line: AgentLine) -> None:
    async def do(values: FormValues) -> str:
        await messages.send_message(page.actor, line.session, values["text"])
        return f"{line.session}: message sent; it wakes."

    text = FormField("text", "Message", "", "text")
    message = f"{line.session} sees the message in its next turn."
    open_dialog(page, f"Send a message to {line.agent}?", message, (text,), "Send", do, "go")


def ask_to_switch(page: OpenPage, line: AgentLine) -> None:
    """Ask before switching an agent, and show what that stops."""
    if not line.on:
        ask_to_switch_on(page, line.agent)
        return

    async def do(values: FormValues) -> str:
        return (await control.switch(page.actor, line.agent, on=False, reason=values["reason"])).sentence

    stops = f" Stops {format_count(line.under_way, 'session')}." if line.under_way else ""
    message = f"Off: triggers and wakes are ignored until you switch it on.{stops}"
    open_dialog(page, f"Switch {line.agent} off?", message, (REASON,), "Switch off", do, "stop")


def ask_to_halt(page: OpenPage, agent: str) -> None:
    async def do(values: FormValues) -> str:
        await control.halt(page.actor, f"agent:{agent}", values["reason"])
        return f"{agent} is halted."

    message = "Its sessions stop within a second. Nothing starts until you resume it."
    open_dialog(page, f"Halt {agent}?", message, (REASON,), "Halt", do, "stop")


def _ask_policy(page: OpenPage, agent: str, output: TextLabel) -> None:
    """Ask for a cap or a policy, and show its decisions over the recorded sessions. No call or request runs."""

    async def do(values: FormValues) -> str:
        cap, policy = values["cap"].strip(), values["policy"].strip()
        if not cap and not policy:
            raise NotDone("Nothing to backtest: enter a cap or a policy.", "wrong")
        result = await backtest_policy(page.actor, agent, policy=policy, cap=cap)
        output.show_text("\n".join(list_lines(build_backtest_sheet(result))))
        output.set_visibility(True)
        return f"{result.loosened:,} decisions would be looser." if result.loosened else "No decision would be looser."

    message = "Evaluates the recorded calls and requests again. Nothing runs. Review the result before you apply it."
    fields = (
        FormField("cap", "Session cap in dollars"),
        FormField("policy", "Or the text of an agent.yaml or halter.yaml", "", "text"),
    )
    open_dialog(page, f"Backtest a policy on {agent}?", message, fields, "Run backtest", do, "go")


def _build_session(page: OpenPage, row: SessionRow) -> Callable[[SessionRow], None]:
    label = label_session(row)
    with add_box("li", "h-row"):
        add_icon(label.icon or "play", label.mood)
        add_link(row.session, f"/session/{row.session}")
        add_chip(label.text, label.mood)
        reason = explain_end(row) if row.ended_at is not None else ""
        add_text(reason, "h-dim h-small", "span")
        add_box("span", "h-space")
        took = format_span(max(0, (row.ended_at or page.now) - row.started_at))
        add_text(took, "h-dim h-small", "span")
        page.add_moment(row.started_at, "h-dim h-small")
    return lambda _: None


@dataclass(frozen=True, slots=True)
class SensedFact:
    """A sensor with its health, or a fact of the hot state with its earlier numbers."""

    name: str
    health: Label | None = None
    sentence: str = ""
    fact: FactView | None = None
    numbers: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, bool, bool]:
        # The label and its colour change together. The sparkline appears with the second number.
        return self.name, self.health.text if self.health else "", self.fact is None, bool(self.numbers)


async def _read_senses(page: OpenPage, line: AgentLine) -> Sequence[SensedFact]:
    if not line.session:
        return []
    state = await queries.hot_state(page.actor, line.session)
    numbers = find_number_series(await queries.hot_state_history(page.actor, line.session))
    event_by_sensor: Mapping[str, SensorChanged] = await queries.sensors(page.actor, line.session)
    sensors = [
        SensedFact(name, label_sensor(event.health), "" if event.health == "ok" else event.sentence)
        for name, event in event_by_sensor.items()
    ]
    facts = [
        SensedFact(
            name, fact=FactView(value, fact.at, fact.by), numbers=tuple(value for _, value in numbers.get(name, ()))
        )
        for fact_name, fact in state.facts.items()
        for name, value in list_values(fact_name, fact.value)
    ]
    return [*sensors, *facts]


def _build_sensed(page: OpenPage, sensed: SensedFact) -> Callable[[SensedFact], None]:
    with add_box("li", "h-row"):
        add_text(sensed.name, "h-what", "span")
        if sensed.health is not None:
            add_chip(sensed.health.text, sensed.health.mood)
        value = add_text("", "h-text h-mono h-cut", "span")
        add_box("span", "h-space")
        spark = add_spark(f"{sensed.name} in the newest turns", sensed.numbers) if sensed.numbers else None
        age = page.add_moment(None, "h-dim h-small") if sensed.fact else None

    def show(sensed: SensedFact) -> None:
        value.show_text(sensed.sentence if sensed.fact is None else format_value(sensed.fact.value))
        if sensed.fact is not None:
            value.props["title"] = make_legible(describe_value(sensed.fact.value), MAX_TITLE)
        if age is not None and sensed.fact is not None:
            page.set_moment(age, sensed.fact.at)
        if spark is not None:
            set_spark(spark, sensed.numbers)

    show(sensed)
    return show


def _build_trigger(page: OpenPage, plan: TriggerPlan) -> Callable[[TriggerPlan], None]:
    with add_box("li"):
        with add_box("div", "h-row"):
            add_link(plan.name, "/triggers").classes("h-what")
            add_chip(plan.type)
        add_text(plan.when, "h-text h-dim h-small")
        summary = add_text("", "h-text h-dim h-small")

    def show(plan: TriggerPlan) -> None:
        next_run = f"next {format_age(plan.next_at, page.now)}" if plan.next_at else ""
        last_run = f"last {format_age(plan.last_at, page.now)}" if plan.last_at else "never ran"
        summary.show_text(" · ".join(each for each in (next_run, last_run, format_count(plan.runs, "run")) if each))

    show(plan)
    return show


def _build_definition(page: OpenPage, definition: RecordedDefinition | None) -> None:
    if definition is None:
        add_text("The definition is stored with the first session.", "h-none")
        return
    add_facts(list_definition_facts(definition))
    with add_box("div", "h-row h-small h-dim"):
        add_text("As of its newest session,", "", "span")
        page.add_moment(definition.at)
    if definition.instructions:
        with add_fold() as fold:
            add_text("Instructions", "h-what", "span")
        with fold:
            add_preformatted(definition.instructions)


def describe_provider_tool(tool: ProviderTool) -> str:
    return f"{tool.name}, at most {format_count(tool.max_uses, 'time')} a request; the guard does not see its calls"


def list_definition_facts(definition: RecordedDefinition) -> list[tuple[str, str]]:
    """List the configuration and the policy of an agent as named facts."""
    caps = definition.caps
    return [
        ("Model", ", then ".join((definition.model, *definition.fallback_models))),
        ("Asks for approval", MODES.get(definition.mode, definition.mode)),
        ("Unattended", "yes" if definition.runs_by_itself else "no, only when started"),
        ("Session cap", _format_cap(caps.session)),
        ("Agent cap", "; ".join(_format_cap(cap) for cap in caps.agent)),
        ("Fleet cap", "; ".join(_format_cap(cap) for cap in caps.fleet)),
        ("Token cap", f"{caps.token_budget:,} per session" if caps.token_budget else ""),
        (
            "At its cap",
            {
                "wrap_up": "wraps up",
                "stop": "stops",
                "ask": "asks for a higher cap",
                "wait": "waits for its window",
            }.get(definition.on_cap, definition.on_cap),
        ),
        ("Turn limit", f"{definition.max_steps} steps and {format_duration(definition.timeout)}"),
        ("Tools", ", ".join(definition.tools)),
        ("Tools of the provider", "; ".join(map(describe_provider_tool, definition.provider_tools))),
        ("Built-in calls", ", ".join(definition.verbs)),
        ("Switched off", ", ".join(definition.disabled)),
        ("Sensors", ", ".join(definition.sensors)),
        ("Hosts", "any" if definition.allowed_hosts is None else ", ".join(definition.allowed_hosts) or "none"),
    ]


def _format_cap(cap: Cap) -> str:
    amount = "no cap" if cap.max_cost_usd is None else format_exact_micros(cap.max_cost_usd)
    return f"{amount} per {cap.per}" if cap.per else amount
