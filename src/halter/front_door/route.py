"""Routes a message to one of thirteen fast paths or five strategies, by exact grammars.

A message that no grammar matches goes to the model: as a goal if the agent has tools, else for a direct response.
"""

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from halter.core.schedules import Timing, explain_timing
from halter.front_door.fast_paths import (
    MAX_FAST_PATH_LENGTH,
    Detail,
    Plain,
    RoutingContext,
    find_fast_path,
    is_same_name,
    strip_agent_address,
)
from halter.front_door.schedule_parser import (
    ScheduleRequest,
    Unclear,
    is_imperative,
    is_question,
    read_schedule_request,
    strip_politeness,
    strip_thanks,
    trim_message,
)
from halter.front_door.sentences import FastPath

Strategy = Literal["DIRECT_RESPONSE", "GOAL", "SCHEDULED_TASK", "SUB_AGENT", "SCRIPT"]

MAX_QUOTE_LENGTH: Final = 80
"""Maximum characters of a message that a reason quotes."""
MAX_AGENT_LEAD_LENGTH: Final = 300
"""Number of characters in which the other agent may be named."""

_AGENT_MENTION: Final = re.compile(r"@(?P<name>[A-Za-z0-9_.-]{1,64})[,:]?\s+(?P<task>\S)")
_SEPARATE_AGENT: Final = re.compile(
    r"(?:have|let|get|use|ask|tell|start|spawn|launch|create|make|spin\s+up)\s+(?:a|an|another|one|some other)\s+"
    r"(?:(?:separate|different|other|new|second|sub|independent)[\s-]+)?(?:sub-?)?(?:agent|session)\s+(?:to\s+|and\s+)?(?P<task>\S)"
    r"|(?:in|with|by|via)\s+(?:a|an|another)\s+(?:(?:separate|different|new|second|sub|independent)[\s-]+)?(?:sub-?)?"
    r"(?:agent|session)\s*[,:]?\s+(?P<task2>\S)"
    r"|delegate\s+(?P<task3>\S.{0,200}?)\s+to\s+(?:a|an|another)\s+(?:(?:separate|different|new|other)\s+)?(?:sub-?)?agent$",
    re.IGNORECASE,
)
_NAMED_AGENT: Final = re.compile(
    r"(?:have|let|get|ask|tell|use)\s+(?:the\s+)?(?:agent\s+)?@?(?P<name>[A-Za-z0-9_.-]{1,64})(?:\s+agent)?\s+(?:to\s+)?(?P<task>\S)"
    r"|(?:delegate|hand|give)\s+(?P<task2>\S.{0,200}?)\s+(?:over\s+)?to\s+(?:the\s+)?(?:agent\s+)?@?(?P<name2>[A-Za-z0-9_.-]{1,64})(?:\s+agent)?$",
    re.IGNORECASE,
)
_PLAYBOOK_VERB: Final = re.compile(r"(?:run|start|execute|play|use|launch|do)\s+(?P<what>\S)", re.IGNORECASE)
_CONTINUATION: Final = re.compile(r"(?:with|for|on|using|over|against|in|from|to|and|then)\b|[:,(]", re.IGNORECASE)


class Scheduled(msgspec.Struct, frozen=True, tag=True):
    """A task and its timing. It starts only after a person has approved it."""

    timing: Timing
    prompt: str
    recurring: bool
    words: str


class Delegated(msgspec.Struct, frozen=True, tag=True):
    """A task for another agent; an empty name means a copy of this agent."""

    agent: str
    task: str


class Script(msgspec.Struct, frozen=True, tag=True):
    """A playbook, and the rest of the message after its name."""

    playbook: str
    rest: str


Details = Detail | Scheduled | Unclear | Delegated | Script


class RoutingDecision(msgspec.Struct, frozen=True):
    """The route of a message, its reason and its details."""

    route: FastPath | Literal["strategy"]
    strategy: Strategy | None
    why: str
    details: Details


def route_message(text: str, context: RoutingContext) -> RoutingDecision:
    """Decide the route of a message. The same text always has the same route."""
    is_short, text = len(text) <= MAX_FAST_PATH_LENGTH, trim_message(text)
    fast_path = find_fast_path(text, context) if is_short else None
    if fast_path is not None:
        path, details = fast_path
        return RoutingDecision(path, None, f"The whole message matches the fast path {path}.", details)
    text = strip_agent_address(text, context.agent)
    return (
        _route_schedule(text, context)
        or _route_delegation(text, context)
        or _route_playbook(text, context)
        or _route_to_model(context)
    )


def _names_something(task: str, time_words: str, context: RoutingContext) -> bool:
    """Return true if a time is a name: `run nightly`, if a schedule or playbook is called nightly."""
    return len(task.split()) == 1 and bool(_match_agent_name(time_words, (*context.schedules, *context.playbooks)))


def _make_strategy(strategy: Strategy, reason: str, details: Details) -> RoutingDecision:
    return RoutingDecision("strategy", strategy, reason, details)


def _route_to_model(context: RoutingContext) -> RoutingDecision:
    if context.has_tools:
        return _make_strategy("GOAL", "No exact grammar matches the message, and the agent has tools.", Plain())
    return _make_strategy(
        "DIRECT_RESPONSE", "No exact grammar matches the message, and the agent has no tools.", Plain()
    )


def _route_schedule(text: str, context: RoutingContext) -> RoutingDecision | None:
    match read_schedule_request(text, context.now, context.timezone):
        case None:
            return None
        case Unclear() as unclear:
            return _make_strategy("SCHEDULED_TASK", "The message contains a time that is not exact.", unclear)
        case ScheduleRequest(timing=timing, rest=task, words=time_words):
            if _names_something(task, time_words, context):
                return None
            reason = (
                f"{time_words[:MAX_QUOTE_LENGTH]!r} is the time ({explain_timing(timing)}), and the rest is the task."
            )
            return _make_strategy("SCHEDULED_TASK", reason, Scheduled(timing, task, timing.at is None, time_words))


def _route_delegation(text: str, context: RoutingContext) -> RoutingDecision | None:
    asks_question, text = is_question(text), strip_politeness(text.strip())
    others = [name for name in context.agents if name != context.agent]
    match = _AGENT_MENTION.match(text)
    if match and (name := _match_agent_name(match["name"], others)):
        return _make_strategy(
            "SUB_AGENT",
            f"The message begins with @{name}.",
            Delegated(name, strip_politeness(text[match.start("task") :])),
        )
    if asks_question:
        return None
    if (match and match["name"].lower() in {"agent", "subagent"}) or (match := _SEPARATE_AGENT.match(text)):
        return _make_strategy(
            "SUB_AGENT", "The message asks for a separate agent.", Delegated("", _extract_task(match, text))
        )
    match = _NAMED_AGENT.match(text)
    name = match and _match_agent_name(match["name"] or match["name2"], others)
    if match and name and _has_task(match, text):
        return _make_strategy(
            "SUB_AGENT", f"The message asks for the agent {name}.", Delegated(name, _extract_task(match, text))
        )
    return None


def _match_agent_name(text: str, names: Sequence[str]) -> str:
    return next((name for name in names if is_same_name(name, text)), "")


def _extract_task(match: re.Match[str], text: str) -> str:
    """Return the task: the text after the agent's name, or the text before it if the name comes last."""
    groups = match.groupdict()
    inner = groups.get("task3") or (groups.get("task2") if groups.get("name2") else None)
    if inner:
        return inner
    start = next(match.start(name) for name in ("task", "task2") if groups.get(name))
    return strip_thanks(text[start:])


def _has_task(match: re.Match[str], text: str) -> bool:
    """Return true if an imperative follows, as in `ask scout to check the mail`."""
    return bool(match["name2"]) or is_imperative(
        text[match.start("task") : match.start("task") + MAX_AGENT_LEAD_LENGTH].lower().split()
    )


def _route_playbook(text: str, context: RoutingContext) -> RoutingDecision | None:
    asks_question, text = is_question(text), strip_politeness(text.strip())
    match = None if asks_question else _PLAYBOOK_VERB.match(text)
    if match is None:
        return None
    for playbook in sorted(context.playbooks, key=len, reverse=True):
        inputs_text = _after_name(text[match.start("what") :], playbook)
        if inputs_text is not None:
            return _make_strategy(
                "SCRIPT", f"The message names the playbook {playbook}.", Script(playbook, inputs_text)
            )
    return None


def _after_name(text: str, playbook: str) -> str | None:
    """Return the text after a playbook's name, or None if it is not named or the text changes the meaning."""
    name = r"[\s_-]+".join(map(re.escape, re.split(r"[\s_-]+", playbook)))
    pattern = (
        rf"(?:the\s+|my\s+|our\s+)?(?P<before>playbook\s+)?['\"`]?{name}['\"`]?(?P<after>\s+playbook)?(?=$|[\s.,:;!?(])"
    )
    match = re.match(pattern, text, re.IGNORECASE)
    if match is None:
        return None
    remaining = strip_thanks(text[match.end() :]).strip(" ,:;")
    is_named = match["before"] or match["after"] or not remaining or _CONTINUATION.match(text[match.end() :].lstrip())
    return remaining if is_named else None
