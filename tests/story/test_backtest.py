"""A policy tried on the past: recorded sessions, judged again under another policy by the real judges."""

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from library_bench import PRICED, Bench
from loops import calls, says, used
from typer.testing import CliRunner, Result

from halter import Agent
from halter.cli.commands import build_command_tree
from halter.core.ids import SortableIds
from halter.core.money import Cap, micros_to_usd
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.journal.open import open_store
from halter.models.scripted import ScriptLine
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.backtest import ERASED, MASKED, Backtest, PolicyChange, backtest, measure_use
from halter.spec.agent import Phase
from halter.spec.policy import Policy, ToolRule
from tests.story.clerks import environment

CENT = 10_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def equip(agent: Agent) -> Agent:
    @agent.tool(level="SAFE", effect="read")
    async def look(city: str) -> str:
        """Look at a city."""
        return f"rain in {city}"

    @agent.tool(level="CONTROLLED")
    async def send(to: str) -> str:
        """Send a letter."""
        return f"sent to {to}"

    @agent.tool(level="PRIVILEGED")
    async def pay(amount: int) -> str:
        """Pay an amount."""
        return f"paid {amount}"

    return agent


WORK: Sequence[ScriptLine] = (
    calls(("look", {"city": "Oslo"}), usage=used(1000, 100)),
    calls(("send", {"to": "ada"}), ("send", {"to": "bo"}), usage=used(2000, 100)),
    says("Done.", usage=used(3000, 50)),
)


async def run(bench: Bench, *lines: ScriptLine, brake: str = "off", **more: Any) -> str:
    rules = more.pop("rules", {})
    policy = {"policy": {"provenance": brake, "tools": rules}}
    agent = equip(bench.agent(*(lines or WORK), **{"fleet": PRICED, "policy": policy, **more}))
    return (await agent.run("Do the rounds.")).session


async def answer_all(bench: Bench, verdict: Any) -> None:
    """A person who gives every question the same answer."""
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    while True:
        for each in await list_pending_decisions(store, bench.clock.now()):
            await store.commit(answer_decision(each, verdict, "ada", each.decision))
        await asyncio.sleep(0.01)


async def run_backtest(bench: Bench, change: PolicyChange = lambda recorded: recorded, **more: Any) -> Backtest:
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    try:
        return await store.study(lambda view: backtest(view, "desk", change, **more))
    finally:
        await store.close()


def with_cap(usd: int) -> PolicyChange:
    def change(recorded: ResolvedPolicy) -> ResolvedPolicy:
        caps = msgspec.structs.replace(recorded.caps, session=Cap(usd))
        return msgspec.structs.replace(recorded, caps=caps)

    return change


def with_rules(**tools: ToolRule) -> PolicyChange:
    def change(recorded: ResolvedPolicy) -> ResolvedPolicy:
        return msgspec.structs.replace(recorded, policies=(*recorded.policies[:-1], Policy(tools=tools)))

    return change


async def test_the_policy_that_was_recorded_changes_nothing(bench: Bench) -> None:
    await run(bench)
    await run(bench, calls("nothing_like_it", usage=used()), *WORK)
    await run(bench, *WORK[:2], *WORK, *WORK, max_cost_usd=0.008)
    await run(bench, *WORK, rules={"send": {"rate": "1/hour"}})
    person = asyncio.create_task(answer_all(bench, "approve"))
    await run(bench, calls(("pay", {"amount": 3}), usage=used()), says("Paid.", usage=used()))
    person.cancel()
    person = asyncio.create_task(answer_all(bench, "deny"))
    await run(bench, calls(("pay", {"amount": 4}), usage=used()), says("Not paid.", usage=used()))
    person.cancel()
    backtest = await run_backtest(bench)
    assert (backtest.sessions, backtest.lines, backtest.unjudged, backtest.not_spent) == (6, (), {}, 0)
    assert backtest.decisions > 20
    refused = {fact["outcome"] for fact in bench.facts("request_refused", "call_refused")}
    assert refused == {"unknown_tool", "cost_cap_reached", "rate_limited", "approval_denied"}


async def test_a_lower_cap_tells_when_it_would_have_been_met_and_what_was_not_spent(bench: Bench) -> None:
    session = await run(bench)
    whole = await run_backtest(bench, with_cap(100 * CENT))
    assert whole.lines == ()
    backtest = await run_backtest(bench, with_cap(CENT // 2))
    (line,) = [line for line in backtest.lines if not line.after]
    assert (line.session, line.kind, line.then, line.now) == (session, "request", "allowed", "refused")
    assert line.scope == f"session:{session}"
    assert backtest.stopped == 1
    assert backtest.not_spent > 0
    assert line.not_spent_usd == micros_to_usd(backtest.not_spent)
    assert backtest.after > 0


async def test_a_tool_that_is_asked_about_more_or_less_is_named_and_looser_ones_come_first(bench: Bench) -> None:
    await run(bench)
    person = asyncio.create_task(answer_all(bench, "approve"))
    await run(bench, calls(("pay", {"amount": 3}), usage=used()), says("Paid.", usage=used()))
    person.cancel()
    backtest = await run_backtest(bench, with_rules(send=ToolRule(approval="always")))
    assert backtest.changed == {"allowed → asked": 2}
    assert (backtest.loosened, backtest.diverged) == (0, 0)
    found = await run_backtest(
        bench, lambda recorded: msgspec.structs.replace(recorded, disabled=("send",), mode="FULL")
    )
    assert found.changed["allowed → refused"] >= 1
    assert [line.loosened for line in found.lines] == sorted((line.loosened for line in found.lines), reverse=True)


async def test_what_a_policy_no_longer_grants_is_refused_and_what_follows_is_counted_apart(bench: Bench) -> None:
    await run(bench)
    backtest = await run_backtest(
        bench, lambda recorded: msgspec.structs.replace(recorded, phases=(Phase(recorded.phases[0].name, ("send",)),))
    )
    (first,) = [line for line in backtest.lines if not line.after]
    assert (first.name, first.then, first.now) == ("look", "allowed", "refused")
    assert backtest.diverged == 1


async def test_a_rate_is_replayed_with_its_attempts(bench: Bench) -> None:
    for _ in range(3):
        await run(bench)
    backtest = await run_backtest(bench, with_rules(send=ToolRule(rate=3)))
    refused = [line for line in backtest.lines if line.now == "refused"]
    assert [line.name for line in refused] == ["send"] * 3
    assert "limit is 3" in refused[0].sentence


async def test_an_answer_that_came_too_late_for_a_shorter_expiry_counts_as_refused(bench: Bench) -> None:
    person = asyncio.create_task(answer_all(bench, "approve"))
    await run(bench, calls(("pay", {"amount": 3}), usage=used()), says("Paid.", usage=used()))
    person.cancel()
    backtest = await run_backtest(bench, lambda recorded: msgspec.structs.replace(recorded, approval_expiry=1))
    assert [(line.name, line.then, line.now) for line in backtest.lines] == [("pay", "asked", "refused")]


async def test_what_the_injection_brake_asked_is_asked_again_and_no_more_where_it_is_off(bench: Bench) -> None:
    person = asyncio.create_task(answer_all(bench, "approve"))
    await run(bench, brake="ask")
    person.cancel()
    same = await run_backtest(bench)
    assert (same.lines, same.unjudged) == ((), {})
    off = Policy(provenance="off")
    backtest = await run_backtest(
        bench, lambda kept: msgspec.structs.replace(kept, policies=(*kept.policies[:-1], off))
    )
    assert backtest.changed == {"asked → allowed": 2}
    assert backtest.loosened == 2


async def test_what_was_loosened_is_counted_and_listed_however_much_else_has_changed(bench: Bench) -> None:
    person = asyncio.create_task(answer_all(bench, "approve"))
    await run(bench)
    await run(bench, brake="ask")
    person.cancel()
    policy = Policy(provenance="off", tools={"look": ToolRule(approval="always")})

    def change(resolved_policy: ResolvedPolicy) -> ResolvedPolicy:
        return msgspec.structs.replace(resolved_policy, policies=(*resolved_policy.policies[:-1], policy))

    backtest = await run_backtest(bench, change, max_lines=1)
    assert [(line.name, line.loosened) for line in backtest.lines] == [("send", True)]
    assert (backtest.differing, backtest.loosened, backtest.refused) == (4, 2, 0)


async def test_what_was_erased_or_masked_is_not_judged_and_says_why(bench: Bench) -> None:
    text = await run(bench)
    await run(bench, calls(("send", {"to": "sk-ant-" + "a1B2c3" * 12}), usage=used()), says("Sent.", usage=used()))
    masked = await run_backtest(bench, with_rules(send=ToolRule(approval="always")))
    assert (masked.unjudged, masked.changed) == ({MASKED: 1}, {"allowed → asked": 2})
    texts = ["erase", "--session", text, "--yes", "--store", str(bench.file)]
    result = await asyncio.to_thread(CliRunner().invoke, build_command_tree(), texts, env=environment(bench.folder))
    assert result.exit_code == 0, result.output
    erased = await run_backtest(bench, with_rules(send=ToolRule(approval="always")))
    assert (erased.unjudged, erased.changed) == ({ERASED: 3, MASKED: 1}, {})
    assert erased.decisions == masked.decisions - 3
    assert (await run_backtest(bench, with_cap(CENT // 2))).stopped == 2, "what they spent is known still"


async def test_calls_that_no_rule_names_are_counted_by_tool(bench: Bench) -> None:
    await run(bench)
    assert (await run_backtest(bench)).unnamed == {"send": 2, "look": 1}
    assert (await run_backtest(bench, with_rules(send=ToolRule(approval="always")))).unnamed == {"look": 1}


async def test_the_tightest_policy_that_was_measured_refuses_nothing(bench: Bench) -> None:
    for _ in range(3):
        await run(bench)
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    use = await store.study(lambda view: measure_use(view, "desk"))
    await store.close()
    assert use.attempts == {"look": 3, "send": 6}
    assert use.sessions == 3
    tight = with_rules(look=ToolRule(rate=3), send=ToolRule(rate=6))
    assert (await run_backtest(bench, tight)).lines == ()
    assert (await run_backtest(bench, with_rules(send=ToolRule(rate=5)))).changed == {"allowed → refused": 1}


async def record_fleet(bench: Bench, sessions: int) -> None:
    """Every second session sends one letter, every fifth is dear, and every tenth does both."""
    lines: list[ScriptLine] = []
    for number in range(sessions):
        dear = used(200_000, 100) if number % 5 == 0 else used(1000, 100)
        if number % 2 == 0:
            lines.append(calls(("send", {"to": f"person {number}"}), usage=used(1000, 100)))
        lines += [calls(("look", {"city": "Oslo"}), usage=dear), says("Done.", usage=used(1000, 10))]
    fields: dict[str, Any] = {"fleet": {**PRICED, "limits": {"max_cost_usd_per_day": 1000}}, "max_cost_usd": 5}
    fields["policy"] = {"limits": {"max_cost_usd_per_day": 1000}, "policy": {"provenance": "off"}}
    async with equip(bench.agent(*lines, **fields)) as agent:
        for _ in range(sessions):
            assert (await agent.run("Do the rounds.")).ok


async def check_known_answer(bench: Bench, sessions: int) -> None:
    await record_fleet(bench, sessions)
    assert (await run_backtest(bench)).lines == ()
    backtest = await run_backtest(bench, with_rules(send=ToolRule(approval="always")))
    assert backtest.changed == {"allowed → asked": sessions // 2}
    refused = await run_backtest(bench, lambda recorded: msgspec.structs.replace(recorded, disabled=("send",)))
    assert (refused.changed, refused.diverged) == ({"allowed → refused": sessions // 2}, sessions // 2)
    # A dear answer costs twenty cents, and the request after it does not fit any more.
    cheap = await run_backtest(bench, with_cap(15 * CENT))
    assert cheap.stopped == sessions // 5
    assert {line.scope for line in cheap.lines} == {f"session:{line.session}" for line in cheap.lines}
    assert cheap.not_spent >= sessions // 5 * 1000


async def test_the_answer_over_a_fleet_of_sessions_is_the_known_one(bench: Bench) -> None:
    await check_known_answer(bench, 20)


@pytest.mark.soak
async def test_the_answer_over_two_hundred_sessions_is_the_known_one(bench: Bench) -> None:
    await check_known_answer(bench, 200)


def test_a_person_tries_a_policy_before_it_is_applied(bench: Bench) -> None:
    asyncio.run(record_fleet(bench, 10))
    base = f"--agent desk --store {bench.file}"

    def types(line: str) -> Result:
        return CliRunner().invoke(build_command_tree(), shlex.split(f"{line} {base}"), env=environment(bench.folder))

    assert "2 sessions" in types("policy backtest --cap 0.15").stdout
    assert types("policy backtest --cap 4 --fail-on changed").exit_code == 0
    assert types("policy backtest --cap 0.15 --fail-on changed").exit_code == 1
    file = bench.folder / "agent.yaml"
    file.write_text("name: desk\npolicy:\n  disabled: [send]\n")
    result = types(f"policy backtest --policy {file} --json")
    assert json.loads(result.stdout)["changed"]["allowed → refused"] == 5
    assert types(f"policy backtest --policy {file} --fail-on loosened").exit_code == 0
    file.write_text("name: desk\npolicy:\n  tools: {send: {approval: always}}\n")
    assert types(f"policy backtest --policy {file} --fail-on loosened").exit_code == 0
    assert "0 would have been refused" in types("policy suggest").stdout
    nothing = types("policy backtest")
    assert (nothing.exit_code, "Nothing to test: give a policy, a cap or a revision" in nothing.output) == (2, True)
    typo = CliRunner().invoke(
        build_command_tree(),
        shlex.split(f"policy backtest --agent dsek --cap 1 --store {bench.file}"),
        env=environment(bench.folder),
    )
    assert (typo.exit_code, "No session of 'dsek'" in typo.output) == (2, True)
    unknown = types("policy backtest --against ffff")
    assert (unknown.exit_code, "'ffff' does not match exactly one revision of desk. Revisions: " in unknown.output) == (
        2,
        True,
    )


def test_a_policy_that_asks_less_than_the_recorded_one_fails_a_check_for_loosened_ones(bench: Bench) -> None:
    async def record() -> None:
        person = asyncio.create_task(answer_all(bench, "approve"))
        await run(bench, rules={"send": {"approval": "always"}})
        person.cancel()

    asyncio.run(record())
    file = bench.folder / "agent.yaml"
    line = f"policy backtest --policy {file} --agent desk --store {bench.file} --fail-on loosened"
    for tools, exit_code in (("{send: {approval: always}}", 0), ("{}", 1)):
        file.write_text(f"name: desk\npolicy:\n  provenance: off\n  tools: {tools}\n")
        result = CliRunner().invoke(build_command_tree(), shlex.split(line), env=environment(bench.folder))
        assert result.exit_code == exit_code, result.output


def test_two_policies_are_compared_before_one_is_chosen(tmp_path: Path) -> None:
    for name, cap in (("one", 2), ("other", 5)):
        (tmp_path / name).write_text(f"limits:\n  max_cost_usd_per_day: {cap}\n")

    def types(*words: str) -> Result:
        return CliRunner().invoke(build_command_tree(), ["policy", "diff", *words], env=environment(tmp_path))

    text, output = str(tmp_path / "one"), str(tmp_path / "other")
    assert "LOOSER" in types(text, output).stdout
    assert types(text, output, "--fail-on", "loosened").exit_code == 1
    assert types(output, text, "--fail-on", "loosened").exit_code == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("policy: {tools: {shell: {rate: 9/hour}}}", "policy: {tools: {shell: {rate: 12/hour}}}"),
        ("policy: {levels: {SAFE: {approval: always}}}", "mode: SEMI"),
        ("mode: SEMI", "mode: FULL"),
        ("policy: {quiet_hours: {start: '22:00', end: '07:00'}}", "mode: SEMI"),
    ],
)
def test_a_looser_rule_or_mode_of_the_second_policy_is_found_and_a_stricter_one_is_none(
    tmp_path: Path, before: str, after: str
) -> None:
    (tmp_path / "before").write_text(f"{before}\n")
    (tmp_path / "after").write_text(f"{after}\n")
    files = [str(tmp_path / "before"), str(tmp_path / "after")]
    for words, exit_code in ((files, 1), (files[::-1], 0)):
        line = ["policy", "diff", *words, "--fail-on", "loosened"]
        assert CliRunner().invoke(build_command_tree(), line, env=environment(tmp_path)).exit_code == exit_code
