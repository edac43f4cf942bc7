"""A waiting decision as a message, and a reply as an intent: pure, and the same for every platform.

What is shown is what is approved. A message whose text had to be cut has no button that approves, and no reply to it
does either. Its buttons carry the beginning of the digest of the text and a random part; only the digest of both is
kept, so a button can be neither guessed nor made from the store.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from halter.core.clock import format_duration
from halter.core.money import format_micros
from halter.core.rows import DecisionRow
from halter.core.text import escape_hidden
from halter.operations.decisions import ApprovalTerms, WaitingDecision, arguments, list_rule_offers, render_prompt
from halter.operations.money import amount_of
from halter.state.channel import ChannelState, ShownMessage

Verb = Literal["yes", "no", "always", "cap"]

BUTTON_PATTERN: Final = re.compile(r"(yes|no|always|cap):([0-9a-f]{10}[A-Za-z0-9_-]{22})")
CODE_PATTERN: Final = re.compile(r"(?:/start|/pair)?(?:@\S+)?\s*([A-Z2-7]{4}-[A-Z2-7]{4}-[A-Z2-7]{4})")
COMMAND_PATTERN: Final = re.compile(r"/?(\w+)(?:@\w+)?(?:\s+(.*))?", re.DOTALL)
STEERING_PATTERN: Final = re.compile(r"/(halt|status)(@\w+)?(\s.*)?|halt", re.DOTALL | re.IGNORECASE)
"""What is meant for Halter also where it replies to a question; where slashes are kept by the platform, without one."""
QUESTION: Final = "/question"
RANDOM_BYTES: Final = 16
DIGEST_LENGTH: Final = 10
HELP: Final = (
    "Press a button below a question, or reply to it: yes, no REASON, always, cap 2.50, or other arguments as a JSON "
    "object. A question in words takes any reply. /status shows the agents, /halt stops all of them, /halt AGENT one."
)

FOREIGN: Final = "All that follows, to the end of this message, is what the agent wrote:"


class ChatButton(msgspec.Struct, frozen=True):
    label: str
    data: str


class ChatMessage(msgspec.Struct, frozen=True):
    """What is sent to a chat. `shown` is the part that is set as it stands, from one index of the text to another."""

    text: str
    buttons: tuple[ChatButton, ...] = ()
    shown: tuple[int, int] = (0, 0)
    cut: bool = False
    button: str = ""
    silent: bool = False


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an account sent: the press of a button, or a text, perhaps in reply to a message.

    `mark` orders what arrives on a channel; `handle` is what the platform answers a press by.
    """

    mark: str
    account: str
    place: str
    message: str = ""
    press: str = ""
    text: str = ""
    handle: str = ""
    forwarded: bool = False


class ApproveShown(msgspec.Struct, frozen=True):
    """Approve a decision as it was shown."""

    shown: ShownMessage
    terms: ApprovalTerms


class DenyShown(msgspec.Struct, frozen=True):
    """Deny a decision."""

    shown: ShownMessage
    reason: str = ""


class AnswerShown(msgspec.Struct, frozen=True):
    """Answer a question of the model's own."""

    shown: ShownMessage
    text: str


class ShowStatus(msgspec.Struct, frozen=True):
    pass


class StopScope(msgspec.Struct, frozen=True):
    scope: str


class Explain(msgspec.Struct, frozen=True):
    """Do nothing, and say why."""

    sentence: str


Intent = ApproveShown | DenyShown | AnswerShown | ShowStatus | StopScope | Explain


def make_button_token(text: str, digest: str, random: bytes) -> str:
    """What the buttons of one message carry: the beginning of the digest of what is shown, and a random part."""
    shown = hashlib.sha256(f"{digest}\n{text}".encode("utf-8", "replace")).hexdigest()[:DIGEST_LENGTH]
    return shown + base64.urlsafe_b64encode(random[:RANDOM_BYTES]).decode().rstrip("=")


def compose(
    decision: WaitingDecision, now: int, fits: Callable[[str], bool], random: bytes, dashboard: str = ""
) -> ChatMessage:
    """Put a decision into a message that fits; what does not fit whole cannot be approved there."""
    said, lasts = render_prompt(decision), format_duration(max(0, decision.expires_at - now) // 60_000_000 * 60_000_000)
    always, what = bool(list_rule_offers(decision)), _describe_wish(decision, said.what)
    rest = [_describe_risk(decision), f"Yes: {said.yes}. No: {said.no}."]
    rest += ["Always: the same arguments are not asked about again in this session, for 7d."] if always else []
    expires = f"It expires in {lasts}. {decision.decision}"
    text, place = _join(what, [*rest, expires], said.why, said.shown)
    readable = said.shown not in ("", "(erased)")
    if readable and fits(text):
        token = make_button_token(text, decision.digest, random)
        return ChatMessage(text, _make_buttons(decision, token, always=always), place, button=token)
    where = f"halter inbox, then: halter approve {decision.decision}"
    link = f" Or look at {dashboard}" if dashboard else ""
    why = "Not all of it fits here" if readable else "What it asks about cannot be shown"
    rest = [f"{why}, so it cannot be approved here. Read it whole: {where}{link}", expires]
    text, place = _cut(what, rest, said.why, said.shown, fits)
    token = make_button_token(text, decision.digest, random)
    return ChatMessage(text, (ChatButton("Deny", f"no:{token}"),), place, cut=True, button=token)


class AskedQuestion(msgspec.Struct, frozen=True):
    """What a model asks a person in words of its own. `decision` names it in a chat as ids name decisions."""

    session: str
    agent: str
    call: str
    text: str

    @property
    def decision(self) -> str:
        return f"{self.call}{QUESTION}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "replace")).hexdigest()


def session_of_question(decision: str) -> str:
    return decision.removesuffix(QUESTION).rpartition(".")[0]


def compose_question(one: AskedQuestion, fits: Callable[[str], bool], random: bytes) -> ChatMessage:
    """Put a question into a message that is replied to; it has no buttons."""
    what, shown = f"{one.agent} asks you something, in session {one.session}.", escape_hidden(one.text)
    rest = [f"Reply to this message with your answer, or write: /answer {one.decision} ANSWER"]
    text, place = _join(what, rest, "", shown)
    if not fits(text):
        rest.append(f"Not all of it fits here. Read it whole: halter show {one.session} --events")
        text, place = _cut(what, rest, "", shown, fits)
    return ChatMessage(text, (), place, button=make_button_token(text, one.digest, random))


def _describe_wish(decision: WaitingDecision, what: str) -> str:
    """The sentence, without a text that is shown below anyway and could look like lines of Halter's."""
    return f"{what.partition(': ')[0]}." if decision.about in ("proposal", "schedule") else what


def _join(what: str, rest: Sequence[str], why: str, shown: str) -> tuple[str, tuple[int, int]]:
    """Put what the agent wrote last, so that nothing in it can pass for a line of Halter's."""
    before = "\n".join(filter(None, (what, *rest, FOREIGN))) + "\n\n" + (f"{why}\n\n" if why else "")
    return before + shown, (len(before), len(before) + len(shown))


def _cut(
    what: str, rest: Sequence[str], why: str, shown: str, fits: Callable[[str], bool]
) -> tuple[str, tuple[int, int]]:
    """As much of what is asked about as fits, and its end is marked."""
    keep = len(shown)
    while keep and not fits(_join(what, rest, why, f"{shown[:keep]}…")[0]):
        keep = keep * 3 // 4
    while len(what) > 1 and not fits(_join(what, rest, why, "…")[0]):
        what = f"{what[: len(what) * 3 // 4]}…"
    return _join(what, rest, why, f"{shown[:keep]}…")


def _describe_risk(decision: WaitingDecision) -> str:
    words = [decision.name, decision.level, f"risk {decision.risk}" if decision.risk else ""]
    why = f": {'; '.join(decision.reasons)}" if decision.reasons else ""
    return ", ".join(filter(None, words)) + why if decision.about == "approval" else ""


def _make_buttons(decision: WaitingDecision, token: str, *, always: bool) -> tuple[ChatButton, ...]:
    no = ChatButton("Deny", f"no:{token}")
    match decision.about:
        case "cap_raise":
            return (ChatButton(f"Raise to {format_micros(_double_cap(decision))}", f"cap:{token}"), no)
        case "unknown_call":
            return ChatButton("It was done", f"yes:{token}"), ChatButton("It was not", f"no:{token}")
        case _:
            more = (ChatButton("Always", f"always:{token}"),) if always else ()
            return (ChatButton("Approve", f"yes:{token}"), no, *more)


def _double_cap(decision: WaitingDecision) -> int:
    return 2 * int(decision.digest.rpartition("=")[2])


def find_code(text: str) -> str:
    """The pairing code in a text; "" if it is none."""
    match = CODE_PATTERN.fullmatch(text.strip())
    return match[1] if match else ""


def read_reply(reply: ChatReply, state: ChannelState, asked: Mapping[str, WaitingDecision]) -> Intent:
    """What an approver wants by a reply. `asked` are the open decisions."""
    if reply.forwarded:
        return Explain("This was forwarded, and only what you write yourself counts.")
    if reply.press:
        return _read_press(reply, state, asked)
    shown = state.shown.get((reply.place, reply.message)) if reply.message else None
    if shown is not None and not STEERING_PATTERN.fullmatch(reply.text.strip()):
        return _read_words(reply.text.strip(), shown)
    return _read_command(reply, state)


def _read_press(reply: ChatReply, state: ChannelState, asked: Mapping[str, WaitingDecision]) -> Intent:
    match = BUTTON_PATTERN.fullmatch(reply.press)
    shown = state.find_button(match[2]) if match else None
    if match is None or shown is None or shown.place != reply.place:
        return Explain("This button counts no longer: look for a newer message, or at halter inbox.")
    match match[1]:
        case "no":
            return DenyShown(shown)
        case "cap":
            decision = asked.get(shown.decision)
            if decision is None or decision.about != "cap_raise":
                return Explain("This is answered already, or has expired.")
            return _approve(shown, ApprovalTerms(cap=(_double_cap(decision),)))
        case verb:
            return _approve(shown, ApprovalTerms(always=verb == "always"))


def _read_words(text: str, shown: ShownMessage) -> Intent:
    if shown.decision.endswith(QUESTION):
        return AnswerShown(shown, text)
    if text.startswith("{"):
        return _approve(shown, ApprovalTerms(edit=arguments(text.encode("utf-8", "replace"), "")))
    match = COMMAND_PATTERN.fullmatch(text)
    verb, rest = (match[1].lower(), (match[2] or "").strip()) if match else ("", "")
    match verb:
        case "yes" | "approve":
            return _approve(shown, ApprovalTerms(reason=rest))
        case "no" | "deny":
            return DenyShown(shown, rest)
        case "always":
            return _approve(shown, ApprovalTerms(always=True, reason=rest))
        case "cap":
            return _approve(shown, ApprovalTerms(cap=(amount_of(rest.removeprefix("$")),)))
        case _:
            return Explain(f"That is no answer. {HELP}")


def _approve(shown: ShownMessage, terms: ApprovalTerms) -> Intent:
    if shown.cut:
        return Explain(f"You were not shown all of it, so it cannot be approved here: halter approve {shown.decision}")
    return ApproveShown(shown, msgspec.structs.replace(terms, digest=shown.digest))


def _read_command(reply: ChatReply, state: ChannelState) -> Intent:
    match = COMMAND_PATTERN.fullmatch(reply.text.strip())
    verb, rest = (match[1].lower(), (match[2] or "").strip()) if match else ("", "")
    match verb:
        case "status":
            return ShowStatus()
        case "halt":
            return StopScope(rest or "fleet")
        case "yes" | "no" | "approve" | "deny" | "always" | "cap" | "edit" | "answer":
            decision, _, more = rest.partition(" ")
            shown = [one for one in state.shown.values() if one.place == reply.place and one.decision == decision]
            words = more if verb in ("edit", "answer") else f"{verb} {more}"
            return _read_words(words.strip(), shown[-1]) if shown else Explain(f"Name a question. {HELP}")
        case _:
            return Explain(HELP)


def describe_outcome(row: DecisionRow | None, decision: str, now: int) -> str:
    """What a message becomes when its decision is no longer open."""
    if row is None:
        return f"{decision} is no longer asked."
    what = f"{row.name} of {row.agent}" + (f", session {row.session}" if row.session else "")
    match row.verdict:
        case "approve":
            return f"Approved by {row.people}: {what}."
        case "edit":
            return f"Approved with other arguments by {row.by}: {what}."
        case "deny":
            return f"Denied by {row.by}: {what}."
        case "withdrawn":
            return f"Withdrawn, no answer is needed: {what}."
        case _ if row.expires_at <= now:
            return f"Expired without an answer, which counts as a no: {what}."
        case _:
            return f"Asked anew, in another message: {what}."
