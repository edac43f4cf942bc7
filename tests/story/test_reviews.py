"""Findings: their quotes are looked for in their sources, and somebody else looks at them before people do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import FindingEmitted, FindingReviewed, JudgesChosen, NotificationQueued, RequestStarted
from halter.core.messages import Model, Prompt, Reply, Text, ToolCall
from halter.core.notifications import parse_notification
from halter.core.ports import read_body
from halter.core.usage import ModelName
from halter.guard.halts import cancel, halt, resume
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest
from halter.models.scripted import Scripted
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Listing
from halter.state import lifecycle
from halter.tasks.review import FindingInContext, JudgeAccess, JudgePanel, review_findings
from halter.testing.world import World
from tests.story.tasks import (
    DONE,
    FINDS,
    JUDGES,
    NOTIFIES,
    READS,
    REVIEW,
    SCRIPT,
    USED,
    WITHHOLDS,
    WORK,
    Office,
    all_is_well,
    paper,
    watch,
)

PRICED = 'models: {"scripted:script": {price: {input: 10, output: 10}}, "scripted:a": {price: {input: 10, output: 10}},\
 "scripted:b": {price: {input: 10, output: 10}}, "scripted:c": {price: {input: 10, output: 10}}}\n'
THREE = "judges: ['scripted:a', 'scripted:b', 'scripted:c']"
SESSION = "clerk.papers-1"


async def review_document(world: World, home: Path, text: str = "", script: str = SCRIPT, head: str = REVIEW) -> Office:
    """Let one document be reviewed."""
    office = Office(world, home, PRICED)
    office.reviewer(f"{text}{watch()}", script, head=head)
    office.drop("a.txt", paper(1))
    office.start(home / "clerk")
    await world.advance(MINUTE)
    return office


async def list_events(office: Office, kind: type[Any], session: str = SESSION) -> list[Any]:
    return [stored.event for stored in await office.events(session) if isinstance(stored.event, kind)]


async def test_the_reviewer_is_asked_anew_and_sees_the_source_and_not_the_authors_words(
    world: World, tmp_path: Path
) -> None:
    office = await review_document(world, tmp_path)
    (result,) = [event for event in await list_events(office, RequestStarted) if event.purpose == "judge"]
    (prompt,) = [prompt for prompt in office.prompts("clerk") if "You did not write it." in prompt.system]
    text = "\n".join(part.text for message in prompt.messages for part in message.parts if isinstance(part, Text))
    assert "The supplier 1 is liable without limit for all of it." in text
    assert "No limit" in text
    assert "That is done." not in text
    assert "begins:" not in text
    assert result.request.startswith(f"{SESSION}.judge.f-")
    (verdict,) = await list_events(office, FindingReviewed)
    assert (verdict.verdict, verdict.judges) == ("released", ("scripted:script",))
    assert len(await list_events(office, NotificationQueued)) == 1
    await all_is_well(world)


async def test_a_model_that_is_named_for_it_judges(world: World, tmp_path: Path) -> None:
    office = await review_document(world, tmp_path, "model_for: {judge: 'scripted:b'}\n")
    (result,) = [event for event in await list_events(office, RequestStarted) if event.purpose == "judge"]
    assert result.model == "scripted:b"


async def test_a_finding_that_is_withheld_is_never_shown_to_anybody(world: World, tmp_path: Path) -> None:
    office = await review_document(world, tmp_path, script=READS + FINDS + WITHHOLDS + NOTIFIES + DONE)
    (verdict,) = await list_events(office, FindingReviewed)
    assert verdict.verdict == "withheld"
    assert ("notify", "error") in await office.calls(SESSION)
    assert await list_events(office, NotificationQueued) == []
    assert await office.states() == {"COMPLETED": 1}


UNCLEAR = {
    "unavailable": "fails: {kind: Overloaded, unavailable: true, billed: false}",
    "refused": "fails: {kind: Refused}",
    "in words only": 'text: "All is well, release it."',
    "neither yes nor no": "calls: [{tool: answer, arguments: {release: perhaps}}]",
}


@pytest.mark.parametrize("case", UNCLEAR)
async def test_without_a_clear_answer_nothing_was_reviewed_and_the_notice_says_so(
    world: World, tmp_path: Path, case: str
) -> None:
    judge = f'- {{when: "The data: ", repeat: true, {UNCLEAR[case]}}}\n'
    hurried = REVIEW.replace("max_output_tokens: 500", "max_output_tokens: 500, outage_backoff: 0")
    office = await review_document(world, tmp_path, script=READS + FINDS + judge + NOTIFIES + DONE, head=hurried)
    (verdict,) = await list_events(office, FindingReviewed)
    assert verdict.verdict == "not_reviewed"
    results = [event for event in await list_events(office, RequestStarted) if event.purpose == "judge"]
    assert len(results) == (3 if case == "unavailable" else 1)
    (stored,) = [each for each in await office.events(SESSION) if isinstance(each.event, NotificationQueued)]
    assert b"not reviewed" in await read_body(world.journal, stored)


@pytest.mark.parametrize(("by", "marked"), [("the paper", True), ("the task", False)])
async def test_a_link_that_only_a_document_said_is_marked_in_a_notice(
    world: World, tmp_path: Path, by: str, *, marked: bool
) -> None:
    link = "https://elsewhere.example/pay"
    tells = f"""
- when: "begins: delivery"
  repeat: true
  {USED}
  calls: [{{tool: notify, arguments: {{text: "It is to be paid at {link} by Friday."}}}}]
"""
    office = Office(world, tmp_path, PRICED)
    output = watch() if marked else watch().replace("has come in.", f"has come in. We pay at {link}")
    office.reviewer(output, READS + tells + DONE)
    office.drop("a.txt", paper(1, f"Pay at {link} only." if marked else ""))
    office.start(tmp_path / "clerk")
    await world.advance(MINUTE)
    (stored,) = [each for each in await office.events(SESSION) if isinstance(each.event, NotificationQueued)]
    notice = parse_notification(await read_body(world.journal, stored)).text
    assert ("The answer has links from no trusted source" in notice) == marked, by


async def test_what_was_released_is_not_called_unreviewed(world: World, tmp_path: Path) -> None:
    office = await review_document(world, tmp_path)
    (stored,) = [each for each in await office.events(SESSION) if isinstance(each.event, NotificationQueued)]
    assert b"not reviewed" not in await read_body(world.journal, stored)


@pytest.mark.parametrize(
    ("cap", "chosen", "verdict"), [("1", 3, "released"), ("0.03", 1, "released"), ("0.001", 0, "not_reviewed")]
)
async def test_fewer_judges_are_asked_where_all_of_them_might_cost_too_much(
    world: World, tmp_path: Path, cap: str, chosen: int, verdict: str
) -> None:
    office = await review_document(world, tmp_path, f"review: {{{THREE}, max_cost_per_message_usd: {cap}}}\n")
    (event,) = await list_events(office, JudgesChosen)
    assert (event.wanted, event.chosen, event.items) == (3, chosen, 1)
    assert event.usd <= event.cap
    assert bool(event.sentence) is (chosen < 3)
    results = [event for event in await list_events(office, RequestStarted) if event.purpose == "judge"]
    assert [each.model for each in results] == ["scripted:a", "scripted:b", "scripted:c"][:chosen]
    (result,) = await list_events(office, FindingReviewed)
    assert result.verdict == verdict
    assert len(result.judges) == chosen


async def test_a_session_without_findings_needs_no_judge(world: World, tmp_path: Path) -> None:
    office = await review_document(world, tmp_path, script=READS + DONE)
    assert await list_events(office, JudgesChosen) == []
    assert await office.states() == {"COMPLETED": 1}


SLOW = f'- {{when: "The data: ", repeat: true, takes: 30s, {USED}, text: Hm.}}\n'


@pytest.mark.parametrize(("how", "state"), [("halt", "HALTED"), ("cancel", "CANCELLED")])
async def test_who_is_stopped_while_a_judge_thinks_tells_nobody_anything(
    world: World, tmp_path: Path, how: str, state: str
) -> None:
    office = Office(world, tmp_path, PRICED)
    office.reviewer(watch(), READS + FINDS + SLOW + NOTIFIES + DONE)
    office.drop("a.txt", paper(1))
    office.start(tmp_path / "clerk")
    await world.advance(20 * SECOND)
    scope = f"session:{SESSION}"
    await world.store.commit(halt(scope, "ada", "stop") if how == "halt" else cancel(SESSION, "ada", "stop"))
    await world.advance(SECOND)
    row = await office.row(SESSION)
    assert row.state == state
    assert await list_events(office, NotificationQueued) == []


async def test_a_session_halted_during_the_review_and_resumed_is_reviewed_before_anybody_is_notified(
    world: World, tmp_path: Path
) -> None:
    office = Office(world, tmp_path, PRICED)
    slow = WITHHOLDS.replace("repeat: true", "repeat: true\n  takes: 30s")
    office.reviewer(watch("max_parallel: 1, debounce: 2s"), READS + FINDS + slow + NOTIFIES + DONE)
    office.drop("a.txt", paper(1))
    office.start(tmp_path / "clerk")
    await world.advance(20 * SECOND)
    await world.store.commit(halt(f"session:{SESSION}", "ada", "stop"))
    await world.advance(SECOND)
    assert (await office.row(SESSION)).state == "HALTED"
    await world.store.commit(lifecycle.reopen_session(SESSION, "again", "ada"))
    await world.store.commit(resume(f"session:{SESSION}", "ada", "go on"))
    await world.advance(5 * MINUTE)
    assert (await office.row(SESSION)).state == "COMPLETED"
    (event,) = await list_events(office, FindingReviewed)
    assert event.verdict == "withheld"
    assert await list_events(office, NotificationQueued) == []


OPINIONS = {
    True: Reply((ToolCall("a", "answer", '{"release":true}'),), "calls"),
    False: Reply((ToolCall("a", "answer", '{"release":false}'),), "calls"),
    None: Reply((Text("Hm.", "model", trusted=False),)),
}


@pytest.mark.parametrize(
    ("opinions", "verdict"),
    [
        ([True, True, False], "released"),
        ([True, False, False], "withheld"),
        ([True, False, None], "withheld"),
        ([True, None, None], "released"),
        ([False, None, None], "withheld"),
        ([None, None, None], "not_reviewed"),
    ],
)
async def test_most_of_several_judges_decide_and_a_tie_withholds(
    world: World, opinions: Sequence[bool | None], verdict: str
) -> None:
    judges = [Scripted([], world.clock, ModelName("scripted", name)) for name in "abc"]
    results: list[FindingReviewed | JudgesChosen] = []

    async def ask(request: ModelRequest, model: Model, _: int) -> AnsweredRequest | FailedRequest:
        return AnsweredRequest(request.id, OPINIONS[opinions["abc".index(model.name.model)]])

    async def write(_: str, event: FindingReviewed | JudgesChosen, __: bytes | None) -> None:
        results.append(event)

    def price(_: Model, __: Prompt) -> int:
        return 1

    finding_in_contexts = [FindingInContext("f-1", "It says so.", "supported", "It says so.")]
    access = JudgeAccess(price, ask, wait_for_nothing, write)
    assert await review_findings("s", finding_in_contexts, JudgePanel(tuple(judges)), access) is None
    (_, event) = results
    assert isinstance(event, FindingReviewed)
    assert event.verdict == verdict


async def wait_for_nothing(_: Sequence[FailedRequest], __: int | None) -> None:
    """A session that a person attends does not wait."""


@pytest.mark.parametrize(("cap", "attempts"), [(None, 3), (100, 3), (25, 2), (10, 1)])
async def test_a_judge_who_fails_is_asked_again_only_for_money_that_is_left(
    world: World, cap: int | None, attempts: int
) -> None:
    numbers: list[int] = []

    async def ask(request: ModelRequest, _: Model, attempt: int) -> AnsweredRequest | FailedRequest:
        numbers.append(attempt)
        return FailedRequest(f"{request.id}/{attempt}", "error", "Overloaded", cost_usd=10, may_retry=True)

    async def write(_: str, __: FindingReviewed | JudgesChosen, ___: bytes | None) -> None:
        """Nobody reads it."""

    judging = JudgePanel((Scripted([], world.clock),), cap=cap)
    access = JudgeAccess(lambda _, __: 10, ask, wait_for_nothing, write)
    await review_findings("s", [FindingInContext("f-1", "So.", "supported", "So.")], judging, access)
    assert numbers == list(range(attempts))


QUOTES = """
- when: "begins: drafting"
  calls:
    - {tool: emit_finding, arguments: {title: One, severity: high, document: a.txt, quote: is liable without limit}}
    - {tool: emit_finding, arguments: {title: Two, severity: high, document: a.txt, quote: is never liable at all}}
    - {tool: emit_finding, arguments: {title: Three, severity: high, document: a.txt}}
    - {tool: emit_finding, arguments: {title: Four, severity: info}}
    - {tool: emit_finding, arguments: {title: Five, severity: high, document: b.txt, quote: another supplier}}
    - {tool: emit_finding, arguments: {title: Six, severity: high, document: ../script.yaml, quote: begins drafting}}
    - {tool: emit_finding, arguments: {title: Seven, severity: dreadful}}
"""


async def test_quotes_are_looked_for_in_the_documents_of_the_session_and_no_others(
    world: World, tmp_path: Path
) -> None:
    office = Office(world, tmp_path, PRICED)
    office.reviewer(watch("max_parallel: 1"), QUOTES + JUDGES + DONE)
    office.drop("a.txt", paper(1))
    office.start(tmp_path / "clerk")
    await world.advance(4 * SECOND)
    office.drop("b.txt", "This is another supplier altogether.")
    await world.advance(MINUTE)
    results = await list_events(office, FindingEmitted)
    assert sorted((event.support, event.name) for event in results) == [
        ("supported", "a.txt"),
        ("unquoted", ""),
        ("unquoted", "a.txt"),
        ("unsupported", "a.txt"),
    ]
    outcomes = [outcome for tool, outcome in await office.calls(SESSION) if tool == "emit_finding"]
    assert sorted(outcomes) == ["error", "error", "invalid_arguments", "ok", "ok", "ok", "ok"]
    assert len(await list_events(office, FindingReviewed)) == 4


async def test_a_judge_who_costs_more_than_all_that_was_left_ends_the_session(world: World, tmp_path: Path) -> None:
    dear = JUDGES.replace(USED, "usage: {input_tokens: 100, output_tokens: 500000}")
    office = await review_document(world, tmp_path, script=READS + FINDS + dear + NOTIFIES + DONE)
    row = await office.row(SESSION)
    assert (row.state, row.terminal_reason) == ("BUDGET_EXCEEDED", "overrun")
    assert await list_events(office, NotificationQueued) == []
    assert [event.purpose for event in await list_events(office, RequestStarted)][-1] == "judge"


FINDS_AT_ONCE = f"""
- {USED}
  calls:
    - tool: emit_finding
      arguments: {{title: No limit, severity: high, document: a.txt, quote: The supplier 1 is liable without limit}}
"""
TELLS = NOTIFIES.replace('- when: "begins: delivery"\n  finds', "- finds").replace("  repeat: true\n", "")


async def work_on_document(world: World, home: Path, text: str, script: str) -> Office:
    """Let one document be worked on in a single phase."""
    office = Office(world, home, PRICED)
    office.reviewer(f"{text}{watch()}", script, head=WORK)
    office.drop("a.txt", paper(1))
    office.start(home / "clerk")
    await world.advance(MINUTE)
    return office


NAMED = "review: {judges: ['scripted:script']}\n"


@pytest.mark.parametrize(("judges", "outcome"), [(JUDGES, "ok"), (WITHHOLDS, "error")])
async def test_judges_review_a_finding_of_any_task_before_it_is_reported(
    judges: str, outcome: str, world: World, tmp_path: Path
) -> None:
    office = await work_on_document(world, tmp_path, NAMED, judges + FINDS_AT_ONCE + TELLS + DONE)
    assert ("notify", outcome) in await office.calls(SESSION)
    (verdict,) = await list_events(office, FindingReviewed)
    assert verdict.verdict == ("released" if outcome == "ok" else "withheld")
    assert len(await list_events(office, NotificationQueued)) == (outcome == "ok")
    await all_is_well(world)


async def test_judges_review_what_a_task_reported_to_nobody_when_it_ends(world: World, tmp_path: Path) -> None:
    office = await work_on_document(world, tmp_path, NAMED, JUDGES + FINDS_AT_ONCE + DONE)
    (verdict,) = await list_events(office, FindingReviewed)
    assert verdict.verdict == "released"
    assert (await office.row(SESSION)).state == "COMPLETED"


async def test_a_finding_that_nothing_reviewed_says_so(world: World, tmp_path: Path) -> None:
    office = await work_on_document(world, tmp_path, "", JUDGES + FINDS_AT_ONCE + TELLS + DONE)
    assert await list_events(office, FindingReviewed) == []
    (queued,) = [each for each in await office.events(SESSION) if isinstance(each.event, NotificationQueued)]
    assert b"(not reviewed)" in await read_body(world.journal, queued)
    sheet = build_receipt_sheet(await office.receipt(SESSION))
    (findings,) = [part for part in sheet if isinstance(part, Listing) and part.title == "Findings"]
    assert "not reviewed" in findings.rows[0]
