"""The verbs of one session, bound to its documents, models and judges."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET
from typing_extensions import TypeIs

from halter.core.events import CallSettled, RequestSettled
from halter.core.ids import Digest
from halter.core.messages import Model, Prompt
from halter.core.ports import Query, Store, load_body
from halter.core.rows import SessionRow
from halter.core.tools import DEFAULT_TOOL_TIMEOUT
from halter.core.usage import Unpriced
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call, SessionContext
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.loop.decide import End, compute_backoff, compute_outage_backoff
from halter.loop.session_runtime import SessionRuntime
from halter.loop.turn import FailedAttempt
from halter.models.price_tables import make_prices
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.document_index import Library, SessionDocuments
from halter.spec.triggers import AnyTrigger, Watch
from halter.tasks.conversation import REVIEW_PHASE
from halter.tasks.playbooks import (
    MAX_PLAYBOOK_DURATION,
    MAX_SKILL_ATTEMPTS,
    RUN_PLAYBOOK,
    RUN_SKILL,
    SKILL_TIMEOUT,
    make_playbook_verb,
    make_skill_verb,
)
from halter.tasks.retrieve import RETRIEVE_CHUNKS, DocumentRef, retrieve_chunks
from halter.tasks.review import MAX_JUDGE_ATTEMPTS, FindingInContext, JudgeAccess, JudgePanel, review_findings
from halter.tasks.task_tools import (
    EMIT_FINDING,
    NOTIFY,
    PROPOSE_MEMORY,
    PROPOSE_PRECEDENT,
    Finding,
    Verb,
    emit_finding,
    notify,
    propose_memory,
    propose_precedent,
)

IN_APP: Final = "in_app"
"""The default channel: notifications stay in the store, and `halter inbox` shows them."""


class FindingBodyRow(msgspec.Struct, frozen=True):
    """A finding as stored; its body is None once erased."""

    finding: str
    severity: str
    support: str
    document: str
    name: str
    review: str
    body: bytes | None
    blob: Digest | None

    def text(self) -> str:
        finding = self.decode()
        quote = f'\n"{finding.quote}" ({self.name}, {self.support})' if finding.quote else ""
        return f"[{self.severity}] {finding.title}\n{finding.text}{quote}".strip()

    def decode(self) -> Finding:
        if not self.body:
            return Finding(title="(erased)", severity="info")
        return msgspec.json.decode(self.body, type=Finding)


class TaskTools:
    """The verbs of one session, with their model requests and reviews. Assign `runtime` before the first call.

    `describe_links` describes the untrusted links in a text; in a session without a model it returns "".
    """

    runtime: SessionRuntime

    def __init__(
        self, agent: AgentRuntime, row: SessionRow, trigger: AnyTrigger | None, own_documents: Sequence[DocumentRef]
    ) -> None:
        self._context = agent
        self._row = row
        tasks = agent.definition.tasks
        collection_names = tasks.collections if trigger is None else _list_collections(trigger)
        collections = {name: tasks.collections[name] for name in collection_names if name in tasks.collections}
        self._documents = (collections, _assign_collections(own_documents, trigger))
        self._remaining: dict[str, int] = {}
        self._has_waited = False
        self.describe_links: Callable[[str], str] = lambda _: ""

    @cached_property
    def documents(self) -> SessionDocuments:
        context = self._context
        library = context.library or Library(context.store, Path())
        return SessionDocuments(library, context.store, *self._documents)

    def verbs(self) -> Sequence[Verb]:
        context, name = self._context, self._context.policy.name
        clock, agent = context.app.clock, context
        if not agent.definition.tasks.verbs:
            return ()
        makers: Mapping[str, Callable[[], Verb]] = {
            RETRIEVE_CHUNKS: lambda: retrieve_chunks(self.documents, clock.now),
            RUN_SKILL: lambda: make_skill_verb(
                agent.definition.skills,
                lambda request, attempt: self._ask_patiently(request, context.model_for("skill"), attempt),
                agent.definition.model_settings.max_output_tokens,
                MAX_PLAYBOOK_DURATION if self._max_outage_backoff else SKILL_TIMEOUT,
            ),
            RUN_PLAYBOOK: lambda: make_playbook_verb(agent.definition.playbooks, self._step, self._count_spent),
            EMIT_FINDING: lambda: emit_finding(name, self.documents.check),
            PROPOSE_MEMORY: lambda: propose_memory(agent.policy, clock),
            PROPOSE_PRECEDENT: lambda: propose_precedent(agent.policy, clock),
            NOTIFY: lambda: notify(
                name,
                self._row.session,
                tuple(channel.name for channel in agent.definition.tasks.notify.channels) or (IN_APP,),
                self._find_reviewed,
                self._mark_links,
                MAX_PLAYBOOK_DURATION
                if self._max_outage_backoff and agent.definition.tasks.review.judges
                else DEFAULT_TOOL_TIMEOUT,
            ),
        }
        return [makers[verb]() for verb in agent.definition.tasks.verbs]

    def _mark_links(self, text: str) -> str:
        return self.describe_links(text)

    async def _step(self, call: Call, remaining: int | None) -> Answer:
        """Run a step of a playbook. The step and its nested steps together spend at most `remaining`."""
        if remaining is not None:
            self._remaining[call.id] = remaining
        try:
            return await self.runtime.call(call, self._narrow_context(call.id))
        finally:
            self._remaining.pop(call.id, None)

    def _narrow_context(self, name: str) -> SessionContext | None:
        """Return the session's context narrowed to the budget of the enclosing steps; None outside of a playbook."""
        budgets = [budget for step, budget in self._remaining.items() if name == step or name.startswith(f"{step}/")]
        return self.runtime.context.narrow(min(budgets), self.runtime.spent_usd) if budgets else None

    async def _count_spent(self, call: str) -> int:
        events = [stored.event for stored in await self.runtime.events()]
        return sum(
            event.cost_micros if isinstance(event, CallSettled) else event.charge.usd if event.charge else 0
            for event in events
            if isinstance(event, CallSettled | RequestSettled)
            if (event.call if isinstance(event, CallSettled) else event.request).startswith(f"{call}/")
        )

    async def _ask(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        if attempt:
            await self.runtime.pause(
                compute_backoff(FailedAttempt("", may_retry=True), attempt, self._context.rng.random())
            )
        return await self.runtime.request(request, model, attempt, context=self._narrow_context(request.id))

    @property
    def _max_outage_backoff(self) -> int:
        """The longest wait between two attempts during an outage; 0 in an attended session."""
        return self._context.definition.model_settings.outage_backoff if self._row.unattended else 0

    async def _ask_patiently(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Send a skill's model request. After its last attempt, an unattended session waits for an outage to end."""
        answer, waiting_since = await self._ask(request, model, attempt), None
        while _passes(answer, last=attempt >= MAX_SKILL_ATTEMPTS - 1):
            waiting_since = await self._wait_out([answer], waiting_since)
            if waiting_since is None:
                return answer
            attempt += 1
            answer = await self.runtime.request(request, model, attempt, context=self._narrow_context(request.id))
        return await self._record_outage_end(answer)

    async def _record_outage_end(
        self, answer: AnsweredRequest | RefusedRequest | FailedRequest
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Record the end of an outage if the session waited for it and the model has answered."""
        if self._has_waited and isinstance(answer, AnsweredRequest):
            self._has_waited = False
            await self.runtime.record_recovery()
        return answer

    async def _wait_out(self, failures: Sequence[FailedRequest], waiting_since: int | None) -> int | None:
        """Wait if a retry or a person can help. Return the time at which the wait began; None if neither can help.

        Of several models, one that may recover is enough.
        """
        recoverable = [failure for failure in failures if failure.may_retry] or [
            failure for failure in failures if failure.needs_person
        ]
        if not self._max_outage_backoff or not recoverable:
            return None
        now, retry_after = self._context.app.clock.now(), max(failure.retry_after or 0 for failure in failures)
        waiting_since = now if waiting_since is None else waiting_since
        sleep = compute_outage_backoff(
            now - waiting_since, retry_after, self._max_outage_backoff, self._context.rng.random()
        )
        trouble = "outage" if recoverable[-1].may_retry else "needs_person"
        self._has_waited = True
        await self.runtime.wait_for_provider(trouble, recoverable[-1].error, sleep)
        return waiting_since

    async def _ask_judge(
        self, request: ModelRequest, model: Model, attempt: int
    ) -> AnsweredRequest | RefusedRequest | FailedRequest:
        """Send a request to a judge. A request that a halt cancelled is retried after the halt is lifted."""
        answer = await (
            self._ask(request, model, attempt)
            if attempt < MAX_JUDGE_ATTEMPTS
            else self.runtime.request(request, model, attempt, context=self._narrow_context(request.id))
        )
        if isinstance(answer, AnsweredRequest):
            return await self._record_outage_end(answer)
        if answer.outcome != "external_halt" or await self.runtime.find_halt() is not None:
            return answer
        cost = answer.cost_usd if isinstance(answer, FailedRequest) else 0
        return FailedRequest(answer.request, "cancelled", "A halt cancelled the request.", cost, may_retry=True)

    async def _rows(self) -> Sequence[FindingBodyRow]:
        store: Store = self._context.store
        rows = await store.ask(Query("findings_of", FindingBodyRow, {"session": self._row.session}))
        return [
            msgspec.structs.replace(row, body=await load_body(store, row.body, row.blob), blob=None) for row in rows
        ]

    async def _find_reviewed(self) -> Mapping[str, tuple[str, str]]:
        """Return the review and the text of each finding, after the configured judges have reviewed them."""
        await self.review()
        return {row.finding: (row.review, row.text()) for row in await self._rows()}

    async def review(self, *, phase: bool = False) -> End | None:
        policy, tasks = self._context.policy, self._context.definition.tasks
        if not phase and (not tasks.review.judges or any(each.name == REVIEW_PHASE for each in policy.phases)):
            return None
        findings = [await self._render_finding(row) for row in await self._rows()]
        access = JudgeAccess(self._price, self._ask_judge, self._wait_out, self.runtime.write)
        end = await review_findings(self._row.session, findings, self._judging(), access)
        if end is None and self.runtime.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        halt = None if end is None else await self.runtime.find_halt()
        return End("CANCELLED", "cancelled") if halt is not None and halt.cancels else end

    async def _render_finding(self, row: FindingBodyRow) -> FindingInContext:
        source = await self.documents.read_context(row.document, row.decode().quote) if row.document else ""
        return FindingInContext(row.finding, row.text(), row.support, source, reviewed=row.review != "")

    def _judging(self) -> JudgePanel:
        review, context = self._context.definition.tasks.review, self._context
        judges = tuple(context.models.get(name) for name in review.judges) or (context.model_for("judge"),)
        cap = None if review.max_cost_per_message_usd is UNSET else review.max_cost_per_message_usd
        return JudgePanel(judges, review.instructions, cap)

    def _price(self, model: Model, prompt: Prompt) -> int | None:
        """Compute the amount to hold for a request: its maximum cost. None for a model without a price."""
        context = self._context
        rates = make_prices(context.policy, context.app.prices.tables).find(model.name, model.base_url)
        if isinstance(rates, Unpriced):
            return None
        return rates.bound(model.count(prompt), prompt.max_output_tokens, self._context.app.clock.now())


def _passes(answer: AnsweredRequest | RefusedRequest | FailedRequest, *, last: bool) -> TypeIs[FailedRequest]:
    """Return true if a request failed for a reason that time or a person can remove."""
    return isinstance(answer, FailedRequest) and ((answer.may_retry and last) or answer.needs_person)


def _list_collections(trigger: AnyTrigger) -> tuple[str, ...]:
    watched = (trigger.collection,) if isinstance(trigger, Watch) and trigger.collection is not UNSET else ()
    return (*trigger.collections, *watched)


def _assign_collections(refs: Sequence[DocumentRef], trigger: AnyTrigger | None) -> Sequence[DocumentRef]:
    """Set the collection of a watch's own documents to the one that it watches."""
    if not isinstance(trigger, Watch) or trigger.collection is UNSET:
        return refs
    return [msgspec.structs.replace(document, collection=trigger.collection) for document in refs]
