"""Retention: whoever runs agents erases what was said in sessions that ended long ago, as the store's policy says."""

from collections.abc import Callable
from typing import Final

from msgspec import UNSET

from halter.app.opened import App
from halter.core.clock import HOUR
from halter.core.errors import StoreError
from halter.core.text import counted

BY: Final = "halter.yaml"
"""Who has erased it, as the journal says."""
LOOK: Final = HOUR


def retention_of(app: App) -> int | None:
    """Tell after how long words are erased; None if never."""
    said = app.fleet.spec.retention
    return None if said is UNSET else said


async def forget(app: App, age: int, tell: Callable[[str], None]) -> None:
    """Erase what is older, now and every hour. A store that is away is asked again an hour later."""
    from halter.journal.retention import erase_older_than

    while True:
        try:
            erased = (await erase_older_than(app.store, age, BY)).erased
        except StoreError as error:
            tell(f"What is older than the fleet's retention could not be erased, which is tried again: {error}")
        else:
            if erased:
                tell(f"What was said in {counted(len(erased), 'session')} was erased, as retention says.")
        await app.clock.sleep(LOOK)
