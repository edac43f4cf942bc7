"""The page about agents that run by themselves tells the truth. Its files are read where all pages are tried out."""

import re
from pathlib import Path

from msgspec import UNSET

from halter.autonomy.upkeep import RESTART_WINDOW, RestartAfter, decide_restart
from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_agent
from halter.config.sections import list_unwritten_fields
from halter.config.yaml_reader import load_bytes
from halter.core.clock import MINUTE, SECOND, format_duration
from halter.core.events import (
    AnyEvent,
    GuardrailTriggered,
    SensorChanged,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    WakePosted,
)
from halter.runtime.feed import name_feed_event
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from halter.runtime.worker import MAX_TAKEOVERS
from halter.spec.autonomy import ALWAYS_WAKING_NAMES, Autonomy
from halter.spec.sensors import AnySensor

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "autonomy.md").read_text("utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \|", re.MULTILINE)


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_first_file_on_the_page_says_all_that_it_needs(tmp_path: Path) -> None:
    resolved_agent = resolve_agent(FleetConfig(), parse_agent(load_bytes(BLOCKS[0].encode(), "agent.yaml")), tmp_path)
    assert resolved_agent.pacing.autonomy.enabled
    assert resolved_agent.model_settings.model
    assert list_unwritten_fields(resolved_agent.pacing) == ()


def test_the_limits_have_the_defaults_that_hold() -> None:
    usual, fields = Autonomy(), dict(ROW.findall(section("Limits")))
    assert fields == {
        "max_consecutive_turns": str(usual.max_consecutive_turns),
        "token_budget_per_hour": str(usual.token_budget_per_hour),
        "max_actions_per_minute": str(usual.max_actions_per_minute),
        "idle_timeout": format_duration(usual.idle_timeout),
        "active_hours": "none" if usual.active_hours is UNSET else "some",
        "min_sleep": format_duration(usual.min_sleep),
        "max_sleep": format_duration(usual.max_sleep),
    }


EVENTS: tuple[AnyEvent, ...] = (
    TurnStarted(turn=1),
    TurnEnded(turn=1, why="ended"),
    TurnSkipped(stage="change", skips=1),
    GuardrailTriggered(guardrail="idle_timeout", sentence="."),
    SensorChanged(sensor="s", health="failing"),
    WakePosted(cause="signal", origin="sensor", sender="s", notifies=True),
)


def test_every_type_of_sensor_and_every_word_that_is_taken_is_on_the_page() -> None:
    assert tuple(dict(ROW.findall(section("Sensors")))) == tuple(
        kind.__struct_config__.tag for kind in AnySensor.__args__
    )
    assert all(f"`{word}`" in section("Yield") for word in ALWAYS_WAKING_NAMES)


def test_every_name_of_the_feed_is_on_the_page() -> None:
    fields = dict(ROW.findall(section("Feed")))
    texts = {name_feed_event(event, autonomous=True) for event in EVENTS}
    assert texts | {"autonomy:sensor_updated"} == set(fields)
    assert len(fields) == 7


def test_the_page_tells_how_often_a_breakdown_is_tried_again() -> None:
    failures, texts = list[int](), list[str]()
    while isinstance(restart := decide_restart([*failures, 0], 0), RestartAfter):
        failures.append(0)
        texts.append(str(restart.after // SECOND))
    words = f"after {', '.join(texts[:-1])} and {texts[-1]} seconds; after {len(failures) + 1} breakdowns within"
    page = " ".join(section("Running").split())
    assert words in page
    assert f"within {RESTART_WINDOW // MINUTE} minutes" in page
    assert f"over which {MAX_TAKEOVERS} processes died" in page
    assert f"for {DEFAULT_LEASE_DURATION // SECOND} seconds more" in page
