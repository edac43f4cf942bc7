"""Open decisions and standing rules: how each kind is put to a person, and what an answer does.

A rule is made from the call that is shown. Every argument stays exactly as it is there, except where the person says
otherwise of it, one condition a line.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from posixpath import dirname
from typing import Annotated, Any, Final, NamedTuple, get_args

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, SECOND, format_duration
from halter.core.errors import NotDone
from halter.core.events import ApprovalGiven
from halter.core.money import Account, format_micros
from halter.core.ports import BLOB_THRESHOLD, Query, Write
from halter.core.provenance import Flaw
from halter.core.rows import DecisionRow, RuleRow
from halter.core.text import from_body, shorten, to_one_line
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard import approvals
from halter.guard.approvals import (
    STAR,
    AnyCondition,
    ArgvCondition,
    Condition,
    EachArgument,
    EqualsCondition,
    FolderCondition,
    HostCondition,
    LegacyFolder,
    LegacyHost,
    LegacyWords,
    PendingDecision,
    RuleMatcher,
    RuleWording,
    SameArguments,
    StandingRule,
    UnreadableRule,
    end_rule,
    escape_wildcards,
    find_host,
    make_equals_condition,
    matches_rule,
    matches_word,
    parse_argv,
)
from halter.guard.guard import REDACTION_MARK
from halter.guard.judge import are_two_people
from halter.operations.desk import Actor, Dollars, Done, Name, Reason, Session, Words, fail_conflict, fail_invalid
from halter.operations.money import amount_of, reject_beyond_carved, reject_no_raise
from halter.operations.queries import AgentNews, read_news
from halter.operations.queries import read_needs as list_all_needs
from halter.redaction.redact import Redactor
from halter.redaction.secrets import read_environment_secrets
from halter.risk.commands import WRAPPER_NAMES as WRAPPERS
from halter.risk.interpreters import is_interpreter
from halter.risk.shell_syntax import PRIVILEGE_RAISERS, SHELLS, program_of
from halter.runtime.needs import Need, make_decision_need

DecisionName = Annotated[
    Name,
    Meta(description="A decision's id.", extra={"typed": "A decision's id, or its beginning, from halter inbox."}),
]


class WaitingDecision(PendingDecision, frozen=True):
    """An open decision, with the facts of the question."""

    facts: bytes | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the risk is rated so."""
        return msgspec.json.decode(self.facts, type=_Asked).reasons if self.facts else ()


class _Asked(msgspec.Struct, frozen=True):
    reasons: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()


class DecisionPrompt(msgspec.Struct, frozen=True):
    """How a decision is put to a person: what is wanted, the model's reason, what is shown, what a yes and a no do."""

    what: str
    why: str
    shown: str
    yes: str
    no: str


async def waiting(actor: Actor) -> list[WaitingDecision]:
    now = actor.app.clock.now()
    rows = await actor.app.store.ask(Query("open_decisions", WaitingDecision, {"now": now}))
    return [decision for decision in rows if actor.principal.can_see(decision.agent)]


async def decision_meant(actor: Actor, decision: str) -> WaitingDecision:
    """Find an open decision; one that was answered or has expired says so."""
    for row in await actor.app.store.ask(Query("decision", DecisionRow, {"decision": decision})):
        if actor.principal.can_see(row.agent) and row.verdict == "withdrawn":
            raise NotDone(
                f"{decision} was withdrawn: what it was about is gone, or its session no longer waits for it.",
                "missing",
            )
        if actor.principal.can_see(row.agent) and row.verdict:
            raise NotDone(f"{decision} is answered already: {row.verdict}, by {row.people}.", "missing")
        if actor.principal.can_see(row.agent) and row.expires_at <= actor.app.clock.now():
            raise NotDone(f"{decision} has expired without an answer, which counts as a no.", "missing")
    return actor.resolve(
        [(one.decision, one) for one in await waiting(actor)], decision, "open decision", "halter inbox"
    )


def render_prompt(decision: WaitingDecision) -> DecisionPrompt:
    need = make_decision_need(decision)
    return DecisionPrompt(need.sentence, need.why, need.shown, *_describe_answers(decision.about))


def _describe_answers(about: str) -> tuple[str, str]:
    """Say what a yes and a no do."""
    match about:
        case "unknown_call":
            return "It was done, and is not done again", "It was not done, and is tried anew"
        case "cap_raise":
            return "Set a higher cap, in dollars", "The session ends"
        case "changed_tool":
            return "It may be used as it is now", "It stays out of use"
        case "changed_server":
            return "These may be used as they are now", "These stay out of use"
        case "schedule":
            return "It is planned exactly so", "Nothing is planned"
        case "proposal":
            return "It is kept", "It is dismissed"
        case _:
            return "Exactly this call, once", "It does not run"


SCOPES: Final[tuple[RuleScope, ...]] = get_args(RuleScope)
SAME: Final = "same"
FORMS: Final = "write same, words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST or any:KEY"
_PATHS: Final = ("path", "file", "folder")
_MOST_CONDITIONS: Final = 50
MOST_TOGETHER: Final = 100
_PLAIN: Final = re.compile(r"[\w@%+=:,./*-]+")


class RuleOffer(msgspec.Struct, frozen=True):
    """A rule that a person may choose: how it is typed, and all that it says."""

    match: str
    sentence: str


class RuleOffers(NamedTuple):
    decision: str
    offers: Sequence[RuleOffer]


class OpenInbox(NamedTuple):
    """What waits for a person: open decisions, and all else that does. With `check`, anything is a failure.

    `option` completes the commands that are shown, where the person named a store.
    """

    decisions: Sequence[WaitingDecision]
    needs: Sequence[Need]
    news: Sequence[AgentNews]
    check: bool = False
    option: str = ""


def rule_for(decision: WaitingDecision, rule: str, match: str, scope: str, lasts: int) -> RuleWording:
    """Parse a rule; one that would not match the very call that is asked about is refused."""
    if decision.risk == "CRITICAL":
        fail_conflict("A call of CRITICAL risk is always asked about: approve it without --always.")
    if lasts <= 0:
        fail_invalid("A rule has to last for a while: write --for 7d.")
    keys = msgspec.json.decode(decision.keys or "[]", type=tuple[str, ...])
    matcher = _matcher(decision, match, keys)
    return RuleWording(id=rule, matcher=matcher, keys=keys, scope=_scope(scope), expires_in=lasts)


def _scope(scope: str) -> RuleScope:
    if scope not in SCOPES:
        fail_invalid(f"{scope!r} is no scope of a rule: write {', '.join(SCOPES[:-1])} or {SCOPES[-1]}.")
    return scope


def _matcher(decision: WaitingDecision, match: str, keys: tuple[str, ...]) -> RuleMatcher:
    lines = [line.strip() for line in match.splitlines() if line.strip()]
    if lines == [SAME]:
        return SameArguments(decision.same)
    if not lines or len(lines) > _MOST_CONDITIONS:
        fail_invalid(f"{_parse_typed(match)!r} is no way to match a call: {FORMS}.")
    said: dict[str, Condition] = {}
    for line in lines:
        condition = _condition(decision, line, keys)
        if condition.key in said:
            fail_invalid(f"{condition.key} is named twice: say of each argument once what it may be.")
        said[condition.key] = condition
    values = _read_shown_arguments(decision)
    matcher = EachArgument(tuple(said.get(key) or _make_equals_condition(key, value) for key, value in values.items()))
    _require_match(decision, matcher, keys, match)
    return matcher


def _make_equals_condition(key: str, value: Any) -> EqualsCondition:
    pinned = make_equals_condition(key, value)
    if REDACTION_MARK in json.dumps(value, ensure_ascii=False):
        fail_conflict(
            f"{key} holds something that is hidden, so it cannot be asked for exactly: write same, or any:{key}."
        )
    return pinned


def _parse_typed(text: str) -> str:
    return shorten(to_one_line(text), 200)


def _condition(decision: WaitingDecision, line: str, keys: tuple[str, ...]) -> Condition:
    kind, _, rest = line.partition(":")
    key, equals, value = rest.partition("=")
    whole = not equals if kind == "any" else bool(equals and value.strip())
    if kind not in {"words", "under", "at", "any"} or not whole:
        fail_invalid(f"{_parse_typed(line)!r} is no way to match a call: {FORMS}.")
    if key not in keys:
        fail_invalid(f"{decision.name} was not asked with an argument {key!r}: it has {', '.join(keys) or 'none'}.")
    match kind:
        case "words":
            return ArgvCondition(key, _split_words(value))
        case "under":
            return FolderCondition(key, value)
        case "at":
            return HostCondition(key, value)
        case _:
            return AnyCondition(key)


def _split_words(value: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        fail_invalid(f"{value!r} cannot be read as the words of a command ({error}).")
    if words and STAR in words[0]:
        fail_invalid(f"{words[0]!r} is to be a program: it has no wildcard.")
    return words


def _require_match(decision: WaitingDecision, matcher: RuleMatcher, keys: tuple[str, ...], match: str) -> None:
    """Try a rule on the call that is asked about, as it was shown."""
    values = _read_shown_arguments(decision)
    rule = StandingRule(
        id="", tool=decision.name, matcher=matcher, keys=keys, scope="fleet", by="", made_at=0, expires_at=1
    )
    spec = ToolSpec(name=decision.name, description="", schema=b"")
    if not matches_rule(rule, spec, Valid(values, json.dumps(values).encode()), "", "", 0):
        fail_invalid(
            f"{_parse_typed(match)!r} would not even match the call that is asked about: look at it in `halter inbox`."
        )


def _read_shown_arguments(decision: WaitingDecision) -> dict[str, Any]:
    try:
        return json.JSONDecoder().raw_decode(decision.display_text.removeprefix(f"{decision.name} "))[0]
    except (ValueError, RecursionError):
        fail_conflict("What was asked about cannot be read any more, so no rule can be tried on it: write same.")


def list_rule_offers(decision: WaitingDecision) -> Sequence[RuleOffer]:
    """List the rules that a person may choose for a call: the narrowest first, each no wider than it reads."""
    if decision.about != "approval" or decision.risk == "CRITICAL" or decision.approvers > 1:
        return ()
    keys = msgspec.json.decode(decision.keys or "[]", type=tuple[str, ...])
    offered = [RuleOffer(SAME, describe_matcher(SameArguments("")))]
    if decision.risk == "HIGH":
        return offered
    with suppress(NotDone):
        # What is hidden, erased or unreadable can be agreed to as it is, and not in any other way.
        wider = [*_list_place_offers(decision, keys), *_wider(_read_shown_arguments(decision))]
        offered += [RuleOffer(match, describe_matcher(_matcher(decision, match, keys))) for match in wider]
    return offered


def _list_place_offers(decision: WaitingDecision, keys: Sequence[str]) -> Iterator[str]:
    """For a question of the injection brake: any content, with everything else exactly as it is."""
    flaws = msgspec.json.decode(decision.facts, type=_Asked).flaws if decision.facts else ()
    contents = {flaw.argument for flaw in flaws if flaw.reason == "content"}
    free = [key for key in keys if key in contents and "=" not in key and key.isprintable()]
    if free and len(free) < len(keys):
        yield "\n".join(f"any:{key}" for key in free)


Check = Annotated[bool, Meta(description="Exit 1 if anything needs you.")]


async def read_inbox(actor: Actor, *, check: Check = False) -> OpenInbox:
    """List open decisions, what else waits for a person, and the notices of the last day."""
    others = [need for need in await list_all_needs(actor) if not need.decision]
    news = await read_news(actor, actor.app.clock.now() - DAY)
    return OpenInbox(await waiting(actor), others, news, check, actor.option)


async def offer_rules(actor: Actor, decision: DecisionName) -> RuleOffers:
    """List the rules that a yes to a decision could make."""
    asked = await decision_meant(actor, decision)
    return RuleOffers(asked.decision, list_rule_offers(asked))


async def open_decisions(actor: Actor) -> Sequence[dict[str, Any]]:
    """List open decisions, the longest waiting first."""
    return [to_json_object(decision) for decision in await waiting(actor)]


def to_json_object(decision: WaitingDecision) -> dict[str, object]:
    """Write a decision for programs, with the rules that a yes to it could make."""
    names = ("decision", "about", "session", "agent", "subject", "name", "level", "risk", "asked_at", "expires_at")
    facts = {name: getattr(decision, name) for name in (*names, "digest", "reasons", "shown", "approvers", "first_by")}
    need = make_decision_need(decision)
    words = {"kind": need.kind, "sentence": need.sentence, "why": need.why, "commands": need.commands}
    return {**facts, **words, "rules": [msgspec.structs.asdict(each) for each in list_rule_offers(decision)]}


def _wider(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if "=" in key or not key.isprintable():
            continue
        words = parse_argv(value) if isinstance(value, list) or key == "command" else None
        if words is not None and (pattern := _generalise_last_word(words)):
            yield f"words:{key}={' '.join(map(_quote_word, pattern))}"
        if isinstance(value, str) and "://" in value and (host := find_host(value)):
            yield f"at:{key}={host}"
        elif isinstance(value, str) and key in _PATHS and (folder := dirname(value)) and value.isprintable():
            rest = [f"any:{other}" for other, text in values.items() if other == "content" and isinstance(text, str)]
            yield "\n".join([f"under:{key}={folder}", *rest])


def _generalise_last_word(words: tuple[str, ...]) -> tuple[str, ...]:
    """Replace a command's last word by a wildcard, if it is an operand of a program that runs no code from operands."""
    program = program_of(words[0])
    runs_code = program in SHELLS | PRIVILEGE_RAISERS | WRAPPERS or is_interpreter(program)
    if len(words) == 1 or runs_code or not matches_word(STAR, words[-1]):
        return ()
    return (*map(escape_wildcards, words[:-1]), STAR)


def describe_matcher(matcher: RuleMatcher) -> str:
    match matcher:
        case SameArguments():
            return "with exactly the same arguments"
        case EachArgument(conditions):
            return f"where {'; '.join(map(_condition_told, conditions))}"
        case LegacyWords(key, words):
            return f"where {key} is exactly {shlex.join(words)}, alone ({EARLIER})"
        case LegacyFolder(key, folder):
            return f"where {key} lies in {folder}, alone ({EARLIER})"
        case LegacyHost(key, host):
            return f"where {key} leads to {host}, alone ({EARLIER})"
        case UnreadableRule():
            return "in a way that this version cannot read: it answers nothing"


EARLIER: Final = "of an earlier version, and so for calls without any other argument: end it, and say always anew"


def _condition_told(condition: Condition) -> str:
    match condition:
        case EqualsCondition(key, _, shown):
            return f"{key} is exactly {shown}"
        case ArgvCondition(key, words):
            wild = " (a * is a piece of one word, no option)" if any(STAR in word for word in words) else ""
            return f"{key} is {' '.join(map(_quote_word, words))}{wild}"
        case FolderCondition(key, folder):
            return f"{key} lies in {folder}"
        case HostCondition(key, host):
            return f"{key} leads to {host}"
        case AnyCondition(key):
            return f"{key} is anything at all"


def _quote_word(word: str) -> str:
    """Quote a word, but leave a wildcard visible."""
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)


class ApprovalTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of an approval. At most one of `edit`, `always` and `cap` makes it more than a plain one.

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


class DecisionResult(msgspec.Struct, frozen=True):
    """What was decided, in a sentence; and the rule that was made, if any."""

    decision: str
    sentence: str
    rule: str = ""


async def approve(actor: Actor, decision: str, terms: ApprovalTerms) -> DecisionResult:
    """Approve a decision. An answer that does not fit the question is refused."""
    actor.demand("approver", "approve anything")
    asked = await decision_meant(actor, decision)
    if terms.digest is not None and terms.digest != asked.digest:
        fail_conflict(f"{asked.decision} is not what you were shown: look at it again.")
    _reject_single_approver(actor, asked, terms)
    write, said = await _approve_once(actor, asked, terms)
    return _report_first_approval(asked, actor) if await _commit(actor, asked, write) else said


def _reject_single_approver(actor: Actor, decision: WaitingDecision, terms: ApprovalTerms) -> None:
    """Refuse what one person cannot do where two must agree: to agree twice, and to agree to anything else."""
    if decision.approvers <= 1:
        return
    if terms.edit is not None or terms.always:
        fail_conflict(
            f"Two people must agree to {decision.decision}, each to what is shown: approve it as it is, or deny it."
        )
    if decision.first_by and not are_two_people(decision.first_by, actor.principal.name):
        unnamed = ("~" in decision.first_by) != ("~" in actor.principal.name)
        hint = " A provider's account counts beside others only with a name in `sign_on.people`." if unnamed else ""
        fail_conflict(f"{decision.first_by} has agreed to {decision.decision} already: another person must, too.{hint}")


def _report_first_approval(decision: WaitingDecision, actor: Actor) -> DecisionResult:
    return DecisionResult(
        decision.decision, f"{actor.principal.name} agrees to {_call(decision)}. Another person must agree, too."
    )


class ShownDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision as it was shown; the digest binds an answer to that."""

    decision: Name
    digest: Name


class GroupResult(msgspec.Struct, frozen=True):
    """What was decided together, in a sentence."""

    session: str
    decisions: Sequence[str]
    sentence: str


ShownDecisions = Annotated[
    Sequence[ShownDecision],
    Meta(min_length=1, max_length=MOST_TOGETHER, description="The calls that were shown, each with its digest."),
]


async def approve_together(
    actor: Actor, session: Session, *, shown: ShownDecisions, reason: Reason = ""
) -> GroupResult:
    """Approve calls of a session that wait together, each as it was shown. If one has changed, none is approved."""
    actor.demand("approver", "approve anything")
    asked = [await decision_meant(actor, each.decision) for each in shown]
    for decision, seen in zip(asked, shown, strict=True):
        if decision.about != "approval" or decision.session != session:
            fail_invalid(
                f"{decision.decision} is no call of session {session} that waits for approval: answer it by itself."
            )
        if decision.digest != seen.digest:
            fail_conflict(f"{decision.decision} is not what you were shown: look at it again.")
    for decision in asked:
        _reject_single_approver(actor, decision, ApprovalTerms())
    waits = False
    for decision in asked:
        write = approvals.answer_decision(decision, "approve", actor.principal.name, actor.app.ids.make(), reason)
        waits = await _commit(actor, decision, write) or waits
    names = tuple(decision.decision for decision in asked)
    more = " Another person must agree, too, where two have to." if waits else ""
    return GroupResult(session, names, f"Approved together: {', '.join(map(_call, asked))}.{more}")


def group_calls(found: Sequence[WaitingDecision]) -> list[list[WaitingDecision]]:
    """Open decisions as they are answered: the calls of one session together, everything else by itself."""
    groups: dict[str, list[WaitingDecision]] = {}
    for decision in found:
        together = decision.about == "approval" and decision.session
        groups.setdefault(f"session {decision.session}" if together else decision.decision, []).append(decision)
    return list(groups.values())


async def deny(actor: Actor, decision: DecisionName, reason: Reason = "") -> DecisionResult:
    """Deny a decision."""
    actor.demand("approver", "deny anything")
    asked = await decision_meant(actor, decision)
    await _commit(
        actor, asked, approvals.answer_decision(asked, "deny", actor.principal.name, actor.app.ids.make(), reason)
    )
    return DecisionResult(asked.decision, _describe_no(asked))


class AlwaysRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which calls a standing rule covers, where, and for how many seconds."""

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
    """Approve a decision: as it is, with other arguments, always, or with a higher cap."""
    actor.demand("approver", "approve anything")
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
        fail_invalid(f"The arguments cannot be written as JSON: {error}.")


def arguments(data: bytes, where: str) -> bytes:
    """Check arguments that replace the model's: a JSON object that fits into one row."""
    if len(data) > BLOB_THRESHOLD:
        fail_invalid(f"The arguments{where} are too long: {BLOB_THRESHOLD:,} bytes are the most.")
    try:
        msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fail_invalid(f'The arguments{where} are no JSON object ({error}): write them like {{"to": "bob"}}.')
    return data


async def _approve_once(actor: Actor, decision: WaitingDecision, terms: ApprovalTerms) -> tuple[Write, DecisionResult]:
    by, key = actor.principal.name, actor.app.ids.make()
    if terms.cap is not None or decision.about == "cap_raise":
        return await _approve_with_cap(actor, decision, terms, key)
    if decision.about != "approval" and (terms.edit is not None or terms.always):
        fail_invalid(f"{decision.decision} is no call that waits for approval: say yes or no to it, and nothing else.")
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
    actor: Actor, decision: WaitingDecision, terms: ApprovalTerms, key: str
) -> tuple[Write, DecisionResult]:
    rule = rule_for(decision, actor.app.ids.make(), terms.match, terms.scope, terms.lasts)
    if rule.scope == "fleet":
        actor.require_all_agents("say always for every agent")
    where = {"session": "in this session", "agent": f"of {decision.agent}", "fleet": "of every agent"}[rule.scope]
    sentence = (
        f"Approved: {_call(decision)}. From now on {decision.name} {where} is not asked about "
        f"{describe_matcher(rule.matcher)}, for {format_duration(rule.expires_in)}. "
        f"Take it back with: halter rules end {rule.id}"
    )
    return approvals.approve_always(decision, rule, actor.principal.name, key, terms.reason), DecisionResult(
        decision.decision, sentence, rule.id
    )


async def _approve_with_cap(
    actor: Actor, decision: WaitingDecision, terms: ApprovalTerms, key: str
) -> tuple[Write, DecisionResult]:
    if decision.about != "cap_raise":
        fail_invalid(f"{decision.decision} is not about a cap: approve it without --cap.")
    if terms.cap is None or terms.edit is not None or terms.always:
        fail_invalid(f"{decision.subject} has come to its cap: say how high it may be, as in --cap 2.50.")
    (cap,) = terms.cap
    reject_no_raise(decision, cap)
    await reject_beyond_carved(actor, decision.subject, cap)
    account = Account(decision.subject, "", "usd")
    write = approvals.raise_cap(decision, account, cap, actor.principal.name, key, terms.reason)
    limit = "no cap" if cap is None else f"a cap of {format_micros(cap)}"
    return write, DecisionResult(decision.decision, f"{decision.subject} has {limit} now, and the session goes on.")


def _reject_secrets(actor: Actor, given: bytes) -> None:
    """Refuse a secret in plain text: the journal would keep it."""
    secrets = read_environment_secrets(actor.app.environ)
    known = {name: secrets.value(name) for name in secrets.names()}
    text = from_body(given)
    if Redactor(known, actor.app.environ).redact(text) != text:
        fail_conflict("The arguments hold a secret in plain text: write ${secret:NAME} instead.")


def _describe_yes(decision: WaitingDecision) -> str:
    match decision.about:
        case "unknown_call":
            return f"Noted: {decision.name} was done ({decision.subject}). It is not done again."
        case "changed_tool":
            return f"{decision.name} of {decision.agent} may be used as it is now."
        case "changed_server":
            return f"The tools of {decision.name} that were shown may be used by {decision.agent}, as they are now."
        case "schedule":
            return (
                f"{decision.subject} is planned, as it was shown: look at halter schedules {decision.agent}. "
                f"It runs only while `halter up`, `halter serve` or a worker runs {decision.agent}."
            )
        case "proposal":
            return f"Kept: {decision.name} {decision.subject}. Later sessions of {decision.agent} are told of it."
        case _:
            return f"Approved: {_call(decision)}."


def _describe_no(decision: WaitingDecision) -> str:
    match decision.about:
        case "unknown_call":
            return f"Noted: {decision.name} was not done ({decision.subject}). It is tried anew."
        case "changed_tool":
            return f"{decision.name} of {decision.agent} stays out of use."
        case "changed_server":
            return f"The tools of {decision.name} that were shown stay out of use for {decision.agent}."
        case "schedule":
            return f"Denied: {decision.subject} is not planned."
        case "proposal":
            return f"Dismissed: {decision.name} {decision.subject}."
        case "cap_raise":
            return f"Denied: {decision.subject} keeps its cap, and the session ends."
        case _:
            return f"Denied: {_call(decision)}."


def _call(decision: WaitingDecision) -> str:
    return f"{decision.name} of {decision.agent}, session {decision.session}"


async def _commit(actor: Actor, decision: WaitingDecision, write: Write) -> bool:
    """Write an answer; returns whether it waits for another person's."""
    events = (await actor.app.store.commit(write)).events
    if not events:
        fail_conflict(f"{decision.decision} was decided by another person, or has expired, in the meantime.")
    return isinstance(events[0].event, ApprovalGiven)


RuleName = Annotated[
    Name, Meta(description="A rule's id.", extra={"typed": "A rule's id, or its beginning, from halter rules."})
]


async def rules(actor: Actor) -> Sequence[RuleRow]:
    """List standing rules, including those that are over.

    A rule for every agent is shown to everyone.
    """
    rows = await actor.app.store.ask(Query("all_rules", RuleRow))
    if not actor.principal.agents:
        return rows
    return [row for row in rows if row.scope == "fleet" or actor.principal.can_see(await _agent(actor, row))]


async def _agent(actor: Actor, row: RuleRow) -> str:
    return (await actor.agent_of(f"session:{row.owner}") or "") if row.scope == "session" else row.owner


async def end(actor: Actor, rule: RuleName, reason: Reason = "") -> Done:
    """End a standing rule: from now on such calls are asked about again."""
    actor.demand("operator", "end a rule")
    row = actor.resolve([(row.rule, row) for row in await rules(actor)], rule, "rule", "halter rules")
    if row.scope == "fleet":
        actor.require_all_agents("end a rule for every agent")
    if not (
        await actor.app.store.commit(end_rule(row.rule, actor.principal.name, actor.app.ids.make(), reason))
    ).events:
        fail_conflict(f"The rule {row.rule} is over already.")
    return Done(row.rule, f"The rule {row.rule} is over: {row.tool} is asked about again.")
