"""What both doors share: something is in flight until it is done, its time is up, or somebody halts it."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import msgspec

from halter.core.clock import SECOND
from halter.core.events import AnyEvent, CallSettled, RequestSettled, Unknown
from halter.core.ids import StreamId
from halter.core.ports import Store, Stored
from halter.guard.halts import HaltWatch
from halter.state.session import InFlight

T = TypeVar("T")

Redact = Callable[[str], str]

ERROR_KEPT: Final = 300
"""How much of an error is kept. It is cut only after secrets were taken out: half of one would not be recognised."""


class StillHeld(msgspec.Struct, frozen=True):
    """The money is there, but others hold it; the session waits for its budget. Nothing was written."""

    id: str


class RateUsedUp(msgspec.Struct, frozen=True):
    """The model may be asked again when the minute is over. That is written down; no attempt is spent, nothing is held.

    `waited` counts how often this attempt has waited before: whoever asks again counts one more.
    """

    id: str
    until: int
    waited: int = 0


class Halted(Exception):
    """What was in flight was stopped by a halt. It never leaves the doors."""


async def unless_halted(
    halts: HaltWatch, scopes: Iterable[str], acting: asyncio.Future[T], allowed: int, name: str = ""
) -> T:
    """Wait for what is in flight until it is done, its time is up, or somebody halts one of its scopes."""
    with halts.pulse.in_flight(name, allowed):
        return await _unless_halted(halts, scopes, acting, allowed)


async def _unless_halted(halts: HaltWatch, scopes: Iterable[str], acting: asyncio.Future[T], allowed: int) -> T:
    try:
        await asyncio.sleep(0)
        if acting.done():
            # What takes no time needs nobody to watch it.
            return acting.result()
        with halts.listening(scopes) as halted:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((acting, halted), timeout=allowed / SECOND, return_when=first)
        # What is done just as its time is up counts as done: it may have been paid for.
        if acting.done():
            return acting.result()
        if halted.done():
            raise Halted(f"{halted.result()} was halted.")
        raise TimeoutError
    finally:
        if not acting.done():
            acting.cancel()
            await asyncio.wait((acting,))


async def to_its_end(act: Coroutine[Any, Any, T]) -> T:
    """Do something that is not left undone if whoever waits for it is cancelled.

    What goes wrong when nobody waits for it any more is told to nobody: the journal knows what was not written.
    """
    doing = asyncio.ensure_future(act)
    doing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(doing)


async def outcome_of(store: Store, stream: StreamId, flight: InFlight) -> Stored | None:
    """Find what became of something that was begun before: who asks twice is told twice; nothing happens twice."""
    after = flight.seq
    while page := await store.read(stream, after):
        for stored in page:
            if _settles(stored.event) == flight.id:
                return stored
        after = page[-1].seq
    return None


def _settles(event: AnyEvent | Unknown) -> str | None:
    match event:
        case CallSettled(call=settled) | RequestSettled(request=settled):
            return settled
        case _:
            return None
