"""A check of `halter doctor`: what was checked, the verdict, and what to do."""

from typing import Literal

import msgspec

CheckStatus = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True):
    """One check. The finding says what to do if something is wrong."""

    name: str
    verdict: CheckStatus
    finding: str


def pass_check(name: str, finding: str) -> Check:
    return Check(name, "ok", finding)


def warn_check(name: str, finding: str) -> Check:
    return Check(name, "warning", finding)


def fail_check(name: str, finding: str) -> Check:
    return Check(name, "problem", finding)


def combine_checks(name: str, checks: list[Check]) -> Check:
    """Merge the checks of one subject: all findings that are not ok, or all findings if every check is ok."""
    for verdict in ("problem", "warning"):
        if any(each.verdict == verdict for each in checks):
            sentence = " ".join(each.finding for each in checks if each.verdict != "ok")
            return Check(name, verdict, sentence)
    return pass_check(name, " ".join(each.finding for each in checks))
