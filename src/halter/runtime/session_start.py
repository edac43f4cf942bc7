"""Starts, resumes, forks and reopens an agent's sessions; posts messages, builds handovers and runs playbooks."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec import UNSET

from halter.autonomy.upkeep import ExhaustedSession
from halter.config.run_limits import NO_RUN_SETTINGS, RunSettings
from halter.core.codec import decode
from halter.core.errors import ConfigError
from halter.core.events import ContextGiven, CostCapReached, HistoryGiven, PhaseEntered, SessionStarted, TurnEnded
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.core.messages import Message
from halter.core.money import Leg, Spender, format_exact_micros, list_accounts
from halter.core.ports import Draft, Lease, Query, Store, offload_body, read_body, read_stream
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import decode_body, encode_body, join_names
from halter.core.vocabulary import SessionKind, State
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.guard.halts import run_shielded
from halter.guard.ledger import read_budget
from halter.loop.final_text import find_final_text
from halter.loop.observer import NO_OBSERVER, LoopObserver
from halter.loop.session_runtime import SessionRuntime
from halter.loop.session_waits import WaitListener
from halter.loop.transcript_reader import has_denial, number_calls, read_past
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.prompt_masker import mask_message
from halter.runtime.agent_runtime import LEASE_WAIT_TIMEOUT, AgentRuntime, make_guard, store_policy
from halter.runtime.assembly.unattended_tools import list_playbook_flaws
from halter.runtime.document_index import draft_files
from halter.runtime.needs import read_agent_health
from halter.runtime.runtime import Runtime
from halter.runtime.session_builder import build_session_context, find_autonomous_session, grant_phase_tools
from halter.runtime.session_origin import (
    build_session_beginning,
    find_session_origin,
    read_accepted_context,
    read_files,
    read_session_row,
)
from halter.runtime.session_runner import NewSession, attend_session, mark_nested
from halter.runtime.session_verbs import TaskTools
from halter.runtime.sub_sessions import begin_sub_session, explain_insufficient_cap, open_delegate
from halter.spec.playbook import Playbook
from halter.state import lifecycle
from halter.state.trigger_records import find_trigger_row, read_trigger_record
from halter.tasks.conversation import Conclusion, build_result
from halter.tasks.playbooks import PlaybookOutcome, StepListener, Task, decode_task, encode_task, walk_playbook
from halter.tasks.result import CompletedResult, StoppedResult

if TYPE_CHECKING:
    from halter.core.tools import File

CONTINUE_FROM_HERE: Final = "Continue from here."
EMPTY_MESSAGE: Final = "The message is empty. Write what the agent should do."


class Fork(msgspec.Struct, frozen=True):
    """The start event and history of a session that is forked from another one."""

    first: SessionStarted
    history: HistoryGiven
    messages: tuple[Message, ...]
    phase: PhaseEntered | None = None

    async def draft(self, store: Store) -> Draft:
        return Draft(self.history, *await offload_body(store, msgspec.json.encode(self.messages)))


async def read_fork(store: Store, row: SessionRow, at: int | None = None) -> Fork:
    """Read the messages of a session up to an event; without one, up to its newest.

    A fork inherits neither budget nor approvals. A step that is incomplete at that event is left out.
    """
    if row.parent:
        raise ConfigError(
            f"Session {row.session} is a sub-session, with a part of the budget and the tools of {row.parent}. Fork "
            f"{row.parent} instead."
        )
    events = await read_stream(store, session_stream(row.session))
    head = events[-1].seq
    if at is not None and not 0 < at <= head:
        raise ConfigError(f"Session {row.session} has no event {at}: its events are 1 to {head}.")
    past = await read_past(row.session, [stored for stored in events if stored.seq <= (at or head)], store)
    if past.has_erased_text:
        raise ConfigError(f"Session {row.session} cannot be forked: its messages were erased, in whole or in part.")
    start_event = events[0].event
    if not past.messages or not isinstance(start_event, SessionStarted):
        raise ConfigError(f"Session {row.session} has no messages up to its event {at or head}.")
    history = HistoryGiven(messages=len(past.messages), session=row.session, through=at or head, denied=past.has_denial)
    phases = [stored.event for stored in events if isinstance(stored.event, PhaseEntered) and not stored.event.number]
    return Fork(start_event, history, number_calls(past.messages), next(iter(phases), None))


async def begin_fork(  # noqa: PLR0913 Each is an independent option.
    app: Runtime,
    fork: Fork,
    text: str,
    by: str,
    redact: Callable[[str], str],
    *,
    session: str = "",
    definition: str = "",
    run: RunSettings = NO_RUN_SETTINGS,
) -> SessionId:
    """Start a session with another session's history; without a `definition`, with that session's definition.

    It has its own budget and starts in the first phase. An autonomous session is continued as a chat.
    """
    session = SessionId(session or app.ids.make())
    kind: SessionKind = "task" if fork.first.kind == "task" else "chat"
    event = SessionStarted(
        session=session,
        agent=fork.first.agent,
        kind=kind,
        started_by=by,
        definition=definition or fork.first.definition,
        folder=fork.first.folder,
    )
    event = run.record(event)
    drafts = [await fork.draft(app.store), *([Draft(fork.phase)] if kind == "task" and fork.phase else [])]
    _, _, accepted_text = accepted_context = await read_accepted_context(app.store, event.agent)
    if accepted_text:
        context_event = ContextGiven(memories=accepted_context[0], precedents=accepted_context[1])
        drafts.append(Draft(context_event, *await offload_body(app.store, encode_body(accepted_text))))
    opening = text if text.strip() or kind == "chat" else CONTINUE_FROM_HERE
    body = encode_body(redact(opening))
    await app.store.commit(lifecycle.start_session(event, *await offload_body(app.store, body), drafts))
    return session


class Predecessor(msgspec.Struct, frozen=True):
    """The session that an autonomous session follows, and why."""

    session: str
    because: str


async def begin_session(
    agent: AgentRuntime,
    text: str,
    kind: SessionKind,
    session: str = "",
    before: Predecessor | None = None,
    history: Sequence[Message] = (),
) -> SessionId:
    """Start a session that another process or a later call runs: see `open_session`."""
    return (await open_session(agent, text, kind, session, before, history)).session


async def open_session(
    agent: AgentRuntime,
    text: str,
    kind: SessionKind,
    session: str = "",
    predecessor: Predecessor | None = None,
    history: Sequence[Message] = (),
    *,
    takes_lease: bool = False,
) -> NewSession:
    """Start a session; `text` opens its first turn. Starting the same session again changes nothing.

    The handover from a `predecessor` was written by a model, so it is not trusted. A `history` comes from a program.
    With `takes_lease`, the caller gets the lease with the start, unless it passes an id: another call with the same id
    may be running the session. The start of a task is then not committed here but with its first step, before which no
    effect runs.
    """
    if kind == "task" and not text.strip():
        raise ConfigError(EMPTY_MESSAGE)
    store = agent.store
    event, extra_drafts = await build_session_beginning(agent, kind, session or agent.app.ids.make())
    if predecessor is not None:
        event = msgspec.structs.replace(
            event, follows=predecessor.session, because=predecessor.because, origin="model", trusted=False
        )
    redact = agent.guard().redact
    if history:
        messages = tuple(mask_message(message, redact) for message in number_calls(history))
        stored_history = await offload_body(store, msgspec.json.encode(messages))
        extra_drafts = [
            Draft(HistoryGiven(messages=len(messages), denied=has_denial(messages)), *stored_history),
            *extra_drafts,
        ]
    body = encode_body(redact(text))
    session_id = SessionId(event.session)
    lease = Lease(session_id, agent.worker, 1) if takes_lease and not session else None
    drafts = lifecycle.draft_start(event, *await offload_body(store, body), extra_drafts)
    start = lifecycle.make_start_write(session_id, drafts, lease)
    # Two cases need the start committed now: a chat is passed on below, and anonymization is salted with the hash of
    # the first event.
    if lease is not None and kind == "task" and agent.definition.tasks.anonymize is None:
        return NewSession(session_id, lifecycle.foresee_start(start, drafts, agent.app.clock.now()), lease, start)
    try:
        committed = await store.commit(start)
    except asyncio.CancelledError:
        if lease is not None:
            await run_shielded(store.release(lease))
        raise
    if committed.is_repeated and lease is None:
        await _require_same_run(agent, session_id)
        return NewSession(session_id)
    if kind == "chat":
        await _pass_on(agent, session_id, text)
    # No other call knows a new id: a repeated write means that only its reply was lost.
    return NewSession(session_id, committed.events, lease)


async def _require_same_run(agent: AgentRuntime, session: str) -> None:
    """Raise ConfigError if a session, unless it has ended, has started with another model or other limits."""
    row = await read_session_row(agent, session)
    (first,) = await agent.store.read(session_stream(session), 0, 1)
    if row.ended_at is None and RunSettings.of(first.event) != agent.run:
        raise ConfigError(
            f"Session {session} has started with another model or other limits, and keeps them. Pass the same `model` "
            "and `limits`, or another `id`."
        )


async def post_message(agent: AgentRuntime, session: str, text: str, files: "Sequence[File | str | Path]" = ()) -> None:
    """Post a message with its files to a session."""
    if not text.strip():
        raise ConfigError(EMPTY_MESSAGE)
    app, store, redact = agent.app, agent.store, agent.guard().redact
    drafts = await draft_files(store, await read_files(agent, files), redact) if files else ()
    body, blob = await offload_body(store, encode_body(redact(text)))
    event = lifecycle.make_message_event(app.settings.person)
    await store.commit(lifecycle.post_wake(session, app.ids.make(), event, body, blob, files=drafts))
    if (await read_session_row(agent, session)).kind == "chat":
        await _pass_on(agent, session, text)


async def _pass_on(agent: AgentRuntime, chat: str, text: str) -> None:
    """Wake the agent's autonomous session and show it a message that a person wrote in a chat."""
    autonomous = await find_autonomous_session(agent)
    if autonomous is None or autonomous.ended_at is not None or not text.strip():
        return
    app, store = agent.app, agent.store
    event = msgspec.structs.replace(lifecycle.make_message_event(app.settings.person), notifies=True, name="message")
    sentence = agent.guard().redact(f"{app.settings.person} says in the chat {chat}: {text}")
    body, blob = await offload_body(store, encode_body(sentence))
    await store.commit(lifecycle.post_wake(autonomous.session, app.ids.make(), event, body, blob))


async def reopen_agent_session(agent: AgentRuntime, session: str) -> None:
    """Reopen a session that has ended. A cancelled one stays cancelled."""
    row = await read_session_row(agent, session)
    if newer := explain_newer_format(row):
        raise ConfigError(newer)
    if row.ended_at is None:
        return
    app = agent.app
    committed = await agent.store.commit(lifecycle.reopen_session(session, app.ids.make(), app.settings.person))
    if not committed.events:
        raise ConfigError(f"Session {session} has ended ({row.state}: {row.terminal_reason}) and cannot be reopened.")


async def is_session_near_budget(agent: AgentRuntime, session: str) -> bool:
    """Return whether a session is near a cap, by the caps and the reserve under which it runs."""
    row = await read_session_row(agent, session)
    origin = await find_session_origin(agent, row)
    session_context = build_session_context(agent, row, agent.policy.phases[0], origin)
    return await agent.guard().is_near_budget(session_context)


async def read_ended_result(agent: AgentRuntime, row: SessionRow) -> CompletedResult[str] | StoppedResult:
    """Read the result of a session that has ended, as the run that ended it returned it."""
    store = agent.store
    stored_events = await read_stream(store, session_stream(row.session))
    past = await read_past(row.session, stored_events, store)
    if past.has_erased_text:
        raise ConfigError(f"The result of session {row.session} cannot be read: its messages were erased.")
    ends = [stored.event for stored in stored_events if isinstance(stored.event, TurnEnded)]
    caps = [stored.event for stored in stored_events if isinstance(stored.event, CostCapReached)]
    last_end = ends[-1] if ends else None
    return build_result(
        Conclusion(cast("State", row.state), row.terminal_reason, "" if last_end is None else last_end.sentence),
        None if last_end is None else last_end.why,
        row.session,
        past.messages,
        lambda: stored_events,
        near_budget=await is_session_near_budget(agent, row.session),
        cap=caps[-1] if caps else None,
    )


MAX_HANDOVER_TURNS: Final = 20


class _Kind(msgspec.Struct, frozen=True):
    version: int
    facts: bytes


async def find_exhausted_session(
    store: Store, policy: ResolvedPolicy, row: SessionRow | None, now: int, since: int = 0
) -> ExhaustedSession | None:
    """Return the facts that upkeep needs about a session that its cap ended; None for any other session.

    `since` is when a person last switched its agent on.
    """
    if row is None or (row.state, row.terminal_reason) != ("BUDGET_EXCEEDED", "cost_cap_reached"):
        return None
    turns = [
        event
        for event in await _read_events_of_kind(store, row, TurnEnded.KIND, MAX_HANDOVER_TURNS)
        if isinstance(event, TurnEnded)
    ]
    cap_event = next((event for event in await _read_events_of_kind(store, row, CostCapReached.KIND, 1)), None)
    cap, key = await _name_reached_cap(store, policy, row, cap_event if isinstance(cap_event, CostCapReached) else None)
    is_bounded = await has_window_cap(store, policy, now)
    return ExhaustedSession(
        cap=cap,
        key=key,
        turns=sum(turn.why != "cost_cap_reached" for turn in turns),
        has_window_cap=is_bounded,
        unhealthy=await read_agent_health(store, row.agent, since, has_window_cap=is_bounded),
        asks=policy.on_cap == "ask",
        tokens=isinstance(cap_event, CostCapReached) and cap_event.unit == "tokens",
    )


async def has_window_cap(store: Store, policy: ResolvedPolicy, now: int) -> bool:
    """Return true if an hourly, daily or monthly cap applies to an agent now."""
    legs = [leg for leg in list_accounts(policy.caps, Spender("", policy.name), now) if leg.window]
    return any([await _read_binding_cap(store, leg) is not None for leg in legs])


async def _read_events_of_kind(store: Store, row: SessionRow, kind: str, limit: int) -> Sequence[object]:
    params = {"stream": session_stream(row.session), "kind": kind, "limit": limit}
    rows = await store.ask(Query("events_of_kind", _Kind, params))
    return [decode(kind, each.version, each.facts) for each in rows]


async def _name_reached_cap(
    store: Store, policy: ResolvedPolicy, row: SessionRow, cap_event: CostCapReached | None
) -> tuple[str, str]:
    """Return a description of the cap that ended a session, and the key that raises it."""
    if cap_event is not None and cap_event.unit == "tokens":
        return f"its token budget of {policy.caps.token_budget or cap_event.cap:,}", "token_budget"
    if cap_event is not None and cap_event.window:
        per = cap_event.window.partition("/")[0]
        file = "halter.yaml" if cap_event.scope == "fleet" else "agent.yaml"
        amount = format_exact_micros(cap_event.cap)
        return (
            f"the cap of {cap_event.scope} for {'an' if per == 'hour' else 'a'} {per}, {amount}",
            f"max_cost_usd_per_{per} in {file}",
        )
    session_leg = Leg(session_stream(row.session), "", "usd", policy.caps.session.max_cost_usd, 0)
    cap = await _read_binding_cap(store, session_leg)
    return "its cap" if cap is None else f"its cap of {format_exact_micros(cap)}", "max_cost_usd"


async def _read_binding_cap(store: Store, leg: Leg) -> int | None:
    """Return the cap in force: a person's, or else the configured one."""
    return (await read_budget(store, leg.scope, leg.window, leg.unit)).binding(leg.cap)


async def begin_playbook(agent: AgentRuntime, playbook: Playbook, inputs: Mapping[str, Any]) -> SessionId:
    """Start a session that runs a playbook. Raises ConfigError for missing inputs, unknown tools and plain secrets."""
    missing = [name for name in playbook.inputs if name not in inputs]
    if missing:
        raise ConfigError(f"{playbook.file} needs {join_names(missing)}. Pass --input {missing[0]}=VALUE.")
    for sentence in list_playbook_flaws(playbook, agent.policy.name, agent.tools, agent.definition.tasks.verbs):
        raise ConfigError(sentence)
    app, task = agent.app, encode_task(Task(playbook, inputs))
    redact = make_guard(app, agent.policy, agent.secrets).redact
    if decode_body(task) != redact(decode_body(task)):
        raise ConfigError(f"{playbook.file} or an input contains a secret in plain text. Use ${{secret:NAME}} instead.")
    session = SessionId(app.ids.make())
    event = SessionStarted(
        session=session,
        agent=agent.policy.name,
        kind="task",
        started_by=app.settings.person,
        definition=await store_policy(app.store, agent.policy, redact),
    )
    await app.adopt_policy()
    await app.store.commit(lifecycle.start_session(event, *await offload_body(app.store, task)))
    return session


async def is_playbook_run(agent: AgentRuntime, row: SessionRow) -> bool:
    """Return true if a triggered session runs a playbook."""
    if not row.trigger:
        return False
    trigger_row = await find_trigger_row(agent.store, row.trigger)
    record = None if trigger_row is None else await read_trigger_record(agent.store, trigger_row)
    return record is not None and record.trigger().playbook is not UNSET


async def run_leased_playbook(
    agent: AgentRuntime,
    lease: Lease,
    on_step: StepListener = lambda _, __: None,
    on_wait: WaitListener = lambda _, __: None,
) -> PlaybookOutcome:
    """Run a playbook's session to its end, under a lease that the caller holds."""
    app, store = agent.app, agent.store
    task = await _read_task(agent, lease.session)
    row = await read_session_row(agent, lease.session)
    origin = await find_session_origin(agent, row)
    task_tools = TaskTools(agent, row, origin.trigger, origin.documents)
    tools = {**agent.tools, **{verb.spec.name: verb for verb in task_tools.verbs()}}
    session_context = build_session_context(
        agent, row, grant_phase_tools(agent.policy.phases[0], (), origin.grants), origin
    )
    if not row.trigger:
        # A playbook has no wrap-up, so it needs no reserve.
        session_context = msgspec.structs.replace(session_context, reserve_usd=0, reserve_tokens=0)
    runtime = SessionRuntime(store, app.clock, agent.guard(), lease, session_context, tools, on_wait)
    runtime.sleeps_at_cap = agent.sleeps_at_cap or session_context.policy.on_cap == "wait"
    task_tools.runtime = runtime
    return await walk_playbook(runtime, store, task, on_step)


async def resume_playbook(
    agent: AgentRuntime,
    session: SessionId,
    on_step: StepListener,
    on_wait: WaitListener = lambda _, __: None,
) -> PlaybookOutcome:
    """Run a playbook's session to its end. `on_wait` is called when a person has to decide.

    A model is made only for a step that makes a request, so a playbook of plain calls needs no API key.
    """
    await _read_task(agent, session)
    app, worker = agent.app, make_worker_id("play", agent.app.ids)
    async with renew_leases(app.store, app.clock, worker, liveness=app.liveness):
        lease = await acquire_lease(app.store, app.clock, worker, session, LEASE_WAIT_TIMEOUT)
        if lease is None:
            raise ConfigError(f"Session {session} has ended, or another process runs it. See: halter sessions")
        guard = make_guard(app, agent.policy, agent.secrets)
        bound = msgspec.structs.replace(agent, worker=worker, bound=guard)
        return await run_leased_playbook(bound, lease, on_step, on_wait)


async def _read_task(agent: AgentRuntime, session: SessionId) -> Task:
    """Return the playbook and inputs of a session, which must be one of this agent."""
    events = await agent.store.read(session_stream(session), limit=1)
    if not events or not isinstance(events[0].event, SessionStarted):
        raise ConfigError(f"There is no session {session}. List sessions with: halter sessions")
    if events[0].event.agent != agent.policy.name:
        raise ConfigError(f"Session {session} belongs to {events[0].event.agent}, not to {agent.policy.name}.")
    try:
        return decode_task(await read_body(agent.store, events[0]))
    except msgspec.DecodeError:
        raise ConfigError(f"Session {session} does not run a playbook, or its playbook was erased.") from None


class SubSessionOutcome(msgspec.Struct, frozen=True):
    """The result of a sub-session: its final text and why it stopped. `session` is "" if none was started."""

    session: str
    text: str
    ok: bool = False
    has_ended: bool = False


async def delegate_task(
    agent: AgentRuntime,
    parent: str,
    delegate: AgentRuntime,
    task: str,
    observer: LoopObserver = NO_OBSERVER,
    on_wait: WaitListener = lambda _, __: None,
) -> SubSessionOutcome:
    """Run a task as a sub-session of another agent and wait for it. Its end wakes the parent."""
    row = await read_session_row(agent, parent)
    if row.ended_at is not None:
        return SubSessionOutcome("", f"Session {parent} has ended and cannot start sub-sessions. Start a new one.")
    child = await begin_sub_session(agent, row, delegate, task)
    if not child:
        return SubSessionOutcome("", await explain_insufficient_cap(agent, row))
    return await attend_sub_session(delegate, child, observer, on_wait)


async def resume_delegation(
    agent: AgentRuntime, parent: str, observer: LoopObserver, on_wait: WaitListener
) -> AsyncGenerator[SubSessionOutcome]:
    """Resume the open sub-sessions that an earlier process left, one after the other."""
    for row in await agent.store.ask(Query("open_children", SessionRow, {"session": parent})):
        try:
            async with open_delegate(agent, row.agent) as delegate:
                yield await attend_sub_session(delegate, row.session, observer, on_wait)
        except ConfigError as error:
            yield SubSessionOutcome(row.session, str(error))


async def attend_sub_session(
    delegate: AgentRuntime, child: str, observer: LoopObserver, on_wait: WaitListener
) -> SubSessionOutcome:
    """Run a sub-session until it parks or ends."""
    with mark_nested(delegate, child):
        conclusion, loop = await attend_session(delegate, child, observer=observer, waits=on_wait)
    text, ok = find_final_text(loop.messages), conclusion.state == "COMPLETED"
    if not conclusion.has_ended:
        hint = f"Parked ({conclusion.state}). Resume it with: halter run FOLDER --resume {child}"
    else:
        hint = "" if ok else f"{conclusion.state}: {conclusion.terminal_reason}. {conclusion.sentence}"
    return SubSessionOutcome(child, f"{text}\n{hint}".strip(), ok, conclusion.has_ended)
