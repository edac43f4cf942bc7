"""Standing rules: the rules that an approval can make, and how one ends.

A rule is made from the call that is shown. It requires every argument exactly as shown, except where the person gives
another condition for it, one per line.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from posixpath import dirname
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from halter.core.errors import NotDone
from halter.core.ports import Query
from halter.core.rows import RuleRow
from halter.core.text import shorten, to_one_line
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.approvals import (
    STAR,
    AnyCondition,
    ArgvCondition,
    Condition,
    EachArgument,
    EqualsCondition,
    FolderCondition,
    HostCondition,
    PendingDecision,
    RuleMatcher,
    RuleWording,
    SameArguments,
    StandingRule,
    end_rule,
    escape_wildcards,
    find_host,
    make_equals_condition,
    matches_rule,
    matches_word,
    parse_argv,
)
from halter.guard.guard import REDACTION_MARK
from halter.operations.actor import Actor, Done, Name, Reason, fail_conflict, fail_invalid
from halter.present.decisions import describe_matcher, quote_word
from halter.risk.interpreters import is_interpreter
from halter.risk.program_names import PRIVILEGE_RAISERS, SHELLS, program_of
from halter.risk.wrappers import WRAPPER_NAMES

SCOPES: Final[tuple[RuleScope, ...]] = get_args(RuleScope)
SAME: Final = "same"
MATCH_FORMS: Final = "same, words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST or any:KEY"
_PATH_ARGUMENTS: Final = ("path", "file", "folder")
_MAX_CONDITIONS: Final = 50


class RuleOffer(msgspec.Struct, frozen=True):
    """A rule that a person may choose: its `--match` text, and a sentence that states it in full."""

    match: str
    sentence: str


def rule_for(decision: PendingDecision, rule: str, match: str, scope: str, duration: int) -> RuleWording:
    """Parse a rule; reject one that does not match the call of the decision."""
    if decision.risk == "CRITICAL":
        fail_conflict("Calls of CRITICAL risk always need approval. Approve it without --always.")
    if duration <= 0:
        fail_invalid("A rule needs a positive duration, such as --for 7d.")
    keys = msgspec.json.decode(decision.keys or "[]", type=tuple[str, ...])
    matcher = _matcher(decision, match, keys)
    return RuleWording(id=rule, matcher=matcher, keys=keys, scope=_scope(scope), expires_in=duration)


def _scope(scope: str) -> RuleScope:
    if scope not in SCOPES:
        fail_invalid(f"Unknown rule scope {scope!r}. Use {', '.join(SCOPES[:-1])} or {SCOPES[-1]}.")
    return scope


def _matcher(decision: PendingDecision, match: str, keys: tuple[str, ...]) -> RuleMatcher:
    lines = [line.strip() for line in match.splitlines() if line.strip()]
    if lines == [SAME]:
        return SameArguments(decision.same)
    if not lines or len(lines) > _MAX_CONDITIONS:
        fail_invalid(f"Invalid match {_parse_typed(match)!r}. Use {MATCH_FORMS}.")
    condition_by_key: dict[str, Condition] = {}
    for line in lines:
        condition = _condition(decision, line, keys)
        if condition.key in condition_by_key:
            fail_invalid(f"{condition.key} appears twice; give one condition per argument.")
        condition_by_key[condition.key] = condition
    values = _parse_displayed_arguments(decision)
    matcher = EachArgument(
        tuple(condition_by_key.get(key) or _make_equals_condition(key, value) for key, value in values.items())
    )
    _require_match(decision, matcher, keys, match)
    return matcher


def _make_equals_condition(key: str, value: Any) -> EqualsCondition:
    condition = make_equals_condition(key, value)
    if REDACTION_MARK in json.dumps(value, ensure_ascii=False):
        fail_conflict(f"{key} contains a hidden value, so it cannot be matched exactly. Use same or any:{key}.")
    return condition


def _parse_typed(text: str) -> str:
    return shorten(to_one_line(text), 200)


def _condition(decision: PendingDecision, line: str, keys: tuple[str, ...]) -> Condition:
    kind, _, argument = line.partition(":")
    key, equals, value = argument.partition("=")
    is_complete = not equals if kind == "any" else bool(equals and value.strip())
    if kind not in {"words", "under", "at", "any"} or not is_complete:
        fail_invalid(f"Invalid match {_parse_typed(line)!r}. Use {MATCH_FORMS}.")
    if key not in keys:
        fail_invalid(
            f"This call of {decision.name} has no argument {key!r}. Its arguments: {', '.join(keys) or 'none'}."
        )
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
        argv = tuple(shlex.split(value))
    except ValueError as error:
        fail_invalid(f"{value!r} is not a valid command line ({error}).")
    if argv and STAR in argv[0]:
        fail_invalid(f"{argv[0]!r} is the program and cannot contain a wildcard.")
    return argv


def _require_match(decision: PendingDecision, matcher: RuleMatcher, keys: tuple[str, ...], match: str) -> None:
    """Require that a rule matches the call of the decision, as it was shown."""
    values = _parse_displayed_arguments(decision)
    rule = StandingRule(
        id="", tool=decision.name, matcher=matcher, keys=keys, scope="fleet", by="", made_at=0, expires_at=1
    )
    spec = ToolSpec(name=decision.name, description="", schema=b"")
    if not matches_rule(rule, spec, Valid(values, json.dumps(values).encode()), "", "", 0):
        fail_invalid(f"{_parse_typed(match)!r} does not match the call itself. See the call in `halter inbox`.")


def _parse_displayed_arguments(decision: PendingDecision) -> dict[str, Any]:
    try:
        return json.JSONDecoder().raw_decode(decision.display_text.removeprefix(f"{decision.name} "))[0]
    except (ValueError, RecursionError):
        fail_conflict("The arguments were erased, so a rule cannot be tested. Use `--match same`.")


def list_rule_offers(decision: PendingDecision) -> Sequence[RuleOffer]:
    """List the rules that a person may choose for a call, the narrowest first."""
    if decision.about != "approval" or decision.risk == "CRITICAL" or decision.approvers > 1:
        return ()
    keys = msgspec.json.decode(decision.keys or "[]", type=tuple[str, ...])
    offers = [RuleOffer(SAME, describe_matcher(SameArguments("")))]
    if decision.risk == "HIGH":
        return offers
    with suppress(NotDone):
        # Hidden, erased or unreadable arguments allow only the rule `same`.
        wider_matches = [*_list_content_offers(decision, keys), *_wider(_parse_displayed_arguments(decision))]
        offers += [RuleOffer(match, describe_matcher(_matcher(decision, match, keys))) for match in wider_matches]
    return offers


def _list_content_offers(decision: PendingDecision, keys: Sequence[str]) -> Iterator[str]:
    """Offer, for a decision of the provenance check, any content with all other arguments exactly as shown."""
    flaws = decision.read_facts().flaws
    contents = {flaw.argument for flaw in flaws if flaw.reason == "content"}
    content_keys = [key for key in keys if key in contents and "=" not in key and key.isprintable()]
    if content_keys and len(content_keys) < len(keys):
        yield "\n".join(f"any:{key}" for key in content_keys)


def _wider(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if "=" in key or not key.isprintable():
            continue
        argv = parse_argv(value) if isinstance(value, list) or key == "command" else None
        if argv is not None and (pattern := _generalise_last_word(argv)):
            yield f"words:{key}={' '.join(map(quote_word, pattern))}"
        if isinstance(value, str) and "://" in value and (host := find_host(value)):
            yield f"at:{key}={host}"
        elif isinstance(value, str) and key in _PATH_ARGUMENTS and (folder := dirname(value)) and value.isprintable():
            other_conditions = [
                f"any:{other}" for other, text in values.items() if other == "content" and isinstance(text, str)
            ]
            yield "\n".join([f"under:{key}={folder}", *other_conditions])


def _generalise_last_word(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the last word of a command by a wildcard, if the program runs no code from its operands."""
    program = program_of(argv[0])
    runs_code = program in SHELLS | PRIVILEGE_RAISERS | WRAPPER_NAMES or is_interpreter(program)
    if len(argv) == 1 or runs_code or not matches_word(STAR, argv[-1]):
        return ()
    return (*map(escape_wildcards, argv[:-1]), STAR)


RuleName = Annotated[Name, Meta(description="Rule id.", extra={"typed": "Rule id or prefix, from halter rules."})]


async def rules(actor: Actor) -> Sequence[RuleRow]:
    """List standing rules, including ended ones.

    A rule for every agent is shown to everyone.
    """
    rows = await actor.app.store.ask(Query("all_rules", RuleRow))
    if not actor.principal.agents:
        return rows
    return [row for row in rows if row.scope == "fleet" or actor.principal.can_see(await _agent(actor, row))]


async def _agent(actor: Actor, row: RuleRow) -> str:
    return (await actor.agent_of(f"session:{row.owner}") or "") if row.scope == "session" else row.owner


async def end(actor: Actor, rule: RuleName, reason: Reason = "") -> Done:
    """End a standing rule. Matching calls need approval again."""
    actor.require_person("operator", "end a rule")
    row = actor.resolve([(row.rule, row) for row in await rules(actor)], rule, "rule", "halter rules")
    if row.scope == "fleet":
        actor.require_all_agents("end a rule for every agent")
    if not (
        await actor.app.store.commit(end_rule(row.rule, actor.principal.name, actor.app.ids.make(), reason))
    ).events:
        fail_conflict(f"Rule {row.rule} has already ended.")
    return Done(row.rule, f"Ended rule {row.rule}. Calls of {row.tool} need approval again.")
