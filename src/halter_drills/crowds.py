"""Who spends in the race, drawn from a number: sessions, their calls, and the caps that are too small for them."""

import random
from typing import Final

from halter.core.clock import DAY, HOUR, SECOND
from halter.core.limits import Cap
from halter.core.money import Account as Spent
from halter.core.ports import Write
from halter.core.windows import Per, window_at
from halter.guard.purse import change_cap
from halter_drills.checker import Account
from halter_drills.spenders import Crowd, Member, Round

CENT: Final = 10_000
AGENTS: Final = ("ada", "bob", "cyd")
ROOTS: Final = 16
CHILDREN: Final = 4
MANY: Final = 200
ONE_CAP: Final = 1000 * CENT


def quarrel(seed: int, *, latency: int, tick: int, lease: int) -> Crowd:
    """Draw 20 sessions of three agents whose wishes exceed their caps; the last ones are sub-sessions of the first."""
    chance = random.Random(f"quarrel {seed}")
    roots = [_member(f"s{number}", chance, latency) for number in range(ROOTS)]
    parents = [Member(m.session, m.agent, 100 * CENT, m.rounds, m.lanes) for m in roots[: CHILDREN // 2]]
    young = [_child(parents[number % 2], number, chance, latency) for number in range(CHILDREN)]
    return Crowd(
        members=(*parents, *roots[len(parents) :], *young),
        agent_caps=(Cap(chance.randint(40, 150) * CENT, chance.choice(("hour", "day"))),),
        fleet_caps=(Cap(chance.randint(100, 300) * CENT, "day"), Cap(None, "month")),
        tick=tick,
        lease=lease,
    )


def _member(session: str, chance: random.Random, latency: int) -> Member:
    cap = chance.choice((chance.randint(5, 25) * CENT, 100 * CENT))
    calls = _calls(session, chance.randint(3, 6), latency, chance)
    return Member(session, chance.choice(AGENTS), cap, calls, lanes=chance.choice((1, 1, 2)))


def _child(parent: Member, number: int, chance: random.Random, latency: int) -> Member:
    session = f"{parent.session}-{number}"
    cap = chance.randint(5, 60) * CENT
    return Member(session, parent.agent, cap, _calls(session, 3, latency, chance), parent=parent.session)


def _calls(session: str, count: int, latency: int, chance: random.Random) -> tuple[Round, ...]:
    """Draw calls whose true cost is anything up to what is held for them."""
    drawn: list[Round] = []
    for number in range(count):
        amount = chance.randint(1, 10 * CENT)
        truth = chance.choice((0, amount, chance.randint(0, amount)))
        drawn.append(Round(f"{session}/{number}", amount, truth, chance.randrange(1, latency)))
    return tuple(drawn)


def patience(seed: int, *, latency: int, tick: int, lease: int) -> Crowd:
    """Draw 200 sessions on one cap. Each call costs a quarter of what is held for it; together they want too much."""
    chance = random.Random(f"patience {seed}")
    return Crowd(
        members=tuple(_patient(f"p{number}", chance, latency) for number in range(MANY)),
        agent_caps=(),
        fleet_caps=(Cap(ONE_CAP, "day"),),
        tick=tick,
        lease=lease,
    )


def _patient(session: str, chance: random.Random, latency: int) -> Member:
    amounts = [4 * chance.randint(2 * CENT, 10 * CENT) for _ in range(2)]
    calls = [
        Round(f"{session}/{number}", amount, amount // 4, chance.randrange(1, latency))
        for number, amount in enumerate(amounts)
    ]
    return Member(session, "ada", None, tuple(calls))


def planned(crowd: Crowd, since: int) -> dict[Account, int | None]:
    """Tell every cap that the crowd was to keep, in all windows of a day from that moment on."""
    caps: dict[Account, int | None] = {(f"session:{m.session}", "", "usd"): m.cap for m in crowd.members}
    for scope, shared in _shared(crowd):
        for window in _windows(shared.per, since):
            caps[scope, window, "usd"] = shared.max_cost_usd
    return caps


def cap_change(crowd: Crowd, now: int, chance: random.Random, number: int) -> Write:
    """Draw a cap that a person raises or lowers, of a scope in its present window or of a session."""
    scoped = [(f"session:{m.session}", "") for m in crowd.members]
    scoped += [(scope, window_at(shared.per, now)) for scope, shared in _shared(crowd)] * 3
    scope, window = chance.choice(scoped)
    cap = chance.choice((chance.randrange(50 * CENT), chance.randrange(400 * CENT), 400 * CENT))
    return change_cap(Spent(scope, window, "usd"), cap, "ada", f"change {number}")


def _shared(crowd: Crowd) -> list[tuple[str, Cap]]:
    agents = [(f"agent:{name}", cap) for name in AGENTS for cap in crowd.agent_caps]
    return agents + [("fleet", cap) for cap in crowd.fleet_caps]


def _windows(per: Per, since: int) -> set[str]:
    return {window_at(per, since + ahead) for ahead in range(0, DAY + SECOND, HOUR)}
