"""The hook protocols of four programs: the events that they send, and the answers that they accept.

`Dialect.parse` parses the event on stdin. `Dialect.render` makes the exit code, stdout and stderr. A refusal always has
the form that the program is known to obey.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, cast

import msgspec

from halter.core.errors import HalterError
from halter.hooks.client import BLOCKED

Moment = Literal["before", "after", "failed", "refused", "ended", "other"]
"""Before a call, after it, after its failure, after the program itself refused it, at the end of a session."""


class UnreadableEvent(HalterError):
    """The event has a form that this version does not know."""


class UndecidableEvent(HalterError):
    """The event cannot be decided, and the call is blocked; the sentence is the reason."""


class HookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a program. `call` is the program's own id of a tool call, if it has one.

    `is_attended` is True if a person uses the program. `subagent` is the id of the sub-agent that makes the call.
    """

    moment: Moment
    session: str
    call: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = {}
    response: Any = None
    error: str = ""
    cwd: str = ""
    subagent: str = ""
    is_attended: bool = True


class HookAdmission(msgspec.Struct, frozen=True):
    """The call may run. `approved_by` is the person who approved it, and `arguments` are set if they edited them."""

    approved_by: str = ""
    arguments: Mapping[str, Any] | None = None


class HookRefusal(msgspec.Struct, frozen=True):
    """The call must not run. `stops` ends the program's turn as well."""

    sentence: str
    stops: bool = False


class HookQuestion(msgspec.Struct, frozen=True):
    """A decision is pending. If `is_deferred`, the program keeps the call and repeats it when it is resumed."""

    decision: str
    is_deferred: bool = False
    is_subagent: bool = False

    @property
    def sentence(self) -> str:
        pending = f"Approval required: pending decision {self.decision}."
        if self.is_subagent:
            return (
                f"{pending} Continue with something else, and name this decision in your report. Repeat the same call "
                "with the same arguments later, here or in the agent that started this one. It runs once it is "
                "approved."
            )
        return (
            f"{pending} Continue with something else, and repeat the same call with the same arguments later. "
            "It runs once it is approved."
        )


class HookSettlement(msgspec.Struct, frozen=True):
    """The outcome is recorded. `masked` replaces a result with secrets; `stop` is the reason if the turn has to end."""

    masked: Any = None
    stop: str = ""


HookAnswer = HookAdmission | HookRefusal | HookQuestion | HookSettlement


class HookReply(msgspec.Struct, frozen=True):
    """The output and the exit code of the hook's program."""

    code: int = 0
    out: bytes = b"{}"
    err: bytes = b""


def block(sentence: str) -> HookReply:
    """Block in the form that all programs obey. The sentence must not be empty: one program ignores an empty one."""
    return HookReply(BLOCKED, b"", f"{sentence or 'Blocked by Halter.'}\n".encode("utf-8", "replace"))


class Dialect(ABC):
    """The protocol of one program. `EDITS` is True if it accepts edited arguments, `DEFERS` if it can defer a call."""

    PROGRAM: ClassVar[str]
    TITLE: ClassVar[str]
    EVENTS: ClassVar[Mapping[str, Moment]]
    EDITS: ClassVar[bool] = False
    DEFERS: ClassVar[bool] = False
    BYPASSES: ClassVar[tuple[str, ...]] = ()
    """The known ways to bypass its hooks."""

    def parse(self, data: bytes, *, attended: bool) -> HookEvent:
        raw = _decode_object(data)
        name = _text(raw, "hook_event_name")
        return self._event(self.EVENTS.get(name, "other"), raw, attended=attended)

    def _event(self, moment: Moment, raw: Mapping[str, Any], *, attended: bool) -> HookEvent:
        is_about_call = moment in {"before", "after", "failed", "refused"}
        return HookEvent(
            moment=moment,
            session=_text(raw, "session_id"),
            call=_optional_text(raw, "tool_use_id"),
            tool=_text(raw, "tool_name") if is_about_call else "",
            arguments=_object(raw, "tool_input") if is_about_call else {},
            response=raw.get("tool_response"),
            error=_optional_text(raw, "error"),
            cwd=_optional_text(raw, "cwd"),
            subagent=_optional_text(raw, "agent_id"),
            is_attended=attended,
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
    DEFERS: ClassVar[bool] = True
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "`claude --bare`, CLAUDE_CODE_SIMPLE and `--safe-mode`, which turn off all hooks",
        "`--setting-sources` without the scope that has the hooks, and CLAUDE_CODE_PERSONAL_HOOKS_OFF",
        "`disableAllHooks` in a settings file; managed settings with `allowManagedHooksOnly` prevent it",
        "a different or older `claude` binary",
        "`@file` mentions in a prompt, which read a file without a tool call",
        "processes that an admitted command starts",
    )

    def render(self, answer: HookAnswer, event: HookEvent) -> HookReply:
        match answer:
            case HookAdmission(approved_by="", arguments=None):
                # The program's own permission rules still apply: Halter allows nothing that they would refuse.
                return HookReply()
            case HookAdmission(approved_by=by, arguments=arguments):
                edits = {} if arguments is None else {"updatedInput": arguments}
                return _decide("allow", f"Approved by {by or 'the policy'} in Halter.", **edits)
            case HookRefusal(sentence=sentence, stops=True):
                return _decide("deny", sentence, {"continue": False, "stopReason": sentence})
            case HookRefusal(sentence=sentence):
                return _decide("deny", sentence)
            case HookQuestion():
                return _decide("defer" if answer.is_deferred else "deny", answer.sentence)
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


def _decide(
    verdict: str, reason: str, extra_fields: Mapping[str, Any] = MappingProxyType({}), **extra_output: Any
) -> HookReply:
    output = {
        "hookEventName": "PreToolUse",
        "permissionDecision": verdict,
        "permissionDecisionReason": reason or "Halter.",
        **extra_output,
    }
    return HookReply(out=msgspec.json.encode({**extra_fields, "hookSpecificOutput": output}))


class Codex(Dialect):
    """Codex runs the tool on any unknown key or value in the output, so the answer is `{}` or exit code 2."""

    PROGRAM: ClassVar[str] = "codex"
    TITLE: ClassVar[str] = "Codex"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"PreToolUse": "before", "PostToolUse": "after", "SessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "hooks that are not trusted in Codex, or have changed since: Codex skips them silently",
        "a hook process that is suspended until its timeout: Codex then runs the tool",
        "another CODEX_HOME, or a different or older `codex` binary",
        "processes that an admitted command starts",
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
    """Gemini CLI sends no call id. It replaces a refused result with the reason, so the reason is the masked text."""

    PROGRAM: ClassVar[str] = "gemini"
    TITLE: ClassVar[str] = "Gemini CLI"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"BeforeTool": "before", "AfterTool": "after", "SessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "hooks that are disabled in its settings or with `/hooks disable`",
        "a hook process that is suspended until its timeout: Gemini CLI then runs the tool",
        "another home folder, or a different or older `gemini` binary",
        "processes that an admitted command starts",
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
    """Cursor's session is a conversation. A refusal has Cursor's own form, and exit code 2."""

    PROGRAM: ClassVar[str] = "cursor"
    TITLE: ClassVar[str] = "Cursor"
    EVENTS: ClassVar[Mapping[str, Moment]] = MappingProxyType(
        {"preToolUse": "before", "postToolUse": "after", "postToolUseFailure": "failed", "sessionEnd": "ended"}
    )
    BYPASSES: ClassVar[tuple[str, ...]] = (
        "completions in the editor (Tab), which are not tool calls",
        "hooks that are disabled in its settings, another home folder, or a different or older version",
        "processes that an admitted command starts",
    )

    def _event(self, moment: Moment, raw: Mapping[str, Any], *, attended: bool) -> HookEvent:
        roots = raw.get("workspace_roots")
        first_root = cast("list[Any]", roots)[0] if isinstance(roots, list) and roots else ""
        names = {
            "session_id": raw.get("conversation_id") or raw.get("session_id"),
            "cwd": raw.get("cwd") or first_root,
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
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableEvent(f"The event is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnreadableEvent("The event is not a JSON object")
    return value  # pyright: ignore[reportUnknownVariableType]


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
