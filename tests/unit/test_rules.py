"""An "always" answers what a person agreed to, and nothing that only looks like it."""

from hashlib import sha256
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.rules import Always, At, Matcher, Same, Under, Words, digest, matches

SPEC = ToolSpec(name="run", description="Runs.", schema=b"{}")


def valid(values: dict[str, Any]) -> Valid:
    return Valid(values, msgspec.json.encode(values, order="sorted"))


def rule(matcher: Matcher, scope: RuleScope = "fleet", owner: str = "", keys: tuple[str, ...] = ()) -> Always:
    return Always(
        id="r1", tool="run", matcher=matcher, keys=keys, scope=scope, owner=owner, by="ann", made_at=10, expires_at=20
    )


def answers(asked: Always, values: dict[str, Any], now: int = 15) -> bool:
    return matches(asked, SPEC, valid(values), "s1", "night-watch", now)


GIT = Words("command", ("git", "status"))


@pytest.mark.parametrize(
    "command", ["git status", "git  status -s", ["git", "status"], ["git", "status", "; rm"], "git 'status'"]
)
def test_a_command_that_begins_with_the_words_is_answered(command: Any) -> None:
    assert answers(rule(GIT), {"command": command})


@pytest.mark.parametrize(
    "command",
    [
        "git status; rm -rf ~",
        "git status && rm -rf ~",
        "git status | sh",
        "git status\nrm -rf ~",
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
        [],
        ["git", 7],
        7,
        None,
        {"git": "status"},
    ],
)
def test_a_command_that_does_more_or_something_else_is_not_answered(command: Any) -> None:
    assert not answers(rule(GIT), {"command": command})


def test_the_rule_for_all_of_git_does_not_cover_what_follows_it() -> None:
    everything = rule(Words("command", ("git",)))
    assert answers(everything, {"command": "git log"})
    assert not answers(everything, {"command": "git status; rm -rf ~"})


def test_a_rule_without_words_answers_nothing() -> None:
    assert not answers(rule(Words("command", ())), {"command": "ls"})


@pytest.mark.parametrize(
    ("folder", "path", "inside"),
    [
        ("notes", "notes/a.md", True),
        ("notes/", "./notes/b/../a.md", True),
        ("notes", "notes", True),
        ("notes", "notes2/a.md", False),
        ("notes", "notes/../secrets", False),
        ("notes", "/notes/a.md", False),
        ("/srv/x", "/srv/x/y", True),
        ("/srv/x", "//srv/x/y", True),
        ("/srv/x", "/srv/x/../y", False),
        (".", "a/b", True),
        (".", "../a", False),
        (".", "/etc", False),
        (".", "~/a", False),
        ("/", "/etc", True),
        ("notes", "notes/a\0b", False),
        ("notes", None, False),
    ],
)
def test_a_path_is_answered_only_inside_the_folder(folder: str, path: Any, *, inside: bool) -> None:
    assert answers(rule(Under("path", folder)), {"path": path}) is inside


@pytest.mark.parametrize(
    ("url", "there"),
    [
        ("https://api.example.com/v1", True),
        ("https://API.example.com.:443/", True),
        ("api.example.com", True),
        ("http://api.example.com/", False),
        ("https://api.example.com:8443/", False),
        ("https://api.example.com.evil.org/", False),
        ("https://evil.org/api.example.com", False),
        ("https://api.example.com@evil.org/", False),
        ("https://evil.org\\@api.example.com/", False),
        ("https://sub.api.example.com/", False),
        ("//api.example.com/", False),
        ("https://api.example.com:99999/", False),
        ("https://[", False),
        (7, False),
    ],
)
def test_an_url_is_answered_only_at_that_host(url: Any, *, there: bool) -> None:
    assert answers(rule(At("url", "api.example.com")), {"url": url}) is there


def test_arguments_that_nobody_agreed_to_are_not_answered() -> None:
    assert not answers(rule(GIT), {"command": "git status", "folder": "/etc"})
    assert answers(rule(GIT, keys=("folder",)), {"command": "git status", "folder": "x"})


def test_the_same_arguments_are_answered_and_no_others() -> None:
    narrow = Always(
        tool="run",
        matcher=Same(sha256(valid({"a": 1}).canonical).hexdigest()),
        keys=("a",),
        id="r",
        scope="fleet",
        by="ann",
        made_at=10,
        expires_at=20,
    )
    assert isinstance(narrow.matcher, Same)
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
    other = msgspec.structs.replace(SPEC, name="run2")
    assert not matches(rule(GIT), other, valid({"command": "git status"}), "s1", "night-watch", 15)


def test_a_rule_can_be_kept_and_read_back() -> None:
    for matcher in (GIT, Under("path", "x"), At("url", "h"), Same("d")):
        assert msgspec.json.decode(msgspec.json.encode(rule(matcher)), type=Always) == rule(matcher)


PARTS = ("run", b'{"a":1}', "s1", "p1")


def test_a_digest_is_bound_to_each_of_its_parts() -> None:
    changed = [("run2", *PARTS[1:]), (PARTS[0], b'{"a":2}', *PARTS[2:]), (*PARTS[:2], "s2", "p1"), (*PARTS[:3], "p2")]
    assert len({digest(*parts) for parts in (PARTS, *changed)}) == 5
    assert digest(*PARTS) == digest(*PARTS)


@given(
    st.lists(st.text("ab", max_size=3), min_size=4, max_size=4),
    st.lists(st.text("ab", max_size=3), min_size=4, max_size=4),
)
def test_no_part_of_a_digest_can_pose_as_another(one: list[str], two: list[str]) -> None:
    first, second = (digest(parts[0], parts[1].encode(), parts[2], parts[3]) for parts in (one, two))
    assert (first == second) is (one == two)


@pytest.mark.parametrize(("wrapper", "inner"), list(product(["sudo", "xargs", "nohup", "timeout 5"], ["git status"])))
def test_wrappers_are_never_answered_for_what_they_wrap(wrapper: str, inner: str) -> None:
    assert not answers(rule(GIT), {"command": f"{wrapper} {inner}"})
