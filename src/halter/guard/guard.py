"""The guard of one process: the only way to call tools and models."""

from collections.abc import Callable, Mapping
from typing import Final

from halter.core.clock import MINUTE, Clock
from halter.core.messages import FileReader, Model
from halter.core.ports import Lease, Store
from halter.core.tools import Tool, Valid
from halter.core.usage import PriceTable
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.halts import Departures, EffectStopped, HaltWatch
from halter.guard.ledger import Ledger
from halter.guard.model_door import ModelDoor, PromptLog
from halter.guard.prepare import SessionContext
from halter.guard.recovery import CallInDoubt, Recovery
from halter.guard.sensor_reads import SensorReads
from halter.guard.simulation import Simulator
from halter.guard.tool_door import ToolDoor
from halter.guard.unmade_calls import UnmadeCalls
from halter.redaction.answer_stream import StreamMask
from halter.redaction.redact import Redact
from halter.redaction.secrets import Secrets
from halter.state.session import InFlight
from halter.system.liveness import LivenessWriter

REDACTION_MARK: Final = "[redacted:"
"""Prefix of the mark that replaces a secret: arguments with it cannot be sent again."""


class GuardRuntime:
    """The two doors of one process, and the ledger, halts and recovery that they share."""

    def __init__(  # noqa: PLR0913 Its doors need each of these, and half have a default.
        self,
        store: Store,
        clock: Clock,
        *,
        redact: Redact,
        secrets: Secrets,
        prices: PriceTable,
        simulates: Model | None = None,
        stream_mask: Callable[[], StreamMask] | None = None,
        read_files: FileReader | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = ledger = ledger or Ledger(store, clock)
        self._clock = clock
        self.redact = redact
        self._halts = halts = HaltWatch(store, clock)
        models = ModelDoor(store, clock, ledger, prices, redact=redact, stream_mask=stream_mask, halts=halts)
        self._models = models
        simulator = Simulator(models, clock, simulates)
        self._tool_door = door = ToolDoor(
            store,
            clock,
            ledger,
            redact=redact,
            halts=halts,
            print_mask=stream_mask,
            secrets=secrets,
            simulator=simulator,
            read_files=read_files,
        )
        self._recovery = Recovery(store, ledger, door)
        unmade_calls = UnmadeCalls(store, ledger, door.preparer, redact)
        # Bound here: no frame is between a caller and its door.
        self.call = door.call
        self.admit = door.admit
        self.ask = unmade_calls.ask
        self.depends_on_staged = unmade_calls.depends_on_staged
        self.settle = door.settle
        self.call_read_only = SensorReads(door, clock).call
        self.refuse = unmade_calls.refuse
        self.decision = door.preparer.find_decision
        self.find_halt = door.preparer.find_halt
        self.find_halt_in = halts.find
        self.request = models.request
        self.unattributed_cost = simulator.costs

    def join_process(self, liveness: LivenessWriter, departures: Departures, prompts: PromptLog | None = None) -> None:
        """Show the effects in flight to the process's sentinel, and leave them in flight when the process leaves.

        The process's traces get the prompts.
        """
        self._halts.liveness = liveness
        self._halts.departures = departures
        self._models.prompts = prompts or self._models.prompts

    async def pause(self, context: SessionContext, duration: int) -> bool:
        """Sleep; return whether a halt ended it early."""
        try:
            await self._halts.run(self._clock.sleep(duration), context.scopes, duration + MINUTE)
        except EffectStopped:
            return True
        return False

    async def is_near_budget(self, context: SessionContext) -> bool:
        """Return whether the session, its trigger, its agent or the fleet is near a cap."""
        return await self.ledger.is_near_budget(context.prepare_cap_check)

    async def recover(
        self, lease: Lease, context: SessionContext, flight: InFlight, arguments: bytes, tools: Mapping[str, Tool]
    ) -> Answer | ApprovalRequired:
        """Settle a call or request in doubt, or ask a person; `arguments` are those of its intent."""
        tool = tools.get(flight.name)
        valid = tool.validate(arguments) if tool and REDACTION_MARK.encode() not in arguments else None
        execution = self._tool_door.preparer.make_execution(context, tool, valid if isinstance(valid, Valid) else None)
        return await self._recovery.resolve(lease, CallInDoubt(flight, execution, context.policy.question_terms))

    async def was_done(self, lease: Lease, flight: InFlight, *, happened: bool) -> Answer:
        return await self._recovery.settle_by_person(lease, flight, happened=happened)
