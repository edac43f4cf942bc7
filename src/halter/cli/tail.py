"""`halter tail`: what happens, while it happens."""

from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from halter.app import App
from halter.app.follow import Follower, growing, heads
from halter.app.objects import as_object
from halter.app.words.told import told
from halter.cli.answer import answer_line, say
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, fail, with_app
from halter.cli.named import session_meant
from halter.core.clock import SECOND
from halter.core.ids import FLEET, StreamId, inbox_stream, is_inbox, session_of, session_stream
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow

NEWEST: Final = 10
"""How much of what was is shown before what comes."""

_SHORT: Final = 13
"""So much of an id tells sessions apart, and is understood by every command."""


def tail(
    stream: Annotated[
        str, typer.Argument(metavar="[SESSION]", help="A session, its inbox as SESSION/in, or fleet; else everything.")
    ] = "",
    *,
    after: Annotated[
        int | None,
        typer.Option("--after", metavar="SEQ", min=0, max=2**62, help="Go on after this event of that one stream."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show events as they are committed, the newest last, until you interrupt it or the session is over.

    A session begins with its newest ten events, or with those after SEQ; everything begins with what comes from now on.
    In JSON each line is an event.
    """
    if after is not None and not stream:
        fail("--after counts the events of one stream: name a session, SESSION/in or fleet.", WRONG_USE)

    async def job(app: App) -> None:
        follower, session = await _following(app, stream, after)
        async with aclosing(growing(app.store, app.clock)) as changes:
            async for change in changes:
                over = session != "" and await _is_over(app, session)
                _show(await (follower.all_new() if over else follower.all_new(change)), as_json=as_json)
                if over:
                    return

    with_app(store, job, following=True, despite_doubt=True)


async def _following(app: App, stream: str, after: int | None) -> tuple[Follower, str]:
    """Find out what to follow and from where; and the session whose end is the end of it, if it is about one."""
    if not stream:
        return Follower(app.store, dict(await heads(app.store))), ""
    streams, session = await _streams(app, stream)
    if after is not None:
        only = streams[:1]
        return Follower(app.store, {only[0]: after}, only), session
    lengths = dict(await heads(app.store))
    return Follower(app.store, {one: max(0, lengths.get(one, 0) - NEWEST) for one in streams}, streams), session


async def _streams(app: App, stream: str) -> tuple[list[StreamId], str]:
    if stream == FLEET:
        return [FLEET], ""
    beginning = stream.removesuffix("/in").removeprefix("session:")
    session = (await session_meant(app, beginning)).session
    inbox = inbox_stream(session)
    return ([inbox], "") if stream.endswith("/in") else ([session_stream(session), inbox], session)


async def _is_over(app: App, session: str) -> bool:
    (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
    return row.ended_at is not None


def _show(events: Sequence[Stored], *, as_json: bool) -> None:
    for stored in events:
        if as_json:
            answer_line(as_object(stored))
        else:
            say(line(stored), at_once=True)


def line(stored: Stored) -> str:
    """Write an event on one line: when, where, and what matters in it."""
    at = datetime.fromtimestamp(stored.at / SECOND, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    session = session_of(stored.stream)
    where = (session or stored.stream.removeprefix("trigger:"))[:_SHORT] + ("/in" if is_inbox(stored.stream) else "")
    return f"{at} {where:<{_SHORT + 3}} {stored.seq:>4} {stored.kind:<17} {told(stored.event)}".rstrip()
