"""The provenance check of one session: it folds the session's texts and calls, and judges the calls of its model.

Its state follows from the session's events and its agent's files, in order, so a resumed session decides as before. As
long as all text comes from trusted sources, no call is judged and no text is indexed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.events.effects import CallRefused, CallStarted
from halter.core.messages import Message, Text, ToolCall, ToolResult
from halter.core.provenance import Declaration, Flaw, FlawReason, Reads, Source
from halter.core.text import encode_body, shorten, to_one_line
from halter.core.tools import ToolSpec
from halter.core.vocabulary import REFUSAL_OUTCOMES, Origin
from halter.policy.evaluation import ResolvedPolicy
from halter.provenance.provenance import Provenance
from halter.spec.policy import ProvenanceMode

ActiveMode = Literal["observe", "ask", "strict"]
Declarations = dict[str, Declaration]

UNKNOWN_TOOL: Final = Declaration()
"""The declaration of a tool that does not exist: it reads from anyone and reaches others."""

MAX_TASK_LENGTH: Final = 300
MAX_VALUE_LENGTH: Final = 300
MAX_ARGUMENT_LENGTH: Final = 80
MAX_LINKS: Final = 20

_WHY: Final[Mapping[FlawReason, str]] = {
    "unsaid": "you did not name it for this",
    "weak": "it was found, but you did not name it",
    "amount": "you did not name this figure",
    "content": "it contains words or figures that you did not write",
    "unasked": "your task does not ask for it",
    "repeated": "an earlier call did the same to the same destination",
    "egress": "reading it sends the content of its address to others",
    "disguised": "it has invisible, look-alike or encoded characters",
    "unclear": "it is too large to check",
    "link": "no trusted source contains it",
}


_WRITERS: Final[Mapping[Reads, str]] = {
    "own": ", among your own records",
    "known": ", which known people write",
    "anyone": ", which anyone may have written",
}


def choose_provenance_mode(policy: ResolvedPolicy) -> ProvenanceMode:
    """Return the policy's mode. The default is `observe`: people see the questions before they enable them."""
    return policy.provenance or "observe"


class ProvenanceCheck:
    """Judges the calls of one session by the provenance of their values.

    As long as the session is clean, its texts and calls are only queued. The first untrusted text folds them.
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
        self,
        mode: ActiveMode,
        policy: ResolvedPolicy,
        specs: Mapping[str, ToolSpec],
        declarations: Declarations | None = None,
    ) -> None:
        """Sessions with the same policy and tools may share their cache of declarations."""
        self.mode: ActiveMode = mode
        self.clean = True
        self.locked = False
        self._policy = policy
        self._specs = specs
        self._declarations: Declarations = {} if declarations is None else declarations
        self._pending: list[tuple[Callable[..., None], *tuple[Any, ...]]] = []
        self._called_tools: dict[str, None] | None = None
        self.task = ""

    def declaration(self, tool: str) -> Declaration:
        cached = self._declarations.get(tool)
        if cached is None:
            spec = self._specs.get(tool)
            if spec is None:
                return UNKNOWN_TOOL
            cached = self._declarations[tool] = self._policy.declaration(spec)
        return cached

    def add_text(self, part: Text) -> None:
        """Add a text of the prompt."""
        if part.trusted and not part.reason:
            self.task = part.text
        source = _name_source(part.origin, part.source, part.trusted)
        taints = not part.trusted and bool(part.text.strip())
        self._fold(Provenance.add_text, part.text, source, taints=taints)

    def trust(self, text: str, name: str) -> None:
        """Add text of the agent's files, or of memories that a person accepted."""
        if text:
            self._fold(Provenance.add_text, text, Source("config", name, trusted=True), taints=False)

    def add_descriptions(self) -> None:
        """Add the descriptions of servers' tools: each server writes its own, and every prompt has them."""
        for spec in self._specs.values():
            if spec.server:
                description, source = f"{spec.name}: {spec.description}", f"the description of {spec.name}"
                self.add_text(Text(description, "tool", trusted=False, source=source))

    def mark_erased(self) -> None:
        """Add a text that is erased or unknown here; its author is unknown."""
        self._fold(Provenance.mark_erased, Source("document"), taints=True)

    def observe(self, call: ToolCall, result: ToolResult) -> None:
        """Add a call's result. A refusal is skipped, because the guard wrote it."""
        if result.outcome in REFUSAL_OUTCOMES:
            return
        declaration = self.declaration(call.tool)
        reads_own = declaration.reads in ("nothing", "trusted")
        if result.outcome != "ok" and reads_own and (declaration.reach != "none" or declaration.reads == "trusted"):
            # An error text comes from the system that the call reached, or from one on the way.
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
        """Fold the history with which a session starts. Its approvals do not count.

        The model of a `foreign` history may have read text that is missing here, so its own text is untrusted.
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
            self._fold(_act, call.tool, declaration, encode_body(call.arguments), False, taints=False)  # noqa: FBT003
        self.observe(call, result)

    def apply(self, event: CallStarted | CallRefused, body: bytes | None) -> None:
        """Fold an admitted or refused call of the model. Without a body, its arguments are erased."""
        if not isinstance(event, CallStarted):
            is_denied = event.outcome == "approval_denied" and event.decision and event.flaws
            self.locked = self.locked or bool(is_denied and self._policy.locks)
        elif self._called_tools is None or event.call not in self._called_tools:
            self._called_tools = self._called_tools or {}
            self._called_tools[event.call] = None
            if body is None:
                self._fold(Provenance.act_erased, event.tool, taints=False)
                return
            # If a rule approved the call, no person has seen these values.
            is_approved = bool(event.flaws and event.decision and event.decided_by)
            declaration = self.declaration(event.tool)
            # For a read without an approval, only the result counts.
            if is_approved or declaration.reach != "none":
                self._fold(_act, event.tool, declaration, body, is_approved, taints=False)

    def judge(self, tool: str, canonical: bytes) -> tuple[Flaw, ...]:
        """Return the flaws of a call about which a person must be asked. The state does not change."""
        if self.clean:
            return ()
        return self._provenance.judge(tool, self.declaration(tool), _read_arguments(canonical)).flaws

    def describe_writers(self, source: str) -> str:
        """Describe who may have written the results of a tool; empty if the source is no tool."""
        return _WRITERS.get(self.declaration(source).reads, "") if source in self._specs else ""

    def can_wait(self, tool: str) -> bool:
        """Return whether a call can wait for the end of the turn, because the model does not need its result."""
        declaration = self.declaration(tool)
        return (
            declaration.reach != "none" and declaration.reads in ("nothing", "trusted", "own") and not declaration.mints
        )

    def has_dependencies(self, tool: str) -> bool:
        """Return whether what other calls did can matter to a call: it reads or changes something."""
        declaration = self.declaration(tool)
        return declaration.reads != "nothing" or declaration.reach != "none"

    def keeps_order(self, tool: str) -> bool:
        """Return whether calls of a tool must be judged one after the other, because each affects the next one."""
        return not self.clean and self.declaration(tool).reach != "none"

    def unsaid_links(self, answer: str) -> tuple[Flaw, ...]:
        return () if self.clean else self._provenance.unsaid_links(answer)

    def _fold(self, step: Callable[..., None], *arguments: Any, taints: bool) -> None:
        if not self.clean:
            step(self._provenance, *arguments)
            return
        self._pending.append((step, *arguments))
        if taints:
            # Created late, to save memory while a session waits for its first answer.
            provenance = self._provenance = Provenance()
            pending, self._pending, self.clean = self._pending, [], False
            for pending_step, *pending_arguments in pending:
                pending_step(provenance, *pending_arguments)


@lru_cache(maxsize=256)
def _name_source(origin: Origin, name: str, trusted: bool) -> Source:  # noqa: FBT001 As the text has it.
    return Source(origin, name, trusted)


def _act(
    provenance: Provenance,
    tool: str,
    declaration: Declaration,
    body: bytes,
    is_approved: bool,  # noqa: FBT001
) -> None:
    arguments = _read_arguments(body)
    if is_approved:
        provenance.approve(tool, declaration, arguments, provenance.judge(tool, declaration, arguments).flaws)
    provenance.act(tool, declaration, arguments)


_DECODE: Final = msgspec.json.Decoder().decode


def _read_arguments(text: str | bytes) -> Mapping[str, Any]:
    try:
        arguments: Any = _DECODE(text or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return {"": text if isinstance(text, str) else text.decode("utf-8", "replace")}
    return cast("Mapping[str, Any]", arguments) if isinstance(arguments, dict) else {"": arguments}


def strip_flaws(flaws: Sequence[Flaw]) -> tuple[Flaw, ...]:
    """Remove the values and quotes from flaws, for events, which are never erased."""
    return tuple(
        msgspec.structs.replace(flaw, argument=_name_argument(flaw.argument), value="", quote="") for flaw in flaws
    )


def _name_argument(path: str) -> str:
    """Return the top-level name of an argument. The keys inside it are the model's own text."""
    return shorten(to_one_line(path.split(".", 1)[0]), MAX_ARGUMENT_LENGTH)


def describe_flaw(flaw: Flaw) -> str:
    """Describe why a person is asked about a value, without the value itself."""
    where = f"; found in {flaw.source}" if flaw.source else ""
    return f"{_name_argument(flaw.argument) or 'the call'}: {_WHY[flaw.reason]}{where}"


def explain_flaws(agent: str, tool: str, flaws: Sequence[Flaw], check: ProvenanceCheck) -> str:
    """Render the question for a person: the call, its flawed values, their sources and authors, and the task."""
    lines = [f"{agent} wants to call {tool} after reading untrusted content:"]
    for flaw in flaws:
        value = f" {shorten(flaw.value, MAX_VALUE_LENGTH)!r}" if flaw.argument else ""
        lines.append(f"- {_name_argument(flaw.argument) or tool}{value}: {_WHY[flaw.reason]}.")
        if flaw.quote:
            where = f"{flaw.source}{check.describe_writers(flaw.source)}"
            lines.append(f"  Found in {where}: “{_quote_line(flaw.quote)}”")
    if check.task.strip():
        lines.append(f"The task said: “{shorten(' '.join(check.task.split()), MAX_TASK_LENGTH)}”")
    return "\n".join(lines)


def _quote_line(line: str) -> str:
    """Quote an untrusted line so that it cannot close the quotes, or reverse or hide letters."""
    return to_one_line(shorten(line, MAX_VALUE_LENGTH)).replace("“", "'").replace("”", "'")


def describe_links(flaws: Sequence[Flaw]) -> str:
    """Describe the links of an answer that come from no trusted source. No interface makes them clickable."""
    if not flaws:
        return ""
    links = [
        f"{shorten(flaw.value, MAX_VALUE_LENGTH)}{f' (from {flaw.source})' if flaw.source else ''}" for flaw in flaws
    ]
    return f"The answer has links from no trusted source: {', '.join(links[:MAX_LINKS])}"
