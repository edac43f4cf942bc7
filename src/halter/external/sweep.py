"""What killed processes left: doubts are settled or put to a person, and the sessions end."""

from contextlib import suppress

from halter.core.errors import LeaseLost
from halter.core.rows import SessionRow
from halter.external.session import ExternalSession, ExternalState, SessionHost
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext


async def recover_session(host: SessionHost, guard: GuardRuntime, row: SessionRow, context: SessionContext) -> bool:
    """Settle and end a session that no process runs, or leave it to the person who has to decide.

    Returns whether it has ended.
    """
    state = ExternalState()
    await state.read(host.store, row.session)
    if row.state == "WAITING_FOR_APPROVAL" and await state.is_waiting(guard, host.app.clock.now()):
        return False
    lease = await host.acquire_lease(row.session)
    if lease is None:
        return False
    session = ExternalSession(host, guard, lease, context)
    session.state = state
    with suppress(LeaseLost):
        return await _settle_and_end(session)
    return False


async def _settle_and_end(session: ExternalSession) -> bool:
    await session.wake("timer", recovered=True)
    had_doubts = bool(session.state.session.in_flight)
    are_settled = await session.clear_doubts()
    await session.catch_up()
    if not are_settled or await session.state.has_open_question(session.guard, session.host.app.clock.now()):
        await session.park()
        return False
    await session.end(*(("ERROR", "error") if had_doubts else ("COMPLETED", "idle_timeout")))
    return True
