"""The page of one agent: how it is, what it is allowed, what it did, what it senses, and how it is steered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from halter.core.clock import DAY, format_duration
from halter.core.errors import NotDone
from halter.core.events import SensorChanged
from halter.core.money import ZERO_USD, Cap, micros_to_usd
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.core.tools import ProviderTool
from halter.dashboard.labels import (
    MODES,
    Label,
    explain_end,
    explain_health,
    format_age,
    format_money,
    format_span,
    format_value,
    format_wake,
    label_health,
    label_sensor,
    label_state,
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
from halter.dashboard.session import MAX_TITLE, describe_value, find_number_series, list_values
from halter.dashboard.sessions import MAX_RUN_BARS, make_run_bar
from halter.operations import agents, control, fleet, queries
from halter.operations.backtest import backtest_policy
from halter.operations.definition import AgentDefinition, read_definition
from halter.operations.queries import AgentLine, FactView
from halter.present.backtest import build_backtest_sheet
from halter.present.sheet import list_lines
from halter.runtime.forecast import TriggerPlan

HISTORY_DAYS = 14
SESSIONS_SHOWN = 10


async def build_agent_page(page: OpenPage, name: str) -> RefreshPage:
    line = await _find_line(page, name)
    head = AgentHead(page, line)
    with add_box("div", "h-wide"):
        with add_box("div", "h-col"):
            with add_section("Sessions", card=True):
                bars = RunBars("The newest sessions, by how they went")
                sessions = KeyedList[SessionRow](
                    add_box("ul", "h-list h-lines"), lambda row: _build_session(page, row), "It had no session yet."
                )
                add_link("All its sessions", f"/sessions?agent={name}")
            with add_section("What it senses", card=True):
                sensors = KeyedList[SensedFact](
                    add_box("ul", "h-list h-lines"), lambda one: _build_sensed(page, one), "It has no sensors."
                )
        with add_box("div", "h-col"):
            with add_section("Triggers", card=True):
                triggers = KeyedList[TriggerPlan](
                    add_box("ul", "h-list h-lines"),
                    lambda plan: _build_trigger(page, plan),
                    "Nothing starts it by itself.",
                )
            with add_section("Definition", card=True):
                _build_definition(page, await read_definition(page.actor, name))
                tried = add_preformatted("")
                tried.set_visibility(False)
                add_button("Try another policy on the past…", lambda: _ask_policy(page, name, tried), "plain")

    async def refresh(changes: FeedChanges) -> None:
        line = await _find_line(page, name)
        await head.show(line, everything=changes.has_commits)
        if not changes.has_news:
            return
        rows = await queries.sessions(page.actor, name, limit=MAX_RUN_BARS)
        bars.show([make_run_bar(row, page.now) for row in reversed(rows)] if len(rows) > 1 else [])
        sessions.show({(row.session, row.state): row for row in rows[:SESSIONS_SHOWN]})
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
    """The head of an agent's page: how it is, what it spends, and what a person can do about it."""

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
        self._spent_stat[0].show_text(format_money(line.spent_today_usd))
        self._spent_stat[1].show_text("no cap" if cap is None else f"of {format_money(cap)}")
        set_meter(self._meter, float(line.spent_today_usd / cap) if cap else 0)
        self._burn[0].show_text(format_money(line.burn_usd))
        self._burn[1].show_text(f"{format_count(line.under_way, 'session')} under way")

    async def _show_days(self, line: AgentLine) -> None:
        days = await read_days(self._page, line.agent)
        self._history_stat[0].show_text(format_money(sum(days, ZERO_USD)))
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
    """Reads what an agent spent on each of the last days, the oldest first."""
    until = page.now - page.now % DAY + DAY
    parts = await queries.spending(page.actor, until - HISTORY_DAYS * DAY, until, HISTORY_DAYS)
    spent = {part.part: part.spent_usd for part in parts if part.agent == agent}
    return [spent.get(day, ZERO_USD) for day in range(HISTORY_DAYS)]


def ask_to_start(page: OpenPage, agent: str) -> None:
    """Asks for a task, and begins a session with it; that takes the agent's folder, which the server has or has not."""

    async def do(values: FormValues) -> str:
        return (await agents.give_message(page.actor, agent, values["task"])).sentence

    says = "The agent works on it by itself, within its caps, and asks where its policy says so."
    task = FormField("task", "What is to be done", "", "text")
    open_dialog(page, f"Start a session of {agent}?", says, (task,), "Start", do, "go")


def _ask_message(page: OpenPage, line: AgentLine) -> None:
    async def do(values: FormValues) -> str:
        await control.send_message(page.actor, line.session, values["text"])
        return f"{line.session} is told, and wakes."

    text = FormField("text", "Your words", "", "text")
    says = f"{line.session} sees your words in its next turn."
    open_dialog(page, f"Say something to {line.agent}?", says, (text,), "Say it", do, "go")


def ask_to_switch(page: OpenPage, line: AgentLine) -> None:
    """Asks before an agent is switched, and says what that stops."""

    async def do(values: FormValues) -> str:
        return (await control.switch(page.actor, line.agent, on=not line.on, reason=values["reason"])).sentence

    if line.on:
        stops = f" {format_count(line.under_way, 'session')} of it is stopped." if line.under_way else ""
        says = f"Nothing of it starts by itself until it is switched on again.{stops}"
        open_dialog(page, f"Switch {line.agent} off?", says, (REASON,), "Switch off", do, "stop")
    else:
        says = "It runs by itself, and its triggers start sessions, wherever a process has its folder."
        open_dialog(page, f"Switch {line.agent} on?", says, (REASON,), "Switch on", do)


def ask_to_halt(page: OpenPage, agent: str) -> None:
    async def do(values: FormValues) -> str:
        await control.halt(page.actor, f"agent:{agent}", values["reason"])
        return f"{agent} is halted."

    says = "Its sessions stop within a second, and nothing of it starts until it is resumed."
    open_dialog(page, f"Halt {agent}?", says, (REASON,), "Halt it", do, "stop")


def _ask_policy(page: OpenPage, agent: str, tried: TextLabel) -> None:
    """Asks for a cap or a policy, and shows what it would have decided over the recorded sessions; nothing acts."""

    async def do(values: FormValues) -> str:
        cap, policy = values["cap"].strip(), values["policy"].strip()
        if not cap and not policy:
            raise NotDone("Give a cap or a policy: without one there is nothing to try.", "wrong")
        found = await backtest_policy(page.actor, agent, policy=policy, cap=cap)
        tried.show_text("\n".join(list_lines(build_backtest_sheet(found))))
        tried.set_visibility(True)
        return f"{found.loosened:,} decisions would be looser." if found.loosened else "Nothing would be looser."

    says = "The recorded calls and requests are judged again under it. Look at the result before you apply it."
    fields = (
        FormField("cap", "The cap of a session, in dollars"),
        FormField("policy", "Or the text of an agent.yaml or a halter.yaml", "", "text"),
    )
    open_dialog(page, f"Try another policy on the past of {agent}?", says, fields, "Try it", do, "go")


def _build_session(page: OpenPage, row: SessionRow) -> Callable[[SessionRow], None]:
    label = label_state(row.state)
    with add_box("li", "h-row"):
        add_icon(label.icon or "play", label.mood)
        add_link(row.session, f"/session/{row.session}")
        add_chip(label.text, label.mood)
        why = explain_end(row) if row.ended_at is not None else ""
        add_text(why, "h-dim h-small", "span")
        add_box("span", "h-space")
        took = format_span(max(0, (row.ended_at or page.now) - row.started_at))
        add_text(took, "h-dim h-small", "span")
        page.add_moment(row.started_at, "h-dim h-small")
    return lambda _: None


@dataclass(frozen=True, slots=True)
class SensedFact:
    """A sensor with its health, or a fact of the hot state with the numbers that it was before."""

    name: str
    health: Label | None = None
    sentence: str = ""
    fact: FactView | None = None
    numbers: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, bool, bool]:
        # Word and colour change together; a line of numbers appears with the second number.
        return self.name, self.health.text if self.health else "", self.fact is None, bool(self.numbers)


async def _read_senses(page: OpenPage, line: AgentLine) -> Sequence[SensedFact]:
    if not line.session:
        return []
    state = await queries.hot_state(page.actor, line.session)
    numbers = find_number_series(await queries.hot_state_history(page.actor, line.session))
    known: Mapping[str, SensorChanged] = await queries.sensors(page.actor, line.session)
    sensors = [
        SensedFact(name, label_sensor(event.health), "" if event.health == "ok" else event.sentence)
        for name, event in known.items()
    ]
    facts = [
        SensedFact(
            name, fact=FactView(value, fact.at, fact.by), numbers=tuple(value for _, value in numbers.get(name, ()))
        )
        for whole, fact in state.facts.items()
        for name, value in list_values(whole, fact.value)
    ]
    return [*sensors, *facts]


def _build_sensed(page: OpenPage, one: SensedFact) -> Callable[[SensedFact], None]:
    with add_box("li", "h-row"):
        add_text(one.name, "h-what", "span")
        if one.health is not None:
            add_chip(one.health.text, one.health.mood)
        value = add_text("", "h-text h-mono h-cut", "span")
        add_box("span", "h-space")
        spark = add_spark(f"{one.name} in the newest turns", one.numbers) if one.numbers else None
        age = page.add_moment(None, "h-dim h-small") if one.fact else None

    def show(one: SensedFact) -> None:
        value.show_text(one.sentence if one.fact is None else format_value(one.fact.value))
        if one.fact is not None:
            value.props["title"] = make_legible(describe_value(one.fact.value), MAX_TITLE)
        if age is not None and one.fact is not None:
            page.set_moment(age, one.fact.at)
        if spark is not None:
            set_spark(spark, one.numbers)

    show(one)
    return show


def _build_trigger(page: OpenPage, plan: TriggerPlan) -> Callable[[TriggerPlan], None]:
    with add_box("li"):
        with add_box("div", "h-row"):
            add_link(plan.name, "/triggers").classes("h-what")
            add_chip(plan.type)
        add_text(plan.when, "h-text h-dim h-small")
        said = add_text("", "h-text h-dim h-small")

    def show(plan: TriggerPlan) -> None:
        following = f"next {format_age(plan.next_at, page.now)}" if plan.next_at else ""
        last = f"last {format_age(plan.last_at, page.now)}" if plan.last_at else "never ran"
        said.show_text(" · ".join(each for each in (following, last, format_count(plan.runs, "run")) if each))

    show(plan)
    return show


def _build_definition(page: OpenPage, found: AgentDefinition | None) -> None:
    if found is None:
        add_text("Its definition is stored with its first session.", "h-none")
        return
    add_facts(list_definition_facts(found))
    with add_box("div", "h-row h-small h-dim"):
        add_text("As its newest session began,", "", "span")
        page.add_moment(found.at)
    if found.instructions:
        with add_fold() as fold:
            add_text("Instructions", "h-what", "span")
        with fold:
            add_preformatted(found.instructions)


def describe_provider_tool(tool: ProviderTool) -> str:
    return f"{tool.name}, at most {format_count(tool.max_uses, 'time')} a request; the guard does not see its calls"


def list_definition_facts(found: AgentDefinition) -> list[tuple[str, str]]:
    """Lists what an agent is and may, in words."""
    caps = found.caps
    return [
        ("Model", ", then ".join((found.model, *found.fallback_models))),
        ("Asks you", MODES.get(found.mode, found.mode)),
        ("By itself", "yes" if found.runs_by_itself else "only when it is started"),
        ("A session costs", f"at most {_format_cap(caps.session)}"),
        ("The agent costs", "; ".join(f"at most {_format_cap(cap)}" for cap in caps.agent)),
        ("The fleet costs", "; ".join(f"at most {_format_cap(cap)}" for cap in caps.fleet)),
        ("Tokens", f"at most {caps.token_budget:,} a session" if caps.token_budget else ""),
        (
            "At its cap",
            {"wrap_up": "it wraps up", "stop": "it stops", "ask": "it asks"}.get(found.on_cap, found.on_cap),
        ),
        ("A turn takes", f"at most {found.max_steps} steps and {format_duration(found.timeout)}"),
        ("Tools", ", ".join(found.tools)),
        ("Tools of the provider", "; ".join(map(describe_provider_tool, found.provider_tools))),
        ("Verbs", ", ".join(found.verbs)),
        ("Switched off", ", ".join(found.disabled)),
        ("Sensors", ", ".join(found.sensors)),
        ("Hosts", "any" if found.allowed_hosts is None else ", ".join(found.allowed_hosts) or "none"),
    ]


def _format_cap(cap: Cap) -> str:
    amount = "any amount" if cap.max_cost_usd is None else format_money(micros_to_usd(cap.max_cost_usd))
    return f"{amount} a {cap.per}" if cap.per else amount
