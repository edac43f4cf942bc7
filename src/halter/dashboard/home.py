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
    word_scopes,
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
from halter.operations.decisions import SAME, ApprovalTerms, Put, ShownDecision, WaitingDecision, offers, put, waiting
from halter.operations.fleet import retry_item
from halter.operations.queries import AgentLine
from halter.operations.report import AnswersAlike, EndsAlike, NightSummary
from halter.present.events import format_moment
from halter.runtime.needs import Need

DANGEROUS_LEVELS = ("HIGH", "CRITICAL")
CALLS = ("approval", "unknown_call", "cap_raise")
"""Decisions whose name is a tool's or a model's."""


def build_decision_card(room: OpenPage, one: WaitingDecision) -> Callable[[WaitingDecision], None]:
    """Shows a decision, and the buttons that answer it. Only its age changes later."""
    asked = put(one)
    danger = one.risk in DANGEROUS_LEVELS
    kind = label_decision(one.about)
    title = asked.what.removesuffix(".")
    with add_box("article", f"h-card h-ask {'h-danger' if danger else ''}", title):
        with add_box("div", "h-lead"):
            add_badge(Label(kind.word, "bad" if danger else kind.mood, kind.icon))
            with add_box("div"):
                add_text(title, "h-title")
                with add_box("div", "h-row h-small"):
                    add_chip(kind.word)
                    if one.about in CALLS:
                        add_text(one.name, "h-mono h-dim", "span")
                    if one.risk:
                        add_chip(f"{one.risk.capitalize()} risk", RISK_MOODS.get(one.risk, "look"))
                    age = add_text(_age(room, one), "h-dim")
        if asked.why:
            add_text(f"“{asked.why}”", "h-text h-words")
        # The injection brake explains its reasons itself, below the arguments.
        if one.reasons and not split_arguments(asked.shown)[1]:
            add_text(f"Rated so because of {'; '.join(one.reasons)}.", "h-text h-dim h-small")
        if asked.shown:
            add_arguments(asked.shown)
        if one.session:
            add_link(f"Session {one.session}", f"/session/{one.session}").classes("h-small")
        if room.may("approver"):
            _answers(room, one, asked)
    return lambda later: _update_age(room, age, later)


def _update_age(room: OpenPage, age: TextLabel, one: WaitingDecision) -> None:
    age.say(_age(room, one))


def _age(room: OpenPage, one: WaitingDecision) -> str:
    left = one.expires_at - room.now
    ends = f" · {format_span(left).partition(' d')[0]}{' d' if left >= DAY else ''} left" if left > 0 else ""
    return f"waits {format_span(max(SECOND, room.now - one.asked_at))}{ends}"


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


def _answers(room: OpenPage, one: WaitingDecision, asked: Put) -> None:
    yes, no = ANSWERS.get(one.about, ("Approve", "Deny"))
    with add_box("div", "h-buttons"):
        if one.about == "cap_raise":
            add_button(f"{yes}…", lambda: _ask_raise(room, one), "yes")
        else:
            add_button(yes, lambda: _approve(room, one), "yes", f"{yes} {one.name}: {asked.yes}", "check")
        add_button(f"{no}…", lambda: _ask_denial(room, one, asked, no), "plain", f"{no} {one.name}")
        if one.about == "approval":
            add_button("Edit…", lambda: _ask_edit(room, one, asked), "plain", f"Edit the arguments of {one.name}")
            add_button("Always…", lambda: _ask_always(room, one), "plain", f"Always allow {one.name}")


async def _approve(room: OpenPage, one: WaitingDecision) -> None:
    await room.does(_send_approval(room, one, ApprovalTerms()))


async def _send_approval(room: OpenPage, one: WaitingDecision, answer: ApprovalTerms) -> str:
    return (await decisions.approve(room.desk, one.decision, answer)).sentence


def build_group_card(room: OpenPage, calls: Sequence[WaitingDecision]) -> Callable[[Sequence[WaitingDecision]], None]:
    """Says that several calls of a session wait together, and answers all of them as they are shown here."""
    says = f"{len(calls)} calls wait together"
    with add_box("article", "h-card", says):
        add_text(says, "h-title")
        if room.may("approver"):
            with add_box("div", "h-buttons"):
                yes = f"Approve all {len(calls)}"
                add_button(f"{yes}…", lambda: _ask_together(room, calls, yes), "yes", f"{yes} calls")
    return lambda _: None


def _ask_together(room: OpenPage, calls: Sequence[WaitingDecision], yes: str) -> None:
    shown = [ShownDecision(one.decision, one.digest) for one in calls]

    async def do(given: FormValues) -> str:
        session = calls[0].session
        return (await decisions.approve_together(room.desk, session, shown=shown, reason=given["reason"])).sentence

    says = "\n\n".join(f"{number}. {make_legible(put(one).shown)}" for number, one in enumerate(calls, 1))
    open_dialog(room, f"{yes} calls, once each?", says, (REASON,), yes, do)


def _ask_denial(room: OpenPage, one: WaitingDecision, asked: Put, no: str) -> None:
    async def do(given: FormValues) -> str:
        return (await decisions.deny(room.desk, one.decision, given["reason"])).sentence

    open_dialog(room, f"{no}: {one.name}?", f"{asked.no}.", (REASON,), no, do, "stop")


def _ask_edit(room: OpenPage, one: WaitingDecision, asked: Put) -> None:
    async def do(given: FormValues) -> str:
        edited = decisions.arguments(given["arguments"].encode("utf-8", "replace"), "")
        return await _send_approval(room, one, ApprovalTerms(edit=edited, reason=given["reason"]))

    says = "It is called once, with the arguments below in place of the model's."
    arguments = FormField("arguments", "Arguments, as a JSON object", indent_arguments(asked.shown), "text")
    open_dialog(room, f"Approve {one.name} with other arguments?", says, (arguments, REASON), "Approve this", do)


OWN_WORDS = "as I write below"
MAX_CHOICES = 3


def list_rule_choices(one: WaitingDecision) -> dict[str, str]:
    """Lists up to three rules that the arguments suggest, the narrowest first, and the way to write another one.

    A call of high risk suggests only itself.
    """
    offered = {make_legible(each.sentence): each.match for each in offers(one)} or {
        "with exactly the same arguments": SAME
    }
    if one.risk not in DANGEROUS_LEVELS:
        for sentence, match in _loosened(put(one).shown):
            if len(offered) < MAX_CHOICES:
                offered[make_legible(sentence)] = match
    return dict(list(offered.items())[:MAX_CHOICES])


def _loosened(shown: str) -> Iterable[tuple[str, str]]:
    """Leaves amounts open, and then all arguments but the first: what differs from call to call comes last."""
    values, _ = split_arguments(shown)
    names = [name for name in values if name.isidentifier()]
    numbers = [name for name in names if isinstance(values[name], int | float)]
    rest = names[1:]
    for free in (numbers, rest):
        if free and len(free) < len(names):
            kept = ", ".join(name for name in names if name not in free)
            yield f"with the same {kept}, whatever the {', '.join(free)}", "\n".join(f"any:{name}" for name in free)


def _ask_always(room: OpenPage, one: WaitingDecision) -> None:
    offered = list_rule_choices(one)

    async def do(given: FormValues) -> str:
        lasts, match = parse_duration(given["lasts"]), given["own"].strip() or offered.get(given["match"], "")
        answer = ApprovalTerms(always=True, match=match, scope=given["scope"], lasts=lasts, reason=given["reason"])
        return await _send_approval(room, one, answer)

    fields = (
        FormField("match", "Which calls", next(iter(offered)), "radio", (*offered, OWN_WORDS)),
        FormField("own", "Or in your own words, one to a line", "", "text"),
        FormField("scope", "Where", "session", "choice", ("session", "agent", "fleet")),
        FormField("lasts", "For how long", "7d"),
        REASON,
    )
    says = (
        f"This call is approved, and from now on {one.name} needs no approval where it is called as you choose. "
        "In your own words: words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST, any:KEY."
    )
    open_dialog(room, f"Always allow {one.name}?", says, fields, "Approve, and always", do)


def _ask_raise(room: OpenPage, one: WaitingDecision) -> None:
    async def do(given: FormValues) -> str:
        cap = money.amount_of(given["cap"].strip())
        return await _send_approval(room, one, ApprovalTerms(cap=(cap,), reason=given["reason"]))

    cap = FormField("cap", "New cap in dollars, or none")
    open_dialog(room, f"Raise the cap of {one.subject}?", put(one).shown, (cap, REASON), "Raise the cap", do)


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


def tell_story(night: NightSummary, findings: Sequence[Artifact], news: Sequence[queries.AgentNews]) -> list[StoryLine]:
    """Puts what happened into one line each, the newest first; what happened alike is one line."""
    lines = [
        *map(_tell_ends, night.ends),
        *map(_tell_answers, night.answers),
        *map(_tell_halt, night.halts),
        *_tell_findings([one for one in findings if one.at >= night.since]),
        *_tell_documents(night, news),
        *map(_tell_undelivered, night.undelivered),
        *(_tell_news(one) for one in news if not one.about.startswith(TOLD_ELSEWHERE)),
    ]
    return sorted(lines, key=lambda line: line.at, reverse=True)[:MAX_STORY]


TOLD_ELSEWHERE = ("ended:", "waiting:", "asks:")
"""Notices of ends and questions: the story has the ends and decisions themselves, and open questions have cards."""


def _tell_ends(row: EndsAlike) -> StoryLine:
    label = label_state(row.state)
    why = explain_terminal(row.state, row.terminal_reason)
    many = f"{row.count:,} sessions" if row.count > 1 else "a session"
    word = f"{label.word[0].lower()}{label.word[1:]}"
    text = f"{row.agent} ended {many}: {word}{f', {why}' if why else ''}"
    return StoryLine(row.at, label, text, f"/session/{row.session}", row.session)


def _tell_answers(row: AnswersAlike) -> StoryLine:
    often = f", {row.count:,} times" if row.count > 1 else ""
    text = f"{row.by} {'denied' if row.denied else 'approved'} {row.name} of {row.agent}{often}"
    label = Label("", "bad", "cross") if row.denied else Label("", "good", "check")
    return StoryLine(row.at, label, text, f"/session/{row.session}" if row.session else "", row.session or "")


def _tell_halt(row: HaltRow) -> StoryLine:
    what = f"{row.by} {'halted' if row.halted else 'let go again'}: {name_scope(row.scope)}"
    return StoryLine(row.at, Label("", "bad" if row.halted else "good", "halt"), f"{what}. {row.reason}".strip())


def _tell_documents(night: NightSummary, news: Sequence[queries.AgentNews]) -> Iterable[StoryLine]:
    """Tells which documents were left to a person, unless a notice does."""
    subjects = " ".join(one.subject for one in news)
    for item in night.left:
        if item.name not in subjects:
            text = f"{item.name} was left to you"
            yield StoryLine(item.quarantined_at or 0, Label("", "look", "paper"), text, "/triggers", item.trigger)


def _tell_undelivered(row: NotificationRow) -> StoryLine:
    text = f"{row.agent} could not tell you over {row.channel}: {row.error}"
    return StoryLine(row.queued_at, Label("", "bad", "alert"), text)


def _tell_news(one: queries.AgentNews) -> StoryLine:
    text = one.subject if one.subject.startswith(one.agent) else f"{one.agent}: {one.subject}"
    return StoryLine(one.queued_at, Label("", "calm", "bell"), text)


def _tell_findings(findings: Sequence[Artifact]) -> Iterable[StoryLine]:
    """Tells each urgent finding, and of the others how many there are of each kind."""
    alike: dict[tuple[str, str, str], list[Artifact]] = {}
    for one in findings:
        alike.setdefault(
            (one.agent, one.severity, one.id if SEVERITY_MOODS.get(one.severity) == "bad" else ""), []
        ).append(one)
    for (agent, severity, _), group in alike.items():
        last = max(group, key=lambda one: one.at)
        text = to_one_line(last.text.partition("\n")[0]).removeprefix(f"[{severity}] ")[:140]
        told = text if len(group) == 1 else f"{format_count(len(group), 'thing')}, the last: {text}"
        label = Label("", SEVERITY_MOODS.get(severity, "dim"), "findings")
        yield StoryLine(last.at, label, f"{agent} found ({severity}): {told}", "/findings", "findings")


def find_last_evening(now: int) -> int:
    """Returns the evening before, so that a morning shows the night."""
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone()
    evening = datetime.combine(local.date() - timedelta(days=1), time(EVENING_HOUR), local.tzinfo)
    return int(evening.timestamp() * SECOND)


RESUMED = ("halt", "paused", "stopped")


def build_need_card(room: OpenPage, need: Need) -> Callable[[Need], None]:
    """Shows what needs a person and is no decision, with the button that settles it, or the command where none does."""
    kind, title = label_decision(need.kind), word_scopes(need.sentence)
    with add_box("article", f"h-card h-ask {'h-danger' if kind.mood == 'bad' else ''}", title):
        with add_box("div", "h-lead"):
            add_badge(kind)
            with add_box("div"):
                add_text(title, "h-title")
                with add_box("div", "h-row h-small"):
                    add_chip(kind.word)
        if need.why:
            add_text(need.why, "h-text h-small")
        answer = _find_answer(room, need)
        for command in () if answer or need.kind == "kept" else need.commands:
            add_command(command)
        with add_box("div", "h-buttons"):
            if answer:
                add_button(*answer)
            for text, path in list_need_pages(need):
                add_link(text, path, "h-link h-go-on")
    return lambda _: None


def _find_answer(room: OpenPage, need: Need) -> tuple[str, Click, str, str] | None:
    """Returns the button that settles a need, if there is one that the person may press."""
    if not room.may("operator"):
        return None
    match need.kind:
        case "question":
            return "Answer…", lambda: _ask_answer(room, need), "yes", f"Answer {need.agent}"
        case "document":
            return "Try again", lambda: _retry(room, need), "yes", f"Try again: {need.item}"
        case "budget":
            return "Raise the cap…", lambda: ask_cap(room, need.scope), "yes", f"Raise the cap of {need.scope}"
        case kind if kind in RESUMED:
            scope = need.scope or f"agent:{need.agent}"
            return "Resume…", lambda: ask_to_resume(room, scope), "plain", f"Resume {scope}"
        case _:
            return None


async def _retry(room: OpenPage, need: Need) -> None:
    async def do() -> str:
        agent, _, name = need.scope.removeprefix("trigger:").partition("/")
        return (await retry_item(room.desk, agent, name, need.item)).sentence

    await room.does(do())


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


def _ask_answer(room: OpenPage, need: Need) -> None:
    async def do(given: FormValues) -> str:
        await control.tell(room.desk, need.session, given["text"])
        return f"{need.session} has your answer, and goes on."

    text = FormField("text", "Your answer", "", "text")
    open_dialog(room, f"Answer {need.agent}?", need.sentence, (text,), "Answer", do)


def _build_card(room: OpenPage, one: WaitingDecision | Need) -> Callable[[Any], None]:
    return build_need_card(room, one) if isinstance(one, Need) else build_decision_card(room, one)


async def build_decision_page(room: OpenPage, name: str) -> RefreshPage:
    """Shows one decision alone, to a person who was sent to it; one that is over says how it ended."""
    one = await decisions.decision_meant(room.desk, name)
    cards = KeyedList[WaitingDecision](add_box("div", "h-cards"), lambda shown: build_decision_card(room, shown))
    with add_box("div", role="status"):
        ended = add_text("")

    async def refresh(_: FeedChanges) -> None:
        try:
            cards.show({one.decision: await decisions.decision_meant(room.desk, one.decision)})
        except NotDone as over:
            cards.show({})
            ended.say(str(over))

    await refresh(FeedChanges(everything=True))
    return refresh


async def build_home_page(room: OpenPage) -> RefreshPage:
    pulse = add_box("p", "h-pulse", "Now", role="status").style("margin: 0")
    with add_section("Needs you"):
        cards = KeyedList[WaitingDecision | Need](add_box("div", "h-cards"), lambda one: _build_card(room, one))
        with add_box("div", "h-clear") as clear:
            add_icon("check")
            add_text("Nothing needs you.")
    with add_box("div", "h-wide"):
        with add_section("Last night", card=True):
            since = add_text("", "h-dim h-small")
            story = KeyedList[StoryLine](
                add_box("ol", "h-story"), lambda line: _build_story_line(room, line), "Nothing happened since then."
            )
        with add_section("Spent in the last 24 hours", card=True):
            spends = KeyedList[AgentSpending](add_box("div"), _build_spending, "No agent has run yet.")
    told: list[tuple[str, str, str]] = []

    async def refresh(grown: FeedChanges) -> None:
        asked = {one.decision: one for one in await waiting(room.desk)}
        needs = await queries.needs(room.desk)
        cards.show(asked | {need.sentence: need for need in needs if not need.decision})
        clear.set_visibility(not needs)
        if not grown.written and told:
            return
        lines = await queries.fleet(room.desk)
        parts = await _describe_now(room, len(needs), lines)
        if parts != told:
            told[:] = parts
            _show_pulse(pulse, parts)
        evening = find_last_evening(room.now)
        since.say(f"Since yesterday, {format_moment(evening)[11:16]}")
        await _show_story(room, story, evening)
        spends.show({each.agent: each for each in await read_spending(room, lines)})

    await refresh(FeedChanges(everything=True))
    return refresh


async def _describe_now(room: OpenPage, needs: int, lines: Sequence[AgentLine]) -> list[tuple[str, str, str]]:
    """Describes the fleet in four parts, each with its mood and the page that tells more."""
    spent, cap = await _spent_today(room, lines)
    stopped = [line for line in lines if is_unwell(line)]
    urgent = await queries.count_urgent_findings(room.desk)
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


async def _spent_today(room: OpenPage, lines: Sequence[AgentLine]) -> tuple[Decimal, Decimal | None]:
    """Sums up the day of the fleet, or of the agents that a person sees."""
    if room.who.agents:
        caps = [line.cap_today_usd for line in lines]
        return sum((line.spent_today_usd for line in lines), ZERO_USD), None if None in caps else sum(
            filter(None, caps), ZERO_USD
        )
    return await money.read_fleet_day(room.desk)


def _show_pulse(pulse: Element, parts: Sequence[tuple[str, str, str]]) -> None:
    pulse.clear()
    with pulse:
        for text, mood, path in parts:
            with add_box("span"):
                add_link(text, path, f"h-{mood}" if mood else "")


async def _show_story(room: OpenPage, story: KeyedList[StoryLine], since: int) -> None:
    night = await queries.night(room.desk, since, MAX_STORY)
    findings = await artifacts.findings(room.desk, limit=MAX_FINDINGS_TOLD)
    news = await queries.read_news(room.desk, since)
    lines = tell_story(night, findings, news)
    story.show({(line.at, line.text): line for line in lines})


def _build_story_line(room: OpenPage, line: StoryLine) -> Callable[[StoryLine], None]:
    with add_box("li"):
        room.add_moment(line.at, "h-at")
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
    def share(self) -> float:
        return float(self.today / self.cap) if self.cap else 0.0

    def told(self) -> str:
        return f"{format_money(self.today)}, no cap" if self.cap is None else format_share(self.today, self.cap)


async def read_spending(room: OpenPage, lines: Sequence[AgentLine]) -> Sequence[AgentSpending]:
    """Reads the last 24 hours of each agent, also of those that spent nothing; the dearest first."""
    since = room.now - DAY
    spent: dict[str, dict[int, float]] = {}
    for part in await queries.spending(room.desk, since, room.now + 1, DAY // HOUR):
        spent.setdefault(part.agent, {})[part.part] = float(part.spent_usd)
    made = [_sum_up(line, spent.get(line.agent, {})) for line in lines]
    return sorted(made, key=lambda each: (-sum(each.hours), each.agent))


def _sum_up(line: AgentLine, hours: Mapping[int, float]) -> AgentSpending:
    values = tuple(hours.get(hour, 0.0) for hour in range(DAY // HOUR))
    return AgentSpending(line.agent, values, line.spent_today_usd, line.cap_today_usd)


def _build_spending(one: AgentSpending) -> Callable[[AgentSpending], None]:
    with add_box("div", "h-spend"):
        add_link(one.agent, f"/agent/{one.agent}").classes("h-what")
        figures = add_text(one.told(), "h-text h-small")
        spark = add_spark(f"Spent by {one.agent} in each of the last 24 hours", one.hours)
        meter = add_meter(f"Spent today by {one.agent}, of its cap", one.share)
    seen = [one]

    def later(one: AgentSpending) -> None:
        if one != seen[0]:
            seen[0] = one
            figures.say(one.told())
            set_meter(meter, one.share)
            set_spark(spark, one.hours)

    return later
