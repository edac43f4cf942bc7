"""Decisions: one durable queue of what a person must approve or reject.

An answer is bound to the digest of what the person was shown, counts once, and only before it expires. Its effects (a
rule, a raised cap, a pinned tool) are written in the same transaction.

A standing rule ("always") answers in a person's place, for one tool and matching arguments, for a while. A wildcard
stands only where a person wrote one. It matches part of one word: never a space, a slash, a shell metacharacter, an
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

from halter.core import events as ev
from halter.core.effect_events import ProposalKind, TriggerKind
from halter.core.ids import FLEET, StreamId, inbox_stream, may_decide, trigger_stream
from halter.core.money import Account, format_micros
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.project import rows_of_event
from halter.core.provenance import Flaw
from halter.core.rows import DecisionRow, PinRow, RuleRow, TriggerRow
from halter.core.text import from_body, to_body
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import DecisionKind, RowKey, RuleScope, Verdict
from halter.guard.judge import are_two_people, digest_edit
from halter.guard.ledger import change_cap

STAR: Final = "*"
LITERAL_STAR: Final = "[*]"
WILDCARD_PATTERN: Final = r"[\w.,:=@%+-]+"
_LONGEST_SHOWN: Final = 200
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
        key, _digest_text(text), text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
    )


def matches_condition(condition: Condition, value: Any) -> bool:
    """Whether an argument, as decoded JSON, meets a condition."""
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
    """The words of a value that is one plain command and nothing else."""
    from halter.risk.commands import parse_plain_command

    if isinstance(value, str):
        return parse_plain_command(value)
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in cast("Sequence[Any]", value)):
        return parse_plain_command(tuple(cast("Sequence[str]", value)))
    return None


def matches_words(patterns: tuple[str, ...], words: tuple[str, ...] | None) -> bool:
    """Whether words match patterns one by one. The program itself has no wildcard."""
    if not patterns or words is None or len(words) != len(patterns) or STAR in patterns[0]:
        return False
    return all(matches_word(pattern, word) for pattern, word in zip(patterns, words, strict=True))


def matches_word(pattern: str, word: str) -> bool:
    if STAR not in pattern:
        return word == pattern
    if _compile_wildcards(pattern).fullmatch(word) is None or (word.startswith("-") and not pattern.startswith("-")):
        return False
    steps = zip(pattern.split("/"), word.split("/"), strict=True)
    return all(step not in {".", ".."} or step == written for written, step in steps)


@cache
def _compile_wildcards(pattern: str) -> re.Pattern[str]:
    parts = _PARTS.split(pattern)
    return re.compile(
        "".join({STAR: WILDCARD_PATTERN, LITERAL_STAR: r"\*"}.get(part, re.escape(part)) for part in parts)
    )


def escape_wildcards(word: str) -> str:
    """Write a word as a pattern for just itself."""
    return word.replace(STAR, LITERAL_STAR)


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it. A path with `..` does not: a link could lead elsewhere.

    Nor does a URL, which only looks like a path, or what a program could take for an option.
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
    """The host that a URL certainly reaches over TLS, or that a value names."""
    if not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        return None
    if "//" not in value:
        return value.lower().rstrip(".")
    try:
        parts = urlsplit(value)
        usual = parts.scheme == "https" and parts.port in {None, 443} and "@" not in parts.netloc
    except ValueError:
        return None
    return (parts.hostname or "").rstrip(".") if usual else None


class SameArguments(msgspec.Struct, frozen=True, tag="same", tag_field="by"):
    digest: str


class EachArgument(msgspec.Struct, frozen=True, tag="each", tag_field="by"):
    conditions: tuple[Condition, ...]


class LegacyWords(msgspec.Struct, frozen=True, tag="words", tag_field="by"):
    """A rule from before 0.8: a command that began with these words. Now it must be exactly these words."""

    key: str
    prefix: tuple[str, ...]


class LegacyFolder(msgspec.Struct, frozen=True, tag="under", tag_field="by"):
    """A rule from before 0.8: the path under a key lies in a folder."""

    key: str
    folder: str


class LegacyHost(msgspec.Struct, frozen=True, tag="at", tag_field="by"):
    """A rule from before 0.8: the URL under a key leads to a host."""

    key: str
    host: str


class UnreadableRule(msgspec.Struct, frozen=True, tag="unknown", tag_field="by"):
    """A rule that this version cannot read: it matches nothing."""


LegacyMatcher = LegacyWords | LegacyFolder | LegacyHost
RuleMatcher = SameArguments | EachArgument | LegacyMatcher | UnreadableRule


class StandingRule(msgspec.Struct, frozen=True, kw_only=True):
    """A person's standing approval. The scope's `owner` is a session, an agent, or empty for the fleet.

    `keys` are all the arguments that a call may have: an argument the person never saw is not approved.
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


def read_standing_rule(row: RuleRow) -> StandingRule:
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
    """The rules that may agree to a call; `same` is the digest of its arguments."""
    exactly = encode_matcher(SameArguments(same))
    params = {"tool": tool, "session": session, "agent": agent, "now": now, "same": exactly}
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
    """Whether a rule names every place and amount that no trusted place has said: "anything at all" names none."""
    match rule.matcher:
        case SameArguments():
            return True
        case EachArgument(conditions):
            free = {each.key for each in conditions if isinstance(each, AnyCondition)}
            flawed = {_top_key(flaw.argument) for flaw in flaws if flaw.argument and flaw.reason != "content"}
            if any(flaw.reason == "unclear" for flaw in flaws):
                # Its values were not looked at, so none of them may be anything.
                return not free
            return bool(len(free) < len(conditions)) and not free & flawed
        case LegacyWords() | LegacyFolder() | LegacyHost() | UnreadableRule():
            return False


def _top_key(path: str) -> str:
    return path.split(".", 1)[0].split("[", 1)[0]


def _match_all(conditions: tuple[Condition, ...], canonical: bytes) -> bool:
    values = _decode_arguments(canonical)
    wanted = {condition.key: condition for condition in conditions}
    if values is None or values.keys() != wanted.keys() or len(wanted) != len(conditions):
        return False
    return all(matches_condition(condition, values[key]) for key, condition in wanted.items())


def _decode_arguments(canonical: bytes) -> Mapping[str, Any] | None:
    try:
        return json.loads(canonical)
    except (ValueError, RecursionError):
        return None


def _matches_legacy_rule(matcher: LegacyMatcher, canonical: bytes) -> bool:
    """Read an old rule narrowly. It does not mention other arguments, so it matches no call that has any."""
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
    """Identify exactly what a person agrees to. Parts are length-prefixed, so none can pose as another."""
    named = sha256(_FORMAT)
    for part in (tool.encode(), canonical, session.encode(), policy_digest.encode()):
        named.update(len(part).to_bytes(8, "big") + part)
    return named.hexdigest()


class PlannedTrigger(msgspec.Struct, frozen=True):
    """A proposed trigger: what the person is shown, and what is created on approval."""

    shown: str
    trigger: str
    type: TriggerKind
    digest: str
    made: msgspec.Raw


class Pin(msgspec.Struct, frozen=True):
    tool: str
    digest: str


class ServerChange(msgspec.Struct, frozen=True):
    """New or changed tools of a server: what the person is shown, and what is pinned on approval."""

    shown: str
    server: str
    pins: tuple[Pin, ...]


class PendingDecision(msgspec.Struct, frozen=True):
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

    @property
    def stream(self) -> StreamId:
        """Where the answer goes: to the inbox of the waiting session, or to the fleet."""
        return inbox_stream(self.session) if self.session else FLEET

    @property
    def display_text(self) -> str:
        if self.about == "proposal" and self.body is None:
            return self._proposal()
        if self.about not in {"schedule", "changed_server"}:
            return from_body(self.body or b"")
        meant = self.proposed_trigger() if self.about == "schedule" else self.server_change()
        return "(erased)" if meant is None else meant.shown

    def _proposal(self) -> str:
        """A proposal's text is only in the stream of its session, and is erased with it."""
        if self.proposed is None:
            return "(erased)"
        case = f"{self.kind}: " if self.kind else ""
        return f"{self.agent} proposes a {self.name}: {case}{from_body(self.proposed)}"

    def proposed_trigger(self) -> PlannedTrigger | None:
        """The proposed trigger; None if the body is not the one that the digest names."""
        if self.about != "schedule" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=PlannedTrigger)

    def server_change(self) -> ServerChange | None:
        """The proposed change; None if the body is not the one that the digest names."""
        if self.about != "changed_server" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=ServerChange)


async def list_pending_decisions(store: Store, now: int = 0) -> Sequence[PendingDecision]:
    """Unexpired decisions, oldest first."""
    return await store.ask(Query("open_decisions", PendingDecision, {"now": now}))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question besides a call: a cap, a call in doubt, a changed tool."""

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_in: int
    shown: str
    agent: str = ""


def make_trigger_question(agent: str, planned: PlannedTrigger, expires_in: int) -> Question:
    body = msgspec.json.encode(planned)
    return Question(
        decision=f"schedule/{planned.trigger}",
        about="schedule",
        subject=planned.trigger,
        name=planned.trigger.partition("/")[2],
        digest=sha256(body).hexdigest(),
        expires_in=expires_in,
        shown=from_body(body),
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
        shown=from_body(body),
        agent=agent,
    )


def withdraw_question(decision: str, why: str) -> Write:
    """Withdraw a question that no session asked; an answered one stays answered."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, decision)
        waits = row is not None and not row.verdict and not row.session
        return [Draft(ev.DecisionWithdrawn(decision=decision, why=why))] if waits else []

    return Write(FLEET, f"withdrawn/{decision}", decide, [(DecisionRow, decision)])


def ask_question(question: Question, lease: Lease | None = None) -> Write:
    """Ask a person, once; for a session, or for the fleet."""

    def decide(rows: Rows) -> Sequence[Draft]:
        if rows.get(DecisionRow, question.decision) is not None:
            return []
        event = ev.DecisionAsked(
            decision=question.decision,
            about=question.about,
            subject=question.subject,
            name=question.name,
            digest=question.digest,
            expires_at=rows.now + question.expires_in,
            agent=question.agent,
        )
        return [Draft(event, to_body(question.shown))]

    stream = FLEET if lease is None else lease.stream
    return Write(stream, f"asked/{question.decision}", decide, [(DecisionRow, question.decision)], lease)


def make_cap_question(refused: str, name: str, cap: ev.CostCapReached, expires_in: int) -> Question:
    return Question(
        decision=f"{refused}/cap/{cap.cap}",
        about="cap_raise",
        subject=cap.scope,
        name=name,
        digest=f"{cap.scope}={cap.cap}",
        expires_in=expires_in,
        shown=(
            f"{name} may cost {format_micros(cap.amount)}; {format_micros(cap.spent)} of "
            f"{format_micros(cap.cap)} is spent in {cap.scope}. "
            "Raise the cap to let it go on."
        ),
    )


class DecisionEffects(msgspec.Struct, frozen=True):
    """The effects of an answer, and the rows and streams they need.

    Drafts without a stream go to the fleet. None means that the effect is no longer possible: then nothing is written.
    """

    drafts: Callable[[Rows], Sequence[Draft] | None] = lambda _: ()
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
    if verdict == "approve" and decision.about == "changed_tool":
        pinned = ev.ToolPinned(agent=decision.agent, tool=decision.name, digest=decision.digest, by=by)
        return DecisionEffects(lambda _: [Draft(pinned)], [(PinRow, decision.agent, decision.name)])
    if verdict == "approve" and decision.about == "changed_server":
        return _pin_server(decision, by)
    if verdict == "approve" and decision.about == "schedule":
        return _make_trigger(decision, by)
    return NO_EFFECTS


def _pin_server(decision: PendingDecision, by: str) -> DecisionEffects:
    """Pin exactly the tools that were shown."""
    change = decision.server_change()
    if change is None:
        return DecisionEffects(lambda _: None)
    events = [ev.ToolPinned(agent=decision.agent, tool=pin.tool, digest=pin.digest, by=by) for pin in change.pins]
    drafts = [Draft(event) for event in events]
    return DecisionEffects(lambda _: drafts, [(PinRow, decision.agent, pin.tool) for pin in change.pins])


def _make_trigger(decision: PendingDecision, by: str) -> DecisionEffects:
    """Create exactly the trigger that was shown, unless one of that name exists by now."""
    planned = decision.proposed_trigger()
    if planned is None:
        return DecisionEffects(lambda _: None)
    event = ev.TriggerMade(
        trigger=planned.trigger, agent=decision.agent, type=planned.type, by=by, digest=planned.digest
    )
    stream = trigger_stream(planned.trigger)

    def decide(rows: Rows) -> Sequence[Draft] | None:
        row = rows.get(TriggerRow, planned.trigger)
        if row is not None and row.made_seq and row.ended_at is None:
            return None
        return [Draft(event, bytes(planned.made), stream=stream)]

    return DecisionEffects(decide, rows_of_event(event), (stream,))


def _decide_proposal(decision: PendingDecision, verdict: Verdict, by: str, reason: str) -> DecisionEffects:
    about = msgspec.convert(decision.name, type=ProposalKind)
    status = "kept" if verdict == "approve" else "dismissed"
    event = ev.ProposalDecided(proposal=decision.subject, about=about, status=status, by=by, reason=reason)
    return DecisionEffects(lambda _: [Draft(event)], rows_of_event(event))


def approve_edited(decision: PendingDecision, arguments: bytes, by: str, key: str, reason: str = "") -> Write:
    digest = digest_edit(decision.digest, sha256(arguments).hexdigest())
    made_event = msgspec.structs.replace(_make_decision_event(decision, "edit", by, reason), digest=digest)
    return _write_answer(decision, made_event, key, body=arguments)


class RuleWording(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    matcher: RuleMatcher
    keys: tuple[str, ...]
    scope: RuleScope
    expires_in: int


def approve_always(decision: PendingDecision, rule: RuleWording, by: str, key: str, reason: str = "") -> Write:
    """Approve, and approve all matching calls for a while."""
    owner = {"session": decision.session, "agent": decision.agent, "fleet": ""}[rule.scope]

    def decide(rows: Rows) -> Sequence[Draft]:
        event = ev.RuleMade(
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
        ends = row is not None and row.live(rows.now) and may_decide(by)
        return [Draft(ev.RuleEnded(rule=rule, by=by, reason=reason))] if ends else []

    return Write(FLEET, key, decide, [(RuleRow, rule)])


def raise_cap(
    decision: PendingDecision, account: Account, cap: int | None, by: str, key: str, reason: str = ""
) -> Write:
    """Approve a session that reached its cap: the cap is raised, and the session continues in place."""
    change = change_cap(account, cap, by, key, reason)
    return _write_answer(
        decision,
        _make_decision_event(decision, "approve", by, reason),
        key,
        DecisionEffects(change.decide, change.reads),
    )


def _make_decision_event(decision: PendingDecision, verdict: Verdict, by: str, reason: str) -> ev.DecisionMade:
    return ev.DecisionMade(decision=decision.decision, verdict=verdict, by=by, digest=decision.digest, reason=reason)


def _add_person(made: ev.DecisionMade, row: DecisionRow, *, plain: bool) -> Sequence[Draft]:
    """Write the first of two approvals, or by another person the second. Both are for exactly what was shown."""
    if made.verdict != "approve" or not plain:
        return []
    if not row.first_by:
        given = ev.ApprovalGiven(decision=made.decision, by=made.by, digest=made.digest, reason=made.reason)
        return [Draft(given, stream=FLEET)]
    second = replace(made, first_by=row.first_by)
    return [Draft(second)] if are_two_people(row.first_by, made.by) else []


def _write_answer(
    decision: PendingDecision,
    made: ev.DecisionMade,
    key: str,
    then: DecisionEffects = NO_EFFECTS,
    body: bytes | None = None,
) -> Write:
    """Answer once, before expiry, exactly what was asked; from an agent, or too late, nothing is written."""

    def decide(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, decision.decision)
        if row is None or row.verdict or rows.now >= row.expires_at or row.digest != decision.digest:
            return []
        if not may_decide(made.by):
            return []
        if row.approvers > 1 and made.verdict != "deny":
            return _add_person(made, row, plain=then is NO_EFFECTS)
        more = then.drafts(rows)
        if more is None:
            return []
        return [Draft(made, body), *(draft if draft.stream else replace(draft, stream=FLEET) for draft in more)]

    reads = [(DecisionRow, decision.decision), *then.reads]
    return Write(decision.stream, key, decide, reads, others=(FLEET, *then.others))
