"""An "always" answers what a person agreed to, and nothing that only looks like it."""

from hashlib import sha256
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.rows import RuleRow
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.approvals import (
    AnyCondition,
    ArgvCondition,
    EachArgument,
    FolderCondition,
    HostCondition,
    LegacyFolder,
    LegacyHost,
    LegacyWords,
    RuleMatcher,
    SameArguments,
    StandingRule,
    UnreadableRule,
    decode_rule,
    digest_approval,
    make_equals_condition,
    matches_rule,
)

SPEC = ToolSpec(name="run", description="Runs.", schema=b"{}")


def valid(values: dict[str, Any]) -> Valid:
    return Valid(values, msgspec.json.encode(values, order="sorted"))


def rule(matcher: RuleMatcher, scope: RuleScope = "fleet", owner: str = "", keys: tuple[str, ...] = ()) -> StandingRule:
    return StandingRule(
        id="r1", tool="run", matcher=matcher, keys=keys, scope=scope, owner=owner, by="ann", made_at=10, expires_at=20
    )


def answers(standing_rule: StandingRule, values: dict[str, Any], now: int = 15) -> bool:
    return matches_rule(standing_rule, SPEC, valid(values), "s1", "night-watch", now)


GIT = EachArgument((ArgvCondition("command", ("git", "status")),))


def command(*words: str) -> StandingRule:
    return rule(EachArgument((ArgvCondition("command", words),)))


@pytest.mark.parametrize("line", ["git status", "git  status", ["git", "status"], "git 'status'"])
def test_exactly_the_command_that_was_agreed_to_is_answered(line: Any) -> None:
    assert answers(rule(GIT), {"command": line})


@pytest.mark.parametrize(
    "line",
    [
        "git status -s",
        "git status --porcelain",
        ["git", "status", "; rm"],
        "git status; rm -rf ~",
        "git status && rm -rf ~",
        "git status | sh",
        "git status\nrm -rf ~",
        "git status\n",
        "git status & rm -rf ~",
        "git status $(rm -rf ~)",
        'git status "$(rm -rf ~)"',
        "git status `rm -rf ~`",
        "git status $HOME",
        "git status > ~/.bashrc",
        "GIT_PAGER=evil git status",
        "sudo git status",
        "env git status",
        "bash -c 'git status'",
        "git statusx",
        "gitx status",
        "git",
        "/srv/git status",
        "git 'status",
        "(git status)",
        "git status <(rm -rf ~)",
        ["git status"],
        ["sudo", "git", "status"],
        ["git"],
        ["git", "status", ""],
        [],
        ["git", 7],
        7,
        None,
        {"git": "status"},
    ],
)
def test_a_command_that_does_more_or_something_else_is_not_answered(line: Any) -> None:
    assert not answers(rule(GIT), {"command": line})


def test_always_for_find_does_not_cover_find_that_deletes() -> None:
    for line in ("find . -delete", "find . -exec rm {} +", "find . /", "find"):
        assert not answers(command("find", "."), {"command": line})
        assert not answers(command("find", "*"), {"command": line})
    assert answers(command("find", "."), {"command": "find ."})


@pytest.mark.parametrize("word", ["abc", "a.txt", "v1.2+x", "é", "main:x", "a=b"])
def test_a_wildcard_is_a_piece_of_one_word(word: str) -> None:
    assert answers(command("git", "show", "*"), {"command": ["git", "show", word]})
    assert answers(command("git", "show", "x-*-y"), {"command": ["git", "show", f"x-{word}-y"]})


@pytest.mark.parametrize(
    "word",
    ["", "-delete", "--output=x", "a b", "a/b", "/etc/passwd", "..", ".", "a;b", "a|b", "a&b", "a>b", "a<b", "$HOME",
     "a`b`", "$(x)", "a\nb", "a\tb", "a\0b", "a'b", 'a"b', "a\\b", "{a,b}", "~", "*", "?", "[a]", "!x",
     "#x", "\u202ex"],
)  # fmt: skip
def test_a_wildcard_matches_no_separator_operator_option_or_step_up(word: str) -> None:
    assert not answers(command("git", "show", "*"), {"command": ["git", "show", word]})


@pytest.mark.parametrize(
    ("pattern", "word", "fits"),
    [
        ("notes/*", "notes/a.md", True),
        ("notes/*", "notes/..", False),
        ("notes/*", "notes/.", False),
        ("notes/*", "notes/a/b", False),
        ("notes/*", "notes2/a", False),
        ("*/*", "../a", False),
        ("../*", "../a", True),
        ("-n*", "-n5", True),
        ("[*].py", "*.py", True),
        ("[*].py", "a.py", False),
        ("a.c", "abc", False),
    ],
)
def test_a_wildcard_within_a_word_keeps_to_its_place(pattern: str, word: str, *, fits: bool) -> None:
    assert answers(command("ls", pattern), {"command": ["ls", word]}) is fits


def test_a_program_has_no_wildcard_and_a_rule_without_words_answers_nothing() -> None:
    assert not answers(command("*"), {"command": "ls"})
    assert not answers(command("l*", "x"), {"command": "ls x"})
    assert not answers(command(), {"command": "ls"})


@pytest.mark.parametrize(
    ("folder", "path", "inside"),
    [
        ("notes", "notes/a.md", True),
        ("notes/", "./notes/a.md", True),
        ("notes", "notes", True),
        ("notes", "notes2/a.md", False),
        ("notes", "notes/../secrets", False),
        ("notes", "notes/link/../a.md", False),
        ("notes", "notes\\..\\a.md", False),
        ("notes", "/notes/a.md", False),
        ("/srv/a", "/srv/ab", False),
        ("/srv/a", "/srv/a/b", True),
        ("/srv/x", "//srv/x/y", True),
        ("/srv/x", "/srv/x/../y", False),
        (".", "a/b", True),
        (".", "../a", False),
        (".", "/etc", False),
        (".", "~/a", False),
        (".", "file:///etc/passwd", False),
        (".", "https://example.com/a", False),
        (".", "S3://bucket/a", False),
        (".", "a:b", True),
        (".", "--output=a", False),
        ("file:", "file:/etc/passwd", False),
        ("/", "/etc", True),
        ("notes", "notes/a\0b", False),
        ("notes", "notes/a\nb", False),
        ("notes", None, False),
    ],
)
def test_a_path_is_answered_only_inside_the_folder(folder: str, path: Any, *, inside: bool) -> None:
    assert answers(rule(EachArgument((FolderCondition("path", folder),))), {"path": path}) is inside


@pytest.mark.parametrize(
    ("url", "there"),
    [
        ("https://api.example.com/v1", True),
        ("https://API.example.com.:443/", True),
        ("api.example.com", True),
        ("http://api.example.com/", False),
        ("https://api.example.com:8443/", False),
        ("https://api.example.com.evil.org/", False),
        ("https://evil-api.example.com/", False),
        ("https://evil.org/api.example.com", False),
        ("https://api.example.com@evil.org/", False),
        ("https://evil.org\\@api.example.com/", False),
        ("https://sub.api.example.com/", False),
        ("https://api.example.com\t.evil.org/", False),
        ("https://api.exam\nple.com/", False),
        ("https://api.example.com/ x", False),
        ("https://\uff41pi.example.com/", False),
        ("//api.example.com/", False),
        ("https://api.example.com:99999/", False),
        ("https://[", False),
        (7, False),
    ],
)
def test_an_url_is_answered_only_at_that_host(url: Any, *, there: bool) -> None:
    assert answers(rule(EachArgument((HostCondition("url", "api.example.com"),))), {"url": url}) is there


CALL = {"url": "https://api.example.com/v1", "method": "GET", "tries": 1, "more": {"a": [1, {"b": True}]}}


@pytest.mark.parametrize(
    "other",
    [
        {"method": "DELETE"},
        {"method": "get"},
        {"tries": 2},
        {"tries": 1.0},
        {"tries": "1"},
        {"tries": True},
        {"more": {"a": [1, {"b": 1}]}},
        {"more": {"a": [1, {"b": True}], "c": None}},
        {"more": {"a": [{"b": True}, 1]}},
        {"extra": ""},
    ],
)
def test_what_a_person_did_not_open_stays_exactly_as_it_was_shown(other: dict[str, Any]) -> None:
    pinned = tuple(make_equals_condition(key, value) for key, value in CALL.items() if key != "url")
    standing_rule = rule(EachArgument((HostCondition("url", "api.example.com"), *pinned)))
    assert answers(standing_rule, CALL)
    assert answers(standing_rule, {**CALL, "url": "https://api.example.com/v2"})
    assert not answers(standing_rule, {**CALL, **other})
    if other.keys() <= CALL.keys():
        assert not answers(standing_rule, {key: value for key, value in CALL.items() if key not in other})


def test_an_argument_that_a_person_opened_may_be_anything_and_must_be_there() -> None:
    standing_rule = rule(EachArgument((FolderCondition("path", "notes"), AnyCondition("content"))))
    assert answers(standing_rule, {"path": "notes/a", "content": {"x": [None]}})
    assert not answers(standing_rule, {"path": "notes/a"})
    assert not answers(standing_rule, {"path": "notes/a", "content": "", "mode": "x"})


@pytest.mark.parametrize(
    ("earlier", "good", "bad"),
    [
        (LegacyWords("command", ("git", "status")), {"command": "git status"}, {"command": "git status -s"}),
        (LegacyWords("command", ("find", ".")), {"command": "find ."}, {"command": "find . -delete"}),
        (LegacyWords("command", ("ls", "*")), {"command": ["ls", "*"]}, {"command": ["ls", "x"]}),
        (LegacyFolder("path", "notes"), {"path": "notes/a"}, {"path": "notes/a", "mode": "w"}),
        (LegacyHost("url", "api.example.com"), {"url": CALL["url"]}, {"url": CALL["url"], "method": "DELETE"}),
    ],
)
def test_a_rule_of_an_earlier_version_is_read_narrowly(
    earlier: RuleMatcher, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    assert answers(rule(earlier), good)
    assert not answers(rule(earlier, keys=("mode", "method")), bad)


def test_a_rule_that_cannot_be_read_answers_nothing() -> None:
    row = RuleRow(rule="r", tool="run", scope="fleet", matcher='{"by":"magic"}', keys="[]", by="ann", expires_at=20)
    assert decode_rule(row).matcher == UnreadableRule()
    assert not answers(rule(UnreadableRule()), {"command": "ls"})


def test_arguments_that_nobody_agreed_to_are_not_answered() -> None:
    assert not answers(rule(GIT), {"command": "git status", "folder": "/etc"})
    assert not answers(rule(GIT, keys=("folder",)), {"command": "git status", "folder": "x"})


def test_the_same_arguments_are_answered_and_no_others() -> None:
    narrow = StandingRule(
        tool="run",
        matcher=SameArguments(sha256(valid({"a": 1}).canonical).hexdigest()),
        keys=("a",),
        id="r",
        scope="fleet",
        by="ann",
        made_at=10,
        expires_at=20,
    )
    assert isinstance(narrow.matcher, SameArguments)
    assert answers(narrow, {"a": 1})
    assert not answers(narrow, {"a": 2})
    assert not answers(narrow, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("scope", "owner", "answered"),
    [
        ("session", "s1", True),
        ("session", "s2", False),
        ("agent", "night-watch", True),
        ("agent", "s1", False),
        ("fleet", "", True),
        ("fleet", "s1", False),
    ],
)
def test_a_rule_answers_only_in_its_scope(scope: RuleScope, owner: str, *, answered: bool) -> None:
    assert answers(rule(GIT, scope, owner), {"command": "git status"}) is answered


@pytest.mark.parametrize(("now", "answered"), [(9, False), (10, True), (19, True), (20, False)])
def test_a_rule_answers_only_while_it_lasts(now: int, *, answered: bool) -> None:
    assert answers(rule(GIT), {"command": "git status"}, now) is answered


def test_a_rule_answers_only_for_its_tool() -> None:
    tool_spec = msgspec.structs.replace(SPEC, name="run2")
    assert not matches_rule(rule(GIT), tool_spec, valid({"command": "git status"}), "s1", "night-watch", 15)


def test_a_rule_can_be_kept_and_read_back() -> None:
    for matcher in (
        GIT,
        EachArgument((make_equals_condition("a", 1), AnyCondition("b"))),
        LegacyFolder("path", "x"),
        LegacyHost("url", "h"),
        SameArguments("d"),
    ):
        assert msgspec.json.decode(msgspec.json.encode(rule(matcher)), type=StandingRule) == rule(matcher)


PARTS = ("run", b'{"a":1}', "s1", "p1")


def test_a_digest_is_bound_to_each_of_its_parts() -> None:
    changed = [("run2", *PARTS[1:]), (PARTS[0], b'{"a":2}', *PARTS[2:]), (*PARTS[:2], "s2", "p1"), (*PARTS[:3], "p2")]
    assert len({digest_approval(*parts) for parts in (PARTS, *changed)}) == 5
    assert digest_approval(*PARTS) == digest_approval(*PARTS)


@given(
    st.lists(st.text("ab", max_size=3), min_size=4, max_size=4),
    st.lists(st.text("ab", max_size=3), min_size=4, max_size=4),
)
def test_no_part_of_a_digest_can_pose_as_another(one: list[str], two: list[str]) -> None:
    first, second = (digest_approval(texts[0], texts[1].encode(), texts[2], texts[3]) for texts in (one, two))
    assert (first == second) is (one == two)


@pytest.mark.parametrize(("wrapper", "inner"), list(product(["sudo", "xargs", "nohup", "timeout 5"], ["git status"])))
def test_wrappers_are_never_answered_for_what_they_wrap(wrapper: str, inner: str) -> None:
    assert not answers(rule(GIT), {"command": f"{wrapper} {inner}"})
