"""How a person words an "always": which calls it is for, where, and for how long."""

import json
import shlex
from typing import Any, Final, get_args

import msgspec

from halter.app.desk.desk import refused, wrong
from halter.app.desk.waiting import Waiting
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.approvals import Rule
from halter.guard.gatehouse import REDACTED
from halter.guard.rules import Always, At, Matcher, Same, Under, Words, matches

SCOPES: Final[tuple[RuleScope, ...]] = get_args(RuleScope)
FORMS: Final = "write same, words:KEY=WORDS, under:KEY=FOLDER or at:KEY=HOST"


def rule_for(asked: Waiting, rule: str, match: str, scope: str, lasts: int) -> Rule:
    """Read a rule as it was typed; one that would not answer the very call that is asked about is a slip."""
    if asked.risk == "CRITICAL":
        refused("A call of CRITICAL risk is always asked about: approve it without --always.")
    if lasts <= 0:
        wrong("A rule has to last for a while: write --for 7d.")
    keys = msgspec.json.decode(asked.keys or "[]", type=tuple[str, ...])
    matcher = _matcher(asked, match, keys)
    _refuse_unless_it_answers(asked, matcher, keys, match)
    return Rule(id=rule, matcher=matcher, keys=keys, scope=_scope(scope), expires_in=lasts)


def _scope(scope: str) -> RuleScope:
    if scope not in SCOPES:
        wrong(f"{scope!r} is no scope of a rule: write {', '.join(SCOPES[:-1])} or {SCOPES[-1]}.")
    return scope


def _matcher(asked: Waiting, match: str, keys: tuple[str, ...]) -> Matcher:
    if match == "same":
        return Same(asked.same)
    kind, _, rest = match.partition(":")
    key, equals, value = rest.partition("=")
    if kind not in {"words", "under", "at"} or not equals or not value.strip():
        wrong(f"{match!r} is no way to match a call: {FORMS}.")
    if key not in keys:
        wrong(f"{asked.name} was not asked with an argument {key!r}: it has {', '.join(keys) or 'none'}.")
    match kind:
        case "words":
            return Words(key, _words(value))
        case "under":
            return Under(key, value)
        case _:
            return At(key, value)


def _words(value: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        wrong(f"{value!r} cannot be read as the words of a command ({error}).")


def _refuse_unless_it_answers(asked: Waiting, matcher: Matcher, keys: tuple[str, ...], match: str) -> None:
    """Try a rule on the call that is asked about, as far as that was shown."""
    if isinstance(matcher, Same) or REDACTED in asked.shown:
        return
    values = _shown(asked)
    rule = Always(id="", tool=asked.name, matcher=matcher, keys=keys, scope="fleet", by="", made_at=0, expires_at=1)
    spec = ToolSpec(name=asked.name, description="", schema=b"")
    if not matches(rule, spec, Valid(values, b""), "", "", 0):
        wrong(f"{match!r} would not even match the call that is asked about: look at it in `halter inbox`.")


def _shown(asked: Waiting) -> dict[str, Any]:
    try:
        return json.JSONDecoder().raw_decode(asked.shown.removeprefix(f"{asked.name} "))[0]
    except (ValueError, RecursionError):
        refused("What was asked about cannot be read any more, so no rule can be tried on it: write same.")


def told(matcher: Matcher) -> str:
    """Say which calls a rule is for."""
    match matcher:
        case Words(key, prefix):
            return f"where {key} begins with {shlex.join(prefix)}"
        case Under(key, folder):
            return f"where {key} lies in {folder}"
        case At(key, host):
            return f"where {key} leads to {host}"
        case Same():
            return "with exactly the same arguments"
