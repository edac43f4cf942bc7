"""What an agent's file says of hiding is what its sessions do: from the folder to what a model elsewhere is sent."""

from pathlib import Path

import msgspec
import pytest
from autonomous import Fleet

from halter.app.agent import assembled
from halter.app.agent_context import AgentContext, models_of
from halter.app.talking import attend, begin
from halter.core.ids import WorkerId
from halter.core.messages import Prompt, Reply, Text, user
from halter.core.usage import ModelName
from halter.guard.anonymize import anonymized
from halter.guard.names import compiled
from halter.models.scripted import Line, Scripted
from halter.testing.world import World

TASK = "Write to mara@example.com, who is Mara Lindqvist."
FREE = 'models: {"openai:x": {price: free}}\n'


async def sent(world: World, tmp_path: Path, more: str) -> tuple[str, list[Prompt]]:
    """The session, and all that its model was sent."""
    fleet = Fleet(world, tmp_path, FREE)
    folder = fleet.agent("desk", f"autonomy: {{enabled: false}}\nmodel: openai:x\n{more}")
    model = Scripted([Line(reply=Reply((Text("Done.", "model"),)), repeat=True)], world.clock, ModelName("openai", "x"))
    async with assembled(fleet.app, folder) as agent, models_of(fleet.app, agent, {"openai:x": model}) as models:
        speaking = AgentContext(fleet.app, agent, models, WorkerId("w"))
        session = await begin(speaking, TASK, "task")
        came, _ = await attend(speaking, session)
        assert came.state == "COMPLETED"
    return session, model.asked


@pytest.mark.parametrize(
    ("more", "mail", "name"),
    [
        ("phases: review\n", False, True),
        ("phases: review\nanonymize: {names: [Mara Lindqvist]}\n", False, False),
        ("anonymize: true\n", False, True),
        ("anonymize: {enabled: true, names: [Mara Lindqvist]}\n", False, False),
        ("", True, True),
        ("phases: review\nanonymize: false\n", True, True),
    ],
)
async def test_a_file_decides_what_a_model_elsewhere_is_told(
    world: World, tmp_path: Path, more: str, *, mail: bool, name: bool
) -> None:
    _, prompts = await sent(world, tmp_path, more)
    text = msgspec.json.encode(prompts).decode()
    assert ("mara@example.com" in text, "Mara Lindqvist" in text) == (mail, name)
    assert ("[EMAIL_" in text) == (not mail)


async def test_what_stands_for_a_value_cannot_be_guessed_from_the_name_of_its_session(
    world: World, tmp_path: Path
) -> None:
    session, prompts = await sent(world, tmp_path, "anonymize: true\n")
    (guessed,) = anonymized(Prompt(messages=(user(TASK),)), session, ()).values
    assert guessed.startswith("[EMAIL_")
    assert guessed not in msgspec.json.encode(prompts).decode()


async def test_the_names_of_an_agent_are_compiled_before_its_first_request(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, FREE)
    folder = fleet.agent(
        "desk", "autonomy: {enabled: false}\nanonymize: {enabled: true, names: [Ida Quill, Jon Reed]}\n"
    )
    compiled.cache_clear()
    async with assembled(fleet.app, folder):
        assert compiled.cache_info().misses == 1
        compiled(("Ida Quill", "Jon Reed"))
    assert compiled.cache_info().misses == 1
