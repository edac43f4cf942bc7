"""What can be known of a call before any row is locked."""

from hashlib import sha256
from typing import Any

import msgspec
import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.events import CallRefused
from halter.core.rows import RuleRow
from halter.guard.approvals import SameArguments, encode_matcher
from halter.guard.judge import judge_call
from halter.guard.prepare import Call, PreparedCall, SessionContext, prepare_call
from halter.spec.agent import Phase
from halter.tools.function_tool import FunctionTool, tool


@tool(level="RESTRICTED")
def deed(order: int, note: str = "") -> str:
    """Do it."""
    return f"{order}{note}"


@tool(level="SAFE", effect="read")
def look(order: int) -> str:
    """Look at it."""
    return str(order)


class NoRows:
    """A store in which nothing has happened."""

    now = 0

    def get(self, kind: type[Any], *key: Any) -> Any:
        return None

    def find(self, keys: Any) -> Any:
        return ()


def make_context(
    agent: str = "name: desk\n", fleet: str = "{}", grants: tuple[str, ...] | None = None
) -> SessionContext:
    resolved_policy = resolve_policy(
        parse_fleet(load_bytes(fleet.encode(), "halter.yaml")), parse_agent(load_bytes(agent.encode(), "agent.yaml"))
    )
    return SessionContext(
        "s",
        "desk",
        Phase("work", grants),
        resolved_policy,
        str(resolved_policy.digest()),
        secrets=frozenset(resolved_policy.secrets),
    )


def prepare(where: SessionContext, using: FunctionTool | None, arguments: bytes = b'{"order": 7}') -> PreparedCall:
    name = using.spec.name if using else "nosuch"
    return prepare_call(where, Call("s.1", name, arguments), using, 0, 500)


@pytest.mark.parametrize(
    ("agent", "grants", "arguments", "outcome"),
    [
        ("name: desk\n", None, b'{"order": 7}', None),
        ("name: desk\n", ("look",), b'{"order": 7}', "tool_not_granted"),
        ("name: desk\npolicy: {disabled: [deed]}\n", None, b'{"order": 7}', "disabled"),
        ("name: desk\n", None, b'{"order": "seven"}', "invalid_arguments"),
        ("name: desk\n", None, b"not json", "invalid_arguments"),
        ("name: desk\n", ("look",), b"not json", "tool_not_granted"),
        ("name: desk\n", None, b'{"order": 7, "note": "${secret:KEY}"}', "invalid_arguments"),
        ("name: desk\nsecrets: [KEY]\n", None, b'{"order": 7, "note": "${secret:KEY}"}', None),
    ],
)
def test_what_stands_against_a_call_is_known_before_it_is_judged(
    agent: str, grants: tuple[str, ...] | None, arguments: bytes, outcome: str | None
) -> None:
    flaw = prepare(make_context(agent, "allowed_secrets: [KEY]", grants), deed, arguments).request.flaw
    assert (flaw and flaw[0]) == outcome


@pytest.mark.parametrize("arguments", [b"not json", b'{"order": 7, "note": "${secret:KEY}"}'])
def test_observing_waives_what_a_policy_forbids_and_never_what_cannot_be_run(arguments: bytes) -> None:
    forbids = make_context("name: desk\npolicy: {disabled: [deed]}\n", grants=("look",))
    session_context = msgspec.structs.replace(forbids, policy=msgspec.structs.replace(forbids.policy, observe=True))
    (draft,) = judge_call(prepare(session_context, deed, arguments).request, NoRows())
    assert isinstance(draft.event, CallRefused)
    assert draft.event.outcome == "invalid_arguments"
    (draft,) = judge_call(prepare(forbids, deed, arguments).request, NoRows())
    assert isinstance(draft.event, CallRefused)
    assert draft.event.outcome == "disabled"


def test_an_unknown_tool_is_a_flaw_too() -> None:
    flaw = prepare(make_context(), None).request.flaw
    assert flaw is not None
    assert flaw[0] == "unknown_tool"


def test_levels_decide_what_is_audited_and_assessed() -> None:
    assert (prepare(make_context(), look).request.audit, prepare(make_context(), look).request.risk) == ("", None)
    assert (prepare(make_context(), deed).request.audit, prepare(make_context(), deed).request.risk) == ("full", "LOW")


def test_who_is_asked_follows_the_mode_and_the_risk() -> None:
    assert prepare(make_context(), deed).request.approval is not None
    assert prepare(make_context(fleet="mode: FULL"), deed).request.approval is None
    assert prepare(make_context(), look).request.approval is None


def test_a_privileged_tool_has_the_rate_that_its_level_has() -> None:
    @tool(level="PRIVILEGED")
    def pay(amount: int) -> str:
        """Pay."""
        return str(amount)

    rate = prepare(make_context(), pay, b'{"amount": 1}').request.rate
    assert rate is not None
    assert rate.limit == 20
    assert prepare(make_context(), deed).request.rate is None


@tool(level="RESTRICTED")
def shell(command: str) -> str:
    """Run a command."""
    return command


@pytest.mark.parametrize(("command", "risk", "rule"), [("ls", "LOW", "r"), ("rm -rf /", "CRITICAL", "")])
def test_no_rule_answers_for_a_call_of_critical_risk(command: str, risk: str, rule: str) -> None:
    arguments = b'{"command":"%s"}' % command.encode()
    same = encode_matcher(SameArguments(sha256(arguments).hexdigest()))
    row = RuleRow("r", "shell", "fleet", matcher=same, keys='["command"]', by="ada", expires_at=9)
    call_request = prepare_call(make_context(), Call("s.1", "shell", arguments), shell, 1, 0, [row]).request
    assert call_request.risk == risk
    assert call_request.approval is not None
    assert call_request.approval.rule == rule
