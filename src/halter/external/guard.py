"""The guard as an object, for programs that have their own loop.

```python
guard = Guard("runs.db", agent="desk", max_cost_usd=1.00)

@guard.tool(level="CONTROLLED", cost=0.02)
async def send(to: str, text: str) -> str: ...

async with guard, guard.session("answer the mail") as session:
    answer = await session.call("send", to="ada", text="hello")
```

Every call passes the same checks as the calls of an agent, in this order: halts, grants, rates, money, approvals. The
journal records it before it runs. After a crash, the program resumes from the journal.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import msgspec

from halter.config.definition import AgentDefinition
from halter.config.resolve import read_model_rates, resolve_policy
from halter.config.tool_names import list_named_tools
from halter.core.errors import ConfigError, HalterError, LeaseLost
from halter.core.events import SessionStarted
from halter.core.messages import Model
from halter.core.options import reject_unknown_options, write_out_options
from halter.core.ports import read_body
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import decode_body
from halter.core.tools import ToolSpec
from halter.external.effects import DecisionPending
from halter.external.guard_summary import GuardSummary, make_receipts, summarize_agent
from halter.external.guarded_session import GuardedSession, guard_client, name_tool
from halter.external.host import SessionHost
from halter.external.provenance import make_external_check
from halter.external.session import ExternalSession
from halter.external.sync_guard import BlockingGuard
from halter.guard.call_answer import Answer
from halter.runtime.agent import (
    MODEL_KEYS,
    AgentProgram,
    ProgramOptions,
    parse_agent_options,
    reject_unread_keys,
    resolve_secrets,
)
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.agent_builder import build_agent
from halter.runtime.assembly.protected_paths import list_protected_paths
from halter.runtime.runtime import Runtime
from halter.spec.models import BrainSpec
from halter.state.receipt import Receipt
from halter.tools.function_tool import FunctionTool

R = TypeVar("R")
_LOOP_KEYS: Final = (
    *("model", "fallback_models", "model_for", *MODEL_KEYS, "script"),
    *("hot_state", "collections", "verbs", "review", "notify", "anonymize"),
)
"""The keys of an agent file that only the loop of an agent reads."""
_REOPENABLE_REASONS: Final = frozenset({"error", "external_halt"})
"""The reasons of an end after which the caller of a session may repeat what it has not recorded."""


class GuardOptions(ProgramOptions, total=False):
    """Options of a guard. `simulates` is a model that predicts what dangerous calls would do."""

    simulates: Model


class SessionInUse(HalterError):
    """The session cannot be resumed: another process runs it."""


class SessionAlreadyEnded(HalterError):
    """The session cannot be resumed: it has ended."""


class Guard(AgentProgram):
    """One agent's guard over one store. Use it as an async context manager."""

    NOUN = "guard"

    @write_out_options(GuardOptions)
    def __init__(self, store: str | Path, agent: str = "program", **options: Unpack[GuardOptions]) -> None:
        reject_unknown_options(options, GuardOptions.__optional_keys__, "a guard")
        super().__init__(agent, store, options)
        self._agent = agent
        self._simulates = options.get("simulates")
        self._external = False
        self._sessions = set[GuardedSession]()

    @asynccontextmanager
    async def session(self, task: str = "", *, id: str | None = None) -> AsyncGenerator[GuardedSession]:  # noqa: A002 The public name.
        """Start a session, or resume the one with that id. After a crash, calls in doubt are resolved first.

        The session ends with the block: as completed, as an error if the block raises, or for the reason for which the
        guard stopped it.
        """
        session = await self._resume_or_begin(task, id)
        self._sessions.add(session)
        try:
            yield session
        except DecisionPending:
            await session.pause()
            raise
        except Exception:
            with suppress(LeaseLost):
                await session.end("ERROR", "error")
            raise
        except BaseException:
            with suppress(LeaseLost):
                await session.leave_open()
            raise
        else:
            await session.end("COMPLETED", "completed")
        finally:
            self._sessions.discard(session)
            session.cancel_flush()

    async def _flush_sessions(self) -> None:
        """Commit what open sessions have returned to the program but deferred, so that a query sees it."""
        for session in tuple(self._sessions):
            with suppress(LeaseLost):
                await session.flush_deferred()

    async def has_started(self, session: str) -> bool:
        """Return true if a session with this id has started."""
        row = await self._host().find_row(session)
        return row is not None and row.started_at > 0

    async def has_ended(self, session: str) -> bool:
        """Return true if a session with this id has started and ended."""
        row = await self._host().find_row(session)
        return row is not None and row.ended_at is not None

    async def reopen(self, session: str) -> bool:
        """Reopen a session of this agent that an error or a halt ended; return whether it is open.

        Its costs still count, its settled calls are not made again, and its decisions still apply.
        """
        host = self._host()
        row = await host.find_row(session)
        if row is None or row.agent != self._agent or explain_newer_format(row):
            return False
        if row.ended_at is not None and row.terminal_reason not in _REOPENABLE_REASONS:
            return False
        return (await host.reopen(row)).ended_at is None

    def _host(self) -> SessionHost:
        context = self._open_context()
        return SessionHost(context.app, context.worker)

    @property
    def max_cost_usd(self) -> float | None:
        """The cap of a session that the program configures; None if it configures none."""
        cap = self._options.get("max_cost_usd", "none")
        return None if cap == "none" else float(cap)

    def copy_closed(self) -> "Guard":
        """Copy the guard for another event loop. The copy is not open, whether this one is or not."""
        guard = copy(self)
        vars(guard).update(_stack=None, _open=None, _open_for_call=None, _sessions=set())
        return guard

    def blocking(self) -> BlockingGuard:
        """Return the guard for a program that is not async."""
        return BlockingGuard(self)

    def allow_external_tools(self) -> None:
        """Allow the policy to name tools that the caller declares only at their first call."""
        self._external = True

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Make one call in a new session."""
        async with self.session(f"call {name_tool(tool)}") as session:
            return await session.call(tool, **arguments)

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard, each in a new session.

        `provider` names the provider in the fleet's prices, for a server that speaks the protocol of another one.
        """
        self._open_context()
        return guard_client(client, lambda: self.session("A request of an SDK's client."), None, provider)

    async def report(self) -> GuardSummary:
        """Return what this agent did and spent, its budgets, and the decisions that wait for a person."""
        app = self._open_context().app
        await self._flush_sessions()
        return await summarize_agent(app.store, self._agent, app.clock.now())

    async def receipts(self, limit: int = 50) -> tuple[Receipt, ...]:
        """Return the receipts of this agent's sessions, newest first."""
        store = self._open_context().store
        await self._flush_sessions()
        return await make_receipts(store, self._agent, limit)

    async def _resume_or_begin(self, task: str, session: str | None) -> GuardedSession:
        opened, host = self._open_context(), self._host()
        guard, policy, tools = opened.guard(), opened.policy, dict(opened.tools)
        event = SessionStarted(
            session=session or opened.app.ids.make(), agent=self._agent, kind="task", started_by=self._settings.person
        )
        if session:
            lease = await host.begin(event, policy, task, guard, opened.hold_timeout)
        else:
            lease = await host.begin_new(event, policy, task, guard)
        if isinstance(lease, SessionRow):
            raise _explain_unclaimed(lease)
        check = make_external_check(policy.provenance, policy, tools)
        external = ExternalSession(host, guard, lease, opened.make_context(event.session), tools, check)
        external.runtime.sleeps_at_cap = policy.on_cap == "wait"
        events = await external.recover()
        if check is not None:
            check.add_task(decode_body(await read_body(host.store, events[0])))
            await external.recall(events)
            check.add_task(guard.redact(task))
        return GuardedSession(external, tools)

    async def _assemble(self, app: Runtime, stack: AsyncExitStack) -> AgentRuntime:
        reject_unread_keys(self._options, "the guard's policy")
        if unread := next((key for key in self._options.get("policy", {}) if key in _LOOP_KEYS), ""):
            raise ConfigError(
                f"the guard's policy: `{unread}` has no effect in a guard: only an agent's own loop reads it."
            )
        file = parse_agent_options(self._agent, self._options, "the guard's policy", {}, {})
        settings, simulates = BrainSpec(rates=read_model_rates(app.fleet)), self._simulates
        if simulates is not None:
            settings = msgspec.structs.replace(settings, model_for={"simulation": str(simulates.name)})
        undeclared = {name for _, name in list_named_tools(file)} - {tool.spec.name for tool in self._tools}
        undeclared_specs = [ToolSpec(name=name, description="", schema=b"{}") for name in sorted(undeclared)]
        return build_agent(
            app,
            file,
            AgentDefinition(policy=resolve_policy(app.fleet, file), model_settings=settings),
            self._tools,
            list_protected_paths(self._settings, None, None),
            resolve_secrets(self._options, self._environ),
            undeclared_tools=undeclared_specs if self._external else (),
            models={} if simulates is None else {str(simulates.name): simulates},
        )


def _explain_unclaimed(row: SessionRow) -> SessionInUse | SessionAlreadyEnded:
    if row.ended_at is not None:
        end = f"{row.state}: {row.terminal_reason}"
        return SessionAlreadyEnded(f"Session {row.session} has ended ({end}). Start a new one.")
    if newer := explain_newer_format(row):
        return SessionInUse(newer)
    return SessionInUse(
        f"Session {row.session} is running in another process ({row.owner}). Wait for it, or cancel it."
    )
