"""Tools from plain functions.

    @tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        '''Tell what the weather is like.'''

The docstring tells the model what the function does, the types what it takes. An async function runs on the event
loop. A plain one runs in a copy of the process, made for this call, which is killed when the call is halted, cancelled
or out of time: it sees all that the process has, and changes nothing of it. `isolate` chooses another place.
"""

import asyncio
import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextvars import copy_context
from decimal import Decimal
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, NoReturn, Self, TypedDict, Unpack, cast, get_args, overload

from msgspec.structs import replace

from halter.core.clock import SECOND
from halter.core.durations import parse_duration
from halter.core.errors import ConfigError
from halter.core.money import dollars
from halter.core.options import demand_known
from halter.core.protected import Rooted
from halter.core.tools import (
    LEVELS,
    TIMEOUT,
    Effect,
    Failed,
    Happened,
    Invalid,
    Level,
    Locked,
    Output,
    Permit,
    ToolSpec,
    Unstoppable,
    Valid,
    sealed,
)
from halter.tools.arguments import Arguments
from halter.tools.forked import run_forked
from halter.tools.group import Threads
from halter.tools.isolated import check_findable, run_isolated
from halter.tools.result import MAX_OUTPUT, to_output

Check = Callable[..., Any]
"""A function with some of the tool's parameters that returns what became of an earlier call, as `Happened`."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class FunctionTool:
    """A plain function as a tool. It fulfils the port `Tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: ToolSpec,
        check: Check | None,
        max_output: int,
        given: Mapping[str, Any] = MappingProxyType({}),
        writes: str = "",
        *,
        threaded: bool = False,
    ) -> None:
        self._function = Locked(function)
        self._arguments = Arguments(spec.name, function)
        self._check = None if check is None else Locked(check)
        self._max_output = max_output
        self._given = given
        self._writes = writes
        self.place: Rooted | None = None
        self._threaded = threaded
        self._starts: Callable[[], None] | None = None
        self._spec = sealed(replace(spec, schema=self._arguments.schema))
        if spec.isolate and self._arguments.deps:
            raise ConfigError(f"The tool {spec.name} runs in a process of its own, which has no deps to give it.")
        if spec.isolate:
            check_findable(spec.name, function)
        if check is not None:
            _demand_known_parameters(spec.name, check, self._arguments.names)

    @property
    def spec(self) -> ToolSpec:
        """What is known of it."""
        return self._spec

    def given(self, deps: Any) -> "FunctionTool":
        """Make the same tool with what its program gives it: for each parameter of the type `Deps`."""
        if not self._arguments.deps:
            return self
        made = copy.copy(self)
        made._given = dict.fromkeys(self._arguments.deps, deps)  # noqa: SLF001 It is this very class.
        return made

    def trusted_by(self, starts: Callable[[], None]) -> "FunctionTool":
        """Make the same tool, which asks `starts` each time before its code is loaded anew. That raises where not."""
        made = copy.copy(self)
        made._starts = starts  # noqa: SLF001 It is this very class.
        return made

    def at(self, place: Rooted) -> Self:
        """Say which folder the tool works in: whoever puts an agent together tells it what must not be reached."""
        self.place = place
        return self

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check arguments as a model wrote them."""
        valid = self._arguments.validate(arguments)
        if not self._writes or isinstance(valid, Invalid):
            return valid
        content = str(valid.values[self._writes]).encode("utf-8", "surrogatepass")
        return replace(valid, writes=(sha256(content).hexdigest(),))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Call the function."""
        function = self._function.open(permit)
        if self._spec.isolate:
            plain = self._arguments.revealed(arguments, permit)
            if self._starts is not None:
                # It reads the agent's folder, which may be large.
                await asyncio.to_thread(self._starts)
            return await run_isolated(function, plain, permit.id, self._max_output)
        unstoppable = self._spec.effect == "write"
        return await self._called(function, self._filled(arguments, permit), unstoppable=unstoppable)

    async def check(self, arguments: Valid, permit: Permit) -> Happened:
        """Ask the tool's own check; without one, nobody knows."""
        if self._check is None:
            return "unknown"
        check = self._check.open(permit)
        filled = self._filled(arguments, permit)
        values = {name: filled[name] for name in inspect.signature(check).parameters}
        found = (await self._called(check, values, unstoppable=False)).text
        return cast("Happened", found) if found in get_args(Happened) else "unknown"

    async def _called(self, function: Callable[..., Any], values: Mapping[str, Any], *, unstoppable: bool) -> Output:
        """Call a function where it belongs: on the loop, in a thread, or in a copy of the process."""
        if inspect.iscoroutinefunction(function):
            return to_output(await _awaited(function, values), self._max_output)
        call = partial(_call_now, function, values)
        if self._threaded:
            return to_output(await _in_thread(call, function.__name__, unstoppable=unstoppable), self._max_output)
        return await run_forked(call, function.__name__, self._max_output)

    def _filled(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        missing = [name for name in self._arguments.deps if name not in self._given]
        if missing:
            raise Failed("NoDeps", f"{self._spec.name} needs {', '.join(missing)}: run its agent with `deps`.")
        return {**self._arguments.filled(arguments, permit), **self._given}

    def __call__(self, *_arguments: Any, **_more: Any) -> NoReturn:
        raise TypeError(
            f"{self._spec.name} is a tool and is not called directly: it runs through the guard, as in "
            f'guard.call("{self._spec.name}", ...).'
        )

    def run_in_own_process(self, plain: bytes, permit: Permit) -> Any:
        """Call the function at once, in the process that was made for this call and ends with it."""
        return _call_now(self._function.open(permit), self._arguments.read(plain, permit.id))


class Options(TypedDict, total=False):
    """What is said of a tool beside its function.

    `isolate` says where the function runs. Not given, a plain function runs in a copy of the process that is made for
    the call: it sees what the process has, changes nothing of it, uses none of its open connections, and can be killed.
    With True it runs in a new interpreter, which imports its module: for libraries that do not work after a fork. With
    False it runs in a thread, where it can change the process and use its connections, and cannot be stopped: it runs
    on after a halt or a timeout, and if it keeps the interpreter to itself it stops the whole process, which then is
    ended as a whole where `halter` runs it.

    `cost` is in dollars, or "learned" from earlier calls. `timeout` is in seconds or written like `5m`. `check` finds
    out what became of a write whose answer was lost. `egress` says that the arguments choose where data goes.
    `max_output` is how many characters of a result are kept. `writes` names the argument that is what a file will hold:
    no watch of the agent takes that file for something new.
    """

    name: str
    level: Level
    effect: Effect
    idempotent: bool
    egress: bool
    check: Check
    cost: float | str | Decimal
    timeout: float | str
    isolate: bool
    max_output: int
    writes: str


@overload
def tool(function: Callable[..., Any], /, **options: Unpack[Options]) -> FunctionTool: ...
@overload
def tool(**options: Unpack[Options]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[Options]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a plain typed function: as `@tool`, as `@tool(level="SAFE")`, or as `tool(function, ...)`."""
    demand_known(options, Options.__optional_keys__, "a tool")
    if function is None:
        return lambda function: tool(function, **options)
    check = options.get("check")
    most, writes = options.get("max_output", MAX_OUTPUT), options.get("writes", "")
    threaded = options.get("isolate") is False
    return FunctionTool(function, _described(function, options), check, most, writes=writes, threaded=threaded)


def _described(function: Callable[..., Any], options: Options) -> ToolSpec:
    cost = options.get("cost", 0)
    timeout = options.get("timeout")
    return ToolSpec(
        name=_named(options.get("name", function.__name__)),
        description=inspect.getdoc(function) or function.__name__.replace("_", " "),
        schema=b"",
        level=_known("level", options.get("level", "CONTROLLED"), LEVELS),
        effect=_known("effect", options.get("effect", "write"), get_args(Effect)),
        idempotent=options.get("idempotent", False),
        egress=options.get("egress", False),
        cost="learned" if cost == "learned" else dollars(cost),
        timeout=TIMEOUT if timeout is None else _micros(timeout),
        isolate=bool(options.get("isolate")),
        checked="check" in options,
    )


def spec_from_hints(
    name: str, description: str, schema: bytes, hints: Mapping[str, Any], *, server: str = ""
) -> ToolSpec:
    """Understand what an MCP server says of a tool.

    Hints are claims: only a plain `true` counts, one that contradicts another counts for nothing, and what is not said
    is taken to be the worse.
    """
    reads = hints.get("readOnlyHint") is True and hints.get("destructiveHint") is not True
    spec = ToolSpec(
        name=name,
        description=description,
        schema=schema,
        level="CONTROLLED" if reads else "RESTRICTED",
        effect="read" if reads else "write",
        idempotent=hints.get("idempotentHint") is True,
        egress=hints.get("openWorldHint") is not False,
        server=server,
    )
    return sealed(spec)


async def _awaited(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        return await function(**values)
    except asyncio.CancelledError as error:
        # A function may well cancel what it started itself; only if its caller was cancelled is this the caller's.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _failure(error) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # A panic in a library that is written in Rust is no Exception, and yet it is the function's own failure.
        raise _failure(error) from error


async def _in_thread(call: Callable[[], Any], name: str, *, unstoppable: bool) -> Any:
    # The thread has the context of the call, in which what it prints is masked.
    work = asyncio.get_running_loop().run_in_executor(Threads(), copy_context().run, call)
    try:
        return await work
    except asyncio.CancelledError:
        if unstoppable:
            raise Unstoppable(
                f"{name} runs on in its thread, which cannot be stopped: nobody knows what it will do. "
                "Make it async, or let it run without isolate=False."
            ) from None
        raise


def _call_now(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return asyncio.run(function(**values))
        return function(**values)
    except BaseException as error:
        raise _failure(error) from error


def _failure(error: BaseException) -> Failed | Unstoppable:
    if isinstance(error, Failed | Unstoppable):
        return error
    return Failed(type(error).__name__, _said(error))


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 It is a stranger's code, too, and its failure must not hide the first.
        return f"it cannot say why, but raises {type(worse).__name__}"


def _demand_known_parameters(tool: str, check: Check, known: frozenset[str]) -> None:
    unknown = [name for name in inspect.signature(check).parameters if name not in known]
    if unknown:
        raise ConfigError(
            f"The check of the tool {tool} asks for {', '.join(unknown)}, which the tool itself does not take: "
            "it may use the parameters of the tool only."
        )


def _named(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"{name!r} is no name for a tool: providers accept up to 64 letters, digits, _ and -, beginning with no digit."
    )


def _known(key: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value in allowed:
        return value
    raise ConfigError(f"A tool's {key} cannot be {value!r}: it is one of {', '.join(allowed)}.")


def _micros(timeout: float | str) -> int:
    micros = parse_duration(timeout) if isinstance(timeout, str) else round(timeout * SECOND)
    if micros > 0:
        return micros
    raise ConfigError(f"A tool's timeout cannot be {timeout!r}: every call must end, so it is longer than zero.")
