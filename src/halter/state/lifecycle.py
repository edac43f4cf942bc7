"""The writes that start, wake, park and end a session. Each is a pure decision on locked rows."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from halter.core.errors import ConfigError
from halter.core.events import (
    SESSION_FORMAT,
    CostCapReached,
    DecisionWithdrawn,
    HoldReleased,
    OverrunIncurred,
    SessionEnded,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    WakePosted,
)
from halter.core.ids import FLEET, Digest, StreamId, can_decide, inbox_stream, is_inbox, session_stream
from halter.core.money import UNITS, Account, BudgetRow, CapReached, Charge, Reserved, reserve, settle
from halter.core.ports import Draft, Lease, Query, Rows, Store, Stored, Write
from halter.core.project.holds import BudgetKey, budget_key, budget_row, rows_of_hold
from halter.core.rows import DecisionRow, HoldRow, OutageRow, SessionRow, decode_legs
from halter.core.text import clean
from halter.core.vocabulary import Origin, RowKey, State, WakeCause
from halter.state.session import check_transition
from halter.state.trace_context import add_traceparent

ALWAYS_WAKING_CAUSES: frozenset[WakeCause] = frozenset(("message", "decision", "trigger", "child", "webhook", "timer"))
"""The causes that always wake a session; a signal wakes it only if the session named the signal."""


def start_session(
    event: SessionStarted,
    task: bytes | None = None,
    blob: Digest | None = None,
    more_drafts: Sequence[Draft] = (),
    owner: Lease | None = None,
) -> Write:
    """Make the write that starts an independent session. A large task must be stored as a blob first.

    `more_drafts` are written with the start. With an `owner`, the session starts with that lease. The owner's worker
    must have sent a heartbeat: the store notices the death of an unknown worker only after another worker has started.
    """
    return make_start_write(event.session, draft_start(event, task, blob, more_drafts), owner)


def draft_start(
    event: SessionStarted, task: bytes | None = None, blob: Digest | None = None, more_drafts: Sequence[Draft] = ()
) -> list[Draft]:
    _check_id(event.session)
    if event.format < SESSION_FORMAT:
        event = msgspec.structs.replace(event, format=SESSION_FORMAT)
    return [Draft(add_traceparent(event), task, blob), *more_drafts]


def make_start_write(session: str, drafts: Sequence[Draft], owner: Lease | None = None) -> Write:
    return Write(session_stream(session), f"{session}/start", lambda _: drafts, new_lease=owner)


def foresee_start(start: Write, drafts: Sequence[Draft], at: int) -> tuple[Stored, ...]:
    """Predict the stored events of a start, except for the time, salt and hash, which only the store knows."""
    events: list[Stored] = []
    for seq, draft in enumerate(drafts, 1):
        event, body, blob = draft.event, draft.body, draft.blob
        kind, version = event.KIND, event.VERSION
        events.append(
            Stored(start.stream, seq, kind, version, at, 0, start.key, blob, b"", body, None, b"", b"", event)
        )
    return tuple(events)


def _check_id(session: str) -> None:
    """Reject an id whose stream would be the inbox of another session, or that a store would change."""
    if is_inbox(session_stream(session)) or clean(session) != session:
        raise ConfigError(
            f"Invalid session id {session!r}: it must not contain NUL or lone surrogates, and must not end with /in."
        )


def start_child(
    event: SessionStarted,
    parent: Lease | None = None,
    task: bytes | None = None,
    more_drafts: Sequence[Draft] = (),
    blob: Digest | None = None,
) -> Write:
    """Make the write that starts a sub-session, with a cap carved out of its parent's if that has enough left.

    A person may start a sub-session of a parent that no worker runs; this needs no `parent` lease.
    """
    event = msgspec.structs.replace(event, format=max(event.format, SESSION_FORMAT), bound=True)
    stream = session_stream(event.session)

    def decide(rows: Rows) -> Sequence[Draft]:
        verdict = reserve([(leg, budget_row(rows, leg)) for leg in event.carved])
        match verdict:
            case Reserved():
                drafts = [Draft(event, task, blob), *more_drafts]
                return [msgspec.structs.replace(draft, stream=stream) for draft in drafts]
            case CapReached() if parent is not None:
                return [Draft(CostCapReached.refusing(event.session, event.agent, verdict))]
            case _:
                return []

    return Write(
        stream if parent is None else session_stream(parent.session),
        f"{event.session}/start",
        decide,
        [
            *rows_of_hold(event.session, event.carved),
            *(budget_key(Account(stream, "", leg.unit)) for leg in event.carved),
        ],
        parent,
        () if parent is None else (stream,),
    )


def post_wake(
    session: str,
    key: str,
    event: WakePosted,
    body: bytes | None = None,
    blob: Digest | None = None,
    lease: Lease | None = None,
    files: Sequence[Draft] = (),
) -> Write:
    """Make the write that posts to a session's inbox. It writes nothing if the session does not exist or has ended.

    A signal wakes the session only if the session named it. With an owner's `lease`, the write fails if the lease is
    lost. The `files` of a message are before it.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, session)
        if row is None or row.ended_at is not None:
            return []
        wakes = event.cause in ALWAYS_WAKING_CAUSES or event.name in row.wake_on.split()
        return [*files, Draft(msgspec.structs.replace(event, wakes=wakes), body, blob)]

    return Write(inbox_stream(session), key, decide, lease=lease)


def answer_question(
    row: SessionRow,
    key: str,
    sender: str,
    body: bytes | None,
    blob: Digest | None,
    files: Sequence[Draft] = (),
) -> Write:
    """Make the write that answers the question of a session as of `row`. It writes nothing if it was answered since."""
    write = post_wake(row.session, key, make_message_event(sender), body, blob, files=files)

    def decide(rows: Rows) -> Sequence[Draft]:
        current = rows.get(SessionRow, row.session)
        if current is None or current.state != "WAITING_FOR_INPUT":
            return []
        return write.decide(rows) if current.inbox_wake <= current.inbox_seen == row.inbox_seen else []

    return msgspec.structs.replace(write, decide=decide)


def make_message_event(sender: str, origin: Origin = "person") -> WakePosted:
    return add_traceparent(WakePosted(cause="message", origin=origin, sender=sender, trusted=True))


def post_message(session: str, key: str, text: bytes, sender: str, origin: Origin = "person") -> Write:
    return post_wake(session, key, make_message_event(sender, origin), text)


def wake_session(lease: Lease, key: str, cause: WakeCause | None, inbox_seen: int, *, recovered: bool = False) -> Write:
    """Make the write that wakes a session. No `cause` means takeover from a dead owner; `recovered` ends an outage."""
    event = SessionWoken(cause=cause or "takeover", inbox_seen=inbox_seen, format=SESSION_FORMAT, recovered=recovered)

    def decide(rows: Rows) -> Sequence[Draft]:
        _check_state(rows, lease.session, "RUNNING")
        return [Draft(event)]

    reads = [(OutageRow, lease.session)] if recovered else ()
    return Write(lease.stream, key, decide, reads, lease)


def reopen_session(session: str, key: str, by: str) -> Write:
    """Make the write that reopens an ended session. Its costs still count; a cancelled session stays ended.

    A sub-session stays ended too, because its carved budget has returned to its parent.
    """
    event = add_traceparent(SessionResumed(by=by, format=SESSION_FORMAT))

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, session)
        if row is None or row.ended_at is None or row.state == "CANCELLED" or row.parent or not can_decide(by):
            return []
        return [Draft(event)]

    return Write(session_stream(session), key, decide)


def park_session(lease: Lease, key: str, event: SessionParked, *, require_empty_inbox: bool = False) -> Write:
    """Make the write that parks a session. It writes nothing if the inbox has an unseen waking message.

    With `require_empty_inbox`, any unseen message prevents parking.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, lease.session)
        if row is not None and (row.inbox_head if require_empty_inbox else row.inbox_wake) > event.inbox_seen:
            return []
        _check_state(rows, lease.session, event.state)
        return [Draft(event)]

    reads = [(OutageRow, lease.session)] if event.trouble else ()
    return Write(lease.stream, key, decide, reads, lease)


def end_session(  # noqa: PLR0913 Each parameter is one part of an end.
    lease: Lease,
    state: State,
    terminal_reason: str,
    parent: str = "",
    inbox_seen: int | None = None,
    final_text: bytes | None = None,
    asked: "Sequence[SessionQuestion]" = (),
    *,
    wakes_parent: bool = True,
) -> Write:
    """Make the write that ends a session, and settles its part of the parent's cap with the true cost.

    Its holds must be settled first: an end never frees a hold in doubt. With `inbox_seen`, a session with newer waking
    messages is not ended. The same commit posts `final_text` to the parent, withdraws the pending questions of
    `asked`, and releases what they hold.
    """
    stream = lease.stream
    budget_keys = _list_own_budgets(stream)
    reads: list[RowKey] = [(HoldRow, lease.session), *budget_keys, *_list_question_keys(asked)]
    others: tuple[StreamId, ...] = ()
    if parent:
        reads += _list_own_budgets(session_stream(parent))
        others = (inbox_stream(parent),)

    def decide(rows: Rows) -> Sequence[Draft]:
        question_holds = _find_question_holds(rows, asked) if asked else ()
        if any(
            budget is not None and budget.held > _sum_held(question_holds, budget) for budget in rows.find(budget_keys)
        ):
            return []
        row = rows.get(SessionRow, lease.session)
        if row is not None:
            if inbox_seen is not None and row.inbox_wake > inbox_seen:
                return []
            check_transition(lease.session, row.state, state)
        charge = _settle_carved(rows, lease.session, stream) if row is not None and row.parent else None
        end = Draft(SessionEnded(state=state, terminal_reason=terminal_reason, charge=charge))
        overruns = [Draft(OverrunIncurred.by(lease.session, overrun)) for overrun in charge.overruns] if charge else ()
        withdrawals = _withdraw_open(rows, asked, f"Session {lease.session} has ended: {state}.") if asked else ()
        wake = _notify_parent(rows, parent, lease.session, final_text) if parent and wakes_parent else ()
        return [*withdrawals, *draft_releases(question_holds), *overruns, end, *wake]

    return Write(stream, f"{lease.session}/{lease.generation}/end", decide, reads, lease, others)


def _list_own_budgets(stream: StreamId) -> list[BudgetKey]:
    return [(BudgetRow, stream, "", unit) for unit in UNITS]


def _settle_carved(rows: Rows, session: str, stream: StreamId) -> Charge | None:
    """Compute the charge of a sub-session for the cap that was carved out for it."""
    hold = rows.get(HoldRow, session)
    if hold is None or not (carved_legs := hold.decode_legs()):
        return None
    usd, tokens = [budget_row(rows, Account(stream, "", unit)).spent for unit in UNITS]
    return settle(carved_legs, usd, tokens, lambda leg: budget_row(rows, leg))


class SessionQuestion(msgspec.Struct, frozen=True):
    """A question of a session that is pending, or still holds the money of `legs`."""

    decision: str
    legs: bytes | None = None


async def read_questions(store: Store, session: str, now: int) -> Sequence[SessionQuestion]:
    """Return the pending decisions of a session, and those that still hold money."""
    rows = await store.ask(Query("questions_of", SessionQuestion, {"session": session, "now": now}))
    return sorted(rows, key=attrgetter("decision"))


def withdraw_questions(lease: Lease, questions: Sequence[SessionQuestion], reason: str) -> Write:
    """Make the write that withdraws questions of a session that continues without their answers."""

    def decide(rows: Rows) -> Sequence[Draft]:
        return [*_withdraw_open(rows, questions, reason), *draft_releases(_find_question_holds(rows, questions))]

    return Write(lease.stream, f"withdrawn/{questions[0].decision}", decide, _list_question_keys(questions), lease)


def _withdraw_open(rows: Rows, questions: Sequence[SessionQuestion], reason: str) -> list[Draft]:
    decision_rows = (rows.get(DecisionRow, question.decision) for question in questions)
    return [
        Draft(DecisionWithdrawn(decision=row.decision, why=reason))
        for row in decision_rows
        if row and not row.verdict and rows.now < row.expires_at
    ]


def _list_question_keys(questions: Sequence[SessionQuestion]) -> list[RowKey]:
    keys: list[RowKey] = [(DecisionRow, question.decision) for question in questions]
    for question in questions:
        if question.legs:
            keys += rows_of_hold(question.decision, decode_legs(question.legs))
    return keys


def _find_question_holds(rows: Rows, questions: Sequence[SessionQuestion]) -> Sequence[HoldRow]:
    holds = (rows.get(HoldRow, question.decision) for question in questions if question.legs)
    return [hold for hold in holds if hold is not None]


def draft_releases(holds: Iterable[HoldRow]) -> list[Draft]:
    """Draft the release of what questions hold."""
    return [Draft(HoldReleased(hold=hold.hold)) for hold in holds]


def release_expired(hold: HoldRow) -> Write:
    """Make the write that releases what an expired question holds: its call will not be made.

    Its session does so when it next runs, which may be never.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        decision = rows.get(DecisionRow, hold.hold)
        is_expired = decision is not None and decision.expires_at <= rows.now
        return draft_releases(filter(None, [rows.get(HoldRow, hold.hold)])) if is_expired else []

    reads = [(DecisionRow, hold.hold), *rows_of_hold(hold.hold, hold.decode_legs())]
    return Write(FLEET, f"released/{hold.hold}", decide, reads)


def _sum_held(holds: Sequence[HoldRow], budget: BudgetRow) -> int:
    legs = (leg for hold in holds for leg in hold.decode_legs())
    return sum(leg.amount for leg in legs if budget_key(leg) == budget.key())


def _notify_parent(rows: Rows, parent: str, child: str, text: bytes | None) -> Sequence[Draft]:
    """Post the end of a sub-session to its parent. An agent's text is not trusted like a person's."""
    row = rows.get(SessionRow, parent) if parent else None
    if row is None or row.ended_at is not None:
        return []
    event = WakePosted(cause="child", origin="agent", sender=child, name=child)
    return [Draft(event, text, stream=inbox_stream(parent))]


def _check_state(rows: Rows, session: str, target: State) -> None:
    row = rows.get(SessionRow, session)
    if row is not None:
        check_transition(session, row.state, target)
