"""The verbs that sessions have.

To ask a person, read on, answer, yield, and to record findings, proposals, notifications. They only read or record, so
they are free and safe to repeat. What they record is committed with the outcome of the call, and a person decides about
it. A notification is committed first and sent by the outbox afterwards, so it is sent at least once, and never for
something that did not happen.
"""

import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from hashlib import sha256
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, HOUR, MINUTE, Clock
from halter.core.effect_events import Severity, Support
from halter.core.events import (
    CallSettled,
    DecisionAsked,
    FindingEmitted,
    HistoryGiven,
    MemoryProposed,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    PrecedentProposed,
)
from halter.core.ids import FLEET, OUTBOX, session_stream
from halter.core.ports import Draft, NotificationContent, Rows, Store, Write, read_body
from halter.core.provenance import Declaration
from halter.core.rows import DecisionRow, MemoryRow, NotificationRow
from halter.core.text import clean, from_body, join_names, shorten, to_body
from halter.core.tools import (
    DEFAULT_TOOL_TIMEOUT,
    EffectStatus,
    Failed,
    Invalid,
    JournalEffect,
    Level,
    Output,
    Permit,
    PermitGate,
    ToolSpec,
    Valid,
    add_spec_digest,
)
from halter.core.vocabulary import RowKey, SessionKind, YieldMode
from halter.loop.decide import ASK_USER, YIELD, parse_sleep_seconds
from halter.loop.history import LONGEST_RESULT, find_calling_session, find_result

READ_OUTPUT: Final = "read_output"
PAGE: Final = 1000
TELLS_NOTHING: Final = Declaration(reads="nothing", reach="none")
"""A verb that answers in the runtime's own words, and leaves what it is given to the person it works for."""
READS_ANYONE: Final = Declaration(reads="anyone", reach="none")

T = TypeVar("T", bound=msgspec.Struct)


class Verb:
    """A tool whose arguments are a struct; implements the port `Tool`.

    Its function is given the call's id, and returns text or also events to record with it.
    """

    def __init__(  # noqa: PLR0913 Each is one thing that a verb is, and most have their usual value.
        self,
        name: str,
        description: str,
        takes: type[T],
        act: Callable[[T, str], Awaitable[str | Output]],
        flaw: Callable[[T], str] = lambda _: "",
        *,
        level: Level = "SAFE",
        timeout: int = DEFAULT_TOOL_TIMEOUT,
        declaration: Declaration = TELLS_NOTHING,
    ) -> None:
        self._takes: type[Any] = takes
        self._act: PermitGate[Callable[[Any, str], Awaitable[str | Output]]] = PermitGate(act)
        self._flaw: Callable[[Any], str] = flaw
        made = _make_verb_spec(name, description, takes, level, timeout)
        self._spec = msgspec.structs.replace(made, declaration=declaration)

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        try:
            read = msgspec.json.decode(arguments or b"{}", type=self._takes)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Invalid(f"The arguments of {self._spec.name} do not fit: {clean(str(error))}.")
        flaw = self._flaw(read)
        if flaw:
            return Invalid(flaw)
        values: Mapping[str, Any] = msgspec.structs.asdict(read)
        return Valid(values, msgspec.json.encode(read, order="sorted"))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        act = self._act.open(permit)
        made = await act(self._takes(**arguments.values), permit.id)
        return Output(made) if isinstance(made, str) else made

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Nothing outside is changed, so there is nothing to check."""
        return "unknown"


@lru_cache(maxsize=256)
def _make_verb_spec(name: str, description: str, takes: type[msgspec.Struct], level: Level, timeout: int) -> ToolSpec:
    """Makes a verb's spec, cached: every session makes its verbs anew."""
    (described,), components = msgspec.json.schema_components([takes], ref_template="{name}")
    return add_spec_digest(
        ToolSpec(
            name=name,
            description=description,
            schema=msgspec.json.encode(components[described["$ref"]]),
            level=level,
            effect="read",
            idempotent=True,
            timeout=timeout,
        )
    )


class _Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: str


@cache
def ask_user() -> Verb:
    """Makes the tool with which a model asks its user; it ends the turn."""

    async def act(_: _Question, __: str) -> str:
        return "The question was put to the person. Their answer comes as their next message."

    about = (
        "Ask the person you work for a question that only they can answer. Your turn ends, and their answer follows."
    )
    return Verb(ASK_USER, about, _Question, act)


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    call: str
    offset: int = 0


def read_output(output: Callable[[str, str], Awaitable[str | None]]) -> Verb:
    """Makes the tool that reads on in a result that was too long to show."""

    async def act(place: _Place, call: str) -> str:
        text = await output(find_calling_session(call), place.call)
        if text is None:
            raise Failed("NoSuchCall", f"there is no result of a call {place.call!r} in this session")
        offset = max(0, place.offset)
        shown = text[offset : offset + LONGEST_RESULT - 200]
        remaining = max(0, len(text) - offset - len(shown))
        return (
            f"{shown}\n[{remaining} characters follow, from offset={offset + len(shown)} on.]" if remaining else shown
        )

    about = "Read on in a result that was shown only in part, from an offset in characters."
    return Verb(READ_OUTPUT, about, _Place, act, declaration=READS_ANYONE)


async def find_call_output(store: Store, session: str, call: str) -> str | None:
    """Returns the output of a call, by the id that the model knows."""
    stream, query, after = session_stream(session), f"{session}.{call}", 0
    while page := await store.read(stream, after, PAGE):
        for stored in page:
            if isinstance(stored.event, CallSettled) and stored.event.call == query:
                return from_body(await read_body(store, stored))
            if isinstance(stored.event, HistoryGiven):
                given = find_result(await read_body(store, stored), call)
                if given is not None:
                    return given
        after = page[-1].seq
    return None


class _Yield(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: YieldMode = "continue"
    sleep: float | str = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if parse_sleep_seconds(self.sleep) is None:
            raise ValueError("`sleep` is a number of seconds from 0 up, or a duration as in 15m")


def make_yield_verb(names: Sequence[str] | None = None) -> Verb:
    """Makes the tool with which an autonomous agent says how it goes on after its turn.

    `names` are what it may wait for; without them, anything.
    """

    async def act(_: _Yield, __: str) -> str:
        return "Your turn ends here."

    def flaw(asked: _Yield) -> str:
        unknown = [] if names is None else [name for name in asked.wake_early_if if name not in names]
        if not unknown:
            return ""
        wrong = join_names(map(clean, unknown))
        return f"Nothing called {wrong} can wake you: `wake_early_if` may name {join_names(names or ())}."

    about = (
        "End your turn, and say how to go on: `continue` at once, `sleep` for so many seconds, or `shutdown`. "
        "`wake_early_if` names what wakes you before."
    )
    return Verb(YIELD, about, _Yield, act, flaw)


def make_verbs(store: Store, kind: SessionKind, wake_names: Sequence[str] | None = None) -> Sequence[Verb]:
    """Makes the verbs of all sessions of a kind; autonomous ones may wait for those names."""
    common = (ask_user(), read_output(partial(find_call_output, store)))
    return (*common, make_yield_verb(wake_names)) if kind == "autonomous" else common


async def _read_nothing(_: str, __: str) -> str | None:
    return None


def list_verb_specs() -> tuple[ToolSpec, ...]:
    """Lists the verbs that an agent's file may name."""
    return tuple(verb.spec for verb in (ask_user(), read_output(_read_nothing), make_yield_verb()))


EMIT_FINDING: Final = "emit_finding"
PROPOSE_MEMORY: Final = "propose_memory"
PROPOSE_PRECEDENT: Final = "propose_precedent"
NOTIFY: Final = "notify"

UNREVIEWED: Final = "(not reviewed)"

PROPOSAL_LIFETIME: Final = 365 * DAY
"""How long a proposal waits for a person."""

ShortText = Annotated[str, Meta(min_length=1, max_length=200)]
LongText = Annotated[str, Meta(min_length=1, max_length=8000)]

CheckSupport = Callable[[str, str], Awaitable[Support]]
"""Returns whether a quote stands in a document. Raises Failed for one that the session may not read."""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding and its grounds."""

    title: ShortText
    severity: Severity
    text: Annotated[str, Meta(max_length=8000)] = ""
    document: Annotated[str, Meta(description="the document that it is about", max_length=1000)] = ""
    quote: Annotated[str, Meta(description="the words of the document that show it", max_length=8000)] = ""


class QuotedDocument(msgspec.Struct, frozen=True):
    """A finding's document, as it was when its quote was checked."""

    support: Support
    document: str = ""
    name: str = ""


def emit_finding(agent: str, check: Callable[[Finding], Awaitable[QuotedDocument]], by: str = "") -> Verb:
    """Makes the verb that records a finding. Its quote is looked for in the document itself."""

    async def act(finding: Finding, call: str) -> Output:
        checked = await check(finding)
        event = FindingEmitted(
            finding=name_by_parts("f", call),
            agent=agent,
            severity=finding.severity,
            support=checked.support,
            document=checked.document,
            name=checked.name,
            by=by,
        )
        return Output(_describe_finding(event), happened=(JournalEffect(event, msgspec.json.encode(finding)),))

    about = (
        "Record something you found. Quote the words of the document that show it: they are looked for there, and a "
        "finding without such words is marked as unsupported."
    )
    return Verb(EMIT_FINDING, about, Finding, act)


def _describe_finding(event: FindingEmitted) -> str:
    match event.support:
        case "supported":
            return f"Recorded as {event.finding}; the quote stands in {event.name}."
        case "unsupported":
            return f"Recorded as {event.finding}, unsupported: those words do not stand in {event.name}."
        case "unquoted":
            return f"Recorded as {event.finding}, without a quote that could be looked for."


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: LongText


def propose_memory(agent: str, clock: Clock) -> Verb:
    """Makes the verb that proposes a memory; a person keeps or dismisses it."""

    async def act(asked: _Memory, _: str) -> Output:
        memory = name_by_parts("m", agent, normalise_text(asked.text))
        event = MemoryProposed(memory=memory, agent=agent)
        unless = (MemoryRow, memory)
        question = _question(agent, memory, "memory", asked.text, clock.now())
        happened = (
            JournalEffect(event, to_body(asked.text), unless=unless),
            msgspec.structs.replace(question, unless=unless),
        )
        return Output(f"Proposed as {memory}. A person decides whether it is kept.", happened=happened)

    return Verb(PROPOSE_MEMORY, "Propose something to be remembered in later sessions. A person decides.", _Memory, act)


class _Precedent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Annotated[str, Meta(min_length=1, max_length=60, description="what kind of case it is, in a word or two")]
    summary: Annotated[str, Meta(min_length=1, max_length=2000, description="the case, in a sentence or two")]


def propose_precedent(agent: str, clock: Clock) -> Verb:
    """Makes the verb that reports a case that may recur; a repeated one is counted."""

    async def act(asked: _Precedent, _: str) -> Output:
        kind = normalise_text(asked.kind)
        precedent = name_by_parts("p", agent, kind, normalise_text(asked.summary))
        event = PrecedentProposed(precedent=precedent, agent=agent, kind=kind)
        question = _question(agent, precedent, "precedent", f"{kind}: {asked.summary}", clock.now())
        happened = (JournalEffect(event, to_body(asked.summary)), question)
        return Output(f"Noted as {precedent}. A person decides whether it is kept.", happened=happened)

    about = "Tell of a case that may be met again, so that it is known in later sessions. A person decides."
    return Verb(PROPOSE_PRECEDENT, about, _Precedent, act)


def _question(agent: str, proposal: str, what: str, text: str, now: int) -> JournalEffect:
    """Asks a person about a proposal, once. Its text stands in the session's own stream and is erased with it."""
    decision = f"proposal/{proposal}"
    event = DecisionAsked(
        decision=decision,
        about="proposal",
        subject=proposal,
        name=what,
        digest=sha256(to_body(text)).hexdigest(),
        expires_at=now + PROPOSAL_LIFETIME,
        agent=agent,
    )
    return JournalEffect(event, stream=FLEET, unless=(DecisionRow, decision))


class NoticeArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a notification."""

    text: LongText
    subject: Annotated[str, Meta(max_length=200)] = ""
    findings: Annotated[tuple[str, ...], Meta(description="the findings that go with it", max_length=100)] = ()
    channel: Annotated[str, Meta(description="one channel; all, if empty")] = ""


ReadReleasedFindings = Callable[[], Awaitable[Mapping[str, tuple[str, str]]]]
"""Returns the session's findings by id: the review, and the text."""


def notify(
    agent: str,
    session: str,
    channels: Sequence[str],
    released: ReadReleasedFindings,
    mark_links: Callable[[str], str],
    timeout: int = DEFAULT_TOOL_TIMEOUT,
) -> Verb:
    """Makes the verb that notifies people, over the channels that a person configured.

    Links that no trusted place said are named below the text, as `mark_links` warns of them.
    """

    async def act(notice: NoticeArguments, call: str) -> Output:
        found = await released()
        words = [_render_finding(finding, found) for finding in notice.findings]
        text = "\n\n".join((notice.text, *words))
        marks = mark_links(f"{notice.subject}\n{text}")
        subject = notice.subject or shorten(notice.text.splitlines()[0], 120)
        sentence = f"{text}\n\n{marks}" if marks else text
        body = NotificationContent(subject=subject, text=sentence, session=session).body()
        wanted = [notice.channel] if notice.channel else list(channels)
        happened = tuple(
            JournalEffect(_queue_notification(name_by_parts("n", call, channel), channel, agent, session), body)
            for channel in wanted
        )
        return Output(f"It will be told over {join_names(wanted)}.", happened=happened)

    def flaw(notice: NoticeArguments) -> str:
        if not notice.channel or notice.channel in channels:
            return ""
        return f"There is no channel {shorten(notice.channel)!r}: there is {join_names(channels)}."

    about = "Tell the people you work for something."
    return Verb(NOTIFY, about, NoticeArguments, act, flaw, level="MONITORED", timeout=timeout)


def _queue_notification(notification: str, channel: str, agent: str, session: str) -> NotificationQueued:
    return NotificationQueued(notification=notification, channel=channel, agent=agent, about=f"session:{session}")


def _render_finding(finding: str, found: Mapping[str, tuple[str, str]]) -> str:
    """Puts a finding into words, and says if it was not reviewed; not one that a reviewer withheld."""
    if finding not in found:
        raise Failed(
            "NoSuchFinding", f"there is no finding {shorten(finding)!r}; there is {join_names(found) or 'none'}"
        )
    review, words = found[finding]
    if review == "withheld":
        raise Failed("Withheld", f"{finding} was withheld by its reviewer and is not delivered")
    return words if review == "released" else f"{words}\n{UNREVIEWED}"


def name_by_parts(kind: str, *parts: str) -> str:
    """Makes an id from its parts: equal parts give equal ids."""
    digest = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{kind}-{digest[:16]}"


def normalise_text(text: str) -> str:
    """Normalises case, blanks, and punctuation at the ends."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", plain).strip(" .,;:!?\"'")


RETRY_PAUSES: Final = (MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, *(7 * (DAY,)))
"""Delay after each failure; after one more it is given up."""


def compute_notification_backoff(attempts: int) -> int | None:
    """Returns how long to wait after so many failures; None to give up."""
    return RETRY_PAUSES[attempts - 1] if attempts <= len(RETRY_PAUSES) else None


def queue_notification(
    notification: str, channel: str, agent: str, telling: NotificationContent, about: str = ""
) -> Draft:
    """Queues a notification; it is sent once this is committed."""
    event = NotificationQueued(notification=notification, channel=channel, agent=agent, about=about)
    return Draft(event, telling.body())


def make_notification_key(notification: str) -> RowKey:
    return (NotificationRow, notification)


def record_sent(notification: str, attempts: int) -> Write:
    """Records that it was sent. Of two processes that sent it, the second adds nothing."""

    def decide(rows: Rows) -> list[Draft]:
        if not _is_waiting(rows.get(NotificationRow, notification)):
            return []
        return [Draft(NotificationSent(notification=notification, attempts=attempts))]

    return Write(OUTBOX, f"sent/{notification}", decide, [make_notification_key(notification)])


def record_send_failure(notification: str, attempts: int, error: str, *, may_retry: bool) -> Write:
    """Records a failure and the next attempt. Of two processes that tried at once, one counts."""
    pause = compute_notification_backoff(attempts) if may_retry else None

    def decide(rows: Rows) -> list[Draft]:
        row = rows.get(NotificationRow, notification)
        if row is None or not _is_waiting(row) or row.attempts >= attempts:
            return []
        next_at = None if pause is None else rows.now + pause
        return [Draft(NotificationFailed(notification=notification, attempts=attempts, error=error, next_at=next_at))]

    return Write(OUTBOX, f"failed/{notification}/{attempts}", decide, [make_notification_key(notification)])


def _is_waiting(row: NotificationRow | None) -> bool:
    return row is not None and row.sent_at is None and not row.gave_up
