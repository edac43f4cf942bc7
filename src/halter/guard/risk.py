"""How risky one call is, from its parsed arguments: commands, paths, hosts, statements, amounts, recipients.

What a text merely mentions counts for nothing: a search for `rm -rf /` deletes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.tools import Effect, ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.guard.commands import Unreadable, commands
from halter.guard.places import Finding, host_risk, path_risk, url_risk
from halter.guard.programs import command_risk
from halter.guard.sql import looks_like_sql, sql_risk

ORDER: Final[tuple[RiskLevel, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")

COMMANDS: Final = frozenset({"command", "cmd", "argv", "commandline", "command_line", "script", "bash", "shell"})
PATHS: Final = frozenset(
    {"path", "file", "filename", "folder", "directory", "dir", "destination", "dest", "target", "source", "src"}
)
HOSTS: Final = frozenset({"host", "hostname", "server", "domain"})
QUERIES: Final = frozenset({"sql", "query", "statement"})
AMOUNTS: Final = frozenset({"amount", "amount_usd", "total", "total_usd", "sum", "payment", "price_usd"})
RECIPIENTS: Final = frozenset({"to", "cc", "bcc", "recipients"})

AMOUNT_STEPS: Final = (100, 1_000, 10_000)
RECIPIENT_STEPS: Final = (5, 20, 200)


class Risk(msgspec.Struct, frozen=True):
    """How risky a call is, and why, as short phrases for the person who is asked."""

    level: RiskLevel = "LOW"
    reasons: tuple[str, ...] = ()


def assess(spec: ToolSpec, arguments: Valid) -> Risk:
    """Judge a call by all of its arguments; the riskiest counts."""
    found = [finding for key, value in _named("", arguments.values) for finding in _judged(key, value, spec.effect)]
    found.sort(key=lambda finding: -ORDER.index(finding[0]))
    return Risk(found[0][0], tuple(dict.fromkeys(reason for _, reason in found))) if found else Risk()


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Walk through arguments: every value with the nearest name above it. Lists of texts stay together."""
    match value:
        case Mapping():
            for key, each in cast("Mapping[str, Any]", value).items():
                yield from _named(str(key).lower(), each)
        case list() | tuple() if not _texts(cast("Sequence[Any]", value)):
            for each in cast("Sequence[Any]", value):
                yield from _named(name, each)
        case _:
            yield name, value


def _texts(value: Sequence[Any]) -> bool:
    return all(isinstance(each, str) for each in value)


def _judged(name: str, value: Any, effect: Effect) -> Iterator[Finding]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from _amount(name, float(value), effect)
        return
    texts: list[str] = [value] if isinstance(value, str) else list(value)
    if name in COMMANDS:
        yield from _commands(value)
    elif name in RECIPIENTS:
        yield from _recipients(texts, effect)
    elif name in AMOUNTS:
        yield from _amount(name, _number(texts), effect)
    else:
        for text in texts:
            yield from _text(name, text, effect)


def _text(name: str, text: str, effect: Effect) -> Iterator[Finding]:
    if name in PATHS or name.endswith(("_path", "_file", "_dir", "_folder")):
        yield from path_risk(text, effect)
    elif name in HOSTS:
        yield from host_risk(text.lower())
    elif name in QUERIES and looks_like_sql(text):
        yield from sql_risk(text)
    elif "url" in name or name in {"uri", "endpoint", "webhook", "href"}:
        yield from url_risk(text.strip())


def _commands(given: str | Sequence[str]) -> Iterator[Finding]:
    for command in commands(given):
        if isinstance(command, Unreadable):
            yield "HIGH", "a command line that cannot be taken apart"
        else:
            yield from command_risk(command)


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
