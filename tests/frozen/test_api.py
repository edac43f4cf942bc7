"""Version 1 of the HTTP API may grow and never shrinks.

`api-v1.txt` lists the operations of the version: their ids, parameters, what they need, and the members of their
answers. Lines of what is new may be added, by `python -m tests.frozen.test_api`; a line that is there stays.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from tests.frozen.lists import NEEDED, api, read, write
from tests.frozen.test_frozen import owner

FILE: Final = Path(__file__).parent / "api-v1.txt"


def list_breaches(before: Collection[str], now: Collection[str]) -> list[str]:
    """List what the promise forbids: what is gone, and what an operation newly needs."""
    texts = {*now, *(line.partition(": ")[0] for line in now)}
    gone = [line for line in before if line not in texts and not line.endswith(f": {NEEDED}")]
    owners = {*before} | {owner(line) for line in before if ": " not in line}
    needed = [line for line in now if line.endswith(f": {NEEDED}") and line not in before]
    return gone + [line for line in needed if owner(line.removesuffix(f": {NEEDED}")) in owners]


def test_nothing_of_version_1_is_gone_and_nothing_more_has_to_be_given() -> None:
    assert list_breaches([*read(FILE)], [*api()]) == []


def test_what_is_new_is_listed_and_promised_from_then_on() -> None:
    listed = {*read(FILE)}
    assert [line for line in api() if line not in listed] == [], "Run `python -m tests.frozen.test_api`."


def test_the_ten_things_that_people_do_with_a_store_are_promised() -> None:
    operations = {line.partition(": is called ")[2]: line.partition(":")[0] for line in api() if ": is called " in line}
    ten = ("inbox", "approve", "deny", "answer", "halt", "resume", "budgets", "set-cap", "sessions", "receipt")
    assert {name: operations[name] for name in ten} == {
        "inbox": "GET /api/v1/inbox",
        "approve": "POST /api/v1/decisions/{decision}/approve",
        "deny": "POST /api/v1/decisions/{decision}/deny",
        "answer": "POST /api/v1/sessions/{session}/answer",
        "halt": "POST /api/v1/halts",
        "resume": "POST /api/v1/halts/resume",
        "budgets": "GET /api/v1/budgets",
        "set-cap": "POST /api/v1/budgets/cap",
        "sessions": "GET /api/v1/sessions",
        "receipt": "GET /api/v1/sessions/{session}/receipt",
    }


OLD: Final = (
    "POST /api/v1/halts",
    "POST /api/v1/halts: is called halt",
    "POST /api/v1/halts body.scope",
    "POST /api/v1/halts body.scope: needed",
    "POST /api/v1/halts answer.subject",
    "POST /api/v1/halts answer.subject: always there",
)


def test_each_way_to_break_the_promise_is_found() -> None:
    for line in (*OLD[1:3], *OLD[4:]):
        assert list_breaches(OLD, [each for each in OLD if each != line and not each.startswith(f"{line}:")])
    assert list_breaches(OLD, [*OLD, "POST /api/v1/halts body.reason", "POST /api/v1/halts body.reason: needed"])


def test_what_the_promise_allows_is_no_breach() -> None:
    new = ("POST /api/v1/halts body.reason", "POST /api/v1/halts answer.known", "GET /api/v1/halts")
    new_operation = ("POST /api/v1/flags", "POST /api/v1/flags body.name", "POST /api/v1/flags body.name: needed")
    assert list_breaches(OLD, [*OLD, *new, *new_operation]) == []
    assert list_breaches(OLD, [line for line in OLD if not line.endswith("needed")]) == []


if __name__ == "__main__":
    write(FILE, {*read(FILE), *api()} if FILE.exists() else {*api()})
