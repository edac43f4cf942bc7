"""The injection brake of one session: it folds what the session heard and did, and judges the calls of its model.

All of its state follows from the session's events and its agent's files, in order, so that a resumed session decides as
the live one. While only trusted places have spoken nothing is judged, and nothing is read before that has an end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.effect_events import CallRefused, CallStarted
from halter.core.messages import Message, Text, ToolCall, ToolResult
from halter.core.provenance import Declaration, Flaw, FlawReason, Reads, Source
from halter.core.spec import ProvenanceMode, ResolvedPolicy
from halter.core.text import shorten, to_body, to_one_line
from halter.core.tools import ToolSpec
from halter.core.vocabulary import REFUSAL_OUTCOMES, Origin
from halter.guard.provenance import Provenance

ActiveMode = Literal["observe", "ask", "strict"]
Declarations = dict[str, Declaration]

UNKNOWN_TOOL: Final = Declaration()
"""A tool that is gone: it read from anyone, and reached others."""

LONGEST_TASK: Final = 300
LONGEST_VALUE: Final = 300
LONGEST_ARGUMENT: Final = 80
MOST_LINKS: Final = 20

_WHY: Final[Mapping[FlawReason, str]] = {
    "unsaid": "you did not name it for this",
    "weak": "it was found, but you did not name it",
    "amount": "you did not name this figure",
    "content": "it has words or figures that you did not say",
    "unasked": "your task does not ask for it",
    "repeated": "it was done before, to the same place",
    "egress": "reading it sends what stands in the address to others",
    "disguised": "it has invisible, look-alike or encoded characters",
    "unclear": "it is too large to be looked through",
    "link": "no trusted place said it",
}


_WRITERS: Final[Mapping[Reads, str]] = {
    "own": ", among your own records",
    "known": ", which people of the house write",
    "anyone": ", which anyone may have written",
}


def choose_provenance_mode(policy: ResolvedPolicy) -> ProvenanceMode:
    """The policy's mode. Without one it observes: a person sees what would be asked before they switch it on."""
    return policy.provenance or "observe"


class SessionBrake:
    """What one session knows of where its values come from.

    While it is clean, what it hears and does is only kept; it is folded when the first untrusted text comes.
    """

    __slots__ = (
        "_called_tools",
        "_declarations",
        "_pending",
        "_policy",
        "_provenance",
        "_specs",
        "clean",
        "locked",
        "mode",
        "task",
    )

    def __init__(
        self, mode: ActiveMode, policy: ResolvedPolicy, specs: Mapping[str, ToolSpec], known: Declarations | None = None
    ) -> None:
        """Sessions with the same policy and tools may share what they come to know of these."""
        self.mode: ActiveMode = mode
        self.clean = True
        self.locked = False
        self._policy = policy
        self._specs = specs
        self._declarations: Declarations = {} if known is None else known
        self._pending: list[tuple[Callable[..., None], *tuple[Any, ...]]] = []
        self._called_tools: dict[str, None] | None = None
        self.task = ""

    def declaration(self, tool: str) -> Declaration:
        found = self._declarations.get(tool)
        if found is None:
            spec = self._specs.get(tool)
            if spec is None:
                return UNKNOWN_TOOL
            found = self._declarations[tool] = self._policy.declaration(spec)
        return found

    def add_text(self, part: Text) -> None:
        """A text reached the prompt."""
        if part.trusted and not part.reason:
            self.task = part.text
        source = _name_source(part.origin, part.source, part.trusted)
        taints = not part.trusted and bool(part.text.strip())
        self._fold(Provenance.add_text, part.text, source, taints=taints)

    def trust(self, text: str, name: str) -> None:
        """The agent's files, or what a person kept, say this."""
        if text:
            self._fold(Provenance.add_text, text, Source("config", name, trusted=True), taints=False)

    def add_descriptions(self) -> None:
        """Every prompt has the names, the descriptions and the schemas of tools, and a server writes its own."""
        for spec in self._specs.values():
            if spec.server:
                about, source = f"{spec.name}: {spec.description}", f"the description of {spec.name}"
                self.add_text(Text(about, "tool", trusted=False, source=source))

    def mark_erased(self) -> None:
        """A text is erased, or was never seen here; who wrote it is unknown."""
        self._fold(Provenance.mark_erased, Source("document"), taints=True)

    def observe(self, call: ToolCall, result: ToolResult) -> None:
        """A result reached the prompt; a refusal is in the guard's own words."""
        if result.outcome in REFUSAL_OUTCOMES:
            return
        declaration = self.declaration(call.tool)
        reads_own = declaration.reads in ("nothing", "trusted")
        if result.outcome != "ok" and reads_own and (declaration.reach != "none" or declaration.reads == "trusted"):
            # Why it failed is said by the place that it reached, or by one on the way.
            self.add_text(Text(result.text, "tool", trusted=False, source=call.tool))
            return
        arguments = _read_arguments(call.arguments)
        if self.clean:
            taints = not reads_own and bool(result.text.strip())
            self._fold(Provenance.observe, call.tool, declaration, arguments, result.text, taints=taints)
        else:
            self._provenance.observe(call.tool, declaration, arguments, result.text)

    def observe_erased(self, call: ToolCall) -> None:
        declaration = self.declaration(call.tool)
        taints = declaration.reads not in ("nothing", "trusted")
        self._fold(Provenance.observe_erased, call.tool, declaration, taints=taints)

    def recall(self, messages: Iterable[Message], *, foreign: bool, denied: bool) -> None:
        """Fold what a session begins with, as if it had happened here; what a person agreed to there counts no more.

        The model of a `foreign` history may have read what is not shown, so its words are those of others.
        """
        self.locked = self.locked or (denied and self._policy.locks)
        calls: dict[str, ToolCall] = {}
        for message in messages:
            for part in message.parts:
                match part:
                    case ToolCall():
                        calls[part.id] = part
                    case ToolResult():
                        self._recall_call(calls.get(part.id) or ToolCall(part.id, part.tool, ""), part)
                    case Text() if message.role == "assistant":
                        if foreign:
                            self.add_text(msgspec.structs.replace(part, trusted=False))
                    case Text() if not part.reason or not part.trusted:
                        self.add_text(part)
                    case Text():
                        pass

    def _recall_call(self, call: ToolCall, result: ToolResult) -> None:
        declaration = self.declaration(call.tool)
        if result.outcome not in REFUSAL_OUTCOMES and declaration.reach != "none":
            self._fold(_act, call.tool, declaration, to_body(call.arguments), False, taints=False)  # noqa: FBT003
        self.observe(call, result)

    def apply(self, event: CallStarted | CallRefused, body: bytes | None) -> None:
        """Fold a call of the model that was let through, or refused; without a body, its arguments are erased."""
        if not isinstance(event, CallStarted):
            denied = event.outcome == "approval_denied" and event.decision and event.flaws
            self.locked = self.locked or bool(denied and self._policy.locks)
        elif self._called_tools is None or event.call not in self._called_tools:
            self._called_tools = self._called_tools or {}
            self._called_tools[event.call] = None
            if body is None:
                self._fold(Provenance.act_erased, event.tool, taints=False)
                return
            # By a rule, no person has seen these values.
            agreed = bool(event.flaws and event.decision and event.decided_by)
            declaration = self.declaration(event.tool)
            # A read that no person was asked about leaves nothing but its result.
            if agreed or declaration.reach != "none":
                self._fold(_act, event.tool, declaration, body, agreed, taints=False)

    def judge(self, tool: str, canonical: bytes) -> tuple[Flaw, ...]:
        """What a person must be asked before this call; changes nothing."""
        if self.clean:
            return ()
        return self._provenance.judge(tool, self.declaration(tool), _read_arguments(canonical)).flaws

    def describe_writers(self, source: str) -> str:
        """Who may have written what a source says, if it is a tool."""
        return _WRITERS.get(self.declaration(source).reads, "") if source in self._specs else ""

    def can_wait(self, tool: str) -> bool:
        """Whether a call may be made at the end of the turn: the model needs nothing of what it returns."""
        found = self.declaration(tool)
        return found.reach != "none" and found.reads in ("nothing", "trusted", "own") and not found.mints

    def keeps_order(self, tool: str) -> bool:
        """Whether calls of a tool must be judged one after the other: each act counts for the next."""
        return not self.clean and self.declaration(tool).reach != "none"

    def unsaid_links(self, answer: str) -> tuple[Flaw, ...]:
        return () if self.clean else self._provenance.unsaid_links(answer)

    def _fold(self, step: Callable[..., None], *said: Any, taints: bool) -> None:
        if not self.clean:
            step(self._provenance, *said)
            return
        self._pending.append((step, *said))
        if taints:
            # Only now: a session that waits for its first answer needs none.
            seen = self._provenance = Provenance()
            kept, self._pending, self.clean = self._pending, [], False
            for each, *known in kept:
                each(seen, *known)


@lru_cache(maxsize=256)
def _name_source(origin: Origin, name: str, trusted: bool) -> Source:  # noqa: FBT001 As the text has it.
    return Source(origin, name, trusted)


def _act(seen: Provenance, tool: str, declaration: Declaration, body: bytes, agreed: bool) -> None:  # noqa: FBT001
    arguments = _read_arguments(body)
    if agreed:
        seen.approve(tool, declaration, arguments, seen.judge(tool, declaration, arguments).flaws)
    seen.act(tool, declaration, arguments)


_DECODE: Final = msgspec.json.Decoder().decode


def _read_arguments(text: str | bytes) -> Mapping[str, Any]:
    try:
        found: Any = _DECODE(text or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return {"": text if isinstance(text, str) else text.decode("utf-8", "replace")}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {"": found}


def strip_flaws(flaws: Sequence[Flaw]) -> tuple[Flaw, ...]:
    """What a fact may keep of flaws: facts are never erased, so no value and no quote."""
    return tuple(
        msgspec.structs.replace(flaw, argument=_name_argument(flaw.argument), value="", quote="") for flaw in flaws
    )


def _name_argument(path: str) -> str:
    """An argument as a fact and a question name it: keys inside of it are the model's own words."""
    return shorten(to_one_line(path.split(".", 1)[0]), LONGEST_ARGUMENT)


def describe_flaw(flaw: Flaw) -> str:
    """Why one value is asked about, without the value."""
    where = f"; it stands in {flaw.source}" if flaw.source else ""
    return f"{_name_argument(flaw.argument) or 'the call'}: {_WHY[flaw.reason]}{where}"


def explain_flaws(agent: str, tool: str, flaws: Sequence[Flaw], brake: SessionBrake) -> str:
    """A question for a person: what would be done, with which value, who wrote it where, and what the task said."""
    lines = [f"{agent} wants to call {tool}, after it has read what others wrote:"]
    for flaw in flaws:
        value = f" {shorten(flaw.value, LONGEST_VALUE)!r}" if flaw.argument else ""
        lines.append(f"- {_name_argument(flaw.argument) or tool}{value}: {_WHY[flaw.reason]}.")
        if flaw.quote:
            where = f"{flaw.source}{brake.describe_writers(flaw.source)}"
            lines.append(f"  It stands in {where}: “{_quote_line(flaw.quote)}”")
    if brake.task.strip():
        lines.append(f"The task said: “{shorten(' '.join(brake.task.split()), LONGEST_TASK)}”")
    return "\n".join(lines)


def _quote_line(line: str) -> str:
    """A line of others within quotes that it cannot end, without marks that turn or hide letters."""
    return to_one_line(shorten(line, LONGEST_VALUE)).replace("“", "'").replace("”", "'")


def describe_links(flaws: Sequence[Flaw]) -> str:
    """Warn of links in an answer that no trusted place said; no face makes them clickable."""
    if not flaws:
        return ""
    named = [f"{shorten(flaw.value, LONGEST_VALUE)}{f' (from {flaw.source})' if flaw.source else ''}" for flaw in flaws]
    return f"No trusted place said these links of the answer: {', '.join(named[:MOST_LINKS])}"
