"""The most that an agent's recorded sessions used of everything that a policy can bound."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from halter.core import events as ev
from halter.core.clock import HOUR
from halter.core.ids import StreamId, session_of
from halter.core.money import Leg
from halter.core.ports import Stored
from halter.core.project import budget_row
from halter.core.spec import ResolvedPolicy
from halter.guard.judge import RATE_SLICES
from halter.journal.engine import StoreView
from halter.journal.rebuild import RowFold
from halter.runtime.backtest import read_in_order, read_policy


class RecordedUse(msgspec.Struct, frozen=True):
    """The most that an agent's recorded sessions used of everything that a policy can bound.

    Amounts are micro-dollars, each with what was held at that moment; `attempts` are those of a tool in the hour that
    its rate counts.
    """

    sessions: int
    session_usd: int
    day_usd: int
    tools: Mapping[str, tuple[str, ...]]
    attempts: Mapping[str, int]
    models: tuple[str, ...]
    reserve: float


def measure_use(view: StoreView, agent: str, *, since: int = 0) -> RecordedUse:
    """Fold the recorded sessions of an agent as they were, and keep the peaks."""
    use = _UseFold(view, agent, since)
    for stored in read_in_order(view):
        use.apply(stored)
    return use.result()


class _UseFold:
    def __init__(self, view: StoreView, agent: str, since: int) -> None:
        self._view, self._agent, self._since = view, agent, since
        self._rows = RowFold()
        self._policies: dict[str, ResolvedPolicy | None] = {}
        self._phases: dict[str, str] = {}
        self._sessions: dict[str, ResolvedPolicy | None] = {}
        self._peaks = {"session": 0, "day": 0}
        self._tools: dict[str, set[str]] = {}
        self._slices: dict[str, Counter[int]] = {}
        self._models: set[str] = set()

    def apply(self, stored: Stored) -> None:
        self._rows.apply(stored)
        event, session = stored.event, session_of(StreamId(stored.stream)) or ""
        if isinstance(event, ev.SessionStarted) and event.agent == self._agent and stored.at >= self._since:
            self._begin(event)
        if session not in self._sessions:
            return
        match event:
            case ev.PhaseEntered():
                self._phases[session] = event.phase
            case ev.RequestStarted():
                self._models.add(event.model)
                self._weigh(event.legs)
            case ev.CallStarted():
                self._weigh(event.legs)
                self._count_call(event, self._sessions[session], event.phase or self._phases[session], stored.at)
            case _:
                pass

    def _begin(self, started: ev.SessionStarted) -> None:
        if started.definition not in self._policies:
            kept = read_policy(self._view, started.definition)
            self._policies[started.definition] = kept and kept.policy
        policy = self._sessions[started.session] = self._policies[started.definition]
        self._phases[started.session] = policy.phases[0].name if policy else "work"

    def _weigh(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            kind, window = leg.scope.partition(":")[0], leg.window.partition("/")[0]
            name = "session" if kind == "session" and not leg.window else window if kind == "agent" else ""
            if leg.unit == "usd" and name in self._peaks:
                row = budget_row(self._rows, leg)
                self._peaks[name] = max(self._peaks[name], row.spent + row.held)

    def _count_call(self, event: ev.CallStarted, policy: ResolvedPolicy | None, phase: str, at: int) -> None:
        if policy is not None and not any(
            each.name == phase and each.grants_tool(event.tool) for each in policy.phases
        ):
            return
        self._tools.setdefault(phase, set()).add(event.tool)
        if event.purpose == "turn":
            self._slices.setdefault(event.tool, Counter())[at // (HOUR // RATE_SLICES)] += 1

    def result(self) -> RecordedUse:
        return RecordedUse(
            sessions=len(self._sessions),
            session_usd=self._peaks["session"],
            day_usd=self._peaks["day"],
            tools={phase: tuple(sorted(tools)) for phase, tools in self._tools.items()},
            attempts={tool: _count_peak_hour(slices) for tool, slices in sorted(self._slices.items())},
            models=tuple(sorted(self._models)),
            reserve=max((each.reserve_cost_fraction for each in self._policies.values() if each), default=0.0),
        )


def _count_peak_hour(slices: Mapping[int, int]) -> int:
    """The most attempts in any run of slices that a rate counts together."""
    return max(
        sum(count for number, count in slices.items() if last - RATE_SLICES <= number <= last) for last in slices
    )
