"""Operations on the journal: verify, export, erase."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.journal import retention
from halter.journal.checkpoints import public_key_path, read_public_keys
from halter.journal.export import ExportLine, export_sessions
from halter.journal.rebuild import IntegrityReport, rebuild_tables
from halter.journal.retention import Erasure
from halter.journal.verify import verify_store
from halter.operations.actor import Actor, Confirmed, Name, Reason, Session, fail_invalid
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime
from halter_agents import VERSION

if TYPE_CHECKING:
    from halter.journal.engine import StoreView


from halter.journal.open import OlderCopy
from halter.operations.actor import (
    fail_conflict,
)
from halter.runtime.runtime import accept_missing_events, find_continuity

Progress = Callable[[int, int], None]
"""A callback with the number of streams done, and of all streams."""
Rebuild = Annotated[bool, Meta(description="Then rebuild all tables from the events, if the events are sound.")]
Children = Annotated[bool, Meta(description="Include all sub-sessions.")]
Age = Annotated[
    int, Meta(ge=0, le=36_500 * 86_400, description="Erase sessions that ended more than this many seconds ago.")
]
Sessions = Annotated[Sequence[Name], Meta(max_length=1000, description="Session ids.")]
Messages = Annotated[bool, Meta(description="Erase messages outside of sessions, and answered questions.")]


class VerifyResult(IntegrityReport, frozen=True, kw_only=True):
    """The findings of a verification, and whether the tables were rebuilt."""

    rebuilt: bool = False


async def verify(actor: Actor, *, rebuild: Rebuild = False, progress: Progress = lambda _, __: None) -> VerifyResult:
    """Verify the journal's hash chain and the tables.

    Finds events that were edited, deleted, moved or repeated, and tables that disagree with the events.
    """
    actor.require_role("admin", "verify the journal")
    actor.require_all_agents("verify the journal")
    app = actor.app
    trusted_keys = read_trusted_keys(app)
    report = await verify_store(app.store, app.settings.checkpoints, trusted_keys, progress)
    if not rebuild or any(finding.kind != "row" for finding in report.findings):
        return VerifyResult(**asdict(report))
    await rebuild_tables(app.store)
    return VerifyResult(
        **asdict(await verify_store(app.store, app.settings.checkpoints, trusted_keys, progress)), rebuilt=True
    )


def read_trusted_keys(app: Runtime) -> frozenset[str]:
    """Read the public key next to the signing key. Before the first checkpoint there is none."""
    try:
        path = public_key_path(app.settings.signing_key)
        return read_public_keys(path) if path.exists() else frozenset()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read the public key of {app.settings.signing_key} ({error}). Restore it there, or set "
            "HALTER_SIGNING_KEY to another signing key."
        ) from error


async def erase(
    actor: Actor,
    *,
    confirmed: Confirmed,
    sessions: Sessions = (),
    older_than_seconds: Age | None = None,
    messages: Messages = False,
    reason: Reason = "",
) -> Erasure:
    """Erase the bodies of ended sessions. The facts and their hash chain are kept."""
    actor.require_person("admin", "erase bodies")
    actor.require_all_agents("erase bodies")
    if (bool(sessions), older_than_seconds is not None, messages).count(True) != 1:
        fail_invalid("Give exactly one of sessions, older_than_seconds and messages.")
    if not confirmed:
        fail_invalid("Erasing cannot be undone. Confirm with `confirmed: true`.")
    store, by = actor.app.store, actor.principal.name
    if older_than_seconds is not None:
        return await retention.erase_older_than(store, older_than_seconds * SECOND, by, reason or "retention")
    if messages:
        return await retention.erase_messages(store, by, reason)
    return await retention.erase_session_bodies(store, sessions, by, reason)


async def sessions_below(actor: Actor, session: str) -> list[str]:
    """List the descendants of a session that the principal can see."""
    rows = await actor.app.store.ask(Query("children_of", SessionRow, {"session": session}))
    visible = [row.session for row in rows if actor.principal.can_see(row.agent)]
    return [name for each in visible for name in (each, *await sessions_below(actor, each))]


async def export(actor: Actor, session: Session, *, children: Children = False) -> AsyncGenerator[Any]:
    """Export a session's journal, inbox and receipt as JSON lines that anyone can verify."""
    root_id = (await actor.session(session)).session
    sessions = [root_id, *(await sessions_below(actor, root_id) if children else ())]
    now = actor.app.clock.now()
    for line in await actor.app.store.study(lambda view: _lines(view, sessions, now)):
        yield line


def _lines(view: "StoreView", sessions: Sequence[str], now: int) -> list[ExportLine]:
    return [line for line, _ in export_sessions(view, sessions, encode_receipt, version=VERSION, now=now)]


async def accept(actor: Actor, reason: str = "") -> OlderCopy:
    """Accept a store that lacks events its checkpoints know.

    The journal and the checkpoints record who accepted it and what is missing.
    """
    app, doubt = actor.app, actor.app.older_copy
    actor.require_person("admin", "accept a store with missing events")
    actor.require_all_agents("accept a store with missing events")
    if doubt is None:
        fail_conflict("The store has every event that its checkpoints know: there is nothing to accept.")
    commit_result = await app.store.commit(accept_missing_events(doubt, app.ids.make(), actor.principal.name, reason))
    # A store in doubt is opened without an observer, so that no checkpoint confirms it: checkpoints start here.
    app.checkpointer.accept(doubt.matching_seq_by_stream)
    app.checkpointer.on_commit(commit_result.events)
    continuity = find_continuity(app.settings)
    if continuity is not None:
        continuity.remember(app.checkpointer.store_id)
    return doubt
