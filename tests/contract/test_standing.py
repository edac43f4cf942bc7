"""What stands over a call is found in every store by what the call is, among all that ever stood."""

import asyncio
from collections.abc import Sequence

import pytest

from halter.core.clock import DAY
from halter.core.events import RuleEnded, RuleMade
from halter.core.ids import FLEET
from halter.core.ports import Draft, Write
from halter.core.rows import RuleRow
from halter.guard.approvals import (
    AnyCondition,
    EachArgument,
    LegacyWords,
    RuleMatcher,
    SameArguments,
    encode_matcher,
    make_equals_condition,
    read_rules,
)
from halter.guard.halts import cancel, halt, read_halts, resume
from halter.journal.store import JournalStore

ODD = ("agent:it's", 'agent:"quoted"', "agent:back\\slash", "agent:ä ü 雪", "agent:%", "agent:[1, 2]", "agent:")
INK_DIGEST = "44a6844ad8cec7ea29252af978bb51a52dd840d8f56e3a6510d00be62d866521"


async def test_halts_are_found_by_their_scopes(store: JournalStore) -> None:
    await store.commit(halt(FLEET, "ada", "a", "why"))
    await store.commit(halt("agent:desk", "ada", "b"))
    await store.commit(resume("agent:desk", "ada", "c"))
    await store.commit(cancel("old", "ada", "d"))
    halts = await read_halts(store, ["agent:desk", FLEET, "session:s", FLEET])
    assert {scope: (row.halted, row.reason) for scope, row in halts.items()} == {
        FLEET: (1, "why"),
        "agent:desk": (0, ""),
    }
    assert [row.cancels for row in (await read_halts(store, ["session:old"])).values()] == [1]
    assert not await read_halts(store, [])


@pytest.mark.parametrize("scope", ODD)
async def test_a_halt_is_found_whatever_its_scope_is_called(store: JournalStore, scope: str) -> None:
    await store.commit(halt(scope, "ada", "a"))
    await store.commit(halt("agent:other", "ada", "b"))
    assert [*await read_halts(store, [scope, "fleet"])] == [scope]


async def test_halts_of_thousands_of_scopes_are_asked_for_at_once(store: JournalStore) -> None:
    await store.commit(halt("session:s1999", "ada", "a"))
    scopes = [f"session:s{number}" for number in range(4000)]
    results = await asyncio.gather(*(read_halts(store, scopes) for _ in range(3)))
    assert [[*each] for each in results] == [["session:s1999"]] * 3


async def make_rule(
    store: JournalStore, rule: str, tool: str, owner: str, matcher: RuleMatcher, lasts: int = DAY
) -> None:
    event = RuleMade(
        rule=rule,
        tool=tool,
        scope="agent" if owner == "desk" else "session" if owner else "fleet",
        owner=owner,
        matcher=encode_matcher(matcher),
        keys=("item",),
        by="ada",
        expires_at=await store.now() + lasts,
    )
    await store.commit(Write(FLEET, rule, lambda _: [Draft(event)], [(RuleRow, rule)]))


async def list_rules(store: JournalStore, session: str = "s") -> Sequence[str]:
    rows = await read_rules(store, "order", INK_DIGEST, session, "desk", await store.now())
    return [row.rule for row in rows]


async def test_rules_are_found_by_tool_owner_and_arguments(store: JournalStore) -> None:
    anything = EachArgument((AnyCondition("item"),))
    for rule, tool, owner, matcher in (
        ("1-agent", "order", "desk", anything),
        ("2-session", "order", "s", anything),
        ("3-fleet", "order", "", anything),
        ("4-same", "order", "desk", SameArguments(INK_DIGEST)),
        ("5-other-arguments", "order", "desk", SameArguments("0" * 64)),
        ("6-other-tool", "pay", "desk", anything),
        ("7-other-session", "order", "another", anything),
        ("7-words", "order", "desk", LegacyWords("item", ("ink",))),
    ):
        await make_rule(store, rule, tool, owner, matcher)
    long = EachArgument(tuple(make_equals_condition(f"key-{number}", "雪" * 200) for number in range(50)))
    await make_rule(store, "7-long", "order", "desk", long)
    await make_rule(store, "8-expired", "order", "desk", anything, lasts=-1)
    await make_rule(store, "9-ended", "order", "desk", anything)
    event = RuleEnded(rule="9-ended", by="ada")
    await store.commit(Write(FLEET, "end", lambda _: [Draft(event)], [(RuleRow, "9-ended")]))
    assert await list_rules(store) == ["1-agent", "2-session", "3-fleet", "4-same", "7-long", "7-words"]
    assert await list_rules(store, "another") == [
        "1-agent",
        "3-fleet",
        "4-same",
        "7-long",
        "7-other-session",
        "7-words",
    ]
