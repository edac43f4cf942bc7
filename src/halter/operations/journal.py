"""The whole journal: verify, export, erase."""

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
Rebuild = Annotated[bool, Meta(description="Then rebuild all tables from the events, if these are sound.")]
Children = Annotated[bool, Meta(description="Include all sub-sessions.")]
Confirmed = Annotated[bool, Meta(description="Must be true: this cannot be undone.")]
Age = Annotated[int, Meta(ge=0, le=36_500 * 86_400, description="Sessions that ended that many seconds ago.")]
Sessions = Annotated[Sequence[Name], Meta(max_length=1000, description="The sessions, by their ids.")]
Messages = Annotated[bool, Meta(description="Messages outside of sessions, and answered questions.")]


class Verified(IntegrityReport, frozen=True, kw_only=True):
    """What verifying found, and whether the tables were rebuilt."""

    rebuilt: bool = False


async def verify(desk: Desk, *, rebuild: Rebuild = False, progress: Progress = lambda _, __: None) -> Verified:
    """Find events that were edited, deleted, moved or repeated, and tables that disagree with the events."""
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
    """Read the public key beside the signing key; before the first checkpoint there is none."""
    try:
        path = public_key_path(app.settings.signing_key)
        return read_public_keys(path) if path.exists() else frozenset()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The public key beside {app.settings.signing_key} cannot be read ({error}): put it back there, or name "
            "another signing key with HALTER_SIGNING_KEY."
        ) from error


async def erase(
    desk: Desk,
    *,
    confirmed: Confirmed,
    sessions: Sessions = (),
    older_than_seconds: Age | None = None,
    messages: Messages = False,
    reason: Reason = "",
) -> Erasure:
    """Erase the bodies of sessions that have ended, for good. The facts and their chain stay."""
    desk.demand("admin", "erase anything")
    desk.demand_all("erase anything")
    if (bool(sessions), older_than_seconds is not None, messages).count(True) != 1:
        wrong("Name either sessions, an age (older_than_seconds) or messages.")
    if not confirmed:
        wrong("This cannot be undone: confirm it with `confirmed: true`.")
    store, by = desk.app.store, desk.who.name
    if older_than_seconds is not None:
        return await retention.erase_older_than(store, older_than_seconds * SECOND, by, reason or "retention")
    if messages:
        return await retention.erase_messages(store, by, reason)
    return await retention.erase_session_bodies(store, sessions, by, reason)


async def sessions_below(desk: Desk, session: str) -> list[str]:
    """Find all descendants of a session that they may see."""
    rows = await desk.app.store.ask(Query("children_of", SessionRow, {"session": session}))
    seen = [row.session for row in rows if desk.who.sees(row.agent)]
    return [name for each in seen for name in (each, *await sessions_below(desk, each))]


async def export(desk: Desk, session: Session, *, children: Children = False) -> AsyncGenerator[Any]:
    """Export a session's journal, with its inbox and receipt, as JSON lines that anyone can check."""
    whole = (await desk.session(session)).session
    sessions = [whole, *(await sessions_below(desk, whole) if children else ())]
    now = desk.app.clock.now()
    for line in await desk.app.store.study(lambda view: _lines(view, sessions, now)):
        yield line


def _lines(view: "StoreView", sessions: Sequence[str], now: int) -> "list[ExportLine]":
    from halter.journal.export import export_sessions as lines_of
    from halter.runtime.proof import encode_receipt

    return [line for line, _ in lines_of(view, sessions, encode_receipt, version=__version__, now=now)]
