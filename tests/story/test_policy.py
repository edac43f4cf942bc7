"""The fleet's policy belongs to the store: whatever folder a process is started in, the store's policy binds it."""

import asyncio
import json
import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from halter import Agent, Guard
from halter.config.merge import FleetConfig as FleetFile
from halter.config.merge import parse_fleet
from halter.config.trust import TrustFile, digest_folder
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE, SystemClock
from halter.core.errors import ConfigError, NotDone
from halter.core.events import FleetPolicyAdopted
from halter.core.ids import FLEET
from halter.core.ports import read_stream
from halter.core.usage import ModelName
from halter.guard.call_answer import Answer
from halter.models.scripted import Scripted
from halter.operations import money as desks
from halter.operations.actor import Actor, Principal
from halter.runtime.agent import PolicyWarning
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.supervisor import FleetRunner, Supervisor
from halter.settings import Settings, read_settings
from halter.testing.world import World
from halter.tools.function_tool import tool
from tests.processes import Halter
from tests.story.autonomous import Fleet
from tests.story.dispatching import mode_of
from tests.story.loops import calls, says

CENTS = {"limits": {"max_cost_usd_per_day": 0.05}}
LOOSE = {"limits": {"max_cost_usd_per_day": 5}, "mode": "FULL"}


def parse_fleet_file(text: str) -> FleetFile:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml"))


@tool(level="SAFE", effect="read", cost=0.06)
async def buy() -> str:
    """Buy something."""
    return "bought"


class Place:
    """One store, and the home folder of its user."""

    def __init__(self, home: Path, store: str) -> None:
        self.home = home
        self.store = store

    def settings(self, person: str = "ada") -> Settings:
        return read_settings({"HALTER_PERSON": person}, self.home, self.store)

    def guard(self, **more: Any) -> Guard:
        return Guard(self.store, "clerk", tools=[buy], settings=self.settings(), **more)

    async def buy_once(self, **more: Any) -> Answer:
        """Buy something in a process of its own."""
        async with self.guard(**more) as guard:
            return await guard.call("buy")

    async def list_adopted(self) -> list[FleetPolicyAdopted]:
        async with open_runtime(self.settings(), acts=False) as app:
            return [
                each.event for each in await read_stream(app.store, FLEET) if isinstance(each.event, FleetPolicyAdopted)
            ]

    async def use_first(self, text: str) -> None:
        """Start a session under a file, in a process of its own: the file becomes the store's policy."""
        async with self.guard(fleet=load_bytes(text.encode(), "halter.yaml").value) as guard:
            await guard.call("buy")

    async def apply(self, text: str, who: str = "ada", role: Any = "admin") -> Any:
        async with open_runtime(self.settings(), acts=False) as app:
            desk = Actor(app, Principal(who, role))
            return await desks.apply(desk, await desks.show(desk), parse_fleet_file(text))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    store = str(tmp_path / "halter.db")
    return Place(tmp_path, store if request.param == "sqlite" else request.getfixturevalue("postgres_schema_url"))


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return Place(tmp_path, str(tmp_path / "halter.db"))


@pytest.mark.parametrize("second", [{}, {"fleet": LOOSE}], ids=["no file", "a looser file"])
async def test_a_process_with_no_file_or_a_looser_one_spends_under_the_stores_cap(
    place: Place, second: Mapping[str, Any]
) -> None:
    await place.use_first("limits: {max_cost_usd_per_day: 0.05}")
    with pytest.warns(PolicyWarning, match=r"limits\.max_cost_usd_per_day .*\$0\.05"):
        refused = await place.buy_once(**second)
    assert refused.outcome == "cost_cap_reached"
    (event,) = await place.list_adopted()
    assert (event.by, event.policy) == ("ada", '{"limits":{"max_cost_usd_per_day":0.05}}')


async def test_without_any_file_the_defaults_hold_and_nothing_is_adopted(here: Place) -> None:
    assert (await here.buy_once()).outcome == "ok"
    assert await here.list_adopted() == []


async def test_the_same_file_is_adopted_once_and_says_nothing(here: Place) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await here.buy_once(fleet=CENTS)
        await here.buy_once(fleet=CENTS)
    assert len(await here.list_adopted()) == 1


async def test_a_stricter_file_counts_for_its_own_process_alone(here: Place) -> None:
    await here.buy_once(fleet=LOOSE)
    with pytest.warns(PolicyWarning, match=r"is stricter .+ applies to this process, .+ halter policy apply"):
        assert (await here.buy_once(fleet={**LOOSE, **CENTS})).outcome == "cost_cap_reached"
    assert (await here.buy_once(fleet=LOOSE)).outcome == "ok"


async def test_of_two_processes_that_are_first_one_is_and_the_other_is_bound(place: Place) -> None:
    async def read_day_cap(text: str) -> str:
        async with open_runtime(place.settings(), load_fleet=lambda _: parse_fleet_file(text)) as app:
            await app.adopt_policy()
        async with open_runtime(place.settings(), load_fleet=lambda _: parse_fleet_file(text)) as app:
            return str(app.fleet.spec.limits.max_cost_usd_per_day)

    texts = [f"limits: {{max_cost_usd_per_day: {cap}}}" for cap in (0.05, 3, 7, 9)]
    caps = await asyncio.gather(*map(read_day_cap, texts))
    (event,) = await place.list_adopted()
    first = round(json.loads(event.policy)["limits"]["max_cost_usd_per_day"] * 1_000_000)
    numbers = [50_000, 3_000_000, 7_000_000, 9_000_000]
    assert caps == [str(min(first, cap)) for cap in numbers]


async def test_what_an_agent_started_adopts_nothing_and_is_bound_by_the_defaults(here: Place) -> None:
    loose = parse_fleet_file("mode: FULL\nlimits: {max_cost_usd_per_day: none}")
    async with open_runtime(here.settings("agent:clerk"), load_fleet=lambda _: loose) as app:
        assert app.fleet.spec.mode == "SEMI"
        assert app.fleet.spec.limits.max_cost_usd_per_day != loose.spec.limits.max_cost_usd_per_day
    assert await here.list_adopted() == []
    await here.buy_once(fleet=CENTS)
    assert [event.by for event in await here.list_adopted()] == ["ada"]


async def test_a_process_that_runs_since_before_the_policy_spends_nothing_beyond_it(place: Place) -> None:
    async with place.guard() as guard:
        assert (await guard.call("buy")).outcome == "ok"
        await place.apply("limits: {max_cost_usd_per_day: 0.05}")
        refused = await guard.call("buy")
        assert (refused.outcome, "left of the cap of fleet" in refused.text) == ("cost_cap_reached", True)
        await place.apply("limits: {max_cost_usd_per_day: 0.2}")
        assert (await guard.call("buy")).outcome == "ok"


async def test_only_a_person_with_the_highest_role_changes_it_and_the_event_names_what_it_loosens(here: Place) -> None:
    await here.buy_once(fleet=CENTS)
    text = "limits: {max_cost_usd_per_day: 5}\nmode: ASSIST"
    for who, role in (("agent:clerk", "admin"), ("bea", "operator")):
        with pytest.raises(NotDone):
            await here.apply(text, who, role)
    event = await here.apply(text)
    assert (event.by, event.loosens, bool(event.replaces)) == ("ada", ("limits.max_cost_usd_per_day",), True)
    assert (await here.buy_once(fleet=json.loads(event.policy))).outcome == "ok"


async def test_a_policy_that_somebody_else_changed_meanwhile_is_not_overwritten(here: Place) -> None:
    async with open_runtime(here.settings(), load_fleet=lambda _: parse_fleet_file("mode: SEMI")) as app:
        await app.adopt_policy()
        desk = Actor(app, Principal("ada"))
        store_policy = await desks.show(desk)
        await desks.apply(desk, store_policy, parse_fleet_file("mode: ASSIST"))
        with pytest.raises(NotDone, match="policy has changed in the meantime"):
            await desks.apply(desk, store_policy, parse_fleet_file("mode: FULL"))


async def test_an_agent_of_a_program_is_bound_too(here: Place) -> None:
    await here.use_first("policy: {disabled: [buy]}")
    model = Scripted([calls(("buy", {})), says("Done.")], SystemClock(), ModelName("scripted", "first"))
    agent = Agent("desk", store=here.store, settings=here.settings(), model=model, tools=[buy])
    with pytest.warns(PolicyWarning, match=r"policy\.disabled is `buy`"):
        result = await agent.run("go")
    assert [brake.name for brake in result.receipt.brakes] == ["buy"]


async def test_a_price_of_a_program_that_the_store_overrides_is_said_with_the_command_that_changes_it(
    here: Place,
) -> None:
    def make_agent(**price: float) -> Agent:
        model = Scripted([says("Done.")], SystemClock(), ModelName("openai", "gpt-4o"))
        fleet = {"models": {"openai:gpt-4o": {"price": price}}}
        return Agent("desk", store=here.store, settings=here.settings(), model=model, fleet=fleet)

    await make_agent(input=5, output=9).run("go")
    with pytest.warns(PolicyWarning) as warned:
        await make_agent(input=1, output=2).run("go")
    assert str(warned[0].message) == (
        "This store's policy applies instead of the agent's fleet to models.openai:gpt-4o.price ($5 in, $9 out, not $1 "
        "in, $2 out). To change the store's policy, write the keys of the agent's fleet into a halter.yaml, and run: "
        "halter policy apply halter.yaml"
    )


class Shell:
    """Somebody who types commands, in folders of their own, on one store."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agent = home / "clerk"
        self.agent.mkdir()
        (self.agent / "agent.yaml").write_text("name: clerk\n")
        (self.agent / "tools.py").write_text(TOOLS)
        (self.agent / "buy.yaml").write_text("- call: buy\n")
        TrustFile(home / ".config" / "halter" / "trust.json").trust(self.agent, digest_folder(self.agent), "ada", 0)

    def folder(self, name: str, file: str = "") -> Path:
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        if file:
            (folder / "halter.yaml").write_text(file)
        return folder

    def type_command(self, folder: Path, *words: str, **environ: str) -> tuple[int, str, str]:
        values = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HALTER_PERSON": "ada",
            "COLUMNS": "200",
            **environ,
        }
        with Halter(words, env=values, cwd=folder) as program:
            body, content = program.communicate(timeout=120)
        assert b"Traceback" not in content, content.decode()
        return program.wait(), body.decode(), content.decode()


TOOLS = """
from halter import tool


@tool(level="SAFE", effect="read", cost=0.06)
async def buy() -> str:
    '''Buy something.'''
    return "bought"
"""


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_a_command_in_a_folder_without_a_file_names_the_limit_that_blocks_it_in_one_line(shell: Shell) -> None:
    cents = shell.folder("cents", "limits: {max_cost_usd_per_day: 0.05}\n")
    bare, loose = shell.folder("bare"), shell.folder("loose", "limits: {max_cost_usd_per_day: 5}\n")
    play = ("play", "../clerk/buy.yaml")
    assert shell.type_command(cents, *play)[2].splitlines()[0] == (
        "halter.yaml becomes this store's policy when the first session starts, and binds every process that uses it. "
        "Show it with: halter policy"
    )
    assert "policy" not in shell.type_command(cents, *play)[2]
    code, _, text = shell.type_command(bare, *play)
    assert code == 1
    assert text.splitlines()[0] == (
        "No halter.yaml found, so only this store's policy applies: limits.max_cost_usd_per_day is $0.05. "
        "Show it with: halter policy"
    )
    assert shell.type_command(loose, *play)[2].splitlines()[0] == (
        "This store's policy applies instead of halter.yaml to limits.max_cost_usd_per_day ($0.05, not $5.00). "
        "To make halter.yaml the store's policy, run: halter policy apply halter.yaml"
    )
    assert "limits.max_cost_usd_per_day" in shell.type_command(loose, "doctor")[1]


REFUSED_COMMANDS = {
    "untrusted code": ("run", "../stranger", "hello"),
    "no such agent": ("run", "../nobody", "hello"),
    "an agent file with a mistake": ("run", "../mistaken", "hello"),
    "no model": ("run", "../clerk", "hello"),
    "a chat without a model": ("chat", "../clerk"),
    "no such playbook": ("play", "../clerk/none.yaml"),
    "a playbook of untrusted code": ("play", "../stranger/buy.yaml"),
    "a playbook with an unknown tool": ("play", "../clerk/sell.yaml"),
    "a playbook with an unknown input": ("play", "../clerk/buy.yaml", "--input", "a=b"),
    "a gateway without servers": ("gateway", "--agent", "../clerk"),
    "a trigger that does not exist": ("schedules", "run", "clerk/none", "--agent", ".."),
    "agents of untrusted code": ("up", "../stranger"),
}


@pytest.mark.parametrize("words", REFUSED_COMMANDS.values(), ids=REFUSED_COMMANDS)
def test_a_command_that_is_refused_adopts_no_policy(shell: Shell, words: tuple[str, ...]) -> None:
    strangers = shell.folder("strangers", "mode: FULL\nlimits: {max_cost_usd_per_day: 500}\n")
    shell.folder("stranger")
    for name, text in {"agent.yaml": "name: stranger\n", "tools.py": TOOLS, "buy.yaml": "- call: buy\n"}.items():
        (shell.home / "stranger" / name).write_text(text)
    (shell.folder("mistaken") / "agent.yaml").write_text("nmae: mistaken\n")
    (shell.agent / "sell.yaml").write_text("- call: sell\n")
    code, _, text = shell.type_command(strangers, *words)
    assert code != 0, text
    payload = json.loads(shell.type_command(strangers, "policy", "--json")[1])
    assert payload["policy"] == {}, text


async def test_reading_and_opening_adopt_nothing_and_the_first_session_does(here: Place) -> None:
    async with here.guard(fleet=CENTS) as guard:
        assert await here.list_adopted() == []
        await guard.call("buy")
        assert [event.by for event in await here.list_adopted()] == ["ada"]


async def test_a_file_that_waits_to_be_adopted_binds_its_process_as_the_stores_policy_would(here: Place) -> None:
    async with here.guard(fleet=CENTS) as guard:
        refused = await guard.call("buy")
        assert (refused.outcome, "left of the cap of fleet" in refused.text) == ("cost_cap_reached", True)


def test_a_person_makes_another_file_the_stores_policy_and_is_shown_first_what_it_loosens(shell: Shell) -> None:
    cents = shell.folder("cents", "limits: {max_cost_usd_per_day: 0.05}\n")
    loose = shell.folder("loose", "mode: ASSIST\nlimits: {max_cost_usd_per_day: 5}\n")
    play = ("play", "../clerk/buy.yaml")
    shell.type_command(cents, *play)
    code, _, text = shell.type_command(loose, "policy", "apply", "--yes", HALTER_AGENT="clerk")
    assert (code, "Only a person" in text) == (1, True)
    assert shell.type_command(loose, "policy", "apply")[0] == 2
    code, output, _ = shell.type_command(loose, "policy", "apply", "--yes", "--reason", "agreed")
    assert code == 0
    assert output.index("LOOSER") < output.index("stricter")
    assert shell.type_command(loose, *play)[0] == 0
    payload = json.loads(shell.type_command(cents, "policy", "show", "--json")[1])
    assert (payload["policy"]["mode"], payload["by"]) == ("ASSIST", "ada")
    assert {each["key"]: each["how"] for each in payload["differences"]} == {
        "mode": "looser",
        "limits.max_cost_usd_per_day": "stricter",
    }
    assert "already" in shell.type_command(loose, "policy", "apply")[1]


def test_a_raise_for_a_day_is_a_persons_word_beside_the_policy_and_leaves_it_as_it_is(shell: Shell) -> None:
    cents, bare = shell.folder("cents", "limits: {max_cost_usd_per_day: 0.05}\n"), shell.folder("bare")
    play = ("play", "../clerk/buy.yaml")
    shell.type_command(cents, *play)
    assert shell.type_command(bare, "budget", "raise", "fleet", "1")[0] == 0
    assert shell.type_command(bare, *play)[0] == 0
    assert json.loads(shell.type_command(bare, "policy", "--json")[1])["policy"] == {
        "limits": {"max_cost_usd_per_day": 0.05}
    }


async def test_unattended_agents_apply_a_policy_immediately_that_a_person_adopts(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path)
    sleeps = "- calls: [{tool: yield, arguments: {mode: sleep, sleep: 3600, reason: all quiet}}]\n"
    folder = fleet.agent("watch", "model: scripted\nscript: script.yaml\n", script_yaml=sleeps * 3)

    def tell(agent: str, text: str) -> None:
        fleet.told.append((agent, text))

    def make(app: Runtime) -> Supervisor:
        return Supervisor(app, tell, rng=random.Random(1), mode=mode_of(world))

    runner = FleetRunner(fleet.app, make)
    world.spawn(runner.run([folder]))
    await world.advance(MINUTE)
    assert cap_of(runner.supervisor) == 1_000_000
    desk = Actor(fleet.app, Principal("ada"))
    await desks.apply(desk, await desks.show(desk), parse_fleet_file("agents: {limits: {max_cost_usd: 0.07}}"))
    await world.advance(MINUTE)
    assert cap_of(runner.supervisor) == 70_000
    assert [sentence for _, sentence in fleet.told if "policy has changed" in sentence]
    assert (await fleet.row("watch-1")).state == "SLEEPING"


def cap_of(supervisor: Supervisor) -> int | None:
    return supervisor.agents["watch"].context.policy.caps.session.max_cost_usd


async def test_a_file_that_cannot_be_read_stops_what_acts_and_nothing_is_adopted(here: Place) -> None:
    (here.home / "halter.yaml").write_text("limts: {}\n")
    settings = read_settings({"HALTER_FLEET": str(here.home / "halter.yaml")}, here.home, here.store)
    with pytest.raises(ConfigError, match="`limts` is not a key"):
        async with open_runtime(settings):
            """Nothing acts."""
    async with open_runtime(settings, acts=False):
        """Reading needs no policy."""
    assert await here.list_adopted() == []
