"""Tools from plain functions, and JSON Schemas of third parties.

    @tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        '''Return the current weather.'''

The docstring describes the function to the model, and the types describe its arguments. An async function runs on the
event loop. A plain function runs in a fork of the process that is made for this call, and is killed when the call is
halted, is cancelled or times out: it sees the memory of the process and cannot change it. `isolate` changes this.

A third-party schema is checked before use. Nothing that it refers to is fetched. Checking arguments takes a bounded
number of steps and uses only regular expressions that run in linear time. Rules that need more are left to the server,
which checks the arguments again in any case.
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
from types import CodeType, MappingProxyType
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
from halter.core.money import usd_to_micros
from halter.core.options import reject_unknown_options, write_out_options
from halter.core.provenance import Declaration, Reach, Reads, guess_declaration
from halter.core.text import join_names
from halter.core.threads import ThreadPerTaskExecutor
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
from halter.system.protected_paths import RootedTool
from halter.tools.process import MAX_OUTPUT, check_findable, run_forked, run_isolated, to_output
from halter.tools.trusted_code import TrustCheck

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_JSON_TYPES: Final[frozenset[Any]] = frozenset((str, int, bool))
"""Types whose values have exactly one JSON form; a float has several."""

_encode_sorted: Final = msgspec.json.Encoder(order="sorted").encode
_encode_canonical: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode
_MAX_ERRORS_SHOWN: Final = 5
"""Number of mistakes that a message to the model lists."""


class CallKey(str):
    """A parameter type that is not an argument: it receives the id of the call, which is the same for each repetition.

    A function uses it as its idempotency key.
    """

    __slots__ = ()


DEPS: Final = object()

T = TypeVar("T")

Deps = Annotated[T, DEPS]
"""A parameter type that is not an argument: `Deps[Bank]` receives the value that the program passed as `deps`."""


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
            if any(value is DEPS for value in getattr(annotation, "__metadata__", ()))
        )
        self.near = tuple(name for name, annotation in annotations.items() if annotation is NearBudget)
        if self.near and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"The tool {tool} takes {self.near[0]}: NearBudget, which needs an async function. "
                "Define it with `async def`."
            )
        injected_names = self.adds = (*self._keys, *self.deps, *self.near)
        self._fields = {name: value for name, value in annotations.items() if name not in injected_names}
        signature = inspect.signature(function)
        self.untyped = tuple(
            name for name, each in signature.parameters.items() if each.annotation is inspect.Parameter.empty
        )
        adapter = _compile_adapter(tool, self._fields, signature)
        # Bypasses the adapter's own checks of options that are never used here.
        self._read, self._dump = adapter.validator.validate_json, adapter.serializer.to_python
        self._is_plain_json = _JSON_TYPES.issuperset(self._fields.values())
        defaults: list[Any] = [signature.parameters[name].default for name in self._fields]
        defaults_are_json = all(value is inspect.Parameter.empty or type(value) in _JSON_TYPES for value in defaults)
        self._has_nulls = not (self._is_plain_json and defaults_are_json)
        self.schema = json.dumps(adapter.json_schema()).encode()

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self._fields, *self._keys, *self.deps, *self.near))

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check arguments that a model wrote. The canonical form includes defaults and has sorted keys."""
        try:
            values = self._read(arguments)
            canonical = (
                _encode_sorted(values) if self._is_plain_json else canonical_json(self._dump(values, mode="json"))
            )
            # A person approves exactly what runs, and JSON writes an infinite number or a NaN as null.
            if self._has_nulls and canonical.find(b"null") >= 0 and self._read(canonical) != values:
                return Invalid(f"The arguments of {self._tool} contain an infinite number or a NaN.")
            return Valid(values, canonical)
        except self._mistaken as error:
            stripped_arguments = arguments.strip() or b"{}"
            if stripped_arguments != arguments:
                return self.validate(stripped_arguments)
            return Invalid(f"Invalid arguments for {self._tool}. {_describe_mistakes(error)}")
        except (ValueError, TypeError, RecursionError) as error:
            return Invalid(f"The arguments of {self._tool} cannot be encoded as JSON: {error}.")

    def fill(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        """Return the values of a call: secrets replace their names, and injected parameters are filled in."""
        if find_secret_names(arguments.canonical):
            values = self.read(self.reveal_secrets(arguments, permit), permit.id)
        elif self._keys:
            values = {**arguments.values, **dict.fromkeys(self._keys, CallKey(permit.id))}
        else:
            values = arguments.values
        return {**values, **dict.fromkeys(self.near, NearBudget(permit.near_budget))} if self.near else values

    def reveal_secrets(self, arguments: Valid, permit: Permit) -> bytes:
        """Return the arguments as JSON with secrets in place of their names, for arguments of any type."""
        try:
            return canonical_json(substitute_secrets(json.loads(arguments.canonical), permit.reveal))
        except KeyError as missing:
            raise Failed("UnknownSecret", f"This call may not use the secret {missing.args[0]}.") from None

    def read(self, arguments: bytes, key: str) -> Mapping[str, Any]:
        """Decode arguments that were valid before secrets were inserted."""
        match self.validate(arguments):
            case Valid(values):
                return {**values, **dict.fromkeys(self._keys, CallKey(key))}
            case Invalid(sentence):
                raise Failed("InvalidSecret", sentence)


def canonical_json(value: Any) -> bytes:
    """Encode a value as JSON, so that equal values have equal bytes."""
    return _encode_canonical(value).encode()


def _annotations(tool: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    annotations: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"The tool {tool} takes {parameter}, which a schema cannot describe. "
                "Give each parameter a name and a type."
            )
        annotations[name] = hints.get(name, Any)
    return annotations


def _compile_adapter(tool: str, fields: Mapping[str, Any], signature: inspect.Signature) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema
    from typing_extensions import TypedDict

    # Created at run time, which type checkers cannot follow; a model class would forbid some parameter names.
    typed_dict: Any = TypedDict
    shape = typed_dict(
        tool, {name: _field(annotation, signature.parameters[name].default) for name, annotation in fields.items()}
    )
    shape.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(shape)
        adapter.json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        raise ConfigError(
            f"A parameter of the tool {tool} has a type that a schema cannot describe: {error}"
        ) from error
    return adapter


def _field(annotation: Any, default: Any) -> Any:
    from pydantic import Field

    return annotation if default is inspect.Parameter.empty else Annotated[annotation, Field(default=default)]


def _describe_mistakes(error: "ValidationError") -> str:
    """Describe the mistakes and where they are, without the value, which may be large or private."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    sentences = [f"{_format_location(mistake['loc'])}{mistake['msg']}" for mistake in errors[:_MAX_ERRORS_SHOWN]]
    remaining = len(errors) - len(sentences)
    return "; ".join(sentences) + (f"; and {remaining} more." if remaining else ".")


def _format_location(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) + ": " if loc else ""


NOTHING_DECLARED: Final = DeclaredParts()

CheckArguments = Callable[..., Any]
"""A function with some of the tool's parameters that returns the `EffectStatus` of an earlier call."""

_NAME_PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class FunctionTool:
    """A function as a tool. Implements the port `Tool`."""

    def __init__(  # noqa: PLR0913 Each is a fact that a function does not state itself.
        self,
        function: Callable[..., Any],
        spec: ToolSpec,
        probe: CheckArguments | None,
        max_output: int,
        deps: Mapping[str, Any] = MappingProxyType({}),
        writes: str = "",
        *,
        threaded: bool = False,
        declared: DeclaredParts = NOTHING_DECLARED,
    ) -> None:
        self._function = PermitGate(function)
        self._has_docstring = bool(inspect.getdoc(function))
        self.code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
        self._awaited = inspect.iscoroutinefunction(function)
        self._arguments = FunctionArguments(spec.name, function)
        self._check = None if probe is None else PermitGate(probe)
        self._max_output = max_output
        self._dependencies = deps
        self._content_parameter = writes
        self.rooted_tool: RootedTool | None = None
        self._threaded = threaded
        self._require_trust: TrustCheck | None = None
        self.spec = add_spec_digest(_declare(replace(spec, schema=self._arguments.schema), declared))
        if spec.isolate and self._arguments.deps:
            raise ConfigError(
                f"The tool {spec.name} takes deps, which an isolated process does not have. Remove `isolate=True`."
            )
        if spec.isolate:
            check_findable(spec.name, function)
        if probe is not None:
            unknown = [name for name in inspect.signature(probe).parameters if name not in self._arguments.names]
            if unknown:
                raise ConfigError(
                    f"The check of the tool {spec.name} takes {', '.join(unknown)}, "
                    "which the tool does not take. A check may use only parameters of its tool."
                )

    def list_gaps(self) -> Iterator[str]:
        """List what the function does not tell a model: what the tool does, or what its parameters take."""
        if not self._has_docstring:
            yield f"the tool `{self.spec.name}` has no docstring to tell the model what it does"
        if self._arguments.untyped:
            names = join_names(self._arguments.untyped)
            yield f"the tool `{self.spec.name}` has no type for {names} to tell the model what to pass"

    def with_deps(self, deps: Any) -> "FunctionTool":
        """Return a copy of the tool with the program's value for its `Deps` parameters."""
        if not self._arguments.deps:
            return self
        tool_copy = copy.copy(self)
        tool_copy._dependencies = dict.fromkeys(self._arguments.deps, deps)  # noqa: SLF001 It is this very class.
        return tool_copy

    def with_trust_check(self, require_trust: TrustCheck) -> "FunctionTool":
        """Return a copy of the tool that calls `require_trust` each time before its code is loaded from those files."""
        tool_copy = copy.copy(self)
        tool_copy._require_trust = require_trust  # noqa: SLF001 It is this very class.
        return tool_copy

    def at(self, rooted: RootedTool) -> Self:
        """Set the folder that the tool works in, and return the tool. The folder receives the protected paths."""
        self.rooted_tool = rooted
        return self

    def validate(self, arguments: bytes) -> Valid | Invalid:
        valid = self._arguments.validate(arguments)
        if not self._content_parameter or isinstance(valid, Invalid):
            return valid
        content = str(valid.values[self._content_parameter]).encode("utf-8", "surrogatepass")
        return replace(valid, writes=(sha256(content).hexdigest(),))

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        function = self._function.open(permit)
        if self.spec.isolate:
            revealed_arguments = self._arguments.reveal_secrets(arguments, permit)
            # Checking trust reads the agent's folder, which may be large.
            files = await asyncio.to_thread(self._require_trust) if self._require_trust is not None else None
            return await run_isolated(function, revealed_arguments, permit.id, self._max_output, files)
        function_arguments = self._arguments
        is_plain = not function_arguments.adds and DOLLAR not in arguments.canonical
        values = arguments.values if is_plain else self._fill_arguments(arguments, permit)
        if self._awaited:
            try:
                result = await function(**values)
            except BaseException as error:  # noqa: BLE001 It is raised again.
                _raise_failure(error)
            return to_output(result, self._max_output)
        return await self._call(function, values, unstoppable=self.spec.effect == "write")

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        """Run the tool's own check; without one, return `unknown`."""
        if self._check is None:
            return "unknown"
        probe = self._check.open(permit)
        arguments_by_name = self._fill_arguments(arguments, permit)
        values = {name: arguments_by_name[name] for name in inspect.signature(probe).parameters}
        text = (await self._call(probe, values, unstoppable=False)).text
        return cast("EffectStatus", text) if text in get_args(EffectStatus) else "unknown"

    async def _call(self, function: Callable[..., Any], values: Mapping[str, Any], *, unstoppable: bool) -> Output:
        """Call a function on the event loop, in a thread, or in a fork."""
        if inspect.iscoroutinefunction(function):
            try:
                result = await function(**values)
            except BaseException as error:  # noqa: BLE001 It is raised again.
                _raise_failure(error)
            return to_output(result, self._max_output)
        call = partial(_call_now, function, values)
        if self._threaded:
            return to_output(await _run_in_thread(call, function.__name__, unstoppable=unstoppable), self._max_output)
        return await run_forked(call, function.__name__, self._max_output)

    def _fill_arguments(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        values, deps = self._arguments.fill(arguments, permit), self._arguments.deps
        if not deps:
            return values
        missing = [name for name in deps if name not in self._dependencies]
        if missing:
            raise Failed("NoDeps", f"{self.spec.name} needs {', '.join(missing)}. Run its agent with `deps`.")
        return {**values, **self._dependencies}

    def __call__(self, *_arguments: Any, **_more: Any) -> NoReturn:
        raise TypeError(
            f"{self.spec.name} is a tool and cannot be called directly. Call it through the guard, as in "
            f'guard.call("{self.spec.name}", ...).'
        )

    def run_in_own_process(self, arguments: bytes, permit: Permit) -> Any:
        """Call the function in the process that was started for this call."""
        return _call_now(self._function.open(permit), self._arguments.read(arguments, permit.id))


class ToolOptions(TypedDict, total=False):
    """Options of a tool.

    `isolate` selects where the function runs. By default a plain function runs in a fork of the process that is made
    for the call: it sees the memory of the process, cannot change it or use its open connections, and can be killed.
    With True it runs in a new interpreter, which imports its module: for libraries that do not work after a fork. With
    False it runs in a thread, where it can change the process and use its connections, and cannot be stopped: it
    continues after a halt or a timeout, and if it holds the GIL it blocks the whole process, which `halter` then kills.

    `cost` is in dollars, or "learned" from earlier calls. `timeout` is in seconds or a duration like `5m`. `check`
    finds the outcome of a write whose result was lost. `egress` declares that the arguments choose where data goes.
    `max_output` is the maximum number of characters of a result. `writes` names the argument that is the content of a
    file: that file does not trigger a watch of the agent.

    `reads` declares who wrote what the tool returns, `reach` what it changes, and `arguments` what each argument
    decides, as in `{"to": "destination:address"}`: a call with a value from untrusted content then needs a person.
    `mints` and `lists` name fields of its records that vouch for values, and `asks` words of a task that request it.
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
@write_out_options(ToolOptions)
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a typed function: as `@tool`, as `@tool(level="SAFE")`, or as `tool(function, ...)`."""
    reject_unknown_options(options, ToolOptions.__optional_keys__, "a tool")
    if function is None:
        return lambda function: tool(function, **options)
    check = options.get("check")
    limit, writes = options.get("max_output", MAX_OUTPUT), options.get("writes", "")
    in_thread = options.get("isolate") is False
    return FunctionTool(
        function,
        _build_spec(function, options),
        check,
        limit,
        writes=writes,
        threaded=in_thread,
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


def _declare(spec: ToolSpec, declared: DeclaredParts) -> ToolSpec:
    """Refine the guessed declaration of a tool with the declared parts; reject names that are not arguments."""
    if declared is NOTHING_DECLARED:
        return spec
    base = guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")
    unknown = [] if declared.arguments is UNSET else [name for name in declared.arguments if name not in base.arguments]
    if unknown:
        raise ConfigError(f"The tool {spec.name} declares {', '.join(unknown)}, which is not an argument of the tool.")
    try:
        return replace(spec, declaration=refine_declaration(base, declared))
    except ValueError as error:
        raise ConfigError(f"The declaration of the tool {spec.name} is invalid: {error}.") from None


def _build_spec(function: Callable[..., Any], options: ToolOptions) -> ToolSpec:
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
    """Build the spec of an MCP server's tool.

    Hints are claims: only a literal `true` counts, contradictory hints are ignored, and a missing hint means the more
    dangerous value.
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
    # The digest covers the hints and not what follows from them, so pins of earlier versions stay valid.
    return replace(add_spec_digest(spec), declaration=_declare_from_hints(spec, hints))


def _declare_from_hints(spec: ToolSpec, hints: Mapping[str, Any]) -> Declaration:
    """Derive a declaration from a server's hints. Its output counts as written by anyone, whatever it claims."""
    base = guess_declaration(spec.name, spec.schema, read_only=spec.effect == "read")
    if spec.effect == "read":
        return base
    if hints.get("destructiveHint") is True:
        return refine_declaration(base, DeclaredParts(reach="final"))
    is_closed_world = hints.get("destructiveHint") is False and not spec.egress
    return refine_declaration(base, DeclaredParts(reach="own")) if is_closed_world else base


def _raise_failure(error: BaseException) -> NoReturn:
    """Raise the exception of an awaited function as its failure, unless its caller was cancelled."""
    if isinstance(error, asyncio.CancelledError):
        # A function may cancel its own tasks; only a cancelled caller is cancelled here.
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise error
    elif isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    # A panic in a Rust library is not an Exception, but it is the function's own failure.
    raise _failure(error) from error


async def _run_in_thread(call: Callable[[], Any], name: str, *, unstoppable: bool) -> Any:
    # The thread runs in the context of the call, which masks its printed output.
    work = asyncio.get_running_loop().run_in_executor(ThreadPerTaskExecutor(), copy_context().run, call)
    try:
        return await work
    except asyncio.CancelledError:
        if unstoppable:
            raise Unstoppable(
                f"{name} is still running in its thread, which cannot be stopped; its outcome is unknown. "
                "Make it async, or remove isolate=False."
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
    except Exception as secondary:  # noqa: BLE001 Third-party code, whose failure must not hide the first one.
        return f"no message: str() raised {type(secondary).__name__}"


def _check_name(name: str) -> str:
    if _NAME_PATTERN.fullmatch(name):
        return name
    raise ConfigError(f"Invalid tool name {name!r}: use up to 64 letters, digits, _ and -, not starting with a digit.")


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value in choices:
        return value
    raise ConfigError(f"A tool's {key} cannot be {value!r}. Use one of {', '.join(choices)}.")


def _micros(timeout: float | str) -> int:
    micros = parse_duration(timeout) if isinstance(timeout, str) else round(timeout * SECOND)
    if micros > 0:
        return micros
    raise ConfigError(f"A tool's timeout cannot be {timeout!r}. Use more than zero.")


MAX_SCHEMA: Final = 100_000
"""Maximum bytes of a schema, which every request to a model carries."""

MAX_DEPTH: Final = 50
MAX_CHECK_STEPS: Final = 100_000
"""Maximum steps of one check. An ordinary check takes less than a hundred."""

_REFERENCE_COST: Final = 20
"""Steps that are counted for following a reference."""

_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_MAX_QUOTE: Final = 120

# Rules that compare all elements with each other, or match names with non-linear expressions.
_SKIPPED_RULES: Final = frozenset({"uniqueItems"})
_SKIPPED_WITH_PATTERNS: Final = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})

_Rule = Callable[[Any, Any, Any, Any], Any]


class UnusableSchema(msgspec.Struct, frozen=True):
    """A schema that cannot be used. `reason` is the end of a sentence."""

    why: str


class TooCostly(Exception):
    """A check exceeded its steps. Never leaves this module."""


def compile_schema(schema: Any) -> "SchemaChecker | UnusableSchema":
    """Compile a schema to a checker; return an UnusableSchema with the reason if that fails."""
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
        return UnusableSchema(f"its schema is invalid: {error.message[:_MAX_QUOTE]}")
    except (ValueError, TypeError, RecursionError) as error:
        return UnusableSchema(f"its schema cannot be read: {str(error)[:_MAX_QUOTE]}")
    checker = SchemaChecker(schema, text, base)
    return UnusableSchema("its schema is endlessly recursive") if checker.is_endless() else checker


class SchemaChecker:
    def __init__(self, schema: Mapping[str, Any], text: bytes, base: Any) -> None:
        from jsonschema import validators
        from referencing import Registry

        self.text = text
        self._remaining = 0
        skipped_rules = _SKIPPED_RULES | (
            _SKIPPED_WITH_PATTERNS if b'"patternProperties"' in text else frozenset[str]()
        )
        rules = {**base.VALIDATORS, "pattern": _pattern, **dict.fromkeys(skipped_rules, _skip_check)}
        counting_rules = {
            name: self._count_rule(rule, _REFERENCE_COST if name in _REFERENCES else 1) for name, rule in rules.items()
        }
        validator_class: Any = cast("Any", validators).extend(base, counting_rules)
        # An empty registry without a retriever: nothing is ever fetched.
        self._validator: Any = validator_class(schema, registry=cast("Any", Registry)())

    def is_endless(self) -> bool:
        """Return true if even empty arguments cannot be checked."""
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
            return Invalid(f"The arguments of {name} are not valid JSON: {str(error)[:_MAX_QUOTE]}.")
        sentence = self._describe(cast("dict[str, Any]", values))
        if sentence:
            return Invalid(f"Invalid arguments for {name}. {sentence}")
        return Valid(cast("dict[str, Any]", values), canonical)

    def _describe(self, values: dict[str, Any]) -> str:
        try:
            violations = self._mistakes(values)
        except (TooCostly, RecursionError):
            return "The schema is too complex to check these arguments. Try simpler arguments."
        except _list_schema_errors() as error:
            return f"The schema cannot be applied to these arguments ({type(error).__name__})."
        remaining = len(violations) - _MAX_ERRORS_SHOWN
        return "; ".join(violations[:_MAX_ERRORS_SHOWN]) + (
            f"; and {remaining} more." if remaining > 0 else "." if violations else ""
        )

    def _mistakes(self, values: dict[str, Any]) -> list[str]:
        self._remaining = MAX_CHECK_STEPS
        return [_mistake(error) for error in self._validator.iter_errors(values)]

    def _count_rule(self, rule: _Rule, cost: int) -> _Rule:
        def count_and_apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._remaining -= cost + (len(cast("list[Any]", value)) if isinstance(value, list | dict) else 0)
            if self._remaining < 0:
                raise TooCostly
            return rule(validator, value, instance, schema)

        return count_and_apply


def _list_schema_errors() -> tuple[type[Exception], ...]:
    """List the errors of applying a valid schema: dangling references, unknown types, numbers that are too large."""
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
        return f"its schema has {len(text):,} bytes; the maximum is {MAX_SCHEMA:,}"
    for depth, key, value in _walk_schema(cast("dict[str, Any]", schema)):
        if depth > MAX_DEPTH:
            return f"its schema is nested more than {MAX_DEPTH} levels deep"
        if key in _REFERENCES and isinstance(value, str) and not value.startswith("#"):
            return f"its schema refers to {value[:_MAX_QUOTE]!r}, and external references are never fetched"
    return ""


def _walk_schema(schema: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield each value in a schema with its depth and key, without recursion."""
    pending: list[tuple[int, str, Any]] = [(0, "", schema)]
    while pending:
        depth, key, value = pending.pop()
        yield depth, key, value
        match value:
            case dict():
                pending += [(depth + 1, name, item) for name, item in cast("dict[str, Any]", value).items()]
            case list():
                pending += [(depth + 1, "", item) for item in cast("list[Any]", value)]
            case _:
                pass


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    """Match a pattern in linear time; leave an expression that RE2 rejects to the server."""
    from jsonschema import ValidationError

    re2: Any = import_module("re2")
    if not isinstance(instance, str):
        return
    options = re2.Options()
    options.log_errors = False
    try:
        match = re2.compile(pattern, options).search(instance)
    except re2.error:
        return
    if not match:
        yield ValidationError("does not match")


def _skip_check(_validator: Any, _value: Any, _instance: Any, _schema: Any) -> None:
    return None


def _mistake(error: Any) -> str:
    """Describe the mistakes and where they are, without the value, which may be large or private."""
    location = ".".join(str(step) for step in error.absolute_path)
    expected_text = json.dumps(error.validator_value, ensure_ascii=False)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        properties: Mapping[str, Any] = error.schema.get("properties", {})
        extra = sorted(str(name)[:40] for name in cast("dict[str, Any]", error.instance) if name not in properties)
        expected_text = f"{expected_text[:_MAX_QUOTE]}, but there is {', '.join(extra[:_MAX_ERRORS_SHOWN])}"
    elif len(expected_text) > _MAX_QUOTE:
        expected_text = f"{expected_text[:_MAX_QUOTE]}…"
    return f"{location}: {error.validator} is {expected_text}" if location else f"{error.validator} is {expected_text}"


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
