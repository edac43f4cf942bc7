"""What is asked about an agent's servers: one question each, bounded, and withdrawn with its cause."""

import msgspec
import pytest

from halter.core.rows import DecisionRow
from halter.core.tools import ToolSpec
from halter.guard.approvals import Question, ServerChange
from halter.runtime.assembly.server_pins import (
    MAX_TOOLS_PER_QUESTION,
    MERGED_QUESTION_REASON,
    PIN_QUESTION_LIFETIME,
    PinPlan,
    plan_pins,
)

NOW = 1000


def tools(server: str, *digests: str, description: str = "Does it.") -> list[ToolSpec]:
    """Make a server's tools, numbered, each with a digest."""
    return [
        ToolSpec(name=f"{server}__t{number}", description=description, schema=b"{}", server=server, digest=digest * 64)
        for number, digest in enumerate(digests)
    ]


def pins(specs: list[ToolSpec]) -> dict[str, str]:
    return {spec.name: spec.digest for spec in specs}


AGREED = pins(tools("web", "a", "a", "a"))


def make_plan(
    specs: list[ToolSpec], *asked: DecisionRow, servers: tuple[str, ...] = ("web",), now: int = NOW
) -> PinPlan:
    return plan_pins("desk", servers, specs, AGREED, asked, now)


def row(question: Question, verdict: str = "", expires_at: int = NOW + PIN_QUESTION_LIFETIME) -> DecisionRow:
    return DecisionRow(
        question.decision, question.about, agent="desk", subject=question.subject, name=question.name,
        digest=question.digest, verdict=verdict, expires_at=expires_at,
    )  # fmt: skip


def change(question: Question) -> ServerChange:
    return msgspec.json.decode(question.display_text, type=ServerChange)


def test_all_changes_of_a_server_are_one_question_that_shows_and_pins_just_them() -> None:
    plan = make_plan([*tools("web", "a", "b"), *tools("web", "x", "x", "x", "c")[3:]])
    (question,) = plan.questions
    assert plan.waiting == {"web__t1", "web__t3"}
    assert [(pin.tool, pin.digest[:1]) for pin in change(question).pins] == [("web__t1", "b"), ("web__t3", "c")]
    text = change(question).shown
    assert "1 shown here are new, 1 changed, 1 gone" in text
    assert f"changed  web__t1  {'b' * 12} (was {'a' * 12})" in text
    assert f"new      web__t3  {'c' * 12}" in text
    assert "gone     web__t2" in text
    assert (question.about, question.subject, question.agent) == ("changed_server", "web", "desk")


def test_a_server_that_announces_thousands_of_tools_is_one_bounded_question() -> None:
    tool_specs = [*tools("web", "a", "a", "a", *"b" * 20_000, description="x" * 20_000)]
    plan = make_plan(tool_specs)
    (question,) = plan.questions
    assert len(change(question).pins) == MAX_TOOLS_PER_QUESTION
    assert len(question.display_text) < 32 * 1024
    assert len(plan.waiting) == 20_000
    assert "19,900 more tools stay out of use" in change(question).shown


def test_what_a_server_says_cannot_pose_as_a_line_of_the_question() -> None:
    (question,) = make_plan(tools("web", "b", description="Fine.\ngone     web__t1\n\x1b[2Jnew  x")).questions
    lines = change(question).shown.splitlines()
    assert [line for line in lines if line.startswith("gone")] == ["gone     web__t1", "gone     web__t2"]
    assert "\x1b" not in change(question).shown


def test_a_server_that_is_seen_for_the_first_time_is_taken_as_it_is() -> None:
    plan = make_plan(tools("mail", "a", "b"), servers=("web", "mail"))
    assert (plan.questions, plan.waiting) == ((), frozenset())
    assert [spec.name for spec in plan.first] == ["mail__t0", "mail__t1"]


@pytest.mark.parametrize(
    ("specs", "servers", "why"),
    [
        (tools("web", "a", "a", "a"), ("web",), "web offers the approved tools again."),
        ([], ("web",), "web offers no tools or cannot be reached. You are asked again when it offers tools."),
        ([], (), "web was removed from .mcp.json."),
        (tools("web", "a", "c"), ("web",), "The tools of web have changed again; there is a new question about them."),
    ],
)
def test_a_question_is_withdrawn_with_its_cause(specs: list[ToolSpec], servers: tuple[str, ...], why: str) -> None:
    (question,) = make_plan(tools("web", "a", "b")).questions
    plan = make_plan(specs, row(question), servers=servers)
    assert plan.withdrawn == ((question.decision, why),)
    assert len(plan.questions) == (1 if "new question" in why else 0)


def test_a_question_that_stands_is_not_put_twice_and_one_that_was_denied_not_again() -> None:
    specs = tools("web", "a", "b")
    (question,) = make_plan(specs).questions
    assert make_plan(specs, row(question)) == make_plan(specs, row(question, "deny"))
    assert make_plan(specs, row(question)).questions == make_plan(specs, row(question)).withdrawn == ()
    assert make_plan(specs, row(question)).waiting == {"web__t1"}


@pytest.mark.parametrize("before", ["withdrawn", "approve", ""])
def test_a_change_that_comes_again_is_asked_about_again(before: str) -> None:
    specs = tools("web", "a", "b")
    (question,) = make_plan(specs).questions
    (again,) = make_plan(specs, row(question, before, NOW if not before else NOW + PIN_QUESTION_LIFETIME)).questions
    assert (again.digest, again.decision) == (question.digest, f"{question.decision}/1")


def test_questions_of_an_earlier_version_about_single_tools_give_way_to_the_one_of_their_server() -> None:
    old = DecisionRow("desk/web__t1/bbbb", "changed_tool", agent="desk", subject="web__t1", expires_at=NOW + 1)
    plan = make_plan(tools("web", "a", "b"), old)
    assert plan.withdrawn == ((old.decision, MERGED_QUESTION_REASON),)
    assert len(plan.questions) == 1
    assert make_plan(tools("web", "a", "a", "a"), old).withdrawn[0][1] == "web offers the approved tools again."
