"""Forks: a new session with the messages of another one."""

from typing import Annotated

from msgspec import Meta

from halter.core.errors import ConfigError
from halter.core.text import clean, format_count
from halter.operations.actor import (
    CLEANED,
    MAX_MESSAGE_CHARACTERS,
    MAX_SAFE_INTEGER,
    Actor,
    Done,
    Session,
    fail_conflict,
)
from halter.operations.messages import make_redactor
from halter.runtime.session_start import begin_fork, read_fork

ForkPoint = Annotated[
    int,
    Meta(
        ge=1, le=MAX_SAFE_INTEGER, description="The last event to copy (default: the newest).", extra={"metavar": "SEQ"}
    ),
]
FirstMessage = Annotated[
    str,
    Meta(
        max_length=MAX_MESSAGE_CHARACTERS,
        description="The first message to the new session.",
        extra={CLEANED: True, "argument": True, "metavar": "MESSAGE"},
    ),
]


class SessionForked(Done, frozen=True):
    """A new session with the messages of another one, up to an event."""

    session: str
    at: int
    messages: int


async def fork(actor: Actor, session: Session, at: ForkPoint | None = None, text: FirstMessage = "") -> SessionForked:
    """Create a session from the messages of another one, up to one of its events.

    It has its own budget. Spending, approvals and grants are not inherited; untrusted content stays marked.
    """
    actor.require_person("operator", "fork a session")
    row = await actor.session(session)

    try:
        source = await read_fork(actor.app.store, row, at)
        new_session = await begin_fork(
            actor.app, source, clean(text), actor.principal.name, make_redactor(actor).redact
        )
    except ConfigError as error:
        fail_conflict(str(error))
    sentence = (
        f"Created {new_session} from {row.session} at event {source.history.through} "
        f"({format_count(len(source.messages), 'message')}). It has its own budget. "
        f"Run it with: halter run FOLDER --resume {new_session}{actor.option}"
    )
    return SessionForked(new_session, sentence, row.session, source.history.through, len(source.messages))
