"""Skills and playbooks inside of a session: what is done in them passes the guard, and carries its own cost."""

from pathlib import Path

import pytest

from halter.core.clock import MINUTE
from halter.core.events import CallRefused, RequestStarted
from halter.core.messages import Text, ToolResult
from halter.core.money import micros_to_usd
from halter.testing.world import World
from tests.story.tasks import DONE, PRICED, REVIEW, STEP, USED, WORK, Office, all_is_well, paper, watch

SKILL = "---\nname: check\ndescription: Checks papers.\n---\nCheck it as a careful reader would.\n"
OWN = '''
from halter import tool

DONE = []


@tool(level="SAFE", effect="read", cost="0.004")
async def weigh(text: str) -> str:
    """Weigh it, for some money."""
    return f'{{"grams": {len(text)}}}'


@tool(level="SAFE", effect="read")
async def fail() -> str:
    """Fail."""
    raise ValueError("it cannot be done")
'''
SESSION = "clerk.papers-1"


def script_call(tool: str, arguments: str, phase: str = "") -> str:
    when = f'when: "begins: {phase}"' if phase else "when: The document is"
    return f"- {{{when}, {USED}, calls: [{{tool: {tool}, arguments: {arguments}}}]}}\n"


BY_SKILL = f"- {{when: By this., repeat: true, {USED}, text: By the skill.}}\n"


def office_of(world: World, home: Path, script: str, playbook: str = "", head: str = WORK) -> Office:
    office = Office(world, home, PRICED)
    folder = office.reviewer(watch(), script + BY_SKILL + DONE, head=head)
    (folder / ".agents" / "skills" / "check").mkdir(parents=True)
    (folder / ".agents" / "skills" / "check" / "SKILL.md").write_text(SKILL)
    (folder / "playbooks").mkdir()
    if playbook:
        (folder / "playbooks" / "steps.yaml").write_text(playbook)
    (folder / "tools.py").write_text(OWN)
    office.trust(folder)
    office.drop("a.txt", paper(1))
    return office


async def run_office(world: World, home: Path, script: str, playbook: str = "", head: str = WORK) -> Office:
    office = office_of(world, home, script, playbook, head)
    office.start(home / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}
    await all_is_well(world)
    return office


def list_results(office: Office) -> list[ToolResult]:
    """List the results of its calls that the model was shown."""
    last = max(office.prompts("clerk"), key=lambda prompt: len(prompt.messages))
    return [part for message in last.messages for part in message.parts if isinstance(part, ToolResult)]


async def test_a_skill_works_by_its_own_request_and_that_carries_the_cost(world: World, tmp_path: Path) -> None:
    office = await run_office(world, tmp_path, script_call("run_skill", "{skill: check, input: By this.}"))
    (asked,) = [
        stored.event
        for stored in await office.events(SESSION)
        if isinstance(stored.event, RequestStarted) and stored.event.purpose == "skill"
    ]
    receipt = await office.receipt(SESSION)
    assert receipt.spent_by_purpose_usd == {"turn": micros_to_usd(2 * STEP), "skill": micros_to_usd(STEP)}
    assert [line.cost_usd for line in receipt.calls] == [0]
    assert asked.request.startswith(receipt.calls[0].id)
    (prompt,) = [each for each in office.prompts("clerk") if each.system.startswith("Check it as a careful")]
    parts = [part for message in prompt.messages for part in message.parts]
    assert [part.trusted for part in parts if isinstance(part, Text)] == [False]
    assert prompt.tools == ()
    assert [result.text for result in list_results(office)] == ["By the skill."]


async def test_an_unknown_skill_is_an_error_that_lists_the_available_ones(world: World, tmp_path: Path) -> None:
    office = await run_office(world, tmp_path, script_call("run_skill", "{skill: cook, input: By this.}"))
    assert await office.calls(SESSION) == [("run_skill", "invalid_arguments")]
    assert "Unknown skill 'cook'. Available: `check`." in list_results(office)[0].text


async def test_a_skill_that_may_not_wait_is_tried_again_and_then_fails_for_the_model(
    world: World, tmp_path: Path
) -> None:
    fails = "- {when: By this., repeat: true, fails: {kind: Overloaded, unavailable: true, billed: false}}\n"
    hurried = WORK.replace("max_output_tokens: 500", "max_output_tokens: 500, outage_backoff: 0")
    office = await run_office(
        world, tmp_path, script_call("run_skill", "{skill: check, input: By this.}") + fails, head=hurried
    )
    receipt = await office.receipt(SESSION)
    assert [line.outcome for line in receipt.requests if line.purpose == "skill"] == ["error"] * 3
    assert await office.calls(SESSION) == [("run_skill", "error")]


async def test_a_skill_folder_without_its_file_is_reported_when_the_agent_starts(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, "")
    (tmp_path / "clerk" / ".agents" / "skills" / "check" / "SKILL.md").unlink()
    good = office.agent("other", "model: scripted\nscript: script.yaml\n", script_yaml=DONE)
    office.start(tmp_path / "clerk", good)
    await world.advance(MINUTE)
    (text,) = [sentence for name, sentence in office.told if not name]
    assert "check has no SKILL.md. Write one that describes the skill, or remove the folder." in text


PLAY = script_call("run_playbook", "{playbook: steps, inputs: {file: a.txt}}")
STEPS = """
- {call: retrieve_chunks, arguments: {file: "${inputs.file}"}, as: text}
- {call: weigh, arguments: {text: "${steps.text.text}"}, as: weight}
- {call: emit_finding, arguments: {title: "It weighs ${steps.weight.json.grams}", severity: info}}
"""


async def test_the_steps_of_a_playbook_pass_the_guard_and_refer_to_earlier_results(
    world: World, tmp_path: Path
) -> None:
    office = await run_office(world, tmp_path, PLAY, STEPS)
    receipt = await office.receipt(SESSION)
    assert [(line.name, line.outcome, line.cost_usd) for line in receipt.calls] == [
        ("run_playbook", "ok", 0),
        ("retrieve_chunks", "ok", 0),
        ("weigh", "ok", micros_to_usd(4000)),
        ("emit_finding", "ok", 0),
    ]
    assert all(line.id.startswith(f"{receipt.calls[0].id}/") for line in receipt.calls[1:])
    (finding,) = [event for event in await office.events(SESSION) if event.kind == "finding_emitted"]
    assert b"It weighs " in (finding.body or b"")


async def test_a_step_that_the_phase_does_not_grant_is_refused_and_ends_the_playbook(
    world: World, tmp_path: Path
) -> None:
    play = PLAY.replace("The document is", '"begins: analysis"')
    office = await run_office(world, tmp_path, play, STEPS, REVIEW)
    assert await office.calls(SESSION) == [
        ("retrieve_chunks", "ok"),
        ("weigh", "tool_not_granted"),
        ("run_playbook", "error"),
    ]
    (refused,) = [each.event for each in await office.events(SESSION) if isinstance(each.event, CallRefused)]
    assert refused.phase == "analysis"


FAILS = """
- {call: retrieve_chunks, arguments: {file: a.txt}}
- {call: fail}
- {call: emit_finding, arguments: {title: No, severity: info}}
"""


async def test_a_step_that_fails_ends_the_playbook_and_the_model_sees_what_was_done(
    world: World, tmp_path: Path
) -> None:
    office = await run_office(world, tmp_path, PLAY, FAILS)
    assert await office.calls(SESSION) == [("retrieve_chunks", "ok"), ("fail", "error"), ("run_playbook", "error")]
    (output,) = [result.text for result in list_results(office) if result.tool == "run_playbook"]
    assert "step 2 (fail): error" in output
    assert "The supplier 1 is liable" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("{playbook: none}", "Unknown playbook 'none'. Available: `steps`."),
        ("{playbook: steps}", "steps needs `file` in `inputs`."),
    ],
)
async def test_a_playbook_that_cannot_run_is_an_error_that_names_what_is_missing(
    world: World, tmp_path: Path, arguments: str, sentence: str
) -> None:
    office = await run_office(world, tmp_path, script_call("run_playbook", arguments), STEPS)
    assert await office.calls(SESSION) == [("run_playbook", "invalid_arguments")]
    assert sentence in list_results(office)[0].text


def with_cap(cap: str, *steps: str) -> str:
    return f"max_cost_usd: {cap}\nsteps:\n" + "".join(f"  - {step}\n" for step in steps)


WEIGH = "{call: weigh, arguments: {text: abc}}"
BY = "{call: run_skill, arguments: {skill: check, input: By this.}}"
CAPPED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "the money is used up": (with_cap("0.008", WEIGH, WEIGH, WEIGH), [("weigh", "ok"), ("weigh", "ok")]),
    "a step does not fit": (
        with_cap("0.01", WEIGH, WEIGH, WEIGH),
        [("weigh", "ok"), ("weigh", "ok"), ("weigh", "cost_cap_reached")],
    ),
    "the first one does not fit": (with_cap("0.003", WEIGH), [("weigh", "cost_cap_reached")]),
    "a skill counts as well": (with_cap("0.0015", BY, BY), [("run_skill", "error")]),
}


@pytest.mark.parametrize("case", CAPPED)
async def test_the_steps_of_a_playbook_together_never_cost_more_than_it_says(
    world: World, tmp_path: Path, case: str
) -> None:
    playbook, steps = CAPPED[case]
    office = await run_office(world, tmp_path, PLAY, playbook)
    assert await office.calls(SESSION) == [*steps, ("run_playbook", "error")]
    receipt = await office.receipt(SESSION)
    inside = [line for line in (*receipt.calls, *receipt.requests) if line.id.startswith(f"{receipt.calls[0].id}/")]
    assert sum(line.cost_usd for line in inside) <= float(playbook.split()[1])


async def test_a_skill_inside_of_a_playbook_counts_for_its_cap(world: World, tmp_path: Path) -> None:
    office = await run_office(world, tmp_path, PLAY, with_cap("0.03", *[BY] * 30))
    receipt = await office.receipt(SESSION)
    skills = [line for line in receipt.requests if line.purpose == "skill"]
    assert 1 <= len(skills) < 30
    assert sum(line.cost_usd for line in skills) <= micros_to_usd(30_000)


async def test_a_playbook_that_a_schedule_plays_keeps_to_its_cap_as_well(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, "", with_cap("0.01", WEIGH, WEIGH, WEIGH))
    agent = tmp_path / "clerk" / "agent.yaml"
    agent.write_text(f"{agent.read_text()}schedules: [{{name: tick, playbook: playbooks/steps.yaml, every: 10m}}]\n")
    office.trust(tmp_path / "clerk")
    office.start(tmp_path / "clerk")
    await world.advance(11 * MINUTE)
    receipt = await office.receipt("clerk.tick-1")
    assert [line.outcome for line in receipt.calls] == ["ok", "ok"]
    assert (receipt.cost_usd, receipt.state, receipt.terminal_reason) == (
        micros_to_usd(8000),
        "BUDGET_EXCEEDED",
        "cost_cap_reached",
    )


async def test_a_playbook_that_plays_itself_comes_to_an_end(world: World, tmp_path: Path) -> None:
    office = office_of(world, tmp_path, PLAY, "- {call: run_playbook, arguments: {playbook: other}}\n")
    (tmp_path / "clerk" / "playbooks" / "other.yaml").write_text(
        "- {call: run_playbook, arguments: {playbook: steps, inputs: {file: a.txt}}}\n"
    )
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    assert await office.states() == {"COMPLETED": 1}
    assert await office.calls(SESSION) == 3 * [("run_playbook", "error")]
