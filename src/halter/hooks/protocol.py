"""What the hooks of each program send, and what they take for an answer.

Four programs, one event and one answer each: `Dialect.parse` reads what arrives on stdin, `Dialect.render` writes exit
code, stdout and stderr. A refusal is always in the form that the program is known to obey.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, cast

import msgspec

from halter.core.errors import HalterError
from halter.hooks.client import BLOCKED

Moment = Literal["before", "after", "failed", "refused", "ended", "other"]
"""Before a call, after it, after its failure, after the program's own user refused it, at the end of a session."""


class UnreadableEvent(HalterError):
    """What a hook sent is no event that this version knows."""


class HookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a program. `call` is the program's own id of a tool call, where it gives one.

    `attended` says that a person sits before the program.
    """

    moment: Moment
    session: str
    call: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = {}
    response: Any = None
    error: str = ""
    cwd: str = ""
    attended: bool = True


class HookAdmission(msgspec.Struct, frozen=True):
    """The call may run; `approved_by` a person, perhaps with other arguments."""

    approved_by: str = ""
    arguments: Mapping[str, Any] | None = None


class HookRefusal(msgspec.Struct, frozen=True):
    """The call must not run. `stops` ends the program's turn as well."""

    sentence: str
    stops: bool = False


class HookQuestion(msgspec.Struct, frozen=True):
    """A person has not decided yet. What is `alone` may be put off by the program itself."""

    decision: str
    alone: bool = True

    @property
    def sentence(self) -> str:
        return (
            f"A person has to decide first: pending decision {self.decision}. Go on with something else, and repeat "
            "the same call later with the same arguments: it runs once it is approved."
        )


class HookSettlement(msgspec.Struct, frozen=True):
    """The outcome is recorded. `masked` stands in place of a result with secrets; `stop` says why the turn ends."""

    masked: Any = None
    stop: str = ""


HookAnswer = HookAdmission | HookRefusal | HookQuestion | HookSettlement


class HookReply(msgspec.Struct, frozen=True):
    """What the hook's program prints, and its exit code."""

    code: int = 0
    out: bytes = b"{}"
    err: bytes = b""


def block(sentence: str) -> HookReply:
    """Block in the one form that all programs obey. The sentence must not be empty: one of them ignores that."""
    return HookReply(BLOCKED, b"", f"{sentence or 'Blocked by Halter.'}\n".encode("utf-8", "replace"))


class Dialect(ABC):
    """How one program speaks. `edits` says that it takes other arguments than its model wrote."""

    PROGRAM: ClassVar[str]
    TITLE: ClassVar[str]
    EVENTS: ClassVar[Mapping[str, Moment]]
    EDITS: ClassVar[bool] = False
    BYPASSES: ClassVar[tuple[str, ...]] = ()
    """What goes round its hooks, as far as it is known."""

    def parse(self, data: bytes, *, attended: bool) -> HookEvent:
        raw = _decode_object(data)
        name = _text(raw, "hook_event_name")
        return self._event(self.EVENTS.get(name, "other"), raw, attended=attended)

    def _event(self, moment: Moment, raw: Mapping[str, Any], *, attended: bool) -> HookEvent:
        acts = moment in {"before", "after", "failed", "refused"}
        return HookEvent(
            moment=moment,
            session=_text(raw, "session_id"),
            call=_optional_text(raw, "tool_use_id"),
            tool=_text(raw, "tool_name") if acts else "",
            arguments=_object(raw, "tool_input") if acts else {},
            response=raw.get("tool_response"),
            error=_optional_text(raw, "error"),
            cwd=_optional_text(raw, "cwd"),
            attended=attended,
        )

    @abstractmethod
    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply: ...


class ClaudeCode(Dialect):
    PROGRAM: ClassVar[str] = "claude"
    TITLE: ClassVar[str] = "Claude Code"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {
            "PreToolUse": "before",
            "PostToolUse": "after",
            "PostToolUseFailure": "failed",
            "PermissionDenied": "refused",
            "SessionEnd": "ended",
        }
    )
    EDITS: ClassVar[bool] = True
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "`claude --bare` or CLAUDE_CODE_SIMPLE, and `--safe-mode`: no hooks at all",
        "`--setting-sources` without the scope that has the hooks, and CLAUDE_CODE_PERSONAL_HOOKS_OFF",
        "`disableAllHooks` in a settings file; managed settings with `allowManagedHooksOnly` close this",
        "another or an older `claude` binary",
        "`@file` mentions in a prompt, which read a file without a tool call",
        "what a command that was admitted starts by itself",
    )

    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply:
        match answer:
            case HookAdmission(approved_by="", arguments=None):
                # Its own permission rules hold on: Halter allows nothing that they would refuse.
                return HookReply()
            case HookAdmission(approved_by=by, arguments=arguments):
                more = {} if arguments is None else {"updatedInput": arguments}
                return _decide("allow", f"Approved by {by or 'the policy'} in Halter.", **more)
            case HookRefusal(sentence=sentence, stops=True):
                return _decide("deny", sentence, {"continue": False, "stopReason": sentence})
            case HookRefusal(sentence=sentence):
                return _decide("deny", sentence)
            case HookQuestion():
                can_defer = answer.alone and not event.attended
                return _decide("defer" if can_defer else "deny", answer.sentence)
            case HookSettlement():
                return self._render_settlement(answer, event)

    def _render_settlement(self, answer: HookSettlement, event: HookEvent) -> HookReply:
        raw: dict[str, Any] = {}
        if answer.masked is not None:
            key = "updatedMCPToolOutput" if event.tool.startswith("mcp__") else "updatedToolOutput"
            raw["hookSpecificOutput"] = {"hookEventName": "PostToolUse", key: answer.masked}
        if answer.stop:
            raw |= {"continue": False, "stopReason": answer.stop}
        return HookReply(out=msgspec.json.encode(raw))


def _decide(verdict: str, reason: str, beside: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> HookReply:
    said = {
        "hookEventName": "PreToolUse",
        "permissionDecision": verdict,
        "permissionDecisionReason": reason or "Halter.",
        **more,
    }
    return HookReply(out=msgspec.json.encode({**beside, "hookSpecificOutput": said}))


class Codex(Dialect):
    """Its output is strict: an unknown key or value makes it run the tool. So it gets `{}` or exit code 2."""

    PROGRAM: ClassVar[str] = "codex"
    TITLE: ClassVar[str] = "Codex"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"PreToolUse": "before", "PostToolUse": "after", "SessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "hooks that were not trusted in Codex, or were changed since: they are skipped without a word",
        "a hook that is stopped from outside until its timeout: Codex then runs the tool",
        "another CODEX_HOME, another or an older `codex` binary",
        "what a command that was admitted starts by itself",
    )

    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply:
        del event
        match answer:
            case HookAdmission() | HookSettlement(stop=""):
                return HookReply()
            case HookRefusal(sentence=sentence) | HookSettlement(stop=sentence):
                return block(sentence)
            case HookQuestion():
                return block(answer.sentence)


class GeminiCli(Dialect):
    """It gives a call no id. Of a result that is refused, its model sees the reason in its place: the masked text."""

    PROGRAM: ClassVar[str] = "gemini"
    TITLE: ClassVar[str] = "Gemini CLI"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"BeforeTool": "before", "AfterTool": "after", "SessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "hooks that are switched off in its settings or with `/hooks disable`",
        "a hook that is stopped from outside until its timeout: Gemini CLI then runs the tool",
        "another home folder, another or an older `gemini` binary",
        "what a command that was admitted starts by itself",
    )

    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply:
        match answer:
            case HookAdmission():
                return HookReply()
            case HookRefusal(sentence=sentence):
                return block(sentence)
            case HookQuestion():
                return block(answer.sentence)
            case HookSettlement(masked=masked, stop=stop):
                raw: dict[str, Any] = {}
                if masked is not None:
                    raw |= {"decision": "deny", "reason": _find_model_text(masked)}
                if stop:
                    raw |= {"continue": False, "stopReason": stop}
                return HookReply(out=msgspec.json.encode(raw))


def _find_model_text(response: Any) -> str:
    content = response.get("llmContent", response) if isinstance(response, dict) else response  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


class Cursor(Dialect):
    """Its session is a conversation. A refusal is said in its own words, with exit code 2 as well."""

    PROGRAM: ClassVar[str] = "cursor"
    TITLE: ClassVar[str] = "Cursor"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"preToolUse": "before", "postToolUse": "after", "postToolUseFailure": "failed", "sessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "completions in the editor (Tab), which are no tool calls",
        "hooks that are switched off in its settings, another home folder, another or an older version",
        "what a command that was admitted starts by itself",
    )

    def _event(self, moment: Moment, raw: Mapping[str, Any], *, attended: bool) -> HookEvent:
        roots = raw.get("workspace_roots")
        first = cast("list[Any]", roots)[0] if isinstance(roots, list) and roots else ""
        names = {
            "session_id": raw.get("conversation_id") or raw.get("session_id"),
            "cwd": raw.get("cwd") or first,
            "tool_response": raw.get("tool_output"),
            "error": raw.get("error_message"),
        }
        return super()._event(moment, {**raw, **names}, attended=attended)

    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply:
        del event
        match answer:
            case HookAdmission() | HookSettlement():
                return HookReply()
            case HookRefusal(sentence=sentence):
                return self._deny(sentence)
            case HookQuestion():
                return self._deny(answer.sentence)

    def _deny(self, sentence: str) -> HookReply:
        raw = {"permission": "deny", "user_message": sentence, "agent_message": sentence}
        return HookReply(BLOCKED, msgspec.json.encode(raw), block(sentence).err)


DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {each.PROGRAM: each for each in (ClaudeCode(), Codex(), GeminiCli(), Cursor())}
)


def _decode_object(data: bytes) -> Mapping[str, Any]:
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableEvent(f"The event is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise UnreadableEvent("The event is no JSON object")
    return said  # pyright: ignore[reportUnknownVariableType]


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value:
        raise UnreadableEvent(f"The event has no `{key}`")
    return value


def _optional_text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if not isinstance(value, dict):
        raise UnreadableEvent(f"The event has no object `{key}`")
    return value  # pyright: ignore[reportUnknownVariableType]
