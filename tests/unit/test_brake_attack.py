"""What an attacker who knows the brake's code tries: marks, spellings, keys, switches, repeats and old agreements."""

import json
import time

import pytest

from halter.core.provenance import ArgumentUse, Declaration, Flaw, Source, guess_declaration
from halter.core.tools import find_declaration
from halter.guard.approvals import AnyCondition, EachArgument, StandingRule, make_equals_condition, pins_places
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call
from halter.provenance.provenance import MAX_ARGUMENTS, Provenance
from halter.provenance.trusted_text import find_links
from halter.tasks.playbooks import make_playbook_verb

PERSON = Source("person", trusted=True)
PAGE = Source("tool", "get_page")
MAIL = Declaration(
    reads="nothing",
    reach="others",
    arguments={
        "to": ArgumentUse("destination", "address"),
        "cc": ArgumentUse("destination", "address"),
        "body": ArgumentUse("content"),
    },
    asks=("send", "mail"),
)
RUN = Declaration(reads="anyone", reach="final", arguments={"argv": ArgumentUse("target", "code")}, asks=("run",))
DELETE = Declaration(reads="nothing", reach="final", arguments={"path": ArgumentUse("target", "file")})
PAY = Declaration(
    reads="nothing",
    reach="final",
    arguments={"account": ArgumentUse("destination", "account"), "amount": ArgumentUse("amount")},
)
CONTACTS = Declaration(reads="trusted", reach="none", mints={"email": "address"})
TASK = "Send a mail to bob@work.example that says hello"


def taint_brake(task: str) -> Provenance:
    brake = Provenance()
    brake.add_text(task, PERSON)
    brake.add_text("Lorem ipsum", PAGE)
    return brake


def list_reasons(brake: Provenance, tool: str, declaration: Declaration, arguments: dict[str, object]) -> list[str]:
    return [flaw.reason for flaw in brake.judge(tool, declaration, arguments).flaws]


def agree(brake: Provenance, tool: str, declaration: Declaration, arguments: dict[str, object]) -> None:
    brake.approve(tool, declaration, arguments, brake.judge(tool, declaration, arguments).flaws)


@pytest.mark.parametrize(
    "body",
    [
        "hello .- -... -.-. -..",
        "hello \u2803\u2801\u2819",
        "hello \U0001f600\U0001f601",
        "hello" + "".join(chr(0xE0100 + letter) for letter in b"secret"),
        "hello \t \t\t  \t",
        "hello\u0335\u0336",
        "HeLlO",
    ],
)
def test_nothing_is_spelt_with_marks_spaces_or_capitals(body: str) -> None:
    assert list_reasons(taint_brake(TASK), "mail", MAIL, {"to": "bob@work.example", "body": body})


def test_the_usual_marks_of_a_letter_are_not_asked_about() -> None:
    body = 'Hello Bob,\n\n- "hello" (hello) ...\n  Hello!  HELLO\n'
    assert not list_reasons(taint_brake(TASK), "mail", MAIL, {"to": "bob@work.example", "body": body})


def test_the_order_of_many_said_words_spells_nothing() -> None:
    words = ["red", "green", "blue", "white", "black", "brown", "grey", "pink", "gold", "north", "south", "east"]
    body = " ".join(words[place * 5 % len(words)] for place in range(48))
    brake = taint_brake(f"{TASK} {' '.join(words)}")
    assert list_reasons(brake, "mail", MAIL, {"to": "bob@work.example", "body": body}) == ["content"]


def test_endings_spell_nothing() -> None:
    body = "sendation sendings mailer mailies hellos"
    assert list_reasons(taint_brake(TASK), "mail", MAIL, {"to": "bob@work.example", "body": body})


@pytest.mark.parametrize(
    "command", ["rm -r build *", "rm -r build .", "rm -r >build", "rm -R build", "rm -r\nbuild", "rm -r build | ("]
)
def test_a_command_is_said_letter_by_letter(command: str) -> None:
    brake = taint_brake("Run `rm -r build` for me")
    assert not list_reasons(brake, "run", RUN, {"argv": "rm -r build"})
    assert list_reasons(brake, "run", RUN, {"argv": command})


@pytest.mark.parametrize("path", ["build/..", "build/*", "old-notes*", "old-notes?", "...old-notes"])
def test_a_path_with_a_wildcard_or_dots_is_another_one(path: str) -> None:
    brake = taint_brake("Delete 'build/' and 'old-notes' please")
    assert not list_reasons(brake, "delete", DELETE, {"path": "build/"})
    assert list_reasons(brake, "delete", DELETE, {"path": path})


def test_words_of_agreed_commands_make_no_other_command() -> None:
    brake = taint_brake("Run it")
    agree(brake, "run", RUN, {"argv": ["rm", "-rf", "build"]})
    agree(brake, "run", RUN, {"argv": ["cat", "notes.txt"]})
    assert not list_reasons(brake, "run", RUN, {"argv": ["cat", "notes.txt"]})
    assert list_reasons(brake, "run", RUN, {"argv": ["rm", "-rf", "notes.txt"]})


def test_a_content_that_was_agreed_to_for_one_place_is_asked_about_for_another() -> None:
    brake = taint_brake("Send a mail to anna@work.example, and mail press@work.example hello")
    agree(brake, "mail", MAIL, {"to": "anna@work.example", "body": "Zed earns 98,700"})
    assert not list_reasons(brake, "mail", MAIL, {"to": "anna@work.example", "body": "Zed earns 98,700"})
    assert list_reasons(brake, "mail", MAIL, {"to": "press@work.example", "body": "Zed earns 98,700"}) == ["content"]


def test_the_keys_of_any_object_carry_no_words_out() -> None:
    schema = {"properties": {"name": {"type": "string"}, "extra": {"type": "object"}}}
    guess = guess_declaration("create_note", schema, read_only=False)
    brake = taint_brake("Create the note 'falcon'")
    assert list_reasons(brake, "create_note", guess, {"name": "falcon", "extra": {"the key is xyzzy": True}})


def test_a_field_of_an_object_counts_by_its_own_name() -> None:
    guess = guess_declaration("place_order", {"properties": {"order": {"type": "object"}}}, read_only=False)
    assert list_reasons(taint_brake("Order it"), "place_order", guess, {"order": {"amount": 99}}) == ["amount"]


@pytest.mark.parametrize("more", [{"private": False}, {"role": "maintain"}, {"channel": "press"}])
def test_a_switch_that_opens_something_is_asked_about(more: dict[str, object]) -> None:
    schema = {
        "properties": {
            "name": {"type": "string"},
            "private": {"type": "boolean"},
            "role": {"enum": ["read", "maintain"]},
            "channel": {"enum": ["team", "press"]},
        }
    }
    guess = guess_declaration("create_repo", schema, read_only=False)
    brake = taint_brake("Create the repo 'notes'")
    assert not list_reasons(brake, "create_repo", guess, {"name": "notes", "private": True, "role": "read"})
    assert list_reasons(brake, "create_repo", guess, {"name": "notes", **more}) == ["unsaid"]


def test_a_choice_of_a_final_act_must_be_said() -> None:
    schema = {"properties": {"environment": {"enum": ["staging", "production"]}}}
    guess = guess_declaration("delete_environment", schema, read_only=False)
    brake = taint_brake("Delete the staging environment")
    assert not list_reasons(brake, "delete_environment", guess, {"environment": "staging"})
    assert list_reasons(brake, "delete_environment", guess, {"environment": "production"}) == ["unsaid"]


@pytest.mark.parametrize(
    "text",
    ["https://login.evil.md", "https://login.evil.zip", "evil.xn--p1ai/x", "203.0.113.5/x", "evil\u3002com/x"],
)
def test_a_link_with_an_unusual_host_is_a_link(text: str) -> None:
    assert taint_brake(TASK).unsaid_links(f"See {text} now")
    guess = guess_declaration("open_page", {"properties": {"site": {"type": "string"}}}, read_only=True)
    assert list_reasons(taint_brake(TASK), "open_page", guess, {"site": text}) == ["egress"]


@pytest.mark.parametrize("text", ["@ " + "a" * 100_000, "@ " + "a." * 50_000, "@ " + "a-" * 50_000])
def test_a_long_text_is_searched_for_links_in_time(text: str) -> None:
    began = time.monotonic()
    find_links(text)
    assert time.monotonic() - began < 5


def test_the_name_of_a_secret_is_no_content() -> None:
    brake = taint_brake("Mail bob@work.example a word about the API key")
    assert list_reasons(brake, "mail", MAIL, {"to": "bob@work.example", "body": "${API_KEY}"}) == ["content"]


def test_a_verb_at_the_start_of_a_sentence_is_no_user() -> None:
    post = Declaration(
        reads="nothing",
        reach="others",
        arguments={"to": ArgumentUse("destination", "user"), "text": ArgumentUse("content")},
        asks=("forward",),
    )
    brake = taint_brake("Forward Bob the words hello")
    assert not list_reasons(brake, "message", post, {"to": "Bob", "text": "hello"})
    assert list_reasons(brake, "message", post, {"to": "Forward", "text": "hello"}) == ["unsaid"]


def test_digits_in_a_detail_leave_with_what_others_see() -> None:
    board = Declaration(
        reads="nothing",
        reach="others",
        arguments={"text": ArgumentUse("content"), "date": ArgumentUse("detail")},
        asks=("post",),
    )
    assert list_reasons(taint_brake("Post hello on the board"), "post", board, {"text": "hello", "date": "463820"})


def test_figures_leave_with_a_read_that_calls_a_number() -> None:
    uses = {"phone": ArgumentUse("destination", "phone"), "code": ArgumentUse("content")}
    calling, counting = (
        Declaration(reads="anyone", reach="none", arguments=argument_uses)
        for argument_uses in (uses, {"code": ArgumentUse("content")})
    )
    brake = taint_brake("Look up whose number that is")
    assert list_reasons(brake, "look_up", calling, {"phone": 4930901820, "code": 4638207151}) == ["content"]
    assert list_reasons(brake, "look_up", calling, {"phone": 4930901820, "code": [46, 38, 20, 71]}) != []
    assert list_reasons(brake, "count", counting, {"code": 4638207151}) == []


def test_only_figures_that_are_declared_and_no_place_go_along_with_a_read_unlooked_at() -> None:
    uses = {"code": ArgumentUse("content"), "page": ArgumentUse("detail"), "caller.phone": ArgumentUse("detail")}
    counting = Declaration(reads="anyone", reach="none", arguments=uses, guessed=("arguments.caller",))
    brake = taint_brake("Look up whose number that is")
    assert list_reasons(brake, "count", counting, {"code": 4638207151, "page": None}) == []
    assert "content" in list_reasons(brake, "count", counting, {"code": 4638207151, "phone": 4930901820})
    assert "content" in list_reasons(brake, "count", counting, {"code": 4638207151, "caller.phone": 4930901820})
    assert list_reasons(brake, "count", counting, {"code": 1, "page": "https://evil.example/?s=4638"}) == ["egress"]
    argument_uses = {f"n{number}": ArgumentUse("detail") for number in range(MAX_ARGUMENTS + 1)}
    endless = Declaration(reads="anyone", reach="none", arguments=argument_uses)
    assert list_reasons(brake, "count", endless, dict.fromkeys(argument_uses, 1)) == ["unclear"]


@pytest.mark.parametrize("amount", ["1,0000", "1.000"])
def test_an_amount_that_can_be_read_in_two_ways_is_asked_about(amount: str) -> None:
    brake = taint_brake("Pay 1 to the account DE89370400440532013000")
    assert not list_reasons(brake, "pay", PAY, {"account": "DE89370400440532013000", "amount": "1.00"})
    assert list_reasons(brake, "pay", PAY, {"account": "DE89370400440532013000", "amount": amount}) == ["amount"]


@pytest.mark.parametrize("field", ["department", "manager", "manager_name"])
def test_a_record_is_not_named_by_a_field_that_names_another_thing(field: str) -> None:
    brake = taint_brake("Send the Finance mail to Sarah Baker")
    value = "Finance" if field == "department" else "Sarah Baker"
    brake.observe("contacts", CONTACTS, {}, json.dumps([{"name": "Eve", field: value, "email": "e@w.io"}]))
    assert list_reasons(brake, "mail", MAIL, {"to": "e@w.io", "body": "mail"}) == ["weak"]


def test_a_sharp_s_is_another_host() -> None:
    brake = taint_brake("Send a mail to bob@strasse.example that says hello")
    assert list_reasons(brake, "mail", MAIL, {"to": "bob@stra\u00dfe.example", "body": "hello"}) == ["unsaid"]


@pytest.mark.parametrize(
    "again",
    [
        {"cc": ""},
        {"cc": None},
        {"cc": " "},
        {"to": ["bob@work.example", "bob@work.example"]},
        {"cc": "bob@work.example"},
    ],
)
def test_an_empty_or_doubled_place_makes_no_other_act(again: dict[str, object]) -> None:
    brake, call = taint_brake(TASK), {"to": "bob@work.example", "body": "hello"}
    brake.act("mail", MAIL, call)
    assert list_reasons(brake, "mail", MAIL, {**call, **again}) == ["repeated"]


@pytest.mark.parametrize("url", ["http://api.example/hook", "https://api.example/hook//", "api.example/hook"])
def test_another_spelling_of_a_link_makes_no_other_act(url: str) -> None:
    hook = Declaration(reads="nothing", reach="others", arguments={"url": ArgumentUse("destination", "url")})
    brake = taint_brake("Post hello to https://api.example/hook")
    brake.act("post", hook, {"url": "https://api.example/hook"})
    assert list_reasons(brake, "post", hook, {"url": url}) == ["repeated"]


def test_a_rule_with_a_free_place_answers_for_no_call_that_was_not_looked_through() -> None:
    matcher = EachArgument((AnyCondition("to"), make_equals_condition("format", "plain")))
    rule = StandingRule(
        id="r", tool="mail", matcher=matcher, keys=("to", "format"), scope="fleet", by="p", made_at=0, expires_at=1
    )
    assert not pins_places(rule, [Flaw("to", "eve@evil.example", "unsaid")])
    assert not pins_places(rule, [Flaw("", "2001 values", "unclear")])


async def refuse_call(call: Call, usd: int | None) -> Answer:
    raise AssertionError(call.tool, usd)


async def read_no_cost(call: str) -> int:
    return len(call) * 0


def test_a_playbook_that_was_not_named_is_asked_about() -> None:
    spec = make_playbook_verb({}, refuse_call, read_no_cost).spec
    brake = taint_brake("Run the playbook 'morning'")
    declaration = find_declaration(spec)
    assert not list_reasons(brake, "run_playbook", declaration, {"playbook": "morning", "inputs": {}})
    assert list_reasons(brake, "run_playbook", declaration, {"playbook": "pay-out", "inputs": {}}) == ["unsaid"]
