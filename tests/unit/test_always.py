"""The rules that a person is offered are made of the call that is shown, and say all that they allow."""

from typing import Any

import msgspec
import pytest

from halter.core.errors import NotDone
from halter.core.tools import ToolSpec, Valid
from halter.guard.approvals import PendingDecision, StandingRule, matches_rule
from halter.operations.rules import list_rule_offers, rule_for


def make_decision(values: dict[str, Any], risk: str = "LOW", simulated: str = "") -> PendingDecision:
    text = f"run {msgspec.json.encode(values, order='sorted').decode()}{simulated}"
    keys = msgspec.json.encode(list(values)).decode()
    return PendingDecision("d1", "approval", "s1", "desk", "c1", "run", "digest", "RESTRICTED", risk, "same", keys, 0,
                           9, text.encode())  # fmt: skip


def rule_matches(match: str, fields: dict[str, Any], called: dict[str, Any]) -> bool:
    rule = rule_for(make_decision(fields), "r1", match, "fleet", 5)
    standing_rule = StandingRule(
        id="r1", tool="run", matcher=rule.matcher, keys=rule.keys, scope="fleet", by="ann", made_at=0, expires_at=5
    )
    canonical = msgspec.json.encode(called, order="sorted")
    return matches_rule(
        standing_rule, ToolSpec(name="run", description="", schema=b""), Valid(called, canonical), "", "", 1
    )


def list_offered_matches(values: dict[str, Any], risk: str = "LOW") -> list[str]:
    return [each.match for each in list_rule_offers(make_decision(values, risk))]


def test_a_command_offers_itself_and_its_last_operand_opened() -> None:
    values = {"argv": ["git", "show", "abc"], "folder": ".", "stdin": ""}
    same, wider = list_rule_offers(make_decision(values))
    assert (same.match, same.sentence) == ("same", "with exactly the same arguments")
    assert wider.match == "words:argv=git show *"
    assert wider.sentence == (
        "where argv is git show * (* matches part of one word, never an option); "
        'folder is exactly "."; stdin is exactly ""'
    )
    assert rule_matches(wider.match, values, {**values, "argv": ["git", "show", "def"]})
    for other in ({"argv": ["git", "show", "-x"]}, {"argv": ["git", "push", "abc"]}, {"stdin": "x"}, {"folder": "/"}):
        assert not rule_matches(wider.match, values, {**values, **other})


@pytest.mark.parametrize(
    "argv",
    [["ls"], ["git", "log", "-p"], ["bash", "x.sh"], ["python3.11", "x.py"], ["sudo", "ls"], ["xargs", "rm"],
     ["env", "x"], ["cat", "/etc/passwd"], ["echo", "a b"], ["echo", "$HOME"]],
)  # fmt: skip
def test_what_cannot_be_opened_safely_is_offered_only_as_it_is(argv: list[str]) -> None:
    assert list_offered_matches({"argv": argv}) == ["same"]


def test_a_path_and_an_address_are_offered_with_everything_else_as_it_was() -> None:
    write = {"path": "notes/a.md", "content": "x", "mode": "w"}
    assert list_offered_matches(write) == ["same", "under:path=notes\nany:content"]
    assert rule_matches("under:path=notes\nany:content", write, {**write, "path": "notes/b.md", "content": "y"})
    assert not rule_matches("under:path=notes\nany:content", write, {**write, "mode": "a"})
    get = {"url": "https://api.example.com/v1", "method": "GET"}
    assert list_offered_matches(get) == ["same", "at:url=api.example.com"]
    assert not rule_matches("at:url=api.example.com", get, {**get, "method": "DELETE"})


@pytest.mark.parametrize(("risk", "expected"), [("HIGH", ["same"]), ("CRITICAL", [])])
def test_the_riskier_a_call_the_less_is_offered(risk: str, expected: list[str]) -> None:
    assert list_offered_matches({"argv": ["git", "show", "abc"]}, risk) == expected


@pytest.mark.parametrize(
    ("values", "match", "sentence"),
    [
        ({"argv": ["ls"], "key": "[redacted:x]"}, "words:argv=ls", "Use same or any:key"),
        ({"argv": ["ls"]}, "", "Invalid match"),
        ({"argv": ["ls"]}, "\n".join(["any:argv"] * 60), "Invalid match"),
        ({"argv": ["ls"]}, "same\nany:argv", "Invalid match"),
    ],
)
def test_a_rule_that_cannot_mean_what_is_shown_is_a_sentence(values: dict[str, Any], match: str, sentence: str) -> None:
    with pytest.raises(NotDone, match=sentence):
        rule_for(make_decision(values), "r1", match, "session", 5)


def test_what_was_predicted_of_a_call_is_no_part_of_its_rule() -> None:
    (first, *_) = list_rule_offers(
        make_decision({"argv": ["ls", "x"]}, simulated="\n\n[ANTICIPATORY SIMULATION] It lists x.")
    )
    assert first.match == "same"
