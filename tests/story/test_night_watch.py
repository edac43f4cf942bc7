"""The demo's live agent: what a newcomer sees within a minute, and that it keeps to what the demo made for it."""

import asyncio
import os
import random
import stat
from pathlib import Path
from typing import Any, cast

import pytest

from halter.cli.run.demo_agent import describe_demo
from halter.config.agent_files import read_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_agent
from halter.config.trust import TrustFile, digest_folder
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.errors import ConfigError
from halter.core.ids import inbox_stream, session_stream
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.demo.folder import (
    AGENT,
    FILES,
    LEFTOVER,
    LEFTOVER_INTERVAL,
    MAX_LEFTOVERS,
    RULES_MODEL,
    SERVICE_ROUND,
    DemoFolder,
    LayoutResult,
    Scenery,
    choose_demo_model,
    digest_shipped_code,
    find_demo_folder,
    is_down,
    lay_out_files,
)
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.testing.world import World
from tests.story.autonomous import CALM, rhythm
from tests.story.dispatching import mode_of

SESSION = f"{AGENT}-1"


class Demo:
    """The live part of the demo, in virtual time."""

    def __init__(self, world: World, home: Path) -> None:
        self.world = world
        self.place = DemoFolder(home / "demo")
        self.reports: list[str] = []
        self.lay_out()

    def lay_out(self, model: str = RULES_MODEL) -> LayoutResult:
        return lay_out_files(self.place, model, "ada", self.world.now)

    def start(self) -> asyncio.Task[None]:
        return self.world.spawn(self.process())

    async def process(self) -> None:
        store = cast("Any", self.world.store)
        settings = self.place.settings("ada")
        world, policy = self.world, use_local_policy(settings)
        app = Runtime(settings, world.clock, world.ids, store, cast("Any", None), world.ledger, {}, policy=policy)
        supervisor = Supervisor(
            app,
            lambda _, sentence: self.reports.append(sentence),
            rng=random.Random(self.world.seed),
            mode=mode_of(self.world),
        )
        around = Scenery(self.place.agent, self.world.clock).run_with
        await around(lambda: supervisor.run([self.place.agent]))

    async def events(self) -> list[Stored]:
        return await self.world.events(session_stream(SESSION))

    async def rhythm(self) -> list[str]:
        return [text.partition(" ")[2].partition(" until")[0] for text in rhythm(await self.events())]

    async def answer(self, verdict: str) -> None:
        (pending_decision,) = await list_pending_decisions(self.world.journal)
        assert (pending_decision.name, pending_decision.level) == ("delete_file", "RESTRICTED")
        await self.world.journal.commit(answer_decision(pending_decision, cast("Any", verdict), "ada", "answered"))

    @property
    def leftover(self) -> Path:
        return self.place.agent / "temp" / LEFTOVER


@pytest.fixture
def demo(world: World, tmp_path: Path) -> Demo:
    return Demo(world, tmp_path)


async def test_within_a_minute_there_is_a_signal_a_sleep_a_wake_and_a_decision(world: World, demo: Demo) -> None:
    demo.start()
    await world.advance(MINUTE)
    happened = await demo.rhythm()
    assert happened[:6] == ["turn 1", "yielded sleep", "SLEEPING", "woken by signal", "turn 2", "yielded sleep"]
    assert happened[-1] == "WAITING_FOR_APPROVAL"
    signals = [cast("Any", stored.event).name for stored in await world.events(inbox_stream(SESSION))]
    assert [name for name in signals if name != "log_error"] == ["service_down", "service_back", "old_file"]
    kinds = {stored.kind for stored in await demo.events()}
    assert {"finding_emitted", "decision_asked", "sensor_changed", "hot_state_seen"} <= kinds
    assert demo.leftover.exists()


async def test_approving_deletes_exactly_the_file_that_was_asked_about(world: World, demo: Demo) -> None:
    path = demo.leftover.with_name("older.tmp")
    path.write_text("also old")
    os.utime(path, (0, 0))
    (demo.leftover.with_name("new.tmp")).write_text("new")
    demo.start()
    await world.advance(MINUTE)
    assert await list_pending_decisions(world.journal)
    await demo.answer("approve")
    await world.advance(10 * SECOND)
    assert sorted(file.name for file in demo.leftover.parent.iterdir()) == ["new.tmp", "older.tmp"]
    assert (await demo.rhythm())[-2:] == ["yielded sleep", "SLEEPING"]


async def test_a_no_leaves_the_file_where_it_is_and_the_agent_keeps_watching(world: World, demo: Demo) -> None:
    demo.start()
    await world.advance(MINUTE)
    await demo.answer("deny")
    await world.advance(SERVICE_ROUND)
    assert demo.leftover.exists()
    assert await list_pending_decisions(world.journal) == []
    findings = [event for event in await demo.events() if event.kind == "finding_emitted"]
    assert len(findings) == 2


@CALM
async def test_who_is_not_answered_asks_whoever_comes_later_but_not_all_night(world: World, demo: Demo) -> None:
    demo.start()
    await world.advance(9 * MINUTE)
    assert [
        pending_decision.expires_at > world.now for pending_decision in await list_pending_decisions(world.journal)
    ] == [False, True]
    assert [event.kind for event in await demo.events()].count("decision_asked") == 2
    await world.advance((MAX_LEFTOVERS + 2) * LEFTOVER_INTERVAL)
    assert not [
        pending_decision
        for pending_decision in await list_pending_decisions(world.journal)
        if pending_decision.expires_at > world.now
    ]
    assert [event.kind for event in await demo.events()].count("decision_asked") == MAX_LEFTOVERS
    assert (await demo.rhythm())[-1] == "SLEEPING"


async def test_a_file_that_an_earlier_start_left_is_asked_about_within_a_minute(world: World, demo: Demo) -> None:
    demo.leftover.write_text("left by an earlier start")
    os.utime(demo.leftover, (0, 0))
    created_at = int(demo.leftover.stat().st_ctime * SECOND)
    await world.advance(created_at - world.now + HOUR)
    demo.start()
    await world.advance(20 * SECOND)
    assert not demo.leftover.exists()
    await world.advance(MINUTE)
    assert len(await list_pending_decisions(world.journal)) == 1


async def test_the_next_start_resumes_the_same_session(world: World, demo: Demo) -> None:
    process = demo.start()
    await world.advance(MINUTE)
    before = len(await demo.events())
    process.cancel()
    await world.restart()
    demo.lay_out()
    demo.start()
    await world.advance(20 * SECOND)
    await demo.answer("approve")
    await world.advance(MINUTE)
    rows = await world.journal.ask(Query("all_sessions", SessionRow))
    assert [row.session for row in rows] == [SESSION]
    assert len(await demo.events()) > before
    assert [sentence for sentence in demo.reports if "starts" in sentence] == [f"{SESSION} starts."]


async def test_it_costs_nothing_while_rules_think(world: World, demo: Demo) -> None:
    demo.start()
    await world.advance(3 * MINUTE)
    (row,) = await world.journal.ask(Query("all_sessions", SessionRow))
    charges = [cast("Any", stored.event).charge for stored in await demo.events() if stored.kind == "request_settled"]
    assert len(charges) > 3
    assert all(charge is None or charge.usd == 0 for charge in charges)
    assert row.agent == AGENT


def read_models(folder: Path) -> tuple[str, tuple[str, ...]]:
    model_settings = resolve_agent(FleetConfig(), read_agent(folder), folder).model_settings
    return model_settings.model, model_settings.fallback_models


KEYS = {
    "ANTHROPIC_API_KEY": "anthropic:claude-haiku-5-5",
    "OPENAI_API_KEY": "openai:gpt-6-luna",
    "GEMINI_API_KEY": "google:gemini-3.8-flash",
    "GOOGLE_API_KEY": "google:gemini-3.8-flash",
}


@pytest.mark.parametrize("key", KEYS)
def test_with_a_key_in_the_environment_that_providers_model_thinks(world: World, demo: Demo, key: str) -> None:
    model = choose_demo_model({key: "made up"}, lambda _: True)
    assert model == KEYS[key]
    layout = demo.lay_out(model)
    assert read_models(demo.place.agent) == (model, ("reflex:rules",))
    assert layout.changed == []
    assert f"It decides with {model}, whose key is in your environment." in describe_demo(demo.place, model, layout)
    demo.lay_out(RULES_MODEL)
    assert read_models(demo.place.agent) == ("reflex:rules", ())


def test_whoever_cannot_type_halter_yet_is_shown_how(demo: Demo, tmp_path: Path) -> None:
    layout = demo.lay_out()
    assert f"  export PATH='{tmp_path}/a clone':$PATH" in describe_demo(
        demo.place, RULES_MODEL, layout, tmp_path / "a clone"
    )
    assert "export PATH" not in "".join(describe_demo(demo.place, RULES_MODEL, layout))


@pytest.mark.parametrize("environ", [{}, {"ANTHROPIC_API_KEY": ""}, {"PATH": "/bin"}])
def test_without_a_key_rules_think(environ: dict[str, str]) -> None:
    assert choose_demo_model(environ, lambda _: True) == RULES_MODEL


def test_without_the_library_of_models_rules_think_whatever_key_there_is() -> None:
    assert choose_demo_model(dict.fromkeys(KEYS, "made up"), lambda _: False) == RULES_MODEL


def test_what_a_person_changed_is_kept_and_what_they_did_not_is_renewed(demo: Demo) -> None:
    rules, agent = demo.place.agent / "rules.yaml", demo.place.agent / "agent.yaml"
    rules.write_text(rules.read_text() + "# mine\n")
    agent.unlink()
    layout = demo.lay_out()
    assert layout.changed == ["rules.yaml"]
    assert layout.notes[0] == "Using your changed rules.yaml."
    assert rules.read_text().endswith("# mine\n")
    assert agent.exists()


def test_only_the_code_that_came_along_is_trusted_and_only_in_the_demos_own_list(demo: Demo) -> None:
    (folder, trusted), *others = TrustFile(demo.place.root / "trust.json").folders().items()
    assert not others
    assert (folder, trusted.digest) == (str(demo.place.agent.resolve()), digest_shipped_code())


@pytest.mark.parametrize("plant", ["tools.py", "more.py", "run", "lib/x"])
def test_changed_or_added_code_is_not_trusted_until_a_person_says_so(demo: Demo, plant: str) -> None:
    (demo.place.agent / plant).parent.mkdir(exist_ok=True)
    with (demo.place.agent / plant).open("a") as file:
        file.write("# planted\n")
    with pytest.raises(ConfigError, match=r"differs from the shipped code\. Review it, then run: HALTER_TRUST="):
        demo.lay_out()
    TrustFile(demo.place.root / "trust.json").trust(demo.place.agent, digest_folder(demo.place.agent), "ada", 0)
    assert demo.lay_out().notes[-1] == "Its code differs from the shipped code; you trusted it."


def test_nobody_else_can_look_into_the_demos_folder(demo: Demo) -> None:
    folders = [demo.place.root, *(path for path in demo.place.root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_the_demo_lives_beside_the_usual_store_whichever_store_is_set(tmp_path: Path) -> None:
    usual = tmp_path / ".local" / "state" / "halter" / "demo"
    assert find_demo_folder({"HALTER_STORE": "postgresql://db"}, tmp_path).root == usual
    assert find_demo_folder({"XDG_STATE_HOME": str(tmp_path / "x")}, None).root == tmp_path / "x" / "halter" / "demo"
    settings = find_demo_folder({}, tmp_path).settings("ada")
    for path in (Path(settings.store), settings.checkpoints, settings.signing_key, settings.trust):
        assert path is not None
        assert path.is_relative_to(usual)
    with pytest.raises(ConfigError, match="Set HOME or XDG_STATE_HOME"):
        find_demo_folder({}, None)


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"\(Not a directory\)\. Set XDG_STATE_HOME"):
        lay_out_files(DemoFolder(tmp_path / "file" / "halter" / "demo"), RULES_MODEL, "ada", 0)


def test_the_service_is_up_at_first_and_goes_down_and_comes_back_within_the_first_minute() -> None:
    seconds = [is_down(second * SECOND) for second in range(60)]
    assert (seconds[0], seconds[-1]) == (False, False)
    assert 10 <= sum(seconds) <= 20
    assert [is_down(SERVICE_ROUND + second * SECOND) for second in range(60)] == seconds


async def test_an_agent_that_cannot_run_is_a_sentence_and_no_breakdown(world: World, demo: Demo) -> None:
    (demo.place.agent / "agent.yaml").write_text("name: night-watch\nmodle: reflex\n")
    with pytest.raises(ConfigError, match="No agent can run"):
        await demo.process()
    assert any("`modle` is not a key" in sentence for sentence in demo.reports)


async def test_a_disk_that_takes_nothing_more_stops_no_agent(world: World, demo: Demo) -> None:
    (demo.place.agent / "logs" / "service.log").mkdir()
    demo.leftover.mkdir()
    demo.start()
    await world.advance(MINUTE)
    assert "woken by signal" in await demo.rhythm()


async def test_a_log_does_not_grow_without_end(world: World, demo: Demo) -> None:
    log = demo.place.agent / "logs" / "service.log"
    log.write_text("x" * 70_000)
    demo.start()
    await world.advance(5 * SECOND)
    assert log.stat().st_size < 1000


def test_the_agents_files_come_with_the_package_and_with_the_examples() -> None:
    shipped = Path(__file__).parents[2] / "src" / "halter" / "demo" / AGENT
    assert {file.name for file in shipped.iterdir() if file.is_file()} == set(FILES)
    assert f"src/halter/demo/{AGENT}" in (Path(__file__).parents[2] / "examples" / "README.md").read_text("utf-8")
