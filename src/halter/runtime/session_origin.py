"""What a session comes from: a person, a trigger, a predecessor or a parent, and what follows from it."""

import msgspec

from halter.core.agent_spec import AnyTrigger
from halter.core.events import SessionStarted
from halter.core.ids import Digest, session_stream
from halter.core.money import Caps, ScopedCap
from halter.core.ports import Query, Store, Stored
from halter.core.rows import ItemRow, SessionRow
from halter.core.vocabulary import ActionLimit
from halter.runtime.agent_context import NO_RUN_SETTINGS, AgentContext, RunSettings
from halter.runtime.trigger_records import find_trigger_row, read_trigger_record
from halter.tasks.retrieve import DocumentRef


class SessionOrigin(msgspec.Struct, frozen=True):
    """The cause of a session, and what follows from it. It is empty if a person started the session.

    `carved_cap` is the cap of a sub-session, and `follows` the session that this one continues. `asker_caps` are the
    caps of the agents and triggers for which a sub-session works: its spending also counts against them.
    """

    trigger: AnyTrigger | None = None
    documents: tuple[DocumentRef, ...] = ()
    grants: tuple[str, ...] | None = None
    carved_cap: int | None = None
    salt: str = ""
    follows: str = ""
    caller_caps: tuple[ScopedCap, ...] = ()
    action_limits: tuple[ActionLimit, ...] = ()
    run: RunSettings = NO_RUN_SETTINGS
    is_asked: bool = False
    """True for a sub-session that a call of its parent started and waits for."""


async def find_session_origin(context: AgentContext, row: SessionRow, events: tuple[Stored, ...] = ()) -> SessionOrigin:
    """Return the origin of a session. `events` are its first events, if the caller has them.

    The hash of the first event salts the placeholders that hide personal data from models, because the event's own
    salts never leave the store.
    """
    first = events[0] if events else (await context.store.read(session_stream(row.session), 0, 1))[0]
    follows = first.event.follows if isinstance(first.event, SessionStarted) else ""
    if not row.parent and not row.trigger:
        return SessionOrigin(salt=first.hash.hex(), follows=follows, run=RunSettings.of(first.event))
    origin = await _read_origin(context.store, row, first)
    return msgspec.structs.replace(origin, salt=first.hash.hex(), follows=follows)


async def _read_origin(store: Store, row: SessionRow, first: Stored) -> SessionOrigin:
    if row.parent:
        if not isinstance(first.event, SessionStarted):
            return SessionOrigin(grants=())
        carved_amounts = [leg.amount for leg in first.event.carved if leg.unit == "usd"]
        askers = await _find_asker_caps(store, row.parent)
        return SessionOrigin(
            grants=first.event.grants,
            carved_cap=min(carved_amounts, default=None),
            caller_caps=askers,
            action_limits=first.event.action_limits,
            is_asked=first.event.origin == "agent",
        )
    trigger_row = await find_trigger_row(store, row.trigger)
    record = None if trigger_row is None else await read_trigger_record(store, trigger_row)
    items = await store.ask(Query("items_of_session", ItemRow, {"session": row.session}))
    name = row.trigger.partition("/")[2]
    documents = tuple(DocumentRef(item.name, name, item.item, item.seen_at, item.size) for item in items)
    return SessionOrigin(None if record is None else record.trigger(), documents)


class _StoredPolicy(msgspec.Struct, frozen=True):
    caps: Caps = Caps()


class _StoredDefinition(msgspec.Struct, frozen=True):
    """The caps in a stored definition."""

    policy: _StoredPolicy = _StoredPolicy()


async def _find_asker_caps(store: Store, parent: str) -> tuple[ScopedCap, ...]:
    """Return the window caps of all agents and triggers above a sub-session, by scope.

    A definition that is not stored counts with the default caps.
    """
    asker_caps: list[ScopedCap] = []
    while parent:
        row = next(iter(await store.ask(Query("session", SessionRow, {"session": parent}))), None)
        if row is None:
            break
        try:
            caps = msgspec.json.decode(await store.get(Digest(row.definition)), type=_StoredDefinition).policy.caps
        except (KeyError, ValueError, msgspec.MsgspecError):
            caps = Caps()
        asker_caps += [(f"agent:{row.agent}", cap) for cap in caps.agent]
        if row.trigger:
            (first,) = await store.read(session_stream(row.session), 0, 1)
            trigger = (await _read_origin(store, row, first)).trigger
            asker_caps += [(f"trigger:{row.trigger}", cap) for cap in (() if trigger is None else trigger.caps())]
        parent = row.parent
    return tuple(asker_caps)
