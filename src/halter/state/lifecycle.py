"""The writes that begin, wake, rest and end a session. Each decides against locked rows and does nothing else."""

from collections.abc import Sequence

import msgspec

from halter.core import events as ev
from halter.core.errors import ConfigError
from halter.core.ids import Digest, StreamId, inbox_stream, is_inbox, may_decide, session_stream
from halter.core.money import UNITS, Account, BudgetRow, CapReached, Charge, Reserved, reserve, settle
from halter.core.ports import Draft, Lease, Query, Rows, Store, Stored, Write
from halter.core.project import BudgetKey, budget_key, budget_row, rows_of_hold
from halter.core.rows import DecisionRow, HoldRow, OutageRow, SessionRow
from halter.core.text import clean
from halter.core.vocabulary import Origin, RowKey, State, WakeCause
from halter.state.session import check_transition

ALWAYS_WAKING_CAUSES: frozenset[WakeCause] = frozenset(("message", "decision", "trigger", "child", "webhook", "timer"))
"""Causes that always wake a session; a signal wakes it only if the session named it."""


def start_session(
    event: ev.SessionStarted,
    task: bytes | None = None,
    blob: Digest | None = None,
    more: Sequence[Draft] = (),
    owner: Lease | None = None,
) -> Write:
    """Begin an independent session; a large task is stored as a blob first. `more` is written with the start.

    With an `owner` nothing lies between its start and its lease. Its worker must have sent a heartbeat: one that the
    store never heard of is found dead only after another worker has begun.
    """
    return make_start_write(event.session, draft_start(event, task, blob, more), owner)


def draft_start(
    event: ev.SessionStarted, task: bytes | None = None, blob: Digest | None = None, more: Sequence[Draft] = ()
) -> list[Draft]:
    _check_id(event.session)
    if event.format < ev.SESSION_FORMAT:
        event = msgspec.structs.replace(event, format=ev.SESSION_FORMAT)
    return [Draft(event, task, blob), *more]


def make_start_write(session: str, drafts: Sequence[Draft], owner: Lease | None = None) -> Write:
    return Write(session_stream(session), f"{session}/start", lambda _: drafts, takes=owner)


def foresee_start(start: Write, drafts: Sequence[Draft], at: int) -> tuple[Stored, ...]:
    """The events of a start as they will be stored, but for what only the store knows: their time, salt and hash."""
    events: list[Stored] = []
    for seq, draft in enumerate(drafts, 1):
        event, body, blob = draft.event, draft.body, draft.blob
        kind, version = event.KIND, event.VERSION
        events.append(
            Stored(start.stream, seq, kind, version, at, 0, start.key, blob, b"", body, None, b"", b"", event)
        )
    return tuple(events)


def _check_id(session: str) -> None:
    """Refuse an id whose stream would be the inbox of another session, or that no store keeps as it is."""
    if is_inbox(session_stream(session)) or clean(session) != session:
        raise ConfigError(
            f"{session!r} cannot be the id of a session: it must not hold NUL or lone surrogates, and "
            "must not end with /in."
        )


def start_child(
    event: ev.SessionStarted,
    parent: Lease | None = None,
    task: bytes | None = None,
    more: Sequence[Draft] = (),
    blob: Digest | None = None,
) -> Write:
    """Begin a sub-session whose cap is carved out of its parent's; without room there, nothing begins.

    A person may start one under a parent that no worker runs: that needs no lease.
    """
    event = msgspec.structs.replace(event, format=max(event.format, ev.SESSION_FORMAT), bound=True)
    stream = session_stream(event.session)

    def decide(rows: Rows) -> Sequence[Draft]:
        verdict = reserve([(leg, budget_row(rows, leg)) for leg in event.carved])
        match verdict:
            case Reserved():
                beginning = [Draft(event, task, blob), *more]
                return [msgspec.structs.replace(draft, stream=stream) for draft in beginning]
            case CapReached() if parent is not None:
                return [Draft(ev.CostCapReached.refusing(event.session, event.agent, verdict))]
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
    event: ev.WakePosted,
    body: bytes | None = None,
    blob: Digest | None = None,
    lease: Lease | None = None,
) -> Write:
    """Put something into a session's inbox; if the session does not exist or has ended, nothing is written.

    A signal wakes the session only if it named the signal. With an owner's `lease`, the write is refused once the lease
    is lost.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, session)
        if row is None or row.ended_at is not None:
            return []
        wakes = event.cause in ALWAYS_WAKING_CAUSES or event.name in row.wake_on.split()
        return [Draft(msgspec.structs.replace(event, wakes=wakes), body, blob)]

    return Write(inbox_stream(session), key, decide, lease=lease)


def answer_question(row: SessionRow, key: str, sender: str, body: bytes | None, blob: Digest | None) -> Write:
    """Answer what a session asked when `row` was read; if it was answered since, nothing is written."""
    posted = post_wake(row.session, key, make_message_event(sender), body, blob)

    def decide(rows: Rows) -> Sequence[Draft]:
        now = rows.get(SessionRow, row.session)
        if now is None or now.state != "WAITING_FOR_INPUT":
            return []
        return posted.decide(rows) if now.inbox_wake <= now.inbox_seen == row.inbox_seen else []

    return msgspec.structs.replace(posted, decide=decide)


def make_message_event(sender: str, origin: Origin = "person") -> ev.WakePosted:
    return ev.WakePosted(cause="message", origin=origin, sender=sender, trusted=True)


def post_message(session: str, key: str, text: bytes, sender: str, origin: Origin = "person") -> Write:
    return post_wake(session, key, make_message_event(sender, origin), text)


def wake_session(lease: Lease, key: str, cause: WakeCause | None, inbox_seen: int, *, recovered: bool = False) -> Write:
    """Resume a session; no cause means takeover from an owner that died. `recovered` ends its outage."""
    event = ev.SessionWoken(
        cause=cause or "takeover", inbox_seen=inbox_seen, format=ev.SESSION_FORMAT, recovered=recovered
    )

    def decide(rows: Rows) -> Sequence[Draft]:
        _check_state(rows, lease.session, "RUNNING")
        return [Draft(event)]

    reads = [(OutageRow, lease.session)] if recovered else ()
    return Write(lease.stream, key, decide, reads, lease)


def reopen_session(session: str, key: str, by: str) -> Write:
    """Reopen an ended session, keeping what it spent; a cancelled one stays ended.

    A sub-session stays ended: its carved budget has returned to its parent.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, session)
        if row is None or row.ended_at is None or row.state == "CANCELLED" or row.parent or not may_decide(by):
            return []
        return [Draft(ev.SessionResumed(by=by, format=ev.SESSION_FORMAT))]

    return Write(session_stream(session), key, decide)


def park_session(lease: Lease, key: str, event: ev.SessionParked, *, unless_news: bool = False) -> Write:
    """Park a session, unless a waking message arrived that it has not seen: then nothing is written.

    With `unless_news`, anything in its inbox that it has not seen keeps it from resting.
    """

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(SessionRow, lease.session)
        if row is not None and (row.inbox_head if unless_news else row.inbox_wake) > event.inbox_seen:
            return []
        _check_state(rows, lease.session, event.state)
        return [Draft(event)]

    reads = [(OutageRow, lease.session)] if event.trouble else ()
    return Write(lease.stream, key, decide, reads, lease)


def end_session(  # noqa: PLR0913 Each is one thing that an end settles.
    lease: Lease,
    state: State,
    terminal_reason: str,
    parent: str = "",
    inbox_seen: int | None = None,
    last_words: bytes | None = None,
    asked: Sequence[str] = (),
    *,
    wakes_parent: bool = True,
) -> Write:
    """End a session and settle the part of its parent's cap with what it really spent.

    Its holds must be settled first: ending never frees a hold in doubt. With `inbox_seen`, a session with newer waking
    messages is not ended. The parent is woken in the same commit, with the last words, and the questions that the
    session `asked` are withdrawn: nothing waits for an answer any more.
    """
    stream = lease.stream
    own = _list_own_budgets(stream)
    reads: list[RowKey] = [(HoldRow, lease.session), *own, *_list_decision_keys(asked)]
    others: tuple[StreamId, ...] = ()
    if parent:
        reads += _list_own_budgets(session_stream(parent))
        others = (inbox_stream(parent),)

    def decide(rows: Rows) -> Sequence[Draft]:
        usd, tokens = rows.find(own)
        if (usd is not None and usd.held) or (tokens is not None and tokens.held):
            return []
        row = rows.get(SessionRow, lease.session)
        if row is not None:
            if inbox_seen is not None and row.inbox_wake > inbox_seen:
                return []
            check_transition(lease.session, row.state, state)
        charge = _settle_carved(rows, lease.session, stream) if row is not None and row.parent else None
        ended = Draft(ev.SessionEnded(state=state, terminal_reason=terminal_reason, charge=charge))
        over = [Draft(ev.OverrunIncurred.by(lease.session, over)) for over in charge.overruns] if charge else ()
        gone = _withdraw_open(rows, asked, f"Session {lease.session} is over: {state}.") if asked else ()
        told = _notify_parent(rows, parent, lease.session, last_words) if parent and wakes_parent else ()
        return [*gone, *over, ended, *told]

    return Write(stream, f"{lease.session}/{lease.generation}/end", decide, reads, lease, others)


def _list_own_budgets(stream: StreamId) -> list[BudgetKey]:
    return [(BudgetRow, stream, "", unit) for unit in UNITS]


def _settle_carved(rows: Rows, session: str, stream: StreamId) -> Charge | None:
    """What a sub-session spent of the cap that was carved out for it."""
    hold = rows.get(HoldRow, session)
    if hold is None or not (carved := hold.taken()):
        return None
    usd, tokens = [budget_row(rows, Account(stream, "", unit)).spent for unit in UNITS]
    return settle(carved, usd, tokens, lambda leg: budget_row(rows, leg))


class _Question(msgspec.Struct, frozen=True):
    decision: str


async def read_questions(store: Store, session: str, now: int) -> Sequence[str]:
    """Return the decisions that a session asks for and no person has made."""
    rows = await store.ask(Query("questions_of", _Question, {"session": session, "now": now}))
    return sorted(row.decision for row in rows)


def withdraw_questions(lease: Lease, asked: Sequence[str], why: str) -> Write:
    """Withdraw questions of a session that goes on without their answers."""
    return Write(
        lease.stream,
        f"withdrawn/{asked[0]}",
        lambda rows: _withdraw_open(rows, asked, why),
        _list_decision_keys(asked),
        lease,
    )


def _withdraw_open(rows: Rows, asked: Sequence[str], why: str) -> list[Draft]:
    found = (rows.get(DecisionRow, decision) for decision in asked)
    return [Draft(ev.DecisionWithdrawn(decision=row.decision, why=why)) for row in found if row and not row.verdict]


def _list_decision_keys(asked: Sequence[str]) -> list[RowKey]:
    return [(DecisionRow, decision) for decision in asked]


def _notify_parent(rows: Rows, parent: str, child: str, words: bytes | None) -> Sequence[Draft]:
    """Post the end of a sub-session to its parent; an agent's words are not trusted as a person's."""
    row = rows.get(SessionRow, parent) if parent else None
    if row is None or row.ended_at is not None:
        return []
    event = ev.WakePosted(cause="child", origin="agent", sender=child, name=child)
    return [Draft(event, words, stream=inbox_stream(parent))]


def _check_state(rows: Rows, session: str, after: State) -> None:
    row = rows.get(SessionRow, session)
    if row is not None:
        check_transition(session, row.state, after)
