"""What a person says to what waits for them: yes, no, yes to other arguments, always, or yes with more money."""

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from halter.app.desk.always import rule_for, told
from halter.app.desk.desk import Desk, refused, wrong
from halter.app.desk.money import amount_of, refuse_beyond_carved, refuse_no_raise
from halter.app.desk.operation import Dollars, Name, Reason, Words
from halter.app.desk.waiting import Waiting, decision_meant
from halter.core.clock import DAY, SECOND
from halter.core.durations import shown_duration
from halter.core.money import Account, shown
from halter.core.ports import BLOB_FROM, Write
from halter.core.text import from_body
from halter.core.vocabulary import RuleScope
from halter.guard import approvals
from halter.guard.redact import Redactor
from halter.guard.secrets import from_environment

DecisionName = Annotated[Name, Meta(description="A decision's id.")]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a yes. At most one of `edit`, `always` and `cap` makes it more than a plain one.

    `cap` holds the new cap in micro-dollars, or None for none. A `digest` binds it to the decision as it was shown.
    """

    edit: bytes | None = None
    always: bool = False
    match: str = "same"
    scope: str = "session"
    lasts: int = 7 * DAY
    cap: tuple[int | None] | None = None
    digest: str | None = None
    reason: str = ""


class Said(msgspec.Struct, frozen=True):
    """What was decided, in a sentence; and the rule that was made, if one was."""

    decision: str
    sentence: str
    rule: str = ""


async def approve(desk: Desk, decision: str, answer: Answer) -> Said:
    """Say yes. What does not fit the question is not taken for an answer."""
    desk.demand("approver", "approve anything")
    asked = await decision_meant(desk, decision)
    if answer.digest is not None and answer.digest != asked.digest:
        refused(f"{asked.decision} is not what you were shown: look at it again.")
    write, said = await _yes(desk, asked, answer)
    await _commit(desk, asked, write)
    return said


async def deny(desk: Desk, decision: DecisionName, reason: Reason = "") -> Said:
    """Say no to a decision."""
    desk.demand("approver", "deny anything")
    asked = await decision_meant(desk, decision)
    await _commit(desk, asked, approvals.decide(asked, "deny", desk.who.name, desk.app.ids.new(), reason))
    return Said(asked.decision, _no(asked))


class AlwaysRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For which calls a yes is meant from now on, where, and for how many seconds."""

    match: Words = "same"
    scope: RuleScope = "session"
    seconds: Annotated[int, Meta(ge=1, le=366 * DAY // SECOND)] = 7 * DAY // SECOND


async def approve_with(
    desk: Desk,
    decision: DecisionName,
    *,
    edit: Annotated[dict[str, Any], Meta(description="Yes to these arguments instead.")] | None = None,
    always: Annotated[AlwaysRule | None, Meta(description="Make a rule that says yes from now on.")] = None,
    cap: Dollars | None = None,
    digest: Annotated[Name, Meta(description="Binds the yes to the decision as it was shown.")] | None = None,
    reason: Reason = "",
) -> Said:
    """Say yes to a decision: as it is, to other arguments, always, or with a higher cap."""
    desk.demand("approver", "approve anything")
    rule = always or AlwaysRule()
    answer = Answer(
        edit=None if edit is None else arguments(_json(edit), ""),
        always=always is not None,
        match=rule.match,
        scope=rule.scope,
        lasts=rule.seconds * SECOND,
        cap=None if cap is None else (amount_of(cap),),
        digest=digest,
        reason=reason,
    )
    return await approve(desk, decision, answer)


def _json(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        wrong(f"The arguments cannot be written as JSON: {error}.")


def arguments(data: bytes, where: str) -> bytes:
    """Take arguments that a person puts in place of the model's: a JSON object, of a length that is kept in one row."""
    if len(data) > BLOB_FROM:
        wrong(f"The arguments{where} are too long: {BLOB_FROM:,} bytes are the most.")
    try:
        msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong(f'The arguments{where} are no JSON object ({error}): write them like {{"to": "bob"}}.')
    return data


async def _yes(desk: Desk, asked: Waiting, answer: Answer) -> tuple[Write, Said]:
    """Put a yes into the words of the guard; one that does not fit the question is a sentence."""
    by, key = desk.who.name, desk.app.ids.new()
    if answer.cap is not None or asked.about == "cap_raise":
        return await _with_more_money(desk, asked, answer, key)
    if asked.about != "approval" and (answer.edit is not None or answer.always):
        wrong(f"{asked.decision} is no call that waits for approval: say yes or no to it, and nothing else.")
    if answer.edit is not None:
        _refuse_secrets(desk, answer.edit)
        write = approvals.edit(asked, answer.edit, by, key, answer.reason)
        return write, Said(asked.decision, f"Approved with your arguments: {_call(asked)}.")
    if answer.always:
        return _always(desk, asked, answer, key)
    return approvals.decide(asked, "approve", by, key, answer.reason), Said(asked.decision, _plain_yes(asked))


def _always(desk: Desk, asked: Waiting, answer: Answer, key: str) -> tuple[Write, Said]:
    rule = rule_for(asked, desk.app.ids.new(), answer.match, answer.scope, answer.lasts)
    if rule.scope == "fleet":
        desk.demand_all("say always for every agent")
    where = {"session": "in this session", "agent": f"of {asked.agent}", "fleet": "of every agent"}[rule.scope]
    sentence = (
        f"Approved: {_call(asked)}. From now on {asked.name} {where} needs nobody's yes {told(rule.matcher)}, for "
        f"{shown_duration(rule.expires_in)}. Take it back with: halter rules end {rule.id}"
    )
    return approvals.always(asked, rule, desk.who.name, key, answer.reason), Said(asked.decision, sentence, rule.id)


async def _with_more_money(desk: Desk, asked: Waiting, answer: Answer, key: str) -> tuple[Write, Said]:
    if asked.about != "cap_raise":
        wrong(f"{asked.decision} is not about a cap: approve it without --cap.")
    if answer.cap is None or answer.edit is not None or answer.always:
        wrong(f"{asked.subject} has come to its cap: say how high it may be, as in --cap 2.50.")
    (cap,) = answer.cap
    refuse_no_raise(asked, cap)
    await refuse_beyond_carved(desk, asked.subject, cap)
    account = Account(asked.subject, "", "usd")
    write = approvals.raise_cap(asked, account, cap, desk.who.name, key, answer.reason)
    limit = "no cap" if cap is None else f"a cap of {shown(cap)}"
    return write, Said(asked.decision, f"{asked.subject} has {limit} now, and the session goes on.")


def _refuse_secrets(desk: Desk, given: bytes) -> None:
    """Refuse a secret in plain text: the journal would keep it."""
    secrets = from_environment(desk.app.environ)
    known = {name: secrets.value(name) for name in secrets.names()}
    text = from_body(given)
    if Redactor(known, desk.app.environ).redact(text) != text:
        refused("The arguments hold a secret in plain text: write ${secret:NAME} instead.")


def _plain_yes(asked: Waiting) -> str:
    match asked.about:
        case "unknown_call":
            return f"Noted: {asked.name} was done ({asked.subject}). It is not done again."
        case "changed_tool":
            return f"{asked.name} of {asked.agent} may be used as it is now."
        case "changed_server":
            return f"The tools of {asked.name} that were shown may be used by {asked.agent}, as they are now."
        case "schedule":
            return f"{asked.subject} is planned, as it was shown: look at halter schedules {asked.agent}."
        case "proposal":
            return f"Kept: {asked.name} {asked.subject}. Later sessions of {asked.agent} are told of it."
        case _:
            return f"Approved: {_call(asked)}."


def _no(asked: Waiting) -> str:
    match asked.about:
        case "unknown_call":
            return f"Noted: {asked.name} was not done ({asked.subject}). It is tried anew."
        case "changed_tool":
            return f"{asked.name} of {asked.agent} stays out of use."
        case "changed_server":
            return f"The tools of {asked.name} that were shown stay out of use for {asked.agent}."
        case "schedule":
            return f"Denied: {asked.subject} is not planned."
        case "proposal":
            return f"Dismissed: {asked.name} {asked.subject}."
        case "cap_raise":
            return f"Denied: {asked.subject} keeps its cap, and the session ends."
        case _:
            return f"Denied: {_call(asked)}."


def _call(asked: Waiting) -> str:
    return f"{asked.name} of {asked.agent}, session {asked.session}"


async def _commit(desk: Desk, asked: Waiting, write: Write) -> None:
    if not (await desk.app.store.commit(write)).events:
        refused(f"{asked.decision} was decided by somebody else, or has expired, in the meantime.")
