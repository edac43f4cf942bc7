"""The independent checker: it reads a store with plain SQL and does its own arithmetic.

It shares nothing with the code that it checks: no event types, projections or money rules. It knows only the tables,
the JSON of the facts, and the promises. A metronome tells late events from a machine that is too busy to judge.
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
    """List what is wrong with the order, the owners and the money of a store, as sentences.

    `planned` are the caps in force, where the events do not say. With `finished`, every hold must be settled.
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
        before = last.get(event.stream)
        expected = before.seq + 1 if before else 1
        if event.seq != expected:
            wrong.append(f"The {event} stands in place of number {expected}.")
        if before and event.at < before.at:
            wrong.append(f"The {event} is older than the one before it.")
        last[event.stream] = event
    ends = {stream: event.seq for stream, event in last.items()}
    for stream in sorted({*ends, *contents.heads}):
        if ends.get(stream) != contents.heads.get(stream):
            head, end = contents.heads.get(stream), ends.get(stream)
            wrong.append(f"The stream {stream} ends with number {end}, but its head says {head}.")
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
    settled = [event.facts for event in events if event.kind == "call_settled" and "charge" in event.facts]
    charges: dict[str, int] = {facts["call"]: facts["charge"].get("usd", 0) for facts in settled}
    wrong = [f"The call {call} ran {len(asked)} times." for call, asked in bills.items() if len(asked) > 1]
    for call, asked in bills.items():
        if call not in charges:
            wrong.append(f"The call {call} ran for {asked[0]} and was never charged.")
        elif charges[call] < asked[0]:
            wrong.append(f"The call {call} ran for {asked[0]} and was charged {charges[call]}.")
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
    """The checker's own bookkeeping: it checks every account at each event that changes it."""

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
        self._check_within(event, account)

    def _cost_cap_reached(self, event: RecordedEvent) -> None:
        """A refusal is right only if the amount exceeds what is unspent, regardless of holds."""
        account = _account(event.facts)
        cap, amount = event.facts["cap"], event.facts["amount"]
        balance = self.accounts[account]
        binding, spent = balance.cap if balance.by_person else self.planned.get(account, cap), balance.spent
        if binding is None or amount <= binding - spent:
            left = "no cap there" if binding is None else f"{binding - spent} left of {binding}"
            self._add_violation(event, f"refuses {amount} on {_name(account)}, though there was {left}")
        if (cap, event.facts["spent"]) != (binding, spent):
            claimed = event.facts["spent"]
            self._add_violation(
                event, f"says {claimed} of {cap} spent on {_name(account)}, where it was {spent} of {binding}"
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
            self._check_within(event, (scope, window, unit))

    def _check_within(self, event: RecordedEvent, account: Account) -> None:
        balance = self.accounts[account]
        if balance.cap is not None and balance.total > balance.cap + balance.overrun:
            beyond = f"{balance.total} of {balance.cap} with {balance.overrun} recorded as overrun"
            self._add_violation(event, f"leaves {_name(account)} at {beyond}")

    def _add_violation(self, event: RecordedEvent, wrong: str) -> None:
        self.violations.append(f"The {event} {wrong}.")

    def compare(self, contents: StoreContents, *, finished: bool) -> list[str]:
        """Compare these books with the store's projected tables."""
        wrong = [f"The hold {hold} was never settled." for hold in self.open] if finished else []
        own = {account: Sums(book.spent, book.held, book.overrun) for account, book in self.accounts.items()}
        for account in sorted({*own, *contents.budgets}):
            here, there = own.get(account, Sums(0, 0, 0)), contents.budgets.get(account, Sums(0, 0, 0))
            if here != there:
                wrong.append(f"For {_name(account)} the table has {there}; but the events make {here}.")
        wrong += _unequal("holds", contents.holds, self.open)
        wrong += _unequal("spends", contents.spends, self.charged)
        return wrong


def _unequal(table: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*there, *here}):
        kept, made = there.get(key, "nothing"), here.get(key, "nothing")
        if kept != made:
            yield f"The table of {table} has {kept} for {key}, but the events make {made}."


def _account(facts: Mapping[str, Any]) -> Account:
    return (facts["scope"], facts["window"], facts["unit"])


def _name(account: Account) -> str:
    scope, window, unit = account
    unit = "micro-dollars" if unit == "usd" else unit
    return f"{scope} {window} ({unit})" if window else f"{scope} ({unit})"


# How busy the machine is: a process that measures how late it wakes up.

BEAT_SECONDS: Final = 0.01
NOTED: Final = SECOND // 100
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
    """Something that was late: since when it could have happened, by how much, and what was allowed."""

    sentence: str
    since: int = 0
    by: int = 0
    allowed: int = SECOND


def metronome(pipe: Pipe) -> None:
    """Wake up regularly until told to end, then send the stalls."""
    stalls: list[Stall] = []
    while not pipe.poll(0):
        before = time.monotonic_ns()
        time.sleep(BEAT_SECONDS)
        late = (time.monotonic_ns() - before) // 1000 - round(BEAT_SECONDS * SECOND)
        if late >= NOTED:
            now = time.time_ns() // 1000
            stalls.append(Stall(now - late, now))
    pipe.recv()
    pipe.send(stalls)


def split_lateness(found: Sequence[LateFinding], stalls: Sequence[Stall]) -> tuple[list[str], list[str]]:
    """Split lateness into violations, and what a busy machine may have caused."""
    violations: list[str] = []
    unsure: list[str] = []
    for each in found:
        end = each.since + each.allowed + each.by
        busy = sum(max(0, min(stall.until, end) - max(stall.since, each.since)) for stall in stalls)
        (unsure if 0 < each.by <= busy * HOPS else violations).append(each.sentence)
    return violations, unsure
