"""Fast paths: messages that are answered without a model. Each is a whole sentence of an exact grammar.

Case, final punctuation, greetings and courtesies are removed before a sentence is compared. A message that does not
match a sentence exactly goes to the model.

The grammar has one sentence per line: `(a|b)` is one of the words, `[a|b]` one of them or none, `{name}` any words,
which are captured under that name.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal
from zoneinfo import ZoneInfo

import msgspec

from halter.core.clock import to_local_time
from halter.front_door.arithmetic import evaluate_sum
from halter.front_door.sentences import (
    APPROVE_SENTENCES,
    CANCEL_SENTENCES,
    CANCEL_UNNAMED_SENTENCES,
    DATE_IN_SENTENCES,
    DATE_SENTENCES,
    DENY_SENTENCES,
    FIELD_SENTENCES,
    HALT_ALL_SENTENCES,
    HALT_SENTENCES,
    HELP_SENTENCES,
    HOT_STATE_SENTENCES,
    LAST_RECEIPT_SENTENCES,
    NEEDS_ME_SENTENCES,
    ONE_AGENT_SENTENCES,
    RESUME_ALL_SENTENCES,
    RESUME_SENTENCES,
    SCHEDULE_SENTENCES,
    SESSION_SENTENCES,
    SPENDING_SENTENCES,
    STATUS_SENTENCES,
    TIME_IN_SENTENCES,
    TIME_SENTENCES,
    FastPath,
    Period,
    Verdict,
)
from halter.front_door.time_grammar import find_named_zone

MAX_FAST_PATH_LENGTH: Final = 500
"""Maximum characters of a message that is matched with the fast paths."""
MAX_GREETING_LENGTH: Final = 200
"""Number of characters in which the agent's name is searched for."""

HELP_ANSWER: Final = """\
I answer these immediately, without a model and without cost:
- help: this list
- what time is it, what is the date, what time is it in Tokyo
- sums: 3 * (4 + 5), 15% of 80
- status: what I am doing
- how much have you spent today, this week or this month
- stop, or halt: stops me immediately; halt everything stops the whole fleet
- resume: lifts a halt
- what needs me: the pending decisions
- approve or deny, with the decision's id if several are pending
- schedules: the schedules; cancel schedule NAME ends one
- hot state, or the name of one of its fields
- last receipt: what the last session did and cost

Everything else goes to the model. Include a time to schedule a task: "every weekday at 9 check the mail", "tomorrow at
9 send the report". Use "@agent …" or "have a separate agent …" to delegate a task, and "run playbook NAME" to run a
playbook."""


class Plain(msgspec.Struct, frozen=True, tag=True):
    """A route without details."""


class ClockQuestion(msgspec.Struct, frozen=True, tag="Asked"):
    what: Literal["time", "date"]
    zone: str


class SumResult(msgspec.Struct, frozen=True, tag="Result"):
    """The result of a sum, or the reason why there is none."""

    text: str


class SpendingQuestion(msgspec.Struct, frozen=True, tag="Spent"):
    period: Period


class Scope(msgspec.Struct, frozen=True, tag=True):
    """The scope to halt or resume: `agent:NAME`, `session:ID` or `fleet`."""

    scope: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """A verdict on a decision. The id is empty if no decision is pending or several match.

    It is `implied` if the message has no id: the only pending decision.
    """

    verdict: Verdict
    decision: str
    ambiguous: bool = False
    implied: bool = False


class ScheduleName(msgspec.Struct, frozen=True, tag="Named"):
    """The name of a schedule, exact if it is known; empty if the message has none."""

    name: str
    is_known: bool


class HotStateQuestion(msgspec.Struct, frozen=True, tag="Field"):
    """A field of the hot state; empty for all fields."""

    name: str


Detail = Plain | ClockQuestion | SumResult | SpendingQuestion | Scope | Decided | ScheduleName | HotStateQuestion
FastPathMatch = tuple[FastPath, Detail] | None


class RoutingContext(msgspec.Struct, frozen=True, kw_only=True):
    """The names that exist when a message arrives; no other names are recognized."""

    agent: str
    now: int
    timezone: str = "UTC"
    has_tools: bool = False
    agents: tuple[str, ...] = ()
    playbooks: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()


_PLAIN: Final[Sequence[tuple[FastPath, re.Pattern[str]]]] = (
    ("help", HELP_SENTENCES),
    ("status", STATUS_SENTENCES),
    ("needs_me", NEEDS_ME_SENTENCES),
    ("schedules", SCHEDULE_SENTENCES),
    ("last_receipt", LAST_RECEIPT_SENTENCES),
    ("hot_state", HOT_STATE_SENTENCES),
)
_HALTS_AND_RESUMES: Final[Sequence[tuple[FastPath, re.Pattern[str], re.Pattern[str]]]] = (
    ("halt", HALT_SENTENCES, HALT_ALL_SENTENCES),
    ("resume", RESUME_SENTENCES, RESUME_ALL_SENTENCES),
)
_CLOCKS: Final[Sequence[tuple[Literal["time", "date"], re.Pattern[str]]]] = (
    ("time", TIME_SENTENCES),
    ("date", DATE_SENTENCES),
    ("time", TIME_IN_SENTENCES),
    ("date", DATE_IN_SENTENCES),
)
_VERDICTS: Final[Sequence[tuple[Verdict, re.Pattern[str]]]] = (
    ("approve", APPROVE_SENTENCES),
    ("deny", DENY_SENTENCES),
)
_PERIODS: Final[Sequence[tuple[str, Period]]] = (("today", "today"), ("this week", "week"), ("this month", "month"))
_GREETING: Final = re.compile(
    r"(?:hey|hi|hello|ok|okay|yo|dear|good (?:morning|evening|afternoon))(?: there)?[,!.]*\s+"
    r"|(?:please|pls|plz|kindly|just),?\s+"
)
_REQUEST: Final = re.compile(r"(?:can|could|would|will) you(?: please| pls| kindly)?\s+(?!need\b)")
_ENDING: Final = re.compile(
    r"[\s,]+(?:please|pls|plz|thanks|thank you|thx|for me please)$|[\s.!?\u2026,;:\u3002\uff01\uff1f\uff0c]+$"
)
_CONTRACTIONS: Final = (
    (re.compile(r"\b(what|who|how|where|when|that|it|there)'s\b"), r"\1 is"),
    (re.compile(r"\bwhats\b"), "what is"),
    (re.compile(r"\bwhat're\b"), "what are"),
    (re.compile(r"\byou're\b"), "you are"),
    (re.compile(r"\byou've\b"), "you have"),
)
_POWER: Final = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_INDEX: Final = re.compile("[\u2080-\u2089]")
_SESSION_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{3,63}")
_MIN_PREFIX: Final = 4
"""Minimum length of a prefix that identifies an id."""
_ID: Final = re.compile(r"(?=.*\d)[a-z0-9][a-z0-9._:-]{5,}")


def find_fast_path(text: str, context: RoutingContext) -> FastPathMatch:
    """Find the fast path that matches a whole message."""
    if len(text) > MAX_FAST_PATH_LENGTH or any(sign in text for sign in ("\n", "\r", '"', "`", "\u201c", "\u201e")):
        return None
    normalized = normalize_message(text, context.agent)
    if not normalized:
        return ("help", Plain()) if text.strip() == "?" else None
    return (
        _find_brake(normalized, context)
        or _find_plain_sentence(normalized)
        or _find_clock_question(normalized, context)
        or _find_spending_question(normalized)
        or (None if _is_request_or_question(text) else _find_decision(normalized, context))
        or _find_cancel(normalized, context)
        or _find_field(normalized, context)
        or _find_arithmetic(text, normalized)
    )


def normalize_message(text: str, agent: str) -> str:
    """Remove case, courtesies, the agent's name and final punctuation.

    Full-width letters become ordinary letters, and emphasis with asterisks is removed.
    """
    folded_text = unicodedata.normalize("NFKC", _POWER.sub(r"^\g<0>", text)).lower().replace("\u2019", "'")
    folded_text = _strip_endings(" ".join(folded_text.split()).removeprefix("/"))
    message = _strip_endings(folded_text.strip("*_~"))
    message = strip_agent_address(message, agent)
    for form in (_GREETING, _GREETING, _REQUEST, _GREETING):
        match = form.match(message)
        message = message[match.end() :] if match else message
    for form, expansion in _CONTRACTIONS:
        message = form.sub(expansion, message)
    return message.strip()


def strip_agent_address(text: str, agent: str) -> str:
    """Remove the address of this agent: `hey halter,`, `@scout`, `scout:`."""
    name = re.escape(agent) if agent else "halter"
    hello = r"\s*(?:hey|hi|hello|ok|okay|yo|dear)\s+"
    form = (
        rf"(?:{hello})?\s*(?:@(?:halter|{name})[,:!]*\s+|(?:halter|{name})[,:!]+\s*|halter\s+)|{hello}{name}[,:!]*\s+"
    )
    match = re.match(form, text[:MAX_GREETING_LENGTH], re.IGNORECASE)
    return text[match.end() :] if match else text


def _strip_endings(text: str) -> str:
    for _ in range(4):
        match = _ENDING.search(text)
        if match is None:
            return text
        text = text[: match.start()]
    return text


def _match_sentence(form: re.Pattern[str], text: str) -> re.Match[str] | None:
    return form.fullmatch(f"{text} ")


def _find_captured_text(match: re.Match[str]) -> str:
    return next((value for value in match.groupdict().values() if value), "")


def _find_plain_sentence(text: str) -> FastPathMatch:
    for path, form in _PLAIN:
        if _match_sentence(form, text):
            return path, (HotStateQuestion("") if path == "hot_state" else Plain())
    return None


def _find_brake(text: str, context: RoutingContext) -> FastPathMatch:
    for path, own_sentence, fleet_sentence in _HALTS_AND_RESUMES:
        if _match_sentence(own_sentence, text):
            return path, Scope(f"agent:{context.agent}")
        if _match_sentence(fleet_sentence, text):
            return path, Scope("fleet")
    verb: FastPath = "resume" if text.startswith(("resume", "unhalt")) else "halt"
    if (match := _match_sentence(SESSION_SENTENCES, text)) and _SESSION_ID.fullmatch(_find_captured_text(match)):
        return verb, Scope(f"session:{_find_captured_text(match)}")
    match = _match_sentence(ONE_AGENT_SENTENCES, text)
    name = match and _match_exact_name(_find_captured_text(match).removeprefix("@"), (context.agent, *context.agents))
    return (verb, Scope(f"agent:{name}")) if name else None


def _find_clock_question(text: str, context: RoutingContext) -> FastPathMatch:
    for subject, form in _CLOCKS:
        match = _match_sentence(form, text)
        if match is not None:
            zone = find_named_zone(_find_captured_text(match)) if _find_captured_text(match) else context.timezone
            return ("time", ClockQuestion(subject, zone)) if zone else None
    return None


def describe_time(now: int, zone: str) -> str:
    """Return a sentence with the time and the date; it answers both questions."""
    local = to_local_time(now, ZoneInfo(zone))
    return f"It is {local:%H:%M} on {local:%A}, {local.day} {local:%B %Y} ({zone})."


def _find_spending_question(text: str) -> FastPathMatch:
    text = text.removesuffix(" so far")
    for suffix, period in _PERIODS:
        without_period = text.removesuffix(suffix).rstrip() if text.endswith(f" {suffix}") else text
        for link in (" so far", " for", " in"):
            without_period = without_period.removesuffix(link) if without_period != text else without_period
        if without_period != text and _match_sentence(SPENDING_SENTENCES, without_period):
            return "spending", SpendingQuestion(period)
    return ("spending", SpendingQuestion("today")) if _match_sentence(SPENDING_SENTENCES, text) else None


def _is_request_or_question(text: str) -> bool:
    """Return true for a question or a request to the agent: neither is a verdict."""
    normalized = " ".join(text.lower().split())
    return normalized.endswith("?") or _REQUEST.search(normalized) is not None


def _find_decision(text: str, context: RoutingContext) -> FastPathMatch:
    for verdict, form in _VERDICTS:
        match = _match_sentence(form, text)
        if match is not None:
            matched_decision = _match_decision(verdict, _find_captured_text(match).removeprefix("#"), context.decisions)
            return None if matched_decision is None else ("decide", matched_decision)
    return None


def _match_decision(verdict: Verdict, text: str, waiting: Sequence[str]) -> Decided | None:
    """Find the decision by its id or a prefix of the id; without one, the only pending decision."""
    if not text:
        only_id = waiting[0] if len(waiting) == 1 else ""
        return Decided(verdict, only_id, ambiguous=len(waiting) > 1, implied=bool(only_id))
    matching = [decision_id for decision_id in waiting if decision_id.lower() == text]
    if not matching and len(text) >= _MIN_PREFIX:
        matching = [decision_id for decision_id in waiting if decision_id.lower().startswith(text)]
    if matching:
        return Decided(verdict, matching[0] if len(matching) == 1 else "", ambiguous=len(matching) > 1)
    return Decided(verdict, text) if _ID.fullmatch(text) else None


def _find_cancel(text: str, context: RoutingContext) -> FastPathMatch:
    """Find the schedule to cancel, by its exact name, or by one word after `schedule`, even if that is unknown."""
    if _match_sentence(CANCEL_UNNAMED_SENTENCES, text):
        return "cancel_schedule", ScheduleName("", is_known=False)
    match = _match_sentence(CANCEL_SENTENCES, text)
    if match is None:
        return None
    schedule = next(
        (
            name
            for value in match.groupdict().values()
            if value and (name := _match_exact_name(value, context.schedules))
        ),
        "",
    )
    if schedule:
        return "cancel_schedule", ScheduleName(schedule, is_known=True)
    unknown = match["after"] or match["un"] or ""
    return ("cancel_schedule", ScheduleName(unknown, is_known=False)) if len(unknown.split()) == 1 else None


def _find_field(text: str, context: RoutingContext) -> FastPathMatch:
    match = _match_sentence(FIELD_SENTENCES, text)
    name = match and _match_exact_name(_find_captured_text(match), context.fields)
    return ("hot_state", HotStateQuestion(name)) if name else None


def _find_arithmetic(text: str, normalized: str) -> FastPathMatch:
    if text.rstrip().endswith("!") or _INDEX.search(text):
        return None
    result = evaluate_sum(normalized)
    return None if result is None else ("arithmetic", SumResult(result))


def _match_exact_name(text: str, names: Sequence[str]) -> str:
    """Find a name, however its words are joined. Returns an empty string if none or several match."""
    matching = [name for name in names if is_same_name(name, text)]
    return matching[0] if len(set(matching)) == 1 else ""


def is_same_name(name: str, text: str) -> bool:
    """Compare names without case; -, _ and spaces are equal."""
    return bool(text) and _join_name(name) == _join_name(text)


def _join_name(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.lower()).strip()
