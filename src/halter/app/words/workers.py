"""What is said of the processes that run agents, the same wherever they are shown."""

from collections.abc import Mapping
from typing import Final

from halter.app.desk.workers import Health, Worker
from halter.core.durations import shown_duration

NOBODY: Final = "No process runs agents here: start `halter up FOLDER`, or `halter worker` on a PostgreSQL store."
MOODS: Final[Mapping[Health, str]] = {
    "alive": "good",
    "waits": "look",
    "draining": "look",
    "lapsed": "bad",
    "left": "dim",
}
"""How each health is coloured."""


def named(one: Worker) -> str:
    """Name a process so that somebody finds it: what it is, its number, and its machine."""
    return f"halter {one.kind} {one.pid} on {one.host}"


def heard(one: Worker, now: int) -> str:
    """Say when it was last heard."""
    return "" if one.heard_at is None else f"{shown_duration(max(0, now - one.heard_at))} ago"


def agents_of(one: Worker) -> str:
    """Name the agents that it has, each with the version of its files."""
    return ", ".join(f"{name} {version}".strip() for name, version in one.agents.items())


def busy(one: Worker) -> str:
    """Say how many sessions are awake there, of how many, and how many stay there."""
    if not one.alive:
        return ""
    stay = f", {one.residents} stay" if one.residents else ""
    return f"{one.awake} of {one.concurrency}{stay}"


def note(one: Worker, now: int) -> str:
    """Say what there is to know of it, and what to do; nothing where all is well."""
    match one.health:
        case "lapsed":
            return (
                f"Gone without a word: last heard {heard(one, now)}. What it had goes on wherever a worker has its "
                "agents; start it again if there is none."
            )
        case "left":
            return "It ended in good order."
        case "draining" | "waits" | "alive":
            said = (one.problem or (_DRAINING if one.closing else ""), older(one))
            return " ".join(each for each in said if each)


_DRAINING: Final = "It takes nothing more, and ends when what runs there has come to its rest."


def older(one: Worker) -> str:
    """Say of which agents others have newer files."""
    if not one.waiting or one.closing:
        return ""
    return (
        f"Another worker has newer files of {', '.join(one.waiting)}, whose sessions go on there: bring this folder to "
        "the same version and start it again."
    )
