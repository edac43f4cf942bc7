"""Which budgets count now: the same in every store, whatever came before."""

from halter.core.clock import window_at
from halter.core.events import CallSettled, CallStarted, SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.money import Charge, Leg
from halter.core.ports import Draft, Lease, Write
from halter.core.project.holds import rows_of_hold
from halter.journal.store import JournalStore
from halter.runtime.budgets import MAX_ENDED_SESSIONS, read_current_budgets
from halter.state import lifecycle


async def start_session(store: JournalStore, session: str) -> Lease:
    await store.commit(
        lifecycle.start_session(SessionStarted(session=session, agent="clerk", kind="task", started_by="ada"))
    )
    (lease,) = await store.claim(WorkerId(session), 1, SessionId(session))
    return lease


async def take_hold(store: JournalStore, session: str, *legs: Leg) -> None:
    event = CallStarted(call=f"{session}.1", tool="look", legs=legs)
    reads = rows_of_hold(event.call, legs)
    await store.commit(Write(session_stream(session), event.call, lambda _: [Draft(event)], reads))


async def settle_hold(store: JournalStore, session: str, *legs: Leg) -> None:
    event = CallSettled(call=f"{session}.1", outcome="ok", charge=Charge(usd=1))
    reads = rows_of_hold(event.call, legs)
    await store.commit(Write(session_stream(session), f"{event.call}/settled", lambda _: [Draft(event)], reads))


async def scopes(store: JournalStore, now: int) -> list[tuple[str, str]]:
    return [(row.scope, row.window) for row in await read_current_budgets(store, now)]


async def test_the_windows_of_this_moment_and_the_open_sessions_count(store: JournalStore) -> None:
    now = await store.now()
    await start_session(store, "one")
    today, far = window_at("day", now), window_at("day", now, "Pacific/Kiritimati")
    await take_hold(store, "one", Leg("session:one", "", "usd", 5, 1), Leg("agent:clerk", today, "usd", 5, 1))
    await start_session(store, "two")
    await take_hold(store, "two", Leg("session:two", "", "usd", 5, 1), Leg("fleet", far, "usd", 5, 1))
    wanted = {("agent:clerk", today), ("fleet", far), ("session:one", ""), ("session:two", "")}
    assert set(await scopes(store, now)) == wanted


async def test_a_past_window_is_omitted_unless_something_is_still_held_in_it(store: JournalStore) -> None:
    past = Leg("agent:clerk", "day/2020-01-01", "usd", 5, 1)
    await start_session(store, "one")
    await take_hold(store, "one", past)
    assert await scopes(store, await store.now()) == [("agent:clerk", "day/2020-01-01")]
    await settle_hold(store, "one", past)
    assert await scopes(store, await store.now()) == []


async def test_of_ended_sessions_only_the_newest_are_shown(store: JournalStore) -> None:
    names = [f"s{number:02}" for number in range(MAX_ENDED_SESSIONS + 3)]
    for name in names:
        leg = Leg(f"session:{name}", "", "usd", 5, 1)
        lease = await start_session(store, name)
        await take_hold(store, name, leg)
        await settle_hold(store, name, leg)
        await store.commit(lifecycle.end_session(lease, "COMPLETED", "completed", ""))
    assert len(await scopes(store, await store.now())) == MAX_ENDED_SESSIONS
