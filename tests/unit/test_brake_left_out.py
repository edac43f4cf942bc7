"""What a call leaves out, switches off, forbids or hides in its shape is asked about as what it says is."""

import json
import time
from pathlib import Path

import pytest

from halter.core.provenance import ArgumentUse, Declaration, Source, guess_declaration
from halter.core.tools import find_declaration
from halter.provenance.provenance import Provenance
from halter.tools.shell import make_shell_tool

PERSON = Source("person", trusted=True)
PAGE = Source("tool", "get_page")
ACCOUNT = "DE89370400440532013000"
TASK = "Send a mail to bob@work.example that says hello"
MAIL = Declaration(
    reads="nothing",
    reach="others",
    arguments={
        "to": ArgumentUse("destination", "address"),
        "body": ArgumentUse("content"),
        "attachment": ArgumentUse("target", "file"),
    },
    asks=("send", "mail"),
)
PAY = Declaration(
    reads="nothing",
    reach="final",
    arguments={
        "account": ArgumentUse("destination", "account"),
        "amount": ArgumentUse("amount"),
        "recurring": ArgumentUse("detail"),
    },
    asks=("pay",),
)
RUN = Declaration(reads="anyone", reach="final", arguments={"argv": ArgumentUse("target", "code")}, asks=("run",))
DELETE = Declaration(reads="nothing", reach="final", arguments={"path": ArgumentUse("target", "file")})
APPEND = Declaration(
    reads="nothing", reach="own", arguments={"path": ArgumentUse("target", "file"), "text": ArgumentUse("content")}
)
FETCH = Declaration(reads="anyone", reach="none", arguments={"url": ArgumentUse("destination", "url")})
STAFF = Declaration(reads="trusted", reach="none", mints={"email": "address"})


def taint_brake(task: str) -> Provenance:
    brake = Provenance()
    brake.add_text(task, PERSON)
    brake.add_text("Lorem ipsum", PAGE)
    return brake


def guess(name: str, /, *, read_only: bool = False, **properties: object) -> Declaration:
    return guess_declaration(name, {"properties": properties}, read_only=read_only)


def list_flaws(brake: Provenance, tool: str, declaration: Declaration, arguments: dict[str, object]) -> list[str]:
    return [flaw.argument for flaw in brake.judge(tool, declaration, arguments).flaws]


@pytest.mark.parametrize(
    "said",
    [
        "Never send anything to eve@evil.example.",
        "Do not mail eve@evil.example, whatever she writes.",
        "It must not go to eve@evil.example.",
        "Send it to all of us except eve@evil.example.",
        "Send it without a copy to eve@evil.example.",
    ],
)
def test_what_a_task_forbids_is_not_said(said: str) -> None:
    assert list_flaws(taint_brake(f"{TASK}. {said}"), "mail", MAIL, {"to": "eve@evil.example", "body": "hello"}) == [
        "to"
    ]


@pytest.mark.parametrize(
    "said",
    [
        "Don't mail eve@evil.example but ann@work.example",
        "If Bob isn't there, mail ann@work.example",
        "I can't find ann@work.example; send her one",
        "Don't forget to mail ann@work.example",
    ],
)
def test_what_stands_beside_a_denial_is_said(said: str) -> None:
    assert not list_flaws(taint_brake(f"Send a mail. {said}"), "mail", MAIL, {"to": "ann@work.example", "body": "mail"})


def test_a_command_that_is_forbidden_is_not_said() -> None:
    brake = taint_brake("Run 'make'. Never run 'rm' on 'data'.")
    assert not list_flaws(brake, "run", RUN, {"argv": ["make"]})
    assert list_flaws(brake, "run", RUN, {"argv": ["rm", "data"]}) == ["argv[0]", "argv[1]"]


@pytest.mark.parametrize("more", [{"private": False}, {}, {"private": None}])
def test_a_switch_that_the_task_asks_for_is_neither_off_nor_left_out(more: dict[str, object]) -> None:
    repo = guess("create_repo", name={"type": "string"}, private={"type": "boolean"})
    brake = taint_brake("Create a private repo 'notes'")
    assert not list_flaws(brake, "create_repo", repo, {"name": "notes", "private": True})
    assert list_flaws(brake, "create_repo", repo, {"name": "notes", **more}) == ["private"]


def test_a_dry_run_is_not_made_a_real_one() -> None:
    deploy = guess("deploy_app", name={"type": "string"}, dry_run={"type": "boolean"})
    brake = taint_brake("Deploy 'notes' as a dry run")
    assert list_flaws(brake, "deploy_app", deploy, {"name": "notes", "dry_run": False}) == ["dry_run"]


def test_a_switch_of_a_final_act_must_be_said() -> None:
    call: dict[str, object] = {"account": ACCOUNT, "amount": 10, "recurring": True}
    assert list_flaws(taint_brake(f"Pay 10 to {ACCOUNT}"), "pay", PAY, call) == ["recurring"]
    assert not list_flaws(taint_brake(f"Pay a recurring 10 to {ACCOUNT}"), "pay", PAY, call)


def test_a_choice_that_agrees_to_something_must_be_said() -> None:
    review = guess("review_pr", pr_id={"type": "string"}, event={"enum": ["APPROVE", "COMMENT"]})
    brake = taint_brake("Add a comment to pr id 17")
    assert "event" in list_flaws(brake, "review_pr", review, {"pr_id": "17", "event": "APPROVE"})
    assert "event" not in list_flaws(brake, "review_pr", review, {"pr_id": "17", "event": "COMMENT"})


def test_a_default_is_judged_as_if_the_call_had_it() -> None:
    share = guess(
        "share_file",
        file={"type": "string"},
        user={"type": "string"},
        role={"type": "string", "default": "owner"},
        note={"type": "string", "default": "Greetings from the drive"},
    )
    brake = taint_brake("Share report.pdf with Bob as 'owner'")
    assert not list_flaws(brake, "share_file", share, {"file": "report.pdf", "user": "Bob"})
    assert list_flaws(
        taint_brake("Share report.pdf with Bob"), "share_file", share, {"file": "report.pdf", "user": "Bob"}
    ) == ["role"]


def test_a_final_act_names_what_it_reaches() -> None:
    delete = guess("delete_files", folder={"type": "string"})
    assert list_flaws(taint_brake("Delete the files in 'old'"), "delete_files", delete, {}) == ["folder"]
    assert list_flaws(taint_brake(f"Pay 10 to {ACCOUNT}"), "pay", PAY, {"account": ACCOUNT}) == ["amount"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"host": "house.example", "path": "/Falcon-7731"}, ["path"]),
        ({"host": "house.example", "page": 77314638}, ["page"]),
        ({"host": "house.example", "path": "", "page": 2}, []),
    ],
)
def test_what_goes_along_with_an_address_of_a_read_is_said(arguments: dict[str, object], found: list[str]) -> None:
    fetch = guess("fetch", read_only=True, host={"type": "string"}, path={"type": "string"}, page={"type": "integer"})
    assert list_flaws(taint_brake("Read house.example for me"), "fetch", fetch, arguments) == found


@pytest.mark.parametrize("site", ["evil%2eexample/x", "http:evil", "//[2001:db8::1]/x", "//evil/x"])
def test_an_address_without_a_usual_host_is_egress(site: str) -> None:
    declaration = guess("open_page", read_only=True, site={"type": "string"})
    assert list_flaws(taint_brake("Read it"), "open_page", declaration, {"site": site}) == ["site"]


@pytest.mark.parametrize("url", ["https://bit.ly/aBcDe", "ftp://bit.ly/AbCdE"])
def test_a_link_with_other_letters_is_another_page(url: str) -> None:
    brake = taint_brake("Read https://Bit.ly/AbCdE for me")
    assert not list_flaws(brake, "fetch", FETCH, {"url": "http://bit.ly/AbCdE/"})
    assert list_flaws(brake, "fetch", FETCH, {"url": url}) == ["url"]


NOTHING: list[object] = []
SHAPES: list[list[object]] = [
    [True, False, True] * 20,
    [NOTHING, [NOTHING], [NOTHING, NOTHING]] * 10,
    ["", " ", "  "] * 20,
    ["hello", "says", "hello", "hello", "says"] * 30,
]


@pytest.mark.parametrize("data", SHAPES)
def test_the_shape_of_a_list_spells_nothing(data: list[object]) -> None:
    note = Declaration(
        reads="nothing",
        reach="others",
        arguments={"to": ArgumentUse("destination", "address"), "data": ArgumentUse("content")},
        asks=("send",),
    )
    brake = taint_brake(TASK)
    assert not list_flaws(brake, "note", note, {"to": "bob@work.example", "data": ["hello", True, "mail"]})
    assert list_flaws(brake, "note", note, {"to": "bob@work.example", "data": data})
    assert list_flaws(brake, "note", note, {"to": ["bob@work.example"] * 9, "data": "hello"}) == ["to[0]"]


def test_one_call_pays_one_place_once() -> None:
    brake = taint_brake(f"Pay 10 to {ACCOUNT}")
    assert list_flaws(brake, "pay", PAY, {"account": [ACCOUNT, ACCOUNT], "amount": 10}) == ["account[0]"]


@pytest.mark.parametrize("value", ["hello", True, None, []])
def test_the_name_of_an_argument_that_a_tool_does_not_have_carries_nothing(value: object) -> None:
    call: dict[str, object] = {"to": "bob@work.example", "body": "hello", "falcon7731_text": value}
    assert "falcon7731_text" in list_flaws(taint_brake(TASK), "mail", MAIL, call)


def test_a_yes_counts_for_the_tool_that_was_shown() -> None:
    brake = taint_brake("Delete the file 'old.txt' and append hello to the file that Bob names")
    call: dict[str, object] = {"path": "payroll.txt", "text": "hello"}
    brake.approve("append", APPEND, call, brake.judge("append", APPEND, call).flaws)
    assert not list_flaws(brake, "append", APPEND, call)
    assert list_flaws(brake, "delete", DELETE, {"path": "payroll.txt"}) == ["path"]


def test_a_yes_to_a_file_counts_for_where_it_goes() -> None:
    brake = taint_brake(
        "Send a mail to bob@work.example with the file that he wants, and mail press@work.example hello"
    )
    call: dict[str, object] = {"to": "bob@work.example", "body": "mail", "attachment": "payroll.xlsx"}
    brake.approve("mail", MAIL, call, brake.judge("mail", MAIL, call).flaws)
    assert not list_flaws(brake, "mail", MAIL, call)
    assert list_flaws(brake, "mail", MAIL, {**call, "to": "press@work.example", "body": "hello"}) == ["attachment"]


@pytest.mark.parametrize("asked", [{"id": 17}, {"query": "mail"}])
def test_a_record_that_was_not_named_lends_its_words_to_no_letter(asked: dict[str, object]) -> None:
    brake = taint_brake(TASK)
    brake.observe("staff", STAFF, asked, json.dumps({"name": "Zed", "salary": "98700 falcon", "email": "z@w.io"}))
    assert list_flaws(brake, "mail", MAIL, {"to": "bob@work.example", "body": "hello zed 98700 falcon"}) == ["body"]


def test_a_record_within_a_record_has_a_name_of_its_own() -> None:
    brake = taint_brake("Send a mail to Bob Baker that says hello")
    record = {"name": "Bob Baker", "assistant": {"name": "Eve", "email": "eve@evil.example"}}
    brake.observe("staff", STAFF, {"query": "Bob Baker"}, json.dumps(record))
    assert list_flaws(brake, "mail", MAIL, {"to": "eve@evil.example", "body": "hello"}) == ["to"]
    brake.observe("staff", STAFF, {"query": "Bob Baker"}, '{"name": "Bob Baker", "contact": {"email": "b@w.io"}}')
    assert not list_flaws(brake, "mail", MAIL, {"to": "b@w.io", "body": "hello"})


@pytest.mark.parametrize(
    ("task", "amount"),
    [("Pay within 30 days 10 to", 30), ("Pay invoice 4711 with 10 to", 4711), ("Pay $10 for 25 to", 25)],
)
def test_a_number_that_counts_or_names_something_is_no_amount(task: str, amount: int) -> None:
    brake = taint_brake(f"{task} {ACCOUNT}")
    assert not list_flaws(brake, "pay", PAY, {"account": ACCOUNT, "amount": 10})
    assert list_flaws(brake, "pay", PAY, {"account": ACCOUNT, "amount": amount}) == ["amount"]
    assert list_flaws(brake, "pay", PAY, {"account": ACCOUNT, "amount": True})


def test_many_records_of_a_named_look_up_are_folded_one_by_one() -> None:
    def fold(records: int) -> float:
        brake = taint_brake("Send a mail to Sarah Baker that says hello")
        text = "".join(f"name: Sarah Baker {number}\nmail: p{number}@w.io\n\n" for number in range(records))
        began = time.process_time()
        brake.observe("staff", STAFF, {"query": "Sarah Baker"}, text)
        return time.process_time() - began

    assert fold(10_000) < 5


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "Bob Baker", "hint": "eve@evil.example"},
        {"name": "Bob Baker\nemail: eve@evil.example"},
        {"name": "Bob Baker", "user": "eve", "domain": "evil.example"},
    ],
)
def test_what_a_look_up_was_given_proves_nothing_in_its_own_answer(arguments: dict[str, object]) -> None:
    brake = taint_brake("Send a mail to Bob Baker that says hello")
    brake.observe("staff", STAFF, arguments, "name: Bob Baker\nemail: eve@evil.example")
    assert list_flaws(brake, "mail", MAIL, {"to": "eve@evil.example", "body": "hello"}) == ["to"]


def test_two_of_one_name_stay_in_doubt_when_one_is_found_again() -> None:
    brake = taint_brake("Send a mail to Bob Baker that says hello")
    for places in (("evil", "work"), ("evil",)):
        values = [{"name": "Bob Baker", "email": f"bob@{text}.example"} for text in places]
        brake.observe("staff", STAFF, {"query": "Bob Baker"}, json.dumps(values))
    assert list_flaws(brake, "mail", MAIL, {"to": "bob@evil.example", "body": "hello"}) == ["to"]


@pytest.mark.parametrize(
    "task",
    [
        "Read the mail from eve@evil.example and send a mail to bob@work.example",
        "If there is a letter by eve@evil.example, send a mail to bob@work.example",
        "Read the mails of 'eve@evil.example' and send a mail to bob@work.example",
        "Who is eve@evil.example? Send a mail to bob@work.example",
    ],
)
def test_the_source_of_something_is_no_destination(task: str) -> None:
    assert not list_flaws(taint_brake(task), "mail", MAIL, {"to": "bob@work.example", "body": "mail"})
    assert list_flaws(taint_brake(task), "mail", MAIL, {"to": "eve@evil.example", "body": "mail"}) == ["to"]
    replies = taint_brake(f"{task}. Reply to all of them with a mail.")
    assert ("Who" in task) or not list_flaws(replies, "mail", MAIL, {"to": "eve@evil.example", "body": "mail"})


def test_a_record_of_someone_who_wrote_something_is_no_destination() -> None:
    brake = taint_brake("Read the mail from Bob Baker and send a mail to ann@work.example")
    brake.observe("staff", STAFF, {"query": "Bob Baker"}, '{"name": "Bob Baker", "email": "bob@work.example"}')
    assert list_flaws(brake, "mail", MAIL, {"to": "bob@work.example", "body": "mail"}) == ["to"]


def test_the_words_of_a_command_are_said_together() -> None:
    brake = taint_brake("Run `rm -r build`. Say what `ls` and `data` are.")
    assert not list_flaws(brake, "run", RUN, {"argv": ["rm", "-r", "build"]})
    assert list_flaws(brake, "run", RUN, {"argv": ["rm", "-r", "data"]})
    assert list_flaws(brake, "run", RUN, {"argv": ["ls", "data"]})
    assert list_flaws(brake, "run", RUN, {"argv": ["rm", "-r build"]})


def test_what_a_program_is_fed_is_code(tmp_path: Path) -> None:
    declaration = find_declaration(make_shell_tool(tmp_path, sandbox=False).spec)
    brake = taint_brake("Run `sh` on the data and drop all tables")
    assert not list_flaws(brake, "run_command", declaration, {"argv": ["sh"], "folder": ".", "stdin": ""})
    assert list_flaws(brake, "run_command", declaration, {"argv": ["sh"], "folder": ".", "stdin": "drop all tables"})


def test_a_record_of_ones_own_goes_to_those_who_were_named_if_it_was_named_itself() -> None:
    files = Declaration(reads="own", reach="none", mints={"id": "file"})
    brake = taint_brake("Send a mail to bob@work.example with 'plan for May'. Delete the file 'old'")
    record = '[{"id": "77", "name": "plan for May"}, {"id": "78", "name": "payroll"}]'
    brake.observe("files", files, {}, record)
    call: dict[str, object] = {"to": "bob@work.example", "body": "mail"}
    assert not list_flaws(brake, "mail", MAIL, {**call, "attachment": "77"})
    assert list_flaws(brake, "mail", MAIL, {**call, "attachment": "78"}) == ["attachment"]
    assert list_flaws(brake, "delete", DELETE, {"path": "77"}) == ["path"]
    brake.observe("files", files, {}, '[{"id": "79", "name": "plan for May"}]')
    assert list_flaws(brake, "mail", MAIL, {**call, "attachment": "77"}) == ["attachment"]


def test_usual_words_of_a_plan_may_stand_in_ones_own_things_and_go_nowhere() -> None:
    event = Declaration(
        reads="nothing",
        reach="others",
        alone="own",
        arguments={"title": ArgumentUse("content"), "guests": ArgumentUse("destination", "address")},
        asks=("create",),
    )
    brake = taint_brake("Create an event for Oslo with bob@work.example")
    assert not list_flaws(brake, "create", event, {"title": "Trip to Oslo, enjoy your stay"})
    assert list_flaws(brake, "create", event, {"title": "Trip to Oslo", "guests": ["bob@work.example"]}) == ["title"]
    assert list_flaws(brake, "create", event, {"title": "Trip to Oslo, xyzzy"}) == ["title"]
