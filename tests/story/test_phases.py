"""The walk of a task: forward only, each phase with its own turn, whatever happens on the way."""

from pathlib import Path

from halter.core.clock import MINUTE, SECOND
from halter.core.events import PhaseEntered, TurnStarted
from halter.guard.halts import halt, resume
from halter.runtime.session_start import post_message
from halter.testing.world import World
from tests.story.tasks import WORK, Office, all_is_well, watch

WALK = WORK + "phases: {look: [retrieve_chunks], think: [], tell: [notify], rest: all}\n"
SLOW = """
- {when: "begins: think", repeat: true, takes: 20s, text: I thought.}
- {repeat: true, text: That is done.}
"""


def office_of(world: World, home: Path, script: str = SLOW, head: str = WALK) -> Office:
    office = Office(world, home)
    office.reviewer(watch(), script, head=head)
    office.drop("a.txt", "the first words")
    office.start(home / "clerk")
    return office


async def list_phases(office: Office, session: str = "clerk.papers-1") -> list[str]:
    """The phases and turns of a session, in their order."""
    texts: list[str] = []
    for stored in await office.events(session):
        match stored.event:
            case PhaseEntered(phase=phase):
                texts.append(phase)
            case TurnStarted(turn=turn):
                texts.append(f"turn {turn}")
            case _:
                pass
    return texts


ALL = ["look", "turn 1", "think", "turn 2", "tell", "turn 3", "rest", "turn 4"]


async def test_an_agent_may_have_phases_of_its_own(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}
    assert await list_phases(office) == ALL
    offered = [{tool.name for tool in prompt.tools} for prompt in office.prompts("clerk")]
    always = {"ask_user", "read_output"}
    assert offered[:3] == [always | {"retrieve_chunks"}, always, always | {"notify"}]
    assert offered[3] >= always | {"retrieve_chunks", "notify", "emit_finding"}
    await all_is_well(world)


async def test_an_agent_without_phases_has_one_in_which_everything_may_be_used(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, head=WORK)
    await world.advance(MINUTE)
    assert await list_phases(office) == ["turn 1"]
    texts = [part.text for prompt in office.prompts("clerk") for message in prompt.messages for part in message.parts]
    assert not any("begins" in text for text in texts)


async def test_a_message_during_a_walk_is_answered_in_the_current_phase(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path)
    await world.advance(10 * SECOND)
    assert (await list_phases(office))[-1] == "turn 2"
    assert office.up is not None
    await post_message(office.up.agents["clerk"].context, "clerk.papers-1", "Make haste.")
    await world.advance(5 * MINUTE)
    assert await office.states() == {"COMPLETED": 1}
    phases = [each for each in await list_phases(office) if not each.startswith("turn")]
    assert phases == ["look", "think", "tell", "rest"]


ASKS = """
- {when: "begins: think", calls: [{tool: ask_user, arguments: {question: Which one?}}]}
- {repeat: true, text: That is done.}
"""


async def test_a_session_that_asks_a_person_resumes_in_the_same_phase_when_they_answer(
    world: World, tmp_path: Path
) -> None:
    office = office_of(world, tmp_path, ASKS)
    await world.advance(MINUTE)
    assert await office.states() == {"WAITING_FOR_INPUT": 1}
    assert (await list_phases(office))[-2:] == ["think", "turn 2"]
    assert office.up is not None
    await post_message(office.up.agents["clerk"].context, "clerk.papers-1", "The first one.")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}
    phases = [each for each in await list_phases(office) if not each.startswith("turn")]
    assert phases == ["look", "think", "tell", "rest"]


async def test_a_halt_between_two_phases_ends_the_walk_and_the_document_is_started_again(
    world: World, tmp_path: Path
) -> None:
    office = office_of(world, tmp_path)
    await world.advance(10 * SECOND)
    await world.store.commit(halt("agent:clerk", "ada", "stop"))
    await world.advance(MINUTE)
    assert await list_phases(office) == ["look", "turn 1", "think", "turn 2"]
    await world.store.commit(resume("agent:clerk", "ada", "go on"))
    await world.advance(2 * MINUTE)
    assert await office.states() == {"HALTED": 1, "COMPLETED": 1}
    assert await list_phases(office, "clerk.papers-2") == ALL
