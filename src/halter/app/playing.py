"""Playing a playbook from beginning to end, in this process; another one can go on with it at any time."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from halter.app.agent import Assembled
from halter.app.agent_context import PATIENCE, AgentContext, gatehouse_for, keep_policy
from halter.app.attending import granted, standing_of
from halter.app.opened import App
from halter.app.talking import row_of
from halter.app.tasking import Tasking
from halter.app.triggered import beginnings_of, read_made, trigger_row
from halter.brain.session_runtime import SessionRuntime, Waits
from halter.core.errors import ConfigError
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, new_worker, session_stream
from halter.core.playbook import Playbook
from halter.core.ports import Lease, kept, said
from halter.core.rows import SessionRow
from halter.core.text import from_body, listed
from halter.dispatch.tending import taken, tended
from halter.state import life
from halter.work.playbooks import Ended, Task, Tell, read, walk, written


async def begin(app: App, agent: Assembled, playbook: Playbook, inputs: Mapping[str, Any]) -> SessionId:
    """Start a session that will walk through a playbook."""
    missing = [name for name in playbook.inputs if name not in inputs]
    if missing:
        raise ConfigError(f"{playbook.file} needs {listed(missing)}: give it as --input {missing[0]}=VALUE.")
    unknown = [name for name in playbook.tools if name not in agent.tools]
    if unknown:
        raise ConfigError(
            f"{playbook.file} calls {listed(unknown)}, which {agent.policy.name} does not have; "
            f"its tools are {listed(sorted(agent.tools)) or 'none'}."
        )
    task = written(Task(playbook, inputs))
    redact = gatehouse_for(app, agent.policy, agent.secrets).redacted
    if from_body(task) != redact(from_body(task)):
        raise ConfigError(
            f"{playbook.file}, or an input, holds a secret in plain text: write ${{secret:NAME}} instead."
        )
    session = SessionId(app.ids.new())
    event = SessionStarted(
        session=session,
        agent=agent.policy.name,
        kind="task",
        started_by=app.settings.person,
        definition=await keep_policy(app.store, agent.policy, redact),
    )
    await app.store.commit(life.start(event, *await kept(app.store, task)))
    return session


async def plays(speaking: AgentContext, row: SessionRow) -> bool:
    """Tell whether a session that was triggered walks through a playbook."""
    if not row.trigger:
        return False
    found = await trigger_row(speaking.store, row.trigger)
    made = None if found is None else await read_made(speaking.store, found)
    return made is not None and made.trigger().playbook is not UNSET


async def go_on_with(speaking: AgentContext, lease: Lease) -> Ended:
    """Take a playbook's session from where it stands to its end, in the hands of whoever has its lease."""
    agent, app, store = speaking.agent, speaking.app, speaking.store
    task = await _task(app, agent, lease.session)
    row = await row_of(speaking, lease.session)
    began = await beginnings_of(speaking, row)
    tasking = Tasking(speaking, row, began.trigger, began.documents)
    tools = {**agent.tools, **{verb.spec.name: verb for verb in tasking.verbs()}}
    standing = standing_of(speaking, row, granted(agent.policy.phases[0], (), began.grants), began)
    running = SessionRuntime(store, app.clock, speaking.gatehouse(), lease, standing, tools)
    tasking.running = running
    return await walk(running, store, task)


async def go_on(app: App, agent: Assembled, session: SessionId, tell: Tell, waits: Waits = lambda _, __: None) -> Ended:
    """Take a playbook's session from where it stands to its end; `waits` hears when a person has to decide."""
    task = await _task(app, agent, session)
    worker = new_worker("play", app.ids)
    async with tended(app.store, app.clock, worker, pulse=app.pulse):
        lease = await taken(app.store, app.clock, worker, session, PATIENCE)
        if lease is None:
            raise ConfigError(f"Session {session} is over, or another process works on it: look at halter sessions.")
        store, gatehouse = app.patient(), gatehouse_for(app, agent.policy, agent.secrets)
        running = SessionRuntime(store, app.clock, gatehouse, lease, agent.standing(session), agent.tools, waits)
        return await walk(running, store, task, tell)


async def _task(app: App, agent: Assembled, session: SessionId) -> Task:
    """Read what a session was given; only this agent's own playbooks can be gone on with here."""
    found = await app.store.read(session_stream(session), limit=1)
    if not found or not isinstance(found[0].event, SessionStarted):
        raise ConfigError(f"There is no session {session}: look at halter sessions.")
    if found[0].event.agent != agent.policy.name:
        raise ConfigError(f"Session {session} is one of {found[0].event.agent}, and this is {agent.policy.name}.")
    try:
        return read(await said(app.store, found[0]))
    except msgspec.DecodeError:
        raise ConfigError(f"Session {session} does not walk through a playbook, or its words were erased.") from None
