"""The keys of one agent: its caps are one, whichever key was made last, and whoever makes one is told what binds it."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.proxy.keys import KeyFile, KeyLimits, KeyRing, make_key_secret, make_virtual_key

OPUS = "claude-opus-5-5"
ASK: Any = {"model": OPUS, "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HALTER_STORE", "HALTER_FLEET", "HALTER_TOKENS", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HALTER_PERSON", "ada")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def types(*words: str) -> Any:
    return CliRunner().invoke(build_command_tree(), ["keys", *words])


def list_caps() -> dict[str, Any]:
    keys = json.loads(types("list", "--json").stdout)
    return {key["name"]: (key["max_cost_usd_per_day"], key["max_cost_usd_per_hour"]) for key in keys}


def test_a_second_key_without_a_cap_keeps_the_agents(home: Path) -> None:
    assert types("new", "--agent", "desk", "--max-cost-usd-per-day", "0.05").exit_code == 0
    result = types("new", "--agent", "desk", "--name", "second")
    assert result.exit_code == 0, result.output
    assert list_caps() == {"desk": (0.05, None), "second": (0.05, None)}
    assert "$0.05 a day" in result.stdout


def test_another_cap_for_the_same_agent_is_asked_about(home: Path) -> None:
    types("new", "--agent", "desk", "--max-cost-usd-per-day", "0.05", "--tokens-per-hour", "1000")
    for words in (("--max-cost-usd-per-day", "3"), ("--max-cost-usd-per-day", "0.01"), ("--tokens-per-hour", "9999")):
        result = types("new", "--agent", "desk", "--name", "second", *words)
        assert (result.exit_code, "--replace" in result.output) == (2, True), result.output
    assert list_caps() == {"desk": (0.05, None)}
    same = types("new", "--agent", "desk", "--name", "same", "--max-cost-usd-per-day", "0.050")
    assert same.exit_code == 0, same.output
    words = ("--max-cost-usd-per-day", "3", "--max-cost-usd-per-hour", "1", "--replace")
    assert types("new", "--agent", "desk", "--name", "second", *words).exit_code == 0
    assert list_caps() == dict.fromkeys(("desk", "same", "second"), (3, 1))


def test_a_key_that_replaces_a_revoked_one_keeps_its_cap(home: Path) -> None:
    types("new", "--agent", "desk", "--max-cost-usd-per-day", "0.05")
    types("revoke", "desk")
    assert types("new", "--agent", "desk").exit_code == 0
    assert list_caps()["desk"][0] == 0.05
    assert types("new", "--agent", "night").exit_code == 0
    assert list_caps()["night"][0] is None


def test_who_makes_a_key_is_told_when_the_fleets_cap_is_lower(home: Path) -> None:
    result = types("new", "--agent", "desk", "--max-cost-usd-per-day", "50")
    assert result.exit_code == 0, result.output
    assert "The fleet's cap of $20.00 a day is lower" in result.stderr
    Path("halter.yaml").write_text("limits:\n  max_cost_usd_per_day: 2.00\n", "utf-8")
    lower = types("new", "--agent", "other", "--max-cost-usd-per-day", "3", "--json")
    assert "The fleet's cap of $2.00 a day is lower" in lower.stderr
    assert json.loads(lower.stdout)["max_cost_usd_per_day"] == 3
    assert types("new", "--agent", "third", "--max-cost-usd-per-day", "1").stderr == ""


def test_a_key_that_the_fleet_would_refuse_is_not_made(home: Path) -> None:
    Path("halter.yaml").write_text("agents:\n  limits:\n    max_cost_usd_per_day: 1.00\n", "utf-8")
    result = types("new", "--agent", "desk", "--max-cost-usd-per-day", "3")
    assert result.exit_code == 2
    assert "allows only $1.00" in result.output
    assert list_caps() == {}


def test_a_file_of_keys_with_two_caps_is_read_with_the_lower_one(tmp_path: Path) -> None:
    """An earlier version wrote such files."""
    file: Any = KeyFile(tmp_path / "keys.json")
    secrets = [make_key_secret() for _ in range(3)]
    limits = [KeyLimits(max_cost_usd_per_day=Decimal("0.05")), KeyLimits(), KeyLimits(max_cost_usd_per_day=Decimal(5))]
    keys = [
        make_virtual_key(secret, f"k{number}", "desk", number, "ada", limit)
        for number, (secret, limit) in enumerate(zip(secrets, limits, strict=True))
    ]
    file._file.write({"keys": keys})  # noqa: SLF001 A file as it was written before caps were shared.
    found = [KeyRing(file).find(secret) for secret in secrets]
    assert [key.limits.max_cost_usd_per_day for key in found if key] == [Decimal("0.05")] * 3


async def test_all_keys_of_an_agent_together_stay_below_its_cap(place: Any) -> None:
    first, second = place.key(max_cost_usd_per_day="0.05"), place.key()
    async with httpx2.AsyncClient(timeout=60) as http:
        requests = [
            http.post(f"{place.base}/messages", json=ASK, headers={"x-api-key": key}) for key in (first, second) * 10
        ]
        answers = await asyncio.gather(*requests)
        refused = await http.post(
            f"{place.base}/messages", json={**ASK, "max_tokens": 9000}, headers={"x-api-key": second}
        )
    await place.settled()
    assert place.provider.billed <= await place.spent() <= 50_000
    assert {answer.status_code for answer in (*answers, refused)} <= {200, 402}
