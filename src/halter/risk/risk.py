"""Assesses the risk of one call from its parsed arguments: commands, paths, hosts, statements, amounts, recipients.

Text that only mentions something has no risk: a search for `rm -rf /` deletes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.text import format_count, make_word_set
from halter.core.tools import Effect, ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.risk.command_risk import code_line_risk, line_risk
from halter.risk.places import (
    RiskFinding,
    graphql_risk,
    host_risk,
    is_statement,
    looks_like_sql,
    path_risk,
    sql_risk,
    url_risk,
)

RISK_ORDER: Final[tuple[RiskLevel, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")

COMMAND_ARGUMENTS: Final = make_word_set(
    "command commands cmd cmds argv commandline cmdline script scripts bash shell exec sh terminal"
)
COMMAND_LIST_ARGUMENTS: Final = frozenset({"commands", "cmds", "scripts"})
PROGRAM_ARGUMENTS: Final = frozenset({"program", "executable", "binary", "entrypoint"})
WORD_ARGUMENTS: Final = frozenset({"args", "arguments", "parameters", "params", "argv"})
INPUT_ARGUMENTS: Final = frozenset({"stdin", "input"})
CODE_ARGUMENTS: Final = frozenset({"code", "python", "javascript", "source_code", "python_code", "snippet"})
PATH_ARGUMENTS: Final = make_word_set("path file filename folder directory dir destination dest target source src")
HOST_ARGUMENTS: Final = frozenset({"host", "hostname", "server", "domain"})
QUERY_ARGUMENTS: Final = frozenset({"sql", "query", "statement"})
METHOD_ARGUMENTS: Final = frozenset({"method", "verb", "action", "operation", "op"})
AMOUNT_ARGUMENTS: Final = frozenset({"amount", "amount_usd", "total", "total_usd", "sum", "payment", "price_usd"})
RECIPIENT_ARGUMENTS: Final = frozenset({"to", "cc", "bcc", "recipients"})

MAX_REASONS: Final = 12
AMOUNT_STEPS: Final = (100, 1_000, 10_000)
RECIPIENT_STEPS: Final = (5, 20, 200)

_DELETING: Final = make_word_set(
    "delete destroy drop purge wipe erase truncate terminate uninstall revoke format remove deletemany dropdatabase "
    "deleteall delete_all shutdown unpublish reset_all"
)
_CHANGING: Final = frozenset({"put", "patch", "post", "update", "replace", "overwrite"})
_CODE_SIGNS: Final = re.compile(r"[(;=\n]")
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_MAX_JSON_DEPTH: Final = 8

Arguments = Mapping[str, Any]


class Risk(msgspec.Struct, frozen=True):
    """The risk of a call, with its reasons as short phrases for the approver."""

    level: RiskLevel = "LOW"
    reasons: tuple[str, ...] = ()


class _Value(msgspec.Struct, frozen=True):
    """One argument with its nearest name and its sibling arguments."""

    name: str
    value: Any
    siblings: Arguments
    depth: int = 0


def assess_risk(spec: ToolSpec, arguments: Valid) -> Risk:
    findings = [
        finding for value in _iterate_arguments(arguments.values) for finding in _judge_argument(value, spec.effect)
    ]
    findings.sort(key=lambda finding: -RISK_ORDER.index(finding[0]))
    if not findings:
        return Risk()
    reasons = tuple(dict.fromkeys(reason for _, reason in findings))
    rest_note = (f"and {len(reasons) - MAX_REASONS} more",) if len(reasons) > MAX_REASONS else ()
    return Risk(findings[0][0], (*reasons[:MAX_REASONS], *rest_note))


def _iterate_arguments(arguments: Arguments) -> Iterator[_Value]:
    """Yield all arguments, including those in JSON strings. Lists of strings stay together."""
    pending = [_Value("", arguments, {})]
    while pending:
        argument = pending.pop()
        match argument.value:
            case Mapping():
                values = cast("Arguments", argument.value)
                pending += [
                    _Value(str(key), value, values, argument.depth) for key, value in reversed([*values.items()])
                ]
            case list() | tuple() if not _are_texts(cast("Sequence[Any]", argument.value)):
                items = cast("Sequence[Any]", argument.value)
                pending += [_Value(argument.name, item, argument.siblings, argument.depth) for item in reversed(items)]
            case _:
                if (json_argument := _decode_json_text(argument)) is not None:
                    pending.append(json_argument)
                yield argument


def _are_texts(value: Sequence[Any]) -> bool:
    return all(isinstance(each, str) for each in value)


def _decode_json_text(argument: _Value) -> _Value | None:
    text = argument.value
    if not isinstance(text, str) or argument.depth >= _MAX_JSON_DEPTH or text.lstrip()[:1] not in {"{", "["}:
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Value(argument.name, value, argument.siblings, argument.depth + 1)


def _judge_argument(argument: _Value, effect: Effect) -> Iterator[RiskFinding]:
    value, name = argument.value, argument.name.lower()
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from _amount_risk(name, float(value), effect)
        return
    texts: list[str] = [value] if isinstance(value, str) else list(value)
    kinds = _split_name(argument.name)
    if kinds & COMMAND_ARGUMENTS or name in PROGRAM_ARGUMENTS:
        yield from _command_argument_risk(argument, kinds)
    elif name in RECIPIENT_ARGUMENTS:
        yield from _recipient_risk(texts, effect)
    elif name in AMOUNT_ARGUMENTS:
        yield from _amount_risk(name, _sum_amounts(texts), effect)
    else:
        for text in texts:
            yield from _text_risk(argument, text, effect)


def _split_name(name: str) -> frozenset[str]:
    """Split a name into words: `shellCommand` and `shell_command` contain `shell` and `command`."""
    return frozenset({name.lower(), *(word.lower() for word in _WORD.findall(name))})


def _text_risk(argument: _Value, text: str, effect: Effect) -> Iterator[RiskFinding]:
    name = argument.name.lower()
    if name in PATH_ARGUMENTS or name.endswith(("_path", "_file", "_dir", "_folder")):
        yield from path_risk(text, effect)
    elif name in HOST_ARGUMENTS:
        yield from host_risk(text.lower())
    elif "url" in name or name in {"uri", "endpoint", "webhook", "href"}:
        yield from url_risk(text.strip())
    elif _split_name(argument.name) & METHOD_ARGUMENTS:
        word = text.strip().lower()
        if word in _DELETING or word.startswith(("delete", "destroy", "purge", "drop_")):
            yield "HIGH", f"{text.strip()[:40]} deletes external data"
        elif word in _CHANGING:
            yield "MEDIUM", f"{text.strip()[:40]} changes external data"
    elif name in CODE_ARGUMENTS and _CODE_SIGNS.search(text):
        yield from code_line_risk(text)
    else:
        if _split_name(argument.name) & QUERY_ARGUMENTS:
            if looks_like_sql(text):
                yield from sql_risk(text)
        elif not any(key.lower() in PATH_ARGUMENTS for key in argument.siblings) and is_statement(text):
            yield from sql_risk(text)
        yield from graphql_risk(text)


def _command_argument_risk(argument: _Value, kinds: frozenset[str]) -> Iterator[RiskFinding]:
    """Judge a command with the words and the input of its sibling arguments."""
    command = argument.value
    siblings = {key.lower(): value for key, value in argument.siblings.items() if key != argument.name}
    text = next((value for key, value in siblings.items() if key in INPUT_ARGUMENTS and isinstance(value, str)), None)
    if not isinstance(command, str) and kinds & COMMAND_LIST_ARGUMENTS:
        for line in command:
            yield from line_risk(line, text)
        return
    yield from line_risk(command, text)
    for key in WORD_ARGUMENTS & siblings.keys():
        words = siblings[key]
        if (
            isinstance(command, str)
            and isinstance(words, list | tuple)
            and words
            and _are_texts(cast("Sequence[Any]", words))
        ):
            yield from line_risk([command, *cast("Sequence[str]", words)], text)
        elif isinstance(command, str) and isinstance(words, str):
            yield from line_risk(f"{command} {words}", text)


def _recipient_risk(texts: Sequence[str], effect: Effect) -> Iterator[RiskFinding]:
    recipients = {
        address.strip().lower() for text in texts for address in text.replace(";", ",").split(",") if address.strip()
    }
    if effect == "write":
        yield from _step_risk(len(recipients), RECIPIENT_STEPS, format_count(len(recipients), "recipient"))


def _amount_risk(name: str, amount: float, effect: Effect) -> Iterator[RiskFinding]:
    if effect == "write" and name in AMOUNT_ARGUMENTS:
        yield from _step_risk(abs(amount), AMOUNT_STEPS, f"an amount of {amount:,.2f}")


def _step_risk(value: float, steps: Sequence[int], reason: str) -> Iterator[RiskFinding]:
    """Raise the risk by one for each threshold that a number exceeds; a non-number exceeds all."""
    exceeded_count = sum(not value <= step for step in steps)
    if exceeded_count:
        yield RISK_ORDER[exceeded_count], reason


def _sum_amounts(texts: Sequence[str]) -> float:
    try:
        return sum(float(text.strip().lstrip("$€£").replace(",", "")) for text in texts)
    except ValueError:
        return float("nan")
