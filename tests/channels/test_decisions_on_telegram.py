"""Decisions on Telegram: one tap answers exactly what was shown, once, and only by people who were paired."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from autonomous import Fleet

from halter.channels.messages import FOREIGN, compose
from halter.channels.serve import serve_channels
from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.errors import NotDone
from halter.core.events import DecisionMade, DecisionShown
from halter.core.ids import channel_stream, inbox_stream
from halter.core.ports import Query
from halter.core.rows import DecisionRow, HaltRow
from halter.guard.approvals import PendingDecision
from halter.net.client import HttpClient
from halter.operations import decisions, rules
from halter.operations.actor import Actor, Principal
from halter.operations.channels import offer_pairing, remove_approver
from halter.testing.world import World
from tests.channels.fake_telegram import FakeTelegram, Refused
from tests.channels.streams import StreamedApp, make_client

FLEET = "channels:\n  telegram: {token: '${secret:TELEGRAM}', url: 'http://telegram.test'}\n"
DESK = """
autonomy: {enabled: false}
model: scripted
script: replies.yaml
schedules: [{name: once, at: '2026-01-01T00:03:00Z', prompt: Look.}]
"""
TOOLS = '''
from halter import tool

@tool(level="RESTRICTED", effect="write")
def wipe(path: str) -> str:
    """Wipe a folder."""
    return "wiped " + path
'''
WIPES = """
- {when: Look, text: It is full., calls: [{tool: wipe, arguments: {path: old}}]}
- {repeat: true, text: Done.}
"""
LONG = f"""
- {{when: Look, text: It is full., calls: [{{tool: wipe, arguments: {{path: {"x" * 5000}}}}}]}}
- {{repeat: true, text: Done.}}
"""
ADA = "41"


class Phone:
    """A fleet with one agent that asks, a Telegram, and people with phones."""

    def __init__(
        self, world: World, home: Path, replies: str = WIPES, text: str = "", platform: Any = None, fleet: str = FLEET
    ) -> None:
        self.world = world
        self.platform = platform or FakeTelegram()
        self.fleet = Fleet(world, home, fleet + text)
        self.fleet.environ["HALTER_SECRET_TELEGRAM"] = self.platform.token
        self.folder = self.fleet.agent("desk", DESK, TOOLS, replies_yaml=replies)
        self.reports: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def connect(self) -> HttpClient:
        return make_client(StreamedApp(self.platform))

    def serve(self) -> asyncio.Task[None]:
        task = self.world.spawn(serve_channels(self.fleet.app, self.reports.append, self.connect))
        self.tasks.append(task)
        return task

    @property
    def desk(self) -> Actor:
        return Actor(self.fleet.app, Principal("root"))

    async def pair(self, name: str = "ada", account: str = ADA, role: str = "approver", **more: Any) -> str:
        pairing_code = await offer_pairing(self.desk, "telegram", name, role, **more)
        self.platform.write(account, f"/start {pairing_code.code}")
        await self.world.advance(3 * SECOND)
        return pairing_code.code

    async def asks(self) -> None:
        """Start, and wait until the agent asks."""
        self.fleet.start(self.folder)
        await self.world.advance(4 * MINUTE)

    async def decision(self) -> DecisionRow:
        (row,) = await self.world.journal.ask(Query("all_decisions", DecisionRow))
        return row

    async def made(self) -> list[DecisionMade]:
        stream = inbox_stream((await self.decision()).session)
        return [each.event for each in await self.world.events(stream) if isinstance(each.event, DecisionMade)]


async def ready(world: World, home: Path, replies: str = WIPES, more: str = "") -> Phone:
    """Ada is paired, and is asked."""
    phone = Phone(world, home, replies, more)
    phone.serve()
    await world.advance(SECOND)
    await phone.pair()
    await phone.asks()
    return phone


async def test_one_tap_approves_and_the_message_becomes_the_outcome(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    assert outcome.text.startswith("desk wants to wipe old.\nwipe, RESTRICTED")
    assert outcome.text.partition(f"{FOREIGN}\n\n")[2].startswith("It is full.\n\n{")
    assert '{"path":"old"}' in outcome.text.replace(" ", "")
    assert [*outcome.buttons] == ["Approve", "Deny", "Always"]
    phone.platform.press(ADA, outcome, "Approve")
    await world.advance(MINUTE)
    (event,) = await phone.made()
    assert (event.verdict, event.by) == ("approve", "ada")
    (toast,) = phone.platform.toasts
    assert toast.startswith("Approved: wipe of desk, session desk.once-1. halter up ")
    assert (outcome.text, outcome.buttons) == ("Approved by ada: wipe of desk, session desk.once-1.", {})
    assert [row.state for row in await phone.fleet.sessions("desk")] == ["COMPLETED"]


async def test_a_button_pressed_twice_or_delivered_twice_only_says_so(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    data = phone.platform.press(ADA, outcome, "Deny")
    await world.advance(MINUTE)
    phone.platform.press_data(ADA, outcome, data)
    phone.platform.press_data(ADA, outcome, data.replace("no:", "yes:"))
    phone.platform.send_again()
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["deny"]
    assert all("already answered (deny, by ada)" in each for each in phone.platform.toasts[1:])
    assert len(phone.platform.toasts) == 3


async def test_what_is_answered_elsewhere_shows_on_the_phone_and_its_button_does_nothing(
    world: World, tmp_path: Path
) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    data = outcome.buttons["Approve"]
    await decisions.deny(Actor(phone.fleet.app, Principal("bob")), (await phone.decision()).decision)
    await world.advance(5 * SECOND)
    assert (outcome.text, outcome.buttons) == ("Denied by bob: wipe of desk, session desk.once-1.", {})
    phone.platform.press_data(ADA, outcome, data)
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["deny"]


async def test_what_was_cut_cannot_be_approved_by_button_or_by_word(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path, LONG)
    (outcome,) = phone.platform.messages[1:]
    assert [*outcome.buttons] == ["Deny"]
    decision = (await phone.decision()).decision
    assert f"halter approve {decision}" in outcome.text
    assert len(outcome.text) > 3000
    phone.platform.press_data(ADA, outcome, outcome.buttons["Deny"].replace("no:", "yes:"))
    for words in ("yes", "always", '{"path": "other"}'):
        phone.platform.write(ADA, words, reply_to=outcome.id)
    phone.platform.write(ADA, f"/yes {decision}")
    await world.advance(MINUTE)
    assert await phone.made() == []
    said = [*phone.platform.toasts, *(each.text for each in phone.platform.messages[2:])]
    assert len(said) == 5
    assert all(each.startswith("The message was cut") for each in said)
    phone.platform.press(ADA, outcome, "Deny")
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["deny"]


async def test_other_arguments_by_reply(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.write(ADA, '{"path": "older"}', reply_to=outcome.id)
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["edit"]
    assert outcome.text.startswith("Approved with other arguments by ada")


async def test_a_no_with_its_reason_by_reply_and_words_that_are_no_answer(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.platform.write(ADA, "perhaps later", reply_to=outcome.id)
    phone.platform.write(ADA, "NO - YESTERDAY", reply_to=outcome.id)
    await world.advance(MINUTE)
    assert phone.platform.messages[2].text.startswith("Unknown answer.")
    assert [(event.verdict, event.reason) for event in await phone.made()] == [("deny", "- YESTERDAY")]


async def test_always_makes_a_rule_for_the_same_call(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    phone.platform.press(ADA, phone.platform.messages[1], "Always")
    await world.advance(MINUTE)
    (rule,) = await rules.rules(phone.desk)
    assert (rule.tool, rule.scope, rule.by) == ("wipe", "session", "ada")


async def test_strangers_are_ignored_and_leave_no_trace(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    before = await world.events(channel_stream("telegram"))
    for account in ("66", "-100", "0"):
        phone.platform.press(account, outcome, "Approve")
        phone.platform.press(account, outcome, "Approve", place=account)
        for words in ("/halt", "/status", "yes", "hello", "/start AAAA-BBBB-CCCC"):
            phone.platform.write(account, words, reply_to=outcome.id)
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert await world.events(channel_stream("telegram")) == before
    assert len(phone.platform.messages) == 2
    assert phone.platform.toasts == []


async def test_a_button_counts_only_in_the_chat_that_it_was_shown_in(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    await phone.pair("bob", "42", role="approver", agents=("other",))
    phone.platform.press("42", phone.platform.messages[1], "Approve", place="42")
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert phone.platform.toasts == ["This button has expired. Use a newer message, or halter inbox."]


async def test_a_code_counts_once_in_time_and_for_one_account(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await world.advance(SECOND)
    code = await phone.pair()
    phone.platform.write("66", code)
    late = await offer_pairing(phone.desk, "telegram", "bob", "approver")
    await world.advance(11 * MINUTE)
    phone.platform.write("66", late.code)
    phone.platform.write("66", late.code.lower())
    await world.advance(MINUTE)
    assert [each.text for each in phone.platform.messages] == [
        "Paired as ada (approver). Open decisions are sent here."
    ]


async def test_codes_cannot_be_found_by_trying(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    pairing_code = await offer_pairing(phone.desk, "telegram", "ada", "approver")
    for number in range(30):
        phone.platform.write("66", f"AAAA-BBBB-{'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567'[number]}AAA")
    phone.platform.write("66", pairing_code.code)
    await world.advance(30 * SECOND)
    assert phone.platform.messages == []
    await world.advance(MINUTE)
    phone.platform.write(ADA, pairing_code.code)
    await world.advance(5 * SECOND)
    assert len(phone.platform.messages) == 1


async def test_strangers_who_try_codes_keep_no_one_from_pairing(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await world.advance(SECOND)
    pairing_code = await offer_pairing(phone.desk, "telegram", "ada", "approver")
    for number in range(100):
        phone.platform.write(str(500 + number % 7), "AAAA-BBBB-CCCC")
    phone.platform.write(ADA, pairing_code.code)
    await world.advance(5 * SECOND)
    assert [each.place for each in phone.platform.messages] == [ADA]


async def test_an_admin_of_some_agents_pairs_and_removes_no_one(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    desk = Actor(phone.fleet.app, Principal("carl", "admin", ("other",)))
    with pytest.raises(NotDone, match=r"Access to every agent is required to .*; carl sees only some"):
        await offer_pairing(desk, "telegram", "carl", "admin")
    with pytest.raises(NotDone, match=r"Access to every agent is required to .*; carl sees only some"):
        await remove_approver(desk, "telegram", "ada")


FORGED = "Keep it.\n\nYes: It is dismissed. No: It is kept.\nExpires in 5d. x/proposal"


@pytest.mark.parametrize("about", ["proposal", "changed_tool", "approval"])
def test_what_an_agent_writes_cannot_pass_for_a_line_of_halters(about: str) -> None:
    body = msgspec.json.encode({"parts": [{"type": "text", "text": FORGED}], "stop": "calls"})
    waiting_decision = PendingDecision(
        "d1",
        about,
        "s1",
        "desk",
        "c1",
        "memory",
        "digest",
        "RESTRICTED",
        "LOW",
        "",
        "",
        0,
        HOUR,
        FORGED.encode(),
        said=body,
    )
    text = compose(waiting_decision, 0, lambda _: True, bytes(16)).text
    ours, _, theirs = text.partition(f"\n{FOREIGN}\n")
    assert ours.count("Yes: ") == ours.count("Expires in ") == 1
    assert theirs.endswith(FORGED)


async def test_who_is_removed_answers_nothing_any_more(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    data = outcome.buttons["Approve"]
    await remove_approver(phone.desk, "telegram", "ada")
    phone.platform.press_data(ADA, outcome, data)
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert outcome.buttons == {}


async def test_a_viewer_is_not_asked_and_cannot_halt(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await phone.pair("vic", "43", role="viewer")
    await phone.asks()
    assert len(phone.platform.messages) == 1
    phone.platform.write("43", "/halt")
    phone.platform.write("43", "/status")
    await world.advance(MINUTE)
    assert "role approver is required to" in phone.platform.messages[1].text
    assert phone.platform.messages[2].text.splitlines()[1].startswith("desk: desk wants to wipe")
    assert await world.journal.ask(Query("all_halts", HaltRow)) == []


async def test_halt_stops_the_fleet_or_one_agent(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    phone.platform.write(ADA, "/halt desk")
    phone.platform.write(ADA, "/halt@halter_bot")
    await world.advance(MINUTE)
    rows = await world.journal.ask(Query("all_halts", HaltRow))
    assert {(row.scope, row.by, row.reason) for row in rows} == {
        ("agent:desk", "ada", "over telegram"),
        ("fleet", "ada", "over telegram"),
    }


async def test_what_was_forwarded_decides_nothing(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    phone.platform.write(ADA, "/halt", forward_origin={"type": "user"})
    await world.advance(MINUTE)
    assert await world.journal.ask(Query("all_halts", HaltRow)) == []
    assert "Forwarded" in phone.platform.messages[-1].text


async def test_a_restart_keeps_people_buttons_and_the_place_in_what_was_read(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    (outcome,) = phone.platform.messages[1:]
    phone.tasks[0].cancel()
    phone.serve()
    await world.advance(MINUTE)
    assert len(phone.platform.messages) == 2
    phone.platform.press(ADA, outcome, "Approve")
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["approve"]
    assert outcome.text.startswith("Approved by ada")


async def test_a_process_that_was_killed_leaves_the_channel_to_another_when_its_lease_ends(
    world: World, tmp_path: Path
) -> None:
    phone = await ready(world, tmp_path)
    phone.platform.write(ADA, "/status")
    await world.restart()
    phone.platform.press(ADA, phone.platform.messages[1], "Approve")
    phone.serve()
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["approve"]


async def test_of_two_processes_one_polls_and_the_other_takes_over(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    phone.serve()
    await world.advance(5 * MINUTE)
    assert not any("Another program polls" in each for each in phone.reports)
    phone.tasks[0].cancel()
    await world.advance(MINUTE)
    phone.platform.press(ADA, phone.platform.messages[1], "Approve")
    await world.advance(MINUTE)
    assert [event.verdict for event in await phone.made()] == ["approve"]
    assert len(phone.platform.messages) == 2


async def test_another_poller_and_limits_are_waited_for(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await phone.pair()
    phone.platform.poll_from_elsewhere()
    phone.platform.refuse_next += [Refused(429, "Too Many Requests: retry after 7", retry_after=7)]
    phone.platform.refuse_next += [Refused(502, "Bad Gateway")]
    await phone.asks()
    assert [each.text[:18] for each in phone.platform.messages[1:]] == ["desk wants to wipe"]
    assert any("Another program polls this Telegram bot" in each for each in phone.reports)
    phone.platform.webhook = True
    await world.advance(10 * MINUTE)
    phone.platform.webhook = False
    phone.platform.press(ADA, phone.platform.messages[1], "Approve")
    await world.advance(3 * MINUTE)
    assert [event.verdict for event in await phone.made()] == ["approve"]


async def test_a_person_who_blocks_the_bot_is_reported_once_and_stops_nobody(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.serve()
    await phone.pair()
    await phone.pair("bob", "42")
    phone.platform.blocked.add(ADA)
    await phone.asks()
    await world.advance(HOUR // 2)
    assert [each.place for each in phone.platform.messages[2:]] == ["42"]
    assert [each for each in phone.reports if "blocked" in each] == [
        "Telegram refused sendMessage: 403 Forbidden: bot was blocked by the user"
    ]


async def test_a_wrong_or_missing_token_says_what_to_do_and_shows_nothing_of_it(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    phone.fleet.environ["HALTER_SECRET_TELEGRAM"] = "1:wrong"
    phone.serve()
    await world.advance(MINUTE)
    assert any("Check the secret of `channels.telegram.token`" in each for each in phone.reports)
    phone.tasks[0].cancel()
    del phone.fleet.environ["HALTER_SECRET_TELEGRAM"]
    phone.serve()
    await world.advance(MINUTE)
    assert any("Set HALTER_SECRET_TELEGRAM" in each for each in phone.reports)
    assert "1:wrong" not in " ".join(phone.reports)


async def test_two_people_agree_from_two_phones_and_no_one_with_two(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path, text="policy: {tools: {wipe: {approvers: 2}}}\n")
    phone.serve()
    for name, account in (("ada", ADA), ("ada.tablet", "42"), ("bob", "43")):
        await phone.pair(name, account)
    await phone.asks()
    shown = {each.place: each for each in phone.platform.messages[3:]}
    assert [*shown[ADA].buttons] == ["Approve", "Deny"]
    phone.platform.press(ADA, shown[ADA], "Approve")
    await world.advance(MINUTE)
    phone.platform.press("42", shown["42"], "Approve")
    await world.advance(MINUTE)
    assert await phone.made() == []
    assert phone.platform.toasts[0].endswith("It needs another approver.")
    assert phone.platform.toasts[1].startswith("ada has already approved")
    phone.platform.press("43", shown["43"], "Approve")
    await world.advance(MINUTE)
    assert {each.text for each in shown.values()} == {"Approved by ada and bob: wipe of desk, session desk.once-1."}


async def test_what_expires_is_shown_as_expired(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path, more="policy: {approval_expiry: 10m}\n")
    (outcome,) = phone.platform.messages[1:]
    await world.advance(20 * MINUTE)
    assert outcome.buttons == {}
    assert outcome.text.startswith("Expired without an answer, so denied: wipe of desk")


@pytest.mark.parametrize(("end", "silent"), [("06:00", True), ("23:59", False)])
async def test_a_question_in_quiet_hours_is_silent(world: World, tmp_path: Path, end: str, *, silent: bool) -> None:
    quiet = f"  quiet_hours: {{start: '23:58', end: '{end}', timezone: UTC}}\n"
    phone = await ready(world, tmp_path, more=quiet)
    assert phone.platform.silent == [False, silent]


async def test_a_question_that_waits_for_the_morning_is_sent_when_the_quiet_hours_end(
    world: World, tmp_path: Path
) -> None:
    phone = await ready(world, tmp_path, more="policy: {quiet_hours: {start: '23:58', end: '01:00', timezone: UTC}}\n")
    assert len(phone.platform.messages) == 1
    await world.advance(HOUR)
    (outcome,) = phone.platform.messages[1:]
    assert outcome.text.startswith("desk wants to wipe old.")


async def test_no_link_in_a_question_is_fetched_by_the_platform(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    assert not any(phone.platform.previews)


async def test_the_journal_keeps_no_button_that_could_be_pressed(world: World, tmp_path: Path) -> None:
    phone = await ready(world, tmp_path)
    token = phone.platform.messages[1].buttons["Approve"].partition(":")[2]
    events = await world.events(channel_stream("telegram"))
    assert any(isinstance(each.event, DecisionShown) for each in events)
    assert all(token.encode() not in each.facts + (each.body or b"") for each in events)


async def test_an_internal_failure_is_reported_and_the_channel_starts_again(world: World, tmp_path: Path) -> None:
    phone = Phone(world, tmp_path)
    tries: list[int] = []

    def connect() -> HttpClient:
        tries.append(1)
        if len(tries) == 1:
            raise TypeError("a mistake")
        return phone.connect()

    world.spawn(serve_channels(phone.fleet.app, phone.reports.append, connect))
    await world.advance(2 * MINUTE)
    assert phone.reports[1] == "The channel telegram failed and is restarted: TypeError: a mistake"
    await phone.pair()
    assert len(phone.platform.messages) == 1


@pytest.mark.parametrize("text", ["a\u202eb", "a\x00b", "a\u200bb"])
def test_what_a_chat_would_hide_is_shown_as_an_escape(text: str) -> None:
    from halter.core.text import escape_hidden

    assert escape_hidden(text) == f"a\\u{ord(text[1]):04x}b"
