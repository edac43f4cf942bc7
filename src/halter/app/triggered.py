"""What a session was begun by: its trigger as it is now, its documents, and what it may use at most."""

import msgspec

from halter.app.agent_context import AgentContext
from halter.core.events import SessionStarted
from halter.core.ids import session_stream, trigger_stream
from halter.core.ports import Query, Store, Stored, said
from halter.core.rows import SessionRow
from halter.core.schedules import Timing
from halter.core.task_rows import ItemRow, TriggerRow
from halter.core.tasks import AnyTrigger, Schedule, TriggerType, Watch, Webhook
from halter.work.retrieve import Shelved


class Made(msgspec.Struct, frozen=True):
    """A trigger as the journal keeps it: what was said of it, and when it fires if it is a schedule."""

    type: TriggerType
    spec: msgspec.Raw
    timing: Timing | None = None

    def trigger(self) -> AnyTrigger:
        """Read what was said of it."""
        kinds: dict[TriggerType, type[AnyTrigger]] = {"schedule": Schedule, "watch": Watch, "webhook": Webhook}
        return msgspec.json.decode(self.spec, type=kinds[self.type])


def made_of(trigger: AnyTrigger, timing: Timing | None = None) -> bytes:
    """Write a trigger down."""
    match trigger:
        case Schedule():
            kind: TriggerType = "schedule"
        case Watch():
            kind = "watch"
        case Webhook():
            kind = "webhook"
    return msgspec.json.encode(Made(kind, msgspec.Raw(msgspec.json.encode(trigger)), timing))


async def read_made(store: Store, row: TriggerRow) -> Made | None:
    """Read a trigger as it was made last; None where that was erased."""
    (stored,) = await store.read(trigger_stream(row.trigger), row.made_seq - 1, 1)
    body = await said(store, stored)
    return msgspec.json.decode(body, type=Made) if body else None


async def trigger_row(store: Store, trigger: str) -> TriggerRow | None:
    """Find a trigger."""
    return next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": trigger}))), None)


class Beginnings(msgspec.Struct, frozen=True):
    """What a session was begun by. A sub-session has `carved` as its own cap, if something was carved out for it.

    `follows` names the session that came before one that began by itself.
    """

    trigger: AnyTrigger | None = None
    documents: tuple[Shelved, ...] = ()
    grants: tuple[str, ...] | None = None
    carved: int | None = None
    salt: str = ""
    follows: str = ""


async def beginnings_of(speaking: AgentContext, row: SessionRow) -> Beginnings:
    """Find out what a session was begun by; nothing in particular, if a person began it.

    The hash of its first event salts what is hidden from models: it is made of salts that never leave the store.
    """
    store = speaking.store
    (first,) = await store.read(session_stream(row.session), 0, 1)
    follows = first.event.follows if isinstance(first.event, SessionStarted) else ""
    return msgspec.structs.replace(await _begun_by(store, row, first), salt=first.hash.hex(), follows=follows)


async def _begun_by(store: Store, row: SessionRow, first: Stored) -> Beginnings:
    if row.parent:
        return _of_a_part(first)
    if not row.trigger:
        return Beginnings()
    found = await trigger_row(store, row.trigger)
    made = None if found is None else await read_made(store, found)
    return Beginnings(None if made is None else made.trigger(), await _documents(store, row))


async def _documents(store: Store, row: SessionRow) -> tuple[Shelved, ...]:
    items = await store.ask(Query("items_of_session", ItemRow, {"session": row.session}))
    name = row.trigger.partition("/")[2]
    return tuple(Shelved(item.name, name, item.item, item.seen_at, item.size) for item in items)


def _of_a_part(first: Stored) -> Beginnings:
    if not isinstance(first.event, SessionStarted):
        return Beginnings(grants=())
    carved = [leg.amount for leg in first.event.carved if leg.unit == "usd"]
    return Beginnings(grants=first.event.grants, carved=min(carved, default=None))
