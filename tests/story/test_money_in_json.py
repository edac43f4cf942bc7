"""Money that leaves the program is dollars: in the JSON of every command, in exports, and in the values of Python."""

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec
import pytest
from typer.testing import CliRunner, Result

from halter import Answer, Guard, Output, tool
from halter.cli.commands import build_command_tree, load_all_commands
from halter.core.events import EVENTS_BY_KIND
from halter.core.money import format_exact_micros, micros_to_usd
from halter.core.public_json import encode_public_json
from halter.demo.incidents import Night
from halter.external.guard import GuardSummary as GuardReport
from halter.server.api import DO, READ
from halter.tasks.result import Result as RunResult

AGENT = """\
name: desk
model: scripted
script: replies.yaml
limits: {max_cost_usd: 0.765432, max_cost_usd_per_day: 2.345678}
schedules: [{name: daily, cron: "0 9 * * *", prompt: Send it.}]
"""
REPLIES = "- calls: [{tool: send, arguments: {to: bob}}]\n- text: Sent.\n"
TOOLS = '''\
from halter import tool


@tool(level="CONTROLLED", cost=0.001234)
async def send(to: str) -> str:
    """Send a letter."""
    return f"sent to {to}"
'''
MICROS = {1_234, 2_468, 3_702, 765_432, 2_345_678, 3_456_789, 1_234_567, 4_567_891}
"""What the amounts of this story are in micro-dollars: none of these numbers may be printed."""

GO_ON = {("hook", "serve"), ("chat",), ("up",), ("worker",), ("serve",), ("gateway",)}
"""Commands that print events, and what `run` prints, until somebody stops them."""

SLOW = {("demo",), ("drill",), ("prices", "update")}
"""A night of a minute, seen below; drills, whose violations are sentences; and what asks a server."""

Halter = Callable[..., Result]


@pytest.fixture
def halter(tmp_path: Path) -> Halter:
    """Type commands where `desk` has sent a letter for $0.001234."""
    environment = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HALTER_PERSON": "ada",
    }
    desk = tmp_path / "desk"
    desk.mkdir()
    for name, text in {
        "agent.yaml": AGENT,
        "replies.yaml": REPLIES,
        "tools.py": TOOLS,
        "letter.yaml": "- call: send\n  arguments: {to: eve}\n",
        "fleet.yaml": "limits: {max_cost_usd_per_day: 4.567891}\n",
    }.items():
        (desk / name).write_text(text)
    runner = CliRunner()

    def types(*words: str) -> Result:
        return runner.invoke(
            build_command_tree(), [word.replace("~", str(tmp_path)) for word in words], env=environment
        )

    assert types("trust", "~/desk").exit_code == 0
    return types


def parse_output(text: str) -> Any:
    """Read one JSON value, or a value a line."""
    try:
        return json.loads(text, parse_float=Decimal)
    except json.JSONDecodeError:
        return [json.loads(line, parse_float=Decimal) for line in text.splitlines()]


def numbers(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Walk to every number, with its place. What events hold is the journal's own, and documented so."""
    match value:
        case dict():
            for key, each in cast("dict[str, Any]", value).items():
                if key not in ("facts", "body"):
                    yield from numbers(each, f"{where}.{key}")
        case list():
            for each in cast("list[Any]", value):
                yield from numbers(each, f"{where}[]")
        case bool():
            pass
        case int() | Decimal():
            yield where, value
        case _:
            pass


def refuse_micros(value: Any, of: Any) -> None:
    for where, number in numbers(value):
        assert number not in MICROS, (of, where, number)
        if "_usd" in where:
            assert number < 100, (of, where, number)


def with_json(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from with_json(command, (*path, name))
        elif any("--json" in option.opts for option in command.params):
            yield (*path, name)


def words_for(session: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Say what is typed after each command. What names `nothing` is refused with a sentence, and prints no JSON."""
    return {
        ("init",): ("~/other",), ("run",): ("~/desk", "Send it."), ("play",): ("~/desk/letter.yaml",),
        ("on",): ("~/desk",), ("off",): ("desk",), ("status",): (),
        ("eval", "run"): ("~/nothing",), ("eval", "add"): (session, "~/desk"),
        ("sessions",): (), ("show",): (session,), ("report",): (),
        ("export",): (session, "--output", "~/export.jsonl"),
        ("findings", "list"): (), ("findings", "accept"): ("nothing",), ("findings", "dismiss"): ("nothing",),
        ("proposals", "list"): (), ("proposals", "accept"): ("nothing",), ("proposals", "dismiss"): ("nothing",),
        ("proposals", "promote"): ("nothing", "~/desk"),
        ("inbox",): (), ("approve",): ("nothing",), ("deny",): ("nothing",), ("tell",): ("nothing", "hello"),
        ("fork",): (session,),
        ("halt",): ("agent:desk",), ("resume",): ("agent:desk",), ("cancel",): (session,),
        ("budget", "show"): (), ("budget", "raise"): ("agent:desk", "3.456789"),
        ("policy", "show"): (), ("policy", "apply"): ("~/desk/fleet.yaml", "--yes"),
        ("budget", "lower"): ("agent:desk", "1.234567"), ("rules", "end"): ("nothing",),
        ("rules", "offer"): ("nothing",),
        ("triggers", "list"): (), ("triggers", "run"): ("desk/nothing",), ("triggers", "cancel"): ("desk/nothing",),
        ("triggers", "retry"): ("desk/nothing", "nothing"), ("route",): ("~/desk", "what have you spent?"),
        ("audit",): (), ("verify",): (), ("erase",): ("--session", session, "--yes"), ("doctor",): ("~/desk",),
        ("store", "accept"): (),
        ("schema",): ("agent",), ("tokens", "list"): (), ("tokens", "add"): ("script", "--role", "viewer"),
        ("tokens", "remove"): ("script",), ("trust",): ("~/desk",), ("tools",): ("~/desk",),
        ("policy", "backtest"): ("--agent", "~/desk"), ("policy", "suggest"): ("--agent", "desk"),
        ("policy", "diff"): ("~/desk/fleet.yaml", "~/desk/fleet.yaml"),
        ("channels", "list"): (), ("channels", "pair"): ("telegram", "ada"),
        ("channels", "unpair"): ("telegram", "ada"),
        ("keys", "new"): ("--agent", "desk", "--max-cost-usd-per-day", "2.345678"), ("keys", "list"): (),
        ("keys", "revoke"): ("nothing",), ("proxy", "check"): ("nothing",), ("proxy", "env"): ("nothing",),
        ("hook", "install"): ("--for", "nothing"), ("hook", "uninstall"): ("--for", "nothing"),
        ("hook", "status"): (), ("prices", "show"): (), ("prices", "accept"): ("nothing",),
    }  # fmt: skip


def test_no_command_prints_micro_dollars(halter: Halter, tmp_path: Path) -> None:
    ran = parse_output(halter("run", "~/desk", "Send it.", "--json").stdout)
    assert ran["cost_usd"] == Decimal("0.001234")
    text, values = 0, words_for(ran["session"])
    assert {*values} == {*with_json(load_all_commands())} - GO_ON - SLOW
    views = {
        ("show",): ((ran["session"], "--receipt"), (ran["session"], "--follow")),
        ("status",): (("--live", "--once"),),
    }
    for path, words in [*values.items(), *((path, each) for path, lines in views.items() for each in lines)]:
        answer = halter(*path, *words, "--json")
        assert "Traceback" not in answer.output, path
        if answer.stdout:
            refuse_micros(parse_output(answer.stdout), path)
            text += 1
    assert text >= 29
    refuse_micros(parse_output((tmp_path / "export.jsonl").read_text()), "export")


def test_commands_say_exactly_what_was_spent(halter: Halter) -> None:
    session = parse_output(halter("run", "~/desk", "Send it.", "--json").stdout)["session"]
    amount = Decimal("0.001234")
    result = parse_output(halter("receipt", session, "--json").stdout)
    assert [result["cost_usd"], result["spent_by_purpose_usd"]["turn"], result["calls"][0]["cost_usd"]] == [amount] * 3
    period_report = parse_output(halter("report", "--json").stdout)
    assert [
        period_report["spent_usd"],
        period_report["spent_by_purpose_usd"]["turn"],
        period_report["agents"][0]["spent_usd"],
    ] == [amount] * 3
    caps = {cap["scope"]: (cap["cap_usd"], cap["spent_usd"]) for cap in period_report["caps"]}
    assert caps["agent:desk"] == (Decimal("2.345678"), amount)
    budgets = parse_output(halter("budget", "--json").stdout)
    own = next(row for row in budgets["budgets"] if row["scope"] == "agent:desk")
    assert (own["unit"], own["cap"], own["spent"], own["held"]) == ("usd", Decimal("2.345678"), amount, 0)
    assert budgets["last_day"][0]["spent_usd"] == amount
    assert [row["cost_usd"] for row in parse_output(halter("audit", "--json").stdout)] == [amount]
    raised = parse_output(halter("budget", "raise", "agent:desk", "3.456789", "--json").stdout)
    assert (raised["cap_usd"], raised["by"]) == (Decimal("3.456789"), "ada")
    lowered = parse_output(halter("budget", "lower", "agent:desk", "0.001", "--json").stdout)
    assert (lowered["cap_usd"], lowered["overrun_usd"]) == (Decimal("0.001"), Decimal("0.000234"))


async def test_the_guard_and_its_receipts_give_programs_dollars() -> None:
    @tool(level="SAFE", cost=0.002)
    async def send() -> Output:
        """Send a letter."""
        return Output("sent", cost_micros=1_234)

    async with Guard("memory:", agent="desk", tools=[send], max_cost_usd=0.5) as guard:
        answer = await guard.call(send)
        guard_summary, (receipt,) = await guard.report(), await guard.receipts()
    amount = Decimal("0.001234")
    assert (answer.cost_usd, receipt.cost_usd, guard_summary.cost_usd, guard_summary.cost_by_name_usd) == (
        amount,
        amount,
        amount,
        {"send": amount},
    )
    assert (receipt.held_usd, receipt.calls[0].held_usd) == (Decimal("0.002"), Decimal("0.002"))
    budget = next(row for row in guard_summary.budgets if row.scope.startswith("session:"))
    assert (budget.cap, budget.spent) == (Decimal("0.5"), amount)


def types_within(kind: Any, seen_types: set[type]) -> Iterator[type[msgspec.Struct]]:
    """Name all structs that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen_types:
        seen_types.add(kind)
        yield kind
        for each in get_type_hints(kind, include_extras=True).values():
            yield from types_within(each, seen_types)
    for each in get_args(kind):
        yield from types_within(each, seen_types)


PUBLIC = [kind for _, _, kind in (*READ, *DO)]
STRUCTS = [*types_within(tuple[(*PUBLIC, Night, GuardReport, RunResult, Answer)], set())]  # type: ignore[misc] It is made of values.


def test_whatever_is_called_usd_is_dollars_in_every_public_value() -> None:
    amounts = 0
    for struct in STRUCTS:
        for name, kind in get_type_hints(struct).items():
            if name.endswith("_usd"):
                amounts += 1
                assert Decimal in (kind, *get_args(kind)), (struct, name)
            assert name not in ("usd", "cost"), struct
    assert amounts >= 20


def test_no_event_calls_an_amount_usd_with_an_underscore() -> None:
    for event in EVENTS_BY_KIND.values():
        for struct in types_within(event, set()):
            assert not [name for name in struct.__struct_fields__ if name.endswith("_usd")], struct


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0"), (1, "0.000001"), (10, "0.00001"), (1_234, "0.001234"), (10_000, "0.01"), (5_000_000, "5"),
     (123_456_789_012_345, "123456789.012345"), (10**15, "1000000000")],
)  # fmt: skip
def test_an_amount_is_written_as_a_number_to_the_last_digit(micros: int, text: str) -> None:
    assert encode_public_json({"cost_usd": micros_to_usd(micros)}).decode() == f'{{"cost_usd":{text}}}'
    assert format_exact_micros(micros).replace(",", "").startswith(f"${text}")
