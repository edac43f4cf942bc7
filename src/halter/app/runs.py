"""The writes by which a trigger comes to be, starts a session, or says why it does not.

Each is one commit: a session that was started stands in its trigger's stream as well, and never twice.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import PurePosixPath

import msgspec

from halter.app.agent_context import AgentContext
from halter.app.talking import beginning
from halter.app.triggered import made_of
from halter.core.events import (
    FORMAT,
    AnyEvent,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
    WakePosted,
)
from halter.core.ids import inbox_stream, session_stream, trigger_stream
from halter.core.ports import Draft, Rows, Write, kept
from halter.core.schedules import Timing
from halter.core.task_project import rows_of_event
from halter.core.task_rows import ItemRow, TriggerRow
from halter.core.tasks import AnyTrigger, Schedule, TriggerType, Watch
from halter.core.text import to_body
from halter.work.playbooks import Task, written

FROM_FILE = "agent.yaml"
"""By whom a trigger was made that stands in an agent's file."""


def kind_of(trigger: AnyTrigger) -> TriggerType:
    """Tell what kind of trigger it is."""
    if isinstance(trigger, Schedule):
        return "schedule"
    return "watch" if isinstance(trigger, Watch) else "webhook"


def digest_of(trigger: AnyTrigger) -> str:
    """Name what is said of a trigger."""
    return sha256(made_of(trigger)).hexdigest()


def make(
    identity: str, agent: str, trigger: AnyTrigger, by: str, timing: Timing | None = None, before: int = 0
) -> Write:
    """Let a trigger be, or be another one; `before` is where it was made last."""
    body = made_of(trigger, timing)
    event = TriggerMade(trigger=identity, agent=agent, type=kind_of(trigger), by=by, digest=digest_of(trigger))

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, identity)
        return [Draft(event, body)] if (0 if row is None else row.made_seq) == before else []

    return Write(trigger_stream(identity), f"{identity}/made/{before}", decide, [(TriggerRow, (identity,))])


def end(row: TriggerRow, by: str, reason: str = "") -> Write:
    """Let a trigger start nothing any more."""
    event = TriggerEnded(trigger=row.trigger, by=by, reason=reason)

    def decide(rows: Rows) -> Sequence[Draft]:
        now = rows.get(TriggerRow, row.trigger)
        return [Draft(event)] if now is not None and now.ended_at is None else []

    key = f"{row.trigger}/ended/{row.made_seq}"
    return Write(trigger_stream(row.trigger), key, decide, [(TriggerRow, (row.trigger,))])


def tell(trigger: str, key: str, *events: AnyEvent) -> Write:
    """Write down what became of a trigger's times and documents."""
    rows = [row for event in events for row in rows_of_event(event)]
    return Write(trigger_stream(trigger), f"{trigger}/{key}", lambda _: [Draft(event) for event in events], rows)


def pass_by(key: str, event: RunSkipped | RunQueued) -> Write:
    """Write down that a time starts nothing, or not yet; nothing of a time that another process has dealt with."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        return [Draft(event)] if row is not None and _is_open(row, event.due_at) else []

    return Write(trigger_stream(event.trigger), f"{event.trigger}/{key}", decide, rows_of_event(event))


def _is_open(row: TriggerRow, due_at: int) -> bool:
    """Tell whether it is still to be decided what becomes of a time."""
    return due_at > row.ticked_at or due_at == row.queued_at


def delay(event: RunsDelayed, now: int) -> Write:
    """Write down why a trigger's runs wait, unless that is what was said last."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(TriggerRow, event.trigger)
        same = row is not None and (row.delayed, row.delayed_until) == (event.sentence, event.until)
        return [] if same else [Draft(event)]

    key = f"{event.trigger}/delay/{now}"
    return Write(trigger_stream(event.trigger), key, decide, rows_of_event(event))


class Given(msgspec.Struct, frozen=True):
    """What a session is given beside its trigger's own words: where it comes from cannot be trusted."""

    text: str
    sender: str
    cause: str = "trigger"


async def start(
    speaking: AgentContext,
    row: TriggerRow,
    trigger: AnyTrigger,
    run: RunStarted,
    key: str,
    given: Given | None = None,
    before: str | None = None,
) -> Write:
    """Start a run: what is written down of it, and its session, in one commit; nothing if another run came first.

    `before` is the newest session of its document, where that must not have changed.
    """
    session = f"{row.agent}.{trigger.name}-{row.runs + 1}"
    event, more = await beginning(speaking, "task", session)
    event = msgspec.structs.replace(
        event,
        trigger=row.trigger,
        started_by=run.by or f"trigger:{row.trigger}",
        origin="person" if run.by else "config",
        format=FORMAT,
    )
    run = msgspec.structs.replace(run, session=session)
    redact = speaking.gatehouse().redacted
    task = await kept(speaking.store, _task(speaking, trigger, redact(trigger.prompt)))
    stream, inbox = session_stream(session), inbox_stream(session)
    words = [] if given is None else [await _words(speaking, given, redact(given.text))]

    def decide(rows: Rows) -> Sequence[Draft]:
        now = rows.get(TriggerRow, row.trigger)
        item = rows.get(ItemRow, row.trigger, run.item) if before is not None else None
        if now is None or now.ended_at is not None or now.runs != row.runs:
            return []
        if item is not None and item.session != before:
            return []
        if run.cause == "schedule" and not _is_open(now, run.due_at):
            return []
        session_drafts = [Draft(event, *task), *more]
        return [
            Draft(run),
            *(msgspec.structs.replace(draft, stream=stream) for draft in session_drafts),
            *(msgspec.structs.replace(draft, stream=inbox) for draft in words),
        ]

    reads = [*rows_of_event(run), (TriggerRow, (row.trigger,))]
    return Write(trigger_stream(row.trigger), f"{row.trigger}/{key}", decide, reads, others=(stream, inbox))


def _task(speaking: AgentContext, trigger: AnyTrigger, prompt: str) -> bytes:
    if isinstance(trigger.playbook, str):
        return written(Task(speaking.agent.playbooks[PurePosixPath(trigger.playbook).stem], trigger.inputs))
    return to_body(prompt)


async def _words(speaking: AgentContext, given: Given, text: str) -> Draft:
    cause = "webhook" if given.cause == "webhook" else "trigger"
    event = WakePosted(cause=cause, origin="document", sender=given.sender)
    return Draft(event, *await kept(speaking.store, to_body(text)))
