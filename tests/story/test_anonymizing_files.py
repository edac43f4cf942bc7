"""What an agent's file says of hiding is what its sessions do: from the folder to what a model elsewhere is sent."""

from pathlib import Path

import msgspec
import pytest
from autonomous import Fleet

from halter.core.ids import WorkerId
from halter.core.messages import Prompt, Reply, Text, make_user_message
from halter.core.usage import ModelName
from halter.models.scripted import Scripted, ScriptLine
from halter.redaction.anonymize import anonymize_prompt
from halter.redaction.personal_data import compile_names
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session
from halter.testing.world import World

TASK = "Write to mara@example.com, who is Mara Lindqvist."
FREE = 'models: {"openai:x": {price: free}}\n'


async def sent(world: World, tmp_path: Path, text: str) -> tuple[str, list[Prompt]]:
    """The session, and all that its model was sent."""
    fleet = Fleet(world, tmp_path, FREE)
    folder = fleet.agent("desk", f"autonomy: {{enabled: false}}\nmodel: openai:x\n{text}")
    model = Scripted(
        [ScriptLine(reply=Reply((Text("Done.", "model"),)), repeat=True)], world.clock, ModelName("openai", "x")
    )
    async with (
        open_folder_agent(fleet.app, folder, WorkerId("w"), models={"openai:x": model}) as context,
    ):
        session = await begin_session(context, TASK, "task")
        ending, _ = await attend_session(context, session)
        assert ending.state == "COMPLETED"
    return session, model.requests


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
    (guessed,) = anonymize_prompt(Prompt(messages=(make_user_message(TASK),)), session, ()).values
    assert guessed.startswith("[EMAIL_")
    assert guessed not in msgspec.json.encode(prompts).decode()


async def test_the_names_of_an_agent_are_compiled_before_its_first_request(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, FREE)
    folder = fleet.agent(
        "desk", "autonomy: {enabled: false}\nanonymize: {enabled: true, names: [Ida Quill, Jon Reed]}\n"
    )
    compile_names.cache_clear()
    async with open_folder_agent(fleet.app, folder):
        assert compile_names.cache_info().misses == 1
        compile_names(("Ida Quill", "Jon Reed"))
    assert compile_names.cache_info().misses == 1
