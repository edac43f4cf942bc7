"""What a task session has beside its agent's own tools: verbs, documents, phases and a reviewer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET

from halter.app.agent_context import AgentContext
from halter.app.shelves import Library, SessionShelves
from halter.brain.decide import End, back_off
from halter.brain.loop import Loop
from halter.brain.session_runtime import SessionRuntime
from halter.brain.turn import Failure
from halter.core.events import CallSettled, FindingReviewed, JudgesChosen, RequestSettled
from halter.core.ids import Digest
from halter.core.messages import Model, Prompt
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow
from halter.core.spec import Phase
from halter.core.tasks import AnyTrigger, Watch
from halter.core.text import from_body
from halter.core.tools import Tool, ToolSpec
from halter.core.usage import Unpriced
from halter.guard.ask import Call, Standing
from halter.guard.chokepoint import Answer
from halter.guard.request import Answered, FailedRequest, RefusedRequest, Request
from halter.models.prices import Prices
from halter.work.leaving import (
    EMIT_FINDING,
    NOTIFY,
    PROPOSE_MEMORY,
    PROPOSE_PRECEDENT,
    Finding,
    emit_finding,
    notify,
    propose_memory,
    propose_precedent,
)
from halter.work.phases import Walk
from halter.work.retrieve import RETRIEVE_CHUNKS, Shelved, retrieve_chunks
from halter.work.review import Found, Judging, review
from halter.work.run_playbook import RUN_PLAYBOOK, run_playbook
from halter.work.skills import RUN_SKILL, run_skill
from halter.work.verbs import Verb

IN_APP: Final = "in_app"
"""The channel that is always there: what is told over it stands in the store, and `halter inbox` shows it."""


MOST_KEPT: Final = 100
"""So many memories, the newest, and so many precedents, the most frequent, a session is given."""


class FoundRow(msgspec.Struct, frozen=True):
    """A finding as it stands in the store, with its words where they are still there."""

    finding: str
    severity: str
    support: str
    document: str
    name: str
    review: str
    body: bytes | None
    blob: Digest | None

    def words(self) -> str:
        """Put the finding into words for people."""
        read = self.read()
        quote = f'\n"{read.quote}" ({self.name}, {self.support})' if read.quote else ""
        return f"[{self.severity}] {read.title}\n{read.text}{quote}".strip()

    def read(self) -> Finding:
        """Read what was found; what was erased is told as such."""
        if not self.body:
            return Finding(title="(erased)", severity="info")
        return msgspec.json.decode(self.body, type=Finding)


class Tasking:
    """Makes the verbs of one session. They act through its `running`, which is there before any of them is called."""

    running: SessionRuntime

    def __init__(
        self, speaking: AgentContext, row: SessionRow, trigger: AnyTrigger | None, own: Sequence[Shelved]
    ) -> None:
        self._speaking = speaking
        self._row = row
        tasks = speaking.agent.tasks
        named = tasks.collections if trigger is None else _named(trigger)
        collections = {name: tasks.collections[name] for name in named if name in tasks.collections}
        library = speaking.agent.library or Library(speaking.store, Path())
        self.shelves = SessionShelves(library, speaking.store, collections, _placed(own, trigger))
        self._left: dict[str, int] = {}

    def verbs(self) -> Sequence[Verb]:
        """Make those verbs that the agent's file asks for."""
        speaking, name = self._speaking, self._speaking.agent.policy.name
        clock, agent = speaking.app.clock, speaking.agent
        makers: Mapping[str, Callable[[], Verb]] = {
            RETRIEVE_CHUNKS: lambda: retrieve_chunks(self.shelves, clock.now),
            RUN_SKILL: lambda: run_skill(agent.skills, self._ask_by_skill, agent.mind.max_output_tokens),
            RUN_PLAYBOOK: lambda: run_playbook(agent.playbooks, self._step, self._spent_in),
            EMIT_FINDING: lambda: emit_finding(name, self.shelves.check),
            PROPOSE_MEMORY: lambda: propose_memory(name, clock),
            PROPOSE_PRECEDENT: lambda: propose_precedent(name, clock),
            NOTIFY: lambda: notify(name, self._row.session, self._channels(), self._found),
        }
        return [makers[verb]() for verb in agent.tasks.verbs]

    def walk(self, loop: Loop, phases: Sequence[Phase], tools: Mapping[str, Tool]) -> Walk:
        """Make the pace of a task."""
        agent = self._speaking.agent

        def offered(phase: Phase) -> tuple[ToolSpec, ...]:
            return tuple(
                tool.spec
                for name, tool in tools.items()
                if name not in agent.policy.disabled and name not in agent.quarantined and phase.grants_tool(name)
            )

        return Walk(self.running, loop, phases, offered, self._review)

    def _channels(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._speaking.agent.tasks.notify.channels) or (IN_APP,)

    async def _step(self, call: Call, left: int | None) -> Answer:
        """Take a step of a playbook; neither it nor what is done inside of it spends more than is left."""
        if left is not None:
            self._left[call.id] = left
        try:
            return await self.running.call(call, self._standing(call.id))
        finally:
            self._left.pop(call.id, None)

    def _standing(self, name: str) -> Standing | None:
        """Tell how narrow a call or a request stands, by what it is done inside of."""
        within = [left for outer, left in self._left.items() if name == outer or name.startswith(f"{outer}/")]
        return self.running.standing.within(min(within), self.running.spent.usd) if within else None

    async def _spent_in(self, call: str) -> int:
        events = [stored.event for stored in await self.running.events()]
        return sum(
            event.charge.usd
            for event in events
            if isinstance(event, CallSettled | RequestSettled) and event.charge is not None
            if (event.call if isinstance(event, CallSettled) else event.request).startswith(f"{call}/")
        )

    async def _ask_by_skill(self, request: Request, attempt: int) -> Answered | RefusedRequest | FailedRequest:
        return await self._ask(request, self._speaking.model_for("skill"), attempt)

    async def _ask(self, request: Request, model: Model, attempt: int) -> Answered | RefusedRequest | FailedRequest:
        if attempt:
            await self.running.pause(back_off(Failure("", may_retry=True), attempt, self._speaking.chance.random()))
        return await self.running.request(request, model, attempt, standing=self._standing(request.id))

    async def _ask_judge(
        self, request: Request, model: Model, attempt: int
    ) -> Answered | RefusedRequest | FailedRequest:
        """Ask a judge. One who was stopped by a halt that is lifted by now has not been heard, and is asked again."""
        answer = await self._ask(request, model, attempt)
        if isinstance(answer, Answered) or answer.outcome != "external_halt" or await self.running.halted() is not None:
            return answer
        cost = answer.cost_usd if isinstance(answer, FailedRequest) else 0
        return FailedRequest(answer.request, "cancelled", "A halt stopped it.", cost, may_retry=True)

    async def _rows(self) -> Sequence[FoundRow]:
        store: Store = self._speaking.store
        rows = await store.ask(Query("findings_of", FoundRow, {"session": self._row.session}))
        return [await _whole(store, row) for row in rows]

    async def _found(self) -> Mapping[str, tuple[str, str]]:
        return {row.finding: (row.review, row.words()) for row in await self._rows()}

    async def _review(self) -> End | None:
        """Let others look at what was found."""
        found = [await self._shown(row) for row in await self._rows()]
        stopped = await review(self._row.session, found, self._judging(), self._price, self._ask_judge, self._write)
        if stopped is None and self.running.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        halt = None if stopped is None else await self.running.halted()
        return End("CANCELLED", "cancelled") if halt is not None and halt.cancels else stopped

    async def _shown(self, row: FoundRow) -> Found:
        source = await self.shelves.around(row.document, row.read().quote) if row.document else ""
        return Found(row.finding, row.words(), row.support, source, reviewed=row.review != "")

    def _judging(self) -> Judging:
        said, speaking = self._speaking.agent.tasks.review, self._speaking
        judges = tuple(speaking.models.named(name) for name in said.judges) or (speaking.model_for("judge"),)
        cap = None if said.max_cost_per_message_usd is UNSET else said.max_cost_per_message_usd
        return Judging(judges, said.instructions, cap)

    def _price(self, model: Model, prompt: Prompt) -> int | None:
        """Tell what a request may cost at most: as much as will be held for it."""
        rates = Prices(self._speaking.agent.policy.prices).find(model.name, model.base_url)
        if isinstance(rates, Unpriced):
            return None
        return rates.bound(model.count(prompt), prompt.max_output_tokens, self._speaking.app.clock.now())

    async def _write(self, key: str, event: FindingReviewed | JudgesChosen, body: bytes | None) -> None:
        await self.running.write(key, event, body)


def _named(trigger: AnyTrigger) -> tuple[str, ...]:
    """Name the collections that a trigger's sessions may read."""
    own = (trigger.collection,) if isinstance(trigger, Watch) and trigger.collection is not UNSET else ()
    return (*trigger.collections, *own)


def _placed(own: Sequence[Shelved], trigger: AnyTrigger | None) -> Sequence[Shelved]:
    """Let a document that a watch found in a collection stand in that collection."""
    if not isinstance(trigger, Watch) or trigger.collection is UNSET:
        return own
    return [msgspec.structs.replace(each, collection=trigger.collection) for each in own]


async def _whole(store: Store, row: FoundRow) -> FoundRow:
    """Have a finding's words at hand, wherever they are kept."""
    if row.blob is None:
        return row
    try:
        return msgspec.structs.replace(row, body=await store.get(row.blob), blob=None)
    except KeyError:
        return row


async def given(store: Store, agent: str) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Put together what people kept of earlier sessions: the names of it all, and the words."""
    memories = (await store.ask(Query("kept_memories", _Memory, {"agent": agent})))[-MOST_KEPT:]
    precedents = (await store.ask(Query("kept_precedents", _Precedent, {"agent": agent})))[:MOST_KEPT]
    lines = [f"- {await _said(store, row.body, row.blob)} ({row.memory})" for row in memories]
    cases = [
        f"- {row.kind}: {await _said(store, row.body, row.blob)} (seen {row.observed_count} times, {row.precedent})"
        for row in precedents
    ]
    parts = [
        *(["What people want you to remember:", *lines] if lines else []),
        *(["Cases you have met before:", *cases] if cases else []),
    ]
    return tuple(row.memory for row in memories), tuple(row.precedent for row in precedents), "\n".join(parts)


class _Memory(msgspec.Struct, frozen=True):
    memory: str
    body: bytes | None
    blob: Digest | None


class _Precedent(msgspec.Struct, frozen=True):
    precedent: str
    kind: str
    observed_count: int
    body: bytes | None
    blob: Digest | None


async def _said(store: Store, body: bytes | None, blob: Digest | None) -> str:
    if blob is not None:
        try:
            body = await store.get(blob)
        except KeyError:
            body = None
    return "(erased)" if body is None else from_body(body)
