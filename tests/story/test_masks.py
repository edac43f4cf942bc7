"""Secrets in the places where nobody expects them, and rules that no person made: nothing gets past the guard."""

import itertools
from typing import Any

import msgspec
import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.errors import ModelRejected
from halter.core.events import RuleMade
from halter.core.ids import FLEET, WorkerId, session_stream
from halter.core.messages import Prompt, Reply, TextListener, make_user_message
from halter.core.ports import Draft, Lease, Write
from halter.core.rows import RuleRow
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName
from halter.guard.approvals import SameArguments, encode_matcher, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.guard import GuardRuntime
from halter.guard.halts import halt
from halter.guard.prepare import Call
from halter.guard.request import FailedRequest, ModelRequest
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.redaction.redact import Redactor
from halter.redaction.secrets import GivenSecrets
from halter.testing.world import World
from halter.tools.function_tool import tool
from halter_drills.workload import begin_session, make_session_context, policy_of

SECRET = 'Zq7"\\x8kP2vL9mT4/wR6yB3nD5hF1jG0sA' * 3
POLICY = policy_of()


async def say(text: str) -> str:
    return text


async def write_file(path: str) -> str:
    return path


async def fail() -> str:
    raise ValueError("x" * 200 + " " + SECRET)


TOOLS: dict[str, Tool] = {
    each.spec.name: each for each in (tool(say), tool(fail), tool(write_file, level="RESTRICTED"))
}


class Desk:
    def __init__(self, world: World, lease: Lease) -> None:
        secrets = GivenSecrets({"IT": SECRET})
        redact = Redactor({"IT": SECRET}).redact
        self.world = world
        self.lease = lease
        self.standing = make_session_context(lease.session, POLICY)
        self.doors = GuardRuntime(world.store, world.clock, redact=redact, secrets=secrets, prices=Prices())
        self._numbers = itertools.count(1)

    async def call(self, name: str, **arguments: Any) -> Answer | ApprovalRequired:
        call = Call(f"s.{next(self._numbers)}", name, msgspec.json.encode(arguments))
        answer = await self.doors.call(self.lease, self.standing, call, TOOLS)
        assert isinstance(answer, Answer | ApprovalRequired)
        return answer

    async def written(self) -> bytes:
        events = await self.world.store.read(session_stream("s"))
        return b"\n".join(event.facts + (event.body or b"") for event in events)


@pytest.fixture
async def desk(world: World) -> Desk:
    return Desk(world, await begin_session(world.store, WorkerId("w"), "s", POLICY))


def hidden(text: str | bytes) -> bool:
    """Tell whether nothing is left of the secret, in whatever form."""
    data = text.encode() if isinstance(text, str) else text
    return not any(part in data for part in (b"kP2vL9mT4", b"wR6yB3nD5hF1jG0sA"))


async def test_a_secret_in_the_name_of_a_tool_is_in_no_record(desk: Desk) -> None:
    answer = await desk.call(SECRET)
    assert isinstance(answer, Answer)
    assert answer.outcome == "unknown_tool"
    assert hidden(answer.text)
    assert hidden(await desk.written())


async def test_a_secret_in_the_name_of_an_argument_is_in_no_record(desk: Desk) -> None:
    answer = await desk.call("say", **{SECRET: 1})
    assert isinstance(answer, Answer)
    assert answer.outcome == "invalid_arguments"
    assert hidden(answer.text)
    assert hidden(await desk.written())


async def test_a_secret_in_the_reasons_for_asking_a_person_is_in_no_record(desk: Desk) -> None:
    assert isinstance(await desk.call("write_file", path=f"/etc/{SECRET}"), ApprovalRequired)
    assert hidden(await desk.written())
    assert b"the reasons are hidden" in await desk.written()


async def test_reasons_without_a_secret_are_shown(desk: Desk) -> None:
    await desk.call("write_file", path="/etc/hosts")
    assert b"/etc/hosts belongs to the system" in await desk.written()


async def test_an_error_is_cut_only_after_its_secrets_are_gone(desk: Desk) -> None:
    answer = await desk.call("fail")
    assert isinstance(answer, Answer)
    assert len(answer.text) <= 300
    assert hidden(answer.text)
    assert hidden(await desk.written())


class Excuse:
    name = ModelName("scripted", "excuse")
    base_url: None = None

    def count(self, prompt: Prompt) -> int:
        return 10

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        raise ModelRejected("BadRequest: " + "x" * 200 + " " + SECRET, billed=False)


async def test_a_models_excuse_is_cut_only_after_its_secrets_are_gone(desk: Desk) -> None:
    request = ModelRequest(id="r", prompt=Prompt(messages=(make_user_message("Hello?"),)))
    answer = await desk.doors.request(desk.lease, desk.standing, request, Excuse())
    assert isinstance(answer, FailedRequest)
    assert len(answer.error) <= 300
    assert hidden(answer.error)
    assert hidden(await desk.written())


@pytest.mark.parametrize(("by", "runs"), [("ada", True), ("agent:desk", False), ("", False)])
async def test_only_a_rule_that_a_person_made_answers_in_their_place(desk: Desk, by: str, *, runs: bool) -> None:
    await desk.call("write_file", path="notes")
    (pending_decision,) = await list_pending_decisions(desk.world.store)
    rule = RuleMade(
        rule="r",
        tool="write_file",
        scope="fleet",
        owner="",
        matcher=encode_matcher(SameArguments(pending_decision.same)),
        keys=("path",),
        by=by,
        expires_at=desk.world.now + HOUR,
    )
    await desk.world.store.commit(Write(FLEET, "r", lambda _: [Draft(rule)], [(RuleRow, "r")]))
    await desk.world.advance(MINUTE)
    assert isinstance(await desk.call("write_file", path="notes"), Answer) is runs


async def test_a_session_is_halted_also_where_its_call_could_not_be_stopped(desk: Desk) -> None:
    running = SessionRuntime(desk.world.store, desk.world.clock, desk.doors, desk.lease, desk.standing, TOOLS)
    unknown = Answer("s.1", "unknown", "It runs on in its thread.")
    assert await running.find_end(unknown) is None
    await desk.world.store.commit(halt("fleet", "ada", "halt"))
    assert await running.find_end(unknown) == ("HALTED", "external_halt")
