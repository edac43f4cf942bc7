"""Findings and proposals, and a person's verdict on them: accepted, dismissed, or promoted to AGENTS.md."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from halter.config.agent_files import read_agent
from halter.core.errors import ConfigError
from halter.core.events import ProposalDecided
from halter.core.events.tasks import ProposalKind, ProposalVerdict, describe_verdict
from halter.core.ids import FLEET, Digest, can_decide
from halter.core.ports import Draft, Query, Rows, Store, Write, load_body
from halter.core.project import rows_of_event
from halter.core.text import LAST_CHARACTER, decode_body
from halter.guard import approvals
from halter.operations.actor import MAX_NAMES_LISTED, Actor, Done, Limit, Name, Reason, fail_conflict, readable
from halter.runtime.runtime import Runtime
from halter.runtime.session_verbs import FindingBodyRow

MAX_ARTIFACTS: Final = 1000
DEFAULT_ARTIFACT_LIMIT: Final = 50
CONTEXT_FILE: Final = "AGENTS.md"
HEADING: Final = "## Learned from earlier sessions"


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A finding or a proposal with its text; `status` is a person's verdict, if there is one."""

    id: str
    about: ProposalKind
    agent: str
    session: str
    at: int
    text: str
    status: str = ""
    by: str = ""
    severity: str = ""
    support: str = ""
    review: str = ""
    observed_count: int = 1


class _Memory(msgspec.Struct, frozen=True):
    memory: str
    agent: str
    session: str
    proposed_at: int
    status: str
    by: str
    body: bytes | None
    blob: Digest | None


class _Precedent(msgspec.Struct, frozen=True):
    precedent: str
    agent: str
    kind: str
    session: str
    last_at: int
    observed_count: int
    status: str
    by: str
    body: bytes | None
    blob: Digest | None


class _Finding(FindingBodyRow, frozen=True, kw_only=True):
    session: str
    agent: str
    emitted_at: int
    status: str
    by: str


async def read_proposals(store: Store) -> Sequence[Artifact]:
    memories = await store.ask(Query("memories_said", _Memory, {"limit": MAX_ARTIFACTS}))
    precedents = await store.ask(Query("precedents_said", _Precedent, {"limit": MAX_ARTIFACTS}))
    artifacts = [
        _artifact(row, id=row.memory, about="memory", at=row.proposed_at, text=await _read_words(store, row))
        for row in memories
    ] + [
        _artifact(
            row,
            id=row.precedent,
            about="precedent",
            at=row.last_at,
            text=f"{row.kind}: {await _read_words(store, row)}",
            observed_count=row.observed_count,
        )
        for row in precedents
    ]
    return sorted(artifacts, key=lambda artifact: (-artifact.at, artifact.id))


def _artifact(row: _Memory | _Precedent | _Finding, **facts: Any) -> Artifact:
    return Artifact(agent=row.agent, session=row.session, status=row.status, by=row.by, **facts)


async def read_findings(store: Store, agent: str = "", limit: int = DEFAULT_ARTIFACT_LIMIT) -> Sequence[Artifact]:
    rows = await store.ask(Query("findings_said", _Finding, {"agent": agent, "limit": limit}))
    return [await _finding(store, row) for row in rows]


async def read_session_findings(store: Store, session: str) -> Sequence[Artifact]:
    rows = await store.ask(Query("findings_of", _Finding, {"session": session}))
    return [await _finding(store, row) for row in reversed(rows)]


async def find_findings_by_prefix(store: Store, prefix: str, limit: int) -> Sequence[Artifact]:
    params = {"from": prefix, "to": f"{prefix}{LAST_CHARACTER}", "limit": limit}
    return [await _finding(store, row) for row in await store.ask(Query("finding_named", _Finding, params))]


async def _finding(store: Store, row: _Finding) -> Artifact:
    if row.blob is not None:
        row = msgspec.structs.replace(row, body=await load_body(store, row.body, row.blob), blob=None)
    facts = {"severity": row.severity, "support": row.support, "review": row.review}
    return _artifact(row, id=row.finding, about="finding", at=row.emitted_at, text=row.text(), **facts)


async def _read_words(store: Store, row: _Memory | _Precedent) -> str:
    body = await load_body(store, row.body, row.blob)
    return "(erased)" if body is None else decode_body(body)


async def settle_artifact(
    app: Runtime, artifact: Artifact, status: ProposalVerdict, reason: str = "", by: str = ""
) -> bool:
    """Record a person's verdict. It also answers an open decision about the artifact."""
    by, key = by or app.settings.person, app.ids.make()
    for decision in await approvals.list_pending_decisions(app.store):
        if decision.decision == f"proposal/{artifact.id}" and decision.expires_at > app.clock.now():
            write = approvals.answer_decision(
                decision, "deny" if status == "dismissed" else "approve", by, app.ids.make(), reason
            )
            is_answered = bool((await app.store.commit(write)).events)
            if status != "promoted" or not is_answered:
                return is_answered
    event = ProposalDecided(proposal=artifact.id, about=artifact.about, status=status, by=by, reason=reason)

    def decide(_: Rows) -> Sequence[Draft]:
        return [Draft(event)] if can_decide(by) else []

    return bool((await app.store.commit(Write(FLEET, key, decide, rows_of_event(event)))).events)


def render_context_file(folder: Path, artifact: Artifact) -> str:
    """Render the context file of the agent with the artifact added. A file that already has it is unchanged."""
    agent = read_agent(folder).spec.name
    if agent != artifact.agent:
        raise ConfigError(
            f"{artifact.id} is a {artifact.about} of {artifact.agent}, but {folder} is the folder of {agent}."
        )
    path = folder / CONTEXT_FILE
    old_text = path.read_text("utf-8") if path.exists() else ""
    if f"({artifact.id})" in old_text:
        return old_text
    line = f"- {' '.join(artifact.text.split())} ({artifact.id})"
    if HEADING in old_text.splitlines():
        return _insert_below_heading(old_text, line)
    return f"{old_text.rstrip()}\n\n{HEADING}\n\n{line}\n".lstrip()


def _insert_below_heading(text: str, line: str) -> str:
    lines = text.splitlines()
    start = lines.index(HEADING) + 1
    end = next((at for at in range(start, len(lines)) if lines[at].startswith("#")), len(lines))
    while end > start and not lines[end - 1].strip():
        end -= 1
    return "\n".join([*lines[:end], line, *lines[end:]]) + "\n"


def write_context(folder: Path, text: str) -> None:
    """Replace the context file atomically."""
    path = folder / CONTEXT_FILE
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{CONTEXT_FILE}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


ArtifactGroup = Literal["findings", "proposals"]
ArtifactName = Annotated[Name, Meta(description="Id.", extra={"metavar": "ID", "typed": "Id or prefix."})]
Verdict = Annotated[Literal["kept", "dismissed"], Meta(description="The verdict; `kept` accepts it.")]
SessionFilter = Annotated[
    Name, Meta(description="Only those of this session.", extra={"metavar": "SESSION", "argument": True})
]


async def findings(
    actor: Actor, session: SessionFilter = "", limit: Limit = DEFAULT_ARTIFACT_LIMIT
) -> Sequence[Artifact]:
    """List findings, the newest first."""
    store = actor.app.store
    if session and actor.short_ids:
        session = (await actor.session(session)).session
    if session:
        artifacts = await read_session_findings(store, session)
    else:
        artifacts = [
            artifact for name in actor.principal.agents or ("",) for artifact in await read_findings(store, name, limit)
        ]
    visible = [artifact for artifact in artifacts if actor.principal.can_see(artifact.agent)]
    return sorted(visible, key=lambda artifact: artifact.at, reverse=True)[:limit]


async def proposals(actor: Actor) -> Sequence[Artifact]:
    """List proposed memories and precedents, the newest first."""
    return [artifact for artifact in await read_proposals(actor.app.store) if actor.principal.can_see(artifact.agent)]


async def resolve_artifact(actor: Actor, query: str, kind: ArtifactGroup) -> Artifact:
    """Find the finding or proposal that an id names."""
    if kind == "findings":
        matches = await find_findings_by_prefix(actor.app.store, readable(query, "id"), MAX_NAMES_LISTED + 1)
        candidates: Sequence[Artifact] = [artifact for artifact in matches if actor.principal.can_see(artifact.agent)]
    else:
        candidates = await proposals(actor)
    return actor.resolve(
        [(artifact.id, artifact) for artifact in candidates], query, kind.removesuffix("s"), f"halter {kind}"
    )


class ArtifactSettled(Done, frozen=True):
    """The verdict on a finding or a proposal."""

    status: str


async def settle(
    actor: Actor, query: str, status: ProposalVerdict, among: ArtifactGroup, reason: str = ""
) -> ArtifactSettled:
    actor.require_person("approver", "settle findings and proposals")
    artifact = await resolve_artifact(actor, query, among)
    if not await settle_artifact(actor.app, artifact, status, reason, by=actor.principal.name):
        fail_conflict(f"{artifact.id} was settled by another person in the meantime.")
    return ArtifactSettled(artifact.id, f"{artifact.id} is {describe_verdict(status)}.", status)


async def settle_finding(actor: Actor, finding: ArtifactName, status: Verdict, reason: Reason = "") -> ArtifactSettled:
    """Accept or dismiss a finding."""
    return await settle(actor, finding, status, "findings", reason)


async def settle_proposal(
    actor: Actor, proposal: ArtifactName, status: Verdict, reason: Reason = ""
) -> ArtifactSettled:
    """Accept or dismiss a proposal."""
    return await settle(actor, proposal, status, "proposals", reason)


async def promote_into(actor: Actor, artifact: Artifact, folder: Path, reason: str) -> ArtifactSettled:
    """Add a proposal to the AGENTS.md of a folder, and settle it."""
    write_context(folder, render_context_file(folder, artifact))
    await settle_artifact(actor.app, artifact, "promoted", reason, by=actor.principal.name)
    sentence = f"Added {artifact.id} to {folder}/AGENTS.md. Every session of the agent reads it."
    return ArtifactSettled(artifact.id, sentence, "promoted")
