"""Effects of a caller's own code: a framework's tool or model, which the guard's doors run with a permit.

The guard admits the effect, the caller's function performs it, and the guard settles it. So the effect passes the same
checks in the same order as any other. If the function raises, its effect is settled as an error, and the exception is
raised to the caller.
"""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec

from halter.core.errors import HalterError, ModelRejected, ModelUnavailable
from halter.core.messages import Prompt, Reply, Text, TextListener, bound_prompt_tokens
from halter.core.tools import EffectStatus, Failed, Output, Permit, PermitGate, ToolSpec, Valid
from halter.core.usage import ModelName, Usage
from halter.core.vocabulary import Outcome

T = TypeVar("T")

Act = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Makes one tool call with the admitted arguments."""


class ModelResult(msgspec.Struct, Generic[T], frozen=True):
    """A model's answer in the caller's own form. Without a usage, the request is settled at its hold."""

    value: T
    text: str = ""
    usage: Usage | None = None


Ask = Callable[[int], Awaitable[ModelResult[T]]]
"""Makes one model request with at most the given number of output tokens."""


class EffectRefused(HalterError):
    """The guard refused a call or a request of a caller's own code. `outcome` says which check refused it.

    `terminal` says that the refusal ends the session, as a halt or a cap does: all further effects are refused too.
    """

    def __init__(self, sentence: str, outcome: Outcome) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.terminal = outcome in ("external_halt", "cost_cap_reached")


class DecisionPending(HalterError):
    """A call waits for a person's decision. Repeat the call with the same id after the decision."""

    def __init__(self, decision: str, tool: str) -> None:
        super().__init__(f"{tool} waits for the decision {decision}. See it with: halter inbox")
        self.decision = decision
        self.tool = tool


class ExternalTool:
    """A tool of the caller, as the guard sees it. The caller passes the function of each call."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec
        self._gates: dict[str, PermitGate[Act]] = {}
        self._results: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    def expect(self, call: str, act: Act) -> None:
        self._gates[call] = PermitGate(act)

    def has_result(self, call: str) -> bool:
        """Return true if this process made the call, and its result was not yet taken."""
        return call in self._results or call in self._errors

    def result(self, call: str, otherwise: Any) -> Any:
        """Return or raise what a call returned or raised; `otherwise` if an earlier process made the call."""
        self._gates.pop(call, None)
        if call in self._errors:
            raise self._errors.pop(call)
        return self._results.pop(call, otherwise)

    def validate(self, arguments: bytes) -> Valid:
        """Decode the arguments. The framework has already validated them; here they only have to be JSON."""
        return Valid(msgspec.json.decode(arguments, type=dict[str, Any]), arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        act = self._gates[permit.id].open(permit)
        try:
            value = self._results[permit.id] = await act(arguments.values)
        except Exception as error:
            self._errors[permit.id] = error
            raise Failed(type(error).__name__, str(error)) from error
        return Output(_render(value))

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return "unknown"


class ExternalModel:
    """A model of the caller, as the guard sees it. The caller passes the function of each request."""

    base_url: str | None = None

    def __init__(self, name: str) -> None:
        self.name = ModelName.parse(name)
        self._gates: dict[str, PermitGate[Ask[Any]]] = {}
        self._results: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    def expect(self, request: str, send: Ask[Any]) -> None:
        self._gates[request] = PermitGate(send)

    def result(self, request: str) -> Any:
        """Return or raise what a request returned or raised."""
        self._gates.pop(request, None)
        if request in self._errors:
            raise self._errors.pop(request)
        return self._results.pop(request, None)

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        request = permit.id.rpartition("/")[0]
        try:
            result = await self._gates[request].open(permit)(prompt.max_output_tokens)
        except Exception as error:
            self._errors[request] = error
            status = getattr(error, "status_code", None)
            is_rejected = (
                isinstance(status, int) and HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
            )
            raise (ModelRejected if is_rejected else ModelUnavailable)(str(error), billed=not is_rejected) from error
        self._results[request] = result.value
        return Reply((Text(result.text, "model", trusted=False),), usage=result.usage)


def _render(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError):
        return str(value)
