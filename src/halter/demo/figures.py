"""What the worst night came to, in figures and words. Nothing here is typed in: all of it is read from the journals."""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from halter.core.events import ItemQuarantined, OverrunIncurred, RequestRefused, TurnSkipped, TurnStarted
from halter.core.money import NOTHING
from halter.core.vocabulary import State
from halter.demo.night import Bill, Lived
from halter.demo.provider import MODEL

T = TypeVar("T")


class Incident(msgspec.Struct, frozen=True, rename={"within": "with"}):
    """An incident as it is told: both bills, what stopped it in Halter, and how many events say so."""

    name: str
    title: str
    happens: str
    without: Bill
    within: Bill
    stopped_by: str
    events: Mapping[str, int]


class Night(msgspec.Struct, frozen=True, rename={"within": "with"}):
    """The whole night: the model whose price was paid, each incident, and both sums."""

    model: str
    incidents: Sequence[Incident]
    without: Bill
    within: Bill
    overruns: int
    """How often Halter passed a cap."""


def told(lived: Lived) -> Incident:
    """Put an incident that is over into figures and words."""
    scene, kinds = lived.scene, [stored.kind for stored in lived.events]
    return Incident(
        scene.name,
        scene.title,
        scene.happens,
        lived.without,
        lived.within,
        _BRAKES[scene.name](lived),
        {kind: kinds.count(kind) for kind in sorted(set(kinds))},
    )


def night(incidents: Sequence[Incident]) -> Night:
    """Add the incidents up."""
    without, within = _sum([each.without for each in incidents]), _sum([each.within for each in incidents])
    overruns = sum(each.events.get(OverrunIncurred.KIND, 0) for each in incidents)
    return Night(str(MODEL), incidents, without, within, overruns)


def cents(usd: Decimal) -> str:
    """Write an amount to the cent, as people compare them."""
    return f"${usd:,.2f}"


def _sum(bills: Sequence[Bill]) -> Bill:
    return Bill(sum(bill.requests for bill in bills), sum((bill.cost_usd for bill in bills), NOTHING))


def _stuck(lived: Lived) -> str:
    attempts = sum(event.attempts for event in _of(lived, ItemQuarantined))
    return (
        f"Steps that bring nothing new end a run. After {attempts} of them the invoice was left to a person; "
        f"the other {_in(lived, 'COMPLETED')} are booked."
    )


def _idle(lived: Lived) -> str:
    skipped, taken = len(_of(lived, TurnSkipped)), len(_of(lived, TurnStarted))
    return f"The gate: {skipped} of {skipped + taken} wakes found nothing changed, and no model was asked."


def _parallel(lived: Lived) -> str:
    refused = len(_of(lived, RequestRefused))
    return (
        f"Money is held before it is spent, and {refused} requests did not fit. {_in(lived, 'COMPLETED')} reports are "
        f"done, {_in(lived, 'SLEEPING')} sleep until the next day's budget."
    )


def _of(lived: Lived, kind: type[T]) -> list[T]:
    return [stored.event for stored in lived.events if isinstance(stored.event, kind)]


def _in(lived: Lived, state: State) -> int:
    return sum(row.state == state for row in lived.sessions)


_BRAKES: Final[Mapping[str, Callable[[Lived], str]]] = MappingProxyType(
    {"stuck_item": _stuck, "idle_heartbeat": _idle, "parallel_runs": _parallel}
)
