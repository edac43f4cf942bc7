"""A call whose effect happens elsewhere: admitted once, settled once, and an approval lets one of them run."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from halter.config.agent_files import read_agent
from halter.config.resolve import resolve_agent
from halter.core.events import SessionStarted
from halter.core.ids import SessionId, make_worker_id
from halter.core.ports import Query
from halter.core.rows import NO_OWNER, SessionRow
from halter.core.tools import Tool
from halter.dispatch.heartbeat import acquire_lease
from halter.external.host import SessionHost
from halter.external.session import ExternalSession
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.prepare import Call
from halter.hooks.tools import HookedTool
from halter.redaction.secrets import GivenSecrets
from halter.runtime.agent_runtime import make_agent_runtime, make_guard
from halter.state.lifecycle import start_session
from halter.state.session import InFlight
from halter.system.protected_paths import NO_PROTECTED_PATHS
from halter.testing.world import World
from tests.hooks.desks import AGENT, open_desk

ARGUMENTS = b'{"command":"git push --force","cwd":"/x"}'


async def test_one_approval_admits_one_of_two_calls_that_name_it(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        app, folder = desk.app, tmp_path / "hooks" / AGENT
        resolved_agent, secrets = resolve_agent(app.fleet, read_agent(folder), folder), GivenSecrets({})
        agent, guard = (
            make_agent_runtime(app, resolved_agent, {}, secrets),
            make_guard(app, resolved_agent.policy, secrets),
        )
        await app.store.commit(start_session(SessionStarted(session="s", agent=AGENT, kind="hooked", started_by="ada")))
        lease = await acquire_lease(app.store, app.clock, make_worker_id("w", app.ids), SessionId("s"), 0)
        assert lease is not None
        tools: dict[str, Tool] = {"Bash": HookedTool("Bash", "/x", NO_PROTECTED_PATHS, None).with_risk_level(ARGUMENTS)}

        async def admit(call: str, decision: str = "") -> InFlight | Answer | ApprovalRequired | object:
            return await guard.admit(
                lease, agent.make_context("s"), Call(call, "Bash", ARGUMENTS, decision=decision), tools
            )

        pending = await admit("s.1")
        assert isinstance(pending, ApprovalRequired)
        assert isinstance(await admit("s.2", pending.decision), ApprovalRequired)
        await desk.decide("approve")
        first, second = await admit("s.3", pending.decision), await admit("s.4", pending.decision)
        assert isinstance(first, InFlight)
        assert isinstance(second, Answer)
        assert (second.outcome, "was already used" in second.text) == ("approval_denied", True)
        answers = [await guard.settle(lease, first, "ok", text) for text in ("done", "done twice")]
        assert [each.outcome for each in answers] == ["ok", "ok"]
        kinds = [event.kind for event in await desk.events("s")]
        assert (kinds.count("call_started"), kinds.count("call_settled")) == (1, 1)


class HostBesideAPerson(SessionHost, frozen=True):
    """A process that reads a session's row just before a person answers."""

    answer: Callable[[], Awaitable[None]]

    async def read_row(self, session: str) -> SessionRow:
        row = await super().read_row(session)
        await self.answer()
        return row


async def test_a_session_that_is_answered_while_it_is_parked_keeps_no_owner(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        app, folder = desk.app, tmp_path / "hooks" / AGENT
        secrets, worker = GivenSecrets({}), make_worker_id("w", app.ids)
        agent = make_agent_runtime(app, resolve_agent(app.fleet, read_agent(folder), folder), {}, secrets)
        await app.store.commit(start_session(SessionStarted(session="s", agent=AGENT, kind="hooked", started_by="ada")))
        lease = await acquire_lease(app.store, app.clock, worker, SessionId("s"), 0)
        assert lease is not None
        host = HostBesideAPerson(app, worker, lambda: desk.decide("approve"))
        session = ExternalSession(host, make_guard(app, agent.policy, secrets), lease, agent.make_context("s"))
        await session.load()
        tool = HookedTool("Bash", "/x", NO_PROTECTED_PATHS, None).with_risk_level(ARGUMENTS)
        assert isinstance(await session.judge(Call("s.1", "Bash", ARGUMENTS), tool), ApprovalRequired)
        await session.park()
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": "s"}))
        assert row.owner == NO_OWNER
