"""Fast paths: messages that are answered without a model. Each is a whole sentence of an exact grammar.

Case, final punctuation, greetings and courtesies are removed before a sentence is compared. What is almost one of these
sentences goes to the model.

The grammar has one sentence per line: `(a|b)` is one of the words, `[a|b]` one of them or none, `{name}` any words,
which are captured under that name.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal
from zoneinfo import ZoneInfo

import msgspec

from halter.core.schedules import to_local_time
from halter.front_door.arithmetic import evaluate_sum
from halter.front_door.time_text import find_named_zone

_PIECE: Final = re.compile(r"\[([^\]]+)\]|\(([^)]+)\)|\{(\w+)\}|(\S+)")


def compile_grammar(lines: str) -> re.Pattern[str]:
    """Compiles sentences to one pattern, which is matched with a space after each word."""
    made = [_compile_line(line) for line in lines.strip().splitlines()]
    names = [name for line in made for name in re.findall(r"\?P<(\w+)>", line)]
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{{{name}}} stands in two sentences of one grammar: give them two names.")
    return re.compile("|".join(made))


def _compile_line(line: str) -> str:
    return "".join(_compile_piece(*match.groups()) for match in _PIECE.finditer(line))


def _compile_piece(optional: str | None, one_of: str | None, name: str | None, word: str | None) -> str:
    if name:
        return rf"(?P<{name}>\S.{{0,80}}?) "
    if optional:
        return f"(?:(?:{_join_longest_first(optional)}) )?"
    return f"(?:{_join_longest_first(one_of or word or '')}) "


def _join_longest_first(words: str) -> str:
    """Joins alternatives, the longest first, so that `show me` is not read as `show` and a rest."""
    return "|".join(re.escape(each) for each in sorted(words.split("|"), key=len, reverse=True))


_SHOW: Final = "[show|show me|list|give me|tell me|see|view|what is|what are] [the|my|your|all|all the|all my|our]"
_AT_ONCE: Final = "[now|right now|immediately|at once]"
_NOW: Final = "[now|right now|immediately|at once|already|today|currently|at the moment]"

HELP_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [available] (help|commands)
help me
i need help
what can (you do|i say|i ask|i do) [for me|here|you]
what (do|can) you understand
how (does this work|does it work|do i use this|do i use you)
how can you help [me]
what are you able to do
what commands (are there|do you know|do you have|do you understand)
""")
STATUS_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [current] status [report|update] {_NOW}
status of [the|this] agent
what are you (doing|working on|up to|busy with) {_NOW}
what is (running|going on|happening) {_NOW}
how are (you|things) (going|doing) {_NOW}
are you (running|awake|asleep|alive|halted|busy|idle|working) {_NOW}
give me (a|an) (status|status update|status report)
a status update
""")
NEEDS_ME_SENTENCES: Final = compile_grammar(f"""
what needs (me|my attention|my approval|my decision|my input|my answer|my review|approval|a decision) {_NOW}
(does anything|does something) need (me|my attention|my approval|my decision|my input)
[is there] anything that needs (me|my attention|my approval|my decision|my input)
(needs me|need me|needs you)
anything for me
anything (pending|waiting)
is there anything (i need to approve|i have to approve|to approve|i need to decide|to decide)
show me what needs (me|my attention)
[what is|is anything|is there anything|anything] (waiting|pending) (for|on) (me|my approval|my decision|my answer)
what waits for me
what do you need [from me|me for] [now|right now]
do you need (me|anything) [from me]
{_SHOW} (pending|open|waiting) (decisions|approvals|questions)
{_SHOW} (approvals|decisions)
what is (pending|waiting)
(what|which) (decisions|approvals) are (pending|waiting|open)
what do i (need|have) to (approve|decide)
""")
SCHEDULE_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [active|current] (schedules|scheduled tasks|scheduled jobs)
(what|which) schedules (do you have|are there|are active|exist|have you got)
what (is|have you|do you have) scheduled
what is on (the|your) schedule
(do you have|are there) any schedules
what is your schedule
""")
LAST_RECEIPT_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [last|latest|most recent|newest] receipt
{_SHOW} (last|latest) receipt (of|for|from) (the|your) last (session|run)
{_SHOW} receipt (of|for|from) (the|your) last (session|run)
what did you do last [time]
what did (your|the) last (session|run) (do|cost)
""")
HOT_STATE_SENTENCES: Final = compile_grammar(f"""
{_SHOW} [current] (hot state|hotstate|hot-state|state|facts) {_NOW}
what is in [the|your] (hot state|hotstate|hot-state)
what do you (know|see) (now|right now|at the moment|currently)
""")
TIME_SENTENCES: Final = compile_grammar(f"""
[do you know|tell me] what time (is it|it is) {_NOW}
[what is|tell me|give me|show me] [the] [current|local] time {_NOW}
""")
TIME_IN_SENTENCES: Final = compile_grammar("""
[do you know|tell me] what time (is it|it is) [now|right now] (in|at) {zone} [now|right now]
[what is] [the] [current|local] time [now|right now] in {place} [now|right now]
""")
DATE_SENTENCES: Final = compile_grammar(f"""
[tell me] (what|which) (day|date|month|year) (is it|is today|is it today|it is) {_NOW}
[what is|tell me|give me|show me] (today's|the|the current|current) date {_NOW}
date [today]
[what is] the day today
what is today
[what is] [the] [current] (time and date|date and time)
what day of the week is (it|today)
""")
DATE_IN_SENTENCES: Final = compile_grammar("""
what (day|date) is it [now|today] in {zone}
what is the date [now|today] in {place}
""")
SPENDING_SENTENCES: Final = compile_grammar("""
[show|show me|tell me|what is|what are] [the|my|your|our] (spending|spend|costs|cost|expenses|budget)
how much [money] have (you|we|i) (spent|used|cost|cost me) [so far]
how much [money] did (you|we|i) (spend|cost|use|cost me)
spent
how much (has been|was) spent
how much are you spending
how much do you cost
how much have i spent on you
how much [of the|of your] (budget|money) is left
how much is left [of the budget|of your budget]
what (have you spent|have you cost|did you spend|did you cost|do you cost)
what is left of (the|your) budget
""")
HALT_SENTENCES: Final = compile_grammar(f"""
(stop|halt|freeze|emergency stop|abort|shut down|shutdown|pause) {_AT_ONCE}
(stop|halt|abort) (it|this|that|yourself|working|running|what you are doing|the agent|this agent|your work) {_AT_ONCE}
(stop stop|stop stop stop|stop, stop|stop, stop, stop)
""")
HALT_ALL_SENTENCES: Final = compile_grammar(f"""
(stop|halt|freeze|abort|shut down|kill|pause) (everything|all|all agents|all the agents|every agent|everyone) {_AT_ONCE}
(stop|halt|freeze|abort|shut down|kill|pause) everybody {_AT_ONCE}
(stop|halt|freeze|abort|shut down|kill|pause) [the] [whole|entire] fleet {_AT_ONCE}
(stop|halt) all of (them|you) {_AT_ONCE}
""")
RESUME_SENTENCES: Final = compile_grammar("""
(resume|unhalt|un-halt) [now|yourself|work|working|your work|the agent|this agent]
(lift|remove|clear|undo|end) the halt
you (can|may) resume [now|work|working]
""")
RESUME_ALL_SENTENCES: Final = compile_grammar("""
(resume|unhalt) (everything|all|all agents|every agent|the fleet|the whole fleet|the entire fleet|fleet)
lift all halts
""")
SESSION_SENTENCES: Final = compile_grammar("""
(stop|halt|abort|resume|unhalt) [the] session {id}
""")
ONE_AGENT_SENTENCES: Final = compile_grammar("""
(stop|halt|resume|unhalt) [the] {named} agent
(stop|halt|resume|unhalt) [the] [agent] {name}
""")
APPROVE_SENTENCES: Final = compile_grammar("""
[yes|yes,|i] (approve|accept) [it|this|that|this one|that one|the request|this request|the decision]
[yes|yes,] approved
[yes|yes,|i] (approve|accept) [the] [decision|request|call|number] {id}
""")
DENY_SENTENCES: Final = compile_grammar("""
[no|no,|i] (deny|reject|decline) [it|this|that|this one|that one|the request|this request|the decision]
[no|no,] (denied|rejected|declined)
[no|no,|i] (deny|reject|decline) [the] [decision|request|call|number] {id}
""")
CANCEL_UNNAMED_SENTENCES: Final = compile_grammar("""
(cancel|delete|remove|drop|disable|end|stop) [the|my|your|a|all|all the|all my|all your] (schedule|schedules)
""")
CANCEL_SENTENCES: Final = compile_grammar("""
(cancel|delete|remove|drop|disable|end|stop) [the|my|your] schedule [called|named] {after}
(cancel|delete|remove|drop|disable|end|stop) [the|my|your] {before} schedule
unschedule [the] {un}
cancel [the|my|your] {only}
""")
FIELD_SENTENCES: Final = compile_grammar(f"""
how (high|low|large|much|many|old|warm|cold|full) is [the] [current] {{much}} {_NOW}
[what is|show|show me|tell me|read|get] [the] [current] [value of] [the] {{name}} {_NOW}
""")


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

LONGEST_FAST_PATH: Final = 500
"""Longer messages are no fast path."""
LONGEST_GREETING: Final = 200
"""How far into a message the agent's own name is looked for."""

HELP_ANSWER: Final = """\
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
    """A route without details."""


class ClockQuestion(msgspec.Struct, frozen=True, tag="Asked"):
    what: Literal["time", "date"]
    zone: str


class SumResult(msgspec.Struct, frozen=True, tag="Result"):
    """The result of a sum, or why there is none."""

    text: str


class SpendingQuestion(msgspec.Struct, frozen=True, tag="Spent"):
    period: Period


class Scope(msgspec.Struct, frozen=True, tag=True):
    """What is halted or resumed: `agent:NAME`, `session:ID` or `fleet`."""

    scope: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """A verdict on a decision; the id is empty where none waits or several may be meant.

    Without an id in the message it is `implied`: the only one that waits.
    """

    verdict: Verdict
    decision: str
    ambiguous: bool = False
    implied: bool = False


class ScheduleName(msgspec.Struct, frozen=True, tag="Named"):
    """A schedule, by its exact name if it is known; empty if none was named."""

    name: str
    known: bool


class HotStateQuestion(msgspec.Struct, frozen=True, tag="Field"):
    """A field of the hot state; empty for all of it."""

    name: str


Detail = Plain | ClockQuestion | SumResult | SpendingQuestion | Scope | Decided | ScheduleName | HotStateQuestion
FastPathMatch = tuple[FastPath, Detail] | None


class RoutingContext(msgspec.Struct, frozen=True, kw_only=True):
    """The names that exist where a message arrives: only they are understood."""

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
_BRAKES: Final[Sequence[tuple[FastPath, re.Pattern[str], re.Pattern[str]]]] = (
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
_SESSION_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{3,63}")
_BEGINNING: Final = 4
"""Shortest prefix that identifies an id."""
_ID: Final = re.compile(r"(?=.*\d)[a-z0-9][a-z0-9._:-]{5,}")


def find_fast_path(text: str, surroundings: RoutingContext) -> FastPathMatch:
    """Returns the fast path that a whole message is; None if it is none."""
    if len(text) > LONGEST_FAST_PATH or any(sign in text for sign in ("\n", "\r", '"', "`", "\u201c", "\u201e")):
        return None
    said = normalize_message(text, surroundings.agent)
    if not said:
        return ("help", Plain()) if text.strip() == "?" else None
    return (
        _find_brake(said, surroundings)
        or _find_plain_sentence(said)
        or _find_clock_question(said, surroundings)
        or _find_spending_question(said)
        or (None if _is_request_or_question(text) else _find_decision(said, surroundings))
        or _find_cancel(said, surroundings)
        or _find_field(said, surroundings)
        or _find_arithmetic(text, said)
    )


def normalize_message(text: str, agent: str) -> str:
    """Removes case, courtesies, the agent's name, and final punctuation.

    Full-width letters are the same letters, and emphasis by stars is dropped.
    """
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'")
    plain = _strip_endings(" ".join(plain.split()).removeprefix("/"))
    said = _strip_endings(plain.strip("*_~"))
    said = strip_agent_address(said, agent)
    for form in (_GREETING, _GREETING, _REQUEST, _GREETING):
        match = form.match(said)
        said = said[match.end() :] if match else said
    for form, plain in _CONTRACTIONS:
        said = form.sub(plain, said)
    return said.strip()


def strip_agent_address(text: str, agent: str) -> str:
    """Removes the address of this agent: `hey halter,`, `@scout`, `scout:`."""
    name = re.escape(agent) if agent else "halter"
    hello = r"\s*(?:hey|hi|hello|ok|okay|yo|dear)\s+"
    form = (
        rf"(?:{hello})?\s*(?:@(?:halter|{name})[,:!]*\s+|(?:halter|{name})[,:!]+\s*|halter\s+)|{hello}{name}[,:!]*\s+"
    )
    match = re.match(form, text[:LONGEST_GREETING], re.IGNORECASE)
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


def _taken_words(match: re.Match[str]) -> str:
    return next((each for each in match.groupdict().values() if each), "")


def _find_plain_sentence(text: str) -> FastPathMatch:
    for path, form in _PLAIN:
        if _match_sentence(form, text):
            return path, (HotStateQuestion("") if path == "hot_state" else Plain())
    return None


def _find_brake(text: str, surroundings: RoutingContext) -> FastPathMatch:
    for path, one, everything in _BRAKES:
        if _match_sentence(one, text):
            return path, Scope(f"agent:{surroundings.agent}")
        if _match_sentence(everything, text):
            return path, Scope("fleet")
    verb: FastPath = "resume" if text.startswith(("resume", "unhalt")) else "halt"
    if (match := _match_sentence(SESSION_SENTENCES, text)) and _SESSION_ID.fullmatch(_taken_words(match)):
        return verb, Scope(f"session:{_taken_words(match)}")
    match = _match_sentence(ONE_AGENT_SENTENCES, text)
    name = match and _match_exact_name(
        _taken_words(match).removeprefix("@"), (surroundings.agent, *surroundings.agents)
    )
    return (verb, Scope(f"agent:{name}")) if name else None


def _find_clock_question(text: str, surroundings: RoutingContext) -> FastPathMatch:
    for what, form in _CLOCKS:
        match = _match_sentence(form, text)
        if match is not None:
            zone = find_named_zone(_taken_words(match)) if _taken_words(match) else surroundings.timezone
            return ("time", ClockQuestion(what, zone)) if zone else None
    return None


def describe_time(now: int, zone: str) -> str:
    """Says the time and the date; both questions get both."""
    shown = to_local_time(now, ZoneInfo(zone))
    return f"It is {shown:%H:%M} on {shown:%A}, {shown.day} {shown:%B %Y} ({zone})."


def _find_spending_question(text: str) -> FastPathMatch:
    text = text.removesuffix(" so far")
    for words, period in _PERIODS:
        bare = text.removesuffix(words).rstrip() if text.endswith(f" {words}") else text
        for link in (" so far", " for", " in"):
            bare = bare.removesuffix(link) if bare != text else bare
        if bare != text and _match_sentence(SPENDING_SENTENCES, bare):
            return "spending", SpendingQuestion(period)
    return ("spending", SpendingQuestion("today")) if _match_sentence(SPENDING_SENTENCES, text) else None


def _is_request_or_question(text: str) -> bool:
    """Whether it is a question or a request to the agent: neither is a verdict."""
    said = " ".join(text.lower().split())
    return said.endswith("?") or _REQUEST.search(said) is not None


def _find_decision(text: str, surroundings: RoutingContext) -> FastPathMatch:
    for verdict, form in _VERDICTS:
        match = _match_sentence(form, text)
        if match is not None:
            decided = _match_decision(verdict, _taken_words(match).removeprefix("#"), surroundings.decisions)
            return None if decided is None else ("decide", decided)
    return None


def _match_decision(verdict: Verdict, text: str, waiting: Sequence[str]) -> Decided | None:
    """Returns the decision that is meant: by its id or a prefix of it, or the only one that waits."""
    if not text:
        only = waiting[0] if len(waiting) == 1 else ""
        return Decided(verdict, only, ambiguous=len(waiting) > 1, implied=bool(only))
    meant = [each for each in waiting if each.lower() == text]
    if not meant and len(text) >= _BEGINNING:
        meant = [each for each in waiting if each.lower().startswith(text)]
    if meant:
        return Decided(verdict, meant[0] if len(meant) == 1 else "", ambiguous=len(meant) > 1)
    return Decided(verdict, text) if _ID.fullmatch(text) else None


def _find_cancel(text: str, surroundings: RoutingContext) -> FastPathMatch:
    """Returns the schedule to cancel, by its exact name, or by one word after `schedule` even if it is unknown."""
    if _match_sentence(CANCEL_UNNAMED_SENTENCES, text):
        return "cancel_schedule", ScheduleName("", known=False)
    match = _match_sentence(CANCEL_SENTENCES, text)
    if match is None:
        return None
    known = next(
        (
            name
            for each in match.groupdict().values()
            if each and (name := _match_exact_name(each, surroundings.schedules))
        ),
        "",
    )
    if known:
        return "cancel_schedule", ScheduleName(known, known=True)
    unknown = match["after"] or match["un"] or ""
    return ("cancel_schedule", ScheduleName(unknown, known=False)) if len(unknown.split()) == 1 else None


def _find_field(text: str, surroundings: RoutingContext) -> FastPathMatch:
    match = _match_sentence(FIELD_SENTENCES, text)
    name = match and _match_exact_name(_taken_words(match), surroundings.fields)
    return ("hot_state", HotStateQuestion(name)) if name else None


def _find_arithmetic(text: str, said: str) -> FastPathMatch:
    if text.rstrip().endswith("!"):
        return None
    result = evaluate_sum(said)
    return None if result is None else ("arithmetic", SumResult(result))


def _match_exact_name(text: str, names: Sequence[str]) -> str:
    """Returns a name however its words are joined; empty if there is none or two are alike."""
    meant = [name for name in names if is_same_name(name, text)]
    return meant[0] if len(set(meant)) == 1 else ""


def is_same_name(name: str, text: str) -> bool:
    """Compares names without case, with -, _ and spaces as equal."""
    return bool(text) and _join_name(name) == _join_name(text)


def _join_name(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.lower()).strip()
