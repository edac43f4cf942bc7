"""What was committed is seen by the next read, also while another thread of the process looks for news."""

import threading
from pathlib import Path

from halter.core.clock import SystemClock
from halter.core.events import SessionStarted
from halter.core.ids import SortableIds
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.journal.open import open_engine
from halter.journal.store import JournalStore
from halter.state.lifecycle import start_session

SESSIONS = 200


async def test_a_read_sees_what_was_committed_while_another_thread_looks_for_news(tmp_path: Path) -> None:
    clock = SystemClock()
    engine = open_engine(f"sqlite://{tmp_path / 'halter.db'}", clock=clock, ids=SortableIds(clock.now), lease=10**9)
    store, over = JournalStore(engine), threading.Event()

    def look() -> None:
        while not over.is_set():
            engine.wait_for_others(0)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    unseen = 0
    try:
        for number in range(SESSIONS):
            event = SessionStarted(session=f"s{number}", agent="desk", kind="task", started_by="ada")
            await store.commit(start_session(event))
            unseen += not await store.ask(Query("session", SessionRow, {"session": f"s{number}"}))
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
        await store.close()
    assert unseen == 0
