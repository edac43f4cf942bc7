"""What the drills on the journal share: where they work if nobody says, and what Halter itself says of a store."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from halter.journal.store import JournalStore
from halter.journal.verify import verify
from halter_drills.drill import Setting

IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  only folders with unguessable names are made in there


def in_memory(setting: Setting) -> Setting:
    """Choose a file in memory where no store is wished for: what a drill does to processes and rows needs no disk."""
    if setting.store is not None or not os.access(IN_MEMORY, os.W_OK):
        return setting
    return replace(setting, store=f"sqlite:///{IN_MEMORY}/halter.db")


async def examined(store: JournalStore) -> list[str]:
    """Verify the chains, the bodies and the rows of a store, and say what was found as sentences."""
    report = await verify(store)
    wrong = [found.sentence for found in report.findings]
    return wrong if report.compared or wrong else ["The rows could not be compared with the events."]
