"""The journal as a whole: verified, exported and erased."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from halter import __version__
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.journal import retention
from halter.journal.checkpoints import public_key_path, read_public_keys
from halter.journal.rebuild import IntegrityReport
from halter.journal.rebuild import rebuild as rebuild_tables
from halter.journal.retention import Erasure
from halter.journal.verify import verify as verify_store
from halter.operations.desk import Desk, Name, Reason, Session, wrong
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.journal.engine import StoreView
    from halter.journal.export import ExportLine

Progress = Callable[[int, int], None]
"""Hears how many streams are done, of how many."""
Rebuild = Annotated[bool, Meta(description="Afterwards make all tables anew from the events, if those are sound.")]
Children = Annotated[bool, Meta(description="With its sub-sessions, and theirs.")]
Confirmed = Annotated[bool, Meta(description="true, if you know what is done: it cannot be undone.")]
Age = Annotated[int, Meta(ge=0, le=36_500 * 86_400, description="Sessions that ended so many seconds ago.")]
Sessions = Annotated[Sequence[Name], Meta(max_length=1000, description="The sessions, by their ids.")]
Messages = Annotated[bool, Meta(description="What was said outside of sessions, and questions that are answered.")]


class Verified(IntegrityReport, frozen=True, kw_only=True):
    """What verifying a journal found, and whether its tables were made anew."""

    rebuilt: bool = False


async def verify(desk: Desk, *, rebuild: Rebuild = False, progress: Progress = lambda _, __: None) -> Verified:
    """Look for any event that was edited, deleted, moved or repeated, and for tables that disagree with the events."""
    desk.demand_role("admin", "verify the journal")
    desk.demand_all("verify the journal")
    app = desk.app
    trusted = trusted_keys(app)
    report = await verify_store(app.store, app.settings.checkpoints, trusted, progress)
    if not rebuild or any(found.kind != "row" for found in report.findings):
        return Verified(**asdict(report))
    await rebuild_tables(app.store)
    return Verified(**asdict(await verify_store(app.store, app.settings.checkpoints, trusted, progress)), rebuilt=True)


def trusted_keys(app: Runtime) -> frozenset[str]:
    """Trust the key beside the signing key; before the first checkpoint there is none."""
    try:
        path = public_key_path(app.settings.signing_key)
        return read_public_keys(path) if path.exists() else frozenset()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The public key beside {app.settings.signing_key} cannot be read ({error}): put it back there, or name "
            "another signing key with HALTER_SIGNING_KEY."
        ) from error


async def erase(
    desk: Desk, *, sessions: Sequence[str] = (), older_than: int | None = None, messages: bool = False, reason: str = ""
) -> Erasure:
    """Erase what was said in sessions that have ended, for good. What happened, and its chain, stay."""
    desk.demand_role("admin", "erase anything")
    desk.demand_all("erase anything")
    store, by = desk.app.store, desk.who.name
    if older_than is not None:
        return await retention.erase_older_than(store, older_than, by, reason or "retention")
    if messages:
        return await retention.erase_messages(store, by, reason)
    return await retention.erase_session_bodies(store, sessions, by, reason)


async def erase_confirmed(
    desk: Desk,
    *,
    confirmed: Confirmed,
    sessions: Sessions = (),
    older_than_seconds: Age | None = None,
    messages: Messages = False,
    reason: Reason = "",
) -> Erasure:
    """Erase what was said in sessions that have ended, for good."""
    desk.demand("admin", "erase anything")
    desk.demand_all("erase anything")
    if (bool(sessions), older_than_seconds is not None, messages).count(True) != 1:
        wrong("Name either sessions, an age (older_than_seconds) or messages.")
    if not confirmed:
        wrong("This cannot be undone: confirm it with `confirmed: true`.")
    older_than = None if older_than_seconds is None else older_than_seconds * SECOND
    return await erase(desk, sessions=sessions, older_than=older_than, messages=messages, reason=reason)


async def sessions_below(desk: Desk, session: str) -> list[str]:
    """Find all sub-sessions of a session that are theirs to see, and those below them."""
    rows = await desk.app.store.ask(Query("children_of", SessionRow, {"session": session}))
    seen = [row.session for row in rows if desk.who.sees(row.agent)]
    return [name for each in seen for name in (each, *await sessions_below(desk, each))]


async def export(desk: Desk, session: Session, *, children: Children = False) -> AsyncGenerator[Any]:
    """Export a session's journal, with its inbox and its receipt, as JSON lines that anyone can check."""
    whole = (await desk.session(session)).session
    sessions = [whole, *(await sessions_below(desk, whole) if children else ())]
    now = desk.app.clock.now()
    for line in await desk.app.store.study(lambda view: _lines(view, sessions, now)):
        yield line


def _lines(view: "StoreView", sessions: Sequence[str], now: int) -> "list[ExportLine]":
    from halter.journal.export import export_sessions as lines_of
    from halter.runtime.proof import encode_receipt

    return [line for line, _ in lines_of(view, sessions, encode_receipt, version=__version__, now=now)]
