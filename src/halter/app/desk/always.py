"""How a person words an "always": which calls it is for, where, and for how long.

A rule is made of the call that is shown. Every argument stays exactly as it is there, except where the person says
otherwise of it, one condition a line.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from posixpath import dirname
from typing import Any, Final, get_args

import msgspec

from halter.app.desk.desk import refused, wrong
from halter.app.desk.waiting import Waiting, as_object
from halter.core.errors import NotDone
from halter.core.text import one_line, shorten
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.approvals import Rule
from halter.guard.conditions import (
    STAR,
    Anything,
    Argv,
    Condition,
    Inside,
    Is,
    Leads,
    argv_of,
    exactly,
    fits_word,
    host_of,
    literally,
)
from halter.guard.gatehouse import REDACTED
from halter.guard.judges.code import is_interpreter
from halter.guard.program_names import RAISING, SHELLS, program_of
from halter.guard.rules import Always, At, Each, Matcher, Same, Under, Unknown, Words, matches
from halter.guard.wrappers import NAMES as WRAPPERS

SCOPES: Final[tuple[RuleScope, ...]] = get_args(RuleScope)
SAME: Final = "same"
FORMS: Final = "write same, words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST or any:KEY"
_PATHS: Final = ("path", "file", "folder")
_MOST_CONDITIONS: Final = 50
_PLAIN: Final = re.compile(r"[\w@%+=:,./*-]+")


class Offered(msgspec.Struct, frozen=True):
    """A rule that a person may choose: how it is typed, and all that it says."""

    match: str
    sentence: str


def rule_for(asked: Waiting, rule: str, match: str, scope: str, lasts: int) -> Rule:
    """Read a rule as it was typed; one that would not answer the very call that is asked about is a slip."""
    if asked.risk == "CRITICAL":
        refused("A call of CRITICAL risk is always asked about: approve it without --always.")
    if lasts <= 0:
        wrong("A rule has to last for a while: write --for 7d.")
    keys = msgspec.json.decode(asked.keys or "[]", type=tuple[str, ...])
    matcher = _matcher(asked, match, keys)
    return Rule(id=rule, matcher=matcher, keys=keys, scope=_scope(scope), expires_in=lasts)


def _scope(scope: str) -> RuleScope:
    if scope not in SCOPES:
        wrong(f"{scope!r} is no scope of a rule: write {', '.join(SCOPES[:-1])} or {SCOPES[-1]}.")
    return scope


def _matcher(asked: Waiting, match: str, keys: tuple[str, ...]) -> Matcher:
    lines = [line.strip() for line in match.splitlines() if line.strip()]
    if lines == [SAME]:
        return Same(asked.same)
    if not lines or len(lines) > _MOST_CONDITIONS:
        wrong(f"{_typed(match)!r} is no way to match a call: {FORMS}.")
    said: dict[str, Condition] = {}
    for line in lines:
        condition = _condition(asked, line, keys)
        if condition.key in said:
            wrong(f"{condition.key} is named twice: say of each argument once what it may be.")
        said[condition.key] = condition
    values = _shown(asked)
    matcher = Each(tuple(said.get(key) or _pinned(key, value) for key, value in values.items()))
    _refuse_unless_it_answers(asked, matcher, keys, match)
    return matcher


def _pinned(key: str, value: Any) -> Is:
    pinned = exactly(key, value)
    if REDACTED in json.dumps(value, ensure_ascii=False):
        refused(f"{key} holds something that is hidden, so it cannot be asked for exactly: write same, or any:{key}.")
    return pinned


def _typed(text: str) -> str:
    return shorten(one_line(text), 200)


def _condition(asked: Waiting, line: str, keys: tuple[str, ...]) -> Condition:
    kind, _, rest = line.partition(":")
    key, equals, value = rest.partition("=")
    whole = not equals if kind == "any" else bool(equals and value.strip())
    if kind not in {"words", "under", "at", "any"} or not whole:
        wrong(f"{_typed(line)!r} is no way to match a call: {FORMS}.")
    if key not in keys:
        wrong(f"{asked.name} was not asked with an argument {key!r}: it has {', '.join(keys) or 'none'}.")
    match kind:
        case "words":
            return Argv(key, _words(value))
        case "under":
            return Inside(key, value)
        case "at":
            return Leads(key, value)
        case _:
            return Anything(key)


def _words(value: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        wrong(f"{value!r} cannot be read as the words of a command ({error}).")
    if words and STAR in words[0]:
        wrong(f"{words[0]!r} is to be a program: it has no wildcard.")
    return words


def _refuse_unless_it_answers(asked: Waiting, matcher: Matcher, keys: tuple[str, ...], match: str) -> None:
    """Try a rule on the call that is asked about, as it was shown."""
    values = _shown(asked)
    rule = Always(id="", tool=asked.name, matcher=matcher, keys=keys, scope="fleet", by="", made_at=0, expires_at=1)
    spec = ToolSpec(name=asked.name, description="", schema=b"")
    if not matches(rule, spec, Valid(values, json.dumps(values).encode()), "", "", 0):
        wrong(f"{_typed(match)!r} would not even match the call that is asked about: look at it in `halter inbox`.")


def _shown(asked: Waiting) -> dict[str, Any]:
    try:
        return json.JSONDecoder().raw_decode(asked.shown.removeprefix(f"{asked.name} "))[0]
    except (ValueError, RecursionError):
        refused("What was asked about cannot be read any more, so no rule can be tried on it: write same.")


def offers(asked: Waiting) -> Sequence[Offered]:
    """Make the rules that a person may choose for a call: the narrowest first, each no wider than it reads."""
    if asked.about != "approval" or asked.risk == "CRITICAL":
        return ()
    keys = msgspec.json.decode(asked.keys or "[]", type=tuple[str, ...])
    offered = [Offered(SAME, told(Same("")))]
    if asked.risk == "HIGH":
        return offered
    with suppress(NotDone):
        # What is hidden, erased or unreadable can be agreed to as it is, and not in any other way.
        offered += [Offered(match, told(_matcher(asked, match, keys))) for match in _wider(_shown(asked))]
    return offered


def as_object_with_rules(asked: Waiting) -> dict[str, object]:
    """Write a decision for programs, with the rules that a yes to it could make."""
    return {**as_object(asked), "rules": [msgspec.structs.asdict(each) for each in offers(asked)]}


def _wider(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if "=" in key or not key.isprintable():
            continue
        words = argv_of(value) if isinstance(value, list) or key == "command" else None
        if words is not None and (pattern := _opened(words)):
            yield f"words:{key}={' '.join(map(_quoted, pattern))}"
        if isinstance(value, str) and "://" in value and (host := host_of(value)):
            yield f"at:{key}={host}"
        elif isinstance(value, str) and key in _PATHS and (folder := dirname(value)) and value.isprintable():
            rest = [f"any:{other}" for other, text in values.items() if other == "content" and isinstance(text, str)]
            yield "\n".join([f"under:{key}={folder}", *rest])


def _opened(words: tuple[str, ...]) -> tuple[str, ...]:
    """Open the last word of a command, if it is an operand of a program that does not take operands for code."""
    program = program_of(words[0])
    runs_code = program in SHELLS | RAISING | WRAPPERS or is_interpreter(program)
    if len(words) == 1 or runs_code or not fits_word(STAR, words[-1]):
        return ()
    return (*map(literally, words[:-1]), STAR)


def told(matcher: Matcher) -> str:
    """Say which calls a rule is for."""
    match matcher:
        case Same():
            return "with exactly the same arguments"
        case Each(conditions):
            return f"where {'; '.join(map(_condition_told, conditions))}"
        case Words(key, words):
            return f"where {key} is exactly {shlex.join(words)}, alone ({EARLIER})"
        case Under(key, folder):
            return f"where {key} lies in {folder}, alone ({EARLIER})"
        case At(key, host):
            return f"where {key} leads to {host}, alone ({EARLIER})"
        case Unknown():
            return "in a way that this version cannot read: it answers nothing"


EARLIER: Final = "of an earlier version, and so for calls without any other argument: end it, and say always anew"


def _condition_told(condition: Condition) -> str:
    match condition:
        case Is(key, _, shown):
            return f"{key} is exactly {shown}"
        case Argv(key, words):
            wild = " (a * is a piece of one word, no option)" if any(STAR in word for word in words) else ""
            return f"{key} is {' '.join(map(_quoted, words))}{wild}"
        case Inside(key, folder):
            return f"{key} lies in {folder}"
        case Leads(key, host):
            return f"{key} leads to {host}"
        case Anything(key):
            return f"{key} is anything at all"


def _quoted(word: str) -> str:
    """Quote a word, but leave a wildcard to be seen."""
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)
