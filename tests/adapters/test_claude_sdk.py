"""An agent of the Claude Agent SDK under the guard: the SDK's own program, offline, with a provider on 127.0.0.1."""

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("claude_agent_sdk")

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, tool

from halter.adapters.claude_sdk import GuardedClaude, guard
from halter.core.errors import ConfigError
from halter.external.effects import EffectRefused
from tests.adapters.conftest import Desk
from tests.clients.providers import Provider, calls, text

pytestmark = pytest.mark.timeout(300)
PAY = "mcp__till__pay"
CALL = calls(("toolu_1", PAY, {"amount": 7}))
DONE = text("Done.")


def make_options(desk: Desk, provider: Provider, **options: Any) -> ClaudeAgentOptions:
    @tool("pay", "Pay an amount.", {"amount": int})
    async def pay(fields: dict[str, Any]) -> dict[str, Any]:
        if fields["amount"] < 0:
            raise ValueError("less than nothing")
        desk.paid.append(fields["amount"])
        return {"content": [{"type": "text", "text": f"paid {fields['amount']}"}]}

    home = desk.file.parent / "home"
    home.mkdir(exist_ok=True)
    environ = {
        "ANTHROPIC_BASE_URL": provider.url,
        "ANTHROPIC_API_KEY": "none",
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return ClaudeAgentOptions(
        model="claude-haiku-5-5",
        tools=options.pop("tools", []),
        mcp_servers={"till": create_sdk_mcp_server("till", tools=[pay])},
        allowed_tools=options.pop("allowed_tools", [PAY]),
        cwd=home,
        env={**environ, **options.pop("env", {})},
        **options,
    )


def make_agent(
    desk: Desk, provider: Provider, level: Any = "CONTROLLED", cost: float = 0, **options: Any
) -> GuardedClaude:
    return guard(
        make_options(desk, provider, **options), guard=desk.guard(), tools={PAY: {"level": level, "cost": cost}}
    )


async def run(agent: GuardedClaude, prompt: str = "Pay the bill.", **options: Any) -> ResultMessage:
    messages = [message async for message in agent.query(prompt, **options)]
    (result,) = [message for message in messages if isinstance(message, ResultMessage)]
    return result


def read_last_prompt(provider: Provider) -> str:
    """Read the messages of the last request to the model."""
    return json.dumps(provider.requests[-1]["messages"])


async def read_receipts(desk: Desk) -> list[tuple[str, list[str]]]:
    async with desk.guard() as guarded:
        return [(each.state, [line.name for line in each.calls]) for each in await guarded.receipts()]


async def test_a_tool_of_claude_code_itself_is_admitted_as_well(desk: Desk) -> None:
    desk.policy = {"policy": {"disabled": ["Bash"]}}
    call = calls(("toolu_1", "Bash", {"command": "touch made", "description": "Make it"}))
    with Provider([call, DONE]) as provider:
        await run(make_agent(desk, provider, tools=["Bash"], allowed_tools=["Bash"]))
    assert "disabled" in read_last_prompt(provider)
    assert not (desk.file.parent / "home" / "made").exists()


async def test_parallel_queries_on_one_cap_never_pass_it(desk: Desk) -> None:
    """Twenty calls of forty cents, all at once, on one dollar a day."""
    desk.policy = {"limits": {"max_cost_usd_per_day": 1}}
    with Provider([CALL]) as provider:
        provider.next = lambda body: DONE if "paid 7" in json.dumps(body) else CALL  # type: ignore[method-assign]
        agent = make_agent(desk, provider, cost=0.4)
        results = await asyncio.gather(*(run(agent) for _ in range(20)), return_exceptions=True)
    refused = [each for each in results if isinstance(each, EffectRefused)]
    assert {each.outcome for each in refused} == {"cost_cap_reached"}
    assert len(desk.paid) == 2
    assert await desk.read_spending() == Decimal("0.8")


def test_claude_code_has_a_budget_of_its_own(desk: Desk) -> None:
    with Provider([DONE]) as provider:
        agent = make_agent(desk, provider)
    assert agent.options.max_budget_usd == 1.0


async def test_an_error_of_the_tool_is_reported_to_the_model(desk: Desk) -> None:
    with Provider([calls(("toolu_1", PAY, {"amount": -7})), DONE]) as provider:
        assert (await run(make_agent(desk, provider))).result == "Done."
    assert "less than nothing" in read_last_prompt(provider)
    assert await read_receipts(desk) == [("COMPLETED", [PAY])]


async def test_an_error_of_the_guard_ends_the_query_and_the_tool_does_not_run(desk: Desk) -> None:
    own = desk.guard()

    async def pay(amount: int) -> str:
        """The guard's own tool of the same name."""
        raise NotImplementedError(amount)

    pay.__name__ = PAY
    own.tool(pay)
    with Provider([CALL, DONE]) as provider:
        with pytest.raises(ConfigError, match="pay is already a tool of this guard"):
            await run(guard(make_options(desk, provider), guard=own))
        assert (desk.paid, len(provider.requests)) == ([], 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_args": {"bare": None}}, "--bare"),
        ({"settings": '{"disableAllHooks": true}'}, "disableAllHooks"),
        ({"env": {"CLAUDE_CODE_SIMPLE": "1"}}, "CLAUDE_CODE_SIMPLE"),
        ({"continue_conversation": True}, "resume"),
    ],
)
def test_what_goes_round_the_guard_is_refused(desk: Desk, options: dict[str, Any], named: str) -> None:
    with Provider([DONE]) as provider, pytest.raises(ConfigError, match=named):
        make_agent(desk, provider, **options)


async def test_settings_that_turn_hooks_off_do_not_turn_off_the_guard(desk: Desk) -> None:
    desk.policy = {"policy": {"disabled": [PAY]}}
    with Provider([CALL, DONE]) as provider:
        agent = make_agent(desk, provider)
        (desk.file.parent / "home" / "settings.json").write_text('{"disableAllHooks": true}')
        await run(agent)
    assert desk.paid == []


async def test_an_environment_that_turns_hooks_off_does_not_turn_off_the_guard(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CODE_SIMPLE", "1")
    desk.policy = {"policy": {"disabled": [PAY]}}
    with Provider([CALL, DONE]) as provider:
        await run(make_agent(desk, provider))
    assert desk.paid == []


async def test_a_call_that_no_hook_was_called_for_ends_the_query(desk: Desk) -> None:
    with Provider([CALL, CALL, CALL, DONE]) as provider:
        agent = make_agent(desk, provider)
        agent.options.env["CLAUDE_CODE_SIMPLE"] = "1"
        with pytest.raises(ConfigError, match="without the guard"):
            await run(agent)
    assert desk.paid == [7]
