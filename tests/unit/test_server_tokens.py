"""Tokens: shown once, kept as digests in a file that is nobody else's, and counted out by the minute."""

import json
import multiprocessing
import stat
from pathlib import Path

import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.errors import ConfigError
from halter.server.auth import (
    Keyring,
    TokenFile,
    digest_token_secret,
    find_token,
    make_secret,
    make_token,
    render_token,
    suggest_token_name,
)
from halter.server.middleware import Bucket, OpenStreams, RateLimiters, ServerLimits, consume_from_bucket

SECRET = make_secret(lambda size: b"s" * size)


def test_a_token_is_long_and_no_two_are_the_same() -> None:
    texts = {make_secret() for _ in range(100)}
    assert len(texts) == 100
    assert all(len(each) == len("halter_") + 43 for each in texts)


def test_only_the_digest_is_kept_in_a_file_that_is_its_owners_alone(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "made" / "tokens.json")
    file.add(make_token(SECRET, "ada", "operator", 7, ["desk"]))
    text = file.path.read_text()
    assert SECRET not in text
    assert SECRET.removeprefix("halter_") not in text
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (token,) = file.tokens()
    assert (token.name, token.role, token.agents, token.digest) == (
        "ada",
        "operator",
        ("desk",),
        digest_token_secret(SECRET),
    )
    assert "digest" not in render_token(token)
    assert [each.name for each in file.path.parent.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o601, 0o610])
def test_a_file_that_others_may_read_is_refused_with_a_sentence(tmp_path: Path, mode: int) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    file.add(make_token(SECRET, "ada", "admin", 0))
    file.path.chmod(mode)
    with pytest.raises(ConfigError, match="Run chmod 600"):
        file.tokens()
    with pytest.raises(ConfigError, match="Run chmod 600"):
        file.add(make_token(make_secret(), "bob", "admin", 0))
    ring = Keyring(file)
    assert ring.tokens() == ()
    assert "chmod 600" in ring.problem


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "\xff", '{"tokens": [{"name": "ada"}]}', '{"tokens": [], "more": 1}',
        '{"tokens": [{"name": "agent:x", "role": "admin", "digest": "00", "made_at": 0}]}',
        f'{{"tokens": [{{"name": "ada", "role": "god", "digest": "{"0" * 64}", "made_at": 0}}]}}',
        '{"tokens": [{"name": "ada", "role": "admin", "digest": "", "made_at": 0}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_sentence_and_lets_nobody_in(tmp_path: Path, text: str) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    file.path.write_text(text, "latin-1")
    file.path.chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        file.tokens()
    assert Keyring(file).tokens() == ()


@pytest.mark.parametrize("name", ["", "Ada", "agent:desk", "-a", ".a", "a b", "a/b", "é", "a" * 65, "a\n", "a\x00"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="Invalid token name"):
        make_token(SECRET, name, "admin", 0)


def test_a_role_that_is_none_and_a_name_that_is_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use one of viewer, approver, operator, admin"):
        make_token(SECRET, "ada", "root", 0)
    file = TokenFile(tmp_path / "tokens.json")
    file.add(make_token(SECRET, "ada", "viewer", 0))
    with pytest.raises(ConfigError, match="halter tokens remove ada"):
        file.add(make_token(make_secret(), "ada", "admin", 0))


def test_a_change_counts_at_once_for_who_has_read_the_file_before(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    ring = Keyring(file, [make_token(SECRET, "guest", "viewer", 0)])
    assert [token.name for token in ring.tokens()] == ["guest"]
    token = make_token(make_secret(), "ada", "admin", 0)
    file.add(token)
    assert ring.is_valid(token)
    assert TokenFile(file.path).remove("ada")
    assert not ring.is_valid(token)
    assert not file.remove("ada")
    assert find_token(ring.tokens(), SECRET) is not None


def _add(path: Path, number: int) -> None:
    TokenFile(path).add(make_token(make_secret(), f"t{number}", "viewer", 0))


def test_of_many_changes_at_once_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(_add, [(path, number) for number in range(20)])
    assert sorted(token.name for token in TokenFile(path).tokens()) == sorted(f"t{number}" for number in range(20))
    assert len(json.loads(path.read_text())["tokens"]) == 20


def test_a_token_is_named_after_a_person_whatever_they_are_called() -> None:
    assert [suggest_token_name(each) for each in ("ada", "Ada Lovelace", "uid 1000", "☃", "agent:x")] == [
        "ada", "ada-lovelace", "uid-1000", "owner", "agent-x",
    ]  # fmt: skip


def test_a_minute_allows_so_many_and_fills_again_evenly() -> None:
    bucket, now = None, 100 * MINUTE
    for _ in range(60):
        bucket, wait = consume_from_bucket(bucket, 60, now)
        assert wait == 0
    bucket, wait = consume_from_bucket(bucket, 60, now)
    assert wait == SECOND
    bucket, wait = consume_from_bucket(bucket, 60, now + SECOND)
    assert wait == 0
    assert consume_from_bucket(bucket, 60, now + SECOND)[1] > 0
    assert consume_from_bucket(Bucket(0, now), 60, now - MINUTE)[1] > 0
    assert consume_from_bucket(Bucket(0, now), 60, now + 9 * MINUTE)[0].level == 59


def test_allowances_are_apart_and_few_are_kept() -> None:
    rates = RateLimiters(1)
    assert rates.consume("a", 0) == 0
    assert rates.consume("a", 0) > 0
    assert rates.consume("b", 0) == 0
    assert rates.compute_wait("a", 0) > 0
    assert rates.compute_wait("c", 0) == 0
    for number in range(30_000):
        rates.consume(f"n{number}", number)
    assert len(rates._buckets) <= 10_000  # noqa: SLF001 It is what must not grow.


def test_streams_are_counted_by_who_has_them_and_in_all() -> None:
    streams = OpenStreams(2, 3)
    assert [streams.enter(name) for name in ("a", "a", "a", "b", "b")] == [True, True, False, True, False]
    streams.leave("a")
    assert streams.enter("b")
    assert streams.count() == 3


def test_the_limits_are_those_of_the_documents() -> None:
    assert (ServerLimits().body, ServerLimits().streams) == (1024 * 1024, 20)
