"""A trigger run by a person, at once: the same path that its time, a document or a delivery takes."""

from pathlib import Path

from halter.app import runs
from halter.app.agent_context import AgentContext
from halter.app.living import Living
from halter.app.runs import Given
from halter.app.shelves import Library
from halter.app.triggered import read_made, trigger_row
from halter.app.triggers import Triggers
from halter.core.errors import ConfigError
from halter.core.events import ItemSeen, RunStarted
from halter.core.folders import Seen
from halter.core.ids import SessionId
from halter.core.task_rows import TriggerRow
from halter.core.tasks import AnyTrigger, Schedule, Watch, Webhook, trigger_id

LONGEST = 256 * 1024


async def run_now(speaking: AgentContext, folder: Path, name: str, file: Path | None) -> SessionId:
    """Start a run of a trigger; for a watch about a document, for a webhook with a file's text as its delivery."""
    store, agent = speaking.store, speaking.agent.policy.name
    await Triggers(speaking, folder, lambda _, __: None).settle()
    row = await trigger_row(store, trigger_id(agent, name))
    made = None if row is None or row.ended_at is not None else await read_made(store, row)
    if row is None or made is None:
        raise ConfigError(f"{agent} has no trigger {name}: look at halter schedules {agent}.")
    trigger = made.trigger()
    item, given = await _given(speaking, folder, row, trigger, file)
    person = speaking.app.settings.person
    run = RunStarted(trigger=row.trigger, session="", cause="person", item=item, by=person)
    write = await runs.start(speaking, row, trigger, run, f"person/{speaking.app.ids.new()}", given)
    for stored in (await store.commit(write)).events:
        if isinstance(stored.event, RunStarted):
            return SessionId(stored.event.session)
    raise ConfigError(f"Another run of {name} was started at this very moment: look at halter sessions.")


async def attended_here(speaking: AgentContext, folder: Path, session: SessionId) -> bool:
    """Take a run to its next rest or its end in this process; False where another one has taken it already."""
    for lease in await speaking.store.claim(speaking.worker, 1, session):
        await Living(speaking, folder).attend(lease)
        return True
    return False


async def _given(
    speaking: AgentContext, folder: Path, row: TriggerRow, trigger: AnyTrigger, file: Path | None
) -> tuple[str, Given | None]:
    match trigger:
        case Schedule():
            if file is not None:
                raise ConfigError(f"{trigger.name} is a schedule, which runs without a file.")
            return "", None
        case Watch():
            if file is None:
                raise ConfigError(f"{trigger.name} is a watch, which runs for a document: name its file.")
            return await _document(speaking, folder, row, file), Given(f"The document is {file.name}.", row.trigger)
        case Webhook():
            text = "" if file is None else _text(file)
            return "", Given(text, speaking.app.settings.person, "webhook") if text else None


async def _document(speaking: AgentContext, folder: Path, row: TriggerRow, file: Path) -> str:
    """Take a document in. The watch itself starts nothing for it: that was done by hand."""
    library = speaking.agent.library or Library(speaking.store, folder)
    place, seen = _seen(file)
    known = await library.take(place, seen, file.name)
    if known.problem or not known.document:
        raise ConfigError(known.problem or f"{file} cannot be read.")
    event = ItemSeen(trigger=row.trigger, item=known.document, name=file.name, size=seen.size, ignored=True)
    await speaking.store.commit(runs.tell(row.trigger, f"seen/{known.document}", event))
    return known.document


def _seen(file: Path) -> tuple[Path, Seen]:
    try:
        found = file.stat()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    return file.resolve(), Seen(found.st_size, found.st_mtime_ns, found.st_ino)


def _text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(LONGEST)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
