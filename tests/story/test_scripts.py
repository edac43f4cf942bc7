"""A message that names a playbook plays it: its steps go through the guard, its inputs come from the message."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.runtime.message_router import HandledMessage, SubSessionObserver, parse_playbook_inputs
from halter.testing.world import World
from tests.story.fronts import front

TIDY = """\
- call: look
  arguments: {at: "${inputs.place}"}
- call: count
"""


async def test_a_playbook_is_played_step_by_step_without_a_model(world: World, tmp_path: Path) -> None:
    steps: list[tuple[str, str]] = []
    showing = SubSessionObserver(on_step=lambda step, answer: steps.append((step.call, answer.text)))
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, playbooks__tidy_yaml=TIDY)
        message = await desk.says('run playbook tidy with place="the loft"', showing=showing)
        assert isinstance(message, HandledMessage)
        assert (message.routed.strategy, message.ok) == ("SCRIPT", True)
        assert message.answer == f"tidy (session {message.session}): COMPLETED, completed."
        assert steps == [("look", "nothing at the loft"), ("count", "3")]
        assert "request_started" not in [event.kind for event in world.history]


async def test_inputs_that_are_missing_are_named_and_nothing_begins(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, playbooks__tidy_yaml=TIDY)
        message = await desk.says("run tidy")
        assert isinstance(message, HandledMessage)
        assert not message.ok
        assert message.answer == "tidy needs `place`: say run tidy with place=VALUE"
        assert await world.journal.ask(Query("all_sessions", SessionRow)) == []


async def test_a_playbook_that_calls_what_the_agent_does_not_have_is_a_sentence(world: World, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        desk = await front(stack, world, tmp_path, playbooks__odd_yaml="- call: fly\n")
        message = await desk.says("run playbook odd")
        assert isinstance(message, HandledMessage)
        assert not message.ok
        assert "calls `fly`, which desk does not have" in message.answer


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ("with a=1, b: two", {"a": "1", "b": "two"}),
        ("a=\"x y\" b='z'", {"a": "x y", "b": "z"}),
        ("a=", {}),
        ("a= b=2", {"b": "2"}),
        ("c=3", {}),
        ("for the loft", {}),
    ],
)
def test_inputs_are_read_only_where_they_are_named(rest: str, found: dict[str, str]) -> None:
    assert parse_playbook_inputs(rest, ("a", "b")) == found
