"""The peak use, in an agent's recorded sessions, of everything that a policy can bound."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from halter.core.clock import HOUR
from halter.core.events import CallStarted, PhaseEntered, RequestStarted, SessionStarted
from halter.core.ids import StreamId, parse_session_id
from halter.core.money import Leg
from halter.core.ports import Stored
from halter.core.project import budget_row
from halter.core.spec import ResolvedPolicy
from halter.guard.judge import RATE_SLICES
from halter.journal.engine import StoreView
from halter.journal.rebuild import RowFold
from halter.runtime.backtest import read_in_order, read_policy


class RecordedUse(msgspec.Struct, frozen=True):
    """The peak use, in an agent's recorded sessions, of everything that a policy can bound.

    Amounts are in micro-dollars and include what was held at the time. `attempts` are the most attempts of a tool
    within an hour, counted as its rate limit counts them.
    """

    sessions: int
    session_usd: int
    day_usd: int
    tools: Mapping[str, tuple[str, ...]]
    attempts: Mapping[str, int]
    models: tuple[str, ...]
    reserve: float


def measure_use(view: StoreView, agent: str, *, since: int = 0) -> RecordedUse:
    """Measure the peaks of an agent's recorded sessions."""
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
        event, session = stored.event, parse_session_id(StreamId(stored.stream)) or ""
        if isinstance(event, SessionStarted) and event.agent == self._agent and stored.at >= self._since:
            self._begin(event)
        if session not in self._sessions:
            return
        match event:
            case PhaseEntered():
                self._phases[session] = event.phase
            case RequestStarted():
                self._models.add(event.model)
                self._weigh(event.legs)
            case CallStarted():
                self._weigh(event.legs)
                self._count_call(event, self._sessions[session], event.phase or self._phases[session], stored.at)
            case _:
                pass

    def _begin(self, event: SessionStarted) -> None:
        if event.definition not in self._policies:
            recorded_policy = read_policy(self._view, event.definition)
            self._policies[event.definition] = recorded_policy and recorded_policy.policy
        policy = self._sessions[event.session] = self._policies[event.definition]
        self._phases[event.session] = policy.phases[0].name if policy else "work"

    def _weigh(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            kind, window = leg.scope.partition(":")[0], leg.window.partition("/")[0]
            name = "session" if kind == "session" and not leg.window else window if kind == "agent" else ""
            if leg.unit == "usd" and name in self._peaks:
                row = budget_row(self._rows, leg)
                self._peaks[name] = max(self._peaks[name], row.spent + row.held)

    def _count_call(self, event: CallStarted, policy: ResolvedPolicy | None, phase: str, at: int) -> None:
        if policy is not None and not any(
            configured_phase.name == phase and configured_phase.grants_tool(event.tool)
            for configured_phase in policy.phases
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
    """Return the most attempts in any hour, summed over the slices that a rate limit counts together."""
    return max(
        sum(count for number, count in slices.items() if last_slice - RATE_SLICES <= number <= last_slice)
        for last_slice in slices
    )
