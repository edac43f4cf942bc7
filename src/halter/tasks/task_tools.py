"""The verbs of sessions: ask a person, read a long result, yield, and record findings, proposals and notifications.

Verbs only read or record, so they are free and safe to repeat. Their records are committed with the outcome of the
call. A person decides about findings and proposals. The outbox sends a notification after its commit, so it is sent at
least once, and never for a call that did not succeed.
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
from halter.core.events.tasks import Severity, Support
from halter.core.ids import FLEET, OUTBOX, session_stream
from halter.core.notifications import NotificationContent
from halter.core.ports import Draft, Rows, Store, Write, read_body
from halter.core.provenance import Declaration
from halter.core.rows import DecisionRow, MemoryRow, NotificationRow
from halter.core.text import clean, decode_body, encode_body, join_names, shorten
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
from halter.loop.history import find_calling_session, find_result
from halter.loop.transcript import MAX_RESULT_LENGTH
from halter.loop.turn import ASK_USER, YIELD, parse_sleep_seconds
from halter.policy.evaluation import ResolvedPolicy

READ_OUTPUT: Final = "read_output"
PAGE: Final = 1000
TELLS_NOTHING: Final = Declaration(reads="nothing", reach="none")
"""The declaration of a verb that answers with the runtime's own text, and reaches only the agent's user."""
READS_ANYONE: Final = Declaration(reads="anyone", reach="none")

T = TypeVar("T", bound=msgspec.Struct)


class Verb:
    """A tool whose arguments are a struct; implements the port `Tool`.

    Its function receives the arguments and the call's id, and returns text, or an Output with events to record.
    """

    def __init__(  # noqa: PLR0913 A verb needs each of these, and most have a default.
        self,
        name: str,
        description: str,
        arguments_type: type[T],
        act: Callable[[T, str], Awaitable[str | Output]],
        flaw: Callable[[T], str] = lambda _: "",
        *,
        level: Level = "SAFE",
        timeout: int = DEFAULT_TOOL_TIMEOUT,
        declaration: Declaration = TELLS_NOTHING,
    ) -> None:
        self._arguments_type: type[Any] = arguments_type
        self._act: PermitGate[Callable[[Any, str], Awaitable[str | Output]]] = PermitGate(act)
        self._flaw: Callable[[Any], str] = flaw
        spec = _make_verb_spec(name, description, arguments_type, level, timeout)
        self._spec = msgspec.structs.replace(spec, declaration=declaration)

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def validate(self, arguments: bytes) -> Valid | Invalid:
        try:
            struct = msgspec.json.decode(arguments or b"{}", type=self._arguments_type)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Invalid(f"The arguments of {self._spec.name} do not fit: {clean(str(error))}.")
        flaw = self._flaw(struct)
        if flaw:
            return Invalid(flaw)
        values: Mapping[str, Any] = msgspec.structs.asdict(struct)
        return Valid(values, msgspec.json.encode(struct, order="sorted"))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        act = self._act.open(permit)
        output = await act(self._arguments_type(**arguments.values), permit.id)
        return Output(output) if isinstance(output, str) else output

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Return `unknown`: a verb has no outside effect that could be checked."""
        return "unknown"


@lru_cache(maxsize=256)
def _make_verb_spec(
    name: str, description: str, arguments_type: type[msgspec.Struct], level: Level, timeout: int
) -> ToolSpec:
    """Make a verb's spec, which is cached because every session makes its own verbs."""
    (reference,), components = msgspec.json.schema_components([arguments_type], ref_template="{name}")
    return add_spec_digest(
        ToolSpec(
            name=name,
            description=description,
            schema=msgspec.json.encode(components[reference["$ref"]]),
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
    """Make the verb with which a model asks a person. It ends the turn."""

    async def act(_: _Question, __: str) -> str:
        return "The question was sent to the person. Their answer is their next message."

    description = (
        "Ask the person you work for a question that only they can answer. Your turn ends, and their answer follows."
    )
    return Verb(ASK_USER, description, _Question, act)


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    call: str
    offset: int = 0


def read_output(output: Callable[[str, str], Awaitable[str | None]]) -> Verb:
    """Make the verb that reads more of a result that was too long to show."""

    async def act(arguments: _Place, call: str) -> str:
        text = await output(find_calling_session(call), arguments.call)
        if text is None:
            raise Failed("NoSuchCall", f"there is no result of a call {arguments.call!r} in this session")
        offset = max(0, arguments.offset)
        page = text[offset : offset + MAX_RESULT_LENGTH - 200]
        remaining = max(0, len(text) - offset - len(page))
        return (
            f"{page}\n[{remaining} characters follow; continue at offset={offset + len(page)}.]" if remaining else page
        )

    description = "Read more of a result that was shown only in part, from an offset in characters."
    return Verb(READ_OUTPUT, description, _Place, act, declaration=READS_ANYONE)


async def find_call_output(store: Store, session: str, call: str) -> str | None:
    """Find the output of a call by the id that the model knows."""
    stream, call_id, after_seq = session_stream(session), f"{session}.{call}", 0
    while page := await store.read(stream, after_seq, PAGE):
        for stored in page:
            if isinstance(stored.event, CallSettled) and stored.event.call == call_id:
                return decode_body(await read_body(store, stored))
            if isinstance(stored.event, HistoryGiven):
                result = find_result(await read_body(store, stored), call)
                if result is not None:
                    return result
        after_seq = page[-1].seq
    return None


class _Yield(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: YieldMode = "continue"
    sleep: float | str = 0
    wake_early_if: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        if parse_sleep_seconds(self.sleep) is None:
            raise ValueError("`sleep` must be a number of seconds from 0 up, or a duration such as 15m")


def make_yield_verb(names: Sequence[str] | None = None) -> Verb:
    """Make the verb with which an autonomous agent ends its turn and says how to continue.

    `names` are the wake names that it may use; None allows any.
    """

    async def act(_: _Yield, __: str) -> str:
        return "Your turn ends here."

    def flaw(arguments: _Yield) -> str:
        unknown = [] if names is None else [name for name in arguments.wake_early_if if name not in names]
        if not unknown:
            return ""
        unknown_names = join_names(map(clean, unknown))
        return f"Nothing called {unknown_names} can wake you; `wake_early_if` accepts {join_names(names or ())}."

    description = (
        "End your turn, and choose what follows: `continue` immediately, `sleep` for a number of seconds, or "
        "`shutdown`. `wake_early_if` names what wakes you earlier."
    )
    return Verb(YIELD, description, _Yield, act, flaw)


def make_verbs(store: Store, kind: SessionKind, wake_names: Sequence[str] | None = None) -> Sequence[Verb]:
    """Make the verbs of all sessions of a kind. Autonomous ones can wait for `wake_names`."""
    common = (ask_user(), read_output(partial(find_call_output, store)))
    return (*common, make_yield_verb(wake_names)) if kind == "autonomous" else common


async def _read_nothing(_: str, __: str) -> str | None:
    return None


def list_verb_specs() -> tuple[ToolSpec, ...]:
    """List the verbs that an agent's file may name."""
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
"""Returns whether a document contains a quote. Raises Failed if the session may not read the document."""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding and its grounds."""

    title: ShortText
    severity: Severity
    text: Annotated[str, Meta(max_length=8000)] = ""
    document: Annotated[str, Meta(description="the document that it is about", max_length=1000)] = ""
    quote: Annotated[str, Meta(description="the words of the document that support it", max_length=8000)] = ""


class QuotedDocument(msgspec.Struct, frozen=True):
    """The document of a finding, when its quote was checked."""

    support: Support
    document: str = ""
    name: str = ""


def emit_finding(agent: str, check: Callable[[Finding], Awaitable[QuotedDocument]], by: str = "") -> Verb:
    """Make the verb that records a finding. Its quote is checked against the document."""

    async def act(finding: Finding, call: str) -> Output:
        quoted_document = await check(finding)
        event = FindingEmitted(
            finding=name_by_parts("f", call),
            agent=agent,
            severity=finding.severity,
            support=quoted_document.support,
            document=quoted_document.document,
            name=quoted_document.name,
            by=by,
        )
        return Output(_describe_finding(event), happened=(JournalEffect(event, msgspec.json.encode(finding)),))

    description = (
        "Record a finding. Quote the words of the document that support it: Halter searches the document for them, and "
        "marks a finding without such words as unsupported."
    )
    return Verb(EMIT_FINDING, description, Finding, act)


def _describe_finding(event: FindingEmitted) -> str:
    match event.support:
        case "supported":
            return f"Recorded as {event.finding}; the quote is in {event.name}."
        case "unsupported":
            return f"Recorded as {event.finding}, unsupported: the quote is not in {event.name}."
        case "unquoted":
            return f"Recorded as {event.finding}, without a quote to check."


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: LongText


def propose_memory(policy: ResolvedPolicy, clock: Clock) -> Verb:
    """Make the verb that proposes a memory; a person accepts or dismisses it."""

    async def act(arguments: _Memory, _: str) -> Output:
        agent = policy.name
        memory = name_by_parts("m", agent, normalise_text(arguments.text))
        event = MemoryProposed(memory=memory, agent=agent)
        unless = (MemoryRow, memory)
        question = _question(policy, memory, "memory", arguments.text, clock.now())
        effects = (
            JournalEffect(event, encode_body(arguments.text), unless=unless),
            msgspec.structs.replace(question, unless=unless),
        )
        return Output(f"Proposed as {memory}. A person decides whether to accept it.", happened=effects)

    return Verb(PROPOSE_MEMORY, "Propose something to be remembered in later sessions. A person decides.", _Memory, act)


class _Precedent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Annotated[str, Meta(min_length=1, max_length=60, description="what kind of case it is, in a word or two")]
    summary: Annotated[str, Meta(min_length=1, max_length=2000, description="the case, in a sentence or two")]


def propose_precedent(policy: ResolvedPolicy, clock: Clock) -> Verb:
    """Make the verb that reports a case that may recur. Repeated reports are counted."""

    async def act(arguments: _Precedent, _: str) -> Output:
        agent, kind = policy.name, normalise_text(arguments.kind)
        precedent = name_by_parts("p", agent, kind, normalise_text(arguments.summary))
        event = PrecedentProposed(precedent=precedent, agent=agent, kind=kind)
        question = _question(policy, precedent, "precedent", f"{kind}: {arguments.summary}", clock.now())
        effects = (JournalEffect(event, encode_body(arguments.summary)), question)
        return Output(f"Proposed as {precedent}. A person decides whether to accept it.", happened=effects)

    description = "Report a case that may recur, so that later sessions know of it. A person decides."
    return Verb(PROPOSE_PRECEDENT, description, _Precedent, act)


def _question(policy: ResolvedPolicy, proposal: str, kind: str, text: str, now: int) -> JournalEffect:
    """Make the effect that asks a person about a proposal once. Its text is in the session's stream only."""
    decision = f"proposal/{proposal}"
    event = DecisionAsked(
        decision=decision,
        about="proposal",
        subject=proposal,
        name=kind,
        digest=sha256(encode_body(text)).hexdigest(),
        agent=policy.name,
        **policy.question_terms.times_at(now, PROPOSAL_LIFETIME),
    )
    return JournalEffect(event, stream=FLEET, unless=(DecisionRow, decision))


class NoticeArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a notification."""

    text: LongText
    subject: Annotated[str, Meta(max_length=200)] = ""
    findings: Annotated[tuple[str, ...], Meta(description="the findings that go with it", max_length=100)] = ()
    channel: Annotated[str, Meta(description="one channel; all, if empty")] = ""


ReadReleasedFindings = Callable[[], Awaitable[Mapping[str, tuple[str, str]]]]
"""Returns the review and the text of each finding of the session, by id."""


def notify(
    agent: str,
    session: str,
    channels: Sequence[str],
    read_findings: ReadReleasedFindings,
    mark_links: Callable[[str], str],
    timeout: int = DEFAULT_TOOL_TIMEOUT,
) -> Verb:
    """Make the verb that notifies people over the configured channels.

    `mark_links` returns a warning about links that come from no trusted source; it is appended to the text.
    """

    async def act(notice: NoticeArguments, call: str) -> Output:
        findings = await read_findings()
        finding_texts = [_render_finding(finding, findings) for finding in notice.findings]
        text = "\n\n".join((notice.text, *finding_texts))
        link_warning = mark_links(f"{notice.subject}\n{text}")
        subject = notice.subject or shorten(notice.text.splitlines()[0], 120)
        full_text = f"{text}\n\n{link_warning}" if link_warning else text
        body = NotificationContent(subject=subject, text=full_text, session=session).body()
        target_channels = [notice.channel] if notice.channel else list(channels)
        effects = tuple(
            JournalEffect(_queue_notification(name_by_parts("n", call, channel), channel, agent, session), body)
            for channel in target_channels
        )
        return Output(f"Queued for {join_names(target_channels)}.", happened=effects)

    def flaw(notice: NoticeArguments) -> str:
        if not notice.channel or notice.channel in channels:
            return ""
        return f"Unknown channel {shorten(notice.channel)!r}. Available: {join_names(channels)}."

    description = "Notify the people you work for."
    return Verb(NOTIFY, description, NoticeArguments, act, flaw, level="MONITORED", timeout=timeout)


def _queue_notification(notification: str, channel: str, agent: str, session: str) -> NotificationQueued:
    return NotificationQueued(notification=notification, channel=channel, agent=agent, about=f"session:{session}")


def _render_finding(finding: str, findings: Mapping[str, tuple[str, str]]) -> str:
    """Render a finding, with a mark if it was not reviewed. Raises Failed for a withheld one."""
    if finding not in findings:
        raise Failed(
            "NoSuchFinding", f"unknown finding {shorten(finding)!r}; available: {join_names(findings) or 'none'}"
        )
    review, text = findings[finding]
    if review == "withheld":
        raise Failed("Withheld", f"{finding} was withheld by its reviewer and is not delivered")
    return text if review == "released" else f"{text}\n{UNREVIEWED}"


def name_by_parts(kind: str, *parts: str) -> str:
    """Make an id from parts: equal parts give equal ids."""
    digest = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{kind}-{digest[:16]}"


def normalise_text(text: str) -> str:
    """Normalise case and spaces, and remove punctuation at the ends."""
    folded_text = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", folded_text).strip(" .,;:!?\"'")


RETRY_PAUSES: Final = (MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, *(7 * (DAY,)))
"""Delay after each failure. After one more failure, no further attempt is made."""


def compute_notification_backoff(attempts: int) -> int | None:
    """Return the delay after this many failures; None if no further attempt is made."""
    return RETRY_PAUSES[attempts - 1] if attempts <= len(RETRY_PAUSES) else None


def queue_notification(
    notification: str, channel: str, agent: str, content: NotificationContent, description: str = ""
) -> Draft:
    """Queue a notification, which is sent after this draft is committed."""
    event = NotificationQueued(notification=notification, channel=channel, agent=agent, about=description)
    return Draft(event, content.body())


def make_notification_key(notification: str) -> RowKey:
    return (NotificationRow, notification)


def record_sent(notification: str, attempts: int) -> Write:
    """Record that a notification was sent. If two processes sent it, the second records nothing."""

    def decide(rows: Rows) -> list[Draft]:
        if not _is_waiting(rows.get(NotificationRow, notification)):
            return []
        return [Draft(NotificationSent(notification=notification, attempts=attempts))]

    return Write(OUTBOX, f"sent/{notification}", decide, [make_notification_key(notification)])


def record_send_failure(notification: str, attempts: int, error: str, *, may_retry: bool) -> Write:
    """Record a failure and the time of the next attempt. Of two concurrent failures, one counts."""
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
