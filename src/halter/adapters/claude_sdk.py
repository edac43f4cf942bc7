"""Guard an agent of the Claude Agent SDK.

```python
desk = guard(ClaudeAgentOptions(tools=["Bash"]), guard=Guard("runs.db", agent="desk", max_cost_usd=1.00))
async for message in desk.query("Tidy the repository."): ...
```

Each query is a guarded session. Each tool call, including those of subagents and MCP servers, is admitted before Claude
Code makes it, by a hook that blocks the call if the hook fails. Claude Code's report settles it. A call that needs a
person ends the query: decide in Halter, and resume Claude's session. A halt and a cap raise EffectRefused.

**Claude Code's own program makes the model requests, so no Python code sees them.** `max_budget_usd` is set to the cap
of the guard's session, and Claude Code checks it after each request. A cap that is held before each request needs
`halter proxy`: set its address as `ANTHROPIC_BASE_URL` in the options' `env`.
"""
# pyright: basic, reportMissingImports=false

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
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
    GuardedRun,
    GuardedRuns,
    ReportedEffect,
)
from halter.core.clock import HOUR
from halter.core.errors import ConfigError
from halter.external.effects import DecisionPending, EffectRefused
from halter.external.guard import Guard
from halter.external.item_stream import Emit, stream_from
from halter.hooks.tools import HookedTool
from halter.loop.concurrency import cancel_and_wait
from halter.system.protected_paths import ProtectedPaths
from halter.tools.function_tool import canonical_json

MAX_CALL_TIME: Final = 24 * HOUR
"""Claude Code limits the time of its own tools, and a subagent is one call."""
HOOK_TIMEOUT: Final = 600.0
INTERRUPT_SECONDS: Final = 0.5
_HOOKLESS_FLAGS: Final = ("bare", "safe-mode")
_HOOKLESS_VARIABLES: Final = ("CLAUDE_CODE_SIMPLE", "CLAUDE_CODE_PERSONAL_HOOKS_OFF")


def guard(
    options: ClaudeAgentOptions | None = None,
    *,
    guard: Guard,
    tools: Mapping[str, ExternalToolOptions] = NO_TOOLS,
    allow_native: Collection[str] = (),
) -> "GuardedClaude":
    """Return an agent with these options whose queries are under the guard. `tools` has the properties of its tools.

    Raises ConfigError for options with which Claude Code would call no hooks.
    """
    guarded_options = options or ClaudeAgentOptions()
    reject_hookless(guarded_options)
    # Claude Code must not inherit these variables from this process.
    guarded_options = replace(guarded_options, env={**guarded_options.env, **dict.fromkeys(_HOOKLESS_VARIABLES, "")})
    if guarded_options.max_budget_usd is None and guard.max_cost_usd is not None:
        guarded_options = replace(guarded_options, max_budget_usd=guard.max_cost_usd)
    return GuardedClaude(guarded_options, GuardedRuns(guard, tools, allow_native=allow_native))


def reject_hookless(options: ClaudeAgentOptions) -> None:
    """Reject options that turn hooks off, and options that select Claude's session."""
    hook_switches = [f"--{each}" for each in _HOOKLESS_FLAGS if each in options.extra_args]
    hook_switches += [each for each in _HOOKLESS_VARIABLES if each in options.env]
    hook_switches += ["disableAllHooks"] if "disableAllHooks" in (options.settings or "") else []
    if hook_switches:
        raise ConfigError(
            f"{', '.join(hook_switches)} turns off Claude Code's hooks, so the guard cannot see its tools. Remove it."
        )
    if options.continue_conversation or options.resume or options.session_id:
        raise ConfigError("Pass the session of Claude to the query instead: `query(prompt, resume=session_id)`.")


class GuardedClaude:
    """An agent of Claude Code whose queries are guarded sessions."""

    def __init__(self, options: ClaudeAgentOptions, runs: GuardedRuns) -> None:
        self.options = options
        self._runs = runs

    async def query(self, prompt: str, *, resume: str = "") -> AsyncGenerator[Any]:
        """Yield messages as the SDK's `query` does. `resume` is the id of Claude's session to continue."""
        session_id = resume or str(uuid4())
        options = replace(self.options, **({"resume": session_id} if resume else {"session_id": session_id}))

        async def work(emit: Emit) -> None:
            async with self._runs.run(prompt, f"claude-sdk.{session_id}") as run:
                query = _ClaudeQuery(run)
                await query.read(prompt, replace(options, hooks=query.add_hooks(options.hooks)), emit)

        async with aclosing(stream_from(work)) as messages:
            async for message in messages:
                yield message


class ClaudeToolError(Exception):
    """Claude Code reported that a tool failed."""


class _ClaudeQuery:
    """A query in progress: the calls that Claude Code makes in a run."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run
        self._judged_calls: set[str] = set()
        self._names: set[str] = set()
        self._client: ClaudeSDKClient | None = None

    def add_hooks(self, hooks: Any) -> Any:
        """Return the hooks of the options with those of the guard. If several answer, the strictest applies."""
        callbacks = {"PreToolUse": self._on_call, "PostToolUse": self._on_result, "PostToolUseFailure": self._on_result}
        guard_hooks = {
            event: [HookMatcher(hooks=[callback], timeout=HOOK_TIMEOUT, on_failure="block")]
            for event, callback in callbacks.items()
        }
        existing = hooks or {}
        return {event: [*existing.get(event, ()), *guard_hooks.get(event, ())] for event in {**existing, **guard_hooks}}

    async def read(self, prompt: str, options: ClaudeAgentOptions, emit: Emit) -> None:
        """Emit the messages until they end, or until a halt or a failure ends the query."""
        read_task = asyncio.ensure_future(self._read(prompt, options, emit))
        halt_task = asyncio.ensure_future(self._run.session.wait_until_halted())
        try:
            await asyncio.wait([read_task, halt_task, self._run.failure], return_when=asyncio.FIRST_COMPLETED)
            for failure in (self._run.failure, halt_task):
                if failure.done():
                    await self._interrupt()
                    raise failure.result()
            read_task.result()
        finally:
            # Claude Code ends first: the outcome of a call that it has not reported by then is unknown.
            with suppress(Exception):
                await cancel_and_wait(read_task, halt_task)

    async def _interrupt(self) -> None:
        """Interrupt Claude Code, because the SDK otherwise waits five seconds for a busy program to end."""
        if self._client is not None:
            with suppress(Exception):
                async with asyncio.timeout(INTERRUPT_SECONDS):
                    await self._client.interrupt()

    async def _read(self, prompt: str, options: ClaudeAgentOptions, emit: Emit) -> None:
        async with ClaudeSDKClient(options) as client:
            self._client = client
            await client.query(prompt)
            async for message in client.receive_response():
                self._reject_unjudged(message)
                await emit(message)

    def _reject_unjudged(self, message: Any) -> None:
        """End the query if a tool ran without a call of the hook."""
        blocks = message.content if isinstance(message, AssistantMessage | UserMessage) else ()
        for block in blocks if isinstance(blocks, list) else ():
            if isinstance(block, ServerToolUseBlock):
                self._run.runs.reject_unseen([block.name])
            if (
                isinstance(block, ToolResultBlock)
                and not block.is_error
                and block.tool_use_id not in self._judged_calls
            ):
                raise ConfigError(
                    f"Claude Code made the call {block.tool_use_id} without the guard. Its settings turn hooks off."
                )

    async def _on_call(self, event: Any, _: Any, __: Any) -> dict[str, Any]:
        self._judged_calls.add(event["tool_use_id"])
        try:
            return await self._judge(event)
        except Exception as error:  # noqa: BLE001 On any error, the call is not made.
            self._run.fail(error)
            return _deny(f"Blocked: the guard failed ({error}).", stops=True)

    async def _judge(self, event: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = event["tool_name"], event["tool_input"]
        digest = sha256(name.encode() + canonical_json(arguments)).hexdigest()[:16]
        while True:
            call, key = ReportedEffect(), self._name(digest)
            if await call.admit(self._run.call(self._spec(name), arguments, call.act, name=key)):
                self._run.admitted[event["tool_use_id"]] = call
                return _admit(call.admission.result(), arguments)
            try:
                call.settlement.result()  # An earlier process made that call: this is a different one.
            except DecisionPending as pending:
                self._names.discard(key)
                return _deny(f"{pending} Repeat the same call after the decision.", stops=True)
            except EffectRefused as refused:
                return _deny(str(refused), stops=refused.terminal)

    async def _on_result(self, event: Any, _: Any, __: Any) -> dict[str, Any]:
        call = self._run.admitted.get(event["tool_use_id"])
        if call is None or call.outcome.done():
            return {}
        if event["hook_event_name"] == "PostToolUse":
            call.outcome.set_result(event["tool_response"])
        else:
            call.outcome.set_exception(ClaudeToolError(event["error"]))
        try:
            await call.settlement
        except ClaudeToolError:
            pass
        except Exception as error:  # noqa: BLE001 A failed settlement ends the query.
            self._run.fail(error)
            return {"continue_": False, "stopReason": str(error)}
        return {}

    def _name(self, digest: str) -> str:
        """Return the first free name for a call with these arguments. A call that waits for a person keeps its name."""
        name = next(name for number in count() if (name := f"{digest}.{number}") not in self._names)
        self._names.add(name)
        return name

    def _spec(self, name: str) -> Any:
        inferred_spec = HookedTool(name, "", ProtectedPaths(), None).spec
        defaults: ExternalToolOptions = {
            "level": inferred_spec.level,
            "effect": inferred_spec.effect,
            "egress": inferred_spec.egress,
        }
        spec = self._run.runs.spec(name, "A tool of Claude Code.", lambda: msgspec.Raw(inferred_spec.schema), defaults)
        return msgspec.structs.replace(spec, timeout=MAX_CALL_TIME)


def _admit(admitted_arguments: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Render an admission without a verdict, so that Claude Code's own rules apply; with one if a person edited it."""
    if admitted_arguments == arguments:
        return {}
    output = {"hookEventName": "PreToolUse", "permissionDecision": "allow", "updatedInput": dict(admitted_arguments)}
    return {"hookSpecificOutput": output}


def _deny(reason: str, *, stops: bool = False) -> dict[str, Any]:
    output = {"hookEventName": "PreToolUse", "permissionDecision": "deny", "permissionDecisionReason": reason}
    return {"hookSpecificOutput": output} | ({"continue_": False, "stopReason": reason} if stops else {})
