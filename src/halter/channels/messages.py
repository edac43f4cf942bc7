"""Messages for open decisions, and the intents of replies: pure, and the same for every platform.

An approval covers exactly what was shown. A message whose text had to be cut has no button that approves, and a reply
to it cannot approve either. Buttons carry the beginning of the digest of the text and a random part; only the digest of
both is stored, so a button can be neither guessed nor made from the store.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from halter.core.clock import format_duration
from halter.core.money import format_exact_micros
from halter.core.rows import DecisionRow
from halter.core.text import escape_hidden
from halter.guard.approvals import PendingDecision
from halter.operations.decisions import ApprovalTerms, arguments
from halter.operations.money import amount_of
from halter.operations.rules import list_rule_offers
from halter.present.decisions import render_prompt
from halter.state.channel import ChannelState, ShownMessage

Verb = Literal["yes", "no", "always", "cap"]

BUTTON_PATTERN: Final = re.compile(r"(yes|no|always|cap):([0-9a-f]{10}[A-Za-z0-9_-]{22})")
CODE_PATTERN: Final = re.compile(r"(?:/start|/pair)?(?:@\S+)?\s*([A-Z2-7]{4}-[A-Z2-7]{4}-[A-Z2-7]{4})")
COMMAND_PATTERN: Final = re.compile(r"/?(\w+)(?:@\w+)?(?:\s+(.*))?", re.DOTALL)
STEERING_PATTERN: Final = re.compile(r"/(halt|status)(@\w+)?(\s.*)?|halt", re.DOTALL | re.IGNORECASE)
"""Commands that are recognized also in a reply to a question; `halt` also works without a slash."""
QUESTION: Final = "/question"
RANDOM_BYTES: Final = 16
DIGEST_LENGTH: Final = 10
HELP: Final = (
    "Press a button below a decision, or reply to it: yes, no REASON, always, cap 2.50, or other arguments as a JSON "
    "object. A question takes any reply. /status shows the agents, /halt stops all of them, /halt AGENT stops one."
)

FOREIGN: Final = "Everything below was written by the agent:"


class ChatButton(msgspec.Struct, frozen=True):
    label: str
    data: str


class ChatMessage(msgspec.Struct, frozen=True):
    """A message for a chat. `verbatim_span` is the start and end index of the part that is set verbatim."""

    text: str
    buttons: tuple[ChatButton, ...] = ()
    verbatim_span: tuple[int, int] = (0, 0)
    cut: bool = False
    button: str = ""
    silent: bool = False


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """An incoming button press or text of an account, possibly in reply to a message.

    `mark` orders the replies of a channel; `handle` identifies a press to the platform.
    """

    mark: str
    account: str
    chat: str
    message: str = ""
    press: str = ""
    text: str = ""
    handle: str = ""
    forwarded: bool = False


class ApproveShown(msgspec.Struct, frozen=True):
    """Approve a decision as it was shown."""

    message: ShownMessage
    terms: ApprovalTerms


class DenyShown(msgspec.Struct, frozen=True):
    """Deny a decision."""

    message: ShownMessage
    reason: str = ""


class AnswerShown(msgspec.Struct, frozen=True):
    """Answer a question of the model."""

    message: ShownMessage
    text: str


class ShowStatus(msgspec.Struct, frozen=True):
    pass


class StopScope(msgspec.Struct, frozen=True):
    scope: str


class Explain(msgspec.Struct, frozen=True):
    """Do nothing, and explain why."""

    sentence: str


Intent = ApproveShown | DenyShown | AnswerShown | ShowStatus | StopScope | Explain


def make_button_token(text: str, digest: str, random: bytes) -> str:
    """Make the token in the buttons of a message: the beginning of the digest of its text, and a random part."""
    prefix = hashlib.sha256(f"{digest}\n{text}".encode("utf-8", "replace")).hexdigest()[:DIGEST_LENGTH]
    return prefix + base64.urlsafe_b64encode(random[:RANDOM_BYTES]).decode().rstrip("=")


def compose(
    decision: PendingDecision, now: int, fits: Callable[[str], bool], random: bytes, dashboard: str = ""
) -> ChatMessage:
    """Compose the message of a decision; one that does not fit is cut and cannot be approved in the chat."""
    prompt, remaining = (
        render_prompt(decision),
        format_duration(max(0, decision.expires_at - now) // 60_000_000 * 60_000_000),
    )
    has_rules, heading = bool(list_rule_offers(decision)), _describe_wish(decision, prompt.what)
    lines = [_describe_risk(decision), f"Yes: {prompt.yes}. No: {prompt.no}."]
    lines += ["Always: calls with the same arguments need no approval in this session for 7d."] if has_rules else []
    expires = f"Expires in {remaining}. {decision.decision}"
    text, span = _join(heading, [*lines, expires], prompt.why, prompt.details)
    readable = prompt.details not in ("", "(erased)")
    if readable and fits(text):
        token = make_button_token(text, decision.digest, random)
        return ChatMessage(text, _make_buttons(decision, token, always=has_rules), span, button=token)
    command = f"halter inbox, then: halter approve {decision.decision}"
    link = f" Or open {dashboard}" if dashboard else ""
    reason = "It does not fit here" if readable else "Its content cannot be shown"
    lines = [f"{reason}, so it cannot be approved here. Read all of it: {command}{link}", expires]
    text, span = _cut(heading, lines, prompt.why, prompt.details, fits)
    token = make_button_token(text, decision.digest, random)
    return ChatMessage(text, (ChatButton("Deny", f"no:{token}"),), span, cut=True, button=token)


class AskedQuestion(msgspec.Struct, frozen=True):
    """A question of a model to a person. `decision` is its id in chats."""

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


def compose_question(question: AskedQuestion, fits: Callable[[str], bool], random: bytes) -> ChatMessage:
    """Compose the message of a question, which is answered by a reply; it has no buttons."""
    heading, quoted_text = (
        f"{question.agent} asks a question in session {question.session}.",
        escape_hidden(question.text),
    )
    lines = [f"Reply to this message with your answer, or write: /answer {question.decision} ANSWER"]
    text, span = _join(heading, lines, "", quoted_text)
    if not fits(text):
        lines.append(f"It does not fit here. Read all of it: halter show {question.session} --events")
        text, span = _cut(heading, lines, "", quoted_text, fits)
    return ChatMessage(text, (), span, button=make_button_token(text, question.digest, random))


def _describe_wish(decision: PendingDecision, heading: str) -> str:
    """Return the heading without text that is quoted below anyway and could pass for Halter's own."""
    return f"{heading.partition(': ')[0]}." if decision.about in ("proposal", "schedule") else heading


def _join(heading: str, lines: Sequence[str], reason: str, quoted_text: str) -> tuple[str, tuple[int, int]]:
    """Join a message with the agent's text last, so that none of it can pass for Halter's own."""
    prefix = "\n".join(filter(None, (heading, *lines, FOREIGN))) + "\n\n" + (f"{reason}\n\n" if reason else "")
    return prefix + quoted_text, (len(prefix), len(prefix) + len(quoted_text))


def _cut(
    heading: str, lines: Sequence[str], reason: str, quoted_text: str, fits: Callable[[str], bool]
) -> tuple[str, tuple[int, int]]:
    """Join a message with as much of the quoted text as fits, and mark the cut."""
    length = len(quoted_text)
    while length and not fits(_join(heading, lines, reason, f"{quoted_text[:length]}…")[0]):
        length = length * 3 // 4
    while len(heading) > 1 and not fits(_join(heading, lines, reason, "…")[0]):
        heading = f"{heading[: len(heading) * 3 // 4]}…"
    return _join(heading, lines, reason, f"{quoted_text[:length]}…")


def _describe_risk(decision: PendingDecision) -> str:
    parts = [decision.name, decision.level, f"risk {decision.risk}" if decision.risk else ""]
    reasons = f": {'; '.join(decision.reasons)}" if decision.reasons else ""
    return f"{', '.join(filter(None, parts))}{reasons}\nAsked because: {decision.cause}." if decision.cause else ""


def _make_buttons(decision: PendingDecision, token: str, *, always: bool) -> tuple[ChatButton, ...]:
    no = ChatButton("Deny", f"no:{token}")
    match decision.about:
        case "cap_raise":
            return (ChatButton(f"Raise to {format_exact_micros(_double_cap(decision))}", f"cap:{token}"), no)
        case "unknown_call":
            return ChatButton("It was done", f"yes:{token}"), ChatButton("It was not", f"no:{token}")
        case _:
            always_buttons = (ChatButton("Always", f"always:{token}"),) if always else ()
            return (ChatButton("Approve", f"yes:{token}"), no, *always_buttons)


def _double_cap(decision: PendingDecision) -> int:
    return 2 * int(decision.digest.rpartition("=")[2])


def find_code(text: str) -> str:
    """Return the pairing code in a text; "" without one."""
    match = CODE_PATTERN.fullmatch(text.strip())
    return match[1] if match else ""


def read_reply(reply: ChatReply, state: ChannelState, open_decisions: Mapping[str, PendingDecision]) -> Intent:
    """Parse an approver's reply into an intent."""
    if reply.forwarded:
        return Explain("Forwarded messages are ignored. Write your answer yourself.")
    if reply.press:
        return _read_press(reply, state, open_decisions)
    message = state.messages.get((reply.chat, reply.message)) if reply.message else None
    if message is not None and not STEERING_PATTERN.fullmatch(reply.text.strip()):
        return _read_words(reply.text.strip(), message)
    return _read_command(reply, state)


def _read_press(reply: ChatReply, state: ChannelState, open_decisions: Mapping[str, PendingDecision]) -> Intent:
    match = BUTTON_PATTERN.fullmatch(reply.press)
    message = state.find_button(match[2]) if match else None
    if match is None or message is None or message.place != reply.chat:
        return Explain("This button has expired. Use a newer message, or halter inbox.")
    match match[1]:
        case "no":
            return DenyShown(message)
        case "cap":
            decision = open_decisions.get(message.decision)
            if decision is None or decision.about != "cap_raise":
                return Explain("Already answered, or expired.")
            return _approve(message, ApprovalTerms(cap=(_double_cap(decision),)))
        case verb:
            return _approve(message, ApprovalTerms(always=verb == "always"))


def _read_words(text: str, message: ShownMessage) -> Intent:
    if message.decision.endswith(QUESTION):
        return AnswerShown(message, text)
    if text.startswith("{"):
        return _approve(message, ApprovalTerms(edit=arguments(text.encode("utf-8", "replace"), "")))
    match = COMMAND_PATTERN.fullmatch(text)
    verb, argument = (match[1].lower(), (match[2] or "").strip()) if match else ("", "")
    match verb:
        case "yes" | "approve":
            return _approve(message, ApprovalTerms(reason=argument))
        case "no" | "deny":
            return DenyShown(message, argument)
        case "always":
            return _approve(message, ApprovalTerms(always=True, reason=argument))
        case "cap":
            return _approve(message, ApprovalTerms(cap=(amount_of(argument.removeprefix("$")),)))
        case _:
            return Explain(f"Unknown answer. {HELP}")


def _approve(message: ShownMessage, terms: ApprovalTerms) -> Intent:
    if message.cut:
        return Explain(f"The message was cut, so it cannot be approved here. Use halter approve {message.decision}")
    return ApproveShown(message, msgspec.structs.replace(terms, digest=message.digest))


def _read_command(reply: ChatReply, state: ChannelState) -> Intent:
    match = COMMAND_PATTERN.fullmatch(reply.text.strip())
    verb, argument = (match[1].lower(), (match[2] or "").strip()) if match else ("", "")
    match verb:
        case "status":
            return ShowStatus()
        case "halt":
            return StopScope(argument or "fleet")
        case "yes" | "no" | "approve" | "deny" | "always" | "cap" | "edit" | "answer":
            decision, _, content = argument.partition(" ")
            messages = [one for one in state.messages.values() if one.place == reply.chat and one.decision == decision]
            text = content if verb in ("edit", "answer") else f"{verb} {content}"
            return (
                _read_words(text.strip(), messages[-1]) if messages else Explain(f"Give the id of a decision. {HELP}")
            )
        case _:
            return Explain(HELP)


def describe_outcome(row: DecisionRow | None, decision: str, now: int) -> str:
    """Describe the outcome of a decision, which replaces its message."""
    if row is None:
        return f"{decision} was withdrawn."
    subject = f"{row.name} of {row.agent}" + (f", session {row.session}" if row.session else "")
    match row.verdict:
        case "approve":
            return f"Approved by {row.people}: {subject}."
        case "edit":
            return f"Approved with other arguments by {row.by}: {subject}."
        case "deny":
            return f"Denied by {row.by}: {subject}."
        case "withdrawn":
            return f"Withdrawn, no answer needed: {subject}."
        case _ if row.expires_at <= now:
            return f"Expired without an answer, so denied: {subject}."
        case _:
            return f"Asked again in another message: {subject}."
