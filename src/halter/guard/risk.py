"""How risky one call is, from its parsed arguments: commands, paths, hosts, statements, methods, amounts, recipients.

What a text merely mentions counts for nothing: a search for `rm -rf /` deletes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.tools import Effect, ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.guard.graphql import graphql_risk
from halter.guard.places import Finding, host_risk, path_risk, url_risk
from halter.guard.programs import code_line_risk, line_risk
from halter.guard.sql import is_statement, looks_like_sql, sql_risk

ORDER: Final[tuple[RiskLevel, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")

COMMANDS: Final = frozenset(
    {
        *("command", "commands", "cmd", "cmds", "argv", "commandline", "cmdline", "script", "scripts", "bash", "shell"),
        *("exec", "sh", "terminal"),
    }
)
EACH_A_LINE: Final = frozenset({"commands", "cmds", "scripts"})
PROGRAMS: Final = frozenset({"program", "executable", "binary", "entrypoint"})
WORDS: Final = frozenset({"args", "arguments", "parameters", "params", "argv"})
INPUTS: Final = frozenset({"stdin", "input"})
CODE: Final = frozenset({"code", "python", "javascript", "source_code", "python_code", "snippet"})
PATHS: Final = frozenset(
    {"path", "file", "filename", "folder", "directory", "dir", "destination", "dest", "target", "source", "src"}
)
HOSTS: Final = frozenset({"host", "hostname", "server", "domain"})
QUERIES: Final = frozenset({"sql", "query", "statement"})
METHODS: Final = frozenset({"method", "verb", "action", "operation", "op"})
AMOUNTS: Final = frozenset({"amount", "amount_usd", "total", "total_usd", "sum", "payment", "price_usd"})
RECIPIENTS: Final = frozenset({"to", "cc", "bcc", "recipients"})

REASONS_SHOWN: Final = 12
AMOUNT_STEPS: Final = (100, 1_000, 10_000)
RECIPIENT_STEPS: Final = (5, 20, 200)

_DELETING: Final = frozenset(
    {
        *(
            "delete",
            "destroy",
            "drop",
            "purge",
            "wipe",
            "erase",
            "truncate",
            "terminate",
            "uninstall",
            "revoke",
            "format",
        ),
        *("remove", "deletemany", "dropdatabase", "deleteall", "delete_all", "shutdown", "unpublish", "reset_all"),
    }
)
_CHANGING: Final = frozenset({"put", "patch", "post", "update", "replace", "overwrite"})
_CODE_SIGNS: Final = re.compile(r"[(;=\n]")
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_JSON_DEEPEST: Final = 8

Arguments = Mapping[str, Any]


class Risk(msgspec.Struct, frozen=True):
    """How risky a call is, and why, as short phrases for the person who is asked."""

    level: RiskLevel = "LOW"
    reasons: tuple[str, ...] = ()


class _Value(msgspec.Struct, frozen=True):
    """One argument with the nearest name above it, and the arguments that stand beside it."""

    name: str
    value: Any
    beside: Arguments
    depth: int = 0


def assess(spec: ToolSpec, arguments: Valid) -> Risk:
    """Judge a call by all of its arguments; the riskiest counts."""
    found = [finding for value in _values(arguments.values) for finding in _judged(value, spec.effect)]
    found.sort(key=lambda finding: -ORDER.index(finding[0]))
    if not found:
        return Risk()
    reasons = tuple(dict.fromkeys(reason for _, reason in found))
    more = (f"and {len(reasons) - REASONS_SHOWN} more",) if len(reasons) > REASONS_SHOWN else ()
    return Risk(found[0][0], (*reasons[:REASONS_SHOWN], *more))


def _values(arguments: Arguments) -> Iterator[_Value]:
    """Walk through arguments, also through JSON that stands in a text. Lists of texts stay together."""
    waiting = [_Value("", arguments, {})]
    while waiting:
        each = waiting.pop()
        match each.value:
            case Mapping():
                values = cast("Arguments", each.value)
                waiting += [_Value(str(key), value, values, each.depth) for key, value in reversed([*values.items()])]
            case list() | tuple() if not _texts(cast("Sequence[Any]", each.value)):
                items = cast("Sequence[Any]", each.value)
                waiting += [_Value(each.name, item, each.beside, each.depth) for item in reversed(items)]
            case _:
                if (inside := _decoded(each)) is not None:
                    waiting.append(inside)
                yield each


def _texts(value: Sequence[Any]) -> bool:
    return all(isinstance(each, str) for each in value)


def _decoded(each: _Value) -> _Value | None:
    """Read a text that holds JSON, as the body of a request does."""
    text = each.value
    if not isinstance(text, str) or each.depth >= _JSON_DEEPEST or text.lstrip()[:1] not in {"{", "["}:
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Value(each.name, value, each.beside, each.depth + 1)


def _judged(argument: _Value, effect: Effect) -> Iterator[Finding]:
    value, name = argument.value, argument.name.lower()
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from _amount(name, float(value), effect)
        return
    texts: list[str] = [value] if isinstance(value, str) else list(value)
    kinds = _kinds(argument.name)
    if kinds & COMMANDS or name in PROGRAMS:
        yield from _commands(argument, kinds)
    elif name in RECIPIENTS:
        yield from _recipients(texts, effect)
    elif name in AMOUNTS:
        yield from _amount(name, _number(texts), effect)
    else:
        for text in texts:
            yield from _text(argument, text, effect)


def _kinds(name: str) -> frozenset[str]:
    """Take a name apart: `shellCommand` and `shell_command` are a shell and a command."""
    return frozenset({name.lower(), *(word.lower() for word in _WORD.findall(name))})


def _text(argument: _Value, text: str, effect: Effect) -> Iterator[Finding]:
    name = argument.name.lower()
    if name in PATHS or name.endswith(("_path", "_file", "_dir", "_folder")):
        yield from path_risk(text, effect)
    elif name in HOSTS:
        yield from host_risk(text.lower())
    elif "url" in name or name in {"uri", "endpoint", "webhook", "href"}:
        yield from url_risk(text.strip())
    elif _kinds(argument.name) & METHODS:
        yield from _method(text)
    elif name in CODE and _CODE_SIGNS.search(text):
        yield from code_line_risk(text)
    else:
        yield from _statement(argument, text)


def _statement(argument: _Value, text: str) -> Iterator[Finding]:
    """Judge statements, of SQL or GraphQL, in any argument; but the contents of a file are not executed."""
    if _kinds(argument.name) & QUERIES:
        if looks_like_sql(text):
            yield from sql_risk(text)
    elif not any(key.lower() in PATHS for key in argument.beside) and is_statement(text):
        yield from sql_risk(text)
    yield from graphql_risk(text)


def _method(text: str) -> Iterator[Finding]:
    """Judge what a tool is told to do in one word, as a method of HTTP."""
    word = text.strip().lower()
    if word in _DELETING or word.startswith(("delete", "destroy", "purge", "drop_")):
        yield "HIGH", f"{text.strip()[:40]} deletes something outside"
    elif word in _CHANGING:
        yield "MEDIUM", f"{text.strip()[:40]} changes something outside"


def _commands(argument: _Value, kinds: frozenset[str]) -> Iterator[Finding]:
    """Judge a command, with the words and the input that other arguments beside it give it."""
    given = argument.value
    beside = {key.lower(): value for key, value in argument.beside.items() if key != argument.name}
    text = next((value for key, value in beside.items() if key in INPUTS and isinstance(value, str)), None)
    if not isinstance(given, str) and kinds & EACH_A_LINE:
        for line in given:
            yield from line_risk(line, text)
        return
    yield from line_risk(given, text)
    for key in WORDS & beside.keys():
        words = beside[key]
        if (
            isinstance(given, str)
            and isinstance(words, list | tuple)
            and words
            and _texts(cast("Sequence[Any]", words))
        ):
            yield from line_risk([given, *cast("Sequence[str]", words)], text)
        elif isinstance(given, str) and isinstance(words, str):
            yield from line_risk(f"{given} {words}", text)


def _recipients(texts: Sequence[str], effect: Effect) -> Iterator[Finding]:
    people = {part.strip().lower() for text in texts for part in text.replace(";", ",").split(",") if part.strip()}
    if effect == "write":
        yield from _stepped(len(people), RECIPIENT_STEPS, f"{len(people)} recipients")


def _amount(name: str, amount: float, effect: Effect) -> Iterator[Finding]:
    if effect == "write" and name in AMOUNTS:
        yield from _stepped(abs(amount), AMOUNT_STEPS, f"an amount of {amount:,.2f}")


def _stepped(value: float, steps: Sequence[int], reason: str) -> Iterator[Finding]:
    """Raise the risk by one for each step that a number goes beyond; what is no number is beyond all."""
    passed = sum(not value <= step for step in steps)
    if passed:
        yield ORDER[passed], reason


def _number(texts: Sequence[str]) -> float:
    try:
        return sum(float(text.strip().lstrip("$€£").replace(",", "")) for text in texts)
    except ValueError:
        return float("nan")
