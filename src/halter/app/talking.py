"""Sessions of an agent that thinks: begun, spoken to, gone on with, in this process or in another one."""

import random
from collections.abc import Mapping
from typing import Final

import msgspec

from halter.app.agent import Assembled
from halter.app.doors import gatehouse_for
from halter.app.opened import LEASE, App
from halter.app.thinking import Models, thinking
from halter.brain.loop import NOBODY, Loop, Watching
from halter.brain.running import Running, Waits
from halter.brain.turn import ASK_USER, FINAL_ANSWER, YIELD
from halter.config.pacing import recorded
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, WorkerId
from halter.core.mind import REFLEX, SCRIPTED
from halter.core.ports import Lease, Query, kept
from halter.core.rows import SessionRow
from halter.core.spec import Phase
from halter.core.text import to_body
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.dispatch.tending import taken
from halter.guard.ask import Standing
from halter.guard.gatehouse import Gatehouse
from halter.journal.patient import PatientStore
from halter.state import life
from halter.work.conversation import Came, Conversation
from halter.work.verbs import READ_OUTPUT, verbs

PATIENCE: Final = LEASE + 5 * SECOND
"""How long a session is waited for whose owner may have died."""

VERBS: Final = (ASK_USER, FINAL_ANSWER, YIELD, READ_OUTPUT)

NOTHING_SAID: Final = "There is nothing to do: say something to the agent."


class Speaking(msgspec.Struct, frozen=True):
    """An agent with its models, in the hands of one worker of this process."""

    app: App
    agent: Assembled
    models: Models
    worker: WorkerId
    patience: int = PATIENCE

    @property
    def store(self) -> PatientStore:
        """The store, waited for while it is away."""
        return PatientStore(self.app.store, self.app.clock)

    def demand_model(self) -> None:
        """Say what is missing for the agent to think, before anything is begun. Raises ConfigError."""
        mind = self.agent.read.mind
        if not mind.model:
            raise ConfigError(
                f"{self.agent.policy.name} has no model, so it cannot think: write `model: provider:model` into its "
                "agent.yaml, as in model: anthropic:claude-sonnet-4-5."
            )
        for name in (mind.model, *mind.fallback_models, *mind.model_for.values()):
            self.models.named(name)
        for name in VERBS:
            if name in self.agent.tools:
                raise ConfigError(f"Halter itself gives every agent a tool {name}: give your own another name.")

    def gatehouse(self) -> Gatehouse:
        """Make the doors of the agent's sessions. Rules and scripts foresee nothing, unless they are told to."""
        mind = self.agent.read.mind
        own = "" if mind.model.partition(":")[0] in (REFLEX, SCRIPTED) else mind.model
        foresees = mind.model_for.get("simulation") or own
        model = self.models.named(foresees) if foresees else None
        return gatehouse_for(self.app, self.agent.policy, self.agent.secrets, model)


async def begin(speaking: Speaking, text: str, kind: SessionKind, session: str = "") -> SessionId:
    """Start a session; what it is given opens its first turn. One that was started before stays as it is."""
    if kind == "task" and not text.strip():
        raise ConfigError(NOTHING_SAID)
    speaking.demand_model()
    app, agent = speaking.app, speaking.agent
    said = {"policy": agent.policy, "mind": agent.read.mind, "pacing": recorded(agent.read.pacing)}
    definition = msgspec.json.encode(said, order="sorted")
    event = SessionStarted(
        session=session or app.ids.new(),
        agent=agent.policy.name,
        kind=kind,
        started_by=app.settings.person,
        definition=await speaking.store.put(definition),
    )
    body = to_body(speaking.gatehouse().redacted(text))
    await speaking.store.commit(life.start(event, *await kept(speaking.store, body)))
    return SessionId(event.session)


async def say(speaking: Speaking, session: str, text: str) -> None:
    """Say something to a session; one that is over is let go on for it."""
    if not text.strip():
        raise ConfigError(NOTHING_SAID)
    app, store = speaking.app, speaking.store
    body, blob = await kept(store, to_body(speaking.gatehouse().redacted(text)))
    event = life.said_by(app.settings.person)
    await store.commit(life.post(session, app.ids.new(), event, body, blob))


async def reopen(speaking: Speaking, session: str) -> None:
    """Let a session go on that is over. One that was cancelled is over for good."""
    row = await row_of(speaking, session)
    if row.ended_at is None:
        return
    app = speaking.app
    committed = await speaking.store.commit(life.reopen(session, app.ids.new(), app.settings.person))
    if not committed.events:
        raise ConfigError(f"Session {session} is over ({row.state}, {row.terminal_reason}) and cannot go on.")


async def row_of(speaking: Speaking, session: str) -> SessionRow:
    """Find a session of this agent."""
    rows = await speaking.store.ask(Query("session", SessionRow, {"session": session}))
    if not rows or not rows[0].started_at:
        raise ConfigError(f"There is no session {session}: look at halter sessions.")
    if rows[0].agent != speaking.agent.policy.name:
        raise ConfigError(f"Session {session} is one of {rows[0].agent}, and this is {speaking.agent.policy.name}.")
    return rows[0]


async def attend(
    speaking: Speaking,
    session: str,
    *,
    watching: Watching = NOBODY,
    waits: Waits = lambda _, __: None,
    answer: Tool | None = None,
) -> tuple[Came, Loop]:
    """Take a session from where it stands to its next rest or its end.

    With an `answer`, a tool, the session ends when the model has called it.
    """
    row = await row_of(speaking, session)
    if row.ended_at is not None:
        raise ConfigError(
            f"Session {session} is over ({row.state}, {row.terminal_reason}): resume it, if it may go on."
        )
    lease = await _lease(speaking, session)
    app, store, agent = speaking.app, speaking.store, speaking.agent
    more = [*verbs(store, session, row.kind), *([answer] if answer else [])]
    tools = {**agent.tools, **{verb.spec.name: verb for verb in more}}
    thinks = thinking(agent, speaking.models, row.kind, tools, output=answer is not None)
    standing = standing_of(agent, session, row, tools)
    running = Running(store, app.clock, speaking.gatehouse(), lease, standing, tools, waits)
    loop = Loop(running, app.clock, thinks, random.SystemRandom(), watching=watching)
    return await Conversation(running, loop, app.clock).attend(), loop


async def _lease(speaking: Speaking, session: str) -> Lease:
    app = speaking.app
    lease = await taken(speaking.store, app.clock, speaking.worker, SessionId(session), speaking.patience)
    if lease is None:
        raise ConfigError(f"Session {session} is over, or another process works on it: look at halter sessions.")
    return lease


def standing_of(agent: Assembled, session: str, row: SessionRow, tools: Mapping[str, Tool]) -> Standing:
    """Tell where a session stands: with the verbs granted in its phase, and with its last words paid for beforehand."""
    standing, policy = agent.standing(session, row.trigger), agent.policy
    phase = standing.phase
    if phase.grants is not None:
        own = (name for name in tools if name not in agent.tools)
        phase = Phase(phase.name, (*phase.grants, *own))
    cap, wraps_up = policy.caps.session.max_cost_usd, policy.on_cap == "wrap_up"
    return msgspec.structs.replace(
        standing,
        phase=phase,
        kept_usd=round((cap or 0) * policy.reserve_cost_fraction) if wraps_up else 0,
        kept_tokens=policy.reserve_tokens if wraps_up else 0,
    )
