"""The two doors of one process, and what they share. Every effect of a session goes through here."""

from collections.abc import Callable, Mapping
from typing import Final

from halter.core.clock import MINUTE, Clock
from halter.core.messages import Model
from halter.core.ports import Lease, Store
from halter.core.processes import LivenessWriter
from halter.core.tools import Tool, Valid
from halter.core.usage import PriceTable
from halter.guard.halts import HaltWatch, Stopped
from halter.guard.ledger import Ledger
from halter.guard.model_door import ModelDoor, StreamMask
from halter.guard.prepare import SessionContext
from halter.guard.tool_door import Answer, CallInDoubt, NeedsPerson, Recovery, Simulator, ToolDoor
from halter.redaction.redact import Redact
from halter.redaction.secrets import Secrets
from halter.state.session import InFlight

REDACTION_MARK: Final = "[redacted:"
"""Prefix of the mark that replaces a secret: arguments with it cannot be sent again."""


class GuardRuntime:
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
        self.ledger = Ledger(store, clock)
        self._clock = clock
        self.redacted = redact
        self._halts = halts = HaltWatch(store, clock)
        models = ModelDoor(store, clock, self.ledger, prices, redact=redact, stream_mask=stream_mask, halts=halts)
        simulator = Simulator(models, clock, simulates)
        self._door = door = ToolDoor(
            store,
            clock,
            self.ledger,
            redact=redact,
            halts=halts,
            print_mask=stream_mask,
            secrets=secrets,
            simulator=simulator,
        )
        self._recovery = Recovery(store, self.ledger, door)
        # Bound here, so that nothing lies between a caller and its door.
        self.call = door.call
        self.admit = door.admit
        self.settle = door.settle
        self.look = door.look
        self.refuse = door.refuse
        self.decision = door.decision
        self.halted = door.halted
        self.request = models.guarded_request
        self.paid_beside = simulator.paid

    def show_in(self, pulse: LivenessWriter) -> None:
        self._halts.pulse = pulse

    async def pause(self, standing: SessionContext, duration: int) -> bool:
        """Sleep; return whether a halt ended it early."""
        try:
            await self._halts.run(self._clock.sleep(duration), standing.scopes, duration + MINUTE)
        except Stopped:
            return True
        return False

    async def near_budget(self, standing: SessionContext) -> bool:
        """Whether the session, its trigger, its agent or the fleet is near a cap."""
        return await self.ledger.near_budget(standing.find_caps)

    async def recover(
        self, lease: Lease, standing: SessionContext, flight: InFlight, arguments: bytes, tools: Mapping[str, Tool]
    ) -> Answer | NeedsPerson:
        """Settle what a crash left in doubt, or ask a person; `arguments` are those of its intent."""
        tool = tools.get(flight.name)
        valid = tool.validate(arguments) if tool and REDACTION_MARK.encode() not in arguments else None
        act = self._door.act(standing, tool, valid if isinstance(valid, Valid) else None)
        return await self._recovery.resolve(lease, CallInDoubt(flight, act))

    async def was_done(self, lease: Lease, flight: InFlight, *, happened: bool) -> Answer:
        return await self._recovery.said(lease, flight, happened=happened)
