"""Open decisions: which wait for a person, and what an answer does."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, SECOND, format_duration
from halter.core.errors import NotDone
from halter.core.events import ApprovalGiven
from halter.core.money import Account, format_exact_micros
from halter.core.ports import BLOB_THRESHOLD, Query, Write
from halter.core.rows import DecisionRow
from halter.core.text import decode_body
from halter.core.vocabulary import RuleScope
from halter.guard import approvals
from halter.guard.approval_check import are_two_people
from halter.guard.approvals import (
    PendingDecision,
    list_pending_decisions,
)
from halter.operations.actor import Actor, Dollars, Name, Reason, Session, Words, fail_conflict, fail_invalid
from halter.operations.money import amount_of, reject_beyond_carved, reject_no_raise
from halter.operations.queries import AgentNews, read_needs, read_notices
from halter.operations.rules import RuleOffer, list_rule_offers, rule_for
from halter.present.decisions import describe_matcher
from halter.redaction.redact import Redactor
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.needs import Need, describe_continuation, make_decision_need

DecisionName = Annotated[
    Name,
    Meta(description="Decision id.", extra={"typed": "Decision id or prefix, from halter inbox."}),
]


async def waiting(actor: Actor) -> list[PendingDecision]:
    """List the decisions that people are asked to make."""
    rows = await list_pending_decisions(actor.app.store, actor.app.clock.now())
    return [decision for decision in rows if actor.principal.can_see(decision.agent)]


async def get_open_decision(actor: Actor, decision: str) -> PendingDecision:
    """Get an open decision. The error for a closed one says whether it was answered, withdrawn or has expired."""
    for row in await actor.app.store.ask(Query("decision", DecisionRow, {"decision": decision})):
        if actor.principal.can_see(row.agent) and row.verdict == "withdrawn":
            raise NotDone(
                f"{decision} was withdrawn: the session no longer needs it.",
                "missing",
            )
        if actor.principal.can_see(row.agent) and row.verdict:
            raise NotDone(f"{decision} was already answered ({row.verdict}, by {row.people}).", "missing")
        if actor.principal.can_see(row.agent) and row.expires_at <= actor.app.clock.now():
            raise NotDone(f"{decision} expired without an answer, which counts as a no.", "missing")
    pending_decisions = [
        (each.decision, each)
        for each in await list_pending_decisions(actor.app.store)
        if each.expires_at > actor.app.clock.now() and actor.principal.can_see(each.agent)
    ]
    return actor.resolve(pending_decisions, decision, "open decision", "halter inbox")


MAX_GROUP_CALLS: Final = 100


class OpenInbox(NamedTuple):
    """Open decisions, other needs, and notices. With `check`, a non-empty inbox is a failure.

    `option` is appended to suggested commands: the `--store` option that the person typed.
    """

    decisions: Sequence[PendingDecision]
    needs: Sequence[Need]
    news: Sequence[AgentNews]
    check: bool = False
    option: str = ""


Check = Annotated[bool, Meta(description="Exit 1 if anything needs you.")]


async def read_inbox(actor: Actor, *, check: Check = False) -> OpenInbox:
    """List open decisions, other needs, and the notices of the last day."""
    other_needs = [need for need in await read_needs(actor) if not need.decision]
    notices = await read_notices(actor, actor.app.clock.now() - DAY)
    return OpenInbox(await waiting(actor), other_needs, notices, check, actor.option)


async def open_decisions(actor: Actor) -> Sequence[dict[str, Any]]:
    """List open decisions, the oldest first."""
    return [to_json_object(decision) for decision in await waiting(actor)]


def to_json_object(decision: PendingDecision) -> dict[str, object]:
    """Convert a decision to a JSON object, with the rules that an approval of it can make."""
    names = ("decision", "about", "session", "agent", "subject", "name", "level", "risk", "asked_at", "expires_at")
    facts = {name: getattr(decision, name) for name in (*names, "digest", "reasons", "cause")}
    facts |= {"shown": decision.display_text, "approvers": decision.approvers, "first_by": decision.first_by}
    need = make_decision_need(decision)
    texts = {"kind": need.kind, "sentence": need.sentence, "why": need.why, "commands": need.commands}
    return {**facts, **texts, "rules": [msgspec.structs.asdict(each) for each in list_rule_offers(decision)]}


class ApprovalTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of an approval. At most one of `edit`, `always` and `cap` is set; a plain approval sets none.

    `cap` holds the new cap in micro-dollars, or (None,) for no cap. A `digest` binds it to the decision as shown.
    """

    edit: bytes | None = None
    always: bool = False
    match: str = "same"
    scope: str = "session"
    lasts: int = 7 * DAY
    cap: tuple[int | None] | None = None
    digest: str | None = None
    reason: str = ""


class DecisionResult(msgspec.Struct, frozen=True):
    """The result of an answer in a sentence, and the id of the rule that it made, if any.

    `continuation` says which process continues the session, or how to continue it if none does.
    """

    decision: str
    sentence: str
    rule: str = ""
    continuation: str = ""


async def approve(actor: Actor, decision: str, terms: ApprovalTerms) -> DecisionResult:
    """Approve a decision; reject terms that do not fit its kind."""
    actor.require_person("approver", "approve anything")
    open_decision = await get_open_decision(actor, decision)
    if terms.digest is not None and terms.digest != open_decision.digest:
        fail_conflict(f"{open_decision.decision} has changed since it was shown. Review it again.")
    _reject_single_approver(actor, open_decision, terms)
    write, result = await _approve_once(actor, open_decision, terms)
    result = await _add_continuation(actor, open_decision, result)
    if await _commit(actor, open_decision, write):
        return _report_first_approval(open_decision, actor)
    return result


async def _add_continuation(actor: Actor, decision: PendingDecision, result: DecisionResult) -> DecisionResult:
    continuation = await describe_continuation(actor.app.store, decision.session, actor.app.clock.now())
    return msgspec.structs.replace(
        result, sentence=f"{result.sentence} {continuation}".strip(), continuation=continuation
    )


def _reject_single_approver(actor: Actor, decision: PendingDecision, terms: ApprovalTerms) -> None:
    """Reject a second approval by the same person, and changed terms, where a decision needs two approvers."""
    if decision.approvers <= 1:
        return
    if terms.edit is not None or terms.always:
        fail_conflict(f"{decision.decision} needs two approvers. Approve it unchanged, or deny it.")
    if decision.first_by and not are_two_people(decision.first_by, actor.principal.name):
        is_mixed = ("~" in decision.first_by) != ("~" in actor.principal.name)
        hint = (
            " An account of the sign-on provider counts as a second person only with a name in `sign_on.people`."
            if is_mixed
            else ""
        )
        fail_conflict(f"{decision.first_by} has already approved {decision.decision}; it needs another person.{hint}")


def _report_first_approval(decision: PendingDecision, actor: Actor) -> DecisionResult:
    return DecisionResult(
        decision.decision, f"{actor.principal.name} approved {_call(decision)}. It needs another approver."
    )


class ShownDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision as it was shown; the digest binds the answer to it."""

    decision: Name
    digest: Name


class GroupResult(msgspec.Struct, frozen=True):
    """The result of answering several decisions together, in a sentence."""

    session: str
    decisions: Sequence[str]
    sentence: str


ShownDecisions = Annotated[
    Sequence[ShownDecision],
    Meta(min_length=1, max_length=MAX_GROUP_CALLS, description="The calls that were shown, each with its digest."),
]


async def approve_together(
    actor: Actor, session: Session, *, shown: ShownDecisions, reason: Reason = ""
) -> GroupResult:
    """Approve pending calls of a session together, each as it was shown. If one has changed, none is approved."""
    actor.require_person("approver", "approve anything")
    calls = [await get_open_decision(actor, each.decision) for each in shown]
    for decision, shown_decision in zip(calls, shown, strict=True):
        if decision.about != "approval" or decision.session != session:
            fail_invalid(f"{decision.decision} is not a pending call of session {session}. Answer it separately.")
        if decision.digest != shown_decision.digest:
            fail_conflict(f"{decision.decision} has changed since it was shown. Review it again.")
    for decision in calls:
        _reject_single_approver(actor, decision, ApprovalTerms())
    is_pending, continuation = False, await describe_continuation(actor.app.store, session, actor.app.clock.now())
    for decision in calls:
        write = approvals.answer_decision(decision, "approve", actor.principal.name, actor.app.ids.make(), reason)
        is_pending = await _commit(actor, decision, write) or is_pending
    names = tuple(decision.decision for decision in calls)
    note = "Calls that need two approvers wait for another person." if is_pending else continuation
    return GroupResult(session, names, f"Approved together: {', '.join(map(_call, calls))}. {note}".strip())


def group_calls(decisions: Sequence[PendingDecision]) -> list[list[PendingDecision]]:
    """Group open decisions as they are answered: the calls of one session together, every other decision alone."""
    groups: dict[str, list[PendingDecision]] = {}
    for decision in decisions:
        is_groupable = decision.about == "approval" and decision.session
        groups.setdefault(f"session {decision.session}" if is_groupable else decision.decision, []).append(decision)
    return list(groups.values())


async def deny(actor: Actor, decision: DecisionName, reason: Reason = "") -> DecisionResult:
    """Deny a decision."""
    actor.require_person("approver", "deny anything")
    open_decision = await get_open_decision(actor, decision)
    result = DecisionResult(open_decision.decision, _describe_no(open_decision))
    result = await _add_continuation(actor, open_decision, result)
    await _commit(
        actor,
        open_decision,
        approvals.answer_decision(open_decision, "deny", actor.principal.name, actor.app.ids.make(), reason),
    )
    return result


class AlwaysRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The calls that a standing rule covers, its scope, and its duration in seconds."""

    match: Words = "same"
    scope: RuleScope = "session"
    seconds: Annotated[int, Meta(ge=1, le=366 * DAY // SECOND)] = 7 * DAY // SECOND


async def approve_with(
    actor: Actor,
    decision: DecisionName,
    *,
    edit: Annotated[dict[str, Any], Meta(description="Approve these arguments instead.")] | None = None,
    always: Annotated[AlwaysRule | None, Meta(description="Make a standing rule.")] = None,
    cap: Dollars | None = None,
    digest: Annotated[Name, Meta(description="Binds the approval to the decision as it was shown.")] | None = None,
    reason: Reason = "",
) -> DecisionResult:
    """Approve a decision: unchanged, with other arguments, with a standing rule, or with a higher cap."""
    actor.require_person("approver", "approve anything")
    rule = always or AlwaysRule()
    terms = ApprovalTerms(
        edit=None if edit is None else arguments(_json(edit), ""),
        always=always is not None,
        match=rule.match,
        scope=rule.scope,
        lasts=rule.seconds * SECOND,
        cap=None if cap is None else (amount_of(cap),),
        digest=digest,
        reason=reason,
    )
    return await approve(actor, decision, terms)


def _json(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        fail_invalid(f"The arguments are not valid JSON: {error}.")


def arguments(data: bytes, where: str) -> bytes:
    """Require that arguments which replace the model's are a JSON object that fits into one row; return them."""
    if len(data) > BLOB_THRESHOLD:
        fail_invalid(f"The arguments{where} are too long; the limit is {BLOB_THRESHOLD:,} bytes.")
    try:
        msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fail_invalid(f'The arguments{where} are not a JSON object ({error}). Write them as in {{"to": "bob"}}.')
    return data


async def _approve_once(actor: Actor, decision: PendingDecision, terms: ApprovalTerms) -> tuple[Write, DecisionResult]:
    by, key = actor.principal.name, actor.app.ids.make()
    if terms.cap is not None or decision.about == "cap_raise":
        return await _approve_with_cap(actor, decision, terms, key)
    if decision.about != "approval" and (terms.edit is not None or terms.always):
        fail_invalid(f"{decision.decision} is not a pending call. Approve it unchanged, or deny it.")
    if terms.edit is not None:
        _reject_secrets(actor, terms.edit)
        write = approvals.approve_edited(decision, terms.edit, by, key, terms.reason)
        return write, DecisionResult(decision.decision, f"Approved with your arguments: {_call(decision)}.")
    if terms.always:
        return _approve_always(actor, decision, terms, key)
    return approvals.answer_decision(decision, "approve", by, key, terms.reason), DecisionResult(
        decision.decision, _describe_yes(decision)
    )


def _approve_always(
    actor: Actor, decision: PendingDecision, terms: ApprovalTerms, key: str
) -> tuple[Write, DecisionResult]:
    rule = rule_for(decision, actor.app.ids.make(), terms.match, terms.scope, terms.lasts)
    if rule.scope == "fleet":
        actor.require_all_agents("make a rule for every agent")
    where = {"session": "in this session", "agent": f"of {decision.agent}", "fleet": "of every agent"}[rule.scope]
    sentence = (
        f"Approved: {_call(decision)}. For {format_duration(rule.expires_in)}, calls of {decision.name} {where} "
        f"{describe_matcher(rule.matcher)} need no approval. End the rule with `halter rules end {rule.id}`."
    )
    return approvals.approve_always(decision, rule, actor.principal.name, key, terms.reason), DecisionResult(
        decision.decision, sentence, rule.id
    )


async def _approve_with_cap(
    actor: Actor, decision: PendingDecision, terms: ApprovalTerms, key: str
) -> tuple[Write, DecisionResult]:
    if decision.about != "cap_raise":
        fail_invalid(f"{decision.decision} does not ask for a cap. Approve it without --cap.")
    if terms.cap is None or terms.edit is not None or terms.always:
        fail_invalid(f"{decision.subject} has reached its cap. Set a new one, as in --cap 2.50.")
    (cap,) = terms.cap
    reject_no_raise(decision, cap)
    await reject_beyond_carved(actor, decision.subject, cap)
    account = Account(decision.subject, "", "usd")
    write = approvals.raise_cap(decision, account, cap, actor.principal.name, key, terms.reason)
    cap_text = "none" if cap is None else format_exact_micros(cap)
    return write, DecisionResult(decision.decision, f"Cap of {decision.subject} is now {cap_text}.")


def _reject_secrets(actor: Actor, new_arguments: bytes) -> None:
    """Reject a secret in plain text: the journal would keep it."""
    secrets = read_environment_secrets(actor.app.environ)
    secret_by_name = {name: secrets.value(name) for name in secrets.names()}
    text = decode_body(new_arguments)
    if Redactor(secret_by_name, actor.app.environ).redact(text) != text:
        fail_conflict("The arguments contain a secret in plain text. Use ${secret:NAME} instead.")


def _describe_yes(decision: PendingDecision) -> str:
    match decision.about:
        case "unknown_call":
            return f"Recorded: the call of {decision.name} was made ({decision.subject}). It is not repeated."
        case "changed_tool":
            return f"{decision.agent} may use {decision.name} in this version."
        case "changed_server":
            return f"{decision.agent} may use the listed tools of {decision.name} in this version."
        case "schedule":
            return (
                f"Created trigger {decision.subject}. See `halter triggers {decision.agent}`. "
                f"It runs only while `halter up`, `halter serve` or a worker runs {decision.agent}."
            )
        case "proposal":
            return f"Saved. Future sessions of {decision.agent} will see: {decision.name} {decision.subject}"
        case _:
            return f"Approved: {_call(decision)}."


def _describe_no(decision: PendingDecision) -> str:
    match decision.about:
        case "unknown_call":
            return f"Recorded: the call of {decision.name} was not made ({decision.subject}). It is retried."
        case "changed_tool":
            return f"{decision.name} of {decision.agent} stays disabled."
        case "changed_server":
            return f"The listed tools of {decision.name} stay disabled for {decision.agent}."
        case "schedule":
            return f"Denied: trigger {decision.subject} is not created."
        case "proposal":
            return f"Dismissed: {decision.name} {decision.subject}."
        case "cap_raise":
            return f"Denied: {decision.subject} keeps its cap, and the session ends."
        case _:
            return f"Denied: {_call(decision)}."


def _call(decision: PendingDecision) -> str:
    return f"{decision.name} of {decision.agent}, session {decision.session}"


async def _commit(actor: Actor, decision: PendingDecision, write: Write) -> bool:
    """Commit an answer; return whether the decision needs another approver."""
    events = (await actor.app.store.commit(write)).events
    if not events:
        fail_conflict(f"{decision.decision} was answered by another person or expired in the meantime.")
    return isinstance(events[0].event, ApprovalGiven)


class RuleOffers(NamedTuple):
    decision: str
    offers: Sequence[RuleOffer]


async def offer_rules(actor: Actor, decision: DecisionName) -> RuleOffers:
    """List the standing rules that an approval of a decision can make."""
    open_decision = await get_open_decision(actor, decision)
    return RuleOffers(open_decision.decision, list_rule_offers(open_decision))
