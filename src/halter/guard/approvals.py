"""Decisions: one durable queue of questions that a person answers.

An answer is bound to the digest of the text that the person saw. It counts once, and only before the decision expires.
Its effects (a rule, a raised cap, a pinned tool) are written in the same transaction.

A standing rule ("always") approves calls of one tool with matching arguments, for a limited time. A rule has a wildcard
only where a person wrote one. A wildcard matches part of one word: never a space, a slash, a shell metacharacter, an
option, or a step up. A literal star is written `[*]`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from halter.core.events import (
    ApprovalGiven,
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    ProposalDecided,
    RuleEnded,
    RuleMade,
    ToolPinned,
    TriggerMade,
)
from halter.core.events.tasks import ProposalKind
from halter.core.events.triggers import TriggerKind
from halter.core.ids import FLEET, StreamId, can_decide, inbox_stream, trigger_stream
from halter.core.money import Account, format_exact_micros
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.project import rows_of_event
from halter.core.project.holds import rows_of_hold
from halter.core.provenance import Flaw
from halter.core.rows import DecisionRow, HoldRow, PinRow, RuleRow, TriggerRow, decode_legs
from halter.core.text import decode_body, encode_body, shorten, to_one_line
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import DecisionKind, RowKey, RuleScope, Verdict
from halter.guard.approval_check import are_two_people, digest_edit
from halter.guard.ledger import change_cap
from halter.policy.evaluation import QuestionTerms, ResolvedPolicy
from halter.provenance.check import describe_flaw
from halter.state.lifecycle import draft_releases

STAR: Final = "*"
LITERAL_STAR: Final = "[*]"
WILDCARD_PATTERN: Final = r"[\w.,:=@%+-]+"
_MAX_DISPLAY_LENGTH: Final = 200
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_PARTS: Final = re.compile(r"(\[\*\]|\*)")


class EqualsCondition(msgspec.Struct, frozen=True, tag="is", tag_field="by"):
    """The argument equals this value; `shown` is its beginning, for people."""

    key: str
    digest: str
    shown: str


class ArgvCondition(msgspec.Struct, frozen=True, tag="argv", tag_field="by"):
    """The argument is one plain command with exactly these words."""

    key: str
    words: tuple[str, ...]


class FolderCondition(msgspec.Struct, frozen=True, tag="inside", tag_field="by"):
    key: str
    folder: str


class HostCondition(msgspec.Struct, frozen=True, tag="leads", tag_field="by"):
    """The argument is an HTTPS URL of a host on the default port, or the host name itself."""

    key: str
    host: str


class AnyCondition(msgspec.Struct, frozen=True, tag="anything", tag_field="by"):
    key: str


Condition = EqualsCondition | ArgvCondition | FolderCondition | HostCondition | AnyCondition


def make_equals_condition(key: str, value: Any) -> EqualsCondition:
    text = _value_to_text(value)
    return EqualsCondition(
        key, _digest_text(text), text if len(text) <= _MAX_DISPLAY_LENGTH else f"{text[:_MAX_DISPLAY_LENGTH]}…"
    )


def matches_condition(condition: Condition, value: Any) -> bool:
    """Return whether an argument, as decoded JSON, meets a condition."""
    match condition:
        case EqualsCondition(_, digest):
            return _digest_text(_value_to_text(value)) == digest
        case ArgvCondition(_, words):
            return matches_words(words, parse_argv(value))
        case FolderCondition(_, folder):
            return isinstance(value, str) and is_inside(value, folder)
        case HostCondition(_, host):
            return isinstance(value, str) and leads_to(value, host)
        case AnyCondition():
            return True


def _value_to_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest_text(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_argv(value: Any) -> tuple[str, ...] | None:
    """Parse a value that is one plain command and nothing else; None for any other value."""
    from halter.risk.commands import parse_plain_command

    if isinstance(value, str):
        return parse_plain_command(value)
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in cast("Sequence[Any]", value)):
        return parse_plain_command(tuple(cast("Sequence[str]", value)))
    return None


def matches_words(patterns: tuple[str, ...], words: tuple[str, ...] | None) -> bool:
    """Return whether words match patterns one by one. The first word, the program, cannot have a wildcard."""
    if not patterns or words is None or len(words) != len(patterns) or STAR in patterns[0]:
        return False
    return all(matches_word(pattern, word) for pattern, word in zip(patterns, words, strict=True))


def matches_word(pattern: str, word: str) -> bool:
    if STAR not in pattern:
        return word == pattern
    if _compile_wildcards(pattern).fullmatch(word) is None or (word.startswith("-") and not pattern.startswith("-")):
        return False
    steps = zip(pattern.split("/"), word.split("/"), strict=True)
    return all(step not in {".", ".."} or step == pattern_step for pattern_step, step in steps)


@cache
def _compile_wildcards(pattern: str) -> re.Pattern[str]:
    parts = _PARTS.split(pattern)
    return re.compile(
        "".join({STAR: WILDCARD_PATTERN, LITERAL_STAR: r"\*"}.get(part, re.escape(part)) for part in parts)
    )


def escape_wildcards(word: str) -> str:
    """Write a word as a pattern that matches only the word itself."""
    return word.replace(STAR, LITERAL_STAR)


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or inside it.

    A path with `..` is not, since a link could lead elsewhere. Neither is a URL, nor a text that a program could read
    as an option.
    """
    from halter.risk.places import normalize_path

    if not path.isprintable() or ".." in path.replace("\\", "/").split("/"):
        return False
    if _SCHEME.match(path) or path.startswith("-"):
        return False
    path, folder = normalize_path(path), normalize_path(folder)
    if folder == ".":
        return not path.startswith(("/", "~"))
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def leads_to(value: str, host: str) -> bool:
    return find_host(value) == host.lower().rstrip(".") != ""


def find_host(value: str) -> str | None:
    """Find the host of an HTTPS URL on the default port, or the host that a value names."""
    if not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        return None
    if "//" not in value:
        return value.lower().rstrip(".")
    try:
        url = urlsplit(value)
        is_https = url.scheme == "https" and url.port in {None, 443} and "@" not in url.netloc
    except ValueError:
        return None
    return (url.hostname or "").rstrip(".") if is_https else None


class SameArguments(msgspec.Struct, frozen=True, tag="same", tag_field="by"):
    digest: str


class EachArgument(msgspec.Struct, frozen=True, tag="each", tag_field="by"):
    conditions: tuple[Condition, ...]


class LegacyWords(msgspec.Struct, frozen=True, tag="words", tag_field="by"):
    """A rule from before 0.8: a command that began with these words. It now matches exactly these words."""

    key: str
    prefix: tuple[str, ...]


class LegacyFolder(msgspec.Struct, frozen=True, tag="under", tag_field="by"):
    """A rule from before 0.8: the path under a key is inside a folder."""

    key: str
    folder: str


class LegacyHost(msgspec.Struct, frozen=True, tag="at", tag_field="by"):
    """A rule from before 0.8: the URL under a key leads to a host."""

    key: str
    host: str


class UnreadableRule(msgspec.Struct, frozen=True, tag="unknown", tag_field="by"):
    """A rule that this version cannot read. It matches nothing."""


LegacyMatcher = LegacyWords | LegacyFolder | LegacyHost
RuleMatcher = SameArguments | EachArgument | LegacyMatcher | UnreadableRule


class StandingRule(msgspec.Struct, frozen=True, kw_only=True):
    """A person's standing approval. The scope's `owner` is a session, an agent, or empty for the fleet.

    `keys` are all arguments that a call may have: an argument that the person never saw is not approved.
    """

    id: str
    tool: str
    matcher: RuleMatcher
    keys: tuple[str, ...]
    scope: RuleScope
    owner: str = ""
    by: str
    made_at: int
    expires_at: int


_MATCHER: Final[msgspec.json.Decoder[RuleMatcher]] = msgspec.json.Decoder(RuleMatcher)
_KEYS: Final = msgspec.json.Decoder(tuple[str, ...])


def decode_rule(row: RuleRow) -> StandingRule:
    return StandingRule(
        id=row.rule,
        tool=row.tool,
        matcher=_decode_matcher(row.matcher),
        keys=_KEYS.decode(row.keys),
        scope=cast("RuleScope", row.scope),
        owner=row.owner,
        by=row.by,
        made_at=row.made_at,
        expires_at=row.expires_at,
    )


def _decode_matcher(matcher: str) -> RuleMatcher:
    try:
        return _MATCHER.decode(matcher)
    except msgspec.DecodeError:
        return UnreadableRule()


def encode_matcher(matcher: RuleMatcher) -> str:
    return msgspec.json.encode(matcher).decode()


async def read_rules(store: Store, tool: str, same: str, session: str, agent: str, now: int) -> Sequence[RuleRow]:
    """Read the rules that may approve a call; `same` is the digest of its arguments."""
    same_matcher = encode_matcher(SameArguments(same))
    params = {"tool": tool, "session": session, "agent": agent, "now": now, "same": same_matcher}
    return await store.ask(Query("rules_of", RuleRow, params))


def matches_rule(rule: StandingRule, spec: ToolSpec, arguments: Valid, session: str, agent: str, now: int) -> bool:
    owner = {"session": session, "agent": agent, "fleet": ""}[rule.scope]
    if rule.tool != spec.name or rule.owner != owner or not rule.made_at <= now < rule.expires_at:
        return False
    match rule.matcher:
        case SameArguments(expected):
            return sha256(arguments.canonical).hexdigest() == expected
        case EachArgument(conditions):
            return _match_all(conditions, arguments.canonical)
        case LegacyWords() | LegacyFolder() | LegacyHost():
            return _matches_legacy_rule(rule.matcher, arguments.canonical)
        case UnreadableRule():
            return False


def pins_places(rule: StandingRule, flaws: Sequence[Flaw]) -> bool:
    """Return whether a rule has a condition for every flawed argument. "Anything" is no condition."""
    match rule.matcher:
        case SameArguments():
            return True
        case EachArgument(conditions):
            unbound_keys = {each.key for each in conditions if isinstance(each, AnyCondition)}
            flawed_keys = {_top_key(flaw.argument) for flaw in flaws if flaw.argument and flaw.reason != "content"}
            if any(flaw.reason == "unclear" for flaw in flaws):
                # Its values were not checked, so every one of them needs a condition.
                return not unbound_keys
            return bool(len(unbound_keys) < len(conditions)) and not unbound_keys & flawed_keys
        case LegacyWords() | LegacyFolder() | LegacyHost() | UnreadableRule():
            return False


def _top_key(path: str) -> str:
    return path.split(".", 1)[0].split("[", 1)[0]


def _match_all(conditions: tuple[Condition, ...], canonical: bytes) -> bool:
    values = _decode_arguments(canonical)
    condition_by_key = {condition.key: condition for condition in conditions}
    if values is None or values.keys() != condition_by_key.keys() or len(condition_by_key) != len(conditions):
        return False
    return all(matches_condition(condition, values[key]) for key, condition in condition_by_key.items())


def _decode_arguments(canonical: bytes) -> Mapping[str, Any] | None:
    try:
        return json.loads(canonical)
    except (ValueError, RecursionError):
        return None


def _matches_legacy_rule(matcher: LegacyMatcher, canonical: bytes) -> bool:
    """Match an old rule narrowly: it names one argument, so it matches no call that has others."""
    values = _decode_arguments(canonical)
    if values is None or set(values) != {matcher.key}:
        return False
    value = values[matcher.key]
    match matcher:
        case LegacyWords(_, words):
            return bool(words) and parse_argv(value) == words
        case LegacyFolder(_, folder):
            return isinstance(value, str) and is_inside(value, folder)
        case LegacyHost(_, host):
            return isinstance(value, str) and leads_to(value, host)


_FORMAT: Final = b"halter approval 1"


def digest_approval(tool: str, canonical: bytes, session: str, policy_digest: str) -> str:
    """Make the digest to which an approval is bound. Its fields are length-prefixed, so none can pass as another."""
    digest = sha256(_FORMAT)
    for field in (tool.encode(), canonical, session.encode(), policy_digest.encode()):
        digest.update(len(field).to_bytes(8, "big") + field)
    return digest.hexdigest()


class PlannedTrigger(msgspec.Struct, frozen=True):
    """A proposed trigger: the text for the person, and the record that an approval creates."""

    shown: str
    trigger: str
    type: TriggerKind
    digest: str
    made: msgspec.Raw


class Pin(msgspec.Struct, frozen=True):
    tool: str
    digest: str


class ServerChange(msgspec.Struct, frozen=True):
    """New or changed tools of a server: the text for the person, and the pins that an approval creates."""

    shown: str
    server: str
    pins: tuple[Pin, ...]


MAX_CAUSES: Final = 2
"""The number of reasons for a risk or a provenance that a short clause names."""
MAX_CAUSE_LENGTH: Final = 300


class QuestionFacts(msgspec.Struct, frozen=True):
    """The facts of a question that its row does not have. Questions of earlier versions have neither mode nor rule."""

    reasons: tuple[str, ...] = ()
    flaws: tuple[Flaw, ...] = ()
    mode: str = ""
    always: bool = False


class PendingDecision(msgspec.Struct, frozen=True):
    """An open decision with the facts of its question."""

    decision: str
    about: str
    session: str
    agent: str
    subject: str
    name: str
    digest: str
    level: str
    risk: str
    same: str
    keys: str
    asked_at: int
    expires_at: int
    body: bytes | None
    proposed: bytes | None = None
    kind: str | None = None
    said: bytes | None = None
    approvers: int = 1
    first_by: str = ""
    legs: bytes | None = None
    facts: bytes | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the risk rating."""
        return self.read_facts().reasons

    def read_facts(self) -> "QuestionFacts":
        return msgspec.json.decode(self.facts, type=QuestionFacts) if self.facts else QuestionFacts()

    @property
    def cause(self) -> str:
        """What made the guard ask about a call: its risk, its rule, its level in the mode, or its provenance."""
        if self.about != "approval":
            return ""
        facts = self.read_facts()
        flaw_texts = [describe_flaw(flaw) for flaw in facts.flaws]
        # In the mode `observe`, flaws are recorded and no reasons to ask.
        enforced_texts = [text for text in flaw_texts if text in facts.reasons]
        risk_texts = [reason for reason in facts.reasons if reason not in flaw_texts]
        clauses = [
            f"CRITICAL risk: {'; '.join(risk_texts[:MAX_CAUSES])}" if self.risk == "CRITICAL" else "",
            "its rule says ask" if facts.always else "",
            "its rule needs two people" if self.approvers > 1 else "",
            f"{self.level} in mode {facts.mode}" if facts.mode else "",
            f"provenance: {'; '.join(enforced_texts[:MAX_CAUSES])}" if enforced_texts else "",
        ]
        text = ", ".join(filter(None, clauses)) or ("provenance" if flaw_texts else f"level {self.level}")
        return shorten(to_one_line(text), MAX_CAUSE_LENGTH)

    @property
    def stream(self) -> StreamId:
        """The stream of the answer: the inbox of the waiting session, or the fleet."""
        return inbox_stream(self.session) if self.session else FLEET

    @property
    def display_text(self) -> str:
        if self.about == "proposal" and self.body is None:
            return self._proposal()
        if self.about not in {"schedule", "changed_server"}:
            return decode_body(self.body or b"")
        proposal = self.proposed_trigger() if self.about == "schedule" else self.server_change()
        return "(erased)" if proposal is None else proposal.shown

    def _proposal(self) -> str:
        """Render a proposal, whose text is only in its session's stream and is erased with it."""
        if self.proposed is None:
            return "(erased)"
        case = f"{self.kind}: " if self.kind else ""
        return f"{self.agent} proposes a {self.name}: {case}{decode_body(self.proposed)}"

    def proposed_trigger(self) -> PlannedTrigger | None:
        """Decode the proposed trigger; None if the body does not match the digest."""
        if self.about != "schedule" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=PlannedTrigger)

    def server_change(self) -> ServerChange | None:
        """Decode the proposed change; None if the body does not match the digest."""
        if self.about != "changed_server" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=ServerChange)


async def list_pending_decisions(store: Store, now: int = 0) -> Sequence[PendingDecision]:
    """List the decisions that people are asked to make at a moment, oldest first; without one, all that are pending."""
    return await store.ask(Query("open_decisions", PendingDecision, {"now": now}))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question about something other than an intended call: a cap, a call in doubt, a changed tool.

    `terms` are those of the agent's policy; a question about what a person has just asked for has none.
    """

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_in: int
    display_text: str
    agent: str = ""
    terms: QuestionTerms = QuestionTerms()


def make_trigger_question(agent: str, planned: PlannedTrigger, expires_in: int) -> Question:
    body = msgspec.json.encode(planned)
    return Question(
        decision=f"schedule/{planned.trigger}",
        about="schedule",
        subject=planned.trigger,
        name=planned.trigger.partition("/")[2],
        digest=sha256(body).hexdigest(),
        expires_in=expires_in,
        display_text=decode_body(body),
        agent=agent,
    )


def make_server_question(agent: str, change: ServerChange, expires_in: int) -> Question:
    body = msgspec.json.encode(change)
    digest = sha256(body).hexdigest()
    return Question(
        decision=f"{agent}/{change.server}/{digest[:16]}",
        about="changed_server",
        subject=change.server,
        name=change.server,
        digest=digest,
        expires_in=expires_in,
        display_text=decode_body(body),
        agent=agent,
    )


def withdraw_question(decision: str, reason: str) -> Write:
    """Withdraw a pending question that no session asked."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, decision)
        is_pending = row is not None and not row.verdict and not row.session
        return [Draft(DecisionWithdrawn(decision=decision, why=reason))] if is_pending else []

    return Write(FLEET, f"withdrawn/{decision}", decide, [(DecisionRow, decision)])


def ask_question(question: Question, lease: Lease | None = None) -> Write:
    """Ask a person once, for the session of a lease or for the fleet."""

    def decide(rows: Rows) -> Sequence[Draft]:
        if rows.get(DecisionRow, question.decision) is not None:
            return []
        event = DecisionAsked(
            decision=question.decision,
            about=question.about,
            subject=question.subject,
            name=question.name,
            digest=question.digest,
            agent=question.agent,
            **question.terms.times_at(rows.now, question.expires_in),
        )
        return [Draft(event, encode_body(question.display_text))]

    stream = FLEET if lease is None else lease.stream
    return Write(stream, f"asked/{question.decision}", decide, [(DecisionRow, question.decision)], lease)


def make_cap_question(refused_id: str, name: str, cap: CostCapReached, policy: ResolvedPolicy) -> Question:
    # Rounded, an amount and what is spent could look as if they fitted the cap together.
    cost_text, spent_text, cap_text = map(format_exact_micros, (cap.amount, cap.spent, cap.cap))
    return Question(
        decision=f"{refused_id}/cap/{cap.cap}",
        about="cap_raise",
        subject=cap.scope,
        name=name,
        digest=f"{cap.scope}={cap.cap}",
        expires_in=policy.approval_expiry,
        terms=policy.question_terms,
        display_text=(
            f"{name} may cost {cost_text}; {spent_text} of {cap_text} is spent in {cap.scope}. "
            "Raise the cap to continue."
        ),
    )


class DecisionEffects(msgspec.Struct, frozen=True):
    """The effects of an answer, and the rows and streams that they need.

    Drafts without a stream go to the fleet's. If `make_drafts` returns None, the effect is impossible now, and nothing
    is written.
    """

    make_drafts: Callable[[Rows], Sequence[Draft] | None] = lambda _: ()
    reads: Sequence[RowKey] = ()
    others: Sequence[StreamId] = ()


NO_EFFECTS: Final = DecisionEffects()


def answer_decision(decision: PendingDecision, verdict: Verdict, by: str, key: str, reason: str = "") -> Write:
    return _write_answer(
        decision, _make_decision_event(decision, verdict, by, reason), key, _find_effects(decision, verdict, by, reason)
    )


def _find_effects(decision: PendingDecision, verdict: Verdict, by: str, reason: str) -> DecisionEffects:
    if decision.about == "proposal":
        return _decide_proposal(decision, verdict, by, reason)
    if verdict == "deny" and decision.legs:
        return DecisionEffects(
            lambda rows: draft_releases(filter(None, [rows.get(HoldRow, decision.decision)])),
            rows_of_hold(decision.decision, decode_legs(decision.legs)),
        )
    if verdict == "approve" and decision.about == "changed_tool":
        event = ToolPinned(agent=decision.agent, tool=decision.name, digest=decision.digest, by=by)
        return DecisionEffects(lambda _: [Draft(event)], [(PinRow, decision.agent, decision.name)])
    if verdict == "approve" and decision.about == "changed_server":
        return _pin_server(decision, by)
    if verdict == "approve" and decision.about == "schedule":
        return _make_trigger(decision, by)
    return NO_EFFECTS


def _pin_server(decision: PendingDecision, by: str) -> DecisionEffects:
    """Pin exactly the tools that the person saw."""
    change = decision.server_change()
    if change is None:
        return DecisionEffects(lambda _: None)
    events = [ToolPinned(agent=decision.agent, tool=pin.tool, digest=pin.digest, by=by) for pin in change.pins]
    drafts = [Draft(event) for event in events]
    return DecisionEffects(lambda _: drafts, [(PinRow, decision.agent, pin.tool) for pin in change.pins])


def _make_trigger(decision: PendingDecision, by: str) -> DecisionEffects:
    """Create exactly the trigger that the person saw, unless one of that name exists."""
    trigger = decision.proposed_trigger()
    if trigger is None:
        return DecisionEffects(lambda _: None)
    event = TriggerMade(trigger=trigger.trigger, agent=decision.agent, type=trigger.type, by=by, digest=trigger.digest)
    stream = trigger_stream(trigger.trigger)

    def decide(rows: Rows) -> Sequence[Draft] | None:
        row = rows.get(TriggerRow, trigger.trigger)
        if row is not None and row.made_seq and row.ended_at is None:
            return None
        return [Draft(event, bytes(trigger.made), stream=stream)]

    return DecisionEffects(decide, rows_of_event(event), (stream,))


def _decide_proposal(decision: PendingDecision, verdict: Verdict, by: str, reason: str) -> DecisionEffects:
    kind = msgspec.convert(decision.name, type=ProposalKind)
    status = "kept" if verdict == "approve" else "dismissed"
    event = ProposalDecided(proposal=decision.subject, about=kind, status=status, by=by, reason=reason)
    return DecisionEffects(lambda _: [Draft(event)], rows_of_event(event))


def approve_edited(decision: PendingDecision, arguments: bytes, by: str, key: str, reason: str = "") -> Write:
    digest = digest_edit(decision.digest, sha256(arguments).hexdigest())
    event = msgspec.structs.replace(_make_decision_event(decision, "edit", by, reason), digest=digest)
    return _write_answer(decision, event, key, body=arguments)


class RuleWording(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    matcher: RuleMatcher
    keys: tuple[str, ...]
    scope: RuleScope
    expires_in: int


def approve_always(decision: PendingDecision, rule: RuleWording, by: str, key: str, reason: str = "") -> Write:
    """Approve a call, and all matching calls until the rule expires."""
    owner = {"session": decision.session, "agent": decision.agent, "fleet": ""}[rule.scope]

    def decide(rows: Rows) -> Sequence[Draft]:
        event = RuleMade(
            rule=rule.id,
            tool=decision.name,
            scope=rule.scope,
            owner=owner,
            matcher=encode_matcher(rule.matcher),
            keys=rule.keys,
            by=by,
            expires_at=rows.now + rule.expires_in,
        )
        return [Draft(event)]

    return _write_answer(
        decision,
        _make_decision_event(decision, "approve", by, reason),
        key,
        DecisionEffects(decide, [(RuleRow, rule.id)]),
    )


def end_rule(rule: str, by: str, key: str, reason: str = "") -> Write:

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(RuleRow, rule)
        can_end = row is not None and row.live(rows.now) and can_decide(by)
        return [Draft(RuleEnded(rule=rule, by=by, reason=reason))] if can_end else []

    return Write(FLEET, key, decide, [(RuleRow, rule)])


def raise_cap(
    decision: PendingDecision, account: Account, cap: int | None, by: str, key: str, reason: str = ""
) -> Write:
    """Raise the cap that a session has reached, so that the session resumes."""
    change = change_cap(account, cap, by, key, reason)
    return _write_answer(
        decision,
        _make_decision_event(decision, "approve", by, reason),
        key,
        DecisionEffects(change.decide, change.reads),
    )


def _make_decision_event(decision: PendingDecision, verdict: Verdict, by: str, reason: str) -> DecisionMade:
    return DecisionMade(decision=decision.decision, verdict=verdict, by=by, digest=decision.digest, reason=reason)


def _add_person(event: DecisionMade, row: DecisionRow, *, has_no_effects: bool) -> Sequence[Draft]:
    """Draft the first of two approvals, or the second by another person. Both approve the question unchanged."""
    if event.verdict != "approve" or not has_no_effects:
        return []
    if not row.first_by:
        first_approval = ApprovalGiven(decision=event.decision, by=event.by, digest=event.digest, reason=event.reason)
        return [Draft(first_approval, stream=FLEET)]
    second_approval = replace(event, first_by=row.first_by)
    return [Draft(second_approval)] if are_two_people(row.first_by, event.by) else []


def _write_answer(
    decision: PendingDecision,
    event: DecisionMade,
    key: str,
    effects: DecisionEffects = NO_EFFECTS,
    body: bytes | None = None,
) -> Write:
    """Answer a decision once, before it expires. A late answer, or an answer by an agent, writes nothing."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, decision.decision)
        if row is None or row.verdict or rows.now >= row.expires_at or row.digest != decision.digest:
            return []
        if not can_decide(event.by):
            return []
        if row.approvers > 1 and event.verdict != "deny":
            return _add_person(event, row, has_no_effects=effects is NO_EFFECTS)
        effect_drafts = effects.make_drafts(rows)
        if effect_drafts is None:
            return []
        return [
            Draft(event, body),
            *(draft if draft.stream else replace(draft, stream=FLEET) for draft in effect_drafts),
        ]

    reads = [(DecisionRow, decision.decision), *effects.reads]
    return Write(decision.stream, key, decide, reads, others=(FLEET, *effects.others))
