"""The inbox says in one clause what made the guard ask: the level in the mode, the risk, a rule, or the provenance."""

import json
from pathlib import Path

import pytest

from halter.channels.messages import compose
from halter.core.clock import MINUTE, SECOND
from halter.core.text import to_one_line
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.operations import decisions, queries
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import to_json_object
from halter.present.tables import build_inbox_sheet
from halter.testing.world import World
from tests.story.autonomous import Fleet
from tests.story.test_provenance import READ, TO_MALLORY, run, says, story_of

DESK = """
autonomy: {{enabled: false}}
model: scripted
script: replies.yaml
mode: {mode}
schedules: [{{name: once, at: '2026-01-01T00:01:00Z', prompt: Look.}}]
"""
TOOLS = '''
from halter import tool

@tool(level="{level}", effect="write")
def wipe(command: str) -> str:
    """Run a command."""
    return "ran " + command
'''
CALLS = """
- {{when: Look, text: It is full., calls: [{{tool: wipe, arguments: {{command: {command}}}}}]}}
- {{repeat: true, text: Done.}}
"""

CASES = {
    "a level in the usual mode": ("RESTRICTED", "SEMI", "", "ls", "RESTRICTED in mode SEMI"),
    "a level in a stricter mode": ("CONTROLLED", "ASSIST", "", "ls", "CONTROLLED in mode ASSIST"),
    "a level that asks in every mode": ("PRIVILEGED", "FULL", "", "ls", "PRIVILEGED in mode FULL"),
    "a rule": ("CONTROLLED", "SEMI", "approval: always", "ls", "its rule says ask"),
    "a rule for two people": ("CONTROLLED", "FULL", "approvers: 2", "ls", "its rule needs two people"),
    "a risk": ("RESTRICTED", "FULL", "", "rm -rf /", "CRITICAL risk: rm deletes /; / is outside the folder"),
    "a level and a risk": (
        *("RESTRICTED", "SEMI", "", "rm -rf /"),
        "CRITICAL risk: rm deletes /; / is outside the folder, RESTRICTED in mode SEMI",
    ),
}


@pytest.mark.parametrize(("level", "mode", "rule", "command", "cause"), CASES.values(), ids=CASES)
async def test_each_face_says_which_of_them_made_the_guard_ask(
    world: World, tmp_path: Path, level: str, mode: str, rule: str, command: str, cause: str
) -> None:
    policy = f"policy: {{tools: {{wipe: {{{rule}}}}}}}\n" if rule else ""
    fleet = Fleet(world, tmp_path, f"mode: {mode}\n{policy}")
    folder = fleet.agent(
        "desk", DESK.format(mode=mode), TOOLS.format(level=level), replies_yaml=CALLS.format(command=command)
    )
    fleet.start(folder)
    await world.advance(2 * MINUTE)
    desk = Actor(fleet.app, Principal("ada", "approver"))
    (decision,) = await decisions.waiting(desk)
    (need,) = [need for need in await queries.read_needs(desk) if need.decision]
    assert (decision.cause, need.cause, to_json_object(decision)["cause"]) == (cause, cause, cause)
    sheet = build_inbox_sheet(await decisions.read_inbox(desk), world.clock.now())
    assert cause in to_one_line(str(sheet))
    message = compose(decision, world.clock.now(), lambda _: True, b"twelve bytes")
    assert f"\nAsked because: {cause}.\n" in message.text


async def test_a_value_from_untrusted_content_is_named_as_the_cause(world: World) -> None:
    story, _ = story_of(world, "ask", [READ, TO_MALLORY, says("Done.")])
    causes: list[str] = []

    async def note() -> None:
        while not causes:
            causes.extend(decision.cause for decision in await list_pending_decisions(world.journal))
            await world.clock.sleep(SECOND // 2)

    noting = world.spawn(note())
    await run(world, story)
    noting.cancel()
    assert [cause.partition("; ")[0] for cause in causes] == ["provenance: to: you did not name it for this"]


def make_question(**facts: object) -> PendingDecision:
    names = ("d1", "approval", "s1", "desk", "c1", "send", "digest", "RESTRICTED", "HIGH", "same", "[]")
    return PendingDecision(*names, 0, 1, b"send {}", facts=json.dumps(facts).encode())


def test_a_question_of_an_earlier_version_names_its_level() -> None:
    assert make_question(reasons=["it sends mail"]).cause == "level RESTRICTED"


def test_what_the_provenance_check_only_observes_is_no_cause() -> None:
    flaw = {"argument": "to", "value": "", "reason": "unsaid"}
    assert make_question(flaws=[flaw], mode="SEMI").cause == "RESTRICTED in mode SEMI"
