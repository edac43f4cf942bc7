"""The preparation of a call: what is read before the judge decides, without a lock."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from halter.core.clock import Clock
from halter.core.ids import inbox_stream
from halter.core.ports import Query, Store, read_body
from halter.core.rows import DecisionRow, HaltRow, HoldRow
from halter.core.text import clean
from halter.core.tools import DOLLAR, Tool, Valid, find_secret_names
from halter.guard.approvals import read_rules
from halter.guard.call_answer import ApprovalRequired
from halter.guard.halts import HaltWatch
from halter.guard.ledger import Ledger
from halter.guard.prepare import Call, PreparedCall, SessionContext, prepare_call
from halter.redaction.redact import Redact
from halter.redaction.secrets import Secrets

NO_VALUES: Final[Mapping[str, str]] = MappingProxyType({})


class ToolExecution(msgspec.Struct, frozen=True):
    """A validated tool call, ready to run: the tool, its arguments and secrets, and the scopes whose halt stops it.

    With `can_defer` the settlement may be deferred to the session's next commit. The tool asks `is_near_budget`, which
    uses the `ledger` and the `context`.
    """

    tool: Tool
    arguments: Valid
    secrets: Mapping[str, str]
    scopes: tuple[str, ...]
    timeout: int
    can_defer: bool = False
    ledger: Ledger | None = None
    context: SessionContext | None = None

    async def is_near_budget(self) -> bool:
        if self.ledger is None or self.context is None:
            return False
        return await self.ledger.is_near_budget(self.context.prepare_cap_check)


class CallPreparer:
    """Reads what a call needs before the judge decides: a person's answer, the forecast of its cost, standing rules."""

    def __init__(
        self, store: Store, clock: Clock, ledger: Ledger, halts: HaltWatch, secrets: Secrets, redact: Redact
    ) -> None:
        self._store = store
        self._clock = clock
        self._ledger = ledger
        self._halts = halts
        self._secrets = secrets
        self._redact = redact

    async def prepare(
        self, context: SessionContext, call: Call, tool: Tool | None, attempt: int = 0
    ) -> PreparedCall | ApprovalRequired:
        """Prepare a call. After the first attempt a person's decision counts; while it is pending, nothing is prepared.

        A person may have edited the arguments.
        """
        if attempt or call.decision:
            decision = await self.find_decision(call.approval)
            if decision is not None and await self._is_pending(decision, context):
                return ApprovalRequired(call.id, decision.decision)
            if decision is not None:
                edited_arguments = await self._read_edited_arguments(context, decision)
                call = msgspec.structs.replace(call, edited_arguments=edited_arguments, has_decision=True)
        if tool is None:
            # The name of an unknown tool is the model's text.
            call = msgspec.structs.replace(call, tool=self._redact(clean(call.tool)))
        now, usd, hold = self._clock.now(), 0, None
        if call.has_decision and (tool is None or tool.spec.cost):
            hold = await self.find_question_hold(context.session, call.approval)
        if tool is not None:
            cost = tool.spec.cost
            usd = await self._forecast_cost(tool.spec.name, hold) if cost == "learned" else cost
        prepared = prepare_call(context, call, tool, now, usd)
        approval = prepared.request.approval
        if approval is not None:
            same = approval.arguments_digest
            rules = await read_rules(self._store, call.tool, same, context.session, context.agent, now)
            prepared = prepare_call(context, call, tool, now, usd, rules) if rules else prepared
        if hold is None:
            return prepared
        request = msgspec.structs.replace(prepared.request, question_hold=hold)
        return msgspec.structs.replace(prepared, request=request)

    async def _forecast_cost(self, name: str, hold: HoldRow | None) -> int:
        """Forecast the maximum cost of a call; a person who was asked has agreed to what the question holds."""
        if hold is None:
            return (await self._ledger.forecast(name)).bound
        return max([leg.amount for leg in hold.decode_legs() if leg.unit == "usd"], default=0)

    async def _is_pending(self, decision: DecisionRow, context: SessionContext) -> bool:
        """Return whether a decision is pending. It is not after it expired, nor during a halt."""
        is_undecided = not decision.verdict and self._clock.now() < decision.expires_at
        return is_undecided and await self.find_halt(context) is None

    async def _read_edited_arguments(self, context: SessionContext, decision: DecisionRow) -> bytes | None:
        """Read the arguments that a person entered in place of the model's; None if the decision is not an edit."""
        if decision.verdict != "edit":
            return None
        (stored,) = await self._store.read(inbox_stream(context.session), decision.decided_seq - 1, 1)
        return await read_body(self._store, stored)

    def make_execution(
        self, context: SessionContext, tool: Tool | None, arguments: Valid | None, call: Call | None = None
    ) -> ToolExecution | None:
        """Make the execution of a call, with only the secrets to which its arguments refer.

        Returns None if there is no tool, the arguments are invalid, or a secret is not granted.
        """
        if tool is None or arguments is None:
            return None
        secrets = NO_VALUES
        if DOLLAR in arguments.canonical:
            names = find_secret_names(arguments.canonical)
            if not names <= context.secrets:
                return None
            secrets = dict(zip(names, map(self._secrets.value, names), strict=True))
        timeout, can_defer = tool.spec.timeout, False
        if call is not None:
            timeout, can_defer = timeout if call.timeout is None else min(timeout, call.timeout), call.can_defer
        return ToolExecution(tool, arguments, secrets, context.scopes, timeout, can_defer, self._ledger, context)

    async def find_decision(self, decision: str) -> DecisionRow | None:
        return next(iter(await self._store.ask(Query("decision", DecisionRow, {"decision": decision}))), None)

    async def find_question_hold(self, session: str, decision: str) -> HoldRow | None:
        holds = await self._store.ask(Query("hold", HoldRow, {"hold": decision}))
        return next((hold for hold in holds if hold.session == session), None)

    async def find_halt(self, context: SessionContext) -> HaltRow | None:
        return await self._halts.find(context.scopes)
