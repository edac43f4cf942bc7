"""Home: the morning in one line, what needs a person, what happened overnight, and what each agent spends."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
from nicegui.element import Element

from halter.core.clock import DAY, HOUR, SECOND, parse_duration
from halter.core.errors import NotDone
from halter.core.money import ZERO_USD
from halter.core.rows import HaltRow, NotificationRow
from halter.core.text import format_count, to_one_line
from halter.dashboard.labels import (
    RISK_MOODS,
    SEVERITY_MOODS,
    Label,
    explain_terminal,
    format_money,
    format_share,
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
    open_dialog,
)
from halter.dashboard.parts import (
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
from halter.operations import artifacts, control, decisions, money, queries
from halter.operations.artifacts import Artifact
from halter.operations.decisions import (
    SAME,
    ApprovalTerms,
    DecisionPrompt,
    ShownDecision,
    WaitingDecision,
    list_rule_offers,
    render_prompt,
    waiting,
)
from halter.operations.fleet import retry_item
from halter.operations.queries import AgentLine
from halter.operations.report import AnswersAlike, EndsAlike, NightSummary
from halter.present.events import format_moment
from halter.runtime.needs import Need

DANGEROUS_LEVELS = ("HIGH", "CRITICAL")
CALLS = ("approval", "unknown_call", "cap_raise")
"""Decisions whose name is a tool's or a model's."""


def build_decision_card(page: OpenPage, decision: WaitingDecision) -> Callable[[WaitingDecision], None]:
    """Shows a decision, and the buttons that answer it. Only its age changes later."""
    asked = render_prompt(decision)
    danger = decision.risk in DANGEROUS_LEVELS
    kind = label_decision(decision.about)
    title = asked.what.removesuffix(".")
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
        if asked.why:
            add_text(f"“{asked.why}”", "h-text h-words")
        # The injection brake explains its reasons itself, below the arguments.
        if decision.reasons and not split_arguments(asked.shown)[1]:
            add_text(f"Rated so because of {'; '.join(decision.reasons)}.", "h-text h-dim h-small")
        if asked.shown:
            add_arguments(asked.shown)
        if decision.session:
            add_link(f"Session {decision.session}", f"/session/{decision.session}").classes("h-small")
        if page.has_role("approver"):
            _answers(page, decision, asked)
    return lambda later: _update_age(page, age, later)


def _update_age(page: OpenPage, age: TextLabel, decision: WaitingDecision) -> None:
    age.show_text(_age(page, decision))


def _age(page: OpenPage, decision: WaitingDecision) -> str:
    remaining = decision.expires_at - page.now
    ends = (
        f" · {format_span(remaining).partition(' d')[0]}{' d' if remaining >= DAY else ''} left"
        if remaining > 0
        else ""
    )
    return f"waits {format_span(max(SECOND, page.now - decision.asked_at))}{ends}"


def indent_arguments(shown: str) -> str:
    """Indents the arguments of a call as it is shown to a person, without what is said about them."""
    values, _ = split_arguments(shown)
    return json.dumps(values, indent=2, ensure_ascii=False) if values else shown


ANSWERS: Mapping[str, tuple[str, str]] = {
    "proposal": ("Keep", "Dismiss"),
    "unknown_call": ("It was done", "It was not done"),
    "cap_raise": ("Raise the cap", "Let it end"),
}
"""Yes and no, where they are not to approve and to deny."""


def _answers(page: OpenPage, decision: WaitingDecision, asked: DecisionPrompt) -> None:
    yes, no = ANSWERS.get(decision.about, ("Approve", "Deny"))
    with add_box("div", "h-buttons"):
        if decision.about == "cap_raise":
            add_button(f"{yes}…", lambda: _ask_raise(page, decision), "yes")
        else:
            add_button(yes, lambda: _approve(page, decision), "yes", f"{yes} {decision.name}: {asked.yes}", "check")
        add_button(f"{no}…", lambda: _ask_denial(page, decision, asked, no), "plain", f"{no} {decision.name}")
        if decision.about == "approval":
            add_button(
                "Edit…", lambda: _ask_edit(page, decision, asked), "plain", f"Edit the arguments of {decision.name}"
            )
            add_button("Always…", lambda: _ask_always(page, decision), "plain", f"Always allow {decision.name}")


async def _approve(page: OpenPage, decision: WaitingDecision) -> None:
    await page.perform(_send_approval(page, decision, ApprovalTerms()))


async def _send_approval(page: OpenPage, decision: WaitingDecision, terms: ApprovalTerms) -> str:
    return (await decisions.approve(page.actor, decision.decision, terms)).sentence


def build_group_card(page: OpenPage, calls: Sequence[WaitingDecision]) -> Callable[[Sequence[WaitingDecision]], None]:
    """Says that several calls of a session wait together, and answers all of them as they are shown here."""
    says = f"{len(calls)} calls wait together"
    with add_box("article", "h-card", says):
        add_text(says, "h-title")
        if page.has_role("approver"):
            with add_box("div", "h-buttons"):
                yes = f"Approve all {len(calls)}"
                add_button(f"{yes}…", lambda: _ask_together(page, calls, yes), "yes", f"{yes} calls")
    return lambda _: None


def _ask_together(page: OpenPage, calls: Sequence[WaitingDecision], yes: str) -> None:
    shown = [ShownDecision(decision.decision, decision.digest) for decision in calls]

    async def do(values: FormValues) -> str:
        session = calls[0].session
        return (await decisions.approve_together(page.actor, session, shown=shown, reason=values["reason"])).sentence

    says = "\n\n".join(
        f"{number}. {make_legible(render_prompt(decision).shown)}" for number, decision in enumerate(calls, 1)
    )
    open_dialog(page, f"{yes} calls, once each?", says, (REASON,), yes, do)


def _ask_denial(page: OpenPage, decision: WaitingDecision, asked: DecisionPrompt, no: str) -> None:
    async def do(values: FormValues) -> str:
        return (await decisions.deny(page.actor, decision.decision, values["reason"])).sentence

    open_dialog(page, f"{no}: {decision.name}?", f"{asked.no}.", (REASON,), no, do, "stop")


def _ask_edit(page: OpenPage, decision: WaitingDecision, asked: DecisionPrompt) -> None:
    async def do(values: FormValues) -> str:
        edited = decisions.arguments(values["arguments"].encode("utf-8", "replace"), "")
        return await _send_approval(page, decision, ApprovalTerms(edit=edited, reason=values["reason"]))

    says = "It is called once, with the arguments below in place of the model's."
    arguments = FormField("arguments", "Arguments, as a JSON object", indent_arguments(asked.shown), "text")
    open_dialog(page, f"Approve {decision.name} with other arguments?", says, (arguments, REASON), "Approve this", do)


OWN_WORDS = "as I write below"
MAX_CHOICES = 3


def list_rule_choices(decision: WaitingDecision) -> dict[str, str]:
    """Lists up to three rules that the arguments suggest, the narrowest first, and the way to write another one.

    A call of high risk suggests only itself.
    """
    offered = {make_legible(each.sentence): each.match for each in list_rule_offers(decision)} or {
        "with exactly the same arguments": SAME
    }
    if decision.risk not in DANGEROUS_LEVELS:
        for sentence, match in _list_loosened_rules(render_prompt(decision).shown):
            if len(offered) < MAX_CHOICES:
                offered[make_legible(sentence)] = match
    return dict(list(offered.items())[:MAX_CHOICES])


def _list_loosened_rules(shown: str) -> Iterable[tuple[str, str]]:
    """Leaves amounts open, and then all arguments but the first: what differs from call to call comes last."""
    values, _ = split_arguments(shown)
    names = [name for name in values if name.isidentifier()]
    numbers = [name for name in names if isinstance(values[name], int | float)]
    rest = names[1:]
    for free in (numbers, rest):
        if free and len(free) < len(names):
            kept = ", ".join(name for name in names if name not in free)
            yield f"with the same {kept}, whatever the {', '.join(free)}", "\n".join(f"any:{name}" for name in free)


def _ask_always(page: OpenPage, decision: WaitingDecision) -> None:
    offered = list_rule_choices(decision)

    async def do(values: FormValues) -> str:
        lasts, match = parse_duration(values["lasts"]), values["own"].strip() or offered.get(values["match"], "")
        terms = ApprovalTerms(always=True, match=match, scope=values["scope"], lasts=lasts, reason=values["reason"])
        return await _send_approval(page, decision, terms)

    fields = (
        FormField("match", "Which calls", next(iter(offered)), "radio", (*offered, OWN_WORDS)),
        FormField("own", "Or in your own words, one to a line", "", "text"),
        FormField("scope", "Where", "session", "choice", ("session", "agent", "fleet")),
        FormField("lasts", "For how long", "7d"),
        REASON,
    )
    says = (
        f"This call is approved, and from now on {decision.name} needs no approval where it is called as you choose. "
        "In your own words: words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST, any:KEY."
    )
    open_dialog(page, f"Always allow {decision.name}?", says, fields, "Approve, and always", do)


def _ask_raise(page: OpenPage, decision: WaitingDecision) -> None:
    async def do(values: FormValues) -> str:
        cap = money.amount_of(values["cap"].strip())
        return await _send_approval(page, decision, ApprovalTerms(cap=(cap,), reason=values["reason"]))

    cap = FormField("cap", "New cap in dollars, or none")
    open_dialog(
        page, f"Raise the cap of {decision.subject}?", render_prompt(decision).shown, (cap, REASON), "Raise the cap", do
    )


EVENING_HOUR = 18
MAX_STORY = 24
MAX_FINDINGS_TOLD = 100


class StoryLine(msgspec.Struct, frozen=True):
    """One thing that happened: when, how it looks, in words, and where to read more."""

    at: int
    label: Label
    text: str
    path: str = ""
    link: str = ""


def build_story(
    night: NightSummary, findings: Sequence[Artifact], news: Sequence[queries.AgentNews]
) -> list[StoryLine]:
    """Puts what happened into one line each, the newest first; what happened alike is one line."""
    lines = [
        *map(_make_ends_line, night.ends),
        *map(_make_answers_line, night.answers),
        *map(_make_halt_line, night.halts),
        *_make_finding_lines([artifact for artifact in findings if artifact.at >= night.since]),
        *_make_document_lines(night, news),
        *map(_make_undelivered_line, night.undelivered),
        *(_make_news_line(one) for one in news if not one.about.startswith(TOLD_ELSEWHERE)),
    ]
    return sorted(lines, key=lambda line: line.at, reverse=True)[:MAX_STORY]


TOLD_ELSEWHERE = ("ended:", "waiting:", "asks:")
"""Notices of ends and questions: the story has the ends and decisions themselves, and open questions have cards."""


def _make_ends_line(row: EndsAlike) -> StoryLine:
    label = label_state(row.state)
    why = explain_terminal(row.state, row.terminal_reason)
    many = f"{row.count:,} sessions" if row.count > 1 else "a session"
    word = f"{label.text[0].lower()}{label.text[1:]}"
    text = f"{row.agent} ended {many}: {word}{f', {why}' if why else ''}"
    return StoryLine(row.at, label, text, f"/session/{row.session}", row.session)


def _make_answers_line(row: AnswersAlike) -> StoryLine:
    often = f", {row.count:,} times" if row.count > 1 else ""
    text = f"{row.by} {'denied' if row.denied else 'approved'} {row.name} of {row.agent}{often}"
    label = Label("", "bad", "cross") if row.denied else Label("", "good", "check")
    return StoryLine(row.at, label, text, f"/session/{row.session}" if row.session else "", row.session or "")


def _make_halt_line(row: HaltRow) -> StoryLine:
    what = f"{row.by} {'halted' if row.halted else 'let go again'}: {name_scope(row.scope)}"
    return StoryLine(row.at, Label("", "bad" if row.halted else "good", "halt"), f"{what}. {row.reason}".strip())


def _make_document_lines(night: NightSummary, news: Sequence[queries.AgentNews]) -> Iterable[StoryLine]:
    """Tells which documents were left to a person, unless a notice does."""
    subjects = " ".join(one.subject for one in news)
    for item in night.left:
        if item.name not in subjects:
            text = f"{item.name} was left to you"
            yield StoryLine(item.quarantined_at or 0, Label("", "look", "paper"), text, "/triggers", item.trigger)


def _make_undelivered_line(row: NotificationRow) -> StoryLine:
    text = f"{row.agent} could not tell you over {row.channel}: {row.error}"
    return StoryLine(row.queued_at, Label("", "bad", "alert"), text)


def _make_news_line(news: queries.AgentNews) -> StoryLine:
    text = news.subject if news.subject.startswith(news.agent) else f"{news.agent}: {news.subject}"
    return StoryLine(news.queued_at, Label("", "calm", "bell"), text)


def _make_finding_lines(findings: Sequence[Artifact]) -> Iterable[StoryLine]:
    """Tells each urgent finding, and of the others how many there are of each kind."""
    alike: dict[tuple[str, str, str], list[Artifact]] = {}
    for artifact in findings:
        alike.setdefault(
            (artifact.agent, artifact.severity, artifact.id if SEVERITY_MOODS.get(artifact.severity) == "bad" else ""),
            [],
        ).append(artifact)
    for (agent, severity, _), group in alike.items():
        last = max(group, key=lambda artifact: artifact.at)
        text = to_one_line(last.text.partition("\n")[0]).removeprefix(f"[{severity}] ")[:140]
        sentence = text if len(group) == 1 else f"{format_count(len(group), 'thing')}, the last: {text}"
        label = Label("", SEVERITY_MOODS.get(severity, "dim"), "findings")
        yield StoryLine(last.at, label, f"{agent} found ({severity}): {sentence}", "/findings", "findings")


def find_last_evening(now: int) -> int:
    """Returns the evening before, so that a morning shows the night."""
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone()
    evening = datetime.combine(local.date() - timedelta(days=1), time(EVENING_HOUR), local.tzinfo)
    return int(evening.timestamp() * SECOND)


RESUMED = ("halt", "paused", "stopped")


def build_need_card(page: OpenPage, need: Need) -> Callable[[Need], None]:
    """Shows what needs a person and is no decision, with the button that settles it, or the command where none does."""
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
    """Returns the button that settles a need, if there is one that the person may press."""
    if not page.has_role("operator"):
        return None
    match need.kind:
        case "question":
            return "Answer…", lambda: _ask_answer(page, need), "yes", f"Answer {need.agent}"
        case "document":
            return "Try again", lambda: _retry(page, need), "yes", f"Try again: {need.item}"
        case "budget":
            return "Raise the cap…", lambda: ask_cap(page, need.scope), "yes", f"Raise the cap of {need.scope}"
        case kind if kind in RESUMED:
            scope = need.scope or f"agent:{need.agent}"
            return "Resume…", lambda: ask_to_resume(page, scope), "plain", f"Resume {scope}"
        case _:
            return None


async def _retry(page: OpenPage, need: Need) -> None:
    async def do() -> str:
        agent, _, name = need.scope.removeprefix("trigger:").partition("/")
        return (await retry_item(page.actor, agent, name, need.item)).sentence

    await page.perform(do())


def list_need_pages(need: Need) -> list[tuple[str, str]]:
    """Lists the pages on which a need is looked into or settled, the nearest first."""
    kind, _, name = need.scope.partition(":")
    session = need.session or (name if kind == "session" else "")
    agent = need.agent or (name if kind == "agent" else "")
    pages = {
        "budget": ("Caps", "/budgets"),
        "document": ("Documents left to you", "/triggers"),
        "kept": ("Findings", "/findings"),
        "host": ("Workers", "/fleet"),
    }
    found = [pages[need.kind]] if need.kind in pages else []
    found += [(f"Session {session}", f"/session/{session}")] if session else []
    return found + ([(f"Agent {agent}", f"/agent/{agent}")] if agent and not session else [])


def _ask_answer(page: OpenPage, need: Need) -> None:
    async def do(values: FormValues) -> str:
        await control.send_message(page.actor, need.session, values["text"])
        return f"{need.session} has your answer, and goes on."

    text = FormField("text", "Your answer", "", "text")
    open_dialog(page, f"Answer {need.agent}?", need.sentence, (text,), "Answer", do)


def _build_card(page: OpenPage, one: WaitingDecision | Need) -> Callable[[Any], None]:
    return build_need_card(page, one) if isinstance(one, Need) else build_decision_card(page, one)


async def build_decision_page(page: OpenPage, name: str) -> RefreshPage:
    """Shows one decision alone, to a person who was sent to it; one that is over says how it ended."""
    decision = await decisions.decision_meant(page.actor, name)
    cards = KeyedList[WaitingDecision](add_box("div", "h-cards"), lambda shown: build_decision_card(page, shown))
    with add_box("div", role="status"):
        ended = add_text("")

    async def refresh(_: FeedChanges) -> None:
        try:
            cards.show({decision.decision: await decisions.decision_meant(page.actor, decision.decision)})
        except NotDone as over:
            cards.show({})
            ended.show_text(str(over))

    await refresh(FeedChanges(everything=True))
    return refresh


async def build_home_page(page: OpenPage) -> RefreshPage:
    pulse = add_box("p", "h-pulse", "Now", role="status").style("margin: 0")
    with add_section("Needs you"):
        cards = KeyedList[WaitingDecision | Need](add_box("div", "h-cards"), lambda one: _build_card(page, one))
        with add_box("div", "h-clear") as clear:
            add_icon("check")
            add_text("Nothing needs you.")
    with add_box("div", "h-wide"):
        with add_section("Last night", card=True):
            since = add_text("", "h-dim h-small")
            story = KeyedList[StoryLine](
                add_box("ol", "h-story"), lambda line: _build_story_line(page, line), "Nothing happened since then."
            )
        with add_section("Spent in the last 24 hours", card=True):
            spends = KeyedList[AgentSpending](add_box("div"), _build_spending, "No agent has run yet.")
    told: list[tuple[str, str, str]] = []

    async def refresh(changes: FeedChanges) -> None:
        asked = {decision.decision: decision for decision in await waiting(page.actor)}
        needs = await queries.read_needs(page.actor)
        cards.show(asked | {need.sentence: need for need in needs if not need.decision})
        clear.set_visibility(not needs)
        if not changes.has_commits and told:
            return
        lines = await queries.fleet(page.actor)
        parts = await _describe_now(page, len(needs), lines)
        if parts != told:
            told[:] = parts
            _show_pulse(pulse, parts)
        evening = find_last_evening(page.now)
        since.show_text(f"Since yesterday, {format_moment(evening)[11:16]}")
        await _show_story(page, story, evening)
        spends.show({each.agent: each for each in await read_spending(page, lines)})

    await refresh(FeedChanges(everything=True))
    return refresh


async def _describe_now(page: OpenPage, needs: int, lines: Sequence[AgentLine]) -> list[tuple[str, str, str]]:
    """Describes the fleet in four parts, each with its mood and the page that tells more."""
    spent, cap = await _sum_today(page, lines)
    stopped = [line for line in lines if is_unwell(line)]
    urgent = await queries.count_urgent_findings(page.actor)
    near = cap is not None and spent >= cap * Decimal("0.8")
    money_part = f"{format_money(spent)} today" if cap is None else f"{format_share(spent, cap)} today"
    return [
        (
            f"{needs} need{'s' if needs == 1 else ''} you" if needs else "Nothing needs you",
            "look" if needs else "good",
            "/",
        ),
        (money_part, "bad" if near else "", "/budgets"),
        (
            f"{format_count(len(stopped), 'agent')} stopped"
            if stopped
            else f"{format_count(len(lines), 'agent')} fine",
            "bad" if stopped else "dim",
            "/fleet",
        ),
        (
            f"{format_count(urgent, 'high finding')}" if urgent else "no high findings",
            "bad" if urgent else "dim",
            "/findings",
        ),
    ]


async def _sum_today(page: OpenPage, lines: Sequence[AgentLine]) -> tuple[Decimal, Decimal | None]:
    """Sums up the day of the fleet, or of the agents that a person sees."""
    if page.principal.agents:
        caps = [line.cap_today_usd for line in lines]
        return sum((line.spent_today_usd for line in lines), ZERO_USD), None if None in caps else sum(
            filter(None, caps), ZERO_USD
        )
    return await money.read_fleet_day(page.actor)


def _show_pulse(pulse: Element, parts: Sequence[tuple[str, str, str]]) -> None:
    pulse.clear()
    with pulse:
        for text, mood, path in parts:
            with add_box("span"):
                add_link(text, path, f"h-{mood}" if mood else "")


async def _show_story(page: OpenPage, story: KeyedList[StoryLine], since: int) -> None:
    night = await queries.summarise_night(page.actor, since, MAX_STORY)
    findings = await artifacts.findings(page.actor, limit=MAX_FINDINGS_TOLD)
    news = await queries.read_news(page.actor, since)
    lines = build_story(night, findings, news)
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
    """What an agent spent in each of the last hours, and today against its cap."""

    agent: str
    hours: tuple[float, ...]
    today: Decimal
    cap: Decimal | None

    @property
    def fraction(self) -> float:
        return float(self.today / self.cap) if self.cap else 0.0

    def describe(self) -> str:
        return f"{format_money(self.today)}, no cap" if self.cap is None else format_share(self.today, self.cap)


async def read_spending(page: OpenPage, lines: Sequence[AgentLine]) -> Sequence[AgentSpending]:
    """Reads the last 24 hours of each agent, also of those that spent nothing; the dearest first."""
    since = page.now - DAY
    spent: dict[str, dict[int, float]] = {}
    for part in await queries.spending(page.actor, since, page.now + 1, DAY // HOUR):
        spent.setdefault(part.agent, {})[part.part] = float(part.spent_usd)
    made = [_sum_up(line, spent.get(line.agent, {})) for line in lines]
    return sorted(made, key=lambda each: (-sum(each.hours), each.agent))


def _sum_up(line: AgentLine, hours: Mapping[int, float]) -> AgentSpending:
    values = tuple(hours.get(hour, 0.0) for hour in range(DAY // HOUR))
    return AgentSpending(line.agent, values, line.spent_today_usd, line.cap_today_usd)


def _build_spending(spending: AgentSpending) -> Callable[[AgentSpending], None]:
    with add_box("div", "h-spend"):
        add_link(spending.agent, f"/agent/{spending.agent}").classes("h-what")
        figures = add_text(spending.describe(), "h-text h-small")
        spark = add_spark(f"Spent by {spending.agent} in each of the last 24 hours", spending.hours)
        meter = add_meter(f"Spent today by {spending.agent}, of its cap", spending.fraction)
    seen = [spending]

    def update(spending: AgentSpending) -> None:
        if spending != seen[0]:
            seen[0] = spending
            figures.show_text(spending.describe())
            set_meter(meter, spending.fraction)
            set_spark(spark, spending.hours)

    return update
