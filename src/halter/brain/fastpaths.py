"""Messages that are answered without a model: each is one whole sentence of an exact grammar, never a part of one.

A sentence is compared after what says nothing is taken away: capital letters, the punctuation at its end, greetings and
courtesies. What is almost one of these sentences is none, and goes to the model.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal
from zoneinfo import ZoneInfo

import msgspec

from halter.brain import sentences
from halter.brain.arithmetic import worked_out
from halter.brain.saidtime import zone_named
from halter.core.wall import shown_at

FastPath = Literal[
    "help",
    "time",
    "arithmetic",
    "status",
    "spending",
    "halt",
    "resume",
    "needs_me",
    "decide",
    "schedules",
    "cancel_schedule",
    "hot_state",
    "last_receipt",
]
Period = Literal["today", "week", "month"]
Verdict = Literal["approve", "deny"]

LONGEST: Final = 500
"""A longer message is never a fast path."""
HEAD: Final = 200
"""How far into a message the agent's own name may stand."""

HELP: Final = """\
I answer these at once, without a model and without cost:
- help: this list
- what time is it, what is the date, what time is it in Tokyo
- sums: 3 * (4 + 5), 15% of 80
- status: what I am doing
- how much have you spent today, this week or this month
- stop, or halt: stops me at once; halt everything stops the whole fleet
- resume: lifts a halt
- what needs me: the decisions that wait for you
- approve or deny, with the decision's id if several wait
- schedules: what is planned; cancel schedule NAME ends one
- hot state, or the name of one of its fields
- last receipt: what the last session did and cost

Everything else goes to the model. Say when, and I plan it: "every weekday at 9 check the mail", "tomorrow at 9 send
the report". Say "@agent …" or "have a separate agent …" to hand a task on, and "run playbook NAME" to play one."""


class Plain(msgspec.Struct, frozen=True, tag=True):
    """The route says it all."""


class Asked(msgspec.Struct, frozen=True, tag=True):
    """A question about the clock: what is asked for, and of which zone."""

    what: Literal["time", "date"]
    zone: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """What a sum comes to, or why it comes to nothing."""

    text: str


class Spent(msgspec.Struct, frozen=True, tag=True):
    """The time whose spending is asked for."""

    period: Period


class Scope(msgspec.Struct, frozen=True, tag=True):
    """What is halted or resumed: `agent:NAME`, `session:ID` or `fleet`."""

    scope: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """What a person says to a decision: its id, or an empty one where none is waiting or more than one may be meant.

    Where they named none, it is `implied`: the only one that waits.
    """

    verdict: Verdict
    decision: str
    ambiguous: bool = False
    implied: bool = False


class Named(msgspec.Struct, frozen=True, tag=True):
    """The schedule that is meant, by its exact name if it is known; empty if none was named."""

    name: str
    known: bool


class Field(msgspec.Struct, frozen=True, tag=True):
    """A field of the hot state; empty for all of it."""

    name: str


Detail = Plain | Asked | Result | Spent | Scope | Decided | Named | Field
Found = tuple[FastPath, Detail] | None


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What is known where a message arrives: only names that exist are understood."""

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
    ("help", sentences.HELP),
    ("status", sentences.STATUS),
    ("needs_me", sentences.NEEDS_ME),
    ("schedules", sentences.SCHEDULES),
    ("last_receipt", sentences.LAST_RECEIPT),
    ("hot_state", sentences.HOT_STATE),
)
_BRAKES: Final[Sequence[tuple[FastPath, re.Pattern[str], re.Pattern[str]]]] = (
    ("halt", sentences.HALT, sentences.HALT_ALL),
    ("resume", sentences.RESUME, sentences.RESUME_ALL),
)
_CLOCKS: Final[Sequence[tuple[Literal["time", "date"], re.Pattern[str]]]] = (
    ("time", sentences.TIME),
    ("date", sentences.DATE),
    ("time", sentences.TIME_IN),
    ("date", sentences.DATE_IN),
)
_VERDICTS: Final[Sequence[tuple[Verdict, re.Pattern[str]]]] = (
    ("approve", sentences.APPROVE),
    ("deny", sentences.DENY),
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
_SESSION_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{3,63}")
_BEGINNING: Final = 4
"""How many characters of an id name it at least."""
_ID: Final = re.compile(r"(?=.*\d)[a-z0-9][a-z0-9._:-]{5,}")


def fast_path(text: str, surroundings: Surroundings) -> Found:
    """Find the fast path that a whole message is; None if it is none of them."""
    if len(text) > LONGEST or any(sign in text for sign in ("\n", "\r", '"', "`", "\u201c", "\u201e")):
        return None
    said = normal(text, surroundings.agent)
    if not said:
        return ("help", Plain()) if text.strip() == "?" else None
    return (
        _brakes(said, surroundings)
        or _sentence(said)
        or _clock(said, surroundings)
        or _money(said)
        or (None if _questions(text) else _decision(said, surroundings))
        or _cancel(said, surroundings)
        or _field(said, surroundings)
        or _arithmetic(text, said)
    )


def normal(text: str, agent: str) -> str:
    """Take away what says nothing: capitals, courtesies, the name of who is spoken to, punctuation at the end.

    Letters of other widths are the same letters, and what stands between stars is only said louder.
    """
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'")
    plain = _without_endings(" ".join(plain.split()).removeprefix("/"))
    said = _without_endings(plain.strip("*_~"))
    said = addressed(said, agent)
    for form in (_GREETING, _GREETING, _REQUEST, _GREETING):
        found = form.match(said)
        said = said[found.end() :] if found else said
    for form, plain in _CONTRACTIONS:
        said = form.sub(plain, said)
    return said.strip()


def addressed(text: str, agent: str) -> str:
    """Take away that this agent is spoken to: `hey halter,`, `@scout`, `scout:`."""
    name = re.escape(agent) if agent else "halter"
    hello = r"\s*(?:hey|hi|hello|ok|okay|yo|dear)\s+"
    form = (
        rf"(?:{hello})?\s*(?:@(?:halter|{name})[,:!]*\s+|(?:halter|{name})[,:!]+\s*|halter\s+)|{hello}{name}[,:!]*\s+"
    )
    found = re.match(form, text[:HEAD], re.IGNORECASE)
    return text[found.end() :] if found else text


def _without_endings(said: str) -> str:
    for _ in range(4):
        found = _ENDING.search(said)
        if found is None:
            return said
        said = said[: found.start()]
    return said


def _said(form: re.Pattern[str], said: str) -> re.Match[str] | None:
    return form.fullmatch(f"{said} ")


def _taken(found: re.Match[str]) -> str:
    """Tell the words that a sentence was asked to take."""
    return next((each for each in found.groupdict().values() if each), "")


def _sentence(said: str) -> Found:
    for path, form in _PLAIN:
        if _said(form, said):
            return path, (Field("") if path == "hot_state" else Plain())
    return None


def _brakes(said: str, surroundings: Surroundings) -> Found:
    for path, one, everything in _BRAKES:
        if _said(one, said):
            return path, Scope(f"agent:{surroundings.agent}")
        if _said(everything, said):
            return path, Scope("fleet")
    verb: FastPath = "resume" if said.startswith(("resume", "unhalt")) else "halt"
    if (found := _said(sentences.SESSION, said)) and _SESSION_ID.fullmatch(_taken(found)):
        return verb, Scope(f"session:{_taken(found)}")
    found = _said(sentences.ONE_AGENT, said)
    name = found and _exactly(_taken(found).removeprefix("@"), (surroundings.agent, *surroundings.agents))
    return (verb, Scope(f"agent:{name}")) if name else None


def _clock(said: str, surroundings: Surroundings) -> Found:
    for what, form in _CLOCKS:
        found = _said(form, said)
        if found is not None:
            zone = zone_named(_taken(found)) if _taken(found) else surroundings.timezone
            return ("time", Asked(what, zone)) if zone else None
    return None


def told_time(now: int, zone: str) -> str:
    """Tell the time and the date, both of which are asked for by either question."""
    shown = shown_at(now, ZoneInfo(zone))
    return f"It is {shown:%H:%M} on {shown:%A}, {shown.day} {shown:%B %Y} ({zone})."


def _money(said: str) -> Found:
    said = said.removesuffix(" so far")
    for words, period in _PERIODS:
        bare = said.removesuffix(words).rstrip() if said.endswith(f" {words}") else said
        for link in (" so far", " for", " in"):
            bare = bare.removesuffix(link) if bare != said else bare
        if bare != said and _said(sentences.SPENT, bare):
            return "spending", Spent(period)
    return ("spending", Spent("today")) if _said(sentences.SPENT, said) else None


def _questions(text: str) -> bool:
    """Tell whether it is a question, or a request to the agent: neither is a person's own yes or no."""
    said = " ".join(text.lower().split())
    return said.endswith("?") or _REQUEST.search(said) is not None


def _decision(said: str, surroundings: Surroundings) -> Found:
    for verdict, form in _VERDICTS:
        found = _said(form, said)
        if found is not None:
            decided = _decided(verdict, _taken(found).removeprefix("#"), surroundings.decisions)
            return None if decided is None else ("decide", decided)
    return None


def _decided(verdict: Verdict, said: str, waiting: Sequence[str]) -> Decided | None:
    """Find the decision that is meant: by its id or the beginning of it, or the only one that waits."""
    if not said:
        only = waiting[0] if len(waiting) == 1 else ""
        return Decided(verdict, only, ambiguous=len(waiting) > 1, implied=bool(only))
    meant = [each for each in waiting if each.lower() == said]
    if not meant and len(said) >= _BEGINNING:
        meant = [each for each in waiting if each.lower().startswith(said)]
    if meant:
        return Decided(verdict, meant[0] if len(meant) == 1 else "", ambiguous=len(meant) > 1)
    return Decided(verdict, said) if _ID.fullmatch(said) else None


def _cancel(said: str, surroundings: Surroundings) -> Found:
    """Find the schedule that is to end, by its exact name, or by one word after `schedule` even if nobody knows it."""
    if _said(sentences.CANCEL_NONE, said):
        return "cancel_schedule", Named("", known=False)
    found = _said(sentences.CANCEL, said)
    if found is None:
        return None
    known = next((name for each in found.groupdict().values() if each and (name := _scheduled(each, surroundings))), "")
    if known:
        return "cancel_schedule", Named(known, known=True)
    unknown = found["after"] or found["un"] or ""
    return ("cancel_schedule", Named(unknown, known=False)) if len(unknown.split()) == 1 else None


def _scheduled(said: str, surroundings: Surroundings) -> str:
    return _exactly(said, surroundings.schedules)


def _field(said: str, surroundings: Surroundings) -> Found:
    found = _said(sentences.FIELD, said)
    name = found and _exactly(_taken(found), surroundings.fields)
    return ("hot_state", Field(name)) if name else None


def _arithmetic(text: str, said: str) -> Found:
    if text.rstrip().endswith("!"):
        return None
    result = worked_out(said)
    return None if result is None else ("arithmetic", Result(result))


def _exactly(said: str, names: Sequence[str]) -> str:
    """Find a name however its words are joined; empty if there is none, or if two look the same."""
    meant = [name for name in names if same_name(name, said)]
    return meant[0] if len(set(meant)) == 1 else ""


def same_name(name: str, said: str) -> bool:
    """Tell whether a name is what was said: capitals do not count, nor whether words are joined by -, _ or a space."""
    return bool(said) and _joined(name) == _joined(said)


def _joined(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.lower()).strip()
