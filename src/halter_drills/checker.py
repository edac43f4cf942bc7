"""The independent checker: it reads a store with plain SQL and does its own arithmetic.

It shares no event types, projections or money rules with the code that it checks. It knows only the tables, the JSON of
the facts, and the promises. A metronome distinguishes late events from a machine that is too busy.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from halter.core.clock import SECOND
from halter_drills.children import Pipe
from halter_drills.drill import PlainConnection, connection

Account = tuple[str, str, str]
"""Scope, window, unit."""


class RecordedEvent(NamedTuple):
    """One row of the table of events."""

    stream: str
    seq: int
    kind: str
    at: int
    generation: int
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"event {self.seq} of {self.stream} ({self.kind})"


class Sums(NamedTuple):
    """One row of the table of budgets."""

    spent: int
    held: int
    overrun: int

    def __str__(self) -> str:
        return f"{self.spent} spent, {self.held} held, {self.overrun} over"


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The contents of a store, in the order of writing."""

    events: Sequence[RecordedEvent]
    budgets: Mapping[Account, Sums]
    holds: Mapping[str, list[list[Any]]]
    spends: Mapping[str, int]
    heads: Mapping[str, int]


EVENTS: Final = "SELECT stream, seq, kind, at, generation, facts FROM events ORDER BY position"
BUDGETS: Final = 'SELECT scope, "window", unit, spent, held, overrun FROM budgets'


def read_store(url: str) -> StoreContents:
    with closing(connection(url)) as database:
        return read_database(database)


def read_database(database: PlainConnection) -> StoreContents:
    return StoreContents(
        [fact(*row) for row in database.execute(EVENTS).fetchall()],
        {(row[0], row[1], row[2]): Sums(*row[3:]) for row in database.execute(BUDGETS).fetchall()},
        {row[0]: json.loads(row[1]) for row in database.execute("SELECT hold, legs FROM holds").fetchall()},
        dict(database.execute("SELECT hold, usd FROM spends").fetchall()),
        dict(database.execute("SELECT stream, head FROM streams").fetchall()),
    )


def fact(stream: str, seq: int, kind: str, at: int, generation: int, facts: bytes) -> RecordedEvent:
    return RecordedEvent(stream, seq, kind, at, generation, json.loads(facts))


def check(
    contents: StoreContents, planned: Mapping[Account, int | None] | None = None, *, finished: bool = True
) -> list[str]:
    """Check the order, the owners and the money of a store; return the violations as sentences.

    `planned` holds the caps in force that no event records. With `finished`, every hold must be settled.
    """
    books = Books(planned or {})
    for event in contents.events:
        books.apply(event)
    return [*order(contents), *owners(contents.events), *books.violations, *books.compare(contents, finished=finished)]


def order(contents: StoreContents) -> list[str]:
    """Check that each stream is numbered without a gap, forward in time, up to its recorded head."""
    wrong: list[str] = []
    last: dict[str, RecordedEvent] = {}
    for event in contents.events:
        previous = last.get(event.stream)
        expected = previous.seq + 1 if previous else 1
        if event.seq != expected:
            wrong.append(f"The {event} is at the position of event {expected}.")
        if previous and event.at < previous.at:
            wrong.append(f"The {event} is older than its predecessor.")
        last[event.stream] = event
    ends = {stream: event.seq for stream, event in last.items()}
    for stream in sorted({*ends, *contents.heads}):
        if ends.get(stream) != contents.heads.get(stream):
            head, end = contents.heads.get(stream), ends.get(stream)
            wrong.append(f"The stream {stream} ends with event {end}, but its head is {head}.")
    return wrong


def owners(events: Iterable[RecordedEvent]) -> list[str]:
    """Check that no former owner of a session wrote after a new one."""
    wrong: list[str] = []
    newest: dict[str, int] = defaultdict(int)
    for event in events:
        if not event.stream.startswith("session:") or event.stream.endswith("/in"):
            continue
        if event.generation < newest[event.stream]:
            newer = newest[event.stream]
            wrong.append(f"The {event} was written by generation {event.generation} after generation {newer}.")
        newest[event.stream] = max(newest[event.stream], event.generation)
    return wrong


def check_paid(events: Iterable[RecordedEvent], bills: Mapping[str, Sequence[int]]) -> list[str]:
    """Check the events against the bills of the outside world: each call once, and no less than it cost."""
    settlements = [event.facts for event in events if event.kind == "call_settled" and "charge" in event.facts]
    charges: dict[str, int] = {facts["call"]: facts["charge"].get("usd", 0) for facts in settlements}
    wrong = [f"The call {call} ran {len(costs)} times." for call, costs in bills.items() if len(costs) > 1]
    for call, costs in bills.items():
        if call not in charges:
            wrong.append(f"The call {call} cost {costs[0]} and was not charged.")
        elif charges[call] < costs[0]:
            wrong.append(f"The call {call} cost {costs[0]} and was charged {charges[call]}.")
    return wrong


@dataclass(slots=True)
class Balance:
    cap: int | None = None
    by_person: bool = False
    spent: int = 0
    held: int = 0
    overrun: int = 0

    @property
    def total(self) -> int:
        return self.spent + self.held


@dataclass(slots=True)
class Books:
    """The checker's own accounts, each checked at every event that changes it."""

    planned: Mapping[Account, int | None]
    violations: list[str] = field(default_factory=list[str])
    accounts: dict[Account, Balance] = field(default_factory=lambda: defaultdict(Balance))
    open: dict[str, list[list[Any]]] = field(default_factory=dict[str, list[list[Any]]])
    started: Counter[str] = field(default_factory=Counter[str])
    settled: Counter[str] = field(default_factory=Counter[str])
    charged: dict[str, int] = field(default_factory=dict[str, int])
    carved: set[str] = field(default_factory=set[str])

    def apply(self, event: RecordedEvent) -> None:
        facts = event.facts
        match event.kind:
            case "call_started" | "request_started":
                self._hold(event, facts.get("call") or facts["request"], facts.get("legs", []))
            case "session_started" if carved := facts.get("carved"):
                self.carved.add(facts["session"])
                self._hold(event, facts["session"], carved)
            case "call_settled" | "request_settled":
                self._settle(event, facts.get("call") or facts["request"], facts.get("charge"))
            case "session_ended" if (session := event.stream.removeprefix("session:")) in self.carved:
                self._settle(event, session, facts.get("charge"))
            case "hold_made":
                self._hold(event, facts["hold"], facts["legs"])
            case "hold_released":
                self._release(event, facts["hold"])
            case "cap_changed":
                self._cap_changed(event)
            case "cost_cap_reached":
                self._cost_cap_reached(event)
            case _:
                pass

    def _cap_changed(self, event: RecordedEvent) -> None:
        account = _account(event.facts)
        balance = self.accounts[account]
        balance.cap, balance.by_person = event.facts["cap"], True
        balance.overrun += event.facts.get("overrun", 0)
        self._check_cap(event, account)

    def _cost_cap_reached(self, event: RecordedEvent) -> None:
        """Check a refusal: the amount must exceed the unspent part of the cap, regardless of holds."""
        account = _account(event.facts)
        cap, amount = event.facts["cap"], event.facts["amount"]
        balance = self.accounts[account]
        binding, spent = balance.cap if balance.by_person else self.planned.get(account, cap), balance.spent
        if binding is None or amount <= binding - spent:
            remaining = "no cap applied" if binding is None else f"{binding - spent} of {binding} was unspent"
            self._add_violation(event, f"refuses {amount} on {_name(account)}, although {remaining}")
        if (cap, event.facts["spent"]) != (binding, spent):
            claimed_spent = event.facts["spent"]
            self._add_violation(
                event,
                f"records {claimed_spent} of {cap} as spent on {_name(account)}, but {spent} of {binding} was spent",
            )

    def _hold(self, event: RecordedEvent, hold: str, legs: list[list[Any]]) -> None:
        self.started[hold] += 1
        if self.started[hold] > 1:
            self._add_violation(event, f"starts {hold} for the second time")
        if legs:
            self.open[hold] = legs
        for scope, window, unit, cap, amount in legs:
            account = (scope, window, unit)
            balance = self.accounts[account]
            if not balance.by_person:
                balance.cap = self.planned.get(account, cap)
            balance.held += amount
            if balance.cap is not None and balance.total > balance.cap:
                self._add_violation(event, f"brings {_name(account)} to {balance.total} of {balance.cap}")

    def _settle(self, event: RecordedEvent, hold: str, charge: dict[str, Any] | None) -> None:
        self.settled[hold] += 1
        if self.settled[hold] > 1:
            self._add_violation(event, f"settles {hold} for the second time")
            return
        if hold not in self.started:
            self._add_violation(event, f"settles {hold}, which was never started")
            return
        legs = self.open.pop(hold, [])
        if charge is None:
            if legs:
                self.open[hold] = legs
            return
        self._charge(event, hold, legs, charge)

    def _release(self, event: RecordedEvent, hold: str) -> None:
        """Release what a question held, once and without a charge."""
        if hold not in self.open:
            self._add_violation(event, f"releases {hold}, which holds nothing")
        for scope, window, unit, _, amount in self.open.pop(hold, []):
            self.accounts[scope, window, unit].held -= amount

    def _charge(self, event: RecordedEvent, hold: str, legs: list[list[Any]], charge: dict[str, Any]) -> None:
        if hold not in self.carved:
            self.charged[hold] = charge.get("usd", 0)
        for scope, window, unit, _, amount in legs:
            balance = self.accounts[scope, window, unit]
            balance.held -= amount
            balance.spent += charge.get(unit, 0)
        for scope, window, unit, amount in charge.get("overruns", []):
            self.accounts[scope, window, unit].overrun += amount
        for scope, window, unit, _, _ in legs:
            self._check_cap(event, (scope, window, unit))

    def _check_cap(self, event: RecordedEvent, account: Account) -> None:
        balance = self.accounts[account]
        if balance.cap is not None and balance.total > balance.cap + balance.overrun:
            beyond = f"{balance.total} of {balance.cap} with {balance.overrun} recorded as overrun"
            self._add_violation(event, f"leaves {_name(account)} at {beyond}")

    def _add_violation(self, event: RecordedEvent, text: str) -> None:
        self.violations.append(f"The {event} {text}.")

    def compare(self, contents: StoreContents, *, finished: bool) -> list[str]:
        """Compare these books with the store's projected tables."""
        wrong = [f"The hold {hold} was never settled." for hold in self.open] if finished else []
        computed = {account: Sums(book.spent, book.held, book.overrun) for account, book in self.accounts.items()}
        for account in sorted({*computed, *contents.budgets}):
            computed_sums, stored_sums = (
                computed.get(account, Sums(0, 0, 0)),
                contents.budgets.get(account, Sums(0, 0, 0)),
            )
            if computed_sums != stored_sums:
                wrong.append(f"The table has {stored_sums} for {_name(account)}, but the events yield {computed_sums}.")
        wrong += _unequal("holds", contents.holds, self.open)
        wrong += _unequal("spends", contents.spends, self.charged)
        return wrong


def _unequal(table: str, stored: Mapping[str, Any], computed: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*stored, *computed}):
        stored_value, computed_value = stored.get(key, "nothing"), computed.get(key, "nothing")
        if stored_value != computed_value:
            yield f"The table of {table} has {stored_value} for {key}, but the events yield {computed_value}."


def _account(facts: Mapping[str, Any]) -> Account:
    return (facts["scope"], facts["window"], facts["unit"])


def _name(account: Account) -> str:
    scope, window, unit = account
    unit = "micro-dollars" if unit == "usd" else unit
    return f"{scope} {window} ({unit})" if window else f"{scope} ({unit})"


# Load of the machine: a process that measures how late it wakes up.

BEAT_SECONDS: Final = 0.01
MIN_STALL: Final = SECOND // 100
"""Shorter stalls do not count."""
HOPS: Final = 4
"""A halt wakes several processes and threads in turn; each may stall."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the metronome could not run, in microseconds of this machine's clock."""

    since: int
    until: int


@dataclass(frozen=True, slots=True)
class LateFinding:
    """A late event: when it became possible, how late it was, and the delay that is allowed."""

    sentence: str
    since: int = 0
    by: int = 0
    allowed: int = SECOND


def metronome(pipe: Pipe) -> None:
    """Wake up regularly until the drill ends it, then send the stalls."""
    stalls: list[Stall] = []
    while not pipe.poll(0):
        before = time.monotonic_ns()
        time.sleep(BEAT_SECONDS)
        late_by = (time.monotonic_ns() - before) // 1000 - round(BEAT_SECONDS * SECOND)
        if late_by >= MIN_STALL:
            now = time.time_ns() // 1000
            stalls.append(Stall(now - late_by, now))
    pipe.recv()
    pipe.send(stalls)


def split_lateness(findings: Sequence[LateFinding], stalls: Sequence[Stall]) -> tuple[list[str], list[str]]:
    """Split findings of lateness into violations, and those that a busy machine may have caused."""
    violations: list[str] = []
    uncertain: list[str] = []
    for finding in findings:
        end = finding.since + finding.allowed + finding.by
        busy = sum(max(0, min(stall.until, end) - max(stall.since, finding.since)) for stall in stalls)
        (uncertain if 0 < finding.by <= busy * HOPS else violations).append(finding.sentence)
    return violations, uncertain
