"""A backtest of a policy, and the difference of two, in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from halter.core.money import format_usd
from halter.present.events import format_moment
from halter.present.sheet import Facts, Listing, Sheet

if TYPE_CHECKING:
    from halter.config.policy import PolicyDifference
    from halter.operations.backtest import BacktestResult
    from halter.runtime.backtest import BacktestLine

MOST_SHOWN: Final = 40
DIFFERENCE_WORDS: Final = {"looser": "LOOSER", "stricter": "stricter", "fixed": "other", "free": "no limit"}


def build_backtest_sheet(found: "BacktestResult") -> Sheet:
    summary = [
        ("policy", found.policy),
        ("judged", f"{count(found.decisions, 'decision')} in {count(found.sessions, 'session')}"),
        ("loosened", str(found.loosened) if found.loosened else "nothing"),
        *((change, f"{times:,}") for change, times in found.changed.items()),
        ("not spent", format_usd(found.not_spent_usd) if found.not_spent_usd else ""),
        ("stopped at a cap", count(found.sessions_stopped, "session") if found.sessions_stopped else ""),
        ("gone another way", count(found.sessions_diverged, "session") if found.sessions_diverged else ""),
        ("after that", f"{count(found.after, 'decision')}, counted apart" if found.after else ""),
        ("named by no rule", ", ".join(f"{tool} ({calls:,})" for tool, calls in found.unnamed.items())),
        *(("not judged", f"{times:,}: {why}") for why, times in found.unjudged.items()),
    ]
    rows = [_row(line) for line in found.lines[:MOST_SHOWN]]
    sheet: list[Facts | Listing | str] = [Facts(f"Backtest of {found.agent}", summary)]
    if rows:
        columns = ["when", "session", "what", "then", "now", "why"]
        sheet.append(Listing("Changed decisions, looser ones first", columns, rows, long="what why"))
    if found.differing > MOST_SHOWN:
        sheet.append(f"And {found.differing - MOST_SHOWN:,} more: add --json to see them.")
    if not rows:
        sheet.append("It would have decided everything the same." if found.decisions else "Nothing could be judged.")
    return [*sheet, *found.notes]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _row(line: "BacktestLine") -> list[str]:
    mark = "LOOSER " if line.loosened else ""
    now = f"{line.now} (later)" if line.after else line.now
    spared = f" ({format_usd(line.not_spent_usd)} not spent from there on)" if line.not_spent_usd else ""
    why = f"{line.sentence}{spared}"
    return [format_moment(line.at), line.session[:13], f"{mark}{line.name}", line.then, now, why]


def build_policy_diff_sheet(found: "Sequence[PolicyDifference]", before: str, after: str) -> Sheet:
    order = list(DIFFERENCE_WORDS)
    lines = sorted(found, key=lambda each: order.index(each.how))
    rows = [[each.key, each.stored, each.written, DIFFERENCE_WORDS[each.how]] for each in lines]
    empty = f"{before} and {after} say the same."
    title, columns = f"{after}, compared with {before}", ["key", "before", "after", "it is"]
    return [Listing(title, columns, rows, long="key", empty=empty)]
