"""Decisions and standing rules in words: the question, the call, and the effects of a yes and a no."""

import re
import shlex
from typing import Final

import msgspec

from halter.guard.approvals import (
    STAR,
    AnyCondition,
    ArgvCondition,
    Condition,
    EachArgument,
    EqualsCondition,
    FolderCondition,
    HostCondition,
    LegacyFolder,
    LegacyHost,
    LegacyWords,
    PendingDecision,
    RuleMatcher,
    SameArguments,
    UnreadableRule,
)
from halter.runtime.needs import make_decision_need


class DecisionPrompt(msgspec.Struct, frozen=True):
    """A decision as a person sees it: the question, the model's reason, the call, and the effects of a yes and a no."""

    what: str
    why: str
    details: str
    yes: str
    no: str


def render_prompt(decision: PendingDecision) -> DecisionPrompt:
    need = make_decision_need(decision)
    return DecisionPrompt(need.sentence, need.why, need.shown, *_describe_answers(decision.about))


def _describe_answers(kind: str) -> tuple[str, str]:
    """Describe the effects of a yes and a no."""
    match kind:
        case "unknown_call":
            return "The call was made; it is not repeated", "The call was not made; it is retried"
        case "cap_raise":
            return "Set a higher cap, in dollars", "The session ends"
        case "changed_tool":
            return "The tool may be used in this version", "The tool stays disabled"
        case "changed_server":
            return "These tools may be used in this version", "These tools stay disabled"
        case "schedule":
            return "The trigger is created as shown", "No trigger is created"
        case "proposal":
            return "It is saved for future sessions", "It is dismissed"
        case _:
            return "Exactly this call runs, once", "It does not run"


_PLAIN_WORD: Final = re.compile(r"[\w@%+=:,./*-]+")


def describe_matcher(matcher: RuleMatcher) -> str:
    match matcher:
        case SameArguments():
            return "with exactly the same arguments"
        case EachArgument(conditions):
            return f"where {'; '.join(map(_describe_condition, conditions))}"
        case LegacyWords(key, argv):
            return f"where {key} is exactly {shlex.join(argv)}, alone ({EARLIER_VERSION})"
        case LegacyFolder(key, folder):
            return f"where {key} is in {folder}, alone ({EARLIER_VERSION})"
        case LegacyHost(key, host):
            return f"where {key} is at host {host}, alone ({EARLIER_VERSION})"
        case UnreadableRule():
            return "by conditions that this version cannot read, so it matches no call"


EARLIER_VERSION: Final = (
    "a rule of an earlier version, which matches only calls without other arguments; end it and make a new one"
)


def _describe_condition(condition: Condition) -> str:
    match condition:
        case EqualsCondition(key, _, literal):
            return f"{key} is exactly {literal}"
        case ArgvCondition(key, argv):
            wild = " (* matches part of one word, never an option)" if any(STAR in word for word in argv) else ""
            return f"{key} is {' '.join(map(quote_word, argv))}{wild}"
        case FolderCondition(key, folder):
            return f"{key} is in {folder}"
        case HostCondition(key, host):
            return f"{key} is at host {host}"
        case AnyCondition(key):
            return f"{key} is anything"


def quote_word(word: str) -> str:
    """Quote a word of a command, but not a wildcard."""
    return word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word)
