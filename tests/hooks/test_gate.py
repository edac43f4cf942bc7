"""The tool calls of another program pass the guard: admitted before, settled after, journaled both times."""

import asyncio
import json
from pathlib import Path

import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import CallSettled, SessionStarted
from halter.guard.approvals import approve_edited
from halter.guard.halts import cancel, halt, resume
from halter.hooks.protocol import HookReply
from halter.hooks.registry import DEFAULT_WAIT_SECONDS
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.hooks.desks import AGENT, PERSON, SECRET, SESSION, bash, bash_done, event, open_desk, reason, verdict

ID = f"{AGENT}-{SESSION}"
FORCE = "git push --force"


async def test_a_harmless_call_is_in_the_journal_before_and_after(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        assert (await desk.ask(bash("ls -la"))).out == b"{}"
        assert await desk.kinds() == ["session_started", "call_started"]
        assert (await desk.ask(bash_done("ls -la", out="made.txt"))).out == b"{}"
        made = await desk.receipt()
        assert [(line.name, line.outcome) for line in made.calls] == [("Bash", "ok")]
        first = (await desk.events())[0].event
        assert isinstance(first, SessionStarted)
        assert (first.kind, first.agent) == ("hooked", AGENT)


@pytest.mark.parametrize("jump", [0, 2 * HOUR, -2 * HOUR])
async def test_a_call_of_seconds_has_a_duration_of_seconds(world: World, tmp_path: Path, jump: int) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("ls -la"))
        await world.advance(3 * SECOND)
        world.clock.set_ahead(jump)
        await desk.ask(bash_done("ls -la", out="made.txt"))
        (settled,) = [stored.event for stored in await desk.events() if isinstance(stored.event, CallSettled)]
        assert settled.duration_ms == {0: 3_000, 2 * HOUR: 7_203_000, -2 * HOUR: 0}[jump]


async def test_a_sweep_leaves_a_session_that_waits_for_a_person_to_its_program(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, "policy: {approval_expiry: 3d}\n") as desk:
        await desk.ask(bash(FORCE, "t1"), attended=False)
        await desk.ask(event("SessionEnd", reason="other"))
        await world.advance(DAY + HOUR)
        await desk.gate.sweep()
        assert (await desk.kinds())[-1] == "session_parked"
        await desk.decide("approve")
        assert verdict(await desk.ask(bash(FORCE, "t1"), attended=False)) == "allow"


async def test_a_session_whose_server_was_killed_while_a_call_waited_is_parked(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, "policy: {approval_expiry: 3d}\n") as desk:
        await desk.ask(bash(FORCE, "t1"), attended=False)
        await world.advance(DAY + HOUR)
        await desk.restarted().sweep()
        assert (await desk.kinds())[-1] == "session_parked"
        await desk.decide("approve")
        assert verdict(await desk.ask(bash(FORCE, "t1"), attended=False)) == "allow"


async def test_one_session_of_the_program_is_one_session(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("ls", "t1"))
        await desk.ask(bash("pwd", "t2", agent_id="sub"))
        await desk.ask(bash("ls", "t1", session_id="other"))
        assert len(await desk.events()) == 3
        assert len(await desk.events(f"{AGENT}-other")) == 2


async def test_a_call_of_high_risk_waits_for_a_person_and_runs_once_a_day_later(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, "policy: {approval_expiry: 3d}\n") as desk:
        reply = await desk.ask(bash(FORCE, "t1"), attended=False)
        assert verdict(reply) == "defer"
        assert f"pending decision {ID}.t1/approval" in reason(reply)
        await desk.ask(event("SessionEnd", reason="other"))
        await world.advance(DAY)
        desk.restarted()
        await desk.decide("approve")
        # It is resumed: the same call comes again under the same id.
        assert verdict(await desk.ask(bash(FORCE, "t1"), attended=False)) == "allow"
        assert verdict(await desk.ask(bash(FORCE, "t1"), attended=False)) == "deny"
        assert (await desk.kinds()).count("call_started") == 1
        await desk.ask(bash_done(FORCE, "t1"))
        await desk.ask(event("SessionEnd", reason="other"))
        assert (await desk.receipt()).state == "COMPLETED"


async def test_a_pending_call_is_repeated_under_another_id_and_runs_once(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        reply = await desk.ask(bash(FORCE, "t1"))
        assert (verdict(reply), len(await desk.waiting())) == ("deny", 1)
        assert "repeat the same call" in reason(reply)
        assert verdict(await desk.ask(bash(FORCE, "t2"))) == "deny"
        assert len(await desk.waiting()) == 1
        await desk.decide("approve")
        desk.restarted()
        assert verdict(await desk.ask(bash(FORCE, "t3"))) == "allow"
        # The approval is used up: the next one is a new question.
        assert verdict(await desk.ask(bash(FORCE, "t4"))) == "deny"
        assert len(await desk.waiting()) == 1
        await desk.ask(bash_done(FORCE, "t3"))
        assert [line.outcome for line in (await desk.receipt()).calls if line.name == "Bash"] == ["ok"]


async def test_of_identical_calls_at_the_same_time_one_approval_lets_one_run(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        await desk.decide("approve")
        replies = await asyncio.gather(*(desk.ask(bash(FORCE, f"u{number}")) for number in range(5)))
        assert sorted(map(verdict, replies)) == ["allow", "deny", "deny", "deny", "deny"]
        assert (await desk.kinds()).count("call_started") == 1


@pytest.mark.parametrize(
    "other",
    [
        bash("git push --force origin main", "t2"),
        bash(FORCE, "t2", cwd="/home/ada/another"),
        bash(FORCE, "t2", session_id="other"),
    ],
    ids=["another command", "another folder", "another session"],
)
async def test_an_approval_counts_for_exactly_what_was_asked(world: World, tmp_path: Path, other: bytes) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        await desk.decide("approve")
        assert verdict(await desk.ask(other)) == "deny"
        assert len(await desk.waiting()) == 1


async def test_a_changed_policy_voids_an_approval(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        await desk.decide("approve")
        with (tmp_path / "hooks" / AGENT / "agent.yaml").open("a") as file:
            file.write("policy: {tools: {Bash: {rate: 3/hour}}}\n")
        assert verdict(await desk.ask(bash(FORCE, "t1"))) == "deny"
        assert "call_started" not in await desk.kinds()


async def test_a_denied_call_does_not_run(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        await desk.decide("deny")
        assert "denied this call" in reason(await desk.ask(bash(FORCE, "t2")))
        assert "call_started" not in await desk.kinds()


async def test_an_approval_that_comes_too_late_counts_no_more(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        await desk.decide("approve")
        await world.advance(25 * HOUR)
        assert "expired" in reason(await desk.ask(bash(FORCE, "t1")))
        assert "call_started" not in await desk.kinds()


async def test_the_hook_waits_a_while_for_the_decision(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, wait_seconds=60) as desk:
        asking = asyncio.ensure_future(desk.ask(bash(FORCE)))
        await world.advance(30 * SECOND)
        assert not asking.done()
        await desk.decide("approve")
        assert verdict(await asking) == "allow"


async def test_a_halt_ends_the_wait_for_a_decision(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, wait_seconds=60) as desk:
        asking = asyncio.ensure_future(desk.ask(bash(FORCE)))
        await world.advance(10 * SECOND)
        await desk.app.store.commit(halt("fleet", PERSON, "h1", "stop it"))
        await world.advance(3 * SECOND)
        assert asking.done()
        assert json.loads((await asking).out)["continue"] is False


async def test_identical_calls_that_wait_at_the_same_time_have_a_question_each(world: World, tmp_path: Path) -> None:
    """One of them, sent again under its own id, has the question that it had."""
    async with open_desk(world, tmp_path, wait_seconds=60) as desk:
        calls = [asyncio.ensure_future(desk.ask(bash(FORCE, "t1")))]
        for call in ("t2", "t2"):
            await world.advance(5 * SECOND)
            calls.append(asyncio.ensure_future(desk.ask(bash(FORCE, call))))
        await world.advance(5 * SECOND)
        assert len(await desk.waiting()) == 2
        await world.advance(60 * SECOND)
        assert [verdict(reply) for reply in await asyncio.gather(*calls)] == ["deny", "deny", "deny"]


async def test_of_two_calls_that_wait_neither_is_deferred(world: World, tmp_path: Path) -> None:
    """Claude Code loses the first of two deferred calls, so both are denied with the decision's name."""
    async with open_desk(world, tmp_path, wait_seconds=60) as desk:
        replies = await asyncio.gather(
            desk.ask(bash(FORCE, "t1"), attended=False), desk.ask(bash("cat ~/.ssh/id_rsa", "t2"), attended=False)
        )
        assert [verdict(reply) for reply in replies].count("defer") <= 1
        assert "deny" in [verdict(reply) for reply in replies]


async def test_a_question_of_a_sub_agent_waits_in_the_hook_and_is_never_deferred(world: World, tmp_path: Path) -> None:
    """Claude Code drops a call that is deferred inside a sub-agent: the run ends, and a later yes runs nothing."""
    async with open_desk(world, tmp_path, wait_seconds=DEFAULT_WAIT_SECONDS) as desk:
        asking = asyncio.ensure_future(desk.ask(bash(FORCE, agent_id="a1", agent_type="Explore"), attended=False))
        await world.advance(99 * SECOND)
        assert not asking.done()
        await world.advance(2 * SECOND)
        reply = await asking
        assert verdict(reply) == "deny"
        assert f"pending decision {ID}.toolu_1/approval" in reason(reply)
        assert "Repeat the same call with the same arguments" in reason(reply)
        assert "or in the agent that started this one" in reason(reply)
        assert len(await desk.waiting()) == 1


async def test_a_yes_while_the_hook_of_a_sub_agent_waits_lets_the_call_run(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, wait_seconds=DEFAULT_WAIT_SECONDS) as desk:
        asking = asyncio.ensure_future(desk.ask(bash(FORCE, agent_id="a1"), attended=False))
        await world.advance(90 * SECOND)
        await desk.decide("approve")
        assert verdict(await asking) == "allow"


@pytest.mark.parametrize("repeats", [{"agent_id": "a1"}, {"agent_id": "a2"}, {}], ids=["itself", "sibling", "parent"])
async def test_a_late_yes_to_a_sub_agent_lets_the_repeated_call_run_once(
    world: World, tmp_path: Path, repeats: dict[str, str]
) -> None:
    async with open_desk(world, tmp_path, "policy: {approval_expiry: 3d}\n") as desk:
        assert verdict(await desk.ask(bash(FORCE, "t1", agent_id="a1"), attended=False)) == "deny"
        await desk.ask(event("SessionEnd", reason="other"))
        await world.advance(DAY)
        desk.restarted()
        await desk.decide("approve")
        assert verdict(await desk.ask(bash(FORCE, "t2", **repeats), attended=False)) == "allow"
        assert verdict(await desk.ask(bash(FORCE, "t3", **repeats), attended=False)) != "allow"
        assert (await desk.kinds()).count("call_started") == 1


async def test_only_one_call_of_a_step_is_deferred_also_if_they_are_asked_about_in_turn(
    world: World, tmp_path: Path
) -> None:
    """Claude Code reports only one deferred call, and loses the others."""
    async with open_desk(world, tmp_path) as desk:
        calls = [bash(FORCE, "t1"), bash("cat ~/.ssh/id_rsa", "t2"), bash(FORCE, "t1")]
        assert [verdict(await desk.ask(call, attended=False)) for call in calls] == ["defer", "deny", "defer"]
        await desk.ask(event("SessionEnd", reason="other"))
        assert verdict(await desk.ask(bash("git push --force origin x", "t4"), attended=False)) == "defer"


@pytest.mark.parametrize(
    ("program", "name"), [("codex", "PreToolUse"), ("gemini", "BeforeTool"), ("cursor", "preToolUse")]
)
async def test_a_program_that_cannot_defer_waits_and_is_then_told_how_to_go_on(
    world: World, tmp_path: Path, program: str, name: str
) -> None:
    async with open_desk(world, tmp_path, program=program, wait_seconds=DEFAULT_WAIT_SECONDS) as desk:
        call = event(name, "Bash", {"command": FORCE}, conversation_id=SESSION)
        asking = asyncio.ensure_future(desk.ask(call, program=program, attended=False))
        await world.advance(99 * SECOND)
        assert not asking.done()
        await world.advance(2 * SECOND)
        reply = await asking
        assert (reply.code, b"pending decision" in reply.err, b"defer" in reply.out) == (2, True, False)


async def test_a_person_may_change_the_arguments(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(FORCE, "t1"))
        (pending_decision,) = await desk.waiting()
        edited = json.dumps({"command": "git push", "cwd": "/home/ada/project"}).encode()
        await desk.app.store.commit(approve_edited(pending_decision, edited, PERSON, desk.app.ids.make()))
        payload = json.loads((await desk.ask(bash(FORCE, "t1"))).out)["hookSpecificOutput"]
        assert payload["permissionDecision"] == "allow"
        assert payload["updatedInput"] == {"command": "git push", "description": "Run t1"}


async def test_what_is_not_granted_does_not_run(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, "phases: {work: [Bash]}\n") as desk:
        assert "not granted" in reason(await desk.ask(event("PreToolUse", "Write", {"file_path": "a", "content": "b"})))
        assert verdict(await desk.ask(bash("ls"))) == ""


async def test_rates_prices_and_switched_off_tools_hold(world: World, tmp_path: Path) -> None:
    policy = "policy: {disabled: [WebSearch], tools: {Bash: {rate: 2/hour}}}\n"
    async with open_desk(world, tmp_path, policy, prices={"WebFetch": 3.0}) as desk:
        assert "disabled" in reason(await desk.ask(event("PreToolUse", "WebSearch", {"query": "x"})))
        replies = [await desk.ask(bash("ls", f"t{number}")) for number in range(3)]
        assert [verdict(reply) for reply in replies] == ["", "", "deny"]
        fetch = {"url": "https://example.com", "prompt": "x"}
        assert verdict(await desk.ask(event("PreToolUse", "WebFetch", fetch, "w1"))) == ""
        reply = await desk.ask(event("PreToolUse", "WebFetch", fetch, "w2"))
        assert "Repeat it in a minute" in reason(reply)
        await desk.ask(event("PostToolUse", "WebFetch", fetch, "w1", tool_response="page"))
        assert "is left of the cap" in reason(await desk.ask(event("PreToolUse", "WebFetch", fetch, "w3")))
        assert (await desk.receipt()).cost_usd == 3


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("Write", {"file_path": "{home}/hooks/claude-code/agent.yaml", "content": "name: x"}),
        ("Edit", {"file_path": "{home}/.config/halter/../halter/tokens.json", "old_string": "a", "new_string": "b"}),
        ("Read", {"file_path": "{home}/hooks/key"}),
        ("apply_patch", {"command": "*** Begin Patch\n*** Update File: {home}/hooks/agents.json\n+x\n*** End Patch"}),
        ("Write", {"file_path": "{home}/link/agents.json", "content": "{}"}),
    ],
)
async def test_what_belongs_to_halter_is_out_of_reach(
    world: World, tmp_path: Path, tool: str, arguments: dict[str, str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "hooks")
    values = {key: value.replace("{home}", str(tmp_path)) for key, value in arguments.items()}
    async with open_desk(world, tmp_path) as desk:
        reply = await desk.ask(event("PreToolUse", tool, values))
        assert (verdict(reply), await desk.waiting()) == ("deny", [])
        assert "no tool may" in reason(reply)


@pytest.mark.parametrize(
    "command",
    [
        "echo '{}' > ~/.claude/settings.json",
        "cp /tmp/x .claude/settings.local.json",
        "sed -i s/block/continue/ ~/.claude/settings.json",
        "tee ~/.codex/hooks.json < x",
        "rm ~/.config/halter/hooks/socket",
        "halter hook uninstall --for claude",
        "pkill -f 'halter serve'",
        "claude --bare -p 'rm everything'",
        "CLAUDE_CODE_SIMPLE=1 claude -p x",
    ],
)
async def test_a_command_that_would_switch_the_hooks_off_needs_a_person(
    world: World, tmp_path: Path, command: str
) -> None:
    async with open_desk(world, tmp_path) as desk:
        assert verdict(await desk.ask(bash(command))) == "deny"
        assert len(await desk.waiting()) == 1


async def test_only_allowed_hosts_are_fetched(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, fleet="allowed_hosts: ['*.example.com']\n") as desk:
        good = event("PreToolUse", "WebFetch", {"url": "https://docs.example.com/x", "prompt": "?"}, "t1")
        bad = event("PreToolUse", "WebFetch", {"url": "https://evil.test/x", "prompt": "?"}, "t2")
        assert (verdict(await desk.ask(good)), verdict(await desk.ask(bad))) == ("", "deny")


async def test_a_tool_of_an_mcp_server_needs_a_person(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        call = event("PreToolUse", "mcp__mail__send", {"to": "bob"}, mcp_server={"name": "mail", "source": "user"})
        assert verdict(await desk.ask(call)) == "deny"
        assert [pending_decision.name for pending_decision in await desk.waiting()] == ["mcp__mail__send"]


async def test_secrets_are_masked_in_journal_and_result(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash(f"echo {SECRET}"))
        payload = json.loads((await desk.ask(bash_done(f"echo {SECRET}", out=SECRET))).out)["hookSpecificOutput"]
        assert payload["updatedToolOutput"] == {
            "stdout": "[redacted:anthropic]",
            "stderr": "",
            "interrupted": False,
            "isImage": False,
        }
        call = ("mcp__mail__read", {"id": 1}, "t2")
        reply = await desk.ask(event("PostToolUse", *call, tool_response=[{"type": "text", "text": SECRET}]))
        masked = json.loads(reply.out)["hookSpecificOutput"]["updatedMCPToolOutput"]
        assert masked == [{"type": "text", "text": "[redacted:anthropic]"}]
        assert all(SECRET.encode() not in (stored.body or b"") for stored in await desk.events())


async def test_a_halt_refuses_every_call_and_ends_the_turn(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("sleep 100", "t1"))
        await desk.app.store.commit(halt("fleet", PERSON, "h1", "stop it"))
        payload = json.loads((await desk.ask(bash("ls", "t2"))).out)
        assert (payload["continue"], payload["hookSpecificOutput"]["permissionDecision"]) == (False, "deny")
        after = json.loads((await desk.ask(bash_done("sleep 100", "t1"))).out)
        assert (after["continue"], after["stopReason"]) == (False, f"fleet was halted by {PERSON}: stop it.")
        await desk.app.store.commit(resume("fleet", PERSON, "h2"))
        assert verdict(await desk.ask(bash("ls", "t3"))) == ""


async def test_a_cancelled_session_stays_over(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("ls", "t1"))
        await desk.app.store.commit(cancel(ID, PERSON, "c1"))
        assert verdict(await desk.ask(bash("ls", "t2"))) == "deny"
        assert (await desk.receipt()).state == "CANCELLED"
        assert verdict(await desk.ask(bash("ls", "t3"))) == "block"


async def test_an_outcome_that_never_comes_is_unknown(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("make", "t1"))
        assert (await desk.receipt()).in_doubt == (f"{ID}.t1",)
        await desk.ask(event("SessionEnd", reason="other"))
        made = await desk.receipt()
        assert (made.unknown_calls, made.state) == ((f"{ID}.t1",), "COMPLETED")


async def test_a_restarted_server_settles_what_the_one_before_admitted(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("make", "t1"))
        desk.restarted()
        await desk.ask(bash_done("make", "t1", out="built"))
        made = await desk.receipt()
        assert ([line.outcome for line in made.calls], made.in_doubt) == (["ok"], ())


async def test_a_session_that_its_program_left_is_ended_after_a_day(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("make", "t1"))
        await world.advance(HOUR)
        await desk.gate.sweep()
        assert (await desk.receipt()).ended_at is None
        await world.advance(DAY)
        await desk.gate.sweep()
        assert (await desk.receipt()).terminal_reason == "idle_timeout"
        # The person resumes it in the program: it goes on.
        assert verdict(await desk.ask(bash("ls", "t2"))) == ""
        assert (await desk.receipt()).ended_at is None


async def test_a_question_keeps_a_session_from_being_ended(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, "policy: {approval_expiry: 3d}\n") as desk:
        await desk.ask(bash(FORCE))
        await world.advance(2 * DAY)
        await desk.gate.sweep()
        assert (await desk.receipt()).ended_at is None
        await world.advance(2 * DAY)
        await desk.gate.sweep()
        assert (await desk.receipt()).ended_at is not None


async def test_what_the_programs_own_user_refused_is_settled(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("make", "t1"))
        await desk.ask(event("PermissionDenied", "Bash", {"command": "make"}, "t1"))
        assert [line.outcome for line in (await desk.receipt()).calls] == ["cancelled"]


async def test_a_failed_call_is_an_error(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        await desk.ask(bash("make", "t1"))
        await desk.ask(event("PostToolUseFailure", "Bash", {"command": "make"}, "t1", error="Exit code 2"))
        assert [(line.outcome, line.error) for line in (await desk.receipt()).calls] == [("error", "Exit code 2")]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        event("PreToolUse"),
        event("PreToolUse", "Bash", call="../../etc"),
        bash("ls", session_id=""),
        bash("ls", session_id="a b\nc"),
        bash("ls", tool_input="ls"),
        bash("ls", tool_name=7),
    ],
)
async def test_what_is_no_event_is_blocked_with_a_sentence(world: World, tmp_path: Path, data: bytes) -> None:
    async with open_desk(world, tmp_path) as desk:
        reply = await desk.ask(data)
        assert reply.code == 2
        assert reply.err.decode().strip().endswith("This call is blocked.")


async def test_an_agent_that_is_not_installed_is_blocked(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        assert (await desk.ask(bash("ls"), agent="another")).code == 2
        assert (await desk.ask(bash("ls"), program="codex")).code == 2
        assert (await desk.ask(bash("ls"), program="emacs")).code == 2
        (tmp_path / "hooks" / AGENT / "agent.yaml").write_text("name: [")
        assert (await desk.ask(bash("ls"))).code == 2


async def test_codex_is_answered_in_the_two_forms_that_it_obeys(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, agent="codex", program="codex") as desk:
        good = await desk.ask(bash("ls", "c1", turn_id="1", model="x"), program="codex", agent="codex")
        bad = await desk.ask(bash(FORCE, "c2"), program="codex", agent="codex", attended=False)
        assert (good.code, good.out) == (0, b"{}")
        assert (bad.code, bad.out, b"pending decision" in bad.err) == (2, b"", True)


async def test_the_level_follows_from_the_risk(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        for number, command in enumerate(("ls", "npm test")):
            await desk.ask(bash(command, f"t{number}"))
        await world.advance(MINUTE)
        assert [line.level for line in (await desk.receipt()).calls] == ["MONITORED", "CONTROLLED"]


@pytest.mark.parametrize(
    "command",
    [
        *("> prod.db", "sed -i s/a/b/ f", "touch f", "git commit -m x", "npm config set registry http://r.example"),
        *("mkdir d", "cp a b", "git add .", "ls > f", "tee f", "sort -o f f", "ln -s a b", "git config user.name x"),
    ],
)
async def test_in_assist_a_person_is_asked_before_every_command_that_changes_something(
    world: World, tmp_path: Path, command: str
) -> None:
    async with open_desk(world, tmp_path, fleet="mode: ASSIST\n") as desk:
        assert verdict(await desk.ask(bash(command))) in {"defer", "deny"}
        assert len(await desk.waiting()) == 1


@pytest.mark.parametrize("command", ["ls -la", "git status", "grep -rn x . | head 2>/dev/null", "sed -n 1,9p f"])
async def test_in_assist_a_command_that_only_reads_passes(world: World, tmp_path: Path, command: str) -> None:
    async with open_desk(world, tmp_path, fleet="mode: ASSIST\n") as desk:
        assert verdict(await desk.ask(bash(command))) == ""


REACHING_OUT: dict[str, tuple[str, dict[str, object]]] = {
    "a file to a person's devices": ("SendUserFile", {"files": ["/home/ada/.ssh/id_rsa"], "status": "normal"}),
    "a remote trigger": ("RemoteTrigger", {"action": "run", "trigger_id": "t1"}),
    "a schedule that outlives the session": ("CronCreate", {"cron": "0 9 * * *", "prompt": "Go.", "durable": True}),
    "the same as text": ("CronCreate", {"cron": "0 9 * * *", "prompt": "Go.", "durable": "true"}),
    "an agent elsewhere": ("Agent", {"prompt": "Go.", "isolation": "remote"}),
    "a task elsewhere": ("Task", {"prompt": "Go.", "isolation": "Remote"}),
    "an agent in the cloud": ("Agent", {"prompt": "Go.", "remote": True}),
    "a workflow": ("Workflow", {"script": "agent('Go.')"}),
    "a message with a file": ("SendUserMessage", {"message": "x", "attachments": ["/home/ada/.ssh/id_rsa"]}),
    "a setting of the program": ("Config", {"setting": "permissions.defaultMode", "value": "bypassPermissions"}),
    "a page": ("Artifact", {"file_path": "a.html"}),
}


@pytest.mark.parametrize(("tool", "arguments"), REACHING_OUT.values(), ids=REACHING_OUT)
async def test_in_semi_a_person_is_asked_before_a_tool_that_leaves_the_session(
    world: World, tmp_path: Path, tool: str, arguments: dict[str, object]
) -> None:
    async with open_desk(world, tmp_path) as desk:
        assert verdict(await desk.ask(event("PreToolUse", tool, arguments))) in {"defer", "deny"}
        assert len(await desk.waiting()) == 1


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("Agent", {"prompt": "Go.", "subagent_type": "Explore"}),
        ("Agent", {"prompt": "Go.", "isolation": "worktree"}),
        ("CronCreate", {"cron": "*/5 * * * *", "prompt": "Go.", "durable": False}),
        ("CronList", {}),
        ("SendUserMessage", {"message": "Done.", "attachments": []}),
        ("ScheduleWakeup", {"delaySeconds": 60, "prompt": "Go."}),
    ],
)
async def test_in_semi_what_stays_in_the_session_passes(
    world: World, tmp_path: Path, tool: str, arguments: dict[str, object]
) -> None:
    async with open_desk(world, tmp_path) as desk:
        assert verdict(await desk.ask(event("PreToolUse", tool, arguments))) == ""


async def test_a_file_of_halter_itself_is_not_sent(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path) as desk:
        key = str(tmp_path / "hooks" / "key")
        for arguments in ({"files": [key]}, {"files": [{"path": key}]}, {"file_path": key}):
            reply = await desk.ask(event("PreToolUse", "SendUserFile", arguments))
            assert (verdict(reply), "no tool may read it" in reason(reply)) == ("deny", True)
        reply = await desk.ask(event("PreToolUse", "SendUserMessage", {"message": "x", "attachments": [key]}))
        assert (verdict(reply), "no tool may read it" in reason(reply)) == ("deny", True)


def gemini(name: str, command: str, **more: object) -> bytes:
    """An event as Gemini CLI sends it: without an id of the call."""
    values = {"session_id": SESSION, "transcript_path": "/t", "cwd": "/home/ada", "timestamp": "2026-11-17T09:00:00Z"}
    call = {"hook_event_name": name, "tool_name": "run_shell_command", "tool_input": {"command": command}}
    return json.dumps({**values, **call, **more}).encode()


async def test_gemini_gives_no_ids_and_each_call_is_known_all_the_same(world: World, tmp_path: Path) -> None:
    async with open_desk(world, tmp_path, agent="gemini-cli", program="gemini") as desk:

        async def ask(data: bytes) -> HookReply:
            return await desk.ask(data, program="gemini", agent="gemini-cli")

        assert (await ask(gemini("BeforeTool", "make"))).out == b"{}"
        response = {"llmContent": f"key {SECRET}", "returnDisplay": SECRET}
        payload = json.loads((await ask(gemini("AfterTool", "make", tool_response=response))).out)
        assert payload == {"decision": "deny", "reason": "key [redacted:anthropic]"}
        assert (await ask(gemini("BeforeTool", "make"))).code == 0
        pending = await ask(gemini("BeforeTool", FORCE))
        assert (pending.code, b"pending decision" in pending.err) == (2, True)
        await desk.decide("approve")
        assert (await ask(gemini("BeforeTool", FORCE))).code == 0
        assert (await ask(gemini("BeforeTool", FORCE))).code == 2
        receipt = make_receipt(await desk.events(f"gemini-cli-{SESSION}"))
        assert [line.outcome for line in receipt.calls] == ["ok", None, None]
        assert len(receipt.in_doubt) == 2


async def test_cursor_names_its_conversation_and_is_answered_in_its_words(world: World, tmp_path: Path) -> None:
    base = {
        "conversation_id": "c-1",
        "generation_id": "g",
        "workspace_roots": ["/home/ada/x"],
        "cursor_version": "3.2.1",
    }

    def cursor_event(name: str, tool: str, values: dict[str, str], **more: str) -> bytes:
        return json.dumps({**base, "hook_event_name": name, "tool_name": tool, "tool_input": values, **more}).encode()

    async with open_desk(world, tmp_path, agent="cursor", program="cursor") as desk:

        async def ask(data: bytes) -> HookReply:
            return await desk.ask(data, program="cursor", agent="cursor")

        assert (await ask(cursor_event("preToolUse", "Shell", {"command": "ls"}, tool_use_id="u1"))).out == b"{}"
        await ask(cursor_event("postToolUse", "Shell", {"command": "ls"}, tool_use_id="u1", tool_output="a b"))
        reply = await ask(cursor_event("preToolUse", "MCP:mail:send", {"to": "bob"}, tool_use_id="u2"))
        assert (reply.code, json.loads(reply.out)["permission"]) == (2, "deny")
        assert "pending decision" in json.loads(reply.out)["agent_message"]
        receipt = make_receipt(await desk.events("cursor-c-1"))
        assert [line.outcome for line in receipt.calls] == ["ok"]
