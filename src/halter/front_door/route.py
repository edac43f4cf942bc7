"""Routes a message to one of thirteen fast paths or five strategies, by exact grammars.

What no grammar reads goes to the model: with tools as a goal, without any as one answer.
"""

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from halter.core.schedules import Timing, explain_timing
from halter.front_door.fast_paths import (
    LONGEST_FAST_PATH,
    Detail,
    FastPath,
    Plain,
    RoutingContext,
    find_fast_path,
    is_same_name,
    strip_agent_address,
)
from halter.front_door.schedule_text import (
    ScheduleRequest,
    Unclear,
    is_imperative,
    is_question,
    read_schedule_request,
    strip_politeness,
    strip_thanks,
    trim_message,
)

Strategy = Literal["DIRECT_RESPONSE", "GOAL", "SCHEDULED_TASK", "SUB_AGENT", "SCRIPT"]

LONGEST_QUOTE: Final = 80
"""Most characters of a message that a reason quotes."""
LONGEST_AGENT_LEAD: Final = 300
"""How far into a message the other agent may be named."""

_MENTION: Final = re.compile(r"@(?P<name>[A-Za-z0-9_.-]{1,64})[,:]?\s+(?P<task>\S)")
_OTHER: Final = re.compile(
    r"(?:have|let|get|use|ask|tell|start|spawn|launch|create|make|spin\s+up)\s+(?:a|an|another|one|some other)\s+"
    r"(?:(?:separate|different|other|new|second|sub|independent)[\s-]+)?(?:sub-?)?(?:agent|session)\s+(?:to\s+|and\s+)?(?P<task>\S)"
    r"|(?:in|with|by|via)\s+(?:a|an|another)\s+(?:(?:separate|different|new|second|sub|independent)[\s-]+)?(?:sub-?)?"
    r"(?:agent|session)\s*[,:]?\s+(?P<task2>\S)"
    r"|delegate\s+(?P<task3>\S.{0,200}?)\s+to\s+(?:a|an|another)\s+(?:(?:separate|different|new|other)\s+)?(?:sub-?)?agent$",
    re.IGNORECASE,
)
_ONE: Final = re.compile(
    r"(?:have|let|get|ask|tell|use)\s+(?:the\s+)?(?:agent\s+)?@?(?P<name>[A-Za-z0-9_.-]{1,64})(?:\s+agent)?\s+(?:to\s+)?(?P<task>\S)"
    r"|(?:delegate|hand|give)\s+(?P<task2>\S.{0,200}?)\s+(?:over\s+)?to\s+(?:the\s+)?(?:agent\s+)?@?(?P<name2>[A-Za-z0-9_.-]{1,64})(?:\s+agent)?$",
    re.IGNORECASE,
)
_PLAY: Final = re.compile(r"(?:run|start|execute|play|use|launch|do)\s+(?P<what>\S)", re.IGNORECASE)
_REST: Final = re.compile(r"(?:with|for|on|using|over|against|in|from|to|and|then)\b|[:,(]", re.IGNORECASE)


class Scheduled(msgspec.Struct, frozen=True, tag=True):
    """A task and its timing; nothing happens before a person agrees."""

    timing: Timing
    prompt: str
    recurring: bool
    words: str


class Delegated(msgspec.Struct, frozen=True, tag=True):
    """A task for another agent; an empty name is one like this agent."""

    agent: str
    task: str


class Script(msgspec.Struct, frozen=True, tag=True):
    """A playbook, and what was said beside its name."""

    playbook: str
    rest: str


Details = Detail | Scheduled | Unclear | Delegated | Script


class RoutingDecision(msgspec.Struct, frozen=True):
    """Where a message goes, why, and its details."""

    route: FastPath | Literal["strategy"]
    strategy: Strategy | None
    why: str
    details: Details


def route_message(text: str, surroundings: RoutingContext) -> RoutingDecision:
    """Decides where a message goes; the same text always goes the same way."""
    short, text = len(text) <= LONGEST_FAST_PATH, trim_message(text)
    found = find_fast_path(text, surroundings) if short else None
    if found is not None:
        path, details = found
        return RoutingDecision(path, None, f"The whole message is a sentence of the fast path {path}.", details)
    text = strip_agent_address(text, surroundings.agent)
    return (
        _route_schedule(text, surroundings)
        or _route_delegation(text, surroundings)
        or _route_playbook(text, surroundings)
        or _route_to_model(surroundings)
    )


def _names_something(rest: str, words: str, surroundings: RoutingContext) -> bool:
    """Whether a time is a name: `run nightly`, where something is called nightly."""
    return len(rest.split()) == 1 and bool(_match_agent_name(words, (*surroundings.schedules, *surroundings.playbooks)))


def _make_strategy(strategy: Strategy, why: str, details: Details) -> RoutingDecision:
    return RoutingDecision("strategy", strategy, why, details)


def _route_to_model(surroundings: RoutingContext) -> RoutingDecision:
    if surroundings.has_tools:
        return _make_strategy("GOAL", "No exact grammar reads the message, and the agent has tools.", Plain())
    return _make_strategy("DIRECT_RESPONSE", "No exact grammar reads the message, and the agent has no tools.", Plain())


def _route_schedule(text: str, surroundings: RoutingContext) -> RoutingDecision | None:
    match read_schedule_request(text, surroundings.now, surroundings.timezone):
        case None:
            return None
        case Unclear() as unclear:
            return _make_strategy("SCHEDULED_TASK", "It names a time that cannot be read exactly.", unclear)
        case ScheduleRequest(timing=timing, rest=rest, words=words):
            if _names_something(rest, words, surroundings):
                return None
            why = f"{words[:LONGEST_QUOTE]!r} says when ({explain_timing(timing)}), and the rest says what."
            return _make_strategy("SCHEDULED_TASK", why, Scheduled(timing, rest, timing.at is None, words))


def _route_delegation(text: str, surroundings: RoutingContext) -> RoutingDecision | None:
    question, text = is_question(text), strip_politeness(text.strip())
    others = [name for name in surroundings.agents if name != surroundings.agent]
    match = _MENTION.match(text)
    if match and (name := _match_agent_name(match["name"], others)):
        return _make_strategy(
            "SUB_AGENT", f"It begins with @{name}.", Delegated(name, strip_politeness(text[match.start("task") :]))
        )
    if question:
        return None
    if (match and match["name"].lower() in {"agent", "subagent"}) or (match := _OTHER.match(text)):
        return _make_strategy("SUB_AGENT", "It asks for a separate agent.", Delegated("", _extract_task(match, text)))
    match = _ONE.match(text)
    name = match and _match_agent_name(match["name"] or match["name2"], others)
    if match and name and _has_task(match, text):
        return _make_strategy(
            "SUB_AGENT", f"It asks for the agent {name}.", Delegated(name, _extract_task(match, text))
        )
    return None


def _match_agent_name(text: str, names: Sequence[str]) -> str:
    return next((name for name in names if is_same_name(name, text)), "")


def _extract_task(match: re.Match[str], text: str) -> str:
    """Returns the task: all that follows, or what stands between, where the agent is named at the end."""
    groups = match.groupdict()
    inner = groups.get("task3") or (groups.get("task2") if groups.get("name2") else None)
    if inner:
        return inner
    start = next(match.start(name) for name in ("task", "task2") if groups.get(name))
    return strip_thanks(text[start:])


def _has_task(match: re.Match[str], text: str) -> bool:
    """Whether a task follows: an imperative, as in `ask scout to check the mail`."""
    return bool(match["name2"]) or is_imperative(
        text[match.start("task") : match.start("task") + LONGEST_AGENT_LEAD].lower().split()
    )


def _route_playbook(text: str, surroundings: RoutingContext) -> RoutingDecision | None:
    question, text = is_question(text), strip_politeness(text.strip())
    match = None if question else _PLAY.match(text)
    if match is None:
        return None
    for playbook in sorted(surroundings.playbooks, key=len, reverse=True):
        rest = _after_name(text[match.start("what") :], playbook)
        if rest is not None:
            return _make_strategy("SCRIPT", f"It names the playbook {playbook}.", Script(playbook, rest))
    return None


def _after_name(text: str, playbook: str) -> str | None:
    """Returns what follows a playbook's name; None if it is not named, or if what follows changes the meaning."""
    name = r"[\s_-]+".join(map(re.escape, re.split(r"[\s_-]+", playbook)))
    form = (
        rf"(?:the\s+|my\s+|our\s+)?(?P<before>playbook\s+)?['\"`]?{name}['\"`]?(?P<after>\s+playbook)?(?=$|[\s.,:;!?(])"
    )
    match = re.match(form, text, re.IGNORECASE)
    if match is None:
        return None
    rest = strip_thanks(text[match.end() :]).strip(" ,:;")
    sure = match["before"] or match["after"] or not rest or _REST.match(text[match.end() :].lstrip())
    return rest if sure else None
