"""What a look at one thing came to."""

from typing import Literal

import msgspec

Verdict = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at, and a sentence about it that says what to do where something is to be done."""

    name: str
    verdict: Verdict
    finding: str


def fine(name: str, finding: str) -> Check:
    """Say that all is well."""
    return Check(name, "ok", finding)


def look(name: str, finding: str) -> Check:
    """Say that somebody should have a look before the night."""
    return Check(name, "warning", finding)


def problem(name: str, finding: str) -> Check:
    """Say that it will not work like this."""
    return Check(name, "problem", finding)


def worst(name: str, checks: list[Check]) -> Check:
    """Make one of several about the same thing: all that is not well, or if all is, all of it."""
    for verdict in ("problem", "warning"):
        if any(each.verdict == verdict for each in checks):
            told = " ".join(each.finding for each in checks if each.verdict != "ok")
            return Check(name, verdict, told)
    return fine(name, " ".join(each.finding for each in checks))
