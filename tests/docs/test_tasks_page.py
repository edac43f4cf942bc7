"""The page about tasks tells the truth about defaults. Its files are read where all pages are tried out."""

import re
from pathlib import Path

from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import REVIEW_PHASES, resolve_agent
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, format_duration
from halter.spec.agent import AgentSpec
from halter.spec.channels import AnyChannel, Notify
from halter.spec.triggers import Schedule, Watch, Webhook
from halter.tasks.task_tools import RETRY_PAUSES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tasks.md").read_text("utf-8")
WORDS = " ".join(PAGE.split())
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \|", re.MULTILINE)


def section(title: str) -> str:
    return PAGE.partition(f"\n{title}\n")[2].partition("\n## ")[0].partition("\n### ")[0]


def test_the_first_file_on_the_page_says_all_that_it_needs(tmp_path: Path) -> None:
    resolved_agent = resolve_agent(FleetConfig(), parse_agent(load_bytes(BLOCKS[0].encode(), "agent.yaml")), tmp_path)
    assert resolved_agent.model_settings.model
    assert [trigger.name for trigger in resolved_agent.tasks.triggers()] == ["lapsing", "new-contracts"]
    assert len(resolved_agent.tasks.verbs) == 7
    assert resolved_agent.tasks.anonymize == ("Ada Lovelace", "Example Ltd")


def test_the_defaults_on_the_page_are_those_that_hold() -> None:
    schedule, watch = Schedule(name="x"), Watch(name="x")
    assert dict(ROW.findall(section("### Schedules"))) == {
        "overlap": f"`{schedule.overlap}`",
        "catch_up": f"`{schedule.catch_up}`",
        "jitter": str(schedule.jitter),
        "min_interval": format_duration(schedule.min_interval),
        "active_hours": "always",
    }
    assert dict(ROW.findall(section("### Watches"))) == {
        "pattern": f"`{watch.pattern}`",
        "debounce": format_duration(watch.debounce),
        "max_attempts": str(watch.max_attempts),
        "max_parallel": str(watch.max_parallel),
        "existing": f"`{watch.existing}`".lower(),
    }
    assert f"`max_bytes` ({Webhook(name='x', token='').max_bytes})" in WORDS
    assert f"`idle_halt_minutes` ({AgentSpec(name='x').idle_halt_minutes:g})" in WORDS


def test_the_walk_of_a_review_on_the_page_is_the_one_that_is_walked() -> None:
    values = {name: tuple(re.findall(r"`(\w+)`", granted)) for name, granted in ROW.findall(section("## Phases"))}
    assert values == {phase.name: phase.grants for phase in REVIEW_PHASES}


def test_every_type_of_channel_and_everything_that_is_told_of_is_on_the_page() -> None:
    assert tuple(dict(ROW.findall(section("## Telling people")))) == tuple(
        kind.__struct_config__.tag for kind in AnyChannel.__args__
    )
    assert all(f"`{word}`" in section("## Telling people") for word in Notify().on)


def test_the_page_tells_how_long_a_channel_is_waited_for() -> None:
    short = [format_duration(pause) for pause in RETRY_PAUSES if pause < DAY]
    days = len(RETRY_PAUSES) - len(short)
    assert f"after {', '.join(short[:-1])} and {short[-1]}, then once a day for {days} days" in WORDS
