"""Home: the fleet in one line, what needs a person, last night's events, and the spending of each agent."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
from nicegui.element import Element

from halter.core.clock import DAY, HOUR, SECOND, parse_duration
from halter.core.errors import NotDone
from halter.core.money import ZERO_USD, format_share, format_usd
from halter.core.rows import HaltRow, NotificationRow
from halter.core.text import describe_need_count, format_count, join_names, to_one_line
from halter.dashboard.labels import (
    RISK_MOODS,
    SEVERITY_MOODS,
    Label,
    explain_terminal,
    format_span,
    is_unwell,
    label_decision,
    label_state,
    name_scope,
    translate_scopes,
)
from halter.dashboard.page import (
    REASON,
    FeedChanges,
    FormField,
    FormValues,
    OpenPage,
    RefreshPage,
    ask_cap,
    ask_to_resume,
    ask_to_switch_on,
    open_dialog,
)
from halter.dashboard.widgets import (
    Click,
    KeyedList,
    TextLabel,
    add_arguments,
    add_badge,
    add_box,
    add_button,
    add_chip,
    add_command,
    add_icon,
    add_link,
    add_meter,
    add_section,
    add_spark,
    add_text,
    make_legible,
    set_meter,
    set_spark,
    split_arguments,
)
from halter.guard.approvals import PendingDecision
from halter.operations import artifacts, decisions, messages, money, queries
from halter.operations.artifacts import Artifact
from halter.operations.decisions import ApprovalTerms, ShownDecision, waiting
from halter.operations.fleet import retry_item
from halter.operations.queries import AgentLine
from halter.operations.report import AnswersAlike, EndsAlike, NightSummary
from halter.operations.rules import SAME, list_rule_offers
from halter.present.decisions import DecisionPrompt, render_prompt
from halter.present.moments import format_moment
from halter.runtime.needs import Need

DANGEROUS_LEVELS = ("HIGH", "CRITICAL")
CALLS = ("approval", "unknown_call", "cap_raise")
"""Decisions whose name is a tool's or a model's."""


def build_decision_card(page: OpenPage, decision: PendingDecision) -> Callable[[PendingDecision], None]:
    """Show a decision and the buttons that answer it. Only its age is updated later."""
    prompt = render_prompt(decision)
    danger = decision.risk in DANGEROUS_LEVELS
    kind = label_decision(decision.about)
    title = prompt.what.removesuffix(".")
    with add_box("article", f"h-card h-ask {'h-danger' if danger else ''}", title):
        with add_box("div", "h-lead"):
            add_badge(Label(kind.text, "bad" if danger else kind.mood, kind.icon))
            with add_box("div"):
                add_text(title, "h-title")
                with add_box("div", "h-row h-small"):
                    add_chip(kind.text)
                    if decision.about in CALLS:
                        add_text(decision.name, "h-mono h-dim", "span")
                    if decision.risk:
                        add_chip(f"{decision.risk.capitalize()} risk", RISK_MOODS.get(decision.risk, "look"))
                    age = add_text(_age(page, decision), "h-dim")
        if prompt.why:
            add_text(f"“{prompt.why}”", "h-text h-words")
        if decision.cause:
            add_text(f"Asked because: {decision.cause}.", "h-text h-small")
        # The provenance check explains its reasons below the arguments.
        if decision.reasons and not split_arguments(prompt.details)[1]:
            add_text(f"Risk factors: {'; '.join(decision.reasons)}.", "h-text h-dim h-small")
        if prompt.details:
            add_arguments(prompt.details)
        if decision.session:
            add_link(f"Session {decision.session}", f"/session/{decision.session}").classes("h-small")
        if page.has_role("approver"):
            _answers(page, decision, prompt)
    return lambda newer: _update_age(page, age, newer)


def _update_age(page: OpenPage, age: TextLabel, decision: PendingDecision) -> None:
    age.show_text(_age(page, decision))


def _age(page: OpenPage, decision: PendingDecision) -> str:
    remaining = decision.expires_at - page.now
    ends = (
        f" · {format_span(remaining).partition(' d')[0]}{' d' if remaining >= DAY else ''} left"
        if remaining > 0
        else ""
    )
    return f"waits {format_span(max(SECOND, page.now - decision.asked_at))}{ends}"


def indent_arguments(text: str) -> str:
    """Indent the arguments of a call as shown to a person, without the text that follows them."""
    values, _ = split_arguments(text)
    return json.dumps(values, indent=2, ensure_ascii=False) if values else text


ANSWERS: Mapping[str, tuple[str, str]] = {
    "proposal": ("Accept", "Dismiss"),
    "unknown_call": ("It was done", "It was not done"),
    "cap_raise": ("Raise the cap", "End the session"),
}
"""The labels of yes and no, where they are not Approve and Deny."""


def _answers(page: OpenPage, decision: PendingDecision, prompt: DecisionPrompt) -> None:
    yes, no = ANSWERS.get(decision.about, ("Approve", "Deny"))
    with add_box("div", "h-buttons"):
        if decision.about == "cap_raise":
            add_button(f"{yes}…", lambda: _ask_raise(page, decision), "yes")
        else:
            add_button(yes, lambda: _approve(page, decision), "yes", f"{yes} {decision.name}: {prompt.yes}", "check")
        add_button(f"{no}…", lambda: _ask_denial(page, decision, prompt, no), "plain", f"{no} {decision.name}")
        if decision.about == "approval":
            add_button(
                "Edit…", lambda: _ask_edit(page, decision, prompt), "plain", f"Edit the arguments of {decision.name}"
            )
            add_button("Always…", lambda: _ask_always(page, decision), "plain", f"Always allow {decision.name}")


async def _approve(page: OpenPage, decision: PendingDecision) -> None:
    await page.perform(_send_approval(page, decision, ApprovalTerms()))


async def _send_approval(page: OpenPage, decision: PendingDecision, terms: ApprovalTerms) -> str:
    return (await decisions.approve(page.actor, decision.decision, terms)).sentence


def build_group_card(page: OpenPage, calls: Sequence[PendingDecision]) -> Callable[[Sequence[PendingDecision]], None]:
    """Show that several calls of a session wait for approval, with a button that approves exactly the calls shown."""
    message = f"{len(calls)} calls wait for approval"
    with add_box("article", "h-card", message):
        add_text(message, "h-title")
        if page.has_role("approver"):
            with add_box("div", "h-buttons"):
                yes = f"Approve all {len(calls)}"
                add_button(f"{yes}…", lambda: _ask_together(page, calls, yes), "yes", f"{yes} calls")
    return lambda _: None


def _ask_together(page: OpenPage, calls: Sequence[PendingDecision], yes: str) -> None:
    shown_decisions = [ShownDecision(decision.decision, decision.digest) for decision in calls]

    async def do(values: FormValues) -> str:
        session = calls[0].session
        return (
            await decisions.approve_together(page.actor, session, shown=shown_decisions, reason=values["reason"])
        ).sentence

    message = "\n\n".join(
        f"{number}. {make_legible(render_prompt(decision).details)}" for number, decision in enumerate(calls, 1)
    )
    open_dialog(page, f"{yes} calls, once each?", message, (REASON,), yes, do)


def _ask_denial(page: OpenPage, decision: PendingDecision, prompt: DecisionPrompt, no: str) -> None:
    async def do(values: FormValues) -> str:
        return (await decisions.deny(page.actor, decision.decision, values["reason"])).sentence

    open_dialog(page, f"{no}: {decision.name}?", f"{prompt.no}.", (REASON,), no, do, "stop")


def _ask_edit(page: OpenPage, decision: PendingDecision, prompt: DecisionPrompt) -> None:
    async def do(values: FormValues) -> str:
        edited_arguments = decisions.arguments(values["arguments"].encode("utf-8", "replace"), "")
        return await _send_approval(page, decision, ApprovalTerms(edit=edited_arguments, reason=values["reason"]))

    message = "The call runs once, with these arguments instead of the model's."
    arguments = FormField("arguments", "Arguments, as a JSON object", indent_arguments(prompt.details), "text")
    open_dialog(
        page, f"Approve {decision.name} with other arguments?", message, (arguments, REASON), "Approve this", do
    )


OWN_WORDS = "as written below"
MAX_CHOICES = 3


def list_rule_choices(decision: PendingDecision) -> dict[str, str]:
    """List up to three rules that the arguments suggest, the narrowest first.

    A call of high risk gets only the rule for exactly the same arguments.
    """
    choices = {make_legible(offer.sentence): offer.match for offer in list_rule_offers(decision)} or {
        "with exactly the same arguments": SAME
    }
    if decision.risk not in DANGEROUS_LEVELS:
        for sentence, match in _list_loosened_rules(render_prompt(decision).details):
            if len(choices) < MAX_CHOICES:
                choices[make_legible(sentence)] = match
    return dict(list(choices.items())[:MAX_CHOICES])


def _list_loosened_rules(text: str) -> Iterable[tuple[str, str]]:
    """List wider rules: any amounts, then any arguments but the first, since identifying arguments come first."""
    values, _ = split_arguments(text)
    names = [name for name in values if name.isidentifier()]
    numbers = [name for name in names if isinstance(values[name], int | float)]
    all_but_first = names[1:]
    for free_names in (numbers, all_but_first):
        if free_names and len(free_names) < len(names):
            fixed_names = ", ".join(name for name in names if name not in free_names)
            yield (
                f"with the same {fixed_names} and any {', '.join(free_names)}",
                "\n".join(f"any:{name}" for name in free_names),
            )


def _ask_always(page: OpenPage, decision: PendingDecision) -> None:
    choices = list_rule_choices(decision)

    async def do(values: FormValues) -> str:
        duration_text, match = (
            parse_duration(values["lasts"]),
            values["own"].strip() or choices.get(values["match"], ""),
        )
        terms = ApprovalTerms(
            always=True, match=match, scope=values["scope"], lasts=duration_text, reason=values["reason"]
        )
        return await _send_approval(page, decision, terms)

    fields = (
        FormField("match", "Which calls", next(iter(choices)), "radio", (*choices, OWN_WORDS)),
        FormField("own", "Custom conditions, one per line", "", "text"),
        FormField("scope", "Scope", "session", "choice", ("session", "agent", "fleet")),
        FormField("lasts", "Duration", "7d"),
        REASON,
    )
    message = (
        f"Approves this call. Matching calls of {decision.name} need no approval until the rule expires. "
        "Custom conditions: words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST, any:KEY."
    )
    open_dialog(page, f"Always allow {decision.name}?", message, fields, "Approve and create rule", do)


def _ask_raise(page: OpenPage, decision: PendingDecision) -> None:
    async def do(values: FormValues) -> str:
        cap = money.amount_of(values["cap"].strip())
        return await _send_approval(page, decision, ApprovalTerms(cap=(cap,), reason=values["reason"]))

    cap = FormField("cap", "New cap in dollars, or none")
    open_dialog(
        page,
        f"Raise the cap of {decision.subject}?",
        render_prompt(decision).details,
        (cap, REASON),
        "Raise the cap",
        do,
    )


EVENING_HOUR = 18
MAX_STORY = 24
MAX_STORY_FINDINGS = 100


class StoryLine(msgspec.Struct, frozen=True):
    """One line of the story: time, label, sentence, and a link to more."""

    at: int
    label: Label
    text: str
    path: str = ""
    link: str = ""


def build_story(
    night: NightSummary, findings: Sequence[Artifact], notices: Sequence[queries.AgentNews]
) -> list[StoryLine]:
    """Make one line of each event or group of similar events, newest first."""
    lines = [
        *map(_make_ends_line, night.ends),
        *map(_make_answers_line, night.answers),
        *map(_make_halt_line, night.halts),
        *_make_finding_lines([artifact for artifact in findings if artifact.at >= night.since]),
        *_make_document_lines(night, notices),
        *map(_make_undelivered_line, night.undelivered),
        *(_make_notice_line(notice) for notice in notices if not notice.about.startswith(OMITTED_NOTICE_PREFIXES)),
    ]
    return sorted(lines, key=lambda line: line.at, reverse=True)[:MAX_STORY]


MAX_NOTICE_LENGTH = 600
OMITTED_NOTICE_PREFIXES = ("ended:", "waiting:", "asks:")
"""Notices that the story leaves out: it has the ends and decisions themselves, and open questions have cards."""


def _make_ends_line(row: EndsAlike) -> StoryLine:
    label = label_state(row.state)
    reason = explain_terminal(row.state, row.terminal_reason)
    sessions = f"{row.count:,} sessions" if row.count > 1 else "a session"
    state = f"{label.text[0].lower()}{label.text[1:]}"
    text = f"{row.agent} ended {sessions}: {state}{f', {reason}' if reason else ''}"
    return StoryLine(row.at, label, text, f"/session/{row.session}", row.session)


def _make_answers_line(row: AnswersAlike) -> StoryLine:
    times = f", {row.count:,} times" if row.count > 1 else ""
    text = f"{row.by} {'denied' if row.denied else 'approved'} {row.name} of {row.agent}{times}"
    label = Label("", "bad", "cross") if row.denied else Label("", "good", "check")
    return StoryLine(row.at, label, text, f"/session/{row.session}" if row.session else "", row.session or "")


def _make_halt_line(row: HaltRow) -> StoryLine:
    sentence = f"{row.by} {'halted' if row.halted else 'resumed'}: {name_scope(row.scope)}"
    return StoryLine(row.at, Label("", "bad" if row.halted else "good", "halt"), f"{sentence}. {row.reason}".strip())


def _make_document_lines(night: NightSummary, notices: Sequence[queries.AgentNews]) -> Iterable[StoryLine]:
    """Make a line of each quarantined document that no notice mentions."""
    subjects = " ".join(notice.sentence for notice in notices)
    for item in night.quarantined_items:
        if item.name not in subjects:
            text = f"{item.name} is quarantined"
            yield StoryLine(item.quarantined_at or 0, Label("", "look", "paper"), text, "/triggers", item.trigger)


def _make_undelivered_line(row: NotificationRow) -> StoryLine:
    text = f"{row.agent} could not notify you over {row.channel}: {row.error}"
    return StoryLine(row.queued_at, Label("", "bad", "alert"), text)


def _make_notice_line(notice: queries.AgentNews) -> StoryLine:
    summary = notice.summarize_text(MAX_NOTICE_LENGTH)
    text = f"{notice.title}. {summary}" if summary else notice.title
    path = f"/session/{notice.session}" if notice.session else ""
    return StoryLine(notice.queued_at, Label("", "calm", "bell"), text, path, notice.session)


def _make_finding_lines(findings: Sequence[Artifact]) -> Iterable[StoryLine]:
    """Make one line of each urgent finding, and one line of the others of each agent and severity."""
    groups: dict[tuple[str, str, str], list[Artifact]] = {}
    for artifact in findings:
        groups.setdefault(
            (artifact.agent, artifact.severity, artifact.id if SEVERITY_MOODS.get(artifact.severity) == "bad" else ""),
            [],
        ).append(artifact)
    for (agent, severity, _), group in groups.items():
        newest = max(group, key=lambda artifact: artifact.at)
        text = to_one_line(newest.text.partition("\n")[0]).removeprefix(f"[{severity}] ")[:140]
        sentence = text if len(group) == 1 else f"{format_count(len(group), 'finding')}, the latest: {text}"
        label = Label("", SEVERITY_MOODS.get(severity, "dim"), "findings")
        yield StoryLine(newest.at, label, f"{agent} found ({severity}): {sentence}", "/findings", "findings")


def find_last_evening(now: int) -> int:
    """Return the time of the previous evening, so that Home shows the last night."""
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone()
    evening = datetime.combine(local.date() - timedelta(days=1), time(EVENING_HOUR), local.tzinfo)
    return int(evening.timestamp() * SECOND)


SWITCHED_ON = ("paused", "stopped", "unhealthy")
"""Needs of agents that `halter on` starts again. `resume` lifts a halt."""


def build_need_card(page: OpenPage, need: Need) -> Callable[[Need], None]:
    """Show a need that is not a decision, with the button that settles it, or else the command."""
    kind, title = label_decision(need.kind), translate_scopes(need.sentence)
    with add_box("article", f"h-card h-ask {'h-danger' if kind.mood == 'bad' else ''}", title):
        with add_box("div", "h-lead"):
            add_badge(kind)
            with add_box("div"):
                add_text(title, "h-title")
                with add_box("div", "h-row h-small"):
                    add_chip(kind.text)
        if need.why:
            add_text(need.why, "h-text h-small")
        answer = _find_answer(page, need)
        for command in () if answer or need.kind == "kept" else need.commands:
            add_command(command)
        with add_box("div", "h-buttons"):
            if answer:
                add_button(*answer)
            for text, path in list_need_pages(need):
                add_link(text, path, "h-link h-go-on")
    return lambda _: None


def _find_answer(page: OpenPage, need: Need) -> tuple[str, Click, str, str] | None:
    """Return the button that settles a need, if the person may use one."""
    if not page.has_role("operator"):
        return None
    match need.kind:
        case "question":
            return "Answer…", lambda: _ask_answer(page, need), "yes", f"Answer {need.agent}"
        case "document":
            return "Retry", lambda: _retry(page, need), "yes", f"Retry {need.item}"
        case "budget":
            return "Raise the cap…", lambda: ask_cap(page, need.scope), "yes", f"Raise the cap of {need.scope}"
        case "halt":
            return "Resume…", lambda: ask_to_resume(page, need.scope), "plain", f"Resume {need.scope}"
        case kind if kind in SWITCHED_ON:
            return "Switch on…", lambda: ask_to_switch_on(page, need.agent), "plain", f"Switch on {need.agent}"
        case _:
            return None


async def _retry(page: OpenPage, need: Need) -> None:
    async def do() -> str:
        agent, _, name = need.scope.removeprefix("trigger:").partition("/")
        return (await retry_item(page.actor, agent, name, need.item)).sentence

    await page.perform(do())


def list_need_pages(need: Need) -> list[tuple[str, str]]:
    """List links to the pages about a need, the most specific first."""
    kind, _, name = need.scope.partition(":")
    session = need.session or (name if kind == "session" else "")
    agent = need.agent or (name if kind == "agent" else "")
    pages = {
        "budget": ("Caps", "/budgets"),
        "document": ("Quarantined documents", "/triggers"),
        "kept": ("Findings", "/findings"),
        "host": ("Workers", "/fleet"),
    }
    links = [pages[need.kind]] if need.kind in pages else []
    links += [(f"Session {session}", f"/session/{session}")] if session else []
    return links + ([(f"Agent {agent}", f"/agent/{agent}")] if agent and not session else [])


def _ask_answer(page: OpenPage, need: Need) -> None:
    async def do(values: FormValues) -> str:
        return (await messages.send_message(page.actor, need.session, values["text"])).sentence

    text = FormField("text", "Your answer", "", "text")
    open_dialog(page, f"Answer {need.agent}?", need.sentence, (text,), "Answer", do)


def _build_card(page: OpenPage, item: PendingDecision | Need) -> Callable[[Any], None]:
    return build_need_card(page, item) if isinstance(item, Need) else build_decision_card(page, item)


async def build_decision_page(page: OpenPage, name: str) -> RefreshPage:
    """Show one decision alone, as linked from a notice; a settled one shows its outcome."""
    decision = await decisions.get_open_decision(page.actor, name)
    cards = KeyedList[PendingDecision](add_box("div", "h-cards"), lambda newer: build_decision_card(page, newer))
    with add_box("div", role="status"):
        outcome = add_text("")

    async def refresh(_: FeedChanges) -> None:
        try:
            cards.show({decision.decision: await decisions.get_open_decision(page.actor, decision.decision)})
        except NotDone as error:
            cards.show({})
            outcome.show_text(str(error))

    await refresh(FeedChanges(everything=True))
    return refresh


async def build_home_page(page: OpenPage) -> RefreshPage:
    pulse = add_box("p", "h-pulse", "Now", role="status").style("margin: 0")
    with add_section("Needs you"):
        cards = KeyedList[PendingDecision | Need](add_box("div", "h-cards"), lambda one: _build_card(page, one))
        with add_box("div", "h-clear") as all_clear:
            add_icon("check")
            add_text("Nothing needs you.")
    with add_box("div", "h-wide"):
        with add_section("Last night", card=True):
            period_label = add_text("", "h-dim h-small")
            story = KeyedList[StoryLine](
                add_box("ol", "h-story"), lambda line: _build_story_line(page, line), "No activity since then."
            )
        with add_section("Spent in the last 24 hours", card=True):
            spends = KeyedList[AgentSpending](add_box("div"), _build_spending, "No agent has run yet.")
    current_parts: list[tuple[str, str, str]] = []

    async def refresh(changes: FeedChanges) -> None:
        open_decisions = {decision.decision: decision for decision in await waiting(page.actor)}
        needs = await queries.read_needs(page.actor)
        cards.show(arrange_cards(open_decisions, needs))
        all_clear.set_visibility(not needs)
        if not changes.has_commits and current_parts:
            return
        lines = await queries.fleet(page.actor)
        parts = await _build_pulse_parts(page, len(needs), lines)
        if parts != current_parts:
            current_parts[:] = parts
            _show_pulse(pulse, parts)
        evening = find_last_evening(page.now)
        period_label.show_text(f"Since yesterday, {format_moment(evening)[11:16]}")
        await _show_story(page, story, evening)
        spends.show({each.agent: each for each in await read_spending(page, lines)})

    await refresh(FeedChanges(everything=True))
    return refresh


def arrange_cards(
    open_decisions: Mapping[str, PendingDecision], needs: Sequence[Need]
) -> dict[str, PendingDecision | Need]:
    """Arrange what needs a person: unhealthy agents, decisions, then everything else."""
    other_needs = {need.sentence: need for need in needs if not need.decision}
    health_needs = {key: need for key, need in other_needs.items() if need.is_about_health}
    return {**health_needs, **open_decisions, **other_needs}


def list_unhealthy_parts(lines: Sequence[AgentLine]) -> list[tuple[str, str, str]]:
    """Name the unhealthy agents, for the first part of the page."""
    names = [line.agent for line in lines if line.health == "unhealthy"]
    return [(f"Unhealthy: {join_names(names)}", "bad", "/fleet")] if names else []


async def _build_pulse_parts(page: OpenPage, need_count: int, lines: Sequence[AgentLine]) -> list[tuple[str, str, str]]:
    """Describe the fleet in four parts: text, mood and link."""
    spent_usd, cap = await _sum_today(page, lines)
    unhealthy = [line for line in lines if is_unwell(line)]
    urgent_count = await queries.count_urgent_findings(page.actor)
    is_near_cap = cap is not None and spent_usd >= cap * Decimal("0.8")
    money_part = f"{format_share(spent_usd, cap)} today"
    return [
        *list_unhealthy_parts(lines),
        (
            describe_need_count(need_count).capitalize(),
            "look" if need_count else "good",
            "/",
        ),
        (money_part, "bad" if is_near_cap else "", "/budgets"),
        (
            f"{format_count(len(unhealthy), 'agent')} {'needs' if len(unhealthy) == 1 else 'need'} attention"
            if unhealthy
            else f"{format_count(len(lines), 'agent')} well",
            "bad" if unhealthy else "dim",
            "/fleet",
        ),
        (
            f"{format_count(urgent_count, 'high finding')}" if urgent_count else "no high findings",
            "bad" if urgent_count else "dim",
            "/findings",
        ),
    ]


async def _sum_today(page: OpenPage, lines: Sequence[AgentLine]) -> tuple[Decimal, Decimal | None]:
    """Sum today's spending of the fleet, or of the agents that the person may see."""
    if page.principal.agents:
        caps = [line.cap_today_usd for line in lines]
        return sum((line.spent_today_usd for line in lines), ZERO_USD), None if None in caps else sum(
            filter(None, caps), ZERO_USD
        )
    return await money.read_fleet_day(page.actor)


def _show_pulse(pulse: Element, pulse_parts: Sequence[tuple[str, str, str]]) -> None:
    pulse.clear()
    with pulse:
        for text, mood, path in pulse_parts:
            with add_box("span"):
                add_link(text, path, f"h-{mood}" if mood else "")


async def _show_story(page: OpenPage, story: KeyedList[StoryLine], since: int) -> None:
    night = await queries.summarise_night(page.actor, since, MAX_STORY)
    findings = await artifacts.findings(page.actor, limit=MAX_STORY_FINDINGS)
    notices = await queries.read_notices(page.actor, since)
    lines = build_story(night, findings, notices)
    story.show({(line.at, line.text): line for line in lines})


def _build_story_line(page: OpenPage, line: StoryLine) -> Callable[[StoryLine], None]:
    with add_box("li"):
        page.add_moment(line.at, "h-at")
        add_icon(line.label.icon or "bell", line.label.mood)
        with add_box("span", "h-text"):
            add_text(f"{line.text} ", "", "span")
            if line.path:
                add_link(line.link, line.path)
    return lambda _: None


class AgentSpending(msgspec.Struct, frozen=True):
    """Spending of an agent in each of the last hours, and today against its cap."""

    agent: str
    hours: tuple[float, ...]
    today: Decimal
    cap: Decimal | None

    @property
    def fraction(self) -> float:
        return float(self.today / self.cap) if self.cap else 0.0

    def describe(self) -> str:
        return f"{format_usd(self.today)}, no cap" if self.cap is None else format_share(self.today, self.cap)


async def read_spending(page: OpenPage, lines: Sequence[AgentLine]) -> Sequence[AgentSpending]:
    """Read the spending of each agent in the last 24 hours, the highest first; agents without spending are included."""
    starts_at = page.now - DAY
    hours_by_agent: dict[str, dict[int, float]] = {}
    for slice_ in await queries.spending(page.actor, starts_at, page.now + 1, DAY // HOUR):
        hours_by_agent.setdefault(slice_.agent, {})[slice_.part] = float(slice_.spent_usd)
    spending = [_sum_up(line, hours_by_agent.get(line.agent, {})) for line in lines]
    return sorted(spending, key=lambda row: (-sum(row.hours), row.agent))


def _sum_up(line: AgentLine, hours: Mapping[int, float]) -> AgentSpending:
    values = tuple(hours.get(hour, 0.0) for hour in range(DAY // HOUR))
    return AgentSpending(line.agent, values, line.spent_today_usd, line.cap_today_usd)


def _build_spending(spending: AgentSpending) -> Callable[[AgentSpending], None]:
    with add_box("div", "h-spend"):
        add_link(spending.agent, f"/agent/{spending.agent}").classes("h-what")
        figures = add_text(spending.describe(), "h-text h-small")
        spark = add_spark(f"Spent by {spending.agent} in each of the last 24 hours", spending.hours)
        meter = add_meter(f"Spent today by {spending.agent}, of its cap", spending.fraction)
    current = [spending]

    def update(spending: AgentSpending) -> None:
        if spending != current[0]:
            current[0] = spending
            figures.show_text(spending.describe())
            set_meter(meter, spending.fraction)
            set_spark(spark, spending.hours)

    return update
