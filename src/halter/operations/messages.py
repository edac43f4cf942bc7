"""Messages to sessions, and answers to their questions."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from halter.core.errors import ConfigError
from halter.core.ids import Digest
from halter.core.ports import Draft, offload_body
from halter.core.text import clean, encode_body
from halter.core.tools import File
from halter.operations.actor import (
    MAX_MESSAGE_CHARACTERS,
    Actor,
    Done,
    Session,
    Text,
    fail_conflict,
    fail_invalid,
)
from halter.redaction.redact import Redactor
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.document_index import draft_files, read_message_files
from halter.runtime.needs import describe_continuation, read_open_questions
from halter.state import lifecycle

Files = Annotated[
    tuple[File, ...],
    Meta(
        max_length=20,
        description="Files that come with the message: `data` in base64, `media_type` as in `image/png`, and `name`.",
    ),
]


async def send_message(actor: Actor, session: Session, text: Text, files: Files = ()) -> Done:
    """Send a message to a session.

    The session wakes and reads it in its next turn.
    """
    actor.require_person("operator", "send a message to a session")
    row = await actor.session(session)
    if row.ended_at is not None:
        fail_conflict(
            f"Session {row.session} has ended ({row.state}: {row.terminal_reason}). Start a new one with `halter chat`."
        )
    body, blob = await _store_text(actor, text)
    continuation = await describe_continuation(actor.app.store, row.session, actor.app.clock.now())
    event, drafts = lifecycle.make_message_event(actor.principal.name), await _draft_files(actor, files)
    key = actor.app.ids.make()
    await actor.app.store.commit(lifecycle.post_wake(row.session, key, event, body, blob, files=drafts))
    return Done(row.session, f"Message sent to {row.session}. {continuation}")


async def _draft_files(actor: Actor, files: Sequence[File]) -> tuple[Draft, ...]:
    if not files:
        return ()

    try:
        message = await read_message_files(files)
    except ConfigError as error:
        fail_invalid(str(error))
    return await draft_files(actor.app.store, message, make_redactor(actor).redact)


async def answer(actor: Actor, session: Session, text: Text, files: Files = ()) -> Done:
    """Answer the question that a session asks."""
    question = (await read_open_questions(actor.app.store)).get(session)
    call = "" if question is None else question.call
    return await answer_question(actor, session, call, text, actor.app.ids.make(), files)


async def answer_question(
    actor: Actor, session: str, call: str, text: str, key: str, files: Sequence[File] = ()
) -> Done:
    """Answer the question that a call of a session asked, but no later question. A key answers once."""
    actor.require_person("operator", "answer a session")
    row = await actor.session(session)
    question = (await read_open_questions(actor.app.store)).get(row.session)
    if question is None or question.call != call:
        fail_conflict("This question was already answered or withdrawn.")
    body, blob = await _store_text(actor, text)
    continuation = await describe_continuation(actor.app.store, row.session, actor.app.clock.now())
    drafts = await _draft_files(actor, files)
    write = lifecycle.answer_question(row, key, actor.principal.name, body, blob, drafts)
    if not (await actor.app.store.commit(write)).events:
        fail_conflict("This question was already answered.")
    return Done(row.session, f"Answer sent to {row.agent}, session {row.session}. {continuation}")


async def _store_text(actor: Actor, text: str) -> tuple[bytes | None, Digest | None]:
    if not text.strip() or len(text) > MAX_MESSAGE_CHARACTERS:
        fail_invalid(f"A message needs 1 to {MAX_MESSAGE_CHARACTERS:,} characters.")
    return await offload_body(actor.app.store, encode_body(make_redactor(actor).redact(clean(text))))


def make_redactor(actor: Actor) -> Redactor:
    secrets = read_environment_secrets(actor.app.environ)
    return Redactor({name: secrets.value(name) for name in secrets.names()}, actor.app.environ)
