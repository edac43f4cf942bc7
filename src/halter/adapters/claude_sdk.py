"""Guard an agent of the Claude Agent SDK.

```python
desk = guard(ClaudeAgentOptions(tools=["Bash"]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
async for message in desk.query("Tidy the repository."): ...
```

Each query is a guarded session. Each tool call, of subagents and MCP servers as well, is admitted before Claude Code
makes it, by a hook that blocks where it fails, and settled by what Claude Code reports. A call that needs a person ends
the query: decide in Halter, and resume Claude's session. A halt and a cap raise EffectRefused.

**The model requests are made by Claude Code's own program, where no Python sees them.** `max_budget_usd` is set to what
a session of the guard may cost, which Claude Code checks after each request. A cap that is held before each request
needs `halter proxy`: set its address as `ANTHROPIC_BASE_URL` in the options' `env`.
"""
# pyright: basic, reportMissingImports=false

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any, Final
from uuid import uuid4

import msgspec
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    HookMatcher,
    ServerToolUseBlock,
    ToolResultBlock,
    UserMessage,
)

from halter.adapters.guarded_runs import (
    NO_TOOLS,
    ExternalToolOptions,
    GuardedRuns,
    ReportedEffect,
    reject_unseen,
    stream_from,
)
from halter.core.clock import HOUR
from halter.core.errors import ConfigError
from halter.core.folders import ProtectedPaths
from halter.hooks.tools import HookedTool
from halter.loop.session_runtime import cancel_and_wait
from halter.runtime.external import DecisionPending, EffectRefused
from halter.runtime.guard_api import Guard, GuardedSession
from halter.tools.function_tool import canonical_json

LONGEST_CALL: Final = 24 * HOUR
"""Claude Code has time limits of its own for its tools, and a subagent is one call."""
HOOK_TIMEOUT: Final = 600.0
INTERRUPT_SECONDS: Final = 0.5
_NO_HOOKS: Final = ("bare", "safe-mode")
_NO_HOOKS_ENVIRONMENT: Final = ("CLAUDE_CODE_SIMPLE", "CLAUDE_CODE_PERSONAL_HOOKS_OFF")


def guard(
    options: ClaudeAgentOptions | None = None,
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    allow_native: Collection[str] = (),
) -> "GuardedClaude":
    """Return an agent with these options whose queries are under the guard. `tools` says what the guard is to know.

    Raises ConfigError for options with which Claude Code would call no hooks.
    """
    given = options or ClaudeAgentOptions()
    reject_hookless(given)
    # What this process inherited of them must not reach Claude Code either.
    given = replace(given, env={**given.env, **dict.fromkeys(_NO_HOOKS_ENVIRONMENT, "")})
    if given.max_budget_usd is None and guard.max_cost_usd is not None:
        given = replace(given, max_budget_usd=guard.max_cost_usd)
    return GuardedClaude(given, GuardedRuns(guard, tools), frozenset(allow_native))


def reject_hookless(options: ClaudeAgentOptions) -> None:
    """Refuse options that turn hooks off, and those that do not say which of Claude's sessions goes on."""
    off = [f"--{each}" for each in _NO_HOOKS if each in options.extra_args]
    off += [each for each in _NO_HOOKS_ENVIRONMENT if each in options.env]
    off += ["disableAllHooks"] if "disableAllHooks" in (options.settings or "") else []
    if off:
        raise ConfigError(
            f"With {', '.join(off)} Claude Code calls no hooks, and no guard sees its tools: leave it out."
        )
    if options.continue_conversation or options.resume or options.session_id:
        raise ConfigError("Say which of Claude's sessions goes on in the query: `query(prompt, resume=session_id)`.")


class GuardedClaude:
    """An agent of Claude Code whose queries are guarded sessions."""

    def __init__(self, options: ClaudeAgentOptions, runs: GuardedRuns, allow_native: frozenset[str]) -> None:
        self.options = options
        self._runs = runs
        self._allow_native = allow_native

    async def query(self, prompt: str, *, resume: str = "") -> AsyncGenerator[Any]:
        """Yield messages as the SDK's `query` does. `resume` names the session of Claude's that goes on."""
        named = resume or str(uuid4())
        options = replace(self.options, **({"resume": named} if resume else {"session_id": named}))

        async def work(put: Callable[[Any], None]) -> None:
            async with self._runs.session(prompt, f"claude-sdk.{named}") as session:
                run = _ClaudeRun(session, self._runs, self._allow_native)
                await run.read(prompt, replace(options, hooks=run.add_hooks(options.hooks)), put)
                if run.has_asked:
                    await session.pause()

        async with aclosing(stream_from(work)) as messages:
            async for message in messages:
                yield message


class ClaudeToolError(Exception):
    """Claude Code reported that a tool failed."""


class _ClaudeRun:
    """A query under way: the calls that Claude Code makes, and what ends it."""

    def __init__(self, session: GuardedSession, runs: GuardedRuns, allow_native: frozenset[str]) -> None:
        self._session = session
        self._runs = runs
        self._allow_native = allow_native
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._calls: dict[str, ReportedEffect] = {}
        self._judged_calls: set[str] = set()
        self._names: set[str] = set()
        self._client: ClaudeSDKClient | None = None
        self.has_asked = False

    def add_hooks(self, hooks: Any) -> Any:
        """The hooks of the options, with those of the guard. Where several answer, the strictest counts."""
        own = {"PreToolUse": self._on_call, "PostToolUse": self._on_result, "PostToolUseFailure": self._on_result}
        added = {
            event: [HookMatcher(hooks=[callback], timeout=HOOK_TIMEOUT, on_failure="block")]
            for event, callback in own.items()
        }
        given = hooks or {}
        return {event: [*given.get(event, ()), *added.get(event, ())] for event in {**given, **added}}

    async def read(self, prompt: str, options: ClaudeAgentOptions, emit: Callable[[Any], None]) -> None:
        """Pass the messages on until they end, or until a halt or a failure ends them."""
        reading = asyncio.ensure_future(self._read(prompt, options, emit))
        halted = asyncio.ensure_future(self._session.until_halted())
        try:
            await asyncio.wait([reading, halted, self._failure], return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._failure, halted):
                if ended.done():
                    await self._interrupt()
                    raise ended.result()
            reading.result()
        finally:
            # Claude Code ends first: what it has not reported by then is unknown.
            with suppress(Exception):
                await cancel_and_wait(reading, halted)
            with suppress(Exception):
                await cancel_and_wait(*(each.settled for each in self._calls.values()))

    async def _interrupt(self) -> None:
        """Have Claude Code stop what it does: the SDK gives one that is busy five seconds to end by itself."""
        if self._client is not None:
            with suppress(Exception):
                async with asyncio.timeout(INTERRUPT_SECONDS):
                    await self._client.interrupt()

    async def _read(self, prompt: str, options: ClaudeAgentOptions, emit: Callable[[Any], None]) -> None:
        async with ClaudeSDKClient(options) as client:
            self._client = client
            await client.query(prompt)
            async for message in client.receive_response():
                self._reject_unjudged(message)
                emit(message)

    def _reject_unjudged(self, message: Any) -> None:
        """End the query where a tool ran that no hook was called for."""
        blocks = message.content if isinstance(message, AssistantMessage | UserMessage) else ()
        for block in blocks if isinstance(blocks, list) else ():
            if isinstance(block, ServerToolUseBlock):
                reject_unseen([block.name], self._allow_native)
            if (
                isinstance(block, ToolResultBlock)
                and not block.is_error
                and block.tool_use_id not in self._judged_calls
            ):
                raise ConfigError(
                    f"Claude Code made the call {block.tool_use_id} and asked no guard: its settings turn hooks off."
                )

    async def _on_call(self, event: Any, _: Any, __: Any) -> dict[str, Any]:
        self._judged_calls.add(event["tool_use_id"])
        try:
            return await self._judge(event)
        except Exception as error:  # noqa: BLE001 If anything goes wrong, the call is not made.
            self._fail(error)
            return _deny(f"The guard could not decide: {error}", stops=True)

    async def _judge(self, event: Mapping[str, Any]) -> dict[str, Any]:
        name, given = event["tool_name"], event["tool_input"]
        same = sha256(name.encode() + canonical_json(given)).hexdigest()[:16]
        while True:
            call, key = ReportedEffect(), self._name(same)
            if await call.admit(self._session.act(self._spec(name), given, call.act, name=key)):
                self._calls[event["tool_use_id"]] = call
                return _admit(call.admission.result(), given)
            try:
                call.settled.result()  # An earlier process made it: this one is another call.
            except DecisionPending as pending:
                self._names.discard(key)
                self.has_asked = True
                return _deny(f"{pending} When it is decided, make the same call again.", stops=True)
            except EffectRefused as refused:
                if refused.terminal:
                    self._fail(refused)
                return _deny(str(refused), stops=refused.terminal)

    async def _on_result(self, event: Any, _: Any, __: Any) -> dict[str, Any]:
        call = self._calls.get(event["tool_use_id"])
        if call is None or call.outcome.done():
            return {}
        if event["hook_event_name"] == "PostToolUse":
            call.outcome.set_result(event["tool_response"])
        else:
            call.outcome.set_exception(ClaudeToolError(event["error"]))
        try:
            await call.settled
        except ClaudeToolError:
            pass
        except Exception as error:  # noqa: BLE001 What is not settled ends the query.
            self._fail(error)
            return {"continue_": False, "stopReason": str(error)}
        return {}

    def _name(self, same: str) -> str:
        """The first free name of a call with these arguments. One that waits for a person keeps its name."""
        name = next(name for number in count() if (name := f"{same}.{number}") not in self._names)
        self._names.add(name)
        return name

    def _spec(self, name: str) -> Any:
        known = HookedTool(name, "", ProtectedPaths(), None).spec
        otherwise: ExternalToolOptions = {"level": known.level, "effect": known.effect, "egress": known.egress}
        spec = self._runs.spec(name, "A tool of Claude Code.", lambda: msgspec.Raw(known.schema), otherwise)
        return msgspec.structs.replace(spec, timeout=LONGEST_CALL)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_result(error)


def _admit(admitted: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """No opinion: Claude Code's own rules still count. Arguments that a person put in place are allowed with them."""
    if admitted == values:
        return {}
    said = {"hookEventName": "PreToolUse", "permissionDecision": "allow", "updatedInput": dict(admitted)}
    return {"hookSpecificOutput": said}


def _deny(why: str, *, stops: bool = False) -> dict[str, Any]:
    raw = {"hookEventName": "PreToolUse", "permissionDecision": "deny", "permissionDecisionReason": why}
    return {"hookSpecificOutput": raw} | ({"continue_": False, "stopReason": why} if stops else {})
