"""Which model works by a skill, and how much of what people kept a session is given."""

from pathlib import Path

from autonomous import Fleet

from halter.core.events import MemoryProposed, PrecedentProposed, ProposalDecided
from halter.core.ids import FLEET, WorkerId, session_stream
from halter.core.messages import Reply, Text, ToolCall
from halter.core.ports import Draft, Write
from halter.core.project import rows_of_event
from halter.core.usage import ModelName
from halter.models.scripted import Scripted, ScriptLine, say
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.session_origin import MAX_ACCEPTED_ENTRIES, read_accepted_context
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session
from halter.testing.world import World

CALL = ToolCall("1", "run_skill", '{"skill": "proofread", "input": "Teh end."}')


async def test_a_skill_is_worked_by_the_model_that_is_named_for_it(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, 'models: {"openai:large": {price: free}, "openai:small": {price: free}}\n')
    more = "model: openai:large\nmodel_for: {skill: openai:small}\nverbs: [run_skill]\n"
    folder = fleet.agent("desk", f"autonomy: {{enabled: false}}\n{more}")
    path = folder / ".agents" / "skills" / "proofread"
    path.mkdir(parents=True)
    (path / "SKILL.md").write_text("Mend the spelling.")
    large = Scripted(
        [ScriptLine(reply=Reply((CALL,), "calls")), say("Done.")], world.clock, ModelName("openai", "large")
    )
    small = Scripted([say("The end.")], world.clock, ModelName("openai", "small"))
    models = {"openai:large": large, "openai:small": small}
    async with open_folder_agent(fleet.app, folder, WorkerId("w"), models=models) as context:
        await attend_session(context, await begin_session(context, "Mend it.", "task"))
    (prompt,) = small.requests
    (part,) = prompt.messages[0].parts
    assert isinstance(part, Text)
    assert (prompt.system, part.text, part.trusted) == ("Mend the spelling.", "Teh end.", False)


async def test_a_session_is_given_the_newest_of_what_people_kept_and_not_all_of_it(world: World) -> None:
    for number in range(MAX_ACCEPTED_ENTRIES + 5):
        name = f"m-{number:03}"
        proposed, event = MemoryProposed(memory=name, agent="desk"), _make_verdict(name)
        drafts = [Draft(proposed, b"Remember %d." % number), Draft(event, stream=FLEET)]
        rows = rows_of_event(proposed)
        write = Write(session_stream("s"), name, lambda _, drafts=drafts: drafts, rows, others=(FLEET,))
        await world.journal.commit(write)
    memories, _, words = await read_accepted_context(world.journal, "desk")
    assert (len(memories), memories[-1]) == (MAX_ACCEPTED_ENTRIES, f"m-{MAX_ACCEPTED_ENTRIES + 4:03}")
    assert words.count("Remember") == MAX_ACCEPTED_ENTRIES


async def test_an_agent_that_remembers_nothing_is_given_its_cases_the_most_frequent_first(world: World) -> None:
    for name, times in (("rare", 1), ("usual", 2)):
        proposed = PrecedentProposed(precedent=name, agent="desk", kind="Liability")
        for time in range(times):
            drafts = [Draft(proposed, b"Seen %d." % time)]
            rows = rows_of_event(proposed)
            await world.journal.commit(
                Write(session_stream("s"), f"{name}-{time}", lambda _, drafts=drafts: drafts, rows)
            )
        event = ProposalDecided(proposal=name, about="precedent", status="kept", by="ada")
        await world.journal.commit(Write(FLEET, name, lambda _, event=event: [Draft(event)], rows_of_event(event)))
    memories, precedents, words = await read_accepted_context(world.journal, "desk")
    assert (memories, precedents) == ((), ("usual", "rare"))
    assert words.splitlines()[1:] == [
        "- Liability: Seen 0. (seen 2 times, usual)",
        "- Liability: Seen 0. (seen 1 times, rare)",
    ]


def _make_verdict(memory: str) -> ProposalDecided:
    return ProposalDecided(proposal=memory, about="memory", status="kept", by="ada")
