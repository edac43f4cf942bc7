"""The two doors of one process, and what they share. Whoever acts for a session goes through here.

A session comes with its lease and its standing. What it brings is looked at from all sides before any row is locked:
the tool and its price, rules by which a person said "always", arguments that a person put in place, a prediction.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.events import CallRefused
from halter.core.ids import inbox_stream, session_stream
from halter.core.messages import Model
from halter.core.ports import BLOB_FROM, Draft, Lease, Query, Store, Write, said
from halter.core.pulse import Pulse
from halter.core.rows import AuditRow, DecisionRow, HaltRow, RuleRow
from halter.core.text import clean, from_body, to_body
from halter.core.tools import Tool, Valid, secret_names
from halter.core.usage import PriceTable
from halter.core.vocabulary import Outcome
from halter.guard.ask import Call, Prepared, Standing, prepare
from halter.guard.chokepoint import Act, Answer, Door, NeedsPerson
from halter.guard.flight import Redact, StillHeld
from halter.guard.halts import HaltWatch
from halter.guard.judge import Asked
from halter.guard.purse import Purse
from halter.guard.recovery import Doubt, Recovery
from halter.guard.request import ModelDoor, Request, RequestOutcome
from halter.guard.secrets import Secrets
from halter.guard.simulation import Paid, Simulated, Simulator
from halter.guard.voice import StreamMask
from halter.state.session import InFlight

REDACTED: Final = "[redacted:"
"""How a mark begins that stands where a secret was: such arguments cannot be sent again."""


class _Looked(NamedTuple):
    """A look as it was prepared once: whose it is, with which tool, what the judge is asked and what then runs."""

    standing: Standing
    tool: Tool | None
    asked: Asked
    act: Act | None


class Gatehouse:
    """Guards every tool call and every model request of the sessions of one process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        redact: Redact,
        secrets: Secrets,
        prices: PriceTable,
        simulates: Model | None = None,
        stream_mask: Callable[[], StreamMask] | None = None,
    ) -> None:
        self.purse = Purse(store, clock)
        self._store = store
        self._clock = clock
        self._secrets = secrets
        self._redact = redact
        self._halts = halts = HaltWatch(store, clock)
        self._door = Door(store, clock, self.purse, redact=redact, halts=halts, print_mask=stream_mask)
        self._models = ModelDoor(store, clock, self.purse, prices, redact=redact, stream_mask=stream_mask, halts=halts)
        self._simulator = Simulator(self._models, clock, simulates)
        self._recovery = Recovery(store, self.purse, self._door)
        self._looked_at: dict[tuple[str, bytes, int | None], _Looked] = {}

    def show_in(self, pulse: Pulse) -> None:
        """Show in the pulse of the process what is in flight, for a sentinel outside."""
        self._halts.pulse = pulse

    async def call(
        self, lease: Lease, standing: Standing, call: Call, tools: Mapping[str, Tool], attempt: int = 0
    ) -> Answer | NeedsPerson | StillHeld:
        """Take one call through the whole order; after a refusal or a decision, a further attempt does so again."""
        if attempt:
            asked = await self.decision(f"{call.id}/approval")
            if asked is not None and await self._waits(asked, standing):
                return NeedsPerson(call.id, asked.decision)
            call = msgspec.structs.replace(call, edited=await self._edited(standing, asked))
        if call.tool not in tools:
            call = msgspec.structs.replace(call, tool=self._redact(clean(call.tool)))
        prepared = await self._prepared(standing, call, tools.get(call.tool))
        simulation = "" if attempt else await self._foreseen(lease, standing, prepared)
        if simulation:
            prepared = _shown_with(prepared, simulation)
        act = self._act(standing, prepared.tool, prepared.arguments, call.at_most, goes_on=call.goes_on)
        answer = await self._door.guarded_tool_call(lease, prepared.asked, act, attempt)
        return answer if isinstance(answer, StillHeld) else msgspec.structs.replace(answer, simulation=simulation)

    async def look(
        self, lease: Lease, standing: Standing, call: Call, tools: Mapping[str, Tool]
    ) -> Answer | NeedsPerson | StillHeld:
        """Let somebody look who does so again and again; what is more than a look goes through the whole order."""
        tool, again = tools.get(call.tool), (call.tool, call.arguments, call.at_most)
        known = self._looked_at.get(again)
        if known is None or known.standing is not standing or known.tool is not tool:
            prepared = await self._prepared(standing, call, tool)
            if not prepared.asked.only_looks:
                return await self.call(lease, standing, call, tools)
            act = self._act(standing, prepared.tool, prepared.arguments, call.at_most)
            known = self._looked_at[again] = _Looked(standing, tool, prepared.asked, act)
        asked = msgspec.structs.replace(known.asked, call=call.id, now=self._clock.now())
        return await self._door.guarded_look(asked, known.act)

    def paid_beside(self, session: str) -> Paid:
        """Tell what predictions of a session's calls have cost since this was asked last."""
        return self._simulator.paid(session)

    async def refuse(self, lease: Lease, calls: Sequence[Call], outcome: Outcome, sentence: str) -> Sequence[Answer]:
        """Refuse calls that are not even looked at, all in one write."""
        sentence = self._redact(sentence)
        drafts = [
            Draft(
                CallRefused(
                    call=call.id, tool=self._redact(clean(call.tool))[:200], outcome=outcome, sentence=sentence
                ),
                to_body(self._redact(from_body(call.arguments[:BLOB_FROM]))),
            )
            for call in calls
        ]
        stream, rows = session_stream(lease.session), [(AuditRow, (call.id,)) for call in calls]
        await self.purse.commit(Write(stream, f"{calls[0].id}/refused", lambda _: drafts, rows, lease))
        return [Answer(call.id, outcome, sentence) for call in calls]

    async def pause(self, standing: Standing, duration: int) -> bool:
        """Let time pass, unless a halt comes first; tell whether one did."""
        with self._halts.listening(standing.scopes()) as halted:
            done, _ = await asyncio.wait((halted,), timeout=duration / SECOND)
        return bool(done)

    async def request(
        self, lease: Lease, standing: Standing, request: Request, model: Model, attempt: int = 0, waited: int = 0
    ) -> RequestOutcome:
        """Take one request through the whole order."""
        return await self._models.guarded_request(lease, standing, request, model, attempt, waited)

    async def recover(
        self, lease: Lease, standing: Standing, flight: InFlight, arguments: bytes, tools: Mapping[str, Tool]
    ) -> Answer | NeedsPerson:
        """Bring to an outcome, or before a person, what a crash left in doubt; `arguments` are those of its intent."""
        tool = tools.get(flight.name)
        valid = tool.validate(arguments) if tool and REDACTED.encode() not in arguments else None
        act = self._act(standing, tool, valid if isinstance(valid, Valid) else None)
        return await self._recovery.resolve(lease, Doubt(flight, act))

    async def was_done(self, lease: Lease, flight: InFlight, *, happened: bool) -> Answer:
        """Settle a call in doubt as a person says."""
        return await self._recovery.said(lease, flight, happened=happened)

    async def decision(self, decision: str) -> DecisionRow | None:
        """Look up what became of a decision."""
        return next(iter(await self._store.ask(Query("decision", DecisionRow, {"decision": decision}))), None)

    async def halted(self, standing: Standing) -> HaltRow | None:
        """Look up by whom one of a session's scopes is halted."""
        rows = {row.scope: row for row in await self._store.ask(Query("all_halts", HaltRow)) if row.halted}
        return next((rows[scope] for scope in standing.scopes() if scope in rows), None)

    def redacted(self, text: str) -> str:
        """Take secrets out of what somebody wants to write down elsewhere."""
        return self._redact(text)

    async def _prepared(self, standing: Standing, call: Call, tool: Tool | None) -> Prepared:
        now, usd = self._clock.now(), await self._bound(tool)
        prepared = prepare(standing, call, tool, now, usd)
        if prepared.asked.approval is None:
            return prepared
        rules = [row for row in await self._rules() if row.tool == call.tool]
        return prepare(standing, call, tool, now, usd, rules) if rules else prepared

    async def _bound(self, tool: Tool | None) -> int:
        """Tell what is held for a call: what the tool declares, or what its calls have cost so far."""
        if tool is None:
            return 0
        cost = tool.spec.cost
        return (await self.purse.forecast(tool.spec.name)).bound if cost == "learned" else cost

    async def _rules(self) -> Sequence[RuleRow]:
        return await self._store.ask(Query("all_rules", RuleRow))

    async def _waits(self, asked: DecisionRow, standing: Standing) -> bool:
        """Tell whether a decision is still waited for: not when it has expired, nor under a halt, which goes first."""
        undecided = not asked.verdict and self._clock.now() < asked.expires_at
        return undecided and await self.halted(standing) is None

    async def _edited(self, standing: Standing, asked: DecisionRow | None) -> bytes | None:
        """Read the arguments that a person put in place of those that were asked about."""
        if asked is None or asked.verdict != "edit":
            return None
        (stored,) = await self._store.read(inbox_stream(standing.session), asked.decided_seq - 1, 1)
        return await said(self._store, stored)

    async def _foreseen(self, lease: Lease, standing: Standing, prepared: Prepared) -> str:
        foreseen = await self._simulator.simulate(lease, standing, prepared)
        return foreseen.text if isinstance(foreseen, Simulated) else ""

    def _act(
        self,
        standing: Standing,
        tool: Tool | None,
        arguments: Valid | None,
        at_most: int | None = None,
        *,
        goes_on: bool = False,
    ) -> Act | None:
        """Put together what it takes to run a call: of the secrets those that it refers to, and no others."""
        names = secret_names(arguments.canonical) if arguments else frozenset[str]()
        if tool is None or arguments is None or not names <= standing.secrets:
            return None
        secrets = {name: self._secrets.value(name) for name in names}
        return Act(tool, arguments, secrets, standing.scopes(), at_most, goes_on)


def _shown_with(prepared: Prepared, simulation: str) -> Prepared:
    """Show a prediction to the person who is asked. It is bound by no digest: it is no part of what they agree to."""
    need = prepared.asked.approval
    if need is None:
        return prepared
    shown = msgspec.structs.replace(need, shown=need.shown + b"\n" + to_body(simulation))
    asked = msgspec.structs.replace(prepared.asked, approval=shown)
    return msgspec.structs.replace(prepared, asked=asked)
