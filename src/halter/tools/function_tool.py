"""Tools from plain functions, and JSON Schemas of third parties.

    @tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        '''Tell what the weather is like.'''

The docstring tells the model what the function does, the types what it takes. An async function runs on the event
loop. A plain one runs in a fork of the process, made for this call, which is killed when the call is halted, cancelled
or out of time: it sees all that the process has, and changes nothing of it. `isolate` chooses another place.

A schema of a third party is checked itself first. Nothing that it refers to is fetched. Checking arguments takes a
bounded number of steps, and only regular expressions that run in linear time. What would need more is left to the
server, which checks the arguments again in any case.
"""

import asyncio
import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from decimal import Decimal
from functools import partial
from hashlib import sha256
from importlib import import_module
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_type_hints,
    overload,
)

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from halter.core.clock import SECOND, parse_duration
from halter.core.errors import ConfigError
from halter.core.folders import RootedTool
from halter.core.money import usd_to_micros
from halter.core.provenance import Declaration, Reach, Reads, guess_declaration
from halter.core.text import reject_unknown_options
from halter.core.tools import (
    DEFAULT_TOOL_TIMEOUT,
    DOLLAR,
    LEVELS,
    DeclaredParts,
    Effect,
    EffectStatus,
    Failed,
    Invalid,
    Level,
    NearBudget,
    Output,
    Permit,
    PermitGate,
    ToolSpec,
    Unstoppable,
    Valid,
    add_spec_digest,
    find_secret_names,
    refine_declaration,
    substitute_secrets,
)
from halter.tools.process import MAX_OUTPUT, ThreadPerTaskExecutor, check_findable, run_forked, run_isolated, to_output

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_JSON_TYPES: Final[frozenset[Any]] = frozenset((str, int, bool))
"""Types whose values are JSON as they are, in one spelling; of a float there are several."""

_WRITE_PLAIN: Final = msgspec.json.Encoder(order="sorted").encode
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_TOLD: Final = 5
"""How many mistakes a model is shown at once."""


class CallKey(str):
    """A parameter of this type is no argument: it gets the id of the call, the same whenever the call is repeated.

    A function passes it on as its idempotency key.
    """

    __slots__ = ()


DEPS: Final = object()

T = TypeVar("T")

Deps = Annotated[T, DEPS]
"""A parameter of the type `Deps[Bank]` is no argument: it gets what the program gave its agent as `deps`."""


class FunctionArguments:
    def __init__(self, tool: str, function: Callable[..., Any]) -> None:
        from pydantic import ValidationError

        annotations = _annotations(tool, function)
        self._tool = tool
        self._mistaken = ValidationError
        self._keys = tuple(name for name, annotation in annotations.items() if annotation is CallKey)
        self.deps = tuple(
            name
            for name, annotation in annotations.items()
            if any(each is DEPS for each in getattr(annotation, "__metadata__", ()))
        )
        self.near = tuple(name for name, annotation in annotations.items() if annotation is NearBudget)
        if self.near and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"The tool {tool} takes {self.near[0]}: NearBudget, which only an async function can ask: "
                "make it `async def`."
            )
        others = self.adds = (*self._keys, *self.deps, *self.near)
        self._fields = {name: each for name, each in annotations.items() if name not in others}
        signature = inspect.signature(function)
        adapter = _compile_adapter(tool, self._fields, signature)
        # Without the adapter's own checks of options that are never given.
        self._read, self._dump = adapter.validator.validate_json, adapter.serializer.to_python
        self._is_plain_json = _JSON_TYPES.issuperset(self._fields.values())
        defaults: list[Any] = [signature.parameters[name].default for name in self._fields]
        plain = all(each is inspect.Parameter.empty or type(each) in _JSON_TYPES for each in defaults)
        self._has_nulls = not (self._is_plain_json and plain)
        self.schema = json.dumps(adapter.json_schema()).encode()

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self._fields, *self._keys, *self.deps, *self.near))

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check what a model wrote. Canonical arguments have their defaults and one order of keys."""
        try:
            values = self._read(arguments)
            canonical = _WRITE_PLAIN(values) if self._is_plain_json else canonical_json(self._dump(values, mode="json"))
            # What a person agrees to must be what runs, and JSON has no word but null for what is not a number.
            if self._has_nulls and canonical.find(b"null") >= 0 and self._read(canonical) != values:
                return Invalid(f"The arguments of {self._tool} hold a number that is infinite or none at all.")
            return Valid(values, canonical)
        except self._mistaken as error:
            bare = arguments.strip() or b"{}"
            if bare != arguments:
                return self.validate(bare)
            return Invalid(f"The arguments of {self._tool} do not fit. {_describe_mistakes(error)}")
        except (ValueError, TypeError, RecursionError) as error:
            return Invalid(f"The arguments of {self._tool} cannot be written as JSON: {error}.")

    def fill(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        """The arguments of the call: secrets in place of their names, and the call's id."""
        if find_secret_names(arguments.canonical):
            values = self.read(self.reveal_secrets(arguments, permit), permit.id)
        elif self._keys:
            values = {**arguments.values, **dict.fromkeys(self._keys, CallKey(permit.id))}
        else:
            values = arguments.values
        return {**values, **dict.fromkeys(self.near, NearBudget(permit.near_budget))} if self.near else values

    def reveal_secrets(self, arguments: Valid, permit: Permit) -> bytes:
        """Put secrets into the plain JSON, so that they reach arguments of every type."""
        try:
            return canonical_json(substitute_secrets(json.loads(arguments.canonical), permit.reveal))
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that this call may use.") from None

    def read(self, plain: bytes, key: str) -> Mapping[str, Any]:
        """Decode plain JSON, which was valid before secrets came into it."""
        match self.validate(plain):
            case Valid(values):
                return {**values, **dict.fromkeys(self._keys, CallKey(key))}
            case Invalid(sentence):
                raise Failed("InvalidSecret", sentence)


def canonical_json(value: Any) -> bytes:
    """JSON in the one form that equal values share."""
    return _CANONICAL(value).encode()


def _annotations(tool: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    annotations: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"The tool {tool} takes {parameter}, which no schema can describe: "
                "give each parameter a name and a type."
            )
        annotations[name] = hints.get(name, Any)
    return annotations


def _compile_adapter(tool: str, fields: Mapping[str, Any], signature: inspect.Signature) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema
    from typing_extensions import TypedDict

    # Made while running, so that no type checker can follow; a model class would forbid some names to parameters.
    make: Any = TypedDict
    shape = make(tool, {name: _field(each, signature.parameters[name].default) for name, each in fields.items()})
    shape.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(shape)
        adapter.json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        raise ConfigError(f"A parameter of the tool {tool} has a type that cannot be described: {error}") from error
    return adapter


def _field(annotation: Any, default: Any) -> Any:
    from pydantic import Field

    return annotation if default is inspect.Parameter.empty else Annotated[annotation, Field(default=default)]


def _describe_mistakes(error: "ValidationError") -> str:
    """What is wrong and where, without the value: it may be large or private."""
    mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    sentences = [f"{_format_location(mistake['loc'])}{mistake['msg']}" for mistake in mistakes[:_TOLD]]
    remaining = len(mistakes) - len(sentences)
    return "; ".join(sentences) + (f"; and {remaining} more." if remaining else ".")


def _format_location(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) + ": " if loc else ""


NOTHING_DECLARED: Final = DeclaredParts()

CheckArguments = Callable[..., Any]
"""A function with some of the tool's parameters that returns what became of an earlier call, as `Happened`."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class FunctionTool:
    """A plain function as a tool. It implements the port `Tool`."""

    def __init__(  # noqa: PLR0913 Each is one thing that a function does not say itself.
        self,
        function: Callable[..., Any],
        spec: ToolSpec,
        check: CheckArguments | None,
        max_output: int,
        values: Mapping[str, Any] = MappingProxyType({}),
        writes: str = "",
        *,
        threaded: bool = False,
        declared: DeclaredParts = NOTHING_DECLARED,
    ) -> None:
        self._function = PermitGate(function)
        self._awaited = inspect.iscoroutinefunction(function)
        self._arguments = FunctionArguments(spec.name, function)
        self._check = None if check is None else PermitGate(check)
        self._max_output = max_output
        self._dependencies = values
        self._has_effect = writes
        self.place: RootedTool | None = None
        self._threaded = threaded
        self._starts: Callable[[], None] | None = None
        self.spec = add_spec_digest(_declare(replace(spec, schema=self._arguments.schema), declared))
        if spec.isolate and self._arguments.deps:
            raise ConfigError(f"The tool {spec.name} runs in a process of its own, which has no deps to give it.")
        if spec.isolate:
            check_findable(spec.name, function)
        if check is not None:
            unknown = [name for name in inspect.signature(check).parameters if name not in self._arguments.names]
            if unknown:
                raise ConfigError(
                    f"The check of the tool {spec.name} asks for {', '.join(unknown)}, "
                    "which the tool itself does not take: it may use the parameters of the tool only."
                )

    def given(self, deps: Any) -> "FunctionTool":
        """The same tool with the program's values for parameters of the type `Deps`."""
        if not self._arguments.deps:
            return self
        made = copy.copy(self)
        made._dependencies = dict.fromkeys(self._arguments.deps, deps)  # noqa: SLF001 It is this very class.
        return made

    def trusted_by(self, starts: Callable[[], None]) -> "FunctionTool":
        """The same tool, which calls `starts` each time before its code is loaded; that raises if it may not."""
        made = copy.copy(self)
        made._starts = starts  # noqa: SLF001 It is this very class.
        return made

    def at(self, place: RootedTool) -> Self:
        """Set the folder that the tool works in, which is told what must not be reached."""
        self.place = place
        return self

    def validate(self, arguments: bytes) -> Valid | Invalid:
        valid = self._arguments.validate(arguments)
        if not self._has_effect or isinstance(valid, Invalid):
            return valid
        content = str(valid.values[self._has_effect]).encode("utf-8", "surrogatepass")
        return replace(valid, writes=(sha256(content).hexdigest(),))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        function = self._function.open(permit)
        if self.spec.isolate:
            plain = self._arguments.reveal_secrets(arguments, permit)
            if self._starts is not None:
                # It reads the agent's folder, which may be large.
                await asyncio.to_thread(self._starts)
            return await run_isolated(function, plain, permit.id, self._max_output)
        given = self._arguments
        plain = not given.adds and DOLLAR not in arguments.canonical
        filled = arguments.values if plain else self._fill_arguments(arguments, permit)
        if self._awaited:
            try:
                result = await function(**filled)
            except BaseException as error:  # noqa: BLE001 It is raised again, as what it is.
                _raise_failure(error)
            return to_output(result, self._max_output)
        return await self._call(function, filled, unstoppable=self.spec.effect == "write")

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Run the tool's own check; without one, the outcome is unknown."""
        if self._check is None:
            return "unknown"
        check = self._check.open(permit)
        filled = self._fill_arguments(arguments, permit)
        values = {name: filled[name] for name in inspect.signature(check).parameters}
        found = (await self._call(check, values, unstoppable=False)).text
        return cast("EffectStatus", found) if found in get_args(EffectStatus) else "unknown"

    async def _call(self, function: Callable[..., Any], values: Mapping[str, Any], *, unstoppable: bool) -> Output:
        """Call a function where it belongs: on the loop, in a thread, or in a fork."""
        if inspect.iscoroutinefunction(function):
            try:
                result = await function(**values)
            except BaseException as error:  # noqa: BLE001 It is raised again, as what it is.
                _raise_failure(error)
            return to_output(result, self._max_output)
        call = partial(_call_now, function, values)
        if self._threaded:
            return to_output(await _run_in_thread(call, function.__name__, unstoppable=unstoppable), self._max_output)
        return await run_forked(call, function.__name__, self._max_output)

    def _fill_arguments(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        filled, deps = self._arguments.fill(arguments, permit), self._arguments.deps
        if not deps:
            return filled
        missing = [name for name in deps if name not in self._dependencies]
        if missing:
            raise Failed("NoDeps", f"{self.spec.name} needs {', '.join(missing)}: run its agent with `deps`.")
        return {**filled, **self._dependencies}

    def __call__(self, *_arguments: Any, **_more: Any) -> NoReturn:
        raise TypeError(
            f"{self.spec.name} is a tool and is not called directly: it runs through the guard, as in "
            f'guard.call("{self.spec.name}", ...).'
        )

    def run_in_own_process(self, plain: bytes, permit: Permit) -> Any:
        """Call the function directly, in the process that was made for this call."""
        return _call_now(self._function.open(permit), self._arguments.read(plain, permit.id))


class ToolOptions(TypedDict, total=False):
    """Options of a tool.

    `isolate` says where the function runs. By default a plain function runs in a fork of the process that is made for
    the call: it sees what the process has, changes nothing of it, uses none of its open connections, and can be killed.
    With True it runs in a new interpreter, which imports its module: for libraries that do not work after a fork. With
    False it runs in a thread, where it can change the process and use its connections, and cannot be stopped: it runs
    on after a halt or a timeout, and if it holds the GIL it blocks the whole process, which is then ended as a whole
    where `halter` runs it.

    `cost` is in dollars, or "learned" from earlier calls. `timeout` is in seconds or written like `5m`. `check` finds
    out what became of a write whose answer was lost. `egress` says that the arguments choose where data goes.
    `max_output` is how many characters of a result are kept. `writes` names the argument that is the content of a file:
    no watch of the agent is triggered by that file.

    `reads` says who wrote what the tool returns, `reach` what it changes, and `arguments` what each argument decides,
    as in `{"to": "destination:address"}`: a call with a value that no trusted place has said is put before a person.
    `mints` and `lists` name fields of its records that vouch for values, and `asks` words of a task that ask for it.
    """

    name: str
    level: Level
    effect: Effect
    idempotent: bool
    egress: bool
    check: CheckArguments
    cost: float | str | Decimal
    timeout: float | str
    isolate: bool
    max_output: int
    writes: str
    reads: Reads
    reach: Reach
    arguments: Mapping[str, str]
    mints: Mapping[str, str]
    lists: Mapping[str, str]
    asks: Sequence[str]


@overload
def tool(function: Callable[..., Any], /, **options: Unpack[ToolOptions]) -> FunctionTool: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a plain typed function: as `@tool`, as `@tool(level="SAFE")`, or as `tool(function, ...)`."""
    reject_unknown_options(options, ToolOptions.__optional_keys__, "a tool")
    if function is None:
        return lambda function: tool(function, **options)
    check = options.get("check")
    limit, writes = options.get("max_output", MAX_OUTPUT), options.get("writes", "")
    threaded = options.get("isolate") is False
    return FunctionTool(
        function,
        _describe_function(function, options),
        check,
        limit,
        writes=writes,
        threaded=threaded,
        declared=_read_declared(options),
    )


def _read_declared(options: ToolOptions) -> DeclaredParts:
    raw: dict[str, Any] = {name: options[name] for name in DeclaredParts.__struct_fields__ if name in options}
    if not raw:
        return NOTHING_DECLARED
    for name, choices in (("reads", get_args(Reads)), ("reach", get_args(Reach))):
        if name in raw:
            _check_choice(name, raw[name], choices)
    if "asks" in raw:
        raw["asks"] = tuple(raw["asks"])
    return DeclaredParts(**raw)


def _declare(spec: ToolSpec, said: DeclaredParts) -> ToolSpec:
    """Add what is declared to the guess; a name that is no argument is a mistake."""
    if said is NOTHING_DECLARED:
        return spec
    base = guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")
    unknown = [] if said.arguments is UNSET else [name for name in said.arguments if name not in base.arguments]
    if unknown:
        raise ConfigError(f"The tool {spec.name} declares {', '.join(unknown)}, which is no argument of it.")
    try:
        return replace(spec, declaration=refine_declaration(base, said))
    except ValueError as error:
        raise ConfigError(f"The tool {spec.name} cannot be declared: {error}.") from None


def _describe_function(function: Callable[..., Any], options: ToolOptions) -> ToolSpec:
    cost = options.get("cost", 0)
    timeout = options.get("timeout")
    return ToolSpec(
        name=_check_name(options.get("name", function.__name__)),
        description=inspect.getdoc(function) or function.__name__.replace("_", " "),
        schema=b"",
        level=_check_choice("level", options.get("level", "CONTROLLED"), LEVELS),
        effect=_check_choice("effect", options.get("effect", "write"), get_args(Effect)),
        idempotent=options.get("idempotent", False),
        egress=options.get("egress", False),
        cost="learned" if cost == "learned" else usd_to_micros(cost),
        timeout=DEFAULT_TOOL_TIMEOUT if timeout is None else _micros(timeout),
        isolate=bool(options.get("isolate")),
        checked="check" in options,
    )


def spec_from_hints(
    name: str, description: str, schema: bytes, hints: Mapping[str, Any], *, server: str = ""
) -> ToolSpec:
    """The spec of an MCP server's tool.

    Hints are claims: only a plain `true` counts, contradictory hints count for nothing, and a missing one means the
    worse.
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
    # The hints are part of the digest; what follows from them is not, so that no pin of an earlier version is void.
    return replace(add_spec_digest(spec), declaration=_declare_from_hints(spec, hints))


def _declare_from_hints(spec: ToolSpec, hints: Mapping[str, Any]) -> Declaration:
    """What a server's hints say of reach. What it returns is written by anyone, no matter what it claims."""
    base = guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")
    if spec.effect == "read":
        return base
    if hints.get("destructiveHint") is True:
        return refine_declaration(base, DeclaredParts(reach="final"))
    closed = hints.get("destructiveHint") is False and not spec.egress
    return refine_declaration(base, DeclaredParts(reach="own")) if closed else base


def _raise_failure(error: BaseException) -> NoReturn:
    """Raise what a function that was awaited has raised: as its failure, unless it is told to stop."""
    if isinstance(error, asyncio.CancelledError):
        # A function may well cancel what it started itself; only if its caller was cancelled is this the caller's.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
    elif isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    # A panic in a library that is written in Rust is no Exception, and yet it is the function's own failure.
    raise _failure(error) from error


async def _run_in_thread(call: Callable[[], Any], name: str, *, unstoppable: bool) -> Any:
    # The thread has the context of the call, in which what it prints is masked.
    work = asyncio.get_running_loop().run_in_executor(ThreadPerTaskExecutor(), copy_context().run, call)
    try:
        return await work
    except asyncio.CancelledError:
        if unstoppable:
            raise Unstoppable(
                f"{name} runs on in its thread, which cannot be stopped: its outcome is unknown. "
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
    return Failed(type(error).__name__, _describe_error(error))


def _describe_error(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 It is a stranger's code, too, and its failure must not hide the first.
        return f"it cannot say why, but raises {type(worse).__name__}"


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"{name!r} is no name for a tool: providers accept up to 64 letters, digits, _ and -, beginning with no digit."
    )


def _check_choice(key: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value in allowed:
        return value
    raise ConfigError(f"A tool's {key} cannot be {value!r}: it is one of {', '.join(allowed)}.")


def _micros(timeout: float | str) -> int:
    micros = parse_duration(timeout) if isinstance(timeout, str) else round(timeout * SECOND)
    if micros > 0:
        return micros
    raise ConfigError(f"A tool's timeout cannot be {timeout!r}: every call must end, so it is longer than zero.")


MAX_SCHEMA: Final = 100_000
"""Bytes of a schema: every request to a model carries it."""

MAX_DEPTH: Final = 50
MAX_CHECK_STEPS: Final = 100_000
"""Steps of one check. An ordinary one takes less than a hundred."""

_FOLLOWED: Final = 20
"""Steps that following a reference counts for."""

_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SHOWN: Final = 120

# Comparing all elements with each other, and matching names with expressions that are not linear.
_LEFT_TO_SERVER: Final = frozenset({"uniqueItems"})
_LEFT_IF_NAMES_MATCH: Final = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})

_Rule = Callable[[Any, Any, Any, Any], Any]


class UnusableSchema(msgspec.Struct, frozen=True):
    """A schema that cannot be used, and why, as the end of a sentence."""

    why: str


class TooCostly(Exception):
    """A check took more steps than it may. It never leaves this module."""


def compile_schema(schema: Any) -> "SchemaChecker | UnusableSchema":
    """Compile a schema to a checker, or say why it cannot be used."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        text = canonical_json(schema)
        flaw = _find_schema_flaw(schema, text)
        if flaw:
            return UnusableSchema(flaw)
        base: Any = cast("Any", validator_for)(schema, default=_default_validator())
        base.check_schema(schema)
    except SchemaError as error:
        return UnusableSchema(f"its schema is not valid: {error.message[:_SHOWN]}")
    except (ValueError, TypeError, RecursionError) as error:
        return UnusableSchema(f"its schema cannot be read: {str(error)[:_SHOWN]}")
    checker = SchemaChecker(schema, text, base)
    return UnusableSchema("its schema leads back to itself without end") if checker.is_endless() else checker


class SchemaChecker:
    def __init__(self, schema: Mapping[str, Any], text: bytes, base: Any) -> None:
        from jsonschema import validators
        from referencing import Registry

        self.text = text
        self._remaining = 0
        left = _LEFT_TO_SERVER | (_LEFT_IF_NAMES_MATCH if b'"patternProperties"' in text else frozenset[str]())
        rules = {**base.VALIDATORS, "pattern": _pattern, **dict.fromkeys(left, _skip_check)}
        counted = {
            name: self._count_rule(rule, _FOLLOWED if name in _REFERENCES else 1) for name, rule in rules.items()
        }
        kind: Any = cast("Any", validators).extend(base, counted)
        # A registry that is empty and has no way to fill itself: nothing is ever fetched.
        self._validator: Any = kind(schema, registry=cast("Any", Registry)())

    def is_endless(self) -> bool:
        """Whether not even the simplest arguments can be checked."""
        try:
            self._mistakes({})
        except (TooCostly, RecursionError):
            return True
        except _list_schema_errors():
            return False
        return False

    def validate(self, name: str, arguments: bytes) -> Valid | Invalid:
        try:
            values = json.loads(arguments.strip() or b"{}", parse_constant=_reject_constant)
            if not isinstance(values, dict):
                return Invalid(f"The arguments of {name} must be an object.")
            canonical = canonical_json(values)
        except (ValueError, RecursionError) as error:
            return Invalid(f"The arguments of {name} cannot be read as JSON: {str(error)[:_SHOWN]}.")
        sentence = self._describe(cast("dict[str, Any]", values))
        if sentence:
            return Invalid(f"The arguments of {name} do not fit. {sentence}")
        return Valid(cast("dict[str, Any]", values), canonical)

    def _describe(self, values: dict[str, Any]) -> str:
        try:
            mistakes = self._mistakes(values)
        except (TooCostly, RecursionError):
            return "Its schema is too complex to check them; simpler arguments may work."
        except _list_schema_errors() as error:
            return f"Its schema cannot be applied to them ({type(error).__name__})."
        remaining = len(mistakes) - _TOLD
        return "; ".join(mistakes[:_TOLD]) + (f"; and {remaining} more." if remaining > 0 else "." if mistakes else "")

    def _mistakes(self, values: dict[str, Any]) -> list[str]:
        self._remaining = MAX_CHECK_STEPS
        return [_mistake(error) for error in self._validator.iter_errors(values)]

    def _count_rule(self, rule: _Rule, price: int) -> _Rule:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._remaining -= price + (len(cast("list[Any]", value)) if isinstance(value, list | dict) else 0)
            if self._remaining < 0:
                raise TooCostly
            return rule(validator, value, instance, schema)

        return counted


def _list_schema_errors() -> tuple[type[Exception], ...]:
    """What applying a valid schema can still raise: dangling references, unknown types, numbers too large."""
    from jsonschema.exceptions import UndefinedTypeCheck, UnknownType
    from referencing.exceptions import Unresolvable

    return Unresolvable, UnknownType, UndefinedTypeCheck, LookupError, ValueError, TypeError, ArithmeticError


def _default_validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def _find_schema_flaw(schema: Any, text: bytes) -> str:
    if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type") != "object":
        return 'its schema does not describe an object: its "type" must be "object"'
    if len(text) > MAX_SCHEMA:
        return f"its schema has {len(text):,} bytes, and {MAX_SCHEMA:,} are the most"
    for depth, key, value in _walk_schema(cast("dict[str, Any]", schema)):
        if depth > MAX_DEPTH:
            return f"its schema is nested more than {MAX_DEPTH} deep"
        if key in _REFERENCES and isinstance(value, str) and not value.startswith("#"):
            return f"its schema refers to {value[:_SHOWN]!r}, and nothing outside of a schema is ever fetched"
    return ""


def _walk_schema(schema: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield everything in a schema, with its depth and its key, without recursion."""
    waiting: list[tuple[int, str, Any]] = [(0, "", schema)]
    while waiting:
        depth, key, value = waiting.pop()
        yield depth, key, value
        match value:
            case dict():
                waiting += [(depth + 1, name, each) for name, each in cast("dict[str, Any]", value).items()]
            case list():
                waiting += [(depth + 1, "", each) for each in cast("list[Any]", value)]
            case _:
                pass


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    """Match in linear time; an expression that RE2 refuses is left to the server."""
    from jsonschema import ValidationError

    re2: Any = import_module("re2")
    if not isinstance(instance, str):
        return
    options = re2.Options()
    options.log_errors = False
    try:
        fits = re2.compile(pattern, options).search(instance)
    except re2.error:
        return
    if not fits:
        yield ValidationError("does not match")


def _skip_check(_validator: Any, _value: Any, _instance: Any, _schema: Any) -> None:
    return None


def _mistake(error: Any) -> str:
    """What is wrong and where, without the value: it may be large or private."""
    place = ".".join(str(step) for step in error.absolute_path)
    query = json.dumps(error.validator_value, ensure_ascii=False)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known: Mapping[str, Any] = error.schema.get("properties", {})
        extra = sorted(str(name)[:40] for name in cast("dict[str, Any]", error.instance) if name not in known)
        query = f"{query[:_SHOWN]}, but there is {', '.join(extra[:_TOLD])}"
    elif len(query) > _SHOWN:
        query = f"{query[:_SHOWN]}…"
    return f"{place}: {error.validator} is {query}" if place else f"{error.validator} is {query}"


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
