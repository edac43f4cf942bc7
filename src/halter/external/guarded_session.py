"""One session of a program with a `Guard`: its calls and model requests pass the guard, and it ends with its block."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, TypeVar

import msgspec

from halter.core.clock import HOUR, SECOND
from halter.core.errors import ConfigError
from halter.core.events import CallStarted
from halter.core.messages import Message, Model, Prompt, Text
from halter.core.renamed import RenamedAttribute
from halter.core.text import decode_body
from halter.core.tools import Tool, ToolSpec
from halter.core.vocabulary import Outcome, State, TerminalReason
from halter.external.effects import Act, Ask, DecisionPending, EffectRefused, ExternalModel, ExternalTool
from halter.external.flush_timer import FlushTimer
from halter.external.loop_thread import LoopThread
from halter.external.session import ExternalSession
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.halts import BudgetBusy
from halter.guard.prepare import Call
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.models.price_tables import make_prices
from halter.models.prices import Prices
from halter.state import lifecycle
from halter.state.receipt import Receipt, make_receipt
from halter.tools.function_tool import FunctionTool, canonical_json

R = TypeVar("R")
BUDGET_RETRY_DELAY: Final = SECOND


class GuardedSession:
    """One session of a program. Its calls and model requests pass the guard."""

    def __init__(self, session: ExternalSession, tools: dict[str, Tool]) -> None:
        self._session = session
        self._runtime = session.runtime
        self._tools = tools
        self._models: dict[str, ExternalModel] = {}
        self._end: tuple[State, TerminalReason] | None = None
        self._is_parked = False
        self._flush_timer = FlushTimer(self._runtime.flush_deferred, session.host.app.clock)
        self.can_defer = False
        """True if the caller makes one effect after the other, so that a settlement may go with the next intent."""

    @property
    def id(self) -> str:
        """The session's id; pass it to `Guard.session` to resume."""
        return self._session.id

    async def call(self, tool: str | FunctionTool, /, **arguments: Any) -> Answer:
        """Call a tool through the guard. Waits for a person's decision, and while other holds use up the budget.

        The answer has an outcome, also for a refused call. After a halt or at a cap, the session ends with its block,
        and each further call is refused for the same reason.
        """
        call = self._make_call(tool, arguments)
        async with self._session.order(call):
            answer = await self._runtime.call(call)
            self._session.observe(call, answer)
        return await self._end_after(answer)

    async def attempt(
        self, call: str, tool: str | FunctionTool, /, **arguments: Any
    ) -> Answer | ApprovalRequired | BudgetBusy:
        """Call a tool through the guard without waiting. After a decision, repeat the call with the same id.

        A settled id returns the same answer again: no effect happens twice.
        """
        identified = self._make_call(tool, arguments)
        identified = msgspec.structs.replace(identified, id=f"{self.id}.{call}")
        return await self._try(identified)

    async def act(
        self, spec: ToolSpec, arguments: Mapping[str, Any], do: Act, *, name: str = "", wait: bool = False
    ) -> Any:
        """Make a call whose effect is the caller's own: the guard admits it, `do` performs it, the guard settles it.

        Returns what `do` returns, and raises what it raises. Raises EffectRefused if the guard refuses the call. If a
        person has to decide first, the call waits; without `wait` it raises DecisionPending, and you repeat the call
        with the same `name` after the decision. A settled name returns the same answer again: no effect happens twice.
        """
        tool = self._tools.setdefault(spec.name, ExternalTool(spec))
        if not isinstance(tool, ExternalTool):
            raise ConfigError(f"{spec.name} is already a tool of this guard. Call it with `call`.")
        call = self._make_call(spec.name, arguments)
        call = msgspec.structs.replace(call, id=f"{self.id}.{name}") if name else call
        # Only a read may be in doubt after a crash although it has returned: it can be repeated.
        call = msgspec.structs.replace(call, can_defer=self.can_defer and spec.effect == "read")
        tool.expect(call.id, do)
        while not isinstance(answer := await self._try(call), Answer):
            if isinstance(answer, BudgetBusy):
                await self._session.host.app.clock.sleep(BUDGET_RETRY_DELAY)
            elif wait:
                await self._session.await_decision(answer.decision, call=call.id)
            else:
                raise DecisionPending(answer.decision, spec.name)
        if name and not tool.has_result(call.id) and await self._can_be_made_again(call, answer):
            return await self.act(spec, arguments, do, name=f"{name}.again", wait=wait)
        if answer.outcome not in ("ok", "error"):
            raise EffectRefused(answer.text, answer.outcome)
        return tool.result(call.id, answer.text)

    async def _can_be_made_again(self, call: Call, answer: Answer) -> bool:
        """Return whether a settled name may be used for a new call: the earlier one failed, or was another call."""
        if answer.outcome != "ok":
            return answer.outcome in ("error", "cancelled")
        for stored in await self._runtime.events():
            if isinstance(made := stored.event, CallStarted) and made.call == call.id:
                redact = self._runtime.redact
                made_text = decode_body(await self._runtime.read_body(stored))
                is_same = made.tool == redact(call.tool) and redact(decode_body(call.arguments)) in (
                    made_text,
                    redact(made_text),
                )
                # A person may have edited the arguments of a call that was asked about.
                return not (is_same or made.decision)
        return False

    async def _try(self, call: Call) -> Answer | ApprovalRequired | BudgetBusy:
        answer = await self._session.make(call)
        self._flush_soon()
        return await self._end_after(answer) if isinstance(answer, Answer) else answer

    async def _end_after(self, answer: Answer) -> Answer:
        """Return an answer; if it ends the session, remember how."""
        self._end = self._end or await self._runtime.find_end(answer)
        return answer

    async def ask(
        self, model: str, sent: str, do: Ask[R], *, max_output_tokens: int = 4096, attached: tuple[Text, ...] = ()
    ) -> R:
        """Make a model request of the caller's own: the guard holds its maximum cost, `do` makes it, the guard settles.

        `sent` is everything that is sent, as text. The journal records it, and its size bounds the input. `attached`
        are the parts that are not text, each with its tokens. `do` gets the number of output tokens that fit the
        budget. Raises EffectRefused if the guard refuses the request, and what `do` raises.
        """
        external_model = self._models.setdefault(model, ExternalModel(model))
        request = self.next_request()
        external_model.expect(request, do)
        message = Message("user", (Text(sent), *attached))
        prompt = Prompt(messages=(message,), max_output_tokens=max_output_tokens)
        match await self.request(ModelRequest(id=request, prompt=prompt, can_defer=self.can_defer), external_model):
            case RefusedRequest(sentence=sentence, outcome=outcome):
                raise EffectRefused(sentence, outcome)
            case FailedRequest(outcome="external_halt" | "timeout" as outcome, error=error):
                raise EffectRefused(error, outcome)
            case AnsweredRequest() | FailedRequest():
                return external_model.result(request)

    def model(self, client: R, *, provider: str = "") -> R:
        """Return a client of the openai or anthropic SDK whose requests pass the guard in this session."""
        return guard_client(client, lambda: nullcontext(self), None, provider)

    def next_request(self) -> str:
        """Return a new id for the next request."""
        return self._session.make_effect_id()

    async def request(self, request: ModelRequest, model: Model) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Make a request to a model of the caller's own. After a halt or at a cap, the session ends."""
        answer = await self._runtime.request(request, model, can_wait_for_cap=False)
        self._flush_soon()
        if isinstance(answer, AnsweredRequest):
            self._end = self._end or (("BUDGET_EXCEEDED", "overrun") if answer.overrun else None)
        else:
            self._end = self._end or _end_of_request(answer.outcome)
        return answer

    @property
    def prices(self) -> Prices:
        return make_prices(self._session.context.policy, self._session.host.app.prices.tables)

    async def wait_until_halted(self) -> EffectRefused:
        """Wait until a halt applies to this session, mark the session as halted, and return the refusal to raise."""
        while await self._runtime.find_halt() is None:
            await self._runtime.pause(HOUR)
        self._end = self._end or ("HALTED", "external_halt")
        return EffectRefused("A halt ended this session.", "external_halt")

    async def is_near_budget(self) -> bool:
        """Return true if a cap of this session, its agent or the fleet is used up except for its reserve."""
        await self.flush_deferred()
        return await self._runtime.is_near_budget()

    until_halted = RenamedAttribute("wait_until_halted")
    near_budget = RenamedAttribute("is_near_budget")

    async def pause(self) -> None:
        """Park the session until a person has decided. Pass its id to `Guard.session` to resume it."""
        if not self._is_parked:
            await self._session.park()
            self._is_parked = True

    async def pause_if_asked(self) -> None:
        """Park the session if a question of it is open: its end would withdraw the question."""
        host = self._session.host
        if self._end is None and await lifecycle.read_questions(host.store, self.id, host.app.clock.now()):
            await self.pause()

    async def receipt(self) -> Receipt:
        """Return the session's receipt up to now."""
        await self.flush_deferred()
        return make_receipt(await self._runtime.events())

    async def end(self, state: State, reason: TerminalReason) -> None:
        """End the session unless it is paused. If the guard stopped it, the guard's state and reason apply instead."""
        self.cancel_flush()
        if self._is_parked:
            return
        if state == "ERROR":
            await self._runtime.ensure_running()
        end = self._end or (state, reason)
        if state == "ERROR" and end[1] == "overrun":
            # The overrun would have ended the session at its next step. The error ended it before.
            end = state, reason
        await self._session.end(*end)

    async def leave_open(self) -> None:
        """Leave the session to its next caller, as after a kill: settle what is deferred, and release the lease."""
        await self.flush_deferred()
        await self._runtime.release()

    async def flush_deferred(self) -> None:
        """Commit the settlements that wait for the session's next commit."""
        await self._runtime.flush_deferred()

    def cancel_flush(self) -> None:
        """Leave the deferred settlements to the session's next commit."""
        self._flush_timer.cancel()

    def _flush_soon(self) -> None:
        if self.can_defer:
            self._flush_timer.start()

    def _make_call(self, tool: str | FunctionTool, arguments: Mapping[str, Any]) -> Call:
        arguments_json = canonical_json(msgspec.to_builtins(dict(arguments)))
        return Call(self.next_request(), name_tool(tool), arguments_json, provenance_check=self._session.call_check)


def guard_client(
    client: R,
    open_session: Callable[[], AbstractAsyncContextManager[GuardedSession]],
    thread: LoopThread | None,
    provider: str,
) -> R:
    from halter.external import sdk_clients

    return sdk_clients.guard_client(client, open_session, thread, provider)


def name_tool(tool: str | FunctionTool) -> str:
    return tool if isinstance(tool, str) else tool.spec.name


def _end_of_request(outcome: Outcome) -> tuple[State, TerminalReason] | None:
    match outcome:
        case "external_halt":
            return ("HALTED", "external_halt")
        case "cost_cap_reached":
            return ("BUDGET_EXCEEDED", "cost_cap_reached")
        case _:
            return None
